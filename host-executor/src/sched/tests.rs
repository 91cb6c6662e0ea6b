//! The threads that follow the rule.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use super::*;

/// A plan of pieces that checks that it has the device to itself.
struct Work<'a> {
    device: &'a AtomicBool,
    left: u32,
    fails: bool,
}

impl Plan for Work<'_> {
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

/// Runs a plan that leaves nothing under way.
fn run(
    scheduler: &Arc<Scheduler>,
    party: u64,
    terms: Terms,
    plan: &mut dyn Plan,
) -> (Result<(), RunError>, Times) {
    match scheduler.run(Party(party), terms, plan, |_| {}) {
        Ran::Done(outcome, times) => (outcome, times),
        Ran::UnderWay(_) => panic!("something is under way"),
    }
}

#[test]
fn plans_of_many_threads_take_turns_and_all_get_done() {
    let scheduler = Arc::new(Scheduler::default());
    let device = AtomicBool::new(false);
    let (graphs, turns) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for guest in 0..6u64 {
            let (scheduler, device, graphs, turns) = (&scheduler, &device, &graphs, &turns);
            scope.spawn(move || {
                let terms = Terms {
                    weight: guest as u32 + 1,
                    in_flight: 1 + guest as usize % 2,
                };
                for round in 0..30 {
                    let left = if guest % 2 == 0 { 200_000 } else { 1 + round };
                    let mut work = Work {
                        device,
                        left,
                        fails: false,
                    };
                    // Pairs of threads are one guest.
                    let (outcome, times) = run(scheduler, guest / 2, terms, &mut work);
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
    assert!(state.holder.is_none() && state.sleepers.is_empty());
}

/// A plan that leaves its end to the device.
struct Launches<'a> {
    device: &'a AtomicBool,
    is_under_way: bool,
}

impl Plan for Launches<'_> {
    fn launch(&mut self, _: &Turn) -> Result<RunStatus, RunError> {
        assert!(
            !self.device.swap(true, Ordering::Acquire),
            "two plans at once"
        );
        self.is_under_way = true;
        Ok(RunStatus::InFlight)
    }

    fn wait(&mut self) -> Result<(), RunError> {
        assert!(std::mem::take(&mut self.is_under_way));
        self.device.store(false, Ordering::Release);
        Ok(())
    }
}

#[test]
fn nobody_gets_the_device_before_what_is_under_way_has_landed() {
    let scheduler = Arc::new(Scheduler::default());
    let device = AtomicBool::new(false);
    let terms = Terms {
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
                        is_under_way: false,
                    };
                    let mut told = 0;
                    match scheduler.run(Party(guest), terms, &mut plan, |_| told += 1) {
                        Ran::UnderWay(flight) => {
                            thread::yield_now();
                            let (outcome, times) = flight.land(&mut plan, |_| told += 1);
                            assert_eq!((outcome, times.turns, told), (Ok(()), 1, 1));
                        }
                        Ran::Done(..) => panic!("nothing was under way"),
                    }
                }
            });
        }
    });
    assert!(scheduler.lock().holder.is_none());
}

#[test]
fn a_plan_that_panics_gives_the_device_back() {
    let scheduler = Arc::new(Scheduler::default());
    let device = AtomicBool::new(false);
    let terms = Terms {
        weight: 1,
        in_flight: 1,
    };
    thread::scope(|scope| {
        let panics = scope.spawn(|| {
            let mut work = Work {
                device: &device,
                left: 50,
                fails: true,
            };
            let _ = run(&scheduler, 1, terms, &mut work);
        });
        assert!(panics.join().is_err());
    });
    for party in [1, 2] {
        let mut work = Work {
            device: &device,
            left: 50,
            fails: false,
        };
        let (outcome, _) = run(&scheduler, party, terms, &mut work);
        outcome.expect("it is free");
    }
}

#[test]
fn a_lone_plan_takes_one_turn() {
    let scheduler = Arc::new(Scheduler::default());
    let device = AtomicBool::new(false);
    let terms = Terms {
        weight: 1,
        in_flight: 1,
    };
    let mut work = Work {
        device: &device,
        left: 1_000_000,
        fails: false,
    };
    let (outcome, times) = run(&scheduler, 1, terms, &mut work);
    assert_eq!((outcome, times.turns), (Ok(()), 1));
}
