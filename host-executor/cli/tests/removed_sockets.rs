//! Somebody removes the sockets of a running `vgpu serve`.

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../tests/machine/mod.rs"]
mod machine;
mod served;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use common::{Guest, TIMEOUT, add, bytes};
use machine::Machine;
use rustix::process::Signal;
use served::{Scratch, Serve, vgpu};
use vgpu_transport::wire::GraphId;

fn compute(guest: &mut Guest, graph: u64) {
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GraphId(graph), &add(2, a, a, a));
    guest.submit(GraphId(graph));
    assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
}

/// The lines of the log of `serve`.
fn log_of(serve: &mut Serve) -> Receiver<String> {
    let log = BufReader::new(serve.child.stderr.take().expect("piped"));
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        let lines = log.lines().map_while(Result::ok);
        lines.for_each(|line| drop(sender.send(line)));
    });
    lines
}

/// The next line that has these words.
fn line_with(log: &Receiver<String>, words: &[&str]) -> String {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let line = log.recv_timeout(left);
        let line = line.unwrap_or_else(|_| panic!("no line with {words:?}"));
        if words.iter().all(|words| line.contains(words)) {
            return line;
        }
    }
}

fn wait_for_file(path: &Path) {
    let deadline = Instant::now() + TIMEOUT;
    while !path.exists() {
        assert!(
            Instant::now() < deadline,
            "{} is not bound again",
            path.display()
        );
        thread::sleep(Duration::from_millis(20));
    }
}

fn metrics(socket: &Path) -> String {
    let mut client = UnixStream::connect(socket).expect("a listener");
    client.set_read_timeout(Some(TIMEOUT)).expect("a socket");
    let request = b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    client.write_all(request).expect("it reads");
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
fn removed_sockets_are_bound_again_and_sessions_stay() {
    for more in [&[][..], &["--isolate", "--guest-memory", "20M"]] {
        let scratch = Scratch::new("removed");
        let at = |name: &str| scratch.path().join(name);
        let (socket, control, figures) = (scratch.socket(), at("control.sock"), at("m.sock"));
        let vsock = format!("vsock:{}:7", at("vsock").display());
        let (control_text, figures_text) = (
            control.display().to_string(),
            format!("unix:{}", figures.display()),
        );
        let arguments = [
            &[
                "--control",
                &control_text,
                "--metrics",
                &figures_text,
                "--listen",
                &vsock,
            ][..],
            more,
        ]
        .concat();
        let serve = Serve::start(&socket, &arguments);
        let mut first = serve.guest(&socket);
        compute(&mut first, 1);
        let all = [&socket, &control, &figures, &at("vsock_7")].map(PathBuf::clone);
        for file in &all {
            fs::remove_file(file).expect("it is there");
        }
        all.iter().for_each(|file| wait_for_file(file));
        let mode = |file: &Path| {
            fs::metadata(file)
                .expect("it is there")
                .permissions()
                .mode()
        };
        // The permissions follow the file, and the socket listens after that.
        let start = Instant::now();
        while (mode(&socket) & 0o777, mode(&control) & 0o777) != (0o660, 0o600)
            || UnixStream::connect(&control).is_err()
        {
            assert!(start.elapsed() < TIMEOUT, "nobody listens there again");
            thread::sleep(Duration::from_millis(5));
        }

        let mut second = serve.guest(&socket);
        compute(&mut second, 1);
        compute(&mut first, 2);
        let ps = vgpu(&["ps", "--json", "--control", &control_text]).output();
        let ps = ps.expect("it starts");
        assert!(ps.status.success(), "{ps:?}");
        assert!(metrics(&figures).starts_with("HTTP/1.1 200"));
        drop((first, second));
        serve.signal(Signal::TERM);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
        for file in &all {
            let line = format!(
                "{}: the file of this socket was removed; listening there again",
                file.display()
            );
            assert_eq!(log.matches(&line).count(), 1, "{line}: {log}");
            assert!(!file.exists(), "{} is left behind", file.display());
        }
    }
}

#[test]
fn file_in_the_place_of_a_socket_is_kept_and_named() {
    let scratch = Scratch::new("replaced");
    let socket = scratch.socket();
    let mut serve = Serve::start(&socket, &[]);
    let log = log_of(&mut serve);
    // One step, so that the executor never finds nothing there.
    let other = scratch.path().join("other");
    fs::write(&other, "kept").expect("a file");
    fs::rename(&other, &socket).expect("one file system");
    let path = socket.display().to_string();
    let line = line_with(&log, &[&path, "so that nobody can connect"]);
    let expected = "the file exists and is not a socket; remove that file. Open connections stay";
    assert!(line.contains(expected), "{line}");
    assert_eq!(fs::read_to_string(&socket).expect("a file"), "kept");
    // When it is gone, the executor listens again.
    fs::remove_file(&socket).expect("a file");
    line_with(&log, &[&path, "listening there again"]);
    compute(&mut serve.guest(&socket), 1);
}

/// Neither the present machine nor the next one notices.
#[test]
fn removed_socket_of_a_virtual_machine_is_bound_again() {
    let scratch = Scratch::new("removed-vm");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let serve = Serve::start(&scratch.socket(), &["--vm", &vm]);
    let machine = Machine::plug(&socket);
    let mut program = machine.guest();
    compute(&mut program, 1);
    fs::remove_file(&socket).expect("it is there");
    wait_for_file(&socket);
    compute(&mut program, 2);
    drop((program, machine));
    compute(&mut Machine::plug(&socket).guest(), 1);
    serve.signal(Signal::TERM);
    assert_eq!(serve.wait().0.code(), Some(0));
}

/// The process of a virtual machine has given up what making sockets needs.
#[test]
fn confined_process_says_that_its_socket_was_removed() {
    let scratch = Scratch::new("removed-confined");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let arguments = ["--isolate", "--guest-memory", "20M", "--vm", &vm];
    let mut serve = Serve::start(&scratch.socket(), &arguments);
    let log = log_of(&mut serve);
    let machine = Machine::plug(&socket);
    let mut program = machine.guest();
    fs::remove_file(&socket).expect("it is there");
    let path = socket.display().to_string();
    let line = line_with(&log, &[&path, "the file of this socket was removed"]);
    let expected = "Operation not permitted (os error 1); this process may not do so, by its \
                    sandbox or the permissions of the folder: restart the executor";
    assert!(line.contains(expected), "{line}");
    compute(&mut program, 1);
}
