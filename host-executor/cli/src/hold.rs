//! `vgpu hold`: keeps the files of virtual machines while an executor is replaced, where no systemd does.
//!
//! A QEMU connects to its device's server once. So that an executor can be restarted (or die) under a running virtual
//! machine, somebody has to keep the machine's memory, its doorbell and the socket to its QEMU. This process does,
//! in the way systemd does (`NOTIFY_SOCKET` and `FDSTORE` from the executor, `LISTEN_FDS` to the next one), and starts
//! the next one when one has died.

use std::fs::{self, DirBuilder};
use std::io::{Write as _, stderr};
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use clap::Parser;
use rustix::net::RecvFlags;
use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGINT, SIGTERM};
use vgpu_transport::link::scm_rights;

/// Most files kept: three for each virtual machine.
const MOST_FILES: usize = 1024;

/// How often to look after the executor when it says nothing.
const LOOK: Duration = Duration::from_millis(100);

/// Time before an executor that has died is started again, at first and at most; doubled while they die young.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// An executor that lived so long did not die young.
const OLD: Duration = Duration::from_secs(10);

/// Runs a command such as `vgpu serve`, starts it again when it dies, and keeps the files of virtual machines for it.
///
/// Under systemd this is not needed: there, FileDescriptorStoreMax= and Restart= do the same.
#[derive(Parser)]
pub(crate) struct Args {
    /// The command: vgpu serve --vm vm1,socket=/run/vgpu/vm1.sock
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Becomes the command, with the kept files where it looks for them. Started by `vgpu hold` alone.
#[derive(Parser)]
pub(crate) struct ExecArgs {
    /// Names and numbers of the files.
    #[arg(long = "file", value_name = "NAME=FD")]
    files: Vec<String>,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGTERM, SIGINT] {
        signal_hook::flag::register_usize(number, Arc::clone(&signal), number as usize)
            .context("signals cannot be caught")?;
    }
    let post = Post::open()?;
    let mut kept: Vec<(String, OwnedFd)> = Vec::new();
    let mut pause = PAUSE;
    loop {
        let started = Instant::now();
        let mut child = start(&args.command, &post, &kept)?;
        say(&format!(
            "pid {} runs {}",
            child.id(),
            args.command.join(" ")
        ));
        let mut told = 0;
        let status = loop {
            post.receive(&mut kept)?;
            let asked = signal.load(Ordering::Relaxed);
            if asked != told {
                told = asked;
                // It has not been waited for yet, so its id is its own.
                let _ = rustix::process::kill_process(Pid::from_child(&child), Signal::TERM);
            }
            if let Some(status) = child.try_wait().context("looking after the executor")? {
                break status;
            }
        };
        if told != 0 || status.success() {
            return if status.success() {
                Ok(())
            } else {
                Err(anyhow!("{} ended with {status}", args.command[0]))
            };
        }
        pause = if started.elapsed() > OLD {
            PAUSE
        } else {
            (pause * 2).min(LONGEST_PAUSE)
        };
        say(&format!(
            "pid {} ended with {status}; {} files are kept, the next starts in {} ms",
            child.id(),
            kept.len(),
            pause.as_millis()
        ));
        let until = Instant::now() + pause;
        while Instant::now() < until && signal.load(Ordering::Relaxed) == 0 {
            post.receive(&mut kept)?; // its last words
        }
        if signal.load(Ordering::Relaxed) != 0 {
            return Ok(());
        }
    }
}

/// A line on standard error. It is lost when nobody takes it (a full disk); the files must not be lost with it.
fn say(line: &str) {
    let _ = writeln!(stderr(), "vgpu hold: {line}");
}

fn start(command: &[String], post: &Post, kept: &[(String, OwnedFd)]) -> anyhow::Result<Child> {
    let own = std::env::current_exe().context("finding this program")?;
    let mut exec = Command::new(own);
    exec.arg("hold-exec");
    for (name, file) in kept {
        exec.arg(format!("--file={name}={}", file.as_raw_fd()));
    }
    exec.arg("--")
        .args(command)
        .env("NOTIFY_SOCKET", &post.path)
        .spawn()
        .with_context(|| format!("starting {}", command[0]))
}

pub(crate) fn exec(args: &ExecArgs) -> anyhow::Result<()> {
    // The executor ends with who keeps its files.
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))
        .context("asking for a signal at the end of vgpu hold")?;
    let mut files = Vec::new();
    for file in &args.files {
        let (name, number) = file.rsplit_once('=').context("--file is NAME=FD")?;
        let number: RawFd = number.parse().context("--file is NAME=FD")?;
        files.push((name, number));
    }
    // Out of the way first, so that no file is overwritten by another that takes its place.
    let first = 3;
    let beyond = first + files.len() as RawFd + 64;
    let mut moved = Vec::new();
    for (_, number) in &files {
        // SAFETY: plain system call on a descriptor number that `vgpu hold` has passed to us; this process has one
        // thread and owns no descriptor of that number otherwise.
        let copy = unsafe { libc::fcntl(*number, libc::F_DUPFD_CLOEXEC, beyond) };
        if copy < 0 {
            bail!("file {number}: {}", std::io::Error::last_os_error());
        }
        moved.push(copy);
    }
    for (target, copy) in (first..).zip(moved) {
        // SAFETY: as above. What lies at the target was passed to us and has a copy, or is nobody's: this process opens
        // nothing that it still needs.
        if unsafe { libc::dup2(copy, target) } < 0 {
            bail!("file {target}: {}", std::io::Error::last_os_error());
        }
    }
    let names: Vec<&str> = files.iter().map(|(name, _)| *name).collect();
    let error = Command::new(&args.command[0])
        .args(&args.command[1..])
        .env("LISTEN_PID", std::process::id().to_string())
        .env("LISTEN_FDS", files.len().to_string())
        .env("LISTEN_FDNAMES", names.join(":"))
        .exec();
    Err(anyhow!("{}: {error}", args.command[0]))
}

/// The socket through which the executor tells what to keep. Its folder is ours alone.
struct Post {
    socket: UnixDatagram,
    folder: PathBuf,
    path: PathBuf,
}

impl Post {
    fn open() -> anyhow::Result<Post> {
        let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let base = base.filter(|dir| dir.is_dir());
        let folder = base
            .unwrap_or_else(std::env::temp_dir)
            .join(format!("vgpu-hold-{}", std::process::id()));
        // A folder that is already there was left behind by one of our number that was killed.
        if fs::symlink_metadata(&folder).is_ok_and(|m| m.is_dir()) {
            let _ = fs::remove_dir_all(&folder);
        }
        DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .with_context(|| format!("creating {}", folder.display()))?;
        let path = folder.join("notify");
        let socket = UnixDatagram::bind(&path)
            .with_context(|| format!("listening at {}", path.display()))?;
        socket
            .set_read_timeout(Some(LOOK))
            .context("preparing a socket")?;
        Ok(Post {
            socket,
            folder,
            path,
        })
    }

    /// Waits a moment for a message and does what it says.
    fn receive(&self, kept: &mut Vec<(String, OwnedFd)>) -> anyhow::Result<()> {
        let mut bytes = [0; 4096];
        // Files stay open in the programs we start: they are for them.
        let got = match scm_rights::receive(&self.socket, &mut bytes, RecvFlags::empty()) {
            Ok(got) => got,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(error).context("hearing from the executor"),
        };
        let text = String::from_utf8_lossy(&bytes[..got.bytes]).into_owned();
        apply(&text, got.files.into_iter().next(), kept);
        Ok(())
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(Path::new(&self.folder));
    }
}

fn apply<F>(text: &str, file: Option<F>, kept: &mut Vec<(String, F)>) {
    let value = |key: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    };
    let name = value("FDNAME").unwrap_or("stored").to_owned();
    if value("FDSTOREREMOVE") == Some("1") {
        kept.retain(|(kept, _)| *kept != name);
    } else if value("FDSTORE") == Some("1")
        && let Some(file) = file
    {
        kept.retain(|(kept, _)| *kept != name);
        if kept.len() < MOST_FILES {
            kept.push((name, file));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_kept_by_name() {
        let mut kept = Vec::new();
        apply("READY=1\n", None, &mut kept);
        apply("FDSTORE=1\nFDNAME=a\n", Some(1), &mut kept);
        apply("FDSTORE=1\nFDNAME=b\nFDPOLL=0\n", Some(2), &mut kept);
        apply("FDSTORE=1\nFDNAME=a\n", Some(3), &mut kept);
        apply("FDSTORE=1\nFDNAME=c\n", None, &mut kept);
        assert_eq!(kept, [("b".to_owned(), 2), ("a".to_owned(), 3)]);
        apply("FDSTOREREMOVE=1\nFDNAME=b\n", None, &mut kept);
        assert_eq!(kept, [("a".to_owned(), 3)]);
    }
}
