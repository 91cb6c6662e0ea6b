//! State-space and recurrent operators, and the mixers of DeepSeek V4.

use super::operation::{Operation, Refusal};
use crate::ir::{Shape, Type};

/// The product of lengths. `None` when it does not fit 64 bits.
fn product(lengths: &[u64]) -> Option<u64> {
    lengths.iter().try_fold(1u64, |n, &e| n.checked_mul(e))
}

/// Checks that all these tensors are contiguous `f32`.
fn contiguous(o: &Operation<'_>, tensors: &[&Shape]) -> Result<(), Refusal> {
    o.ensure(
        tensors
            .iter()
            .all(|t| t.ty == Type::F32 && t.is_contiguous()),
        "a tensor is not contiguous f32",
    )
}

/// Checks that all these tensors have dense rows of `f32`.
fn dense_rows(o: &Operation<'_>, tensors: &[&Shape]) -> Result<(), Refusal> {
    o.ensure(
        tensors
            .iter()
            .all(|t| t.ty == Type::F32 && t.has_dense_rows()),
        "a tensor does not have dense rows of f32",
    )
}

/// `dst[c, t, s] = sum_i src0[t + i, c, s] * src1[i, c]`
pub(super) fn ssm_conv(o: &Operation<'_>) -> Result<(), Refusal> {
    let (x, kernel) = (o.src(0)?, o.src(1)?);
    o.ensure(
        x.ne[3] == 1 && kernel.ne[2..] == [1, 1],
        "a source has too many dimensions",
    )?;
    o.ensure(
        x.ne[1] == kernel.ne[1],
        "the number of kernels is not one per channel",
    )?;
    let tokens = (x.ne[0] + 1).checked_sub(kernel.ne[0]);
    o.ensure(
        tokens.is_some_and(|t| o.dst.ne == [x.ne[1], t, x.ne[2], 1]),
        "the destination has other lengths",
    )
}

/// A selective scan. s: [d_state, dim, n_head, ...], x: [dim, n_head, n_tokens, n_seqs], dt:
/// [n_head, n_tokens, n_seqs], A: [d_state or 1, n_head], B, C: [d_state, n_group, n_tokens,
/// n_seqs], ids: `[n_seqs]`. dst: outputs with the lengths of x, then the states after the last
/// `snapshots` tokens.
pub(super) fn ssm_scan(o: &Operation<'_>, snapshots: u32) -> Result<(), Refusal> {
    let (s, x, dt, a) = (o.src(0)?, o.src(1)?, o.src(2)?, o.src(3)?);
    let (b, c, ids) = (o.src(4)?, o.src(5)?, o.src(6)?);
    let [dim, heads, tokens, seqs] = x.ne;
    let state = s.ne[0];
    contiguous(o, &[s, dt, a, o.dst])?;
    dense_rows(o, &[x, b, c])?;
    o.ensure(
        s.ne[1] == dim && s.ne[2] == heads,
        "states and source 1 differ in lengths",
    )?;
    o.ensure(
        dt.ne == [heads, tokens, seqs, 1],
        "the number of steps is not one per head and token",
    )?;
    o.ensure(b.same_lengths(c), "B and C differ in lengths")?;
    o.ensure(
        b.ne[0] == state && b.ne[2] == tokens && b.ne[3] == seqs,
        "B or C does not match the states and tokens",
    )?;
    o.ensure(
        b.ne[1] > 0 && heads.is_multiple_of(b.ne[1]),
        "groups do not divide the heads",
    )?;
    o.ensure(
        a.ne[1] == heads && a.ne[2..] == [1, 1] && (a.ne[0] == 1 || a.ne[0] == state),
        "A has other lengths",
    )?;
    o.ensure(
        snapshots == 1 || snapshots > 1 && a.ne[0] == 1,
        "a scan with one decay per state has snapshots",
    )?;
    o.ensure(
        ids.ty == Type::I32 && ids.ne == [seqs, 1, 1, 1],
        "the ids are not one i32 per sequence",
    )?;
    let states = product(&[snapshots.into(), state, dim, heads, seqs]);
    let total = states.zip(x.elements()).and_then(|(a, b)| a.checked_add(b));
    o.ensure(
        total.is_some_and(|n| o.dst.ne == [n, 1, 1, 1]),
        "the destination has other lengths",
    )
}

/// RWKV and gated linear attention: sources of [size, heads, tokens], a state of size * size per
/// head and sequence, and a destination of outputs followed by states.
pub(super) fn linear_attention(
    o: &Operation<'_>,
    per_token: &[usize],
    state: usize,
) -> Result<(), Refusal> {
    let (first, state) = (o.src(per_token[0])?, o.src(state)?);
    let [size, heads, tokens, _] = first.ne;
    let seqs = state.ne[1];
    for &i in per_token {
        let source = o.src(i)?;
        contiguous(o, &[source])?;
        o.ensure(
            source.ne == [size, heads, tokens, 1],
            "sources differ in lengths",
        )?;
    }
    contiguous(o, &[state, o.dst])?;
    o.ensure(
        product(&[size, size, heads, seqs]) == state.elements(),
        "the number of states is not one per head and sequence",
    )?;
    o.ensure(
        if seqs == 0 {
            tokens == 0
        } else {
            tokens.is_multiple_of(seqs)
        },
        "tokens do not divide into sequences",
    )?;
    let rows = product(&[size, seqs]).and_then(|n| n.checked_add(tokens));
    o.ensure(
        rows.zip(product(&[size, heads]))
            .is_some_and(|(rows, n)| o.dst.ne == [n, rows, 1, 1]),
        "the destination has other lengths",
    )
}

/// [`linear_attention`] with a bonus per head (`u` of RWKV), source 3.
pub(super) fn rwkv_wkv6(o: &Operation<'_>) -> Result<(), Refusal> {
    linear_attention(o, &[0, 1, 2, 4], 5)?;
    let (k, bonus) = (o.src(0)?, o.src(3)?);
    contiguous(o, &[bonus])?;
    o.ensure(
        bonus.elements() == product(&[k.ne[0], k.ne[1]]),
        "the bonus is not one value per element of a head",
    )
}

/// q, k: [size, ..., n_tokens, ...], v: [size, n_head, n_tokens, n_seqs], g: [1 or size, n_head,
/// n_tokens, n_seqs], beta: [1, n_head, n_tokens, n_seqs], state: [size, size, n_head, n_seqs].
/// dst: outputs with the lengths of v, then the states after the last `snapshots` tokens.
pub(super) fn gated_delta_net(o: &Operation<'_>, snapshots: u32) -> Result<(), Refusal> {
    let (q, k, v) = (o.src(0)?, o.src(1)?, o.src(2)?);
    let (g, beta, state) = (o.src(3)?, o.src(4)?, o.src(5)?);
    let [size, heads, tokens, seqs] = v.ne;
    dense_rows(o, &[q, k, v])?;
    contiguous(o, &[g, beta, state, o.dst])?;
    o.ensure(snapshots > 0, "the number of snapshots is 0")?;
    for source in [q, k] {
        o.ensure(
            source.ne[0] == size && source.ne[2] == tokens,
            "queries or keys do not match the values",
        )?;
        o.ensure(
            source.ne[1] > 0 && source.ne[3] > 0 && seqs.is_multiple_of(source.ne[3]),
            "queries or keys do not repeat into the values",
        )?;
    }
    o.ensure(
        (g.ne[0] == 1 || g.ne[0] == size) && g.ne[1..] == v.ne[1..],
        "the number of gates is not one per head and token",
    )?;
    o.ensure(
        beta.ne[0] == 1 && beta.ne[1..] == v.ne[1..],
        "the number of betas is not one per gate",
    )?;
    o.ensure(
        state.ne == [size, size, heads, seqs],
        "the state has other lengths",
    )?;
    let rows = || {
        let states = product(&[snapshots.into(), size, seqs])?;
        Some([
            product(&[size, heads])?,
            product(&[tokens, seqs])?.checked_add(states)?,
            1,
            1,
        ])
    };
    o.ensure(
        rows() == Some(o.dst.ne),
        "the destination has other lengths",
    )
}

/// `src0 * dst = src1` for lower triangular matrices src0.
pub(super) fn solve_tri(o: &Operation<'_>) -> Result<(), Refusal> {
    let (a, b) = (o.src(0)?, o.src(1)?);
    dense_rows(o, &[a, b, o.dst])?;
    o.ensure(a.ne[0] == a.ne[1], "source 0 is not square")?;
    o.ensure(a.ne[1..] == b.ne[1..], "sources differ in rows or batches")?;
    o.ensure(
        b.same_lengths(o.dst),
        "lengths of source 1 and destination differ",
    )
}

/// The number of streams of DSV4_HC_COMB.
const STREAMS: u64 = 4;

/// mixes: `[24, n_tokens]`, scale: at least 3, base: `[24]`, dst: `[4, 4, n_tokens]`.
pub(super) fn dsv4_hc_comb(o: &Operation<'_>, n_iter: u32) -> Result<(), Refusal> {
    let (mixes, scale, base) = (o.src(0)?, o.src(1)?, o.src(2)?);
    let factors = (2 + STREAMS) * STREAMS;
    o.ensure(
        (1..=MAX_ITERATIONS).contains(&n_iter),
        "the number of iterations is 0 or too large",
    )?;
    o.ensure(
        mixes.ne[0] == factors && mixes.ne[2..] == [1, 1],
        "the mixes do not have four streams",
    )?;
    o.ensure(
        scale.ne[0] >= 3 && scale.ne[1..] == [1, 1, 1],
        "the number of scales is less than three",
    )?;
    o.ensure(base.ne == [factors, 1, 1, 1], "the base has other lengths")?;
    o.ensure(
        o.dst.ne == [STREAMS, STREAMS, mixes.ne[1], 1],
        "the destination has other lengths",
    )
}

/// The maximum number of normalisations. More have no effect on the result, and would let a guest
/// block the engine.
const MAX_ITERATIONS: u32 = 1 << 16;

/// `dst[:, t] = scale * sum_h x[:, h, t] * w[h, t]`, or with one gate per element.
pub(super) fn dsv4_hc_pre(o: &Operation<'_>, gated: bool) -> Result<(), Refusal> {
    let (x, w) = (o.src(0)?, o.src(1)?);
    let [n, streams, tokens, _] = x.ne;
    o.ensure(x.ne[3] == 1, "source 0 has too many dimensions")?;
    o.ensure(
        if gated {
            w.ne == [n, streams, tokens, 1]
        } else {
            w.ne == [streams, tokens, 1, 1]
        },
        "the number of weights is not one per stream",
    )?;
    o.ensure(
        o.dst.ne == [n, tokens, 1, 1],
        "the destination has other lengths",
    )
}

/// `dst[:, d, t] = x[:, t] * post[d, t] + sum_s residual[:, s, t] * comb[d, s, t]`
pub(super) fn dsv4_hc_post(o: &Operation<'_>) -> Result<(), Refusal> {
    let (x, residual, post) = (o.src(0)?, o.src(1)?, o.src(2)?);
    let (n, tokens, streams) = (x.ne[0], x.ne[1], residual.ne[1]);
    o.ensure(x.ne[2..] == [1, 1], "source 0 has too many dimensions")?;
    o.ensure(
        residual.ne == [n, streams, tokens, 1],
        "the residual has other lengths",
    )?;
    o.ensure(
        post.ne == [streams, tokens, 1, 1],
        "there is not one factor for each stream",
    )?;
    if let Some(comb) = o.optional(3) {
        o.ensure(comb.ty == Type::F32, "the combination is not f32")?;
        o.ensure(
            comb.ne == [streams, streams, tokens, 1],
            "the combination has other lengths",
        )?;
    }
    o.ensure(
        o.dst.ne == [n, streams, tokens, 1],
        "the destination has other lengths",
    )
}

/// `dst[i, t, s] = sum_h max(0, q[:, h, t, s] * k[:, i, s]) * w[h, t, s] + mask[i, t, s]`
pub(super) fn lightning_indexer(o: &Operation<'_>) -> Result<(), Refusal> {
    let (q, k, w, mask) = (o.src(0)?, o.src(1)?, o.src(2)?, o.src(3)?);
    let [n, heads, tokens, streams] = q.ne;
    o.ensure(mask.ty == Type::F16, "the mask is not f16")?;
    o.ensure(n > 0 && heads > 0, "queries are empty")?;
    dense_rows(o, &[q])?;
    o.ensure(heads > 0, "queries have no heads")?;
    o.ensure(k.has_dense_rows(), "rows of keys are not dense")?;
    o.ensure(
        k.ne[0] == n && k.ne[1] == 1 && k.ne[3] == streams,
        "keys do not fit the queries",
    )?;
    o.ensure(
        w.ne == [heads, tokens, 1, streams],
        "there is not one weight for each query",
    )?;
    o.ensure(
        mask.ne[..3] == [k.ne[2], tokens, 1]
            && (streams == 0 || mask.ne[3] > 0 && streams.is_multiple_of(mask.ne[3])),
        "the mask does not fit queries and keys",
    )?;
    o.ensure(
        o.dst.ne == [k.ne[2], tokens, 1, streams],
        "the destination has other lengths",
    )
}
