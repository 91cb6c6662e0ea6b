//! The device memory that the nodes of a graph write.

use std::ops::Range;

use vgpu_transport::ir::{Graph, Node};

use crate::device::Address;
use crate::params::VgView;

/// Ranges of addresses that some node of a graph writes: sorted, and apart from each other.
#[derive(Debug, Default)]
pub(crate) struct WrittenRanges(Vec<Range<Address>>);

impl WrittenRanges {
    /// What the nodes of `graph` write, whose tensors are at `views`.
    pub(crate) fn of(graph: &Graph, views: &[VgView]) -> WrittenRanges {
        let mut ranges: Vec<Range<Address>> = { graph.nodes.iter() }
            .flat_map(Node::written_tensors)
            .map(|tensor| views[tensor].address_range())
            .filter(|range| !range.is_empty())
            .collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut merged: Vec<Range<Address>> = Vec::new();
        for range in ranges {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        WrittenRanges(merged)
    }

    /// Whether a node writes a byte of `range`.
    pub(crate) fn overlap(&self, range: &Range<Address>) -> bool {
        let after = self.0.partition_point(|written| written.end <= range.start);
        { self.0.get(after) }.is_some_and(|written| written.start < range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::ir::{Op, Shape, Sources, Type};

    #[test]
    fn bytes_that_a_node_writes_are_found() {
        let at = |address| {
            let shape = Shape::contiguous(Type::F32, [4, 1, 1, 1]).expect("a small shape");
            VgView::new(address, &shape)
        };
        // 16 bytes each; the second and the third touch.
        let views = [at(64), at(96), at(112), at(160)];
        let node = |dst| Node {
            op: Op::Add {},
            dst,
            src: Sources::new([Some(3), Some(3)]),
        };
        let graph = Graph {
            nodes: vec![node(2), node(0), node(1)],
            ..Graph::default()
        };
        let written = WrittenRanges::of(&graph, &views);
        for (range, expected) in [
            (0..64, false),
            (0..65, true),
            (79..90, true),
            (80..96, false),
            (100..120, true),
            (127..128, true),
            (128..200, false),
            (0..400, true),
            (160..176, false),
        ] {
            assert_eq!(written.overlap(&range), expected, "{range:?}");
        }
        assert!(!WrittenRanges::default().overlap(&(0..u64::MAX)));
    }
}
