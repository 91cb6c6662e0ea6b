//! A Kubernetes cluster of one node, in namespaces of its own: a control plane, a kubelet and
//! containerd.

mod images;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use xtask_common::cache::Cache;
use xtask_common::packages;
use xtask_common::process::{self, Daemon};
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

pub(crate) use images::{Image, archive};

use crate::container::{DROPPED_CAPABILITIES, KernelSettings, checked, expect_dropped, finish};
use crate::debian::TRIXIE;
use crate::files::copy_tree;

const OUTER: &str = include_str!("outer.sh");
const INNER: &str = include_str!("inner.sh");
const REMOVE: &str = include_str!("remove.sh");

/// What a node has. `busybox-static` is the program of the container that holds the namespaces of a
/// pod.
const PACKAGES: &str = "containerd,runc,containernetworking-plugins,iptables,iproute2,curl,openssl,\
                        ca-certificates,busybox-static,procps";

/// The image of that container, which containerd takes for every pod.
const PAUSE: &str = "localhost/pause:1";

/// The timeout of the start, and that of every other wait.
const TIMEOUT: Duration = Duration::from_secs(180);

/// A running cluster. Killed and removed on drop.
#[derive(Debug)]
pub(crate) struct Cluster {
    node: Daemon,
    /// The process id of the first process in the PID namespace of this process.
    init: u32,
    group: String,
    scratch: Scratch,
}

impl Cluster {
    /// Starts a cluster, and waits for its node. The programs of the cluster write into the folder
    /// `logs`.
    ///
    /// # Errors
    /// If this user is not root, a program cannot be built or fetched, or the node does not get
    /// ready.
    pub(crate) fn start(cache: &Cache, logs: &Path) -> Result<Cluster> {
        let programs = packages::kubernetes(cache, &workspace::root().join("tests/kubernetes"))?;
        let tree = TRIXIE.tree(cache, ("node", PACKAGES), |_| Ok(()))?;
        let scratch = Scratch::new()?;
        let root = scratch.path().join("root");
        copy_tree(&tree, &root)?;
        let srv = root.join("srv");
        fs::copy(programs, srv.join("kubernetes")).context("copying a program")?;
        fs::write(srv.join("inner.sh"), INNER).context("writing a script")?;
        let outer = scratch.path().join("outer.sh");
        fs::write(&outer, OUTER).context("writing a script")?;
        if logs.exists() {
            fs::remove_dir_all(logs).context("removing the logs of the last time")?;
        }
        fs::create_dir_all(logs).context("creating a folder of logs")?;
        let settings = KernelSettings::read()?;

        let unique = scratch.path().file_name().context("a folder has a name")?;
        let group = format!("vgpu-tests-{}", unique.to_string_lossy());
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "sh"]).arg(&outer);
        unshare.arg(scratch.path());
        unshare.args([&group, DROPPED_CAPABILITIES]).arg(logs);
        let node = Daemon::start(&mut unshare, &logs.join("node"))?;
        let mut cluster = Cluster {
            node,
            init: 0,
            group,
            scratch,
        };
        cluster
            .node
            .wait_until(TIMEOUT, |node| node.log().contains("started"))?;
        let pid = cluster.node.pid();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.context("reading the processes of the node")?;
        cluster.init = children.trim().parse().context("a process of the node")?;
        cluster.await_that("kubectl wait --for=condition=Ready node/node --timeout=10s")?;
        settings.expect_unchanged()?;
        expect_dropped(&cluster.run("cat /proc/1/status")?)?;
        expect_dropped(&cluster.run("cat /proc/self/status")?)?;

        let pause = cluster.files().join("srv/pause");
        fs::create_dir(&pause).context("creating a folder")?;
        let busybox = cluster.files().join("usr/bin/busybox");
        fs::copy(busybox, pause.join("busybox")).context("copying a program")?;
        let image = Image {
            name: PAUSE,
            entrypoint: &["/busybox", "sleep", "infinity"],
            command: &[],
            variables: &[],
        };
        cluster.load(&archive(&pause, &[image], cluster.scratch.path())?)?;
        Ok(cluster)
    }

    /// The root folder of the node.
    pub(crate) fn files(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.init))
    }

    /// Loads the images of an archive into containerd.
    ///
    /// # Errors
    /// If containerd refuses it.
    pub(crate) fn load(&self, archive: &Path) -> Result<()> {
        let name = archive.file_name().context("an archive has a name")?;
        fs::copy(archive, self.files().join("srv").join(name)).context("copying an image")?;
        let file = format!("/srv/{}", name.to_string_lossy());
        self.run(&format!(
            "ctr --namespace k8s.io images import {file} && rm {file}"
        ))
        .map(drop)
    }

    fn shell(&self, lines: &str) -> Command {
        let mut nsenter = Command::new("nsenter");
        nsenter.arg("--target").arg(self.init.to_string());
        nsenter.args(["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]);
        nsenter.args([
            "--root",
            "--wd",
            "--",
            "setpriv",
            "--bounding-set",
            DROPPED_CAPABILITIES,
        ]);
        nsenter.args(["env", "-i", "HOME=/root"]);
        nsenter.arg("PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        nsenter.args(["sh", "-c"]);
        nsenter.arg(format!("exec 2>&1\n{}", checked(lines)));
        nsenter
    }

    /// Runs lines of shell on the node, with `kubectl`, up to the first that fails. Returns what
    /// they write.
    ///
    /// # Errors
    /// If one of them fails. The error has the output.
    pub(crate) fn run(&self, lines: &str) -> Result<String> {
        let ran = finish(&self.shell(lines), TIMEOUT)?;
        ensure!(
            ran.status == Some(0),
            "{lines}\nends with {:?}:\n{}",
            ran.status,
            ran.output
        );
        Ok(ran.output)
    }

    /// Waits until lines of shell succeed.
    ///
    /// # Errors
    /// If they do not succeed in time. The error has their last output, and what the cluster says
    /// of its pods.
    pub(crate) fn await_that(&self, lines: &str) -> Result<()> {
        let started = Instant::now();
        loop {
            let left = TIMEOUT.saturating_sub(started.elapsed());
            // A few seconds at least, so that the error has the output of an attempt.
            let ran = finish(&self.shell(lines), left.max(Duration::from_secs(5)))?;
            if ran.status == Some(0) {
                return Ok(());
            }
            if left.is_zero() {
                let pods = "kubectl get pods --all-namespaces; kubectl get events -A | tail -n 20";
                let pods = finish(&self.shell(pods), TIMEOUT)?.output;
                bail!("not within {TIMEOUT:?}: {lines}\n{}\n{pods}", ran.output);
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The end of the first process ends all processes of its namespace. Each step fails only if
        // there is nothing left to end or to remove.
        let _ = self.node.kill();
        let _ = self.node.exited();
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "sh", "-c", REMOVE, "sh"]);
        let _ = process::output(unshare.arg(self.scratch.path()).arg(&self.group));
    }
}
