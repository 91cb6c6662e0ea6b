//! SUM, SUM_ROWS, MEAN, CUMSUM, ARGMAX, COUNT_EQUAL, ARGSORT, TOP_K.

use vgpu_transport::ir::{Op, OpKind, Rule, SortOrder, Type, TypeSet};

use crate::launch::builder::Builder;
use crate::launch::grid::threads_for;
use crate::params::*;
use vgpu_engine::EngineError;
use vgpu_engine::types::{FLOATS, I32};

/// The most keys that are sorted in shared memory: 32 KiB.
const SHARED_KEYS: u32 = 4096;

/// The most blocks that sort in scratch memory.
const SORTING_BLOCKS: u64 = 256;

pub(crate) fn rules() -> Vec<Rule> {
    let i64s = TypeSet::of(&[Type::I64]);
    vec![
        Rule::new(OpKind::Sum, FLOATS, &[FLOATS]),
        Rule::new(OpKind::SumRows, FLOATS, &[FLOATS]),
        Rule::new(OpKind::Mean, FLOATS, &[FLOATS]),
        Rule::new(OpKind::Cumsum, FLOATS, &[FLOATS]),
        Rule::new(OpKind::Argmax, I32, &[FLOATS]),
        Rule::new(OpKind::CountEqual, i64s, &[I32, I32]),
        Rule::new(OpKind::Argsort, I32, &[FLOATS]),
        Rule::new(OpKind::TopK, I32, &[FLOATS]),
    ]
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    let (dst, src) = (b.dst(), b.optional(0));
    let mut params = VgReduceParams {
        dst,
        src,
        by: 1.0,
        ..VgReduceParams::default()
    };
    Some(match *op {
        // For rows with gaps, ggml adds the bytes that follow the first element in memory.
        Op::Sum {} => total(b, "vg_sum", src.with_dense_rows()),
        Op::CountEqual {} => total(b, "vg_count_equal", src),
        Op::SumRows {} => b.for_each_row(
            "vg_sum_rows",
            dst.rows(),
            threads_for(src.ne[0]),
            0,
            &params,
        ),
        Op::Mean {} => {
            params.by = src.ne[0] as f64;
            b.for_each_row(
                "vg_sum_rows",
                dst.rows(),
                threads_for(src.ne[0]),
                0,
                &params,
            )
        }
        Op::Cumsum {} => b.for_each_row("vg_cumsum", dst.rows(), 32, 0, &params),
        Op::Argmax {} => b.for_each_row("vg_argmax", src.ne[1], 32, 0, &params),
        Op::Argsort { order } => sort(b, params, order),
        Op::TopK {} => sort(b, params, SortOrder::Descending),
        _ => return None,
    })
}

/// Adds the launch of ARGSORT or TOP_K.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn sort(
    b: &mut Builder<'_>,
    mut params: VgReduceParams,
    order: SortOrder,
) -> Result<(), EngineError> {
    let columns = u32::try_from(params.src.ne[0])
        .ok()
        .and_then(u32::checked_next_power_of_two)
        .ok_or_else(|| {
            b.unsupported(format!(
                "rows of {} elements cannot be sorted",
                params.src.ne[0]
            ))
        })?;
    params.descending = u32::from(order == SortOrder::Descending);
    params.columns = columns.max(2);
    let rows = params.dst.rows();
    if params.columns <= SHARED_KEYS {
        return b.for_each_row(
            "vg_argsort",
            rows,
            threads_for(2 * i64::from(params.columns)),
            params.columns * 8,
            &params,
        );
    }
    let blocks = (rows as u64).min(SORTING_BLOCKS);
    params.scratch = b.scratch(blocks * u64::from(params.columns) * 8);
    b.launch("vg_argsort", [blocks as u32, 1, 1], 256, 0, &params)
}

/// A reduction of a whole tensor in two launches: each block reduces a part, then one block all
/// parts. The number of parts depends on the lengths only, so the result does too.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn total(b: &mut Builder<'_>, kernel: &'static str, src: VgView) -> Result<(), EngineError> {
    let parts = (src.elements() as u64).div_ceil(1 << 14).clamp(1, 1024) as u32;
    let mut params = VgTotalParams {
        dst: b.dst(),
        a: src,
        b: b.optional(1),
        scratch: b.scratch(u64::from(parts) * 8),
        parts,
        finish: 0,
    };
    b.launch(kernel, [parts, 1, 1], 256, 0, &params)?;
    params.finish = 1;
    b.launch(kernel, [1, 1, 1], 256, 0, &params)
}
