//! Starts: exit statuses, versions that differ, and sockets.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Stdio;

use rustix::fs::Gid;
use rustix::process::Signal;

use crate::served::{Scratch, Serve, vgpu};

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
    let own = env!("VGPU_VERSION");
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

#[test]
fn process_of_a_virtual_machine_of_another_version_refuses_its_supervisor() {
    let scratch = Scratch::new("vm-version");
    let vm = format!("vm1,socket={}", scratch.path().join("vm1.sock").display());
    let run = |command: &[&str], version: &str| {
        let output = vgpu(command)
            .arg(version)
            .args(["--", "true"].iter().filter(|_| command[0] == "fd-store"))
            .output()
            .expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{text}");
        text
    };
    let serve = [
        "serve",
        "--config",
        "/dev/null",
        "--isolated-machine",
        "--vm",
        &vm,
    ];
    for command in [&serve[..], &["fd-store"]] {
        let text = run(command, "--supervised=0.0.9");
        let own = env!("VGPU_VERSION");
        assert!(text.contains("0.0.9") && text.contains(own), "{text}");
    }
    // Earlier versions did not say theirs.
    let text = run(&serve, "--supervised");
    assert!(text.contains("an earlier version"), "{text}");
}

/// The sockets of virtual machines are for those whom their options allow: from the file, from a
/// reload (in the sandbox), and in a process of their own.
#[test]
fn socket_of_a_virtual_machine_has_its_mode_and_group() {
    let scratch = Scratch::new("vm-group");
    let at = |name: &str| scratch.path().join(name);
    let (config, control) = (at("vgpu.toml"), at("control.sock"));
    // A process without privileges gives files to its own groups only. The superuser, who loses the
    // privileges at the start, makes one up.
    let is_root = rustix::process::geteuid().is_root();
    let own = rustix::process::getgroups().expect("groups");
    let other = own
        .into_iter()
        .find(|gid| *gid != rustix::process::getegid());
    let group = match is_root {
        true => Some(Gid::from_raw(64_321)),
        false => other,
    };
    let configure = |names: &[&str], group: Option<&str>| {
        let group = group.map_or(String::new(), |group| format!(", group = {group:?}"));
        let machines = names.iter().map(|name| {
            let socket = at(name);
            format!(
                "[[guest]]\nname = {name:?}\nmemory = \"16M\"\n\
                 vm = {{ socket = {socket:?}, window = \"64M\", mode = \"0622\"{group} }}\n"
            )
        });
        fs::write(&config, machines.collect::<String>()).expect("a configuration");
    };
    let command = |more: &[&str]| {
        let mut command = vgpu(&["serve", "--threads", "1", "--memory", "64M"]);
        command.args(more);
        command.args([
            Path::new("--config"),
            &config,
            Path::new("--control"),
            &control,
        ]);
        if let Some(group) = group.filter(|_| is_root) {
            // SAFETY: between `fork` and `exec` the closure makes one system call, and allocates
            // nothing.
            unsafe {
                std::os::unix::process::CommandExt::pre_exec(&mut command, move || {
                    rustix::thread::set_thread_groups(&[group])?;
                    Ok(())
                });
            }
        }
        command
    };
    let is_as_configured = |name: &str| {
        let file = fs::metadata(at(name)).expect("a socket");
        assert_eq!(file.permissions().mode() & 0o777, 0o622, "{name}");
        if let Some(group) = group {
            assert_eq!(file.gid(), group.as_raw(), "{name}");
        }
    };
    let number = group.map(|group| group.as_raw().to_string());
    for isolation in [&[][..], &["--isolate", "--guest-memory", "16M"]] {
        configure(&["vm1"], number.as_deref());
        let serve = Serve::of(command(isolation));
        assert!(serve.ready.contains("vm1"), "{}", serve.ready);
        is_as_configured("vm1");
        if isolation.is_empty() {
            configure(&["vm1", "vm2"], number.as_deref());
            let mut reload = vgpu(&["reload", "--control"]);
            let output = reload.arg(&control).output().expect("it starts");
            assert!(output.status.success(), "{output:?}");
            is_as_configured("vm2");
        }
        serve.signal(Signal::TERM);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
    }
    configure(&["vm1"], Some("no-such-group"));
    let output = command(&[]).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains("/etc/group has no group no-such-group"),
        "{said}"
    );
    assert!(!at("vm1").exists());
}

/// A unit of systemd has the control socket of `vgpu ps` without a flag, and the configuration may
/// name another one.
#[test]
fn service_has_a_control_socket_in_its_runtime_directory() {
    let scratch = Scratch::new("service-control");
    let at = |name: &str| scratch.path().join(name);
    let config = at("vgpu.toml");
    let serves = |text: &str, control: &Path| {
        fs::write(&config, text).expect("a configuration");
        let mut command = vgpu(&["serve", "--threads", "1", "--memory", "64M", "--listen"]);
        command.arg(format!("unix:{}", scratch.socket().display()));
        command.arg("--config").arg(&config);
        command.env("RUNTIME_DIRECTORY", scratch.path());
        let serve = Serve::of(command);
        assert!(serve.ready.starts_with("ready "), "{}", serve.ready);
        let mut ps = vgpu(&["ps", "--control"]);
        let output = ps.arg(control).output().expect("it starts");
        serve.signal(Signal::TERM);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
        output.status.success()
    };
    assert!(serves("", &at("control.sock")));
    let other = format!("[control]\nsocket = {:?}\n", at("other.sock"));
    assert!(serves(&other, &at("other.sock")));
    assert!(!serves(&other, &at("control.sock")));
}
