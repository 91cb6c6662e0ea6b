//! A process of its own for what may hang or crash: a driver, a backend library, the plugin.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};

/// The interval between two looks at a process.
const INTERVAL: Duration = Duration::from_millis(5);

/// How long the end of a killed process is waited for. A process inside a call of the kernel does
/// not end.
const AFTER_KILL: Duration = Duration::from_secs(1);

/// The most bytes of an output that are read: answers are short, and libraries may print, too.
const MAX_TEXT: u64 = 1 << 20;

/// How the watch of a process ended.
#[derive(Debug)]
pub(crate) enum Watched<T> {
    /// The process has written an answer. It was killed unless it had ended.
    Answered(T),
    /// The process has ended without an answer, and has written this text.
    Ended(ExitStatus, String),
    /// The process did neither in time, and was killed.
    Late,
}

/// A file in memory for what a process writes.
///
/// # Errors
/// The system refuses: of descriptors or of memory.
pub(crate) fn output_file() -> io::Result<File> {
    Ok(memfd_create("vgpu-output", MemfdFlags::CLOEXEC)?.into())
}

/// The last [`MAX_TEXT`] bytes of what was written to an [`output_file`]. The position of the file
/// belongs to the process that writes.
pub(crate) fn text_of(file: &File) -> String {
    let size = size_of(file);
    let read = size.min(MAX_TEXT);
    let mut bytes = vec![0; read as usize];
    match file.read_exact_at(&mut bytes, size - read) {
        Ok(()) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(_) => String::new(),
    }
}

/// Bytes that were written to an [`output_file`].
fn size_of(file: &File) -> u64 {
    file.metadata().map_or(0, |metadata| metadata.len())
}

/// Starts a process without input and watches it, for `limit` at most. `answer` gets what
/// [`text_of`] the process's standard output is whenever there is more, and says whether that is an
/// answer. The
/// process does not outlive this call, unless it cannot be killed. Standard error is that of the
/// command.
///
/// # Errors
/// The process cannot be started or waited for.
pub(crate) fn watch<T>(
    command: &mut Command,
    limit: Duration,
    answer: impl Fn(&str) -> Option<T>,
) -> io::Result<Watched<T>> {
    let out = output_file()?;
    let mut child = { command.stdin(Stdio::null()) }
        .stdout(out.try_clone()?)
        .spawn()?;
    let watched = until_answer(&mut child, &out, limit, answer);
    // The end of a driver may hang or crash, too, and matters to nobody.
    let _ = child.kill();
    let killed = Instant::now();
    while matches!(child.try_wait(), Ok(None)) && killed.elapsed() < AFTER_KILL {
        thread::sleep(INTERVAL);
    }
    watched
}

fn until_answer<T>(
    child: &mut Child,
    out: &File,
    limit: Duration,
    answer: impl Fn(&str) -> Option<T>,
) -> io::Result<Watched<T>> {
    let (begin, mut looked_at) = (Instant::now(), 0);
    loop {
        // In this order: a process that has ended has written its answer.
        let ended = child.try_wait()?;
        let size = size_of(out);
        if size > looked_at {
            looked_at = size;
            if let Some(answer) = answer(&text_of(out)) {
                return Ok(Watched::Answered(answer));
            }
        }
        if let Some(status) = ended {
            return Ok(Watched::Ended(status, text_of(out)));
        }
        if begin.elapsed() > limit {
            return Ok(Watched::Late);
        }
        thread::sleep(INTERVAL);
    }
}
