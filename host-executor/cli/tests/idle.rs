//! What a real `vgpu serve` without guests costs.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use served::{Scratch, Serve};

/// How often each thread has waited so far, by its number, and its name.
fn waits(pid: u32) -> BTreeMap<String, (String, u64)> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs");
    let tasks = tasks.filter_map(|task| {
        let task = task.ok()?.path();
        let status = fs::read_to_string(task.join("status")).ok()?;
        let of = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
        let count = of("voluntary_ctxt_switches:")?.trim().parse().ok()?;
        let name = of("Name:")?.trim().to_owned();
        Some((task.display().to_string(), (name, count)))
    });
    tasks.collect()
}

/// No thread of an executor without guests wakes up more than once a second.
fn wakes_up_once_a_second(name: &str, more: &[&str]) {
    let scratch = Scratch::new(name);
    let control = scratch.path().join("control.sock").display().to_string();
    let arguments = [&["--control", &control], more].concat();
    let serve = Serve::start(&scratch.socket(), &arguments);
    let pid = serve.child.id();
    // What a start leaves to do.
    thread::sleep(Duration::from_secs(2));
    let (start, before) = (Instant::now(), waits(pid));
    thread::sleep(Duration::from_secs(5));
    let (after, elapsed) = (waits(pid), start.elapsed());
    let most = elapsed.as_secs() + 2;
    assert!(before.len() > 3, "{before:?}");
    for (thread, (name, count)) in &after {
        let woken = count - before.get(thread).map_or(0, |(_, before)| *before);
        assert!(woken <= most, "{name} woke up {woken} times in {elapsed:?}");
    }
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert!(status.success(), "{log}");
}

#[test]
fn an_executor_without_guests_wakes_up_once_a_second() {
    wakes_up_once_a_second("idle", &[]);
}

#[test]
fn a_supervisor_without_guests_wakes_up_once_a_second() {
    wakes_up_once_a_second("idle-isolate", &["--isolate", "--guest-memory", "10M"]);
}
