//! How memory and processor time are divided among the workers.
#![forbid(unsafe_code)]

use crate::policy::Policy;
use crate::tenant_registry::{GuestRule, Rules};

/// What is divided.
#[derive(Debug, Clone)]
pub struct Resources {
    /// The names of the engines, in the order of their devices. At least one.
    pub engines: Vec<String>,
    /// The GPU of this machine that no engine uses, and why.
    pub unused_gpu: Option<String>,
    /// Bytes of memory that guests may use in all, on each device. `None`: the driver of the engine
    /// divides its memory.
    pub memory: Option<u64>,
}

/// How the resources are divided.
#[derive(Debug, Clone)]
pub struct Partition {
    /// The named guests, each with its memory, and the limits of an unnamed guest.
    pub rules: Rules,
    /// Unnamed guests that are served at once: as many as the remaining memory is enough
    /// for.
    pub max_unnamed: usize,
    /// Processes of unnamed guests of one origin at once.
    pub unnamed_programs: usize,
    /// Programs that are served at once, of all guests.
    pub max_sessions: usize,
}

impl Partition {
    /// The rules for the worker of a guest. `None`: the configuration names no such guest.
    pub(super) fn rules_of(&self, guest: Option<&str>) -> Option<Rules> {
        let (guests, unnamed) = match guest {
            None => (Vec::new(), self.rules.unnamed.clone()),
            Some(name) => {
                let rule = self.rules.guests.iter().find(|rule| rule.name == name)?;
                (vec![rule.clone()], None)
            }
        };
        Some(Rules {
            guests,
            unnamed,
            overcommit: false,
        })
    }

    /// The limits of a guest. `None`: the configuration names no such guest.
    pub(super) fn policy(&self, guest: Option<&str>) -> Option<&Policy> {
        let Some(name) = guest else {
            return self.rules.unnamed.as_ref();
        };
        let rule = self.rules.guests.iter().find(|rule| rule.name == name)?;
        Some(&rule.policy)
    }

    fn policy_weight(&self, guest: Option<&str>) -> u32 {
        let policy = self.policy(guest).or(self.rules.unnamed.as_ref());
        policy.map_or(1, |policy| policy.weight)
    }

    /// The nice level of each of the processes of a guest that has so many at once: together they
    /// get what one process of the guest would get.
    pub(super) fn nice(&self, guest: Option<&str>, processes: u32) -> i32 {
        let weights = |rule: &GuestRule| rule.policy.weight;
        let unnamed = self.rules.unnamed.as_ref().map(|policy| policy.weight);
        let heaviest = self.rules.guests.iter().map(weights).chain(unnamed).max();
        nice(self.policy_weight(guest), processes, heaviest.unwrap_or(1))
    }
}

/// The nice level of each of so many processes that have `weight` together, when the greatest
/// weight is `heaviest`. The kernel gives a process about 1.25 times the processor time of one that
/// is a level above it. The highest level, 19, is about one part in seventy.
fn nice(weight: u32, processes: u32, heaviest: u32) -> i32 {
    let parts = f64::from(heaviest.max(1)) * f64::from(processes.max(1));
    let ratio = parts / f64::from(weight.max(1));
    (ratio.ln() / 1.25f64.ln()).round().clamp(0.0, 19.0) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_become_nice_levels_with_the_heaviest_at_none() {
        assert_eq!(nice(3, 1, 3), 0);
        assert_eq!(nice(1, 1, 1), 0);
        // 1.25 to the fifth is 3.05.
        assert_eq!(nice(1, 1, 3), 5);
        assert_eq!(nice(1, 1, 1000), 19);
        // As many processes as there is weight, and 1.25 to the tenth is 9.3.
        assert_eq!(nice(3, 3, 3), 5);
        assert_eq!(nice(1, 3, 3), 10);
        assert_eq!(nice(1, 1000, 1), 19);
    }
}
