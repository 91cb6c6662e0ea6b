//! Rotary position embedding and attention.

use super::operation::{Operation, Refusal};
use crate::ir::{RopeMode, Type};

/// ROPE: rotates pairs of elements of each row by angles proportional to the row's position.
pub(super) fn rope(
    o: &Operation<'_>,
    mode: RopeMode,
    n_dims: u32,
    n_offs: u32,
    sections: [i32; 4],
) -> Result<(), Refusal> {
    let (a, positions) = (o.src(0)?, o.src(1)?);
    let (n_dims, n_offs) = (u64::from(n_dims), u64::from(n_offs));
    o.ensure(
        a.same_lengths(o.dst) && a.ty == o.dst.ty,
        "source 0 and destination differ in lengths or type",
    )?;
    let ids_per_token = match mode {
        RopeMode::Normal | RopeMode::Neox => 1,
        RopeMode::Mrope | RopeMode::Imrope | RopeMode::Vision => 4,
    };
    o.ensure(
        positions.ty == Type::I32 && positions.is_contiguous() && positions.ne[1..] == [1, 1, 1],
        "positions are not a vector of i32",
    )?;
    o.ensure(
        a.ne[2].checked_mul(ids_per_token) == Some(positions.ne[0]),
        "the number of positions is not one per token (four for multi-dimensional positions)",
    )?;
    o.ensure(
        n_dims.is_multiple_of(2) && n_offs.is_multiple_of(2) && a.ne[0].is_multiple_of(2),
        "the number of rotated dimensions is odd",
    )?;
    o.ensure(
        n_offs + n_dims <= a.ne[0],
        "the rotated dimensions exceed the row",
    )?;
    let pairs = if mode == RopeMode::Vision {
        o.ensure(
            n_dims * 2 == a.ne[0] && n_offs == 0,
            "vision positions must rotate whole rows",
        )?;
        n_dims
    } else {
        n_dims / 2
    };
    if ids_per_token == 4 {
        let dims: i64 = sections.iter().copied().map(i64::from).sum();
        o.ensure(
            sections.iter().all(|&s| s >= 0) && dims > 0 && dims as u64 <= a.ne[0],
            "the sections exceed the row",
        )?;
    }
    if let Some(factors) = o.optional(2) {
        o.ensure(
            factors.ty == Type::F32 && factors.nb[0] == 4 && factors.ne[0] >= pairs,
            "the frequency factors are not one f32 per pair",
        )?;
    }
    Ok(())
}

/// `dst[:, h, q, s] = softmax(scale * K Q + slope * mask) V` for each head and sequence.
///
/// q: `[dk, n_q, n_head, n_seq]`, k: `[dk, n_kv, n_head_kv, n_seq_kv]`, v: `[dv, n_kv, n_head_kv,
/// n_seq_kv]`, mask: `[n_kv, n_q, ...]`, sinks: `[n_head]`, dst: `[dv, n_head, n_q, n_seq]`.
pub(super) fn flash_attn_ext(o: &Operation<'_>, max_bias: f32) -> Result<(), Refusal> {
    let (q, k, v) = (o.src(0)?, o.src(1)?, o.src(2)?);
    o.ensure(q.ty == Type::F32, "queries are not f32")?;
    o.ensure(
        q.has_dense_rows() && k.has_dense_rows() && v.has_dense_rows(),
        "rows of q, k or v are not dense",
    )?;
    o.ensure(q.ne[0] == k.ne[0], "queries and keys differ in length")?;
    o.ensure(k.ne[1] == v.ne[1], "the numbers of keys and values differ")?;
    o.ensure(
        k.ne[0] > 0 && v.ne[0] > 0 && k.ne[2] > 0 && k.ne[3] > 0,
        "keys or values are empty",
    )?;
    for kv in [k, v] {
        o.ensure(
            kv.ne[2] > 0
                && kv.ne[3] > 0
                && q.ne[2].is_multiple_of(kv.ne[2])
                && q.ne[3].is_multiple_of(kv.ne[3]),
            "keys or values do not repeat into the queries",
        )?;
    }
    o.ensure(
        o.dst.ne == [v.ne[0], q.ne[2], q.ne[1], q.ne[3]],
        "the destination has other lengths",
    )?;
    o.ensure(
        o.dst.ty == Type::F32 && o.dst.is_contiguous(),
        "the destination is not contiguous f32",
    )?;
    match o.optional(3) {
        Some(mask) => {
            o.ensure(
                mask.ty == Type::F16 && mask.has_dense_rows(),
                "the mask is not f16 with dense rows",
            )?;
            o.ensure(
                mask.ne[0] >= k.ne[1] && mask.ne[1] >= q.ne[1],
                "the mask is smaller than queries times keys",
            )?;
            o.ensure(
                mask.ne[2] > 0
                    && mask.ne[3] > 0
                    && q.ne[2].is_multiple_of(mask.ne[2])
                    && q.ne[3].is_multiple_of(mask.ne[3]),
                "the mask does not repeat into the queries",
            )?;
        }
        None => o.ensure(max_bias <= 0.0, "ALiBi without a mask")?,
    }
    if let Some(sinks) = o.optional(4) {
        o.ensure(
            sinks.ty == Type::F32 && sinks.is_contiguous() && sinks.ne == [q.ne[2], 1, 1, 1],
            "the sinks are not one f32 per head",
        )?;
    }
    Ok(())
}
