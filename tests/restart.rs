//! A program whose executor ends and comes back, in every state that an executor passes through.
//!
//! One test, because the plugin and the environment belong to a process.

mod common;
#[path = "common/ggml.rs"]
mod ggml;
#[path = "common/scripted_host.rs"]
mod scripted_host;

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use ggml::Ggml;
use scripted_host::POLL_PERIOD;
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine as _;
use vgpu_executor::{Limits, Session, StopFlag};
use vgpu_transport::link::HostEnd;
use vgpu_transport::link::unix::{ListenOptions, Listener};
use vgpu_transport::wire::{
    DeviceCount, HostVersions, Offer, ProtocolVersion, Reply, Request, VersionRange,
};

/// A process that listens on a socket, as a thread of this process.
struct Host {
    stop: StopFlag,
    thread: JoinHandle<()>,
}

impl Host {
    fn start(path: &Path, serve: impl FnOnce(Listener, &StopFlag) + Send + 'static) -> Host {
        let listener = Listener::bind(path, ListenOptions::default()).expect("a free path");
        let stop = StopFlag::new();
        let asked = stop.clone();
        let thread = thread::spawn(move || serve(listener, &asked));
        Host { stop, thread }
    }

    /// An executor, which serves one guest after the other.
    fn executor(path: &Path) -> Host {
        let engine = Arc::new(CpuEngine::new(1, Some(64 << 20)).expect("a CPU engine"));
        Host::start(path, move |listener, stop| {
            while !stop.is_set() {
                let arrival = listener.accept(POLL_PERIOD).expect("a socket");
                let Some(arrival) = arrival else { continue };
                let mut host = arrival.handshake().expect("a guest");
                Session::new(1, engine.clone(), Limits::default()).run(&mut host, stop);
            }
        })
    }

    /// A process that listens and accepts nobody.
    fn accepts_nobody(path: &Path) -> Host {
        Host::start(path, |listener, stop| {
            while !stop.is_set() {
                thread::sleep(POLL_PERIOD);
            }
            drop(listener);
        })
    }

    /// An executor that opens links and answers no request.
    fn answers_nothing(path: &Path) -> Host {
        Host::start(path, |listener, stop| {
            let mut open = Vec::new();
            while !stop.is_set() {
                let arrival = listener.accept(POLL_PERIOD).expect("a socket");
                open.extend(arrival.map(|arrival| arrival.handshake().expect("a guest")));
            }
        })
    }

    /// An executor that speaks version 3 of the protocol only.
    fn speaks_version_3(path: &Path) -> Host {
        Host::start(path, |listener, stop| {
            while !stop.is_set() {
                let arrival = listener.accept(POLL_PERIOD).expect("a socket");
                let Some(arrival) = arrival else { continue };
                serve_version_3(&mut arrival.handshake().expect("a guest"), stop);
            }
        })
    }

    fn end(self) {
        self.stop.set();
        self.thread.join().expect("no panic");
    }
}

/// Answers a guest as an executor of version 3 does, which compares the first word of HELLO with 3.
fn serve_version_3(host: &mut dyn HostEnd, stop: &StopFlag) {
    let version = ProtocolVersion::V3;
    let engine = CpuEngine::new(1, Some(64 << 20)).expect("a CPU engine");
    scripted_host::serve(host, version, stop, |request, asked| {
        Some(match asked {
            Request::Hello { offer, .. } if offer == Offer::only(version) => Reply::Welcome {
                protocol: version,
                served: HostVersions(VersionRange::only(version)),
                session: 1,
                engine: engine.name().to_owned(),
                description: engine.description().to_owned(),
                memory_total: 64 << 20,
                memory_free: 64 << 20,
                capabilities: engine.capabilities().clone(),
                devices: DeviceCount(1),
            },
            Request::Hello { offer, .. } => Reply::Ended {
                reason: format!(
                    "the guest broke the protocol: the guest speaks protocol version {}, this \
                     host speaks 3: update the older of the two",
                    offer.versions.newest()
                ),
            },
            Request::Memory {} => Reply::Memory {
                request,
                total: 64 << 20,
                free: 64 << 20,
            },
            Request::Alloc { .. } => Reply::Done { request },
            Request::Free { .. } => return None,
            other => panic!("{other:?}"),
        })
    });
}

/// The log of ggml.
static LOG: Mutex<String> = Mutex::new(String::new());

extern "C" fn keep_line(_: c_int, line: *const c_char, _: *mut c_void) {
    LOG.lock().expect("no panic").push_str(&ggml::text(line));
}

fn loads() -> bool {
    Ggml::get().alloc(1 << 20).is_some()
}

/// The plugin finds the executor at the first request after it listens, whatever came before: a
/// socket that nobody listens on, one whose owner accepts nobody (an attempt takes 2 s), and an
/// executor that hangs (attempts are brief by then).
#[test]
fn the_next_load_works_as_soon_as_the_executor_listens() {
    let folder = tempfile::tempdir().expect("a new folder");
    let path = folder.path().join("vgpu.sock");
    // SAFETY: no other thread reads the environment meanwhile.
    unsafe { std::env::set_var("VGPU_ENDPOINT", format!("unix:{}", path.display())) };
    let first = Host::executor(&path);
    (Ggml::get().log_set)(Some(keep_line), std::ptr::null_mut());
    assert!(loads());
    first.end();
    let fails = |reason: &str| {
        LOG.lock().expect("no panic").clear();
        assert!(!loads(), "{reason}");
        let log = LOG.lock().expect("no panic");
        assert!(log.contains(reason), "{reason}: {log}");
    };
    let works = || {
        let executor = Host::executor(&path);
        assert!(loads(), "{}", LOG.lock().expect("no panic"));
        executor.end();
    };

    fails("no such socket");
    works();

    let hanging = Host::accepts_nobody(&path);
    fails("no answer within 2000 ms");
    hanging.end();
    works();

    let hanging = Host::accepts_nobody(&path);
    fails("no answer within 2000 ms");
    hanging.end();
    let hanging = Host::answers_nothing(&path);
    fails("has accepted the connection and has not answered for");
    hanging.end();
    works();

    // An executor of the previous version of the protocol refuses the newer HELLO, and is asked a
    // second time.
    let previous = Host::speaks_version_3(&path);
    LOG.lock().expect("no panic").clear();
    assert!(loads(), "{}", LOG.lock().expect("no panic"));
    let log = LOG.lock().expect("no panic").clone();
    let says = "the executor speaks version 3 of the protocol only";
    assert!(log.contains(says), "{log}");
    previous.end();
    works();
}
