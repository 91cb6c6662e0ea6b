//! Runs of launches as one: *steps*, whose blocks are all resident and wait for each other instead of ending
//! (`cuda/megakernel.cuh`).
//!
//! What a plan does is compiled into launches first. Here the longest runs of launches that have a stage (`stage_kernel`) become a
//! launch each, with a table of stages in device memory: what each does, and which others it waits for (`order`). A
//! launch that has none, or too many to wait for, ends the step before it. Steps that take long are cut where another plan
//! may run. The launches stay at hand: a device that refuses a step gets them.

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
use super::stages::{Stage, THREADS};

/// Fewest launches that are worth a step.
const MIN_STAGES: usize = 4;

/// Blocks of a multiprocessor that are tried, the most first: registers are enough for three.
const BLOCKS: [u32; 3] = [3, 2, 1];

/// Bytes of shared memory that a block takes beside what it is given: what the kernel declares, and what the device keeps.
const OWN_SHARED: u32 = 21 << 8;

/// Most pieces of weights on their way to a warp.
const MAX_PIECES: u32 = 12;

/// How long a byte of weights is on its way when all of the device's memory is busy, in microseconds: twice the latency.
const LATENCY: u64 = 2;

/// What a stage is taken to cost beside the bytes that it reads, in nanoseconds, and of memory's rate how much is used.
const STAGE_COST: f64 = 1500.0;
const RATE: f64 = 0.6;

/// What a rate that nobody knows is taken for.
const SOME_RATE: u64 = 1 << 40;

/// The launches of a plan, with steps for what can be one.
pub(crate) struct Lowering {
    pub(crate) steps: Vec<PlannedLaunch>,
    /// The tables of the steps.
    pub(crate) memory: Vec<CudaMemory>,
}

/// Makes steps of launches. `ops` are the names of the graph's nodes.
pub(crate) fn arrange(
    plain: &[PlannedLaunch],
    context: &Arc<ExecutionContext>,
    ops: &[&'static str],
) -> Result<Lowering, EngineError> {
    let mut arranged = Lowering {
        steps: Vec::new(),
        memory: Vec::new(),
    };
    let Some(stage_kernels) = context
        .stage_kernels
        .as_ref()
        .filter(|_| context.policy.megakernel)
    else {
        arranged.steps = plain.to_vec();
        return Ok(arranged);
    };
    let tasks: Vec<Result<Stage, &'static str>> =
        plain.iter().map(|step| stage_kernels.task(step)).collect();
    // Why launches are in no step, by operator.
    let mut ends: BTreeSet<(&str, &str)> = BTreeSet::new();
    let mut first = 0;
    while first < plain.len() {
        if let Err(why) = &tasks[first] {
            ends.insert((ops[plain[first].node], why));
            arranged.steps.push(plain[first].clone());
            first += 1;
            continue;
        }
        let run = { tasks[first..].iter() }
            .take(MAX_STAGES)
            .take_while(|task| task.is_ok())
            .count();
        let run = first..first + run;
        let tasks_of: Vec<&Stage> = tasks[run.clone()].iter().flatten().collect();
        let costs: Vec<f64> = tasks_of.iter().map(|task| cost(task, context)).collect();
        let count = end_of_step(&plain[run.clone()], &costs, context.policy);
        let tasks_of = &tasks_of[..count];
        let access: Vec<_> = tasks_of.iter().map(|task| &task.access).collect();
        let order = deps::order(&access);
        // Anywhere: what follows a step comes right after.
        let count = order.len();
        let (tasks_of, order) = (&tasks_of[..count], &order[..count]);
        debug_assert_eq!(deps::verify(&access[..count], order), Ok(()));
        let step = match count < MIN_STAGES {
            true => None,
            false => step(tasks_of, order, context, stage_kernels)?,
        };
        match step {
            Some((launch, memory)) => {
                let last = &plain[first + count - 1];
                arranged.steps.push(PlannedLaunch {
                    launch,
                    node: plain[first].node,
                    may_yield: last.may_yield,
                    covers: count,
                });
                arranged.memory.push(memory);
            }
            None => {
                let few = count < MIN_STAGES;
                let why = if few { TOO_FEW } else { NO_ROOM };
                ends.insert((ops[plain[first].node], why));
                let alone = &plain[first..first + count.max(1)];
                arranged.steps.extend_from_slice(alone);
            }
        }
        first += count.max(1);
    }
    context.reported.say(
        plain.len(),
        arranged.steps.len(),
        arranged.memory.len(),
        &ends,
    );
    Ok(arranged)
}

/// Why launches that have stages are no step.
const TOO_FEW: &str = "too few launches in a row have stages";
const NO_ROOM: &str = "the device has no room for blocks that wait for each other";

/// What a stage is taken to cost, in nanoseconds.
fn cost(task: &Stage, context: &ExecutionContext) -> f64 {
    let rate = match context.device.memory_bandwidth() {
        0 => SOME_RATE,
        rate => rate,
    };
    STAGE_COST + task.access.bytes() as f64 * 1e9 / (RATE * rate as f64)
}

/// How many of these launches make a step, if those that belong together stay so: all, unless they take much longer than a
/// piece should.
fn end_of_step(steps: &[PlannedLaunch], costs: &[f64], policy: LaunchPolicy) -> usize {
    let piece = policy.time_slice.as_nanos() as f64;
    if costs.iter().sum::<f64>() <= 2.0 * piece {
        return steps.len();
    }
    let mut taken = 0.0;
    for (at, cost) in costs.iter().enumerate() {
        taken += cost;
        if taken >= piece && steps[at].may_yield {
            return at + 1;
        }
    }
    steps.len()
}

/// Blocks, and bytes of shared memory of a block and of a warp's ring.
struct LaunchConfig {
    blocks: u32,
    shared: u32,
    ring: u32,
}

/// How a step of these stages lies on the device: as many blocks as leave enough room for weights on their way. `None` if
/// the device runs no such kernel, or has no room.
fn layout(
    tasks: &[&Stage],
    context: &ExecutionContext,
    stage_kernels: &StageKernels,
) -> Option<LaunchConfig> {
    let (device, kernel) = (&context.device, stage_kernels.kernel(tasks));
    let most = |of: fn(&Stage) -> u32| tasks.iter().map(|task| of(task)).max().unwrap_or(0);
    let (arena, slot) = (most(|task| task.arena), most(Stage::slot));
    // Tiles are read in 16 bytes.
    let arena = arena.next_multiple_of(16);
    let rate = device.memory_bandwidth().max(1);
    let wanted = rate * LATENCY / 1_000_000 / u64::from(device.sm_count().max(1));
    let warps = THREADS / 32;
    let mut best: Option<(u64, LaunchConfig)> = None;
    for each in BLOCKS {
        let given = (device.shared_per_sm() / each).saturating_sub(OWN_SHARED);
        let given = given.min(device.max_shared_per_block());
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

/// The launch of a step and its table.
fn step(
    tasks: &[&Stage],
    order: &[StageDeps],
    context: &Arc<ExecutionContext>,
    stage_kernels: &StageKernels,
) -> Result<Option<(Launch, CudaMemory)>, EngineError> {
    let Some(layout) = layout(tasks, context, stage_kernels) else {
        return Ok(None);
    };
    let bytes = table(tasks, order, layout.blocks);
    let memory = CudaMemory::new(&context.allocator, bytes.len() as u64)?;
    vgpu_engine::Memory::write(&memory, 0, bytes.as_slice().into())?;
    let params = VgMegakernelParams {
        table: memory.address(),
        counters: context.step_counters(),
        stages: tasks.len() as u32,
        products: next_products(tasks, 0),
        beginning: size_of_stage(tasks, 0),
        ring: layout.ring,
    };
    let launch = Launch {
        kernel: stage_kernels.kernel(tasks),
        grid: [layout.blocks, 1, 1],
        threads: [THREADS, 1, 1],
        shared: layout.shared,
        params: params.as_bytes().to_vec(),
        cooperative: true,
    };
    Ok(Some((launch, memory)))
}

/// The first stage from `from` on that has products.
fn next_products(tasks: &[&Stage], from: usize) -> u32 {
    let mut behind = tasks[from..].iter();
    let found = behind.position(|task| task.weights.is_some());
    found.map_or(tasks.len(), |found| from + found) as u32
}

/// Bytes of a stage with its parameters, in whole 16; 0 behind the last.
fn size_of_stage(tasks: &[&Stage], at: usize) -> u32 {
    tasks.get(at).map_or(0, |task| {
        (size_of::<VgStage>() + task.params.len()).next_multiple_of(16) as u32
    })
}

/// The table of a step of so many blocks.
fn table(tasks: &[&Stage], order: &[StageDeps], blocks: u32) -> Vec<u8> {
    let mut bytes = vec![0; tasks.len() * VG_STAGE_BYTES as usize];
    // Work is dealt out to blocks in turn, from stage to stage.
    let mut first = 0;
    let places = bytes.chunks_exact_mut(VG_STAGE_BYTES as usize);
    for (at, (task, place)) in tasks.iter().zip(places).enumerate() {
        let mut stage = VgStage {
            body: task.body,
            type_: task.weights.unwrap_or(0),
            grid: task.grid,
            total: task.total,
            first,
            waits: order[at].waits.len() as u32,
            next: next_products(tasks, at + 1),
            from: order[at].from as u32,
            following: size_of_stage(tasks, at + 1),
            ..VgStage::default()
        };
        for (to, &wait) in stage.wait.iter_mut().zip(&order[at].waits) {
            *to = VgWait {
                stage: wait as u32,
                count: tasks[wait].total.min(blocks),
            };
        }
        first = (first + task.total % blocks) % blocks;
        let (head, tail) = place.split_at_mut(size_of::<VgStage>());
        head.copy_from_slice(stage.as_bytes());
        tail[..task.params.len()].copy_from_slice(&task.params);
    }
    bytes
}
