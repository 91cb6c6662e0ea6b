//! Faults that the environment asks for.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_int;
use std::fs::File;
use std::io::Write as _;
use std::sync::{Mutex, MutexGuard};

use crate::codes::{Code, code_named};
use crate::lock::lock;
use crate::nvml_codes as nvml;

/// The name under which every launch counts, besides that of its kernel.
const LAUNCH: &str = "launch";

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The call, or the kernel, fails with this code.
    Code(Code),
    /// The call of NVML fails with this code.
    Nvml(c_int),
    /// It never ends.
    Hang,
    /// It does nothing.
    Nothing,
    /// It ends the process.
    Abort,
}

/// Why a part of a text, as the environment or a test gives it, is no fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FaultError {
    #[error("{part}: not name:nth:fault")]
    Fields { part: String },
    #[error("{part}: {nth} is neither the number of a call nor *")]
    Number { part: String, nth: String },
    #[error("{part}: {fault} is neither hang, nothing, abort, illegal nor a code of the driver")]
    Fault { part: String, fault: String },
}

/// A fault of one call.
#[derive(Debug)]
struct Planned {
    /// An entry point, without `_v2`, or a kernel, or [`LAUNCH`].
    name: String,
    /// The number of the call, from 1. None: every call.
    nth: Option<u64>,
    fault: Fault,
}

impl Planned {
    /// The fault `name:nth:fault`.
    ///
    /// # Errors
    /// [`FaultError`], for the part of a text that has no such form.
    fn parse(part: &str) -> Result<Planned, FaultError> {
        let fields: Vec<&str> = part.split(':').collect();
        let [name, nth, fault] = fields[..] else {
            return Err(FaultError::Fields { part: part.into() });
        };
        let no_number = |_| FaultError::Number {
            part: part.into(),
            nth: nth.into(),
        };
        let no_fault = || FaultError::Fault {
            part: part.into(),
            fault: fault.into(),
        };
        Ok(Planned {
            name: plain(name).into(),
            nth: match nth {
                "*" => None,
                nth => Some(nth.parse().map_err(no_number)?),
            },
            fault: match fault {
                "hang" => Fault::Hang,
                "nothing" => Fault::Nothing,
                "abort" => Fault::Abort,
                "illegal" => Fault::Code(Code::CUDA_ERROR_ILLEGAL_ADDRESS),
                code if name.starts_with(nvml::PREFIX) => {
                    Fault::Nvml(nvml::code_named(code).ok_or_else(no_fault)?)
                }
                code => Fault::Code(code_named(code).ok_or_else(no_fault)?),
            },
        })
    }
}

/// The faults, and how often each name was called.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    trace: Option<Mutex<File>>,
    state: Mutex<PlannedFaults>,
}

#[derive(Debug, Default)]
struct PlannedFaults {
    planned: Vec<Planned>,
    calls: HashMap<String, u64>,
}

/// Without the version of the interface, which callers do not write.
fn plain(name: &str) -> &str {
    let name = name.strip_suffix("_v2").unwrap_or(name);
    name.strip_suffix("_v3").unwrap_or(name)
}

impl Faults {
    /// The faults `name:nth:fault`, separated by commas. `nth` may be `*`. The first call of each
    /// name is a line in the file `trace`.
    ///
    /// # Errors
    /// The first part that is none.
    pub(crate) fn parse(text: &str, trace: Option<File>) -> Result<Faults, FaultError> {
        let faults = Faults {
            trace: trace.map(Mutex::new),
            state: Mutex::default(),
        };
        faults.set(text)?;
        Ok(faults)
    }

    /// Sets other faults, and counts calls anew.
    ///
    /// # Errors
    /// As for [`Faults::parse`].
    pub(crate) fn set(&self, text: &str) -> Result<(), FaultError> {
        let parts = text.split(',').map(str::trim);
        let planned = parts.filter(|part| !part.is_empty()).map(Planned::parse);
        *self.state() = PlannedFaults {
            planned: planned.collect::<Result<_, _>>()?,
            calls: HashMap::new(),
        };
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, PlannedFaults> {
        lock(&self.state)
    }

    /// Counts a call of an entry point, and returns its fault.
    pub(crate) fn of_call(&self, name: &str) -> Option<Fault> {
        self.count(plain(name))
    }

    /// Counts a launch of a kernel, and returns its fault.
    pub(crate) fn of_launch(&self, kernel: &str) -> Option<Fault> {
        let (of_kernel, of_any) = (self.count(kernel), self.count(LAUNCH));
        of_kernel.or(of_any)
    }

    fn count(&self, name: &str) -> Option<Fault> {
        let mut state = self.state();
        if state.planned.is_empty() && self.trace.is_none() {
            return None;
        }
        let number = state.calls.entry(name.to_owned()).or_default();
        *number += 1;
        let number = *number;
        if let (Some(trace), 1) = (&self.trace, number) {
            let mut trace = lock(trace);
            // A trace that cannot be written lacks lines, which its reader sees.
            let _ = writeln!(trace, "{name}");
        }
        let is_here =
            |it: &&Planned| it.name == name && it.nth.is_none_or(|planned| planned == number);
        state.planned.iter().find(is_here).map(|it| it.fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_happen_at_their_call() {
        let text = "cuMemAlloc_v2:2:OUT_OF_MEMORY, vg_rope:1:hang,launch:*:illegal";
        let faults = Faults::parse(text, None).expect("faults");
        let no_memory = Some(Fault::Code(Code::CUDA_ERROR_OUT_OF_MEMORY));
        let calls = [1, 2, 3].map(|_| faults.of_call("cuMemAlloc_v2"));
        assert_eq!(calls, [None, no_memory, None]);
        let of_nvml = Faults::parse("nvmlInit_v2:*:LIB_RM_VERSION_MISMATCH", None);
        let mismatch = of_nvml.expect("a fault").of_call("nvmlInit_v2");
        assert_eq!(mismatch, Some(Fault::Nvml(18)));
        let illegal = Some(Fault::Code(Code::CUDA_ERROR_ILLEGAL_ADDRESS));
        assert_eq!(faults.of_launch("vg_rope"), Some(Fault::Hang));
        assert_eq!(faults.of_launch("vg_rope"), illegal);
        for (wrong, reason) in [
            ("cuInit", "cuInit: not name:nth:fault"),
            ("cuInit:x:hang", "cuInit:x:hang: x is neither the number"),
            ("cuInit:1:", "cuInit:1::  is neither hang"),
            (
                "nvmlInit:1:OUT_OF_MEMORY",
                "nvmlInit:1:OUT_OF_MEMORY: OUT_OF",
            ),
            ("cuInit:1:1000000", "cuInit:1:1000000: 1000000 is neither"),
        ] {
            let error = Faults::parse(wrong, None).expect_err(wrong).to_string();
            assert!(error.starts_with(reason), "{error}");
        }
    }
}
