//! GLU: gated linear units of every kind (Shazeer, arXiv:2002.05202).

use vgpu_transport::ir::{GluKind, Op, OpKind, Rule};

use super::f32_rows::{Access, Map, apply, map, maps};
use super::unary::{Gelu, GeluErf, GeluQuick, Silu};
use super::walk::window;
use crate::kernel::Compiled;
use crate::operands::Operands;
use crate::simd::{Lanes, Simd};
use vgpu_engine::types::FLOATS;

pub(super) fn rules() -> Vec<Rule> {
    vec![Rule::new(OpKind::Glu, FLOATS, &[FLOATS, FLOATS])]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    let Op::Glu {
        kind,
        swapped,
        alpha,
        limit,
    } = *o.op()
    else {
        return None;
    };
    let (dst, a) = (o.dst(), o.src(0));
    let src = match o.optional(1) {
        Some(gate) => [a, gate],
        None => {
            let half = |i: usize| window(a, [i * dst.ne[0], 0, 0, 0], dst.ne);
            if swapped {
                [half(1), half(0)]
            } else {
                [half(0), half(1)]
            }
        }
    };
    Some(match kind {
        GluKind::Reglu => map(dst, src, Reglu {}),
        GluKind::Geglu => map(dst, src, Geglu {}),
        GluKind::Swiglu => map(dst, src, Swiglu {}),
        GluKind::SwigluOai => map(dst, src, SwigluOai { alpha, limit }),
        GluKind::GegluErf => map(dst, src, GegluErf {}),
        GluKind::GegluQuick => map(dst, src, GegluQuick {}),
        GluKind::SwigluClamp => map(dst, src, SwigluClamp { limit }),
    })
}

/// The GLU of `n` dense floats: the first source is activated and multiplied with the second.
///
/// # Safety
/// `to` is writable and both sources are readable for `n` floats.
pub(super) unsafe fn gate(
    [alpha, limit]: [f32; 2],
    kind: GluKind,
    to: *mut f32,
    from: [*const f32; 2],
    n: usize,
) {
    let to = (Access::direct(), to.cast());
    let from = from.map(|x| (Access::direct(), x.cast()));
    // SAFETY: the caller guarantees `n` dense floats at `to` and at both sources.
    unsafe {
        match kind {
            GluKind::Reglu => apply(Reglu {}, to, from, n),
            GluKind::Geglu => apply(Geglu {}, to, from, n),
            GluKind::Swiglu => apply(Swiglu {}, to, from, n),
            GluKind::SwigluOai => apply(SwigluOai { alpha, limit }, to, from, n),
            GluKind::GegluErf => apply(GegluErf {}, to, from, n),
            GluKind::GegluQuick => apply(GegluQuick {}, to, from, n),
            GluKind::SwigluClamp => apply(SwigluClamp { limit }, to, from, n),
        }
    }
}

/// The smaller of `x` and `limit`; NaN if `x` is NaN.
#[inline(always)]
fn at_most<S: Simd>(x: Lanes<S>, limit: f32) -> Lanes<S> {
    x.splat(limit).min(x)
}

/// `x` limited to `-limit` .. `limit`; NaN if `x` is NaN.
#[inline(always)]
fn within<S: Simd>(x: Lanes<S>, limit: f32) -> Lanes<S> {
    x.splat(-limit).max(at_most(x, limit))
}

maps! {
    Reglu |x, g| x.gt(x.splat(0.0)).select(x * g, x.splat(0.0));
    Geglu |x, g| Gelu {}.map([x]) * g;
    Swiglu |x, g| Silu {}.map([x]) * g;
    GegluErf |x, g| GeluErf {}.map([x]) * g;
    GegluQuick |x, g| GeluQuick {}.map([x]) * g;
    SwigluOai { alpha, limit } |x, g| {
        let x = at_most(x, limit);
        x / (1.0 + (x * -alpha).exp()) * (within(g, limit) + 1.0)
    };
    SwigluClamp { limit } |x, g| Silu {}.map([at_most(x, limit)]) * within(g, limit);
}
