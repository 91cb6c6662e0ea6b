//! Random accesses, compared with a model.

use std::sync::{Arc, Weak};

use super::{PAGES, base, filled, read};
use crate::memory::CpuMemory;
use crate::region::{Budget, page};
use crate::weights::CpuExtent;
use crate::weights::extent::BaseRegion;
use crate::weights::segments::{ALIGN, Backing};
use vgpu_engine::{Extent, Memory};
use vgpu_gguf::Rng;

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
    // Every second run uses whole pages, so that the count of pages is exact. In every fourth one,
    // extents begin anywhere.
    let unit = match seed % 4 {
        0 | 2 => page(),
        1 => 256,
        _ => 100,
    };
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
                let at = buffers[which].memory.locate(start, len, &|| false);
                assert_eq!(at.unwrap() as u64 % ALIGN, start % ALIGN, "{start} {len}");
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

fn downcast(extent: &Arc<dyn Extent>) -> Arc<CpuExtent> {
    Arc::clone(extent).into_any().downcast().ok().unwrap()
}
