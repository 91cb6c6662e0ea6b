//! Text from `llama-server`: the same through the plugin as from ggml's CPU backend.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::llama_server::Server;
use crate::previous::previous;
use xtask_common::compare::{self, Choice};
use xtask_common::dist::Dist;
use xtask_common::llama;
use xtask_common::median;
use xtask_common::model::FileType;
use xtask_common::node_llama::Backend;
use xtask_common::progress::heading;
use xtask_common::sched;
use xtask_common::stats::Stats;
use xtask_common::workspace;

use crate::test_run::{PROMPT, Served, TestRun};

const TOKENS: usize = 64;
pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("generation in llama-server");
    let Some(dist) = tests.dist() else { return };
    let built = tests.prepare("build of llama-server", |b| {
        llama::build(b.cache, llama::Stage::Tools)
    });
    let Some(bin) = built else { return };

    for file_type in [FileType::F16, FileType::Q4KM] {
        let reference = tests.prepare("text from ggml's CPU backend", |tests| {
            let none = workspace::reports().join("unused.stats.json");
            let log = tests.log(&format!("llama-server-{}-cpu", file_type.name()));
            let server = Server::start(&bin, &tests.model(file_type)?, &Backend::Cpu, &none, &log)?;
            let choices = server.complete(PROMPT, TOKENS)?;
            server.stop()?;
            Ok(choices)
        });
        let Some(reference) = reference else { continue };
        for link in ["unix", "inproc"] {
            let name = format!("{TOKENS} tokens, {}, over {link}", file_type.name());
            let log = format!("llama-server-{}-{link}", file_type.name());
            tests.check(&name, |tests, _| {
                compare_over(tests, &bin, &dist, file_type, (link, &log), &reference)
            });
        }
        if file_type == FileType::Q4KM {
            let name = format!("{TOKENS} tokens, layers split over two devices of one executor");
            tests.check(&name, |tests, _| {
                over_two_devices(tests, &bin, &dist, file_type, &reference)
            });
        }
        if tests.options.full && file_type == FileType::F16 {
            beside_the_previous_release(tests, &bin, &dist, &reference);
        }
    }
}

/// One of plugin and executor is of the previous release.
fn beside_the_previous_release(
    tests: &mut TestRun<'_>,
    bin: &Path,
    dist: &Dist,
    reference: &[Choice],
) {
    let made = tests.prepare("the previous release", |tests| previous(tests.cache));
    let Some(made) = made else { return };
    for (name, log, plugin, vgpu) in [
        (
            "the previous plugin on this executor",
            "llama-server-previous-plugin",
            &made.dist.plugin,
            &dist.vgpu,
        ),
        (
            "this plugin on the previous executor",
            "llama-server-previous-executor",
            &dist.plugin,
            &made.dist.vgpu,
        ),
    ] {
        let mixed = Dist {
            plugin: plugin.clone(),
            vgpu: vgpu.clone(),
        };
        tests.check(&format!("{TOKENS} tokens, {name}"), |tests, _| {
            compare_over(tests, bin, &mixed, FileType::F16, ("unix", log), reference)
        });
    }
}

/// The layers of the model are split over two devices of one executor, which has two engines.
fn over_two_devices(
    tests: &TestRun<'_>,
    bin: &Path,
    dist: &Dist,
    file_type: FileType,
    reference: &[Choice],
) -> Result<String> {
    let name = "llama-server-two-devices";
    let further = format!("--engine=ggml:{}", bin.join("libggml-cpu.so").display());
    let served = Served::start_engine(
        &mut Command::new(&dist.vgpu),
        "cpu",
        &[&further, "--trust-guests"],
        &tests.log(&format!("{name}-vgpu-serve")),
    )?;
    let endpoint = served.executor.endpoint();
    let backend = Backend::Plugin {
        dist,
        endpoint: &endpoint,
    };
    let stats = workspace::reports().join(format!("{name}.stats.json"));
    let model = tests.model(file_type)?;
    let server = Server::start(bin, &model, &backend, &stats, &tests.log(name))?;
    let choices = server.complete(PROMPT, TOKENS)?;
    let log = server.log();
    server.stop()?;
    served.executor.stop().context("stopping the executor")?;

    let nodes = sched::last_graph(&log);
    let counts = sched::count_by_device(&nodes);
    let of = |device| counts.get(device).copied().unwrap_or_default();
    let (first, second) = (of("VGPU0"), of("VGPU1"));
    ensure!(
        first > 0 && second > 0,
        "the nodes are not on two devices: {counts:?}"
    );
    let misplaced = sched::misplaced(&nodes);
    ensure!(misplaced.is_empty(), "the CPU has nodes: {counts:?}");
    let largest = equal_text(file_type, reference, &choices)?;
    Ok(format!(
        "equal, logits within {largest:.4}; {first} nodes on VGPU0, {second} on VGPU1"
    ))
}

/// `link`, with the name of the logs.
fn compare_over(
    tests: &TestRun<'_>,
    bin: &Path,
    dist: &Dist,
    file_type: FileType,
    (link, name): (&str, &str),
    reference: &[Choice],
) -> Result<String> {
    let served = match link {
        "unix" => Some(Served::start(
            dist,
            &tests.log(&format!("{name}-vgpu-serve")),
        )?),
        _ => None,
    };
    let endpoint = served
        .as_ref()
        .map_or_else(|| link.to_owned(), |s| s.executor.endpoint());
    let stats = workspace::reports().join(format!("{name}.stats.json"));
    let backend = Backend::Plugin {
        dist,
        endpoint: &endpoint,
    };
    let model = tests.model(file_type)?;
    let server = Server::start(bin, &model, &backend, &stats, &tests.log(name))?;
    let choices = server.complete(PROMPT, TOKENS)?;
    let log = server.log();
    server.stop()?;
    if let Some(served) = served {
        served.executor.stop().context("stopping the executor")?;
    }

    let nodes = sched::last_graph(&log);
    let misplaced = sched::misplaced(&nodes);
    let on_device = nodes.iter().filter(|node| node.device == "VGPU0").count();
    ensure!(on_device > 0, "no node ran on VGPU0");
    ensure!(
        misplaced.is_empty(),
        "{} nodes ran on the CPU, first {:?}",
        misplaced.len(),
        misplaced[0]
    );

    let largest = equal_text(file_type, reference, &choices)?;

    let stats = Stats::read(&stats)?;
    let decode = stats.decode_steps(TOKENS)?;
    Ok(format!(
        "equal, logits within {largest:.4}; per token {} messages, {} B there, {} B back, {} \
         round trip",
        median(decode.iter().map(|step| step.messages)),
        median(decode.iter().map(|step| step.bytes_to_host)),
        median(decode.iter().map(|step| step.bytes_from_host)),
        median(decode.iter().map(|step| step.round_trips)),
    ))
}

/// The largest difference of a logit between two equal texts.
///
/// # Errors
/// The texts differ, or the logits by more than rounding explains.
fn equal_text(file_type: FileType, reference: &[Choice], choices: &[Choice]) -> Result<f64> {
    let comparison = compare::compare(reference, choices);
    let (largest, bound) = (comparison.largest_difference, compare::tolerance(file_type));
    ensure!(
        comparison.tokens == TOKENS,
        "{} tokens instead of {TOKENS}",
        comparison.tokens
    );
    ensure!(
        comparison.divergence.is_none(),
        "the text differs from the CPU's: {:?}; largest difference of a logit {largest:.4}",
        comparison.divergence
    );
    ensure!(
        largest <= bound,
        "a logit differs by {largest:.4}; rounding explains {bound}"
    );
    Ok(largest)
}
