//! Suspended executors and guests, truncated windows, and jumps of the clock.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;

use xtask_common::executor::Executor;
use xtask_common::process;
use xtask_common::progress::Step;
use xtask_common::workspace;

use super::guest::{Guest, Program};
use super::setup::{Row, Setup, TOKENS, moment};

/// How long a side stands still.
const PAUSE: Duration = Duration::from_millis(1500);

/// Tokens of a generation that is interrupted.
const LONG: usize = 96;

/// SIGSTOP and SIGCONT, of the guest and of the executor in turn, during generation.
pub(super) fn both(setup: &Setup<'_>, step: &Step) -> Result<Row> {
    const NAME: &str = "stopped";
    let times = setup.counts.others;
    let mut rng = setup.rng(3);
    let executor = setup.serve(NAME, &[])?;
    let mut guest = setup.guest(NAME, "stopped-guest")?;
    let mut other_guest = setup.guest(NAME, "stopped-other-guest")?;
    guest.begin(LONG)?;
    let expected = guest.end()?.tokens()?;
    ensure!(
        expected[..TOKENS] == setup.reference,
        "other tokens: {expected:?}"
    );
    for round in 0..times {
        guest.begin(LONG)?;
        std::thread::sleep(moment(&mut rng, Duration::from_millis(300)));
        if round % 2 == 0 {
            guest.signal(Signal::STOP)?;
            // The others go on while it stands.
            let beside = setup.expect_run(&mut other_guest, "the guest beside a stopped one");
            std::thread::sleep(PAUSE);
            guest.signal(Signal::CONT)?;
            beside?;
        } else {
            executor.signal(Signal::STOP)?;
            std::thread::sleep(PAUSE);
            executor.signal(Signal::CONT)?;
        }
        let tokens = guest
            .end()?
            .tokens()
            .with_context(|| format!("stop {round}"))?;
        ensure!(tokens == expected, "stop {round}: other tokens: {tokens:?}");
        step.note(&format!("{} of {times}", round + 1));
    }
    guest.finish()?;
    other_guest.finish()?;
    executor.stop()?;
    Ok(Row {
        fault: "stopped for a while",
        times,
        found: format!(
            "{PAUSE:?} each, guest and executor in turn; the same tokens afterwards, and beside it"
        ),
    })
}

/// A guest that has the processor for 2 ms of 20: it takes slowly what the executor has for it,
/// and gives slowly what the executor waits for. The guest beside must not notice.
pub(super) fn slow(setup: &Setup<'_>, step: &Step) -> Result<Row> {
    const NAME: &str = "slow";
    const RUNS: Duration = Duration::from_millis(2);
    const STANDS: Duration = Duration::from_millis(18);
    let times = setup.counts.others;
    let executor = setup.serve(NAME, &[])?;
    let mut guest = setup.guest(NAME, "slow-guest")?;
    let mut other_guest = setup.guest(NAME, "slow-other-guest")?;
    setup.expect_run(&mut other_guest, "the guest beside, alone")?;
    let mut beside = 0;
    for round in 0..times {
        guest.begin(TOKENS)?;
        other_guest.begin(TOKENS)?;
        // Both from the load on, until the one beside is done.
        let tokens = loop {
            guest.signal(Signal::STOP)?;
            std::thread::sleep(STANDS);
            guest.signal(Signal::CONT)?;
            std::thread::sleep(RUNS);
            if let Some(outcome) = other_guest.ended()? {
                break outcome.tokens().context("the guest beside a slow one")?;
            }
        };
        ensure!(
            tokens == setup.reference,
            "the guest beside a slow one generated {tokens:?}"
        );
        beside += 1;
        setup.expect_tokens(&mut guest, "the slow guest")?;
        step.note(&format!("{} of {times}", round + 1));
    }
    guest.finish()?;
    other_guest.finish()?;
    executor.stop()?;
    Ok(Row {
        fault: "slow consumer",
        times,
        found: format!(
            "a guest that stands still for {STANDS:?} of every 20; the same tokens, and beside it {beside} times"
        ),
    })
}

/// Every memory file of both sides is cut to nothing, from outside, while they work.
pub(super) fn truncated(setup: &Setup<'_>, step: &Step) -> Result<Row> {
    const NAME: &str = "truncated";
    let times = setup.counts.others;
    let executor = setup.serve(NAME, &[])?;
    let mut guest = setup.guest(NAME, "truncated-guest")?;
    let (mut refused, mut cut) = (0, 0);
    for round in 0..times {
        guest.begin(TOKENS)?;
        // Loaded: all windows and buffers are there.
        guest.token()?;
        for pid in [executor.pid(), guest.pid()] {
            for file in memory_files(pid)? {
                let Ok(file) = OpenOptions::new().write(true).open(file) else {
                    continue;
                };
                match file.set_len(0) {
                    Err(_) => refused += 1,
                    Ok(()) => cut += 1,
                }
            }
        }
        setup.expect_tokens(&mut guest, "the guest whose windows were to be cut")?;
        step.note(&format!("{} of {times}", round + 1));
    }
    ensure!(
        refused > 0,
        "no memory file could be opened, so nothing was tried"
    );
    ensure!(
        cut == 0,
        "{cut} of {} memory files could be cut",
        cut + refused
    );
    guest.finish()?;
    executor.stop()?;
    Ok(Row {
        fault: "window truncated",
        times,
        found: format!("{refused} files, each sealed: refused; the same tokens"),
    })
}

/// Descriptors, and mappings whose descriptor is closed (for those who may open them).
fn memory_files(pid: u32) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for folder in ["fd", "map_files"] {
        let folder = format!("/proc/{pid}/{folder}");
        for entry in std::fs::read_dir(&folder)
            .with_context(|| folder.clone())?
            .flatten()
        {
            let target = std::fs::read_link(entry.path()).unwrap_or_default();
            if target.to_string_lossy().contains("memfd:") {
                found.push(entry.path());
            }
        }
    }
    Ok(found)
}

/// The wall clock of both sides jumps by years, back and forth, each time it is looked at. Clocks
/// that measure time do not jump: Linux keeps them so, and whoever uses the wall clock for a wait
/// is found out here.
pub(super) fn clock(setup: &Setup<'_>, step: &Step) -> Result<Row> {
    let times = setup.counts.others;
    let library = setup.scratch.path().join("jumping_clock.so");
    let mut cc = Command::new("cc");
    cc.args([
        "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o",
    ])
    .arg(&library)
    .arg(workspace::root().join("tests/hosts/jumping_clock.c"));
    process::output(&mut cc)?;
    let log = setup.log("clock-vgpu-serve");
    let socket = setup.socket("clock");
    let executor = Executor::start_command(
        Command::new(&setup.dist.vgpu).env("LD_PRELOAD", &library),
        &socket,
        1,
        &log,
        &[],
    )?;
    let program = Program {
        preload: Some(library),
        ..setup.program.clone()
    };
    let endpoint = executor.endpoint();
    for round in 0..times {
        let mut guest = Guest::start(
            &program,
            Some((setup.dist, &endpoint)),
            &setup.log("clock-guest"),
        )?;
        setup.expect_run(&mut guest, "the guest whose clock jumps")?;
        guest.finish()?;
        step.note(&format!("{} of {times}", round + 1));
    }
    let text = std::fs::read_to_string(&log).unwrap_or_default();
    let years: std::collections::BTreeSet<&str> =
        text.lines().filter_map(|line| line.get(..4)).collect();
    executor.stop()?;
    // The log is stamped with the wall clock, which shows that it did jump.
    ensure!(years.len() > 2, "the clock has not jumped: {years:?}");
    Ok(Row {
        fault: "clock jumps",
        times,
        found: "the wall clock of both sides goes back and forth by years; the same tokens".into(),
    })
}
