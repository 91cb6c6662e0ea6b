//! `vgpu serve`.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write, stderr, stdout};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::{Parser, ValueEnum};
use rustix::io::Errno;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;
use vgpu_executor::sandbox::{self, Profile};
use vgpu_executor::vm::{IvshmemDoor, VfioUserDoor, VmListenError, VmOptions, listen_stream};
use vgpu_executor::weights::{CacheOptions, Sharing};
use vgpu_executor::{Limits, Server, Weights, service, size};
use vgpu_kernels::Engine;
use vgpu_kernels::cpu::CpuEngine;
use vgpu_kernels::cuda::CudaEngine;
use vgpu_kernels::cuda::device::Gpu;
use vgpu_transport::link::Endpoint;
use vgpu_transport::link::stream::tls::Certificates;
use vgpu_transport::link::stream::{tcp, vsock};
use vgpu_transport::link::unix::{ListenError, ListenOptions, Listener};

/// Signals this close together are one: `timeout` and some service managers signal a process and its group.
const SAME_SIGNAL: Duration = Duration::from_millis(500);

/// Serves guests until SIGTERM or SIGINT.
///
/// Guests are programs that load libggml-vgpu.so (llama.cpp, Ollama and others); they see this executor as a
/// GPU. When it accepts guests, one line "ready ENDPOINT..." is printed on standard output; logs go to
/// standard error. At the first signal no more guests are accepted, running graphs are finished, and the
/// exit status is 0; a second signal ends it at once.
#[derive(Parser)]
pub(crate) struct Args {
    /// Where to listen: unix:/path/to/socket, tcp:HOST:PORT, vsock:PORT, or vsock:/path:PORT for Firecracker and its
    /// relatives. May be given several times. [default: unix:/run/vgpu/vgpu.sock]
    ///
    /// Guests find the default by themselves; for any other, set VGPU_ENDPOINT to the same text in the
    /// guest. Who may open the socket may use the executor: it is made for its owner and group (mode 660).
    #[arg(long, value_name = "ENDPOINT", num_args = 1..)]
    listen: Vec<Endpoint>,

    /// A folder with certificates that `vgpu cert` has made, for tcp. Without one, tcp is for this machine only.
    #[arg(long, value_name = "FOLDER")]
    certs: Option<PathBuf>,

    /// A virtual machine to serve: NAME,socket=PATH and, where the defaults will not do, ",window=SIZE" and
    /// ",silence=SECONDS". May be given several times.
    ///
    /// Its QEMU, of any version, gets the device by
    /// -chardev socket,id=vgpu0,path=PATH -device ivshmem-doorbell,chardev=vgpu0,vectors=1 and has to be started after
    /// this. The window (256M, a power of two) is a memory region of the virtual machine, shared by up to 7 programs in it.
    /// A program that gives no sign of life for so many seconds (60; 0: no limit) has died. With --vm and without
    /// --listen, only virtual machines are served.
    #[arg(long, value_name = "VM")]
    vm: Vec<VmOptions>,

    /// What the virtual machines see.
    #[arg(long, value_enum, default_value_t = Device::Ivshmem)]
    device: Device,

    /// What does the arithmetic: cpu, cuda (the first NVIDIA GPU), cuda:N, or auto (a GPU if there is one that can
    /// be used, else the processors).
    #[arg(long, value_name = "ENGINE", default_value = "cpu")]
    engine: EngineKind,

    /// Threads of the cpu engine; 0 for one on each core this process may use.
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,

    /// Memory that guests may use in all, such as 512M or 8G. [default: what the machine or its control
    /// group has]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,

    /// Guests served at once; more are turned away.
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_guests: usize,

    /// Keep the memory of guests' buffers to this process: no guest on this machine maps it, every byte goes through a
    /// message.
    ///
    /// Without this option a guest maps its own buffers, and nobody else's, and copies into them itself.
    #[arg(long)]
    no_shared_buffers: bool,

    /// Keep privileges and all system calls.
    ///
    /// Without this option the process gives up its capabilities once it has started, and the system calls that it does
    /// not make.
    #[arg(long)]
    no_sandbox: bool,

    /// Whose weights are held once: the same bytes, uploaded by several guests, take memory once, and are not sent by a
    /// guest that says their hash.
    ///
    /// With "all", a guest can find out whether another one has the same content, by asking for it and by the time
    /// things take. With "tenant" it only can for its own user or virtual machine. What a guest writes is never seen
    /// by another.
    #[arg(long, value_enum, value_name = "WHOSE", default_value_t = Sharing::Tenant)]
    share_weights: Sharing,

    /// Keeps weights on disk, so that a model known from before a restart is not sent again: FOLDER,size=SIZE, such as
    /// /var/cache/vgpu/weights,size=50G. What was not used for longest goes when the size is reached.
    #[arg(long, value_name = "CACHE")]
    weights_cache: Option<CacheOptions>,

    /// What to log: error, warn, info, debug, trace, off, or for parts of the program, as in
    /// info,vgpu_executor=debug. [default: the environment variable VGPU_LOG, or info]
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
}

/// What does the arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineKind {
    Cpu,
    Cuda(u32),
    Auto,
}

impl FromStr for EngineKind {
    type Err = String;

    fn from_str(text: &str) -> Result<EngineKind, String> {
        match text {
            "cpu" => Ok(EngineKind::Cpu),
            "cuda" => Ok(EngineKind::Cuda(0)),
            "auto" => Ok(EngineKind::Auto),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(EngineKind::Cuda)
                .ok_or_else(|| "expected cpu, cuda, cuda:N or auto".into()),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// QEMU's own shared-memory device, 1af4:1110. Any QEMU; survives a restart of this program.
    Ivshmem,
    /// A PCI function 10de:2331 of class 0302, over vfio-user: QEMU 10.1 or newer (-device
    /// '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"PATH"}}', the machine's memory shared) and Cloud
    /// Hypervisor (--user-device socket=PATH).
    VfioUser,
}

pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    start_logging(args.log)?;
    // Before anything is there to be cleaned up, so that no signal finds us unprepared.
    let stop = catch_signals()?;

    let engine = engine(args.engine, args.threads, args.memory)?;
    let mut endpoints = args.listen;
    if endpoints.is_empty() && args.vm.is_empty() {
        endpoints = Endpoint::defaults();
    }
    let certificates = args
        .certs
        .map(|folder| Certificates::load(&folder).context("--certs"))
        .transpose()?;
    let listeners = endpoints
        .iter()
        .map(|endpoint| listen(endpoint, certificates.as_ref()))
        .collect::<anyhow::Result<Vec<Listening>>>()?;
    let mut kept = service::kept_files();
    let machines = args
        .vm
        .into_iter()
        .map(|vm| machine(vm, args.device, &mut kept))
        .collect::<anyhow::Result<Vec<Machine>>>()?;
    // Files of virtual machines that are served no more.
    for (name, _file) in kept {
        service::forget(&name);
    }

    // What is not ours (drivers) makes calls that nobody has written down.
    let profile = match engine.name() {
        "cpu" => Profile::Cpu,
        _ => Profile::Driver,
    };
    let memory = engine.memory();
    info!(
        version = env!("CARGO_PKG_VERSION"),
        engine = engine.name(),
        device = engine.description(),
        memory = memory.total,
        free = memory.free,
        "vgpu starts"
    );
    let limits = Limits {
        share: !args.no_shared_buffers,
        ..Limits::default()
    };
    let mut server = Server::new(engine, limits, args.max_guests);
    let weights =
        Weights::new(args.share_weights, args.weights_cache).context("--weights-cache")?;
    server.share_weights(weights);
    for (listener, endpoint) in listeners.into_iter().zip(&endpoints) {
        info!("listening on {endpoint}");
        let opened = match listener {
            Listening::Unix(listener) => server.open(listener),
            Listening::Tcp(listener) => server.open(listener),
            Listening::Vsock(listener) => server.open(listener),
        };
        opened.context("no thread for a listener")?;
    }
    let mut places: Vec<String> = endpoints.iter().map(Endpoint::to_string).collect();
    for machine in machines {
        let place = format!("vm:{}", machine.path().display());
        info!("listening on {place}");
        places.push(place);
        let opened = match machine {
            Machine::Ivshmem(door) => server.open(door),
            Machine::VfioUser(door) => server.open(door),
        };
        opened.context("no thread for a listener")?;
    }
    if args.no_sandbox {
        warn!("no sandbox: --no-sandbox");
    } else {
        let sandbox =
            sandbox::enter(profile).context("no sandbox; --no-sandbox starts without one")?;
        info!("sandboxed: {sandbox}");
    }
    announce(&places);
    service::ready();

    let signal = stop.recv().context("the thread for signals has ended")?;
    info!("{signal} received: ending the sessions; a second signal ends the process at once");
    service::stopping();
    server.shutdown();
    info!("vgpu ends");
    Ok(())
}

fn start_logging(filter: Option<String>) -> anyhow::Result<()> {
    let (source, filter) = match filter {
        Some(filter) => ("--log", filter),
        None => (
            "VGPU_LOG",
            std::env::var("VGPU_LOG").unwrap_or_else(|_| "info".into()),
        ),
    };
    let filter = EnvFilter::try_new(&filter).map_err(|error| {
        anyhow!(
            "{source}: {filter:?} is not a filter ({error}); try info, debug or vgpu_executor=trace"
        )
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        // A line that cannot be written (a full disk) is lost. To say so on standard error would be a panic there.
        .log_internal_errors(false)
        .init();
    Ok(())
}

/// The name of the first SIGTERM or SIGINT arrives in the channel; a second one ends the process there and
/// then.
fn catch_signals() -> anyhow::Result<Receiver<&'static str>> {
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("signals cannot be caught")?;
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new()
        .name("vgpu-signals".into())
        .spawn(move || {
            let mut first: Option<Instant> = None;
            for signal in signals.forever() {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                match first {
                    None => {
                        first = Some(Instant::now());
                        // Nobody receives it when the start has failed already.
                        let _ = sender.send(name);
                    }
                    Some(first) if first.elapsed() < SAME_SIGNAL => {}
                    Some(_) => {
                        warn!("{name} received again: ending at once");
                        std::process::exit(1);
                    }
                }
            }
        })
        .context("no thread for signals")?;
    Ok(receiver)
}

/// Starts an engine.
pub(crate) fn engine(
    kind: EngineKind,
    threads: usize,
    memory: Option<u64>,
) -> anyhow::Result<Arc<dyn Engine>> {
    match kind {
        EngineKind::Cpu => {
            let engine = CpuEngine::new(threads, memory)
                .with_context(|| format!("the cpu engine does not start with {threads} threads"))?;
            Ok(Arc::new(engine))
        }
        EngineKind::Cuda(ordinal) => {
            cuda(ordinal).with_context(|| format!("the engine cuda:{ordinal} does not start"))
        }
        EngineKind::Auto => cuda(0).or_else(|error| {
            info!("no GPU is used: {error:#}");
            engine(EngineKind::Cpu, threads, memory)
        }),
    }
}

fn cuda(ordinal: u32) -> anyhow::Result<Arc<dyn Engine>> {
    let gpu = Gpu::new(ordinal, kernel_cache())?;
    Ok(Arc::new(CudaEngine::new(Arc::new(gpu))?))
}

/// Where compiled kernels are kept, if the user has a place for such things.
fn kernel_cache() -> Option<PathBuf> {
    let folder = |name| {
        std::env::var_os(name)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
    };
    let cache = folder("VGPU_CACHE")
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("ggml-vgpu")))
        .or_else(|| folder("HOME").map(|home| home.join(".cache/ggml-vgpu")));
    cache.map(|cache| cache.join("kernels"))
}

/// A listener of some kind.
enum Listening {
    Unix(Listener),
    Tcp(tcp::Listener),
    Vsock(vsock::Listener),
}

fn listen(endpoint: &Endpoint, certificates: Option<&Certificates>) -> anyhow::Result<Listening> {
    let failed = |error: &dyn std::fmt::Display| anyhow!("cannot listen on {endpoint}: {error}");
    match endpoint {
        Endpoint::Unix(path) => Listener::bind(path, ListenOptions::default())
            .map(Listening::Unix)
            .map_err(|error| {
                let hint = hint(path, &error);
                anyhow!("cannot listen on {endpoint}: {error}{hint}")
            }),
        Endpoint::Tcp { host, port } => {
            let listener = tcp::Listener::bind(host, *port, certificates.cloned());
            listener.map(Listening::Tcp).map_err(|e| failed(&e))
        }
        Endpoint::Vsock { port, .. } => {
            let listener = vsock::Listener::kernel(*port);
            listener.map(Listening::Vsock).map_err(|e| failed(&e))
        }
        Endpoint::VsockUnix { path, port } => {
            let mut name = path.clone().into_os_string();
            name.push(format!("_{port}"));
            let path = PathBuf::from(name);
            let listener = listen_stream(&path).map_err(|e| failed(&e))?;
            Ok(Listening::Vsock(vsock::Listener::unix(listener, &path)))
        }
        Endpoint::Inproc | Endpoint::Pci(_) => bail!(
            "--listen {endpoint}: an executor cannot listen there; use unix:/path/to/socket, tcp:HOST:PORT or \
             vsock:PORT, and --vm for virtual machines"
        ),
    }
}

/// The door of a virtual machine.
enum Machine {
    Ivshmem(IvshmemDoor),
    VfioUser(VfioUserDoor),
}

impl Machine {
    fn path(&self) -> &Path {
        match self {
            Machine::Ivshmem(door) => door.path(),
            Machine::VfioUser(door) => door.path(),
        }
    }
}

fn machine(
    options: VmOptions,
    device: Device,
    kept: &mut BTreeMap<String, OwnedFd>,
) -> anyhow::Result<Machine> {
    let path = options.socket.clone();
    let opened = match device {
        Device::Ivshmem => IvshmemDoor::open(options, kept).map(Machine::Ivshmem),
        Device::VfioUser => VfioUserDoor::open(options).map(Machine::VfioUser),
    };
    opened.map_err(|error| {
        let directory = path.parent().unwrap_or(&path).display();
        let hint = match &error {
            VmListenError::InUse { .. } => "; stop it, or give this virtual machine another socket",
            VmListenError::System { error, .. } if error.kind() == io::ErrorKind::NotFound => {
                return anyhow!("--vm: {error}; create it (mkdir -p {directory})");
            }
            _ => "",
        };
        anyhow!("--vm: {error}{hint}")
    })
}

/// What the user can do about it.
fn hint(path: &Path, error: &ListenError) -> String {
    let directory = path.parent().unwrap_or(path).display();
    match error {
        ListenError::InUse { .. } => {
            "; stop it, or listen elsewhere with --listen unix:/path/to/socket".into()
        }
        ListenError::NotASocket { .. } => "; remove it, or listen elsewhere with --listen".into(),
        ListenError::NoDirectory { .. } => {
            format!("; create it (mkdir -p {directory}), or listen elsewhere with --listen")
        }
        ListenError::System {
            error: Errno::ACCESS | Errno::PERM | Errno::ROFS,
            ..
        } => format!(
            "; this user may not write to {directory}: start vgpu as its owner, or listen in a directory of \
             your own, such as --listen unix:$XDG_RUNTIME_DIR/vgpu.sock, and set VGPU_ENDPOINT to the same \
             for guests"
        ),
        _ => String::new(),
    }
}

/// Tells whoever started us that guests can come.
fn announce(places: &[String]) {
    let mut out = stdout().lock();
    // Nobody has to listen.
    let _ = writeln!(out, "ready {}", places.join(" ")).and_then(|()| out.flush());
}
