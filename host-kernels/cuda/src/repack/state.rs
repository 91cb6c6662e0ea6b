//! Which tensors of a buffer's memory are repacked.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::lock::Rank;
use crate::repack::format::RepackFormat;

use vgpu_engine::EngineError;
use vgpu_transport::lock::{Guard, lock_at};

/// The most tensors of a memory that are tracked. Models have a few thousand.
const MAX_TENSORS: usize = 1 << 16;

/// The repacked tensors of a memory.
#[derive(Default)]
pub(crate) struct RepackState {
    is_for_weights: AtomicBool,
    /// How often plans that were compiled before became stale.
    changes: AtomicU64,
    state: Mutex<RepackedTensors>,
}

/// The tensors that are repacked, and the ranges that stay plain.
#[derive(Default)]
pub(crate) struct RepackedTensors {
    /// The repacked tensors by their first byte, disjoint.
    tensors: BTreeMap<u64, RepackFormat>,
    /// The ranges, from the first byte to one past the last, of tensors that were restored and stay
    /// plain. Disjoint.
    plain: BTreeMap<u64, u64>,
    /// How many buffers for weights hold the memory as a piece; 0 for other memory. What several
    /// hold keeps its format.
    pub(crate) holders: usize,
}

/// Whether a tensor can be repacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// The tensor is repacked.
    Repacked,
    /// The tensor is plain and can be repacked.
    Plain,
    /// The tensor has to stay plain, or other tensors share its bytes.
    Fixed,
}

impl RepackState {
    /// Allows tensors to be repacked from now on.
    pub(crate) fn allow(&self) {
        if !self.is_for_weights.swap(true, Ordering::Relaxed) {
            // Plans compiled before did not look for repacked tensors.
            self.has_changed();
        }
    }

    /// Whether tensors may be repacked.
    pub(crate) fn is_allowed(&self) -> bool {
        self.is_for_weights.load(Ordering::Relaxed)
    }

    /// A number that changes whenever the format of a tensor changes. Plans and accesses to the
    /// memory run one after the other, so the number orders nothing (`Relaxed`).
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Makes plans compiled before stale.
    pub(crate) fn has_changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// The table, locked.
    pub(crate) fn state(&self) -> Guard<'_, RepackedTensors> {
        lock_at(Rank::Repacked, &self.state)
    }
}

impl RepackedTensors {
    /// The repacked tensors with bytes in `range`, in order.
    pub(crate) fn meeting(&self, range: &Range<u64>) -> Vec<(u64, RepackFormat)> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.tensors.range(..range.start).next_back();
        let before = before.filter(|&(&start, format)| start + format.bytes() > range.start);
        { before.into_iter() }
            .chain(self.tensors.range(range.clone()))
            .map(|(&start, &format)| (start, format))
            .collect()
    }

    /// The repacked tensors with bytes in `range`, in order, whose format or bytes change next.
    ///
    /// # Errors
    /// [`EngineError::Shared`] if there are some and several buffers hold the memory: the others
    /// would read other bytes.
    pub(crate) fn changeable(
        &self,
        range: &Range<u64>,
    ) -> Result<Vec<(u64, RepackFormat)>, EngineError> {
        let met = self.meeting(range);
        if self.holders > 1 && !met.is_empty() {
            return Err(EngineError::Shared {
                offset: range.start,
                len: range.end - range.start,
                holders: self.holders,
            });
        }
        Ok(met)
    }

    /// Whether a tensor at `start` can be repacked.
    pub(crate) fn placement(&self, start: u64, format: &RepackFormat) -> Placement {
        let range = start..start + format.bytes();
        let meets_plain = { self.plain.range(..range.end).next_back() }
            .is_some_and(|(_, &end)| end > range.start);
        let met = self.meeting(&range);
        match met[..] {
            [found] if found == (start, *format) => Placement::Repacked,
            [] if !meets_plain
                && self.holders < 2
                && self.tensors.len() + self.plain.len() < MAX_TENSORS =>
            {
                Placement::Plain
            }
            _ => Placement::Fixed,
        }
    }

    /// Adds a tensor that was [plain](Placement::Plain) and is repacked now.
    pub(crate) fn insert(&mut self, start: u64, format: RepackFormat) {
        self.tensors.insert(start, format);
    }

    /// Drops a tensor all bytes of which are overwritten.
    pub(crate) fn forget(&mut self, start: u64) {
        self.tensors.remove(&start);
    }

    /// Notes that a tensor was restored and stays plain.
    pub(crate) fn restore(&mut self, start: u64) {
        let Some(format) = self.tensors.remove(&start) else {
            return;
        };
        // Merged with the ranges beside it.
        let mut range = start..start + format.bytes();
        if let Some(end) = self.plain.remove(&range.end) {
            range.end = end;
        }
        let before = self.plain.range_mut(..range.start).next_back();
        match before.filter(|(_, end)| **end == range.start) {
            Some((_, end)) => *end = range.end,
            None => {
                self.plain.insert(range.start, range.end);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use vgpu_transport::ir::{Shape, Tensor, Type};

    use super::*;

    /// 32 rows of one block: 544 bytes.
    fn format() -> RepackFormat {
        let tensor = Tensor {
            shape: Shape::contiguous(Type::Mxfp4, [32, 32, 1, 1]).unwrap(),
            buffer: 0,
            offset: 0,
        };
        RepackFormat::of(&tensor).expect("it can be repacked")
    }

    #[test]
    fn tensors_are_found_by_any_of_their_bytes() {
        let format = format();
        let bytes = format.bytes();
        let mut state = RepackedTensors::default();
        for start in [0, bytes, 4 * bytes] {
            assert_eq!(state.placement(start, &format), Placement::Plain);
            state.insert(start, format);
            assert_eq!(state.placement(start, &format), Placement::Repacked);
        }
        let starts = |range: Range<u64>| -> Vec<u64> {
            let met = state.meeting(&range);
            met.iter().map(|(start, _)| *start / bytes).collect()
        };
        assert_eq!(starts(0..1), [0]);
        assert_eq!(starts(bytes - 1..bytes), [0]);
        assert_eq!(starts(bytes - 1..bytes + 1), [0, 1]);
        assert_eq!(starts(0..5 * bytes), [0, 1, 4]);
        assert_eq!(starts(2 * bytes..4 * bytes), []);
        assert_eq!(starts(5 * bytes - 1..u64::MAX), [4]);
        assert_eq!(starts(7..7), []);
        // Another tensor over the same bytes.
        assert_eq!(state.placement(16, &format), Placement::Fixed);
        assert_eq!(state.placement(2 * bytes - 16, &format), Placement::Fixed);
    }

    #[test]
    fn restored_tensors_stay_plain_and_forgotten_ones_are_removed() {
        let format = format();
        let bytes = format.bytes();
        let mut state = RepackedTensors::default();
        for i in 0..4 {
            state.insert(i * bytes, format);
        }
        state.forget(0);
        for i in [1, 3, 2] {
            state.restore(i * bytes);
        }
        assert_eq!(state.plain, BTreeMap::from([(bytes, 4 * bytes)]));
        let lies = [0, 1, 2, 3, 4].map(|i| state.placement(i * bytes, &format) == Placement::Plain);
        assert_eq!(lies, [true, false, false, false, true]);
        assert_eq!(state.placement(16, &format), Placement::Fixed);
        assert_eq!(state.placement(4 * bytes - 16, &format), Placement::Fixed);
    }

    #[test]
    fn repacked_bytes_that_several_buffers_hold_are_not_changed() {
        let format = format();
        let bytes = format.bytes();
        let mut state = RepackedTensors::default();
        state.insert(bytes, format);
        for holders in [0, 1] {
            state.holders = holders;
            assert_eq!(state.changeable(&(0..2 * bytes)), Ok(vec![(bytes, format)]));
        }
        state.holders = 2;
        let range = 2 * bytes - 1..3 * bytes;
        let error = EngineError::Shared {
            offset: range.start,
            len: bytes + 1,
            holders: 2,
        };
        assert_eq!(state.changeable(&range), Err(error));
        // Plain bytes have one format.
        assert_eq!(state.changeable(&(0..bytes)), Ok(Vec::new()));
    }

    #[test]
    fn plans_are_notified_when_tensors_become_repackable() {
        let state = RepackState::default();
        assert!(!state.is_allowed());
        let before = state.changes();
        state.allow();
        assert!(state.is_allowed());
        assert_ne!(state.changes(), before);
        let before = state.changes();
        state.allow();
        assert_eq!(state.changes(), before);
    }
}
