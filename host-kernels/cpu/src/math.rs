//! Elementary functions of vectors, with an error of at most 2.5 ulp.
//!
//! The polynomials are minimax fits (Remez algorithm) of the function named beside them, relative
//! to the result. Infinities, NaN and denormal results are those of the exact function.

use crate::simd::{Lanes, Simd};

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// `LN2_HI + LN2_LO` is ln 2; the first part has so few bits that its product with a whole number
/// of up to 15 bits is exact.
const LN2_HI: f32 = 355.0 / 512.0;
const LN2_LO: f32 = -2.121_944_4e-4;

impl<S: Simd> Lanes<S> {
    /// `c[0] + c[1] * self + c[2] * self^2 + ...`
    #[inline(always)]
    fn polynomial<const N: usize>(self, c: [f32; N]) -> Lanes<S> {
        let (last, rest) = c.split_last().expect("a polynomial has a coefficient");
        rest.iter().rev().fold(self.splat(*last), |sum, &c| {
            sum.mul_add(self, self.splat(c))
        })
    }

    /// The smaller, NaN if `self` is.
    #[inline(always)]
    fn at_most(self, limit: f32) -> Lanes<S> {
        self.splat(limit).min(self)
    }

    /// The larger, NaN if `self` is.
    #[inline(always)]
    fn at_least(self, limit: f32) -> Lanes<S> {
        self.splat(limit).max(self)
    }

    /// `self = n ln 2 + r` with a whole `n` and `|r| <= ln 2 / 2`: `(n, r)`.
    #[inline(always)]
    fn reduce(self) -> (Lanes<S>, Lanes<S>) {
        let n = (self * LOG2_E).round_even();
        let r = n.mul_add(self.splat(-LN2_HI), self);
        (n, n.mul_add(self.splat(-LN2_LO), r))
    }

    /// `e^self`
    #[inline(always)]
    pub(crate) fn exp(self) -> Lanes<S> {
        // Beyond these limits the result is infinity or 0, in which it also ends at them.
        let (n, r) = self.at_most(89.0).at_least(-104.0).reduce();
        // (e^r - 1 - r) / r^2
        let q = r.polynomial([
            0.499_999_93,
            0.166_665_2,
            0.041_668_396,
            0.008_368_78,
            0.001_381_446,
        ]);
        ((r * r).mul_add(q, r) + 1.0).scale(n)
    }

    /// `e^self - 1`, accurate near zero.
    #[inline(always)]
    pub(crate) fn expm1(self) -> Lanes<S> {
        let (n, r) = self.at_most(89.0).at_least(-30.0).reduce();
        // (e^r - 1 - r) / r^2
        let q = r.polynomial([
            0.5,
            0.166_666_67,
            0.041_666_354,
            0.008_333_273,
            0.001_394_109_8,
            0.000_199_142_74,
        ]);
        let minus_1 = (r * r).mul_add(q, r);
        // Half of the result, because 2^128 is not a float.
        let half = self.splat(0.5).scale(n);
        half.mul_add(minus_1, half - 0.5) * 2.0
    }

    /// The natural logarithm.
    #[inline(always)]
    pub(crate) fn ln(self) -> Lanes<S> {
        let denormal = self.lt(self.splat(f32::MIN_POSITIVE));
        let (m, e) = denormal.select(self * 8_388_608.0, self).split();
        let e = denormal.select(e - 23.0, e);
        let t = m - 1.0;
        // (ln(1 + t) - t + t^2 / 2) / t^3
        let p = t.polynomial([
            0.333_334_48,
            -0.250_001_94,
            0.199_911_17,
            -0.166_437_66,
            0.144_674,
            -0.131_864_22,
            0.105_835_27,
            -0.046_180_804,
        ]);
        let square = t * t;
        let low = (square * t).mul_add(p, e * LN2_LO);
        let ln = e.mul_add(
            self.splat(LN2_HI),
            t + square.mul_add(self.splat(-0.5), low),
        );
        let zero = self.splat(0.0);
        let ln = self.lt(self.splat(f32::INFINITY)).select(ln, self);
        let ln = zero.lt(self).select(ln, self.splat(f32::NAN));
        zero.le(self)
            .select(self.le(zero).select(self.splat(f32::NEG_INFINITY), ln), ln)
    }

    /// `1 / (1 + e^-self)`; 0 where `e^-self` is no float, which is below -88.7.
    #[inline(always)]
    pub(crate) fn sigmoid(self) -> Lanes<S> {
        1.0 / (1.0 + (-self).exp())
    }

    /// The hyperbolic tangent.
    #[inline(always)]
    pub(crate) fn tanh(self) -> Lanes<S> {
        let t = (self.abs().at_most(10.0) * 2.0).expm1(); // tanh(10) rounds to 1
        (t / (t + 2.0)).copysign(self)
    }

    /// The error function.
    #[inline(always)]
    pub(crate) fn erf(self) -> Lanes<S> {
        let a = self.abs();
        // erf(a) / a - 1 as a function of a^2, for a < 1.
        let near = (a * a).polynomial([
            0.128_379_17,
            -0.376_126_27,
            0.112_836,
            -0.026_854_445,
            0.005_189_535,
            -0.000_802_084_1,
            7.889_118e-5,
        ]);
        // -ln(1 - erf(a)), for 1 <= a < 3.95, where erf rounds to 1.
        let far = a.at_most(3.95).polynomial([
            0.000_341_554_85,
            1.127_089,
            0.638_145,
            0.103_106_57,
            -0.021_837_976,
            0.002_947_636_6,
            -0.000_186_377,
        ]);
        let erf = a
            .lt(a.splat(1.0))
            .select(near.mul_add(a, a), 1.0 - (-far).exp());
        erf.copysign(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Level;
    use crate::simd::{Task, chunks, dispatch_at};

    /// A function of one float, for the tests.
    trait Function {
        const NAME: &'static str;
        /// Largest error, in units in the last place.
        const ULPS: f64;
        fn lanes<S: Simd>(x: Lanes<S>) -> Lanes<S>;
        fn exact(x: f64) -> f64;
    }

    macro_rules! functions {
        ($($name:ident($ulps:literal) = |$x:ident| $exact:expr;)*) => {$(
            #[allow(non_camel_case_types)]
            struct $name;
            impl Function for $name {
                const NAME: &'static str = stringify!($name);
                const ULPS: f64 = $ulps;
                #[inline(always)]
                fn lanes<S: Simd>(x: Lanes<S>) -> Lanes<S> {
                    x.$name()
                }
                fn exact($x: f64) -> f64 {
                    $exact
                }
            }
        )*};
    }

    functions! {
        exp(1.0) = |x| x.exp();
        expm1(2.0) = |x| x.exp_m1();
        ln(1.5) = |x| x.ln();
        sigmoid(2.5) = |x| {
            let inverse = (-x).exp();
            if inverse > f64::from(f32::MAX) { 0.0 } else { 1.0 / (1.0 + inverse) }
        };
        tanh(2.5) = |x| x.tanh();
        erf(2.0) = |x| erf_series(x);
        round(0.0) = |x| x.round();
        round_even(0.0) = |x| x.round_ties_even();
        floor(0.0) = |x| x.floor();
        ceil(0.0) = |x| x.ceil();
        trunc(0.0) = |x| x.trunc();
        abs(0.0) = |x| x.abs();
        sqrt(0.5) = |x| x.sqrt();
    }

    /// erf by its Taylor series, or by the continued fraction of erfc where that is faster.
    fn erf_series(x: f64) -> f64 {
        let a = x.abs();
        let value = if a.is_nan() {
            a
        } else if a < 2.5 {
            let (mut term, mut sum) = (a, a);
            for n in 1..80 {
                term *= -a * a / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            sum * std::f64::consts::FRAC_2_SQRT_PI
        } else {
            let tail = (1..200)
                .rev()
                .fold(0.0, |f, n| f64::from(n) / 2.0 / (a + f));
            1.0 - (-a * a).exp() / (std::f64::consts::PI.sqrt() * (a + tail))
        };
        value.copysign(x)
    }

    struct Apply<'a, F>(&'a mut [f32], std::marker::PhantomData<F>);

    impl<F: Function> Task for Apply<'_, F> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let Apply(x, _) = self;
            chunks::<S>(x.len(), |i, n| {
                F::lanes(simd.load(&x[i..i + n])).store(&mut x[i..i + n]);
            });
        }
    }

    /// The distance of `got` from `exact`, in units of the last place of a float near `exact`.
    fn ulps(got: f32, exact: f64) -> f64 {
        let nearest = exact as f32;
        if got == nearest || got.is_nan() && exact.is_nan() {
            return 0.0;
        }
        let exponent = (exact.abs().log2().floor() as i32).max(-126);
        (f64::from(got) - exact).abs() / 2f64.powi(exponent - 23)
    }

    fn measure<F: Function>() {
        // Every sign and exponent, with mantissas in steps that are no power of two.
        let mut inputs: Vec<f32> = (0..=u32::MAX)
            .step_by(4093)
            .map(f32::from_bits)
            .filter(|x| !x.is_nan())
            .collect();
        // The middle of the range of all these functions, finely.
        inputs.extend((-40_000..40_000).map(|i| i as f32 * 0.002_7));
        inputs.extend((-90..90).flat_map(|i| [i as f32, i as f32 + 0.5, (i as f32).next_up()]));
        inputs.extend([
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            f32::MIN_POSITIVE,
            0.499_999_97,
        ]);
        for level in Level::ALL.into_iter().filter(|level| level.is_supported()) {
            let mut outputs = inputs.clone();
            dispatch_at(level, Apply::<F>(&mut outputs, std::marker::PhantomData));
            let mut worst = (0.0, 0.0, 0.0);
            for (&x, &y) in inputs.iter().zip(&outputs) {
                let error = ulps(y, F::exact(f64::from(x)));
                assert!(
                    error.is_finite(),
                    "{} at {level:?}: f({x:e}) = {y:e}",
                    F::NAME
                );
                if error > worst.0 {
                    worst = (error, x, y);
                }
            }
            let (error, x, y) = worst;
            println!("{} at {level:?}: {error:.3} ulp at {x:e}", F::NAME);
            assert!(
                error <= F::ULPS,
                "{} at {level:?}: f({x:e}) = {y:e}, {error:.2} ulp from {:e}",
                F::NAME,
                F::exact(f64::from(x)),
            );
        }
    }

    macro_rules! measured {
        ($($name:ident)*) => {$(
            #[test]
            fn $name() {
                measure::<super::$name>();
            }
        )*};
    }

    mod within_bounds {
        use super::measure;
        measured!(exp expm1 ln sigmoid tanh erf round round_even floor ceil trunc abs sqrt);
    }

    struct Reductions<'a>(&'a [f32]);

    impl Task for Reductions<'_> {
        type Output = (f32, f32);
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> (f32, f32) {
            let (mut sum, mut largest) = (simd.splat(0.0), f32::NEG_INFINITY);
            chunks::<S>(self.0.len(), |i, n| {
                let x = simd.load(&self.0[i..i + n]);
                sum = sum + x;
                largest = largest.max(x.largest(n));
            });
            (sum.sum(), largest)
        }
    }

    #[test]
    fn reductions_read_exactly_their_elements() {
        for level in Level::ALL.into_iter().filter(|level| level.is_supported()) {
            for n in 0..50 {
                let x: Vec<f32> = (0..n).map(|i| (i as f32 - 100.0) * 0.25).collect();
                let (sum, largest) = dispatch_at(level, Reductions(&x));
                assert_eq!(sum, x.iter().sum::<f32>(), "{n} at {level:?}");
                assert_eq!(largest, x.last().copied().unwrap_or(f32::NEG_INFINITY));
            }
        }
    }
}
