//! The part of the self-check that runs on the device, in a process of its own.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use vgpu_cpu::CpuEngine;
use vgpu_cuda::device::Device;
use vgpu_cuda::kernel_set::{KernelSet, is_simple, names};
use vgpu_cuda::verdict::Finding;
use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_engine::{Engine, EngineError};
use vgpu_transport::ir::Type;

use super::message::{CheckEvent, CheckOutcome, CheckWork};
use super::order::{MEGAKERNELS, hiding, in_order, reads_repacked};
use crate::cases::{self, Operation, RUNS, worst_error};
use crate::error::CheckError;
use crate::model::{Built, Family, Model, StepShape};

/// Two ways of computing are each off by at most the limit of a case, so their difference may be
/// twice as large, and its square four times.
const FACTOR: f64 = 4.0;

/// The limit for logits: the error of a product in several layers.
const LOGITS: f64 = 5e-3;

/// The kernel that small uploads use. The kernel is in no plan, and the engine chooses it at its
/// start.
const UPLOAD: &str = "vg_upload";

/// The kernel that repacks weights when a plan is compiled.
const REPACK: &str = "vg_repack";

/// The largest upload that the kernel moves.
const SMALL_UPLOAD: u64 = 64 << 10;

/// What stands for the operator of a model.
const MODEL: &str = "model";

/// The most cases in which a kernel is checked.
const MAX_CASES: usize = 4;

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

/// Checks the kernels of `work` on a device. Calls `seen` at each step. After a kernel that has
/// failed, nothing that the device says is certain: the check ends. Returns whether all were
/// checked.
///
/// # Errors
/// [`EngineError`] of the device, if no engine starts on it.
pub fn run(
    device: &Arc<dyn Device>,
    policy: LaunchPolicy,
    work: CheckWork<'_>,
    mut seen: impl FnMut(CheckEvent),
) -> Result<bool, EngineError> {
    let mut check = Check::new(device, policy, work)?;
    for &kernel in work.kernels {
        let (outcome, failed) = check.kernel(kernel, &mut seen)?;
        let is_faulty = outcome.is_faulty();
        let is_right = outcome == CheckOutcome::Found(Finding::Right);
        seen(CheckEvent::Ends(kernel, outcome));
        if is_faulty || failed.is_some_and(|error| error.is_device_failure()) {
            return Ok(false);
        }
        if is_right {
            check.found_right(kernel)?;
        }
    }
    Ok(true)
}

/// For each of `kernels`, the kernels of a case that uses it when it is disabled. `None`: no case
/// uses it. Nothing but repacking runs.
///
/// # Errors
/// If an engine does not start on the device, or refuses a case.
pub fn fallbacks(
    device: &Arc<dyn Device>,
    policy: LaunchPolicy,
    kernels: &[&'static str],
) -> Result<Vec<Fallback>, CheckError> {
    let work = CheckWork {
        kernels,
        right: kernels,
        faulty: &[],
        suspects: &[],
    };
    let mut check = Check::new(device, policy, work)?;
    let fallback = |&kernel| Ok((kernel, check.fallback(kernel)?));
    kernels.iter().map(fallback).collect()
}

/// A kernel, and its fallback: the kernels that do its work when it is disabled.
pub type Fallback = (&'static str, Option<Vec<&'static str>>);

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

    /// The operator, or that it is a model.
    fn operator(&self) -> &str {
        match self {
            Case::Operation(operation) => { operation.name.split(' ').next() }.unwrap_or_default(),
            Case::Model(_) => MODEL,
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
    let experts = Some((8, 2));
    // Experts with products in floats: rounding of activations would change the choice of experts.
    let models = [
        (Type::Q4K, Family::Llama, None),
        (Type::F16, Family::Llama, experts),
        (Type::F16, Family::GptOss, experts),
    ];
    let steps = models.map(|(weights, family, experts)| {
        let model = Model::small(weights, family, experts);
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

/// The cases for a kernel.
struct Chosen {
    cases: Vec<usize>,
    /// The kernels that are disabled, so that the cases use the kernel.
    disabled: BTreeSet<&'static str>,
}

/// The cases that use each kernel, the smallest first.
type Users = BTreeMap<&'static str, Vec<usize>>;

/// A check that is going on.
struct Check<'a> {
    device: &'a Arc<dyn Device>,
    policy: LaunchPolicy,
    cases: Vec<Case>,
    /// The kernels that were found right.
    right: BTreeSet<&'static str>,
    faulty: BTreeSet<&'static str>,
    suspects: BTreeSet<&'static str>,
    /// With the kernel that is checked.
    with: Side,
    /// Without it, and never with [`UPLOAD`]: nothing that is prepared there runs that kernel.
    without: Side,
    /// By the kernels that are disabled.
    known: HashMap<BTreeSet<&'static str>, Users>,
}

impl<'a> Check<'a> {
    fn new(
        device: &'a Arc<dyn Device>,
        policy: LaunchPolicy,
        work: CheckWork<'_>,
    ) -> Result<Check<'a>, EngineError> {
        let policy = policy.for_single_nodes();
        let set = |kernels: &[&'static str]| kernels.iter().copied().collect::<BTreeSet<_>>();
        let right = set(work.right);
        let may_upload = right.contains(UPLOAD);
        Ok(Check {
            device,
            policy,
            cases: cases(),
            with: Side::new(device, policy, |name| name == UPLOAD && !may_upload)?,
            without: Side::new(device, policy, |name| name == UPLOAD)?,
            right,
            faulty: set(work.faulty),
            suspects: set(work.suspects),
            known: HashMap::new(),
        })
    }

    /// Uses a kernel from now on.
    fn found_right(&mut self, kernel: &'static str) -> Result<(), EngineError> {
        self.right.insert(kernel);
        if kernel == UPLOAD {
            self.with = Side::new(self.device, self.policy, |_| false)?;
        }
        Ok(())
    }

    /// The kernels that a case uses while others are disabled. Runs nothing but [`REPACK`], unless
    /// that is disabled.
    fn plan(
        &self,
        case: usize,
        disabled: &BTreeSet<&'static str>,
    ) -> Result<Vec<&'static str>, CheckError> {
        let kernels = &self.without.kernels;
        kernels.disable_only(|name| disabled.contains(name));
        self.cases[case].kernels(&self.without.engine)
    }

    /// The cases that use a kernel while others are disabled, the smallest first.
    fn users(
        &mut self,
        kernel: &'static str,
        disabled: &BTreeSet<&'static str>,
    ) -> Result<Vec<usize>, CheckError> {
        if !self.known.contains_key(disabled) {
            let mut users = Users::new();
            for case in 0..self.cases.len() {
                for kernel in self.plan(case, disabled)? {
                    let of_kernel = users.entry(kernel).or_default();
                    if of_kernel.last() != Some(&case) {
                        of_kernel.push(case);
                    }
                }
            }
            self.known.insert(disabled.clone(), users);
        }
        let users = self.known[disabled].get(kernel);
        Ok(users.cloned().unwrap_or_default())
    }

    /// The cases in which a kernel is checked. The cases use no other kernel that is neither simple
    /// nor found right, if there are such cases: else a kernel would fail because of another one.
    fn choose(&mut self, kernel: &'static str) -> Result<Chosen, CheckError> {
        let mut disabled: BTreeSet<_> = hiding(kernel).into_iter().collect();
        disabled.extend(&self.faulty);
        if kernel != REPACK && !self.right.contains(REPACK) {
            disabled.insert(REPACK);
        }
        let users = self.users(kernel, &disabled)?;
        let mut strict = disabled.clone();
        let unknown = names()
            .iter()
            .filter(|name| !is_simple(name) && **name != kernel && !self.right.contains(*name));
        strict.extend(unknown);
        let mut cases = Vec::new();
        for &case in &users {
            if self.plan(case, &strict)?.contains(&kernel) {
                cases.push(case);
            }
        }
        if !cases.is_empty() {
            let cases = self.different(&cases);
            return Ok(Chosen {
                cases,
                disabled: strict,
            });
        }
        // The kernel works for others. If it has failed with one of them, another one tells whose
        // fault it was.
        let mut cases = Vec::from_iter(users.first().copied());
        if self.suspects.contains(kernel)
            && let Some(&first) = users.first()
        {
            let others = self.unknown_in(first, &disabled)?;
            for &case in &users[1..] {
                let shared = self.unknown_in(case, &disabled)?;
                if !shared
                    .iter()
                    .any(|name| *name != kernel && others.contains(name))
                {
                    cases = vec![case];
                    break;
                }
            }
        }
        Ok(Chosen { cases, disabled })
    }

    /// The kernels of a case that are neither simple nor found right.
    fn unknown_in(
        &self,
        case: usize,
        disabled: &BTreeSet<&'static str>,
    ) -> Result<BTreeSet<&'static str>, CheckError> {
        let kernels = self.plan(case, disabled)?.into_iter();
        let is_unknown =
            |name: &&'static str| !is_simple(name) && *name != UPLOAD && !self.right.contains(name);
        Ok(kernels.filter(is_unknown).collect())
    }

    /// A few cases that differ: of each operator, the smallest and the largest. Models only if no
    /// other case is there: they are for kernels that do the work of several nodes.
    fn different(&self, cases: &[usize]) -> Vec<usize> {
        let mut ends: Vec<(&str, usize, usize)> = Vec::new();
        for &case in cases {
            let is_model = matches!(self.cases[case], Case::Model(_));
            if is_model && ends.iter().any(|(operator, ..)| *operator != MODEL) {
                break;
            }
            let operator = self.cases[case].operator();
            match ends.iter_mut().find(|(known, ..)| *known == operator) {
                Some((_, _, largest)) => *largest = case,
                None => ends.push((operator, case, case)),
            }
        }
        let smallest = ends.iter().map(|(_, smallest, _)| *smallest);
        let largest = ends.iter().map(|(_, _, largest)| *largest);
        let mut chosen: Vec<_> = smallest.chain(largest).take(MAX_CASES).collect();
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }

    /// The kernels of the smallest case for `kernel` when it is disabled.
    fn fallback(&mut self, kernel: &'static str) -> Result<Option<Vec<&'static str>>, CheckError> {
        let Chosen {
            cases,
            mut disabled,
        } = self.choose(kernel)?;
        let Some(&case) = cases.first() else {
            return Ok(None);
        };
        disabled.insert(kernel);
        let kernels = self.plan(case, &disabled)?;
        // The engine without the kernel never batches uploads.
        let is_used = |used: &&'static str| *used != UPLOAD;
        Ok(Some(kernels.into_iter().filter(is_used).collect()))
    }

    /// Checks a kernel. Returns also the error that has ended the check, if one has.
    ///
    /// # Errors
    /// [`EngineError`] of the device, if no engine starts on it.
    fn kernel(
        &mut self,
        kernel: &'static str,
        seen: &mut impl FnMut(CheckEvent),
    ) -> Result<(CheckOutcome, Option<CheckError>), EngineError> {
        // What is planned for this kernel runs it.
        if kernel == REPACK {
            seen(CheckEvent::Begins(kernel));
        }
        let hidden = hiding(kernel).into_iter().collect();
        let chosen = match self.choose(kernel) {
            Ok(chosen) => chosen,
            Err(error) if kernel == REPACK => return Ok(failure(error)),
            Err(error) => return Ok((CheckOutcome::Unchecked, Some(error))),
        };
        if chosen.cases.is_empty() {
            // A case may need a kernel that is faulty, disabled or not checked yet.
            let is_used = match self.right.contains(REPACK) || !reads_repacked(kernel) {
                true => self.users(kernel, &hidden).map(|users| !users.is_empty()),
                false => Ok(true),
            };
            return Ok(match is_used {
                Ok(false) => (CheckOutcome::Found(Finding::Unused), None),
                Ok(true) => (CheckOutcome::Unchecked, None),
                Err(error) => (CheckOutcome::Unchecked, Some(error)),
            });
        }
        let with_upload;
        let with = match kernel {
            UPLOAD => {
                seen(CheckEvent::Begins(kernel));
                match Side::new(self.device, self.policy, |_| false) {
                    Ok(side) => with_upload = side,
                    Err(error) => return Ok(failure(error.into())),
                }
                &with_upload
            }
            _ => &self.with,
        };
        for case in chosen.cases {
            let ended = self.case(kernel, with, case, &chosen.disabled, seen);
            if !matches!(ended, (CheckOutcome::Found(Finding::Right), None)) {
                return Ok(ended);
            }
        }
        Ok((CheckOutcome::Found(Finding::Right), None))
    }

    /// Runs a case with a kernel and without.
    fn case(
        &self,
        kernel: &'static str,
        with: &Side,
        case: usize,
        disabled: &BTreeSet<&'static str>,
        seen: &mut impl FnMut(CheckEvent),
    ) -> (CheckOutcome, Option<CheckError>) {
        let case = &self.cases[case];
        seen(CheckEvent::Begins(kernel));
        with.kernels.disable_only(|name| disabled.contains(name));
        let results = match case.results(&with.engine, |_| ()) {
            Ok(results) => results,
            Err(error) => return failure(error),
        };
        let without = &self.without.kernels;
        without.disable_only(|name| disabled.contains(name) || name == kernel);
        let mut instead = Vec::new();
        let expected = case.results(&self.without.engine, |kernels| {
            instead = kernels.to_vec();
            seen(CheckEvent::Instead(instead.clone()));
        });
        let limit = case.limit();
        let error = expected.map(|expected| error_between(&results, &expected));
        let right = CheckOutcome::Found(Finding::Right);
        if matches!(error, Ok(error) if error <= limit) {
            return (right, None);
        }
        // The fallback may be the wrong one.
        let oracle = CpuEngine::new(0, None).map_err(CheckError::from);
        let exact = oracle.and_then(|oracle| case.results(&oracle, |_| ()));
        let outcome = match exact.map(|exact| error_between(&results, &exact)) {
            Ok(off) if off <= limit => {
                if error.is_ok() {
                    seen(CheckEvent::WrongFallback(instead));
                }
                right
            }
            Ok(off) => CheckOutcome::Found(Finding::Faulty(format!(
                "it is off by {off:.1e}, allowed {limit:.1e}"
            ))),
            Err(_) => CheckOutcome::Unchecked,
        };
        (outcome, error.err())
    }
}

/// What an error of a run with the kernel says about it.
fn failure(error: CheckError) -> (CheckOutcome, Option<CheckError>) {
    let outcome = match error.is_out_of_memory() {
        true => CheckOutcome::Unchecked,
        false => CheckOutcome::Found(Finding::Faulty(error.to_string())),
    };
    (outcome, Some(error))
}
