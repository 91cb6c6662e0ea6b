//! What plans report about their own memory, beside what an allocator counts: at least as much, and
//! at most twice as much. (`ops` compares the plan of every operator.)

#[allow(dead_code)] // as in `common`
#[path = "common/counting.rs"]
mod counting;
#[path = "../../shim/device.rs"]
mod shim;

use std::sync::Arc;

use counting::{Counting, counted};
use vgpu_check::model::{Family, Model, StepShape, TINY, TINY_EXPERTS};
use vgpu_cpu::CpuEngine;
use vgpu_cuda::CudaEngine;
use vgpu_engine::Engine;
use vgpu_transport::ir::{GraphCounts, Type};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Compiles the graphs of models that have more nodes than a plan has fixed costs.
fn check(engine: &dyn Engine) {
    for model in [TINY, TINY_EXPERTS] {
        let model = Model {
            layers: 8,
            weights: Type::Q8_0,
            family: Family::Llama,
            ..model
        };
        for tokens in [1, 20] {
            let built = model.graph(StepShape { tokens, seen: 64 });
            let loaded = built.load(engine);
            let graph = built.valid(engine);
            let counts = GraphCounts::of_image(&graph.graph().encode()).expect("an image");
            // The first graph starts what an engine starts when it is needed.
            drop(engine.compile(&graph, &loaded.buffers, &|| false));
            let (plan, allocated) = counted(|| engine.compile(&graph, &loaded.buffers, &|| false));
            let plan = plan.expect("the engine runs these models");
            let (bytes, most) = (plan.plan_bytes(), engine.compile_bytes(&counts));
            let kept = allocated.kept;
            println!(
                "{}: {} nodes, {bytes} bytes reported, {kept} kept, {most} announced, {} at most",
                engine.name(),
                counts.nodes,
                allocated.most
            );
            assert!(kept <= bytes, "{bytes} bytes reported, {kept} allocated");
            assert!(
                bytes <= 2 * kept,
                "{bytes} bytes reported, {kept} allocated"
            );
            assert!(allocated.most <= most, "{} of {most}", allocated.most);
        }
    }
}

#[test]
fn plans_of_the_cpu_engine_report_their_bytes() {
    check(&CpuEngine::new(3, None).expect("an engine"));
}

#[test]
fn plans_of_the_cuda_engine_report_their_bytes() {
    let engine = CudaEngine::new(Arc::new(shim::Shim::default())).expect("an engine");
    check(&engine);
}
