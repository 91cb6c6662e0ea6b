//! `vgpu gpu-check` and `vgpu serve` on the stand-in for NVIDIA's driver, with faulty kernels.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Build, Guest, bytes};
use serde_json::Value;
use served::{Scratch, Serve, vgpu};
use vgpu_cuda::kernel_set::{is_simple, names};
use vgpu_transport::ir::{Op, Precision, Type};
use vgpu_transport::wire::GraphId;

/// The kernels that are faulty, and how.
const FAULTY: [(&str, &str); 3] = [
    ("vg_gemm_q4_k", "nothing"),
    ("vg_mmv_q5_1", "illegal"),
    ("vg_mmv_q5_0", "hang"),
];

/// Further kernels that are neither simple nor disabled: those that the faulty ones need, and some
/// that need them, too, and are right.
const OTHERS: [&str; 4] = [
    "vg_convert_f16",
    "vg_gemm_q5_0",
    "vg_quantize_q8",
    "vg_mmv_q4_k",
];

/// The command, where the stand-in is the driver and these kernels are faulty. Kernels that this
/// test does not need are disabled if `is_small`: their checks take minutes.
fn on_standin(arguments: &[&str], cache: &Path, is_small: bool) -> Command {
    let is_needed = |name: &str| {
        is_simple(name)
            || OTHERS.contains(&name)
            || FAULTY.iter().any(|(faulty, _)| *faulty == name)
    };
    let unneeded: Vec<&str> = { names().iter().copied() }
        .filter(|name| is_small && !is_needed(name))
        .collect();
    let faults = FAULTY.map(|(kernel, fault)| format!("{kernel}:*:{fault}"));
    let mut command = vgpu(arguments);
    command
        .env(
            "LD_LIBRARY_PATH",
            vgpu_driver_standin::folder().expect("the library"),
        )
        .env("VGPU_STANDIN_SMS", "3")
        .env("VGPU_STANDIN_FAULTS", faults.join(","))
        .env("VGPU_DISABLE", unneeded.join(","))
        .env("VGPU_CACHE", cache);
    command
}

/// The products of 1, 3, 8 and 70 columns with weights of these types.
const CASES: &str = r"^MUL_MAT (q4_K|q5_1|q5_0|q2_K) f32 -> \[96,";

#[test]
fn check_names_the_faulty_kernels_and_goes_on() {
    let scratch = Scratch::new("standin-check");
    let report = scratch.path().join("check.json");
    let text = |path: &PathBuf| path.to_str().expect("text").to_owned();
    let output = on_standin(
        &[
            "gpu-check",
            "--engine=cuda",
            "--compare-only",
            "--tokens=0",
            "--silence=5",
            "--only",
            CASES,
            "--json",
            &text(&report),
        ],
        scratch.path(),
        false,
    )
    .output()
    .expect("vgpu gpu-check");
    let table = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{table}\n{said}");
    let report = fs::read_to_string(&report).expect("a report");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let cases = report["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 4 * 7, "{table}\n{said}");
    let uses = |case: &Value, kernel: &str| {
        let kernels = case["kernels"].as_array().expect("kernels");
        kernels.iter().any(|name| name == kernel)
    };
    for (kernel, _) in FAULTY {
        assert!(table.contains(kernel), "{kernel}:\n{table}\n{said}");
        assert!(cases.iter().any(|case| uses(case, kernel)), "{kernel}");
    }
    for case in cases {
        let is_faulty = FAULTY.iter().any(|(kernel, _)| uses(case, kernel));
        assert_eq!(case["right"] == true, !is_faulty, "{case}");
    }
    let reason = |kernel: &str| {
        let case = { cases.iter() }.find(|case| uses(case, kernel));
        case.expect("a case")["failed"].as_str().unwrap_or_default()
    };
    let illegal = "an illegal memory access";
    assert!(reason("vg_mmv_q5_1").contains(illegal), "{table}");
    assert!(reason("vg_mmv_q5_0").contains("silent for"), "{table}");
}

/// A block of 256 weights that are all 1, or 8 blocks of 32.
fn ones(ty: Type) -> Vec<u8> {
    const ONE: [u8; 2] = [0x00, 0x3c]; // as f16
    let mut block = Vec::from(ONE);
    match ty {
        // The scale, a fifth bit for each quant, quants of 17 - 16.
        Type::Q5_0 => {
            block.extend([0xff; 4]);
            block.extend([0x11; 16]);
        }
        // No scale, a minimum of 1, a fifth bit for each quant, quants.
        Type::Q5_1 => {
            block = vec![0, 0];
            block.extend(ONE);
            block.extend([0; 20]);
        }
        // The scale of the scales, no minimum, scales of 1 for each 32 quants, quants of 1.
        Type::Q4K => {
            block.extend([0, 0]);
            block.extend([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]);
            block.extend([0x11; 128]);
        }
        _ => panic!("{ty:?}"),
    }
    block.repeat(256 / ty.block_elements() as usize)
}

/// The product of weights that are all 1, 256 in each of 64 rows, with columns of ones.
fn product(guest: &mut Guest, number: u64, ty: Type, columns: u64) -> Vec<f32> {
    let weights = guest.alloc_with(&ones(ty).repeat(64));
    let activations = guest.alloc_with(&bytes(&vec![1.0; 256 * columns as usize]));
    let result = guest.alloc(64 * columns * 4);
    let mut build = Build::default();
    let w = build.tensor(ty, [256, 64, 1, 1], weights);
    let x = build.tensor(Type::F32, [256, columns, 1, 1], activations);
    let y = build.tensor(Type::F32, [64, columns, 1, 1], result);
    let op = Op::MulMat {
        accumulator: Precision::Default,
        activation: Precision::Default,
        hadamard: false,
    };
    build.node(op, y, &[w, x]);
    guest.graph(GraphId(number), &build.0);
    guest.submit(GraphId(number));
    guest.read_f32(result, 64 * columns)
}

#[test]
fn executor_answers_right_without_the_faulty_kernels() {
    let scratch = Scratch::new("standin-serve");
    let check = ["gpu-check", "self-check", "--engine=cuda", "--silence=6"];
    let output = on_standin(&check, scratch.path(), true).output();
    let output = output.expect("vgpu gpu-check self-check");
    let table = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{table}\n{said}");
    let faulty = table
        .lines()
        .filter(|line| line.starts_with("FAULTY"))
        .count();
    assert_eq!(faulty, FAULTY.len(), "{table}\n{said}");
    for (kernel, _) in FAULTY {
        assert!(
            table.contains(&format!("FAULTY  {kernel}: ")),
            "{table}\n{said}"
        );
    }

    let socket = scratch.socket();
    let endpoint = format!("--listen=unix:{}", socket.display());
    let serve = ["serve", "--engine=cuda", &endpoint];
    let serve = Serve::of(on_standin(&serve, scratch.path(), true));
    let mut guest = serve.guest(&socket);
    let products = [(Type::Q4K, 70), (Type::Q5_1, 1), (Type::Q5_0, 1)];
    for (number, (ty, columns)) in products.into_iter().enumerate() {
        let found = product(&mut guest, number as u64, ty, columns);
        let is_right = |value: &f32| (value - 256.0).abs() < 1.0;
        assert!(found.iter().all(is_right), "{ty:?}: {found:?}");
    }
    drop(guest);
    serve.signal(rustix::process::Signal::TERM);
    let (status, log) = serve.wait();
    assert!(status.success(), "{log}");
    for (kernel, _) in FAULTY {
        assert!(
            log.contains(&format!("the kernel {kernel} is not used")),
            "{log}"
        );
    }
}

/// The library of the driver is newer than the module in the kernel.
#[test]
fn executor_that_starts_after_an_upgrade_of_the_driver_names_its_error() {
    const WORDS: &str = "system has unsupported display driver / cuda driver combination";
    let scratch = Scratch::new("standin-upgrade");
    let socket = scratch.socket();
    let endpoint = format!("--listen=unix:{}", socket.display());
    let upgraded = |engine: &str| {
        let arguments = ["serve", "--memory=64M", engine, &endpoint];
        let mut command = on_standin(&arguments, scratch.path(), true);
        command.env("VGPU_STANDIN_FAULTS", "cuInit:*:SYSTEM_DRIVER_MISMATCH");
        command
    };
    let output = upgraded("--engine=cuda").output();
    let output = output.expect("the command starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(WORDS), "{said}");
    let serve = Serve::of(upgraded("--engine=auto"));
    drop(serve.guest(&socket));
    serve.signal(rustix::process::Signal::TERM);
    let (status, log) = serve.wait();
    assert!(status.success(), "{log}");
    assert!(
        log.contains("auto: the engine cpu") && log.contains(WORDS),
        "{log}"
    );
}
