//! A change of a guest's limits while the executor runs: `vgpu set`.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use crate::config::Settings;
use crate::policy::Policy;
use crate::size::{self, ParseSizeError, shown};

/// The name of all unnamed guests in `vgpu ps`.
const UNNAMED: &str = "-";

/// New limits of a guest. Limits that are `None` stay as they are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestChange {
    /// The guest's name; `-` for each unnamed guest.
    pub guest: String,
    /// The quota of memory.
    pub memory: Option<Quota>,
    /// The share of the engine's time.
    pub weight: Option<u32>,
}

/// A quota of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Quota {
    /// So many bytes.
    Bytes(u64),
    /// No quota: the memory that no quota reserves.
    Unlimited,
}

/// Why words are no change of a guest's limits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ParseChangeError {
    #[error("{0:?} is no change: expected memory=SIZE, memory=none or weight=NUMBER")]
    Form(String),
    #[error("unknown key {0:?}: expected memory or weight")]
    Key(String),
    #[error("{0} is given twice")]
    Twice(&'static str),
    #[error("nothing to change: expected memory=SIZE, memory=none or weight=NUMBER")]
    Nothing,
    #[error("memory: {0}")]
    Size(#[from] ParseSizeError),
    #[error("{0:?}: a weight is a whole number from 1 to {most}", most = Policy::MAX_WEIGHT)]
    Weight(String),
}

/// Why a guest's limits cannot be changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ChangeError {
    #[error("no guest is named {guest:?}: {}", known_names(known))]
    UnknownGuest { guest: String, known: Vec<String> },
    #[error("the configuration rejects unnamed guests, which therefore have no limits")]
    NoUnnamed,
    #[error("a quota of {} for guest {guest}: the engine has {}", shown(*wanted), shown(*total))]
    MoreThanDevice {
        guest: String,
        wanted: u64,
        total: u64,
    },
    #[error("weight {0}: a weight is a whole number from 1 to {most}", most = Policy::MAX_WEIGHT)]
    Weight(u32),
}

fn known_names(known: &[String]) -> String {
    match known {
        [] => "the configuration names no guest".into(),
        known => format!("the configuration has {}", known.join(", ")),
    }
}

impl GuestChange {
    /// Reads a change of `guest` from words such as `memory=40G` and `weight=3`.
    ///
    /// # Errors
    /// [`ParseChangeError`] names the word that is wrong.
    pub fn parse(guest: &str, words: &[String]) -> Result<GuestChange, ParseChangeError> {
        let mut change = GuestChange {
            guest: guest.to_owned(),
            memory: None,
            weight: None,
        };
        for word in words {
            let (key, value) = word
                .split_once('=')
                .ok_or_else(|| ParseChangeError::Form(word.clone()))?;
            match key {
                "memory" => {
                    let quota = match value {
                        "none" => Quota::Unlimited,
                        size => Quota::Bytes(size::parse(size)?),
                    };
                    if change.memory.replace(quota).is_some() {
                        return Err(ParseChangeError::Twice("memory"));
                    }
                }
                "weight" => {
                    let wrong = || ParseChangeError::Weight(value.to_owned());
                    let weight = value.parse().map_err(|_| wrong())?;
                    if !is_weight(weight) {
                        return Err(wrong());
                    }
                    if change.weight.replace(weight).is_some() {
                        return Err(ParseChangeError::Twice("weight"));
                    }
                }
                key => return Err(ParseChangeError::Key(key.to_owned())),
            }
        }
        match change.memory.is_none() && change.weight.is_none() {
            true => Err(ParseChangeError::Nothing),
            false => Ok(change),
        }
    }

    /// Changes the guest's limits in the settings of an engine with `total` bytes of memory, if the
    /// size is known. Returns what has changed, for people.
    ///
    /// # Errors
    /// [`ChangeError`]: nothing has changed.
    pub fn apply(
        &self,
        settings: &mut Settings,
        total: Option<u64>,
    ) -> Result<String, ChangeError> {
        if let Some(weight) = self.weight.filter(|weight| !is_weight(*weight)) {
            return Err(ChangeError::Weight(weight));
        }
        if let (Some(Quota::Bytes(wanted)), Some(total)) = (self.memory, total)
            && wanted > total
        {
            return Err(ChangeError::MoreThanDevice {
                guest: self.guest.clone(),
                wanted,
                total,
            });
        }
        let policy = match self.guest.as_str() {
            UNNAMED => settings.unnamed.as_mut().ok_or(ChangeError::NoUnnamed)?,
            name => {
                let found = settings.guests.iter().position(|one| one.rule.name == name);
                let Some(found) = found else {
                    let names = settings.guests.iter().map(|one| one.rule.name.clone());
                    return Err(ChangeError::UnknownGuest {
                        guest: name.to_owned(),
                        known: names.collect(),
                    });
                };
                &mut settings.guests[found].rule.policy
            }
        };
        let mut said = Vec::new();
        if let Some(quota) = self.memory {
            let before = policy.memory_on.values().max().copied();
            let before = before.or(policy.memory);
            policy.memory_on.clear();
            policy.memory = match quota {
                Quota::Bytes(bytes) => Some(bytes),
                Quota::Unlimited => None,
            };
            let text = |quota: Option<u64>| quota.map_or_else(|| "none".to_owned(), shown);
            let (before, after) = (text(before), text(policy.memory));
            said.push(format!("quota {after} (before: {before})"));
        }
        if let Some(weight) = self.weight {
            said.push(format!("weight {weight} (before: {})", policy.weight));
            policy.weight = weight;
        }
        Ok(format!("guest {}: {}", self.guest, said.join(", ")))
    }
}

fn is_weight(weight: u32) -> bool {
    (1..=Policy::MAX_WEIGHT).contains(&weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GuestSettings;

    fn parsed(words: &[&str]) -> Result<GuestChange, ParseChangeError> {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        GuestChange::parse("alice", &words)
    }

    #[test]
    fn words_become_a_change_or_an_error_that_names_them() {
        let change = parsed(&["memory=40G", "weight=3"]).unwrap();
        assert_eq!(change.memory, Some(Quota::Bytes(40 << 30)));
        assert_eq!(change.weight, Some(3));
        let change = parsed(&["memory=none"]).unwrap();
        assert_eq!(
            (change.memory, change.weight),
            (Some(Quota::Unlimited), None)
        );
        for (words, said) in [
            (&[][..], "nothing to change"),
            (&["memory"], "\"memory\" is no change"),
            (&["quota=1G"], "unknown key \"quota\""),
            (&["memory=1Q"], "unknown unit \"Q\""),
            (&["memory=1G", "memory=2G"], "memory is given twice"),
            (&["weight=2", "weight=2"], "weight is given twice"),
            (&["weight=0"], "from 1 to 1000"),
            (&["weight=1001"], "from 1 to 1000"),
            (&["weight=-1"], "from 1 to 1000"),
        ] {
            let error = parsed(words).unwrap_err().to_string();
            assert!(error.contains(said), "{words:?}: {error}");
        }
    }

    #[test]
    fn a_change_applies_to_one_guest_or_to_nothing() {
        let mut settings = Settings {
            guests: vec![GuestSettings::new("alice"), GuestSettings::new("bob")],
            ..Settings::default()
        };
        let said = parsed(&["memory=1M", "weight=3"])
            .unwrap()
            .apply(&mut settings, Some(1 << 20))
            .unwrap();
        assert_eq!(
            said,
            "guest alice: quota 1.0 MiB (before: none), weight 3 (before: 1)"
        );
        let policy = &settings.guests[0].rule.policy;
        assert_eq!((policy.memory, policy.weight), (Some(1 << 20), 3));
        assert_eq!(settings.guests[1].rule.policy, Policy::default());

        let before = settings.clone();
        let mut fails = |change: GuestChange, said: &str| {
            let error = change.apply(&mut settings, Some(1 << 20)).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
            assert_eq!(settings, before);
        };
        fails(
            parsed(&["memory=2M"]).unwrap(),
            "a quota of 2.0 MiB for guest alice: the engine has 1.0 MiB",
        );
        let other = |guest: &str| GuestChange {
            guest: guest.into(),
            memory: None,
            weight: Some(2),
        };
        fails(other("eve"), "\"eve\": the configuration has alice, bob");
        // A client that is not `vgpu set`.
        let heavy = GuestChange {
            weight: Some(0),
            ..other("bob")
        };
        fails(heavy, "weight 0: ");

        other("-").apply(&mut settings, None).unwrap();
        assert_eq!(
            settings.unnamed.as_ref().map(|policy| policy.weight),
            Some(2)
        );
        settings.unnamed = None;
        let error = other("-").apply(&mut settings, None).unwrap_err();
        assert_eq!(error, ChangeError::NoUnnamed);
    }
}
