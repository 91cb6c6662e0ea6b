//! QEMU's monitor: commands and events of QMP, a JSON object in each line.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

/// The timeout of an answer and of an event.
const TIMEOUT: Duration = Duration::from_secs(120);

/// QEMU's argument for a monitor at `socket`.
pub(super) fn argument(socket: &Path) -> String {
    format!("unix:{},server=on,wait=off", socket.display())
}

/// A connection to the monitor.
pub(super) struct Qmp {
    lines: BufReader<UnixStream>,
    /// Events that have come before an answer, oldest first.
    events: Vec<Value>,
}

impl Qmp {
    /// Connects to the monitor at `socket`.
    pub(super) fn connect(socket: &Path) -> Result<Qmp> {
        let stream = UnixStream::connect(socket).context("connecting to QEMU's monitor")?;
        { stream.set_read_timeout(Some(TIMEOUT)) }.context("QEMU's monitor")?;
        let mut qmp = Qmp {
            lines: BufReader::new(stream),
            events: Vec::new(),
        };
        qmp.line().context("QEMU's greeting")?;
        qmp.run("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = { self.lines.read_line(&mut line) }.context("reading from QEMU's monitor")?;
        if read == 0 {
            bail!("QEMU has closed its monitor");
        }
        serde_json::from_str(&line).with_context(|| format!("QEMU's monitor said {line:?}"))
    }

    /// Runs a command. Returns the answer: an object with `return` or with `error`.
    fn answer(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments });
        writeln!(self.lines.get_mut(), "{request}").context("writing to QEMU's monitor")?;
        loop {
            let line = { self.line() }.with_context(|| format!("waiting for {command}"))?;
            match line.get("event") {
                Some(_) => self.events.push(line),
                None => return Ok(line),
            }
        }
    }

    /// Runs a command, which must succeed. Returns its result.
    pub(super) fn run(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut answer = self.answer(command, arguments)?;
        match answer.get_mut("return") {
            Some(value) => Ok(value.take()),
            None => bail!("QEMU refuses {command}: {answer}"),
        }
    }

    /// Runs a command, which must fail. Returns QEMU's message.
    pub(super) fn refusal(&mut self, command: &str, arguments: Value) -> Result<String> {
        let answer = self.answer(command, arguments)?;
        match answer.pointer("/error/desc").and_then(Value::as_str) {
            Some(message) => Ok(message.to_owned()),
            None => bail!("QEMU does not refuse {command}: {answer}"),
        }
    }

    /// Pauses the machine.
    pub(super) fn pause(&mut self, time: Duration) -> Result<()> {
        self.run("stop", json!({}))?;
        std::thread::sleep(time);
        self.run("cont", json!({})).map(drop)
    }

    /// Waits for the event `name`, which may have come already. Forgets the events before it.
    pub(super) fn event(&mut self, name: &str) -> Result<()> {
        let is_wanted = |event: &Value| event["event"] == name;
        if let Some(at) = self.events.iter().position(is_wanted) {
            self.events.drain(..=at);
            return Ok(());
        }
        self.events.clear();
        loop {
            let line = { self.line() }.with_context(|| format!("waiting for {name}"))?;
            if is_wanted(&line) {
                return Ok(());
            }
        }
    }
}
