//! `vgpu serve --isolate`: a fault in the process of one guest takes down no other.

mod common;
mod machine;

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd as _;
use std::time::Instant;

use common::served::{Scratch, Serve, vgpu};
use common::{Guest, PATIENCE, add, bytes};
use machine::Machine;
use rustix::process::{Pid, Signal, kill_process};
use vgpu_transport::ir::IR_VERSION;
use vgpu_transport::link::pci::directory;
use vgpu_transport::window::memory::{Memory as _, Window};
use vgpu_transport::wire::{GraphId, PROTOCOL_VERSION, Reply, Request};

/// Workers of a supervisor, by the number of their session, once there are `count` of them.
fn workers(serve: &Serve, count: usize) -> BTreeMap<u64, Pid> {
    let start = Instant::now();
    loop {
        let found: BTreeMap<u64, Pid> = children(serve.child.id())
            .into_iter()
            .filter_map(|pid| {
                let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
                let session = line
                    .split('\0')
                    .find_map(|word| word.strip_prefix("--session="))?;
                Some((session.parse().ok()?, Pid::from_raw(pid)?))
            })
            .collect();
        if found.len() == count {
            return found;
        }
        assert!(
            start.elapsed() < PATIENCE,
            "{found:?} instead of {count} workers"
        );
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

fn children(pid: u32) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("the process is there");
    threads
        .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace()
                .map(|pid| pid.parse().expect("a number"))
                .collect::<Vec<i32>>()
        })
        .collect()
}

/// A guest that has said hello, and the number of its session.
fn guest(serve: &Serve, scratch: &Scratch) -> (Guest, u64) {
    let mut guest = serve.connect(&scratch.socket());
    match guest.hello() {
        Reply::Welcome { session, .. } => (guest, session),
        other => panic!("{other:?}"),
    }
}

fn compute(guest: &mut Guest) {
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GraphId(1), &add(2, a, a, a));
    guest.submit(GraphId(1));
    assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
}

#[test]
fn a_worker_that_dies_takes_down_no_other() {
    let scratch = Scratch::new("isolate");
    let serve = Serve::start(&scratch.socket(), &["--isolate", "--guest-memory", "20M"]);
    let (mut bystander, _) = guest(&serve, &scratch);
    compute(&mut bystander);
    let mut victims = Vec::new();
    for signal in [
        Signal::SEGV,
        Signal::ILL,
        Signal::BUS,
        Signal::ABORT,
        Signal::KILL,
    ] {
        let (mut victim, session) = guest(&serve, &scratch);
        compute(&mut victim);
        let worker = workers(&serve, 2)[&session];
        // More than once: what Rust does at a SIGSEGV that no access has caused is to wait for the access.
        let start = Instant::now();
        while kill_process(worker, signal).is_ok() {
            assert!(start.elapsed() < PATIENCE, "{signal:?} does not end it");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        // It is told, and does not wait for an answer that will not come.
        victim.send(&Request::Fence {});
        let told = victim.end.receive(&mut Vec::new(), (&mut [][..]).into());
        assert!(told.is_err(), "{told:?}");
        compute(&mut bystander);
        victims.push((session, signal));
    }
    // Each worker has been replaced; so has the last.
    let (mut next, _) = guest(&serve, &scratch);
    compute(&mut next);
    compute(&mut bystander);
    drop(next);
    workers(&serve, 1);

    serve.signal(Signal::TERM);
    assert_eq!(bystander.ended(), "the host is shutting down");
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let pid = format!("pid {} uid", std::process::id());
    for ((session, _), name) in victims
        .into_iter()
        .zip(["SIGSEGV", "SIGILL", "SIGBUS", "SIGABRT", "SIGKILL"])
    {
        let said = format!("was ended by {name}");
        let line = log.lines().find(|line| line.contains(&said));
        let line = line.unwrap_or_else(|| panic!("no {said:?} in {log}"));
        assert!(
            line.contains(&format!("session={session}")) && line.contains(&pid),
            "{line}"
        );
    }
}

#[test]
fn each_guest_has_its_part_of_the_memory_and_no_more_come_than_there_are_parts() {
    let scratch = Scratch::new("isolate-parts");
    // 64M in all.
    let serve = Serve::start(&scratch.socket(), &["--isolate", "--guest-memory", "30M"]);
    let (mut first, _) = guest(&serve, &scratch);
    let (mut second, _) = guest(&serve, &scratch);
    for guest in [&mut first, &mut second] {
        guest.alloc(20 << 20);
        let buffer = guest.new_buffer();
        let refused = guest.ask(&Request::Alloc {
            buffer,
            size: 20 << 20,
        });
        let Reply::Refused { reason, .. } = refused else {
            panic!("{refused:?}");
        };
        assert!(reason.contains("31457280"), "{reason}");
    }
    let mut third = serve.connect(&scratch.socket());
    third.send(&Request::Fence {});
    let reason = third.ended();
    assert!(
        reason.contains("already serves 2 guests, its limit is 2"),
        "{reason}"
    );
    drop(first);
    // Its place becomes free when its process has ended.
    let start = Instant::now();
    let mut next = loop {
        let mut next = serve.connect(&scratch.socket());
        next.send(&Request::Hello {
            protocol: PROTOCOL_VERSION,
            ir: IR_VERSION,
            name: "next".into(),
        });
        match next.receive().0 {
            Reply::Welcome { .. } => break next,
            Reply::Ended { .. } if start.elapsed() < PATIENCE => {}
            other => panic!("{other:?}"),
        }
    };
    compute(&mut next);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn workers_are_in_the_sandbox_and_end_with_their_supervisor() {
    let scratch = Scratch::new("isolate-box");
    let mut serve = Serve::start(&scratch.socket(), &["--isolate", "--guest-memory", "20M"]);
    let (mut guest, session) = guest(&serve, &scratch);
    compute(&mut guest);
    let worker = workers(&serve, 1)[&session];
    let status =
        fs::read_to_string(format!("/proc/{}/status", worker.as_raw_nonzero())).expect("a status");
    for line in ["Seccomp:\t2", "NoNewPrivs:\t1", "CapEff:\t0000000000000000"] {
        assert!(status.contains(line), "{line} is not in {status}");
    }
    // A supervisor that is killed takes its workers with it: the guest is told, and nobody is left.
    serve.child.kill().expect("it is there");
    serve.child.wait().expect("it can be waited for");
    let mut message = Vec::new();
    // A worker that is asked to end says so.
    let _ = guest.end.receive(&mut message, (&mut [][..]).into());
    let start = Instant::now();
    while rustix::process::test_kill_process(worker).is_ok() {
        assert!(start.elapsed() < PATIENCE, "the worker lives on");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// A virtual machine's worker dies, and the next one serves the machine on: somebody has kept its files.
#[test]
fn a_virtual_machine_outlives_its_worker() {
    let scratch = Scratch::new("isolate-vm");
    let socket = scratch.0.join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let serve = Serve::start(
        &scratch.socket(),
        &["--isolate", "--guest-memory", "20M", "--vm", &vm],
    );
    assert!(serve.ready.contains("vm:"), "{}", serve.ready);
    let (mut bystander, _) = guest(&serve, &scratch);
    compute(&mut bystander);
    let machine = Machine::plug(&socket);
    let mut inside = machine.guest();
    compute(&mut inside);

    // The keeper of the files is the supervisor's child, the worker is the keeper's.
    let worker = || {
        let keeper = children(serve.child.id()).into_iter().find(|pid| {
            fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.contains("hold"))
        })?;
        children(keeper.cast_unsigned()).first().copied()
    };
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).expect("a mapping");
    let run = page.load(directory::word::EPOCH);
    let first = worker().expect("a worker");
    let start = Instant::now();
    while kill_process(Pid::from_raw(first).expect("a process"), Signal::SEGV).is_ok() {
        assert!(start.elapsed() < PATIENCE, "it does not end");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    compute(&mut bystander);
    while worker().is_none_or(|next| next == first) || page.load(directory::word::EPOCH) == run {
        assert!(start.elapsed() < PATIENCE, "no new worker");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // The program in the machine connects again, as the plugin does; the machine has noticed nothing.
    drop(inside);
    let mut again = machine.guest();
    compute(&mut again);
    drop(again);
    compute(&mut bystander);
    drop(machine);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("the next starts"), "{log}");
}

#[test]
fn what_is_missing_is_said() {
    for (more, wanted) in [
        (&["--isolate"][..], "--guest-memory"),
        (&["--guest-memory", "1G"], "--isolate"),
        (
            &["--isolate", "--memory", "1G", "--guest-memory", "2G"],
            "for 0 guests",
        ),
    ] {
        let scratch = Scratch::new("isolate-wrong");
        let endpoint = format!("unix:{}", scratch.socket().display());
        let output = vgpu(&["serve", "--listen", &endpoint])
            .args(more)
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains(wanted),
            "{more:?}: {said}"
        );
    }
}
