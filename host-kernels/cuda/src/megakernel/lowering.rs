//! Lowers runs of launches to megakernels: cooperative launches that run a table of stages
//! (`kernels/megakernel.cuh`).
//!
//! A plan is compiled to launches first. The longest runs of launches that have a stage (`stages`)
//! then become one launch each. The stage table of a megakernel, in device memory, says what each
//! stage does and which stages it waits for (`deps`). A launch without a stage, or with too many
//! dependencies, ends a megakernel. Long megakernels are cut where another plan may run. The plan
//! keeps the launches for a device that refuses a megakernel.

use std::collections::BTreeSet;
use std::sync::Arc;

use zerocopy::IntoBytes;

use crate::context::ExecutionContext;
use crate::device::Launch;
use crate::launch::planned::PlannedLaunch;
use crate::launch::policy::LaunchPolicy;
use crate::megakernel::stages::{MAX_STAGES, StageKernels};
use crate::memory::CudaMemory;
use crate::params::*;
use vgpu_engine::EngineError;

use super::deps::{self, StageDeps};
use super::no_stage::NoStage;
use super::stages::{Stage, THREADS};

/// Blocks per SM to try, the most first. The registers of an SM are enough for three.
const BLOCKS: [u32; 3] = [3, 2, 1];

/// Bytes of shared memory that a block takes beyond its dynamic shared memory: the static shared
/// memory of the kernel, and 1 KiB that CUDA reserves.
const OWN_SHARED: u32 = 21 << 8;

/// The most chunks of weights in the ring of a warp.
const MAX_PIECES: u32 = 12;

/// The time in microseconds from a request for weights to their arrival under full load: twice the
/// latency of global memory.
const LATENCY: u64 = 2;

/// The estimated cost of a stage in nanoseconds without its memory traffic, and the fraction of the
/// memory bandwidth that a stage reaches.
const STAGE_COST: f64 = 1500.0;
const BANDWIDTH_SHARE: f64 = 0.6;

/// The bandwidth in bytes per second that is assumed if it is unknown.
const DEFAULT_BANDWIDTH: u64 = 1 << 40;

/// The launches of a plan after lowering.
pub(crate) struct Lowering {
    pub(crate) launches: Vec<PlannedLaunch>,
    /// The stage tables of the megakernels.
    pub(crate) tables: Vec<CudaMemory>,
}

/// Lowers launches. `ops` are the names of the graph's nodes.
///
/// # Errors
/// [`EngineError::OutOfMemory`] if there is no memory for a stage table.
pub(crate) fn lower(
    plain: &[PlannedLaunch],
    context: &Arc<ExecutionContext>,
    ops: &[&'static str],
) -> Result<Lowering, EngineError> {
    let mut lowering = Lowering {
        launches: Vec::new(),
        tables: Vec::new(),
    };
    let Some(stage_kernels) = context.stage_kernels() else {
        lowering.launches = plain.to_vec();
        return Ok(lowering);
    };
    let stages: Vec<Result<Stage, NoStage>> =
        plain.iter().map(|step| stage_kernels.stage(step)).collect();
    // The reasons for launches outside a megakernel, by operator.
    let mut ends: BTreeSet<(&str, NoStage)> = BTreeSet::new();
    let mut first = 0;
    while first < plain.len() {
        if let Err(why) = &stages[first] {
            ends.insert((ops[plain[first].node], *why));
            lowering.launches.push(plain[first].clone());
            first += 1;
            continue;
        }
        let run = { stages[first..].iter() }
            .take(MAX_STAGES)
            .take_while(|stage| stage.is_ok())
            .count();
        let run = first..first + run;
        let stages_of: Vec<&Stage> = stages[run.clone()].iter().flatten().collect();
        let costs: Vec<f64> = stages_of.iter().map(|stage| cost(stage, context)).collect();
        let count = launches_to_take(&plain[run.clone()], &costs, context.policy);
        let stages_of = &stages_of[..count];
        let access: Vec<_> = stages_of.iter().map(|stage| &stage.access).collect();
        let order = deps::order(&access);
        // No launch boundary is needed here: the rest follows directly.
        let count = order.len();
        let (stages_of, order) = (&stages_of[..count], &order[..count]);
        debug_assert_eq!(deps::verify(&access[..count], order), Ok(()));
        let step = match count < context.policy.min_stages {
            true => None,
            false => build_launch(stages_of, order, context, stage_kernels)?,
        };
        match step {
            Some((launch, memory)) => {
                let last = &plain[first + count - 1];
                lowering.launches.push(PlannedLaunch {
                    launch,
                    node: plain[first].node,
                    may_yield: last.may_yield,
                    is_long: plain[first..first + count].iter().any(|step| step.is_long),
                    covers: count,
                });
                lowering.tables.push(memory);
            }
            None => {
                let few = count < context.policy.min_stages;
                let why = if few {
                    NoStage::TooFewStages
                } else {
                    NoStage::NoRoom
                };
                ends.insert((ops[plain[first].node], why));
                let alone = &plain[first..first + count.max(1)];
                lowering.launches.extend_from_slice(alone);
            }
        }
        first += count.max(1);
    }
    context.reported.log(
        plain.len(),
        lowering.launches.len(),
        lowering.tables.len(),
        &ends,
    );
    Ok(lowering)
}

/// The estimated cost of a stage in nanoseconds.
fn cost(stage: &Stage, context: &ExecutionContext) -> f64 {
    let rate = match context.device.memory_bandwidth() {
        0 => DEFAULT_BANDWIDTH,
        rate => rate,
    };
    STAGE_COST + stage.access.bytes() as f64 * 1e9 / (BANDWIDTH_SHARE * rate as f64)
}

/// How many of these launches become one megakernel: all, or as many as take one time slice, up to
/// a launch that may yield, if all of them take longer than two.
fn launches_to_take(steps: &[PlannedLaunch], costs: &[f64], policy: LaunchPolicy) -> usize {
    let time_slice = policy.time_slice.as_nanos() as f64;
    if costs.iter().sum::<f64>() <= 2.0 * time_slice {
        return steps.len();
    }
    let mut taken = 0.0;
    for (at, cost) in costs.iter().enumerate() {
        taken += cost;
        if taken >= time_slice && steps[at].may_yield {
            return at + 1;
        }
    }
    steps.len()
}

/// Blocks of a launch, bytes of dynamic shared memory of a block, and bytes of a warp's ring.
struct LaunchConfig {
    blocks: u32,
    shared: u32,
    ring: u32,
}

/// The launch configuration for these stages: the most blocks per SM that leave enough shared
/// memory to keep the memory busy with weights. `None` if the device has no megakernel, or no room.
fn launch_config(
    stages: &[&Stage],
    context: &ExecutionContext,
    stage_kernels: &StageKernels,
) -> Option<LaunchConfig> {
    let (device, kernel) = (&context.device, stage_kernels.kernel(stages));
    let most = |of: fn(&Stage) -> u32| stages.iter().map(|stage| of(stage)).max().unwrap_or(0);
    let (arena, slot) = (most(|stage| stage.arena), most(Stage::slot));
    // Tiles are read in units of 16 bytes.
    let arena = arena.next_multiple_of(16);
    let rate = device.memory_bandwidth().max(1);
    let wanted = rate * LATENCY / 1_000_000 / u64::from(device.sm_count().max(1));
    let warps = THREADS / 32;
    let mut best: Option<(u64, LaunchConfig)> = None;
    for each in BLOCKS {
        let given = (device.shared_per_sm() / each).saturating_sub(OWN_SHARED);
        let given = given.min(device.max_dynamic_shared(kernel));
        let ring = (given.saturating_sub(arena) / warps) & !15;
        let ring = ring.min(MAX_PIECES * slot);
        if ring < slot {
            continue;
        }
        let shared = arena + warps * ring;
        let blocks = device.max_cooperative_blocks(kernel, THREADS, shared);
        let on_each = blocks / device.sm_count().max(1);
        let under_way = u64::from(on_each.max(1)) * u64::from(warps * ring);
        let layout = LaunchConfig {
            blocks,
            shared,
            ring,
        };
        if blocks > 0 && best.as_ref().is_none_or(|(most, _)| under_way > *most) {
            best = Some((under_way, layout));
        }
        if best.as_ref().is_some_and(|(most, _)| *most >= wanted) {
            break;
        }
    }
    best.map(|(_, layout)| layout)
}

/// The launch of a megakernel, and its stage table.
///
/// # Errors
/// [`EngineError::OutOfMemory`] if there is no memory for the stage table.
fn build_launch(
    stages: &[&Stage],
    order: &[StageDeps],
    context: &Arc<ExecutionContext>,
    stage_kernels: &StageKernels,
) -> Result<Option<(Launch, CudaMemory)>, EngineError> {
    let Some(layout) = launch_config(stages, context, stage_kernels) else {
        return Ok(None);
    };
    let bytes = table(stages, order, layout.blocks);
    let memory = CudaMemory::new(&context.allocator, bytes.len() as u64)?;
    vgpu_engine::Memory::write(&memory, 0, bytes.as_slice().into())?;
    let params = VgMegakernelParams {
        table: memory.address(),
        counters: context.megakernel_counters(),
        stages: stages.len() as u32,
        products: next_products(stages, 0),
        first_stage_bytes: size_of_stage(stages, 0),
        ring: layout.ring,
    };
    let launch = Launch {
        kernel: stage_kernels.kernel(stages),
        grid: [layout.blocks, 1, 1],
        threads: [THREADS, 1, 1],
        shared: layout.shared,
        params: params.as_bytes().to_vec(),
        cooperative: true,
    };
    Ok(Some((launch, memory)))
}

/// The first stage from `from` on with products.
fn next_products(stages: &[&Stage], from: usize) -> u32 {
    let mut behind = stages[from..].iter();
    let found = behind.position(|stage| stage.weights.is_some());
    found.map_or(stages.len(), |found| from + found) as u32
}

/// Bytes of a stage with its parameters, a multiple of 16; 0 behind the last stage.
fn size_of_stage(stages: &[&Stage], at: usize) -> u32 {
    stages.get(at).map_or(0, |stage| {
        (size_of::<VgStage>() + stage.params.len()).next_multiple_of(16) as u32
    })
}

/// The stage table for this number of blocks.
fn table(stages: &[&Stage], order: &[StageDeps], blocks: u32) -> Vec<u8> {
    let mut bytes = vec![0; stages.len() * VG_STAGE_BYTES as usize];
    // Work items go to blocks round-robin, from stage to stage.
    let mut first = 0;
    let entries = bytes.chunks_exact_mut(VG_STAGE_BYTES as usize);
    for (at, (stage, bytes)) in stages.iter().zip(entries).enumerate() {
        let mut entry = VgStage {
            op: stage.body,
            type_: stage.weights.unwrap_or(0),
            grid: stage.grid,
            total: stage.total,
            first,
            waits: order[at].waits.len() as u32,
            next: next_products(stages, at + 1),
            from: order[at].from as u32,
            next_stage_bytes: size_of_stage(stages, at + 1),
            ..VgStage::default()
        };
        for (to, &wait) in entry.wait.iter_mut().zip(&order[at].waits) {
            *to = VgWait {
                stage: wait as u32,
                count: stages[wait].total.min(blocks),
            };
        }
        first = (first + stage.total % blocks) % blocks;
        let (head, tail) = bytes.split_at_mut(size_of::<VgStage>());
        head.copy_from_slice(entry.as_bytes());
        tail[..stage.params.len()].copy_from_slice(&stage.params);
    }
    bytes
}
