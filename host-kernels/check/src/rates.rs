//! Rates of an engine: copies, matrix products of each type, attention.

use std::time::{Duration, Instant};

use vgpu_transport::ir::{Op, Precision, Shape, Tensor, Type};

use super::cublas::Cublas;
use super::graph::{Builder, Fill, LoadedGraph, Operand};
use super::random::Random;
use super::steps::{Selection, Step};
use super::{CheckError, Options};
use vgpu_cpu::gemm::MatmulKernel;
use vgpu_engine::roofline::Rates;
use vgpu_engine::{Engine, Memory};
use vgpu_median::median;

/// Rates of copies in bytes per second: upper bounds of the device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Ceilings {
    /// Copies within the device; bytes read and written both count.
    pub within: f64,
    /// From host to device.
    pub upload: f64,
    /// From device to host.
    pub download: f64,
}

/// The unit of work of a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Bytes of weights, K and V, each read once.
    Bytes,
    /// Floating-point operations.
    Operations,
}

/// A measured rate, or why the measurement failed.
#[derive(Debug, Clone)]
pub struct Rate {
    /// The operation and its lengths.
    pub name: String,
    /// The unit of `rate`.
    pub work: Work,
    /// True if the engine was measured, false if cuBLASLt was, on the same device.
    pub is_ours: bool,
    /// Work per second.
    pub rate: Result<f64, CheckError>,
    /// Seconds of one run.
    pub seconds: f64,
    /// The kernels that were measured, if they have names.
    pub kernels: Vec<&'static str>,
}

/// What a measurement has found.
struct Measured {
    /// The work of a run, in the unit of the subject.
    amount: f64,
    /// Seconds of one run.
    seconds: f64,
    kernels: Vec<&'static str>,
}

impl Measured {
    /// Work per second.
    fn rate(&self) -> f64 {
        self.amount / self.seconds
    }
}

/// The median time in seconds of `run`, over at least three runs and about `time`.
pub(super) fn median_time(
    time: Duration,
    mut run: impl FnMut() -> Result<(), CheckError>,
) -> Result<f64, CheckError> {
    run()?; // warm-up
    let (begin, mut times) = (Instant::now(), Vec::new());
    while times.len() < 3 || begin.elapsed() < time {
        let start = Instant::now();
        run()?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(median(times).max(1e-9))
}

pub(super) fn ceilings(engine: &dyn Engine, options: &Options) -> Result<Ceilings, CheckError> {
    let size = options.weights;
    let (from, to) = (engine.alloc(size)?, engine.alloc(size)?);
    let mut random = Random::new(7);
    let mut host: Vec<u8> = (0..size.min(64 << 20))
        .map(|_| random.below(256) as u8)
        .collect();
    let chunk = host.len() as u64;
    let upload = median_time(options.time, || Ok(from.write(0, host.as_slice().into())?))?;
    for start in (chunk..size).step_by(chunk as usize) {
        let len = chunk.min(size - start);
        to.copy_from(start, &*from, 0, len)?;
    }
    // A copy is asynchronous: reading a byte waits until the copy has ended.
    let within = median_time(options.time, || {
        let mut last = [0];
        to.copy_from(0, &*from, 0, size)?;
        to.read(size - 1, last.as_mut_slice().into())?;
        Ok(())
    })?;
    let download = median_time(options.time, || {
        Ok(from.read(0, host.as_mut_slice().into())?)
    })?;
    Ok(Ceilings {
        within: 2.0 * size as f64 / within,
        upload: chunk as f64 / upload,
        download: chunk as f64 / download,
    })
}

pub(super) fn peaks(engine: &dyn Engine, options: &Options) -> Result<Rates, CheckError> {
    let mut peaks = Rates {
        memory: ceilings(engine, options)?.within,
        operations: 0.0,
    };
    for ty in [Type::F32, Type::F16, Type::Q8_0] {
        let square = [options.size; 2];
        let bytes = product(engine, options, ty, square, 1, Work::Bytes)?;
        peaks.memory = peaks.memory.max(bytes.rate());
        let operations = product(engine, options, ty, square, 512, Work::Operations)?;
        peaks.operations = peaks.operations.max(operations.rate());
    }
    Ok(peaks)
}

/// Types of weights, the most important first.
pub(super) const POPULAR: [Type; 9] = [
    Type::Q4K,
    Type::Q6K,
    Type::Mxfp4,
    Type::Q8_0,
    Type::F16,
    Type::Bf16,
    Type::Q4_0,
    Type::Q5K,
    Type::Iq4Nl,
];

/// What a rate measures.
enum Subject {
    Product(Type, u64, Work),
    Attention(Type, u64, u64),
    /// The cuBLASLt product with this number of columns, on the GPU of this ordinal.
    Cublas(Type, u64, u32),
}

impl Subject {
    /// All subjects, the most important first.
    fn all(engine: &dyn Engine, options: &Options) -> Vec<Subject> {
        let has_kernel = |ty: &Type| MatmulKernel::of(*ty).is_some();
        let others = Type::ALL.iter().copied().filter(|ty| !POPULAR.contains(ty));
        let others: Vec<Type> = others.filter(has_kernel).collect();
        let products = |types: &[Type]| -> Vec<Subject> {
            let few = [1, 4, 8, 16, 64].map(|columns| (columns, Work::Bytes));
            let many = [128, 2048].map(|columns| (columns, Work::Operations));
            let columns = few.into_iter().chain(many);
            columns
                .flat_map(|(columns, work)| {
                    let of = move |&ty: &Type| Subject::Product(ty, columns, work);
                    types.iter().map(of).collect::<Vec<_>>()
                })
                .collect()
        };
        let mut all = Vec::new();
        if let Some(ordinal) = engine
            .name()
            .strip_prefix("cuda:")
            .and_then(|n| n.parse().ok())
        {
            for ty in [Type::F16, Type::Bf16] {
                all.extend([128, 2048].map(|columns| Subject::Cublas(ty, columns, ordinal)));
            }
        }
        all.extend(products(&POPULAR));
        let attention = |ty| {
            [(1, 4 * options.size), (options.size, options.size)]
                .map(|(tokens, keys)| Subject::Attention(ty, tokens, keys))
        };
        all.extend([Type::F16, Type::Q8_0].into_iter().flat_map(attention));
        all.extend(products(&others));
        all.extend([Type::Bf16, Type::F32].into_iter().flat_map(attention));
        all
    }

    fn name(&self) -> String {
        match self {
            Subject::Product(ty, columns, _) => format!("MUL_MAT {} x {columns}", ty.ggml_name()),
            Subject::Attention(ty, tokens, keys) => {
                let ty = ty.ggml_name();
                format!("FLASH_ATTN_EXT {ty}, {tokens} q, {keys} kv")
            }
            Subject::Cublas(ty, columns, _) => format!("cuBLASLt {} x {columns}", ty.ggml_name()),
        }
    }

    fn work(&self) -> Work {
        match self {
            Subject::Product(_, _, work) => *work,
            Subject::Attention(_, 1, _) => Work::Bytes,
            _ => Work::Operations,
        }
    }

    fn measure(
        &self,
        engine: &dyn Engine,
        options: &Options,
        cublas: &Result<Cublas, CheckError>,
    ) -> Result<Measured, CheckError> {
        match *self {
            Subject::Product(ty, columns, work) => {
                product(engine, options, ty, [options.size; 2], columns, work)
            }
            Subject::Attention(ty, tokens, keys) => attention(engine, options, ty, tokens, keys),
            Subject::Cublas(ty, columns, ordinal) => {
                let library = cublas.as_ref().map_err(Clone::clone)?;
                let n = options.size;
                let seconds = library.seconds(ordinal, ty, n, columns, options.time)?;
                Ok(Measured {
                    amount: 2.0 * (n * n * columns) as f64,
                    seconds,
                    kernels: Vec::new(),
                })
            }
        }
    }
}

/// Measures until the budget is spent. Returns the rates and the number of subjects left out.
pub(super) fn run(
    engine: &dyn Engine,
    options: &Options,
    selection: &Selection<'_>,
    mut seen: impl FnMut(Step<'_, Rate>),
) -> (Vec<Rate>, usize) {
    let cublas = Cublas::load();
    let subjects = Subject::all(engine, options);
    let (begin, mut all) = (Instant::now(), Vec::new());
    for (at, subject) in subjects.iter().enumerate() {
        let name = subject.name();
        if !selection.has(at, &name) {
            continue;
        }
        if options
            .budget
            .is_some_and(|budget| begin.elapsed() > budget)
        {
            let left = { subjects[at..].iter().enumerate() }
                .filter(|(i, subject)| selection.has(at + i, &subject.name()));
            return (all, left.count());
        }
        seen(Step::Begins {
            index: at,
            name: &name,
        });
        let measured = subject.measure(engine, options, &cublas);
        let rate = Rate {
            name,
            work: subject.work(),
            is_ours: !matches!(subject, Subject::Cublas(..)),
            seconds: measured.as_ref().map_or(0.0, |measured| measured.seconds),
            kernels: { measured.as_ref() }
                .map_or_else(|_| Vec::new(), |measured| measured.kernels.clone()),
            rate: measured.map(|measured| measured.rate()),
        };
        seen(Step::Ends(&rate));
        all.push(rate);
    }
    (all, 0)
}

/// Operations per second of a matrix product of `rows` rows of weights and `columns` columns.
pub(super) fn operations(
    engine: &dyn Engine,
    options: &Options,
    ty: Type,
    rows: u64,
    columns: u64,
) -> Result<f64, CheckError> {
    let lengths = [options.size, rows];
    Ok(product(engine, options, ty, lengths, columns, Work::Operations)?.rate())
}

/// Matrix products with different weights of `n` by `rows`, so that none is cached.
fn product(
    engine: &dyn Engine,
    options: &Options,
    ty: Type,
    [n, rows]: [u64; 2],
    columns: u64,
    work: Work,
) -> Result<Measured, CheckError> {
    let mut random = Random::new(3);
    let mut builder = Builder::default();
    let numbers = |ty, ne| Operand {
        ty,
        ne,
        fill: Fill::Numbers(-1.0, 1.0),
    };
    let x = builder.tensor(numbers(Type::F32, [n, columns, 1, 1]), &mut random)?;
    let dst = builder.tensor(numbers(Type::F32, [rows, columns, 1, 1]), &mut random)?;
    let first = builder.tensor(numbers(ty, [n, rows, 1, 1]), &mut random)?;
    let (at, shape) = (
        builder.tensor_at(first).offset,
        builder.tensor_at(first).shape,
    );
    let bytes = shape
        .byte_len()
        .ok_or(CheckError::TensorSize { ty, ne: shape.ne })?;
    let step = bytes.next_multiple_of(256);
    // The rate of operations does not need distinct weights.
    let most = match work {
        Work::Bytes => options.weights,
        Work::Operations => options.weights.min(2 * step),
    };
    let count = (most / step).max(1);
    for i in 0..count {
        let w = builder.place(shape, at + i * step);
        let op = Op::MulMat {
            accumulator: Precision::Default,
            activation: Precision::Default,
            hadamard: false,
        };
        builder.node(op, dst, &[Some(w), Some(x)]);
    }
    let loaded = builder.on_weights(engine, at + count * step, |memory| {
        repeat(memory, at, bytes, step, count)
    })?;
    let amount = match work {
        Work::Bytes => (bytes * count) as f64,
        Work::Operations => 2.0 * (n * rows * columns * count) as f64,
    };
    measure(loaded, options, amount)
}

/// Copies the first of `count` matrices to the others.
fn repeat(
    memory: &dyn Memory,
    at: u64,
    bytes: u64,
    step: u64,
    count: u64,
) -> Result<(), CheckError> {
    for i in 1..count {
        memory.copy_from(at + i * step, memory, at, bytes)?;
    }
    Ok(())
}

/// FLASH_ATTN_EXT with heads of `size` elements.
fn attention_op(size: u64) -> Op {
    Op::FlashAttnExt {
        scale: 1.0 / (size as f32).sqrt(),
        max_bias: 0.0,
        logit_softcap: 0.0,
        accumulator: Precision::Default,
        n_kv_max: 0,
    }
}

/// Attention of `tokens` queries to `keys` KV positions with the shape of an 8B model: 32 heads of
/// 128, 8 KV heads. The work is bytes of the KV cache for one token, operations for several.
fn attention(
    engine: &dyn Engine,
    options: &Options,
    ty: Type,
    tokens: u64,
    keys: u64,
) -> Result<Measured, CheckError> {
    let (size, heads, kv, mut random) = (128, 32, 8, Random::new(9));
    let mut builder = Builder::default();
    let mut add = |ty, ne, fill| builder.tensor(Operand { ty, ne, fill }, &mut random);
    let numbers = Fill::Numbers(-1.0, 1.0);
    let q = add(Type::F32, [size, tokens, heads, 1], numbers)?;
    let k = add(ty, [size, keys, kv, 1], numbers)?;
    let v = add(ty, [size, keys, kv, 1], numbers)?;
    let mask = add(
        Type::F16,
        [keys, tokens, 1, 1],
        Fill::Mask(keys as i64 - tokens as i64),
    )?;
    let dst = add(Type::F32, [size, heads, tokens, 1], numbers)?;
    builder.node(
        attention_op(size),
        dst,
        &[Some(q), Some(k), Some(v), Some(mask)],
    );
    let ne = [size, keys, kv, 1];
    let cache = Shape::contiguous(ty, ne).and_then(|shape| shape.byte_len());
    let amount = match tokens {
        1 => 2.0 * cache.ok_or(CheckError::TensorSize { ty, ne })? as f64,
        // The causal mask hides half of the pairs.
        _ => 4.0 * (size * heads) as f64 * (tokens * keys) as f64 / 2.0,
    };
    measure(builder.on(engine)?, options, amount)
}

/// The KV caches that a decoded token reads.
#[derive(Debug, Clone, Copy)]
pub struct KvCaches {
    /// The type of keys and of values.
    pub ty: Type,
    /// Elements of a head.
    pub head: u64,
    /// Query heads.
    pub heads: u64,
    /// KV heads, which divide the query heads.
    pub kv_heads: u64,
    /// KV positions.
    pub keys: u64,
    /// Layers, each with a cache of its own.
    pub layers: u64,
}

impl KvCaches {
    /// Bytes of all keys and values.
    pub fn bytes(&self) -> u64 {
        let row = self.ty.row_bytes(self.head * self.kv_heads);
        2 * self.layers * self.keys * row.unwrap_or(0)
    }
}

/// The bytes per second of the caches that the attention of one token reads. The caches lie as
/// llama.cpp places them: all KV heads of a position side by side.
pub(super) fn decode_attention(
    engine: &dyn Engine,
    options: &Options,
    caches: KvCaches,
) -> Result<f64, CheckError> {
    let KvCaches {
        ty,
        head,
        heads,
        kv_heads,
        keys,
        layers,
    } = caches;
    let (mut random, mut builder) = (Random::new(9), Builder::default());
    let numbers = Fill::Numbers(-1.0, 1.0);
    let cache = Operand {
        ty,
        ne: [head * kv_heads, keys, 1, 1],
        fill: numbers,
    };
    let content = builder.tensor(cache, &mut random)?;
    let Tensor { shape, offset, .. } = builder.tensor_at(content);
    let ne = [head, keys, kv_heads, 1];
    let (Some(row), Some(bytes)) = (ty.row_bytes(head), shape.byte_len()) else {
        return Err(CheckError::TensorSize { ty, ne });
    };
    let nb = [shape.nb[0], shape.nb[1], row, bytes];
    let mut add = |ty, ne, fill| builder.tensor(Operand { ty, ne, fill }, &mut random);
    let q = add(Type::F32, [head, 1, heads, 1], numbers)?;
    let mask = add(Type::F16, [keys, 1, 1, 1], Fill::Mask(keys as i64 - 1))?;
    let dst = add(Type::F32, [head, heads, 1, 1], numbers)?;
    let mut copies = Vec::new();
    for _ in 0..layers {
        let mut cache = || -> Result<Option<u32>, CheckError> {
            let at = builder.zeros(cache)?;
            let at = builder.tensor_at(at).offset;
            copies.push(at);
            Ok(Some(builder.place(Shape { ty, ne, nb }, at)))
        };
        let (k, v) = (cache()?, cache()?);
        builder.node(attention_op(head), dst, &[Some(q), k, v, Some(mask)]);
    }
    let loaded = builder.on(engine)?;
    for copy in copies {
        let memory = &*loaded.memory;
        memory.copy_from(copy, memory, offset, bytes)?;
    }
    Ok(measure(loaded, options, caches.bytes() as f64)?.rate())
}

fn measure(
    mut loaded: LoadedGraph,
    options: &Options,
    amount: f64,
) -> Result<Measured, CheckError> {
    let seconds = median_time(options.time, || Ok(loaded.plan.run()?))?;
    Ok(Measured {
        amount,
        seconds,
        kernels: loaded.plan.kernels(),
    })
}
