//! The engine on ggml's own CPU backend, compared with the CPU engine.

#[path = "../../../tests/common/mod.rs"]
mod common;
mod graphs;

use std::path::PathBuf;
use std::sync::Arc;

use common::cached;
use vgpu_check::{Case, Outcome};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, Placed, RunStatus, Turn};
use vgpu_ggml::{BackendOptions, GgmlEngine, Library, LibraryError};
use vgpu_gguf::{Rng, TensorType};
use vgpu_transport::bytes::Bytes;
use vgpu_transport::ir::Type;

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
    let engine = GgmlEngine::start(
        path,
        &BackendOptions {
            threads: 2,
            ..BackendOptions::default()
        },
        cpu(),
    )
    .unwrap();
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
    // Otherwise the CPU engine would have been compared with itself.
    let placement = engine.placement();
    let nodes = |count: fn(&Placed) -> u64| placement.values().map(count).sum::<u64>();
    let (device, fallback) = (nodes(|p| p.device), nodes(|p| p.fallback));
    println!("{device} nodes on the backend, {fallback} on the CPU engine");
    for op in OPERATORS_OF_MODELS {
        let placed = placement.get(op).copied().unwrap_or_default();
        assert!(placed.device > 0, "no {op} on the backend: {placed:?}");
    }
    assert!(device > fallback, "{device} of {} nodes", device + fallback);
    repacked_products_agree(path);
}

/// Products with random weights of each type, and with so many columns: the engine that reads
/// copies in the backend's layout, one that reads the guest's bytes, and the CPU engine.
fn repacked_products_agree(path: &std::path::Path) {
    const TYPES: [(Type, TensorType); 6] = [
        (Type::Q4_0, TensorType::Q4_0),
        (Type::Q8_0, TensorType::Q8_0),
        (Type::Q4K, TensorType::Q4K),
        (Type::Q6K, TensorType::Q6K),
        (Type::Iq4Nl, TensorType::Iq4Nl),
        (Type::Mxfp4, TensorType::Mxfp4),
    ];
    const COLUMNS: [u64; 6] = [1, 2, 3, 4, 7, 33];
    const DEPTH: u64 = 256;
    const ROWS: u64 = 64;
    let start = |repacks| {
        let options = BackendOptions {
            threads: 2,
            repacks,
            ..BackendOptions::default()
        };
        GgmlEngine::start(path, &options, cpu()).unwrap()
    };
    let (copying, plain, cpu) = (start(true), start(false), cpu());
    let mut rng = Rng::new(1, 2);
    let mut repacked = Vec::new();
    for ((ty, kind), columns) in TYPES.into_iter().flat_map(|ty| COLUMNS.map(|n| (ty, n))) {
        let row = ty.row_bytes(DEPTH).expect("whole blocks");
        let mut weights = vec![0; (ROWS * row) as usize];
        vgpu_gguf::fill(kind, 0.0, 1.0, &mut rng, &mut weights);
        let mut number = || rng.below(2001) as f32 / 1000.0 - 1.0;
        let vectors: Vec<f32> = (0..DEPTH * columns).map(|_| number()).collect();
        let results_at = 48 << 10;
        let tensors = [
            (ty, [DEPTH, ROWS, 1, 1], 0, 0),
            (Type::F32, [DEPTH, columns, 1, 1], 1, 0),
            (Type::F32, [ROWS, columns, 1, 1], 1, results_at),
        ];
        let run = |engine: &dyn Engine| {
            let buffers = graphs::memory(engine);
            buffers[0].mark_weights();
            buffers[0].write(0, Bytes::from(&*weights)).unwrap();
            graphs::put(&*buffers[1], 0, &vectors);
            let graph = graphs::graph(engine, &tensors, &[(graphs::PRODUCT, 2, &[0, 1])]);
            let mut plan = engine.compile(&graph, &buffers, &|| false).unwrap();
            let copied = copying.repacked_bytes();
            assert_eq!(plan.launch(&Turn::new()), Ok(RunStatus::Done));
            let products = graphs::floats(&*buffers[1], results_at, (ROWS * columns) as usize);
            (products, copied)
        };
        let (of_cpu, _) = run(&*cpu);
        let (of_plain, before) = run(&plain);
        let (of_copies, copied) = run(&copying);
        assert_eq!(before, 0);
        let square = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| x * x).sum::<f32>();
        for found in [&of_plain, &of_copies] {
            let mut errors = found.iter().zip(&of_cpu).map(|(a, b)| a - b);
            let error = square(&mut errors) / square(&mut of_cpu.iter().copied());
            assert!(error < 1e-3, "{ty:?}, {columns} columns: {error}");
        }
        // The kernels add in another order.
        if copied > 0 && of_plain != of_copies {
            repacked.push(ty);
        }
    }
    repacked.dedup();
    println!("other results with weights in the backend's layout: {repacked:?}");
    if cfg!(target_arch = "x86_64") && std::is_x86_feature_detected!("avx2") {
        assert!(repacked.contains(&Type::Q4K), "{repacked:?}");
        assert!(repacked.contains(&Type::Q4_0), "{repacked:?}");
    }
}

/// The variable that names the backend for [`one_build_agrees`].
const BACKEND: &str = "VGPU_TEST_BACKEND";

/// What the backend of each release computes for the models that most people use.
const OPERATORS_OF_MODELS: [&str; 9] = [
    "MUL_MAT",
    "MUL_MAT_ID",
    "GET_ROWS",
    "SET_ROWS",
    "RMS_NORM",
    "ROPE",
    "SOFT_MAX",
    "FLASH_ATTN_EXT",
    "ADD",
];

/// A process has one ggml: each build is loaded by one of its own.
#[test]
fn every_operator_agrees_with_the_cpu_engine() {
    for path in backends() {
        println!("{}", path.display());
        let this = std::env::current_exe().expect("a program");
        let mut one = std::process::Command::new(this);
        one.args(["one_build_agrees", "--exact", "--ignored", "--nocapture"]);
        let output = one.env(BACKEND, &path).output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}\n{errors}");
        let counts = text.lines().find(|line| line.contains("nodes on"));
        println!("{}", counts.expect("the process has compared"));
    }
}

#[test]
#[ignore = "a process of every_operator_agrees_with_the_cpu_engine"]
fn one_build_agrees() {
    let path = std::env::var_os(BACKEND).expect("the path of a backend");
    agrees(path.as_ref());
}

#[test]
fn a_backend_with_another_ggml_than_that_of_the_process_is_refused() {
    let first = backends().remove(0);
    let folder = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        let from = first.with_file_name(name);
        // The names of libraries are links.
        let to = folder.path().join(name);
        std::fs::copy(from, &to).expect("a file");
        to
    };
    copy("libggml-base.so.0");
    let second = copy("libggml-cpu.so");
    let library = Library::load(&first).unwrap();
    let error = Library::load(&second).unwrap_err();
    assert!(
        matches!(&error, LibraryError::OtherGgml { base, .. } if base.starts_with(folder.path())),
        "{error}"
    );
    // The same file by another path is the same ggml.
    let link = folder.path().join("linked");
    std::os::unix::fs::symlink(first.parent().expect("a folder"), &link).unwrap();
    let again = Library::load(&link.join("libggml-cpu.so")).unwrap();
    assert_eq!(again.release(), library.release());
}

#[test]
fn a_file_that_is_no_backend_is_refused() {
    let start =
        |path: &str| GgmlEngine::start(path.as_ref(), &BackendOptions::default(), cpu()).err();
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
fn a_ggml_that_is_not_known_is_refused_with_both_versions() {
    let folder = tempfile::tempdir().unwrap();
    for release in ["0.99.0", "0.1.0"] {
        let (source, library) = ("stub.c", format!("libggml-{release}.so"));
        let code = format!(
            "const char *ggml_version(void) {{ return \"{release}\"; }}\n\
             void *ggml_backend_init(void) {{ __builtin_trap(); }}\n"
        );
        std::fs::write(folder.path().join(source), code).unwrap();
        let mut cc = std::process::Command::new("cc");
        cc.current_dir(folder.path());
        let output = cc
            .args(["-shared", "-fPIC", "-o", &library, source])
            .output();
        assert!(output.expect("a compiler").status.success());
        let error = Library::load(&folder.path().join(&library)).unwrap_err();
        assert!(matches!(error, LibraryError::Release { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(release) && text.contains("0.20"), "{text}");
    }
}

#[test]
fn an_unknown_device_is_refused_with_those_that_exist() {
    let path = backends().remove(0);
    let error = GgmlEngine::start(
        &path,
        &BackendOptions {
            device: Some("CUDA7"),
            ..BackendOptions::default()
        },
        cpu(),
    )
    .err()
    .unwrap();
    let text = error.to_string();
    assert!(text.contains("no device `CUDA7`: it has CPU"), "{text}");
}
