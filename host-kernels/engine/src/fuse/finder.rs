//! Groups of nodes, and the questions about a graph that finding groups consists of.

use vgpu_transport::ir::{Graph, Node, Op, Tensor, Type};

use super::budget::Budget;
use super::liveness;
use crate::byte_range::ByteRange;

/// The number of nodes ahead that are searched.
const WINDOW: usize = 16;

/// Nodes that one kernel computes, in order.
pub(super) struct Group {
    pub(super) kind: FusionKind,
    pub(super) nodes: Vec<usize>,
    /// The node at whose place the kernel runs: the first or the last.
    pub(super) place: usize,
}

/// What a group of fused nodes computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FusionKind {
    /// ADD, RMS_NORM, MUL: the RMS norm of a sum, times a row. ADD and MUL are optional.
    Norm,
    /// MUL_MATs or MUL_MAT_IDs of the same activations, in order, each followed by an optional ADD
    /// or ADD_ID of a row (the bias).
    Products,
    /// Two such products and the GLU of both.
    Gated,
    /// ROPE and SET_ROWS.
    RopeRows,
    /// The routing of a mixture of experts. SOFT_MAX, ARGSORT or TOP_K, GET_ROWS, optionally
    /// SUM_ROWS, CLAMP and DIV, optionally SCALE; or ARGSORT or TOP_K, GET_ROWS, SOFT_MAX of the
    /// chosen logits.
    Route,
    /// MUL and ADDs: the weighted sum of the results of a token's experts.
    WeightedSum,
}

/// A graph during the search for groups.
pub(super) struct Finder<'g> {
    pub(super) graph: &'g Graph,
    /// For each node, whether it is in a group.
    pub(super) taken: &'g [bool],
    /// The nodes that the search may still look at.
    pub(super) budget: &'g Budget<'g>,
    /// The maximum number of columns of activations in a group of products.
    pub(super) max_columns: u64,
}

impl<'g> Finder<'g> {
    pub(super) fn graph(&self) -> &'g Graph {
        self.graph
    }

    pub(super) fn node(&self, at: usize) -> &'g Node {
        &self.graph().nodes[at]
    }

    pub(super) fn dst(&self, at: usize) -> &'g Tensor {
        self.graph().dst(self.node(at))
    }

    pub(super) fn src(&self, at: usize, i: usize) -> Option<&'g Tensor> {
        self.graph().src(self.node(at), i)
    }

    /// Whether a node has a non-empty result and is in no group.
    pub(super) fn is_free(&self, at: usize) -> bool {
        !self.dst(at).shape.is_empty() && !self.taken[at]
    }

    /// The next node after `at` with a non-empty result, if it is free and its operator is wanted.
    pub(super) fn next(&self, at: usize, is_wanted: impl Fn(&Op) -> bool) -> Option<usize> {
        let nodes = self.graph().nodes.len();
        let mut after = at + 1..nodes;
        let next = after.find(|&i| !self.budget.spend() || !self.dst(i).shape.is_empty())?;
        (self.is_free(next) && is_wanted(&self.node(next).op)).then_some(next)
    }

    /// The free nodes among the next [`WINDOW`] after `at`.
    pub(super) fn ahead(&self, at: usize) -> impl Iterator<Item = usize> + '_ {
        let end = self.graph().nodes.len().min(at + 1 + WINDOW);
        (at + 1..end).filter(|&i| self.is_free(i))
    }

    /// Whether only the nodes of `group` read the result of node `of`.
    pub(super) fn is_dead(&self, of: usize, group: &[usize]) -> bool {
        liveness::is_dead(self.graph(), of, group, None, self.budget)
    }

    /// Whether only the nodes of `group` read the result of node `of`, and other nodes at most the
    /// part `live` of it.
    pub(super) fn is_dead_but(&self, of: usize, group: &[usize], live: &Tensor) -> bool {
        liveness::is_dead(self.graph(), of, group, Some(live), self.budget)
    }

    /// Whether all nodes can run at the place of node `place`.
    pub(super) fn can_be_at(&self, nodes: &[usize], place: usize) -> bool {
        let (graph, budget) = (self.graph(), self.budget);
        nodes.iter().all(|&node| match node {
            node if node < place => liveness::can_move_down(graph, node, place, nodes, budget),
            node => liveness::can_move_up(graph, node, place, nodes, budget),
        })
    }
}

/// Whether both tensors are the same elements at the same address.
pub(super) fn is_same(a: &Tensor, b: &Tensor) -> bool {
    a.buffer == b.buffer
        && a.offset == b.offset
        && a.shape.with_plain_strides() == b.shape.with_plain_strides()
}

/// Whether `b` is `a` with another shape, both contiguous.
pub(super) fn is_reshaped(a: &Tensor, b: &Tensor) -> bool {
    let (x, y) = (&a.shape, &b.shape);
    let lies_alike = x.is_contiguous() && y.is_contiguous() && x.elements() == y.elements();
    a.buffer == b.buffer && a.offset == b.offset && x.ty == y.ty && lies_alike
}

/// Whether `write` does not overlap `read`, or is the same tensor.
pub(super) fn is_apart_or_in_place(write: &Tensor, read: &Tensor) -> bool {
    is_same(write, read) || is_apart(write, read)
}

/// Whether the tensors do not overlap.
pub(super) fn is_apart(a: &Tensor, b: &Tensor) -> bool {
    !ByteRange::of(a).overlaps(&ByteRange::of(b))
}

/// Whether the tensor is F32 with dense rows.
pub(super) fn is_f32(tensor: &Tensor) -> bool {
    tensor.shape.ty == Type::F32 && tensor.shape.has_dense_rows()
}
