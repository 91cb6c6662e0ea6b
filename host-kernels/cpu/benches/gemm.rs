//! Matrix products of one thread: decode (one column) in GB/s beside the read bandwidth, prefill
//! (many columns) in GFLOPS, and the same products through ggml-cpu, interleaved in the same run.
//!
//! `cargo bench -p vgpu-cpu --bench gemm -- [--level LEVEL] [--beside LEVEL] [--cols N,N,..]
//! [--k N] [--json] [TYPE ..]`
//!
//! `--beside`: another level of ours, interleaved with the first.
//!
//! ggml is taken from `$VGPU_GGML_BIN`, a folder with `libggml-base.so` and `libggml-cpu.so`;
//! without the variable only our side is measured. ggml is measured with the weights as they are in
//! the file and, where it has them for the type, in the layouts of `CPU_REPACK` and of AMX.

use std::hint::black_box;
use std::time::{Duration, Instant};

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};
use rustix::time::{ClockId, clock_gettime};

use vgpu_cpu::formats::{Format, Type};
use vgpu_cpu::gemm::{GemmArgs, Level, MatmulKernel};

use ggml::Layout;

mod ceiling;
mod ggml;

/// Weights of decode: more than any cache holds.
const DECODE_BYTES: usize = 160 << 20;
/// Elements of a row, as in an 8B model, if `--k` names no other number.
const LENGTH: usize = 4096;
/// Rows of prefill: a quarter of such a model's matrix.
const PREFILL_ROWS: usize = 1024;
const TYPES: [Type; 28] = [
    Type::F32,
    Type::F16,
    Type::Bf16,
    Type::Q8_0,
    Type::Q4_0,
    Type::Q4_1,
    Type::Q5_0,
    Type::Q5_1,
    Type::Iq4Nl,
    Type::Mxfp4,
    Type::Nvfp4,
    Type::Q1_0,
    Type::Q2_0,
    Type::Q2K,
    Type::Q3K,
    Type::Q4K,
    Type::Q5K,
    Type::Q6K,
    Type::Iq4Xs,
    Type::Iq1S,
    Type::Iq1M,
    Type::Iq2Xxs,
    Type::Iq2Xs,
    Type::Iq2S,
    Type::Iq3Xxs,
    Type::Iq3S,
    Type::Tq1_0,
    Type::Tq2_0,
];

fn main() {
    let mut level = Level::best();
    let mut columns = vec![1, 4, 16, 128, 512];
    let mut k = LENGTH;
    let mut types = Vec::new();
    let mut json = false;
    let mut beside = None;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{arg} needs a value"));
        match arg.as_str() {
            // What `cargo bench` adds.
            "--bench" => {}
            // One object for each line of the table.
            "--json" => json = true,
            "--level" => level = level_of(&value()),
            "--beside" => beside = Some(level_of(&value())),
            "--k" => k = value().parse().unwrap(),
            "--cols" => columns = value().split(',').map(|n| n.parse().unwrap()).collect(),
            name => types.push(Type::from_ggml_name(name).unwrap_or_else(|| panic!("{name}?"))),
        }
    }
    if types.is_empty() {
        types = TYPES.to_vec();
    }
    let ggml = ggml::Ggml::load();
    let bandwidth = read_bandwidth();
    let ceiling = ceiling::single_precision(level, seconds);
    let int16 = ceiling::int16(level, seconds);
    if !json {
        println!(
            "level {}, read bandwidth of one thread {bandwidth:.1} GB/s, products of single \
             precision at most {:.0} GF, of integers of 16 bits {:.0}",
            level.name(),
            ceiling.unwrap_or(f64::NAN),
            int16.unwrap_or(f64::NAN)
        );
        println!(
            "{:>8} {:>5} {:>10} {:>12} {:>12} {:>12} {:>12} {:>12}",
            "type", "cols", "ours", "vs beside", "vs ggml", "vs repacked", "vs AMX", "of ceiling"
        );
    }
    for ty in types {
        for &cols in &columns {
            let mut line = measure(ty, k, [Some(level), beside], cols, ggml.as_ref());
            line.ceiling = match line.is_rounded {
                // Products of bfloat16 have an instruction of their own.
                true => int16.filter(|_| level < Level::Avx512Bf16),
                false => ceiling.filter(|_| cols > 1 && ceiling::holds_for(ty, level)),
            };
            if json {
                println!("{}", line.json(bandwidth));
            } else {
                println!("{}", line.text());
            }
        }
    }
}

/// One line of the table: the shortest time of each side.
struct Line {
    ty: Type,
    cols: usize,
    /// What the times are divided into: bytes of weights of a single column, operations of more.
    work: f64,
    ours: f64,
    /// Another level of ours.
    beside: Option<f64>,
    plain: Option<f64>,
    repacked: Option<f64>,
    amx: Option<f64>,
    /// Whether the engine rounds the operands of so many columns further.
    is_rounded: bool,
    /// The rate that the processor cannot go beyond, if it is known.
    ceiling: Option<f64>,
}

impl Line {
    fn rate(&self, seconds: f64) -> f64 {
        self.work / seconds / 1e9
    }

    fn text(&self) -> String {
        let rate = match self.cols {
            1 => format!("{:.1} GB/s", self.rate(self.ours)),
            _ => format!("{:.0} GF", self.rate(self.ours)),
        };
        let ratio = |theirs: Option<f64>| match theirs {
            None => "-".into(),
            Some(theirs) => format!("{:.2}x", theirs / self.ours),
        };
        let of_ceiling = match self.ceiling {
            None => "-".into(),
            Some(ceiling) => format!("{:.0} %", 100.0 * self.rate(self.ours) / ceiling),
        };
        format!(
            "{:>8} {:>5} {rate:>11} {:>12} {:>12} {:>12} {:>12} {of_ceiling:>12}",
            self.ty.ggml_name(),
            self.cols,
            ratio(self.beside),
            ratio(self.plain),
            ratio(self.repacked),
            ratio(self.amx)
        )
    }

    fn json(&self, bandwidth: f64) -> String {
        let ours = Some(self.ours);
        let figures = [
            ("ours", ours),
            ("beside", self.beside),
            ("ggml", self.plain),
            ("repacked", self.repacked),
            ("amx", self.amx),
        ];
        let mut text = format!(
            r#"{{"type":"{}","columns":{}"#,
            self.ty.ggml_name(),
            self.cols
        );
        for (name, seconds) in figures {
            if let Some(seconds) = seconds {
                text += &format!(r#","{name}":{}"#, self.rate(seconds));
            }
        }
        if self.cols == 1 {
            text += &format!(r#","bandwidth":{bandwidth}"#);
        }
        if let Some(ceiling) = self.ceiling {
            text += &format!(r#","ceiling":{ceiling}"#);
        }
        text + "}"
    }
}

/// The level of a name.
fn level_of(name: &str) -> Level {
    let mut levels = Level::ALL.into_iter();
    levels
        .find(|level| level.name() == name)
        .unwrap_or_else(|| panic!("{name}?"))
}

/// Measures one line, with rows of `k` elements. `levels`: ours, and the one beside it.
fn measure(
    ty: Type,
    k: usize,
    levels: [Option<Level>; 2],
    cols: usize,
    ggml: Option<&ggml::Ggml>,
) -> Line {
    let format = Format::of(ty).unwrap();
    let row_bytes = format.row_bytes(k);
    let rows = if cols == 1 {
        DECODE_BYTES / row_bytes / 32 * 32
    } else {
        PREFILL_ROWS
    };
    // What the engine takes.
    let rounded = levels.map(|level| MatmulKernel::rounded_at(ty, k, cols, level?));
    let kernels =
        [0, 1].map(|i| rounded[i].or_else(|| levels[i].and_then(|l| MatmulKernel::at(ty, l))));
    let is_rounded = rounded[0].is_some();
    let weights = random_weights(format, k, rows);
    let x: Vec<f32> = random(k * cols, 5).collect();
    let bytes_of = |kernel: &MatmulKernel| kernel.activation.column_bytes(k);
    let most = kernels.iter().flatten().map(bytes_of).max();
    let mut columns = vec![0u8; most.unwrap_or(0) * cols];
    let mut y = vec![0f32; rows * cols];
    let mut ours = |kernel: &MatmulKernel, y: &mut [f32]| {
        let column_bytes = bytes_of(kernel);
        for c in 0..cols {
            // SAFETY: `x` and `columns` have `cols > c` columns of `k` elements.
            unsafe {
                (kernel.quantize_activation)(
                    x[c * k..].as_ptr(),
                    columns[c * column_bytes..].as_mut_ptr(),
                    k,
                );
            }
        }
        // SAFETY: the vectors have `rows` rows and `cols` columns of `k` elements, and `rows *
        // cols` products.
        unsafe {
            (kernel.gemm)(&GemmArgs {
                k,
                w: weights.bytes().as_ptr(),
                w_stride: row_bytes,
                rows,
                x: columns.as_ptr(),
                x_stride: column_bytes,
                cols,
                dst: y.as_mut_ptr(),
                dst_stride: rows,
                table: None,
            });
        }
        black_box(y);
    };
    let product =
        |layout| ggml.and_then(|ggml| ggml.product(ty, k, rows, cols, weights.bytes(), &x, layout));
    let plain = product(Layout::Plain);
    let others = [product(Layout::Repacked), product(Layout::Amx)];
    let (mut best, mut best_beside, mut best_plain) = (f64::MAX, f64::MAX, f64::MAX);
    let mut best_others = [f64::MAX; 2];
    let start = Instant::now();
    let mut rounds = 0;
    while rounds < 5 || rounds < 200 && start.elapsed() < Duration::from_secs(2) {
        if let Some(kernel) = &kernels[1] {
            best_beside = best_beside.min(seconds(|| ours(kernel, &mut y)));
        }
        if let Some(kernel) = &kernels[0] {
            best = best.min(seconds(|| ours(kernel, &mut y)));
        }
        if let Some(product) = &plain {
            best_plain = best_plain.min(seconds(|| product.compute()));
        }
        for (product, best) in others.iter().zip(&mut best_others) {
            if let Some(product) = product {
                *best = best.min(seconds(|| product.compute()));
            }
        }
        rounds += 1;
    }
    if let Some(product) = &plain {
        let theirs = product.result();
        drop(plain);
        let square = |x: f32| f64::from(x) * f64::from(x);
        let error: f64 = y.iter().zip(&theirs).map(|(a, b)| square(a - b)).sum();
        let size: f64 = theirs.iter().map(|&b| square(b)).sum();
        // What is rounded further may differ as far as `test-backend-ops` allows.
        let most = if is_rounded { 5e-4 } else { 1e-6 };
        assert!(
            error <= most * size,
            "{ty:?}: our product is not ggml's, NMSE {}",
            error / size
        );
    }
    let work = match cols {
        1 => (rows * row_bytes) as f64,
        _ => 2.0 * (rows * cols * k) as f64,
    };
    let measured = |seconds: f64| (seconds < f64::MAX).then_some(seconds);
    Line {
        ty,
        cols,
        work,
        ours: best,
        beside: measured(best_beside),
        plain: measured(best_plain),
        repacked: measured(best_others[0]),
        amx: measured(best_others[1]),
        is_rounded,
        ceiling: None,
    }
}

/// Processor time of this thread, which both sides compute on: unlike the time of day it does not
/// count other processes on the machine.
fn seconds(mut work: impl FnMut()) -> f64 {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32).as_secs_f64()
    };
    let start = now();
    work();
    now() - start
}

fn random(n: usize, seed: u64) -> impl Iterator<Item = f32> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    (0..n).map(move |_| (random.next_u64() >> 40) as f32 / (1 << 24) as f32 - 0.5)
}

/// `rows` rows of `k` weights. Quantising is slow, so a few rows are repeated.
fn random_weights(format: &Format, k: usize, rows: usize) -> Pages {
    const DISTINCT: usize = 32;
    let mut distinct = vec![0u8; DISTINCT * format.row_bytes(k)];
    let values: Vec<f32> = random(DISTINCT * k, 3).collect();
    // SAFETY: the vectors hold `DISTINCT` rows of `k`.
    unsafe { (format.quantize_row)(values.as_ptr(), distinct.as_mut_ptr(), values.len()) };
    let mut weights = Pages::new(rows * format.row_bytes(k));
    for to in weights.bytes_mut().chunks_mut(distinct.len()) {
        to.copy_from_slice(&distinct[..to.len()]);
    }
    weights
}

/// Memory aligned to pages, as that of both engines is: rows that cross pages in other places are
/// read at another speed.
struct Pages {
    memory: Vec<u8>,
    bytes: std::ops::Range<usize>,
}

impl Pages {
    fn new(bytes: usize) -> Pages {
        let memory = vec![0; bytes + 4095];
        let start = memory.as_ptr().align_offset(4096);
        Pages {
            memory,
            bytes: start..start + bytes,
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.bytes.clone()]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.bytes.clone()]
    }
}

/// Bytes per second of summing memory, in GB/s.
fn read_bandwidth() -> f64 {
    let memory = vec![1u64; DECODE_BYTES / 8];
    let sum = || {
        let mut sums = [0u64; 64];
        for chunk in memory.chunks_exact(64) {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum = sum.wrapping_add(*x);
            }
        }
        black_box(sums);
    };
    let best = (0..5).map(|_| seconds(sum)).fold(f64::MAX, f64::min);
    DECODE_BYTES as f64 / best / 1e9
}
