//! Working memory of plans.
//!
//! One plan runs at a time, and none keeps anything in working memory beyond a place where it may stop. So all plans of
//! a context share it: a range of addresses that never changes, with as much memory behind it as the plan that needs most.
//! Plans know their addresses when they are compiled, and stay right when the memory grows.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::device::{Address, Device};
use vgpu_engine::EngineError;

/// In pieces of at least so many bytes it grows and shrinks.
const PIECE: u64 = 32 << 20;

/// Most addresses that are reserved.
const MAX_RESERVED: u64 = 1 << 38;

/// Working memory that plans share.
pub(crate) struct Scratch {
    device: Arc<dyn Device>,
    base: Address,
    reserved: u64,
    piece: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Pieces that have memory, from the first on.
    backed: u64,
    /// How many plans need how many pieces.
    needs: BTreeMap<u64, usize>,
}

impl Scratch {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Scratch, EngineError> {
        let unit = device.map_granularity();
        // Devices of the tests have small units, to catch what lies behind the end.
        let piece = if unit < 1 << 16 {
            unit
        } else {
            unit.max(PIECE)
        };
        let total = device.memory().total.clamp(piece, MAX_RESERVED);
        let reserved = total.next_multiple_of(piece);
        Ok(Scratch {
            base: device.reserve_addresses(reserved)?,
            device: Arc::clone(device),
            reserved,
            piece,
            state: Mutex::default(),
        })
    }

    /// Where it begins.
    pub(crate) fn base(&self) -> Address {
        self.base
    }

    /// Makes sure that the first `bytes` have memory, for as long as the claim lives.
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
        let pieces = bytes.div_ceil(self.piece);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = state.backed;
        while state.backed < pieces {
            let at = self.base + state.backed * self.piece;
            // SAFETY: a piece of the reserved range, behind those that have memory.
            if let Err(error) = unsafe { self.device.map_memory(at, self.piece) } {
                self.shrink(&mut state, before);
                return Err(match error {
                    EngineError::OutOfMemory { .. } => out_of_memory(),
                    error => error,
                });
            }
            state.backed += 1;
        }
        *state.needs.entry(pieces).or_default() += 1;
        Ok(Claim {
            scratch: Arc::clone(self),
            pieces,
        })
    }

    /// Gives back all pieces but the first `keep`, which no plan needs.
    fn shrink(&self, state: &mut State, keep: u64) {
        while state.backed > keep {
            state.backed -= 1;
            let at = self.base + state.backed * self.piece;
            // SAFETY: `claim` has put memory there piece by piece; launches of plans that still run end before theirs.
            unsafe { self.device.unmap_memory(at, self.piece) };
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mut state =
            std::mem::take(&mut *self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.shrink(&mut state, 0);
    }
}

/// A plan's need of working memory.
pub(crate) struct Claim {
    scratch: Arc<Scratch>,
    pieces: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self
            .scratch
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(plans) = state.needs.get_mut(&self.pieces) {
            *plans -= 1;
            if *plans == 0 {
                state.needs.remove(&self.pieces);
            }
        }
        let needed = state
            .needs
            .last_key_value()
            .map_or(0, |(&pieces, _)| pieces);
        // The next plan needs about as much as this one, which most often is compiled before this one goes. What is
        // much more is given back.
        if state.backed > 2 * needed + 2 {
            self.scratch.shrink(&mut state, needed);
        }
    }
}
