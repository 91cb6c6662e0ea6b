//! A session: one guest, its memory, its graphs.
//!
//! Requests are executed strictly in order, each to its end before the next is looked at. Whatever the
//! guest does wrong ends its session and touches nothing else: a session owns all of its state, and the
//! engine, the only thing shared, is handed nothing that was not checked here or by
//! [`validate`](vgpu_transport::ir::validate).

mod buffers;
mod ending;
mod graphs;
mod weights;

use std::any::Any;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tracing::{debug, error, info, trace, warn};
use vgpu_engine::{Engine, EngineError, Memory, RunError, SharedMemory};
use vgpu_transport::bytes::Bytes;
use vgpu_transport::ir::{BufferId, IR_VERSION};
use vgpu_transport::link::{HostEnd, LinkError};
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD, PROTOCOL_VERSION, Reply, Request};

use crate::limits::Limits;
use crate::sched::{Flight, Ran, Scheduler, Times};
use crate::stats::{Counters, Kind, Stats};
use crate::tenant::{Ledger, Policy, Tenant};
use buffers::Buffers;
pub use ending::{Ending, Violation};
use graphs::{Graphs, Host, Progress};
use weights::Weights;

/// How often a session with nothing to do looks whether it should stop.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long a guest's next request is looked for while the device works on a graph: a guest that wants a result asks for
/// it right behind the graph.
const AHEAD: Duration = Duration::from_micros(50);

/// Buffers from this size on are an event of a model, not of a graph, and logged as one.
const MODEL_SCALE: u64 = 64 << 20;

/// Events of one session that are logged for everybody to see; the rest goes to the debug level. A guest
/// can cause as many as it likes, and logs are on a disk.
const LOUD_EVENTS: u32 = 100;

/// Most characters of the guest's name that are kept.
const NAME_CHARS: usize = 200;

/// Asks sessions to stop. Clones ask together.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Nobody has asked yet.
    pub fn new() -> Stop {
        Stop::default()
    }

    /// Asks. Each session finishes the request it executes, tells its guest, and ends.
    pub fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody has asked.
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The host's side of one guest.
pub struct Session {
    id: u64,
    engine: Arc<dyn Engine>,
    scheduler: Arc<Scheduler>,
    tenant: Arc<Tenant>,
    limits: Limits,
    counters: Arc<Counters>,
    buffers: Buffers,
    graphs: Graphs,
    weights: Weights,
    loud_events: u32,
    /// Whether the link can share memory with the guest.
    can_share: bool,
}

/// What a request calls for, besides being retired.
enum Answer {
    Nothing,
    Message(Reply),
    /// The request could not be met, and the session goes on.
    Failure {
        reply: Reply,
        reason: String,
    },
    Data {
        memory: Arc<dyn Memory>,
        offset: u64,
        len: usize,
    },
    /// A buffer whose memory the guest may map.
    Shared {
        file: OwnedFd,
        size: u64,
    },
    /// A graph that the device works on.
    UnderWay(Submitted),
}

/// A graph that the device works on.
struct Submitted {
    request: u64,
    graph: GraphId,
    flight: Flight,
}

impl Session {
    /// A session that has not begun, of a guest that has the engine to itself. `id` is for people.
    pub fn new(id: u64, engine: Arc<dyn Engine>, limits: Limits) -> Session {
        let ledger = Ledger::new(engine.memory().total);
        let tenant = Tenant::unnamed("-".into(), Policy::default(), &ledger, Arc::default());
        Session::of_tenant(id, engine, Arc::default(), tenant, limits, Arc::default())
    }

    /// A session of a guest beside others, with counters that somebody else can read.
    pub(crate) fn of_tenant(
        id: u64,
        engine: Arc<dyn Engine>,
        scheduler: Arc<Scheduler>,
        tenant: Arc<Tenant>,
        limits: Limits,
        counters: Arc<Counters>,
    ) -> Session {
        Session {
            id,
            engine,
            scheduler,
            tenant,
            limits,
            counters,
            buffers: Buffers::default(),
            graphs: Graphs::default(),
            weights: Weights::default(),
            loud_events: 0,
            can_share: false,
        }
    }

    /// The same session, sharing weights with others of `origin`.
    #[must_use]
    pub fn sharing(mut self, weights: &crate::Weights, origin: &str) -> Session {
        self.weights = Weights::new(weights.of(origin));
        self
    }

    /// What the session has done so far.
    pub fn stats(&self) -> Stats {
        self.counters.snapshot()
    }

    /// Serves the guest until it goes, breaks the protocol, or `stop` is asked for. The guest is told
    /// why, if it still listens. What the session held is freed when this returns. The caller's tracing
    /// span says who the guest is.
    pub fn run(mut self, link: &mut dyn HostEnd, stop: &Stop) -> Ending {
        let start = Instant::now();
        let ending = self.serve(link, stop);
        if !matches!(ending, Ending::Closed | Ending::Link(_)) {
            dismiss(link, &ending);
        }
        let stats = self.stats();
        let link = link.counters();
        let guest = self.guest().unwrap_or("unknown, no HELLO came");
        macro_rules! closed {
            ($level:ident) => {
                $level!(
                    guest,
                    requests = stats.requests(),
                    kinds = %stats,
                    replies = link.messages_out,
                    bytes_in = stats.bytes_in,
                    bytes_out = stats.bytes_out,
                    round_trips = stats.round_trips,
                    spins = link.spins,
                    sleeps = link.sleeps,
                    kicks = link.kicks,
                    failures = stats.failures,
                    full_graphs = stats.full_graphs,
                    patches = stats.patches,
                    graphs_run = stats.graphs_run,
                    nodes_run = stats.nodes_run,
                    busy = ?stats.busy,
                    queued = ?stats.queued,
                    turns = stats.turns,
                    open = ?start.elapsed(),
                    freed = stats.buffer_bytes,
                    weights_not_sent = stats.weights_not_sent,
                    weights_shared = stats.weights_shared,
                    "session closed: {ending}"
                )
            };
        }
        match ending {
            Ending::Closed | Ending::Shutdown => closed!(info),
            Ending::Panic(_) | Ending::Engine(_) => closed!(error),
            _ => closed!(warn),
        }
        ending
    }

    fn serve(&mut self, link: &mut dyn HostEnd, stop: &Stop) -> Ending {
        let connected = Instant::now();
        self.can_share = self.limits.share && link.can_share();
        // Until the session ends, copies to and from the device need not go through other memory.
        let _pinned = link.window().and_then(|window| self.engine.pin(window));
        let mut incoming = Vec::new();
        let mut outgoing = Vec::new();
        loop {
            if stop.is_asked() {
                return Ending::Shutdown;
            }
            if self.guest().is_none() && connected.elapsed() > self.limits.hello {
                return Ending::Silent(self.limits.hello);
            }
            self.merge_weights();
            incoming.clear();
            let request = match link.receive(&mut incoming, PATIENCE) {
                Ok(Some(arrived)) => arrived.request,
                Ok(None) => continue,
                Err(error) => return error.into(),
            };
            let payload = link.payload();
            self.counters
                .bytes_in
                .add((incoming.len() + payload.len()) as u64);
            let answer = match self.execute(request, &incoming, payload) {
                Ok(answer) => answer,
                Err(ending) => return ending,
            };
            let answered = match answer {
                Answer::UnderWay(run) => self.follow(run, link, &mut incoming, &mut outgoing),
                answer => self.answer(request, answer, link, &mut outgoing),
            };
            if let Err(ending) = answered {
                return ending;
            }
            link.retire();
        }
    }

    /// A graph is under way. What the guest reads of its results goes behind it before anybody waits, so that one wait is
    /// enough for both.
    fn follow(
        &mut self,
        run: Submitted,
        link: &mut dyn HostEnd,
        incoming: &mut Vec<u8>,
        outgoing: &mut Vec<u8>,
    ) -> Result<(), Ending> {
        incoming.clear();
        let is_read = |message: &[u8]| matches!(Request::decode(message), Ok(Request::Read { len, .. }) if len > 0);
        let submit = run.request;
        let ahead = link.receive_ahead(&is_read, incoming, AHEAD);
        let next = match &ahead {
            Ok(Some(next)) => {
                let payload = link.payload();
                let bytes = incoming.len() + payload.len();
                self.counters.bytes_in.add(bytes as u64);
                Some((next.request, self.execute(next.request, incoming, payload)))
            }
            _ => None,
        };
        outgoing.clear();
        if let Some((request, _)) = next {
            Reply::Data { request }.encode(outgoing);
        }
        // Nobody keeps the device from others while it does not take its answers.
        let next = next.map(|(request, answer)| match answer {
            Ok(Answer::Data { len, .. }) if !link.has_room(outgoing.len(), len) => {
                (request, answer, false)
            }
            answer => (request, answer, true),
        });
        let Some((
            request,
            Ok(Answer::Data {
                memory,
                offset,
                len,
            }),
            true,
        )) = next
        else {
            let landed = self.land(run)?;
            self.answer(submit, landed, link, outgoing)?;
            let _ = ahead?;
            return match next {
                Some((request, answer, _)) => self.answer(request, answer?, link, outgoing),
                None => Ok(()),
            };
        };
        let (mut run, mut landed, mut broken) = (Some(run), Ok(Answer::Nothing), None);
        let sent = link.send_if(outgoing, len, &mut |out| {
            broken = memory.read(offset, out).err();
            if let Some(run) = run.take() {
                landed = self.land(run);
            }
            broken.is_none() && matches!(landed, Ok(Answer::Nothing))
        });
        // Where there was no room for an answer nobody has waited yet.
        if let Some(run) = run.take() {
            landed = self.land(run);
        }
        let landed = landed?;
        if sent? {
            self.counters.round_trips.add(1);
            self.counters.bytes_out.add((outgoing.len() + len) as u64);
            return Ok(());
        }
        // The guest hears of the failure before it reads. If the device is lost, reading fails again.
        self.answer(submit, landed, link, outgoing)?;
        let again = Answer::Data {
            memory,
            offset,
            len,
        };
        self.answer(request, again, link, outgoing)
    }

    /// Waits for a graph that the device works on.
    fn land(&mut self, run: Submitted) -> Result<Answer, Ending> {
        let Submitted {
            request,
            graph,
            flight,
        } = run;
        let Some(plan) = self.graphs.under_way(graph) else {
            // Nothing comes between a graph and its end that could forget it.
            return Err(Ending::Panic("a graph under way is gone".into()));
        };
        let counters = &self.counters;
        let landing = AssertUnwindSafe(|| flight.land(plan, |turn| count_turn(counters, turn)));
        let (outcome, times) =
            catch_unwind(landing).map_err(|panic| Ending::Panic(panic_message(panic.as_ref())))?;
        Ok(self.ran(request, graph, outcome, times))
    }

    fn answer(
        &mut self,
        request: u64,
        answer: Answer,
        link: &mut dyn HostEnd,
        outgoing: &mut Vec<u8>,
    ) -> Result<(), Ending> {
        outgoing.clear();
        let mut broken = None;
        let payload_len = match answer {
            Answer::Nothing => return Ok(()),
            Answer::UnderWay(run) => {
                let landed = self.land(run)?;
                return self.answer(request, landed, link, outgoing);
            }
            Answer::Message(reply) => {
                self.counters.round_trips.add(1);
                reply.encode(outgoing);
                link.send(outgoing, 0, &mut |_| {})?;
                0
            }
            Answer::Shared { file, size } => {
                self.counters.round_trips.add(1);
                // A guest that does not take the file reads and writes by messages.
                let reply = match link.share(file.as_fd()) {
                    true => Reply::Shared { request, size },
                    false => Reply::Done { request },
                };
                reply.encode(outgoing);
                link.send(outgoing, 0, &mut |_| {})?;
                0
            }
            Answer::Failure { reply, reason } => {
                self.counters.failures.add(1);
                if self.is_loud() {
                    warn!(request, "{reason}");
                } else {
                    debug!(request, "{reason}");
                }
                reply.encode(outgoing);
                link.send(outgoing, 0, &mut |_| {})?;
                0
            }
            Answer::Data {
                memory,
                offset,
                len,
            } => {
                self.counters.round_trips.add(1);
                Reply::Data { request }.encode(outgoing);
                link.send(outgoing, len, &mut |out| {
                    broken = memory.read(offset, out).err();
                })?;
                len
            }
        };
        self.counters
            .bytes_out
            .add((outgoing.len() + payload_len) as u64);
        match broken {
            None => Ok(()),
            Some(error) => Err(Ending::Engine(error.to_string())),
        }
    }

    /// Reads a request and executes it. A panic on the way is a bug of the host, and this session's end.
    fn execute(
        &mut self,
        request: u64,
        message: &[u8],
        payload: Bytes<'_>,
    ) -> Result<Answer, Ending> {
        let decoded = Request::decode(message).map_err(|error| Violation::Message {
            request,
            len: message.len(),
            error,
        })?;
        // The session does not outlive a panic, so nobody sees what it left half done.
        catch_unwind(AssertUnwindSafe(|| self.perform(request, decoded, payload)))
            .unwrap_or_else(|panic| Err(Ending::Panic(panic_message(panic.as_ref()))))
    }

    fn perform(
        &mut self,
        request: u64,
        message: Request,
        payload: Bytes<'_>,
    ) -> Result<Answer, Ending> {
        let kind = Kind::of(&message);
        self.counters.request(kind);
        trace!(
            request,
            kind = kind.name(),
            payload = payload.len(),
            "request"
        );
        let kind = kind.name();
        match message {
            Request::Hello { .. } => {}
            _ if self.guest().is_none() => return Err(Violation::NoHello { kind }.into()),
            _ => {}
        }
        if !matches!(message, Request::Proof { .. }) {
            self.weights.forget_challenge();
        }
        match message {
            Request::Write { .. } | Request::Graph { .. } | Request::Patch { .. } => {}
            _ if payload.is_empty() => {}
            _ => {
                let payload = payload.len();
                return Err(Violation::Payload { kind, payload }.into());
            }
        }
        match message {
            Request::Hello { protocol, ir, name } => self.hello(protocol, ir, name),
            Request::Alloc { buffer, size } => self.alloc(request, buffer, size),
            Request::Free { buffer } => {
                self.buffers.remove(buffer)?;
                self.weights.forget(buffer);
                self.graphs.forget_users(buffer);
                debug!(buffer = buffer.0, "freed");
                self.count_holdings();
                Ok(Answer::Nothing)
            }
            Request::Write { buffer, offset } => {
                let memory = self
                    .buffers
                    .range(kind, buffer, offset, payload.len() as u64)?;
                Ok(done(request, kind, buffer, memory.write(offset, payload)))
            }
            Request::Read {
                buffer,
                offset,
                len,
            } => {
                let memory = self.buffers.range(kind, buffer, offset, len)?;
                let limit = MAX_PAYLOAD;
                match usize::try_from(len) {
                    Ok(len) if len <= limit => Ok(Answer::Data {
                        memory: Arc::clone(memory),
                        offset,
                        len,
                    }),
                    _ => Err(Violation::ReadTooLong { len, limit }.into()),
                }
            }
            Request::Fill {
                buffer,
                offset,
                len,
                value,
            } => {
                let memory = self.buffers.range(kind, buffer, offset, len)?;
                Ok(done(request, kind, buffer, memory.fill(offset, len, value)))
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
                let copied = to.copy_from(dst_offset, from.as_ref(), src_offset, len);
                Ok(done(request, kind, dst, copied))
            }
            Request::Graph {
                graph,
                offset,
                total,
            } => self.graph(request, graph, offset, total, payload),
            Request::Patch { graph, base } => self.patch(request, graph, base, payload),
            Request::Submit { graph } => self.submit(request, graph),
            Request::Forget { graph } => {
                self.graphs.forget(graph);
                self.count_holdings();
                Ok(Answer::Nothing)
            }
            Request::Memory {} => {
                let memory = self.tenant.memory(self.engine.as_ref());
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
            | Request::Attach { .. } => self.weights_request(request, kind, &message),
        }
    }

    fn hello(&mut self, protocol: u32, ir: u32, name: String) -> Result<Answer, Ending> {
        if self.guest().is_some() {
            return Err(Violation::SecondHello.into());
        }
        // Text of a stranger on its way to a terminal: no control characters, no novel.
        let name: String = name
            .chars()
            .filter(|c| !c.is_control())
            .take(NAME_CHARS)
            .collect();
        info!(guest = %name, protocol, ir, "session opened");
        // Cannot be set: it was unset above, and nobody else sets it.
        let _ = self.counters.guest.set(name);
        if protocol != PROTOCOL_VERSION {
            return Err(Violation::Protocol { guest: protocol }.into());
        }
        if ir != IR_VERSION {
            return Err(Violation::Ir { guest: ir }.into());
        }
        let memory = self.tenant.memory(self.engine.as_ref());
        Ok(Answer::Message(Reply::Welcome {
            protocol: PROTOCOL_VERSION,
            session: self.id,
            engine: self.engine.name().to_owned(),
            description: self.engine.description().to_owned(),
            memory_total: memory.total,
            memory_free: memory.free,
            capabilities: self.engine.capabilities().clone(),
        }))
    }

    fn alloc(&mut self, request: u64, buffer: BufferId, size: u64) -> Result<Answer, Ending> {
        self.buffers.check_new(buffer)?;
        let limit = self.limits.buffers;
        if self.buffers.len() >= limit {
            let reason = format!("the session has {limit} buffers already, as many as it may");
            return Ok(refused(request, buffer, reason));
        }
        let mut charge = match self.tenant.charge(size, self.engine.as_ref()) {
            Ok(charge) => charge,
            Err(error) => {
                let reason = format!("guest {}: {error}", self.tenant.name());
                return Ok(refused(request, buffer, reason));
            }
        };
        let shared = match self.can_share && size > 0 {
            true => self.engine.alloc_shared(size),
            false => Ok(None),
        };
        let allocated = shared.and_then(|shared| match shared {
            Some(SharedMemory { memory, file, size }) => Ok((memory, Some((file, size)))),
            None => Ok((self.engine.alloc(size)?, None)),
        });
        match allocated {
            Ok((memory, shared)) => {
                charge.settle();
                self.buffers.insert(buffer, memory, charge, limit)?;
                self.count_holdings();
                if size >= MODEL_SCALE && self.is_loud() {
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
            Err(error) => Ok(refused(request, buffer, error.to_string())),
        }
    }

    fn graph(
        &mut self,
        request: u64,
        graph: GraphId,
        offset: u64,
        total: u64,
        part: Bytes<'_>,
    ) -> Result<Answer, Ending> {
        let start = Instant::now();
        let host = Host {
            engine: self.engine.as_ref(),
            buffers: &self.buffers,
            limits: &self.limits,
        };
        let progress = self.graphs.part(graph, offset, total, part, &host)?;
        if !matches!(progress, Progress::Incomplete) {
            self.counters.full_graphs.add(1);
        }
        Ok(self.took_graph(request, ("GRAPH", graph), progress, start))
    }

    fn patch(
        &mut self,
        request: u64,
        graph: GraphId,
        base: GraphId,
        patch: Bytes<'_>,
    ) -> Result<Answer, Ending> {
        let start = Instant::now();
        let host = Host {
            engine: self.engine.as_ref(),
            buffers: &self.buffers,
            limits: &self.limits,
        };
        let progress = self.graphs.patch(graph, base, patch, &host)?;
        self.counters.patches.add(1);
        Ok(self.took_graph(request, ("PATCH", graph), progress, start))
    }

    fn took_graph(
        &mut self,
        request: u64,
        (kind, graph): (&'static str, GraphId),
        progress: Progress,
        start: Instant,
    ) -> Answer {
        let answer = match progress {
            Progress::Incomplete => return Answer::Nothing,
            Progress::Compiled { bytes, nodes } => {
                let took = start.elapsed();
                debug!(kind, graph = graph.0, nodes, bytes, ?took, "graph compiled");
                Answer::Nothing
            }
            Progress::Failed(error) => failed(request, kind, graph.0, &error),
        };
        self.count_holdings();
        answer
    }

    fn submit(&mut self, request: u64, graph: GraphId) -> Result<Answer, Ending> {
        let host = Host {
            engine: self.engine.as_ref(),
            buffers: &self.buffers,
            limits: &self.limits,
        };
        let kept = self.graphs.get(graph, &host)?;
        let plan = match &mut kept.plan {
            Ok(plan) => plan,
            Err(error) => return Ok(failed(request, "SUBMIT", graph.0, error)),
        };
        let (party, terms) = (self.tenant.party(), self.tenant.terms());
        let counters = &self.counters;
        // Turn by turn: a graph may take longer than somebody who watches likes to wait.
        let count = |turn| count_turn(counters, turn);
        match self.scheduler.run(party, terms, plan.as_mut(), count) {
            Ran::Done(outcome, times) => Ok(self.ran(request, graph, outcome, times)),
            Ran::UnderWay(flight) => Ok(Answer::UnderWay(Submitted {
                request,
                graph,
                flight,
            })),
        }
    }

    /// A graph has run, or failed.
    fn ran(
        &self,
        request: u64,
        graph: GraphId,
        outcome: Result<(), RunError>,
        times: Times,
    ) -> Answer {
        let nodes = self.graphs.nodes(graph);
        let Times { queued, ran, turns } = times;
        self.counters.graphs_run.add(1);
        self.counters.nodes_run.add(nodes as u64);
        self.tenant.measures.queued.observe(queued);
        self.tenant.measures.ran.observe(ran);
        trace!(graph = graph.0, nodes, ?ran, ?queued, turns, "graph run");
        match outcome {
            Ok(()) => Answer::Nothing,
            Err(error) => failed(request, "SUBMIT", graph.0, &error),
        }
    }

    /// Whether the next event may be logged for everybody to see.
    fn is_loud(&mut self) -> bool {
        self.loud_events = self.loud_events.saturating_add(1);
        if self.loud_events == LOUD_EVENTS {
            warn!("{LOUD_EVENTS} events in this session; the next are logged at the debug level");
        }
        self.loud_events <= LOUD_EVENTS
    }

    /// What the guest calls itself; `None` until it has said hello.
    fn guest(&self) -> Option<&str> {
        self.counters.guest.get().map(String::as_str)
    }

    fn count_holdings(&self) {
        let counters = &self.counters;
        counters.buffers.set(self.buffers.len() as u64);
        counters.buffer_bytes.set(self.buffers.bytes());
        counters.graphs.set(self.graphs.len() as u64);
        counters.weights_shared.set(self.weights.shared());
    }
}

/// Adds up where the time of a turn went.
fn count_turn(counters: &Counters, turn: Times) {
    let nanoseconds = |time: Duration| time.as_nanos() as u64;
    counters.busy_nanoseconds.add(nanoseconds(turn.ran));
    counters.queued_nanoseconds.add(nanoseconds(turn.queued));
    counters.turns.add(turn.turns);
}

/// The answer to a one-way request on `buffer` that the engine has tried.
fn done(
    request: u64,
    kind: &'static str,
    buffer: BufferId,
    outcome: Result<(), EngineError>,
) -> Answer {
    match outcome {
        Ok(()) => Answer::Nothing,
        Err(error) => failed(request, kind, buffer.0, &error),
    }
}

fn failed(request: u64, kind: &'static str, on: u64, error: &dyn std::error::Error) -> Answer {
    let reason = format!("{kind} {on} failed: {error}");
    Answer::Failure {
        reply: Reply::Failed {
            request,
            reason: reason.clone(),
        },
        reason,
    }
}

fn refused(request: u64, buffer: BufferId, why: String) -> Answer {
    let reason = format!("ALLOC {} refused: {why}", buffer.0);
    Answer::Failure {
        reply: Reply::Refused {
            request,
            reason: why,
        },
        reason,
    }
}

/// Tells a guest why it is not served any longer. It may have gone already, so failure is no matter.
pub(crate) fn dismiss(link: &mut dyn HostEnd, ending: &Ending) {
    let reason = match ending {
        // What panicked, and where, is for the host's log.
        Ending::Panic(_) => "the host failed while it executed a request".to_owned(),
        other => other.to_string(),
    };
    let mut message = Vec::new();
    Reply::Ended { reason }.encode(&mut message);
    match link.send(&message, 0, &mut |_| {}) {
        Ok(()) | Err(LinkError::Closed) => {}
        Err(error) => debug!("the guest could not be told: {error}"),
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    if let Some(message) = panic.downcast_ref::<&str>() {
        (*message).to_owned()
    } else if let Some(message) = panic.downcast_ref::<String>() {
        message.clone()
    } else {
        "a panic without a message".to_owned()
    }
}
