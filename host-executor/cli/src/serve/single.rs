//! `vgpu serve`: all guests in one process.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tracing::{Level, info};
use vgpu_cpu::Threads;
use vgpu_engine::Engine;
use vgpu_executor::added_guests::{AddedGuests, GuestAnswer, GuestRequest};
use vgpu_executor::config::Settings;
use vgpu_executor::engine::{EngineKind, Selection};
use vgpu_executor::sandbox::{self, Role};
use vgpu_executor::size::shown;
use vgpu_executor::{
    DumpThread, Limits, OperatorRequest, Server, Shutdown, StartWatch, WeightStore,
    end_with_last_log, engine, service,
};

use super::args::Args;
use super::certificates::{self, EndWatch};
use super::drain_text;
use super::events::{
    Event, Serving, Task, announce, describe_kill, describe_reload, end_stuck, wait_for_end,
};
use super::guest_requests;
use super::kept_machines::KeptMachines;
use super::listeners::{BoundListener, Listeners};
use super::logging::Logging;
use super::observe::{Observers, StartedObservers};
use super::sandboxing::{Confined, REMEDY};
use super::{observe, sandboxing, trim_pages, unused};

/// The sockets for guests that the settings ask for. Nobody is served yet.
pub(super) struct Sockets {
    listeners: Listeners,
    prepared: Vec<BoundListener>,
    kept: KeptMachines,
}

pub(super) fn bind(settings: &Settings) -> anyhow::Result<(Sockets, Observers)> {
    bind_with(Listeners::new(settings)?, settings)
}

fn bind_with(listeners: Listeners, settings: &Settings) -> anyhow::Result<(Sockets, Observers)> {
    let kept = KeptMachines::take_over(settings)?;
    let prepared = listeners.prepare(settings)?;
    let sockets = Sockets {
        listeners,
        prepared,
        kept,
    };
    Ok((sockets, observe::bind(settings)?))
}

/// Opens the sockets of a virtual machine's process, and gives up the files of the user.
pub(super) fn bind_and_isolate(
    args: &Args,
    settings: &Settings,
    selection: &Selection,
) -> anyhow::Result<(Sockets, Observers)> {
    if !args.no_sandbox {
        // The process has the machine's files from its start.
        sandbox::hide().context(REMEDY)?;
    }
    let listeners = Listeners::of_isolated_machine(settings)?;
    let sockets = bind_with(listeners, settings)?;
    if !args.no_sandbox {
        sandboxing::isolate(&selection.engines)?;
    }
    Ok(sockets)
}

pub(super) fn run(
    args: &Args,
    settings: Settings,
    selection: &Selection,
    sockets: Sockets,
    (sender, events): (Sender<Event>, &Receiver<Event>),
    (observers, dumps, serving): (StartedObservers, &DumpThread, &Serving),
    logging: &mut Logging,
) -> anyhow::Result<()> {
    let kinds = &selection.engines;
    let start_time = Limits::start_time(settings.max_turn_time, selection.has_driver());
    let Sockets {
        mut listeners,
        prepared,
        kept,
    } = sockets;
    let dropped = sandboxing::before_engine(kinds, args.no_sandbox)?;
    let (threads, memory) = (settings.threads, settings.memory);
    let engines = start_engines(kinds, threads, memory, start_time, dumps)?;
    let usual = Limits::of_this_process().context("limits of the kernel")?;
    let limits = Limits {
        map_buffers: settings.share_buffers,
        batch: settings.batch,
        host_memory: settings.host_memory.unwrap_or(usual.host_memory),
        ..usual
    };
    let (node_time, turn_time) = (settings.max_node_time, settings.max_turn_time);
    let devices = engines.iter().map(|engine| {
        let limits = limits.with_times(engine.as_ref(), node_time, turn_time);
        (Arc::clone(engine), limits)
    });
    let server = Server::with_devices(devices.collect(), settings.max_guests);
    let mut server = server.context("no thread")?;
    set_places(args, &server, &settings);
    if let Some(gpu) = selection.unused_gpu.as_ref().or(args.unused_gpu.as_ref()) {
        server.set_unused_gpu(gpu);
    }
    dumps.set_source(server.status_handle());
    server.watch(end_stuck).context("no thread")?;
    server
        .apply(settings.rules())
        .context("the limits of the guests")?;
    let weights = WeightStore::new(settings.share_weights, settings.weights_cache.clone())
        .context("the cache of weights")?;
    server.share_weights(weights).context("no thread")?;
    if let Some(certificates) = listeners.certificates() {
        server.use_certificates(certificates.clone());
    }
    for engine in &engines {
        let memory = engine.memory();
        info!(
            version = crate::own_program::VERSION,
            engine = engine.name(),
            device = engine.description(),
            memory = %shown(memory.total),
            free = %shown(memory.free),
            "vgpu starts"
        );
    }
    if let Some(file) = args.file() {
        info!(
            guests = settings.guests.len(),
            "configuration {}",
            file.display()
        );
    }
    let role = match args.isolated_machine {
        true => Role::Machine,
        false => Role::Server,
    };
    unused::log(args, &settings, kinds);
    let confined = sandboxing::enter(kinds, role, args.no_sandbox, dropped)?;
    watch_gpus(&server, kinds)?;
    serving.begin();
    let health = server.health();
    let _files = observers.serve(&settings, &server.status_handle(), sender, &confined)?;
    listeners.switch(&mut server, &settings, prepared, &confined)?;
    announce(&listeners.addresses());
    service::ready();
    trim_pages::trim(sandboxing::trim_scope(kinds));

    let watch = EndWatch::new(listeners.certificates().cloned());
    // Also used by a reload.
    let running = RefCell::new(settings);
    let kept = RefCell::new(kept);
    let changeable = RefCell::new(Changeable {
        server: &mut server,
        listeners: &mut listeners,
        added: AddedGuests::default(),
        confined: &confined,
        engines: kinds,
    });
    let outcome = wait_for_end(
        events,
        || {
            watch.check_if_due();
            health.check();
            health.end_drained();
            kept.borrow_mut().check(&running.borrow());
            service::alive();
            health.fatal_error()
        },
        |task| {
            let changeable = &mut changeable.borrow_mut();
            let running = &mut running.borrow_mut();
            match task {
                Task::Reload => reload(args, changeable, logging, running),
                Task::Perform(request) => perform(changeable.server, running, &request),
            }
        },
        |request| {
            let changeable = &mut changeable.borrow_mut();
            change_guests(request, changeable, &mut running.borrow_mut())
        },
    );
    service::stopping();
    if let Shutdown::Stuck(why) = server.shutdown() {
        end_with_last_log(
            1,
            Level::ERROR,
            &format!("{why}: vgpu serve ends all the same"),
        );
    }
    outcome?;
    info!("vgpu ends");
    Ok(())
}

/// Starts the engines, each of which has `limit` to answer. Dumps say which one starts.
///
/// # Errors
/// An engine does not start, or two of them have the same device.
pub(super) fn start_engines(
    kinds: &[EngineKind],
    threads: Threads,
    memory: Option<u64>,
    limit: Option<Duration>,
    dumps: &DumpThread,
) -> anyhow::Result<Vec<Arc<dyn Engine>>> {
    let mut engines: Vec<Arc<dyn Engine>> = Vec::new();
    for kind in kinds {
        dumps.begin_step(format!("the engine {kind} starts"));
        let starting = StartWatch::begin(limit).context("no thread")?;
        // The CPU engine takes no time.
        if let Some(limit) = limit.filter(|_| *kind != EngineKind::Cpu) {
            service::extend_start(limit);
        }
        let engine = engine::start(kind, threads, memory)?;
        drop(starting);
        let same = engines
            .iter()
            .position(|other| other.name() == engine.name());
        if let Some(same) = same {
            anyhow::bail!(
                "the engines {} and {kind} have the same device, {}",
                kinds[same],
                engine.name()
            );
        }
        engines.push(engine);
    }
    Ok(engines)
}

/// What tasks and requests about guests change.
struct Changeable<'a> {
    server: &'a mut Server,
    listeners: &'a mut Listeners,
    added: AddedGuests,
    confined: &'a Confined,
    engines: &'a [EngineKind],
}

/// Carries out a request of the operator. On failure nothing has changed.
fn perform(
    server: &Server,
    running: &mut Settings,
    request: &OperatorRequest,
) -> anyhow::Result<String> {
    Ok(match request {
        OperatorRequest::Set(change) => {
            let mut wanted = running.clone();
            let devices = running.devices_of(&change.guest);
            let said = change.apply(&mut wanted, Some(server.memory_total(devices)))?;
            server
                .apply(wanted.rules())
                .context("the limits of the guests")?;
            *running = wanted;
            said
        }
        OperatorRequest::Drain { deadline_ms } => {
            let deadline = deadline_ms.map(Duration::from_millis);
            server.drain(deadline);
            drain_text::drains(deadline, &[])
        }
        OperatorRequest::Undrain => drain_text::accepts(server.undrain(), &[]),
        &OperatorRequest::Kill { session } => {
            let guest = server.kill_session(session);
            let guest = guest.with_context(|| format!("there is no session {session}"))?;
            describe_kill(session, &guest)
        }
    })
}

/// Reads the figures of the GPUs of the CUDA engines, for status and metrics.
#[cfg(feature = "cuda")]
fn watch_gpus(server: &Server, kinds: &[EngineKind]) -> anyhow::Result<()> {
    for (device, kind) in kinds.iter().enumerate() {
        if let EngineKind::Cuda(ordinal) = *kind {
            let find = move || Ok(engine::gpu_address(ordinal)?);
            server.watch_gpu(device, find).context("no thread")?;
        }
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn watch_gpus(_: &Server, _: &[EngineKind]) -> anyhow::Result<()> {
    Ok(())
}

/// The settings of a configuration on the running engines, which are `engines`. Checks that the
/// numbers of devices mean these engines. Those of added guests do: these guests were added to this
/// process.
///
/// # Errors
/// A number of a device means no engine, or a guest is given engines of a class that does not run.
pub(super) fn on_running_engines(
    file: Settings,
    running: &Settings,
    engines: &[EngineKind],
) -> anyhow::Result<Settings> {
    let mut kept = file.clone();
    kept.keep_until_restart(running);
    kept.check_devices()?;
    let has_other_engines = file.engines != running.engines;
    let on_engines = file.on_engines(engines);
    Ok(match has_other_engines {
        true => {
            on_engines.context("engine.kind has changed, which takes effect after a restart")?
        }
        false => on_engines?,
    })
}

/// Limits the programs that are served at once, and divides the host memory among guests.
fn set_places(args: &Args, server: &Server, settings: &Settings) {
    server.set_max_sessions(settings.max_guests);
    if args.isolated_machine {
        // Its programs are one guest.
        server.serve_one_guest();
    }
}

/// Applies the configuration as it is now. On failure nothing has changed.
fn reload(
    args: &Args,
    changeable: &mut Changeable<'_>,
    logging: &mut Logging,
    running: &mut Settings,
) -> anyhow::Result<String> {
    let Changeable {
        server,
        listeners,
        added,
        confined,
        engines,
    } = changeable;
    let mut wanted = on_running_engines(args.settings()?, running, engines)?;
    added.add_to(&mut wanted)?;
    let late = wanted.needs_restart(running);
    ensure!(
        !wanted.renumbers_devices(running),
        "engine.kind and the devices of guests have changed: both take effect together, after a \
         restart"
    );
    wanted.keep_until_restart(running);
    let filter = logging.check(&wanted)?;
    let certificates = certificates::load(&wanted)?;
    let prepared = listeners.prepare(&wanted)?;
    server
        .apply(wanted.rules())
        .context("the limits of the guests")?;
    let refused = match (listeners.certificates(), &certificates) {
        (Some(used), Some(new)) => {
            used.replace(new);
            server.recheck_certificates()
        }
        _ => 0,
    };
    set_places(args, server, &wanted);
    logging.change(filter);
    listeners.switch(*server, &wanted, prepared, confined)?;
    unused::log(args, &wanted, engines);
    *running = wanted;
    let mut text = describe_reload(running, &late);
    if refused > 0 {
        text.push_str(&format!(
            "; {refused} sessions are ended, because their certificates are no longer accepted"
        ));
    }
    Ok(text)
}

/// Carries out a request about guests.
fn change_guests(
    request: &GuestRequest,
    changeable: &mut Changeable<'_>,
    running: &mut Settings,
) -> GuestAnswer {
    let Changeable {
        server,
        listeners,
        added,
        confined,
        ..
    } = changeable;
    let status = server.status_handle();
    let answer = guest_requests::answer(request, added, running, &status, |wanted| {
        let prepared = listeners.prepare(wanted)?;
        server
            .apply(wanted.rules())
            .context("the limits of the guests")?;
        listeners.switch(*server, wanted, prepared, confined)
    });
    if let GuestRequest::Remove { name } = request {
        guest_requests::log_ended(name, server.end_removed(name));
    }
    answer
}
