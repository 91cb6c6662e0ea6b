//! The cache of weights on disk, which outlives a restart.
//!
//! Each content has one file, named after its hash, in the folder of its sharing domain. A file is
//! written under a temporary name, synced, and renamed: a crash leaves either the whole file or a
//! temporary file, which the next start removes. Everything that is read is hashed again before a
//! guest can see it. When the cache is full, the least recently used files are removed. When the
//! disk is full, nothing is written, and the log says so once.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use tracing::{info, warn};
use vgpu_engine::Extent;
use vgpu_transport::wire::{ContentHash, MAX_LENGTHS};

use super::content::{ByLength, ContentKey};
use super::options::CacheOptions;
use crate::lock::{Rank, RankedGuard, RankedMutex, expect_unlocked};
use crate::size::shown;

/// Bytes that are read or written at once.
const CHUNK: usize = 256 << 10;

/// The folder of contents that all sharing domains share. Other folders are named after a hash of
/// the domain.
const SHARED_FOLDER: &str = "all";

/// Files that are removed between two looks at the index.
const REMOVED_AT_ONCE: usize = 256;

/// How long a file is kept from domains that have more than their share.
const RECENTLY: Duration = Duration::from_secs(3600);

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
    /// The thread that hashes, or the one that writes, cannot be started.
    #[error("no thread for hashing or writing weights: {0}")]
    Thread(io::Error),
}

/// The cache on disk.
pub(super) struct Disk {
    folder: PathBuf,
    limit: u64,
    /// What the folder has. No file is used under this lock: a hung file system delays only
    /// the threads that use files.
    index: RankedMutex<Index>,
    has_warned: AtomicBool,
    temporary: AtomicU64,
}

#[derive(Default)]
struct Index {
    files: HashMap<Name, CacheEntry>,
    /// The names of `files`, by their last use.
    by_use: BTreeMap<u64, Name>,
    folders: HashMap<Arc<str>, Folder>,
    /// The contents of each folder.
    by_length: ByLength<Arc<str>>,
    /// Sum of the lengths of `files`.
    bytes: u64,
    /// Number of uses so far; orders entries by last use.
    clock: u64,
}

/// Whether there is room for a file.
#[derive(Debug, PartialEq, Eq)]
enum Room {
    Free,
    /// There may be once these files are removed, which the index has forgotten.
    After(Vec<Name>),
    /// The file is larger than the share of its owner.
    Never,
}

/// The files of a sharing domain.
#[derive(Default)]
struct Folder {
    bytes: u64,
    by_use: BTreeMap<u64, ContentHash>,
}

/// The name of a folder, and the hash of a content in it.
type Name = (Arc<str>, ContentHash);

#[derive(Debug, Clone, Copy)]
struct CacheEntry {
    len: u64,
    /// The number of the last use, and when that was.
    used: u64,
    at: SystemTime,
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
        for (used, name, len) in found {
            index.add(name, len, used);
        }
        let disk = Disk {
            folder,
            limit: size,
            index: RankedMutex::new(Rank::Weights, index),
            has_warned: AtomicBool::new(false),
            temporary: AtomicU64::new(0),
        };
        let too_many = disk.index().shrink(size);
        disk.remove_files(too_many);
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

    /// The different lengths of the contents of a sharing domain, the longest first, as many as a
    /// message has.
    pub(super) fn lengths(&self, domain: Option<&str>) -> Vec<u64> {
        let folder = folder_name(domain).into();
        self.index().by_length.lengths(&folder, MAX_LENGTHS)
    }

    /// Opens the file of a content.
    pub(super) fn find(&self, domain: Option<&str>, wanted: ContentKey) -> Option<CachedExtent> {
        let name: Name = (folder_name(domain).into(), wanted.hash);
        let now = SystemTime::now();
        if !self.index().touch(&name, wanted.len, now) {
            return None;
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
        let _ = file.set_modified(now);
        Some(CachedExtent {
            file,
            path,
            len: wanted.len,
            hash: wanted.hash,
        })
    }

    /// Writes an extent, unless it is freed meanwhile, or `has_ended`. Removes the least recently
    /// used files to make room. Errors are logged once. Returns the bytes that were written. One
    /// thread at a time may call this.
    pub(super) fn put(
        &self,
        domain: Option<&str>,
        key: ContentKey,
        extent: &Weak<dyn Extent>,
        has_ended: &dyn Fn() -> bool,
    ) -> u64 {
        let ContentKey { hash, len } = key;
        let name: Name = (folder_name(domain).into(), hash);
        if len > self.limit || extent.strong_count() == 0 {
            return 0;
        }
        if self.index().files.contains_key(&name) {
            return 0;
        }
        let now = SystemTime::now();
        loop {
            let room = self.index().make_room(self.limit, (&name.0, len), now);
            match room {
                Room::Free => break,
                Room::Never => return 0,
                Room::After(removed) => self.remove_files(removed),
            }
        }
        match self.write(&name, len, extent, has_ended) {
            Ok(()) => {
                self.index().add(name, len, now);
                len
            }
            Err(_) if extent.strong_count() == 0 || has_ended() => len,
            Err(error) => {
                if !self.has_warned.swap(true, Ordering::Relaxed) {
                    let folder = self.folder.display();
                    let len = shown(len);
                    warn!("{folder}: {len} of weights cannot be cached: {error}");
                }
                len
            }
        }
    }

    fn write(
        &self,
        name: &Name,
        len: u64,
        extent: &Weak<dyn Extent>,
        has_ended: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        let path = self.path(name);
        let folder = path.parent().unwrap_or(&self.folder);
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(folder)?;
        let count = self.temporary.fetch_add(1, Ordering::Relaxed);
        let temporary = folder.join(format!("new-{}-{count}", std::process::id()));
        let written = copy_to(&temporary, len, extent, has_ended);
        let written = written.and_then(|()| fs::rename(&temporary, &path));
        if written.is_err() {
            remove(&temporary);
        }
        written?;
        // Makes the name durable, too. A file system that cannot loses the file in a crash.
        File::open(folder)?.sync_all()
    }

    /// Removes files that the index has forgotten.
    fn remove_files(&self, names: Vec<Name>) {
        // Only the thread that calls `put` adds files, and it is this thread, or there is none yet:
        // no new file has the name of one of these.
        for name in names {
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
    fn add(&mut self, name: Name, len: u64, at: SystemTime) {
        self.forget(&name);
        self.clock += 1;
        let used = self.clock;
        let (folder, hash) = &name;
        let content = ContentKey { hash: *hash, len };
        self.by_length.insert(Arc::clone(folder), content);
        let of_folder = self.folders.entry(Arc::clone(folder)).or_default();
        of_folder.bytes += len;
        of_folder.by_use.insert(used, *hash);
        self.by_use.insert(used, name.clone());
        self.files.insert(name, CacheEntry { len, used, at });
        self.bytes += len;
    }

    /// Makes a file the last one that was used. Returns whether it exists with this length.
    fn touch(&mut self, name: &Name, len: u64, now: SystemTime) -> bool {
        let is_there = self.files.get(name).is_some_and(|entry| entry.len == len);
        if is_there {
            self.add(name.clone(), len, now);
        }
        is_there
    }

    /// Forgets the least recently used files until at most `limit` bytes are left. Returns their
    /// names.
    fn shrink(&mut self, limit: u64) -> Vec<Name> {
        let mut removed = Vec::new();
        while self.bytes > limit
            && let Some((_, name)) = self.by_use.first_key_value()
        {
            let name = name.clone();
            self.forget(&name);
            removed.push(name);
        }
        removed
    }

    /// Looks for room for a new file of `len` bytes in the folder `owner`, and forgets some files
    /// if there is none.
    fn make_room(&mut self, limit: u64, (owner, len): (&Arc<str>, u64), now: SystemTime) -> Room {
        let has_room = |index: &Index| index.bytes.saturating_add(len) <= limit;
        if has_room(self) {
            return Room::Free;
        }
        let count = self.folders.len() + usize::from(!self.folders.contains_key(owner));
        let share = limit / count as u64;
        // Nothing is removed in vain: for a file within the share there is always room.
        if len > share {
            return Room::Never;
        }
        let mut removed = Vec::new();
        while !has_room(self)
            && removed.len() < REMOVED_AT_ONCE
            && let Some(name) = self.next_to_go(share, (owner, len), now)
        {
            self.forget(&name);
            removed.push(name);
        }
        Room::After(removed)
    }

    /// The file that goes next for a new one of `len` bytes, at most `share`, in the folder
    /// `owner`.
    fn next_to_go(
        &self,
        share: u64,
        (owner, len): (&Arc<str>, u64),
        now: SystemTime,
    ) -> Option<Name> {
        let (_, oldest) = self.by_use.first_key_value()?;
        let age = { self.files.get(oldest) }.and_then(|entry| now.duration_since(entry.at).ok());
        if age.is_some_and(|age| age >= RECENTLY) {
            return Some(oldest.clone());
        }
        let first = |(name, folder): (&Arc<str>, &Folder)| {
            let (used, hash) = folder.by_use.first_key_value()?;
            Some((*used, (Arc::clone(name), *hash)))
        };
        let own = self.folders.get_key_value(owner);
        let own = own.filter(|(_, folder)| folder.bytes + len > share);
        let next = match own {
            Some(own) => first(own),
            None => {
                let large = { self.folders.iter() }.filter(|(_, folder)| folder.bytes > share);
                large.filter_map(first).min_by_key(|(used, _)| *used)
            }
        };
        next.map(|(_, name)| name)
    }

    fn forget(&mut self, name: &Name) {
        let Some(CacheEntry { len, used, .. }) = self.files.remove(name) else {
            return;
        };
        let (folder, hash) = name;
        self.by_length
            .remove(folder, ContentKey { hash: *hash, len });
        self.by_use.remove(&used);
        self.bytes -= len;
        if let Some(of_folder) = self.folders.get_mut(folder) {
            of_folder.bytes -= len;
            of_folder.by_use.remove(&used);
            if of_folder.by_use.is_empty() {
                self.folders.remove(folder);
            }
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

fn copy_to(
    path: &Path,
    len: u64,
    extent: &Weak<dyn Extent>,
    has_ended: &dyn Fn() -> bool,
) -> io::Result<()> {
    expect_unlocked("a write to the weight cache");
    let mut file = File::create_new(path)?;
    let mut chunk = vec![0; CHUNK];
    let mut at = 0;
    while at < len {
        if has_ended() {
            return Err(io::ErrorKind::Interrupted.into());
        }
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
        disk.put(None, large_key, &Arc::downgrade(&large), &|| false);
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
        disk.put(None, small_key, &Arc::downgrade(&small), &|| false);
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
            let key = ContentKey { hash, len };
            disk.put(None, key, &Arc::downgrade(&extent), &|| false);
        }
        let files = fs::read_dir(disk.folder.join(SHARED_FOLDER)).unwrap();
        assert_eq!((disk.bytes(), files.count()), (200, 2));
    }

    fn name(folder: &str, i: u8) -> Name {
        (Arc::from(folder), ContentHash([i; 32]))
    }

    #[test]
    fn files_that_were_used_least_recently_go_first() {
        let mut index = Index::default();
        let now = SystemTime::now();
        for i in 0..6 {
            let folder = if i % 2 == 0 { "a" } else { "b" };
            index.add(name(folder, i), 10 + u64::from(i), now);
        }
        assert!(index.touch(&name("a", 0), 10, now) && index.touch(&name("b", 1), 11, now));
        assert!(!index.touch(&name("a", 2), 11, now), "of another length");
        assert!(!index.touch(&name("b", 2), 12, now), "in another folder");
        index.forget(&name("a", 4));
        // The same file again.
        index.add(name("b", 3), 13, now);
        assert_eq!(index.bytes, 10 + 11 + 12 + 13 + 15);
        assert_eq!(index.by_length.lengths(&"b".into(), 9), [15, 13, 11]);
        assert_eq!(index.by_length.lengths(&"b".into(), 2), [15, 13]);
        assert_eq!(index.shrink(40), [name("a", 2), name("b", 5)]);
        assert_eq!(index.shrink(13), [name("a", 0), name("b", 1)]);
        assert_eq!(
            (index.bytes, index.files.len(), index.by_use.len()),
            (13, 1, 1)
        );
        assert_eq!(index.by_length.lengths(&"b".into(), 9), [13]);
        assert!(index.by_length.lengths(&"a".into(), 9).is_empty());
        assert_eq!(index.folders.len(), 1);
    }

    #[test]
    fn a_domain_with_more_than_its_share_removes_its_own_files() {
        let mut index = Index::default();
        let begin = SystemTime::now();
        let soon = begin + RECENTLY / 2;
        // The model of one domain, and then another domain that uploads without end.
        for i in 0..4 {
            index.add(name("quiet", i), 10, begin);
        }
        let remove = |index: &mut Index, owner: &str, len, now| {
            let mut all = Vec::new();
            loop {
                match index.make_room(100, (&owner.into(), len), now) {
                    Room::Free => return Some(all),
                    Room::After(removed) => all.extend(removed),
                    Room::Never => return None,
                }
            }
        };
        for i in 0..50 {
            let removed = remove(&mut index, "busy", 10, soon).expect("room");
            assert!(removed.iter().all(|(folder, _)| &**folder == "busy"));
            index.add(name("busy", i), 10, soon);
        }
        assert_eq!(index.folders[&Arc::from("quiet")].bytes, 40);
        assert_eq!(index.bytes, 100);
        // Up to its share, the other domain gets room from the one that has more.
        let removed = remove(&mut index, "quiet", 10, soon);
        assert_eq!(removed, Some(vec![name("busy", 44)]));
        index.add(name("quiet", 4), 10, soon);
        let removed = remove(&mut index, "quiet", 10, soon);
        assert_eq!(removed, Some(vec![name("quiet", 0)]));
        index.add(name("quiet", 5), 10, soon);
        // Nothing goes for a file that is larger than its owner's share, however old the files are.
        let late = begin + RECENTLY;
        for (owner, len) in [("third", 40), ("busy", 51)] {
            assert_eq!(remove(&mut index, owner, len, late), None);
        }
        assert_eq!(index.bytes, 100);
        // Up to its share, from both that have more, the least recently used first.
        let removed = remove(&mut index, "third", 30, soon);
        let three = vec![name("quiet", 1), name("quiet", 2), name("busy", 45)];
        assert_eq!(removed, Some(three));
        index.add(name("third", 0), 30, soon);
        // A file that nobody has used for an hour goes first, whoever has more.
        let removed = remove(&mut index, "busy", 20, late);
        assert_eq!(removed, Some(vec![name("quiet", 3), name("busy", 46)]));
    }

    #[test]
    fn room_is_made_in_parts() {
        let mut index = Index::default();
        let now = SystemTime::now();
        for i in 0..2000_u16 {
            let mut hash = [0; 32];
            hash[..2].copy_from_slice(&i.to_le_bytes());
            index.add(("a".into(), ContentHash(hash)), 1, now);
        }
        let mut parts = Vec::new();
        while let Room::After(removed) = index.make_room(2000, (&"a".into(), 600), now) {
            parts.push(removed.len());
        }
        assert_eq!((parts, index.bytes), (vec![256, 256, 88], 1400));
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
