//! What one hostile guest costs another that decodes, for every operator: the other guest's share
//! of its rate alone, its longest wait, and its rate once the attacker is gone.
//!
//! `VGPU_FAIRNESS=3 cargo test --release -p vgpu-executor --test fairness -- --nocapture` measures
//! for that many seconds each, as `cargo xtask bench fairness` does. The ordinary test measures one
//! operator for a moment, and only looks at results: time is no matter of a test.
//! `host-executor/src/sched/queue_tests.rs` tests the rule with a simulated clock.

mod common;
#[path = "common/endless.rs"]
mod endless;

use std::thread;
use std::time::{Duration, Instant};

use common::{Build, Guest, Host, TIMEOUT, bytes};
use endless::{LONG_PARTS, OPERATORS, attack, endless, endless_with_long_parts, host};
use serde_json::{Value, json};
use vgpu_transport::ir::{BufferId, Graph, Op, OpKind, Precision, Type};
use vgpu_transport::wire::GraphId;

const GRAPH: GraphId = GraphId(1);

/// Columns and rows of each matrix of the small model.
const WIDTH: u64 = 1024;

/// Matrix products of a token: 64 MiB of weights are read once.
const LAYERS: usize = 16;

/// A guest that decodes with a small model.
struct Decoding {
    guest: Guest,
    state: BufferId,
    tokens: u64,
}

/// What a guest has got in an interval.
struct Decoded {
    tokens: u32,
    seconds: f64,
    longest: Duration,
}

impl Decoded {
    fn rate(&self) -> f64 {
        f64::from(self.tokens) / self.seconds
    }
}

impl Decoding {
    fn start(host: &Host) -> Decoding {
        let mut guest = host.guest_of(2);
        let weights = guest.alloc(WIDTH * WIDTH * 4 * LAYERS as u64);
        let state = guest.alloc_with(&bytes(&[1.0; WIDTH as usize]));
        let product = guest.alloc(WIDTH * 4);
        guest.graph(GRAPH, &model(weights, state, product));
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
        let mut tokens = 0;
        while tokens == 0 || begin.elapsed() < time {
            let asked = Instant::now();
            self.guest.submit(GRAPH);
            // All weights are 0, and each token adds 1.
            let first = self.guest.read_f32(self.state, 1)[0];
            self.tokens += 1;
            assert_eq!(first, 1.0 + self.tokens as f32);
            tokens += 1;
            longest = longest.max(asked.elapsed());
        }
        Decoded {
            tokens,
            seconds: begin.elapsed().as_secs_f64(),
            longest,
        }
    }
}

/// `state = state * 1 + 1`, after matrix products whose results are 0.
fn model(weights: BufferId, state: BufferId, product: BufferId) -> Graph {
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
    for layer in 0..LAYERS as u64 {
        let matrix = build.place(shape, weights, layer * WIDTH * WIDTH * 4);
        build.node(op, y, &[matrix, x]);
        build.node(Op::Add {}, x, &[x, y]);
    }
    let (scale, bias) = (1.0, 1.0);
    build.node(Op::Scale { scale, bias }, x, &[x]);
    build.0
}

/// Measures one attacker for `time` each: before, beside it, and from its end on.
fn measure(kind: OpKind, has_long_parts: bool, time: Duration) -> Value {
    let (host, name) = (host(), kind.ggml_name());
    let mut decoding = Decoding::start(&host);
    decoding.decode(time / 4);
    let alone = decoding.decode(time);
    let attacker = attack(&host, |buffers| match has_long_parts {
        true => endless_with_long_parts(kind, buffers),
        false => endless(kind, buffers),
    });
    let stats = |uid| endless::stats(&host, uid);
    let engine_time = || [2, 1].map(|uid| stats(uid).busy.as_secs_f64());
    let before = engine_time();
    let beside = decoding.decode(time);
    assert_eq!(stats(1).graphs_run, 0, "{name} is not endless");
    let now = engine_time();
    let [own, of_attacker] = [0, 1].map(|i| now[i] - before[i]);
    drop(attacker);
    // Part of this interval are the attacker's last piece and the release of its memory.
    let after = decoding.decode(Duration::from_secs(1).min(time));
    let later = decoding.decode(time);
    let begin = Instant::now();
    while host.server.sessions().len() > 1 {
        assert!(
            begin.elapsed() < TIMEOUT,
            "{name} goes on without its guest"
        );
        thread::yield_now();
    }
    // The rate alone, before and after: other programs of the machine change it.
    let reference = (alone.rate() + later.rate()) / 2.0;
    json!({
        "operator": name,
        "long_parts": has_long_parts,
        "alone_tokens_per_second": reference,
        "share": beside.rate() / reference,
        "share_of_engine_time": own / (own + of_attacker).max(1e-9),
        "longest_wait_ms": beside.longest.as_secs_f64() * 1e3,
        "longest_wait_alone_ms": alone.longest.as_secs_f64() * 1e3,
        "share_in_the_first_second_after": after.rate() / reference,
    })
}

#[test]
fn attackers_of_every_operator() {
    let seconds = std::env::var("VGPU_FAIRNESS").ok();
    let Some(seconds) = seconds.map(|s| s.parse::<f64>().expect("seconds")) else {
        let row = measure(OpKind::Pool1d, false, Duration::from_millis(50));
        assert!(
            row["share"].as_f64().is_some_and(|share| share > 0.0),
            "{row}"
        );
        return;
    };
    let all = OPERATORS.iter().map(|&kind| (kind, false));
    for (kind, has_long_parts) in all.chain(LONG_PARTS.map(|kind| (kind, true))) {
        println!(
            "{}",
            measure(kind, has_long_parts, Duration::from_secs_f64(seconds))
        );
    }
}
