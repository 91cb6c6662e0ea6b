//! Groups of products of the same activations: Q, K and V; gate and up with their unit.

use vgpu_transport::ir::{GluKind, Op, Tensor};

use super::{Finder, Group, Kind, is_apart, is_same};

/// Most columns of activations.
const FEW_COLUMNS: u64 = 8;

/// Most products of a group.
const MOST: usize = 3;

/// The weights, activations and ids of a product of few columns.
fn operands<'g>(
    finder: &Finder<'g>,
    at: usize,
) -> Option<(&'g Tensor, &'g Tensor, Option<&'g Tensor>)> {
    let (w, x) = (finder.src(at, 0)?, finder.src(at, 1)?);
    let [_, columns, n2, n3] = finder.dst(at).shape.ne;
    match finder.node(at).op {
        Op::MulMat { hadamard, .. } => {
            let few = columns <= FEW_COLUMNS && n2 == 1 && n3 == 1;
            (few && !hadamard).then_some((w, x, None))
        }
        // Of many tokens, each expert's weights are read once for all of its own.
        Op::MulMatId { .. } => (n2 <= FEW_COLUMNS).then_some((w, x, Some(finder.src(at, 2)?))),
        _ => None,
    }
}

/// Whether node `b` multiplies what `a` multiplies, with weights of the same type.
fn is_sibling(finder: &Finder<'_>, a: usize, b: usize) -> bool {
    let (Some(one), Some(other)) = (operands(finder, a), operands(finder, b)) else {
        return false;
    };
    let ((w, x, ids), (other_w, other_x, other_ids)) = (one, other);
    let same_ids = match (ids, other_ids) {
        (None, None) => true,
        (Some(ids), Some(other)) => is_same(ids, other),
        _ => false,
    };
    is_same(x, other_x)
        && same_ids
        && w.shape.ty == other_w.shape.ty
        && w.shape.ne[0] == other_w.shape.ne[0]
}

/// Whether what a launch writes is apart from what it reads, and from what else it writes.
fn is_clean(finder: &Finder<'_>, products: &[usize], results: &[&Tensor]) -> bool {
    let mut inputs = { products.iter() }
        .filter_map(|&at| operands(finder, at))
        .flat_map(|(w, x, ids)| [Some(w), Some(x), ids].into_iter().flatten());
    let from_inputs = inputs.all(|input| results.iter().all(|result| is_apart(result, input)));
    let mut pairs = results.iter().enumerate();
    from_inputs && pairs.all(|(i, a)| results[i + 1..].iter().all(|b| is_apart(a, b)))
}

/// Two or three products of the same activations.
pub(super) fn products(finder: &Finder<'_>, first: usize) -> Option<Group> {
    operands(finder, first)?;
    let mut nodes = vec![first];
    for at in finder.ahead(first) {
        if nodes.len() == MOST {
            break;
        }
        // Those that a unit gates come with it.
        if !is_sibling(finder, first, at) || unit_of(finder, at).is_some() {
            continue;
        }
        let mut more = nodes.clone();
        more.push(at);
        let results: Vec<&Tensor> = more.iter().map(|&at| finder.dst(at)).collect();
        if is_clean(finder, &more, &results) && finder.can_be_at(&more, first) {
            nodes = more;
        }
    }
    (nodes.len() > 1).then_some(Group {
        kind: Kind::Products,
        nodes,
        place: first,
    })
}

/// The unit that a product goes into, not far away.
fn unit_of(finder: &Finder<'_>, product: usize) -> Option<usize> {
    let result = finder.dst(product);
    finder.ahead(product).find(|&at| {
        let fused = [
            GluKind::Reglu,
            GluKind::Geglu,
            GluKind::Swiglu,
            GluKind::SwigluOai,
        ];
        matches!(finder.node(at).op, Op::Glu { kind, swapped: false, .. } if fused.contains(&kind))
            && (0..2).any(|i| finder.src(at, i).is_some_and(|src| is_same(src, result)))
    })
}

/// Two products and the unit that gates the second with the first. The group's first node is the one that is activated.
pub(super) fn gated(finder: &Finder<'_>, first: usize) -> Option<Group> {
    operands(finder, first)?;
    let unit = unit_of(finder, first)?;
    let (gate, up) = (finder.src(unit, 0)?, finder.src(unit, 1)?);
    let second = finder.ahead(first).find(|&at| {
        let result = finder.dst(at);
        let (mine, is_other) = (
            finder.dst(first),
            at < unit && is_sibling(finder, first, at),
        );
        is_other
            && (is_same(mine, gate) && is_same(result, up)
                || is_same(mine, up) && is_same(result, gate))
    })?;
    let nodes = vec![first, second, unit];
    let fits = finder.dst(first).shape == finder.dst(second).shape
        && finder.src(first, 0)?.shape == finder.src(second, 0)?.shape
        && finder.is_dead(first, &nodes)
        && finder.is_dead(second, &nodes)
        && is_clean(finder, &nodes[..2], &[finder.dst(unit)])
        && finder.can_be_at(&nodes, first);
    fits.then_some(Group {
        kind: Kind::Gated,
        nodes,
        place: first,
    })
}
