//! Fused nodes: one kernel for several nodes, with bit-identical results.

use vgpu_transport::ir::Op;

use super::copy_raw::each_row;
use super::elementwise::{Add, Scale};
use super::f32_rows::{Access, Map, apply, maps, sum};
use super::unary::Sqr;
use super::{matmul, rope};
use crate::kernel::Compiled;
use crate::operands::Operands;
use crate::simd::{Lanes, Simd};
use vgpu_engine::fuse::FusionKind;

/// The kernels of a group of nodes. `None`, without an effect, if the nodes must be compiled one at
/// a time.
///
/// # Safety
/// `nodes` are the nodes, in order, of a group of this kind that
/// [`Arrangement::of`](vgpu_engine::fuse::Arrangement::of) has found in their graph. So the types,
/// the lengths and the overlaps of their tensors are those that the search for such a group
/// requires.
pub(crate) unsafe fn compile_group(kind: FusionKind, nodes: &[Operands<'_>]) -> Option<Compiled> {
    // SAFETY: each function requires a group of the kind that it is called for, as the caller
    // guarantees.
    unsafe {
        match kind {
            FusionKind::Norm => norm(nodes),
            FusionKind::Products => matmul::products(nodes),
            FusionKind::Gated => matmul::gated(nodes),
            FusionKind::RopeRows => rope::rope_rows(nodes),
            _ => None,
        }
    }
}

maps! {
    /// A normalised row times weights. Each step rounds, as the two nodes do.
    ScaleBy { scale } |x, weight| Scale { scale, bias: 0.0 }.map([x]) * weight;
}

/// ADD, RMS_NORM and MUL; ADD and MUL are optional. The result of the norm itself is not stored.
///
/// # Safety
/// The nodes are a group of [`FusionKind::Norm`] that an arrangement has found.
unsafe fn norm(nodes: &[Operands<'_>]) -> Option<Compiled> {
    let (first, last) = (nodes.first()?, nodes.last()?);
    let eps = nodes.iter().find_map(|node| match node.op() {
        Op::RmsNorm { eps } => Some(*eps),
        _ => None,
    })?;
    let added = matches!(first.op(), Op::Add {}).then(|| (first.src(0), first.src(1)));
    let weights = matches!(last.op(), Op::Mul {}).then(|| last.src(1));
    // If there is an ADD, its sum is normalised.
    let x = match added {
        Some(_) => first.dst(),
        None => first.src(0),
    };
    let (dst, n) = (last.dst(), last.dst().ne[0]);
    let [out, x_rows] = [&dst, &x].map(Access::rows);
    last.makes_rows(dst);
    let kernel = each_row(dst, move |index, row| {
        let x_row = x.row_ptr(index);
        // SAFETY: in a group of this kind, `x`, the operands of the ADD and the destination have
        // the same lengths, so row `index` exists in each and has `n` elements. The weights are one
        // row of `n` elements.
        unsafe {
            if let Some((a, b)) = added {
                let src = [a, b].map(|x| (Access::rows(&x), x.row_ptr(index).cast_const()));
                apply(Add {}, (x_rows, x_row), src, n);
            }
            let x = (x_rows, x_row.cast_const());
            let mean = sum(Sqr {}, [x], n) / n as f64;
            let scale = 1.0 / (mean as f32 + eps).sqrt();
            match weights {
                None => apply(Scale { scale, bias: 0.0 }, (out, row), [x], n),
                Some(weights) => {
                    let weights = (
                        Access::rows(&weights),
                        weights.row_ptr([0, 0, 0]).cast_const(),
                    );
                    apply(ScaleBy { scale }, (out, row), [x, weights], n);
                }
            }
        }
    });
    Some(Compiled {
        kernels: vec![kernel],
        scratch_bytes: 0,
    })
}
