//! `cargo xtask demo`: a real program generates text on `VGPU0`, then on its own CPU.

use std::fmt::Display;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use xtask_common::cache::Cache;
use xtask_common::compare::{self, Comparison};
use xtask_common::dist;
use xtask_common::executor::Executor;
use xtask_common::median;
use xtask_common::model::{self, FileType};
use xtask_common::node::Node;
use xtask_common::node_llama::{self, Backend, Generation, Task};
use xtask_common::println;
use xtask_common::progress::{self, Progress, heading};
use xtask_common::sched;
use xtask_common::scratch::Scratch;
use xtask_common::stats::Stats;
use xtask_common::workspace;

const TOKENS: u32 = 64;

/// Options of the demo.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Use libggml-vgpu.so and vgpu of this folder instead of building them
    #[arg(long, value_name = "FOLDER")]
    dist: Option<PathBuf>,
    /// Run the executor inside the program's process, with no `vgpu serve`
    #[arg(long)]
    inproc: bool,
    /// The engine of the executor, a value of `vgpu serve --engine`; guests of ggml's backends are
    /// trusted
    #[arg(long, default_value = "cpu", conflicts_with = "inproc")]
    engine: String,
    /// Generate with a model of a few million parameters, for an engine that is slow here
    #[arg(long)]
    tiny: bool,
    /// How the model's weights are stored
    #[arg(long = "type", value_parser = model::file_type_parser(), default_value = "f16")]
    file_type: FileType,
    /// Tokens to generate
    #[arg(long, default_value_t = TOKENS, value_parser = clap::value_parser!(u32).range(3..=500))]
    tokens: u32,
    /// What the text starts with
    #[arg(
        long,
        default_value = "A virtual machine asks its host for a graphics processor, and"
    )]
    prompt: String,
    /// Threads of the executor, and of ggml's CPU backend [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
}

/// Runs the demo; an error if the plugin was not used or does not compute what the CPU computes.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("what is needed");
    let dir = workspace::root().join("target/demo");
    std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    let plugin = match options.inproc {
        true => dist::Plugin::Inproc,
        false => dist::Plugin::Remote,
    };
    // The demo's own build has the CPU engine only.
    let is_ggml = options.engine == "ggml" || options.engine.starts_with("ggml:");
    // The network brings the program and the model's vocabulary while the compiler works.
    let (fetched, built) = std::thread::scope(|scope| {
        let fetching = scope.spawn(|| -> Result<(Node, PathBuf)> {
            let shape = if options.tiny {
                &model::TINY
            } else {
                &model::DEMO
            };
            let model = model::ensure(cache, shape, options.file_type)?;
            Ok((Node::ensure(cache)?, model))
        });
        let built = match &options.dist {
            Some(folder) => Ok(dist::at(folder)),
            None if is_ggml => dist::build_for_tests(cache, &dir),
            None => dist::build_for_demo(cache, plugin, &dir),
        };
        let fetched = fetching.join();
        (
            fetched.unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            built,
        )
    });
    let ((node, model), dist) = (fetched?, built?);
    let threads = options.threads.unwrap_or_else(workspace::cores);
    let tokens = options.tokens as usize;
    let task = Task {
        model,
        prompt: options.prompt.clone(),
        tokens,
        threads,
    };

    heading("the model on VGPU0");
    let scratch = Scratch::new()?;
    let executor = if options.inproc {
        None
    } else {
        let progress = Progress::new("starting vgpu serve");
        let socket = scratch.path().join("vgpu.sock");
        let mut serve = Command::new(&dist.vgpu);
        let log = dir.join("vgpu-serve.log");
        let arguments: &[&str] = match is_ggml {
            // A GPU of software compiles its shaders for minutes.
            true => &["--trust-guests", "--max-turn-time", "0"],
            false => &[],
        };
        let engine = &options.engine;
        let executor =
            Executor::start_engine(&mut serve, engine, &socket, threads, &log, arguments)?;
        progress.done(&executor.endpoint());
        Some(executor)
    };
    let endpoint = executor
        .as_ref()
        .map_or_else(|| "inproc".to_owned(), Executor::endpoint);
    let backend = Backend::Plugin {
        dist: &dist,
        endpoint: &endpoint,
    };
    let progress = Progress::new(&format!("generating {tokens} tokens in node-llama-cpp"));
    let vgpu = node_llama::generate(&node, &task, &backend, &progress, &dir)?;
    progress.done(&speed(&vgpu));
    if let Some(executor) = executor {
        executor.stop().context("stopping the executor")?;
    }

    heading("the same on ggml's CPU backend");
    let progress = Progress::new(&format!("generating {tokens} tokens in node-llama-cpp"));
    let cpu = node_llama::generate(&node, &task, &Backend::Cpu, &progress, &dir)?;
    progress.done(&speed(&cpu));

    println!("\n{}{}\n", task.prompt, vgpu.text);
    let used = report_use(&vgpu, tokens);
    println!();
    row("tokens per second on VGPU0", format!("{:.1}", vgpu.speed()));
    row(
        "tokens per second on ggml's CPU backend",
        format!("{:.1}", cpu.speed()),
    );
    let comparison = compare::compare(&cpu.choices, &vgpu.choices);
    let verdict = report_comparison(&comparison, compare::tolerance(options.file_type));
    progress::say(&format!("\nlogs and raw figures: {}", dir.display()));
    used.and(verdict)
}

/// Prints where the nodes ran and what crossed the boundary; an error if VGPU0 was not used fully.
fn report_use(vgpu: &Generation, tokens: usize) -> Result<()> {
    let nodes = sched::last_graph(&vgpu.log);
    let counts = sched::count_by_device(&nodes);
    let on = |device| counts.get(device).copied().unwrap_or(0);
    row("graph nodes on VGPU0", on("VGPU0"));
    row("graph nodes on ggml's CPU backend", on("CPU"));
    for node in nodes.iter().filter(|node| node.device == "CPU") {
        println!("    {} {}", node.op, node.name);
    }

    let stats = Stats::read(&vgpu.stats)?;
    ensure!(
        stats.device == "VGPU0",
        "the statistics are those of {}",
        stats.device
    );
    // The program generates twice, for speed and for the probabilities: this is the second time.
    let decode = stats.decode_steps(tokens)?;
    row(
        "bytes to the executor per token",
        median(decode.iter().map(|t| t.bytes_to_host)),
    );
    row(
        "bytes from the executor per token",
        median(decode.iter().map(|t| t.bytes_from_host)),
    );
    row(
        "bytes copied through shared memory per token",
        median(decode.iter().map(|t| t.copied_to_host + t.copied_from_host)),
    );
    row(
        "messages per token",
        median(decode.iter().map(|t| t.messages)),
    );
    row(
        "blocking round trips per token",
        median(decode.iter().map(|t| t.round_trips)),
    );
    row("graphs submitted in all", stats.graphs);
    row("of these sent whole, not as a patch", stats.full_graphs);

    ensure!(
        on("VGPU0") > 0,
        "no node ran on VGPU0: the program did not use the plugin"
    );
    let misplaced = sched::misplaced(&nodes);
    ensure!(
        misplaced.is_empty(),
        "{} nodes ran on the CPU, first {:?}",
        misplaced.len(),
        misplaced[0]
    );
    Ok(())
}

/// Prints how the two sides agree; an error if they do not.
fn report_comparison(comparison: &Comparison, tolerance: f64) -> Result<()> {
    let difference = comparison.largest_difference;
    row("largest difference of a logit", format!("{difference:.4}"));
    if difference > tolerance {
        bail!("a logit differs by {difference:.4}; rounding explains at most {tolerance}");
    }
    match comparison.divergence {
        None => {
            row("equal tokens", comparison.tokens);
            Ok(())
        }
        // Both sides found both tokens equally good: neither is wrong.
        Some(divergence)
            if divergence
                .log_probability_gap
                .is_some_and(|margin| margin <= 2.0 * tolerance) =>
        {
            let margin = divergence.log_probability_gap.unwrap_or_default();
            row("equal tokens until a tie", divergence.at);
            println!("    there the two best tokens are {margin:.4} apart on the CPU");
            Ok(())
        }
        Some(divergence) => bail!(
            "token {} differs, and it was no tie: the CPU preferred its own by {:?}",
            divergence.at,
            divergence.log_probability_gap
        ),
    }
}

fn speed(generation: &Generation) -> String {
    format!(
        "loaded in {:.1} s, {:.1} tokens/s",
        generation.load,
        generation.speed()
    )
}

/// Prints one line of the table.
fn row(label: &str, value: impl Display) {
    println!("{label:<44} {:>12}", value.to_string());
}
