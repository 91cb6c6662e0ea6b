//! `vgpu gpu-check`: whether an engine is right and how fast it is, in a few minutes and one table.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use serde_json::{Value, json};
use vgpu_kernels::Engine;
use vgpu_kernels::check::{self, Case, Ceilings, Outcome, Rate, Work};
use vgpu_kernels::cpu::CpuEngine;

use crate::serve;
use vgpu_executor::config::EngineKind;
use vgpu_executor::size;

/// Looks at a GPU: all kernels load, each family of operators gives what the CPU engine gives, and how fast copies,
/// products and attention are.
///
/// Needs neither models nor guests. Rates of products with few columns are in bytes of weights a second, beside what
/// a copy within the device's memory reaches. The exit status is 0 when all cases agree.
#[derive(Parser)]
pub(crate) struct Args {
    /// The engine to look at, as for `vgpu serve`.
    #[arg(long, value_name = "ENGINE", default_value = "cuda")]
    engine: EngineKind,

    /// Bytes of weights to measure with: several times the device's cache.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "512M")]
    weights: u64,

    /// Rows and columns of the weights; a multiple of 256.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    size: u64,

    /// How long each rate is measured, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 200)]
    time: u64,

    /// Only compare, measure nothing.
    #[arg(long)]
    compare_only: bool,

    /// Write everything to this file, too, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(
        args.size > 0 && args.size.is_multiple_of(256),
        "--size {}: not a multiple of 256",
        args.size
    );
    let engine = serve::engine(args.engine, 0.into(), None)?;
    let oracle = CpuEngine::new(0, None).context("the cpu engine does not start")?;
    let memory = engine.memory();
    println!(
        "{}: {}, {} MiB of {} MiB free",
        engine.name(),
        engine.description(),
        memory.free >> 20,
        memory.total >> 20
    );

    let cases = check::compare(&*engine, &oracle, |case| {
        if !case.is_right() {
            println!("WRONG  {}: {}", case.name, outcome(case));
        }
    });
    let right = cases.iter().filter(|case| case.is_right()).count();
    println!("{right} of {} cases agree with the CPU engine", cases.len());

    let options = check::Options {
        weights: args.weights,
        size: args.size,
        time: Duration::from_millis(args.time),
    };
    let (mut ceilings, mut rates) = (None, Vec::new());
    if !args.compare_only {
        let measured = check::ceilings(&*engine, &options).map_err(anyhow::Error::msg)?;
        println!(
            "copies: within {}, from the host {}, to the host {}",
            gigabytes(measured.within),
            gigabytes(measured.upload),
            gigabytes(measured.download)
        );
        rates = check::rates(&*engine, &options, |rate| {
            println!("{}", line(rate, &measured))
        });
        ceilings = Some(measured);
    }
    if let Some(path) = &args.json {
        let text = format!(
            "{:#}\n",
            report(&*engine, &cases, ceilings.as_ref(), &rates)
        );
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    let ran = rates.iter().all(|rate| rate.rate.is_ok());
    Ok(match right == cases.len() && ran {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn outcome(case: &Case) -> String {
    match &case.outcome {
        Outcome::Compared { error, limit } => format!("off by {error:.1e}, allowed {limit:.1e}"),
        Outcome::Failed(reason) => reason.clone(),
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
    } = rate;
    let value = match (rate, work) {
        (Err(reason), _) => format!("FAILED: {reason}"),
        (Ok(rate), Work::Bytes) => {
            let percent = 100.0 * rate / ceilings.within;
            format!("{:>14} {percent:5.0} %", gigabytes(*rate))
        }
        (Ok(rate), Work::Operations) => format!("{:>11.2} TFLOPS", rate / 1e12),
    };
    format!("{name:36} {value}  {:9.1} us", seconds * 1e6)
}

fn report(
    engine: &dyn Engine,
    cases: &[Case],
    ceilings: Option<&Ceilings>,
    rates: &[Rate],
) -> Value {
    let case = |case: &Case| match &case.outcome {
        Outcome::Compared { error, limit } => json!({
            "name": case.name, "right": case.is_right(), "error": error, "limit": limit,
        }),
        Outcome::Failed(reason) => json!({"name": case.name, "right": false, "failed": reason}),
    };
    let rate = |rate: &Rate| {
        let unit = match rate.work {
            Work::Bytes => "bytes/s",
            Work::Operations => "FLOPS",
        };
        match &rate.rate {
            Ok(value) => json!({
                "name": rate.name, "unit": unit, "rate": value, "seconds": rate.seconds,
            }),
            Err(reason) => json!({"name": rate.name, "failed": reason}),
        }
    };
    json!({
        "vgpu": env!("CARGO_PKG_VERSION"),
        "engine": engine.name(),
        "description": engine.description(),
        "memory": engine.memory().total,
        "cases": cases.iter().map(case).collect::<Vec<_>>(),
        "copies": ceilings.map(|c| json!({
            "within": c.within, "upload": c.upload, "download": c.download,
        })),
        "rates": rates.iter().map(rate).collect::<Vec<_>>(),
    })
}
