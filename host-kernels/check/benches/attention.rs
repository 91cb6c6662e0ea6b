//! The attention of a decoded token on the CPU engine: bytes of keys and values a second, beside
//! what as many threads read without computing, in the same run.
//!
//! `cargo bench -p vgpu-check --bench attention -- [--threads N] [--keys N]... [TYPE]...`

use std::hint::black_box;
use std::time::{Duration, Instant};

use vgpu_check::{KvCaches, Options, decode_attention};
use vgpu_cpu::CpuEngine;
use vgpu_median::median;
use vgpu_transport::ir::Type;

/// Bytes of all caches of a measurement, and of what the threads read: more than caches of
/// processors hold.
const BYTES: u64 = 192 << 20;

/// Heads of some models: elements, query heads, KV heads.
const SHAPES: [[u64; 3]; 6] = [
    [64, 16, 4],
    [64, 32, 8],
    [128, 32, 8],
    [128, 16, 16],
    [128, 64, 8],
    [256, 16, 8],
];

fn main() {
    let mut threads = 1;
    let (mut keys, mut types) = (Vec::new(), Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || {
            let number = arguments.next().and_then(|n| n.parse::<u64>().ok());
            number.unwrap_or_else(|| panic!("{argument} takes a number"))
        };
        match argument.as_str() {
            "--bench" => {} // from cargo
            "--threads" => threads = number() as usize,
            "--keys" => keys.push(number()),
            name => types.push(Type::from_ggml_name(name).unwrap_or_else(|| panic!("{name}?"))),
        }
    }
    if keys.is_empty() {
        keys = vec![8192];
    }
    if types.is_empty() {
        types = vec![Type::F16, Type::Bf16, Type::Q8_0, Type::Q4_0];
    }
    let engine = CpuEngine::new(threads, None).expect("an engine");
    let options = Options {
        time: Duration::from_millis(1500),
        ..Options::default()
    };
    println!("{threads} threads; GB/s, and the share of what they read without computing");
    for [head, heads, kv_heads] in SHAPES {
        for &keys in &keys {
            for &ty in &types {
                let mut caches = KvCaches {
                    ty,
                    head,
                    heads,
                    kv_heads,
                    keys,
                    layers: 1,
                };
                caches.layers = BYTES.div_ceil(caches.bytes());
                let read = read_rate(threads);
                let rate = decode_attention(&engine, &options, caches).expect("it runs");
                println!(
                    "{heads} heads of {head}, {kv_heads} KV heads, {keys} keys, {:5}: {:6.1} of \
                     {:5.1} GB/s, {:.2}",
                    ty.ggml_name(),
                    rate / 1e9,
                    read / 1e9,
                    rate / read,
                );
            }
        }
    }
}

/// Bytes a second that threads read from memory, each its own part, and add up.
fn read_rate(threads: usize) -> f64 {
    let words = vec![1u64; BYTES as usize / size_of::<u64>()];
    let sweep = || {
        std::thread::scope(|scope| {
            for part in words.chunks(words.len().div_ceil(threads)) {
                // Eight sums, so that no addition waits for the one before.
                scope.spawn(move || {
                    let mut sums = [0u64; 32];
                    for line in part.as_chunks().0 {
                        for (sum, word) in sums.iter_mut().zip::<&[u64; 32]>(line) {
                            *sum = sum.wrapping_add(*word);
                        }
                    }
                    black_box(sums)
                });
            }
        });
    };
    sweep();
    let mut times = Vec::new();
    for _ in 0..15 {
        let begin = Instant::now();
        sweep();
        times.push(begin.elapsed());
    }
    BYTES as f64 / median(times).as_secs_f64()
}
