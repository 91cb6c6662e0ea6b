//! SIGKILL at random points of loading and generation.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use xtask_common::node_llama::{self, Backend};
use xtask_common::process::Daemon;
use xtask_common::progress::Progress;

use super::guest::{HANG, Outcome};
use super::leaks::{ResourceUsage, expect_no_more};
use super::setup::{Row, Setup, TOKENS, exists, moment};

/// Rounds before resources are compared. Allocators and libraries keep some memory from their first
/// use on.
const WARM_UP: usize = 5;

/// Tokens of a generation that a kill shall interrupt. Few generations of this length end before
/// the kill.
const LONG: usize = 96;

/// Tokens that a guest generates unless it is killed before.
const KILLED_TOKENS: usize = 400;

/// Kills that may miss for each required hit. A kill aims at a moment in another process and can be
/// too early or too late.
const MISSES: usize = 5;

/// The number of kills by the state of the process. Only those during a load or a generation are
/// hits.
#[derive(Clone, Copy, Debug, Default)]
struct KillCounts {
    loading: usize,
    generating: usize,
    missed: usize,
}

impl KillCounts {
    fn hits(&self) -> usize {
        self.loading + self.generating
    }

    /// Whether more kills are required.
    ///
    /// # Errors
    /// If too many have missed.
    fn needs_more(&self, times: usize) -> Result<bool> {
        ensure!(
            self.missed <= WARM_UP + MISSES * times,
            "{} kills of {times} hit a load or a generation, {} missed",
            self.hits(),
            self.missed
        );
        Ok(self.hits() < times)
    }
}

/// Kills executors. One guest process runs during the whole test; a new executor follows each kill.
pub(super) fn executors(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    const NAME: &str = "killed";
    let times = setup.counts.kills;
    let mut rng = setup.rng(1);
    let mut executor = setup.serve(NAME, &[])?;
    let mut guest = setup.guest(NAME, "killed-guest")?;
    setup.expect_run(&mut guest, "the first load")?;
    guest.begin(LONG)?;
    let begun = Instant::now();
    guest.token()?;
    let load = begun.elapsed();
    let whole = guest.end()?.tokens()?;
    ensure!(
        whole[..TOKENS] == setup.reference,
        "other tokens: {whole:?}"
    );
    let each = begun.elapsed().saturating_sub(load) / LONG as u32;

    let (mut counts, mut before, mut round) = (KillCounts::default(), None, 0);
    while before.is_none() || counts.needs_more(times)? {
        if round == WARM_UP {
            before = Some(ResourceUsage::of(guest.pid())?);
            counts = KillCounts::default();
        }
        guest.begin(LONG)?;
        if rng.next_u64().is_multiple_of(2) {
            std::thread::sleep(moment(&mut rng, load));
        } else {
            for _ in 0..=rng.next_u64() % (LONG as u64 / 2) {
                guest.token()?;
            }
            std::thread::sleep(moment(&mut rng, each));
        }
        executor.kill().context("killing the executor")?;
        match guest
            .end()
            .with_context(|| format!("kill {round}: the guest hangs or crashed"))?
        {
            Outcome::Failed(why) if why.contains("no model") || why.contains("no context") => {
                counts.loading += 1;
            }
            Outcome::Failed(_) => counts.generating += 1,
            Outcome::Tokens(tokens) => {
                ensure!(tokens == whole, "kill {round}: other tokens: {tokens:?}");
                counts.missed += 1;
            }
        }
        executor = setup.serve(NAME, &[])?;
        setup.expect_run(&mut guest, &format!("the load after kill {round}"))?;
        progress.note(&format!("{} of {times}", counts.hits()));
        round += 1;
    }
    let before = before.context("no round was run")?;
    let after = expect_no_more(guest.pid(), &before, "the guest", HANG)?;
    guest.finish().context("the guest's end")?;
    executor.stop()?;
    ensure!(
        !exists(&setup.socket(NAME)),
        "the executor did not remove its socket"
    );
    let KillCounts {
        loading,
        generating,
        missed,
    } = counts;
    Ok(Row {
        fault: "executor killed",
        times: counts.hits(),
        found: format!(
            "{loading} during loading, {generating} during generation; {missed} after the end, not \
             counted; 0 hangs, 0 crashes; each following load generated the same tokens; guest \
             before: {before}, after: {after}"
        ),
    })
}

/// Kills guests. One executor and one other guest run during the whole test. Every second killed
/// guest is llama.cpp's own `llama-completion`. The executor's log contains what the guest had
/// allocated at its end, and how many graphs it had run.
pub(super) fn guests(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    const NAME: &str = "survivor";
    let times = setup.counts.kills;
    let mut rng = setup.rng(2);
    let executor = setup.serve(NAME, &[])?;
    let mut other_guest = setup.guest(NAME, "other-guest")?;
    setup.expect_run(&mut other_guest, "the other guest")?;
    // The time from the load command to the last token, in a new process.
    let mut model = setup.guest(NAME, "killed-guest")?;
    let started = Instant::now();
    model.begin(KILLED_TOKENS)?;
    model.token()?;
    let load = started.elapsed();
    model
        .end()?
        .tokens()
        .context("a guest that is not killed")?;
    let life = started.elapsed();
    model.finish()?;

    let log = setup.log(&format!("{NAME}-vgpu-serve"));
    let mut ends = Ends::default();
    while ends.next(&log)?.is_none() {
        ensure!(
            started.elapsed() < HANG,
            "the session of the guest that was not killed does not end"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut before = ResourceUsage::of(executor.pid())?;
    let (mut counts, mut after, mut round) = (KillCounts::default(), before, 0);
    while round <= WARM_UP || counts.needs_more(times)? {
        if round == WARM_UP {
            before = ResourceUsage::of(executor.pid())?;
            counts = KillCounts::default();
        }
        // Half of the kills aim at the load, which is short.
        let span = if round % 4 < 2 { load } else { life };
        other_guest.begin(TOKENS)?;
        if round % 2 == 0 {
            let mut killed = setup.guest(NAME, "killed-guest")?;
            killed.begin(KILLED_TOKENS)?;
            std::thread::sleep(moment(&mut rng, span));
            drop(killed); // SIGKILL
        } else {
            let mut killed = completion(setup, NAME)?;
            // The delay starts when the program loads its model, not when the process starts.
            killed.wait_until(HANG, |_| {
                ResourceUsage::of(executor.pid()).is_ok_and(|now| now.threads > before.threads)
            })?;
            std::thread::sleep(moment(&mut rng, span));
            killed.kill()?;
        }
        setup.expect_tokens(
            &mut other_guest,
            &format!("the other guest during kill {round}"),
        )?;
        // Also waits for the end of the session's thread, which logs the session's end before.
        let timeout = if round < WARM_UP { SETTLING } else { HANG };
        match expect_no_more(
            executor.pid(),
            &before,
            &format!("the executor after kill {round}"),
            timeout,
        ) {
            Ok(now) => after = now,
            Err(_) if round < WARM_UP => {}
            Err(error) => return Err(error),
        }
        match ends.next(&log)? {
            Some(End { freed: 0, .. }) | None => counts.missed += 1,
            Some(End { graphs: 0, .. }) => counts.loading += 1,
            Some(_) => counts.generating += 1,
        }
        progress.note(&format!("{} of {times}", counts.hits()));
        round += 1;
    }
    let mut next = setup.guest(NAME, "after-kills")?;
    setup.expect_run(&mut next, "the load after all kills")?;
    next.finish()?;
    other_guest.finish()?;
    executor.stop()?;
    let KillCounts {
        loading,
        generating,
        missed,
    } = counts;
    Ok(Row {
        fault: "guest killed",
        times: counts.hits(),
        found: format!(
            "{loading} during loading, {generating} during generation; {missed} before or after, \
             not counted; 0 hangs; the other guest generated the same tokens {round} times; \
             executor before: {before}, after: {after}"
        ),
    })
}

/// The timeout for resources in the warm-up rounds. The memory that the executor keeps permanently
/// is not known yet.
const SETTLING: Duration = Duration::from_secs(1);

/// The session ends in an executor's log.
#[derive(Debug, Default)]
struct Ends {
    /// The number of bytes of the log that were read.
    read: usize,
}

/// The state of a session at its end.
struct End {
    /// The bytes of the buffers that the session still had: 0 after an orderly end.
    freed: u64,
    graphs: u64,
}

impl Ends {
    /// The session that has ended since the last call; `None` if the guest had not connected yet.
    fn next(&mut self, log: &Path) -> Result<Option<End>> {
        let text = std::fs::read_to_string(log).context("reading the executor's log")?;
        let new = &text[self.read..];
        self.read = text.len();
        let closed: Vec<&str> = new
            .lines()
            .filter(|line| line.contains("session totals"))
            .collect();
        ensure!(closed.len() <= 1, "more than one session: {closed:#?}");
        let Some(line) = closed.first() else {
            return Ok(None);
        };
        let field = |name: &str| {
            let value = line
                .split_whitespace()
                .find_map(|word| word.strip_prefix(name));
            value
                .and_then(|value| value.parse().ok())
                .with_context(|| format!("no {name} in {line}"))
        };
        Ok(Some(End {
            freed: field("freed=")?,
            graphs: field("graphs_run=")?,
        }))
    }
}

/// Starts llama.cpp's own program.
fn completion(setup: &Setup<'_>, executor: &str) -> Result<Daemon> {
    let endpoint = format!("unix:{}", setup.socket(executor).display());
    let mut command = Command::new(setup.program.bin.join("llama-completion"));
    command
        .arg("--model")
        .arg(&setup.program.model)
        .args([
            "--gpu-layers",
            "99",
            "--threads",
            "1",
            "--ctx-size",
            "512",
            "--temp",
            "0",
            "-no-cnv",
        ])
        .args([
            "--ignore-eos",
            "--n-predict",
            "400",
            "--prompt",
            "A virtual machine",
        ])
        .stdin(Stdio::null());
    node_llama::set_backend(
        &mut command,
        &Backend::Plugin {
            dist: setup.dist,
            endpoint: &endpoint,
        },
        &setup.program.stats,
    );
    Daemon::start(&mut command, &setup.log("killed-completion"))
}
