//! A graph with its nodes reordered so that groups are contiguous.

use std::collections::BTreeMap;
use std::ops::Range;

use vgpu_transport::ir::{Graph, Node, Op};

use super::budget::Budget;
use super::divide::Share;
use super::finder::{Finder, FusionKind, Group};
use super::{divide, experts, products, rows};

/// A graph with its nodes reordered, with the same results, and the groups among them.
pub struct Arrangement {
    /// The graph with its nodes in the order of `origin`.
    pub graph: Graph,
    /// For each node, its index in the guest's graph.
    pub origin: Vec<usize>,
    /// For each group, by the index of its first node in the guest's graph: its kind and its number
    /// of consecutive nodes.
    groups: BTreeMap<usize, (FusionKind, usize)>,
    /// For each node, whether it is in a group.
    taken: Vec<bool>,
    /// The nodes of which the graph has a node for each share.
    shares: BTreeMap<usize, Share>,
}

/// A graph whose long nodes would have too many parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the long nodes of the graph would be divided into more than {limit} in all")]
pub struct TooManyParts {
    /// The most nodes.
    pub limit: usize,
}

impl Arrangement {
    /// The graph in its own order, without groups.
    pub fn plain(graph: &Graph) -> Arrangement {
        Arrangement {
            graph: graph.clone(),
            origin: (0..graph.nodes.len()).collect(),
            groups: BTreeMap::new(),
            taken: vec![false; graph.nodes.len()],
            shares: BTreeMap::new(),
        }
    }

    /// The graph with all groups that are found. Groups of products have up to `max_columns`
    /// columns of activations. The time of the search is proportional to the number of nodes: in a
    /// graph whose results live too long, the search ends before the last node. The search also
    /// ends once `is_cancelled`, which is called now and then, returns `true`.
    pub fn of(graph: &Graph, max_columns: u64, is_cancelled: &dyn Fn() -> bool) -> Arrangement {
        let mut all = Arrangement::plain(graph);
        let mut first = 0;
        let budget = Budget::of(graph, is_cancelled);
        while first < all.graph.nodes.len() && !budget.is_spent() {
            let finder = Finder {
                graph: &all.graph,
                taken: &all.taken,
                budget: &budget,
                max_columns,
            };
            match find_group(&finder, first) {
                Some(group) => first = all.take(&group),
                None => first += 1,
            }
        }
        all
    }

    /// Moves the nodes of a group to its place. Returns the first node that was not searched.
    fn take(&mut self, group: &Group) -> usize {
        let Group { kind, nodes, place } = group;
        let (first, last) = (nodes[0], nodes[nodes.len() - 1]);
        let others = (first..=last).filter(|at| !nodes.contains(at));
        let order: Vec<usize> = match *place == first {
            true => nodes.iter().copied().chain(others).collect(),
            false => others.chain(nodes.iter().copied()).collect(),
        };
        self.groups.insert(self.origin[first], (*kind, nodes.len()));
        // Earlier groups stay contiguous, because all other nodes keep their order.
        let moved: Vec<Node> = { order.iter() }
            .map(|&at| self.graph.nodes[at].clone())
            .collect();
        let origin: Vec<usize> = order.iter().map(|&at| self.origin[at]).collect();
        let taken: Vec<bool> = { order.iter() }
            .map(|at| self.taken[*at] || nodes.contains(at))
            .collect();
        self.graph.nodes[first..=last].clone_from_slice(&moved);
        self.origin[first..=last].copy_from_slice(&origin);
        self.taken[first..=last].copy_from_slice(&taken);
        match *place == first {
            true => first + nodes.len(),
            // Other nodes are now before it.
            false => first,
        }
    }

    /// Divides nodes into parts that follow each other. `count` returns into how many: 1 for a node
    /// that stays whole. Some parts are [shares](Arrangement::share) of the same node. A group with
    /// such a node is no group any more. The tensors of parts are appended to those of the graph;
    /// returns, for each of them, the index of the tensor that it is a range of.
    ///
    /// # Errors
    /// [`TooManyParts`] if the graph would have more than `limit` nodes.
    pub fn divide(
        &mut self,
        count: impl Fn(&Graph, &Node) -> u64,
        limit: usize,
    ) -> Result<Vec<usize>, TooManyParts> {
        let all = 0..self.graph.nodes.len();
        let most = (limit as u64).saturating_add(1);
        let counts = all.map(|at| (at, count(&self.graph, &self.graph.nodes[at]).min(most)));
        let long: Vec<(usize, u64)> = counts.filter(|&(_, count)| count > 1).collect();
        let mut parents = Vec::new();
        if long.is_empty() {
            return Ok(parents);
        }
        self.ungroup(&long);
        let (nodes, origin) = (
            std::mem::take(&mut self.graph.nodes),
            std::mem::take(&mut self.origin),
        );
        let taken = std::mem::take(&mut self.taken);
        let mut long = long.into_iter().peekable();
        for (at, node) in nodes.into_iter().enumerate() {
            let count = long
                .next_if(|&(long, _)| long == at)
                .map_or(1, |(_, count)| count);
            let parts: Vec<(Node, Share)> = match count {
                1 => vec![(node, Share::WHOLE)],
                count => {
                    let parts = divide::parts(&self.graph, &node, count);
                    let added = { parts.iter() }.map(|part| {
                        let node = divide::add(&mut self.graph, &mut parents, part);
                        (node, part.share)
                    });
                    added.collect()
                }
            };
            for (part, share) in parts {
                if share != Share::WHOLE {
                    self.shares.insert(self.graph.nodes.len(), share);
                }
                self.graph.nodes.push(part);
                self.origin.push(origin[at]);
                self.taken.push(taken[at]);
            }
            if self.graph.nodes.len() > limit {
                return Err(TooManyParts { limit });
            }
        }
        Ok(parents)
    }

    /// Which share of its results node `at` computes, if the kernels divide the operator.
    pub fn share(&self, at: usize) -> Share {
        self.shares.get(&at).copied().unwrap_or(Share::WHOLE)
    }

    /// Removes the groups that have one of these nodes.
    fn ungroup(&mut self, nodes: &[(usize, u64)]) {
        let mut at = 0;
        while at < self.graph.nodes.len() {
            let Some((_, group)) = self.group_at(at) else {
                at += 1;
                continue;
            };
            let first = nodes.partition_point(|&(node, _)| node < group.start);
            if nodes.get(first).is_some_and(|&(node, _)| node < group.end) {
                self.groups.remove(&self.origin[at]);
                self.taken[group.clone()].fill(false);
            }
            at = group.end;
        }
    }

    /// The group that begins with node `at`, and its nodes; `None` if the node is in no group.
    pub fn group_at(&self, at: usize) -> Option<(FusionKind, Range<usize>)> {
        let &(kind, len) = self.groups.get(&self.origin[at])?;
        Some((kind, at..at + len))
    }
}

/// The group that begins with node `first`.
fn find_group(finder: &Finder<'_>, first: usize) -> Option<Group> {
    if !finder.is_free(first) {
        return None;
    }
    match finder.node(first).op {
        Op::Add {} | Op::RmsNorm { .. } => rows::norm(finder, first),
        Op::MulMat { .. } | Op::MulMatId { .. } => {
            products::gated(finder, first).or_else(|| products::products(finder, first))
        }
        Op::Rope { .. } => rows::rope_rows(finder, first),
        Op::SoftMax { .. } => experts::route(finder, first),
        Op::TopK {} | Op::Argsort { .. } => experts::route_first(finder, first),
        Op::Mul {} => experts::weighted_sum(finder, first),
        _ => None,
    }
}
