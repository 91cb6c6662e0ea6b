//! The end of a process in which a driver hangs while the dynamic linker loads it. The linker's
//! lock is never released, and glibc takes that lock where a thread begins, and where a thread
//! first uses a thread-local variable with a destructor.

use std::ffi::{CString, c_int};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tracing::Level;
use vgpu_executor::{end_with_last_log, log_queue};

/// The folder of the test, for the process that hangs.
const FOLDER: &str = "VGPU_TEST_HANGING_LINKER";

const DRIVER: &str = "#include <fcntl.h>\n#include <stdlib.h>\n#include <unistd.h>\n\
    __attribute__((constructor)) static void hang(void) {\n\
    creat(getenv(\"HANG_MARK\"), 0600);\n\
    for (;;) pause(); }\n";

/// The status of an end as the test wants it.
const STATUS: c_int = 3;

/// Time after which the end hangs, too.
const HANG: Duration = Duration::from_secs(60);

const PAUSE: Duration = Duration::from_millis(1);

/// 1: the thread that ends the process has begun. 2: it is to do so.
static STEP: AtomicU32 = AtomicU32::new(0);

fn wait_for_step(step: u32) {
    while STEP.load(Ordering::Acquire) < step {
        thread::sleep(PAUSE);
    }
}

/// Loads the driver, and ends the process from a thread that has used nothing before.
fn hang(folder: &Path) -> ! {
    log_queue::start().expect("a thread");
    thread::spawn(|| {
        STEP.store(1, Ordering::Release);
        wait_for_step(2);
        end_with_last_log(STATUS, Level::ERROR, "the last line");
    });
    wait_for_step(1);
    let file = folder.join("hang.so");
    let file = CString::new(file.as_os_str().as_bytes()).expect("a path");
    thread::spawn(move || {
        // SAFETY: the argument is a terminated string. The constructor of the library hangs.
        unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) }.is_null()
    });
    while !folder.join("mark").exists() {
        thread::sleep(PAUSE);
    }
    STEP.store(2, Ordering::Release);
    loop {
        thread::sleep(HANG);
    }
}

#[test]
fn last_line_and_end_of_a_process_do_not_wait_for_the_dynamic_linker() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        hang(&PathBuf::from(folder));
    }
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("hang.c"), DRIVER).expect("a file");
    let mut compiler = Command::new("cc");
    let compiled = compiler
        .args(["-shared", "-fPIC", "-o"])
        .args([at("hang.so"), at("hang.c")]);
    assert!(compiled.status().expect("a compiler").success());
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--nocapture", "--exact"])
        .arg("last_line_and_end_of_a_process_do_not_wait_for_the_dynamic_linker")
        .env(FOLDER, folder.path())
        .env("HANG_MARK", at("mark"))
        .stdin(Stdio::null())
        .stderr(std::fs::File::create(at("log")).expect("a file"))
        .spawn()
        .expect("this program");
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
        if start.elapsed() > HANG {
            child.kill().expect("a child");
            panic!("the process does not end");
        }
        thread::sleep(Duration::from_millis(10));
    };
    let log = std::fs::read_to_string(at("log")).expect("a log");
    assert_eq!(status.code(), Some(STATUS), "{log}");
    assert!(log.contains("ERROR the last line\n"), "{log}");
}
