//! Locks with a rank. A build with debug assertions checks their order at each use.
//!
//! A thread takes locks in ascending rank, and never two of one rank. The check needs no second
//! thread and no bad luck: one thread that takes two locks in the wrong order is enough. Without
//! debug assertions a lock costs what a [`Mutex`] costs.
//!
//! A crate declares its ranks as a type with [`LockRank`]. The ranks of the plugin lie below those
//! of the executor: with the executor in the same process, the plugin may call it under a lock.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// The number of levels.
pub const LEVELS: usize = 32;

/// Locks a mutex without a rank, whose data is valid after a panic of another thread, too. Nothing
/// else is locked, called or waited for under such a lock, unless its owner says what.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`lock`], if the mutex is free. `None`: another thread has it.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// The value of a mutex as for [`lock`], which no other thread can use.
pub fn get_mut<T>(mutex: &mut Mutex<T>) -> &mut T {
    mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// The value of a mutex as for [`lock`], which is not needed any more.
pub fn into_inner<T>(mutex: Mutex<T>) -> T {
    mutex.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Releases a lock as of [`lock`], waits for a notification, and takes the lock again.
pub fn wait<'a, T>(notified: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    notified.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// As [`wait`], for at most `timeout`.
pub fn wait_timeout<'a, T>(
    notified: &Condvar,
    guard: MutexGuard<'a, T>,
    timeout: Duration,
) -> MutexGuard<'a, T> {
    let waited = notified.wait_timeout(guard, timeout);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

/// As [`wait_timeout`], again and again while `condition` holds.
pub fn wait_timeout_while<'a, T>(
    notified: &Condvar,
    guard: MutexGuard<'a, T>,
    timeout: Duration,
    condition: impl FnMut(&mut T) -> bool,
) -> MutexGuard<'a, T> {
    let waited = notified.wait_timeout_while(guard, timeout, condition);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

/// The place of a lock in the order.
pub trait LockRank: Copy + fmt::Debug {
    /// The level, less than [`LEVELS`]. Locks are taken from the lowest level up.
    fn level(self) -> usize;
}

/// A mutex with a rank. A panic of another thread that held the lock does not matter: each owner
/// says why its data is valid all the same.
#[derive(Debug)]
pub struct RankedMutex<R, T> {
    rank: R,
    mutex: Mutex<T>,
}

/// The lock of a [`RankedMutex`].
pub struct RankedGuard<'a, T> {
    // Fields are dropped in this order: the thread holds the lock for as long as it is counted.
    guard: MutexGuard<'a, T>,
    held: Held,
}

impl<R: LockRank, T> RankedMutex<R, T> {
    /// A mutex around `value`.
    pub const fn new(rank: R, value: T) -> RankedMutex<R, T> {
        RankedMutex {
            rank,
            mutex: Mutex::new(value),
        }
    }

    /// Waits for the lock.
    ///
    /// # Panics
    ///
    /// With debug assertions, if the thread holds a lock of the same or a higher rank.
    pub fn lock(&self) -> RankedGuard<'_, T> {
        held::check(self.rank);
        RankedGuard {
            guard: lock(&self.mutex),
            held: Held::new(self.rank.level()),
        }
    }

    /// The value, which no other thread can use.
    pub fn get_mut(&mut self) -> &mut T {
        get_mut(&mut self.mutex)
    }

    /// The lock, if it is free. Never waits, so that any order is right.
    pub fn try_lock(&self) -> Option<RankedGuard<'_, T>> {
        Some(RankedGuard {
            guard: try_lock(&self.mutex)?,
            held: Held::new(self.rank.level()),
        })
    }
}

impl<'a, T> RankedGuard<'a, T> {
    /// Releases the lock, waits for a notification, and takes the lock again.
    #[must_use]
    pub fn wait(self, notified: &Condvar) -> RankedGuard<'a, T> {
        let RankedGuard { guard, held } = self;
        let guard = wait(notified, guard);
        RankedGuard { guard, held }
    }

    /// As [`wait`](RankedGuard::wait), for at most `timeout`.
    #[must_use]
    pub fn wait_timeout(self, notified: &Condvar, timeout: Duration) -> RankedGuard<'a, T> {
        let RankedGuard { guard, held } = self;
        let guard = wait_timeout(notified, guard, timeout);
        RankedGuard { guard, held }
    }
}

impl<T> Deref for RankedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for RankedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Checks that the thread holds no lock of this level or a higher one: `what` may take long, or for
/// ever.
///
/// # Panics
///
/// With debug assertions, if the thread holds such a lock.
pub fn expect_unlocked(level: usize, what: &str) {
    held::expect_none(level, what);
}

/// A level that the thread holds a lock of.
struct Held {
    #[cfg(debug_assertions)]
    level: usize,
}

#[cfg(debug_assertions)]
mod held {
    use super::{Held, LEVELS, LockRank};
    use std::cell::Cell;

    thread_local! {
        /// The number of locks of each level that the thread holds.
        static HELD: Cell<[u8; LEVELS]> = const { Cell::new([0; _]) };
    }

    fn change(level: usize, change: impl FnOnce(u8) -> u8) {
        let mut held = HELD.get();
        held[level] = change(held[level]);
        HELD.set(held);
    }

    /// The lowest level, from `level` up, that the thread holds a lock of.
    fn lowest_from(level: usize) -> Option<usize> {
        let above = HELD.get()[level..].iter().position(|&n| n > 0)?;
        Some(level + above)
    }

    /// Panics if the thread holds a lock of this rank or of a higher one.
    pub(super) fn check(rank: impl LockRank) {
        let above = lowest_from(rank.level());
        assert!(
            above.is_none(),
            "a lock of rank {rank:?} ({}) is taken by a thread that holds one of level {above:?}",
            rank.level(),
        );
    }

    /// Panics if the thread holds a lock of this level or of a higher one.
    pub(super) fn expect_none(level: usize, what: &str) {
        let above = lowest_from(level);
        assert!(
            above.is_none(),
            "{what} is called by a thread that holds a lock of level {above:?}"
        );
    }

    impl Held {
        pub(super) fn new(level: usize) -> Held {
            change(level, |n| n.saturating_add(1));
            Held { level }
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            change(self.level, |n| n.saturating_sub(1));
        }
    }
}

#[cfg(not(debug_assertions))]
mod held {
    use super::{Held, LockRank};

    pub(super) fn check(_: impl LockRank) {}

    pub(super) fn expect_none(_: usize, _: &str) {}

    impl Held {
        pub(super) fn new(_: usize) -> Held {
            Held {}
        }
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[derive(Debug, Clone, Copy)]
    struct Level(usize);

    impl LockRank for Level {
        fn level(self) -> usize {
            self.0
        }
    }

    #[test]
    fn locks_are_taken_in_ascending_rank() {
        let [device, upload, connection] =
            [0, 2, 3].map(|level| RankedMutex::new(Level(level), ()));
        let panics = |work: &dyn Fn()| catch_unwind(AssertUnwindSafe(work)).is_err();
        let is_refused = |lock: &RankedMutex<Level, ()>| panics(&|| drop(lock.lock()));
        let first = device.lock();
        let second = connection.lock();
        assert!(is_refused(&upload), "the order of an ABBA deadlock");
        assert!(
            is_refused(&device) && is_refused(&connection),
            "a second time"
        );
        assert!(upload.try_lock().is_some(), "never waits");
        assert!(panics(&|| expect_unlocked(3, "a driver")));
        expect_unlocked(4, "a driver");
        // The order of the releases does not matter.
        drop(first);
        assert!(is_refused(&upload));
        // A thread that waits for a notification holds the lock again afterwards.
        let second = second.wait_timeout(&Condvar::new(), Duration::ZERO);
        assert!(is_refused(&upload));
        drop(second);
        assert!(!is_refused(&upload) && !is_refused(&device));
        expect_unlocked(0, "a driver");
        // The locks of another thread do not matter.
        let held = connection.lock();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!is_refused(&upload)));
        });
        drop(held);
    }
}
