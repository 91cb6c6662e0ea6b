//! A soak test: random commands of several guests at once over unix sockets, checked against a
//! model of each guest.
//!
//! `VGPU_SOAK=1000000 cargo test --release -p vgpu-executor --test soak` runs that many commands,
//! as `cargo xtask` does for the soak benchmark.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::{Build, Guest, MEMORY, TIMEOUT};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::{Limits, Server};
use vgpu_gguf::Rng;
use vgpu_transport::ir::{BufferId, Graph, Op, Type, patch};
use vgpu_transport::link::unix::{ListenOptions, Listener, connect};
use vgpu_transport::shm::memory::Window;
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD, Reply, Request};

const GUESTS: usize = 4;

/// Buffers of a guest at once, and the largest size in bytes. Four guests fit the engine's memory.
const BUFFERS: usize = 12;
const LARGEST: u64 = 3 * MAX_PAYLOAD as u64 / 2;

/// Commands of the ordinary test.
const FEW: usize = 20_000;

#[test]
fn random_commands_of_four_guests_match_the_model_and_leak_nothing() {
    let commands = std::env::var("VGPU_SOAK").map_or(FEW, |count| count.parse().expect("a number"));
    let engine: Arc<dyn Engine> = Arc::new(CpuEngine::new(2, Some(MEMORY)).expect("two threads"));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("vgpu.sock");
    let listener = Listener::bind(&path, ListenOptions::default()).expect("a socket");
    let mut server =
        Server::new(Arc::clone(&engine), Limits::default(), 2 * GUESTS).expect("a thread");
    server.listen(listener).expect("a thread for the listener");

    // The first round makes the allocations that a process makes once. The second round is
    // measured.
    run_guests(&server, &path, 1, GUESTS * 500);
    let before = ResourceUsage::now(engine.as_ref());
    run_guests(&server, &path, 2, commands);
    let after = ResourceUsage::now(engine.as_ref());
    println!("{commands} commands; before: {before:?}, after: {after:?}");
    assert_eq!(after.used, before.used, "bytes of the engine");
    assert_eq!(after.files, before.files, "open files");
    assert!(
        after.mappings <= before.mappings + 16,
        "{after:?} after {before:?}"
    );
    // The memory allocator keeps some freed memory.
    assert!(
        after.resident <= before.resident + (32 << 20),
        "{after:?} after {before:?}"
    );
    server.shutdown();
}

/// Runs all guests until they have sent their commands.
fn run_guests(server: &Server, path: &Path, seed: u64, commands: usize) {
    std::thread::scope(|scope| {
        for guest in 0..GUESTS as u64 {
            scope.spawn(move || {
                let end = connect(path, TIMEOUT).expect("a session");
                let mut guest = RandomGuest::new(Guest::new(Box::new(end)), seed << 32 | guest);
                for _ in 0..commands / GUESTS {
                    guest.command();
                }
                guest.check_all();
            });
        }
    });
    let start = std::time::Instant::now();
    while !server.sessions().is_empty() {
        assert!(start.elapsed() < TIMEOUT, "{:?}", server.sessions());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Resources of this process.
#[derive(Debug)]
struct ResourceUsage {
    /// Bytes that the engine has allocated.
    used: u64,
    files: usize,
    mappings: usize,
    /// Bytes of resident memory.
    resident: u64,
}

impl ResourceUsage {
    fn now(engine: &dyn Engine) -> ResourceUsage {
        let status = fs::read_to_string("/proc/self/status").expect("Linux");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = resident.expect("a process has memory").trim();
        let resident: u64 = resident.trim_end_matches(" kB").parse().expect("a number");
        let memory = engine.memory();
        let maps = fs::read_to_string("/proc/self/maps").expect("Linux");
        ResourceUsage {
            used: memory.total - memory.free,
            files: fs::read_dir("/proc/self/fd").expect("Linux").count(),
            mappings: maps.lines().count(),
            resident: resident << 10,
        }
    }
}

/// A guest, and the expected contents of its buffers.
struct RandomGuest {
    guest: Guest,
    random: Rng,
    buffers: BTreeMap<u64, Held>,
    next_buffer: u64,
    /// Graphs that the host has stored: copies of a number of words from one buffer to another.
    graphs: BTreeMap<u64, Copying>,
    next_graph: u64,
}

struct Held {
    bytes: Vec<u8>,
    mapping: Option<Window>,
}

#[derive(Clone, Copy)]
struct Copying {
    dst: u64,
    src: u64,
    words: u64,
}

impl RandomGuest {
    fn new(mut guest: Guest, seed: u64) -> RandomGuest {
        guest.hello();
        RandomGuest {
            guest,
            random: Rng::new(seed, 0),
            buffers: BTreeMap::new(),
            next_buffer: 1,
            graphs: BTreeMap::new(),
            next_graph: 1,
        }
    }

    /// A random number below `count`.
    fn below(&mut self, count: u64) -> u64 {
        (self.random.next_u64() >> 16) % count.max(1)
    }

    /// A random buffer of the guest.
    fn any(&mut self) -> u64 {
        let at = self.below(self.buffers.len() as u64) as usize;
        *self.buffers.keys().nth(at).expect("there is one")
    }

    /// A random range of a buffer: mostly short, sometimes several messages long.
    fn range(&mut self, buffer: u64) -> (u64, u64) {
        let size = self.buffers[&buffer].bytes.len() as u64;
        let offset = self.below(size + 1);
        let most = [64, 4096, 40_000, MAX_PAYLOAD as u64][self.below(4) as usize];
        let len = self.below(most + 1).min(size - offset);
        (offset, len)
    }

    fn random_bytes(&mut self, len: u64) -> Vec<u8> {
        let first = self.below(1 << 32);
        (first..first + len)
            .map(|i| ((i * 167) >> 3) as u8)
            .collect()
    }

    fn command(&mut self) {
        if self.buffers.is_empty() {
            return self.alloc();
        }
        match self.below(100) {
            0..=3 if self.buffers.len() < BUFFERS => self.alloc(),
            0..=3 => self.free(),
            4 => self.free(),
            5..=29 => self.write(),
            30..=39 => self.write_mapped(),
            40..=49 => self.fill(),
            50..=59 => self.copy(),
            60..=69 => self.graph(),
            70..=84 => self.submit(),
            85..=93 => {
                let buffer = self.any();
                let (offset, len) = self.range(buffer);
                self.check(buffer, offset, len);
            }
            94..=97 => self.check_mapped(),
            98 => {
                let sent = self.guest.send(&Request::Memory {});
                let (reply, _) = self.guest.receive();
                assert!(matches!(reply, Reply::Memory { request, .. } if request == sent));
            }
            _ => self.guest.fence(),
        }
    }

    fn alloc(&mut self) {
        let size = match self.below(8) {
            0 => self.below(LARGEST),
            _ => self.below(20_000),
        };
        let buffer = self.next_buffer;
        self.next_buffer += 1;
        let mapping = self.guest.alloc_mapped(BufferId(buffer), size);
        assert_eq!(mapping.is_some(), size > 0, "over unix buffers are shared");
        let bytes = vec![0; size as usize];
        self.buffers.insert(buffer, Held { bytes, mapping });
    }

    fn free(&mut self) {
        let buffer = self.any();
        self.guest.send(&Request::Free {
            buffer: BufferId(buffer),
        });
        self.buffers.remove(&buffer);
        self.graphs
            .retain(|_, copying| copying.dst != buffer && copying.src != buffer);
    }

    fn write(&mut self) {
        let buffer = self.any();
        let (offset, len) = self.range(buffer);
        let data = self.random_bytes(len);
        self.guest.write(BufferId(buffer), offset, &data);
        self.expect(buffer, offset, &data);
    }

    /// Writes through the mapping of a buffer, which a guest may do only while no request is in
    /// flight.
    fn write_mapped(&mut self) {
        let buffer = self.any();
        let (offset, len) = self.range(buffer);
        let data = self.random_bytes(len);
        self.guest.fence();
        if let Some(mapping) = &self.buffers[&buffer].mapping {
            let range = offset as usize..(offset + len) as usize;
            mapping.bytes_mut(range).copy_from(data[..].into());
            self.expect(buffer, offset, &data);
        }
    }

    fn fill(&mut self) {
        let buffer = self.any();
        let (offset, len) = self.range(buffer);
        let value = self.below(256) as u8;
        self.guest.send(&Request::Fill {
            buffer: BufferId(buffer),
            offset,
            len,
            value,
        });
        self.expect(buffer, offset, &vec![value; len as usize]);
    }

    fn copy(&mut self) {
        let (dst, src) = (self.any(), self.any());
        let ((dst_offset, dst_len), (src_offset, src_len)) = (self.range(dst), self.range(src));
        let len = dst_len.min(src_len);
        self.guest.send(&Request::Copy {
            dst: BufferId(dst),
            dst_offset,
            src: BufferId(src),
            src_offset,
            len,
        });
        let from = src_offset as usize..(src_offset + len) as usize;
        let data = self.buffers[&src].bytes[from].to_vec();
        self.expect(dst, dst_offset, &data);
    }

    /// Sends a graph that copies words, completely or as a patch of another graph.
    fn graph(&mut self) {
        let (dst, src) = (self.any(), self.any());
        let room = |buffer: u64| self.buffers[&buffer].bytes.len() as u64 / 4;
        let most = room(dst).min(room(src));
        if dst == src || most == 0 {
            return;
        }
        let words = 1 + self.below(most);
        let copying = Copying { dst, src, words };
        let id = GraphId(self.next_graph);
        self.next_graph += 1;
        let new = copying.graph().encode();
        let base = self
            .graphs
            .iter()
            .next_back()
            .map(|(&id, base)| (id, base.graph()));
        let patch = base.and_then(|(base, graph)| {
            let patch = patch::diff(&graph.encode(), &new, new.len() / 2)?;
            Some((GraphId(base), patch))
        });
        match patch {
            Some((base, patch)) => {
                let bytes: Vec<u8> = patch.iter().flat_map(|word| word.to_le_bytes()).collect();
                self.guest
                    .send_with(&Request::Patch { graph: id, base }, &bytes);
            }
            None => self.guest.graph(id, &copying.graph()),
        }
        self.graphs.insert(id.0, copying);
        if self.graphs.len() > 32 {
            let (oldest, _) = self.graphs.pop_first().expect("there are many");
            self.guest.send(&Request::Forget {
                graph: GraphId(oldest),
            });
        }
    }

    fn submit(&mut self) {
        let at = self.below(self.graphs.len() as u64) as usize;
        let Some((&graph, &Copying { dst, src, words })) = self.graphs.iter().nth(at) else {
            return;
        };
        self.guest.submit(GraphId(graph));
        let data = self.buffers[&src].bytes[..4 * words as usize].to_vec();
        self.expect(dst, 0, &data);
    }

    /// Updates the expected contents.
    fn expect(&mut self, buffer: u64, offset: u64, data: &[u8]) {
        let held = self.buffers.get_mut(&buffer).expect("it is ours");
        held.bytes[offset as usize..offset as usize + data.len()].copy_from_slice(data);
    }

    fn check(&mut self, buffer: u64, offset: u64, len: u64) {
        let seen = self.guest.read(BufferId(buffer), offset, len);
        let range = offset as usize..(offset + len) as usize;
        let expected = &self.buffers[&buffer].bytes[range];
        assert!(seen == expected, "buffer {buffer}, {len} bytes at {offset}");
    }

    fn check_mapped(&mut self) {
        let buffer = self.any();
        let (offset, len) = self.range(buffer);
        self.guest.fence();
        let held = &self.buffers[&buffer];
        if let Some(mapping) = &held.mapping {
            let range = offset as usize..(offset + len) as usize;
            let mut seen = vec![0; len as usize];
            mapping.bytes(range.clone()).copy_to(&mut seen);
            assert!(
                seen == held.bytes[range],
                "buffer {buffer}, {len} mapped at {offset}"
            );
        }
    }

    fn check_all(&mut self) {
        let sizes: Vec<(u64, u64)> = self
            .buffers
            .iter()
            .map(|(&buffer, held)| (buffer, held.bytes.len() as u64))
            .collect();
        for (buffer, size) in sizes {
            for offset in (0..size).step_by(MAX_PAYLOAD) {
                self.check(buffer, offset, (size - offset).min(MAX_PAYLOAD as u64));
            }
        }
    }
}

impl Copying {
    fn graph(self) -> Graph {
        let mut build = Build::default();
        let ne = [self.words, 1, 1, 1];
        let [dst, src] =
            [self.dst, self.src].map(|buffer| build.tensor(Type::I32, ne, BufferId(buffer)));
        build.node(Op::Copy {}, dst, &[src]);
        build.0
    }
}
