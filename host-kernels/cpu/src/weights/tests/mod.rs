//! Buffers that share, write, merge and free weights.

mod copies;
mod extents;
mod random;
mod sharing;

use std::sync::Arc;

use super::extent::BaseRegion;
use crate::memory::CpuMemory;
use crate::region::{Budget, page};
use vgpu_engine::{Extent, Memory};

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
