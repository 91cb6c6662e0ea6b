//! llama.cpp's own tests of models, with the models on VGPU0: every architecture it knows, saved
//! and restored states, several contexts at once.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::ops::DEVICE;
use crate::preload::{self, Library};
use xtask_common::dist::Dist;
use xtask_common::ggml_releases::{self, Release};
use xtask_common::llama;
use xtask_common::model::FileType;
use xtask_common::node_llama::{self, Backend};
use xtask_common::process;
use xtask_common::progress::{Progress, heading};
use xtask_common::sched::{self, ScheduledNode};
use xtask_common::scratch::Scratch;
use xtask_common::stats::Stats;
use xtask_common::workspace;

use crate::test_run::{Served, TestRun};

/// The seed of the weights.
const SEED: &str = "1";

/// What llama.cpp logs if a fused operator is not computed by the device of its layer. llama.cpp
/// then builds the model's graphs from simple operators, none of which is on the CPU.
const DISABLED: &str = "not supported, set to disabled";

/// The architecture with operators of its own, and these, as the scheduler prints them.
const DEEPSEEK: (&str, [&str; 3]) = ("deepseek4", ["DSV4_HC_PR", "DSV4_HC_CO", "DSV4_HC_PO"]);

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("llama.cpp's tests of models on VGPU0");
    let Some(dist) = tests.dist() else { return };
    if tests.options.wants_ggml(llama::RELEASE, true) {
        of_main_release(tests, &dist);
    }
    // The architecture whose operators differ most between releases of ggml.
    if tests.options.wants_ggml(llama::NEWEST_RELEASE, true) {
        let build = |b: &TestRun<'_>| llama::newest_archs(b.cache);
        deepseek_v4(tests, &dist, (llama::NEWEST_RELEASE, Logs::Option), build);
    }
    let with_deepseek = |release: &&Release| release.tests_deepseek_v4();
    for release in ggml_releases::RELEASES.iter().filter(with_deepseek) {
        if tests.options.wants_build(release, false) {
            let version = (release.name(), Logs::Preloaded);
            let build = |b: &TestRun<'_>| release.archs(b.cache);
            deepseek_v4(tests, &dist, (&version.0, version.1), build);
        }
    }
}

/// The tests of the release that most tests run on.
fn of_main_release(tests: &mut TestRun<'_>, dist: &Dist) {
    let built = tests.prepare("build of llama.cpp's tests", |b| {
        llama::build(b.cache, llama::Stage::Tools)
    });
    let Some(bin) = built else { return };
    tests.check("every architecture", |tests, progress| {
        over_unix(tests, dist, "archs", |backend| {
            architectures(tests, (&bin, "archs", Logs::Option), &[], backend, progress)
        })
    });
    tests.check("states saved and restored", |tests, progress| {
        over_unix(tests, dist, "save-load-state", |backend| {
            let mut program = Command::new(bin.join("test-save-load-state"));
            let scratch = Scratch::new()?;
            program.current_dir(scratch.path()); // it writes a file where it is
            on_device(tests, &mut program, backend, "save-load-state", progress)
        })
    });
    tests.check("several contexts at once", |tests, progress| {
        over_unix(tests, dist, "thread-safety", |backend| {
            let mut program = Command::new(bin.join("test-thread-safety"));
            program.args(["--parallel", "2", "--predict", "32", "--ctx-size", "256"]);
            program.args(["--prompt", "A virtual machine asks its host"]);
            on_device(tests, &mut program, backend, "thread-safety", progress)
        })
    });
}

/// Random models of DeepSeek-V4 with the `test-llama-archs` of another release of ggml, which
/// `build` builds.
fn deepseek_v4(
    tests: &mut TestRun<'_>,
    dist: &Dist,
    (version, logs): (&str, Logs),
    build: impl FnOnce(&TestRun<'_>) -> Result<PathBuf>,
) {
    let what = format!("build of llama.cpp's tests for ggml {version}");
    let Some(bin) = tests.prepare(&what, build) else {
        return;
    };
    tests.check(
        &format!("DeepSeek-V4, ggml {version}"),
        |tests, progress| {
            let name = format!("archs-{}", version.replace(' ', "-"));
            over_unix(tests, dist, &name, |backend| {
                let build = (bin.as_path(), name.as_str(), logs);
                architectures(tests, build, &["-a", DEEPSEEK.0], backend, progress)
            })
        },
    );
}

/// Runs `work` with the plugin and an executor on a socket.
fn over_unix<T>(
    tests: &TestRun<'_>,
    dist: &Dist,
    name: &str,
    work: impl FnOnce(&Backend<'_>) -> Result<T>,
) -> Result<T> {
    let served = Served::start(dist, &tests.log(&format!("{name}-vgpu-serve")))?;
    let endpoint = served.executor.endpoint();
    let done = work(&Backend::Plugin {
        dist,
        endpoint: &endpoint,
    })?;
    served.executor.stop().context("stopping the executor")?;
    Ok(done)
}

/// Runs a test that takes a model, with all layers on the device.
fn on_device(
    tests: &TestRun<'_>,
    program: &mut Command,
    backend: &Backend<'_>,
    name: &str,
    progress: &Progress,
) -> Result<String> {
    let stats = workspace::reports().join(format!("{name}.stats.json"));
    let _ = std::fs::remove_file(&stats); // an old one must not be taken for its own
    program
        .arg("--model")
        .arg(tests.model(FileType::Q4KM)?)
        .args(["--gpu-layers", "99"])
        .args(["--threads", &workspace::cores().to_string()]);
    node_llama::set_backend(program, backend, &stats);
    process::run(program, progress, &tests.log(name))?;
    let graphs = Stats::read(&stats)?.graphs;
    ensure!(graphs > 0, "no graph ran on {DEVICE}");
    Ok(format!("{graphs} graphs"))
}

/// How the scheduler's decisions get into the output of a `test-llama-archs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Logs {
    /// By a preloaded library. The program of older releases has no option for debug messages.
    Preloaded,
    /// By an option of the program.
    Option,
}

/// Random models of every architecture, or of those that `arguments` choose: logits as on the CPU,
/// the same logits after saving and loading, and no node of the model on the CPU. `name` is for the
/// names of logs and statistics.
fn architectures(
    tests: &TestRun<'_>,
    (bin, name, logs): (&Path, &str, Logs),
    arguments: &[&str],
    backend: &Backend<'_>,
    progress: &Progress,
) -> Result<String> {
    // The program itself loads no backends.
    let library = match logs {
        Logs::Preloaded => Library::LogNodes,
        Logs::Option => Library::LoadBackends,
    };
    let library = library.build(tests.cache, bin)?;
    let mut program = Command::new(bin.join("test-llama-archs"));
    program.args(["-s", SEED]).args(arguments);
    if logs == Logs::Option {
        program.args(["-b", DEVICE, "-v", "5"]);
    }
    // The scheduler's decisions are debug messages.
    program.env("GGML_SCHED_DEBUG", "2");
    let stats = workspace::reports().join(format!("{name}.stats.json"));
    let _ = std::fs::remove_file(&stats); // an old one must not be taken for its own
    node_llama::set_backend(&mut program, backend, &stats);
    preload::set(&mut program, &library);

    let mut seen = Seen::default();
    let log = tests.log(&format!("test-llama-{name}"));
    let status = process::run_lines(&mut program, &log, |line| {
        if let Some(architecture) = seen.line(line) {
            progress.note(architecture);
        }
    })?;
    ensure!(
        status.success(),
        "test-llama-archs ended with {status}\n{}",
        process::tail(&log)
    );
    let graphs = Stats::read(&stats)?.graphs;
    ensure!(graphs > 0, "no graph ran on {DEVICE}");
    let found = seen.check()?;
    seen.has_executed(DEEPSEEK.0)?;
    Ok(found)
}

/// The output of `test-llama-archs` so far.
#[derive(Debug, Default)]
struct Seen {
    /// The current row: an architecture and its configuration.
    row: String,
    graph: Vec<ScheduledNode>,
    last_index: Option<u32>,
    /// The number of graphs with nodes on the device per row.
    on_device: BTreeMap<String, u64>,
    /// The number of nodes that the device computes.
    nodes: u64,
    /// Nodes of these graphs that should not be on the CPU.
    misplaced: Vec<String>,
    /// Rows that were not skipped.
    executed: BTreeSet<String>,
    /// The operators that the device computes, per row.
    ops: BTreeMap<String, BTreeSet<String>>,
    /// Messages about operators that llama.cpp has replaced.
    disabled: Vec<String>,
}

impl Seen {
    /// Parses a line. Returns the row if one begins with it.
    fn line(&mut self, line: &str) -> Option<&str> {
        if line.contains(DISABLED) {
            self.disabled.push(format!("{}: {line}", self.row));
        }
        if let Some((index, node)) = line.find("node #").and_then(|at| sched::parse(&line[at..])) {
            // Indices increase within a graph, so a smaller index begins the next graph.
            if self.last_index.is_some_and(|last| index <= last) {
                self.end_graph();
            }
            self.last_index = Some(index);
            self.graph.push(node);
            return None;
        }
        let mut cells = line.strip_prefix('|')?.split('|');
        let (architecture, _, configuration) = (cells.next()?, cells.next()?, cells.next()?);
        let result = cells.next()?;
        if architecture.starts_with('-') || result.trim_start().starts_with("NMSE") {
            return None; // the header
        }
        self.end_graph();
        self.row = format!("{} {}", architecture.trim(), configuration.trim());
        if !result.contains("SKIP") {
            self.executed.insert(self.row.clone());
        }
        Some(&self.row)
    }

    /// Checks that a model of the architecture was not skipped.
    fn has_executed(&self, architecture: &str) -> Result<()> {
        let mut rows = { self.executed.iter() }.filter_map(|row| row.split(' ').next());
        ensure!(
            rows.any(|row| row == architecture),
            "no model of {architecture} ran"
        );
        Ok(())
    }

    fn end_graph(&mut self) {
        self.last_index = None;
        let graph = std::mem::take(&mut self.graph);
        // Other graphs are those of the reference on the CPU.
        if graph.iter().any(|node| node.device == DEVICE) {
            *self.on_device.entry(self.row.clone()).or_default() += 1;
            let of_device = { graph.iter() }.filter(|node| node.device == DEVICE);
            let ops: Vec<String> = of_device.map(|node| node.op.clone()).collect();
            self.nodes += ops.len() as u64;
            self.ops.entry(self.row.clone()).or_default().extend(ops);
            let misplaced = sched::misplaced(&graph);
            let describe =
                |node: &&ScheduledNode| format!("{}: {} {}", self.row, node.op, node.name);
            self.misplaced.extend(misplaced.iter().map(describe));
        }
    }

    /// Checks the output after the program has ended successfully, which means that all results are
    /// correct. The end of the output may be missing, since the program's log thread ends with it.
    fn check(&mut self) -> Result<String> {
        self.end_graph();
        if let Some(first) = self.misplaced.first() {
            bail!(
                "{} nodes ran on the CPU, first {first}",
                self.misplaced.len()
            );
        }
        if let Some(first) = self.disabled.first() {
            bail!(
                "llama.cpp has replaced {} operators, first {first}",
                self.disabled.len()
            );
        }
        let (architecture, ops) = DEEPSEEK;
        let rows = { self.executed.iter() }.filter(|row| row.starts_with(architecture));
        for row in rows {
            let found = self.ops.get(row).cloned().unwrap_or_default();
            let missing: Vec<&str> = { ops.into_iter() }
                .filter(|&op| !found.contains(op))
                .collect();
            ensure!(missing.is_empty(), "{row}: no node {missing:?} on {DEVICE}");
        }
        let without: Vec<&String> = self
            .executed
            .iter()
            .filter(|row| !self.on_device.contains_key(*row))
            .collect();
        ensure!(
            !self.executed.is_empty() && without.is_empty(),
            "{} models, of which these have no graph on {DEVICE}: {without:?}",
            self.executed.len()
        );
        Ok(format!(
            "{} models, {} graphs, {} nodes on {DEVICE}, none on the CPU",
            self.executed.len(),
            self.on_device.values().sum::<u64>(),
            self.nodes
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
|     Model arch.|  Device|Config|   NMSE vs. CPU|Roundtrip|
|----------------|--------|------|---------------|---------|
|            clip|    vGPU| Dense|SKIP           |     SKIP|
|           llama|    vGPU| Dense|0.00.003 I llama_model_loader: loaded
0.1 D node #  0 (  GET_ROWS):                 embd (   1K) [  CPU         ] use=2,c=1:0.1 D  token_embd.weight ( 1K) [  CPU         ]
0.1 D node #  1 (  RMS_NORM):               norm-0 (   1K) [  CPU         ] use=1,c=1:0.1 D
0.1 D node #  0 (  GET_ROWS):                 embd (   1K) [  CPU         ] use=2,c=1:0.1 D  token_embd.weight ( 1K) [  CPU         ]
0.1 D node #  1 (  RMS_NORM):               norm-0 (   1K) [VGPU0         ] use=1,c=1:0.1 D
OK (1.0e-10)|  OK|
Summary: all 1 test(s) passed
";

    #[test]
    fn graphs_of_cpu_and_device_are_distinguished() {
        let mut seen = Seen::default();
        let rows = OUTPUT.lines().filter(|l| seen.line(l).is_some()).count();
        assert_eq!(rows, 2);
        let found = seen.check().unwrap();
        assert!(
            found.starts_with("1 models, 1 graphs, 1 nodes on VGPU0"),
            "{found}"
        );
        seen.has_executed("llama").unwrap();
        assert!(seen.has_executed("clip").is_err(), "skipped");
        assert!(seen.has_executed("lla").is_err(), "no such architecture");

        let stray = OUTPUT.replace("norm-0 (   1K) [VGPU0", "norm-0 (   1K) [  CPU");
        let stray = stray.replace(
            "Summary",
            "0.1 D node #  2 (       ADD):  l (   1K) [VGPU0  ] use=1,c=1:\nSummary",
        );
        let mut seen = Seen::default();
        stray.lines().for_each(|line| {
            seen.line(line);
        });
        assert!(seen.check().is_err());
        assert_eq!(seen.misplaced, ["llama Dense: RMS_NORM norm-0"]);
    }

    #[test]
    fn replaced_operators_are_detected() {
        let check = |output: &str| {
            let mut seen = Seen::default();
            output.lines().for_each(|line| {
                seen.line(line);
            });
            seen.check().map_err(|error| error.to_string())
        };
        let node = "0.1 D node #  2 (";
        let disabled = OUTPUT.replace(
            "0.1 D node #  1",
            &format!("0.1 W resolve_fused_ops: fused DSV4 hc_pre {DISABLED}\n0.1 D node #  1"),
        );
        let error = check(&disabled).unwrap_err();
        assert!(error.contains("llama Dense: 0.1 W resolve"), "{error}");

        // The simple operators of DeepSeek-V4 in place of its own.
        let deepseek = OUTPUT.replace("llama|", "deepseek4|");
        let error = check(&deepseek).unwrap_err();
        assert!(error.contains("deepseek4 Dense: no node"), "{error}");
        let of = |ops: &[&str]| {
            let nodes = ops.iter().enumerate().map(|(i, op)| {
                let node = node.replace('2', &(i + 2).to_string());
                format!("{node}{op}):  x (   1K) [VGPU0  ] use=1,c=1:\n")
            });
            deepseek.replace("Summary", &format!("{}Summary", nodes.collect::<String>()))
        };
        let (_, ops) = DEEPSEEK;
        check(&of(&ops)).unwrap();
        let error = check(&of(&ops[..2])).unwrap_err();
        assert!(error.contains("DSV4_HC_PO"), "{error}");
    }

    #[test]
    fn model_without_a_graph_on_the_device_is_detected() {
        let mut seen = Seen::default();
        assert!(seen.check().is_err(), "there is no model");
        for line in OUTPUT.lines().take(6) {
            seen.line(line);
        }
        let error = seen.check().unwrap_err().to_string();
        assert!(error.contains("llama Dense"), "{error}");
    }
}
