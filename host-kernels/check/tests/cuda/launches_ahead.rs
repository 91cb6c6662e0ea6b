//! Programmatic dependent launch: a launch of a CUDA graph begins before those before it are
//! complete, and reads nothing that they write until it has waited for them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vgpu_check::model::{Built, Model, StepShape, TINY, TINY_BIASES, TINY_EXPERTS, TINY_GPT_OSS};
use vgpu_cuda::CudaEngine;
use vgpu_engine::Memory;
use vgpu_transport::ir::Type;

use crate::graphs_from_the_second_run;
use crate::shim::Shim;

/// What is in the buffers that graphs write to after some runs, the last of which are CUDA graphs.
fn memory_after(built: &Built, launches_ahead: bool) -> Vec<Vec<u8>> {
    let mut device = Shim::sm90();
    device.launches_ahead = launches_ahead;
    let device = Arc::new(device);
    let policy = graphs_from_the_second_run();
    let engine = CudaEngine::with_policy(Arc::clone(&device) as _, policy).expect("an engine");
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    for position in 0..4 {
        built.write_inputs(&loaded, position);
        plan.run().expect("it runs");
    }
    let ahead = device.launched_ahead.load(Ordering::Relaxed);
    assert_eq!(ahead > 0, launches_ahead, "{ahead} launches were early");
    let read = |memory: &Arc<dyn Memory>| {
        let mut bytes = vec![0; memory.size() as usize];
        let outcome = memory.read(0, bytes.as_mut_slice().into());
        outcome.expect("it is memory of the engine");
        bytes
    };
    loaded.buffers[1..].iter().map(read).collect()
}

#[test]
fn early_launches_read_nothing_that_those_before_them_write() {
    let with = |weights, cache| Model {
        weights,
        cache,
        width: 256,
        heads: 8,
        key_heads: 2,
        inner: 512,
        ..TINY
    };
    let models = [
        (TINY, "dense"),
        (TINY_EXPERTS, "experts"),
        (TINY_BIASES, "biases"),
        (TINY_GPT_OSS, "experts with biases"),
        (with(Type::Q4K, Type::F16), "Q4_K"),
        (with(Type::F16, Type::Q8_0), "F16 over a quantised cache"),
        (with(Type::Q6K, Type::Bf16), "Q6_K over a cache of BF16"),
    ];
    for (model, what) in models {
        for tokens in [1, 2, 12] {
            let built = model.graph(StepShape { tokens, seen: 64 });
            let one_by_one = memory_after(&built, false);
            let ahead = memory_after(&built, true);
            assert!(one_by_one == ahead, "{what}, {tokens} tokens");
        }
    }
}
