//! Products with the formats with one scale per 32 elements: `d_w * d_x * (integer dot product)`
//! for every 32 elements.

mod chunk;
mod columns;
mod dot;
mod eight_rows;
mod panel;
mod rows;
mod short_rows;
mod weighted_rows;

use super::block_simd::BlockSimd;
use super::blocks::Block32Kernel;
use super::eight_rows::gemm as eight_rows_gemm;
use super::int16::I16Panel;
use super::panel::gemm as panel_gemm;
use super::q8_int16::Q8AsI16;
use crate::gemm::kernel::GemmArgs;
pub(super) use dot::above_minus_128;
use eight_rows::Block32Rows;
pub(super) use panel::Block32Panel;
pub(in crate::gemm) use short_rows::column_bytes;
pub(super) use short_rows::{gemm as short_rows_gemm, prepare_column};
pub(super) use weighted_rows::weighted_rows;

/// From this many columns on, a panel is faster than products of rows.
pub(super) const PANEL_COLS: usize = 5;

/// Whether each result is the same for any number of columns.
pub(super) const fn has_one_order<S: BlockSimd, B: Block32Kernel>() -> bool {
    S::ONE_ORDER && S::LANES >= B::ONE_ORDER_LANES
}

/// Multiplies rows or panels.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn gemm<S: BlockSimd, B: Block32Kernel>(call: &GemmArgs) {
    let one_order = has_one_order::<S, B>();
    // SAFETY: `panel_gemm`, `eight_rows_gemm` and `rows` have the contract of this function: the
    // `rows` rows of blocks of `B`, the `cols` columns, the results of `call`, and the features of
    // `S`, which include AVX2. `call` is passed on as it is.
    unsafe {
        if call.cols >= PANEL_COLS && (one_order || call.table.is_none()) {
            if B::WIDE && S::WIDE_IS_SIGNED {
                panel_gemm::<S, I16Panel<S, Q8AsI16<B>>>(call);
            } else {
                panel_gemm::<S, Block32Panel<S, B>>(call);
            }
        } else if one_order {
            eight_rows_gemm::<Block32Rows<S, B>>(call);
        } else {
            rows::rows::<S, B>(call);
        }
    }
}
