//! The flags of `vgpu serve`, and what they make of the settings in the file.

use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};
use vgpu_executor::config::{
    DEFAULT_PATH, GuestSettings, LogFormat, MetricsAddress, Settings, VmDevice,
};
use vgpu_executor::engine::EngineKind;
use vgpu_executor::size;
use vgpu_executor::vm::VmOptions;
use vgpu_executor::weights::{CacheOptions, Sharing};
use vgpu_transport::link::Endpoint;

/// Serves guests until SIGTERM or SIGINT.
///
/// Guests are programs that load libggml-vgpu.so (llama.cpp, Ollama and others); they see this
/// executor as a GPU. When it accepts guests, one line "ready ENDPOINT..." is printed on standard
/// output; logs go to standard error. At the first signal no more guests are accepted, running
/// graphs are finished, and the exit status is 0; a second signal ends it at once.
#[derive(Parser, Default)]
pub(crate) struct Args {
    /// The configuration: guests with their quotas and weights, and everything that the flags below
    /// say, which take the place of what stands in it. [default: /etc/vgpu/vgpu.toml, if there is
    /// one]
    ///
    /// SIGHUP and `vgpu reload` have it read again. Guests that are here stay; what takes a restart
    /// is said. A file with a mistake changes nothing.
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,

    /// Where to listen: unix:/path/to/socket, tcp:HOST:PORT, vsock:PORT, or vsock:/path:PORT for
    /// Firecracker and its relatives. May be given several times. [default:
    /// unix:/run/vgpu/vgpu.sock]
    ///
    /// Guests find the default by themselves; for any other, set VGPU_ENDPOINT to the same text in
    /// the guest. Who may open the socket may use the executor: it is made for its owner and group
    /// (mode 660).
    #[arg(long, value_name = "ENDPOINT", num_args = 1..)]
    listen: Vec<Endpoint>,

    /// A folder with certificates that `vgpu cert` has made, for tcp. Without one, tcp is for this
    /// machine only.
    #[arg(long, value_name = "FOLDER")]
    certs: Option<PathBuf>,

    /// A virtual machine to serve: NAME,socket=PATH and, where the defaults will not do,
    /// ",window=SIZE" and ",silence=SECONDS". May be given several times.
    ///
    /// Its QEMU, of any version, gets the device by -chardev socket,id=vgpu0,path=PATH -device
    /// ivshmem-doorbell,chardev=vgpu0,vectors=1 and has to be started after this. The window (256M,
    /// a power of two) is a memory region of the virtual machine, shared by up to 7 programs in it.
    /// A program that gives no sign of life for so many seconds (60; 0: no limit) has died. With
    /// --vm and without --listen, only virtual machines are served.
    #[arg(long, value_name = "VM")]
    vm: Vec<VmOptions>,

    /// What the virtual machines see. [default: ivshmem]
    #[arg(long, value_enum)]
    device: Option<Device>,

    /// What does the arithmetic: cpu, cuda (the first NVIDIA GPU), cuda:N, or auto (a GPU if there
    /// is one that can be used, else the processors). With VGPU_MEGAKERNEL=on in the environment a
    /// token is one launch on a GPU, and not a CUDA graph. [default: cpu]
    #[arg(long, value_name = "ENGINE")]
    engine: Option<EngineKind>,

    /// Threads of the cpu engine; 0 for one on each physical core this process may use. [default:
    /// 0]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,

    /// Keep each thread of the cpu engine on a core of its own: for hosts that do nothing else.
    /// With more threads than cores, cores get a second one.
    #[arg(long)]
    pin: bool,

    /// Memory that guests may use in all, such as 512M or 8G. [default: what the machine or its
    /// control group has]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,

    /// Guests served at once; more are turned away. [default: 64]
    #[arg(long, value_name = "N")]
    max_guests: Option<usize>,

    /// Keep the memory of guests' buffers to this process: no guest on this machine maps it, every
    /// byte goes through a message.
    ///
    /// Without this option a guest maps its own buffers, and nobody else's, and copies into them
    /// itself.
    #[arg(long)]
    no_shared_buffers: bool,

    /// Serve each guest, and each virtual machine, in a process of its own, so that a fault in one
    /// takes down no other.
    ///
    /// Each has an engine of its own. A guest that the configuration names has one process for all
    /// its programs, with its quota; who has no name has one for each program, with --guest-memory
    /// of --memory, and as many are served as that is enough for. Processors are shared out by the
    /// kernel, weights are nice levels there. Weights of models are shared by the programs of one
    /// guest. The cache of weights, --share-weights all and guests by certificate need one process
    /// for all.
    #[arg(long)]
    pub(super) isolate: bool,

    /// With --isolate and the cpu engine: the memory of each guest for which the configuration says
    /// nothing, such as 4G.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "isolate")]
    pub(super) guest_memory: Option<u64>,

    /// Keep privileges and all system calls.
    ///
    /// Without this option the process gives up its capabilities once it has started, and the
    /// system calls that it does not make.
    #[arg(long)]
    pub(super) no_sandbox: bool,

    /// Whose weights are held once: the same bytes, uploaded by several guests, take memory once,
    /// and are not sent by a guest that says their hash. [default: tenant]
    ///
    /// With "all", a guest can find out whether another one has the same content, by asking for it
    /// and by the time things take. With "tenant" it only can for its own user, virtual machine or
    /// name. What a guest writes is never seen by another.
    #[arg(long, value_enum, value_name = "WHOSE")]
    share_weights: Option<ShareWeights>,

    /// Keeps weights on disk, so that a model known from before a restart is not sent again:
    /// FOLDER,size=SIZE, such as /var/cache/vgpu/weights,size=50G. What was not used for longest
    /// goes when the size is reached.
    #[arg(long, value_name = "CACHE")]
    weights_cache: Option<CacheOptions>,

    /// What to log: error, warn, info, debug, trace, off, or for parts of the program, as in
    /// info,vgpu_executor=debug. [default: the environment variable VGPU_LOG, or info]
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,

    /// How log lines look. [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"])]
    log_format: Option<String>,

    /// Where Prometheus finds metrics: an address of the loopback interface, such as
    /// 127.0.0.1:9400, or unix:/path/to/socket. [default: nowhere]
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<MetricsAddress>,

    /// A socket for `vgpu ps`, `vgpu top` and `vgpu reload`, for this user and root. [default: none
    /// without --config]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// QEMU's own shared-memory device, 1af4:1110. Any QEMU; survives a restart of this program.
    Ivshmem,
    /// A PCI function 10de:2331 of class 0302, over vfio-user: QEMU 10.1 or newer (-device
    /// '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"PATH"}}', the machine's memory
    /// shared) and Cloud Hypervisor (--user-device socket=PATH).
    VfioUser,
}

/// Values of `--share-weights`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ShareWeights {
    /// Nobody's, not even its own.
    Off,
    /// Those of the same tenant: what the same user of this machine, the same virtual machine, or
    /// the guest of the same name has uploaded.
    Tenant,
    /// Everybody's. A guest can then find out whether another one has the same content.
    All,
}

impl From<ShareWeights> for Sharing {
    fn from(value: ShareWeights) -> Sharing {
        match value {
            ShareWeights::Off => Sharing::Off,
            ShareWeights::Tenant => Sharing::Tenant,
            ShareWeights::All => Sharing::All,
        }
    }
}

impl Args {
    /// The file that is read: the one that was named, or the usual one if it is there.
    pub(super) fn file(&self) -> Option<PathBuf> {
        let usual = || {
            let path = Path::new(DEFAULT_PATH);
            path.exists().then(|| path.to_owned())
        };
        self.config.clone().or_else(usual)
    }

    /// What the file says, with the flags in its place. Reads the file each time.
    pub(super) fn settings(&self) -> anyhow::Result<Settings> {
        let mut settings = match self.file() {
            Some(path) => Settings::load(&path)?,
            None => Settings::default(),
        };
        if !self.listen.is_empty() {
            settings.listen = self.listen.clone();
        }
        for vm in &self.vm {
            let named = settings.guests.iter_mut().find(|g| g.rule.name == vm.name);
            match named {
                Some(guest) => guest.vm = Some(vm.clone()),
                None => settings.guests.push(GuestSettings {
                    vm: Some(vm.clone()),
                    ..GuestSettings::new(&vm.name)
                }),
            }
        }
        fn replace<T: Clone>(place: &mut T, flag: &Option<T>) {
            if let Some(flag) = flag {
                *place = flag.clone();
            }
        }
        replace(&mut settings.engine, &self.engine);
        replace(&mut settings.threads.count, &self.threads);
        settings.threads.pin |= self.pin;
        replace(&mut settings.max_guests, &self.max_guests);
        let device = self.device.map(|device| match device {
            Device::Ivshmem => VmDevice::Ivshmem,
            Device::VfioUser => VmDevice::VfioUser,
        });
        replace(&mut settings.device, &device);
        let format = self.log_format.as_deref().map(str::parse::<LogFormat>);
        let format = format.transpose()?;
        replace(&mut settings.log_format, &format);
        replace(
            &mut settings.share_weights,
            &self.share_weights.map(Sharing::from),
        );
        settings.weights_cache = self.weights_cache.clone().or(settings.weights_cache);
        settings.certs = self.certs.clone().or(settings.certs);
        settings.memory = self.memory.or(settings.memory);
        settings.log = self.log.clone().or(settings.log);
        settings.metrics = self.metrics.clone().or(settings.metrics);
        settings.control = self.control.clone().or(settings.control);
        settings.share_buffers &= !self.no_shared_buffers;
        Ok(settings.with_default_listener())
    }
}
