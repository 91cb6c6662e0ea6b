//! `vgpu doctor`: checks each part from the machine to the executor, and says what to do.

mod certificates;
mod devices;
mod host;
mod link;
mod plugin;
mod report;
mod sandbox;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use vgpu_transport::link::Endpoint;

use report::Report;

/// Finds what keeps programs from using a vGPU: in a guest, in a container, or on the host.
///
/// Each line is `ok`, `note` (information) or `FAIL` with what to do. The exit status is 0 when
/// nothing failed, 1 otherwise.
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
            env!("CARGO_PKG_VERSION"),
            vgpu_transport::wire::PROTOCOL_VERSION,
            vgpu_transport::ir::IR_VERSION
        ),
    );
    host::check(&mut report);
    sandbox::check(&mut report);
    devices::check(&mut report);
    certificates::check(&args.certs, &mut report);
    link::check(&args.endpoint, &mut report);
    plugin::check(args.plugin.as_deref(), args.ggml.as_deref(), &mut report);
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
