//! `vgpu kubernetes`.

use std::env;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use tempfile::NamedTempFile;
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;
use vgpu_executor::config::{DEFAULT_CONTROL_PATH, Settings};
use vgpu_executor::size;
use vgpu_kubernetes::{ClaimOptions, Options};

use crate::config_error::ConfigError;
use crate::serve;

/// Gives the containers of Kubernetes the executor of their node: a device plugin of the kubelet.
///
/// The resource vgpu.dev/gpu is a seat: a container with one is a guest of the executor. The
/// resource vgpu.dev/memory is a number of slices of device memory, the quota of that guest, and
/// vgpu.dev/weight its share of the device's time beside others (1 without the resource). The
/// container gets libggml-vgpu.so, a socket of its own, and the environment to find both. The
/// executor has a control socket that this user may use. Ends on SIGTERM and SIGINT; containers
/// keep the executor.
///
/// With --dra this is a driver for Dynamic Resource Allocation (resource.k8s.io/v1, the driver
/// vgpu.dev) instead: claims ask for parts of the memory and the time of a device.
#[derive(Parser)]
pub(crate) struct Args {
    /// The executor's control socket
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_PATH)]
    control: PathBuf,

    /// The folder of the kubelet, with its folders device-plugins and pod-resources, or with --dra
    /// plugins and plugins_registry
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/kubelet")]
    kubelet: PathBuf,

    /// The folder for the sockets of containers. The folder is on the host; the executor and this
    /// command see it at the same path
    #[arg(long, value_name = "FOLDER", default_value = "/run/vgpu/pods")]
    sockets: PathBuf,

    /// The guest plugin on the host, which containers get. This command sees it at the same path
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/usr/lib/vgpu/libggml-vgpu.so"
    )]
    plugin: PathBuf,

    /// Copies this file to the path of --plugin first, unless the same bytes are there
    #[arg(long, value_name = "FILE")]
    install_plugin: Option<PathBuf>,

    /// Where the kernel says which NUMA node a GPU is near
    #[arg(long, value_name = "FOLDER", default_value = "/sys", hide = true)]
    sysfs: PathBuf,

    /// Containers that may use the executor at once; with --dra, claims that may use each device
    #[arg(long, value_name = "N", default_value_t = 32)]
    seats: u32,

    /// The size of a slice of memory, a multiple of 1M; with --dra, the memory of a claim that asks
    /// for none
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = size::parse)]
    slice: u64,

    /// How often the executor and the kubelet are asked, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    interval: f64,

    /// How long the guest of a container that is gone stays, in seconds. Not with --dra, where the
    /// kubelet says when a claim ends
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    grace: f64,

    /// The name of the pod of this command. Guests are removed only while the kubelet lists this
    /// pod: a kubelet that has just started does not know its pods. [default: the kubelet lists
    /// any pod]
    #[arg(long, value_name = "NAME")]
    pod: Option<String>,

    /// Serves claims of Dynamic Resource Allocation in place of the resources of a device plugin
    #[arg(long, requires = "node")]
    dra: bool,

    /// The name of this node in the cluster, for --dra
    #[arg(long, value_name = "NAME", requires = "dra")]
    node: Option<String>,

    /// The folder in which the container runtime finds the devices of claims (CDI), for --dra. This
    /// command sees the folder at the same path
    #[arg(long, value_name = "FOLDER", default_value = "/var/run/cdi")]
    cdi: PathBuf,

    /// The address of the API server, for --dra. [default: https and the environment variables
    /// KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, which a pod has]
    #[arg(long, value_name = "URL")]
    api_server: Option<String>,

    /// The folder of the account of this pod, with the files token and ca.crt, for --dra
    #[arg(
        long,
        value_name = "FOLDER",
        default_value = "/var/run/secrets/kubernetes.io/serviceaccount"
    )]
    account: PathBuf,

    /// The log filter: error, warn, info, debug, trace or off. [default: the environment variable
    /// VGPU_LOG, or info]
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    serve::start_log(&Settings {
        log: args.log,
        ..Settings::default()
    })?;
    let seconds = |name: &str, seconds: f64| {
        let time = Duration::try_from_secs_f64(seconds).ok();
        let time = time.filter(|time| !time.is_zero());
        time.with_context(|| format!("--{name} {seconds}: expected more than 0 seconds"))
            .map_err(ConfigError)
    };
    let options = Options {
        control: args.control,
        kubelet: args.kubelet,
        sockets: args.sockets,
        plugin: args.plugin,
        sysfs: args.sysfs,
        seats: args.seats,
        slice: args.slice,
        interval: seconds("interval", args.interval)?,
        grace: seconds("grace", args.grace)?,
        pod: args.pod,
        claims: match (args.dra, args.node) {
            (true, Some(node)) => Some(ClaimOptions {
                node,
                cdi: args.cdi,
                server: match args.api_server {
                    Some(url) => url.trim_end_matches('/').to_owned(),
                    None => api_server_of_pod().map_err(ConfigError)?,
                },
                account: args.account,
            }),
            _ => None,
        },
    };
    if let Some(source) = &args.install_plugin {
        install(source, &options.plugin).with_context(|| {
            let (source, plugin) = (source.display(), options.plugin.display());
            format!("copying {source} to {plugin}")
        })?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let ended = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("catching SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("catching SIGINT")?;
        let stop = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            info!("vgpu kubernetes ends");
        };
        vgpu_kubernetes::run(options, stop).await?;
        anyhow::Ok(())
    });
    // A thread may wait for an executor or an API server that does not answer.
    runtime.shutdown_background();
    ended
}

/// The address of the API server, as a pod has it.
fn api_server_of_pod() -> anyhow::Result<String> {
    let of = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
    let host = of("KUBERNETES_SERVICE_HOST");
    let host = host.context("no KUBERNETES_SERVICE_HOST, which pods have: give --api-server")?;
    let port = of("KUBERNETES_SERVICE_PORT").unwrap_or_else(|| "443".into());
    Ok(match host.contains(':') {
        true => format!("https://[{host}]:{port}"),
        false => format!("https://{host}:{port}"),
    })
}

/// Copies the guest plugin. Containers that have the file before keep it.
fn install(source: &Path, plugin: &Path) -> anyhow::Result<()> {
    let bytes = fs::read(source)?;
    if fs::read(plugin).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    let folder = plugin.parent().context("the path has no folder")?;
    fs::create_dir_all(folder)?;
    let copy = NamedTempFile::new_in(folder)?;
    fs::write(copy.path(), &bytes)?;
    copy.as_file()
        .set_permissions(Permissions::from_mode(0o644))?;
    copy.as_file().sync_all()?;
    copy.persist(plugin)?;
    info!("{} is installed", plugin.display());
    Ok(())
}
