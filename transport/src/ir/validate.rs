//! Validation of a decoded graph in its session: the engine supports every operation, and every
//! tensor lies in its buffer.

use std::sync::Arc;

use super::caps::{Capabilities, Rule};
use super::check::Refusal;
use super::graph::{BufferId, ENTRIES_PER_QUESTION, Graph, Node, Tensor};
use super::ops::MAX_SOURCES;

/// The limits of one graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The maximum number of nodes.
    pub nodes: usize,
    /// The maximum ratio of the bytes that a tensor visits to the size of its buffer. With strides
    /// smaller than a row, a few bytes of memory could cause any amount of work. ggml itself needs
    /// a small ratio only.
    pub revisits: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            nodes: 1 << 20,
            revisits: 64,
        }
    }
}

/// Why a graph is invalid. The guest is at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum Invalid {
    #[error("the graph has {nodes} nodes, the limit is {limit}")]
    TooManyNodes { nodes: usize, limit: usize },
    #[error("the graph uses buffer {0:?}, which the session does not have")]
    UnknownBuffer(BufferId),
    #[error("the graph names buffer {0:?} twice")]
    RepeatedBuffer(BufferId),
    #[error("tensor {tensor} ends at byte {end} of buffer {buffer:?}, which has {size} bytes")]
    OutOfBounds {
        tensor: usize,
        buffer: BufferId,
        end: u64,
        size: u64,
    },
    #[error("tensor {tensor} has a size that does not fit 64 bits")]
    Overflow { tensor: usize },
    #[error(
        "tensor {tensor} is misaligned: offset {offset} is not a multiple of its {element}-byte \
         elements"
    )]
    Misaligned {
        tensor: usize,
        offset: u64,
        element: u64,
    },
    #[error("tensor {tensor} visits {visits} bytes of a buffer of {size} bytes")]
    Amplified {
        tensor: usize,
        visits: u64,
        size: u64,
    },
    #[error("node {node}: {refusal}; dst {dst:?}, sources {src:?}")]
    Node {
        node: usize,
        refusal: Refusal,
        dst: Box<Tensor>,
        src: Vec<Option<Tensor>>,
    },
}

/// A validated graph. Engines accept no other graphs.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidGraph {
    graph: Graph,
    /// The rules that cover the nodes.
    rules: Arc<[Rule]>,
    pads_rows: bool,
}

impl ValidGraph {
    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The same graph of a guest that leaves zero bytes behind quantised weights
    /// ([`ProtocolVersion::pads_rows`](crate::wire::ProtocolVersion::pads_rows)), or does not.
    pub fn with_padded_rows(self, pads_rows: bool) -> ValidGraph {
        ValidGraph { pads_rows, ..self }
    }

    /// Whether the guest leaves zero bytes behind quantised weights, as many as
    /// [`Type::row_padding`](super::Type::row_padding) says. Not checked: the bytes belong to the
    /// guest's buffer or to the engine's allocation, and a guest that breaks its word gets wrong
    /// results of its own.
    pub fn pads_rows(&self) -> bool {
        self.pads_rows
    }

    /// Whether the graph was validated with these capabilities.
    pub fn is_validated_with(&self, caps: &Capabilities) -> bool {
        let rules = caps.shared_rules();
        Arc::ptr_eq(&self.rules, &rules) || self.rules == rules
    }
}

/// Checks all properties of a graph on which kernels rely. `size_of` returns the size of a buffer
/// in bytes, or `None` when the session has no such buffer.
///
/// # Errors
///
/// An [`Invalid`] that names the node or tensor.
pub fn validate(
    graph: Graph,
    caps: &Capabilities,
    limits: &Limits,
    size_of: impl Fn(BufferId) -> Option<u64>,
) -> Result<ValidGraph, Invalid> {
    // Nobody cancels, so all has been checked.
    check(&graph, caps, limits, size_of, &|| false)?;
    let rules = caps.shared_rules();
    Ok(ValidGraph {
        graph,
        rules,
        pads_rows: false,
    })
}

/// As [`validate`]. Asks `is_cancelled` once in [`ENTRIES_PER_QUESTION`] tensors and nodes. `None`
/// once the answer was `true`.
///
/// # Errors
///
/// An [`Invalid`] that names the node or tensor.
pub fn validate_until(
    graph: Graph,
    caps: &Capabilities,
    limits: &Limits,
    size_of: impl Fn(BufferId) -> Option<u64>,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<Option<ValidGraph>, Invalid> {
    let is_valid = check(&graph, caps, limits, size_of, is_cancelled)?;
    let rules = caps.shared_rules();
    Ok(is_valid.then_some(ValidGraph {
        graph,
        rules,
        pads_rows: false,
    }))
}

/// Whether all of a graph was checked before `is_cancelled`.
fn check(
    graph: &Graph,
    caps: &Capabilities,
    limits: &Limits,
    size_of: impl Fn(BufferId) -> Option<u64>,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<bool, Invalid> {
    let is_over = |entry: usize| entry.is_multiple_of(ENTRIES_PER_QUESTION) && is_cancelled();
    if graph.nodes.len() > limits.nodes {
        return Err(Invalid::TooManyNodes {
            nodes: graph.nodes.len(),
            limit: limits.nodes,
        });
    }
    let sizes = graph
        .buffers
        .iter()
        .map(|&id| size_of(id).ok_or(Invalid::UnknownBuffer(id)))
        .collect::<Result<Vec<u64>, Invalid>>()?;
    // Engines tell from the index of a buffer in the table whether two tensors can overlap.
    let mut names = graph.buffers.clone();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Invalid::RepeatedBuffer(pair[0]));
    }
    for (i, tensor) in graph.tensors.iter().enumerate() {
        if is_over(i) {
            return Ok(false);
        }
        let buffer = tensor.buffer as usize;
        bounds(i, tensor, graph.buffers[buffer], sizes[buffer], limits)?;
    }
    for (i, node) in graph.nodes.iter().enumerate() {
        if is_over(i) {
            return Ok(false);
        }
        operation(graph, node, caps).map_err(|refusal| Invalid::Node {
            node: i,
            refusal,
            dst: Box::new(*graph.dst(node)),
            src: (0..node.src.as_slice().len())
                .map(|s| graph.src(node, s).copied())
                .collect(),
        })?;
    }
    Ok(true)
}

/// Checks one node against the capabilities.
fn operation(graph: &Graph, node: &Node, caps: &Capabilities) -> Result<(), Refusal> {
    let mut src = [None; MAX_SOURCES];
    let count = node.src.as_slice().len();
    for (i, shape) in src.iter_mut().take(count).enumerate() {
        *shape = graph.src(node, i).map(|t| &t.shape);
    }
    caps.accept(&node.op, &graph.dst(node).shape, &src[..count])
}

/// Checks that a tensor lies in its buffer, is aligned and within the limits.
fn bounds(
    i: usize,
    tensor: &Tensor,
    id: BufferId,
    size: u64,
    limits: &Limits,
) -> Result<(), Invalid> {
    let overflow = Invalid::Overflow { tensor: i };
    let shape = &tensor.shape;
    let byte_len = shape.byte_len().ok_or(overflow.clone())?;
    let end = tensor
        .offset
        .checked_add(byte_len)
        .ok_or(overflow.clone())?;
    if end > size {
        return Err(Invalid::OutOfBounds {
            tensor: i,
            buffer: id,
            end,
            size,
        });
    }
    let element = if shape.ty.is_quantized() {
        1
    } else {
        shape.ty.block_bytes()
    };
    if !tensor.offset.is_multiple_of(element) {
        return Err(Invalid::Misaligned {
            tensor: i,
            offset: tensor.offset,
            element,
        });
    }
    let blocks = shape.elements().ok_or(overflow.clone())? / shape.ty.block_elements();
    let visits = blocks.checked_mul(shape.ty.block_bytes()).ok_or(overflow)?;
    if visits > size.saturating_mul(limits.revisits) {
        return Err(Invalid::Amplified {
            tensor: i,
            visits,
            size,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::ir::{Op, OpKind, Shape, Sources, Type, TypeSet};

    const NODES: usize = 10 * ENTRIES_PER_QUESTION;

    /// A graph of so many sums, each of tensors of its own.
    fn sums(nodes: usize) -> (Graph, Capabilities) {
        let shape = Shape::contiguous(Type::F32, [1; 4]).unwrap();
        let tensor = |_| Tensor {
            shape,
            buffer: 0,
            offset: 0,
        };
        let node = |i: usize| Node {
            op: Op::Add {},
            dst: i as u32,
            src: Sources::new([Some(i as u32); 2]),
        };
        let graph = Graph {
            buffers: vec![BufferId(1)],
            tensors: (0..nodes).map(tensor).collect(),
            nodes: (0..nodes).map(node).collect(),
        };
        let types = TypeSet::of(&[Type::F32]);
        let caps = Capabilities::new(vec![Rule::uniform(OpKind::Add, types, 2)]);
        (graph, caps)
    }

    #[test]
    fn decoding_and_validation_end_at_the_next_question() {
        let (graph, caps) = sums(NODES);
        let words = graph.encode();
        let asked = Cell::new(0);
        let each = 2 * NODES / ENTRIES_PER_QUESTION;
        for last in [0, 1, each - 1, each, usize::MAX] {
            asked.set(0);
            let is_cancelled = || asked.replace(asked.get() + 1) >= last;
            let decoded = Graph::decode_until(&words, &is_cancelled).unwrap();
            assert_eq!(decoded, (last >= each).then(|| graph.clone()), "{last}");
            assert_eq!(asked.get(), each.min(last.saturating_add(1)), "{last}");
            asked.set(0);
            let limits = Limits::default();
            let size_of = |_| Some(4);
            let valid = validate_until(graph.clone(), &caps, &limits, size_of, &is_cancelled);
            assert_eq!(valid.unwrap().is_some(), last >= each, "{last}");
            assert_eq!(asked.get(), each.min(last.saturating_add(1)), "{last}");
        }
    }
}
