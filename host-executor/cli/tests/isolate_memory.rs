//! `vgpu serve --isolate`: a guest that exhausts the memory of the machine affects no other guest.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Guest, TIMEOUT, add, bytes};
use rustix::process::{Resource, Rlimit, Signal, prlimit};
use served::workers::{guest, workers};
use served::{Scratch, Serve, vgpu};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine as _;
use vgpu_transport::wire::{GraphId, Reply, Request};

/// A control group with a memory limit, in which processes can be put.
struct MemoryGroup {
    folder: PathBuf,
    /// The name of the file with the limit.
    limit: &'static str,
}

impl MemoryGroup {
    /// A group of `bytes` for this test, in the hierarchy of version 2 or 1, if this user may make
    /// one.
    fn new(test: &str, bytes: u64) -> Option<MemoryGroup> {
        let name = format!("vgpu-{test}-{}", std::process::id());
        let hierarchies = [
            ("/sys/fs/cgroup", "memory.max"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ];
        hierarchies.into_iter().find_map(|(mount, limit)| {
            let folder = Path::new(mount).join(&name);
            let group = MemoryGroup { folder, limit };
            fs::create_dir(&group.folder).ok()?;
            // The file exists if the hierarchy counts memory. A hierarchy on a temporary file
            // system takes any file.
            // Otherwise the kernel swaps where it should kill.
            for (file, value) in [("memory.swap.max", "0"), ("memory.swappiness", "0")] {
                let _ = fs::write(group.folder.join(file), value);
            }
            let has_limit = group.folder.join(limit).exists() && group.set_limit(bytes);
            has_limit.then_some(group)
        })
    }

    /// Sets the limit. Returns whether the kernel has accepted it.
    fn set_limit(&self, bytes: u64) -> bool {
        fs::write(self.folder.join(self.limit), bytes.to_string()).is_ok()
    }

    fn add(&self, pid: u32) {
        fs::write(self.folder.join("cgroup.procs"), pid.to_string())
            .expect("a process of this group");
    }

    /// Waits until the processes of the group use less than `bytes`.
    fn wait_for_less_than(&self, bytes: u64) {
        let files = ["memory.current", "memory.usage_in_bytes"];
        let usage = || {
            let text = files
                .iter()
                .find_map(|file| fs::read_to_string(self.folder.join(file)).ok());
            let text = text.expect("a group that counts memory");
            text.trim().parse::<u64>().expect("a number")
        };
        let start = Instant::now();
        while usage() >= bytes {
            assert!(start.elapsed() < TIMEOUT, "{} bytes are used", usage());
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder);
    }
}

/// A supervisor whose workers have more memory than the tests let them use.
fn start(scratch: &Scratch) -> Serve {
    let endpoint = format!("unix:{}", scratch.socket().display());
    Serve::of(vgpu(&[
        "serve",
        "--listen",
        &endpoint,
        "--threads",
        "1",
        "--isolate",
        "--guest-memory",
        "512M",
        "--memory",
        "2G",
    ]))
}

/// Graphs of the other guest before an attack.
const WARM_UP: usize = 3000;

/// Held by the test that exhausts memory: another one delays the kernel while it frees memory.
static EXHAUSTS: Mutex<()> = Mutex::new(());

/// Runs `attack` while the other guest computes without a pause.
fn while_the_other_computes<T>(other_guest: &mut Guest, attack: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        // Memory that exists, as in a generation. An allocation of the other worker could be the
        // one that finds no memory while the kernel still frees that of the ended worker: the
        // kernel would end the other worker, too (docs/multi-guest.md).
        let memory = other_guest.alloc_with(&bytes(&[1.0, 2.0]));
        let graph = GraphId(3);
        other_guest.graph(graph, &add(2, memory, memory, memory));
        let mut compute = move || {
            other_guest.write(memory, 0, &bytes(&[1.0, 2.0]));
            other_guest.submit(graph);
            assert_eq!(other_guest.read_f32(memory, 2), [2.0, 4.0]);
        };
        // The pages of the window that messages lie in exist afterwards, too.
        (0..WARM_UP).for_each(|_| compute());
        let is_over = &is_over;
        let decoding = scope.spawn(move || {
            let mut computed = 0;
            while !is_over.load(Ordering::Relaxed) || computed == 0 {
                compute();
                computed += 1;
            }
            computed
        });
        let outcome = attack();
        is_over.store(true, Ordering::Relaxed);
        println!(
            "{} graphs of the other guest",
            decoding.join().expect("it computes")
        );
        outcome
    })
}

/// The unit may have a limit for all processes together (`MemoryMax=`). If the worker of one guest
/// exhausts it, the worker refuses memory if it knows the limit, or it ends, and neither the
/// supervisor nor another worker.
#[test]
fn worker_that_exhausts_the_memory_ends_alone() {
    const LIMIT: u64 = 256 << 20;
    const BUFFER: u64 = 32 << 20;
    let _alone = EXHAUSTS.lock();
    let scratch = Scratch::new("oom");
    let group = MemoryGroup::new("refused", LIMIT);
    let serve = start(&scratch);
    if let Some(group) = &group {
        group.add(serve.child.id());
    }
    let (mut other_guest, _) = guest(&serve, &scratch);
    compute_once(&mut other_guest);
    let (mut attacker, session) = guest(&serve, &scratch);
    let worker = workers(&serve, 2)[&session];
    let score = |pid: u32| {
        let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj"));
        let score = score.expect("the process is there");
        score.trim().parse::<i32>().expect("a number")
    };
    let worker_pid = worker.as_raw_pid() as u32;
    assert!(score(worker_pid) > score(serve.child.id()));
    if group.is_none() {
        // Not root, or no hierarchy that counts memory: a limit of the worker's address space.
        println!("no control group can be made here, the worker's address space is limited");
        let status = fs::read_to_string(format!("/proc/{worker_pid}/status"));
        let status = status.expect("the process is there");
        let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        let size = kib.and_then(|kib| kib.trim().parse::<u64>().ok());
        let size = size.map(|kib| (kib << 10) + LIMIT);
        let limit = Rlimit {
            current: size,
            maximum: size,
        };
        prlimit(Some(worker), Resource::As, limit).expect("a process of this user");
    }

    let told = while_the_other_computes(&mut other_guest, || {
        exhaust(&mut attacker, BUFFER, 2 * LIMIT / BUFFER)
    });
    println!("the attacker was told: {told}");
    compute_once(&mut other_guest);
    // The supervisor serves the next guest, once the memory of the worker is free: the end of the
    // link comes before.
    drop(attacker);
    if let Some(group) = &group {
        group.wait_for_less_than(LIMIT / 2);
    }
    let (mut next, _) = guest(&serve, &scratch);
    compute_once(&mut next);
    drop((next, other_guest));
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert!(status.success(), "{log}");
    drop(group);
}

/// As above, when the kernel has to end a process: buffers that a worker has got while there was
/// memory are written when there is none. The other guest waits meanwhile: its worker could need a
/// page before the kernel has freed those of the ended worker, and be ended, too.
#[test]
fn the_kernel_ends_only_the_worker_that_writes_to_memory_that_is_gone() {
    const BEFORE: u64 = 1 << 30;
    const LIMIT: u64 = 128 << 20;
    const BUFFER: u64 = 32 << 20;
    let Some(group) = MemoryGroup::new("killed", BEFORE) else {
        // Where the tests run for each change, there is one.
        let why = "no control group that counts memory can be made here";
        assert!(std::env::var_os("CI").is_none(), "{why}");
        println!("NOT TESTED, which worker the kernel ends: {why}. Root may make one");
        return;
    };
    println!(
        "a control group of {LIMIT} bytes: {}",
        group.folder.display()
    );
    let _alone = EXHAUSTS.lock();
    let scratch = Scratch::new("oom-kill");
    let serve = start(&scratch);
    group.add(serve.child.id());
    let (mut other_guest, _) = guest(&serve, &scratch);
    compute_once(&mut other_guest);
    let (mut attacker, _) = guest(&serve, &scratch);
    workers(&serve, 2);
    let buffers = [0; 8].map(|_| attacker.alloc(BUFFER));
    attacker.fence();
    group.wait_for_less_than(LIMIT);
    assert!(group.set_limit(LIMIT), "the group uses less");

    for buffer in buffers {
        attacker.send(&Request::Fill {
            buffer,
            offset: 0,
            len: BUFFER,
            value: 7,
        });
    }
    attacker.send(&Request::Fence {});
    let reply = attacker.end.receive(&mut Vec::new(), (&mut [][..]).into());
    assert!(reply.is_err(), "the buffers were filled");
    // The kernel ends the link of the ended worker before it has freed the worker's memory.
    group.wait_for_less_than(LIMIT * 3 / 4);
    compute_once(&mut other_guest);
    drop(attacker);
    let (mut next, _) = guest(&serve, &scratch);
    compute_once(&mut next);
    drop((next, other_guest));
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert!(status.success(), "{log}");
    let killed = log.matches("was ended by SIGKILL (signal 9)").count();
    assert_eq!(killed, 1, "{log}");
}

/// Two workers whose parts are together more than the machine has left: what the first may still
/// use is not given to the second, although nobody has allocated any of it.
#[test]
fn memory_is_not_promised_to_two_workers() {
    // What the machine or the control group of this test has left.
    let engine = CpuEngine::new(1, None).expect("an engine");
    let available = engine.memory().free;
    let scratch = Scratch::new("promised");
    let endpoint = format!("unix:{}", scratch.socket().display());
    let (part, all) = (available / 4 * 3, available / 2 * 3);
    let serve = Serve::of(vgpu(&[
        "serve",
        "--listen",
        &endpoint,
        "--threads",
        "1",
        "--isolate",
        &format!("--guest-memory={part}"),
        &format!("--memory={all}"),
    ]));
    let (mut first, _) = guest(&serve, &scratch);
    compute_once(&mut first);
    let (mut second, _) = guest(&serve, &scratch);
    compute_once(&mut second);
    // The machine has this, and not beside what the first may still use.
    let buffer = second.new_buffer();
    let size = available / 2;
    second.send(&Request::Alloc { buffer, size });
    let reason = match second.receive().0 {
        Reply::Refused { reason, .. } => reason,
        other => panic!("{other:?}"),
    };
    println!("{reason}");
    // When the first has ended, the quota of the second grows.
    drop(first);
    let start = Instant::now();
    loop {
        let buffer = second.new_buffer();
        second.send(&Request::Alloc { buffer, size });
        match second.receive().0 {
            Reply::Refused { reason, .. } => assert!(start.elapsed() < TIMEOUT, "{reason}"),
            Reply::Done { .. } => break,
            other => panic!("{other:?}"),
        }
        thread::sleep(Duration::from_millis(50));
    }
    drop(second);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert!(status.success(), "{log}");
    assert!(
        log.contains("of memory until the machine has more"),
        "{log}"
    );
    assert!(log.contains("of memory now"), "{log}");
}

/// With `MemoryMax=`, systemd would stop the whole service when the kernel has ended one of its
/// processes, unless the unit says otherwise.
#[test]
fn the_units_go_on_when_the_kernel_has_ended_a_worker() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/host");
    for unit in ["vgpu.service", "vgpu@.service"] {
        let text = fs::read_to_string(folder.join(unit)).expect("a unit");
        let service = text.split("[Service]").nth(1).expect("a section");
        let service = service.split("\n[").next().unwrap_or_default();
        let values = |key: &str| -> Vec<&str> {
            let lines = service.lines().filter_map(|line| line.split_once('='));
            lines
                .filter(|(name, _)| *name == key)
                .map(|(_, value)| value)
                .collect()
        };
        assert_eq!(values("OOMPolicy"), ["continue"], "{unit}");
        // The kernel picks the worker by its score, which a unit could set for all processes.
        assert_eq!(values("OOMScoreAdjust"), [""; 0], "{unit}");
    }
}

/// Allocates and fills up to `count` buffers. Returns how the executor has ended this: with a
/// refusal, or with the end of the link.
fn exhaust(guest: &mut Guest, size: u64, count: u64) -> String {
    for _ in 0..count {
        let buffer = guest.new_buffer();
        guest.send(&Request::Alloc { buffer, size });
        let mut message = Vec::new();
        if let Err(error) = guest.end.receive(&mut message, (&mut [][..]).into()) {
            return error.to_string();
        }
        match Reply::decode(guest.protocol, &message).expect("a reply") {
            Reply::Refused { reason, .. } => return reason,
            Reply::Shared { size, .. } => drop(guest.end.receive_shared(size)),
            Reply::Done { .. } => {}
            other => panic!("{other:?}"),
        }
        guest.send(&Request::Fill {
            buffer,
            offset: 0,
            len: size,
            value: 7,
        });
    }
    panic!("all of the memory was there");
}

/// Runs a graph on new memory.
fn compute_once(guest: &mut Guest) {
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    let graph = GraphId(2);
    guest.graph(graph, &add(2, a, a, a));
    guest.submit(graph);
    assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
    guest.send(&Request::Free { buffer: a });
    guest.send(&Request::Forget { graph });
}
