//! BLAKE3 of weights on one thread, as the executor and the plugin compute it, and on all cores
//! with rayon; alone, and beside a model that decodes on all cores.
//!
//! `cargo bench -p vgpu-gguf --bench hashing -- [--repeats N]`
//!
//! The model is stood in for by one thread for each core that adds up 256 MiB of its own, again and
//! again: like a product of one column, it takes what memory gives. Each row has the rate of the
//! hash, and the rate of the model as a share of its rate alone. Medians of the repeats, in turns.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_root};
use vgpu_median::median;

/// Bytes that are hashed: some tensors.
const BYTES: usize = 256 << 20;

/// Bytes that one call hashes: fits the caches of a core (`host-executor/src/weights/hash_job.rs`).
const CHUNK: usize = 256 << 10;

fn one_thread(data: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for chunk in data.chunks(CHUNK) {
        hasher.update(chunk);
    }
    hasher.finalize()
}

/// The chaining value of the part of a file that begins at `offset`: a power of two of bytes.
fn subtree(data: &[u8], offset: u64) -> [u8; 32] {
    if data.len() <= CHUNK {
        let mut hasher = blake3::Hasher::new();
        return hasher
            .set_input_offset(offset)
            .update(data)
            .finalize_non_root();
    }
    let (left, right) = data.split_at(data.len() / 2);
    let (left, right) = rayon::join(
        || subtree(left, offset),
        || subtree(right, offset + left.len() as u64),
    );
    blake3::hazmat::merge_subtrees_non_root(&left, &right, Mode::Hash)
}

fn all_cores(data: &[u8]) -> blake3::Hash {
    let (left, right) = data.split_at(data.len() / 2);
    let (left, right) = rayon::join(|| subtree(left, 0), || subtree(right, left.len() as u64));
    merge_subtrees_root(&left, &right, Mode::Hash)
}

/// Megabytes in a second of `work` over `bytes` bytes.
fn rate(bytes: usize, work: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    work();
    bytes as f64 / begun.elapsed().as_secs_f64() / 1e6
}

/// Runs `work` while every core reads memory. The work's result, and the bytes read in a second.
fn beside_a_model<T>(model: &[Vec<u64>], work: impl FnOnce() -> T) -> (T, f64) {
    let (ends, read) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for weights in model {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    for part in weights.chunks(1 << 16) {
                        black_box(part.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
                        read.fetch_add(size_of_val(part) as u64, Ordering::Relaxed);
                        if ends.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_millis(100)); // the threads have begun
        let (before, begun) = (read.load(Ordering::Relaxed), Instant::now());
        let result = work();
        let bytes = read.load(Ordering::Relaxed) - before;
        let rate = bytes as f64 / begun.elapsed().as_secs_f64();
        ends.store(true, Ordering::Relaxed);
        (result, rate)
    })
}

fn main() {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--repeats");
    let repeats = arguments.nth(1).map_or(5, |repeats| {
        repeats.parse().expect("--repeats takes a number")
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let data: Vec<u8> = (0..BYTES).map(|at| (at * 31 % 251) as u8).collect();
    let model: Vec<Vec<u64>> = (0..cores).map(|_| vec![1; 32 << 20]).collect();
    assert_eq!(
        one_thread(&data),
        all_cores(&data),
        "both are the same hash"
    );

    type Hash = fn(&[u8]) -> blake3::Hash;
    let hashes: [(&str, Hash); 2] = [("one thread", one_thread), ("rayon, all cores", all_cores)];
    let mut rows = hashes.map(|(name, _)| (name, Vec::new(), Vec::new(), Vec::new()));
    for _ in 0..repeats {
        let pause = || std::thread::sleep(Duration::from_millis(500));
        let ((), model_alone) = beside_a_model(&model, pause);
        for ((_, hash), row) in hashes.iter().zip(&mut rows) {
            let work = || {
                black_box(hash(&data));
            };
            row.1.push(rate(BYTES, work));
            let (beside, model) = beside_a_model(&model, || rate(BYTES, work));
            row.2.push(beside);
            row.3.push(model / model_alone);
        }
    }
    println!("{cores} cores");
    println!("| hash | alone, MB/s | beside a model, MB/s | the model keeps |");
    println!("|---|---|---|---|");
    for (name, alone, beside, kept) in rows {
        println!(
            "| {name} | {:.0} | {:.0} | {:.2} |",
            median(alone),
            median(beside),
            median(kept)
        );
    }
}
