//! Working memory of an engine, which all tenants use one after the other: what one tenant has
//! computed with reaches no result of another.

mod common;
#[path = "common/operations.rs"]
mod operations;
#[path = "../../host-kernels/shim/device.rs"]
#[allow(dead_code)] // the tests of the kernels use more of the module
mod shim;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use common::{Build, Guest, Host, MEMORY};
use operations::{Operation, every_operator, of_types};
use shim::{Fault, Shim};
use vgpu_cpu::CpuEngine;
use vgpu_cuda::CudaEngine;
use vgpu_cuda::device::Device;
use vgpu_gguf::Rng;
use vgpu_transport::ir::{BufferId, Op, Shape, Type};
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD};

const GRAPH: GraphId = GraphId(1);

/// What the inputs of a tenant contain.
#[derive(Clone, Copy)]
enum Content {
    /// The same number everywhere, and the first row or expert of each table.
    Marker,
    /// Random numbers, and ids of the first two.
    Random(u64),
    /// Random numbers, and each id once: several threads that write one row have no certain result.
    Distinct(u64),
}

impl Content {
    fn bytes(self, shape: &Shape) -> Vec<u8> {
        const MARKER: f32 = 300.0;
        let len = shape.byte_len().expect("a small shape") as usize;
        let mut random = match self {
            Content::Marker => None,
            Content::Random(seed) | Content::Distinct(seed) => Some(Rng::new(seed, 0)),
        };
        let mut ids = 0u32..;
        let mut word = || match (shape.ty, &mut random) {
            (Type::I32, None) => [0; 4],
            (Type::I32, Some(_)) if matches!(self, Content::Distinct(_)) => {
                ids.next().unwrap_or_default().to_le_bytes()
            }
            (Type::I32, Some(random)) => (random.below(2) as u32).to_le_bytes(),
            (_, None) => MARKER.to_le_bytes(),
            (Type::F32, Some(random)) => (0.5 + random.below(1000) as f32 / 1e3).to_le_bytes(),
            // Half floats, also as factors of blocks, are below 1.
            (_, Some(random)) => (random.next_u64() as u32 & 0x3b3b_3b3b).to_le_bytes(),
        };
        let mut bytes: Vec<u8> = (0..len.div_ceil(4)).flat_map(|_| word()).collect();
        bytes.truncate(len);
        bytes
    }
}

/// Runs the operation in a session of this guest, and calls `before` when all is ready for it.
/// Returns all bytes of its result.
fn run(
    guest: &mut Guest,
    operation: &Operation,
    content: Content,
    before: impl FnOnce(),
) -> Vec<u8> {
    let alloc = |guest: &mut Guest, shape: &Shape| -> BufferId {
        let len = shape.byte_len().expect("a small shape");
        guest.alloc(len.max(4))
    };
    let write = |guest: &mut Guest, buffer, shape: &Shape| {
        for (i, part) in content.bytes(shape).chunks(MAX_PAYLOAD).enumerate() {
            guest.write(buffer, (i * MAX_PAYLOAD) as u64, part);
        }
    };
    let mut build = Build::default();
    let result = alloc(guest, &operation.dst);
    let dst = build.place(operation.dst, result, 0);
    let mut src = Vec::new();
    for (i, shape) in operation.src.iter().enumerate() {
        if operation.is_in_place && i == 0 {
            write(guest, result, shape);
            src.push(dst);
            continue;
        }
        let buffer = alloc(guest, shape);
        write(guest, buffer, shape);
        src.push(build.place(*shape, buffer, 0));
    }
    build.node(operation.op, dst, &src);
    guest.graph(GRAPH, &build.0);
    guest.fence();
    before();
    guest.submit(GRAPH);
    guest.fence();
    let len = operation.dst.byte_len().expect("a small shape");
    let parts = (0..len).step_by(MAX_PAYLOAD);
    parts
        .flat_map(|offset| guest.read(result, offset, (len - offset).min(MAX_PAYLOAD as u64)))
        .collect()
}

/// Compares the results of a tenant alone and after another one. Returns whether the operation
/// depends on its inputs.
fn check(operation: &Operation, content: Content) -> bool {
    // One thread, so that all tenants use the same memory.
    let host = || {
        let engine = CpuEngine::new(1, Some(MEMORY)).expect("a thread and 64 MiB");
        Host::new(Arc::new(engine))
    };
    let alone = run(&mut host().guest_of(2), operation, content, || {});
    let shared = host();
    let marked = run(&mut shared.guest_of(1), operation, Content::Marker, || {});
    let after = run(&mut shared.guest_of(2), operation, content, || {});
    assert!(
        after == alone,
        "{} has another result after that of another tenant",
        operation.name
    );
    marked != alone
}

/// Checks all operations. Returns of how many `check` says yes.
fn count(check: impl Fn(&Operation, Content) -> bool + Sync) -> usize {
    let operations: Vec<Operation> = every_operator().into_iter().chain(of_types()).collect();
    let next = AtomicUsize::new(0);
    // Most of the time a thread waits for a host that ends.
    let counts = thread::scope(|scope| {
        let check_all = || {
            let taken = std::iter::from_fn(|| {
                let index = next.fetch_add(1, Ordering::Relaxed);
                Some((index as u64, operations.get(index)?))
            });
            taken
                .filter(|(seed, operation)| check(operation, Content::Random(*seed)))
                .count()
        };
        let threads = [(); 16].map(|()| scope.spawn(check_all));
        threads.map(|thread| thread.join().expect("no failure"))
    });
    counts.iter().sum()
}

#[test]
fn results_do_not_depend_on_what_another_tenant_has_computed() {
    let depend = count(check);
    assert!(depend > 100, "only {depend} results depend on the inputs");
}

/// What working memory of the CUDA engine is filled with. As a number of 32 or 16 bits the first
/// one is none, which each computation with it shows.
const POISONS: [u32; 2] = [0x7fc0_dead, 0x4996_b438];

/// A host with the CUDA engine, whose kernels run on the CPU.
fn cuda(faults: &[(&'static str, Fault)]) -> (Arc<Shim>, Host) {
    let mut device = Shim::default();
    device.faults = faults.to_vec();
    let device = Arc::new(device);
    let engine = CudaEngine::new(Arc::clone(&device) as Arc<dyn Device>);
    (device, Host::new(Arc::new(engine.expect("an engine"))))
}

/// Fills the working memory that one tenant leaves to the next. Returns whether the operation has
/// some, or how its result shows what was there.
fn check_poisoned(
    operation: &Operation,
    content: Content,
    faults: &[(&'static str, Fault)],
) -> Result<bool, String> {
    let content = match (content, operation.op) {
        (Content::Random(seed), Op::SetRows {}) => Content::Distinct(seed),
        _ => content,
    };
    let mut has_some = false;
    let clean = || {
        let (device, host) = cuda(faults);
        let fill = || _ = device.fill_working_memory(0);
        run(&mut host.guest_of(2), operation, content, fill)
    };
    let zeros = clean();
    let (device, host) = cuda(faults);
    let mut first = host.guest_of(1);
    run(&mut first, operation, Content::Marker, || {});
    // The plan of the first tenant still has the same memory.
    for poison in POISONS {
        let fill = || has_some |= device.fill_working_memory(poison) > 0;
        let after = run(&mut host.guest_of(2), operation, content, fill);
        let name = &operation.name;
        if after != zeros {
            assert!(clean() == zeros, "{name} has no certain result");
            return Err(format!("{name} has another result after {poison:#x}"));
        }
        let word = poison.to_le_bytes();
        if after.chunks(4).any(|part| part == word) {
            return Err(format!("the result of {name} has {poison:#x}"));
        }
    }
    Ok(has_some)
}

/// The same on the CUDA engine, with working memory that is filled with numbers that no kernel
/// writes.
#[test]
fn results_on_cuda_have_nothing_of_another_tenants_working_memory() {
    let uses = count(|operation, content| {
        check_poisoned(operation, content, &[]).unwrap_or_else(|shown| panic!("{shown}"))
    });
    println!("{uses} operations have working memory");
    assert!(uses > 15, "only {uses} operations have working memory");
}

/// The test above sees kernels that compute with working memory that nobody has written.
#[test]
fn working_memory_that_nobody_has_written_is_seen_on_cuda() {
    let faults = [("vg_quantize_q8", Fault::NoResults)];
    let operations = of_types();
    let products = operations
        .iter()
        .filter(|operation| operation.name.starts_with("MUL_MAT of Q"));
    let mut seen = 0;
    for operation in products {
        let shown = check_poisoned(operation, Content::Random(1), &faults);
        println!("{shown:?}");
        seen += usize::from(shown.is_err());
    }
    assert!(seen > 1, "{seen} products show what was in working memory");
}
