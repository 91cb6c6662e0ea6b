//! Fused products: products of the same activations, their biases, and the GLU of two of them. Each
//! result is rounded as its own node rounds it.

use vgpu_transport::ir::Op;

use super::super::scratch::{Output, ScratchLayout};
use super::activations::{Activations, converted};
use super::dense::kernel_of;
use super::experts;
use super::joint::{DenseProducts, Gate};
use super::term::{Term, Unit};
use super::tiles::TiledProduct;
use crate::kernel::{Compiled, Kernel};
use crate::operands::Operands;

/// The products of a group of nodes, each with the node that adds its bias, if there is one. `None`
/// if weights are converted: such a product is computed alone.
fn terms<'a>(nodes: &'a [Operands<'a>]) -> Option<Vec<Term<'a>>> {
    let mut terms: Vec<Term<'a>> = Vec::new();
    for node in nodes {
        match node.op() {
            Op::MulMat { .. } | Op::MulMatId { .. } if kernel_of(node).weight != node.src(0).ty => {
                return None;
            }
            Op::MulMat {
                hadamard: false, ..
            }
            | Op::MulMatId { .. } => terms.push(Term {
                node,
                bias: None,
                dst: node.dst(),
            }),
            Op::Add {} | Op::AddId {} => {
                // The last product with this destination: a buffer may be reused within a group.
                let mut before = terms.iter_mut().rev();
                let term = before.find(|term| term.bias.is_none() && term.dst == node.src(0))?;
                (term.bias, term.dst) = (Some(node.src(1)), node.dst());
            }
            _ => return None,
        }
    }
    Some(terms)
}

/// Products of the same activations: threads take the tiles of all products.
///
/// # Safety
/// The nodes are a group of [`FusionKind::Products`](vgpu_engine::fuse::FusionKind) that an
/// arrangement has found.
pub(in super::super) unsafe fn products(nodes: &[Operands<'_>]) -> Option<Compiled> {
    let terms = terms(nodes)?;
    // SAFETY: in a group of this kind, all products have the same activations, and those of experts
    // the same ids, and the results overlap neither each other nor a source.
    unsafe {
        match terms.first()?.node.op() {
            Op::MulMatId { .. } => experts::products(&terms),
            _ => dense_products(&terms),
        }
    }
}

/// # Safety
/// The terms have the same activations. Their results do not overlap each other.
unsafe fn dense_products(terms: &[Term<'_>]) -> Option<Compiled> {
    let first = terms.first()?.node;
    let kernel = kernel_of(first);
    let is_plain = |term: &Term<'_>| {
        matches!(term.node.op(), Op::MulMat { .. })
            && kernel_of(term.node).activation == kernel.activation
            && term.fits(&term.dst)
            // One row of bias for all columns.
            && term.bias.is_none_or(|bias| bias.rows() == 1)
    };
    if !terms.iter().all(is_plain) {
        return None;
    }
    let mut scratch = ScratchLayout::default();
    let activations = Activations::new(first, first.src(1), kernel);
    let each = terms.iter().map(|term| {
        let output = Output::new(term.dst, &[], &mut scratch);
        let activations = activations.multiplied_by(kernel_of(term.node));
        TiledProduct::new(term.node, activations, output, term.bias, terms.len())
    });
    let products: Vec<TiledProduct> = each.collect();
    let mut kernels: Vec<Kernel> = Vec::from_iter(converted(first, activations));
    // SAFETY: the caller guarantees that the activations, which the kernel before converts, are
    // those of every product, and that the destinations do not overlap.
    kernels.push(unsafe { DenseProducts::new(products).kernel(first) });
    Some(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}

/// Two products and their GLU. The products themselves are not stored.
///
/// # Safety
/// The nodes are a group of [`FusionKind::Gated`](vgpu_engine::fuse::FusionKind) that an
/// arrangement has found.
pub(in super::super) unsafe fn gated(nodes: &[Operands<'_>]) -> Option<Compiled> {
    let (last, products) = nodes.split_last()?;
    let Op::Glu {
        kind, alpha, limit, ..
    } = *last.op()
    else {
        return None;
    };
    let unit = Unit {
        kind,
        parameters: [alpha, limit],
        dst: last.dst(),
    };
    let mut terms: [Term<'_>; 2] = terms(products)?.try_into().ok()?;
    if last.src(0) != terms[0].dst {
        terms.swap(0, 1);
    }
    // Weights of one type and shape are divided into the same tiles.
    let [one, other] = terms.each_ref().map(Term::weight);
    let is_alike = one.ty == other.ty && one.ne == other.ne;
    if !is_alike || !terms.iter().all(|term| term.fits(&unit.dst)) {
        return None;
    }
    // The activations of the first node of the group are converted.
    let first = nodes.first()?;
    // SAFETY: in a group of this kind, both products have the activations of the first node, and
    // those of experts its ids.
    unsafe {
        match first.op() {
            Op::MulMatId { .. } => experts::gated(first, &terms, unit),
            _ => dense_gated(first, &terms, unit),
        }
    }
}

/// # Safety
/// Both terms have the activations of `first`.
unsafe fn dense_gated(first: &Operands<'_>, terms: &[Term<'_>; 2], unit: Unit) -> Option<Compiled> {
    let (kernel, x, dst) = (kernel_of(first), first.src(1), unit.dst);
    let is_plain = |term: &Term<'_>| {
        matches!(term.node.op(), Op::MulMat { .. })
            && kernel_of(term.node).activation == kernel.activation
            && term.weight().rows() == term.weight().ne[1]
            && term.bias.is_none_or(|bias| bias.rows() == 1)
    };
    if !terms.iter().all(is_plain) || x.rows() != x.ne[1] || dst.rows() != x.ne[1] {
        return None;
    }
    let mut scratch = ScratchLayout::default();
    let activations = Activations::new(first, x, kernel);
    let [activated, factor] = terms.map(|term| {
        let activations = activations.multiplied_by(kernel_of(term.node));
        let output = Output::new(dst, &[], &mut scratch);
        TiledProduct::new(term.node, activations, output, term.bias, 1)
    });
    let own = scratch.room(first.workers(), factor.tile_floats() * size_of::<f32>());
    let products = DenseProducts::gated([activated, factor], Gate { unit, own });
    let mut kernels: Vec<Kernel> = Vec::from_iter(converted(first, activations));
    // SAFETY: the caller guarantees that the activations, which the kernel before converts, are
    // those of both products. Only the first has a destination.
    kernels.push(unsafe { products.kernel(first) });
    Some(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}
