//! Activations that were converted for one product and are kept for later products of the same
//! activations.
//!
//! Q, K and V multiply the same activations, and so do gate and up: these are quantised once, or by
//! the norm before them. Q8 activations lie in the first part of the scratch memory, which is used
//! as a ring. Cached activations are valid until a launch writes to their source.
//!
//! The F16 activations of products with many columns lie in the scratch memory of the node that
//! made them, and later nodes leave this part alone. The cache holds one of these at a time.

use std::ops::Range;

use crate::device::Address;
use crate::launch::place::Place;
use crate::launch::q8::{Q8Activations, q8_elements};
use crate::params::{VgConvertF16Sm90Params, VgView};

/// Bytes of scratch memory for q8 activations.
pub(crate) const ACTIVATION_CACHE_BYTES: u64 = 4 << 20;

/// The most launches between which no other plan may run, because they use cached activations: more
/// than those of a layer of a model.
const MAX_OCCUPIED: usize = 64;

/// The cache while a plan is compiled: addresses, not data.
pub(crate) struct ActivationCache {
    place: Place,
    next: u64,
    /// Bytes of the ring that entries have used.
    peak: u64,
    entries: Vec<Entry>,
    /// Pairs of launches of the plan: the one that writes an entry and one that reads it.
    spans: Vec<(usize, usize)>,
    /// The last launches between which no other plan may run: spans that overlap.
    occupied: Range<usize>,
    is_used: bool,
    f16: Option<F16Activations>,
}

/// F16 activations for a product with many columns.
struct F16Activations {
    /// What they were made of, and how, as bytes.
    key: Vec<u8>,
    sources: Vec<Range<Address>>,
    /// The range of the activations in the nodes' scratch memory.
    range: Range<u64>,
    params: VgConvertF16Sm90Params,
    made: usize,
}

struct Entry {
    key: Key,
    /// The addresses of the activations.
    source: Range<Address>,
    /// The range in the cache's scratch memory.
    range: Range<u64>,
    q8: Q8Activations,
    /// The index of the launch that writes the entry.
    made: usize,
    /// Whether that launch also computes the activations, rather than only reads them.
    is_result: bool,
}

/// Dense activations: address, row length, number of rows and type. The other lengths do not
/// matter.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key(Address, i64, i64, u32);

impl Key {
    fn of(x: &VgView) -> Option<Key> {
        let mut dense = x.nb[0];
        for d in 0..4 {
            if x.nb[d] != dense {
                return None;
            }
            dense *= x.ne[d];
        }
        Some(Key(x.data, x.ne[0], x.rows(), x.type_))
    }
}

impl ActivationCache {
    /// An empty cache in the scratch memory of `place`.
    pub(crate) fn new(place: Place) -> ActivationCache {
        ActivationCache {
            place,
            next: 0,
            peak: 0,
            entries: Vec::new(),
            spans: Vec::new(),
            occupied: 0..0,
            is_used: false,
            f16: None,
        }
    }

    /// Bytes at the start of the nodes' scratch memory that hold F16 activations.
    pub(crate) fn reserved(&self) -> u64 {
        self.f16.as_ref().map_or(0, |entry| entry.range.end)
    }

    /// The F16 activations with this key, for launch `user`.
    pub(crate) fn f16(&mut self, key: &[u8], user: usize) -> Option<VgConvertF16Sm90Params> {
        let entry = self.f16.as_ref().filter(|entry| entry.key == key)?;
        let (made, params) = (entry.made, entry.params);
        self.occupy(made, user).then_some(params)
    }

    /// Notes that `user` reads what `made` writes. Returns `false` if other plans would wait too
    /// long: then the activations have to be converted again.
    fn occupy(&mut self, made: usize, user: usize) -> bool {
        let start = match made < self.occupied.end {
            true => made.min(self.occupied.start),
            false => made,
        };
        let is_short = user.saturating_sub(start) <= MAX_OCCUPIED;
        if is_short {
            self.occupied = start..user.max(self.occupied.end);
            self.spans.push((made, user));
        }
        is_short
    }

    /// Caches the F16 activations that launch `made`, and those after it, write to `range` of the
    /// nodes' scratch memory, and drops those cached before. The activations are valid until a
    /// launch writes to `sources`.
    pub(crate) fn cache_f16(
        &mut self,
        key: Vec<u8>,
        sources: Vec<Range<Address>>,
        range: Range<u64>,
        params: VgConvertF16Sm90Params,
        made: usize,
    ) {
        self.f16 = Some(F16Activations {
            key,
            sources,
            range,
            params,
            made,
        });
    }

    /// Where the plan has memory.
    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// Bytes at the start of the scratch memory that entries have used.
    pub(crate) fn peak(&self) -> u64 {
        self.peak
    }

    /// Whether the plan uses the cache's scratch memory.
    pub(crate) fn is_used(&self) -> bool {
        self.is_used
    }

    /// Pairs of launches between which no other plan may run.
    pub(crate) fn spans(&self) -> &[(usize, usize)] {
        &self.spans
    }

    /// The q8 activations of `x`, for launch `user`.
    pub(crate) fn get(&mut self, x: &VgView, user: usize) -> Option<Q8Activations> {
        let key = Key::of(x)?;
        let entry = self.entries.iter().find(|entry| entry.key == key)?;
        let (made, q8) = (entry.made, entry.q8);
        self.occupy(made, user).then_some(q8)
    }

    /// Allocates room for the q8 activations of `x`, which launch `made` writes. `is_result`: that
    /// launch also computes `x`. `None` if they are too large.
    pub(crate) fn put(
        &mut self,
        x: &VgView,
        made: usize,
        is_result: bool,
    ) -> Option<Q8Activations> {
        let key = Key::of(x)?;
        let quants = q8_elements(x) as u64;
        let bytes = quants + quants / 2;
        let capacity = self.place.cache_bytes;
        if bytes > capacity.min(ACTIVATION_CACHE_BYTES / 4) {
            return None;
        }
        if self.next + bytes > capacity {
            self.next = 0;
        }
        let range = self.next..self.next + bytes;
        self.next = range.end;
        self.peak = self.peak.max(range.end);
        self.is_used = true;
        self.entries.retain(|entry| {
            entry.key != key && (entry.range.end <= range.start || range.end <= entry.range.start)
        });
        let at = self.place.scratch + range.start;
        let q8 = Q8Activations {
            quants: at,
            scales: at + quants,
        };
        self.entries.push(Entry {
            key,
            source: x.address_range(),
            range,
            q8,
            made,
            is_result,
        });
        Some(q8)
    }

    /// Drops the entry of `x`.
    pub(crate) fn forget(&mut self, x: &VgView) {
        let key = Key::of(x);
        self.entries.retain(|entry| Some(entry.key) != key);
    }

    /// Drops everything that launches from `since` on would have made or read: they are not added.
    pub(crate) fn forget_since(&mut self, since: usize) {
        self.entries.retain(|entry| entry.made < since);
        self.f16.take_if(|entry| entry.made >= since);
        self.spans.retain(|&(_, used)| used < since);
    }

    /// Drops all entries.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.f16 = None;
    }

    /// Drops all entries made of bytes in `written`, which launches from `since` on write. An entry
    /// stays if one of these launches has computed both.
    pub(crate) fn wrote(&mut self, written: &Range<Address>, since: usize) {
        self.entries.retain(|entry| {
            let is_apart = entry.source.end <= written.start || written.end <= entry.source.start;
            is_apart || entry.is_result && entry.made >= since
        });
        let is_apart =
            |source: &Range<Address>| source.end <= written.start || written.end <= source.start;
        self.f16
            .take_if(|entry| !entry.sources.iter().all(is_apart));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::ir::{Shape, Type};

    fn place(scratch: Address) -> Place {
        Place {
            scratch,
            bytes: ACTIVATION_CACHE_BYTES,
            cache_bytes: ACTIVATION_CACHE_BYTES,
            fault: 0,
        }
    }

    fn view(at: Address, ne: [u64; 4]) -> VgView {
        VgView::new(at, &Shape::contiguous(Type::F32, ne).unwrap())
    }

    #[test]
    fn q8_activations_are_valid_until_their_source_is_written() {
        let mut cache = ActivationCache::new(place(1 << 30));
        let x = view(4096, [64, 2, 1, 1]);
        assert_eq!(cache.get(&x, 0), None);
        let q8 = cache.put(&x, 0, true).unwrap();
        assert_eq!(cache.get(&x, 3), Some(q8));
        // Other lengths, the same rows.
        assert_eq!(cache.get(&view(4096, [64, 1, 2, 1]), 4), Some(q8));
        assert_eq!(cache.get(&view(4096, [128, 1, 1, 1]), 4), None);
        assert_eq!(cache.spans(), [(0, 3), (0, 4)]);
        // Writes beside the source, by the launch that made the entry, and into the source.
        cache.wrote(&(4096 + 512..8192), 5);
        cache.wrote(&(4096..8192), 0);
        assert_eq!(cache.get(&x, 5), Some(q8));
        cache.wrote(&(4096 + 508..8192), 5);
        assert_eq!(cache.get(&x, 6), None);
        // A launch that only reads its source did not make the entry of what it writes later.
        cache.put(&x, 7, false).unwrap();
        cache.wrote(&(4096..8192), 7);
        assert_eq!(cache.get(&x, 8), None);
    }

    #[test]
    fn f16_activations_are_valid_until_their_source_is_written() {
        let mut cache = ActivationCache::new(place(0));
        assert_eq!(cache.reserved(), 0);
        let made = VgConvertF16Sm90Params {
            values: 7,
            ..VgConvertF16Sm90Params::default()
        };
        cache.cache_f16(vec![1, 2], vec![4096..8192, 64..128], 256..1024, made, 3);
        assert_eq!(cache.reserved(), 1024);
        assert!(cache.f16(&[1], 5).is_none());
        assert_eq!(cache.f16(&[1, 2], 5).map(|made| made.values), Some(7));
        assert_eq!(cache.spans(), [(3, 5)]);
        cache.wrote(&(128..4096), 5);
        assert!(cache.f16(&[1, 2], 6).is_some());
        cache.wrote(&(127..128), 6);
        assert!(cache.f16(&[1, 2], 7).is_none());
        assert_eq!(cache.reserved(), 0);
    }

    #[test]
    fn entries_that_overlap_do_not_keep_other_plans_away_forever() {
        let mut cache = ActivationCache::new(place(0));
        let x = |i: u64| view(i << 20, [64, 1, 1, 1]);
        let (mut longest, mut start, mut launch) = (0, 0, 0);
        // Each entry is used again after the next one was made.
        for i in 1..1000 {
            cache.put(&x(i), launch, false).unwrap();
            launch += 5;
            if cache.get(&x(i - 1), launch).is_none() {
                start = launch - 5;
            }
            longest = longest.max(launch - start);
            launch += 5;
        }
        assert!(cache.spans().len() > 500, "few entries are used");
        assert!(longest <= MAX_OCCUPIED, "{longest} launches");
        let mut occupied = vec![false; launch];
        for &(made, used) in cache.spans() {
            occupied[made..used].fill(true);
        }
        let longest = { occupied.split(|is| !is) }.map(<[bool]>::len).max();
        assert!(longest <= Some(MAX_OCCUPIED), "{longest:?} launches");
    }

    #[test]
    fn the_ring_drops_the_oldest_entries() {
        let mut cache = ActivationCache::new(place(0));
        let x = |i: u64| view(i << 30, [32 * 1024, 1, 1, 1]);
        let first = cache.put(&x(1), 0, false).unwrap();
        let mut count = 1;
        // An entry has 48 bytes for 32 elements.
        while cache.get(&x(1), 0).is_some() {
            count += 1;
            cache.put(&x(count), 0, false).unwrap();
            assert!(count < 1000);
        }
        assert_eq!(count, ACTIVATION_CACHE_BYTES / (48 * 1024) + 1);
        assert_eq!(cache.get(&x(count), 0), Some(first));
        assert!(cache.get(&x(count - 1), 0).is_some());
        assert_eq!(
            cache.put(&view(0, [32 * 1024 * 64, 1, 1, 1]), 0, false),
            None,
            "too large"
        );
    }
}
