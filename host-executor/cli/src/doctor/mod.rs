//! `vgpu doctor`: checks each part from the machine to the executor, and says what to do.

mod certificates;
mod child;
mod config;
mod control;
mod devices;
mod driver;
mod gpu;
mod gpu_use;
mod host;
mod library;
mod link;
mod ollama;
mod plugin;
mod report;
mod root;
mod sandbox;
mod unit;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use vgpu_transport::link::Endpoint;

pub(crate) use driver::{DriverArgs, run as run_driver};
pub(crate) use plugin::{PluginArgs, run as run_plugin};
use report::Report;
use root::Root;

/// Finds what keeps programs from using a vGPU: in a guest, in a container, or on the host.
///
/// The checks go from the machine and its GPU over the configuration, the service and the link to
/// the plugin and Ollama. Each line is `ok`, `note` (information) or `FAIL`. After a failure, the
/// last line begins with "next: " and has the command to type about the first one. The exit status
/// is 0 when nothing failed, 1 otherwise.
#[derive(Parser)]
pub(crate) struct Args {
    /// The executor's address, as in VGPU_ENDPOINT. May be given several times. [default:
    /// VGPU_ENDPOINT, or the addresses that the plugin tries]
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Vec<Endpoint>,

    /// The plugin. [default: GGML_BACKEND_PATH, or libggml-vgpu.so beside this program or in
    /// ../lib/vgpu]
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,

    /// The ggml library that loads the plugin, libggml-base.so. [default: the one beside the
    /// plugin, if there is one]
    #[arg(long, value_name = "FILE")]
    ggml: Option<PathBuf>,

    /// A folder with certificates. May be given several times. The folders in VGPU_CERTS and in
    /// /etc/vgpu/vgpu.toml are always checked
    #[arg(long, value_name = "FOLDER")]
    certs: Vec<PathBuf>,

    /// Check the files of another file system: for tests
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    root: PathBuf,

    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let mut report = Report::default();
    report.ok(
        "vgpu",
        format!(
            "version {}, protocol {}, graphs {}",
            crate::own_program::VERSION,
            vgpu_transport::wire::VersionRange::SERVED,
            vgpu_transport::ir::IR_VERSION
        ),
    );
    let root = Root::new(&args.root);
    host::check(&mut report);
    sandbox::check(&mut report);
    let mut of_service = Report::default();
    let service = unit::check(&root, &mut of_service);
    // Before the checks that need it, so that the first failure is their cause. The package has a
    // configuration, and may be installed in a guest, where nobody asks for the service.
    let mut of_config = Report::default();
    let (settings, choice) = match service {
        unit::UnitState::Unused => (None, None),
        _ => config::check(&root, &mut of_config),
    };
    let has_run = matches!(service, unit::UnitState::Used | unit::UnitState::Changing);
    let is_host = settings.is_some() || has_run;
    let host = is_host.then(|| settings.unwrap_or_default());
    let card = gpu::check(&root, host.as_ref(), &mut report);
    report.append(of_config);
    let card = card.as_deref();
    let mut of_control = Report::default();
    let status = control::check(&root, host.as_ref(), service, &mut of_control);
    // A GPU that the executor has may be refused to one that starts now beside it.
    let has_gpu = status.as_ref().is_some_and(gpu_use::uses_gpu);
    if let (false, Some(settings), Some(choice)) = (has_gpu, &host, &choice) {
        gpu_use::check_choice(&root, settings, card, choice, &mut report);
    }
    report.append(of_service);
    devices::check(&root, &mut report);
    certificates::check(&args.certs, host.as_ref(), &mut report);
    report.append(of_control);
    if let Some(status) = status {
        let running = (&status, service);
        let (host, choice) = (host.as_ref(), choice.as_ref());
        gpu_use::check_executor(&root, host, card, choice, running, &mut report);
    }
    let links = link::check(&root, &args.endpoint, host.as_ref(), service, &mut report);
    plugin::check(
        args.plugin.as_deref(),
        args.ggml.as_deref(),
        &links,
        &mut report,
    );
    ollama::check(&root, &mut report);
    if root.is_own() && rustix::process::geteuid().is_root() && !has_sudo() {
        report.leave_out_sudo();
    }
    if args.json {
        println!("{:#}", report.json());
    } else {
        print!("{}", report.lines());
    }
    if report.is_well() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Whether this machine has `sudo`. Proxmox and small images of Debian do not.
fn has_sudo() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join("sudo").exists())
}
