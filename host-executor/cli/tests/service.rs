//! `vgpu` under a service manager: exit statuses, the units, and `vgpu fd-store`.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::TIMEOUT;
use rustix::process::{Pid, Signal, kill_process};
use served::program::copy_program;
use served::{Scratch, vgpu};

/// `EX_CONFIG` of `sysexits.h`.
const EX_CONFIG: i32 = 78;

#[test]
fn mistakes_of_the_configuration_have_their_own_exit_status() {
    let scratch = Scratch::new("exit-status");
    let file = |name: &str, text: &str| {
        let path = scratch.path().join(name);
        fs::write(&path, text).expect("a file");
        path.display().to_string()
    };
    let unknown_key = file("key.toml", "listne = \"unix:/tmp/x\"\n");
    let quota = file(
        "quota.toml",
        "[engine]\nmemory = \"1M\"\n[[guest]]\nname = \"a\"\nmemory = \"1G\"\nusers = [0]\n",
    );
    let absent = scratch.path().join("absent.toml").display().to_string();
    let status = |arguments: &[&str]| {
        let output = vgpu(arguments)
            .stdin(Stdio::null())
            .output()
            .expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), text)
    };
    for config in [&unknown_key, &quota, &absent] {
        let (code, text) = status(&["serve", "--config", config]);
        assert_eq!(code, Some(EX_CONFIG), "{text}");
    }
    let (code, text) = status(&["serve", "--config", "/dev/null", "--log", "a=b=c"]);
    assert_eq!(code, Some(EX_CONFIG), "{text}");
    // Everything else may be mended without a change of the configuration.
    let blocked = file("not-a-folder", "");
    let (code, text) = status(&[
        "serve",
        "--config",
        "/dev/null",
        "--memory",
        "1M",
        "--listen",
        &format!("unix:{blocked}/vgpu.sock"),
    ]);
    assert_eq!(code, Some(1), "{text}");
}

#[test]
fn worker_of_another_version_refuses_its_supervisor() {
    let run = |version: &[&str]| {
        let fixed = [
            "serve-guest",
            "--worker=1",
            "--engine=cpu",
            "--threads=1",
            "--share-weights=off",
            "--log-format=text",
        ];
        let output = vgpu(&[&fixed, version].concat())
            .stdin(Stdio::null())
            .output()
            .expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), text)
    };
    let own = env!("CARGO_PKG_VERSION");
    let (is_good, text) = run(&["--supervisor=0.0.9"]);
    assert!(
        !is_good && text.contains("0.0.9") && text.contains(own),
        "{text}"
    );
    let (is_good, text) = run(&[]);
    assert!(!is_good && text.contains("an earlier version"), "{text}");
    // The same version goes on, and ends because nobody is at the other end of its input.
    let (is_good, text) = run(&[&format!("--supervisor={own}")]);
    assert!(is_good, "{text}");
}

/// An upgrade replaces the program while `vgpu fd-store` runs.
#[test]
fn fd_store_survives_the_replacement_of_its_program() {
    let scratch = Scratch::new("fd-store-upgrade");
    let program = scratch.path().join("vgpu");
    copy_program(&program);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("permissions");
    let runs = scratch.path().join("runs");
    // An executor that ends at once, and says so in a file.
    let script = format!("echo run >> {}; exit 1", runs.display());
    let mut store = Command::new(&program)
        .args(["fd-store", "--", "/bin/sh", "-c", &script])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let count = || fs::read_to_string(&runs).map_or(0, |text| text.lines().count());
    let start = Instant::now();
    let mut wait_for = |wanted: usize| {
        while count() < wanted {
            let ended = store.try_wait().expect("a child");
            assert!(ended.is_none(), "fd-store has ended with {ended:?}");
            assert!(start.elapsed() < TIMEOUT, "{} runs", count());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait_for(1);
    fs::remove_file(&program).expect("the program is there");
    let before = count();
    wait_for(before + 2);
    kill_process(Pid::from_child(&store), Signal::TERM).expect("a process");
    store.wait().expect("a child");
}

fn unit(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy/host")
        .join(name)
}

const UNITS: [&str; 2] = ["vgpu.service", "vgpu@.service"];

/// What keeps the files of virtual machines: see the comments in the units.
#[test]
fn units_never_give_up() {
    for name in UNITS {
        let text = fs::read_to_string(unit(name)).expect("a unit");
        let mut section = "";
        let settings: Vec<(&str, &str)> = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| match line.starts_with('[') {
                true => {
                    section = line;
                    None
                }
                false => Some((section, line)),
            })
            .collect();
        for wanted in [
            ("[Unit]", "StartLimitIntervalSec=0"),
            ("[Service]", "Restart=always"),
            ("[Service]", "WatchdogSec=60"),
            ("[Service]", "RestartSteps=8"),
            ("[Service]", "RestartMaxDelaySec=10s"),
            ("[Service]", "FileDescriptorStorePreserve=yes"),
        ] {
            assert!(settings.contains(&wanted), "{name}: {wanted:?}");
        }
        assert!(
            !settings
                .iter()
                .any(|(_, line)| line.starts_with("RestartPrevent"))
        );
    }
}

/// The script that Debian runs after it has unpacked a new version: a configuration that the new
/// version rejects leaves the old executor running.
#[test]
fn an_upgrade_restarts_the_service_only_with_a_configuration_that_is_valid() {
    let scratch = Scratch::new("postinst");
    let at = |name: &str| scratch.path().join(name);
    let (programs, systemd, config) = (at("bin"), at("systemd"), at("vgpu.toml"));
    for folder in [&programs, &systemd] {
        fs::create_dir(folder).expect("a folder");
    }
    // What the script calls, other than `vgpu`, writes down its arguments.
    let calls = at("calls");
    let recorder = format!("#!/bin/sh\necho \"${{0##*/}} $*\" >> {}\n", calls.display());
    for name in ["systemctl", "groupadd", "useradd"] {
        let path = programs.join(name);
        fs::write(&path, &recorder).expect("a program");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
    }
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_vgpu"), programs.join("vgpu")).expect("a link");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/debian/vgpu.postinst");
    let script = fs::read_to_string(source).expect("the script");
    for path in ["/run/systemd/system", "/etc/vgpu/vgpu.toml"] {
        assert!(script.contains(path), "the script does not look at {path}");
    }
    let script = script
        .replace("/run/systemd/system", systemd.to_str().expect("text"))
        .replace("/etc/vgpu/vgpu.toml", config.to_str().expect("text"));
    let path = std::env::var("PATH").expect("a path");
    let run = |script: &str| {
        let _ = fs::remove_file(&calls);
        let output = Command::new("sh")
            .args(["-c", script, "postinst", "configure"])
            .env("PATH", format!("{}:{path}", programs.display()))
            .output()
            .expect("a shell");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let called = fs::read_to_string(&calls).expect("calls");
        assert!(called.contains("systemctl daemon-reload"), "{called}");
        (called.contains("systemctl try-restart vgpu.service"), said)
    };
    let configure = || run(&script);
    assert!(configure().0, "without a configuration");
    fs::write(&config, "[engine]\nmemory = \"1G\"\n").expect("a file");
    assert!(configure().0, "with a valid configuration");
    fs::write(&config, "[engine]\nmemroy = \"1G\"\n").expect("a file");
    let (is_restarted, said) = configure();
    assert!(!is_restarted, "with a mistake in the configuration");
    assert!(said.contains("memroy"), "{said}");
    assert!(said.contains("vgpu.service was not restarted"), "{said}");
    // The unit of a virtual machine does not start: the others are restarted all the same.
    fs::remove_file(&config).expect("our file");
    let failing = format!(
        "systemctl() {{ {}/systemctl \"$@\"; [ \"$1\" != try-restart ]; }}\n{script}",
        programs.display()
    );
    let (is_restarted, said) = run(&failing);
    assert!(is_restarted, "{said}");
    assert!(said.contains("vgpu@*.service did not start"), "{said}");
}

/// `systemd-analyze verify`, where this machine has it. The program's path is replaced, because the
/// check demands that the program exists.
#[test]
fn units_are_valid() {
    let version = Command::new("systemd-analyze").arg("--version").output();
    let Ok(version) = version else {
        return;
    };
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let number = version
        .split_whitespace()
        .nth(1)
        .and_then(|word| word.parse().ok());
    let number: u32 = number.expect("systemd-analyze says its version");
    // systemd 254 has introduced these.
    let newer = [
        "RestartSteps",
        "RestartMaxDelaySec",
        "FileDescriptorStorePreserve",
    ];
    let scratch = Scratch::new("units");
    for name in UNITS {
        let text = fs::read_to_string(unit(name)).expect("a unit");
        let verify = |text: &str| {
            let path = scratch.path().join(name.replace('@', "@vm1"));
            fs::write(
                &path,
                text.replace("/usr/bin/vgpu", env!("CARGO_BIN_EXE_vgpu")),
            )
            .expect("a file");
            let output = Command::new("systemd-analyze")
                .args(["verify", "--man=no", "--recursive-errors=no"])
                .arg(&path)
                .output()
                .expect("systemd-analyze runs");
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let is_expected =
                |line: &&str| number < 254 && newer.iter().any(|key| line.contains(key));
            let unexpected: Vec<String> = said
                .lines()
                .filter(|line| line.contains(scratch.path().to_str().expect("text")))
                .filter(|line| !is_expected(line))
                .map(str::to_owned)
                .collect();
            (output.status.success(), unexpected)
        };
        let (_, unexpected) = verify(&text);
        assert!(unexpected.is_empty(), "{unexpected:#?}");
        // The check sees a mistake.
        let (_, unexpected) = verify(&text.replace("RuntimeDirectoryMode", "RuntimeFolderMode"));
        assert!(!unexpected.is_empty());
    }
}
