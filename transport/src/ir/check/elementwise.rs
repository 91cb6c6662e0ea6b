//! Element-wise operators: arithmetic, unary functions, gated linear units.

use super::operation::{Operation, Refusal};
use crate::ir::Type;

/// Destination and all sources have the same lengths.
pub(super) fn same_lengths(o: &Operation<'_>) -> Result<(), Refusal> {
    let same = o.src.iter().flatten().all(|s| s.same_lengths(o.dst));
    o.ensure(same, "lengths of source and destination differ")
}

/// `dst = src0 (op) src1`, with src1 broadcast to src0.
pub(super) fn broadcast(o: &Operation<'_>) -> Result<(), Refusal> {
    let (a, b) = (o.src(0)?, o.src(1)?);
    o.ensure(
        a.same_lengths(o.dst),
        "lengths of source 0 and destination differ",
    )?;
    o.ensure(b.repeats_into(a), "source 1 does not repeat into source 0")
}

/// `dst = src0 + src1`, where src1 is a single element.
pub(super) fn add1(o: &Operation<'_>) -> Result<(), Refusal> {
    o.ensure(
        o.src(0)?.same_lengths(o.dst),
        "lengths of source 0 and destination differ",
    )?;
    o.ensure(o.src(1)?.ne == [1; 4], "source 1 is not a single element")
}

/// `dst[:, u, t] = src0[:, u, t] + src1[:, ids[u, t]]`.
pub(super) fn add_id(o: &Operation<'_>) -> Result<(), Refusal> {
    let (a, b, ids) = (o.src(0)?, o.src(1)?, o.src(2)?);
    o.ensure(
        a.same_lengths(o.dst),
        "lengths of source 0 and destination differ",
    )?;
    o.ensure(
        a.ne[0] == b.ne[0],
        "rows of source 0 and 1 differ in length",
    )?;
    o.ensure(b.ne[2] == 1 && b.ne[3] == 1, "source 1 is not a matrix")?;
    o.ensure(ids.ty == Type::I32, "ids are not i32")?;
    o.ensure(
        ids.ne == [a.ne[1], a.ne[2], 1, 1] && a.ne[3] == 1,
        "the number of ids is not one per row",
    )
}

/// `dst = f(x) * g`. x and g are two sources, or the two halves of the rows of one source. The
/// operator ignores the last element of rows of odd length.
pub(super) fn glu(o: &Operation<'_>) -> Result<(), Refusal> {
    let a = o.src(0)?;
    match o.optional(1) {
        Some(_) => same_lengths(o),
        None => o.ensure(
            o.dst.ne[0] == a.ne[0] / 2 && a.ne[1..] == o.dst.ne[1..],
            "destination rows are not half as long as source rows",
        ),
    }
}
