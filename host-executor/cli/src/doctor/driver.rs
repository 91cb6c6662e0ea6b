//! The library of NVIDIA's driver, `libcuda.so.1`.

use std::ffi::{CStr, CString, NulError, c_int, c_uint, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use clap::Parser;
use serde::{Deserialize, Serialize};

use super::child::{self, NoAnswer};
use super::library::{Library, LinkerError};
use super::report::Report;
use super::root::Root;
use crate::own_program::OWN_PROGRAM;

const LIBRARY: &str = "libcuda.so.1";

/// How long the library may take to load and to begin. A GPU that nobody uses takes some seconds.
const LIMIT: Duration = Duration::from_secs(20);

/// The first version of CUDA that the engine works with: 12.0.
const MIN_VERSION: c_int = 12_000;

/// Codes of `cuInit`.
const NO_DEVICE: c_int = 100;
const DRIVER_MISMATCH: c_int = 803;

/// The process that loads the library for `vgpu doctor`.
#[derive(Parser)]
pub(crate) struct DriverArgs {
    library: PathBuf,
}

/// What the library answers.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Answer {
    /// The text of the dynamic linker.
    NotLoaded(String),
    /// The version of CUDA as `cuDriverGetVersion` says, and what `cuInit` returns.
    Loaded { version: c_int, init: c_int },
}

/// Prints the answer as JSON.
pub(crate) fn run(args: &DriverArgs) -> ExitCode {
    child::end_with_parent();
    let answer = load(args).unwrap_or_else(|error| Answer::NotLoaded(error.to_string()));
    match serde_json::to_string(&answer) {
        Ok(text) => println!("\n{text}"),
        Err(_) => return ExitCode::FAILURE,
    }
    ExitCode::SUCCESS
}

/// Why the library cannot be asked.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error(transparent)]
    Path(#[from] NulError),
    #[error(transparent)]
    Library(#[from] LinkerError),
    #[error("it has no function {0}")]
    Function(&'static str),
}

fn load(args: &DriverArgs) -> Result<Answer, LoadError> {
    let name = CString::new(args.library.as_os_str().as_bytes())?;
    let library = Library::load(&name, 0)?;
    let symbol = |name: &'static CStr| -> Result<*mut c_void, LoadError> {
        let symbol = library.symbol(name);
        symbol.ok_or_else(|| LoadError::Function(name.to_str().unwrap_or_default()))
    };
    let (get_version, init) = (symbol(c"cuDriverGetVersion")?, symbol(c"cuInit")?);
    let mut version = 0;
    // SAFETY: in NVIDIA's library the symbols have these types; the library is never unloaded, and
    // `version` is a valid place for the result.
    let init = unsafe {
        let get_version =
            std::mem::transmute::<*mut c_void, extern "C" fn(*mut c_int) -> c_int>(get_version);
        let init = std::mem::transmute::<*mut c_void, extern "C" fn(c_uint) -> c_int>(init);
        get_version(&mut version);
        init(0)
    };
    Ok(Answer::Loaded { version, init })
}

/// Checks the library for the cards of the host. `part`: of the report.
pub(super) fn check(part: &'static str, root: &Root, folders: &[&str], report: &mut Report) {
    let library = match root.is_own() {
        true => Some(PathBuf::from(LIBRARY)),
        // The dynamic linker does not search another file system.
        false => { folders.iter() }
            .map(|folder| root.path(folder).join(LIBRARY))
            .find(|file| file.exists()),
    };
    let Some(library) = library else {
        report.fail(part, not_there(), install_library(root));
        return;
    };
    let mut command = Command::new(OWN_PROGRAM);
    command.arg("doctor-driver").arg(library);
    let answer = child::output(command.stderr(Stdio::null()), LIMIT);
    let (what, next) = match answer.map(|(text, _)| parse(&text)) {
        Ok(Some(Answer::Loaded { version, init: 0 })) if version >= MIN_VERSION => {
            report.ok(part, format!("{LIBRARY}: CUDA {}", shown(version)));
            return;
        }
        Ok(Some(Answer::Loaded { version, .. })) if version < MIN_VERSION => (
            format!(
                "{LIBRARY} is for CUDA {}; the engine needs {}",
                shown(version),
                shown(MIN_VERSION)
            ),
            install(root),
        ),
        Ok(Some(Answer::Loaded { version, init })) => refusal(version, init),
        Ok(Some(Answer::NotLoaded(why))) if why.contains("No such file") => {
            (not_there(), install_library(root))
        }
        Ok(Some(Answer::NotLoaded(why))) => (
            format!("{LIBRARY} cannot be loaded: {why}"),
            install_library(root),
        ),
        Ok(None) => (
            format!("{LIBRARY}: its process has written no answer"),
            install_library(root),
        ),
        Err(error @ NoAnswer::Late(_)) => (
            format!(
                "{LIBRARY}: {error}: a call of the driver hangs; the kernel's log may say why, and \
                 a restart of the host ends it"
            ),
            "sudo dmesg | grep --extended-regexp 'NVRM|Xid'".into(),
        ),
        Err(error) => (format!("{LIBRARY}: {error}"), install_library(root)),
    };
    report.fail(part, what, next);
}

fn not_there() -> String {
    format!("{LIBRARY}, the library of NVIDIA's driver, is not there")
}

/// What an error of `cuInit` means.
fn refusal(version: c_int, code: c_int) -> (String, String) {
    let shown = shown(version);
    match code {
        DRIVER_MISMATCH => (
            format!(
                "{LIBRARY} (CUDA {shown}) and the driver in the kernel are of different versions \
                 (CUDA error {code})"
            ),
            "sudo reboot".into(),
        ),
        NO_DEVICE => (
            format!(
                "{LIBRARY} (CUDA {shown}) finds no device (CUDA error {code}): its files in /dev \
                 are missing, or CUDA_VISIBLE_DEVICES hides it"
            ),
            "sudo nvidia-modprobe -c 0 -u".into(),
        ),
        _ => (
            format!("{LIBRARY} (CUDA {shown}) does not begin: CUDA error {code}"),
            "nvidia-smi".into(),
        ),
    }
}

/// A version of CUDA as people write it.
fn shown(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The answer in what the process has printed: in its last line, since the driver may print, too.
fn parse(text: &str) -> Option<Answer> {
    serde_json::from_str(text.lines().next_back()?).ok()
}

/// What to do without the library.
fn install_library(root: &Root) -> String {
    // Nobody but who has started the container knows how.
    if root.is_container() {
        return "start the container with --gpus all --env \
                NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            .into();
    }
    match root.distribution().0.as_str() {
        "debian" => "sudo apt install libcuda1".into(),
        "ubuntu" => "sudo ubuntu-drivers install".into(),
        // Each has other repositories of the driver.
        _ => "install the CUDA library of NVIDIA's driver, of the version of the kernel's driver"
            .into(),
    }
}

/// What to do without a driver of version 525 or newer.
pub(super) fn install(root: &Root) -> String {
    match root.distribution().0.as_str() {
        "debian" => install_on_debian(root),
        "ubuntu" => "sudo ubuntu-drivers install".into(),
        // Each has other repositories of the driver.
        _ => "install NVIDIA's driver, version 525 or newer".into(),
    }
}

/// The driver is in no component that every Debian has.
fn install_on_debian(root: &Root) -> String {
    const INSTALL: &str = "sudo apt install nvidia-driver";
    const COMPONENTS: &str = "main contrib non-free non-free-firmware";
    let sources = package_sources(root);
    if sources
        .iter()
        .any(|(_, text)| has_component(text, "non-free"))
    {
        return INSTALL.into();
    }
    // Packages of others have sources, too.
    let is_debian =
        |(_, text): &&(PathBuf, String)| has_component(text, "main") && text.contains("debian");
    let Some((file, text)) = sources.iter().find(is_debian) else {
        return format!("add the components {COMPONENTS} of Debian to /etc/apt, then {INSTALL}");
    };
    // A file has one of two formats.
    let script = match text.contains("Components:") {
        true => format!("s/^Components:.*/Components: {COMPONENTS}/"),
        false => format!("/^deb .*debian/ s/ main.*/ {COMPONENTS}/"),
    };
    let file = file.display();
    format!("sudo sed --in-place '{script}' {file} && sudo apt update && {INSTALL}")
}

/// The files with sources of Debian packages, sorted by name, and their texts.
fn package_sources(root: &Root) -> Vec<(PathBuf, String)> {
    let folder = fs::read_dir(root.path("/etc/apt/sources.list.d"));
    let listed = folder.into_iter().flatten().flatten();
    let listed = listed.map(|file| file.path());
    let mut sources = Vec::new();
    for file in listed.chain([root.path("/etc/apt/sources.list")]) {
        let kind = file.extension();
        if kind.is_some_and(|kind| kind == "list" || kind == "sources")
            && let Ok(text) = fs::read_to_string(&file)
        {
            sources.push((file, text));
        }
    }
    sources.sort_unstable();
    sources
}

/// Whether a source of binary packages has a component.
fn has_component(text: &str, component: &str) -> bool {
    text.lines().map(str::trim_start).any(|line| {
        let is_read = !line.starts_with('#') && !line.starts_with("deb-src ");
        is_read && line.split_whitespace().any(|word| word == component)
    })
}
