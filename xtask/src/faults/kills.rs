//! SIGKILL, at random points of loading and generating.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use crate::host::{self, Backend};
use crate::process::Daemon;
use crate::progress::Step;

use super::guest::Outcome;
use super::holdings::{Holdings, expect_no_more};
use super::{Bench, HANG, Row, TOKENS, exists, moment};

/// Rounds before holdings are compared: allocators and libraries take some memory for good when they are first used.
const WARM_UP: usize = 5;

/// One guest process lives through all of it; each time a new executor comes.
pub(super) fn executors(bench: &Bench<'_>, step: &Step) -> Result<Row> {
    const NAME: &str = "killed";
    let times = bench.counts.kills;
    let mut rng = bench.rng(1);
    let mut executor = bench.serve(NAME, &[])?;
    let mut guest = bench.guest(NAME, "killed-guest")?;
    bench.expect_run(&mut guest, "the first load")?;
    let started = Instant::now();
    bench.expect_run(&mut guest, "the second load")?;
    let whole = started.elapsed();

    let (mut loading, mut generating, mut too_late) = (0, 0, 0);
    let mut before = None;
    for round in 0..WARM_UP + times {
        if round == WARM_UP {
            before = Some(Holdings::of(guest.pid())?);
            (loading, generating, too_late) = (0, 0, 0);
        }
        guest.begin(TOKENS)?;
        std::thread::sleep(moment(&mut rng, whole));
        executor.kill().context("killing the executor")?;
        match guest
            .end()
            .with_context(|| format!("kill {round}: the guest hangs or has crashed"))?
        {
            Outcome::Failed(why) if why.contains("no model") || why.contains("no context") => {
                loading += 1
            }
            Outcome::Failed(_) => generating += 1,
            Outcome::Tokens(tokens) => {
                ensure!(
                    tokens == bench.reference,
                    "kill {round}: other tokens: {tokens:?}"
                );
                too_late += 1;
            }
        }
        executor = bench.serve(NAME, &[])?;
        bench.expect_run(&mut guest, &format!("the load after kill {round}"))?;
        step.note(&format!(
            "{} of {times}",
            (round + 1).saturating_sub(WARM_UP)
        ));
    }
    let before = before.context("no round was run")?;
    let after = expect_no_more(guest.pid(), &before, "the guest", HANG)?;
    guest.finish().context("the guest's end")?;
    executor.stop()?;
    ensure!(
        !exists(&bench.socket(NAME)),
        "the executor has left its socket behind"
    );
    Ok(Row {
        fault: "executor killed",
        times,
        found: format!(
            "{loading} while loading, {generating} while generating, {too_late} just after the end; 0 hangs, 0 crashes; every \
             next load gave the same tokens; guest before: {before}, after: {after}"
        ),
    })
}

/// One executor and one guest beside live through all of it. Every other guest that is killed is llama.cpp's own
/// `llama-completion`.
pub(super) fn guests(bench: &Bench<'_>, step: &Step) -> Result<Row> {
    const NAME: &str = "survivor";
    let times = bench.counts.kills;
    let mut rng = bench.rng(2);
    let executor = bench.serve(NAME, &[])?;
    let mut bystander = bench.guest(NAME, "bystander")?;
    bench.expect_run(&mut bystander, "the guest beside")?;
    let started = Instant::now();
    bench.expect_run(&mut bystander, "the guest beside")?;
    // Two run at a time, and starting a process takes a while, too.
    let whole = 2 * started.elapsed();

    let mut before = Holdings::of(executor.pid())?;
    let mut after = before;
    for round in 0..WARM_UP + times {
        if round == WARM_UP {
            before = Holdings::of(executor.pid())?;
        }
        bystander.begin(TOKENS)?;
        if round % 2 == 0 {
            let mut victim = bench.guest(NAME, "victim")?;
            victim.begin(TOKENS)?;
            std::thread::sleep(moment(&mut rng, whole));
            drop(victim); // SIGKILL
        } else {
            let victim = completion(bench, NAME)?;
            std::thread::sleep(moment(&mut rng, whole));
            victim.kill()?;
        }
        bench.expect_tokens(&mut bystander, &format!("the guest beside kill {round}"))?;
        if round >= WARM_UP {
            after = expect_no_more(
                executor.pid(),
                &before,
                &format!("the executor after kill {round}"),
                HANG,
            )?;
        }
        step.note(&format!(
            "{} of {times}",
            (round + 1).saturating_sub(WARM_UP)
        ));
    }
    let mut next = bench.guest(NAME, "after-kills")?;
    bench.expect_run(&mut next, "the load after all kills")?;
    next.finish()?;
    bystander.finish()?;
    executor.stop()?;
    Ok(Row {
        fault: "guest killed",
        times,
        found: format!(
            "0 hangs; the guest beside generated the same tokens {} times; executor before: {before}, after: {after}",
            times + WARM_UP
        ),
    })
}

/// llama.cpp's own program, at work.
fn completion(bench: &Bench<'_>, executor: &str) -> Result<Daemon> {
    let endpoint = format!("unix:{}", bench.socket(executor).display());
    let mut command = Command::new(bench.program.bin.join("llama-completion"));
    command
        .arg("--model")
        .arg(&bench.program.model)
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
    host::set_backend(
        &mut command,
        &Backend::Plugin {
            dist: bench.dist,
            endpoint: &endpoint,
        },
        &bench.program.stats,
    );
    Daemon::start(&mut command, &bench.log("victim-completion"))
}
