//! The process of one guest.

use std::num::NonZeroU32;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::Parser;
use tracing::warn;
use vgpu_executor::config::{LogFormat, Settings};
use vgpu_executor::engine::EngineKind;
use vgpu_executor::sandbox::{self, Role};
use vgpu_executor::{DumpThread, Limits, Server, StopFlag, WeightStore, isolate, size};

use crate::own_program::check_supervisor;
use crate::serve::args::ShareWeights;
use crate::serve::events::{Event, Serving, catch_signals, end_stuck};
use crate::serve::logging::{Logging, start_writer};
use crate::serve::sandboxing::{self, REMEDY};
use crate::serve::single;
use crate::serve::trim_pages;

/// Serves one guest for the supervisor at the other end of standard input. Only `vgpu serve
/// --isolate` starts this.
#[derive(Parser)]
pub(crate) struct WorkerArgs {
    /// The number of the worker, for people who look at processes
    #[arg(long)]
    worker: u64,
    /// The version of the supervisor
    #[arg(long)]
    supervisor: Option<String>,
    /// An engine, once for each device
    #[arg(long, required = true)]
    engine: Vec<EngineKind>,
    #[arg(long)]
    threads: usize,
    #[arg(long, value_parser = size::parse)]
    memory: Option<u64>,
    /// A supervisor of an earlier version, which is refused by its version, does not say it
    #[arg(long)]
    host_memory: Option<u64>,
    #[arg(long)]
    max_node_time: Option<NonZeroU32>,
    #[arg(long)]
    max_turn_time: Option<u32>,
    #[arg(long, value_enum)]
    share_weights: ShareWeights,
    #[arg(long)]
    no_shared_buffers: bool,
    #[arg(long)]
    no_batch: bool,
    #[arg(long)]
    no_sandbox: bool,
    #[arg(long)]
    log: Option<String>,
    #[arg(long)]
    log_format: String,
    /// The GPU of the machine that no engine uses, and the reason
    #[arg(long)]
    unused_gpu: Option<String>,
}

pub(crate) fn run_worker(args: WorkerArgs) -> anyhow::Result<()> {
    vgpu_executor::limit_kept_memory();
    check_supervisor("worker", args.supervisor.as_deref())?;
    let log_format: LogFormat = args.log_format.parse()?;
    let _logging = Logging::start(&Settings {
        log: args.log,
        log_format,
        ..Settings::default()
    })?;
    // Before the process is hidden, since its files then belong to root.
    end_before_supervisor();
    if !args.no_sandbox {
        // Before the process has anything of its guest.
        sandbox::hide().context(REMEDY)?;
        sandboxing::isolate(&args.engine)?;
    }
    start_writer()?;
    let (sender, events) = mpsc::channel();
    let dumps = DumpThread::start().context("no thread for dumps")?;
    let serving = Serving::default();
    catch_signals(sender, dumps.clone(), serving.clone())?;
    let socket = isolate::take_socket().context("standard input is not a socket")?;
    let seconds = |n: u32| Duration::from_secs(n.into());
    let turn_time = args.max_turn_time.map(seconds);
    let has_driver = args.engine.iter().any(|kind| *kind != EngineKind::Cpu);
    let start_time = Limits::start_time(turn_time, has_driver);
    let threads = args.threads.into();
    let (kinds, memory) = (&args.engine, args.memory);
    let engines = single::start_engines(kinds, threads, memory, start_time, &dumps)?;
    let usual = Limits::of_this_process().context("limits of the kernel")?;
    let limits = Limits {
        map_buffers: !args.no_shared_buffers,
        batch: !args.no_batch,
        host_memory: args.host_memory.unwrap_or(usual.host_memory),
        ..usual
    };
    let node_time = args.max_node_time.map(|n| seconds(n.get()));
    let devices = engines.into_iter().map(|engine| {
        let limits = limits.with_times(engine.as_ref(), node_time, turn_time);
        (engine, limits)
    });
    // The supervisor limits the number of sessions.
    let server = Server::with_devices(devices.collect(), usize::MAX).context("no thread")?;
    if let Some(gpu) = &args.unused_gpu {
        server.set_unused_gpu(gpu);
    }
    let weights = WeightStore::new(args.share_weights.into(), None).context("weights")?;
    server.share_weights(weights).context("no thread")?;
    sandboxing::enter(&args.engine, Role::Worker, args.no_sandbox, 0)?;
    dumps.set_source(server.status_handle());
    server.watch(end_stuck).context("no thread")?;
    trim_pages::trim(sandboxing::trim_scope(&args.engine));
    let stop = StopFlag::new();
    let flag = stop.clone();
    std::thread::Builder::new()
        .name("vgpu-stop".into())
        .spawn(move || {
            while let Ok(event) = events.recv() {
                if matches!(event, Event::Stop(_)) {
                    flag.set();
                }
            }
        })
        .context("no thread for signals")?;
    serving.begin();
    tracing::debug!(worker = args.worker, "the worker starts");
    match isolate::serve(socket, server, &stop) {
        None => Ok(()),
        // As `vgpu serve` without --isolate: the next process may find the device again.
        Some(why) => Err(anyhow!(
            "the engine cannot work again in this process: {why}"
        )),
    }
}

/// How much sooner the kernel ends a worker than the supervisor when memory runs out: as if the
/// worker used half of the memory more. Any process may raise its own value.
const OOM_SCORE: &str = "500";

/// Makes the kernel end this process before the supervisor if memory runs out.
pub(in crate::serve) fn end_before_supervisor() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        warn!("without memory the kernel may end the supervisor before a worker: {error}");
    }
}
