//! Guests on a device with memory of its own, which runs the CUDA kernels on the CPU.

mod common;
#[path = "../../host-kernels/tests/common/shim.rs"]
mod shim;
#[path = "../../host-kernels/tests/cuda/spy.rs"]
#[allow(dead_code)] // the kernels' tests ask it for more
mod spy;

use std::sync::Arc;

use common::{Host, add, bytes, floats};
use spy::{Event, Fails, Spy};
use vgpu_kernels::cuda::CudaEngine;
use vgpu_kernels::cuda::device::Device;
use vgpu_transport::wire::{GraphId, Reply, Request};

const MIB: u64 = 1 << 20;
const GRAPH: GraphId = GraphId(7);

fn host_on(device: &Arc<Spy>) -> Host {
    let device: Arc<dyn Device> = Arc::clone(device) as Arc<dyn Device>;
    Host::new(Arc::new(CudaEngine::new(device).expect("an engine")))
}

#[test]
fn out_of_memory_is_an_error_to_that_guest_only() {
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    let (mut greedy, mut modest) = (host.guest(), host.guest());
    let a = modest.alloc_with(&bytes(&[1.0; 4]));
    let held = greedy.alloc(300 * MIB);
    let buffer = greedy.new_buffer();
    let size = 300 * MIB;
    let reply = greedy.ask(&Request::Alloc { buffer, size });
    let Reply::Refused { reason, .. } = reply else {
        panic!("{reply:?}")
    };
    assert!(reason.contains("memory"), "{reason}");
    // Its session goes on, and so does everybody else's.
    greedy.fence();
    modest.graph(GRAPH, &add(4, a, a, a));
    modest.submit(GRAPH);
    assert_eq!(floats(&modest.read(a, 0, 16)), [2.0; 4]);
    // What is given back is for others, and zero.
    greedy.send_with(
        &Request::Fill {
            buffer: held,
            offset: 0,
            len: 300 * MIB,
            value: 9,
        },
        &[],
    );
    greedy.send(&Request::Free { buffer: held });
    greedy.fence();
    let large = modest.alloc(300 * MIB);
    assert_eq!(modest.read(large, 100 * MIB, 64), [0; 64]);
}

#[test]
fn a_guest_that_reads_behind_its_graph_waits_once() {
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    let mut guest = host.guest();
    let a = guest.alloc_with(&bytes(&[1.0; 4]));
    guest.graph(GRAPH, &add(4, a, a, a));
    for _ in 0..3 {
        guest.submit(GRAPH);
        guest.read(a, 0, 16);
    }
    // Nobody can say here how soon the guest's next request is seen, so only what must not be is.
    device.take_whole_log();
    guest.write(a, 0, &bytes(&[3.0; 4]));
    guest.submit(GRAPH);
    assert_eq!(floats(&guest.read(a, 0, 16)), [6.0; 4]);
    let log = device.take_whole_log();
    let count = |of: fn(&Event) -> bool| log.iter().filter(|event| of(event)).count();
    assert_eq!(count(|event| *event == Event::Puts), 1, "{log:?}");
    assert_eq!(
        count(|event| matches!(event, Event::Launch(_))),
        1,
        "{log:?}"
    );
    assert_eq!(
        count(|event| matches!(event, Event::Download(_))),
        1,
        "{log:?}"
    );
    assert!(count(|event| *event == Event::Wait) <= 1, "{log:?}");
}

#[test]
fn a_device_that_is_lost_is_told_to_every_guest_that_had_memory_there() {
    let device = Arc::new(Spy::running());
    let host = host_on(&device);
    let (mut one, mut other) = (host.guest(), host.guest());
    let a = one.alloc_with(&bytes(&[1.0; 4]));
    let b = other.alloc_with(&bytes(&[1.0; 4]));
    one.graph(GRAPH, &add(4, a, a, a));
    one.fence();
    other.fence();
    device.fail(Fails::Launch(0));
    one.submit(GRAPH);
    let (reply, _) = one.receive();
    let Reply::Failed { reason, .. } = reply else {
        panic!("{reply:?}")
    };
    assert!(reason.contains("illegal memory access"), "{reason}");
    other.send(&Request::Fill {
        buffer: b,
        offset: 0,
        len: 1,
        value: 0,
    });
    let (reply, _) = other.receive();
    let Reply::Failed { reason, .. } = reply else {
        panic!("{reply:?}")
    };
    assert!(
        reason.contains("what was in its memory is lost"),
        "{reason}"
    );
}
