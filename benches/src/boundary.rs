//! `cargo xtask bench boundary`: the same work over vgpu's link, over ggml-rpc, and without a link.
//!
//! All configurations run on the CPUs of this machine with the same number of threads. The repeats
//! of the configurations alternate, so that other load affects all of them. Every figure is the
//! median of its repeats.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::common::{Build, Needs, keep, show, tokens_per_second};
use crate::driver::{Driver, Sample};
use crate::table::Row;
use xtask_common::cache::Cache;
use xtask_common::dist::Dist;
use xtask_common::executor::Executor;
use xtask_common::median;
use xtask_common::model::{self, FileType};
use xtask_common::process::free_port;
use xtask_common::process::{self, Daemon};
use xtask_common::progress::{Progress, heading};
use xtask_common::scratch::Scratch;
use xtask_common::stats::{self, Stats};
use xtask_common::workspace;

/// The timeout for every wait.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Tokens of a run whose graphs are counted: enough for the KV cache to grow beyond its first 256
/// cells.
const LONG: u32 = 320;
/// Tokens of a run that is only timed.
const SHORT: u32 = 64;
/// The number of warm-up graphs: the program's own trial run and the first token.
const WARM_UP: usize = 8;

/// Options of the benchmark.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Repeats of each figure
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Threads of every engine [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    /// Only these parts
    #[arg(long, value_enum, num_args = 1..)]
    only: Vec<Part>,
    #[command(flatten)]
    build: Build,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Round trips of the link alone
    Link,
    /// The smallest requests through ggml
    Latency,
    /// Uploads and downloads through ggml, beside memcpy
    Transfer,
    /// Loading a model
    Load,
    /// Decoding tokens
    Decode,
    /// Decoding tokens on the engine over ggml's CPU backend
    Engine,
}

/// The configurations, by the names of their figures.
const UNIX: &str = "unix";
const MESSAGES: &str = "unix, nothing shared";
const INPROC: &str = "inproc";
const RPC: &str = "ggml-rpc";
const NATIVE: &str = "ggml-cpu";
const MEMCPY: &str = "memcpy";
const ENGINE: &str = "unix, the engine ggml-cpu";

/// The running servers.
struct Setting {
    bin: PathBuf,
    dist: Dist,
    folder: PathBuf,
    model: PathBuf,
    /// Models of the part `engine`, by the names of its rows.
    engine_models: Vec<(String, PathBuf)>,
    threads: usize,
    repeats: u32,
    /// The executor with shared buffers, and the one without.
    shared: Executor,
    separate: Executor,
    rpc: Daemon,
    rpc_address: String,
    driver: Driver,
    // Last, so that it is dropped after the executors, whose sockets it contains.
    scratch: Scratch,
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("what is needed");
    let setting = Setting::prepare(cache, options)?;
    heading("boundary");
    let wanted = |part: &Part| options.only.is_empty() || options.only.contains(part);
    let mut rows = Vec::new();
    let parts = [
        Part::Link,
        Part::Latency,
        Part::Transfer,
        Part::Load,
        Part::Decode,
        Part::Engine,
    ];
    for part in parts.into_iter().filter(wanted) {
        rows.extend(match part {
            Part::Link => setting.link()?,
            Part::Latency => setting.latency()?,
            Part::Transfer => setting.transfer()?,
            Part::Load => setting.load()?,
            Part::Decode => setting.decode()?,
            Part::Engine => setting.engine()?,
        });
    }

    show(&rows);
    let under = json!({ "threads": setting.threads, "repeats": setting.repeats });
    keep(&setting.folder, "boundary", under, &rows)?;
    setting.stop()
}

impl Setting {
    fn prepare(cache: &Cache, options: &Options) -> Result<Setting> {
        let needs = Needs::prepare(cache, &options.build)?;
        let model = needs.model(cache)?;
        let Needs {
            source,
            bin,
            dist,
            folder,
        } = needs;
        let threads = options.threads.unwrap_or_else(workspace::cores);
        let scratch = Scratch::new()?;
        let start = |name: &str, arguments: &[&str]| {
            let socket = scratch.path().join(format!("{name}.sock"));
            let log = folder.join(format!("{name}.log"));
            Executor::start_with(&dist, &socket, threads, &log, arguments)
        };
        let shared = start("shared", &[])?;
        let separate = start("separate", &["--no-shared-buffers"])?;
        let rpc_address = format!("127.0.0.1:{}", free_port()?);
        let rpc = start_rpc(&bin, &rpc_address, threads, &folder.join("rpc-server.log"))?;
        let endpoints = format!("{},{}", shared.endpoint(), separate.endpoint());
        let address = rpc_address.clone();
        let driver = Driver::build(&source, &bin, &folder, &dist.plugin, endpoints, address)?;
        Ok(Setting {
            bin,
            dist,
            folder,
            engine_models: engine_models(cache, options)?,
            model,
            threads,
            repeats: options.repeats,
            shared,
            separate,
            rpc,
            rpc_address,
            driver,
            scratch,
        })
    }

    fn stop(self) -> Result<()> {
        self.shared.stop()?;
        self.separate.stop()?;
        self.rpc.stop(TIMEOUT)
    }

    /// Empty commands over the link, without ggml.
    fn link(&self) -> Result<Vec<Row>> {
        let progress = Progress::new("round trips of the link");
        let mut cargo = workspace::cargo();
        cargo
            .args([
                "bench",
                "--package",
                "vgpu-transport",
                "--bench",
                "boundary",
            ])
            .args(["--", "--json"]);
        let log = self.folder.join("link.log");
        let mut found = Vec::new();
        let status = process::run_lines(&mut cargo, &log, |line| {
            found.extend(serde_json::from_str::<Value>(line).ok());
        })?;
        ensure!(status.success(), "cargo bench\n{}", process::tail(&log));
        let rows =
            [(false, "both awake", 5.0), (true, "from sleep", 60.0)].map(|(asleep, name, most)| {
                let row = Row::new(format!("empty command, round trip, {name}"), "us");
                let with = |row: Row, link: &str| {
                    let sample = found.iter().find(|sample| {
                        sample["link"] == link && sample["asleep"].as_bool() == Some(asleep)
                    });
                    match sample.and_then(|sample| sample["p50_us"].as_f64()) {
                        Some(value) => row.figure(link, value),
                        None => row,
                    }
                };
                with(with(row, UNIX), INPROC).at_most(UNIX, most)
            });
        ensure!(
            rows.iter().all(|row| row.figures.len() == 2),
            "{}",
            process::tail(&log)
        );
        progress.done("");
        Ok(rows.into())
    }

    /// The smallest requests of programs.
    fn latency(&self) -> Result<Vec<Row>> {
        let progress = Progress::new("smallest requests");
        let repeats = self.repeats.to_string();
        let samples = self
            .driver
            .run(&progress, &["latency", &repeats, "VGPU0", "VGPU1", "RPC0"])?;
        progress.done("");
        let mut rows = Vec::new();
        for (what, name) in [
            ("memory", "asking for the memory"),
            ("read4", "reading 4 bytes"),
        ] {
            for (asleep, state) in [(false, "awake"), (true, "from sleep")] {
                let mut row = Row::new(format!("{name}, {state}"), "us");
                for way in [UNIX, MESSAGES, RPC] {
                    let of = |s: &Sample| s.what == what && s.asleep == asleep && way_of(s) == way;
                    let times = samples.iter().filter(|s| of(s)).map(|s| 1e6 * s.seconds);
                    row = row.figure(way, median(times));
                }
                rows.push(
                    row.ratio(UNIX, RPC, false, None)
                        .ratio(MESSAGES, RPC, false, None),
                );
            }
        }
        Ok(rows)
    }

    fn transfer(&self) -> Result<Vec<Row>> {
        let progress = Progress::new("uploads and downloads");
        let repeats = self.repeats.to_string();
        let samples = self
            .driver
            .run(&progress, &["transfer", &repeats, "VGPU0", "VGPU1", "RPC0"])?;
        progress.done("");
        let mut sizes: Vec<u64> = samples.iter().map(|sample| sample.size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut rows = Vec::new();
        for what in ["upload", "download"] {
            for &size in &sizes {
                let name = match size >> 20 {
                    0 => format!("{what}s of {} KiB", size >> 10),
                    mib => format!("{what}s of {mib} MiB"),
                };
                let mut row = Row::new(name, "GB/s");
                for way in [MEMCPY, UNIX, MESSAGES, RPC] {
                    let of = |s: &Sample| {
                        s.size == size && way_of(s) == way && (s.what == what || way == MEMCPY)
                    };
                    let rates = samples.iter().filter(|s| of(s)).map(rate);
                    row = row.figure(way, median(rates));
                }
                rows.push(
                    row.ratio(UNIX, MEMCPY, true, Some(0.8))
                        .ratio(UNIX, RPC, true, Some(2.0))
                        .ratio(MESSAGES, MEMCPY, true, None)
                        .ratio(MESSAGES, RPC, true, None),
                );
            }
        }
        Ok(rows)
    }

    fn load(&self) -> Result<Vec<Row>> {
        let progress = Progress::new("loading the model");
        let repeats = self.repeats.to_string();
        let model = self
            .model
            .to_str()
            .context("the cache has a path of text")?;
        let samples = self.driver.run(
            &progress,
            &["load", &repeats, model, "VGPU0", "VGPU1", "RPC0"],
        )?;
        progress.done("");
        let rows = [
            ("load-mmap", "from a mapped file"),
            ("load-read", "--no-mmap"),
        ]
        .map(|(what, name)| {
            let mut row = Row::new(format!("loading the model, {name}"), "s");
            for way in [UNIX, MESSAGES, RPC] {
                let of = |s: &Sample| s.what == what && way_of(s) == way;
                let times = samples.iter().filter(|s| of(s)).map(|s| s.seconds);
                row = row.figure(way, median(times));
            }
            row.ratio(UNIX, RPC, false, Some(2.0))
                .ratio(MESSAGES, RPC, false, None)
        });
        let of = |s: &&Sample| s.what == "load-vocabulary";
        let common = median(samples.iter().filter(of).map(|s| s.seconds));
        // The same without the work that does not depend on the link.
        let weights = rows.clone().map(|row| {
            let mut without = Row::new(format!("{}: the weights alone", row.what), row.unit);
            for (way, seconds) in row.figures {
                without = without.figure(way, (seconds - common).max(0.0));
            }
            without.ratio(UNIX, RPC, false, None)
        });
        Ok([rows, weights].concat())
    }

    /// llama-bench in all configurations in turn.
    fn decode(&self) -> Result<Vec<Row>> {
        let (unix, messages) = (self.shared.endpoint(), self.separate.endpoint());
        let ways = [
            (UNIX, Some(&*unix)),
            (MESSAGES, Some(&*messages)),
            (INPROC, Some(INPROC)),
            (RPC, None),
            (NATIVE, None),
        ];
        let row = self
            .speeds("decoding, 256 M parameters, Q4_K_M", &self.model, &ways)?
            .ratio(UNIX, RPC, true, Some(1.35))
            .ratio(UNIX, INPROC, true, Some(0.97))
            .ratio(MESSAGES, INPROC, true, None)
            .ratio(UNIX, NATIVE, true, None)
            .ratio(RPC, NATIVE, true, None);

        let progress = Progress::new(&format!("counting what crosses for {LONG} tokens"));
        self.bench(&self.model, UNIX, Some(&unix), LONG)?;
        let counted = Stats::read(&self.stats())?;
        self.bench(&self.model, MESSAGES, Some(&messages), LONG)?;
        let messages = Stats::read(&self.stats())?;
        progress.done("");
        Ok([
            vec![row],
            counts(UNIX, &counted)?,
            counts(MESSAGES, &messages)?,
        ]
        .concat())
    }

    /// Decoding on ggml's CPU backend: in the program, over ggml-rpc, and as the engine of an
    /// executor.
    fn engine(&self) -> Result<Vec<Row>> {
        let library = self.bin.join("libggml-cpu.so");
        let executor = Executor::start_engine(
            &mut Command::new(&self.dist.vgpu),
            &format!("ggml:{}", library.display()),
            &self.scratch.path().join("ggml.sock"),
            self.threads,
            &self.folder.join("ggml.log"),
            &["--trust-guests"],
        )?;
        let endpoint = executor.endpoint();
        let ways = [(ENGINE, Some(&*endpoint)), (RPC, None), (NATIVE, None)];
        let mut rows = Vec::new();
        for (name, model) in &self.engine_models {
            let what = format!("decoding on ggml's CPU backend, {name}");
            let row = self.speeds(&what, model, &ways)?;
            let row = row.ratio(ENGINE, NATIVE, true, Some(0.97));
            rows.push(row.ratio(ENGINE, RPC, true, Some(1.3)));
        }
        executor.stop()?;
        Ok(rows)
    }

    /// llama-bench in these configurations in turn, each with the endpoint of its executor.
    fn speeds(&self, what: &str, model: &Path, ways: &[(&str, Option<&str>)]) -> Result<Row> {
        let mut speeds = vec![Vec::new(); ways.len()];
        for round in 1..=self.repeats {
            let progress =
                Progress::new(&format!("decoding {SHORT} tokens each way, round {round}"));
            for ((way, endpoint), speeds) in ways.iter().zip(&mut speeds) {
                progress.note(way);
                speeds.push(self.bench(model, way, *endpoint, SHORT)?);
            }
            progress.done("");
        }
        let mut row = Row::new(what, "tok/s");
        for ((way, _), speeds) in ways.iter().zip(speeds) {
            row = row.figure(*way, median(speeds));
        }
        Ok(row)
    }

    fn stats(&self) -> PathBuf {
        self.folder.join("stats.json")
    }

    /// Tokens per second, on the executor at `endpoint` or, without one, on a backend of ggml.
    fn bench(&self, model: &Path, way: &str, endpoint: Option<&str>, tokens: u32) -> Result<f64> {
        let mut command = Command::new(self.bin.join("llama-bench"));
        command
            .arg("--model")
            .arg(model)
            .args([
                "-p",
                "0",
                "-n",
                &tokens.to_string(),
                "-r",
                "1",
                "-o",
                "json",
            ])
            .args(["-t", &self.threads.to_string()]);
        for variable in ["GGML_BACKEND_PATH", "VGPU_ENDPOINT", "VGPU_STATS"] {
            command.env_remove(variable);
        }
        let backend = match (endpoint, way) {
            (Some(endpoint), _) => {
                command
                    .args(["-ngl", "99", "-dev", "VGPU0"])
                    .env("GGML_BACKEND_PATH", &self.dist.plugin)
                    .env("VGPU_STATS", self.stats())
                    .env("VGPU_THREADS", self.threads.to_string())
                    .env("VGPU_ENDPOINT", endpoint);
                "VGPU"
            }
            (None, RPC) => {
                command.args(["-ngl", "99", "--rpc", &self.rpc_address, "-dev", "RPC0"]);
                "RPC"
            }
            (None, _) => {
                command.args(["-ngl", "0"]);
                "CPU"
            }
        };
        tokens_per_second(&mut command, way, backend)
    }
}

/// The models for ggml's CPU backend as an engine, by name. In its own program that backend repacks
/// weights of Q4_K, and none of Q8_0 on x86: those run in the same kernels on every way. In the
/// smallest model, what surrounds the kernels is most of a token.
fn engine_models(cache: &Cache, options: &Options) -> Result<Vec<(String, PathBuf)>> {
    if !options.only.is_empty() && !options.only.contains(&Part::Engine) {
        return Ok(Vec::new());
    }
    let models = [
        ("256 M parameters, Q4_K_M", &model::BENCH, FileType::Q4KM),
        ("256 M parameters, Q8_0", &model::BENCH, FileType::Q8_0),
        ("4 layers, F16", &model::TINY, FileType::F16),
    ];
    let ensure = |(name, shape, file_type): (&str, _, _)| {
        Ok((name.to_owned(), model::ensure(cache, shape, file_type)?))
    };
    models.into_iter().map(ensure).collect()
}

/// The plugin's counts for the last tokens of a long run.
fn counts(way: &str, stats: &Stats) -> Result<Vec<Row>> {
    // The last entry contains the requests at the program's end.
    let last = stats.steps.len().saturating_sub(1);
    let steps = stats.steps.get(WARM_UP..last).unwrap_or_default();
    ensure!(
        steps.len() >= LONG as usize / 2,
        "only {} graphs reached the plugin",
        stats.steps.len()
    );
    let each = |figure: fn(&stats::Traffic) -> u64| median(steps.iter().map(figure)) as f64;
    let on_the_wire = Row::new("a decoded token on the wire", "bytes")
        .figure("to the host", each(|t| t.bytes_to_host))
        .figure("from the host", each(|t| t.bytes_from_host))
        .figure("copied to the host", each(|t| t.copied_to_host))
        .figure("copied from the host", each(|t| t.copied_from_host))
        .at_most("to the host", 4096.0);
    let count =
        |is: fn(&stats::Traffic) -> bool| steps.iter().filter(|step| is(step)).count() as f64;
    let known: Vec<stats::Traffic> = steps
        .iter()
        .filter(|s| !s.patch && !s.full_graph)
        .copied()
        .collect();
    let slow = steps.iter().map(|step| step.encode_ns).max().unwrap_or(0);
    let graphs = Row::new(
        format!("graphs of {} tokens after warming up", steps.len()),
        "graphs",
    )
    .figure("sent whole", count(|t| t.full_graph))
    .figure("sent as a patch", count(|t| t.patch))
    .figure("known", known.len() as f64)
    .at_most("sent whole", 0.0);
    let encoding = Row::new("encoding a token's graph, 30 layers", "us")
        .figure(
            "median",
            median(known.iter().map(|t| t.encode_ns)) as f64 / 1e3,
        )
        .figure("slowest, a patch", slow as f64 / 1e3)
        .at_most("median", 30.0);
    let trips = Row::new("a decoded token", "times")
        .figure("round trips", each(|t| t.round_trips))
        .figure("messages", each(|t| t.messages));
    Ok([on_the_wire, graphs, encoding, trips]
        .map(|mut row| {
            row.what = format!("{way}: {}", row.what);
            row
        })
        .into())
}

fn way_of(sample: &Sample) -> &str {
    match sample.device.as_str() {
        "VGPU0" => UNIX,
        "VGPU1" => MESSAGES,
        "RPC0" => RPC,
        other => other,
    }
}

fn rate(sample: &Sample) -> f64 {
    sample.bytes as f64 / sample.seconds / 1e9
}

/// ggml's own RPC server for the CPU of this machine.
fn start_rpc(bin: &Path, address: &str, threads: usize, log: &Path) -> Result<Daemon> {
    let (host, port) = address.split_once(':').context("an address with a port")?;
    let mut server = Command::new(bin.join("ggml-rpc-server"));
    server
        .args(["--host", host, "--port", port, "--device", "CPU"])
        .args(["--threads", &threads.to_string()])
        .env_remove("GGML_BACKEND_PATH");
    let mut daemon = Daemon::start(&mut server, log)?;
    daemon.wait_until(TIMEOUT, |_| std::net::TcpStream::connect(address).is_ok())?;
    Ok(daemon)
}
