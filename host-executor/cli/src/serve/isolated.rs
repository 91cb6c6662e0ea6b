//! `vgpu serve --isolate`: a process for each guest.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use anyhow::{Context as _, anyhow, bail, ensure};
use clap::Parser;
use tracing::info;
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine as _;
use vgpu_executor::config::{GuestSettings, LogFormat, Settings, VmDevice};
use vgpu_executor::engine::EngineKind;
use vgpu_executor::isolate::{self, Means, Shares, Supervisor};
use vgpu_executor::vm::VmOptions;
use vgpu_executor::weights::Sharing;
use vgpu_executor::{Limits, Server, Stop, Weights, engine, service, size};
use vgpu_transport::link::stream::tls::Certificates;

use super::doors::Doors;
use super::logging::Logging;
use super::{
    Args, Event, announce, catch_signals, code, enter_sandbox, observe, reread, serve, whose,
};

/// Serves one guest, whose supervisor is at the other end of standard input. Started by `vgpu serve --isolate` alone.
#[derive(Parser)]
pub(crate) struct WorkerArgs {
    /// Its number, for people who look at processes.
    #[arg(long)]
    worker: u64,
    #[arg(long)]
    certs: Option<PathBuf>,
    #[arg(long)]
    engine: EngineKind,
    #[arg(long)]
    threads: usize,
    #[arg(long, value_parser = size::parse)]
    memory: Option<u64>,
    #[arg(long, value_enum)]
    share_weights: super::args::ShareWeights,
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
    settings: Settings,
    events: Sender<Event>,
    happens: &Receiver<Event>,
    logging: &mut Logging,
) -> anyhow::Result<()> {
    refuse_what_takes_one_process(&settings)?;
    let memory = memory(&settings)?;
    let shares = shares(args, &settings, memory)?;
    let mut doors = Doors::without_machines(&settings)?;
    let prepared = doors.prepare(&settings, &mut Default::default())?;
    // Every worker is started by this process: what it gives up, they do not have.
    rustix::thread::set_no_new_privs(true).context("giving up new privileges")?;
    info!(
        version = env!("CARGO_PKG_VERSION"),
        engine = %settings.engine,
        guests = settings.guests.len(),
        others = shares.places,
        guest_memory = args.guest_memory,
        "vgpu starts, with a process for each guest"
    );

    let own = std::env::current_exe().context("finding this program")?;
    let common = common(args, &settings);
    let worker = {
        let (own, common, certs) = (own.clone(), common.clone(), settings.certs.clone());
        Box::new(move |memory: Option<u64>| {
            let mut command = Command::new(&own);
            command.arg("serve-guest").args(&common);
            command.args(memory.map(|bytes| format!("--memory={bytes}")));
            if let Some(certs) = &certs {
                command.arg("--certs").arg(certs);
            }
            command
        })
    };
    let means = Means {
        engine: settings.engine.to_string(),
        memory,
    };
    let mut supervisor = Supervisor::new(worker, means, shares).context("memory of the guests")?;
    let _files = observe(&settings, &supervisor.watch(), events)?;
    doors.switch(&mut supervisor, &settings, prepared)?;
    let mut said = doors.addresses();
    let mut folder = None;
    for guest in &settings.guests {
        let Some(vm) = &guest.vm else { continue };
        let folder = match &mut folder {
            Some(folder) => folder,
            none => none.insert(Folder::new()?),
        };
        // `vgpu hold` keeps the machine's files when its worker dies, and starts the next one.
        let mut command = Command::new(&own);
        command
            .args(["hold", "--"])
            .arg(&own)
            .arg("serve")
            .args(&common);
        let part = part(args, guest).filter(|_| memory.is_some());
        command.args(part.map(|bytes| format!("--memory={bytes}")));
        let control = folder.0.join(format!("{}.sock", vm.name));
        // The settings are those given here, and no file's.
        command
            .args(["--config", "/dev/null", "--device"])
            .arg(device(settings.device))
            .arg("--control")
            .arg(&control)
            .arg("--vm")
            .arg(argument(vm));
        supervisor
            .keep(&vm.name, command, &vm.socket, &control)
            .map_err(|error| anyhow!("--vm {}: {error}", vm.name))?;
        let place = format!("vm:{}", vm.socket.display());
        info!("listening on {place}");
        said.push(place);
    }
    announce(&said);
    service::ready();
    code::let_go(code::Whose::Program);

    let mut running = settings;
    // Engines are the workers', and each guest gets a new one.
    serve(
        happens,
        || None,
        || {
            reload(
                args,
                memory,
                &mut supervisor,
                &mut doors,
                logging,
                &mut running,
            )
        },
    )?;
    service::stopping();
    supervisor.shutdown();
    info!("vgpu ends");
    Ok(())
}

/// Has the configuration take effect as it is now, in the workers that run, too. On failure nothing has changed.
fn reload(
    args: &Args,
    memory: Option<u64>,
    supervisor: &mut Supervisor,
    doors: &mut Doors,
    logging: &mut Logging,
    running: &mut Settings,
) -> anyhow::Result<String> {
    let mut wanted = args.settings()?;
    let mut late = wanted.needs_restart(running);
    if machines(args, &wanted) != machines(args, running) {
        late.push("virtual machines");
    }
    wanted.keep_until_restart(running);
    refuse_what_takes_one_process(&wanted)?;
    let shares = shares(args, &wanted, memory)?;
    let filter = logging.check(&wanted)?;
    let prepared = doors.prepare(&wanted, &mut Default::default())?;
    supervisor.apply(shares).context("memory of the guests")?;
    logging.change(filter);
    doors.switch(supervisor, &wanted, prepared)?;
    *running = wanted;
    Ok(reread(running, &late))
}

/// The virtual machines, each with the part of the memory that its process was started with.
fn machines<'a>(args: &Args, settings: &'a Settings) -> Vec<(&'a VmOptions, Option<u64>, u32)> {
    let guests = settings.guests.iter();
    guests
        .filter_map(|guest| {
            let vm = guest.vm.as_ref()?;
            Some((vm, part(args, guest), guest.rule.policy.weight))
        })
        .collect()
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
    let engine = engine::start(args.engine, args.threads.into(), args.memory)?;
    let limits = Limits {
        share: !args.no_shared_buffers,
        ..Limits::default()
    };
    // How many come is for the supervisor to say.
    let server = Server::new(Arc::clone(&engine), limits, usize::MAX);
    let weights = Weights::new(args.share_weights.into(), None).context("weights")?;
    server.share_weights(weights);
    enter_sandbox(engine.as_ref(), args.no_sandbox)?;
    code::let_go(whose(engine.as_ref()));
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
    tracing::debug!(worker = args.worker, "a worker starts");
    isolate::serve(socket, server, certificates.as_ref(), &stop);
    Ok(())
}

fn certificates(folder: Option<&PathBuf>) -> anyhow::Result<Option<Certificates>> {
    folder
        .map(|folder| Certificates::load(folder).context("certificates"))
        .transpose()
}

/// What can only be done where all guests are.
fn refuse_what_takes_one_process(settings: &Settings) -> anyhow::Result<()> {
    ensure!(
        !settings.threads.pin,
        "--isolate and --pin do not go together: the processes of all guests would have the same cores"
    );
    ensure!(
        settings.weights_cache.is_none(),
        "--isolate and the cache of weights do not go together: several processes would write to one folder, each with \
         its own idea of what is in it"
    );
    ensure!(
        settings.share_weights != Sharing::All,
        "--isolate and --share-weights all do not go together: each guest's weights are in its own process. The programs of \
         one guest share theirs with --share-weights tenant"
    );
    let known = |guest: &&GuestSettings| !guest.rule.certificates.is_empty();
    if let Some(guest) = settings.guests.iter().find(known) {
        bail!(
            "--isolate and guests by certificate do not go together: the certificate of guest {:?} is seen only in the process \
             that it would decide about; give it a listen of its own, at an address that is only for it",
            guest.rule.name
        );
    }
    let both = |guest: &&GuestSettings| guest.vm.is_some() && !guest.listen.is_empty();
    if let Some(guest) = settings.guests.iter().find(both) {
        bail!(
            "guest {:?} has a vm and a listen: with --isolate the virtual machine's process serves nobody else; make two \
             guests of it",
            guest.rule.name
        );
    }
    Ok(())
}

/// What there is to share out; nothing of an engine whose driver does that.
fn memory(settings: &Settings) -> anyhow::Result<Option<u64>> {
    Ok(match (settings.engine, settings.memory) {
        (EngineKind::Cpu, Some(all)) => Some(all),
        // What the machine or its control group has.
        (EngineKind::Cpu, None) => {
            let engine = CpuEngine::new(1, None).context("looking at the memory")?;
            Some(engine.memory().total)
        }
        _ => None,
    })
}

/// A guest's part of the memory.
fn part(args: &Args, guest: &GuestSettings) -> Option<u64> {
    guest.rule.policy.memory.or(args.guest_memory)
}

/// Who gets what, of so much memory.
fn shares(args: &Args, settings: &Settings, memory: Option<u64>) -> anyhow::Result<Shares> {
    let mut rules = settings.rules();
    let Some(all) = memory else {
        ensure!(
            args.guest_memory.is_none(),
            "--guest-memory is for the cpu engine; what a GPU has is given out by its driver"
        );
        return Ok(Shares {
            rules,
            places: settings.max_guests,
            sessions: settings.max_guests,
        });
    };
    const NEEDED: &str = "--isolate needs --guest-memory, such as --guest-memory 4G: processes do not share what they have";
    ensure!(args.guest_memory != Some(0), NEEDED);
    let mut promised = 0u64;
    for (rule, guest) in rules.guests.iter_mut().zip(&settings.guests) {
        let part = part(args, guest)
            .with_context(|| format!("{NEEDED}. Guest {:?} has no memory of its own", rule.name))?;
        rule.policy.memory = Some(part);
        promised = promised.saturating_add(part);
    }
    ensure!(
        settings.overcommit || promised <= all,
        "the guests with names have {promised} bytes of memory in all, and there are {all}: make their parts smaller, or \
         allow it with overcommit = true"
    );
    let mut places = 0;
    if let Some(unnamed) = &mut rules.unnamed {
        let each = unnamed.memory.or(args.guest_memory).context(NEEDED)?;
        unnamed.memory = Some(each);
        let left = all.saturating_sub(if settings.overcommit { 0 } else { promised });
        places = usize::try_from(left / each.max(1)).unwrap_or(usize::MAX);
        places = places.min(settings.max_guests);
        ensure!(
            places > 0 || !rules.guests.is_empty(),
            "{all} bytes of memory in parts of {each} (--guest-memory) are for 0 guests; make the parts smaller"
        );
    }
    Ok(Shares {
        rules,
        places,
        sessions: settings.max_guests,
    })
}

/// What workers of both kinds are told.
fn common(args: &Args, settings: &Settings) -> Vec<OsString> {
    let format = match settings.log_format {
        LogFormat::Text => "text",
        LogFormat::Json => "json",
    };
    let sharing = match settings.share_weights {
        Sharing::Off => "off",
        Sharing::Tenant | Sharing::All => "tenant",
    };
    let mut common: Vec<OsString> = vec![
        format!("--engine={}", settings.engine).into(),
        format!("--threads={}", settings.threads.count).into(),
        format!("--log-format={format}").into(),
        format!("--share-weights={sharing}").into(),
    ];
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

/// A folder for the sockets at which the processes of virtual machines say what they do. Ours alone.
struct Folder(PathBuf);

impl Folder {
    fn new() -> anyhow::Result<Folder> {
        let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let base = base.filter(|folder| folder.is_dir());
        let base = base.unwrap_or_else(std::env::temp_dir);
        let folder = base.join(format!("vgpu-serve-{}", std::process::id()));
        // One that is already there was left behind by one of our number that was killed.
        if std::fs::symlink_metadata(&folder).is_ok_and(|m| m.is_dir()) {
            let _ = std::fs::remove_dir_all(&folder);
        }
        DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .with_context(|| format!("creating {}", folder.display()))?;
        Ok(Folder(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(Path::new(&self.0));
    }
}
