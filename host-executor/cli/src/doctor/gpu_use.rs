//! Whether the executor uses the GPUs of this machine.

use vgpu_executor::config::{DEFAULT_PATH, Settings};
use vgpu_executor::engine::{EngineKind, EngineList, is_of_nvidia};
use vgpu_executor::status::Status;

use super::report::Report;
use super::root::Root;
use super::unit::UnitState;

/// What of the engine's choice `vgpu check-config` has said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Choice {
    /// The engines that an executor would start with now, separated by commas.
    pub(super) engines: String,
    /// The GPU that they leave unused, and why.
    pub(super) unused_gpu: Option<String>,
}

/// Whether these engines include the CUDA engine, or one that is CUDA where it can be.
pub(super) fn wants_cuda(engines: &EngineList) -> bool {
    engines.kinds().iter().any(|kind| {
        matches!(
            kind,
            EngineKind::Auto | EngineKind::Cuda(_) | EngineKind::AllCuda
        )
    })
}

/// Whether all engines of a list, such as `cuda:0, cpu`, compute on the processors.
fn are_of_the_cpu<'a>(names: impl IntoIterator<Item = &'a str>) -> bool {
    names.into_iter().all(|name| name.trim() == "cpu")
}

/// Whether a running executor has an engine that computes on no processor.
pub(super) fn uses_gpu(status: &Status) -> bool {
    !are_of_the_cpu(status.engines().map(|engine| &engine.name[..]))
}

/// Checks what an executor would choose that starts now. `card`: an NVIDIA card with its driver.
pub(super) fn check_choice(
    root: &Root,
    settings: &Settings,
    card: Option<&str>,
    choice: &Choice,
    report: &mut Report,
) {
    if let Some(gpu) = &choice.unused_gpu {
        return unused(root, gpu, report);
    }
    let Some(card) = card else { return };
    if !are_of_the_cpu(choice.engines.split(',')) {
        return;
    }
    let file = root.path(DEFAULT_PATH);
    let file = file.display();
    match wants_cuda(&settings.engines) {
        true => report.fail(
            "gpu",
            format!("{card} is not used: the engine cpu is chosen"),
            CHECK,
        ),
        false => report.note(
            "gpu",
            format!(
                "{card} is not used: {file} has engine.kind = \"{}\"; \"auto\" uses the GPU",
                settings.engines
            ),
        ),
    }
}

/// Checks what the running executor uses. `host`: its settings; `choice`: what it would choose now.
pub(super) fn check_executor(
    root: &Root,
    host: Option<&Settings>,
    card: Option<&str>,
    choice: Option<&Choice>,
    (status, service): (&Status, UnitState),
    report: &mut Report,
) {
    let restart = match service {
        UnitState::Unknown => "end vgpu serve, and start it again",
        _ => "sudo systemctl restart vgpu",
    };
    let would_use = choice.is_some_and(|choice| {
        choice.unused_gpu.is_none() && !are_of_the_cpu(choice.engines.split(','))
    });
    match &status.engine.unused_gpu {
        Some(gpu) if is_of_nvidia(gpu) && would_use => report.fail(
            "executor",
            format!(
                "the GPU {gpu}. That was so when the executor started; one that starts now uses it"
            ),
            restart,
        ),
        Some(gpu) => unused(root, gpu, report),
        None => {
            let is_wanted = host.is_some_and(|settings| wants_cuda(&settings.engines));
            if let Some(card) = card
                && is_wanted
                && !uses_gpu(status)
            {
                report.fail(
                    "executor",
                    format!(
                        "{card} is not used: the executor was started with the engine cpu, and \
                         not with that of the configuration; systemctl cat vgpu shows its flags"
                    ),
                    restart,
                );
            }
        }
    }
}

/// Compares the kernels on the GPU, and says what fails.
const CHECK: &str = "vgpu gpu-check --compare-only";

/// Reports a GPU that is not used, once.
fn unused(root: &Root, gpu: &str, report: &mut Report) {
    const PART: &str = "gpu";
    let mut what = format!("the GPU {gpu}");
    if report.has(PART, &what) {
        return;
    }
    if !is_of_nvidia(gpu) {
        // Often an integrated GPU, which is no faster than the processors.
        return report.note(
            PART,
            format!("{what}; to use it: --engine ggml, or engine.kind = \"ggml\""),
        );
    }
    // What no repair of this machine changes.
    let is_unsupported = ["compute capability", "without the CUDA engine"];
    let next = match is_unsupported.iter().any(|words| gpu.contains(words)) {
        true => {
            what.push_str("; engine.kind = \"ggml\" in the configuration uses it");
            format!("sudoedit {}", root.path(DEFAULT_PATH).display())
        }
        false => CHECK.into(),
    };
    report.fail(PART, what, next);
}
