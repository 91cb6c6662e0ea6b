//! What fusing nodes brings: graphs of a model of 256 M parameters, fused and node by node, in
//! turns.
//!
//! `cargo bench -p vgpu-check --bench plan -- [--threads N] [--repeats N] [--tokens N]...
//! [TYPE]...`

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use vgpu_check::model::{Model, StepShape, TINY};
use vgpu_cpu::CpuEngine;
use vgpu_median::median;
use vgpu_transport::ir::Type;

/// The shape of the small model that `cargo xtask bench` measures.
const MODEL: Model = Model {
    layers: 30,
    weights: Type::Q4_0,
    cache: Type::F16,
    width: 768,
    heads: 12,
    key_heads: 4,
    head: 64,
    inner: 2304,
    vocabulary: 32_000,
    context: 1024,
    ..TINY
};

/// Tokens of the cache that a step sees.
const SEEN: u64 = 768;

fn main() {
    let (mut threads, mut repeats) = (1, 15);
    let (mut tokens, mut types) = (Vec::new(), Vec::new());
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
            "--tokens" => tokens.push(number()),
            name => types.push(
                { Type::ALL.iter() }
                    .copied()
                    .find(|ty| ty.ggml_name().eq_ignore_ascii_case(name))
                    .unwrap_or_else(|| panic!("{name} is no type")),
            ),
        }
    }
    if tokens.is_empty() {
        tokens = vec![1, 8, 512];
    }
    if types.is_empty() {
        types = vec![Type::Q4_0, Type::F16];
    }
    let engines = [false, true].map(|fuses| {
        let engine = CpuEngine::new(threads, None).expect("an engine");
        engine.fusing(fuses)
    });
    println!(
        "{threads} threads; milliseconds of a graph, node by node and fused; by the clock, of the \
         processors"
    );
    for ty in types {
        let model = Model {
            weights: ty,
            ..MODEL
        };
        for &tokens in &tokens {
            let built = model.graph(StepShape { tokens, seen: SEEN });
            let loaded = built.load(&engines[0]);
            let mut plans = { engines.iter() }.map(|engine| built.compile(engine, &loaded));
            let mut plans: [_; 2] = std::array::from_fn(|_| plans.next().expect("two engines"));
            built.write_inputs(&loaded, SEEN - tokens);
            let runs = (64 / tokens).clamp(1, 8);
            let mut times = [const { [const { Vec::new() }; 2] }; 2];
            for round in 0..=repeats {
                for (plan, times) in plans.iter_mut().zip(&mut times) {
                    let (clock, processors) = (Instant::now(), processor_time());
                    for _ in 0..runs {
                        plan.run().expect("it runs");
                    }
                    if round > 0 {
                        times[0].push(clock.elapsed());
                        times[1].push(processor_time() - processors);
                    }
                }
            }
            let each = |times: Vec<Duration>| median(times).as_secs_f64() * 1e3 / runs as f64;
            let [plain, fused] = times.map(|times| times.map(each));
            println!(
                "{:8} {tokens:4} tokens: {:8.3} {:8.3} ({:.3}x), {:8.3} {:8.3} ({:.3}x)",
                ty.ggml_name(),
                plain[0],
                fused[0],
                plain[0] / fused[0],
                plain[1],
                fused[1],
                plain[1] / fused[1],
            );
        }
    }
}

/// Time that the processors have spent on this process.
fn processor_time() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
