//! Nodes that become one launch together, for every engine.
//!
//! [`Arrangement::of`] looks at the graph alone and says what belongs together: it finds patterns, and proves that results which
//! the launch leaves out are dead and that nodes can move to where the launch is ([`life`]). Whether there is a kernel for
//! a group's types and places is for the engine to say; if there is none, its nodes are compiled one by one.

mod experts;
mod life;
mod products;
mod rows;

use std::collections::BTreeMap;
use std::ops::Range;

use vgpu_transport::ir::{Graph, Node, Op, Tensor, Type};

pub use life::{Span, reads, writes};

/// How many nodes ahead of one are looked at.
const WINDOW: usize = 16;

/// A graph whose nodes are in an order of ours, with the same results, and what belongs together.
pub struct Arrangement {
    /// The graph with its nodes in the order of `origin`.
    pub graph: Graph,
    /// Where nodes were in the guest's graph.
    pub origin: Vec<usize>,
    /// By the first node of each group in the guest's graph: what it is, and how many nodes follow each other there.
    groups: BTreeMap<usize, (Kind, usize)>,
    /// By where they were in the guest's graph: whether nodes are in a group.
    taken: Vec<bool>,
}

/// Nodes that become one launch, in order.
struct Group {
    kind: Kind,
    nodes: Vec<usize>,
    /// The one whose place the launch has: the first or the last.
    place: usize,
}

/// What a group computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// ADD, RMS_NORM, MUL: a sum, normed, times a row. The first and the last can be absent.
    Norm,
    /// Products of the same activations, in order, each with the ADD or ADD_ID of a row behind it, if there is one.
    Products,
    /// Two such products and the unit that one of them gates.
    Gated,
    /// ROPE and SET_ROWS.
    RopeRows,
    /// SOFT_MAX, ARGSORT and GET_ROWS: a token's experts and their weights; possibly SUM_ROWS, CLAMP, DIV, SCALE. Or ARGSORT,
    /// GET_ROWS and SOFT_MAX of those chosen.
    Route,
    /// MUL and sums: the results of a token's experts, weighted.
    WeightedSum,
}

impl Arrangement {
    /// The graph as it is.
    pub fn plain(graph: &Graph) -> Arrangement {
        Arrangement {
            graph: graph.clone(),
            origin: (0..graph.nodes.len()).collect(),
            groups: BTreeMap::new(),
            taken: vec![false; graph.nodes.len()],
        }
    }

    /// The graph with groups, those of products with up to so many columns of activations.
    pub fn of(graph: &Graph, columns: u64) -> Arrangement {
        let mut all = Arrangement::plain(graph);
        let mut first = 0;
        while first < all.graph.nodes.len() {
            let finder = Finder { all: &all, columns };
            match finder.group(first) {
                Some(group) => first = all.take(&group),
                None => first += 1,
            }
        }
        all
    }

    /// Moves the nodes of a group to its place. Returns the first node that was not looked at.
    fn take(&mut self, group: &Group) -> usize {
        let Group { kind, nodes, place } = group;
        let (first, last) = (nodes[0], nodes[nodes.len() - 1]);
        let others = (first..=last).filter(|at| !nodes.contains(at));
        let order: Vec<usize> = match *place == first {
            true => nodes.iter().copied().chain(others).collect(),
            false => others.chain(nodes.iter().copied()).collect(),
        };
        for &at in nodes {
            self.taken[self.origin[at]] = true;
        }
        self.groups.insert(self.origin[first], (*kind, nodes.len()));
        // The nodes of groups that are there already stay together: all others keep their order.
        let moved: Vec<Node> = { order.iter() }
            .map(|&at| self.graph.nodes[at].clone())
            .collect();
        let origin: Vec<usize> = order.iter().map(|&at| self.origin[at]).collect();
        self.graph.nodes[first..=last].clone_from_slice(&moved);
        self.origin[first..=last].copy_from_slice(&origin);
        match *place == first {
            true => first + nodes.len(),
            // Others came to be before it.
            false => first,
        }
    }

    /// What begins with the node at `at`, and the nodes of it; `None` where the node is by itself.
    pub fn group_at(&self, at: usize) -> Option<(Kind, Range<usize>)> {
        let &(kind, len) = self.groups.get(&self.origin[at])?;
        Some((kind, at..at + len))
    }
}

/// A graph while groups are found in it.
struct Finder<'g> {
    all: &'g Arrangement,
    /// Most columns of activations in a group of products.
    columns: u64,
}

impl<'g> Finder<'g> {
    /// The group that begins with a node.
    fn group(&self, first: usize) -> Option<Group> {
        if !self.is_free(first) {
            return None;
        }
        match self.node(first).op {
            Op::Add {} | Op::RmsNorm { .. } => rows::norm(self, first),
            Op::MulMat { .. } | Op::MulMatId { .. } => {
                products::gated(self, first).or_else(|| products::products(self, first))
            }
            Op::Rope { .. } => rows::rope_rows(self, first),
            Op::SoftMax { .. } => experts::route(self, first),
            Op::TopK {} | Op::Argsort { .. } => experts::route_first(self, first),
            Op::Mul {} => experts::weighted_sum(self, first),
            _ => None,
        }
    }

    fn graph(&self) -> &'g Graph {
        &self.all.graph
    }

    fn node(&self, at: usize) -> &'g Node {
        &self.graph().nodes[at]
    }

    fn dst(&self, at: usize) -> &'g Tensor {
        self.graph().dst(self.node(at))
    }

    fn src(&self, at: usize, i: usize) -> Option<&'g Tensor> {
        self.graph().src(self.node(at), i)
    }

    /// Whether a node computes something and is in no group.
    fn is_free(&self, at: usize) -> bool {
        !self.dst(at).shape.is_empty() && !self.all.taken[self.all.origin[at]]
    }

    /// The next node behind `at` that computes something, if it is of the kind wanted.
    fn next(&self, at: usize, is_wanted: impl Fn(&Op) -> bool) -> Option<usize> {
        let nodes = self.graph().nodes.len();
        let next = { at + 1..nodes }.find(|&i| !self.dst(i).shape.is_empty())?;
        (self.is_free(next) && is_wanted(&self.node(next).op)).then_some(next)
    }

    /// Nodes behind `at`, not far away.
    fn ahead(&self, at: usize) -> impl Iterator<Item = usize> + '_ {
        let end = self.graph().nodes.len().min(at + 1 + WINDOW);
        (at + 1..end).filter(|&i| self.is_free(i))
    }

    /// Whether a result is of no use but for the nodes of `group`.
    fn is_dead(&self, of: usize, group: &[usize]) -> bool {
        life::is_dead(self.graph(), of, group, None)
    }

    /// Whether all nodes can run at the place of one of them.
    fn can_be_at(&self, nodes: &[usize], place: usize) -> bool {
        nodes.iter().all(|&node| match node {
            node if node < place => life::can_move_down(self.graph(), node, place, nodes),
            node => life::can_move_up(self.graph(), node, place, nodes),
        })
    }
}

/// Whether both are the same elements at the same place.
fn is_same(a: &Tensor, b: &Tensor) -> bool {
    a.buffer == b.buffer
        && a.offset == b.offset
        && a.shape.with_plain_strides() == b.shape.with_plain_strides()
}

/// Whether `b` is `a`, dense, with other extents perhaps.
fn is_reshaped(a: &Tensor, b: &Tensor) -> bool {
    let (x, y) = (&a.shape, &b.shape);
    let lies_alike = x.is_contiguous() && y.is_contiguous() && x.elements() == y.elements();
    a.buffer == b.buffer && a.offset == b.offset && x.ty == y.ty && lies_alike
}

/// Whether `write` is apart from `read`, or the same, row by row.
fn is_apart_or_in_place(write: &Tensor, read: &Tensor) -> bool {
    is_same(write, read) || is_apart(write, read)
}

fn is_apart(a: &Tensor, b: &Tensor) -> bool {
    !life::Span::of(a).meets(&life::Span::of(b))
}

/// Whether it is of f32 with rows that are dense.
fn is_f32(tensor: &Tensor) -> bool {
    tensor.shape.ty == Type::F32 && tensor.shape.has_dense_rows()
}
