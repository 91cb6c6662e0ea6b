//! Matrix products, rotary positions, soft-max and attention of the CPU engine against slow, obvious
//! references in f64: random types, extents, strides and broadcasts, through the whole engine.

use std::sync::Arc;

use proptest::prelude::*;
use vgpu_kernels::cpu::CpuEngine;
use vgpu_kernels::cpu::formats::Format;
use vgpu_kernels::cpu::gemm::MatmulKernel;
use vgpu_kernels::{Engine, Memory, RunError};
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Precision, RopeMode, Shape, Sources, Tensor, Type, validate,
};

/// What memory holds before a test writes to it.
const FILLER: u8 = 0xa5;

/// A reproducible stream of numbers.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.bits() >> 16) % n
    }

    /// Roughly normal.
    fn float(&mut self) -> f32 {
        (0..4)
            .map(|_| (self.bits() >> 40) as f32 / (1 << 24) as f32 - 0.5)
            .sum()
    }
}

/// A tensor with its memory: a buffer of its own, with room around it.
#[derive(Clone)]
struct Operand {
    shape: Shape,
    offset: u64,
    memory: Vec<u8>,
}

impl Operand {
    /// Memory for a tensor whose dimensions lie in the order `order` (the innermost first), with
    /// `gaps[d]` unused steps after each run of dimension `d`.
    fn strided(ty: Type, ne: [u64; 4], order: [usize; 4], gaps: [u64; 4]) -> Operand {
        let mut nb = [0; 4];
        let mut step = ty.block_bytes();
        for d in order {
            nb[d] = step;
            let steps = if d == 0 {
                ne[0] / ty.block_elements()
            } else {
                ne[d]
            };
            step *= steps.max(1) + gaps[d];
        }
        let shape = Shape { ty, ne, nb };
        // Not a multiple of anything larger than the largest plain element.
        let offset = 24;
        let size = offset + shape.extent().expect("test shapes are small") + 40;
        Operand {
            shape,
            offset,
            memory: vec![FILLER; size as usize],
        }
    }

    fn dense(ty: Type, ne: [u64; 4]) -> Operand {
        Operand::strided(ty, ne, [0, 1, 2, 3], [0; 4])
    }

    /// A layout by chance: rows dense unless `any_row`, the other dimensions in any order.
    fn random(ty: Type, ne: [u64; 4], any_row: bool, random: &mut Random) -> Operand {
        let mut order = [0, 1, 2, 3];
        let first = if any_row && !ty.is_quantized() { 0 } else { 1 };
        for i in (first + 1..4).rev() {
            order.swap(i, first + random.below((i - first + 1) as u64) as usize);
        }
        let gaps = std::array::from_fn(|_| random.below(3));
        Operand::strided(ty, ne, order, gaps)
    }

    fn rows(&self) -> impl Iterator<Item = [u64; 3]> + use<> {
        let [_, ne1, ne2, ne3] = self.shape.ne;
        (0..ne3)
            .flat_map(move |i3| (0..ne2).flat_map(move |i2| (0..ne1).map(move |i1| [i1, i2, i3])))
    }

    fn row_at(&self, [i1, i2, i3]: [u64; 3]) -> usize {
        let nb = self.shape.nb;
        (self.offset + i1 * nb[1] + i2 * nb[2] + i3 * nb[3]) as usize
    }

    /// Writes every row, given by its values in order.
    fn fill(mut self, mut next: impl FnMut() -> f32) -> Operand {
        let Shape { ty, ne, nb } = self.shape;
        let rows: Vec<[u64; 3]> = self.rows().collect();
        for row in rows {
            let values: Vec<f32> = (0..ne[0]).map(|_| next()).collect();
            let at = self.row_at(row);
            let bytes = encode(ty, &values);
            let block = ty.block_bytes() as usize;
            for (i, bytes) in bytes.chunks_exact(block).enumerate() {
                self.memory[at + i * nb[0] as usize..][..block].copy_from_slice(bytes);
            }
        }
        self
    }

    fn integers(mut self, mut next: impl FnMut() -> i32) -> Operand {
        assert_eq!(self.shape.ty, Type::I32);
        let rows: Vec<[u64; 3]> = self.rows().collect();
        for row in rows {
            for i in 0..self.shape.ne[0] {
                let at = self.row_at(row) + (i * self.shape.nb[0]) as usize;
                self.memory[at..at + 4].copy_from_slice(&next().to_le_bytes());
            }
        }
        self
    }

    /// The elements of a row, as they were rounded by the type.
    fn row(&self, row: [u64; 3]) -> Vec<f32> {
        let Shape { ty, ne, nb } = self.shape;
        let format = Format::of(ty).expect("a type of real numbers");
        let at = self.row_at(row);
        let bytes: Vec<u8> = (0..ne[0] / ty.block_elements())
            .flat_map(|i| self.memory[at + (i * nb[0]) as usize..][..format.bytes].to_vec())
            .collect();
        let mut values = vec![0.0; ne[0] as usize];
        // SAFETY: both hold a row.
        unsafe { (format.dequantize_row)(bytes.as_ptr(), values.as_mut_ptr(), values.len()) };
        values
    }

    fn integer(&self, row: [u64; 3], i: u64) -> i32 {
        let at = self.row_at(row) + (i * self.shape.nb[0]) as usize;
        i32::from_le_bytes(self.memory[at..at + 4].try_into().unwrap())
    }
}

/// A row in the bytes of a type; of types that need more than the values to be written, any row.
fn encode(ty: Type, values: &[f32]) -> Vec<u8> {
    let format = Format::of(ty).expect("a type of real numbers");
    let mut bytes = vec![0; format.row_bytes(values.len())];
    if let Some(quantize) = format.quantize_row {
        // SAFETY: both hold a row.
        unsafe { quantize(values.as_ptr(), bytes.as_mut_ptr(), values.len()) };
        return bytes;
    }
    let mut random = Random(u64::from(values[0].to_bits()) << 1 | 1);
    let mut block = vec![0.0; format.block];
    for bytes in bytes.chunks_exact_mut(format.bytes) {
        loop {
            bytes.iter_mut().for_each(|b| *b = random.bits() as u8);
            // SAFETY: both hold a block.
            unsafe { (format.dequantize_row)(bytes.as_ptr(), block.as_mut_ptr(), format.block) };
            if block.iter().all(|v| v.abs() < 10.0) {
                break;
            }
        }
    }
    bytes
}

/// Runs one operation and returns the destination. Panics if the engine refuses it, or if memory
/// around the destination or of a source has changed.
fn run(threads: usize, op: Op, dst: &Operand, src: &[Option<&Operand>]) -> Operand {
    try_run(threads, op, dst, src).expect("the operation runs")
}

fn try_run(
    threads: usize,
    op: Op,
    dst: &Operand,
    src: &[Option<&Operand>],
) -> Result<Operand, RunError> {
    let engine = CpuEngine::new(threads, None).unwrap();
    let operands: Vec<&Operand> = src.iter().copied().flatten().chain([dst]).collect();
    let memory: Vec<Arc<dyn Memory>> = operands
        .iter()
        .map(|o| {
            let memory = engine.alloc(o.memory.len() as u64).unwrap();
            memory.write(0, o.memory.as_slice().into()).unwrap();
            memory
        })
        .collect();
    let mut index = 0;
    let sources = src.iter().map(|s| {
        s.map(|_| {
            index += 1;
            index - 1
        })
    });
    let sources = Sources::new(sources.collect::<Vec<_>>());
    let graph = Graph {
        buffers: (0..operands.len())
            .map(|i| BufferId(i as u64 + 1))
            .collect(),
        tensors: operands
            .iter()
            .enumerate()
            .map(|(i, o)| Tensor {
                shape: o.shape,
                buffer: i as u32,
                offset: o.offset,
            })
            .collect(),
        nodes: vec![Node {
            op,
            dst: operands.len() as u32 - 1,
            src: sources,
        }],
    };
    let sizes: Vec<u64> = memory.iter().map(|m| m.size()).collect();
    let size_of = |id: BufferId| sizes.get(id.0 as usize - 1).copied();
    let graph = validate(graph, engine.capabilities(), &Limits::default(), size_of)
        .unwrap_or_else(|e| panic!("{e}"));
    engine.compile(&graph, &memory).unwrap().run()?;
    let after: Vec<Vec<u8>> = memory
        .iter()
        .map(|m| {
            let mut bytes = vec![0; m.size() as usize];
            m.read(0, bytes.as_mut_slice().into()).unwrap();
            bytes
        })
        .collect();
    let (dst_after, src_after) = after.split_last().unwrap();
    for (before, after) in operands.iter().zip(src_after) {
        assert!(before.memory == *after, "a source has changed");
    }
    let result = Operand {
        memory: dst_after.clone(),
        ..(*dst).clone()
    };
    let mut rest = dst_after.clone();
    for row in result.rows() {
        for i in 0..dst.shape.ne[0] / dst.shape.ty.block_elements() {
            let at = result.row_at(row) + (i * dst.shape.nb[0]) as usize;
            let block = dst.shape.ty.block_bytes() as usize;
            rest[at..at + block].copy_from_slice(&dst.memory[at..at + block]);
        }
    }
    assert!(
        rest == dst.memory,
        "memory around the destination has changed"
    );
    Ok(result)
}

/// The types that can be weights.
fn weight_types() -> Vec<Type> {
    let is_weight = |ty: &Type| MatmulKernel::of(*ty).is_some();
    Type::ALL.iter().copied().filter(is_weight).collect()
}

/// The types of real numbers.
fn real_types() -> Vec<Type> {
    let is_real = |ty: &Type| Format::of(*ty).is_some();
    Type::ALL.iter().copied().filter(is_real).collect()
}

/// A row as the activations of a product with `weight`: rounded to the type they are converted to.
fn as_activation(weight: Type, row: &[f32]) -> Vec<f32> {
    let kernel = MatmulKernel::of(weight).unwrap();
    let format = Format::of(kernel.activation).unwrap();
    let mut bytes = vec![0; format.row_bytes(row.len())];
    let mut values = vec![0.0; row.len()];
    // SAFETY: all hold a row.
    unsafe {
        (kernel.quantize_activation)(row.as_ptr(), bytes.as_mut_ptr(), row.len());
        (format.dequantize_row)(bytes.as_ptr(), values.as_mut_ptr(), row.len());
    }
    values
}

/// The dot product, and a bound of what rounding may make of it.
fn dot(weight: Type, a: &[f32], b: &[f32]) -> (f64, f64) {
    // Q8_1 carries the sums of its blocks as halves.
    let activation = MatmulKernel::of(weight).unwrap().activation;
    let relative = if activation == Type::Q8_1 { 2e-3 } else { 1e-5 };
    let products = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
    let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
    (sum, relative * size + 1e-30)
}

fn mul_mat_op() -> Op {
    Op::MulMat {
        accumulator: Precision::Default,
        activation: Precision::Default,
        hadamard: false,
    }
}

fn check_mul_mat(seed: u64, weight: Type, x: Type, k: u64, m: u64, n: u64, batch: [u64; 4]) {
    let random = &mut Random(seed | 1);
    let [w2, w3, r2, r3] = batch;
    let w = Operand::random(weight, [k, m, w2, w3], false, random);
    let w = w.fill(|| random.float());
    // Converted in place if by chance they have the activation's type and dense rows.
    let any_row = random.below(2) == 0;
    let x = Operand::random(x, [k, n, w2 * r2, w3 * r3], any_row, random);
    let x = x.fill(|| random.float());
    let dst = Operand::random(Type::F32, [m, n, w2 * r2, w3 * r3], false, random);
    let results = run(1, mul_mat_op(), &dst, &[Some(&w), Some(&x)]);
    for row in results.rows() {
        let [_, i2, i3] = row;
        let activation = as_activation(weight, &x.row(row));
        for (i, &got) in results.row(row).iter().enumerate() {
            let (exact, bound) = dot(weight, &w.row([i as u64, i2 / r2, i3 / r3]), &activation);
            let error = (f64::from(got) - exact).abs();
            assert!(
                error <= bound,
                "{i} {row:?}: {got}, should be {exact} within {bound}"
            );
        }
    }
    let again = run(3, mul_mat_op(), &dst, &[Some(&w), Some(&x)]);
    assert!(
        again.memory == results.memory,
        "three threads give other results than one"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn mul_mat_of_any_types_strides_and_batches(
        seed in any::<u64>(),
        weight in prop::sample::select(weight_types()),
        x in prop::sample::select(real_types()),
        blocks in 0u64..4,
        (m, n) in (0u64..70, 0u64..40),
        batch in [0u64..3, 1u64..3, 1u64..4, 1u64..3],
    ) {
        let unit = weight.block_elements().max(x.block_elements());
        let k = if unit > 1 { blocks * unit } else { blocks * 37 };
        check_mul_mat(seed, weight, x, k, m, n, batch);
    }
}

#[test]
fn mul_mat_of_many_tiles() {
    for (weight, k, m, n) in [
        (Type::F32, 4100, 150, 70),
        (Type::F16, 2500, 300, 1),
        (Type::Q4K, 4096, 70, 200),
        (Type::Q8_0, 8192, 1, 130),
    ] {
        check_mul_mat(7, weight, Type::F32, k, m, n, [1, 1, 1, 1]);
    }
}

#[test]
fn mul_mat_whose_result_overlaps_its_sources_stays_in_memory() {
    // Only that nothing else is touched can be asked: `run` checks it. Here the destination *is* the
    // weights, so that every thread would change what the others read.
    let random = &mut Random(5);
    let engine = CpuEngine::new(2, None).unwrap();
    let memory = engine.alloc(1 << 16).unwrap();
    let bytes: Vec<u8> = (0..1 << 14)
        .flat_map(|_| random.float().to_le_bytes())
        .collect();
    memory.write(0, bytes.as_slice().into()).unwrap();
    let square = Shape::contiguous(Type::F32, [64, 64, 1, 1]).unwrap();
    let at = |offset| Tensor {
        shape: square,
        buffer: 0,
        offset,
    };
    let graph = Graph {
        buffers: vec![BufferId(1)],
        tensors: vec![at(0), at(1 << 14), at(256)],
        nodes: vec![Node {
            op: mul_mat_op(),
            dst: 2,
            src: Sources::new([Some(0), Some(1)]),
        }],
    };
    let graph = validate(graph, engine.capabilities(), &Limits::default(), |_| {
        Some(1 << 16)
    });
    let mut plan = engine
        .compile(&graph.unwrap(), &[Arc::clone(&memory)])
        .unwrap();
    plan.run().unwrap();
    let mut after = vec![0; 1 << 16];
    memory.read(0, after.as_mut_slice().into()).unwrap();
    let float = |bytes: &[u8], i: usize| {
        f64::from(f32::from_le_bytes(
            bytes[4 * i..4 * i + 4].try_into().unwrap(),
        ))
    };
    assert_eq!(after[..256], bytes[..256]);
    assert_eq!(after[256 + (1 << 14)..], bytes[256 + (1 << 14)..]);
    for i in 0..64 {
        for j in 0..64 {
            let product = |k| float(&bytes, 64 * i + k) * float(&bytes, 4096 + 64 * j + k);
            let exact: f64 = (0..64).map(product).sum();
            assert!((float(&after, 64 + 64 * j + i) - exact).abs() < 1e-3);
        }
    }
}

#[test]
fn mul_mat_with_a_hadamard_matrix() {
    let random = &mut Random(3);
    for (k, ty) in [
        (1, Type::F32),
        (2, Type::F16),
        (32, Type::F32),
        (256, Type::F16),
    ] {
        let scale = 1.0 / (k as f32).sqrt();
        let (mut i, mut j) = (0u64, 0u64);
        let w = Operand::dense(Type::F32, [k, k, 1, 1]).fill(|| {
            let sign = if (i & j).count_ones() % 2 == 0 {
                1.0
            } else {
                -1.0
            };
            i += 1;
            if i == k {
                (i, j) = (0, j + 1);
            }
            sign * scale
        });
        let x = Operand::random(ty, [k, 5, 2, 3], true, random).fill(|| random.float());
        let dst = Operand::random(Type::F32, [k, 5, 2, 3], false, random);
        let op = Op::MulMat {
            accumulator: Precision::Default,
            activation: Precision::Default,
            hadamard: true,
        };
        let results = run(2, op, &dst, &[Some(&w), Some(&x)]);
        for row in results.rows() {
            let x = x.row(row);
            for (i, &got) in results.row(row).iter().enumerate() {
                let (exact, bound) = dot(Type::F32, &w.row([i as u64, 0, 0]), &x);
                assert!(
                    (f64::from(got) - exact).abs() <= bound,
                    "{k} {i} {got} {exact}"
                );
            }
        }
    }
}

fn mul_mat_id_op() -> Op {
    Op::MulMatId {
        accumulator: Precision::Default,
        activation: Precision::Default,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn mul_mat_id_of_any_types_and_choices(
        seed in any::<u64>(),
        weight in prop::sample::select(weight_types()),
        x in prop::sample::select(real_types()),
        blocks in 0u64..4,
        m in 0u64..70,
        (experts, used, tokens) in (1u64..7, 1u64..5, 0u64..30),
        broadcast in any::<bool>(),
    ) {
        let random = &mut Random(seed | 1);
        let unit = weight.block_elements().max(x.block_elements());
        let k = if unit > 1 { blocks * unit } else { blocks * 37 };
        let w = Operand::random(weight, [k, m, experts, 1], false, random);
        let w = w.fill(|| random.float());
        let columns = if broadcast { 1 } else { used };
        let any_row = random.below(2) == 0;
        let x = Operand::random(x, [k, columns, tokens, 1], any_row, random);
        let x = x.fill(|| random.float());
        let ids = Operand::random(Type::I32, [used, tokens, 1, 1], true, random);
        let ids = ids.integers(|| random.below(experts) as i32);
        let dst = Operand::random(Type::F32, [m, used, tokens, 1], false, random);
        let src = [Some(&w), Some(&x), Some(&ids)];
        let results = run(2, mul_mat_id_op(), &dst, &src);
        for row in results.rows() {
            let [slot, token, _] = row;
            let expert = ids.integer([token, 0, 0], slot) as u64;
            let activation = as_activation(weight, &x.row([slot % columns, token, 0]));
            for (i, &got) in results.row(row).iter().enumerate() {
                let (exact, bound) = dot(weight, &w.row([i as u64, expert, 0]), &activation);
                let error = (f64::from(got) - exact).abs();
                prop_assert!(error <= bound, "{i} {row:?}: {got}, should be {exact}");
            }
        }
        let again = run(1, mul_mat_id_op(), &dst, &src);
        prop_assert!(again.memory == results.memory);
    }

    #[test]
    fn out_prod_of_any_types_strides_and_batches(
        seed in any::<u64>(),
        a in prop::sample::select(real_types()),
        b in prop::sample::select(vec![Type::F32, Type::F16, Type::Bf16]),
        blocks in 0u64..4,
        (n, k) in (0u64..40, 0u64..140),
        [a2, a3, r2, r3] in [0u64..3, 1u64..3, 1u64..4, 1u64..3],
    ) {
        let random = &mut Random(seed | 1);
        let m = blocks * if a.is_quantized() { a.block_elements() } else { 237 };
        let a = Operand::random(a, [m, k, a2, a3], true, random).fill(|| random.float());
        let b = Operand::random(b, [n, k, a2 * r2, a3 * r3], true, random);
        let b = b.fill(|| random.float());
        let dst = Operand::random(Type::F32, [m, n, a2 * r2, a3 * r3], false, random);
        let results = run(2, Op::OutProd {}, &dst, &[Some(&a), Some(&b)]);
        for row in results.rows() {
            let [j, i2, i3] = row;
            let mut sums = vec![(0.0, 1e-30); m as usize];
            for t in 0..k {
                let weight = f64::from(b.row([t, i2, i3])[j as usize]);
                for (sum, &v) in sums.iter_mut().zip(&a.row([t, i2 / r2, i3 / r3])) {
                    sum.0 += f64::from(v) * weight;
                    sum.1 += (f64::from(v) * weight).abs() * 1e-5;
                }
            }
            for (&got, (exact, bound)) in results.row(row).iter().zip(sums) {
                let error = (f64::from(got) - exact).abs();
                prop_assert!(error <= bound, "{row:?}: {got}, should be {exact}");
            }
        }
    }
}

#[test]
fn mul_mat_id_refuses_an_expert_that_does_not_exist() {
    let w = Operand::dense(Type::F32, [8, 4, 3, 1]).fill(|| 1.0);
    let x = Operand::dense(Type::F32, [8, 1, 2, 1]).fill(|| 1.0);
    let dst = Operand::dense(Type::F32, [4, 2, 2, 1]);
    for bad in [-1, 3, i32::MIN, i32::MAX] {
        let mut next = [0, 1, bad, 2].into_iter();
        let ids = Operand::dense(Type::I32, [2, 2, 1, 1]).integers(|| next.next().unwrap());
        let src = [Some(&w), Some(&x), Some(&ids)];
        match try_run(2, mul_mat_id_op(), &dst, &src) {
            Err(RunError::Index {
                node: 0,
                op: "MUL_MAT_ID",
                index,
                count: 3,
            }) => {
                assert_eq!(index, i64::from(bad));
            }
            other => panic!("{:?}", other.map(|_| "it ran")),
        }
    }
}

/// The parameters of a ROPE that have no part in its shape rules.
fn rope_op(mode: RopeMode, backward: bool, n_dims: u32, n_offs: u32, yarn: bool) -> Op {
    let part = n_dims as i32;
    Op::Rope {
        mode,
        backward,
        n_dims,
        n_offs,
        n_ctx_orig: if yarn { 512 } else { 0 },
        freq_base: 10000.0,
        freq_scale: if yarn { 0.7 } else { 1.0 },
        ext_factor: if yarn { 0.6 } else { 0.0 },
        attn_factor: if yarn { 1.3 } else { 1.0 },
        beta_fast: 32.0,
        beta_slow: 1.0,
        sections: [part / 3, part / 4, part / 5, 1].map(|section| section.max(1)),
    }
}

/// One row of ROPE as the papers have it: each pair is a complex number, multiplied by another.
fn rotated(op: &Op, row: &[f32], positions: &[f64], factors: Option<&[f32]>) -> Vec<f64> {
    let &Op::Rope {
        mode,
        backward,
        n_dims,
        n_offs,
        n_ctx_orig,
        freq_base,
        freq_scale,
        ext_factor,
        attn_factor,
        beta_fast,
        beta_slow,
        sections,
    } = op
    else {
        panic!("not a ROPE")
    };
    let (n, base) = (f64::from(n_dims), f64::from(freq_base));
    let (scale, ext) = (f64::from(freq_scale), f64::from(ext_factor));
    let (start, n_dims) = (n_offs as usize, n_dims as usize);
    let pair_of = |rotations: f32| {
        let turns = f64::from(n_ctx_orig) / (f64::from(rotations) * std::f64::consts::TAU);
        n * turns.ln() / (2.0 * base.ln())
    };
    let low = pair_of(beta_fast).floor().max(0.0);
    let high = pair_of(beta_slow).ceil().min(n - 1.0);
    let mut out: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
    let pairs = if mode == RopeMode::Vision {
        n_dims
    } else {
        n_dims / 2
    };
    for i in 0..pairs {
        // Which axis, and how often the frequency has been lowered by then.
        let ends: Vec<usize> = sections
            .iter()
            .scan(0, |end, &s| {
                *end += s as usize;
                Some(*end)
            })
            .collect();
        let sector = i % ends[3].max(1);
        let section = ends.iter().position(|&end| sector < end).unwrap_or(3);
        let (axis, exponent) = match mode {
            RopeMode::Normal | RopeMode::Neox => (0, i),
            RopeMode::Mrope => (section, i),
            RopeMode::Imrope => {
                let axis = [0, 1, 2][sector % 3];
                let inside = sector < 3 * sections[axis] as usize;
                (if inside { axis } else { 3 }, i)
            }
            RopeMode::Vision => (
                section,
                sector - (ends[section] - sections[section] as usize),
            ),
        };
        let factor = factors.map_or(1.0, |f| f64::from(f[i]));
        let theta = positions[axis] * base.powf(-2.0 * exponent as f64 / n) / factor;
        let (mut angle, mut length) = (scale * theta, f64::from(attn_factor));
        if ext != 0.0 {
            let along = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            let mix = (1.0 - along) * ext;
            angle = scale * theta * (1.0 - mix) + theta * mix;
            length *= 1.0 + 0.1 * (1.0 / scale).ln();
        }
        if backward {
            angle = -angle;
        }
        let (a, b) = match mode {
            RopeMode::Normal => (start + 2 * i, start + 2 * i + 1),
            RopeMode::Vision => (i, i + n_dims),
            _ => (start + i, start + i + n_dims / 2),
        };
        let (x, y) = (out[a], out[b]);
        out[a] = length * (x * angle.cos() - y * angle.sin());
        out[b] = length * (x * angle.sin() + y * angle.cos());
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn rope_of_any_mode_type_and_stride(
        seed in any::<u64>(),
        ty in prop::sample::select(vec![Type::F32, Type::F16, Type::Bf16]),
        mode in prop::sample::select(RopeMode::ALL.to_vec()),
        (backward, yarn, with_factors) in any::<(bool, bool, bool)>(),
        (half, before, after) in (3u64..40, 0u64..4, 0u64..4),
        (heads, tokens, batch) in (0u64..6, 0u64..7, 0u64..3),
    ) {
        let random = &mut Random(seed | 1);
        let vision = mode == RopeMode::Vision;
        let (before, after) = if vision { (0, 0) } else { (2 * before, 2 * after) };
        let n_dims = if vision { half } else { 2 * half };
        prop_assume!(n_dims % 2 == 0);
        let ne = [2 * half + before + after, heads, tokens, batch];
        let axes = if matches!(mode, RopeMode::Normal | RopeMode::Neox) { 1 } else { 4 };
        let op = rope_op(mode, backward, n_dims as u32, before as u32, yarn);
        let x = Operand::random(ty, ne, true, random).fill(|| random.float());
        let positions = Operand::dense(Type::I32, [tokens * axes, 1, 1, 1]);
        let positions = positions.integers(|| random.below(600) as i32);
        let factors = Operand::dense(Type::F32, [n_dims, 1, 1, 1]);
        let factors = factors.fill(|| 1.0 + 0.1 * random.float());
        let factors = with_factors.then_some(&factors);
        let dst = Operand::random(ty, ne, true, random);
        let results = run(2, op, &dst, &[Some(&x), Some(&positions), factors]);
        let factors = factors.map(|f| f.row([0; 3]));
        for row in results.rows() {
            let at = |axis| f64::from(positions.integer([0; 3], axis * tokens + row[1]));
            let at: Vec<f64> = (0..axes).map(at).collect();
            let exact = rotated(&op, &x.row(row), &at, factors.as_deref());
            // Frequencies are multiplied up in f32: the error of an angle grows with the position.
            let tolerance = match ty {
                Type::F32 => 1e-3,
                Type::F16 => 3e-3,
                _ => 3e-2,
            };
            for (i, (&got, exact)) in results.row(row).iter().zip(exact).enumerate() {
                let error = (f64::from(got) - exact).abs();
                prop_assert!(error <= tolerance, "{row:?} {i}: {got}, should be {exact}");
            }
        }
    }
}

#[test]
fn rope_in_place_and_backward_gives_the_input_back() {
    let random = &mut Random(9);
    let x = Operand::dense(Type::F32, [64, 3, 5, 2]).fill(|| random.float());
    let positions = Operand::dense(Type::I32, [5, 1, 1, 1]).integers(|| random.below(100) as i32);
    let turned = run(
        2,
        rope_op(RopeMode::Neox, false, 64, 0, false),
        &x,
        &[Some(&x), Some(&positions)],
    );
    let back = run(
        2,
        rope_op(RopeMode::Neox, true, 64, 0, false),
        &x,
        &[Some(&turned), Some(&positions)],
    );
    for row in x.rows() {
        assert_ne!(turned.row(row), x.row(row));
        for (a, b) in x.row(row).iter().zip(back.row(row)) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }
}

/// The slope of a head, from the paper's recipe.
fn slope(max_bias: f64, heads: u64, head: u64) -> f64 {
    if max_bias == 0.0 {
        return 1.0;
    }
    let power = 1 << heads.ilog2();
    if head < power {
        2f64.powf(-max_bias * (head + 1) as f64 / power as f64)
    } else {
        2f64.powf(-max_bias / 2.0 * (2 * (head - power) + 1) as f64 / power as f64)
    }
}

/// A mask's element: nothing, minus infinity, or a bias.
fn mask_value(random: &mut Random) -> f32 {
    match random.below(4) {
        0 => f32::NEG_INFINITY,
        1 => 0.0,
        _ => random.float(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn soft_max_with_masks_biases_and_sinks(
        seed in any::<u64>(),
        n in prop_oneof![1u64..40, 500u64..1100],
        (rows, heads, batch) in (0u64..5, 0u64..7, 0u64..3),
        mask_type in prop::sample::select(vec![None, Some(Type::F32), Some(Type::F16)]),
        (biased, with_sinks, extra) in (any::<bool>(), any::<bool>(), 0u64..3),
        scale in prop::sample::select(vec![1.0f32, 0.1, 5.0]),
    ) {
        let random = &mut Random(seed | 1);
        let ne = [n, rows, heads, batch];
        let x = Operand::random(Type::F32, ne, false, random).fill(|| 4.0 * random.float());
        let mask = mask_type.map(|ty| {
            let divisor = |n: u64, random: &mut Random| if random.below(2) == 0 { n.max(1) } else { 1 };
            let repeats = [divisor(heads, random), divisor(batch, random)];
            let ne = [n, rows + extra, repeats[0], repeats[1]];
            Operand::random(ty, ne, false, random).fill(|| mask_value(random))
        });
        let sinks = Operand::dense(Type::F32, [heads, 1, 1, 1]).fill(|| random.float());
        let sinks = with_sinks.then_some(&sinks);
        let max_bias = if biased && mask.is_some() { 8.0 } else { 0.0 };
        let op = Op::SoftMax { scale, max_bias };
        let dst = Operand::random(Type::F32, ne, false, random);
        let results = run(2, op, &dst, &[Some(&x), mask.as_ref(), sinks]);
        for row in results.rows() {
            let [i1, head, i3] = row;
            let bias = mask.as_ref().map_or(vec![0.0; n as usize], |mask| {
                mask.row([i1, head % mask.shape.ne[2], i3 % mask.shape.ne[3]])
            });
            let slope = slope(f64::from(max_bias), heads, head);
            let logits: Vec<f64> = x
                .row(row)
                .iter()
                .zip(bias)
                .map(|(&x, bias)| f64::from(x * scale) + slope * f64::from(bias))
                .collect();
            let sink = sinks.map(|s| f64::from(s.row([0; 3])[head as usize]));
            let largest = logits.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let exp = |x: f64| (x - largest).exp();
            let sum: f64 = logits.iter().copied().chain(sink).map(exp).sum();
            for (i, (&got, x)) in results.row(row).iter().zip(logits).enumerate() {
                let exact = exp(x) / sum;
                // Nothing is left of a row that is masked altogether.
                let same = (f64::from(got) - exact).abs() < 2e-5 || got.is_nan() && exact.is_nan();
                prop_assert!(same, "{row:?} {i}: {got}, should be {exact}");
            }
        }
    }
}

#[test]
fn soft_max_in_place_and_of_special_values() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let rows = [
        [1.0, 2.0, 3.0, -inf, 0.5],
        [-inf; 5],
        [nan, 1.0, 2.0, 3.0, 4.0],
        [inf, 1.0, 2.0, 3.0, 4.0],
        [-inf, -inf, 7.0, -inf, -inf],
    ];
    let mut next = rows.iter().flatten().copied();
    let x = Operand::dense(Type::F32, [5, 5, 1, 1]).fill(|| next.next().unwrap());
    let op = Op::SoftMax {
        scale: 1.0,
        max_bias: 0.0,
    };
    // `run` copies the source; one tensor as both is made by hand.
    let results = run(1, op, &x, &[Some(&x)]);
    assert!(results.row([1, 0, 0]).iter().all(|v| v.is_nan()));
    assert!(results.row([2, 0, 0]).iter().all(|v| v.is_nan()));
    assert!(results.row([3, 0, 0]).iter().all(|v| v.is_nan()));
    assert_eq!(results.row([4, 0, 0]), [0.0, 0.0, 1.0, 0.0, 0.0]);
    assert_eq!(results.row([0, 0, 0])[3], 0.0);

    let engine = CpuEngine::new(2, None).unwrap();
    let memory = engine.alloc(x.memory.len() as u64).unwrap();
    memory.write(0, x.memory.as_slice().into()).unwrap();
    let graph = Graph {
        buffers: vec![BufferId(1)],
        tensors: vec![Tensor {
            shape: x.shape,
            buffer: 0,
            offset: x.offset,
        }],
        nodes: vec![Node {
            op,
            dst: 0,
            src: Sources::new([Some(0)]),
        }],
    };
    let size = x.memory.len() as u64;
    let graph = validate(graph, engine.capabilities(), &Limits::default(), |_| {
        Some(size)
    })
    .unwrap();
    engine
        .compile(&graph, &[Arc::clone(&memory)])
        .unwrap()
        .run()
        .unwrap();
    let mut after = vec![0; x.memory.len()];
    memory.read(0, after.as_mut_slice().into()).unwrap();
    assert!(after == results.memory, "in place is not the same");
}

/// Attention for one query: the values weighted by the soft-max of the scores.
struct Query<'a> {
    q: &'a Operand,
    k: &'a Operand,
    v: &'a Operand,
    mask: Option<&'a Operand>,
    sinks: Option<&'a Operand>,
    scale: f64,
    max_bias: f64,
    cap: f64,
}

impl Query<'_> {
    fn attend(&self, token: u64, head: u64, sequence: u64) -> Vec<f64> {
        let Query {
            q,
            k,
            v,
            mask,
            sinks,
            ..
        } = *self;
        let [_, _, heads, sequences] = q.shape.ne;
        let shared = |x: &Operand| {
            let [_, _, n2, n3] = x.shape.ne;
            [head / (heads / n2), sequence / (sequences / n3)]
        };
        let ([k2, k3], [v2, v3]) = (shared(k), shared(v));
        let query = as_activation(k.shape.ty, &q.row([token, head, sequence]));
        let bias = mask.map(|mask| {
            let [_, _, n2, n3] = mask.shape.ne;
            mask.row([token, head % n2, sequence % n3])
        });
        let slope = slope(self.max_bias, heads, head);
        let scores: Vec<f64> = (0..k.shape.ne[1])
            .map(|i| {
                let (dot, _) = dot(k.shape.ty, &k.row([i, k2, k3]), &query);
                let score = if self.cap == 0.0 {
                    dot * self.scale
                } else {
                    self.cap * (dot * self.scale / self.cap).tanh()
                };
                match bias.as_ref().map(|bias| f64::from(bias[i as usize])) {
                    None => score,
                    Some(f64::NEG_INFINITY) => f64::NEG_INFINITY,
                    Some(bias) => score + slope * bias,
                }
            })
            .collect();
        let sink = sinks.map(|sinks| f64::from(sinks.row([0; 3])[head as usize]));
        let largest = scores
            .iter()
            .copied()
            .chain(sink)
            .fold(f64::NEG_INFINITY, f64::max);
        let mut out = vec![0.0; v.shape.ne[0] as usize];
        if largest == f64::NEG_INFINITY {
            return out;
        }
        let exp = |score: f64| (score - largest).exp();
        let sum: f64 = scores.iter().copied().chain(sink).map(exp).sum();
        for (i, score) in scores.into_iter().enumerate() {
            for (out, value) in out.iter_mut().zip(v.row([i as u64, v2, v3])) {
                *out += exp(score) / sum * f64::from(value);
            }
        }
        out
    }
}

fn flash_attn_op(scale: f32, max_bias: f32, logit_softcap: f32) -> Op {
    Op::FlashAttnExt {
        scale,
        max_bias,
        logit_softcap,
        accumulator: Precision::Default,
        n_kv_max: 0,
    }
}

/// What is drawn for a case of attention.
#[derive(Debug, Clone)]
struct AttentionCase {
    seed: u64,
    types: (Type, Type),
    sizes: (u64, u64),
    keys: u64,
    tokens: u64,
    /// Heads and sequences of keys, of values, and how often those of queries.
    heads: [u64; 3],
    sequences: [u64; 3],
    /// Whether to mask, and how many masks over heads: one, or one each.
    mask: Option<bool>,
    sinks: bool,
    max_bias: f32,
    cap: f32,
}

fn check_attention(case: &AttentionCase) {
    let random = &mut Random(case.seed | 1);
    let (k_type, v_type) = case.types;
    let whole = |n: u64, ty: Type| {
        if ty.is_quantized() {
            n.next_multiple_of(ty.block_elements())
        } else {
            n
        }
    };
    let (dk, dv) = (whole(case.sizes.0, k_type), whole(case.sizes.1, v_type));
    let product = |[k, v, q]: [u64; 3]| k * v * q;
    let (heads, sequences) = (product(case.heads), product(case.sequences));
    let kv = |ty, n, i: usize, random: &mut Random| {
        let ne = [n, case.keys, case.heads[i], case.sequences[i]];
        Operand::random(ty, ne, false, random).fill(|| random.float())
    };
    let k = kv(k_type, dk, 0, random);
    let v = kv(v_type, dv, 1, random);
    let q = Operand::random(
        Type::F32,
        [dk, case.tokens, heads, sequences],
        false,
        random,
    );
    let q = q.fill(|| 3.0 * random.float());
    let mask = case.mask.map(|each| {
        let ne = [
            case.keys + 2,
            case.tokens + 1,
            if each { heads } else { 1 },
            1,
        ];
        // Long runs that nobody sees, and single keys.
        let mut hidden = 0;
        Operand::random(Type::F16, ne, false, random).fill(|| {
            if hidden == 0 && random.below(40) == 0 {
                hidden = random.below(200);
            }
            if hidden > 0 {
                hidden -= 1;
                return f32::NEG_INFINITY;
            }
            mask_value(random)
        })
    });
    let sinks = Operand::dense(Type::F32, [heads, 1, 1, 1]).fill(|| 3.0 * random.float());
    let sinks = case.sinks.then_some(&sinks);
    let scale = 1.0 / (dk as f32).sqrt();
    let max_bias = if mask.is_some() { case.max_bias } else { 0.0 };
    let op = flash_attn_op(scale, max_bias, case.cap);
    let dst = Operand::dense(Type::F32, [dv, heads, case.tokens, sequences]);
    let src = [Some(&q), Some(&k), Some(&v), mask.as_ref(), sinks];
    let results = run(2, op, &dst, &src);
    let query = Query {
        q: &q,
        k: &k,
        v: &v,
        mask: mask.as_ref(),
        sinks,
        scale: f64::from(scale),
        max_bias: f64::from(max_bias),
        cap: f64::from(case.cap),
    };
    // Q8_1 carries the sums of its blocks as halves.
    let coarse = MatmulKernel::of(k_type).unwrap().activation == Type::Q8_1;
    for row in results.rows() {
        let [head, token, sequence] = row;
        let exact = query.attend(token, head, sequence);
        let size = exact.iter().fold(1.0, |size: f64, x| size.max(x.abs()));
        let tolerance = size * if coarse { 1e-2 } else { 1e-4 };
        for (i, (&got, exact)) in results.row(row).iter().zip(exact).enumerate() {
            let error = (f64::from(got) - exact).abs();
            assert!(
                error <= tolerance,
                "{row:?} {i}: {got}, should be {exact}; {case:?}"
            );
        }
    }
    let again = run(1, op, &dst, &src);
    assert!(
        again.memory == results.memory,
        "one thread gives other results than two"
    );
}

prop_compose! {
    fn attention_case()(
        seed in any::<u64>(),
        types in (prop::sample::select(weight_types()), prop::sample::select(real_types())),
        sizes in (1u64..150, 1u64..150),
        keys in prop_oneof![0u64..70, 60u64..700],
        tokens in prop_oneof![Just(1u64), 1u64..20],
        heads in [1u64..3, 1u64..3, 1u64..4],
        sequences in [1u64..2, 1u64..2, 1u64..3],
        mask in any::<Option<bool>>(),
        sinks in any::<bool>(),
        max_bias in prop::sample::select(vec![0.0f32, 8.0]),
        cap in prop::sample::select(vec![0.0f32, 5.0]),
    ) -> AttentionCase {
        AttentionCase { seed, types, sizes, keys, tokens, heads, sequences, mask, sinks, max_bias, cap }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn attention_of_any_types_shapes_and_options(case in attention_case()) {
        check_attention(&case);
    }
}

#[test]
fn attention_of_many_tokens_and_of_long_contexts() {
    for (types, sizes, keys, tokens) in [
        ((Type::F16, Type::F16), (128, 128), 300, 70),
        ((Type::F16, Type::F16), (64, 64), 3000, 1),
        ((Type::Q8_0, Type::Q4_0), (64, 96), 1500, 3),
        ((Type::F32, Type::F32), (40, 72), 200, 65),
    ] {
        check_attention(&AttentionCase {
            seed: 11,
            types,
            sizes,
            keys,
            tokens,
            heads: [2, 1, 3],
            sequences: [1, 1, 1],
            mask: Some(false),
            sinks: true,
            max_bias: 0.0,
            cap: 0.0,
        });
    }
}

#[test]
fn attention_does_not_look_at_what_is_hidden() {
    let random = &mut Random(21);
    let q = Operand::dense(Type::F32, [32, 2, 1, 1]).fill(|| random.float());
    for ty in [Type::F16, Type::F32] {
        // Every third key and value is not a number.
        let mut i = 0;
        let mut with_nan = || {
            i += 1;
            if (i - 1) / 32 % 3 == 0 {
                f32::NAN
            } else {
                random.float()
            }
        };
        let k = Operand::dense(ty, [32, 150, 1, 1]).fill(&mut with_nan);
        let v = Operand::dense(ty, [32, 150, 1, 1]).fill(&mut with_nan);
        let mut i = 0;
        let mask = Operand::dense(Type::F16, [150, 2, 1, 1]).fill(|| {
            i += 1;
            if (i - 1) % 150 % 3 == 0 {
                f32::NEG_INFINITY
            } else {
                0.0
            }
        });
        let dst = Operand::dense(Type::F32, [32, 1, 2, 1]);
        let op = flash_attn_op(1.0, 0.0, 0.0);
        let results = run(2, op, &dst, &[Some(&q), Some(&k), Some(&v), Some(&mask)]);
        for row in results.rows() {
            assert!(results.row(row).iter().all(|x| x.is_finite()));
        }
        // Without the mask it does.
        let results = run(2, op, &dst, &[Some(&q), Some(&k), Some(&v)]);
        assert!(results.row([0; 3]).iter().all(|x| x.is_nan()));
    }
}
