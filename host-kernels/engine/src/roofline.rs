//! The roofline model of a graph: a lower bound of its memory traffic and arithmetic, and of its
//! time on a device of known peak rates (Williams, Waterman and Patterson, "Roofline", CACM 52(4),
//! 2009). No engine is faster. `vgpu bench plan` shows how close an engine comes.

use std::collections::BTreeMap;
use std::iter::Sum;
use std::ops::{Add, Range};

use vgpu_transport::ir::{Graph, Node, Op, Tensor};

use crate::byte_range::ByteRange;
use crate::work::{self, bytes, reads, written_part};

/// A lower bound of the work of one or several nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Bytes read from or written to the device's memory: weights, the KV cache, inputs, and
    /// results that no later node reads. Each byte counts once, however many nodes read it.
    pub memory: u64,
    /// Bytes of intermediate results, read and written. Caches and registers can hold them.
    pub cached: u64,
    /// Floating-point operations: two for each [product](crate::work::Work::products), one for each
    /// step of other operators, none for copies. Attention counts every key of the graph, since
    /// only the mask tensor knows which keys are hidden.
    pub operations: u64,
}

/// Peak rates of a device, per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Memory bandwidth in bytes.
    pub memory: f64,
    /// Floating-point operations of matrix products.
    pub operations: f64,
}

impl Cost {
    /// The lower bound of the time in seconds: memory traffic and arithmetic overlap fully.
    pub fn floor(&self, rates: &Rates) -> f64 {
        let memory = self.memory as f64 / rates.memory;
        memory.max(self.operations as f64 / rates.operations)
    }

    /// Whether memory bandwidth, not arithmetic, limits the time.
    pub fn is_bound_by_memory(&self, rates: &Rates) -> bool {
        self.memory as f64 / rates.memory >= self.operations as f64 / rates.operations
    }
}

impl Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost {
            memory: self.memory + other.memory,
            cached: self.cached + other.cached,
            operations: self.operations + other.operations,
        }
    }
}

impl Sum for Cost {
    fn sum<I: Iterator<Item = Cost>>(costs: I) -> Cost {
        costs.fold(Cost::default(), Cost::add)
    }
}

/// The cost of each node of a validated graph.
pub fn of(graph: &Graph) -> Vec<Cost> {
    let mut accessed = Accessed::default();
    let mut costs = Vec::with_capacity(graph.nodes.len());
    for (at, node) in graph.nodes.iter().enumerate() {
        let dst = graph.dst(node);
        if dst.shape.is_empty() {
            costs.push(Cost::default());
            continue;
        }
        let mut cost = Cost {
            operations: operations(graph, node),
            ..Cost::default()
        };
        for (i, tensor) in { node.src.as_slice().iter().enumerate() }
            .filter_map(|(i, src)| Some((i, &graph.tensors[(*src)? as usize])))
        {
            match reads(graph, node, i, tensor) {
                Some(part) => cost.memory += part,
                None if accessed.has(tensor) => cost.cached += bytes(&tensor.shape),
                None => {
                    cost.memory += bytes(&tensor.shape);
                    accessed.take(tensor);
                }
            }
        }
        match written_part(graph, node) {
            Some(bytes) => cost.memory += bytes,
            None => {
                accessed.take(dst);
                match is_read_later(graph, at) {
                    true => cost.cached += bytes(&dst.shape),
                    false => cost.memory += bytes(&dst.shape),
                }
            }
        }
        costs.push(cost);
    }
    costs
}

/// The name of a node in tables: its operator, and for products, attention and GET_ROWS the type of
/// the weights or keys.
pub fn label(graph: &Graph, node: &Node) -> String {
    let name = node.op.kind().ggml_name();
    let weights = match node.op {
        Op::MulMat { .. } | Op::MulMatId { .. } | Op::OutProd {} | Op::GetRows {} => 0,
        Op::FlashAttnExt { .. } => 1,
        _ => return name.to_owned(),
    };
    match graph.src(node, weights) {
        Some(tensor) => format!("{name} {}", tensor.shape.ty.ggml_name()),
        None => name.to_owned(),
    }
}

/// Whether a later node reads part of the result of node `at` before it is overwritten.
fn is_read_later(graph: &Graph, at: usize) -> bool {
    let dst = graph.dst(&graph.nodes[at]);
    let Some(own) = range_of(dst) else {
        return false;
    };
    for node in &graph.nodes[at + 1..] {
        let mut sources = node.src.as_slice().iter().flatten();
        if sources.any(|&src| {
            range_of(&graph.tensors[src as usize]).is_some_and(|range| range.overlaps(&own))
        }) {
            return true;
        }
        let is_whole = written_part(graph, node).is_none();
        if is_whole && range_of(graph.dst(node)).is_some_and(|range| range.contains(&own)) {
            return false;
        }
    }
    false
}

fn operations(graph: &Graph, node: &Node) -> u64 {
    let loops = work::loops(graph, node);
    match loops.kind {
        work::LoopKind::Product => loops.count.saturating_mul(2),
        work::LoopKind::Arithmetic => loops.count,
        work::LoopKind::Move => 0,
    }
}

/// The bytes of a tensor; `None` if it is empty.
fn range_of(tensor: &Tensor) -> Option<ByteRange> {
    Some(ByteRange::of(tensor)).filter(|range| !range.bytes.is_empty())
}

/// Bytes that earlier nodes have read or written: the end of each range, by buffer and start.
#[derive(Default)]
struct Accessed(BTreeMap<(u32, u64), u64>);

impl Accessed {
    fn has(&self, tensor: &Tensor) -> bool {
        let Some(ByteRange { buffer, bytes }) = range_of(tensor) else {
            return true;
        };
        let mut before = self.0.range((buffer, 0)..=(buffer, bytes.start));
        before.next_back().is_some_and(|(_, &end)| end >= bytes.end)
    }

    fn take(&mut self, tensor: &Tensor) {
        let Some(ByteRange {
            buffer,
            bytes: range,
        }) = range_of(tensor)
        else {
            return;
        };
        // A tensor with gaps does not access the bytes in its gaps.
        if bytes(&tensor.shape) < range.end - range.start {
            return;
        }
        let Range { mut start, mut end } = range;
        loop {
            let mut touching = self.0.range((buffer, 0)..=(buffer, end));
            let Some((&key, &other_end)) = touching.next_back().filter(|(_, end)| **end >= start)
            else {
                break;
            };
            self.0.remove(&key);
            start = start.min(key.1);
            end = end.max(other_end);
        }
        self.0.insert((buffer, start), end);
    }
}
