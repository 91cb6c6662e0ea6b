//! Searches for the scales of a block, shared by several formats.
//!
//! The searches use the floating-point operations of ggml's reference in the same order and in
//! single precision, because the bytes of a quantised model must be those of ggml.

use super::grids::{FP4_VALUES, IQ4_VALUES};

/// Below this magnitude a sub-block counts as all zeros.
pub(super) const GROUP_MAX_EPS: f32 = 1e-15;

/// Rounds to nearest, ties to even, by letting the addition of 1.5 * 2^23 drop the fraction.
#[inline(always)]
pub(super) fn nearest_int(x: f32) -> i32 {
    let bits = (x + 12_582_912.0).to_bits() as i32;
    (bits & 0x007f_ffff) - 0x0040_0000
}

/// Scales and minimums of the eight sub-blocks of Q4_K and Q5_K.
pub(super) struct ScaleFit {
    /// Scale of the scales, before rounding to F16.
    pub(super) d: f32,
    /// Scale of the minimums, before rounding to F16.
    pub(super) dmin: f32,
    /// Six-bit scales.
    pub(super) scales: [u8; 8],
    /// Six-bit minimums.
    pub(super) mins: [u8; 8],
    /// The quants of the best fit, used if the rounded scale is 0.
    pub(super) q: [u8; 256],
}

/// Fits `x ~ scale * q - min`, `q` in `0..=qmax`, in each sub-block of 32.
pub(super) fn fit_scales_and_mins(x: &[f32; 256], qmax: u8, start: f32, steps: i32) -> ScaleFit {
    let mut q = [0; 256];
    let (mut scales, mut mins) = ([0.0f32; 8], [0.0f32; 8]);
    let (mut max_scale, mut max_min) = (0.0f32, 0.0f32);
    for (j, (x, q)) in x.chunks_exact(32).zip(q.chunks_exact_mut(32)).enumerate() {
        let mut sum = 0.0f32;
        for &x in x {
            sum += x * x;
        }
        let mean = (sum / 32.0).sqrt();
        let mut weights = [0.0f32; 32];
        for (w, &x) in weights.iter_mut().zip(x) {
            *w = mean + x.abs();
        }
        (scales[j], mins[j]) = fit_affine(x, &weights, qmax, q, start, 0.1, steps, Error::Square);
        if scales[j] > max_scale {
            max_scale = scales[j];
        }
        if mins[j] > max_min {
            max_min = mins[j];
        }
    }
    let to_six_bits = |max: f32| {
        let inverse = if max > 0.0 { 63.0 / max } else { 0.0 };
        move |x: f32| (nearest_int(inverse * x) as u8).min(63)
    };
    ScaleFit {
        d: max_scale / 63.0,
        dmin: max_min / 63.0,
        scales: scales.map(to_six_bits(max_scale)),
        mins: mins.map(to_six_bits(max_min)),
        q,
    }
}

/// How a fit measures its error.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Error {
    /// Weighted sum of squares.
    Square,
    /// Weighted sum of magnitudes.
    Magnitude,
}

/// The weighted best `x ~ scale * q - min` with `min >= 0` and `q` in `0..=qmax`, tried over a
/// range of scales around `qmax / (max - min)`. Returns `(scale, min)`.
#[allow(clippy::too_many_arguments)]
pub(super) fn fit_affine(
    x: &[f32],
    weights: &[f32],
    qmax: u8,
    q: &mut [u8],
    start: f32,
    delta: f32,
    steps: i32,
    error: Error,
) -> (f32, f32) {
    let measure = |diff: f32| match error {
        Error::Square => diff * diff,
        Error::Magnitude => diff.abs(),
    };
    let qmax_f = f32::from(qmax);
    let (mut min, mut max) = (x[0], x[0]);
    let mut sum_w = weights[0];
    let mut sum_x = sum_w * x[0];
    for (&x, &w) in x.iter().zip(weights).skip(1) {
        if x < min {
            min = x;
        }
        if x > max {
            max = x;
        }
        sum_w += w;
        sum_x += w * x;
    }
    if min > 0.0 {
        min = 0.0;
    }
    if max == min {
        q.fill(0);
        return (0.0, -min);
    }
    let quant = |inverse: f32, x: f32, min: f32| {
        nearest_int(inverse * (x - min)).clamp(0, i32::from(qmax)) as u8
    };
    let inverse = qmax_f / (max - min);
    let mut scale = 1.0 / inverse;
    let mut best_error = 0.0f32;
    for ((&x, &w), q) in x.iter().zip(weights).zip(q.iter_mut()) {
        *q = quant(inverse, x, min);
        best_error += w * measure(scale * f32::from(*q) + min - x);
    }
    let mut candidate = [0u8; 32];
    for step in 0..=steps {
        // `min` is that of the best fit so far, which changes the range of the next candidates.
        let inverse = (start + delta * step as f32 + qmax_f) / (max - min);
        let (mut sum_l, mut sum_l2, mut sum_xl) = (0.0f32, 0.0f32, 0.0f32);
        for ((&x, &w), q) in x.iter().zip(weights).zip(&mut candidate) {
            *q = quant(inverse, x, min);
            let l = f32::from(*q);
            sum_l += w * l;
            sum_l2 += w * l * l;
            sum_xl += w * l * x;
        }
        let determinant = sum_w * sum_l2 - sum_l * sum_l;
        if determinant <= 0.0 || determinant.is_nan() {
            continue;
        }
        let mut this_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        let mut this_min = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        if this_min > 0.0 {
            this_min = 0.0;
            this_scale = sum_xl / sum_l2;
        }
        let mut this_error = 0.0f32;
        for ((&x, &w), &q) in x.iter().zip(weights).zip(&candidate) {
            this_error += w * measure(this_scale * f32::from(q) + this_min - x);
        }
        if this_error < best_error {
            q.copy_from_slice(&candidate[..q.len()]);
            best_error = this_error;
            scale = this_scale;
            min = this_min;
        }
    }
    (scale, -min)
}

/// The best `x ~ scale * (q - qmax)` with `q` in `0..2 * qmax`, weighted by `x * x`. Returns the
/// scale.
pub(super) fn fit_signed_scale(x: &[f32], qmax: i32, q: &mut [u8]) -> f32 {
    let max = super::block32::signed_max(x);
    if max.abs() < GROUP_MAX_EPS {
        q.fill(0);
        return 0.0;
    }
    let quant = |inverse: f32, x: f32| nearest_int(inverse * x).clamp(-qmax, qmax - 1);
    let sums = |inverse: f32| {
        let (mut sum_lx, mut sum_l2) = (0.0f32, 0.0f32);
        for &x in x {
            let l = quant(inverse, x) as f32;
            let w = x * x;
            sum_lx += w * x * l;
            sum_l2 += w * l * l;
        }
        (sum_lx, sum_l2)
    };
    let mut write = |inverse: f32| {
        for (&x, q) in x.iter().zip(q.iter_mut()) {
            *q = (quant(inverse, x) + qmax) as u8;
        }
    };
    let inverse = -(qmax as f32) / max;
    write(inverse);
    let (sum_lx, sum_l2) = sums(inverse);
    let mut scale = if sum_l2 != 0.0 { sum_lx / sum_l2 } else { 0.0 };
    let mut best = scale * sum_lx;
    for step in (-9..=9).filter(|&step| step != 0) {
        let inverse = -(qmax as f32 + 0.1 * step as f32) / max;
        let (sum_lx, sum_l2) = sums(inverse);
        if sum_l2 > 0.0 && sum_lx * sum_lx > best * sum_l2 {
            write(inverse);
            scale = sum_lx / sum_l2;
            best = scale * sum_lx;
        }
    }
    scale
}

/// As [`fit_signed_scale`], improving one quant at a time instead of trying scales. `qmax` is added
/// to the quants, except where all of `x` is about zero.
pub(super) fn fit_signed_scale_stepwise(x: &[f32; 16], qmax: i32, q: &mut [u8]) -> f32 {
    let max = super::block32::signed_max(x);
    if max.abs() < GROUP_MAX_EPS {
        q.fill(0);
        return 0.0;
    }
    let inverse = -(qmax as f32) / max;
    let (mut sum_lx, mut sum_l2) = (0.0f32, 0.0f32);
    let mut l = [0i32; 16];
    for (l, &x) in l.iter_mut().zip(x) {
        *l = nearest_int(inverse * x).clamp(-qmax, qmax - 1);
        let w = x * x;
        sum_lx += w * x * *l as f32;
        sum_l2 += w * *l as f32 * *l as f32;
    }
    for _ in 0..5 {
        let mut changed = false;
        for (l, &x) in l.iter_mut().zip(x) {
            let w = x * x;
            let mut others_lx = sum_lx - w * x * *l as f32;
            if others_lx <= 0.0 || others_lx.is_nan() {
                continue;
            }
            let mut others_l2 = sum_l2 - w * *l as f32 * *l as f32;
            let new = nearest_int(x * others_l2 / others_lx).clamp(-qmax, qmax - 1);
            if new == *l {
                continue;
            }
            others_lx += w * x * new as f32;
            others_l2 += w * new as f32 * new as f32;
            if others_l2 > 0.0 && others_lx * others_lx * sum_l2 > sum_lx * sum_lx * others_l2 {
                (*l, sum_lx, sum_l2) = (new, others_lx, others_l2);
                changed = true;
            }
        }
        if !changed {
            break;
        }
    }
    for (q, l) in q.iter_mut().zip(l) {
        *q = (l + qmax) as u8;
    }
    if sum_l2 > 0.0 { sum_lx / sum_l2 } else { 0.0 }
}

/// The index of the value of IQ4 nearest to `x`; the larger value in a tie.
pub(super) fn nearest_uneven(x: f32) -> u8 {
    let value = |i: usize| f32::from(IQ4_VALUES[i]);
    if x <= value(0) {
        return 0;
    }
    if x >= value(15) {
        return 15;
    }
    // `value(low) <= x < value(high)`
    let (mut low, mut high) = (0, 15);
    while high - low > 1 {
        let middle = (low + high) / 2;
        if x < value(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    (if x - value(high - 1) < value(high) - x {
        high - 1
    } else {
        high
    }) as u8
}

/// A scale for 32 values with the quants of IQ4, weighted by `x * x`.
pub(super) struct UnevenFit {
    /// The value of largest magnitude.
    max: f32,
    /// The inverse of the scale of the first guess.
    pub(super) inverse: f32,
    /// The best scale for the quants of the guess.
    pub(super) scale: f32,
    best: f32,
}

impl UnevenFit {
    /// The guess that maps the largest value to the first quant, or with `flip` to its opposite;
    /// `None` if all values are about zero.
    pub(super) fn start(x: &[f32; 32], flip: bool) -> Option<UnevenFit> {
        let max = super::block32::signed_max(x);
        if max.abs() < GROUP_MAX_EPS {
            return None;
        }
        let first = f32::from(IQ4_VALUES[0]);
        let inverse = 1.0 / (if flip { -max / first } else { max / first });
        let (sum_qx, sum_q2) = Self::sums(x, inverse);
        let scale = if sum_q2 > 0.0 { sum_qx / sum_q2 } else { 0.0 };
        Some(UnevenFit {
            max,
            inverse,
            scale,
            best: scale * sum_qx,
        })
    }

    /// Tries scales around the one that maps the largest value to the first quant.
    pub(super) fn refine(&mut self, x: &[f32; 32], tries: i32) {
        for step in -tries..=tries {
            let inverse = (step as f32 + f32::from(IQ4_VALUES[0])) / self.max;
            let (sum_qx, sum_q2) = Self::sums(x, inverse);
            if sum_q2 > 0.0 && sum_qx * sum_qx > self.best * sum_q2 {
                self.scale = sum_qx / sum_q2;
                self.best = self.scale * sum_qx;
            }
        }
    }

    fn sums(x: &[f32; 32], inverse: f32) -> (f32, f32) {
        let (mut sum_qx, mut sum_q2) = (0.0f32, 0.0f32);
        for &x in x {
            let q = f32::from(IQ4_VALUES[usize::from(nearest_uneven(inverse * x))]);
            let w = x * x;
            sum_qx += w * q * x;
            sum_q2 += w * q * q;
        }
        (sum_qx, sum_q2)
    }
}

/// The first quant of MXFP4 and NVFP4 whose value times `d` is nearest to `x`.
pub(super) fn nearest_fp4(x: f32, d: f32) -> u8 {
    let error = |i: usize| (f32::from(FP4_VALUES[i]) * d - x).abs();
    let mut best = 0;
    for i in 1..16 {
        if error(i) < error(best) {
            best = i;
        }
    }
    best as u8
}
