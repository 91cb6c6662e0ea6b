//! Buffers that share, write, merge and free weights.

use std::any::Any;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::extent::BaseRegion;
use super::segments::{Backing, COPIED_AT_ONCE, Segment};
use crate::CpuEngine;
use crate::memory::CpuMemory;
use crate::plan::views;
use crate::region::{Budget, page};
use vgpu_engine::{CopyAccount, Engine, EngineError, Extent, MAX_COPIES, Memory};
use vgpu_gguf::Rng;
use vgpu_transport::ir::{BufferId, Graph, Limits, Node, Op, Shape, Sources, Tensor, Type};
use vgpu_transport::ir::{ValidGraph, validate};

const PAGES: u64 = 16;

/// Bytes of a short extent.
const SHORT: u64 = 8 << 10;

/// Bytes that differ from place to place: a hash of the index.
fn content(len: u64) -> Vec<u8> {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

fn weights(budget: &Arc<Budget>, bytes: &[u8]) -> CpuMemory {
    let memory = CpuMemory::weights(bytes.len() as u64, budget).unwrap();
    memory.write(0, bytes.into()).unwrap();
    memory
}

fn read(memory: &dyn Memory, offset: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0; len as usize];
    memory.read(offset, out.as_mut_slice().into()).unwrap();
    out
}

/// The resident bytes of a base.
fn held(base: &BaseRegion) -> u64 {
    let count = base.region.len().div_ceil(page() as usize);
    let mut resident = vec![0; count];
    // SAFETY: the range is the mapping of the base, and `resident` has a byte for each of its
    // pages.
    let asked = unsafe {
        let at = base.region.as_ptr().cast();
        libc::mincore(at, base.region.len(), resident.as_mut_ptr())
    };
    assert_eq!(asked, 0);
    resident.iter().filter(|&page| page & 1 != 0).count() as u64 * page()
}

/// The bytes of a base in pages that are not zero. Unlike [`held`], it does not count pages that
/// were only read.
fn filled(base: &BaseRegion) -> u64 {
    let len = base.region.len();
    // SAFETY: the range is the mapping of the base, which no one writes during the call.
    let bytes = unsafe { std::slice::from_raw_parts(base.region.as_ptr(), len) };
    let pages = bytes.chunks(page() as usize);
    pages
        .filter(|page| page.iter().any(|&byte| byte != 0))
        .count() as u64
        * page()
}

fn base(memory: &CpuMemory) -> Arc<BaseRegion> {
    Arc::clone(&memory.as_weights().unwrap().base)
}

fn shared(one: &CpuMemory, offset: u64, len: u64) -> Arc<dyn Extent> {
    one.freeze();
    one.extent(offset, len).unwrap()
}

#[test]
fn two_buffers_share_bytes_and_do_not_see_writes_of_each_other() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let bytes = content(PAGES * page());
    let one = weights(&budget, &bytes);
    // The offsets within a page differ between the buffers.
    let (offset, to, len) = (256, 512, PAGES * page() - 512);
    let extent = shared(&one, offset, len);
    let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
    assert_eq!(two.attach(to, &extent, &|| false).unwrap(), len);
    let mut two_has = vec![0; (PAGES * page()) as usize];
    two_has[to as usize..].copy_from_slice(&bytes[256..][..len as usize]);
    assert_eq!(held(&base(&two)), 0);
    assert!(read(&two, 0, PAGES * page()) == two_has);
    assert_eq!(
        two.locate(to, len, &|| false).unwrap(),
        one.locate(256, len, &|| false).unwrap()
    );

    // Both write, and neither sees the writes of the other.
    two.write(3 * page(), (&[1; 10][..]).into()).unwrap();
    two.fill(5 * page(), 10, 2).unwrap();
    one.fill(7 * page(), page(), 3).unwrap();
    one.copy_from(9 * page(), &one, 0, 10).unwrap();
    two_has[3 * page() as usize..][..10].fill(1);
    two_has[5 * page() as usize..][..10].fill(2);
    assert!(read(&two, 0, PAGES * page()) == two_has);
    let mut one_has = bytes.clone();
    one_has[7 * page() as usize..][..page() as usize].fill(3);
    one_has.copy_within(..10, 9 * page() as usize);
    assert!(read(&one, 0, PAGES * page()) == one_has);
    let mut original = vec![0; len as usize];
    extent.read(0, &mut original).unwrap();
    assert!(original == bytes[256..][..len as usize]);
}

#[test]
fn a_write_does_not_change_the_bytes_of_other_buffers() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let bytes = content(PAGES * page());
    let one = weights(&budget, &bytes);
    let extent = shared(&one, page(), 4 * page());
    let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
    two.attach(page(), &extent, &|| false).unwrap();
    drop(extent);
    let before = one.moves();
    one.fill(2 * page(), 1, !bytes[2 * page() as usize])
        .unwrap();
    assert_ne!(
        one.moves(),
        before,
        "the bytes are shared, so the writer copies them"
    );
    let mut one_has = bytes.clone();
    one_has[2 * page() as usize] = !bytes[2 * page() as usize];
    assert!(read(&one, 0, PAGES * page()) == one_has);
    assert!(read(&two, page(), 4 * page()) == bytes[page() as usize..][..4 * page() as usize]);
    assert_eq!(budget.used(), (2 * PAGES + 4) * page());
    // A tensor in two segments becomes contiguous.
    let at = one.locate(0, 2 * page(), &|| false).unwrap();
    // SAFETY: `locate` has returned the address of two pages, which do not change.
    let there = unsafe { std::slice::from_raw_parts(at, 2 * page() as usize) };
    assert!(there == &one_has[..2 * page() as usize]);
    assert_eq!(at, one.own(0, 2 * page(), &|| false).unwrap());
    assert!(read(&one, 0, PAGES * page()) == one_has);
    // Without the first buffer, only the second uses the bytes, and writes them in place.
    drop(one);
    two.own(page(), 4 * page(), &|| false).unwrap();
    assert_eq!(budget.used(), PAGES * page());
}

#[test]
fn pages_are_freed_when_neither_buffer_nor_extent_needs_them() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let bytes = content(PAGES * page());
    let one = weights(&budget, &bytes);
    let first = shared(&one, 0, 4 * page());
    let second = one.extent(4 * page() + 256, 4 * page()).unwrap();
    let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
    two.attach(4 * page() + 256, &second, &|| false).unwrap();
    drop(first);
    let base = base(&one);
    let pages = || held(&base) / page();
    assert_eq!(pages(), PAGES, "the owner needs all pages");
    drop(one);
    assert_eq!(pages(), 5, "the pages of the second extent");
    assert!(
        read(&two, 4 * page() + 256, 4 * page())
            == bytes[4 * page() as usize + 256..][..4 * page() as usize]
    );
    drop(two);
    assert_eq!(pages(), 5);
    drop(second);
    assert_eq!(pages(), 0);
    assert_eq!(budget.used(), 0);
}

#[test]
fn equal_uploads_of_two_buffers_are_merged() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let mut bytes = content(PAGES * page());
    // Two tensors with zeros between them, where ggml aligns the second one.
    let (end, start) = (8 * page() + 100, 8 * page() + 128);
    bytes[end as usize..start as usize].fill(0);
    let (one, two) = (weights(&budget, &bytes), weights(&budget, &bytes));
    let ranges = [(0, end), (start, PAGES * page() - start)];
    let extents = ranges.map(|(offset, len)| shared(&one, offset, len));
    let own = ranges.map(|(offset, len)| shared(&two, offset, len));
    assert_eq!(held(&base(&two)), PAGES * page());
    let attach = |i: usize| two.attach(ranges[i].0, &extents[i], &|| false).unwrap();
    let before = two.moves();
    assert_eq!((attach(0), attach(1)), (ranges[0].1, ranges[1].1));
    assert_ne!(two.moves(), before);
    // The second copy stays while its extents exist.
    assert_eq!(held(&base(&two)), PAGES * page());
    drop(own);
    attach(0);
    attach(1);
    assert_eq!(
        held(&base(&two)),
        0,
        "including the page with parts of both tensors"
    );
    assert!(read(&two, 0, PAGES * page()) == bytes);
    // A buffer that was written is not replaced by the original bytes.
    let three = weights(&budget, &bytes);
    three.freeze();
    three.fill(0, 1, !bytes[0]).unwrap();
    assert_eq!(three.attach(0, &extents[0], &|| false).unwrap(), 0);
    assert_eq!(read(&three, 0, 1), [!bytes[0]]);
}

#[test]
fn pages_with_other_bytes_stay() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let bytes = content(PAGES * page());
    let (one, two) = (weights(&budget, &bytes), weights(&budget, &bytes));
    let extent = shared(&one, 100, PAGES * page() - 200);
    two.freeze();
    two.attach(100, &extent, &|| false).unwrap();
    assert_eq!(held(&base(&two)), 2 * page());
    assert!(read(&two, 0, PAGES * page()) == bytes);
}

#[test]
fn extents_that_partly_overlap_others_are_copied() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let bytes = content(PAGES * page());
    let one = weights(&budget, &bytes);
    let first = shared(&one, 0, 4 * page());
    let second = one.extent(4 * page(), 4 * page()).unwrap();
    let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
    two.attach(0, &first, &|| false).unwrap();
    assert_eq!(two.attach(2 * page(), &second, &|| false).unwrap(), 0);
    let mut two_has = vec![0; 6 * page() as usize];
    two_has[..2 * page() as usize].copy_from_slice(&bytes[..2 * page() as usize]);
    two_has[2 * page() as usize..]
        .copy_from_slice(&bytes[4 * page() as usize..][..4 * page() as usize]);
    assert!(read(&two, 0, 6 * page()) == two_has);
    assert_eq!(two.attach(0, &second, &|| false).unwrap(), 4 * page());
    assert!(read(&two, 0, 4 * page()) == bytes[4 * page() as usize..][..4 * page() as usize]);
    assert!(
        two.attach((PAGES - 1) * page(), &first, &|| false).is_err(),
        "no room"
    );
    let plain = CpuMemory::new(PAGES * page(), &budget).unwrap();
    assert!(plain.attach(0, &first, &|| false).is_err());
    assert!(!plain.freeze());
}

#[test]
fn overlapping_copies_are_correct() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let bytes = content(PAGES * page());
    let one = weights(&budget, &bytes);
    let extent = shared(&one, 4 * page(), 4 * page());
    for (to, from) in [(3 * page(), 2 * page() + 5), (page() + 5, 2 * page())] {
        let two = weights(&budget, &bytes);
        two.freeze();
        two.attach(4 * page(), &extent, &|| false).unwrap();
        two.copy_from(to, &two, from, 5 * page()).unwrap();
        let mut expected = bytes.clone();
        expected.copy_within(from as usize..(from + 5 * page()) as usize, to as usize);
        assert!(read(&two, 0, PAGES * page()) == expected);
    }
    let mut out = vec![0; 4 * page() as usize];
    extent.read(0, &mut out).unwrap();
    assert!(out == bytes[4 * page() as usize..][..4 * page() as usize]);
}

#[test]
fn copies_of_shared_bytes_need_memory() {
    let budget = Arc::new(Budget::new(Some(3 * PAGES * page())));
    let bytes = content(2 * PAGES * page());
    let one = weights(&budget, &bytes);
    let extent = shared(&one, 0, 2 * PAGES * page());
    assert!(matches!(
        one.fill(0, 1, 1),
        Err(EngineError::OutOfMemory { .. })
    ));
    assert!(one.is_unmodified());
    drop(extent);
    one.fill(0, 1, 1).unwrap();
    assert_eq!(
        budget.used(),
        2 * PAGES * page(),
        "no other buffer shares the bytes"
    );
    drop(one);
    assert_eq!(budget.used(), 0);
}

/// A guest that may have so many bytes of copies.
struct Account {
    left: Arc<AtomicU64>,
}

/// Bytes that are charged to an [`Account`].
struct Charged {
    left: Arc<AtomicU64>,
    bytes: u64,
}

impl CopyAccount for Account {
    fn charge(
        &self,
        bytes: u64,
        allocate: &mut dyn FnMut() -> Result<(), EngineError>,
    ) -> Result<Box<dyn Any + Send + Sync>, EngineError> {
        let free = self.left.load(Ordering::Relaxed);
        let left = free.checked_sub(bytes).ok_or(EngineError::OutOfMemory {
            wanted: bytes,
            free,
            total: 0,
        })?;
        self.left.store(left, Ordering::Relaxed);
        let charged = Charged {
            left: Arc::clone(&self.left),
            bytes,
        };
        allocate()?;
        Ok(Box::new(charged))
    }
}

impl Drop for Charged {
    fn drop(&mut self) {
        self.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[test]
fn copies_of_shared_bytes_are_charged_to_the_guest_until_they_are_freed() {
    let (copy, room) = (4 * page(), 6 * page());
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let one = weights(&budget, &content(PAGES * page()));
    let left = Arc::new(AtomicU64::new(room));
    let account = Account {
        left: Arc::clone(&left),
    };
    one.charge_copies(Arc::new(account));
    let extents = [0, 4].map(|at| shared(&one, at * page(), copy));
    let used = budget.used();
    one.fill(0, 1, 1).unwrap();
    let charged = |copies: u64| {
        assert_eq!(left.load(Ordering::Relaxed), room - copies * page());
        assert_eq!(budget.used(), used + copies * page());
    };
    charged(4);
    // The account refuses, and the engine has charged nothing.
    let refused = one.fill(copy, 1, 1).unwrap_err();
    assert_eq!(
        refused,
        EngineError::OutOfMemory {
            wanted: copy,
            free: room - copy,
            total: 0,
        }
    );
    charged(4);
    assert_eq!(
        read(&one, copy, 1),
        content(PAGES * page())[copy as usize..][..1]
    );
    // The engine refuses, and the account has charged nothing.
    let small = Arc::new(Budget::new(Some(PAGES * page())));
    let two = weights(&small, &content(PAGES * page()));
    two.charge_copies(Arc::new(Account {
        left: Arc::clone(&left),
    }));
    let extent = shared(&two, 0, page());
    two.fill(0, 1, 1).unwrap_err();
    assert_eq!(left.load(Ordering::Relaxed), room - copy);
    drop((extent, two));
    // The bytes are in the base again, whose extents are gone.
    drop(extents);
    one.fill(0, 2 * copy, 1).unwrap();
    charged(0);
    drop(one);
    assert_eq!((left.load(Ordering::Relaxed), budget.used()), (room, 0));
}

#[test]
fn extents_do_not_overlap_and_need_frozen_memory() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let one = weights(&budget, &content(PAGES * page()));
    assert!(one.extent(0, page()).is_err(), "not frozen yet");
    one.freeze();
    one.extent(page(), page()).unwrap();
    assert!(one.extent(0, page() + 1).is_err());
    assert!(one.extent(2 * page() - 1, 10).is_err());
    assert!(one.extent(0, 0).is_err());
    assert!(one.extent(u64::MAX, 2).is_err());
    assert!(one.extent((PAGES - 1) * page(), page() + 1).is_err());
    one.extent(0, page()).unwrap();
    one.fill(0, 1, 0).unwrap();
    assert!(one.extent(4 * page(), page()).is_err(), "written to");
}

#[test]
fn an_extent_is_read_while_it_is_written() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let bytes = content(PAGES * page());
    let one = CpuMemory::weights(PAGES * page(), &budget).unwrap();
    let (start, len) = (page() + 256, 4 * page());
    let part = &bytes[start as usize..][..len as usize];
    let extent = one.begin_extent(start, len).unwrap();
    assert_eq!((extent.size(), extent.filled()), (len, 0));
    let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
    for chunk in part.chunks(1000) {
        assert!(two.attach(0, &extent, &|| false).is_err(), "not complete");
        one.append(&extent, chunk.into()).unwrap();
        let mut seen = vec![0; extent.filled() as usize];
        extent.read(0, &mut seen).unwrap();
        assert!(seen == part[..seen.len()]);
        assert!(extent.read(1, &mut seen).is_err(), "one byte too many");
    }
    assert!(one.append(&extent, (&[0][..]).into()).is_err());
    assert_eq!(two.attach(0, &extent, &|| false).unwrap(), len);
    // The buffer writes to it again, and the other one does not see that.
    one.fill(start, 10, 1).unwrap();
    assert!(one.append(&extent, (&[][..]).into()).is_err(), "withdrawn");
    assert!(read(&two, 0, len) == part);
    assert_eq!(read(&one, start, 10), [1; 10]);
    assert!(read(&one, start + 10, len - 10) == part[10..]);
    // An extent that begins where another one is in use.
    assert!(one.begin_extent(start, len).is_err());
    // An extent that ends when its range is written to, or when another one begins there.
    let lost = Arc::downgrade(&one.begin_extent(10 * page(), page()).unwrap());
    one.begin_extent(10 * page() + 5, page()).unwrap();
    assert!(lost.upgrade().is_none());
    // One that is not complete when the memory is frozen is complete with zeros.
    let rest = one.begin_extent(12 * page(), page()).unwrap();
    one.append(&rest, (&[7][..]).into()).unwrap();
    one.freeze();
    let mut seen = vec![1; page() as usize];
    rest.read(0, &mut seen).unwrap();
    assert!(seen[0] == 7 && seen[1..].iter().all(|&byte| byte == 0));
    assert!(one.append(&rest, (&[7][..]).into()).is_err());
    assert!(Arc::ptr_eq(
        &one.extent(12 * page(), page()).unwrap(),
        &rest
    ));
    two.freeze();
    assert!(Arc::ptr_eq(&two.extent(0, len).unwrap(), &extent));
    assert!(one.begin_extent(14 * page(), page()).is_err(), "frozen");
}

#[test]
fn refused_writes_and_extents_leave_the_extents_in_use() {
    // The budget is full.
    let budget = Arc::new(Budget::fixed(PAGES * page()));
    let one = CpuMemory::weights(PAGES * page(), &budget).unwrap();
    let (start, len) = (page(), 4 * page());
    let bytes = content(len);
    let extent = one.begin_extent(start, len).unwrap();
    let (first, rest) = bytes.split_at(1000);
    one.append(&extent, first.into()).unwrap();
    // A write needs a copy.
    assert!(matches!(
        one.fill(start, 10, 1),
        Err(EngineError::OutOfMemory { .. })
    ));
    let (second, rest) = rest.split_at(1000);
    one.append(&extent, second.into()).unwrap();
    // Another extent begins where this one has bytes.
    assert!(one.begin_extent(start + page(), page()).is_err());
    one.append(&extent, rest.into()).unwrap();
    one.freeze();
    assert!(one.begin_extent(start, len).is_err(), "frozen");
    assert!(one.fill(start, 10, 1).is_err());
    assert!(Arc::ptr_eq(&one.extent(start, len).unwrap(), &extent));
    assert!(read(&one, start, len) == bytes);
    assert_eq!(budget.used(), PAGES * page());
    // Without a user, the bytes need no copy.
    drop(extent);
    one.fill(start, 10, 1).unwrap();
    assert_eq!(read(&one, start, 10), [1; 10]);
}

#[test]
fn equal_bytes_of_one_buffer_are_shared() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let mut bytes = content(PAGES * page());
    bytes.copy_within(..4 * page() as usize, 8 * page() as usize);
    let one = weights(&budget, &bytes);
    let extent = shared(&one, 0, 4 * page());
    assert_eq!(
        one.attach(8 * page(), &extent, &|| false).unwrap(),
        4 * page()
    );
    assert_eq!(
        one.attach(page(), &extent, &|| false).unwrap(),
        0,
        "overlaps itself"
    );
    let weak = Arc::downgrade(&extent);
    drop(extent);
    let base = base(&one);
    assert_eq!(filled(&base), (PAGES - 4) * page());
    assert!(read(&one, 0, PAGES * page()) == bytes);
    // A write to either part does not change the other.
    one.fill(page(), 1, !bytes[page() as usize]).unwrap();
    assert!(
        read(&one, 8 * page(), 4 * page()) == bytes[8 * page() as usize..][..4 * page() as usize]
    );
    one.fill(8 * page(), 4 * page(), 3).unwrap();
    assert!(weak.upgrade().is_none());
    assert_eq!(read(&one, page(), 2)[0], !bytes[page() as usize]);
    assert_eq!(
        filled(&base),
        (PAGES - 4) * page(),
        "the first part moved, its pages are freed"
    );
    drop(one);
    assert_eq!((filled(&base), budget.used()), (0, 0));
}

#[test]
fn pages_of_bytes_that_a_buffer_has_moved_are_freed_with_their_last_user() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let bytes = content(PAGES * page());
    let one = weights(&budget, &bytes);
    let extent = shared(&one, 0, 4 * page());
    let other = one.extent(6 * page(), 2 * page()).unwrap();
    let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
    two.attach(0, &extent, &|| false).unwrap();
    two.attach(6 * page(), &other, &|| false).unwrap();
    drop((extent, other));
    // The copy takes both extents and the bytes in between, which only the copy needs.
    one.fill(3 * page(), 4 * page(), 9).unwrap();
    let base = base(&one);
    assert_eq!(held(&base), (PAGES - 2) * page());
    drop(two);
    assert_eq!(held(&base), (PAGES - 8) * page());
    let mut one_has = bytes;
    one_has[3 * page() as usize..][..4 * page() as usize].fill(9);
    assert!(read(&one, 0, PAGES * page()) == one_has);
}

/// A buffer of the test below, and the bytes that it must have.
struct Modelled {
    memory: CpuMemory,
    bytes: Vec<u8>,
    is_frozen: bool,
    is_written: bool,
    /// What the buffer appends to, and how much of it exists.
    open: Option<(Weak<dyn Extent>, u64, u64)>,
}

/// Random accesses to buffers that share extents. After each, all buffers and extents have the
/// bytes of a model, and the pages in memory are at most those of the buffers that exist.
#[test]
fn random_accesses_keep_contents_and_no_page_without_a_buffer() {
    for seed in 0..40 {
        random_accesses(seed);
    }
}

fn random_accesses(seed: u64) {
    let mut random = Rng::new(seed, 0);
    let mut next = |below: u64| random.below(below);
    // Every second run uses whole pages, so that the count of pages is exact.
    let unit = if seed.is_multiple_of(2) { page() } else { 256 };
    let size = PAGES * page();
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let mut bases: Vec<Arc<BaseRegion>> = Vec::new();
    let mut buffers: Vec<Modelled> = Vec::new();
    let mut extents: Vec<(Weak<dyn Extent>, Vec<u8>)> = Vec::new();
    for step in 0..300 {
        let count = buffers.len() as u64;
        let which = next(count.max(1)) as usize;
        let start = next(size / unit) * unit;
        let len = (1 + next((size - start) / unit)).min(next(size / unit) + 1) * unit;
        let range = start as usize..(start + len) as usize;
        match next(12) {
            0 if count < 4 => {
                let memory = CpuMemory::weights(size, &budget).unwrap();
                bases.push(base(&memory));
                buffers.push(Modelled {
                    memory,
                    bytes: vec![0; size as usize],
                    is_frozen: false,
                    is_written: false,
                    open: None,
                });
            }
            1 if count > 2 => drop(buffers.swap_remove(which)),
            _ if count == 0 => {}
            2 => {
                let value = 1 + next(255) as u8;
                let buffer = &mut buffers[which];
                buffer.memory.fill(start, len, value).unwrap();
                buffer.bytes[range].fill(value);
                buffer.is_written |= buffer.is_frozen;
            }
            3 => {
                let from = next((size - len) / unit + 1) * unit;
                let buffer = &mut buffers[which];
                let memory = &buffer.memory;
                memory.copy_from(start, memory, from, len).unwrap();
                let from = from as usize;
                buffer
                    .bytes
                    .copy_within(from..from + len as usize, range.start);
                buffer.is_written |= buffer.is_frozen;
            }
            4 | 5 => {
                let buffer = &mut buffers[which];
                if let Ok(extent) = buffer.memory.begin_extent(start, len) {
                    buffer.open = Some((Arc::downgrade(&extent), start, 0));
                }
            }
            6 | 7 => {
                let buffer = &mut buffers[which];
                let Some((extent, at, done)) = buffer.open.take() else {
                    continue;
                };
                let Some(extent) = extent.upgrade() else {
                    continue;
                };
                let more = (extent.size() - done).min(unit * (1 + next(PAGES)));
                let data: Vec<u8> = (0..more).map(|i| (i * 7 + next(3)) as u8).collect();
                if buffer.memory.append(&extent, data[..].into()).is_err() {
                    continue; // withdrawn, or frozen
                }
                buffer.bytes[(at + done) as usize..][..data.len()].copy_from_slice(&data);
                if done + more < extent.size() {
                    buffer.open = Some((Arc::downgrade(&extent), at, done + more));
                } else {
                    let bytes = buffer.bytes[at as usize..][..extent.size() as usize].to_vec();
                    extents.push((Arc::downgrade(&extent), bytes));
                }
            }
            8 if next(4) == 0 => {
                buffers[which].memory.freeze();
                buffers[which].is_frozen = true;
            }
            9 => {
                if let Ok(extent) = buffers[which].memory.extent(start, len) {
                    let bytes = buffers[which].bytes[range].to_vec();
                    extents.push((Arc::downgrade(&extent), bytes));
                }
            }
            10 => {
                // The address of bytes in several places.
                buffers[which].memory.locate(start, len, &|| false).unwrap();
            }
            _ => {
                let known = next(extents.len().max(1) as u64) as usize;
                let Some((extent, bytes)) = extents.get(known) else {
                    continue;
                };
                let Some(extent) = extent.upgrade() else {
                    continue;
                };
                let buffer = &mut buffers[which];
                let at = next((size - extent.size()) / unit + 1) * unit;
                let there = at as usize..at as usize + bytes.len();
                // Frozen memory may attach only what it has.
                if buffer.is_frozen && buffer.bytes[there.clone()] != bytes[..] {
                    continue;
                }
                match buffer.memory.attach(at, &extent, &|| false) {
                    Ok(_) if buffer.is_written => {}
                    Ok(_) => buffer.bytes[there].copy_from_slice(bytes),
                    // The extent overlaps itself.
                    Err(_) => assert!(Arc::ptr_eq(&base(&buffer.memory), &downcast(&extent).base)),
                }
            }
        }
        extents.retain(|(extent, _)| extent.strong_count() > 0);
        for (extent, bytes) in &extents {
            let extent = extent.upgrade().unwrap();
            let mut seen = vec![0; bytes.len()];
            extent.read(0, &mut seen).unwrap();
            assert!(
                seen == *bytes,
                "an extent has changed: seed {seed}, step {step}"
            );
        }
        let (mut resident, mut slack) = (0, 0);
        for buffer in &buffers {
            let seen = read(&buffer.memory, 0, size);
            assert!(
                seen == buffer.bytes,
                "other bytes: seed {seed}, step {step}"
            );
            let state = buffer.memory.as_weights().unwrap().state();
            for segment in state.segments.values() {
                slack += if unit < page() { 2 * page() } else { 0 };
                if matches!(segment.backing, Backing::Own { .. }) {
                    resident += segment.len.next_multiple_of(page());
                }
            }
        }
        resident += bases.iter().map(|base| filled(base)).sum::<u64>();
        let charged = buffers.len() as u64 * size;
        assert!(
            resident <= charged + slack,
            "{resident} bytes resident, {charged} charged: seed {seed}, step {step}"
        );
        let in_use: u64 = buffers.iter().map(|b| b.memory.bytes_in_use()).sum();
        assert!(
            resident <= in_use + slack,
            "{resident} of {in_use} in use: seed {seed}, step {step}"
        );
    }
    drop(buffers);
    assert_eq!(bases.iter().map(|base| filled(base)).sum::<u64>(), 0);
    assert_eq!(budget.used(), 0);
}

/// An honest program writes each byte of a buffer once, so that the parts of the buffer fit into it
/// exactly. The parts must fit by this figure, too, where a page has bytes of two parts.
#[test]
fn page_that_has_bytes_beside_an_attached_extent_counts_once() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let one = weights(&budget, &content(PAGES * page()));
    let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
    let (offset, len) = (page() / 2, 3 * page());
    two.attach(offset, &shared(&one, offset, len), &|| false)
        .unwrap();
    assert_eq!(two.bytes_in_use(), len);
    two.fill(0, offset, 7).unwrap();
    assert_eq!(two.bytes_in_use(), offset + len);
    two.fill(offset + len, 8, 7).unwrap();
    assert_eq!(two.bytes_in_use(), 4 * page());
    // An extent inside one page.
    let (offset, len) = (8 * page() + 64, 128);
    two.attach(offset, &shared(&one, offset, len), &|| false)
        .unwrap();
    assert_eq!(two.bytes_in_use(), 4 * page() + len);
    two.fill(8 * page(), 64, 7).unwrap();
    assert_eq!(two.bytes_in_use(), 5 * page());
}

fn downcast(extent: &Arc<dyn Extent>) -> Arc<super::CpuExtent> {
    Arc::clone(extent).into_any().downcast().ok().unwrap()
}

/// Each of many extents is in use elsewhere when its bytes are written.
#[test]
fn written_buffer_has_a_limited_number_of_regions() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let pages = 4 * MAX_COPIES as u64;
    let bytes = content(pages * page());
    let (one, two) = (
        weights(&budget, &bytes),
        CpuMemory::weights(pages * page(), &budget).unwrap(),
    );
    let places: Vec<u64> = (0..pages / 2).map(|i| 2 * i * page()).collect();
    for &place in &places {
        two.attach(place, &shared(&one, place, page()), &|| false)
            .unwrap();
    }
    let copies = || {
        let state = one.as_weights().unwrap().state();
        let own = |segment: &&Segment| matches!(segment.backing, Backing::Own { .. });
        state.segments.values().filter(own).count()
    };
    let mut expected = bytes.clone();
    let mut most = 0;
    for &place in &places {
        one.fill(place, 10, 7).unwrap();
        expected[place as usize..][..10].fill(7);
        most = most.max(copies());
        assert!(read(&one, 0, pages * page()) == expected);
    }
    assert_eq!((most, copies()), (MAX_COPIES, 1));
    for &place in &places {
        let at = place as usize..(place + page()) as usize;
        assert!(read(&two, place, page()) == bytes[at]);
    }
}

#[test]
fn lease_is_held_while_an_extent_keeps_the_mapping() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let lease = Arc::new(());
    let one = weights(&budget, &content(PAGES * page()));
    one.hold(Box::new(Arc::clone(&lease)));
    let extent = shared(&one, 0, page());
    let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
    two.attach(0, &extent, &|| false).unwrap();
    drop((one, extent));
    assert_eq!(Arc::strong_count(&lease), 2);
    drop(two);
    assert_eq!(Arc::strong_count(&lease), 1);
}

/// Two buffers for weights of `size` bytes. The first one is frozen, and the second one has
/// attached all its extents of `each` bytes.
fn sharing_all(engine: &CpuEngine, size: u64, each: u64) -> [Arc<dyn Memory>; 2] {
    let [one, two] = [(); 2].map(|()| {
        let plain = engine.alloc(size).unwrap();
        engine.alloc_weights(&plain).unwrap().unwrap()
    });
    one.write(0, content(size)[..].into()).unwrap();
    one.freeze();
    for at in (0..size).step_by(each as usize) {
        let extent = one.extent(at, each).unwrap();
        assert_eq!(two.attach(at, &extent, &|| false).unwrap(), each);
    }
    [one, two]
}

/// A graph that writes 16 bytes to buffer 0 around each multiple of `each` bytes, from numbers of
/// buffer 1.
fn writes_around(engine: &CpuEngine, size: u64, each: u64) -> ValidGraph {
    let shape = Shape::contiguous(Type::F32, [4, 1, 1, 1]).unwrap();
    let tensor = |buffer, offset| Tensor {
        shape,
        buffer,
        offset,
    };
    let mut graph = Graph {
        buffers: vec![BufferId(1), BufferId(2)],
        tensors: vec![tensor(1, 0)],
        nodes: Vec::new(),
    };
    for boundary in (each..size).step_by(each as usize) {
        graph.tensors.push(tensor(0, boundary - 8));
        let (scale, bias) = (0.0, 7.0);
        graph.nodes.push(Node {
            op: Op::Scale { scale, bias },
            dst: graph.tensors.len() as u32 - 1,
            src: Sources::new([Some(0)]),
        });
    }
    let size_of = |buffer| Some(if buffer == BufferId(1) { size } else { 16 });
    validate(graph, engine.capabilities(), &Limits::default(), size_of).unwrap()
}

/// The memory of this engine behind a buffer.
fn of_engine(memory: &Arc<dyn Memory>) -> &CpuMemory {
    memory.as_any().downcast_ref().unwrap()
}

/// The bytes that a buffer for weights has copied since it was made.
fn copied(memory: &Arc<dyn Memory>) -> u64 {
    of_engine(memory).as_weights().unwrap().state().gathered
}

/// Each write merges two extents, of which one has been merged before.
#[test]
fn graph_that_writes_across_extents_in_use_copies_each_byte_a_few_times() {
    const EXTENTS: u64 = 512;
    let size = EXTENTS * page();
    let engine = CpuEngine::new(1, Some(64 << 20)).unwrap();
    let [one, two] = sharing_all(&engine, size, page());
    let graph = writes_around(&engine, size, page());
    let numbers = engine.alloc(16).unwrap();
    let memories = [&one, &numbers].map(of_engine);
    let (views, _) = views(graph.graph(), &memories, &|| false).unwrap();
    assert!(copied(&one) >= size, "the writes touch every extent");
    assert!(copied(&one) <= 2 * size, "{} of {size}", copied(&one));
    // What the nodes would write, at the addresses that they have.
    let mut expected = content(size);
    let boundaries = (page()..size).step_by(page() as usize);
    for (node, boundary) in graph.graph().nodes.iter().zip(boundaries) {
        let written = views[node.dst as usize].ptr();
        // SAFETY: the view has 16 bytes of `one`, which exists, and no one else uses it now.
        unsafe { written.write_bytes(7, 16) };
        expected[boundary as usize - 8..][..16].fill(7);
    }
    assert!(read(one.as_ref(), 0, size) == expected);
    assert!(read(two.as_ref(), 0, size) == content(size));
}

#[test]
fn cancelled_copy_of_weights_ends_with_its_part_and_changes_nothing() {
    let size = 8 * COPIED_AT_ONCE;
    let engine = CpuEngine::new(1, Some(256 << 20)).unwrap();
    let [one, two] = sharing_all(&engine, size, size / 2);
    let graph = writes_around(&engine, size, size / 2);
    let numbers = engine.alloc(16).unwrap();
    let memories = [&one, &numbers].map(of_engine);
    // An extent that is attached over a part of another one.
    let part = engine.alloc(SHORT).unwrap();
    let part = engine.alloc_weights(&part).unwrap().unwrap();
    part.freeze();
    let part = part.extent(0, SHORT).unwrap();
    // Each copy has four parts or more.
    let asked = Cell::new(0);
    let third = || {
        asked.set(asked.get() + 1);
        asked.get() % 3 == 0
    };
    let cancelled = [
        views(graph.graph(), &memories, &third).map(drop),
        one.unshare(0, 1, &third),
        two.unshare(0, 1, &third),
        two.attach(size - SHORT, &part, &third).map(drop),
    ];
    for (what, outcome) in cancelled.into_iter().enumerate() {
        assert_eq!(outcome, Err(EngineError::Cancelled), "{what}");
    }
    assert_eq!((asked.get(), copied(&one), copied(&two)), (12, 0, 0));
    assert!(one.is_unmodified());
    for memory in [one, two] {
        assert!(read(memory.as_ref(), 0, size) == content(size));
    }
}
