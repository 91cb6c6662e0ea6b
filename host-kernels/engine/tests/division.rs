//! Into how many parts the nodes of every operator are divided, and how long the shares of a node
//! are.

#[path = "../../../transport/tests/common/ops.rs"]
mod ops;
#[path = "../../../transport/tests/common/samples.rs"]
mod samples;

use samples::sample;
use vgpu_engine::fuse::{Arrangement, Share, most_parts};
use vgpu_transport::ir::{BufferId, Graph, Node, OpKind, Sources, Tensor};

/// A graph of one node of this kind.
fn graph(kind: OpKind, size: u64) -> Graph {
    let sample = sample(kind, size);
    let dst = sample.src.len() as u32;
    let all = sample.src.iter().copied().chain([sample.dst]).enumerate();
    Graph {
        buffers: (0..=u64::from(dst)).map(BufferId).collect(),
        tensors: all
            .map(|(i, shape)| Tensor {
                shape,
                buffer: i as u32,
                offset: 0,
            })
            .collect(),
        nodes: vec![Node {
            op: sample.op,
            dst,
            src: Sources::new((0..dst).map(Some)),
        }],
    }
}

/// How many parts a division into `count` has.
fn divided(graph: &Graph, count: u64) -> u64 {
    let mut arrangement = Arrangement::plain(graph);
    let parents = arrangement.divide(|_, _| count, usize::MAX);
    parents.expect("no limit");
    arrangement.graph.nodes.len() as u64
}

#[test]
fn a_division_has_as_many_parts_as_are_wanted_or_as_there_can_be() {
    let (mut whole, mut many) = (0, 0);
    for &kind in OpKind::ALL {
        for size in 1..=3 {
            let graph = graph(kind, size);
            let most = most_parts(&graph, &graph.nodes[0]);
            whole += u64::from(most == 1);
            many += u64::from(most > 4096);
            let name = kind.ggml_name();
            for count in [most, most + 1, 2 * most, u64::MAX] {
                let parts = divided(&graph, count);
                assert_eq!(parts, most, "{name} of size {size}, {count} wanted");
            }
            for count in [2, 3, 5, 17, 64, 65, 100, 129, 1000, 4097] {
                let parts = divided(&graph, count);
                let least = most.min(count.div_ceil(2));
                assert!(
                    parts >= least && parts <= most,
                    "{name} of size {size}: {parts} parts, {count} wanted, {most} at most"
                );
            }
        }
    }
    assert!(
        whole > 0 && many > 0,
        "{whole} whole, {many} with many parts"
    );
}

#[test]
fn shares_of_sums_have_as_many_terms_each() {
    for n in [1u64, 2, 3, 7, 64, 100, 4095, 4096] {
        for of in [1, 2, 3, 5, 64, 1000, n.div_ceil(2)] {
            let shares = (0..of).map(|at| Share { at, of }.range_of_sums(n));
            // Row i has i terms.
            let terms = |rows: std::ops::Range<u64>| rows.sum::<u64>();
            let most = n * (n - 1) / 2 / of + n;
            let mut end = 0;
            for (at, rows) in shares.enumerate() {
                assert_eq!(rows.start, end, "share {at} of {of} of {n} rows");
                end = rows.end;
                let what = format!("share {at} of {of} of {n} rows: {rows:?}");
                assert!(of > n / 2 || of == 1 || rows.start < rows.end, "{what}");
                assert!(terms(rows) <= most, "{what}");
            }
            assert_eq!(end, n);
        }
    }
    // The most rows whose shares are even.
    let n = 1u64 << 40;
    let before = |row: u64| u128::from(row) * u128::from(row.saturating_sub(1)) / 2;
    for of in [2, 3, 7, 1000, 4096] {
        let (mut end, most) = (0, before(n) / u128::from(of) + u128::from(n));
        for at in 0..of {
            let rows = Share { at, of }.range_of_sums(n);
            assert_eq!(rows.start, end, "share {at} of {of} of 2^40 rows");
            end = rows.end;
            let terms = before(rows.end) - before(rows.start);
            let least = before(n) / u128::from(of) - 2 * u128::from(n);
            let what = format!("share {at} of {of} of 2^40 rows: {rows:?}, {terms} terms");
            assert!((least..=most).contains(&terms), "{what}");
        }
        assert_eq!(end, n);
    }
    // The last of the most shares: `at` times the square of the rows has 128 bits.
    let of = 1 << 48;
    let last = Share { at: of - 1, of }.range_of_sums(n);
    assert!(last.end == n && n - last.start <= 1, "{last:?}");
    // Of more rows, each is in one share, too.
    for n in [1 << 50, u64::MAX] {
        let mut end = 0;
        for at in 0..7 {
            let rows = Share { at, of: 7 }.range_of_sums(n);
            assert_eq!(rows.start, end, "share {at} of 7 of {n} rows");
            end = rows.end;
        }
        assert_eq!(end, n);
    }
}
