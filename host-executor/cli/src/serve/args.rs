//! The flags of `vgpu serve`, and how they change the settings of the file.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use vgpu_executor::config::{
    DEFAULT_CONTROL_PATH, DEFAULT_PATH, GuestSettings, LogFormat, MetricsAddress, Settings,
    VmDevice,
};
use vgpu_executor::engine::EngineList;
use vgpu_executor::size;
use vgpu_executor::vm::VmOptions;
use vgpu_executor::weights::{CacheOptions, Sharing};
use vgpu_transport::link::Endpoint;

/// Serves guests until SIGTERM or SIGINT.
///
/// Guests are programs that load libggml-vgpu.so (llama.cpp, Ollama and others); they see this
/// executor as a GPU. When guests can connect, the line "ready ENDPOINT..." is printed on standard
/// output. Logs go to standard error. SIGUSR1 writes into the log what every session does now, as
/// `vgpu dump` does. The first signal closes the listeners, cancels the running graphs at their
/// next preemption point, tells every guest, and ends the process with exit status 0. A second
/// signal ends the process at once.
#[derive(Parser, Default)]
pub(crate) struct Args {
    /// The configuration: guests with their quotas and weights, and all settings of the flags
    /// below. Flags take precedence over the file. [default: /etc/vgpu/vgpu.toml, if it exists]
    ///
    /// SIGHUP and `vgpu reload` reload the file. Connected guests stay. Settings that need a
    /// restart are reported. A file with a mistake changes nothing.
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,

    /// Where to listen: unix:/path/to/socket, tcp:HOST:PORT, vsock:PORT, or vsock:/path:PORT for
    /// hypervisors with unix sockets for vsock, such as Firecracker. May be given several times.
    /// [default: unix:/run/vgpu/vgpu.sock]
    ///
    /// Guests find the default address without configuration; for another one, set VGPU_ENDPOINT in
    /// the guest to the same text. Every user who may open a unix socket may use the executor: its
    /// mode is 660.
    #[arg(long, value_name = "ENDPOINT", num_args = 1..)]
    listen: Vec<Endpoint>,

    /// A folder with certificates that `vgpu cert` has made, for tcp. Without certificates, tcp
    /// accepts only connections from this machine.
    #[arg(long, value_name = "FOLDER")]
    certs: Option<PathBuf>,

    /// A file with the lists of revoked certificates (CRL, in PEM), one for each authority: what
    /// `vgpu cert revoke` has made. Read again on a reload. [default: crl.pem in the folder of
    /// --certs, if it exists]
    #[arg(long, value_name = "FILE")]
    crl: Option<PathBuf>,

    /// A virtual machine to serve: NAME,socket=PATH, with ",window=SIZE", ",silence=SECONDS",
    /// ",mode=MODE" and ",group=GROUP" for other values than the defaults. May be given several
    /// times.
    ///
    /// QEMU (any version) gets the device by -chardev socket,id=vgpu0,path=PATH -device
    /// ivshmem-doorbell,chardev=vgpu0,vectors=1, and is started after this command. The window
    /// (256M, a power of two) is a memory region of the virtual machine, which up to 7 programs
    /// there share. A program that sends no heartbeat for SECONDS (60; 0: no limit) counts as dead.
    /// MODE (660) and GROUP (that of this process) say who may open the socket; this process must
    /// be a member of GROUP.
    /// With --vm and without --listen, only virtual machines are served.
    #[arg(long, value_name = "VM")]
    vm: Vec<VmOptions>,

    /// The device that virtual machines get. [default: ivshmem]
    #[arg(long, value_enum)]
    device: Option<VmDeviceArgument>,

    /// The engines that execute graphs, each of which guests see as a device of its own: cpu, cuda
    /// (the first NVIDIA GPU), cuda:N, cuda:0,1, cuda:all, ggml:PATH (the first device of a backend
    /// library of ggml, such as libggml-vulkan.so), ggml:PATH:DEVICE, ggml:PATH:all, ggml (the GPUs
    /// of the first backend library on this machine that has one), or auto. May be repeated.
    /// [default: auto]
    ///
    /// auto is cuda on each GPU where it starts, else ggml if there is one and --isolate or
    /// --trust-guests allows it, else cpu. The log says what was found, refused and taken. With
    /// VGPU_MEGAKERNEL=on in the environment, cuda runs a token as one persistent kernel instead of
    /// a CUDA graph.
    #[arg(long, value_name = "ENGINE")]
    engine: Vec<EngineList>,

    /// Threads of the cpu engine; 0: one for each physical core that this process may use.
    /// [default: 0]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,

    /// Pin each thread of the cpu engine to a core, for hosts without other work. More threads than
    /// cores share cores.
    #[arg(long)]
    pin: bool,

    /// Memory that all guests together may use on the cpu engine and on each backend of ggml, such
    /// as 512M or 8G. [default: of the cpu engine, the memory of the machine or its control group]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,

    /// Memory of the host that the graphs of all guests together may take on GPUs, such as 8G. One
    /// guest has 1 GiB of it for each GPU at most. With --isolate it is divided by
    /// --max-guests and the virtual machines.
    /// [default: half of the memory of the machine or its control group]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    host_memory: Option<u64>,

    /// The longest time of one node of a graph in seconds, by estimate. A graph with a longer node
    /// fails, and its guest is told why. [default: 3600 on the cpu engine, 60 on a GPU]
    #[arg(long, value_name = "SECONDS")]
    max_node_time: Option<NonZeroU32>,

    /// The longest turn of a graph on the engine, and the longest call of the engine, in seconds;
    /// 0: no limit. Beyond it the engine hangs: the process writes into its log what every session
    /// does, and ends with exit status 1, so that a service manager starts it again. Also the limit
    /// of the engine's start. [default: 300, on a GPU at least twice --max-node-time; of the start
    /// of an engine with a driver 900]
    #[arg(long, value_name = "SECONDS")]
    max_turn_time: Option<u32>,

    /// Programs served at once; further ones are rejected. One guest has at most three quarters of
    /// them. [default: 64]
    #[arg(long, value_name = "N")]
    max_guests: Option<usize>,

    /// Do not let guests on this machine map the memory of their buffers.
    ///
    /// Without this option a guest maps its own buffers, and no others, and copies data directly.
    /// With it, all data goes through messages.
    #[arg(long)]
    no_shared_buffers: bool,

    /// Do not run graphs of several programs together.
    ///
    /// Without this option the CPU engine runs graphs that multiply with the same weights in one
    /// batch if they wait at the same time: each weight is read once for all of them. The results
    /// are the same.
    #[arg(long)]
    no_batch: bool,

    /// With --engine ggml or auto and without --isolate: serve guests although each of them can end
    /// this process, and read and change the memory of the others. Backends of ggml trust the
    /// indices in tensors.
    #[arg(long)]
    trust_guests: bool,

    /// Serve each guest, and each virtual machine, in a process of its own, so that a fault affects
    /// one guest only.
    ///
    /// Each process has its own engine. A guest that the configuration names has one process for
    /// all its programs, with its quota. An unnamed guest has one process per program, with
    /// --guest-memory; the number of these processes is limited by --memory. The kernel divides
    /// processor time; weights become nice levels. The programs of one guest share the weights of
    /// models. The cache of weights, --share-weights all and guests with certificates need a single
    /// process.
    #[arg(long)]
    pub(super) isolate: bool,

    /// With --isolate and the cpu engine: memory of each guest without a memory setting in the
    /// configuration, such as 4G
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "isolate")]
    pub(super) guest_memory: Option<u64>,

    /// This is the process of a virtual machine of a supervisor: it opens its sockets first, and
    /// then gives up the files of the user.
    #[arg(long, hide = true)]
    pub(super) isolated_machine: bool,

    /// The GPU of the machine that no engine uses, and the reason, as the supervisor has found
    #[arg(long, value_name = "TEXT", hide = true, requires = "isolated_machine")]
    pub(super) unused_gpu: Option<String>,

    /// The devices of the virtual machine of a supervisor, as in its configuration
    #[arg(
        long,
        hide = true,
        value_name = "DEVICE",
        value_delimiter = ',',
        requires = "supervised"
    )]
    machine_devices: Vec<usize>,

    /// This is a process of a supervisor of this version: the kernel ends it before the supervisor
    /// if memory runs out.
    #[arg(
        long, hide = true, value_name = "VERSION",
        num_args = 0..=1, require_equals = true, default_missing_value = ""
    )]
    pub(super) supervised: Option<String>,

    /// Do not enter the sandbox.
    ///
    /// Without this option the process drops its capabilities after the start, and restricts its
    /// system calls.
    #[arg(long)]
    pub(super) no_sandbox: bool,

    /// Whose weights are shared: equal bytes of several guests are stored once, and a guest that
    /// sends their hash does not have to send the bytes. [default: tenant]
    ///
    /// With "all", a guest can find out whether another guest has the same content, from the
    /// answers and from their timing. With "tenant", it can only for its own user, virtual machine
    /// or name. No guest ever sees what another guest writes.
    #[arg(long, value_enum, value_name = "WHOSE")]
    share_weights: Option<ShareWeights>,

    /// Cache weights on disk, so that models do not have to be sent again after a restart:
    /// FOLDER,size=SIZE, such as /var/cache/vgpu/weights,size=50G. When the cache is full, the
    /// least recently used weights are removed.
    #[arg(long, value_name = "CACHE")]
    weights_cache: Option<CacheOptions>,

    /// The log filter: error, warn, info, debug, trace, off, or per module, as in
    /// info,vgpu_executor=debug. [default: the environment variable VGPU_LOG, or info]
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,

    /// The format of log lines. [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"])]
    log_format: Option<String>,

    /// Serve metrics for Prometheus at this address: an address of the loopback interface, such as
    /// 127.0.0.1:4781, or unix:/path/to/socket. /metrics has the metrics, / a page for browsers;
    /// /livez says whether the engine answers, /healthz also whether the executor accepts new
    /// sessions. [default: no metrics]
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<MetricsAddress>,

    /// Let --metrics be an address that other machines reach, such as 0.0.0.0:4781. Everyone there
    /// can read the metrics, which name the guests.
    #[arg(long)]
    metrics_allow_remote: bool,

    /// The control socket, which ps, top, dump, reload, set, drain, kill and kubernetes use. Only
    /// this user and root may connect. [default: control.sock in $RUNTIME_DIRECTORY, which systemd
    /// sets for units with RuntimeDirectory=; otherwise none]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum VmDeviceArgument {
    /// QEMU's own shared-memory device, 1af4:1110. Works with any QEMU. Survives a restart of this
    /// program.
    Ivshmem,
    /// A PCI function 10de:2331 of class 0302 over vfio-user, for QEMU 10.1 or newer (-device
    /// '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"PATH"}}', with shared guest
    /// memory) and Cloud Hypervisor (--user-device socket=PATH).
    VfioUser,
}

/// Values of `--share-weights`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ShareWeights {
    /// Nothing is shared, not even among the buffers of one guest.
    Off,
    /// Weights of the same user of this machine, the same virtual machine, or the guest of the same
    /// name.
    Tenant,
    /// All weights. A guest can then find out whether another guest has the same content.
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
    /// The configuration file: the named one, or the default if it exists.
    pub(super) fn file(&self) -> Option<PathBuf> {
        let usual = || {
            let path = Path::new(DEFAULT_PATH);
            path.exists().then(|| path.to_owned())
        };
        self.config.clone().or_else(usual)
    }

    /// Reads the file, and applies the flags.
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
        if !self.machine_devices.is_empty() {
            for guest in settings
                .guests
                .iter_mut()
                .filter(|guest| guest.vm.is_some())
            {
                guest.rule.policy.devices = self.machine_devices.clone();
            }
        }
        fn replace<T: Clone>(place: &mut T, flag: &Option<T>) {
            if let Some(flag) = flag {
                *place = flag.clone();
            }
        }
        replace(
            &mut settings.engines,
            &EngineList::join(self.engine.clone()),
        );
        replace(&mut settings.threads.count, &self.threads);
        settings.trust_guests |= self.trust_guests;
        settings.threads.pin |= self.pin;
        replace(&mut settings.max_guests, &self.max_guests);
        let device = self.device.map(|device| match device {
            VmDeviceArgument::Ivshmem => VmDevice::Ivshmem,
            VmDeviceArgument::VfioUser => VmDevice::VfioUser,
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
        settings.crl = self.crl.clone().or(settings.crl);
        settings.memory = self.memory.or(settings.memory);
        settings.host_memory = self.host_memory.or(settings.host_memory);
        let seconds = self
            .max_node_time
            .map(|n| Duration::from_secs(n.get().into()));
        settings.max_node_time = seconds.or(settings.max_node_time);
        let seconds = self.max_turn_time.map(|n| Duration::from_secs(n.into()));
        settings.max_turn_time = seconds.or(settings.max_turn_time);
        settings.log = self.log.clone().or(settings.log);
        settings.metrics = self.metrics.clone().or(settings.metrics);
        settings.metrics_allow_remote |= self.metrics_allow_remote;
        settings.check_devices()?;
        settings.check_engines()?;
        if let Some(address) = &settings.metrics {
            address.check_remote(settings.metrics_allow_remote)?;
        }
        let control = self.control.clone().or(settings.control);
        settings.control = control.or_else(control_of_service);
        settings.share_buffers &= !self.no_shared_buffers;
        settings.batch &= !self.no_batch;
        Ok(settings.with_default_listener())
    }
}

/// The control socket of a unit with `RuntimeDirectory=`: that of `vgpu.service` is the default of
/// `vgpu ps`.
fn control_of_service() -> Option<PathBuf> {
    let folders = std::env::var_os("RUNTIME_DIRECTORY")?;
    let folder = std::env::split_paths(&folders).next()?;
    let name = Path::new(DEFAULT_CONTROL_PATH).file_name()?;
    folder.is_absolute().then(|| folder.join(name))
}
