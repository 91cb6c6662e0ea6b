//! `vgpu` under a service manager: exit statuses, the units, and `vgpu fd-store`.

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../tests/machine/mod.rs"]
mod machine;
mod served;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Guest, TIMEOUT};
use machine::{Machine, wait_for};
use rustix::fs::Gid;
use rustix::process::{Pid, Signal, kill_process};
use served::program::copy_program;
use served::workers::children;
use served::{Scratch, Serve, vgpu};

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

/// `vgpu fd-store` ends when it is told to end, and by no other signal. The executor receives the
/// signals that are for it, each of them.
#[test]
fn fd_store_passes_signals_on() {
    let scratch = Scratch::new("fd-store-signals");
    let seen = scratch.path().join("seen");
    let script = format!(
        "for s in HUP TERM; do trap \"echo $s >> {0}\" $s; done; ulimit -Sn >> {0}; \
         while :; do sleep 0.05; done",
        seen.display()
    );
    let mut store = Command::new("/bin/sh");
    store
        .args([
            "-c",
            "ulimit -Sn 64; exec \"$0\" fd-store -- /bin/sh -c \"$1\"",
        ])
        .arg(env!("CARGO_BIN_EXE_vgpu"))
        .arg(&script)
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let mut store = store.spawn().expect("it starts");
    let pid = Pid::from_child(&store);
    let seen = || fs::read_to_string(&seen).unwrap_or_default();
    let mut wait_until = |what: &str, is_there: &dyn Fn(&str) -> bool| {
        let start = Instant::now();
        while !is_there(&seen()) {
            let ended = store.try_wait().expect("a child");
            assert!(ended.is_none(), "{what}: fd-store has ended with {ended:?}");
            assert!(start.elapsed() < TIMEOUT, "{what}: {}", seen());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let count = |text: &str, signal: &str| text.lines().filter(|line| *line == signal).count();
    wait_until("a limit", &|text| text.ends_with('\n'));
    let limit = seen();
    let limit = limit.trim();
    let hard = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let is_raised = limit == "unlimited" || limit.parse().is_ok_and(|limit: u64| limit > 64);
    assert!(is_raised || hard.is_some_and(|hard| hard <= 64), "{limit}");
    let send = |signal| kill_process(pid, signal).expect("a process");
    send(Signal::QUIT);
    send(Signal::USR1);
    send(Signal::HUP);
    wait_until("SIGHUP", &|text| count(text, "HUP") == 1);
    send(Signal::HUP);
    wait_until("a second SIGHUP", &|text| count(text, "HUP") == 2);
    send(Signal::TERM);
    wait_until("SIGTERM", &|text| count(text, "TERM") == 1);
    // Later than signals that count as one.
    std::thread::sleep(Duration::from_millis(600));
    send(Signal::TERM);
    wait_until("a second SIGTERM", &|text| count(text, "TERM") == 2);
    // This executor never ends by itself.
    let start = Instant::now();
    while store.try_wait().expect("a child").is_none() {
        assert!(start.elapsed() < TIMEOUT, "the executor is not killed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The files of `vm1` in the output of `vgpu dump`.
const KEPT: &str =
    "files kept by the service manager: vgpu-vm1-bell, vgpu-vm1-line, vgpu-vm1-memory";

/// A mistake in the configuration, or a virtual machine that is taken out of it for a moment, does
/// not cost the machine its device.
#[test]
fn machine_that_is_missing_in_the_configuration_keeps_its_device() {
    let scratch = Scratch::new("missing-machine");
    let at = |name: &str| scratch.path().join(name);
    let (config, control, socket) = (at("vgpu.toml"), at("control.sock"), at("vm1.sock"));
    let configure = |silence: Option<u32>| {
        let machine = silence.map_or(String::new(), |silence| {
            format!(
                "[[guest]]\nname = \"vm1\"\n\
                 vm = {{ socket = {socket:?}, window = \"64M\", silence = {silence} }}\n"
            )
        });
        fs::write(&config, machine).expect("a configuration");
    };
    configure(Some(0));
    let mut command = vgpu(&["fd-store", "--", env!("CARGO_BIN_EXE_vgpu"), "serve"]);
    command
        .args(["--threads", "1", "--memory", "64M"])
        .arg("--listen")
        .arg(format!("unix:{}", scratch.socket().display()))
        .args([Path::new("--config"), &config])
        .args([Path::new("--control"), &control]);
    let serve = Serve::of(command);
    let ask = |what: &str| {
        let mut command = vgpu(&[what, "--control"]);
        let output = command.arg(&control).output().expect("it starts");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let reload = |silence: Option<u32>| {
        configure(silence);
        let said = ask("reload");
        assert!(said.contains("the configuration was reloaded"), "{said}");
    };
    let computes = |machine: &Machine| {
        let mut guest: Guest = machine.guest();
        let buffer = guest.alloc_with(&[7; 64]);
        assert_eq!(guest.read(buffer, 0, 64), [7; 64]);
    };
    let machine = Machine::plug(&socket);
    computes(&machine);
    wait_for("the files to be kept", || ask("dump").contains(KEPT));
    let executor = || children(serve.child.id()).first().copied();
    let first = executor().expect("an executor");

    configure(None);
    kill_process(Pid::from_raw(first).expect("a pid"), Signal::TERM).expect("it runs");
    wait_for("the next executor", || {
        executor().is_some_and(|pid| pid != first) && !ask("dump").is_empty()
    });
    assert!(!socket.exists(), "the machine is served");
    assert!(ask("dump").contains(KEPT), "{}", ask("dump"));
    reload(Some(0));
    computes(&machine);
    // A reload without the machine, and one that opens its listener again.
    reload(None);
    assert!(!socket.exists(), "the machine is served");
    reload(Some(0));
    computes(&machine);
    reload(Some(60));
    computes(&machine);

    // Nobody waits for a QEMU that has ended.
    reload(None);
    drop(machine);
    wait_for("the files to be released", || {
        let dump = ask("dump");
        !dump.is_empty() && !dump.contains("files kept")
    });
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    for said in [
        "the configuration does not have this virtual machine, whose QEMU is running",
        "vgpu-vm1-memory, vgpu-vm1-bell, vgpu-vm1-line",
        "QEMU has ended; the configuration does not have this virtual machine",
    ] {
        assert!(log.contains(said), "{said:?} is not in {log}");
    }
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

/// What a service manager does not keep is said with numbers and the consequence.
#[test]
fn fd_store_that_keeps_too_little_is_reported() {
    let scratch = Scratch::new("fd-store-small");
    let notify = scratch.path().join("notify");
    let _manager = std::os::unix::net::UnixDatagram::bind(&notify).expect("a socket");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let run = |variables: &[(&str, &str)]| {
        let mut command = vgpu(&["serve", "--threads", "1", "--memory", "64M", "--vm", &vm]);
        command.env_remove("NOTIFY_SOCKET").env_remove("FDSTORE");
        command.args(["--config", "/dev/null"]);
        command.envs(variables.iter().copied());
        let serve = Serve::of(command);
        let machine = Machine::plug(&socket);
        machine.guest();
        serve.signal(Signal::TERM);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
        log
    };
    let lost = "the virtual machine has no vGPU until its QEMU is started again";
    let says = |log: &str, wanted: &str| {
        let line = log.lines().find(|line| line.contains(wanted));
        line.is_some_and(|line| line.contains("WARN") && line.contains(lost))
    };
    let log = run(&[]);
    let none = "1 virtual machines have 3 files, and no service manager keeps them";
    assert!(says(&log, none), "{log}");
    let path = notify.to_str().expect("text");
    let log = run(&[("NOTIFY_SOCKET", path), ("FDSTORE", "2")]);
    let small = "have 3 files, and the service manager keeps at most 2 (FileDescriptorStoreMax=)";
    assert!(says(&log, small), "{log}");
    let refused = "vgpu-vm1-line may not be kept: it is file 3 of this process";
    assert!(says(&log, refused), "{log}");
    let log = run(&[("NOTIFY_SOCKET", path), ("FDSTORE", "3")]);
    assert!(!log.contains(lost), "{log}");
    // Nobody receives.
    let gone = scratch.path().join("gone").display().to_string();
    let log = run(&[("NOTIFY_SOCKET", &gone)]);
    let failed = "vgpu-vm1-memory may not be kept: file 1 cannot be passed to the service manager";
    assert!(says(&log, failed), "{log}");
}

fn unit(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy/host")
        .join(name)
}

const UNITS: [&str; 2] = ["vgpu.service", "vgpu@.service"];

/// The settings of a unit, each with its section.
fn settings_of(text: &str) -> Vec<(&str, &str)> {
    let mut section = "";
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let settings = lines.filter_map(|line| match line.starts_with('[') {
        true => {
            section = line;
            None
        }
        false => Some((section, line)),
    });
    settings.collect()
}

/// What keeps the files of virtual machines: see the comments in the units.
#[test]
fn units_never_give_up() {
    for name in UNITS {
        let text = fs::read_to_string(unit(name)).expect("a unit");
        let settings = settings_of(&text);
        for wanted in [
            ("[Unit]", "StartLimitIntervalSec=0"),
            ("[Service]", "Restart=always"),
            ("[Service]", "WatchdogSec=60"),
            ("[Service]", "RestartSteps=8"),
            ("[Service]", "RestartMaxDelaySec=2s"),
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

/// Containers mount the folder of the sockets, and would keep a deleted one.
#[test]
fn units_keep_the_folder_of_the_sockets() {
    for name in UNITS {
        let text = fs::read_to_string(unit(name)).expect("a unit");
        let wanted = ("[Service]", "RuntimeDirectoryPreserve=yes");
        assert!(settings_of(&text).contains(&wanted), "{name}");
    }
}

/// What a unit lacks for a GPU, for the folders that the executor writes, and for the boot order.
fn missing_for_a_gpu_host(text: &str) -> Vec<String> {
    let settings = settings_of(text);
    let wanted = [
        "ExecStartPre=-+/usr/bin/nvidia-modprobe -c 0 -u",
        "TimeoutStartSec=35min",
        "CacheDirectory=vgpu",
        "Environment=VGPU_CACHE=/var/cache/vgpu",
    ];
    let lacks = |line: &&str| !settings.contains(&("[Service]", *line));
    let lacking = wanted.into_iter().filter(lacks);
    let mut missing: Vec<String> = lacking.map(|line| format!("no {line}")).collect();
    let before: Vec<&str> = { settings.iter() }
        .filter_map(|(section, line)| {
            line.strip_prefix("Before=")
                .filter(|_| *section == "[Unit]")
        })
        .flat_map(str::split_whitespace)
        .collect();
    for unit in [
        "libvirtd.service",
        "virtqemud.service",
        "libvirt-guests.service",
        "pve-guests.service",
    ] {
        if !before.contains(&unit) {
            missing.push(format!("not before {unit}"));
        }
    }
    // The first four hide the devices of GPUs, ProtectClock= in systemd before 254. With the next
    // one the unit does not start on a host that lacks one of the groups. The last flag would
    // override the configuration.
    for (_, line) in &settings {
        let is_harmful = [
            "DeviceAllow=",
            "DevicePolicy=",
            "PrivateDevices=",
            "ProtectClock=",
            "SupplementaryGroups=",
        ]
        .iter()
        .any(|key| line.starts_with(key));
        if is_harmful || line.starts_with("ExecStart=") && line.contains("--control") {
            missing.push(format!("it has {line}"));
        }
    }
    missing
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
    // The script, its arguments for an upgrade and for the first installation, and what stays.
    for (name, from, first, kept) in [
        (
            "debian/vgpu.postinst",
            &["configure", "0.0.9"][..],
            &["configure", ""][..],
            "vgpu 0.0.9",
        ),
        ("rpm/vgpu.post", &["2"], &["1"], "their version"),
    ] {
        upgrade_leaves_running_guests_alone(name, from, first, kept);
    }
}

fn upgrade_leaves_running_guests_alone(name: &str, from: &[&str], first: &[&str], kept: &str) {
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
        format!(
            "vgpu: running guests keep {kept}; when they may stop: vgpu check-config && systemctl \
             restart vgpu\n"
        )
    );
    assert_eq!(
        upgrade("vgpu@*.service", from),
        format!("vgpu: running guests keep {kept}; when they may stop: systemctl restart vgpu@*\n")
    );
    assert_eq!(upgrade("none", from), "");
    assert_eq!(upgrade("vgpu.service", first), "");
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

/// The settings that a host with a GPU and virtual machines needs, and what is kept on disk.
#[test]
fn units_are_for_hosts_with_gpus_and_virtual_machines() {
    for name in UNITS {
        let text = fs::read_to_string(unit(name)).expect("a unit");
        let missing = missing_for_a_gpu_host(&text);
        assert!(missing.is_empty(), "{name}: {missing:#?}");
        // The check sees what is wrong.
        for (good, bad) in [
            ("CacheDirectory=vgpu", "CacheDirectory=other"),
            ("pve-guests.service", ""),
            ("LockPersonality=", "ProtectClock="),
            ("Group=vgpu", "SupplementaryGroups=video render"),
            (" serve", " serve --control /run/vgpu/control.sock"),
        ] {
            assert!(text.contains(good), "{name}: {good}");
            let found = missing_for_a_gpu_host(&text.replace(good, bad));
            assert_eq!(found.len(), 1, "{name}: {bad}: {found:?}");
        }
    }
    // The example for weights is in the folder that ProtectSystem= leaves writable.
    let example = fs::read_to_string(unit("vgpu.toml")).expect("the example");
    let cache = example.lines().find(|line| line.starts_with("#cache = "));
    let cache = cache.expect("an example for weights");
    assert!(cache.contains("\"/var/cache/vgpu/"), "{cache}");
    // The groups of GPU devices come from sysusers.d and the package's script.
    let users = fs::read_to_string(unit("vgpu.sysusers")).expect("the users");
    for group in ["video", "render"] {
        let line = format!("m vgpu {group}");
        assert!(users.lines().any(|one| one == line), "no {line}");
    }
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
