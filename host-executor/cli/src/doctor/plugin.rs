//! The plugin's file, and the ggml that loads it, in a process of their own: the plugin reads
//! VGPU_ENDPOINT from its environment, and may end the process that loads it.

use std::ffi::{CStr, CString, NulError, c_char, c_int, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::Parser;
use vgpu_transport::link::Endpoint;

use super::child::{self, NoAnswer};
use super::library::{Library, LinkerError};
use super::link::{INSTALL_GUEST, Links};
use super::report::Report;
use crate::own_program::OWN_PROGRAM;
use crate::session_client;

/// The symbols of the plugin that ggml calls.
const SYMBOLS: [&CStr; 2] = [c"ggml_backend_init", c"ggml_backend_score"];

/// File names of ggml libraries beside a plugin.
const GGML: [&str; 2] = ["libggml-base.so", "libggml-base.so.0"];

/// The process that loads the plugin for `vgpu doctor`.
#[derive(Parser)]
pub(crate) struct PluginArgs {
    #[arg(long)]
    plugin: PathBuf,

    #[arg(long)]
    ggml: Option<PathBuf>,

    /// Do not look for executors.
    #[arg(long)]
    no_device: bool,
}

/// Prints the report as JSON.
pub(crate) fn run(args: &PluginArgs) -> ExitCode {
    child::end_with_parent();
    let mut report = Report::default();
    load(args, &mut report);
    match serde_json::to_string(&report) {
        Ok(text) => println!("{text}"),
        Err(_) => return ExitCode::FAILURE,
    }
    ExitCode::SUCCESS
}

/// `links`: where the process looks for executors, if not where a plugin does by itself.
pub(super) fn check(
    plugin: Option<&Path>,
    ggml: Option<&Path>,
    links: &Links,
    report: &mut Report,
) {
    let named = plugin
        .map(Path::to_path_buf)
        .or_else(|| std::env::var_os("GGML_BACKEND_PATH").map(PathBuf::from));
    // The folder of the packages.
    let Some(file) = named.or_else(|| crate::install::plugin(None).ok()) else {
        report.note(
            PART,
            "not checked: name the plugin with --plugin (the host needs no plugin)",
        );
        return;
    };
    let mut command = Command::new(OWN_PROGRAM);
    command.arg("doctor-plugin").arg("--plugin").arg(&file);
    if let Some(ggml) = ggml {
        command.arg("--ggml").arg(ggml);
    }
    if links.only_others {
        command.arg("--no-device");
    }
    if !links.endpoints.is_empty() {
        let texts = links.endpoints.iter().map(Endpoint::to_string);
        command.env("VGPU_ENDPOINT", texts.collect::<Vec<_>>().join(","));
    }
    match answer(command) {
        Ok(other) => report.append(other),
        Err(why @ NoReport::Process(NoAnswer::Late(_))) => report.fail(
            PART,
            format!(
                "{}: {why}: it, its ggml or a library that they need hangs, the last one of which \
                 the dynamic linker says \"calling init\"",
                file.display()
            ),
            "LD_DEBUG=files vgpu doctor",
        ),
        Err(why) => report.fail(PART, format!("{}: {why}", file.display()), INSTALL_GUEST),
    }
}

/// Why the process that loads the plugin has no report.
#[derive(Debug, thiserror::Error)]
enum NoReport {
    #[error(transparent)]
    Process(#[from] NoAnswer),
    #[error("its process has written no report")]
    Empty,
}

/// The report of the process. What the plugin logs appears on standard error.
fn answer(mut command: Command) -> Result<Report, NoReport> {
    let (text, status) = child::output(&mut command, LIMIT)?;
    if !status.success() {
        return Err(NoAnswer::Ended(status).into());
    }
    // Libraries may write lines of their own.
    let last = text.lines().next_back().ok_or(NoReport::Empty)?;
    serde_json::from_str(last).map_err(|_| NoReport::Empty)
}

const PART: &str = "plugin";

fn load(args: &PluginArgs, report: &mut Report) {
    let PluginArgs {
        plugin: file,
        ggml,
        no_device,
    } = args;
    // Before the plugin, as in a program: the plugin resolves symbols of a ggml that is already
    // loaded.
    let folder = file.parent().unwrap_or(Path::new("."));
    let ggml = ggml.clone().or_else(|| {
        let beside = GGML.iter().map(|name| folder.join(name));
        beside.into_iter().find(|file| file.exists())
    });
    let has_ggml = ggml.is_some_and(|file| check_ggml(&file, report));

    let object = match load_file(file) {
        Ok(object) => object,
        Err(error) => {
            report.fail(
                PART,
                format!(
                    "{}: {error}; it comes with the package vgpu-guest, and --plugin names another",
                    file.display()
                ),
                INSTALL_GUEST,
            );
            return;
        }
    };
    let missing: Vec<_> = SYMBOLS
        .iter()
        .filter(|name| object.symbol(name).is_none())
        .map(|name| name.to_string_lossy())
        .collect();
    if !missing.is_empty() {
        report.fail(
            PART,
            format!(
                "{}: not a ggml plugin: the symbol {} is missing",
                file.display(),
                missing.join(" and ")
            ),
            "vgpu doctor --plugin FILE",
        );
        return;
    }
    report.ok(
        PART,
        format!(
            "{}: loads, and exports the symbols that ggml needs",
            file.display()
        ),
    );
    if let Ok(stamp) = crate::install::describe(file) {
        report.ok(PART, stamp);
    }
    if !has_ggml {
        report.note(
            PART,
            "not asked for a device: no ggml beside the plugin; name one with --ggml",
        );
        return;
    }
    if *no_device {
        report.note(
            PART,
            "not asked for a device: this host serves virtual machines only",
        );
        return;
    }
    let Some(score) = object.symbol(c"ggml_backend_score") else {
        return;
    };
    // SAFETY: by ggml's plugin interface a symbol of this name is a function without arguments that
    // returns an int. The object is never unloaded, so the function stays valid.
    let score = unsafe { std::mem::transmute::<*mut c_void, Score>(score) };
    check_score(move || score(), SCORE_LIMIT, report);
}

/// `ggml_backend_score`.
type Score = extern "C" fn() -> c_int;

/// How long the plugin may look for executors: longer than it takes for an executor that opens a
/// link and does not answer, whom the plugin then names.
const SCORE_LIMIT: Duration = Duration::from_secs(30);

/// How long the process may take: the plugin and its ggml have 10 s to be loaded.
const LIMIT: Duration = SCORE_LIMIT.saturating_add(Duration::from_secs(10));

fn check_score(
    score: impl FnOnce() -> c_int + Send + 'static,
    limit: Duration,
    report: &mut Report,
) {
    match session_client::result_within(limit, score) {
        Ok(score) if score > 0 => report.ok(
            PART,
            format!("compatible with this ggml, and an executor answers: score {score}"),
        ),
        Ok(_) => report.fail(
            PART,
            "the plugin's score is 0; the line that the plugin has logged above says why",
            "VGPU_LOG=debug vgpu doctor",
        ),
        Err(error) => report.fail(
            PART,
            format!("ggml_backend_score: {error}"),
            "on the executor's machine: sudo vgpu dump",
        ),
    }
}

/// Loads a ggml library for the plugin. Returns whether a ggml is loaded now.
fn check_ggml(file: &Path, report: &mut Report) -> bool {
    let object = match load_file(file) {
        Ok(object) => object,
        Err(error) => {
            report.fail(
                "ggml",
                format!(
                    "{}: {error}; --ggml names the libggml-base.so of the program",
                    file.display()
                ),
                "vgpu doctor --ggml FILE",
            );
            return false;
        }
    };
    let Some(version) = object.symbol(c"ggml_version") else {
        report.fail(
            "ggml",
            format!(
                "{}: this ggml is older than 0.9: the function ggml_version is missing",
                file.display()
            ),
            "update the program that has this ggml",
        );
        return false;
    };
    // SAFETY: in ggml a symbol of this name is a function without arguments that returns a string
    // constant. The object is never unloaded, so function and string stay valid.
    let version = unsafe {
        let version =
            std::mem::transmute::<*mut c_void, extern "C" fn() -> *const c_char>(version)();
        (!version.is_null()).then(|| CStr::from_ptr(version).to_string_lossy().into_owned())
    };
    report.ok(
        "ggml",
        format!(
            "{}: ggml {}",
            file.display(),
            version.as_deref().unwrap_or("of unknown version")
        ),
    );
    true
}

/// Why a file cannot be loaded into this process.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    /// The file is missing, or this process may not read it.
    #[error(transparent)]
    File(#[from] io::Error),
    #[error(transparent)]
    Name(#[from] NulError),
    /// The file is not a shared object for this machine, or a library that it needs is missing.
    #[error(transparent)]
    Linker(#[from] LinkerError),
}

/// Loads a file into this process.
fn load_file(file: &Path) -> Result<Library, LoadError> {
    // The error of the file system says more than the dynamic linker's.
    std::fs::File::open(file)?;
    // A name without a slash would be searched for in the system's library folders.
    let file = file.canonicalize()?;
    let name = CString::new(file.as_os_str().as_bytes())?;
    // A ggml has to be there for the plugin, which is loaded later.
    Ok(Library::load(&name, libc::RTLD_GLOBAL)?)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_plugin_that_does_not_answer_is_a_failure() {
        let (open, never) = mpsc::channel::<()>();
        let mut report = Report::default();
        let hangs = move || {
            let _ = never.recv();
            100
        };
        check_score(hangs, Duration::from_millis(20), &mut report);
        drop(open);
        assert!(!report.is_well());
    }
}
