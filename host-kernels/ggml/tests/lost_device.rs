//! Devices that cannot be used: one that fails every graph, as one that was unplugged or reset, and
//! one whose backend keeps objects for tensors.

#[path = "../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;

use std::sync::Arc;

use changed_backend::{Changes, changed_backend};
use vgpu_check::Outcome;
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_ggml::{BackendOptions, GgmlEngine, LibraryError};

#[test]
fn every_graph_of_a_lost_device_is_an_error_and_the_engine_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        end: "return GGML_STATUS_FAILED;",
        ..Changes::default()
    };
    let path = changed_backend(&common::cached(""), folder.path(), &changes);
    let cpu = || Arc::new(CpuEngine::new(2, None).unwrap());
    let engine = GgmlEngine::start(
        &path,
        &BackendOptions {
            threads: 2,
            ..BackendOptions::default()
        },
        cpu(),
    )
    .unwrap();
    assert_eq!(engine.fatal_error(), None);
    let selection = vgpu_check::Selection {
        takes: &|name| ["ADD", "SUB", "MUL "].iter().any(|op| name.starts_with(op)),
        ..vgpu_check::Selection::default()
    };
    let cases = vgpu_check::compare(&engine, &*cpu(), &selection, |_| {});
    assert!(cases.len() >= 3, "{} cases", cases.len());
    for case in &cases {
        let said = "the backend of ggml returned status -1";
        assert!(
            matches!(&case.outcome, Outcome::Failed(error) if error.to_string().contains(said)),
            "{case:?}"
        );
    }
    let reason = engine.fatal_error().unwrap();
    assert!(reason.contains("graphs in a row"), "{reason}");
}

/// OpenCL ends the process at the first tensor that `init_tensor` has not seen.
#[test]
fn a_backend_that_keeps_objects_for_tensors_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        name: "OpenCL",
        ..Changes::default()
    };
    let path = changed_backend(&common::cached(""), folder.path(), &changes);
    let cpu = Arc::new(CpuEngine::new(1, None).unwrap());
    let error = GgmlEngine::start(
        &path,
        &BackendOptions {
            threads: 1,
            ..BackendOptions::default()
        },
        cpu,
    )
    .err()
    .expect("OpenCL");
    assert!(
        matches!(error, LibraryError::TensorObjects { .. }),
        "{error}"
    );
}
