//! Memory while several guests load the same model at once: their weights need one copy at any
//! time, not only after the end of all loads.

#[path = "../../tests/common/mod.rs"]
mod cache;
mod common;

use std::fs;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use common::model::for_weights;
use common::{Guest, Host, TIMEOUT, wait_for};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::weights::Sharing;
use vgpu_executor::{Limits, Process, WeightStore};
use vgpu_ggml::{BackendOptions, GgmlEngine};
use vgpu_gguf::Rng;
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{MAX_PAYLOAD, MIN_EXTENT, Request};

/// Bytes of a large tensor, and of the small one behind it, which is no extent.
const LARGE: usize = 4 << 20;
const SMALL: usize = 3 << 10;

/// Guests that load at once.
const GUESTS: usize = 4;

/// The tests measure the memory of the process, so they run one after the other.
static MEASURING: Mutex<()> = Mutex::new(());

/// A model: pairs of a large and a small tensor with random bytes.
struct Model {
    bytes: Vec<u8>,
}

impl Model {
    fn random(pairs: usize, seed: u64) -> Model {
        let mut bytes = vec![0; pairs * (LARGE + SMALL)];
        Rng::new(seed, 0).fill(&mut bytes);
        Model { bytes }
    }

    fn tensors(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let pairs = (0..self.bytes.len()).step_by(LARGE + SMALL);
        pairs.flat_map(|at| [at..at + LARGE, at + LARGE..at + LARGE + SMALL])
    }

    /// The same model, with another last byte in the tensors that `choose` chooses.
    fn with_other_ends(&self, add: u8, choose: impl Fn(usize) -> bool) -> Model {
        let mut bytes = self.bytes.clone();
        for (index, tensor) in self.tensors().enumerate() {
            if choose(index) {
                bytes[tensor.end - 1] = bytes[tensor.end - 1].wrapping_add(add);
            }
        }
        Model { bytes }
    }
}

/// The memory of the engine.
const MEMORY: u64 = 1 << 30;

fn host() -> (Host, WeightStore) {
    host_on(Arc::new(CpuEngine::new(1, Some(MEMORY)).expect("a thread")))
}

fn host_on(engine: Arc<dyn Engine>) -> (Host, WeightStore) {
    let host = Host::limited(engine, Limits::default(), 64);
    let weights = WeightStore::new(Sharing::Tenant, None).expect("a store");
    host.server
        .share_weights(weights.clone())
        .expect("a thread");
    (host, weights)
}

/// A program of one user, with a buffer for the model.
fn guest(host: &Host, model: &Model) -> (Guest, BufferId) {
    let process = Process {
        pid: 1,
        uid: 7,
        program: None,
    };
    let mut guest = host.connect_as(Some(process));
    guest.hello();
    let (buffer, lengths) = for_weights(&mut guest, model.bytes.len() as u64);
    assert!(lengths.is_empty(), "{lengths:?}");
    (guest, buffer)
}

/// Uploads as the plugin does. Calls `before` before each payload with its offset in the model.
fn upload(guest: &mut Guest, buffer: BufferId, model: &Model, mut before: impl FnMut(usize)) {
    for tensor in model.tensors() {
        let (offset, len) = (tensor.start as u64, tensor.len() as u64);
        if len >= MIN_EXTENT {
            guest.send(&Request::Extent {
                buffer,
                offset,
                len,
            });
        }
        for at in tensor.clone().step_by(MAX_PAYLOAD) {
            before(at);
            let end = tensor.end.min(at + MAX_PAYLOAD);
            guest.write(buffer, at as u64, &model.bytes[at..end]);
        }
    }
}

/// Loads the model to its end.
fn load(guest: &mut Guest, buffer: BufferId, model: &Model) {
    upload(guest, buffer, model, |_| ());
    guest.send(&Request::Seal { buffer });
    guest.fence();
}

/// Whether the buffer has the bytes of the model.
fn has(guest: &mut Guest, buffer: BufferId, model: &Model) -> bool {
    let mut parts = model.bytes.chunks(MAX_PAYLOAD).enumerate();
    parts.all(|(i, part)| {
        let offset = (i * MAX_PAYLOAD) as u64;
        guest.read(buffer, offset, part.len() as u64) == part
    })
}

/// Anonymous memory of this process that is resident, in bytes. Windows and files do not count.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("this process");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.parse::<u64>().ok())
        .expect("a number")
        << 10
}

/// Runs `act`, and returns by how much the memory of this process grew at most meanwhile.
fn peak_of(act: impl FnOnce()) -> u64 {
    let (before, is_over) = (resident(), AtomicBool::new(false));
    let peak = AtomicU64::new(before);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                peak.fetch_max(resident(), Ordering::Relaxed);
                thread::sleep(Duration::from_micros(500));
            }
        });
        act();
        is_over.store(true, Ordering::Relaxed);
    });
    peak.into_inner() - before
}

/// No huge pages: their first byte counts as 2 MiB.
fn measuring() -> std::sync::MutexGuard<'static, ()> {
    const NO_HUGE_PAGES: libc::c_int = 41; // PR_SET_THP_DISABLE
    // SAFETY: the call takes numbers only and changes no mapping.
    assert_eq!(unsafe { libc::prctl(NO_HUGE_PAGES, 1, 0, 0, 0) }, 0);
    MEASURING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn assert_copies(peak: u64, model: &Model, most: f64) {
    let copies = peak as f64 / model.bytes.len() as f64;
    assert!(
        copies <= most,
        "{copies:.2} copies at the peak, {most} allowed"
    );
    assert!(
        copies > 0.9,
        "{copies:.2} copies: the memory is not measured"
    );
}

/// Frees everything, and checks that nothing stays.
fn end(host: &Host, guests: Vec<(Guest, BufferId)>) {
    drop(guests);
    host.wait_until_empty();
    // The thread that hashes may have an extent, for the time of a chunk.
    let memory = || host.engine.memory();
    wait_for("free memory", || memory().free == memory().total);
}

#[test]
fn guests_that_load_at_once_need_one_copy_at_any_time() {
    load_at_once(host);
}

/// The engine over a backend of ggml, whose memory is that of the host.
#[test]
fn guests_that_load_at_once_need_one_copy_on_ggmls_cpu_backend() {
    let options = BackendOptions {
        threads: 1,
        memory: Some(MEMORY),
        shares_weights: Some(true),
        ..BackendOptions::default()
    };
    let path = cache::cached("build-llama-0.3.36/bin/libggml-cpu.so");
    load_at_once(|| {
        let cpu = Arc::new(CpuEngine::new(1, None).unwrap());
        let engine = GgmlEngine::start(&path, &options, cpu);
        host_on(Arc::new(engine.unwrap()))
    });
}

fn load_at_once(host: impl FnOnce() -> (Host, WeightStore)) {
    let _measuring = measuring();
    let (host, weights) = host();
    let model = Model::random(25, 1);
    let mut guests: Vec<_> = (0..GUESTS).map(|_| guest(&host, &model)).collect();
    let start = Barrier::new(GUESTS);
    let peak = peak_of(|| {
        thread::scope(|scope| {
            for (guest, buffer) in &mut guests {
                scope.spawn(|| {
                    start.wait();
                    load(guest, *buffer, &model);
                });
            }
        });
    });
    assert_copies(peak, &model, 1.3);
    for (guest, buffer) in &mut guests {
        assert!(has(guest, *buffer, &model));
    }
    let merged = weights.stats().merged as f64 / model.bytes.len() as f64;
    assert!(merged > 2.7, "{merged} of 3 copies merged");
    end(&host, guests);
}

#[test]
fn guests_that_start_one_after_the_other_need_one_copy_at_any_time() {
    let _measuring = measuring();
    let (host, _weights) = host();
    let model = Model::random(12, 2);
    let mut guests: Vec<_> = (0..GUESTS).map(|_| guest(&host, &model)).collect();
    let peak = peak_of(|| {
        for (guest, buffer) in &mut guests {
            load(guest, *buffer, &model);
        }
    });
    assert_copies(peak, &model, 1.3);
    // The first one ends, and the others keep its weights.
    drop(guests.remove(0));
    for (guest, buffer) in &mut guests {
        assert!(has(guest, *buffer, &model));
    }
    end(&host, guests);
}

#[test]
fn a_guest_that_stalls_while_it_loads_delays_others_for_a_limited_time() {
    let _measuring = measuring();
    let (host, _weights) = host();
    let model = Model::random(13, 3);
    let mut guests: Vec<_> = (0..GUESTS).map(|_| guest(&host, &model)).collect();
    let (mut stalling, its) = guests.remove(0);
    let (stalls, has_stalled) = std::sync::mpsc::channel();
    let (goes_on, others_are_done) = std::sync::mpsc::channel();
    // In the middle of a large tensor, in the middle of the model.
    let stall_at = 6 * (LARGE + SMALL) + 2 * MAX_PAYLOAD;
    let peak = peak_of(|| {
        thread::scope(|scope| {
            let (stalling, model) = (&mut stalling, &model);
            scope.spawn(move || {
                upload(stalling, its, model, |at| {
                    if at == stall_at {
                        stalls.send(()).expect("the test waits");
                        let others = others_are_done.recv_timeout(TIMEOUT);
                        others.expect("the other guests load without this one");
                    }
                });
                stalling.send(&Request::Seal { buffer: its });
                stalling.fence();
            });
            has_stalled.recv_timeout(TIMEOUT).expect("half a load");
            let status = host.server.status_handle();
            thread::scope(|scope| {
                let others = guests.iter_mut();
                let loads: Vec<_> = others
                    .map(|(guest, buffer)| scope.spawn(|| load(guest, *buffer, model)))
                    .collect();
                // Who waits for whom. Sessions have the numbers from 1 on.
                let waits = "waits for the upload of the same weights by session 1, request ";
                while !status.dump().contains(waits) {
                    let are_done = loads.iter().all(thread::ScopedJoinHandle::is_finished);
                    assert!(!are_done, "no session has waited");
                    thread::sleep(Duration::from_millis(1));
                }
            });
            goes_on.send(()).expect("the first guest waits");
        });
    });
    assert_copies(peak, &model, 1.3);
    guests.push((stalling, its));
    for (guest, buffer) in &mut guests {
        assert!(has(guest, *buffer, &model));
    }
    end(&host, guests);
}

#[test]
fn models_that_differ_in_the_last_byte_share_the_rest() {
    let _measuring = measuring();
    let (host, _weights) = host();
    let model = Model::random(25, 4);
    let last_large = 2 * 25 - 2;
    let models: Vec<Model> = (0..GUESTS)
        .map(|i| model.with_other_ends(i as u8, |tensor| tensor == last_large))
        .collect();
    let mut guests: Vec<_> = models.iter().map(|model| guest(&host, model)).collect();
    let start = Barrier::new(GUESTS);
    let peak = peak_of(|| {
        thread::scope(|scope| {
            for ((guest, buffer), model) in guests.iter_mut().zip(&models) {
                scope.spawn(|| {
                    start.wait();
                    load(guest, *buffer, model);
                });
            }
        });
    });
    // Four copies of one tensor of 25.
    assert_copies(peak, &model, 1.3);
    for ((guest, buffer), model) in guests.iter_mut().zip(&models) {
        assert!(has(guest, *buffer, model));
    }
    end(&host, guests);
}

#[test]
fn tensors_that_all_differ_in_the_last_byte_are_not_mixed() {
    let _measuring = measuring();
    let (host, _weights) = host();
    let model = Model::random(4, 5);
    // Three guests have one model, three have another one.
    let models: Vec<Model> = (0..6)
        .map(|i| model.with_other_ends(i % 2, |_| true))
        .collect();
    let mut guests: Vec<_> = models.iter().map(|model| guest(&host, model)).collect();
    let start = Barrier::new(models.len());
    thread::scope(|scope| {
        for ((guest, buffer), model) in guests.iter_mut().zip(&models) {
            scope.spawn(|| {
                start.wait();
                load(guest, *buffer, model);
            });
        }
    });
    for ((guest, buffer), model) in guests.iter_mut().zip(&models) {
        assert!(has(guest, *buffer, model));
    }
    end(&host, guests);
}
