//! FILL and COPY of many bytes: in parts, in turns on the engine like those of a graph, so that
//! other guests run between two parts and the tenant is charged.

use std::sync::Arc;

use vgpu_engine::{EngineError, Memory, Plan, RunError, RunStatus, Turn};
use vgpu_transport::bytes::BytesMut;
use vgpu_transport::ir::BufferId;
use vgpu_transport::link::HostEnd;

use super::answer::{Answer, done};
use super::end_check::EndCheck;
use super::error::SessionEnd;
use super::state::{Session, observe_turn};
use crate::activity::{GraphInfo, ThreadState};
use crate::sched::RunState;
use crate::stats::RequestKind;
use crate::stop::StopFlag;

/// Bytes of a part: a millisecond or two on a CPU. On a device with memory of its own, a request of
/// at most so many bytes takes no turn: it is queued on the device, and the host has no work.
pub(super) const PART: u64 = 4 << 20;

/// Bytes of a request that takes no turn on an engine in host memory: some microseconds.
const MAX_WITHOUT_TURN: u64 = 64 << 10;

/// What happens to a range of a buffer.
pub(super) enum Bulk {
    /// Its bytes are set.
    Fill { value: u8 },
    /// Bytes of this memory, from this offset on, are copied to it.
    Copy { source: Arc<dyn Memory>, from: u64 },
}

/// A range of a buffer that is filled, or copied to.
pub(super) struct Transfer {
    bulk: Bulk,
    memory: Arc<dyn Memory>,
    offset: u64,
    len: u64,
    /// Bytes that are done.
    done: u64,
    /// Whether the last bytes come first: the source overlaps the range and lies before it.
    is_backward: bool,
    error: Option<EngineError>,
}

impl Transfer {
    /// A range that has been checked, as that of the source.
    pub(super) fn new(bulk: Bulk, memory: &Arc<dyn Memory>, offset: u64, len: u64) -> Transfer {
        let is_backward = match &bulk {
            Bulk::Fill { .. } => false,
            Bulk::Copy { source, from } => Arc::ptr_eq(source, memory) && *from < offset,
        };
        Transfer {
            bulk,
            memory: Arc::clone(memory),
            offset,
            len,
            done: 0,
            is_backward,
            error: None,
        }
    }

    /// Gives the range bytes of its own where it shares them with other buffers, so that no part
    /// copies more than its own bytes.
    ///
    /// # Errors
    /// What the engine reports, and [`EngineError::Cancelled`] once `is_cancelled` has returned
    /// `true`.
    fn unshare(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), EngineError> {
        let (mut at, mut len) = (self.offset, self.len);
        if len == 0 {
            return Ok(());
        }
        if let Bulk::Copy { source, from } = &self.bulk
            && Arc::ptr_eq(source, &self.memory)
            && from.abs_diff(at) < len
        {
            // Ranges that overlap have to be contiguous together.
            (at, len) = (at.min(*from), len + from.abs_diff(at));
        }
        self.memory.unshare(at, len, is_cancelled)
    }

    /// Does the next part.
    fn part(&mut self) -> Result<(), EngineError> {
        let len = (self.len - self.done).min(PART);
        let begin = match self.is_backward {
            true => self.len - self.done - len,
            false => self.done,
        };
        let at = self.offset + begin;
        self.done += len;
        match &self.bulk {
            Bulk::Fill { value } => self.memory.fill(at, len, *value),
            Bulk::Copy { source, from } => {
                { &self.memory }.copy_from(at, source.as_ref(), from + begin, len)
            }
        }
    }

    /// Waits for a device that works asynchronously: a read comes after all earlier work.
    fn wait_for_device(&self) -> Result<(), EngineError> {
        let mut byte = [0];
        self.memory.read(self.offset, BytesMut::from(&mut byte[..]))
    }
}

impl Plan for Transfer {
    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        while self.done < self.len {
            if let Err(error) = self.part().and_then(|()| self.wait_for_device()) {
                self.error = Some(error);
                break;
            }
            if self.done < self.len && turn.is_over() {
                return Ok(RunStatus::Yielded);
            }
        }
        Ok(RunStatus::Done)
    }

    fn plan_bytes(&self) -> u64 {
        size_of::<Transfer>() as u64
    }
}

impl Session {
    /// Carries out a FILL or a COPY. The end of the guest and `stop` end it between two parts.
    /// Bytes that the range shares with other buffers are copied before, outside of a turn.
    pub(super) fn transfer(
        &mut self,
        (request, kind): (u64, RequestKind),
        buffer: BufferId,
        mut transfer: Transfer,
        link: &mut dyn HostEnd,
        stop: &StopFlag,
    ) -> Result<Answer, SessionEnd> {
        let end_check = EndCheck::new(link, stop);
        let (activity, counters) = (&self.activity, &self.counters);
        let state = ThreadState::Executes;
        let unshared = transfer.unshare(&|| self.outside.is_over(activity, state, &end_check));
        end_check.check()?;
        let most = match self.engine.is_host_memory() {
            true => MAX_WITHOUT_TURN,
            false => PART,
        };
        if unshared.is_err() || transfer.len <= most {
            let outcome = unshared.and_then(|()| match transfer.len {
                0 => Ok(()),
                _ => transfer.part(),
            });
            return Ok(done(request, kind.name(), buffer, outcome));
        }
        let info = GraphInfo::default();
        let observe = |turning| observe_turn(activity, counters, (request, kind), &info, turning);
        let (tenant, entitlement) = (self.tenant.id(), self.tenant.entitlement());
        let is_cancelled = || end_check.is_near();
        match { &self.scheduler }.run(tenant, entitlement, &mut transfer, observe, is_cancelled) {
            RunState::Cancelled(_) => Err(end_check.check().err().unwrap_or(SessionEnd::Shutdown)),
            RunState::Done(..) | RunState::InFlight(_) => {
                let outcome = transfer.error.map_or(Ok(()), Err);
                Ok(done(request, kind.name(), buffer, outcome))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vgpu_cpu::CpuEngine;
    use vgpu_engine::Engine;
    use vgpu_transport::bytes::Bytes;
    use vgpu_transport::link::window::inproc_pair;
    use vgpu_transport::wire::Request;

    use super::*;
    use crate::limits::Limits;

    const LEN: u64 = 2 * PART + 12_345;

    /// Does a transfer in turns that are over at once. Returns the bytes afterwards.
    fn in_parts(memory: &Arc<dyn Memory>, mut transfer: Transfer) -> Vec<u8> {
        let over = Turn::new();
        over.set_end(Some(Duration::ZERO));
        for _ in 0..2 {
            assert_eq!(transfer.launch(&over), Ok(RunStatus::Yielded));
        }
        assert_eq!(transfer.launch(&over), Ok(RunStatus::Done));
        assert_eq!(transfer.error, None);
        let mut bytes = vec![0; memory.size() as usize];
        memory
            .read(0, BytesMut::from(&mut bytes[..]))
            .expect("all of it");
        bytes
    }

    #[test]
    fn a_turn_ends_between_two_parts_and_the_bytes_are_those_of_one_part() {
        let engine = CpuEngine::new(1, Some(64 << 20)).expect("a thread and 64 MiB");
        let size = LEN + PART + 1000;
        let pattern: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
        let memory = engine.alloc(size).expect("16 MiB");
        let fresh = || memory.write(0, Bytes::from(&pattern[..])).expect("it fits");
        fresh();
        let fill = Transfer::new(Bulk::Fill { value: 7 }, &memory, 500, LEN);
        let mut want = pattern.clone();
        want[500..][..LEN as usize].fill(7);
        assert!(in_parts(&memory, fill) == want, "FILL");
        // Overlapping both ways, by less and by more than a part.
        for (to, from) in [(0, 1000), (1000, 0), (PART + 1000, 0), (0, PART + 1000)] {
            fresh();
            let bulk = Bulk::Copy {
                source: Arc::clone(&memory),
                from,
            };
            let copy = Transfer::new(bulk, &memory, to, LEN);
            let mut want = pattern.clone();
            want.copy_within(from as usize..(from + LEN) as usize, to as usize);
            assert!(in_parts(&memory, copy) == want, "COPY {from} to {to}");
        }
    }

    /// A session that is to end, with its request: the bytes of others are not copied first.
    #[test]
    fn cancellation_ends_the_copy_of_shared_bytes_before_a_request() {
        let engine: Arc<CpuEngine> =
            Arc::new(CpuEngine::new(1, Some(64 << 20)).expect("a thread and 64 MiB"));
        let size = 4 * PART;
        let memory = engine.alloc(size).expect("16 MiB");
        let weights = engine.alloc_weights(&memory).expect("16 MiB");
        let weights = weights.expect("memory for weights");
        weights.freeze();
        let _in_use = weights.extent(0, size).expect("all of it");
        let (_guest, mut link) = inproc_pair().expect("memory for a window");
        let stop = StopFlag::new();
        stop.set();
        let buffer = BufferId(1);
        let kind = RequestKind::of(&Request::Fill {
            buffer,
            offset: 0,
            len: 1,
            value: 7,
        });
        for len in [1, PART, PART + 1] {
            let mut session = Session::new(1, Arc::clone(&engine) as _, Limits::default());
            let fill = Transfer::new(Bulk::Fill { value: 7 }, &weights, 0, len);
            let end = session.transfer((1, kind), buffer, fill, &mut link, &stop);
            assert!(matches!(end, Err(SessionEnd::Shutdown)), "{len} bytes");
            assert!(weights.is_unmodified(), "{len} bytes");
        }
    }
}
