//! The memory that ggml's CPU backend allocates for itself while it computes a node, its *work
//! buffer*. The backend keeps the largest one that any graph has needed, and ends the process if
//! there is no memory for it. So a plan announces it, and the guest is charged.
//!
//! The sizes are at least those of `ggml_graph_plan`, of the repacked buffer type and of the tiled
//! products, in ggml 0.20 to 0.26.
#![forbid(unsafe_code)]

use vgpu_transport::ir::{Graph, Node, Op, Shape};

/// `GGML_IM2COL_WORK_SIZE`
const CONVOLUTION: u64 = 16 << 20;

/// `TILED_WS_SLOT`: the tiles of a product, for a thread.
const TILES: u64 = 512 << 10;

/// `GGML_FA_TILE_Q` and `GGML_FA_TILE_KV`
const ATTENTION_TILE: u64 = 64;

/// Bytes of an element of an activation that is converted, at most: to F16, BF16, or a quantised
/// type. The backend gets products with activations of F32 only, which stay as they are for weights
/// of F32.
const CONVERTED: u64 = 2;

/// Bytes of an entry in the tables of MUL_MAT_ID, for each slot of each token and each expert, and
/// besides for each expert.
const ROW_OF_EXPERT: u64 = 8;
const EXPERT: u64 = 128;

/// Bytes between what two threads use.
const CACHE_LINE: u64 = 64;

/// Bytes of a number of F32.
const FLOAT: u64 = 4;

/// What a node on so many threads takes at most, in bytes. Saturates.
pub(crate) fn bytes(graph: &Graph, node: &Node, threads: usize) -> u64 {
    let shape = |i: usize| graph.src(node, i).map(|tensor| &tensor.shape);
    let ne = |i: usize| shape(i).map_or([0; 4], |shape| shape.ne);
    let product = |factors: &[u64]| factors.iter().fold(1u64, |all, &n| all.saturating_mul(n));
    let elements = |i: usize| shape(i).map_or(0, |shape| product(&shape.ne));
    let threads = threads as u64;
    let of_threads = |each: u64| threads.saturating_mul(each.saturating_add(CACHE_LINE));
    let sum = |parts: &[u64]| parts.iter().fold(0u64, |all, &n| all.saturating_add(n));
    match node.op {
        Op::MulMat { .. } => {
            let activations = product(&[CONVERTED, elements(1)]);
            sum(&[activations, of_threads(TILES)])
        }
        Op::MulMatId { .. } => {
            let experts = ne(0)[2];
            let activations = product(&[CONVERTED, elements(1)]);
            let rows = product(&[ROW_OF_EXPERT, experts, elements(2)]);
            let tables = product(&[EXPERT, experts.saturating_add(1)]);
            sum(&[activations, rows, tables, of_threads(TILES)])
        }
        Op::ConvTranspose1d { .. } | Op::ConvTranspose2d { .. } => {
            let converted = product(&[FLOAT, sum(&[elements(0), elements(1)])]);
            sum(&[converted, of_threads(0)])
        }
        Op::Conv2d { .. } | Op::Conv3d { .. } => sum(&[CONVOLUTION, of_threads(0)]),
        Op::FlashAttnExt { .. } => {
            let (heads, widths) = (ne(0)[2], sum(&[ne(1)[0], product(&[2, ne(2)[0]])]));
            let prefill = product(&[2 * ATTENTION_TILE, sum(&[widths, ATTENTION_TILE])]);
            let decode = product(&[sum(&[heads, 1]), sum(&[widths, 2])]);
            of_threads(product(&[FLOAT, prefill.max(decode)]))
        }
        Op::GatedDeltaNet { .. } => {
            let size = ne(2)[0];
            of_threads(product(&[FLOAT, size, size.saturating_add(1)]))
        }
        // A row of an operand.
        _ => {
            let operands = (0..node.src.as_slice().len()).filter_map(shape);
            let shapes = operands.chain([&graph.dst(node).shape]);
            let row = shapes.map(|shape: &Shape| shape.ne[0]).max().unwrap_or(0);
            of_threads(product(&[FLOAT, row.saturating_add(2)]))
        }
    }
}
