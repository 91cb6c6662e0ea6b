//! `vgpu gpu-check`: checks the results of an engine and measures its speed, in a few minutes and
//! one table.

mod report;
mod results;
mod table;
mod targets;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use vgpu_check::{Case, Ceilings, Decoding, Outcome, Rate, SHAPES, Work};
use vgpu_cpu::CpuEngine;
use vgpu_cuda::autotune::GemmVariant;
use vgpu_engine::Engine;

use vgpu_executor::engine;
use vgpu_executor::engine::EngineKind;
use vgpu_executor::size;

use report::Report;

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

    /// The engine to check, as for `vgpu serve`
    #[arg(long, value_name = "ENGINE", default_value = "cuda")]
    engine: EngineKind,

    /// Bytes of weights for the measurements: several times the device's cache
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "512M")]
    weights: u64,

    /// Rows and columns of the weights; a multiple of 256
    #[arg(long, value_name = "N", default_value_t = 4096)]
    size: u64,

    /// Duration of each measurement in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 200)]
    time: u64,

    /// Time for all measurements in seconds; the least important ones are left out
    #[arg(long, value_name = "S")]
    budget: Option<u64>,

    /// Tokens of each text that both engines generate; 0: no texts
    #[arg(long, value_name = "N", default_value_t = 48)]
    tokens: u64,

    /// Only compare, measure nothing
    #[arg(long)]
    compare_only: bool,

    /// Also write all findings to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Further tasks around a GPU.
#[derive(Subcommand)]
enum Job {
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
        Job::Models => {
            for model in SHAPES {
                println!("{:24} {:5.1} GB", model.name, model.bytes() as f64 / 1e9);
            }
        }
        Job::Model { name, to, small } => write_model(name, to, *small)?,
        Job::Tune { engine, time } => tune(engine.clone(), Duration::from_millis(*time))?,
        Job::Table { folder } => {
            if !table::print(folder)? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Job::Targets { folder, small } => targets::print(folder, *small)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn tune(engine: EngineKind, time: Duration) -> anyhow::Result<()> {
    let EngineKind::Cuda(ordinal) = engine else {
        anyhow::bail!("only GPUs have kernels to choose from: --engine cuda[:N]");
    };
    let mut engines = Vec::new();
    for variant in GemmVariant::ALL {
        engines.push((variant, engine::cuda_forced(ordinal, variant)?));
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
    anyhow::ensure!(
        args.size > 0 && args.size.is_multiple_of(256),
        "--size {}: not a multiple of 256",
        args.size
    );
    let engine = engine::start(&args.engine, 0.into(), None)?;
    let oracle = CpuEngine::new(0, None).context("the cpu engine does not start")?;
    let memory = engine.memory();
    println!(
        "{}: {}, {} MiB of {} MiB free",
        engine.name(),
        engine.description(),
        memory.free >> 20,
        memory.total >> 20
    );

    let mut report = Report::new(&*engine, args.json.as_deref());
    let cases = vgpu_check::compare(&*engine, &oracle, |case| {
        if !case.is_right() {
            let kernels = case.kernels.join(" ");
            println!("WRONG  {}: {} [{kernels}]", case.name, outcome(case));
        }
        report.case(case);
    });
    let right = cases.iter().filter(|case| case.is_right()).count();
    println!("{right} of {} cases agree with the CPU engine", cases.len());
    let untested = vgpu_check::untested_families(&*engine, &cases);
    for family in &untested {
        println!("WRONG  no case ran a kernel {family}*, which this device has");
    }
    let texts = match args.tokens {
        0 => Vec::new(),
        tokens => vgpu_check::compare_decoding(&*engine, &oracle, tokens, |text| {
            println!("{}", words(text));
            report.text(text);
        }),
    };

    let options = vgpu_check::Options {
        weights: args.weights,
        size: args.size,
        time: Duration::from_millis(args.time),
        budget: args.budget.map(Duration::from_secs),
    };
    let mut rates = Vec::new();
    if !args.compare_only {
        let measured = vgpu_check::ceilings(&*engine, &options)?;
        println!(
            "copies: within {}, from the host {}, to the host {}",
            gigabytes(measured.within),
            gigabytes(measured.upload),
            gigabytes(measured.download)
        );
        report.copies(&measured);
        let left_out;
        (rates, left_out) = vgpu_check::rates(&*engine, &options, |rate| {
            println!("{}", line(rate, &measured));
            report.rate(rate);
        });
        if left_out > 0 {
            println!("{left_out} rates were not measured: the time was up");
        }
    }
    report.end()?;
    let ran = { rates.iter() }.all(|rate| rate.rate.is_ok() || !rate.is_ours);
    let same = texts.iter().all(Decoding::is_same);
    Ok(
        match right == cases.len() && untested.is_empty() && same && ran {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        },
    )
}

fn outcome(case: &Case) -> String {
    match &case.outcome {
        Outcome::Compared { error, limit } => format!("off by {error:.1e}, allowed {limit:.1e}"),
        Outcome::Failed(reason) => reason.to_string(),
    }
}

fn words(text: &Decoding) -> String {
    match &text.outcome {
        Ok((all, same)) => format!("{}: {same} of {all} tokens are the CPU engine's", text.name),
        Err(reason) => format!("WRONG  {}: {reason}", text.name),
    }
}

fn gigabytes(rate: f64) -> String {
    format!("{:.1} GB/s", rate / 1e9)
}

/// A rate as a line of the table; of bytes also in percent of what a copy reaches.
fn line(rate: &Rate, ceilings: &Ceilings) -> String {
    let Rate {
        name,
        work,
        rate,
        seconds,
        is_ours,
        kernels,
    } = rate;
    let value = match (rate, work) {
        (Err(reason), _) if *is_ours => format!("FAILED: {reason}"),
        (Err(reason), _) => reason.to_string(),
        (Ok(rate), Work::Bytes) => {
            let percent = 100.0 * rate / ceilings.within;
            format!("{:>14} {percent:5.0} %", gigabytes(*rate))
        }
        (Ok(rate), Work::Operations) => format!("{:>11.2} TFLOPS", rate / 1e12),
    };
    let kernels = kernels.join(" ");
    format!("{name:36} {value}  {:9.1} us  {kernels}", seconds * 1e6)
}
