//! Suspended executors and guests, truncated windows, and clock jumps.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;

use xtask_common::executor::Executor;
use xtask_common::process;
use xtask_common::progress::Progress;
use xtask_common::workspace;

use super::guest::{Guest, Program};
use super::setup::{Row, Setup, TOKENS, moment};

/// How long a process is stopped.
const PAUSE: Duration = Duration::from_millis(1500);

/// Tokens of a generation that is interrupted.
const LONG: usize = 96;

/// SIGSTOP and SIGCONT, of the guest and of the executor in turn, during generation.
pub(super) fn both(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
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
            // Other guests continue meanwhile.
            let beside = setup.expect_run(&mut other_guest, "the guest beside a stopped guest");
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
        progress.note(&format!("{} of {times}", round + 1));
    }
    guest.finish()?;
    other_guest.finish()?;
    executor.stop()?;
    Ok(Row {
        fault: "stopped for a while",
        times,
        found: format!(
            "{PAUSE:?} each, guest and executor in turn; the same tokens afterwards, and in the \
             other guest"
        ),
    })
}

/// A guest that runs for 2 ms of every 20 ms. The guest reads replies slowly and sends requests
/// slowly. The other guest must not be affected.
pub(super) fn slow(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    const NAME: &str = "slow";
    const RUNS: Duration = Duration::from_millis(2);
    const STOPPED: Duration = Duration::from_millis(18);
    let times = setup.counts.others;
    let executor = setup.serve(NAME, &[])?;
    let mut guest = setup.guest(NAME, "slow-guest")?;
    let mut other_guest = setup.guest(NAME, "slow-other-guest")?;
    setup.expect_run(&mut other_guest, "the other guest, alone")?;
    let mut beside = 0;
    for round in 0..times {
        guest.begin(TOKENS)?;
        other_guest.begin(TOKENS)?;
        // Both begin with the load. The loop ends with the other guest.
        let tokens = loop {
            guest.signal(Signal::STOP)?;
            std::thread::sleep(STOPPED);
            guest.signal(Signal::CONT)?;
            std::thread::sleep(RUNS);
            if let Some(outcome) = other_guest.ended()? {
                break outcome.tokens().context("the guest beside a slow guest")?;
            }
        };
        ensure!(
            tokens == setup.reference,
            "the guest beside a slow guest generated {tokens:?}"
        );
        beside += 1;
        setup.expect_tokens(&mut guest, "the slow guest")?;
        progress.note(&format!("{} of {times}", round + 1));
    }
    guest.finish()?;
    other_guest.finish()?;
    executor.stop()?;
    Ok(Row {
        fault: "slow consumer",
        times,
        found: format!(
            "a guest stopped for {STOPPED:?} of every 20 ms; the same tokens, also {beside} times \
             in the other guest"
        ),
    })
}

/// Tries to truncate every memory file of guest and executor to 0 bytes while both run.
pub(super) fn truncated(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    const NAME: &str = "truncated";
    let times = setup.counts.others;
    let executor = setup.serve(NAME, &[])?;
    let mut guest = setup.guest(NAME, "truncated-guest")?;
    let (mut refused, mut cut) = (0, 0);
    for round in 0..times {
        guest.begin(TOKENS)?;
        // The model is loaded: all windows and buffers exist.
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
        setup.expect_tokens(&mut guest, "the guest whose windows were to be truncated")?;
        progress.note(&format!("{} of {times}", round + 1));
    }
    ensure!(
        refused > 0,
        "no memory file could be opened, so nothing was tested"
    );
    ensure!(
        cut == 0,
        "{cut} of {} memory files could be truncated",
        cut + refused
    );
    guest.finish()?;
    executor.stop()?;
    Ok(Row {
        fault: "window truncated",
        times,
        found: format!(
            "truncation of {refused} files refused, since each is sealed; the same tokens"
        ),
    })
}

/// The memory files of a process: open descriptors, and mappings with a closed descriptor if this
/// user may open those.
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

/// The wall clock of guest and executor jumps by years, back and forth, at each read. Linux keeps
/// monotonic clocks monotonic. The test fails if a wait uses the wall clock.
pub(super) fn clock(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    let times = setup.counts.others;
    let library = setup.scratch.path().join("jumping_clock.so");
    let mut cc = Command::new("cc");
    cc.args([
        "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o",
    ])
    .arg(&library)
    .arg(workspace::root().join("tests/programs/jumping_clock.c"));
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
        progress.note(&format!("{} of {times}", round + 1));
    }
    let text = std::fs::read_to_string(&log).unwrap_or_default();
    let years: std::collections::BTreeSet<&str> =
        text.lines().filter_map(|line| line.get(..4)).collect();
    executor.stop()?;
    // The timestamps of the log are wall-clock times and prove the jumps.
    ensure!(years.len() > 2, "the clock did not jump: {years:?}");
    Ok(Row {
        fault: "clock jumps",
        times,
        found:
            "the wall clock of guest and executor jumps back and forth by years; the same tokens"
                .into(),
    })
}
