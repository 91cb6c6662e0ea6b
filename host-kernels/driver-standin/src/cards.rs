//! The GPUs that there may be.
#![forbid(unsafe_code)]

use vgpu_cuda_shim::DeviceModel;

/// Registers of an SM, and the most of a block.
pub(crate) const REGISTERS: u32 = 65536;

/// What the driver reports of a GPU, besides the attributes in [`DeviceModel`]. Sources: CUDA C++
/// programming guide, "Technical Specifications per Compute Capability"; NVIDIA's data sheets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Card {
    pub(crate) model: DeviceModel,
    /// The name that `cuDeviceGetName` gives.
    pub(crate) name: &'static str,
    pub(crate) capability: (u32, u32),
    /// Bytes of memory.
    pub(crate) memory: u64,
    /// Bytes of the L2 cache.
    pub(crate) l2: u32,
    pub(crate) threads_per_sm: u32,
    pub(crate) blocks_per_sm: u32,
    /// In kHz. The memory transfers twice a cycle.
    pub(crate) memory_clock: u32,
    /// In bits.
    pub(crate) memory_bus: u32,
    /// In kHz.
    pub(crate) clock: u32,
}

const H100: Card = Card {
    model: DeviceModel::H100,
    name: "NVIDIA H100 80GB HBM3",
    capability: (9, 0),
    memory: 80 << 30,
    l2: 50 << 20,
    threads_per_sm: 2048,
    blocks_per_sm: 32,
    memory_clock: 2_619_000,
    memory_bus: 5120,
    clock: 1_980_000,
};

/// All of them.
pub(crate) const CARDS: [Card; 5] = [
    Card {
        model: DeviceModel::A100,
        name: "NVIDIA A100-SXM4-80GB",
        capability: (8, 0),
        memory: 80 << 30,
        l2: 40 << 20,
        memory_clock: 1_593_000,
        clock: 1_410_000,
        ..H100
    },
    Card {
        model: DeviceModel::L4,
        name: "NVIDIA L4",
        capability: (8, 9),
        memory: 24 << 30,
        l2: 48 << 20,
        threads_per_sm: 1536,
        blocks_per_sm: 24,
        memory_clock: 6_251_000,
        memory_bus: 192,
        clock: 2_040_000,
    },
    H100,
    Card {
        model: DeviceModel::H200,
        name: "NVIDIA H200",
        memory: 141 << 30,
        l2: 60 << 20,
        memory_clock: 3_201_000,
        memory_bus: 6144,
        ..H100
    },
    Card {
        model: DeviceModel::B200,
        name: "NVIDIA B200",
        capability: (10, 0),
        memory: 180 << 30,
        l2: 126 << 20,
        memory_clock: 3_996_000,
        memory_bus: 8192,
        clock: 1_965_000,
        ..H100
    },
];

/// The PCI address of the GPU with this index, as `cuDeviceGetPCIBusId` gives it.
pub(crate) fn address(index: usize) -> String {
    format!("0000:{:02x}:00.0", index + 1)
}

impl Card {
    /// The GPU with this name of a model, such as `H100`.
    pub(crate) fn named(name: &str) -> Option<Card> {
        CARDS.into_iter().find(|card| card.model.name == name)
    }
}
