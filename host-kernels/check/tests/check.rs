//! The self-test of `vgpu gpu-check`, on the CPU engine and on the CUDA engine over the shim.

#[path = "../../shim/device.rs"]
mod shim;

use std::sync::Arc;
use std::time::Duration;

use vgpu_check::{Options, Outcome, Selection, Step, TuneShapes, Work};
use vgpu_cpu::CpuEngine;
use vgpu_cuda::CudaEngine;
use vgpu_cuda::autotune::{GemmVariant, TuningTable};
use vgpu_engine::Engine;
use vgpu_transport::ir::Type;

fn cpu() -> CpuEngine {
    CpuEngine::new(2, None).expect("an engine")
}

/// Small sizes: the shim runs threads as fibers.
const SMALL: Options = Options {
    weights: 64 << 10,
    size: 256,
    time: Duration::ZERO,
    budget: None,
};

#[test]
fn kernels_agree_with_the_cpu_engine() {
    let engine = CudaEngine::new(Arc::new(shim::Shim::default())).expect("an engine");
    let mut seen = 0;
    let cases = vgpu_check::compare(&engine, &cpu(), &Selection::default(), |step| {
        seen += usize::from(matches!(step, Step::Ends(_)));
    });
    assert_eq!(seen, cases.len());
    for case in &cases {
        assert!(case.is_right(), "{}: {:?}", case.name, case.outcome);
    }
    // Results that differ by rounding show that cases compare something.
    let compared = |case: &&vgpu_check::Case| match case.outcome {
        Outcome::Compared { error, .. } => error > 0.0,
        _ => false,
    };
    assert!(cases.iter().filter(compared).count() > cases.len() / 4);
}

#[test]
fn rates_are_measured() {
    let engine = cpu();
    let ceilings = vgpu_check::ceilings(&engine, &SMALL).expect("copies");
    assert!(ceilings.within > 0.0 && ceilings.upload > 0.0 && ceilings.download > 0.0);
    let (rates, left_out) = vgpu_check::rates(&engine, &SMALL, &Selection::default(), |_| ());
    assert_eq!(left_out, 0);
    for rate in &rates {
        let per_second = rate
            .rate
            .as_ref()
            .unwrap_or_else(|e| panic!("{}: {e}", rate.name));
        assert!(*per_second > 0.0 && rate.seconds > 0.0, "{}", rate.name);
    }
    assert!(rates.iter().any(|rate| rate.work == Work::Operations));
}

#[test]
fn rate_measurement_respects_its_time_limit() {
    let no_time = Options {
        budget: Some(Duration::ZERO),
        ..SMALL
    };
    let (rates, left_out) = vgpu_check::rates(&cpu(), &no_time, &Selection::default(), |_| ());
    assert!(rates.len() <= 1 && left_out > 50, "{left_out}");
}

#[test]
fn both_engines_generate_the_same_text() {
    let engine = CudaEngine::new(Arc::new(shim::Shim::default())).expect("an engine");
    for text in vgpu_check::compare_decoding(&engine, &cpu(), 4, &Selection::default(), |_| ()) {
        assert!(text.is_same(), "{text:?}");
    }
}

#[test]
fn wrong_results_are_detected() {
    let wrong = vgpu_check::Case {
        name: "NaN".into(),
        outcome: Outcome::Compared {
            error: f64::NAN,
            limit: 1.0,
        },
        kernels: Vec::new(),
    };
    assert!(!wrong.is_right());
    assert!(cpu().capabilities().rules().len() > 10);
}

#[test]
fn families_of_kernels_without_a_case_are_reported() {
    let hopper = CudaEngine::new(Arc::new(shim::Shim::sm90())).expect("an engine");
    let (gemm, fattn) = ("vg_gemm_sm90_q4_0_128", "vg_fattn_sm90_64");
    let untested = |kernels: &[&'static str]| {
        let families = hopper.kernel_families().iter().copied();
        vgpu_check::untested_families(families, ["vg_add"].iter().chain(kernels).copied())
    };
    assert_eq!(untested(&[gemm, fattn]), [""; 0]);
    assert_eq!(untested(&[gemm]), ["vg_fattn_sm90_"]);
    assert_eq!(untested(&[]), ["vg_fattn_sm90_", "vg_gemm_sm90_"]);
    let other = CudaEngine::new(Arc::new(shim::Shim::default())).expect("an engine");
    assert_eq!(other.kernel_families(), [""; 0]);
}

#[test]
fn cases_run_every_family_of_kernels_for_sm_90a() {
    let hopper = CudaEngine::new(Arc::new(shim::Shim::sm90())).expect("an engine");
    let kernels = vgpu_check::planned_kernels(&hopper).expect("all cases compile");
    let families = hopper.kernel_families().iter().copied();
    let untested = vgpu_check::untested_families(families, kernels.iter().copied());
    assert_eq!(untested, [""; 0], "{kernels:?}");
}

#[test]
fn fastest_kernel_of_each_matrix_product_is_selected() {
    let engines = GemmVariant::ALL.map(|variant| {
        let engine = CudaEngine::new(Arc::new(shim::Shim::sm90())).expect("an engine");
        (variant, engine.with_tuning(TuningTable::forced(variant)))
    });
    let variants = engines
        .each_ref()
        .map(|(variant, engine)| (*variant, engine as &dyn Engine));
    let lengths = TuneShapes {
        types: vec![Type::Q4_0, Type::F16],
        rows: vec![40],
        columns: vec![72],
    };
    let mut seen = Vec::new();
    let table = vgpu_check::tune(&variants, &SMALL, &lengths, |tuned| {
        seen.push(tuned.clone())
    });
    assert_eq!((seen.len(), table.len()), (2, 2));
    for tuned in &seen {
        let best = tuned.best().expect("all variants work");
        assert!(
            tuned.rates.iter().all(|(_, rate)| rate.is_ok()),
            "{tuned:?}"
        );
        assert_eq!(table.lookup(tuned.ty, 40, 72), Some(best));
    }
}
