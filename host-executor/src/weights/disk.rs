//! The cache of weights on disk, which outlives a restart.
//!
//! Each content has one file, named after its hash, in the folder of its sharing domain. A file is
//! written under a temporary name, synced, and renamed: a crash leaves either the whole file or a
//! temporary file, which the next start removes. Everything that is read is hashed again before a
//! guest can see it. When the cache is full, the least recently used files are removed. When the
//! disk is full, nothing is written, and the log says so once.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::SystemTime;

use tracing::{info, warn};
use vgpu_engine::Extent;
use vgpu_transport::lock::lock_at;
use vgpu_transport::wire::ContentHash;

use super::options::CacheOptions;
use crate::lock::{CacheFiles, Rank, RankedGuard, RankedMutex, expect_unlocked};
use crate::size::shown;

/// Bytes that are read or written at once.
const CHUNK: usize = 256 << 10;

/// The folder of contents that all sharing domains share. Other folders are named after a hash of
/// the domain.
const SHARED_FOLDER: &str = "all";

/// Why there is no weight store.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A system call on the folder failed.
    #[error("{}: {error}", .path.display())]
    Folder {
        /// The path.
        path: PathBuf,
        /// The error of the system call.
        error: io::Error,
    },
    /// Another user could change the files.
    #[error(
        "{}: its owner is {owner} and its mode {mode:o}; weights are kept only where no other user \
         can write (chown, chmod 700)",
        .path.display()
    )]
    Open {
        /// The folder.
        path: PathBuf,
        /// The owner of the folder.
        owner: u32,
        /// The permissions of the folder.
        mode: u32,
    },
    /// The hashing thread cannot be started.
    #[error("no thread for hashing weights: {0}")]
    Thread(io::Error),
}

/// Identifies a content.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContentKey {
    /// BLAKE3 of the bytes.
    pub(crate) hash: ContentHash,
    /// Number of bytes.
    pub(crate) len: u64,
}

/// The cache on disk.
pub(super) struct Disk {
    folder: PathBuf,
    limit: u64,
    /// What the folder has. No file is used under this lock: a hung file system delays only
    /// the threads that use files.
    index: RankedMutex<Index>,
    /// Held by the thread that adds a file: the hashing threads of all devices have one cache.
    adding: Mutex<()>,
    has_warned: AtomicBool,
    temporary: AtomicU64,
}

#[derive(Default)]
struct Index {
    files: HashMap<Name, CacheEntry>,
    /// Sum of the lengths of `files`.
    bytes: u64,
    /// Number of uses so far; orders entries by last use.
    clock: u64,
}

/// The name of a folder, and the hash of a content in it.
type Name = (Arc<str>, ContentHash);

#[derive(Debug, Clone, Copy)]
struct CacheEntry {
    len: u64,
    used: u64,
}

/// A cached file, whose content has not been checked against the hash.
#[derive(Debug)]
pub(crate) struct CachedExtent {
    file: File,
    path: PathBuf,
    pub(crate) len: u64,
    hash: ContentHash,
}

impl Disk {
    /// Opens a cache: indexes its files, removes temporary files of a crash, and shrinks the cache
    /// to its limit.
    pub(super) fn open(options: CacheOptions) -> Result<Disk, CacheError> {
        let CacheOptions { folder, size } = options;
        make_private(&folder)?;
        let mut found = Vec::new();
        for entry in list(&folder)? {
            let path = entry.path();
            let name = entry.file_name();
            let is_ours = name == SHARED_FOLDER || parse(&name).is_some();
            if !is_ours || !path.is_dir() {
                continue;
            }
            let name: Arc<str> = name.to_string_lossy().into();
            for entry in list(&path)? {
                let path = entry.path();
                let metadata = entry.metadata().ok().filter(fs::Metadata::is_file);
                match (metadata, parse(&entry.file_name())) {
                    (Some(metadata), Some(hash)) => {
                        let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                        found.push((used, (Arc::clone(&name), hash), metadata.len()));
                    }
                    (Some(_), None) => remove(&path), // a temporary file
                    (None, _) => {}
                }
            }
        }
        found.sort_by_key(|(used, ..)| *used);
        let mut index = Index::default();
        for (_, name, len) in found {
            index.add(name, len);
        }
        let disk = Disk {
            folder,
            limit: size,
            index: RankedMutex::new(Rank::Weights, index),
            adding: Mutex::default(),
            has_warned: AtomicBool::new(false),
            temporary: AtomicU64::new(0),
        };
        disk.make_room(0);
        let files = disk.index().files.len();
        let bytes = disk.bytes();
        info!(
            folder = %disk.folder.display(),
            files,
            size = %shown(bytes),
            limit = %shown(size),
            "weights on disk"
        );
        Ok(disk)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.index().bytes
    }

    /// Lengths of the contents of a sharing domain.
    pub(super) fn lengths(&self, domain: Option<&str>) -> Vec<u64> {
        let folder = folder_name(domain);
        let index = self.index();
        let of_domain = index
            .files
            .iter()
            .filter(|((name, _), _)| **name == *folder);
        of_domain.map(|(_, place)| place.len).collect()
    }

    /// Opens the file of a content.
    pub(super) fn find(&self, domain: Option<&str>, wanted: ContentKey) -> Option<CachedExtent> {
        let name: Name = (folder_name(domain).into(), wanted.hash);
        {
            let mut index = self.index();
            index.clock += 1;
            let clock = index.clock;
            let place = index.files.get_mut(&name)?;
            if place.len != wanted.len {
                return None;
            }
            place.used = clock;
        }
        let path = self.path(&name);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) => {
                warn!("{}: {error}", path.display());
                self.index().forget(&name);
                return None;
            }
        };
        // Orders the entries after a restart. If this fails, the order is less exact.
        let _ = file.set_modified(SystemTime::now());
        Some(CachedExtent {
            file,
            path,
            len: wanted.len,
            hash: wanted.hash,
        })
    }

    /// Writes an extent, unless it is freed meanwhile. Removes the least recently used files to
    /// make room. Errors are logged once.
    pub(super) fn put(&self, domain: Option<&str>, key: ContentKey, extent: &Weak<dyn Extent>) {
        let ContentKey { hash, len } = key;
        let name: Name = (folder_name(domain).into(), hash);
        let is_there = || self.index().files.contains_key(&name);
        if len > self.limit || is_there() {
            return;
        }
        let _adding = lock_at(CacheFiles, &self.adding);
        if is_there() {
            return;
        }
        self.make_room(len);
        match self.write(&name, len, extent) {
            Ok(()) => self.index().add(name, len),
            Err(_) if extent.strong_count() == 0 => {}
            Err(error) => {
                if !self.has_warned.swap(true, Ordering::Relaxed) {
                    let folder = self.folder.display();
                    let len = shown(len);
                    warn!("{folder}: {len} of weights cannot be cached: {error}");
                }
            }
        }
    }

    fn write(&self, name: &Name, len: u64, extent: &Weak<dyn Extent>) -> io::Result<()> {
        let path = self.path(name);
        let folder = path.parent().unwrap_or(&self.folder);
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(folder)?;
        let count = self.temporary.fetch_add(1, Ordering::Relaxed);
        let temporary = folder.join(format!("new-{}-{count}", std::process::id()));
        let written = copy_to(&temporary, len, extent).and_then(|()| fs::rename(&temporary, &path));
        if written.is_err() {
            remove(&temporary);
        }
        written?;
        // Makes the name durable, too. A file system that cannot loses the file in a crash.
        File::open(folder)?.sync_all()
    }

    /// Removes the least recently used files until `len` more bytes fit.
    fn make_room(&self, len: u64) {
        let evicted = self.index().evict(self.limit.saturating_sub(len));
        // Only the thread with `adding` adds files, and it is this thread: no new file has the name
        // of one of these.
        for name in evicted {
            remove(&self.path(&name));
        }
    }

    fn path(&self, (folder, hash): &Name) -> PathBuf {
        self.folder.join(&**folder).join(hash.to_string())
    }

    fn index(&self) -> RankedGuard<'_, Index> {
        self.index.lock()
    }
}

impl Index {
    fn add(&mut self, name: Name, len: u64) {
        self.clock += 1;
        let used = self.clock;
        if self.files.insert(name, CacheEntry { len, used }).is_none() {
            self.bytes += len;
        }
    }

    /// Forgets the least recently used files until at most `limit` bytes are left. Returns their
    /// names.
    fn evict(&mut self, limit: u64) -> Vec<Name> {
        let mut evicted = Vec::new();
        while self.bytes > limit {
            let oldest = self.files.iter().min_by_key(|(_, place)| place.used);
            let Some(name) = oldest.map(|(name, _)| name.clone()) else {
                break;
            };
            self.forget(&name);
            evicted.push(name);
        }
        evicted
    }

    fn forget(&mut self, name: &Name) {
        if let Some(place) = self.files.remove(name) {
            self.bytes -= place.len;
        }
    }
}

impl CachedExtent {
    /// Feeds the content of the file to `hasher`. `None` if `may_go_on`, which is called after each
    /// chunk, returns `false`.
    pub(crate) fn hash(
        &self,
        mut hasher: blake3::Hasher,
        may_go_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<Option<ContentHash>> {
        let is_complete = self.chunks(|_, chunk| {
            hasher.update(chunk);
            may_go_on()
        })?;
        Ok(is_complete.then(|| ContentHash(*hasher.finalize().as_bytes())))
    }

    /// Passes the content of the file to `take`, chunk by chunk with the offset. Returns whether
    /// the content has the hash of its name; if not, removes the file.
    pub(crate) fn read<E: From<io::Error>>(
        &self,
        mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut hasher = blake3::Hasher::new();
        let mut failed = None;
        self.chunks(|at, chunk| {
            hasher.update(chunk);
            failed = take(at, chunk).err();
            failed.is_none()
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        let is_right = *hasher.finalize().as_bytes() == self.hash.0;
        if !is_right {
            warn!(
                "{}: content does not match its hash, file removed",
                self.path.display()
            );
            remove(&self.path);
        }
        Ok(is_right)
    }

    /// Passes each chunk with its offset to `take`, until `take` returns `false`. Returns whether
    /// all chunks were taken.
    fn chunks(&self, mut take: impl FnMut(u64, &[u8]) -> bool) -> io::Result<bool> {
        use std::os::unix::fs::FileExt;
        let mut chunk = vec![0; CHUNK];
        let mut at = 0;
        while at < self.len {
            let len = (self.len - at).min(CHUNK as u64) as usize;
            self.file.read_exact_at(&mut chunk[..len], at)?;
            if !take(at, &chunk[..len]) {
                return Ok(false);
            }
            at += len as u64;
        }
        Ok(true)
    }
}

fn copy_to(path: &Path, len: u64, extent: &Weak<dyn Extent>) -> io::Result<()> {
    expect_unlocked("a write to the weight cache");
    let mut file = File::create_new(path)?;
    let mut chunk = vec![0; CHUNK];
    let mut at = 0;
    while at < len {
        let part = &mut chunk[..(len - at).min(CHUNK as u64) as usize];
        // Kept only for the time of a chunk.
        let extent = extent.upgrade().ok_or(io::ErrorKind::NotFound)?;
        extent.read(at, part).map_err(io::Error::other)?;
        drop(extent);
        file.write_all(part)?;
        at += part.len() as u64;
    }
    file.sync_all()
}

fn make_private(folder: &Path) -> Result<(), CacheError> {
    let failed = |error| CacheError::Folder {
        path: folder.to_owned(),
        error,
    };
    let mut builder = fs::DirBuilder::new();
    builder
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(failed)?;
    let metadata = fs::metadata(folder).map_err(failed)?;
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    match owner == rustix::process::geteuid().as_raw() && mode & 0o022 == 0 {
        true => Ok(()),
        false => Err(CacheError::Open {
            path: folder.to_owned(),
            owner,
            mode,
        }),
    }
}

fn list(folder: &Path) -> Result<Vec<fs::DirEntry>, CacheError> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect);
    entries.map_err(|error| CacheError::Folder {
        path: folder.to_owned(),
        error,
    })
}

fn remove(path: &Path) {
    expect_unlocked("the removal of a file");
    match fs::remove_file(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => warn!("{}: {error}", path.display()),
    }
}

/// The folder of a sharing domain: a hash, since its name may be anything.
fn folder_name(domain: Option<&str>) -> String {
    match domain {
        None => SHARED_FOLDER.to_owned(),
        Some(domain) => ContentHash(*blake3::hash(domain.as_bytes()).as_bytes()).to_string(),
    }
}

/// The hash that a name says.
fn parse(name: &OsStr) -> Option<ContentHash> {
    let name = name.to_str().filter(|name| name.len() == 64)?;
    let mut hash = [0; 32];
    for (byte, digits) in hash.iter_mut().zip(name.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).ok()?;
        *byte = u8::from_str_radix(digits, 16).ok()?;
    }
    let hash = ContentHash(hash);
    (hash.to_string() == name).then_some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::any::Any;
    use std::process::Command;
    use vgpu_engine::EngineError;

    /// Tells the test below that it is the process with no room on its disk.
    const CHILD: &str = "VGPU_TEST_FULL_DISK";

    struct Bytes(Vec<u8>);

    impl Extent for Bytes {
        fn size(&self) -> u64 {
            self.0.len() as u64
        }

        fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), EngineError> {
            out.copy_from_slice(&self.0[offset as usize..][..out.len()]);
            Ok(())
        }

        fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
            self
        }
    }

    fn hash_of(bytes: &Bytes) -> ContentHash {
        ContentHash(*blake3::hash(&bytes.0).as_bytes())
    }

    #[test]
    fn full_disk_disables_only_the_cache() {
        if let Some(folder) = std::env::var_os(CHILD) {
            return on_a_full_disk(PathBuf::from(folder));
        }
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([
            "--exact",
            "weights::disk::tests::full_disk_disables_only_the_cache",
        ]);
        let output = child.env(CHILD, folder.path()).output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stdout)
        );
    }

    /// No file grows beyond a mebibyte: the kernel fails the write in the middle, as a full disk
    /// does.
    fn on_a_full_disk(folder: PathBuf) {
        let limit = libc::rlimit {
            rlim_cur: 1 << 20,
            rlim_max: 1 << 20,
        };
        // SAFETY: calls without memory of ours but the structure; this process does nothing else.
        unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit), 0);
        }
        let options = CacheOptions {
            folder,
            size: 1 << 30,
        };
        let disk = Disk::open(options).unwrap();
        let (large, small) = (Bytes(vec![1; 3 << 20]), Bytes(vec![2; 100_000]));
        let lookup = |bytes: &Bytes| ContentKey {
            hash: hash_of(bytes),
            len: bytes.size(),
        };
        let (large_key, small_key) = (lookup(&large), lookup(&small));
        let bytes = small.0.clone();
        let [large, small]: [Arc<dyn Extent>; 2] = [Arc::new(large), Arc::new(small)];
        disk.put(None, large_key, &Arc::downgrade(&large));
        assert_eq!(
            (disk.bytes(), disk.has_warned.load(Ordering::Relaxed)),
            (0, true)
        );
        assert!(disk.find(None, large_key).is_none());
        let left = fs::read_dir(disk.folder.join(SHARED_FOLDER))
            .unwrap()
            .count();
        assert_eq!(left, 0, "nothing half-written is left");
        // What fits is kept all the same, and read.
        disk.put(None, small_key, &Arc::downgrade(&small));
        let cached = disk.find(None, small_key).unwrap();
        let mut read = Vec::new();
        let is_right = cached.read(|_, chunk| {
            read.extend_from_slice(chunk);
            Ok::<(), io::Error>(())
        });
        assert!(is_right.unwrap() && read == bytes);
    }

    /// `remove` panics if the thread holds the lock of the index, or any other of the executor.
    #[test]
    fn files_are_removed_without_the_lock_of_the_index() {
        let folder = tempfile::tempdir().unwrap();
        let options = CacheOptions {
            folder: folder.path().join("weights"),
            size: 250,
        };
        let disk = Disk::open(options).unwrap();
        for value in 1..=3 {
            let bytes = Bytes(vec![value; 100]);
            let (hash, len) = (hash_of(&bytes), bytes.size());
            let extent: Arc<dyn Extent> = Arc::new(bytes);
            disk.put(None, ContentKey { hash, len }, &Arc::downgrade(&extent));
        }
        let files = fs::read_dir(disk.folder.join(SHARED_FOLDER)).unwrap();
        assert_eq!((disk.bytes(), files.count()), (200, 2));
    }

    #[test]
    fn only_hashes_are_accepted_as_file_names() {
        let hash = ContentHash([0xab; 32]);
        assert_eq!(parse(OsStr::new(&hash.to_string())), Some(hash));
        for bad in [
            "",
            "new-1-1",
            &"AB".repeat(32),
            &"g".repeat(64),
            &"+1".repeat(32),
            &"é".repeat(32),
        ] {
            assert_eq!(parse(OsStr::new(bad)), None, "{bad}");
        }
        assert_eq!(folder_name(Some("user 7")).len(), 64);
        assert_ne!(folder_name(Some("user 7")), folder_name(Some("user 8")));
    }
}
