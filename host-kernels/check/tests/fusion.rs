//! The CPU engine's plans that fuse nodes leave the same bytes in memory as plans that run them one
//! by one.

use vgpu_check::model::{Built, Model, StepShape, TINY, TINY_BIASES, TINY_EXPERTS, TINY_GPT_OSS};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Memory, Plan, Turn};
use vgpu_gguf::Rng;
use vgpu_transport::ir::{OpKind, Type};

/// What is in the buffers that graphs write to after a run; `None` if the run fails.
fn memory_after(built: &Built, threads: usize, fuses: bool, cut: bool) -> Option<Vec<Vec<u8>>> {
    let engine = CpuEngine::new(threads, None).expect("an engine");
    let engine = engine.fusing(fuses);
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    for position in 0..2 {
        built.write_inputs(&loaded, position);
        match cut {
            true => run_in_turns(plan.as_mut())?,
            false => plan.run().ok()?,
        }
    }
    let read = |memory: &std::sync::Arc<dyn Memory>| {
        let mut bytes = vec![0; memory.size() as usize];
        memory.read(0, bytes.as_mut_slice().into()).unwrap();
        bytes
    };
    Some(loaded.buffers[1..].iter().map(read).collect())
}

/// Runs with a turn that is over as soon as it has begun, again and again.
fn run_in_turns(plan: &mut dyn Plan) -> Option<()> {
    let turn = Turn::new();
    turn.set_end(Some(std::time::Duration::ZERO));
    let mut turns = 1;
    while plan.launch(&turn).ok()? == vgpu_engine::RunStatus::Yielded {
        turns += 1;
    }
    plan.wait().ok()?;
    assert!(turns > 10, "the turns were over: {turns}");
    Some(())
}

#[track_caller]
fn assert_same(got: &[Vec<u8>], want: &[Vec<u8>], what: &str) {
    for (got, want) in got.iter().zip(want) {
        let differing = got.iter().zip(want).filter(|(a, b)| a != b).count();
        let first = got.iter().zip(want).position(|(a, b)| a != b);
        assert!(first.is_none(), "{what}: {differing} bytes from {first:?}");
    }
}

#[test]
fn fused_graphs_leave_the_same_memory() {
    let quantised_cache = Model {
        cache: Type::Q8_0,
        weights: Type::F16,
        ..TINY
    };
    let wide = Model {
        weights: Type::Q4K,
        width: 256,
        heads: 8,
        key_heads: 2,
        inner: 512,
        layers: 4,
        ..TINY
    };
    let models = [
        (TINY, "dense"),
        (TINY_EXPERTS, "experts"),
        (TINY_BIASES, "biases"),
        (TINY_GPT_OSS, "experts with biases"),
        (quantised_cache, "a quantised cache"),
        (wide, "wide"),
    ];
    for (model, what) in models {
        for tokens in [1, 3, 9, 32] {
            let built = model.graph(StepShape { tokens, seen: 64 });
            let plain = memory_after(&built, 1, false, false).expect("it runs");
            for threads in [1, 3] {
                for cut in [false, true] {
                    let fused = memory_after(&built, threads, true, cut).expect("it runs");
                    let what = format!("{what}, {tokens} tokens, {threads} threads, {cut}");
                    assert_same(&fused, &plain, &what);
                }
            }
        }
    }
}

/// Tensors that lie where no sane graph has them.
#[test]
fn fusion_preserves_results_with_overlapping_memory() {
    let mut random = Rng::new(7, 0);
    let mut below = |n: usize| random.below(n as u64) as usize;
    let (mut ran, mut tried) = (0, 0);
    while ran < 80 {
        tried += 1;
        assert!(tried < 600, "most of them run");
        let tokens = [1, 4, 12][tried / 4 % 3];
        let models = [TINY, TINY_EXPERTS, TINY_BIASES, TINY_GPT_OSS];
        let mut built = models[tried % 4].graph(StepShape { tokens, seen: 32 });
        let compute: Vec<usize> = { 0..built.graph.tensors.len() }
            .filter(|&i| built.graph.tensors[i].buffer == 2)
            .collect();
        let moved = built.graph.tensors[compute[below(compute.len())]];
        let other = built.graph.tensors[compute[below(compute.len())]];
        let place = other.offset + [0, 0, 128][below(3)];
        if built.is_input(&moved) || built.is_input(&other) {
            continue;
        }
        for tensor in &mut built.graph.tensors {
            if tensor.buffer == 2 && tensor.offset == moved.offset {
                tensor.offset = place;
            }
        }
        // One thread: what others would see of results that lie over sources is a matter of chance.
        let Some(plain) = memory_after(&built, 1, false, false) else {
            continue; // indices that are none
        };
        ran += 1;
        let fused = memory_after(&built, 1, true, false).expect("it ran node by node");
        assert_same(&fused, &plain, &format!("case {tried}"));
    }
}

/// Which operators are computed together, in the guest's order.
fn fused_ops(model: Model, tokens: u64) -> Vec<Vec<OpKind>> {
    let built = model.graph(StepShape { tokens, seen: 32 });
    let engine = CpuEngine::new(1, None).expect("an engine");
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    built.write_inputs(&loaded, 0);
    let spans = plan.profile().expect("it runs");
    let kinds = |mut nodes: Vec<usize>| {
        nodes.sort_unstable();
        { nodes.iter() }
            .map(|&node| built.graph.nodes[node].op.kind())
            .collect()
    };
    spans.into_iter().map(|span| kinds(span.nodes)).collect()
}

#[test]
fn matrix_products_are_fused_with_bias_and_gate() {
    use OpKind::{Add, AddId, Glu, MulMat, MulMatId};
    for tokens in [1, 4, 40] {
        let has = |model: Model, wanted: &[OpKind]| {
            // The result of the GLU is larger than the activations of its products, so the result
            // cannot reuse their memory, which would prevent fusion.
            let model = Model {
                layers: 4,
                inner: 512,
                ..model
            };
            let all = fused_ops(model, tokens);
            let count = all.iter().filter(|kinds| *kinds == wanted).count() as u64;
            // No node overwrites the results of the last layer: the guest may read them.
            assert!(
                count + 1 >= model.layers,
                "{count} of {wanted:?} in {all:?}"
            );
        };
        let terms = [MulMat, Add].repeat(3);
        has(TINY_BIASES, &terms);
        has(TINY_BIASES, &[MulMat, MulMat, Glu]);
        has(TINY_GPT_OSS, &terms);
        // Of more tokens, each expert's weights are read once for all of its own.
        if tokens > 8 {
            continue;
        }
        has(TINY_EXPERTS, &[MulMatId, MulMatId, Glu]);
        has(TINY_GPT_OSS, &[MulMatId, AddId, MulMatId, AddId, Glu]);
        has(TINY_GPT_OSS, &[MulMatId, AddId]);
    }
}

#[test]
fn timeline_has_every_node_once_and_the_results_of_a_run() {
    for (model, threads) in [(TINY, 1), (TINY, 2), (TINY_EXPERTS, 2), (TINY_GPT_OSS, 2)] {
        let built = model.graph(StepShape {
            tokens: 1,
            seen: 32,
        });
        let engine = CpuEngine::new(threads, None).expect("an engine");
        let loaded = built.load(&engine);
        let mut plan = built.compile(&engine, &loaded);
        built.write_inputs(&loaded, 0);
        plan.run().expect("it runs");
        let ran = built.read_result(&loaded);
        let spans = plan.profile().expect("it runs");
        let mut nodes: Vec<usize> = spans.iter().flat_map(|span| span.nodes.clone()).collect();
        nodes.sort_unstable();
        assert!(nodes.windows(2).all(|pair| pair[0] < pair[1]), "{spans:?}");
        // Views compute nothing, and have no time.
        let is_computed = |&at: &usize| !built.graph.dst(&built.graph.nodes[at]).shape.is_empty();
        assert!({ 0..built.graph.nodes.len() }.filter(is_computed).eq(nodes));
        assert!(spans.iter().any(|span| span.nodes.len() > 1), "{spans:?}");
        assert!(spans.iter().all(|span| span.seconds >= 0.0));
        assert_eq!(built.read_result(&loaded), ran);
    }
}
