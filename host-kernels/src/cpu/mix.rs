//! Weighted sums of rows: `out[i] += sum over j of weights[i][j] * rows[j]`.
//!
//! The product of two matrices that both lie in rows. Attention mixes values by probabilities with it,
//! OUT_PROD mixes the rows of one matrix by the other.

use super::simd::{Simd, Task, dispatch};

/// Sums kept in registers at once: this many rows of one, two or four vectors.
const TILE_ROWS: usize = 6;

/// The operands; strides are in floats. Each sum runs over its terms in order, whatever the extents.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mix {
    /// Rows of results.
    pub(crate) results: usize,
    /// Rows that are summed up.
    pub(crate) terms: usize,
    /// Floats in each row.
    pub(crate) n: usize,
    pub(crate) weights: *const f32,
    pub(crate) weights_stride: usize,
    pub(crate) rows: *const f32,
    pub(crate) rows_stride: usize,
    pub(crate) out: *mut f32,
    pub(crate) out_stride: usize,
}

impl Mix {
    /// Adds the sums to `out`.
    ///
    /// # Safety
    /// - `weights` is readable for `results` rows of `terms` floats;
    /// - `rows` is readable for `terms` rows of `n` floats;
    /// - `out` is readable and writable for `results` rows of `n` floats, which overlap neither each
    ///   other nor the operands.
    pub(crate) unsafe fn add(self) {
        dispatch(Add(self));
    }
}

/// A [`Mix`] whose operands are as [`Mix::add`] demands.
struct Add(Mix);

impl Task for Add {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mix = self.0;
        let mut column = 0;
        // SAFETY: `Mix::add` had the operands vouched for; every strip begins before `n`, and only
        // the last of a single vector may be cut short.
        unsafe {
            // A wider strip needs more registers than the smaller instruction sets have.
            while S::LANES == 16 && column + 4 * S::LANES <= mix.n {
                mix.strip::<S, 4>(simd, column, S::LANES);
                column += 4 * S::LANES;
            }
            while column + 2 * S::LANES <= mix.n {
                mix.strip::<S, 2>(simd, column, S::LANES);
                column += 2 * S::LANES;
            }
            while column < mix.n {
                mix.strip::<S, 1>(simd, column, S::LANES.min(mix.n - column));
                column += S::LANES;
            }
        }
    }
}

impl Mix {
    /// All rows of the columns from `column` on, as many as `W` vectors hold; the last vector has
    /// `last` floats.
    ///
    /// # Safety
    /// As [`Mix::add`]; the columns are less than `n`.
    #[inline(always)]
    unsafe fn strip<S: Simd, const W: usize>(self, simd: S, column: usize, last: usize) {
        let mut row = 0;
        // SAFETY: each tile ends at or before `results`.
        unsafe {
            while row + TILE_ROWS <= self.results {
                self.tile::<S, TILE_ROWS, W>(simd, row, column, last);
                row += TILE_ROWS;
            }
            match self.results - row {
                5 => self.tile::<S, 5, W>(simd, row, column, last),
                4 => self.tile::<S, 4, W>(simd, row, column, last),
                3 => self.tile::<S, 3, W>(simd, row, column, last),
                2 => self.tile::<S, 2, W>(simd, row, column, last),
                1 => self.tile::<S, 1, W>(simd, row, column, last),
                _ => {}
            }
        }
    }

    /// `R` rows of `W` vectors.
    ///
    /// # Safety
    /// As [`Mix::add`]; rows and columns are less than `results` and `n`.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const W: usize>(
        self,
        simd: S,
        row: usize,
        column: usize,
        last: usize,
    ) {
        let len = |c: usize| if c + 1 == W { last } else { S::LANES };
        // SAFETY: the caller keeps rows and columns inside.
        unsafe {
            let out = self.out.add(row * self.out_stride + column);
            let weights = self.weights.add(row * self.weights_stride);
            let mut sums = [[simd.splat(0.0); W]; R];
            for (i, sums) in sums.iter_mut().enumerate() {
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.load_ptr(out.add(i * self.out_stride + c * S::LANES), len(c));
                }
            }
            for j in 0..self.terms {
                let values = self.rows.add(j * self.rows_stride + column);
                let mut term = [simd.splat(0.0); W];
                for (c, term) in term.iter_mut().enumerate() {
                    *term = simd.load_ptr(values.add(c * S::LANES), len(c));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let weight = simd.splat(*weights.add(i * self.weights_stride + j));
                    for (sum, term) in sums.iter_mut().zip(term) {
                        *sum = term.mul_add(weight, *sum);
                    }
                }
            }
            for (i, sums) in sums.into_iter().enumerate() {
                for (c, sum) in sums.into_iter().enumerate() {
                    sum.store_ptr(out.add(i * self.out_stride + c * S::LANES), len(c));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::gemm::Level;
    use super::super::simd::dispatch_at;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_level_gives_the_sums_and_leaves_the_rest(
            results in 0usize..15,
            terms in 0usize..20,
            n in 0usize..150,
            pad in 0usize..5,
            seed in any::<u32>(),
        ) {
            let mut state = seed | 1;
            let mut floats = |count: usize| -> Vec<f32> {
                let next = || {
                    state = state.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
                    (state >> 8) as f32 / (1 << 23) as f32 - 1.0
                };
                std::iter::repeat_with(next).take(count).collect()
            };
            let (weights_stride, rows_stride, out_stride) = (terms + pad, n + 2 * pad, n + 3 * pad);
            let weights = floats(results * weights_stride);
            let rows = floats(terms * rows_stride);
            let before = floats(results * out_stride);
            for level in Level::ALL.into_iter().filter(|level| level.is_supported()) {
                let mut out = before.clone();
                let mix = Mix {
                    results,
                    terms,
                    n,
                    weights: weights.as_ptr(),
                    weights_stride,
                    rows: rows.as_ptr(),
                    rows_stride,
                    out: out.as_mut_ptr(),
                    out_stride,
                };
                dispatch_at(level, Add(mix));
                for (at, (&out, &before)) in out.iter().zip(&before).enumerate() {
                    let (i, c) = (at / out_stride, at % out_stride);
                    if c >= n {
                        prop_assert_eq!(out, before);
                        continue;
                    }
                    let exact: f64 = (0..terms)
                        .map(|j| {
                            let weight = f64::from(weights[i * weights_stride + j]);
                            weight * f64::from(rows[j * rows_stride + c])
                        })
                        .sum::<f64>() + f64::from(before);
                    prop_assert!((f64::from(out) - exact).abs() < 1e-5, "{level:?} {out} {exact}");
                }
            }
        }
    }
}
