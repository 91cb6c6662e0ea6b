//! Locks with a rank. A build with debug assertions checks their order at each use.
//!
//! A thread takes locks in ascending rank, and never two of one rank. The check needs no second
//! thread and no bad luck: one thread that takes two locks in the wrong order is enough. Without
//! debug assertions a lock costs what a [`Mutex`] costs.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// The place of a lock in the order, lowest first. `session` says what each lock is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// `DeviceContext::current`.
    Device,
    /// `Backend::encoder`.
    Encoder,
    /// `WeightUpload::state`.
    Upload,
    /// `SharedConnection::connection`.
    Connection,
    /// `Session::open_uploads`, `Event::point`.
    Innermost,
}

/// A mutex with a rank. A panic of another thread that held the lock does not matter: each owner
/// says why its data is valid all the same.
#[derive(Debug)]
pub(crate) struct RankedMutex<T> {
    rank: Rank,
    mutex: Mutex<T>,
}

/// The lock of a [`RankedMutex`].
pub(crate) struct RankedGuard<'a, T> {
    guard: MutexGuard<'a, T>,
    _held: Held,
}

impl<T> RankedMutex<T> {
    /// A mutex around `value`.
    pub(crate) const fn new(rank: Rank, value: T) -> RankedMutex<T> {
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
    pub(crate) fn lock(&self) -> RankedGuard<'_, T> {
        held::check(self.rank);
        RankedGuard {
            guard: self.mutex.lock().unwrap_or_else(PoisonError::into_inner),
            _held: Held::new(self.rank),
        }
    }

    /// The lock, if it is free. Never waits, so that any order is right.
    pub(crate) fn try_lock(&self) -> Option<RankedGuard<'_, T>> {
        let guard = match self.mutex.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(RankedGuard {
            guard,
            _held: Held::new(self.rank),
        })
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

/// A rank that the thread holds a lock of.
struct Held {
    #[cfg(debug_assertions)]
    rank: Rank,
}

#[cfg(debug_assertions)]
mod held {
    use super::{Held, Rank};
    use std::cell::Cell;

    thread_local! {
        /// The number of locks of each rank that the thread holds.
        static HELD: Cell<[u8; Rank::Innermost as usize + 1]> = const { Cell::new([0; _]) };
    }

    fn change(rank: Rank, change: impl FnOnce(u8) -> u8) {
        let mut held = HELD.get();
        held[rank as usize] = change(held[rank as usize]);
        HELD.set(held);
    }

    /// Panics if the thread holds a lock of this rank or of a higher one.
    pub(super) fn check(rank: Rank) {
        let above = HELD.get()[rank as usize..].iter().position(|&n| n > 0);
        assert!(
            above.is_none(),
            "a lock of rank {rank:?} is taken by a thread that holds one of rank {}",
            rank as usize + above.unwrap_or(0)
        );
    }

    impl Held {
        pub(super) fn new(rank: Rank) -> Held {
            change(rank, |n| n.saturating_add(1));
            Held { rank }
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            change(self.rank, |n| n.saturating_sub(1));
        }
    }
}

#[cfg(not(debug_assertions))]
mod held {
    use super::{Held, Rank};

    pub(super) fn check(_: Rank) {}

    impl Held {
        pub(super) fn new(_: Rank) -> Held {
            Held {}
        }
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    #[test]
    fn locks_are_taken_in_ascending_rank() {
        let [device, upload, connection] =
            [Rank::Device, Rank::Upload, Rank::Connection].map(|rank| RankedMutex::new(rank, ()));
        let is_refused = |lock: &RankedMutex<()>| {
            let taken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                drop(lock.lock());
            }));
            taken.is_err()
        };
        let first = device.lock();
        let second = connection.lock();
        assert!(is_refused(&upload), "the order of an ABBA deadlock");
        assert!(
            is_refused(&device) && is_refused(&connection),
            "a second time"
        );
        assert!(upload.try_lock().is_some(), "never waits");
        // The order of the releases does not matter.
        drop(first);
        assert!(is_refused(&upload));
        drop(second);
        assert!(!is_refused(&upload) && !is_refused(&device));
        // The locks of another thread do not matter.
        let held = connection.lock();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!is_refused(&upload)));
        });
        drop(held);
    }
}
