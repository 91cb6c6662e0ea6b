//! The supervisor: starts a process for each guest.

use std::cell::RefCell;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use tracing::info;
use vgpu_executor::added_guests::{AddedGuests, GuestAnswer, GuestRequest};
use vgpu_executor::config::{LogFormat, Settings, VmDevice};
use vgpu_executor::engine::{EngineKind, Selection};
use vgpu_executor::isolate::{EngineThreads, Resources, Supervisor};
use vgpu_executor::size::shown;
use vgpu_executor::vm::VmOptions;
use vgpu_executor::weights::Sharing;
use vgpu_executor::{DumpThread, Limits, OperatorRequest, sandbox, service};

use super::partition;
use crate::config_error::ConfigError;
use crate::own_program::{OWN_PROGRAM, VERSION};
use crate::runtime_dir;
use crate::serve::args::Args;
use crate::serve::certificates::{self, EndWatch};
use crate::serve::drain_text;
use crate::serve::events::{Event, Task, announce, describe_kill, describe_reload, wait_for_end};
use crate::serve::guest_requests;
use crate::serve::kept_machines::KeptMachines;
use crate::serve::listeners::Listeners;
use crate::serve::logging::Logging;
use crate::serve::observe::StartedObservers;
use crate::serve::sandboxing::{self, Confined, REMEDY};
use crate::serve::single::on_running_engines;
use crate::serve::trim_pages::{self, Scope};
use crate::serve::unused;

/// The least silence of a process after which it is killed, whatever the longest turn is: a process
/// that runs says so every 5 s, on a thread that waits for no engine.
const MIN_HANG: Duration = Duration::from_secs(60);

/// How much longer than a worker, which ends itself, a supervisor waits for its first report.
const START_MARGIN: Duration = Duration::from_secs(10);

pub(crate) fn run(
    args: &Args,
    settings: Settings,
    selection: &Selection,
    (sender, events): (Sender<Event>, &Receiver<Event>),
    (observers, dumps): (StartedObservers, &DumpThread),
    logging: &mut Logging,
) -> anyhow::Result<()> {
    partition::check(&settings).map_err(ConfigError)?;
    partition::check_engines(&selection.engines, settings.memory).map_err(ConfigError)?;
    let engines = &selection.engines;
    let memory = partition::memory(&settings, engines)?;
    let partition = partition::partition(args, &settings, memory)?;
    if !settings.overcommit {
        partition::log_shortage(engines, &partition)?;
    }
    let mut listeners = Listeners::without_machines(&settings)?;
    let prepared = listeners.prepare(&settings)?;
    // Before any process is started, which would inherit the files.
    let kept = RefCell::new(KeptMachines::take_over(&settings)?);
    // Child processes inherit this.
    rustix::thread::set_no_new_privs(true).context("giving up new privileges")?;
    if !args.no_sandbox {
        // A worker that a guest has taken over may run as the same user.
        sandbox::hide().context(REMEDY)?;
    }
    info!(
        version = VERSION,
        engine = selection.names(),
        guests = settings.guests.len(),
        others = partition.max_unnamed,
        guest_memory = args.guest_memory.map(shown),
        "vgpu starts, with a process for each guest"
    );

    unused::log(args, &settings, engines);

    let own = std::env::current_exe().context("finding this program")?;
    let limits = Limits::of_this_process().context("limits of the kernel")?;
    let common = common(args, &settings, selection);
    let host_memory = partition::host_memory_of_a_process(&settings, limits.host_memory);
    let host_memory_argument = |bytes: u64| format!("--host-memory={bytes}");
    // Of a worker that starts now. A reload changes it.
    let of_a_worker = Arc::new(AtomicU64::new(host_memory));
    let worker = {
        let (own, common) = (own.clone(), common.clone());
        let of_a_worker = Arc::clone(&of_a_worker);
        Box::new(move |memory: Option<u64>| {
            // The running program itself, even if an upgrade has replaced its file: supervisor and
            // worker exchange messages of one version.
            let mut command = Command::new(OWN_PROGRAM);
            command.arg0(&own).arg("serve-guest").args(&common);
            // A worker has nothing to say to the service manager of its supervisor.
            command.env_remove("NOTIFY_SOCKET");
            command.arg(format!("--supervisor={VERSION}"));
            command.arg(host_memory_argument(of_a_worker.load(Ordering::Relaxed)));
            command.args(memory.map(|bytes| format!("--memory={bytes}")));
            command
        })
    };
    let resources = Resources {
        engines: engines.iter().map(EngineKind::to_string).collect(),
        unused_gpu: selection.unused_gpu.clone(),
        memory,
    };
    let mut supervisor = Supervisor::new(worker, resources, partition, limits.handshakes)
        .context("the limits of the guests")?;
    // A worker that is stopped, or whose log thread hangs, does not end itself. The time is for
    // each engine.
    let start_time = Limits::start_time(settings.max_turn_time, selection.has_driver());
    if let Some(limit) = start_time {
        let engines = u32::try_from(engines.len()).unwrap_or(u32::MAX);
        supervisor.limit_starts(limit.saturating_mul(engines) + START_MARGIN);
    }
    // A process ends itself when its engine hangs. A process that is stopped, or all of whose
    // threads hang, does not.
    if let Some(limit) = Limits::start_time(settings.max_turn_time, false) {
        supervisor.limit_hangs(limit.max(MIN_HANG) + START_MARGIN);
    }
    let is_ggml = |engine: &EngineKind| matches!(engine, EngineKind::Ggml(_));
    let engine_threads = EngineThreads {
        engines: engines.len(),
        threads: settings.threads.count,
        has_driver: selection.has_driver(),
        has_ggml: engines.iter().any(is_ggml),
    };
    supervisor.limit_threads(engine_threads);
    if partition::divides_machine_memory(engines) {
        supervisor.divide_machine_memory(partition::machine_memory()?);
    }
    if let Some(certificates) = listeners.certificates() {
        let set = supervisor.set_certificates(&certificates.files());
        set.context("certificates")?;
    }
    dumps.set_source(supervisor.status_handle());
    let max_threads = engine_threads.of_machine();
    let mut machines = Vec::new();
    let mut folder = None;
    for guest in &settings.guests {
        let Some(vm) = &guest.vm else { continue };
        let folder = match &mut folder {
            Some(folder) => folder,
            none => none.insert(runtime_dir::create("vgpu-serve-")?),
        };
        // `vgpu fd-store` keeps the machine's files when its executor dies, and starts the next
        // executor. The supervisor keeps them when `vgpu fd-store` dies, and the service manager
        // when the supervisor dies.
        let control = folder.path().join(format!("{}.sock", vm.name));
        let supervised = format!("--supervised={VERSION}");
        // As for workers: the running program itself.
        let limit = format!("--max-threads={max_threads}");
        let rest = ["fd-store", &supervised, &limit, "--", OWN_PROGRAM, "serve"];
        let mut arguments: Vec<OsString> = rest.map(OsString::from).into();
        arguments.extend(common.iter().cloned());
        arguments.push(host_memory_argument(host_memory).into());
        let part = partition::part(args, guest).filter(|_| memory.is_some());
        arguments.extend(part.map(|bytes| format!("--memory={bytes}").into()));
        // No file: all settings are in the arguments.
        arguments.push("--isolated-machine".into());
        let rest = [&supervised, "--config", "/dev/null", "--device"];
        arguments.extend(rest.map(OsString::from));
        arguments.push(device(settings.device).into());
        arguments.extend(["--control".into(), control.clone().into()]);
        arguments.extend(["--vm".into(), vm.to_string().into()]);
        if engines.iter().any(EngineKind::needs_trust) {
            // The process has one guest, which can end no other.
            arguments.push("--trust-guests".into());
        }
        let devices = &guest.rule.policy.devices;
        if !devices.is_empty() {
            let devices: Vec<String> = devices.iter().map(usize::to_string).collect();
            arguments.push(format!("--machine-devices={}", devices.join(",")).into());
        }
        let command = {
            let own = own.clone();
            move || {
                let mut command = Command::new(OWN_PROGRAM);
                command.arg0(&own).args(&arguments);
                command
            }
        };
        supervisor
            .start_vm(&vm.name, Box::new(command), &vm.socket, &control)
            .map_err(|error| anyhow!("--vm {}: {error}", vm.name))?;
        machines.push(format!("vm:{}", vm.socket.display()));
    }
    let served = supervisor.wait_for_vms();
    served.map_err(|(name, error)| anyhow!("--vm {name}: {error}"))?;
    machines
        .iter()
        .for_each(|address| info!("listening on {address}"));
    // The processes of virtual machines bind sockets and start drivers before they do the same.
    let confined = sandboxing::confine_supervisor(args.no_sandbox)?;
    let health = supervisor.health();
    watch_gpus(&supervisor, engines)?;
    let _files = observers.serve(&settings, &supervisor.status_handle(), sender, &confined)?;
    listeners.switch(&mut supervisor, &settings, prepared, &confined)?;
    let mut addresses = listeners.addresses();
    addresses.extend(machines);
    announce(&addresses);
    service::ready();
    trim_pages::trim(Scope::Program);

    let watch = EndWatch::new(listeners.certificates().cloned());
    // Other virtual machines need a restart.
    let served = settings.clone();
    let running = RefCell::new(settings);
    let changeable = RefCell::new(Changeable {
        supervisor: &mut supervisor,
        listeners: &mut listeners,
        added: AddedGuests::default(),
        confined: &confined,
        engines,
        memory,
        host_memory: (limits.host_memory, &of_a_worker),
    });
    // The engines are in the workers, and each guest gets a new one.
    wait_for_end(
        events,
        || {
            watch.check_if_due();
            health.check();
            health.end_drained();
            health.tell_machines();
            health.log_left_out();
            health.grow_quotas();
            health.end_workers_of_many_threads();
            kept.borrow_mut().check(&served);
            service::alive();
            None
        },
        |task| {
            let changeable = &mut changeable.borrow_mut();
            let running = &mut running.borrow_mut();
            match task {
                Task::Reload => reload(args, changeable, logging, running),
                Task::Perform(request) => perform(args, changeable, running, &request),
            }
        },
        |request| {
            let changeable = &mut changeable.borrow_mut();
            change_guests(args, request, changeable, &mut running.borrow_mut())
        },
    )?;
    service::stopping();
    supervisor.shutdown();
    info!("vgpu ends");
    Ok(())
}

/// What tasks and requests about guests change.
struct Changeable<'a> {
    supervisor: &'a mut Supervisor,
    listeners: &'a mut Listeners,
    added: AddedGuests,
    confined: &'a Confined,
    engines: &'a [EngineKind],
    /// The memory that is divided among the workers.
    memory: Option<u64>,
    /// The host memory of all processes by default, and that of a worker that starts now.
    host_memory: (u64, &'a AtomicU64),
}

/// Carries out a request of the operator, also in running workers. On failure nothing has changed.
fn perform(
    args: &Args,
    changeable: &Changeable<'_>,
    running: &mut Settings,
    request: &OperatorRequest,
) -> anyhow::Result<String> {
    let (supervisor, memory) = (&changeable.supervisor, changeable.memory);
    Ok(match request {
        OperatorRequest::Set(change) => {
            let machine = running
                .guests
                .iter()
                .any(|guest| guest.rule.name == change.guest && guest.vm.is_some());
            ensure!(
                !machine,
                "with --isolate the virtual machine {} has a process of its own, whose memory and \
                 weight are in the configuration and change with a restart",
                change.guest
            );
            // Without a size of its own, the memory is that of the workers' device, once one runs.
            let status = || supervisor.status_handle().status();
            let devices = running.devices_of(&change.guest);
            let is_own = |device: &usize| devices.is_empty() || devices.contains(device);
            let device = || {
                let status = status();
                let engines = status.engines().enumerate();
                let own = engines.filter(|(device, _)| is_own(device));
                own.map(|(_, engine)| engine.memory_total).min()
            };
            let total = memory.or_else(|| device().filter(|&total| total > 0));
            let mut wanted = running.clone();
            let said = change.apply(&mut wanted, total)?;
            let partition = partition::partition(args, &wanted, memory)?;
            supervisor
                .apply(partition)
                .context("the limits of the guests")?;
            *running = wanted;
            said
        }
        OperatorRequest::Drain { deadline_ms } => {
            let deadline = deadline_ms.map(Duration::from_millis);
            drain_text::drains(deadline, &supervisor.drain(deadline))
        }
        OperatorRequest::Undrain => {
            let (did_drain, silent) = supervisor.undrain();
            drain_text::accepts(did_drain, &silent)
        }
        &OperatorRequest::Kill { session } => {
            describe_kill(session, &supervisor.kill_session(session)?)
        }
    })
}

/// Applies the configuration as it is now, also to running workers. On failure nothing has changed.
fn reload(
    args: &Args,
    changeable: &mut Changeable<'_>,
    logging: &mut Logging,
    running: &mut Settings,
) -> anyhow::Result<String> {
    let Changeable {
        supervisor,
        listeners,
        added,
        confined,
        engines,
        memory,
        host_memory: (all, of_a_worker),
    } = changeable;
    let mut wanted = on_running_engines(args.settings()?, running, engines)?;
    added.add_to(&mut wanted)?;
    let mut late = wanted.needs_restart(running);
    if machines(args, &wanted) != machines(args, running) {
        late.push("virtual machines");
    }
    ensure!(
        !wanted.renumbers_devices(running),
        "engine.kind and the devices of guests have changed: both take effect together, after a \
         restart"
    );
    wanted.keep_until_restart(running);
    partition::check(&wanted)?;
    let partition = partition::partition(args, &wanted, *memory)?;
    let filter = logging.check(&wanted)?;
    let certificates = certificates::load(&wanted)?;
    let prepared = listeners.prepare(&wanted)?;
    supervisor
        .apply(partition)
        .context("the limits of the guests")?;
    if let (Some(used), Some(new)) = (listeners.certificates(), &certificates) {
        supervisor
            .set_certificates(&new.files())
            .context("certificates")?;
        used.replace(new);
    }
    let part = partition::host_memory_of_a_process(&wanted, *all);
    of_a_worker.store(part, Ordering::Relaxed);
    logging.change(filter);
    listeners.switch(*supervisor, &wanted, prepared, confined)?;
    unused::log(args, &wanted, engines);
    *running = wanted;
    Ok(describe_reload(running, &late))
}

/// Carries out a request about guests.
fn change_guests(
    args: &Args,
    request: &GuestRequest,
    changeable: &mut Changeable<'_>,
    running: &mut Settings,
) -> GuestAnswer {
    let Changeable {
        supervisor,
        listeners,
        added,
        confined,
        memory,
        ..
    } = changeable;
    let status = supervisor.status_handle();
    if let GuestRequest::Add(guest) = request
        && !guest.devices.is_empty()
    {
        return GuestAnswer::Refused(format!(
            "guest {}: with --isolate an added guest has one quota on all devices",
            guest.name
        ));
    }
    let answer = guest_requests::answer(request, added, running, &status, |wanted| {
        partition::check(wanted)?;
        let partition = partition::partition(args, wanted, *memory)?;
        let prepared = listeners.prepare(wanted)?;
        supervisor
            .apply(partition)
            .context("the limits of the guests")?;
        listeners.switch(*supervisor, wanted, prepared, confined)
    });
    if let GuestRequest::Remove { name } = request {
        guest_requests::log_ended(name, supervisor.end_removed(name));
    }
    answer
}

/// Reads the figures of the GPUs of the CUDA engines, for status and metrics. What workers say of a
/// GPU may be what a guest says.
#[cfg(feature = "cuda")]
fn watch_gpus(supervisor: &Supervisor, engines: &[EngineKind]) -> anyhow::Result<()> {
    for (device, engine) in engines.iter().enumerate() {
        if matches!(engine, EngineKind::Cuda(_)) {
            let engine = engine.clone();
            let find = move || crate::engine_probe::gpu_address(&engine);
            supervisor.watch_gpu(device, find).context("no thread")?;
        }
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn watch_gpus(_: &Supervisor, _: &[EngineKind]) -> anyhow::Result<()> {
    Ok(())
}

/// A virtual machine with the memory, the weight and the devices of its process.
type Machine<'a> = (&'a VmOptions, Option<u64>, u32, &'a [usize]);

/// The virtual machines.
fn machines<'a>(args: &Args, settings: &'a Settings) -> Vec<Machine<'a>> {
    let guests = settings.guests.iter();
    guests
        .filter_map(|guest| {
            let vm = guest.vm.as_ref()?;
            let policy = &guest.rule.policy;
            let memory = partition::part(args, guest);
            Some((vm, memory, policy.weight, &policy.devices[..]))
        })
        .collect()
}

/// The arguments of workers and of the processes of virtual machines.
fn common(args: &Args, settings: &Settings, selection: &Selection) -> Vec<OsString> {
    let format = match settings.log_format {
        LogFormat::Text => "text",
        LogFormat::Json => "json",
    };
    let sharing = match settings.share_weights {
        Sharing::Off => "off",
        Sharing::Tenant | Sharing::All => "tenant",
    };
    let mut common: Vec<OsString> = { selection.engines.iter() }
        .map(|engine| format!("--engine={engine}").into())
        .collect();
    common.extend([
        OsString::from(format!("--threads={}", settings.threads.count)),
        format!("--log-format={format}").into(),
        format!("--share-weights={sharing}").into(),
    ]);
    if let Some(time) = settings.max_node_time {
        common.push(format!("--max-node-time={}", time.as_secs()).into());
    }
    if let Some(time) = settings.max_turn_time {
        common.push(format!("--max-turn-time={}", time.as_secs()).into());
    }
    if !settings.share_buffers {
        common.push("--no-shared-buffers".into());
    }
    if !settings.batch {
        common.push("--no-batch".into());
    }
    if args.no_sandbox {
        common.push("--no-sandbox".into());
    }
    let gpu = selection.unused_gpu.as_ref();
    common.extend(gpu.map(|gpu| format!("--unused-gpu={gpu}").into()));
    common.extend(
        settings
            .log
            .as_ref()
            .map(|log| format!("--log={log}").into()),
    );
    common
}

/// The value of `--device`.
fn device(device: VmDevice) -> &'static str {
    match device {
        VmDevice::Ivshmem => "ivshmem",
        VmDevice::VfioUser => "vfio-user",
    }
}
