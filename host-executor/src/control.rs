//! A socket through which the executor's user asks what it is doing, and has it read its configuration again.
//!
//! One line each way: a word, and a JSON document. The socket is for the executor's user and root (mode 600).

use std::fs;
use std::io::{self, BufRead, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tracing::{debug, error};

use crate::status::{Report, Status, Watch};
use crate::vm::{SocketFile, listen_stream};

/// How long somebody may take for his word, and for taking the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes of a request that are read; more is not one.
const MOST: u64 = 64;

/// Who asks at once; more are sent away.
const ASKERS: usize = 16;

/// What came of reading the configuration again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// Whether it took effect.
    pub ok: bool,
    /// What changed, or what is wrong.
    pub message: String,
}

/// Has the configuration read again.
pub type Reload = Box<dyn Fn() -> Reloaded + Send + Sync>;

/// Answers at `path` from now on. The file is removed when what this returns is dropped.
pub fn serve(path: &Path, watch: Watch, reload: Reload) -> io::Result<SocketFile> {
    let listener = listen_stream(path).map_err(io::Error::other)?;
    let file = SocketFile::at(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(false)?;
    let (reload, askers) = (Arc::new(reload), Arc::new(AtomicUsize::new(0)));
    thread::Builder::new()
        .name("vgpu-control".into())
        .spawn(move || {
            for asker in listener.incoming() {
                let asker = match asker {
                    Ok(asker) => asker,
                    Err(error) => {
                        error!("nobody can ask for a second: {error}");
                        thread::sleep(Duration::from_secs(1));
                        continue;
                    }
                };
                if askers.fetch_add(1, Ordering::Relaxed) >= ASKERS {
                    askers.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let (watch, reload, askers) =
                    (watch.clone(), Arc::clone(&reload), Arc::clone(&askers));
                let spawned = thread::Builder::new()
                    .name("vgpu-control-answer".into())
                    .spawn(move || {
                        if let Err(error) = answer(asker, &watch, reload.as_ref()) {
                            debug!("a question was not answered: {error}");
                        }
                        askers.fetch_sub(1, Ordering::Relaxed);
                    });
                if let Err(error) = spawned {
                    error!("no thread to answer with: {error}");
                }
            }
        })?;
    Ok(file)
}

fn answer(asker: UnixStream, watch: &Watch, reload: &Reload) -> io::Result<()> {
    asker.set_read_timeout(Some(PATIENCE))?;
    asker.set_write_timeout(Some(PATIENCE))?;
    let mut word = String::new();
    BufReader::new((&asker).take(MOST)).read_line(&mut word)?;
    let answer = match word.trim() {
        "status" => serde_json::to_string(&watch.status()),
        "report" => serde_json::to_string(&watch.report()),
        "reload" => serde_json::to_string(&reload()),
        _ => serde_json::to_string(&Reloaded {
            ok: false,
            message: "the words are status and reload".into(),
        }),
    };
    let mut answer = answer.map_err(io::Error::other)?;
    answer.push('\n');
    (&asker).write_all(answer.as_bytes())
}

/// Asks the executor at `path` what it is doing.
pub fn status(path: &Path) -> io::Result<Status> {
    ask(path, "status", LONG)
}

/// The same of one that this process has started, which answers at once or not at all.
pub(crate) fn report(path: &Path, patience: Duration) -> io::Result<Report> {
    ask(path, "report", patience)
}

/// Has the executor at `path` read its configuration again.
pub fn reload(path: &Path) -> io::Result<Reloaded> {
    ask(path, "reload", LONG)
}

/// Longer than an executor may take for a reload.
const LONG: Duration = Duration::from_secs(60);

fn ask<T: for<'de> Deserialize<'de>>(path: &Path, word: &str, patience: Duration) -> io::Result<T> {
    let mut socket = UnixStream::connect(path)?;
    socket.set_read_timeout(Some(patience))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.write_all(format!("{word}\n").as_bytes())?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    serde_json::from_str(&answer).map_err(|error| {
        io::Error::other(format!(
            "the answer is none ({error}): is it a vgpu of another version?"
        ))
    })
}
