//! A device that fails every graph from some time on, as one that was unplugged or reset.

#[path = "../../../tests/common/mod.rs"]
mod common;
#[path = "../../../tests/common/failing_backend.rs"]
mod failing_backend;

use std::sync::Arc;

use failing_backend::failing_backend;
use vgpu_check::Outcome;
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_ggml::GgmlEngine;

#[test]
fn every_graph_of_a_lost_device_is_an_error_and_the_engine_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let end = "return GGML_STATUS_FAILED;";
    let path = failing_backend(&common::cached(""), folder.path(), end);
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
