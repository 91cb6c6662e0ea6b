//! A minimal Debian under systemd, in namespaces of its own: a machine of a new user that boots in
//! seconds.

mod machine;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

pub(crate) use machine::{DROPPED_CAPABILITIES, KernelSettings, expect_dropped};

use crate::debian::{self, Release};
use crate::files::copy_tree;
use xtask_common::cache::Cache;
use xtask_common::process::{self, Daemon};
use xtask_common::scratch::Scratch;

const OUTER: &str = include_str!("outer.sh");
const INNER: &str = include_str!("inner.sh");

/// Joins a control group of the system, and becomes another program: `nsenter` of Debian 12 does
/// not join the group of the process whose namespaces it enters.
const JOIN: &str = "mkdir -p \"$0\" && echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";

/// The timeout of a boot, and that of every other wait.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The timeout of a command.
const COMMAND: Duration = Duration::from_secs(600);

/// The names that Debian's installer gives a system.
const HOSTNAME: &str = "debian\n";
const HOSTS: &str = "127.0.0.1 localhost\n127.0.1.1 debian\n";

/// The user of the system beside root. Every command of the user runs with `sudo` without a
/// password.
pub(crate) const USER: &str = "alice";

/// What an installation of Debian without a desktop has beside the packages of `minbase`. The C++
/// libraries are for the programs of llama.cpp.
const PACKAGES: &str = "systemd,systemd-sysv,udev,dbus,sudo,curl,ca-certificates,iproute2,xz-utils,\
                        openssh-client,libstdc++6,libgomp1";

/// A system to boot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct System {
    pub(crate) release: Release,
    /// Further packages.
    pub(crate) packages: &'static [&'static str],
    /// What tells systems with other packages apart.
    pub(crate) name: &'static str,
}

impl System {
    /// The file system, made once.
    ///
    /// # Errors
    /// If this user is not root, or the packages cannot be fetched.
    pub(crate) fn tree(&self, cache: &Cache) -> Result<PathBuf> {
        let packages = [&[PACKAGES], self.packages].concat().join(",");
        self.release.tree(cache, (self.name, &packages), |root| {
            // No network to wait for, and no console to log in at.
            for unit in ["getty.target", "systemd-networkd-wait-online.service"] {
                let link = root.join("etc/systemd/system").join(unit);
                std::os::unix::fs::symlink("/dev/null", link).context("masking a unit")?;
            }
            let file = root.join("etc/sudoers.d").join(USER);
            fs::write(file, format!("{USER} ALL=(ALL) NOPASSWD: ALL\n")).context("sudoers")
        })
    }
}

/// Installations without a desktop.
pub(crate) const BOOKWORM: System = System {
    release: debian::BOOKWORM,
    packages: &[],
    name: "systemd",
};
pub(crate) const TRIXIE: System = System {
    release: debian::TRIXIE,
    ..BOOKWORM
};

/// The output of a command, with its errors, and its exit status. `None`: a signal.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) status: Option<i32>,
    pub(crate) output: String,
}

/// A running system. Killed and removed on drop.
#[derive(Debug)]
pub(crate) struct Container {
    system: Daemon,
    /// The process id of systemd in the PID namespace of this process.
    init: u32,
    group: String,
    scratch: Scratch,
}

impl Container {
    /// Boots a copy of a system, and adds [`USER`].
    ///
    /// # Errors
    /// If the system cannot be made, or does not boot with all its units.
    pub(crate) fn boot(cache: &Cache, system: &System, log: &Path) -> Result<Container> {
        let tree = system.tree(cache)?;
        let settings = KernelSettings::read()?;
        let scratch = Scratch::new()?;
        let root = scratch.path().join("root");
        copy_tree(&tree, &root)?;
        for (file, text) in [("hostname", HOSTNAME), ("hosts", HOSTS)] {
            fs::write(root.join("etc").join(file), text).context("naming the system")?;
        }
        let outer = scratch.path().join("outer.sh");
        fs::write(&outer, OUTER).context("writing a script")?;
        fs::write(scratch.path().join("inner.sh"), INNER).context("writing a script")?;
        let unique = scratch.path().file_name().context("a folder has a name")?;
        let group = format!("vgpu-tests-{}", unique.to_string_lossy());
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "sh"]).arg(&outer);
        unshare
            .arg(scratch.path())
            .arg(&group)
            .arg(DROPPED_CAPABILITIES);
        let system = Daemon::start(&mut unshare, log)?;
        let mut container = Container {
            system,
            init: 0,
            group,
            scratch,
        };
        container.wait_for_boot()?;
        settings.expect_unchanged()?;
        let of_init = fs::read_to_string(format!("/proc/{}/status", container.init));
        expect_dropped(&of_init.context("reading a status")?)?;
        expect_dropped(&container.root("cat /proc/self/status")?)?;
        container.root(&format!("useradd --create-home --shell /bin/bash {USER}"))?;
        Ok(container)
    }

    fn wait_for_boot(&mut self) -> Result<()> {
        let started = Instant::now();
        let mut state = String::new();
        while started.elapsed() < TIMEOUT {
            if let Some(status) = self.system.exited()? {
                bail!("the system has ended with {status}: {}", self.system.log());
            }
            std::thread::sleep(Duration::from_millis(200));
            let pid = self.system.pid();
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            let Some(init) = { children.ok() }.and_then(|pids| pids.trim().parse().ok()) else {
                continue;
            };
            self.init = init;
            // The namespaces are those of systemd only when it runs.
            let name = fs::read_to_string(format!("/proc/{init}/comm")).unwrap_or_default();
            if name.trim() != "systemd" {
                continue;
            }
            let ran = self.execute(Command::new("systemctl").arg("is-system-running"))?;
            state = ran.output.trim().to_owned();
            match state.as_str() {
                "running" => return Ok(()),
                "degraded" => break,
                _ => {}
            }
        }
        let failed = self.execute(Command::new("systemctl").args(["--no-pager", "--failed"]))?;
        bail!(
            "the system is {state:?}: {}\n{}",
            failed.output,
            self.system.log()
        )
    }

    /// The root folder, with what is mounted there.
    pub(crate) fn files(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.init))
    }

    /// Connects the network interface `eth0` of this system with that of another one (veth).
    ///
    /// # Errors
    /// If there is no `ip`, or a system has such an interface.
    pub(crate) fn plug_into(&self, other: &Container) -> Result<()> {
        let mut ip = Command::new("nsenter");
        ip.args(["--target", &self.init.to_string(), "--net"]);
        ip.args(["ip", "link", "add", "eth0", "type", "veth"]);
        ip.args(["peer", "name", "eth0", "netns", &other.init.to_string()]);
        process::output(&mut ip).map(drop)
    }

    /// Copies a file to a path of the system, in a folder that is there or is made.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub(crate) fn copy(&self, from: &Path, to: &str) -> Result<()> {
        let to = self.files().join(to.trim_start_matches('/'));
        let folder = to.parent().context("a file lies in a folder")?;
        fs::create_dir_all(folder).context("creating a folder")?;
        let copied = fs::copy(from, &to);
        copied
            .map(drop)
            .with_context(|| format!("copying {}", from.display()))
    }

    /// Copies files into a folder of the system, under their names.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub(crate) fn copy_into(&self, folder: &str, files: &[impl AsRef<Path>]) -> Result<()> {
        for file in files {
            let file = file.as_ref();
            let name = file.file_name().context("a file has a name")?;
            self.copy(file, &format!("{folder}/{}", name.to_string_lossy()))?;
        }
        Ok(())
    }

    /// The command that runs lines of shell as a user who has just logged in.
    fn shell(&self, user: &str, lines: &str) -> Command {
        let mut nsenter = self.nsenter();
        nsenter.args(["su", "--login", user, "--command"]);
        nsenter.arg(format!("exec 2>&1\n{}", checked(lines)));
        nsenter
    }

    fn nsenter(&self) -> Command {
        let mut nsenter = Command::new("sh");
        nsenter.args(["-c", JOIN]);
        nsenter.arg(self.files().join("sys/fs/cgroup/shell"));
        nsenter
            .args(["nsenter", "--target"])
            .arg(self.init.to_string());
        nsenter.args(["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]);
        nsenter.args([
            "--root",
            "--wd=/",
            "--",
            "setpriv",
            "--bounding-set",
            DROPPED_CAPABILITIES,
        ]);
        nsenter.args(["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]);
        nsenter
    }

    /// Runs a program of the system as root, for 10 s at most.
    fn execute(&self, program: &Command) -> Result<Ran> {
        let mut nsenter = self.nsenter();
        nsenter.arg(program.get_program()).args(program.get_args());
        finish(&nsenter, Duration::from_secs(10))
    }

    /// Runs lines of shell as a user who has just logged in, up to the first that fails.
    ///
    /// # Errors
    /// If they cannot be started. A line that fails is no error.
    pub(crate) fn try_run(&self, user: &str, lines: &str) -> Result<Ran> {
        finish(&self.shell(user, lines), COMMAND)
    }

    /// Runs lines of shell as a user who has just logged in. Returns what they write.
    ///
    /// # Errors
    /// If one of them fails. The error has the output.
    pub(crate) fn run(&self, user: &str, lines: &str) -> Result<String> {
        let ran = self.try_run(user, lines)?;
        if ran.status != Some(0) {
            let status = ran.status.map_or("a signal".to_owned(), |s| s.to_string());
            bail!(
                "{user} runs\n{lines}\nwhich ends with {status}:\n{}",
                ran.output
            );
        }
        Ok(ran.output)
    }

    /// As [`Container::run`] for root.
    ///
    /// # Errors
    /// If a line fails.
    pub(crate) fn root(&self, lines: &str) -> Result<String> {
        self.run("root", lines)
    }

    /// Starts lines of shell as a user, as in a terminal that stays open. Its output goes to `log`.
    ///
    /// # Errors
    /// If they cannot be started.
    pub(crate) fn open(&self, user: &str, lines: &str, log: &Path) -> Result<Terminal<'_>> {
        let name = log.file_name().context("a log has a name")?;
        // `su` makes the shell the first process of a session.
        let session = format!("/tmp/{}.session", name.to_string_lossy());
        // The shell waits for the program, and ends with the status of the program.
        let lines = format!("trap : TERM\necho $$ > {session}\n{lines}");
        Ok(Terminal {
            container: self,
            program: Daemon::start(&mut self.shell(user, &lines), log)?,
            session,
        })
    }

    /// Waits until lines of shell succeed for root.
    ///
    /// # Errors
    /// If they do not succeed in two minutes. The error has their last output.
    pub(crate) fn await_that(&self, lines: &str) -> Result<()> {
        let started = Instant::now();
        loop {
            let left = TIMEOUT.saturating_sub(started.elapsed());
            // A second at least, so that the error has the output of an attempt.
            let ran = finish(&self.shell("root", lines), left.max(Duration::from_secs(1)))?;
            if ran.status == Some(0) {
                return Ok(());
            }
            ensure!(
                !left.is_zero(),
                "not within {TIMEOUT:?}: {lines}\n{}",
                ran.output
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

/// A program in the foreground of a terminal.
#[derive(Debug)]
pub(crate) struct Terminal<'a> {
    container: &'a Container,
    program: Daemon,
    /// The file with the session's process.
    session: String,
}

impl Terminal<'_> {
    /// Waits until the program has written `words`.
    ///
    /// # Errors
    /// If the program ends before, or needs more than two minutes.
    pub(crate) fn wait_for(&mut self, words: &str) -> Result<()> {
        self.program
            .wait_until(TIMEOUT, |program| program.log().contains(words))
            .with_context(|| format!("waiting for {words:?}"))
    }

    /// Ends the program with SIGTERM, as the terminal's user does. Returns what it has written.
    ///
    /// # Errors
    /// If the program has ended before, or does not end.
    pub(crate) fn close(mut self) -> Result<String> {
        let end = self.program.exited()?;
        ensure!(
            end.is_none(),
            "the program has ended:\n{}",
            self.program.log()
        );
        self.container
            .root(&format!("kill -TERM -- -$(cat {})", self.session))?;
        let (status, said) = self.wait()?;
        // What a shell makes of SIGTERM, for programs without a handler.
        let is_good = [Some(0), Some(143)].contains(&status);
        ensure!(is_good, "the program ends with {status:?}:\n{said}");
        Ok(said)
    }

    /// Waits until the program has ended by itself. Returns its status and what it has written.
    ///
    /// # Errors
    /// If the program does not end within two minutes.
    pub(crate) fn wait(mut self) -> Result<(Option<i32>, String)> {
        let started = Instant::now();
        let status = loop {
            if let Some(status) = self.program.exited()? {
                break status;
            }
            let waited = started.elapsed();
            ensure!(
                waited < TIMEOUT,
                "the program does not end:\n{}",
                self.program.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        };
        Ok((status.code(), self.program.log()))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // `unshare` ends systemd with it, and systemd's end ends all processes of its namespace.
        // Each step fails only if there is nothing left to end or to remove.
        let _ = self.system.kill();
        let folder = self.scratch.path().join("groups");
        let remove = "mount -t cgroup2 cgroup2 \"$0\" && i=0 && while [ -d \"$0/$1\" ] && \
                      [ $i -lt 100 ]; do find \"$0/$1\" -depth -type d -exec rmdir {} + \
                      2> /dev/null || sleep 0.1; i=$((i + 1)); done";
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "sh", "-c", remove]);
        let _ = process::output(unshare.arg(folder).arg(&self.group));
    }
}

/// Lines of shell of which each has to succeed: `set -e` does not see that the first part of
/// `a && b` has failed.
pub(crate) fn checked(lines: &str) -> String {
    let mut text = String::new();
    for line in lines.lines() {
        text.push_str(line);
        text.push('\n');
        let goes_on = ["\\", "|", "&&"].iter().any(|end| line.ends_with(end));
        if !goes_on && !line.trim().is_empty() {
            text.push_str("status=$?; [ $status = 0 ] || exit $status\n");
        }
    }
    text
}

/// Runs a command to its end, or ends it when its time is over.
pub(crate) fn finish(command: &Command, limit: Duration) -> Result<Ran> {
    let mut limited = Command::new("timeout");
    limited.arg("--kill-after=10");
    limited.arg(limit.as_secs_f64().to_string());
    limited.arg(command.get_program()).args(command.get_args());
    let output = limited.stdin(Stdio::null()).output();
    let output = output.context("starting nsenter")?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok(Ran {
        status: output.status.code(),
        output: text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(lines: &str) -> Option<i32> {
        let mut sh = Command::new("sh");
        let ran = finish(sh.args(["-c", &checked(lines)]), Duration::from_secs(10));
        ran.unwrap().status
    }

    #[test]
    fn each_line_has_to_succeed() {
        assert_eq!(status("export A=1\n[ $A = 1 ]   # right"), Some(0));
        assert_eq!(status("(exit 3) && true\ntrue"), Some(3));
        assert_eq!(status("(exit 4)\ntrue\n"), Some(4));
        assert_eq!(status("true \\\n  && (exit 5)\ntrue"), Some(5));
        assert_eq!(status("echo a |\n    grep b\ntrue"), Some(1));
    }
}
