//! A program of the guest that generates text on request: `tests/programs/retrying_guest.c`; and
//! one that holds memory: `tests/programs/held_memory.c`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::guest::Guest;
use xtask_common::cache::Cache;
use xtask_common::{llama, process, workspace};

/// The path of the program in the guest.
pub(super) const PATH: &str = "llama/retrying_guest";

/// The path of the program that holds memory.
pub(super) const HOLDER: &str = "llama/held_memory";

/// Compiles the program that holds memory into `folder`, with the libraries in `bin`.
pub(super) fn build_holder(cache: &Cache, bin: &Path, folder: &Path) -> Result<PathBuf> {
    let path = folder.join("held_memory");
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-O1"])
        .arg(format!(
            "-I{}",
            llama::source(cache)?.join("ggml/include").display()
        ))
        .arg(workspace::root().join("tests/programs/held_memory.c"))
        .arg(format!("-L{}", bin.display()))
        .args(["-lggml", "-lggml-base"])
        .arg(format!("-Wl,-rpath,{}", bin.display()))
        .arg("-o")
        .arg(&path);
    process::output(&mut cc)?;
    Ok(path)
}

/// A pause that ends no session: longer than a guest waits for a heartbeat of its host (10 s), and
/// shorter than a host waits for one of its guest.
pub(super) const SHORT: Duration = Duration::from_secs(15);

/// How long a host waits for a heartbeat of a program in a virtual machine: the default.
pub(super) const SILENCE: Duration = Duration::from_secs(60);

/// Tokens of a generation in which something happens. The generation takes some seconds.
pub(super) const LONG: usize = 400;

/// The end of a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The line with the tokens.
    Tokens(String),
    /// The program got an error, with this reason, and goes on.
    Failed(String),
    /// The program has ended with this status; 128 or more: by a signal.
    Ended(i32),
}

/// A running program. The program ends with the guest.
pub(super) struct Program {
    name: &'static str,
}

/// A condition of the shell: the program has answered, or has ended.
fn has_answered(name: &str) -> String {
    format!("{{ grep -q '^tokens\\|^failed' /tmp/{name}.out || [ -e /tmp/{name}.status ]; }}")
}

/// A loop of the shell that waits until a condition holds.
pub(super) fn until(condition: &str) -> String {
    format!("i=0; until {condition}; do i=$((i+1)); [ $i -lt 3000 ] || exit 9; usleep 100000; done")
}

impl Program {
    /// Starts the program with the variables `environment`, and with `layers` layers of the model
    /// on the device. `name` is unique in the guest.
    pub(super) fn start(
        guest: &mut Guest,
        name: &'static str,
        environment: &str,
        layers: u32,
    ) -> Result<Program> {
        guest
            .run(&format!("cd /tmp; rm -f {name}.*; mkfifo {name}.in"))?
            .good("making a pipe")?;
        // Keeps the pipe open between two requests.
        guest.start(&format!("sleep 100000 > /tmp/{name}.in"))?;
        guest.start(&format!(
            "cd /tmp; {environment} retrying_guest /llama /vgpu/model.gguf {layers} < {name}.in \
             >> {name}.out 2> {name}.err; echo $? > {name}.new; mv {name}.new {name}.status"
        ))?;
        let started = until(&format!(
            "grep -qs '^ready' /tmp/{name}.out || [ -e /tmp/{name}.status ]"
        ));
        guest
            .run(&format!(
                "{started}; grep '^ready' /tmp/{name}.out || \
                 {{ tail -n 20 /tmp/{name}.err; exit 1; }}"
            ))?
            .good("starting the program that generates text")?;
        Ok(Program { name })
    }

    /// Begins to load the model and to generate `count` tokens.
    pub(super) fn begin(&self, guest: &mut Guest, count: usize) -> Result<()> {
        let name = self.name;
        guest
            .run(&format!(
                ": > /tmp/{name}.out; echo run {count} > /tmp/{name}.in"
            ))?
            .good("asking for a generation")
            .map(drop)
    }

    /// Waits until `count` tokens are generated, and the last one is not.
    pub(super) fn wait_for_tokens(&self, guest: &mut Guest, count: usize) -> Result<()> {
        let name = self.name;
        let (has_some, has_answered) = (
            format!("[ $(grep -c '^token$' /tmp/{name}.out) -ge {count} ]"),
            has_answered(name),
        );
        let wait = until(&format!("{has_some} || {has_answered}"));
        guest
            .run(&format!(
                "{wait}; ! {has_answered} || \
                 {{ tail -n 20 /tmp/{name}.out /tmp/{name}.err; exit 1; }}"
            ))?
            .good("a generation that is to go on")
            .map(drop)
    }

    /// Waits for the end of the generation.
    pub(super) fn end(&self, guest: &mut Guest) -> Result<Outcome> {
        let name = self.name;
        let wait = until(&has_answered(name));
        let said = guest
            .run(&format!(
                "{wait}; grep '^tokens\\|^failed' /tmp/{name}.out || \
                 echo status $(cat /tmp/{name}.status)"
            ))?
            .good("waiting for a generation")?;
        let said = said.replace('\r', "");
        let line = said.trim();
        match line.split_once(' ') {
            Some(("tokens", _)) => Ok(Outcome::Tokens(line.to_owned())),
            Some(("failed", why)) => Ok(Outcome::Failed(why.to_owned())),
            Some(("status", status)) => {
                let status = status.parse();
                Ok(Outcome::Ended(
                    status.with_context(|| format!("status {line:?}"))?,
                ))
            }
            _ => bail!("the program said {line:?}"),
        }
    }

    /// Waits for the end of a generation whose session has ended. Returns the reason of the loss
    /// in the words of the plugin.
    pub(super) fn loss(&self, guest: &mut Guest) -> Result<String> {
        let end = self.end(guest)?;
        let errors = self.errors(guest)?;
        ensure!(
            matches!(end, Outcome::Failed(_)),
            "the generation ended with {end:?}, although its session has ended:\n{errors}"
        );
        let line = errors
            .lines()
            .rev()
            .find_map(|line| line.split_once(" is lost: "));
        let (_, reason) = line.with_context(|| format!("no error names a loss:\n{errors}"))?;
        Ok(reason.split(". ").next().unwrap_or_default().to_owned())
    }

    /// Waits for the end of a generation whose device was unplugged, and looks that the program
    /// blames nobody, that it cannot load again, and that the guest's kernel has no complaint.
    /// Returns the reason of the loss.
    pub(super) fn loss_of_device(&self, guest: &mut Guest) -> Result<String> {
        let lost = self.loss(guest)?;
        ensure!(
            lost == "the peer closed the link",
            "the program blames somebody: {lost}"
        );
        // Without a device there is no next load.
        self.begin(guest, LONG)?;
        let end = self.end(guest)?;
        ensure!(
            matches!(end, Outcome::Failed(_)),
            "{end:?} without a device:\n{}",
            self.errors(guest)?
        );
        let oops = guest.run("dmesg | grep 'BUG:\\|Oops\\|Call Trace\\|segfault'")?;
        let oops = oops.output;
        ensure!(oops.is_empty(), "the guest's kernel says:\n{oops}");
        Ok(lost)
    }

    /// Generates `count` tokens, without an event.
    pub(super) fn tokens(&self, guest: &mut Guest, count: usize) -> Result<String> {
        self.begin(guest, count)?;
        match self.end(guest)? {
            Outcome::Tokens(line) => Ok(line),
            other => bail!("{other:?} instead of tokens:\n{}", self.errors(guest)?),
        }
    }

    /// Sends what is no command, and waits until the program has returned from `main`.
    pub(super) fn return_from_main(self, guest: &mut Guest) -> Result<()> {
        let name = self.name;
        let ended = until(&format!("[ -e /tmp/{name}.status ]"));
        let status = guest
            .run(&format!(
                "echo end > /tmp/{name}.in; {ended}; cat /tmp/{name}.status"
            ))?
            .good("waiting for the end of a program")?;
        ensure!(status.trim() == "2", "the status {status:?}");
        Ok(())
    }

    /// The last lines that the program has written about errors.
    pub(super) fn errors(&self, guest: &mut Guest) -> Result<String> {
        let errors = format!("grep -i 'vgpu\\|error' /tmp/{}.err | tail -n 8", self.name);
        Ok(guest.run(&errors)?.output.replace('\r', ""))
    }
}

/// Checks that the tokens of `long` begin with those of `short`.
pub(super) fn ensure_begins(long: &str, short: &str) -> Result<()> {
    let rest = long.strip_prefix(short);
    ensure!(
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' ')),
        "other tokens:\n  CPU:   {short}\n  VGPU0: {long}"
    );
    Ok(())
}
