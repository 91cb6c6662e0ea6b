//! Groups of operations on rows: a norm with its ADD and MUL, and ROPE with its SET_ROWS.

use vgpu_transport::ir::Op;

use super::finder::{
    Finder, FusionKind, Group, is_apart, is_apart_or_in_place, is_f32, is_reshaped, is_same,
};

/// Consecutive ADD, RMS_NORM and MUL; ADD and MUL are optional.
pub(super) fn norm(finder: &Finder<'_>, first: usize) -> Option<Group> {
    if !matches!(finder.node(first).op, Op::Add {} | Op::RmsNorm { .. }) {
        return None;
    }
    let is_norm = |op: &Op| matches!(op, Op::RmsNorm { .. });
    let (add, norm) = match is_norm(&finder.node(first).op) {
        true => (None, first),
        false => (Some(first), finder.next(first, is_norm)?),
    };
    let x = finder.src(norm, 0)?;
    let mut inputs = vec![x];
    let mut outputs = Vec::new();
    if let Some(add) = add {
        let (a, b, sum) = (finder.src(add, 0)?, finder.src(add, 1)?, finder.dst(add));
        let lengths = sum.shape.ne;
        if !is_same(sum, x) || a.shape.ne != lengths || b.shape.ne != lengths {
            return None;
        }
        inputs = vec![a, b];
        outputs.push(sum);
    }
    let normed = finder.dst(norm);
    let mut nodes: Vec<usize> = add.into_iter().chain([norm]).collect();
    let mul = finder
        .next(norm, |op| matches!(op, Op::Mul {}))
        .filter(|&mul| {
            let (Some(a), Some(b)) = (finder.src(mul, 0), finder.src(mul, 1)) else {
                return false;
            };
            let row = [normed.shape.ne[0], 1, 1, 1];
            is_same(a, normed)
                && b.shape.ne == row
                && is_f32(b)
                && is_apart(finder.dst(mul), b)
                && finder.is_dead(norm, &[mul])
        });
    let result = match mul {
        Some(mul) => {
            inputs.push(finder.src(mul, 1)?);
            nodes.push(mul);
            finder.dst(mul)
        }
        None => normed,
    };
    outputs.push(result);
    let fits = inputs.iter().chain(&outputs).all(|tensor| is_f32(tensor))
        && { outputs.iter() }.all(|o| inputs.iter().all(|i| is_apart_or_in_place(o, i)))
        && (outputs.len() == 1 || is_apart(outputs[0], outputs[1]));
    (nodes.len() > 1 && fits).then_some(Group {
        kind: FusionKind::Norm,
        place: nodes[0],
        nodes,
    })
}

/// ROPE and the SET_ROWS that stores its result in the KV cache.
pub(super) fn rope_rows(finder: &Finder<'_>, rope: usize) -> Option<Group> {
    let turned = finder.dst(rope);
    let rows = finder.ahead(rope).find(|&at| {
        matches!(finder.node(at).op, Op::SetRows {})
            && finder
                .src(at, 0)
                .is_some_and(|src| is_reshaped(src, turned))
    })?;
    let nodes = vec![rope, rows];
    let [width, heads, tokens, one] = turned.shape.ne;
    let cache = finder.dst(rows);
    let inputs = [
        finder.src(rope, 0),
        finder.src(rope, 1),
        finder.src(rope, 2),
        finder.src(rows, 1),
    ];
    let fits = finder.src(rows, 0)?.shape.ne == [width * heads, tokens, 1, 1]
        && one == 1
        && inputs.iter().flatten().all(|input| is_apart(cache, input))
        && finder.is_dead(rope, &[rows])
        && finder.can_be_at(&nodes, rows);
    fits.then_some(Group {
        kind: FusionKind::RopeRows,
        nodes,
        place: rows,
    })
}
