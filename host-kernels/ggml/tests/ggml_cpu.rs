//! The engine on ggml's own CPU backend, compared with the CPU engine.

#[path = "../../../tests/common/mod.rs"]
mod common;

use std::path::PathBuf;
use std::sync::Arc;

use common::cached;
use vgpu_check::{Case, Outcome};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_ggml::{GgmlEngine, LibraryError};

/// The folders in the cache with builds of ggml whose CPU backend is a file: the oldest supported
/// release, the newest, and the release that most tests run on.
const BUILDS: [&str; 3] = [
    "build-ggml-b10488",
    "build-llama-cpp-sys-2-0.1.161",
    "build-llama-0.3.36",
];

/// Set by `cargo xtask test`, which has made every folder before.
const ALL: &str = "VGPU_TEST_ALL_GGML";

/// The CPU backends of the builds. A plain `cargo test` leaves out those that are not in the cache.
fn backends() -> Vec<PathBuf> {
    let cache = cached("");
    let mut found = Vec::new();
    for build in BUILDS {
        let before = found.len();
        let mut folders = vec![cache.join(build)];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    folders.push(entry.path());
                } else if entry.file_name() == "libggml-cpu.so" {
                    found.push(entry.path());
                }
            }
        }
        if found.len() == before {
            assert!(
                std::env::var_os(ALL).is_none(),
                "no ggml in {}",
                cache.join(build).display()
            );
            println!("not tested: {build}, which `cargo xtask test` makes");
        }
        // One machine's build of several is enough.
        found.truncate(before + 1);
    }
    assert!(
        !found.is_empty(),
        "no ggml in {}: run `cargo xtask setup`",
        cache.display()
    );
    found
}

fn cpu() -> Arc<dyn Engine> {
    Arc::new(CpuEngine::new(2, None).unwrap())
}

/// Whether a case of ARGSORT differs in the order of equal elements only, which ggml leaves open:
/// the positions of a few elements, and not by much.
fn differs_in_ties(case: &Case) -> bool {
    case.name.starts_with("ARGSORT")
        && matches!(case.outcome, Outcome::Compared { error, .. } if error < 1e-4)
}

/// Compares all cases on the backend at `path`.
fn agrees(path: &std::path::Path) {
    let engine = GgmlEngine::start(path, None, 2, None, cpu()).unwrap();
    let cases = vgpu_check::compare(&engine, &*cpu(), &vgpu_check::Selection::default(), |_| {});
    assert!(cases.len() > 300, "{} cases", cases.len());
    let wrong: Vec<_> = cases
        .iter()
        .filter(|case| !case.is_right() && !differs_in_ties(case))
        .collect();
    assert!(
        wrong.is_empty(),
        "{} of {}: {wrong:#?}",
        wrong.len(),
        cases.len()
    );
}

#[test]
fn every_operator_agrees_with_the_cpu_engine() {
    for path in backends() {
        println!("{}", path.display());
        agrees(&path);
    }
}

#[test]
fn a_file_that_is_no_backend_is_refused() {
    let start = |path: &str| GgmlEngine::start(path.as_ref(), None, 0, None, cpu()).err();
    assert!(matches!(
        start("/nonexistent.so"),
        Some(LibraryError::Load { .. })
    ));
    let libc = start("libc.so.6");
    assert!(
        matches!(&libc, Some(LibraryError::Symbol { symbol, .. }) if symbol == "ggml_version"),
        "{libc:?}"
    );
}

#[test]
fn an_unknown_device_is_refused_with_those_that_exist() {
    let path = backends().remove(0);
    let error = GgmlEngine::start(&path, Some("CUDA7"), 0, None, cpu())
        .err()
        .unwrap();
    let text = error.to_string();
    assert!(text.contains("no device `CUDA7`: it has CPU"), "{text}");
}
