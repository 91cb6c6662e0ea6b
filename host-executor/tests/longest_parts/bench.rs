//! The engine that runs the shapes, and the time of each launch.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vgpu_cpu::CpuEngine;
use vgpu_engine::work::{self, Work};
use vgpu_engine::{Engine, EngineError, Memory, RunStatus, Turn};
use vgpu_gguf::Rng;
use vgpu_transport::ir::{Limits, Node, ValidGraph, validate};

use crate::shapes::{DESTINATION, Shapes, graph};

/// The processor time of this thread.
fn now() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is writable, and the clock exists on every Linux.
    let outcome = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(outcome, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The engine and its buffers: numbers between 0 and 1 in the first, and zeros in the others, which
/// are valid indices. All pages have been written to. A cold bench takes new buffers, whose pages
/// nobody has written to, for each launch.
pub(crate) struct Bench {
    is_cold: bool,
    engine: CpuEngine,
    buffers: Vec<Arc<dyn Memory>>,
}

impl Bench {
    pub(crate) fn new(size: u64, is_cold: bool) -> Bench {
        let engine = CpuEngine::new(1, Some(14 << 30)).expect("a thread and memory");
        let buffers: Vec<Arc<dyn Memory>> = (0..=DESTINATION)
            .map(|_| engine.alloc(size).expect("memory"))
            .collect();
        for buffer in &buffers {
            buffer.fill(0, size, 0).expect("the buffer has this size");
        }
        let mut random = Rng::new(1, 0);
        let numbers: Vec<u8> = (0..1 << 20)
            .flat_map(|_| ((random.below(1 << 20) as f32) / (1 << 20) as f32).to_le_bytes())
            .collect();
        for at in (0..size).step_by(numbers.len()) {
            let part = &numbers[..numbers.len().min((size - at) as usize)];
            buffers[0]
                .write(at, part.into())
                .expect("the buffer has this size");
        }
        Bench {
            is_cold,
            engine,
            buffers,
        }
    }

    /// The valid graph with the greatest admitted length, and what it is.
    pub(crate) fn longest(&self, shapes: &Shapes, size: u64) -> Option<(u64, ValidGraph, Work)> {
        (10..=27).rev().find_map(|log| {
            let operation = (shapes.make)(1 << log)?;
            let valid = validate(
                graph(&operation),
                self.engine.capabilities(),
                &Limits::default(),
                |_| Some(size),
            )
            .ok()?;
            let speed = |node: &Node| self.engine.speed_of(valid.graph(), node);
            let limit = self.engine.max_node_time();
            work::check(valid.graph(), speed, limit).ok()?;
            let work = work::of(valid.graph(), &valid.graph().nodes[0]);
            Some((1 << log, valid, work))
        })
    }

    /// The processor time of each launch in a turn that is over, for `time` at most. A launch that
    /// fails, because a result of an earlier shape is no index, has a time as well.
    pub(crate) fn launches(
        &self,
        graph: &ValidGraph,
        time: Duration,
    ) -> Result<Vec<Duration>, EngineError> {
        let mut plan = self.engine.compile(graph, &self.buffers, &|| false)?;
        let turn = Turn::new();
        turn.set_end(Some(Duration::ZERO));
        let begin = Instant::now();
        let mut launches = Vec::new();
        loop {
            if self.is_cold {
                let new = self.buffers.iter().map(|old| self.engine.alloc(old.size()));
                let new = new.collect::<Result<Vec<_>, _>>()?;
                plan = self.engine.compile(graph, &new, &|| false)?;
            }
            let before = now();
            let status = plan.launch(&turn);
            launches.push(now() - before);
            match status {
                Ok(RunStatus::InFlight) => plan.wait().expect("the CPU engine has nothing left"),
                Ok(_) => {}
                Err(error) => {
                    println!("a run has failed: {error}");
                    return Ok(launches);
                }
            }
            if begin.elapsed() >= time {
                return Ok(launches);
            }
        }
    }
}
