//! Reductions and orderings.

use super::operation::{Operation, Refusal};
use crate::ir::Type;

pub(super) fn sum(o: &Operation<'_>) -> Result<(), Refusal> {
    o.src(0)?;
    o.ensure(
        o.dst.ne == [1; 4],
        "the destination is not a single element",
    )
}

/// SUM_ROWS and MEAN: one element per row.
pub(super) fn rows_to_one(o: &Operation<'_>) -> Result<(), Refusal> {
    let a = o.src(0)?;
    o.ensure(
        o.dst.ne[0] == 1 && o.dst.ne[1..] == a.ne[1..],
        "the destination is not one element per row",
    )
}

/// The index of the largest element of each row of a matrix.
pub(super) fn argmax(o: &Operation<'_>) -> Result<(), Refusal> {
    let a = o.src(0)?;
    o.ensure(o.dst.ty == Type::I32, "the destination is not i32")?;
    o.ensure(
        a.ne[0] > 0 && a.ne[0] <= i32::MAX as u64,
        "rows are empty or too long for an i32 index",
    )?;
    o.ensure(
        a.ne[2..] == [1, 1] && o.dst.ne == [a.ne[1], 1, 1, 1],
        "the destination is not one index per row of a matrix",
    )
}

pub(super) fn count_equal(o: &Operation<'_>) -> Result<(), Refusal> {
    let (a, b) = (o.src(0)?, o.src(1)?);
    o.ensure(
        a.same_lengths(b) && a.ty == b.ty,
        "sources differ in lengths or type",
    )?;
    o.ensure(
        o.dst.ne == [1; 4] && o.dst.ty == Type::I64,
        "the destination is not a single i64",
    )
}

pub(super) fn argsort(o: &Operation<'_>) -> Result<(), Refusal> {
    let a = o.src(0)?;
    o.ensure(o.dst.ty == Type::I32, "the destination is not i32")?;
    o.ensure(
        a.ne[0] <= i32::MAX as u64,
        "rows are too long for an i32 index",
    )?;
    o.ensure(
        a.same_lengths(o.dst),
        "lengths of source and destination differ",
    )
}

/// The indices of the `dst.ne[0]` largest elements of each row, in any order.
pub(super) fn top_k(o: &Operation<'_>) -> Result<(), Refusal> {
    let a = o.src(0)?;
    o.ensure(o.dst.ty == Type::I32, "the destination is not i32")?;
    o.ensure(
        a.ne[0] <= i32::MAX as u64,
        "rows are too long for an i32 index",
    )?;
    o.ensure(
        o.dst.ne[0] <= a.ne[0] && o.dst.ne[1..] == a.ne[1..],
        "the destination has more elements than a row, or other rows",
    )
}
