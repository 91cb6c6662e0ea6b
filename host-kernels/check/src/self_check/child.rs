//! The part of the self-check that runs on the device, in a process of its own.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use vgpu_cpu::CpuEngine;
use vgpu_cuda::device::Device;
use vgpu_cuda::kernel_set::KernelSet;
use vgpu_cuda::verdict::{Finding, Verdict, parse_line};
use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_engine::{Engine, EngineError};
use vgpu_transport::ir::Type;

use super::order::{MEGAKERNELS, hiding, in_order};
use crate::cases::{self, Operation, RUNS, worst_error};
use crate::error::CheckError;
use crate::model::{Built, Family, Model, StepShape, TINY};

/// Two ways of computing are each off by at most the limit of a case, so their difference may be
/// twice as large, and its square four times.
const FACTOR: f64 = 4.0;

/// The limit for logits: the error of a product in several layers.
const LOGITS: f64 = 5e-3;

/// The kernel that small uploads use. It is in no plan, and the engine chooses it at its start.
const UPLOAD: &str = "vg_upload";

/// The kernel that repacks weights when a plan is compiled.
const REPACK: &str = "vg_repack";

/// The largest upload that the kernel moves.
const SMALL_UPLOAD: u64 = 64 << 10;

/// A step of the check of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// A case begins to run with the kernel.
    Begins(&'static str),
    /// The same case begins to run without the kernel, with these kernels instead.
    Instead(Vec<&'static str>),
    /// What was found about the kernel.
    Ends(&'static str, Finding),
}

/// A line from a child to its parent.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// The fingerprint of the device, its driver and the code.
    Device(String),
    /// A kernel that is to be checked.
    Kernel(String),
    /// The check of a kernel begins.
    Begins(String),
    /// The kernels behind it begin to run.
    Instead(Vec<String>),
    /// What was found about a kernel.
    Ends(&'static str, Finding),
    /// The child has done all that it was asked for.
    Done,
}

impl From<Step> for Message {
    fn from(step: Step) -> Message {
        match step {
            Step::Begins(kernel) => Message::Begins(kernel.into()),
            Step::Instead(kernels) => {
                Message::Instead(kernels.into_iter().map(String::from).collect())
            }
            Step::Ends(kernel, finding) => Message::Ends(kernel, finding),
        }
    }
}

/// What the lines begin with: other libraries write to standard output, too.
const MARK: &str = "self-check ";

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MARK)?;
        match self {
            Message::Device(fingerprint) => write!(f, "device {fingerprint}"),
            Message::Kernel(name) => write!(f, "kernel {name}"),
            Message::Begins(name) => write!(f, "begins {name}"),
            Message::Instead(names) => write!(f, "instead {}", names.join(" ")),
            Message::Ends(name, finding) => {
                let mut verdict = Verdict::default();
                verdict.record(name, finding.clone());
                let text = verdict.to_text("");
                write!(f, "ends {}", text.lines().nth(1).unwrap_or_default())
            }
            Message::Done => f.write_str("done"),
        }
    }
}

impl Message {
    /// The message of a line, if it is one. Anything may stand before it in the line.
    pub fn parse(line: &str) -> Option<Message> {
        let line = &line[line.find(MARK)? + MARK.len()..];
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        match kind {
            "device" => Some(Message::Device(rest.into())),
            "kernel" => Some(Message::Kernel(rest.into())),
            "begins" => Some(Message::Begins(rest.into())),
            "instead" => Some(Message::Instead(
                rest.split_whitespace().map(String::from).collect(),
            )),
            "ends" => parse_line(rest).map(|(name, finding)| Message::Ends(name, finding)),
            "done" => Some(Message::Done),
            _ => None,
        }
    }
}

/// The kernels of a device that the check is about, in its order. `is_disabled`: the kernels that
/// the operator has disabled.
pub fn kernels_to_check(
    device: &dyn Device,
    policy: LaunchPolicy,
    is_disabled: impl Fn(&str) -> bool,
) -> Vec<&'static str> {
    let mut kernels = in_order();
    kernels.retain(|kernel| {
        (policy.megakernel || !MEGAKERNELS.contains(kernel))
            && !is_disabled(kernel)
            && device.kernel(kernel).is_ok()
    });
    kernels
}

/// Checks `kernels` of a device, without the kernels in `faulty`. Calls `seen` at each step. After
/// an error of the device nothing else may work: the check ends. Returns whether all were checked.
///
/// # Errors
/// [`EngineError`] of the device, if no engine starts on it.
pub fn run(
    device: &Arc<dyn Device>,
    policy: LaunchPolicy,
    kernels: &[&'static str],
    faulty: &[&'static str],
    mut seen: impl FnMut(Step),
) -> Result<bool, EngineError> {
    let mut check = Check::new(device, policy, faulty)?;
    for &kernel in kernels {
        let (finding, failed) = check.kernel(kernel, &mut seen);
        let is_faulty = matches!(finding, Finding::Faulty(_));
        seen(Step::Ends(kernel, finding));
        if failed.is_some_and(|error| error.is_device_failure()) {
            return Ok(false);
        }
        if is_faulty {
            check.exclude(kernel)?;
        }
    }
    Ok(true)
}

/// For each of `kernels`, the kernels of a case that uses it when it is disabled. `None`: no case
/// uses it. Nothing runs.
///
/// # Errors
/// If an engine does not start on the device, or refuses a case.
pub fn behind(
    device: &Arc<dyn Device>,
    policy: LaunchPolicy,
    kernels: &[&'static str],
) -> Result<Vec<Behind>, CheckError> {
    let mut check = Check::new(device, policy, &[])?;
    let behind = |&kernel| Ok((kernel, check.behind(kernel)?));
    kernels.iter().map(behind).collect()
}

/// A kernel, and the kernels that do its work when it is disabled.
pub type Behind = (&'static str, Option<Vec<&'static str>>);

/// A case of the check.
enum Case {
    Operation(Operation),
    /// The first tokens of a model.
    Model(Box<Built>),
}

impl Case {
    fn limit(&self) -> f64 {
        FACTOR
            * match self {
                Case::Operation(operation) => operation.limit,
                Case::Model(_) => LOGITS,
            }
    }

    fn bytes(&self) -> u64 {
        match self {
            Case::Operation(operation) => operation.bytes(),
            // After all operations: a model runs many kernels.
            Case::Model(_) => u64::MAX,
        }
    }

    /// The kernels that the case uses on an engine, those of its preparation included.
    fn kernels(&self, engine: &dyn Engine) -> Result<Vec<&'static str>, CheckError> {
        let mut kernels = match self {
            Case::Operation(operation) => operation.kernels(engine)?,
            Case::Model(built) => {
                let loaded = built.load(engine);
                built.compile(engine, &loaded).kernels()
            }
        };
        if kernels.iter().any(|kernel| kernel.contains("_repacked")) {
            kernels.push(REPACK);
        }
        if self.bytes() <= SMALL_UPLOAD {
            kernels.push(UPLOAD);
        }
        Ok(kernels)
    }

    /// The results of a few runs.
    fn results(
        &self,
        engine: &dyn Engine,
        compiled: impl FnOnce(&[&'static str]),
    ) -> Result<Vec<Vec<f32>>, CheckError> {
        match self {
            Case::Operation(operation) => operation.results(engine, RUNS, compiled),
            Case::Model(built) => {
                let loaded = built.load(engine);
                let mut plan = built.compile(engine, &loaded);
                compiled(&plan.kernels());
                let token = |position| {
                    built.write_inputs(&loaded, position);
                    plan.run()?;
                    Ok(built.read_result(&loaded))
                };
                (0..RUNS as u64).map(token).collect()
            }
        }
    }
}

/// The largest error of results beside those of another engine.
fn error_between(results: &[Vec<f32>], expected: &[Vec<f32>]) -> f64 {
    let pairs = results.iter().zip(expected);
    let errors = pairs.map(|(got, expected)| worst_error(std::slice::from_ref(got), expected));
    errors.fold(0.0, |worst: f64, error| {
        match error > worst || error.is_nan() {
            true if !worst.is_nan() => error,
            _ => worst,
        }
    })
}

fn cases() -> Vec<Case> {
    let base = Model {
        width: 256,
        heads: 8,
        key_heads: 2,
        head: 32,
        inner: 512,
        vocabulary: 512,
        context: 64,
        ..TINY
    };
    let experts = Some((8, 2));
    // Experts with products in floats: rounding of activations would change the choice of experts.
    let models = [
        (Type::Q4K, Family::Llama, None),
        (Type::F16, Family::Llama, experts),
        (Type::F16, Family::GptOss, experts),
    ];
    let steps = models.map(|(weights, family, experts)| {
        let model = Model {
            weights,
            family,
            experts,
            norms_heads: family == Family::Llama && experts.is_some(),
            ..base
        };
        let step = StepShape {
            tokens: 1,
            seen: model.context,
        };
        Case::Model(Box::new(model.graph(step)))
    });
    let operations = cases::self_check().into_iter().map(Case::Operation);
    let mut all: Vec<_> = operations.chain(steps).collect();
    all.sort_by_key(Case::bytes);
    all
}

/// An engine whose kernels change.
struct Side {
    engine: CudaEngine,
    kernels: Arc<KernelSet>,
}

impl Side {
    fn new(
        device: &Arc<dyn Device>,
        policy: LaunchPolicy,
        is_disabled: impl Fn(&str) -> bool,
    ) -> Result<Side, EngineError> {
        let kernels = Arc::new(KernelSet::without(is_disabled));
        let device = Arc::clone(device);
        Ok(Side {
            engine: CudaEngine::with_kernels(device, policy, Arc::clone(&kernels))?,
            kernels,
        })
    }
}

/// A check that is going on.
struct Check<'a> {
    device: &'a Arc<dyn Device>,
    policy: LaunchPolicy,
    cases: Vec<Case>,
    faulty: BTreeSet<&'static str>,
    /// With the kernel that is checked.
    with: Side,
    /// Without it.
    without: Side,
    /// The smallest case of each kernel, by the kernels that are disabled for its check.
    known: HashMap<Vec<&'static str>, BTreeMap<&'static str, usize>>,
}

impl<'a> Check<'a> {
    fn new(
        device: &'a Arc<dyn Device>,
        policy: LaunchPolicy,
        faulty: &[&'static str],
    ) -> Result<Check<'a>, EngineError> {
        let policy = policy.for_single_nodes();
        Ok(Check {
            device,
            policy,
            cases: cases(),
            faulty: faulty.iter().copied().collect(),
            with: Side::new(device, policy, |name| faulty.contains(&name))?,
            without: Side::new(device, policy, |name| name == UPLOAD)?,
            known: HashMap::new(),
        })
    }

    /// Leaves a kernel out from now on.
    fn exclude(&mut self, kernel: &'static str) -> Result<(), EngineError> {
        self.faulty.insert(kernel);
        if kernel == UPLOAD {
            let faulty = &self.faulty;
            self.with = Side::new(self.device, self.policy, |name| faulty.contains(name))?;
        }
        Ok(())
    }

    /// The smallest case that uses a kernel while others are disabled.
    fn case_of(
        &mut self,
        kernel: &'static str,
        disabled: &[&'static str],
    ) -> Result<Option<usize>, CheckError> {
        if !self.known.contains_key(disabled) {
            let mut smallest = BTreeMap::new();
            for (at, case) in self.cases.iter().enumerate() {
                for kernel in case.kernels(&self.with.engine)? {
                    smallest.entry(kernel).or_insert(at);
                }
            }
            self.known.insert(disabled.to_vec(), smallest);
        }
        Ok(self.known[disabled].get(kernel).copied())
    }

    /// The kernels of the case for `kernel` when it is disabled.
    fn behind(&mut self, kernel: &'static str) -> Result<Option<Vec<&'static str>>, CheckError> {
        let mut disabled = hiding(kernel);
        self.with
            .kernels
            .disable_only(|name| disabled.contains(&name));
        let Some(at) = self.case_of(kernel, &disabled)? else {
            return Ok(None);
        };
        disabled.push(kernel);
        self.without
            .kernels
            .disable_only(|name| disabled.contains(&name));
        let kernels = self.cases[at].kernels(&self.without.engine)?;
        // The engine without the kernel never batches uploads.
        let is_used = |used: &&'static str| *used != UPLOAD;
        Ok(Some(kernels.into_iter().filter(is_used).collect()))
    }

    /// Checks a kernel. Returns also the error that has ended the check, if one has.
    fn kernel(
        &mut self,
        kernel: &'static str,
        seen: &mut impl FnMut(Step),
    ) -> (Finding, Option<CheckError>) {
        let mut disabled = hiding(kernel);
        disabled.extend(&self.faulty);
        self.with
            .kernels
            .disable_only(|name| disabled.contains(&name));
        let case = match self.case_of(kernel, &disabled) {
            Ok(Some(at)) => &self.cases[at],
            Ok(None) => return (Finding::Unchecked, None),
            Err(error) => return (Finding::Unchecked, Some(error)),
        };
        seen(Step::Begins(kernel));
        let results = match case.results(&self.with.engine, |_| ()) {
            Ok(results) => results,
            Err(error) => return (Finding::Faulty(error.to_string()), Some(error)),
        };
        disabled.push(kernel);
        self.without
            .kernels
            .disable_only(|name| disabled.contains(&name));
        let expected = case.results(&self.without.engine, |kernels| {
            seen(Step::Instead(kernels.to_vec()));
        });
        let limit = case.limit();
        let error = expected.map(|expected| error_between(&results, &expected));
        if matches!(error, Ok(error) if error <= limit) {
            return (Finding::Right, None);
        }
        // The kernels behind it may be the wrong ones.
        let oracle = CpuEngine::new(0, None).map_err(CheckError::from);
        let exact = oracle.and_then(|oracle| case.results(&oracle, |_| ()));
        let finding = match exact.map(|exact| error_between(&results, &exact)) {
            Ok(off) if off <= limit => Finding::Right,
            Ok(off) => Finding::Faulty(format!("it is off by {off:.1e}, allowed {limit:.1e}")),
            Err(_) => Finding::Unchecked,
        };
        (finding, error.err())
    }
}
