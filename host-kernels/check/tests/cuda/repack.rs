//! Repacked weights: repacked once, and readers of the memory find ggml's bytes, whatever
//! happens in between.

use std::sync::Arc;

use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_engine::{Engine, Memory, Plan, RunError};
use vgpu_gguf::Rng;
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Precision, Shape, Sources, Tensor, Type, validate,
};

use crate::engine_with;
use crate::spy::{Call, Fails, Spy};

/// Buffers: the weights, and all other tensors.
pub(crate) const WEIGHTS: u32 = 0;
pub(crate) const OTHERS: u32 = 1;
pub(crate) const OTHER_BYTES: u64 = 4 << 20;

/// An engine that repacks weights or not, and the device that runs its kernels.
fn engine(repack: bool) -> (CudaEngine, Arc<Spy>) {
    let device = Arc::new(Spy::running());
    let policy = LaunchPolicy {
        repack,
        ..LaunchPolicy::default()
    };
    (engine_with(&device, policy), device)
}

/// A dense tensor of a buffer.
pub(crate) fn tensor(buffer: u32, ty: Type, ne: [u64; 4], offset: u64) -> Tensor {
    Tensor {
        shape: Shape::contiguous(ty, ne).expect("a small tensor"),
        buffer,
        offset,
    }
}

pub(crate) fn size(tensor: &Tensor) -> u64 {
    tensor.shape.byte_len().expect("a small tensor")
}

/// A graph of nodes with operator, destination and sources.
pub(crate) fn graph(tensors: &[Tensor], nodes: &[(Op, u32, &[u32])]) -> Graph {
    let nodes = nodes.iter().map(|&(op, dst, src)| Node {
        op,
        dst,
        src: Sources::new(src.iter().copied().map(Some)),
    });
    Graph {
        buffers: vec![BufferId(1), BufferId(2)],
        tensors: tensors.to_vec(),
        nodes: nodes.collect(),
    }
}

const MUL_MAT: Op = Op::MulMat {
    accumulator: Precision::Default,
    activation: Precision::Default,
    hadamard: false,
};

/// Weights times `columns` columns, which lie before the result.
pub(crate) fn product(weights: Tensor, columns: u64) -> Graph {
    let [length, rows, ..] = weights.shape.ne;
    let x = tensor(OTHERS, Type::F32, [length, columns, 1, 1], 0);
    let dst = tensor(OTHERS, Type::F32, [rows, columns, 1, 1], OTHER_BYTES / 2);
    graph(&[weights, x, dst], &[(MUL_MAT, 2, &[0, 1])])
}

/// Expert weights times a token for each of two slots.
fn experts(weights: Tensor) -> Graph {
    let [length, rows, ..] = weights.shape.ne;
    let x = tensor(OTHERS, Type::F32, [length, 1, 1, 1], 0);
    let ids = tensor(OTHERS, Type::I32, [2, 1, 1, 1], OTHER_BYTES / 4);
    let dst = tensor(OTHERS, Type::F32, [rows, 2, 1, 1], OTHER_BYTES / 2);
    let op = Op::MulMatId {
        accumulator: Precision::Default,
        activation: Precision::Default,
    };
    graph(&[weights, x, ids, dst], &[(op, 3, &[0, 1, 2])])
}

/// Rows of the weights as f32.
pub(crate) fn rows_of(weights: Tensor) -> Graph {
    let ids = tensor(OTHERS, Type::I32, [2, 1, 1, 1], OTHER_BYTES / 4);
    let ne = [weights.shape.ne[0], 2, 1, 1];
    let dst = tensor(OTHERS, Type::F32, ne, OTHER_BYTES / 2);
    graph(&[weights, ids, dst], &[(Op::GetRows {}, 2, &[0, 1])])
}

/// The types that are repacked.
const TYPES: [Type; 5] = [Type::Mxfp4, Type::Iq4Nl, Type::Q4_0, Type::Q8_0, Type::Q6K];

/// Pseudo-random bytes that are valid blocks, with MXFP4 scales near 1.
fn content(len: u64, seed: u32) -> Vec<u8> {
    content_of(Type::Mxfp4, len, seed)
}

/// The same for another type, whose scales are F16.
pub(crate) fn content_of(ty: Type, len: u64, seed: u32) -> Vec<u8> {
    let least = if ty == Type::Mxfp4 { 0x78 } else { 0x34 };
    (0..len as u32)
        .map(|i| (i.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 13) as u8 % 8 + least)
        .collect()
}

/// Two buffers on an engine: weights, marked so, and all other tensors.
pub(crate) struct Loaded {
    pub(crate) buffers: Vec<Arc<dyn Memory>>,
}

impl Loaded {
    pub(crate) fn new(engine: &dyn Engine, weights: &[u8]) -> Loaded {
        let buffers = vec![
            engine.alloc(weights.len() as u64).unwrap(),
            engine.alloc(OTHER_BYTES).unwrap(),
        ];
        buffers[0].mark_weights();
        buffers[0].write(0, weights.into()).unwrap();
        let x: Vec<u8> = (0..OTHER_BYTES / 16)
            .flat_map(|i| ((i * 37 % 101) as f32 / 50.0 - 1.0).to_le_bytes())
            .collect();
        buffers[1].write(0, x.as_slice().into()).unwrap();
        let ids: Vec<u8> = [2i32, 0].iter().flat_map(|id| id.to_le_bytes()).collect();
        buffers[1]
            .write(OTHER_BYTES / 4, ids.as_slice().into())
            .unwrap();
        Loaded { buffers }
    }

    pub(crate) fn weights(&self) -> &dyn Memory {
        &*self.buffers[0]
    }

    pub(crate) fn compile(&self, engine: &dyn Engine, graph: &Graph) -> Box<dyn Plan> {
        let size = |id: BufferId| Some(self.buffers[id.0 as usize - 1].size());
        let valid = validate(
            graph.clone(),
            engine.capabilities(),
            &Limits::default(),
            size,
        );
        let valid = valid.expect("a graph that the engine runs");
        let plan = engine.compile(&valid, &self.buffers, &|| false);
        let mut plan = plan.expect("it compiles");
        plan.reserve().expect("there is scratch memory");
        plan
    }

    pub(crate) fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut out = vec![0; len as usize];
        self.weights()
            .read(offset, out.as_mut_slice().into())
            .unwrap();
        out
    }

    /// The last tensor of a graph after its run.
    pub(crate) fn result(&self, graph: &Graph) -> Vec<f32> {
        let dst = graph.tensors.last().unwrap();
        let mut out = vec![0; size(dst) as usize];
        self.buffers[1]
            .read(dst.offset, out.as_mut_slice().into())
            .unwrap();
        { out.chunks_exact(4) }
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect()
    }
}

/// The number of launches that repacked.
pub(crate) fn repacked(device: &Spy) -> usize {
    let log = device.take_log();
    let asked = |call: &&Call| **call == Call::Launch("vg_repack");
    log.iter().filter(asked).count()
}

/// The two results differ only by the order of additions.
pub(crate) fn assert_close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    assert!(largest.is_finite() && largest > 0.0, "{what}: {largest}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (got - want).abs() <= 1e-3 * largest,
            "{what}: {got} instead of {want} at {i}"
        );
    }
}

/// The result of a graph with plain weights.
pub(crate) fn plain_result(weights: &[u8], graph: &Graph) -> Vec<f32> {
    let (engine, device) = engine(false);
    let loaded = Loaded::new(&engine, weights);
    loaded.compile(&engine, graph).run().unwrap();
    assert_eq!(repacked(&device), 0);
    loaded.result(graph)
}

#[test]
fn weights_are_repacked_once_and_read_back_unchanged() {
    for ty in TYPES {
        // An odd number of rows that are no multiple of 16 bytes, and another tensor beside them.
        let length = 2880 / ty.block_elements() * ty.block_elements();
        let weights = tensor(WEIGHTS, ty, [length, 5, 1, 1], 64);
        let bytes = content_of(ty, 64 + size(&weights) + 100, 1);
        let (engine, device) = engine(true);
        let loaded = Loaded::new(&engine, &bytes);
        device.take_log();
        for (i, columns) in [1, 3, 40, 1].into_iter().enumerate() {
            let graph = product(weights, columns);
            let mut plan = loaded.compile(&engine, &graph);
            let count = repacked(&device);
            assert_eq!(count, usize::from(i == 0), "{ty:?} {columns}");
            plan.run().unwrap();
            let what = format!("{ty:?}, {columns} columns");
            assert_close(&loaded.result(&graph), &plain_result(&bytes, &graph), &what);
            assert!(plan.is_current());
        }
        let end = bytes.len() as u64;
        for range in [
            0..end,
            0..1,
            63..65,
            64..end - 100,
            end - 101..end - 99,
            1000..1001,
            70..end - 70,
            end - 50..end,
        ] {
            let got = loaded.read(range.start, range.end - range.start);
            let want = &bytes[range.start as usize..range.end as usize];
            assert!(got == want, "{ty:?} {range:?}");
        }
        // No tensor was restored.
        loaded.compile(&engine, &product(weights, 1));
        assert_eq!(repacked(&device), 0);
    }
}

#[test]
fn each_expert_is_repacked_as_a_separate_matrix() {
    for ty in TYPES {
        let weights = tensor(WEIGHTS, ty, [256, 24, 3, 1], 0);
        let bytes = content_of(ty, size(&weights), 2);
        let (engine, device) = engine(true);
        let loaded = Loaded::new(&engine, &bytes);
        device.take_log();
        let graph = experts(weights);
        let mut plan = loaded.compile(&engine, &graph);
        assert_eq!(repacked(&device), 3, "{ty:?}");
        plan.run().unwrap();
        assert_close(
            &loaded.result(&graph),
            &plain_result(&bytes, &graph),
            "experts",
        );
        assert!(loaded.read(0, bytes.len() as u64) == bytes);
        for at in (0..bytes.len() as u64 - 300).step_by(97) {
            let want = &bytes[at as usize..][..300];
            assert!(loaded.read(at, 300) == want, "{ty:?} {at}");
        }
    }
}

#[test]
fn large_matrices_are_repacked_in_pieces() {
    let weights = tensor(WEIGHTS, Type::Mxfp4, [8192, 4099, 1, 1], 0);
    assert!(size(&weights) > 16 << 20);
    let bytes = content(size(&weights), 3);
    let (engine, device) = engine(true);
    let loaded = Loaded::new(&engine, &bytes);
    device.take_log();
    let mut graph = product(weights, 1);
    // Some rows of the matrix that the plan multiplies by.
    let mut plan = loaded.compile(&engine, &graph);
    assert_eq!(repacked(&device), 2);
    assert!(loaded.read(0, bytes.len() as u64) == bytes);
    plan.run().unwrap();
    let got = loaded.result(&graph);
    // The last rows by themselves.
    let last = tensor(WEIGHTS, Type::Mxfp4, [8192, 3, 1, 1], 0);
    graph = product(last, 1);
    let want = plain_result(&bytes[bytes.len() - size(&last) as usize..], &graph);
    assert_close(&got[4096..], &want, "the last rows");
    // Writing one byte restores the tensor.
    loaded
        .weights()
        .fill(bytes.len() as u64 / 2, 1, 0x7a)
        .unwrap();
    let mut bytes = bytes;
    let middle = bytes.len() / 2;
    bytes[middle] = 0x7a;
    assert!(loaded.read(0, bytes.len() as u64) == bytes);
}

#[test]
fn memory_keeps_the_written_bytes_across_any_operations() {
    // Tensors beside each other and with a gap, the last one with experts.
    let tensors = [
        tensor(WEIGHTS, Type::Mxfp4, [64, 48, 1, 1], 0),
        tensor(WEIGHTS, Type::Mxfp4, [128, 16, 1, 1], 1632),
        tensor(WEIGHTS, Type::Mxfp4, [64, 16, 3, 1], 4096),
    ];
    let len = 4096 + size(&tensors[2]) + 77;
    let mut rng = Rng::new(1, 0);
    let mut random = |n: u64| rng.below(n);
    let mut counts = [0; 2];
    for round in 0..60 {
        let mut bytes = content(len, round);
        let (engine, device) = engine(true);
        let loaded = Loaded::new(&engine, &bytes);
        device.take_log();
        let graphs: Vec<Graph> = { tensors.iter() }
            .map(|&weights| match weights.shape.ne[2] {
                1 => product(weights, 1),
                _ => experts(weights),
            })
            .collect();
        let mut plans: Vec<Box<dyn Plan>> = { graphs.iter() }
            .map(|graph| loaded.compile(&engine, graph))
            .collect();
        assert_eq!(repacked(&device), 5);
        for _ in 0..12 {
            let at = random(len);
            let many = [1, 40, 2000, len][random(4) as usize].min(len - at);
            let data = content(many, random(1000) as u32);
            let range = at as usize..(at + many) as usize;
            match random(7) {
                0 => {
                    loaded.weights().fill(at, many, 0x7c).unwrap();
                    bytes[range].fill(0x7c);
                }
                1 => {
                    let to = random(len - many + 1);
                    loaded
                        .weights()
                        .copy_from(to, loaded.weights(), at, many)
                        .unwrap();
                    bytes.copy_within(range, to as usize);
                }
                2 => {
                    loaded.weights().write(at, data.as_slice().into()).unwrap();
                    bytes[range].copy_from_slice(&data);
                }
                3 => {
                    // Overwrites a whole tensor.
                    let it = &tensors[random(3) as usize];
                    let data = content(size(it), random(1000) as u32);
                    let range = it.offset as usize..(it.offset + size(it)) as usize;
                    { loaded.weights() }
                        .write(it.offset, data.as_slice().into())
                        .unwrap();
                    bytes[range].copy_from_slice(&data);
                }
                _ => assert!(loaded.read(at, many) == bytes[range], "round {round}"),
            }
            let which = random(3) as usize;
            if !plans[which].is_current() {
                assert_eq!(plans[which].run(), Err(RunError::Stale));
                plans[which] = loaded.compile(&engine, &graphs[which]);
                counts[0] += 1;
                counts[1] += repacked(&device);
            }
        }
        assert!(loaded.read(0, len) == bytes, "round {round}");
        let which = random(3) as usize;
        if !plans[which].is_current() {
            plans[which] = loaded.compile(&engine, &graphs[which]);
        }
        plans[which].run().unwrap();
        assert_close(
            &loaded.result(&graphs[which]),
            &plain_result(&bytes, &graphs[which]),
            "the last product",
        );
    }
    assert!(counts.iter().all(|&count| count > 10), "{counts:?}");
}

#[test]
fn copies_transfer_the_original_bytes() {
    let weights = tensor(WEIGHTS, Type::Mxfp4, [64, 32, 1, 1], 0);
    let (bytes, other) = (content(size(&weights), 5), content(size(&weights), 6));
    let (engine, _device) = engine(true);
    let (one, two) = (Loaded::new(&engine, &bytes), Loaded::new(&engine, &other));
    let plans = [&one, &two].map(|it| it.compile(&engine, &product(weights, 1)));
    two.weights().copy_from(10, one.weights(), 20, 500).unwrap();
    assert!(plans.iter().all(|plan| !plan.is_current()));
    let mut want = other.clone();
    want[10..510].copy_from_slice(&bytes[20..520]);
    assert!(two.read(0, size(&weights)) == want);
    assert!(one.read(0, size(&weights)) == bytes);
}

#[test]
fn weights_with_other_uses_are_not_repacked() {
    let weights = tensor(WEIGHTS, Type::Mxfp4, [64, 40, 1, 1], 256);
    let bytes = content(256 + size(&weights), 7);
    let (engine, device) = engine(true);

    // The first and the last layer have the same matrix.
    let loaded = Loaded::new(&engine, &bytes);
    let rows = rows_of(weights);
    let x = tensor(OTHERS, Type::F32, [64, 2, 1, 1], OTHER_BYTES / 2);
    let dst = tensor(OTHERS, Type::F32, [40, 2, 1, 1], OTHER_BYTES / 4 * 3);
    let both = graph(
        &[rows.tensors[0], rows.tensors[1], x, dst],
        &[(Op::GetRows {}, 2, &[0, 1]), (MUL_MAT, 3, &[0, 2])],
    );
    device.take_log();
    loaded.compile(&engine, &both).run().unwrap();
    assert_eq!(repacked(&device), 0);
    assert_close(
        &loaded.result(&both),
        &plain_result(&bytes, &both),
        "a tied matrix",
    );

    // A part of the matrix, or the same bytes with other lengths.
    for other in [
        tensor(WEIGHTS, Type::Mxfp4, [64, 20, 1, 1], 256),
        tensor(WEIGHTS, Type::Mxfp4, [64, 20, 1, 1], 256 + 20 * 34),
        tensor(WEIGHTS, Type::Mxfp4, [64, 20, 2, 1], 256),
    ] {
        let loaded = Loaded::new(&engine, &bytes);
        let x = tensor(OTHERS, Type::F32, [64, 1, other.shape.ne[2], 1], 0);
        let ne = [20, 1, other.shape.ne[2], 1];
        let other_dst = tensor(OTHERS, Type::F32, ne, OTHER_BYTES / 4);
        let plain = product(weights, 1);
        let mut tensors = vec![other, x, other_dst];
        tensors.extend(&plain.tensors);
        let both = graph(&tensors, &[(MUL_MAT, 2, &[0, 1]), (MUL_MAT, 5, &[3, 4])]);
        device.take_log();
        let mut plan = loaded.compile(&engine, &both);
        assert_eq!(repacked(&device), 0, "{other:?}");
        plan.run().unwrap();
        assert_close(&loaded.result(&both), &plain_result(&bytes, &both), "parts");
    }

    // Another plan reads rows of it.
    let loaded = Loaded::new(&engine, &bytes);
    let graph = product(weights, 1);
    device.take_log();
    let mut first = loaded.compile(&engine, &graph);
    assert_eq!(repacked(&device), 1);
    first.run().unwrap();
    let want = loaded.result(&graph);
    let mut second = loaded.compile(&engine, &rows);
    assert!(!first.is_current());
    assert_eq!(first.run(), Err(RunError::Stale));
    assert_eq!(first.profile(), Err(RunError::Stale));
    second.run().unwrap();
    assert_eq!(loaded.result(&rows), plain_result(&bytes, &rows));
    // The tensor stays plain from now on.
    let mut first = loaded.compile(&engine, &graph);
    assert_eq!(repacked(&device), 0);
    assert!(second.is_current());
    first.run().unwrap();
    assert_close(&loaded.result(&graph), &want, "the product once more");
    assert!(loaded.read(0, bytes.len() as u64) == bytes);
}

#[test]
fn weights_without_a_repacked_kernel_are_not_repacked() {
    // The kernel for quantised activations reads weights element by element.
    let weights = tensor(WEIGHTS, Type::Mxfp4, [64, 40, 1, 1], 0);
    let bytes = content(size(&weights), 8);
    let (engine, device) = engine(true);
    let loaded = Loaded::new(&engine, &bytes);
    let x = tensor(OTHERS, Type::Q8_0, [64, 2, 1, 1], 0);
    let dst = tensor(OTHERS, Type::F32, [40, 2, 1, 1], OTHER_BYTES / 2);
    let odd = graph(&[weights, x, dst], &[(MUL_MAT, 2, &[0, 1])]);
    let even = product(weights, 2);
    let first = loaded.compile(&engine, &even);
    assert_eq!(repacked(&device), 1);
    loaded.compile(&engine, &odd).run().unwrap();
    assert!(!first.is_current());
    assert_eq!(loaded.result(&odd), plain_result(&bytes, &odd));
    loaded.compile(&engine, &even).run().unwrap();
    assert_eq!(repacked(&device), 0);
    assert_close(
        &loaded.result(&even),
        &plain_result(&bytes, &even),
        "the other",
    );
}

#[test]
fn other_memory_and_a_full_device_are_not_repacked() {
    let weights = tensor(WEIGHTS, Type::Mxfp4, [64, 40, 1, 1], 0);
    let bytes = content(size(&weights), 9);
    let graph = product(weights, 1);
    let (engine, device) = engine(true);
    let others = Loaded {
        buffers: vec![
            engine.alloc(size(&weights)).unwrap(),
            engine.alloc(OTHER_BYTES).unwrap(),
        ],
    };
    device.take_log();
    let other = others.compile(&engine, &graph);
    assert_eq!(repacked(&device), 0);
    // Now the buffer is for weights.
    others.weights().mark_weights();
    assert!(!other.is_current());
    others.compile(&engine, &graph);
    assert_eq!(repacked(&device), 1);

    // Scratch memory exists, for another plan; there is no memory for more.
    let loaded = Loaded::new(&engine, &bytes);
    device.fail(Fails::Memory);
    let mut plan = loaded.compile(&engine, &graph);
    assert_eq!(repacked(&device), 0);
    plan.run().unwrap();
    let want = plain_result(&bytes, &graph);
    assert_close(&loaded.result(&graph), &want, "without room");
    device.fail(None);
    let mut later = loaded.compile(&engine, &graph);
    assert_eq!(repacked(&device), 1);
    assert!(!plan.is_current());
    later.run().unwrap();
    assert_close(&loaded.result(&graph), &want, "with room");
    // Restoring needs no device memory.
    device.fail(Fails::Memory);
    assert!(loaded.read(0, size(&weights)) == bytes);
    loaded.weights().fill(3, 5, 0x7b).unwrap();
    let mut bytes = bytes;
    bytes[3..8].fill(0x7b);
    assert!(loaded.read(0, size(&weights)) == bytes);
}

#[test]
fn new_upload_is_repacked_again() {
    let weights = tensor(WEIGHTS, Type::Mxfp4, [64, 40, 1, 1], 0);
    let (engine, device) = engine(true);
    let loaded = Loaded::new(&engine, &content(size(&weights), 10));
    let graph = product(weights, 1);
    device.take_log();
    for seed in 11..14 {
        let bytes = content(size(&weights), seed);
        loaded.weights().write(0, bytes.as_slice().into()).unwrap();
        let mut plan = loaded.compile(&engine, &graph);
        assert_eq!(repacked(&device), 1);
        plan.run().unwrap();
        assert_close(
            &loaded.result(&graph),
            &plain_result(&bytes, &graph),
            "anew",
        );
        loaded.weights().fill(0, size(&weights), 0x79).unwrap();
        assert!(!plan.is_current());
    }
}
