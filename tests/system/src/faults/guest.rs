//! The guest: `tests/programs/retrying_guest.c`, on llama.cpp.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;

use xtask_common::cache::Cache;
use xtask_common::dist::Dist;
use xtask_common::llama;
use xtask_common::node_llama::{self, Backend};
use xtask_common::process::{self, Dialogue};
use xtask_common::workspace;

/// Longer waits are hangs. The work takes one or two seconds on an idle machine.
pub(super) const HANG: Duration = Duration::from_secs(120);

/// The compiled program and its inputs.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) path: PathBuf,
    pub(super) bin: PathBuf,
    pub(super) model: PathBuf,
    /// The command that starts it: none, or one that enters a virtual machine.
    pub(super) enter: Vec<String>,
    /// A library for `LD_PRELOAD`.
    pub(super) preload: Option<PathBuf>,
    /// How many ids each session has (`VGPU_IDS_LEFT`).
    pub(super) ids_left: Option<u64>,
    pub(super) stats: PathBuf,
}

impl Program {
    /// Compiles the program into `folder`, with the libraries in `bin`.
    pub(crate) fn build(cache: &Cache, bin: &Path, model: &Path, folder: &Path) -> Result<Program> {
        let source = llama::source(cache)?;
        let path = folder.join("retrying_guest");
        let mut cc = Command::new("cc");
        cc.args(["-Wall", "-Wextra", "-Werror", "-O1"])
            .arg(format!("-I{}", source.join("include").display()))
            .arg(format!("-I{}", source.join("ggml/include").display()))
            .arg(workspace::root().join("tests/programs/retrying_guest.c"))
            .arg(format!("-L{}", bin.display()))
            .args(["-lllama", "-lggml", "-lggml-base"])
            .arg(format!("-Wl,-rpath,{}", bin.display()))
            .arg("-o")
            .arg(&path);
        process::output(&mut cc)?;
        Ok(Program {
            path,
            bin: bin.to_owned(),
            model: model.to_owned(),
            enter: Vec::new(),
            preload: None,
            ids_left: None,
            stats: folder.join("stats.json"),
        })
    }
}

/// How a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Tokens(Vec<u32>),
    Failed(String),
}

/// What a guest says while it generates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// There is a further token.
    Token,
    End(Outcome),
}

impl Outcome {
    pub(super) fn tokens(self) -> Result<Vec<u32>> {
        match self {
            Outcome::Tokens(tokens) => Ok(tokens),
            Outcome::Failed(why) => bail!("the guest failed: {why}"),
        }
    }
}

/// A running guest; killed on drop.
#[derive(Debug)]
pub(super) struct Guest {
    dialogue: Dialogue,
}

impl Guest {
    /// Starts a guest: with the plugin and the endpoint of an executor, or with neither.
    pub(super) fn start(
        program: &Program,
        plugin: Option<(&Dist, &str)>,
        log: &Path,
    ) -> Result<Guest> {
        let mut command = match program.enter.split_first() {
            None => Command::new(&program.path),
            Some((first, more)) => {
                let mut command = Command::new(first);
                command.args(more).arg(&program.path);
                command
            }
        };
        command.arg(&program.bin).arg(&program.model);
        let backend = match plugin {
            Some((dist, endpoint)) => Backend::Plugin { dist, endpoint },
            None => Backend::Cpu,
        };
        command.arg(if plugin.is_some() { "99" } else { "0" });
        node_llama::set_backend(&mut command, &backend, &program.stats);
        if let Some(library) = &program.preload {
            command.env("LD_PRELOAD", library);
        }
        if let Some(ids) = program.ids_left {
            command.env("VGPU_IDS_LEFT", ids.to_string());
        }
        let mut guest = Guest {
            dialogue: Dialogue::start(&mut command, log)?,
        };
        let ready = guest.dialogue.read_line(HANG)?;
        ensure!(ready.starts_with("ready "), "the guest said {ready:?}");
        Ok(guest)
    }

    pub(super) fn pid(&self) -> u32 {
        self.dialogue.pid()
    }

    /// Begins to load the model and to generate `tokens` tokens.
    pub(super) fn begin(&mut self, tokens: usize) -> Result<()> {
        self.dialogue.write_line(&format!("run {tokens}"))
    }

    /// The same, with a fork in the middle: the child must not be able to use the session of its
    /// parent, and generates the same tokens with a session of its own.
    pub(super) fn begin_fork(&mut self, tokens: usize) -> Result<()> {
        self.dialogue.write_line(&format!("fork {tokens}"))
    }

    /// Waits for the next token.
    pub(super) fn token(&mut self) -> Result<()> {
        let said = self.dialogue.read_line(HANG)?;
        ensure!(said == "token", "{said:?} instead of a token");
        Ok(())
    }

    /// Waits for the end of the generation.
    ///
    /// # Errors
    /// If the guest hangs, or its process has ended.
    pub(super) fn end(&mut self) -> Result<Outcome> {
        let started = Instant::now();
        loop {
            let left = HANG.saturating_sub(started.elapsed());
            let line = self
                .dialogue
                .read_line(left.max(Duration::from_millis(1)))?;
            if let Some(outcome) = outcome(&line)? {
                return Ok(outcome);
            }
        }
    }

    /// The outcome of the generation if it has ended.
    pub(super) fn ended(&mut self) -> Result<Option<Outcome>> {
        loop {
            match self.said()? {
                Some(Said::Token) => {}
                Some(Said::End(outcome)) => return Ok(Some(outcome)),
                None => return Ok(None),
            }
        }
    }

    /// What the guest has said next, if anything. Does not wait.
    pub(super) fn said(&mut self) -> Result<Option<Said>> {
        let Some(line) = self.dialogue.try_read_line()? else {
            return Ok(None);
        };
        let outcome = outcome(&line)?;
        Ok(Some(outcome.map_or(Said::Token, Said::End)))
    }

    /// What the guest has logged.
    pub(super) fn log(&self) -> String {
        self.dialogue.log()
    }

    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        self.dialogue.signal(signal)
    }

    /// Ends the guest.
    ///
    /// # Errors
    /// If its process hangs or reports a failure.
    pub(super) fn finish(self) -> Result<()> {
        self.dialogue.finish(HANG)
    }
}

/// The outcome in a line of the guest; `None` if the generation continues.
fn outcome(line: &str) -> Result<Option<Outcome>> {
    if let Some(tokens) = line.strip_prefix("tokens") {
        let numbers = tokens.split_whitespace().map(str::parse);
        let tokens = numbers
            .collect::<Result<_, _>>()
            .with_context(|| line.to_owned())?;
        return Ok(Some(Outcome::Tokens(tokens)));
    }
    if let Some(why) = line.strip_prefix("failed ") {
        return Ok(Some(Outcome::Failed(why.to_owned())));
    }
    ensure!(line == "token", "the guest said {line:?}");
    Ok(None)
}
