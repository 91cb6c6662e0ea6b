//! `vgpu serve`.

mod args;
mod certificates;
mod drain_text;
mod events;
mod guest_requests;
mod isolated;
mod kept_machines;
mod listeners;
mod logging;
mod metrics_http;
mod observe;
mod sandboxing;
mod single;
mod status_page;
mod trim_pages;

use std::sync::{Arc, mpsc};

use vgpu_executor::config::Settings;

use crate::config_error::ConfigError;
use crate::engine_probe;
use crate::own_program::check_supervisor;
use events::{DumpSource, Serving, catch_signals};
use listeners::Listeners;
use logging::{Logging, start_writer};

pub(crate) use args::Args;
pub(crate) use isolated::{WorkerArgs, run_worker};

/// Checks what `vgpu serve` reads before it opens a socket: the log filter and the certificates.
pub(crate) fn check(settings: &Settings) -> anyhow::Result<()> {
    settings.check_devices()?;
    logging::check(settings)?;
    Listeners::new(settings)?.check_identities(settings)
}

/// Starts the log of another command that runs for long.
#[cfg(feature = "kubernetes")]
pub(crate) fn start_log(settings: &Settings) -> anyhow::Result<()> {
    Logging::start(settings).map_err(ConfigError)?;
    start_writer()
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    vgpu_executor::limit_kept_memory();
    if let Some(version) = &args.supervised {
        check_supervisor("process of a virtual machine", Some(version))?;
    }
    let settings = args.settings().map_err(ConfigError)?;
    let mut logging = Logging::start(&settings).map_err(ConfigError)?;
    if let Some(engine) = settings.engines.needs_trust() {
        anyhow::ensure!(
            settings.trust_guests || args.isolate,
            "with the engine {engine} a guest can end this process, and with it the work of all \
             other guests: give each guest a process with --isolate, or allow it with \
             --trust-guests"
        );
    }
    let choose = || {
        let is_trusted = settings.trust_guests || args.isolate;
        let chosen = engine_probe::select(&settings.engines, is_trusted)?;
        #[cfg(feature = "tools")]
        if args.supervised.is_none() {
            for engine in &chosen.engines {
                crate::gpu_check::before_serving(engine);
            }
        }
        anyhow::Ok(chosen)
    };
    if args.supervised.is_some() {
        // Before the process gives up its files.
        isolated::end_before_supervisor();
    }
    // The process of a virtual machine has one thread only when it gives up its files. Its
    // supervisor has chosen the engine.
    let machine = match args.isolated_machine {
        true => {
            let engine = choose()?;
            let sockets = single::bind_and_isolate(args, &settings, &engine)?;
            Some((sockets, engine))
        }
        false => None,
    };
    start_writer()?;
    // First of all, so that a signal finds a handler as soon as there is something to clean up.
    let (sender, events) = mpsc::channel();
    let dumps = DumpSource::default();
    let serving = Serving::default();
    catch_signals(sender.clone(), Arc::clone(&dumps), serving.clone())?;
    let channel = (sender, &events);
    if args.isolate {
        // Its workers and the processes of its virtual machines get the engines by name.
        let engine = choose()?;
        // Has no engine, and processes that are to end in order.
        serving.begin();
        return isolated::run(args, settings, &engine, channel, &dumps, &mut logging);
    }
    let (sockets, engine) = match machine {
        Some(machine) => machine,
        // Programs connect, and wait, while engines are tried.
        None => (single::bind(&settings)?, choose()?),
    };
    single::run(
        args,
        settings,
        &engine,
        sockets,
        channel,
        (&dumps, &serving),
        &mut logging,
    )
}
