//! Which part of which file a pointer of the program shows, if the program has mapped the file.
//!
//! The kernel is asked each time (`PROCMAP_QUERY`, Linux 6.11), because a program may map another
//! file at the same address at any time. Only shared mappings without write permission count: what
//! they show is the content of the file.
//!
//! A file is unchanged if its device, inode, size and times are ([`FileIdentity`]). This rule is as
//! reliable as the file system. Only file systems are trusted that update the times with every
//! write, including a write through a mapping once the page was written back, and only files that
//! have not changed for longer than a write-back takes.

use std::ffi::{OsStr, c_ulong};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use vgpu_transport::fork::PerProcess;
use vgpu_transport::lock::lock_at;
use vgpu_transport::wire::ContentHash;

use super::file_identity::FileIdentity;
use super::hash_cache::HashCache;
use crate::lock::Rank;

/// Files that are kept open. A model has one file, or a few.
const MAX_OPEN_FILES: usize = 8;

/// `statfs.f_type` of the trusted file systems: ext4, XFS, Btrfs, F2FS, bcachefs, overlayfs (of
/// these).
const TRUSTED_FILE_SYSTEMS: [i64; 6] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    0xca45_1a4e,
    0x794c_7630,
];

/// A range of bytes of a file.
#[derive(Debug, Clone)]
pub(crate) struct FileRange {
    pub(super) file: Arc<MappedFile>,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// A file that the program has mapped, as it was when it was opened.
#[derive(Debug)]
pub(crate) struct MappedFile {
    pub(super) file: File,
    pub(super) identity: FileIdentity,
    pub(super) hashes: HashCache,
}

impl FileRange {
    /// The range of a file that `len` bytes at `data` show; `None` if these bytes are not (only)
    /// part of a mapping of a trusted, unchanged file.
    pub(crate) fn find(data: *const u8, len: usize) -> Option<FileRange> {
        let mapping = Mapping::at(data.addr() as u64)?;
        let start = data.addr() as u64;
        if start.checked_add(len as u64)? > mapping.end {
            return None;
        }
        let range = FileRange {
            offset: mapping.offset.checked_add(start - mapping.start)?,
            len: len as u64,
            file: MappedFile::find(&mapping)?,
        };
        (range.offset.checked_add(range.len)? <= range.file.identity.size).then_some(range)
    }

    /// The file.
    pub(crate) fn file(&self) -> &Arc<MappedFile> {
        &self.file
    }

    /// The hash of the range, if known.
    pub(crate) fn hash(&self) -> Option<ContentHash> {
        self.file.hashes.get(self.offset, self.len)
    }
}

impl MappedFile {
    /// Opens the file of a mapping, or finds it open and unchanged.
    fn find(mapping: &Mapping) -> Option<Arc<MappedFile>> {
        static OPEN: PerProcess<Mutex<Vec<Arc<MappedFile>>>> = PerProcess::new();
        let open = OPEN.get_or_init(Mutex::default);
        let mut open = lock_at(Rank::MappedFiles, open);
        open.retain(|file| file.is_unchanged());
        let is_same = |file: &&Arc<MappedFile>| {
            (file.identity.device, file.identity.inode) == (mapping.device, mapping.inode)
        };
        if let Some(known) = open.iter().find(is_same) {
            return Some(Arc::clone(known));
        }
        let file = Arc::new(MappedFile::open(mapping)?);
        if open.len() >= MAX_OPEN_FILES {
            open.remove(0);
        }
        open.push(Arc::clone(&file));
        Some(file)
    }

    fn open(mapping: &Mapping) -> Option<MappedFile> {
        // The path may name another file by now, which has another device or inode.
        let file = File::open(Path::new(OsStr::from_bytes(&mapping.path))).ok()?;
        let identity = FileIdentity::of(&file.metadata().ok()?);
        let is_same = (identity.device, identity.inode) == (mapping.device, mapping.inode);
        if !is_same || !identity.is_settled(SystemTime::now()) || !is_trusted(&file) {
            return None;
        }
        Some(MappedFile {
            file,
            hashes: HashCache::open(&identity),
            identity,
        })
    }

    /// Whether the file is as it was when it was opened.
    pub(super) fn is_unchanged(&self) -> bool {
        let metadata = self.file.metadata();
        metadata.is_ok_and(|metadata| FileIdentity::of(&metadata) == self.identity)
    }

    /// All known hashes of the file, with the lengths of their parts in bytes.
    pub(crate) fn known_hashes(&self) -> Vec<(ContentHash, u64)> {
        self.hashes.all()
    }
}

/// Whether the file is on a file system that updates the times of a file with every write.
fn is_trusted(file: &File) -> bool {
    // SAFETY: `statfs` consists of integers, for which all zeros are a value.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open while `file` is borrowed, and `found` is a local that the
    // kernel fills in.
    let done = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) };
    #[allow(clippy::unnecessary_cast)] // the type of `f_type` depends on the platform
    let kind = found.f_type as i64;
    done == 0 && TRUSTED_FILE_SYSTEMS.contains(&kind)
}

/// A mapping of a file.
struct Mapping {
    start: u64,
    end: u64,
    /// Where `start` lies in the file, in bytes.
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

/// Query flags: the mapping of the address must be readable, shared and of a file.
const WANTED: u64 = 0x01 | 0x08 | 0x20;
/// A flag of the answer: the mapping is writable.
const WRITABLE: u64 = 0x02;

impl Mapping {
    /// The mapping that contains `address`, if the mapping is readable, shared, not writable, and
    /// of a file.
    fn at(address: u64) -> Option<Mapping> {
        // After a fork, the descriptor of the parent shows the mappings of the parent.
        static MAPS: PerProcess<Option<File>> = PerProcess::new();
        let maps = MAPS.get_or_init(|| File::open("/proc/self/maps").ok());
        let file = maps.as_ref()?;
        let mut path = vec![0u8; libc::PATH_MAX as usize];
        let mut query = ProcmapQuery {
            size: size_of::<ProcmapQuery>() as u64,
            query_flags: WANTED,
            query_addr: address,
            vma_name_size: path.len() as u32,
            vma_name_addr: path.as_mut_ptr() as u64,
            ..ProcmapQuery::default()
        };
        // SAFETY: the kernel writes into `query`, and at most `vma_name_size` bytes to
        // `vma_name_addr`, which is `path` with as many bytes. Both are locals that live until the
        // call returns.
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
    fn anonymous_memory_has_no_file_range() {
        let bytes = vec![1u8; 1 << 20];
        assert!(FileRange::find(bytes.as_ptr(), bytes.len()).is_none());
        assert!(FileRange::find(std::ptr::null(), 10).is_none());
    }
}
