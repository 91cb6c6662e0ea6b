//! A device that writes down what it is asked for, runs kernels or does not, and fails on command.

use std::sync::{Mutex, MutexGuard, PoisonError};

use vgpu_cuda::device::{Address, Device, KernelId, Launch, Mark, RecordingId, SharedMemory};
use vgpu_engine::{EngineError, MemoryInfo};
use vgpu_transport::bytes::{Bytes, BytesMut};

use crate::shim::Shim;

/// The shim with somebody who watches it.
pub(crate) struct Spy {
    pub(crate) shim: Shim,
    /// Whether kernels run at all.
    runs: bool,
    /// Whether it has memory as a GPU has: in large chunks, and not more than this.
    limit: Option<u64>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    names: Vec<(KernelId, &'static str)>,
    log: Vec<Event>,
    fails: Option<Fails>,
    lost: Option<String>,
    /// Bytes that are allocated.
    used: u64,
}

/// What went wrong, from some call on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fails {
    /// Nothing can be recorded.
    Recording,
    /// There is no memory for more.
    Memory,
    /// The launch after so many others ends everything that runs on the device.
    Launch(usize),
    /// A step ends before its blocks do, some of which have counted up.
    Step,
    /// Memory of the process cannot be prepared.
    Pinning,
}

/// What the device was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    Launch(&'static str),
    Record(usize),
    Change(usize),
    Replay,
    Forget,
    Back(u64),
    Unback(u64),
    Alloc(u64),
    Free(u64),
    Abandon,
    Pin(usize),
    Unpin,
    /// Several small writes in one launch.
    Puts,
    Upload(usize),
    Download(usize),
    Wait,
}

impl Event {
    /// Whether it is about data that comes and goes, and not about launches and memory.
    fn is_traffic(&self) -> bool {
        matches!(
            self,
            Event::Puts | Event::Upload(_) | Event::Download(_) | Event::Wait
        )
    }
}

impl Spy {
    /// A device that runs kernels on the CPU.
    pub(crate) fn running() -> Spy {
        Spy::new(true, None)
    }

    /// A device that only writes down.
    pub(crate) fn recording() -> Spy {
        Spy::new(false, None)
    }

    /// A device that runs kernels and has so much memory.
    pub(crate) fn with_memory(limit: u64) -> Spy {
        Spy::new(true, Some(limit))
    }

    /// A Hopper GPU that only writes down.
    pub(crate) fn on_hopper() -> Spy {
        Spy {
            shim: Shim::hopper(),
            ..Spy::recording()
        }
    }

    fn new(runs: bool, limit: Option<u64>) -> Spy {
        Spy {
            shim: Shim::default(),
            runs,
            limit,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it was asked for since this was asked last, apart from data.
    pub(crate) fn take_log(&self) -> Vec<Event> {
        let mut log = self.take_whole_log();
        log.retain(|event| !event.is_traffic());
        log
    }

    /// The same with data.
    pub(crate) fn take_whole_log(&self) -> Vec<Event> {
        std::mem::take(&mut self.state().log)
    }

    /// From now on this fails, or nothing does.
    pub(crate) fn fail(&self, fails: impl Into<Option<Fails>>) {
        self.state().fails = fails.into();
    }

    fn note(&self, event: Event) {
        self.state().log.push(event);
    }

    /// Fails if nothing on the device works any more.
    fn check_there(&self) -> Result<(), EngineError> {
        match &self.state().lost {
            None => Ok(()),
            Some(reason) => Err(EngineError::Device {
                message: reason.clone(),
            }),
        }
    }

    fn check(&self, what: Fails) -> Result<(), EngineError> {
        self.check_there()?;
        let mut state = self.state();
        match &mut state.fails {
            Some(Fails::Launch(after)) if what == Fails::Launch(0) => {
                if *after > 0 {
                    *after -= 1;
                    return Ok(());
                }
                let reason = "an illegal memory access was encountered";
                state.lost = Some(reason.into());
                Err(EngineError::Device {
                    message: reason.into(),
                })
            }
            Some(Fails::Memory) if what == Fails::Memory => Err(EngineError::OutOfMemory {
                wanted: 1,
                free: 0,
                total: 0,
            }),
            Some(fails) if *fails == what => Err(EngineError::Device {
                message: format!("{what:?} fails on command"),
            }),
            _ => Ok(()),
        }
    }
}

impl Device for Spy {
    fn name(&self) -> &str {
        "spy"
    }

    fn description(&self) -> &str {
        "a device that is watched"
    }

    fn memory(&self) -> MemoryInfo {
        match self.limit {
            None => self.shim.memory(),
            Some(total) => MemoryInfo {
                total,
                free: total - self.state().used,
            },
        }
    }

    fn likes_large(&self) -> bool {
        self.limit.is_some()
    }

    fn lost(&self) -> Option<String> {
        self.state().lost.clone()
    }

    fn abandon(&self) {
        assert!(self.lost().is_some(), "a device that works is not given up");
        self.note(Event::Abandon);
    }

    unsafe fn pin(&self, _: *mut u8, len: usize) -> Result<(), EngineError> {
        self.check(Fails::Pinning)?;
        self.note(Event::Pin(len));
        Ok(())
    }

    fn unpin(&self, _: *mut u8) {
        self.note(Event::Unpin);
    }

    fn multiprocessors(&self) -> u32 {
        if self.runs { 1 } else { 132 }
    }

    fn architecture(&self) -> &str {
        self.shim.architecture()
    }

    fn most_shared(&self) -> u32 {
        self.shim.most_shared()
    }

    fn multiprocessor_shared(&self) -> u32 {
        self.shim.multiprocessor_shared()
    }

    fn bandwidth(&self) -> u64 {
        self.shim.bandwidth()
    }

    fn resident_blocks(&self, kernel: KernelId, threads: u32, shared: u32) -> u32 {
        self.shim.resident_blocks(kernel, threads, shared)
    }

    fn alloc(&self, size: u64) -> Result<Address, EngineError> {
        self.check(Fails::Memory)?;
        let MemoryInfo { total, free } = self.memory();
        if size > free {
            let wanted = size;
            return Err(EngineError::OutOfMemory {
                wanted,
                free,
                total,
            });
        }
        self.state().used += size;
        self.note(Event::Alloc(size));
        self.shim.alloc(size)
    }

    unsafe fn free(&self, address: Address, size: u64) {
        self.state().used -= size;
        self.note(Event::Free(size));
        // SAFETY: the caller's promise.
        unsafe { self.shim.free(address, size) };
    }

    fn granularity(&self) -> u64 {
        self.shim.granularity()
    }

    fn reserve(&self, size: u64) -> Result<Address, EngineError> {
        self.shim.reserve(size)
    }

    unsafe fn back(&self, address: Address, size: u64) -> Result<(), EngineError> {
        self.check(Fails::Memory)?;
        self.note(Event::Back(size));
        // SAFETY: the caller's promise.
        unsafe { self.shim.back(address, size) }
    }

    unsafe fn unback(&self, address: Address, size: u64) {
        self.note(Event::Unback(size));
        // SAFETY: the caller's promise.
        unsafe { self.shim.unback(address, size) };
    }

    fn alloc_shared(&self, size: usize) -> Result<SharedMemory, EngineError> {
        self.shim.alloc_shared(size)
    }

    unsafe fn upload(&self, to: Address, from: Bytes<'_>) -> Result<(), EngineError> {
        self.check_there()?;
        self.note(Event::Upload(from.len()));
        // SAFETY: the caller's promise.
        unsafe { self.shim.upload(to, from) }
    }

    unsafe fn download(&self, from: Address, to: BytesMut<'_>) -> Result<(), EngineError> {
        self.check_there()?;
        self.note(Event::Download(to.len()));
        // SAFETY: the caller's promise.
        unsafe { self.shim.download(from, to) }
    }

    unsafe fn fill(&self, to: Address, size: u64, value: u8) -> Result<(), EngineError> {
        self.check_there()?;
        // SAFETY: the caller's promise.
        unsafe { self.shim.fill(to, size, value) }
    }

    unsafe fn copy(&self, to: Address, from: Address, size: u64) -> Result<(), EngineError> {
        self.check_there()?;
        // SAFETY: the caller's promise.
        unsafe { self.shim.copy(to, from, size) }
    }

    fn kernel(&self, name: &'static str) -> Result<KernelId, EngineError> {
        let id = self.shim.kernel(name)?;
        let mut state = self.state();
        if !state.names.contains(&(id, name)) {
            state.names.push((id, name));
        }
        Ok(id)
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), EngineError> {
        let name = {
            let state = self.state();
            let known = { state.names.iter() }.find(|(id, _)| *id == launch.kernel);
            known.expect("kernels are looked up by name").1
        };
        if name == "vg_put" {
            self.check_there()?;
            self.note(Event::Puts);
            // SAFETY: the caller's promise.
            return unsafe { self.shim.launch(launch) };
        }
        self.check(Fails::Launch(0))?;
        let mut state = self.state();
        state.log.push(Event::Launch(name));
        drop(state);
        if launch.together && self.check(Fails::Step).is_err() {
            let counters = u64::from_ne_bytes(launch.params[8..16].try_into().expect("an address"));
            for stage in [0, 3, 4] {
                // SAFETY: counters of the device, which is this process.
                unsafe { *(counters as *mut u32).add(32 * stage) += 2 };
            }
            return Err(EngineError::Device {
                message: "the step has ended".into(),
            });
        }
        match self.runs {
            // SAFETY: the caller's promise.
            true => unsafe { self.shim.launch(launch) },
            false => Ok(()),
        }
    }

    fn record(&self, launches: &[Launch]) -> Result<RecordingId, EngineError> {
        self.check(Fails::Recording)?;
        self.note(Event::Record(launches.len()));
        self.shim.record(launches)
    }

    fn change(
        &self,
        recording: RecordingId,
        index: usize,
        launch: &Launch,
    ) -> Result<(), EngineError> {
        self.check(Fails::Recording)?;
        self.note(Event::Change(index));
        self.shim.change(recording, index, launch)
    }

    unsafe fn replay(&self, recording: RecordingId) -> Result<(), EngineError> {
        self.check(Fails::Launch(0))?;
        self.note(Event::Replay);
        match self.runs {
            // SAFETY: the caller's promise.
            true => unsafe { self.shim.replay(recording) },
            false => Ok(()),
        }
    }

    fn forget(&self, recording: RecordingId) {
        self.note(Event::Forget);
        self.shim.forget(recording);
    }

    fn mark(&self) -> Result<Mark, EngineError> {
        self.shim.mark()
    }

    fn wait(&self, mark: Mark) -> Result<(), EngineError> {
        self.shim.wait(mark)
    }

    fn synchronize(&self) -> Result<(), EngineError> {
        self.check_there()?;
        self.note(Event::Wait);
        self.shim.synchronize()
    }
}
