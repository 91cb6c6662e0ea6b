//! Plans: compiled once, run launch by launch, then as graphs, which are updated when the cache
//! grows.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use vgpu_cpu::CpuEngine;
use vgpu_cuda::autotune::{GemmVariant, TuningTable};
use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_cuda_shim::DeviceModel;
use vgpu_engine::{Engine, Plan, RunError, RunStatus, Turn};

use crate::spy::{Call, Fails, Spy, launched};
use crate::{engine_on, engine_with};
use vgpu_check::model::{Built, Loaded, Model, StepShape, TINY, TINY_EXPERTS};

/// A decode step that reads this much of the cache.
fn decode(seen: u64) -> StepShape {
    StepShape { tokens: 1, seen }
}

/// Both engines quantise activations to 8 bits, and round the last place differently.
const TOLERANCE: f32 = 4e-2;

/// The shortest time slices; batches of enough launches become graphs.
const SHORT_SLICES: LaunchPolicy = LaunchPolicy {
    longest_launch: Duration::MAX,
    longest_whole: Duration::MAX,
    time_slice: Duration::ZERO,
    graph_threshold: Duration::MAX,
    fusion: true,
    megakernel: false,
    repack: true,
    batch: false,
    min_graph_launches: 4,
    min_stages: 4,
};

fn count(log: &[Call], of: &Call) -> usize {
    log.iter().filter(|call| *call == of).count()
}

#[test]
fn matrix_products_use_the_fastest_measured_kernel() {
    for (variant, kernel) in [
        (GemmVariant::General, "vg_gemm_q8_0_repacked"),
        (GemmVariant::Narrow, "vg_gemm_sm90_q8_0_repacked_128"),
        (GemmVariant::Wide, "vg_gemm_sm90_q8_0_repacked_256"),
    ] {
        let device = Arc::new(Spy::on_sm90());
        let engine = engine_on(&device).with_tuning(TuningTable::forced(variant));
        let products = products_of(&device, &engine, 72);
        assert!(
            products.iter().all(|name| *name == kernel),
            "{variant:?}: {products:?}"
        );
    }
}

/// The kernels of the products of a step with this number of tokens.
fn products_of(device: &Arc<Spy>, engine: &CudaEngine, tokens: u64) -> Vec<&'static str> {
    let model = Model {
        context: 128,
        ..TINY
    };
    let built = model.graph(StepShape { tokens, seen: 128 });
    let loaded = built.load(engine);
    let mut plan = built.compile(engine, &loaded);
    device.take_log();
    plan.run().expect("it runs");
    let log = device.take_log();
    let mut products = launched(&log);
    products.retain(|name| name.contains("gemm") || name.contains("mmv"));
    assert!(!products.is_empty(), "{log:?}");
    products
}

#[test]
fn few_columns_on_sm_90a_use_the_narrowest_tile_on_tensor_cores() {
    for (tokens, tile) in [
        (9, "_16"),
        (16, "_16"),
        (17, "_32"),
        (32, "_32"),
        (33, "_64"),
        (64, "_64"),
    ] {
        let device = Arc::new(Spy::on_sm90());
        let products = products_of(&device, &engine_on(&device), tokens);
        // The last product has the columns that are read: all of them here.
        let are_few = |name: &&str| name.starts_with("vg_gemm_sm90_") && name.ends_with(tile);
        assert!(products.iter().all(are_few), "{tokens}: {products:?}");
        // Other GPUs multiply groups of columns with the matrix-vector kernels.
        let device = Arc::new(Spy::on(DeviceModel::L4));
        let products = products_of(&device, &engine_on(&device), tokens);
        let are_groups = |name: &&str| name.starts_with("vg_mmv_") && name.ends_with("_cols8");
        assert!(products.iter().all(are_groups), "{tokens}: {products:?}");
    }
}

/// A layer whose prefill of 1024 tokens fills 132 SMs with tiles of attention.
const PREFILL: Model = Model {
    layers: 1,
    width: 256,
    heads: 16,
    key_heads: 8,
    head: 64,
    inner: 256,
    context: 1024,
    ..TINY
};

/// The kernels that a prefill launches on a device.
fn kernels_of_prefill(device: Spy) -> BTreeSet<&'static str> {
    let device = Arc::new(device);
    let engine = engine_on(&device);
    let built = PREFILL.graph(StepShape {
        tokens: 1024,
        seen: 1024,
    });
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    device.take_log();
    plan.run().expect("it runs");
    launched(&device.take_log()).into_iter().collect()
}

/// The families of kernels for sm_90a that a prefill has use for.
const SM90_FAMILIES: [&str; 2] = ["vg_gemm_sm90_", "vg_fattn_sm90_"];

fn uses(kernels: &BTreeSet<&'static str>, family: &str) -> bool {
    kernels.iter().any(|kernel| kernel.starts_with(family))
}

#[test]
fn kernels_for_sm_90a_run_on_h100_and_h200_only() {
    for model in DeviceModel::ALL {
        let kernels = kernels_of_prefill(Spy::on(model));
        for family in SM90_FAMILIES {
            let is_hopper = ["H100", "H200"].contains(&model.name);
            assert_eq!(uses(&kernels, family), is_hopper, "{model:?}: {kernels:?}");
        }
    }
}

#[test]
fn kernels_that_a_device_lacks_or_cannot_launch_are_replaced() {
    for family in SM90_FAMILIES {
        let kernels = kernels_of_prefill(Spy::on_sm90().without(family));
        for each in SM90_FAMILIES {
            assert_eq!(uses(&kernels, each), each != family, "{kernels:?}");
        }
    }
    let less = DeviceModel {
        shared_per_block: DeviceModel::H100.shared_per_block - 1,
        ..DeviceModel::H100
    };
    let kernels = kernels_of_prefill(Spy::on(less));
    assert!(!SM90_FAMILIES.iter().any(|family| uses(&kernels, family)));
}

/// The results of tokens one after the other, each from a run of the plan.
fn results(
    built: &Built,
    loaded: &Loaded,
    plan: &mut dyn Plan,
    tokens: std::ops::Range<u64>,
) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    for position in tokens {
        built.write_inputs(loaded, position);
        plan.run().expect("it runs");
        all.push(built.read_result(loaded));
    }
    all
}

fn oracle(model: Model, tokens: std::ops::Range<u64>) -> Vec<Vec<f32>> {
    let engine = CpuEngine::new(1, None).expect("an engine");
    let built = model.graph(decode(32));
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    results(&built, &loaded, plan.as_mut(), tokens)
}

/// Differences are small compared with the largest result: q8 activations may round the other way.
#[track_caller]
fn assert_near(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    let size = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
    let error = size(&mut got.iter().zip(want).map(|(got, want)| got - want));
    let whole = size(&mut want.iter().copied());
    assert!(error <= TOLERANCE * whole, "off by {error}, of {whole}");
}

#[test]
fn second_run_replays_the_cuda_graph() {
    let device = Arc::new(Spy::logging());
    let engine = engine_on(&device);
    let built = TINY.graph(decode(32));
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    device.take_log();

    plan.run().unwrap();
    let first = device.take_log();
    let all = launched(&first).len();
    assert_eq!(first.len(), all, "launches and nothing else: {first:?}");
    assert!(all > 20);
    plan.run().unwrap();
    assert_eq!(
        device.take_log(),
        [Call::CreateGraph(all), Call::LaunchGraph]
    );
    for _ in 0..3 {
        plan.run().unwrap();
        assert_eq!(device.take_log(), [Call::LaunchGraph]);
    }
    drop(plan);
    assert_eq!(count(&device.take_log(), &Call::DestroyGraph), 1);
}

#[test]
fn grown_kv_cache_updates_launches_in_place() {
    let device = Arc::new(Spy::logging());
    let engine = engine_on(&device);
    let small = TINY.graph(decode(32));
    let loaded = small.load(&engine);
    let mut plan = small.compile(&engine, &loaded);
    plan.run().unwrap();
    plan.run().unwrap();
    device.take_log();
    // A guest sends this graph next, as a patch of the first.
    let large = TINY.graph(decode(64));
    let mut next = large.compile(&engine, &loaded);
    device.take_log();
    next.run().unwrap();
    let log = device.take_log();
    let changes = { log.iter() }
        .filter(|e| matches!(e, Call::UpdateNode(_)))
        .count();
    assert_eq!(launched(&log).len(), 0);
    assert_eq!(count(&log, &Call::LaunchGraph), 1);
    assert_eq!(log.len(), changes + 1, "{log:?}");
    // Attention reads more of the cache in each layer. The mask is longer and moves the memory
    // behind it, so everything may change once, and then nothing more.
    assert!(changes >= 2, "{log:?}");
    next.run().unwrap();
    assert_eq!(device.take_log(), [Call::LaunchGraph]);
    // Both plans are alive and take turns with one graph instance.
    drop(next);
    plan.run().unwrap();
    let log = device.take_log();
    assert_eq!(log.len(), changes + 1);
    assert_eq!(count(&log, &Call::LaunchGraph), 1);
}

#[test]
fn guests_do_not_share_cuda_graphs() {
    let device = Arc::new(Spy::logging());
    let engine = engine_on(&device);
    let built = TINY.graph(decode(32));
    for _ in 0..2 {
        let loaded = built.load(&engine);
        let mut plan = built.compile(&engine, &loaded);
        plan.run().unwrap();
        device.take_log();
        plan.run().unwrap();
        let log = device.take_log();
        assert!(
            matches!(log[..], [Call::CreateGraph(_), Call::LaunchGraph]),
            "{log:?}"
        );
        // The memory stays allocated, so a later plan cannot find the results of this one.
        std::mem::forget((loaded, plan));
    }
}

#[test]
fn replayed_results_are_correct() {
    for model in [TINY, TINY_EXPERTS] {
        let device = Arc::new(Spy::running());
        let engine = engine_on(&device);
        let want = oracle(model, 0..6);
        let built = model.graph(decode(32));
        let loaded = built.load(&engine);
        let mut plan = built.compile(&engine, &loaded);
        let mut got = results(&built, &loaded, plan.as_mut(), 0..4);
        assert!(count(&device.take_log(), &Call::LaunchGraph) >= 3);
        // The same text continues with a graph that reads more of the cache.
        let grown = model.graph(decode(64));
        let mut next = grown.compile(&engine, &loaded);
        got.extend(results(&grown, &loaded, next.as_mut(), 4..6));
        let log = device.take_log();
        assert!(
            !log.iter().any(|call| matches!(call, Call::CreateGraph(_))),
            "{log:?}"
        );
        assert!(count(&log, &Call::LaunchGraph) >= 2);
        for (got, want) in got.iter().zip(&want) {
            assert_near(got, want);
        }
    }
}

#[test]
fn device_without_cuda_graphs_launches_kernels_one_by_one() {
    let device = Arc::new(Spy::running());
    device.fail(Fails::Graphs);
    let engine = engine_on(&device);
    let built = TINY.graph(decode(32));
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    let got = results(&built, &loaded, plan.as_mut(), 0..3);
    for (got, want) in got.iter().zip(&oracle(TINY, 0..3)) {
        assert_near(got, want);
    }
    let log = device.take_log();
    assert_eq!(count(&log, &Call::LaunchGraph), 0);
    assert!(launched(&log).len() > 60);
}

#[test]
fn faults_are_detected_in_replays() {
    let device = Arc::new(Spy::running());
    let engine = engine_on(&device);
    let built = TINY.graph(decode(32));
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    results(&built, &loaded, plan.as_mut(), 0..2);
    built.write_input(&loaded, "tokens", 1000);
    let error = plan.run().unwrap_err();
    assert!(
        matches!(
            error,
            RunError::Index {
                node: 0,
                op: "GET_ROWS",
                index: 1000,
                count: 40
            }
        ),
        "{error:?}"
    );
    assert!(count(&device.take_log(), &Call::LaunchGraph) > 0);
    // The next run is not affected.
    let got = results(&built, &loaded, plan.as_mut(), 1..3);
    assert_near(&got[1], &oracle(TINY, 0..3)[2]);
}

#[test]
fn plan_yields_and_resumes() {
    let device = Arc::new(Spy::running());
    let engine = engine_with(&device, SHORT_SLICES);
    let step = StepShape {
        tokens: 9,
        seen: 32,
    };
    let built = TINY.graph(step);
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    built.write_inputs(&loaded, 0);
    plan.run().unwrap();
    let want = built.read_result(&loaded);

    // Another guest, which uses the same scratch memory.
    let other = TINY_EXPERTS.graph(step);
    let other_loaded = other.load(&engine);
    let mut other_plan = other.compile(&engine, &other_loaded);
    other.write_inputs(&other_loaded, 0);
    other_plan.run().unwrap();
    let other_want = other.read_result(&other_loaded);

    let over = Turn::new();
    over.set_end(Some(Duration::ZERO));
    for _ in 0..3 {
        built.write_inputs(&loaded, 0);
        let mut yields = 0;
        while plan.launch(&over).unwrap() == RunStatus::Yielded {
            yields += 1;
            other.write_inputs(&other_loaded, 0);
            other_plan.run().unwrap();
            assert_eq!(other.read_result(&other_loaded), other_want);
            assert!(yields < 1000, "every turn gets ahead");
        }
        plan.wait().unwrap();
        assert!(yields > 10, "{yields}");
        assert_eq!(built.read_result(&loaded), want);
    }
}

#[test]
fn fault_is_reported_to_the_submitting_guest() {
    let device = Arc::new(Spy::running());
    let engine = engine_with(&device, SHORT_SLICES);
    let built = TINY.graph(StepShape {
        tokens: 9,
        seen: 32,
    });
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    built.write_inputs(&loaded, 0);
    plan.run().unwrap();
    built.write_input(&loaded, "tokens", -1);
    let over = Turn::new();
    over.set_end(Some(Duration::ZERO));
    // In the first slice; no other plan may run in it.
    let error = plan.launch(&over).unwrap_err();
    assert!(
        matches!(
            error,
            RunError::Index {
                node: 0,
                index: -1,
                ..
            }
        ),
        "{error:?}"
    );
    built.write_inputs(&loaded, 0);
    plan.run().expect("the next run begins anew");
}

#[test]
fn scratch_memory_is_shared_between_plans() {
    let device = Arc::new(Spy::logging());
    let engine = engine_on(&device);
    let backed = |log: Vec<Call>| -> i64 {
        { log.iter() }
            .map(|call| match *call {
                Call::Map(bytes) => bytes as i64,
                Call::Unmap(bytes) => -(bytes as i64),
                _ => 0,
            })
            .sum()
    };
    let built = TINY.graph(decode(32));
    let loaded = built.load(&engine);
    let first = built.compile(&engine, &loaded);
    let one = backed(device.take_log());
    assert!(one > 0, "quantised products round their activations there");
    assert_eq!(first.device_working_bytes(), one as u64);
    let second = built.compile(&engine, &loaded);
    assert_eq!(backed(device.take_log()), 0);
    let large = TINY.graph(StepShape {
        tokens: 512,
        seen: 64,
    });
    let third = large.compile(&engine, &loaded);
    let more = backed(device.take_log());
    assert!(more > 0);
    drop((first, second, third));
    assert_eq!(backed(device.take_log()), -(one + more));

    // Compilation takes none, so that the plan can be charged for it before. Without memory a run
    // fails with the numbers, and the plan keeps nothing.
    device.fail(Fails::Memory);
    let plan = engine.compile(&large.valid(&engine), &loaded.buffers, &|| false);
    let mut plan = plan.expect("it needs no memory yet");
    let error = plan.reserve().expect_err("there is no memory").to_string();
    assert!(error.contains("out of memory"), "{error}");
    let error = plan.run().expect_err("there is no memory").to_string();
    assert!(error.contains("out of memory"), "{error}");
    assert_eq!(backed(device.take_log()), 0);
    device.fail(None);
    plan.run().expect("there is memory");
    assert_eq!(backed(device.take_log()), one + more);
}

#[test]
fn timeline_has_every_node_once_and_the_results_of_a_run() {
    for model in [TINY, TINY_EXPERTS] {
        let device = Arc::new(Spy::running());
        let engine = engine_on(&device);
        let built = model.graph(decode(32));
        let loaded = built.load(&engine);
        let mut plan = built.compile(&engine, &loaded);
        built.write_inputs(&loaded, 0);
        plan.run().expect("it runs");
        let wanted = built.read_result(&loaded);
        built.write_inputs(&loaded, 0);
        device.take_log();
        let spans = plan.profile().expect("it runs");
        assert_eq!(built.read_result(&loaded), wanted);
        assert!(
            spans
                .iter()
                .all(|span| span.seconds > 0.0 && !span.nodes.is_empty())
        );
        let mut nodes: Vec<usize> = spans.iter().flat_map(|span| span.nodes.clone()).collect();
        nodes.sort_unstable();
        let all: Vec<usize> = (0..built.graph.nodes.len()).collect();
        assert_eq!(nodes, all);
        assert!(
            launched(&device.take_log()).len() >= spans.len(),
            "each part has a launch"
        );
        // The next run works as before.
        built.write_inputs(&loaded, 0);
        plan.run().expect("it runs");
        assert_eq!(built.read_result(&loaded), wanted);
    }
}

#[test]
fn a_step_is_one_upload_one_replay_and_one_wait() {
    let device = Arc::new(Spy::running());
    let engine = engine_on(&device);
    let built = TINY.graph(decode(32));
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    let want = oracle(TINY, 0..5);
    let turn = Turn::new();
    for (position, want) in want.iter().enumerate() {
        device.take_whole_log();
        // As a session does when the guest asks for the result while the step is under way.
        built.write_inputs(&loaded, position as u64);
        assert_eq!(device.take_whole_log(), [], "nothing goes up by itself");
        assert_eq!(plan.launch(&turn).unwrap(), RunStatus::InFlight);
        let got = built.read_result(&loaded);
        plan.wait().unwrap();
        assert_near(&got, want);
        let log = device.take_whole_log();
        if position >= 2 {
            let wanted = [
                Call::UploadBatch,
                Call::LaunchGraph,
                Call::Download(4 * got.len()),
            ];
            assert_eq!(log, wanted, "a download waits until it is there");
        }
    }
    // If nobody asks for the result, there is still one wait, and only one.
    built.write_inputs(&loaded, 5);
    assert_eq!(plan.launch(&turn).unwrap(), RunStatus::InFlight);
    plan.wait().unwrap();
    plan.wait().unwrap();
    assert_eq!(
        device.take_whole_log(),
        [Call::UploadBatch, Call::LaunchGraph, Call::Wait]
    );
}

#[test]
fn fault_of_a_step_in_flight_is_reported_at_completion() {
    let device = Arc::new(Spy::running());
    let engine = engine_on(&device);
    let built = TINY.graph(decode(32));
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    let turn = Turn::new();
    for _ in 0..3 {
        built.write_inputs(&loaded, 0);
        built.write_input(&loaded, "tokens", 1000);
        assert_eq!(plan.launch(&turn).unwrap(), RunStatus::InFlight);
        built.read_result(&loaded);
        let error = plan.wait().unwrap_err();
        assert!(
            matches!(error, RunError::Index { index: 1000, .. }),
            "{error:?}"
        );
        // A plan that is dropped during a run takes its faults along.
        let mut other = built.compile(&engine, &loaded);
        assert_eq!(other.launch(&turn).unwrap(), RunStatus::InFlight);
        drop(other);
        built.write_inputs(&loaded, 0);
        plan.run().unwrap();
    }
}

/// The most launches that use the same converted activations in the graphs of these tests.
const MAX_TIED: usize = 8;

#[test]
fn a_plan_that_never_ran_hands_few_launches_to_the_device_at_a_time() {
    let device = Arc::new(Spy::logging());
    let engine = engine_with(&device, SHORT_SLICES);
    let built = TINY.graph(decode(32));
    let loaded = built.load(&engine);
    let over = Turn::new();
    over.set_end(Some(Duration::ZERO));
    let mut plan = built.compile(&engine, &loaded);
    device.take_log();
    let (mut turns, mut all) = (0, 0);
    loop {
        let status = plan.launch(&over).expect("it runs");
        let count = launched(&device.take_log()).len();
        assert!(count <= MAX_TIED, "{count} launches in turn {turns}");
        (turns, all) = (turns + 1, all + count);
        if status != RunStatus::Yielded {
            break;
        }
    }
    assert!(
        all > 2 * MAX_TIED && turns > 2,
        "{all} launches in {turns} turns"
    );
}

#[test]
fn a_plan_is_cancelled_between_the_launches_of_its_first_run() {
    let device = Arc::new(Spy::logging());
    let engine = engine_on(&device);
    let built = TINY.graph(decode(32));
    let loaded = built.load(&engine);
    let over = Turn::new();
    over.set_end(Some(Duration::ZERO));
    let mut plan = built.compile(&engine, &loaded);
    device.take_log();
    assert_eq!(plan.launch(&over), Ok(RunStatus::Yielded));
    let count = launched(&device.take_log()).len();
    assert!(count <= MAX_TIED, "{count} launches before the first check");
    // A plan that is dropped hands nothing more to the device.
    drop(plan);
    assert_eq!(launched(&device.take_log()).len(), 0);
}
