//! Normalisation and soft-max.

use super::elementwise;
use super::operation::{Operation, Refusal};
use crate::ir::Type;

pub(super) fn group_norm(o: &Operation<'_>, n_groups: i32) -> Result<(), Refusal> {
    o.ensure(n_groups > 0, "the number of groups is not positive")?;
    elementwise::same_lengths(o)
}

/// Soft-max over the rows of `src0 * scale + slope * mask`, with an optional extra logit (sink) per
/// head.
pub(super) fn soft_max(o: &Operation<'_>, max_bias: f32) -> Result<(), Refusal> {
    let a = o.src(0)?;
    o.ensure(
        a.same_lengths(o.dst),
        "lengths of source 0 and destination differ",
    )?;
    o.ensure(
        a.has_dense_rows() && o.dst.has_dense_rows(),
        "rows of source 0 or the destination are not dense",
    )?;
    match o.optional(1) {
        Some(mask) => {
            o.ensure(
                matches!(mask.ty, Type::F16 | Type::F32),
                "the mask is not f16 or f32",
            )?;
            o.ensure(mask.has_dense_rows(), "mask rows are not dense")?;
            o.ensure(
                mask.ne[0] == a.ne[0] && mask.ne[1] >= a.ne[1],
                "the mask is smaller than source 0",
            )?;
            o.ensure(
                a.is_empty()
                    || (!mask.is_empty()
                        && a.ne[2].is_multiple_of(mask.ne[2])
                        && a.ne[3].is_multiple_of(mask.ne[3])),
                "the mask does not repeat into source 0",
            )?;
        }
        None => o.ensure(max_bias <= 0.0, "ALiBi without a mask")?,
    }
    if let Some(sinks) = o.optional(2) {
        o.ensure(
            sinks.ty == Type::F32 && sinks.is_contiguous() && sinks.ne == [a.ne[2], 1, 1, 1],
            "the sinks are not one f32 per head",
        )?;
    }
    Ok(())
}
