//! What drivers report of GPUs, and of kernels on them.
#![forbid(unsafe_code)]

/// A GPU model: the attributes of `cuDeviceGetAttribute` on which plans depend.
///
/// Shared memory is from the CUDA C++ programming guide, "Technical Specifications per Compute
/// Capability"; SMs and bandwidth are from NVIDIA's data sheets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceModel {
    /// The name of the model.
    pub name: &'static str,
    /// The architecture whose kernels the engine chooses.
    pub architecture: &'static str,
    /// `MULTIPROCESSOR_COUNT`.
    pub sm_count: u32,
    /// `MAX_SHARED_MEMORY_PER_MULTIPROCESSOR`, in bytes.
    pub shared_per_sm: u32,
    /// `MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`, in bytes, static and dynamic memory together.
    pub shared_per_block: u32,
    /// Bytes per second of the memory.
    pub memory_bandwidth: u64,
}

impl DeviceModel {
    /// A100, 80 GB, SXM: compute capability 8.0.
    pub const A100: DeviceModel = DeviceModel {
        name: "A100",
        architecture: "sm_80",
        sm_count: 108,
        shared_per_sm: 164 << 10,
        shared_per_block: 163 << 10,
        memory_bandwidth: 2_039_000_000_000,
    };

    /// L4: compute capability 8.9, which has the least shared memory of those supported.
    pub const L4: DeviceModel = DeviceModel {
        name: "L4",
        architecture: "sm_89",
        sm_count: 58,
        shared_per_sm: 100 << 10,
        shared_per_block: 99 << 10,
        memory_bandwidth: 300_000_000_000,
    };

    /// H100, SXM: compute capability 9.0.
    pub const H100: DeviceModel = DeviceModel {
        name: "H100",
        architecture: "sm_90a",
        sm_count: 132,
        shared_per_sm: 228 << 10,
        shared_per_block: 227 << 10,
        memory_bandwidth: 3_350_000_000_000,
    };

    /// H200: compute capability 9.0.
    pub const H200: DeviceModel = DeviceModel {
        name: "H200",
        memory_bandwidth: 4_800_000_000_000,
        ..DeviceModel::H100
    };

    /// B200: compute capability 10.0.
    pub const B200: DeviceModel = DeviceModel {
        name: "B200",
        architecture: "sm_100a",
        sm_count: 148,
        memory_bandwidth: 8_000_000_000_000,
        ..DeviceModel::H100
    };

    /// All models.
    pub const ALL: [DeviceModel; 5] = [
        DeviceModel::A100,
        DeviceModel::L4,
        DeviceModel::H100,
        DeviceModel::H200,
        DeviceModel::B200,
    ];
}
