//! What one hostile guest costs another that decodes, for every operator and for requests that take
//! no turn: the other guest's share of its rate alone, its longest wait, and its rate once the
//! attacker is gone.
//!
//! `VGPU_FAIRNESS=3 cargo test --release -p vgpu-executor --test fairness -- --nocapture` measures
//! for that many seconds each, as `cargo xtask bench fairness` does. The ordinary test measures
//! each for a moment, and looks at the engine's time for the attacker: other programs of the
//! machine take rate from the other guest. Requests that take no turn have no engine time. Without
//! a limit they leave a twentieth of the rate, or less.
//! `host-executor/src/sched/queue_tests.rs` tests the rule with a simulated clock.

mod common;
#[path = "common/endless.rs"]
mod endless;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::{Build, Guest, Host, TIMEOUT, bytes};
use endless::{LONG_PARTS, OPERATORS, attack, endless, endless_with_long_parts, host};
use serde_json::{Value, json};
use vgpu_transport::ir::{BufferId, Graph, Op, OpKind, Precision, Type};
use vgpu_transport::wire::{GraphId, Request};

const GRAPH: GraphId = GraphId(1);

/// Columns and rows of each matrix of the small model.
const WIDTH: u64 = 1024;

/// Matrix products of a token, each with 4 MiB of weights, in the ordinary test.
const LAYERS: u64 = 16;

/// The same in a measurement: as many as no cache holds, and the engine has room for. What fits
/// into a cache of the machine is gone from it after each turn of another guest, whatever the
/// scheduler does.
fn layers_beyond_caches() -> u64 {
    let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size");
    let kib = size
        .ok()
        .and_then(|size| size.trim().strip_suffix('K')?.parse::<u64>().ok());
    (2 * kib.unwrap_or(0) * 1024 / (WIDTH * WIDTH * 4)).clamp(LAYERS, 12 * LAYERS)
}

/// A guest that decodes with a small model.
struct Decoding {
    guest: Guest,
    state: BufferId,
    tokens: u64,
}

/// Within an interval, the rate is also looked at in each part of this length.
const WINDOW: Duration = Duration::from_millis(500);

/// What a guest has got in an interval.
struct Decoded {
    /// When each token was there, since the start of the interval.
    tokens: Vec<Duration>,
    longest: Duration,
}

impl Decoded {
    fn rate(&self) -> f64 {
        let end = self.tokens.last().map_or(1.0, Duration::as_secs_f64);
        self.tokens.len() as f64 / end
    }

    /// The lowest rate in any [`WINDOW`] that begins or ends with a token.
    fn lowest_rate(&self) -> f64 {
        let mut windows = Vec::new();
        let mut first = 0;
        for (last, &end) in self.tokens.iter().enumerate() {
            let start = |token: usize| match token {
                0 => Duration::ZERO,
                _ => self.tokens[token - 1],
            };
            // The shortest span of whole tokens that is as long as the window.
            while end - start(first + 1) >= WINDOW {
                first += 1;
            }
            let span = end - start(first);
            if span >= WINDOW {
                windows.push((last + 1 - first) as f64 / span.as_secs_f64());
            }
        }
        windows.into_iter().fold(self.rate(), f64::min)
    }
}

impl Decoding {
    fn start(host: &Host, layers: u64) -> Decoding {
        let mut guest = host.guest_of(2);
        let len = WIDTH * WIDTH * 4 * layers;
        let weights = guest.alloc(len);
        // Memory that nobody has written is one page of zeros. Each value is 2.4e-38, which changes
        // no sum.
        guest.send(&Request::Fill {
            buffer: weights,
            offset: 0,
            len,
            value: 1,
        });
        let state = guest.alloc_with(&bytes(&[1.0; WIDTH as usize]));
        let product = guest.alloc(WIDTH * 4);
        guest.graph(GRAPH, &model(layers, weights, state, product));
        guest.fence();
        let tokens = 0;
        Decoding {
            guest,
            state,
            tokens,
        }
    }

    /// Decodes for `time`, and at least one token.
    fn decode(&mut self, time: Duration) -> Decoded {
        let (begin, mut longest) = (Instant::now(), Duration::ZERO);
        let mut tokens = Vec::new();
        while tokens.is_empty() || begin.elapsed() < time {
            let asked = Instant::now();
            self.guest.submit(GRAPH);
            // All weights are nearly 0, and each token adds 1.
            let first = self.guest.read_f32(self.state, 1)[0];
            self.tokens += 1;
            assert_eq!(first, 1.0 + self.tokens as f32);
            tokens.push(begin.elapsed());
            longest = longest.max(asked.elapsed());
        }
        Decoded { tokens, longest }
    }
}

/// `state = state * 1 + 1`, after matrix products whose results are nearly 0.
fn model(layers: u64, weights: BufferId, state: BufferId, product: BufferId) -> Graph {
    let mut build = Build::default();
    let vector = [WIDTH, 1, 1, 1];
    let [x, y] = [state, product].map(|buffer| build.tensor(Type::F32, vector, buffer));
    let op = Op::MulMat {
        accumulator: Precision::Default,
        activation: Precision::Default,
        hadamard: false,
    };
    let matrix = build.tensor(Type::F32, [WIDTH, WIDTH, 1, 1], weights);
    let shape = build.0.tensors[matrix as usize].shape;
    for layer in 0..layers {
        let matrix = build.place(shape, weights, layer * WIDTH * WIDTH * 4);
        build.node(op, y, &[matrix, x]);
        build.node(Op::Add {}, x, &[x, y]);
    }
    let (scale, bias) = (1.0, 1.0);
    build.node(Op::Scale { scale, bias }, x, &[x]);
    build.0
}

/// Programs of the attacker that sends requests.
const PROGRAMS: usize = 16;

/// Bytes of its buffers, and of each copy: the most that takes no turn.
const COPIED: u64 = 64 << 10;

/// Matrix products of a graph of an attacker with short ones.
const SHORT: u64 = 6;

/// What it waits after each.
const PAUSE: Duration = Duration::from_micros(100);

/// Programs of one guest that send requests without an end.
struct Programs {
    stop: Arc<AtomicBool>,
    programs: Vec<JoinHandle<()>>,
}

impl Programs {
    /// Starts them as programs of user 1, which do `work` again and again. Returns once each is
    /// `prepared`.
    fn start<P: Send + 'static>(
        host: &Host,
        count: usize,
        prepared: impl Fn(&mut Guest) -> P,
        work: fn(&mut Guest, &P),
    ) -> Programs {
        let stop = Arc::new(AtomicBool::new(false));
        let programs = (0..count).map(|_| {
            let (mut guest, stop) = (host.guest_of(1), Arc::clone(&stop));
            let prepared = prepared(&mut guest);
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    work(&mut guest, &prepared);
                }
            })
        });
        let programs = programs.collect();
        Programs { stop, programs }
    }

    /// Programs that send requests outside of turns.
    fn of_requests(host: &Host) -> Programs {
        let buffers = |guest: &mut Guest| [0; 2].map(|_| guest.alloc(COPIED));
        Programs::start(host, PROGRAMS, buffers, |guest, &[to, from]| {
            copy_a_few_times(guest, to, from);
        })
    }

    /// Programs whose graphs take about a millisecond, with a pause after each: a graph that comes
    /// ends the turn of a guest that is ahead.
    fn of_short_graphs(host: &Host, count: usize) -> Programs {
        let prepared = |guest: &mut Guest| {
            let weights = guest.alloc(WIDTH * WIDTH * 4 * SHORT);
            let [state, product] = [0; 2].map(|_| guest.alloc(WIDTH * 4));
            guest.graph(GRAPH, &model(SHORT, weights, state, product));
            guest.fence();
        };
        Programs::start(host, count, prepared, |guest, ()| {
            guest.submit(GRAPH);
            guest.fence();
            thread::sleep(PAUSE);
        })
    }
}

/// One-way copies: the host has more to do for each than the guest.
fn copy_a_few_times(guest: &mut Guest, dst: BufferId, src: BufferId) {
    for _ in 0..16 {
        guest.send(&Request::Copy {
            dst,
            dst_offset: 0,
            src,
            src_offset: 0,
            len: COPIED,
        });
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for program in self.programs.drain(..) {
            // A failure of a thread has its own message.
            let _ = program.join();
        }
    }
}

/// Who attacks, until it is dropped.
enum Attacker {
    Graph { _guest: Guest },
    Programs { _programs: Programs },
}

/// What an attacker does.
#[derive(Clone, Copy)]
enum Attack {
    /// A guest that is connected, and has no graph: how much the rate differs by itself.
    Nothing,
    /// Requests outside of turns, of many programs.
    Requests,
    /// Short graphs with pauses, of so many programs.
    ShortGraphs(usize),
    Endless(OpKind),
    LongParts(OpKind),
}

impl Attack {
    fn name(self) -> String {
        match self {
            Attack::Nothing => "no graph".into(),
            Attack::Requests => "requests".into(),
            Attack::ShortGraphs(programs) => format!("short graphs of {programs}"),
            Attack::Endless(kind) => kind.ggml_name().into(),
            Attack::LongParts(kind) => format!("{}, long parts", kind.ggml_name()),
        }
    }

    fn start(self, host: &Host) -> Attacker {
        let guest = match self {
            Attack::Nothing => host.guest_of(1),
            Attack::Requests => {
                let _programs = Programs::of_requests(host);
                return Attacker::Programs { _programs };
            }
            Attack::ShortGraphs(count) => {
                let _programs = Programs::of_short_graphs(host, count);
                return Attacker::Programs { _programs };
            }
            Attack::Endless(kind) => attack(host, |buffers| endless(kind, buffers)),
            Attack::LongParts(kind) => {
                attack(host, |buffers| endless_with_long_parts(kind, buffers))
            }
        };
        Attacker::Graph { _guest: guest }
    }
}

/// How long all programs of a user have had the engine, in seconds.
fn busy(host: &Host, uid: u32) -> f64 {
    let sessions = host.server.sessions().into_iter();
    let of_user = sessions.filter(|s| s.peer.process.as_ref().is_some_and(|p| p.uid == uid));
    of_user.map(|s| s.stats.busy.as_secs_f64()).sum()
}

/// Measures one attacker for `time` each: before, beside it, in the second from its end on, and
/// after that.
fn measure(by: Attack, layers: u64, time: Duration) -> Value {
    let (host, name) = (host(), by.name());
    let mut decoding = Decoding::start(&host, layers);
    decoding.decode(time / 4);
    let before = decoding.decode(time);
    let attacker = by.start(&host);
    let engine_time = || [2, 1].map(|uid| busy(&host, uid));
    let (begin, then) = (Instant::now(), engine_time());
    let beside = decoding.decode(time);
    if matches!(by, Attack::Endless(_) | Attack::LongParts(_)) {
        let run = endless::stats(&host, 1).graphs_run;
        assert_eq!(run, 0, "{name} is not endless");
    }
    let now = engine_time();
    let elapsed = begin.elapsed().as_secs_f64();
    let [own, of_attacker] = [0, 1].map(|i| now[i] - then[i]);
    drop(attacker);
    // Part of this interval are the attacker's last piece and the release of its memory.
    let second = decoding.decode(Duration::from_secs(1).min(time));
    let after = decoding.decode(time);
    let begin = Instant::now();
    while host.server.sessions().len() > 1 {
        assert!(
            begin.elapsed() < TIMEOUT,
            "{name} goes on without its guest"
        );
        thread::yield_now();
    }
    // The rate alone, before and after: other programs of the machine change it.
    let alone = (before.rate() + after.rate()) / 2.0;
    json!({
        "attacker": name,
        "alone_tokens_per_second": alone,
        "weights_mib": layers * 4,
        "share": beside.rate() / alone,
        "lowest_share": beside.lowest_rate() / alone,
        "share_of_engine_time": own / (own + of_attacker).max(1e-9),
        "left_by_attacker": 1.0 - of_attacker / elapsed,
        "used": (own + of_attacker) / elapsed,
        "longest_wait_ms": beside.longest.as_secs_f64() * 1e3,
        "longest_wait_alone_ms": before.longest.as_secs_f64() * 1e3,
        "share_in_the_second_after": second.rate() / before.rate(),
        "share_after_a_second": after.rate() / before.rate(),
    })
}

#[test]
fn attackers_of_every_operator() {
    let seconds = std::env::var("VGPU_FAIRNESS").ok();
    let seconds = seconds.map(|s| s.parse::<f64>().expect("seconds"));
    let only = std::env::var("VGPU_FAIRNESS_OF").ok();
    let is_asked = |name: &str| {
        let only = only.as_deref().map(|names| names.split(';'));
        only.is_none_or(|mut names| names.any(|asked| asked == name))
    };
    let all = OPERATORS.map(Attack::Endless).into_iter();
    let all = all.chain(LONG_PARTS.map(Attack::LongParts));
    let Some(seconds) = seconds else {
        all.filter(|by| is_asked(&by.name()))
            .for_each(leaves_others_their_share);
        return;
    };
    let others = [Attack::Nothing, Attack::Requests].into_iter();
    let others = others.chain([1, 4].map(Attack::ShortGraphs));
    for by in others.chain(all) {
        if is_asked(&by.name()) {
            println!("{}", measure_often(by, Duration::from_secs_f64(seconds)));
        }
    }
}

/// The measurement with the median share of [`ROUNDS`]: other work of the machine comes and goes.
fn measure_often(by: Attack, time: Duration) -> Value {
    let layers = layers_beyond_caches();
    let mut rounds: Vec<Value> = (0..ROUNDS).map(|_| measure(by, layers, time)).collect();
    let share = |round: &Value| round["share"].as_f64().expect("a share");
    rounds.sort_by(|a, b| share(a).total_cmp(&share(b)));
    let shares: Vec<f64> = rounds.iter().map(share).collect();
    println!("{}: {shares:.3?}", by.name());
    rounds.swap_remove(ROUNDS / 2)
}

/// Measurements of each attacker.
const ROUNDS: usize = 5;

/// Checks that an attacker leaves the other guest its share of the time, in one of some
/// measurements, each longer than the one before: a piece that no kernel divides can take more than
/// a tenth of a second on a machine with other work, and in a short time one more or less matters.
/// The engine's time for the other guest itself is no measure. The engine also waits for this guest
/// between two graphs, longer on a machine with other work, and the guest pays for that. So the
/// time that the attacker leaves counts, together with what shows that the engine was not idle
/// instead, and with the rate of the other guest once the attacker has been gone for a second.
fn leaves_others_their_share(by: Attack) {
    let mut shares = Vec::new();
    for tries in 1..=8 {
        let row = measure(by, LAYERS, Duration::from_millis(200) * tries);
        let measured = ["left_by_attacker", "used", "share_after_a_second"];
        let measured = measured.map(|name| row[name].as_f64().expect("a share"));
        shares.push(measured);
        let [left, used, after] = measured;
        if left >= SHARE && used >= USED && after >= AFTER {
            println!("{}: {shares:.3?}", by.name());
            return;
        }
    }
    panic!(
        "{} has left so much of the time to the other guest, both have used so much, and the other \
         guest had so much of its rate once the attacker had gone: {shares:.3?}",
        by.name()
    );
}

/// The part of the time in which the engine computes for one of the two guests at least.
const USED: f64 = 0.75;

/// The part of its rate that the other guest has at least, once the attacker has been gone for a
/// second. With the attacker it is about a half.
const AFTER: f64 = 0.75;

/// The share that the other guest keeps at least.
const SHARE: f64 = 0.45;

/// Other programs of the machine take processor time, too: the best of some measurements counts.
#[test]
fn requests_outside_of_turns_leave_others_their_share() {
    let mut shares = Vec::new();
    for _ in 0..8 {
        let row = measure(Attack::Requests, LAYERS, Duration::from_millis(1500));
        let share = row["share"].as_f64().expect("a share");
        shares.push(share);
        if share >= SHARE {
            return;
        }
    }
    panic!("the guest kept {shares:.2?} of its rate alone beside requests of {PROGRAMS} programs");
}

#[test]
fn the_lowest_rate_is_that_of_the_slowest_half_second() {
    // A token each 10 ms, then one after 400 ms, then each 10 ms again.
    let times = (1..=100).map(|i: u32| Duration::from_millis(10) * i);
    let late = |time: Duration| match time > Duration::from_millis(500) {
        true => time + Duration::from_millis(390),
        false => time,
    };
    let decoded = Decoded {
        tokens: times.clone().map(late).collect(),
        longest: Duration::ZERO,
    };
    // Eleven tokens in half a second: one after 400 ms, and ten more.
    let lowest = decoded.lowest_rate();
    assert!((lowest - 22.0).abs() < 0.1, "{lowest}");
    let even = Decoded {
        tokens: times.collect(),
        longest: Duration::ZERO,
    };
    assert!((even.lowest_rate() - 100.0).abs() < 1e-9);
}
