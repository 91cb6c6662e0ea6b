//! Rng requests on weights, in several sessions of one user: every buffer has the bytes of a
//! model, and the memory in use is at most what the buffers are charged for.

#[path = "../../tests/common/mod.rs"]
mod cache;
mod common;

use std::collections::HashMap;
use std::fs;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;

use common::model::hash;
use common::{Guest, Host, wait_for};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::weights::Sharing;
use vgpu_executor::{Limits, Process, WeightStore};
use vgpu_ggml::{BackendOptions, GgmlEngine};
use vgpu_gguf::Rng;
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{ContentHash, MIN_EXTENT, Reply, Request, Wanted};

/// Bytes of an extent, and of a buffer.
const EXTENT: u64 = 20 * MIN_EXTENT + 512;
const BUFFER: u64 = 4 * EXTENT;

/// Payload of a WRITE.
const CHUNK: usize = 8 * MIN_EXTENT as usize;

/// Buffers that a session has at most.
const BUFFERS: usize = 2;

/// Different contents, with their hashes. Some differ in their last byte only.
static CONTENTS: LazyLock<Vec<(Vec<u8>, ContentHash)>> = LazyLock::new(|| {
    let content = |seed: u64| {
        let mut random = Rng::new(seed / 2 + 1, 0);
        let mut bytes: Vec<u8> = (0..EXTENT).map(|_| 1 + random.below(255) as u8).collect();
        bytes[EXTENT as usize - 1] = seed as u8;
        let hash = hash(&bytes);
        (bytes, hash)
    };
    (0..6).map(content).collect()
});

/// The tests measure the memory of the process, so they run one after the other.
static MEASURING: Mutex<()> = Mutex::new(());

/// The CPU engine.
fn cpu() -> Arc<dyn Engine> {
    Arc::new(CpuEngine::new(1, Some(1 << 30)).expect("a thread"))
}

/// The engine over ggml's CPU backend.
fn ggml_cpu() -> Arc<dyn Engine> {
    let options = BackendOptions {
        threads: 1,
        memory: Some(1 << 30),
        shares_weights: Some(true),
        ..BackendOptions::default()
    };
    let path = cache::cached("build-llama-0.3.36/bin/libggml-cpu.so");
    let cpu = Arc::new(CpuEngine::new(1, None).expect("a thread"));
    Arc::new(GgmlEngine::start(&path, &options, cpu).expect("`cargo xtask setup` makes it"))
}

fn host(engine: Arc<dyn Engine>) -> (Host, WeightStore) {
    // As in a process that serves guests: what is freed does not count.
    vgpu_executor::limit_kept_memory();
    // PR_SET_THP_DISABLE: the first byte of a huge page counts as 2 MiB.
    const NO_HUGE_PAGES: libc::c_int = 41;
    // SAFETY: the call takes numbers only and changes no mapping.
    assert_eq!(unsafe { libc::prctl(NO_HUGE_PAGES, 1, 0, 0, 0) }, 0);
    let host = Host::limited(engine, Limits::default(), 64);
    let weights = WeightStore::new(Sharing::Tenant, None).expect("a store");
    host.server
        .share_weights(weights.clone())
        .expect("a thread");
    (host, weights)
}

fn connect(host: &Host) -> Guest {
    let mut guest = host.connect_as(Some(Process {
        pid: 1,
        uid: 7,
        program: None,
    }));
    guest.hello();
    guest
}

/// A session, and the bytes that its buffers must have.
struct Driver {
    guest: Guest,
    buffers: Vec<Buffer>,
    /// The bytes of buffers that were freed, for new ones: the model's own memory does not change.
    spare: Vec<Vec<u8>>,
    random: Rng,
}

struct Buffer {
    id: BufferId,
    bytes: Vec<u8>,
    is_sealed: bool,
    /// The contents that the host has reserved.
    reserved: Vec<usize>,
}

impl Driver {
    fn new(guest: Guest, seed: u64) -> Driver {
        Driver {
            guest,
            buffers: Vec::new(),
            spare: vec![vec![1; BUFFER as usize]; BUFFERS],
            random: Rng::new(seed, 0),
        }
    }

    /// Waits for all requests so far. Returns whether one of them has failed.
    fn fence(&mut self) -> bool {
        let request = self.guest.send(&Request::Fence {});
        let mut has_failed = false;
        loop {
            match self.guest.receive().0 {
                Reply::Done { request: of } if of == request => return has_failed,
                Reply::Failed { reason, .. } => {
                    assert!(reason.contains("no longer on the host"), "{reason}");
                    has_failed = true;
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn free_all(&mut self) {
        self.spare
            .extend(self.buffers.drain(..).map(|buffer| buffer.bytes));
    }

    fn check(&mut self) {
        for buffer in &self.buffers {
            for (i, part) in buffer.bytes.chunks(CHUNK).enumerate() {
                let offset = (i * CHUNK) as u64;
                let seen = self.guest.read(buffer.id, offset, part.len() as u64);
                assert!(
                    seen == part,
                    "other bytes at {offset} of buffer {}",
                    buffer.id.0
                );
            }
        }
    }

    fn new_buffer(&mut self) {
        let Some(mut bytes) = self.spare.pop() else {
            return;
        };
        let id = self.guest.alloc(BUFFER);
        let held = self.guest.ask(&Request::Weights { buffer: id });
        assert!(matches!(held, Reply::Held { .. }), "{held:?}");
        bytes.fill(0);
        self.buffers.push(Buffer {
            id,
            bytes,
            is_sealed: false,
            reserved: Vec::new(),
        });
    }

    /// A random request, or a few that belong together.
    fn step(&mut self) {
        if self.buffers.is_empty() {
            return self.new_buffer();
        }
        let which = self.random.below(self.buffers.len() as u64) as usize;
        let known = self.random.below(CONTENTS.len() as u64) as usize;
        let (content, hash) = &CONTENTS[known];
        let offset = self.random.below(4) * EXTENT;
        let range = offset as usize..(offset + EXTENT) as usize;
        let (start, len) = (self.random.below(BUFFER - 100), 1 + self.random.below(100));
        let act = self.random.below(14);
        let (guest, buffer) = (&mut self.guest, &mut self.buffers[which]);
        let id = buffer.id;
        match act {
            0 => self.new_buffer(),
            1 => {
                guest.send(&Request::Free { buffer: id });
                let Buffer { bytes, .. } = self.buffers.swap_remove(which);
                self.spare.push(bytes);
            }
            2..=6 => {
                guest.send(&Request::Extent {
                    buffer: id,
                    offset,
                    len: EXTENT,
                });
                // Some uploads stop in the middle.
                let sent = match self.random.below(4) {
                    0 => self.random.below(EXTENT) as usize,
                    _ => content.len(),
                };
                for (i, chunk) in content[..sent].chunks(CHUNK).enumerate() {
                    guest.write(id, offset + (i * CHUNK) as u64, chunk);
                }
                buffer.bytes[range][..sent].copy_from_slice(&content[..sent]);
            }
            7 => {
                let value = 1 + self.random.below(255) as u8;
                guest.write(id, start, &vec![value; len as usize]);
                buffer.bytes[start as usize..][..len as usize].fill(value);
            }
            8 => {
                let (offset, len) = (start / 2, BUFFER / 2);
                let value = 1 + self.random.below(255) as u8;
                guest.send(&Request::Fill {
                    buffer: id,
                    offset,
                    len,
                    value,
                });
                buffer.bytes[offset as usize..][..len as usize].fill(value);
            }
            9 => {
                guest.send(&Request::Seal { buffer: id });
                buffer.is_sealed = true;
            }
            10 => {
                let request = Request::Lookup {
                    buffer: id,
                    offset,
                    len: EXTENT,
                    hash: *hash,
                };
                match guest.ask(&request) {
                    Reply::Done { .. } => buffer.bytes[range].copy_from_slice(content),
                    Reply::Missing { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
            11 => {
                let wanted = Wanted(CONTENTS.iter().map(|(_, hash)| (*hash, EXTENT)).collect());
                match guest.ask(&Request::Query { buffer: id, wanted }) {
                    Reply::Have { indices, .. } => {
                        let indices = indices.0.into_iter().map(|index| index as usize);
                        buffer.reserved = indices.collect();
                    }
                    other => panic!("{other:?}"),
                }
            }
            12 if !buffer.is_sealed && buffer.reserved.contains(&known) => {
                guest.send(&Request::Attach {
                    buffer: id,
                    offset,
                    len: EXTENT,
                    hash: *hash,
                });
                if !self.fence() {
                    self.buffers[which].bytes[range].copy_from_slice(content);
                }
            }
            _ => {
                let seen = guest.read(id, start, len);
                assert!(seen == buffer.bytes[start as usize..][..len as usize]);
            }
        }
    }
}

/// Anonymous memory of this process that is resident, in bytes, without what the allocator of the C
/// library keeps of freed blocks: up to 1 MiB at the end of each of four heaps, and what is free
/// between blocks in use.
fn resident() -> u64 {
    // SAFETY: the function takes no pointer, and moves no memory that is in use.
    unsafe { libc::malloc_trim(0) };
    let status = fs::read_to_string("/proc/self/status").expect("this process");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.parse::<u64>().ok())
        .expect("a number")
        << 10
}

/// Locks a mutex of a test, under which the executor works.
fn outer<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn random_requests_keep_contents_and_need_no_more_memory_than_is_charged() {
    random_requests(cpu());
}

#[test]
fn random_requests_on_ggml_keep_contents_and_need_no_more_memory_than_is_charged() {
    random_requests(ggml_cpu());
}

/// Checks that nothing stays of sessions that have ended. The thread that hashes may have an
/// extent, for the time of a chunk.
fn end(host: &Host, weights: &WeightStore) {
    let memory = || host.engine.memory();
    wait_for("free memory", || memory().free == memory().total);
    wait_for("the end of extents", || weights.stats().extents == 0);
}

fn random_requests(engine: Arc<dyn Engine>) {
    let _measuring = outer(&MEASURING);
    LazyLock::force(&CONTENTS);
    let (host, weights) = host(engine);
    for seed in 1..3 {
        let mut drivers: Vec<Driver> = (0..3)
            .map(|i| Driver::new(connect(&host), seed * 100 + i))
            .collect();
        let before = resident();
        let mut random = Rng::new(seed, 0);
        let mut used: HashMap<bool, u64> = HashMap::new();
        for step in 0..300 {
            let which = random.below(3) as usize;
            if random.below(60) == 0 {
                // The session ends, whatever it was doing.
                let driver = &mut drivers[which];
                driver.free_all();
                driver.guest = connect(&host);
                while host.server.sessions().len() > 3 {
                    thread::yield_now();
                }
            }
            drivers[which].step();
            if step % 10 > 0 {
                continue;
            }
            for driver in &mut drivers {
                driver.check();
            }
            let buffers: usize = drivers.iter().map(|driver| driver.buffers.len()).sum();
            let charged = buffers as u64 * BUFFER;
            // Less than an extent for what else the process allocates.
            let resident = resident().saturating_sub(before);
            assert!(
                resident <= charged + EXTENT * 3 / 4,
                "{resident} bytes resident, {charged} charged: seed {seed}, step {step}"
            );
            *used.entry(resident * 2 > charged).or_default() += 1;
        }
        assert!(used.contains_key(&true), "the memory is not measured");
        drop(drivers);
        host.wait_until_empty();
    }
    let stats = weights.stats();
    assert!(
        stats.merged > EXTENT && stats.not_sent > EXTENT,
        "{stats:?}"
    );
    end(&host, &weights);
}

#[test]
fn sessions_that_race_on_one_store_keep_their_contents() {
    race(cpu());
}

#[test]
fn sessions_that_race_on_one_store_of_ggml_keep_their_contents() {
    race(ggml_cpu());
}

fn race(engine: Arc<dyn Engine>) {
    let _measuring = outer(&MEASURING);
    let (host, weights) = host(engine);
    let connecting = Mutex::new(&host);
    let connect = || connect(*outer(&connecting));
    // Contents are known when they have been hashed, which has a low priority: how many of them
    // need not be sent is a matter of time.
    for round in 0..20 {
        thread::scope(|scope| {
            for seed in 6 * round..6 * round + 6 {
                let connect = &connect;
                scope.spawn(move || {
                    let mut driver = Driver::new(connect(), seed * 1000 + 17);
                    for step in 0..120 {
                        if driver.random.below(30) == 0 {
                            driver.free_all();
                            driver.guest = connect();
                        }
                        driver.step();
                        if step % 25 == 0 {
                            driver.check();
                        }
                    }
                    driver.check();
                });
            }
        });
        let stats = weights.stats();
        if stats.merged > EXTENT && stats.not_sent > EXTENT {
            break;
        }
    }
    host.wait_until_empty();
    let stats = weights.stats();
    assert!(
        stats.merged > EXTENT && stats.not_sent > EXTENT,
        "{stats:?}"
    );
    end(&host, &weights);
}
