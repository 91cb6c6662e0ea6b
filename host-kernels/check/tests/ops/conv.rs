//! CONV_2D, CONV_3D, CONV_2D_DW, CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D, IM2COL, IM2COL_BACK,
//! IM2COL_3D, COL2IM_1D.

use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, Type};

use crate::common::*;

/// Sums of products in f32.
const TOLERANCE: f64 = 1e-5;

/// Sums of products whose image is rounded to the kernel's type, as ggml rounds it.
fn tolerance(kernel: Type) -> f64 {
    match kernel {
        Type::F16 => 1e-2,
        Type::Bf16 => 8e-2,
        _ => TOLERANCE,
    }
}

const FLOATS: [Type; 3] = [Type::F32, Type::F16, Type::Bf16];

/// Random stride, padding and dilation of a kernel of `k` taps on a line of `n` elements, and the
/// number of its positions.
struct Line {
    n: u64,
    k: u64,
    s: i32,
    p: i32,
    d: i32,
    places: u64,
}

impl Line {
    fn random(random: &mut Random) -> Line {
        loop {
            let (n, k) = (1 + random.below(12), 1 + random.below(4));
            let [s, p, d] = [1 + random.below(3), random.below(4), 1 + random.below(3)];
            if let Some(room) = (n + 2 * p).checked_sub(d * (k - 1) + 1) {
                let places = room / s + 1;
                return Line {
                    n,
                    k,
                    s: s as i32,
                    p: p as i32,
                    d: d as i32,
                    places,
                };
            }
        }
    }

    /// A dimension without length.
    fn none() -> Line {
        Line {
            n: 1,
            k: 1,
            s: 1,
            p: 0,
            d: 1,
            places: 1,
        }
    }

    /// The element under tap `tap` at position `place`.
    fn at(&self, place: u64, tap: u64) -> Option<u64> {
        let i = (place * self.s as u64 + tap * self.d as u64).checked_sub(self.p as u64)?;
        (i < self.n).then_some(i)
    }
}

fn tensor(ty: Type, ne: [u64; 4], random: &mut Random) -> Data {
    Data::random(ty, ne, random).fill(|| random.between(-1.0, 1.0))
}

/// The sum over taps of kernel times image; `at` gives the indices of both for (channel, z, y, x).
fn sum_over(
    channels: u64,
    lines: [&Line; 3],
    place: [u64; 3],
    value: impl Fn(u64, [u64; 3], [u64; 3]) -> f64,
) -> f64 {
    let [lx, ly, lz] = lines;
    let mut sum = 0.0;
    for c in 0..channels {
        for kz in 0..lz.k {
            for ky in 0..ly.k {
                for kx in 0..lx.k {
                    let on = (
                        lx.at(place[0], kx),
                        ly.at(place[1], ky),
                        lz.at(place[2], kz),
                    );
                    if let (Some(x), Some(y), Some(z)) = on {
                        sum += value(c, [kx, ky, kz], [x, y, z]);
                    }
                }
            }
        }
    }
    sum
}

/// One convolution with operands of `value`: taps and outputs along `x` and `y`, `c` channels to
/// `oc` channels of `n` images.
fn check_2d(
    engine: &dyn Engine,
    (x, y): (&Line, &Line),
    [c, oc, n]: [u64; 3],
    value: impl Fn(&mut Random) -> f64,
    random: &mut Random,
) {
    let ty = random.pick(&FLOATS);
    let mut tensor = |ty, ne| Data::random(ty, ne, random).fill(|| value(random));
    let kernel = tensor(ty, [x.k, y.k, c, oc]);
    let image = tensor(Type::F32, [x.n, y.n, c, n]);
    let dst = Data::random(Type::F32, [x.places, y.places, oc, n], random);
    let op = Op::Conv2d {
        s0: x.s,
        s1: y.s,
        p0: x.p,
        p1: y.p,
        d0: x.d,
        d1: y.d,
    };
    let got = run(engine, op, &dst, &[Some(&kernel), Some(&image)]);
    compare("CONV_2D", &got, tolerance(ty), |[ox, oy, o, n]| {
        sum_over(c, [x, y, &Line::none()], [ox, oy, 0], |c, k, i| {
            kernel.get([k[0], k[1], c, o]) * image.get([i[0], i[1], c, n])
        })
    });
}

pub(crate) fn conv_2d(engine: &dyn Engine) {
    property(120, |random| {
        let (x, y) = (Line::random(random), Line::random(random));
        let channels = [random.below(20), 1 + random.below(20), random.below(3)];
        let value = |random: &mut Random| random.between(-1.0, 1.0);
        check_2d(engine, (&x, &y), channels, value, random);
    });
    // So many channels that the CPU engine divides the channels of one output.
    property(1, |random| {
        let two = Line {
            n: 2,
            places: 2,
            ..Line::none()
        };
        // One output in a tile, and two.
        for channels in [[40_000, 130, 1], [30_000, 200, 1]] {
            // Every type has these values, and every sum of them is exact.
            let value = |random: &mut Random| random.below(5) as f64 / 2.0 - 1.0;
            check_2d(engine, (&two, &Line::none()), channels, value, random);
        }
    });
}

pub(crate) fn conv_3d(engine: &dyn Engine) {
    property(60, |random| {
        let [x, y, z] = std::array::from_fn(|_| Line::random(random));
        let [c, oc, n] = [1 + random.below(5), random.below(6), random.below(3)];
        let ty = random.pick(&FLOATS);
        let kernel = tensor(ty, [x.k, y.k, z.k, c * oc], random);
        let image = tensor(Type::F32, [x.n, y.n, z.n, c * n], random);
        let dst = Data::random(Type::F32, [x.places, y.places, z.places, oc * n], random);
        let op = Op::Conv3d {
            s0: x.s,
            s1: y.s,
            s2: z.s,
            p0: x.p,
            p1: y.p,
            p2: z.p,
            d0: x.d,
            d1: y.d,
            d2: z.d,
            c: c as i32,
            n: n as i32,
            oc: oc as i32,
        };
        let got = run(engine, op, &dst, &[Some(&kernel), Some(&image)]);
        compare("CONV_3D", &got, tolerance(ty), |[ox, oy, oz, on]| {
            let (o, n) = (on % oc, on / oc);
            sum_over(c, [&x, &y, &z], [ox, oy, oz], |ch, k, i| {
                kernel.get([k[0], k[1], k[2], o * c + ch])
                    * image.get([i[0], i[1], i[2], n * c + ch])
            })
        });
    });
}

pub(crate) fn depthwise(engine: &dyn Engine) {
    property(120, |random| {
        let (x, y) = (Line::random(random), Line::random(random));
        let [c, n] = [random.below(9), random.below(3)];
        let ty = random.pick(&FLOATS);
        let kernel = tensor(ty, [x.k, y.k, 1, c], random);
        // Channels innermost, which is the other common layout, or a random layout.
        let image = if random.chance(3) {
            let image = Data::strided(Type::F32, [x.n, y.n, c, n], [2, 0, 1, 3], [0; 4]);
            image.fill(|| random.between(-1.0, 1.0))
        } else {
            tensor(Type::F32, [x.n, y.n, c, n], random)
        };
        let dst = Data::random(Type::F32, [x.places, y.places, c, n], random);
        let op = Op::Conv2dDw {
            s0: x.s,
            s1: y.s,
            p0: x.p,
            p1: y.p,
            d0: x.d,
            d1: y.d,
        };
        let got = run(engine, op, &dst, &[Some(&kernel), Some(&image)]);
        compare("CONV_2D_DW", &got, TOLERANCE, |[ox, oy, c, n]| {
            sum_over(1, [&x, &y, &Line::none()], [ox, oy, 0], |_, k, i| {
                kernel.get([k[0], k[1], 0, c]) * image.get([i[0], i[1], c, n])
            })
        });
    });
}

pub(crate) fn transposed(engine: &dyn Engine) {
    property(100, |random| {
        let [w, h, kw, kh] = std::array::from_fn(|_| 1 + random.below(5));
        let [c, oc, n] = [random.below(9), 1 + random.below(6), random.below(3)];
        let stride = 1 + random.below(3);
        let ty = random.pick(&FLOATS);

        let kernel = tensor(ty, [kw, kh, oc, c], random);
        let image = tensor(Type::F32, [w, h, c, n], random);
        let (ow, oh) = ((w - 1) * stride + kw, (h - 1) * stride + kh);
        let dst = Data::random(Type::F32, [ow, oh, oc, n], random);
        let op = Op::ConvTranspose2d {
            stride: stride as i32,
        };
        let got = run(engine, op, &dst, &[Some(&kernel), Some(&image)]);
        compare(
            "CONV_TRANSPOSE_2D",
            &got,
            tolerance(ty),
            |[ox, oy, o, n]| {
                let mut sum = 0.0;
                for c in 0..c {
                    for [x, y, ..] in Data::dense(Type::I8, [w, h, 1, 1]).indices() {
                        let (Some(kx), Some(ky)) =
                            (ox.checked_sub(x * stride), oy.checked_sub(y * stride))
                        else {
                            continue;
                        };
                        if kx < kw && ky < kh {
                            sum += kernel.get([kx, ky, o, c]) * image.get([x, y, c, n]);
                        }
                    }
                }
                sum
            },
        );

        let kernel = tensor(ty, [kw, oc, c, 1], random);
        let line = tensor(Type::F32, [w, c, 1, 1], random);
        let dst = Data::random(Type::F32, [ow, oc, 1, 1], random);
        let op = Op::ConvTranspose1d {
            s0: stride as i32,
            p0: 0,
            d0: 1,
        };
        let got = run(engine, op, &dst, &[Some(&kernel), Some(&line)]);
        compare("CONV_TRANSPOSE_1D", &got, tolerance(ty), |[ox, o, ..]| {
            let laid = (0..w).filter_map(|x| Some((x, ox.checked_sub(x * stride)?)));
            laid.filter(|&(_, k)| k < kw)
                .map(|(x, k)| {
                    (0..c)
                        .map(|c| kernel.get([k, o, c, 0]) * line.get([x, c, 0, 0]))
                        .sum::<f64>()
                })
                .sum()
        });
    });
}

pub(crate) fn im2col(engine: &dyn Engine) {
    property(150, |random| {
        let is_2d = random.chance(2);
        let x = Line::random(random);
        let y = if is_2d {
            Line::random(random)
        } else {
            Line::none()
        };
        let [c, n] = [random.below(5), random.below(4)];
        // A line of an image has no second dimension.
        let shape = |a: u64, b: u64, c: u64, d: u64| {
            if is_2d { [a, b, c, d] } else { [a, c, d, 1] }
        };
        let index = |i: Index| if is_2d { i } else { [i[0], i[2], i[3], 0] };
        let image = tensor(Type::F32, shape(x.n, y.n, c, n), random);
        let kernel = Data::dense(random.pick(&FLOATS), shape(x.k, y.k, c, 3));
        let columns = [
            c * y.k * x.k,
            x.places,
            if is_2d { y.places } else { n },
            if is_2d { n } else { 1 },
        ];
        let dst = Data::random(random.pick(&FLOATS), columns, random);
        let (s1, p1, d1) = if is_2d { (y.s, y.p, y.d) } else { (0, 0, 0) };
        let op = Op::Im2col {
            s0: x.s,
            s1,
            p0: x.p,
            p1,
            d0: x.d,
            d1,
            is_2d,
        };
        let got = run(engine, op, &dst, &[Some(&kernel), Some(&image)]);
        let split = |i: Index| {
            let (kx, ky, c) = (i[0] % x.k, i[0] / x.k % y.k, i[0] / (x.k * y.k));
            let (oy, n) = if is_2d { (i[2], i[3]) } else { (0, i[2]) };
            (x.at(i[1], kx), y.at(oy, ky), c, n)
        };
        compare("IM2COL", &got, 0.0, |i| match split(i) {
            (Some(x), Some(y), c, n) => image.get(index([x, y, c, n])),
            _ => 0.0,
        });

        // The gradient: each element of a patch is added to the image element it was read from.
        let grad = tensor(random.pick(&FLOATS), columns, random);
        let dst = Data::random(Type::F32, image.shape.ne, random);
        let op = Op::Im2colBack {
            s0: x.s,
            s1,
            p0: x.p,
            p1,
            d0: x.d,
            d1,
            is_2d,
        };
        let got = run(engine, op, &dst, &[Some(&grad), Some(&kernel)]);
        let mut sums = Data::dense(Type::F64, image.shape.ne).fill(|| 0.0);
        for i in grad.indices() {
            if let (Some(x), Some(y), c, n) = split(i) {
                let at = index([x, y, c, n]);
                sums.set(at, sums.get(at) + grad.get(i));
            }
        }
        compare("IM2COL_BACK", &got, TOLERANCE, |i| sums.get(i));
    });
}

pub(crate) fn im2col_3d(engine: &dyn Engine) {
    property(60, |random| {
        let [x, y, z] = std::array::from_fn(|_| Line::random(random));
        let [c, n] = [1 + random.below(3), random.below(3)];
        let image = tensor(Type::F32, [x.n, y.n, z.n, c * n], random);
        let kernel = Data::dense(Type::F16, [x.k, y.k, z.k, c * 2]);
        let columns = [c * z.k * y.k * x.k, x.places, y.places, z.places * n];
        let dst = Data::random(random.pick(&FLOATS), columns, random);
        let op = Op::Im2col3d {
            s0: x.s,
            s1: y.s,
            s2: z.s,
            p0: x.p,
            p1: y.p,
            p2: z.p,
            d0: x.d,
            d1: y.d,
            d2: z.d,
            ic: c as i32,
        };
        let got = run(engine, op, &dst, &[Some(&kernel), Some(&image)]);
        compare("IM2COL_3D", &got, 0.0, |i| {
            let (kx, ky) = (i[0] % x.k, i[0] / x.k % y.k);
            let (kz, ch) = (i[0] / (x.k * y.k) % z.k, i[0] / (x.k * y.k * z.k));
            let (oz, n) = (i[3] % z.places, i[3] / z.places);
            match (x.at(i[1], kx), y.at(i[2], ky), z.at(oz, kz)) {
                (Some(x), Some(y), Some(z)) => image.get([x, y, z, n * c + ch]),
                _ => 0.0,
            }
        });
    });
}

pub(crate) fn col2im_1d(engine: &dyn Engine) {
    property(100, |random| {
        let [k, oc, steps] = [
            1 + random.below(6),
            1 + random.below(4),
            1 + random.below(20),
        ];
        let s = 1 + random.below(4);
        let whole = (steps - 1) * s + k;
        let p = random.below(whole.div_ceil(2));
        let ty = random.pick(&FLOATS);
        let src = tensor(ty, [k * oc, steps, 1, 1], random);
        let dst = Data::random(ty, [whole - 2 * p, oc, 1, 1], random);
        let op = Op::Col2im1d {
            s0: s as i32,
            oc: oc as i32,
            p0: p as i32,
        };
        let got = run(engine, op, &dst, &[Some(&src)]);
        compare("COL2IM_1D", &got, TOLERANCE, |[t, c, ..]| {
            let taps = (0..steps).filter_map(|j| Some((j, (t + p).checked_sub(j * s)?)));
            taps.filter(|&(_, i)| i < k)
                .map(|(j, i)| src.get([c * k + i, j, 0, 0]))
                .sum()
        });
    });
}
