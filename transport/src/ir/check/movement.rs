//! Operators that move, repeat, gather, scatter or fill.

use super::elementwise;
use super::operation::{Operation, Refusal, is_index};
use crate::ir::Type;

/// `dst` has the elements of `src0` in order, converted to the type of `dst`.
pub(super) fn copy(o: &Operation<'_>) -> Result<(), Refusal> {
    let a = o.src(0)?;
    o.ensure(
        a.elements() == o.dst.elements(),
        "source and destination have different numbers of elements",
    )
}

pub(super) fn repeat(o: &Operation<'_>) -> Result<(), Refusal> {
    let a = o.src(0)?;
    o.ensure(
        a.repeats_into(o.dst),
        "source 0 does not repeat into the destination",
    )?;
    o.ensure(a.ty == o.dst.ty, "types of source and destination differ")
}

/// The gradient of [`repeat`]: each element is the sum over its repetitions.
pub(super) fn repeat_back(o: &Operation<'_>) -> Result<(), Refusal> {
    let a = o.src(0)?;
    o.ensure(
        o.dst.repeats_into(a),
        "the destination does not repeat into source 0",
    )?;
    o.ensure(a.ty == o.dst.ty, "types of source and destination differ")
}

pub(super) fn concat(o: &Operation<'_>, dim: u32) -> Result<(), Refusal> {
    let (a, b, dim) = (o.src(0)?, o.src(1)?, dim as usize);
    o.ensure(dim < 4, "the concatenated dimension is not 0 to 3")?;
    o.ensure(a.ty == b.ty && a.ty == o.dst.ty, "types differ")?;
    let others = (0..4)
        .filter(|&d| d != dim)
        .all(|d| a.ne[d] == b.ne[d] && a.ne[d] == o.dst.ne[d]);
    o.ensure(
        others,
        "lengths differ in a dimension that is not concatenated",
    )?;
    o.ensure(
        a.ne[dim].checked_add(b.ne[dim]) == Some(o.dst.ne[dim]),
        "the concatenated length is not the sum",
    )
}

/// `dst[:, i, j, k] = src0[:, ids[i, j, k], j, k]`.
pub(super) fn get_rows(o: &Operation<'_>) -> Result<(), Refusal> {
    let (a, ids) = (o.src(0)?, o.src(1)?);
    o.ensure(ids.ty == Type::I32, "row ids are not i32")?;
    o.ensure(ids.ne[3] == 1, "row ids have four dimensions")?;
    o.ensure(
        a.ne[2] == ids.ne[1] && a.ne[3] == ids.ne[2],
        "row ids and source 0 differ in outer lengths",
    )?;
    o.ensure(
        o.dst.ne == [a.ne[0], ids.ne[0], ids.ne[1], ids.ne[2]],
        "the destination has other lengths",
    )
}

/// `dst[:, ids[i]] += src0[:, i]` for a matrix `dst`. The operator ignores rows without an id.
pub(super) fn get_rows_back(o: &Operation<'_>) -> Result<(), Refusal> {
    let (a, ids) = (o.src(0)?, o.src(1)?);
    o.ensure(ids.ty == Type::I32, "row ids are not i32")?;
    o.ensure(
        a.ne[2..] == [1, 1] && ids.ne[1..] == [1, 1, 1],
        "source is not a matrix with a vector of ids",
    )?;
    o.ensure(ids.ne[0] <= a.ne[1], "there are more ids than rows")?;
    o.ensure(
        o.dst.ne[0] == a.ne[0] && o.dst.ne[2..] == [1, 1],
        "the destination has other lengths",
    )
}

/// `dst[:, ids[i, j % J, k % K], j, k] = src0[:, i, j, k]`.
pub(super) fn set_rows(o: &Operation<'_>) -> Result<(), Refusal> {
    let (a, ids, dst) = (o.src(0)?, o.src(1)?, o.dst);
    o.ensure(is_index(ids.ty), "row ids are not i32 or i64")?;
    o.ensure(
        a.ne[0] == dst.ne[0] && a.ne[2..] == dst.ne[2..],
        "source 0 and destination differ in lengths",
    )?;
    o.ensure(
        ids.ne[0] == a.ne[1] && ids.ne[3] == 1,
        "the number of ids is not one per row",
    )?;
    let divides = |part: u64, whole: u64| part != 0 && whole.is_multiple_of(part);
    o.ensure(
        a.is_empty() || divides(ids.ne[1], a.ne[2]) && divides(ids.ne[2], a.ne[3]),
        "row ids do not repeat into source 0",
    )?;
    o.ensure(dst.has_dense_rows(), "destination rows are not dense")
}

/// SET and ACC: a copy of `src0`, to a view of which the operator writes (or adds) `src1`.
pub(super) fn set(o: &Operation<'_>, nb: [u64; 3], offset: u64) -> Result<(), Refusal> {
    let (a, b) = (o.src(0)?, o.src(1)?);
    o.ensure(
        a.same_lengths(o.dst),
        "lengths of source 0 and destination differ",
    )?;
    o.ensure(
        a.ty == o.dst.ty && b.ty == a.ty && !a.ty.is_quantized(),
        "types differ or are quantised",
    )?;
    o.ensure(
        a.is_contiguous() && o.dst.is_contiguous(),
        "source 0 or destination is not contiguous",
    )?;
    let element = a.ty.block_bytes();
    o.ensure(
        nb.iter()
            .chain([&offset])
            .all(|v| v.is_multiple_of(element)),
        "strides or offset of the view are not multiples of the element size",
    )?;
    let view = crate::ir::Shape {
        nb: [element, nb[0], nb[1], nb[2]],
        ..*b
    };
    let end = view
        .byte_len()
        .and_then(|length| length.checked_add(offset));
    o.ensure(
        end.zip(o.dst.byte_len())
            .is_some_and(|(end, whole)| end <= whole),
        "the view ends behind the destination",
    )
}

pub(super) fn diag(o: &Operation<'_>) -> Result<(), Refusal> {
    let a = o.src(0)?;
    o.ensure(
        a.ne[1] == 1 && o.dst.ne == [a.ne[0], a.ne[0], a.ne[2], a.ne[3]],
        "the destination is not one square matrix per vector",
    )
}

pub(super) fn diag_mask(o: &Operation<'_>, n_past: i32) -> Result<(), Refusal> {
    o.ensure(n_past >= 0, "n_past is negative")?;
    elementwise::same_lengths(o)
}

pub(super) fn pad(
    o: &Operation<'_>,
    left: [i32; 4],
    right: [i32; 4],
    circular: bool,
) -> Result<(), Refusal> {
    let a = o.src(0)?;
    for d in 0..4 {
        let padding = u64::try_from(left[d])
            .ok()
            .zip(u64::try_from(right[d]).ok());
        let whole = padding.and_then(|(l, r)| l.checked_add(r)?.checked_add(a.ne[d]));
        o.ensure(
            whole == Some(o.dst.ne[d]),
            "the padded length is not the sum",
        )?;
    }
    o.ensure(
        !circular || !a.is_empty() || o.dst.is_empty(),
        "an empty source cannot be repeated",
    )
}

pub(super) fn pad_reflect_1d(o: &Operation<'_>, p0: i32, p1: i32) -> Result<(), Refusal> {
    let a = o.src(0)?;
    let (Ok(p0), Ok(p1)) = (u64::try_from(p0), u64::try_from(p1)) else {
        return o.ensure(false, "padding is negative");
    };
    o.ensure(
        p0 < a.ne[0] && p1 < a.ne[0],
        "padding is not smaller than the row",
    )?;
    o.ensure(
        o.dst.ne[0] == a.ne[0] + p0 + p1 && o.dst.ne[1..] == a.ne[1..],
        "the padded length is not the sum",
    )
}

/// `dst[i] = start + i * step` for all values below `stop`.
pub(super) fn arange(o: &Operation<'_>, start: f32, stop: f32, step: f32) -> Result<(), Refusal> {
    let steps = ((stop - start) / step).ceil();
    o.ensure(
        steps == o.dst.ne[0] as f32 && o.dst.ne[1..] == [1, 1, 1],
        "the destination has another length",
    )
}
