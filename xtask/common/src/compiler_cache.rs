//! Crates of others that rustc has compiled, kept between checkouts by Mozilla's
//! [sccache](https://github.com/mozilla/sccache).
//!
//! Cargo keeps crates by the path of the checkout, so that a new checkout compiles some two hundred
//! crates again. sccache keeps them by what rustc reads. The crates of this project are left out:
//! they are changed all the time, and some have archives in them that sccache does not look at.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;

use crate::cache::Cache;
use crate::packages;
use crate::process::Daemon;
use crate::scratch::Scratch;

/// How much is kept. The crates of a run of all tests take less than 1 GiB.
const SIZE: &str = "4G";
/// The names of sccache's program and of the wrapper that cargo calls. By a wrapper of the name
/// `sccache`, build scripts would compile C, too.
const PROGRAM: &str = "sccache";
const WRAPPER: &str = "rustc-cache";
/// Cargo compiles a crate in its folder, and a crate of this project in the root of the workspace.
const SCRIPT: &str = "#!/bin/sh\n\
    case $PWD in */registry/src/*) exec \"${0%/*}/sccache\" \"$@\" ;; esac\n\
    exec \"$@\"\n";

/// By these, users choose a wrapper; an empty one is none.
const WRAPPERS: [&str; 2] = ["RUSTC_WRAPPER", "CARGO_BUILD_RUSTC_WRAPPER"];

/// A timeout, not a measure of speed: a server that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What commands of cargo are told of the server that runs, if one does.
static RUNNING: Mutex<Option<(u32, Settings)>> = Mutex::new(None);

#[derive(Debug)]
struct Settings {
    wrapper: PathBuf,
    files: PathBuf,
    socket: PathBuf,
}

/// The process id of the server, and the settings.
fn running() -> MutexGuard<'static, Option<(u32, Settings)>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A server of sccache, whose children compile. Ends when it is dropped.
#[derive(Debug)]
pub struct CompilerCache {
    _server: Daemon,
    /// Has the server's socket. A path in the user's cache could be too long for one.
    _scratch: Scratch,
}

impl Drop for CompilerCache {
    fn drop(&mut self) {
        *running() = None;
    }
}

/// Lets the commands of [`crate::workspace::cargo`] use what is in the cache, until the returned
/// value is dropped. `None` if the user has chosen a wrapper of rustc, or none.
///
/// # Errors
/// If sccache cannot be fetched or started. Cargo works without it.
pub fn start(cache: &Cache) -> Result<Option<CompilerCache>> {
    let is_chosen = { WRAPPERS.iter() }.any(|name| std::env::var_os(name).is_some());
    if is_chosen || is_configured() {
        return Ok(None);
    }
    let folder = packages::sccache(cache, write_wrapper)?;
    let scratch = Scratch::new()?;
    let settings = Settings {
        wrapper: folder.join(WRAPPER),
        files: cache.compiled(),
        socket: scratch.path().join("sccache.sock"),
    };
    let mut command = Command::new(folder.join(PROGRAM));
    settings.set(&mut command);
    command
        .env("SCCACHE_START_SERVER", "1")
        .env("SCCACHE_NO_DAEMON", "1")
        .env("SCCACHE_IDLE_TIMEOUT", "0");
    let mut server = Daemon::start(&mut command, &cache.log("sccache"))?;
    server.wait_until(TIMEOUT, |_| settings.socket.exists())?;
    *running() = Some((server.pid(), settings));
    Ok(Some(CompilerCache {
        _server: server,
        _scratch: scratch,
    }))
}

/// Whether the user's configuration of cargo names a wrapper.
fn is_configured() -> bool {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let texts = ["config.toml", "config"].map(|name| {
        let path = home.as_ref().map(|home| home.join(name));
        path.and_then(|path| std::fs::read_to_string(path).ok())
    });
    { texts.into_iter().flatten() }.any(|text| text.contains("rustc-wrapper"))
}

/// Lets a command of cargo use the cache, if there is a server.
pub(crate) fn use_in(cargo: &mut Command) {
    if let Some((_, settings)) = &*running() {
        settings.set(cargo);
        cargo.env("RUSTC_WRAPPER", &settings.wrapper);
    }
}

/// The process id of the server. `None`: there is none.
pub fn server() -> Option<u32> {
    running().as_ref().map(|(server, _)| *server)
}

impl Settings {
    /// What the server and its clients are told, and nothing else that the user has for a sccache
    /// of his own.
    fn set(&self, command: &mut Command) {
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SCCACHE_") {
                command.env_remove(name);
            }
        }
        let set: [(&str, &OsStr); 6] = [
            ("SCCACHE_CONF", "/dev/null".as_ref()),
            ("SCCACHE_DIR", self.files.as_os_str()),
            ("SCCACHE_CACHE_SIZE", SIZE.as_ref()),
            ("SCCACHE_SERVER_UDS", self.socket.as_os_str()),
            // A client whose server has ended starts another one, which does not stay.
            ("SCCACHE_IDLE_TIMEOUT", "60".as_ref()),
            // A client whose server ends meanwhile runs rustc itself.
            ("SCCACHE_IGNORE_SERVER_IO_ERROR", "1".as_ref()),
        ];
        command.envs(set);
    }
}

/// Writes the wrapper into the folder of sccache.
///
/// # Errors
/// If the file system refuses.
fn write_wrapper(folder: &Path) -> std::io::Result<()> {
    let path = folder.join(WRAPPER);
    std::fs::write(&path, SCRIPT)?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o755))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The wrapper gives crates of registries to sccache, and runs rustc itself for all others.
    #[test]
    fn crates_of_this_project_do_not_reach_the_cache() {
        let scratch = Scratch::new().unwrap();
        write_wrapper(scratch.path()).unwrap();
        let program = scratch.path().join(PROGRAM);
        std::fs::write(&program, "#!/bin/sh\necho cached \"$@\"\n").unwrap();
        std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let registry = scratch.path().join("registry/src/host-1/log-0.4");
        std::fs::create_dir_all(&registry).unwrap();
        for (folder, said) in [
            (registry.as_path(), "cached echo a b\n"),
            (scratch.path(), "a b\n"),
        ] {
            let mut wrapper = Command::new(scratch.path().join(WRAPPER));
            wrapper.args(["echo", "a", "b"]).current_dir(folder);
            assert_eq!(crate::process::output(&mut wrapper).unwrap(), said);
        }
    }
}
