//! Groups of products of the same activations, each with an optional bias: Q, K and V; gate and up
//! with their GLU.

use vgpu_transport::ir::{GluKind, Op, Tensor};

use super::finder::{Finder, FusionKind, Group, is_apart, is_f32, is_same};
use super::rows;

/// The maximum number of tokens in a group of MUL_MAT_IDs. With more tokens, each expert's weights
/// are read once for all of its tokens.
const MAX_EXPERT_TOKENS: u64 = 8;

/// The maximum number of products in a group.
const MAX_PRODUCTS: usize = 3;

/// The weights, activations and ids of a product that can be in a group.
fn operands<'g>(
    finder: &Finder<'g>,
    at: usize,
) -> Option<(&'g Tensor, &'g Tensor, Option<&'g Tensor>)> {
    let (w, x) = (finder.src(at, 0)?, finder.src(at, 1)?);
    let [_, columns, n2, n3] = finder.dst(at).shape.ne;
    match finder.node(at).op {
        Op::MulMat { hadamard, .. } => {
            let is_plain = columns <= finder.max_columns && n2 == 1 && n3 == 1;
            (is_plain && !hadamard).then_some((w, x, None))
        }
        Op::MulMatId { .. } => {
            (n2 <= MAX_EXPERT_TOKENS).then_some((w, x, Some(finder.src(at, 2)?)))
        }
        _ => None,
    }
}

/// Whether nodes `a` and `b` multiply the same activations with weights of the same type, with the
/// same demand on the type of the activations.
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
    let demand = |node: usize| finder.node(node).op.activation_precision();
    is_same(x, other_x)
        && same_ids
        && demand(a) == demand(b)
        && w.shape.ty == other_w.shape.ty
        && w.shape.ne[0] == other_w.shape.ne[0]
}

/// A product, and the node that adds a bias to it, if no other node reads the product.
#[derive(Debug, Clone, Copy)]
struct Term {
    product: usize,
    add: Option<usize>,
}

impl Term {
    fn of(finder: &Finder<'_>, product: usize) -> Term {
        let result = finder.dst(product);
        let (w, ids) = match operands(finder, product) {
            Some((w, _, ids)) => (w, ids),
            None => return Term { product, add: None },
        };
        let row = [result.shape.ne[0], 1, 1, 1];
        let adds = |at: &usize| {
            let (Some(a), Some(bias)) = (finder.src(*at, 0), finder.src(*at, 1)) else {
                return false;
            };
            let is_bias = match (finder.node(*at).op, ids) {
                (Op::Add {}, None) => bias.shape.ne == row,
                (Op::AddId {}, Some(ids)) => {
                    let same_ids = finder.src(*at, 2).is_some_and(|other| is_same(ids, other));
                    same_ids && bias.shape.ne == [row[0], w.shape.ne[2], 1, 1]
                }
                _ => false,
            };
            is_bias
                && is_same(a, result)
                && is_f32(bias)
                && is_f32(finder.dst(*at))
                && finder.dst(*at).shape.ne == result.shape.ne
        };
        let add = { finder.ahead(product).find(adds) }.filter(|&add| {
            let nodes = [product, add];
            // A sum that is normed next is fused with the norm. With one token, the residual is a
            // row and looks like a bias.
            let is_plain = rows::norm(finder, add).is_none();
            is_plain && finder.is_dead(product, &nodes) && finder.can_be_at(&nodes, product)
        });
        Term { product, add }
    }

    fn nodes(self) -> impl Iterator<Item = usize> {
        std::iter::once(self.product).chain(self.add)
    }

    /// The destinations of its nodes.
    fn places<'g>(self, finder: &Finder<'g>) -> impl Iterator<Item = &'g Tensor> {
        let graph = finder.graph();
        self.nodes().map(|at| graph.dst(&graph.nodes[at]))
    }

    /// The final result of the group.
    fn result<'g>(&self, finder: &Finder<'g>) -> &'g Tensor {
        finder.dst(self.add.unwrap_or(self.product))
    }
}

/// The nodes of several terms, in order.
fn nodes_of(terms: &[Term]) -> Vec<usize> {
    let mut nodes: Vec<usize> = terms.iter().flat_map(|term| term.nodes()).collect();
    nodes.sort_unstable();
    nodes
}

/// Whether the results of a fused kernel overlap neither its inputs nor each other, and the results
/// that it does not store do not overlap its inputs. Otherwise, node by node, a product would read
/// what the product before it has written.
fn is_clean(finder: &Finder<'_>, terms: &[Term], results: &[&Tensor]) -> bool {
    let mut inputs = { terms.iter() }.flat_map(|term| {
        let operands = operands(finder, term.product);
        let operands = operands.map_or([None; 3], |(w, x, ids)| [Some(w), Some(x), ids]);
        let bias = term.add.and_then(|add| finder.src(add, 1));
        operands.into_iter().chain([bias]).flatten()
    });
    let places = { terms.iter() }.flat_map(|term| term.places(finder));
    let written: Vec<&Tensor> = places.chain(results.iter().copied()).collect();
    let from_inputs = inputs.all(|input| written.iter().all(|place| is_apart(place, input)));
    let mut pairs = results.iter().enumerate();
    from_inputs && pairs.all(|(i, a)| results[i + 1..].iter().all(|b| is_apart(a, b)))
}

/// Whether all products that a bias is added to are dead without the bias.
fn are_dead(finder: &Finder<'_>, terms: &[Term], nodes: &[usize]) -> bool {
    let mut with_rows = terms.iter().filter(|term| term.add.is_some());
    with_rows.all(|term| finder.is_dead(term.product, nodes))
}

/// Up to [`MAX_PRODUCTS`] products of the same activations, or one product and its bias.
pub(super) fn products(finder: &Finder<'_>, first: usize) -> Option<Group> {
    operands(finder, first)?;
    let mut terms = vec![Term::of(finder, first)];
    if !fits(finder, &terms, first) {
        terms[0].add = None;
    }
    for at in finder.ahead(first) {
        if terms.len() == MAX_PRODUCTS {
            break;
        }
        if !is_sibling(finder, first, at) {
            continue;
        }
        let term = Term::of(finder, at);
        // A product that a GLU reads is fused with the GLU.
        if unit_of(finder, &term).is_some() {
            continue;
        }
        for add in [term.add, None] {
            let mut more = terms.clone();
            more.push(Term { add, ..term });
            if fits(finder, &more, first) {
                terms = more;
                break;
            }
        }
    }
    let nodes = nodes_of(&terms);
    (nodes.len() > 1).then_some(Group {
        kind: FusionKind::Products,
        nodes,
        place: first,
    })
}

/// Whether one kernel at the place of node `first` can compute the terms.
fn fits(finder: &Finder<'_>, terms: &[Term], first: usize) -> bool {
    let nodes = nodes_of(terms);
    let results: Vec<&Tensor> = terms.iter().map(|term| term.result(finder)).collect();
    is_clean(finder, terms, &results)
        && are_dead(finder, terms, &nodes)
        && finder.can_be_at(&nodes, first)
}

/// The GLU that reads the result of a term, among the next nodes.
fn unit_of(finder: &Finder<'_>, term: &Term) -> Option<usize> {
    let result = term.result(finder);
    let last = term.add.unwrap_or(term.product);
    finder.ahead(last).find(|&at| {
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

/// Two products and the GLU of both. The first node of the group is the earlier product.
pub(super) fn gated(finder: &Finder<'_>, first: usize) -> Option<Group> {
    operands(finder, first)?;
    let one = Term::of(finder, first);
    let unit = unit_of(finder, &one)?;
    let (gate, up) = (finder.src(unit, 0)?, finder.src(unit, 1)?);
    let mine = one.result(finder);
    let siblings = { finder.ahead(first) }.filter(|&at| at < unit && is_sibling(finder, first, at));
    let other = { siblings.map(|at| Term::of(finder, at)) }.find(|term| {
        let result = term.result(finder);
        let is_before = term.add.is_none_or(|add| add < unit);
        is_before
            && (is_same(mine, gate) && is_same(result, up)
                || is_same(mine, up) && is_same(result, gate))
    })?;
    let second = other.product;
    let terms = [one, other];
    let mut nodes = nodes_of(&terms);
    nodes.push(unit);
    let left_out = nodes.iter().filter(|&&at| at != unit);
    let fits = finder.dst(first).shape == finder.dst(second).shape
        && finder.src(first, 0)?.shape == finder.src(second, 0)?.shape
        && { left_out }.all(|&at| finder.is_dead(at, &nodes))
        && is_clean(finder, &terms, &[finder.dst(unit)])
        // The GLU reads both results: neither may be overwritten by the nodes of the other.
        && { one.places(finder) }.all(|a| other.places(finder).all(|b| is_apart(a, b)))
        && finder.can_be_at(&nodes, first);
    fits.then_some(Group {
        kind: FusionKind::Gated,
        nodes,
        place: first,
    })
}
