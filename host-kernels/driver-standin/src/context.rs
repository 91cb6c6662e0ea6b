//! Contexts, what belongs to them, and which is current to a thread.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::Instant;

use crate::cards::Card;
use crate::code::Module;
use crate::codes::{Answer, Code};
use crate::function::Function;
use crate::graph::{Capture, Exec, Graph, Node};
use crate::lock::lock;
use crate::memory::memory;
use crate::queue::Queue;
use crate::settings::settings;

/// A context.
pub(crate) struct Context {
    pub(crate) id: u64,
    pub(crate) device: usize,
    pub(crate) queue: Queue,
    objects: Mutex<Objects>,
}

/// What belongs to a context, by handle.
#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) modules: HashMap<u64, Module>,
    pub(crate) functions: HashMap<u64, Arc<Function>>,
    pub(crate) graphs: HashMap<u64, Graph>,
    pub(crate) nodes: HashMap<u64, Node>,
    pub(crate) execs: HashMap<u64, Exec>,
}

/// A stream.
#[derive(Default)]
pub(crate) struct Stream {
    /// The graph that is recorded, if one is.
    pub(crate) capture: Option<Capture>,
}

/// An event.
pub(crate) struct Event {
    pub(crate) has_time: bool,
    /// The number of the work that the event waits for; none before it is recorded.
    pub(crate) work: Option<u64>,
    /// When the queue has reached it.
    pub(crate) reached: Arc<Mutex<Option<Instant>>>,
}

/// The handle of a new object. Every object of the process has its own.
pub(crate) fn new_handle() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    // Like an address of the driver's memory: not null, and a multiple of 16.
    0x5500_0000_0000 + 16 * LAST.fetch_add(1, Ordering::Relaxed)
}

/// All contexts.
#[derive(Default)]
struct Contexts {
    alive: HashMap<u64, Arc<Context>>,
    destroyed: HashSet<u64>,
    /// The primary context of each GPU, and how often it is retained.
    primary: HashMap<usize, (u64, u32)>,
}

fn contexts() -> MutexGuard<'static, Contexts> {
    static CONTEXTS: LazyLock<Mutex<Contexts>> = LazyLock::new(Mutex::default);
    lock(&CONTEXTS)
}

thread_local! {
    /// The contexts of this thread. The last one is current; 0: none.
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The stack of the current contexts of this thread.
fn with_stack<T>(body: impl FnOnce(&mut Vec<u64>) -> T) -> T {
    STACK.with_borrow_mut(body)
}

/// The GPU with this number.
///
/// # Errors
/// `INVALID_DEVICE`.
pub(crate) fn card(device: i32) -> Answer<(usize, &'static Card)> {
    let index = usize::try_from(device).map_err(|_| Code::CUDA_ERROR_INVALID_DEVICE)?;
    let card = settings().cards.get(index);
    card.map(|card| (index, card))
        .ok_or(Code::CUDA_ERROR_INVALID_DEVICE)
}

impl Context {
    /// Creates a context on a GPU.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn create(device: usize) -> Answer<u64> {
        let context = Context {
            id: new_handle(),
            device,
            queue: Queue::new()?,
            objects: Mutex::default(),
        };
        let id = context.id;
        contexts().alive.insert(id, Arc::new(context));
        Ok(id)
    }

    /// The context that is current to this thread.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` if there is none, `CONTEXT_IS_DESTROYED`, or its sticky error.
    pub(crate) fn current() -> Answer<Arc<Context>> {
        let context = Context::current_or_lost()?;
        context.queue.alive()?;
        Ok(context)
    }

    /// As [`Context::current`], also with a sticky error.
    ///
    /// # Errors
    /// As for [`Context::current`].
    pub(crate) fn current_or_lost() -> Answer<Arc<Context>> {
        let id = with_stack(|stack| stack.last().copied()).unwrap_or(0);
        Context::find(id)
    }

    /// The handle of the context that is current to this thread; 0: none.
    pub(crate) fn current_handle() -> u64 {
        with_stack(|stack| stack.last().copied()).unwrap_or(0)
    }

    /// The context with this handle.
    ///
    /// # Errors
    /// `INVALID_CONTEXT`, `CONTEXT_IS_DESTROYED`.
    fn find(id: u64) -> Answer<Arc<Context>> {
        let contexts = contexts();
        match contexts.alive.get(&id) {
            Some(context) => Ok(Arc::clone(context)),
            None if contexts.destroyed.contains(&id) => Err(Code::CUDA_ERROR_CONTEXT_IS_DESTROYED),
            None => Err(Code::CUDA_ERROR_INVALID_CONTEXT),
        }
    }

    /// Makes a context current in place of the one that is. 0: none.
    ///
    /// # Errors
    /// `INVALID_CONTEXT`, `CONTEXT_IS_DESTROYED`.
    pub(crate) fn set_current(id: u64) -> Answer {
        if id != 0 {
            Context::find(id)?;
        }
        with_stack(|stack| {
            stack.pop();
            if id != 0 {
                stack.push(id);
            }
        });
        Ok(())
    }

    /// Makes a context current, until [`Context::pop`].
    ///
    /// # Errors
    /// As for [`Context::set_current`].
    pub(crate) fn push(id: u64) -> Answer {
        Context::find(id)?;
        with_stack(|stack| stack.push(id));
        Ok(())
    }

    /// Undoes [`Context::push`].
    ///
    /// # Errors
    /// `INVALID_CONTEXT` if none is current.
    pub(crate) fn pop() -> Answer<u64> {
        with_stack(Vec::pop).ok_or(Code::CUDA_ERROR_INVALID_CONTEXT)
    }

    /// Waits for the work of a context, and destroys it with everything in it.
    ///
    /// # Errors
    /// `INVALID_CONTEXT`, `CONTEXT_IS_DESTROYED`; also for a primary context.
    pub(crate) fn destroy(id: u64) -> Answer {
        let context = Context::find(id)?;
        if contexts()
            .primary
            .values()
            .any(|(primary, _)| *primary == id)
        {
            return Err(Code::CUDA_ERROR_INVALID_CONTEXT);
        }
        context.end();
        with_stack(|stack| {
            if stack.last() == Some(&id) {
                stack.pop();
            }
        });
        Ok(())
    }

    fn end(&self) {
        // An error of work has been reported, or nobody asks for it any more.
        let _ = self.queue.drain();
        let mut contexts = contexts();
        contexts.alive.remove(&self.id);
        contexts.destroyed.insert(self.id);
        drop(contexts);
        memory().free_all(self.id);
    }

    /// Retains the primary context of a GPU, and creates it if need be.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn retain_primary(device: usize) -> Answer<u64> {
        if let Some((id, count)) = contexts().primary.get_mut(&device) {
            *count += 1;
            return Ok(*id);
        }
        let id = Context::create(device)?;
        contexts().primary.insert(device, (id, 1));
        Ok(id)
    }

    /// Undoes [`Context::retain_primary`]. The last release destroys the context.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` if it is not retained.
    pub(crate) fn release_primary(device: usize) -> Answer {
        let mut all = contexts();
        let held = all.primary.get_mut(&device);
        let (id, count) = held.ok_or(Code::CUDA_ERROR_INVALID_CONTEXT)?;
        *count -= 1;
        if *count > 0 {
            return Ok(());
        }
        let id = *id;
        all.primary.remove(&device);
        drop(all);
        Context::find(id)?.end();
        Ok(())
    }

    /// How often the primary context of a GPU is retained.
    pub(crate) fn primary_count(device: usize) -> u32 {
        contexts()
            .primary
            .get(&device)
            .map_or(0, |(_, count)| *count)
    }

    /// What belongs to the context.
    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        lock(&self.objects)
    }

    /// The GPU of the context.
    pub(crate) fn card(&self) -> &'static Card {
        &settings().cards[self.device]
    }
}
