//! Batches with threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use vgpu_engine::{BatchKey, EngineError, Memory, MemoryInfo};
use vgpu_transport::ir::{Capabilities, GraphCounts, ValidGraph};

use super::*;

const ENTITLEMENT: Entitlement = Entitlement {
    weight: 1,
    in_flight: 8,
};

/// An engine that only runs batches.
struct BatchEngine {
    capabilities: Capabilities,
    is_running: AtomicBool,
    /// The size of each batch.
    sizes: Mutex<Vec<usize>>,
    panics: AtomicBool,
}

impl BatchEngine {
    fn new() -> BatchEngine {
        BatchEngine {
            capabilities: Capabilities::new(Vec::new()),
            is_running: AtomicBool::new(false),
            sizes: Mutex::default(),
            panics: AtomicBool::new(false),
        }
    }

    fn sizes(&self) -> Vec<usize> {
        self.sizes.lock().expect("no thread has panicked").clone()
    }
}

impl Engine for BatchEngine {
    fn name(&self) -> &str {
        "batching"
    }

    fn description(&self) -> &str {
        "for tests"
    }

    fn memory(&self) -> MemoryInfo {
        MemoryInfo { free: 0, total: 0 }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn alloc(&self, _: u64) -> Result<Arc<dyn Memory>, EngineError> {
        Err(EngineError::ForeignMemory)
    }

    fn compile_bytes(&self, _: &GraphCounts) -> u64 {
        0
    }

    fn compile(
        &self,
        _: &ValidGraph,
        _: &[Arc<dyn Memory>],
        _: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Plan>, EngineError> {
        Err(EngineError::ForeignMemory)
    }

    fn max_batch(&self) -> usize {
        4
    }

    fn launch_batch(
        &self,
        plans: &mut [&mut dyn Plan],
        turn: &Turn,
    ) -> Vec<Result<RunStatus, RunError>> {
        assert!(plans.len() <= self.max_batch());
        let key = plans[0].batch_key();
        assert!(key.is_some() && plans.iter().all(|plan| plan.batch_key() == key));
        assert!(!self.is_running.swap(true, Ordering::Acquire));
        { self.sizes.lock() }.expect("no panic").push(plans.len());
        let panics = self.panics.load(Ordering::Relaxed);
        let each = plans.iter_mut().map(|plan| plan.launch(turn));
        let outcomes = each.collect();
        self.is_running.store(false, Ordering::Release);
        assert!(!panics, "told to panic");
        outcomes
    }
}

/// A plan of some steps, each of which takes a turn.
struct Steps {
    products: u64,
    work: u64,
    steps: usize,
    at: usize,
    /// The launches of all runs.
    launches: &'static AtomicUsize,
    fails: bool,
    takes: Duration,
    /// Whether the plan ignores the end of its turn.
    is_whole: bool,
    /// The plan runs until this is set.
    until: Option<Arc<AtomicBool>>,
    /// When turns of the plan end, from their begin.
    ends: Arc<Mutex<Vec<Duration>>>,
}

impl Steps {
    fn new(products: u64, steps: usize, launches: &'static AtomicUsize) -> Steps {
        Steps {
            products,
            work: 1,
            steps,
            at: 0,
            launches,
            fails: false,
            takes: Duration::from_micros(50),
            is_whole: false,
            until: None,
            ends: Arc::default(),
        }
    }
}

impl Plan for Steps {
    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        self.launches.fetch_add(1, Ordering::Relaxed);
        while { &self.until }
            .as_ref()
            .is_some_and(|until| !until.load(Ordering::Relaxed))
        {
            thread::yield_now();
        }
        let began = turn.now();
        while turn.now() < began + self.takes && (self.is_whole || !turn.is_over()) {
            thread::sleep(self.takes.min(Duration::from_micros(200)));
        }
        let mut ends = self.ends.lock().expect("no thread has panicked");
        ends.push(turn.now() - began);
        self.at += 1;
        if self.fails {
            return Err(RunError::OutOfMemory { wanted: 1 });
        }
        if self.at < self.steps {
            return Ok(RunStatus::Yielded);
        }
        self.at = 0;
        Ok(RunStatus::Done)
    }

    fn plan_bytes(&self) -> u64 {
        0
    }

    fn batch_key(&self) -> Option<BatchKey> {
        Some(BatchKey {
            products: self.products,
            position: (self.at, 0),
        })
    }

    fn batch_work(&self) -> u64 {
        self.work
    }
}

/// A counter for the plans of a test.
fn counter() -> &'static AtomicUsize {
    Box::leak(Box::default())
}

fn run(
    scheduler: &Arc<Scheduler>,
    engine: &dyn Engine,
    guest: u64,
    plan: &mut Box<dyn Plan>,
) -> (Result<(), RunError>, Times) {
    let batchable = Batchable {
        engine,
        plan,
        program: guest,
        is_allowed: true,
    };
    let state = scheduler.run_batchable(TenantId(guest), ENTITLEMENT, batchable, |_| {}, || false);
    match state {
        RunState::Done(outcome, times) => (outcome, times),
        _ => panic!("the run has ended"),
    }
}

fn assert_idle(scheduler: &Scheduler) {
    let state = scheduler.lock();
    assert!(state.holder.is_none() && state.waiters.is_empty());
    assert!(state.batches.offers.is_empty() && state.batches.outcomes.is_empty());
    assert!(state.batches.cancelled.is_empty() && state.batches.abandoned.is_empty());
    assert_eq!(state.queue.waiting(), 0);
}

#[test]
fn graphs_with_the_same_products_share_turns_and_each_runs_once() {
    const GRAPHS: usize = 100;
    let (scheduler, engine, launches) = (
        &Arc::new(Scheduler::new(true)),
        &BatchEngine::new(),
        counter(),
    );
    let turns = &AtomicU64::new(0);
    thread::scope(|scope| {
        for guest in 0..6 {
            scope.spawn(move || {
                // Two kinds of graphs, of up to three steps.
                let steps = 1 + guest as usize % 3;
                let plan = Steps::new(guest % 2, steps, launches);
                let mut plan: Box<dyn Plan> = Box::new(plan);
                for _ in 0..GRAPHS {
                    let (outcome, times) = run(scheduler, engine, guest, &mut plan);
                    outcome.expect("it does not fail");
                    assert!(plan.is_current(), "the plan has come back");
                    turns.fetch_add(times.turns, Ordering::Relaxed);
                }
            });
        }
    });
    // 1 + 2 + 3 steps twice.
    assert_eq!(launches.load(Ordering::Relaxed), 12 * GRAPHS);
    assert_eq!(turns.load(Ordering::Relaxed), 12 * GRAPHS as u64);
    let sizes = engine.sizes();
    assert!(sizes.iter().any(|&size| size > 1), "no batch");
    assert_idle(scheduler);
}

#[test]
fn programs_that_return_at_once_stay_together() {
    const GRAPHS: usize = 200;
    let (scheduler, engine, launches) = (
        &Arc::new(Scheduler::new(true)),
        &BatchEngine::new(),
        counter(),
    );
    thread::scope(|scope| {
        for guest in 0..3 {
            scope.spawn(move || {
                let mut steps = Steps::new(1, 1, launches);
                steps.takes = Duration::from_millis(1);
                let mut plan: Box<dyn Plan> = Box::new(steps);
                for _ in 0..GRAPHS {
                    let (outcome, _) = run(scheduler, engine, guest, &mut plan);
                    outcome.expect("it does not fail");
                }
            });
        }
    });
    // Each graph of a batch of three takes 3 ms here, of which a part is enough to return.
    let full = engine.sizes().iter().filter(|&&size| size == 3).count();
    assert!(full > GRAPHS / 2, "{full} of {GRAPHS} together");
    assert_idle(scheduler);
}

#[test]
fn a_graph_that_fails_changes_nothing_for_the_others() {
    let (scheduler, engine, launches) = (
        &Arc::new(Scheduler::new(true)),
        &BatchEngine::new(),
        counter(),
    );
    thread::scope(|scope| {
        for guest in 0..4 {
            scope.spawn(move || {
                let mut steps = Steps::new(1, 2, launches);
                steps.fails = guest == 0;
                let mut plan: Box<dyn Plan> = Box::new(steps);
                for _ in 0..50 {
                    let (outcome, _) = run(scheduler, engine, guest, &mut plan);
                    assert_eq!(outcome.is_err(), guest == 0);
                }
            });
        }
    });
    assert!(engine.sizes().iter().any(|&size| size > 1), "no batch");
    assert_idle(scheduler);
}

#[test]
fn a_panic_fails_all_graphs_of_the_batch_and_the_device_is_free() {
    let (scheduler, engine, launches) = (
        &Arc::new(Scheduler::new(true)),
        &BatchEngine::new(),
        counter(),
    );
    engine.panics.store(true, Ordering::Relaxed);
    let (failures, panics) = (&AtomicUsize::new(0), &AtomicUsize::new(0));
    thread::scope(|scope| {
        for guest in 0..4 {
            scope.spawn(move || {
                let mut steps = Steps::new(1, 1, launches);
                steps.takes = Duration::from_millis(20);
                let mut plan: Box<dyn Plan> = Box::new(steps);
                let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    run(scheduler, engine, guest, &mut plan)
                }));
                match ran {
                    Err(_) => panics.fetch_add(1, Ordering::Relaxed),
                    Ok((Err(RunError::Kernel { .. }), _)) => {
                        // The graph is compiled again before its next run.
                        assert!(!plan.is_current());
                        failures.fetch_add(1, Ordering::Relaxed)
                    }
                    // The first graph found an idle device.
                    Ok((Ok(()), _)) => 0,
                    Ok((other, _)) => panic!("{other:?}"),
                };
            });
        }
    });
    let [failures, panics] = [failures, panics].map(|count| count.load(Ordering::Relaxed));
    assert!(failures >= 1 && panics >= 1, "{failures} {panics}");
    engine.panics.store(false, Ordering::Relaxed);
    assert_idle(scheduler);
    let mut plan: Box<dyn Plan> = Box::new(Steps::new(1, 1, launches));
    let (outcome, _) = run(scheduler, engine, 9, &mut plan);
    outcome.expect("the device is free");
}

#[test]
fn a_batch_is_charged_to_its_members_in_proportion_to_their_work() {
    const TAKES: Duration = Duration::from_millis(40);
    // Three plans of 40 ms each, one after the other in this engine.
    const ALL: Duration = Duration::from_millis(3 * 40);
    let work = |guest: u64| if guest == 3 { 2 } else { 1 };
    let part = |guest: u64| ALL * work(guest) / 4;
    let (scheduler, engine, launches) = (
        &Arc::new(Scheduler::new(true)),
        &BatchEngine::new(),
        counter(),
    );
    let long = |guest| -> Box<dyn Plan> {
        let mut steps = Steps::new(1, 1, launches);
        (steps.takes, steps.is_whole) = (TAKES, true);
        steps.work = u64::from(work(guest));
        Box::new(steps)
    };
    let began = scheduler.turn.now();
    thread::scope(|scope| {
        // The others wait for this graph, and then run together.
        scope.spawn(move || run(scheduler, engine, 0, &mut long(0)).0.expect("it runs"));
        while scheduler.lock().holder.is_none() {
            thread::yield_now();
        }
        for guest in 1..4 {
            scope.spawn(move || {
                let (outcome, times) = run(scheduler, engine, guest, &mut long(guest));
                outcome.expect("it runs");
                assert!(times.ran >= part(guest), "{times:?}");
            });
        }
    });
    let took = scheduler.turn.now() - began;
    assert_eq!(engine.sizes(), [3]);
    let state = scheduler.lock();
    let charged: Vec<Duration> = (0..4).map(|t| state.queue.time_of(TenantId(t))).collect();
    // The times of a guest begin with that of the queue when it comes, the same for all three. The
    // difference is one part of four.
    assert_eq!(charged[1], charged[2], "{charged:?}");
    let all = 4 * (charged[3] - charged[1]);
    assert!(
        all >= ALL && all <= took + Duration::from_millis(30),
        "{charged:?} of {took:?}"
    );
    for guest in 1..4 {
        assert!(charged[guest as usize] >= part(guest), "{charged:?}");
    }
}

/// A guest that is ahead does not keep a small graph of another guest waiting with large ones.
#[test]
fn large_graphs_of_a_guest_that_is_ahead_do_not_join_a_small_one() {
    const LARGE: Duration = Duration::from_millis(200);
    let joined = |works: [u64; 2]| {
        let (scheduler, engine, launches) = (
            &Arc::new(Scheduler::new(true)),
            &BatchEngine::new(),
            counter(),
        );
        thread::scope(|scope| {
            // The first graph of guest 1 makes it 0.2 s ahead of guest 2, which waits meanwhile. A
            // second one waits as well, and may join guest 2.
            let start = |guest: u64, work: u64, takes: Duration, waiting: usize| {
                scope.spawn(move || {
                    let mut steps = Steps::new(1, 1, launches);
                    (steps.work, steps.takes, steps.is_whole) = (work, takes, true);
                    let mut plan: Box<dyn Plan> = Box::new(steps);
                    run(scheduler, engine, guest, &mut plan).0.expect("it runs");
                });
                // The first graph runs: no other one joins its turn.
                while scheduler.lock().queue.waiting() < waiting
                    || launches.load(Ordering::Relaxed) == 0
                {
                    thread::yield_now();
                }
            };
            start(1, works[0], LARGE, 0);
            start(2, works[1], Duration::from_millis(1), 1);
            start(1, works[0], LARGE, 2);
        });
        assert_idle(scheduler);
        engine.sizes()
    };
    assert_eq!(joined([1, 1]), [2]);
    assert_eq!(joined([4, 1]), [2]);
    assert_eq!(joined([8, 1]), [0; 0]);
}

#[test]
fn a_cancelled_graph_leaves_the_batch_and_the_others_go_on() {
    let (scheduler, engine, launches) = (
        &Arc::new(Scheduler::new(true)),
        &BatchEngine::new(),
        counter(),
    );
    thread::scope(|scope| {
        for guest in 0..3 {
            scope.spawn(move || {
                let steps = if guest == 0 { usize::MAX } else { 500 };
                let mut plan: Box<dyn Plan> = Box::new(Steps::new(1, steps, launches));
                let batchable = Batchable {
                    engine,
                    plan: &mut plan,
                    program: guest,
                    is_allowed: true,
                };
                let mut turns = 0;
                let is_cancelled = || {
                    turns += 1;
                    guest == 0 && turns > 100
                };
                let tenant = TenantId(guest);
                let state =
                    scheduler.run_batchable(tenant, ENTITLEMENT, batchable, |_| {}, is_cancelled);
                match (state, guest) {
                    (RunState::Cancelled(times), 0) => assert!(times.turns > 100),
                    (RunState::Done(Ok(()), times), _) => assert_eq!(times.turns, 500),
                    _ => panic!("guest {guest}"),
                }
                assert!(plan.is_current(), "the plan has come back");
            });
        }
    });
    assert_idle(scheduler);
}

/// The thread of a graph waits for the end of a hold, and its guest is gone. Another graph, whose
/// thread sleeps without a limit, gets the device.
#[test]
fn a_graph_that_is_cancelled_during_a_hold_leaves_the_device_to_the_next() {
    const TAKES: Duration = Duration::from_millis(40);
    let scheduler: &'static Arc<Scheduler> = Box::leak(Box::new(Arc::new(Scheduler::new(true))));
    let engine: &'static BatchEngine = Box::leak(Box::new(BatchEngine::new()));
    let launches = counter();
    let (ended, ends) = std::sync::mpsc::channel();
    let start = |guest: u64, mut steps: Steps, is_cancelled: bool| {
        (steps.takes, steps.is_whole) = (TAKES, true);
        let ended = ended.clone();
        let waiting = scheduler.lock().waiters.len();
        thread::spawn(move || {
            let mut plan: Box<dyn Plan> = Box::new(steps);
            let batchable = Batchable {
                engine,
                plan: &mut plan,
                program: guest,
                is_allowed: true,
            };
            let tenant = TenantId(guest);
            let state =
                scheduler.run_batchable(tenant, ENTITLEMENT, batchable, |_| {}, || is_cancelled);
            let is_done = matches!(state, RunState::Done(Ok(()), _));
            ended.send((guest, is_done)).expect("the test listens");
        });
        // The device has one of the graphs; the threads of the others sleep.
        loop {
            let state = scheduler.lock();
            if state.waiters.len() > waiting || guest == 0 && state.holder.is_some() {
                break;
            }
            drop(state);
            thread::yield_now();
        }
    };
    // A graph of another kind has the device until the others wait.
    let until = Arc::new(AtomicBool::new(false));
    let mut another = Steps::new(2, 1, launches);
    another.until = Some(Arc::clone(&until));
    start(0, another, false);
    // Its program does not return, and is waited for.
    start(1, Steps::new(1, 1, launches), false);
    start(2, Steps::new(1, 2, launches), true);
    // The same products, but further: it does not run with the others.
    let mut further = Steps::new(1, 2, launches);
    further.at = 1;
    start(3, further, false);
    until.store(true, Ordering::Relaxed);
    let mut all: Vec<(u64, bool)> = (0..4)
        .map(|_| {
            ends.recv_timeout(Duration::from_secs(60))
                .expect("every graph ends")
        })
        .collect();
    all.sort_unstable();
    assert_eq!(all, [(0, true), (1, true), (2, false), (3, true)]);
    assert_eq!(engine.sizes(), [2]);
    assert_idle(scheduler);
}

/// A graph waits for the device, and its guest is gone. Another graph has the device without end,
/// or gives it to the first one while that one's thread asks for its guest.
#[test]
fn a_graph_that_is_not_wanted_leaves_the_queue_or_gives_its_turn_to_the_next() {
    const LIMIT: Duration = Duration::from_secs(60);
    for gets_turn in [false, true] {
        let scheduler: &'static Arc<Scheduler> =
            Box::leak(Box::new(Arc::new(Scheduler::new(true))));
        let engine: &'static BatchEngine = Box::leak(Box::new(BatchEngine::new()));
        let launches = counter();
        // Says whether the run was cancelled.
        let start = |guest: u64, steps: Steps, is_cancelled: Box<dyn Fn() -> bool + Send>| {
            let (ended, ends) = std::sync::mpsc::channel();
            thread::spawn(move || {
                let mut plan: Box<dyn Plan> = Box::new(steps);
                let batchable = Batchable {
                    engine,
                    plan: &mut plan,
                    program: guest,
                    is_allowed: true,
                };
                let tenant = TenantId(guest);
                let state =
                    scheduler.run_batchable(tenant, ENTITLEMENT, batchable, |_| {}, is_cancelled);
                assert!(plan.is_current(), "the plan has come back");
                let _ = ended.send(matches!(state, RunState::Cancelled(_)));
            });
            ends
        };
        let until = Arc::new(AtomicBool::new(false));
        let mut first = Steps::new(0, 1, launches);
        first.until = Some(Arc::clone(&until));
        let first = start(0, first, Box::new(|| false));
        while scheduler.lock().holder.is_none() {
            thread::yield_now();
        }
        let own_until = Arc::clone(&until);
        let has_turn = || {
            let state = scheduler.lock();
            state
                .holder
                .is_some_and(|holder| holder.ticket == Ticket(2))
        };
        let is_cancelled = move || {
            // After a failure the thread ends, too.
            let start = Instant::now();
            while gets_turn && scheduler.lock().waiters.len() < 2 && start.elapsed() < LIMIT {
                thread::yield_now();
            }
            own_until.store(gets_turn, Ordering::Relaxed);
            while gets_turn && !has_turn() && start.elapsed() < LIMIT {
                thread::yield_now();
            }
            true
        };
        let unwanted = start(1, Steps::new(1, 1, launches), Box::new(is_cancelled));
        while scheduler.lock().waiters.is_empty() {
            thread::yield_now();
        }
        let next = start(2, Steps::new(2, 1, launches), Box::new(|| false));
        assert_eq!(unwanted.recv_timeout(LIMIT), Ok(true));
        if !gets_turn {
            assert!(first.try_recv().is_err(), "it has the device");
            assert!(
                scheduler
                    .lock()
                    .batches
                    .offers
                    .keys()
                    .all(|&ticket| ticket != Ticket(2))
            );
            until.store(true, Ordering::Relaxed);
        }
        assert_eq!(first.recv_timeout(LIMIT), Ok(false));
        assert_eq!(next.recv_timeout(LIMIT), Ok(false));
        // Those of the first graph and of the next one.
        assert_eq!(launches.load(Ordering::Relaxed), 2);
        assert_idle(scheduler);
    }
}

/// The thread of a graph that waits panics: the graph and its plan leave the queue.
#[test]
fn a_graph_whose_thread_panics_while_it_waits_leaves_the_queue() {
    let (scheduler, engine, launches) = (
        &Arc::new(Scheduler::new(true)),
        &BatchEngine::new(),
        counter(),
    );
    let until = Arc::new(AtomicBool::new(false));
    thread::scope(|scope| {
        let start = |guest: u64, steps: Steps, panics: bool| {
            scope.spawn(move || {
                let mut plan: Box<dyn Plan> = Box::new(steps);
                let batchable = Batchable {
                    engine,
                    plan: &mut plan,
                    program: guest,
                    is_allowed: true,
                };
                let is_cancelled = || {
                    assert!(!panics, "the guest cannot be asked");
                    false
                };
                let tenant = TenantId(guest);
                let _ =
                    scheduler.run_batchable(tenant, ENTITLEMENT, batchable, |_| {}, is_cancelled);
            })
        };
        let mut first = Steps::new(0, 1, launches);
        first.until = Some(Arc::clone(&until));
        let first = start(0, first, false);
        while scheduler.lock().holder.is_none() {
            thread::yield_now();
        }
        let waits = start(1, Steps::new(1, 1, launches), true);
        let has_panicked = waits.join().is_err();
        let (waiting, offers) = {
            let state = scheduler.lock();
            (state.queue.waiting(), state.batches.offers.len())
        };
        until.store(true, Ordering::Relaxed);
        first.join().expect("it runs");
        assert!(has_panicked);
        assert_eq!((waiting, offers), (0, 0));
    });
    assert_idle(scheduler);
}

/// The first turn of a graph of products 1, which begins while one other graph of each of these
/// products waits.
fn turn_beside(others: &[u64]) -> Duration {
    let (scheduler, engine, launches) = (
        &Arc::new(Scheduler::new(true)),
        &BatchEngine::new(),
        counter(),
    );
    let ends = Arc::default();
    thread::scope(|scope| {
        let start = |tenant: u64, steps: Steps| {
            let waiting = scheduler.lock().waiters.len();
            scope.spawn(move || {
                let mut plan: Box<dyn Plan> = Box::new(steps);
                run(scheduler, engine, tenant, &mut plan)
                    .0
                    .expect("it runs");
            });
            let has_begun = || match tenant {
                99 => scheduler.lock().holder.is_some(),
                _ => scheduler.lock().waiters.len() > waiting,
            };
            while !has_begun() {
                thread::yield_now();
            }
        };
        // Has the device until the others wait.
        let until = Arc::new(AtomicBool::new(false));
        let mut first = Steps::new(9, 1, launches);
        (first.until, first.is_whole) = (Some(Arc::clone(&until)), true);
        start(99, first);
        let mut measured = Steps::new(1, 1, launches);
        (measured.takes, measured.ends) = (Duration::from_millis(80), Arc::clone(&ends));
        start(1, measured);
        for (i, &products) in others.iter().enumerate() {
            // Another position: the graph does not take part.
            let mut steps = Steps::new(products, 8, launches);
            steps.at = 7;
            start(if products == 1 { 1 } else { 2 + i as u64 }, steps);
        }
        until.store(true, Ordering::Relaxed);
    });
    assert_idle(scheduler);
    let ends: Vec<Duration> = ends.lock().expect("no thread has panicked").clone();
    ends[0]
}

/// A graph that only others with the same products wait for keeps the device; a graph of another
/// kind cuts its turn, however many others wait.
#[test]
fn turns_are_short_as_soon_as_a_graph_of_another_kind_waits() {
    let long = Duration::from_millis(60);
    // The threads of the test may be delayed in one attempt.
    let is_long = |others: &[u64]| (0..10).any(|_| turn_beside(others) > long);
    let is_short = |others: &[u64]| (0..10).any(|_| turn_beside(others) < long);
    for others in [&[][..], &[1], &[1, 1, 1]] {
        assert!(is_long(others), "{others:?}");
    }
    for others in [&[2][..], &[1, 2], &[1, 1, 2], &[1, 1, 1, 2]] {
        assert!(is_short(others), "{others:?}");
    }
}

/// A plan that leaves its work in flight.
struct Leaves(Arc<AtomicBool>);

impl Plan for Leaves {
    fn launch(&mut self, _: &Turn) -> Result<RunStatus, RunError> {
        self.0.store(true, Ordering::Relaxed);
        Ok(RunStatus::InFlight)
    }

    fn wait(&mut self) -> Result<(), RunError> {
        self.0.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn plan_bytes(&self) -> u64 {
        0
    }

    fn batch_key(&self) -> Option<BatchKey> {
        Some(BatchKey {
            products: 1,
            position: (0, 0),
        })
    }
}

/// A session that is alone enqueues a copy behind its graph, and waits once for both.
#[test]
fn plan_that_has_the_device_alone_is_left_in_flight() {
    let scheduler = Arc::new(Scheduler::new(true));
    let engine = BatchEngine::new();
    let is_in_flight = Arc::new(AtomicBool::new(false));
    for _ in 0..3 {
        let mut plan: Box<dyn Plan> = Box::new(Leaves(Arc::clone(&is_in_flight)));
        let batchable = Batchable {
            engine: &engine,
            plan: &mut plan,
            program: 7,
            is_allowed: true,
        };
        let (tenant, mut events) = (TenantId(1), 0);
        let observe = |_| events += 1;
        let state = scheduler.run_batchable(tenant, ENTITLEMENT, batchable, observe, || false);
        let RunState::InFlight(run) = state else {
            panic!("the plan was waited for");
        };
        assert!(is_in_flight.load(Ordering::Relaxed) && scheduler.lock().holder.is_some());
        let (outcome, times) = run.wait(&mut *plan, |_| ());
        assert_eq!(
            (outcome, times.turns, times.members, events),
            (Ok(()), 1, 1, 2)
        );
        assert!(!is_in_flight.load(Ordering::Relaxed));
        // Others that return wait for the program, as after a batch.
        let state = scheduler.lock();
        assert!(state.holder.is_none() && state.batches.offers.is_empty());
        let last = state.batches.last.as_ref().expect("a turn has ended");
        assert_eq!((last.products, last.absent.contains(&7)), (1, true));
    }
    assert!(engine.sizes().is_empty());
}
