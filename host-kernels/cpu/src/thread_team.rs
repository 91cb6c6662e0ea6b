//! Threads that run one job at a time together, and the barrier that they meet at.
//!
//! The caller of a job is the first of its threads (unless the threads are pinned), so a job starts
//! and ends without waking a thread. A thread waits by spinning for about a tenth of a millisecond,
//! then yields the processor a few times, then sleeps on a futex. No function allocates once the
//! threads exist.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use rustix::thread::{CpuSet, futex, sched_setaffinity};

use vgpu_engine::EngineError;
use vgpu_transport::lock::lock;

/// Iterations of a waiting loop before a thread yields the processor. The instruction in the loop
/// (PAUSE) takes from 10 to 140 cycles, as the processor chooses: 0.1 ms in all on an AMD EPYC.
const SPINS: u32 = 4096;

/// How often the thread then yields before it sleeps. On a busy machine each yield costs a time
/// slice, and the scheduler prefers threads that have slept.
const YIELDS: u32 = 4;

/// A number that threads can wait on until it changes.
#[derive(Default)]
struct Signal {
    value: AtomicU32,
    sleepers: AtomicU32,
}

impl Signal {
    fn get(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Changes the value. Memory accesses of the caller before this call happen before memory
    /// accesses of a waiter after its wait.
    fn set(&self, value: u32) {
        // SeqCst, as in `wait`: either this thread sees the sleeper, or the sleeper sees the new
        // value before it sleeps.
        self.value.store(value, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            // A wake fails only for an invalid address.
            let _ = futex::wake(&self.value, futex::Flags::PRIVATE, i32::MAX as u32);
        }
    }

    /// Returns when the value is no longer `old`.
    fn wait(&self, old: u32) {
        for turn in 0..SPINS + YIELDS {
            if self.get() != old {
                return;
            }
            match turn < SPINS {
                true => std::hint::spin_loop(),
                // There may be more threads than free cores. Then the other thread may need this
                // core.
                false => thread::yield_now(),
            }
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.value.load(Ordering::SeqCst) == old {
            // Returns at once if the value has changed; it may also return spuriously.
            let _ = futex::wait(&self.value, futex::Flags::PRIVATE, old, None);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A barrier for a fixed number of threads.
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

    /// Returns when all members have called this function. Memory accesses of every member before
    /// its call happen before memory accesses of every member after its call.
    pub(super) fn wait(&self) {
        let generation = self.generation.value.load(Ordering::Relaxed);
        // AcqRel: each member releases its writes, and the last member to arrive acquires them.
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.members {
            // No member can arrive again before the generation changes, so this store races with
            // nothing.
            self.arrived.store(0, Ordering::Relaxed);
            // Releases the writes of all members, which this member has acquired.
            self.generation.set(generation.wrapping_add(1));
        } else {
            self.generation.wait(generation);
        }
    }
}

/// The function that every thread calls with its index. The pointer is valid until
/// `ThreadTeam::run` returns.
///
/// The pointer erases a lifetime, as `rayon::ThreadPool::broadcast` does internally. `broadcast`
/// takes ten times as long to start and end a job (docs/cpu-engine.md has the figures).
type Job = *const (dyn Fn(usize) + Sync);

struct TeamState {
    /// The number of jobs so far. The last change, with `ends`, ends the threads.
    orders: Signal,
    job: UnsafeCell<Option<Job>>,
    /// The number of threads that have not finished the job.
    left: AtomicUsize,
    /// The number of finished jobs.
    done: Signal,
    /// The threads end instead of running a job.
    ends: AtomicBool,
    /// The payload of the first panic.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `run` writes the job while no thread runs one. The threads read it between the change of
// `orders` and their decrement of `left`, which order the accesses. The job is `Sync`.
unsafe impl Sync for TeamState {}
// SAFETY: no field belongs to a particular thread. The job is a pointer to a closure that is
// `Sync`, and `run` waits until no thread runs it.
unsafe impl Send for TeamState {}

/// A fixed set of threads that run one job at a time together.
pub(super) struct ThreadTeam {
    shared: Arc<TeamState>,
    threads: Vec<JoinHandle<()>>,
    /// Whether the caller of a job runs it too, as thread 0.
    caller_works: bool,
}

impl ThreadTeam {
    /// A team of `count >= 1` threads. With `cpu_sets`, thread `i` is pinned to set `i` modulo
    /// their number; the caller of a job then only waits, because the engine must not pin the
    /// caller's thread.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] if a thread cannot be created or pinned.
    pub(super) fn new(count: usize, cpu_sets: &[CpuSet]) -> Result<ThreadTeam, EngineError> {
        let shared = Arc::new(TeamState {
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
            caller_works: cpu_sets.is_empty(),
        };
        let failed = |e: std::io::Error| EngineError::Unsupported {
            op: "a thread team",
            why: e.to_string(),
        };
        for index in usize::from(team.caller_works)..count {
            let shared = Arc::clone(&team.shared);
            let cpu_set = (!cpu_sets.is_empty()).then(|| cpu_sets[index % cpu_sets.len()]);
            let (sender, receiver) = std::sync::mpsc::sync_channel(1);
            let thread = thread::Builder::new()
                .name(format!("vgpu-cpu-{index}"))
                .spawn(move || {
                    let outcome = cpu_set.map_or(Ok(()), |set| sched_setaffinity(None, &set));
                    let _ = sender.send(outcome);
                    shared.work(index);
                });
            team.threads.push(thread.map_err(failed)?);
            let pinned = receiver.recv().unwrap_or(Ok(()));
            pinned.map_err(|e| failed(e.into()))?;
        }
        Ok(team)
    }

    /// The number of threads that run a job.
    pub(super) fn size(&self) -> usize {
        self.threads.len() + usize::from(self.caller_works)
    }

    /// Calls `body` on every thread with the index of the thread, and returns when all calls have
    /// returned. A panic of a call is resumed on the caller.
    ///
    /// # Safety
    /// No other call of this function is in progress.
    pub(super) unsafe fn run(&self, body: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        if !self.threads.is_empty() {
            let before = shared.done.get();
            // SAFETY: the cast only erases the lifetime. This function neither returns nor unwinds
            // before all threads have finished the job.
            let job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(body) };
            // SAFETY: the caller guarantees that no other call of `run` is in progress, so no
            // thread reads the job: the threads wait for the change of `orders` below.
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

impl TeamState {
    fn work(&self, index: usize) {
        let mut order = 0;
        loop {
            self.orders.wait(order);
            order = order.wrapping_add(1);
            if self.ends.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: `run` has written the job before it changed `orders`, and keeps it valid
            // until this thread has decremented `left`.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            let outcome = catch_unwind(AssertUnwindSafe(|| job.map_or((), |job| job(index))));
            if let Err(panic) = outcome {
                lock(&self.panic).get_or_insert(panic);
            }
            // AcqRel: each thread releases its writes. The last thread acquires them and releases
            // them to the caller by `done`.
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.done.set(self.done.get().wrapping_add(1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn every_thread_does_every_job_once() {
        for cpu_sets in [
            vec![],
            vec![rustix::thread::sched_getaffinity(None).unwrap()],
        ] {
            let team = ThreadTeam::new(3, &cpu_sets).unwrap();
            assert_eq!(team.size(), 3);
            let counts = [const { AtomicUsize::new(0) }; 3];
            for _ in 0..1000 {
                // SAFETY: this thread alone has the team.
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
    fn a_panic_is_resumed_when_all_are_done_and_the_team_stays_usable() {
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
            // SAFETY: this thread alone has the team.
            let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { team.run(&body) }));
            assert!(outcome.is_err());
            assert_eq!(done.load(Ordering::Relaxed), 2);
        }
    }

    #[test]
    fn threads_stay_on_their_assigned_cores() {
        let all = rustix::thread::sched_getaffinity(None).unwrap();
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&i| all.is_set(i)).collect();
        let cpu_sets: Vec<CpuSet> = { cpus.iter() }
            .map(|&cpu| {
                let mut set = CpuSet::new();
                set.set(cpu);
                set
            })
            .collect();
        let team = ThreadTeam::new(cpus.len() + 1, &cpu_sets).unwrap();
        let seen = Mutex::new(vec![Vec::new(); cpus.len() + 1]);
        let look = |i: usize| {
            let set = rustix::thread::sched_getaffinity(None).unwrap();
            let on = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
            lock(&seen)[i] = on.collect();
        };
        // SAFETY: this thread alone has the team.
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
    fn threads_that_wait_long_sleep() {
        let team = ThreadTeam::new(3, &[]).unwrap();
        let barrier = Barrier::new(3);
        let sleeping = AtomicBool::new(false);
        let body = |i: usize| {
            if i == 0 {
                // A generous limit: the test does not measure time.
                let end = Instant::now() + Duration::from_secs(20);
                let sleep = || barrier.generation.sleepers.load(Ordering::SeqCst) == 2;
                while !sleep() && Instant::now() < end {
                    thread::sleep(Duration::from_millis(1));
                }
                sleeping.store(sleep(), Ordering::Relaxed);
            }
            barrier.wait();
        };
        // SAFETY: this thread alone has the team.
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
