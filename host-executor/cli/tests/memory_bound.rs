//! The bound of `docs/SECURITY.md`: whatever guests do, the resident memory of `vgpu serve` is at
//! most the memory that it was given and a constant. Each attack is refused with numbers, or stays
//! below the bound.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;

use common::{Build, Guest, OtherGuest, add, image};
use served::{Scratch, Serve, vgpu};
use vgpu_transport::ir::{BufferId, Graph, Op, Precision, RopeMode, Shape, Tensor, Type};
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD, Reply, Request};

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
            let has_numbers = reason.contains(" bytes wanted, ") && reason.contains(" free");
            reason.contains("out of memory") && has_numbers || reason.contains(", the limit is ")
        })
    }
}

impl Executor {
    fn start(test: &str) -> Executor {
        let scratch = Scratch::new(test);
        let endpoint = format!("unix:{}", scratch.socket().display());
        let (memory, threads) = (format!("{MEMORY}M"), THREADS.to_string());
        let serve = Serve::of(vgpu(&[
            "serve",
            "--listen",
            &endpoint,
            "--threads",
            &threads,
            "--memory",
            &memory,
        ]));
        let other = OtherGuest::new(serve.guest(&scratch.socket()));
        Executor {
            serve,
            scratch,
            other,
        }
    }

    fn guest(&self) -> Guest {
        self.serve.guest(&self.scratch.socket())
    }

    /// Checks that the executor has never had more than its memory and the constant of `sessions`
    /// sessions and the other guest, and that the other guest computes.
    fn check(&mut self, attack: &str, sessions: u64) {
        self.other.compute();
        let status = fs::read_to_string(format!("/proc/{}/status", self.serve.child.id()));
        let status = status.expect("the executor runs");
        let line = status.lines().find(|line| line.starts_with("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().nth(1));
        let peak = kib.and_then(|kib| kib.parse::<u64>().ok());
        let peak = peak.expect("a number of KiB") >> 10;
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
    let mut executor = Executor::start("bound-working");
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
    let mut executor = Executor::start("bound-graphs");

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
    let mut executor = Executor::start("bound-small");
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
