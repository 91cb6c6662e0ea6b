//! `vgpu serve --isolate`: a process for each guest.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{self, Receiver};

use anyhow::{Context as _, anyhow, bail, ensure};
use clap::Parser;
use tracing::{info, warn};
use vgpu_executor::config::{EngineKind, LogFormat, Settings, VmDevice};
use vgpu_executor::isolate::{self, Arrived, Supervisor};
use vgpu_executor::vm::VmOptions;
use vgpu_executor::{Limits, Stop, service, size};
use vgpu_kernels::Engine as _;
use vgpu_kernels::cpu::CpuEngine;
use vgpu_transport::link::stream::tls::Certificates;

use super::doors::{Listening, listen};
use super::logging::Logging;
use super::{Args, Event, announce, catch_signals, engine, enter_sandbox};

/// Serves one guest, whose socket is standard input. Started by `vgpu serve --isolate` alone.
#[derive(Parser)]
pub(crate) struct WorkerArgs {
    #[command(flatten)]
    arrived: Arrived,
    #[arg(long)]
    certs: Option<PathBuf>,
    #[arg(long)]
    engine: EngineKind,
    #[arg(long)]
    threads: usize,
    #[arg(long, value_parser = size::parse)]
    memory: Option<u64>,
    #[arg(long)]
    no_shared_buffers: bool,
    #[arg(long)]
    no_sandbox: bool,
    #[arg(long)]
    log: Option<String>,
    #[arg(long)]
    log_format: String,
}

/// The supervisor.
pub(super) fn run(
    args: &Args,
    settings: &Settings,
    events: &Receiver<Event>,
) -> anyhow::Result<()> {
    refuse_what_takes_one_process(settings)?;
    let machines: Vec<&VmOptions> = settings
        .guests
        .iter()
        .filter_map(|guest| guest.vm.as_ref())
        .collect();
    let places = places(args, settings, machines.len())?;
    let certificates = certificates(settings.certs.as_ref())?;
    let listeners = settings
        .listen
        .iter()
        .map(|endpoint| listen(endpoint, settings.mode, certificates.as_ref()))
        .collect::<anyhow::Result<Vec<Listening>>>()?;
    // Every worker is started by this process: what it gives up, they do not have.
    rustix::thread::set_no_new_privs(true).context("giving up new privileges")?;
    info!(
        version = env!("CARGO_PKG_VERSION"),
        engine = %settings.engine,
        guests = places,
        guest_memory = args.guest_memory,
        "vgpu starts, with a process for each guest"
    );

    let own = std::env::current_exe().context("finding this program")?;
    let common = common(args, settings);
    let worker = {
        let (own, common, certs) = (own.clone(), common.clone(), settings.certs.clone());
        Box::new(move || {
            let mut command = Command::new(&own);
            command.arg("serve-guest").args(&common);
            if let Some(certs) = &certs {
                command.arg("--certs").arg(certs);
            }
            command
        })
    };
    let mut supervisor = Supervisor::new(worker, places - machines.len());
    let mut said: Vec<String> = Vec::new();
    for (listener, endpoint) in listeners.into_iter().zip(&settings.listen) {
        info!("listening on {endpoint}");
        said.push(endpoint.to_string());
        let opened = match listener {
            Listening::Unix(listener) => supervisor.open(listener),
            Listening::Tcp(listener) => supervisor.open(listener),
            Listening::Vsock(listener) => supervisor.open(listener),
            Listening::Ivshmem(_) | Listening::VfioUser(_) => continue, // not of endpoints
        };
        opened.context("no thread for a listener")?;
    }
    for vm in machines {
        // `vgpu hold` keeps the machine's files when its worker dies, and starts the next one.
        let mut command = Command::new(&own);
        command
            .args(["hold", "--"])
            .arg(&own)
            .arg("serve")
            .args(&common);
        // The settings are those given here, and no file's.
        command
            .args([
                "--config",
                "/dev/null",
                "--device",
                device(settings.device),
                "--vm",
            ])
            .arg(argument(vm));
        supervisor
            .keep(&vm.name, command, &vm.socket)
            .map_err(|error| anyhow!("--vm {}: {error}", vm.name))?;
        let place = format!("vm:{}", vm.socket.display());
        info!("listening on {place}");
        said.push(place);
    }
    announce(&said);
    service::ready();

    loop {
        match events.recv().context("the thread for signals has ended")? {
            Event::Stop(signal) => {
                info!(
                    "{signal} received: ending the workers; a second signal ends the process at once"
                );
                break;
            }
            Event::Reload(_) => {
                warn!("with --isolate the configuration is read at the start alone")
            }
        }
    }
    service::stopping();
    supervisor.shutdown();
    info!("vgpu ends");
    Ok(())
}

/// The worker.
pub(crate) fn work(args: WorkerArgs) -> anyhow::Result<()> {
    let log_format: LogFormat = args.log_format.parse().map_err(anyhow::Error::msg)?;
    let _logging = Logging::start(&Settings {
        log: args.log,
        log_format,
        ..Settings::default()
    })?;
    let (sender, events) = mpsc::channel();
    catch_signals(sender)?;
    let socket = isolate::take_socket().context("standard input is no socket")?;
    let certificates = certificates(args.certs.as_ref())?;
    let engine = engine(args.engine, args.threads, args.memory)?;
    enter_sandbox(engine.as_ref(), args.no_sandbox)?;
    let stop = Stop::new();
    let asked = stop.clone();
    std::thread::Builder::new()
        .name("vgpu-stop".into())
        .spawn(move || {
            while let Ok(event) = events.recv() {
                if matches!(event, Event::Stop(_)) {
                    asked.ask();
                }
            }
        })
        .context("no thread for signals")?;
    let limits = Limits {
        share: !args.no_shared_buffers,
        ..Limits::default()
    };
    isolate::serve(socket, &args.arrived, engine, limits, certificates, &stop);
    Ok(())
}

fn certificates(folder: Option<&PathBuf>) -> anyhow::Result<Option<Certificates>> {
    folder
        .map(|folder| Certificates::load(folder).context("certificates"))
        .transpose()
}

/// What is shared out or counted over all guests takes one process that serves all.
fn refuse_what_takes_one_process(settings: &Settings) -> anyhow::Result<()> {
    let named = settings
        .guests
        .iter()
        .find(|guest| guest.vm.is_none() || !guest.listen.is_empty());
    if let Some(guest) = named {
        bail!(
            "--isolate serves guests without names, and virtual machines: each gets the same part of the memory. Guest {:?} has \
             a name, and what goes with it takes one process for all",
            guest.rule.name
        );
    }
    ensure!(
        settings.unnamed.is_some(),
        "--isolate serves guests without names, and the configuration lets none of them in"
    );
    for (is_set, what) in [
        (settings.metrics.is_some(), "metrics"),
        (settings.weights_cache.is_some(), "the cache of weights"),
    ] {
        ensure!(
            !is_set,
            "--isolate and {what} do not go together: that takes one process for all guests"
        );
    }
    Ok(())
}

/// How many guests the memory is enough for, virtual machines included.
fn places(args: &Args, settings: &Settings, machines: usize) -> anyhow::Result<usize> {
    if settings.engine != EngineKind::Cpu {
        ensure!(
            args.guest_memory.is_none(),
            "--guest-memory is for the cpu engine; what a GPU has is given out by its driver"
        );
        ensure!(
            machines <= settings.max_guests,
            "more virtual machines than --max-guests"
        );
        return Ok(settings.max_guests);
    }
    let Some(each) = args.guest_memory.filter(|each| *each > 0) else {
        bail!(
            "--isolate needs --guest-memory, such as --guest-memory 4G: processes do not share what they have"
        );
    };
    let all = match settings.memory {
        Some(all) => all,
        // What the machine or its control group has.
        None => {
            CpuEngine::new(1, None)
                .context("looking at the memory")?
                .memory()
                .total
        }
    };
    let places = usize::try_from(all / each)
        .unwrap_or(usize::MAX)
        .min(settings.max_guests);
    ensure!(
        places > 0 && places >= machines,
        "{all} bytes of memory in parts of {each} (--guest-memory) are for {places} guests, and there are {machines} virtual \
         machines; make the parts smaller"
    );
    Ok(places)
}

/// What workers of both kinds are told.
fn common(args: &Args, settings: &Settings) -> Vec<OsString> {
    let format = match settings.log_format {
        LogFormat::Text => "text",
        LogFormat::Json => "json",
    };
    let mut common: Vec<OsString> = vec![
        format!("--engine={}", settings.engine).into(),
        format!("--threads={}", settings.threads).into(),
        format!("--log-format={format}").into(),
    ];
    common.extend(
        args.guest_memory
            .map(|each| format!("--memory={each}").into()),
    );
    if !settings.share_buffers {
        common.push("--no-shared-buffers".into());
    }
    if args.no_sandbox {
        common.push("--no-sandbox".into());
    }
    common.extend(
        settings
            .log
            .as_ref()
            .map(|log| format!("--log={log}").into()),
    );
    common
}

/// As on the command line.
fn device(device: VmDevice) -> &'static str {
    match device {
        VmDevice::Ivshmem => "ivshmem",
        VmDevice::VfioUser => "vfio-user",
    }
}

/// A virtual machine as it was given.
fn argument(vm: &VmOptions) -> OsString {
    let silence = vm.silence.map_or(0, |silence| silence.as_secs());
    let mut text = OsString::from(format!(
        "{},window={},silence={silence},socket=",
        vm.name, vm.window
    ));
    text.push(&vm.socket);
    text
}
