//! Tries engines in processes of their own: a driver or a backend library that ends its process, or
//! that hangs at its start, ends or hangs nothing else.

use std::io::{Write as _, stdout};
use std::process::Command;
use std::time::Duration;

use clap::Parser;
#[cfg(feature = "cuda")]
use vgpu_executor::engine::AddressError;
use vgpu_executor::engine::{
    self, EngineKind, EngineList, ProbeError, ProbedDevice, ProbedKind, Selection, StartError,
};
use vgpu_executor::service;

use crate::own_program::OWN_PROGRAM;
use crate::watched_process::{self, Watched};

/// The time that a backend library of ggml has to list its devices.
const TIME_OF_GGML: Duration = Duration::from_secs(30);

/// The time that the CUDA engine has to start. All kernels may be compiled the first time. The
/// units in deploy/host allow twice as much, since the engine starts once more if it is chosen.
const TIME_OF_CUDA: Duration = Duration::from_secs(900);

/// What begins the line with the answer: libraries may print, too.
const ANSWER: &str = "vgpu-probe:";

/// The devices of an engine, or why it cannot be used.
type Answer = Result<Vec<ProbedDevice>, ProbeError>;

/// What the process prints: the devices, or what the engine says of itself.
type Printed = Result<Vec<ProbedDevice>, String>;

/// The time that the driver has to list the GPUs, or to say where one is. A GPU that nobody uses
/// takes some seconds.
const TIME_OF_DRIVER: Duration = Duration::from_secs(60);

/// Starts an engine, prints what devices it has, and ends.
#[derive(Parser)]
pub(crate) struct Args {
    engine: EngineKind,
    /// Start nothing, and print the PCI address of the GPU of the CUDA engine as a device's name
    #[arg(long)]
    address: bool,
}

/// The process that tries an engine.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    // A library that hangs must not outlive the executor.
    let signal = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(signal)?;
    let probed = match (&args.engine, args.address) {
        (EngineKind::Cuda(ordinal), true) => engine::gpu_address(*ordinal).map(|name| {
            vec![ProbedDevice {
                name,
                description: String::new(),
                kind: ProbedKind::Gpu,
            }]
        }),
        (kind, _) => engine::probe(kind),
    };
    let answer: Printed = probed.map_err(|error| ProbeError::from(error).to_string());
    let mut out = stdout().lock();
    writeln!(out, "\n{ANSWER}{}", serde_json::to_string(&answer)?)?;
    out.flush()?;
    Ok(())
}

/// Chooses the engines for `wanted`, as [`engine::select`], with a process for each engine that is
/// tried.
pub(crate) fn select(
    wanted: &EngineList,
    guests_may_end_it: bool,
) -> Result<Selection, StartError> {
    engine::select(wanted, guests_may_end_it, &|kind| probe(kind))
}

/// The PCI address of a GPU of the CUDA engine, from a process of its own: for a supervisor, which
/// starts no CUDA.
///
/// # Errors
/// The process has no answer, or the driver names no GPU.
#[cfg(feature = "cuda")]
pub(crate) fn gpu_address(kind: &EngineKind) -> Result<String, AddressError> {
    let mut command = Command::new(OWN_PROGRAM);
    command.args(["probe-engine", &kind.to_string(), "--address"]);
    let devices = answer_of(&mut command, TIME_OF_DRIVER)?;
    let first = devices.into_iter().next();
    first.map(|device| device.name).ok_or(AddressError::NoGpu)
}

fn probe(kind: &EngineKind) -> Answer {
    let mut command = Command::new(OWN_PROGRAM);
    command.arg("probe-engine").arg(kind.to_string());
    let time = match kind {
        EngineKind::Ggml(_) | EngineKind::AllGgml(_) => TIME_OF_GGML,
        EngineKind::AllCuda => TIME_OF_DRIVER,
        _ => TIME_OF_CUDA,
    };
    service::extend_start(time);
    answer_of(&mut command, time)
}

/// What a process answers within `time`.
fn answer_of(command: &mut Command, time: Duration) -> Answer {
    let err = watched_process::output_file()?;
    command.stderr(err.try_clone()?);
    match watched_process::watch(command, time, parse)? {
        Watched::Answered(answer) => answer,
        Watched::Ended(status, _) => Err(ProbeError::Ended {
            status,
            last_line: last_line(&watched_process::text_of(&err)),
        }),
        Watched::Late => Err(ProbeError::Late { limit: time }),
    }
}

/// The answer in what a process has printed. `None`: there is none yet.
fn parse(text: &str) -> Option<Answer> {
    let (_, rest) = text.rsplit_once(&format!("\n{ANSWER}"))?;
    // Up to the end of the line, without which the answer is not complete.
    let (line, _) = rest.split_once('\n')?;
    Some(match serde_json::from_str::<Printed>(line) {
        Ok(answer) => answer.map_err(ProbeError::Refused),
        Err(error) => Err(ProbeError::Answer {
            line: line.to_owned(),
            error: error.to_string(),
        }),
    })
}

/// The last line of a log, for an error.
fn last_line(log: &str) -> String {
    let mut lines = log.lines().map(str::trim);
    let last = lines.rfind(|line| !line.is_empty());
    last.unwrap_or("none").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, time: Duration) -> Answer {
        answer_of(Command::new("sh").args(["-c", script]), time)
    }

    #[test]
    fn a_process_answers_whatever_else_it_prints_and_however_it_ends() {
        let long = Duration::from_secs(60);
        let answer = shell(
            "printf 'found 1 devices:'; printf '\\nvgpu-probe:{\"Ok\":[]}\\nbye'; kill -ABRT $$",
            long,
        );
        assert_eq!(answer.expect("devices"), Vec::new());
        // A process that hangs after its answer is not waited for.
        let answer = shell(
            "printf '\\nvgpu-probe:{\"Err\":\"no driver\"}\\n'; exec sleep 1000",
            long,
        );
        let refused = answer.expect_err("no devices");
        assert!(matches!(&refused, ProbeError::Refused(reason) if reason == "no driver"));
    }

    #[test]
    fn a_process_that_crashes_or_hangs_is_refused() {
        let long = Duration::from_secs(60);
        let reason = shell("echo 'GGML_ASSERT(false) failed' >&2; kill -ABRT $$", long);
        let reason = reason.expect_err("it has crashed").to_string();
        assert!(reason.contains("signal: 6"), "{reason}");
        assert!(reason.contains("GGML_ASSERT(false) failed"), "{reason}");
        let reason = shell("exec sleep 1000", Duration::from_millis(200));
        let reason = reason.expect_err("it is late").to_string();
        assert_eq!(reason, "the engine does not start within 0.2 s");
        let reason = answer_of(&mut Command::new("/nonexistent"), long);
        let reason = reason.expect_err("there is no such program").to_string();
        assert!(reason.contains("cannot be tried"), "{reason}");
    }
}
