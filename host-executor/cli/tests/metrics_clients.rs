//! What clients of the metrics of a real `vgpu serve` can make it spend. Every user of the machine
//! may be one.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use common::TIMEOUT;
use rustix::process::Signal;
use served::{Scratch, Serve};

/// Clients that stay, at most (`MAX_CLIENTS`).
const MOST_CLIENTS: usize = 16;

/// An executor with metrics on a port of its own.
struct Metrics {
    serve: Serve,
    port: u16,
}

impl Metrics {
    fn start(scratch: &Scratch, more: &[&str]) -> Metrics {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = free.local_addr().expect("bound").port();
        drop(free);
        let address = format!("127.0.0.1:{port}");
        let arguments = [&["--metrics", &address], more].concat();
        let serve = Serve::start(&scratch.socket(), &arguments);
        let metrics = Metrics { serve, port };
        // Both threads for answers have run.
        assert!(metrics.get("/metrics").contains(" 200 "));
        assert!(metrics.get("/livez").contains(" 200 "));
        metrics
    }

    fn connect(&self) -> TcpStream {
        let client = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("it listens");
        client.set_read_timeout(Some(TIMEOUT)).expect("a time");
        client.set_write_timeout(Some(TIMEOUT)).expect("a time");
        client
    }

    /// The answer to a request for `path`.
    fn get(&self, path: &str) -> String {
        let mut client = self.connect();
        write!(client, "GET {path} HTTP/1.0\r\n\r\n").expect("it takes the request");
        let mut answer = String::new();
        client.read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// The number after `field` in the status of the process.
    fn status(&self, field: &str) -> u64 {
        let path = format!("/proc/{}/status", self.serve.child.id());
        let status = fs::read_to_string(path).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let number = line.and_then(|line| line.trim_start_matches(':').split_whitespace().next());
        number
            .and_then(|number| number.parse().ok())
            .expect("a number")
    }

    fn descriptors(&self) -> usize {
        let path = format!("/proc/{}/fd", self.serve.child.id());
        // Only root may look into a process that is not dumpable.
        fs::read_dir(path).map_or(0, Iterator::count)
    }

    fn end(self) {
        self.serve.signal(Signal::TERM);
        let (status, log) = self.serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
    }
}

/// Sends as much of `bytes` as the executor takes. It may close the connection at any time.
fn send(mut client: &TcpStream, bytes: &[u8], times: usize) {
    for _ in 0..times {
        if client.write_all(bytes).is_err() {
            return;
        }
    }
}

fn nobody_is_harmed(more: &[&str], test: &str) {
    let scratch = Scratch::new(test);
    let metrics = Metrics::start(&scratch, more);
    let (threads, descriptors) = (metrics.status("Threads"), metrics.descriptors());
    let memory = metrics.status("VmRSS");

    // A body that is announced, and never comes.
    for method in ["GET", "POST"] {
        let client = metrics.connect();
        let head = format!(
            "{method} /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000000000\r\n\r\n"
        );
        send(&client, head.as_bytes(), 1);
        let mut first = [0; 12];
        (&client).read_exact(&mut first).expect("an answer");
        let expected: &[u8] = if method == "GET" {
            b"HTTP/1.1 200"
        } else {
            b"HTTP/1.1 405"
        };
        assert_eq!(first, expected);
    }
    assert!(metrics.get("/livez").contains(" 200 "));

    // A header without an end: 64 MiB.
    let client = metrics.connect();
    send(&client, b"GET / HTTP/1.1\r\nX: ", 1);
    send(&client, &[b'x'; 64 << 10], 1024);
    drop(client);

    // Requests whose answers nobody reads.
    let client = metrics.connect();
    client
        .set_write_timeout(Some(Duration::from_millis(200)))
        .expect("a time");
    send(&client, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 2000);
    assert!(metrics.get("/livez").contains(" 200 "));

    // Clients that ask for nothing.
    let silent: Vec<TcpStream> = (0..300).map(|_| metrics.connect()).collect();
    assert!(metrics.get("/livez").contains(" 200 "));
    // An idle thread takes either kind of answer, so the second one may start later.
    assert!(
        metrics.status("Threads") <= threads + 1,
        "{threads} threads before"
    );
    let now = metrics.descriptors();
    assert!(
        now <= descriptors + MOST_CLIENTS,
        "{now} descriptors, {descriptors} before"
    );
    drop((silent, client));

    // Many of them, again and again.
    for _ in 0..50 {
        let clients: Vec<TcpStream> = (0..20).map(|_| metrics.connect()).collect();
        for client in &clients {
            send(client, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 1);
        }
    }
    assert!(metrics.get("/metrics").contains("vgpu_uptime_seconds"));
    let start = Instant::now();
    while metrics.descriptors() > descriptors {
        assert!(start.elapsed() < TIMEOUT, "descriptors are left");
        thread::sleep(Duration::from_millis(20));
    }
    let grown = metrics.status("VmRSS").saturating_sub(memory);
    assert!(grown < 16 << 10, "{grown} KiB more than {memory} KiB");
    metrics.end();
}

#[test]
fn clients_of_metrics_cost_little_and_keep_nobody_away() {
    nobody_is_harmed(&[], "metrics-clients");
}

#[test]
fn clients_of_the_metrics_of_a_supervisor_cost_little_and_keep_nobody_away() {
    nobody_is_harmed(&["--isolate", "--guest-memory", "10M"], "metrics-isolate");
}
