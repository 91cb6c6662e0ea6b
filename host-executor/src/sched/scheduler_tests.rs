//! The scheduler with threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

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
