//! The entries of the weight store: which content each extent has, and which sharing domains know
//! the content.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use vgpu_engine::Extent;
use vgpu_transport::wire::ContentHash;

use super::content::{ByLength, ContentKey, Place};

/// The entries, by their contents.
#[derive(Default)]
pub(super) struct Entries {
    pub(super) by_key: HashMap<Key, Entry>,
    /// The key of each extent, by its address in memory.
    by_address: HashMap<usize, Key>,
    /// All of `by_key`.
    by_length: ByLength<Option<Arc<str>>>,
    /// The entry that was looked at last: each new one removes some whose extents were freed.
    swept: Option<Place<Option<Arc<str>>>>,
}

/// Entries that each new one looks at.
const SWEPT_AT_ONCE: usize = 4;

/// Sharing domains that an entry remembers. A session over TCP is a domain of its own, so that the
/// entry of a model in use would remember ever more of them. A domain that is forgotten proves
/// again that it has the content.
pub(super) const MAX_KNOWN_TO: usize = 256;

/// A content of a sharing domain. `None`: shared by all sharing domains.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) domain: Option<Arc<str>>,
    pub(super) hash: ContentHash,
}

/// An extent whose content is known.
pub(super) struct Entry {
    pub(super) len: u64,
    pub(super) extent: Weak<dyn Extent>,
    /// Sharing domains that have uploaded the content, or have proven that they have it.
    pub(super) known_to: Vec<Arc<str>>,
}

impl Entries {
    /// The entry of a content, and its extent, if the extent still exists.
    pub(super) fn live(&mut self, key: &Key) -> Option<(&mut Entry, Arc<dyn Extent>)> {
        let entry = self.by_key.get_mut(key)?;
        let extent = entry.extent.upgrade()?;
        Some((entry, extent))
    }

    /// Whether an extent is an entry.
    pub(super) fn has(&self, extent: &Arc<dyn Extent>) -> bool {
        let key = self.by_address.get(&address(extent));
        let entry = key.and_then(|key| self.by_key.get(key));
        // Not upgraded: the last reference to another extent must not be dropped under this lock.
        // The caller keeps `extent`, so that no other one has its address.
        let is_it = |entry: &Entry| entry.address() == address(extent);
        entry.is_some_and(is_it)
    }

    /// Enters a content. Replaces an entry of the same content whose extent was freed.
    pub(super) fn insert(&mut self, key: Key, entry: Entry) {
        self.remove(&key);
        self.by_address.insert(entry.address(), key.clone());
        self.by_length
            .insert(key.domain.clone(), entry.content(&key));
        self.by_key.insert(key, entry);
        self.sweep();
    }

    /// Looks at the next entries, and removes those whose extents were freed. All entries are
    /// looked at while a quarter as many new ones come.
    fn sweep(&mut self) {
        let behind = self.by_length.behind(self.swept.as_ref());
        let next: Vec<Place<Option<Arc<str>>>> = behind.take(SWEPT_AT_ONCE).cloned().collect();
        self.swept = next.last().filter(|_| next.len() == SWEPT_AT_ONCE).cloned();
        for (domain, _, hash) in next {
            let key = Key { domain, hash };
            if !self.by_key.get(&key).is_some_and(Entry::is_live) {
                self.remove(&key);
            }
        }
    }

    /// Removes an entry whose extent was freed.
    fn remove(&mut self, key: &Key) {
        let Some(entry) = self.by_key.remove(key) else {
            return;
        };
        self.by_length.remove(&key.domain, entry.content(key));
        // The address of a freed extent may be that of another entry by now.
        if self.by_address.get(&entry.address()) == Some(key) {
            self.by_address.remove(&entry.address());
        }
    }

    /// The different lengths of the contents of a sharing domain, the longest first: at most
    /// `most`, and those that are found among `steps` entries. Of the entries of one length, those
    /// of freed extents, which are removed, and one other are looked at.
    pub(super) fn lengths(
        &mut self,
        domain: &Option<Arc<str>>,
        most: usize,
        steps: usize,
    ) -> Vec<u64> {
        let mut lengths = Vec::new();
        let mut next = Some(u64::MAX);
        for _ in 0..steps {
            let content = next.and_then(|len| self.by_length.at_most(domain, len));
            let Some(content) = content.filter(|_| lengths.len() < most) else {
                break;
            };
            let key = Key {
                domain: domain.clone(),
                hash: content.hash,
            };
            if self.by_key.get(&key).is_some_and(Entry::is_live) {
                lengths.push(content.len);
                next = content.len.checked_sub(1);
            } else {
                self.remove(&key);
            }
        }
        lengths
    }

    /// How many of at most `most` entries behind `last` have an extent, the bytes of these, and the
    /// last of the entries, if there may be more.
    pub(super) fn count(
        &self,
        last: Option<&Place<Option<Arc<str>>>>,
        most: usize,
    ) -> (u64, u64, Option<Place<Option<Arc<str>>>>) {
        let (mut extents, mut bytes, mut seen) = (0, 0, 0);
        let mut end = None;
        for place in self.by_length.behind(last).take(most) {
            let (domain, len, hash) = place;
            let key = Key {
                domain: domain.clone(),
                hash: *hash,
            };
            if self.by_key.get(&key).is_some_and(Entry::is_live) {
                extents += 1;
                bytes += len;
            }
            seen += 1;
            end = Some(place);
        }
        (extents, bytes, end.filter(|_| seen == most).cloned())
    }
}

impl Entry {
    /// The content, whose key this is.
    fn content(&self, key: &Key) -> ContentKey {
        ContentKey {
            hash: key.hash,
            len: self.len,
        }
    }

    /// The address of the extent, which may have been freed.
    fn address(&self) -> usize {
        self.extent.as_ptr().cast::<()>().addr()
    }

    /// Whether the extent still exists.
    pub(super) fn is_live(&self) -> bool {
        self.extent.strong_count() > 0
    }

    /// Remembers that a sharing domain has the content.
    pub(super) fn make_known_to(&mut self, domain: &Arc<str>) {
        if !self.known_to.contains(domain) {
            if self.known_to.len() >= MAX_KNOWN_TO {
                self.known_to.remove(0);
            }
            self.known_to.push(Arc::clone(domain));
        }
    }
}

fn address(extent: &Arc<dyn Extent>) -> usize {
    Arc::as_ptr(extent).cast::<()>().addr()
}

#[cfg(test)]
mod tests {
    use std::any::Any;

    use vgpu_engine::EngineError;

    use super::*;

    /// An extent without bytes, which has an address of its own.
    struct Empty {
        _number: usize,
    }

    impl Extent for Empty {
        fn size(&self) -> u64 {
            0
        }

        fn filled(&self) -> u64 {
            0
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), EngineError> {
            Ok(())
        }

        fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
            self
        }
    }

    #[test]
    fn contents_that_come_and_go_leave_nothing_behind() {
        let key = |i: usize| Key {
            domain: None,
            hash: ContentHash([i as u8; 32]),
        };
        let mut entries = Entries::default();
        // All extents stay, as the memory of others takes their addresses: each is at another one.
        let mut extents: Vec<Arc<dyn Extent>> = Vec::new();
        for round in 0..100 {
            for i in 0..3 {
                let extent: Arc<dyn Extent> = Arc::new(Empty { _number: round });
                let entry = Entry {
                    len: 0,
                    extent: Arc::downgrade(&extent),
                    known_to: Vec::new(),
                };
                entries.insert(key(i), entry);
                assert!(entries.has(&extent));
                extents.push(extent);
            }
        }
        assert_eq!((entries.by_key.len(), entries.by_address.len()), (3, 3));
        extents.clear();
        for i in 3..3 + 1000 {
            let freed: Arc<dyn Extent> = Arc::new(Empty { _number: i });
            let entry = Entry {
                len: 0,
                extent: Arc::downgrade(&freed),
                known_to: Vec::new(),
            };
            entries.insert(key(i), entry);
        }
        assert!(entries.by_key.len() <= SWEPT_AT_ONCE);
        let extent: Arc<dyn Extent> = Arc::new(Empty { _number: 0 });
        let mut entry = Entry {
            len: 0,
            extent: Arc::downgrade(&extent),
            known_to: Vec::new(),
        };
        let domain = |i: usize| Arc::from(format!("tcp {i}"));
        (0..2 * MAX_KNOWN_TO).for_each(|i| entry.make_known_to(&domain(i)));
        assert_eq!(entry.known_to.len(), MAX_KNOWN_TO);
        assert!(entry.known_to.contains(&domain(2 * MAX_KNOWN_TO - 1)));
        assert!(entries.by_address.len() <= SWEPT_AT_ONCE);
    }

    #[test]
    fn lengths_and_counts_are_those_of_the_extents_that_exist() {
        let mut random = vgpu_gguf::Rng::new(7, 0);
        let mut entries = Entries::default();
        let domains: [Option<Arc<str>>; 3] = [None, Some("a".into()), Some("b".into())];
        type Known = (Option<Arc<str>>, u64, Arc<dyn Extent>);
        let mut extents: Vec<Known> = Vec::new();
        for number in 0..2000_usize {
            let domain = domains[random.below(3) as usize].clone();
            let len = random.below(40);
            let extent: Arc<dyn Extent> = Arc::new(Empty { _number: number });
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&(random.below(500) * 40 + len).to_le_bytes());
            let key = Key {
                domain: domain.clone(),
                hash: ContentHash(hash),
            };
            if entries.live(&key).is_none() {
                let entry = Entry {
                    len,
                    extent: Arc::downgrade(&extent),
                    known_to: Vec::new(),
                };
                entries.insert(key, entry);
                extents.push((domain, len, extent));
            }
            while extents.len() > 60 {
                extents.swap_remove(random.below(extents.len() as u64) as usize);
            }
            let of = |domain: &Option<Arc<str>>| {
                let of_domain = extents.iter().filter(|(of, ..)| of == domain);
                let lengths = of_domain.map(|(_, len, _)| *len);
                lengths.collect::<std::collections::BTreeSet<u64>>()
            };
            for domain in &domains {
                let all: Vec<u64> = of(domain).into_iter().rev().collect();
                for most in [5, 100] {
                    let some = &all[..all.len().min(most)];
                    assert_eq!(entries.lengths(domain, most, 10_000), some);
                }
            }
            let (mut count, mut bytes, mut last) = (0, 0, None);
            loop {
                let part = entries.count(last.as_ref(), 7);
                (count, bytes, last) = (count + part.0, bytes + part.1, part.2);
                if last.is_none() {
                    break;
                }
            }
            let sum: u64 = extents.iter().map(|(_, len, _)| len).sum();
            assert_eq!((count, bytes), (extents.len() as u64, sum));
        }
        extents.clear();
        for domain in &domains {
            assert!(entries.lengths(domain, 100, 10_000).is_empty());
        }
        // What was met is gone.
        assert_eq!((entries.by_key.len(), entries.by_address.len()), (0, 0));
        assert!(entries.by_length.behind(None).next().is_none());
    }

    #[test]
    fn lengths_are_found_in_as_many_steps_as_there_are() {
        let mut entries = Entries::default();
        let mut extents: Vec<Arc<dyn Extent>> = Vec::new();
        let ours: Option<Arc<str>> = Some("b".into());
        for number in 0..3000_usize {
            let extent: Arc<dyn Extent> = Arc::new(Empty { _number: number });
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&number.to_le_bytes());
            let domain = Some(["a", "b", "c"][number % 3].into());
            let key = Key {
                domain,
                hash: ContentHash(hash),
            };
            let entry = Entry {
                len: 10 + number as u64 / 3 % 2,
                extent: Arc::downgrade(&extent),
                known_to: Vec::new(),
            };
            entries.insert(key, entry);
            extents.push(extent);
        }
        // Not more than one step for each length, although 1,000 entries are ours, and 2,000
        // others.
        assert_eq!(entries.lengths(&ours, 100, 2), [11, 10]);
        // Entries of freed extents take a step each, once.
        extents.clear();
        assert!(entries.lengths(&ours, 100, 300).is_empty());
        assert_eq!(entries.by_key.len(), 2700);
    }
}
