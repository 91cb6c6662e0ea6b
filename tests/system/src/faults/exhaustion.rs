//! Exhausted memory, address space, descriptors and disk.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Resource, Rlimit};

use xtask_common::executor::Executor;
use xtask_common::progress::Progress;

use super::guest::{Guest, HANG, Outcome, Program};
use super::leaks::{ResourceUsage, expect_no_more};
use super::setup::{Row, Setup, TOKENS, exists};

/// Device memory for one guest, but not for two. The model takes some 21 MiB on the host, its
/// context and graphs some 10 MiB.
const FOR_ONE: &str = "48M";

/// What a guest is told of it: how much it wanted, and how much was free.
const NUMBERS: &str = " of 48.0 MiB free";

/// What a limit of the executor does.
const LIMITED: &str = "loads fail under the limit and work without it; another guest has the same \
                       tokens; the executor keeps running and leaks nothing";

/// Tokens of a generation during which another guest is refused.
const LONG: usize = 400;

/// Bytes of address space that suffice for a session, but not for a model.
const LITTLE: u64 = 16 << 20;

/// The host's memory is full: the second guest cannot load, and the first is not affected.
pub(super) fn memory(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    const NAME: &str = "full";
    let times = setup.counts.others;
    let executor = setup.serve(NAME, &["--memory", FOR_ONE])?;
    let mut first = setup.guest(NAME, "full-first")?;
    let mut second = setup.guest(NAME, "full-second")?;
    first.begin(LONG)?;
    let long = first.end()?.tokens()?;
    let before = ResourceUsage::of(executor.pid())?;
    for round in 0..times {
        first.begin(LONG)?;
        first.token()?;
        second.begin(TOKENS)?;
        let outcome = second.end()?;
        ensure!(
            matches!(outcome, Outcome::Failed(_)),
            "two guests fit into {FOR_ONE}, so nothing was tested: {outcome:?}"
        );
        ensure!(
            first.end()?.tokens()? == long,
            "the first guest generated other tokens"
        );
        setup.expect_run(&mut second, "the second guest, after memory is free")?;
        progress.note(&format!("{} of {times}", round + 1));
    }
    expect_no_more(executor.pid(), &before, "the executor", HANG)?;
    ensure!(
        second.log().contains(NUMBERS),
        "the guest is not told the numbers: {}",
        second.log()
    );
    first.finish()?;
    second.finish()?;
    executor.stop()?;
    ensure!(
        std::fs::read_to_string(setup.log("full-vgpu-serve"))?.contains("refused"),
        "the executor's log has no refusal of memory"
    );
    Ok(Row {
        fault: "memory refused",
        times,
        found: "the load fails, the other guest generates the same tokens, the next load works"
            .into(),
    })
}

/// Limits the address space of the running executor.
pub(super) fn address_space(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    const NAME: &str = "narrow";
    limited(setup, progress, NAME, Resource::As, |pid| {
        Ok(ResourceUsage::of(pid)?.mapped + LITTLE)
    })?;
    Ok(Row {
        fault: "address space",
        times: setup.counts.others,
        found: LIMITED.into(),
    })
}

/// Limits the descriptors of the running executor.
pub(super) fn descriptors(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    const NAME: &str = "closed";
    // At most one descriptor is left for a new guest.
    limited(setup, progress, NAME, Resource::Nofile, |pid| {
        Ok(ResourceUsage::of(pid)?.descriptors as u64 + 1)
    })?;
    Ok(Row {
        fault: "descriptors",
        times: setup.counts.others,
        found: LIMITED.into(),
    })
}

/// Loads models with and without a limit on `resource` of the executor. `limit` returns the limit
/// for a process id.
fn limited(
    setup: &Setup<'_>,
    progress: &Progress,
    name: &str,
    resource: Resource,
    limit: impl Fn(u32) -> Result<u64>,
) -> Result<()> {
    let executor = setup.serve(name, &[])?;
    let pid = Pid::from_raw(executor.pid().cast_signed()).context("a process id of 0")?;
    // The executor has inherited the limit of this process.
    let unlimited = rustix::process::getrlimit(resource);
    let idle = ResourceUsage::of(executor.pid())?;
    let mut warm = setup.guest(name, &format!("{name}-warm"))?;
    setup.expect_run(&mut warm, "a guest before the limit")?;
    warm.finish()?;
    expect_no_more(executor.pid(), &idle, "the executor", HANG)?;
    let mut other = setup.guest(name, &format!("{name}-other"))?;
    other.begin(LONG)?;
    let long = other.end()?.tokens()?;
    // With the session of the other guest.
    let before = ResourceUsage::of(executor.pid())?;
    for round in 0..setup.counts.others {
        let limited = Rlimit {
            current: Some(limit(executor.pid())?),
            ..unlimited
        };
        other.begin(LONG)?;
        other.token()?;
        rustix::process::prlimit(Some(pid), resource, limited).context("setting a limit")?;
        // A guest without an executor computes on its CPU.
        let mut guest = setup.guest(name, &format!("{name}-guest"))?;
        guest.begin(TOKENS)?;
        let outcome = guest.end().context("a guest under the limit")?;
        ensure!(
            matches!(outcome, Outcome::Failed(_))
                || outcome == Outcome::Tokens(setup.reference.clone()),
            "a guest under the limit has {outcome:?} instead of {:?}",
            setup.reference
        );
        guest.finish()?;
        ensure!(
            other.end()?.tokens().context("the other guest")? == long,
            "another guest generated other tokens"
        );
        rustix::process::prlimit(Some(pid), resource, unlimited).context("lifting a limit")?;
        // A listener whose accept has failed pauses for a second.
        std::thread::sleep(Duration::from_millis(1200));
        let mut next = setup.guest(name, &format!("{name}-next"))?;
        setup.expect_run(&mut next, "the guest after the limit")?;
        next.finish()?;
        expect_no_more(executor.pid(), &before, "the executor", HANG)?;
        progress.note(&format!("{} of {}", round + 1, setup.counts.others));
    }
    other.finish()?;
    let log = std::fs::read_to_string(setup.log(&format!("{name}-vgpu-serve")))?;
    ensure!(
        log.contains("WARN") || log.contains("ERROR"),
        "the executor's log has no warning or error, so nothing was tested"
    );
    executor.stop()
}

/// A folder without space for another file; logs and statistics that cannot be written.
pub(super) fn disk(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    let times = setup.counts.others;
    progress.note("a socket in a full folder");
    let said = socket_in_a_full_folder(setup)?;

    let socket = setup.socket("logless");
    let executor = Executor::start_logless(setup.dist, &socket, 1)?;
    let program = Program {
        stats: "/dev/full".into(),
        ..setup.program.clone()
    };
    let endpoint = format!("unix:{}", socket.display());
    for round in 0..times {
        let mut guest = Guest::start(
            &program,
            Some((setup.dist, &endpoint)),
            std::path::Path::new("/dev/full"),
        )?;
        setup.expect_run(
            &mut guest,
            "a guest that cannot write its log and statistics",
        )?;
        guest.finish()?;
        progress.note(&format!("{} of {times}", round + 1));
    }
    executor.stop()?;
    ensure!(!exists(&socket), "the executor did not remove its socket");
    Ok(Row {
        fault: "disk full",
        times,
        found: format!(
            "logs and statistics are lost, the tokens are the same; a socket in a full folder: \
             {said}"
        ),
    })
}

/// Runs `vgpu serve` in a folder without space for its socket. Returns the outcome for the report.
fn socket_in_a_full_folder(setup: &Setup<'_>) -> Result<String> {
    let folder = setup.scratch.path().join("full");
    std::fs::create_dir_all(&folder)?;
    // A file system with two inodes, one of them its root, in new user and mount namespaces.
    let script = format!(
        "mount -t tmpfs -o nr_inodes=2 none {folder} && touch {folder}/one && exec {vgpu} serve \
         --engine cpu --threads 1 --listen unix:{folder}/s",
        folder = folder.display(),
        vgpu = setup.dist.vgpu.display(),
    );
    let mut unshare = Command::new("timeout");
    unshare.args([
        &HANG.as_secs().to_string(),
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        &script,
    ]);
    let output = unshare.output().context("starting unshare")?;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if stderr.contains("unshare:") || stderr.contains("mount:") {
        return Ok("not tested, this user may not mount".into());
    }
    ensure!(
        output.status.code() == Some(1),
        "vgpu serve ended with {}: {stderr}",
        output.status
    );
    let line = stderr.lines().find(|line| line.contains("cannot listen"));
    let line = line.with_context(|| format!("no reason in the output of vgpu serve: {stderr}"))?;
    ensure!(line.contains("No space left"), "{line}");
    Ok("refused with the reason".into())
}
