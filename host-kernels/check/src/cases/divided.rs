//! Divided nodes compute what whole ones do, with the cases of all operators.

#[path = "../../../shim/device.rs"]
mod shim;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use vgpu_cpu::CpuEngine;
use vgpu_cuda::kernel_set::KernelSet;
use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_engine::{Engine, RunStatus, Turn};
use vgpu_transport::ir::{Op, OpKind, PoolKind, ScaleMode, Type};

use self::shim::Shim;
use super::list::{List, between, f32s, indices, numbers_of};
use super::{Operation, operations};
use crate::graph::{Builder, Fill, LoadedGraph, numbers};

/// The operators that are divided into ranges of their tensors, where the operands allow it.
const DIVIDED: &[OpKind] = &[
    OpKind::Copy,
    OpKind::GetRows,
    OpKind::Add,
    OpKind::Sub,
    OpKind::Mul,
    OpKind::Div,
    OpKind::Scale,
    OpKind::Clamp,
    OpKind::Sqr,
    OpKind::Sqrt,
    OpKind::Log,
    OpKind::Sin,
    OpKind::Cos,
    OpKind::LeakyRelu,
    OpKind::Unary,
    OpKind::Xielu,
    OpKind::Glu,
    OpKind::SiluBack,
    OpKind::SumRows,
    OpKind::Mean,
    OpKind::Cumsum,
    OpKind::Argsort,
    OpKind::TopK,
    OpKind::Norm,
    OpKind::RmsNorm,
    OpKind::RmsNormBack,
    OpKind::L2Norm,
    OpKind::SoftMax,
    OpKind::SoftMaxBack,
    OpKind::MulMat,
    OpKind::MulMatId,
    OpKind::OutProd,
    OpKind::Rope,
    OpKind::FlashAttnExt,
    OpKind::Conv2d,
    OpKind::Conv2dDw,
    OpKind::ConvTranspose2d,
    OpKind::Pool1d,
    OpKind::Pool2d,
    OpKind::Upscale,
    OpKind::SetRows,
    OpKind::Im2col,
    OpKind::Im2colBack,
    OpKind::Im2col3d,
    OpKind::Col2im1d,
    OpKind::Conv3d,
    OpKind::ConvTranspose1d,
    OpKind::Pool2dBack,
    OpKind::SsmConv,
    OpKind::LightningIndexer,
    OpKind::Dsv4HcComb,
    OpKind::Dsv4HcPre,
    OpKind::Dsv4HcPost,
    OpKind::OptStepAdamw,
    OpKind::OptStepSgd,
    OpKind::AddId,
    OpKind::Add1,
    OpKind::Argmax,
    OpKind::Repeat,
    OpKind::RepeatBack,
    OpKind::Concat,
    OpKind::Pad,
    OpKind::PadReflect1d,
    OpKind::Roll,
    OpKind::Diag,
    OpKind::DiagMaskInf,
    OpKind::DiagMaskZero,
    OpKind::Tri,
    OpKind::Fill,
    OpKind::GroupNorm,
    OpKind::TimestepEmbedding,
    OpKind::AddRelPos,
];

/// The operators that only the kernels of an engine divide.
const SHARED: &[OpKind] = &[
    OpKind::SsmScan,
    OpKind::RwkvWkv6,
    OpKind::RwkvWkv7,
    OpKind::GatedLinearAttn,
    OpKind::GatedDeltaNet,
    OpKind::SolveTri,
    OpKind::CrossEntropyLossBack,
];

/// Operators that no case has with several rows.
fn further_operations() -> Vec<Operation> {
    let mut list = List::default();
    let ne = [33, 5, 3, 2];
    let positive = between(0.1, 2.0, ne);
    for op in [
        Op::Clamp {
            min: -0.5,
            max: 0.5,
        },
        Op::Sqr {},
        Op::Sqrt {},
        Op::Log {},
        Op::Sin {},
        Op::Cos {},
        Op::LeakyRelu {
            negative_slope: 0.1,
        },
        Op::Xielu {
            alpha_n: 0.8,
            alpha_p: 0.9,
            beta: 0.5,
            eps: -1e-6,
        },
    ] {
        list.add(op, 0.0, f32s(ne), &[positive]);
    }
    list.add(Op::SiluBack {}, 0.0, f32s(ne), &[f32s(ne), f32s(ne)]);
    list.add(
        Op::RmsNormBack { eps: 1e-5 },
        0.0,
        f32s(ne),
        &[f32s(ne), f32s(ne)],
    );
    list.add(Op::Mean {}, 0.0, f32s([1, 5, 3, 2]), &[f32s(ne)]);
    let places = indices(Type::I32, Fill::Count, [4, 5, 3, 2]);
    list.add(Op::TopK {}, 0.0, places, &[f32s(ne)]);
    list.add(
        Op::Conv2dDw {
            s0: 1,
            s1: 1,
            p0: 0,
            p1: 0,
            d0: 1,
            d1: 1,
        },
        0.0,
        f32s([7, 5, 6, 2]),
        &[f32s([3, 3, 1, 6]), f32s([9, 7, 6, 2])],
    );
    list.add(
        Op::Pool1d {
            kind: PoolKind::Average,
            k0: 2,
            s0: 2,
            p0: 0,
        },
        0.0,
        f32s([8, 5, 3, 2]),
        &[f32s([16, 5, 3, 2])],
    );
    let ids = indices(Type::I64, Fill::Count, [5, 3, 1, 1]);
    list.add(Op::SetRows {}, 0.0, f32s([33, 16, 3, 2]), &[f32s(ne), ids]);
    movement(&mut list);
    images(&mut list);
    models(&mut list);
    list.0
}

fn movement(list: &mut List) {
    let ne = [33, 5, 3, 2];
    list.add(Op::RepeatBack {}, 0.0, f32s(ne), &[f32s([66, 5, 9, 2])]);
    let ends = Op::PadReflect1d { p0: 2, p1: 3 };
    list.add(ends, 0.0, f32s([38, 5, 3, 2]), &[f32s(ne)]);
    let shift = [1, 2, 0, 0];
    list.add(Op::Roll { shift }, 0.0, f32s(ne), &[f32s(ne)]);
    list.add(Op::Fill { value: 0.5 }, 0.0, f32s(ne), &[]);
    list.add(Op::Diag {}, 0.0, f32s([5, 5, 3, 2]), &[f32s([5, 1, 3, 2])]);
    for op in [
        Op::DiagMaskInf { n_past: 1 },
        Op::DiagMaskZero { n_past: 1 },
    ] {
        list.add(op, 0.0, f32s(ne), &[f32s(ne)]);
    }
    let ids = indices(Type::I32, Fill::Below(9), [5, 3, 1, 1]);
    let rows = f32s([33, 5, 3, 1]);
    list.add(Op::AddId {}, 0.0, rows, &[rows, f32s([33, 9, 1, 1]), ids]);
    list.add(Op::Add1 {}, 0.0, f32s(ne), &[f32s(ne), f32s([1; 4])]);
    let places = indices(Type::I32, Fill::Count, [5, 1, 1, 1]);
    list.add(Op::Argmax {}, 0.0, places, &[f32s([33, 5, 1, 1])]);
}

fn images(list: &mut List) {
    let (image, patches) = (f32s([20, 17, 8, 2]), f32s([72, 20, 9, 2]));
    list.add(
        Op::Im2colBack {
            s0: 1,
            s1: 2,
            p0: 1,
            p1: 1,
            d0: 1,
            d1: 1,
            is_2d: true,
        },
        0.0,
        image,
        &[patches, f32s([3, 3, 8, 12])],
    );
    let (lines, kernel) = (f32s([20, 4, 3, 1]), f32s([3, 4, 2, 1]));
    let (s0, s1, p0, p1, d0, d1, is_2d) = (2, 0, 1, 0, 1, 0, false);
    let op = Op::Im2col {
        s0,
        s1,
        p0,
        p1,
        d0,
        d1,
        is_2d,
    };
    list.add(op, 0.0, f32s([12, 10, 3, 1]), &[kernel, lines]);
    let op = Op::Im2colBack {
        s0,
        s1,
        p0,
        p1,
        d0,
        d1,
        is_2d,
    };
    list.add(op, 0.0, lines, &[f32s([12, 10, 3, 1]), kernel]);
    let volumes = f32s([6, 7, 5, 4]);
    let kernel = f32s([3, 3, 3, 6]);
    list.add(im2col_3d(), 0.0, f32s([54, 6, 7, 6]), &[kernel, volumes]);
    list.add(conv_3d(2, 3), 0.0, f32s([6, 7, 3, 6]), &[kernel, volumes]);
    list.add(
        Op::Col2im1d {
            s0: 2,
            oc: 3,
            p0: 1,
        },
        0.0,
        f32s([10, 3, 1, 1]),
        &[f32s([12, 5, 1, 1])],
    );
    list.add(
        Op::ConvTranspose1d {
            s0: 2,
            p0: 0,
            d0: 1,
        },
        0.0,
        f32s([15, 4, 1, 1]),
        &[f32s([3, 4, 5, 1]), f32s([7, 5, 1, 1])],
    );
    for kind in [PoolKind::Max, PoolKind::Average] {
        let op = Op::Pool2dBack {
            kind,
            k0: 2,
            k1: 2,
            s0: 2,
            s1: 2,
            p0: 0,
            p1: 0,
        };
        list.add(op, 0.0, image, &[f32s([10, 8, 8, 2]), image]);
    }
    let positions = f32s([4, 3, 5, 2]);
    let rows = f32s([16, 15, 2, 1]);
    list.add(Op::AddRelPos {}, 0.0, rows, &[rows, positions, positions]);
    let embedding = Op::TimestepEmbedding {
        dim: 32,
        max_period: 100,
    };
    list.add(embedding, 0.0, f32s([32, 5, 1, 1]), &[f32s([5, 1, 1, 1])]);
    let groups = Op::GroupNorm {
        n_groups: 2,
        eps: 1e-5,
    };
    list.add(groups, 0.0, f32s([9, 5, 4, 2]), &[f32s([9, 5, 4, 2])]);
}

/// IM2COL_3D of images of two channels, whose depth of 5 becomes 3.
fn im2col_3d() -> Op {
    Op::Im2col3d {
        s0: 1,
        s1: 1,
        s2: 2,
        p0: 1,
        p1: 1,
        p2: 1,
        d0: 1,
        d1: 1,
        d2: 1,
        ic: 2,
    }
}

/// CONV_3D of `n` such images.
fn conv_3d(n: i32, oc: i32) -> Op {
    Op::Conv3d {
        s0: 1,
        s1: 1,
        s2: 2,
        p0: 1,
        p1: 1,
        p2: 1,
        d0: 1,
        d1: 1,
        d2: 1,
        c: 2,
        n,
        oc,
    }
}

fn models(list: &mut List) {
    list.add(
        Op::SsmConv {},
        0.0,
        f32s([6, 5, 2, 1]),
        &[f32s([8, 6, 2, 1]), f32s([4, 6, 1, 1])],
    );
    list.add(
        Op::LightningIndexer {},
        0.0,
        f32s([7, 5, 1, 2]),
        &[
            f32s([32, 4, 5, 2]),
            f32s([32, 1, 7, 2]),
            f32s([4, 5, 1, 2]),
            numbers_of(Type::F16, [7, 5, 1, 1]),
        ],
    );
    let comb = Op::Dsv4HcComb {
        eps: 1e-6,
        n_iter: 3,
    };
    let sources = [[24, 5, 1, 1], [3, 1, 1, 1], [24, 1, 1, 1]].map(f32s);
    list.add(comb, 0.0, f32s([4, 4, 5, 1]), &sources);
    for (gated, weights) in [(false, [4, 5, 1, 1]), (true, [30, 4, 5, 1])] {
        let op = Op::Dsv4HcPre { scale: 0.5, gated };
        let sources = [f32s([30, 4, 5, 1]), f32s(weights)];
        list.add(op, 0.0, f32s([30, 5, 1, 1]), &sources);
    }
    let ne = [33, 5, 3, 2];
    let (positive, settings) = (between(0.1, 2.0, ne), between(0.1, 0.2, [7, 1, 1, 1]));
    let sources = [f32s(ne), f32s(ne), f32s(ne), positive, settings];
    list.add(Op::OptStepAdamw {}, 0.0, f32s(ne), &sources);
    list.again_over(0);
}

/// Operators that no case has with what only kernels divide: several tokens and snapshots, or
/// positions of a single image.
fn shared_operations() -> Vec<Operation> {
    let mut list = List::default();
    let (heads, tokens, seqs) = (3, 5, 2);
    for (state, snapshots) in [(32, 3), (300, 1), (300, 3)] {
        let b = f32s([state, 1, tokens, seqs]);
        let total = 16 * heads * seqs * (tokens + snapshots * state);
        list.add(
            Op::SsmScan {
                snapshots: snapshots as u32,
            },
            0.0,
            f32s([total, 1, 1, 1]),
            &[
                f32s([state, 16, heads, seqs]),
                f32s([16, heads, tokens, seqs]),
                f32s([heads, tokens, seqs, 1]),
                between(-1.0, 0.0, [1, heads, 1, 1]),
                b,
                b,
                indices(Type::I32, Fill::Count, [seqs, 1, 1, 1]),
            ],
        );
    }
    // Of two tokens, some of the shares are empty.
    for (size, snapshots, tokens) in [(64, 3, 2), (300, 3, 5)] {
        let v = f32s([size, heads, tokens, seqs]);
        let k = between(-0.1, 0.1, v.ne);
        list.add(
            Op::GatedDeltaNet {
                snapshots: snapshots as u32,
            },
            0.0,
            f32s([size * heads, tokens * seqs + snapshots * size * seqs, 1, 1]),
            &[
                k,
                k,
                v,
                between(-1.0, 0.0, [1, heads, tokens, seqs]),
                between(0.0, 1.0, [1, heads, tokens, seqs]),
                f32s([size, size, heads, seqs]),
            ],
        );
    }
    let size = 300;
    let per_token = f32s([size, heads, tokens * seqs, 1]);
    let small = between(-0.1, 0.1, per_token.ne);
    let decay = between(0.1, 0.9, per_token.ne);
    let state = f32s([size * size * heads, seqs, 1, 1]);
    let dst = f32s([size * heads, tokens * seqs + size * seqs, 1, 1]);
    let sources = [per_token, decay, small, per_token, small, small, state];
    list.add(Op::RwkvWkv7 {}, 0.0, dst, &sources);
    let sources = [per_token, per_token, per_token, decay, state];
    let op = Op::GatedLinearAttn { scale: 0.5 };
    list.add(op, 0.0, dst, &sources);
    let (a, b) = (between(0.5, 1.5, [9, 9, 2, 3]), f32s([4, 9, 2, 3]));
    list.add(Op::SolveTri {}, 0.0, b, &[a, b]);
    let (kernel, image) = (f32s([3, 3, 8, 1]), f32s([17, 20, 8, 1]));
    let (s0, s1, p0, p1, d0, d1, is_2d) = (2, 2, 1, 2, 1, 1, true);
    list.add(
        Op::Conv2d {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
        },
        0.0,
        f32s([9, 11, 1, 1]),
        &[kernel, image],
    );
    list.add(
        Op::Im2col {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
            is_2d,
        },
        0.0,
        f32s([72, 9, 11, 1]),
        &[kernel, image],
    );
    let (kernel, volume) = (f32s([3, 3, 3, 2]), f32s([2, 3, 9, 2]));
    list.add(conv_3d(1, 1), 0.0, f32s([2, 3, 5, 1]), &[kernel, volume]);
    list.add(im2col_3d(), 0.0, f32s([54, 2, 3, 5]), &[kernel, volume]);
    shared_images(&mut list);
    list.0
}

/// Operators on a single plane or row.
fn shared_images(list: &mut List) {
    let (s0, s1, p0, p1) = (2, 2, 1, 2);
    let (d0, d1) = (1, 1);
    let (image, pooled) = (f32s([17, 20, 1, 1]), f32s([9, 11, 1, 1]));
    let op = Op::Conv2dDw {
        s0,
        s1,
        p0,
        p1,
        d0,
        d1,
    };
    list.add(op, 0.0, pooled, &[f32s([3, 3, 1, 1]), image]);
    for &kind in PoolKind::ALL {
        let (k0, k1) = (3, 4);
        let op = Op::Pool2d {
            kind,
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
        };
        list.add(op, 0.0, pooled, &[image]);
        // Windows overlap, so that elements are sums over several shares.
        let op = Op::Pool2dBack {
            kind,
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
        };
        list.add(op, 0.0, image, &[pooled, image]);
        // Elements between windows are in none, and the first of the shares has no window.
        let (k0, k1, s0, s1, p0, p1) = (4, 4, 6, 6, 1, 0);
        let op = Op::Pool2dBack {
            kind,
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
        };
        let line = f32s([17, 5, 1, 1]);
        list.add(op, 0.0, line, &[f32s([3, 1, 1, 1]), line]);
        let (k0, s0, p0) = (5, 2, 2);
        let op = Op::Pool1d { kind, k0, s0, p0 };
        list.add(op, 0.0, f32s([17, 1, 1, 1]), &[f32s([33, 1, 1, 1])]);
    }
    for (mode, align_corners, antialias) in [
        (ScaleMode::Nearest, false, false),
        (ScaleMode::Bilinear, true, false),
        (ScaleMode::Bilinear, false, true),
        (ScaleMode::Bicubic, false, false),
    ] {
        let op = Op::Upscale {
            mode,
            align_corners,
            antialias,
        };
        list.add(op, 0.0, f32s([23, 9, 1, 1]), &[image]);
        // The kernel divides channels that are not those of the source.
        list.add(op, 0.0, f32s([7, 5, 3, 1]), &[f32s([4, 9, 2, 1])]);
    }
}

/// What a graph computes.
struct Outcome {
    /// How many parts of nodes have run, or how many turns they took.
    parts: usize,
    results: Vec<f32>,
    /// All of the memory.
    memory: Vec<u8>,
}

/// Runs a graph with this destination.
fn run(engine: &dyn Engine, builder: &Builder, dst: u32) -> Outcome {
    let mut loaded: LoadedGraph = builder.on(engine).expect("a valid graph");
    let timings = loaded.plan.profile().expect("it runs");
    let parts = timings.iter().filter(|part| part.seconds > 0.0).count();
    outcome(&loaded, builder, dst, parts)
}

/// The same in turns that end as soon as they can.
fn run_in_turns(engine: &dyn Engine, builder: &Builder, dst: u32) -> Outcome {
    let mut loaded: LoadedGraph = builder.on(engine).expect("a valid graph");
    let turn = Turn::new();
    turn.set_end(Some(Duration::ZERO));
    let mut turns = 1;
    while loaded.plan.launch(&turn).expect("it runs") == RunStatus::Yielded {
        turns += 1;
    }
    loaded.plan.wait().expect("it ends");
    outcome(&loaded, builder, dst, turns)
}

fn outcome(loaded: &LoadedGraph, builder: &Builder, dst: u32, parts: usize) -> Outcome {
    let mut memory = vec![0; builder.size()];
    let read = loaded.memory.read(0, memory.as_mut_slice().into());
    read.expect("the memory");
    let results = numbers(&*loaded.memory, &builder.tensor_at(dst));
    Outcome {
        parts,
        results: results.expect("numbers"),
        memory,
    }
}

/// What is wrong with the results of a divided node, beside those of a whole one.
fn difference(operation: &Operation, found: &Outcome, whole: &Outcome) -> Option<String> {
    let name = &operation.name;
    match operation.op {
        // Products and attention of other numbers of tokens have other kernels.
        Op::MulMat { .. } | Op::MulMatId { .. } | Op::FlashAttnExt { .. } => {
            let (error, limit) = (error(&found.results, &whole.results), operation.limit);
            let text = format!("{name} in parts: {error}, the limit is {limit}");
            (error > limit || error.is_nan()).then_some(text)
        }
        _ => (found.memory != whole.memory).then(|| format!("{name} in parts: other bytes")),
    }
}

/// The mean square of the differences over that of `whole`. 0 for equal bits.
fn error(found: &[f32], whole: &[f32]) -> f64 {
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    if bits(found) == bits(whole) {
        return 0.0;
    }
    let square = |x: f64| x * x;
    let pairs = found.iter().zip(whole);
    let differences = pairs.map(|(a, b)| square(f64::from(*a) - f64::from(*b)));
    let all: f64 = whole.iter().map(|x| square(f64::from(*x))).sum();
    differences.sum::<f64>() / all
}

/// Checks that the operators that were divided are all of these.
fn check_kinds(divided: &BTreeSet<OpKind>, expected: &BTreeSet<OpKind>) {
    let missing: Vec<_> = expected.difference(divided).collect();
    let further: Vec<_> = divided.difference(expected).collect();
    assert!(
        missing.is_empty() && further.is_empty(),
        "{missing:?} {further:?}"
    );
}

#[test]
fn divided_nodes_compute_what_whole_ones_do() {
    let engine = CpuEngine::new(2, None).expect("an engine");
    let (mut divided, mut wrong) = (BTreeSet::new(), Vec::new());
    for operation in operations(false).into_iter().chain(further_operations()) {
        let (builder, dst) = operation.builder().expect("a graph");
        let whole = run(&engine, &builder, dst);
        for count in [2, 3, 100] {
            let parts = builder.divided(count);
            if parts.nodes() == builder.nodes() {
                continue;
            }
            divided.insert(operation.op.kind());
            let found = run(&engine, &parts, dst);
            wrong.extend(difference(&operation, &found, &whole));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    check_kinds(&divided, &DIVIDED.iter().copied().collect());
}

/// The CUDA engine over the shim, whose launches take at most `longest` by estimate.
fn gpu(longest: Duration) -> CudaEngine {
    gpu_with(longest, KernelSet::default())
}

fn gpu_with(longest: Duration, kernels: KernelSet) -> CudaEngine {
    let policy = LaunchPolicy {
        time_slice: Duration::ZERO,
        longest_launch: longest,
        min_graph_launches: usize::MAX,
        ..LaunchPolicy::default()
    };
    let (device, kernels) = (Arc::new(Shim::default()), Arc::new(kernels));
    CudaEngine::with_kernels(device, policy, kernels).expect("an engine")
}

#[test]
fn divided_nodes_compute_on_a_gpu_what_whole_ones_do() {
    let engine = gpu(Duration::MAX);
    let (mut divided, mut wrong) = (BTreeSet::new(), Vec::new());
    let mut check = |operation: Operation, has_shares: bool| {
        let (builder, dst) = operation.builder().expect("a graph");
        let parts = gpu(builder.estimate(&engine) / 4);
        let mut found = vec![run(&parts, &builder, dst)];
        if has_shares {
            found.push(run_in_turns(&parts, &builder, dst));
            let is_divided = found.iter().all(|found| found.parts > 1);
            assert!(is_divided, "{} is whole", operation.name);
        }
        if found[0].parts > 1 {
            divided.insert(operation.op.kind());
            let whole = run(&engine, &builder, dst);
            let each = found.iter();
            wrong.extend(each.filter_map(|found| difference(&operation, found, &whole)));
        }
    };
    for operation in operations(false).into_iter().chain(further_operations()) {
        check(operation, false);
    }
    for operation in shared_operations() {
        check(operation, true);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    check_kinds(&divided, &DIVIDED.iter().chain(SHARED).copied().collect());
}

#[test]
fn the_cpu_runs_a_node_with_shares_once() {
    let scan = |operation: &Operation| operation.op.kind() == OpKind::SsmScan;
    let operation = operations(false).into_iter().find(scan).expect("a scan");
    let (builder, dst) = operation.builder().expect("a graph");
    let engine = gpu(Duration::MAX);
    let (whole, longest) = (run(&engine, &builder, dst), builder.estimate(&engine) / 4);
    let without = KernelSet::without(|kernel| kernel == "vg_ssm_scan");
    let found = run(&gpu_with(longest, without), &builder, dst);
    assert_eq!(found.parts, 1);
    let error = error(&found.results, &whole.results);
    assert!(error <= operation.limit, "{error}");
}
