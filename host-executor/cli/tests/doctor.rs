//! `vgpu doctor` on hosts that lack something, made of files for the test.

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../../tests/common/mod.rs"]
mod ggml;
mod served;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use common::TIMEOUT;
use rustix::process::geteuid;
use served::program::copy_program;
use served::{Scratch, Serve, vgpu};
use vgpu_executor::status::Status;
use vgpu_executor::{Violation, control};
use vgpu_transport::ir::Capabilities;
use vgpu_transport::link::HostEnd as _;
use vgpu_transport::link::unix::{ListenOptions, Listener};
use vgpu_transport::wire::{
    DeviceCount, HostVersions, Offer, ProtocolVersion, Reply, Request, VersionMismatch,
    VersionRange,
};

/// The first words of the commands that may be the last line.
const COMMANDS: [&str; 12] = [
    "LD_DEBUG=files",
    "VGPU_LOG=debug",
    "export",
    "journalctl",
    "newgrp",
    "nvidia-smi",
    "sudo",
    "sudoedit",
    "systemctl",
    "timedatectl",
    "unset",
    "vgpu",
];

/// The beginnings of what is no command: no command of this machine does it, or no command of every
/// distribution.
const NO_COMMANDS: [&str; 4] = [
    "add the components ",
    "end vgpu serve, and start it again",
    "install ",
    "start the container with ",
];

const SOCKET: &str = "run/vgpu/vgpu.sock";
const DEBIAN: &str = "ID=debian\nVERSION_ID=\"13\"\n";

/// The file system of a machine.
struct Machine(Scratch);

/// What `vgpu doctor` has said.
struct Said {
    text: String,
    is_well: bool,
}

impl Said {
    /// The last line.
    fn last(&self) -> &str {
        self.text.lines().next_back().unwrap_or_default()
    }

    /// After a failure the last line is a command, for this machine or another one.
    fn expect_command(&self) {
        let Some(next) = self.last().strip_prefix("next: ") else {
            assert!(self.is_well, "{}", self.text);
            return;
        };
        let place = ["on the host: ", "on the executor's machine: "];
        let command = place.iter().find_map(|place| next.strip_prefix(place));
        let command = command.unwrap_or(next);
        let first = command.split(' ').next().unwrap_or_default();
        let is_known =
            COMMANDS.contains(&first) || NO_COMMANDS.iter().any(|text| command.starts_with(text));
        assert!(is_known, "{next:?} is no command");
    }
}

impl Machine {
    fn new(test: &str) -> Machine {
        let machine = Machine(Scratch::new(test));
        machine.write("etc/os-release", DEBIAN);
        machine
    }

    /// A machine that is a host.
    fn host(test: &str, config: &str) -> Machine {
        let machine = Machine::new(test);
        machine.write("etc/vgpu/vgpu.toml", config);
        machine
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.path(file);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, text).expect("a file");
    }

    /// Adds an NVIDIA card.
    fn card(&self, driver: Option<&str>) {
        let folder = "sys/bus/pci/devices/0000:01:00.0";
        for (file, text) in [
            ("vendor", "0x10de\n"),
            ("device", "0x2204\n"),
            ("class", "0x030000\n"),
        ] {
            self.write(&format!("{folder}/{file}"), text);
        }
        if let Some(driver) = driver {
            let target = format!("../../../bus/pci/drivers/{driver}");
            symlink(target, self.path(folder).join("driver")).expect("a link");
        }
    }

    /// Adds the library of NVIDIA's driver. `start`: what it does when it is loaded.
    fn libcuda(&self, start: &str, version: u32, init: u32) {
        let folder = self.path("usr/lib64");
        fs::create_dir_all(&folder).expect("a folder");
        let source = format!(
            "#include <stdlib.h>\n#include <unistd.h>\n\
             __attribute__((constructor)) static void start(void) {{ {start} }}\n\
             int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}\n\
             int cuInit(unsigned flags) {{ return {init} + (int)flags; }}\n"
        );
        library(&folder.join("libcuda.so.1"), &source);
    }

    /// Gives the machine systemd with the unit of the executor in this state.
    fn systemd(&self, state: &str) {
        let all = format!("LoadState=loaded\nNRestarts=0\n{state}");
        self.write("bin/state", &all);
        self.systemctl(&format!("cat {}", self.path("bin/state").display()));
    }

    /// Gives the machine systemd with this script as `systemctl`.
    fn systemctl(&self, script: &str) {
        for folder in ["run/systemd/system", "bin"] {
            fs::create_dir_all(self.path(folder)).expect("a folder");
        }
        let file = self.path("bin/systemctl");
        // Another process writes the file: see `copy_program`.
        let mut shell = Command::new("sh")
            .args(["-c", "cat > \"$1\" && chmod +x \"$1\"", "sh"])
            .arg(&file)
            .stdin(Stdio::piped())
            .spawn()
            .expect("a shell");
        let script = format!("#!/bin/sh\n{script}\n");
        let mut stdin = shell.stdin.take().expect("piped");
        stdin.write_all(script.as_bytes()).expect("it reads");
        drop(stdin);
        assert!(shell.wait().expect("it ends").success());
    }

    fn doctor(&self, more: &[&str]) -> Said {
        self.run(&mut vgpu(&[]), more)
    }

    fn run(&self, command: &mut Command, more: &[&str]) -> Said {
        let search = std::env::var("PATH").unwrap_or_default();
        let search = format!("{}:{search}", self.path("bin").display());
        let output = command
            .args(["doctor", "--root"])
            .arg(self.0.path())
            .args(more)
            .env("PATH", search)
            .env_remove("VGPU_ENDPOINT")
            .env_remove("GGML_BACKEND_PATH")
            .output()
            .expect("it starts");
        let said = Said {
            text: String::from_utf8(output.stdout).expect("text"),
            is_well: output.status.success(),
        };
        said.expect_command();
        said
    }
}

/// Whether a line of this outcome about this part contains the words.
fn has(said: &Said, start: &str, words: &str) -> bool {
    let mut lines = said.text.lines();
    lines.any(|line| {
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        line.starts_with(start) && line.contains(words)
    })
}

#[test]
fn a_card_without_its_driver() {
    for (driver, words) in [
        (None, "has no driver"),
        (Some("nouveau"), "has the driver nouveau"),
    ] {
        let machine = Machine::host("no-driver", "engine.kind = \"auto\"\n");
        machine.card(driver);
        let said = machine.doctor(&[]);
        assert!(has(&said, "FAIL gpu", words), "{}", said.text);
        // The driver is in no component that every Debian has.
        let add = "next: add the components main contrib non-free non-free-firmware of Debian ";
        assert!(said.last().starts_with(add), "{}", said.text);
        for (file, text) in [
            (
                "sources.list.d/debian.sources",
                "Types: deb deb-src\nURIs: http://mirror.example.org/debian\nSuites: trixie\n\
                 Components: main non-free-firmware\n",
            ),
            (
                "sources.list",
                "# deb cdrom:[debian] trixie main\n\
                 deb-src http://mirror.example.org/debian trixie main non-free\n\
                 deb http://mirror.example.org/debian trixie main non-free-firmware\n\
                 deb https://packages.example.org/linux/debian trixie stable\n",
            ),
        ] {
            let file = format!("etc/apt/{file}");
            machine.write(&file, text);
            let said = machine.doctor(&[]);
            let install = "sudo apt install nvidia-driver";
            let next = said.last().strip_prefix("next: ").expect("a failure");
            let edit = next.strip_suffix(&format!(" && sudo apt update && {install}"));
            let edit = edit.expect(next).strip_prefix("sudo ").expect(next);
            // The command makes the next one the last.
            let shell = Command::new("sh").args(["-c", edit]).status();
            assert!(shell.expect("it starts").success(), "{edit}");
            let said = machine.doctor(&[]);
            assert_eq!(said.last(), format!("next: {install}"), "{}", said.text);
            assert!(!said.is_well);
            let changed = fs::read_to_string(machine.path(&file)).expect("it is there");
            let lines = text.lines().zip(changed.lines());
            let changed: Vec<_> = lines.filter(|(old, new)| old != new).collect();
            let [(_, line)] = changed[..] else {
                panic!("{changed:?}")
            };
            assert!(
                line.ends_with(" main contrib non-free non-free-firmware"),
                "{line}"
            );
            fs::remove_file(machine.path(&file)).expect("it is there");
        }
        machine.write("etc/os-release", "ID=ubuntu\nVERSION_ID=\"24.04\"\n");
        let said = machine.doctor(&[]);
        assert_eq!(said.last(), "next: sudo ubuntu-drivers install");
    }
    // Nobody wants to use these.
    for (driver, config) in [
        (None, "engine.kind = \"cpu\"\n"),
        (Some("vfio-pci"), "engine.kind = \"auto\"\n"),
    ] {
        let machine = Machine::host("other-card", config);
        machine.card(driver);
        let said = machine.doctor(&[]);
        assert!(has(&said, "note gpu", "0000:01:00.0"), "{}", said.text);
    }
    // A guest has no executor of its own.
    let machine = Machine::new("guest-card");
    machine.card(None);
    let said = machine.doctor(&[]);
    assert!(has(&said, "note gpu", "has no driver"), "{}", said.text);
}

#[test]
fn a_driver_without_nvrtc() {
    let machine = Machine::host("no-nvrtc", "engine.kind = \"cuda\"\n");
    machine.card(Some("nvidia"));
    let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n";
    machine.write("proc/driver/nvidia/version", version);
    machine.libcuda("", 12_040, 0);
    let said = machine.doctor(&[]);
    assert!(
        has(&said, "ok gpu", "NVIDIA's driver 550.54.15"),
        "{}",
        said.text
    );
    assert!(
        has(&said, "FAIL gpu", "NVRTC is not there"),
        "{}",
        said.text
    );
    assert_eq!(said.last(), "next: sudo apt install libnvrtc12");
    machine.write("etc/os-release", "ID=fedora\nVERSION_ID=42\n");
    let last = machine.doctor(&[]);
    let pip = "next: sudo pip3 install --target /opt/nvrtc nvidia-cuda-nvrtc-cu12 && ";
    assert!(last.last().starts_with(pip), "{}", last.text);
}

/// A configuration with a backend of ggml that does not start.
#[test]
fn a_backend_of_ggml_that_cannot_be_used() {
    let machine = Machine::new("ggml-backend");
    let backend = machine.path("opt/libggml-vulkan.so");
    machine.write("opt/libggml-vulkan.so", "no library");
    let config = format!("engine.kind = \"ggml:{}\"\n", backend.display());
    machine.write("etc/vgpu/vgpu.toml", &config);
    let (said, reason) = (machine.doctor(&[]), "file too short");
    assert!(has(&said, "FAIL config", reason), "{}", said.text);
    assert_eq!(said.text.matches(reason).count(), 1, "{}", said.text);
    assert!(said.last().starts_with("next: sudoedit /"), "{}", said.text);
    assert!(!said.is_well);
}

/// A configuration with a backend of ggml that starts, which a guest can end.
#[test]
fn a_backend_of_ggml_needs_isolated_or_trusted_guests() {
    let machine = Machine::new("ggml-trust");
    let backend = ggml::cached("build-llama-0.3.36/bin/libggml-cpu.so");
    let config = format!("engine.kind = \"ggml:{}\"\n", backend.display());
    for (more, is_noted) in [("", true), ("engine.trust-guests = true\n", false)] {
        machine.write("etc/vgpu/vgpu.toml", &format!("{config}{more}"));
        let said = machine.doctor(&[]);
        assert!(has(&said, "ok config", "engine ggml:"), "{}", said.text);
        let note = "vgpu serve needs --isolate, or engine.trust-guests = true";
        assert_eq!(has(&said, "note config", note), is_noted, "{}", said.text);
    }
}

/// The library beside the driver in the kernel: not there, broken, old, of another version, with a
/// crash, and with a call that never returns.
#[test]
fn a_driver_whose_library_does_not_work() {
    let machine = Machine::host("libcuda", "engine.kind = \"cuda\"\n");
    machine.card(Some("nvidia"));
    let fails = |words: &str, next: &str| {
        let said = machine.doctor(&[]);
        assert!(has(&said, "FAIL gpu libcuda.so.1", words), "{}", said.text);
        assert!(
            said.last().starts_with(&format!("next: {next}")),
            "{}",
            said.text
        );
        assert!(!said.is_well);
    };
    machine.write(
        "etc/apt/sources.list",
        "deb http://mirror.example.org/debian sid non-free\n",
    );
    fails("is not there", "sudo apt install libcuda1");
    machine.write("run/.containerenv", "");
    fails("is not there", "start the container with --gpus all");
    fs::remove_file(machine.path("run/.containerenv")).expect("it is there");
    machine.write("usr/lib64/libcuda.so.1", "no library");
    fails("cannot be loaded: ", "sudo apt install libcuda1");
    machine.libcuda("", 11_040, 0);
    fails(
        "is for CUDA 11.4; the engine needs 12.0",
        "sudo apt install nvidia-driver",
    );
    machine.libcuda("", 12_040, 803);
    fails("are of different versions", "sudo reboot");
    machine.libcuda("", 12_040, 100);
    fails("finds no device", "sudo nvidia-modprobe");
    machine.libcuda("abort();", 12_040, 0);
    fails(
        "the process of the check ended: signal: 6",
        "sudo apt install libcuda1",
    );
    machine.libcuda("for (;;) pause();", 12_040, 0);
    fails("a call of the driver hangs", "sudo dmesg");
    machine.libcuda("", 12_040, 0);
    let said = machine.doctor(&[]);
    assert!(
        has(&said, "ok gpu", "libcuda.so.1: CUDA 12.4"),
        "{}",
        said.text
    );
}

/// A user and a group that no test runs as.
const NOBODY: u32 = 65534;
const GROUP: u32 = 4242;

/// A folder of this machine that only root may enter, for tests of other users.
fn closed_folder() -> PathBuf {
    let folders = ["/root", "/var/cache/ldconfig", "/var/lib/private"].map(PathBuf::from);
    let is_closed = |folder: &PathBuf| {
        let denied = fs::read_dir(folder).err();
        denied.is_some_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
    };
    let mut closed = folders.iter().filter(|folder| is_closed(folder));
    let closed = closed.next();
    closed
        .unwrap_or_else(|| panic!("this user may enter {folders:?}"))
        .clone()
}

/// Root makes a folder of another group and tries it as another user. Any other user may give no
/// folder away, and tries one of root.
#[test]
fn a_user_outside_of_the_group() {
    let machine = Machine::host("group", "");
    let folder = machine.path("run/vgpu");
    let is_root = geteuid().is_root();
    let (user, group) = match is_root {
        true => {
            fs::create_dir_all(&folder).expect("a folder");
            chown(&folder, None, Some(GROUP)).expect("root may");
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o750)).expect("ours");
            (NOBODY, GROUP)
        }
        false => {
            let closed = closed_folder();
            fs::create_dir_all(machine.path("run")).expect("a folder");
            symlink(&closed, &folder).expect("a link");
            let group = fs::metadata(closed).expect("a folder").gid();
            (geteuid().as_raw(), group)
        }
    };
    machine.write("etc/passwd", &format!("alice:x:{user}:{user}::/:\n"));
    machine.write("etc/group", &format!("vgpu:x:{group}:\n"));
    let program = machine.path("vgpu");
    copy_program(&program);
    let doctor = || {
        let mut command = Command::new(&program);
        if is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        machine.run(&mut command, &[])
    };
    let outside = |said: &Said| {
        let words = "the user alice, is not in it";
        assert!(has(said, "FAIL link", words), "{}", said.text);
        assert_eq!(
            said.last(),
            "next: sudo usermod --append --groups vgpu alice"
        );
    };
    outside(&doctor());
    // The group counts from the next login on.
    machine.write("etc/group", &format!("vgpu:x:{group}:bob,alice\n"));
    assert_eq!(doctor().last(), "next: newgrp vgpu");
    machine.write("run/.containerenv", "");
    let next = format!("next: start the container with --group-add {group}");
    assert_eq!(doctor().last(), next);

    // The socket alone, which takes root.
    if is_root {
        fs::remove_file(machine.path("run/.containerenv")).expect("it is there");
        machine.write("etc/group", &format!("vgpu:x:{group}:\n"));
        chown(&folder, None, Some(0)).expect("root may");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("ours");
        let socket = machine.path(SOCKET);
        let serve = Serve::start(&socket, &[]);
        chown(&socket, None, Some(GROUP)).expect("root may");
        outside(&doctor());
        drop(serve);
    }
}

/// With the group of the socket the check succeeds, unless the socket keeps its group out.
#[test]
fn a_user_in_the_group() {
    let machine = Machine::host("in-group", "");
    fs::create_dir_all(machine.path("run/vgpu")).expect("a folder");
    let socket = machine.path(SOCKET);
    let serve = Serve::start(&socket, &[]);
    let program = machine.path("vgpu");
    copy_program(&program);
    let is_root = geteuid().is_root();
    if is_root {
        chown(&socket, None, Some(GROUP)).expect("root may");
    }
    let doctor = |mode| {
        fs::set_permissions(&socket, fs::Permissions::from_mode(mode)).expect("ours");
        let mut command = Command::new(&program);
        if is_root {
            command.uid(NOBODY).gid(GROUP);
        }
        machine.run(&mut command, &[])
    };
    let said = doctor(0o660);
    assert!(
        said.is_well && has(&said, "ok link", "session"),
        "{}",
        said.text
    );
    let said = doctor(0o000);
    let words = "has mode 000, which keeps its group";
    assert!(has(&said, "FAIL link", words), "{}", said.text);
    let next = format!("next: sudo chmod g+rw {}", socket.display());
    assert_eq!(said.last(), next);
    drop(serve);
}

#[test]
fn an_executor_that_is_down() {
    let machine = Machine::host("down", "");
    let said = machine.doctor(&[]);
    assert!(
        has(&said, "FAIL link", "no executor was reached"),
        "{}",
        said.text
    );
    assert_eq!(said.last(), "next: on the host: vgpu serve");
    let failed = "SubState=auto-restart\nResult=exit-code\nUnitFileState=enabled\nActiveState=";
    for (state, next) in [
        (
            "ActiveState=inactive\nUnitFileState=enabled\n".into(),
            "sudo systemctl start vgpu",
        ),
        (
            "ActiveState=inactive\nUnitFileState=disabled\n".into(),
            "sudo systemctl enable --now vgpu",
        ),
        (
            format!("{failed}activating\nExecMainStatus=78\n"),
            "vgpu check-config",
        ),
        (
            format!("{failed}activating\nExecMainStatus=1\n"),
            "journalctl --unit vgpu --lines 20 --no-pager",
        ),
    ] {
        machine.systemd(&state);
        let said = machine.doctor(&[]);
        assert_eq!(said.last(), format!("next: {next}"), "{}", said.text);
        assert!(!said.is_well);
    }
    // The first start with a GPU takes minutes.
    machine.systemd("ActiveState=activating\nSubState=start\nExecMainStatus=78\n");
    let said = machine.doctor(&[]);
    assert!(
        has(&said, "note service", "vgpu.service is activating"),
        "{}",
        said.text
    );
    // The cause of a service that does not start comes first.
    machine.systemd(&format!("{failed}activating\nExecMainStatus=1\n"));
    machine.write("etc/vgpu/vgpu.toml", "[server]\nlisten = [\"usb:1\"]\n");
    let said = machine.doctor(&[]);
    assert!(
        has(&said, "FAIL config", "vgpu.toml:2:10: "),
        "{}",
        said.text
    );
    let file = machine.path("etc/vgpu/vgpu.toml");
    assert_eq!(said.last(), format!("next: sudoedit {}", file.display()));
}

#[test]
fn an_executor_of_another_version() {
    for (theirs, next) in [
        (
            ProtocolVersion::OLDEST.number() - 1,
            "on the executor's machine: sudo sh RELEASE/install.sh --host RELEASE && sudo \
             systemctl restart vgpu",
        ),
        (
            ProtocolVersion::CURRENT.number() + 1,
            "sudo sh RELEASE/install.sh --guest RELEASE",
        ),
    ] {
        let machine = Machine::new("version");
        fs::create_dir_all(machine.path("run/vgpu")).expect("a folder");
        let socket = machine.path(SOCKET);
        let listener = Listener::bind(&socket, ListenOptions::default()).expect("a socket");
        let other = thread::spawn(move || {
            let arrival = listener.accept(TIMEOUT).expect("a guest").expect("a guest");
            let mut end = arrival.handshake().expect("a link");
            refuse(&mut end, theirs);
        });
        let said = machine.doctor(&[]);
        other.join().expect("no panic");
        assert!(
            has(&said, "FAIL link", "speaks protocol version"),
            "{}",
            said.text
        );
        assert_eq!(said.last(), format!("next: {next}"));
    }
}

/// An executor that chooses from one version only, the previous one, is asked a second time.
#[test]
fn an_executor_of_the_previous_version_is_used() {
    let version = ProtocolVersion::OLDEST;
    let machine = Machine::new("previous");
    fs::create_dir_all(machine.path("run/vgpu")).expect("a folder");
    let listener = Listener::bind(&machine.path(SOCKET), ListenOptions::default());
    let listener = listener.expect("a socket");
    let other = thread::spawn(move || {
        let open = || {
            let arrival = listener.accept(TIMEOUT).expect("a guest").expect("a guest");
            arrival.handshake().expect("a link")
        };
        refuse(&mut open(), version.number());
        let mut end = open();
        let mut message = Vec::new();
        while let Ok(Some(incoming)) = end.receive(&mut message, TIMEOUT) {
            let request = incoming.request;
            let reply = match Request::decode(version, &message).expect("a request") {
                Request::Hello { offer, .. } => {
                    assert_eq!(offer, Offer::only(version));
                    Reply::Welcome {
                        protocol: version,
                        served: HostVersions(VersionRange::only(version)),
                        session: 7,
                        engine: "cpu".into(),
                        description: "a processor".into(),
                        memory_total: 1 << 20,
                        memory_free: 1 << 20,
                        capabilities: Capabilities::default(),
                        devices: DeviceCount(1),
                    }
                }
                Request::Memory {} => Reply::Memory {
                    request,
                    total: 1 << 20,
                    free: 1 << 20,
                },
                other => panic!("{other:?}"),
            };
            message.clear();
            reply.encode(version, &mut message);
            end.send(&message, 0, &mut |_| {}).expect("a link");
            end.retire();
            message.clear();
        }
    });
    let said = machine.doctor(&[]);
    other.join().expect("no panic");
    let line = "session 7, protocol 3, graphs 1; the executor speaks 3";
    assert!(has(&said, "ok link", line), "{}", said.text);
    assert!(said.is_well, "{}", said.text);
}

/// What an executor of another version answers to HELLO.
fn refuse(end: &mut dyn vgpu_transport::link::HostEnd, theirs: u32) {
    let mut message = Vec::new();
    end.receive(&mut message, TIMEOUT)
        .expect("a link")
        .expect("HELLO");
    let mismatch = VersionMismatch {
        guest: VersionRange::SERVED,
        host: VersionRange::new(theirs, theirs).expect("a range"),
    };
    let reason = Violation::from(mismatch).to_string();
    message.clear();
    Reply::Ended { reason }.encode(ProtocolVersion::CURRENT, &mut message);
    end.send(&message, 0, &mut |_| {}).expect("a link");
}

#[test]
fn a_host_of_virtual_machines_only() {
    let scratch = Scratch::new("machines");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={}", socket.display());
    let config = format!(
        "[[guest]]\nname = \"vm1\"\nvm = {{ socket = \"{}\", window = \"64M\" }}\n",
        socket.display()
    );
    let machine = Machine::host("machines-root", &config);
    let table = || fs::read_to_string("/proc/net/unix").expect("a table");
    machine.write("proc/net/unix", &table());
    let said = machine.doctor(&[]);
    assert!(
        has(&said, "FAIL link", "no executor was reached"),
        "{}",
        said.text
    );
    let serve = Serve::of(vgpu(&[
        "serve",
        "--vm",
        &vm,
        "--threads",
        "1",
        "--memory",
        "64M",
    ]));
    machine.write("proc/net/unix", &table());
    machine.write(
        &socket
            .strip_prefix("/")
            .expect("absolute")
            .display()
            .to_string(),
        "",
    );
    let said = machine.doctor(&[]);
    assert!(
        said.is_well && has(&said, "ok link", "vm1: an executor listens for its QEMU"),
        "{}",
        said.text
    );
    assert_eq!(said.last(), "This machine can use a vGPU.");
    drop(serve);
}

#[test]
fn a_host_of_other_machines_only() {
    let config = "[server]\nlisten = [\"tcp:0.0.0.0:4780\"]\n";
    let machine = Machine::host("other-machines", config);
    let line = |local: &str, state: &str| format!("   0: {local} 00000000:0000 {state} 0 0 0\n");
    let head = "  sl  local_address rem_address   st tx_queue rx_queue tr\n";
    // Port 4780 is 12AC. A connection from that port and a listener on 12AD are no listener.
    let others = [
        head,
        &line("0100007F:12AC", "01"),
        &line("00000000:12AD", "0A"),
    ];
    machine.write("proc/net/tcp", &others.concat());
    let said = machine.doctor(&[]);
    let missing = "no process listens on TCP port 4780";
    assert!(has(&said, "note link", missing), "{}", said.text);
    assert!(!said.is_well, "{}", said.text);

    machine.write("proc/net/tcp6", &line(&format!("{:032}:12AC", 0), "0A"));
    let said = machine.doctor(&[]);
    let listens = "tcp:0.0.0.0:4780: a process listens on TCP port 4780";
    assert!(
        said.is_well && has(&said, "ok link", listens),
        "{}",
        said.text
    );
    assert_eq!(said.last(), "This machine can use a vGPU.");
}

/// The kernel still lists the socket of a process whose file was removed.
#[test]
fn listener_whose_file_was_removed_is_no_listener() {
    let config = "[[guest]]\nname = \"vm1\"\nvm = { socket = \"/run/vm1.sock\", window = \
                  \"64M\" }\n";
    let machine = Machine::host("removed", config);
    let line = |path| {
        format!(
            "0000000000000000: 00000002 00000000 00010000 0001 01 {} {path}\n",
            4711
        )
    };
    let table = [
        "Num RefCount Protocol Flags Type St Inode Path\n",
        &line("/run/vm1.sock"),
    ];
    machine.write("proc/net/unix", &table.concat());
    let said = machine.doctor(&[]);
    let expected = "vm1: an executor listens for its QEMU on /run/vm1.sock, and the file of that \
                    socket was removed";
    assert!(has(&said, "FAIL link", expected), "{}", said.text);
    assert_eq!(said.last(), "next: sudo systemctl restart vgpu");
    machine.write("run/vm1.sock", "");
    let said = machine.doctor(&[]);
    assert!(
        has(&said, "ok link", "vm1: an executor listens for its QEMU"),
        "{}",
        said.text
    );

    let table = [table[0], &line("/run/vgpu/vgpu.sock")].concat();
    machine.write("proc/net/unix", &table);
    let said = machine.doctor(&[]);
    let expected = "an executor listens there, and the file of that socket was removed";
    assert!(has(&said, "FAIL link", expected), "{}", said.text);
    assert_eq!(said.last(), "next: sudo systemctl restart vgpu");
}

#[test]
fn listeners_of_the_configuration_are_tried() {
    let machine = Machine::host(
        "listeners",
        "[[guest]]\nname = \"alice\"\nlisten = [\"unix:/run/alice.sock\"]\n",
    );
    fs::create_dir_all(machine.path("run")).expect("a folder");
    let serve = Serve::start(&machine.path("run/alice.sock"), &[]);
    let said = machine.doctor(&[]);
    assert!(
        said.is_well && has(&said, "ok link", "alice.sock: session"),
        "{}",
        said.text
    );
    drop(serve);
}

/// Each executor is checked for itself: one that answers does not hide one that hangs or refuses.
#[test]
fn an_executor_that_hangs_or_refuses_beside_one_that_answers() {
    let machine = Machine::host(
        "beside",
        "[[guest]]\nname = \"alice\"\nlisten = [\"unix:/run/alice.sock\", \
         \"unix:/run/bob.sock\"]\n",
    );
    fs::create_dir_all(machine.path("run")).expect("a folder");
    let serve = Serve::start(&machine.path("run/alice.sock"), &[]);
    let bob = machine.path("run/bob.sock");
    let bind = || Listener::bind(&bob, ListenOptions::default()).expect("a socket");
    // It accepts nobody.
    let listener = bind();
    let said = machine.doctor(&[]);
    assert!(
        has(&said, "ok link", "alice.sock: session"),
        "{}",
        said.text
    );
    assert!(
        has(&said, "FAIL link", "bob.sock: no answer within"),
        "{}",
        said.text
    );
    assert_eq!(
        said.last(),
        "next: on the executor's machine: sudo vgpu dump"
    );
    assert!(!said.is_well);
    drop(listener);
    // It refuses.
    let listener = bind();
    let other = thread::spawn(move || {
        let arrival = listener.accept(TIMEOUT).expect("a guest").expect("a guest");
        let mut end = arrival.handshake().expect("a link");
        refuse(&mut end, ProtocolVersion::OLDEST.number() - 1);
    });
    let said = machine.doctor(&[]);
    other.join().expect("no panic");
    assert!(
        has(&said, "ok link", "alice.sock: session"),
        "{}",
        said.text
    );
    assert!(has(&said, "FAIL link", "bob.sock: "), "{}", said.text);
    assert!(!said.is_well);
    drop(serve);
}

#[test]
fn a_systemctl_that_does_not_answer() {
    let machine = Machine::new("systemctl");
    machine.systemctl("exec sleep 1000");
    let said = machine.doctor(&[]);
    let words = "systemctl does not say: no answer within 10 s";
    assert!(has(&said, "note service", words), "{}", said.text);
    // The checks after it are made.
    assert!(has(&said, "note ollama", ""), "{}", said.text);
    machine.systemctl("exit 3");
    let said = machine.doctor(&[]);
    let words = "systemctl does not say: the process of the check ended: exit status: 3";
    assert!(has(&said, "note service", words), "{}", said.text);
}

/// The control socket of an executor that serves virtual machines only, whose sockets nobody but
/// QEMU may connect to.
#[test]
fn an_executor_that_does_not_answer_its_control_socket() {
    let machine = Machine::host("control", "");
    let socket = machine.path(SOCKET);
    let control = machine.path("run/vgpu/control.sock");
    fs::create_dir_all(machine.path("run/vgpu")).expect("a folder");
    let path = control.to_str().expect("text");
    let serve = Serve::start(&socket, &["--control", path]);
    let said = machine.doctor(&[]);
    assert!(
        said.is_well && has(&said, "ok executor", "the engine cpu answers"),
        "{}",
        said.text
    );
    let mut status = control::status(&control).expect("an answer");
    fs::remove_file(&control).expect("it is there");
    let listener = UnixListener::bind(&control).expect("a socket");
    let said = machine.doctor(&[]);
    assert!(
        has(
            &said,
            "FAIL executor",
            "no answer within 10 s: the executor hangs"
        ),
        "{}",
        said.text
    );
    assert_eq!(
        said.last(),
        "next: sudo vgpu dump; sudo systemctl restart vgpu"
    );
    // One that says itself that it hangs.
    status.engine.hang = Some("session 3 has had the engine".into());
    let other = thread::spawn(move || {
        // The first one is the question of the doctor above.
        let mut questions = 2;
        for client in listener.incoming() {
            let mut client = client.expect("a client");
            // A socket that is closed with bytes that nobody has read is reset.
            if client.read(&mut [0; 64]).is_ok_and(|bytes| bytes == 0) {
                // The executor, which looks whether somebody listens in its place.
                continue;
            }
            questions -= 1;
            let text = serde_json::to_string(&status).expect("JSON");
            let _ = client.write_all(text.as_bytes());
            if questions == 0 {
                break;
            }
        }
    });
    let said = machine.doctor(&[]);
    other.join().expect("no panic");
    assert!(
        has(
            &said,
            "FAIL executor",
            "the engine hangs: session 3 has had the engine"
        ),
        "{}",
        said.text
    );
    drop(serve);
}

/// Answers the next question on a control socket with this status.
fn answer(listener: &UnixListener, status: &Status) {
    for client in listener.incoming() {
        let mut client = client.expect("a client");
        // The executor, which looks whether somebody listens in its place.
        if client.read(&mut [0; 64]).is_ok_and(|bytes| bytes == 0) {
            continue;
        }
        let text = serde_json::to_string(status).expect("JSON");
        client.write_all(text.as_bytes()).expect("it reads");
        break;
    }
}

/// An executor that works, and says that it leaves a GPU unused.
#[test]
fn a_gpu_that_the_executor_does_not_use() {
    let machine = Machine::host("unused", "engine.kind = \"auto\"\n");
    let control = machine.path("run/vgpu/control.sock");
    fs::create_dir_all(machine.path("run/vgpu")).expect("a folder");
    let path = control.to_str().expect("text");
    let serve = Serve::start(&machine.path(SOCKET), &["--control", path]);
    let mut status = control::status(&control).expect("an answer");
    fs::remove_file(&control).expect("it is there");
    let listener = UnixListener::bind(&control).expect("a socket");
    let mut doctor = |unused: Option<&str>, command: &mut Command| {
        status.engine.unused_gpu = unused.map(str::to_owned);
        thread::scope(|scope| {
            scope.spawn(|| answer(&listener, &status));
            machine.run(command, &[])
        })
    };
    let said = doctor(None, &mut vgpu(&[]));
    assert_eq!(said.last(), "This machine can use a vGPU.", "{}", said.text);

    let nvidia = "0000:01:00.0 (NVIDIA, 10de:2204) is not used: a kernel is wrong";
    let said = doctor(Some(nvidia), &mut vgpu(&[]));
    assert!(has(&said, "FAIL gpu the GPU", nvidia), "{}", said.text);
    assert_eq!(said.last(), "next: vgpu gpu-check --compare-only");
    assert!(!said.is_well);
    let old = "cuda:1 (Tesla T4) is not used: Tesla T4 has compute capability 7.5; 8.0 or newer is \
               needed";
    let said = doctor(Some(old), &mut vgpu(&[]));
    assert!(has(&said, "FAIL gpu the GPU", old), "{}", said.text);
    let file = machine.path("etc/vgpu/vgpu.toml");
    let words = "engine.kind = \"ggml\" in the configuration uses it";
    assert!(has(&said, "FAIL gpu the GPU", words), "{}", said.text);
    assert_eq!(said.last(), format!("next: sudoedit {}", file.display()));
    assert!(!said.is_well);
    // An executor that started before the driver was installed.
    let libraries = vgpu_driver_standin::folder().expect("the library");
    let standin = |faults: &str| {
        let mut command = vgpu(&[]);
        command
            .env("LD_LIBRARY_PATH", &libraries)
            .env("VGPU_STANDIN_SMS", "3")
            .env("VGPU_STANDIN_FAULTS", faults)
            // No folder, so that the kernels are not checked at the start.
            .env("VGPU_CACHE", "/dev/null");
        command
    };
    let said = doctor(Some(nvidia), &mut standin(""));
    assert!(
        has(&said, "ok config", "engine auto, here cuda:0")
            && has(
                &said,
                "FAIL executor the GPU",
                "one that starts now uses it"
            ),
        "{}",
        said.text
    );
    assert_eq!(said.last(), "next: end vgpu serve, and start it again");
    // One that would start now does not use it either: see `check-config`.
    let said = doctor(None, &mut standin("cuCtxCreate:*:OUT_OF_MEMORY"));
    let words = "the GPU cuda:0 (NVIDIA L4) is not used: ";
    assert!(has(&said, "FAIL gpu", words), "{}", said.text);
    assert_eq!(said.last(), "next: vgpu gpu-check --compare-only");
    assert!(!said.is_well);

    // Of an integrated GPU nobody expects much.
    let other = "0000:00:02.0 (Intel, 8086:9a49) is not used: there is no backend library of ggml";
    let said = doctor(Some(other), &mut vgpu(&[]));
    assert!(
        has(&said, "note gpu the GPU", other) && has(&said, "note gpu", "--engine ggml"),
        "{}",
        said.text
    );
    assert_eq!(said.last(), "This machine can use a vGPU.", "{}", said.text);
    assert!(said.is_well);

    // A card that the configuration leaves out, and one that it wants.
    machine.card(Some("nvidia"));
    machine.write("etc/vgpu/vgpu.toml", "engine.kind = \"cpu\"\n");
    let said = doctor(None, &mut vgpu(&[]));
    let words = "has engine.kind = \"cpu\"; \"auto\" uses the GPU";
    assert!(has(&said, "note gpu 0000:01:00.0", words), "{}", said.text);
    assert!(said.is_well, "{}", said.text);
    machine.write("etc/vgpu/vgpu.toml", "engine.kind = \"auto\"\n");
    machine.libcuda("", 12_040, 0);
    let said = doctor(None, &mut vgpu(&[]));
    for (part, words) in [
        (
            "FAIL gpu 0000:01:00.0",
            "is not used: the engine cpu is chosen",
        ),
        (
            "FAIL executor 0000:01:00.0",
            "the executor was started with the engine cpu",
        ),
    ] {
        assert!(has(&said, part, words), "{}", said.text);
    }
    assert!(!said.is_well);
    drop(serve);
}

/// Compiles a shared library.
fn library(file: &Path, source: &str) {
    let mut compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-x", "c", "-", "-o"])
        .arg(file)
        .stdin(Stdio::piped())
        .spawn()
        .expect("a C compiler");
    let mut stdin = compiler.stdin.take().expect("piped");
    stdin.write_all(source.as_bytes()).expect("it reads");
    drop(stdin);
    assert!(compiler.wait().expect("it ends").success(), "{source}");
}

#[test]
fn the_plugin_gets_the_endpoint_in_a_process_of_its_own() {
    let machine = Machine::new("plugin");
    let socket = machine.path("other.sock");
    let serve = Serve::start(&socket, &[]);
    let endpoint = format!("unix:{}", socket.display());
    let ggml = "const char *ggml_version(void) { return \"0.26.0\"; }\n";
    library(&machine.path("libggml-base.so"), ggml);
    let plugin = machine.path("plugin.so");
    let start = "#include <stdlib.h>\n#include <string.h>\n\
                 void *ggml_backend_init(void) { return 0; }\nint ggml_backend_score(void) ";
    let score = format!(
        "{{ const char *e = getenv(\"VGPU_ENDPOINT\"); return e && !strcmp(e, \"{endpoint}\"); }}"
    );
    library(&plugin, &format!("{start}{score}\n"));
    let text = plugin.to_str().expect("text");
    let said = machine.doctor(&["--endpoint", &endpoint, "--plugin", text]);
    assert!(
        said.is_well && has(&said, "ok plugin", "an executor answers: score 1"),
        "{}",
        said.text
    );
    // A plugin that ends its process is a failure, and no end of the report.
    library(&plugin, &format!("{start}{{ abort(); }}\n"));
    let said = machine.doctor(&["--endpoint", &endpoint, "--plugin", text]);
    assert!(
        has(
            &said,
            "FAIL plugin",
            "the process of the check ended: signal: 6"
        ),
        "{}",
        said.text
    );
    let install = "next: sudo sh RELEASE/install.sh --guest RELEASE";
    assert_eq!(said.last(), install);
    drop(serve);
}

/// The report is complete, and no process of it stays.
#[test]
fn a_plugin_that_hangs_while_it_is_loaded() {
    let machine = Machine::new("hanging-plugin");
    let plugin = machine.path("plugin.so");
    let pid = machine.path("pid");
    let source = format!(
        "#include <stdio.h>\n#include <unistd.h>\n\
         __attribute__((constructor)) static void start(void) {{\n\
         FILE *f = fopen(\"{}\", \"w\"); fprintf(f, \"%d\", getpid()); fclose(f);\n\
         for (;;) sleep(1000); }}\n",
        pid.display()
    );
    library(&plugin, &source);
    let said = machine.doctor(&["--plugin", plugin.to_str().expect("text")]);
    assert!(
        has(&said, "FAIL plugin", "plugin.so: no answer within 40 s"),
        "{}",
        said.text
    );
    assert!(has(&said, "note ollama", ""), "{}", said.text);
    let pid = fs::read_to_string(pid).expect("the constructor runs");
    assert!(!Path::new("/proc").join(pid).exists(), "the process stays");
}
