//! Drives the plugin's objects through the functions of a real ggml, with the executor in this
//! process.
//!
//! ggml comes from the build that `cargo xtask setup` puts into the cache folder.

mod common;
#[path = "common/ggml.rs"]
mod ggml;

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use ggml::{Backend, Buffer, F32, Ggml, Graph, HostBuffer, I32, Q8_0, stats_path, text};
use ggml_vgpu::abi::{self, ggml_tensor};
use vgpu_transport::lock::lock;

/// The device has one session, and some tests count its messages: one test runs at a time.
fn exclusive() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn the_device_has_the_properties_that_programs_rely_on() {
    let _lock = exclusive();
    let ggml = Ggml::get();
    assert_eq!(ggml.devices.len(), 1, "the executor has one engine");
    let mut props = std::mem::MaybeUninit::<abi::ggml_backend_dev_props>::zeroed();
    // SAFETY: ggml fills the structure in, and returns strings that stay.
    let props = unsafe {
        (ggml.dev_get_props)(ggml.device, props.as_mut_ptr());
        props.assume_init()
    };
    assert_eq!(text(props.name), "VGPU0");
    assert_eq!(props.type_, abi::GGML_BACKEND_DEVICE_TYPE_GPU);
    assert!(props.memory_total >= props.memory_free && props.memory_free > 0);
    let caps = props.caps;
    assert!(caps.async_ && caps.host_buffer && caps.events);
    let description = text(props.description).to_lowercase();
    for word in ["cuda", "rocm", "hip", "metal", "apple", "vulkan"] {
        assert!(
            !description.contains(word),
            "`{description}` makes Ollama think of {word}"
        );
    }
}

#[test]
fn buffers_are_aligned_disjoint_and_zero() {
    let _lock = exclusive();
    let ggml = Ggml::get();
    let buffers: Vec<Buffer> = [1, 255, 256, 4096, 100_000]
        .map(|size| ggml.alloc(size).expect("there is room"))
        .into();
    let mut ranges: Vec<(usize, usize)> = buffers
        .iter()
        .map(|b| (b.base(), b.base() + b.size()))
        .collect();
    ranges.sort_unstable();
    assert!(
        ranges.iter().all(|(base, _)| base % 256 == 0 && *base != 0),
        "{ranges:x?}"
    );
    assert!(
        ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0),
        "{ranges:x?}"
    );

    let graph = Graph::new();
    let tensor = graph.tensor(F32, [1000, 1]);
    let buffer = graph.place();
    assert!(
        graph.get::<f32>(tensor).iter().all(|&x| x.to_bits() == 0),
        "memory is zero at first"
    );
    drop(buffer);
}

/// Kernels of the host read the last row in units of 512 elements.
#[test]
fn quantised_rows_have_room_up_to_the_next_512_elements() {
    let _lock = exclusive();
    let ggml = Ggml::get();
    let graph = Graph::new();
    // 2 rows of 3 blocks of 34 bytes, and 13 blocks behind them up to 512 elements.
    let odd = graph.tensor(Q8_0, [96, 2]);
    let whole = graph.tensor(Q8_0, [1024, 2]);
    let floats = graph.tensor(F32, [96, 2]);
    let buft = (ggml.dev_buffer_type)(ggml.device);
    let wanted = [odd, whole, floats].map(|tensor| (ggml.buft_get_alloc_size)(buft, tensor));
    assert_eq!(wanted, [6 * 34 + 13 * 34, 64 * 34, 4 * 96 * 2]);
    let buffer = graph.place();
    let mut places = [odd, whole, floats].map(|tensor| {
        // SAFETY: a placed tensor.
        let base = unsafe { (*tensor).data.addr() };
        (base, (ggml.nbytes)(tensor))
    });
    places.sort_unstable();
    let at = places.iter().position(|&(_, bytes)| bytes == 6 * 34);
    let [behind, next] = [0, 1].map(|i| places.get(at.expect("placed") + i).copied());
    let (base, bytes) = behind.expect("placed");
    let end = next.map_or(buffer.base() + buffer.size(), |(next, _)| next);
    assert!(end >= base + bytes + 13 * 34);
    drop(buffer);
}

#[test]
fn failed_allocations_return_null_and_the_device_keeps_working() {
    let _lock = exclusive();
    let ggml = Ggml::get();
    for size in [1 << 50, usize::MAX / 2, usize::MAX - 4096] {
        assert!(ggml.alloc(size).is_none(), "{size} bytes were handed out");
    }
    // ggml makes an empty buffer by itself, without the device.
    drop(ggml.alloc(0).expect("an empty buffer is a buffer"));
    drop(ggml.alloc(1 << 20).expect("the device goes on"));
}

#[test]
fn bytes_written_filled_and_copied_are_the_bytes_read() {
    let _lock = exclusive();
    let ggml = Ggml::get();
    let graph = Graph::new();
    // More bytes than the payload of one message, and not a multiple of it.
    let (a, b) = (
        graph.tensor(I32, [777_777, 1]),
        graph.tensor(I32, [777_777, 1]),
    );
    let _buffer = graph.place();
    let values: Vec<i32> = (0..777_777i32).map(|i| i.wrapping_mul(2_654_435)).collect();
    graph.set(a, &values);
    assert_eq!(graph.get::<i32>(a), values);
    // SAFETY: two placed tensors of the same shape.
    unsafe { (ggml.tensor_copy)(a, b) };
    assert_eq!(graph.get::<i32>(b), values);
    // SAFETY: 8 bytes from byte 4 on lie inside the tensor.
    unsafe { (ggml.tensor_memset)(a, 0xff, 4, 8) };
    assert_eq!(graph.get::<i32>(a)[..4], [0, -1, -1, values[3]]);
}

#[test]
fn a_graph_is_computed_and_computed_again_with_other_inputs() {
    let _lock = exclusive();
    let graph = Graph::new();
    let (a, b) = (graph.tensor(F32, [8, 3]), graph.tensor(F32, [8, 1]));
    let sum = graph.add(a, b);
    let _buffer = graph.place();
    let backend = Backend::new();
    for round in 0..3 {
        let x: Vec<f32> = (0..24).map(|i| (i * round) as f32).collect();
        let y: Vec<f32> = (0..8).map(|i| 0.5 * i as f32).collect();
        graph.set(a, &x);
        graph.set(b, &y);
        assert_eq!(backend.compute(&graph, sum), abi::GGML_STATUS_SUCCESS);
        let expected: Vec<f32> = (0..24).map(|i| x[i] + y[i % 8]).collect();
        assert_eq!(graph.get::<f32>(sum), expected);
    }
}

/// A backend that several threads use.
struct SharedBackend(Backend);

// SAFETY: the plugin's backend may be used by any number of threads: what they share is locked.
unsafe impl Send for SharedBackend {}
// SAFETY: calls of several threads at once are what the plugin's locks allow.
unsafe impl Sync for SharedBackend {}

/// A backend encodes one graph at a time. Each thread has a graph of its own length, in tensors of
/// its own size, so that parts of two graphs do not make one that is right.
#[test]
fn threads_that_share_a_backend_get_their_own_results() {
    const ROUNDS: usize = 300;
    let _lock = exclusive();
    Ggml::get();
    let backend = Arc::new(SharedBackend(Backend::new()));
    let (done, outcomes) = mpsc::channel();
    let threads = [1, 2, 3, 4].map(|thread| {
        let (backend, done) = (Arc::clone(&backend), done.clone());
        thread::spawn(move || {
            let (len, adds) = (256 * thread, 50 * thread);
            let graph = Graph::new();
            let (a, b) = (
                graph.tensor(F32, [len as i64, 1]),
                graph.tensor(F32, [len as i64, 1]),
            );
            let sum = (0..adds).fold(a, |sum, _| graph.add(sum, b));
            let cgraph = graph.towards(sum);
            let _buffer = graph.place();
            let wrong = (0..ROUNDS).filter(|&round| {
                // Sums of small integers are exact.
                let (x, y) = (round as f32, (round % 7 + thread) as f32);
                graph.set(a, &vec![x; len]);
                graph.set(b, &vec![y; len]);
                let status = (Ggml::get().graph_compute)(backend.0.0, cgraph);
                let expected = x + adds as f32 * y;
                status != abi::GGML_STATUS_SUCCESS || graph.get::<f32>(sum) != vec![expected; len]
            });
            done.send((thread, wrong.count())).expect("a test");
        })
    });
    for _ in &threads {
        let outcome = outcomes.recv_timeout(Duration::from_secs(120));
        let (thread, wrong) = outcome.expect("no thread hangs or panics");
        assert_eq!(wrong, 0, "of {ROUNDS} graphs of thread {thread}");
    }
    // The next test begins without them.
    for thread in threads {
        thread.join().expect("no panic");
    }
}

#[test]
fn decode_step_takes_at_most_one_round_trip_for_any_result_size() {
    let _lock = exclusive();
    let graph = Graph::new();
    let (a, b) = (
        graph.tensor(F32, [600_000, 1]),
        graph.tensor(F32, [600_000, 1]),
    );
    let sum = graph.add(a, b);
    let _buffer = graph.place();
    let backend = Backend::new();
    for _ in 0..20 {
        assert_eq!(backend.submit(&graph, sum), abi::GGML_STATUS_SUCCESS);
        assert_eq!(graph.get::<f32>(sum).len(), 600_000);
    }
    drop(backend); // writes the statistics
    let stats = std::fs::read(stats_path()).expect("VGPU_STATS names a file");
    let stats: serde_json::Value = serde_json::from_slice(&stats).expect("it is JSON");
    let steps = stats["steps"].as_array().expect("steps are a list");
    let counts = |name: &str| -> Vec<u64> {
        let last = &steps[steps.len() - 19..]; // the first step also sends the graph
        last.iter()
            .map(|step| step[name].as_u64().expect("a count"))
            .collect()
    };
    // None if the result arrived before the read.
    assert!(counts("round_trips").iter().all(|&n| n <= 1), "{stats}");
    // The result is copied from memory that both sides have mapped, or comes with a message.
    let (sent, copied) = (counts("bytes_from_host"), counts("copied_from_host"));
    let all = sent.iter().zip(&copied).map(|(sent, copied)| sent + copied);
    assert!(all.into_iter().all(|n| n >= 2_400_000), "{stats}");
    assert!(
        counts("bytes_to_host").iter().all(|&n| n < 100),
        "only the request to run the graph: {stats}"
    );
}

#[test]
fn an_index_out_of_range_fails_one_graph_and_poisons_its_result() {
    let _lock = exclusive();
    let graph = Graph::new();
    let (table, ids) = (graph.tensor(F32, [4, 5]), graph.tensor(I32, [2, 1]));
    let rows = graph.get_rows(table, ids);
    let _buffer = graph.place();
    graph.set(table, &(0..20).map(|i| i as f32).collect::<Vec<f32>>());
    let backend = Backend::new();

    graph.set(ids, &[1, 5]);
    assert_eq!(
        backend.compute(&graph, rows),
        abi::GGML_STATUS_SUCCESS,
        "the graph is on its way"
    );
    assert!(
        graph.get::<f32>(rows).iter().all(|x| x.is_nan()),
        "not-a-number is no result"
    );
    assert_eq!(
        backend.compute(&graph, rows),
        abi::GGML_STATUS_FAILED,
        "the failure is reported once"
    );

    graph.set(ids, &[4, 0]);
    assert_eq!(backend.compute(&graph, rows), abi::GGML_STATUS_SUCCESS);
    assert_eq!(
        graph.get::<f32>(rows),
        [16.0, 17.0, 18.0, 19.0, 0.0, 1.0, 2.0, 3.0]
    );
}

#[test]
fn a_callback_into_the_program_is_refused_by_name_and_not_called() {
    extern "C" fn callback(
        _: *mut ggml_tensor,
        _: *const ggml_tensor,
        _: c_int,
        _: c_int,
        _: *mut c_void,
    ) {
        std::process::abort(); // a panic cannot unwind out of this function
    }
    let _lock = exclusive();
    let (ggml, graph) = (Ggml::get(), Graph::new());
    let a = graph.tensor(F32, [8, 3]);
    let mapped = (ggml.map_custom1)(graph.0, a, callback, 1, ptr::null_mut());
    let sum = graph.add(a, a);
    let _buffer = graph.place();
    assert!((ggml.dev_supports_op)(ggml.device, sum));
    assert!(!(ggml.dev_supports_op)(ggml.device, mapped));
    let backend = Backend::new();
    assert_eq!(backend.compute(&graph, mapped), abi::GGML_STATUS_FAILED);
    graph.set(a, &[1.0f32; 24]);
    assert_eq!(backend.compute(&graph, sum), abi::GGML_STATUS_SUCCESS);
}

#[test]
fn a_node_with_an_unknown_flag_is_left_to_the_program() {
    let _lock = exclusive();
    let (ggml, graph) = (Ggml::get(), Graph::new());
    let a = graph.tensor(F32, [8, 3]);
    let sum = graph.add(a, a);
    let _buffer = graph.place();
    assert!((ggml.dev_supports_op)(ggml.device, sum));
    // SAFETY: a tensor of the graph, which nothing else uses now.
    unsafe { (*sum).flags |= 2 * abi::GGML_TENSOR_FLAG_COMPUTE as i32 };
    assert!(!(ggml.dev_supports_op)(ggml.device, sum));
}

#[test]
fn a_loaded_model_has_one_log_line_and_other_writes_have_none() {
    static LINES: Mutex<Vec<(c_int, String)>> = Mutex::new(Vec::new());
    extern "C" fn log(level: c_int, line: *const c_char, _: *mut c_void) {
        let mut lines = lock(&LINES);
        lines.push((level, text(line)));
    }
    let _lock = exclusive();
    let ggml = Ggml::get();
    let taken = || {
        let lines = std::mem::take(&mut *lock(&LINES));
        let of_info = |(level, _): &(c_int, String)| *level == abi::GGML_LOG_LEVEL_INFO as c_int;
        let of_info = lines.into_iter().filter(of_info);
        of_info.map(|(_, line)| line).collect::<Vec<_>>()
    };
    let backend = Backend::new();
    let lines = |usage, rows: i64| {
        // A model in two buffers of `rows` times 4 MiB. Some programs have buffers of this size
        // that hold no model.
        let parts = [Graph::new(), Graph::new()];
        let tensors = { parts.each_ref() }.map(|part| part.tensor(F32, [1 << 20, rows]));
        let buffers = parts.each_ref().map(Graph::place);
        let graph = Graph::new();
        let a = graph.tensor(F32, [8, 3]);
        let sum = graph.add(a, a);
        let _buffer = graph.place();
        graph.set(a, &[1.0f32; 24]);
        (ggml.log_set)(Some(log), ptr::null_mut());
        let half = vec![0.5f32; (rows as usize) << 19];
        for (buffer, tensor) in buffers.iter().zip(tensors) {
            (ggml.buffer_set_usage)(buffer.0, usage);
            let bytes = size_of_val(half.as_slice());
            for offset in [0, bytes] {
                (ggml.tensor_set)(tensor, half.as_ptr().cast(), offset, bytes);
            }
        }
        let while_loading = taken();
        for _ in 0..2 {
            assert_eq!(backend.compute(&graph, sum), abi::GGML_STATUS_SUCCESS);
        }
        (ggml.log_set)(None, ptr::null_mut());
        (while_loading, taken())
    };
    let none = Vec::<String>::new();
    for (rows, mib) in [(20, 160), (3, 24)] {
        let other = lines(abi::GGML_BACKEND_BUFFER_USAGE_ANY, rows);
        assert_eq!(other, (none.clone(), none.clone()));
        let usage = abi::GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
        let (while_loading, with_graphs) = lines(usage, rows);
        assert_eq!(while_loading, none);
        let [line] = with_graphs.as_slice() else {
            panic!("{with_graphs:?}");
        };
        let start = format!("VGPU0: model of {mib} MiB in 2 buffers loaded in");
        assert!(line.contains(&start), "{line}");
    }
}

#[test]
fn asynchronous_writes_and_reads_are_done_after_a_synchronisation() {
    let _lock = exclusive();
    let ggml = Ggml::get();
    let graph = Graph::new();
    let (a, b) = (
        graph.tensor(F32, [300_000, 1]),
        graph.tensor(F32, [300_000, 1]),
    );
    let sum = graph.add(a, b);
    let _buffer = graph.place();
    let backend = Backend::new();
    graph.set(b, &vec![1.0f32; 300_000]);
    // First in a host buffer, large enough to be sent without a copy. Then in ordinary memory.
    let host = HostBuffer::new(2 * 1_200_000);
    let mut own = vec![0f32; 600_000];
    for memory in [host.floats(), &mut own[..]] {
        let (input, output) = memory.split_at_mut(300_000);
        for round in 0..5 {
            let expected: Vec<f32> = (0..300_000).map(|i| (i + round + 1) as f32).collect();
            for (i, x) in input.iter_mut().enumerate() {
                *x = (i + round) as f32;
            }
            output.fill(-1.0);
            (ggml.tensor_set_async)(backend.0, a, input.as_ptr().cast(), 0, 1_200_000);
            assert_eq!(backend.submit(&graph, sum), abi::GGML_STATUS_SUCCESS);
            (ggml.tensor_get_async)(backend.0, sum, output.as_mut_ptr().cast(), 0, 1_200_000);
            // The read comes before this in the backend, and must not see it.
            // SAFETY: a placed tensor.
            unsafe { (ggml.tensor_memset)(sum, 0xff, 0, 1_200_000) };
            (ggml.synchronize)(backend.0);
            assert!(output == expected, "round {round}");
        }
    }
}

#[test]
fn parts_of_a_tensor_are_written_and_read_in_one_call() {
    let _lock = exclusive();
    let ggml = Ggml::get();
    let graph = Graph::new();
    let a = graph.tensor(I32, [6, 4]);
    let _buffer = graph.place();
    let backend = Backend::new();
    let data: Vec<i32> = (0..12).collect();
    let mut back = vec![0i32; 12];
    // Columns 1 to 3 of each row, from and to rows of three.
    let (from, to) = (data.as_ptr().cast(), back.as_mut_ptr().cast());
    let expected = |i: i32| {
        if (1..4).contains(&(i % 6)) {
            3 * (i / 6) + i % 6 - 1
        } else {
            0
        }
    };
    (ggml.tensor_set_2d_async)(backend.0, a, from, 4, 12, 4, 24, 12);
    (ggml.synchronize)(backend.0);
    assert_eq!(
        graph.get::<i32>(a),
        (0..24).map(expected).collect::<Vec<_>>()
    );
    (ggml.tensor_get_2d_async)(backend.0, a, to, 4, 12, 4, 24, 12);
    (ggml.synchronize)(backend.0);
    assert_eq!(back, data);

    let twice: Vec<i32> = data.iter().map(|x| 2 * x).collect();
    (ggml.tensor_set_2d)(a, twice.as_ptr().cast(), 4, 12, 4, 24, 12);
    (ggml.tensor_get_2d)(a, to, 4, 12, 4, 24, 12);
    assert_eq!(back, twice);
}

#[test]
fn events_and_asynchronous_copies_keep_the_order_of_backends() {
    let _lock = exclusive();
    let ggml = Ggml::get();
    let graph = Graph::new();
    let (a, b) = (graph.tensor(F32, [1000, 1]), graph.tensor(F32, [1000, 1]));
    let (sum, copy) = (graph.add(a, b), graph.tensor(F32, [1000, 1]));
    let _buffer = graph.place();
    graph.set(a, &[1.0f32; 1000]);
    graph.set(b, &[2.0f32; 1000]);
    let (first, second) = (Backend::new(), Backend::new());
    let event = (ggml.event_new)(ggml.device);
    assert!(!event.is_null());
    (ggml.event_synchronize)(event); // an event that was never recorded has passed
    assert_eq!(first.submit(&graph, sum), abi::GGML_STATUS_SUCCESS);
    (ggml.event_record)(event, first.0);
    (ggml.event_wait)(second.0, event);
    (ggml.tensor_copy_async)(first.0, second.0, sum, copy);
    (ggml.event_record)(event, second.0);
    (ggml.event_synchronize)(event);
    assert_eq!(graph.get::<f32>(copy), [3.0; 1000]);
    (ggml.event_free)(event);
}

#[test]
fn a_failed_graph_poisons_asynchronous_reads() {
    let _lock = exclusive();
    let ggml = Ggml::get();
    let graph = Graph::new();
    let (table, ids) = (graph.tensor(F32, [4, 5]), graph.tensor(I32, [2, 1]));
    let rows = graph.get_rows(table, ids);
    let _buffer = graph.place();
    let backend = Backend::new();
    graph.set(ids, &[1, 5]);
    let host = HostBuffer::new(32);
    host.floats().fill(1.0);
    assert_eq!(backend.submit(&graph, rows), abi::GGML_STATUS_SUCCESS);
    (ggml.tensor_get_async)(backend.0, rows, host.floats().as_mut_ptr().cast(), 0, 32);
    (ggml.synchronize)(backend.0);
    assert!(host.floats().iter().all(|x| x.is_nan()));
    assert_eq!(backend.submit(&graph, rows), abi::GGML_STATUS_FAILED);
}

#[test]
fn host_buffers_are_in_the_memory_of_the_program() {
    let _lock = exclusive();
    let ggml = Ggml::get();
    let buft = (ggml.dev_host_buffer_type)(ggml.device);
    assert_eq!(text((ggml.buft_name)(buft)), "VGPU0_Host");
    assert!((ggml.buft_is_host)(buft) && !(ggml.buft_is_host)((ggml.dev_buffer_type)(ggml.device)));
    let graph = Graph::new();
    let a = graph.tensor(I32, [1000, 1]);
    let buffer = Buffer((ggml.alloc_ctx_tensors)(graph.0, buft));
    let values: Vec<i32> = (0..1000).collect();
    graph.set(a, &values);
    // SAFETY: a placed tensor in memory of this process.
    let seen = unsafe { std::slice::from_raw_parts((*a).data.cast::<i32>(), 1000) };
    assert_eq!(seen, values);
    assert_eq!(graph.get::<i32>(a), values);
    drop(buffer);
    // More than the link can stage, and nothing: both are buffers.
    for size in [
        0,
        1,
        100 << 20,
        12 << 20,
        12 << 20,
        12 << 20,
        12 << 20,
        12 << 20,
    ] {
        let buffer = HostBuffer::new(size);
        assert!(buffer.0.base().is_multiple_of(64));
    }
    let many: Vec<HostBuffer> = (0..8).map(|_| HostBuffer::new(12 << 20)).collect();
    let backend = Backend::new();
    let graph = Graph::new();
    let b = graph.tensor(I32, [3 << 20, 1]);
    let _buffer = graph.place();
    for (i, buffer) in many.iter().enumerate() {
        buffer.floats().fill(i as f32);
        let data = buffer.floats().as_ptr().cast();
        (ggml.tensor_set_async)(backend.0, b, data, 0, 12 << 20);
        (ggml.synchronize)(backend.0);
        assert!(graph.get::<f32>(b).iter().all(|&x| x == i as f32));
    }
}
