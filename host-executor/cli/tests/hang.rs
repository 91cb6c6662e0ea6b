//! `vgpu serve` with an engine that hangs. The test stops the thread that computes, as a call of a
//! driver would that never returns; all other threads go on.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::io::{BufRead as _, BufReader, PipeReader, Read as _, Write as _};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use common::{Build, Guest, TIMEOUT, add, bytes};
use rustix::process::Signal;
use served::{Scratch, Serve, vgpu};
use vgpu_transport::ir::{Op, PoolKind, Shape, Type};
use vgpu_transport::wire::{GraphId, Reply, Request};

/// A thread of another process that this thread has stopped with ptrace.
struct StoppedThread(libc::pid_t);

impl StoppedThread {
    /// Stops the thread of `pid` with this name. `None` if the system does not permit it.
    fn stop(pid: u32, name: &str) -> Option<StoppedThread> {
        let find = || -> Option<libc::pid_t> {
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process is there");
            let is_named = |task: &fs::DirEntry| {
                fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
            };
            let task = tasks.filter_map(|task| task.ok()).find(is_named)?;
            task.file_name().to_str()?.parse().ok()
        };
        // A thread has its name when it has run.
        let start = Instant::now();
        let tid = loop {
            match find() {
                Some(tid) => break tid,
                None if start.elapsed() < TIMEOUT => thread::sleep(Duration::from_millis(1)),
                None => panic!("no thread {name}"),
            }
        };
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: both requests take no memory of this process.
        let done = unsafe {
            libc::ptrace(libc::PTRACE_SEIZE, tid, none, none) == 0
                && libc::ptrace(libc::PTRACE_INTERRUPT, tid, none, none) == 0
        };
        let stopped = StoppedThread(tid);
        done.then(|| {
            assert!(stopped.wait(0), "the thread stops");
            stopped
        })
    }

    /// Waits for a change of the thread's state. Returns whether there was one.
    fn wait(&self, flags: libc::c_int) -> bool {
        // SAFETY: the status is not asked for, so the call writes no memory.
        let waited = unsafe { libc::waitpid(self.0, std::ptr::null_mut(), libc::__WALL | flags) };
        waited == self.0
    }
}

impl Drop for StoppedThread {
    /// Lets the thread go, or sees its end: until then the end of its process is not reported.
    fn drop(&mut self) {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the request takes no memory of this process. The request fails if the thread has
        // ended.
        let detached = unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, none, none) };
        if detached != 0 {
            self.wait(libc::WNOHANG);
        }
    }
}

/// Why a test was skipped.
const NO_PTRACE: &str = "this system does not permit ptrace, so no thread can be stopped";

/// A guest whose graph takes hours.
fn compute_forever(guest: &mut Guest) {
    let f32 = |ne| Shape::contiguous(Type::F32, ne).expect("a dense tensor");
    let [from, to] = [0; 2].map(|_| guest.alloc(64 << 20));
    let op = Op::Pool2d {
        kind: PoolKind::Max,
        k0: 512,
        k1: 512,
        s0: 1,
        s1: 1,
        p0: 0,
        p1: 0,
    };
    let mut build = Build::default();
    let to = build.place(f32([3585, 3585, 1, 1]), to, 0);
    let from = build.place(f32([4096, 4096, 1, 1]), from, 0);
    build.node(op, to, &[from]);
    guest.graph(GraphId(1), &build.0);
    guest.fence();
    guest.submit(GraphId(1));
    guest.send(&Request::Fence {});
}

/// A line of a dump without what differs from run to run: the version, numbers with their units,
/// paths, the processor, and whether a side sleeps.
fn shape(line: &str) -> String {
    let (name, version) = line.split_once(' ').unwrap_or((line, ""));
    let line = match version.split_once(", process ") {
        Some((_, process)) => format!("{name} VERSION, process {process}"),
        None => line.to_owned(),
    };
    let words = line.split(' ').map(|word| match word.split_once("unix:") {
        Some((before, _)) => format!("{before}unix:PATH"),
        None => word.to_owned(),
    });
    let line = words.collect::<Vec<_>>().join(" ");
    let mut shape = String::new();
    let mut rest = line.as_str();
    while let Some(at) = rest.find(|c: char| c.is_ascii_digit()) {
        let (text, number) = rest.split_at(at);
        let end = number.find(|c: char| !c.is_ascii_digit() && c != '.');
        rest = number.split_at(end.unwrap_or(number.len())).1;
        for unit in ["ns", "µs", "ms", "s"] {
            let is_unit = |after: &str| !after.starts_with(char::is_alphanumeric);
            if let Some(after) = rest.strip_prefix(unit).filter(|after| is_unit(after)) {
                rest = after;
                break;
            }
        }
        shape += text;
        shape.push('#');
    }
    shape += rest;
    if let Some((engine, (_, state))) = { shape.split_once(": ") }
        .filter(|(engine, _)| engine.starts_with("engine "))
        .and_then(|(engine, rest)| Some((engine, rest.rsplit_once("; ")?)))
    {
        return format!("{engine}: PROCESSOR; {state}");
    }
    shape.replace("sleep # until #", "awake")
}

/// Waits until the thread of `pid` with this name has used the processor for 0.4 s. With one thread
/// the thread of a session computes, and nothing before a graph takes so long.
fn wait_until_computing(pid: u32, name: &str) {
    const TICKS: u64 = 40; // of 10 ms
    let start = Instant::now();
    let ticks = || -> u64 {
        let tasks = fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten();
        tasks
            .filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok())
            .filter_map(|stat| {
                let (head, fields) = stat.rsplit_once(") ")?;
                // Field 14 of proc_pid_stat(5): the fields behind the name begin with the third.
                let user = fields.split(' ').nth(11)?.parse::<u64>().ok()?;
                head.ends_with(&format!("({name}")).then_some(user)
            })
            .sum()
    };
    while ticks() < TICKS {
        assert!(start.elapsed() < TIMEOUT, "the graph does not begin");
        thread::sleep(Duration::from_millis(10));
    }
}

/// An executor whose engine hangs, with the guest that has it.
struct Hanging {
    // Before the process, whose end waits for that of the thread.
    stopped: StoppedThread,
    serve: Serve,
    _holder: Guest,
}

fn hanging(scratch: &Scratch, more: &[&str]) -> Option<Hanging> {
    let endpoint = format!("unix:{}", scratch.socket().display());
    let mut arguments = vec![
        "serve",
        "--listen",
        &endpoint,
        "--threads",
        "1",
        "--memory",
        "512M",
        "--max-node-time",
        "4000000000",
        // A process in the sandbox cannot be traced.
        "--no-sandbox",
    ];
    arguments.extend(more);
    let serve = Serve::of(vgpu(&arguments));
    let mut holder = serve.guest(&scratch.socket());
    compute_forever(&mut holder);
    wait_until_computing(serve.child.id(), "vgpu-guest-1");
    let Some(stopped) = StoppedThread::stop(serve.child.id(), "vgpu-guest-1") else {
        assert!(std::env::var_os("CI").is_none(), "{NO_PTRACE}");
        println!("skipped: {NO_PTRACE}");
        return None;
    };
    Some(Hanging {
        stopped,
        serve,
        _holder: holder,
    })
}

impl Hanging {
    /// Waits for the end of the process. Returns the exit status and the log.
    fn wait(self) -> (ExitStatus, String) {
        let Hanging {
            mut serve, stopped, ..
        } = self;
        let start = Instant::now();
        // The kernel reports the end of the process after that of the traced thread has been seen.
        while !stopped.wait(libc::WNOHANG) {
            assert!(start.elapsed() < TIMEOUT, "the process does not end");
            assert!(serve.child.try_wait().expect("a child").is_none());
            thread::sleep(Duration::from_millis(5));
        }
        serve.wait()
    }
}

fn run(arguments: &[&str]) -> String {
    let output = vgpu(arguments).output().expect("the command starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn operator_sees_what_hangs_and_sigterm_ends_the_process() {
    let scratch = Scratch::new("hang");
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (control, metrics) = (path("control.sock"), path("metrics.sock"));
    let at = format!("unix:{metrics}");
    let more = [
        "--control",
        &control,
        "--metrics",
        &at,
        "--max-turn-time",
        "0",
    ];
    let Some(hanging) = hanging(&scratch, &more) else {
        return;
    };
    let mut other = hanging.serve.guest(&scratch.socket());
    let number = other.alloc_with(&bytes(&[3.0]));
    other.graph(GraphId(1), &add(1, number, number, number));
    other.fence();
    other.submit(GraphId(1));
    assert!(run(&["ps", "--control", &control]).contains("test"));
    let mut scrape = UnixStream::connect(&metrics).expect("metrics");
    scrape
        .write_all(b"GET /metrics HTTP/1.0\r\n\r\n")
        .expect("a request");
    let mut text = String::new();
    scrape.read_to_string(&mut text).expect("an answer");
    assert!(text.contains("vgpu_turn_age_seconds"), "{text}");
    // After 10 s, the watchdog takes it for an engine that hangs.
    let health = first_ill_health(&metrics);
    let (head, health) = health.split_once("\r\n\r\n").expect("a head");
    assert!(head.contains(" 503 "), "{head}");
    assert!(health.contains("the engine hangs: session 1"), "{health}");
    let dump = run(&["dump", "--control", &control]);
    println!("{dump}\n{health}");
    for part in [
        "turn: session 1 (guest uid:",
        "program test",
        "graph 1 of 1 nodes, node 0 (POOL_2D) takes longest by estimate; 1 wait for it",
        "session 2 (guest uid:",
        "waits for the engine, request 6 (SUBMIT), for",
        "; session 1 has it; 6 requests received, 5 done",
        "link: requests put",
    ] {
        assert!(dump.contains(part), "{part:?} is not in:\n{dump}");
    }
    let killed = vgpu(&["kill", "1", "--wait", "1s", "--control", &control]).output();
    let killed = killed.expect("the command starts");
    let said = String::from_utf8_lossy(&killed.stderr);
    assert_eq!(killed.status.code(), Some(1), "{said}");
    assert!(
        said.contains("session 1 has not ended 1s after it was told to"),
        "{said}"
    );
    hanging.serve.signal(Signal::USR1);
    thread::sleep(Duration::from_millis(200));
    hanging.serve.signal(Signal::TERM);
    assert_eq!(other.ended(), "the host is shutting down");
    let (status, log) = hanging.wait();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("dump: turn: session 1"), "{log}");
    assert!(log.contains("1 sessions do not end"), "{log}");
    let warning = { log.lines() }
        .find_map(|line| Some(line.split_once("has had the engine without a pause")?.1))
        .unwrap_or_else(|| panic!("no warning in:\n{log}"));
    println!("{warning}");

    // The documentation has all three.
    let shapes = |text: &str| text.lines().map(shape).collect::<Vec<_>>();
    assert_eq!(shapes(&documented("$ vgpu dump")), shapes(&dump), "{dump}");
    let page = documented("$ curl --unix-socket /run/vgpu/metrics.sock http://localhost/healthz");
    assert_eq!(shapes(page.trim_end()), shapes(health.trim_end()));
    let page = documented("$ journalctl --unit vgpu --grep \"without a pause\" --output cat");
    let page = page.split_once("has had the engine without a pause");
    assert_eq!(shape(page.expect("a line").1.trim_end()), shape(warning));
    // A turn of an engine that does not hang is over long before.
    let turn = documented("$ vgpu dump");
    let age = turn.split_once(" has the engine for ").expect("a turn").1;
    let age: f64 = { age.split_once("s,") }
        .and_then(|(age, _)| age.parse().ok())
        .expect("a turn of some seconds");
    assert!(age > 10.0, "{age}");
}

/// What the transcript of docs/troubleshooting.md has below a command, up to the next one.
fn documented(command: &str) -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/troubleshooting.md");
    let page = fs::read_to_string(page).expect("a page");
    let text = page.split_once(&format!("{command}\n"));
    let text = text.unwrap_or_else(|| panic!("no {command}")).1;
    let end = ["\n$ ", "```"].map(|end| text.find(end).unwrap_or(text.len()));
    let [next, over] = end;
    let end = if next < over { next + 1 } else { over };
    text[..end].to_owned()
}

/// 16 commands wait for a main thread that hangs, and further ones are refused. A dump is answered.
#[test]
fn dump_is_answered_while_all_other_commands_wait_for_the_main_thread() {
    let scratch = Scratch::new("hang-main");
    let control = scratch.path().join("control.sock").display().to_string();
    let more = ["--no-sandbox", "--control", &control];
    let serve = Serve::start(&scratch.socket(), &more);
    let Some(stopped) = StoppedThread::stop(serve.child.id(), "vgpu") else {
        assert!(std::env::var_os("CI").is_none(), "{NO_PTRACE}");
        println!("skipped: {NO_PTRACE}");
        return;
    };
    let reloads: Vec<_> = (0..16)
        .map(|_| {
            let mut socket = UnixStream::connect(&control).expect("a socket");
            socket.write_all(b"reload\n").expect("a command");
            socket
        })
        .collect();
    let refused = vgpu(&["ps", "--control", &control]).output();
    let refused = refused.expect("the command starts");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        said.contains("16 clients of the control socket wait"),
        "{said}"
    );
    let dump = run(&["dump", "--control", &control]);
    assert!(dump.contains("engine cpu: "), "{dump}");
    drop(stopped);
    for mut socket in reloads {
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("an answer");
        assert!(answer.contains("\"ok\":"), "{answer}");
    }
    serve.signal(Signal::TERM);
    serve.wait();
}

/// A graph of hours takes turns of 0.1 s, and the graph of another program waits behind it or takes
/// turns, too. The log says of both that they last.
#[test]
fn requests_that_last_are_in_the_log_although_they_take_turns() {
    let scratch = Scratch::new("long-requests");
    let control = scratch.path().join("control.sock").display().to_string();
    let endpoint = format!("unix:{}", scratch.socket().display());
    let fixed = [
        "serve",
        "--listen",
        &endpoint,
        "--threads",
        "1",
        "--memory",
        "1G",
    ];
    let more = ["--max-node-time", "4000000000", "--control", &control];
    let serve = Serve::of(vgpu(&[&fixed[..], &more[..]].concat()));
    let mut guests = [0; 2].map(|_| serve.guest(&scratch.socket()));
    guests.iter_mut().for_each(compute_forever);
    let start = Instant::now();
    // Longer than 10 s, at which the log has the first lines.
    thread::sleep(Duration::from_secs(13));
    let dump = run(&["dump", "--control", &control]);
    let lines: Vec<&str> = dump
        .lines()
        .filter(|line| line.contains("(SUBMIT)"))
        .collect();
    let lines: Vec<_> = lines
        .into_iter()
        .filter(|line| line.starts_with("  "))
        .collect();
    assert_eq!(lines.len(), 2, "{dump}");
    let mut with_turns = 0;
    for line in lines {
        let (_, request) = line.split_once("; request for ").expect("an age");
        let age = request
            .split_once("s, ")
            .and_then(|(age, _)| age.parse::<f64>().ok());
        let age = age.unwrap_or_else(|| panic!("{line}"));
        assert!(
            (12.0..=start.elapsed().as_secs_f64() + 60.0).contains(&age),
            "{line}"
        );
        let has_turns = !request.contains(" 0 turns over");
        with_turns += usize::from(has_turns);
        let queued = request.split_once("queued for ").expect("a time").1;
        let queued = queued
            .split_once("s;")
            .and_then(|(time, _)| time.parse::<f64>().ok());
        assert!(
            has_turns || queued.is_some_and(|queued| queued >= 12.0),
            "{line}"
        );
    }
    assert!(with_turns > 0, "{dump}");
    serve.signal(Signal::TERM);
    let (_, log) = serve.wait();
    for session in ["session 1 (guest", "session 2 (guest"] {
        let is_of =
            |line: &&str| line.contains(session) && line.contains("turns of which are over");
        let line = log.lines().find(is_of);
        let line = line.unwrap_or_else(|| panic!("no line about {session}:\n{log}"));
        assert!(
            line.contains(" WARN ") && line.contains("(SUBMIT)"),
            "{line}"
        );
    }
}

/// What `/healthz` answers.
fn health(metrics: &str) -> String {
    let mut asked = UnixStream::connect(metrics).expect("metrics");
    let head = asked.write_all(b"GET /healthz HTTP/1.0\r\n\r\n");
    head.expect("a request");
    let mut text = String::new();
    asked.read_to_string(&mut text).expect("an answer");
    text
}

/// The first answer of `/healthz` that is not 200.
fn first_ill_health(metrics: &str) -> String {
    let start = Instant::now();
    loop {
        let text = health(metrics);
        if !text.contains(" 200 ") {
            return text;
        }
        assert!(start.elapsed() < TIMEOUT, "{text}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// The threads that would find an engine that hangs do not run, and `/healthz` says so. A process
/// that was stopped as a whole is healthy.
#[test]
fn healthz_reports_threads_that_do_not_run() {
    let scratch = Scratch::new("healthz");
    let metrics = scratch.path().join("metrics.sock").display().to_string();
    let at = format!("unix:{metrics}");
    let serve = Serve::start(&scratch.socket(), &["--no-sandbox", "--metrics", &at]);
    let ok = "ok: the engine cpu answers";
    assert!(health(&metrics).contains(ok), "{}", health(&metrics));
    // The watchdog first: it has not run yet.
    for (thread, reason) in [
        ("vgpu-watchdog", "the watchdog has not run for "),
        ("vgpu", "the main thread has not run for "),
    ] {
        let Some(stopped) = StoppedThread::stop(serve.child.id(), thread) else {
            assert!(std::env::var_os("CI").is_none(), "{NO_PTRACE}");
            println!("skipped in part: {NO_PTRACE}");
            break;
        };
        let ill = first_ill_health(&metrics);
        assert!(ill.contains(" 503 ") && ill.contains(reason), "{ill}");
        drop(stopped);
        let well = health(&metrics);
        assert!(well.contains(ok), "{well}");
    }
    serve.signal(Signal::STOP);
    thread::sleep(Duration::from_secs(11));
    serve.signal(Signal::CONT);
    let after = health(&metrics);
    assert!(after.contains(ok), "{after}");
}

/// A process that does not outlive its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Both fail only if the process has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `vgpu serve` with a log that nobody reads.
struct UnreadLog {
    serve: Killed,
    reader: PipeReader,
    capacity: usize,
}

impl UnreadLog {
    fn start(scratch: &Scratch, more: &[&str]) -> UnreadLog {
        let endpoint = format!("unix:{}", scratch.socket().display());
        let mut serve = vgpu(&["serve", "--listen", &endpoint, "--threads", "1"]);
        serve.args(more);
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let capacity = rustix::pipe::fcntl_setpipe_size(&writer, 4096).expect("a smaller pipe");
        serve.stdout(Stdio::piped()).stderr(writer);
        let mut serve = Killed(serve.spawn().expect("the command starts"));
        let mut ready = String::new();
        let stdout = serve.0.stdout.take().expect("a pipe");
        BufReader::new(stdout)
            .read_line(&mut ready)
            .expect("a line");
        assert!(ready.starts_with("ready "), "{ready}");
        UnreadLog {
            serve,
            reader,
            capacity,
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_child(&self.serve.0);
        rustix::process::kill_process(pid, signal).expect("a process");
    }

    /// Fills the pipe with dumps, and asks for more.
    fn fill(&self) {
        let is_full = || {
            let unread = rustix::io::ioctl_fionread(&self.reader).expect("a pipe");
            // A line of the dump is shorter.
            unread as usize + 300 > self.capacity
        };
        let start = Instant::now();
        while !is_full() {
            assert!(start.elapsed() < TIMEOUT, "the dump is not in the log");
            self.signal(Signal::USR1);
            thread::sleep(Duration::from_millis(5));
        }
        for _ in 0..10 {
            self.signal(Signal::USR1);
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the process. Returns its log, which is read from then on if `is_read`.
    fn end(self, is_read: bool) -> String {
        let UnreadLog {
            mut serve, reader, ..
        } = self;
        let read = |mut reader: PipeReader| {
            let mut text = String::new();
            reader.read_to_string(&mut text).expect("a log");
            text
        };
        let (reader, log) = match is_read {
            true => (None, Some(thread::spawn(move || read(reader)))),
            false => (Some(reader), None),
        };
        let pid = rustix::process::Pid::from_child(&serve.0);
        rustix::process::kill_process(pid, Signal::TERM).expect("a process");
        let start = Instant::now();
        let status = loop {
            if let Some(status) = serve.0.try_wait().expect("a child") {
                break status;
            }
            assert!(
                start.elapsed() < TIMEOUT,
                "SIGTERM does not end the process"
            );
            thread::sleep(Duration::from_millis(10));
        };
        assert!(status.success(), "{status}");
        match (log, reader) {
            (Some(log), _) => log.join().expect("a log"),
            (None, reader) => reader.map(read).unwrap_or_default(),
        }
    }
}

/// SIGUSR1 asks for more text than a log that nobody reads takes. Signals arrive all the same.
#[test]
fn a_dump_into_a_log_that_nobody_reads_does_not_keep_signals_from_arriving() {
    let scratch = Scratch::new("blocked-log");
    // Nothing else is logged, so that only the dump blocks.
    let serve = UnreadLog::start(&scratch, &["--log", "error"]);
    serve.fill();
    serve.end(false);
}

/// Programs are served, their memory is freed, and the process ends. The lines are in the log if
/// somebody reads it at last.
#[test]
fn a_log_that_nobody_reads_keeps_nobody_waiting() {
    let scratch = Scratch::new("unread-log");
    for is_read in [true, false] {
        let serve = UnreadLog::start(&scratch, &["--memory", "64M"]);
        serve.fill();
        let socket = scratch.socket();
        // On a thread of its own: nobody answers where the log is waited for.
        let (sender, served) = mpsc::channel();
        thread::spawn(move || {
            for _ in 0..2 {
                // Only one program's buffer has room. The host frees the other one's first.
                let start = Instant::now();
                loop {
                    let link = vgpu_transport::link::unix::connect(&socket, TIMEOUT);
                    let mut guest = Guest::new(Box::new(link.expect("a connection")));
                    guest.hello();
                    let (buffer, size) = (guest.new_buffer(), 40 << 20);
                    match guest.ask(&Request::Alloc { buffer, size }) {
                        Reply::Refused { .. } => {}
                        _ => break,
                    }
                    assert!(start.elapsed() < TIMEOUT, "the memory is not freed");
                    thread::sleep(Duration::from_millis(10));
                }
            }
            sender.send(()).expect("a test");
        });
        let done = served.recv_timeout(TIMEOUT);
        done.expect("programs are served and their memory is freed");
        let log = serve.end(is_read);
        let is_complete = log.contains("SIGTERM received") && log.contains("vgpu ends");
        assert_eq!(is_complete, is_read, "{log}");
        let closed = log.matches("session closed").count();
        assert_eq!(closed >= 2, is_read, "{log}");
    }
}

#[test]
fn process_ends_when_a_turn_exceeds_its_limit() {
    let scratch = Scratch::new("hang-limit");
    let Some(hanging) = hanging(&scratch, &["--max-turn-time", "2"]) else {
        return;
    };
    let (status, log) = hanging.wait();
    assert_eq!(status.code(), Some(1), "{log}");
    for part in [
        "has had the engine without a pause",
        "the engine hangs",
        "dump: turn: session 1",
        "a supervisor can start it again",
    ] {
        assert!(log.contains(part), "{part:?} is not in:\n{log}");
    }
}

/// The driver of this engine hangs when it is loaded. Before, it writes the id of its process into
/// a file.
const HANGING_DRIVER: &str = "#include <fcntl.h>\n#include <stdio.h>\n#include <stdlib.h>\n\
    #include <unistd.h>\n\
    __attribute__((constructor)) static void hang(void) {\n\
    const char *mark = getenv(\"HANG_MARK\");\n\
    if (mark) dprintf(creat(mark, 0600), \"%d\\n\", getpid());\n\
    for (;;) pause(); }\n";

/// Makes the engine whose driver hangs.
#[cfg(feature = "ggml")]
fn hanging_engine(scratch: &Scratch) -> String {
    let at = |name: &str| scratch.path().join(name);
    fs::write(at("hang.c"), HANGING_DRIVER).expect("a file");
    let status = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([at("libggml-hang.so"), at("hang.c")])
        .status();
    assert!(status.expect("a compiler").success());
    format!("ggml:{}", at("libggml-hang.so").display())
}

/// `vgpu serve`, whose engine is being loaded by a driver that hangs.
#[cfg(feature = "ggml")]
fn loading(scratch: &Scratch, more: &[&str]) -> Serve {
    let engine = hanging_engine(scratch);
    let mark = scratch.path().join("mark");
    let endpoint = format!("unix:{}", scratch.socket().display());
    let fixed = ["serve", "--listen", &endpoint, "--engine", &engine];
    let of_engine = ["--trust-guests", "--max-turn-time", "0"];
    let mut command = vgpu(&[&fixed[..], &of_engine[..], more].concat());
    let child = command.env("HANG_MARK", &mark).spawn();
    let start = Instant::now();
    while !mark.exists() {
        assert!(start.elapsed() < TIMEOUT, "the driver is not loaded");
        thread::sleep(Duration::from_millis(5));
    }
    Serve {
        child: child.expect("the command starts"),
        ready: String::new(),
    }
}

/// A signal does not wait for an engine that starts, and the socket does not stay. The dynamic
/// linker's lock is taken meanwhile.
#[test]
#[cfg(feature = "ggml")]
fn sigterm_does_not_wait_for_an_engine_that_starts() {
    let scratch = Scratch::new("hang-sigterm");
    let socket = scratch.socket();
    let serve = loading(&scratch, &[]);
    assert!(socket.exists());
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let line = "INFO SIGTERM received before anybody is served: ending";
    assert!(log.contains(line), "{log}");
    assert!(!socket.exists(), "the socket stays");
}

/// The driver holds the lock of the dynamic linker for ever. A dump says what starts, and SIGUSR1
/// writes the same into the log.
#[test]
#[cfg(feature = "ggml")]
fn dumps_name_the_engine_that_starts() {
    let scratch = Scratch::new("hang-dump");
    let control = scratch.path().join("control.sock").display().to_string();
    // Whatever the log shows.
    let serve = loading(&scratch, &["--control", &control, "--log", "error"]);
    // One that waits for the executor keeps none from a dump.
    let mut waits = UnixStream::connect(&control).expect("a socket");
    waits.write_all(b"status\n").expect("a command");
    let library = scratch.path().join("libggml-hang.so");
    let line = format!("start: the engine ggml:{} starts, for ", library.display());
    for _ in 0..2 {
        let dump = run(&["dump", "--control", &control]);
        assert!(dump.contains(&line), "{dump}");
    }
    serve.signal(Signal::USR1);
    thread::sleep(Duration::from_millis(300));
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains(&format!("INFO dump: {line}")), "{log}");
}

/// The same of a supervisor that tries engines. The process that it tries one in ends with it.
#[test]
#[cfg(feature = "ggml")]
fn sigterm_ends_a_supervisor_that_tries_an_engine() {
    let scratch = Scratch::new("hang-supervisor");
    hanging_engine(&scratch);
    let backend = scratch.path().join("libggml-vulkan.so");
    fs::rename(scratch.path().join("libggml-hang.so"), &backend).expect("a library");
    let mark = scratch.path().join("mark");
    let endpoint = format!("unix:{}", scratch.socket().display());
    let mut command = vgpu(&["serve", "--listen", &endpoint, "--engine", "ggml"]);
    command.args(["--isolate", "--memory", "512M", "--guest-memory", "64M"]);
    command.env("HANG_MARK", &mark);
    let child = command.env("GGML_BACKEND_PATH", &backend).spawn();
    let (child, ready) = (child.expect("the command starts"), String::new());
    let serve = Serve { child, ready };
    let start = Instant::now();
    let tried = loop {
        let text = fs::read_to_string(&mark).unwrap_or_default();
        if let Some(pid) = text.strip_suffix('\n') {
            break pid.to_owned();
        }
        assert!(start.elapsed() < TIMEOUT, "the driver is not loaded");
        thread::sleep(Duration::from_millis(5));
    };
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let line = "INFO SIGTERM received before anybody is served: ending";
    assert!(log.contains(line), "{log}");
    // Gone, or a zombie that nobody has waited for yet.
    let runs = || {
        let stat = fs::read_to_string(format!("/proc/{tried}/stat"));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    };
    let end = Instant::now();
    while runs() {
        assert!(end.elapsed() < TIMEOUT, "the process {tried} stays");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
#[cfg(feature = "ggml")]
fn process_ends_when_its_engine_does_not_start() {
    let scratch = Scratch::new("hang-start");
    let engine = hanging_engine(&scratch);
    let endpoint = format!("unix:{}", scratch.socket().display());
    let serve = |more: &[&str]| {
        let fixed = ["serve", "--listen", &endpoint, "--engine", &engine];
        vgpu(&[&fixed, more].concat())
    };
    // Longer than the time after which the log has a line.
    let mut command = serve(&["--trust-guests", "--max-turn-time", "11"]);
    let output = command.output().expect("the command starts");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{log}");
    for part in [
        "the engine has been starting for 10s, and may take 11s",
        "the engine has not started within 11s",
    ] {
        assert!(log.contains(part), "{part:?} is not in:\n{log}");
    }
    // The process of a guest.
    let serve = Serve::of(serve(&[
        "--isolate",
        "--memory",
        "512M",
        "--guest-memory",
        "64M",
        "--max-turn-time",
        "1",
    ]));
    let link = vgpu_transport::link::unix::connect(&scratch.socket(), TIMEOUT);
    assert!(link.is_err(), "the guest is served by an engine that hangs");
    serve.signal(Signal::TERM);
    let (_, log) = serve.wait();
    for part in [
        "the engine has not started within 1s",
        "the worker of this guest ended with exit status: 1",
    ] {
        assert!(log.contains(part), "{part:?} is not in:\n{log}");
    }
}

/// What a service manager receives within `time`.
fn received(manager: &UnixDatagram, time: Duration) -> Vec<String> {
    let end = Instant::now() + time;
    let mut messages = Vec::new();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return messages;
        }
        manager.set_read_timeout(Some(left)).expect("a socket");
        let mut message = [0; 1000];
        if let Ok(len) = manager.recv(&mut message) {
            messages.push(String::from_utf8_lossy(&message[..len]).into_owned());
        }
    }
}

#[test]
fn service_manager_hears_of_progress_only_while_the_main_thread_runs() {
    let scratch = Scratch::new("watchdog");
    let path = scratch.path().join("notify.sock");
    let manager = UnixDatagram::bind(&path).expect("a socket");
    let endpoint = format!("unix:{}", scratch.socket().display());
    let mut command = vgpu(&["serve", "--listen", &endpoint, "--no-sandbox"]);
    command
        .args(["--memory", "64M", "--threads", "1"])
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "60000000");
    let mut serve = Serve::of(command);
    let is_progress = |message: &String| message.trim() == "WATCHDOG=1";
    let start = Instant::now();
    let mut heard = 0;
    while heard < 2 {
        assert!(start.elapsed() < TIMEOUT, "{heard} reports");
        let messages = received(&manager, Duration::from_millis(500));
        heard += messages.iter().filter(|m| is_progress(m)).count();
    }
    match StoppedThread::stop(serve.child.id(), "vgpu") {
        None => {
            assert!(std::env::var_os("CI").is_none(), "{NO_PTRACE}");
            println!("skipped in part: {NO_PTRACE}");
        }
        Some(_stopped) => {
            // What was on its way.
            received(&manager, Duration::from_millis(100));
            let messages = received(&manager, Duration::from_secs(3));
            assert!(!messages.iter().any(is_progress), "{messages:?}");
        }
    }
    serve.child.kill().expect("a child");
    serve.child.wait().expect("a child");
}
