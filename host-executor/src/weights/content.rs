//! Contents, and their order by owners and lengths.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::ops::Bound;

use vgpu_transport::wire::ContentHash;

/// Identifies a content.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContentKey {
    /// BLAKE3 of the bytes.
    pub(crate) hash: ContentHash,
    /// Number of bytes.
    pub(crate) len: u64,
}

/// A content, after its owner and its length.
pub(super) type Place<O> = (O, u64, ContentHash);

/// The contents of each owner by their lengths: nobody walks all of them to find the lengths of
/// one owner.
pub(super) struct ByLength<O>(BTreeSet<Place<O>>);

impl<O> Default for ByLength<O> {
    fn default() -> Self {
        ByLength(BTreeSet::new())
    }
}

impl<O: Ord + Clone> ByLength<O> {
    pub(super) fn insert(&mut self, owner: O, content: ContentKey) {
        self.0.insert((owner, content.len, content.hash));
    }

    pub(super) fn remove(&mut self, owner: &O, content: ContentKey) {
        self.0.remove(&(owner.clone(), content.len, content.hash));
    }

    /// The shortest content of an owner that has at least `len` bytes.
    pub(super) fn at_least(&self, owner: &O, len: u64) -> Option<ContentKey> {
        let first = (owner.clone(), len, ContentHash([0; 32]));
        let (found, len, hash) = self.0.range(first..).next()?;
        (found == owner).then_some(ContentKey {
            hash: *hash,
            len: *len,
        })
    }

    /// The different lengths of the contents of an owner, at most `most`, the shortest first.
    pub(super) fn lengths(&self, owner: &O, most: usize) -> Vec<u64> {
        let mut next = Some(0);
        let lengths = std::iter::from_fn(|| {
            let len = self.at_least(owner, next?)?.len;
            next = len.checked_add(1);
            Some(len)
        });
        lengths.take(most).collect()
    }

    /// The contents behind `last`, or all.
    pub(super) fn behind(&self, last: Option<&Place<O>>) -> impl Iterator<Item = &Place<O>> {
        let from = last.map_or(Bound::Unbounded, Bound::Excluded);
        self.0.range((from, Bound::Unbounded))
    }
}
