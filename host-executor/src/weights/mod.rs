//! Shared weights: bytes that guests have uploaded, stored once by content.
//!
//! A guest names the extents of a buffer for weights (`EXTENT`) and declares the buffer complete
//! (`SEAL`). The memory cannot change any more, and a thread of the store hashes each extent with
//! BLAKE3. The first extent with a content becomes an entry of the store, for as long as a buffer
//! uses it. The pages of each later one are freed, and those of the first are mapped in their
//! place. A guest that knows the hash of what it is about to upload asks the store first
//! (`LOOKUP`).
//!
//! A hash from a guest is only ever looked up. Entries have hashes that the store has computed
//! itself.
//!
//! Access: with [`Sharing::Tenant`] each domain has entries of its own, and the hash suffices,
//! since the sharing domain itself has uploaded the content. With [`Sharing::All`] all sharing
//! domains share entries; a guest whose sharing domain has not uploaded a content has to prove that
//! it has the content, with a hash of all bytes under a key that the host chooses anew each time.
//!
//! - `options`: whose weights are shared, and the size of the cache.
//! - `cache`: the thread that writes to the cache on disk.
//! - `content`: contents, and their order by owners and lengths.
//! - `disk`: the cache of weights on disk.
//! - `entries`: which content each extent has.
//! - `hash_job`: the hashing of one extent.
//! - `fair_queue`: the order in which extents are hashed, fair between sharing domains.
//! - `priority`: the priority of the threads that hash and write.
//! - `store`: what sessions ask and report, and the thread that hashes.
//! - `uploads`: extents that guests upload at the same time, or one after the other, without
//!   hashes.

mod cache;
mod content;
mod disk;
mod entries;
mod fair_queue;
mod hash_job;
mod options;
mod priority;
mod store;
pub(crate) mod uploads;

pub(crate) use content::ContentKey;
pub use disk::CacheError;
pub use options::{CacheOptions, ParseCacheError, Sharing};
#[cfg(feature = "server")]
pub(crate) use store::HashingNow;
pub(crate) use store::{
    LookupResult, MAX_WRONG_PROOFS, SessionStore, SharingDomain, Source, WeakSource,
};
pub use store::{WeightStore, WeightStoreStats};
