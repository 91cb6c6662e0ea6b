//! Shares of the time of an engine over a backend of ggml, between guests of different weights.
//! In a test program of its own: other tests would take processor time from the threads that it
//! measures.

#[path = "../../tests/common/mod.rs"]
mod cache;
#[path = "../../tests/common/changed_backend.rs"]
mod changed_backend;
mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use changed_backend::{Changes, changed_backend};
use common::{Build, Guest, Host, bytes, wait_for};
use vgpu_executor::engine::{EngineKind, GgmlBackend, start};
use vgpu_executor::{GuestRule, Policy, Rules};
use vgpu_transport::ir::{BufferId, Graph, Op, Type};
use vgpu_transport::wire::GraphId;

const GRAPH: GraphId = GraphId(1);

/// Elements of a vector.
const WIDTH: u64 = 64;

/// Nodes of a graph, which takes 4 ms.
const NODES: u64 = 16;

/// Microseconds of each node, on a device that computes after the call.
const NODE_TIME: u32 = 250;

/// Graphs that a program submits before it waits for a result.
const AHEAD: u64 = 4;

/// The users that are the guests, and the weights of the guests.
const LIGHT: (u32, u32) = (1, 1);
const HEAVY: (u32, u32) = (2, 3);

/// `numbers = numbers - ones`, as often as a graph has nodes. ggml's CPU backend, which computes in
/// place of the device, has one thread for such a node.
fn differences(numbers: BufferId, ones: BufferId) -> Graph {
    let mut build = Build::default();
    let [numbers, ones] =
        [numbers, ones].map(|buffer| build.tensor(Type::F32, [WIDTH, 1, 1, 1], buffer));
    for _ in 0..NODES {
        build.node(Op::Sub {}, numbers, &[numbers, ones]);
    }
    build.0
}

/// Runs graphs of a program until `stop`, checks their results, and counts them in `run`.
fn compute(guest: &mut Guest, stop: &AtomicBool, run: &AtomicU64) {
    let [numbers, ones] =
        [0.0, 1.0].map(|value| guest.alloc_with(&bytes(&[value; WIDTH as usize])));
    guest.graph(GRAPH, &differences(numbers, ones));
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..AHEAD {
            guest.submit(GRAPH);
        }
        let graphs = AHEAD + run.fetch_add(AHEAD, Ordering::Relaxed);
        let expected = [-((graphs * NODES) as f32); WIDTH as usize];
        assert_eq!(guest.read_f32(numbers, WIDTH), expected);
    }
}

/// Ends the programs, also if the test fails: they are waited for.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// How long all programs of a user have had the engine, in seconds.
fn busy(host: &Host, uid: u32) -> f64 {
    let sessions = host.server.sessions().into_iter();
    let of_user = sessions.filter(|s| s.peer.process.as_ref().is_some_and(|p| p.uid == uid));
    of_user.map(|s| s.stats.busy.as_secs_f64()).sum()
}

/// Two guests whose weights are 1 and 3, with a graph waiting at any time. Their shares of the
/// engine's time are right in one of some measurements: other work of the machine may keep the
/// programs of a guest from submitting graphs in time. Without weights, both have the same time.
#[test]
fn guests_have_the_time_of_the_engine_by_their_weights() {
    const TIME: Duration = Duration::from_secs(2);
    const TRIES: usize = 5;
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        end: "return compute_later(backend, graph);",
        node_time: NODE_TIME,
        kind: "GGML_BACKEND_DEVICE_TYPE_GPU",
        ..Changes::default()
    };
    let backend = GgmlBackend {
        path: changed_backend(&cache::cached(""), folder.path(), &changes),
        device: None,
    };
    let host = Host::new(start(&EngineKind::Ggml(backend), 1.into(), None).unwrap());
    let guests = [LIGHT, HEAVY].map(|(uid, weight)| GuestRule {
        name: format!("guest{uid}"),
        uids: vec![uid],
        cids: Vec::new(),
        certificates: Vec::new(),
        policy: Policy {
            weight,
            ..Policy::default()
        },
    });
    let rules = Rules {
        guests: guests.into(),
        ..Rules::default()
    };
    host.server.apply(rules).expect("no quotas");

    let stop = AtomicBool::new(false);
    // Of two programs of each guest.
    let [(light, _), (heavy, _)] = [LIGHT, HEAVY];
    let programs = [light, light, heavy, heavy].map(|uid| (uid, AtomicU64::new(0)));
    let mut ratios = Vec::new();
    thread::scope(|scope| {
        let _end = StopAtEnd(&stop);
        for (uid, run) in &programs {
            let mut guest = host.guest_of(*uid);
            let stop = &stop;
            scope.spawn(move || compute(&mut guest, stop, run));
        }
        // The first runs are measured piece by piece.
        let has_begun = |run: &AtomicU64| run.load(Ordering::Relaxed) > AHEAD;
        wait_for("graphs of all programs", || {
            programs.iter().all(|(_, run)| has_begun(run))
        });
        let is_right = |ratio: &f64| (2.5..=3.5).contains(ratio);
        while ratios.len() < TRIES && !ratios.iter().any(is_right) {
            let times = || [light, heavy].map(|uid| busy(&host, uid));
            let before = times();
            thread::sleep(TIME);
            let after = times();
            let [light, heavy] = [0, 1].map(|guest| after[guest] - before[guest]);
            println!("engine time in {TIME:?}: {light:.3} s and {heavy:.3} s");
            ratios.push(heavy / light.max(1e-9));
        }
    });
    let used = host.engine.fallback_use().expect("a device");
    assert!(used.device_nodes > 0 && used.other_nodes == 0, "{used:?}");
    let is_right = { ratios.last() }.is_some_and(|ratio| (2.5..=3.5).contains(ratio));
    assert!(is_right, "the weights are 1:3, the times 1:{ratios:.2?}");
}
