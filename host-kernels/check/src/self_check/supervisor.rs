//! The part of the self-check that has no GPU: starts child processes and collects their findings.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use vgpu_cuda::kernel_set::names;
use vgpu_cuda::verdict::{Finding, Verdict};

use super::message::{CheckOutcome, CheckWork, Message, Request};
use crate::child_process::{self, Ended, Silence};

/// The most children that may end in the middle of a check: two for each kernel, and some.
const MAX_ENDS: usize = 1000;

/// The exit status of a Rust program that has panicked.
const PANICKED: i32 = 101;

/// Why there is no verdict.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum SuperviseError {
    #[error("a process of the self-check does not start: {0}")]
    Start(#[from] io::Error),
    #[error("the self-check has found no device: {0}")]
    NoDevice(Ended),
    #[error("the self-check does not begin: {0}")]
    NoBegin(Ended),
    #[error("the self-check was interrupted: {0}")]
    Interrupted(Ended),
    #[error("{MAX_ENDS} processes of the self-check have ended before it did")]
    TooManyEnds,
}

/// Why a child is ended before its end.
enum Stop {
    /// The time is up.
    Late,
    Start(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        Stop::Start(error)
    }
}

/// What [`supervise`] has found.
#[derive(Debug, Clone, Default)]
pub struct Supervised {
    /// All findings, those from before included.
    pub verdict: Verdict,
    /// The kernels that were checked now.
    pub checked: usize,
    /// The kernels without a finding: the time did not suffice, or something else than the kernel
    /// has failed. The kernels are checked again by the next check.
    pub left: Vec<&'static str>,
    /// Simple kernels, or others that replace one, that gave wrong results where the kernel that
    /// was checked gave right ones.
    pub wrong_fallbacks: BTreeSet<String>,
}

/// A check that is going on.
struct Supervision<F> {
    found: Supervised,
    fingerprint: String,
    /// The kernels that are to be checked, in order.
    rest: Vec<&'static str>,
    /// Those that have failed once.
    suspects: Vec<&'static str>,
    keep: F,
}

impl<F: FnMut(&str, &Verdict)> Supervision<F> {
    fn record(&mut self, kernel: &'static str, finding: Finding) {
        self.rest.retain(|other| *other != kernel);
        self.found.checked += 1;
        self.found.verdict.record(kernel, finding);
        (self.keep)(&self.fingerprint, &self.found.verdict);
    }

    /// A kernel has failed. The second time, it is faulty: a machine short of memory, a device that
    /// others use and a kernel that ran before it can make any kernel fail once.
    fn failed(&mut self, kernel: &'static str, reason: String) {
        match self.suspects.contains(&kernel) {
            true => self.record(kernel, Finding::Faulty(reason)),
            false => self.suspects.push(kernel),
        }
    }

    /// Nothing can be said about a kernel now.
    fn leave(&mut self, kernel: &'static str) {
        self.rest.retain(|other| *other != kernel);
        self.found.left.push(kernel);
    }

    fn ends(&mut self, kernel: &'static str, outcome: CheckOutcome) {
        match outcome {
            CheckOutcome::Found(Finding::Faulty(reason)) => self.failed(kernel, reason),
            CheckOutcome::Found(finding) => self.record(kernel, finding),
            CheckOutcome::Unchecked => self.leave(kernel),
        }
    }
}

/// Where a child is.
#[derive(Default)]
struct Place {
    /// The kernel whose check has begun, and not ended.
    begun: Option<&'static str>,
    /// Whether the fallback of the kernel runs at the moment.
    is_in_fallback: bool,
    /// Whether a check has ended.
    has_ended_one: bool,
}

/// Checks the kernels of a device in child processes, which `command` starts. `before` gives the
/// findings about the device with a fingerprint that are known, and `keep` stores the verdict after
/// each finding. No check begins when `budget` is over. `first` is the silence of a child that
/// compiles kernels before it answers, `silence` that of the others.
///
/// # Errors
/// [`SuperviseError`] if children do not start or find no device, or a signal ends one.
pub fn supervise(
    command: impl Fn(Request<'_>) -> Command,
    (first, silence): (Silence, Silence),
    budget: Duration,
    before: impl FnOnce(&str) -> Verdict,
    keep: impl FnMut(&str, &Verdict),
) -> Result<Supervised, SuperviseError> {
    let (fingerprint, mut kernels) = list(&mut command(Request::List), first)?;
    let verdict = before(&fingerprint);
    kernels.retain(|kernel| verdict.finding(kernel).is_none());
    let mut check = Supervision {
        found: Supervised {
            verdict,
            ..Supervised::default()
        },
        fingerprint,
        rest: kernels,
        suspects: Vec::new(),
        keep,
    };
    let begin = Instant::now();
    let is_late = || begin.elapsed() >= budget;
    for _ in 0..MAX_ENDS {
        if check.rest.is_empty() || is_late() {
            check.found.left.append(&mut check.rest);
            return Ok(check.found);
        }
        let right = names().iter().copied();
        let right: Vec<_> = right
            .filter(|kernel| check.found.verdict.finding(kernel) == Some(&Finding::Right))
            .collect();
        let faulty: Vec<_> = { check.found.verdict.faulty() }
            .map(|(kernel, _)| kernel)
            .collect();
        let (kernels, suspects) = (check.rest.clone(), check.suspects.clone());
        let request = Request::Check(CheckWork {
            kernels: &kernels,
            right: &right,
            faulty: &faulty,
            suspects: &suspects,
        });
        let mut place = Place::default();
        let seen = |line: &str| {
            match Message::parse(line) {
                Some(Message::Begins(kernel)) => {
                    (place.begun, place.is_in_fallback) = (Some(kernel), false);
                }
                Some(Message::Instead(_)) => place.is_in_fallback = true,
                Some(Message::WrongFallback(kernels)) => {
                    check.found.wrong_fallbacks.extend(kernels)
                }
                Some(Message::Ends(kernel, outcome)) => {
                    (place.begun, place.has_ended_one) = (None, true);
                    check.ends(kernel, outcome);
                    if is_late() {
                        return Err(Stop::Late);
                    }
                }
                _ => {}
            }
            Ok(())
        };
        let ended = match child_process::watch(&mut command(request), silence, seen) {
            Ok(ended) => ended,
            Err(Stop::Late) => continue,
            Err(Stop::Start(error)) => return Err(error.into()),
        };
        match (place.begun, cause(&ended)) {
            (_, Cause::Interrupted) => return Err(SuperviseError::Interrupted(ended)),
            (Some(kernel), Cause::Kernel) if !place.is_in_fallback => {
                check.failed(kernel, ended.to_string());
            }
            // A kernel is not faulty because its fallback is, or because the process has
            // failed for want of memory.
            (Some(kernel), _) => check.leave(kernel),
            // A child ends after a finding that has lost the device, and when it has done all.
            (None, _) if place.has_ended_one => {}
            (None, _) => return Err(SuperviseError::NoBegin(ended)),
        }
    }
    Err(SuperviseError::TooManyEnds)
}

/// What has ended a child.
enum Cause {
    /// The kernel that ran, as far as anybody can tell.
    Kernel,
    /// A signal from outside, which asks for an end.
    Interrupted,
    /// The kernel of the operating system, which had no memory, or the child itself, which has
    /// panicked.
    Process,
}

fn cause(ended: &Ended) -> Cause {
    let Ended::Closed(Some(status)) = ended else {
        return Cause::Kernel;
    };
    let signals = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT].map(Signal::as_raw);
    match status.signal() {
        Some(signal) if signals.contains(&signal) => Cause::Interrupted,
        // The supervisor's own kills are `Ended::Silent`.
        Some(signal) if signal == Signal::KILL.as_raw() => Cause::Process,
        None if status.code() == Some(PANICKED) => Cause::Process,
        _ => Cause::Kernel,
    }
}

/// The fingerprint of the device, and the kernels that are to be checked.
///
/// # Errors
/// [`SuperviseError`] if the child does not start or finds no device.
fn list(
    command: &mut Command,
    silence: Silence,
) -> Result<(String, Vec<&'static str>), SuperviseError> {
    let (mut device, mut kernels) = (None, Vec::new());
    let seen = |line: &str| -> Result<(), SuperviseError> {
        match Message::parse(line) {
            Some(Message::Device(fingerprint)) => device = Some(fingerprint),
            Some(Message::Kernel(kernel)) => kernels.push(kernel),
            _ => {}
        }
        Ok(())
    };
    let ended = child_process::watch(command, silence, seen)?;
    match (device, cause(&ended)) {
        (_, Cause::Interrupted) => Err(SuperviseError::Interrupted(ended)),
        (Some(fingerprint), _) if ended.is_success() => Ok((fingerprint, kernels)),
        _ => Err(SuperviseError::NoDevice(ended)),
    }
}

#[cfg(test)]
mod tests {
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn causes_of_an_end() {
        let of_signal = |signal: Signal| {
            let status = ExitStatus::from_raw(signal.as_raw());
            cause(&Ended::Closed(Some(status)))
        };
        for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
            assert!(
                matches!(of_signal(signal), Cause::Interrupted),
                "{signal:?}"
            );
        }
        for signal in [Signal::SEGV, Signal::ABORT, Signal::BUS, Signal::ILL] {
            assert!(matches!(of_signal(signal), Cause::Kernel), "{signal:?}");
        }
        assert!(matches!(of_signal(Signal::KILL), Cause::Process));
        let of_status = |status| cause(&Ended::Closed(Some(ExitStatus::from_raw(status << 8))));
        assert!(matches!(of_status(PANICKED), Cause::Process));
        assert!(matches!(of_status(1), Cause::Kernel));
        let silent = Ended::Silent(Duration::from_secs(10));
        assert!(matches!(cause(&silent), Cause::Kernel));
    }
}
