//! The CUDA engine on a driver: the stand-in, which keeps the rules of NVIDIA's.

#[allow(dead_code)] // `batch` and `cuda` use all of it
#[path = "common/guests.rs"]
mod guests;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vgpu_check::model::{Model, TINY_BIASES};
use vgpu_check::{Selection, planned_cases};
use vgpu_cpu::CpuEngine;
use vgpu_cuda::gpu::Gpu;
use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_driver_standin::{in_process, set_faults};
use vgpu_engine::{Engine as _, EngineError, Extent, Memory, RunError, RunStatus, Turn};
use vgpu_transport::ir::Type;

use guests::{Guest, all, launch, model};

/// Few blocks, of which some are uneven.
const SMS: (&str, &str) = ("VGPU_STANDIN_SMS", "3");

fn device(policy: LaunchPolicy) -> Result<CudaEngine, String> {
    let gpu = Gpu::new(0, None).map_err(|error| error.to_string())?;
    CudaEngine::with_policy(Arc::new(gpu), policy).map_err(|error| error.to_string())
}

/// The engine on the first GPU. Each plan that runs a second time becomes a CUDA graph.
fn engine() -> Result<CudaEngine, String> {
    device(LaunchPolicy::default().for_single_nodes())
}

/// Runs the cases that `takes` names. Returns how many there are.
///
/// # Errors
/// The first case that fails or differs.
fn compare(engine: &CudaEngine, takes: &dyn Fn(&str) -> bool) -> Result<usize, String> {
    let cpu = CpuEngine::new(2, None).expect("an engine");
    let selection = Selection { first: 0, takes };
    let cases = vgpu_check::compare(engine, &cpu, &selection, |_| ());
    match cases.iter().find(|case| !case.is_right()) {
        Some(case) => Err(format!("{}: {:?}", case.name, case.outcome)),
        None => Ok(cases.len()),
    }
}

/// A case of each operator: the first that is no product of many weights.
fn one_of_each(engine: &CudaEngine) -> BTreeSet<String> {
    let cases = planned_cases(engine).expect("all cases compile");
    let operator = |name: &str| name.split(' ').next().unwrap_or_default().to_owned();
    let mut seen = BTreeSet::new();
    let names = cases.into_iter().map(|(name, _)| name);
    names.filter(|name| seen.insert(operator(name))).collect()
}

fn starts_and_computes_right() {
    let engine = engine().expect("an engine");
    let cases = one_of_each(&engine);
    let count = compare(&engine, &|name| cases.contains(name)).expect("right results");
    assert!(count > 30, "{count} cases");
}

#[test]
fn engine_computes_right_on_ada() {
    in_process(
        "engine_computes_right_on_ada",
        &[SMS],
        starts_and_computes_right,
    );
}

#[test]
fn engine_computes_right_on_hopper() {
    let settings = [SMS, ("VGPU_STANDIN_DEVICES", "H100")];
    in_process("engine_computes_right_on_hopper", &settings, || {
        starts_and_computes_right();
        let engine = engine().expect("an engine");
        // The kernels for this GPU alone are chosen by the limits that the driver reports.
        let kernels = vgpu_check::planned_kernels(&engine).expect("all cases compile");
        for family in ["vg_gemm_sm90_", "vg_fattn_sm90_"] {
            let is_used = kernels.iter().any(|kernel| kernel.starts_with(family));
            assert!(is_used, "{family}");
        }
    });
}

#[test]
fn code_for_another_gpu_is_an_error_with_its_name() {
    let settings = [SMS, ("VGPU_STANDIN_CODE", "sm_100a")];
    in_process(
        "code_for_another_gpu_is_an_error_with_its_name",
        &settings,
        || {
            let error = engine().err().expect("no kernel loads");
            assert!(error.contains("cuModuleLoadData"), "{error}");
            assert!(error.contains("no kernel image"), "{error}");
        },
    );
}

/// What is compared in the tests of faults: launches, a product, a graph instance.
fn small(name: &str) -> bool {
    let beginnings = [
        "ADD ",
        "MUL_MAT q4_K f32 -> [96,1,",
        "MUL_MAT q4_K f32 -> [96,70,",
    ];
    beginnings
        .iter()
        .any(|beginning| name.starts_with(beginning))
}

/// The entry points that the engine calls at its start and in a run, in order.
fn called(trace: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(trace).expect("a trace");
    let names = text.lines().filter(|name| name.starts_with("cu"));
    names.map(str::to_owned).collect()
}

/// Each entry point fails once, with the code that drivers give for what they lack, and for
/// memory: the engine has an error that names the call, or does without it.
#[test]
fn every_call_may_fail() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("trace");
    let settings = [SMS, ("VGPU_STANDIN_TRACE", trace.to_str().expect("text"))];
    let said = in_process("every_call_may_fail", &settings, || {
        let trace = std::env::var("VGPU_STANDIN_TRACE").expect("a trace");
        let engine = engine().expect("an engine");
        compare(&engine, &small).expect("right results");
        drop(engine);
        let calls = called(Path::new(&trace));
        assert!(calls.len() > 35, "{calls:?}");
        let (mut errors, mut fallbacks) = (0, 0);
        for call in &calls {
            let allocates = ["Mem", "Create", "Load", "Launch"];
            let takes_memory = allocates.iter().any(|part| call.contains(part));
            for code in &["NOT_SUPPORTED", "OUT_OF_MEMORY"][..1 + usize::from(takes_memory)] {
                eprintln!("{call}: {code}");
                set_faults(&format!("{call}:1:{code}"));
                let outcome = self::engine().and_then(|engine| compare(&engine, &small));
                match outcome {
                    Ok(_) => fallbacks += 1,
                    Err(error) => {
                        errors += 1;
                        eprintln!("    {error}");
                        let name = call.trim_end_matches("_v2");
                        let is_clear = error.contains(name) || error.contains("OutOfMemory");
                        assert!(is_clear, "{call}: {error}");
                    }
                }
                // Nothing of it is left.
                set_faults("");
            }
        }
        let engine = self::engine().expect("an engine");
        compare(&engine, &small).expect("right results");
        assert!(
            errors > 20 && fallbacks > 5,
            "{errors} errors, {fallbacks} fallbacks"
        );
    });
    println!("{said}");
}

/// A driver that does not destroy a context keeps the registrations of host memory. The next start
/// must not run into them.
#[test]
fn context_that_is_not_destroyed_is_no_obstacle() {
    in_process(
        "context_that_is_not_destroyed_is_no_obstacle",
        &[SMS],
        || {
            set_faults("cuCtxDestroy:*:UNKNOWN");
            for _ in 0..3 {
                let engine = engine().expect("an engine");
                compare(&engine, &small).expect("right results");
            }
            // Nor one whose engine did not start.
            set_faults("cuCtxDestroy:*:UNKNOWN,cuMemGetAllocationGranularity:1:UNKNOWN");
            assert!(engine().is_err());
            engine().expect("an engine");
        },
    );
}

/// The device is lost after an illegal address, and reopened for what comes after.
#[test]
fn device_is_reopened_after_an_illegal_address() {
    in_process(
        "device_is_reopened_after_an_illegal_address",
        &[SMS],
        || {
            let engine = engine().expect("an engine").with_reopen(|| {
                let gpu = Gpu::new(0, None);
                let gpu = gpu.map_err(|error| EngineError::Device {
                    message: error.to_string(),
                });
                Ok(Arc::new(gpu?))
            });
            compare(&engine, &small).expect("right results");
            set_faults("launch:2:illegal");
            let error = compare(&engine, &small).expect_err("a kernel fails");
            assert!(error.contains("illegal memory access"), "{error}");
            set_faults("");
            assert_eq!(engine.fatal_error(), None);
            compare(&engine, &small).expect("right results");
        },
    );
}

/// Bytes of the weights that two buffers hold.
const WEIGHTS: usize = 300_000;

/// A buffer for weights.
fn for_weights(engine: &CudaEngine, size: usize) -> Result<Arc<dyn Memory>, EngineError> {
    let plain = engine.alloc(size as u64)?;
    let memory = engine.alloc_weights(&plain)?;
    Ok(memory.expect("memory for weights"))
}

/// The bytes of a buffer.
fn read(memory: &Arc<dyn Memory>) -> Result<Vec<u8>, EngineError> {
    let mut bytes = vec![0; memory.size() as usize];
    memory.read(0, bytes.as_mut_slice().into())?;
    Ok(bytes)
}

/// A second buffer attaches the weights of the first, computes nothing of its own, and writes.
fn share(engine: &CudaEngine, extent: &Arc<dyn Extent>) -> Result<(), EngineError> {
    let memory = for_weights(engine, WEIGHTS)?;
    memory.write(0, [3; 500][..].into())?;
    memory.attach(0, extent, &|| false)?;
    memory.freeze();
    memory.write(1000, [9; 70_000][..].into())?;
    memory.fill(200_000, 10, 4)?;
    let bytes = read(&memory)?;
    assert_eq!(
        (bytes[999], bytes[1000], bytes[70_999], bytes[71_000]),
        (5, 9, 9, 5)
    );
    assert_eq!((bytes[200_009], bytes[WEIGHTS - 1]), (4, 5));
    Ok(())
}

/// The memory for bytes that a buffer attaches is another buffer's: none is reserved beside it,
/// also while the buffer is not frozen, and none for a copy before a write.
#[test]
fn attached_weights_take_no_memory_before_their_buffer_is_frozen() {
    /// Without a rounding.
    const SIZE: usize = 1200 << 8;
    let name = "attached_weights_take_no_memory_before_their_buffer_is_frozen";
    in_process(name, &[SMS], || {
        let engine = engine().expect("an engine");
        let one = for_weights(&engine, SIZE).expect("memory");
        one.write(0, vec![5; SIZE][..].into()).expect("a write");
        one.freeze();
        let whole = one.extent(0, SIZE as u64).expect("an extent");
        let free = engine.memory().free;
        let two = for_weights(&engine, SIZE).expect("memory");
        let reserved = free - engine.memory().free;
        assert!(reserved >= SIZE as u64);
        two.attach(0, &whole, &|| false).expect("the same");
        assert_eq!(engine.memory().free, free);
        // Again over itself, and a copy that replaces it.
        two.attach(0, &whole, &|| false).expect("the same");
        assert_eq!(engine.memory().free, free);
        two.write(0, [9; 10][..].into()).expect("a copy");
        assert_eq!(engine.memory().free, free - reserved);
        assert!(read(&one).expect("bytes") == [5; SIZE]);
        let bytes = read(&two).expect("bytes");
        assert_eq!((bytes[9], bytes[10], bytes[SIZE - 1]), (9, 5, 5));
        drop(two);
        assert_eq!(engine.memory().free, free);

        // A part is attached: the memory for the rest stays reserved, and a copy takes none of it.
        let two = for_weights(&engine, 2 * SIZE).expect("memory");
        let before = engine.memory().free;
        two.attach(0, &whole, &|| false).expect("the same");
        let attached = engine.memory().free;
        assert_eq!(attached, before + SIZE as u64);
        two.write(0, [9; 10][..].into()).expect("a copy");
        assert_eq!(engine.memory().free, before);
        two.write(SIZE as u64, vec![1; SIZE][..].into())
            .expect("reserved memory");
        two.freeze();
        drop(two);
        assert_eq!(engine.memory().free, free);

        // Bytes are attached in the middle of a written part. The memory for the rest stays
        // reserved, although the copies of both ends have taken some of it.
        let two = for_weights(&engine, 4 * SIZE).expect("memory");
        two.write(0, vec![1; 2 * SIZE][..].into())
            .expect("reserved memory");
        let before = engine.memory().free;
        two.attach(SIZE as u64 / 2, &whole, &|| false)
            .expect("the same");
        assert_eq!(engine.memory().free, before + SIZE as u64);
        two.write(2 * SIZE as u64, vec![1; 2 * SIZE][..].into())
            .expect("reserved memory");
        assert_eq!(engine.memory().free, before + SIZE as u64);
        drop(two);
        assert_eq!(engine.memory().free, free);
    });
}

/// Two buffers hold the same weights in one piece of memory. Each call of the driver fails once
/// while the second one attaches and writes: the first one's bytes are what they were, and nothing
/// stays allocated.
#[test]
fn weights_are_shared_and_calls_that_fail_change_nothing_of_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("trace");
    let settings = [SMS, ("VGPU_STANDIN_TRACE", trace.to_str().expect("text"))];
    let name = "weights_are_shared_and_calls_that_fail_change_nothing_of_others";
    in_process(name, &settings, || {
        let trace = std::env::var("VGPU_STANDIN_TRACE").expect("a trace");
        let engine = engine().expect("an engine");
        let one = for_weights(&engine, WEIGHTS).expect("memory");
        one.write(0, vec![5; WEIGHTS][..].into()).expect("a write");
        one.freeze();
        let extent = one.extent(0, WEIGHTS as u64).expect("an extent");
        let free = engine.memory().free;
        // What is shared takes no memory.
        let two = for_weights(&engine, WEIGHTS).expect("memory");
        two.attach(0, &extent, &|| false).expect("the same");
        two.freeze();
        assert_eq!(engine.memory().free, free);
        two.fill(0, 1, 1).expect("a copy");
        assert!(engine.memory().free <= free - WEIGHTS as u64);
        drop(two);
        assert_eq!(engine.memory().free, free);
        share(&engine, &extent).expect("memory");
        let (mut errors, mut works) = (0, 0);
        for call in called(Path::new(&trace)) {
            set_faults(&format!("{call}:1:OUT_OF_MEMORY"));
            let outcome = share(&engine, &extent);
            set_faults("");
            match outcome {
                Ok(()) => works += 1,
                Err(error) => {
                    errors += 1;
                    eprintln!("{call}: {error}");
                }
            }
            assert!(read(&one).expect("bytes") == [5; WEIGHTS], "{call}");
            assert_eq!(engine.memory().free, free, "{call}");
        }
        share(&engine, &extent).expect("memory");
        assert!(errors > 2 && works > 2, "{errors} errors, {works} without");
    });
}

/// Guests of a model of one layer, and what each computes alone.
fn guests(engine: &CudaEngine) -> (Vec<Guest>, Vec<Vec<u32>>) {
    let model = Model {
        layers: 1,
        ..model(TINY_BIASES, Type::Q4K)
    };
    let mut guests = Guest::some(engine, model, 1, 3);
    let can_batch = |guest: &Guest| guest.plan.batch_key().is_some();
    assert!(guests.iter().all(can_batch));
    let expected = guests.iter_mut().map(Guest::alone).collect();
    (guests, expected)
}

/// Runs all guests as a batch. Returns how many have failed; the others have the right results.
fn run_together(engine: &CudaEngine, guests: &mut [Guest], expected: &[Vec<u32>]) -> usize {
    let which = all(guests);
    let outcomes = launch(engine, guests, &which, &Turn::new());
    let mut failed = 0;
    for ((guest, expected), outcome) in guests.iter().zip(expected).zip(outcomes) {
        match outcome {
            Ok(RunStatus::Done) => assert!(guest.result() == *expected),
            Err(RunError::Kernel { .. }) => failed += 1,
            other => panic!("{other:?}"),
        }
    }
    failed
}

/// Writes the inputs of all guests; they are in the memory of the device.
fn write_inputs(guests: &[Guest]) {
    for guest in guests {
        guest.write_inputs();
    }
    for guest in guests {
        guest.built.read_result(&guest.loaded);
    }
}

#[test]
fn batches_run_as_launches_and_as_graphs_of_the_driver() {
    let name = "batches_run_as_launches_and_as_graphs_of_the_driver";
    for gpu in ["L4", "H100"] {
        in_process(name, &[SMS, ("VGPU_STANDIN_DEVICES", gpu)], || {
            let engine = device(LaunchPolicy {
                batch: true,
                ..LaunchPolicy::default().for_single_nodes()
            });
            let engine = engine.expect("an engine");
            let (mut guests, expected) = guests(&engine);
            for _ in 0..3 {
                write_inputs(&guests);
                assert_eq!(run_together(&engine, &mut guests, &expected), 0);
            }
            // Launches take the place of a graph that the driver refuses.
            write_inputs(&guests);
            set_faults("cuGraphLaunch:1:OUT_OF_MEMORY");
            assert_eq!(run_together(&engine, &mut guests, &expected), 0);
        });
    }
}

/// The driver refuses one launch: of a member, which fails alone, or a joint one, whose products
/// each member then launches itself.
#[test]
fn a_launch_that_the_driver_refuses_fails_no_more_than_its_member() {
    let name = "a_launch_that_the_driver_refuses_fails_no_more_than_its_member";
    in_process(name, &[SMS], || {
        let engine = device(LaunchPolicy {
            graph_threshold: Duration::ZERO,
            batch: true,
            ..LaunchPolicy::default()
        });
        let engine = engine.expect("an engine");
        let (mut members, mut joint) = (0, 0);
        for nth in (1..40).step_by(2) {
            let (mut guests, expected) = guests(&engine);
            write_inputs(&guests);
            set_faults(&format!("cuLaunchKernel:{nth}:OUT_OF_MEMORY"));
            match run_together(&engine, &mut guests, &expected) {
                0 => joint += 1,
                1 => members += 1,
                failed => panic!("{failed} members have failed"),
            }
            set_faults("");
            write_inputs(&guests);
            assert_eq!(run_together(&engine, &mut guests, &expected), 0);
        }
        assert!(members > 5 && joint > 1, "{members}, {joint}");
    });
}
