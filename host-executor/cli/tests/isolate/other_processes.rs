//! What a process with a driver reaches of other processes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use vgpu_executor::sandbox;

use crate::changed_backend::{Changes, changed_backend};
use crate::common::compute;
use crate::ggml;
use crate::machine::Machine;
use crate::served::workers::guest;
use crate::served::{Scratch, Serve};

/// Set in the process that is to be out of reach.
const TARGET: &str = "VGPU_TEST_TARGET";

/// What the backend tries to open of the other process.
const WAYS: [&str; 6] = ["mem", "environ", "maps", "auxv", "fd/0", "cwd/."];

/// A process of this user without capabilities, which is dumpable: any process of the user without
/// capabilities may read its memory.
fn start_target() -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args([
            "--exact",
            "other_processes::no_driver_reaches_another_process",
        ])
        .args(["--nocapture", "--test-threads", "1"])
        .env(TARGET, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut target = command.spawn().expect("it starts");
    let output = BufReader::new(target.stdout.as_mut().expect("piped"));
    let mut lines = output.lines().map(|line| line.expect("text"));
    assert!(lines.any(|line| line.contains(TARGET)), "no target");
    target
}

/// The backend writes, for each of [`WAYS`], a line with the process that tries it, the number of
/// the way, and whether it is open.
fn code(target: u32, outcomes: &Path) -> String {
    let names = WAYS.map(|way| format!("\"/proc/{target}/{way}\""));
    format!(
        "const char * names[] = {{ {} }}; FILE * out = fopen(\"{}\", \"a\"); \
         for (size_t i = 0; i < sizeof names / sizeof *names; i++) {{ \
             FILE * file = fopen(names[i], \"r\"); \
             fprintf(out, \"%d %zu %d\\n\", getpid(), i, file != NULL); \
             if (file) fclose(file); \
         }} \
         fclose(out); return compute(backend, graph);",
        names.join(", "),
        outcomes.display()
    )
}

/// The processes of a program and of a virtual machine on a backend of ggml, which a guest has
/// taken over: the backend does what such a guest would. They open nothing of another process of
/// the user that is not hidden, and all of it without the sandbox.
#[test]
fn no_driver_reaches_another_process() {
    if std::env::var_os(TARGET).is_some() {
        sandbox::drop_current_capabilities().expect("capabilities");
        println!("\n{TARGET}");
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    // Linux 5.19.
    if !sandbox::landlock_version().is_ok_and(|version| version >= 2) {
        assert!(std::env::var_os("CI").is_none(), "no Landlock");
        println!("skipped: no Landlock");
        return;
    }
    let scratch = Scratch::new("isolate-others");
    let mut target = start_target();
    let outcomes = scratch.path().join("outcomes");
    let changes = Changes {
        end: &code(target.id(), &outcomes),
        ..Changes::default()
    };
    let library = changed_backend(&ggml::cached(""), scratch.path(), &changes);
    let engine = format!("--engine=ggml:{}", library.display());
    let machine_socket = scratch.path().join("vm1.sock");
    let vm = format!(
        "vm1,socket={},window=64M,silence=0",
        machine_socket.display()
    );
    let isolate = ["--isolate", "--guest-memory", "20M", &engine, "--vm", &vm];
    for is_sandboxed in [true, false] {
        let more = if is_sandboxed {
            &[][..]
        } else {
            &["--no-sandbox"]
        };
        let _ = fs::remove_file(&outcomes); // there is none at first
        let serve = Serve::start(&scratch.socket(), &[&isolate[..], more].concat());
        compute(&mut guest(&serve, &scratch).0);
        compute(&mut Machine::plug(&machine_socket).guest());
        serve.signal(Signal::TERM);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
        let text = fs::read_to_string(&outcomes).expect("what the backend has written");
        // The ways that are open to each process.
        let mut open: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for line in text.lines() {
            let (pid, rest) = line.split_once(' ').expect("three words");
            let open = open.entry(pid).or_default();
            open.extend(rest.strip_suffix(" 1"));
        }
        let open: Vec<usize> = open.into_values().map(|ways| ways.len()).collect();
        let is_domain = log
            .matches("files: all of the user, for the driver; no memory")
            .count();
        let expected = match is_sandboxed {
            true => (vec![0, 0], 2),
            false => (vec![WAYS.len(); 2], 0),
        };
        assert_eq!((open, is_domain), expected, "{text}{log}");
    }
    drop(target.stdin.take());
    let _ = target.wait();
}
