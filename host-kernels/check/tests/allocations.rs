//! Nothing allocates while a graph of the CPU engine runs. (A program of its own: it counts for all
//! threads.)

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use vgpu_check::model::{Family, Model, StepShape, TINY, TINY_EXPERTS};
use vgpu_cpu::CpuEngine;
use vgpu_transport::ir::Type;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to the allocator of the system, which fulfils the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller fulfils the contract of `alloc`, which is that of the system's
        // allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller fulfils the contract of `dealloc`, and the system's allocator has
        // allocated `ptr`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller fulfils the contract of `realloc`, and the system's allocator has
        // allocated `ptr`.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of the later runs of a graph. In the first ones each thread gets the memory that its
/// kernels keep.
fn allocations(model: Model, step: StepShape, threads: usize) -> usize {
    let engine = CpuEngine::new(threads, None).expect("an engine");
    let built = model.graph(step);
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    // Which thread gets which chunk is chance: each gets one of every kind at some time.
    let mut run = |position| {
        built.write_inputs(&loaded, position);
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        plan.run().expect("it runs");
        ALLOCATIONS.load(Ordering::SeqCst) - before
    };
    let first: usize = (0..5).map(&mut run).sum();
    match threads {
        1 => run(0),
        _ => {
            // Chance again: one run without is enough to show that none has to.
            let later: Vec<usize> = (0..10).map(run).collect();
            let least = later.iter().min().expect("some runs");
            assert!(later.iter().sum::<usize>() <= first.max(1), "{later:?}");
            *least
        }
    }
}

#[test]
fn graphs_run_without_allocating() {
    for weights in [
        Type::F32,
        Type::F16,
        Type::Bf16,
        Type::Q8_0,
        Type::Q4_0,
        Type::Q4_1,
        Type::Q5_0,
        Type::Q4K,
        Type::Q5K,
        Type::Q6K,
        Type::Iq4Nl,
        Type::Mxfp4,
    ] {
        let caches = [Type::F16, Type::Q8_0];
        // All types of weights with the common cache.
        let caches = caches
            .into_iter()
            .take(if weights == Type::F16 { 2 } else { 1 });
        for cache in caches {
            let model = Model {
                weights,
                cache,
                width: 256,
                inner: 512,
                heads: 8,
                key_heads: 2,
                ..TINY
            };
            let experts = Model {
                experts: TINY_EXPERTS.experts,
                norms_heads: true,
                ..model
            };
            let biases = Model {
                family: Family::GptOss,
                norms_heads: false,
                ..experts
            };
            // The fusion of products does not depend on the weight type.
            let models = [model, experts, biases];
            let models = match weights {
                Type::F16 | Type::Mxfp4 => &models[..],
                _ => &models[..2],
            };
            for &model in models {
                for tokens in [1, 8, 48] {
                    let step = StepShape { tokens, seen: 64 };
                    for threads in [1, 2] {
                        let count = allocations(model, step, threads);
                        let is_dense = model.experts.is_none();
                        assert_eq!(
                            count, 0,
                            "{weights:?}, {cache:?}, {tokens} tokens, {threads} threads, dense: \
                             {is_dense}"
                        );
                    }
                }
            }
        }
    }
}
