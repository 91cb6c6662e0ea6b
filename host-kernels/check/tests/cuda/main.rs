//! The CUDA engine around its kernels: how plans reach a device, share its memory, and yield.

mod batch;
mod cpu_nodes;
mod divided;
mod fusion;
#[path = "../common/guests.rs"]
mod guests;
mod launches_ahead;
mod megakernel;
mod memory;
mod plans;
mod repack;
#[path = "../common/sample.rs"]
mod sample;
mod shared_weights;
mod shared_weights_bounds;
#[path = "../../../shim/device.rs"]
mod shim;
mod single_nodes;
mod spy;
mod upload_batch;

use std::sync::Arc;
use std::time::Duration;

use vgpu_cuda::device::Device;
use vgpu_cuda::{CudaEngine, LaunchPolicy};

/// A CUDA graph for whatever runs a second time.
fn graphs_from_the_second_run() -> LaunchPolicy {
    let forever = Duration::from_secs(1 << 30);
    LaunchPolicy {
        time_slice: forever,
        longest_launch: forever,
        longest_whole: forever,
        graph_threshold: forever,
        fusion: true,
        megakernel: false,
        repack: true,
        batch: true,
        min_graph_launches: 4,
        min_stages: 4,
    }
}

/// An engine on a spy device, which uses a CUDA graph for whatever runs a second time.
fn engine_on(device: &Arc<spy::Spy>) -> CudaEngine {
    engine_with(device, graphs_from_the_second_run())
}

/// The same with a policy.
fn engine_with(device: &Arc<spy::Spy>, policy: LaunchPolicy) -> CudaEngine {
    let device: Arc<dyn Device> = Arc::clone(device) as Arc<dyn Device>;
    CudaEngine::with_policy(device, policy).expect("an engine")
}
