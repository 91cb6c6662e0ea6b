//! Tokens of a guest over a backend of ggml that copies in the order of its graphs.

#[path = "../../tests/common/backend_counters.rs"]
mod backend_counters;
#[path = "../../tests/common/mod.rs"]
mod cache;
#[path = "../../tests/common/changed_backend.rs"]
mod changed_backend;
mod common;

use backend_counters::counters;
use changed_backend::{Changes, Queue, changed_backend};
use common::{Build, Host, bytes, floats};
use vgpu_executor::engine::{EngineKind, GgmlBackend, start};
use vgpu_transport::ir::{Op, Shape, Type};
use vgpu_transport::wire::{GraphId, Reply, Request};

/// The vectors that a token writes, and their elements.
const INPUTS: u64 = 6;
const WIDTH: u64 = 64;

/// Tokens, of which other work of the machine may delay some: a READ that comes late is copied
/// after the graph, with a call of its own.
const TOKENS: usize = 20;

#[test]
fn a_token_of_a_guest_waits_for_the_device_once() {
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        end: "return compute_queued(backend, graph);",
        queue: Queue::GraphsAndCopies,
        node_time: 400,
        kind: "GGML_BACKEND_DEVICE_TYPE_GPU",
        ..Changes::default()
    };
    let path = changed_backend(&cache::cached(""), folder.path(), &changes);
    let backend = GgmlBackend {
        path: path.clone(),
        device: None,
    };
    let host = Host::new(start(&EngineKind::Ggml(backend), 1.into(), Some(64 << 20)).unwrap());
    let mut guest = host.guest();
    let [inputs, result] = [(); 2].map(|()| guest.alloc(4 * WIDTH * INPUTS));
    let mut build = Build::default();
    let vector = Shape::contiguous(Type::F32, [WIDTH, 1, 1, 1]).unwrap();
    let sum = build.place(vector, result, 0);
    let [first, rest @ ..] =
        [0, 1, 2, 3, 4, 5].map(|at| build.place(vector, inputs, at * 4 * WIDTH));
    build.node(Op::Add {}, sum, &[first, rest[0]]);
    { &rest[1..] }
        .iter()
        .for_each(|&next| build.node(Op::Add {}, sum, &[sum, next]));
    guest.graph(GraphId(1), &build.0);
    let mut calls = Vec::new();
    for token in 0..2 + TOKENS {
        let before = counters::<8>(&path, c"calls").unwrap();
        for at in 0..INPUTS {
            let value = token as f32 + at as f32;
            guest.write(inputs, at * 4 * WIDTH, &bytes(&[value; WIDTH as usize]));
        }
        guest.submit(GraphId(1));
        let request = guest.send(&Request::Read {
            buffer: result,
            offset: 0,
            len: 4 * WIDTH,
        });
        let (reply, read) = guest.receive();
        assert_eq!(reply, Reply::Data { request });
        let expected = INPUTS as f32 * token as f32 + 15.0;
        assert_eq!(floats(&read), [expected; WIDTH as usize]);
        // The session has done all that it was asked to do.
        guest.fence();
        let after = counters::<8>(&path, c"calls").unwrap();
        calls.push([0, 1, 2, 3, 4, 5, 6, 7].map(|at: usize| after[at] - before[at]));
    }
    println!("{calls:?}");
    // In two runs, each piece is measured alone.
    let calls = &calls[2..];
    // `set_tensor`, `get_tensor`, the same two in the queue, and waits.
    let in_order = [0, 0, INPUTS as i32, 1, 1];
    let read_later = [0, 1, INPUTS as i32, 0, 1];
    let count = |of: [i32; 5]| calls.iter().filter(|calls| calls[..5] == of).count();
    assert!(count(in_order) > TOKENS / 2);
    assert_eq!(count(in_order) + count(read_later), TOKENS);
}
