//! Known vulnerabilities of similar projects (remote execution of ggml graphs), each by the name of
//! its advisory, its CVE, its issue of llama.cpp, or its class.
//!
//! Each test sends the bytes of the attack to a real `vgpu serve` in a process of its own: the
//! attack is refused with a reason, and another guest, with data and a graph from before, is not
//! affected.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::model::{for_weights, lookup, read_all, upload};
use common::{Build, Guest, OtherGuest, TIMEOUT, add, bytes, get_rows, image};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::Signal;
use served::{Scratch, Serve};
use vgpu_transport::ir::{BufferId, Graph, Op, Shape, Type};
use vgpu_transport::wire::{GraphId, MIN_EXTENT, Reply, Request};

const GRAPH: GraphId = GraphId(7);

/// A running `vgpu serve`.
struct Executor {
    serve: Serve,
    scratch: Scratch,
}

impl Executor {
    fn start() -> Executor {
        let name = std::thread::current().name().map_or_else(
            || "cve".into(),
            |name| name[..name.len().min(24)].to_owned(),
        );
        let scratch = Scratch::new(&name);
        let serve = Serve::start(&scratch.socket(), &[]);
        Executor { serve, scratch }
    }

    fn connect(&self) -> Guest {
        self.serve.connect(&self.scratch.socket())
    }

    fn guest(&self) -> Guest {
        self.serve.guest(&self.scratch.socket())
    }

    /// Checks that `violation` ends its session with a reason that contains all of `words`, that no
    /// other guest is affected, and that the memory of the ended session is freed.
    fn refuses(&self, words: &[&str], violation: impl FnOnce(&mut Guest)) {
        let mut other_guest = OtherGuest::new(self.guest());
        let free = free(&mut other_guest.guest);
        other_guest.check_unaffected(self.connect(), words, violation);
        // The guest learns of the end before its memory is free. More may be free: the memory of an
        // earlier other guest.
        let since = Instant::now();
        while self::free(&mut other_guest.guest) < free {
            assert!(since.elapsed() < TIMEOUT, "its memory does not come back");
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // The executor has survived all attacks.
        let ended = self.serve.child.try_wait();
        if !std::thread::panicking() {
            assert_eq!(
                ended.expect("it can be waited for"),
                None,
                "vgpu serve has ended"
            );
        }
    }
}

/// Free memory of the host in bytes.
fn free(guest: &mut Guest) -> u64 {
    match guest.ask(&Request::Memory {}) {
        Reply::Memory { free, .. } => free,
        other => panic!("{other:?}"),
    }
}

#[test]
fn ghsa_wcr5_566p_9cwj_write_what_where() {
    let executor = Executor::start();
    for (offset, len) in [
        (8, 1),
        (5, 4),
        (u64::MAX, 1),
        (u64::MAX - 3, 8),
        (1 << 63, 4),
    ] {
        let words = format!("WRITE accesses {len} bytes at {offset} of buffer 1, which has 8");
        executor.refuses(&[&words], |guest| {
            guest.hello();
            let buffer = guest.alloc(8);
            guest.write(buffer, offset, &vec![0x41; len]);
        });
    }
    executor.refuses(
        &["FILL accesses 18446744073709551612 bytes at 4"],
        |guest| {
            guest.hello();
            let buffer = guest.alloc(8);
            guest.send(&Request::Fill {
                buffer,
                offset: 4,
                len: u64::MAX - 3,
                value: 0x41,
            });
        },
    );
    executor.refuses(
        &["tensor 0 ends at byte 12 of buffer BufferId(1), which has 8"],
        |guest| {
            guest.hello();
            let small = guest.alloc(8);
            let large = guest.alloc(64);
            let mut build = Build::default();
            let shape = Shape::contiguous(Type::F32, [2, 1, 1, 1]).unwrap();
            let dst = build.place(shape, small, 4);
            let src = build.place(shape, large, 0);
            build.node(Op::Add {}, dst, &[src, src]);
            guest.graph(GRAPH, &build.0);
        },
    );
}

#[test]
fn ghsa_5vm9_p64x_gqw9_arbitrary_read() {
    let executor = Executor::start();
    for (offset, len) in [(8, 1), (0, 9), (u64::MAX, 1), (u64::MAX - 7, 16)] {
        let words = format!("READ accesses {len} bytes at {offset} of buffer 1, which has 8");
        executor.refuses(&[&words], |guest| {
            guest.hello();
            let buffer = guest.alloc(8);
            guest.send(&Request::Read {
                buffer,
                offset,
                len,
            });
        });
    }
    executor.refuses(&["tensor 1", "which has 8"], |guest| {
        guest.hello();
        let dst = guest.alloc(1 << 12);
        let src = guest.alloc(8);
        guest.graph(GRAPH, &add(1 << 10, dst, src, src));
    });
}

#[test]
fn ghsa_mqp6_7pv6_fqjf_unvalidated_type() {
    let executor = Executor::start();
    for ty in [4u32, 5, 200, 0x8000_0000, u32::MAX] {
        let words = format!("unknown tensor type id {ty}");
        executor.refuses(&[&words], |guest| {
            guest.hello();
            let a = guest.alloc(8);
            let mut image = image(&add(2, a, a, a));
            // A header of 5 words, a buffer of 2, then the first tensor, which begins with its
            // type.
            image[28..32].copy_from_slice(&ty.to_le_bytes());
            guest.image(GRAPH, &image);
        });
    }
    // An existing type for which the engine has no such operation.
    executor.refuses(&["does not run ADD with these types"], |guest| {
        guest.hello();
        let a = guest.alloc(1 << 10);
        let mut build = Build::default();
        let t = build.tensor(Type::Iq1S, [256, 1, 1, 1], a);
        build.node(Op::Add {}, t, &[t, t]);
        guest.graph(GRAPH, &build.0);
    });
}

#[test]
fn copy_tensor_heap_overflow() {
    let executor = Executor::start();
    let copy = |dst_offset, src_offset, len| Request::Copy {
        dst: BufferId(2),
        dst_offset,
        src: BufferId(1),
        src_offset,
        len,
    };
    for (request, words) in [
        (
            copy(0, 0, 16),
            "COPY accesses 16 bytes at 0 of buffer 2, which has 8",
        ),
        (
            copy(4, 0, 8),
            "COPY accesses 8 bytes at 4 of buffer 2, which has 8",
        ),
        (
            copy(0, 60, 8),
            "COPY accesses 8 bytes at 60 of buffer 1, which has 64",
        ),
        (
            copy(u64::MAX, 0, 2),
            "COPY accesses 2 bytes at 18446744073709551615 of buffer 2",
        ),
        (
            copy(0, u64::MAX - 1, 4),
            "COPY accesses 4 bytes at 18446744073709551614 of buffer 1",
        ),
    ] {
        executor.refuses(&[words], |guest| {
            guest.hello();
            guest.alloc(64);
            guest.alloc(8);
            guest.send(&request);
        });
    }
    // The same as an operator: more elements in the source than in the destination.
    executor.refuses(
        &["CPY is malformed", "different numbers of elements"],
        |guest| {
            guest.hello();
            let src = guest.alloc(64);
            let dst = guest.alloc(8);
            let mut build = Build::default();
            let dst = build.tensor(Type::F32, [2, 1, 1, 1], dst);
            let src = build.tensor(Type::F32, [16, 1, 1, 1], src);
            build.node(Op::Copy {}, dst, &[src]);
            guest.graph(GRAPH, &build.0);
        },
    );
}

#[test]
fn cve_2026_34159_buffer_0_bypass() {
    let executor = Executor::start();
    let none = BufferId(0);
    executor.refuses(&["buffer 0, which is not a valid id"], |guest| {
        guest.hello();
        guest.send(&Request::Alloc {
            buffer: none,
            size: 8,
        });
    });
    for request in [
        Request::Write {
            buffer: none,
            offset: 0x7fff_0000_0000,
        },
        Request::Read {
            buffer: none,
            offset: 0x7fff_0000_0000,
            len: 8,
        },
        Request::Fill {
            buffer: none,
            offset: 0,
            len: 0,
            value: 0,
        },
        Request::Free { buffer: none },
    ] {
        executor.refuses(
            &["names buffer 0, which the session does not have"],
            |guest| {
                guest.hello();
                guest.send(&request);
            },
        );
    }
    executor.refuses(&["the graph uses buffer BufferId(0)"], |guest| {
        guest.hello();
        let a = guest.alloc(8);
        guest.alloc(8);
        guest.graph(GRAPH, &add(2, a, none, a));
    });
}

#[test]
fn ghsa_2phh_px2f_2qmx_use_after_free_by_free_and_recompute() {
    let executor = Executor::start();
    executor.refuses(
        &["SUBMIT names graph 7", "used a buffer that was freed"],
        |guest| {
            guest.hello();
            let a = guest.alloc(8);
            let b = guest.alloc(8);
            guest.graph(GRAPH, &add(2, a, a, b));
            guest.submit(GRAPH);
            guest.send(&Request::Free { buffer: b });
            // New memory, possibly at the place of the old memory.
            guest.alloc(8);
            guest.submit(GRAPH);
        },
    );
}

#[test]
fn llama_cpp_25289_function_pointer_in_a_custom_operator() {
    let executor = Executor::start();
    // The IR has no operator with code. An unknown operator id is the closest equivalent.
    for id in [0u16, 19, 200, u16::MAX] {
        let words = format!("unknown operator id {id}");
        executor.refuses(&[&words], |guest| {
            guest.hello();
            let a = guest.alloc(8);
            let graph = add(2, a, a, a);
            let mut image = image(&graph);
            // The last node of the graph: header, destination, two sources.
            let head = image.len() - 16;
            image[head..head + 2].copy_from_slice(&id.to_le_bytes());
            guest.image(GRAPH, &image);
        });
    }
}

#[test]
fn shape_driven_abort() {
    let executor = Executor::start();
    let cases: [(&str, Shape); 7] = [
        (
            "extents whose product wraps",
            shape([1 << 32, 1 << 32, 1, 1], [4, 0, 0, 0]),
        ),
        (
            "an extent of all ones",
            shape([u64::MAX, 1, 1, 1], [4, 4, 4, 4]),
        ),
        (
            "strides whose product wraps",
            shape([2, 2, 2, 2], [4, 8, 1 << 63, 1 << 63]),
        ),
        (
            "a stride that is not whole elements",
            shape([2, 1, 1, 1], [3, 8, 8, 8]),
        ),
        (
            "a negative stride",
            shape([2, 2, 1, 1], [4, (-8i64).cast_unsigned(), 8, 8]),
        ),
        (
            "strides of zero that multiply the work",
            shape([1, 1 << 40, 1, 1], [4, 0, 0, 0]),
        ),
        (
            "extents that do not match",
            shape([3, 1, 1, 1], [4, 12, 12, 12]),
        ),
    ];
    for (what, bad) in cases {
        println!("a tensor with {what}");
        executor.refuses(&["graph 7 is invalid"], |guest| {
            guest.hello();
            let a = guest.alloc(1 << 10);
            let mut build = Build::default();
            let good = build.tensor(Type::F32, [2, 1, 1, 1], a);
            let bad = build.place(bad, a, 0);
            build.node(Op::Add {}, good, &[bad, good]);
            guest.graph(GRAPH, &build.0);
        });
    }
    // A division by a size of zero.
    executor.refuses(&["graph 7 is invalid", "does not repeat"], |guest| {
        guest.hello();
        let a = guest.alloc(1 << 10);
        let mut build = Build::default();
        let good = build.tensor(Type::F32, [2, 1, 1, 1], a);
        let empty = build.tensor(Type::F32, [0, 1, 1, 1], a);
        build.node(Op::Add {}, good, &[good, empty]);
        guest.graph(GRAPH, &build.0);
    });
}

#[test]
fn llama_cpp_26825_get_rows_reads_past_its_table() {
    let executor = Executor::start();
    // Ids are data, so the session goes on; the graph must not read outside the table.
    let ids = [2i32, 3, 512, 1024, -1, -512, i32::MAX, i32::MIN];
    fails_and_writes_nothing(
        &executor,
        &ids.map(i32::to_le_bytes),
        8,
        |guest, dst, ids| {
            let table = guest.alloc_with(&bytes(&[1.0; 4]));
            get_rows(2, dst, (table, 2), (ids, 1))
        },
    );
    // The reported form: inconsistent sizes.
    executor.refuses(&["graph 7 is invalid"], |guest| {
        guest.hello();
        let a = guest.alloc(1 << 10);
        let mut build = Build::default();
        let dst = build.tensor(Type::F32, [2, 1, 4, 1], a);
        let table = build.tensor(Type::F32, [2, 2, 1, 1], a);
        let ids = build.tensor(Type::I32, [1, 4, 1, 1], a);
        build.node(Op::GetRows {}, dst, &[table, ids]);
        guest.graph(GRAPH, &build.0);
    });
}

#[test]
fn strides_over_4_gib_cut_to_32_bits() {
    let executor = Executor::start();
    // Strides that become small or zero if they are truncated to 32 bits.
    for stride in [1u64 << 32, (1 << 32) + 8, 1 << 40, (1 << 33) | 4] {
        executor.refuses(&["tensor 1 ends at byte", "which has 64"], |guest| {
            guest.hello();
            let a = guest.alloc(64);
            let mut build = Build::default();
            let good = build.tensor(Type::F32, [2, 2, 1, 1], a);
            let far = build.place(
                shape([2, 2, 1, 1], [4, stride, 2 * stride, 2 * stride]),
                a,
                0,
            );
            build.node(Op::Add {}, good, &[far, good]);
            guest.graph(GRAPH, &build.0);
        });
    }
    // The stride of a dimension with one index is never used.
    let mut guest = executor.guest();
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    let mut build = Build::default();
    let t = build.place(shape([2, 1, 1, 1], [4, 1 << 40, 1 << 41, 1 << 42]), a, 0);
    build.node(Op::Add {}, t, &[t, t]);
    guest.graph(GRAPH, &build.0);
    guest.submit(GRAPH);
    assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
}

#[test]
fn llama_cpp_26912_set_rows_writes_past_its_destination() {
    let executor = Executor::start();
    // Inconsistent sizes: more planes in the source than in the destination.
    executor.refuses(&["graph 7 is invalid"], |guest| {
        guest.hello();
        let a = guest.alloc(1 << 10);
        let mut build = Build::default();
        let dst = build.tensor(Type::F32, [4, 1, 1, 1], a);
        let src = build.tensor(Type::F32, [4, 1, 2, 1], a);
        let ids = build.tensor(Type::I64, [1, 2, 1, 1], a);
        build.node(Op::SetRows {}, dst, &[src, ids]);
        guest.graph(GRAPH, &build.0);
    });
    // Ids are data: the graph fails, and writes nothing.
    let ids = [2i64, -1, 1 << 32, i64::MAX, i64::MIN, 1 << 61];
    fails_and_writes_nothing(
        &executor,
        &ids.map(i64::to_le_bytes),
        16,
        |guest, dst, ids| {
            let rows = guest.alloc_with(&bytes(&[7.0, 7.0]));
            let mut build = Build::default();
            let dst = build.tensor(Type::F32, [2, 2, 1, 1], dst);
            let src = build.tensor(Type::F32, [2, 1, 1, 1], rows);
            let id = build.tensor(Type::I64, [1, 1, 1, 1], ids);
            build.node(Op::SetRows {}, dst, &[src, id]);
            build.0
        },
    );
}

/// Runs a graph with each of some ids, all out of range: the graph fails, its result of `len` bytes
/// stays zero, the session goes on, and the data of another guest is unchanged.
fn fails_and_writes_nothing<const N: usize>(
    executor: &Executor,
    ids: &[[u8; N]],
    len: u64,
    graph: impl FnOnce(&mut Guest, BufferId, BufferId) -> Graph,
) {
    let mut other_guest = executor.guest();
    let secret = other_guest.alloc_with(&[0x5a; 4096]);
    let mut guest = executor.guest();
    let (place, dst) = (guest.alloc(N as u64), guest.alloc(len));
    let graph = graph(&mut guest, dst, place);
    guest.graph(GRAPH, &graph);
    for id in ids {
        guest.write(place, 0, id);
        guest.submit(GRAPH);
        let (reply, _) = guest.receive();
        assert!(
            matches!(reply, Reply::Failed { .. }),
            "row {id:?} of 2: {reply:?}"
        );
        assert_eq!(
            guest.read(dst, 0, len),
            vec![0; len as usize],
            "row {id:?} of 2"
        );
    }
    assert_eq!(other_guest.read(secret, 0, 4096), [0x5a; 4096]);
}

/// A server that accepts one client after the other hangs if one client sends nothing.
#[test]
fn llama_cpp_28916_silent_client_does_not_block_others() {
    let executor = Executor::start();
    let silent: Vec<Guest> = (0..4).map(|_| executor.connect()).collect();
    // A socket without even a handshake.
    let address = SocketAddrUnix::new(executor.scratch.socket()).expect("a path");
    let mute: Vec<_> = (0..4)
        .map(|_| {
            let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)
                .expect("a socket");
            rustix::net::connect(&socket, &address).expect("a connection");
            socket
        })
        .collect();
    executor.guest().fence();
    drop((silent, mute));
    executor.guest().fence();
}

/// Weights of some content.
fn content(seed: u8) -> Vec<u8> {
    (0..4 * MIN_EXTENT as usize)
        .map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed)
        .collect()
}

/// Makes an executor cache weights, and waits until they are on its disk.
fn put_on_disk(guest: &mut Guest, folder: &Path, content: &[u8]) {
    let kept = files(folder);
    let (buffer, _) = for_weights(guest, content.len() as u64);
    upload(guest, buffer, 0, content);
    guest.send(&Request::Seal { buffer });
    guest.fence();
    let since = Instant::now();
    while files(folder).iter().all(|file| kept.contains(file)) {
        assert!(since.elapsed() < TIMEOUT, "nothing is written");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The complete files of a cache: a file has a temporary name until it is written and synced.
fn files(folder: &Path) -> Vec<(PathBuf, u64)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files = Vec::new();
    for entry in entries {
        let Ok(metadata) = entry.metadata() else {
            continue;
        };
        if metadata.is_dir() {
            files.extend(self::files(&entry.path()));
        } else if !entry.file_name().as_encoded_bytes().starts_with(b"new-") {
            files.push((entry.path(), metadata.len()));
        }
    }
    files.sort();
    files
}

/// ggml-rpc identifies cached data by a 64-bit hash that is easy to collide, and does not verify
/// the files.
#[test]
fn ggml_rpc_cached_weights_are_used_without_verification() {
    let scratch = Scratch::new("cve-cache");
    let folder = scratch.path().join("cache");
    let cache = format!("{},size=1G", folder.display());
    let options = ["--weights-cache", &cache];
    let content = content(1);
    let serve = Serve::start(&scratch.socket(), &options);
    let mut guest = serve.guest(&scratch.socket());
    put_on_disk(&mut guest, &folder, &content);
    // A hash from a guest makes no entry: here it is the hash of other bytes.
    let claimed = self::content(2);
    let (buffer, _) = for_weights(&mut guest, content.len() as u64);
    assert!(!lookup(&mut guest, buffer, 0, &claimed));
    upload(&mut guest, buffer, 0, &content);
    guest.send(&Request::Seal { buffer });
    guest.fence();
    let (buffer, _) = for_weights(&mut guest, content.len() as u64);
    assert!(
        !lookup(&mut guest, buffer, 0, &claimed),
        "a claim has become an entry"
    );
    drop(guest);
    serve.signal(Signal::TERM);
    serve.wait();

    // A changed byte on disk.
    for (file, _) in files(&folder) {
        let mut bytes = fs::read(&file).expect("a file of the cache");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&file, bytes).expect("a file that can be written");
    }
    let serve = Serve::start(&scratch.socket(), &options);
    let mut guest = serve.guest(&scratch.socket());
    let (buffer, _) = for_weights(&mut guest, content.len() as u64);
    assert!(
        !lookup(&mut guest, buffer, 0, &content),
        "wrong weights were handed out"
    );
    assert!(
        read_all(&mut guest, buffer, content.len() as u64)
            .iter()
            .all(|&byte| byte == 0),
        "something of the wrong file is left"
    );
    // The guest sends the weights, which are cached again.
    upload(&mut guest, buffer, 0, &content);
    assert!(read_all(&mut guest, buffer, content.len() as u64) == content);
    drop(guest);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

/// 500 GB of files that nothing removes.
#[test]
fn llama_cpp_27585_the_cache_of_weights_grows_until_the_disk_is_full() {
    let scratch = Scratch::new("cve-growth");
    let folder = scratch.path().join("cache");
    const MAX_SIZE: u64 = 12 * MIN_EXTENT;
    let cache = format!("{},size={MAX_SIZE}", folder.display());
    let serve = Serve::start(&scratch.socket(), &["--weights-cache", &cache]);
    let mut last = Vec::new();
    // A guest writes at most twice as many bytes as the cache has at once.
    for seed in 0..6 {
        let mut guest = serve.guest(&scratch.socket());
        last = content(seed);
        // Files are ordered by their times, which come from a clock that ticks each 4 to 10 ms.
        std::thread::sleep(Duration::from_millis(20));
        put_on_disk(&mut guest, &folder, &last);
        let held: u64 = files(&folder).iter().map(|(_, len)| len).sum();
        // A file is renamed into the folder before the oldest file is removed.
        assert!(
            held <= MAX_SIZE + 5 * MIN_EXTENT,
            "{held} bytes of {MAX_SIZE} after {seed}"
        );
    }
    drop(serve.guest(&scratch.socket()));
    serve.signal(Signal::TERM);
    serve.wait();
    let held: u64 = files(&folder).iter().map(|(_, len)| len).sum();
    assert!(
        held <= MAX_SIZE + MIN_EXTENT,
        "{held} bytes of {MAX_SIZE} are left"
    );
    // The newest file is still there.
    let serve = Serve::start(&scratch.socket(), &["--weights-cache", &cache]);
    let mut guest = serve.guest(&scratch.socket());
    let (buffer, _) = for_weights(&mut guest, last.len() as u64);
    assert!(lookup(&mut guest, buffer, 0, &last));
    assert!(read_all(&mut guest, buffer, last.len() as u64) == last);
    drop(guest);
    serve.signal(Signal::TERM);
    serve.wait();
}

/// The client of ggml-rpc aborts its process when the server has ended, five times of five. The
/// client of ggml-virtgpu waits forever. (`cargo xtask test --only failures --only faults` tests
/// the same with llama.cpp.)
#[test]
fn ggml_rpc_client_aborts_when_the_server_ends() {
    let scratch = Scratch::new("cve-death");
    for round in 0..5 {
        let mut serve = Serve::start(&scratch.socket(), &[]);
        let mut guest = serve.guest(&scratch.socket());
        let a = guest.alloc_with(&bytes(&[1.0; 1024]));
        guest.graph(GRAPH, &add(1024, a, a, a));
        let submitted = guest.submit(GRAPH);
        guest.fence();
        // Idle, and in the middle of requests, of graphs, and of a reply.
        let sent = match round {
            0 => submitted + 1,
            1 => guest.send(&Request::Fill {
                buffer: a,
                offset: 0,
                len: 4096,
                value: 1,
            }),
            2 => (0..32)
                .map(|_| guest.submit(GRAPH))
                .max()
                .unwrap_or_default(),
            _ => guest.send(&Request::Read {
                buffer: a,
                offset: 0,
                len: 4096,
            }),
        };
        serve.child.kill().expect("it is there");
        serve.child.wait().expect("it can be waited for");
        // The request may have been completed; an endless wait is the failure.
        let _either = guest.end.wait_retired(sent);
        // Replies in flight may still arrive, then the end of the link.
        let mut payload = vec![0; 1 << 20];
        let ended = (0..64).any(|_| {
            let mut message = Vec::new();
            guest
                .end
                .receive(&mut message, payload.as_mut_slice().into())
                .is_err()
        });
        assert!(ended, "round {round}: messages of the dead");
        let mut message = Vec::new();
        Request::Fence {}.encode(guest.protocol, &mut message);
        let told = guest.end.send(&message, (&[][..]).into());
        assert!(told.is_err(), "round {round}: the dead take requests");
    }
    // The same process works with the next executor.
    let serve = Serve::start(&scratch.socket(), &[]);
    let mut guest = serve.guest(&scratch.socket());
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GRAPH, &add(2, a, a, a));
    guest.submit(GRAPH);
    assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
    drop(guest);
    serve.signal(Signal::TERM);
    serve.wait();
}

fn shape(ne: [u64; 4], nb: [u64; 4]) -> Shape {
    Shape {
        ty: Type::F32,
        ne,
        nb,
    }
}
