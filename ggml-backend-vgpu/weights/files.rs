//! Which file a program reads from, when it maps the file and hands us a pointer into it.
//!
//! Linux is asked each time (`PROCMAP_QUERY`, from 6.11 on): a program may have unmapped the file and mapped another
//! one at the same place since. Only shared mappings count that cannot be written through: what they show is the
//! file's content, and nothing else.
//!
//! A file is the same as before if its device, inode, size and both times of change are. That is as good as the file
//! system: those are used that change the times with every write, also one through a mapping once the page was
//! written back, and only for files that have been left alone for long enough that all their pages were.

use std::ffi::{OsStr, c_ulong};
use std::fs::{File, Metadata};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vgpu_transport::wire::ContentHash;

use super::remember::Memory;

/// Files kept open. A model is one, or a few.
const MOST_FILES: usize = 8;

/// A file that has changed less than this ago may change without its times telling. Linux writes dirty pages back within
/// half a minute.
const REST: Duration = Duration::from_secs(60);

/// File systems that keep times as described above: ext4, XFS, Btrfs, F2FS, bcachefs, overlays of these.
const TRUSTED: [i64; 6] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    0xca45_1a4e,
    0x794c_7630,
];

/// Bytes of a file.
#[derive(Debug, Clone)]
pub(super) struct Region {
    pub(super) file: Arc<ModelFile>,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// A file as it was when it was opened.
#[derive(Debug)]
pub(super) struct ModelFile {
    pub(super) file: File,
    pub(super) identity: Identity,
    pub(super) memory: Memory,
}

/// What a file that has not changed has not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) size: u64,
    /// Seconds and nanoseconds.
    pub(super) modified: (i64, i64),
    pub(super) changed: (i64, i64),
}

impl Identity {
    fn of(metadata: &Metadata) -> Identity {
        Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether nothing can have changed that does not show.
    fn is_at_rest(&self, now: SystemTime) -> bool {
        let last = self.modified.0.max(self.changed.0);
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        u64::try_from(last).is_ok_and(|last| last.saturating_add(REST.as_secs()) <= now)
    }
}

impl Region {
    /// The part of a file that memory of this process shows.
    pub(super) fn of(data: *const u8, len: usize) -> Option<Region> {
        let mapping = Mapping::at(data.addr() as u64)?;
        let start = data.addr() as u64;
        if start.checked_add(len as u64)? > mapping.end {
            return None;
        }
        let region = Region {
            offset: mapping.offset.checked_add(start - mapping.start)?,
            len: len as u64,
            file: ModelFile::find(&mapping)?,
        };
        (region.offset.checked_add(region.len)? <= region.file.identity.size).then_some(region)
    }

    /// Its hash, if it is known.
    pub(super) fn hash(&self) -> Option<ContentHash> {
        self.file.memory.get(self.offset, self.len)
    }
}

impl ModelFile {
    /// Opens the file of a mapping, or finds it open and unchanged.
    fn find(mapping: &Mapping) -> Option<Arc<ModelFile>> {
        static OPEN: Mutex<Vec<Arc<ModelFile>>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|file| file.is_unchanged());
        let is_it = |file: &&Arc<ModelFile>| {
            (file.identity.device, file.identity.inode) == (mapping.device, mapping.inode)
        };
        if let Some(known) = open.iter().find(is_it) {
            return Some(Arc::clone(known));
        }
        let file = Arc::new(ModelFile::open(mapping)?);
        if open.len() >= MOST_FILES {
            open.remove(0);
        }
        open.push(Arc::clone(&file));
        Some(file)
    }

    fn open(mapping: &Mapping) -> Option<ModelFile> {
        // Not the file itself if there is another one at this path now: then they differ in device or inode.
        let file = File::open(Path::new(OsStr::from_bytes(&mapping.path))).ok()?;
        let identity = Identity::of(&file.metadata().ok()?);
        let is_it = (identity.device, identity.inode) == (mapping.device, mapping.inode);
        if !is_it || !identity.is_at_rest(SystemTime::now()) || !is_trusted(&file) {
            return None;
        }
        Some(ModelFile {
            file,
            memory: Memory::open(&identity),
            identity,
        })
    }

    /// Whether the file is still as it was.
    pub(super) fn is_unchanged(&self) -> bool {
        let metadata = self.file.metadata();
        metadata.is_ok_and(|metadata| Identity::of(&metadata) == self.identity)
    }
}

fn is_trusted(file: &File) -> bool {
    // SAFETY: all zeros are a value of this structure of integers.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and the structure is ours.
    let done = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) };
    #[allow(clippy::unnecessary_cast)] // its type depends on the platform
    let kind = found.f_type as i64;
    done == 0 && TRUSTED.contains(&kind)
}

/// A mapping of a file.
struct Mapping {
    start: u64,
    end: u64,
    /// Of the first byte, in the file.
    offset: u64,
    device: u64,
    inode: u64,
    path: Vec<u8>,
}

/// Linux's `struct procmap_query`.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

const _: () = assert!(size_of::<ProcmapQuery>() == 104);

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: c_ulong =
    (3 << 30) | ((size_of::<ProcmapQuery>() as c_ulong) << 16) | ((b'f' as c_ulong) << 8) | 17;

/// What is asked for: the mapping that holds the address, if it is readable, shared and of a file.
const WANTED: u64 = 0x01 | 0x08 | 0x20;
/// The mapping can be written through.
const WRITABLE: u64 = 0x02;

impl Mapping {
    /// The mapping that holds an address: readable, shared, not writable, of a file.
    fn at(address: u64) -> Option<Mapping> {
        static MAPS: Mutex<Option<(u32, Option<File>)>> = Mutex::new(None);
        let mut maps = MAPS.lock().unwrap_or_else(PoisonError::into_inner);
        // The child of a fork must not look at its parent's.
        let process = std::process::id();
        if maps.as_ref().is_none_or(|(of, _)| *of != process) {
            *maps = Some((process, File::open("/proc/self/maps").ok()));
        }
        let file = maps.as_ref()?.1.as_ref()?;
        let mut path = vec![0u8; libc::PATH_MAX as usize];
        let mut query = ProcmapQuery {
            size: size_of::<ProcmapQuery>() as u64,
            query_flags: WANTED,
            query_addr: address,
            vma_name_size: path.len() as u32,
            vma_name_addr: path.as_mut_ptr() as u64,
            ..ProcmapQuery::default()
        };
        // SAFETY: the kernel writes into the structure, and at most `vma_name_size` bytes to `vma_name_addr`; both
        // are ours.
        let done = unsafe { libc::ioctl(file.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) };
        if done != 0 || query.vma_flags & WRITABLE != 0 || query.inode == 0 {
            return None;
        }
        let len = path.iter().position(|&byte| byte == 0)?;
        path.truncate(len);
        Some(Mapping {
            start: query.vma_start,
            end: query.vma_end,
            offset: query.vma_offset,
            device: libc::makedev(query.dev_major, query.dev_minor) as u64,
            inode: query.inode,
            path,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_that_were_left_alone_count() {
        let identity = |modified, changed| Identity {
            device: 1,
            inode: 2,
            size: 3,
            modified: (modified, 0),
            changed: (changed, 0),
        };
        let now = UNIX_EPOCH + Duration::from_secs(1000);
        assert!(identity(100, 940).is_at_rest(now));
        assert!(!identity(100, 941).is_at_rest(now));
        assert!(!identity(2000, 100).is_at_rest(now), "in the future");
        assert!(!identity(-1, -1).is_at_rest(now));
    }

    #[test]
    fn memory_that_is_no_files_has_no_region() {
        let bytes = vec![1u8; 1 << 20];
        assert!(Region::of(bytes.as_ptr(), bytes.len()).is_none());
        assert!(Region::of(std::ptr::null(), 10).is_none());
    }
}
