//! `vgpu serve`.

mod args;
mod doors;
mod isolated;
mod logging;

use std::io::{ErrorKind, Write, stdout};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing::{error, info, warn};
use vgpu_executor::config::{EngineKind, Settings};
use vgpu_executor::control::{self, Reloaded};
use vgpu_executor::sandbox::{self, Profile};
use vgpu_executor::status::Watch;
use vgpu_executor::vm::SocketFile;
use vgpu_executor::{Limits, Server, Weights, metrics, service};
use vgpu_kernels::cpu::{CpuEngine, Threads};
use vgpu_kernels::cuda::choices::{self, Choices, Way};
use vgpu_kernels::cuda::device::{Gpu, GpuError};
use vgpu_kernels::cuda::{CudaEngine, Pace};
use vgpu_kernels::{Engine, EngineError};

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

    let engine = engine(settings.engine, settings.threads, settings.memory)?;
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

    let mut running = settings;
    let outcome = serve(
        &events,
        || engine.beyond_repair(),
        || reload(&args, &mut server, &mut doors, &mut logging, &mut running),
    );
    service::stopping();
    server.shutdown();
    outcome?;
    info!("vgpu ends");
    Ok(())
}

/// Gives up what an executor with this engine does not need.
fn enter_sandbox(engine: &dyn Engine, is_off: bool) -> anyhow::Result<()> {
    if is_off {
        warn!("no sandbox: --no-sandbox");
        return Ok(());
    }
    // What is not ours (drivers) makes calls that nobody has written down.
    let profile = match engine.name() {
        "cpu" => Profile::Cpu,
        _ => Profile::Driver,
    };
    let sandbox = sandbox::enter(profile).context("no sandbox; --no-sandbox starts without one")?;
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
        let file = metrics::serve(address, watch.clone());
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
    beyond_repair: impl Fn() -> Option<String>,
    mut reload: impl FnMut() -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    loop {
        let event = match events.recv_timeout(LOOK) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => match beyond_repair() {
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

/// Starts an engine.
pub(crate) fn engine(
    kind: EngineKind,
    threads: Threads,
    memory: Option<u64>,
) -> anyhow::Result<Arc<dyn Engine>> {
    match kind {
        EngineKind::Cpu => {
            let engine = CpuEngine::with(threads, memory).with_context(|| {
                let count = threads.count;
                format!("the cpu engine does not start with {count} threads")
            })?;
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
    let pace = Pace {
        steps: std::env::var_os("VGPU_STEPS").is_some_and(|steps| steps == "on"),
        ..Pace::default()
    };
    let engine = CudaEngine::at_pace(Arc::new(gpu(ordinal)?), pace)?;
    let choices = kernel_cache().map(|cache| known_choices(&cache, engine.description()));
    let engine = engine
        .choosing(choices.unwrap_or_default())
        .reopened_by(move || {
            let failed = |error: GpuError| EngineError::Device {
                message: error.to_string(),
            };
            Ok(Arc::new(gpu(ordinal).map_err(failed)?))
        });
    Ok(Arc::new(engine))
}

/// An engine on a GPU that does products in this way wherever it can.
pub(crate) fn cuda_always(ordinal: u32, way: Way) -> anyhow::Result<CudaEngine> {
    let engine = CudaEngine::new(Arc::new(gpu(ordinal)?))?;
    Ok(engine.choosing(Choices::always(way)))
}

/// Where the choices for a device are kept.
fn choices_file(cache: &Path, device: &str) -> PathBuf {
    cache.join(format!("choices-{}.txt", choices::stamp(device)))
}

/// What `vgpu gpu-check tune` has found out about a device, if it has.
fn known_choices(cache: &Path, device: &str) -> Choices {
    let path = choices_file(cache, device);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Choices::default(),
        Err(error) => {
            warn!("{} is not used: {error}", path.display());
            return Choices::default();
        }
    };
    match Choices::read(&text, &choices::stamp(device)) {
        Ok(choices) => {
            let count = choices.len();
            info!("{count} choices of kernels from {}", path.display());
            choices
        }
        Err(reason) => {
            warn!("{} is not used: {reason}", path.display());
            Choices::default()
        }
    }
}

/// Keeps choices for a device; returns where.
pub(crate) fn keep_choices(device: &str, choices: &Choices) -> anyhow::Result<PathBuf> {
    let cache = kernel_cache()
        .context("none of VGPU_CACHE, XDG_CACHE_HOME and HOME says where to keep files")?;
    let path = choices_file(&cache, device);
    let part = path.with_extension(format!("{}.part", std::process::id()));
    // Whole or not at all: others may read it at any time.
    std::fs::create_dir_all(&cache)
        .and_then(|()| std::fs::write(&part, choices.text(&choices::stamp(device))))
        .and_then(|()| std::fs::rename(&part, &path))
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

/// A GPU, with `VGPU_KERNELS=general` without the kernels for its own architecture.
fn gpu(ordinal: u32) -> Result<Gpu, GpuError> {
    let gpu = Gpu::new(ordinal, kernel_cache())?;
    Ok(match std::env::var_os("VGPU_KERNELS") {
        Some(which) if which == "general" => {
            info!("VGPU_KERNELS=general: no kernels for this GPU's architecture alone");
            gpu.with_general_kernels()
        }
        _ => gpu,
    })
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

/// Tells whoever started us that guests can come.
fn announce(places: &[String]) {
    let mut out = stdout().lock();
    // Nobody has to listen.
    let _ = writeln!(out, "ready {}", places.join(" ")).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::ir::Type;

    #[test]
    fn choices_are_taken_for_the_device_they_were_measured_on() {
        let name = format!("vgpu-choices-{}", std::process::id());
        let cache = std::env::temp_dir().join(name);
        std::fs::create_dir(&cache).expect("a new folder");
        assert!(known_choices(&cache, "a GPU").is_empty());
        let mut choices = Choices::default();
        choices.note(Type::Q4K, 4096, 512, Way::Wide);
        let text = choices.text(&choices::stamp("a GPU"));
        std::fs::write(choices_file(&cache, "a GPU"), &text).expect("a file");
        assert_eq!(known_choices(&cache, "a GPU"), choices);
        assert!(known_choices(&cache, "another").is_empty());
        std::fs::write(choices_file(&cache, "another"), text).expect("a file");
        assert!(known_choices(&cache, "another").is_empty());
        std::fs::remove_dir_all(&cache).expect("it is ours");
    }

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
