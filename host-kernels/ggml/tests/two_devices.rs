//! Two devices of one backend library, as two GPUs of one maker are.

#[path = "../../../tests/common/backend_counters.rs"]
mod backend_counters;
#[path = "../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;

use std::sync::Arc;

use backend_counters::counters;
use changed_backend::{Changes, changed_backend};
use common::cached;
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_ggml::{BackendOptions, GgmlEngine};

fn cpu() -> Arc<dyn Engine> {
    Arc::new(CpuEngine::new(2, None).unwrap())
}

#[test]
fn two_devices_of_one_library_compute_their_own_graphs() {
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        devices: 2,
        ..Changes::default()
    };
    let path = changed_backend(&cached(""), folder.path(), &changes);
    let engines = ["CPU", "second"].map(|device| {
        let options = BackendOptions {
            device: Some(device),
            threads: 1,
            ..BackendOptions::default()
        };
        GgmlEngine::start(&path, &options, cpu()).unwrap()
    });
    let computed = || counters::<2>(&path, c"computed").unwrap();
    assert_eq!(computed(), [0, 0]);
    // Each engine alone, and then both at the same time.
    let compare = |engine: &GgmlEngine| {
        let takes = |name: &str| {
            ["ADD", "SUB", "SCALE"]
                .iter()
                .any(|op| name.starts_with(op))
        };
        let selection = vgpu_check::Selection {
            takes: &takes,
            ..vgpu_check::Selection::default()
        };
        let cases = vgpu_check::compare(engine, &*cpu(), &selection, |_| {});
        assert!(cases.len() >= 3, "{} cases", cases.len());
        let wrong: Vec<_> = cases.iter().filter(|case| !case.is_right()).collect();
        assert!(wrong.is_empty(), "{}: {wrong:#?}", engine.name());
    };
    compare(&engines[1]);
    let [first, second] = computed();
    assert!(first == 0 && second > 0, "{first} and {second} graphs");
    std::thread::scope(|scope| {
        for engine in &engines {
            scope.spawn(move || compare(engine));
        }
    });
    let [first, both] = computed();
    assert!(first > 0 && both > second, "{first} and {both} graphs");
}
