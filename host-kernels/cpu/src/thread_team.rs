//! Threads that sleep until there is a graph, and meet while there is one.
//!
//! Whoever runs a graph is the first of its threads, so that a graph begins at once, and ends without anybody being woken.
//! Waiting is bounded spinning, since what is waited for is mostly microseconds away; then the processor is offered to
//! others some times; then the thread sleeps. Nothing here allocates once the threads exist.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::thread::{CpuSet, futex, sched_setaffinity};

use vgpu_engine::EngineError;

/// Turns of a waiting loop before a thread lets others run: some ten microseconds.
const SPINS: u32 = 4096;

/// How often it then lets others run before it sleeps. On a busy machine each of these costs a slice of time, and who has
/// slept is served before who has only made way.
const YIELDS: u32 = 4;

/// A number that threads wait to see changed.
#[derive(Default)]
struct Signal {
    value: AtomicU32,
    sleepers: AtomicU32,
}

impl Signal {
    fn get(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Changes it. What the caller did before, those who wait see after.
    fn set(&self, value: u32) {
        // SeqCst, as in `wait`: either this thread sees a sleeper, or the sleeper sees the value before it sleeps.
        self.value.store(value, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            // It fails for addresses that are none.
            let _ = futex::wake(&self.value, futex::Flags::PRIVATE, i32::MAX as u32);
        }
    }

    /// Returns when it is no longer `old`.
    fn wait(&self, old: u32) {
        for turn in 0..SPINS + YIELDS {
            if self.get() != old {
                return;
            }
            match turn < SPINS {
                true => std::hint::spin_loop(),
                // More threads than free cores: the one we wait for may need this core.
                false => thread::yield_now(),
            }
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.value.load(Ordering::SeqCst) == old {
            // Returns at once if the value has changed meanwhile, and now and then for no reason.
            let _ = futex::wait(&self.value, futex::Flags::PRIVATE, old, None);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Where threads wait for each other.
pub(super) struct Barrier {
    members: usize,
    arrived: AtomicUsize,
    generation: Signal,
}

impl Barrier {
    pub(super) fn new(members: usize) -> Barrier {
        Barrier {
            members,
            arrived: AtomicUsize::new(0),
            generation: Signal::default(),
        }
    }

    /// Returns when all members have called it. What any did before, all see after.
    pub(super) fn wait(&self) {
        let generation = self.generation.value.load(Ordering::Relaxed);
        // AcqRel: a release of our work to the last to arrive, which acquires everybody's.
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.members {
            // Nobody can arrive again before the generation changes, so this store races with nothing.
            self.arrived.store(0, Ordering::Relaxed);
            // Passes on all that the last one has acquired.
            self.generation.set(generation.wrapping_add(1));
        } else {
            self.generation.wait(generation);
        }
    }
}

/// What every thread does: a function of its number. It lives until `ThreadTeam::run` returns.
type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Counts jobs; the last change is the order to end.
    orders: Signal,
    job: UnsafeCell<Option<Job>>,
    /// Threads that have not finished the job.
    left: AtomicUsize,
    /// Counts finished jobs.
    done: Signal,
    ends: AtomicBool,
    /// What a thread panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: the job is written by whoever runs one while no thread is at work, and read by the threads between the order and
// their last decrement of `left`; both are orderings that pass it on. What it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// Some threads. Runs one job at a time.
pub(super) struct ThreadTeam {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Whether the caller of a job is one of those who do it.
    caller_works: bool,
}

impl ThreadTeam {
    /// A team of `count`, at least one. With `places`, thread `i` stays on the processors of place `i`, in turns; whoever
    /// runs a job then only waits, since the caller's thread is not ours to move.
    pub(super) fn new(count: usize, places: &[CpuSet]) -> Result<ThreadTeam, EngineError> {
        let shared = Arc::new(Shared {
            orders: Signal::default(),
            job: UnsafeCell::new(None),
            left: AtomicUsize::new(0),
            done: Signal::default(),
            ends: AtomicBool::new(false),
            panic: Mutex::default(),
        });
        let mut team = ThreadTeam {
            shared,
            threads: Vec::new(),
            caller_works: places.is_empty(),
        };
        let failed = |e: std::io::Error| EngineError::Unsupported {
            op: "a team of threads",
            why: e.to_string(),
        };
        for index in usize::from(team.caller_works)..count {
            let shared = Arc::clone(&team.shared);
            let place = (!places.is_empty()).then(|| places[index % places.len()]);
            let (tell, told) = std::sync::mpsc::sync_channel(1);
            let thread = thread::Builder::new()
                .name(format!("vgpu-cpu-{index}"))
                .spawn(move || {
                    let outcome = place.map_or(Ok(()), |place| sched_setaffinity(None, &place));
                    let _ = tell.send(outcome);
                    shared.work(index);
                });
            team.threads.push(thread.map_err(failed)?);
            let placed = told.recv().unwrap_or(Ok(()));
            placed.map_err(|e| failed(e.into()))?;
        }
        Ok(team)
    }

    /// How many do a job.
    pub(super) fn size(&self) -> usize {
        self.threads.len() + usize::from(self.caller_works)
    }

    /// Has every thread call `body` with its number, and returns when all have. For one caller at a time.
    ///
    /// # Safety
    /// Nobody else is in this function.
    pub(super) unsafe fn run(&self, body: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        if !self.threads.is_empty() {
            let before = shared.done.get();
            // SAFETY: only a lifetime is left out, which `body` outlives: this function does not return, nor unwind, before
            // all threads are done with it.
            let job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(body) };
            // SAFETY: no thread is at work, and nobody else is here.
            unsafe { *shared.job.get() = Some(job) };
            shared.left.store(self.threads.len(), Ordering::Relaxed);
            shared.orders.set(shared.orders.get().wrapping_add(1));
            let own = self
                .caller_works
                .then(|| catch_unwind(AssertUnwindSafe(|| body(0))));
            shared.done.wait(before);
            let theirs = lock(&shared.panic).take();
            if let Some(panic) = own.and_then(Result::err).or(theirs) {
                resume_unwind(panic);
            }
        } else {
            body(0);
        }
    }
}

impl Drop for ThreadTeam {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        self.shared
            .orders
            .set(self.shared.orders.get().wrapping_add(1));
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "jobs catch their panics");
        }
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut order = 0;
        loop {
            self.orders.wait(order);
            order = order.wrapping_add(1);
            if self.ends.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: the order was given after the job was written, which stays until this thread is done.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            let outcome = catch_unwind(AssertUnwindSafe(|| job.map_or((), |job| job(index))));
            if let Err(panic) = outcome {
                lock(&self.panic).get_or_insert(panic);
            }
            // AcqRel: a release of our work to the last, which passes everybody's on.
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.done.set(self.done.get().wrapping_add(1));
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn every_thread_does_every_job_once() {
        for places in [
            vec![],
            vec![rustix::thread::sched_getaffinity(None).unwrap()],
        ] {
            let team = ThreadTeam::new(3, &places).unwrap();
            assert_eq!(team.size(), 3);
            let counts = [const { AtomicUsize::new(0) }; 3];
            for _ in 0..1000 {
                // SAFETY: nobody else has this team.
                unsafe {
                    team.run(&|i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                }
            }
            assert!(counts.iter().all(|n| n.load(Ordering::Relaxed) == 1000));
        }
    }

    #[test]
    fn a_panic_comes_out_when_all_are_done_and_the_crew_goes_on() {
        let team = ThreadTeam::new(3, &[]).unwrap();
        for who in 0..3 {
            let done = AtomicUsize::new(0);
            let body = |i: usize| {
                if i == who {
                    panic!("boom");
                }
                thread::sleep(Duration::from_millis(2));
                done.fetch_add(1, Ordering::Relaxed);
            };
            // SAFETY: nobody else has this team.
            let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { team.run(&body) }));
            assert!(outcome.is_err());
            assert_eq!(done.load(Ordering::Relaxed), 2);
        }
    }

    #[test]
    fn threads_stay_where_they_were_put() {
        let all = rustix::thread::sched_getaffinity(None).unwrap();
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&i| all.is_set(i)).collect();
        let places: Vec<CpuSet> = { cpus.iter() }
            .map(|&cpu| {
                let mut set = CpuSet::new();
                set.set(cpu);
                set
            })
            .collect();
        let team = ThreadTeam::new(cpus.len() + 1, &places).unwrap();
        let seen = Mutex::new(vec![Vec::new(); cpus.len() + 1]);
        let look = |i: usize| {
            let set = rustix::thread::sched_getaffinity(None).unwrap();
            let on = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
            lock(&seen)[i] = on.collect();
        };
        // SAFETY: nobody else has this team.
        unsafe { team.run(&look) };
        for (i, seen) in lock(&seen).iter().enumerate() {
            assert_eq!(*seen, [cpus[i % cpus.len()]], "thread {i}");
        }
        // The caller's thread was not moved.
        assert!(rustix::thread::sched_getaffinity(None).unwrap() == all);
        let mut nowhere = CpuSet::new();
        nowhere.set(CpuSet::MAX_CPU - 1);
        if cpus.last() != Some(&(CpuSet::MAX_CPU - 1)) {
            assert!(ThreadTeam::new(2, &[nowhere]).is_err());
        }
    }

    #[test]
    fn who_waits_long_sleeps() {
        let team = ThreadTeam::new(3, &[]).unwrap();
        let barrier = Barrier::new(3);
        let sleeping = AtomicBool::new(false);
        let body = |i: usize| {
            if i == 0 {
                // Patience, not a measure of speed.
                let end = Instant::now() + Duration::from_secs(20);
                let sleep = || barrier.generation.sleepers.load(Ordering::SeqCst) == 2;
                while !sleep() && Instant::now() < end {
                    thread::sleep(Duration::from_millis(1));
                }
                sleeping.store(sleep(), Ordering::Relaxed);
            }
            barrier.wait();
        };
        // SAFETY: nobody else has this team.
        unsafe { team.run(&body) };
        assert!(sleeping.load(Ordering::Relaxed));
        // Between jobs, too.
        let end = Instant::now() + Duration::from_secs(20);
        while team.shared.orders.sleepers.load(Ordering::SeqCst) != 2 {
            assert!(Instant::now() < end, "threads without a job are awake");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
