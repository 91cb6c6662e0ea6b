//! Runs of launches as one: *steps*, whose blocks are all resident and wait for each other instead of ending
//! (`cuda/step.cuh`).
//!
//! What a plan does is compiled into launches first. Here the longest runs of launches that have a stage (`form`) become a
//! launch each, with a table of stages in device memory: what each does, and which others it waits for (`order`). A
//! launch that has none, or too many to wait for, ends the step before it. Steps that take long are cut where another plan
//! may run. The launches stay at hand: a device that refuses a step gets them.

mod form;
mod order;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::{debug, info};
use zerocopy::IntoBytes;

use super::device::Launch;
use super::memory::CudaMemory;
use super::params::*;
use super::segment::{Pace, Step};
use super::stream::Stream;
use vgpu_engine::EngineError;

pub(super) use form::Forms;
use form::{THREADS, Task};
use order::Order;

/// Fewest launches that are worth a step, and most that become one.
const LEAST_STAGES: usize = 4;
pub(super) const MOST_STAGES: usize = 1024;

/// Blocks of a multiprocessor that are tried, the most first: registers are enough for three.
const BLOCKS: [u32; 3] = [3, 2, 1];

/// Bytes of shared memory that a block takes beside what it is given: what the kernel declares, and what the device keeps.
const OWN_SHARED: u32 = 21 << 8;

/// Most pieces of weights on their way to a warp.
const MOST_PIECES: u32 = 12;

/// How long a byte of weights is on its way when all of the device's memory is busy, in microseconds: twice the latency.
const LATENCY: u64 = 2;

/// What a stage is taken to cost beside the bytes that it reads, in nanoseconds, and of memory's rate how much is used.
const STAGE_COST: f64 = 1500.0;
const RATE: f64 = 0.6;

/// What a rate that nobody knows is taken for.
const SOME_RATE: u64 = 1 << 40;

/// The launches of a plan, with steps for what can be one.
pub(super) struct Arranged {
    pub(super) steps: Vec<Step>,
    /// The tables of the steps.
    pub(super) memory: Vec<CudaMemory>,
}

/// Makes steps of launches. `ops` are the names of the graph's nodes.
pub(super) fn arrange(
    plain: &[Step],
    stream: &Arc<Stream>,
    ops: &[&'static str],
) -> Result<Arranged, EngineError> {
    let mut arranged = Arranged {
        steps: Vec::new(),
        memory: Vec::new(),
    };
    let Some(forms) = stream.forms.as_ref().filter(|_| stream.pace.steps) else {
        arranged.steps = plain.to_vec();
        return Ok(arranged);
    };
    let tasks: Vec<Result<Task, &'static str>> =
        plain.iter().map(|step| forms.task(step)).collect();
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
            .take(MOST_STAGES)
            .take_while(|task| task.is_ok())
            .count();
        let run = first..first + run;
        let tasks_of: Vec<&Task> = tasks[run.clone()].iter().flatten().collect();
        let costs: Vec<f64> = tasks_of.iter().map(|task| cost(task, stream)).collect();
        let count = end_of_step(&plain[run.clone()], &costs, stream.pace);
        let tasks_of = &tasks_of[..count];
        let touched: Vec<_> = tasks_of.iter().map(|task| &task.touched).collect();
        let order = order::order(&touched);
        // Anywhere: what follows a step comes right after.
        let count = order.len();
        let (tasks_of, order) = (&tasks_of[..count], &order[..count]);
        debug_assert_eq!(order::verify(&touched[..count], order), Ok(()));
        let step = match count < LEAST_STAGES {
            true => None,
            false => step(tasks_of, order, stream, forms)?,
        };
        match step {
            Some((launch, memory)) => {
                let last = &plain[first + count - 1];
                arranged.steps.push(Step {
                    launch,
                    node: plain[first].node,
                    may_stop: last.may_stop,
                    stands_for: count,
                });
                arranged.memory.push(memory);
            }
            None => {
                let few = count < LEAST_STAGES;
                let why = if few { TOO_FEW } else { NO_ROOM };
                ends.insert((ops[plain[first].node], why));
                let alone = &plain[first..first + count.max(1)];
                arranged.steps.extend_from_slice(alone);
            }
        }
        first += count.max(1);
    }
    stream.said.say(&arranged, plain.len(), &ends);
    Ok(arranged)
}

/// Why launches that have stages are no step.
const TOO_FEW: &str = "too few launches in a row have stages";
const NO_ROOM: &str = "the device has no room for blocks that wait for each other";

/// What has been said of plans that are not one step: a reason once, and not again for each plan that a grown cache makes.
#[derive(Default)]
pub(super) struct Said(Mutex<BTreeSet<String>>);

/// Most reasons that are remembered. A guest may send whatever graphs it likes.
const MOST_SAID: usize = 256;

impl Said {
    /// Says what became of a plan of so many launches: to whoever looks for what is slow, if some are in no step.
    fn say(&self, arranged: &Arranged, launches: usize, ends: &BTreeSet<(&str, &str)>) {
        let (all, steps) = (arranged.steps.len(), arranged.memory.len());
        let reasons: Vec<String> = { ends.iter() }
            .map(|(op, why)| format!("{op}: {why}"))
            .collect();
        let reasons = reasons.join("; ");
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ends.is_empty() || said.len() >= MOST_SAID || said.contains(&reasons) {
            debug!("{launches} launches of a plan as {all}, of which {steps} are steps {reasons}");
            return;
        }
        info!(
            "{launches} launches of a plan as {all}, of which {steps} are steps; not in a step are {reasons}"
        );
        said.insert(reasons);
    }
}

/// What a stage is taken to cost, in nanoseconds.
fn cost(task: &Task, stream: &Stream) -> f64 {
    let rate = match stream.device.bandwidth() {
        0 => SOME_RATE,
        rate => rate,
    };
    STAGE_COST + task.touched.bytes() as f64 * 1e9 / (RATE * rate as f64)
}

/// How many of these launches make a step, if those that belong together stay so: all, unless they take much longer than a
/// piece should.
fn end_of_step(steps: &[Step], costs: &[f64], pace: Pace) -> usize {
    let piece = pace.piece.as_nanos() as f64;
    if costs.iter().sum::<f64>() <= 2.0 * piece {
        return steps.len();
    }
    let mut taken = 0.0;
    for (at, cost) in costs.iter().enumerate() {
        taken += cost;
        if taken >= piece && steps[at].may_stop {
            return at + 1;
        }
    }
    steps.len()
}

/// Blocks, and bytes of shared memory of a block and of a warp's ring.
struct Layout {
    blocks: u32,
    shared: u32,
    ring: u32,
}

/// How a step of these stages lies on the device: as many blocks as leave enough room for weights on their way. `None` if
/// the device runs no such kernel, or has no room.
fn layout(tasks: &[&Task], stream: &Stream, forms: &Forms) -> Option<Layout> {
    let (device, kernel) = (&stream.device, forms.kernel(tasks));
    let most = |of: fn(&Task) -> u32| tasks.iter().map(|task| of(task)).max().unwrap_or(0);
    let (arena, slot) = (most(|task| task.arena), most(Task::slot));
    // Tiles are read in 16 bytes.
    let arena = arena.next_multiple_of(16);
    let rate = device.bandwidth().max(1);
    let wanted = rate * LATENCY / 1_000_000 / u64::from(device.multiprocessors().max(1));
    let warps = THREADS / 32;
    let mut best: Option<(u64, Layout)> = None;
    for each in BLOCKS {
        let given = (device.multiprocessor_shared() / each).saturating_sub(OWN_SHARED);
        let given = given.min(device.most_shared());
        let ring = (given.saturating_sub(arena) / warps) & !15;
        let ring = ring.min(MOST_PIECES * slot);
        if ring < slot {
            continue;
        }
        let shared = arena + warps * ring;
        let blocks = device.resident_blocks(kernel, THREADS, shared);
        let on_each = blocks / device.multiprocessors().max(1);
        let under_way = u64::from(on_each.max(1)) * u64::from(warps * ring);
        let layout = Layout {
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
    tasks: &[&Task],
    order: &[Order],
    stream: &Arc<Stream>,
    forms: &Forms,
) -> Result<Option<(Launch, CudaMemory)>, EngineError> {
    let Some(layout) = layout(tasks, stream, forms) else {
        return Ok(None);
    };
    let bytes = table(tasks, order, layout.blocks);
    let memory = CudaMemory::new(&stream.pool, bytes.len() as u64)?;
    vgpu_engine::Memory::write(&memory, 0, bytes.as_slice().into())?;
    let params = VgStagesParams {
        table: memory.address(),
        counters: stream.step_counters(),
        stages: tasks.len() as u32,
        products: next_products(tasks, 0),
        beginning: size_of_stage(tasks, 0),
        ring: layout.ring,
    };
    let launch = Launch {
        kernel: forms.kernel(tasks),
        grid: [layout.blocks, 1, 1],
        threads: [THREADS, 1, 1],
        shared: layout.shared,
        params: params.as_bytes().to_vec(),
        together: true,
    };
    Ok(Some((launch, memory)))
}

/// The first stage from `from` on that has products.
fn next_products(tasks: &[&Task], from: usize) -> u32 {
    let mut behind = tasks[from..].iter();
    let found = behind.position(|task| task.weights.is_some());
    found.map_or(tasks.len(), |found| from + found) as u32
}

/// Bytes of a stage with its parameters, in whole 16; 0 behind the last.
fn size_of_stage(tasks: &[&Task], at: usize) -> u32 {
    tasks.get(at).map_or(0, |task| {
        (size_of::<VgStage>() + task.params.len()).next_multiple_of(16) as u32
    })
}

/// The table of a step of so many blocks.
fn table(tasks: &[&Task], order: &[Order], blocks: u32) -> Vec<u8> {
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

/// Bytes of counters of a step: one for the launch and one for each stage.
pub(super) const COUNTER_BYTES: u64 =
    (MOST_STAGES as u64 + 1) * VG_COUNTER_STEP as u64 * size_of::<u32>() as u64;
