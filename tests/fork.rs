//! Programs that fork while they use the plugin, as Python's `multiprocessing` and servers with
//! preloaded models do.
//!
//! The parent's session goes on undisturbed. In the child every graph of the parent's session fails
//! with an error status, every read gives not-a-number, and the next load opens a session of the
//! child's own. This program starts itself once for each case and link, because the plugin and the
//! environment belong to a process. Over TCP, also with TLS, the host knows no process of its peer.

mod common;
#[path = "common/ggml.rs"]
mod ggml;

use std::ffi::{c_char, c_int, c_void};
use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use ggml::{Backend, Buffer, F32, Ggml, Graph, HostBuffer};
use ggml_vgpu::abi::{
    GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, ggml_cgraph, ggml_status, ggml_tensor,
};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tempfile::TempDir;
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::{Limits, Session, StopFlag};
use vgpu_transport::link::HostEnd;
use vgpu_transport::link::connect::CERTIFICATES;
use vgpu_transport::link::stream::tcp;
use vgpu_transport::link::stream::tls::{AUTHORITY, CERTIFICATE, Certificates, KEY};
use vgpu_transport::link::unix;

/// The case that a second process runs.
const CASE: &str = "VGPU_TEST_CASE";

/// The rounds of each loop.
const ROUNDS: usize = 200;

/// Seconds until a process that hangs is ended, and the test fails.
const HANG: u32 = 60;

type Case = fn();

const CASES: [(&str, Case); 5] = [
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
    (
        "session_of_a_killed_parent_ends_although_its_child_lives",
        session_of_a_killed_parent_ends_although_its_child_lives,
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
        for (endpoint, certificates) in executor.endpoints() {
            if filter.as_ref().is_some_and(|filter| !name.contains(filter)) {
                continue;
            }
            if endpoint == INPROC && NOT_IN_PROCESS.contains(&name) {
                println!(
                    "test {name} over {endpoint} ... left out: no executor outlives a program"
                );
                continue;
            }
            let mut program = Command::new(env::current_exe().expect("a path"));
            program.env(CASE, name).env("VGPU_ENDPOINT", &endpoint);
            match certificates {
                Some(folder) => program.env(CERTIFICATES, executor.folder.path().join(folder)),
                None => program.env_remove(CERTIFICATES),
            };
            let link = match certificates {
                Some(_) => format!("{endpoint} with TLS"),
                None => endpoint,
            };
            let status = program.status().expect("the test starts itself");
            assert!(status.success(), "{name} over {link}: {status}");
            println!("test {name} over {link} ... ok");
            // The sessions of parents end with them, those of children with the children. The next
            // program has all memory.
            executor.wait_for_the_end_of_sessions();
        }
    }
}

/// The name of the executor's socket.
const SOCKET: &str = "vgpu.sock";

/// The folders of certificates of host and guest.
const HOST: &str = "host";
const GUEST: &str = "guest";

/// The address of the executor over TCP.
const ADDRESS: &str = "127.0.0.1";

/// The device's memory in bytes.
const MEMORY: u64 = 256 << 20;

/// An executor in this process, over a Unix socket, TCP and TCP with TLS.
struct Executor {
    /// The folder of the socket and of the certificates.
    folder: TempDir,
    /// The ports of TCP, without and with TLS.
    ports: [u16; 2],
    served: Arc<Served>,
}

/// The sessions of an executor.
struct Served {
    engine: Arc<dyn Engine>,
    sessions: AtomicU64,
    ended: AtomicU64,
}

impl Served {
    /// Serves each guest whose end `accept` returns the handshake of, on a thread.
    fn serve<H>(self: &Arc<Self>, mut accept: impl FnMut() -> Option<H> + Send + 'static)
    where
        H: FnOnce() -> Box<dyn HostEnd> + Send + 'static,
    {
        let served = Arc::clone(self);
        thread::spawn(move || {
            loop {
                let Some(handshake) = accept() else { continue };
                let served = Arc::clone(&served);
                let id = served.sessions.fetch_add(1, Ordering::Relaxed) + 1;
                thread::spawn(move || {
                    let mut host = handshake();
                    Session::new(id, Arc::clone(&served.engine), Limits::default())
                        .run(&mut *host, &StopFlag::new());
                    served.ended.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
    }
}

impl Executor {
    fn start() -> Executor {
        const WAIT: Duration = Duration::from_secs(1);
        let folder = tempfile::tempdir().expect("a new folder");
        write_certificates(folder.path());
        let served = Arc::new(Served {
            engine: Arc::new(CpuEngine::new(1, Some(MEMORY)).expect("a CPU engine")),
            sessions: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        });
        let path = folder.path().join(SOCKET);
        let listener = unix::Listener::bind(&path, unix::ListenOptions::default());
        let listener = listener.expect("a free path");
        served.serve(move || {
            let arrival = listener.accept(WAIT).expect("a socket")?;
            Some(move || Box::new(arrival.handshake().expect("a guest")) as Box<dyn HostEnd>)
        });
        let certificates = Certificates::load(&folder.path().join(HOST)).expect("certificates");
        let ports = [None, Some(certificates)].map(|certificates| {
            let listener = tcp::Listener::bind(ADDRESS, 0, certificates).expect("a free port");
            let port = listener.address().expect("an address").port();
            served.serve(move || {
                let arrival = listener.accept(WAIT).expect("a socket")?;
                Some(move || {
                    let limit = Duration::from_secs(HANG.into());
                    Box::new(arrival.handshake(limit).expect("a guest")) as Box<dyn HostEnd>
                })
            });
            port
        });
        Executor {
            folder,
            ports,
            served,
        }
    }

    /// The endpoints of guests, with the folder of their certificates.
    fn wait_for_the_end_of_sessions(&self) {
        let start = Instant::now();
        let counts = || {
            let Served {
                sessions, ended, ..
            } = &*self.served;
            (
                sessions.load(Ordering::Relaxed),
                ended.load(Ordering::Relaxed),
            )
        };
        loop {
            let (sessions, ended) = counts();
            if ended == sessions {
                return;
            }
            assert!(
                start.elapsed() < Duration::from_secs(HANG.into()),
                "{ended} of {sessions} sessions have ended"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn endpoints(&self) -> [(String, Option<&'static str>); 4] {
        let [tcp, tls] = self.ports.map(|port| format!("tcp:{ADDRESS}:{port}"));
        let socket = self.folder.path().join(SOCKET);
        [
            (format!("unix:{}", socket.display()), None),
            (tcp, None),
            (tls, Some(GUEST)),
            (INPROC.to_owned(), None),
        ]
    }
}

/// The endpoint of an executor inside the plugin.
const INPROC: &str = "inproc";

/// Cases in which the executor outlives the program.
const NOT_IN_PROCESS: [&str; 1] = ["session_of_a_killed_parent_ends_although_its_child_lives"];

/// Writes certificates of one authority for both sides into folders below `folder`.
fn write_certificates(folder: &Path) {
    let mut params = CertificateParams::new(Vec::new()).expect("no name");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("a key");
    let authority = params.self_signed(&key).expect("a certificate").pem();
    let issuer = rcgen::Issuer::new(params, key);
    for (side, usage) in [
        (HOST, ExtendedKeyUsagePurpose::ServerAuth),
        (GUEST, ExtendedKeyUsagePurpose::ClientAuth),
    ] {
        let mut params = CertificateParams::new(vec![ADDRESS.to_owned()]).expect("an address");
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &issuer).expect("a certificate");
        let folder = folder.join(side);
        fs::create_dir(&folder).expect("a new folder");
        for (name, content) in [
            (AUTHORITY, &authority),
            (CERTIFICATE, &certificate.pem()),
            (KEY, &key.serialize_pem()),
        ] {
            fs::write(folder.join(name), content).expect("a new file");
        }
    }
}

/// The log lines about graphs that were not computed.
static NOT_COMPUTED: AtomicU64 = AtomicU64::new(0);

/// Those of them that name the parent.
static OF_PARENT: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_line(_: c_int, line: *const c_char, _: *mut c_void) {
    let line = ggml::text(line);
    if line.contains("not computed") {
        NOT_COMPUTED.fetch_add(1, Ordering::Relaxed);
        let is_of_parent = line.contains("belongs to the parent of this forked process");
        OF_PARENT.fetch_add(is_of_parent.into(), Ordering::Relaxed);
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

/// Runs `child` in a forked child, which ends with status 0 if `child` returns `true`. Returns the
/// id of the process.
fn start_child(child: impl FnOnce() -> bool) -> libc::pid_t {
    // SAFETY: the child runs what a forked program with this plugin runs, and leaves with `_exit`.
    let id = unsafe { libc::fork() };
    assert!(id >= 0, "{}", io::Error::last_os_error());
    if id == 0 {
        // SAFETY: takes a number.
        unsafe { libc::alarm(HANG) };
        let is_right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
        // SAFETY: ends the child without the exit handlers that belong to the parent.
        unsafe { libc::_exit(i32::from(!is_right.unwrap_or(false))) };
    }
    id
}

/// The status with which the child `id` ends.
fn end_of(id: libc::pid_t) -> c_int {
    let mut status = -1;
    // SAFETY: the pointer is that of a local.
    assert_eq!(unsafe { libc::waitpid(id, &raw mut status, 0) }, id);
    status
}

/// Runs `child` in a forked child, `parent` in this process meanwhile, and returns whether both
/// have returned `true`. `parent` is called until the child ends, and [`ROUNDS`] times at least.
fn fork(child: impl FnOnce() -> bool, mut parent: impl FnMut(usize) -> bool) -> bool {
    let id = start_child(child);
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
        assert_eq!(OF_PARENT.load(Ordering::Relaxed), 3, "all name the parent");
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
            let status = end_of(start_child(child));
            if status != 0 {
                ends.store(true, Ordering::Relaxed);
            }
            assert_eq!(status, 0, "round {round}: {status:#x}");
            assert!(model.is_right(round as f32));
        }
        ends.store(true, Ordering::Relaxed);
    });
}

/// The descriptors of this process that a link may have: sockets, eventfds and memory.
fn own_links() -> usize {
    let own = fs::read_dir("/proc/self/fd").expect("procfs");
    let links = own.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let names = links.map(|link| link.to_string_lossy().into_owned());
    let kinds = ["socket:", "eventfd", "memfd:vgpu"];
    { names.filter(|name| kinds.iter().any(|kind| name.contains(kind))) }.count()
}

/// Set for the program that `exec` starts: its links before the session.
const EXECUTED: &str = "VGPU_TEST_EXECUTED";

/// The program calls `exec` while a model is loaded: nothing of the session is in the new program,
/// which has the same process id and loads a model of its own. `main` waits for the end of each
/// session, also of the one that nobody has closed.
fn session_does_not_outlive_exec() {
    let mapped = || {
        let maps = fs::read_to_string("/proc/self/maps").expect("procfs");
        maps.lines()
            .filter(|line| line.contains("memfd:vgpu"))
            .count()
    };
    // SAFETY: takes a number. The alarm stays over `exec`.
    unsafe { libc::alarm(HANG) };
    if let Ok(before) = env::var(EXECUTED) {
        let now = own_links().to_string();
        assert_eq!((now, mapped()), (before, 0), "of the session before `exec`");
        let model = Model::load();
        assert!(model.is_right(3.0));
        return;
    }
    let before = own_links();
    let model = Model::load();
    assert!(model.is_right(1.0));
    assert!(own_links() > before, "the link has descriptors");
    let mut program = Command::new(env::current_exe().expect("a path"));
    program.env(EXECUTED, before.to_string());
    let error = std::os::unix::process::CommandExt::exec(&mut program);
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
    let without = own_links();
    let model = Model::load();
    assert!(model.is_right(1.0));
    assert!(own_links() > without, "the link has descriptors");
    assert_eq!(inherited(), before);
    assert!(model.is_right(2.0));
}

/// A program whose session has most of the device's memory is killed, and leaves a forked child
/// behind. Another program gets the memory while the child lives.
fn session_of_a_killed_parent_ends_although_its_child_lives() {
    const ROOM: usize = MEMORY as usize / 8 * 5;
    // SAFETY: takes numbers. The child of the child is this process's after its parent's end.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
    // SAFETY: takes a number.
    unsafe { libc::alarm(HANG) };
    let (mut question, mut ask) = io::pipe().expect("a pipe");
    let (mut answer, mut say) = io::pipe().expect("a pipe");
    let byte = |from: &mut PipeReader| {
        let mut byte = [0];
        from.read_exact(&mut byte).expect("the child lives");
        byte[0]
    };
    let write = |to: &mut PipeWriter, byte: u8| to.write_all(&[byte]).is_ok();
    let parent = start_child(|| {
        let model = Model::load();
        let _large = Ggml::get().alloc(ROOM).expect("room");
        assert!(model.is_right(1.0));
        start_child(|| {
            write(&mut say, b'r');
            byte(&mut question);
            write(&mut say, u8::from(model.is_failed(1.0)))
        });
        loop {
            thread::park();
        }
    });
    // The end of all children is the end of the answers.
    drop((question, say));
    assert_eq!(byte(&mut answer), b'r');
    assert!(Ggml::get().alloc(ROOM).is_none(), "the parent has it");
    // SAFETY: takes numbers; the process is a child that nobody has waited for.
    assert_eq!(unsafe { libc::kill(parent, libc::SIGKILL) }, 0);
    end_of(parent);
    while Ggml::get().alloc(ROOM).is_none() {
        thread::sleep(Duration::from_millis(10));
    }
    assert!(write(&mut ask, b'?'));
    assert_eq!(byte(&mut answer), 1, "the child's graphs fail");
    let mut status = -1;
    // SAFETY: the pointer is that of a local.
    assert!(unsafe { libc::waitpid(-1, &raw mut status, 0) } > 0);
    assert_eq!(status, 0);
}
