//! CROSS_ENTROPY_LOSS, CROSS_ENTROPY_LOSS_BACK, OPT_STEP_ADAMW, OPT_STEP_SGD.

use vgpu_transport::ir::{Op, OpKind, Rule};

use super::copy_raw::each_row;
use super::f32_rows::{Access, Map, apply, largest, maps, sum};
use super::reduce::total;
use crate::kernel::Compiled;
use crate::operands::{Operands, parameters};
use crate::simd::{Lanes, Simd};
use crate::view::View;
use vgpu_engine::types::F32;

pub(super) fn rules() -> Vec<Rule> {
    vec![
        Rule::new(OpKind::CrossEntropyLoss, F32, &[F32; 2]),
        Rule::new(OpKind::CrossEntropyLossBack, F32, &[F32; 3]),
        Rule::new(OpKind::OptStepAdamw, F32, &[F32; 4]),
        Rule::new(OpKind::OptStepSgd, F32, &[F32; 2]),
    ]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    match o.op() {
        Op::CrossEntropyLoss {} => Some(cross_entropy_loss(o)),
        Op::CrossEntropyLossBack {} => Some(cross_entropy_loss_back(o)),
        Op::OptStepAdamw {} => Some(adamw(o)),
        Op::OptStepSgd {} => Some(sgd(o)),
        _ => None,
    }
}

maps! {
    /// `e^(x - largest)`
    Exponential { largest } |x| (x - largest).exp();
    /// `(x - offset) * y`
    ShiftedProduct { offset } |x, y| (x - offset) * y;
    /// `(e^(x - offset) - y) * scale`
    LossGradient { offset, scale } |x, y| ((x - offset).exp() - y) * scale;
    /// `keep * m + (1 - keep) * g`
    Momentum { keep } |m, g| m * keep + g * (1.0 - keep);
    /// `keep * v + (1 - keep) * g^2`
    SquaredMomentum { keep } |v, g| v * keep + g * g * (1.0 - keep);
    AdamwStep { keep, alpha, beta1h, beta2h, eps } |w, m, v| {
        w * keep - m * beta1h * alpha / ((v * beta2h).sqrt() + eps)
    };
    SgdStep { keep, alpha } |w, g| w * keep - g * alpha;
}

/// `ln(sum(e^x))` of a row.
///
/// # Safety
/// [`Access::load`] may read `n` elements of the row.
unsafe fn log_sum_exp(row: (Access, *const u8), n: usize) -> f32 {
    // SAFETY: the caller guarantees that the row has `n` elements, which both functions read.
    unsafe {
        let largest = largest(row, n);
        largest + sum(Exponential { largest }, [row], n).ln() as f32
    }
}

/// `dst = -mean over rows of sum(log_softmax(a) * b)`
fn cross_entropy_loss(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::CrossEntropyLoss {});
    let (dst, [a, b]) = (o.dst(), o.sources());
    let (logits, labels) = (Access::rows(&a), Access::rows(&b));
    let n = a.ne[0];
    let rows = if n == 0 { 0 } else { a.rows() };
    let partial = move |start: usize, count: usize| {
        let mut total = 0.0;
        for row in start..start + count {
            let index = a.row_index(row);
            let x = (logits, a.row_ptr(index).cast_const());
            let y = (labels, b.row_ptr(index).cast_const());
            // SAFETY: `o` has passed the check of CROSS_ENTROPY_LOSS: the sources have the same
            // rows, of `ne[0]` elements.
            total += unsafe {
                let offset = log_sum_exp(x, n);
                sum(ShiftedProduct { offset }, [x, y], n)
            };
        }
        total
    };
    // SAFETY: the destination is a single f32, by the check and the rule of CROSS_ENTROPY_LOSS, and
    // `total` has one thread write it.
    let finish = move |total: f64| unsafe {
        dst.ptr().cast::<f32>().write((-total / rows as f64) as f32);
    };
    // One thread adds the partial results.
    total(rows, rows.div_ceil(MAX_PARTIALS).max(1), partial, finish)
}

/// The gradient of the loss with respect to `a`, for the gradient `grad` of the loss.
fn cross_entropy_loss_back(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::CrossEntropyLossBack {});
    let (dst, [grad, a, b]) = (o.dst(), o.sources());
    let (out, logits, labels) = (Access::rows(&dst), Access::rows(&a), Access::rows(&b));
    let (n, rows) = (a.ne[0], a.rows());
    let kernel = each_row(dst, move |index, row| {
        let x = (logits, a.row_ptr(index).cast_const());
        let y = (labels, b.row_ptr(index).cast_const());
        // SAFETY: `o` has passed the check of CROSS_ENTROPY_LOSS_BACK: `a`, `b` and the destination
        // have the same rows, of `n` elements. `grad` is a single element, f32 by the rule.
        unsafe {
            let scale = grad.ptr().cast::<f32>().read() / rows as f32;
            let offset = log_sum_exp(x, n);
            apply(LossGradient { offset, scale }, (out, row), [x, y], n);
        }
    });
    Compiled {
        kernels: vec![kernel],
        scratch_bytes: 0,
    }
}

/// The most partial results of a loss.
const MAX_PARTIALS: usize = 1 << 20;

/// The settings of a step, read when the step runs.
///
/// # Safety
/// `view` is a vector of at least `N` f32.
unsafe fn settings_of<const N: usize>(view: View) -> [f32; N] {
    // SAFETY: `i < N`, and the caller guarantees the elements.
    std::array::from_fn(|i| unsafe { view.ptr().wrapping_add(i * view.nb[0]).cast::<f32>().read() })
}

/// A step of AdamW: `dst` is the new `w`. The momenta `m` and `v` are updated in place.
fn adamw(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::OptStepAdamw {});
    let (dst, [w, grad, m, v, settings]) = (o.dst(), o.sources());
    let [out, ws, gs, ms, vs] = [dst, w, grad, m, v].map(|view| Access::rows(&view));
    let n = dst.ne[0];
    let kernel = each_row(dst, move |index, row| {
        // SAFETY: `o` has passed the check of OPT_STEP_ADAMW: the settings are a vector of seven
        // f32.
        let settings = unsafe { settings_of(settings) };
        let [alpha, beta1, beta2, eps, decay, beta1h, beta2h] = settings;
        let keep = 1.0 - alpha * decay;
        let g = (gs, grad.row_ptr(index).cast_const());
        let (m_row, v_row) = (m.row_ptr(index), v.row_ptr(index));
        let (m, v) = ((ms, m_row.cast_const()), (vs, v_row.cast_const()));
        let w = (ws, w.row_ptr(index).cast_const());
        // SAFETY: the check of OPT_STEP_ADAMW requires the lengths of the destination of all other
        // sources: all rows have `ne[0]` elements.
        unsafe {
            apply(Momentum { keep: beta1 }, (ms, m_row), [m, g], n);
            apply(SquaredMomentum { keep: beta2 }, (vs, v_row), [v, g], n);
            apply(
                AdamwStep {
                    keep,
                    alpha,
                    beta1h,
                    beta2h,
                    eps,
                },
                (out, row),
                [w, m, v],
                n,
            );
        }
    });
    Compiled {
        kernels: vec![kernel],
        scratch_bytes: 0,
    }
}

fn sgd(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::OptStepSgd {});
    let (dst, [w, grad, settings]) = (o.dst(), o.sources());
    let [out, ws, gs] = [dst, w, grad].map(|view| Access::rows(&view));
    let n = dst.ne[0];
    let kernel = each_row(dst, move |index, row| {
        // SAFETY: `o` has passed the check of OPT_STEP_SGD: the settings are a vector of two f32.
        let [alpha, decay] = unsafe { settings_of(settings) };
        let keep = 1.0 - alpha * decay;
        let w = (ws, w.row_ptr(index).cast_const());
        let g = (gs, grad.row_ptr(index).cast_const());
        // SAFETY: the check of OPT_STEP_SGD requires the lengths of the destination of both other
        // sources: all rows have `ne[0]` elements.
        unsafe { apply(SgdStep { keep, alpha }, (out, row), [w, g], n) };
    });
    Compiled {
        kernels: vec![kernel],
        scratch_bytes: 0,
    }
}
