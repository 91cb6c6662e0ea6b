//! What plans of an engine share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use vgpu_transport::ir::{Shape, Type};
use zerocopy::IntoBytes;

use crate::allocator::Allocator;
use crate::autotune::TuningTable;
use crate::cpu_fallback::CpuFallback;
use crate::device::{Address, Device, Launch, MappedHostMemory};
use crate::graph_exec::GraphTemplates;
use crate::launch::policy::LaunchPolicy;
use crate::megakernel::report::ReportedReasons;
use crate::megakernel::stages::{COUNTER_BYTES, StageKernels};
use crate::memory::CudaMemory;
use crate::params::{VgArangeParams, VgCodebooks, VgFault, VgView};
use crate::scratch::Scratch;
use crate::upload_batch::UploadBatcher;
use vgpu_engine::{EngineError, Memory};

/// A device with what kernels need besides their tensors. One plan runs at a time.
pub(crate) struct ExecutionContext {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) allocator: Arc<Allocator>,
    pub(crate) cpu_fallback: CpuFallback,
    pub(crate) scratch: Arc<Scratch>,
    pub(crate) templates: GraphTemplates,
    pub(crate) policy: LaunchPolicy,
    tuning: OnceLock<Arc<TuningTable>>,
    /// Whether somebody has the device for a plan.
    is_locked: Mutex<bool>,
    /// Tells that nobody has any more.
    unlocked: Condvar,
    /// What can be a stage of a step, on devices that have steps.
    pub(crate) stage_kernels: Option<StageKernels>,
    /// What has been reported of plans that are not one step.
    pub(crate) reported: ReportedReasons,
    /// Whether a run has ended before its kernels did, so that counters may not be 0.
    pub(crate) counters_dirty: AtomicBool,
    fault: MappedHostMemory,
    codebooks: CudaMemory,
    counters: CudaMemory,
}

/// See [`ExecutionContext::counters`].
pub(crate) const COUNTERS: i64 = 1 << 16;

impl ExecutionContext {
    pub(crate) fn new(
        device: Arc<dyn Device>,
        policy: LaunchPolicy,
    ) -> Result<ExecutionContext, EngineError> {
        let device: Arc<dyn Device> = Arc::new(UploadBatcher::new(device)?);
        let fault = device.alloc_mapped(size_of::<VgFault>())?;
        let allocator = Arc::new(Allocator::new(&device));
        let codebooks = CudaMemory::new(&allocator, size_of::<VgCodebooks>() as u64)?;
        codebooks.write(0, codebooks_of_formats().as_slice().into())?;
        let counters = CudaMemory::new(&allocator, COUNTERS as u64 * 4 + COUNTER_BYTES)?;
        let stage_kernels = StageKernels::of(&*device);
        Ok(ExecutionContext {
            scratch: Arc::new(Scratch::new(&device)?),
            device,
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
            fault,
            codebooks,
            counters,
        })
    }

    /// Has plans choose among kernels so from now on. The first one counts.
    pub(crate) fn set_tuning(&self, tuning: &Arc<TuningTable>) {
        self.tuning.get_or_init(|| Arc::clone(tuning));
    }

    /// How to choose among kernels, if something is known of it.
    pub(crate) fn tuning(&self) -> Option<&TuningTable> {
        self.tuning.get().map(|tuning| &**tuning)
    }

    /// Whether the device computes: a kernel gives what it should.
    pub(crate) fn probe(&self) -> Result<(), EngineError> {
        const COUNT: usize = 64;
        let shape = Shape::contiguous(Type::F32, [COUNT as u64, 1, 1, 1]);
        let shape = shape.expect("a small shape");
        let memory = CudaMemory::new(&self.allocator, 4 * COUNT as u64)?;
        let params = VgArangeParams {
            dst: VgView::new(memory.address(), &shape),
            start: 1.0,
            step: 2.0,
        };
        let launch = Launch {
            kernel: self.device.kernel("vg_arange")?,
            grid: [1; 3],
            threads: [COUNT as u32, 1, 1],
            shared: 0,
            params: params.as_bytes().to_vec(),
            cooperative: false,
        };
        let mut bytes = [0; 4 * COUNT];
        // SAFETY: the kernel writes as many numbers as there is memory for, which is there until it has been read.
        unsafe { self.device.launch(&launch) }?;
        memory.read(0, bytes.as_mut_slice().into())?;
        let right = (0..COUNT).flat_map(|i| (1.0 + 2.0 * i as f32).to_le_bytes());
        if right.eq(bytes) {
            return Ok(());
        }
        Err(EngineError::Device {
            message: "a kernel gives wrong results".into(),
        })
    }

    /// Takes the device for a plan; waits while another one has it.
    pub(crate) fn lock_device(self: &Arc<Self>) -> DeviceGuard {
        let mut is_locked = { self.is_locked.lock() }.unwrap_or_else(PoisonError::into_inner);
        while *is_locked {
            is_locked = { self.unlocked.wait(is_locked) }.unwrap_or_else(PoisonError::into_inner);
        }
        *is_locked = true;
        DeviceGuard(Arc::clone(self))
    }

    /// Where kernels report faults.
    pub(crate) fn fault(&self) -> Address {
        self.fault.device
    }

    /// The codebooks of the IQ formats (`VgCodebooks`).
    pub(crate) fn codebooks(&self) -> Address {
        self.codebooks.address()
    }

    /// [`COUNTERS`] numbers of 32 bits, all 0 before and after every launch: for blocks of a launch to tell each other
    /// how far they are. Launches that use them do not run side by side.
    pub(crate) fn counters(&self) -> Address {
        self.counters.address()
    }

    /// The counters of a step ([`COUNTER_BYTES`]), all 0 before and after every launch.
    pub(crate) fn step_counters(&self) -> Address {
        self.counters.address() + COUNTERS as u64 * 4
    }

    /// Sets all counters to 0, if a run that did not come to its end may have left others.
    ///
    /// # Safety
    /// No kernel runs, and the caller has the context to itself.
    pub(crate) unsafe fn reset_counters(&self) -> Result<(), EngineError> {
        if !self.counters_dirty.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let bytes = COUNTERS as u64 * 4 + COUNTER_BYTES;
        // SAFETY: all of the counters' memory, which nobody uses now.
        unsafe { self.device.fill(self.counters(), bytes, 0) }
    }

    /// What kernels have reported since this was asked last.
    ///
    /// # Safety
    /// No kernel runs, and the caller has the context to itself.
    pub(crate) unsafe fn take_fault(&self) -> Option<VgFault> {
        let cell = self.fault.host.cast::<VgFault>();
        // SAFETY: the cell has this size and lives as long as the device; nobody else uses it now.
        unsafe {
            let found = cell.read_volatile();
            if found.taken == 0 {
                return None;
            }
            cell.write_volatile(VgFault::default());
            Some(found)
        }
    }
}

/// The device, until this is dropped.
pub(crate) struct DeviceGuard(Arc<ExecutionContext>);

impl Drop for DeviceGuard {
    fn drop(&mut self) {
        *{ self.0.is_locked.lock() }.unwrap_or_else(PoisonError::into_inner) = false;
        self.0.unlocked.notify_one();
    }
}

/// The bytes of `VgCodebooks`.
fn codebooks_of_formats() -> Vec<u8> {
    use vgpu_cpu::formats::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
    let books: [&[u64]; 6] = [&IQ2_XXS, &IQ2_XS, &IQ2_S, &IQ3_XXS, &IQ3_S, &IQ1];
    let entries = books.into_iter().flatten();
    entries.flat_map(|entry| entry.to_le_bytes()).collect()
}
