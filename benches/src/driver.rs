//! The program that measures devices through ggml's own interface: `driver.c`, built against the
//! cached ggml.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use xtask_common::process::{self, Dialogue};
use xtask_common::progress::Progress;
use xtask_common::workspace;

/// One measurement of the driver.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) what: String,
    pub(crate) device: String,
    pub(crate) asleep: bool,
    /// The bytes of a single transfer, and of all transfers in `seconds`.
    pub(crate) size: u64,
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
}

/// The compiled driver and its inputs.
pub(crate) struct Driver {
    program: PathBuf,
    /// The folder of ggml's libraries and backends.
    bin: PathBuf,
    plugin: PathBuf,
    /// For the plugin: one endpoint for each device.
    endpoints: String,
    rpc: String,
    log: PathBuf,
}

impl Driver {
    pub(crate) fn build(
        source: &Path,
        bin: &Path,
        folder: &Path,
        plugin: &Path,
        endpoints: String,
        rpc: String,
    ) -> Result<Driver> {
        let progress = Progress::new("building the driver");
        let program = folder.join("driver");
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&program)
            .arg(workspace::root().join("benches/src/driver.c"))
            .arg(format!("-I{}", source.join("include").display()))
            .arg(format!("-I{}", source.join("ggml/include").display()))
            .arg(format!("-L{}", bin.display()))
            .args(["-lllama", "-lggml", "-lggml-base"])
            .arg(format!("-Wl,-rpath,{}", bin.display()));
        process::output(&mut cc)?;
        progress.done("");
        Ok(Driver {
            program,
            bin: bin.to_owned(),
            plugin: plugin.to_owned(),
            endpoints,
            rpc,
            log: folder.join("driver.log"),
        })
    }

    /// Runs one measurement: `arguments` are those behind the RPC server's address.
    pub(crate) fn run(&self, progress: &Progress, arguments: &[&str]) -> Result<Vec<Sample>> {
        let mut command = Command::new(&self.program);
        command
            .arg(&self.bin)
            .arg(&self.rpc)
            .args(arguments)
            .env("GGML_BACKEND_PATH", &self.plugin)
            .env("VGPU_ENDPOINT", &self.endpoints);
        let mut samples = Vec::new();
        let mut broken = None;
        let status = process::run_lines(&mut command, &self.log, |line| {
            if line.starts_with('{') {
                match parse(line) {
                    Ok(sample) => samples.push(sample),
                    Err(error) => broken = Some(error),
                }
                progress.note(line);
            }
        })?;
        ensure!(
            status.success(),
            "the driver ended with {status}\n{}",
            process::tail(&self.log)
        );
        match broken {
            Some(error) => Err(error),
            None => Ok(samples),
        }
    }
}

/// A running guest.
pub(crate) struct Guest {
    program: Dialogue,
    stats: PathBuf,
}

impl Driver {
    /// Starts a guest of an executor. `memory` is its cache folder; its statistics go to `stats`.
    pub(crate) fn guest(
        &self,
        endpoint: &str,
        model: &str,
        memory: &Path,
        stats: PathBuf,
        log: &Path,
    ) -> Result<Guest> {
        let mut command = Command::new(&self.program);
        command
            .arg(&self.bin)
            .arg(&self.rpc)
            .args(["guest", "1", model, "VGPU0"])
            .env("GGML_BACKEND_PATH", &self.plugin)
            .env("VGPU_ENDPOINT", endpoint)
            .env("VGPU_CACHE", memory)
            .env("VGPU_STATS", &stats);
        let program = Dialogue::start(&mut command, log)?;
        Ok(Guest { program, stats })
    }
}

impl Guest {
    /// Waits up to `timeout` for the sample named `what`.
    pub(crate) fn sample(&mut self, what: &str, timeout: Duration) -> Result<Sample> {
        loop {
            let line = self.program.read_line(timeout)?;
            if line.starts_with('{') {
                let sample = parse(&line)?;
                if sample.what == what {
                    return Ok(sample);
                }
            }
        }
    }

    /// The file with the guest's statistics.
    pub(crate) fn stats(&self) -> &Path {
        &self.stats
    }

    /// Ends the guest.
    pub(crate) fn finish(mut self, timeout: Duration) -> Result<()> {
        self.program.write_line("quit")?;
        self.program.finish(timeout)
    }
}

fn parse(line: &str) -> Result<Sample> {
    let value: Value = serde_json::from_str(line).context("parsing a line of the driver")?;
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    let number = |name: &str| value[name].as_u64().unwrap_or(0);
    Ok(Sample {
        what: text("what"),
        device: text("device"),
        asleep: value["asleep"].as_bool().unwrap_or(false),
        size: number("size"),
        bytes: number("bytes"),
        seconds: value["seconds"].as_f64().context("a line without a time")?,
    })
}
