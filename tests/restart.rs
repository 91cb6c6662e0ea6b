//! A program whose executor ends and comes back, in every state that an executor passes through.
//!
//! One test, because the plugin and the environment belong to a process.

mod common;
#[path = "common/ggml.rs"]
mod ggml;

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ggml::Ggml;
use vgpu_cpu::CpuEngine;
use vgpu_executor::{Limits, Session, StopFlag};
use vgpu_transport::link::unix::{ListenOptions, Listener};

/// How often a thread looks at its flag.
const POLL_PERIOD: Duration = Duration::from_millis(10);

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

    fn end(self) {
        self.stop.set();
        self.thread.join().expect("no panic");
    }
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
}
