//! Guests that a client of the control socket adds while the executor runs, each with a listener
//! of its own. Added guests are not in the configuration file, and a reload keeps them.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vgpu_transport::link::Endpoint;

use crate::config::{GuestSettings, Settings, is_guest_name};
use crate::policy::Policy;

/// The most guests that clients may add: each has a thread that accepts its programs.
const MAX_ADDED: usize = 1024;

/// A guest that a client adds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddedGuest {
    /// The name of the guest, as in the configuration.
    pub name: String,
    /// The absolute path of the guest's unix socket. Its folder exists.
    pub socket: PathBuf,
    /// Permissions of the socket.
    pub mode: u32,
    /// Quota of device memory in bytes, on each device. `None`: the memory that no quota reserves.
    pub memory: Option<u64>,
    /// Share of the device's time, relative to the weights of the other guests.
    pub weight: u32,
    /// The devices of the executor that the guest may use, in the order in which it sees them, each
    /// with a quota in place of `memory`. Empty: all devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceQuota>,
}

/// A device that a guest may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceQuota {
    /// The position of the device among the engines of the executor.
    pub device: usize,
    /// Quota of memory on this device in bytes.
    pub memory: u64,
}

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestRequest {
    /// Add a guest and open its listener. A guest that was added with the same name and socket
    /// gets the quota and the weight of this one.
    Add(AddedGuest),
    /// Close the listener of an added guest, end the sessions of the guest, and forget the guest.
    /// Nothing happens if no guest was added with this name.
    Remove {
        /// The name of the guest.
        name: String,
    },
    /// Only list the guests.
    List,
}

/// The answer to a [`GuestRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestAnswer {
    /// The request was carried out.
    Done(GuestList),
    /// The request has changed nothing, for this reason.
    Refused(String),
}

/// The added guests, and what an executor has for them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestList {
    /// The added guests, sorted by name.
    pub guests: Vec<AddedGuest>,
    /// Bytes of device memory that the quotas of all added guests may reserve on each device: those
    /// of the engine that has least, without the quotas of the configuration.
    pub memory: u64,
    /// The devices of the executor, in the order of its engines. Empty: the executor is an older
    /// one.
    #[serde(default)]
    pub devices: Vec<DeviceCapacity>,
    /// Why the executor serves no further programs: it makes no progress, or it drains. `None`: it
    /// does.
    pub unavailable: Option<String>,
}

/// A device of an executor, and what added guests may have of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceCapacity {
    /// Bytes of memory that the quotas of all added guests may reserve: those of the engine without
    /// the quotas of the configuration.
    pub memory: u64,
    /// Bytes by which an operator has raised the quotas of added guests above those with which they
    /// were added. These bytes are part of `memory`.
    pub raised: u64,
    /// The PCI address of the GPU, such as `0000:01:00.0`. `None`: the engine has no GPU, or does
    /// not know the address.
    pub address: Option<String>,
}

/// Why a guest cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum AddGuestError {
    #[error("the name {0:?}: expected 1 to 64 letters, digits, `.`, `_` and `-`")]
    Name(String),
    #[error("guest {name}: the path of the socket {} is not absolute", socket.display())]
    RelativePath { name: String, socket: PathBuf },
    #[error("guest {name}: the mode {mode:o} is not that of a socket, such as 660")]
    Mode { name: String, mode: u32 },
    #[error(
        "guest {name}: the weight {weight} is not from 1 to {}",
        Policy::MAX_WEIGHT
    )]
    Weight { name: String, weight: u32 },
    #[error("guest {name}: a quota of 0 bytes")]
    NoMemory { name: String },
    #[error("guest {name}: device {device} is named twice")]
    DeviceTwice { name: String, device: usize },
    #[error("guest {name} was added with the socket {}", socket.display())]
    OtherSocket { name: String, socket: PathBuf },
    #[error("guest {name}: {address} is the address of another listener")]
    AddressInUse { name: String, address: String },
    #[error("the configuration names guest {0}, which was added through the control socket")]
    Configured(String),
    #[error("{MAX_ADDED} guests were added, which is the most")]
    TooMany,
}

impl AddedGuest {
    /// The limits of the guest.
    fn policy(&self) -> Policy {
        Policy {
            memory: self.memory,
            weight: self.weight,
            devices: self.devices.iter().map(|quota| quota.device).collect(),
            memory_on: { self.devices.iter() }
                .map(|quota| (quota.device, quota.memory))
                .collect(),
            ..Policy::default()
        }
    }

    /// Adds the guest to settings without it.
    fn add_to(&self, settings: &mut Settings) -> Result<(), AddGuestError> {
        let name = self.name.clone();
        let is_named = |known: &GuestSettings| known.rule.name == name;
        if settings.guests.iter().any(is_named) {
            return Err(AddGuestError::Configured(name));
        }
        let endpoint = Endpoint::Unix(self.socket.clone());
        let own = settings.guests.iter().flat_map(|known| &known.listen);
        let mut machines = settings.guests.iter().filter_map(|known| known.vm.as_ref());
        if settings
            .listen
            .iter()
            .chain(own)
            .any(|used| *used == endpoint)
            || machines.any(|vm| vm.socket == self.socket)
        {
            let address = endpoint.to_string();
            return Err(AddGuestError::AddressInUse { name, address });
        }
        let mut added = GuestSettings::new(&name);
        added.rule.policy = self.policy();
        added.listen = vec![endpoint];
        added.mode = self.mode;
        settings.guests.push(added);
        Ok(())
    }
}

/// The guests that clients have added.
#[derive(Debug, Clone, Default)]
pub struct AddedGuests(BTreeMap<String, AddedGuest>);

impl AddedGuests {
    /// Carries out a request on the list. Returns whether the list has changed.
    ///
    /// # Errors
    /// [`AddGuestError`]: the list is unchanged.
    pub fn change(&mut self, request: &GuestRequest) -> Result<bool, AddGuestError> {
        match request {
            GuestRequest::List => Ok(false),
            GuestRequest::Remove { name } => Ok(self.0.remove(name).is_some()),
            GuestRequest::Add(guest) => self.add(guest),
        }
    }

    fn add(&mut self, guest: &AddedGuest) -> Result<bool, AddGuestError> {
        let name = guest.name.clone();
        if !is_guest_name(&name) {
            return Err(AddGuestError::Name(name));
        }
        if !guest.socket.is_absolute() {
            let socket = guest.socket.clone();
            return Err(AddGuestError::RelativePath { name, socket });
        }
        if guest.mode & !0o777 != 0 {
            let mode = guest.mode;
            return Err(AddGuestError::Mode { name, mode });
        }
        if !(1..=Policy::MAX_WEIGHT).contains(&guest.weight) {
            let weight = guest.weight;
            return Err(AddGuestError::Weight { name, weight });
        }
        let quotas = guest.devices.iter().map(|quota| quota.memory);
        if quotas.chain(guest.memory).any(|quota| quota == 0) {
            return Err(AddGuestError::NoMemory { name });
        }
        for (at, quota) in guest.devices.iter().enumerate() {
            let device = quota.device;
            if guest.devices[..at]
                .iter()
                .any(|other| other.device == device)
            {
                return Err(AddGuestError::DeviceTwice { name, device });
            }
        }
        match self.0.get(&name) {
            Some(known) if known == guest => return Ok(false),
            Some(known) if known.socket != guest.socket => {
                let socket = known.socket.clone();
                return Err(AddGuestError::OtherSocket { name, socket });
            }
            Some(_) => {}
            None if self.0.len() >= MAX_ADDED => return Err(AddGuestError::TooMany),
            None => {}
        }
        self.0.insert(name, guest.clone());
        Ok(true)
    }

    /// Adds the guests to the settings of the configuration.
    ///
    /// # Errors
    /// The configuration has a guest of the same name or a listener at the same address, or two
    /// added guests have one address.
    pub fn add_to(&self, settings: &mut Settings) -> Result<(), AddGuestError> {
        self.0.values().try_for_each(|guest| guest.add_to(settings))
    }

    /// Makes the added guests of the settings, which are those of `before`, these. A guest that is
    /// the same in both keeps the settings that it has, which an operator may have changed.
    ///
    /// # Errors
    /// As [`AddedGuests::add_to`].
    pub fn replace(
        &self,
        before: &AddedGuests,
        settings: &mut Settings,
    ) -> Result<(), AddGuestError> {
        settings.guests.retain(|guest| {
            let name = &guest.rule.name;
            let known = before.0.get(name);
            known.is_none() || known == self.0.get(name)
        });
        let is_new = |guest: &&AddedGuest| before.0.get(&guest.name) != Some(*guest);
        let mut new = self.0.values().filter(is_new);
        new.try_for_each(|guest| guest.add_to(settings))
    }

    /// Removes the guests from settings to which they were added.
    pub fn remove_from(&self, settings: &mut Settings) {
        let is_added = |guest: &GuestSettings| self.0.contains_key(&guest.rule.name);
        settings.guests.retain(|guest| !is_added(guest));
    }

    /// Bytes by which the quotas of the guests in `settings` exceed those with which the guests
    /// were added, on a device: an operator has raised them.
    pub fn raised(&self, settings: &Settings, device: usize) -> u64 {
        let guests = settings.guests.iter().filter_map(|guest| {
            let added = self.0.get(&guest.rule.name)?.policy();
            let quota = guest.rule.policy.quota_on(device);
            Some(quota.saturating_sub(added.quota_on(device)))
        });
        guests.fold(0, u64::saturating_add)
    }

    /// The guests, sorted by name.
    pub fn list(&self) -> Vec<AddedGuest> {
        self.0.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_change::GuestChange;

    fn guest(name: &str, socket: &str) -> AddedGuest {
        AddedGuest {
            name: name.into(),
            socket: socket.into(),
            mode: 0o666,
            memory: Some(1 << 20),
            weight: 1,
            devices: Vec::new(),
        }
    }

    fn quota(device: usize, memory: u64) -> DeviceQuota {
        DeviceQuota { device, memory }
    }

    fn add(added: &mut AddedGuests, guest: AddedGuest) -> Result<bool, AddGuestError> {
        added.change(&GuestRequest::Add(guest))
    }

    #[test]
    fn invalid_guests_are_refused() {
        let mut added = AddedGuests::default();
        let valid = guest("a", "/run/a.sock");
        let refused = [
            AddedGuest {
                name: "a b".into(),
                ..valid.clone()
            },
            AddedGuest {
                name: "x".repeat(65),
                ..valid.clone()
            },
            guest("a", "a.sock"),
            AddedGuest {
                mode: 0o1000,
                ..valid.clone()
            },
            AddedGuest {
                weight: 0,
                ..valid.clone()
            },
            AddedGuest {
                weight: Policy::MAX_WEIGHT + 1,
                ..valid.clone()
            },
            AddedGuest {
                memory: Some(0),
                ..valid.clone()
            },
            AddedGuest {
                devices: vec![quota(0, 0)],
                ..valid.clone()
            },
            AddedGuest {
                devices: vec![quota(1, 4), quota(0, 4), quota(1, 4)],
                ..valid.clone()
            },
        ];
        for one in refused {
            assert!(add(&mut added, one.clone()).is_err(), "{one:?}");
        }
        assert!(added.list().is_empty());
        assert_eq!(add(&mut added, valid), Ok(true));
    }

    #[test]
    fn an_added_guest_is_changed_and_removed() {
        let mut added = AddedGuests::default();
        let first = guest("a", "/run/a.sock");
        assert_eq!(add(&mut added, first.clone()), Ok(true));
        assert_eq!(add(&mut added, first.clone()), Ok(false), "nothing is new");
        let larger = AddedGuest {
            memory: Some(2 << 20),
            ..first
        };
        assert_eq!(add(&mut added, larger.clone()), Ok(true));
        assert_eq!(added.list(), [larger]);
        let moved = add(&mut added, guest("a", "/run/b.sock"));
        assert!(matches!(moved, Err(AddGuestError::OtherSocket { .. })));
        let remove = GuestRequest::Remove { name: "a".into() };
        assert_eq!(added.change(&remove), Ok(true));
        assert_eq!(added.change(&remove), Ok(false));
        assert!(added.list().is_empty());
    }

    #[test]
    fn the_number_of_added_guests_is_limited() {
        let mut added = AddedGuests::default();
        for n in 0..MAX_ADDED {
            let one = guest(&format!("g{n}"), &format!("/run/{n}.sock"));
            assert_eq!(add(&mut added, one), Ok(true));
        }
        let further = add(&mut added, guest("further", "/run/further.sock"));
        assert_eq!(further, Err(AddGuestError::TooMany));
        // Those that are known can still be changed.
        let known = AddedGuest {
            weight: 2,
            ..guest("g0", "/run/0.sock")
        };
        assert_eq!(add(&mut added, known), Ok(true));
    }

    #[test]
    fn added_guests_join_those_of_the_configuration() {
        let text = "[server]\nlisten = [\"unix:/run/all.sock\"]\n\
                    [[guest]]\nname = \"known\"\nlisten = [\"unix:/run/known.sock\"]\n";
        let file = Settings::parse(text).unwrap();
        let mut added = AddedGuests::default();
        add(&mut added, guest("pod", "/run/pod.sock")).unwrap();
        let mut settings = file.clone();
        added.add_to(&mut settings).unwrap();
        let names: Vec<_> = settings.guests.iter().map(|g| &g.rule.name).collect();
        assert_eq!(names, ["known", "pod"]);
        let pod = &settings.guests[1];
        assert_eq!(pod.rule.policy.memory, Some(1 << 20));
        assert_eq!(pod.mode, 0o666);
        assert_eq!(pod.listen, [Endpoint::Unix("/run/pod.sock".into())]);
        added.remove_from(&mut settings);
        assert_eq!(settings, file);

        for (name, socket) in [
            ("known", "/run/other.sock"),
            ("other", "/run/known.sock"),
            ("other", "/run/all.sock"),
            ("other", "/run/pod.sock"),
        ] {
            let mut more = added.clone();
            add(&mut more, guest(name, socket)).unwrap();
            let outcome = more.add_to(&mut file.clone());
            assert!(outcome.is_err(), "{name} at {socket}");
        }
    }

    #[test]
    fn a_guest_has_a_quota_on_each_of_its_devices() {
        let mut added = AddedGuests::default();
        let pod = AddedGuest {
            memory: None,
            devices: vec![quota(2, 3 << 20), quota(0, 5 << 20)],
            ..guest("pod", "/run/pod.sock")
        };
        add(&mut added, pod).unwrap();
        let mut settings = Settings::default();
        added.add_to(&mut settings).unwrap();
        let quotas = |settings: &Settings| {
            let policy = &settings.guests[0].rule.policy;
            [0, 1, 2].map(|device| policy.quota_on(device) >> 20)
        };
        assert_eq!(quotas(&settings), [5, 0, 3]);
        assert_eq!(settings.guests[0].rule.policy.devices, [2, 0]);
        assert_eq!(
            [0, 1, 2].map(|device| added.raised(&settings, device)),
            [0; 3]
        );
        // An operator gives the guest one quota on all of its devices.
        let change = GuestChange::parse("pod", &["memory=4M".into()]).unwrap();
        change.apply(&mut settings, None).unwrap();
        assert_eq!(quotas(&settings), [4, 0, 4]);
        let raised = [0, 1, 2].map(|device| added.raised(&settings, device));
        assert_eq!(raised, [0, 0, 1 << 20]);
    }

    #[test]
    fn a_change_of_an_operator_stays_until_the_client_changes_the_guest() {
        let mut before = AddedGuests::default();
        add(&mut before, guest("a", "/run/a.sock")).unwrap();
        let mut settings = Settings::default();
        before.add_to(&mut settings).unwrap();
        settings.guests[0].rule.policy.memory = Some(7 << 20);
        let quotas = |settings: &Settings| {
            let guests = settings.guests.iter();
            let quotas = guests.map(|one| (one.rule.name.clone(), one.rule.policy.memory));
            quotas.collect::<Vec<_>>()
        };
        // Another guest comes and goes.
        let mut more = before.clone();
        add(&mut more, guest("b", "/run/b.sock")).unwrap();
        more.replace(&before, &mut settings).unwrap();
        let (a, b) = ("a".to_owned(), "b".to_owned());
        let expected = [(a.clone(), Some(7 << 20)), (b, Some(1 << 20))];
        assert_eq!(quotas(&settings), expected);
        before.replace(&more, &mut settings).unwrap();
        assert_eq!(quotas(&settings), expected[..1]);
        // The client has the last word.
        let mut larger = before.clone();
        let wanted = AddedGuest {
            memory: Some(2 << 20),
            ..guest("a", "/run/a.sock")
        };
        add(&mut larger, wanted).unwrap();
        larger.replace(&before, &mut settings).unwrap();
        assert_eq!(quotas(&settings), [(a, Some(2 << 20))]);
        AddedGuests::default()
            .replace(&larger, &mut settings)
            .unwrap();
        assert_eq!(settings, Settings::default());
    }
}
