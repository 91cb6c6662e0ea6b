//! FLASH_ATTN_EXT.

use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, Precision, Type};

use super::matmul::{as_activation, dot, reals, tolerance, weights};
use super::softmax::{mask_value, slope};
use crate::common::*;

/// Tolerance relative to the largest value: scores are sums of some hundred products in f32, and
/// the exponential amplifies their errors.
const TOLERANCE: f64 = 1e-4;

/// The tolerance for engines that round queries, keys, values and weights to f16, as ggml's CUDA
/// backend does.
const TOLERANCE_OF_HALVES: f64 = 2e-3;

/// The tolerance for bfloat16.
const TOLERANCE_OF_BRAIN_HALVES: f64 = 1.5e-2;

/// Limit of the normalised mean square error: a tenth of the 5e-4 that ggml's own tests allow.
const NORMALIZED_ERROR: f64 = 5e-5;

/// The operands of attention and its parameters.
struct Attention {
    q: Data,
    k: Data,
    v: Data,
    mask: Option<Data>,
    sinks: Option<Data>,
    scale: f32,
    max_bias: f32,
    cap: f32,
}

impl Attention {
    fn run(&self, engine: &dyn Engine) -> Data {
        let op = Op::FlashAttnExt {
            scale: self.scale,
            max_bias: self.max_bias,
            logit_softcap: self.cap,
            accumulator: Precision::Default,
            n_kv_max: 0,
        };
        let [_, tokens, heads, sequences] = self.q.shape.ne;
        let dst = Data::dense(Type::F32, [self.v.shape.ne[0], heads, tokens, sequences]);
        let Attention {
            q,
            k,
            v,
            mask,
            sinks,
            ..
        } = self;
        let src = [Some(q), Some(k), Some(v), mask.as_ref(), sinks.as_ref()];
        run(engine, op, &dst, &src)
    }

    /// The result for one query: the values weighted by the soft-max of the scores.
    fn query(&self, query: &[f64], [head, token, sequence]: [u64; 3]) -> Vec<f64> {
        let Attention { q, k, v, .. } = self;
        let [_, _, heads, sequences] = q.shape.ne;
        let shared = |x: &Data| {
            let [_, _, n2, n3] = x.shape.ne;
            [head / (heads / n2), sequence / (sequences / n3)]
        };
        let ([k2, k3], [v2, v3]) = (shared(k), shared(v));
        let bias = self.mask.as_ref().map(|mask| {
            let [_, _, n2, n3] = mask.shape.ne;
            mask.row_values([token, head % n2, sequence % n3])
        });
        let slope = slope(f64::from(self.max_bias), heads, head);
        let (scale, cap) = (f64::from(self.scale), f64::from(self.cap));
        let score = |i: u64| {
            let bias = bias.as_ref().map_or(0.0, |bias| bias[i as usize]);
            if bias == f64::NEG_INFINITY {
                return bias;
            }
            let (dot, _) = dot(k.row_values([i, k2, k3]), query);
            let score = if cap == 0.0 {
                dot * scale
            } else {
                cap * (dot * scale / cap).tanh()
            };
            score + slope * bias
        };
        let scores: Vec<f64> = (0..k.shape.ne[1]).map(score).collect();
        let sink = self.sinks.as_ref().map(|sinks| sinks.get([head, 0, 0, 0]));
        let all = || scores.iter().copied().chain(sink);
        let largest = all().fold(f64::NEG_INFINITY, f64::max);
        let mut out = vec![0.0; v.shape.ne[0] as usize];
        if largest == f64::NEG_INFINITY {
            return out;
        }
        let sum: f64 = all().map(|score| (score - largest).exp()).sum();
        for (i, score) in scores.into_iter().enumerate() {
            for (out, value) in out.iter_mut().zip(v.row_values([i as u64, v2, v3])) {
                *out += (score - largest).exp() / sum * value;
            }
        }
        out
    }

    fn check(&self, engine: &dyn Engine) {
        let got = self.run(engine);
        // Errors of the scores count as much as errors of the weighted sum.
        let halves = match self.k.shape.ty {
            // The CPU engine must be as exact as ggml's CPU backend.
            _ if engine.name() == "cpu" => TOLERANCE,
            Type::F32 => TOLERANCE,
            Type::Bf16 => TOLERANCE_OF_BRAIN_HALVES,
            _ => TOLERANCE_OF_HALVES,
        };
        let tolerance = halves.max(5.0 * tolerance(self.k.shape.ty));
        let (mut errors, mut results) = (0.0, 0.0);
        for row in got.row_indices() {
            let got = got.row_values(row);
            let [head, token, sequence] = row;
            let query = self.q.row_values([token, head, sequence]);
            // Queries may be rounded to the type that keys are multiplied with: ggml rounds few
            // queries too.
            let rounded = as_activation(self.k.shape.ty, query);
            let [exact, rounded] = [query, &rounded].map(|query| self.query(query, row));
            let size = exact.iter().fold(1.0, |size: f64, x| size.max(x.abs()));
            let square = |x: f64| x * x;
            errors += (got.iter().zip(&exact).map(|(got, want)| square(got - want))).sum::<f64>();
            results += exact.iter().copied().map(square).sum::<f64>();
            let near = |want: &[f64]| {
                let off = |(got, want): (&f64, &f64)| (got - want).abs();
                got.iter()
                    .zip(want)
                    .map(off)
                    .all(|off| off <= tolerance * size)
            };
            assert!(
                near(&exact) || near(&rounded),
                "k {:?} v {:?} q {:?} cap {} bias {}: row {row:?} is {got:?}, not {exact:?}",
                self.k.shape,
                self.v.shape,
                self.q.shape,
                self.cap,
                self.max_bias
            );
        }
        // The CPU engine rounds queries as ggml's CPU backend does.
        assert!(
            engine.name() == "cpu" || errors <= NORMALIZED_ERROR * results + 1e-9,
            "k {:?} v {:?}: {errors:e} of {results:e}",
            self.k.shape,
            self.v.shape
        );
    }
}

/// The lengths of an attention.
struct Sizes {
    k: Type,
    v: Type,
    dk: u64,
    dv: u64,
    keys: u64,
    tokens: u64,
    /// Heads of keys, heads of values, and a factor. The product of the three is the number of
    /// query heads.
    heads: [u64; 3],
    /// Sequences of keys, sequences of values, and a factor. The product of the three is the number
    /// of sequences of queries.
    sequences: [u64; 3],
}

impl Sizes {
    /// Random operands without a mask.
    fn fill(&self, random: &mut Random) -> Attention {
        self.fill_in(random, false)
    }

    /// [`Sizes::fill`]. If `aligned`, an engine can read 16 bytes of keys and values at once.
    fn fill_in(&self, random: &mut Random, aligned: bool) -> Attention {
        let whole = |n: u64, ty: Type| n.next_multiple_of(ty.block_elements());
        let (dk, dv) = (whole(self.dk, self.k), whole(self.dv, self.v));
        let mut rows = |ty, n, i: usize| {
            let ne = [n, self.keys, self.heads[i], self.sequences[i]];
            let rows = match aligned {
                true => Data::dense(ty, ne).aligned(),
                false => Data::random_rows(ty, ne, true, random),
            };
            rows.fill(|| random.between(-1.0, 1.0))
        };
        let (k, v) = (rows(self.k, dk, 0), rows(self.v, dv, 1));
        let [heads, sequences] = [self.heads, self.sequences].map(|n| n.iter().product());
        let q = Data::random_rows(Type::F32, [dk, self.tokens, heads, sequences], true, random);
        Attention {
            q: q.fill(|| random.between(-3.0, 3.0)),
            k,
            v,
            mask: None,
            sinks: None,
            scale: 1.0 / (dk as f32).sqrt(),
            max_bias: 0.0,
            cap: 0.0,
        }
    }
}

/// A mask with long masked runs and single visible keys.
fn mask(ne: [u64; 4], random: &mut Random) -> Data {
    let mut hidden = 0;
    Data::random_rows(Type::F16, ne, true, random).fill(|| {
        if hidden == 0 && random.chance(40) {
            hidden = random.below(200);
        }
        if hidden > 0 {
            hidden -= 1;
            return f64::NEG_INFINITY;
        }
        mask_value(random)
    })
}

pub(crate) fn types_shapes_and_options(engine: &dyn Engine) {
    property(150, |random| {
        let sizes = Sizes {
            k: random.pick(&weights()),
            v: random.pick(&reals()),
            dk: 1 + random.below(150),
            dv: 1 + random.below(150),
            keys: random.pick(&[70, 700]),
            tokens: random.pick(&[1, 20]),
            heads: [1, 1, 1].map(|n| n + random.below(3)),
            sequences: [1, 1, 1 + random.below(2)],
        };
        let sizes = Sizes {
            keys: random.below(sizes.keys),
            tokens: 1 + random.below(sizes.tokens),
            ..sizes
        };
        let mut attention = sizes.fill(random);
        let [_, tokens, heads, _] = attention.q.shape.ne;
        if random.chance(2) {
            let masks = random.pick(&[1, heads]);
            let ne = [
                sizes.keys + random.below(3),
                tokens + random.below(3),
                masks,
                1,
            ];
            attention.mask = Some(mask(ne, random));
            attention.max_bias = random.pick(&[0.0, 8.0]);
        }
        if random.chance(2) {
            let sinks = Data::dense(Type::F32, [heads, 1, 1, 1]);
            attention.sinks = Some(sinks.fill(|| random.between(-3.0, 3.0)));
        }
        attention.cap = random.pick(&[0.0, 5.0]);
        attention.check(engine);
    });
}

/// Every type of a quantised cache, for heads and groups of models, with keys that end anywhere.
pub(crate) fn quantized_caches(engine: &dyn Engine) {
    use Type::{Iq4Nl, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    let types = [Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Iq4Nl];
    property(90, |random| {
        let (ty, other) = (random.pick(&types), random.pick(&types));
        let most = random.pick(&[70, 330]);
        let sizes = Sizes {
            k: ty,
            v: random.pick(&[ty, other]),
            dk: random.pick(&[32, 64, 96, 128, 160, 256, 288]),
            dv: random.pick(&[32, 64, 96, 128, 160, 256, 288]),
            keys: 1 + random.below(most),
            tokens: random.pick(&[1, 1, 2, 3, 9]),
            heads: [1 + random.below(2), 1, random.pick(&[1, 2, 3, 4, 5, 8])],
            sequences: [1 + random.below(2), 1, 1],
        };
        let mut attention = sizes.fill(random);
        let [_, tokens, heads, _] = attention.q.shape.ne;
        attention.cap = random.pick(&[0.0, 0.0, 5.0]);
        if random.chance(2) {
            let sinks = Data::dense(Type::F32, [heads, 1, 1, 1]);
            attention.sinks = Some(sinks.fill(|| random.between(-3.0, 3.0)));
        }
        attention.check(engine);
        let ne = [sizes.keys, tokens, random.pick(&[1, heads]), 1];
        attention.mask = Some(mask(ne, random));
        attention.max_bias = random.pick(&[0.0, 8.0]);
        attention.check(engine);
    });
}

pub(crate) fn many_tokens_and_long_contexts(engine: &dyn Engine) {
    for (k, v, dk, dv, keys, tokens) in [
        (Type::F16, Type::F16, 128, 128, 300, 70),
        (Type::F16, Type::F16, 64, 64, 3000, 1),
        (Type::Q8_0, Type::Q4_0, 64, 96, 1500, 3),
        (Type::F32, Type::F32, 40, 72, 200, 65),
        (Type::Bf16, Type::Bf16, 65, 67, 700, 2),
    ] {
        let random = &mut Random::new(keys);
        let sizes = Sizes {
            k,
            v,
            dk,
            dv,
            keys,
            tokens,
            heads: [2, 1, 3],
            sequences: [1; 3],
        };
        let mut attention = sizes.fill(random);
        attention.check(engine);
        attention.mask = Some(mask([keys, tokens, 1, 1], random));
        attention.check(engine);
    }
}

/// Widths, types and numbers of rows for which engines have special kernels, with full, causal and
/// scattered masks.
pub(crate) fn usual_widths_and_types(engine: &dyn Engine) {
    use Type::{Bf16, F16, F32, Iq4Nl, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    for (i, (k, v, dk, dv, keys, tokens, group)) in [
        (F16, F16, 64, 64, 500, 1, 8),
        (F16, F16, 64, 64, 200, 70, 2),
        (F16, F16, 128, 128, 333, 3, 4),
        (F16, F16, 128, 128, 130, 40, 3),
        (F16, F16, 80, 80, 190, 2, 1),
        (F16, F16, 112, 96, 90, 20, 1),
        (F16, F16, 256, 256, 140, 1, 4),
        (F16, F16, 256, 256, 70, 20, 1),
        (F16, F16, 192, 128, 100, 5, 1),
        (F16, F16, 576, 512, 150, 1, 16),
        (Bf16, Bf16, 128, 128, 200, 1, 4),
        (Bf16, Bf16, 64, 64, 80, 30, 1),
        (Bf16, Bf16, 256, 256, 66, 17, 1),
        (Q8_0, Q8_0, 128, 128, 300, 1, 4),
        (Q8_0, Q4_0, 64, 64, 130, 25, 1),
        (Q4_0, Q4_0, 128, 128, 140, 20, 1),
        (Q5_1, Iq4Nl, 96, 64, 100, 2, 2),
        (Q4_1, Q5_0, 256, 256, 65, 1, 2),
        (F16, Q8_0, 128, 128, 70, 17, 1),
        (Q8_0, Q8_0, 576, 512, 70, 1, 2),
        (F32, F32, 64, 64, 200, 1, 4),
        (F32, F32, 128, 128, 130, 20, 2),
        (F32, F32, 256, 256, 70, 40, 1),
        (F32, F32, 576, 512, 40, 1, 2),
        (F32, F16, 72, 72, 90, 33, 1),
        (F16, Bf16, 128, 128, 100, 3, 2),
        (Bf16, Q8_0, 128, 96, 150, 17, 1),
        (Q5_1, F32, 64, 128, 150, 2, 4),
    ]
    .into_iter()
    .enumerate()
    {
        let random = &mut Random::new(keys + tokens);
        let sizes = Sizes {
            k,
            v,
            dk,
            dv,
            keys,
            tokens,
            heads: [2, 1, group],
            sequences: [1; 3],
        };
        let mut attention = sizes.fill_in(random, true);
        let heads = 2 * group;
        attention.sinks = (i % 3 == 1)
            .then(|| Data::dense(Type::F32, [heads, 1, 1, 1]).fill(|| random.between(-3.0, 3.0)));
        attention.cap = [0.0, 0.0, 8.0][i % 3];
        attention.check(engine);
        let ne = [keys + 1, tokens, 1, 1];
        let mut place = 0;
        // A causal mask: token t sees the tokens before it and itself.
        attention.mask = Some(Data::dense(Type::F16, ne).fill(|| {
            let (token, key) = (place / ne[0], place % ne[0]);
            place += 1;
            let is_hidden = key + tokens > keys + token || key < token;
            if is_hidden { f64::NEG_INFINITY } else { 0.0 }
        }));
        attention.check(engine);
        let ne = [keys.next_multiple_of(2), tokens + 1, [1, heads][i % 2], 1];
        attention.mask = Some(mask(ne, random));
        attention.max_bias = [0.0, 8.0, 0.0][i % 3];
        attention.check(engine);
    }
}

/// Enough rows for groups of warps, with keys that end within a tile, hidden tiles, and values that
/// are NaN where the mask hides them.
pub(crate) fn many_tokens_of_pairs(engine: &dyn Engine) {
    for (i, (width, keys, tokens, heads, sequences)) in [
        (64, 300, 150, [1, 1, 1], [2, 1, 1]),
        (128, 400, 90, [2, 1, 3], [1, 1, 1]),
        (128, 77, 65, [1, 1, 2], [1, 1, 2]),
        (256, 200, 140, [1, 1, 1], [1, 1, 1]),
    ]
    .into_iter()
    .enumerate()
    {
        let random = &mut Random::new(keys);
        let sizes = Sizes {
            k: Type::F16,
            v: Type::F16,
            dk: width,
            dv: width,
            keys,
            tokens,
            heads,
            sequences,
        };
        let mut attention = sizes.fill_in(random, true);
        let all_heads: u64 = heads.iter().product();
        attention.sinks = (i == 1).then(|| {
            Data::dense(Type::F32, [all_heads, 1, 1, 1]).fill(|| random.between(-3.0, 3.0))
        });
        attention.cap = [0.0, 0.0, 8.0, 0.0][i];
        attention.check(engine);
        // Token t sees the first keys except every seventh, and none of the last keys.
        let ne = [keys.next_multiple_of(2), tokens, 1, 1];
        let most = keys * 2 / 3;
        let is_seen = |token: u64, key: u64| key <= token + most - tokens.min(most) && key % 7 != 3;
        let mut place = 0;
        attention.mask = Some(Data::dense(Type::F16, ne).fill(|| {
            let (token, key) = (place / ne[0], place % ne[0]);
            place += 1;
            if is_seen(token, key) {
                0.0
            } else {
                f64::NEG_INFINITY
            }
        }));
        for x in [&mut attention.k, &mut attention.v] {
            let hidden = { x.indices() }.filter(|i| (0..tokens).all(|token| !is_seen(token, i[1])));
            for index in hidden.collect::<Vec<_>>() {
                x.set(index, 1e4);
            }
        }
        attention.check(engine);
        for x in [&mut attention.k, &mut attention.v] {
            let hidden = { x.indices() }.filter(|i| (0..tokens).all(|token| !is_seen(token, i[1])));
            for index in hidden.collect::<Vec<_>>() {
                x.set(index, f64::NAN);
            }
        }
        let got = attention.run(engine);
        assert!(got.values().iter().all(|x| x.is_finite()));
    }
}

pub(crate) fn what_is_hidden_does_not_count(engine: &dyn Engine) {
    for (ty, tokens) in [
        (Type::F16, 2),
        (Type::F32, 2),
        (Type::F16, 40),
        (Type::F32, 40),
    ] {
        let random = &mut Random::new(tokens);
        let sizes = Sizes {
            k: ty,
            v: ty,
            dk: 32,
            dv: 32,
            keys: 150,
            tokens,
            heads: [1; 3],
            sequences: [1; 3],
        };
        let mut attention = sizes.fill(random);
        // Every third key and value is NaN and hidden.
        for x in [&mut attention.k, &mut attention.v] {
            for index in x.indices().filter(|i| i[1] % 3 == 0).collect::<Vec<_>>() {
                x.set(index, f64::NAN);
            }
        }
        let mut i = 0;
        let mask = Data::dense(Type::F16, [150, tokens, 1, 1]).fill(|| {
            i += 1;
            if (i - 1) % 3 == 0 {
                f64::NEG_INFINITY
            } else {
                0.0
            }
        });
        let without = attention.run(engine);
        assert!(without.values().iter().all(|x| x.is_nan()));
        attention.mask = Some(mask);
        let with = attention.run(engine);
        assert!(with.values().iter().all(|x| x.is_finite()));
    }
}
