//! The `vgpu` command, as users and service managers see it.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Guest, TIMEOUT, add, bytes};
use rustix::process::Signal;
use served::program::copy_program;
use served::{Scratch, Serve, vgpu};
use vgpu_transport::link::unix::connect;
use vgpu_transport::wire::{GraphId, Reply, Request};

/// Runs a command that must fail. Returns its error.
fn fails(command: &mut Command) -> String {
    let output = command.output().expect("the command starts");
    let text = String::from_utf8(output.stderr).expect("text");
    assert!(!output.status.success(), "{text}");
    assert!(output.stdout.is_empty());
    text
}

#[test]
fn serves_guests_until_sigterm() {
    let scratch = Scratch::new("sigterm");
    let socket = scratch.socket();
    let serve = Serve::start(&socket, &["--log", "debug"]);
    assert_eq!(serve.ready, format!("ready unix:{}\n", socket.display()));
    let file = fs::metadata(&socket).expect("a socket");
    assert!(file.file_type().is_socket());
    assert_eq!(file.permissions().mode() & 0o777, 0o660);

    let mut guest = serve.guest(&socket);
    let a = guest.alloc_with(&bytes(&[1.0, 2.0, 3.0]));
    guest.graph(GraphId(1), &add(3, a, a, a));
    guest.submit(GraphId(1));
    assert_eq!(guest.read_f32(a, 3), [2.0, 4.0, 6.0]);
    let mut second = serve.guest(&socket);
    second.send(&Request::Free { buffer: a });
    assert!(
        second
            .ended()
            .contains("buffer 1, which the session does not have")
    );

    serve.signal(Signal::TERM);
    assert_eq!(guest.ended(), "the host is shutting down");
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(!socket.exists(), "the socket is left behind");
    let pid = format!("pid {}", std::process::id());
    for words in [
        "vgpu starts",
        "session{id=1",
        pid.as_str(),
        "session opened guest=test",
        "graph compiled",
        "session closed: the guest broke the protocol: FREE names buffer 1",
        "SIGTERM received",
        "session closed: the host is shutting down",
        "SUBMIT 1",
        " graphs=1 ",
        "vgpu ends",
    ] {
        assert!(log.contains(words), "{words:?} is not in the log:\n{log}");
    }
}

#[test]
fn a_service_can_wait_for_the_executor() {
    let scratch = Scratch::new("wait");
    let endpoint = format!("unix:{}", scratch.socket().display());
    let wait = |timeout| {
        let mut command = vgpu(&["wait", "--endpoint", &endpoint, "--timeout", timeout]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let error = fails(&mut wait("1"));
    assert!(error.contains("no executor within 1 s"), "{error}");
    assert!(error.contains(&endpoint), "{error}");
    // The executor starts while somebody waits.
    let mut waiting = wait("60").spawn().expect("the command starts");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(waiting.try_wait().expect("a child"), None);
    let _serve = Serve::start(&scratch.socket(), &[]);
    assert!(waiting.wait().expect("a child").success());
    // Each named executor has to answer.
    let other = format!("unix:{}", scratch.path().join("other.sock").display());
    let error = fails(wait("0").args(["--endpoint", &other]));
    assert!(error.contains(&other), "{error}");
    assert!(!error.contains(&format!("{endpoint}:")), "{error}");
}

#[test]
fn executor_without_guests_ends_on_sigint() {
    let scratch = Scratch::new("sigint");
    let serve = Serve::start(&scratch.socket(), &["--log", "off"]);
    serve.signal(Signal::INT);
    let (status, log) = serve.wait();
    assert_eq!((status.code(), log.as_str()), (Some(0), ""));
    assert!(!scratch.socket().exists());
}

#[test]
fn killed_executor_is_detected_and_its_socket_replaced() {
    let scratch = Scratch::new("killed");
    let socket = scratch.socket();
    let mut serve = Serve::start(&socket, &[]);
    let mut guest = serve.guest(&socket);
    let buffer = guest.alloc(8);
    serve.child.kill().expect("it is there");
    serve.wait();
    // Requests may still fit the window; a reply will not come.
    let mut message = Vec::new();
    Request::Read {
        buffer,
        offset: 0,
        len: 8,
    }
    .encode(guest.protocol, &mut message);
    let answer = guest
        .end
        .send(&message, (&[][..]).into())
        .and_then(|_| guest.end.receive(&mut Vec::new(), (&mut [0; 8][..]).into()));
    assert!(answer.is_err(), "{answer:?}");
    assert!(guest.end.is_closed());

    assert!(socket.exists(), "nobody could remove it");
    let serve = Serve::start(&socket, &[]);
    serve.guest(&socket).alloc(8);
    serve.signal(Signal::TERM);
    assert_eq!(serve.wait().0.code(), Some(0));
}

#[test]
fn executor_serves_several_endpoints_and_limits_guests() {
    let scratch = Scratch::new("several");
    let (one, two) = (
        scratch.path().join("one.sock"),
        scratch.path().join("two.sock"),
    );
    let endpoint = format!("unix:{}", two.display());
    let serve = Serve::start(&one, &["--listen", &endpoint, "--max-guests", "2"]);
    assert_eq!(
        serve.ready,
        format!("ready unix:{} {endpoint}\n", one.display())
    );
    let first = serve.guest(&one);
    let second = serve.guest(&two);
    let third = Guest::new(Box::new(connect(&one, TIMEOUT).expect("a connection")));
    assert!(third.ended().contains("serves 2 guests"));
    drop((first, second));
    serve.signal(Signal::TERM);
    assert_eq!(serve.wait().0.code(), Some(0));
    assert!(!one.exists() && !two.exists());
}

#[test]
fn guests_see_the_memory_limit_as_device_memory() {
    let scratch = Scratch::new("memory");
    let serve = Serve::start(&scratch.socket(), &[]);
    let mut guest = serve.guest(&scratch.socket());
    let reply = guest.ask(&Request::Memory {});
    assert!(
        matches!(reply, Reply::Memory { total, .. } if total == 64 << 20),
        "{reply:?}"
    );
    serve.signal(Signal::TERM);
    serve.wait();
}

#[test]
fn backend_of_ggml_needs_isolated_or_trusted_guests() {
    let scratch = Scratch::new("ggml");
    let endpoint = format!("unix:{}", scratch.socket().display());
    let engine = [
        "serve",
        "--listen",
        &endpoint,
        "--engine",
        "ggml:/nonexistent/libggml-hip.so",
    ];
    let refused = "give each guest a process with --isolate, or allow it with --trust-guests";
    let text = fails(&mut vgpu(&engine));
    assert!(text.contains(refused), "{text}");
    let text = fails(vgpu(&engine).arg("--trust-guests"));
    assert!(!text.contains(refused), "{text}");
    assert!(
        text.contains("the engine ggml does not start: /nonexistent/libggml-hip.so"),
        "{text}"
    );
}

/// A machine may have backends of ggml, which are found, too: the test asserts nothing of those.
#[test]
fn backends_of_ggml_are_looked_for_and_a_refusal_has_its_reason() {
    let scratch = Scratch::new("any-ggml");
    let folder = scratch.path();
    fs::write(folder.join("libggml-vulkan.so"), "no library").expect("a file");
    fs::write(folder.join("libggml-cpu-zen4.so"), "no library").expect("a file");
    // Refused when an engine is chosen.
    let endpoint = format!("unix:{}", folder.join("vgpu.sock").display());
    let refused = [
        "--listen",
        &endpoint,
        "--weights-cache",
        "/proc/none,size=1M",
    ];
    let log = |arguments: &[&str]| {
        let arguments = [&["serve"][..], arguments, &refused].concat();
        fails(
            vgpu(&arguments)
                .env("LD_LIBRARY_PATH", folder)
                .env("GGML_BACKEND_PATH", folder.join("libggml-cpu-zen4.so")),
        )
    };
    let text = log(&["--engine", "ggml"]);
    assert!(text.contains("allow it with --trust-guests"), "{text}");
    assert!(!text.contains("is refused"), "{text}");

    let text = log(&["--engine", "ggml", "--trust-guests"]);
    for refused in [
        format!(
            "a backend of ggml is refused: {}/libggml-cpu-zen4.so: GGML_BACKEND_PATH names no \
             backend of a GPU",
            folder.display()
        ),
        format!(
            "a backend of ggml is refused: {}/libggml-vulkan.so: file too short",
            folder.display()
        ),
    ] {
        assert!(text.contains(&refused), "{refused:?} is not in {text}");
    }
    if !text.contains("is taken") {
        let error = "no backend library of ggml for a GPU can be used";
        assert!(text.contains(error), "{text}");
        for place in [&folder.display().to_string(), "/usr/lib/ollama", "/app"] {
            assert!(text.contains(place), "{place} is not in {text}");
        }
    }

    // A library that a guest could end is not loaded without leave.
    let text = log(&["--engine", "auto"]);
    assert!(!text.contains("is refused"), "{text}");
    if text.contains("auto: the engine cpu") {
        assert!(text.contains("is not tried"), "{text}");
        let text = log(&["--engine", "auto", "--trust-guests"]);
        assert!(text.contains("is refused"), "{text}");
    }
}

#[test]
fn executor_uses_a_gpu_when_one_is_present() {
    let scratch = Scratch::new("gpu");
    let socket = scratch.socket();
    let endpoint = format!("unix:{}", socket.display());
    let absent = ["serve", "--listen", &endpoint, "--engine", "cuda:4096"];
    let text = fails(&mut vgpu(&absent));
    assert!(
        text.contains("the engine cuda:4096 does not start"),
        "{text}"
    );
    assert!(
        text.contains("libcuda.so.1) is not installed") || text.contains("there is no GPU 4096"),
        "{text}"
    );
    let text = fails(&mut vgpu(&["serve", "--engine", "abacus"]));
    assert!(
        text.contains("expected cpu, cuda, cuda:N, cuda:N,M, cuda:all, ggml, ggml:PATH,"),
        "{text}"
    );

    // Without `--engine`, which `vgpu` would add.
    let mut command = Command::new(env!("CARGO_BIN_EXE_vgpu"));
    command
        .args(["serve", "--listen", &endpoint, "--threads", "1"])
        .args(["--memory", "64M", "--config", "/dev/null"])
        .env_remove("VGPU_LOG");
    let serve = Serve::of(command);
    assert_eq!(serve.ready, format!("ready {endpoint}\n"));
    let mut guest = serve.guest(&socket);
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GraphId(1), &add(2, a, a, a));
    guest.submit(GraphId(1));
    assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert!(status.success(), "{log}");
    assert!(log.contains("auto: the engine c"), "{log}");
}

#[test]
fn help_and_version_are_printed() {
    let help = vgpu(&["serve", "--help"])
        .output()
        .expect("the command starts");
    let help = String::from_utf8(help.stdout).expect("text");
    // The port of NVIDIA's exporter of metrics.
    assert!(!help.contains(":9400"), "{help}");
    for words in [
        "--listen",
        "--engine",
        "--threads",
        "--memory",
        "--log",
        "unix:/run/vgpu/vgpu.sock",
    ] {
        assert!(
            help.contains(words),
            "{words:?} is not in the help:\n{help}"
        );
    }
    let version = vgpu(&["--version"]).output().expect("the command starts");
    let expected = format!("vgpu {}\n", env!("VGPU_VERSION"));
    assert_eq!(String::from_utf8(version.stdout).expect("text"), expected);
}

#[test]
fn errors_contain_a_remedy() {
    let scratch = Scratch::new("errors");
    let socket = scratch.socket();
    let serve = Serve::start(&socket, &[]);
    let in_use = format!("unix:{}", socket.display());
    let text = fails(&mut vgpu(&["serve", "--listen", &in_use]));
    assert!(
        text.contains("already listens here; stop that process"),
        "{text}"
    );
    serve.signal(Signal::TERM);
    serve.wait();

    let nowhere = format!("unix:{}/no/such/vgpu.sock", scratch.path().display());
    let text = fails(&mut vgpu(&["serve", "--listen", &nowhere]));
    assert!(
        text.contains(&format!("mkdir -p {}/no/such", scratch.path().display())),
        "{text}"
    );

    let file = scratch.path().join("file");
    fs::write(&file, "precious").expect("a file");
    let text = fails(&mut vgpu(&[
        "serve",
        "--listen",
        &format!("unix:{}", file.display()),
    ]));
    assert!(text.contains("not a socket; remove the file"), "{text}");
    assert_eq!(fs::read_to_string(&file).expect("the file"), "precious");

    let text = fails(&mut vgpu(&["serve", "--listen", "inproc"]));
    assert!(
        text.contains("cannot listen there; use unix:/path/to/socket"),
        "{text}"
    );
    let text = fails(&mut vgpu(&["serve", "--listen", "udp:1.2.3.4:5"]));
    assert!(text.contains("unknown kind `udp`"), "{text}");
    let text = fails(&mut vgpu(&["serve", "--listen", "tcp:1.2.3.4:5"]));
    assert!(text.contains("create them with `vgpu cert`"), "{text}");
    let text = fails(&mut vgpu(&["serve", "--memory", "lots"]));
    assert!(
        text.contains("unknown unit \"LOTS\": use K, M, G or T"),
        "{text}"
    );
    for (filter, why) in [
        ("a=b=c", "\"b=c\" is not a level"),
        ("debugg", "\"debugg\" is not a level"),
        ("info;debug", "\"info;debug\" is not a level"),
        ("vgpu_executor=", "\"\" is not a level"),
        (
            "[session]=debug",
            "\"[session]\" is not the name of a crate",
        ),
        (" , ", "the filter names no level"),
    ] {
        let text = fails(&mut vgpu(&["serve", "--log", filter]));
        assert!(
            text.contains("--log") && text.contains("is not a log filter") && text.contains(why),
            "{filter:?}: {text}"
        );
    }
    let text = fails(vgpu(&["serve"]).env("VGPU_LOG", "a=b=c"));
    assert!(
        text.contains("VGPU_LOG") && text.contains("is not a log filter"),
        "{text}"
    );
}

#[test]
fn a_directory_without_permission_is_explained() {
    // The superuser may write anywhere, so the command runs as another user, who may not be able to
    // reach the build folder.
    let scratch = Scratch::new("permission");
    let copy = scratch.path().join("vgpu");
    copy_program(&copy);
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o555)).expect("ours");
    let endpoint = format!("unix:{}", scratch.socket().display());
    let mut command = Command::new(copy);
    command
        .args(["serve", "--engine", "cpu", "--listen", &endpoint])
        .env_remove("VGPU_LOG");
    if rustix::process::geteuid().is_root() {
        std::os::unix::process::CommandExt::uid(&mut command, 65534);
    }
    let text = fails(&mut command);
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).expect("ours");
    assert!(text.contains("Permission denied"), "{text}");
    assert!(
        text.contains("may not write to") && text.contains("VGPU_ENDPOINT"),
        "{text}"
    );
}
