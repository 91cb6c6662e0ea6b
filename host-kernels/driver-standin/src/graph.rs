//! Graphs of kernels, their instances, and the recording of streams.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::thread::ThreadId;

use crate::codes::{Answer, Code};
use crate::function::Launch;

/// A graph.
#[derive(Default)]
pub(crate) struct Graph {
    /// The handles of the nodes.
    pub(crate) nodes: Vec<u64>,
    edges: HashSet<(u64, u64)>,
}

/// A node of a graph: a launch.
pub(crate) struct Node {
    pub(crate) launch: Launch,
}

/// An instance of a graph.
pub(crate) struct Exec {
    /// The handles of the nodes in the order in which they run.
    pub(crate) order: Vec<u64>,
    pub(crate) launches: HashMap<u64, Launch>,
}

/// What is recorded of a stream.
pub(crate) struct Capture {
    /// The handle of the graph.
    pub(crate) graph: u64,
    /// The node that the next one depends on.
    pub(crate) last: Option<u64>,
    /// Another thread must not end the recording.
    pub(crate) thread: Option<ThreadId>,
    pub(crate) is_invalid: bool,
}

impl Graph {
    /// Adds an edge between two nodes.
    ///
    /// # Errors
    /// `INVALID_VALUE` if a node is not of this graph, if the edge is there already or goes from a
    /// node to itself, and if nodes would depend on each other in a cycle.
    pub(crate) fn connect(&mut self, from: u64, to: u64) -> Answer {
        let has = |node: u64| self.nodes.contains(&node);
        let is_new = from != to && !self.edges.contains(&(from, to));
        if !has(from) || !has(to) || !is_new || self.reaches(to, from) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        self.edges.insert((from, to));
        Ok(())
    }

    fn reaches(&self, from: u64, to: u64) -> bool {
        let (mut seen, mut next) = (HashSet::new(), vec![from]);
        while let Some(node) = next.pop() {
            if node == to {
                return true;
            }
            if seen.insert(node) {
                let edges = self.edges.iter().filter(|(before, _)| *before == node);
                next.extend(edges.map(|(_, after)| *after));
            }
        }
        false
    }

    /// The nodes, each behind those that it depends on. Of those that may run, the one runs first
    /// that was added last.
    pub(crate) fn order(&self) -> Vec<u64> {
        let mut missing: HashMap<u64, usize> = HashMap::new();
        let mut after: HashMap<u64, Vec<u64>> = HashMap::new();
        for (from, to) in &self.edges {
            *missing.entry(*to).or_default() += 1;
            after.entry(*from).or_default().push(*to);
        }
        let is_free = |node: &u64| !missing.contains_key(node);
        let mut free: Vec<u64> = self.nodes.iter().copied().filter(is_free).collect();
        let mut order = Vec::new();
        while let Some(node) = free.pop() {
            order.push(node);
            for next in after.remove(&node).unwrap_or_default() {
                if let Some(count) = missing.get_mut(&next) {
                    *count -= 1;
                    if *count == 0 {
                        free.push(next);
                    }
                }
            }
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_run_behind_those_they_depend_on() {
        let mut graph = Graph {
            nodes: vec![1, 2, 3, 4],
            ..Graph::default()
        };
        for (from, to) in [(4, 3), (3, 1), (1, 2)] {
            assert_eq!(graph.connect(from, to), Ok(()));
        }
        assert_eq!(graph.order(), [4, 3, 1, 2]);
        for (from, to) in [(4, 3), (2, 4), (1, 1), (1, 9)] {
            let refused = Err(Code::CUDA_ERROR_INVALID_VALUE);
            assert_eq!(graph.connect(from, to), refused, "{from} {to}");
        }
    }
}
