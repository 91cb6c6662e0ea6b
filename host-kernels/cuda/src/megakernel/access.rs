//! The memory that a stage reads and writes.

use std::ops::Range;

use crate::device::Address;
use crate::params::VgView;

/// The memory that a stage accesses.
#[derive(Debug, Default, Clone)]
pub(crate) struct MemoryAccess {
    /// All that the stage reads, except weights.
    pub(crate) read: Vec<Range<Address>>,
    pub(crate) written: Vec<Range<Address>>,
    /// The weights of products, which are prefetched.
    pub(crate) ahead: Vec<Range<Address>>,
    /// The expert ids that say which weights are read.
    pub(crate) ids: Vec<Range<Address>>,
}

/// Whether a range of `these` has a byte in common with a range of `those`.
pub(crate) fn overlap(these: &[Range<Address>], those: &[Range<Address>]) -> bool {
    let meets = |a: &Range<Address>| those.iter().any(|b| a.start < b.end && b.start < a.end);
    these.iter().any(meets)
}

impl MemoryAccess {
    /// Whether the two stages have to run in order.
    pub(crate) fn conflicts(&self, other: &MemoryAccess) -> bool {
        let writes_to = |a: &MemoryAccess, b: &MemoryAccess| {
            overlap(&a.written, &b.read)
                || overlap(&a.written, &b.written)
                || overlap(&a.written, &b.ahead)
        };
        writes_to(self, other)
            || overlap(&other.written, &self.read)
            || overlap(&other.written, &self.ahead)
    }

    /// Bytes that are read once: weights, keys and values.
    pub(crate) fn bytes(&self) -> u64 {
        let all = self.ahead.iter().chain(&self.read);
        all.map(|range| range.end - range.start).sum()
    }

    pub(crate) fn reads(&mut self, view: &VgView) {
        if view.data != 0 {
            self.read.push(view.address_range());
        }
    }

    /// Adds a read of `view` in which each element is read only by the thread that then writes the
    /// element at the same place of `written`. If the two are the same memory, the read needs no
    /// order of its own: the write to the same bytes has it.
    pub(crate) fn reads_at(&mut self, view: &VgView, written: &[&VgView]) {
        if !written.iter().any(|written| is_same(view, written)) {
            self.reads(view);
        }
    }

    /// Whether blocks of the stage write what other blocks of it read or write. The result of such
    /// a launch depends on the order of its blocks, which a megakernel distributes differently.
    pub(crate) fn has_internal_conflict(&self) -> bool {
        let mut all = self.written.iter().enumerate();
        all.any(|(i, mine)| overlap(std::slice::from_ref(mine), &self.written[i + 1..]))
            || overlap(&self.written, &self.read)
            || overlap(&self.written, &self.ahead)
    }

    pub(crate) fn writes(&mut self, view: &VgView) {
        if view.data != 0 {
            self.written.push(view.address_range());
        }
    }

    pub(crate) fn reads_bytes(&mut self, at: Address, bytes: i64) {
        if at != 0 {
            self.read.push(at..at + bytes as u64);
        }
    }

    pub(crate) fn writes_bytes(&mut self, at: Address, bytes: i64) {
        if at != 0 {
            self.written.push(at..at + bytes as u64);
        }
    }
}

/// Whether the elements of the two views have the same addresses, one by one.
fn is_same(a: &VgView, b: &VgView) -> bool {
    let strides = |i: usize| a.ne[i] == 1 || a.nb[i] == b.nb[i];
    (a.data, a.type_, a.ne) == (b.data, b.type_, b.ne) && (0..4).all(strides)
}
