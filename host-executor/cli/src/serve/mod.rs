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
mod unused;

use std::sync::mpsc;

use anyhow::Context as _;
use vgpu_executor::DumpThread;
use vgpu_executor::config::Settings;

use crate::child_status;
use crate::config_error::ConfigError;
use crate::engine_probe;
use crate::own_program::check_supervisor;
use events::{Serving, catch_signals};
use listeners::Listeners;
use logging::{Logging, start_writer};

pub(crate) use args::Args;
pub(crate) use isolated::{WorkerArgs, run_worker};

/// Checks what `vgpu serve` reads before it opens a socket: the log filter and the certificates.
pub(crate) fn check(settings: &Settings) -> anyhow::Result<()> {
    settings.check_devices()?;
    settings.check_engines()?;
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
    child_status::keep().context("the exit statuses of processes")?;
    vgpu_executor::limit_kept_memory();
    if let Some(version) = &args.supervised {
        check_supervisor("process of a virtual machine", Some(version))?;
    }
    let settings = args.settings().map_err(ConfigError)?;
    let mut logging = Logging::start(&settings).map_err(ConfigError)?;
    if let Some(engine) = settings.engines.needs_trust() {
        anyhow::ensure!(
            settings.trust_guests || args.isolate,
            "with the engine {engine} a guest can end this process, and read and change the memory \
             of other guests: give each guest a process with --isolate, or allow it with \
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
    let dumps = DumpThread::start().context("no thread for dumps")?;
    let serving = Serving::default();
    catch_signals(sender.clone(), dumps.clone(), serving.clone())?;
    let channel = (sender, &events);
    let choose = || {
        dumps.begin_step("engines are tried");
        choose()
    };
    if args.isolate {
        let observers = observe::bind(&settings)?.start(&dumps)?;
        // Its workers and the processes of its virtual machines get the engines by name.
        let engine = choose()?;
        let settings = settings.on_engines(&engine.engines)?;
        // Has no engine, and processes that are to end in order.
        serving.begin();
        let observed = (observers, &dumps);
        return isolated::run(args, settings, &engine, channel, observed, &mut logging);
    }
    let (sockets, observers, engine) = match machine {
        Some(((sockets, observers), engine)) => (sockets, observers.start(&dumps)?, engine),
        // Programs connect, and wait, while engines are tried.
        None => {
            let (sockets, observers) = single::bind(&settings)?;
            let observers = observers.start(&dumps)?;
            (sockets, observers, choose()?)
        }
    };
    let settings = settings.on_engines(&engine.engines)?;
    single::run(
        args,
        settings,
        &engine,
        sockets,
        channel,
        (observers, &dumps, &serving),
        &mut logging,
    )
}
