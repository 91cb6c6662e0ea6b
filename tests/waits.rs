//! A program whose executor lives and does not answer: what the plugin tells people.
//!
//! One test, because the plugin and the environment belong to a process.

mod common;
#[path = "common/ggml.rs"]
mod ggml;
#[path = "common/scripted_host.rs"]
mod scripted_host;

use std::ffi::{c_char, c_int, c_void};
use std::fs;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use ggml::Ggml;
use scripted_host::POLL_PERIOD;
use vgpu_executor::StopFlag;
use vgpu_transport::ir::Capabilities;
use vgpu_transport::link::HostEnd;
use vgpu_transport::link::unix::{ListenOptions, Listener};
use vgpu_transport::wire::{
    DeviceCount, HostVersions, ProtocolVersion, Reply, Request, VersionRange,
};

/// A wait of 10 s is long (docs/environment.md), and a busy machine is slow.
const LONG: Duration = Duration::from_secs(60);

/// Opens a session for a guest, and never answers its first allocation.
fn answer_hello_only(host: &mut dyn HostEnd, stop: &StopFlag) {
    const MEMORY: u64 = 64 << 20;
    let version = ProtocolVersion::CURRENT;
    scripted_host::serve(host, version, stop, |request, asked| match asked {
        Request::Hello { .. } => Some(Reply::Welcome {
            protocol: version,
            session: 7,
            engine: "cpu".to_owned(),
            description: String::new(),
            capabilities: Capabilities::default(),
            served: HostVersions(VersionRange::SERVED),
            devices: DeviceCount(1),
            memory_total: MEMORY,
            memory_free: MEMORY,
        }),
        Request::Memory {} => Some(Reply::Memory {
            request,
            total: MEMORY,
            free: MEMORY,
        }),
        Request::Alloc { .. } => None,
        other => panic!("{other:?}"),
    });
}

/// The log of ggml.
static LOG: Mutex<String> = Mutex::new(String::new());

extern "C" fn keep_line(_: c_int, line: *const c_char, _: *mut c_void) {
    LOG.lock().expect("no panic").push_str(&ggml::text(line));
}

fn log() -> String {
    LOG.lock().expect("no panic").clone()
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LONG, "{what}: {}", log());
        thread::sleep(POLL_PERIOD);
    }
}

#[test]
fn a_long_wait_is_in_the_log_and_in_the_file_that_vgpu_dump_names() {
    let folder = tempfile::tempdir().expect("a new folder");
    let path = folder.path().join("vgpu.sock");
    let dump = folder.path().join("dump");
    // SAFETY: no other thread reads the environment meanwhile.
    unsafe {
        std::env::set_var("VGPU_ENDPOINT", format!("unix:{}", path.display()));
        std::env::set_var("VGPU_DUMP", &dump);
    }
    let own = folder.path().join(format!("dump.{}", std::process::id()));
    let listener = Listener::bind(&path, ListenOptions::default()).expect("a free path");
    let stop = StopFlag::new();
    let asked = stop.clone();
    let host = thread::spawn(move || {
        while !asked.is_set() {
            let arrival = listener.accept(POLL_PERIOD).expect("a socket");
            let Some(arrival) = arrival else { continue };
            answer_hello_only(&mut arrival.handshake().expect("a guest"), &asked);
        }
    });
    (Ggml::get().log_set)(Some(keep_line), std::ptr::null_mut());
    let load = thread::spawn(|| Ggml::get().alloc(1 << 20).is_some());

    wait_for("a file about the wait", || own.exists());
    let waits = "session 7 with the executor (cpu): waits for the answer to request ";
    let text = || fs::read_to_string(&own).unwrap_or_default();
    wait_for("a line about the wait in the file", || {
        text().contains(waits)
    });
    assert!(text().contains("link: requests put "), "{}", text());
    wait_for("a line about the wait in the log", || {
        log().contains("the executor is alive and has not answered for ")
    });

    // Somebody asks at another time.
    fs::remove_file(&own).expect("it is there");
    let request = folder
        .path()
        .join(format!("dump.{}.now", std::process::id()));
    fs::write(&request, "").expect("a file");
    wait_for("the answer to the request", || text().contains(waits));
    assert!(!request.exists(), "nobody has read it");

    stop.set();
    host.join().expect("no panic");
    assert!(!load.join().expect("no panic"), "{}", log());
}
