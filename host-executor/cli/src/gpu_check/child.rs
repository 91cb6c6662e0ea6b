//! The processes that touch the GPU.
//!
//! After an illegal address nothing of CUDA works in a process, and a kernel that never ends stops
//! its process for good. So `vgpu gpu-check` itself has no CUDA context: a child process runs the
//! entries of a list, and names each before it runs. When a child ends or is silent for too long,
//! the entry is noted, and the next child begins behind it.

use std::io::Write as _;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use vgpu_check::child_process::{self, Silence};
use vgpu_check::{CheckError, Outcome, Selection, Step};
use vgpu_cpu::CpuEngine;
use vgpu_executor::engine::{self, EngineKind};

use super::findings::{BegunEntry, CaseFinding, CheckedDevice, Message, RateFinding, TextFinding};
use super::measurement::Measurement;
use crate::own_program::OWN_PROGRAM;

/// The time for an engine to start: kernels without built-in machine code are compiled.
const START_LIMIT: Duration = Duration::from_secs(300);

/// Exit status of a child whose device is lost. The parent starts the next one.
const DEVICE_LOST: u8 = 75;

/// The most children that may end in the middle of a list.
const MAX_ENDS: usize = 100;

/// A list of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum List {
    /// Cases of operators.
    Cases,
    /// Texts of small models.
    Texts,
    /// Copies, products and attention.
    Rates,
}

/// The arguments of a child.
#[derive(Parser)]
pub(super) struct Args {
    /// The list whose entries run
    #[arg(long)]
    list: List,
    /// The first entry that runs
    #[arg(long, default_value_t = 0)]
    first: usize,
    #[command(flatten)]
    measurement: Measurement,
}

/// Runs a list in this process. Standard output has one JSON value a line.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Measurement { engine, tokens, .. } = &args.measurement;
    let engine = match (args.list, engine) {
        // Their graphs have one node each, and are to run as CUDA graphs, too.
        (List::Cases, EngineKind::Cuda(ordinal)) => engine::cuda_for_single_nodes(*ordinal)?,
        _ => engine::start(engine, 0.into(), None)?,
    };
    send(&Message::Device(CheckedDevice::of(&*engine)))?;
    let only = args.measurement.pattern()?;
    let takes = |name: &str| only.as_ref().is_none_or(|only| only.is_match(name));
    let selection = Selection {
        first: args.first,
        takes: &takes,
    };
    match args.list {
        List::Cases => {
            vgpu_check::compare(&*engine, &oracle()?, &selection, |step| {
                report(step, |case| {
                    let failed = match &case.outcome {
                        Outcome::Failed(error) => Some(error),
                        Outcome::Compared { .. } => None,
                    };
                    (Message::Case(CaseFinding::of(case)), failed)
                });
            });
        }
        List::Texts => {
            vgpu_check::compare_decoding(&*engine, &oracle()?, *tokens, &selection, |step| {
                report(step, |text| {
                    let failed = text.outcome.as_ref().err();
                    (Message::Text(TextFinding::of(text)), failed)
                });
            });
        }
        List::Rates => {
            let options = args.measurement.options();
            if args.first == 0 {
                let copies = vgpu_check::ceilings(&*engine, &options)?;
                send(&Message::Copies(copies.into()))?;
            }
            let (_, left_out) = vgpu_check::rates(&*engine, &options, &selection, |step| {
                report(step, |rate| {
                    let failed = rate.rate.as_ref().err();
                    (Message::Rate(RateFinding::of(rate)), failed)
                });
            });
            send(&Message::LeftOut(left_out))?;
        }
    }
    send(&Message::Done)?;
    Ok(ExitCode::SUCCESS)
}

/// The reference engine.
fn oracle() -> anyhow::Result<CpuEngine> {
    CpuEngine::new(0, None).context("the cpu engine does not start")
}

fn send(message: &Message) -> anyhow::Result<()> {
    let line = serde_json::to_string(message).context("a finding as JSON")?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .context("writing to the parent")
}

/// Reports a step. Ends the process after an entry that has lost the device.
fn report<'t, T>(
    step: Step<'t, T>,
    finding: impl FnOnce(&'t T) -> (Message, Option<&'t CheckError>),
) {
    let (message, failed) = match step {
        Step::Begins { index, name } => {
            let name = name.to_owned();
            (Message::Begins { index, name }, None)
        }
        Step::Runs { kernels } => {
            let kernels = kernels.iter().map(|&kernel| kernel.to_owned()).collect();
            (Message::Runs { kernels }, None)
        }
        Step::Ends(entry) => finding(entry),
    };
    // Without a parent nobody wants the rest.
    if send(&message).is_err() || failed.is_some_and(CheckError::is_device_failure) {
        std::process::exit(DEVICE_LOST.into());
    }
}

/// Runs a list in children, and calls `seen` with each message. Entries in which a child ended are
/// reported as failed.
///
/// # Errors
///
/// If no child can be started, or a child ends before its first entry.
pub(super) fn watch(
    list: List,
    measurement: &Measurement,
    mut seen: impl FnMut(Message) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (begin, mut first) = (Instant::now(), 0);
    for _ in 0..MAX_ENDS {
        let left = measurement
            .budget()
            .map(|budget| budget.saturating_sub(begin.elapsed()));
        let mut begun: Option<BegunEntry> = None;
        let mut last = None;
        let ended = one(list, first, measurement, left, |message| {
            match &message {
                Message::Begins { index, name } => {
                    last = Some(*index);
                    begun = Some(BegunEntry {
                        name: name.clone(),
                        kernels: Vec::new(),
                    });
                }
                Message::Runs { kernels } => {
                    if let Some(begun) = &mut begun {
                        begun.kernels.clone_from(kernels);
                    }
                }
                Message::Case(_) | Message::Text(_) | Message::Rate(_) => begun = None,
                _ => {}
            }
            seen(message)
        })?;
        let Some(reason) = ended else { return Ok(()) };
        if let Some(begun) = &begun {
            let reason = reason.clone();
            seen(match list {
                List::Cases => Message::Case(CaseFinding::ended(begun, reason)),
                List::Texts => Message::Text(TextFinding::ended(begun, reason)),
                List::Rates => Message::Rate(RateFinding::ended(begun, reason)),
            })?;
        }
        first = last.with_context(|| format!("before the first entry: {reason}"))? + 1;
    }
    anyhow::bail!("{MAX_ENDS} child processes have ended before the list did");
}

/// Runs one child. Returns why it ended before the list did, if so.
fn one(
    list: List,
    first: usize,
    measurement: &Measurement,
    left: Option<Duration>,
    mut seen: impl FnMut(Message) -> anyhow::Result<()>,
) -> anyhow::Result<Option<String>> {
    let list = list.to_possible_value().context("a list has a name")?;
    let mut command = Command::new(OWN_PROGRAM);
    command
        .args(["gpu-check", "child", "--list", list.get_name()])
        .arg(format!("--first={first}"))
        .args(measurement.args(left));
    let silence = Silence {
        at_start: START_LIMIT,
        between: measurement.silence(),
    };
    let mut is_done = false;
    let ended = child_process::watch(&mut command, silence, |line| {
        match serde_json::from_str(line) {
            Ok(Message::Done) => is_done = true,
            Ok(message) => seen(message)?,
            // Of a library that writes to standard output.
            Err(_) => eprintln!("{line}"),
        }
        anyhow::Ok(())
    })
    .context("a child process of gpu-check")?;
    if is_done {
        // A checker around the child reports what it has found so.
        anyhow::ensure!(ended.is_success(), "a child has done its list: {ended}");
        return Ok(None);
    }
    Ok(Some(ended.to_string()))
}
