//! A backend that computes nodes together wherever ggml allows it, and stores nothing but the last
//! result of each group, leaves the same bytes in memory as one that computes each node.

#[path = "../../../tests/common/backend_counters.rs"]
mod backend_counters;
#[path = "../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;

use std::path::Path;
use std::sync::Arc;

use backend_counters::counters;
use changed_backend::{Changes, changed_backend};
use vgpu_check::model::{Built, Model, StepShape, TINY, TINY_BIASES, TINY_EXPERTS, TINY_GPT_OSS};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Memory;
use vgpu_ggml::{BackendOptions, GgmlEngine};

/// In the first two runs each node may be a piece of its own.
const RUNS: u64 = 5;

/// What is in the buffers that graphs write to after [`RUNS`] runs.
fn memory_after(built: &Built, backend: &Path) -> Vec<Vec<u8>> {
    let cpu = Arc::new(CpuEngine::new(1, None).unwrap());
    let engine = GgmlEngine::start(
        backend,
        &BackendOptions {
            threads: 1,
            ..BackendOptions::default()
        },
        cpu,
    )
    .unwrap();
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    for position in 0..RUNS {
        built.write_inputs(&loaded, position);
        plan.run().expect("it runs");
    }
    let read = |memory: &Arc<dyn Memory>| {
        let mut bytes = vec![0; memory.size() as usize];
        memory.read(0, bytes.as_mut_slice().into()).unwrap();
        bytes
    };
    loaded.buffers[1..].iter().map(read).collect()
}

/// How many groups the backend has computed so far.
fn groups(backend: &Path) -> i32 {
    counters(backend, c"fused_groups").map_or(0, |[count]| count)
}

#[test]
fn nodes_that_ggml_computes_together_leave_the_same_memory() {
    let [plain, fused] = [false, true].map(|fuses| {
        let folder = tempfile::tempdir().unwrap().keep();
        let changes = Changes {
            fuses,
            ..Changes::default()
        };
        changed_backend(&common::cached(""), &folder, &changes)
    });
    let models: [(Model, &str); 4] = [
        (TINY, "dense"),
        (TINY_EXPERTS, "experts"),
        (TINY_BIASES, "biases"),
        (TINY_GPT_OSS, "experts with biases"),
    ];
    for (model, what) in models {
        for tokens in [1, 9] {
            let built = model.graph(StepShape { tokens, seen: 64 });
            let want = memory_after(&built, &plain);
            let before = groups(&fused);
            let got = memory_after(&built, &fused);
            let count = groups(&fused) - before;
            for (got, want) in got.iter().zip(&want) {
                let differing = got.iter().zip(want).filter(|(a, b)| a != b).count();
                assert_eq!(differing, 0, "{what}, {tokens} tokens");
            }
            println!("{what}, {tokens} tokens: {count} groups");
            assert!(count >= 8, "{what}: {count} groups");
        }
    }
    for backend in [plain, fused] {
        std::fs::remove_dir_all(backend.parent().unwrap()).unwrap();
    }
}
