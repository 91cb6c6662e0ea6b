//! Buffers that share, write, merge and free weights.

use std::sync::Arc;

use super::extent::BaseRegion;
use crate::memory::CpuMemory;
use crate::region::{Budget, page};
use vgpu_engine::{EngineError, Extent, Memory};

const PAGES: u64 = 16;

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
    assert_eq!(two.attach(to, &extent).unwrap(), len);
    let mut two_has = vec![0; (PAGES * page()) as usize];
    two_has[to as usize..].copy_from_slice(&bytes[256..][..len as usize]);
    assert_eq!(held(&base(&two)), 0);
    assert!(read(&two, 0, PAGES * page()) == two_has);
    assert_eq!(two.locate(to, len).unwrap(), one.locate(256, len).unwrap());

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
    two.attach(page(), &extent).unwrap();
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
    // A tensor in two pieces becomes contiguous.
    let at = one.locate(0, 2 * page()).unwrap();
    // SAFETY: `locate` has returned the address of two pages, which do not change.
    let there = unsafe { std::slice::from_raw_parts(at, 2 * page() as usize) };
    assert!(there == &one_has[..2 * page() as usize]);
    assert_eq!(at, one.own(0, 2 * page()).unwrap());
    assert!(read(&one, 0, PAGES * page()) == one_has);
    // Without the first buffer, only the second uses the bytes, and writes them in place.
    drop(one);
    two.own(page(), 4 * page()).unwrap();
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
    two.attach(4 * page() + 256, &second).unwrap();
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
    let attach = |i: usize| two.attach(ranges[i].0, &extents[i]).unwrap();
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
    assert_eq!(three.attach(0, &extents[0]).unwrap(), 0);
    assert_eq!(read(&three, 0, 1), [!bytes[0]]);
}

#[test]
fn pages_with_other_bytes_stay() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let bytes = content(PAGES * page());
    let (one, two) = (weights(&budget, &bytes), weights(&budget, &bytes));
    let extent = shared(&one, 100, PAGES * page() - 200);
    two.freeze();
    two.attach(100, &extent).unwrap();
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
    two.attach(0, &first).unwrap();
    assert_eq!(two.attach(2 * page(), &second).unwrap(), 0);
    let mut two_has = vec![0; 6 * page() as usize];
    two_has[..2 * page() as usize].copy_from_slice(&bytes[..2 * page() as usize]);
    two_has[2 * page() as usize..]
        .copy_from_slice(&bytes[4 * page() as usize..][..4 * page() as usize]);
    assert!(read(&two, 0, 6 * page()) == two_has);
    assert_eq!(two.attach(0, &second).unwrap(), 4 * page());
    assert!(read(&two, 0, 4 * page()) == bytes[4 * page() as usize..][..4 * page() as usize]);
    assert!(two.attach((PAGES - 1) * page(), &first).is_err(), "no room");
    let plain = CpuMemory::new(PAGES * page(), &budget).unwrap();
    assert!(plain.attach(0, &first).is_err());
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
        two.attach(4 * page(), &extent).unwrap();
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
