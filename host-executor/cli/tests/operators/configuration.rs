//! `vgpu check-config` and `vgpu reload`.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value as Json;
use vgpu_transport::wire::{DeviceCount, Reply};

use crate::common::TIMEOUT;
use crate::served::site::{ALICE, BOB, Site, fails, figures, work};
use crate::served::{Scratch, Serve, vgpu};

#[test]
fn reload_applies_to_connected_guests() {
    let site = Site::start("reload", ALICE);
    let socket = fs::metadata(site.folder.join("alice.sock")).expect("a socket");
    assert_eq!(socket.permissions().mode() & 0o777, 0o600);
    let control = fs::metadata(site.folder.join("control.sock")).expect("a socket");
    assert_eq!(control.permissions().mode() & 0o777, 0o600);
    let mut alice = site.guest("alice.sock");
    assert_eq!(figures(&mut alice), (1 << 20, 1 << 20));

    // A quota, another guest with its own listener, and a setting that needs a restart.
    site.write(&format!(
        "engine.batch = false\n{}{BOB}",
        ALICE.replace("1MiB", "4MiB")
    ));
    let said = site.reload();
    assert!(
        said.contains("2 named guests; engine.batch take effect after a restart"),
        "{said}"
    );
    assert_eq!(figures(&mut alice), (4 << 20, 4 << 20));
    let mut bob = site.guest("bob.sock");
    assert_eq!(figures(&mut bob), (2 << 20, 2 << 20));
    work(&mut bob);

    // Mistakes of all kinds change nothing.
    for (config, words) in [
        (
            format!("{ALICE}weight = 4\n"),
            "vgpu.toml:9:1: duplicate key",
        ),
        (
            format!("{ALICE}{}", BOB.replace("2M", "2Q")),
            "vgpu.toml:12:10: unknown unit",
        ),
        (
            format!("{ALICE}{}", BOB.replace("2M", "64M")),
            "the quotas of the guests add up to 65.0 MiB, the engine has 64.0 MiB",
        ),
        (
            format!("{ALICE}{}", BOB.replace("DIR", "DIR/nowhere")),
            "does not exist",
        ),
    ] {
        site.write(&config);
        let said = fails(&mut site.run("reload", &[]));
        assert!(
            said.contains("is unchanged") && said.contains(words),
            "{words}: {said}"
        );
        assert_eq!(figures(&mut alice), (4 << 20, 4 << 20));
        work(&mut site.guest("bob.sock"));
    }

    // By signal. Bob is removed: his listener closes, and his connected program stays.
    site.write(ALICE);
    site.serve.signal(Signal::HUP);
    let start = Instant::now();
    while figures(&mut alice).0 != 1 << 20 || site.folder.join("bob.sock").exists() {
        assert!(start.elapsed() < TIMEOUT, "SIGHUP does nothing");
        thread::sleep(Duration::from_millis(5));
    }
    bob.fence();
    work(&mut alice);
    let log = site.end();
    assert!(
        log.contains("listening on unix:") && log.contains("no longer"),
        "{log}"
    );
}

/// A class of engines is the guest's devices, at the start and after a reload. The driver is the
/// stand-in.
#[test]
#[cfg_attr(
    not(feature = "cuda"),
    ignore = "one of the engines is the CUDA engine"
)]
fn guests_have_the_engines_of_their_class() {
    let scratch = Scratch::new("guest-engines");
    let path = scratch.path().join("vgpu.toml");
    let file = path.to_str().expect("text");
    let write = |kind: &str, alice: &str| {
        let config = format!(
            "engine.kind = {kind}\nengine.memory = \"64M\"\nengine.threads = 1\n\
             server.listen = [\"unix:DIR/vgpu.sock\"]\n\
             [[guest]]\nname = \"bob\"\nlisten = [\"unix:DIR/bob.sock\"]\nengine = \"auto\"\n\
             [[guest]]\nname = \"alice\"\nlisten = [\"unix:DIR/alice.sock\"]\n{alice}\n"
        );
        fs::write(&path, Site::text(scratch.path(), &config)).expect("a file");
    };
    let on_standin = |mut command: Command| {
        command
            .env(
                "LD_LIBRARY_PATH",
                vgpu_driver_standin::folder().expect("the library"),
            )
            .env("VGPU_STANDIN_SMS", "3")
            .env("VGPU_STANDIN_DEVICES", "L4,H100")
            // No folder, so that the kernels are not checked at the start.
            .env("VGPU_CACHE", "/dev/null");
        command
    };
    let serve = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vgpu"));
        command.args(["serve", "--config", file]);
        command.env_remove("VGPU_LOG");
        on_standin(command)
    };
    let check = || {
        let output = on_standin(vgpu(&["check-config", file])).output();
        let output = output.expect("the command starts");
        let said = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8(said).expect("text"),
        )
    };
    let both = "[\"cpu\", \"cuda:0\"]";
    let none = "guest \"alice\" has engine = \"ggml\", and there is no such engine, only cpu, \
                cuda:0: ";
    // Without a start, and without one of the engines.
    write(both, "engine = \"ggml\"");
    for said in [check().1, fails(&mut serve())] {
        assert!(said.contains(none), "{said}");
    }
    write(both, "engine = \"cpu\"\ndevices = [0]");
    let (is_valid, said) = check();
    let reason = "vgpu.toml:14:10: `engine` and `devices` exclude each other";
    assert!(!is_valid && said.contains(reason), "{said}");

    write(both, "engine = \"cpu\"");
    let (is_valid, said) = check();
    assert!(is_valid, "{said}");
    let site = Serve::of(serve());
    // The engine of the guest's first device, and how many devices it has.
    let engine_of = |socket: &str| {
        let mut guest = site.connect(&scratch.path().join(socket));
        let Reply::Welcome {
            engine, devices, ..
        } = guest.hello()
        else {
            unreachable!("hello() has checked it")
        };
        work(&mut guest);
        (engine, devices)
    };
    let one = |engine: &str| (engine.to_owned(), DeviceCount(1));
    assert_eq!(engine_of("alice.sock"), one("cpu"));
    assert_eq!(engine_of("bob.sock"), one("cuda:0"));
    // Without the key, a guest has all.
    let all = ("cpu".to_owned(), DeviceCount(2));
    assert_eq!(engine_of("vgpu.sock"), all);

    let control = scratch.path().join("control.sock");
    let control = control.to_str().expect("text");
    let reload = || vgpu(&["reload", "--control", control]);
    write(both, "engine = \"cuda\"");
    let output = reload().output().expect("the command starts");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(engine_of("alice.sock"), one("cuda:0"));
    // A reload has the engines that run, also if the configuration names others.
    let with_ggml = "[\"cpu\", \"cuda:0\", \"ggml:/nowhere/libggml-vulkan.so\"]";
    for (kind, words) in [
        (both, "is unchanged"),
        (with_ggml, "takes effect after a restart"),
    ] {
        write(kind, "engine = \"ggml\"");
        let said = fails(&mut reload());
        assert!(said.contains(none) && said.contains(words), "{said}");
        assert_eq!(engine_of("alice.sock"), one("cuda:0"));
    }
    write(with_ggml, "engine = \"cpu\"");
    let output = reload().output().expect("the command starts");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(engine_of("alice.sock"), one("cpu"));
    write(both, "");
    let output = reload().output().expect("the command starts");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(engine_of("alice.sock"), all);
}

#[test]
fn check_config_validates_without_serving() {
    let scratch = Scratch::new("check");
    let path = scratch.path().join("vgpu.toml");
    let file = path.to_str().expect("text");
    let check = |text: &str, more: &[&str]| {
        fs::write(&path, text).expect("a file");
        let arguments = [&["check-config", file], more].concat();
        let output = vgpu(&arguments).output().expect("the command starts");
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).expect("text"))
    };
    let example = include_str!("../../../../deploy/host/vgpu.toml");
    let (status, said) = check(example, &[]);
    assert_eq!(status, Some(0), "{said}");
    // The engine that `vgpu serve` would take, and its device.
    let chosen = said.split_once("valid: engine auto, here ");
    let (_, chosen) = chosen.unwrap_or_else(|| panic!("{said}"));
    let (engine, rest) = chosen.split_once(" (").expect("a device");
    assert!(rest.contains("), 0 named guests, 0 B of "), "{said}");
    // What a library prints when it is loaded is not part of the answer.
    if cfg!(feature = "ggml") {
        let at = |name: &str| scratch.path().join(name);
        let print = "#include <stdio.h>\n\
            __attribute__((constructor)) static void print(void) { puts(\"{}\"); }\n";
        fs::write(at("print.c"), print).expect("a file");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o"]);
        let status = cc.args([at("libprint.so"), at("print.c")]).status();
        assert!(status.expect("a compiler").success());
        let engine = format!("engine.kind = \"ggml:{}\"\n", at("libprint.so").display());
        fs::write(&path, engine).expect("a file");
        let output = vgpu(&["check-config", file, "--json"]).output();
        let output = output.expect("the command starts");
        let value: Json = serde_json::from_slice(&output.stdout).expect("JSON and nothing else");
        assert_eq!(value["ok"], false, "{value}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("{}"));
    }
    let (_, json) = check(example, &["--json"]);
    let value: Json = serde_json::from_str(&json).expect("JSON");
    assert_eq!(value["engine"], engine, "{json}");
    let mut serve = Command::new(env!("CARGO_BIN_EXE_vgpu"));
    serve
        .args(["serve", "--engine", "auto", "--memory", "64M", "--listen"])
        .arg(format!("unix:{}", scratch.socket().display()));
    let serve = Serve::of(serve);
    serve.signal(Signal::TERM);
    let (_, log) = serve.wait();
    assert!(log.contains(&format!("engine=\"{engine}\"")), "{log}");
    let (_, said) = check("engine.kind = \"cpu\"\n", &[]);
    assert!(said.contains("valid: engine cpu ("), "{said}");
    // What does not fit this host is refused, as by `vgpu serve`.
    let guest = "[[guest]]\nname = \"alice\"\nuids = [1]\n";
    for (more, reason) in [
        ("memory = \"4096T\"\n", " TiB, the engine has"),
        ("certificates = [\"alice\"]\n", "this executor has none"),
        ("[server]\nlog = \"a=b=c\"\n", "is not a log filter"),
        ("[server]\ncerts = \"/nowhere\"\n", "/nowhere"),
    ] {
        let guest = format!("{guest}{more}");
        for engine in ["cpu", "auto"] {
            let text = format!("engine.kind = \"{engine}\"\n{guest}");
            let (status, said) = check(&text, &[]);
            assert_eq!(status, Some(1), "{text}{said}");
            assert!(said.contains(reason), "{text}{said}");
            let endpoint = format!("unix:{}", scratch.socket().display());
            let serve = ["serve", "--config", file, "--listen", &endpoint];
            let serves = fails(&mut vgpu(&serve));
            assert!(serves.contains(reason), "{text}{serves}");
        }
    }

    let (status, said) = check("[server]\nlisten = [\"usb:1\"]\n", &[]);
    assert_eq!(status, Some(1));
    assert!(
        said.contains(&format!("{file}:2:10: ")) && said.contains("unknown kind `usb`"),
        "{said}"
    );
    let (status, said) = check("[server]\nmax-guests = \"x\"\n", &["--json"]);
    assert_eq!(status, Some(1));
    let value: Json = serde_json::from_str(&said).expect("JSON");
    assert_eq!(
        (&value["ok"], &value["line"], &value["column"]),
        (&false.into(), &2.into(), &14.into())
    );

    let (status, said) = check(
        "[engine]\nmemory = 10\n[[guest]]\nname = \"a\"\nuids = [1]\nmemory = 11\n",
        &[],
    );
    assert_eq!(status, Some(1));
    assert!(said.contains("11 B, the engine has 10 B"), "{said}");
    fs::remove_file(&path).expect("it is there");
    let output = vgpu(&["check-config", file])
        .output()
        .expect("the command starts");
    assert_eq!(output.status.code(), Some(2));

    let text = fails(&mut vgpu(&["serve", "--config", file]));
    assert!(text.contains(file), "{text}");
}
