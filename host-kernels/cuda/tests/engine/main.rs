//! The CUDA engine around its kernels: how plans reach a device, share its memory, and give way.

mod fusion;
mod gather;
mod memory;
mod planes;
mod plans;
#[path = "../../../shim/device.rs"]
mod shim;
mod spy;
mod steps;

use std::sync::Arc;
use std::time::Duration;

use vgpu_cuda::device::Device;
use vgpu_cuda::{CudaEngine, Pace};

/// An engine on a device that somebody watches, which records whatever runs a second time as one.
fn engine_on(device: &Arc<spy::Spy>) -> CudaEngine {
    let forever = Duration::from_secs(1 << 30);
    engine_at(
        device,
        Pace {
            piece: forever,
            long: forever,
            fuses: true,
            steps: false,
            arranges: true,
        },
    )
}

/// The same at a pace of its own.
fn engine_at(device: &Arc<spy::Spy>, pace: Pace) -> CudaEngine {
    let device: Arc<dyn Device> = Arc::clone(device) as Arc<dyn Device>;
    CudaEngine::at_pace(device, pace).expect("an engine")
}
