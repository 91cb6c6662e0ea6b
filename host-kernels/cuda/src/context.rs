//! What the plans of an engine share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use vgpu_transport::ir::{Shape, Type};
use vgpu_transport::lock::{lock, wait};
use zerocopy::IntoBytes;

use crate::activation_cache::ACTIVATION_CACHE_BYTES;
use crate::allocator::Allocator;
use crate::autotune::TuningTable;
use crate::batch::BatchState;
use crate::cpu_fallback::CpuFallback;
use crate::device::{Address, Device, Launch};
use crate::graph_exec::GraphTemplates;
use crate::kernel_set::{KernelSet, UsableKernels};
use crate::launch::place::{FaultCells, Place};
use crate::launch::policy::LaunchPolicy;
use crate::launch::q8::{MAX_MMV_COLUMNS, MMV_COLUMNS};
use crate::megakernel::report::ReportedReasons;
use crate::megakernel::stages::{COUNTER_BYTES, MEGAKERNELS, StageKernels};
use crate::memory::CudaMemory;
use crate::merge::MergeKernels;
use crate::params::{VgArangeParams, VgCodebooks, VgView};
use crate::scratch::Scratch;
use crate::source::SM_90A;
use crate::upload_batch::UploadBatcher;
use vgpu_engine::{BatchKeys, EngineError, Memory};

/// A device, with the buffers that kernels need besides their tensors. One plan runs at a time.
pub(crate) struct ExecutionContext {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) kernels: UsableKernels,
    pub(crate) allocator: Arc<Allocator>,
    pub(crate) cpu_fallback: CpuFallback,
    pub(crate) scratch: Arc<Scratch>,
    pub(crate) templates: GraphTemplates,
    pub(crate) policy: LaunchPolicy,
    tuning: OnceLock<Arc<TuningTable>>,
    /// Whether a plan has the device.
    is_locked: Mutex<bool>,
    /// Signals that no plan has the device.
    unlocked: Condvar,
    /// The kernels with a megakernel stage, if the device has the megakernel.
    stage_kernels: Option<StageKernels>,
    /// The reasons that the log has given for launches outside a megakernel.
    pub(crate) reported: ReportedReasons,
    /// Whether a run has failed, so that counters may not be 0.
    pub(crate) counters_dirty: AtomicBool,
    pub(crate) faults: Arc<FaultCells>,
    /// The keys of plans that can run as a batch.
    pub(crate) batch_keys: BatchKeys<Mutex<BatchState>>,
    codebooks: CudaMemory,
    counters: CudaMemory,
}

/// A kernel for few columns on tensor cores of each width.
const FEW_KERNELS: [&str; 3] = [
    "vg_gemm_sm90_q4_k_16",
    "vg_gemm_sm90_q4_k_32",
    "vg_gemm_sm90_q4_k_64",
];

/// The number of counters: see [`ExecutionContext::counters`].
pub(crate) const COUNTERS: i64 = 1 << 16;

impl ExecutionContext {
    /// The context of `device`, with the engine's own buffers. Plans use the kernels in `set`.
    ///
    /// # Errors
    /// [`EngineError`] of the device, if it has no memory for the buffers.
    pub(crate) fn new(
        device: Arc<dyn Device>,
        policy: LaunchPolicy,
        set: Arc<KernelSet>,
    ) -> Result<ExecutionContext, EngineError> {
        let kernels = UsableKernels::new(Arc::clone(&device), set);
        let upload = kernels.find("vg_upload").ok();
        let device: Arc<dyn Device> = Arc::new(UploadBatcher::new(device, upload)?);
        let faults = Arc::new(FaultCells::new(&*device)?);
        let allocator = Arc::new(Allocator::new(&device));
        let codebooks = CudaMemory::new(&allocator, size_of::<VgCodebooks>() as u64)?;
        codebooks.write(0, codebooks_of_formats().as_slice().into())?;
        let counters = CudaMemory::new(&allocator, COUNTERS as u64 * 4 + COUNTER_BYTES)?;
        let stage_kernels = StageKernels::of(&*device);
        Ok(ExecutionContext {
            scratch: Arc::new(Scratch::new(&device)?),
            device,
            kernels,
            allocator,
            cpu_fallback: CpuFallback::default(),
            templates: GraphTemplates::default(),
            policy,
            tuning: OnceLock::new(),
            is_locked: Mutex::new(false),
            unlocked: Condvar::new(),
            stage_kernels,
            reported: ReportedReasons::default(),
            counters_dirty: AtomicBool::new(false),
            faults,
            batch_keys: BatchKeys::default(),
            codebooks,
            counters,
        })
    }

    /// Sets the tuning table. Only the first call has an effect.
    pub(crate) fn set_tuning(&self, tuning: &Arc<TuningTable>) {
        self.tuning.get_or_init(|| Arc::clone(tuning));
    }

    /// The tuning table, if there is one.
    pub(crate) fn tuning(&self) -> Option<&TuningTable> {
        self.tuning.get().map(|tuning| &**tuning)
    }

    /// The kernels of launches that merge, if launches may become one.
    pub(crate) fn merge_kernels(&self) -> Option<MergeKernels> {
        let kernels = self.policy.fusion.then(|| MergeKernels::of(&self.kernels));
        kernels.flatten()
    }

    /// The kernels with a megakernel stage, if launches become megakernels where possible.
    pub(crate) fn stage_kernels(&self) -> Option<&StageKernels> {
        let is_usable =
            self.policy.megakernel && MEGAKERNELS.iter().all(|&it| self.kernels.has(it));
        self.stage_kernels.as_ref().filter(|_| is_usable)
    }

    /// Runs a kernel, if it may be used, and checks its result.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the result is wrong.
    pub(crate) fn probe(&self) -> Result<(), EngineError> {
        const COUNT: usize = 64;
        let Ok(kernel) = self.kernels.find("vg_arange") else {
            return self.device.synchronize();
        };
        let shape = Shape::contiguous(Type::F32, [COUNT as u64, 1, 1, 1]);
        let shape = shape.expect("a small shape");
        let memory = CudaMemory::new(&self.allocator, 4 * COUNT as u64)?;
        let params = VgArangeParams {
            dst: VgView::new(memory.address(), &shape),
            start: 1.0,
            step: 2.0,
        };
        let launch = Launch {
            kernel,
            grid: [1; 3],
            threads: [COUNT as u32, 1, 1],
            shared: 0,
            params: params.as_bytes().to_vec(),
            cooperative: false,
        };
        let mut bytes = [0; 4 * COUNT];
        // SAFETY: the kernel writes `COUNT` numbers, for which `memory` has room; `memory` lives
        // until the read below, which waits for the kernel.
        unsafe { self.device.launch(&launch) }?;
        memory.read(0, bytes.as_mut_slice().into())?;
        let right = (0..COUNT).flat_map(|i| (1.0 + 2.0 * i as f32).to_le_bytes());
        if right.eq(bytes) {
            return Ok(());
        }
        Err(EngineError::Device {
            message: "a test kernel gives wrong results".into(),
        })
    }

    /// Takes the device for a plan. Waits while another plan has it.
    pub(crate) fn lock_device(self: &Arc<Self>) -> DeviceGuard {
        let mut is_locked = lock(&self.is_locked);
        while *is_locked {
            is_locked = wait(&self.unlocked, is_locked);
        }
        *is_locked = true;
        DeviceGuard(Arc::clone(self))
    }

    /// The place of plans that run one at a time.
    pub(crate) fn shared_place(&self) -> Place {
        let (scratch, bytes) = self.scratch.range();
        Place {
            scratch,
            bytes,
            cache_bytes: ACTIVATION_CACHE_BYTES,
            fault: self.faults.shared(),
        }
    }

    /// The codebooks of the IQ formats (`VgCodebooks`).
    pub(crate) fn codebooks(&self) -> Address {
        self.codebooks.address()
    }

    /// The most columns that matrix-vector kernels multiply in fused launches: those of a block
    /// where tensor cores have kernels for few columns, else more.
    pub(crate) fn mmv_columns(&self) -> i64 {
        let is_sm90 = self.device.architecture() == SM_90A;
        // The kernels of a width are there for all types or for none, unless some are disabled.
        let has_few = is_sm90
            && self.kernels.has("vg_convert_f16_sm90")
            && FEW_KERNELS.iter().any(|kernel| self.kernels.has(kernel));
        if has_few {
            MMV_COLUMNS
        } else {
            MAX_MMV_COLUMNS
        }
    }

    /// [`COUNTERS`] 32-bit counters, all 0 before and after every launch, by which the blocks of a
    /// launch count what is done. Launches that use them do not run at the same time.
    pub(crate) fn counters(&self) -> Address {
        self.counters.address()
    }

    /// The counters of a megakernel ([`COUNTER_BYTES`] bytes), all 0 before and after every launch.
    pub(crate) fn megakernel_counters(&self) -> Address {
        self.counters.address() + COUNTERS as u64 * 4
    }

    /// Sets all counters to 0 if a failed run may have left others.
    ///
    /// # Errors
    /// [`EngineError`] of the device.
    ///
    /// # Safety
    /// No kernel runs, and the caller has the device.
    pub(crate) unsafe fn reset_counters(&self) -> Result<(), EngineError> {
        if !self.counters_dirty.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let bytes = COUNTERS as u64 * 4 + COUNTER_BYTES;
        // SAFETY: `counters` was allocated with COUNTERS words and COUNTER_BYTES behind them. No
        // kernel runs that uses them, as the caller guarantees.
        unsafe { self.device.fill(self.counters(), bytes, 0) }
    }
}

/// A plan's hold of the device; dropping it releases the device.
pub(crate) struct DeviceGuard(Arc<ExecutionContext>);

impl Drop for DeviceGuard {
    fn drop(&mut self) {
        *lock(&self.0.is_locked) = false;
        self.0.unlocked.notify_one();
    }
}

/// The bytes of `VgCodebooks`, in the order of its fields.
fn codebooks_of_formats() -> Vec<u8> {
    use vgpu_cpu::formats::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
    let grids: [&[u64]; 6] = [&IQ2_XXS, &IQ2_XS, &IQ2_S, &IQ3_XXS, &IQ3_S, &IQ1];
    let entries = grids.into_iter().flatten();
    entries.flat_map(|entry| entry.to_le_bytes()).collect()
}
