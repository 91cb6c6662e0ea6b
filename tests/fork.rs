//! Programs that fork while they use the plugin, as Python's `multiprocessing` and servers with
//! preloaded models do.
//!
//! The parent's session goes on undisturbed. In the child every graph of the parent's session fails
//! with an error status, every read gives not-a-number, and the next load opens a session of the
//! child's own. This program starts itself once for each case and link, because the plugin and the
//! environment belong to a process.

mod common;
#[path = "common/ggml.rs"]
mod ggml;

use std::ffi::{c_char, c_int, c_void};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use std::{env, thread};

use ggml::{Backend, Buffer, F32, Ggml, Graph, HostBuffer};
use ggml_vgpu::abi::{
    GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, ggml_cgraph, ggml_status, ggml_tensor,
};
use tempfile::TempDir;
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::{Limits, Session, StopFlag};
use vgpu_transport::link::unix::{ListenOptions, Listener};

/// The case that a second process runs.
const CASE: &str = "VGPU_TEST_CASE";

/// The rounds of each loop.
const ROUNDS: usize = 200;

/// Seconds until a process that hangs is ended, and the test fails.
const HANG: u32 = 60;

type Case = fn();

const CASES: [(&str, Case); 4] = [
    ("both_sides_of_a_fork_compute", both_sides_of_a_fork_compute),
    (
        "fork_while_other_threads_use_the_session",
        fork_while_other_threads_use_the_session,
    ),
    (
        "programs_that_are_started_inherit_no_descriptor",
        programs_that_are_started_inherit_no_descriptor,
    ),
    (
        "session_does_not_outlive_exec",
        session_does_not_outlive_exec,
    ),
];

fn main() {
    if let Ok(name) = env::var(CASE) {
        let (_, case) = CASES
            .iter()
            .find(|(case, _)| *case == name)
            .expect("a case");
        return case();
    }
    let filter = env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let executor = Executor::start();
    for (name, _) in CASES {
        for endpoint in [executor.endpoint(), "inproc".to_owned()] {
            if filter.as_ref().is_some_and(|filter| !name.contains(filter)) {
                continue;
            }
            let mut program = Command::new(env::current_exe().expect("a path"));
            program.env(CASE, name).env("VGPU_ENDPOINT", &endpoint);
            let status = program.status().expect("the test starts itself");
            assert!(status.success(), "{name} over {endpoint}: {status}");
            println!("test {name} over {endpoint} ... ok");
        }
    }
    // The sessions of the parents end with them, those of the children with the children.
    let sessions = executor.sessions.load(Ordering::Relaxed);
    while filter.is_none() && executor.ended.load(Ordering::Relaxed) < sessions {
        thread::sleep(Duration::from_millis(10));
    }
}

/// The name of the executor's socket.
const SOCKET: &str = "vgpu.sock";

/// An executor in this process.
struct Executor {
    /// The folder of the socket.
    folder: TempDir,
    sessions: Arc<AtomicU64>,
    ended: Arc<AtomicU64>,
}

impl Executor {
    fn start() -> Executor {
        let folder = tempfile::tempdir().expect("a new folder");
        let path = folder.path().join(SOCKET);
        let listener = Listener::bind(&path, ListenOptions::default()).expect("a free path");
        let engine: Arc<dyn Engine> =
            Arc::new(CpuEngine::new(1, Some(256 << 20)).expect("a CPU engine"));
        let (sessions, ended) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let counts = (Arc::clone(&sessions), Arc::clone(&ended));
        thread::spawn(move || {
            loop {
                let arrival = listener.accept(Duration::from_secs(1)).expect("a socket");
                let Some(arrival) = arrival else { continue };
                let (engine, ended) = (Arc::clone(&engine), Arc::clone(&counts.1));
                let id = counts.0.fetch_add(1, Ordering::Relaxed) + 1;
                thread::spawn(move || {
                    let mut host = arrival.handshake().expect("a guest");
                    Session::new(id, engine, Limits::default()).run(&mut host, &StopFlag::new());
                    ended.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        Executor {
            folder,
            sessions,
            ended,
        }
    }

    fn endpoint(&self) -> String {
        format!("unix:{}", self.folder.path().join(SOCKET).display())
    }
}

/// The log lines about graphs that were not computed.
static NOT_COMPUTED: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_line(_: c_int, line: *const c_char, _: *mut c_void) {
    if ggml::text(line).contains("not computed") {
        NOT_COMPUTED.fetch_add(1, Ordering::Relaxed);
    }
}

/// A model that is loaded: a graph that adds two tensors, in a buffer of the device.
struct Model {
    graph: Graph,
    a: *mut ggml_tensor,
    b: *mut ggml_tensor,
    sum: *mut ggml_tensor,
    cgraph: *mut ggml_cgraph,
    backend: Backend,
    _buffer: Buffer,
}

// SAFETY: ggml's objects may move to another thread; the tests use each on one thread at a time.
unsafe impl Send for Model {}

/// The elements of a tensor of the model.
const LEN: usize = 5000;

impl Model {
    fn load() -> Model {
        let graph = Graph::new();
        let (a, b) = (
            graph.tensor(F32, [LEN as i64, 1]),
            graph.tensor(F32, [LEN as i64, 1]),
        );
        let sum = graph.add(a, b);
        let cgraph = graph.towards(sum);
        let backend = Backend::new();
        let buffer = graph.place();
        Model {
            graph,
            a,
            b,
            sum,
            cgraph,
            backend,
            _buffer: buffer,
        }
    }

    fn compute(&self) -> ggml_status {
        (Ggml::get().graph_compute)(self.backend.0, self.cgraph)
    }

    /// Whether the graph is computed, and the result is that of these inputs.
    fn is_right(&self, value: f32) -> bool {
        self.graph.set(self.a, &[value; LEN]);
        self.graph.set(self.b, &[0.5f32; LEN]);
        self.compute() == GGML_STATUS_SUCCESS
            && self.graph.get::<f32>(self.sum) == [value + 0.5; LEN]
    }

    /// Whether the graph fails with an error status, and nobody takes the result for one.
    fn is_failed(&self, value: f32) -> bool {
        self.graph.set(self.a, &[value; LEN]);
        self.graph.set(self.b, &[0.5f32; LEN]);
        self.compute() == GGML_STATUS_FAILED
            && self.graph.get::<f32>(self.sum).iter().all(|x| x.is_nan())
    }
}

/// Runs `child` in a forked child, `parent` in this process meanwhile, and returns whether both
/// have returned `true`. `parent` is called until the child ends, and [`ROUNDS`] times at least.
fn fork(child: impl FnOnce() -> bool, mut parent: impl FnMut(usize) -> bool) -> bool {
    // SAFETY: the child runs what a forked program with this plugin runs, and leaves with `_exit`.
    let id = unsafe { libc::fork() };
    assert!(id >= 0, "{}", std::io::Error::last_os_error());
    if id == 0 {
        // SAFETY: takes a number.
        unsafe { libc::alarm(HANG) };
        let is_right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
        // SAFETY: ends the child without the exit handlers that belong to the parent.
        unsafe { libc::_exit(i32::from(!is_right.unwrap_or(false))) };
    }
    let (mut status, mut round, mut is_right) = (-1, 0, true);
    loop {
        is_right &= parent(round);
        round += 1;
        // SAFETY: the pointer is that of a local.
        let ended = unsafe { libc::waitpid(id, &raw mut status, libc::WNOHANG) } == id;
        if ended {
            break;
        }
    }
    for round in round..ROUNDS {
        is_right &= parent(round);
    }
    if status != 0 {
        eprintln!("the child ended with status {status:#x}");
    }
    is_right && status == 0
}

fn both_sides_of_a_fork_compute() {
    let model = Model::load();
    assert!(model.is_right(1.0));
    let host = HostBuffer::new(4 * LEN);
    let ours: Vec<f32> = (0..LEN).map(|i| i as f32).collect();
    host.floats().copy_from_slice(&ours);
    (Ggml::get().log_set)(Some(count_line), std::ptr::null_mut());
    let event = (Ggml::get().event_new)(Ggml::get().device);
    (Ggml::get().event_record)(event, model.backend.0);

    let child = || {
        let count = (0..ROUNDS)
            .filter(|&i| model.is_failed(-(i as f32)))
            .count();
        assert_eq!(
            count, ROUNDS,
            "graphs of the parent's session that fail here"
        );
        assert_eq!(
            NOT_COMPUTED.load(Ordering::Relaxed),
            3,
            "for graphs 1, 10 and 100"
        );
        (Ggml::get().event_synchronize)(event);
        (Ggml::get().synchronize)(model.backend.0);
        // The memory is there, and is not that of the parent.
        host.floats().fill(-7.0);
        assert!(host.floats().iter().all(|&x| x == -7.0));
        // The next load opens a session.
        let own = Model::load();
        let count = (0..ROUNDS).filter(|&i| own.is_right(-(i as f32))).count();
        assert_eq!(count, ROUNDS, "graphs of the child's own session");
        (Ggml::get().event_record)(event, own.backend.0);
        (Ggml::get().event_synchronize)(event);
        assert!(model.is_failed(3.0), "the parent's session stays lost");
        let staged = HostBuffer::new(4 * LEN);
        staged.floats().fill(2.0);
        let data = staged.floats().as_ptr().cast();
        (Ggml::get().tensor_set_async)(own.backend.0, own.a, data, 0, 4 * LEN);
        (Ggml::get().synchronize)(own.backend.0);
        assert!(own.graph.get::<f32>(own.a) == [2.0; LEN]);
        true
    };
    assert!(fork(child, |round| model.is_right(round as f32)));

    // A child that frees what it has inherited, as a program does at its end.
    let second = Model::load();
    let mut given = Some((second, HostBuffer::new(4 * LEN)));
    let child = || {
        let given = given.take().expect("a model");
        assert!((0..5).all(|_| given.0.is_failed(1.0)));
        assert_eq!(NOT_COMPUTED.load(Ordering::Relaxed), 1);
        drop(given);
        NOT_COMPUTED.load(Ordering::Relaxed) == 2 // the number of graphs at the end
    };
    assert!(fork(child, |round| model.is_right(round as f32)));
    let (second, _) = given.expect("the parent has its copy");
    assert!(second.is_right(5.0));
    assert!(
        host.floats() == ours,
        "the child has written the parent's memory"
    );
    (Ggml::get().event_free)(event);
}

/// A child inherits every lock that another thread holds at the moment of the fork.
fn fork_while_other_threads_use_the_session() {
    let model = Model::load();
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            let own = Model::load();
            let ends = &ends;
            scope.spawn(move || {
                let own = own;
                // Without `ggml_init`, whose own lock a forked child would wait for.
                while !ends.load(Ordering::Relaxed) {
                    assert!(own.is_right(1.0));
                    let host = HostBuffer::new(4 * LEN);
                    host.floats().fill(1.0);
                    drop(Backend::new());
                    drop(Ggml::get().alloc(1 << 20).expect("room"));
                }
            });
        }
        for round in 0..20 {
            let child = || model.is_failed(1.0) && Model::load().is_right(round as f32);
            // SAFETY: the child calls the plugin, which is prepared for a fork beside other
            // threads, and ends with `_exit`.
            let id = unsafe { libc::fork() };
            if id == 0 {
                // SAFETY: takes a number.
                unsafe { libc::alarm(HANG) };
                let is_right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
                // SAFETY: `_exit` takes a number, and runs no code of the parent's threads.
                unsafe { libc::_exit(i32::from(!is_right.unwrap_or(false))) };
            }
            let mut status = -1;
            // SAFETY: the pointer is that of a local.
            assert_eq!(unsafe { libc::waitpid(id, &raw mut status, 0) }, id);
            if status != 0 {
                ends.store(true, Ordering::Relaxed);
            }
            assert_eq!(status, 0, "round {round}: {status:#x}");
            assert!(model.is_right(round as f32));
        }
        ends.store(true, Ordering::Relaxed);
    });
}

/// How many times the process has called `exec`.
const EXECUTED: &str = "VGPU_TEST_EXECUTED";

/// The program calls `exec` while a model is loaded: nothing of the session is in the new program,
/// which has the same process id and loads a model of its own. `main` waits for the end of each
/// session, also of the one that nobody has closed.
fn session_does_not_outlive_exec() {
    let links = || {
        let own = std::fs::read_dir("/proc/self/fd").expect("procfs");
        let links = own.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        let names = links.map(|link| link.to_string_lossy().into_owned());
        // The test's own standard streams may be sockets.
        let of_link = names.filter(|name| name.contains("eventfd") || name.contains("memfd:vgpu"));
        of_link.count()
    };
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
        maps.lines()
            .filter(|line| line.contains("memfd:vgpu"))
            .count()
    };
    // SAFETY: takes a number. The alarm stays over `exec`.
    unsafe { libc::alarm(HANG) };
    if env::var_os(EXECUTED).is_some() {
        assert_eq!((links(), mapped()), (0, 0), "of the session before `exec`");
        let model = Model::load();
        assert!(model.is_right(3.0));
        return;
    }
    let model = Model::load();
    assert!(model.is_right(1.0));
    assert!(links() > 0, "the link has descriptors");
    let mut program = Command::new(env::current_exe().expect("a path"));
    let error = std::os::unix::process::CommandExt::exec(program.env(EXECUTED, "1"));
    panic!("{error}");
}

/// `posix_spawn`, `vfork` and `exec` end with a program that has none of the link's descriptors.
fn programs_that_are_started_inherit_no_descriptor() {
    let inherited = || {
        let program = Command::new("/bin/ls")
            .args(["-l", "/proc/self/fd"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output();
        let listed = String::from_utf8_lossy(&program.expect("ls runs").stdout).into_owned();
        assert!(listed.contains("/proc/"), "{listed}");
        // The test's own standard streams may be sockets.
        let is_link = |line: &&str| {
            ["socket:", "eventfd"]
                .iter()
                .any(|kind| line.contains(kind))
        };
        listed.lines().filter(is_link).count()
    };
    let before = inherited();
    let model = Model::load();
    assert!(model.is_right(1.0));
    let own = std::fs::read_dir("/proc/self/fd").expect("procfs");
    let links = own.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let eventfds = links.filter(|link| link.to_string_lossy().contains("eventfd"));
    assert!(eventfds.count() >= 2, "the link has doorbells");
    assert_eq!(inherited(), before);
    assert!(model.is_right(2.0));
}
