//! A violation of the protocol ends the session that commits the violation, with a reason. No other
//! session ends.
//!
//! `cli/tests/cve.rs` tests the known vulnerabilities of similar projects.

mod common;

use std::time::Duration;

use common::scripted_engine::{Act, PANIC_SIZE, ScriptedEngine, UNREADABLE_SIZE};
use common::{Build, Guest, Host, OtherGuest, PAGE, add, bytes, cpu, image};
use vgpu_executor::Limits;
use vgpu_transport::ir::{BufferId, Graph, Op, Shape, Type};
use vgpu_transport::wire::{
    DeviceIndex, GraphId, MAX_GRAPH, MAX_PAYLOAD, Offer, ProtocolVersion, Request, VersionRange,
};

const GRAPH: GraphId = GraphId(7);

/// Checks that `violation` ends its session with a reason that contains all of `words`. Another
/// guest, with data and a graph from before, is not affected, and the memory of the ended session
/// is freed.
fn ends_only_its_session(words: &[&str], violation: impl FnOnce(&mut Guest)) {
    ends_only_its_session_on(Host::new(cpu()), words, violation);
}

fn ends_only_its_session_on(host: Host, words: &[&str], violation: impl FnOnce(&mut Guest)) {
    let mut other_guest = OtherGuest::new(host.guest());
    let free = host.engine.memory().free;
    other_guest.check_unaffected(host.connect(), words, violation);
    drop(other_guest);
    host.wait_until_empty();
    assert_eq!(host.engine.memory().free, free + PAGE);
    let mut newcomer = host.guest();
    newcomer.alloc(1 << 20);
}

// Handshake.

#[test]
fn hello_missing() {
    ends_only_its_session(&["first request is MEMORY, not HELLO"], |guest| {
        guest.send(&Request::Memory {});
    });
}

#[test]
fn hello_twice() {
    ends_only_its_session(&["HELLO came twice"], |guest| {
        guest.hello();
        guest.send(&Request::Hello {
            offer: Offer::SERVED,
            name: "again".into(),
            device: DeviceIndex(0),
        });
    });
}

#[test]
fn hello_of_another_protocol() {
    for (oldest, newest, says) in [
        (
            9999,
            9999,
            "the guest speaks protocol version 9999, this host speaks 3 to 4: update ggml-vgpu on \
             the host",
        ),
        (
            5,
            6,
            "the guest speaks protocol versions 5 to 6, this host speaks 3 to 4: update ggml-vgpu \
             on the host",
        ),
        (
            1,
            2,
            "the guest speaks protocol versions 1 to 2, this host speaks 3 to 4: update ggml-vgpu \
             in the guest",
        ),
    ] {
        ends_only_its_session(&[says], |guest| {
            let versions = VersionRange::new(oldest, newest).expect("a range");
            guest.send(&Request::Hello {
                offer: Offer { versions, ir: 1 },
                name: "of another time".into(),
                device: DeviceIndex(0),
            });
        });
    }
}

#[test]
fn hello_with_a_wrong_range_of_protocols() {
    let words = [
        "cannot be decoded",
        "protocol versions from 7 to 4, which is no range",
    ];
    ends_only_its_session(&words, |guest| {
        let mut message = Vec::new();
        Request::Hello {
            offer: Offer::SERVED,
            name: "wrong".into(),
            device: DeviceIndex(0),
        }
        .encode(guest.protocol, &mut message);
        // The kind, the newest version, the version of graphs, the oldest version.
        assert_eq!(message[4..12], [4, 0, 0, 0, 1, 0, 3, 0]);
        message[10] = 7;
        guest.send_raw(&message, &[]);
    });
}

#[test]
fn hello_of_another_graph_ir() {
    for version in ProtocolVersion::ALL {
        let belongs = format!("with protocol version {version}, to which version 1 belongs");
        ends_only_its_session(&["graph IR version 0", &belongs], |guest| {
            guest.send(&Request::Hello {
                offer: Offer {
                    ir: 0,
                    ..Offer::only(version)
                },
                name: "of other graphs".into(),
                device: DeviceIndex(0),
            });
        });
    }
}

#[test]
fn hello_that_never_arrives() {
    let limits = Limits {
        hello: Duration::from_millis(200),
        ..Limits::default()
    };
    let host = Host::limited(cpu(), limits, 64);
    let reason = host.connect().ended();
    assert!(
        reason.contains("did not send HELLO within 200ms"),
        "{reason}"
    );
    host.guest().fence();
}

// Messages.

#[test]
fn message_of_unknown_kind() {
    ends_only_its_session(
        &["(4 bytes) cannot be decoded", "unknown message kind 77"],
        |guest| {
            guest.hello();
            guest.send_raw(&77u32.to_le_bytes(), &[]);
        },
    );
}

#[test]
fn message_truncated() {
    ends_only_its_session(
        &[
            "cannot be decoded",
            "message of 9 bytes is truncated: byte 12",
        ],
        |guest| {
            guest.hello();
            let mut message = Vec::new();
            Request::Alloc {
                buffer: BufferId(1),
                size: 8,
            }
            .encode(guest.protocol, &mut message);
            guest.send_raw(&message[..9], &[]);
        },
    );
}

#[test]
fn message_with_trailing_bytes() {
    ends_only_its_session(&["cannot be decoded", "1 bytes behind its end"], |guest| {
        guest.hello();
        let mut message = Vec::new();
        Request::Fence {}.encode(guest.protocol, &mut message);
        message.push(0);
        guest.send_raw(&message, &[]);
    });
}

#[test]
fn message_empty() {
    ends_only_its_session(&["(0 bytes) cannot be decoded"], |guest| {
        guest.send_raw(&[], &[]);
    });
}

#[test]
fn message_with_invalid_utf8() {
    ends_only_its_session(&["not UTF-8"], |guest| {
        let mut message = Vec::new();
        Request::Hello {
            offer: Offer::SERVED,
            name: "x".into(),
            device: DeviceIndex(0),
        }
        .encode(guest.protocol, &mut message);
        *message.last_mut().unwrap() = 0xff;
        guest.send_raw(&message, &[]);
    });
}

#[test]
fn payload_where_none_is_allowed() {
    ends_only_its_session(&["FENCE carries a payload of 3 bytes"], |guest| {
        guest.hello();
        guest.send_with(&Request::Fence {}, b"abc");
    });
}

// Buffers.

#[test]
fn buffer_named_again_while_it_lives() {
    ends_only_its_session(
        &["buffer 1, but the session has had buffer 1; a guest has to count up"],
        |guest| {
            guest.hello();
            let buffer = guest.alloc(8);
            guest.send(&Request::Alloc { buffer, size: 8 });
        },
    );
}

#[test]
fn buffer_named_again_after_it_was_freed() {
    ends_only_its_session(
        &["buffer 1, but the session has had buffer 1; a guest has to count up"],
        |guest| {
            guest.hello();
            let buffer = guest.alloc(8);
            guest.send(&Request::Free { buffer });
            guest.send(&Request::Alloc { buffer, size: 8 });
        },
    );
}

#[test]
fn buffer_with_an_id_below_that_of_another() {
    ends_only_its_session(&["buffer 6, but the session has had buffer 7"], |guest| {
        guest.hello();
        guest.alloc_mapped(BufferId(7), 8);
        guest.send(&Request::Free {
            buffer: BufferId(7),
        });
        guest.send(&Request::Alloc {
            buffer: BufferId(6),
            size: 8,
        });
    });
}

#[test]
fn buffer_unknown_to_every_request_that_names_one() {
    let ghost = BufferId(99);
    let (offset, len, size, value) = (0, 4, 8, 1);
    let real = BufferId(1);
    let requests = [
        ("FREE", Request::Free { buffer: ghost }),
        (
            "WRITE",
            Request::Write {
                buffer: ghost,
                offset,
            },
        ),
        (
            "READ",
            Request::Read {
                buffer: ghost,
                offset,
                len,
            },
        ),
        (
            "FILL",
            Request::Fill {
                buffer: ghost,
                offset,
                len,
                value,
            },
        ),
        (
            "COPY",
            Request::Copy {
                dst: ghost,
                dst_offset: 0,
                src: real,
                src_offset: 0,
                len,
            },
        ),
        (
            "COPY",
            Request::Copy {
                dst: real,
                dst_offset: 0,
                src: ghost,
                src_offset: 0,
                len,
            },
        ),
    ];
    for (kind, request) in requests {
        let words = format!("{kind} names buffer 99, which the session does not have");
        ends_only_its_session(&[&words], |guest| {
            guest.hello();
            assert_eq!(guest.alloc(size), real);
            guest.send(&request);
        });
    }
}

#[test]
fn buffer_freed_twice() {
    ends_only_its_session(&["FREE names buffer 1, which"], |guest| {
        guest.hello();
        let buffer = guest.alloc(8);
        guest.send(&Request::Free { buffer });
        guest.send(&Request::Free { buffer });
    });
}

#[test]
fn buffer_of_another_guest() {
    let host = Host::new(cpu());
    let mut owner = host.guest();
    let secret = BufferId(5000);
    owner.alloc_mapped(secret, 8);
    owner.write(secret, 0, b"a secret");
    owner.fence();
    let mut attacker = host.guest();
    attacker.send(&Request::Read {
        buffer: secret,
        offset: 0,
        len: 8,
    });
    let reason = attacker.ended();
    assert!(
        reason.contains("buffer 5000, which the session does not have"),
        "{reason}"
    );
    assert_eq!(owner.read(secret, 0, 8), b"a secret");
}

#[test]
fn read_longer_than_a_payload() {
    ends_only_its_session(&["1048577 bytes, at most 1048576"], |guest| {
        guest.hello();
        let buffer = guest.alloc(2 << 20);
        let len = MAX_PAYLOAD as u64 + 1;
        guest.send(&Request::Read {
            buffer,
            offset: 0,
            len,
        });
    });
}

// Graphs.

#[test]
fn graph_submitted_but_never_sent() {
    ends_only_its_session(&["SUBMIT names graph 7, which was never sent"], |guest| {
        guest.hello();
        guest.submit(GRAPH);
    });
}

#[test]
fn graph_submitted_before_its_last_part() {
    ends_only_its_session(&["SUBMIT names graph 7"], |guest| {
        guest.hello();
        guest.send_with(
            &Request::Graph {
                graph: GRAPH,
                offset: 0,
                total: 100,
            },
            &[0; 96],
        );
        guest.submit(GRAPH);
    });
}

#[test]
fn patch_of_an_unknown_graph_and_patches_out_of_range() {
    ends_only_its_session(
        &["PATCH of 12 bytes is based on graph 7, which was never sent"],
        |guest| {
            guest.hello();
            let patch = Request::Patch {
                graph: GraphId(8),
                base: GRAPH,
            };
            guest.send_with(&patch, &[0; 12]);
        },
    );
    let patches: [(&[u32], &str); 4] = [
        (&[1 << 20, 1, 0], "writes 1 words at 1048576"),
        (&[0, 2, 0], "writes 2 words at 0"),
        (&[0, 1, 0], "begins with 0x00000000"),
        (&[0], "1 words behind its end"),
    ];
    for (words, reason) in patches {
        ends_only_its_session(&["graph 8 cannot be decoded", reason], |guest| {
            guest.hello();
            let buffer = guest.alloc(16);
            guest.graph(GRAPH, &add(4, buffer, buffer, buffer));
            let patch = Request::Patch {
                graph: GraphId(8),
                base: GRAPH,
            };
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            guest.send_with(&patch, &bytes);
        });
    }
}

#[test]
fn graph_of_impossible_size() {
    for total in [0, 3, MAX_GRAPH + 4, u64::MAX] {
        let words = format!("image of {total} bytes");
        ends_only_its_session(&[&words], |guest| {
            guest.hello();
            guest.send_with(
                &Request::Graph {
                    graph: GRAPH,
                    offset: 0,
                    total,
                },
                &[0; 4],
            );
        });
    }
}

#[test]
fn graph_parts_out_of_order() {
    let part = |graph, offset, total| Request::Graph {
        graph: GraphId(graph),
        offset,
        total,
    };
    let violations = [
        ("begins in the middle", vec![(part(7, 4, 100), 4)]),
        (
            "leaves a gap",
            vec![(part(7, 0, 100), 4), (part(7, 8, 100), 4)],
        ),
        ("repeats", vec![(part(7, 0, 100), 4), (part(7, 0, 100), 4)]),
        (
            "changes its total",
            vec![(part(7, 0, 100), 4), (part(7, 4, 104), 4)],
        ),
        (
            "changes its graph",
            vec![(part(7, 0, 100), 4), (part(8, 4, 100), 4)],
        ),
        (
            "starts another",
            vec![(part(7, 0, 100), 4), (part(8, 0, 100), 4)],
        ),
        ("is longer than it said", vec![(part(7, 0, 100), 104)]),
        (
            "ends longer than it said",
            vec![(part(7, 0, 100), 96), (part(7, 96, 100), 8)],
        ),
        ("is empty", vec![(part(7, 0, 100), 0)]),
        (
            "wraps around",
            vec![(part(7, 0, 100), 4), (part(7, u64::MAX, 100), 8)],
        ),
    ];
    for (what, parts) in violations {
        println!("an image that {what}");
        ends_only_its_session(&["a part of graph", "expected are"], |guest| {
            guest.hello();
            for (part, len) in parts {
                guest.send_with(&part, &vec![0; len]);
            }
        });
    }
}

#[test]
fn graph_of_random_bytes() {
    ends_only_its_session(
        &["graph 7 cannot be decoded", "begins with 0x2a2a2a2a"],
        |guest| {
            guest.hello();
            guest.image(GRAPH, &[42; 400]);
        },
    );
}

#[test]
fn graph_with_counts_beyond_its_length() {
    ends_only_its_session(
        &["graph 7 cannot be decoded", "4294967295 tensors"],
        |guest| {
            guest.hello();
            let a = guest.alloc(8);
            let mut image = image(&add(2, a, a, a));
            image[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
            guest.image(GRAPH, &image);
        },
    );
}

#[test]
fn graph_with_more_names_than_the_session_has_buffers() {
    ends_only_its_session(&["graph 7 names 2 buffers, the session has 1"], |guest| {
        guest.hello();
        let a = guest.alloc(8);
        let mut graph = add(2, a, a, a);
        graph.buffers.push(a);
        guest.graph(GRAPH, &graph);
    });
}

/// A table with a buffer twice would hide that two results overlap.
#[test]
fn graph_that_names_a_buffer_twice() {
    ends_only_its_session(&["graph 7 is invalid", "names buffer", "twice"], |guest| {
        guest.hello();
        let a = guest.alloc(8);
        guest.alloc(8);
        let mut graph = add(2, a, a, a);
        graph.buffers.push(a);
        guest.graph(GRAPH, &graph);
    });
}

#[test]
fn graph_on_an_unknown_buffer() {
    ends_only_its_session(&["graph 7 is invalid", "BufferId(99)"], |guest| {
        guest.hello();
        let a = guest.alloc(8);
        guest.alloc(8);
        guest.graph(GRAPH, &add(2, a, a, BufferId(99)));
    });
}

#[test]
fn graph_of_more_nodes_than_allowed() {
    let mut limits = Limits::default();
    limits.graph.nodes = 10;
    let host = Host::limited(cpu(), limits, 64);
    ends_only_its_session_on(
        host,
        &["the graph has 11 nodes, the limit is 10"],
        |guest| {
            guest.hello();
            let a = guest.alloc(8);
            let mut graph = add(2, a, a, a);
            graph.nodes = vec![graph.nodes[0].clone(); 11];
            guest.graph(GRAPH, &graph);
        },
    );
}

#[test]
fn graphs_above_the_limit() {
    let graphs = Limits {
        graphs: 4,
        ..Limits::default()
    };
    let graph_bytes = Limits {
        graph_bytes: 1000,
        ..Limits::default()
    };
    let graph_nodes = Limits {
        graph_nodes: 4,
        ..Limits::default()
    };
    for (limits, words) in [
        (graphs, "with graph 5 the session stores 5 graphs"),
        (graph_bytes, "bytes of graphs, at most 1000 are allowed"),
        (graph_nodes, "with graph 5 the session stores 5 nodes"),
    ] {
        ends_only_its_session_on(Host::limited(cpu(), limits, 64), &[words], |guest| {
            guest.hello();
            let a = guest.alloc(8);
            for i in 1..=5 {
                // Replaced and forgotten graphs are not counted.
                if i < 4 {
                    guest.graph(GraphId(100), &add(2, a, a, a));
                    guest.send(&Request::Forget {
                        graph: GraphId(100),
                    });
                    guest.graph(GraphId(i), &add(2, a, a, a));
                }
                guest.graph(GraphId(i), &add(2, a, a, a));
            }
        });
    }
}

#[test]
fn tensor_that_visits_its_buffer_too_often() {
    ends_only_its_session(&["visits 286720 bytes of a buffer of 4372"], |guest| {
        guest.hello();
        // Rows of 1024 floats, each a float behind the one before.
        let a = guest.alloc(4 * (1024 + 69));
        let mut rows = Shape::contiguous(Type::F32, [1024, 70, 1, 1]).expect("dense");
        rows.nb = [4, 4, 4 * 70, 4 * 70];
        let mut build = Build::default();
        let src = build.place(rows, a, 0);
        let dst = build.tensor(Type::F32, [1, 70, 1, 1], a);
        build.node(Op::SumRows {}, dst, &[src]);
        guest.graph(GRAPH, &build.0);
    });
}

// A failure of the host also ends one session only.

#[test]
fn panics_of_the_host_while_it_serves_a_guest() {
    for what in ["alloc", "compile", "run"] {
        let engine = ScriptedEngine::new();
        let host = Host::new(engine.clone());
        let mut other_guest = host.guest();
        let a = other_guest.alloc_with(b"untouched");
        let mut guest = host.guest();
        let buffer = guest.alloc(4);
        match what {
            "alloc" => {
                let buffer = guest.new_buffer();
                guest.send(&Request::Alloc {
                    buffer,
                    size: PANIC_SIZE,
                });
            }
            "compile" => engine.next(Act::CompilePanics),
            _ => engine.next(Act::RunPanics),
        }
        if what != "alloc" {
            guest.graph(GRAPH, &add(1, buffer, buffer, buffer));
            guest.submit(GRAPH);
        }
        // The panic message stays in the host's log.
        assert_eq!(guest.ended(), "the host failed while it executed a request");
        assert_eq!(other_guest.read(a, 0, 9), b"untouched");
    }
}

#[test]
fn memory_that_the_engine_cannot_read() {
    let host = Host::new(ScriptedEngine::new());
    let mut guest = host.guest();
    let buffer = guest.alloc(UNREADABLE_SIZE);
    guest.send(&Request::Read {
        buffer,
        offset: 0,
        len: 16,
    });
    // No reply with bytes that are not those of the buffer.
    let reason = guest.ended();
    assert!(reason.contains("the engine failed"), "{reason}");
}

#[test]
fn freed_buffer_removes_only_the_graphs_that_use_it() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let a = guest.alloc_with(&bytes(&[1.0]));
    let b = guest.alloc(4);
    guest.graph(GraphId(1), &add(1, a, a, a));
    guest.graph(GraphId(2), &add(1, b, a, b));
    let free = host.engine.memory().free;
    guest.send(&Request::Free { buffer: b });
    guest.submit(GraphId(1));
    assert_eq!(guest.read_f32(a, 1), [2.0]);
    assert_eq!(
        host.engine.memory().free,
        free + PAGE,
        "a plan kept the memory"
    );
    guest.submit(GraphId(2));
    assert!(guest.ended().contains("graph 2"));
}

#[test]
fn empty_graph_is_accepted() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    guest.graph(GRAPH, &Graph::default());
    guest.submit(GRAPH);
    guest.fence();
}
