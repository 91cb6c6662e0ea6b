//! The units of systemd.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use crate::served::Scratch;
use crate::unit;

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

/// The process of a guest with a driver cannot be kept from everything that its user owns: the unit
/// has memory, queues and semaphores of System V of its own.
#[test]
fn units_have_an_ipc_namespace_of_their_own() {
    for name in UNITS {
        let text = fs::read_to_string(unit(name)).expect("a unit");
        let wanted = ("[Service]", "PrivateIPC=yes");
        assert!(settings_of(&text).contains(&wanted), "{name}");
    }
}

/// The calls of a group of systemd, by the output of `systemd-analyze syscall-filter`.
fn group_of(listed: &str, group: &str) -> BTreeSet<String> {
    let lines = listed.lines().skip_while(|line| *line != group).skip(1);
    let lines = lines.take_while(|line| line.starts_with(' '));
    let names = lines.map(str::trim).filter(|line| !line.starts_with('#'));
    let all = names.map(|name| match name.starts_with('@') {
        true => group_of(listed, name),
        false => BTreeSet::from([name.to_owned()]),
    });
    all.flatten().collect()
}

/// systemd kills a process that makes a system call beyond the filter of its unit. The units
/// allow what the sandbox of the CPU engine allows.
#[test]
fn units_allow_the_system_calls_of_the_sandbox() {
    let calls = concat!(env!("CARGO_MANIFEST_DIR"), "/../src/sandbox/calls.rs");
    let calls = fs::read_to_string(calls).expect("the filters");
    let calls = calls
        .split_once("\nfn allowed(")
        .expect("what is allowed")
        .1;
    let calls = calls.split("\n}\n").next().unwrap_or_default();
    let made: BTreeSet<&str> = { calls.split("libc::SYS_").skip(1) }
        .filter_map(|rest| {
            rest.split(|c: char| c != '_' && !c.is_alphanumeric())
                .next()
        })
        .collect();
    assert!(made.contains("mincore") && made.len() > 50, "{made:?}");
    let listed = Command::new("systemd-analyze")
        .arg("syscall-filter")
        .output();
    let group = match &listed {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {said}", output.status);
            group_of(&String::from_utf8_lossy(&output.stdout), "@system-service")
        }
        Err(error) => {
            println!("NOT TESTED, which calls are in no group of systemd: {error}");
            made.iter().map(|&name| name.to_owned()).collect()
        }
    };
    assert!(group.len() > 50, "{group:?}");
    for name in UNITS {
        let text = fs::read_to_string(unit(name)).expect("a unit");
        let settings = settings_of(&text);
        let allowed: BTreeSet<&str> = { settings.iter() }
            .filter_map(|(_, line)| line.strip_prefix("SystemCallFilter="))
            .flat_map(str::split_whitespace)
            .collect();
        assert!(allowed.contains("@system-service"), "{name}: {allowed:?}");
        // In no group, whatever systemd this machine has.
        assert!(allowed.contains("mincore"), "{name}: {allowed:?}");
        let missing: Vec<&&str> = { made.iter() }
            .filter(|call| !group.contains(**call) && !allowed.contains(*call))
            .collect();
        assert!(missing.is_empty(), "{name} does not allow {missing:?}");
    }
}

/// The devices of every card are made, also of one that nobody has used since boot: the commands
/// that a unit starts before the executor run here with a file system of two cards.
#[test]
fn units_make_the_devices_of_all_cards() {
    for name in UNITS {
        let scratch = Scratch::new("modprobe");
        let root = scratch.path().to_str().expect("text");
        let of_root = |path: &str| format!("{root}{path}");
        let tool = of_root("/usr/bin/nvidia-modprobe");
        fs::create_dir_all(of_root("/usr/bin")).expect("a folder");
        let log = of_root("/log");
        let mut cards = vec![
            ("0000:01:00.0", "0"),
            ("0000:02:00.0", "1"),
            ("0000:81:00.0", "5"),
        ];
        let text = fs::read_to_string(unit(name)).expect("a unit");
        let settings = settings_of(&text);
        let commands: Vec<String> = { settings.iter() }
            .filter_map(|(_, line)| line.strip_prefix("ExecStartPre=-+"))
            .map(|line| {
                line.replace("/usr/bin/nvidia", &of_root("/usr/bin/nvidia"))
                    .replace("/proc/", &of_root("/proc/"))
            })
            .collect();
        // Also without the tool, and without a card.
        let run = || {
            for command in &commands {
                let output = Command::new("sh").args(["-c", command]).output();
                output.expect("a shell");
            }
            fs::read_to_string(&log).unwrap_or_default()
        };
        assert_eq!(run(), "", "{name}");
        let script = format!("printf '%s\\n' \"$*\" >> {log}");
        let made = Command::new("sh")
            .args([
                "-c",
                "printf '#!/bin/sh\\n%s\\n' \"$2\" > \"$1\" && chmod +x \"$1\"",
                "sh",
            ])
            .args([&tool, &script])
            .status();
        assert!(made.expect("a shell").success());
        assert_eq!(run(), "-c 0 -u\n", "{name}");
        fs::remove_file(&log).expect("it is there");
        for (address, minor) in cards.drain(..) {
            let folder = of_root(&format!("/proc/driver/nvidia/gpus/{address}"));
            fs::create_dir_all(&folder).expect("a folder");
            let text = format!("Model: \t\t NVIDIA L4\nIRQ:   \t\t 42\nDevice Minor: \t {minor}\n");
            fs::write(format!("{folder}/information"), text).expect("a file");
        }
        assert_eq!(run(), "-c 0 -u\n-c 0\n-c 1\n-c 5\n", "{name}");
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
