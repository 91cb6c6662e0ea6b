//! The packages, installed and removed with dpkg in a separate root folder.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::debian::{GUEST, HOST, Packages};
use xtask_common::process;
use xtask_common::progress::heading;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use crate::test_run::TestRun;

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("packages");
    let Some(dist) = tests.dist() else { return };
    let folder = workspace::root().join("target/package");
    let built = tests.prepare("packages", |_| Packages::make(&dist, &folder));
    let Some(packages) = built else { return };
    tests.check("checksums", |_, _| checksums(&packages));
    tests.check(
        "Debian packages: installed, updated, removed, purged",
        |_, _| debian(&packages),
    );
    tests.check("archive: unpacked, used, removed", |_, _| {
        archive(&packages)
    });
}

fn checksums(packages: &Packages) -> Result<String> {
    let folder = packages
        .checksums
        .parent()
        .context("the checksums lie in a folder")?;
    let mut check = Command::new("sha256sum");
    check
        .args(["--check", "--strict"])
        .arg(&packages.checksums)
        .current_dir(folder);
    let said = process::output(&mut check)?;
    ensure!(said.lines().count() == packages.all().len(), "{said}");
    Ok(String::new())
}

/// A root folder with only the files that dpkg and the packages' scripts read.
struct Machine {
    scratch: Scratch,
}

impl Machine {
    fn new() -> Result<Machine> {
        let scratch = Scratch::new()?;
        for folder in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "etc"] {
            fs::create_dir_all(scratch.path().join(folder)).context("creating a folder")?;
        }
        for (file, text) in [
            ("var/lib/dpkg/status", ""),
            ("etc/group", "root:x:0:\n"),
            ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
        ] {
            fs::write(scratch.path().join(file), text).context("writing a file")?;
        }
        Ok(Machine { scratch })
    }

    fn root(&self) -> &Path {
        self.scratch.path()
    }

    fn dpkg(&self, arguments: &[&str], files: &[&Path]) -> Result<String> {
        let mut dpkg = Command::new("dpkg");
        dpkg.arg("--root").arg(self.root());
        // The folder has no shell for chroot, and the test does not run as root. The other
        // dependencies of the packages are on this machine, not in the folder.
        dpkg.args(["--force-script-chrootless", "--force-not-root"])
            .args(["--ignore-depends=libc6,libgcc-s1,passwd", "--log=/dev/null"])
            .args(arguments)
            .args(files);
        process::output(&mut dpkg)
    }

    /// Files and links outside dpkg's own folder.
    fn files(&self) -> Result<BTreeSet<PathBuf>> {
        let mut files = BTreeSet::new();
        let mut folders = vec![self.root().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).context("listing a folder")? {
                let path = entry.context("listing a folder")?.path();
                if path.is_dir() && !path.is_symlink() {
                    folders.push(path);
                } else {
                    files.insert(path.strip_prefix(self.root()).context("below")?.to_owned());
                }
            }
        }
        files.retain(|file| !file.starts_with("var/lib/dpkg"));
        Ok(files)
    }

    fn has(&self, file: &str) -> bool {
        self.root().join(file).exists()
    }
}

fn debian(packages: &Packages) -> Result<String> {
    let machine = Machine::new()?;
    let before = machine.files()?;
    let alone = machine.dpkg(&["--install"], &[&packages.guest]);
    ensure!(
        alone.is_err(),
        "the guest's package was installed without the one it depends on"
    );
    machine.dpkg(&["--purge", GUEST], &[])?;

    let both = [packages.host.as_path(), packages.guest.as_path()];
    for round in ["installing", "updating"] {
        machine.dpkg(&["--install"], &both).context(round)?;
        for file in [
            "usr/bin/vgpu",
            "etc/vgpu/vgpu.toml",
            "usr/lib/systemd/system/vgpu.service",
            "usr/lib/systemd/system/vgpu@.service",
            "usr/lib/sysusers.d/vgpu.conf",
            "usr/lib/vgpu/libggml-vgpu.so",
            "usr/lib/udev/rules.d/60-vgpu.rules",
        ] {
            ensure!(machine.has(file), "{round}: no {file}");
        }
    }
    for file in ["etc/group", "etc/passwd"] {
        let text = fs::read_to_string(machine.root().join(file)).context("reading a file")?;
        let count = text
            .lines()
            .filter(|line| line.starts_with("vgpu:"))
            .count();
        ensure!(count == 1, "{count} entries in {file}: {text}");
    }
    works(&machine.root().join("usr/bin/vgpu"), &machine)?;

    // What the service writes.
    let kernels = machine.root().join("var/cache/vgpu/kernels");
    fs::create_dir_all(&kernels).context("creating a folder")?;
    fs::write(kernels.join("one.cubin"), "").context("writing a file")?;
    let left = |machine: &Machine| -> Result<Vec<PathBuf>> {
        let mut left: Vec<_> = machine.files()?.difference(&before).cloned().collect();
        left.retain(|file| !is_of_users(file) && !file.starts_with("usr/local"));
        Ok(left)
    };
    machine
        .dpkg(&["--remove", GUEST, HOST], &[])
        .context("removing")?;
    let kept = ["etc/vgpu/vgpu.toml", "var/cache/vgpu/kernels/one.cubin"].map(PathBuf::from);
    let removed = left(&machine)?;
    ensure!(
        removed == kept,
        "a removal leaves {removed:?}, not {kept:?}"
    );
    machine
        .dpkg(&["--purge", GUEST, HOST], &[])
        .context("purging")?;
    let purged = left(&machine)?;
    ensure!(purged.is_empty(), "a purge leaves {purged:?}");
    for folder in ["etc/vgpu", "var/cache/vgpu"] {
        ensure!(!machine.has(folder), "a purge leaves {folder}");
    }
    let status = process::output(
        Command::new("dpkg-query")
            .arg("--admindir")
            .arg(machine.root().join("var/lib/dpkg"))
            .args(["-W"]),
    );
    ensure!(
        !status.unwrap_or_default().contains("vgpu"),
        "dpkg still lists the package"
    );
    Ok(String::new())
}

/// Whether a file lists users or groups, or is the backup or the lock of such a file. Users remain,
/// as usual in Debian.
fn is_of_users(file: &Path) -> bool {
    let name = file.strip_prefix("etc").ok().and_then(Path::to_str);
    name.is_some_and(|name| {
        let name = name.trim_end_matches('-');
        [".pwd.lock", "group", "gshadow", "passwd", "shadow"].contains(&name)
    })
}

fn archive(packages: &Packages) -> Result<String> {
    let machine = Machine::new()?;
    let before = machine.files()?;
    let mut tar = Command::new("tar");
    process::output(
        tar.arg("-xzf")
            .arg(&packages.archive)
            .arg("-C")
            .arg(machine.root()),
    )?;
    let mut folders = fs::read_dir(machine.root()).context("listing a folder")?;
    let unpacked = folders.find_map(|entry| {
        let entry = entry.ok()?;
        entry
            .file_name()
            .to_string_lossy()
            .starts_with("ggml-vgpu-")
            .then(|| entry.path())
    });
    let unpacked = unpacked.context("the archive holds no folder ggml-vgpu-*")?;
    works(&unpacked.join("bin/vgpu"), &machine)?;
    fs::remove_dir_all(&unpacked).context("removing what was unpacked")?;
    let left: Vec<_> = machine
        .files()?
        .difference(&before)
        .filter(|f| !f.starts_with("usr/local"))
        .cloned()
        .collect();
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(String::new())
}

/// Checks that the command runs, and installs its plugin in an Ollama.
fn works(vgpu: &Path, machine: &Machine) -> Result<()> {
    let version = process::output(Command::new(vgpu).arg("--version"))?;
    ensure!(
        version.trim() == concat!("vgpu ", env!("CARGO_PKG_VERSION")),
        "{version}"
    );
    let lib = machine.root().join("usr/local/lib/ollama");
    fs::create_dir_all(&lib).context("creating a folder")?;
    let source = workspace::root().join("tests/abi/fake_ggml.c");
    let mut cc = Command::new("cc");
    cc.args([
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        "-DVERSION=\"0.21.0\"",
        "-o",
    ])
    .arg(lib.join("libggml-base.so"))
    .arg(source);
    process::output(&mut cc)?;
    fs::write(lib.join("llama-server"), "").context("writing a file")?;
    for command in ["install", "uninstall"] {
        let mut run = Command::new(vgpu);
        run.arg(command)
            .arg("--root")
            .arg(machine.root())
            .env_remove("VGPU_ENDPOINT");
        process::output(&mut run)?;
        let there = lib.join("vgpu/libggml-vgpu.so").exists();
        ensure!(there == (command == "install"), "after {command}: {there}");
    }
    Ok(())
}
