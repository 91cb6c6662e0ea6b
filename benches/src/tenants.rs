//! `cargo xtask bench tenants`: several guests on one executor, each a real llama.cpp process.
//!
//! The share of a guest is measured in two ways: as the engine time of its graphs, which the
//! executor reports (`vgpu ps --json`), and as the tokens that its llama-bench reports. The second
//! includes the load of the machine, since each guest is a process that samples, writes and waits
//! on the same cores as the engine. `cargo xtask bench weights --only eight` measures the host
//! memory for shared weights.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum as _;
use serde_json::{Value, json};

use crate::common::{Build, Needs, keep, show, tokens_per_second};
use crate::table::Row;
use xtask_common::cache::Cache;
use xtask_common::dist::Dist;
use xtask_common::executor::{self, Executor};
use xtask_common::median;
use xtask_common::process::Daemon;
use xtask_common::progress::{Progress, heading};
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

/// The timeout for every wait.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The number of guests in the last part.
const MANY: usize = 8;

/// How often the page asks for itself again: `PERIOD` of
/// `host-executor/cli/src/serve/status_page/page.js`.
const PAGE_PERIOD: Duration = Duration::from_secs(2);

/// The threads of the executor that answer HTTP.
const HTTP_THREADS: [&str; 2] = ["vgpu-metrics", "tokio-rt-worker"];

/// Options of the benchmark.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Repeats of each figure
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Seconds of full load for each share that is measured
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(2..=600))]
    seconds: u64,
    /// Threads of the engine [default: one per core]
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
    /// The cost of scheduling for a single guest
    Lone,
    /// Two guests of weights 1 and 3 under full load
    Weights,
    /// A guest that decodes beside one that prefills without pause
    Decode,
    /// Eight guests at once
    Many,
    /// Processor time of the page for browsers, looked at by one and by none, beside eight guests
    Page,
}

/// The work of a guest: arguments of llama-bench.
#[derive(Clone, Copy)]
enum Load {
    /// Decodes so many tokens.
    Decode(u32),
    /// Prefills 512 tokens repeatedly until it is stopped.
    Prefill,
    /// Prefills 512 tokens.
    PrefillOnce,
    /// Decodes until it is stopped.
    DecodeOn,
}

struct Setting {
    bin: PathBuf,
    dist: Dist,
    folder: PathBuf,
    model: PathBuf,
    repeats: u32,
    window: Duration,
    executor: Executor,
    scratch: Scratch,
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("what is needed");
    let setting = Setting::prepare(cache, options)?;
    heading("tenants");
    let wanted = |part: &Part| options.only.is_empty() || options.only.contains(part);
    let mut rows = Vec::new();
    for &part in Part::value_variants().iter().filter(|part| wanted(part)) {
        rows.extend(match part {
            Part::Lone => setting.lone()?,
            Part::Weights => setting.weights()?,
            Part::Decode => setting.decode()?,
            Part::Many => setting.many()?,
            Part::Page => setting.page()?,
        });
    }
    show(&rows);
    let under = json!({
        "threads": options.threads.unwrap_or_else(workspace::cores),
        "repeats": setting.repeats,
        "seconds": options.seconds,
    });
    keep(&setting.folder, "tenants", under, &rows)?;
    setting.executor.stop()
}

impl Setting {
    fn prepare(cache: &Cache, options: &Options) -> Result<Setting> {
        let needs = Needs::prepare(cache, &options.build)?;
        let model = needs.model(cache)?;
        let Needs {
            bin, dist, folder, ..
        } = needs;
        let scratch = Scratch::new()?;
        let at = |name: &str| scratch.path().join(name).display().to_string();
        let mut config = format!("control.socket = {:?}\n", at("control.sock"));
        let weights = [("one", 1), ("three", 3)];
        let equal = (0..MANY).map(|i| (format!("guest{i}"), 1));
        let guests = weights.map(|(name, weight)| (name.to_owned(), weight));
        for (name, weight) in guests.into_iter().chain(equal) {
            let listener = format!("unix:{}", at(&format!("{name}.sock")));
            config += &format!(
                "[[guest]]\nname = {name:?}\nweight = {weight}\nlisten = [{listener:?}]\n"
            );
        }
        let file = scratch.path().join("vgpu.toml");
        std::fs::write(&file, config).context("writing a configuration")?;
        let executor = Executor::start_with(
            &dist,
            &scratch.path().join("all.sock"),
            options.threads.unwrap_or_else(workspace::cores),
            &folder.join("tenants-executor.log"),
            &[
                &["--config", &file.display().to_string()],
                &["--metrics", &format!("unix:{}", at("metrics.sock"))],
                executor::inspected(),
            ]
            .concat(),
        )?;
        Ok(Setting {
            bin,
            dist,
            folder,
            model,
            repeats: options.repeats,
            window: Duration::from_secs(options.seconds),
            executor,
            scratch,
        })
    }

    /// The cost of scheduling for a single guest: the time that its graphs wait for a turn.
    fn lone(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (load, name) in [
            (Load::Decode(64), "decodes"),
            (Load::PrefillOnce, "prefills"),
        ] {
            let (mut waits, mut parts, mut turns) = (Vec::new(), Vec::new(), Vec::new());
            for round in 1..=self.repeats {
                let progress = Progress::new(&format!("a guest that {name} alone, round {round}"));
                let before = self.status()?;
                self.finish("guest0", load)?;
                self.wait_until_gone()?;
                let after = self.status()?;
                let more =
                    |figure| number(&after, "guest0", figure) - number(&before, "guest0", figure);
                let graphs = more("graphs");
                ensure!(graphs > 0.0, "a guest that {name} has run no graph");
                waits.push(1e6 * more("queued") / graphs);
                parts.push(100.0 * more("queued") / more("busy").max(f64::MIN_POSITIVE));
                turns.push(more("turns") / graphs);
                progress.done("");
            }
            rows.push(
                Row::new(format!("a graph of a guest that {name} alone"), "us, turns")
                    .figure("waits for the engine, us", median(waits))
                    .figure("turns", median(turns)),
            );
            rows.push(
                Row::new(
                    format!("a guest that {name} alone waits"),
                    "% of its time on the engine",
                )
                .figure("for its turn", median(parts))
                .at_most("for its turn", 1.0),
            );
        }
        Ok(rows)
    }

    /// The shares of two guests that always have work for the engine.
    fn weights(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (load, name) in [(Load::DecodeOn, "decoding"), (Load::Prefill, "prefilling")] {
            let mut shares = Vec::new();
            let mut graphs = Vec::new();
            for round in 1..=self.repeats {
                let progress =
                    Progress::new(&format!("weights 1 and 3, both {name}, round {round}"));
                let guests = ["one", "three"].map(|guest| self.begin(guest, load));
                let guests = guests.into_iter().collect::<Result<Vec<_>>>()?;
                let before = self.wait_for_graphs(&["one", "three"])?;
                thread::sleep(self.window);
                let after = self.status()?;
                for guest in guests {
                    guest.kill()?;
                }
                let ran = |figure| {
                    ["one", "three"]
                        .map(|guest| number(&after, guest, figure) - number(&before, guest, figure))
                };
                let ([time_1, time_3], [graphs_1, graphs_3]) = (ran("busy"), ran("graphs"));
                ensure!(time_1 > 0.0, "the guest of weight 1 got no engine time");
                shares.push(time_3 / time_1);
                graphs.push(graphs_3 / graphs_1.max(1.0));
                progress.done(&format!("{:.2} times the time", time_3 / time_1));
                self.wait_until_gone()?;
            }
            let share = median(shares);
            let row = Row::new(format!("weights 1 and 3, both {name}"), "times")
                .figure("time on the engine", share)
                .figure("graphs", median(graphs));
            let off = Row::new(format!("weights 1 and 3, both {name}: off 3 by"), "%")
                .figure("time on the engine", 100.0 * (share / 3.0 - 1.0).abs())
                .at_most("time on the engine", 10.0);
            rows.extend([row, off]);
        }
        Ok(rows)
    }

    /// A guest that decodes, alone and beside a guest that prefills.
    fn decode(&self) -> Result<Vec<Row>> {
        let (mut alone, mut beside) = (Vec::new(), Vec::new());
        let (mut waits, mut parts) = (Vec::new(), Vec::new());
        for round in 1..=self.repeats {
            let progress = Progress::new(&format!(
                "decoding, alone and beside a prefill, round {round}"
            ));
            alone.push(self.finish("guest0", Load::Decode(64))?);
            let prefill = self.begin("guest1", Load::Prefill)?;
            self.wait_for_graphs(&["guest1"])?;
            let before = self.status()?;
            beside.push(self.finish("guest0", Load::Decode(64))?);
            let after = self.status()?;
            prefill.kill()?;
            let more =
                |figure| number(&after, "guest0", figure) - number(&before, "guest0", figure);
            waits.push(1e3 * more("queued") / more("turns").max(1.0));
            // Other load of the machine increases both times, but not their ratio.
            parts.push(more("busy") / (more("busy") + more("queued")).max(f64::MIN_POSITIVE));
            progress.done("");
            self.wait_until_gone()?;
        }
        let row = Row::new("decoding, 256 M parameters, Q4_K_M", "tok/s")
            .figure("alone", median(alone))
            .figure("beside a prefill", median(beside))
            .ratio("beside a prefill", "alone", true, Some(0.45));
        let waits = Row::new("a turn of the guest that decodes waits", "ms")
            .figure("on average", median(waits));
        let parts = Row::new(
            "the guest that decodes has the engine",
            "of the time it wants it",
        )
        .figure("beside a prefill", median(parts));
        Ok(vec![row, parts, waits])
    }

    /// Many guests that decode at the same time.
    fn many(&self) -> Result<Vec<Row>> {
        let progress = Progress::new("one guest");
        let alone = self.finish("guest0", Load::Decode(32))?;
        progress.done("");
        let progress = Progress::new(&format!("{MANY} guests"));
        let names: Vec<String> = (0..MANY).map(|i| format!("guest{i}")).collect();
        let speeds = thread::scope(|scope| {
            let guests: Vec<_> = names
                .iter()
                .map(|name| scope.spawn(move || self.finish(name, Load::Decode(32))))
                .collect();
            let ended = guests.into_iter().map(|guest| guest.join());
            ended
                .map(|speed| speed.unwrap_or_else(|_| bail!("a thread of the benchmark panicked")))
                .collect::<Result<Vec<f64>>>()
        })?;
        progress.done("");
        let (least, most) = speeds
            .iter()
            .fold((f64::MAX, 0.0), |(least, most): (f64, f64), &s| {
                (least.min(s), most.max(s))
            });
        let row = Row::new(format!("{MANY} guests decoding at once"), "tok/s")
            .figure("one alone", alone)
            .figure("the slowest", least)
            .figure("the fastest", most)
            .figure("all together", speeds.iter().sum())
            .ratio("all together", "one alone", true, None)
            .ratio("the slowest", "the fastest", true, None);
        Ok(vec![row])
    }

    /// The processor time of the page for browsers, beside guests that decode.
    fn page(&self) -> Result<Vec<Row>> {
        let names: Vec<String> = (0..MANY).map(|i| format!("guest{i}")).collect();
        let guests = names.iter().map(|name| self.begin(name, Load::DecodeOn));
        let guests = guests.collect::<Result<Vec<_>>>()?;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.wait_for_graphs(&names)?;
        let mut figures = [Vec::new(), Vec::new()];
        for round in 1..=self.repeats {
            for (figures, (is_open, who)) in
                { figures.iter_mut() }.zip([(false, "nobody"), (true, "a browser")])
            {
                let progress = Progress::new(&format!("{who} looks at the page, round {round}"));
                figures.push(100.0 * self.page_threads(is_open)?);
                progress.done("");
            }
        }
        for guest in guests {
            guest.kill()?;
        }
        self.wait_until_gone()?;
        let [closed, open] = figures.map(median);
        let row = Row::new(
            format!("the page for browsers, beside {MANY} guests"),
            "% of a processor",
        )
        .figure("a browser looks at it", open)
        .figure("nobody does", closed)
        .at_most("a browser looks at it", 0.5);
        Ok(vec![row])
    }

    /// The processor time of the threads that answer HTTP, as a part of the time that passes.
    /// `is_open`: a browser asks for the page as often as the page does.
    fn page_threads(&self, is_open: bool) -> Result<f64> {
        let (start, before) = (Instant::now(), self.http_times()?);
        while start.elapsed() < self.window {
            if is_open {
                let mut stream = UnixStream::connect(self.scratch.path().join("metrics.sock"))
                    .context("connecting to the address of the metrics")?;
                stream.write_all(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
                let mut page = String::new();
                stream.read_to_string(&mut page).context("the page")?;
                let is_whole = page.starts_with("HTTP/1.0 200") && page.contains("guest7");
                ensure!(is_whole, "no page with all guests: {page:.200}");
            }
            thread::sleep(PAGE_PERIOD);
        }
        // A thread that answers ends when there was nothing to do for 10 s.
        let more = { self.http_times()?.into_iter() }
            .map(|(thread, time)| time - before.get(&thread).copied().unwrap_or_default());
        Ok(more.sum::<Duration>().as_secs_f64() / start.elapsed().as_secs_f64())
    }

    /// The processor time of each thread that answers HTTP.
    fn http_times(&self) -> Result<BTreeMap<PathBuf, Duration>> {
        let tasks = format!("/proc/{}/task", self.executor.pid());
        let mut times_of_threads = BTreeMap::new();
        for task in std::fs::read_dir(&tasks).with_context(|| format!("looking at {tasks}"))? {
            let task = task.with_context(|| format!("looking at {tasks}"))?.path();
            let read = |file| std::fs::read_to_string(task.join(file));
            // A thread may have ended meanwhile.
            let (Ok(name), Ok(times)) = (read("comm"), read("schedstat")) else {
                continue;
            };
            if HTTP_THREADS.contains(&name.trim()) {
                let time = times
                    .split(' ')
                    .next()
                    .and_then(|time| time.parse::<u64>().ok());
                let nanos = time.context("no time of a thread")?;
                times_of_threads.insert(task, Duration::from_nanos(nanos));
            }
        }
        Ok(times_of_threads)
    }

    fn command(&self, guest: &str, load: Load) -> Command {
        let (prompt, tokens, repeats) = match load {
            Load::Decode(tokens) => (0, tokens, 1),
            Load::DecodeOn => (0, 256, 10_000),
            Load::Prefill => (512, 0, 10_000),
            Load::PrefillOnce => (512, 0, 1),
        };
        let mut command = Command::new(self.bin.join("llama-bench"));
        command
            .arg("--model")
            .arg(&self.model)
            .args(["-p", &prompt.to_string(), "-n", &tokens.to_string()])
            .args(["-r", &repeats.to_string(), "-o", "json", "-ngl", "99"])
            .args(["-t", "1", "-dev", "VGPU0"])
            .env_remove("VGPU_STATS")
            .env("GGML_BACKEND_PATH", &self.dist.plugin)
            .env(
                "VGPU_ENDPOINT",
                format!("unix:{}", self.socket(guest).display()),
            );
        command
    }

    /// Starts a guest that runs until it is stopped.
    fn begin(&self, guest: &str, load: Load) -> Result<Daemon> {
        let log = self.folder.join(format!("tenants-{guest}.log"));
        Daemon::start(&mut self.command(guest, load), &log)
    }

    /// Runs a guest to its end. Returns its tokens per second.
    fn finish(&self, guest: &str, load: Load) -> Result<f64> {
        tokens_per_second(&mut self.command(guest, load), guest, "VGPU")
    }

    fn socket(&self, guest: &str) -> PathBuf {
        self.scratch.path().join(format!("{guest}.sock"))
    }

    /// The status of the executor.
    fn status(&self) -> Result<Value> {
        let control = self.scratch.path().join("control.sock");
        executor::status(&self.dist.vgpu, &control)
    }

    /// Waits until each of these guests has loaded its model and run some graphs.
    fn wait_for_graphs(&self, guests: &[&str]) -> Result<Value> {
        const WARM: f64 = 4.0;
        let first = self.status()?;
        let start = Instant::now();
        loop {
            let now = self.status()?;
            let ran =
                |guest: &&str| number(&now, guest, "graphs") - number(&first, guest, "graphs");
            if guests.iter().all(|guest| ran(guest) >= WARM) {
                return self.status();
            }
            ensure!(start.elapsed() < TIMEOUT, "{guests:?} run no graphs");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn wait_until_gone(&self) -> Result<()> {
        let start = Instant::now();
        while self.status()?["sessions"]
            .as_array()
            .is_some_and(|s| !s.is_empty())
        {
            ensure!(
                start.elapsed() < TIMEOUT,
                "the sessions of stopped guests do not end"
            );
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

/// A figure of a guest.
fn number(status: &Value, guest: &str, figure: &str) -> f64 {
    let guests = status["guests"].as_array();
    let found = guests.and_then(|guests| guests.iter().find(|g| g["name"] == guest));
    found.and_then(|g| g[figure].as_f64()).unwrap_or(0.0)
}
