//! How weights are shared, and where they are cached.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;

use crate::size::{self, ParseSizeError};

/// Whose weights a guest may share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// Nothing is shared, not even among the buffers of one guest.
    Off,
    /// Weights of the same sharing domain: of the same user of this machine, the same virtual
    /// machine, or the guest of the same name.
    #[default]
    Tenant,
    /// All weights. A guest can then find out whether another guest has the same content.
    All,
}

/// The cache of weights on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// The folder. Created if it does not exist; it must hold nothing else.
    pub folder: PathBuf,
    /// Most bytes of files.
    pub size: u64,
}

/// Why a text describes no cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ParseCacheError {
    #[error("expected FOLDER,size=SIZE")]
    NoFolder,
    #[error("{0:?} is not size=SIZE")]
    Option(String),
    #[error(transparent)]
    Size(#[from] ParseSizeError),
    #[error("the maximum size is missing: expected FOLDER,size=SIZE")]
    NoSize,
}

impl FromStr for CacheOptions {
    type Err = ParseCacheError;

    fn from_str(text: &str) -> Result<CacheOptions, ParseCacheError> {
        let mut parts = text.split(',');
        let folder = parts.next().unwrap_or_default();
        if folder.is_empty() {
            return Err(ParseCacheError::NoFolder);
        }
        let mut limit = None;
        for part in parts {
            match part.split_once('=') {
                Some(("size", text)) => limit = Some(size::parse(text)?),
                _ => return Err(ParseCacheError::Option(part.into())),
            }
        }
        Ok(CacheOptions {
            folder: PathBuf::from(folder),
            size: limit.ok_or(ParseCacheError::NoSize)?,
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
