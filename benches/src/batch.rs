//! `cargo xtask bench batch`: programs that decode with the same model at the same time, each a
//! real llama.cpp process, with and without batches; and as many sequences in one program.
//!
//! Programs of one guest share weights, and so may run as a batch. The tokens of all programs in a
//! window of time are those that the executor has computed graphs for (`vgpu ps --json`). The
//! sequences of one program are those of `llama-batched-bench` on the same executor: one batch that
//! llama.cpp makes itself.
//!
//! The latency of a token is the time between two submissions of one program, beside the others.
//! The share of a guest with another model is its part of the engine's time; both guests have the
//! same weight.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::common::{Build, Needs, keep, show};
use crate::table::Row;
use xtask_common::cache::Cache;
use xtask_common::dist::Dist;
use xtask_common::executor::{self, Executor};
use xtask_common::median;
use xtask_common::model::{self, FileType};
use xtask_common::process::{self, Daemon};
use xtask_common::progress::{Progress, heading};
use xtask_common::scratch::Scratch;
use xtask_common::stats::Stats;
use xtask_common::workspace;

/// The timeout for every wait.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Tokens of each sequence of `llama-batched-bench`.
const TOKENS: u32 = 64;

/// How often `llama-batched-bench` is run until it has written its figures.
const FIGURES_TRIES: usize = 5;

/// Tokens whose latency is measured in a round.
const LATENCY_TOKENS: usize = 200;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Measure {
    /// The tokens of all programs together
    Rate,
    /// The time between two tokens of one program: median and 99th percentile
    Latency,
    /// The share of the engine's time that a further guest with another model gets
    Share,
}

/// Options of the benchmark.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Repeats of each figure
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Seconds of full load for each figure
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// Threads of the engine [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    /// Programs that decode at once
    #[arg(long, default_values_t = [1, 2, 4, 8, 16], num_args = 1..)]
    programs: Vec<usize>,
    /// What is measured
    #[arg(long, value_enum, default_values_t = [Measure::Rate], num_args = 1..)]
    measure: Vec<Measure>,
    /// Types of the weights [default: those that the performance page has]
    #[arg(long = "type", num_args = 1.., value_parser = model::file_type_parser())]
    types: Vec<FileType>,
    #[command(flatten)]
    build: Build,
}

/// The types that are measured if no others are named.
const TYPES: [FileType; 4] = [
    FileType::F16,
    FileType::Q8_0,
    FileType::Q4KM,
    FileType::Q4_0,
];

/// An executor, with or without batches.
struct Side {
    name: &'static str,
    executor: Executor,
    control: PathBuf,
    socket: PathBuf,
    /// The socket of the guest with another model.
    other: PathBuf,
}

struct Setting {
    bin: PathBuf,
    dist: Dist,
    folder: PathBuf,
    window: Duration,
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("what is needed");
    let Needs {
        bin, dist, folder, ..
    } = Needs::prepare(cache, &options.build)?;
    let threads = options.threads.unwrap_or_else(workspace::cores);
    let types = match &options.types[..] {
        [] => TYPES.to_vec(),
        types => types.to_vec(),
    };
    let setting = Setting {
        bin,
        dist,
        folder,
        window: Duration::from_secs(options.seconds),
    };
    let mut rows = Vec::new();
    for ty in types {
        let model = model::ensure(cache, &model::BENCH, ty)?;
        heading(&format!("batch, {}", ty.name()));
        let scratch = Scratch::new()?;
        let with = setting.side("batch", threads, scratch.path(), &[])?;
        let without = setting.side("slices", threads, scratch.path(), &["--no-batch"])?;
        let measures = |measure| options.measure.contains(&measure);
        let mut alone = None;
        for &programs in &options.programs {
            if measures(Measure::Rate) {
                let sides = [&with, &without];
                let rates = setting.rates(sides, &model, programs, options.repeats)?;
                // Of the first number of programs, which is one by default.
                let [_, slices, _] = rates;
                let alone = *alone.get_or_insert(slices);
                rows.push(rate_row(programs, ty, rates, alone));
            }
            if measures(Measure::Latency) {
                let sides = [&with, &without];
                rows.extend(setting.latency_rows(sides, &model, programs, ty, options.repeats)?);
            }
            if measures(Measure::Share) {
                rows.push(setting.share_row(
                    &with,
                    cache,
                    &model,
                    programs,
                    ty,
                    options.repeats,
                )?);
            }
        }
        with.executor.stop()?;
        without.executor.stop()?;
    }
    show(&rows);
    let under = json!({
        "threads": threads,
        "repeats": options.repeats,
        "seconds": options.seconds,
    });
    keep(&setting.folder, "batch", under, &rows)
}

impl Setting {
    /// Starts an executor.
    fn side(
        &self,
        name: &'static str,
        threads: usize,
        scratch: &Path,
        more: &[&str],
    ) -> Result<Side> {
        let at = |suffix: &str| scratch.join(format!("{name}{suffix}"));
        let (control, socket) = (at("-control.sock"), at("-guest.sock"));
        let other = at("-other.sock");
        // One guest, all programs of which share the weights of a model, and another one.
        let config = format!(
            "control.socket = {:?}\n[[guest]]\nname = \"all\"\nlisten = [\"unix:{}\"]\n\
             graphs-in-flight = 64\n[[guest]]\nname = \"other\"\nlisten = [\"unix:{}\"]\n",
            control.display().to_string(),
            socket.display(),
            other.display()
        );
        let file = at(".toml");
        std::fs::write(&file, config).context("writing a configuration")?;
        let file = file.display().to_string();
        let mut arguments = vec!["--config", &file];
        arguments.extend(more);
        let executor = Executor::start_with(
            &self.dist,
            &at("-all.sock"),
            threads,
            &self.folder.join(format!("batch-{name}.log")),
            &arguments,
        )?;
        Ok(Side {
            name,
            executor,
            control,
            socket,
            other,
        })
    }

    /// A program of llama.cpp on the device of an executor, of the guest at `socket`.
    fn command(&self, socket: &Path, program: &str, model: &Path) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command
            .arg("--model")
            .arg(model)
            .args(["-ngl", "99", "-t", "1", "-dev", "VGPU0"])
            .env_remove("VGPU_STATS")
            .env("GGML_BACKEND_PATH", &self.dist.plugin)
            .env("VGPU_ENDPOINT", format!("unix:{}", socket.display()));
        command
    }

    /// The tokens per second of so many programs together.
    fn rate(&self, side: &Side, model: &Path, programs: usize) -> Result<f64> {
        let programs = self.endless(side, model, programs)?;
        self.wait_until_all_decode(side, programs.len())?;
        let (before, began) = (self.graphs(side)?, Instant::now());
        thread::sleep(self.window);
        let (after, ended) = (self.graphs(side)?, Instant::now());
        self.end(side, programs)?;
        let tokens: f64 = after.iter().sum::<f64>() - before.iter().sum::<f64>();
        Ok(tokens / (ended - began).as_secs_f64())
    }

    /// The tokens per second of so many programs in batches and one after the other, and of as many
    /// sequences in one program.
    fn rates(
        &self,
        [with, without]: [&Side; 2],
        model: &Path,
        programs: usize,
        repeats: u32,
    ) -> Result<[f64; 3]> {
        let [mut batches, mut slices, mut own] = [const { Vec::new() }; 3];
        for round in 1..=repeats {
            let progress = Progress::new(&format!("{programs} programs, round {round}"));
            batches.push(self.rate(with, model, programs)?);
            slices.push(self.rate(without, model, programs)?);
            own.push(self.own_batch(with, model, programs)?);
            let last = |rates: &Vec<f64>| rates.last().copied().unwrap_or_default();
            progress.done(&format!(
                "{:.1} tok/s in batches, {:.1} in slices, {:.1} in one program",
                last(&batches),
                last(&slices),
                last(&own)
            ));
        }
        Ok([batches, slices, own].map(median))
    }

    /// Starts programs that decode until they are killed.
    fn endless(&self, side: &Side, model: &Path, programs: usize) -> Result<Vec<Daemon>> {
        let start = |i: usize| {
            let log = self.folder.join(format!("batch-{}-{i}.log", side.name));
            self.decode(&side.socket, model, &log)
        };
        (0..programs).map(start).collect()
    }

    /// Starts a program that decodes until it is killed.
    fn decode(&self, socket: &Path, model: &Path, log: &Path) -> Result<Daemon> {
        let mut command = self.command(socket, "llama-bench", model);
        command.args([
            "-p", "0", "-n", "256", "-r", "10000", "-o", "json", "-fa", "1",
        ]);
        Daemon::start(&mut command, log)
    }

    /// Kills programs, and waits until the executor has none.
    fn end(&self, side: &Side, programs: Vec<Daemon>) -> Result<()> {
        for program in programs {
            program.kill()?;
        }
        let start = Instant::now();
        while !self.sessions(side)?.is_empty() {
            ensure!(start.elapsed() < TIMEOUT, "stopped programs do not end");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The milliseconds between the tokens of one program, beside `programs` less one others.
    fn latencies(&self, side: &Side, model: &Path, programs: usize) -> Result<Vec<f64>> {
        let others = self.endless(side, model, programs - 1)?;
        self.wait_until_all_decode(side, others.len())?;
        let stats = self.folder.join(format!("batch-{}.stats.json", side.name));
        let _ = std::fs::remove_file(&stats); // of an earlier round
        let mut command = self.command(&side.socket, "llama-bench", model);
        command.args(["-p", "0", "-n", &LATENCY_TOKENS.to_string(), "-r", "1"]);
        command
            .args(["-o", "json", "-fa", "1"])
            .env("VGPU_STATS", &stats);
        process::output(&mut command).context("llama-bench")?;
        self.end(side, others)?;
        let steps = Stats::read(&stats)?.steps;
        // The tokens of the run that is measured are the last ones.
        let from = steps.len().saturating_sub(LATENCY_TOKENS);
        ensure!(steps.len() > LATENCY_TOKENS, "{} graphs", steps.len());
        let times = steps[from..].windows(2).map(|pair| {
            let [before, after] = [0, 1].map(|i| pair[i].submitted_ns as f64);
            (after - before) / 1e6
        });
        Ok(times.collect())
    }

    /// The latency of a token with batches and one after the other.
    fn latency_rows(
        &self,
        sides: [&Side; 2],
        model: &Path,
        programs: usize,
        ty: FileType,
        repeats: u32,
    ) -> Result<[Row; 2]> {
        let mut times = [const { Vec::new() }; 2];
        for round in 1..=repeats {
            let name = format!("latency beside {} programs, round {round}", programs - 1);
            let progress = Progress::new(&name);
            for (side, times) in sides.into_iter().zip(&mut times) {
                times.extend(self.latencies(side, model, programs)?);
            }
            progress.done("");
        }
        for times in &mut times {
            times.sort_unstable_by(f64::total_cmp);
        }
        let row = |name: &str, part: f64| {
            let [batches, slices] = [0, 1].map(|side| percentile(&times[side], part));
            Row::new(
                format!("{name} of a token, {programs} programs, {}", ty.name()),
                "ms",
            )
            .figure("in batches", batches)
            .figure("one after the other", slices)
            .ratio("in batches", "one after the other", false, None)
        };
        Ok([row("median", 0.5), row("99th percentile", 0.99)])
    }

    /// The share of the engine's time that a guest with another model gets beside a batch.
    fn share_row(
        &self,
        side: &Side,
        cache: &Cache,
        model: &Path,
        programs: usize,
        ty: FileType,
        repeats: u32,
    ) -> Result<Row> {
        let model_of_other = model::ensure(cache, &model::DEMO, FileType::Q4KM)?;
        let mut shares = Vec::new();
        for round in 1..=repeats {
            let progress = Progress::new(&format!(
                "another model beside {programs} programs, round {round}"
            ));
            let mut all = self.endless(side, model, programs)?;
            let log = self.folder.join(format!("batch-{}-other.log", side.name));
            all.push(self.decode(&side.other, &model_of_other, &log)?);
            self.wait_until_all_decode(side, all.len())?;
            let before = self.engine_time(side)?;
            thread::sleep(self.window);
            let after = self.engine_time(side)?;
            self.end(side, all)?;
            let [of_batch, of_other] = [0, 1].map(|guest| after[guest] - before[guest]);
            shares.push(of_other / (of_batch + of_other));
            progress.done("");
        }
        let name = format!(
            "engine time of a guest with another model beside {programs} programs, {}",
            ty.name()
        );
        Ok(Row::new(name, "share; 0.5 by weight").figure("measured", median(shares)))
    }

    /// The seconds of engine time that both guests have had.
    fn engine_time(&self, side: &Side) -> Result<[f64; 2]> {
        let status = executor::status(&self.dist.vgpu, &side.control)?;
        let of = |name: &str| {
            let mut guests = status["guests"].as_array().into_iter().flatten();
            let guest = guests.find(|guest| guest["name"] == name);
            guest.and_then(|guest| guest["busy"].as_f64())
        };
        let (batch, other) = (of("all"), of("other"));
        Ok([batch.context("no guest")?, other.context("no guest")?])
    }

    /// The tokens per second of as many sequences in one program.
    fn own_batch(&self, side: &Side, model: &Path, sequences: usize) -> Result<f64> {
        let mut command = self.command(&side.socket, "llama-batched-bench", model);
        command
            .args(["-npp", "1", "-ntg", &TOKENS.to_string(), "-fa", "on"])
            .args(["-npl", &sequences.to_string(), "--output-format", "jsonl"])
            .args([
                "-c",
                &(2 * TOKENS as usize * sequences).max(512).to_string(),
            ]);
        // A thread of the program writes the figures, and the program may end before that.
        let figures = (0..FIGURES_TRIES).find_map(|_| {
            let text = process::output(&mut command).context("llama-batched-bench");
            let line = text.map(|text| {
                let line = text.lines().find(|line| line.starts_with('{'));
                line.map(str::to_owned)
            });
            line.transpose()
        });
        let figures: Value = serde_json::from_str(&figures.context("no figures")??)?;
        figures["speed_tg"].as_f64().context("no tokens per second")
    }

    fn sessions(&self, side: &Side) -> Result<Vec<Value>> {
        let status = executor::status(&self.dist.vgpu, &side.control)?;
        Ok(status["sessions"].as_array().cloned().unwrap_or_default())
    }

    /// The graphs that each session has run.
    fn graphs(&self, side: &Side) -> Result<Vec<f64>> {
        let sessions = self.sessions(side)?;
        Ok(sessions
            .iter()
            .filter_map(|s| s["graphs"].as_f64())
            .collect())
    }

    /// Waits until so many sessions have run some graphs each, at the same time.
    fn wait_until_all_decode(&self, side: &Side, programs: usize) -> Result<()> {
        const WARM: f64 = 8.0;
        let start = Instant::now();
        loop {
            let graphs = self.graphs(side)?;
            if graphs.len() == programs && graphs.iter().all(|&graphs| graphs >= WARM) {
                return Ok(());
            }
            ensure!(
                start.elapsed() < TIMEOUT,
                "{programs} programs: {graphs:?} graphs"
            );
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The row of the rates of so many programs. `alone` is the rate of one.
fn rate_row(programs: usize, ty: FileType, rates: [f64; 3], alone: f64) -> Row {
    let [batches, slices, own] = rates;
    let name = format!("{programs} programs decode, {}", ty.name());
    Row::new(name, "tok/s in all")
        .figure("in batches", batches)
        .figure("one after the other", slices)
        .figure("as sequences of one program", own)
        .figure("one program alone", alone)
        .ratio("in batches", "one after the other", true, None)
        .ratio("in batches", "as sequences of one program", true, None)
        .ratio("in batches", "one program alone", true, None)
}

/// The value below which `part` of the sorted values lie.
fn percentile(sorted: &[f64], part: f64) -> f64 {
    let at = (sorted.len() as f64 * part) as usize;
    sorted[at.min(sorted.len() - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_of_the_list() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&values, 0.5), 101.0);
        assert_eq!(percentile(&values, 0.99), 199.0);
        assert_eq!(percentile(&values[..1], 0.99), 1.0);
    }
}
