//! The bound of `docs/SECURITY.md`: whatever guests do, the resident memory of `vgpu serve` is at
//! most the memory that it was given and a constant. Each attack is refused with numbers, or stays
//! below the bound.

mod certified;
#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../../transport/tests/common/ops.rs"]
#[allow(dead_code)] // the samples use a part
mod ops;
#[path = "../../../transport/tests/common/samples.rs"]
mod samples;
mod served;

use std::fs;
use std::io::{self, Write as _};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::model::{for_weights, lookup, upload};
use common::{Build, Guest, OtherGuest, TIMEOUT, add, image};
use samples::sample;
use served::workers::workers;
use served::{Scratch, Serve, vgpu};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, Memory};
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Op, OpKind, Precision, RopeMode, Shape, Tensor, Type, validate,
};
use vgpu_transport::link::stream::{Channel, Plain, StreamGuest};
use vgpu_transport::wire::{GraphId, MAX_FIRST_MESSAGE, MAX_MESSAGE, MAX_PAYLOAD, Reply, Request};

const MIB: u64 = 1 << 20;

/// The memory that the executor is given, in MiB.
const MEMORY: u64 = 512;

/// Threads of the engine.
const THREADS: u64 = 2;

/// What the executor may have besides, in MiB: see `docs/SECURITY.md`.
const PROCESS: u64 = 64;
const THREAD: u64 = 10;
const SESSION: u64 = 80;

/// The graph of an attack over a buffer of [`BUFFER`] bytes.
type Attack = fn(BufferId) -> Graph;

/// Bytes of the buffer of most attacks.
const BUFFER: u64 = 110 * MIB;

/// A `vgpu serve` with a guest that must not be affected.
struct Executor {
    serve: Serve,
    scratch: Scratch,
    other: OtherGuest,
    /// Whether the guests have a process of their own.
    is_isolated: bool,
    /// The port of the further endpoint, if there is one.
    port: Option<u16>,
}

impl Drop for Executor {
    fn drop(&mut self) {
        let _ = self.serve.child.kill();
        let _ = self.serve.child.wait();
    }
}

/// What a guest was told about an attack.
#[derive(Debug, Default)]
struct Told {
    /// Why requests failed or were refused.
    failures: Vec<String>,
    /// Why the session ended, if it did.
    end: Option<String>,
}

impl Told {
    /// Whether the guest was told of a lack of memory, or of a limit, with numbers.
    fn is_refused(&self) -> bool {
        let mut reasons = self.failures.iter().chain(&self.end);
        reasons.any(|reason| {
            let has_numbers = reason.contains(" wanted, ") && reason.contains(" free");
            reason.contains("out of memory") && has_numbers || reason.contains(", the limit is ")
        })
    }
}

impl Executor {
    /// An executor in one process, and one with a process for the guests, which are programs of one
    /// named guest. Both have a port, if `listens`.
    fn both(test: &str, listens: bool) -> [Executor; 2] {
        let ports = [0; 2].map(|_| listens.then(certified::port));
        let [own, of_guest] = ports.map(|port| port.map(|port| format!("tcp:127.0.0.1:{port}")));
        let more: Vec<&str> = { own.iter() }.flat_map(|at| ["--listen", at]).collect();
        let mut single = Executor::start_with(test, &more);
        single.port = ports[0];

        let file = single.scratch.path().join("vgpu.toml");
        let uid = rustix::process::getuid().as_raw();
        let listen = of_guest.map(|at| format!("listen = [\"{at}\"]\n"));
        let text = format!(
            "[[guest]]\nname = \"a\"\nuids = [{uid}]\nmemory = \"{MEMORY}M\"\n{}",
            listen.unwrap_or_default()
        );
        fs::write(&file, text).expect("a file");
        let (file, memory) = (file.display().to_string(), format!("{MEMORY}M"));
        let more = ["--isolate", "--guest-memory", &memory, "--config", &file];
        let mut isolated = Executor::start_with(&format!("{test}-isolate"), &more);
        isolated.port = ports[1];
        [single, isolated]
    }

    fn start_with(test: &str, more: &[&str]) -> Executor {
        let scratch = Scratch::new(test);
        let endpoint = format!("unix:{}", scratch.socket().display());
        let (memory, threads) = (format!("{MEMORY}M"), THREADS.to_string());
        let mut command = vgpu(&[
            "serve",
            "--listen",
            &endpoint,
            "--threads",
            &threads,
            "--memory",
            &memory,
        ]);
        command.args(more);
        let serve = Serve::of(command);
        let other = OtherGuest::new(serve.guest(&scratch.socket()));
        Executor {
            serve,
            scratch,
            other,
            is_isolated: more.contains(&"--isolate"),
            port: None,
        }
    }

    fn guest(&self) -> Guest {
        self.serve.guest(&self.scratch.socket())
    }

    /// Checks that the executor has never had more than its memory and the constant of `sessions`
    /// sessions and the other guest, and that the other guest computes.
    fn check(&mut self, attack: &str, sessions: u64) {
        self.other.compute();
        let mut pid = self.serve.child.id();
        if self.is_isolated {
            let supervisor = peak(pid);
            assert!(supervisor <= PROCESS, "the supervisor had {supervisor} MiB");
            let worker = workers(&self.serve, 1).into_values().next();
            pid = worker.expect("a worker").as_raw_pid() as u32;
        }
        let peak = peak(pid);
        let bound = MEMORY + PROCESS + THREADS * THREAD + (sessions + 1) * SESSION;
        println!("{attack}: {peak} MiB were resident, {bound} are allowed");
        assert!(
            peak <= bound,
            "{attack}: {peak} MiB were resident, {bound} are allowed"
        );
    }

    /// A session that runs one graph over a buffer of [`BUFFER`] bytes.
    fn run(&mut self, attack: &str, graph: impl FnOnce(BufferId) -> Graph) -> Told {
        let mut guest = self.guest();
        let buffer = guest.alloc(BUFFER);
        guest.graph(GraphId(1), &graph(buffer));
        guest.submit(GraphId(1));
        let told = told(&mut guest);
        drop(guest);
        self.check(attack, 1);
        told
    }
}

/// The most resident memory that a process has ever had, in MiB.
fn peak(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    let kib = kib.and_then(|kib| kib.parse::<u64>().ok());
    kib.expect("a number of KiB") >> 10
}

/// Reads all replies up to that of a FENCE, or to the end of the session.
fn told(guest: &mut Guest) -> Told {
    let fence = guest.send(&Request::Fence {});
    let mut told = Told::default();
    loop {
        match guest.receive().0 {
            Reply::Done { request } if request == fence => return told,
            Reply::Failed { reason, .. } | Reply::Refused { reason, .. } => {
                told.failures.push(reason);
            }
            Reply::Ended { reason } => {
                told.end = Some(reason);
                return told;
            }
            other => panic!("{other:?}"),
        }
    }
}

fn dense(ty: Type, ne: [u64; 4]) -> Shape {
    Shape::contiguous(ty, ne).expect("a dense tensor")
}

/// A product of one element with columns that are all the same element, and are written to the same
/// float: before they are, the results of all columns are in scratch memory.
fn product_of_one_term(buffer: BufferId) -> Graph {
    let columns = BUFFER / 4 * 60;
    let mut build = Build::default();
    let mut many = dense(Type::F32, [1, columns, 1, 1]);
    many.nb = [4, 0, 0, 0];
    let dst = build.place(many, buffer, 0);
    let weight = build.place(dense(Type::F32, [1; 4]), buffer, 0);
    let x = build.place(many, buffer, 0);
    let op = Op::MulMat {
        accumulator: Precision::F32,
        activation: Precision::F32,
        hadamard: false,
    };
    build.node(op, dst, &[weight, x]);
    build.0
}

/// An attention with four million elements in a value: each thread has 64 values as floats.
fn attention_with_long_rows(buffer: BufferId) -> Graph {
    let values = 4 << 20;
    let mut build = Build::default();
    let dst = build.place(dense(Type::F32, [values, 1, 1, 1]), buffer, 0);
    let q = build.place(dense(Type::F32, [32, 1, 1, 1]), buffer, 32 * MIB);
    let k = build.place(dense(Type::F16, [32, 4, 1, 1]), buffer, 32 * MIB);
    let v = build.place(dense(Type::F16, [values, 4, 1, 1]), buffer, 64 * MIB);
    let op = Op::FlashAttnExt {
        scale: 1.0,
        max_bias: 0.0,
        logit_softcap: 0.0,
        accumulator: Precision::F32,
        n_kv_max: 0,
    };
    build.node(op, dst, &[q, k, v]);
    build.0
}

/// An attention with three million elements in a key, for 15 queries: each thread prepares the
/// queries as floats.
fn attention_with_long_keys(buffer: BufferId) -> Graph {
    let width = 3 << 20;
    let mut build = Build::default();
    let dst = build.place(dense(Type::F32, [32, 1, 15, 1]), buffer, 0);
    let q = build.place(
        Shape {
            nb: [4, 4, 4, 4],
            ..dense(Type::F32, [width, 15, 1, 1])
        },
        buffer,
        MIB,
    );
    let k = build.place(dense(Type::F16, [width, 1, 1, 1]), buffer, 64 * MIB);
    let v = build.place(dense(Type::F16, [32, 1, 1, 1]), buffer, 100 * MIB);
    let op = Op::FlashAttnExt {
        scale: 1.0,
        max_bias: 0.0,
        logit_softcap: 0.0,
        accumulator: Precision::F32,
        n_kv_max: 0,
    };
    build.node(op, dst, &[q, k, v]);
    build.0
}

/// A convolution with millions of input channels: each thread has patches of as many floats.
fn convolution_of_many_channels(buffer: BufferId) -> Graph {
    let channels = 5 << 20;
    let mut build = Build::default();
    let dst = build.place(dense(Type::F32, [1, 1, 8, 1]), buffer, 100 * MIB);
    let mut shape = dense(Type::F16, [1, 1, channels, 8]);
    shape.nb = [2, 2, 2, 16];
    let kernel = build.place(shape, buffer, 0);
    let image = build.place(dense(Type::F32, [1, 1, channels, 1]), buffer, 60 * MIB);
    let op = Op::Conv2d {
        s0: 1,
        s1: 1,
        p0: 0,
        p1: 0,
        d0: 1,
        d1: 1,
    };
    build.node(op, dst, &[kernel, image]);
    build.0
}

/// ROPE of one row of millions of elements, which each thread has as floats, with as many sines and
/// cosines.
fn rope_of_a_long_row(buffer: BufferId) -> Graph {
    let width = 26 << 20;
    let mut build = Build::default();
    let row = build.place(dense(Type::F32, [width, 1, 1, 1]), buffer, 0);
    let positions = build.place(dense(Type::I32, [1; 4]), buffer, 108 * MIB);
    let op = Op::Rope {
        mode: RopeMode::Neox,
        backward: false,
        n_dims: width as u32,
        n_offs: 0,
        n_ctx_orig: 0,
        freq_base: 10000.0,
        freq_scale: 1.0,
        ext_factor: 0.0,
        attn_factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        sections: [0; 4],
    };
    build.node(op, row, &[row, positions]);
    build.0
}

#[test]
fn working_memory_of_kernels_stays_below_the_bound() {
    for executor in Executor::both("bound-working", false) {
        working_memory_of_kernels(executor);
    }
}

fn working_memory_of_kernels(mut executor: Executor) {
    let attacks: [(&str, Attack); 5] = [
        ("a product of one term", product_of_one_term),
        ("an attention with long rows", attention_with_long_rows),
        ("an attention with long keys", attention_with_long_keys),
        (
            "a convolution of many channels",
            convolution_of_many_channels,
        ),
        ("ROPE of a long row", rope_of_a_long_row),
    ];
    for (attack, graph) in attacks {
        let told = executor.run(attack, graph);
        assert!(told.end.is_none(), "{attack}: {told:?}");
        assert!(told.is_refused(), "{attack}: {told:?}");
    }
}

/// A graph of `nodes` sums on two floats.
fn long_graph(buffer: BufferId, nodes: usize) -> Graph {
    let mut graph = add(2, buffer, buffer, buffer);
    let node = graph.nodes[0].clone();
    graph.nodes = vec![node; nodes];
    graph
}

#[test]
fn stored_graphs_and_their_parts_stay_below_the_bound() {
    for executor in Executor::both("bound-graphs", false) {
        stored_graphs_and_their_parts(executor);
    }
}

fn stored_graphs_and_their_parts(mut executor: Executor) {
    // Plans: a million nodes in all.
    let mut guest = executor.guest();
    let buffer = guest.alloc(4096);
    let words = image(&long_graph(buffer, 1000));
    let mut refused = 0;
    for id in 0..1000 {
        guest.image(GraphId(id), &words);
        let told = told(&mut guest);
        assert!(told.end.is_none(), "{told:?}");
        refused += usize::from(told.is_refused());
    }
    assert!(refused > 0, "all plans fit");
    executor.check("thousands of graphs", 1);
    // The freed heap is not kept beside what is allocated next.
    for id in 0..1000 {
        guest.send(&Request::Forget { graph: GraphId(id) });
    }
    for _ in 0..15 {
        let (size, value) = (32 * MIB, 7);
        let buffer = guest.alloc(size);
        guest.send(&Request::Fill {
            buffer,
            offset: 0,
            len: size,
            value,
        });
    }
    guest.fence();
    drop(guest);
    executor.check("buffers after graphs", 1);

    // Images: a large table of tensors, and patches of it. The session ends at its own limit.
    let mut guest = executor.guest();
    let buffer = guest.alloc(4096);
    let mut graph = long_graph(buffer, 1);
    let tensor: Tensor = graph.tensors[0];
    graph.tensors.resize(200_000, tensor);
    guest.graph(GraphId(0), &graph);
    assert!(told(&mut guest).failures.is_empty());
    let mut told_all = Told::default();
    for id in 1..100 {
        let base = GraphId(0);
        guest.send(&Request::Patch {
            graph: GraphId(id),
            base,
        });
        told_all = told(&mut guest);
        if told_all.end.is_some() || told_all.is_refused() {
            break;
        }
    }
    let is_limited = told_all
        .end
        .as_ref()
        .is_some_and(|end| end.contains("bytes of graphs"));
    assert!(is_limited || told_all.is_refused(), "{told_all:?}");
    drop(guest);
    executor.check("patches", 1);

    // Graphs that are never complete.
    let total = 64 * MIB;
    let mut guests: Vec<Guest> = (0..6).map(|_| executor.guest()).collect();
    let part = vec![7; MAX_PAYLOAD];
    for guest in &mut guests {
        for offset in (0..total - MIB).step_by(MAX_PAYLOAD) {
            let request = Request::Graph {
                graph: GraphId(1),
                offset,
                total,
            };
            guest.send_with(&request, &part);
        }
        let told = told(guest);
        assert!(told.end.is_none() && told.failures.is_empty(), "{told:?}");
    }
    executor.check("incomplete graphs", 6);
    // The guest is told of refused graphs when the last part has come.
    let last = Request::Graph {
        graph: GraphId(1),
        offset: total - MIB,
        total,
    };
    let ends = guests.iter_mut().map(|guest| {
        guest.send_with(&last, &part);
        told(guest)
    });
    let ends: Vec<Told> = ends.collect();
    // The words are no graph: a guest that has the memory for them breaks the protocol.
    assert!(ends.iter().any(Told::is_refused), "{ends:?}");
    assert!(ends.iter().any(|told| told.end.is_some()), "{ends:?}");
    executor.check("incomplete graphs", 6);
}

#[test]
fn small_buffers_and_sessions_stay_below_the_bound() {
    for executor in Executor::both("bound-small", false) {
        small_buffers_and_sessions(executor);
    }
}

fn small_buffers_and_sessions(mut executor: Executor) {
    let free = |guest: &mut Guest| match guest.ask(&Request::Memory {}) {
        Reply::Memory { free, .. } => free,
        other => panic!("{other:?}"),
    };
    let mut guests: Vec<Guest> = (0..3).map(|_| executor.guest()).collect();
    let before = free(&mut guests[0]);
    for guest in &mut guests {
        for size in 0..2000 {
            guest.alloc(size % 2);
        }
    }
    let taken = before - free(&mut guests[0]);
    assert_eq!(taken, 6000 * 4096, "each buffer takes a page");
    executor.check("small buffers", 3);
    drop(guests);
    let guests: Vec<Guest> = (0..20).map(|_| executor.guest()).collect();
    executor.check("sessions", 20);
    drop(guests);
}

/// The most steps of an operation: it runs for some seconds at most.
const STEPS: u64 = 1 << 28;

/// An operation in one buffer of [`BUFFER`] bytes, and the working memory that it needs.
fn placed(kind: OpKind, size: u64, buffer: BufferId) -> Option<Graph> {
    let sample = sample(kind, size);
    if sample.count > STEPS {
        return None;
    }
    // The engines have GET_REL_POS for half floats only.
    let of_type = |shape: Shape| match kind {
        OpKind::GetRelPos => samples::typed(Type::F16, shape.ne),
        _ => shape,
    };
    let (mut build, mut end) = (Build::default(), 0);
    let mut place = |shape: Shape| {
        let shape = of_type(shape);
        let offset = end;
        end = (offset + shape.byte_len()?).next_multiple_of(256);
        (end <= BUFFER).then(|| build.place(shape, buffer, offset))
    };
    let dst = place(sample.dst)?;
    let src = sample.src.into_iter().map(&mut place);
    let src: Vec<u32> = src.collect::<Option<_>>()?;
    build.node(sample.op, dst, &src);
    Some(build.0)
}

/// The operation of this kind that needs the most working memory, of those that fit in the buffer,
/// and this memory in bytes.
fn with_most_working_memory(
    kind: OpKind,
    engine: &dyn Engine,
    memory: &Arc<dyn Memory>,
    buffer: BufferId,
) -> (u64, Graph) {
    let graphs = (0..24).map_while(|log| placed(kind, 1 << log, buffer));
    let with_memory = graphs.filter_map(|graph| {
        let (limits, size) = (Limits::default(), |_| Some(BUFFER));
        // The largest ones may exceed a limit of validation.
        let valid = validate(graph.clone(), engine.capabilities(), &limits, size).ok()?;
        let plan = engine.compile(&valid, std::slice::from_ref(memory), &|| false);
        let plan = plan.expect("the engine has every operator");
        Some((plan.working_bytes(), graph))
    });
    let most = with_memory.max_by_key(|(bytes, _)| *bytes);
    most.unwrap_or_else(|| panic!("no {} fits", kind.ggml_name()))
}

#[test]
fn working_memory_of_every_operator_stays_below_the_bound() {
    for executor in Executor::both("bound-operators", false) {
        working_memory_of_every_operator(executor);
    }
}

fn working_memory_of_every_operator(mut executor: Executor) {
    let engine = CpuEngine::new(THREADS as usize, None).expect("two threads");
    let memory = engine.alloc(BUFFER).expect("a buffer");
    let all = OpKind::ALL.iter().filter(|&&k| k != OpKind::FlashAttnBack);
    let mut with_memory = 0;
    for &kind in all {
        let mut bytes = 0;
        let name = kind.ggml_name();
        let told = executor.run(name, |buffer| {
            let (most, graph) = with_most_working_memory(kind, &engine, &memory, buffer);
            bytes = most;
            graph
        });
        println!("{name}: {} KiB of working memory", bytes >> 10);
        with_memory += usize::from(bytes > MIB);
        assert!(told.end.is_none(), "{name}: {told:?}");
        assert!(
            told.failures.is_empty() || told.is_refused(),
            "{name}: {told:?}"
        );
    }
    // The others work on rows or tiles of a bounded size.
    assert!(with_memory >= 3, "{with_memory} operators need a MiB");
}

/// Weights that move between buffers until pages of the first one belong to nobody.
#[test]
fn weights_that_lose_their_first_buffer_stay_below_the_bound() {
    for executor in Executor::both("bound-weights", false) {
        weights_that_lose_their_first_buffer(executor);
    }
}

fn weights_that_lose_their_first_buffer(mut executor: Executor) {
    const LEN: u64 = 64 * MIB;
    let mut guest = executor.guest();
    let (kept, _) = for_weights(&mut guest, LEN);
    for round in 0..14u8 {
        let content = vec![round + 1; LEN as usize];
        let (first, _) = for_weights(&mut guest, LEN);
        upload(&mut guest, first, 0, &content);
        guest.send(&Request::Seal { buffer: first });
        guest.fence();
        // The host has the content once it is hashed.
        let start = Instant::now();
        while !lookup(&mut guest, kept, 0, &content) {
            assert!(start.elapsed() < TIMEOUT, "the content is not hashed");
        }
        guest.send(&Request::Fill {
            buffer: kept,
            offset: 0,
            len: LEN,
            value: 0xff,
        });
        guest.send(&Request::Free { buffer: first });
        let told = told(&mut guest);
        assert!(told.end.is_none(), "{told:?}");
        assert!(told.failures.is_empty(), "{told:?}");
    }
    executor.check("weights without their first buffer", 1);
}

/// A channel that reads nothing from the time on when it is told so.
struct ReadsNoMore {
    channel: Plain,
    has_stopped: Arc<AtomicBool>,
}

impl Channel for ReadsNoMore {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self.has_stopped.load(Ordering::Relaxed) {
            true => Err(io::ErrorKind::WouldBlock.into()),
            false => self.channel.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.channel.write(bytes)
    }

    fn flush(&mut self) -> io::Result<bool> {
        self.channel.flush()
    }

    fn close(&mut self) {
        self.channel.close();
    }

    fn socket(&self) -> io::Result<OwnedFd> {
        self.channel.socket()
    }
}

#[test]
fn replies_that_nobody_reads_stay_below_the_bound() {
    for executor in Executor::both("bound-stream", true) {
        replies_that_nobody_reads(executor);
    }
}

fn replies_that_nobody_reads(mut executor: Executor) {
    let port = executor.port.expect("a port");
    let socket = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
    socket.set_nonblocking(true).expect("a socket");
    let has_stopped = Arc::new(AtomicBool::new(false));
    let channel = ReadsNoMore {
        channel: Plain::new(socket),
        has_stopped: Arc::clone(&has_stopped),
    };
    let end = StreamGuest::new(Box::new(channel)).with_heartbeat();
    let mut guest = Guest::new(Box::new(end.expect("a thread")));
    guest.hello();
    let len = MAX_PAYLOAD as u64;
    let buffer = guest.alloc(len);
    has_stopped.store(true, Ordering::Relaxed);
    // Replies of 2 GiB, and frames behind these until no further one is taken.
    let read = Request::Read {
        buffer,
        offset: 0,
        len,
    };
    let mut send = |request: &Request, payload: &[u8]| {
        let mut message = Vec::new();
        request.encode(guest.protocol, &mut message);
        guest.end.send(&message, payload.into())
    };
    for _ in 0..2048 {
        if send(&read, &[]).is_err() {
            break;
        }
    }
    let (write, payload) = (Request::Write { buffer, offset: 0 }, vec![7; MAX_PAYLOAD]);
    let taken = (0..2048).take_while(|_| send(&write, &payload).is_ok());
    let taken = taken.count();
    println!("{taken} frames of 1 MiB were taken");
    assert!(taken < 2048, "all frames were taken");
    executor.check("replies that nobody reads", 1);
}

/// Connections that nobody is charged for: the constant of a process has room for all of them.
#[test]
fn connections_without_a_session_take_little() {
    const CONNECTIONS: usize = 60;
    let port = certified::port();
    let address = format!("tcp:127.0.0.1:{port}");
    let mut executor = Executor::start_with("bound-half-open", &["--listen", &address]);
    executor.other.compute();
    let before = peak(executor.serve.child.id());
    // The longest message that there is, and the longest first one, both without the last byte.
    for (message, payload) in [(MAX_MESSAGE, MAX_PAYLOAD), (MAX_FIRST_MESSAGE, 0)] {
        let words = [1, message as u32, payload as u32, 0, 1, 0u32];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(bytes.len() + message + payload - 1, 7);
        let connect = || {
            let mut socket = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
            let timeout = Some(Duration::from_secs(2));
            socket.set_write_timeout(timeout).expect("a socket");
            // The host may close the connection at any byte, or take no more.
            let _ = socket.write_all(&bytes);
            socket
        };
        let connections: Vec<TcpStream> = (0..CONNECTIONS).map(|_| connect()).collect();
        executor.other.compute();
        drop(connections);
    }
    let after = peak(executor.serve.child.id());
    println!("{after} MiB were resident, {before} before {CONNECTIONS} connections");
    // Half a MiB each: its thread, and what the kernel maps for it.
    let more = after.saturating_sub(before);
    assert!(
        more <= CONNECTIONS as u64 / 2,
        "{more} MiB more were resident"
    );
    executor.check("connections without a session", 0);
}

/// The bound holds for each process: a worker has the memory of its guest.
#[test]
fn each_process_of_isolation_stays_below_the_bound() {
    const OF_GUEST: u64 = 160;
    let guest_memory = format!("{OF_GUEST}M");
    let isolate = ["--isolate", "--guest-memory", &guest_memory];
    let mut executor = Executor::start_with("bound-isolate", &isolate);
    let attacks: [(&str, Attack); 2] = [
        ("a product of one term", product_of_one_term),
        ("ROPE of a long row", rope_of_a_long_row),
    ];
    let guests = attacks.map(|(attack, graph)| {
        let mut guest = executor.guest();
        let buffer = guest.alloc(BUFFER);
        guest.send(&Request::Fill {
            buffer,
            offset: 0,
            len: BUFFER,
            value: 0,
        });
        guest.graph(GraphId(1), &graph(buffer));
        guest.submit(GraphId(1));
        let told = told(&mut guest);
        assert!(told.is_refused(), "{attack}: {told:?}");
        guest
    });
    executor.other.compute();
    let supervisor = peak(executor.serve.child.id());
    println!("supervisor: {supervisor} MiB were resident, {PROCESS} are allowed");
    assert!(supervisor <= PROCESS, "the supervisor had {supervisor} MiB");
    let bound = OF_GUEST + PROCESS + THREADS * THREAD + SESSION;
    let mut peaks = Vec::new();
    for worker in workers(&executor.serve, 3).values() {
        peaks.push(peak(worker.as_raw_pid() as u32));
    }
    println!("workers: {peaks:?} MiB were resident, {bound} are allowed");
    assert!(peaks.iter().all(|&peak| peak <= bound), "{peaks:?}");
    // The buffers of both attackers were there.
    let large = peaks.iter().filter(|&&peak| peak >= BUFFER >> 20);
    assert_eq!(large.count(), 2, "{peaks:?}");
    drop(guests);
}
