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
    fn run(&mut self) -> Result<(), RunError> {
        unreachable!("the scheduler advances plans")
    }

    fn advance(&mut self, turn: &Turn) -> Result<Progress, RunError> {
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
            0 => Ok(Progress::Done),
            _ => Ok(Progress::Yielded),
        }
    }
}

#[test]
fn plans_of_many_threads_take_turns_and_all_get_done() {
    let scheduler = Scheduler::default();
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
                    let (outcome, times) =
                        scheduler.run(Party(guest / 2), terms, &mut work, |_| {});
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

#[test]
fn a_plan_that_panics_gives_the_device_back() {
    let scheduler = Scheduler::default();
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
            let _ = scheduler.run(Party(1), terms, &mut work, |_| {});
        });
        assert!(panics.join().is_err());
    });
    for party in [1, 2] {
        let mut work = Work {
            device: &device,
            left: 50,
            fails: false,
        };
        scheduler
            .run(Party(party), terms, &mut work, |_| {})
            .0
            .expect("it is free");
    }
}

#[test]
fn a_lone_plan_takes_one_turn() {
    let scheduler = Scheduler::default();
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
    let (outcome, times) = scheduler.run(Party(1), terms, &mut work, |_| {});
    assert_eq!((outcome, times.turns), (Ok(()), 1));
}
