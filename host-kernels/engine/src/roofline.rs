//! What a graph must do at least: bytes that come from memory, bytes that go through caches, operations; and how long
//! that takes on a device of known rates. No engine is faster, whatever its plan; how near one comes is what
//! `vgpu bench plan` shows.

use std::collections::BTreeMap;
use std::iter::Sum;
use std::ops::Add;

use vgpu_transport::ir::{Graph, Node, Op, Shape, Tensor};

/// What a node, or several, must do at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Bytes that come from the device's memory or stay there: weights, cached keys and values, inputs, results that
    /// no later node reads. Each is read once, however many nodes want it.
    pub memory: u64,
    /// Bytes that one node leaves for another, read and written. Caches and registers can hold them.
    pub cached: u64,
    /// Floating-point operations: two for each product that is added to a sum, one for each element of what is
    /// no product and no copy. Attention counts every key that the graph shows it, since only the mask says which are hidden.
    pub operations: u64,
}

/// What a device does in a second at most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Bytes from memory.
    pub memory: f64,
    /// Floating-point operations of products.
    pub operations: f64,
}

impl Cost {
    /// The seconds that this takes at least, bytes and operations at the same time.
    pub fn floor(&self, rates: &Rates) -> f64 {
        let memory = self.memory as f64 / rates.memory;
        memory.max(self.operations as f64 / rates.operations)
    }

    /// Whether the memory, not the arithmetic, is what the floor comes from.
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
    let mut held = Held::default();
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
                Reads::Nothing => {}
                Reads::Part(bytes) => cost.memory += bytes,
                Reads::All if held.has(tensor) => cost.cached += bytes(&tensor.shape),
                Reads::All => {
                    cost.memory += bytes(&tensor.shape);
                    held.take(tensor);
                }
            }
        }
        match written_part(graph, node) {
            Some(bytes) => cost.memory += bytes,
            None => {
                held.take(dst);
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

/// What a node is called in tables: its operator, and for products and attention the type that costs.
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

/// Bytes of a tensor's elements.
fn bytes(shape: &Shape) -> u64 {
    shape.rows().saturating_mul(shape.row_bytes())
}

enum Reads {
    Nothing,
    /// So many bytes: which ones is in another tensor.
    Part(u64),
    All,
}

/// What a node reads of its source `i`.
fn reads(graph: &Graph, node: &Node, i: usize, tensor: &Tensor) -> Reads {
    let shape = &tensor.shape;
    match (&node.op, i) {
        // At most one expert for each slot of each token, none twice.
        (Op::MulMatId { .. }, 0) => {
            let slots = graph
                .src(node, 2)
                .map_or(0, |ids| ids.shape.ne[0] * ids.shape.ne[1]);
            let experts = shape.ne[2].max(1);
            Reads::Part(bytes(shape) / experts * slots.min(experts))
        }
        (Op::GetRows {}, 0) => {
            Reads::Part(bytes(shape).min(graph.dst(node).shape.rows() * shape.row_bytes()))
        }
        // The destination, which SET_ROWS names once more.
        (Op::SetRows {}, 2) => Reads::Nothing,
        _ => Reads::All,
    }
}

/// Bytes of the destination that a node writes, if it leaves the rest as it is.
fn written_part(graph: &Graph, node: &Node) -> Option<u64> {
    match node.op {
        Op::SetRows {} => {
            let rows = graph.src(node, 0)?.shape.rows();
            Some(rows * graph.dst(node).shape.row_bytes())
        }
        _ => None,
    }
}

/// Whether a node behind `at` reads anything of its result before it is written over.
fn is_read_later(graph: &Graph, at: usize) -> bool {
    let dst = graph.dst(&graph.nodes[at]);
    let Some(own) = Place::of(dst) else {
        return false;
    };
    for node in &graph.nodes[at + 1..] {
        let mut sources = node.src.as_slice().iter().flatten();
        if sources.any(|&src| {
            Place::of(&graph.tensors[src as usize]).is_some_and(|place| place.meets(&own))
        }) {
            return true;
        }
        let is_whole = written_part(graph, node).is_none();
        if is_whole && Place::of(graph.dst(node)).is_some_and(|place| place.covers(&own)) {
            return false;
        }
    }
    false
}

fn operations(graph: &Graph, node: &Node) -> u64 {
    let elements = |tensor: &Tensor| tensor.shape.elements().unwrap_or(u64::MAX);
    let dst = graph.dst(node);
    let extent = |i: usize, d: usize| graph.src(node, i).map_or(0, |tensor| tensor.shape.ne[d]);
    match node.op {
        // Each result is a sum over rows of the first source; of OUT_PROD over its columns.
        Op::MulMat { .. } | Op::MulMatId { .. } => 2 * elements(dst) * extent(0, 0),
        Op::OutProd {} => 2 * elements(dst) * extent(0, 1),
        // Each query with each key, and each weight with each value.
        Op::FlashAttnExt { .. } => {
            let queries = extent(0, 1) * extent(0, 2) * extent(0, 3);
            2 * queries * extent(1, 1) * (extent(1, 0) + extent(2, 0))
        }
        Op::SetRows {} | Op::GetRows {} | Op::Copy {} => 0,
        _ => elements(dst),
    }
}

/// Bytes of a buffer, from the first that a tensor touches to its last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    buffer: u32,
    start: u64,
    end: u64,
}

impl Place {
    fn of(tensor: &Tensor) -> Option<Place> {
        let len = tensor.shape.extent().filter(|&len| len > 0)?;
        Some(Place {
            buffer: tensor.buffer,
            start: tensor.offset,
            end: tensor.offset.checked_add(len)?,
        })
    }

    fn meets(&self, other: &Place) -> bool {
        self.buffer == other.buffer && self.start < other.end && other.start < self.end
    }

    fn covers(&self, other: &Place) -> bool {
        self.buffer == other.buffer && self.start <= other.start && other.end <= self.end
    }
}

/// Bytes that nodes so far have read or written: the end of each run by buffer and start.
#[derive(Default)]
struct Held(BTreeMap<(u32, u64), u64>);

impl Held {
    fn has(&self, tensor: &Tensor) -> bool {
        let Some(place) = Place::of(tensor) else {
            return true;
        };
        let mut before = self
            .0
            .range((place.buffer, 0)..=(place.buffer, place.start));
        before.next_back().is_some_and(|(_, &end)| end >= place.end)
    }

    fn take(&mut self, tensor: &Tensor) {
        let Some(mut place) = Place::of(tensor) else {
            return;
        };
        // Of one with gaps nothing is known of what lies in them.
        if bytes(&tensor.shape) < place.end - place.start {
            return;
        }
        loop {
            let mut touching = self.0.range((place.buffer, 0)..=(place.buffer, place.end));
            let Some((&key, &end)) = touching.next_back().filter(|(_, end)| **end >= place.start)
            else {
                break;
            };
            self.0.remove(&key);
            place.start = place.start.min(key.1);
            place.end = place.end.max(end);
        }
        self.0.insert((place.buffer, place.start), place.end);
    }
}
