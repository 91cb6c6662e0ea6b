//! What each request does, except those on weights.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use tracing::{debug, info, trace};
use vgpu_engine::{EngineError, RunError, SharedMemory};
use vgpu_transport::bytes::Bytes;
use vgpu_transport::ir::BufferId;
use vgpu_transport::link::HostEnd;
use vgpu_transport::wire::{
    DeviceIndex, GraphId, HostVersions, MAX_PAYLOAD, Offer, ProtocolVersion, Reply, Request,
    VersionRange,
};

use super::answer::{Answer, ReadRange, Submitted, done, failed, refused};
use super::bulk::{Bulk, Transfer};
use super::end_check::EndCheck;
use super::error::{AllocError, RejectReason, SessionEnd, Violation};
use super::graphs::{CompileContext, GraphStatus, ImageResult};
use super::state::{MODEL_SCALE, Session, observe_turn};
use crate::activity::ThreadState;
use crate::lock::expect_unlocked;
use crate::sched::{Batchable, RunState, Times};
use crate::stats::{RequestKind, SUBMIT};
use crate::stop::StopFlag;

/// Longest guest name that is kept, in characters.
const MAX_NAME_CHARS: usize = 200;

/// What the description of a device ends with if the host has a GPU that no engine uses. Not the
/// name of the GPU, which a program could take for that of the device.
const UNUSED_GPU: &str = "; a GPU of the host is not used";

/// The version of a session with a guest that offers this.
///
/// # Errors
/// [`Violation::Protocol`] without a version in common, [`Violation::Ir`] if the offer contradicts
/// itself.
fn agree(offer: Offer) -> Result<ProtocolVersion, Violation> {
    let protocol = offer.choose()?;
    // The version of graph images is that of the newest version, which the host may not know.
    let is_newest = offer.versions.newest() == protocol.number();
    if is_newest && offer.ir != protocol.ir() {
        let guest = offer.ir;
        return Err(Violation::Ir { guest, protocol });
    }
    Ok(protocol)
}

impl Session {
    /// Carries out a request.
    pub(super) fn perform(
        &mut self,
        request: u64,
        message: Request,
        link: &mut dyn HostEnd,
        stop: &StopFlag,
    ) -> Result<Answer, SessionEnd> {
        let payload = link.payload();
        let of_message = RequestKind::of(&message);
        self.counters.request(of_message);
        let state = match of_message.compiles() {
            true => ThreadState::Compiles,
            false => ThreadState::Executes,
        };
        self.activity.request(state, of_message, request);
        let kind = of_message.name();
        trace!(request, kind, payload = payload.len(), "request");
        self.check(kind, &message, payload)?;
        if self.weights.has_uploads() {
            let end_check = EndCheck::new(link, stop);
            let finished = self.finish_uploads_early(&message, &end_check);
            end_check.check()?;
            if let Err((buffer, error)) = finished {
                return Ok(failed(request, kind, buffer.0, &error));
            }
            self.activity.continue_request(state);
        }
        let payload = link.payload();
        match message {
            Request::Hello {
                offer,
                name,
                device,
            } => self.hello(offer, &name, device),
            Request::Alloc { buffer, size } => self.alloc(request, buffer, size),
            Request::Free { buffer } => {
                self.buffers.remove(buffer)?;
                self.weights.forget(buffer);
                self.graphs.forget_users(buffer);
                debug!(buffer = buffer.0, "freed");
                self.update_gauges();
                Ok(Answer::Nothing)
            }
            Request::Write { buffer, offset } => {
                let len = payload.len() as u64;
                self.buffers.range(kind, buffer, offset, len)?;
                let end_check = EndCheck::new(link, stop);
                let unshared = self.unshare_for_write(buffer, offset, len, &end_check);
                end_check.check()?;
                self.activity.continue_request(state);
                let written = match unshared {
                    Ok(()) => self.write((buffer, offset), link, stop)?,
                    Err(error) => Err(error),
                };
                Ok(done(request, kind, buffer, written))
            }
            Request::Read {
                buffer,
                offset,
                len,
            } => self.read(kind, buffer, offset, len),
            Request::Fill {
                buffer,
                offset,
                len,
                value,
            } => {
                let memory = self.buffers.range(kind, buffer, offset, len)?;
                let fill = Transfer::new(Bulk::Fill { value }, memory, offset, len);
                self.transfer((request, of_message), buffer, fill, link, stop)
            }
            Request::Copy {
                dst,
                dst_offset,
                src,
                src_offset,
                len,
            } => {
                let from = self.buffers.range(kind, src, src_offset, len)?;
                let to = self.buffers.range(kind, dst, dst_offset, len)?;
                let source = Arc::clone(from);
                let from = src_offset;
                let copy = Transfer::new(Bulk::Copy { source, from }, to, dst_offset, len);
                self.transfer((request, of_message), dst, copy, link, stop)
            }
            Request::Graph {
                graph,
                offset,
                total,
            } => {
                let (part, engine) = ((graph, offset, total), self.engine.as_ref());
                match self.graphs.part(part, payload, &self.tenant, engine)? {
                    None => Ok(Answer::Nothing),
                    Some(received) => {
                        self.counters.full_graphs.add(1);
                        self.compile(request, kind, (graph, received), link, stop)
                    }
                }
            }
            Request::Patch { graph, base } => {
                let (ids, engine) = ((graph, base), self.engine.as_ref());
                let received = self.graphs.patch(ids, payload, &self.tenant, engine)?;
                self.counters.patches.add(1);
                self.compile(request, kind, (graph, received), link, stop)
            }
            Request::Submit { graph } => self.submit(request, graph, link, stop),
            Request::Forget { graph } => {
                self.graphs.forget(graph);
                self.update_gauges();
                Ok(Answer::Nothing)
            }
            Request::Memory {} => {
                let memory = self.memory();
                Ok(Answer::Message(Reply::Memory {
                    request,
                    total: memory.total,
                    free: memory.free,
                }))
            }
            Request::Fence {} => Ok(Answer::Message(Reply::Done { request })),
            Request::Weights { .. }
            | Request::Lookup { .. }
            | Request::Proof { .. }
            | Request::Extent { .. }
            | Request::Seal { .. }
            | Request::Query { .. }
            | Request::Attach { .. } => self.weights_request(request, kind, &message, link, stop),
        }
    }

    /// The rules that every request has to keep: HELLO comes first, a PROOF directly follows its
    /// challenge, and only some kinds carry a payload.
    fn check(
        &mut self,
        kind: &'static str,
        message: &Request,
        payload: Bytes<'_>,
    ) -> Result<(), Violation> {
        if self.guest().is_none() && !matches!(message, Request::Hello { .. }) {
            return Err(Violation::NoHello { kind });
        }
        if !matches!(message, Request::Proof { .. }) {
            self.weights.forget_challenge();
        }
        match message {
            Request::Write { .. } | Request::Graph { .. } | Request::Patch { .. } => Ok(()),
            _ if payload.is_empty() => Ok(()),
            _ => {
                let payload = payload.len();
                Err(Violation::Payload { kind, payload })
            }
        }
    }

    fn hello(
        &mut self,
        offer: Offer,
        name: &str,
        device: DeviceIndex,
    ) -> Result<Answer, SessionEnd> {
        if self.guest().is_some() {
            return Err(Violation::SecondHello.into());
        }
        // The guest chooses the name, and terminals show it: control characters are removed and the
        // length is limited.
        let name: String = name
            .chars()
            .filter(|c| !c.is_control())
            .take(MAX_NAME_CHARS)
            .collect();
        self.activity.set_program(&name);
        // Cannot fail: the name is unset, and only this thread sets it.
        let _ = self.counters.guest.set(name.clone());
        let protocol = agree(offer)?;
        let devices = self.devices;
        if device.0 >= devices.0 {
            return Err(RejectReason::NoDevice { device, devices }.into());
        }
        let speaks = offer.versions;
        match self.log.passes(Instant::now()) {
            true => info!(guest = %name, %speaks, %protocol, "session opened"),
            false => debug!(guest = %name, %speaks, %protocol, "session opened"),
        }
        self.protocol = protocol;
        let _ = self.counters.protocol.set(protocol);
        let memory = self.memory();
        let mut description = self.engine.description().to_owned();
        // A device on another GPU is what a guest expects.
        if self.has_unused_gpu && self.engine.name() == "cpu" {
            description += UNUSED_GPU;
        }
        Ok(Answer::Message(Reply::Welcome {
            protocol,
            served: HostVersions(VersionRange::SERVED),
            session: self.id,
            engine: self.engine.name().to_owned(),
            description,
            memory_total: memory.total,
            memory_free: memory.free,
            capabilities: self.engine.capabilities().clone(),
            devices,
        }))
    }

    fn alloc(&mut self, request: u64, buffer: BufferId, size: u64) -> Result<Answer, SessionEnd> {
        self.buffers.check_new(buffer)?;
        let limit = self.limits.buffers;
        if self.buffers.len() >= limit {
            return Ok(refused(request, buffer, &AllocError::Count { limit }));
        }
        let mut allocated = self.try_alloc(buffer, size);
        if allocated.is_err() && self.reclaim(size) {
            allocated = self.try_alloc(buffer, size);
        }
        let shared = match allocated {
            Ok(shared) => shared,
            Err(error) => return Ok(refused(request, buffer, &error)),
        };
        self.update_gauges();
        if size >= MODEL_SCALE && self.may_log() {
            let free = self.tenant.memory(self.engine.as_ref()).free;
            info!(buffer = buffer.0, size, free, "allocated");
        } else {
            debug!(buffer = buffer.0, size, "allocated");
        }
        Ok(match shared {
            Some((file, size)) => Answer::Shared { file, size },
            None => Answer::Message(Reply::Done { request }),
        })
    }

    /// Takes memory from silent programs, if an allocation of `size` bytes fits with it and not
    /// without it. Returns whether there was some.
    fn reclaim(&self, size: u64) -> bool {
        let Some(silent) = &self.silent else {
            return false;
        };
        let wanted = self.engine.allocation_size(size);
        let free = self.tenant.memory(self.engine.as_ref()).free;
        (free..free.saturating_add(silent.bytes())).contains(&wanted.saturating_sub(1))
            && silent.reclaim()
    }

    /// Allocates a buffer whose id has been checked. Returns the file that the guest may map, with
    /// its size in bytes, if there is one.
    ///
    /// # Errors
    /// [`AllocError::Quota`], [`AllocError::Pool`], [`AllocError::Engine`].
    fn try_alloc(
        &mut self,
        buffer: BufferId,
        size: u64,
    ) -> Result<Option<(OwnedFd, u64)>, AllocError> {
        let taken = self.engine.allocation_size(size);
        let guest = || self.tenant.name().to_owned();
        let charge = self.tenant.charge(taken, self.engine.as_ref());
        let mut charge = charge.map_err(|error| AllocError::Quota {
            guest: guest(),
            error,
        })?;
        // A buffer without bytes has no mapping.
        let count = usize::from(size > 0);
        let mapping = self.pools.mappings.take(self.tenant.id(), count);
        let mapping = mapping.map_err(|error| AllocError::Pool {
            guest: guest(),
            error,
        })?;
        expect_unlocked("Engine::alloc");
        let shared = match self.can_share && size > 0 {
            true => match self.engine.alloc_shared(size) {
                // Memory without a file would be refused, too.
                Err(error @ EngineError::OutOfMemory { wanted, free, .. }) if wanted > free => {
                    return Err(error.into());
                }
                // A process without a descriptor for the file has memory without a file.
                Err(error) => {
                    debug!(buffer = buffer.0, size, "not shared: {error}");
                    None
                }
                Ok(shared) => shared,
            },
            false => None,
        };
        let (memory, shared) = match shared {
            Some(SharedMemory { memory, file, size }) => (memory, Some((file, size))),
            None => (self.engine.alloc(size)?, None),
        };
        charge.allocated();
        self.buffers.insert(buffer, memory, charge, mapping);
        Ok(shared)
    }

    fn read(
        &self,
        kind: &'static str,
        buffer: BufferId,
        offset: u64,
        len: u64,
    ) -> Result<Answer, SessionEnd> {
        let memory = self.buffers.range(kind, buffer, offset, len)?;
        let limit = MAX_PAYLOAD;
        match usize::try_from(len) {
            Ok(len) if len <= limit => Ok(Answer::Data(ReadRange {
                memory: Arc::clone(memory),
                offset,
                len,
            })),
            _ => Err(Violation::ReadTooLong { len, limit }.into()),
        }
    }

    /// Compiles a graph that has been received. The end of the guest and `stop` cancel this.
    fn compile(
        &mut self,
        request: u64,
        kind: &'static str,
        (graph, received): (GraphId, ImageResult),
        link: &mut dyn HostEnd,
        stop: &StopFlag,
    ) -> Result<Answer, SessionEnd> {
        let start = Instant::now();
        let end_check = EndCheck::new(link, stop);
        let (activity, outside) = (&self.activity, &self.outside);
        let is_cancelled = || outside.is_over(activity, ThreadState::Compiles, &end_check);
        let context = CompileContext {
            engine: self.engine.as_ref(),
            buffers: &self.buffers,
            limits: &self.limits,
            tenant: &self.tenant,
            protocol: self.protocol,
            is_cancelled: &is_cancelled,
        };
        let status = self.graphs.compile(graph, received, &context)?;
        end_check.check()?;
        let answer = match status {
            GraphStatus::Compiled { bytes, nodes } => {
                let took = start.elapsed();
                debug!(kind, graph = graph.0, nodes, bytes, ?took, "graph compiled");
                Answer::Nothing
            }
            GraphStatus::Failed(error) => failed(request, kind, graph.0, &error),
        };
        self.update_gauges();
        Ok(answer)
    }

    /// Runs a graph. The end of the guest and `stop` cancel it at the end of its turn.
    fn submit(
        &mut self,
        request: u64,
        graph: GraphId,
        link: &mut dyn HostEnd,
        stop: &StopFlag,
    ) -> Result<Answer, SessionEnd> {
        let end_check = EndCheck::new(link, stop);
        let (activity, counters) = (&self.activity, &self.counters);
        let is_cancelled = || end_check.is_near();
        let outside = &self.outside;
        let state = ThreadState::Executes;
        let is_compile_cancelled = || outside.is_over(activity, state, &end_check);
        let context = CompileContext {
            engine: self.engine.as_ref(),
            buffers: &self.buffers,
            limits: &self.limits,
            tenant: &self.tenant,
            protocol: self.protocol,
            is_cancelled: &is_compile_cancelled,
        };
        let stored = self.graphs.get(graph, &context)?;
        end_check.check()?;
        let info = stored.info(graph);
        let plan = match &mut stored.plan {
            Ok(plan) => plan,
            Err(error) => return Ok(failed(request, "SUBMIT", graph.0, error)),
        };
        let (tenant, entitlement) = (self.tenant.id(), self.tenant.entitlement());
        let observe = |turning| observe_turn(activity, counters, (request, SUBMIT), &info, turning);
        let batchable = Batchable {
            engine: self.engine.as_ref(),
            plan,
            program: self.id,
            is_allowed: self.limits.batch && self.tenant.may_batch(),
        };
        let state = { &self.scheduler }.run_batchable(
            tenant,
            entitlement,
            batchable,
            observe,
            is_cancelled,
        );
        match state {
            RunState::Cancelled(Times { ran, turns, .. }) => {
                debug!(graph = graph.0, ?ran, turns, "graph cancelled");
                Err(end_check.check().err().unwrap_or(SessionEnd::Shutdown))
            }
            RunState::Done(outcome, times) => Ok(self.ran(request, graph, outcome, times)),
            RunState::InFlight(run) => Ok(Answer::InFlight(Submitted {
                request,
                graph,
                info,
                run,
            })),
        }
    }

    /// Counts a run of a graph that has ended. Returns the answer to its SUBMIT.
    pub(super) fn ran(
        &self,
        request: u64,
        graph: GraphId,
        outcome: Result<(), RunError>,
        times: Times,
    ) -> Answer {
        let (nodes, tokens) = self.graphs.size(graph);
        let Times {
            queued, ran, turns, ..
        } = times;
        self.counters.graphs_run.add(1);
        self.counters.nodes_run.add(nodes as u64);
        self.counters.tokens_run.add(tokens);
        self.tenant.latency.queued.observe(queued);
        self.tenant.latency.ran.observe(ran);
        trace!(graph = graph.0, nodes, ?ran, ?queued, turns, "graph run");
        match outcome {
            Ok(()) => Answer::Nothing,
            Err(error) => failed(request, "SUBMIT", graph.0, &error),
        }
    }
}
