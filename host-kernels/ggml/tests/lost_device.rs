//! Devices that fail every graph: as one that was unplugged or reset, and to see which nodes it
//! gets.

#[path = "../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;

use std::sync::Arc;

use changed_backend::{Changes, changed_backend};
use vgpu_check::Outcome;
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_ggml::GgmlEngine;

#[test]
fn every_graph_of_a_lost_device_is_an_error_and_the_engine_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        end: "return GGML_STATUS_FAILED;",
        ..Changes::default()
    };
    let path = changed_backend(&common::cached(""), folder.path(), &changes);
    let cpu = || Arc::new(CpuEngine::new(2, None).unwrap());
    let engine = GgmlEngine::start(&path, None, 2, None, cpu()).unwrap();
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

/// ggml's allocator gives a tensor what the backend wants for it, and the plugin what its elements
/// have: such nodes are not for the device.
#[test]
fn results_that_want_more_memory_than_their_elements_are_computed_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        end: "return GGML_STATUS_FAILED;",
        greedy: "GGML_OP_CUMSUM",
        ..Changes::default()
    };
    let path = changed_backend(&common::cached(""), folder.path(), &changes);
    let cpu = || Arc::new(CpuEngine::new(2, None).unwrap());
    let engine = GgmlEngine::start(&path, None, 2, None, cpu()).unwrap();
    for (op, is_on_device) in [("CUMSUM", false), ("ADD", true)] {
        let selection = vgpu_check::Selection {
            takes: &|name| name.starts_with(op),
            ..vgpu_check::Selection::default()
        };
        let cases = vgpu_check::compare(&engine, &*cpu(), &selection, |_| {});
        assert!(!cases.is_empty());
        for case in &cases {
            let has_failed = matches!(case.outcome, Outcome::Failed(_));
            assert_eq!(
                (has_failed, case.is_right()),
                (is_on_device, !is_on_device),
                "{case:?}"
            );
        }
        let placed = engine.placement()[op];
        let nodes = [placed.device, placed.fallback];
        assert_eq!(
            nodes.map(|count| count > 0),
            [is_on_device, !is_on_device],
            "{nodes:?}"
        );
    }
}
