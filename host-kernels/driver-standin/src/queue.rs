//! The work of a context, in order, on a thread of its own.
//!
//! The order is that in which the work was asked for, whatever the stream: one of the orders that a
//! GPU may take. An invalid access of a kernel, which the processor reports as a signal, becomes
//! the sticky error of the context.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use crate::codes::{Answer, Code, code_of};
use crate::lock::lock;

/// How often waiting threads look for an error that a signal has set.
const LOOK: Duration = Duration::from_millis(1);

type Work = Box<dyn FnOnce() -> Answer + Send>;

/// The queue of a context.
pub(crate) struct Queue {
    shared: Arc<SharedQueue>,
}

struct SharedQueue {
    state: Mutex<QueuedWork>,
    changed: Condvar,
    /// The code of the sticky error; 0: none. Never freed: a thread that a signal has stopped may
    /// use it for ever.
    lost: &'static AtomicU32,
}

#[derive(Default)]
struct QueuedWork {
    work: VecDeque<Work>,
    asked: u64,
    done: u64,
    is_closed: bool,
}

impl Queue {
    /// An empty queue, whose thread begins.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if there is no thread.
    pub(crate) fn new() -> Answer<Queue> {
        catch_signals();
        let shared = Arc::new(SharedQueue {
            state: Mutex::default(),
            changed: Condvar::new(),
            lost: Box::leak(Box::new(AtomicU32::new(0))),
        });
        let thread = std::thread::Builder::new().name("standin-gpu".into());
        let of_thread = Arc::clone(&shared);
        let spawned = thread.spawn(move || of_thread.run());
        spawned.map_err(|_| Code::CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok(Queue { shared })
    }

    /// Adds work, and returns its number.
    pub(crate) fn push(&self, work: impl FnOnce() -> Answer + Send + 'static) -> u64 {
        let mut state = self.shared.state();
        state.asked += 1;
        state.work.push_back(Box::new(work));
        self.shared.changed.notify_all();
        state.asked
    }

    /// The number of the work that was asked for last.
    pub(crate) fn last(&self) -> u64 {
        self.shared.state().asked
    }

    /// Whether the work with this number is done.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.shared.state().done >= number
    }

    /// Waits for the work with this number.
    ///
    /// # Errors
    /// The sticky error, if there is one.
    pub(crate) fn wait(&self, number: u64) -> Answer {
        let mut state = self.shared.state();
        while state.done < number {
            self.alive()?;
            let waited = self.shared.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        self.alive()
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// As for [`Queue::wait`].
    pub(crate) fn drain(&self) -> Answer {
        self.wait(self.last())
    }

    /// The sticky error, if there is one.
    ///
    /// # Errors
    /// That error.
    pub(crate) fn alive(&self) -> Answer {
        self.shared.alive()
    }

    /// Sets the sticky error, if there is none.
    pub(crate) fn lose(&self, code: Code) {
        self.shared.lose(code);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.shared.state().is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl SharedQueue {
    fn state(&self) -> MutexGuard<'_, QueuedWork> {
        lock(&self.state)
    }

    fn alive(&self) -> Answer {
        match self.lost.load(Ordering::SeqCst) {
            0 => Ok(()),
            number => Err(code_of(number).unwrap_or(Code::CUDA_ERROR_UNKNOWN)),
        }
    }

    fn lose(&self, code: Code) {
        let _ = { self.lost }.compare_exchange(0, code as u32, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Does the work until the queue is closed.
    fn run(&self) {
        OWN.set(self.lost);
        loop {
            let mut state = self.state();
            let work = loop {
                if let Some(work) = state.work.pop_front() {
                    break work;
                }
                if state.is_closed {
                    return;
                }
                let waited = self.changed.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            // After an error, nothing of the context runs.
            let outcome = self.alive().and_then(|()| {
                RUNNING.store(ptr::from_ref(self.lost).cast_mut(), Ordering::SeqCst);
                work()
            });
            if let Err(code) = outcome {
                self.lose(code);
            }
            self.state().done += 1;
            self.changed.notify_all();
        }
    }
}

thread_local! {
    /// On the thread of a queue: where its sticky error is.
    static OWN: Cell<*const AtomicU32> = const { Cell::new(ptr::null()) };
    /// Whether the thread calls the driver.
    static IS_HOST: Cell<bool> = const { Cell::new(false) };
}

/// Where the sticky error of the context is whose work began last.
static RUNNING: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// Notes that this thread calls the driver: its invalid accesses are not those of kernels.
pub(crate) fn note_host_thread() {
    IS_HOST.set(true);
}

/// What handled invalid accesses before.
struct Before([libc::sigaction; 2]);

const SIGNALS: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];

static BEFORE: AtomicPtr<Before> = AtomicPtr::new(ptr::null_mut());

/// Handles invalid accesses from now on.
fn catch_signals() {
    static CAUGHT: Once = Once::new();
    CAUGHT.call_once(|| {
        // SAFETY: a `sigaction` of zeros is valid; `on_invalid_access` has the type that SA_SIGINFO
        // asks for, and only uses atomics and thread-local cells. `BEFORE` is set before the
        // handler is, and never freed.
        unsafe {
            let mut before: [libc::sigaction; 2] = std::mem::zeroed();
            for (signal, before) in SIGNALS.iter().zip(&mut before) {
                libc::sigaction(*signal, ptr::null(), before);
            }
            BEFORE.store(Box::into_raw(Box::new(Before(before))), Ordering::SeqCst);
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(i32) = on_invalid_access;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_ONSTACK | libc::SA_NODEFER;
            for signal in SIGNALS {
                libc::sigaction(signal, &action, ptr::null_mut());
            }
        }
    });
}

/// Stops a thread of a kernel for ever, and makes its context unusable. Blocks of a cooperative
/// launch have threads that neither are a queue's nor call the driver.
extern "C" fn on_invalid_access(signal: i32) {
    let own = OWN.get();
    let lost = match own.is_null() {
        false => own,
        true if IS_HOST.get() => ptr::null(),
        true => RUNNING.load(Ordering::SeqCst).cast_const(),
    };
    if lost.is_null() {
        // Not of a kernel: the handler from before handles it when the access is repeated.
        let at = SIGNALS.iter().position(|known| *known == signal);
        // SAFETY: `catch_signals` has set `BEFORE` before this handler, and nobody frees it.
        unsafe {
            let before = &*BEFORE.load(Ordering::SeqCst);
            libc::sigaction(signal, &before.0[at.unwrap_or(0)], ptr::null_mut());
        }
        return;
    }
    let code = Code::CUDA_ERROR_ILLEGAL_ADDRESS as u32;
    // SAFETY: the sticky errors of queues are never freed.
    let _ = unsafe { &*lost }.compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst);
    loop {
        // SAFETY: waits for a signal, without an argument.
        unsafe { libc::pause() };
    }
}
