//! What `vgpu serve` does: one [`Settings`], from a file and from flags.
//!
//! A file, by default `/etc/vgpu/vgpu.toml`, is read; the flags of `vgpu serve` take the place of what the file says. Whatever can be
//! wrong with a file is said with the line and column where it is.

mod file;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use vgpu_cpu::Threads;
use vgpu_transport::link::Endpoint;
use vgpu_transport::link::endpoint::DEFAULT_UNIX_PATH;

use crate::engine::EngineKind;
use crate::roster::{GuestRule, Rules};
use crate::tenant::Policy;
use crate::vm::VmOptions;
use crate::weights::{CacheOptions, Sharing};

/// Where `vgpu serve` looks for its configuration by itself.
pub const DEFAULT_PATH: &str = "/etc/vgpu/vgpu.toml";

/// Where the executor can be asked about itself, unless told otherwise: beside the socket for guests.
pub const DEFAULT_CONTROL_PATH: &str = "/run/vgpu/control.sock";

/// What virtual machines see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VmDevice {
    /// QEMU's own shared-memory device.
    #[default]
    Ivshmem,
    /// A PCI function of ours.
    VfioUser,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<LogFormat, String> {
        match text {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(format!("{text:?} is not a format of logs: text or json")),
        }
    }
}

/// Where metrics are served. Only to this machine: they say what guests do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// An address of the loopback interface.
    Tcp(std::net::SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<MetricsAddress, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match Path::new(path).is_absolute() {
                true => Ok(MetricsAddress::Unix(path.into())),
                false => Err(format!(
                    "{text:?}: the path of the socket has to be absolute"
                )),
            };
        }
        let address: std::net::SocketAddr = text.parse().map_err(|_| {
            format!(
                "{text:?} is not an address, such as 127.0.0.1:9400 or unix:/run/vgpu/metrics.sock"
            )
        })?;
        match address.ip().is_loopback() {
            true => Ok(MetricsAddress::Tcp(address)),
            false => Err(format!(
                "{address} can be reached from other machines, and metrics have no authentication: use 127.0.0.1 or \
                 unix:PATH, and let a proxy or a node agent pass them on"
            )),
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

/// A guest of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestSettings {
    /// Who it is and what it may use.
    pub rule: GuestRule,
    /// Doors of its own.
    pub listen: Vec<Endpoint>,
    /// Permissions of its unix sockets.
    pub mode: u32,
    /// Its virtual machine.
    pub vm: Option<VmOptions>,
}

impl GuestSettings {
    /// A guest with nothing but a name.
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
            mode: 0o660,
            vm: None,
        }
    }
}

/// All that `vgpu serve` can be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Doors for everybody.
    pub listen: Vec<Endpoint>,
    /// Permissions of the unix sockets among them.
    pub mode: u32,
    /// Certificates for `tcp`.
    pub certs: Option<PathBuf>,
    /// Guests served at once.
    pub max_guests: usize,
    /// Whether guests map their buffers.
    pub share_buffers: bool,
    /// Whether quotas may promise more than there is.
    pub overcommit: bool,
    /// The engine.
    pub engine: EngineKind,
    /// The threads of the CPU engine.
    pub threads: Threads,
    /// What guests may use of its memory, in all.
    pub memory: Option<u64>,
    /// What virtual machines see.
    pub device: VmDevice,
    /// What to log.
    pub log: Option<String>,
    /// How.
    pub log_format: LogFormat,
    /// Where metrics are served.
    pub metrics: Option<MetricsAddress>,
    /// Where `vgpu ps` and `vgpu top` ask.
    pub control: Option<PathBuf>,
    /// Whose weights are held once.
    pub share_weights: Sharing,
    /// Where weights are kept over a restart.
    pub weights_cache: Option<CacheOptions>,
    /// What a guest without a name may use; `None`: only guests with names come in.
    pub unnamed: Option<Policy>,
    /// Guests with names.
    pub guests: Vec<GuestSettings>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            listen: Vec::new(),
            mode: 0o660,
            certs: None,
            max_guests: 64,
            share_buffers: true,
            overcommit: false,
            engine: EngineKind::Cpu,
            threads: Threads::default(),
            memory: None,
            device: VmDevice::default(),
            log: None,
            log_format: LogFormat::default(),
            metrics: None,
            control: None,
            share_weights: Sharing::default(),
            weights_cache: None,
            unnamed: Some(Policy::default()),
            guests: Vec::new(),
        }
    }
}

impl Settings {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Settings, LoadError> {
        let text = std::fs::read_to_string(path).map_err(|error| LoadError::Read {
            path: path.into(),
            error,
        })?;
        Settings::parse(&text).map_err(|problem| LoadError::Problem {
            path: path.into(),
            problem,
        })
    }

    /// Reads the text of a file.
    pub fn parse(text: &str) -> Result<Settings, Problem> {
        file::parse(text)
    }

    /// Gives everybody the usual door if there is no other.
    pub fn with_default_door(mut self) -> Settings {
        let has_door = |guest: &GuestSettings| guest.vm.is_some() || !guest.listen.is_empty();
        if self.listen.is_empty() && !self.guests.iter().any(has_door) {
            self.listen.push(Endpoint::Unix(DEFAULT_UNIX_PATH.into()));
        }
        self
    }

    /// Who may come, and what for.
    pub fn rules(&self) -> Rules {
        Rules {
            guests: self.guests.iter().map(|guest| guest.rule.clone()).collect(),
            unnamed: self.unnamed.clone(),
            overcommit: self.overcommit,
        }
    }

    /// Puts back what takes a restart to what `running` has.
    pub fn keep_until_restart(&mut self, running: &Settings) {
        self.engine = running.engine;
        self.threads = running.threads;
        self.memory = running.memory;
        self.certs.clone_from(&running.certs);
        self.share_buffers = running.share_buffers;
        self.device = running.device;
        self.log_format = running.log_format;
        self.metrics.clone_from(&running.metrics);
        self.control.clone_from(&running.control);
        self.share_weights = running.share_weights;
        self.weights_cache.clone_from(&running.weights_cache);
    }

    /// What differs from `running` and takes a restart: the settings by name.
    pub fn needs_restart(&self, running: &Settings) -> Vec<&'static str> {
        let differs = [
            ("engine.kind", self.engine != running.engine),
            (
                "engine.threads",
                self.threads.count != running.threads.count,
            ),
            ("engine.pin", self.threads.pin != running.threads.pin),
            ("engine.memory", self.memory != running.memory),
            ("server.certs", self.certs != running.certs),
            (
                "server.share-buffers",
                self.share_buffers != running.share_buffers,
            ),
            ("server.vm-device", self.device != running.device),
            ("server.log-format", self.log_format != running.log_format),
            ("metrics.listen", self.metrics != running.metrics),
            ("control.socket", self.control != running.control),
            ("weights.share", self.share_weights != running.share_weights),
            ("weights.cache", self.weights_cache != running.weights_cache),
        ];
        let differing = differs.into_iter().filter(|&(_, differs)| differs);
        differing.map(|(name, _)| name).collect()
    }
}

/// What is wrong with the text of a file, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {reason}")]
pub struct Problem {
    /// Counted from 1.
    pub line: usize,
    /// In characters, counted from 1.
    pub column: usize,
    /// For people.
    pub reason: String,
}

/// Why there are no settings.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum LoadError {
    #[error("{path}: {error}", path = path.display())]
    Read {
        path: PathBuf,
        error: std::io::Error,
    },
    #[error("{path}:{problem}", path = path.display())]
    Problem { path: PathBuf, problem: Problem },
}
