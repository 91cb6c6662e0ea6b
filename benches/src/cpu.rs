//! `cargo xtask bench cpu`: the CPU engine compared with ggml's own CPU backend.
//!
//! Both use the same threads and the same instruction sets; ggml's backend is built with its
//! repacked layouts and its llamafile kernels, and chooses among them itself. The repeats of the
//! configurations alternate, so that other load affects all of them. Every figure is the median of
//! its repeats.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::common::{Build, Needs, keep, ticks, tokens_per_second};
use crate::table::Row;
use xtask_common::cache::Cache;
use xtask_common::dist::Dist;
use xtask_common::executor::Executor;
use xtask_common::llama;
use xtask_common::median;
use xtask_common::model::{self, FileType, Shape};
use xtask_common::println;
use xtask_common::process;
use xtask_common::progress::{Progress, heading};
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

/// The variable that limits the instruction sets of vgpu's engine.
const LEVEL: &str = "VGPU_CPU_LEVEL";

/// Options of the benchmark.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Repeats of each figure
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Threads of every engine [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    /// Only these parts
    #[arg(long, value_enum, num_args = 1..)]
    only: Vec<Part>,
    /// Only these types of weights
    #[arg(long, value_parser = model::file_type_parser(), num_args = 1..)]
    types: Vec<FileType>,
    /// Only these models
    #[arg(long, value_enum, num_args = 1..)]
    models: Vec<Model>,
    /// The instruction sets of both sides [default: all of this machine's]
    #[arg(long, value_enum)]
    isa: Option<Isa>,
    /// Batch sizes of prefill
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 512])]
    batches: Vec<u32>,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 512)]
    prompt: u32,
    /// Tokens to decode
    #[arg(long, default_value_t = 128)]
    tokens: u32,
    /// The name of the file of figures, so that several runs keep theirs
    #[arg(long, default_value = "cpu")]
    name: String,
    /// Measure the engines' CPU time instead of elapsed time, for machines with other load
    #[arg(long)]
    processor_time: bool,
    /// Leave out the engine inside the program: a third less time
    #[arg(long)]
    no_inproc: bool,
    #[command(flatten)]
    build: Build,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Matrix products of one thread, beside the memory's bandwidth
    Kernels,
    /// Prefill
    Prefill,
    /// Decoding
    Decode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Model {
    #[value(name = "256m")]
    Small,
    #[value(name = "1b")]
    Large,
}

impl Model {
    fn shape(self) -> &'static Shape {
        match self {
            Model::Small => &model::BENCH,
            Model::Large => &model::LARGE,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Isa {
    /// The baseline of every x86-64 CPU
    Scalar,
    /// AVX2, FMA and F16C
    Avx2,
    /// The same with AVX-VNNI
    Avx2Vnni,
    /// AVX-512
    Avx512,
    /// AVX-512, and AMX in vgpu's engine only: GCC 12 compiles ggml's AMX to code that crashes
    Amx,
}

impl Isa {
    /// The name of the level for vgpu's engine.
    fn level(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx2Vnni => "avx2vnni",
            // What the engine takes by itself on a processor without AMX.
            Isa::Avx512 if is_intel() => "avx512",
            Isa::Avx512 => "avx512bf16",
            Isa::Amx => "amx",
        }
    }
}

/// Whether this is a processor of Intel, whose BF16 dot product in 512 bits is not faster.
fn is_intel() -> bool {
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    processor.contains("GenuineIntel")
}

/// The configurations, by the names of their figures.
const UNIX: &str = "unix";
const INPROC: &str = "inproc";
const NATIVE: &str = "ggml-cpu";

/// Names of figures.
const STEADY: &str = "while a model runs";
const PEAK: &str = "most at once, with cache and activations";

/// The limit of an executor's memory without the KV cache, as a multiple of the model's size.
const MAX_MEMORY: f64 = 1.1;

/// The additional runs of a measurement when CPU time is counted.
const MORE: u32 = 2;

/// The targets of prefill and decoding, and the lower limit of every row.
const PREFILL_TARGET: f64 = 1.5;
const DECODE_TARGET: f64 = 1.0;

struct Setting<'a> {
    cache: &'a Cache,
    options: &'a Options,
    /// Where `llama-bench` and ggml's libraries are.
    bin: PathBuf,
    /// A folder whose `llama-bench` uses ggml's CPU backend with the wanted instruction sets.
    native: PathBuf,
    dist: Dist,
    folder: PathBuf,
    threads: usize,
    scratch: Scratch,
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("what is needed");
    let setting = Setting::prepare(cache, options)?;
    heading("cpu");
    let wanted = |part: Part| options.only.is_empty() || options.only.contains(&part);
    let under = json!({
        "threads": setting.threads,
        "repeats": options.repeats,
        "isa": options.isa.map(Isa::level),
        "processor time": options.processor_time,
    });
    // After each model, so that a run that is cut short keeps what it has.
    let keep = |rows: &[Row]| keep(&setting.folder, &options.name, under.clone(), rows);
    let mut rows = Vec::new();
    if wanted(Part::Kernels) {
        rows.extend(setting.kernels()?);
        keep(&rows)?;
    }
    let chosen =
        |file_type: &FileType| options.types.is_empty() || options.types.contains(file_type);
    for model in [Model::Small, Model::Large] {
        if !options.models.is_empty() && !options.models.contains(&model) {
            continue;
        }
        if !wanted(Part::Prefill) && !wanted(Part::Decode) {
            continue;
        }
        for file_type in FileType::ALL.into_iter().filter(chosen) {
            let found = setting.model(model.shape(), file_type, &wanted)?;
            found.iter().for_each(|row| println!("{}", row.lines()));
            rows.extend(found);
            keep(&rows)?;
        }
    }
    Ok(())
}

/// A measurement of `llama-bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measure {
    /// A prompt in batches of this number of tokens.
    Prefill(u32),
    Decode,
}

impl Setting<'_> {
    fn prepare<'a>(cache: &'a Cache, options: &'a Options) -> Result<Setting<'a>> {
        let Needs {
            bin, dist, folder, ..
        } = Needs::prepare(cache, &options.build)?;
        let scratch = Scratch::new()?;
        let backend = match options.isa {
            None | Some(Isa::Avx512 | Isa::Amx) => bin.join("libggml-cpu.so"),
            Some(Isa::Avx2) => llama::cpu_for_guests(cache)?,
            Some(Isa::Avx2Vnni) => llama::cpu_with_avx_vnni(cache)?,
            Some(Isa::Scalar) => llama::cpu_without_simd(cache)?,
        };
        // ggml takes the backends that lie beside the program, whose own path a symbolic link
        // would not change.
        let native = scratch.path().join("native");
        std::fs::create_dir_all(&native)
            .with_context(|| format!("creating {}", native.display()))?;
        let base = bin.join("libggml-base.so");
        for file in [bin.join("llama-bench"), base, backend] {
            let name = file.file_name().context("a file has a name")?;
            std::fs::copy(&file, native.join(name))
                .with_context(|| format!("copying {}", file.display()))?;
        }
        Ok(Setting {
            cache,
            options,
            bin,
            native,
            dist,
            folder,
            threads: options.threads.unwrap_or_else(workspace::cores),
            scratch,
        })
    }

    /// Measures one model: each selected measurement in each configuration in turn.
    fn model(
        &self,
        shape: &Shape,
        file_type: FileType,
        wanted: &dyn Fn(Part) -> bool,
    ) -> Result<Vec<Row>> {
        let path = model::ensure(self.cache, shape, file_type)?;
        let mut measures = Vec::new();
        if wanted(Part::Decode) {
            measures.push(Measure::Decode);
        }
        if wanted(Part::Prefill) {
            measures.extend(self.options.batches.iter().map(|&n| Measure::Prefill(n)));
        }
        let executor = self.executor()?;
        let before = executor.memory()?;
        let mut steady = 0;
        let ways = match self.options.no_inproc {
            true => vec![UNIX, NATIVE],
            false => vec![UNIX, INPROC, NATIVE],
        };
        let mut speeds = vec![vec![Vec::new(); ways.len()]; measures.len()];
        for round in 1..=self.options.repeats {
            let progress = Progress::new(&format!(
                "{} {}, round {round} of {}",
                shape.name,
                file_type.name(),
                self.options.repeats
            ));
            for (measure, speeds) in measures.iter().zip(&mut speeds) {
                for (way, speeds) in ways.iter().zip(speeds) {
                    progress.note(&format!("{way}, {measure:?}"));
                    let run = || self.bench(&path, *measure, way, &executor);
                    let (speed, memory) = executor.median_memory(run)?;
                    speeds.push(speed?);
                    if *way == UNIX {
                        steady = steady.max(memory);
                    }
                }
            }
            progress.done("");
        }
        let file = std::fs::metadata(&path)
            .with_context(|| format!("looking at {}", path.display()))?
            .len() as f64;
        let peak = executor.peak_memory()? as f64;
        executor.stop()?;

        let name = shape.name.trim_start_matches("vgpu-llama-");
        let mut rows: Vec<Row> = measures
            .iter()
            .zip(speeds)
            .map(|(measure, speeds)| {
                let (what, target) = match measure {
                    Measure::Decode => (format!("tg{}", self.options.tokens), DECODE_TARGET),
                    // A batch of one token is the same work as decoding.
                    Measure::Prefill(1) => {
                        (format!("pp{} -ub 1", self.options.prompt), DECODE_TARGET)
                    }
                    Measure::Prefill(batch) => {
                        let what = format!("pp{} -ub {batch}", self.options.prompt);
                        (what, PREFILL_TARGET)
                    }
                };
                let what = format!("{name} {}, {what}", file_type.name());
                let mut row = Row::new(what, "tok/s");
                for (way, speeds) in ways.iter().zip(speeds) {
                    row = row.figure(*way, median(speeds));
                }
                row.ratio(UNIX, NATIVE, true, Some(target))
                    .ratio(INPROC, NATIVE, true, None)
            })
            .collect();
        let what = format!("{name} {}, memory of the executor", file_type.name());
        let cache = shape.cache_bytes(self.context(&measures)) as f64;
        let memory = Row::new(what, "MB")
            .figure("the model's file", file / 1e6)
            .figure("its cache", cache / 1e6)
            .figure("the executor before", before as f64 / 1e6)
            .figure(STEADY, steady as f64 / 1e6)
            .figure(PEAK, peak / 1e6)
            .at_most(PEAK, (MAX_MEMORY * file + cache) / 1e6);
        rows.push(memory);
        Ok(rows)
    }

    /// The longest context that one of the measures makes a cache for: llama.cpp rounds up.
    fn context(&self, measures: &[Measure]) -> u64 {
        let of = |measure: &Measure| match measure {
            Measure::Prefill(_) => self.options.prompt,
            Measure::Decode => self.options.tokens,
        };
        let most = measures.iter().map(of).max().unwrap_or(0);
        u64::from(most).next_multiple_of(256)
    }

    /// Serves with the wanted instruction sets.
    fn executor(&self) -> Result<Executor> {
        let socket = self.scratch.path().join("cpu.sock");
        let mut serve = Command::new(&self.dist.vgpu);
        self.limit(&mut serve);
        let log = self.folder.join("cpu-serve.log");
        // With pinned threads, the engine's threads do all the work. The session's thread, which
        // also waits for its guest, does none.
        let pin: &[&str] = match self.options.processor_time {
            true => &["--pin"],
            false => &[],
        };
        Executor::start_command(&mut serve, &socket, self.threads, &log, pin)
    }

    /// Limits the instruction sets of a vgpu program.
    fn limit(&self, command: &mut Command) {
        command.env_remove(LEVEL);
        if let Some(level) = self.options.isa.map(Isa::level) {
            command.env(LEVEL, level);
        }
    }

    /// Tokens per second.
    fn bench(&self, model: &Path, measure: Measure, way: &str, executor: &Executor) -> Result<f64> {
        let run = |repeats: u32| {
            let mut command = self.command(model, measure, way, executor, repeats);
            let backend = if way == NATIVE { "CPU" } else { "VGPU" };
            tokens_per_second(&mut command, way, backend)
        };
        if !self.options.processor_time {
            return run(1);
        }
        // Both runs include the fixed cost of a run, mainly loading.
        let seconds = |repeats: u32| -> Result<f64> {
            let time = || match way {
                UNIX => engine_time(executor),
                _ => children_time(),
            };
            let before = time()?;
            run(repeats)?;
            Ok(time()? - before)
        };
        let once = seconds(1)?;
        let more = seconds(1 + MORE)?;
        let tokens = match measure {
            Measure::Prefill(_) => self.options.prompt,
            Measure::Decode => self.options.tokens,
        };
        ensure!(
            more > once,
            "{way}: {more} s of more work, {once} s of less"
        );
        Ok(f64::from(tokens * MORE) / (more - once))
    }

    /// The command line of `llama-bench`.
    fn command(
        &self,
        model: &Path,
        measure: Measure,
        way: &str,
        executor: &Executor,
        repeats: u32,
    ) -> Command {
        let folder = if way == NATIVE {
            &self.native
        } else {
            &self.bin
        };
        let mut command = Command::new(folder.join("llama-bench"));
        let (prompt, tokens, batch) = match measure {
            Measure::Prefill(batch) => (self.options.prompt, 0, batch),
            Measure::Decode => (0, self.options.tokens, 512),
        };
        command.arg("--model").arg(model).args(["-o", "json"]);
        for (option, value) in [
            ("-r", repeats),
            ("-p", prompt),
            ("-n", tokens),
            ("-b", batch),
            ("-ub", batch),
            ("-t", self.threads as u32),
        ] {
            command.args([option, &value.to_string()]);
        }
        for variable in ["GGML_BACKEND_PATH", "VGPU_ENDPOINT", "VGPU_STATS"] {
            command.env_remove(variable);
        }
        self.limit(&mut command);
        if way == NATIVE {
            command.args(["-ngl", "0"]);
            command.env("LD_LIBRARY_PATH", &self.bin);
        } else {
            let endpoint = match way {
                UNIX => executor.endpoint(),
                _ => "inproc".to_owned(),
            };
            command
                .args(["-ngl", "99", "-dev", "VGPU0"])
                .env("GGML_BACKEND_PATH", &self.dist.plugin)
                .env("VGPU_THREADS", self.threads.to_string())
                .env("VGPU_ENDPOINT", endpoint);
        }
        command
    }

    /// The benchmark of matrix products in one thread, compared with ggml's.
    fn kernels(&self) -> Result<Vec<Row>> {
        let progress = Progress::new("products of one thread");
        let mut cargo = workspace::cargo();
        cargo
            .args(["bench", "--package", "vgpu-cpu", "--bench", "gemm"])
            .args(["--", "--json"])
            .env("VGPU_GGML_BIN", &self.native)
            .env("LD_LIBRARY_PATH", &self.bin);
        if let Some(level) = self.options.isa.map(Isa::level) {
            cargo.args(["--level", level]);
        }
        let types = if self.options.types.is_empty() {
            &FileType::ALL[..]
        } else {
            &self.options.types
        };
        // Q4_K_M is a mix.
        let single = types.iter().flat_map(|file_type| match file_type {
            FileType::Q4KM => vec!["q4_K", "q5_K", "q6_K"],
            FileType::Q6K if types.contains(&FileType::Q4KM) => vec![],
            FileType::Q6K => vec!["q6_K"],
            other => vec![other.name()],
        });
        cargo.args(single);
        let log = self.folder.join("kernels.log");
        let mut found = Vec::new();
        let status = process::run_lines(&mut cargo, &log, |line| {
            progress.note(line);
            found.extend(serde_json::from_str::<Value>(line).ok());
        })?;
        ensure!(status.success(), "cargo bench\n{}", process::tail(&log));
        ensure!(!found.is_empty(), "no figures\n{}", process::tail(&log));
        progress.done("");
        let rows: Vec<Row> = found.iter().map(kernel_row).collect::<Result<_>>()?;
        rows.iter().for_each(|row| println!("{}", row.lines()));
        Ok(rows)
    }
}

/// CPU seconds of an executor's engine, without the threads of sessions, which poll for their
/// guests.
fn engine_time(executor: &Executor) -> Result<f64> {
    let tasks = PathBuf::from(format!("/proc/{}/task", executor.pid()));
    let mut nanoseconds = 0;
    for task in std::fs::read_dir(tasks).context("looking at the executor's threads")? {
        let task = task.context("looking at the executor's threads")?.path();
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        // A session's thread may have ended; the engine's threads remain.
        if read("comm").starts_with("vgpu-cpu-") {
            let ran = read("schedstat");
            let ran = ran.split(' ').next().and_then(|n| n.parse::<u64>().ok());
            nanoseconds += ran.context("a thread without a time")?;
        }
    }
    Ok(nanoseconds as f64 * 1e-9)
}

/// CPU seconds of the children that have ended.
fn children_time() -> Result<f64> {
    // `cutime` and `cstime`.
    Ok(ticks("/proc/self/stat", 16)? as f64 / 100.0)
}

/// A row of the matrix product benchmark for one type and number of columns.
fn kernel_row(found: &Value) -> Result<Row> {
    let number = |name: &str| found[name].as_f64();
    let kind = found["type"].as_str().context("a product has a type")?;
    let columns = number("columns").context("a product has columns")?;
    let (unit, target) = if columns == 1.0 {
        ("GB/s", DECODE_TARGET)
    } else {
        ("GFLOPS", PREFILL_TARGET)
    };
    let mut row = Row::new(format!("{kind} times {columns} columns, one thread"), unit);
    for (figure, name) in [
        ("ours", "ours"),
        ("ggml", NATIVE),
        ("repacked", "ggml-cpu, repacked"),
        ("bandwidth", "bandwidth of reading"),
        ("ceiling", "products between registers"),
    ] {
        if let Some(value) = number(figure) {
            row = row.figure(name, value);
        }
    }
    // ggml uses its repacked layout for every type that has one.
    let theirs = match number("repacked") {
        Some(_) => "ggml-cpu, repacked",
        None => NATIVE,
    };
    Ok(row.ratio("ours", theirs, true, Some(target)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_compared_in_the_layout_that_ggml_selects() {
        let found = json!({"type": "q4_0", "columns": 1, "ours": 12.0, "ggml": 6.0,
            "repacked": 10.0, "bandwidth": 20.0});
        let row = kernel_row(&found).unwrap();
        assert_eq!((row.unit, row.figures.len()), ("GB/s", 4));
        assert!((row.ratios[0].value - 1.2).abs() < 1e-9);
        let found = json!({"type": "q8_0", "columns": 512, "ours": 90.0, "ggml": 60.0});
        let row = kernel_row(&found).unwrap();
        assert_eq!(
            (row.unit, row.ratios[0].target),
            ("GFLOPS", Some(PREFILL_TARGET))
        );
        assert!((row.ratios[0].value - 1.5).abs() < 1e-9);
        assert!(kernel_row(&json!({"columns": 1})).is_err());
    }
}
