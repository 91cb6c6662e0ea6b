//! Matrix products, rotary positions, soft-max and attention of the CPU engine against slow, obvious
//! references in f64: random types, extents, strides and broadcasts, through the whole engine.

use std::sync::Arc;

use proptest::prelude::*;
use vgpu_kernels::cpu::CpuEngine;
use vgpu_kernels::cpu::formats::Format;
use vgpu_kernels::cpu::gemm::MatmulKernel;
use vgpu_kernels::{Engine, Memory, RunError};
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Precision, Shape, Sources, Tensor, Type, validate,
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
