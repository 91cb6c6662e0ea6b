//! MUL_MAT, MUL_MAT_ID, OUT_PROD.

use std::sync::Arc;

use vgpu_cpu::formats::Format;
use vgpu_cpu::gemm::{Activation, MatmulKernel};
use vgpu_engine::{Engine, RunError};
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Precision, Shape, Sources, Tensor, Type, validate,
};

use crate::common::*;

/// Tolerance of sums in f32, relative to the sum of the magnitudes.
const TOLERANCE: f64 = 1e-5;

/// The tolerance if a block of activations stores its sum as f16.
const TOLERANCE_OF_HALF_SUMS: f64 = 2e-3;

pub(crate) const MUL_MAT: Op = Op::MulMat {
    accumulator: Precision::Default,
    activation: Precision::Default,
    hadamard: false,
};

const MUL_MAT_ID: Op = Op::MulMatId {
    accumulator: Precision::Default,
    activation: Precision::Default,
};

/// The types that can be weights.
pub(crate) fn weights() -> Vec<Type> {
    let is_weight = |ty: &Type| MatmulKernel::of(*ty).is_some();
    Type::ALL.iter().copied().filter(is_weight).collect()
}

/// The types of real numbers.
pub(crate) fn reals() -> Vec<Type> {
    let is_real = |ty: &Type| Format::of(*ty).is_some();
    Type::ALL.iter().copied().filter(is_real).collect()
}

/// A row of activations as ggml multiplies it with `weight`: rounded to the type that ggml pairs
/// with the type of the weight.
pub(crate) fn as_activation(weight: Type, row: &[f64]) -> Vec<f64> {
    let kernel = MatmulKernel::of(weight).expect("a type of weights");
    let format = kernel.activation.format();
    let mut values: Vec<f32> = row.iter().map(|&x| x as f32).collect();
    let mut bytes = vec![0; format.row_bytes(row.len())];
    // SAFETY: `values` holds the `row.len()` floats of a row, and `bytes` its blocks.
    unsafe {
        (kernel.quantize_activation)(values.as_ptr(), bytes.as_mut_ptr(), row.len());
        (format.dequantize_row)(bytes.as_ptr(), values.as_mut_ptr(), row.len());
    }
    values.into_iter().map(f64::from).collect()
}

/// A row of activations rounded to 8 bits in blocks of 32, with scales of 32 bits.
fn in_eights(row: &[f64]) -> Vec<f64> {
    let blocks = row.chunks(32).flat_map(|block| {
        let block = block.iter().map(|&x| x as f32);
        let largest = block.clone().fold(0.0f32, |most, x| most.max(x.abs()));
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        block.map(move |x| f64::from((x * inverse).round_ties_even()) * f64::from(largest / 127.0))
    });
    blocks.collect()
}

/// Tolerance of a product of activations with `weight`, relative to the sum of the magnitudes.
pub(crate) fn tolerance(weight: Type) -> f64 {
    if has_half_sums(weight) {
        TOLERANCE_OF_HALF_SUMS
    } else {
        TOLERANCE
    }
}

/// Whether each block of activations stores its sum as f16.
fn has_half_sums(weight: Type) -> bool {
    MatmulKernel::of(weight)
        .is_some_and(|kernel| kernel.activation == Activation::Typed(Type::Q8_1))
}

/// The dot product, and the sum of the magnitudes of its terms.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> (f64, f64) {
    let products = a.iter().zip(b).map(|(a, b)| a * b);
    products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
}

/// Tolerance of products whose operands are rounded to f16, relative to the sum of the magnitudes:
/// 2^-11 for each operand, and the error of the scales.
const TOLERANCE_OF_HALVES: f64 = 1.5e-3;

/// The tolerance for operands of bfloat16.
const TOLERANCE_OF_BRAIN_HALVES: f64 = 8e-3;

/// The tolerance for f32 operands that are split into pairs of bfloat16: each has an error of
/// 2^-16, and the product of the two small parts is left out.
const TOLERANCE_OF_PAIRS: f64 = 5e-5;

/// From so many columns on, engines may round their operands to f16, as ggml's CUDA backend does.
const MANY_COLUMNS: u64 = 9;

/// Compares a row of `columns` rows of products of `k` terms with weights of type `weight`, between
/// -1 and 1. Engines may round the activations `x` to the type that ggml multiplies the weights
/// with, to 8 bits in blocks of 32, or not at all.
#[track_caller]
fn compare_with_activations(
    weight: Type,
    [k, columns]: [u64; 2],
    engine: &dyn Engine,
    got: &[f64],
    x: &[f64],
    exact: impl Fn(u64, &[f64]) -> (f64, f64),
) {
    let rounded = as_activation(weight, x);
    let fits = |x: &[f64], tolerance: f64| {
        got.iter().enumerate().all(|(i, &got)| {
            let (exact, size) = exact(i as u64, x);
            (got - exact).abs() <= tolerance * size + 1e-30
        })
    };
    // The CPU engine must be as exact as ggml's CPU backend, except where it documents a rounding.
    let is_rounded = MatmulKernel::rounded(weight, k as usize, columns as usize).is_some();
    let halves = match weight {
        _ if engine.name() == "cpu" && is_rounded => TOLERANCE_OF_BRAIN_HALVES,
        _ if columns < MANY_COLUMNS || engine.name() == "cpu" => TOLERANCE,
        Type::Bf16 => TOLERANCE_OF_BRAIN_HALVES,
        Type::F32 => TOLERANCE_OF_PAIRS,
        _ => TOLERANCE_OF_HALVES,
    };
    if !fits(x, halves) && !fits(&in_eights(x), TOLERANCE) {
        compare_products(weight, k, got, |i| exact(i, &rounded));
    }
}

/// Compares a row of products of `k` terms with weights of type `weight`, between -1 and 1.
#[track_caller]
fn compare_products(weight: Type, k: u64, got: &[f64], exact: impl Fn(u64) -> (f64, f64)) {
    // Scales and sums of small activations are subnormal in f16: errors of up to 2^-25, times
    // quants of up to 127.
    let subnormal = if has_half_sums(weight) {
        k as f64 * 2f64.powi(-25) * 127.0
    } else {
        1e-30
    };
    for (i, &got) in got.iter().enumerate() {
        let (exact, size) = exact(i as u64);
        assert!(
            (got - exact).abs() <= tolerance(weight) * size + subnormal,
            "{weight:?}: {i} is {got:e}, not {exact:e}; magnitudes add up to {size:e}"
        );
    }
}

/// A length that is a whole number of blocks of both types.
fn length(blocks: u64, types: [Type; 2]) -> u64 {
    match types.map(Type::block_elements).into_iter().max() {
        Some(1) | None => blocks * 37,
        Some(block) => blocks * block,
    }
}

/// Checks a product of random operands.
fn check_mul_mat(
    engine: &dyn Engine,
    random: &mut Random,
    types: [Type; 2],
    [k, m, n]: [u64; 3],
    [w2, w3, r2, r3]: [u64; 4],
) {
    let w = Data::random_rows(types[0], [k, m, w2, w3], true, random);
    let w = w.fill(|| random.between(-1.0, 1.0));
    let x = Data::random(types[1], [k, n, w2 * r2, w3 * r3], random);
    let x = x.fill(|| random.between(-1.0, 1.0));
    let dst = Data::random_rows(Type::F32, [m, n, w2 * r2, w3 * r3], true, random);
    let got = run(engine, MUL_MAT, &dst, &[Some(&w), Some(&x)]);
    for row in got.row_indices() {
        let [_, i2, i3] = row;
        let x = x.row_values(row);
        compare_with_activations(types[0], [k, n], engine, got.row_values(row), x, |i, x| {
            dot(w.row_values([i, i2 / r2, i3 / r3]), x)
        });
    }
}

pub(crate) fn mul_mat(engine: &dyn Engine) {
    property(150, |random| {
        let types = [random.pick(&weights()), random.pick(&reals())];
        let k = length(random.below(4), types);
        let lengths = [k, random.below(70), random.below(40)];
        let batch = [random.below(3), 1, 1, 1].map(|n| n + random.below(3));
        check_mul_mat(engine, random, types, lengths, batch);
    });
}

/// Every type of weights with one, several and many columns, and sums that end within a step and a
/// tile.
pub(crate) fn few_and_many_columns(engine: &dyn Engine) {
    let mut random = Random::new(11);
    for weight in weights() {
        let block = weight.block_elements().max(32);
        for (blocks, m, n) in [
            (1, 5, 1),
            (1300 / block + 1, 19, 5),
            (3, 131, 20),
            (2, 70, 66),
        ] {
            let lengths = [blocks * block, m, n];
            check_mul_mat(engine, &mut random, [weight, Type::F32], lengths, [1; 4]);
        }
    }
}

/// Types of weights with kernels for sm_90a.
const SM90_WEIGHTS: [Type; 15] = [
    Type::F16,
    Type::Bf16,
    Type::Q4_0,
    Type::Q4_1,
    Type::Q5_0,
    Type::Q5_1,
    Type::Q8_0,
    Type::Iq4Nl,
    Type::Mxfp4,
    Type::Q2K,
    Type::Q3K,
    Type::Q4K,
    Type::Q5K,
    Type::Q6K,
    Type::Iq4Xs,
];

/// The kernels for groups of warps: sums that end within a step, a chunk and a tile, batches that
/// share weights, rows that lie apart, tiles of both widths.
pub(crate) fn many_columns_of_groups(engine: &dyn Engine) {
    let mut random = Random::new(13);
    for weight in SM90_WEIGHTS {
        let block = weight.block_elements().max(32);
        for (k, m, n, batch) in [
            (block, 5, 65, [1, 1, 2, 1]),
            (1056 / block * block, 131, 70, [1; 4]),
            (256, 400, 300, [1; 4]),
            (512, 20, 72, [2, 1, 2, 2]),
        ] {
            check_mul_mat(engine, &mut random, [weight, Type::F32], [k, m, n], batch);
        }
    }
}

/// The kernels for few columns on tensor cores: tiles of each width, full or not, sums that end
/// within a step and a chunk, one and several shares of K, batches that share weights.
pub(crate) fn few_columns_on_tensor_cores(engine: &dyn Engine) {
    let mut random = Random::new(17);
    for weight in SM90_WEIGHTS {
        let block = weight.block_elements().max(32);
        for (k, m, n, batch) in [
            (block, 5, 9, [1, 1, 2, 1]),
            (1056 / block * block, 131, 16, [1; 4]),
            (3104 / block * block, 64, 23, [1; 4]),
            (512, 70, 40, [2, 1, 2, 2]),
            (1024, 20, 64, [1; 4]),
        ] {
            check_mul_mat(engine, &mut random, [weight, Type::F32], [k, m, n], batch);
        }
    }
    // More tiles of rows than blocks are resident: each block has all of K, in more chunks than
    // shared memory has stages.
    for (weight, n) in [(Type::Q4K, 16), (Type::Q4K, 64), (Type::F16, 16)] {
        let lengths = [2048, 1600, n];
        check_mul_mat(engine, &mut random, [weight, Type::F32], lengths, [1; 4]);
    }
}

pub(crate) fn mul_mat_of_many_tiles(engine: &dyn Engine) {
    for (weight, lengths) in [
        (Type::F32, [4100, 150, 70]),
        (Type::F16, [2500, 300, 1]),
        (Type::Q4K, [4096, 70, 200]),
        (Type::Q8_0, [8192, 1, 130]),
    ] {
        let random = &mut Random::new(7);
        check_mul_mat(engine, random, [weight, Type::F32], lengths, [1; 4]);
    }
}

pub(crate) fn mul_mat_over_its_own_sources(engine: &dyn Engine) {
    // The destination overlaps the weights: every thread would change what the other threads read.
    const FLOATS: usize = 1 << 14;
    const N: usize = 64;
    const AT: usize = 64;
    let random = &mut Random::new(5);
    let before: Vec<f32> = (0..FLOATS)
        .map(|_| random.between(-1.0, 1.0) as f32)
        .collect();
    let bytes: Vec<u8> = before.iter().flat_map(|x| x.to_le_bytes()).collect();
    let memory = engine.alloc(bytes.len() as u64).expect("64 KiB");
    memory.write(0, bytes.as_slice().into()).unwrap();
    let shape = Shape::contiguous(Type::F32, [N as u64, N as u64, 1, 1]).unwrap();
    let tensor = |float: usize| Tensor {
        shape,
        buffer: 0,
        offset: 4 * float as u64,
    };
    let graph = Graph {
        buffers: vec![BufferId(1)],
        tensors: vec![tensor(0), tensor(N * N), tensor(AT)],
        nodes: vec![Node {
            op: MUL_MAT,
            dst: 2,
            src: Sources::new([Some(0), Some(1)]),
        }],
    };
    let size = |_| Some(bytes.len() as u64);
    let graph = validate(graph, engine.capabilities(), &Limits::default(), size).unwrap();
    let mut plan = engine
        .compile(&graph, &[Arc::clone(&memory)], &|| false)
        .unwrap();
    plan.run().unwrap();
    let mut after = vec![0; bytes.len()];
    memory.read(0, after.as_mut_slice().into()).unwrap();
    let after: Vec<f32> = after
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect();
    assert_eq!(after[..AT], before[..AT]);
    assert_eq!(after[AT + N * N..], before[AT + N * N..]);
    let row =
        |i: usize| -> Vec<f64> { before[N * i..][..N].iter().map(|&x| f64::from(x)).collect() };
    for j in 0..N {
        let got: Vec<f64> = after[AT + N * j..][..N]
            .iter()
            .map(|&x| f64::from(x))
            .collect();
        compare_products(Type::F32, N as u64, &got, |i| {
            dot(&row(i as usize), &row(N + j))
        });
    }
}

pub(crate) fn mul_mat_of_what_was_multiplied_before(engine: &dyn Engine) {
    // An engine may reuse converted activations, but not after a write to the originals.
    for (ty, columns) in [
        (Type::Q8_0, 1),
        (Type::F16, 12),
        (Type::Q4K, 7),
        (Type::Q4K, 40),
        (Type::Q4K, 70),
        (Type::F16, 40),
    ] {
        let random = &mut Random::new(columns);
        let mut rows = |ty, n| {
            let data = Data::random_rows(ty, [256, n, 1, 1], true, random);
            data.fill(|| random.between(-1.0, 1.0))
        };
        let (a, b, x) = (rows(ty, 33), rows(ty, 17), rows(Type::F32, columns));
        let out = |rows| Data::dense(Type::F32, [rows, columns, 1, 1]);
        let outs = [out(33), out(17), out(33)];
        let halve = Op::Scale {
            scale: -0.5,
            bias: 0.25,
        };
        let nodes: [(Op, u32, &[u32]); 4] = [
            (MUL_MAT, 3, &[0, 2]),
            (MUL_MAT, 4, &[1, 2]),
            (halve, 2, &[2]),
            (MUL_MAT, 5, &[0, 2]),
        ];
        let after = run_nodes(engine, &[&a, &b, &x, &outs[0], &outs[1], &outs[2]], &nodes);
        let halved = run_in_place(engine, halve, &[Some(&x)]);
        assert_eq!(after[2].values(), halved.values());
        for (i, w, x) in [(3, &a, &x), (4, &b, &x), (5, &a, &halved)] {
            let alone = run(engine, MUL_MAT, &outs[i - 3], &[Some(w), Some(x)]);
            assert_eq!(after[i].values(), alone.values(), "{ty:?}, product {i}");
        }
    }
}

pub(crate) fn hadamard(engine: &dyn Engine) {
    let op = Op::MulMat {
        accumulator: Precision::Default,
        activation: Precision::Default,
        hadamard: true,
    };
    for (k, ty) in [
        (1, Type::F32),
        (2, Type::F16),
        (32, Type::F32),
        (256, Type::F16),
    ] {
        let random = &mut Random::new(k);
        let mut w = Data::dense(Type::F32, [k, k, 1, 1]);
        for index in w.indices().collect::<Vec<_>>() {
            let sign = 1 - 2 * ((index[0] & index[1]).count_ones() as i32 % 2);
            w.set(index, f64::from(sign) / (k as f64).sqrt());
        }
        let x = Data::random(ty, [k, 5, 2, 3], random).fill(|| random.between(-1.0, 1.0));
        let dst = Data::random_rows(Type::F32, [k, 5, 2, 3], true, random);
        let got = run(engine, op, &dst, &[Some(&w), Some(&x)]);
        for row in got.row_indices() {
            let x = x.row_values(row);
            compare_products(Type::F32, k, got.row_values(row), |i| {
                dot(w.row_values([i, 0, 0]), x)
            });
        }
    }
}

pub(crate) fn mul_mat_id(engine: &dyn Engine) {
    property(150, |random| {
        let types = [random.pick(&weights()), random.pick(&reals())];
        let k = length(random.below(4), types);
        let (m, experts) = (random.below(70), 1 + random.below(6));
        let used = 1 + random.below(4);
        // A single one has a way of its own.
        let tokens = if random.chance(4) {
            1
        } else {
            random.below(30)
        };
        let columns = random.pick(&[1, used]);
        let w = Data::random_rows(types[0], [k, m, experts, 1], true, random);
        let w = w.fill(|| random.between(-1.0, 1.0));
        let x = Data::random(types[1], [k, columns, tokens, 1], random);
        let x = x.fill(|| random.between(-1.0, 1.0));
        let ids = Data::random(Type::I32, [used, tokens, 1, 1], random)
            .fill(|| random.below(experts) as f64);
        let dst = Data::random_rows(Type::F32, [m, used, tokens, 1], true, random);
        let got = run(engine, MUL_MAT_ID, &dst, &[Some(&w), Some(&x), Some(&ids)]);
        for row in got.row_indices() {
            let [slot, token, _] = row;
            let expert = ids.get([slot, token, 0, 0]) as u64;
            let x = x.row_values([slot % columns, token, 0]);
            // The CPU engine rounds further if each expert has many columns on average.
            let columns = match engine.name() {
                "cpu" => used * tokens / experts,
                _ => tokens,
            };
            let lengths = [k, columns];
            compare_with_activations(types[0], lengths, engine, got.row_values(row), x, |i, x| {
                dot(w.row_values([i, expert, 0]), x)
            });
        }
    });
}

/// Experts with so many columns that they are multiplied in other ways: most tokens select the same
/// expert, and one expert nobody. A demand for single precision holds for experts, too.
pub(crate) fn experts_with_many_columns(engine: &dyn Engine) {
    let exact = Op::MulMatId {
        accumulator: Precision::F32,
        activation: Precision::Default,
    };
    for (ty, k) in [
        (Type::Q4K, 256),
        (Type::F16, 288),
        (Type::Iq3S, 256),
        (Type::Q8_0, 96),
    ] {
        for op in [MUL_MAT_ID, exact] {
            let random = &mut Random::new(k);
            let (m, experts, tokens) = (19, 3, 601);
            let w = Data::random_rows(ty, [k, m, experts, 1], true, random);
            let w = w.fill(|| random.between(-1.0, 1.0));
            let x = Data::dense(Type::F32, [k, 1, tokens, 1]);
            let x = x.fill(|| random.between(-1.0, 1.0));
            let mut token = 0;
            let ids = Data::dense(Type::I32, [1, tokens, 1, 1]).fill(|| {
                token += 1;
                f64::from(token % 100 == 0)
            });
            let dst = Data::dense(Type::F32, [m, 1, tokens, 1]);
            let got = run(engine, op, &dst, &[Some(&w), Some(&x), Some(&ids)]);
            let is_exact = op == exact && engine.name() == "cpu";
            let columns = if is_exact { 1 } else { tokens / experts };
            for row in got.row_indices() {
                let [_, token, _] = row;
                let expert = ids.get([0, token, 0, 0]) as u64;
                let x = x.row_values([0, token, 0]);
                let got = got.row_values(row);
                compare_with_activations(ty, [k, columns], engine, got, x, |i, x| {
                    dot(w.row_values([i, expert, 0]), x)
                });
            }
        }
    }
}

/// Activations beyond F16, of nodes that demand F32 or BF16 for them.
pub(crate) fn activations_beyond_f16(engine: &dyn Engine) {
    for demand in [Precision::F32, Precision::Bf16] {
        activations_beyond_f16_with(engine, demand);
    }
}

fn activations_beyond_f16_with(engine: &dyn Engine, activation: Precision) {
    let accumulator = Precision::Default;
    let mul_mat = Op::MulMat {
        accumulator,
        activation,
        hadamard: false,
    };
    let mul_mat_id = Op::MulMatId {
        accumulator,
        activation,
    };
    // F16 ends at 65504. The activations of 8 bits for some of these types have scales of F16, one
    // for each block, and end at 127 times that.
    let largest = 4e6;
    let mut random = Random::new(24);
    let weights = [
        Type::F32,
        Type::F16,
        Type::Bf16,
        Type::Q4_1,
        Type::Q8_0,
        Type::Q4K,
    ];
    for weight in weights {
        let (k, experts, used) = (256, 3, 2);
        let w = Data::dense(weight, [k, 37, experts, 1]).aligned();
        let w = w.fill(|| random.between(-1.0, 1.0));
        let compare = |columns, got: &[f64], x: &[f64], expert| {
            let exact = |i, x: &[f64]| dot(w.row_values([i, expert, 0]), x);
            if weight.is_quantized() {
                let lengths = [k, columns];
                compare_with_activations(weight, lengths, engine, got, x, exact);
                return;
            }
            for (i, &got) in got.iter().enumerate() {
                let (exact, size) = exact(i as u64, x);
                let error = (got - exact).abs() / size;
                let tolerance = match (weight, activation) {
                    // BF16 has eight bits.
                    (Type::Bf16, Precision::Bf16) => 2f64.powi(-9),
                    _ => TOLERANCE_OF_PAIRS,
                };
                assert!(
                    error <= tolerance,
                    "{weight:?}, {columns}, {activation:?}: {error}"
                );
            }
        };
        for columns in [1, 7, 40] {
            let x = Data::dense(Type::F32, [k, columns, experts, 1]).aligned();
            let x = x.fill(|| random.between(-largest, largest));
            let dst = Data::dense(Type::F32, [37, columns, experts, 1]);
            let got = run(engine, mul_mat, &dst, &[Some(&w), Some(&x)]);
            for row in got.row_indices() {
                compare(columns, got.row_values(row), x.row_values(row), row[1]);
            }
            let tokens = columns;
            let x = Data::dense(Type::F32, [k, used, tokens, 1]).aligned();
            let x = x.fill(|| random.between(-largest, largest));
            let ids = Data::dense(Type::I32, [used, tokens, 1, 1]);
            let ids = ids.fill(|| random.below(experts) as f64);
            let dst = Data::dense(Type::F32, [37, used, tokens, 1]);
            let got = run(engine, mul_mat_id, &dst, &[Some(&w), Some(&x), Some(&ids)]);
            let compare_experts = |got: &Data| {
                for row in got.row_indices() {
                    let [slot, token, _] = row;
                    let expert = ids.get([slot, token, 0, 0]) as u64;
                    compare(tokens, got.row_values(row), x.row_values(row), expert);
                }
            };
            compare_experts(&got);
            // Beside a product of the same activations without a demand, before it and after it.
            for [first, second] in [[MUL_MAT_ID, mul_mat_id], [mul_mat_id, MUL_MAT_ID]] {
                let tensors = [&w, &x, &ids, &dst, &dst];
                let nodes = [(first, 3, &[0, 1, 2][..]), (second, 4, &[0, 1, 2][..])];
                let after = run_nodes(engine, &tensors, &nodes);
                compare_experts(&after[if first == mul_mat_id { 3 } else { 4 }]);
            }
        }
    }
}

/// Every type of weights with few and many tokens for some experts, and none for others.
pub(crate) fn few_and_many_tokens_of_experts(engine: &dyn Engine) {
    let mut random = Random::new(23);
    for (i, weight) in weights().into_iter().enumerate() {
        let block = weight.block_elements().max(32);
        let (used, experts) = ([1, 2, 3][i % 3], 5);
        for (k, tokens) in [(2 * block, 3), (block, 30), (block, [20, 70, 150][i % 3])] {
            let w = Data::dense(weight, [k, 21, experts, 1]).aligned();
            let w = w.fill(|| random.between(-1.0, 1.0));
            let slots = [1, used][i % 2];
            let x = Data::dense(Type::F32, [k, slots, tokens, 1]).aligned();
            let x = x.fill(|| random.between(-1.0, 1.0));
            // Most tokens use the second expert, none the last.
            let ids = Data::dense(Type::I32, [used, tokens, 1, 1])
                .fill(|| [1, 1, 1, 1, 0, 2, 3][random.below(7) as usize] as f64);
            let dst = Data::dense(Type::F32, [21, used, tokens, 1]);
            let got = run(engine, MUL_MAT_ID, &dst, &[Some(&w), Some(&x), Some(&ids)]);
            for row in got.row_indices() {
                let [slot, token, _] = row;
                let expert = ids.get([slot, token, 0, 0]) as u64;
                let x = x.row_values([slot % slots, token, 0]);
                let lengths = [k, tokens];
                let got = got.row_values(row);
                compare_with_activations(weight, lengths, engine, got, x, |i, x| {
                    dot(w.row_values([i, expert, 0]), x)
                });
            }
        }
    }
}

pub(crate) fn experts_are_checked(engine: &dyn Engine) {
    // The general kernel, the kernel for few tokens, the kernel for many tokens.
    for (id, ty, k, tokens) in [
        (-1, Type::F32, 8, 2),
        (3, Type::Q8_0, 32, 2),
        (i32::MIN, Type::Q4K, 256, 20),
        (i32::MAX, Type::F32, 8, 2),
        (3, Type::Q8_0, 32, 20),
    ] {
        let w = Data::dense(ty, [k, 4, 3, 1]).fill(|| 1.0);
        let x = Data::dense(Type::F32, [k, 1, tokens, 1]).fill(|| 1.0);
        let dst = Data::dense(Type::F32, [4, 2, tokens, 1]);
        let mut ids = Data::dense(Type::I32, [2, tokens, 1, 1]).fill(|| 2.0);
        ids.set([1, 1, 0, 0], f64::from(id));
        let outcome = try_run(engine, MUL_MAT_ID, &dst, &[Some(&w), Some(&x), Some(&ids)]);
        let Err(Failure::Run(error)) = outcome.map(|_| ()) else {
            panic!("expert {id} was used");
        };
        let expected = RunError::Index {
            node: 0,
            op: "MUL_MAT_ID",
            index: i64::from(id),
            count: 3,
        };
        assert_eq!(error, expected);
    }
}

pub(crate) fn out_prod(engine: &dyn Engine) {
    property(150, |random| {
        let a = random.pick(&reals());
        let b = random.pick(&[Type::F32, Type::F16, Type::Bf16]);
        let m = random.below(4)
            * if a.is_quantized() {
                a.block_elements()
            } else {
                237
            };
        let (n, terms) = (random.below(40), random.below(140));
        let [a2, a3, r2, r3] = [random.below(3), 1, 1, 1].map(|n| n + random.below(3));
        let a = Data::random(a, [m, terms, a2, a3], random).fill(|| random.between(-1.0, 1.0));
        let b = Data::random(b, [n, terms, a2 * r2, a3 * r3], random);
        let b = b.fill(|| random.between(-1.0, 1.0));
        let dst = Data::random_rows(Type::F32, [m, n, a2 * r2, a3 * r3], true, random);
        let got = run(engine, Op::OutProd {}, &dst, &[Some(&a), Some(&b)]);
        for row in got.row_indices() {
            let [j, i2, i3] = row;
            let mut sums = vec![(0.0, 0.0); m as usize];
            for t in 0..terms {
                let weight = b.row_values([t, i2, i3])[j as usize];
                for (sum, value) in sums.iter_mut().zip(a.row_values([t, i2 / r2, i3 / r3])) {
                    sum.0 += value * weight;
                    sum.1 += (value * weight).abs();
                }
            }
            compare_products(Type::F32, terms, got.row_values(row), |i| sums[i as usize]);
        }
    });
}
