//! NORM, RMS_NORM, RMS_NORM_BACK, L2_NORM, GROUP_NORM, SOFT_MAX_BACK.

use vgpu_transport::ir::{Op, OpKind, Rule};

use super::copy_raw::each_row;
use super::elementwise::{Mul, Scale};
use super::f32_rows::{Access, Identity, Map, apply, maps, sum};
use super::unary::Sqr;
use crate::kernel::{Compiled, Estimate, Kernel};
use crate::operands::{Operands, parameters};
use crate::simd::{Lanes, Simd};
use vgpu_engine::types::FLOATS;

pub(super) fn rules() -> Vec<Rule> {
    vec![
        Rule::new(OpKind::Norm, FLOATS, &[FLOATS]),
        Rule::new(OpKind::RmsNorm, FLOATS, &[FLOATS]),
        Rule::new(OpKind::RmsNormBack, FLOATS, &[FLOATS, FLOATS]),
        Rule::new(OpKind::L2Norm, FLOATS, &[FLOATS]),
        Rule::new(OpKind::GroupNorm, FLOATS, &[FLOATS]),
        Rule::new(OpKind::SoftMaxBack, FLOATS, &[FLOATS, FLOATS]),
    ]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    let kernel = match o.op() {
        Op::Norm { .. } => norm(o),
        Op::RmsNorm { .. } => rms_norm(o),
        Op::RmsNormBack { .. } => rms_norm_back(o),
        Op::L2Norm { .. } => l2_norm(o),
        Op::GroupNorm { .. } => return Some(group_norm(o)),
        Op::SoftMaxBack { .. } => soft_max_back(o),
        _ => return None,
    };
    Some(Compiled {
        kernels: vec![kernel],
        scratch_bytes: 0,
    })
}

maps! {
    /// `(x - mean)^2`
    SquaredDistance { mean } |x| (x - mean) * (x - mean);
    Standardize { mean, scale } |x| (x - mean) * scale;
    /// `(dz + x * factor) * scale`
    NormGradient { factor, scale } |dz, x| x.mul_add(x.splat(factor), dz) * scale;
    /// `(dy - dot) * y * scale`
    SoftMaxGradient { dot, scale } |dy, y| (dy - dot) * y * scale;
}

/// `(x - mean) / sqrt(variance + eps)` of each row.
fn norm(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::Norm { eps });
    let (dst, src) = (o.dst(), o.src(0));
    let (out, x, n) = (Access::rows(&dst), Access::rows(&src), dst.ne[0]);
    each_row(dst, move |index, row| {
        let source = [(x, src.row_ptr(index).cast_const())];
        // SAFETY: `o` has passed the check of NORM: source and destination have the same lengths,
        // so both rows have `ne[0]` elements. One worker has this row, and no other worker writes
        // the source rows.
        unsafe {
            let mean = (sum(Identity {}, source, n) / n as f64) as f32;
            let variance = sum(SquaredDistance { mean }, source, n) / n as f64;
            let scale = 1.0 / (variance as f32 + eps).sqrt();
            apply(Standardize { mean, scale }, (out, row), source, n);
        }
    })
}

/// `x / sqrt(mean(x^2) + eps)` of each row.
fn rms_norm(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::RmsNorm { eps });
    let (dst, src) = (o.dst(), o.src(0));
    let (out, x, n) = (Access::rows(&dst), Access::rows(&src), dst.ne[0]);
    each_row(dst, move |index, row| {
        let source = [(x, src.row_ptr(index).cast_const())];
        // SAFETY: `o` has passed the check of RMS_NORM: source and destination have the same
        // lengths, so both rows have `ne[0]` elements. One worker has this row, and no other worker
        // writes the source rows.
        unsafe {
            let mean = sum(Sqr {}, source, n) / n as f64;
            let scale = 1.0 / (mean as f32 + eps).sqrt();
            apply(Scale { scale, bias: 0.0 }, (out, row), source, n);
        }
    })
}

/// The gradient of RMS_NORM with input `x`, for the gradient `dz` of its output.
fn rms_norm_back(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::RmsNormBack { eps });
    let (dst, [dz, x]) = (o.dst(), o.sources());
    let (out, dz_rows, x_rows) = (Access::rows(&dst), Access::rows(&dz), Access::rows(&x));
    let n = dst.ne[0];
    each_row(dst, move |index, row| {
        let dz = (dz_rows, dz.row_ptr(index).cast_const());
        let x = (x_rows, x.row_ptr(index).cast_const());
        // SAFETY: `o` has passed the check of RMS_NORM_BACK: sources and destination have the same
        // lengths, so all rows have `ne[0]` elements. One worker has this row, and no other worker
        // writes the source rows.
        unsafe {
            let squares = sum(Sqr {}, [x], n) + f64::from(eps) * n as f64;
            let factor = (-sum(Mul {}, [dz, x], n) / squares) as f32;
            let scale = 1.0 / ((squares / n as f64) as f32).sqrt();
            apply(NormGradient { factor, scale }, (out, row), [dz, x], n);
        }
    })
}

/// `x / max(|x|, eps)` of each row.
fn l2_norm(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::L2Norm { eps });
    let (dst, src) = (o.dst(), o.src(0));
    let (out, x, n) = (Access::rows(&dst), Access::rows(&src), dst.ne[0]);
    each_row(dst, move |index, row| {
        let source = [(x, src.row_ptr(index).cast_const())];
        // SAFETY: `o` has passed the check of L2_NORM: source and destination have the same
        // lengths, so both rows have `ne[0]` elements. One worker has this row, and no other worker
        // writes the source rows.
        unsafe {
            let length = sum(Sqr {}, source, n).sqrt() as f32;
            let scale = 1.0 / length.max(eps);
            apply(Scale { scale, bias: 0.0 }, (out, row), source, n);
        }
    })
}

/// Elements in a unit of work, about.
const UNIT_ELEMENTS: usize = 1 << 18;

/// NORM over groups of channels, which are dimension 2.
fn group_norm(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::GroupNorm { n_groups, eps });
    let (dst, src, n_groups) = (o.dst(), o.src(0), n_groups as usize);
    let (out, x) = (Access::rows(&dst), Access::rows(&src));
    let [n, rows, channels, _] = dst.ne;
    let per_group = channels.div_ceil(n_groups);
    // The division rounds up, so the last groups can be empty.
    let groups = channels
        .checked_div(per_group)
        .map_or(0, |_| channels.div_ceil(per_group));
    // A group is read for the mean, read for the variance, and written, some rows at a time.
    let grain = (UNIT_ELEMENTS / n.max(1)).max(1);
    let parts = (rows * per_group).div_ceil(grain);
    let most = Estimate::steps(n.saturating_mul(grain));
    let kernel: Kernel = Box::new(move |w| {
        for unit in w.range_of_groups(groups * dst.ne[3], 3 * parts).each(most) {
            let (step, group) = (unit % (3 * parts), unit / (3 * parts));
            let (pass, part) = (step / parts, step % parts);
            let (first, i3) = (group % groups * per_group, group / groups);
            let rows_in_group = rows * (channels.min(first + per_group) - first);
            let end = rows_in_group.min((part + 1) * grain);
            let group_rows = (part * grain..end).map(|i| {
                let index = [i % rows, first + i / rows, i3];
                (dst.row_ptr(index), [(x, src.row_ptr(index).cast_const())])
            });
            let count = (n * rows_in_group) as f64;
            // SAFETY: the scratch memory is aligned to 64 bytes and has two sums for each worker. A
            // group is normalised by one worker, whose first step sets both sums. `o` has passed
            // the check of GROUP_NORM: source and destination have the same lengths, so all rows
            // have `ne[0]` elements.
            unsafe {
                let sums = w.scratch().cast::<[f64; 2]>().add(w.index());
                if step == 0 {
                    sums.write([0.0; 2]);
                }
                let [mut total, mut squares] = sums.read();
                let mean = (total / count) as f32;
                match pass {
                    0 => group_rows.for_each(|(_, source)| total += sum(Identity {}, source, n)),
                    1 => group_rows.for_each(|(_, source)| {
                        squares += sum(SquaredDistance { mean }, source, n)
                    }),
                    _ => {
                        let scale = 1.0 / ((squares / count) as f32 + eps).sqrt();
                        group_rows.for_each(|(row, source)| {
                            apply(Standardize { mean, scale }, (out, row), source, n);
                        });
                    }
                }
                sums.write([total, squares]);
            }
        }
        Ok(())
    });
    Compiled {
        kernels: vec![kernel],
        scratch_bytes: o.workers() * size_of::<[f64; 2]>(),
    }
}

/// The gradient of SOFT_MAX with output `y`, for the gradient `dy` of its output. ALiBi adds a
/// constant to the logits, which does not change the gradient.
fn soft_max_back(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::SoftMaxBack { scale, .. });
    let (dst, [dy, y]) = (o.dst(), o.sources());
    let (out, dy_rows, y_rows) = (Access::rows(&dst), Access::rows(&dy), Access::rows(&y));
    let n = dst.ne[0];
    each_row(dst, move |index, row| {
        let dy = (dy_rows, dy.row_ptr(index).cast_const());
        let y = (y_rows, y.row_ptr(index).cast_const());
        // SAFETY: `o` has passed the check of SOFT_MAX_BACK: sources and destination have the same
        // lengths, so all rows have `ne[0]` elements. One worker has this row, and no other worker
        // writes the source rows.
        unsafe {
            let dot = sum(Mul {}, [dy, y], n) as f32;
            apply(SoftMaxGradient { dot, scale }, (out, row), [dy, y], n);
        }
    })
}
