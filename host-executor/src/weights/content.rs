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

    /// The longest content of an owner that has at most `len` bytes.
    pub(super) fn at_most(&self, owner: &O, len: u64) -> Option<ContentKey> {
        let last = (owner.clone(), len, ContentHash([0xff; 32]));
        let (found, len, hash) = self.0.range(..=last).next_back()?;
        (found == owner).then_some(ContentKey {
            hash: *hash,
            len: *len,
        })
    }

    /// The different lengths of the contents of an owner, at most `most`, the longest first.
    pub(super) fn lengths(&self, owner: &O, most: usize) -> Vec<u64> {
        let mut next = Some(u64::MAX);
        let lengths = std::iter::from_fn(|| {
            let len = self.at_most(owner, next?)?.len;
            next = len.checked_sub(1);
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
