//! The CUDA engine around its kernels: how plans reach a device, share its memory, and give way.

mod fusion;
mod megakernel;
mod memory;
mod plans;
mod repack;
#[path = "../../../shim/device.rs"]
mod shim;
mod spy;
mod upload_batch;

use std::sync::Arc;
use std::time::Duration;

use vgpu_cuda::device::Device;
use vgpu_cuda::{CudaEngine, LaunchPolicy};

/// An engine on a device that somebody watches, which records whatever runs a second time as one.
fn engine_on(device: &Arc<spy::Spy>) -> CudaEngine {
    let forever = Duration::from_secs(1 << 30);
    engine_with(
        device,
        LaunchPolicy {
            time_slice: forever,
            graph_threshold: forever,
            fusion: true,
            megakernel: false,
            repack: true,
        },
    )
}

/// The same at a policy of its own.
fn engine_with(device: &Arc<spy::Spy>, policy: LaunchPolicy) -> CudaEngine {
    let device: Arc<dyn Device> = Arc::clone(device) as Arc<dyn Device>;
    CudaEngine::with_policy(device, policy).expect("an engine")
}
