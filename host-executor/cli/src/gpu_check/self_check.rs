//! `vgpu gpu-check self-check`, which `vgpu serve` runs at its first start on a GPU with a driver.

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use rustix::process::Signal;
use tracing::{info, warn};
use vgpu_check::child_process::Silence;
use vgpu_check::self_check::{self, Message, Request, Supervised};
use vgpu_cuda::device::Device;
use vgpu_cuda::kernel_set::parse_names;
use vgpu_executor::engine::{self, EngineKind};

use super::child::START_LIMIT;
use crate::own_program::OWN_PROGRAM;

/// How long the check of a kernel may take at a start of `vgpu serve`.
const SILENCE: Duration = Duration::from_secs(10);

/// How long the check may take at a start of `vgpu serve`. Kernels that are left are checked at the
/// next start.
const BUDGET: Duration = Duration::from_secs(50);

/// The arguments of the command.
#[derive(Parser)]
pub(super) struct Args {
    /// The GPU, as for `vgpu serve`
    #[arg(long, value_name = "ENGINE", default_value = "cuda")]
    engine: EngineKind,
    /// Seconds after which the check of a kernel is ended and noted
    #[arg(long, value_name = "S", default_value_t = SILENCE.as_secs())]
    silence: u64,
    /// Check all kernels, also those that have a finding
    #[arg(long)]
    again: bool,
}

/// The arguments of a child.
#[derive(Parser)]
pub(super) struct ChildArgs {
    #[arg(long)]
    engine: EngineKind,
    /// The kernels to check. None: say which there are
    #[arg(long)]
    kernels: Option<String>,
    /// The kernels that must not run
    #[arg(long, default_value = "")]
    faulty: String,
}

fn ordinal_of(engine: &EngineKind) -> anyhow::Result<u32> {
    match engine {
        EngineKind::Cuda(ordinal) => Ok(*ordinal),
        _ => anyhow::bail!("only GPUs have kernels to check: --engine cuda[:N]"),
    }
}

/// Runs the command. The exit status is 0 if no kernel is faulty.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    ordinal_of(&args.engine)?;
    let silence = Duration::from_secs(args.silence);
    let found = supervise(&args.engine, silence, Duration::MAX, args.again)?;
    let Supervised {
        verdict, checked, ..
    } = &found;
    for (kernel, reason) in verdict.faulty() {
        println!("FAULTY  {kernel}: {reason}");
    }
    println!(
        "{checked} kernels were checked now, {} of {} are faulty",
        verdict.faulty().count(),
        verdict.len()
    );
    Ok(match verdict.faulty().next() {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
    })
}

/// Checks the kernels of a GPU that have no finding yet. Says nothing if all have one.
pub(crate) fn before_serving(engine: &EngineKind) {
    if !matches!(engine, EngineKind::Cuda(_)) {
        return;
    }
    if let Err(error) = engine::check_cache() {
        info!("the kernels are not checked, since no verdict can be kept: {error}");
        return;
    }
    match supervise(engine, SILENCE, BUDGET, false) {
        Ok(Supervised { checked: 0, .. }) => {}
        Ok(found) => info!(
            checked = found.checked,
            left = found.left,
            faulty = found.verdict.faulty().count(),
            "the kernels were checked on this GPU"
        ),
        Err(error) => warn!("the kernels are not checked: {error:#}"),
    }
}

fn supervise(
    engine: &EngineKind,
    silence: Duration,
    budget: Duration,
    again: bool,
) -> anyhow::Result<Supervised> {
    let command = |request: Request<'_>| {
        let mut command = Command::new(OWN_PROGRAM);
        command
            .args(["gpu-check", "self-check-child"])
            .arg(format!("--engine={engine}"));
        if let Request::Check { kernels, faulty } = request {
            command
                .arg(format!("--kernels={}", kernels.join(",")))
                .arg(format!("--faulty={}", faulty.join(",")));
        }
        command
    };
    let silence = Silence {
        at_start: START_LIMIT,
        between: silence,
    };
    let before = |fingerprint: &str| match again {
        true => Default::default(),
        false => engine::load_verdict(fingerprint),
    };
    let mut is_kept = true;
    let found = self_check::supervise(command, silence, budget, before, |fingerprint, verdict| {
        if let Err(error) = engine::save_verdict(fingerprint, verdict)
            && std::mem::take(&mut is_kept)
        {
            eprintln!("vgpu: the verdict is not kept: {error}");
        }
    })?;
    Ok(found)
}

/// Checks kernels in this process, which may not survive it.
pub(super) fn run_child(args: &ChildArgs) -> anyhow::Result<ExitCode> {
    // A kernel may never end, and then nobody else ends this process.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .context("the signal of the parent's end")?;
    let ordinal = ordinal_of(&args.engine)?;
    let gpu = engine::open_gpu(ordinal)?;
    let policy = engine::launch_policy();
    let fingerprint = gpu.fingerprint();
    let device: Arc<dyn Device> = gpu;
    let Some(kernels) = &args.kernels else {
        println!("{}", Message::Device(fingerprint));
        let disabled = engine::disabled_kernels()?;
        let is_disabled = |name: &str| disabled.contains(&name);
        for kernel in self_check::kernels_to_check(&*device, policy, is_disabled) {
            println!("{}", Message::Kernel(kernel.into()));
        }
        return Ok(ExitCode::SUCCESS);
    };
    let (kernels, faulty) = (parse_names(kernels)?, parse_names(&args.faulty)?);
    let is_complete = self_check::run(&device, policy, &kernels, &faulty, |step| {
        println!("{}", Message::from(step));
    })?;
    if is_complete {
        println!("{}", Message::Done);
    }
    Ok(ExitCode::SUCCESS)
}
