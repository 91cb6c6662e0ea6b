//! Megakernels: many launches as one, whose blocks wait for each other. In any order of blocks,
//! memory is the same to the last bit as after the launches one by one.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Level, Metadata};

use vgpu_check::model::{Built, Loaded, Model, StepShape, TINY, TINY_EXPERTS};
use vgpu_cuda::LaunchPolicy;
use vgpu_engine::{Memory, Plan, RunError, RunStatus, Turn};
use vgpu_transport::ir::Type;

use crate::engine_with;
use crate::fusion::{displaced, random};
use crate::sample::Sample;
use crate::shim::NO_BLOCKS;
use crate::spy::{Call, Fails, Spy};

const DECODE: StepShape = StepShape {
    tokens: 1,
    seen: 32,
};

/// A policy with one time slice for all.
fn policy() -> LaunchPolicy {
    let forever = Duration::from_secs(1 << 30);
    LaunchPolicy {
        time_slice: forever,
        graph_threshold: forever,
        megakernel: true,
        ..LaunchPolicy::default()
    }
}

/// A device without cooperative launches, so that launches go one by one.
fn plain() -> Arc<Spy> {
    let spy = Spy::running();
    spy.shim.blocks.store(NO_BLOCKS, Ordering::Relaxed);
    Arc::new(spy)
}

/// A configuration of the device.
#[derive(Debug, Clone, Copy)]
struct Manner {
    blocks: u32,
    /// Bytes of shared memory of an SM.
    room: u32,
    seed: u64,
}

impl Manner {
    fn spy(self) -> Arc<Spy> {
        let spy = Spy::running();
        spy.shim.blocks.store(self.blocks, Ordering::Relaxed);
        spy.shim.room.store(self.room, Ordering::Relaxed);
        spy.shim.seed.store(self.seed, Ordering::Relaxed);
        Arc::new(spy)
    }
}

fn read(memory: &Arc<dyn Memory>) -> Vec<u8> {
    let mut bytes = vec![0; memory.size() as usize];
    memory.read(0, bytes.as_mut_slice().into()).unwrap();
    bytes
}

/// The contents of the buffers that the graph writes to, after runs of several tokens, or the error
/// of a failed run.
fn memory_after(built: &Built, device: &Arc<Spy>, tokens: u64) -> Result<Vec<Vec<u8>>, RunError> {
    memory_at(policy(), built, device, tokens)
}

/// The same with a policy.
fn memory_at(
    policy: LaunchPolicy,
    built: &Built,
    device: &Arc<Spy>,
    tokens: u64,
) -> Result<Vec<Vec<u8>>, RunError> {
    let engine = engine_with(device, policy);
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    for position in 0..tokens {
        built.write_inputs(&loaded, position);
        plan.run()?;
    }
    Ok(loaded.buffers[1..].iter().map(read).collect())
}

/// The megakernels: for one column, and for several.
const MEGAKERNELS: [Call; 2] = [
    Call::Launch("vg_megakernel"),
    Call::Launch("vg_megakernel_cols8"),
];

fn of_steps(log: &[Call]) -> usize {
    log.iter().filter(|call| MEGAKERNELS.contains(call)).count()
}

/// The number of runs with a megakernel. If a plan has several launches, they become a graph in the
/// second run.
fn runs_with_steps(log: &[Call]) -> usize {
    match of_steps(log) {
        0 => 0,
        steps => {
            steps
                + log
                    .iter()
                    .filter(|call| **call == Call::LaunchGraph)
                    .count()
        }
    }
}

/// A model with rows of whole blocks of 256.
const K_QUANTS: Model = Model {
    weights: Type::Q4K,
    width: 256,
    heads: 4,
    key_heads: 2,
    head: 64,
    inner: 512,
    ..TINY
};

fn models() -> Vec<(&'static str, Model)> {
    vec![
        ("Q8_0", TINY),
        ("experts", TINY_EXPERTS),
        ("Q4_K", K_QUANTS),
        (
            "Q6_K with wide heads",
            Model {
                weights: Type::Q6K,
                head: 128,
                heads: 2,
                key_heads: 1,
                ..K_QUANTS
            },
        ),
        (
            "F16",
            Model {
                weights: Type::F16,
                ..TINY
            },
        ),
        (
            "experts in MXFP4",
            Model {
                weights: Type::Mxfp4,
                ..TINY_EXPERTS
            },
        ),
    ]
}

/// The models above, with one token and with several, and with other types of cache.
fn cases() -> Vec<(&'static str, Model, u64)> {
    let shared = Model {
        heads: 4,
        key_heads: 1,
        ..K_QUANTS
    };
    let wide = Model {
        head: 128,
        ..shared
    };
    let with = |cache, model| Model { cache, ..model };
    let mut all: Vec<_> = { models().into_iter() }
        .map(|(what, model)| (what, model, 1))
        .collect();
    all.extend([
        ("8 tokens", TINY, 8),
        ("3 tokens with experts", TINY_EXPERTS, 3),
        ("5 tokens whose heads share keys", shared, 5),
        ("8 tokens with wide heads", wide, 8),
        ("a cache in BF16", with(Type::Bf16, TINY), 2),
        ("the same, many rows", with(Type::Bf16, wide), 5),
        ("a cache in Q8_0", with(Type::Q8_0, TINY), 1),
        ("the same, wide heads", with(Type::Q8_0, wide), 1),
        ("a cache in Q4_0, many rows", with(Type::Q4_0, shared), 6),
        ("the same, wide heads", with(Type::Q4_0, wide), 8),
    ]);
    all
}

fn step_of(tokens: u64) -> StepShape {
    StepShape { tokens, ..DECODE }
}

#[test]
fn decoding_a_token_is_one_megakernel_step() {
    for (what, model, tokens) in cases() {
        let model = Model { layers: 4, ..model };
        let device = Arc::new(Spy::logging());
        let engine = engine_with(&device, policy());
        let built = model.graph(step_of(tokens));
        let loaded = built.load(&engine);
        let mut plan = built.compile(&engine, &loaded);
        device.take_log();
        plan.run().unwrap();
        let log = device.take_log();
        // A quantised embedding is read by a launch before the megakernel.
        let before = usize::from(model.weights.is_quantized());
        assert_eq!(log[0] == Call::Launch("vg_get_rows"), before == 1, "{what}");
        // In the last layer no node overwrites what the choice of experts leaves out, so it stays
        // several launches.
        let steps = 1 + usize::from(model.experts.is_some() && tokens == 1);
        assert_eq!(of_steps(&log), steps, "{what}: {log:?}");
        let all = before + 1;
        assert!(
            model.experts.is_some() || log.len() == all,
            "{what}: {log:?}"
        );
    }
}

#[test]
fn megakernel_results_do_not_depend_on_block_order() {
    let known = models().len();
    let sample = Sample::asked();
    for (at, (what, model, tokens)) in cases().into_iter().enumerate() {
        if sample.is_some_and(|sample| !sample.has(at)) {
            continue;
        }
        let built = model.graph(step_of(tokens));
        // With repacked and with plain weights.
        let policies = [true, false].map(|repack| LaunchPolicy { repack, ..policy() });
        let plain = policies.map(|policy| memory_at(policy, &built, &plain(), 3).expect("it runs"));
        // Of 60 blocks some have no work item in most stages, and do not wait there.
        let manners = [(1, 0), (5, 0), (60, 0), (2, 36 << 10), (8, 41 << 10)];
        let is_small = at < known && model.head <= 64;
        for (i, (blocks, room)) in manners.into_iter().enumerate() {
            if room > 0 && !is_small {
                continue;
            }
            for seed in 0..if at < known { 2 } else { 1 } {
                let manner = Manner {
                    blocks,
                    room,
                    seed: 100 * i as u64 + 3 * seed,
                };
                let device = manner.spy();
                let layout = seed as usize;
                let got = memory_at(policies[layout], &built, &device, 3).expect("it runs");
                assert!(runs_with_steps(&device.take_log()) >= 3, "{what}");
                assert!(got == plain[layout], "{what}, {manner:?}");
            }
        }
    }
}

/// A stage multiplies up to eight columns; a launch multiplies more, eight for each block.
#[test]
fn more_tokens_than_a_stage_has_give_the_results_of_launches() {
    let built = TINY.graph(step_of(12));
    let expected = memory_at(policy(), &built, &plain(), 3).expect("it runs");
    let device = Manner {
        blocks: 5,
        room: 0,
        seed: 1,
    };
    let got = memory_at(policy(), &built, &device.spy(), 3).expect("it runs");
    assert!(got == expected);
}

#[test]
fn overlapping_memory_does_not_depend_on_block_order() {
    let mut below = random(11);
    let (mut ran, mut tried) = (0, 0);
    while ran < 16 {
        tried += 1;
        assert!(tried < 100, "most of them run");
        let Some(built) = displaced([TINY, TINY_EXPERTS][tried % 2], &mut below) else {
            continue;
        };
        let Ok(plain) = memory_after(&built, &plain(), 2) else {
            continue; // indices that are none
        };
        ran += 1;
        for seed in 0..2 {
            let manner = Manner {
                blocks: 2 + (tried % 4) as u32,
                room: 0,
                seed: 10 * tried as u64 + seed,
            };
            let device = manner.spy();
            let got = memory_after(&built, &device, 2).expect("it runs");
            assert!(of_steps(&device.take_log()) > 0);
            assert!(got == plain, "case {tried}, {manner:?}");
        }
    }
}

/// A block without work items in some stages passes these without waiting. Such a block must not
/// use expert ids that the stages before it are still writing: this displaced graph, in this order
/// of blocks, made it prefetch weights of other experts.
#[test]
fn expert_weights_are_prefetched_after_routing() {
    let mut below = random(11);
    let displaced = (1..=37).map(|case| displaced([TINY, TINY_EXPERTS][case % 2], &mut below));
    let built = displaced.last().flatten().expect("a graph");
    let plain = memory_after(&built, &plain(), 2).expect("it runs");
    let manner = Manner {
        blocks: 3,
        room: 0,
        seed: 370,
    };
    let got = memory_after(&built, &manner.spy(), 2).expect("it runs");
    assert!(got == plain, "memory differs");
}

/// A plan with megakernels on a device, and the expected results.
struct Trial {
    device: Arc<Spy>,
    built: Built,
    loaded: Loaded,
    plan: Box<dyn Plan>,
    want: Vec<Vec<f32>>,
}

impl Trial {
    fn new(model: Model, policy: LaunchPolicy) -> Trial {
        let built = model.graph(DECODE);
        let with = |device: Arc<Spy>, policy: LaunchPolicy| {
            let engine = engine_with(&device, policy);
            let loaded = built.load(&engine);
            let plan = built.compile(&engine, &loaded);
            (device, loaded, plan)
        };
        let (_device, loaded, mut plan) = with(plain(), policy);
        let want = { 0..4 }
            .map(|position| {
                built.write_inputs(&loaded, position);
                plan.run().expect("it runs");
                built.read_result(&loaded)
            })
            .collect();
        let (device, loaded, plan) = with(Arc::new(Spy::running()), policy);
        device.take_log();
        Trial {
            device,
            built,
            loaded,
            plan,
            want,
        }
    }

    /// Runs a token and compares its result.
    fn run(&mut self, position: u64) {
        self.built.write_inputs(&self.loaded, position);
        self.plan.run().expect("it runs");
        let got = self.built.read_result(&self.loaded);
        assert_eq!(got, self.want[position as usize], "token {position}");
    }
}

#[test]
fn refused_step_falls_back_to_single_launches() {
    let mut trial = Trial::new(TINY, policy());
    trial.run(0);
    assert_eq!(of_steps(&trial.device.take_log()), 1);
    // Another process has taken some of the SMs.
    trial.device.shim.blocks.store(2, Ordering::Relaxed);
    for position in 1..4 {
        trial.run(position);
        let log = trial.device.take_log();
        assert_eq!(of_steps(&log), usize::from(position == 1), "{log:?}");
        assert!(log.len() > 20 || log.contains(&Call::LaunchGraph));
    }
}

#[test]
fn failed_step_frees_its_resources() {
    let mut trial = Trial::new(TINY, policy());
    trial.run(0);
    trial.device.fail(Fails::Megakernel);
    trial.built.write_inputs(&trial.loaded, 1);
    trial.plan.run().expect_err("it fails on command");
    trial.device.fail(None);
    // An index out of range in the middle of the megakernel.
    trial.run(1);
    trial.built.write_input(&trial.loaded, "places", 1000);
    let error = trial.plan.run().unwrap_err();
    assert!(
        matches!(error, RunError::Index { index: 1000, .. }),
        "{error:?}"
    );
    for position in 2..4 {
        trial.run(position);
    }
    assert_eq!(of_steps(&trial.device.take_log()), 6);
}

#[test]
fn long_steps_are_split() {
    for model in [TINY, TINY_EXPERTS] {
        let short = LaunchPolicy {
            time_slice: Duration::from_micros(25),
            ..policy()
        };
        let mut trial = Trial::new(Model { layers: 4, ..model }, short);
        trial.run(0);
        assert!(of_steps(&trial.device.take_log()) >= 3);
        // Another plan may run in between.
        let over = Turn::new();
        over.set_end(Some(Duration::ZERO));
        trial.built.write_inputs(&trial.loaded, 1);
        let mut yields = 0;
        while trial.plan.launch(&over).unwrap() == RunStatus::Yielded {
            yields += 1;
        }
        trial.plan.wait().unwrap();
        assert!(yields >= 2, "{yields}");
        assert_eq!(trial.built.read_result(&trial.loaded), trial.want[1]);
    }
}

#[test]
fn grown_kv_cache_gets_a_new_task_table() {
    let grown = TINY_EXPERTS.graph(StepShape {
        tokens: 1,
        seen: 64,
    });
    let plain = memory_after(&grown, &plain(), 4).expect("it runs");
    for seed in 0..4 {
        let device = Manner {
            blocks: 5,
            room: 0,
            seed,
        }
        .spy();
        let engine = engine_with(&device, policy());
        let small = TINY_EXPERTS.graph(DECODE);
        let loaded = small.load(&engine);
        let mut first = small.compile(&engine, &loaded);
        for position in 0..2 {
            small.write_inputs(&loaded, position);
            first.run().unwrap();
        }
        // The same text continues with a graph that reads more of the cache.
        let mut next = grown.compile(&engine, &loaded);
        device.take_log();
        for position in 2..4 {
            grown.write_inputs(&loaded, position);
            next.run().unwrap();
        }
        let log = device.take_log();
        assert!(!log.iter().any(|call| matches!(call, Call::CreateGraph(_))));
        // The graph instance of the first plan now has the new stage table.
        assert!(log.iter().any(|call| matches!(call, Call::UpdateNode(_))));
        assert_eq!(
            log.iter()
                .filter(|call| **call == Call::LaunchGraph)
                .count(),
            2
        );
        // The KV cache is that of the text.
        assert!(read(&loaded.buffers[1]) == plain[0], "seed {seed}");
    }
}

/// A log subscriber that keeps messages and levels.
#[derive(Default, Clone)]
struct Log(Arc<Mutex<Vec<(Level, String)>>>);

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        let line = (*event.metadata().level(), text.0);
        self.0.lock().unwrap().push(line);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn nodes_outside_steps_are_logged_once() {
    let lines_of = |model: Model| {
        let log = Log::default();
        let compile_two = || {
            let engine = engine_with(&Arc::new(Spy::logging()), policy());
            for seen in [32, 64] {
                let built = model.graph(StepShape { tokens: 1, seen });
                let loaded = built.load(&engine);
                built.compile(&engine, &loaded);
            }
        };
        tracing::subscriber::with_default(log.clone(), || {
            // Another test's thread, without a subscriber, may register a call site while this
            // subscriber is added, and then turns the call site off.
            compile_two();
            tracing::callsite::rebuild_interest_cache();
            log.0.lock().unwrap().clear();
            compile_two();
        });
        let lines = log.0.lock().unwrap();
        lines.clone()
    };
    let f16 = Model {
        weights: Type::F16,
        ..TINY
    };
    let lines = lines_of(f16);
    assert!(lines.is_empty(), "all is one step: {lines:?}");
    let lines = lines_of(Model {
        weights: Type::Q4_1,
        ..TINY
    });
    // Both graphs, which differ in the length of the cache.
    let [(level, line)] = lines.as_slice() else {
        panic!("{lines:?}");
    };
    assert_eq!(*level, Level::INFO);
    for wanted in ["MUL_MAT: its kernel has no stage", "launches"] {
        assert!(line.contains(wanted), "{wanted}: {line}");
    }
}

#[test]
fn stage_tables_count_as_memory_of_the_device() {
    let device = Arc::new(Spy::running());
    let engine = engine_with(&device, policy());
    let built = TINY.graph(DECODE);
    let loaded = built.load(&engine);
    device.take_log();
    let plan = built.compile(&engine, &loaded);
    let log = device.take_log();
    let (mut allocated, mut freed) = (0, 0);
    for call in &log {
        match call {
            Call::Alloc(bytes) => allocated += bytes,
            Call::Free(bytes) => freed += bytes,
            _ => {}
        }
    }
    let allocated = allocated - freed;
    assert!(allocated > 0, "{log:?}");
    assert_eq!(plan.device_bytes(), allocated);
}
