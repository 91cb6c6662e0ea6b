//! What this process knows about the content of weights before it sends them.
//!
//! The executor keeps weights by the BLAKE3 hash of their bytes. To ask for bytes by their hash,
//! the plugin must know the hash without hashing gigabytes at each start:
//!
//! - [`mapped_file`]: which part of which file a pointer of the program shows.
//! - [`hash_cache`]: the hashes of the parts of a file, kept on disk.
//! - [`background_hash`]: hashes parts of files that the cache lacks, after the model is loaded.
//! - [`content_hash()`]: the hash of bytes in memory.
//!
//! What is sent to the executor, and when, is decided in `session::upload`.

pub(crate) mod background_hash;
mod content_hash;
mod file_identity;
pub(crate) mod hash_cache;
pub(crate) mod mapped_file;

pub(crate) use content_hash::{content_hash, keyed_hash};
