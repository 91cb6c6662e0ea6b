//! Functions, their limits, and launches.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use vgpu_cuda_shim::{Kernel, ShimError};

use crate::cards::{Card, REGISTERS};
use crate::code::Resources;
use crate::codes::{Answer, Code};
use crate::faults::Fault;
use crate::settings::settings;

/// Dynamic and static shared memory of a block without opt-in.
pub(crate) const SHARED_PER_BLOCK: u32 = 48 << 10;

/// Shared memory of each resident block that the system takes.
pub(crate) const RESERVED_SHARED: u32 = 1 << 10;

const WARP: u32 = 32;

/// Registers are given to warps in units of so many.
const REGISTER_UNIT: u32 = 256;

/// The parts of an SM that have registers of their own.
const PARTITIONS: u32 = 4;

/// Shared memory is given to blocks in units of so many bytes.
const SHARED_UNIT: u32 = 128;

/// The largest block and grid in each dimension.
const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
const MAX_GRID: [u32; 3] = [(1 << 31) - 1, 65535, 65535];
pub(crate) const MAX_THREADS: u32 = 1024;

/// A function of a module.
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) kernel: Kernel,
    pub(crate) resources: Resources,
    /// The compute capability that the code is for, as `CU_FUNC_ATTRIBUTE_BINARY_VERSION`.
    pub(crate) binary_version: u32,
    /// The most dynamic shared memory of a block (`MAX_DYNAMIC_SHARED_SIZE_BYTES`).
    pub(crate) max_dynamic: AtomicU32,
}

impl Function {
    /// Allows blocks this much dynamic shared memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` if that is more than the GPU has, less the static shared memory.
    pub(crate) fn set_max_dynamic(&self, card: &Card, bytes: i32) -> Answer {
        let bytes = u32::try_from(bytes).map_err(|_| Code::CUDA_ERROR_INVALID_VALUE)?;
        let all = bytes.checked_add(self.resources.shared);
        if all.is_none_or(|all| all > card.model.shared_per_block) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        self.max_dynamic.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// The blocks that an SM runs at a time (CUDA occupancy calculator).
    pub(crate) fn blocks_per_sm(&self, card: &Card, threads: u32, dynamic: u32) -> u32 {
        let warps = threads.div_ceil(WARP).max(1);
        if threads > self.kernel.max_threads() {
            return 0;
        }
        let shared = self.resources.shared.saturating_add(dynamic);
        if shared > card.model.shared_per_block {
            return 0;
        }
        let shared = (shared + RESERVED_SHARED).next_multiple_of(SHARED_UNIT);
        let resident_warps = REGISTERS / PARTITIONS / self.registers_of_warp() * PARTITIONS;
        [
            card.blocks_per_sm,
            card.threads_per_sm / WARP / warps,
            resident_warps / warps,
            card.model.shared_per_sm / shared,
        ]
        .into_iter()
        .min()
        .unwrap_or(0)
    }

    fn registers_of_warp(&self) -> u32 {
        (self.resources.registers.max(1) * WARP).next_multiple_of(REGISTER_UNIT)
    }
}

/// A launch of a function.
#[derive(Clone)]
pub(crate) struct Launch {
    pub(crate) function: Arc<Function>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) params: Vec<u8>,
    pub(crate) cooperative: bool,
}

impl Launch {
    /// Checks the limits of the GPU and of the function.
    ///
    /// # Errors
    /// `INVALID_VALUE`, `LAUNCH_OUT_OF_RESOURCES`, `COOPERATIVE_LAUNCH_TOO_LARGE`.
    pub(crate) fn check(&self, card: &Card) -> Answer {
        let is_within = |sizes: &[u32; 3], most: &[u32; 3]| {
            sizes
                .iter()
                .zip(most)
                .all(|(size, most)| (1..=*most).contains(size))
        };
        if !is_within(&self.grid, &MAX_GRID) || !is_within(&self.block, &MAX_BLOCK) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        let threads: u32 = self.block.iter().product();
        if threads > MAX_THREADS || self.shared > self.function.max_dynamic.load(Ordering::Relaxed)
        {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        // cuda.h says of this code: "passing arguments of the wrong size", too.
        let warps = threads.div_ceil(WARP).next_multiple_of(PARTITIONS);
        if threads > self.function.kernel.max_threads()
            || warps * self.function.registers_of_warp() > REGISTERS
            || self.params.len() != self.function.kernel.parameter_bytes()
        {
            return Err(Code::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
        }
        if self.cooperative {
            let per_sm = self.function.blocks_per_sm(card, threads, self.shared);
            let resident = u64::from(per_sm) * u64::from(card.model.sm_count);
            if self.grid.iter().map(|&n| u64::from(n)).product::<u64>() > resident {
                return Err(Code::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
            }
        }
        Ok(())
    }

    /// Runs the kernel, or does what is asked for in its place.
    ///
    /// # Errors
    /// A sticky code.
    ///
    /// # Safety
    /// The addresses in the parameters are of memory that the kernel may use, or of none at all: an
    /// access to no memory is the sticky error of the queue on whose thread this runs.
    pub(crate) unsafe fn run(&self) -> Answer {
        static SEED: AtomicU64 = AtomicU64::new(0);
        match settings().faults.of_launch(&self.function.name) {
            None => {}
            Some(Fault::Code(code)) => return Err(code),
            // For entry points of NVML only.
            Some(Fault::Nvml(_)) => return Err(Code::CUDA_ERROR_UNKNOWN),
            Some(Fault::Nothing) => return Ok(()),
            Some(Fault::Abort) => std::process::abort(),
            Some(Fault::Hang) => loop {
                std::thread::park();
            },
        }
        let shared = self.shared as usize;
        let kernel = &self.function.kernel;
        // SAFETY: the caller guarantees the memory that the parameters name, or takes the signal.
        let outcome = unsafe {
            match self.cooperative {
                true => {
                    let seed = SEED.fetch_add(1, Ordering::Relaxed);
                    let blocks = self.grid.iter().product();
                    kernel.launch_cooperative(blocks, self.block, shared, &self.params, seed)
                }
                false => kernel.launch(self.grid, self.block, shared, &self.params),
            }
        };
        outcome.map_err(|error| {
            eprintln!("the stand-in for NVIDIA's driver: {error}");
            match error {
                ShimError::Kernel { reason, .. } if reason.contains("multiple of") => {
                    Code::CUDA_ERROR_MISALIGNED_ADDRESS
                }
                _ => Code::CUDA_ERROR_LAUNCH_FAILED,
            }
        })
    }
}
