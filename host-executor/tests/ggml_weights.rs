//! Guests that share weights on the engine over a backend of ggml.

#[path = "../../tests/common/mod.rs"]
mod cache;
#[path = "../../tests/common/changed_backend.rs"]
mod changed_backend;
mod common;

use std::path::Path;
use std::sync::Arc;

use changed_backend::{Changes, changed_backend};
use common::model::{for_weights, lookup, read_all, upload, write};
use common::weights::{EXTENTS, SMALL, first, guest, load, model_of, parts, small};
use common::{Guest, Host, add, bytes, floats, wait_for};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::weights::Sharing;
use vgpu_executor::{GuestRule, Limits, Policy, Rules, WeightStore};
use vgpu_ggml::{BackendOptions, GgmlEngine};
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{GraphId, Reply, Request};

const GRAPH: GraphId = GraphId(7);

/// The elements that it uses.
const COUNT: u64 = 1000;

/// The tensors of the model, and all of it. A constant of some KiB is not what is measured.
const FIRST: u64 = 32 << 20;
const SECOND: u64 = 16 << 20;
const MODEL: u64 = FIRST + SMALL + SECOND;

/// What else a session has: the buffers of a graph.
const OTHERS: u64 = 64 << 10;

/// A host, and what its engine takes besides the bytes of weights.
struct Served {
    host: Host,
    store: WeightStore,
    /// For the buffer of a segment at most.
    segment: u64,
    /// For a buffer that is not sealed: what is reserved for its first segment.
    loading: u64,
}

fn model(seed: u32) -> Vec<u8> {
    model_of(seed, MODEL)
}

fn engine(path: &Path) -> Arc<dyn Engine> {
    let options = BackendOptions {
        threads: 1,
        memory: Some(512 << 20),
        shares_weights: Some(true),
        ..BackendOptions::default()
    };
    let cpu = Arc::new(CpuEngine::new(1, None).unwrap());
    Arc::new(GgmlEngine::start(path, &options, cpu).unwrap())
}

/// On ggml's CPU backend.
fn on_cpu() -> Served {
    on_cpu_with(Limits::default())
}

fn on_cpu_with(limits: Limits) -> Served {
    let path = cache::cached("build-llama-0.3.36/bin/libggml-cpu.so");
    let segment = 8448;
    serve(engine(&path), limits, segment, segment)
}

/// On a GPU, whose new buffers have old bytes.
fn on_gpu(folder: &Path) -> Served {
    let changes = Changes {
        kind: "GGML_BACKEND_DEVICE_TYPE_GPU",
        old_bytes: true,
        ..Changes::default()
    };
    let path = changed_backend(&cache::cached(""), folder, &changes);
    let segment = (2 << 20) + 4352;
    serve(engine(&path), Limits::default(), segment, segment)
}

fn serve(engine: Arc<dyn Engine>, limits: Limits, segment: u64, loading: u64) -> Served {
    let host = Host::limited(engine, limits, 64);
    let store = WeightStore::new(Sharing::Tenant, None).expect("a store");
    host.server.share_weights(store.clone()).expect("a thread");
    Served {
        host,
        store,
        segment,
        loading,
    }
}

/// The bytes of the engine's memory that are taken.
fn used(host: &Host) -> u64 {
    let memory = host.engine.memory();
    memory.total - memory.free
}

impl Served {
    /// Whether so many bytes are taken, and what two sealed buffers take besides, and `loading`
    /// others.
    fn has(&self, bytes: u64, loading: u64) -> bool {
        let most = bytes + 4 * self.segment + 2 * OTHERS + loading * self.loading;
        (bytes..=most).contains(&used(&self.host))
    }
}

/// A graph that adds one to the first elements of the weights. Returns the buffer of the sums.
fn add_one(guest: &mut Guest, weights: BufferId) -> BufferId {
    let ones = guest.alloc_with(&bytes(&[1.0; COUNT as usize]));
    let dst = guest.alloc(4 * COUNT);
    guest.graph(GRAPH, &add(COUNT, dst, weights, ones));
    dst
}

/// Runs the graph.
fn sums(guest: &mut Guest, dst: BufferId) -> Vec<f32> {
    guest.submit(GRAPH);
    floats(&guest.read(dst, 0, 4 * COUNT))
}

fn expected(model: &[u8]) -> Vec<f32> {
    { floats(&model[..4 * COUNT as usize]).into_iter() }
        .map(|x| x + 1.0)
        .collect()
}

/// Uploads all of the model, without asking for what the host has.
fn send_all(guest: &mut Guest, buffer: BufferId, model: &[u8]) {
    for (offset, part) in parts(model) {
        upload(guest, buffer, offset, part);
    }
    let (offset, part) = small(model);
    write(guest, buffer, offset, part);
    guest.fence();
}

fn seal(guest: &mut Guest, buffer: BufferId) {
    guest.send(&Request::Seal { buffer });
    guest.fence();
}

#[test]
fn guests_that_load_the_same_model_use_one_copy_of_it() {
    let folder = tempfile::tempdir().unwrap();
    for served in [on_cpu(), on_gpu(folder.path())] {
        let Served { host, store, .. } = &served;
        let model = model(3);
        let (mut one, one_has) = first(host, store, 7, &model);
        assert!(served.has(MODEL, 0), "{}", used(host));
        let one_sums = add_one(&mut one, one_has);
        assert_eq!(sums(&mut one, one_sums), expected(&model));
        // The second sends nothing of the large tensors.
        let mut two = guest(host, 7);
        let before = used(host);
        let (two_has, not_sent) = load(&mut two, &model);
        assert_eq!(not_sent, FIRST + SECOND);
        let more = used(host) - before;
        assert!(more <= SMALL + served.segment, "{more} bytes for {MODEL}");
        // The third sends them, runs a graph, and gives the memory back once they are hashed. Its
        // plan does not keep it.
        let alone = used(host);
        let mut three = guest(host, 7);
        let (three_has, _) = for_weights(&mut three, MODEL);
        send_all(&mut three, three_has, &model);
        let three_sums = add_one(&mut three, three_has);
        assert_eq!(sums(&mut three, three_sums), expected(&model));
        seal(&mut three, three_has);
        wait_for("the third's memory", || {
            three.fence();
            used(host) <= alone + SMALL + served.segment + OTHERS
        });
        let two_sums = add_one(&mut two, two_has);
        for (guest, weights, sum) in [
            (&mut one, one_has, one_sums),
            (&mut two, two_has, two_sums),
            (&mut three, three_has, three_sums),
        ] {
            assert_eq!(sums(guest, sum), expected(&model));
            assert!(read_all(guest, weights, MODEL) == model);
        }
        // The first writes, and ends. No one else sees it.
        let before = used(host);
        one.write(one_has, 0, &[7; 64]);
        assert_eq!(one.read(one_has, 0, 64), [7; 64]);
        let more = used(host) - before;
        assert!((FIRST..=FIRST + served.segment).contains(&more), "{more}");
        assert_ne!(sums(&mut one, one_sums), expected(&model));
        for (guest, sum) in [(&mut two, two_sums), (&mut three, three_sums)] {
            assert_eq!(sums(guest, sum), expected(&model));
        }
        drop(one);
        wait_for("the first's end", || host.server.sessions().len() == 2);
        assert!(read_all(&mut two, two_has, MODEL) == model);
        drop(two);
        wait_for("the second's end", || host.server.sessions().len() == 1);
        assert_eq!(sums(&mut three, three_sums), expected(&model));
        assert!(read_all(&mut three, three_has, MODEL) == model);
        drop(three);
        host.wait_until_empty();
        assert_eq!(used(host), 0);
        assert_eq!(store.stats().extents, 0);
    }
}

/// In the host's memory, an upload is compared with those of others. On a GPU, each guest needs
/// room for its copy until the tensors are hashed.
#[test]
fn loads_at_once_need_one_copy_in_host_memory_and_one_each_on_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    for (is_gpu, served) in [(false, on_cpu()), (true, on_gpu(folder.path()))] {
        let Served { host, store, .. } = &served;
        let model = model(11);
        let mut at_once = [0; 2].map(|_| {
            let mut guest = guest(host, 7);
            let (buffer, _) = for_weights(&mut guest, MODEL);
            (guest, buffer)
        });
        assert!(served.has(2 * MODEL, 2), "{}", used(host));
        for (guest, buffer) in &mut at_once {
            send_all(guest, *buffer, &model);
        }
        let copies = if is_gpu { 2 } else { 1 };
        assert!(served.has(copies * MODEL, 2), "{}", used(host));
        for (guest, buffer) in &mut at_once {
            seal(guest, *buffer);
        }
        wait_for("the memory of one of them", || {
            at_once.iter_mut().for_each(|(guest, _)| guest.fence());
            served.has(MODEL, 0)
        });
        for (guest, buffer) in &mut at_once {
            let dst = add_one(guest, *buffer);
            assert_eq!(sums(guest, dst), expected(&model));
            assert!(read_all(guest, *buffer, MODEL) == model);
        }
        drop(at_once);
        host.wait_until_empty();
        assert_eq!((used(host), store.stats().extents), (0, 0));
    }
}

/// A guest that attaches tensors gives up what is reserved for them.
#[test]
fn a_guest_gives_up_the_room_for_what_it_attaches() {
    let served = on_cpu();
    let Served { host, store, .. } = &served;
    let model = model(12);
    let (_one, _) = first(host, store, 7, &model);
    let mut two = guest(host, 7);
    let (buffer, _) = for_weights(&mut two, MODEL);
    assert!(served.has(2 * MODEL, 1), "{}", used(host));
    let [(at, large), (second, rest)] = parts(&model);
    assert!(lookup(&mut two, buffer, at, large));
    assert!(served.has(MODEL + SMALL + SECOND, 1), "{}", used(host));
    assert!(lookup(&mut two, buffer, second, rest));
    assert!(served.has(MODEL + SMALL, 1), "{}", used(host));
}

/// As if nothing were shared.
#[test]
fn each_guest_is_charged_for_the_whole_model() {
    let Served {
        host,
        store,
        segment,
        loading,
    } = on_cpu();
    let alice = GuestRule {
        name: "alice".into(),
        uids: vec![7],
        cids: Vec::new(),
        certificates: Vec::new(),
        policy: Policy {
            memory: Some(256 << 20),
            ..Policy::default()
        },
    };
    let rules = Rules {
        guests: vec![alice],
        ..Rules::default()
    };
    host.server.apply(rules).expect("it fits");
    let model = model(13);
    let (mut one, _) = first(&host, &store, 7, &model);
    let free = |guest: &mut Guest| match guest.ask(&Request::Memory {}) {
        Reply::Memory { free, .. } => free,
        other => panic!("{other:?}"),
    };
    let before = free(&mut one);
    let mut two = guest(&host, 7);
    load(&mut two, &model);
    let charged = before - free(&mut one);
    // For its three segments, and as many more as it may still have.
    assert!(
        (MODEL..MODEL + EXTENTS + 20 * segment).contains(&charged),
        "{charged}"
    );
    let mut three = guest(&host, 7);
    let before_three = free(&mut one);
    for_weights(&mut three, MODEL);
    let charged = before_three - free(&mut one);
    let most = MODEL + loading + 8192;
    assert!((MODEL + loading..most).contains(&charged), "{charged}");
    drop((two, three));
    wait_for("the end of the second", || free(&mut one) == before);
}

/// A plan that a guest has compiled before the seal writes to its weights.
#[test]
fn a_graph_from_before_the_seal_does_not_write_into_the_weights_of_others() {
    /// The elements that the graph writes.
    const ALL: u64 = 16 << 10;
    let Served { host, store, .. } = on_cpu();
    let model = model(5);
    let mut hostile = guest(&host, 7);
    let (weights, _) = for_weights(&mut hostile, MODEL);
    send_all(&mut hostile, weights, &model);
    let addend = hostile.alloc_with(&bytes(&[7.0; ALL as usize]));
    hostile.graph(GRAPH, &add(ALL, weights, addend, addend));
    seal(&mut hostile, weights);
    wait_for("hashing", || store.stats().extents == 2);
    let mut other = guest(&host, 7);
    let (others, not_sent) = load(&mut other, &model);
    assert_eq!(not_sent, FIRST + SECOND);
    hostile.submit(GRAPH);
    hostile.fence();
    assert!(read_all(&mut other, others, MODEL) == model);
    assert_eq!(hostile.read_f32(weights, ALL), [14.0; ALL as usize]);
}

/// A buffer for which the engine lacks what segments take besides stays as it was.
#[test]
fn a_buffer_without_room_for_segments_is_not_shared() {
    let Served { host, .. } = on_cpu();
    let mut one = guest(&host, 7);
    let buffer = one.alloc(MODEL);
    one.write(buffer, 0, &[5; 64]);
    let mut size = 512 << 20;
    while size > 0 {
        let filler = one.new_buffer();
        if let Reply::Refused { .. } = one.ask(&Request::Alloc {
            buffer: filler,
            size,
        }) {
            size /= 2;
        }
    }
    let before = used(&host);
    match one.ask(&Request::Weights { buffer }) {
        Reply::Refused { reason, .. } => assert!(reason.contains("out of memory"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(used(&host), before);
    assert_eq!(one.read(buffer, 0, 64), [5; 64]);
    drop(one);
    host.wait_until_empty();
    assert_eq!(used(&host), 0);
}

/// Segments are mappings of the process, which its guests divide. What a buffer does not need after
/// the seal is free for others.
#[test]
fn segments_take_their_mappings_from_the_guest() {
    let Served { host, .. } = on_cpu_with(Limits {
        mappings: 500,
        ..Limits::default()
    });
    let mut one = guest(&host, 7);
    let (buffer, _) = for_weights(&mut one, MODEL);
    let second = one.alloc(MODEL);
    match one.ask(&Request::Weights { buffer: second }) {
        Reply::Refused { reason, .. } => {
            let expected = "out of memory mappings: 224 wanted";
            assert!(reason.contains(expected), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    one.write(second, 0, &[5; 64]);
    assert_eq!(one.read(second, 0, 64), [5; 64]);
    seal(&mut one, buffer);
    for_weights(&mut one, MODEL);
}
