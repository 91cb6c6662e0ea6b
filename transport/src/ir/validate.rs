//! Validation of a decoded graph in its session: the engine supports every operation, and every
//! tensor lies in its buffer.

use std::sync::Arc;

use super::caps::{Capabilities, Rule};
use super::check::Refusal;
use super::graph::{BufferId, Graph, Node, Tensor};
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
}

impl ValidGraph {
    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
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
        let buffer = tensor.buffer as usize;
        bounds(i, tensor, graph.buffers[buffer], sizes[buffer], limits)?;
    }
    for (i, node) in graph.nodes.iter().enumerate() {
        operation(&graph, node, caps).map_err(|refusal| Invalid::Node {
            node: i,
            refusal,
            dst: Box::new(*graph.dst(node)),
            src: (0..node.src.as_slice().len())
                .map(|s| graph.src(node, s).copied())
                .collect(),
        })?;
    }
    Ok(ValidGraph {
        graph,
        rules: caps.shared_rules(),
    })
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
