//! Activations quantised to 8 bits.

use vgpu_transport::ir::{Graph, Op};

use crate::device::Address;
use crate::launch::grid::div_ceil;
use crate::params::VgView;

/// Up to this many columns a row of weights is multiplied with each as it is read.
pub(crate) const FEW_COLUMNS: i64 = 8;

/// Elements of a piece of a row, of which rounded activations have whole ones: `cuda/q8_layout.cuh`.
const ROUNDED_PIECE: i64 = 1024;

/// Elements that there is room for where activations are rounded. Each takes a byte, and half a byte of factors and sums.
pub(crate) fn q8_elements(x: &VgView) -> i64 {
    x.rows() * div_ceil(x.ne[0], ROUNDED_PIECE) * ROUNDED_PIECE
}

/// Activations rounded to 8 bits, what `vg_quantize_q8` writes: rows in order, each in whole pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Q8Activations {
    /// The bytes.
    pub(crate) quants: Address,
    /// Factors and sums.
    pub(crate) scales: Address,
}

/// How many nodes ahead of a norm its products are looked for.
const PRODUCTS_AHEAD: usize = 16;

/// Whether one of the nodes from `first` on rounds `x` for a product of few columns.
pub(crate) fn next_product_quantizes(
    graph: &Graph,
    views: &[VgView],
    first: usize,
    x: &VgView,
) -> bool {
    let ahead = graph.nodes[first..].iter().take(PRODUCTS_AHEAD);
    let mut products = ahead.filter(|node| match node.op {
        Op::MulMat { .. } => graph.dst(node).shape.ne[1] <= FEW_COLUMNS as u64,
        Op::MulMatId { .. } => graph.dst(node).shape.ne[2] <= FEW_COLUMNS as u64,
        _ => false,
    });
    products.any(|node| {
        let [Some(w), Some(y), ..] = *node.src.as_slice() else {
            return false;
        };
        let y = &views[y as usize];
        let is_quantized = graph.tensors[w as usize].shape.ty.is_quantized();
        is_quantized && y.data == x.data && y.ne[0] == x.ne[0] && y.rows() == x.rows()
    })
}
