//! `vgpu serve`.

mod args;
mod code;
mod doors;
mod isolated;
mod logging;
mod metrics_http;

use std::io::{Write, stdout};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing::{error, info, warn};
use vgpu_engine::Engine;
use vgpu_executor::config::Settings;
use vgpu_executor::control::{self, Reloaded};
use vgpu_executor::sandbox::{self, Profile};
use vgpu_executor::status::Watch;
use vgpu_executor::vm::SocketFile;
use vgpu_executor::{Limits, Server, Weights, engine, service};

pub(crate) use args::Args;
use doors::Doors;
pub(crate) use isolated::{WorkerArgs, work};
use logging::Logging;

/// Signals this close together are one: `timeout` and some service managers signal a process and its group.
const SAME_SIGNAL: Duration = Duration::from_millis(500);

/// What the main thread waits for.
enum Event {
    /// A signal of this name asks for the end.
    Stop(&'static str),
    /// The configuration is to be read again; whoever asked by other means than a signal is told what came of it.
    Reload(Option<Sender<Reloaded>>),
}

pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let settings = args.settings()?;
    let mut logging = Logging::start(&settings)?;
    // Before anything is there to be cleaned up, so that no signal finds us unprepared.
    let (sender, events) = mpsc::channel();
    catch_signals(sender.clone())?;
    if args.isolate {
        return isolated::run(&args, settings, sender, &events, &mut logging);
    }

    let engine = engine::start(settings.engine, settings.threads, settings.memory)?;
    let memory = engine.memory();
    let limits = Limits {
        share: settings.share_buffers,
        ..Limits::default()
    };
    let mut server = Server::new(Arc::clone(&engine), limits, settings.max_guests);
    server
        .apply(settings.rules())
        .context("memory of the guests")?;
    let weights = Weights::new(settings.share_weights, settings.weights_cache.clone())
        .context("the cache of weights")?;
    server.share_weights(weights);
    let mut doors = Doors::new(&settings)?;
    let mut kept = service::kept_files();
    let prepared = doors.prepare(&settings, &mut kept)?;
    // Files of virtual machines that are served no more.
    for (name, _file) in kept {
        service::forget(&name);
    }

    info!(
        version = env!("CARGO_PKG_VERSION"),
        engine = engine.name(),
        device = engine.description(),
        memory = memory.total,
        free = memory.free,
        "vgpu starts"
    );
    if let Some(file) = args.file() {
        info!(
            guests = settings.guests.len(),
            "configuration {}",
            file.display()
        );
    }
    let _files = observe(&settings, &server.watch(), sender)?;
    doors.switch(&mut server, &settings, prepared)?;
    enter_sandbox(engine.as_ref(), args.no_sandbox)?;
    announce(&doors.addresses());
    service::ready();
    code::let_go(whose(engine.as_ref()));

    let mut running = settings;
    let outcome = serve(
        &events,
        || engine.fatal_error(),
        || reload(&args, &mut server, &mut doors, &mut logging, &mut running),
    );
    service::stopping();
    server.shutdown();
    outcome?;
    info!("vgpu ends");
    Ok(())
}

/// What an executor with this engine goes on to do.
fn profile(engine: &dyn Engine) -> Profile {
    // What is not ours (drivers) makes calls that nobody has written down.
    match engine.name() {
        "cpu" => Profile::Cpu,
        _ => Profile::Driver,
    }
}

/// Whose code it can let go of.
fn whose(engine: &dyn Engine) -> code::Whose {
    match profile(engine) {
        Profile::Cpu => code::Whose::Everybody,
        Profile::Driver => code::Whose::Program,
    }
}

/// Gives up what an executor with this engine does not need.
fn enter_sandbox(engine: &dyn Engine, is_off: bool) -> anyhow::Result<()> {
    if is_off {
        warn!("no sandbox: --no-sandbox");
        return Ok(());
    }
    let sandbox =
        sandbox::enter(profile(engine)).context("no sandbox; --no-sandbox starts without one")?;
    info!("sandboxed: {sandbox}");
    Ok(())
}

/// Lets those look who may. Returns the files of the sockets for it.
fn observe(
    settings: &Settings,
    watch: &Watch,
    events: Sender<Event>,
) -> anyhow::Result<Vec<SocketFile>> {
    let mut files = Vec::new();
    if let Some(address) = &settings.metrics {
        let file = metrics_http::serve(address, watch.clone());
        files.extend(file.with_context(|| format!("metrics at {address}"))?);
        info!("metrics at {address}");
    }
    if let Some(path) = &settings.control {
        let reload = move || {
            let (asker, answer) = mpsc::channel();
            let asked = events.send(Event::Reload(Some(asker)));
            let answer = asked.ok().and_then(|()| answer.recv().ok());
            answer.unwrap_or_else(|| Reloaded {
                ok: false,
                message: "the executor is ending".into(),
            })
        };
        let file = control::serve(path, watch.clone(), Box::new(reload));
        files.push(file.with_context(|| format!("the control socket {}", path.display()))?);
    }
    Ok(files)
}

/// How often to look whether the engine still works.
const LOOK: Duration = Duration::from_secs(1);

/// Waits for the end; reads the configuration again as often as somebody asks. An engine that is beyond repair is an end, too:
/// whatever guests had is lost with it, and a new process may get the device to work.
fn serve(
    events: &Receiver<Event>,
    fatal_error: impl Fn() -> Option<String>,
    mut reload: impl FnMut() -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    loop {
        let event = match events.recv_timeout(LOOK) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => match fatal_error() {
                None => continue,
                Some(reason) => anyhow::bail!(
                    "{reason}; nothing that guests had there is left, so vgpu serve ends, for whoever supervises it to start it again"
                ),
            },
            Err(RecvTimeoutError::Disconnected) => {
                anyhow::bail!("the thread for signals has ended")
            }
        };
        match event {
            Event::Stop(signal) => {
                info!(
                    "{signal} received: ending the sessions; a second signal ends the process at once"
                );
                return Ok(());
            }
            Event::Reload(asker) => {
                let said = match reload() {
                    Ok(message) => {
                        info!("{message}");
                        Reloaded { ok: true, message }
                    }
                    Err(error) => {
                        let message = format!("the configuration stays as it was: {error:#}");
                        error!("{message}");
                        Reloaded { ok: false, message }
                    }
                };
                if let Some(asker) = asker {
                    // Whoever asked may not have waited.
                    let _ = asker.send(said);
                }
            }
        }
    }
}

/// Has the configuration take effect as it is now. On failure nothing has changed.
fn reload(
    args: &Args,
    server: &mut Server,
    doors: &mut Doors,
    logging: &mut Logging,
    running: &mut Settings,
) -> anyhow::Result<String> {
    let mut wanted = args.settings()?;
    let late = wanted.needs_restart(running);
    let filter = logging.check(&wanted)?;
    let prepared = doors.prepare(&wanted, &mut Default::default())?;
    server
        .apply(wanted.rules())
        .context("memory of the guests")?;
    server.set_max_sessions(wanted.max_guests);
    logging.change(filter);
    doors.switch(server, &wanted, prepared)?;
    wanted.keep_until_restart(running);
    *running = wanted;
    Ok(reread(running, &late))
}

/// What a reload has done, in words.
fn reread(settings: &Settings, late: &[&str]) -> String {
    let guests = settings.guests.len();
    match late {
        [] => format!("the configuration was read again: {guests} guests with names"),
        late => format!(
            "the configuration was read again: {guests} guests with names; {} will change with the next start",
            late.join(", ")
        ),
    }
}

/// Sends the first SIGTERM or SIGINT, and each SIGHUP; a second of the former ends the process there and then.
fn catch_signals(events: Sender<Event>) -> anyhow::Result<()> {
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).context("signals cannot be caught")?;
    std::thread::Builder::new()
        .name("vgpu-signals".into())
        .spawn(move || {
            let mut first: Option<Instant> = None;
            for signal in signals.forever() {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                match first {
                    // Nobody receives it when the start has failed already.
                    _ if signal == SIGHUP => drop(events.send(Event::Reload(None))),
                    None => {
                        first = Some(Instant::now());
                        let _ = events.send(Event::Stop(name));
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
    Ok(())
}

/// Tells whoever started us that guests can come.
fn announce(places: &[String]) {
    let mut out = stdout().lock();
    // Nobody has to listen.
    let _ = writeln!(out, "ready {}", places.join(" ")).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_beyond_repair_ends_the_executor() {
        let (sender, events) = mpsc::channel();
        let no_reload = || anyhow::bail!("nobody asks");
        let outcome = serve(&events, || Some("it is lost".into()), no_reload);
        let error = outcome.unwrap_err().to_string();
        assert!(error.starts_with("it is lost; "), "{error}");
        // One that works does not.
        sender.send(Event::Stop("SIGTERM")).unwrap();
        serve(&events, || None, no_reload).unwrap();
    }
}
