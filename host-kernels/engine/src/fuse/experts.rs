//! Groups of a mixture of experts: routing, and the weighted sum of the results.

use vgpu_transport::ir::{Op, SortOrder, Tensor, Type};

use super::finder::{Finder, FusionKind, Group, is_apart, is_f32, is_reshaped, is_same};

/// SOFT_MAX, ARGSORT (or TOP_K), GET_ROWS, possibly SUM_ROWS, CLAMP and DIV, possibly SCALE.
pub(super) fn route(finder: &Finder<'_>, soft_max: usize) -> Option<Group> {
    let (logits, probabilities) = (finder.src(soft_max, 0)?, finder.dst(soft_max));
    if !is_plain_soft_max(finder, soft_max)
        || !is_f32(logits)
        || !probabilities.shape.is_contiguous()
    {
        return None;
    }
    let sort = finder.next(soft_max, is_by_size)?;
    let rows = finder.next(sort, |op| matches!(op, Op::GetRows {}))?;
    let (each, ids) = (finder.src(rows, 0)?, finder.src(rows, 1)?);
    let [experts, tokens, ..] = logits.shape.ne;
    let used = ids.shape.ne[0];
    let sorted = finder.dst(sort);
    let is_routed = is_same(finder.src(sort, 0)?, probabilities)
        && is_reshaped(each, probabilities)
        && each.shape.ne == [1, experts, tokens, 1]
        && (ids.buffer, ids.offset) == (sorted.buffer, sorted.offset)
        && ids.shape.ne == [used, tokens, 1, 1]
        && ids.shape.nb[..2] == sorted.shape.nb[..2]
        && finder.dst(rows).shape.ne == [1, used, tokens, 1];
    if !is_routed {
        return None;
    }
    let mut nodes = vec![soft_max, sort, rows];
    let mut weights = finder.dst(rows);
    if let Some([sum, clamp, div]) = normalised(finder, rows, used, tokens) {
        nodes.extend([sum, clamp, div]);
        weights = finder.dst(div);
    }
    let last = *nodes.last()?;
    if let Some(scale) = finder.next(last, |op| matches!(op, Op::Scale { bias: 0.0, .. }))
        && is_reshaped(finder.src(scale, 0)?, weights)
    {
        nodes.push(scale);
        weights = finder.dst(scale);
    }
    let place = *nodes.last()?;
    // Only the weights and the chosen ids are stored; all other results must be dead.
    let left_out = { nodes.iter() }.filter(|&&at| at != place && at != sort);
    let fits = weights.shape.ty == Type::F32
        && weights.shape.is_contiguous()
        && is_apart(ids, weights)
        && is_apart(ids, logits)
        && is_apart(weights, logits)
        && { left_out }.all(|&at| finder.is_dead(at, &nodes))
        && finder.is_dead_but(sort, &nodes, ids)
        && finder.can_be_at(&nodes, place);
    fits.then_some(Group {
        kind: FusionKind::Route,
        nodes,
        place,
    })
}

/// ARGSORT (or TOP_K) of logits, GET_ROWS of the chosen logits, SOFT_MAX of them, as in gpt-oss.
pub(super) fn route_first(finder: &Finder<'_>, sort: usize) -> Option<Group> {
    if !is_by_size(&finder.node(sort).op) {
        return None;
    }
    let (logits, sorted) = (finder.src(sort, 0)?, finder.dst(sort));
    let rows = finder.next(sort, |op| matches!(op, Op::GetRows {}))?;
    let soft_max = finder.next(rows, |op| matches!(op, Op::SoftMax { .. }))?;
    let (each, ids) = (finder.src(rows, 0)?, finder.src(rows, 1)?);
    let [experts, tokens, ..] = logits.shape.ne;
    let used = ids.shape.ne[0];
    let weights = finder.dst(soft_max);
    let nodes = vec![sort, rows, soft_max];
    let fits = is_f32(logits)
        && is_plain_soft_max(finder, soft_max)
        && is_reshaped(each, logits)
        && each.shape.ne == [1, experts, tokens, 1]
        && (ids.buffer, ids.offset) == (sorted.buffer, sorted.offset)
        && ids.shape.ne == [used, tokens, 1, 1]
        && ids.shape.nb[..2] == sorted.shape.nb[..2]
        && finder.dst(rows).shape.ne == [1, used, tokens, 1]
        && is_reshaped(finder.src(soft_max, 0)?, finder.dst(rows))
        && weights.shape.ne == [used, tokens, 1, 1]
        && weights.shape.ty == Type::F32
        && weights.shape.is_contiguous()
        && is_apart(ids, weights)
        && is_apart(ids, logits)
        && is_apart(weights, logits)
        && finder.is_dead(rows, &nodes)
        && finder.is_dead_but(sort, &nodes, ids)
        && finder.can_be_at(&nodes, soft_max);
    fits.then_some(Group {
        kind: FusionKind::Route,
        nodes,
        place: soft_max,
    })
}

/// Whether the operator sorts in descending order.
fn is_by_size(op: &Op) -> bool {
    matches!(
        op,
        Op::TopK {}
            | Op::Argsort {
                order: SortOrder::Descending
            }
    )
}

/// Whether a SOFT_MAX has no scale, no mask and no sinks.
fn is_plain_soft_max(finder: &Finder<'_>, at: usize) -> bool {
    let Op::SoftMax { scale, max_bias } = finder.node(at).op else {
        return false;
    };
    let is_plain = scale == 1.0 && max_bias == 0.0;
    is_plain && finder.src(at, 1).is_none() && finder.src(at, 2).is_none()
}

/// SUM_ROWS, CLAMP and DIV: a token's weights divided by their sum.
fn normalised(finder: &Finder<'_>, rows: usize, used: u64, tokens: u64) -> Option<[usize; 3]> {
    let weights = finder.dst(rows);
    let sum = finder.next(rows, |op| matches!(op, Op::SumRows {}))?;
    let clamp = finder.next(
        sum,
        |op| matches!(op, Op::Clamp { max, .. } if *max == f32::INFINITY),
    )?;
    let div = finder.next(clamp, |op| matches!(op, Op::Div {}))?;
    let summed = finder.src(sum, 0)?;
    let fits = is_reshaped(summed, weights)
        && summed.shape.ne == [used, tokens, 1, 1]
        && is_same(finder.src(clamp, 0)?, finder.dst(sum))
        && is_same(finder.src(div, 0)?, summed)
        && is_same(finder.src(div, 1)?, finder.dst(clamp));
    fits.then_some([sum, clamp, div])
}

/// The most experts of a token whose weighted sum is fused.
const MAX_SLOTS: u64 = 64;

/// MUL of the results of experts with their weights, and ADDs over a token's slots in order.
pub(super) fn weighted_sum(finder: &Finder<'_>, mul: usize) -> Option<Group> {
    let (experts, weights) = (finder.src(mul, 0)?, finder.src(mul, 1)?);
    let product = finder.dst(mul);
    let [n, used, tokens, one] = product.shape.ne;
    let shapes = experts.shape.ne == product.shape.ne
        && weights.shape.ne == [1, used, tokens, 1]
        && one == 1;
    if !shapes
        || !(2..=MAX_SLOTS).contains(&used)
        || !is_f32(experts)
        || !is_f32(product)
        || weights.shape.ty != Type::F32
    {
        return None;
    }
    let is_slot = |tensor: &Tensor, slot: u64| {
        tensor.buffer == product.buffer
            && tensor.offset == product.offset + slot * product.shape.nb[1]
            && tensor.shape.ty == Type::F32
            && tensor.shape.ne == [n, tokens, 1, 1]
            && tensor.shape.nb[0] == 4
            && (tokens == 1 || tensor.shape.nb[1] == product.shape.nb[2])
    };
    let mut nodes = vec![mul];
    for slot in 1..used {
        let before = *nodes.last()?;
        let add = finder.next(before, |op| matches!(op, Op::Add {}))?;
        let (a, b) = (finder.src(add, 0)?, finder.src(add, 1)?);
        let goes_on = match slot {
            1 => is_slot(a, 0),
            _ => is_same(a, finder.dst(before)),
        };
        if !goes_on || !is_slot(b, slot) {
            return None;
        }
        nodes.push(add);
    }
    let place = *nodes.last()?;
    let dst = finder.dst(place);
    let (_, left_out) = nodes.split_last()?;
    let fits = is_f32(dst)
        && is_apart(dst, experts)
        && is_apart(dst, weights)
        && left_out.iter().all(|&at| finder.is_dead(at, &nodes))
        && finder.can_be_at(&nodes, place);
    fits.then_some(Group {
        kind: FusionKind::WeightedSum,
        nodes,
        place,
    })
}
