//! What a forked child must not share with its parent.
//!
//! A program may call `fork` while it has an open link: Python's `multiprocessing` and servers that
//! load a model before they start their workers do. The child has a copy of everything: the memory
//! of the window, which both processes then write, the socket, and locks that threads of the parent
//! held. A link belongs to the process that has opened it:
//!
//! - [`Owner`] tells the process that has made a value from its forked children.
//! - [`PerProcess`] is a value of which every process makes its own.
//! - `Inherited` registers shared memory and open files. A handler of `pthread_atfork` replaces
//!   them in the child: the memory by zeros of the child's own, the files by an empty eventfd. The
//!   addresses and the descriptors stay valid, so that a program that uses them neither crashes nor
//!   hits a file that the child has opened since.
//!
//! The handlers run for `fork` only. A child of `posix_spawn` or `vfork` executes another program:
//! all descriptors of this crate are closed on exec. A child of a bare `clone` system call keeps
//! memory and files, but [`Owner`] recognises it.

use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::lock::{ForkRegister, RankedGuard, RankedMutex};

/// The process that has made a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner(u64);

/// The flag of an [`Owner`] that is a process id, on a kernel that cannot wipe memory on a fork.
const PROCESS_ID: u64 = 1 << 63;

impl Owner {
    /// The calling process as an owner.
    pub fn current() -> Owner {
        let Some(number) = own_number() else {
            return Owner(u64::from(std::process::id()) | PROCESS_ID);
        };
        match number.load(Ordering::Relaxed) {
            0 => {
                // The counter is ordinary memory: a child has the value of its parent, so that no
                // ancestor has had the next number.
                static LAST: AtomicU64 = AtomicU64::new(0);
                let next = LAST.fetch_add(1, Ordering::Relaxed) + 1;
                let set = number.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed);
                Owner(set.map_or_else(|other| other, |_| next))
            }
            known => Owner(known),
        }
    }

    /// Whether this process is the one that has made the value. Costs one load: the functions of a
    /// link may ask at each call.
    pub fn is_current(self) -> bool {
        self == Owner::current()
    }
}

/// The number of this process among its ancestors, in a page that the kernel fills with zeros in a
/// forked child. `None` if the kernel does not do that (Linux before 4.14).
fn own_number() -> Option<&'static AtomicU64> {
    static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
    /// The value of `PAGE` on a kernel without such pages.
    const NONE: *mut AtomicU64 = ptr::without_provenance_mut(1);
    const SIZE: usize = 4096;

    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        let new = map_wiped(SIZE).unwrap_or(NONE);
        page = match PAGE.compare_exchange(
            ptr::null_mut(),
            new,
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => new,
            Err(other) => {
                if new != NONE {
                    // SAFETY: `map_wiped` has just mapped `SIZE` bytes there, and nobody else has
                    // the address.
                    unsafe { libc::munmap(new.cast(), SIZE) };
                }
                other
            }
        };
    }
    // SAFETY: any other value than `NONE` is the address of a page that `map_wiped` has mapped and
    // that is never unmapped. The page is aligned, and its bytes are accessed as this word only.
    (page != NONE).then(|| unsafe { &*page })
}

/// Maps `size` bytes that are zero, and zero again in a forked child.
fn map_wiped(size: usize) -> Option<*mut AtomicU64> {
    // SAFETY: the kernel chooses a free range of addresses.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the range was just mapped, and the advice takes effect in children only.
    if unsafe { libc::madvise(page, size, libc::MADV_WIPEONFORK) } != 0 {
        // SAFETY: the range was just mapped, and nobody else has the address.
        unsafe { libc::munmap(page, size) };
        return None;
    }
    Some(page.cast())
}

/// A value of which every process has its own: a forked child makes another one at its first use.
/// The child leaves its parent's value as it is, because a thread of the parent may have been
/// changing the value, and may have held its lock, at the time of the fork.
pub struct PerProcess<T> {
    node: AtomicPtr<(Owner, T)>,
}

// SAFETY: the pointer is that of a `(Owner, T)` which this value owns as a box does. Several
// threads get `&T` and may make the `T`, so `T` must be both `Send` and `Sync`.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}
// SAFETY: the value owns the `(Owner, T)` behind the pointer, and `T` is `Send`.
unsafe impl<T: Send + Sync> Send for PerProcess<T> {}

impl<T> PerProcess<T> {
    /// A value that is not made yet.
    pub const fn new() -> PerProcess<T> {
        PerProcess {
            node: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// The value of this process, if there is one. Allocates nothing.
    pub fn get(&self) -> Option<&T> {
        let found = self.node.load(Ordering::Acquire);
        // SAFETY: null, or a node that `get_or_init` has boxed. A node is freed with `self` only.
        let node = unsafe { found.as_ref() }?;
        node.0.is_current().then_some(&node.1)
    }

    /// The value of this process. `make` makes the value if there is none, perhaps on several
    /// threads at once: then one of the values is kept.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        let owner = Owner::current();
        let found = self.node.load(Ordering::Acquire);
        // SAFETY: null, or a node that `get_or_init` has boxed. A node is freed with `self` only.
        if let Some((_, value)) = unsafe { found.as_ref() }.filter(|node| node.0 == owner) {
            return value;
        }
        let new = Box::into_raw(Box::new((owner, make())));
        let set = self
            .node
            .compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire);
        let node = match set {
            Ok(_) => new,
            Err(other) => {
                // SAFETY: the box was just made, and its address was not stored.
                drop(unsafe { Box::from_raw(new) });
                other
            }
        };
        // SAFETY: the node is one of this process: `new`, or that of another thread, which has
        // replaced `found`. A node is freed with `self` only.
        unsafe { &(*node).1 }
    }
}

impl<T> Default for PerProcess<T> {
    fn default() -> PerProcess<T> {
        PerProcess::new()
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let node = *self.node.get_mut();
        // SAFETY: null, or a node that `get_or_init` has boxed.
        let is_own = unsafe { node.as_ref() }.is_some_and(|(owner, _)| owner.is_current());
        if is_own {
            // SAFETY: the node was boxed, and `self`, which all references to it borrow, ends.
            drop(unsafe { Box::from_raw(node) });
        }
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PerProcess")
    }
}

/// What the handler replaces in a forked child.
#[derive(Debug, Clone, Copy)]
enum Entry {
    /// A shared mapping: its address and its size in bytes.
    Memory(usize, usize),
    File(RawFd),
}

static ENTRIES: RankedMutex<ForkRegister, BTreeMap<u64, Entry>> =
    RankedMutex::new(ForkRegister, BTreeMap::new());

fn entries() -> RankedGuard<'static, BTreeMap<u64, Entry>> {
    ENTRIES.lock()
}

/// Memory or a file that the handler replaces in a forked child. Must be dropped before the memory
/// is unmapped or the file is closed.
#[derive(Debug)]
pub(crate) struct Inherited(u64);

impl Inherited {
    /// `len` bytes at `address` are a shared mapping.
    ///
    /// # Safety
    ///
    /// The bytes must be whole pages of one mapping, which is not unmapped before the value is
    /// dropped, and which no Rust reference to ordinary memory refers to.
    pub(crate) unsafe fn memory(address: *mut u8, len: usize) -> Inherited {
        Inherited::new(Entry::Memory(address.addr(), len))
    }

    fn new(entry: Entry) -> Inherited {
        static LAST: AtomicU64 = AtomicU64::new(0);
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(|| {
            // Without memory for the handlers the owner's checks remain.
            // SAFETY: the handlers are functions without preconditions.
            unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        });
        let key = LAST.fetch_add(1, Ordering::Relaxed);
        entries().insert(key, entry);
        Inherited(key)
    }
}

impl Drop for Inherited {
    fn drop(&mut self) {
        entries().remove(&self.0);
    }
}

/// An open file that a forked child does not inherit.
#[derive(Debug)]
pub(crate) struct OwnFd {
    // Fields are dropped in this order: the handler must not replace a descriptor that is closed.
    _inherited: Inherited,
    file: OwnedFd,
}

impl OwnFd {
    /// Registers `file`.
    pub(crate) fn new(file: impl Into<OwnedFd>) -> OwnFd {
        let file = file.into();
        OwnFd {
            _inherited: Inherited::new(Entry::File(file.as_raw_fd())),
            file,
        }
    }
}

impl AsFd for OwnFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Deref for OwnFd {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.file
    }
}

/// The lock of [`ENTRIES`] during a fork.
struct DuringFork(UnsafeCell<Option<RankedGuard<'static, BTreeMap<u64, Entry>>>>);

// SAFETY: the cell is accessed only by the thread that holds the lock whose guard it stores.
unsafe impl Sync for DuringFork {}

static DURING_FORK: DuringFork = DuringFork(UnsafeCell::new(None));

/// Runs before the fork: no entry changes during the fork. The lock is held for moments only.
extern "C" fn before() {
    let guard = entries();
    // SAFETY: this thread holds the lock, so that no other thread accesses the cell.
    unsafe { *DURING_FORK.0.get() = Some(guard) };
}

extern "C" fn in_parent() {
    // SAFETY: this thread has taken the lock in `before`, so that no other thread accesses the
    // cell.
    drop(unsafe { (*DURING_FORK.0.get()).take() });
}

/// Runs in the child. Only calls that are safe in a signal handler: other threads of the parent may
/// have held any lock.
extern "C" fn in_child() {
    // SAFETY: the child has one thread.
    let Some(guard) = (unsafe { (*DURING_FORK.0.get()).take() }) else {
        return;
    };
    // SAFETY: `eventfd` and `close` take integers. The mapping at each address is registered until
    // it is unmapped (the contract of `Inherited::memory`), and is accessed as shared memory that
    // others may change at any time: its replacement has the same size, and reads as zeros. A
    // descriptor of an `OwnFd` is open: `dup3` replaces the file behind it and keeps its number.
    unsafe {
        let errno = *libc::__errno_location();
        let empty = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        for entry in guard.values() {
            match *entry {
                Entry::Memory(address, len) => {
                    libc::mmap(
                        ptr::with_exposed_provenance_mut(address),
                        len,
                        libc::PROT_READ | libc::PROT_WRITE,
                        libc::MAP_PRIVATE
                            | libc::MAP_ANONYMOUS
                            | libc::MAP_NORESERVE
                            | libc::MAP_FIXED,
                        -1,
                        0,
                    );
                }
                Entry::File(file) if empty >= 0 => {
                    libc::dup3(empty, file, libc::O_CLOEXEC);
                }
                Entry::File(_) => {}
            }
        }
        if empty >= 0 {
            libc::close(empty);
        }
        *libc::__errno_location() = errno;
    }
    drop(guard);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::memory::{SharedWords as _, Window};
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;

    /// Runs `child` in a forked child and returns its exit status. The closure must not allocate
    /// locks that other threads of the test hold, and must not panic.
    fn fork(child: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child calls `child` and `_exit` only.
        let id = unsafe { libc::fork() };
        assert!(id >= 0, "{}", std::io::Error::last_os_error());
        if id == 0 {
            let is_right = child();
            // SAFETY: ends the child without the exit handlers of the test.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        let mut status = -1;
        // SAFETY: the pointer is that of a local.
        assert_eq!(unsafe { libc::waitpid(id, &raw mut status, 0) }, id);
        status == 0
    }

    #[test]
    fn owner_is_current_in_its_process_only() {
        let owner = Owner::current();
        assert!(owner.is_current());
        assert!(fork(|| {
            let child = Owner::current();
            // A grandchild differs from both.
            !owner.is_current()
                && child.is_current()
                && fork(|| !owner.is_current() && !child.is_current())
        }));
        assert!(owner.is_current());
        assert_eq!(owner, Owner::current());
    }

    #[test]
    fn child_makes_a_value_of_its_own_even_if_the_lock_is_held() {
        static VALUE: PerProcess<Mutex<u32>> = PerProcess::new();
        let value = VALUE.get_or_init(|| Mutex::new(1));
        let held = value.lock().unwrap();
        assert!(fork(|| *VALUE
            .get_or_init(|| Mutex::new(2))
            .lock()
            .unwrap()
            == 2));
        drop(held);
        assert_eq!(*VALUE.get_or_init(|| Mutex::new(3)).lock().unwrap(), 1);
    }

    #[test]
    fn child_has_neither_memory_nor_files_of_its_parent() {
        let window = Window::anonymous(8192).unwrap();
        window.store(4096, 5);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ours = OwnFd::new(ours);
        let number = ours.as_raw_fd();
        assert!(fork(|| {
            let is_zero = window.load(4096) == 0;
            window.store(4096, 6);
            let written = rustix::io::write(&*ours, b"x");
            // The descriptor is still open, so that no other file of the child gets its number.
            // SAFETY: `F_GETFD` takes a number.
            let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
            is_zero
                && window.load(4096) == 6
                && written == Err(rustix::io::Errno::INVAL)
                && flags == libc::FD_CLOEXEC
        }));
        assert_eq!(window.load(4096), 5, "the child has written it");
        // The child held no copy of the socket: this end is the last.
        drop(ours);
        let mut byte = [0];
        assert_eq!(rustix::io::read(&theirs, &mut byte), Ok(0));
    }

    #[test]
    fn dropped_entries_are_forgotten() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let file = OwnFd::new(ours);
        let key = file._inherited.0;
        assert!(entries().contains_key(&key));
        drop(file);
        assert!(!entries().contains_key(&key));
    }
}
