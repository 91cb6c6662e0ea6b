//! Launches for several nodes, which fusion adds.
//!
//! Each function adds its launch. If its kernel does not take the operands or may not be used, the
//! function adds nothing and returns `None`. Results do not overlap operands, except `sum` and
//! `dst` of [`Norm`], which may have the memory of `a`, row by row.

use vgpu_transport::ir::Type;

use crate::launch::builder::Builder;
use crate::launch::grid::{div_ceil, threads_for};
use crate::launch::q8::Q8Activations;
use crate::params::*;
use vgpu_engine::EngineError;

type Added = Option<Result<(), EngineError>>;

/// RMS_NORM with the ADD before it and the MUL behind it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Norm {
    /// The result; `data` may be 0 if only `q8` is read.
    pub(crate) dst: VgView,
    /// The input. `add` is added if present, and the sum goes to `sum` if present.
    pub(crate) a: VgView,
    pub(crate) add: VgView,
    pub(crate) sum: VgView,
    /// The factor of the result, if present.
    pub(crate) w: VgView,
    pub(crate) eps: f32,
    /// Where the q8 result goes, if products need it.
    pub(crate) q8: Option<Q8Activations>,
}

/// RMS_NORM with the ADD before it and the MUL behind it.
pub(crate) fn norm(b: &mut Builder<'_>, it: &Norm) -> Added {
    let Norm {
        dst,
        a,
        add,
        sum,
        w,
        ..
    } = *it;
    let repeats = |v: &VgView| {
        v.data == 0
            || is_dense_f32(v, 16) && v.ne[0] == a.ne[0] && (1..4).all(|d| a.ne[d] % v.ne[d] == 0)
    };
    let is_like = |v: &VgView| v.data == 0 || is_dense_f32(v, 16) && v.ne == a.ne;
    let whole = if it.q8.is_some() { 32 } else { 4 };
    let fits = b.has("vg_norm_fused")
        && is_dense_f32(&a, 16)
        && a.ne[0] > 0
        && a.ne[0] % whole == 0
        && a.ne[0] <= i64::from(i32::MAX)
        && repeats(&add)
        && repeats(&w)
        && is_like(&sum)
        && is_like(&dst)
        && (dst.data != 0 || it.q8.is_some());
    if !fits {
        return None;
    }
    let params = VgNormFusedParams {
        dst,
        a,
        add,
        sum,
        w,
        quants: it.q8.map_or(0, |q8| q8.quants),
        scales: it.q8.map_or(0, |q8| q8.scales),
        eps: it.eps,
        has_constant_factors: u32::from(w.data != 0 && b.is_constant(&w)),
    };
    // A stage of a megakernel has blocks of 128 threads. The same number here gives the same order
    // of sums.
    let threads = match b.uses_megakernel() {
        true => threads_for(a.ne[0]).min(128),
        // A thread has four elements twice. Fewer threads would wait longer for memory; more would
        // issue more instructions than the row takes.
        false => (32 * div_ceil(a.ne[0], 256)).clamp(32, 1024) as u32,
    };
    Some(b.for_each_row("vg_norm_fused", a.rows(), threads, 0, &params))
}

/// ROPE, then SET_ROWS of its result with the heads of a token as one row.
#[derive(Clone, Copy)]
pub(crate) struct RopeRows {
    /// As for ROPE alone (see `rope::params`); `dst` is not written.
    pub(crate) rope: VgRopeParams,
    pub(crate) cache: VgView,
    /// The row of the cache for each token.
    pub(crate) ids: VgView,
}

/// ROPE, then SET_ROWS of its result.
pub(crate) fn rope_rows(b: &mut Builder<'_>, it: &RopeRows) -> Added {
    let RopeRows { rope, cache, ids } = *it;
    let src = &rope.src;
    let fits = b.has("vg_rope_rows")
        && [VG_F32, VG_F16, VG_BF16].contains(&cache.type_)
        && [VG_I32, VG_I64].contains(&ids.type_)
        && src.ne[3] == 1
        && cache.ne[0] == src.ne[0] * src.ne[1]
        && cache.ne[2..] == [1, 1]
        && ids.ne == [src.ne[2], 1, 1, 1];
    if !fits {
        return None;
    }
    let params = VgRopeRowsParams {
        rope,
        cache,
        ids,
        site: b.fault_site(),
    };
    let blocks = super::rope::blocks(&params.rope);
    Some(b.for_each_row("vg_rope_rows", blocks, super::rope::THREADS, 0, &params))
}

/// The experts of each token, and their weights.
#[derive(Clone, Copy)]
pub(crate) struct Route {
    /// `[experts, tokens]`, f32.
    pub(crate) logits: VgView,
    /// f32 for each expert, added for the choice only; may be absent.
    pub(crate) bias: VgView,
    /// `[used, tokens]` or longer rows, of which the first `used` are written; i32.
    pub(crate) ids: VgView,
    /// `[1, used, tokens]`, f32.
    pub(crate) weights: VgView,
    /// The gating function.
    pub(crate) op: VgGating,
    /// Whether weights are divided by their sum, or by this number if the sum is smaller.
    pub(crate) normalized: Option<f32>,
    /// The factor of the weights.
    pub(crate) scale: f32,
}

/// The most experts of `vg_topk_moe` and `vg_moe_sort`, and the most experts of a token of
/// `vg_topk_moe`.
pub(crate) const MAX_EXPERTS: i64 = 512;
const MAX_USED: i64 = 32;

/// SOFT_MAX or another gating function, TOP_K or ARGSORT, GET_ROWS, and the division by the sum.
pub(crate) fn route(b: &mut Builder<'_>, it: &Route) -> Added {
    let Route {
        logits,
        bias,
        ids,
        weights,
        ..
    } = *it;
    let [experts, tokens, ..] = logits.ne;
    let used = weights.ne[1];
    let fits = b.has("vg_topk_moe")
        && logits.type_ == VG_F32
        && weights.type_ == VG_F32
        && ids.type_ == VG_I32
        && (1..=MAX_EXPERTS).contains(&experts)
        && (1..=MAX_USED.min(experts)).contains(&used)
        && logits.ne[2..] == [1, 1]
        && weights.ne == [1, used, tokens, 1]
        && ids.ne[0] >= used
        && ids.ne[1..] == [tokens, 1, 1]
        && (bias.data == 0 || bias.is_dense(Type::F32) && bias.ne[0] == experts);
    if !fits {
        return None;
    }
    let params = VgTopkMoeParams {
        logits,
        ids,
        weights,
        bias: bias.data,
        min_sum: it.normalized.unwrap_or(0.0),
        scale: it.scale,
        used: used as u32,
        op: it.op,
        normalized: u32::from(it.normalized.is_some()),
        reserved: 0,
    };
    Some(b.for_each_row("vg_topk_moe", div_ceil(tokens, 4), 128, 0, &params))
}

/// The sum of the results of a token's experts, each times its weight.
#[derive(Clone, Copy)]
pub(crate) struct WeightedSum {
    /// `[n, tokens]`, f32.
    pub(crate) dst: VgView,
    /// `[n, used, tokens]`, f32.
    pub(crate) experts: VgView,
    /// `[1, used, tokens]`, f32.
    pub(crate) weights: VgView,
}

/// MUL, and the ADDs behind it.
pub(crate) fn weighted_sum(b: &mut Builder<'_>, it: &WeightedSum) -> Added {
    let WeightedSum {
        dst,
        experts,
        weights,
    } = *it;
    let [n, used, tokens, _] = experts.ne;
    let fits = b.has("vg_weighted_sum")
        && [dst, experts, weights].iter().all(|v| v.type_ == VG_F32)
        && dst.ne == [n, tokens, 1, 1]
        && experts.ne[3] == 1
        && weights.ne == [1, used, tokens, 1];
    if !fits {
        return None;
    }
    let params = VgWeightedSumParams {
        dst,
        experts,
        weights,
    };
    Some(b.for_each("vg_weighted_sum", dst.elements(), &params))
}

/// Whether rows are dense f32 with address and strides that are multiples of `alignment` bytes.
fn is_dense_f32(v: &VgView, alignment: i64) -> bool {
    v.type_ == VG_F32
        && v.nb[0] == 4
        && v.data.is_multiple_of(alignment as u64)
        && (1..4).all(|d| v.ne[d] == 1 || v.nb[d] % alignment == 0)
}

#[cfg(test)]
#[path = "fused_tests.rs"]
mod tests;
