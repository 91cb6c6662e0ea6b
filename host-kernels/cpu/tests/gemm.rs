//! Every kernel of matrix products at every level of the processor, against exact products.

use std::cell::Cell;
use std::ptr::NonNull;

use proptest::prelude::*;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::SeedableRng as _;
use vgpu_cpu::formats::{Format, Type};
use vgpu_cpu::gemm::{Activation, Column, ColumnTable, GemmArgs, Level, MatmulKernel};

/// Columns that are enough for any kernel.
const MANY: usize = 512;

/// Every type that can be a weight.
fn weights() -> impl Iterator<Item = Type> {
    Type::ALL
        .iter()
        .copied()
        .filter(|&ty| MatmulKernel::at(ty, Level::Scalar).is_some())
}

fn levels() -> impl Iterator<Item = Level> {
    Level::ALL.into_iter().filter(|level| level.is_supported())
}

/// A reproducible stream of numbers.
struct Random(Xoshiro256PlusPlus);

impl Random {
    fn new(seed: u64) -> Random {
        Random(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    fn byte(&mut self) -> u8 {
        (self.0.next_u64() >> 56) as u8
    }

    /// Roughly normal: the sum of four uniform numbers, so that a block has small and large values.
    fn float(&mut self) -> f32 {
        (0..4)
            .map(|_| (self.0.next_u64() >> 40) as f32 / (1 << 24) as f32 - 0.5)
            .sum()
    }
}

/// Weights and activations of one multiplication, each row and column padded by a few bytes so that
/// no stride is the natural one and blocks are unaligned.
struct Case {
    ty: Type,
    activation: Activation,
    k: usize,
    rows: usize,
    cols: usize,
    w: Vec<u8>,
    w_stride: usize,
    x: Vec<u8>,
    x_stride: usize,
    /// The exact results, from the quantised values, and the sum of the magnitudes added up.
    exact: Vec<(f64, f64)>,
}

impl Case {
    fn new(ty: Type, k: usize, rows: usize, cols: usize, random: &mut Random) -> Case {
        let kernel = MatmulKernel::at(ty, Level::Scalar).unwrap();
        Case::of(kernel, |w| w, |x| x, [k, rows, cols], random)
    }

    /// The operands of `kernel`, which rounds weights, with activations as `change` makes them.
    fn of(
        kernel: MatmulKernel,
        round: impl Fn(f32) -> f32,
        change: impl Fn(f32) -> f32,
        [k, rows, cols]: [usize; 3],
        random: &mut Random,
    ) -> Case {
        let ty = kernel.weight;
        let weight = Format::of(ty).unwrap();
        let pad = match kernel.activation {
            Activation::Prepared => size_of::<f32>(), // aligned to floats
            _ => 5,
        };
        let (w_stride, x_stride) = (
            weight.row_bytes(k) + 3,
            kernel.activation.column_bytes(k) + pad,
        );
        let mut w = vec![0xa5; rows * w_stride];
        let mut x = vec![0x5a; cols * x_stride];
        let (mut w_values, mut x_values) = (vec![0.0; rows * k], vec![0.0; cols * k]);
        for r in 0..rows {
            let row = &mut w[r * w_stride..];
            fill_weights(weight, row, k, random);
            // SAFETY: both hold a row of `k`.
            unsafe { (weight.dequantize_row)(row.as_ptr(), w_values[r * k..].as_mut_ptr(), k) };
        }
        for c in 0..cols {
            let column = &mut x[c * x_stride..];
            let values: Vec<f32> = (0..k).map(|_| change(random.float())).collect();
            let x_values = &mut x_values[c * k..][..k];
            // SAFETY: all hold a column of `k`.
            unsafe {
                (kernel.quantize_activation)(values.as_ptr(), column.as_mut_ptr(), k);
                match kernel.activation {
                    Activation::Typed(_) => {
                        let dequantize = kernel.activation.format().dequantize_row;
                        dequantize(column.as_ptr(), x_values.as_mut_ptr(), k);
                    }
                    Activation::I16 => x_values.copy_from_slice(&values),
                    Activation::Tiles => {
                        let bf16 = Format::of(Type::Bf16).unwrap();
                        (bf16.dequantize_row)(column.as_ptr(), x_values.as_mut_ptr(), k);
                    }
                    Activation::Prepared => {
                        let scalar = MatmulKernel::at(ty, Level::Scalar).unwrap();
                        let format = scalar.activation.format();
                        let mut column = vec![0; format.row_bytes(k)];
                        (scalar.quantize_activation)(values.as_ptr(), column.as_mut_ptr(), k);
                        (format.dequantize_row)(column.as_ptr(), x_values.as_mut_ptr(), k);
                    }
                }
            };
        }
        let mut exact = Vec::new();
        for c in 0..cols {
            for r in 0..rows {
                let pairs = w_values[r * k..][..k].iter().zip(&x_values[c * k..][..k]);
                let products = pairs.map(|(&w, &x)| f64::from(round(w)) * f64::from(x));
                exact.push(products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs())));
            }
        }
        Case {
            ty,
            activation: kernel.activation,
            k,
            rows,
            cols,
            w,
            w_stride,
            x,
            x_stride,
            exact,
        }
    }

    /// `cols` columns of `rows` results from rows `rows.start..` and columns `cols.start..`.
    fn run(
        &self,
        level: Level,
        rows: std::ops::Range<usize>,
        cols: std::ops::Range<usize>,
    ) -> Vec<f32> {
        self.multiply(level, rows, cols, false)
    }

    /// As [`Case::run`], with a table of the columns.
    fn run_table(
        &self,
        level: Level,
        rows: std::ops::Range<usize>,
        cols: std::ops::Range<usize>,
    ) -> Vec<f32> {
        self.multiply(level, rows, cols, true)
    }

    fn multiply(
        &self,
        level: Level,
        rows: std::ops::Range<usize>,
        cols: std::ops::Range<usize>,
        as_table: bool,
    ) -> Vec<f32> {
        let kernel = match MatmulKernel::at(self.ty, level).unwrap() {
            kernel if kernel.activation == self.activation => kernel,
            _ if self.activation == Activation::Prepared => {
                MatmulKernel::of_short_rows_at(self.ty, level).unwrap()
            }
            _ => MatmulKernel::rounded_at(self.ty, MANY, MANY, level).unwrap(),
        };
        const GUARD: f32 = -12345.0;
        let stride = rows.len() + 7;
        let mut dst = vec![GUARD; cols.len() * stride];
        // In a table, the columns are in another order.
        let mut table: Vec<Column> = cols
            .clone()
            .map(|c| Column {
                x: self.x[c * self.x_stride..].as_ptr(),
                dst: dst[(c - cols.start) * stride..].as_mut_ptr(),
            })
            .collect();
        table.reverse();
        let table = as_table.then(|| ColumnTable {
            columns: NonNull::from(table.as_mut_slice()).cast(),
            first_row: 0,
        });
        // SAFETY: the ranges lie within the case, and `dst` has a column of `stride` for each.
        unsafe {
            (kernel.gemm)(&GemmArgs {
                k: self.k,
                w: self.w.as_ptr().add(rows.start * self.w_stride),
                w_stride: self.w_stride,
                rows: rows.len(),
                x: self.x.as_ptr().add(cols.start * self.x_stride),
                x_stride: self.x_stride,
                cols: cols.len(),
                dst: dst.as_mut_ptr(),
                dst_stride: stride,
                table,
            });
        }
        let mut results = Vec::new();
        for column in dst.chunks(stride) {
            results.extend_from_slice(&column[..rows.len()]);
            assert!(
                column[rows.len()..].iter().all(|&x| x == GUARD),
                "{:?} at {level:?} wrote past the last row",
                self.ty
            );
        }
        results
    }

    /// Floating-point sums of `k` terms differ from the exact one by a few roundings of the
    /// magnitudes summed; Q8_1 carries its sums as halves, which is a format's error, not a
    /// kernel's.
    fn check(&self, level: Level) {
        let scalar = MatmulKernel::at(self.ty, Level::Scalar).unwrap();
        let relative = match scalar.activation {
            Activation::Typed(Type::Q8_1) => 2e-3,
            // The dot product of bfloat16 pairs may flush subnormals and round once per pair.
            _ => 4e-6,
        };
        self.compare(level, relative, 1e-30);
    }

    /// Results are at most `relative` of the magnitudes summed off, and `absolute`.
    fn compare(&self, level: Level, relative: f64, absolute: f64) {
        let results = self.run(level, 0..self.rows, 0..self.cols);
        for (i, (&got, &(exact, size))) in results.iter().zip(&self.exact).enumerate() {
            assert!(
                (f64::from(got) - exact).abs() <= relative * size + absolute,
                "{:?} at {level:?}, k {}, {} x {}: result {i} is {got}, should be {exact} (sum of \
                 magnitudes {size})",
                self.ty,
                self.k,
                self.rows,
                self.cols,
            );
        }
    }
}

/// A row of quantised numbers.
fn fill_weights(format: &Format, row: &mut [u8], k: usize, random: &mut Random) {
    let values: Vec<f32> = (0..k).map(|_| random.float()).collect();
    // SAFETY: the row is long enough for `k` elements.
    unsafe { (format.quantize_row)(values.as_ptr(), row.as_mut_ptr(), k) };
}

/// `k` in units of the longer of the two blocks.
fn unit(ty: Type) -> usize {
    let kernel = MatmulKernel::at(ty, Level::Scalar).unwrap();
    Format::of(ty)
        .unwrap()
        .block
        .max(kernel.activation.format().block)
}

#[test]
fn every_simd_level_is_correct_at_tile_edges() {
    let mut random = Random::new(42);
    for ty in weights() {
        for (blocks, rows, cols) in [
            (1, 1, 1),
            (3, 5, 1),
            (9, 33, 3),
            (2, 17, 8),
            (5, 64, 9),
            (1, 31, 33),
            (17, 3, 12),
        ] {
            let case = Case::new(ty, blocks * unit(ty), rows, cols, &mut random);
            levels().for_each(|level| case.check(level));
        }
    }
}

#[test]
fn short_rows_have_the_sums_of_other_rows() {
    for level in levels() {
        for ty in weights() {
            let Some(kernel) = MatmulKernel::of_short_rows_at(ty, level) else {
                let cached = [
                    Type::Q4_0,
                    Type::Q4_1,
                    Type::Q5_0,
                    Type::Q5_1,
                    Type::Q8_0,
                    Type::Iq4Nl,
                ];
                assert!(
                    level == Level::Scalar || !cached.contains(&ty),
                    "{ty:?} {level:?}"
                );
                continue;
            };
            for (blocks, rows, cols) in [
                (1, 1, 1),
                (2, 64, 4),
                (3, 5, 1),
                (4, 64, 8),
                (5, 16, 2),
                (8, 70, 5),
                (9, 33, 13),
                (18, 17, 7),
            ] {
                let (k, seed) = (32 * blocks, 49 + blocks as u64);
                let shape = [k, rows, cols];
                let case = Case::of(kernel, |w| w, |x| x, shape, &mut Random::new(seed));
                case.check(level);
                let all = case.run(level, 0..rows, 0..cols);
                for c in 0..cols {
                    let alone = case.run(level, 0..rows, c..c + 1);
                    assert_eq!(alone, all[c * rows..][..rows], "{ty:?} {level:?} {shape:?}");
                }
                if MatmulKernel::at(ty, level).unwrap().one_order {
                    let same = Case::new(ty, k, rows, cols, &mut Random::new(seed));
                    let same = same.run(level, 0..rows, 0..cols);
                    assert_eq!(same, all, "{ty:?} {level:?} {shape:?}");
                }
            }
        }
    }
}

#[test]
fn float_rows_may_have_any_length() {
    let mut random = Random::new(43);
    for ty in [Type::F32, Type::F16, Type::Bf16] {
        for k in [1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 100, 257, 1023] {
            for cols in [1, 2, 19] {
                let case = Case::new(ty, k, 19, cols, &mut random);
                levels().for_each(|level| case.check(level));
            }
        }
    }
}

#[test]
fn rounding_kernels_compute_products_of_the_rounded_values() {
    let mut random = Random::new(47);
    for level in levels() {
        for ty in weights() {
            let Some(kernel) = MatmulKernel::rounded_at(ty, MANY, MANY, level) else {
                continue;
            };
            if kernel.activation == Activation::Tiles {
                continue;
            }
            for k in [1, 2, 31, 32, 33, 127, 128, 129, 160, 1023] {
                for (rows, cols) in [(1, 1), (5, 3), (9, 8), (3, 13), (33, 40), (64, 32)] {
                    let shape = [k, rows, cols];
                    if kernel.activation == Activation::I16 {
                        let case = Case::of(kernel, |w| w, |x| x, shape, &mut random);
                        case.compare(level, 4e-6, off(k));
                    } else {
                        assert_eq!(kernel.activation, Activation::Typed(Type::Bf16));
                        let round = |w: f32| half::bf16::from_f32(w).to_f32();
                        Case::of(kernel, round, |x| x, shape, &mut random).check(level);
                    }
                }
            }
        }
    }
}

/// A weight as a kernel with tiles rounds it.
fn round_to_bf16(w: f32) -> f32 {
    half::bf16::from_f32(w).to_f32()
}

/// The kernels with tiles at a level.
fn tile_kernels(level: Level) -> impl Iterator<Item = MatmulKernel> {
    let rounded = move |ty| MatmulKernel::rounded_at(ty, MANY, MANY, level);
    weights()
        .filter_map(rounded)
        .filter(|kernel| kernel.activation == Activation::Tiles)
}

/// Every edge of a tile: rows and columns around 16, 32 and a block, one chunk of `k` and several.
#[test]
fn tiles_compute_products_of_the_rounded_values() {
    let mut random = Random::new(50);
    for level in levels() {
        for kernel in tile_kernels(level) {
            let (mut error, mut count) = (0.0, 0.0);
            let unit = unit(kernel.weight).next_multiple_of(32);
            let few = [
                (1, 1),
                (15, 17),
                (16, 16),
                (17, 15),
                (31, 33),
                (32, 32),
                (33, 31),
            ];
            let many = [(260, 34), (3, 515)];
            let lengths = [unit, 3 * unit, 256, 256 + unit, 1024 + unit];
            let shapes = lengths.map(|k| few.map(|(rows, cols)| [k, rows, cols]));
            let shapes = shapes.into_iter().flatten();
            for shape in shapes.chain(many.map(|(rows, cols)| [512, rows, cols])) {
                let case = Case::of(kernel, round_to_bf16, |x| x, shape, &mut random);
                // The sum of a weight and its minimum may be rounded once or twice before it is
                // rounded to BF16. So a weight is sometimes, but seldom, the next BF16.
                case.compare(level, 4e-3, 1e-30);
                let results = case.run(level, 0..case.rows, 0..case.cols);
                for (&got, &(exact, size)) in results.iter().zip(&case.exact) {
                    error += ((f64::from(got) - exact) / size).powi(2);
                    count += 1.0;
                }
            }
            let error = (error / count).sqrt();
            assert!(error < 2e-6, "{:?} at {level:?}: {error}", kernel.weight);
        }
    }
}

/// A result depends on its row and its column, not on those beside them.
#[test]
fn tiles_do_not_depend_on_the_columns_beside_them() {
    let mut random = Random::new(51);
    for level in levels() {
        for kernel in tile_kernels(level) {
            assert!(kernel.one_order && !kernel.takes_tables);
            let (k, rows, cols) = (512, 70, 70);
            let mut case = Case::of(kernel, |w| w, |x| x, [k, rows, cols], &mut random);
            for noise in [false, true] {
                if noise {
                    case.w.iter_mut().for_each(|byte| *byte = random.byte());
                    case.x.iter_mut().for_each(|byte| *byte = random.byte());
                }
                let whole = bits(&case.run(level, 0..rows, 0..cols));
                for (rows_of, columns) in [(0..1, 69..70), (7..30, 1..40), (32..70, 16..48)] {
                    let part = bits(&case.run(level, rows_of.clone(), columns.clone()));
                    for (c, part) in columns.zip(part.chunks(rows_of.len())) {
                        let expected = &whole[c * rows..][rows_of.clone()];
                        assert!(part == expected, "{:?} at {level:?}", kernel.weight);
                    }
                }
            }
        }
    }
}

/// A product releases its tiles: what was in them is gone, and they cost nothing when the thread is
/// suspended.
#[cfg(target_arch = "x86_64")]
#[test]
fn tiles_are_released_after_a_product() {
    /// Whether this thread has tiles in use: bit 18 of XINUSE.
    #[target_feature(enable = "xsave")]
    fn has_tiles() -> bool {
        // SAFETY: a processor with AMX has XGETBV with operand 1, which only reads a register.
        let in_use = unsafe { std::arch::x86_64::_xgetbv(1) };
        in_use >> 18 & 1 == 1
    }
    let mut random = Random::new(53);
    for level in levels() {
        for kernel in tile_kernels(level) {
            let case = Case::of(kernel, |w| w, |x| x, [256, 33, 33], &mut random);
            case.run(level, 0..33, 0..33);
            // SAFETY: a processor with tiles has XSAVE.
            assert!(!unsafe { has_tiles() }, "{:?} at {level:?}", kernel.weight);
        }
    }
}

/// A NaN in the scale of a block, whatever its payload, reaches the results.
#[test]
fn tiles_keep_every_nan() {
    let mut random = Random::new(52);
    for level in levels() {
        for kernel in tile_kernels(level) {
            // The format begins with an F16 scale, and has no zero point to hide behind.
            if !matches!(kernel.weight, Type::Q4_0 | Type::Q8_0 | Type::F16) {
                continue;
            }
            let mut case = Case::of(kernel, |w| w, |x| x, [64, 33, 33], &mut random);
            case.w[..2].copy_from_slice(&[0xff, 0xff]);
            let results = case.run(level, 0..33, 0..33);
            for column in results.chunks(33) {
                assert!(column[0].is_nan(), "{:?} at {level:?}", kernel.weight);
                assert!(column[1..].iter().all(|x| x.is_finite()));
            }
        }
    }
}

/// What sums of `k` products of integers of 14 bits may be off: each operand, below 2, is at most
/// half a step off, and errors have either sign.
fn off(k: usize) -> f64 {
    2.0 * 2.0 / 8191.0 * (k as f64).sqrt()
}

/// Integers with a scale are neither lost where they are small nor taken for numbers where they are
/// none.
#[test]
fn scaled_integers_hold_every_magnitude() {
    let mut random = Random::new(48);
    for level in levels() {
        for ty in [Type::F16, Type::Bf16] {
            let Some(kernel) = MatmulKernel::rounded_at(ty, MANY, MANY, level) else {
                continue;
            };
            if kernel.activation != Activation::I16 {
                continue;
            }
            let shape = [96, 17, 5];
            for factor in [1e-20, 1e-6, 1.0, 1e6, 1e30] {
                Case::of(kernel, |w| w, |x| x * factor, shape, &mut random).compare(
                    level,
                    4e-6,
                    off(96) * f64::from(factor),
                );
            }
            Case::of(kernel, |w| w, |_| 0.0, shape, &mut random).compare(level, 0.0, 0.0);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                // One element of the first column.
                let count = Cell::new(0);
                let change = |x: f32| {
                    count.set(count.get() + 1);
                    if count.get() == 40 { bad } else { x }
                };
                let case = Case::of(kernel, |w| w, change, shape, &mut random);
                let results = case.run(level, 0..17, 0..5);
                let (first, others) = results.split_at(17);
                assert!(first.iter().all(|x| !x.is_finite()), "{bad} at {level:?}");
                assert!(others.iter().all(|x| x.is_finite()), "{bad} at {level:?}");
            }
        }
    }
}

#[test]
fn empty_dimensions_are_accepted() {
    let mut random = Random::new(44);
    for ty in weights() {
        let case = Case::new(ty, unit(ty), 2, 2, &mut random);
        for level in levels() {
            assert!(case.run(level, 0..0, 0..2).is_empty());
            assert!(case.run(level, 0..2, 0..0).is_empty());
        }
        let empty = Case::new(ty, 0, 3, 9, &mut random);
        for level in levels() {
            assert_eq!(empty.run(level, 0..3, 0..9), vec![0.0; 27]);
            assert_eq!(empty.run(level, 0..3, 0..1), vec![0.0; 3]);
        }
    }
}

#[test]
fn a_result_depends_on_its_row_and_column_only() {
    let mut random = Random::new(45);
    for ty in weights() {
        for level in levels() {
            let panel = MatmulKernel::at(ty, level).unwrap().panel_cols;
            for cols in [1, 2, 3, panel.max(4), 2 * panel + 5] {
                let case = Case::new(ty, 3 * unit(ty), 71, cols, &mut random);
                let whole = case.run(level, 0..71, 0..cols);
                for rows in [0..1, 0..71, 5..38, 40..71, 70..71] {
                    let part = case.run(level, rows.clone(), 0..cols);
                    for (c, part) in part.chunks(rows.len()).enumerate() {
                        assert_eq!(part, &whole[c * 71..][rows.clone()], "{ty:?} at {level:?}");
                    }
                }
                // Cutting by columns is exact as long as a part stays on its side of the
                // threshold.
                let cut = cols / 2;
                let same_side = |n: usize| n > 1 && (n < panel) == (cols < panel);
                if same_side(cut) && same_side(cols - cut) {
                    let mut parts = case.run(level, 0..71, 0..cut);
                    parts.extend(case.run(level, 0..71, cut..cols));
                    assert_eq!(parts, whole, "{ty:?} at {level:?}");
                }
            }
        }
    }
}

/// Results as bits. All NaN are equal: which operand a NaN comes from is not promised.
fn bits(results: &[f32]) -> Vec<u32> {
    let canonical = |x: &f32| if x.is_nan() { f32::NAN } else { *x }.to_bits();
    results.iter().map(canonical).collect()
}

/// The types with one order of sums at the levels that have it, and with AVX-512 only.
const ONE_ORDER: [Type; 4] = [Type::Q8_0, Type::Q4K, Type::Q5K, Type::Q6K];
const ONE_ORDER_512: [Type; 3] = [Type::Q4_0, Type::Q4_1, Type::Iq4Nl];

/// A product has the same bits alone and among other columns: with one order of sums any number,
/// otherwise fewer than a panel has, and in a table any number. The bytes of weights and
/// activations are numbers, or any that a guest may write.
#[test]
fn a_product_does_not_depend_on_the_columns_beside_it() {
    const TABLE: usize = 35;
    let mut random = Random::new(49);
    for ty in weights() {
        for level in levels() {
            let kernel = MatmulKernel::at(ty, level).unwrap();
            // The dot product of bfloat16 pairs has one order for one column and one for several.
            if (ty, level) == (Type::Bf16, Level::Avx512Bf16) {
                continue;
            }
            assert_eq!(kernel.takes_tables, level != Level::Scalar);
            let has_one_order = match level {
                Level::Scalar => true,
                Level::Avx2 => ONE_ORDER.contains(&ty),
                Level::Avx2Vnni => false,
                _ => ONE_ORDER.contains(&ty) || ONE_ORDER_512.contains(&ty),
            };
            assert_eq!(kernel.one_order, has_one_order, "{ty:?} at {level:?}");
            let few = match kernel.one_order {
                true => TABLE,
                false => kernel.panel_cols.max(2) - 1,
            };
            let shapes = match unit(ty) {
                1 => [(1, 5, 0), (77, 9, 0), (600, 3, 1), (600, 3, 2)],
                unit => [(unit, 5, 0), (9 * unit, 19, 0), (512, 5, 1), (512, 9, 2)],
            };
            // What is noise: nothing, the weights, or both sides.
            for (k, rows, noise) in shapes {
                let mut case = Case::new(ty, k, rows, TABLE, &mut random);
                if noise > 0 {
                    case.w.iter_mut().for_each(|byte| *byte = random.byte());
                }
                if noise > 1 {
                    case.x.iter_mut().for_each(|byte| *byte = random.byte());
                }
                let expected: Vec<u32> = (0..TABLE)
                    .flat_map(|c| bits(&case.run(level, 0..rows, c..c + 1)))
                    .collect();
                let check = |results: Vec<f32>, cols: usize, how| {
                    assert!(
                        bits(&results) == expected[(TABLE - cols) * rows..],
                        "{ty:?} at {level:?}, k {k}, {cols} columns, {how}"
                    );
                };
                for cols in 2..=few {
                    check(case.run(level, 0..rows, TABLE - cols..TABLE), cols, "few");
                }
                if kernel.takes_tables {
                    for cols in 1..=TABLE {
                        let all = case.run_table(level, 0..rows, TABLE - cols..TABLE);
                        check(all, cols, "a table");
                    }
                }
            }
        }
    }
}

#[test]
fn activations_are_the_same_bytes_at_every_level() {
    let mut random = Random::new(46);
    for ty in weights() {
        let scalar = MatmulKernel::at(ty, Level::Scalar).unwrap();
        let activation = scalar.activation.format();
        for round in 0..300 {
            let k = activation.block * (1 + round % 5);
            let mut x: Vec<f32> = (0..k)
                .map(|_| random.float() * 2f32.powi(round as i32 % 90 - 45))
                .collect();
            match round % 6 {
                0 => x.fill(0.0),
                // Equal magnitudes of both signs: the first decides.
                1 => x
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, x)| *x = if i % 3 == 1 { 1.5 } else { -1.5 }),
                2 => x.iter_mut().for_each(|x| *x = (*x * 8.0).round() / 8.0),
                _ => {}
            }
            let run = |level| {
                let mut bytes = vec![0u8; activation.row_bytes(k)];
                let quantize = MatmulKernel::at(ty, level).unwrap().quantize_activation;
                // SAFETY: the vectors hold the row.
                unsafe { quantize(x.as_ptr(), bytes.as_mut_ptr(), k) };
                bytes
            };
            let expected = run(Level::Scalar);
            for level in levels() {
                assert!(run(level) == expected, "{ty:?} at {level:?}: {x:?}");
            }
        }
    }
    // Plain floats, of any number.
    for ty in [Type::F32, Type::F16, Type::Bf16] {
        for k in 0..40 {
            let mut x: Vec<f32> = (0..k).map(|_| random.float()).collect();
            if k > 3 {
                x[..4].copy_from_slice(&[f32::INFINITY, f32::NAN, 1e-40, -3e38]);
            }
            let run = |level| {
                let mut bytes = vec![0u8; Format::of(ty).unwrap().row_bytes(k)];
                let quantize = MatmulKernel::at(ty, level).unwrap().quantize_activation;
                // SAFETY: the vectors hold the row.
                unsafe { quantize(x.as_ptr(), bytes.as_mut_ptr(), k) };
                bytes
            };
            let expected = run(Level::Scalar);
            assert!(
                levels().all(|level| run(level) == expected),
                "{ty:?}, {k} elements"
            );
        }
    }
}

#[test]
fn floats_propagate_infinity_and_nan() {
    for (ty, one, infinity) in [
        (
            Type::F16,
            0x3c00u16.to_le_bytes().to_vec(),
            0x7c00u16.to_le_bytes().to_vec(),
        ),
        (
            Type::Bf16,
            0x3f80u16.to_le_bytes().to_vec(),
            0x7f80u16.to_le_bytes().to_vec(),
        ),
        (
            Type::F32,
            1f32.to_le_bytes().to_vec(),
            f32::INFINITY.to_le_bytes().to_vec(),
        ),
    ] {
        let bytes = one.len();
        for level in levels() {
            for cols in [1, 40] {
                let w = one.repeat(33 * 40);
                let mut x = one.repeat(33 * cols);
                x[7 * bytes..8 * bytes].copy_from_slice(&infinity);
                x[32 * bytes..33 * bytes].copy_from_slice(&infinity);
                let mut dst = vec![0.0; 40 * cols];
                let kernel = MatmulKernel::at(ty, level).unwrap();
                let mut run = |w: &[u8]| {
                    // SAFETY: the buffers hold 40 rows and `cols` columns of 33.
                    unsafe {
                        (kernel.gemm)(&GemmArgs {
                            k: 33,
                            w: w.as_ptr(),
                            w_stride: 33 * bytes,
                            rows: 40,
                            x: x.as_ptr(),
                            x_stride: 33 * bytes,
                            cols,
                            dst: dst.as_mut_ptr(),
                            dst_stride: 40,
                            table: None,
                        });
                    }
                    dst.clone()
                };
                assert!(
                    run(&w)[..40].iter().all(|&y| y == f32::INFINITY),
                    "{ty:?} {level:?}"
                );
                if cols > 1 {
                    assert!(run(&w)[40..].iter().all(|&y| y == 33.0), "{ty:?} {level:?}");
                }
                let mut w = w;
                w[39 * 33 * bytes..][7 * bytes..8 * bytes].fill(0);
                let results = run(&w);
                assert!(
                    results[39].is_nan(),
                    "infinity times zero, {ty:?} {level:?}"
                );
                assert!(
                    results[..39].iter().all(|&y| y == f32::INFINITY),
                    "{ty:?} {level:?}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_shapes(
        which in any::<prop::sample::Index>(),
        blocks in 1usize..8,
        rows in 1usize..80,
        cols in 1usize..40,
        seed in 1u64..,
    ) {
        let types: Vec<Type> = weights().collect();
        let ty = types[which.index(types.len())];
        let case = Case::new(ty, blocks * unit(ty), rows, cols, &mut Random::new(seed));
        for level in levels() {
            case.check(level);
        }
    }
}
