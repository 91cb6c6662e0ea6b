//! Small graphs over two buffers, and their memory.
#![allow(dead_code)] // each test binary uses a part of this module

use std::sync::Arc;

use vgpu_engine::{Engine, Memory};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Precision, Shape, Sources, Tensor, Type, ValidGraph,
    validate,
};

/// The bytes of each buffer.
pub(crate) const SIZE: u64 = 64 << 10;

/// The type, dimensions, buffer and first byte of a tensor.
pub(crate) type Place = (Type, [u64; 4], u32, u64);

/// The product of two tensors.
pub(crate) const PRODUCT: Op = Op::MulMat {
    accumulator: Precision::Default,
    activation: Precision::Default,
    hadamard: false,
};

/// A graph over two buffers of [`SIZE`] bytes. Node: an operator, its result and its sources.
pub(crate) fn graph(
    engine: &dyn Engine,
    tensors: &[Place],
    nodes: &[(Op, u32, &[u32])],
) -> ValidGraph {
    graph_over(engine, SIZE, tensors, nodes)
}

/// The same over two buffers of `size` bytes.
pub(crate) fn graph_over(
    engine: &dyn Engine,
    size: u64,
    tensors: &[Place],
    nodes: &[(Op, u32, &[u32])],
) -> ValidGraph {
    let tensor = |&(ty, ne, buffer, offset): &Place| Tensor {
        shape: Shape::contiguous(ty, ne).unwrap(),
        buffer,
        offset,
    };
    let graph = Graph {
        buffers: vec![BufferId(1), BufferId(2)],
        tensors: tensors.iter().map(tensor).collect(),
        nodes: { nodes.iter() }
            .map(|&(op, dst, src)| Node {
                op,
                dst,
                src: Sources::new(src.iter().map(|&it| Some(it))),
            })
            .collect(),
    };
    validate(graph, engine.capabilities(), &Limits::default(), |_| {
        Some(size)
    })
    .unwrap()
}

/// Memory of both buffers.
pub(crate) fn memory(engine: &dyn Engine) -> [Arc<dyn Memory>; 2] {
    [0, 1].map(|_| engine.alloc(SIZE).unwrap())
}

/// Numbers in a memory.
pub(crate) fn floats(memory: &dyn Memory, offset: u64, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; 4 * count];
    memory.read(offset, BytesMut::from(&mut bytes[..])).unwrap();
    let each = bytes.chunks_exact(4);
    each.map(|four| f32::from_le_bytes(four.try_into().unwrap()))
        .collect()
}

/// Writes numbers.
pub(crate) fn put(memory: &dyn Memory, offset: u64, values: &[f32]) {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    memory.write(offset, Bytes::from(&*bytes)).unwrap();
}
