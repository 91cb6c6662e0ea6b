//! Weights held once: what guests have uploaded, by content.
//!
//! A guest names the parts of a buffer for weights (`EXTENT`) and says when they are complete (`SEAL`). A thread of
//! the store then hashes them with BLAKE3, from memory that cannot change any more. The first of its content is kept
//! as an entry, for as long as some buffer needs it; of each later one, the pages are given back and those of the
//! first are mapped in their place. A guest that knows the hash of what it is about to upload asks first (`LOOKUP`).
//!
//! A hash that a guest says is only ever looked up. Entries are made under hashes that the store has computed itself.
//!
//! Who gets what: with [`Sharing::Tenant`], each origin has entries of its own, and the hash suffices, since it is
//! the origin's own upload. With [`Sharing::All`] entries are common; who has not uploaded the content must prove to
//! have it, with a hash of all its bytes under a key that the host chooses anew each time.

mod disk;
mod store;

use std::path::PathBuf;
use std::str::FromStr;

pub use disk::{CacheError, CacheOptions};
pub(crate) use store::{Found, Held, Lookup, Source};
pub use store::{Weights, WeightsStats};

/// Whose weights a guest may share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// Nobody's, not even its own.
    Off,
    /// Those of the same tenant: what the same user of this machine, the same virtual machine, or the guest of the
    /// same name has uploaded.
    #[default]
    Tenant,
    /// Everybody's. A guest can then find out whether another one has the same content.
    All,
}

impl FromStr for CacheOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<CacheOptions, String> {
        let mut parts = text.split(',');
        let folder = parts.next().unwrap_or_default();
        if folder.is_empty() {
            return Err("expected FOLDER,size=SIZE".into());
        }
        let mut size = None;
        for part in parts {
            match part.split_once('=') {
                Some(("size", text)) => size = Some(crate::size::parse(text)?),
                _ => return Err(format!("{part:?} is not size=SIZE")),
            }
        }
        Ok(CacheOptions {
            folder: PathBuf::from(folder),
            size: size.ok_or("how large may it become? expected FOLDER,size=SIZE")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_has_a_folder_and_a_size() {
        let options: CacheOptions = "/var/cache/vgpu,size=8G".parse().unwrap();
        assert_eq!(options.folder, PathBuf::from("/var/cache/vgpu"));
        assert_eq!(options.size, 8 << 30);
        for bad in ["", ",size=1G", "/x", "/x,size=", "/x,size=1G,old", "/x,8G"] {
            assert!(bad.parse::<CacheOptions>().is_err(), "{bad}");
        }
    }
}
