//! The scheduler with threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use super::*;

/// A plan of many pieces, which asserts that no other plan runs at the same time.
struct Pieces<'a> {
    device: &'a AtomicBool,
    left: u32,
    fails: bool,
}

impl Plan for Pieces<'_> {
    fn plan_bytes(&self) -> u64 {
        0
    }

    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        assert!(
            !self.device.swap(true, Ordering::Acquire),
            "two plans at once"
        );
        loop {
            self.left -= 1;
            if self.fails && self.left == 0 {
                self.device.store(false, Ordering::Release);
                panic!("told to panic");
            }
            let over = self.left == 0 || turn.is_over();
            if over {
                break;
            }
            std::hint::spin_loop();
        }
        self.device.store(false, Ordering::Release);
        match self.left {
            0 => Ok(RunStatus::Done),
            _ => Ok(RunStatus::Yielded),
        }
    }
}

/// Runs a plan that is done when `Scheduler::run` returns.
fn run(
    scheduler: &Arc<Scheduler>,
    tenant: u64,
    entitlement: Entitlement,
    plan: &mut dyn Plan,
) -> (Result<(), RunError>, Times) {
    match scheduler.run(TenantId(tenant), entitlement, plan, |_| {}, || false) {
        RunState::Done(outcome, times) => (outcome, times),
        RunState::InFlight(_) => panic!("the plan is in flight"),
        RunState::Cancelled(_) => panic!("nobody has cancelled the run"),
    }
}

#[test]
fn cancelled_run_ends_between_two_turns_and_the_device_is_free() {
    let scheduler = Arc::new(Scheduler::new(true));
    let device = AtomicBool::new(false);
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    let mut endless = Pieces {
        device: &device,
        left: u32::MAX,
        fails: false,
    };
    let mut asked = 0;
    let is_cancelled = || {
        asked += 1;
        asked == 3
    };
    let run_state = scheduler.run(TenantId(1), entitlement, &mut endless, |_| {}, is_cancelled);
    match run_state {
        RunState::Cancelled(times) => assert_eq!(times.turns, 3),
        _ => panic!("the run was not cancelled"),
    }
    let mut short = Pieces {
        device: &device,
        left: 10,
        fails: false,
    };
    let (outcome, _) = run(&scheduler, 2, entitlement, &mut short);
    outcome.expect("the work does not fail");
}

#[test]
fn plans_of_many_threads_alternate_and_all_complete() {
    let scheduler = Arc::new(Scheduler::new(true));
    let device = AtomicBool::new(false);
    let (graphs, turns) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for guest in 0..6u64 {
            let (scheduler, device, graphs, turns) = (&scheduler, &device, &graphs, &turns);
            scope.spawn(move || {
                let entitlement = Entitlement {
                    weight: guest as u32 + 1,
                    in_flight: 1 + guest as usize % 2,
                };
                for round in 0..30 {
                    let left = if guest % 2 == 0 { 200_000 } else { 1 + round };
                    let mut work = Pieces {
                        device,
                        left,
                        fails: false,
                    };
                    // Two threads are one tenant.
                    let (outcome, times) = run(scheduler, guest / 2, entitlement, &mut work);
                    outcome.expect("the work does not fail");
                    assert_eq!(work.left, 0);
                    graphs.fetch_add(1, Ordering::Relaxed);
                    turns.fetch_add(times.turns, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(graphs.into_inner(), 180);
    assert!(turns.into_inner() >= 180);
    let state = scheduler.lock();
    assert!(state.holder.is_none() && state.waiters.is_empty());
}

/// A plan that the device ends asynchronously.
struct Launches<'a> {
    device: &'a AtomicBool,
    is_in_flight: bool,
}

impl Plan for Launches<'_> {
    fn plan_bytes(&self) -> u64 {
        0
    }

    fn launch(&mut self, _: &Turn) -> Result<RunStatus, RunError> {
        assert!(
            !self.device.swap(true, Ordering::Acquire),
            "two plans at once"
        );
        self.is_in_flight = true;
        Ok(RunStatus::InFlight)
    }

    fn wait(&mut self) -> Result<(), RunError> {
        assert!(std::mem::take(&mut self.is_in_flight));
        self.device.store(false, Ordering::Release);
        Ok(())
    }
}

#[test]
fn next_turn_waits_for_graphs_in_flight() {
    let scheduler = Arc::new(Scheduler::new(true));
    let device = AtomicBool::new(false);
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    thread::scope(|scope| {
        for guest in 0..4 {
            let (scheduler, device) = (&scheduler, &device);
            scope.spawn(move || {
                for _ in 0..200 {
                    let mut plan = Launches {
                        device,
                        is_in_flight: false,
                    };
                    let mut seen = Vec::new();
                    let observe = |event| seen.push(event);
                    match scheduler.run(TenantId(guest), entitlement, &mut plan, observe, || false)
                    {
                        RunState::Cancelled(_) => panic!("nobody has cancelled the run"),
                        RunState::InFlight(run) => {
                            thread::yield_now();
                            let observe = |event| seen.push(event);
                            let (outcome, times) = run.wait(&mut plan, observe);
                            assert_eq!((outcome, times.turns), (Ok(()), 1));
                            let all =
                                [TurnEvent::Waits, TurnEvent::Begins, TurnEvent::Ended(times)];
                            assert_eq!(seen, all);
                        }
                        RunState::Done(..) => panic!("the plan was not in flight"),
                    }
                }
            });
        }
    });
    assert!(scheduler.lock().holder.is_none());
}

#[test]
fn panicking_plan_releases_the_device() {
    let scheduler = Arc::new(Scheduler::new(true));
    let device = AtomicBool::new(false);
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    thread::scope(|scope| {
        let panics = scope.spawn(|| {
            let mut work = Pieces {
                device: &device,
                left: 50,
                fails: true,
            };
            let _ = run(&scheduler, 1, entitlement, &mut work);
        });
        assert!(panics.join().is_err());
    });
    for tenant in [1, 2] {
        let mut work = Pieces {
            device: &device,
            left: 50,
            fails: false,
        };
        let (outcome, _) = run(&scheduler, tenant, entitlement, &mut work);
        outcome.expect("the device is free");
    }
}

#[test]
fn single_plan_takes_one_turn() {
    let scheduler = Arc::new(Scheduler::new(true));
    let device = AtomicBool::new(false);
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    let mut work = Pieces {
        device: &device,
        left: 1000,
        fails: false,
    };
    let (outcome, times) = run(&scheduler, 1, entitlement, &mut work);
    assert_eq!((outcome, times.turns), (Ok(()), 1));
}

/// A plan of one piece that ends when told.
struct Piece {
    began: mpsc::Sender<()>,
    end: mpsc::Receiver<()>,
}

impl Plan for Piece {
    fn plan_bytes(&self) -> u64 {
        0
    }

    fn launch(&mut self, _: &Turn) -> Result<RunStatus, RunError> {
        self.began.send(()).expect("the test listens");
        self.end.recv().expect("the test goes on");
        Ok(RunStatus::Done)
    }
}

/// A graph of `tenant` that has the device until the sender is used, on a thread of `scope`.
fn start<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    scheduler: &'scope Arc<Scheduler>,
    tenant: u64,
) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    let ((began, begins), (ends, end)) = (mpsc::channel(), mpsc::channel());
    scope.spawn(move || {
        let (outcome, _) = run(scheduler, tenant, entitlement, &mut Piece { began, end });
        outcome.expect("the work does not fail");
    });
    (begins, ends)
}

/// The longest that a test waits for a thread. More than any test takes.
const LIMIT: Duration = Duration::from_secs(60);

/// A graph of `tenant` that is never to have a turn, on a thread of `scope`. Says whether its run
/// was cancelled.
fn start_unwanted<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    scheduler: &'scope Arc<Scheduler>,
    tenant: u64,
    is_cancelled: impl FnMut() -> bool + Send + 'scope,
) -> mpsc::Receiver<bool> {
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    let (ended, ends) = mpsc::channel();
    scope.spawn(move || {
        let ((began, begins), (_, end)) = (mpsc::channel(), mpsc::channel());
        drop(begins);
        let mut plan = Piece { began, end };
        let tenant = TenantId(tenant);
        let state = scheduler.run(tenant, entitlement, &mut plan, |_| {}, is_cancelled);
        let _ = ended.send(matches!(state, RunState::Cancelled(times) if times.turns == 0));
    });
    ends
}

#[test]
fn graph_that_is_not_wanted_leaves_the_queue_while_another_one_hangs() {
    let scheduler = &Arc::new(Scheduler::new(true));
    thread::scope(|scope| {
        let (begins, end) = start(scope, scheduler, 1);
        begins.recv().expect("it begins");
        let unwanted = start_unwanted(scope, scheduler, 2, || true);
        assert_eq!(unwanted.recv_timeout(LIMIT), Ok(true));
        let state = scheduler.lock();
        assert_eq!(state.holder.map(|holder| holder.tenant), Some(TenantId(1)));
        assert!(state.queue.waiting() == 0 && state.waiters.is_empty());
        drop(state);
        // The tenant has its turns as before.
        let (begins, end_other) = start(scope, scheduler, 2);
        end.send(()).expect("it goes on");
        begins.recv_timeout(LIMIT).expect("its turn");
        end_other.send(()).expect("it waits");
    });
}

/// The thread of a graph that waits panics: the graph leaves the queue.
#[test]
fn graph_whose_thread_panics_while_it_waits_leaves_the_queue() {
    let scheduler = &Arc::new(Scheduler::new(true));
    thread::scope(|scope| {
        let (begins, end) = start(scope, scheduler, 1);
        begins.recv().expect("it begins");
        let panics = scope.spawn(|| {
            let ((began, begins), (_, end)) = (mpsc::channel(), mpsc::channel());
            drop(begins);
            let entitlement = Entitlement {
                weight: 1,
                in_flight: 1,
            };
            let is_cancelled = || -> bool { panic!("the guest cannot be asked") };
            let (tenant, mut plan) = (TenantId(2), Piece { began, end });
            let _ = scheduler.run(tenant, entitlement, &mut plan, |_| {}, is_cancelled);
        });
        assert!(panics.join().is_err());
        let state = scheduler.lock();
        assert_eq!(state.holder.map(|holder| holder.tenant), Some(TenantId(1)));
        assert!(state.queue.waiting() == 0 && state.waiters.is_empty());
        drop(state);
        end.send(()).expect("it goes on");
    });
    assert!(scheduler.lock().holder.is_none());
}

/// A run that is cancelled while it waits says how long it has waited, and that the wait has ended.
#[test]
fn wait_of_a_cancelled_run_counts() {
    let scheduler = &Arc::new(Scheduler::new(true));
    thread::scope(|scope| {
        let (begins, end) = start(scope, scheduler, 1);
        begins.recv().expect("it begins");
        let ((began, _begins), (_end, ends)) = (mpsc::channel(), mpsc::channel());
        let mut plan = Piece { began, end: ends };
        let entitlement = Entitlement {
            weight: 1,
            in_flight: 1,
        };
        let mut events = Vec::new();
        let observe = |event| events.push(event);
        let state = scheduler.run(TenantId(2), entitlement, &mut plan, observe, || true);
        end.send(()).expect("it goes on");
        let RunState::Cancelled(times) = state else {
            panic!("it is cancelled");
        };
        assert!(times.queued >= QUESTION_INTERVAL, "{times:?}");
        assert_eq!(times, Times::waited(times.queued));
        assert_eq!(events, [TurnEvent::Waits, TurnEvent::Ended(times)]);
    });
}

#[test]
fn turn_that_is_given_to_a_graph_while_its_guest_is_asked_about_goes_to_the_next() {
    let scheduler = &Arc::new(Scheduler::new(true));
    thread::scope(|scope| {
        let (begins, end) = start(scope, scheduler, 1);
        begins.recv().expect("it begins");
        let own_end = end.clone();
        let has_turn = || {
            let state = scheduler.lock();
            state
                .holder
                .is_some_and(|holder| holder.ticket == Ticket(2))
        };
        let is_cancelled = move || {
            // After a failure the thread ends, too.
            let start = Instant::now();
            while scheduler.lock().waiters.len() < 2 && start.elapsed() < LIMIT {
                thread::yield_now();
            }
            let _ = own_end.send(());
            while !has_turn() && start.elapsed() < LIMIT {
                thread::yield_now();
            }
            true
        };
        let unwanted = start_unwanted(scope, scheduler, 2, is_cancelled);
        while scheduler.lock().waiters.is_empty() {
            thread::yield_now();
        }
        let (begins, end_next) = start(scope, scheduler, 3);
        let next = begins.recv_timeout(LIMIT);
        // After a failure the threads end, too.
        let _ = end.send(());
        if next.is_err() {
            scheduler.lock().hand_over(&scheduler.turn);
        }
        let _ = end_next.send(());
        next.expect("the turn goes to the next graph");
        assert_eq!(unwanted.recv_timeout(LIMIT), Ok(true));
    });
    let state = scheduler.lock();
    assert!(state.holder.is_none() && state.waiters.is_empty());
}

#[test]
fn time_during_which_others_arrive_is_charged_once() {
    const RAN: Duration = Duration::from_millis(300);
    let scheduler = &Arc::new(Scheduler::new(true));
    let before = scheduler.turn.now();
    thread::scope(|scope| {
        let (begins, end) = start(scope, scheduler, 1);
        begins.recv().expect("it begins");
        thread::sleep(RAN);
        let (begins_other, end_other) = start(scope, scheduler, 2);
        while scheduler.lock().waiters.is_empty() {
            thread::yield_now();
        }
        end.send(()).expect("it waits");
        begins_other.recv().expect("it begins");
        end_other.send(()).expect("it waits");
    });
    let took = scheduler.turn.now() - before;
    let charged = scheduler.lock().queue.time_of(TenantId(1));
    assert!(charged >= RAN && charged <= took, "{charged:?} of {took:?}");
}

/// A guest that decodes and does not return, and one with a long piece and another graph, which
/// runs in the end. Returns whether the device was held for the first guest. The device is not held
/// if the thread of that guest was so late that nobody expects the guest back.
fn second_graph_runs_after_a_hold() -> bool {
    let scheduler = &Arc::new(Scheduler::new(true));
    thread::scope(|scope| {
        let (begins, end) = start(scope, scheduler, 1);
        begins.recv().expect("it begins");
        end.send(()).expect("it waits");
    });
    let mut is_held = false;
    thread::scope(|scope| {
        // A long piece, during which the first guest asks for its next token.
        let (begins, end) = start(scope, scheduler, 2);
        begins.recv().expect("it begins");
        let (decodes, decoded) = start(scope, scheduler, 1);
        // A second graph of the guest that overran.
        let (begins, end_second) = start(scope, scheduler, 2);
        while scheduler.lock().waiters.len() < 2 {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(100));
        end.send(()).expect("it waits");
        decodes.recv().expect("it is its turn");
        decoded.send(()).expect("it waits");
        while begins.try_recv().is_err() {
            is_held |= scheduler.hold().is_some();
            thread::yield_now();
        }
        end_second.send(()).expect("it waits");
    });
    let state = scheduler.lock();
    assert!(state.holder.is_none() && state.hold.is_none() && state.waiters.is_empty());
    is_held
}

#[test]
fn graph_gets_the_device_when_the_guest_that_it_was_held_for_does_not_return() {
    let is_held = (0..50).any(|_| second_graph_runs_after_a_hold());
    assert!(is_held, "the device was never held");
}
