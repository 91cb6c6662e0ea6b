//! The scripts and the configuration of the packages.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;

use crate::served::{Scratch, Serve, vgpu};
use crate::unit;

/// A script of the Debian package, with programs in its path that write down their arguments.
struct PackageScript {
    scratch: Scratch,
    text: String,
}

impl PackageScript {
    /// `name`: below `deploy`.
    fn new(name: &str) -> PackageScript {
        let scratch = Scratch::new(&name.replace('/', "-"));
        let source = format!("../../deploy/{name}");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
        let text = fs::read_to_string(source).expect("the script");
        let script = PackageScript { scratch, text };
        fs::create_dir(script.at("bin")).expect("a folder");
        for name in [
            "systemctl",
            "groupadd",
            "useradd",
            "usermod",
            "systemd-sysusers",
            "systemd-tmpfiles",
        ] {
            script.program(name, "");
        }
        script
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// A program that writes down its arguments and then runs `rest`.
    fn program(&self, name: &str, rest: &str) {
        let path = self.at("bin").join(name);
        let calls = self.at("calls");
        let text = format!(
            "#!/bin/sh\necho \"${{0##*/}} $*\" >> {}\n{rest}\n",
            calls.display()
        );
        fs::write(&path, text).expect("a program");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
    }

    /// Runs the script. Returns what it has called, and what it has said.
    fn run(&self, arguments: &[&str], root: &Path) -> (String, String) {
        let _ = fs::remove_file(self.at("calls"));
        let path = std::env::var("PATH").expect("a path");
        let output = Command::new("sh")
            .args(["-c", &self.text, "script"])
            .args(arguments)
            .env("PATH", format!("{}:{path}", self.at("bin").display()))
            .env("DPKG_ROOT", root)
            .output()
            .expect("a shell");
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(output.status.success(), "{said}");
        (
            fs::read_to_string(self.at("calls")).unwrap_or_default(),
            said,
        )
    }
}

/// The configuration that the package installs, with the paths and addresses of a test.
#[test]
fn installed_configuration_serves_on_any_host() {
    let scratch = Scratch::new("installed");
    let config = scratch.path().join("vgpu.toml");
    let text = fs::read_to_string(unit("vgpu.toml")).expect("the configuration");
    let folder = scratch.path().to_str().expect("text");
    let text = text.replace("/run/vgpu", folder);
    assert_eq!(text.matches(folder).count(), 4, "{text}");
    fs::write(&config, &text).expect("a file");
    let mut command = vgpu(&["serve", "--config"]);
    command.arg(&config).env("RUNTIME_DIRECTORY", folder);
    let serve = Serve::of(command);
    let ready = format!("ready unix:{}\n", scratch.socket().display());
    assert_eq!(serve.ready, ready);
    let mut ps = vgpu(&["ps", "--control"]);
    let control = scratch.path().join("control.sock");
    assert!(
        ps.arg(control)
            .output()
            .expect("it starts")
            .status
            .success()
    );
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let mut check = vgpu(&["check-config"]);
    let output = check.arg(&config).output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn package_puts_its_user_into_the_groups_of_gpus_that_exist() {
    let script = PackageScript::new("debian/vgpu.postinst");
    let root = script.at("root");
    fs::create_dir_all(root.join("etc")).expect("a folder");
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").expect("a file");
    fs::write(root.join("etc/group"), "root:x:0:\nvideo:x:44:\n").expect("a file");
    let (called, _) = script.run(&["configure"], &root);
    let joins = format!(
        "usermod --prefix {} --append --groups video vgpu\n",
        root.display()
    );
    assert!(called.ends_with(&joins), "{called}");
    assert!(
        called.contains("useradd") && !called.contains("render"),
        "{called}"
    );
}

/// The script that Debian runs after it has unpacked a new version leaves the executor of running
/// guests alone, and says when the new version is used.
#[test]
fn an_upgrade_leaves_running_guests_alone() {
    // The script, and its arguments for an upgrade and for the first installation.
    for (name, from, first) in [
        (
            "debian/vgpu.postinst",
            &["configure", "0.0.9"][..],
            &["configure", ""][..],
        ),
        ("rpm/vgpu.post", &["2"], &["1"]),
    ] {
        upgrade_leaves_running_guests_alone(name, from, first);
    }
}

fn upgrade_leaves_running_guests_alone(name: &str, from: &[&str], first: &[&str]) {
    let mut script = PackageScript::new(name);
    let systemd = script.at("systemd");
    fs::create_dir(&systemd).expect("a folder");
    assert!(script.text.contains("/run/systemd/system"));
    let systemd = systemd.to_str().expect("text");
    script.text = script.text.replace("/run/systemd/system", systemd);
    let upgrade = |active: &str, arguments: &[&str]| {
        script.program(
            "systemctl",
            &format!("[ \"$1\" != --quiet ] || [ \"$3\" = '{active}' ]"),
        );
        let (called, said) = script.run(arguments, Path::new(""));
        let verbs: Vec<&str> = { called.lines() }
            .filter_map(|line| line.strip_prefix("systemctl "))
            .collect();
        let is_harmless = |verb: &&str| *verb == "daemon-reload" || verb.contains("is-active");
        assert!(verbs.contains(&"daemon-reload"), "{verbs:?}");
        assert!(verbs.iter().all(is_harmless), "{verbs:?}");
        said
    };
    // A mistake in the configuration would end the new executor.
    assert_eq!(
        upgrade("vgpu.service", from),
        "vgpu: running guests keep their version; when they may stop: vgpu check-config && \
         systemctl restart vgpu\n"
    );
    assert_eq!(
        upgrade("vgpu@*.service", from),
        "vgpu: running guests keep their version; when they may stop: systemctl restart vgpu@*\n"
    );
    assert_eq!(upgrade("none", from), "");
    assert_eq!(upgrade("vgpu.service", first), "");
}

/// Without the command, Ollama's service could not start any more.
#[test]
fn a_removal_takes_the_plugin_out_of_ollama() {
    const DROP_IN: &str = "etc/systemd/system/ollama.service.d/vgpu.conf";
    for (name, removal, upgrade) in [
        ("debian/vgpu.prerm", "remove", "upgrade"),
        ("rpm/vgpu.preun", "0", "1"),
    ] {
        let mut script = PackageScript::new(name);
        let root = script.at("root");
        let drop_in = root.join(DROP_IN);
        fs::create_dir_all(drop_in.parent().expect("a folder")).expect("a folder");
        // A package of RPM has no other root.
        let of_rpm = script
            .text
            .replace("=/etc/systemd", &format!("={}/etc/systemd", root.display()));
        script.text = of_rpm;
        let write = |text: &str| fs::write(&drop_in, text).expect("a file");
        let ours = "[Service]\nExecStartPre=/usr/bin/vgpu wait\nRestart=always\n";
        for (argument, text, removes, called) in [
            (removal, ours, true, true),
            (removal, ours, false, true),
            (
                removal,
                "[Service]\nExecStartPre=/opt/vgpu/bin/vgpu wait\n",
                true,
                false,
            ),
            (upgrade, ours, true, false),
        ] {
            write(text);
            // The command may fail, such as where Ollama is in another folder.
            let rest = match removes {
                true => format!("rm {}", drop_in.display()),
                false => "exit 1".into(),
            };
            script.program("vgpu", &rest);
            let (calls, said) = script.run(&[argument], &root);
            assert_eq!(
                calls.contains("vgpu uninstall"),
                called,
                "{name}: {calls} {said}"
            );
            assert_eq!(drop_in.exists(), !called, "{name} {argument}: {text}");
        }
    }
}

#[test]
fn a_purge_removes_what_the_service_has_written() {
    let script = PackageScript::new("debian/vgpu.postrm");
    let root = script.at("root");
    let kernels = root.join("var/cache/vgpu/kernels");
    for folder in [&kernels, &root.join("etc/vgpu"), &root.join("run/vgpu")] {
        fs::create_dir_all(folder).expect("a folder");
    }
    fs::write(kernels.join("one.cubin"), "").expect("a file");
    script.run(&["remove"], &root);
    assert!(kernels.exists());
    let left = |folder: &str| {
        let entries = fs::read_dir(root.join(folder)).expect("a folder");
        entries.count()
    };
    script.run(&["purge"], &root);
    assert_eq!(["var/cache", "etc", "run"].map(left), [0, 0, 0]);
    // Certificates are the administrator's.
    fs::create_dir_all(root.join("etc/vgpu/certs")).expect("a folder");
    script.run(&["purge"], &root);
    assert!(root.join("etc/vgpu/certs").exists());
}
