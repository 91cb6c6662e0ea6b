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

use crate::engine::{EngineKind, EngineList};
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

/// A guest that the configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestSettings {
    /// How the guest is identified, and its limits.
    pub rule: GuestRule,
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
            listen: Vec::new(),
            mode: DEFAULT_MODE,
            vm: None,
        }
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
        let given = { self.guests_by_name() }.find(|(_, policy)| !policy.devices.is_empty());
        match (given, chosen.next()) {
            (Some((guest, _)), Some(engine)) => Err(DeviceNumberError {
                guest,
                engine: engine.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Whether other engines are named than in `running`, which need a restart, and a guest has
    /// other devices, whose numbers mean the new engines.
    pub fn renumbers_devices(&self, running: &Settings) -> bool {
        let devices = |settings: &Settings| -> Vec<(String, Vec<usize>)> {
            let guests = settings.guests_by_name();
            let given = guests.filter(|(_, policy)| !policy.devices.is_empty());
            given
                .map(|(guest, policy)| (guest, policy.devices.clone()))
                .collect()
        };
        self.engines != running.engines && devices(self) != devices(running)
    }

    /// The limits of each guest, and of unnamed ones, with a text for people.
    fn guests_by_name(&self) -> impl Iterator<Item = (String, &Policy)> {
        let named = self.guests.iter().map(|guest| &guest.rule);
        let named = named.map(|rule| (format!("guest {:?}", rule.name), &rule.policy));
        let unnamed = self.unnamed.iter();
        named.chain(unnamed.map(|policy| ("[unnamed]".to_owned(), policy)))
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
