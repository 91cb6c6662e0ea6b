//! Kernels that may not be used: others do their work, or the CPU engine does.

#[path = "common/sample.rs"]
mod sample;
#[path = "../../shim/device.rs"]
mod shim;

use std::collections::BTreeSet;
use std::sync::Arc;

use sample::Sample;
use shim::Shim;
use vgpu_check::{Selection, planned_cases};
use vgpu_cpu::CpuEngine;
use vgpu_cuda::kernel_set::{KernelSet, SIMPLE, is_simple, parse_names};
use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_engine::Engine;
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Shape, Sources, Tensor, Type, validate,
};

fn cpu() -> CpuEngine {
    CpuEngine::new(2, None).expect("an engine")
}

fn engine(device: Shim, is_disabled: impl Fn(&str) -> bool) -> CudaEngine {
    let kernels = Arc::new(KernelSet::without(is_disabled));
    let policy = LaunchPolicy::default();
    CudaEngine::with_kernels(Arc::new(device), policy, kernels).expect("an engine")
}

/// Runs the cases that use `disabled` kernels on a device without them. The results agree with the
/// CPU engine. Returns the kernels that ran instead.
fn compare_without(
    device: impl Fn() -> Shim,
    disabled: &[&'static str],
    takes_case: impl Fn(&str) -> bool,
) -> BTreeSet<&'static str> {
    let is_disabled = |name: &str| disabled.contains(&name);
    let cases = planned_cases(&engine(device(), |_| false)).expect("all cases compile");
    let affected: BTreeSet<_> = { cases.iter() }
        .filter(|(_, kernels)| kernels.iter().any(|kernel| is_disabled(kernel)))
        .map(|(name, _)| name.as_str())
        .filter(|name| takes_case(name))
        .collect();
    assert!(!affected.is_empty(), "no case uses {disabled:?}");
    let selection = Selection {
        first: 0,
        takes: &|name| affected.contains(name),
    };
    let engine = engine(device(), is_disabled);
    let mut ran = BTreeSet::new();
    for case in vgpu_check::compare(&engine, &cpu(), &selection, |_| ()) {
        assert!(case.is_right(), "{}: {:?}", case.name, case.outcome);
        ran.extend(case.kernels);
    }
    let wrong: Vec<_> = ran.iter().filter(|name| is_disabled(name)).collect();
    assert!(wrong.is_empty(), "{wrong:?} are disabled");
    ran
}

/// The families to disable, each with a kernel that then runs: those of the sample.
fn sampled<const N: usize>(
    families: [(&'static str, &'static str); N],
) -> impl Iterator<Item = (&'static str, &'static str)> {
    let sample = Sample::asked();
    let numbered = families.into_iter().enumerate();
    numbered
        .filter(move |(at, _)| sample.is_none_or(|sample| sample.has(*at)))
        .map(|(_, family)| family)
}

/// Whether the first operand has one of a few types: all of them take minutes.
fn has_common_type(case: &str) -> bool {
    let types = ["q8_0", "q4_K", "f16", "f32"];
    case.split(' ').nth(1).is_some_and(|ty| types.contains(&ty))
}

#[test]
fn products_use_the_next_kernels_when_a_family_is_disabled() {
    for (disabled, expected) in sampled([
        ("vg_mmv_*", "vg_mul_vec"),
        ("vg_quantize_q8", "vg_mul_vec"),
        (
            "vg_gemm_q*,vg_gemm_i*,vg_gemm_*f16,vg_gemm_mxfp4*",
            "vg_gemm_any",
        ),
        ("vg_gemm_f32", "vg_gemm_any"),
        ("vg_gemm_*", "vg_mul_mat"),
        ("vg_convert_f16", "vg_gemm_any"),
        ("vg_convert_f16,vg_split_bf16", "vg_mul_mat"),
        ("vg_moe_sort", "vg_mmv_q4_k"),
        ("vg_moe_sort,vg_mmv_*", "vg_mul_mat_id"),
        ("vg_*_repacked*", "vg_mmv_q8_0"),
    ]) {
        let disabled = parse_names(disabled).expect("kernels");
        let is_common = |case: &str| case.starts_with("MUL_MAT") && has_common_type(case);
        let ran = compare_without(Shim::default, &disabled, is_common);
        assert!(ran.contains(expected), "{disabled:?}: {ran:?}");
    }
}

#[test]
fn attention_uses_the_next_kernels_when_a_family_is_disabled() {
    for (disabled, expected) in sampled([
        ("vg_fattn_f16_*", "vg_fattn_f32_128_decode"),
        (
            "vg_fattn_bf16_*,vg_fattn_quant_*",
            "vg_fattn_f32_64_prefill",
        ),
        (
            "vg_fattn_f16_*,vg_fattn_bf16_*,vg_fattn_quant_*,vg_fattn_f32_*",
            "vg_fattn_simt",
        ),
        ("vg_fattn_mask_tiles", "vg_fattn_f16_64_prefill"),
    ]) {
        let disabled = parse_names(disabled).expect("kernels");
        let is_attention = |case: &str| case.starts_with("FLASH_ATTN_EXT");
        let ran = compare_without(Shim::default, &disabled, is_attention);
        assert!(ran.contains(expected), "{disabled:?}: {ran:?}");
    }
}

#[test]
fn kernels_of_sm_90a_are_replaced_by_those_for_any_gpu() {
    for (disabled, expected) in [
        ("vg_gemm_sm90_*", "vg_gemm_q4_k"),
        ("vg_gemm_sm90_*_128", "vg_gemm_sm90_q4_k_256"),
        ("vg_gemm_sm90_*_16", "vg_gemm_sm90_q4_k_32"),
        (
            "vg_gemm_sm90_*_16,vg_gemm_sm90_*_32,vg_gemm_sm90_*_64",
            "vg_mmv_q4_k_cols8",
        ),
        ("vg_convert_f16_sm90", "vg_gemm_q4_k"),
        ("vg_fattn_sm90_*", "vg_fattn_f16_64_prefill"),
        // The kernels of sm_90a trust the classes of mask tiles.
        ("vg_fattn_mask_tiles", "vg_fattn_f16_64_prefill"),
    ] {
        let disabled = parse_names(disabled).expect("kernels");
        let ran = compare_without(Shim::sm90, &disabled, has_common_type);
        assert!(ran.contains(expected), "{disabled:?}: {ran:?}");
    }
}

/// A text of each model on an engine without these kernels.
fn compare_texts(policy: LaunchPolicy, disabled: &str) {
    let disabled = parse_names(disabled).expect("kernels");
    let kernels = KernelSet::without(|name| disabled.contains(&name));
    let device = Arc::new(Shim::default());
    let engine = CudaEngine::with_kernels(device, policy, Arc::new(kernels)).expect("an engine");
    for text in vgpu_check::compare_decoding(&engine, &cpu(), 2, &Selection::default(), |_| ()) {
        assert!(text.is_same(), "without {disabled:?}: {text:?}");
    }
}

#[test]
fn fused_nodes_run_one_by_one_when_their_kernels_are_disabled() {
    let policy = LaunchPolicy::default();
    compare_texts(
        policy,
        "vg_norm_fused,vg_topk_moe,vg_weighted_sum,vg_rope_rows,vg_rope_cache",
    );
    compare_texts(policy, "vg_upload,vg_repack");
    let megakernel = true;
    compare_texts(
        LaunchPolicy {
            megakernel,
            ..policy
        },
        "vg_megakernel_cols8",
    );
}

#[test]
fn an_engine_with_simple_kernels_only_answers_right() {
    let engine = engine(Shim::default(), |name| !is_simple(name));
    let selection = Selection {
        first: 0,
        takes: &has_common_type,
    };
    for case in vgpu_check::compare(&engine, &cpu(), &selection, |_| ()) {
        assert!(case.is_right(), "{}: {:?}", case.name, case.outcome);
        let tuned: Vec<_> = { case.kernels.iter() }
            .filter(|name| !is_simple(name))
            .collect();
        assert!(tuned.is_empty(), "{}: {tuned:?}", case.name);
    }
    compare_texts(
        LaunchPolicy::default(),
        "vg_mmv_*,vg_gemm_*,vg_quantize_q8,vg_fattn_f*",
    );
}

#[test]
fn nodes_without_any_kernel_run_on_the_cpu_engine() {
    let ran = compare_without(Shim::default, SIMPLE, |case| !case.starts_with("MUL_MAT"));
    assert!(!ran.iter().any(|name| is_simple(name)), "{ran:?}");
    // A whole model, without a single kernel.
    compare_texts(LaunchPolicy::default(), "*");
    // The estimate of a node has the speed of the CPU.
    let graph = a_sum();
    let without = |names: &[&str]| engine(Shim::default(), |name| names.contains(&name));
    let speed = |engine: &CudaEngine| engine.speed_of(&graph, &graph.nodes[0]);
    let fast = without(&[]);
    assert_eq!(speed(&fast), fast.speed());
    assert_eq!(speed(&without(&["vg_gemm_any"])), fast.speed());
    let cpu = CpuEngine::new(0, None).expect("an engine").speed();
    assert_eq!(speed(&without(&["vg_elementwise"])), cpu);
}

/// A step of training writes to its sources, and on the CPU engine, too.
#[test]
fn a_node_on_the_cpu_engine_updates_its_sources() {
    const COUNT: u64 = 64;
    let place = |count: u64, index: u64| Tensor {
        shape: Shape::contiguous(Type::F32, [count, 1, 1, 1]).expect("a small shape"),
        buffer: 0,
        offset: 4 * COUNT * index,
    };
    // Weights, gradient, two momenta, parameters; the result is the weights.
    let mut tensors: Vec<Tensor> = (0..4).map(|index| place(COUNT, index)).collect();
    tensors.extend([place(7, 4), place(COUNT, 0)]);
    let graph = Graph {
        buffers: vec![BufferId(1)],
        tensors,
        nodes: vec![Node {
            op: Op::OptStepAdamw {},
            dst: 5,
            src: Sources::new((0..5).map(Some)),
        }],
    };
    let size = 4 * (4 * COUNT + 7);
    let content: Vec<u8> = (0..size / 4)
        .flat_map(|i| (0.1 + (i % 23) as f32 / 30.0).to_le_bytes())
        .collect();
    let run = |engine: &dyn Engine| {
        let memory = engine.alloc(size).expect("little memory");
        memory.write(0, content[..].into()).expect("it fits");
        let valid = validate(
            graph.clone(),
            engine.capabilities(),
            &Limits::default(),
            |_| Some(size),
        );
        let valid = valid.expect("a valid graph");
        let plan = engine.compile(&valid, &[Arc::clone(&memory)], &|| false);
        plan.expect("a plan").run().expect("a run");
        let mut after = vec![0; size as usize];
        let read = memory.read(0, after.as_mut_slice().into());
        read.expect("it is inside");
        after
    };
    let want = run(&cpu());
    assert!(want != content);
    assert!(run(&engine(Shim::default(), |_| true)) == want);
}

/// A graph of one node.
fn a_sum() -> Graph {
    let tensor = Tensor {
        shape: Shape::contiguous(Type::F32, [64, 1, 1, 1]).expect("a small shape"),
        buffer: 0,
        offset: 0,
    };
    Graph {
        buffers: vec![BufferId(1)],
        tensors: vec![tensor; 3],
        nodes: vec![Node {
            op: Op::Add {},
            dst: 2,
            src: Sources::new([Some(0), Some(1)]),
        }],
    }
}
