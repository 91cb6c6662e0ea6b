//! The environment that all faults share.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::event::Chosen;
use super::guest::{Guest, Outcome, Program};
use vgpu_gguf::Rng;
use xtask_common::cache::{Cache, Lock};
use xtask_common::dist::Dist;
use xtask_common::executor::{self, Executor};
use xtask_common::llama;
use xtask_common::model::{self, FileType};
use xtask_common::scratch::Scratch;

/// Tokens of one generation.
pub(super) const TOKENS: usize = 24;

/// How often each fault is injected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    /// Executors killed, and guests killed.
    pub(crate) kills: usize,
    /// Every other fault.
    pub(crate) others: usize,
    /// Random events, one after the other.
    pub(crate) events: usize,
    /// The kinds of random events that may happen.
    pub(crate) chosen: Chosen,
    /// Whether no random event ends the executor.
    pub(crate) keeps_executor: bool,
    /// Whether the programs of the random events share weights.
    pub(crate) shares_weights: bool,
    /// The time after which no further random event happens.
    pub(crate) time: Option<Duration>,
    pub(crate) seed: u64,
}

/// The result of one kind of fault.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) fault: &'static str,
    pub(crate) times: usize,
    /// The outcome in the affected guests, and the state afterwards.
    pub(crate) found: String,
}

/// The environment of every fault.
pub(crate) struct Setup<'a> {
    pub(super) cache: &'a Cache,
    pub(super) dist: &'a Dist,
    pub(super) program: Program,
    pub(super) counts: Counts,
    /// The tokens that the guest generates without faults, with ggml's own CPU backend.
    pub(super) reference: Vec<u32>,
    pub(super) scratch: Scratch,
    /// Two runs with one folder would write over each other's logs.
    _logs: Lock,
}

/// How the names of all logs begin.
const LOGS: &str = "faults-";

impl<'a> Setup<'a> {
    /// Builds the guest program and generates the reference without the plugin.
    pub(crate) fn new(cache: &'a Cache, dist: &'a Dist, counts: Counts) -> Result<Setup<'a>> {
        let bin = llama::build(cache, llama::Stage::Tools)?;
        let model = model::ensure(cache, &model::TINY, FileType::F16)?;
        let scratch = Scratch::new()?;
        let logs = cache.reserve_logs(LOGS)?;
        let program = Program::build(cache, &bin, &model, scratch.path())?;
        let mut alone = Guest::start(&program, None, &cache.log(&format!("{LOGS}reference")))?;
        alone.begin(TOKENS)?;
        let reference = alone.end()?.tokens().context("ggml's own CPU backend")?;
        alone.finish()?;
        Ok(Setup {
            cache,
            dist,
            program,
            counts,
            reference,
            scratch,
            _logs: logs,
        })
    }

    pub(super) fn log(&self, name: &str) -> PathBuf {
        self.cache.log(&format!("{LOGS}{name}"))
    }

    pub(super) fn rng(&self, stream: u64) -> Rng {
        Rng::new(self.counts.seed, stream)
    }

    pub(super) fn socket(&self, name: &str) -> PathBuf {
        self.scratch.path().join(format!("{name}.sock"))
    }

    /// An executor with one thread, since executors, guests and tests share the machine.
    pub(super) fn serve(&self, name: &str, more: &[&str]) -> Result<Executor> {
        self.serve_command(&mut Command::new(&self.dist.vgpu), name, more)
    }

    /// [`Setup::serve`] with a command whose environment the caller has changed.
    pub(super) fn serve_command(
        &self,
        command: &mut Command,
        name: &str,
        more: &[&str],
    ) -> Result<Executor> {
        Executor::start_command(
            command,
            &self.socket(name),
            1,
            &self.log(&format!("{name}-vgpu-serve")),
            &[more, executor::inspected()].concat(),
        )
    }

    /// A guest of the executor `executor`, which need not run.
    pub(super) fn guest(&self, executor: &str, name: &str) -> Result<Guest> {
        let endpoint = format!("unix:{}", self.socket(executor).display());
        Guest::start(&self.program, Some((self.dist, &endpoint)), &self.log(name))
    }

    /// Waits for the end of a generation, which must have the tokens of the reference.
    pub(super) fn expect_tokens(&self, guest: &mut Guest, who: &str) -> Result<()> {
        match guest.end().with_context(|| who.to_owned())? {
            Outcome::Tokens(tokens) => ensure!(
                tokens == self.reference,
                "{who} generated {tokens:?} instead of {:?}",
                self.reference
            ),
            Outcome::Failed(why) => anyhow::bail!("{who} failed: {why}"),
        }
        Ok(())
    }

    /// Loads the model and generates, which must result in the tokens of the reference.
    pub(super) fn expect_run(&self, guest: &mut Guest, who: &str) -> Result<()> {
        guest.begin(TOKENS)?;
        self.expect_tokens(guest, who)
    }
}

/// A moment between 0 and `most`.
pub(super) fn moment(rng: &mut Rng, most: Duration) -> Duration {
    Duration::from_nanos(rng.next_u64() % (most.as_nanos() as u64).max(1))
}

pub(super) fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}
