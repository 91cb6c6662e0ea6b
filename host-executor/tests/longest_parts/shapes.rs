//! The shapes that are measured, and what they are made of.

use vgpu_transport::ir::{BufferId, Graph, Node, Op, OpKind, Shape, Sources, Tensor, Type};

use crate::samples::{sample, typed};

/// The buffer of the destination. The buffers of the sources come before it.
pub(crate) const DESTINATION: u32 = 9;

/// An operation of a length that is found by trying.
pub(crate) struct Shapes {
    pub(crate) name: String,
    pub(crate) make: Box<dyn Fn(u64) -> Option<Operation>>,
}

pub(crate) type Operation = (Op, Shape, Vec<Shape>);

pub(crate) fn graph((op, dst, src): &Operation) -> Graph {
    let sources = src.iter().zip(0..DESTINATION);
    let all = sources.chain([(dst, DESTINATION)]);
    Graph {
        buffers: (0..=u64::from(DESTINATION)).map(BufferId).collect(),
        tensors: all
            .map(|(&shape, buffer)| Tensor {
                shape,
                buffer,
                offset: 0,
            })
            .collect(),
        nodes: vec![Node {
            op: *op,
            dst: src.len() as u32,
            src: Sources::new((0..src.len() as u32).map(Some)),
        }],
    }
}

/// A shape whose rows have `stride` bytes between elements, and whose rows follow each other.
pub(crate) fn strided(ty: Type, ne: [u64; 4], stride: u64) -> Shape {
    let mut shape = typed(ty, ne);
    shape.nb[0] = stride;
    for d in 1..4 {
        shape.nb[d] = shape.nb[d - 1] * ne[d - 1];
    }
    shape
}

/// Matrices whose rows overlap: `nb[1]` is one block.
pub(crate) fn overlapping(ty: Type, ne: [u64; 4]) -> Shape {
    let mut shape = typed(ty, ne);
    shape.nb[1] = shape.nb[0];
    shape.nb[2] = shape.nb[0] * ne[1];
    shape.nb[3] = shape.nb[2];
    shape
}

pub(crate) fn shapes(
    name: impl Into<String>,
    make: impl Fn(u64) -> Option<Operation> + 'static,
) -> Shapes {
    Shapes {
        name: name.into(),
        make: Box::new(make),
    }
}

/// The remaining operators, with the shapes of the samples.
pub(crate) fn others() -> Vec<Shapes> {
    let kinds = OpKind::ALL.iter().filter(|&&k| k != OpKind::FlashAttnBack);
    kinds
        .map(|&kind| {
            shapes(format!("{} of a sample", kind.ggml_name()), move |n| {
                // Some samples have 16 times this size in all four dimensions.
                let size = Some(n.div_ceil(16)).filter(|&size| size <= 1 << 10)?;
                let sample = sample(kind, size);
                Some((sample.op, sample.dst, sample.src))
            })
        })
        .collect()
}
