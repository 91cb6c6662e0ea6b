//! Scratch memory of plans.
//!
//! Of the plans that use this memory, one runs at a time, and none keeps data in it where it may
//! yield. So all of them share one range of addresses, which has as much memory as the plan that
//! needs the most. Plans know their addresses when they are compiled, and stay valid when the
//! memory grows. Plans that may run in a batch have memory of their own
//! ([`OwnPlace`](crate::launch::place::OwnPlace)).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::device::{Address, Device};
use crate::lock::Rank;
use vgpu_engine::EngineError;
use vgpu_transport::lock::lock_at;

/// The unit in bytes in which the memory grows and shrinks.
const CHUNK: u64 = 32 << 20;

/// The most bytes of addresses that are reserved.
const MAX_RESERVED: u64 = 1 << 38;

/// Scratch memory that plans share.
pub(crate) struct Scratch {
    device: Arc<dyn Device>,
    base: Address,
    reserved: u64,
    chunk: u64,
    state: Mutex<BackedChunks>,
}

#[derive(Default)]
struct BackedChunks {
    /// The number of chunks with memory, from the start.
    backed: u64,
    /// The number of plans for each number of chunks that they need.
    needs: BTreeMap<u64, usize>,
}

impl Scratch {
    /// Reserves addresses for scratch memory of `device`, without memory.
    ///
    /// # Errors
    /// [`EngineError::Device`] if there is no such range of addresses.
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Scratch, EngineError> {
        let unit = device.map_granularity();
        // Test devices have small units, so that accesses beyond the end are detected.
        let chunk = if unit < 1 << 16 {
            unit
        } else {
            unit.max(CHUNK)
        };
        let total = device.memory().total.clamp(chunk, MAX_RESERVED);
        let reserved = total.next_multiple_of(chunk);
        Ok(Scratch {
            base: device.reserve_addresses(reserved)?,
            device: Arc::clone(device),
            reserved,
            chunk,
            state: Mutex::default(),
        })
    }

    /// The first address, and the bytes from there on that are reserved.
    pub(crate) fn range(&self) -> (Address, u64) {
        (self.base, self.reserved)
    }

    /// The bytes that a claim of `bytes` maps.
    pub(crate) fn claimed(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.chunk).saturating_mul(self.chunk)
    }

    /// Maps memory for the first `bytes` bytes, for as long as the claim lives.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the device has not that much left.
    pub(crate) fn claim(self: &Arc<Self>, bytes: u64) -> Result<Claim, EngineError> {
        let out_of_memory = || {
            let info = self.device.memory();
            EngineError::OutOfMemory {
                wanted: bytes,
                free: info.free,
                total: info.total,
            }
        };
        if bytes > self.reserved {
            return Err(out_of_memory());
        }
        let chunks = bytes.div_ceil(self.chunk);
        let mut state = lock_at(Rank::Scratch, &self.state);
        let before = state.backed;
        while state.backed < chunks {
            let at = self.base + state.backed * self.chunk;
            // SAFETY: the chunk is in the reserved range, a multiple of the granularity, behind the
            // chunks with memory.
            if let Err(error) = unsafe { self.device.map_memory(at, self.chunk) } {
                self.shrink(&mut state, before);
                return Err(match error {
                    EngineError::OutOfMemory { .. } => out_of_memory(),
                    error => error,
                });
            }
            state.backed += 1;
        }
        *state.needs.entry(chunks).or_default() += 1;
        Ok(Claim {
            scratch: Arc::clone(self),
            chunks,
        })
    }

    /// Unmaps all chunks but the first `keep`, which no plan needs.
    fn shrink(&self, state: &mut BackedChunks, keep: u64) {
        while state.backed > keep {
            state.backed -= 1;
            let at = self.base + state.backed * self.chunk;
            // SAFETY: `claim` has mapped this chunk with one call. No plan needs it, and the device
            // unmaps it after all work that was asked for.
            unsafe { self.device.unmap_memory(at, self.chunk) };
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mut state = std::mem::take(&mut *lock_at(Rank::Scratch, &self.state));
        self.shrink(&mut state, 0);
    }
}

/// A plan's claim of scratch memory.
pub(crate) struct Claim {
    scratch: Arc<Scratch>,
    chunks: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = lock_at(Rank::Scratch, &self.scratch.state);
        if let Some(plans) = state.needs.get_mut(&self.chunks) {
            *plans -= 1;
            if *plans == 0 {
                state.needs.remove(&self.chunks);
            }
        }
        let needed = state
            .needs
            .last_key_value()
            .map_or(0, |(&chunks, _)| chunks);
        // The next plan needs about as much as this one, and is often compiled before this one is
        // dropped. So only a large excess is unmapped.
        if state.backed > 2 * needed + 2 {
            self.scratch.shrink(&mut state, needed);
        }
    }
}
