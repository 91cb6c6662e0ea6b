//! What of a memory lies in planes: written down for each memory that a guest has for weights.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::planes::Planes;

/// Most tensors of a memory of which something is written down: models have a few thousand.
const MOST_TENSORS: usize = 1 << 16;

/// What is written down of a memory.
#[derive(Default)]
pub(super) struct Arranged {
    is_for_weights: AtomicBool,
    /// How often plans compiled before have become wrong.
    changes: AtomicU64,
    state: Mutex<State>,
}

/// Where tensors lie in planes, and where none will any more.
#[derive(Default)]
pub(super) struct State {
    /// Tensors in planes, by their first byte. Disjoint.
    tensors: BTreeMap<u64, Planes>,
    /// First byte to one past the last of tensors that were in planes until somebody needed them as the guest has them: they
    /// stay so. Disjoint.
    plain: BTreeMap<u64, u64>,
}

/// Whether a tensor can lie in planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lies {
    /// It does already.
    InPlanes,
    /// It can be arranged.
    AsGuests,
    /// It must stay, or lies there as another tensor.
    Otherwise,
}

impl Arranged {
    /// From now on tensors can be arranged.
    pub(super) fn allow(&self) {
        if !self.is_for_weights.swap(true, Ordering::Relaxed) {
            // Plans compiled before have not looked whether tensors are arranged.
            self.has_changed();
        }
    }

    /// Whether tensors can be arranged at all.
    pub(super) fn is_allowed(&self) -> bool {
        self.is_for_weights.load(Ordering::Relaxed)
    }

    /// Changes whenever a tensor has come to lie otherwise. Accesses to memory and plans that use it come one after the
    /// other, so this orders nothing.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Plans compiled before are wrong.
    pub(super) fn has_changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// What lies how, for as long as nobody else looks.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Tensors in planes with bytes of `range`, in order.
    pub(super) fn meeting(&self, range: &Range<u64>) -> Vec<(u64, Planes)> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.tensors.range(..range.start).next_back();
        let before = before.filter(|&(&start, planes)| start + planes.bytes() > range.start);
        { before.into_iter() }
            .chain(self.tensors.range(range.clone()))
            .map(|(&start, &planes)| (start, planes))
            .collect()
    }

    /// How a tensor at `start` lies.
    pub(super) fn lies(&self, start: u64, planes: &Planes) -> Lies {
        let range = start..start + planes.bytes();
        let meets_plain = { self.plain.range(..range.end).next_back() }
            .is_some_and(|(_, &end)| end > range.start);
        let met = self.meeting(&range);
        match met[..] {
            [found] if found == (start, *planes) => Lies::InPlanes,
            [] if !meets_plain && self.tensors.len() + self.plain.len() < MOST_TENSORS => {
                Lies::AsGuests
            }
            _ => Lies::Otherwise,
        }
    }

    /// Writes down a tensor that lies [as the guest has it](Lies::AsGuests), and is in planes now.
    pub(super) fn insert(&mut self, start: u64, planes: Planes) {
        self.tensors.insert(start, planes);
    }

    /// Forgets a tensor whose bytes are written anew, all of them.
    pub(super) fn forget(&mut self, start: u64) {
        self.tensors.remove(&start);
    }

    /// Writes down that a tensor is as the guest has it again, and stays so.
    pub(super) fn keep_plain(&mut self, start: u64) {
        let Some(planes) = self.tensors.remove(&start) else {
            return;
        };
        // One range with those beside it.
        let mut range = start..start + planes.bytes();
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
    fn planes() -> Planes {
        let tensor = Tensor {
            shape: Shape::contiguous(Type::Mxfp4, [32, 32, 1, 1]).unwrap(),
            buffer: 0,
            offset: 0,
        };
        Planes::of(&tensor).expect("it can be arranged")
    }

    #[test]
    fn tensors_are_found_by_any_of_their_bytes() {
        let planes = planes();
        let bytes = planes.bytes();
        let mut state = State::default();
        for start in [0, bytes, 4 * bytes] {
            assert_eq!(state.lies(start, &planes), Lies::AsGuests);
            state.insert(start, planes);
            assert_eq!(state.lies(start, &planes), Lies::InPlanes);
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
        assert_eq!(state.lies(16, &planes), Lies::Otherwise);
        assert_eq!(state.lies(2 * bytes - 16, &planes), Lies::Otherwise);
    }

    #[test]
    fn what_was_brought_back_stays_and_what_was_forgotten_does_not() {
        let planes = planes();
        let bytes = planes.bytes();
        let mut state = State::default();
        for i in 0..4 {
            state.insert(i * bytes, planes);
        }
        state.forget(0);
        for i in [1, 3, 2] {
            state.keep_plain(i * bytes);
        }
        assert_eq!(state.plain, BTreeMap::from([(bytes, 4 * bytes)]));
        let lies = [0, 1, 2, 3, 4].map(|i| state.lies(i * bytes, &planes) == Lies::AsGuests);
        assert_eq!(lies, [true, false, false, false, true]);
        assert_eq!(state.lies(16, &planes), Lies::Otherwise);
        assert_eq!(state.lies(4 * bytes - 16, &planes), Lies::Otherwise);
    }

    #[test]
    fn plans_hear_that_tensors_can_be_arranged_now() {
        let arranged = Arranged::default();
        assert!(!arranged.is_allowed());
        let before = arranged.changes();
        arranged.allow();
        assert!(arranged.is_allowed());
        assert_ne!(arranged.changes(), before);
        let before = arranged.changes();
        arranged.allow();
        assert_eq!(arranged.changes(), before);
    }
}
