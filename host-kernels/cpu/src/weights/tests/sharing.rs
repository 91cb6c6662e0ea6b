//! Bytes that buffers share, and the pages that are freed.

use std::sync::Arc;

use super::{PAGES, base, content, filled, held, read, shared, weights};
use crate::memory::CpuMemory;
use crate::region::{Budget, page};
use crate::weights::segments::ALIGN;
use vgpu_engine::Memory;

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

/// A guest may name any bytes as an extent, and attach them at any place.
#[test]
fn a_tensor_is_aligned_wherever_its_bytes_are() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let bytes = content(PAGES * page());
    let one = weights(&budget, &bytes);
    let (offset, len) = (page() + 3, 4 * page());
    let extent = shared(&one, offset, len);
    let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
    let is_aligned = |memory: &CpuMemory, at: u64| {
        let address = memory.locate(at, page(), &|| false).unwrap();
        address as u64 % ALIGN == at % ALIGN
    };
    let named = &bytes[offset as usize..][..len as usize];
    for to in [4 * page(), 4 * page() + 4, 4 * page() + 3] {
        let is_same = to % ALIGN == offset % ALIGN;
        let shared = two.attach(to, &extent, &|| false).unwrap();
        assert_eq!(shared, if is_same { len } else { 0 }, "{to}");
        assert!(read(&two, to, len) == named);
        assert!(is_aligned(&two, to.next_multiple_of(ALIGN)));
    }
    // A copy of all bytes that are shared begins where they begin.
    one.fill(2 * page(), 10, 1).unwrap();
    assert!(is_aligned(&one, 2 * page()) && is_aligned(&two, 5 * page()));
    assert!(read(&two, 4 * page() + 3, len) == named);
    let mut one_has = bytes;
    one_has[2 * page() as usize..][..10].fill(1);
    assert!(read(&one, 0, PAGES * page()) == one_has);
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
