//! Events around Ollama: its runner is killed, and two servers want the memory of one executor.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use xtask_common::executor::Executor;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use crate::ollama::stage::{LARGE, MEMORY, Needed, SMALL, Stage, TOKENS, tokens, wait};
use crate::ollama::{Instance, Settings};
use crate::test_run::PROMPT;

/// The longest from the kill of a runner to the end of its session: less than the rest of a long
/// prompt takes. A session whose graph goes on to its end is later.
const AT_ONCE: Duration = Duration::from_secs(5);

/// The runner of Ollama is killed while the executor computes a long prompt. The session and its
/// memory are gone, although the graph is not done, so that the next model is placed as before.
pub(super) fn runner_killed(stage: &mut Stage<'_>) -> Result<String> {
    stage.unload_all()?;
    let before = stage.free_memory()?;
    let prompt = PROMPT.repeat(200);
    let failed = std::thread::scope(|scope| {
        let client = stage.ollama.client();
        let options = json!({"num_predict": TOKENS, "num_ctx": 8192});
        let prompt = &prompt;
        let answer = scope.spawn(move || client.generate(LARGE, prompt, options, |_| true));
        // The first graphs warm up. A graph of the prompt takes the engine for longer, also on a
        // fast processor.
        let has_begun = || {
            let status = stage.status()?;
            let turn = status["engine"]["turn"].as_f64().unwrap_or_default();
            let sessions = status["sessions"].as_array().context("no sessions")?;
            let graphs = sessions.iter().filter_map(|one| one["graphs"].as_u64());
            Ok(turn > 0.02 && graphs.sum::<u64>() > 2)
        };
        let killed = wait("the prompt does not begin", has_begun).and_then(|()| {
            let root = fs::canonicalize(stage.scratch.path()).context("the folder")?;
            let killed = (kill_runners(&root)?, Instant::now());
            wait("the session of a killed runner does not end", || {
                Ok(stage.open_sessions()? == 0)
            })?;
            let took = killed.1.elapsed();
            ensure!(
                took < AT_ONCE,
                "the session of a killed runner ended after {took:.1?}"
            );
            Ok(killed.0)
        });
        let answer = answer.join().expect("it does not panic");
        ensure!(killed? == 1, "not one runner was killed");
        anyhow::Ok(answer.is_err())
    })?;
    ensure!(failed, "the answer of a killed runner was complete");
    let after = stage.free_memory()?;
    ensure!(
        after >= before,
        "{before} MiB were free before, {after} after"
    );
    stage.text(LARGE, PROMPT)?;
    stage.all_on_gpu()?;
    stage.unload_all()?;
    Ok(format!("{after} MiB are free"))
}

/// Kills every `llama-server` whose program lies below `root` and that has a model. Returns how
/// many there were.
fn kill_runners(root: &Path) -> Result<usize> {
    let mut killed = 0;
    for entry in fs::read_dir("/proc").context("reading /proc")? {
        let entry = entry?;
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let program = fs::read_link(entry.path().join("exe")).unwrap_or_default();
        let words = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let has_model = words
            .split(|&byte| byte == 0)
            .any(|word| word == b"--model");
        if program.starts_with(root) && program.ends_with("llama-server") && has_model {
            let pid = rustix::process::Pid::from_raw(pid).context("a process has number 0")?;
            rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
            killed += 1;
        }
    }
    Ok(killed)
}

/// What Ollama leaves free on a device, in MiB.
const RESERVE: u64 = 457;

/// Two servers load the same model at once into an executor that has memory for one of them and a
/// part of the other. Both see the memory free when they look. Both answer, and together they get
/// no more than there is.
pub(super) fn two_servers(stage: &mut Stage<'_>) -> Result<String> {
    // So many contexts that one server takes more than what Ollama leaves free.
    let mut settings = Settings::default();
    let parallel = ("OLLAMA_NUM_PARALLEL", "24".to_owned());
    settings.environment.push(parallel);
    stage.unload_all()?;
    let mut servers = [stage.ollama.another()?, stage.ollama.another()?];
    for (i, server) in servers.iter_mut().enumerate() {
        let log = workspace::reports().join(format!("ollama-of-two-{i}.log"));
        server.start(&settings, &log)?;
    }
    let clients = servers.each_ref().map(|server| server.client());
    let before = stage.free_memory()?;
    let alone = clients[0].generate(LARGE, PROMPT, tokens(TOKENS), |_| true)?;
    let of_one = before.saturating_sub(stage.free_memory()?);
    clients[0].unload(LARGE)?;
    let has_ended = || Ok(stage.open_sessions()? == 0);
    wait("the session of an unloaded model does not end", has_ended)?;
    ensure!(of_one > RESERVE + 100, "a server takes only {of_one} MiB");
    // Enough for one server and what Ollama leaves free, not enough for two.
    let memory = (of_one + RESERVE + 2 * of_one) / 2;
    stage.executor.take().context("no executor")?.stop()?;
    stage.start_executor(&format!("{memory}M"))?;
    let answers = std::thread::scope(|scope| {
        let threads = clients.each_ref().map(|client| {
            scope.spawn(move || client.generate(LARGE, PROMPT, tokens(TOKENS), |_| true))
        });
        threads.map(|thread| thread.join().expect("it does not panic"))
    });
    let mut on_gpu = Vec::new();
    for (client, answer) in clients.iter().zip(answers) {
        let answer = answer.context("a server that competes for memory")?;
        ensure!(answer.tokens == TOKENS, "{} tokens", answer.tokens);
        let running = client.running()?;
        let model = running.first().context("no model is loaded")?;
        let bytes = |name: &str| model[name].as_u64().context("no size");
        let (size, vram) = (bytes("size")?, bytes("size_vram")?);
        // Layers on the CPU are computed in another order.
        ensure!(
            size > vram || answer.text == alone.text,
            "{:?} instead of {:?}",
            answer.text,
            alone.text
        );
        on_gpu.push(vram >> 20);
    }
    let sum = on_gpu.iter().sum::<u64>();
    ensure!(sum <= memory, "{on_gpu:?} MiB in an executor of {memory}");
    ensure!(sum > 0, "no server has placed a layer on the device");
    for mut server in servers {
        server.stop().context("a server that competes for memory")?;
    }
    wait("the session of a stopped server does not end", || {
        Ok(stage.open_sessions()? == 0)
    })?;
    stage.executor.take().context("no executor")?.stop()?;
    stage.start_executor(MEMORY)?;
    stage.text(SMALL, PROMPT)?;
    Ok(format!("{of_one} MiB each, {on_gpu:?} of {memory}"))
}

/// Ollama is upgraded in place. Its installer removes the folder that has the plugin; the drop-in
/// stays. A server that starts without the command of the drop-in runs on the CPU. With the command
/// it uses the device. `old`: program and libraries of the release before.
pub(super) fn upgraded_in_place(
    needed: &Needed,
    old: (&Path, &Path),
    log: &dyn Fn(&str) -> PathBuf,
) -> Result<String> {
    let scratch = Scratch::new()?;
    let socket = scratch.path().join("vgpu.sock");
    let executor = Executor::start_with(
        &needed.dist,
        &socket,
        workspace::cores(),
        &log("ollama-upgrade-vgpu-serve"),
        &["--memory", MEMORY],
    )?;
    let endpoint = executor.endpoint();
    let mut ollama = Instance::install(scratch.path(), old.0, old.1, &needed.dist, &endpoint)?;
    ollama.install_from_packages(&needed.dist, &endpoint)?;
    let settings = Settings::default();
    // Whether the answer was computed completely on the device, and whether a part was.
    let answer = |ollama: &Instance| -> Result<(bool, bool)> {
        let client = ollama.client();
        let answer = client.generate(SMALL, PROMPT, tokens(TOKENS), |_| true)?;
        ensure!(answer.tokens == TOKENS, "{} tokens", answer.tokens);
        let running = client.running()?;
        let model = running.first().context("no model is loaded")?;
        let bytes = |name: &str| model[name].as_u64().unwrap_or_default();
        let (size, vram) = (bytes("size"), bytes("size_vram"));
        Ok((size == vram, vram > 0))
    };
    ollama.start(&settings, &log("ollama-upgrade-before"))?;
    ollama.create(SMALL, &needed.small)?;
    ensure!(
        answer(&ollama)?.0,
        "the old release does not use the device"
    );
    ollama.stop()?;

    ollama.upgrade(&needed.ollama, &needed.llama)?;
    ollama.start(&settings, &log("ollama-upgrade-without-plugin"))?;
    let said = ollama.log();
    ensure!(
        !said.contains("name=VGPU0"),
        "the device is listed:\n{said}"
    );
    ensure!(!answer(&ollama)?.1, "a device that is not there was used");
    ollama.stop()?;

    let Some(said) = ollama.install_before_start()? else {
        // The files of this user are not root's.
        return Ok(
            "not tested: the drop-in installs nothing that others than root may change".into(),
        );
    };
    ensure!(said.contains("write  "), "{said}");
    ollama.start(&settings, &log("ollama-upgrade-after"))?;
    let said = ollama.log();
    ensure!(said.contains("name=VGPU0"), "no device is listed:\n{said}");
    ensure!(
        answer(&ollama)?.0,
        "the new release does not use the device"
    );
    ollama.stop()?;
    executor.stop()?;
    Ok("the command of the drop-in installs the plugin again".into())
}
