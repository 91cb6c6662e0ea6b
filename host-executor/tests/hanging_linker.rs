//! The end and the dumps of a process in which a driver hangs while the dynamic linker loads it.
//! The linker's lock is never released, and glibc takes that lock where a thread begins, and where
//! a thread first uses a thread-local variable with a destructor.

use std::ffi::{CString, c_int};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tracing::Level;
use vgpu_cpu::CpuEngine;
use vgpu_executor::added_guests::GuestAnswer;
use vgpu_executor::control::{self, Actions, ControlSocket, ReloadOutcome};
use vgpu_executor::{DumpThread, Limits, Server, end_with_last_log, log_queue};

/// The folder of the test, for the process that hangs.
const FOLDER: &str = "VGPU_TEST_HANGING_LINKER";

const DRIVER: &str = "#include <fcntl.h>\n#include <stdlib.h>\n#include <unistd.h>\n\
    __attribute__((constructor)) static void hang(void) {\n\
    creat(getenv(\"HANG_MARK\"), 0600);\n\
    for (;;) pause(); }\n";

/// The status of an end as the test wants it.
const STATUS: c_int = 3;

/// Time after which the end, or a dump, hangs, too.
const HANG: Duration = Duration::from_secs(60);

const PAUSE: Duration = Duration::from_millis(1);

/// 1: the thread that ends the process has begun. 2: it is to do so.
static STEP: AtomicU32 = AtomicU32::new(0);

fn wait_for_step(step: u32) {
    while STEP.load(Ordering::Acquire) < step {
        thread::sleep(PAUSE);
    }
}

/// Loads the driver on a thread of its own, and returns when the driver hangs.
fn load(folder: &Path) {
    let file = folder.join("hang.so");
    let file = CString::new(file.as_os_str().as_bytes()).expect("a path");
    thread::spawn(move || {
        // SAFETY: the argument is a terminated string. The constructor of the library hangs.
        unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) }.is_null()
    });
    while !folder.join("mark").exists() {
        thread::sleep(PAUSE);
    }
}

/// Ends the process from a thread that has used nothing before.
fn end(folder: &Path) -> ! {
    log_queue::start().expect("a thread");
    thread::spawn(|| {
        STEP.store(1, Ordering::Release);
        wait_for_step(2);
        end_with_last_log(STATUS, Level::ERROR, "the last line");
    });
    wait_for_step(1);
    load(folder);
    STEP.store(2, Ordering::Release);
    loop {
        thread::sleep(HANG);
    }
}

/// Serves a control socket, while the driver hangs. Writes a dump into the log when the folder has
/// the file `log-dump`.
fn answer(folder: &Path) -> ! {
    log_queue::start().expect("a thread");
    let dumps = DumpThread::start().expect("a thread");
    let (listener, file) = control::bind(&folder.join("control.sock")).expect("a socket");
    let socket = ControlSocket::start(listener, file, dumps.clone()).expect("a thread");
    let engine = Arc::new(CpuEngine::new(1, Some(1 << 20)).expect("an engine"));
    let server = Server::new(engine, Limits::default(), 4).expect("a thread");
    dumps.set_source(server.status_handle());
    let outcome = || ReloadOutcome {
        ok: true,
        message: String::new(),
    };
    let actions = Actions {
        reload: Box::new(outcome),
        perform: Box::new(move |_| outcome()),
        guests: Box::new(|_| GuestAnswer::Refused(String::new())),
    };
    socket.serve(server.status_handle(), actions);
    load(folder);
    std::fs::write(folder.join("ready"), "").expect("a file");
    while !folder.join("log-dump").exists() {
        thread::sleep(PAUSE);
    }
    dumps.write_into_log();
    loop {
        thread::sleep(HANG);
    }
}

/// A folder with the driver.
fn folder_with_driver() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("hang.c"), DRIVER).expect("a file");
    let mut compiler = Command::new("cc");
    let compiled = compiler
        .args(["-shared", "-fPIC", "-o"])
        .args([at("hang.so"), at("hang.c")]);
    assert!(compiled.status().expect("a compiler").success());
    folder
}

/// Runs this test in a process of its own, whose log is a file of the folder.
fn run(test: &str, folder: &Path) -> Killed {
    let log = std::fs::File::create(folder.join("log")).expect("a file");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--nocapture", "--exact", test]);
    command
        .env(FOLDER, folder)
        .env("HANG_MARK", folder.join("mark"));
    command.stdin(Stdio::null()).stderr(log);
    Killed(command.spawn().expect("this program"))
}

/// A process that does not outlive its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Both fail only if the process has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < HANG, "{what}: not within {HANG:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn last_line_and_end_of_a_process_do_not_wait_for_the_dynamic_linker() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        end(&PathBuf::from(folder));
    }
    let folder = folder_with_driver();
    let mut child = run(
        "last_line_and_end_of_a_process_do_not_wait_for_the_dynamic_linker",
        folder.path(),
    );
    let mut status = None;
    wait_until("the end of the process", || {
        status = child.0.try_wait().expect("a child");
        status.is_some()
    });
    let log = std::fs::read_to_string(folder.path().join("log")).expect("a log");
    let status = status.and_then(|status| status.code());
    assert_eq!(status, Some(STATUS), "{log}");
    assert!(log.contains("ERROR the last line\n"), "{log}");
}

/// Also while more commands wait than the executor carries out at once: the threads that are to
/// carry them out wait for the linker.
#[test]
fn dumps_do_not_wait_for_the_dynamic_linker() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        answer(&PathBuf::from(folder));
    }
    let folder = folder_with_driver();
    let child = run("dumps_do_not_wait_for_the_dynamic_linker", folder.path());
    let at = |name: &str| folder.path().join(name);
    wait_until("the driver hangs", || at("ready").exists());
    let control = at("control.sock");
    for _ in 0..20 {
        let control = control.clone();
        // Answered, late or refused: all are possible.
        thread::spawn(move || drop(control::status(&control)));
    }
    for _ in 0..3 {
        let dump = control::dump(&control).expect("a dump");
        assert!(dump.contains("engine cpu: "), "{dump}");
    }
    std::fs::write(at("log-dump"), "").expect("a file");
    let log = || std::fs::read_to_string(at("log")).expect("a log");
    wait_until("the dump is in the log", || {
        log().contains("INFO dump: engine cpu: ")
    });
    drop(child);
}
