//! POOL_1D, POOL_2D, POOL_2D_BACK, UPSCALE, TIMESTEP_EMBEDDING, WIN_PART, WIN_UNPART, GET_REL_POS,
//! ADD_REL_POS.

use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, PoolKind, ScaleMode, Type};

use crate::common::*;

/// Sums of a few products in f32.
const TOLERANCE: f64 = 1e-5;

/// Positions on an image are in f32, and their rounding affects the weights.
const RESAMPLING: f64 = 1e-4;

fn tensor(ty: Type, ne: [u64; 4], random: &mut Random) -> Data {
    Data::random(ty, ne, random).fill(|| random.between(-1.0, 1.0))
}

/// A window on a line of `n` elements: size, stride, padding, number of positions.
fn window(n: u64, random: &mut Random) -> (u64, u64, u64, u64) {
    loop {
        let (k, s, p) = (1 + random.below(4), 1 + random.below(3), random.below(3));
        if let Some(room) = (n + 2 * p).checked_sub(k) {
            return (k, s, p, room / s + 1);
        }
    }
}

/// The elements under the window at a position.
fn covered(n: u64, (k, s, p, _): (u64, u64, u64, u64), place: u64) -> Vec<u64> {
    (0..k)
        .filter_map(|t| (place * s + t).checked_sub(p))
        .filter(|&i| i < n)
        .collect()
}

pub(crate) fn pooling(engine: &dyn Engine) {
    property(150, |random| {
        let ne: [u64; 4] = std::array::from_fn(|d| {
            if d < 2 {
                1 + random.below(9)
            } else {
                random.below(4)
            }
        });
        let (x, y) = (window(ne[0], random), window(ne[1], random));
        let kind = random.pick(PoolKind::ALL);
        let src = tensor(random.pick(&[Type::F32, Type::F16]), ne, random);
        let empty = f64::from(f32::MIN);
        let pool = |values: Vec<f64>, whole: u64| match kind {
            PoolKind::Max => values.iter().copied().fold(empty, f64::max),
            PoolKind::Average if whole == 0 => 0.0,
            PoolKind::Average => values.iter().sum::<f64>() / whole as f64,
        };

        let dst = Data::random(Type::F32, [x.3, ne[1], ne[2], ne[3]], random);
        let op = Op::Pool1d {
            kind,
            k0: x.0 as i32,
            s0: x.1 as i32,
            p0: x.2 as i32,
        };
        let got = run(engine, op, &dst, &[Some(&src)]);
        compare("POOL_1D", &got, TOLERANCE, |[i0, i1, i2, i3]| {
            let xs = covered(ne[0], x, i0);
            let count = xs.len() as u64;
            pool(
                xs.into_iter().map(|x| src.get([x, i1, i2, i3])).collect(),
                count,
            )
        });

        let pooled = [x.3, y.3, ne[2], ne[3]];
        let inside = |i: Index| -> Vec<Index> {
            let ys = covered(ne[1], y, i[1]);
            ys.into_iter()
                .flat_map(|cy| {
                    covered(ne[0], x, i[0])
                        .into_iter()
                        .map(move |cx| [cx, cy, i[2], i[3]])
                })
                .collect()
        };
        let parameters = [x.0, y.0, x.1, y.1, x.2, y.2].map(|n| n as i32);
        let [k0, k1, s0, s1, p0, p1] = parameters;
        let dst = Data::random(Type::F32, pooled, random);
        let got = run(
            engine,
            Op::Pool2d {
                kind,
                k0,
                k1,
                s0,
                s1,
                p0,
                p1,
            },
            &dst,
            &[Some(&src)],
        );
        compare("POOL_2D", &got, TOLERANCE, |i| {
            pool(
                inside(i).into_iter().map(|i| src.get(i)).collect(),
                x.0 * y.0,
            )
        });

        let grad = tensor(Type::F32, pooled, random);
        let dst = Data::random(Type::F32, ne, random);
        let op = Op::Pool2dBack {
            kind,
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
        };
        let got = run(engine, op, &dst, &[Some(&grad), Some(&src)]);
        let mut sums = Data::dense(Type::F64, ne).fill(|| 0.0);
        for i in grad.indices() {
            let g = grad.get(i);
            let cells = inside(i);
            match kind {
                PoolKind::Average => {
                    for at in cells {
                        sums.set(at, sums.get(at) + g / (x.0 * y.0) as f64);
                    }
                }
                PoolKind::Max => {
                    let largest = cells.iter().map(|&i| src.get(i)).fold(empty, f64::max);
                    if let Some(&at) = cells.iter().find(|&&i| src.get(i) == largest) {
                        sums.set(at, sums.get(at) + g);
                    }
                }
            }
        }
        compare("POOL_2D_BACK", &got, TOLERANCE, |i| sums.get(i));
    });
}

/// Weight of a source pixel at distance `x`, in the kernel of a resampling.
fn cubic(x: f64) -> f64 {
    let (a, x) = (-0.75, x.abs());
    if x <= 1.0 {
        ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
    } else {
        0.0
    }
}

fn triangle(x: f64) -> f64 {
    (1.0 - x.abs()).max(0.0)
}

pub(crate) fn upscale(engine: &dyn Engine) {
    property(150, |random| {
        let ne: [u64; 4] = std::array::from_fn(|_| 1 + random.below(6));
        // Whole factors: no position lies exactly between two pixels, where rounding would decide.
        let to: [u64; 4] = std::array::from_fn(|d| {
            if d < 2 {
                ne[d] * (1 + random.below(3))
            } else {
                ne[d] * (1 + random.below(2))
            }
        });
        let align_corners = random.chance(2);
        let mode = random.pick(ScaleMode::ALL);
        let antialias = mode == ScaleMode::Bilinear && !align_corners && random.chance(2);
        let src = tensor(Type::F32, ne, random);
        let dst = Data::random(Type::F32, to, random);
        let op = Op::Upscale {
            mode,
            align_corners,
            antialias,
        };
        let got = run(engine, op, &dst, &[Some(&src)]);
        let factor = |d: usize| {
            if align_corners && d < 2 && to[d] > 1 && ne[d] > 1 {
                (to[d] - 1) as f64 / (ne[d] - 1) as f64
            } else {
                to[d] as f64 / ne[d] as f64
            }
        };
        let offset = if align_corners { 0.0 } else { 0.5 };
        let place = |d: usize, i: u64| (i as f64 + offset) / factor(d) - offset;
        compare(&format!("{op:?} {ne:?} {to:?}"), &got, RESAMPLING, |i| {
            let (i2, i3) = (i[2] * ne[2] / to[2], i[3] * ne[3] / to[3]);
            if mode == ScaleMode::Nearest {
                let at = |d: usize| {
                    // An exact quotient may be slightly smaller in f32.
                    let q = i[d] as f32 / factor(d) as f32;
                    (q as u64).min(ne[d] - 1)
                };
                return src.get([at(0), at(1), i2, i3]);
            }
            let weight: fn(f64) -> f64 = if mode == ScaleMode::Bicubic {
                cubic
            } else {
                triangle
            };
            let (px, py) = (place(0, i[0]), place(1, i[1]));
            let clamp = |i: i64, d: usize| i.clamp(0, ne[d] as i64 - 1) as u64;
            let mut sum = 0.0;
            for y in py.floor() as i64 - 2..=py.floor() as i64 + 3 {
                for x in px.floor() as i64 - 2..=px.floor() as i64 + 3 {
                    // Enlarging needs no smoothing: antialiasing only leaves out pixels outside
                    // the image.
                    let w = weight(x as f64 - px) * weight(y as f64 - py);
                    sum += w * src.get([clamp(x, 0), clamp(y, 1), i2, i3]);
                }
            }
            sum
        });
    });
}

/// Shrinking with antialiasing: every result is the weighted mean of all pixels under it.
pub(crate) fn shrink(engine: &dyn Engine) {
    property(60, |random| {
        let to: [u64; 4] = std::array::from_fn(|_| 1 + random.below(4));
        let (fx, fy) = (1 + random.below(4), 1 + random.below(4));
        let ne = [to[0] * fx, to[1] * fy, to[2], to[3]];
        let src = tensor(Type::F32, ne, random);
        let dst = Data::random(Type::F32, to, random);
        let op = Op::Upscale {
            mode: ScaleMode::Bilinear,
            align_corners: false,
            antialias: true,
        };
        let got = run(engine, op, &dst, &[Some(&src)]);
        compare("UPSCALE antialias", &got, RESAMPLING, |i| {
            let weight = |d: usize, f: u64, s: u64| {
                let center = (i[d] as f64 + 0.5) * f as f64;
                triangle((s as f64 + 0.5 - center) / f as f64)
            };
            let (mut sum, mut total) = (0.0, 0.0);
            for y in 0..ne[1] {
                for x in 0..ne[0] {
                    let w = weight(0, fx, x) * weight(1, fy, y);
                    sum += w * src.get([x, y, i[2], i[3]]);
                    total += w;
                }
            }
            sum / total
        });
    });
}

pub(crate) fn timestep_embedding(engine: &dyn Engine) {
    property(60, |random| {
        let (dim, n, period) = (random.below(40), random.below(6), 10_000);
        let steps =
            Data::random(Type::F32, [n, 1, 1, 1], random).fill(|| random.between(0.0, 10.0));
        let dst = Data::random(Type::F32, [dim, n, 1, 1], random);
        let op = Op::TimestepEmbedding {
            dim: dim as i32,
            max_period: period,
        };
        let got = run(engine, op, &dst, &[Some(&steps)]);
        let half = dim / 2;
        compare("TIMESTEP_EMBEDDING", &got, TOLERANCE, |[j, i, ..]| {
            if j == 2 * half {
                return 0.0;
            }
            let frequency = (-f64::from(period).ln() * (j % half) as f64 / half as f64).exp();
            let angle = steps.get([i, 0, 0, 0]) * frequency;
            if j < half { angle.cos() } else { angle.sin() }
        });
    });
}

pub(crate) fn windows(engine: &dyn Engine) {
    property(80, |random| {
        let [c, width, height, w] = [
            random.below(7),
            random.below(9),
            random.below(9),
            1 + random.below(4),
        ];
        let (npx, npy) = (width.div_ceil(w), height.div_ceil(w));
        let src = tensor(Type::F32, [c, width, height, 1], random);
        let dst = Data::random(Type::F32, [c, w, w, npx * npy], random);
        let op = Op::WinPart {
            npx: npx as i32,
            npy: npy as i32,
            w: w as i32,
        };
        let parts = run(engine, op, &dst, &[Some(&src)]);
        compare("WIN_PART", &parts, 0.0, |[i0, i1, i2, i3]| {
            let (x, y) = (i3 % npx * w + i1, i3 / npx * w + i2);
            if x < width && y < height {
                src.get([i0, x, y, 0])
            } else {
                0.0
            }
        });
        let dst = Data::random(Type::F32, [c, width, height, 1], random);
        let whole = run(engine, Op::WinUnpart { w: w as i32 }, &dst, &[Some(&parts)]);
        compare("WIN_UNPART", &whole, 0.0, |i| src.get(i));
    });
}

pub(crate) fn relative_positions(engine: &dyn Engine) {
    property(80, |random| {
        let (c, n) = (random.below(9), 1 + random.below(5));
        let ty = random.pick(&[Type::F16, Type::Bf16]);
        let table = tensor(ty, [c, 2 * n - 1, 1, 1], random);
        let dst = Data::random(ty, [c, n, n, 1], random);
        let got = run(engine, Op::GetRelPos {}, &dst, &[Some(&table)]);
        compare("GET_REL_POS", &got, 0.0, |[i0, k, q, _]| {
            table.get([i0, q + n - 1 - k, 0, 0])
        });

        let [side, rows, columns, heads] = std::array::from_fn(|_| 1 + random.below(4));
        let ne = [side * side, rows * columns, heads, 1];
        let mut dense = |ne| Data::dense(Type::F32, ne).fill(|| random.between(-1.0, 1.0));
        let (a, pw) = (dense(ne), dense([side, rows, columns, heads]));
        let ph = dense([side, rows, columns, heads]);
        let src = [Some(&a), Some(&pw), Some(&ph)];
        let reference = |[i, row, head, _]: Index| {
            let at = |i: u64| [i, row % rows, row / rows, head];
            a.get([i, row, head, 0]) + pw.get(at(i % side)) + ph.get(at(i / side))
        };
        let got = run(engine, Op::AddRelPos {}, &a, &src);
        compare("ADD_REL_POS", &got, TOLERANCE, reference);
        let got = run_in_place(engine, Op::AddRelPos {}, &src);
        compare("ADD_REL_POS in place", &got, TOLERANCE, reference);
    });
}
