//! Products of two matrices that are both stored in rows:
//! `out[i] += sum over j of weights[i][j] * rows[j]`.
//!
//! Attention multiplies probabilities and values with this, OUT_PROD its two operands.

use half::{bf16, f16};

use crate::simd::{Lanes, PtrTask, Simd, dispatch_ptr};

/// The rows of results in a tile: each row of terms is read once per tile.
pub(crate) const TILE_RESULTS: usize = 6;

/// The operands; strides are in elements. Each sum runs over its terms in order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GemmRows<T> {
    /// Rows of results.
    pub(crate) results: usize,
    /// Rows that are added to each row of results, each times a weight.
    pub(crate) terms: usize,
    /// Elements in each row.
    pub(crate) n: usize,
    pub(crate) weights: *const f32,
    /// From the weights of one row of results to the weights of the next.
    pub(crate) weights_stride: usize,
    /// From the weight of one term to the weight of the next.
    pub(crate) weights_step: usize,
    pub(crate) rows: *const T,
    pub(crate) rows_stride: usize,
    pub(crate) out: *mut f32,
    pub(crate) out_stride: usize,
}

/// The element type of the rows.
pub(crate) trait Element: Copy {
    /// # Safety
    /// `ptr` is readable for `n <= S::LANES` elements.
    unsafe fn load<S: Simd>(simd: S, ptr: *const Self, n: usize) -> Lanes<S>;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, ptr: *const f32, n: usize) -> Lanes<S> {
        // SAFETY: the caller guarantees `n <= S::LANES` elements at `ptr`.
        unsafe { simd.load_ptr(ptr, n) }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, ptr: *const f16, n: usize) -> Lanes<S> {
        // SAFETY: the caller guarantees `n <= S::LANES` elements at `ptr`.
        unsafe { simd.load_f16_ptr(ptr.cast(), n) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, ptr: *const bf16, n: usize) -> Lanes<S> {
        // SAFETY: the caller guarantees `n <= S::LANES` elements at `ptr`.
        unsafe { simd.load_bf16_ptr(ptr.cast(), n) }
    }
}

impl<T: Element> GemmRows<T> {
    /// Adds the sums to `out`.
    ///
    /// # Safety
    /// - `weights` is readable for `results` times `terms` floats;
    /// - `rows` is readable for `terms` rows of `n` elements;
    /// - `out` is readable and writable for `results` rows of `n` floats, which overlap neither
    ///   each other nor the operands.
    pub(crate) unsafe fn add(self) {
        // SAFETY: the caller guarantees the operands that the contract of `Add` requires.
        unsafe { dispatch_ptr(Add(self)) };
    }

    /// As [`GemmRows::add`], with rows of `U` at `rows`, `stride` bytes apart.
    ///
    /// # Safety
    /// As [`GemmRows::add`]; the stride is a multiple of the size of `U`.
    pub(crate) unsafe fn add_rows<U: Element>(self, rows: *const u8, stride: usize) {
        let GemmRows {
            results,
            terms,
            n,
            weights,
            weights_stride,
            weights_step,
            out,
            out_stride,
            ..
        } = self;
        let product = GemmRows {
            results,
            terms,
            n,
            weights,
            weights_stride,
            weights_step,
            rows: rows.cast::<U>(),
            rows_stride: stride / size_of::<U>(),
            out,
            out_stride,
        };
        // SAFETY: `product` has the operands of `self`, and the caller guarantees `terms` rows of
        // `n` elements of `U` at `rows`, `stride` bytes apart.
        unsafe { product.add() }
    }
}

/// The task of [`GemmRows::add`], with the same contract.
struct Add<T>(GemmRows<T>);

impl<T: Element> PtrTask for Add<T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let product = self.0;
        let mut column = 0;
        // SAFETY: the contract of `Add` guarantees the operands. Each strip ends at or before
        // `product.n`; the last vector of a strip of one vector may be partial.
        unsafe {
            // The sums of 4 vectors of 6 rows, or of 8 vectors of 3 rows, fit the registers of
            // AVX-512 only.
            while S::LANES == 16 && product.results <= 3 && column + 8 * S::LANES <= product.n {
                product.strip::<S, 8>(simd, column, S::LANES);
                column += 8 * S::LANES;
            }
            while S::LANES == 16 && column + 4 * S::LANES <= product.n {
                product.strip::<S, 4>(simd, column, S::LANES);
                column += 4 * S::LANES;
            }
            while column + 2 * S::LANES <= product.n {
                product.strip::<S, 2>(simd, column, S::LANES);
                column += 2 * S::LANES;
            }
            while column < product.n {
                product.strip::<S, 1>(simd, column, S::LANES.min(product.n - column));
                column += S::LANES;
            }
        }
    }
}

impl<T: Element> GemmRows<T> {
    /// All rows of results, in the columns of `W` vectors from `column` on. The last vector has
    /// `last` floats.
    ///
    /// # Safety
    /// As [`GemmRows::add`]; `column + (W - 1) * S::LANES + last <= n`.
    #[inline(always)]
    unsafe fn strip<S: Simd, const W: usize>(self, simd: S, column: usize, last: usize) {
        let mut row = 0;
        // SAFETY: `row + R <= self.results` in each call, and the caller guarantees the columns.
        unsafe {
            while row + TILE_RESULTS <= self.results {
                self.tile::<S, TILE_RESULTS, W>(simd, row, column, last);
                row += TILE_RESULTS;
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

    /// Rows `row .. row + R` of results, in the columns of `W` vectors.
    ///
    /// # Safety
    /// As [`GemmRows::strip`]; `row + R <= results`.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const W: usize>(
        self,
        simd: S,
        row: usize,
        column: usize,
        last: usize,
    ) {
        let len = |c: usize| if c + 1 == W { last } else { S::LANES };
        // SAFETY: the caller guarantees rows `row .. row + R` and the columns of `W` vectors, of
        // which the last has `last` floats, inside `out` and `self.rows`, and the weights of all
        // terms.
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
                    *term = T::load(simd, values.add(c * S::LANES), len(c));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let weight =
                        simd.splat(*weights.add(i * self.weights_stride + j * self.weights_step));
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
    use super::*;
    use crate::isa::Level;
    use crate::simd::dispatch_ptr_at;
    use proptest::prelude::*;
    use rand_xoshiro::Xoshiro256PlusPlus;
    use rand_xoshiro::rand_core::SeedableRng as _;

    /// Mixes rows of elements that were rounded to `T`, at every level.
    fn check<T: Element + Into<f64>>(
        [results, terms, n, pad]: [usize; 4],
        transposed: bool,
        seed: u32,
        round: impl Fn(f32) -> T,
    ) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(u64::from(seed));
        let mut floats = |count: usize| -> Vec<f32> {
            let next = || (rng.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0;
            std::iter::repeat_with(next).take(count).collect()
        };
        let (rows_stride, out_stride) = (n + 2 * pad, n + 3 * pad);
        let (weights_stride, weights_step) = match transposed {
            false => (terms + pad, 1),
            true => (1, results + pad),
        };
        let weights = floats(results.max(terms) * (results.max(terms) + pad));
        let rows: Vec<T> = floats(terms * rows_stride).into_iter().map(round).collect();
        let before = floats(results * out_stride);
        for level in Level::ALL.into_iter().filter(|level| level.is_supported()) {
            let mut out = before.clone();
            let product = GemmRows {
                results,
                terms,
                n,
                weights: weights.as_ptr(),
                weights_stride,
                weights_step,
                rows: rows.as_ptr(),
                rows_stride,
                out: out.as_mut_ptr(),
                out_stride,
            };
            // SAFETY: the vectors have the lengths of the operands.
            unsafe { dispatch_ptr_at(level, Add(product)) };
            for (at, (&out, &before)) in out.iter().zip(&before).enumerate() {
                let (i, c) = (at / out_stride, at % out_stride);
                if c >= n {
                    assert_eq!(out, before);
                    continue;
                }
                let term = |j: usize| -> f64 {
                    let value: f64 = rows[j * rows_stride + c].into();
                    f64::from(weights[i * weights_stride + j * weights_step]) * value
                };
                let exact = (0..terms).map(term).sum::<f64>() + f64::from(before);
                assert!(
                    (f64::from(out) - exact).abs() < 1e-5,
                    "{level:?} {out} {exact}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn every_simd_level_writes_the_sums_and_nothing_else(
            lengths in [0usize..15, 0usize..20, 0usize..150, 0usize..5],
            transposed in any::<bool>(),
            seed in any::<u32>(),
        ) {
            check(lengths, transposed, seed, |x| x);
            check(lengths, transposed, seed, f16::from_f32);
            check(lengths, transposed, seed, bf16::from_f32);
        }
    }
}
