//! Activations quantised to 8 bits (q8), and which nodes need them.

use vgpu_transport::ir::{Graph, Op};

use crate::device::Address;
use crate::launch::grid::div_ceil;
use crate::params::VgView;

/// The most columns of a block of a matrix-vector kernel (`MAX_COLUMNS` in `kernels/mmv.cuh`),
/// which multiplies each row of weights with all of them as it is read.
pub(crate) const MMV_COLUMNS: i64 = 8;

/// The most columns that matrix-vector kernels multiply, in groups of [`MMV_COLUMNS`]. The
/// kernels for many columns have tiles so large that few columns fill few of the SMs.
pub(crate) const MAX_MMV_COLUMNS: i64 = 64;

/// Elements of a q8 chunk; rows are padded to whole chunks (`kernels/q8_layout.cuh`).
const Q8_CHUNK: i64 = 1024;

/// The number of padded elements of the q8 activations of `x`. Each element takes one byte for the
/// quant and half a byte for scales and sums.
pub(crate) fn q8_elements(x: &VgView) -> i64 {
    x.rows() * div_ceil(x.ne[0], Q8_CHUNK) * Q8_CHUNK
}

/// Bytes of the q8 quants of a row of `x`. Its scales and sums take half as many.
pub(crate) fn q8_row_bytes(x: &VgView) -> u64 {
    (div_ceil(x.ne[0], Q8_CHUNK) * Q8_CHUNK) as u64
}

/// Activations quantised to 8 bits, as `vg_quantize_q8` writes them: rows in order, each padded to
/// whole chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Q8Activations {
    /// The address of the quants.
    pub(crate) quants: Address,
    /// The address of the scales and sums.
    pub(crate) scales: Address,
}

/// The number of nodes after a norm in which its products are looked for.
const PRODUCTS_AHEAD: usize = 16;

/// Whether one of the next nodes from `first` on quantises `x` for a matrix-vector kernel, which
/// products of up to `columns` columns use.
pub(crate) fn next_product_quantizes(
    graph: &Graph,
    views: &[VgView],
    first: usize,
    columns: i64,
    x: &VgView,
) -> bool {
    let ahead = graph.nodes[first..].iter().take(PRODUCTS_AHEAD);
    let mut products = ahead.filter(|node| match node.op {
        Op::MulMat { .. } => graph.dst(node).shape.ne[1] <= columns as u64,
        Op::MulMatId { .. } => graph.dst(node).shape.ne[2] <= MMV_COLUMNS as u64,
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
