//! Quantisers of the formats with codebooks: IQ1, IQ2 and IQ3.
//!
//! ggml's CPU backend does not write these formats, and the output of its quantisation tool depends
//! on an importance matrix, so there are no reference bytes. These quantisers minimise the sum of
//! squared errors:
//!
//! 1. For each sub-block, try a range of scales. For each scale, every eight values take the
//!    nearest entry of the codebook, and the scale becomes the best one for these quants (least
//!    squares).
//! 2. The largest scale determines the scale of the block. Each sub-block takes the multiple of
//!    this scale, and the entries for it, with the smallest error. The scale of the block becomes
//!    the best one for all quants.

use std::sync::LazyLock;

use super::grids::{self, SIGN_OFFSET};
use super::{Type, f16_to_f32, f32_to_f16};
use crate::simd::{Simd, Task, dispatch};

/// The codebook of IQ2_XXS.
pub(super) static IQ2_XXS: LazyLock<Codebook<8>> =
    LazyLock::new(|| Codebook::new(&grids::IQ2_XXS, SIGN_OFFSET));
/// The codebook of IQ2_XS.
pub(super) static IQ2_XS: LazyLock<Codebook<8>> =
    LazyLock::new(|| Codebook::new(&grids::IQ2_XS, SIGN_OFFSET));
/// The codebook of IQ2_S.
pub(super) static IQ2_S: LazyLock<Codebook<8>> =
    LazyLock::new(|| Codebook::new(&grids::IQ2_S, SIGN_OFFSET));
/// The codebook of IQ3_XXS.
pub(super) static IQ3_XXS: LazyLock<Codebook<4>> =
    LazyLock::new(|| Codebook::new(&grids::IQ3_XXS, SIGN_OFFSET));
/// The codebook of IQ3_S.
pub(super) static IQ3_S: LazyLock<Codebook<4>> =
    LazyLock::new(|| Codebook::new(&grids::IQ3_S, SIGN_OFFSET));
/// The codebook of IQ1_S and IQ1_M; the coordinates are eight times the values.
pub(super) static IQ1: LazyLock<Codebook<8>> = LazyLock::new(|| Codebook::new(&grids::IQ1, 15));

/// Makes the codebook with which rows of `ty` are written, if there is one: up to 60 ms for the
/// first of a process.
pub(crate) fn prepare(ty: Type) {
    match ty {
        Type::Iq2Xxs => {
            let _ = LazyLock::force(&IQ2_XXS);
        }
        Type::Iq2Xs => {
            let _ = LazyLock::force(&IQ2_XS);
        }
        Type::Iq2S => {
            let _ = LazyLock::force(&IQ2_S);
        }
        Type::Iq3Xxs => {
            let _ = LazyLock::force(&IQ3_XXS);
        }
        Type::Iq3S => {
            let _ = LazyLock::force(&IQ3_S);
        }
        Type::Iq1S | Type::Iq1M => {
            let _ = LazyLock::force(&IQ1);
        }
        _ => {}
    }
}

/// The candidates for values whose nearest levels are not an entry.
const NEAR: usize = 16;

/// The most levels of a coordinate.
const MAX_LEVELS: usize = 8;

/// A codebook of points with `D` coordinates, prepared for the search for the nearest point.
pub(super) struct Codebook<const D: usize> {
    points: Vec<[i8; D]>,
    /// The number of values of a coordinate.
    levels: usize,
    /// The midpoints between adjacent levels; infinite after the last level.
    halfway: [f32; MAX_LEVELS - 1],
    /// For each combination of levels, the nearest entries, sorted by distance. If the combination
    /// is an entry, only this entry, repeated.
    near: Vec<[u16; NEAR]>,
}

impl<const D: usize> Codebook<D> {
    /// The codebook whose coordinates are the low bytes of the entries minus `offset`.
    fn new(entries: &[u64], offset: u8) -> Codebook<D> {
        let point = |entry: &u64| -> [i8; D] {
            let bytes = entry.to_le_bytes();
            std::array::from_fn(|i| bytes[i].wrapping_sub(offset) as i8)
        };
        let points: Vec<[i8; D]> = entries.iter().map(point).collect();
        let mut levels: Vec<i8> = points.as_flattened().to_vec();
        levels.sort_unstable();
        levels.dedup();
        let mut halfway = [f32::INFINITY; MAX_LEVELS - 1];
        for (halfway, pair) in halfway.iter_mut().zip(levels.windows(2)) {
            *halfway = (f32::from(pair[0]) + f32::from(pair[1])) / 2.0;
        }
        let combinations = levels.len().pow(D as u32);
        let near = (0..combinations)
            .map(|key| {
                let mut rest = key;
                let values = std::array::from_fn(|_| {
                    let level = levels[rest % levels.len()];
                    rest /= levels.len();
                    level
                });
                nearest_entries(&points, values)
            })
            .collect();
        Codebook {
            points,
            levels: levels.len(),
            halfway,
            near,
        }
    }

    /// The index of the nearest entry among the candidates: nearly always the nearest of all.
    #[inline(always)]
    fn nearest(&self, x: &[f32; D]) -> usize {
        let mut key = 0;
        for x in x.iter().rev() {
            let level: usize = self.halfway.iter().map(|h| usize::from(x > h)).sum();
            key = key * self.levels + level;
        }
        let near = &self.near[key];
        if near[0] == near[1] {
            return near[0].into();
        }
        let (mut best, mut least) = (near[0], f32::INFINITY);
        for &index in near {
            let point = &self.points[usize::from(index)];
            let mut distance = 0.0;
            for (x, &p) in x.iter().zip(point) {
                let difference = x - f32::from(p);
                distance += difference * difference;
            }
            if distance < least {
                (best, least) = (index, distance);
            }
        }
        best.into()
    }
}

fn nearest_entries<const D: usize>(points: &[[i8; D]], values: [i8; D]) -> [u16; NEAR] {
    let mut keys: Vec<u32> = points
        .iter()
        .enumerate()
        .map(|(i, point)| {
            let difference = |(&a, &b): (&i8, &i8)| (i32::from(a) - i32::from(b)).pow(2);
            let distance: i32 = point.iter().zip(&values).map(difference).sum();
            (distance as u32) << 12 | i as u32 // at most 8 * 43^2 = 14,792; at most 2,048 entries
        })
        .collect();
    keys.select_nth_unstable(NEAR - 1);
    keys.truncate(NEAR);
    keys.sort_unstable();
    let index = |key: u32| (key & 0xfff) as u16;
    if keys[0] >> 12 == 0 {
        return [index(keys[0]); NEAR];
    }
    std::array::from_fn(|i| index(keys[i]))
}

/// Eight quants and their encoding.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Octet {
    /// The quants with signs.
    q: [i8; 8],
    /// The entry; for codebooks with four coordinates, the entry of each half.
    pub(super) index: [u16; 2],
    /// One bit for each quant: whether the quant is negative.
    pub(super) signs: u8,
    /// Whether the entry is shifted down instead of up.
    pub(super) down: bool,
}

/// The nearest magnitudes from a codebook, with signs. If `even`, the number of minus signs is
/// even.
#[inline(always)]
pub(super) fn with_signs<const D: usize>(book: &Codebook<D>, x: &[f32; 8], even: bool) -> Octet {
    let mut octet = Octet::default();
    let mut magnitudes = x.map(f32::abs);
    for (i, x) in x.iter().enumerate() {
        octet.signs |= u8::from(*x < 0.0) << i;
    }
    if even && octet.signs.count_ones() % 2 == 1 {
        // A wrong sign causes the smallest error for the smallest magnitude.
        let mut least = 0;
        for i in 1..8 {
            if magnitudes[i] < magnitudes[least] {
                least = i;
            }
        }
        octet.signs ^= 1 << least;
        magnitudes[least] = -magnitudes[least];
    }
    for (half, x) in magnitudes.as_chunks::<D>().0.iter().enumerate() {
        let index = book.nearest(x);
        octet.index[half] = index as u16;
        octet.q[half * D..][..D].copy_from_slice(&book.points[index]);
    }
    for (i, q) in octet.q.iter_mut().enumerate() {
        if octet.signs >> i & 1 == 1 {
            *q = -*q;
        }
    }
    octet
}

/// The nearest values from the codebook of IQ1, shifted by an eighth.
#[inline(always)]
pub(super) fn shifted(x: &[f32; 8], down: bool) -> Octet {
    let shift = if down { -1 } else { 1 };
    let index = IQ1.nearest(&x.map(|x| x - f32::from(shift)));
    Octet {
        q: IQ1.points[index].map(|q| q + shift),
        index: [index as u16, 0],
        signs: 0,
        down,
    }
}

/// [`shifted`] in the direction with the smaller error.
#[inline(always)]
pub(super) fn shifted_either_way(x: &[f32; 8]) -> Octet {
    let [up, down] = [false, true].map(|down| shifted(x, down));
    if error(x, &down, 1.0) < error(x, &up, 1.0) {
        down
    } else {
        up
    }
}

/// The sum of squared errors of eight quants times `scale`.
#[inline(always)]
fn error(x: &[f32; 8], octet: &Octet, scale: f32) -> f32 {
    let mut sum = 0.0;
    for (x, &q) in x.iter().zip(&octet.q) {
        let difference = x - scale * f32::from(q);
        sum += difference * difference;
    }
    sum
}

/// The scales and quants that a format can encode.
#[derive(Debug, Clone, Copy)]
pub(super) struct QuantRange {
    /// Elements of a sub-block.
    pub(super) sub: usize,
    /// The number of scales of a sub-block: `(2 l + 1) * unit * d` for `l` from 0.
    pub(super) scales: u8,
    /// See `scales`.
    pub(super) unit: f32,
    /// The largest quant.
    pub(super) largest: f32,
}

/// A fitted block.
pub(super) struct Fit {
    /// The block's scale (F16).
    pub(super) d: u16,
    /// The scale of each sub-block: `l` in [`QuantRange::scales`].
    pub(super) scales: [u8; 16],
    /// The quants.
    pub(super) octets: [Octet; 32],
}

/// Fits a block. Each sub-block uses one of `ways`, functions that return the quants of eight
/// scaled values. NaN counts as 0.
pub(super) fn fit<W: Fn(&[f32; 8]) -> Octet>(x: &[f32; 256], range: QuantRange, ways: &[W]) -> Fit {
    dispatch(FitBlock {
        x: x.map(|x| if x.is_nan() { 0.0 } else { x }),
        range,
        ways,
    })
}

/// A block to be fitted, as a task, so that the fit is compiled for the best instruction set.
struct FitBlock<'a, W> {
    x: [f32; 256],
    range: QuantRange,
    ways: &'a [W],
}

impl<W: Fn(&[f32; 8]) -> Octet> Task for FitBlock<'_, W> {
    type Output = Fit;

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) -> Fit {
        let FitBlock { x, range, ways } = self;
        let octets = x.as_chunks::<8>().0;
        let sub_octets = range.sub / 8;
        let mut targets = [(0, 0.0f32); 16];
        let mut largest = 0.0f32;
        for (target, x) in targets.iter_mut().zip(octets.chunks_exact(sub_octets)) {
            *target = best_scale(x, range.largest, ways);
            largest = largest.max(target.1);
        }
        let largest_step = f32::from(2 * (range.scales - 1) + 1);
        let mut fit = Fit {
            d: f32_to_f16(largest / (largest_step * range.unit)),
            scales: [0; 16],
            octets: [Octet::default(); 32],
        };
        for _ in 0..ROUNDS {
            let d = f16_to_f32(fit.d) * range.unit;
            let (mut sum_xq, mut sum_qq) = (0.0f32, 0.0f32);
            for (j, x) in octets.chunks_exact(sub_octets).enumerate() {
                let (way, target) = targets[j];
                let out = &mut fit.octets[j * sub_octets..][..sub_octets];
                fit.scales[j] = best_step(x, d, target, range.scales, &ways[way], out);
                let step = f32::from(2 * fit.scales[j] + 1);
                let (xq, qq) = products(x, out);
                sum_xq += step * xq;
                sum_qq += step * step * qq;
            }
            if sum_xq > 0.0 {
                fit.d = f32_to_f16(sum_xq / (sum_qq * range.unit));
            }
        }
        fit
    }
}

/// The number of iterations: the choice of steps and quants, then the fit of the scale of the
/// block.
const ROUNDS: usize = 2;

/// The scales that are tried, relative to the one that maps the largest magnitude to the largest
/// quant.
const TRIES: [f32; 16] = {
    let mut tries = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        tries[i] = 0.45 + 0.05 * i as f32;
        i += 1;
    }
    tries
};

/// `sum(x * q)` and `sum(q * q)`.
#[inline(always)]
fn products(x: &[[f32; 8]], octets: &[Octet]) -> (f32, f32) {
    let (mut sum_xq, mut sum_qq) = (0.0, 0.0);
    for (x, octet) in x.iter().zip(octets) {
        for (x, &q) in x.iter().zip(&octet.q) {
            let q = f32::from(q);
            sum_xq += x * q;
            sum_qq += q * q;
        }
    }
    (sum_xq, sum_qq)
}

/// The way and the scale with the smallest error of a sub-block. The scale is any number.
#[inline(always)]
fn best_scale<W: Fn(&[f32; 8]) -> Octet>(x: &[[f32; 8]], largest: f32, ways: &[W]) -> (usize, f32) {
    let magnitude = x.as_flattened().iter().fold(0.0f32, |m, x| m.max(x.abs()));
    if magnitude.is_infinite() {
        return (0, magnitude);
    }
    let (mut best, mut most) = ((0, 0.0), 0.0);
    for (way, nearest) in ways.iter().enumerate() {
        for relative in TRIES {
            let inverse = largest / (relative * magnitude);
            if !inverse.is_finite() {
                continue; // all values are 0 or subnormal
            }
            let mut octets = [Octet::default(); 4];
            for (octet, x) in octets.iter_mut().zip(x) {
                *octet = nearest(&x.map(|x| x * inverse));
            }
            let (sum_xq, sum_qq) = products(x, &octets);
            // With the scale xq / qq the error is xx - xq^2 / qq.
            let explained = sum_xq * (sum_xq / sum_qq);
            if sum_xq > 0.0 && explained > most {
                (best, most) = ((way, sum_xq / sum_qq), explained);
            }
        }
    }
    best
}

/// The step of `d` with the smallest error of a sub-block, near the step for the scale `target`.
/// Writes the quants.
#[inline(always)]
fn best_step<W: Fn(&[f32; 8]) -> Octet>(
    x: &[[f32; 8]],
    d: f32,
    target: f32,
    steps: u8,
    nearest: &W,
    out: &mut [Octet],
) -> u8 {
    let middle = ((target / d - 1.0) / 2.0).round() as i32; // NaN becomes 0
    let middle = middle.clamp(0, i32::from(steps) - 1) as u8;
    let (mut best, mut least) = (middle, f32::INFINITY);
    for step in middle.saturating_sub(1)..=(middle + 1).min(steps - 1) {
        let scale = d * f32::from(2 * step + 1);
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let mut octets = [Octet::default(); 4];
        let mut sum = 0.0;
        for (octet, x) in octets.iter_mut().zip(x) {
            *octet = nearest(&x.map(|x| x * inverse));
            sum += error(x, octet, scale);
        }
        if sum < least || (step == middle && least.is_infinite()) {
            (best, least) = (step, sum);
            out.copy_from_slice(&octets[..out.len()]);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_xoshiro::Xoshiro256PlusPlus;
    use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};

    /// The smallest squared distance of any entry.
    fn least_distance<const D: usize>(book: &Codebook<D>, x: &[f32; D]) -> f64 {
        let distance = |point: &[i8; D]| -> f64 {
            let terms = x.iter().zip(point);
            terms
                .map(|(&x, &p)| (f64::from(x) - f64::from(p)).powi(2))
                .sum()
        };
        book.points
            .iter()
            .map(distance)
            .fold(f64::INFINITY, f64::min)
    }

    /// Compares with a search over all entries: the result is mostly the nearest, rarely a much
    /// farther one. Uniformly distributed values are the worst case, because codebooks have the
    /// likely combinations.
    fn finds_the_nearest<const D: usize>(book: &Codebook<D>, low: f32, high: f32) {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut next = || low + (high - low) * (random.next_u64() >> 40) as f32 / (1 << 24) as f32;
        let (mut exact, mut ours, mut best) = (0, 0.0, 0.0);
        const VALUES: usize = 4000;
        for _ in 0..VALUES {
            let x: [f32; D] = std::array::from_fn(|_| next());
            let point = book.points[book.nearest(&x)];
            let terms = x.iter().zip(&point);
            let distance: f64 = terms
                .map(|(&x, &p)| (f64::from(x) - f64::from(p)).powi(2))
                .sum();
            let least = least_distance(book, &x);
            exact += usize::from(distance <= least * 1.000_001);
            (ours, best) = (ours + distance, best + least);
        }
        assert!(
            exact * 100 >= VALUES * 90,
            "{exact} of {VALUES} are the nearest"
        );
        assert!(ours <= best * 1.02, "{ours} instead of {best} in all");
    }

    #[test]
    fn the_nearest_entry_is_found() {
        finds_the_nearest(&IQ2_XXS, -4.0, 50.0);
        finds_the_nearest(&IQ2_XS, -4.0, 50.0);
        finds_the_nearest(&IQ2_S, -4.0, 50.0);
        finds_the_nearest(&IQ3_XXS, -4.0, 70.0);
        finds_the_nearest(&IQ3_S, -2.0, 18.0);
        finds_the_nearest(&IQ1, -12.0, 12.0);
    }

    #[test]
    fn every_entry_is_nearest_to_itself() {
        for (i, point) in IQ1.points.iter().enumerate() {
            assert_eq!(IQ1.nearest(&point.map(f32::from)), i);
        }
        for (i, point) in IQ3_S.points.iter().enumerate() {
            assert_eq!(IQ3_S.nearest(&point.map(f32::from)), i);
        }
    }

    /// The smallest squared error of eight values and magnitudes of the codebook with signs. If
    /// `even`, an even number of signs must be negative.
    fn least_with_signs<const D: usize>(book: &Codebook<D>, x: &[f64; 8], even: bool) -> f64 {
        let part = |half: usize, flipped: Option<usize>| -> f64 {
            let error = |point: &[i8; D]| -> f64 {
                let terms = point.iter().enumerate().map(|(i, &p)| {
                    let at = half * D + i;
                    let x = if flipped == Some(at) {
                        -x[at].abs()
                    } else {
                        x[at].abs()
                    };
                    (x - f64::from(p)).powi(2)
                });
                terms.sum()
            };
            book.points.iter().map(error).fold(f64::INFINITY, f64::min)
        };
        let all = |flipped| (0..8 / D).map(|half| part(half, flipped)).sum::<f64>();
        let negative = x.iter().filter(|x| **x < 0.0).count();
        if even && negative % 2 == 1 {
            (0..8).map(|i| all(Some(i))).fold(f64::INFINITY, f64::min)
        } else {
            all(None)
        }
    }

    /// The smallest squared error for the codebook of IQ1, shifted.
    fn least_shifted(x: &[f64; 8], down: bool) -> f64 {
        let shift = if down { -1.0 } else { 1.0 };
        let error = |point: &[i8; 8]| -> f64 {
            let terms = x.iter().zip(point);
            terms
                .map(|(x, &p)| (x - f64::from(p) - shift).powi(2))
                .sum()
        };
        IQ1.points.iter().map(error).fold(f64::INFINITY, f64::min)
    }

    /// The smallest squared error of eight scaled values.
    type Least<'a> = dyn Fn(&[f64; 8]) -> f64 + 'a;

    /// Compares blocks with the smallest error for several scales of the block: every step and
    /// every entry, in f64.
    fn close_to_the_least<B: super::super::k_quants::QuantizeSuperBlock>(
        steps: i32,
        ways: &[&Least<'_>],
    ) {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(2);
        let (mut ours, mut least) = (0.0, 0.0);
        for _ in 0..2 {
            let x: [f32; 256] = std::array::from_fn(|_| {
                let mut sum = 0.0;
                for _ in 0..4 {
                    sum += (random.next_u64() >> 40) as f32 / (1 << 24) as f32 - 0.5;
                }
                sum
            });
            let block = B::quantize(&x).decode();
            for (j, x) in x.iter().enumerate() {
                let scale = f64::from(block.d) * f64::from(block.scales[j / B::SUB]);
                let value = scale * f64::from(i32::from(block.q[j]) - B::OFFSET);
                ours += (f64::from(*x) - value).powi(2);
            }
            let all = |d: f64| -> f64 {
                let sub_blocks = x.as_chunks::<8>().0.chunks_exact(B::SUB / 8);
                let error = |x: &[[f32; 8]], scale: f64, way: &Least<'_>| -> f64 {
                    let scaled = x.iter().map(|x| x.map(|x| f64::from(x) / scale));
                    scaled.map(|x| way(&x) * scale * scale).sum()
                };
                let least = |x: &[[f32; 8]]| -> f64 {
                    let scales = (0..steps).map(|l| d * f64::from(2 * l + 1));
                    let tries =
                        scales.flat_map(|scale| ways.iter().map(move |way| error(x, scale, way)));
                    tries.fold(f64::INFINITY, f64::min)
                };
                sub_blocks.map(least).sum()
            };
            let tries = [0.9, 1.0, 1.1].map(|by| all(f64::from(block.d) * by));
            least += tries.into_iter().fold(f64::INFINITY, f64::min);
        }
        assert!(
            ours <= 1.05 * least,
            "an error of {ours}, the least is {least}"
        );
    }

    #[test]
    fn blocks_are_close_to_the_least_error() {
        use super::super as formats;
        close_to_the_least::<formats::BlockIq2Xxs>(16, &[&|x| least_with_signs(&IQ2_XXS, x, true)]);
        close_to_the_least::<formats::BlockIq2Xs>(16, &[&|x| least_with_signs(&IQ2_XS, x, true)]);
        close_to_the_least::<formats::BlockIq2S>(16, &[&|x| least_with_signs(&IQ2_S, x, false)]);
        close_to_the_least::<formats::BlockIq3Xxs>(16, &[&|x| least_with_signs(&IQ3_XXS, x, true)]);
        close_to_the_least::<formats::BlockIq3S>(16, &[&|x| least_with_signs(&IQ3_S, x, false)]);
        let ways: [&Least<'_>; 2] = [&|x| least_shifted(x, false), &|x| least_shifted(x, true)];
        close_to_the_least::<formats::BlockIq1S>(8, &ways);
        let either = |x: &[f64; 8]| least_shifted(x, false).min(least_shifted(x, true));
        close_to_the_least::<formats::BlockIq1M>(8, &[&either]);
    }

    #[test]
    fn minus_signs_are_even_where_they_must_be() {
        let x = [-30.0, 40.0, 2.0, 9.0, 25.0, 43.0, 8.0, 8.0];
        let octet = with_signs(&IQ2_XXS, &x, true);
        assert_eq!(
            octet.signs, 0b101,
            "the smallest of them took the other sign"
        );
        assert_eq!(with_signs(&IQ2_S, &x, false).signs, 1);
    }
}
