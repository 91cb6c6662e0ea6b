//! A device that batches small uploads.
//!
//! A decode step begins with a few small uploads: tokens, positions, KV cache indices, a mask. A
//! copy for each costs the host 2 to 4 microseconds and the device 1 to 2. So the bytes are
//! collected in mapped host memory, and one launch moves all of them to their places, before any
//! other work. The host copies the bytes once, out of shared memory to memory that no guest can
//! change, and the guest may reuse its memory at once.
//!
//! The device also skips a wait if no work was asked for since the last wait.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::{Guard, lock_at};
use zerocopy::IntoBytes;

use crate::device::{Address, Device, Event, GraphExecId, KernelId, Launch, MappedHostMemory};
use crate::lock::Rank;
use crate::params::{VG_MAX_UPLOADS, VgUpload, VgUploadParams};
use vgpu_engine::{EngineError, MemoryInfo};

/// The largest upload in bytes that is batched.
const MAX_BATCHED_UPLOAD: usize = 64 << 10;

/// Bytes of the mapped host memory.
const BUFFER_BYTES: usize = 1 << 20;

/// Bytes that a block moves at a time: 16 for each of its 128 threads.
const BLOCK_BYTES: u64 = 128 * 16;

/// The most blocks for one upload.
const MAX_BLOCKS: u64 = 8;

/// A device that batches small uploads.
pub(crate) struct UploadBatcher {
    device: Arc<dyn Device>,
    /// The kernel that moves a batch. Without it, each upload is a copy of its own.
    kernel: Option<KernelId>,
    buffer: MappedHostMemory,
    state: Mutex<PendingUploads>,
    /// The number of calls that gave the device work, counted after the call.
    asked: AtomicU64,
    /// The value of `asked` up to which all work is done.
    done: AtomicU64,
}

#[derive(Default)]
struct PendingUploads {
    /// Uploads that were not yet launched, and do not overlap.
    uploads: Vec<VgUpload>,
    /// The offset of the next upload in the mapped memory. The device may still read the bytes
    /// before it.
    next: usize,
    /// The number of uploads so far.
    count: u64,
}

impl UploadBatcher {
    /// Batches uploads to `device` if there is a `kernel` that moves them.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver cannot map host memory.
    pub(crate) fn new(
        device: Arc<dyn Device>,
        kernel: Option<KernelId>,
    ) -> Result<UploadBatcher, EngineError> {
        Ok(UploadBatcher {
            kernel,
            buffer: device.alloc_mapped(BUFFER_BYTES)?,
            device,
            state: Mutex::default(),
            asked: AtomicU64::new(1),
            done: AtomicU64::new(0),
        })
    }

    fn state(&self) -> Guard<'_, PendingUploads> {
        lock_at(Rank::Uploads, &self.state)
    }

    /// Launches the batched uploads. If the launch fails, they are lost with the device: the launch
    /// has no other reason to fail.
    ///
    /// # Errors
    /// [`EngineError`] of the device.
    fn send(&self, state: &mut PendingUploads) -> Result<(), EngineError> {
        let longest = state.uploads.iter().map(|upload| upload.len).max();
        // Without a kernel nothing is batched.
        let (Some(longest), Some(kernel)) = (longest, self.kernel) else {
            return Ok(());
        };
        let mut params = VgUploadParams::default();
        let count = state.uploads.len();
        params.uploads[..count].copy_from_slice(&state.uploads);
        state.uploads.clear();
        let blocks = longest.div_ceil(BLOCK_BYTES).clamp(1, MAX_BLOCKS);
        let launch = Launch {
            kernel,
            grid: [blocks as u32, count as u32, 1],
            threads: [128, 1, 1],
            shared: 0,
            params: params.as_bytes().to_vec(),
            cooperative: false,
        };
        // SAFETY: each entry of `params` is from `upload`, whose caller has guaranteed `len` bytes
        // of device memory at `to`. Memory is freed only through `free`, which sends the batch
        // first. The sources stay in the mapped memory until the device was synchronised.
        unsafe { self.device.launch(&launch) }?;
        self.count_work();
        Ok(())
    }

    /// Launches the batched uploads before other work.
    ///
    /// # Errors
    /// [`EngineError`] of the device.
    fn flush(&self) -> Result<(), EngineError> {
        self.send(&mut self.state())
    }

    fn count_work(&self) {
        // Release pairs with the loads of `asked`: who sees the new count asks the device after
        // this work.
        self.asked.fetch_add(1, Ordering::Release);
    }

    /// Calls `body`, which waits for the device, and notes that all work before is done.
    ///
    /// # Errors
    /// [`EngineError`] of the device for the batched uploads, or the error of `body`.
    fn waiting(&self, body: impl FnOnce() -> Result<(), EngineError>) -> Result<(), EngineError> {
        let count = {
            let mut state = self.state();
            self.send(&mut state)?;
            state.count
        };
        let asked = self.asked.load(Ordering::Acquire);
        body()?;
        self.done.fetch_max(asked, Ordering::AcqRel);
        let mut state = self.state();
        if state.count == count {
            // The device has read all of the mapped memory.
            state.next = 0;
        }
        Ok(())
    }
}

impl Device for UploadBatcher {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn description(&self) -> &str {
        self.device.description()
    }

    fn memory(&self) -> MemoryInfo {
        self.device.memory()
    }

    fn architecture(&self) -> &str {
        self.device.architecture()
    }

    fn sm_count(&self) -> u32 {
        self.device.sm_count()
    }

    fn max_dynamic_shared(&self, kernel: KernelId) -> u32 {
        self.device.max_dynamic_shared(kernel)
    }

    fn shared_per_sm(&self) -> u32 {
        self.device.shared_per_sm()
    }

    fn memory_bandwidth(&self) -> u64 {
        self.device.memory_bandwidth()
    }

    fn max_cooperative_blocks(&self, kernel: KernelId, threads: u32, shared: u32) -> u32 {
        self.device.max_cooperative_blocks(kernel, threads, shared)
    }

    fn blocks_per_sm(&self, kernel: KernelId, threads: u32, shared: u32) -> u32 {
        self.device.blocks_per_sm(kernel, threads, shared)
    }

    fn prefers_suballocation(&self) -> bool {
        self.device.prefers_suballocation()
    }

    fn lost(&self) -> Option<String> {
        self.device.lost()
    }

    fn abandon(&self) {
        self.state().uploads.clear();
        self.device.abandon();
    }

    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), EngineError> {
        // SAFETY: the `len` bytes at `start` are mapped until `unpin`, which forwards the same
        // `start`; the caller of `pin` guarantees it.
        unsafe { self.device.pin(start, len) }
    }

    unsafe fn unpin(&self, start: *mut u8) {
        // SAFETY: `pin` forwards each range, so that the device has locked the one that the caller
        // names.
        unsafe { self.device.unpin(start) };
    }

    fn alloc(&self, size: u64) -> Result<Address, EngineError> {
        let address = self.device.alloc(size)?;
        self.count_work(); // for zeros
        Ok(address)
    }

    unsafe fn free(&self, address: Address, size: u64) {
        // A batch that cannot be launched was for a lost device.
        let _ = self.flush();
        // SAFETY: `address` is from `alloc`, which has returned the address of the inner device
        // unchanged, with the same `size`. The batch that may write to the memory was launched
        // above, and `free` of the inner device waits for it. The caller guarantees that no later
        // work uses the memory.
        unsafe { self.device.free(address, size) };
    }

    fn map_granularity(&self) -> u64 {
        self.device.map_granularity()
    }

    fn reserve_addresses(&self, size: u64) -> Result<Address, EngineError> {
        self.device.reserve_addresses(size)
    }

    unsafe fn map_memory(&self, address: Address, size: u64) -> Result<(), EngineError> {
        // SAFETY: the range is from `reserve_addresses`, which has returned the range of the inner
        // device. The caller guarantees that the range has no memory.
        unsafe { self.device.map_memory(address, size) }
    }

    unsafe fn unmap_memory(&self, address: Address, size: u64) {
        let _ = self.flush(); // as in `free`
        // SAFETY: `map_memory` has forwarded this range to the inner device. The batch that may
        // write to the range was launched above. The caller guarantees that no later work uses the
        // range.
        unsafe { self.device.unmap_memory(address, size) };
    }

    fn alloc_mapped(&self, size: usize) -> Result<MappedHostMemory, EngineError> {
        self.device.alloc_mapped(size)
    }

    unsafe fn upload(&self, to: Address, from: Bytes<'_>) -> Result<(), EngineError> {
        let len = from.len();
        if len > MAX_BATCHED_UPLOAD || self.kernel.is_none() {
            self.flush()?;
            // SAFETY: the caller guarantees `from.len()` bytes of device memory at `to`. `from` is
            // borrowed until the call returns, after which the device no longer reads it.
            unsafe { self.device.upload(to, from) }?;
            self.count_work();
            return Ok(());
        }
        if let Some(reason) = self.device.lost() {
            return Err(EngineError::DeviceLost { reason });
        }
        let mut state = self.state();
        let end = to + len as u64;
        let meets = |upload: &VgUpload| upload.to < end && to < upload.to + upload.len;
        // The uploads of a launch run in any order.
        if state.uploads.len() == VG_MAX_UPLOADS as usize || state.uploads.iter().any(meets) {
            self.send(&mut state)?;
        }
        let start = |state: &PendingUploads| state.next + (to % 16) as usize;
        if start(&state) + len > BUFFER_BYTES {
            self.send(&mut state)?;
            // Rare: running a graph ends with a wait, which empties the mapped memory.
            self.device.synchronize()?;
            state.next = 0;
        }
        let at = start(&state);
        // SAFETY: `at + len` is at most BUFFER_BYTES, the size of the memory at `host`. The device
        // reads only bytes before `next`, which is at most `at`. The lock of the state makes this
        // thread the only writer.
        from.copy_to(unsafe { std::slice::from_raw_parts_mut(self.buffer.host.add(at), len) });
        state.uploads.push(VgUpload {
            to,
            from: self.buffer.device + at as u64,
            len: len as u64,
        });
        state.next = (at + len).next_multiple_of(16);
        state.count += 1;
        Ok(())
    }

    unsafe fn download(&self, from: Address, to: BytesMut<'_>) -> Result<(), EngineError> {
        // SAFETY: the caller guarantees `to.len()` bytes of device memory at `from`. `waiting`
        // calls the closure at once, while `to` is borrowed.
        self.waiting(|| unsafe { self.device.download(from, to) })
    }

    unsafe fn fill(&self, to: Address, size: u64, value: u8) -> Result<(), EngineError> {
        self.flush()?;
        // SAFETY: the caller guarantees `size` bytes of device memory at `to`.
        unsafe { self.device.fill(to, size, value) }?;
        self.count_work();
        Ok(())
    }

    unsafe fn copy(&self, to: Address, from: Address, size: u64) -> Result<(), EngineError> {
        self.flush()?;
        // SAFETY: the caller guarantees `size` bytes of device memory at `to` and at `from`,
        // without overlap.
        unsafe { self.device.copy(to, from, size) }?;
        self.count_work();
        Ok(())
    }

    fn kernel(&self, name: &'static str) -> Result<KernelId, EngineError> {
        self.device.kernel(name)
    }

    fn kernel_name(&self, kernel: KernelId) -> &'static str {
        self.device.kernel_name(kernel)
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), EngineError> {
        self.flush()?;
        // SAFETY: the caller guarantees that the addresses in `launch.params` are of device memory
        // that the kernel may use. Uploads to that memory were launched by `flush` and run first.
        unsafe { self.device.launch(launch) }?;
        self.count_work();
        Ok(())
    }

    unsafe fn time_launches(&self, launches: &[Launch]) -> Result<Vec<f64>, EngineError> {
        let mut times = Vec::new();
        self.waiting(|| {
            // SAFETY: the caller guarantees that the addresses in the parameters of all launches
            // are of device memory that their kernels may use. `waiting` has launched the batched
            // uploads to that memory.
            times = unsafe { self.device.time_launches(launches) }?;
            Ok(())
        })?;
        Ok(times)
    }

    fn create_graph(&self, launches: &[Launch]) -> Result<GraphExecId, EngineError> {
        self.device.create_graph(launches)
    }

    fn update_graph_node(
        &self,
        graph: GraphExecId,
        index: usize,
        launch: &Launch,
    ) -> Result<(), EngineError> {
        self.device.update_graph_node(graph, index, launch)
    }

    unsafe fn launch_graph(&self, graph: GraphExecId) -> Result<(), EngineError> {
        self.flush()?;
        // SAFETY: the caller guarantees that the addresses in the current parameters of all nodes
        // are of device memory that their kernels may use. Uploads to that memory were launched by
        // `flush` and run first.
        unsafe { self.device.launch_graph(graph) }?;
        self.count_work();
        Ok(())
    }

    fn destroy_graph(&self, graph: GraphExecId) {
        self.device.destroy_graph(graph);
    }

    fn record_event(&self) -> Result<Event, EngineError> {
        self.flush()?;
        self.device.record_event()
    }

    fn wait_event(&self, event: Event) -> Result<(), EngineError> {
        self.device.wait_event(event)
    }

    fn synchronize(&self) -> Result<(), EngineError> {
        self.flush()?;
        let asked = self.asked.load(Ordering::Acquire);
        if self.done.load(Ordering::Acquire) >= asked && self.device.lost().is_none() {
            return Ok(());
        }
        self.waiting(|| self.device.synchronize())
    }
}
