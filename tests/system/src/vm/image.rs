//! The guest's system: Debian's cloud kernel, and an initramfs with the programs under test.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use super::cpio::Archive;
use xtask_common::cache::Cache;
use xtask_common::dist::Dist;
use xtask_common::process;
use xtask_common::progress::Progress;
use xtask_common::workspace;

/// The package that depends on the newest kernel made for virtual machines.
const KERNEL: &str = "linux-image-cloud-amd64";

/// The modules for a network and for vsock, each after its dependencies.
const MODULES: &[&str] = &[
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "failover",
    "net_failover",
    "virtio_net",
    "vsock",
    "vmw_vsock_virtio_transport_common",
    "vmw_vsock_virtio_transport",
];

/// udev, and those of its libraries that a minimal Debian may lack.
const UDEV: &[&str] = &["udev", "libkmod2", "libblkid1", "libacl1", "libcap2"];

/// The folders of a Debian that a guest does not need, and those that it has of its own.
const NOT_COPIED: &[&str] = &[
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "dev",
    "proc",
    "sys",
    "run",
    "tmp",
];

/// A user with no rights but those of the group vgpu.
const USERS: &str = "root:x:0:0::/tmp:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n";
const GROUPS: &str = "root:x:0:\nuser:x:1000:\nvgpu:x:990:user\n";

/// The first program of the guest, which runs each line from the serial port.
const INIT: &str = include_str!("init.sh");

/// The same under systemd.
const SHELL: &str = include_str!("shell.sh");
const TESTS_UNIT: &str = include_str!("vgpu-tests.service");
/// The parts of a prepared system.
const MACHINE_ID: &str = "7667707500000000000000000000c0de\n";
const SYSUSERS: &str = "u user 1000 - /tmp /bin/sh\nm user vgpu\n";

/// A kernel and its modules.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) image: PathBuf,
    modules: BTreeMap<String, PathBuf>,
}

/// Debian packages, downloaded by this machine's apt and unpacked.
fn unpacked(cache: &Cache, name: &str, packages: &[&str]) -> Result<PathBuf> {
    cache.folder(name, |dir| {
        let progress = Progress::new(&format!("fetching {name}"));
        let log = cache.log(name);
        let mut fetch = Command::new("apt-get");
        fetch.arg("download").args(packages).current_dir(dir);
        process::run(&mut fetch, &progress, &log).with_context(|| {
            format!("fetching {name} (on a machine without apt, `cargo xtask vm` cannot run)")
        })?;
        let archives = std::fs::read_dir(dir).context("listing what was fetched")?;
        for archive in archives {
            let archive = archive.context("listing what was fetched")?.path();
            if archive.extension() != Some("deb".as_ref()) {
                continue;
            }
            let mut unpack = Command::new("dpkg-deb");
            process::run(unpack.arg("-x").arg(&archive).arg(dir), &progress, &log)?;
            std::fs::remove_file(&archive).context("removing a package's archive")?;
        }
        progress.done("");
        Ok(())
    })
}

/// Debian's kernel for virtual machines.
pub(super) fn kernel(cache: &Cache) -> Result<Kernel> {
    let depends = process::output(Command::new("apt-cache").args(["depends", KERNEL]))
        .context("asking apt for a kernel")?;
    let package = depends
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"))
        .context("apt knows no kernel for virtual machines: run `apt-get update`")?;
    let package = format!("linux-image-{package}");
    let root = unpacked(cache, &package, &[&package])?;
    let release = package.trim_start_matches("linux-image-");
    let mut modules = BTreeMap::new();
    // Debian 13 has the modules below /usr.
    for lib in ["lib", "usr/lib"] {
        collect(&root.join(lib).join("modules").join(release), &mut modules)?;
    }
    Ok(Kernel {
        image: root.join("boot").join(format!("vmlinuz-{release}")),
        modules,
    })
}

fn collect(dir: &Path, modules: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Ok(());
    };
    for entry in entries {
        let path = entry.context("listing kernel modules")?.path();
        if path.is_dir() && !path.is_symlink() {
            collect(&path, modules)?;
        } else if let Some(name) = path.file_name().and_then(|name| name.to_str()) {
            // Modules may be compressed: `.ko.xz`.
            if let Some((name, _)) = name.split_once(".ko") {
                modules.insert(name.replace('-', "_"), path.clone());
            }
        }
    }
    Ok(())
}

/// The files for the guest.
#[derive(Debug)]
pub(super) struct Content<'a> {
    pub(super) dist: &'a Dist,
    /// The folder of llama.cpp's programs.
    pub(super) bin: &'a Path,
    /// ggml's CPU backend for the CPU of the guest.
    pub(super) cpu: &'a Path,
    pub(super) model: &'a Path,
    /// Further files with their paths in the guest.
    pub(super) more: &'a [(&'a str, &'a Path)],
}

/// Programs of llama.cpp in the guest.
const PROGRAMS: &[&str] = &["test-backend-ops", "llama-completion"];

/// Writes the initramfs to `path`.
pub(super) fn initramfs(
    cache: &Cache,
    kernel: &Kernel,
    content: &Content<'_>,
    path: &Path,
) -> Result<()> {
    let busybox = unpacked(cache, "busybox-static", &["busybox-static"])?;
    let busybox = ["bin/busybox", "usr/bin/busybox"]
        .map(|place| busybox.join(place))
        .into_iter()
        .find(|place| place.exists())
        .context("the package busybox-static holds no busybox")?;

    let mut archive = Archive::create(path)?;
    for folder in ["dev", "proc", "sys", "tmp", "bin", "run"] {
        archive.folder(folder)?;
    }
    archive.file("bin/busybox", &busybox)?;
    archive.content("init", 0o755, INIT.as_bytes())?;

    let mut list = String::new();
    for name in MODULES {
        // A missing module is built in, or this kernel does not need it.
        if let Some(file) = kernel.modules.get(*name) {
            let target = file
                .file_name()
                .and_then(|name| name.to_str())
                .context("a kernel module without a name")?;
            archive.file(&format!("modules/{target}"), file)?;
            list.push_str(&format!("/modules/{target}\n"));
        }
    }
    archive.content("modules/list", 0o644, list.as_bytes())?;

    archive.file("bin/vgpu", &content.dist.vgpu)?;
    archive.content("etc/passwd", 0o644, USERS.as_bytes())?;
    archive.content("etc/group", 0o644, GROUPS.as_bytes())?;
    let udev = unpacked(cache, "udev", UDEV)?;
    let udevadm = [udev.join("bin/udevadm"), udev.join("usr/bin/udevadm")]
        .into_iter()
        .find(|place| place.exists())
        .context("the package udev holds no udevadm")?;
    // The file has this name in the guest.
    archive.file("bin/udevadm", &udevadm)?;
    archive.file("bin/systemd-udevd", &udevadm)?;
    let rules = "usr/lib/udev/rules.d/60-vgpu.rules";
    archive.file(rules, &workspace::root().join("deploy/guest/60-vgpu.rules"))?;

    programs(&mut archive, content, &[udevadm], Some(&udev), None)?;
    archive.finish()
}

/// Writes an initramfs to `path` with Debian and systemd, unpacked at `root`, and with vgpu's
/// packages.
pub(super) fn with_systemd(
    root: &Path,
    packages: &[PathBuf],
    content: &Content<'_>,
    scratch: &Path,
    path: &Path,
) -> Result<()> {
    let mut archive = of_debian(root, path)?;
    for package in packages {
        let name = package.file_name().context("a package without a name")?;
        let unpacked = scratch.join(name).with_extension("unpacked");
        let mut unpack = Command::new("dpkg-deb");
        process::output(unpack.arg("-x").arg(package).arg(&unpacked))?;
        archive.tree(&unpacked, &[])?;
    }
    archive.content("usr/lib/sysusers.d/user.conf", 0o644, SYSUSERS.as_bytes())?;
    programs(&mut archive, content, &[], None, Some(root))?;
    archive.finish()
}

/// Writes an initramfs to `path` with an installed Debian with systemd, of which `root` is a copy,
/// and with `files` in the home folder of its root.
pub(super) fn with_files(
    root: &Path,
    files: &[&Path],
    content: &Content<'_>,
    path: &Path,
) -> Result<()> {
    let mut archive = of_debian(root, path)?;
    for file in files {
        let name = file.file_name().context("a file without a name")?;
        archive.file(&format!("root/{}", name.to_string_lossy()), file)?;
    }
    programs(&mut archive, content, &[], None, Some(root))?;
    archive.finish()
}

/// Begins an initramfs at `path` with the Debian at `root`, whose systemd starts [`SHELL`].
fn of_debian(root: &Path, path: &Path) -> Result<Archive> {
    let mut archive = Archive::create(path)?;
    for folder in ["dev", "proc", "sys", "tmp", "run"] {
        archive.folder(folder)?;
    }
    archive.tree(root, NOT_COPIED)?;
    archive.content("etc/machine-id", 0o444, MACHINE_ID.as_bytes())?;
    let unit = "etc/systemd/system/vgpu-tests.service";
    archive.content(unit, 0o644, TESTS_UNIT.as_bytes())?;
    archive.link(
        "etc/systemd/system/default.target",
        "/usr/lib/systemd/system/multi-user.target",
    )?;
    archive.link(
        "etc/systemd/system/multi-user.target.wants/vgpu-tests.service",
        "../vgpu-tests.service",
    )?;
    archive.content("vgpu/shell.sh", 0o755, SHELL.as_bytes())?;
    Ok(archive)
}

/// Adds the programs under test and their libraries, except those that the system at `root` has.
/// Also adds the libraries of `more`.
fn programs(
    archive: &mut Archive,
    content: &Content<'_>,
    more: &[PathBuf],
    unpacked: Option<&Path>,
    root: Option<&Path>,
) -> Result<()> {
    let mut objects: Vec<PathBuf> = vec![
        content.dist.plugin.clone(),
        content.dist.vgpu.clone(),
        content.cpu.to_owned(),
    ];
    objects.extend_from_slice(more);
    archive.file("vgpu/libggml-vgpu.so", &content.dist.plugin)?;
    archive.file("llama/libggml-cpu.so", content.cpu)?;
    archive.file("vgpu/model.gguf", content.model)?;
    for (target, file) in content.more {
        archive.file(target, file)?;
    }
    for program in PROGRAMS {
        let file = content.bin.join(program);
        archive.file(&format!("llama/{program}"), &file)?;
        objects.push(file);
    }
    // The linker prints paths with resolved links, so the paths here must be resolved, too.
    let bin = content.bin.canonicalize();
    let bin = bin.with_context(|| format!("resolving {}", content.bin.display()))?;
    for (name, file) in libraries(&objects, unpacked)? {
        let is_ours = file.canonicalize().is_ok_and(|file| file.starts_with(&bin));
        let place = |lib: &str| format!("{lib}/x86_64-linux-gnu/{name}");
        if is_ours {
            archive.file(&format!("llama/{name}"), &file)?;
        } else if let Some(root) = root {
            if !name.starts_with("ld-linux") && !root.join(place("usr/lib")).exists() {
                archive.file(&format!("llama/{name}"), &file)?;
            }
        } else if name.starts_with("ld-linux") {
            archive.file(&format!("lib64/{name}"), &file)?;
        } else {
            archive.file(&place("lib"), &file)?;
        }
    }
    Ok(())
}

/// The libraries of `objects` by name: those of this machine, or else those of an unpacked package.
fn libraries(objects: &[PathBuf], unpacked: Option<&Path>) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    for object in objects {
        let mut ldd = Command::new("ldd");
        if let Some(unpacked) = unpacked {
            let places = ["lib", "usr/lib"].map(|lib| {
                let place = unpacked.join(lib).join("x86_64-linux-gnu");
                place.into_os_string()
            });
            ldd.env("LD_LIBRARY_PATH", places.join(":".as_ref()));
        }
        let listed = process::output(ldd.arg(object))
            .with_context(|| format!("asking what {} needs", object.display()))?;
        for line in listed.lines() {
            if line.contains("not found") {
                bail!("{} needs {}", object.display(), line.trim());
            }
            let path = line
                .split_whitespace()
                .find(|word| word.starts_with('/'))
                .map(PathBuf::from);
            if let Some(path) = path
                && let Some(name) = path.file_name().and_then(|name| name.to_str())
            {
                found.insert(name.to_owned(), path.clone());
            }
        }
    }
    ensure!(
        found.keys().any(|name| name.starts_with("ld-linux")),
        "no dynamic linker among the libraries"
    );
    Ok(found)
}
