//! Which version of which file: what tells that a file has not changed.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time after a change during which a file may change again without a change of its times.
/// Linux writes dirty pages of a mapping back within 30 seconds, and only then updates the times.
const SETTLING_TIME: Duration = Duration::from_secs(60);

/// A file is unchanged as long as all these values are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileIdentity {
    pub(super) device: u64,
    pub(super) inode: u64,
    /// Bytes.
    pub(super) size: u64,
    /// Seconds and nanoseconds since 1970.
    pub(super) modified: (i64, i64),
    /// Seconds and nanoseconds since 1970.
    pub(super) changed: (i64, i64),
}

impl FileIdentity {
    /// Reads the values from `metadata`.
    pub(super) fn of(metadata: &Metadata) -> FileIdentity {
        FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether the last change is so long ago that every later change shows in the times.
    pub(super) fn is_settled(&self, now: SystemTime) -> bool {
        let last = self.modified.0.max(self.changed.0);
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        u64::try_from(last).is_ok_and(|last| last.saturating_add(SETTLING_TIME.as_secs()) <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_stable_one_minute_after_its_last_change() {
        let identity = |modified, changed| FileIdentity {
            device: 1,
            inode: 2,
            size: 3,
            modified: (modified, 0),
            changed: (changed, 0),
        };
        let now = UNIX_EPOCH + Duration::from_secs(1000);
        assert!(identity(100, 940).is_settled(now));
        assert!(!identity(100, 941).is_settled(now));
        assert!(!identity(2000, 100).is_settled(now), "in the future");
        assert!(!identity(-1, -1).is_settled(now));
    }
}
