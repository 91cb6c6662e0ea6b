//! Who gets what, among processes.
#![forbid(unsafe_code)]

use crate::roster::{GuestRule, Rules};

/// What there is to share out.
#[derive(Debug, Clone)]
pub struct Means {
    /// The engine, as it is called.
    pub engine: String,
    /// All memory that guests may use, where it is ours to share out; an engine whose driver does that has none.
    pub memory: Option<u64>,
}

/// Who gets what.
#[derive(Debug, Clone)]
pub struct Shares {
    /// The guests by name, each with its part of the memory, and what a guest without a name gets.
    pub rules: Rules,
    /// Guests without a name that are served at once: as many as there are parts of the memory for.
    pub places: usize,
    /// Programs that are served at once, of all guests.
    pub sessions: usize,
}

impl Shares {
    /// The rules of the worker of this guest; none if there is no such guest any more.
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

    fn policy_weight(&self, guest: Option<&str>) -> u32 {
        let named = |name: &str| self.rules.guests.iter().find(|rule| rule.name == name);
        match guest.and_then(named) {
            Some(rule) => rule.policy.weight,
            None => self
                .rules
                .unnamed
                .as_ref()
                .map_or(1, |policy| policy.weight),
        }
    }

    /// The nice level of this guest's processes.
    pub(super) fn nice(&self, guest: Option<&str>) -> i32 {
        let weights = |rule: &GuestRule| rule.policy.weight;
        let unnamed = self.rules.unnamed.as_ref().map(|policy| policy.weight);
        let heaviest = self.rules.guests.iter().map(weights).chain(unnamed).max();
        nice(self.policy_weight(guest), heaviest.unwrap_or(1))
    }
}

/// The nice level that gives a process of `weight` its part of a busy processor, beside one of the greatest weight: each
/// level is a fifth less. There are no more than 19, which is one part in seventy.
fn nice(weight: u32, heaviest: u32) -> i32 {
    let ratio = f64::from(heaviest.max(1)) / f64::from(weight.max(1));
    (ratio.ln() / 1.25f64.ln()).round().clamp(0.0, 19.0) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_become_nice_levels_with_the_heaviest_at_none() {
        assert_eq!(nice(3, 3), 0);
        assert_eq!(nice(1, 1), 0);
        // 1.25 to the fifth is 3.05.
        assert_eq!(nice(1, 3), 5);
        assert_eq!(nice(1, 1000), 19);
    }
}
