//! Executors that are missing or killed, and guests that are killed: other guests are not affected.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::llama_server::Server;
use xtask_common::dist::Dist;
use xtask_common::executor::Executor;
use xtask_common::llama;
use xtask_common::model::FileType;
use xtask_common::node::Node;
use xtask_common::node_llama::{self, Backend};
use xtask_common::process::{self, Dialogue};
use xtask_common::progress::heading;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use crate::test_run::{PROMPT, Served, TestRun};

/// The plugin must report the end of an executor before. The closed socket says it at once; without
/// that, only a missing heartbeat would, after 10 s.
const NOTICED_WITHIN: Duration = Duration::from_secs(8);
/// The timeout for every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("failures");
    let Some(dist) = tests.dist() else { return };
    let programs = tests.prepare("real programs", |tests| {
        let bin = llama::build(tests.cache, llama::Stage::Tools)?;
        Ok((
            bin,
            Node::ensure(tests.cache)?,
            tests.model(FileType::Q4KM)?,
        ))
    });
    let Some((bin, node, model)) = programs else {
        return;
    };

    tests.check("no executor: the program runs on its CPU", |tests, _| {
        no_executor(tests, &bin, &dist, &model)
    });
    tests.check(
        "executor killed during generation: llama-server returns an error",
        |tests, _| executor_killed(tests, &bin, &dist, &model),
    );
    tests.check(
        "executor killed and restarted: the same process loads again",
        |tests, _| executor_restarted(tests, &node, &dist, &model),
    );
    tests.check(
        "guest killed during generation: the others continue",
        |tests, _| guest_killed(tests, &bin, &dist, &model),
    );
}

fn no_executor(tests: &TestRun<'_>, bin: &Path, dist: &Dist, model: &Path) -> Result<String> {
    let scratch = Scratch::new()?;
    let socket = scratch.path().join("nobody.sock");
    let endpoint = format!("unix:{}", socket.display());
    let backend = Backend::Plugin {
        dist,
        endpoint: &endpoint,
    };
    let stats = workspace::reports().join("unused.stats.json");
    let server = Server::start(bin, model, &backend, &stats, &tests.log("no-executor"))?;
    let choices = server.complete(PROMPT, 4)?;
    let log = server.log();
    server.stop()?;

    ensure!(
        choices.len() == 4,
        "the program generated {} tokens of 4",
        choices.len()
    );
    let said: Vec<_> = log
        .lines()
        .filter(|line| line.contains(&endpoint))
        .collect();
    ensure!(
        said.len() == 1,
        "{} log lines name {endpoint}, not one: {said:#?}",
        said.len()
    );
    ensure!(
        said[0].contains("vgpu serve"),
        "the log does not name the program to start: {}",
        said[0]
    );
    // The functions that ggml calls before it ignores the plugin.
    let answers = answers(bin, &scratch, &backend, &stats)?;
    ensure!(
        answers == "0 no",
        "score and registry are {answers:?} instead of 0 and none"
    );
    Ok(String::new())
}

/// The results of the plugin's two symbols in a C program.
fn answers(bin: &Path, scratch: &Scratch, backend: &Backend<'_>, stats: &Path) -> Result<String> {
    let source = workspace::root().join("tests/programs/score.c");
    let program = scratch.path().join("score");
    let mut cc = Command::new("cc");
    process::output(
        cc.arg("-Wall")
            .arg("-o")
            .arg(&program)
            .arg(source)
            .arg("-ldl"),
    )?;
    let Backend::Plugin { dist, .. } = backend else {
        bail!("the plugin could not be loaded")
    };
    let mut score = Command::new(&program);
    score.arg(bin.join("libggml-base.so")).arg(&dist.plugin);
    node_llama::set_backend(&mut score, backend, stats);
    Ok(process::output(&mut score)?.trim().to_owned())
}

fn executor_killed(tests: &TestRun<'_>, bin: &Path, dist: &Dist, model: &Path) -> Result<String> {
    let served = Served::start(dist, &tests.log("killed-vgpu-serve"))?;
    let endpoint = served.executor.endpoint();
    let backend = Backend::Plugin {
        dist,
        endpoint: &endpoint,
    };
    let stats = workspace::reports().join("unused.stats.json");
    let server = Server::start(bin, model, &backend, &stats, &tests.log("killed"))?;

    let (mut tokens, mut executor, mut error) = (0, Some(served.executor), None);
    let mut killed = None;
    server.stream(PROMPT, |line| {
        tokens += u32::from(line.starts_with("data: ") && killed.is_none());
        if line.starts_with("error:") || line.contains("\"error\":") {
            error = Some((Instant::now(), line.to_owned()));
        }
        if tokens >= 8
            && let Some(executor) = executor.take()
        {
            killed = Some((Instant::now(), executor.kill()));
        }
    })?;
    let (killed, outcome) = killed.context("the answer ended before the executor was killed")?;
    outcome?;
    let (noticed, error) = error.context("llama-server ended its answer without an error")?;
    let took = noticed.saturating_duration_since(killed);
    ensure!(
        took <= NOTICED_WITHIN,
        "the error came after {took:?}: {error}"
    );
    ensure!(server.is_healthy(), "llama-server no longer responds");
    server.stop().context("llama-server did not survive")?;
    Ok(format!("after {} ms", took.as_millis()))
}

fn executor_restarted(
    tests: &TestRun<'_>,
    node: &Node,
    dist: &Dist,
    model: &Path,
) -> Result<String> {
    let scratch = Scratch::new()?;
    let socket = scratch.path().join("vgpu.sock");
    let start = |log: &str| Executor::start(dist, &socket, workspace::cores(), &tests.log(log));
    let executor = start("restarted-vgpu-serve-1")?;

    let endpoint = executor.endpoint();
    let task = json!({
        "model": model, "prompt": PROMPT, "tokens": 16, "gpuLayers": "max",
        "contextSize": 2048, "threads": workspace::cores(),
    });
    let mut command = node.script(&workspace::root().join("tests/programs/reload.mjs"));
    command.arg(task.to_string());
    let stats = workspace::reports().join("restarted.stats.json");
    node_llama::set_backend(
        &mut command,
        &Backend::Plugin {
            dist,
            endpoint: &endpoint,
        },
        &stats,
    );
    let mut program = Dialogue::start(&mut command, &tests.log("restarted"))?;
    let expect = |program: &mut Dialogue, event: &str| -> Result<Value> {
        let line = program
            .read_line(TIMEOUT)
            .with_context(|| format!("waiting for {event:?}"))?;
        let said: Value = serde_json::from_str(&line).with_context(|| format!("reading {line}"))?;
        ensure!(
            said["event"] == event,
            "the program wrote {line} instead of {event:?}"
        );
        Ok(said)
    };

    let first = expect(&mut program, "generated")?;
    ensure!(
        first["devices"].as_array().is_some_and(|d| !d.is_empty()),
        "no VGPU0: {first}"
    );
    expect(&mut program, "generating")?;
    executor.kill()?;
    let killed = Instant::now();
    let failed = expect(&mut program, "failed")?;
    let took = killed.elapsed();
    ensure!(
        took <= NOTICED_WITHIN,
        "the error came after {took:?}: {failed}"
    );

    let executor = start("restarted-vgpu-serve-2")?;
    program.write_line("again")?;
    let second = expect(&mut program, "generated").with_context(|| match executor.memory() {
        Ok(_) => "the second executor runs",
        Err(_) => "the second executor has ended",
    })?;
    ensure!(
        first["tokens"] == second["tokens"],
        "first {first}, then {second}"
    );
    program.finish(TIMEOUT)?;
    executor.stop().context("stopping the second executor")?;
    Ok(format!(
        "error after {} ms, same text afterwards",
        took.as_millis()
    ))
}

fn guest_killed(tests: &TestRun<'_>, bin: &Path, dist: &Dist, model: &Path) -> Result<String> {
    let serve_log = tests.log("guest-killed-vgpu-serve");
    let served = Served::start(dist, &serve_log)?;
    let endpoint = served.executor.endpoint();
    let backend = Backend::Plugin {
        dist,
        endpoint: &endpoint,
    };
    let stats = workspace::reports().join("unused.stats.json");
    let start = |log: &str| Server::start(bin, model, &backend, &stats, &tests.log(log));

    let survivor = start("guest-survivor")?;
    let before = survivor.complete(PROMPT, 16)?;
    let victim = start("guest-victim")?;
    std::thread::scope(|scope| -> Result<()> {
        let (sender, receiver) = std::sync::mpsc::channel();
        let victim = &victim;
        // Ends with the killed guest, whose connection is closed.
        scope.spawn(move || {
            let _ = victim.stream(PROMPT, |_| {
                let _ = sender.send(()); // the receiver has been dropped
            });
        });
        for _ in 0..8 {
            receiver
                .recv_timeout(TIMEOUT)
                .context("the guest to be killed generates nothing")?;
        }
        victim.kill()
    })?;
    let after = survivor.complete(PROMPT, 16)?;
    ensure!(
        before == after,
        "the text of the other guest changed: {before:?}, then {after:?}"
    );
    survivor.stop()?;
    served
        .executor
        .stop()
        .context("the executor did not end cleanly")?;

    let log = BufReader::new(std::fs::File::open(&serve_log).context("opening a log")?);
    let ends = log
        .lines()
        .map_while(Result::ok)
        .filter(|l| l.contains("session closed"))
        .count();
    ensure!(
        ends >= 2,
        "the executor logged {ends} closed sessions of two"
    );
    Ok(String::new())
}
