//! A fuzzed session: input bytes become requests, the real session executes them with the real CPU
//! engine, and a model of the session checks every reply.
//!
//! Checked, beyond "no crash, no panic, no bad access":
//! - a request that breaks a rule ends the session, and no other does (graphs excepted: the rules
//!   of graphs are not modelled twice);
//! - memory is zero when it is new, and afterwards holds exactly what was written, filled and
//!   copied;
//! - a graph changes no byte outside the elements of its destinations;
//! - what validation lets through can be compiled and run: kernels never panic, and fail for
//!   nothing but an index in the data;
//! - every reply is well-formed and belongs to the request before it; nothing follows the last one;
//! - graphs, plans and working memory are charged, and given back with the graph;
//! - when the session is over, all its memory is free;
//! - no request takes more processor time than `usage::REQUEST_TIME`, and what the estimates of the
//!   graph that it runs allow;
//! - in a process of its own, the session never needs more memory at once than its limits say;
//! - in a process of its own, the session has as many mappings, threads and descriptors as its
//!   buffers need, and leaves none behind.

mod graphs;
pub(crate) mod input;
mod model;
#[path = "../../../transport/tests/common/ops.rs"]
#[allow(dead_code)] // a recipe varies all parameters that do not belong to a geometry
mod ops;
mod recipes;
pub(crate) mod usage;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::weights::Sharing;
use vgpu_executor::{Limits, Session, SessionEnd, StopFlag, WeightStore};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{self, BufferId};
use vgpu_transport::link::{Counters, HostEnd, Incoming, LinkError};
use vgpu_transport::wire::{
    ContentHash, DeviceIndex, GraphId, MAX_PAYLOAD, MIN_EXTENT, Offer, Reply, Request,
    VersionRange, Wanted,
};

use input::Input;
use model::{Expect, Model};
use usage::{Peak, Process, RequestClock};

pub(crate) use model::Setup;

/// Limits that a session of some requests reaches.
pub(crate) const SMALL: Setup = Setup {
    memory: 1 << 20,
    buffers: 8,
    has_default_limits: false,
    scale: 1,
};

/// The limits of a session of `vgpu serve`.
pub(crate) const DEFAULT: Setup = Setup {
    memory: 4 << 20,
    buffers: 1 << 14,
    has_default_limits: true,
    scale: 1,
};

/// The same with the memory of a guest, and buffers of up to 64 MiB.
pub(crate) const LARGE: Setup = Setup {
    memory: 256 << 20,
    scale: 1 << 12,
    ..DEFAULT
};

/// Most requests in one session, reads after graphs not counted.
const MAX_REQUESTS: usize = 200;

/// Most graphs run in one session.
const MAX_RUNS: usize = 16;

fn limits(setup: &Setup) -> Limits {
    let default = Limits::default();
    if setup.has_default_limits {
        assert_eq!(default.buffers, setup.buffers);
        return default;
    }
    Limits {
        buffers: setup.buffers,
        graphs: 4,
        graph_bytes: 1 << 16,
        graph_nodes: 64,
        graph: ir::Limits {
            nodes: 16,
            revisits: 8,
        },
        node_time: None,
        map_buffers: false,
        hello: Duration::from_secs(60),
        ..default
    }
}

/// The variable that names the limits of all sessions: `small`, `default` or `large`.
const SETUP: &str = "VGPU_FUZZ_SETUP";

/// Which of three set-ups a session has: what the environment names, or what its last byte says.
fn setup_of(data: &[u8]) -> usize {
    static NAMED: OnceLock<Option<usize>> = OnceLock::new();
    let named = NAMED.get_or_init(|| {
        let name = std::env::var(SETUP).ok()?;
        let at = ["small", "default", "large"]
            .iter()
            .position(|one| *one == name);
        Some(at.unwrap_or_else(|| panic!("{SETUP}={name}: not small, default or large")))
    });
    named.unwrap_or(match data.last().map_or(0, |last| last % 8) {
        6 => 2,
        7 => 1,
        _ => 0,
    })
}

/// Runs the session that `data` encodes. Panics at the first difference from the model. One session
/// in eight has the default limits, and one in eight the memory of a guest besides, unless
/// [`SETUP`] is set.
pub(crate) fn run(data: &[u8]) {
    run_one(data, false);
}

/// As [`run`], in a process that does nothing else meanwhile: checks the most memory that the
/// session has needed at once, too.
pub(crate) fn run_with_peak(data: &[u8]) {
    run_one(data, true);
}

fn run_one(data: &[u8], has_peak: bool) {
    static ENGINES: OnceLock<Mutex<[Arc<CpuEngine>; 3]>> = OnceLock::new();
    const SETUPS: [&Setup; 3] = [&SMALL, &DEFAULT, &LARGE];
    let engines = || Mutex::new(SETUPS.map(|setup| Arc::new(cpu_engine(setup))));
    let engines = ENGINES.get_or_init(engines);
    // One session at a time, so that memory can be accounted for.
    let engines = engines.lock().unwrap_or_else(PoisonError::into_inner);
    let at = setup_of(data);
    let engine = Arc::clone(&engines[at]) as Arc<dyn Engine>;
    let peak = has_peak.then(Peak::begin);
    run_on(&engine, SETUPS[at], data);
    if let Some(peak) = peak {
        peak.check(SETUPS[at].memory);
    }
}

/// An engine with the memory of a session, whose buffers end at pages that nobody can access.
pub(crate) fn cpu_engine(setup: &Setup) -> CpuEngine {
    let engine = CpuEngine::new(1, Some(setup.memory)).expect("a thread");
    engine.with_fixed_memory(setup.memory).with_checks()
}

/// As [`run`], on an engine of `setup` that nobody else uses.
pub(crate) fn run_on(engine: &Arc<dyn Engine>, setup: &'static Setup, data: &[u8]) {
    run_alone(engine, setup, data, None);
}

/// As [`run_on`], in a process that does nothing else and had `first` before. Returns the time of
/// the longest request.
pub(crate) fn run_alone(
    engine: &Arc<dyn Engine>,
    setup: &'static Setup,
    data: &[u8],
    first: Option<Process>,
) -> Duration {
    let mut script = Script::new(data, setup, Arc::clone(engine));
    script.first = first;
    let peak = first.map(|_| Peak::begin());
    static WEIGHTS: OnceLock<WeightStore> = OnceLock::new();
    let weights = WEIGHTS
        .get_or_init(|| WeightStore::new(Sharing::Tenant, None).expect("a thread for weights"));
    let session = Session::new(1, Arc::clone(engine), limits(setup));
    let session = session.sharing(weights, "fuzz");
    let ending = session.run(&mut script, &StopFlag::new());
    let longest = script.clock.longest();
    script.finish(&ending);
    assert_eq!(
        engine.memory().free,
        setup.memory,
        "the session did not free its memory"
    );
    if let Some((first, peak)) = first.zip(peak) {
        first.check_growth(0, 0);
        peak.check(setup.memory);
    }
    longest
}

/// The guest and its link: sends requests and checks replies.
struct Script<'a> {
    input: Input<'a>,
    setup: &'static Setup,
    engine: Arc<dyn Engine>,
    model: Model,
    /// Requests that an earlier request has queued.
    queue: VecDeque<Request>,
    /// The last request: its number, its content, and the expected result.
    number: u64,
    message: Vec<u8>,
    payload: Vec<u8>,
    expect: Option<Expect>,
    replies: Vec<(Reply, Vec<u8>)>,
    /// The payload of the next reply.
    room: Vec<u8>,
    retired: bool,
    /// Bytes that the last graph may have changed, of buffers not read since.
    changed: BTreeMap<u64, Vec<Range<usize>>>,
    /// Whether the session has compiled a graph since the last reply to MEMORY.
    has_compiled: bool,
    requests: usize,
    runs: usize,
    clock: RequestClock,
    /// What the process had before, if it does nothing else.
    first: Option<Process>,
}

impl<'a> Script<'a> {
    fn new(data: &'a [u8], setup: &'static Setup, engine: Arc<dyn Engine>) -> Script<'a> {
        Script {
            input: Input::new(data),
            setup,
            engine,
            model: Model::default(),
            queue: VecDeque::new(),
            number: 0,
            message: Vec::new(),
            payload: Vec::new(),
            expect: None,
            replies: Vec::new(),
            room: Vec::new(),
            retired: true,
            changed: BTreeMap::new(),
            has_compiled: false,
            requests: 0,
            runs: 0,
            clock: RequestClock::new(),
            first: None,
        }
    }

    /// Checks the end of the session: by the host, or because the input is used up.
    fn finish(mut self, ending: &SessionEnd) {
        match ending {
            SessionEnd::Closed => assert!(
                self.expect.is_none(),
                "the session was closed before its end"
            ),
            SessionEnd::Violation(violation) => {
                let last = self.replies.pop();
                let Some((Reply::Ended { reason }, _)) = last else {
                    panic!("{violation}, but the last reply is {last:?}");
                };
                assert!(
                    self.replies.is_empty(),
                    "{reason}, after {:?}",
                    self.replies
                );
                assert!(!reason.is_empty() && reason.len() < 16 << 10, "{reason}");
                assert!(
                    matches!(self.expect, Some(Expect::End | Expect::Part(_))),
                    "{reason}, but {:?} was expected of {:?}",
                    self.expect,
                    Request::decode(self.model.protocol, &self.message)
                );
            }
            other => panic!("{other}"),
        }
    }

    /// Compares the replies to the last request with the expected result.
    fn settle(&mut self) {
        let Some(expect) = self.expect.take() else {
            return;
        };
        assert!(self.retired, "the request was not retired");
        let number = self.number;
        let replies = std::mem::take(&mut self.replies);
        let replies: Vec<(&Reply, &[u8])> = replies.iter().map(|(r, p)| (r, &p[..])).collect();
        match (&expect, replies.as_slice()) {
            (Expect::Welcome, [(Reply::Welcome { capabilities, .. }, [])]) => {
                assert_eq!(capabilities, self.engine.capabilities());
            }
            (Expect::Done, [(Reply::Done { request }, [])])
            | (Expect::Refused, [(Reply::Refused { request, .. }, [])]) => {
                assert_eq!(*request, number);
            }
            (Expect::Nothing | Expect::Part(None), []) => {}
            (Expect::Part(Some((graph, image))), []) => {
                self.model.took_graph(*graph, image, true, self.setup);
            }
            (Expect::Part(Some((graph, image))), [(failed, [])]) => {
                assert_failed(failed, number, true);
                self.model.took_graph(*graph, image, false, self.setup);
            }
            (Expect::Fail, [(failed, [])]) => {
                let request = Request::decode(self.model.protocol, &self.message);
                let has_graph = matches!(request, Ok(Request::Submit { .. }));
                assert_failed(failed, number, has_graph);
            }
            // A graph for whose image there was no memory: its buffers are not known, so it does
            // not end with them.
            (Expect::End, [(failed @ Reply::Failed { .. }, [])]) => {
                assert_failed(failed, number, true);
            }
            (
                &Expect::Data {
                    buffer,
                    offset,
                    len,
                },
                [(Reply::Data { request }, bytes)],
            ) => {
                assert_eq!(*request, number);
                self.compare(buffer, offset, len, bytes);
            }
            (
                Expect::Memory,
                [
                    (
                        Reply::Memory {
                            request,
                            total,
                            free,
                        },
                        [],
                    ),
                ],
            ) => {
                assert_eq!(*request, number);
                assert_eq!(*total, self.setup.memory);
                let working = (self.setup.memory - free).checked_sub(self.model.buffer_bytes());
                let working = working.expect("the memory of the buffers is charged");
                let has_compiled = std::mem::take(&mut self.has_compiled);
                self.model.observe_working(working, has_compiled);
            }
            (&Expect::Run(graph), outcome) => {
                match outcome {
                    [] => {}
                    [(Reply::Failed { request, reason }, [])]
                        if *request == number && reason.contains("is out of range") => {}
                    other => panic!("{other:?}, of:\n{}", self.model.describe_last_run()),
                }
                self.changed = self.model.may_change(graph);
                self.read_everything();
            }
            (Expect::Held, [(Reply::Held { request, .. }, [])]) => assert_eq!(*request, number),
            (Expect::Have { buffer, wanted }, [(Reply::Have { request, indices }, [])]) => {
                assert_eq!(*request, number);
                self.model.keeps(*buffer, wanted, &indices.0);
            }
            (Expect::LookedUp { .. }, [(Reply::Missing { request }, [])]) => {
                assert_eq!(*request, number);
            }
            (
                &Expect::LookedUp {
                    buffer,
                    offset,
                    len,
                    content: Some(ref content),
                },
                [(Reply::Done { request }, [])],
            ) => {
                assert_eq!(*request, number);
                let bytes = self.model.buffers.get_mut(&buffer).expect("it is there");
                bytes[offset as usize..][..len as usize].copy_from_slice(content);
            }
            (expect, replies) => panic!(
                "{:?} resulted in {replies:?}, expected {expect:?}",
                Request::decode(self.model.protocol, &self.message)
            ),
        }
        match &expect {
            Expect::Memory => {}
            Expect::Part(_) | Expect::Run(_) => {
                self.has_compiled = true;
                self.queue.push_front(Request::Memory {});
            }
            // Freeing a buffer, sealing it and FORGET end graphs. Extents are charged.
            Expect::Nothing | Expect::Held | Expect::Have { .. } | Expect::LookedUp { .. } => {
                self.queue.push_front(Request::Memory {});
            }
            _ => {}
        }
    }

    fn read_everything(&mut self) {
        for (&buffer, bytes) in &self.model.buffers {
            let size = bytes.len() as u64;
            for offset in (0..size.max(1)).step_by(MAX_PAYLOAD) {
                self.queue.push_back(Request::Read {
                    buffer: BufferId(buffer),
                    offset,
                    len: (size - offset).min(MAX_PAYLOAD as u64),
                });
            }
        }
    }

    /// Compares the bytes that were read with those of the model.
    fn compare(&mut self, buffer: u64, offset: u64, len: u64, read: &[u8]) {
        assert_eq!(read.len() as u64, len);
        let known = self
            .model
            .buffers
            .get_mut(&buffer)
            .expect("it could be read");
        let (start, end) = (offset as usize, (offset + len) as usize);
        // After a graph the guest reads each buffer from its first byte to its last.
        let is_last = end == known.len();
        let known = &mut known[start..end];
        let changed = match is_last {
            true => self.changed.remove(&buffer),
            false => self.changed.get(&buffer).cloned(),
        };
        let Some(changed) = changed else {
            assert!(
                known == read,
                "buffer {buffer} does not contain the written bytes"
            );
            return;
        };
        let place = |at: usize| at.clamp(start, end) - start;
        let mut same = 0;
        for range in changed.into_iter().chain(std::iter::once(end..end)) {
            let next = place(range.start);
            if known[same..next] != read[same..next] {
                let differs = (same..next).find(|&at| known[at] != read[at]);
                panic!(
                    "byte {} of buffer {buffer} changed, but is in no destination of:\n{}",
                    start + differs.unwrap_or(same),
                    self.model.describe_last_run()
                );
            }
            same = place(range.end);
        }
        known.copy_from_slice(read);
    }

    /// Chooses the next request. `None` at the end of the input.
    fn next(&mut self) -> Option<(Vec<u8>, Vec<u8>)> {
        let mut payload = Vec::new();
        let mut message = Vec::new();
        if let Some(request) = self.queue.pop_front() {
            request.encode(self.model.protocol, &mut message);
            return Some((message, payload));
        }
        self.requests += 1;
        if self.input.is_empty() || self.requests > MAX_REQUESTS {
            return None;
        }
        // The first request is almost always HELLO.
        if self.requests == 1 && !self.input.chance(100) {
            hello(Offer::SERVED).encode(self.model.protocol, &mut message);
            if !self.input.chance(8) {
                self.furnish();
            }
            return Some((message, payload));
        }
        match self.request(&mut payload) {
            Some(request) => request.encode(self.model.protocol, &mut message),
            None => message = self.input.take(40).to_vec(),
        }
        if self.input.chance(200) && !message.is_empty() {
            let at = self.input.below(message.len());
            message[at] ^= 1 << self.input.below(8);
        }
        if self.input.chance(250) {
            message.truncate(self.input.below(message.len() + 1));
        }
        if self.input.chance(250) {
            let len = self.input.below(64);
            payload = self.input.take(len).to_vec();
        }
        Some((message, payload))
    }

    /// Some buffers at the start: zeros, which are also valid indices, and numbers near 1 (0.97 as
    /// f32, 1.87 as f16).
    fn furnish(&mut self) {
        for (buffer, size, value) in [(1, 16 << 10, 0), (2, 16 << 10, 0x3f), (3, 1 << 10, 0)] {
            let buffer = BufferId(buffer);
            self.queue.push_back(Request::Alloc { buffer, size });
            self.queue.push_back(Request::Fill {
                buffer,
                offset: 0,
                len: size,
                value: value + self.input.byte() % 2,
            });
        }
    }

    /// A request that is usually valid. `None` for random bytes.
    fn request(&mut self, payload: &mut Vec<u8>) -> Option<Request> {
        let choice = match self.input.below(32) {
            5..=27 if self.model.buffers.is_empty() && !self.input.chance(200) => 0,
            choice => choice,
        };
        Some(match choice {
            0..=4 => Request::Alloc {
                buffer: self.new_buffer(),
                size: self.size(),
            },
            5 | 6 => Request::Free {
                buffer: self.buffer(),
            },
            7..=9 => {
                let (buffer, offset, len) = self.range();
                *payload = self.input.take(len.min(64) as usize).to_vec();
                Request::Write { buffer, offset }
            }
            // Small integers, which are valid indices for operators that look up rows.
            10 | 11 => {
                let (buffer, offset, len) = self.range();
                let ids = 0..(len / 4).min(16);
                *payload = ids
                    .flat_map(|_| u32::from(self.input.byte() % 4).to_le_bytes())
                    .collect();
                Request::Write { buffer, offset }
            }
            // Ordinary numbers: half floats near 1 at each even offset.
            12 => {
                let (buffer, offset, len) = self.range();
                *payload = [0x00, 0x3c].repeat(len.min(2048) as usize / 2);
                Request::Write { buffer, offset }
            }
            13 => {
                let (buffer, offset, len) = self.range();
                Request::Read {
                    buffer,
                    offset,
                    len,
                }
            }
            14 => {
                let (buffer, offset, len) = self.range();
                let value = self.input.byte();
                Request::Fill {
                    buffer,
                    offset,
                    len,
                    value,
                }
            }
            15 | 16 => {
                let (dst, dst_offset, len) = self.range();
                let (src, src_offset, other) = self.range();
                let len = len.min(other);
                Request::Copy {
                    dst,
                    dst_offset,
                    src,
                    src_offset,
                    len,
                }
            }
            17..=23 => return Some(self.graph(payload)),
            24..=26 if !self.model.graphs().is_empty() => return Some(self.submit()),
            24 if self.input.chance(200) => return Some(self.submit()),
            24..=26 => return Some(self.graph(payload)),
            27 => Request::Forget {
                graph: GraphId(self.input.below(6) as u64),
            },
            28 if self.input.chance(128) => return Some(self.patch(payload)),
            28 => Request::Memory {},
            29 if self.input.chance(2) => return Some(self.weights()),
            29 => Request::Fence {},
            30 if self.input.chance(32) => {
                let number = self.input.odd_number() as u32;
                let other = VersionRange::new(number, number);
                let versions = other.unwrap_or(VersionRange::SERVED);
                hello(Offer {
                    versions,
                    ..Offer::SERVED
                })
            }
            30 if self.input.chance(32) => hello(Offer::SERVED),
            31 if self.input.chance(32) => return None,
            _ => return Some(self.graph(payload)),
        })
    }

    /// A request about weights. Usually the guest must first allocate a buffer that is large
    /// enough.
    fn weights(&mut self) -> Request {
        let large = |(_, bytes): &(&u64, &Vec<u8>)| bytes.len() as u64 >= MIN_EXTENT;
        let candidates: Vec<u64> = self
            .model
            .buffers
            .iter()
            .filter(large)
            .map(|(&b, _)| b)
            .collect();
        if candidates.is_empty() && !self.input.chance(32) {
            let extra = u64::from(self.input.byte()) * 16;
            return Request::Alloc {
                buffer: self.new_buffer(),
                size: MIN_EXTENT + extra,
            };
        }
        let buffer = match candidates.is_empty() || self.input.chance(64) {
            true => self.buffer(),
            false => BufferId(self.input.pick(&candidates)),
        };
        let size = self.model.buffers.get(&buffer.0).map_or(0, Vec::len) as u64;
        let offset = match self.input.below(3) {
            0 => 0,
            _ => u64::from(self.input.byte()) * 4,
        };
        let offset = offset.min(size.saturating_sub(MIN_EXTENT));
        let len = match self.input.chance(32) {
            true => self.input.odd_number(),
            false => (size - offset.min(size)).min(MIN_EXTENT + u64::from(self.input.byte()) * 8),
        };
        match self.input.below(8) {
            0 | 1 => Request::Weights { buffer },
            2 | 3 => Request::Extent {
                buffer,
                offset,
                len,
            },
            4 => Request::Seal { buffer },
            5 if self.input.chance(16) => Request::Proof {
                proof: ContentHash([self.input.byte(); 32]),
            },
            _ => {
                // The content of another buffer, which the host may know, for this buffer.
                let from = match candidates.is_empty() {
                    true => buffer.0,
                    false => self.input.pick(&candidates),
                };
                let hash = self.model.hash_of(from, offset, len);
                if self.model.is_kept(buffer.0, hash) || self.input.chance(128) {
                    return Request::Attach {
                        buffer,
                        offset,
                        len,
                        hash,
                    };
                }
                if self.input.chance(2) {
                    return Request::Query {
                        buffer,
                        wanted: Wanted(vec![(hash, len); self.input.below(4)]),
                    };
                }
                Request::Lookup {
                    buffer,
                    offset,
                    len,
                    hash,
                }
            }
        }
    }

    /// A new buffer id, usually the next number.
    fn new_buffer(&mut self) -> BufferId {
        BufferId(match self.input.chance(32) {
            true => self.input.odd_number(),
            false => self.model.next_buffer(),
        })
    }

    /// A buffer id, usually of an existing buffer.
    fn buffer(&mut self) -> BufferId {
        let known: Vec<u64> = self.model.buffers.keys().copied().collect();
        BufferId(match known.is_empty() || self.input.chance(200) {
            true => self.input.odd_number(),
            false => self.input.pick(&known),
        })
    }

    fn size(&mut self) -> u64 {
        match self.input.below(16) {
            0 => self.input.odd_number(),
            1 => 0,
            2..=7 => u64::from(self.input.byte()) * 4,
            // The second byte only where there is memory for it: inputs of other set-ups keep their
            // meaning.
            _ if self.setup.scale > 1 && self.input.chance(4) => {
                u64::from(self.input.byte()) * 64 * self.setup.scale
            }
            _ => u64::from(self.input.byte()) * 64,
        }
    }

    /// A range, usually inside the buffer.
    fn range(&mut self) -> (BufferId, u64, u64) {
        let buffer = self.buffer();
        if self.input.chance(200) {
            return (buffer, self.input.odd_number(), self.input.odd_number());
        }
        let size = self.model.buffers.get(&buffer.0).map_or(0, Vec::len) as u64;
        let offset = u64::from(self.input.byte()) * 4 % (size + 1);
        let len = match self.input.below(4) {
            0 => u64::from(self.input.byte()),
            1 => u64::MAX,
            _ => u64::from(self.input.byte()) * 16,
        };
        (buffer, offset, len.min(size - offset))
    }

    /// A graph, usually complete. Usually the next request runs it.
    fn graph(&mut self, payload: &mut Vec<u8>) -> Request {
        let places: Vec<graphs::BufferOffset> = self
            .model
            .buffers
            .iter()
            .map(|(&buffer, bytes)| (BufferId(buffer), bytes.len() as u64))
            .collect();
        let graph = graphs::graph(&mut self.input, self.engine.capabilities(), &places);
        *payload = graphs::image(&mut self.input, &graph);
        let id = GraphId(self.input.below(5) as u64);
        let mut total = payload.len() as u64;
        let mut offset = 0;
        if self.input.chance(200) {
            total = self.input.odd_number();
        }
        if self.input.chance(200) {
            offset = self.input.odd_number();
        }
        if self.input.chance(200) {
            payload.truncate(self.input.below(payload.len() + 1));
        } else if !self.input.chance(8) {
            self.queue.push_back(Request::Submit { graph: id });
        }
        Request::Graph {
            graph: id,
            offset,
            total,
        }
    }

    /// A patch that changes one or two words of another graph.
    fn patch(&mut self, payload: &mut Vec<u8>) -> Request {
        let Request::Submit { graph: base } = self.submit() else {
            unreachable!("submit makes that request");
        };
        for _ in 0..self.input.below(3) {
            let at = self.input.byte();
            let word = u32::from(self.input.byte());
            for field in [u32::from(at), 1, word] {
                payload.extend(field.to_le_bytes());
            }
        }
        let graph = GraphId(self.input.below(5) as u64);
        self.queue.push_back(Request::Submit { graph });
        Request::Patch { graph, base }
    }

    fn submit(&mut self) -> Request {
        let known = self.model.graphs();
        let graph = match known.is_empty() || self.input.chance(200) {
            true => GraphId(self.input.below(6) as u64),
            false => self.input.pick(&known),
        };
        Request::Submit { graph }
    }
}

/// Checks that the reply is the failure of this request, for want of memory or, if it is a request
/// with a graph, because a node is too much work.
fn assert_failed(reply: &Reply, request: u64, has_graph: bool) {
    match reply {
        Reply::Failed {
            request: of,
            reason,
        } if *of == request => {
            let limits = [
                "cannot be divided, the limit is",
                "by estimate, the limit is",
            ];
            let is_work = has_graph && limits.iter().any(|limit| reason.contains(limit));
            assert!(is_work || reason.contains("out of memory"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

fn hello(offer: Offer) -> Request {
    Request::Hello {
        offer,
        name: "fuzz".into(),
        device: DeviceIndex(0),
    }
}

impl HostEnd for Script<'_> {
    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        _timeout: Duration,
    ) -> Result<Option<Incoming>, LinkError> {
        self.settle();
        let Some((next, payload)) = self.next() else {
            if let Some(first) = self.first {
                first.check_growth(self.model.buffers.len(), self.setup.memory);
            }
            return Err(LinkError::Closed);
        };
        message.extend_from_slice(&next);
        let expect = self.model.request(&next, &payload, self.setup);
        if matches!(expect, Expect::Run(_)) {
            self.runs += 1;
            if self.runs > MAX_RUNS {
                return Err(LinkError::Closed);
            }
        }
        let estimate = match &expect {
            Expect::Run(graph) => self.model.estimate(*graph, &*self.engine),
            _ => Duration::ZERO,
        };
        self.number += 1;
        self.expect = Some(expect);
        self.message = next;
        self.payload = payload;
        self.retired = false;
        self.clock.begin(estimate);
        Ok(Some(Incoming {
            request: self.number,
            payload_len: self.payload.len(),
        }))
    }

    fn check_guest(&mut self) -> Result<(), LinkError> {
        Ok(())
    }

    fn payload(&self) -> Bytes<'_> {
        Bytes::from(&self.payload[..])
    }

    fn reserve(
        &mut self,
        _message_len: usize,
        payload_len: usize,
    ) -> Result<BytesMut<'_>, LinkError> {
        self.room = vec![0; payload_len];
        Ok(BytesMut::from(&mut self.room[..]))
    }

    fn send_reserved(&mut self, message: &[u8]) -> Result<(), LinkError> {
        let reply = Reply::decode(self.model.protocol, message);
        let reply = reply.expect("a reply that can be read");
        let is_over = matches!(self.replies.last(), Some((Reply::Ended { .. }, _)));
        assert!(!is_over, "{reply:?} after the end");
        self.replies.push((reply, std::mem::take(&mut self.room)));
        Ok(())
    }

    fn retire(&mut self) {
        assert!(!self.retired, "retired twice");
        self.retired = true;
        let message = &self.message;
        let protocol = self.model.protocol;
        self.clock
            .end(|| format!("{:?}", Request::decode(protocol, message)));
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }
}
