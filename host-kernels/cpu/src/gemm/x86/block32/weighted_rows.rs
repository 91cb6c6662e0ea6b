//! Sums of rows of blocks, each row times a weight: what attention does with values.
//!
//! The weights of a row of results, times the scales of a block of each row, are rounded to
//! integers of 16 bits with one scale. So two quants of a lane are multiplied and added at once, as
//! integers, and quants become no floats. The error of a product is at most 2^-16 of the largest.
//! Where a weight is large beside the sum of all weights, such errors would count; then what
//! rounding has left is added in a second pass, with a scale of its own.

use crate::gemm::kernel::{MAX_WEIGHTED_ROWS, WeightedRowsArgs};
use crate::gemm::x86::block_simd::BlockSimd;
use crate::gemm::x86::blocks::Block32Kernel;

/// A row of results has a second pass if its largest weight is more than one in so many of the sum
/// of its weights.
const FEW: f32 = 16.0;
/// The largest integer.
const MAX_VALUE: f32 = 32767.0;
/// Weights without a larger one become zeros: the inverse of their scale might be infinite.
const MIN_VALUE: f32 = 1e-30;
/// Elements of a block.
const BLOCK: usize = 32;
/// The most vectors of integers of a block.
const VECTORS: usize = 4;
/// The most rows of results at once.
const RESULTS: usize = 8;

// Quants are at most 128.
const _: () = assert!(MAX_WEIGHTED_ROWS as i64 * 128 * 32768 <= i32::MAX as i64);

/// What is rounded.
#[derive(Clone, Copy, PartialEq)]
enum Pass {
    /// The weights times the scales.
    Products,
    /// What rounding has left of these.
    Residuals,
}

/// What belongs to a block of each row.
struct Factors {
    scales: [f32; MAX_WEIGHTED_ROWS],
    minimums: [f32; MAX_WEIGHTED_ROWS],
}

/// The weights of rows of results, rounded.
struct Rounded {
    /// Two weights of 16 bits in each, in the order of [`pair`].
    pairs: [[u32; MAX_WEIGHTED_ROWS / 2]; RESULTS],
    scales: [f32; RESULTS],
    /// The sums of the weights times the minimums.
    minimums: [f32; RESULTS],
}

/// Adds the sums to the results.
///
/// # Safety
/// As [`crate::gemm::kernel::WeightedRows`], with the instructions of `S`.
#[inline(always)]
pub(in crate::gemm::x86) unsafe fn weighted_rows<S: BlockSimd, B: Block32Kernel>(
    args: &WeightedRowsArgs,
) {
    if args.terms == 0 {
        return;
    }
    let mut rows = [args.rows; MAX_WEIGHTED_ROWS];
    for (j, row) in rows.iter_mut().enumerate() {
        // Behind the last row, its weights are 0.
        *row = args
            .rows
            .wrapping_add(j.min(args.terms - 1) * args.rows_stride);
    }
    debug_assert!(args.results <= MAX_WEIGHTED_ROWS);
    // SAFETY: the caller guarantees the arguments and the instructions.
    let second = unsafe { second_passes::<S>(args) };
    let mut rounded = Rounded {
        pairs: [[0; MAX_WEIGHTED_ROWS / 2]; RESULTS],
        scales: [0.0; RESULTS],
        minimums: [0.0; RESULTS],
    };
    for block in 0..args.n / BLOCK {
        // SAFETY: block `block` is in all rows. Each arm of `results` adds to rows of results that
        // are left. The caller guarantees the arguments and the instructions.
        unsafe {
            let factors = factors::<S, B>(args, &rows, block);
            let mut first = 0;
            macro_rules! results {
                ($n:literal) => {{
                    let pass = Pass::Products;
                    add_to::<S, B, $n>(args, &rows, block, &factors, &mut rounded, first, pass);
                    first += $n;
                }};
            }
            while first < args.results {
                match args.results - first {
                    8.. if S::LANES == 16 => results!(8),
                    4 | 7 if S::LANES == 16 => results!(4),
                    6 if S::LANES == 16 => results!(6),
                    3 | 5 if S::LANES == 16 => results!(3),
                    2.. => results!(2),
                    _ => results!(1),
                }
            }
            for row in (0..args.results).filter(|row| second >> row & 1 == 1) {
                let pass = Pass::Residuals;
                add_to::<S, B, 1>(args, &rows, block, &factors, &mut rounded, row, pass);
            }
        }
    }
}

/// The rows of results, one bit each, with a second pass.
///
/// # Safety
/// As [`weighted_rows`].
#[inline(always)]
unsafe fn second_passes<S: BlockSimd>(args: &WeightedRowsArgs) -> u64 {
    let mut second = 0;
    for row in 0..args.results {
        // SAFETY: the caller guarantees the weights and the total of each row, and the
        // instructions. A vector begins at a weight below `terms`, and ends at or before them.
        unsafe {
            let weights = args.weights.add(row * args.weights_stride);
            let mut largest = S::zero_int();
            for v in (0..args.terms).step_by(S::LANES) {
                let weights = S::v_load(weights.add(v), S::LANES.min(args.terms - v));
                largest = S::larger_magnitudes(largest, weights);
            }
            let largest = f32::from_bits(S::largest(largest));
            second |= u64::from(largest * FEW > *args.totals.add(row)) << row;
        }
    }
    second
}

/// The scales, and the minimums, of block `block` of each row. The values of hidden rows, and of
/// rows behind the last, are 0.
///
/// # Safety
/// Each of `rows` has the block. The processor has the instructions of `S`.
#[inline(always)]
unsafe fn factors<S: BlockSimd, B: Block32Kernel>(
    args: &WeightedRowsArgs,
    rows: &[*const u8; MAX_WEIGHTED_ROWS],
    block: usize,
) -> Factors {
    const { assert!(B::SCALE_FIRST && B::ELEMENTS == BLOCK && !B::HALF_SCALES) }
    let mut factors = Factors {
        scales: [0.0; MAX_WEIGHTED_ROWS],
        minimums: [0.0; MAX_WEIGHTED_ROWS],
    };
    let at = block * size_of::<B>();
    for v in (0..args.terms).step_by(S::LANES) {
        // SAFETY: `v + S::LANES <= MAX_WEIGHTED_ROWS`, a multiple of the lanes. A block of
        // `SCALE_FIRST` begins with the F16 of its scale and, if there is one, of its minimum. The
        // caller guarantees the block and the instructions.
        unsafe {
            let rows = rows.as_ptr().add(v);
            let to = factors.scales.as_mut_ptr().add(v);
            S::v_store(S::halves_of_rows(rows, at), to, S::LANES);
            if B::HAS_MIN {
                let to = factors.minimums.as_mut_ptr().add(v);
                let minimums = S::halves_of_rows(rows, at + size_of::<u16>());
                S::v_store(minimums, to, S::LANES);
            }
        }
    }
    factors.scales[args.terms..].fill(0.0);
    factors.minimums[args.terms..].fill(0.0);
    if args.live != u64::MAX >> (MAX_WEIGHTED_ROWS - args.terms) {
        for j in (0..args.terms).filter(|j| args.live >> j & 1 == 0) {
            factors.scales[j] = 0.0;
            factors.minimums[j] = 0.0;
        }
    }
    factors
}

/// The first of the two rows whose weights are pair `i` of [`Rounded::pairs`]; the second is the
/// next. The order is that of [`IntSimd::to_i16`](crate::gemm::x86::int_simd::IntSimd::to_i16).
#[inline(always)]
const fn pair<S: BlockSimd>(i: usize) -> usize {
    let (vectors, p) = (i / S::LANES, i % S::LANES);
    2 * S::LANES * vectors + 4 * (p / 4) + 2 * (p % 2) + p % 4 / 2 * S::LANES
}

/// Adds block `block` of the sums of `R` rows of results from `first` on.
///
/// # Safety
/// As [`weighted_rows`]; `first + R <= args.results`, and each of `rows` has the block.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn add_to<S: BlockSimd, B: Block32Kernel, const R: usize>(
    args: &WeightedRowsArgs,
    rows: &[*const u8; MAX_WEIGHTED_ROWS],
    block: usize,
    factors: &Factors,
    weights: &mut Rounded,
    first: usize,
    pass: Pass,
) {
    const { assert!(R <= RESULTS) }
    let vectors = BLOCK / S::LANES;
    // SAFETY: the caller guarantees the weights and the results of rows `first .. first + R`, and
    // the block in each of `rows`. `pair(i) + 1 < MAX_WEIGHTED_ROWS`, as
    // `i < MAX_WEIGHTED_ROWS / 2`. The block has `vectors` vectors of results. The caller
    // guarantees the instructions.
    unsafe {
        for r in 0..R {
            let from = args.weights.add((first + r) * args.weights_stride);
            round::<S, B>(from, args.terms, factors, weights, r, pass);
        }
        let mut acc = [[S::zero_int(); VECTORS]; R];
        for i in 0..args.terms.div_ceil(2 * S::LANES) * S::LANES {
            let j = pair::<S>(i);
            let quants = S::pairs(B::signed(rows[j], block), B::signed(rows[j + 1], block));
            for r in 0..R {
                let weight = S::splat_int(weights.pairs[r][i]);
                for v in 0..vectors {
                    acc[r][v] = S::dot_pairs(acc[r][v], quants[v], weight);
                }
            }
        }
        for r in 0..R {
            let mut sums = [S::v_splat(0.0); VECTORS];
            for v in 0..vectors {
                sums[v] = S::to_floats(acc[r][v]);
            }
            let sums = S::in_order(sums);
            let to = args.out.add((first + r) * args.out_stride + block * BLOCK);
            for v in 0..vectors {
                let to = to.add(v * S::LANES);
                let mut sum = S::v_load(to, S::LANES);
                sum = S::v_mul_add(sums[v], S::v_splat(weights.scales[r]), sum);
                if B::HAS_MIN {
                    sum = S::v_add(sum, S::v_splat(weights.minimums[r]));
                }
                S::v_store(sum, to, S::LANES);
            }
        }
    }
}

/// Rounds the `terms` weights at `from`, those of row `r` of results, each times the scale of its
/// row. If a product is not finite, the scale is NaN.
///
/// # Safety
/// `from` is readable for `terms` floats. The processor has the instructions of `S`.
#[inline(always)]
unsafe fn round<S: BlockSimd, B: Block32Kernel>(
    from: *const f32,
    terms: usize,
    factors: &Factors,
    to: &mut Rounded,
    r: usize,
    pass: Pass,
) {
    /// The most vectors of weights.
    const MOST: usize = MAX_WEIGHTED_ROWS / 8;
    let vectors = terms.div_ceil(2 * S::LANES) * 2;
    // SAFETY: vector `v` begins at a weight below `terms`, or no float is read. The factors have
    // `MAX_WEIGHTED_ROWS` floats, a multiple of two vectors, and the pairs as many words of 16
    // bits. The caller guarantees the weights and the instructions.
    unsafe {
        let mut products = [S::v_splat(0.0); MOST];
        let mut minimums = S::v_splat(0.0);
        let mut largest = S::zero_int();
        for v in 0..vectors {
            let at = v * S::LANES;
            let n = terms.saturating_sub(at).min(S::LANES);
            let weights = S::v_load(from.wrapping_add(at), n);
            let scales = S::v_load(factors.scales.as_ptr().add(at), S::LANES);
            products[v] = S::v_mul(weights, scales);
            largest = S::larger_magnitudes(largest, products[v]);
            if B::HAS_MIN {
                let factors = S::v_load(factors.minimums.as_ptr().add(at), S::LANES);
                minimums = S::v_mul_add(weights, factors, minimums);
            }
        }
        let (mut inverse, mut scale) = scales(S::largest(largest));
        if pass == Pass::Residuals {
            let mut largest = S::zero_int();
            for product in &mut products[..vectors] {
                let rounded = S::v_round_even(S::v_mul(*product, S::v_splat(inverse)));
                *product = S::v_neg_mul_add(rounded, S::v_splat(scale), *product);
                largest = S::larger_magnitudes(largest, *product);
            }
            (inverse, scale) = scales(S::largest(largest));
            minimums = S::v_splat(0.0);
        }
        let inverse = S::v_splat(inverse);
        for v in (0..vectors).step_by(2) {
            let (a, b) = (products[v], products[v + 1]);
            let pairs = S::to_i16(S::v_mul(a, inverse), S::v_mul(b, inverse));
            let to = to.pairs[r].as_mut_ptr().add(v / 2 * S::LANES);
            S::store_int(to.cast(), pairs);
        }
        to.scales[r] = scale;
        if B::HAS_MIN {
            to.minimums[r] = S::v_sum(minimums);
        }
    }
}

/// The inverse of the scale, and the scale, of products of which the largest has these bits.
#[inline(always)]
fn scales(largest: u32) -> (f32, f32) {
    let largest = f32::from_bits(largest);
    match largest {
        _ if !largest.is_finite() => (0.0, f32::NAN),
        _ if largest < MIN_VALUE => (0.0, 0.0),
        _ => (MAX_VALUE / largest, largest * (1.0 / MAX_VALUE)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand_xoshiro::Xoshiro256PlusPlus;
    use rand_xoshiro::rand_core::SeedableRng as _;

    use super::{BLOCK, MAX_VALUE, MAX_WEIGHTED_ROWS};
    use crate::formats::{Format, Type};
    use crate::gemm::{Level, WeightedRowsArgs, weighted_rows};

    /// Rows of blocks, the numbers in them, and weights.
    struct Case {
        ty: Type,
        terms: usize,
        n: usize,
        live: u64,
        stride: usize,
        rows: Vec<u8>,
        values: Vec<f32>,
        weights: Vec<f32>,
        totals: Vec<f32>,
        before: Vec<f32>,
    }

    impl Case {
        fn new(ty: Type, [results, terms, blocks]: [usize; 3], hidden: u64, seed: u32) -> Case {
            let mut random = Xoshiro256PlusPlus::seed_from_u64(u64::from(seed));
            let mut floats = |count: usize| -> Vec<f32> {
                let next = || (random.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0;
                std::iter::repeat_with(next).take(count).collect()
            };
            let format = Format::of(ty).unwrap();
            let (n, live) = (blocks * BLOCK, u64::MAX >> (64 - terms) & !hidden);
            let stride = format.row_bytes(n) + 6;
            let (mut rows, mut values) = (vec![0; terms * stride], vec![0.0; terms * n]);
            let mut weights = floats(results * MAX_WEIGHTED_ROWS);
            for j in 0..terms {
                let row = rows[j * stride..].as_mut_ptr();
                // SAFETY: both have a row of `n` elements for `j`.
                unsafe {
                    (format.quantize_row)(floats(n).as_ptr(), row, n);
                    (format.dequantize_row)(row, values[j * n..].as_mut_ptr(), n);
                }
                if live >> j & 1 == 0 {
                    for block in 0..blocks {
                        // The scale is NaN.
                        let at = j * stride + block * format.bytes;
                        rows[at..at + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
                    }
                    values[j * n..][..n].fill(0.0);
                    (0..results).for_each(|i| weights[i * MAX_WEIGHTED_ROWS + j] = 0.0);
                }
            }
            // Every second row has weights beside which its own are small.
            let totals = (0..results).map(|i| i as f32 % 2.0 * 1000.0).collect();
            let before = floats(results * n);
            Case {
                ty,
                terms,
                n,
                live,
                stride,
                rows,
                values,
                weights,
                totals,
                before,
            }
        }

        /// Rows `first..` of results.
        fn run(&self, level: Level, first: usize) -> Vec<f32> {
            let mut out = self.before[first * self.n..].to_vec();
            let args = WeightedRowsArgs {
                results: out.len() / self.n,
                terms: self.terms,
                live: self.live,
                n: self.n,
                weights: self.weights[first * MAX_WEIGHTED_ROWS..].as_ptr(),
                weights_stride: MAX_WEIGHTED_ROWS,
                totals: self.totals[first..].as_ptr(),
                rows: self.rows.as_ptr(),
                rows_stride: self.stride,
                out: out.as_mut_ptr(),
                out_stride: self.n,
            };
            // SAFETY: the vectors have the lengths of the arguments.
            unsafe { weighted_rows(self.ty, level).unwrap()(&args) };
            out
        }

        fn check(&self, level: Level) {
            let out = self.run(level, 0);
            for (at, (&out, &before)) in out.iter().zip(&self.before).enumerate() {
                let (i, c) = (at / self.n, at % self.n);
                let (mut exact, mut largest) = (f64::from(before), 0.0f64);
                for j in 0..self.terms {
                    let weight = f64::from(self.weights[i * MAX_WEIGHTED_ROWS + j]);
                    let value = f64::from(self.values[j * self.n + c]);
                    exact += weight * value;
                    largest = largest.max(weight.abs());
                }
                // Half a step for each weight, with quants of twice the largest value.
                let off = match self.totals[i] == 0.0 {
                    true => 0.0,
                    false => largest * 2.0 / f64::from(MAX_VALUE) * self.terms as f64,
                };
                let off = off + 1e-5;
                assert!(
                    (f64::from(out) - exact).abs() <= off,
                    "{:?} {level:?} {out} {exact}",
                    self.ty
                );
            }
            // A row of results does not depend on those before it.
            for first in 1..self.before.len() / self.n {
                assert_eq!(self.run(level, first), out[first * self.n..]);
            }
        }
    }

    proptest! {
        #[test]
        fn every_level_writes_the_sums_of_visible_rows(
            lengths in [1usize..12, 1usize..65, 1usize..6],
            hidden in prop_oneof![Just(0), any::<u64>()],
            seed in any::<u32>(),
        ) {
            let types = [
                Type::Q4_0, Type::Q4_1, Type::Q5_0, Type::Q5_1, Type::Q8_0, Type::Iq4Nl,
            ];
            for ty in types {
                let case = Case::new(ty, lengths, hidden, seed);
                for level in Level::ALL.into_iter().filter(|level| level.is_supported()) {
                    if level != Level::Scalar {
                        case.check(level);
                    }
                }
            }
        }
    }
}
