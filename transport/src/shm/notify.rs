//! Sleep and wake-up without a lost notification.
//!
//! An end that waits spins first, for as long as spinning has recently been successful
//! ([`SpinBudget`]), and then sleeps. The protocol of one sleep:
//!
//! ```text
//!  sleeper                                     peer
//!  S1  wake-on  = the awaited condition        P1  publish (tail, head or retired)
//!  S2  sleeping = a new sleep number           P2  full fence
//!  S3  full fence                              P3  load sleeping
//!  S4  check the awaited condition             P4  if not 0: ring, once per sleep number
//!  S5  wait for the doorbell, 50 ms at most
//!  S6  sleeping = 0
//! ```
//!
//! The fence at S3 pairs with the fence at P2, and closes the race between the check at S4 and the
//! load at P3. Sequential consistency orders the two fences. If S3 is first, then P3 loads the
//! sleep number of S2, and P4 rings. If P2 is first, then S4 sees the publication of P1. No wake-up
//! is lost either way. The bound at S5 is not part of this argument: it serves peers that violate
//! the protocol, and links whose doorbell does not reach this end.
//!
//! A ring may be spurious: the sleeper has seen the publication at S4, or the ring belongs to an
//! earlier sleep. The sleeper then checks its condition, finds it false, and sleeps again under a
//! new number. The sleeper clears its doorbell before S1. The clear cannot lose a wake-up, because
//! a ring before S1 cannot be for the new sleep number.
#![forbid(unsafe_code)]

use std::time::Duration;

use super::memory::SharedWords;

/// The offsets of a sleeper's two words.
#[derive(Debug, Clone, Copy)]
pub struct SleepWords {
    /// The word `sleeping`: 0 while the sleeper is awake.
    pub sleeping: usize,
    /// The word `wake-on`: the condition that the sleeper waits for.
    pub wake_on: usize,
}

/// The sleeper's side of the protocol.
#[derive(Debug)]
pub struct Sleeper {
    words: SleepWords,
    number: u64,
}

impl Sleeper {
    /// A sleeper in the awake state.
    pub fn new(words: SleepWords) -> Sleeper {
        Sleeper { words, number: 0 }
    }

    /// S1 to S3. The caller then checks its condition, and waits only if the condition is false.
    pub fn announce(&mut self, memory: &impl SharedWords, wake_on: u64) {
        self.number += 1;
        memory.store(self.words.wake_on, wake_on);
        memory.store(self.words.sleeping, self.number);
        memory.full_fence();
    }

    /// S6.
    pub fn awake(&mut self, memory: &impl SharedWords) {
        memory.store(self.words.sleeping, 0);
    }
}

/// The peer's side of the protocol.
#[derive(Debug)]
pub struct Waker {
    words: SleepWords,
    /// The last sleep number that was rung for.
    rung: u64,
}

impl Waker {
    /// The waker for the sleeper with these words.
    pub fn new(words: SleepWords) -> Waker {
        Waker { words, rung: 0 }
    }

    /// P2 to P4: whether the caller must ring the doorbell after a publication. `is_awaited` says
    /// whether the publication satisfies a given wake-on value.
    pub fn must_ring(
        &mut self,
        memory: &impl SharedWords,
        is_awaited: impl FnOnce(u64) -> bool,
    ) -> bool {
        memory.full_fence();
        let number = memory.load(self.words.sleeping);
        // The loads of `sleeping` and `wake-on` are not atomic together. If `wake-on` belongs to a
        // later sleep than `number`, then that sleep began after the fence above, and its check at
        // S4 saw the publication: no ring is needed.
        if number == 0 || number == self.rung || !is_awaited(memory.load(self.words.wake_on)) {
            return false;
        }
        self.rung = number;
        true
    }
}

/// The longest sleep between two checks of the condition.
pub const MAX_SLEEP: Duration = Duration::from_millis(50);

/// The adaptive duration of spinning before a sleep.
#[derive(Debug)]
pub struct SpinBudget {
    budget: Duration,
    max: Duration,
}

impl SpinBudget {
    /// The maximum. A sleep and a wake-up cost about as much.
    const MAX: Duration = Duration::from_micros(100);
    const MIN: Duration = Duration::from_micros(2);

    /// The initial budget. On a machine with one processor the budget is always zero, because the
    /// peer does not run while this end spins.
    pub fn new() -> SpinBudget {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        let max = if processors > 1 {
            SpinBudget::MAX
        } else {
            Duration::ZERO
        };
        SpinBudget { budget: max, max }
    }

    /// The duration of the next spin.
    pub fn get(&self) -> Duration {
        self.budget
    }

    /// Adapts to the total duration of a wait: a short wait doubles the budget, a long one halves
    /// it.
    pub fn adapt(&mut self, waited: Duration) {
        self.budget = if waited <= SpinBudget::MAX {
            (self.budget * 2).max(SpinBudget::MIN * 4).min(self.max)
        } else {
            (self.budget / 2).max(SpinBudget::MIN).min(self.max)
        };
    }
}

impl Default for SpinBudget {
    fn default() -> SpinBudget {
        SpinBudget::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_adapts_to_the_waits() {
        let mut budget = SpinBudget {
            budget: SpinBudget::MAX,
            max: SpinBudget::MAX,
        };
        for _ in 0..20 {
            budget.adapt(Duration::from_millis(5));
        }
        assert_eq!(budget.get(), SpinBudget::MIN);
        budget.adapt(Duration::from_micros(60));
        assert_eq!(budget.get(), SpinBudget::MIN * 4);
        for _ in 0..20 {
            budget.adapt(Duration::from_micros(60));
        }
        assert_eq!(budget.get(), SpinBudget::MAX);
        // On one processor the budget stays zero.
        let mut none = SpinBudget {
            budget: Duration::ZERO,
            max: Duration::ZERO,
        };
        none.adapt(Duration::ZERO);
        none.adapt(Duration::from_secs(1));
        assert_eq!(none.get(), Duration::ZERO);
    }
}
