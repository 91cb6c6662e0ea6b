//! Matrix products.

use super::operation::{Operation, Refusal};
use crate::ir::{Shape, Type};

/// Whether `a` broadcasts to `b` in the two outer dimensions.
fn batches(a: &Shape, b: &Shape) -> bool {
    (2..4).all(|d| {
        if a.ne[d] == 0 {
            b.ne[d] == 0
        } else {
            b.ne[d].is_multiple_of(a.ne[d])
        }
    })
}

/// `dst[m, n, i, j] = sum_k src0[k, m, i / r2, j / r3] * src1[k, n, i, j]`.
pub(super) fn mul_mat(o: &Operation<'_>, hadamard: bool) -> Result<(), Refusal> {
    let (a, b) = (o.src(0)?, o.src(1)?);
    o.ensure(
        a.ne[0] == b.ne[0],
        "rows of the two sources differ in length",
    )?;
    o.ensure(batches(a, b), "source 0 does not repeat into source 1")?;
    o.ensure(
        o.dst.ne == [a.ne[1], b.ne[1], b.ne[2], b.ne[3]],
        "the destination has other lengths",
    )?;
    o.ensure(a.has_dense_rows(), "rows of source 0 are not dense")?;
    o.ensure(
        !hadamard || a.ne[0].is_power_of_two(),
        "the size of a Hadamard matrix is not a power of two",
    )?;
    o.ensure(
        o.dst.ty == Type::F32 && o.dst.has_dense_rows(),
        "the destination is not f32 with dense rows",
    )
}

/// `dst[:, u, t] = src0[:, :, ids[u, t]] * src1[:, u % n_b, t]`.
pub(super) fn mul_mat_id(o: &Operation<'_>) -> Result<(), Refusal> {
    let (experts, b, ids) = (o.src(0)?, o.src(1)?, o.src(2)?);
    o.ensure(ids.ty == Type::I32, "ids are not i32")?;
    o.ensure(
        experts.ne[3] == 1 && b.ne[3] == 1 && ids.ne[2..] == [1, 1],
        "a source has too many dimensions",
    )?;
    o.ensure(
        experts.ne[0] == b.ne[0],
        "rows of the two sources differ in length",
    )?;
    o.ensure(
        b.ne[2] == ids.ne[1],
        "the number of rows of ids is not one per token",
    )?;
    o.ensure(
        if b.ne[1] == 0 {
            ids.ne[0] == 0
        } else {
            ids.ne[0].is_multiple_of(b.ne[1])
        },
        "source 1 does not broadcast to the used experts",
    )?;
    o.ensure(
        o.dst.ne == [experts.ne[1], ids.ne[0], ids.ne[1], 1],
        "the destination has other lengths",
    )?;
    o.ensure(experts.has_dense_rows(), "rows of source 0 are not dense")?;
    o.ensure(
        o.dst.ty == Type::F32 && o.dst.has_dense_rows(),
        "the destination is not f32 with dense rows",
    )
}

/// `dst[m, n, i, j] = sum_k src0[m, k, i / r2, j / r3] * src1[n, k, i, j]`.
pub(super) fn out_prod(o: &Operation<'_>) -> Result<(), Refusal> {
    let (a, b) = (o.src(0)?, o.src(1)?);
    o.ensure(
        a.ne[1] == b.ne[1],
        "the two sources have different numbers of rows",
    )?;
    o.ensure(batches(a, b), "source 0 does not repeat into source 1")?;
    o.ensure(
        o.dst.ne == [a.ne[0], b.ne[0], b.ne[2], b.ne[3]],
        "the destination has other lengths",
    )?;
    o.ensure(
        o.dst.ty == Type::F32 && o.dst.has_dense_rows(),
        "the destination is not f32 with dense rows",
    )
}
