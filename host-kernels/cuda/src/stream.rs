//! What plans of an engine share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use vgpu_transport::ir::{Shape, Type};
use zerocopy::IntoBytes;

use super::choices::Choices;
use super::device::{Address, Device, Launch, SharedMemory};
use super::gather::Gathering;
use super::host::Host;
use super::memory::CudaMemory;
use super::params::{VgArangeParams, VgCodebooks, VgFault, VgView};
use super::pool::Pool;
use super::scratch::Scratch;
use super::segment::{Lineages, Pace};
use super::step::{COUNTER_BYTES, Forms, Said};
use vgpu_engine::{EngineError, Memory};

/// A device with what kernels need besides their tensors. One plan runs at a time.
pub(super) struct Stream {
    pub(super) device: Arc<dyn Device>,
    pub(super) pool: Arc<Pool>,
    pub(super) host: Host,
    pub(super) scratch: Arc<Scratch>,
    pub(super) lineages: Lineages,
    pub(super) pace: Pace,
    choices: OnceLock<Arc<Choices>>,
    /// Whether somebody has the device for a plan.
    is_taken: Mutex<bool>,
    /// Tells that nobody has any more.
    is_free: Condvar,
    /// What can be a stage of a step, on devices that have steps.
    pub(super) forms: Option<Forms>,
    /// What has been said of plans that are not one step.
    pub(super) said: Said,
    /// Whether a run has ended before its kernels did, so that counters may not be 0.
    pub(super) is_torn: AtomicBool,
    fault: SharedMemory,
    codebooks: CudaMemory,
    counters: CudaMemory,
}

/// See [`Stream::counters`].
pub(super) const COUNTERS: i64 = 1 << 16;

impl Stream {
    pub(super) fn new(device: Arc<dyn Device>, pace: Pace) -> Result<Stream, EngineError> {
        let device: Arc<dyn Device> = Arc::new(Gathering::new(device)?);
        let fault = device.alloc_shared(size_of::<VgFault>())?;
        let pool = Arc::new(Pool::new(&device));
        let codebooks = CudaMemory::new(&pool, size_of::<VgCodebooks>() as u64)?;
        codebooks.write(0, codebooks_of_formats().as_slice().into())?;
        let counters = CudaMemory::new(&pool, COUNTERS as u64 * 4 + COUNTER_BYTES)?;
        let forms = Forms::of(&*device);
        Ok(Stream {
            scratch: Arc::new(Scratch::new(&device)?),
            device,
            pool,
            host: Host::default(),
            lineages: Lineages::default(),
            pace,
            choices: OnceLock::new(),
            is_taken: Mutex::new(false),
            is_free: Condvar::new(),
            forms,
            said: Said::default(),
            is_torn: AtomicBool::new(false),
            fault,
            codebooks,
            counters,
        })
    }

    /// Has plans choose among kernels so from now on. The first one counts.
    pub(super) fn choose(&self, choices: &Arc<Choices>) {
        self.choices.get_or_init(|| Arc::clone(choices));
    }

    /// How to choose among kernels, if something is known of it.
    pub(super) fn choices(&self) -> Option<&Choices> {
        self.choices.get().map(|choices| &**choices)
    }

    /// Whether the device computes: a kernel gives what it should.
    pub(super) fn probe(&self) -> Result<(), EngineError> {
        const COUNT: usize = 64;
        let shape = Shape::contiguous(Type::F32, [COUNT as u64, 1, 1, 1]);
        let shape = shape.expect("a small shape");
        let memory = CudaMemory::new(&self.pool, 4 * COUNT as u64)?;
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
            together: false,
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
    pub(super) fn take(self: &Arc<Self>) -> Taken {
        let mut is_taken = { self.is_taken.lock() }.unwrap_or_else(PoisonError::into_inner);
        while *is_taken {
            is_taken = { self.is_free.wait(is_taken) }.unwrap_or_else(PoisonError::into_inner);
        }
        *is_taken = true;
        Taken(Arc::clone(self))
    }

    /// Where kernels report faults.
    pub(super) fn fault(&self) -> Address {
        self.fault.device
    }

    /// The codebooks of the IQ formats (`VgCodebooks`).
    pub(super) fn codebooks(&self) -> Address {
        self.codebooks.address()
    }

    /// [`COUNTERS`] numbers of 32 bits, all 0 before and after every launch: for blocks of a launch to tell each other
    /// how far they are. Launches that use them do not run side by side.
    pub(super) fn counters(&self) -> Address {
        self.counters.address()
    }

    /// The counters of a step ([`COUNTER_BYTES`]), all 0 before and after every launch.
    pub(super) fn step_counters(&self) -> Address {
        self.counters.address() + COUNTERS as u64 * 4
    }

    /// Sets all counters to 0, if a run that did not come to its end may have left others.
    ///
    /// # Safety
    /// No kernel runs, and the caller has the stream to itself.
    pub(super) unsafe fn mend(&self) -> Result<(), EngineError> {
        if !self.is_torn.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let bytes = COUNTERS as u64 * 4 + COUNTER_BYTES;
        // SAFETY: all of the counters' memory, which nobody uses now.
        unsafe { self.device.fill(self.counters(), bytes, 0) }
    }

    /// What kernels have reported since this was asked last.
    ///
    /// # Safety
    /// No kernel runs, and the caller has the stream to itself.
    pub(super) unsafe fn take_fault(&self) -> Option<VgFault> {
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
pub(super) struct Taken(Arc<Stream>);

impl Drop for Taken {
    fn drop(&mut self) {
        *{ self.0.is_taken.lock() }.unwrap_or_else(PoisonError::into_inner) = false;
        self.0.is_free.notify_one();
    }
}

/// The bytes of `VgCodebooks`.
fn codebooks_of_formats() -> Vec<u8> {
    use vgpu_cpu::formats::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
    let books: [&[u64]; 6] = [&IQ2_XXS, &IQ2_XS, &IQ2_S, &IQ3_XXS, &IQ3_S, &IQ1];
    let entries = books.into_iter().flatten();
    entries.flat_map(|entry| entry.to_le_bytes()).collect()
}
