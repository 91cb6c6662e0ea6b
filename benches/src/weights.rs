//! `cargo xtask bench weights`: the same model in several guests at once.
//!
//! Each guest is a process with a llama.cpp program that loads the model, computes a token and
//! keeps running. The first guest loads from a host without weights. The second, then the third to
//! eighth together, load from a host that has all weights. Eight more guests start at the same time
//! on a host without weights. Linux reports the memory of the host.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use crate::common::{Build, Needs, keep, show, ticks};
use crate::driver::{Driver, Guest};
use crate::table::Row;
use xtask_common::cache::Cache;
use xtask_common::dist::Dist;
use xtask_common::executor::{self, Executor};
use xtask_common::median;
use xtask_common::progress::{Progress, heading};
use xtask_common::scratch::Scratch;
use xtask_common::stats::Stats;
use xtask_common::workspace;

/// The timeout for every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The number of guests at the same time.
const GUESTS: usize = 8;

/// Seconds below which a difference of load times is noise.
const RESOLUTION: f64 = 1e-3;

/// Options of the benchmark.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Repeats of the two loads that are timed
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Threads of the executor [default: one per core]
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
    /// A second guest against the first
    Second,
    /// Eight guests at once: what the host holds
    Eight,
    /// After a restart, with a cache on disk
    Restart,
}

struct Setting {
    driver: Driver,
    dist: Dist,
    model: String,
    folder: PathBuf,
    threads: usize,
    scratch: Scratch,
}

/// The measurements of a guest.
struct Load {
    guest: Guest,
    /// `seconds`: the whole load. `weights`: the load without reading the vocabulary and mapping
    /// the file.
    seconds: f64,
    weights: f64,
    /// The bytes that the guest sent until its first token.
    moved: f64,
    /// A hash of the logits.
    sum: u64,
    bytes: f64,
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("what is needed");
    let setting = Setting::prepare(cache, options)?;
    heading("weights");
    let wanted = |part: &Part| options.only.is_empty() || options.only.contains(part);
    let mut rows = Vec::new();
    for part in [Part::Second, Part::Eight, Part::Restart]
        .into_iter()
        .filter(wanted)
    {
        rows.extend(match part {
            Part::Second => setting.second_guest(options.repeats)?,
            Part::Eight => setting.eight_guests()?,
            Part::Restart => setting.restart()?,
        });
    }
    show(&rows);
    let under = json!({ "threads": setting.threads, "repeats": options.repeats });
    keep(&setting.folder, "weights", under, &rows)
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
        let (nobody, nowhere) = ("unix:/nowhere".to_owned(), "127.0.0.1:1".to_owned());
        let driver = Driver::build(&source, &bin, &folder, &dist.plugin, nobody, nowhere)?;
        let model = model.to_str().context("the cache has a path of text")?;
        Ok(Setting {
            driver,
            model: model.to_owned(),
            dist,
            folder,
            threads: options.threads.unwrap_or_else(workspace::cores),
            scratch: Scratch::new()?,
        })
    }

    fn executor(&self, name: &str, arguments: &[&str]) -> Result<Executor> {
        let socket = self.scratch.path().join(format!("{name}.sock"));
        let log = self.folder.join(format!("weights-{name}.log"));
        let arguments = [arguments, executor::inspected()].concat();
        Executor::start_with(&self.dist, &socket, self.threads, &log, &arguments)
    }

    /// Starts a guest, whose cache of file hashes is in the folder of this name.
    fn start(&self, executor: &Executor, memory: &str, number: usize) -> Result<Guest> {
        let stats = self.scratch.path().join(format!("stats-{number}.json"));
        let memory = self.scratch.path().join(memory);
        let log = self.folder.join(format!("weights-guest-{number}.log"));
        self.driver
            .guest(&executor.endpoint(), &self.model, &memory, stats, &log)
    }

    /// Waits until a guest has computed its token.
    fn loaded(mut guest: Guest) -> Result<Load> {
        let common = guest.sample("load-vocabulary", TIMEOUT)?;
        let map = guest.sample("map", TIMEOUT)?;
        let load = guest.sample("load", TIMEOUT)?;
        let token = guest.sample("token", TIMEOUT)?;
        let moved = Stats::moved(guest.stats())?;
        Ok(Load {
            seconds: load.seconds,
            weights: (load.seconds - common.seconds - map.seconds).max(RESOLUTION),
            moved: moved as f64,
            sum: token.size,
            bytes: load.bytes as f64,
            guest,
        })
    }

    fn load(&self, executor: &Executor, memory: &str, number: usize) -> Result<Load> {
        Setting::loaded(self.start(executor, memory, number)?)
    }

    /// The first guest against the second.
    fn second_guest(&self, repeats: u32) -> Result<Vec<Row>> {
        let executor = self.executor("second", &[])?;
        let off = self.executor("off", &["--share-weights", "off"])?;
        let (mut unshared, mut first, mut second, mut unseen) = (vec![], vec![], vec![], vec![]);
        for round in 0..=repeats {
            let progress = Progress::new(&format!("the same model again, round {round}"));
            let alone = self.load(&off, "none", 0)?;
            let one = self.load(&executor, "user", 1)?;
            // The guest has cached the file's hashes, and the host has hashed the weights.
            self.wait_until_known("user")?;
            self.wait_for_files(&executor, one.bytes)?;
            let two = self.load(&executor, "user", 2)?;
            let fresh = format!("unseen-{round}");
            let three = self.load(&executor, &fresh, 3)?;
            for other in [&alone, &two, &three] {
                ensure!(other.sum == one.sum, "the guests compute different logits");
            }
            // The first round reads the file into the page cache and allocates the memory.
            if round > 0 {
                unshared.push((alone.seconds, alone.weights, alone.moved));
                first.push((one.seconds, one.weights, one.moved));
                second.push((two.seconds, two.weights, two.moved));
                unseen.push((three.seconds, three.weights, three.moved));
            }
            for load in [alone, one, two, three] {
                load.guest.finish(TIMEOUT)?;
            }
            wait_until_empty(&executor)?;
            progress.done("");
        }
        executor.stop()?;
        off.stop()?;
        let of = |all: &[(f64, f64, f64)], figure: fn(&(f64, f64, f64)) -> f64| {
            median(all.iter().map(figure))
        };
        let row = |what: &str, unit, figure: fn(&(f64, f64, f64)) -> f64| {
            Row::new(what, unit)
                .figure("sharing off", of(&unshared, figure))
                .figure("first", of(&first, figure))
                .figure("second", of(&second, figure))
                .figure("file not seen before", of(&unseen, figure))
        };
        Ok(vec![
            row("loading the model, all of it", "s", |l| l.0).ratio("second", "first", false, None),
            row("loading the model, the weights alone", "s", |l| l.1)
                .ratio("second", "first", false, Some(5.0))
                .ratio("first", "sharing off", false, None),
            row("bytes moved", "bytes", |l| l.2).ratio("second", "first", false, Some(20.0)),
        ])
    }

    /// Eight guests at the same time.
    fn eight_guests(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        let mut copy = 0.0;
        for (what, is_known) in [("one after the other", true), ("all at once", false)] {
            let progress = Progress::new(&format!("{GUESTS} guests, {what}"));
            let executor = self.executor("eight", &[])?;
            let mut loads = Vec::new();
            if is_known {
                let first = self.load(&executor, "user", 0)?;
                self.wait_for_files(&executor, first.bytes)?;
                copy = held_by(&executor)? as f64;
                loads.push(first);
            }
            let waiting = (loads.len()..GUESTS)
                .map(|number| self.start(&executor, "user", number))
                .collect::<Result<Vec<Guest>>>()?;
            for guest in waiting {
                loads.push(Setting::loaded(guest)?);
            }
            ensure!(
                loads.iter().all(|load| load.sum == loads[0].sum),
                "the guests compute different logits"
            );
            let held = self.wait_for_merging(&executor, copy)?;
            rows.push(
                Row::new(
                    format!("{GUESTS} guests, {what}: weights in the host"),
                    "MiB",
                )
                .figure("one copy", copy / f64::from(1 << 20))
                .figure("all guests", held / f64::from(1 << 20))
                .at_most("all guests", 1.2 * copy / f64::from(1 << 20)),
            );
            for load in loads {
                load.guest.finish(TIMEOUT)?;
            }
            wait_until_empty(&executor)?;
            executor.stop()?;
            progress.done("");
        }
        Ok(rows)
    }

    /// An executor that has the model in its cache on disk.
    fn restart(&self) -> Result<Vec<Row>> {
        let progress = Progress::new("a restart with a cache on disk");
        let cache = self.scratch.path().join("disk");
        let cache = format!("{},size=1G", cache.display());
        let arguments = ["--weights-cache", cache.as_str()];
        let executor = self.executor("before", &arguments)?;
        let before = self.load(&executor, "user", 0)?;
        let folder = self.scratch.path().join("disk");
        let start = Instant::now();
        while (files_in(&folder) as f64) < 0.95 * held_by(&executor)? as f64 {
            ensure!(
                start.elapsed() < TIMEOUT,
                "the executor has not written the weights to disk"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        before.guest.finish(TIMEOUT)?;
        executor.stop()?;
        let executor = self.executor("after", &arguments)?;
        let after = self.load(&executor, "user", 1)?;
        ensure!(after.sum == before.sum, "other weights after the restart");
        let row = Row::new("bytes moved, after a restart of the executor", "bytes")
            .figure("before", before.moved)
            .figure("after", after.moved)
            .ratio("after", "before", false, Some(20.0));
        let time = Row::new("loading after a restart, the weights alone", "s")
            .figure("before", before.weights)
            .figure("after, from disk", after.weights);
        after.guest.finish(TIMEOUT)?;
        executor.stop()?;
        progress.done("");
        Ok(vec![row, time])
    }

    /// Waits until a guest has written its cache of file hashes.
    fn wait_until_known(&self, memory: &str) -> Result<()> {
        let folder = self.scratch.path().join(memory).join("weights");
        let start = Instant::now();
        while files_in(&folder) == 0 {
            ensure!(
                start.elapsed() < TIMEOUT,
                "the plugin has cached no hashes of {}: does it trust the file system?",
                self.model
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Waits until the host reports that it has hashed this number of bytes.
    fn wait_for_files(&self, executor: &Executor, bytes: f64) -> Result<()> {
        let start = Instant::now();
        loop {
            let waits = processor_time(executor)?;
            std::thread::sleep(Duration::from_millis(200));
            // The host is idle, so nothing is left to hash. Programs keep a part of the model on
            // the CPU.
            if processor_time(executor)? == waits && held_by(executor)? as f64 > 0.5 * bytes {
                return Ok(());
            }
            ensure!(
                start.elapsed() < TIMEOUT,
                "the executor does not become idle"
            );
        }
    }

    /// Waits until no content is held twice, or the memory no longer shrinks.
    fn wait_for_merging(&self, executor: &Executor, copy: f64) -> Result<f64> {
        let start = Instant::now();
        loop {
            let held = held_by(executor)? as f64;
            if held <= 1.2 * copy || start.elapsed() > TIMEOUT {
                self.wait_for_files(executor, copy)?;
                return Ok(held_by(executor)? as f64);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Bytes of memory that an executor's buffers for weights take: the private memory for which it
/// wants large pages (`hg`). All other buffers of this benchmark's model are small enough to be
/// shared with guests, and so files.
fn held_by(executor: &Executor) -> Result<u64> {
    let path = format!("/proc/{}/smaps", executor.pid());
    let maps = fs::read_to_string(path).context("looking at the executor's memory")?;
    let (mut held, mut resident) = (0, 0);
    let mut is_private = false;
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        match words.next().unwrap_or_default() {
            "Rss:" => {
                let kib = words.next().and_then(|n| n.parse::<u64>().ok());
                resident = 1024 * kib.context("a line of smaps without a number")?;
            }
            "VmFlags:" if is_private && words.any(|flag| flag == "hg") => held += resident,
            other if other.ends_with(':') => {}
            // Addresses, access, offset, device, inode, and a name if it has one.
            _ => is_private = words.nth(3) == Some("0") && words.next().is_none(),
        }
    }
    Ok(held)
}

/// Waits until all sessions have ended and their weights are freed.
fn wait_until_empty(executor: &Executor) -> Result<()> {
    let start = Instant::now();
    loop {
        let held = held_by(executor)?;
        if held == 0 {
            return Ok(());
        }
        ensure!(
            start.elapsed() < TIMEOUT,
            "{held} bytes of weights of ended guests are not freed"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The CPU time of the executor in ticks.
fn processor_time(executor: &Executor) -> Result<u64> {
    ticks(&format!("/proc/{}/stat", executor.pid()), 14)
}

/// Bytes of the files below a folder.
fn files_in(folder: &std::path::Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => files_in(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}
