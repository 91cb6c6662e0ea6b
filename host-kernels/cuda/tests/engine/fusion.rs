//! Nodes that become one launch: how many launches a layer takes, and that memory is the same in the end.

use std::sync::Arc;

use vgpu_cuda::LaunchPolicy;
use vgpu_transport::ir::{GluKind, Node, Op, Sources, Type};

use crate::engine_with;
use crate::spy::{Call, Spy};
use vgpu_check::model::{Built, Model, Step, TINY, TINY_BIASES, TINY_EXPERTS, TINY_GPT_OSS};

/// One launch after the other, so that they can be counted.
fn policy(fusion: bool) -> LaunchPolicy {
    LaunchPolicy {
        fusion,
        megakernel: false,
        ..LaunchPolicy::default()
    }
}

/// The kernels that a run launches, in order.
fn kernels(built: &Built, fusion: bool) -> Vec<&'static str> {
    let device = Arc::new(Spy::recording());
    let engine = engine_with(&device, policy(fusion));
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    device.take_log();
    plan.run().unwrap();
    { device.take_log().into_iter() }
        .filter_map(|call| match call {
            Call::Launch(name) => Some(name),
            _ => None,
        })
        .collect()
}

/// The kernels from one layer's attention up to the next one's. Not every layer has the same: a result that lies where
/// activations lay that are still read keeps nodes apart, and in the last layer memory is not used again, so that some
/// results could be wanted.
fn between_attentions(kernels: &[&'static str], which: usize) -> Vec<&'static str> {
    let is_attention =
        |kernel: &str| kernel.starts_with("vg_fattn") && !kernel.contains("mask_tiles");
    let places: Vec<usize> = { 0..kernels.len() }
        .filter(|&i| is_attention(kernels[i]))
        .collect();
    kernels[places[which]..places[which + 1]].to_vec()
}

/// The kernels of a layer of several.
fn of_a_layer(model: Model, fusion: bool) -> Vec<&'static str> {
    let model = Model { layers: 4, ..model };
    let all = kernels(
        &model.graph(Step {
            tokens: 1,
            seen: 32,
        }),
        fusion,
    );
    between_attentions(&all, 1)
}

#[test]
fn a_dense_layer_is_few_launches() {
    let plain = of_a_layer(TINY, false);
    let fused = of_a_layer(TINY, true);
    assert!(plain.len() >= 18, "{plain:?}");
    let count = |name: &str| fused.iter().filter(|kernel| kernel.contains(name)).count();
    // Two norms with the sums before and the products behind them, which also round.
    assert_eq!(count("vg_norm_fused"), 2, "{fused:?}");
    // Q, K and V; the result of attention; gate, up and their unit; down.
    assert_eq!(count("vg_mmv"), 4, "{fused:?}");
    // For down; attention rounds what it gives by itself.
    assert_eq!(count("vg_quantize_q8"), 1, "{fused:?}");
    // Q by itself, K into the cache; V into the cache.
    assert_eq!(count("vg_rope"), 2, "{fused:?}");
    assert_eq!(count("vg_rope_rows"), 1, "{fused:?}");
    assert_eq!(count("vg_set_rows"), 1, "{fused:?}");
    assert_eq!(count("vg_elementwise"), 0, "{fused:?}");
    assert!(fused.len() <= 12, "{fused:?}");
}

#[test]
fn a_layer_of_experts_is_few_launches() {
    let plain = of_a_layer(TINY_EXPERTS, false);
    let fused = of_a_layer(TINY_EXPERTS, true);
    assert!(plain.len() >= 30, "{plain:?}");
    let count = |name: &str| fused.iter().filter(|kernel| kernel.contains(name)).count();
    // As above, and heads of Q and K.
    assert_eq!(count("vg_norm_fused"), 4, "{fused:?}");
    assert_eq!(count("vg_topk_moe"), 1, "{fused:?}");
    assert_eq!(count("vg_weighted_sum"), 1, "{fused:?}");
    assert_eq!(count("vg_argsort"), 0, "{fused:?}");
    assert_eq!(count("vg_elementwise"), 0, "{fused:?}");
    assert!(fused.len() <= 17, "{fused:?}");
}

#[test]
fn biases_take_no_launches_of_their_own() {
    let count = |kernels: &[&str], name: &str| {
        { kernels.iter() }
            .filter(|kernel| kernel.contains(name))
            .count()
    };
    let dense = of_a_layer(TINY_BIASES, true);
    assert_eq!(dense, of_a_layer(TINY, true), "those of Q, K and V");
    let fused = of_a_layer(TINY_GPT_OSS, true);
    let plain = of_a_layer(TINY_GPT_OSS, false);
    // Of Q, K, V, what attention gives, the router, gate, up and down.
    assert!(count(&plain, "vg_elementwise") + count(&plain, "vg_add_id") >= 8);
    assert_eq!(count(&fused, "vg_elementwise"), 0, "{fused:?}");
    assert_eq!(count(&fused, "vg_add_id"), 0, "{fused:?}");
    assert_eq!(count(&fused, "vg_topk_moe"), 1, "{fused:?}");
    assert_eq!(count(&fused, "vg_soft_max"), 0, "{fused:?}");
    assert_eq!(count(&fused, "vg_weighted_sum"), 1, "{fused:?}");
    assert!(fused.len() <= 16, "{fused:?}");
}

/// Attention and the product behind it: what attention leaves rounded is what a launch of its own would, to the last bit, with
/// one block for all keys and with several, for few rows and for many.
#[test]
fn attention_rounds_what_it_gives() {
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
        let mut built = model.graph(Step { tokens, seen });
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
                // Numbers around 1 and -1, as halves and as floats.
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

/// What is in the buffers that graphs write to after a run; `None` if the run fails.
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

/// Compares as numbers of two and of four bytes: launches of several nodes add up in another order.
fn assert_same(fused: &[Vec<u8>], plain: &[Vec<u8>], what: &str) {
    // The cache has halves, of which the larger part of a word says how large it is.
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
    // Most is as it was: what was never written, and inputs.
    assert!(differing < fused[1].len() / 8);
}

#[test]
fn memory_is_the_same_in_the_end() {
    for (model, what) in [
        (TINY, "dense"),
        (TINY_EXPERTS, "experts"),
        (TINY_BIASES, "biases"),
        (TINY_GPT_OSS, "gpt-oss"),
    ] {
        for tokens in [1, 3, 9] {
            let built = model.graph(Step { tokens, seen: 32 });
            let fused = memory_after(&built, true).expect("it runs");
            let plain = memory_after(&built, false).expect("it runs");
            assert_same(&fused, &plain, &format!("{what}, {tokens} tokens"));
        }
    }
}

/// A graph in which somebody wants what a launch would leave out has it.
#[test]
fn what_somebody_wants_is_not_left_out() {
    let built = Model { layers: 4, ..TINY }.graph(Step {
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
    // Somebody who looks at the gate before its memory is used again.
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

/// Numbers below others.
pub(crate) fn random(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed;
    move |n| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as usize % n
    }
}

/// A step in which a tensor lies where no sane graph has it; not always.
pub(crate) fn displaced(model: Model, mut below: impl FnMut(usize) -> usize) -> Option<Built> {
    let mut built = model.graph(Step {
        tokens: 1,
        seen: 32,
    });
    let compute: Vec<usize> = { 0..built.graph.tensors.len() }
        .filter(|&i| built.graph.tensors[i].buffer == 2)
        .collect();
    // A result, and all views of it, go to where another one is, or half into it.
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

/// Tensors that lie where no sane graph has them: launches of several nodes give what the nodes give.
#[test]
fn overlapping_memory_is_respected() {
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
        // Numbers that got too large say nothing.
        let is_tame = plain[1].chunks_exact(4).all(|b| {
            let x = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            // Masks are of halves, some of them infinite.
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
