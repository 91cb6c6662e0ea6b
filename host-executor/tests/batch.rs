//! Guests that compute with the same weights at the same time share turns, and nothing else.

mod common;

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use common::weights::{FIRST, MODEL, SMALL, first, guest, host, load, model};
use common::{Build, Guest, Host, bytes};
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};
use vgpu_executor::weights::Sharing;
use vgpu_executor::{GuestRule, Limits, Policy, Rules, WeightStore};
use vgpu_transport::ir::{BufferId, Graph, Op, Precision, Shape, Type};
use vgpu_transport::wire::{GraphId, Reply, Request};

const GRAPH: GraphId = GraphId(1);

/// Columns and rows of the first matrix of the model, and rows of the second.
const K: u64 = 256;
const M: u64 = FIRST / 4 / K;
const N: u64 = 128;

/// Layers of a graph, which take about a millisecond.
const LAYERS: u64 = 12;

/// The offsets in a guest's own memory: the input, an index, its row and the product of the first
/// matrix, and the results.
const INPUT: u64 = 0;
const INDEX: u64 = 4 * K;
const INNER: u64 = 8 * K;
const RESULT: u64 = INNER + 4 * (K + M);
const OWN: u64 = RESULT + 4 * N * LAYERS;

/// `result[i] = second * (first * x)`, where `x` is the row of the input with the given index.
fn graph(weights: BufferId, own: BufferId) -> Graph {
    let mut build = Build::default();
    let vector = |n| Shape::contiguous(Type::F32, [n, 1, 1, 1]).expect("a vector");
    let matrix = |k, m| Shape::contiguous(Type::F32, [k, m, 1, 1]).expect("a matrix");
    let index = Shape::contiguous(Type::I32, [1; 4]).expect("an index");
    let mul_mat = Op::MulMat {
        accumulator: Precision::Default,
        activation: Precision::Default,
        hadamard: false,
    };
    let first = build.place(matrix(K, M), weights, 0);
    let second = build.place(matrix(M, N), weights, FIRST + SMALL);
    let input = build.place(vector(K), own, INPUT);
    let index = build.place(index, own, INDEX);
    let row = build.place(vector(K), own, INNER);
    for layer in 0..LAYERS {
        build.node(Op::GetRows {}, row, &[input, index]);
        let inner = build.place(vector(M), own, INNER + 4 * K);
        build.node(mul_mat, inner, &[first, row]);
        let result = build.place(vector(N), own, RESULT + 4 * N * layer);
        build.node(mul_mat, result, &[second, inner]);
    }
    build.0
}

/// A program with a model and memory of its own.
struct Program {
    guest: Guest,
    own: BufferId,
    random: Xoshiro256PlusPlus,
}

impl Program {
    fn new(host: &Host, uid: u32, model: &[u8], seed: u64) -> Program {
        let mut guest = guest(host, uid);
        let (weights, _) = load(&mut guest, model);
        Program::with(guest, weights, seed)
    }

    fn with(mut guest: Guest, weights: BufferId, seed: u64) -> Program {
        let own = guest.alloc(OWN);
        guest.graph(GRAPH, &graph(weights, own));
        Program {
            guest,
            own,
            random: Xoshiro256PlusPlus::seed_from_u64(seed),
        }
    }

    /// Runs the graph on a new input, with this index. Returns the input and the results.
    fn run(&mut self, index: i32) -> (Vec<f32>, Result<Vec<u8>, String>) {
        let next = |random: &mut Xoshiro256PlusPlus| (random.next_u64() >> 48) as f32 / 65536.0;
        let input: Vec<f32> = (0..K).map(|_| next(&mut self.random)).collect();
        self.guest.write(self.own, INPUT, &bytes(&input));
        self.guest.write(self.own, INDEX, &index.to_le_bytes());
        let request = self.guest.submit(GRAPH);
        let read = self.guest.send(&Request::Read {
            buffer: self.own,
            offset: RESULT,
            len: 4 * N * LAYERS,
        });
        let mut failure = None;
        loop {
            match self.guest.receive() {
                (
                    Reply::Failed {
                        request: of,
                        reason,
                    },
                    _,
                ) if of == request => {
                    failure = Some(reason);
                }
                (Reply::Data { request: of }, data) if of == read => {
                    return (input, failure.map_or(Ok(data), Err));
                }
                (other, _) => panic!("{other:?}"),
            }
        }
    }
}

/// What the model computes, in a session that is alone.
fn alone(model: &[u8], inputs: &[Vec<f32>]) -> Vec<Vec<u8>> {
    let (host, _) = host(Sharing::Tenant, None);
    let mut program = Program::new(&host, 7, model, 0);
    let run = |input: &Vec<f32>| {
        program.guest.write(program.own, INPUT, &bytes(input));
        program.guest.write(program.own, INDEX, &0i32.to_le_bytes());
        program.guest.submit(GRAPH);
        program.guest.read(program.own, RESULT, 4 * N * LAYERS)
    };
    inputs.iter().map(run).collect()
}

/// Turns of all sessions, and the members of the batches of these turns.
fn turns(host: &Host) -> (u64, u64) {
    let sessions = host.server.sessions();
    let sum = |of: fn(&vgpu_executor::Stats) -> u64| sessions.iter().map(|s| of(&s.stats)).sum();
    (sum(|stats| stats.turns), sum(|stats| stats.batch_members))
}

/// Runs so many graphs of each program at the same time, and compares all results.
fn run_together(programs: &mut [Program], model: &[u8], graphs: usize) {
    let start = Barrier::new(programs.len());
    let runs: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = { programs.iter_mut() }
            .map(|program| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    (0..graphs).map(|_| program.run(0)).collect::<Vec<_>>()
                })
            })
            .collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended.flat_map(|runs| runs.expect("it runs")).collect()
    });
    let (inputs, results): (Vec<_>, Vec<_>) = runs.into_iter().unzip();
    let expected = alone(model, &inputs);
    for (result, expected) in results.into_iter().zip(expected) {
        assert!(result.expect("it runs") == expected, "another result");
    }
}

#[test]
fn guests_compute_together_what_each_computes_alone() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(3);
    let (one, buffer) = first(&host, &weights, 7, &model);
    let mut programs = vec![Program::with(one, buffer, 0)];
    programs.extend((1..6).map(|seed| Program::new(&host, 7, &model, seed)));
    // On a machine without a free core, programs seldom wait at the same time.
    let mut before = (0, 0);
    let mut sizes = (0..20).map(|_| {
        run_together(&mut programs, &model, 60);
        let (turns, members) = turns(&host);
        let size = (members - before.1) as f64 / (turns - before.0) as f64;
        before = (turns, members);
        size
    });
    assert!(sizes.any(|size| size > 2.0), "mostly without company");
}

/// Programs of two models come, fail, end and are killed, as many times as `VGPU_BATCH_EVENTS`
/// says.
#[test]
fn a_guest_that_fails_or_leaves_changes_nothing_for_the_others() {
    let given = std::env::var("VGPU_BATCH_EVENTS");
    let events = given.map_or(500, |events| events.parse().expect("a number"));
    let (host, weights) = &host(Sharing::Tenant, None);
    let models = &[model(4), model(14)];
    let _keep = models
        .each_ref()
        .map(|model| first(host, weights, 7, model));
    let (failed, left) = (&AtomicUsize::new(0), &AtomicUsize::new(0));
    let (joined, most) = (&AtomicUsize::new(0), &AtomicU64::new(0));
    let happened = || [joined, failed, left].map(|count| count.load(Ordering::Relaxed));
    let runs: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|seed| {
                scope.spawn(move || {
                    let mut random = Xoshiro256PlusPlus::seed_from_u64(100 + seed);
                    let mut runs = Vec::new();
                    while happened().into_iter().sum::<usize>() < events {
                        let round = joined.fetch_add(1, Ordering::Relaxed);
                        let model = round % 2;
                        let seed = seed << 32 | round as u64;
                        let mut program = Program::new(host, 7, &models[model], seed);
                        for _ in 0..random.next_u64() % 12 {
                            let index = i32::from(random.next_u64() % 5 == 0);
                            let (input, result) = program.run(index);
                            assert_eq!(result.is_err(), index == 1, "{result:?}");
                            failed.fetch_add(index as usize, Ordering::Relaxed);
                            runs.extend(result.ok().map(|result| (model, input, result)));
                        }
                        let (turns, members) = turns(host);
                        most.fetch_max(members.saturating_sub(turns), Ordering::Relaxed);
                        if random.next_u64() % 2 == 0 {
                            // It leaves while its graph runs, or waits.
                            program.guest.submit(GRAPH);
                            left.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    runs
                })
            })
            .collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended.flat_map(|runs| runs.expect("it runs")).collect()
    });
    let [joined, failed, left] = happened();
    assert!(most.load(Ordering::Relaxed) > 0, "no batch");
    assert!(
        failed > events / 25 && left > events / 25,
        "{failed} {left}"
    );
    println!(
        "{joined} programs, {failed} failed graphs, {left} killed at work, {} results",
        runs.len()
    );
    for (at, model) in models.iter().enumerate() {
        let of_model = runs.iter().filter(|(model, ..)| *model == at);
        let (inputs, results): (Vec<_>, Vec<_>) = of_model
            .map(|(_, input, result)| (input.clone(), result))
            .unzip();
        let expected = alone(model, &inputs);
        assert!(results.len() > events / 8 && results.into_iter().eq(&expected));
    }
}

/// Two programs of each of two users, all with the same model.
fn of_two_tenants(sharing: Sharing) -> (u64, u64) {
    let (host, weights) = host(sharing, None);
    let model = model(5);
    let (one, buffer) = first(&host, &weights, 7, &model);
    let mut programs = vec![Program::with(one, buffer, 0)];
    programs.push(Program::new(&host, 8, &model, 1));
    if let Sharing::All = sharing {
        // Their weights are the same memory.
        let sessions = host.server.sessions();
        let shared = sessions.iter().map(|s| s.stats.weights_shared);
        let shared: u64 = shared.sum();
        assert!(shared > MODEL / 2, "{shared}");
    }
    run_together(&mut programs, &model, 60);
    turns(&host)
}

#[test]
fn guests_of_different_tenants_run_together_only_if_all_share() {
    let (turns, members) = of_two_tenants(Sharing::Tenant);
    assert_eq!(turns, members, "a batch of two tenants");
    // On a machine without a free core the two may never wait at the same time.
    let mut attempts = (0..20).map(|_| of_two_tenants(Sharing::All));
    assert!(
        attempts.any(|(turns, members)| members > turns),
        "no batch of two tenants"
    );
}

#[test]
fn batches_can_be_turned_off_for_all_guests_or_for_one() {
    let limits = Limits {
        batch: false,
        ..Limits::default()
    };
    let off = Policy {
        batch: false,
        ..Policy::default()
    };
    for (limits, policy) in [(limits, Policy::default()), (Limits::default(), off)] {
        let host = Host::limited(common::cpu(), limits, 64);
        let weights = WeightStore::new(Sharing::Tenant, None).expect("a store");
        host.server
            .share_weights(weights.clone())
            .expect("a thread");
        let guest = GuestRule {
            name: "alice".into(),
            uids: vec![7],
            cids: Vec::new(),
            certificates: Vec::new(),
            policy,
        };
        let rules = Rules {
            guests: vec![guest],
            ..Rules::default()
        };
        host.server.apply(rules).expect("no quotas");
        let model = model(6);
        let (one, buffer) = first(&host, &weights, 7, &model);
        let mut programs = vec![Program::with(one, buffer, 0)];
        programs.extend((1..3).map(|seed| Program::new(&host, 7, &model, seed)));
        run_together(&mut programs, &model, 20);
        let (turns, members) = turns(&host);
        assert_eq!(turns, members, "a batch");
    }
}
