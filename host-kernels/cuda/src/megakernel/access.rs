//! What memory a stage reads and writes.

use std::ops::Range;

use crate::device::Address;
use crate::params::VgView;

/// What memory a stage touches.
#[derive(Debug, Default, Clone)]
pub(crate) struct MemoryAccess {
    /// Everything that it reads but weights.
    pub(crate) read: Vec<Range<Address>>,
    pub(crate) written: Vec<Range<Address>>,
    /// The weights of products, which are read ahead.
    pub(crate) ahead: Vec<Range<Address>>,
    /// Where it is written which of the weights those are.
    pub(crate) ids: Vec<Range<Address>>,
}

/// Whether some of these share a byte with some of those.
pub(crate) fn meet(these: &[Range<Address>], those: &[Range<Address>]) -> bool {
    let meets = |a: &Range<Address>| those.iter().any(|b| a.start < b.end && b.start < a.end);
    these.iter().any(meets)
}

impl MemoryAccess {
    /// Whether it matters which of the two comes first.
    pub(crate) fn conflicts(&self, other: &MemoryAccess) -> bool {
        let writes_to = |a: &MemoryAccess, b: &MemoryAccess| {
            meet(&a.written, &b.read) || meet(&a.written, &b.written) || meet(&a.written, &b.ahead)
        };
        writes_to(self, other)
            || meet(&other.written, &self.read)
            || meet(&other.written, &self.ahead)
    }

    /// Bytes of memory that are read once: weights, keys and values.
    pub(crate) fn bytes(&self) -> u64 {
        let all = self.ahead.iter().chain(&self.read);
        all.map(|range| range.end - range.start).sum()
    }

    pub(crate) fn reads(&mut self, view: &VgView) {
        if view.data != 0 {
            self.read.push(view.extent());
        }
    }

    /// Reads each element of `view` for no other element of `written` but the one at the same place, by the thread that
    /// then writes that. So it does not matter if the two are the same memory, element by element; and then whoever minds
    /// that it is read minds that it is written.
    pub(crate) fn reads_at(&mut self, view: &VgView, written: &[&VgView]) {
        if !written.iter().any(|written| is_same(view, written)) {
            self.reads(view);
        }
    }

    /// Whether some of the stage's work writes what other work of it reads or writes, so that it matters who comes
    /// first. A launch of such a kind depends on how a device happens to order its blocks; a step, which shares them out
    /// otherwise, would do it differently.
    pub(crate) fn is_in_its_own_way(&self) -> bool {
        let mut all = self.written.iter().enumerate();
        all.any(|(i, mine)| meet(std::slice::from_ref(mine), &self.written[i + 1..]))
            || meet(&self.written, &self.read)
            || meet(&self.written, &self.ahead)
    }

    pub(crate) fn writes(&mut self, view: &VgView) {
        if view.data != 0 {
            self.written.push(view.extent());
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

/// Whether the elements of the two lie at the same places, one by one.
fn is_same(a: &VgView, b: &VgView) -> bool {
    let strides = |i: usize| a.ne[i] == 1 || a.nb[i] == b.nb[i];
    (a.data, a.type_, a.ne) == (b.data, b.type_, b.ne) && (0..4).all(strides)
}
