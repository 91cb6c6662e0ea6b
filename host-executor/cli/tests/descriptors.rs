//! A real `vgpu serve` with few file descriptors.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;
use std::time::Instant;

use common::{Guest, TIMEOUT, compute};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use served::{Scratch, Serve, as_another_user, vgpu};
use vgpu_transport::wire::{Reply, Request};

fn end(serve: Serve) -> String {
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    log
}

/// Of 256 descriptors, guests may have 48: six sessions. The others are for the process itself.
#[test]
fn sessions_leave_descriptors_for_other_guests_reload_and_metrics() {
    let scratch = Scratch::new("descriptors");
    let config = scratch.path().join("vgpu.toml");
    let [metrics, control] = ["metrics", "control"].map(|name| scratch.path().join(name));
    let text = format!(
        "[metrics]\nlisten = \"unix:{}\"\n[control]\nsocket = \"{}\"\n",
        metrics.display(),
        control.display()
    );
    fs::write(&config, text).expect("a configuration");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 256; exec \"$@\"", "sh"]);
    command
        .arg(env!("CARGO_BIN_EXE_vgpu"))
        .args(["serve", "--engine", "cpu", "--listen"]);
    command.arg(format!("unix:{}", scratch.socket().display()));
    command.args(["--threads", "1", "--memory", "64M", "--config"]);
    command.arg(&config).env_remove("VGPU_LOG");
    let serve = Serve::of(command);
    let all = fs::Permissions::from_mode(0o666);
    fs::set_permissions(scratch.socket(), all).expect("it is ours");

    let mut guests: Vec<Guest> = (0..3).map(|_| serve.guest(&scratch.socket())).collect();
    let mut fourth = serve.connect(&scratch.socket());
    fourth.send(&Request::Fence {});
    let reason = fourth.ended();
    let numbers = "out of file descriptors: 8 wanted, the guest has 24, 24 of 48 are free";
    assert!(reason.contains(numbers), "{reason}");
    // Connections that do nothing take none of another guest's either.
    let silent: Vec<Guest> = (0..2).map(|_| serve.connect(&scratch.socket())).collect();
    as_another_user(|| compute(&mut serve.guest(&scratch.socket())));
    let reloaded = vgpu(&["reload", "--control"]).arg(&control).output();
    let reloaded = reloaded.expect("it starts");
    assert!(reloaded.status.success(), "{reloaded:?}");
    let mut client = UnixStream::connect(&metrics).expect("metrics are served");
    let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    client.write_all(request).expect("a request");
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    guests.iter_mut().for_each(compute);
    drop((guests, silent));
    end(serve);
}

/// The process has no descriptor left: buffers are not shared, and work.
#[test]
fn buffers_are_not_shared_when_descriptors_are_used_up() {
    let scratch = Scratch::new("no-descriptors");
    // The kernel lets nobody change the limits of a process that is not dumpable.
    let serve = Serve::start(&scratch.socket(), &["--no-sandbox"]);
    let mut guest = serve.guest(&scratch.socket());
    let mut alloc = || {
        let buffer = guest.new_buffer();
        let size = 4096;
        guest.ask(&Request::Alloc { buffer, size })
    };
    let shared = alloc();
    assert!(matches!(shared, Reply::Shared { .. }), "{shared:?}");
    let pid = Pid::from_child(&serve.child);
    let limited = Rlimit {
        current: Some(3),
        maximum: Some(3),
    };
    prlimit(Some(pid), Resource::Nofile, limited).expect("our own process");
    let start = Instant::now();
    // A file that was open a moment ago may have left its number free.
    while matches!(alloc(), Reply::Shared { .. }) {
        assert!(start.elapsed() < TIMEOUT);
        thread::yield_now();
    }
    let by_messages = alloc();
    assert!(matches!(by_messages, Reply::Done { .. }), "{by_messages:?}");
    compute(&mut guest);
    drop(guest);
    end(serve);
}
