//! Helpers of the tests: a guest that sends given requests, and engines that misbehave.
#![allow(dead_code)] // each test binary uses a part of this module

pub(crate) mod hanging_engine;
pub(crate) mod log;
pub(crate) mod model;
pub(crate) mod scripted_engine;
pub(crate) mod weights;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::listener::{GuestListener, IncomingGuest, ListeningSocket};
use vgpu_executor::{Limits, LinkKind, Peer, Process, Server};
use vgpu_transport::ir::{BufferId, Graph, Node, Op, Shape, Sources, Tensor, Type};
use vgpu_transport::link::{GuestEnd, HostEnd, LinkError};
use vgpu_transport::shm::memory::Window;
use vgpu_transport::wire::{
    DeviceIndex, GraphId, MAX_PAYLOAD, Offer, ProtocolVersion, Reply, Request,
};

/// Memory of the engine that most tests run on.
pub(crate) const MEMORY: u64 = 64 << 20;

/// What a buffer of up to this many bytes takes of the memory of the CPU engine.
pub(crate) const PAGE: u64 = 4096;

/// The time that a test waits for an event.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn cpu() -> Arc<dyn Engine> {
    Arc::new(CpuEngine::new(1, Some(MEMORY)).expect("a thread and 64 MiB"))
}

/// A server to which guests of this process connect.
pub(crate) struct Host {
    pub(crate) server: Server,
    guests: Sender<IncomingGuest>,
    pub(crate) engine: Arc<dyn Engine>,
}

impl Host {
    pub(crate) fn new(engine: Arc<dyn Engine>) -> Host {
        Host::limited(engine, Limits::default(), 64)
    }

    pub(crate) fn limited(engine: Arc<dyn Engine>, limits: Limits, max_sessions: usize) -> Host {
        Host::with_devices(vec![engine], limits, max_sessions)
    }

    /// A server with a device for each engine.
    pub(crate) fn with_devices(
        engines: Vec<Arc<dyn Engine>>,
        limits: Limits,
        max_sessions: usize,
    ) -> Host {
        let engine = Arc::clone(&engines[0]);
        let devices = engines.into_iter().map(|engine| (engine, limits));
        let server = Server::with_devices(devices.collect(), max_sessions);
        let mut server = server.expect("a thread");
        let (guests, arrivals) = mpsc::channel();
        server
            .listen(ChannelListener(arrivals))
            .expect("a thread for the listener");
        Host {
            server,
            guests,
            engine,
        }
    }

    /// A guest that has not sent HELLO.
    pub(crate) fn connect(&self) -> Guest {
        self.connect_as(None)
    }

    /// A program of this user that has not sent HELLO.
    pub(crate) fn connect_of(&self, uid: u32) -> Guest {
        self.connect_as(Some(Process {
            pid: 0,
            uid,
            program: None,
        }))
    }

    /// A program of this user that has sent HELLO.
    pub(crate) fn guest_of(&self, uid: u32) -> Guest {
        let mut guest = self.connect_of(uid);
        guest.hello();
        guest
    }

    /// A guest with this process, as the host's kernel would report it.
    pub(crate) fn connect_as(&self, process: Option<Process>) -> Guest {
        self.connect_from(Peer {
            endpoint: "test".into(),
            link: LinkKind::Unix,
            address: None,
            vm: None,
            machine: None,
            certificate: None,
            process,
        })
    }

    /// A guest that the host knows as `peer`.
    pub(crate) fn connect_from(&self, peer: Peer) -> Guest {
        let (guest, host) = pair();
        let arriving = IncomingGuest {
            peer,
            open: Box::new(move || Ok(host)),
            socket: None,
        };
        self.guests.send(arriving).expect("the listener is open");
        Guest::new(guest)
    }

    /// A guest that has sent HELLO.
    pub(crate) fn guest(&self) -> Guest {
        let mut guest = self.connect();
        guest.hello();
        guest
    }

    /// Waits until no session is left and all their memory is free.
    pub(crate) fn wait_until_empty(&self) {
        let start = std::time::Instant::now();
        while !self.server.sessions().is_empty() {
            assert!(start.elapsed() < TIMEOUT, "{:?}", self.server.sessions());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

struct ChannelListener(Receiver<IncomingGuest>);

impl ListeningSocket for ChannelListener {}

impl GuestListener for ChannelListener {
    fn accept(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>> {
        match self.0.recv_timeout(timeout) {
            Ok(arriving) => Ok(Some(arriving)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                std::thread::sleep(timeout);
                Ok(None)
            }
        }
    }
}

/// Both ends of a link inside this process.
pub(crate) fn pair() -> (Box<dyn GuestEnd>, Box<dyn HostEnd>) {
    let (guest, host) = vgpu_transport::link::window::inproc_pair().expect("memory for a window");
    (Box::new(guest), Box::new(host))
}

/// A guest that sends and receives single messages.
pub(crate) struct Guest {
    pub(crate) end: Box<dyn GuestEnd>,
    /// The version of the messages.
    pub(crate) protocol: ProtocolVersion,
    last_buffer: u64,
}

impl Guest {
    pub(crate) fn new(end: Box<dyn GuestEnd>) -> Guest {
        Guest {
            end,
            protocol: ProtocolVersion::CURRENT,
            last_buffer: 0,
        }
    }

    pub(crate) fn send_raw(&mut self, message: &[u8], payload: &[u8]) -> u64 {
        match self.end.send(message, payload.into()) {
            Ok(request) => request,
            // The host may have ended the session because of an earlier request.
            Err(LinkError::Closed) => u64::MAX,
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) fn send_with(&mut self, request: &Request, payload: &[u8]) -> u64 {
        let mut message = Vec::new();
        request.encode(self.protocol, &mut message);
        self.send_raw(&message, payload)
    }

    pub(crate) fn send(&mut self, request: &Request) -> u64 {
        self.send_with(request, &[])
    }

    /// The next reply, with its payload.
    pub(crate) fn receive(&mut self) -> (Reply, Vec<u8>) {
        let mut message = Vec::new();
        let mut payload = vec![0; MAX_PAYLOAD];
        let len = self
            .end
            .receive(&mut message, payload.as_mut_slice().into())
            .expect("a reply");
        payload.truncate(len);
        let reply = Reply::decode(self.protocol, &message);
        (reply.expect("a reply"), payload)
    }

    /// Sends a request, and returns its reply.
    pub(crate) fn ask(&mut self, request: &Request) -> Reply {
        self.send(request);
        self.receive().0
    }

    pub(crate) fn hello(&mut self) -> Reply {
        self.hello_with(Offer::SERVED)
    }

    /// Opens the session as a guest with these versions.
    pub(crate) fn hello_with(&mut self, offer: Offer) -> Reply {
        self.hello_for(offer, 0)
    }

    /// Opens the session for a device.
    pub(crate) fn hello_for(&mut self, offer: Offer, device: u32) -> Reply {
        let welcome = self.ask(&Request::Hello {
            offer,
            name: "test".into(),
            device: DeviceIndex(device),
        });
        match &welcome {
            Reply::Welcome { protocol, .. } => self.protocol = *protocol,
            other => panic!("{other:?}"),
        }
        welcome
    }

    /// A buffer id that has not been used.
    pub(crate) fn new_buffer(&mut self) -> BufferId {
        self.last_buffer += 1;
        BufferId(self.last_buffer)
    }

    pub(crate) fn alloc(&mut self, size: u64) -> BufferId {
        let buffer = self.new_buffer();
        self.alloc_mapped(buffer, size);
        buffer
    }

    /// The reason with which ALLOC of this size is refused.
    pub(crate) fn refusal(&mut self, size: u64) -> String {
        let buffer = self.new_buffer();
        match self.ask(&Request::Alloc { buffer, size }) {
            Reply::Refused { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }

    /// Allocates a buffer. Returns its memory if the host lets the guest map it.
    pub(crate) fn alloc_mapped(&mut self, buffer: BufferId, size: u64) -> Option<Window> {
        let sent = self.send(&Request::Alloc { buffer, size });
        match self.receive().0 {
            Reply::Done { request } if request == sent => None,
            Reply::Shared {
                request,
                size: mapped,
            } if request == sent => {
                assert!(
                    mapped >= size && mapped - size < 4096,
                    "{mapped} for {size}"
                );
                Some(self.end.receive_shared(mapped).expect("a file to map"))
            }
            other => panic!("{other:?} to request {sent}"),
        }
    }

    /// Allocates a buffer with `data`.
    pub(crate) fn alloc_with(&mut self, data: &[u8]) -> BufferId {
        let buffer = self.alloc(data.len() as u64);
        self.write(buffer, 0, data);
        buffer
    }

    pub(crate) fn write(&mut self, buffer: BufferId, offset: u64, data: &[u8]) {
        self.send_with(&Request::Write { buffer, offset }, data);
    }

    pub(crate) fn read(&mut self, buffer: BufferId, offset: u64, len: u64) -> Vec<u8> {
        let request = self.send(&Request::Read {
            buffer,
            offset,
            len,
        });
        let (reply, payload) = self.receive();
        assert_eq!(reply, Reply::Data { request });
        assert_eq!(payload.len() as u64, len);
        payload
    }

    pub(crate) fn read_f32(&mut self, buffer: BufferId, count: u64) -> Vec<f32> {
        floats(&self.read(buffer, 0, 4 * count))
    }

    /// Sends a graph in as many parts as necessary.
    pub(crate) fn graph(&mut self, graph: GraphId, content: &Graph) {
        self.image(graph, &image(content));
    }

    /// Sends bytes as the image of a graph.
    pub(crate) fn image(&mut self, graph: GraphId, image: &[u8]) {
        for (i, part) in image.chunks(MAX_PAYLOAD).enumerate() {
            let request = Request::Graph {
                graph,
                offset: (i * MAX_PAYLOAD) as u64,
                total: image.len() as u64,
            };
            self.send_with(&request, part);
        }
    }

    pub(crate) fn submit(&mut self, graph: GraphId) -> u64 {
        self.send(&Request::Submit { graph })
    }

    /// Waits until all requests so far are complete. None of them may have failed.
    pub(crate) fn fence(&mut self) {
        let request = self.send(&Request::Fence {});
        assert_eq!(self.receive().0, Reply::Done { request });
    }

    /// The reason with which the host ends the session. The reason must be the next and last
    /// message of the host.
    pub(crate) fn ended(mut self) -> String {
        let (reply, _) = self.receive();
        let Reply::Ended { reason } = reply else {
            panic!("the session should have ended, but {reply:?} came");
        };
        let after = self.end.receive(&mut Vec::new(), (&mut [][..]).into());
        assert!(after.is_err(), "a message after the last: {after:?}");
        reason
    }
}

/// A guest with data and a graph, which must not be affected by other guests.
pub(crate) struct OtherGuest {
    pub(crate) guest: Guest,
    data: BufferId,
}

impl OtherGuest {
    const GRAPH: GraphId = GraphId(7);

    pub(crate) fn new(mut guest: Guest) -> OtherGuest {
        let data = guest.alloc_with(&bytes(&[1.0, 2.0]));
        guest.graph(OtherGuest::GRAPH, &add(2, data, data, data));
        guest.fence();
        OtherGuest { guest, data }
    }

    /// Checks that `violation` ends the session of `violator` with a reason that contains all of
    /// `words`, and that this guest still computes.
    pub(crate) fn check_unaffected(
        &mut self,
        mut violator: Guest,
        words: &[&str],
        violation: impl FnOnce(&mut Guest),
    ) {
        violation(&mut violator);
        let reason = violator.ended();
        for word in words {
            assert!(reason.contains(word), "{word:?} is not in {reason:?}");
        }
        self.compute();
    }

    /// Runs the graph and checks its result.
    pub(crate) fn compute(&mut self) {
        self.guest.write(self.data, 0, &bytes(&[1.0, 2.0]));
        self.guest.submit(OtherGuest::GRAPH);
        assert_eq!(self.guest.read_f32(self.data, 2), [2.0, 4.0]);
    }
}

/// Runs a graph of a guest that has sent HELLO, and checks its result.
pub(crate) fn compute(guest: &mut Guest) {
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GraphId(1), &add(2, a, a, a));
    guest.submit(GraphId(1));
    assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
}

/// Waits until `is_so`, asking each millisecond.
pub(crate) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The encoded image of a graph.
pub(crate) fn image(graph: &Graph) -> Vec<u8> {
    graph
        .encode()
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect()
}

pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

/// Builds graphs.
#[derive(Default)]
pub(crate) struct Build(pub(crate) Graph);

impl Build {
    /// A dense tensor at the start of `buffer`.
    pub(crate) fn tensor(&mut self, ty: Type, ne: [u64; 4], buffer: BufferId) -> u32 {
        let shape = Shape::contiguous(ty, ne).expect("a dense tensor");
        self.place(shape, buffer, 0)
    }

    pub(crate) fn place(&mut self, shape: Shape, buffer: BufferId, offset: u64) -> u32 {
        let known = self.0.buffers.iter().position(|&b| b == buffer);
        let buffer = known.unwrap_or_else(|| {
            self.0.buffers.push(buffer);
            self.0.buffers.len() - 1
        });
        self.0.tensors.push(Tensor {
            shape,
            buffer: buffer as u32,
            offset,
        });
        self.0.tensors.len() as u32 - 1
    }

    pub(crate) fn node(&mut self, op: Op, dst: u32, src: &[u32]) {
        self.0.nodes.push(Node {
            op,
            dst,
            src: Sources::new(src.iter().map(|&s| Some(s))),
        });
    }
}

/// `dst = a + b` on vectors of `count` f32.
pub(crate) fn add(count: u64, dst: BufferId, a: BufferId, b: BufferId) -> Graph {
    let mut build = Build::default();
    let [dst, a, b] = [dst, a, b].map(|buffer| build.tensor(Type::F32, [count, 1, 1, 1], buffer));
    build.node(Op::Add {}, dst, &[a, b]);
    build.0
}

/// `dst = table[ids]` on rows of `width` f32.
pub(crate) fn get_rows(
    width: u64,
    dst: BufferId,
    (table, rows): (BufferId, u64),
    (ids, count): (BufferId, u64),
) -> Graph {
    let mut build = Build::default();
    let dst = build.tensor(Type::F32, [width, count, 1, 1], dst);
    let table = build.tensor(Type::F32, [width, rows, 1, 1], table);
    let ids = build.tensor(Type::I32, [count, 1, 1, 1], ids);
    build.node(Op::GetRows {}, dst, &[table, ids]);
    build.0
}
