//! What a batch of several guests brings: a step of a layer with experts of each guest, one after
//! the other and as one batch, in turns.
//!
//! `cargo bench -p vgpu-check --bench together -- [--threads N] [--repeats N] [--guests N]...
//! [--tokens N]`

use std::collections::HashSet;
use std::time::{Duration, Instant};

use vgpu_check::model::{Built, EXPERTS_20B, EXPERTS_30B, Loaded, Model, StepShape};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, Plan, RunStatus, Turn};
use vgpu_median::median;

/// Tokens of the cache that a step sees.
const SEEN: u64 = 256;

/// One layer, with a small vocabulary.
fn layer(model: Model) -> Model {
    Model {
        layers: 1,
        vocabulary: 1024,
        context: SEEN,
        ..model
    }
}

fn main() {
    let (mut threads, mut repeats, mut tokens) = (1, 15, 1);
    let mut counts = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || {
            let number = arguments.next().and_then(|n| n.parse::<u64>().ok());
            number.unwrap_or_else(|| panic!("{argument} takes a number"))
        };
        match argument.as_str() {
            "--bench" => {} // from cargo
            "--threads" => threads = number() as usize,
            "--repeats" => repeats = number(),
            "--guests" => counts.push(number() as usize),
            "--tokens" => tokens = number(),
            _ => panic!("{argument} is no argument"),
        }
    }
    if counts.is_empty() {
        counts = vec![1, 2, 4, 8];
    }
    let engine = CpuEngine::new(threads, None).expect("an engine");
    println!(
        "{threads} threads, {tokens} tokens of each guest; milliseconds of a layer for all guests, \
         one after the other and as a batch"
    );
    let models = [
        ("gpt-oss-20b, MXFP4", EXPERTS_20B),
        ("Qwen3-30B-A3B, Q4_K", EXPERTS_30B),
    ];
    for (name, model) in models {
        let most = counts.iter().copied().max().unwrap_or(1);
        let built = layer(model).graph(StepShape { tokens, seen: SEEN });
        let loaded = built.load_shared(&engine, most);
        for &count in &counts {
            let [alone, together] = times(&engine, &built, &loaded[..count], repeats);
            println!(
                "{name:20} {count:3} guests: {alone:8.3} {together:8.3} ({:.2}x)",
                alone / together
            );
        }
    }
}

/// The median times of a step of all guests, alone and together, in milliseconds.
fn times(engine: &CpuEngine, built: &Built, loaded: &[Loaded], repeats: u64) -> [f64; 2] {
    let mut plans: Vec<Box<dyn Plan>> = { loaded.iter() }
        .map(|loaded| built.compile(engine, loaded))
        .collect();
    for (i, loaded) in loaded.iter().enumerate() {
        // Other tokens, which select other experts.
        built.write_inputs(loaded, 16 * i as u64);
    }
    let keys: HashSet<_> = plans.iter().map(|plan| plan.batch_key()).collect();
    assert!(keys.len() == 1 && !keys.contains(&None), "one key for all");
    let mut times = [const { Vec::new() }; 2];
    for round in 0..=repeats {
        let start = Instant::now();
        for plan in &mut plans {
            plan.run().expect("it runs");
        }
        let alone = start.elapsed();
        let mut all: Vec<&mut dyn Plan> = Vec::new();
        for plan in &mut plans {
            all.push(&mut **plan);
        }
        let start = Instant::now();
        let outcomes = engine.launch_batch(&mut all, &Turn::new());
        let together = start.elapsed();
        assert!(
            outcomes
                .iter()
                .all(|outcome| outcome == &Ok(RunStatus::Done))
        );
        if round > 0 {
            times[0].push(alone);
            times[1].push(together);
        }
    }
    times.map(|times: Vec<Duration>| median(times).as_secs_f64() * 1e3)
}
