//! SIGTERM ends `vgpu serve` at once, whatever the engine computes.

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../tests/common/endless.rs"]
mod endless;
mod served;

use std::fs;
use std::time::{Duration, Instant};

use common::TIMEOUT;
use endless::{BUFFER, LATE};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use served::workers::children;
use served::{Scratch, Serve, vgpu};
use vgpu_transport::ir::{BufferId, Graph, OpKind};
use vgpu_transport::limits::MAX_PAYLOAD;
use vgpu_transport::wire::GraphId;

/// The processor time that each thread of the executor and of its workers uses after SIGTERM at
/// most: the engine goes on for no longer.
const AFTER_SIGTERM: Duration = Duration::from_secs(1);

/// Arguments for a process for each guest.
const ISOLATED: &[&str] = &["--isolate", "--guest-memory", "512M"];

/// Checks that SIGTERM ends an executor with so many threads that computes. The time has a wide
/// limit, since other programs may use the processors; the processor time has a narrow one.
fn ends_while_it_runs(name: &str, threads: u32, more: &[&str], graph: Endless<'_>) {
    let scratch = Scratch::new(&format!("stop-{}", name.to_lowercase()));
    let socket = scratch.socket();
    let endpoint = format!("unix:{}", socket.display());
    let count = threads.to_string();
    let mut arguments = vec![
        "serve",
        "--listen",
        &endpoint,
        "--threads",
        &count,
        "--memory",
        "1G",
        "--max-node-time",
        "4000000000",
    ];
    arguments.extend(more);
    let serve = Serve::of(vgpu(&arguments));
    let mut guest = serve.guest(&socket);
    let buffers = [0; 3].map(|_| guest.alloc(BUFFER));
    guest.graph(GraphId(1), &graph(buffers));
    guest.fence();
    guest.submit(GraphId(1));
    // A request behind the graph: the reply comes only if the graph is not endless.
    guest.send(&vgpu_transport::wire::Request::Fence {});
    std::thread::sleep(Duration::from_millis(200));
    let before = processor_time(&serve);
    let start = Instant::now();
    serve.signal(Signal::TERM);
    assert_eq!(guest.ended(), "the host is shutting down", "{name}");
    // The process has ended, and its parent has not taken its status: its times are still there.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let ended = || waitid(WaitId::Pid(Pid::from_child(&serve.child)), options);
    while ended().expect("a child").is_none() {
        assert!(start.elapsed() < LATE, "{name}: vgpu serve does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    let took = start.elapsed();
    let used = processor_time(&serve) - before;
    let (status, log) = serve.wait();
    println!("{name}: vgpu serve has ended {took:?} after SIGTERM, and has used {used:?}");
    assert_eq!(status.code(), Some(0), "{name}: {log}");
    let is_short = used <= threads * AFTER_SIGTERM;
    assert!(is_short, "{name}: {used:?}: {log}");
}

/// Makes a graph that runs for minutes or years.
type Endless<'a> = &'a dyn Fn([BufferId; 3]) -> Graph;

/// Operators of each family whose graphs can run long: windows, products, recurrences, rows, and
/// copies between types.
const OF_EACH_FAMILY: [OpKind; 12] = [
    OpKind::Pool2d,
    OpKind::Conv2d,
    OpKind::ConvTranspose1d,
    OpKind::Upscale,
    OpKind::MulMat,
    OpKind::MulMatId,
    OpKind::FlashAttnExt,
    OpKind::SsmScan,
    OpKind::RwkvWkv6,
    OpKind::Argsort,
    OpKind::GetRowsBack,
    OpKind::Copy,
];

/// SIGTERM ends an executor with such arguments, whatever of `kinds` it computes.
fn sigterm_ends(kinds: &[OpKind], threads: u32, more: &[&str]) {
    for &kind in kinds {
        let endless = |buffers| endless::endless(kind, buffers);
        ends_while_it_runs(kind.ggml_name(), threads, more, &endless);
    }
}

/// The processor time of all threads of an executor and of its workers, in user space and in the
/// kernel. An executor has the time of the workers that have ended.
fn processor_time(serve: &Serve) -> Duration {
    let own = serve.child.id();
    let ticks = ticks(own, [11, 12, 13, 14]).expect("a child");
    let workers = match fs::exists(format!("/proc/{own}/task")) {
        Ok(true) => children(own),
        _ => Vec::new(),
    };
    let running = workers
        .iter()
        .filter_map(|&pid| self::ticks(pid as u32, [11, 12]));
    let ticks = ticks + running.sum::<u64>();
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The sum of these fields behind the name of a process, in ticks; see proc_pid_stat(5).
fn ticks<const N: usize>(pid: u32, fields: [usize; N]) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name ends with the last parenthesis.
    let (_, behind) = stat.rsplit_once(") ").expect("a name");
    let behind: Vec<&str> = behind.split_whitespace().collect();
    let ticks = fields.map(|i| behind[i].parse::<u64>().expect("a time"));
    Some(ticks.iter().sum())
}

/// A guest that sends READs and takes no replies keeps its session waiting for room, and the
/// executor ends all the same.
#[test]
fn sigterm_ends_a_session_whose_guest_takes_no_replies() {
    let scratch = Scratch::new("stop-no-replies");
    let socket = scratch.socket();
    let endpoint = format!("unix:{}", socket.display());
    let control = scratch.path().join("control.sock").display().to_string();
    let serve = Serve::of(vgpu(&[
        "serve",
        "--listen",
        &endpoint,
        "--control",
        &control,
    ]));
    let mut guest = serve.guest(&socket);
    let len = MAX_PAYLOAD as u64;
    let buffer = guest.alloc(len);
    // More than the window takes.
    for _ in 0..128 {
        guest.send(&vgpu_transport::wire::Request::Read {
            buffer,
            offset: 0,
            len,
        });
    }
    // Until the session waits for room.
    let start = Instant::now();
    let waits = || {
        let dump = vgpu(&["dump", "--control", &control]).output();
        let dump = dump.expect("it starts").stdout;
        String::from_utf8_lossy(&dump).contains("sends a reply")
    };
    while !waits() {
        assert!(start.elapsed() < TIMEOUT, "the session does not wait");
        std::thread::sleep(Duration::from_millis(20));
    }
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    // An executor that gives up waiting for a session ends with another status.
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("the host is shutting down"), "{log}");
    drop(guest);
}

#[test]
fn sigterm_ends_a_graph_of_each_family() {
    sigterm_ends(&OF_EACH_FAMILY, 1, &[]);
}

#[test]
fn sigterm_ends_parts_that_cannot_be_divided() {
    for kind in endless::LONG_PARTS {
        let endless = |buffers| endless::endless_with_long_parts(kind, buffers);
        ends_while_it_runs(kind.ggml_name(), 1, &[], &endless);
    }
}

#[test]
fn sigterm_ends_a_graph_on_two_threads() {
    let kinds = [OpKind::Pool2d, OpKind::MulMat, OpKind::SsmScan];
    sigterm_ends(&kinds, 2, &[]);
}

#[test]
fn sigterm_ends_a_process_for_each_guest() {
    let kinds = [OpKind::Pool2d, OpKind::MulMat, OpKind::Argsort];
    sigterm_ends(&kinds, 1, ISOLATED);
}
