//! The packages, installed and removed with dpkg in a separate root folder.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::clean_debian;
use super::images::{self, Image};
use crate::debian::{self, GUEST, HOST, Packages, of_release};
use crate::files::sha256;
use xtask_common::dist::Dist;
use xtask_common::packages;
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
    tests.check("bill of materials", |_, _| bill(&packages, &dist));
    tests.check("install.sh: refuses what is not the release", |_, _| {
        installer(&packages)
    });
    if tests.options.full {
        tests.check("release: RPM packages and the images", |tests, _| {
            release(tests, &dist)
        });
        clean_debian::run(tests, &packages);
    }
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
    /// The version of the packages.
    version: String,
}

impl Machine {
    fn new(packages: &Packages) -> Result<Machine> {
        let mut show = Command::new("dpkg-deb");
        show.arg("--field").arg(&packages.host).arg("Version");
        let version = process::output(&mut show)?.trim().to_owned();
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
        Ok(Machine { scratch, version })
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
    let machine = Machine::new(packages)?;
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
            "usr/share/man/man1/vgpu-serve.1.gz",
            "usr/share/bash-completion/completions/vgpu",
            "usr/share/doc/vgpu/third-party-licenses.txt",
            "usr/share/doc/vgpu-guest/third-party-licenses.txt",
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
    let machine = Machine::new(packages)?;
    let before = machine.files()?;
    let mut tar = Command::new("tar");
    process::output(
        tar.arg("-xf")
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

/// The bill names the files that are packed, and the crates in them with a licence each.
fn bill(packages: &Packages, dist: &Dist) -> Result<String> {
    let text = fs::read_to_string(&packages.bill).context("reading it")?;
    let bill: Value = serde_json::from_str(&text).context("parsing it")?;
    for file in [&dist.vgpu, &dist.plugin] {
        let sum = sha256(file)?;
        let files = bill["metadata"]["component"]["components"].as_array();
        let files = files.context("no files")?;
        let is_there = { files.iter() }.any(|one| one["hashes"][0]["content"] == sum);
        ensure!(is_there, "not with its content: {}", file.display());
    }
    let components = bill["components"].as_array().context("no components")?;
    for component in components {
        let licence = component["licenses"][0]["expression"].as_str();
        ensure!(
            licence.is_some_and(|licence| !licence.is_empty()),
            "{component}"
        );
    }
    Ok(format!("{} components", components.len()))
}

/// A release has RPM packages with the files, an image whose `vgpu` runs in nothing but it, and one
/// whose llama-server generates through it.
fn release(tests: &TestRun<'_>, dist: &Dist) -> Result<String> {
    let scratch = Scratch::new()?;
    let folder = scratch.path().join("release");
    let written = debian::release(dist, &folder)?;
    let rpms = [
        of_release(&written, "vgpu-0", ".rpm")?,
        of_release(&written, "vgpu-guest-", ".rpm")?,
    ];
    rpm_packages(&rpms)?;
    let image = |start: &str, name: &str| {
        Image::unpack(
            &of_release(&written, start, ".oci.tar")?,
            &scratch.path().join(name),
        )
    };
    let executor = image("vgpu-0", "image")?;
    let command = executor.config["Cmd"][0].as_str().context("no command")?;
    ensure!(command == "vgpu", "{}", executor.config);
    let mut run = Command::new("unshare");
    run.args(["--map-root-user", "--root"]).arg(&executor.root);
    let version = process::output(run.args(["/usr/bin/vgpu", "--version"]))?;
    ensure!(version.starts_with("vgpu "), "{version}");
    let server = image("vgpu-llama-server-", "server")?;
    for Image { root, .. } in [&executor, &server] {
        let plugin = root.join("usr/lib/vgpu/libggml-vgpu.so");
        ensure!(plugin.is_file(), "{} is missing", plugin.display());
    }
    images::generate(tests, &executor, &server, scratch.path())
}

/// The RPM packages of the host and of a guest are installed, updated and removed in a root folder
/// with a database of its own. Their scripts are only parsed: they need a system.
fn rpm_packages(files: &[PathBuf; 2]) -> Result<()> {
    let scratch = Scratch::new()?;
    let root = scratch.path();
    let rpm = |arguments: &[&str], files: &[&Path]| {
        let mut rpm = Command::new("rpm");
        rpm.arg("--root").arg(root).arg("--dbpath=/var/lib/rpm");
        process::output(rpm.args(arguments).args(files))
    };
    rpm(&["--initdb"], &[])?;
    let [host, guest] = [&files[0], &files[1]].map(PathBuf::as_path);
    let alone = rpm(&["--install", "--noscripts", "--test"], &[guest]);
    let alone = alone
        .err()
        .context("a guest's package needs no other one")?;
    ensure!(
        format!("{alone:#}").contains("vgpu = "),
        "the guest's package does not need the one of its version: {alone:#}"
    );
    // The other packages that they need are of this machine, not of the folder.
    let config = root.join("etc/vgpu/vgpu.toml");
    for arguments in [
        ["--install", "--nodeps", "--noscripts", "--ignorearch"],
        ["--upgrade", "--nodeps", "--noscripts", "--force"],
    ] {
        rpm(&arguments, &[host, guest])?;
        for file in [
            "usr/bin/vgpu",
            "etc/vgpu/vgpu.toml",
            "usr/share/man/man1/vgpu-serve.1.gz",
            "usr/lib/systemd/system/vgpu.service",
            "usr/lib/systemd/system/vgpu@.service",
            "usr/lib/sysusers.d/vgpu.conf",
            "usr/lib/vgpu/libggml-vgpu.so",
            "usr/lib/udev/rules.d/60-vgpu.rules",
        ] {
            ensure!(root.join(file).exists(), "no {file} after {arguments:?}");
        }
        // An update keeps what somebody has changed.
        fs::write(&config, "# changed\n").context("changing the configuration")?;
    }
    let kept = fs::read_to_string(&config).context("the configuration")?;
    ensure!(kept == "# changed\n", "an update has replaced {kept:?}");
    let changed = rpm(&["--verify", "--nodeps", "--noscripts", GUEST], &[])?;
    ensure!(changed.is_empty(), "{changed}");
    for name in [HOST, GUEST] {
        for kind in ["%{PREIN}", "%{POSTIN}", "%{PREUN}", "%{POSTUN}"] {
            let script = rpm(&["--query", "--queryformat", kind, name], &[])?;
            if script != "(none)" {
                process::output(Command::new("sh").args(["-n", "-c", &script]))?;
            }
        }
    }
    rpm(&["--erase", "--nodeps", "--noscripts", GUEST, HOST], &[])?;
    for folder in ["usr/bin", "usr/lib/vgpu", "usr/lib/systemd/system"] {
        let left = fs::read_dir(root.join(folder)).map_or(0, |entries| entries.count());
        ensure!(left == 0, "{left} files are left in {folder}");
    }
    let left = rpm(&["--query", "--all"], &[])?;
    ensure!(!left.contains("vgpu"), "still listed: {left}");
    Ok(())
}

/// The installer takes a signed release, and refuses damage, another signature and none.
fn installer(packages: &Packages) -> Result<String> {
    let scratch = Scratch::new()?;
    let at = |name: &str| scratch.path().join(name);
    let release = at("release");
    fs::create_dir(&release).context("creating a folder")?;
    let name = |file: &Path| -> Result<PathBuf> {
        Ok(release.join(file.file_name().context("a file has a name")?))
    };
    let files = packages.all().into_iter().chain([&*packages.checksums]);
    for file in files {
        fs::copy(file, name(file)?).context("copying the release")?;
    }
    for who in ["releaser", "other"] {
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", who, "-f"]);
        process::output(keygen.arg(at(who)))?;
        let key = fs::read_to_string(at(&format!("{who}.pub"))).context("reading a key")?;
        fs::write(at(&format!("{who}.signers")), format!("{who} {key}")).context("writing")?;
    }
    let sums = name(&packages.checksums)?;
    let install = |from: &str, more: &[&str]| -> Result<String> {
        let mut sh = Command::new("sh");
        sh.arg(workspace::root().join("deploy/install.sh"));
        sh.arg("--archive").arg(at("to")).args(more).arg(from);
        process::output(&mut sh)
    };
    let from = release.display().to_string();
    let url = format!("file://{from}");
    let trusted = at("releaser.signers").display().to_string();
    let others = at("other.signers").display().to_string();
    let refuses = |more: &[&str], words: &str| -> Result<()> {
        let error = install(&from, more)
            .err()
            .context("it installs all the same")?;
        ensure!(
            format!("{error:#}").contains(words),
            "not {words:?}: {error:#}"
        );
        ensure!(!at("to").exists(), "something is installed");
        Ok(())
    };
    refuses(&["--signers", &trusted], "SHA256SUMS.sig")?;
    let mut sign = Command::new("ssh-keygen");
    sign.args(["-q", "-Y", "sign", "-n", "ggml-vgpu", "-f"]);
    process::output(sign.arg(at("releaser")).arg(&sums))?;
    refuses(&["--signers", &others], "not signed with a key")?;
    let archive = name(&packages.archive)?;
    let good = fs::read(&archive).context("reading the archive")?;
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 1;
    fs::write(&archive, bad).context("damaging the archive")?;
    refuses(&[], "it is damaged")?;
    fs::write(&archive, good).context("writing the archive")?;
    let list = fs::read_to_string(&sums).context("reading the checksums")?;
    fs::write(&sums, format!("{list}\n")).context("changing the checksums")?;
    refuses(&["--signers", &trusted], "signature of SHA256SUMS is wrong")?;
    fs::write(&sums, list).context("writing the checksums")?;
    for from in match packages::runs("curl", &["--version"]) {
        true => vec![&from, &url],
        false => vec![&from],
    } {
        install(from, &["--signers", &trusted])?;
        let unpacked = fs::read_dir(at("to")).context("listing what is installed")?;
        let unpacked = { unpacked.flatten() }
            .next()
            .context("nothing is installed")?;
        process::output(Command::new(unpacked.path().join("bin/vgpu")).arg("--version"))?;
        fs::remove_dir_all(at("to")).context("removing what is installed")?;
    }
    downloads(&from, &at("downloads"), packages)?;
    Ok(String::new())
}

/// `--download` fetches and checks the packages of a host or of a guest, and installs none.
fn downloads(from: &str, folder: &Path, packages: &Packages) -> Result<()> {
    let [host, guest] = [&packages.host, &packages.guest].map(|file| file.as_path());
    for (role, wanted) in [("--host", vec![host]), ("--guest", vec![host, guest])] {
        let folder = folder.join(&role[2..]);
        let mut sh = Command::new("sh");
        sh.arg(workspace::root().join("deploy/install.sh"));
        sh.args([role, "--download"]).arg(&folder).arg(from);
        let said = process::output(&mut sh)?;
        let listed: Vec<&Path> = said.lines().map(Path::new).collect();
        let names = |files: &[&Path]| -> Vec<_> {
            { files.iter() }
                .map(|file| file.file_name().map(ToOwned::to_owned))
                .collect()
        };
        ensure!(
            names(&listed) == names(&wanted),
            "{role} lists {listed:?}, not {wanted:?}"
        );
        for (fetched, file) in listed.iter().zip(&wanted) {
            let [fetched, file] = [fetched, file].map(fs::read);
            ensure!(fetched? == file?, "{role} has fetched another file");
        }
    }
    Ok(())
}

/// Checks that the command runs, and installs its plugin in an Ollama.
fn works(vgpu: &Path, machine: &Machine) -> Result<()> {
    let version = process::output(Command::new(vgpu).arg("--version"))?;
    let version = version.trim().strip_prefix("vgpu ").unwrap_or_default();
    let version = workspace::package_version(version);
    ensure!(
        version == machine.version,
        "{version}, not {}",
        machine.version
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
