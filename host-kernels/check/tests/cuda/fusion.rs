//! Fusion: how many launches a layer takes, and that memory is the same as without fusion.

use std::sync::Arc;

use vgpu_cuda::LaunchPolicy;
use vgpu_gguf::Rng;
use vgpu_transport::ir::{GluKind, Node, Op, Sources, Type};

use crate::engine_with;
use crate::spy::{Call, Spy, launched};
use vgpu_check::model::{Built, Model, StepShape, TINY, TINY_BIASES, TINY_EXPERTS, TINY_GPT_OSS};

/// A policy with one launch after the other, so that launches can be counted.
fn policy(fusion: bool) -> LaunchPolicy {
    LaunchPolicy {
        fusion,
        megakernel: false,
        ..LaunchPolicy::default()
    }
}

/// The kernels that a run launches, in order.
fn kernels(built: &Built, fusion: bool) -> Vec<&'static str> {
    let device = Arc::new(Spy::logging());
    let engine = engine_with(&device, policy(fusion));
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    device.take_log();
    plan.run().unwrap();
    launched(&device.take_log())
}

/// The kernels from the attention of layer `which` up to that of the next layer. Layers may differ:
/// a result in the memory of activations that are still read prevents fusion, and the last layer's
/// results are not overwritten, so they may be read.
fn between_attentions(kernels: &[&'static str], which: usize) -> Vec<&'static str> {
    let is_attention =
        |kernel: &str| kernel.starts_with("vg_fattn") && !kernel.contains("mask_tiles");
    let places: Vec<usize> = { 0..kernels.len() }
        .filter(|&i| is_attention(kernels[i]))
        .collect();
    kernels[places[which]..places[which + 1]].to_vec()
}

/// The kernels of a middle layer.
fn of_a_layer(model: Model, fusion: bool) -> Vec<&'static str> {
    let model = Model { layers: 4, ..model };
    let all = kernels(
        &model.graph(StepShape {
            tokens: 1,
            seen: 32,
        }),
        fusion,
    );
    between_attentions(&all, 1)
}

#[test]
fn dense_layer_takes_few_launches() {
    let plain = of_a_layer(TINY, false);
    let fused = of_a_layer(TINY, true);
    assert!(plain.len() >= 18, "{plain:?}");
    let count = |name: &str| fused.iter().filter(|kernel| kernel.contains(name)).count();
    // Two norms with the ADD before and the MUL behind, which also quantise.
    assert_eq!(count("vg_norm_fused"), 2, "{fused:?}");
    // Q, K and V; the output projection; gate, up and their unit; down.
    assert_eq!(count("vg_mmv"), 4, "{fused:?}");
    // For down only: attention quantises its own result.
    assert_eq!(count("vg_quantize_q8"), 1, "{fused:?}");
    // Q by itself, K into the cache, V into the cache: one launch.
    assert_eq!(count("vg_rope"), 1, "{fused:?}");
    assert_eq!(count("vg_rope_cache"), 1, "{fused:?}");
    assert_eq!(count("vg_set_rows"), 0, "{fused:?}");
    assert_eq!(count("vg_elementwise"), 0, "{fused:?}");
    assert!(fused.len() <= 10, "{fused:?}");
}

#[test]
fn expert_layer_takes_few_launches() {
    let plain = of_a_layer(TINY_EXPERTS, false);
    let fused = of_a_layer(TINY_EXPERTS, true);
    assert!(plain.len() >= 30, "{plain:?}");
    let count = |name: &str| fused.iter().filter(|kernel| kernel.contains(name)).count();
    // As above, and the heads of Q and K.
    assert_eq!(count("vg_norm_fused"), 4, "{fused:?}");
    assert_eq!(count("vg_topk_moe"), 1, "{fused:?}");
    assert_eq!(count("vg_weighted_sum"), 1, "{fused:?}");
    assert_eq!(count("vg_argsort"), 0, "{fused:?}");
    assert_eq!(count("vg_elementwise"), 0, "{fused:?}");
    assert!(fused.len() <= 15, "{fused:?}");
}

#[test]
fn biases_take_no_separate_launches() {
    let count = |kernels: &[&str], name: &str| {
        { kernels.iter() }
            .filter(|kernel| kernel.contains(name))
            .count()
    };
    let dense = of_a_layer(TINY_BIASES, true);
    assert_eq!(dense, of_a_layer(TINY, true), "those of Q, K and V");
    let fused = of_a_layer(TINY_GPT_OSS, true);
    let plain = of_a_layer(TINY_GPT_OSS, false);
    // The biases of Q, K, V, the output projection, the router, gate, up and down.
    assert!(count(&plain, "vg_elementwise") + count(&plain, "vg_add_id") >= 8);
    assert_eq!(count(&fused, "vg_elementwise"), 0, "{fused:?}");
    assert_eq!(count(&fused, "vg_add_id"), 0, "{fused:?}");
    assert_eq!(count(&fused, "vg_topk_moe"), 1, "{fused:?}");
    assert_eq!(count(&fused, "vg_soft_max"), 0, "{fused:?}");
    assert_eq!(count(&fused, "vg_weighted_sum"), 1, "{fused:?}");
    assert!(fused.len() <= 14, "{fused:?}");
}

/// The q8 result of attention has exactly the bytes of a separate launch, with one block for all
/// keys and with several, for few rows and for many.
#[test]
fn attention_rounds_its_output() {
    let with = |cache, heads, head| Model {
        layers: 1,
        cache,
        heads,
        head,
        context: 512,
        ..TINY
    };
    for (model, tokens, seen) in [
        (with(Type::F16, 2, 32), 1, 32),
        (with(Type::F16, 2, 64), 2, 512),
        (with(Type::F16, 4, 128), 8, 512),
        (with(Type::Bf16, 4, 128), 3, 512),
        (with(Type::F16, 4, 128), 6, 64),
    ] {
        let mut built = model.graph(StepShape { tokens, seen });
        let nodes = &built.graph.nodes;
        let first = { nodes.iter() }.position(|node| matches!(node.op, Op::FlashAttnExt { .. }));
        let first = first.expect("models attend");
        let end = { nodes[first..].iter() }.position(|node| matches!(node.op, Op::MulMat { .. }));
        let end = first + end.expect("a product follows");
        built.graph.nodes.truncate(end + 1);
        built.graph.nodes.drain(..first);
        let run = |fusion| {
            let device = Arc::new(Spy::running());
            let engine = engine_with(&device, policy(fusion));
            let loaded = built.load(&engine);
            let mut below = random(3);
            for memory in &loaded.buffers[1..] {
                // Numbers around 1 and -1, as F16 and as f32.
                let bytes: Vec<u8> = (0..memory.size())
                    .map(|at| match at % 2 {
                        0 => below(256) as u8,
                        _ => [0x3c, 0xbc, 0x3d, 0xbd][below(4)],
                    })
                    .collect();
                memory.write(0, bytes.as_slice().into()).unwrap();
            }
            built.write_inputs(&loaded, seen - tokens);
            let mut plan = built.compile(&engine, &loaded);
            device.take_log();
            plan.run().expect("it runs");
            let rounding = Call::Launch("vg_quantize_q8");
            let log = device.take_log();
            let rounds = log.iter().filter(|call| **call == rounding).count();
            let mut bytes = vec![0; loaded.buffers[2].size() as usize];
            loaded.buffers[2]
                .read(0, bytes.as_mut_slice().into())
                .unwrap();
            (rounds, bytes)
        };
        let (apart, want) = run(false);
        let (fused, got) = run(true);
        assert_eq!((apart, fused), (1, 0), "{model:?}");
        assert!(got == want, "{model:?}, {tokens} tokens");
    }
}

/// The contents of the buffers that the graph writes to, after a run; `None` if the run fails.
fn memory_after(built: &Built, fusion: bool) -> Option<Vec<Vec<u8>>> {
    let device = Arc::new(Spy::running());
    let engine = engine_with(&device, policy(fusion));
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    built.write_inputs(&loaded, 0);
    plan.run().ok()?;
    let read = |memory: &Arc<dyn vgpu_engine::Memory>| {
        let mut bytes = vec![0; memory.size() as usize];
        memory.read(0, bytes.as_mut_slice().into()).unwrap();
        bytes
    };
    Some(loaded.buffers[1..].iter().map(read).collect())
}

/// Compares as F16 and as f32 numbers, since fused launches add in another order.
fn assert_same(fused: &[Vec<u8>], plain: &[Vec<u8>], what: &str) {
    // The cache has F16 numbers; the upper one of a word tells the magnitude.
    let half = |bits: u16| {
        let (sign, exponent) = (f64::from(bits >> 15), i32::from(bits >> 10 & 31));
        let mantissa = f64::from(bits & 1023) / 1024.0;
        (1.0 - 2.0 * sign) * (1.0 + mantissa) * 2f64.powi(exponent - 15)
    };
    for (got, want) in fused[0].chunks_exact(2).zip(plain[0].chunks_exact(2)) {
        let [got, want] = [got, want].map(|b| half(u16::from_le_bytes([b[0], b[1]])));
        assert!(
            (got - want).abs() <= 0.02 * (0.2 + want.abs()),
            "{what}: {got} is not {want}"
        );
    }
    let mut differing = 0;
    for (at, (got, want)) in { fused[1].chunks_exact(4) }
        .zip(plain[1].chunks_exact(4))
        .enumerate()
    {
        if got == want {
            continue;
        }
        differing += 1;
        let [got, want] = [got, want].map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let error = (got - want).abs();
        assert!(
            error <= 0.03 * (0.3 + want.abs()),
            "{what}, at {}: {got:e} is not {want:e}",
            4 * at
        );
    }
    // Most bytes are equal: inputs, and memory that is never written.
    assert!(differing < fused[1].len() / 8);
}

#[test]
fn fused_graphs_leave_the_same_memory() {
    for (model, what) in [
        (TINY, "dense"),
        (TINY_EXPERTS, "experts"),
        (TINY_BIASES, "biases"),
        (TINY_GPT_OSS, "gpt-oss"),
    ] {
        for tokens in [1, 3, 9] {
            let built = model.graph(StepShape { tokens, seen: 32 });
            let fused = memory_after(&built, true).expect("it runs");
            let plain = memory_after(&built, false).expect("it runs");
            assert_same(&fused, &plain, &format!("{what}, {tokens} tokens"));
        }
    }
}

/// A result that another node reads is not left out.
#[test]
fn requested_intermediate_results_are_kept() {
    let built = Model { layers: 4, ..TINY }.graph(StepShape {
        tokens: 1,
        seen: 32,
    });
    let units = |built: &Built| {
        let kernels = between_attentions(&kernels(built, true), 1);
        kernels
            .iter()
            .filter(|kernel| **kernel == "vg_elementwise")
            .count()
    };
    let nodes = &built.graph.nodes;
    let is_unit = |op: &Op| {
        matches!(
            op,
            Op::Glu {
                kind: GluKind::Swiglu,
                ..
            }
        )
    };
    // Of the second layer.
    let unit = { 0..nodes.len() }.filter(|&i| is_unit(&nodes[i].op)).nth(1);
    let unit = unit.expect("four layers");
    // A node that reads the gate before its memory is reused.
    let mut wanted = built.clone();
    let gate = nodes[unit].src.as_slice()[0];
    let mut copy = wanted.graph.tensors[gate.expect("units have sources") as usize];
    copy.offset = built.sizes[2] - 4096;
    wanted.graph.tensors.push(copy);
    let look = Node {
        op: Op::Sqr {},
        dst: wanted.graph.tensors.len() as u32 - 1,
        src: Sources::new([gate]),
    };
    wanted.graph.nodes.insert(unit + 1, look);
    assert_eq!(units(&built), 0);
    assert_eq!(units(&wanted), 2, "the look, and the unit by itself");
}

/// A generator of random numbers below a bound.
pub(crate) fn random(seed: u64) -> impl FnMut(usize) -> usize {
    let mut rng = Rng::new(seed, 0);
    move |n| rng.below(n as u64) as usize
}

/// A decode step with a tensor at a random wrong place; `None` if the place is an input.
pub(crate) fn displaced(model: Model, mut below: impl FnMut(usize) -> usize) -> Option<Built> {
    let mut built = model.graph(StepShape {
        tokens: 1,
        seen: 32,
    });
    let compute: Vec<usize> = { 0..built.graph.tensors.len() }
        .filter(|&i| built.graph.tensors[i].buffer == 2)
        .collect();
    // A result with all its views moves to the place of another result, or half into it.
    let moved = built.graph.tensors[compute[below(compute.len())]];
    let other = built.graph.tensors[compute[below(compute.len())]];
    let place = other.offset + [0, 0, 128][below(3)];
    if built.is_input(&moved) || built.is_input(&other) {
        return None;
    }
    for tensor in &mut built.graph.tensors {
        if tensor.buffer == 2 && tensor.offset == moved.offset {
            tensor.offset = place;
        }
    }
    Some(built)
}

/// Fused launches give the results of their nodes even if tensors overlap at random.
#[test]
fn fusion_preserves_results_with_overlapping_memory() {
    let mut below = random(7);
    let (mut ran, mut tried) = (0, 0);
    while ran < 12 {
        tried += 1;
        assert!(tried < 100, "most of them run");
        let Some(built) = displaced([TINY, TINY_EXPERTS][tried % 2], &mut below) else {
            continue;
        };
        let Some(plain) = memory_after(&built, false) else {
            continue; // indices that are none
        };
        // Numbers out of range are not comparable.
        let is_tame = plain[1].chunks_exact(4).all(|b| {
            let x = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            // Masks are F16, some of them infinite.
            let is_mask = [&b[..2], &b[2..]]
                .iter()
                .all(|half| [[0, 0], [0, 0xfc]].contains(&[half[0], half[1]]));
            is_mask || x.abs() <= 1e4 || x.is_nan()
        });
        if !is_tame {
            continue;
        }
        ran += 1;
        let fused = memory_after(&built, true).expect("it ran node by node");
        assert_same(&fused, &plain, &format!("case {tried}"));
    }
}
