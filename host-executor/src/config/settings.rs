//! The settings of `vgpu serve`.
#![forbid(unsafe_code)]

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use vgpu_cpu::Threads;
use vgpu_transport::link::Endpoint;
use vgpu_transport::link::endpoint::DEFAULT_UNIX_PATH;
use vgpu_transport::link::socket_file::DEFAULT_MODE;

use crate::engine::{EngineChoice, EngineKind, EngineList};
use crate::policy::Policy;
use crate::tenant_registry::{GuestRule, Rules};
use crate::vm::VmOptions;
use crate::weights::{CacheOptions, Sharing};

/// The configuration that `vgpu serve` reads if none is named.
pub const DEFAULT_PATH: &str = "/etc/vgpu/vgpu.toml";

/// The control socket if none is named.
pub const DEFAULT_CONTROL_PATH: &str = "/run/vgpu/control.sock";

/// The device of virtual machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VmDevice {
    /// QEMU's `ivshmem-doorbell`.
    #[default]
    Ivshmem,
    /// A PCI function of our own, over vfio-user.
    VfioUser,
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// A text that names no format of log lines.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown log format {0:?}: expected text or json")]
pub struct ParseLogFormatError(String);

impl FromStr for LogFormat {
    type Err = ParseLogFormatError;

    fn from_str(text: &str) -> Result<LogFormat, ParseLogFormatError> {
        match text {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(ParseLogFormatError(text.into())),
        }
    }
}

/// Where metrics are served. Metrics have no authentication: without
/// [`Settings::metrics_allow_remote`], only from this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// An address of this machine.
    Tcp(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

/// Why a text is no address for metrics.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ParseMetricsAddressError {
    #[error("{0:?}: the path of the socket has to be absolute")]
    RelativePath(String),
    #[error("{0:?} is not an address, such as 127.0.0.1:4781 or unix:/run/vgpu/metrics.sock")]
    Address(String),
    #[error(
        "{0} can be reached from other machines, and metrics have no authentication: use 127.0.0.1 \
         or unix:PATH, behind a proxy or a node agent, or allow it with metrics.allow-remote \
         (--metrics-allow-remote)"
    )]
    NotLoopback(SocketAddr),
}

impl FromStr for MetricsAddress {
    type Err = ParseMetricsAddressError;

    fn from_str(text: &str) -> Result<MetricsAddress, ParseMetricsAddressError> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match Path::new(path).is_absolute() {
                true => Ok(MetricsAddress::Unix(path.into())),
                false => Err(ParseMetricsAddressError::RelativePath(text.into())),
            };
        }
        let address = text.parse::<SocketAddr>();
        let address = address.map_err(|_| ParseMetricsAddressError::Address(text.into()))?;
        Ok(MetricsAddress::Tcp(address))
    }
}

impl MetricsAddress {
    /// Checks that the address is one of the loopback interface, unless others are allowed.
    ///
    /// # Errors
    /// [`ParseMetricsAddressError::NotLoopback`] for any other address.
    pub fn check_remote(&self, is_allowed: bool) -> Result<(), ParseMetricsAddressError> {
        match self {
            MetricsAddress::Tcp(address) if !is_allowed && !address.ip().is_loopback() => {
                Err(ParseMetricsAddressError::NotLoopback(*address))
            }
            MetricsAddress::Tcp(_) | MetricsAddress::Unix(_) => Ok(()),
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsAddress::Tcp(address) => write!(f, "{address}"),
            MetricsAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A guest is given devices by their number, and the choice of engines numbers them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{guest} has `devices`, and with the engine {engine} what is found on the host numbers them: \
     name the engines, such as kind = \"cuda:all\" or --engine cuda:0,1"
)]
pub struct DeviceNumberError {
    /// The guest, such as `guest "a"`.
    pub guest: String,
    /// The engine.
    pub engine: EngineKind,
}

/// The configuration gives a guest engines of a class that the executor does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{guest} has engine = \"{choice}\", and there is no such engine, only {}: name one in \
     engine.kind (--engine), or change that key of the guest",
    names(engines)
)]
pub struct GuestEngineError {
    /// The guest, such as `guest "a"`.
    pub guest: String,
    /// The class.
    pub choice: EngineChoice,
    /// The engines that there are.
    pub engines: Vec<EngineKind>,
}

fn names(engines: &[EngineKind]) -> String {
    let names: Vec<String> = engines.iter().map(EngineKind::to_string).collect();
    names.join(", ")
}

/// A guest that the configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestSettings {
    /// How the guest is identified, and its limits.
    pub rule: GuestRule,
    /// The class of the engines that the guest has. `None`: the policy names its devices by their
    /// number, or the guest has all.
    pub engine: Option<EngineChoice>,
    /// Listeners for this guest only.
    pub listen: Vec<Endpoint>,
    /// Permissions of the unix sockets among them.
    pub mode: u32,
    /// The virtual machine that is this guest.
    pub vm: Option<VmOptions>,
}

impl GuestSettings {
    /// A guest with default limits, no identity and no listeners.
    pub fn new(name: &str) -> GuestSettings {
        GuestSettings {
            rule: GuestRule {
                name: name.into(),
                uids: Vec::new(),
                cids: Vec::new(),
                certificates: Vec::new(),
                policy: Policy::default(),
            },
            engine: None,
            listen: Vec::new(),
            mode: DEFAULT_MODE,
            vm: None,
        }
    }
}

/// All unnamed guests, for people: the table of the configuration.
const UNNAMED: &str = "[unnamed]";

/// A guest with a name, for people.
fn named_guest(name: &str) -> String {
    format!("guest {name:?}")
}

/// The devices of a guest that is given the engines of a class. At least one.
fn devices_of_class(
    guest: String,
    choice: EngineChoice,
    engines: &[EngineKind],
) -> Result<Vec<usize>, GuestEngineError> {
    let devices = choice.positions(engines);
    match devices.is_empty() {
        false => Ok(devices),
        true => Err(GuestEngineError {
            guest,
            choice,
            engines: engines.to_vec(),
        }),
    }
}

/// Whether a text may be the name of a guest.
pub(crate) fn is_guest_name(name: &str) -> bool {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    (1..=64).contains(&name.len()) && name.bytes().all(is_allowed)
}

/// The settings of `vgpu serve`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Listeners for all guests.
    pub listen: Vec<Endpoint>,
    /// Permissions of the unix sockets among them.
    pub mode: u32,
    /// The folder with certificates for TCP.
    pub certs: Option<PathBuf>,
    /// The file with the lists of revoked certificates. `None`: `crl.pem` in the folder, if it
    /// exists.
    pub crl: Option<PathBuf>,
    /// Guests served at once.
    pub max_guests: usize,
    /// Whether guests may map their buffers.
    pub share_buffers: bool,
    /// Whether the sum of the quotas may exceed the engine's memory.
    pub overcommit: bool,
    /// The engines that execute graphs: each is a device.
    pub engines: EngineList,
    /// Whether a guest may use an engine that it can end, and whose memory it can reach
    /// ([`EngineKind::needs_trust`]), in the process of all guests.
    pub trust_guests: bool,
    /// The threads of the CPU engine.
    pub threads: Threads,
    /// Whether graphs that multiply with the same weights run in one batch.
    pub batch: bool,
    /// Bytes of memory that guests may use in all. `None`: what the machine or its control group
    /// has.
    pub memory: Option<u64>,
    /// Bytes of host memory that the graphs of all guests may take beside devices with a memory of
    /// their own. `None`: half of what the machine or its control group has, and with a process for
    /// each guest at least 256 MiB for a process.
    pub host_memory: Option<u64>,
    /// The longest time of a node of a graph by estimate. `None`: the engine's own limit.
    pub max_node_time: Option<Duration>,
    /// The longest turn on the engine. `None`: the default. Zero: no limit.
    pub max_turn_time: Option<Duration>,
    /// The device of virtual machines.
    pub device: VmDevice,
    /// The log filter.
    pub log: Option<String>,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// Where metrics are served.
    pub metrics: Option<MetricsAddress>,
    /// Whether that address may be one that other machines reach.
    pub metrics_allow_remote: bool,
    /// The control socket.
    pub control: Option<PathBuf>,
    /// Whose weights are shared.
    pub share_weights: Sharing,
    /// The cache of weights on disk.
    pub weights_cache: Option<CacheOptions>,
    /// Limits of an unnamed guest. `None`: unnamed guests are rejected.
    pub unnamed: Option<Policy>,
    /// The class of the engines that unnamed guests have. `None`: the policy names their devices by
    /// their number, or they have all.
    pub unnamed_engine: Option<EngineChoice>,
    /// With a process for each program of unnamed guests: such processes of one origin. `None`: a
    /// quarter of those that the memory is enough for, but at least 4; three quarters of
    /// `max_guests` where no memory is divided.
    pub unnamed_programs: Option<usize>,
    /// Guests with names.
    pub guests: Vec<GuestSettings>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            listen: Vec::new(),
            mode: DEFAULT_MODE,
            certs: None,
            crl: None,
            max_guests: 64,
            share_buffers: true,
            overcommit: false,
            engines: EngineKind::Auto.into(),
            trust_guests: false,
            threads: Threads::default(),
            batch: true,
            memory: None,
            host_memory: None,
            max_node_time: None,
            max_turn_time: None,
            device: VmDevice::default(),
            log: None,
            log_format: LogFormat::default(),
            metrics: None,
            metrics_allow_remote: false,
            control: None,
            share_weights: Sharing::default(),
            weights_cache: None,
            unnamed: Some(Policy::default()),
            unnamed_engine: None,
            unnamed_programs: None,
            guests: Vec::new(),
        }
    }
}

impl Settings {
    /// Adds the default listener for all guests if there is no other listener.
    pub fn with_default_listener(mut self) -> Settings {
        let has_listener = |guest: &GuestSettings| guest.vm.is_some() || !guest.listen.is_empty();
        if self.listen.is_empty() && !self.guests.iter().any(has_listener) {
            self.listen.push(Endpoint::Unix(DEFAULT_UNIX_PATH.into()));
        }
        self
    }

    /// The devices that a named guest may use. Empty: all, or there is no such guest.
    pub fn devices_of(&self, guest: &str) -> &[usize] {
        let found = self.guests.iter().find(|known| known.rule.name == guest);
        found.map_or(&[], |known| &known.rule.policy.devices)
    }

    /// Checks that the number of a device says which one it is.
    ///
    /// # Errors
    /// [`DeviceNumberError`] if a guest is given devices by their number, and `auto` or `ggml`
    /// chooses the engines: a GPU that cannot be used would shift the numbers of the others.
    pub fn check_devices(&self) -> Result<(), DeviceNumberError> {
        let kinds = self.engines.kinds().iter();
        let mut chosen =
            kinds.filter(|kind| matches!(kind, EngineKind::Auto | EngineKind::AnyGgml));
        match (self.numbered_devices().next(), chosen.next()) {
            (Some((guest, _)), Some(engine)) => Err(DeviceNumberError {
                guest,
                engine: engine.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Checks that the engines that are named can have one for each guest that is given engines of
    /// a class.
    ///
    /// # Errors
    /// [`GuestEngineError`]: none of them can.
    pub fn check_engines(&self) -> Result<(), GuestEngineError> {
        let named = self.engines.kinds();
        for (guest, choice, _) in self.guests_by_name() {
            if let Some(choice) = choice
                && !choice.may_be_among(named)
            {
                return Err(GuestEngineError {
                    guest,
                    choice,
                    engines: named.to_vec(),
                });
            }
        }
        Ok(())
    }

    /// Whether a guest is given the engines over backends of ggml. An executor has such engines
    /// only if guests are isolated or trusted.
    pub fn gives_ggml(&self) -> bool {
        let mut choices = self.guests_by_name().filter_map(|(_, choice, _)| choice);
        choices.any(|choice| choice == EngineChoice::Ggml)
    }

    /// These settings on an executor with these engines: a guest that is given engines of a class
    /// has their devices.
    ///
    /// # Errors
    /// [`GuestEngineError`]: the executor has none of the class of a guest.
    pub fn on_engines(mut self, engines: &[EngineKind]) -> Result<Settings, GuestEngineError> {
        for guest in &mut self.guests {
            if let Some(choice) = guest.engine {
                let name = named_guest(&guest.rule.name);
                guest.rule.policy.devices = devices_of_class(name, choice, engines)?;
            }
        }
        if let (Some(choice), Some(policy)) = (self.unnamed_engine, &mut self.unnamed) {
            policy.devices = devices_of_class(UNNAMED.to_owned(), choice, engines)?;
        }
        Ok(self)
    }

    /// Whether other engines are named than in `running`, which need a restart, and a guest has
    /// other devices by their number, which mean the new engines.
    pub fn renumbers_devices(&self, running: &Settings) -> bool {
        self.engines != running.engines && !self.numbered_devices().eq(running.numbered_devices())
    }

    /// The guests that are given devices by their number, with these devices. The class of a
    /// guest's engines names no numbers.
    fn numbered_devices(&self) -> impl Iterator<Item = (String, &[usize])> {
        let guests = self.guests_by_name();
        guests.filter_map(|(guest, choice, policy)| {
            let is_numbered = choice.is_none() && !policy.devices.is_empty();
            is_numbered.then_some((guest, &policy.devices[..]))
        })
    }

    /// The class of the engines and the limits of each guest, and of unnamed ones, with a text for
    /// people.
    fn guests_by_name(&self) -> impl Iterator<Item = (String, Option<EngineChoice>, &Policy)> {
        let named = self.guests.iter();
        let named = named.map(|guest| {
            let name = named_guest(&guest.rule.name);
            (name, guest.engine, &guest.rule.policy)
        });
        let (choice, unnamed) = (self.unnamed_engine, self.unnamed.iter());
        named.chain(unnamed.map(move |policy| (UNNAMED.to_owned(), choice, policy)))
    }

    /// Which guests are served, with which limits.
    pub fn rules(&self) -> Rules {
        Rules {
            guests: self.guests.iter().map(|guest| guest.rule.clone()).collect(),
            unnamed: self.unnamed.clone(),
            overcommit: self.overcommit,
        }
    }

    /// Replaces the settings that need a restart by those of `running`.
    pub fn keep_until_restart(&mut self, running: &Settings) {
        self.engines.clone_from(&running.engines);
        self.trust_guests = running.trust_guests;
        self.threads = running.threads;
        self.batch = running.batch;
        self.memory = running.memory;
        self.host_memory = running.host_memory;
        self.max_node_time = running.max_node_time;
        self.max_turn_time = running.max_turn_time;
        self.certs.clone_from(&running.certs);
        self.share_buffers = running.share_buffers;
        self.device = running.device;
        self.log_format = running.log_format;
        self.metrics.clone_from(&running.metrics);
        self.metrics_allow_remote = running.metrics_allow_remote;
        self.control.clone_from(&running.control);
        self.share_weights = running.share_weights;
        self.weights_cache.clone_from(&running.weights_cache);
    }

    /// The names of the settings that differ from `running` and need a restart.
    pub fn needs_restart(&self, running: &Settings) -> Vec<&'static str> {
        let differs = [
            ("engine.kind", self.engines != running.engines),
            (
                "engine.threads",
                self.threads.count != running.threads.count,
            ),
            (
                "engine.trust-guests",
                self.trust_guests != running.trust_guests,
            ),
            ("engine.pin", self.threads.pin != running.threads.pin),
            ("engine.batch", self.batch != running.batch),
            ("engine.memory", self.memory != running.memory),
            (
                "engine.host-memory",
                self.host_memory != running.host_memory,
            ),
            (
                "engine.max-node-time",
                self.max_node_time != running.max_node_time,
            ),
            (
                "engine.max-turn-time",
                self.max_turn_time != running.max_turn_time,
            ),
            ("server.certs", self.certs != running.certs),
            (
                "server.share-buffers",
                self.share_buffers != running.share_buffers,
            ),
            ("server.vm-device", self.device != running.device),
            ("server.log-format", self.log_format != running.log_format),
            ("metrics.listen", self.metrics != running.metrics),
            (
                "metrics.allow-remote",
                self.metrics_allow_remote != running.metrics_allow_remote,
            ),
            ("control.socket", self.control != running.control),
            ("weights.share", self.share_weights != running.share_weights),
            ("weights.cache", self.weights_cache != running.weights_cache),
        ];
        let differing = differs.into_iter().filter(|&(_, differs)| differs);
        differing.map(|(name, _)| name).collect()
    }
}
