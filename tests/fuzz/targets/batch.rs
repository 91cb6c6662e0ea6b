//! Plans of several guests, which the engine matches and runs as batches.
//!
//! Guests have graphs over two sets of shared weights. Most have the same graph; some differ in
//! one step. Turns end anywhere, members join and leave, and an index of a row or an expert may be
//! wrong. Each guest must get the bytes, or the failure, that it gets alone: so must one that was
//! matched with others whose weights differ.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, Extent, Memory, Plan, RunError, RunStatus, Turn};
use vgpu_gguf::Rng;
use vgpu_transport::ir::{
    BufferId, GluKind, Graph, Limits, Node, Op, Precision, Shape, Sources, Tensor, Type, validate,
};

use super::session::input::Input;

/// Elements of a row of weights, and of an activation.
const K: u64 = 256;
/// The most rows of a matrix, a multiple of `K`: a result is the activation of another product.
const ROWS: u64 = K;
/// The most columns.
const COLUMNS: u64 = 5;
/// A matrix of F32 has the most bytes.
const WEIGHTS: u64 = 4 * K * ROWS;
/// Activations of a guest, each with room for all columns.
const SLOTS: u64 = 4;
const SLOT: u64 = 4 * K * COLUMNS;
/// The offset of the indices.
const INDICES: u64 = SLOTS * SLOT;
/// The most experts of a token.
const USED: u64 = 4;
/// The offset of the ids of experts.
const IDS: u64 = INDICES + 4 * COLUMNS;
const OWN: u64 = IDS + 4 * USED * COLUMNS;

const TYPES: [Type; 8] = [
    Type::Mxfp4,
    Type::F32,
    Type::F16,
    Type::Bf16,
    Type::Q8_0,
    Type::Q4_0,
    Type::Q4K,
    Type::Q6K,
];

/// The engine, and the extents of two sets of weights.
struct EngineWithWeights {
    engine: CpuEngine,
    extents: [Arc<dyn Extent>; 2],
    /// The memory that the extents are part of.
    _sets: [Arc<dyn Memory>; 2],
}

static SHARED: LazyLock<EngineWithWeights> = LazyLock::new(|| {
    let engine = CpuEngine::new(2, Some(64 << 20)).expect("threads and memory");
    let sets = [1, 2].map(|seed| {
        let mut random = Rng::new(seed, 0);
        // As scales of any type, these bytes are finite and small.
        let bytes: Vec<u8> = (0..WEIGHTS)
            .map(|_| random.next_u64() as u8 & 0x1f)
            .collect();
        let set = weights(&engine);
        set.write(0, bytes.as_slice().into()).expect("its size");
        assert!(set.freeze());
        set
    });
    let extents = sets
        .each_ref()
        .map(|set| set.extent(0, WEIGHTS).expect("all of it"));
    EngineWithWeights {
        engine,
        extents,
        _sets: sets,
    }
});

fn weights(engine: &CpuEngine) -> Arc<dyn Memory> {
    let memory = engine.alloc(WEIGHTS).expect("memory");
    let weights = engine.alloc_weights(&memory);
    weights.expect("memory").expect("the engine shares weights")
}

/// A step of a graph.
#[derive(Clone, Copy)]
enum Step {
    /// A product with the weights of a set.
    Product {
        set: usize,
        ty: Type,
        rows: u64,
    },
    /// A product with as many experts of a set as it has room for, or the GLU of two such products.
    Experts {
        set: usize,
        ty: Type,
        rows: u64,
        used: u64,
        gated: bool,
    },
    /// Rows of an activation, by index.
    Rows,
    Add,
    Norm,
}

impl Step {
    fn draw(input: &mut Input<'_>) -> Step {
        match input.below(9) {
            0..3 => Step::Product {
                set: input.below(2),
                ty: input.pick(&TYPES),
                rows: [ROWS, 32, 33, 100][input.below(4)],
            },
            3..6 => Step::Experts {
                set: input.below(2),
                ty: input.pick(&TYPES),
                rows: [64, 32, 16][input.below(3)],
                used: 1 + input.below(USED as usize) as u64,
                gated: input.chance(2),
            },
            6 => Step::Rows,
            7 => Step::Add,
            _ => Step::Norm,
        }
    }
}

/// What the graph of a guest computes.
#[derive(Clone)]
struct Program {
    columns: u64,
    steps: Vec<Step>,
}

impl Program {
    /// The buffers are the two sets of weights and the guest's own memory.
    fn graph(&self) -> Graph {
        let mut graph = Graph {
            buffers: (1..=3).map(BufferId).collect(),
            ..Graph::default()
        };
        let columns = self.columns;
        let mut tensor = |ty, ne: [u64; 3], buffer, offset| {
            let shape = Shape::contiguous(ty, [ne[0], ne[1], ne[2], 1]).expect("whole blocks");
            graph.tensors.push(Tensor {
                shape,
                buffer,
                offset,
            });
            graph.tensors.len() as u32 - 1
        };
        let indices = tensor(Type::I32, [columns, 1, 1], 2, INDICES);
        let slots: Vec<u32> = (0..SLOTS)
            .map(|slot| tensor(Type::F32, [K, columns, 1], 2, slot * SLOT))
            .collect();
        let mut nodes = Vec::new();
        for (at, step) in self.steps.iter().enumerate() {
            // Each step reads the two last results, and writes another activation.
            let slot = |back: usize| (at + SLOTS as usize - back) % SLOTS as usize;
            let (from, before, to) = (slots[slot(1)], slots[slot(2)], slot(0));
            let mut node = |op, dst, src: &[u32]| {
                let src = Sources::new(src.iter().map(|&source| Some(source)));
                nodes.push(Node { op, dst, src });
            };
            match *step {
                Step::Product { set, ty, rows } => {
                    let matrix = tensor(ty, [K, rows, 1], set as u32, 0);
                    let result = tensor(Type::F32, [rows, columns, 1], 2, to as u64 * SLOT);
                    let product = Op::MulMat {
                        accumulator: Precision::Default,
                        activation: Precision::Default,
                        hadamard: false,
                    };
                    node(product, result, &[matrix, from]);
                }
                Step::Experts {
                    set,
                    ty,
                    rows,
                    used,
                    gated,
                } => {
                    let product = Op::MulMatId {
                        accumulator: Precision::Default,
                        activation: Precision::Default,
                    };
                    let matrices = [0, 1].map(|i| {
                        let set = (set + i) % 2;
                        tensor(ty, [K, rows, ROWS / rows], set as u32, 0)
                    });
                    let x = tensor(Type::F32, [K, 1, columns], 2, slot(1) as u64 * SLOT);
                    let ids = tensor(Type::I32, [used, columns, 1], 2, IDS);
                    let results = [0, 2, 3].map(|back| {
                        let at = slot(back) as u64 * SLOT;
                        tensor(Type::F32, [rows, used, columns], 2, at)
                    });
                    if gated {
                        // A later step may overwrite the products, which then need not be written.
                        node(product, results[1], &[matrices[0], x, ids]);
                        node(product, results[2], &[matrices[1], x, ids]);
                        let unit = Op::Glu {
                            kind: GluKind::Swiglu,
                            swapped: false,
                            alpha: 0.0,
                            limit: 0.0,
                        };
                        node(unit, results[0], &results[1..]);
                    } else {
                        node(product, results[0], &[matrices[0], x, ids]);
                    }
                }
                Step::Rows => node(Op::GetRows {}, slots[to], &[from, indices]),
                Step::Add => node(Op::Add {}, slots[to], &[from, before]),
                Step::Norm => node(Op::RmsNorm { eps: 1e-5 }, slots[to], &[from]),
            }
        }
        graph.nodes = nodes;
        graph
    }
}

struct Guest {
    plan: Box<dyn Plan>,
    /// The activation that the last step writes.
    last_slot: u64,
    own: Arc<dyn Memory>,
    /// What its memory holds before a run.
    start: Vec<u8>,
    /// What the plan does alone: the memory afterwards, or a failure.
    expected: Result<Vec<u8>, RunError>,
    is_done: bool,
}

impl Guest {
    /// `index` is that of the first row, `expert` the first expert; without, it is a valid one.
    fn new(program: &Program, seed: u64, index: i32, expert: Option<i32>) -> Guest {
        let EngineWithWeights {
            engine, extents, ..
        } = &*SHARED;
        let own = engine.alloc(OWN).expect("memory");
        let mut buffers: Vec<Arc<dyn Memory>> = Vec::new();
        for extent in extents {
            let set = weights(engine);
            set.attach(0, extent, &|| false).expect("the same size");
            assert!(set.freeze());
            buffers.push(set);
        }
        buffers.push(Arc::clone(&own));
        let size = |id: BufferId| Some(if id == BufferId(3) { OWN } else { WEIGHTS });
        let limits = Limits::default();
        let graph = validate(program.graph(), engine.capabilities(), &limits, size);
        let graph = graph.expect("the engine supports the graph");
        let plan = engine.compile(&graph, &buffers, &|| false);
        let mut random = Rng::new(seed, 1);
        let values = (0..SLOTS * SLOT / 4).map(|_| random.next_u64() as u8 as f32 / 64.0 - 2.0);
        let mut start: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        let mut indices = vec![index];
        indices.extend((1..COLUMNS).map(|_| 0));
        // Every product has as many experts.
        indices.extend((0..USED * COLUMNS).map(|_| random.below(ROWS / 64) as i32));
        if let Some(expert) = expert {
            indices[COLUMNS as usize] = expert;
        }
        start.extend(indices.into_iter().flat_map(i32::to_le_bytes));
        let mut guest = Guest {
            plan: plan.expect("a plan"),
            last_slot: (program.steps.len() as u64 - 1) % SLOTS,
            own,
            start,
            expected: Ok(Vec::new()),
            is_done: false,
        };
        guest.plan.reserve().expect("memory");
        guest.begin();
        let outcome = guest.plan.run();
        guest.expected = outcome.map(|_| guest.memory());
        guest.begin();
        guest
    }

    fn begin(&self) {
        self.own
            .write(0, self.start.as_slice().into())
            .expect("its size");
    }

    fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; OWN as usize];
        self.own
            .read(0, bytes.as_mut_slice().into())
            .expect("its size");
        bytes
    }

    /// Compares an outcome with that of the run alone.
    fn check(&mut self, outcome: Result<RunStatus, RunError>) {
        match (outcome, &self.expected) {
            (Ok(RunStatus::Yielded), _) => return,
            (Ok(RunStatus::Done), Ok(expected)) => {
                assert!(self.memory() == *expected, "another result than alone");
            }
            (Err(error), Err(expected)) => assert_eq!(error, *expected),
            (outcome, expected) => panic!("{outcome:?}, alone {}", expected.is_ok()),
        }
        self.is_done = true;
    }
}

pub(crate) fn run(data: &[u8]) {
    run_with(data, &|_, _| {});
}

/// As [`run`], with a fault: after a batch, two members have each other's first column of the
/// activation that the last step has written.
pub(crate) fn run_exchanged(data: &[u8]) {
    run_with(data, &|one, other| {
        let at = one.last_slot * SLOT;
        let columns = [one, other].map(|guest| {
            let mut bytes = [0; 4 * K as usize];
            let read = guest.own.read(at, bytes.as_mut_slice().into());
            read.expect("an activation");
            bytes
        });
        for (guest, bytes) in [(other, columns[0]), (one, columns[1])] {
            let written = guest.own.write(at, bytes.as_slice().into());
            written.expect("an activation");
        }
    });
}

/// Calls `disturb` with the first two members of each batch after its turn.
fn run_with(data: &[u8], disturb: &dyn Fn(&Guest, &Guest)) {
    let mut input = Input::new(data);
    let base = Program {
        columns: 1 + input.below(COLUMNS as usize) as u64,
        steps: (0..1 + input.below(8))
            .map(|_| Step::draw(&mut input))
            .collect(),
    };
    let count = 2 + input.below(5);
    let mut guests: Vec<Guest> = (0..count as u64)
        .map(|seed| {
            let mut program = base.clone();
            if input.chance(4) {
                let at = input.below(program.steps.len());
                program.steps[at] = match program.steps[at] {
                    // As near to the others as a graph with other weights can be.
                    Step::Product { set, ty, rows } if input.chance(2) => {
                        let set = 1 - set;
                        Step::Product { set, ty, rows }
                    }
                    Step::Experts {
                        set,
                        ty,
                        rows,
                        used,
                        gated,
                    } if input.chance(2) => Step::Experts {
                        set: 1 - set,
                        ty,
                        rows,
                        used,
                        gated,
                    },
                    _ => Step::draw(&mut input),
                };
            }
            if input.chance(8) {
                program.columns = 1 + input.below(COLUMNS as usize) as u64;
            }
            // Wrong for any number of rows, or right for all.
            let index = if input.chance(6) { 1000 } else { 0 };
            let expert = input.chance(8).then_some(1000);
            Guest::new(&program, seed, index, expert)
        })
        .collect();
    let engine = &SHARED.engine;
    while guests.iter().any(|guest| !guest.is_done) {
        let first = input.below(guests.len());
        let first = (0..guests.len())
            .map(|i| (first + i) % count)
            .find(|&i| !guests[i].is_done);
        let first = first.expect("one that has not ended");
        let key = guests[first].plan.batch_key();
        let leaves = input.byte();
        let turn = Turn::new();
        match input.below(4) {
            // At the end of the input, every turn has no end.
            0 => {}
            1 => turn.set_end(Some(Duration::ZERO)),
            _ => turn.set_end(Some(Duration::from_micros(u64::from(input.byte())))),
        }
        let mut members: Vec<usize> = Vec::new();
        for (i, guest) in guests.iter().enumerate() {
            let joins = key.is_some() && guest.plan.batch_key() == key && leaves >> i & 1 == 0;
            if !guest.is_done && (i == first || joins) {
                members.push(i);
            }
        }
        let mut plans: Vec<&mut dyn Plan> = Vec::new();
        for (i, guest) in guests.iter_mut().enumerate() {
            if members.contains(&i) {
                plans.push(&mut *guest.plan);
            }
        }
        assert!(plans.len() <= engine.max_batch());
        let outcomes = match plans.as_mut_slice() {
            [plan] => vec![plan.launch(&turn)],
            plans => engine.launch_batch(plans, &turn),
        };
        assert_eq!(outcomes.len(), members.len());
        if let [one, other, ..] = members[..] {
            disturb(&guests[one], &guests[other]);
        }
        for (i, outcome) in members.into_iter().zip(outcomes) {
            guests[i].check(outcome);
        }
    }
}
