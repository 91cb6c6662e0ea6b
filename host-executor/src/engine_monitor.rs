//! Asks the engine what it may take long to answer, on a thread that nobody waits for without end.
//!
//! An engine answers from a driver, and a call of a driver may hang. Status, metrics, HELLO and the
//! main thread of an executor must not hang with it: they get what the engine has answered last. An
//! engine without a driver is asked on the thread that wants to know, which saves two wake-ups.
#![forbid(unsafe_code)]

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use vgpu_engine::{Engine, MemoryInfo};
use vgpu_transport::lock::{Guard, lock, wait_timeout, wait_timeout_while};

use crate::lock::expect_unlocked;

/// How often the engine is asked if nobody wants to know.
const PERIOD: Duration = Duration::from_secs(1);

/// How old an answer may be for a caller that only reports it. Other processes can change what is
/// free meanwhile; what this process allocates and frees is seen at once.
const MAX_AGE: Duration = Duration::from_millis(5);

/// How long a caller waits for a new answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// The last answers of an engine.
#[derive(Debug)]
pub(crate) struct EngineMonitor {
    /// The engine, if any thread may ask it for its memory.
    direct: Option<Direct>,
    start: Instant,
    /// When the present call of the engine began, in nanoseconds after `start` plus 1. 0: none.
    calling: AtomicU64,
    state: Mutex<EngineAnswers>,
    /// Notified when the state has changed.
    changed: Condvar,
}

/// An engine that [knows its memory](Engine::knows_its_memory).
struct Direct(Arc<dyn Engine>);

impl fmt::Debug for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name())
    }
}

#[derive(Debug)]
struct EngineAnswers {
    memory: MemoryInfo,
    /// When the engine was asked for `memory`.
    asked_at: Instant,
    /// The latest change count of the ledger that was known then.
    asked_change_count: u64,
    /// The latest change count of the ledger that a caller has named.
    change_count: u64,
    fatal: Option<String>,
    /// The number of the latest question.
    asked: u64,
    /// All questions up to this one are answered.
    answered: u64,
    is_over: bool,
}

impl EngineAnswers {
    /// Whether `memory` is of the last [`MAX_AGE`] and of this change count.
    fn is_recent(&self, change_count: u64, now: Instant) -> bool {
        self.asked_change_count == change_count
            && now.saturating_duration_since(self.asked_at) < MAX_AGE
    }
}

impl EngineMonitor {
    /// Starts the thread that asks `engine`. The thread ends after [`close`](EngineMonitor::close).
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn start(engine: Arc<dyn Engine>) -> io::Result<Arc<EngineMonitor>> {
        let direct = { engine.knows_its_memory() }.then(|| Direct(Arc::clone(&engine)));
        let monitor = Arc::new(EngineMonitor {
            direct,
            start: Instant::now(),
            calling: AtomicU64::new(0),
            state: Mutex::new(EngineAnswers {
                asked_at: Instant::now(),
                memory: engine.memory(),
                asked_change_count: 0,
                change_count: 0,
                fatal: None,
                asked: 0,
                answered: 0,
                is_over: false,
            }),
            changed: Condvar::new(),
        });
        let own = Arc::clone(&monitor);
        thread::Builder::new()
            .name("vgpu-engine".into())
            .spawn(move || own.ask(engine.as_ref()))?;
        Ok(monitor)
    }

    /// The memory of the engine: as it is now, or, if the engine does not answer in time, as it was
    /// at its last answer.
    pub(crate) fn memory(&self) -> MemoryInfo {
        self.ask_now(self.lock())
    }

    /// The same for a caller that only reports the answer: an answer of the last [`MAX_AGE`] will
    /// do, if the sessions have allocated and freed nothing since. `change_count` is the present
    /// change count of their ledger.
    pub(crate) fn recent_memory(&self, change_count: u64) -> MemoryInfo {
        let mut state = self.lock();
        if state.is_recent(change_count, Instant::now()) {
            return state.memory;
        }
        state.change_count = state.change_count.max(change_count);
        self.ask_now(state)
    }

    /// The memory of an engine that any thread may ask, kept for
    /// [`recent_memory`](EngineMonitor::recent_memory).
    fn ask_here(&self, engine: &dyn Engine, state: Guard<'_, EngineAnswers>) -> MemoryInfo {
        let (change_count, now) = (state.change_count, Instant::now());
        drop(state);
        expect_unlocked("Engine::memory");
        let memory = engine.memory();
        let mut state = self.lock();
        state.memory = memory;
        (state.asked_at, state.asked_change_count) = (now, change_count);
        memory
    }

    fn ask_now(&self, mut state: Guard<'_, EngineAnswers>) -> MemoryInfo {
        if let Some(Direct(engine)) = &self.direct {
            return self.ask_here(engine.as_ref(), state);
        }
        state.asked += 1;
        let question = state.asked;
        self.changed.notify_all();
        let end = Instant::now() + ANSWER_TIMEOUT;
        while state.answered < question {
            let left = end.saturating_duration_since(Instant::now());
            // While a call hangs, only the first callers wait.
            if left.is_zero() || self.call().is_some_and(|(_, age)| age > ANSWER_TIMEOUT) {
                break;
            }
            state = wait_timeout(&self.changed, state, left);
        }
        state.memory
    }

    /// Why the engine cannot work again in this process, if it has said so.
    pub(crate) fn fatal_error(&self) -> Option<String> {
        self.lock().fatal.clone()
    }

    /// The call that the engine has not answered yet, if there is one: a number that no other call
    /// has, and its age. Takes no lock.
    pub(crate) fn call(&self) -> Option<(u64, Duration)> {
        let since = self.calling.load(Ordering::Relaxed);
        let age = || self.time().saturating_sub(since);
        (since != 0).then(|| (since, Duration::from_nanos(age())))
    }

    /// Takes the lock of this monitor and releases it.
    pub(crate) fn probe(&self) {
        drop(self.lock());
    }

    /// Ends the thread, unless a call of the engine hangs. Does not wait.
    pub(crate) fn close(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    fn ask(&self, engine: &dyn Engine) {
        let mut state = self.lock();
        while !state.is_over {
            let (question, change_count, now) = (state.asked, state.change_count, Instant::now());
            drop(state);
            expect_unlocked("Engine::memory");
            self.calling.store(self.time(), Ordering::Relaxed);
            let (memory, fatal) = (engine.memory(), engine.fatal_error());
            self.calling.store(0, Ordering::Relaxed);
            state = self.lock();
            (state.memory, state.fatal) = (memory, fatal);
            (state.asked_at, state.asked_change_count) = (now, change_count);
            state.answered = question;
            self.changed.notify_all();
            let idle = |state: &mut EngineAnswers| state.asked == state.answered && !state.is_over;
            state = wait_timeout_while(&self.changed, state, PERIOD, idle);
        }
    }

    /// Nanoseconds, at least 1.
    fn time(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX - 1) + 1
    }

    fn lock(&self) -> Guard<'_, EngineAnswers> {
        lock(&self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_used_again_until_they_are_old_or_memory_was_allocated_or_freed() {
        let asked_at = Instant::now();
        let state = EngineAnswers {
            memory: MemoryInfo::default(),
            asked_at,
            asked_change_count: 7,
            change_count: 7,
            fatal: None,
            asked: 1,
            answered: 1,
            is_over: false,
        };
        let later = asked_at + MAX_AGE;
        assert!(state.is_recent(7, asked_at));
        assert!(state.is_recent(7, later - Duration::from_nanos(1)));
        assert!(!state.is_recent(7, later));
        // Something was allocated or freed after the engine was asked.
        assert!(!state.is_recent(8, asked_at));
    }
}
