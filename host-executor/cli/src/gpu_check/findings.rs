//! Findings about a GPU, as the child processes report them and as `check.json` keeps them.

use serde::{Deserialize, Serialize};
use vgpu_check::{Case, Ceilings, Decoding, Outcome, Rate, Work};
use vgpu_engine::Engine;

/// How the names of cuBLASLt's rates begin.
const CUBLAS: &str = "cuBLASLt";

/// The unit of a rate in bytes.
const BYTES: &str = "bytes/s";

/// The engine that is checked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CheckedDevice {
    pub(super) engine: String,
    pub(super) description: String,
    /// Bytes of device memory in all, and free at the start.
    pub(super) memory: u64,
    pub(super) free: u64,
    /// The families of kernels for this GPU alone.
    pub(super) families: Vec<String>,
}

impl CheckedDevice {
    pub(super) fn of(engine: &dyn Engine) -> CheckedDevice {
        let memory = engine.memory();
        CheckedDevice {
            engine: engine.name().to_owned(),
            description: engine.description().to_owned(),
            memory: memory.total,
            free: memory.free,
            families: { engine.kernel_families().iter() }
                .map(|&family| family.to_owned())
                .collect(),
        }
    }
}

/// A case that ran on both engines, or the reason why it did not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CaseFinding {
    pub(super) name: String,
    pub(super) right: bool,
    /// Normalised mean square error, and its limit. JSON has no NaN: an error that is not a number
    /// is `null`.
    pub(super) error: Option<f64>,
    pub(super) limit: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failed: Option<String>,
    pub(super) kernels: Vec<String>,
}

impl CaseFinding {
    pub(super) fn of(case: &Case) -> CaseFinding {
        let (error, limit, failed) = match &case.outcome {
            Outcome::Compared { error, limit } => (Some(*error), Some(*limit), None),
            Outcome::Failed(reason) => (None, None, Some(reason.to_string())),
        };
        CaseFinding {
            name: case.name.clone(),
            right: case.is_right(),
            error,
            limit,
            failed,
            kernels: owned(&case.kernels),
        }
    }

    /// A case in which the child process ended.
    pub(super) fn ended(begun: &BegunEntry, reason: String) -> CaseFinding {
        CaseFinding {
            name: begun.name.clone(),
            right: false,
            error: None,
            limit: None,
            failed: Some(reason),
            kernels: begun.kernels.clone(),
        }
    }

    /// The outcome in words.
    pub(super) fn outcome(&self) -> String {
        match (&self.failed, self.limit) {
            (Some(reason), _) => reason.clone(),
            (None, limit) => {
                let error = self.error.unwrap_or(f64::NAN);
                format!(
                    "off by {error:.1e}, allowed {:.1e}",
                    limit.unwrap_or_default()
                )
            }
        }
    }
}

/// A text of a small model, or the reason why there is none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TextFinding {
    pub(super) name: String,
    pub(super) tokens: Option<u64>,
    pub(super) same: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failed: Option<String>,
}

impl TextFinding {
    pub(super) fn of(text: &Decoding) -> TextFinding {
        let counts = text.outcome.as_ref().ok();
        TextFinding {
            name: text.name.clone(),
            tokens: counts.map(|(all, _)| *all),
            same: counts.map(|(_, same)| *same),
            failed: text.outcome.as_ref().err().map(ToString::to_string),
        }
    }

    /// A text in which the child process ended.
    pub(super) fn ended(begun: &BegunEntry, reason: String) -> TextFinding {
        TextFinding {
            name: begun.name.clone(),
            tokens: None,
            same: None,
            failed: Some(reason),
        }
    }

    pub(super) fn is_same(&self) -> bool {
        self.tokens.is_some() && self.tokens == self.same
    }

    pub(super) fn line(&self) -> String {
        let name = &self.name;
        match (self.tokens, self.same) {
            (Some(all), Some(same)) => {
                format!("{name}: {same} of {all} tokens are the CPU engine's")
            }
            _ => format!(
                "WRONG  {name}: {}",
                self.failed.as_deref().unwrap_or_default()
            ),
        }
    }
}

/// Rates of copies in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Copies {
    pub(super) within: f64,
    pub(super) upload: f64,
    pub(super) download: f64,
}

impl From<Ceilings> for Copies {
    fn from(measured: Ceilings) -> Copies {
        let Ceilings {
            within,
            upload,
            download,
        } = measured;
        Copies {
            within,
            upload,
            download,
        }
    }
}

/// A measured rate, or the reason why there is none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct RateFinding {
    pub(super) name: String,
    pub(super) unit: String,
    pub(super) rate: Option<f64>,
    pub(super) seconds: f64,
    /// Whether the engine was measured, and not cuBLASLt.
    pub(super) ours: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failed: Option<String>,
    pub(super) kernels: Vec<String>,
}

impl RateFinding {
    pub(super) fn of(rate: &Rate) -> RateFinding {
        RateFinding {
            name: rate.name.clone(),
            unit: match rate.work {
                Work::Bytes => BYTES.into(),
                Work::Operations => "FLOPS".into(),
            },
            rate: rate.rate.as_ref().ok().copied(),
            seconds: rate.seconds,
            ours: rate.is_ours,
            failed: rate.rate.as_ref().err().map(ToString::to_string),
            kernels: owned(&rate.kernels),
        }
    }

    /// A measurement in which the child process ended.
    pub(super) fn ended(begun: &BegunEntry, reason: String) -> RateFinding {
        RateFinding {
            name: begun.name.clone(),
            unit: BYTES.into(),
            rate: None,
            seconds: 0.0,
            ours: !begun.name.starts_with(CUBLAS),
            failed: Some(reason),
            kernels: Vec::new(),
        }
    }

    /// A line of the table; bytes also in percent of what a copy reaches.
    pub(super) fn line(&self, copies: Option<Copies>) -> String {
        let value = match (self.rate, &self.failed) {
            (Some(rate), _) if self.unit == BYTES => {
                let percent = copies.map_or(0.0, |copies| 100.0 * rate / copies.within);
                format!("{:>14} {percent:5.0} %", gigabytes(rate))
            }
            (Some(rate), _) => format!("{:>11.2} TFLOPS", rate / 1e12),
            (None, Some(reason)) if self.ours => format!("FAILED: {reason}"),
            (None, reason) => reason.clone().unwrap_or_default(),
        };
        let kernels = self.kernels.join(" ");
        let seconds = self.seconds * 1e6;
        format!("{:36} {value}  {seconds:9.1} us  {kernels}", self.name)
    }
}

pub(super) fn gigabytes(rate: f64) -> String {
    format!("{:.1} GB/s", rate / 1e9)
}

fn owned(names: &[&'static str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// An entry that has begun.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct BegunEntry {
    pub(super) name: String,
    /// The kernels, once the graph is compiled.
    pub(super) kernels: Vec<String>,
}

/// One line of a child's output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message {
    /// The engine has started.
    Device(CheckedDevice),
    /// An entry begins.
    Begins {
        index: usize,
        name: String,
    },
    /// The entry's graph is compiled and runs.
    Runs {
        kernels: Vec<String>,
    },
    /// The entry has ended.
    Case(CaseFinding),
    Text(TextFinding),
    Copies(Copies),
    Rate(RateFinding),
    /// The time limit has left out this number of rates.
    LeftOut(usize),
    /// The list is done.
    Done,
}
