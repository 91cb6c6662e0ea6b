//! `vgpu gpu-check self-check`, which `vgpu serve` runs at its first start on a GPU with a driver.

use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;
use rustix::process::Signal;
use tracing::{info, warn};
use vgpu_check::child_process::Silence;
use vgpu_check::self_check::{self, CheckWork, Message, Request, Supervised};
use vgpu_cuda::device::Device;
use vgpu_cuda::kernel_set::parse_names;
use vgpu_cuda::verdict::Verdict;
use vgpu_executor::engine::{self, EngineKind, KeepError};

use crate::error_text;
use crate::own_program::OWN_PROGRAM;

/// How long the check of a kernel may take at a start of `vgpu serve`.
const SILENCE: Duration = Duration::from_secs(10);

/// How long a process may take until it names the first kernel. All kernels are compiled by then.
const BEGIN_LIMIT: Duration = Duration::from_secs(60);

/// How long the first process may take, which compiles kernels without built-in machine code.
const COMPILE_LIMIT: Duration = Duration::from_secs(900);

/// How long the check may take at a start of `vgpu serve`. Kernels that are left are checked at the
/// next start.
const BUDGET: Duration = Duration::from_secs(50);

/// How long to wait for the check of another executor.
const LOCK_LIMIT: Duration = Duration::from_secs(1200);

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
    /// The kernels that were found right
    #[arg(long, default_value = "")]
    right: String,
    /// The kernels that must not run
    #[arg(long, default_value = "")]
    faulty: String,
    /// The kernels that have failed once
    #[arg(long, default_value = "")]
    suspects: String,
}

fn ordinal_of(engine: &EngineKind) -> anyhow::Result<u32> {
    match engine {
        EngineKind::Cuda(ordinal) => Ok(*ordinal),
        _ => anyhow::bail!("only GPUs have kernels to check: --engine cuda[:N]"),
    }
}

/// Runs the command. The exit status is 0 if every kernel was checked and none is faulty.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    ordinal_of(&args.engine)?;
    let _lock = lock();
    let silence = Duration::from_secs(args.silence);
    let kept = VerdictFile::default();
    let found = supervise(&args.engine, silence, Duration::MAX, args.again, &kept)?;
    for (kernel, reason) in found.verdict.faulty() {
        println!("FAULTY  {kernel}: {reason}");
    }
    for kernel in &found.left {
        println!("LEFT    {kernel}: nothing could be found about it");
    }
    for kernels in &found.wrong_fallbacks {
        println!("WRONG   {kernels}: its results were wrong in place of a kernel that was right");
    }
    let faulty = found.verdict.faulty().count();
    println!(
        "{} kernels were checked now, {faulty} of {} are faulty, {} are left{kept}",
        found.checked,
        found.verdict.len(),
        found.left.len(),
    );
    Ok(match faulty == 0 && found.left.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Checks the kernels of a GPU that have no finding yet. Says nothing if all have one.
pub(crate) fn before_serving(engine: &EngineKind) {
    if !matches!(engine, EngineKind::Cuda(_)) {
        return;
    }
    if let Err(error) = engine::check_cache() {
        warn!("the kernels are not checked, since no verdict can be kept: {error}");
        return;
    }
    let _lock = lock();
    let kept = VerdictFile::default();
    match supervise(engine, SILENCE, BUDGET, false, &kept) {
        Ok(Supervised {
            checked: 0, left, ..
        }) if left.is_empty() => {}
        Ok(found) => {
            info!(
                checked = found.checked,
                faulty = found.verdict.faulty().count(),
                left = found.left.len(),
                "the kernels were checked on this GPU{kept}"
            );
            if !found.left.is_empty() {
                let until = match found.verdict.is_empty() {
                    true => "are used although nothing could be found about them",
                    false => "are not used until the next start has checked them",
                };
                warn!("these kernels {until}: {}", found.left.join(", "));
            }
            if !found.wrong_fallbacks.is_empty() {
                let kernels: Vec<_> = found.wrong_fallbacks.into_iter().collect();
                warn!(
                    "some of these kernels gave wrong results in place of a kernel that was right, \
                     and may be used for other shapes: {}",
                    kernels.join(", ")
                );
            }
        }
        Err(error) => warn!(
            "the kernels are not checked: {}",
            error_text::one_line(&error)
        ),
    }
}

/// Waits for the check of another executor, and keeps others waiting. Without the lock, both check.
fn lock() -> Option<File> {
    let begin = Instant::now();
    let mut is_told = false;
    while begin.elapsed() < LOCK_LIMIT {
        match engine::lock_verdicts() {
            Ok(Some(lock)) => return Some(lock),
            Ok(None) if !std::mem::replace(&mut is_told, true) => {
                info!("another executor checks kernels: waiting for it");
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(100)),
            Err(_) => return None,
        }
    }
    None
}

/// The file with the verdict, or why there is none. `None`: nothing has been written.
#[derive(Default)]
struct VerdictFile(Mutex<Option<Result<PathBuf, KeepError>>>);

impl fmt::Display for VerdictFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*vgpu_transport::lock::lock(&self.0) {
            None => Ok(()),
            Some(Ok(path)) => write!(f, "; the findings are in {}", path.display()),
            Some(Err(error)) => write!(f, "; the findings are lost at the next start: {error}"),
        }
    }
}

fn supervise(
    engine: &EngineKind,
    silence: Duration,
    budget: Duration,
    again: bool,
    kept: &VerdictFile,
) -> anyhow::Result<Supervised> {
    let disabled = engine::disabled_kernels()?;
    let command = |request: Request<'_>| {
        let mut command = Command::new(OWN_PROGRAM);
        command
            .args(["gpu-check", "self-check-child"])
            .arg(format!("--engine={engine}"));
        if let Request::Check(work) = request {
            let faulty = [work.faulty, &disabled].concat();
            command
                .arg(format!("--kernels={}", work.kernels.join(",")))
                .arg(format!("--right={}", work.right.join(",")))
                .arg(format!("--faulty={}", faulty.join(",")))
                .arg(format!("--suspects={}", work.suspects.join(",")));
        }
        command
    };
    let silence = |at_start| Silence {
        at_start,
        between: silence,
    };
    let before = |fingerprint: &str| match again {
        true => Default::default(),
        false => {
            let verdict = engine::load_verdict(fingerprint);
            if verdict.is_empty() {
                info!("the first start on this GPU, or with this driver: the kernels are checked");
            }
            verdict
        }
    };
    let save = |fingerprint: &str, verdict: &Verdict| {
        let saved = engine::save_verdict(fingerprint, verdict);
        let mut kept = vgpu_transport::lock::lock(&kept.0);
        *kept = Some(saved);
    };
    let silences = (silence(COMPILE_LIMIT), silence(BEGIN_LIMIT));
    // Executors that start meanwhile use the findings from before.
    let mut last = None;
    let keep = |fingerprint: &str, verdict: &Verdict| match again {
        true => last = Some((fingerprint.to_owned(), verdict.clone())),
        false => save(fingerprint, verdict),
    };
    let found = self_check::supervise(command, silences, budget, before, keep)?;
    if let Some((fingerprint, verdict)) = last {
        save(&fingerprint, &verdict);
    }
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
    let fingerprint = engine::fingerprint(&gpu, policy);
    let device: Arc<dyn Device> = gpu;
    let Some(kernels) = &args.kernels else {
        println!("{}", Message::Device(fingerprint));
        let disabled = engine::disabled_kernels()?;
        let is_disabled = |name: &str| disabled.contains(&name);
        for kernel in self_check::kernels_to_check(&*device, policy, is_disabled) {
            println!("{}", Message::Kernel(kernel));
        }
        return Ok(ExitCode::SUCCESS);
    };
    let work = CheckWork {
        kernels: &parse_names(kernels)?,
        right: &parse_names(&args.right)?,
        faulty: &parse_names(&args.faulty)?,
        suspects: &parse_names(&args.suspects)?,
    };
    let is_complete = self_check::run(&device, policy, work, |step| {
        println!("{}", Message::from(step));
    })?;
    if is_complete {
        println!("{}", Message::Done);
    }
    Ok(ExitCode::SUCCESS)
}
