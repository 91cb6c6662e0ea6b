//! Faults on purpose: executors and guests that are killed at random points, stopped, starved of memory, disk and
//! descriptors, with windows cut short and clocks that jump. The guest is a real llama.cpp program.
//!
//! What must hold each time: nobody hangs, no guest crashes, nothing is left behind, guests beside the fault generate
//! the same tokens as ever, and the next load works.

mod company;
mod guest;
mod holdings;
mod kills;
mod scarcity;
mod stops;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::blocks::Rng;
use crate::cache::Cache;
use crate::demo;
use crate::dist::Dist;
use crate::executor::Executor;
use crate::llama;
use crate::model::{self, Weights};
use crate::progress::Step;
use crate::scratch::Scratch;
use guest::{Guest, Outcome, Program};

/// Tokens of one generation.
const TOKENS: usize = 24;

/// Waits that are longer than this are hangs. Not a measure of speed: the work takes a second or two, on a machine that
/// does nothing else.
const HANG: Duration = Duration::from_secs(120);

/// How often each fault is injected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    /// Executors killed, and guests killed.
    pub(crate) kills: usize,
    /// Every other fault.
    pub(crate) others: usize,
    pub(crate) seed: u64,
}

/// What came of one kind of fault.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) fault: &'static str,
    pub(crate) times: usize,
    /// What the guests that were hit said, and what was found afterwards.
    pub(crate) found: String,
}

/// A kind of fault.
type Fault = fn(&Bench<'_>, &Step) -> Result<Row>;

/// All of them.
pub(crate) const FAULTS: [(&str, Fault); 12] = [
    ("executor killed at random points", kills::executors),
    ("guest killed at random points", kills::guests),
    ("executor and guest stopped for a while", stops::both),
    ("a guest that is slow", stops::slow),
    ("several guests at once", company::together),
    ("a guest at its quota beside another", company::quota),
    ("windows truncated under both", stops::truncated),
    ("clock jumps", stops::clock),
    (
        "guest's memory refused: the host has no more",
        scarcity::memory,
    ),
    ("executor out of address space", scarcity::address_space),
    ("executor out of descriptors", scarcity::descriptors),
    (
        "disk full: sockets' folder, logs, statistics",
        scarcity::disk,
    ),
];

/// What every fault needs.
pub(crate) struct Bench<'a> {
    cache: &'a Cache,
    dist: &'a Dist,
    program: Program,
    counts: Counts,
    /// What the guest generates when nothing goes wrong: with ggml's own CPU backend.
    reference: Vec<u32>,
    scratch: Scratch,
}

impl<'a> Bench<'a> {
    /// Builds the guest program and lets it generate without us.
    pub(crate) fn new(cache: &'a Cache, dist: &'a Dist, counts: Counts) -> Result<Bench<'a>> {
        let bin = llama::build(cache, llama::Stage::Tools)?;
        let vocabulary = llama::source(cache)?.join(demo::VOCABULARY);
        let model = model::ensure(cache, &model::TINY, Weights::F16, &vocabulary, demo::SEED)?;
        let scratch = Scratch::new()?;
        let program = Program::build(cache, &bin, &model, scratch.path())?;
        let mut alone = Guest::start(&program, None, &cache.log("faults-reference"))?;
        alone.begin(TOKENS)?;
        let reference = alone.end()?.tokens().context("ggml's own CPU backend")?;
        alone.finish()?;
        Ok(Bench {
            cache,
            dist,
            program,
            counts,
            reference,
            scratch,
        })
    }

    fn log(&self, name: &str) -> PathBuf {
        self.cache.log(&format!("faults-{name}"))
    }

    fn rng(&self, stream: u64) -> Rng {
        Rng::new(self.counts.seed, stream)
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.scratch.path().join(format!("{name}.sock"))
    }

    /// An executor with one thread: two of them and their guests share the machine with the tests.
    fn serve(&self, name: &str, more: &[&str]) -> Result<Executor> {
        Executor::start_with(
            self.dist,
            &self.socket(name),
            1,
            &self.log(&format!("{name}-vgpu-serve")),
            more,
        )
    }

    /// A guest of the executor of that name, whether it is there or not.
    fn guest(&self, executor: &str, name: &str) -> Result<Guest> {
        let endpoint = format!("unix:{}", self.socket(executor).display());
        Guest::start(&self.program, Some((self.dist, &endpoint)), &self.log(name))
    }

    /// What the guest has begun must end with the tokens of the reference.
    fn expect_tokens(&self, guest: &mut Guest, who: &str) -> Result<()> {
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

    /// A generation from the loading to the last token, as it has to be.
    fn expect_run(&self, guest: &mut Guest, who: &str) -> Result<()> {
        guest.begin(TOKENS)?;
        self.expect_tokens(guest, who)
    }
}

/// A moment between 0 and `most`.
fn moment(rng: &mut Rng, most: Duration) -> Duration {
    Duration::from_nanos(rng.next() % (most.as_nanos() as u64).max(1))
}

/// A file with all that was found, for people.
pub(crate) fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.fault.len()).max().unwrap_or(0);
    rows.iter()
        .map(|row| format!("{:width$}  {:>4}  {}\n", row.fault, row.times, row.found))
        .collect()
}

fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}
