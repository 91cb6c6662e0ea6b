//! Plans in a batch.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use vgpu_transport::lock::lock_at;

use super::CudaPlan;
use super::split::{Split, failure};
use crate::batch::{BatchState, MAX_BATCH, Member, Owners, passed};
use crate::context::ExecutionContext;
use crate::graph_exec::{Failure, LaunchSequence};
use crate::lock::Rank;
use vgpu_engine::{BatchGroup, EngineError, Plan as _, RunError, RunStatus, Turn};

impl CudaPlan {
    /// The launches of a plan that may run in a batch.
    fn sequence(&self) -> Option<&LaunchSequence> {
        match &self.splits[..] {
            [Split::Launches(sequence)] => Some(sequence),
            _ => None,
        }
    }

    /// The shared products that the run has passed.
    pub(super) fn passed(&self) -> usize {
        match (&self.membership, self.sequence()) {
            (Some(membership), Some(sequence)) => passed(&membership.joint, sequence.done()),
            _ => 0,
        }
    }

    /// The plan as a member of a batch.
    fn member(&self) -> Option<Member<'_>> {
        let sequence = self.sequence()?;
        // A run that has handed all launches to the device is done.
        let done = if self.at == 0 { sequence.done() } else { 0 };
        Some(Member {
            launches: sequence.launches(),
            joint: &self.membership.as_ref()?.joint,
            done,
        })
    }

    /// Runs plans as a batch, as [`Engine::launch_batch`](vgpu_engine::Engine) does. `None` if they
    /// cannot run as a batch.
    pub(crate) fn launch_batch(
        plans: &mut [&mut CudaPlan],
        turn: &Turn,
    ) -> Option<Vec<Result<RunStatus, RunError>>> {
        let first = plans.first()?;
        let (context, key) = (Arc::clone(&first.context), first.batch_key()?);
        let group = Arc::clone(&first.membership.as_ref()?.group);
        let are_kin = plans.len() <= MAX_BATCH
            && plans
                .iter()
                .all(|plan| Arc::ptr_eq(&plan.context, &context) && plan.batch_key() == Some(key));
        if !are_kin {
            return None;
        }
        let mut batch = Batch {
            outcomes: plans.iter_mut().map(|plan| plan.begin().err()).collect(),
            plans,
            context: &context,
        };
        let _taken = context.lock_device();
        // SAFETY: `_taken` holds the device until this function returns.
        let status = unsafe { batch.run(&group, turn) };
        Some(batch.end(status))
    }

    /// Waits for the last run. Checks that the plan can begin one.
    ///
    /// # Errors
    /// The error of the last run, or [`RunError::Stale`].
    fn begin(&mut self) -> Result<(), RunError> {
        self.wait()?;
        match self.has_yielded || self.is_current() {
            true => Ok(()),
            false => Err(RunError::Stale),
        }
    }
}

/// Plans that run as a batch.
struct Batch<'a, 'p> {
    plans: &'a mut [&'p mut CudaPlan],
    /// Why a plan has failed, if it has.
    outcomes: Vec<Option<RunError>>,
    context: &'a ExecutionContext,
}

impl Batch<'_, '_> {
    /// The members that have not failed, in the order of their numbers.
    fn active(&self) -> Vec<usize> {
        let mut active: Vec<usize> = (0..self.plans.len())
            .filter(|&i| self.outcomes[i].is_none())
            .collect();
        active.sort_unstable_by_key(|&i| self.plans[i].number);
        active
    }

    /// Ends the runs of all members that have not failed.
    fn fail_all(&mut self, error: &EngineError, node: impl Fn(&CudaPlan) -> usize) {
        for i in self.active() {
            let plan = &self.plans[i];
            self.outcomes[i] = Some(failure(&plan.ops, node(plan), error));
        }
    }

    /// Hands launches to the device until all are under way or the turn is over. The device is idle
    /// when the call returns, unless it is lost.
    ///
    /// # Safety
    /// The caller has the device.
    unsafe fn run(&mut self, group: &BatchGroup<Mutex<BatchState>>, turn: &Turn) -> RunStatus {
        let device = &self.context.device;
        if let Some(reason) = device.lost() {
            self.fail_all(&EngineError::DeviceLost { reason }, |_| 0);
            return RunStatus::Done;
        }
        for i in self.active() {
            self.outcomes[i] = self.plans[i].prepare().err();
        }
        // SAFETY: the caller has the device, so only the members could have kernels under way.
        // `begin` has waited for their last runs, and a failed run was synchronised.
        if let Err(error) = unsafe { self.context.reset_counters() } {
            self.fail_all(&error, |_| 0);
            return RunStatus::Done;
        }
        let mut state = lock_at(Rank::Batch, &group.state);
        let mut status = RunStatus::Done;
        loop {
            let active = self.active();
            if active.is_empty() {
                break;
            }
            let members: Vec<Member<'_>> = { active.iter() }
                .filter_map(|&i| self.plans[i].member())
                .collect();
            let numbers = active.iter().map(|&i| self.plans[i].number).collect();
            let joined = state.sequence(&members, numbers, group.number, &self.context.templates);
            // SAFETY: the launches are those of the members, and joint ones over the memory of
            // these. They were compiled from validated graphs over memory that the members keep
            // alive. The caller has the device, so no other plan uses it. No two members share
            // scratch memory, and each launch has the operands of its own plan.
            let outcome = unsafe { joined.sequence.advance(device, self.context.policy, turn) };
            let end = match &outcome {
                Ok(RunStatus::Yielded) => joined.sequence.done(),
                Ok(_) => joined.owners.len(),
                Err(Failure { refused, .. }) => refused.unwrap_or(0),
            };
            joined.count_to(end);
            let done = joined.done.clone();
            let owners = match &outcome {
                Err(Failure { refused, .. }) => refused.map(|at| joined.owners[at].clone()),
                Ok(_) => None,
            };
            for (&i, done) in active.iter().zip(done) {
                self.plans[i].resume_at(done);
            }
            match (outcome, owners) {
                (Ok(ran), _) => {
                    status = ran;
                    break;
                }
                (Err(Failure { error, .. }), Some(Owners(of))) if device.lost().is_none() => {
                    // Nothing of the launch has run. The others go on without it.
                    match of[..] {
                        [m] => {
                            let i = active[usize::from(m)];
                            let plan = &self.plans[i];
                            self.outcomes[i] = Some(failure(&plan.ops, plan.next_node(), &error));
                        }
                        _ => state.is_apart = true,
                    }
                    (state.whole, state.rest) = (None, None);
                }
                (Err(Failure { error, .. }), _) => {
                    self.context.counters_dirty.store(true, Ordering::Relaxed);
                    self.fail_all(&error, |plan| plan.next_node());
                    (state.whole, state.rest) = (None, None);
                    break;
                }
            }
        }
        if status != RunStatus::Yielded {
            state.rest = None;
        }
        drop(state);
        if let Err(error) = device.synchronize() {
            self.context.counters_dirty.store(true, Ordering::Relaxed);
            self.fail_all(&error, |plan| plan.next_node());
            return status;
        }
        for (plan, outcome) in self.plans.iter().zip(&mut self.outcomes) {
            // SAFETY: the device was synchronised, and the caller has it.
            if let Some(fault) = unsafe { plan.take_fault() } {
                // Earlier launches may fail, too, and their fault comes first in the graph.
                *outcome = Some(plan.fault(&fault));
            }
        }
        status
    }

    /// The outcomes of all plans, whose state is that after `status`.
    fn end(self, status: RunStatus) -> Vec<Result<RunStatus, RunError>> {
        let mut lost = self.context.device.lost().is_some();
        let ended = self.plans.iter_mut().zip(self.outcomes);
        ended
            .map(|(plan, error)| match error {
                Some(RunError::Stale) => Err(RunError::Stale),
                Some(error) => {
                    plan.rewind();
                    // One line of the log is enough.
                    match std::mem::take(&mut lost) {
                        true => Err(plan.failed(error)),
                        false => Err(error),
                    }
                }
                None if status == RunStatus::Yielded => {
                    plan.has_yielded = true;
                    Ok(RunStatus::Yielded)
                }
                None => {
                    plan.rewind();
                    Ok(RunStatus::Done)
                }
            })
            .collect()
    }
}

impl CudaPlan {
    /// The node of the launch that the run has got to.
    fn next_node(&self) -> usize {
        self.sequence().map_or(0, |sequence| {
            let last = sequence.launches().len() - 1;
            sequence.node(sequence.done().min(last))
        })
    }

    /// Says that the run has got to this launch.
    fn resume_at(&mut self, done: usize) {
        if let [Split::Launches(sequence)] = &mut self.splits[..] {
            sequence.resume_at(done);
        }
    }
}
