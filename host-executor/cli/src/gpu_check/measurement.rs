//! What `vgpu gpu-check` runs, for its own process and for its children.

use std::time::Duration;

use anyhow::Context as _;
use regex::Regex;
use vgpu_executor::engine::EngineKind;
use vgpu_executor::size;

/// What is checked, and how extensively.
#[derive(clap::Args)]
pub(super) struct Measurement {
    /// The engine to check, as for `vgpu serve`
    #[arg(long, value_name = "ENGINE", default_value = "cuda")]
    pub(super) engine: EngineKind,

    /// Only cases, texts and rates whose names match this regular expression
    #[arg(long, value_name = "REGEX")]
    pub(super) only: Option<String>,

    /// Bytes of weights for the measurements: several times the device's cache
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "512M")]
    weights: u64,

    /// Rows and columns of the weights; a multiple of 256
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub(super) size: u64,

    /// Duration of each measurement in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 200)]
    time: u64,

    /// Time for all measurements in seconds; the least important ones are left out
    #[arg(long, value_name = "S")]
    budget: Option<u64>,

    /// Tokens of each text that both engines generate; 0: no texts
    #[arg(long, value_name = "N", default_value_t = 48)]
    pub(super) tokens: u64,

    /// Seconds after which a case, a text or a rate that does not end is ended and noted
    #[arg(long, value_name = "S", default_value_t = 10)]
    pub(super) silence: u64,
}

impl Measurement {
    /// The pattern of names.
    pub(super) fn pattern(&self) -> anyhow::Result<Option<Regex>> {
        let only = self.only.as_deref().map(Regex::new);
        only.transpose().context("--only is no regular expression")
    }

    pub(super) fn options(&self) -> vgpu_check::Options {
        vgpu_check::Options {
            weights: self.weights,
            size: self.size,
            time: Duration::from_millis(self.time),
            budget: self.budget(),
        }
    }

    /// The time for all measurements.
    pub(super) fn budget(&self) -> Option<Duration> {
        self.budget.map(Duration::from_secs)
    }

    /// The time after which a child that says nothing is ended: a rate is measured for `--time`,
    /// and copies three times as long, before anything is said.
    pub(super) fn silence(&self) -> Duration {
        Duration::from_secs(self.silence) + 4 * Duration::from_millis(self.time)
    }

    /// The same as arguments of a process, which has `left` of the budget.
    pub(super) fn args(&self, left: Option<Duration>) -> Vec<String> {
        let mut args = vec![
            format!("--engine={}", self.engine),
            format!("--weights={}", self.weights),
            format!("--size={}", self.size),
            format!("--time={}", self.time),
            format!("--tokens={}", self.tokens),
            format!("--silence={}", self.silence),
        ];
        args.extend(self.only.as_ref().map(|only| format!("--only={only}")));
        args.extend(left.map(|left| format!("--budget={}", left.as_secs())));
        args
    }
}
