//! How fast an engine is: copies, products of each type, attention.

use std::time::{Duration, Instant};

use vgpu_transport::ir::{Op, Precision, Shape, Type};

use super::Options;
use super::cublas::Cublas;
use super::graph::{Builder, Fill, Loaded, Operand, Random};
use vgpu_cpu::gemm::MatmulKernel;
use vgpu_engine::roofline::Rates;
use vgpu_engine::{Engine, Memory};

/// What the device's memory can do at most, in bytes a second.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Ceilings {
    /// Copies within the device, bytes read and written.
    pub within: f64,
    /// From the host's memory.
    pub upload: f64,
    /// To the host's memory.
    pub download: f64,
}

/// What a rate counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Bytes of weights, keys and values, each read once.
    Bytes,
    /// Floating-point operations.
    Operations,
}

/// A rate, or why there is none.
#[derive(Debug, Clone)]
pub struct Rate {
    /// What was measured.
    pub name: String,
    /// What is counted.
    pub work: Work,
    /// Whether it is the engine's, and not what others reach on the same device.
    pub is_ours: bool,
    /// So many a second.
    pub rate: Result<f64, String>,
    /// Seconds that one takes.
    pub seconds: f64,
}

/// The median time of what `run` does, over at least three runs and about `time`.
pub(super) fn median(
    time: Duration,
    mut run: impl FnMut() -> Result<(), String>,
) -> Result<f64, String> {
    run()?; // the first one warms caches up
    let (begin, mut times) = (Instant::now(), Vec::new());
    while times.len() < 3 || begin.elapsed() < time {
        let start = Instant::now();
        run()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2].max(1e-9))
}

pub(super) fn ceilings(engine: &dyn Engine, options: &Options) -> Result<Ceilings, String> {
    let text = |error: vgpu_engine::EngineError| error.to_string();
    let size = options.weights;
    let (from, to) = (
        engine.alloc(size).map_err(text)?,
        engine.alloc(size).map_err(text)?,
    );
    let mut random = Random::new(7);
    let mut host: Vec<u8> = (0..size.min(64 << 20))
        .map(|_| random.below(256) as u8)
        .collect();
    let chunk = host.len() as u64;
    let upload = median(options.time, || {
        from.write(0, host.as_slice().into()).map_err(text)
    })?;
    for start in (chunk..size).step_by(chunk as usize) {
        let len = chunk.min(size - start);
        to.copy_from(start, &*from, 0, len).map_err(text)?;
    }
    // A copy returns when it was asked for: a byte that is read waits for it.
    let within = median(options.time, || {
        let mut last = [0];
        to.copy_from(0, &*from, 0, size).map_err(text)?;
        to.read(size - 1, last.as_mut_slice().into()).map_err(text)
    })?;
    let download = median(options.time, || {
        from.read(0, host.as_mut_slice().into()).map_err(text)
    })?;
    Ok(Ceilings {
        within: 2.0 * size as f64 / within,
        upload: chunk as f64 / upload,
        download: chunk as f64 / download,
    })
}

pub(super) fn peaks(engine: &dyn Engine, options: &Options) -> Result<Rates, String> {
    let mut peaks = Rates {
        memory: ceilings(engine, options)?.within,
        operations: 0.0,
    };
    for ty in [Type::F32, Type::F16, Type::Q8_0] {
        let square = [options.size; 2];
        let (bytes, seconds) = product(engine, options, ty, square, 1, Work::Bytes)?;
        peaks.memory = peaks.memory.max(bytes / seconds);
        let (operations, seconds) = product(engine, options, ty, square, 512, Work::Operations)?;
        peaks.operations = peaks.operations.max(operations / seconds);
    }
    Ok(peaks)
}

/// Types of weights, what matters most first.
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

/// What a rate is of.
enum Subject {
    Product(Type, u64, Work),
    Attention(Type, u64, u64),
    /// NVIDIA's own product with so many columns, on this GPU.
    Cublas(Type, u64, u32),
}

impl Subject {
    /// All of them, what matters most first.
    fn all(engine: &dyn Engine, options: &Options) -> Vec<Subject> {
        let has_kernel = |ty: &Type| MatmulKernel::of(*ty).is_some();
        let others = Type::ALL.iter().copied().filter(|ty| !POPULAR.contains(ty));
        let others: Vec<Type> = others.filter(has_kernel).collect();
        let products = |types: &[Type]| -> Vec<Subject> {
            let few = [1, 4, 8].map(|columns| (columns, Work::Bytes));
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
                format!("FLASH_ATTN_EXT {} {tokens} of {keys}", ty.ggml_name())
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

    /// The amount of work, and the seconds it takes.
    fn measure(
        &self,
        engine: &dyn Engine,
        options: &Options,
        cublas: &Result<Cublas, String>,
    ) -> Result<(f64, f64), String> {
        match *self {
            Subject::Product(ty, columns, work) => {
                product(engine, options, ty, [options.size; 2], columns, work)
            }
            Subject::Attention(ty, tokens, keys) => attention(engine, options, ty, tokens, keys),
            Subject::Cublas(ty, columns, ordinal) => {
                let library = cublas
                    .as_ref()
                    .map_err(|reason| format!("not there: {reason}"))?;
                let n = options.size;
                let seconds = library.seconds(ordinal, ty, n, columns, options.time)?;
                Ok((2.0 * (n * n * columns) as f64, seconds))
            }
        }
    }
}

/// Measures as much as there is time for; also says how many are left out.
pub(super) fn run(
    engine: &dyn Engine,
    options: &Options,
    mut seen: impl FnMut(&Rate),
) -> (Vec<Rate>, usize) {
    let cublas = Cublas::load();
    let subjects = Subject::all(engine, options);
    let (begin, mut all) = (Instant::now(), Vec::new());
    for (at, subject) in subjects.iter().enumerate() {
        if options
            .budget
            .is_some_and(|budget| begin.elapsed() > budget)
        {
            return (all, subjects.len() - at);
        }
        let measured = subject.measure(engine, options, &cublas);
        let rate = Rate {
            name: subject.name(),
            work: subject.work(),
            is_ours: !matches!(subject, Subject::Cublas(..)),
            seconds: measured.as_ref().map_or(0.0, |(_, seconds)| *seconds),
            rate: measured.map(|(amount, seconds)| amount / seconds),
        };
        seen(&rate);
        all.push(rate);
    }
    (all, 0)
}

/// Operations a second of a product with so many rows of weights and columns.
pub(super) fn operations(
    engine: &dyn Engine,
    options: &Options,
    ty: Type,
    rows: u64,
    columns: u64,
) -> Result<f64, String> {
    let extents = [options.size, rows];
    let (amount, seconds) = product(engine, options, ty, extents, columns, Work::Operations)?;
    Ok(amount / seconds)
}

/// Products with different weights of `n` by `rows`, so that none is in a cache: the amount of work of all, and the seconds
/// it takes.
fn product(
    engine: &dyn Engine,
    options: &Options,
    ty: Type,
    [n, rows]: [u64; 2],
    columns: u64,
    work: Work,
) -> Result<(f64, f64), String> {
    let mut random = Random::new(3);
    let mut builder = Builder::default();
    let numbers = |ty, ne| Operand {
        ty,
        ne,
        fill: Fill::Numbers(-1.0, 1.0),
    };
    let add = |builder: &mut Builder, random: &mut Random, operand| {
        let tensor = builder.tensor(operand, random);
        tensor.ok_or_else(|| "a tensor without a size".to_owned())
    };
    let x = add(
        &mut builder,
        &mut random,
        numbers(Type::F32, [n, columns, 1, 1]),
    )?;
    let dst = add(
        &mut builder,
        &mut random,
        numbers(Type::F32, [rows, columns, 1, 1]),
    )?;
    let first = add(&mut builder, &mut random, numbers(ty, [n, rows, 1, 1]))?;
    let (at, shape) = (
        builder.tensor_at(first).offset,
        builder.tensor_at(first).shape,
    );
    let bytes = shape.extent().ok_or("weights without a size")?;
    let step = bytes.next_multiple_of(256);
    // Arithmetic is the same with few weights.
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

/// Copies the first of `count` blocks of memory to the others.
fn repeat(memory: &dyn Memory, at: u64, bytes: u64, step: u64, count: u64) -> Result<(), String> {
    for i in 1..count {
        memory
            .copy_from(at + i * step, memory, at, bytes)
            .map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Attention of `tokens` to `keys`, as an 8B model has it: 32 heads of 128 over 8 of keys and values. For one token
/// bytes of the cache count, for many the operations.
fn attention(
    engine: &dyn Engine,
    options: &Options,
    ty: Type,
    tokens: u64,
    keys: u64,
) -> Result<(f64, f64), String> {
    let (size, heads, kv, mut random) = (128, 32, 8, Random::new(9));
    let mut builder = Builder::default();
    let mut add = |ty, ne, fill| {
        let tensor = builder.tensor(Operand { ty, ne, fill }, &mut random);
        tensor.ok_or_else(|| "a tensor without a size".to_owned())
    };
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
    let op = Op::FlashAttnExt {
        scale: 1.0 / (size as f32).sqrt(),
        max_bias: 0.0,
        logit_softcap: 0.0,
        accumulator: Precision::Default,
        n_kv_max: 0,
    };
    builder.node(op, dst, &[Some(q), Some(k), Some(v), Some(mask)]);
    let cache = Shape::contiguous(ty, [size, keys, kv, 1]).and_then(|shape| shape.extent());
    let amount = match tokens {
        1 => 2.0 * cache.ok_or("a cache without a size")? as f64,
        // Half of the pairs are hidden.
        _ => 4.0 * (size * heads) as f64 * (tokens * keys) as f64 / 2.0,
    };
    measure(builder.on(engine)?, options, amount)
}

fn measure(mut loaded: Loaded, options: &Options, amount: f64) -> Result<(f64, f64), String> {
    let seconds = median(options.time, || {
        loaded.plan.run().map_err(|error| error.to_string())
    })?;
    Ok((amount, seconds))
}
