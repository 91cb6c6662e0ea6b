//! What rustc has compiled, kept between checkouts by [sccache](https://github.com/mozilla/sccache).
//!
//! Cargo keeps crates by the path of the checkout and the time of its files, so that a new checkout
//! compiles some two hundred crates again. sccache keeps them by what rustc reads: sources, options
//! and the crates that they use.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::cache::Cache;
use crate::packages;
use crate::process::Daemon;
use crate::scratch::Scratch;

/// How much is kept. Two runs of all tests with different sources of this project fit.
const SIZE: &str = "4G";
/// A timeout, not a measure of speed: a server that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The running server.
static SERVER: OnceLock<CompilerCache> = OnceLock::new();

/// A server of sccache. Rustc runs as its child.
#[derive(Debug)]
struct CompilerCache {
    program: PathBuf,
    files: PathBuf,
    /// Has the server's socket. A path in the user's cache could be too long for one.
    scratch: Scratch,
    /// The server ends with this process.
    server: Daemon,
}

impl CompilerCache {
    /// Starts a server that listens.
    fn start(cache: &Cache) -> Result<CompilerCache> {
        let program = packages::sccache(cache)?;
        let (files, scratch) = (cache.compiled(), Scratch::new()?);
        let mut command = Command::new(&program);
        set(&mut command, &files, scratch.path());
        command
            .env("SCCACHE_START_SERVER", "1")
            .env("SCCACHE_NO_DAEMON", "1")
            .env("SCCACHE_IDLE_TIMEOUT", "0");
        let mut server = Daemon::start(&mut command, &cache.log("sccache"))?;
        let socket = socket(scratch.path());
        server.wait_until(TIMEOUT, |_| socket.exists())?;
        Ok(CompilerCache {
            program,
            files,
            scratch,
            server,
        })
    }
}

/// Lets the commands of [`crate::workspace::cargo`] use what is in the cache, from now on to the
/// end of this process. Nothing changes if the user has set a wrapper of rustc.
///
/// # Errors
/// If sccache cannot be fetched or started. Cargo works without it.
pub fn start(cache: &Cache) -> Result<()> {
    let is_set = |name| std::env::var_os(name).is_some_and(|wrapper| !wrapper.is_empty());
    if is_set("RUSTC_WRAPPER") || is_set("CARGO_BUILD_RUSTC_WRAPPER") {
        return Ok(());
    }
    let server = CompilerCache::start(cache).context("starting sccache")?;
    SERVER.get_or_init(|| server);
    Ok(())
}

/// Lets a command of cargo use the cache, if it has been started.
pub(crate) fn use_in(cargo: &mut Command) {
    if let Some(cache) = SERVER.get() {
        set(cargo, &cache.files, cache.scratch.path());
        cargo.env("RUSTC_WRAPPER", &cache.program);
    }
}

/// The process id of the server, whose children compile. `None` if it has not been started.
pub fn server() -> Option<u32> {
    SERVER.get().map(|cache| cache.server.pid())
}

/// What the server and its clients are told.
fn set(command: &mut Command, files: &Path, scratch: &Path) {
    let set: [(&str, &OsStr); 4] = [
        ("SCCACHE_DIR", files.as_os_str()),
        ("SCCACHE_CACHE_SIZE", SIZE.as_ref()),
        ("SCCACHE_SERVER_UDS", &socket(scratch).into_os_string()),
        // A client whose server is gone runs rustc itself.
        ("SCCACHE_IGNORE_SERVER_IO_ERROR", "1".as_ref()),
    ];
    command.envs(set);
}

fn socket(scratch: &Path) -> PathBuf {
    scratch.join("sccache.sock")
}
