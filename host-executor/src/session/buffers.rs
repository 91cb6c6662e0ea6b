//! The buffers of a session.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use vgpu_engine::Memory;
use vgpu_transport::ir::BufferId;

use super::ending::Violation;
use crate::tenant::Charge;

/// The buffers that a guest has, and the names it can no longer use.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    live: HashMap<BufferId, Buffer>,
    /// Sum of the sizes of `live`.
    bytes: u64,
    used: Names,
}

#[derive(Debug)]
struct Buffer {
    memory: Arc<dyn Memory>,
    /// Behind the memory: what the guest may use again is free.
    _charge: Charge,
}

impl Buffers {
    /// Whether `buffer` may name a new buffer.
    pub(super) fn check_new(&self, buffer: BufferId) -> Result<(), Violation> {
        if buffer.0 == 0 {
            Err(Violation::BufferZero)
        } else if self.used.contains(buffer.0) {
            Err(Violation::BufferReused(buffer))
        } else {
            Ok(())
        }
    }

    /// Adds a buffer whose name was checked. `limit` bounds the memory that the used names take.
    pub(super) fn insert(
        &mut self,
        buffer: BufferId,
        memory: Arc<dyn Memory>,
        charge: Charge,
        limit: usize,
    ) -> Result<(), Violation> {
        self.used.insert(buffer.0);
        self.bytes += memory.size();
        let _charge = charge;
        self.live.insert(buffer, Buffer { memory, _charge });
        match self.used.ranges() {
            ranges if ranges > limit => Err(Violation::ScatteredNames { ranges }),
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

    /// A buffer of which bytes `offset..+len` exist.
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

    /// Puts other memory of the same size behind a name. Returns what was there.
    pub(super) fn replace(
        &mut self,
        buffer: BufferId,
        memory: Arc<dyn Memory>,
    ) -> Option<Arc<dyn Memory>> {
        let slot = self.live.get_mut(&buffer)?;
        self.bytes = self.bytes + memory.size() - slot.memory.size();
        // What the guest is charged for stays the same, however many hold it.
        Some(std::mem::replace(&mut slot.memory, memory))
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

/// A set of names that takes no more memory than there are gaps in it: guests count up.
#[derive(Debug, Default)]
struct Names {
    /// First name of a range to its last. Ranges neither overlap nor touch.
    ranges: BTreeMap<u64, u64>,
}

impl Names {
    fn contains(&self, name: u64) -> bool {
        self.before(name).is_some_and(|(_, last)| name <= last)
    }

    /// Adds a name that is not in the set.
    fn insert(&mut self, name: u64) {
        let last = match name
            .checked_add(1)
            .and_then(|next| self.ranges.remove(&next))
        {
            Some(last) => last,
            None => name,
        };
        let first = match self.before(name) {
            Some((first, end)) if end.checked_add(1) == Some(name) => first,
            _ => name,
        };
        self.ranges.insert(first, last);
    }

    fn ranges(&self) -> usize {
        self.ranges.len()
    }

    /// The range that starts at or before `name`.
    fn before(&self, name: u64) -> Option<(u64, u64)> {
        let (&first, &last) = self.ranges.range(..=name).next_back()?;
        Some((first, last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_count_up_take_one_range() {
        let mut names = Names::default();
        for name in 1..=1000 {
            assert!(!names.contains(name));
            names.insert(name);
            assert!(names.contains(name));
        }
        assert_eq!(names.ranges(), 1);
    }

    #[test]
    fn ranges_merge_from_both_sides_and_at_the_ends() {
        let mut names = Names::default();
        for name in [5, 3, 4, u64::MAX, u64::MAX - 1, 0] {
            assert!(!names.contains(name));
            names.insert(name);
        }
        assert_eq!(
            names.ranges.into_iter().collect::<Vec<_>>(),
            [(0, 0), (3, 5), (u64::MAX - 1, u64::MAX)]
        );
    }
}
