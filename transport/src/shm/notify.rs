//! How an end waits without missing its peer and without burning a core.
//!
//! First it spins, for as long as spinning has lately paid off; then it sleeps. A sleep goes like this:
//!
//! ```text
//!  sleeper                                     peer
//!  S1  wake-on  = what it waits for            P1  publish (tail, head or retired)
//!  S2  sleeping = a new number                 P2  full fence
//!  S3  full fence                              P3  look at sleeping
//!  S4  look whether it has already come        P4  if not 0: ring, once for that number
//!  S5  wait for the doorbell, 50 ms at most
//!  S6  sleeping = 0
//! ```
//!
//! The fences at S3 and P2 pair: one of them is first. If S3, then P3 sees the number and rings; if P2, then S4
//! sees what was published. So no wake is lost. The bound at S5 is not needed for that: it is for peers that
//! break the rules, and for links whose doorbell cannot be heard.
//!
//! A ring can be spurious (the sleeper saw the news at S4, or the ring was for a sleep before): the sleeper looks,
//! finds nothing, and sleeps again under a new number. Rings that came before S1 are forgotten there, which
//! is harmless for the same reason: they cannot have been for the new number.
#![forbid(unsafe_code)]

use std::time::Duration;

use super::memory::Memory;

/// The two words of a sleeper.
#[derive(Debug, Clone, Copy)]
pub struct SleepWords {
    /// Offset of the word that is 0 while the sleeper is awake.
    pub sleeping: usize,
    /// Offset of the word that says what it waits for.
    pub wake_on: usize,
}

/// The sleeper's half of the protocol.
#[derive(Debug)]
pub struct Sleeper {
    words: SleepWords,
    number: u64,
}

impl Sleeper {
    /// A sleeper that is awake.
    pub fn new(words: SleepWords) -> Sleeper {
        Sleeper { words, number: 0 }
    }

    /// S1 to S3. Afterwards: look, and wait only if there is nothing.
    pub fn announce(&mut self, memory: &impl Memory, wake_on: u64) {
        self.number += 1;
        memory.store(self.words.wake_on, wake_on);
        memory.store(self.words.sleeping, self.number);
        memory.full_fence();
    }

    /// S6.
    pub fn awake(&mut self, memory: &impl Memory) {
        memory.store(self.words.sleeping, 0);
    }
}

/// The peer's half of the protocol.
#[derive(Debug)]
pub struct Waker {
    words: SleepWords,
    rung: u64,
}

impl Waker {
    /// A waker of the sleeper with these words.
    pub fn new(words: SleepWords) -> Waker {
        Waker { words, rung: 0 }
    }

    /// P2 to P4: whether the doorbell has to be rung after publishing. `is_news` says whether a sleeper that waits for the
    /// given wake-on value is to be woken.
    pub fn must_ring(&mut self, memory: &impl Memory, is_news: impl FnOnce(u64) -> bool) -> bool {
        memory.full_fence();
        let number = memory.load(self.words.sleeping);
        // If wake-on belongs to a later sleep than the number, then that sleep was announced after our
        // fence, and its sleeper has looked since.
        if number == 0 || number == self.rung || !is_news(memory.load(self.words.wake_on)) {
            return false;
        }
        self.rung = number;
        true
    }
}

/// The longest sleep without looking.
pub const MAX_SLEEP: Duration = Duration::from_millis(50);

/// How long to spin before sleeping: as long as it has lately paid off.
#[derive(Debug)]
pub struct SpinBudget {
    budget: Duration,
    max: Duration,
}

impl SpinBudget {
    /// Waits shorter than this are worth spinning for: a sleep and a wake cost as much.
    const WORTH: Duration = Duration::from_micros(100);
    const LEAST: Duration = Duration::from_micros(2);

    /// A fresh budget. With one processor it stays zero: the peer cannot move while we spin.
    pub fn new() -> SpinBudget {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        let max = if processors > 1 {
            SpinBudget::WORTH
        } else {
            Duration::ZERO
        };
        SpinBudget { budget: max, max }
    }

    /// How long to spin now.
    pub fn get(&self) -> Duration {
        self.budget
    }

    /// Learns from a wait that took so long in all. Long waits make for shorter spins.
    pub fn learn(&mut self, waited: Duration) {
        self.budget = if waited <= SpinBudget::WORTH {
            (self.budget * 2).max(SpinBudget::LEAST * 4).min(self.max)
        } else {
            (self.budget / 2).max(SpinBudget::LEAST).min(self.max)
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
    fn a_budget_follows_what_pays_off() {
        let mut budget = SpinBudget {
            budget: SpinBudget::WORTH,
            max: SpinBudget::WORTH,
        };
        for _ in 0..20 {
            budget.learn(Duration::from_millis(5));
        }
        assert_eq!(budget.get(), SpinBudget::LEAST);
        budget.learn(Duration::from_micros(60));
        assert_eq!(budget.get(), SpinBudget::LEAST * 4);
        for _ in 0..20 {
            budget.learn(Duration::from_micros(60));
        }
        assert_eq!(budget.get(), SpinBudget::WORTH);
        // On one processor it stays zero.
        let mut none = SpinBudget {
            budget: Duration::ZERO,
            max: Duration::ZERO,
        };
        none.learn(Duration::ZERO);
        none.learn(Duration::from_secs(1));
        assert_eq!(none.get(), Duration::ZERO);
    }
}
