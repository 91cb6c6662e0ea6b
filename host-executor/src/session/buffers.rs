//! The buffers of a session.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use vgpu_engine::Memory;
use vgpu_transport::ir::BufferId;

use super::error::Violation;
use crate::pool::Lease;
use crate::tenant::Charge;

/// The buffers of a session, and the ids that have been used.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    live: HashMap<BufferId, Buffer>,
    /// Sum of the sizes of `live`.
    bytes: u64,
    used: IdSet,
}

#[derive(Debug)]
struct Buffer {
    memory: Arc<dyn Memory>,
    /// Declared after `memory`, so that the memory is freed before the charge is released.
    _charge: Charge,
    /// The mapping of the memory, by the same rule.
    _mapping: Lease,
    /// Further mappings that the memory can take.
    copies: Option<Lease>,
}

impl Buffers {
    /// Checks that `buffer` may identify a new buffer.
    pub(super) fn check_new(&self, buffer: BufferId) -> Result<(), Violation> {
        if buffer.0 == 0 {
            Err(Violation::BufferZero)
        } else if self.used.contains(buffer.0) {
            Err(Violation::BufferReused(buffer))
        } else {
            Ok(())
        }
    }

    /// Adds a buffer whose id has been checked. `limit` bounds the number of ranges of used ids.
    pub(super) fn insert(
        &mut self,
        buffer: BufferId,
        memory: Arc<dyn Memory>,
        charge: Charge,
        mapping: Lease,
        limit: usize,
    ) -> Result<(), Violation> {
        self.used.insert(buffer.0);
        self.bytes += memory.size();
        let entry = Buffer {
            memory,
            _charge: charge,
            _mapping: mapping,
            copies: None,
        };
        self.live.insert(buffer, entry);
        match self.used.ranges() {
            ranges if ranges > limit => Err(Violation::ScatteredIds { ranges }),
            _ => Ok(()),
        }
    }

    pub(super) fn get(
        &self,
        kind: &'static str,
        buffer: BufferId,
    ) -> Result<&Arc<dyn Memory>, Violation> {
        self.live
            .get(&buffer)
            .map(|buffer| &buffer.memory)
            .ok_or(Violation::UnknownBuffer { kind, buffer })
    }

    /// A buffer that has the bytes `offset..offset + len`.
    pub(super) fn range(
        &self,
        kind: &'static str,
        buffer: BufferId,
        offset: u64,
        len: u64,
    ) -> Result<&Arc<dyn Memory>, Violation> {
        let memory = self.get(kind, buffer)?;
        let size = memory.size();
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(memory),
            _ => Err(Violation::OutOfBounds {
                kind,
                buffer,
                offset,
                len,
                size,
            }),
        }
    }

    /// The memory of a buffer, for the validation of graphs.
    pub(super) fn find(&self, buffer: BufferId) -> Option<&Arc<dyn Memory>> {
        self.live.get(&buffer).map(|buffer| &buffer.memory)
    }

    /// Replaces the memory of a buffer by `new` memory of the same size, for which the engine has
    /// charged nothing. The charge of the tenant stays the same.
    pub(super) fn exchange(&mut self, buffer: BufferId, new: Arc<dyn Memory>) {
        if let Some(Buffer { memory, .. }) = self.live.get_mut(&buffer) {
            debug_assert_eq!(memory.size(), new.size());
            *memory = new;
        }
    }

    /// Sets the further mappings that the memory of a buffer can take.
    pub(super) fn set_copies(&mut self, buffer: BufferId, lease: Lease) {
        if let Some(buffer) = self.live.get_mut(&buffer) {
            buffer.copies = Some(lease);
        }
    }

    pub(super) fn remove(&mut self, buffer: BufferId) -> Result<(), Violation> {
        match self.live.remove(&buffer) {
            Some(Buffer { memory, .. }) => {
                self.bytes -= memory.size();
                Ok(())
            }
            None => Err(Violation::UnknownBuffer {
                kind: "FREE",
                buffer,
            }),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.live.len()
    }

    /// Bytes of all buffers.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A set of buffer ids, stored as ranges. Guests count up, so there are few ranges.
#[derive(Debug, Default)]
struct IdSet {
    /// First to last id of each range. Ranges neither overlap nor touch.
    ranges: BTreeMap<u64, u64>,
}

impl IdSet {
    fn contains(&self, id: u64) -> bool {
        self.before(id).is_some_and(|(_, last)| id <= last)
    }

    /// Adds an id that is not in the set.
    fn insert(&mut self, id: u64) {
        let last = match id.checked_add(1).and_then(|next| self.ranges.remove(&next)) {
            Some(last) => last,
            None => id,
        };
        let first = match self.before(id) {
            Some((first, end)) if end.checked_add(1) == Some(id) => first,
            _ => id,
        };
        self.ranges.insert(first, last);
    }

    fn ranges(&self) -> usize {
        self.ranges.len()
    }

    /// The last range that starts at or before `id`.
    fn before(&self, id: u64) -> Option<(u64, u64)> {
        let (&first, &last) = self.ranges.range(..=id).next_back()?;
        Some((first, last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_ids_take_one_range() {
        let mut ids = IdSet::default();
        for id in 1..=1000 {
            assert!(!ids.contains(id));
            ids.insert(id);
            assert!(ids.contains(id));
        }
        assert_eq!(ids.ranges(), 1);
    }

    #[test]
    fn ranges_merge_from_both_sides_and_at_the_ends() {
        let mut ids = IdSet::default();
        for id in [5, 3, 4, u64::MAX, u64::MAX - 1, 0] {
            assert!(!ids.contains(id));
            ids.insert(id);
        }
        assert_eq!(
            ids.ranges.into_iter().collect::<Vec<_>>(),
            [(0, 0), (3, 5), (u64::MAX - 1, u64::MAX)]
        );
    }
}
