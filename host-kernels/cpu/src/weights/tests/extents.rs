//! Where extents may lie, and when they can be read and attached.

use std::sync::Arc;

use super::{PAGES, content, read, shared, weights};
use crate::memory::CpuMemory;
use crate::region::{Budget, page};
use vgpu_engine::{EngineError, Memory};

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
