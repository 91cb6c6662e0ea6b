//! `vgpu gpu-check`: checks the results of an engine and measures its speed, in a few minutes and
//! one table.

mod child;
mod findings;
mod measurement;
mod report;
mod results;
mod self_check;
mod table;
mod targets;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use vgpu_check::SHAPES;
use vgpu_cuda::autotune::GemmVariant;
use vgpu_engine::Engine;

use vgpu_executor::engine;
use vgpu_executor::engine::EngineKind;

use child::List;
use findings::{CheckedDevice, Copies, Message, gigabytes};
use measurement::Measurement;
use report::Report;
pub(crate) use self_check::before_serving;

/// Checks a GPU: loads all kernels, compares each family of operators with the CPU engine, and
/// measures the rates of copies, products and attention.
///
/// Needs neither models nor guests. Rates of products with few columns are in bytes of weights per
/// second, and in percent of the rate of a copy within the device's memory. The exit status is 0 if
/// all cases agree, and cases have run every family of kernels for this GPU alone.
#[derive(Parser)]
pub(crate) struct Args {
    #[command(subcommand)]
    job: Option<Job>,

    #[command(flatten)]
    measurement: Measurement,

    /// Only compare, measure nothing
    #[arg(long)]
    compare_only: bool,

    /// Also write all findings to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Args {
    /// Whether the command is over when nobody reads what it prints. `tune` saves what it has
    /// measured at its end.
    pub(crate) fn only_prints(&self) -> bool {
        !matches!(self.job, Some(Job::Tune { .. }))
    }
}

/// Further tasks around a GPU.
#[derive(Subcommand)]
enum Job {
    /// Runs one list of entries in this process
    #[command(hide = true)]
    Child(child::Args),
    /// Checks kernels in this process
    #[command(hide = true)]
    SelfCheckChild(self_check::ChildArgs),
    /// Checks each kernel of a GPU that has a fallback against the fallback, and stores which are
    /// faulty: `vgpu serve` does not use those. `vgpu serve` runs this check by itself at its first
    /// start on a GPU with a driver
    SelfCheck(self_check::Args),
    /// Lists the models that can be written
    Models,
    /// Writes a model with the shapes of a published model and random weights, without a tokenizer,
    /// for measurements on a machine without access to models
    Model {
        /// A model that `vgpu gpu-check models` lists
        name: String,
        /// The GGUF file
        to: PathBuf,
        /// A small model of the same architecture
        #[arg(long)]
        small: bool,
    },
    /// Measures which kernels compute products of many columns fastest on a GPU, and stores the
    /// result for `vgpu serve`
    Tune {
        /// The GPU, as for `vgpu serve`
        #[arg(long, value_name = "ENGINE", default_value = "cuda")]
        engine: EngineKind,
        /// Duration of each measurement in milliseconds
        #[arg(long, value_name = "MS", default_value_t = 20)]
        time: u64,
    },
    /// Prints one table of the results that run.sh has left in a folder, and writes `summary.json`
    /// there
    Table {
        /// The folder
        folder: PathBuf,
    },
    /// Compares the results that speed.sh has left in a folder with their targets, in a table and
    /// in `speed.json` there
    Targets {
        /// The folder
        folder: PathBuf,
        /// The models are small ones: check only that the table works
        #[arg(long)]
        small: bool,
    },
}

fn work(job: &Job) -> anyhow::Result<ExitCode> {
    match job {
        Job::Child(args) => return child::run(args),
        Job::SelfCheckChild(args) => return self_check::run_child(args),
        Job::SelfCheck(args) => return self_check::run(args),
        Job::Models => {
            for model in SHAPES {
                println!("{:24} {:5.1} GB", model.name, model.bytes() as f64 / 1e9);
            }
        }
        Job::Model { name, to, small } => write_model(name, to, *small)?,
        Job::Tune { engine, time } => tune(engine, Duration::from_millis(*time))?,
        Job::Table { folder } => {
            if !table::print(folder)? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Job::Targets { folder, small } => targets::print(folder, *small)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn tune(engine: &EngineKind, time: Duration) -> anyhow::Result<()> {
    let EngineKind::Cuda(ordinal) = engine else {
        anyhow::bail!("only GPUs have kernels to choose from: --engine cuda[:N]");
    };
    let mut engines = Vec::new();
    for variant in GemmVariant::ALL {
        engines.push((variant, engine::cuda_forced(*ordinal, variant)?));
    }
    let device = engines[0].1.description().to_owned();
    if !engines[0].1.is_tunable() {
        println!("{device}: one kernel does each product, there is nothing to choose");
        return Ok(());
    }
    let variants: Vec<(GemmVariant, &dyn Engine)> = { engines.iter() }
        .map(|(variant, engine)| (*variant, engine as &dyn Engine))
        .collect();
    let variants = <[_; 3]>::try_from(variants)
        .ok()
        .context("three variants")?;
    let options = vgpu_check::Options {
        time,
        ..vgpu_check::Options::default()
    };
    let extents = vgpu_check::TuneShapes::default();
    let table = vgpu_check::tune(&variants, &options, &extents, |tuned| {
        let rates = tuned.rates.each_ref().map(|(variant, rate)| match rate {
            Ok(rate) => format!("{} {:.1}", variant.name(), rate / 1e12),
            Err(reason) => format!("{} FAILED: {reason}", variant.name()),
        });
        let best = tuned.best().map_or("none", GemmVariant::name);
        println!(
            "{:8} {:5} x {:4}: {} TFLOPS: {best}",
            tuned.ty.ggml_name(),
            tuned.rows,
            tuned.columns,
            rates.join(", ")
        );
    });
    let path = engine::save_tuning(&device, &table)?;
    println!("{} tuning entries are in {}", table.len(), path.display());
    Ok(())
}

fn write_model(name: &str, to: &Path, small: bool) -> anyhow::Result<()> {
    let model = SHAPES.into_iter().find(|model| model.name == name);
    let model = model.with_context(|| format!("no model {name}; see vgpu gpu-check models"))?;
    let model = if small { model.small() } else { model };
    let file = File::create(to).with_context(|| format!("creating {}", to.display()))?;
    let written = model.write(&file);
    if written.is_err() {
        // Half a model is of no use, and fills the disk.
        let _ = std::fs::remove_file(to);
    }
    written.with_context(|| format!("writing {}", to.display()))
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(job) = &args.job {
        return work(job);
    }
    let measurement = &args.measurement;
    anyhow::ensure!(
        measurement.size > 0 && measurement.size.is_multiple_of(256),
        "--size {}: not a multiple of 256",
        measurement.size
    );
    measurement.pattern()?;
    let mut check = Check::new(args);
    child::watch(List::Cases, measurement, |message| check.take(message))?;
    check.compared();
    if measurement.tokens > 0 {
        child::watch(List::Texts, measurement, |message| check.take(message))?;
    }
    if !args.compare_only {
        child::watch(List::Rates, measurement, |message| check.take(message))?;
    }
    check.end()
}

/// A check that is going on.
struct Check<'a> {
    args: &'a Args,
    report: Report,
    device: Option<CheckedDevice>,
    /// The kernels of all cases.
    kernels: Vec<String>,
    cases: usize,
    right: usize,
    /// Cases, texts and rates.
    entries: usize,
    copies: Option<Copies>,
    is_wrong: bool,
}

impl<'a> Check<'a> {
    fn new(args: &'a Args) -> Check<'a> {
        Check {
            args,
            report: Report::new(args.json.as_deref()),
            device: None,
            kernels: Vec::new(),
            cases: 0,
            right: 0,
            entries: 0,
            copies: None,
            is_wrong: false,
        }
    }

    /// Prints and keeps what a child has found.
    ///
    /// # Errors
    ///
    /// If a child runs on another engine than the first one did.
    fn take(&mut self, message: Message) -> anyhow::Result<()> {
        match message {
            Message::Device(device) => {
                if let Some(before) = &self.device {
                    // `--engine auto` may choose anew in each child.
                    let is_same = (&before.engine, &before.description)
                        == (&device.engine, &device.description);
                    anyhow::ensure!(
                        is_same,
                        "the engine has changed from {} ({}) to {} ({}): the device is lost",
                        before.engine,
                        before.description,
                        device.engine,
                        device.description
                    );
                } else {
                    println!(
                        "{}: {}, {} MiB of {} MiB free",
                        device.engine,
                        device.description,
                        device.free >> 20,
                        device.memory >> 20
                    );
                    self.report.device(&device);
                    self.device = Some(device);
                }
            }
            Message::Case(case) => {
                self.entries += 1;
                self.cases += 1;
                self.right += usize::from(case.right);
                if !case.right {
                    let kernels = case.kernels.join(" ");
                    println!("WRONG  {}: {} [{kernels}]", case.name, case.outcome());
                    self.is_wrong = true;
                }
                self.report.add("cases", &case);
                self.kernels.extend(case.kernels);
            }
            Message::Text(text) => {
                self.entries += 1;
                println!("{}", text.line());
                self.is_wrong |= !text.is_same();
                self.report.add("texts", &text);
            }
            Message::Copies(copies) => {
                println!(
                    "copies: within {}, from the host {}, to the host {}",
                    gigabytes(copies.within),
                    gigabytes(copies.upload),
                    gigabytes(copies.download)
                );
                self.report.copies(copies);
                self.copies = Some(copies);
            }
            Message::Rate(rate) => {
                self.entries += 1;
                println!("{}", rate.line(self.copies));
                self.is_wrong |= rate.ours && rate.failed.is_some();
                self.report.add("rates", &rate);
            }
            Message::LeftOut(0) | Message::Begins { .. } | Message::Runs { .. } => {}
            Message::LeftOut(count) => {
                println!("{count} rates were not measured: the time was up");
            }
            Message::Done => {}
        }
        Ok(())
    }

    /// All cases have run: counts them, and looks for families of kernels that none has run.
    fn compared(&mut self) {
        println!(
            "{} of {} cases agree with the CPU engine",
            self.right, self.cases
        );
        let families = self.device.iter().flat_map(|device| &device.families);
        let untested = vgpu_check::untested_families(
            families.map(String::as_str),
            self.kernels.iter().map(String::as_str),
        );
        // A selection of cases need not run all.
        if self.args.measurement.only.is_none() {
            for family in untested {
                println!("WRONG  no case ran a kernel {family}*, which this device has");
                self.is_wrong = true;
            }
        }
    }

    fn end(self) -> anyhow::Result<ExitCode> {
        self.report.end()?;
        anyhow::ensure!(self.entries > 0, "no case, text or rate matches --only");
        Ok(match self.is_wrong {
            true => ExitCode::FAILURE,
            false => ExitCode::SUCCESS,
        })
    }
}
