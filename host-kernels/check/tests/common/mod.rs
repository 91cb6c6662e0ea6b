//! Operations on any engine, compared with slow and simple references in f64.
//!
//! A test body takes `&dyn Engine` and is instantiated once for each engine (`tests/ops/main.rs`).
//! The body makes [`Data`] of random type, lengths and layout, runs one operation through
//! validation, compilation and execution, and compares every element of the destination. The
//! reference computes the element from the elements of the sources by the operator's definition.

pub(crate) mod counting;
mod sample;

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestCaseError, TestRng, TestRunner};
use vgpu_cpu::formats::Format;
use vgpu_engine::{Engine, Memory, Plan, RunError, RunStatus, Turn};
use vgpu_transport::ir::{
    BufferId, Graph, GraphCounts, Invalid, Limits, Node, Op, Shape, Sources, Tensor, Type,
    ValidGraph, validate,
};

pub(crate) use vgpu_check::Random;

use counting::counted;
use sample::Sample;

/// The content of memory before a test writes to it.
const FILLER: u8 = 0xa5;

/// The index of an element, by dimension.
pub(crate) type Index = [u64; 4];

/// A tensor with its memory: a buffer of its own, with room around it.
#[derive(Clone)]
pub(crate) struct Data {
    pub(crate) shape: Shape,
    offset: u64,
    memory: Vec<u8>,
    /// All elements, in order. The first access to an element decodes all.
    elements: OnceCell<Vec<f64>>,
}

impl Data {
    /// Memory for a tensor whose dimensions lie in the order `order` (the innermost first), with
    /// `gaps[d]` unused steps after each run of dimension `d`.
    pub(crate) fn strided(ty: Type, ne: [u64; 4], order: [usize; 4], gaps: [u64; 4]) -> Data {
        let mut nb = [0; 4];
        let mut step = ty.block_bytes();
        for d in order {
            nb[d] = step;
            let units = if d == 0 {
                ne[0] / ty.block_elements()
            } else {
                ne[d]
            };
            step *= units.max(1) + gaps[d];
        }
        let shape = Shape { ty, ne, nb };
        // Not a multiple of anything larger than the largest plain element.
        let offset = 24;
        let size = offset + shape.byte_len().expect("test shapes are small") + 40;
        Data {
            shape,
            offset,
            memory: vec![FILLER; size as usize],
            elements: OnceCell::new(),
        }
    }

    /// A dense layout: all elements adjacent, in order.
    pub(crate) fn dense(ty: Type, ne: [u64; 4]) -> Data {
        Data::strided(ty, ne, [0, 1, 2, 3], [0; 4])
    }

    /// The tensor, not yet filled, at an offset where an engine can access 16 bytes at once.
    pub(crate) fn aligned(mut self) -> Data {
        self.offset = 32; // the memory has room after the tensor
        self
    }

    /// A random layout: dense, padded, transposed or permuted. The elements of a block stay
    /// adjacent.
    pub(crate) fn random(ty: Type, ne: [u64; 4], random: &mut Random) -> Data {
        Data::random_rows(ty, ne, ty.is_quantized(), random)
    }

    /// A random layout, with dense rows if the argument says so.
    pub(crate) fn random_rows(
        ty: Type,
        ne: [u64; 4],
        dense_rows: bool,
        random: &mut Random,
    ) -> Data {
        if random.chance(3) {
            let dense = Data::dense(ty, ne);
            return if random.chance(2) {
                dense.aligned()
            } else {
                dense
            };
        }
        let first = usize::from(dense_rows);
        let mut order = [0, 1, 2, 3];
        if random.chance(2) {
            for i in (first + 1..4).rev() {
                order.swap(i, first + random.below((i - first + 1) as u64) as usize);
            }
        }
        let mut gaps = [0; 4];
        if random.chance(2) {
            gaps = std::array::from_fn(|_| random.below(3));
        }
        Data::strided(ty, ne, order, gaps)
    }

    /// Every index, in order.
    pub(crate) fn indices(&self) -> impl Iterator<Item = Index> + use<> {
        let [n0, n1, n2, n3] = self.shape.ne;
        (0..n3).flat_map(move |i3| {
            (0..n2).flat_map(move |i2| {
                (0..n1).flat_map(move |i1| (0..n0).map(move |i0| [i0, i1, i2, i3]))
            })
        })
    }

    /// The index of the first element of each block, in order.
    fn blocks(&self) -> impl Iterator<Item = Index> + use<> {
        let block = self.shape.ty.block_elements();
        self.indices().filter(move |i| i[0].is_multiple_of(block))
    }

    /// The bytes of the block of an element.
    fn block_bytes(&self, index: Index) -> &[u8] {
        &self.memory[self.place(index)..][..self.shape.ty.block_bytes() as usize]
    }

    /// The offset in memory of the block of an element, in bytes.
    fn place(&self, index: Index) -> usize {
        let Shape { ty, ne, nb } = self.shape;
        assert!(
            (0..4).all(|d| index[d] < ne[d]),
            "index {index:?} of {ne:?}"
        );
        let block = index[0] / ty.block_elements();
        let rest: u64 = (1..4).map(|d| index[d] * nb[d]).sum();
        (self.offset + block * nb[0] + rest) as usize
    }

    /// Fills the tensor, element by element in order.
    pub(crate) fn fill(mut self, mut next: impl FnMut() -> f64) -> Data {
        self.elements.take();
        let ty = self.shape.ty;
        let block = ty.block_elements();
        for index in self.blocks() {
            let values: Vec<f64> = (0..block).map(|_| next()).collect();
            let bytes = encode(ty, &values);
            let place = self.place(index);
            self.memory[place..place + bytes.len()].copy_from_slice(&bytes);
        }
        self
    }

    /// Fills the tensor with random bits.
    pub(crate) fn scribble(&mut self, random: &mut Random) {
        self.elements.take();
        let covered = self.covered();
        for (byte, covered) in self.memory.iter_mut().zip(covered) {
            if covered {
                *byte = random.bits() as u8;
            }
        }
    }

    /// One row as a tensor of its own.
    pub(crate) fn row(&self, [i1, i2, i3]: [u64; 3]) -> Data {
        let Shape { ty, ne, nb } = self.shape;
        let shape = Shape {
            ty,
            ne: [ne[0], 1, 1, 1],
            nb,
        };
        let start = (self.offset + i1 * nb[1] + i2 * nb[2] + i3 * nb[3]) as usize;
        let byte_len = shape.byte_len().expect("a row of a tensor") as usize;
        let memory = match byte_len {
            0 => Vec::new(), // an empty row may have any offset
            _ => self.memory[start..start + byte_len].to_vec(),
        };
        Data {
            shape,
            offset: 0,
            memory,
            elements: OnceCell::new(),
        }
    }

    /// Sets a single element of a plain type.
    pub(crate) fn set(&mut self, index: Index, value: f64) {
        let bytes = encode(self.shape.ty, &[value]);
        let place = self.place(index);
        self.memory[place..place + bytes.len()].copy_from_slice(&bytes);
        let position = self.position(index);
        if let Some(elements) = self.elements.get_mut() {
            elements[position] = decode(self.shape.ty, &bytes)[0];
        }
    }

    /// An element, rounded to the type.
    pub(crate) fn get(&self, index: Index) -> f64 {
        self.elements()[self.position(index)]
    }

    /// The position of an element among all elements, in order.
    fn position(&self, index: Index) -> usize {
        let ne = self.shape.ne;
        assert!(
            (0..4).all(|d| index[d] < ne[d]),
            "index {index:?} of {ne:?}"
        );
        let [i0, i1, i2, i3] = index;
        (((i3 * ne[2] + i2) * ne[1] + i1) * ne[0] + i0) as usize
    }

    /// All elements, in order.
    fn elements(&self) -> &[f64] {
        self.elements.get_or_init(|| {
            self.blocks()
                .flat_map(|i| decode(self.shape.ty, self.block_bytes(i)))
                .collect()
        })
    }

    /// The elements of a row.
    pub(crate) fn row_values(&self, [i1, i2, i3]: [u64; 3]) -> &[f64] {
        let [n0, n1, n2, n3] = self.shape.ne;
        assert!(i1 < n1 && i2 < n2 && i3 < n3, "row {:?}", [i1, i2, i3]);
        let start = ((i3 * n2 + i2) * n1 + i1) * n0;
        &self.elements()[start as usize..][..n0 as usize]
    }

    /// The indices of all rows, in order.
    pub(crate) fn row_indices(&self) -> impl Iterator<Item = [u64; 3]> + use<> {
        let [_, n1, n2, n3] = self.shape.ne;
        (0..n3).flat_map(move |i3| (0..n2).flat_map(move |i2| (0..n1).map(move |i1| [i1, i2, i3])))
    }

    /// All elements, in order.
    pub(crate) fn values(&self) -> Vec<f64> {
        self.elements().to_vec()
    }

    /// The bytes of all blocks, in order.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.blocks()
            .flat_map(|i| self.block_bytes(i).to_vec())
            .collect()
    }

    /// For each byte of the memory, whether it belongs to an element.
    fn covered(&self) -> Vec<bool> {
        let len = self.shape.ty.block_bytes() as usize;
        let mut covered = vec![false; self.memory.len()];
        for index in self.blocks() {
            covered[self.place(index)..][..len].fill(true);
        }
        covered
    }
}

/// The numbers of a block, quantised to a type.
fn encode(ty: Type, values: &[f64]) -> Vec<u8> {
    match ty {
        Type::I8 => return (values[0] as i8).to_le_bytes().to_vec(),
        Type::I16 => return (values[0] as i16).to_le_bytes().to_vec(),
        Type::I32 => return (values[0] as i32).to_le_bytes().to_vec(),
        Type::I64 => return (values[0] as i64).to_le_bytes().to_vec(),
        Type::F64 => return values[0].to_le_bytes().to_vec(),
        _ => {}
    }
    let format = Format::of(ty).expect("a type of real numbers");
    let mut bytes = vec![0; format.bytes];
    let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
    assert_eq!(values.len(), format.block);
    // SAFETY: `values` holds the elements of one block, and `bytes` has the size of one block.
    unsafe { (format.quantize_row)(values.as_ptr(), bytes.as_mut_ptr(), values.len()) };
    bytes
}

/// The elements of a block.
fn decode(ty: Type, bytes: &[u8]) -> Vec<f64> {
    match ty {
        Type::I8 => return vec![f64::from(bytes[0] as i8)],
        Type::I16 => return vec![f64::from(i16::from_le_bytes(bytes.try_into().unwrap()))],
        Type::I32 => return vec![f64::from(i32::from_le_bytes(bytes.try_into().unwrap()))],
        Type::I64 => return vec![i64::from_le_bytes(bytes.try_into().unwrap()) as f64],
        Type::F64 => return vec![f64::from_le_bytes(bytes.try_into().unwrap())],
        _ => {}
    }
    let format = Format::of(ty).expect("a type of real numbers");
    let mut values = vec![0.0; format.block];
    assert_eq!(bytes.len(), format.bytes);
    // SAFETY: `bytes` holds one block, and `values` has room for its elements.
    unsafe { (format.dequantize_row)(bytes.as_ptr(), values.as_mut_ptr(), values.len()) };
    values.into_iter().map(f64::from).collect()
}

/// Why an operation did not run.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The operation is not valid, or the engine does not support it.
    Invalid(Invalid),
    /// The engine failed to run the operation.
    Run(RunError),
}

/// Runs an operation and returns the destination. Panics if the operation fails, or if the memory
/// around the destination or the memory of a source changes.
pub(crate) fn run(engine: &dyn Engine, op: Op, dst: &Data, src: &[Option<&Data>]) -> Data {
    try_run(engine, op, dst, src).unwrap_or_else(|error| panic!("{op:?}: {error:?}"))
}

/// [`run`] for an operation that may fail.
pub(crate) fn try_run(
    engine: &dyn Engine,
    op: Op,
    dst: &Data,
    src: &[Option<&Data>],
) -> Result<Data, Failure> {
    let operands: Vec<&Data> = src.iter().copied().flatten().chain([dst]).collect();
    let mut present = 0..operands.len() as u32;
    let sources = src
        .iter()
        .map(|s| s.and_then(|_| present.next()))
        .collect::<Vec<_>>();
    let node = Node {
        op,
        dst: operands.len() as u32 - 1,
        src: Sources::new(sources),
    };
    let mut after = execute(engine, &operands, node)?;
    let dst = after.pop().expect("the destination is the last");
    for (before, after) in operands.iter().zip(&after) {
        assert!(before.memory == after.memory, "{op:?} changed a source");
    }
    Ok(dst)
}

/// Runs an operation whose destination is its first source.
pub(crate) fn run_in_place(engine: &dyn Engine, op: Op, src: &[Option<&Data>]) -> Data {
    run_over(engine, op, src, 0)
}

/// Runs an operation whose destination is source `over`, counted without those that are absent.
pub(crate) fn run_over(engine: &dyn Engine, op: Op, src: &[Option<&Data>], over: usize) -> Data {
    let operands: Vec<&Data> = src.iter().copied().flatten().collect();
    let mut present = 0..operands.len() as u32;
    let sources = src
        .iter()
        .map(|s| s.and_then(|_| present.next()))
        .collect::<Vec<_>>();
    let node = Node {
        op,
        dst: over as u32,
        src: Sources::new(sources),
    };
    execute(engine, &operands, node)
        .unwrap_or_else(|error| panic!("{op:?} over source {over}: {error:?}"))
        .swap_remove(over)
}

/// Runs an operation that also changes its sources, with the first source as destination. Returns
/// all sources.
pub(crate) fn run_changing(engine: &dyn Engine, op: Op, src: &[&Data]) -> Vec<Data> {
    let node = Node {
        op,
        dst: 0,
        src: Sources::new((0..src.len() as u32).map(Some)),
    };
    execute(engine, src, node).unwrap_or_else(|error| panic!("{op:?}: {error:?}"))
}

/// Runs nodes, given by operator, destination and sources. Each tensor has a buffer of its own.
/// Returns the tensors after the run.
pub(crate) fn run_nodes(
    engine: &dyn Engine,
    operands: &[&Data],
    nodes: &[(Op, u32, &[u32])],
) -> Vec<Data> {
    let nodes = nodes.iter().map(|&(op, dst, src)| Node {
        op,
        dst,
        src: Sources::new(src.iter().copied().map(Some)),
    });
    execute_all(engine, operands, nodes.collect()).unwrap_or_else(|error| panic!("{error:?}"))
}

/// Runs one node over tensors with a buffer each. Returns the tensors after the run.
fn execute(engine: &dyn Engine, operands: &[&Data], node: Node) -> Result<Vec<Data>, Failure> {
    let dst = node.dst as usize;
    let after = execute_all(engine, operands, vec![node])?;
    for (i, covered) in operands[dst].covered().into_iter().enumerate() {
        assert!(
            covered || operands[dst].memory[i] == after[dst].memory[i],
            "byte {i}, which is no part of the destination, has changed"
        );
    }
    Ok(after)
}

/// Compiles a graph, and checks what the engine says about the memory that this needs.
fn compile(engine: &dyn Engine, graph: &ValidGraph, memory: &[Arc<dyn Memory>]) -> Box<dyn Plan> {
    let words = graph.graph().encode();
    let counts = GraphCounts::of_image(&words).expect("an image");
    // The first graph starts what an engine starts when it is needed.
    drop(engine.compile(graph, memory, &|| false));
    let measure = || {
        let (plan, allocated) = counted(|| engine.compile(graph, memory, &|| false));
        (plan.expect("what is claimed compiles"), allocated)
    };
    let (mut plan, mut allocated) = measure();
    // A table of the engine that all graphs share seldom grows, but may do so at any compilation.
    for _ in 0..2 {
        if allocated.kept > plan.plan_bytes() {
            (plan, allocated) = measure();
        }
    }
    let op = graph.graph().nodes[0].op;
    let (bytes, most) = (plan.plan_bytes(), engine.compile_bytes(&counts));
    assert!(
        allocated.kept <= bytes,
        "{op:?}: {} bytes are allocated, the plan reports {bytes}",
        allocated.kept
    );
    assert!(
        allocated.most <= most,
        "{op:?}: {} bytes were allocated at a time, the engine announces {most}",
        allocated.most
    );
    plan
}

/// Turns of one unit of work, after which a run has a turn without an end.
const MAX_TURNS: usize = 50;

/// Runs nodes over tensors with a buffer each, in one turn and in many, with the same results.
/// Returns the tensors after the run.
fn execute_all(
    engine: &dyn Engine,
    operands: &[&Data],
    nodes: Vec<Node>,
) -> Result<Vec<Data>, Failure> {
    let memory: Vec<Arc<dyn Memory>> = operands
        .iter()
        .map(|o| {
            let memory = engine
                .alloc(o.memory.len() as u64)
                .expect("test tensors are small");
            memory
                .write(0, o.memory.as_slice().into())
                .expect("the buffer has this size");
            memory
        })
        .collect();
    let tensors = operands.iter().enumerate().map(|(i, o)| Tensor {
        shape: o.shape,
        buffer: i as u32,
        offset: o.offset,
    });
    let graph = Graph {
        buffers: (1..=operands.len() as u64).map(BufferId).collect(),
        tensors: tensors.collect(),
        nodes,
    };
    let size = |id: BufferId| Some(operands[id.0 as usize - 1].memory.len() as u64);
    let graph = validate(graph, engine.capabilities(), &Limits::default(), size)
        .map_err(Failure::Invalid)?;
    let mut plan = compile(engine, &graph, &memory);
    plan.run().map_err(Failure::Run)?;
    let after = read_back(operands, &memory);
    // The same run in turns that are over at once: each thread does one unit of work in a turn.
    for (o, memory) in operands.iter().zip(&memory) {
        memory
            .write(0, o.memory.as_slice().into())
            .expect("the buffer has this size");
    }
    let turn = Turn::new();
    turn.set_end(Some(Duration::ZERO));
    let mut turns = 0;
    while plan.launch(&turn).map_err(Failure::Run)? == RunStatus::Yielded {
        turns += 1;
        if turns == MAX_TURNS {
            turn.set_end(None);
        }
    }
    plan.wait().map_err(Failure::Run)?;
    for (i, (whole, cut)) in after.iter().zip(read_back(operands, &memory)).enumerate() {
        assert!(
            whole.memory[..] == cut.memory[..],
            "tensor {i} differs after a run in {turns} turns"
        );
    }
    Ok(after)
}

/// The operands as they are in memory now.
fn read_back(operands: &[&Data], memory: &[Arc<dyn Memory>]) -> Vec<Data> {
    operands
        .iter()
        .zip(memory)
        .map(|(&before, memory)| {
            let mut after = before.clone();
            after.elements.take();
            memory
                .read(0, after.memory.as_mut_slice().into())
                .expect("the buffer has this size");
            after
        })
        .collect()
}

/// Runs one node over tensors in one buffer, given by shape and offset, the destination first.
/// Returns the buffer.
pub(crate) fn run_in_one_buffer(
    engine: &dyn Engine,
    op: Op,
    buffer: &[u8],
    tensors: &[(Shape, u64)],
) -> Result<Vec<u8>, Failure> {
    let memory = engine
        .alloc(buffer.len() as u64)
        .expect("test buffers are small");
    memory
        .write(0, buffer.into())
        .expect("the buffer has this size");
    run_in(engine, op, &memory, buffer.len() as u64, tensors)?;
    let mut after = vec![0; buffer.len()];
    memory
        .read(0, after.as_mut_slice().into())
        .expect("the buffer has this size");
    Ok(after)
}

/// Runs one node over tensors in memory of `size` bytes.
pub(crate) fn run_in(
    engine: &dyn Engine,
    op: Op,
    memory: &Arc<dyn Memory>,
    size: u64,
    tensors: &[(Shape, u64)],
) -> Result<(), Failure> {
    let sources = (1..tensors.len() as u32).map(Some);
    let graph = Graph {
        buffers: vec![BufferId(1)],
        tensors: tensors
            .iter()
            .map(|&(shape, offset)| Tensor {
                shape,
                buffer: 0,
                offset,
            })
            .collect(),
        nodes: vec![Node {
            op,
            dst: 0,
            src: Sources::new(sources),
        }],
    };
    let size = |_| Some(size);
    let graph = validate(graph, engine.capabilities(), &Limits::default(), size)
        .map_err(Failure::Invalid)?;
    let mut plan = compile(engine, &graph, &[Arc::clone(memory)]);
    plan.run().map_err(Failure::Run)
}

/// Compares a result with its reference: equal within `tolerance * (1 + |reference|)` and the
/// rounding of the destination's type.
#[track_caller]
pub(crate) fn compare(what: &str, got: &Data, tolerance: f64, reference: impl Fn(Index) -> f64) {
    for index in got.indices() {
        let (want, ulp) = rounded(got.shape.ty, reference(index));
        let got = got.get(index);
        assert!(
            near(got, want, tolerance * (1.0 + want.abs()) + ulp),
            "{what}: element {index:?} is {got:e}, not {want:e}"
        );
    }
}

fn near(got: f64, want: f64, error: f64) -> bool {
    got == want || got.is_nan() && want.is_nan() || (got - want).abs() <= error
}

/// `x`, or infinity if `x` overflows the type, and the size of the last place of `x` in the type.
fn rounded(ty: Type, x: f64) -> (f64, f64) {
    let (largest, bits, smallest) = match ty {
        Type::F32 => (f64::from(f32::MAX), 23, -149),
        Type::F16 => (65504.0, 10, -24),
        Type::Bf16 => (3.3895313892515355e38, 7, -133),
        _ => return (x, 0.0),
    };
    let ulp = 2f64.powi((x.abs().log2().floor().clamp(-200.0, 200.0) as i32 - bits).max(smallest));
    if x.is_finite() && x.abs() >= largest + ulp / 2.0 {
        (f64::INFINITY.copysign(x), ulp)
    } else {
        (x, ulp)
    }
}

/// Runs a body `cases` times, each time with another stream of random numbers: a twelfth as often
/// in a sample. A failure names the seed.
pub(crate) fn property(cases: u32, body: impl Fn(&mut Random)) {
    let all = ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let mut runner = match Sample::asked() {
        None => TestRunner::new(all),
        Some(sample) => {
            let cases = cases.div_ceil(sample.one_in() as u32);
            let mut seed = [0; 32];
            seed[..8].copy_from_slice(&sample.seed.to_le_bytes());
            let random = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
            TestRunner::new_with_rng(ProptestConfig { cases, ..all }, random)
        }
    };
    let outcome = runner.run(&any::<u64>(), |seed| {
        body(&mut Random::new(seed));
        Ok::<(), TestCaseError>(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

/// Random lengths: mostly small, some empty, some a single element, some a long row.
pub(crate) fn lengths(random: &mut Random) -> [u64; 4] {
    let mut ne = std::array::from_fn(|_| 1 + random.below(6));
    match random.below(8) {
        0 => ne[random.below(4) as usize] = 0,
        1 => ne = [1; 4],
        2 => ne = [random.pick(&[63, 256, 257, 1000, 5000]), 1, 1, 1],
        3 => ne[0] = random.pick(&[16, 17, 33, 255, 300]),
        _ => {}
    }
    ne
}

/// Lengths that repeat into `whole`.
pub(crate) fn part_of(whole: [u64; 4], random: &mut Random) -> [u64; 4] {
    whole.map(|n| {
        let divisors: Vec<u64> = (1..=n).filter(|d| n.is_multiple_of(*d)).collect();
        match random.below(3) {
            _ if n == 0 => 0,
            0 => 1,
            1 => n,
            _ => random.pick(&divisors),
        }
    })
}

/// The index in a tensor of lengths `part`, which is repeated, that corresponds to `index` of the
/// whole.
pub(crate) fn repeated(index: Index, part: [u64; 4]) -> Index {
    std::array::from_fn(|d| index[d] % part[d])
}
