//! The part of the self-check that has no GPU: starts child processes and collects their findings.

use std::io;
use std::process::Command;
use std::time::{Duration, Instant};

use vgpu_cuda::kernel_set::names;
use vgpu_cuda::verdict::{Finding, Verdict};

use super::child::Message;
use crate::child_process::{self, Ended, Silence};

/// The most children that may end in the middle of a check.
const MAX_ENDS: usize = 100;

/// What a child process is to do.
#[derive(Debug, Clone, Copy)]
pub enum Request<'a> {
    /// To say the fingerprint of the device and the kernels that are to be checked.
    List,
    /// To check kernels, without those that are faulty.
    Check {
        /// The kernels, in order.
        kernels: &'a [String],
        /// The kernels that must not run.
        faulty: &'a [String],
    },
}

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
    /// The kernels that the time did not suffice for.
    pub left: usize,
}

impl Supervised {
    fn add(&mut self, kernel: &'static str, finding: Finding) {
        self.checked += 1;
        self.verdict.record(kernel, finding);
    }
}

/// Where a child is.
#[derive(Default)]
struct Place {
    /// The kernel whose check has begun, and not ended.
    begun: Option<String>,
    /// Whether the kernels behind it run at the moment.
    is_behind: bool,
    /// The kernels whose checks have ended.
    done: Vec<String>,
    /// Whether the child has done all.
    is_done: bool,
}

/// Checks the kernels of a device in child processes, which `command` starts. `before` gives the
/// findings about the device with a fingerprint that are known, and `keep` stores the verdict after
/// each finding. No check begins when `budget` is over.
///
/// # Errors
/// [`SuperviseError`] if children do not start or find no device.
pub fn supervise(
    command: impl Fn(Request<'_>) -> Command,
    silence: Silence,
    budget: Duration,
    before: impl FnOnce(&str) -> Verdict,
    mut keep: impl FnMut(&str, &Verdict),
) -> Result<Supervised, SuperviseError> {
    let (fingerprint, mut kernels) = list(&mut command(Request::List), silence)?;
    let mut found = Supervised {
        verdict: before(&fingerprint),
        ..Supervised::default()
    };
    kernels.retain(|kernel| found.verdict.finding(kernel).is_none());
    let begin = Instant::now();
    for _ in 0..MAX_ENDS {
        found.left = kernels.len();
        if kernels.is_empty() || begin.elapsed() >= budget {
            return Ok(found);
        }
        let faulty: Vec<String> = { found.verdict.faulty() }
            .map(|(kernel, _)| kernel.to_owned())
            .collect();
        let request = Request::Check {
            kernels: &kernels,
            faulty: &faulty,
        };
        let mut place = Place::default();
        let seen = |line: &str| {
            match Message::parse(line) {
                Some(Message::Begins(kernel)) => {
                    (place.begun, place.is_behind) = (Some(kernel), false);
                }
                Some(Message::Instead(_)) => place.is_behind = true,
                Some(Message::Ends(kernel, finding)) => {
                    place.begun = None;
                    place.done.push(kernel.to_owned());
                    found.add(kernel, finding);
                    keep(&fingerprint, &found.verdict);
                    if begin.elapsed() >= budget {
                        return Err(Stop::Late);
                    }
                }
                Some(Message::Done) => place.is_done = true,
                _ => {}
            }
            Ok(())
        };
        let ended = child_process::watch(&mut command(request), silence, seen);
        kernels.retain(|kernel| !place.done.contains(kernel));
        let ended = match ended {
            Ok(ended) => ended,
            Err(Stop::Late) => continue,
            Err(Stop::Start(error)) => return Err(error.into()),
        };
        let begun = place.begun.as_deref();
        let begun = begun.and_then(|kernel| names().iter().find(|name| **name == kernel));
        match begun {
            Some(&kernel) => {
                kernels.retain(|other| other != kernel);
                // A kernel is not faulty because the one behind it is.
                let finding = match place.is_behind {
                    true => Finding::Unchecked,
                    false => Finding::Faulty(ended.to_string()),
                };
                found.add(kernel, finding);
                keep(&fingerprint, &found.verdict);
            }
            // A child ends after a finding that has lost the device.
            None if place.is_done || !place.done.is_empty() => {}
            None => return Err(SuperviseError::NoBegin(ended)),
        }
    }
    Err(SuperviseError::TooManyEnds)
}

/// The fingerprint of the device, and the kernels that are to be checked.
///
/// # Errors
/// [`SuperviseError`] if the child does not start or finds no device.
fn list(command: &mut Command, silence: Silence) -> Result<(String, Vec<String>), SuperviseError> {
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
    match device.filter(|_| ended.is_success()) {
        Some(fingerprint) => Ok((fingerprint, kernels)),
        None => Err(SuperviseError::NoDevice(ended)),
    }
}
