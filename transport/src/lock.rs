//! Locks, whose order a build with debug assertions checks at each use.
//!
//! A thread takes locks in ascending rank, and never two of one rank. The check needs no second
//! thread and no bad luck: one thread that takes two locks in the wrong order is enough. The panic
//! names the places of both locks. Without debug assertions a lock costs what a [`Mutex`] costs.
//!
//! A crate declares its ranks as a type with [`LockRank`]. The ranks of the plugin lie below those
//! of the executor: with the executor in the same process, the plugin may call it under a lock.
//! A mutex without a rank, which [`lock`] takes, counts as one of the last rank: it is innermost.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// The number of levels for ranks. The level above them is that of the mutexes without a rank.
pub const LEVELS: usize = 48;

/// The first level of the executor. Those of the plugin are below.
pub const EXECUTOR: usize = 16;

/// The level of the locks under which an engine copies shared bytes, charges a guest for the copies
/// and asks whether they are still wanted. It is among the levels of the executor: below the locks
/// of its memory accounts and of its scheduler.
pub const CHARGING: usize = EXECUTOR + 7;

/// The first level of the engines' other locks: the executor may call an engine under a lock.
pub const ENGINES: usize = 32;

/// The first level of the locks of a device below an engine.
pub const DEVICES: usize = 44;

/// The level of the mutexes without a rank.
const UNRANKED: usize = LEVELS;

/// The level of the register of what a forked child does not inherit (`fork`). Opening, mapping and
/// closing change the register, whatever lock is held meanwhile.
const FORK_REGISTER: usize = LEVELS + 1;

/// Locks a mutex without a rank, whose data is valid after a panic of another thread, too. Nothing
/// else is locked, called or waited for under such a lock, unless its owner says what.
///
/// # Panics
///
/// With debug assertions, if the thread holds another lock of a mutex without a rank.
#[cfg_attr(debug_assertions, track_caller)]
pub fn lock<T>(mutex: &Mutex<T>) -> Guard<'_, T> {
    held::check(UNRANKED, &"none");
    Guard::of(lock_unchecked(mutex), UNRANKED)
}

/// As [`lock`], if the mutex is free. `None`: another thread has it. Never waits, so that any order
/// is right.
#[cfg_attr(debug_assertions, track_caller)]
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<Guard<'_, T>> {
    Some(Guard::of(try_lock_unchecked(mutex)?, UNRANKED))
}

/// As [`lock`], for a mutex under which other locks are taken: `rank` is its place in the order,
/// the same at each use.
///
/// # Panics
///
/// With debug assertions, if the thread holds a lock of the same or a higher rank.
#[cfg_attr(debug_assertions, track_caller)]
pub fn lock_at<T>(rank: impl LockRank, mutex: &Mutex<T>) -> Guard<'_, T> {
    let level = rank.level();
    held::check(level, &rank);
    Guard::of(lock_unchecked(mutex), level)
}

fn lock_unchecked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn try_lock_unchecked<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
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

/// Releases a lock, waits for a notification, and takes the lock again.
pub fn wait<'a, T>(notified: &Condvar, guard: Guard<'a, T>) -> Guard<'a, T> {
    let Guard { guard, held } = guard;
    let guard = notified.wait(guard).unwrap_or_else(PoisonError::into_inner);
    Guard { guard, held }
}

/// As [`wait`], for at most `timeout`.
pub fn wait_timeout<'a, T>(
    notified: &Condvar,
    guard: Guard<'a, T>,
    timeout: Duration,
) -> Guard<'a, T> {
    let Guard { guard, held } = guard;
    let waited = notified.wait_timeout(guard, timeout);
    let guard = waited.unwrap_or_else(PoisonError::into_inner).0;
    Guard { guard, held }
}

/// As [`wait_timeout`], again and again while `condition` holds.
pub fn wait_timeout_while<'a, T>(
    notified: &Condvar,
    guard: Guard<'a, T>,
    timeout: Duration,
    condition: impl FnMut(&mut T) -> bool,
) -> Guard<'a, T> {
    let Guard { guard, held } = guard;
    let waited = notified.wait_timeout_while(guard, timeout, condition);
    let guard = waited.unwrap_or_else(PoisonError::into_inner).0;
    Guard { guard, held }
}

/// The lock of a mutex.
pub struct Guard<'a, T> {
    // Fields are dropped in this order: the thread holds the lock for as long as it is counted.
    guard: MutexGuard<'a, T>,
    held: Held,
}

impl<'a, T> Guard<'a, T> {
    #[cfg_attr(debug_assertions, track_caller)]
    fn of(guard: MutexGuard<'a, T>, level: usize) -> Guard<'a, T> {
        let held = Held::new(level);
        Guard { guard, held }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T: fmt::Debug> fmt::Debug for Guard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.guard.fmt(f)
    }
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
#[derive(Debug)]
pub struct RankedGuard<'a, T>(Guard<'a, T>);

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
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn lock(&self) -> RankedGuard<'_, T> {
        RankedGuard(lock_at(self.rank, &self.mutex))
    }

    /// The value, which no other thread can use.
    pub fn get_mut(&mut self) -> &mut T {
        get_mut(&mut self.mutex)
    }

    /// The lock, if it is free. Never waits, so that any order is right.
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn try_lock(&self) -> Option<RankedGuard<'_, T>> {
        let guard = try_lock_unchecked(&self.mutex)?;
        Some(RankedGuard(Guard::of(guard, self.rank.level())))
    }
}

impl<'a, T> RankedGuard<'a, T> {
    /// Releases the lock, waits for a notification, and takes the lock again.
    #[must_use]
    pub fn wait(self, notified: &Condvar) -> RankedGuard<'a, T> {
        RankedGuard(wait(notified, self.0))
    }

    /// As [`wait`](RankedGuard::wait), for at most `timeout`.
    #[must_use]
    pub fn wait_timeout(self, notified: &Condvar, timeout: Duration) -> RankedGuard<'a, T> {
        RankedGuard(wait_timeout(notified, self.0, timeout))
    }
}

impl<T> Deref for RankedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for RankedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// The rank of the register of what a forked child does not inherit, above all others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForkRegister;

impl LockRank for ForkRegister {
    fn level(self) -> usize {
        FORK_REGISTER
    }
}

/// Checks that the thread holds no lock of this level or a higher one: `what` may take long, or for
/// ever.
///
/// # Panics
///
/// With debug assertions, if the thread holds such a lock.
#[cfg_attr(debug_assertions, track_caller)]
pub fn expect_unlocked(level: usize, what: &str) {
    held::expect_none(level, 0..0, what);
}

/// As [`expect_unlocked`], but for locks of the levels `allowed`.
///
/// # Panics
///
/// With debug assertions, if the thread holds such a lock.
#[cfg_attr(debug_assertions, track_caller)]
pub fn expect_unlocked_but(level: usize, allowed: Range<usize>, what: &str) {
    held::expect_none(level, allowed, what);
}

/// A level that the thread holds a lock of.
struct Held {
    #[cfg(debug_assertions)]
    level: usize,
}

#[cfg(debug_assertions)]
mod held {
    use std::cell::Cell;
    use std::fmt;
    use std::ops::Range;
    use std::panic::Location;

    use super::{FORK_REGISTER, Held, UNRANKED};

    /// The locks of one level that a thread holds.
    struct Level {
        locks: Cell<u8>,
        /// Where the last one was taken.
        place: Cell<&'static Location<'static>>,
    }

    thread_local! {
        static HELD: [Level; FORK_REGISTER + 1] = const {
            [const {
                Level {
                    locks: Cell::new(0),
                    place: Cell::new(Location::caller()),
                }
            }; _]
        };
    }

    /// The lowest level, from `level` up and none of `allowed`, that the thread holds a lock of,
    /// with the place where that lock was taken.
    fn lowest_from(
        level: usize,
        allowed: &Range<usize>,
    ) -> Option<(usize, &'static Location<'static>)> {
        HELD.with(|held| {
            let is_held = |at: &usize| !allowed.contains(at) && held[*at].locks.get() > 0;
            let at = (level..held.len()).find(is_held)?;
            Some((at, held[at].place.get()))
        })
    }

    /// Panics with a message about a lock that the thread holds.
    fn fail(what: fmt::Arguments<'_>, (level, place): (usize, &Location<'_>)) -> ! {
        let kind = match level {
            UNRANKED => "a lock without a rank",
            _ => "a lock",
        };
        panic!("{what} by a thread that holds {kind} of level {level}, taken at {place}")
    }

    /// Panics if the thread holds a lock of this level or of a higher one.
    ///
    /// A thread that panics runs the panic hook and drops its values under the locks that it holds:
    /// the first message counts.
    #[track_caller]
    pub(super) fn check(level: usize, rank: &dyn fmt::Debug) {
        if std::thread::panicking() {
            return;
        }
        if let Some(held) = lowest_from(level, &(0..0)) {
            let place = Location::caller();
            fail(
                format_args!("a lock of rank {rank:?} ({level}) is taken at {place}"),
                held,
            );
        }
    }

    /// Panics if the thread holds a lock of this level or of a higher one, but for those of
    /// `allowed`.
    #[track_caller]
    pub(super) fn expect_none(level: usize, allowed: Range<usize>, what: &str) {
        if std::thread::panicking() {
            return;
        }
        if let Some(held) = lowest_from(level, &allowed) {
            let place = Location::caller();
            fail(format_args!("{what} is called at {place}"), held);
        }
    }

    impl Held {
        #[track_caller]
        pub(super) fn new(level: usize) -> Held {
            let place = Location::caller();
            HELD.with(|held| {
                let one = &held[level];
                one.locks.set(one.locks.get().saturating_add(1));
                one.place.set(place);
            });
            Held { level }
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            HELD.with(|held| {
                let one = &held[self.level];
                one.locks.set(one.locks.get().saturating_sub(1));
            });
        }
    }
}

#[cfg(not(debug_assertions))]
mod held {
    use std::fmt;
    use std::ops::Range;

    use super::Held;

    #[inline(always)]
    pub(super) fn check(_: usize, _: &dyn fmt::Debug) {}

    #[inline(always)]
    pub(super) fn expect_none(_: usize, _: Range<usize>, _: &str) {}

    impl Held {
        #[inline(always)]
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

    /// What a panic of `work` says.
    fn panic_of(work: &dyn Fn()) -> String {
        let panic = catch_unwind(AssertUnwindSafe(work)).expect_err("no panic");
        panic.downcast_ref::<String>().expect("a text").clone()
    }

    #[test]
    fn mutexes_without_a_rank_are_innermost() {
        let [outer, fork] = [0, FORK_REGISTER].map(|level| RankedMutex::new(Level(level), ()));
        let [plain, other] = [(); 2].map(Mutex::new);
        let under = outer.lock();
        let held = lock(&plain);
        let place = format!("{}:{}:", file!(), line!() - 1);
        drop(under);
        for (rank, take) in [
            ("Level(0) (0)", &(|| drop(outer.lock())) as &dyn Fn()),
            ("Level(3) (3)", &|| drop(lock_at(Level(3), &other))),
            ("\"none\" (48)", &|| drop(lock(&other))),
        ] {
            let said = panic_of(take);
            let begin = format!("a lock of rank {rank} is taken at {}:", file!());
            assert!(said.starts_with(&begin), "{said}");
            let end = format!("that holds a lock without a rank of level 48, taken at {place}");
            assert!(said.contains(&end), "{said}");
        }
        let said = panic_of(&|| expect_unlocked(EXECUTOR, "a driver"));
        assert!(said.starts_with("a driver is called at"), "{said}");
        assert!(said.contains(&place), "{said}");
        // Never wait, or are above all others.
        drop(try_lock(&other).expect("it is free"));
        drop(outer.try_lock().expect("it is free"));
        drop(fork.lock());
        // A thread that waits for a notification holds the lock again afterwards.
        let changed = Condvar::new();
        let held = wait_timeout(&changed, held, Duration::ZERO);
        let held = wait_timeout_while(&changed, held, Duration::ZERO, |_| true);
        panic_of(&|| drop(lock(&other)));
        drop(held);
        // One that was free counts as well.
        let held = try_lock(&plain).expect("it is free");
        panic_of(&|| drop(lock(&other)));
        drop(held);
        drop(lock(&other));
        expect_unlocked(0, "a driver");
    }
}
