//! A program whose executor has several devices, and comes back with one.
//!
//! One test, because the plugin and the environment belong to a process. The executor is a thread
//! that answers HELLO, MEMORY and ALLOC.

mod common;
#[path = "common/ggml.rs"]
mod ggml;
#[path = "common/scripted_host.rs"]
mod scripted_host;

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use ggml::{Ggml, text};
use ggml_vgpu::abi;
use scripted_host::POLL_PERIOD;
use vgpu_executor::StopFlag;
use vgpu_transport::ir::Capabilities;
use vgpu_transport::link::HostEnd;
use vgpu_transport::link::unix::{ListenOptions, Listener};
use vgpu_transport::wire::{
    DeviceCount, DeviceIndex, HostVersions, ProtocolVersion, Reply, Request, VersionRange,
};

/// The requests that an executor has got, in their order: the device of the session, and HELLO or
/// the size of a buffer.
type Requests = Arc<Mutex<Vec<(u32, Option<u64>)>>>;

/// An executor with so many devices. Device `n` has `n + 1` GiB.
struct Host {
    stop: StopFlag,
    thread: JoinHandle<()>,
    requests: Requests,
}

impl Host {
    fn start(path: &Path, devices: u32) -> Host {
        let listener = Listener::bind(path, ListenOptions::default()).expect("a free path");
        let stop = StopFlag::new();
        let requests = Requests::default();
        let (asked, seen) = (stop.clone(), Arc::clone(&requests));
        let thread = thread::spawn(move || {
            let mut sessions = Vec::new();
            while !asked.is_set() {
                let arrival = listener.accept(POLL_PERIOD).expect("a socket");
                let Some(arrival) = arrival else { continue };
                let (stop, seen) = (asked.clone(), Arc::clone(&seen));
                sessions.push(thread::spawn(move || {
                    let mut host = arrival.handshake().expect("a guest");
                    serve(&mut host, devices, &stop, &seen);
                }));
            }
            for session in sessions {
                session.join().expect("no panic");
            }
        });
        Host {
            stop,
            thread,
            requests,
        }
    }

    fn take_requests(&self) -> Vec<(u32, Option<u64>)> {
        std::mem::take(&mut *self.requests.lock().expect("no panic"))
    }

    fn end(self) {
        self.stop.set();
        self.thread.join().expect("no panic");
    }
}

fn serve(host: &mut dyn HostEnd, devices: u32, stop: &StopFlag, seen: &Requests) {
    let version = ProtocolVersion::CURRENT;
    let saw = |device, size| seen.lock().expect("no panic").push((device, size));
    let mut device = 0;
    scripted_host::serve(host, version, stop, |request, asked| {
        let total = |device: u32| u64::from(device + 1) << 30;
        Some(match asked {
            Request::Hello {
                device: DeviceIndex(asked),
                ..
            } => {
                saw(asked, None);
                device = asked;
                match asked < devices {
                    true => Reply::Welcome {
                        protocol: version,
                        served: HostVersions(VersionRange::SERVED),
                        session: u64::from(asked) + 1,
                        engine: format!("test:{asked}"),
                        description: format!("device {asked}"),
                        memory_total: total(asked),
                        memory_free: total(asked),
                        capabilities: Capabilities::default(),
                        devices: DeviceCount(devices),
                    },
                    false => Reply::Ended {
                        reason: format!("there is no device {asked}"),
                    },
                }
            }
            Request::Memory {} => Reply::Memory {
                request,
                total: total(device),
                free: 1 << 30,
            },
            Request::Alloc { size, .. } => {
                saw(device, Some(size));
                Reply::Done { request }
            }
            Request::Free { .. } => return None,
            other => panic!("{other:?}"),
        })
    });
}

/// The log of ggml.
static LOG: Mutex<String> = Mutex::new(String::new());

extern "C" fn keep_line(_: c_int, line: *const c_char, _: *mut c_void) {
    LOG.lock().expect("no panic").push_str(&text(line));
}

/// The name, the description and the memory in GiB of each device.
fn properties() -> Vec<(String, String, usize)> {
    let ggml = Ggml::get();
    let devices = ggml.devices.iter().map(|&device| {
        let mut props = MaybeUninit::<abi::ggml_backend_dev_props>::zeroed();
        // SAFETY: ggml fills the structure in, and returns strings that stay.
        let props = unsafe {
            (ggml.dev_get_props)(device, props.as_mut_ptr());
            props.assume_init()
        };
        (
            text(props.name),
            text(props.description),
            props.memory_total >> 30,
        )
    });
    devices.collect()
}

/// Whether an allocation on this device succeeds.
fn loads(device: usize, size: usize) -> bool {
    let ggml = Ggml::get();
    ggml.alloc_on(ggml.devices[device], size).is_some()
}

#[test]
fn devices_of_one_executor_are_found_and_connected_to_again() {
    let folder = tempfile::tempdir().expect("a new folder");
    let path = folder.path().join("vgpu.sock");
    // SAFETY: no other thread reads the environment meanwhile.
    unsafe { std::env::set_var("VGPU_ENDPOINT", format!("unix:{}", path.display())) };
    let first = Host::start(&path, 3);
    (Ggml::get().log_set)(Some(keep_line), std::ptr::null_mut());
    let expected =
        [0, 1, 2].map(|n: usize| (format!("VGPU{n}"), format!("vGPU (device {n})"), n + 1));
    assert_eq!(properties(), expected);
    for (device, size) in [(0, 4096), (1, 8192), (2, 12288)] {
        assert!(loads(device, size));
    }
    let hello = |device| (device, None);
    let sizes = [(0, Some(4096)), (1, Some(8192)), (2, Some(12288))];
    let mut seen = vec![hello(0), hello(1), hello(2)];
    seen.extend(sizes);
    assert_eq!(first.take_requests(), seen);
    first.end();

    // Each device finds its own again.
    let second = Host::start(&path, 3);
    assert!(loads(2, 4096) && loads(1, 4096));
    let seen = [hello(2), (2, Some(4096)), hello(1), (1, Some(4096))];
    assert_eq!(second.take_requests(), seen);
    second.end();

    // An executor with fewer devices says so, and the first device works.
    let third = Host::start(&path, 1);
    LOG.lock().expect("no panic").clear();
    assert!(!loads(1, 4096));
    let log = LOG.lock().expect("no panic").clone();
    for words in ["there is no device 1", "vgpu.sock, device 1:"] {
        assert!(log.contains(words), "{words:?} is not in {log}");
    }
    assert!(loads(0, 4096));
    third.end();
}
