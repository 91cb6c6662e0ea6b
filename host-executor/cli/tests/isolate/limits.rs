//! How many guests there may be, and what isolation requires.

use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, setrlimit};
use vgpu_transport::link::scm_rights::{self, MAX_FILES};
use vgpu_transport::link::stream::{Plain, StreamGuest};
use vgpu_transport::wire::{DeviceIndex, Offer, Reply, Request};

use crate::common::{Guest, TIMEOUT, compute};
use crate::ggml;
use crate::served::workers::{children, guest, workers};
use crate::served::{Scratch, Serve, as_another_user, vgpu};

#[test]
fn each_guest_has_its_partition_and_partitions_limit_the_guests() {
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
        assert!(reason.contains("of 30.0 MiB free"), "{reason}");
    }
    let mut third = serve.connect(&scratch.socket());
    third.send(&Request::Fence {});
    let reason = third.ended();
    assert!(
        reason.contains("already serves 2 guests, its limit is 2"),
        "{reason}"
    );
    drop(first);
    // The place becomes free when the process has ended.
    let start = Instant::now();
    let mut next = loop {
        let mut next = serve.connect(&scratch.socket());
        next.send(&Request::Hello {
            offer: Offer::SERVED,
            name: "next".into(),
            device: DeviceIndex(0),
        });
        match next.receive().0 {
            Reply::Welcome { .. } => break next,
            // A user who asks more often is not answered after a while.
            Reply::Ended { .. } if start.elapsed() < TIMEOUT => {
                thread::sleep(Duration::from_millis(500));
            }
            other => panic!("{other:?}"),
        }
    };
    compute(&mut next);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    for said in ["files: ", "not dumpable"] {
        assert!(log.contains(said), "{said:?} is not in {log}");
    }
    let keeps_files = log.contains("files: all files of the user");
    assert!(!keeps_files || std::env::var_os("CI").is_none(), "{log}");
}

/// A user who connects again and again gets no further process, and so no further memory, beyond
/// the limit of one origin.
#[test]
fn one_user_cannot_take_all_workers() {
    let uid = rustix::process::getuid().as_raw();
    let isolated = ["--isolate", "--guest-memory"];
    for (each, programs, limit) in [
        // Of six places in 64M, no more than four by default, and of 32 a quarter.
        ("10M", None, 4),
        ("2M", None, 8),
        ("10M", Some(1), 1),
        // The limit of the configuration replaces the one by default, and no other.
        ("10M", Some(6), 5),
    ] {
        let scratch = Scratch::new("isolate-user");
        let mut more = vec![isolated[0], isolated[1], each];
        let file = scratch.path().join("vgpu.toml");
        let path = file.display().to_string();
        if let Some(programs) = programs {
            let text = format!("[unnamed]\nprograms = {programs}\n");
            std::fs::write(&file, text).expect("a file");
            more.extend(["--config", &path]);
        }
        let serve = Serve::start(&scratch.socket(), &more);
        let mut guests: Vec<Guest> = (0..limit).map(|_| guest(&serve, &scratch).0).collect();
        let reason = serve.connect(&scratch.socket()).ended();
        let said = match programs {
            Some(6) => format!("has {limit} programs here, its limit is {limit}"),
            _ => format!(
                "uid:{uid} has {limit} processes of unnamed guests here, its limit is {limit} \
                 (unnamed.programs)"
            ),
        };
        assert!(reason.contains(&said), "{each} {programs:?}: {reason}");
        guests.iter_mut().for_each(compute);
        serve.signal(Signal::TERM);
        drop(guests);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
    }
}

/// A guest at an address of the loopback interface, over TCP without certificates.
fn guest_from(host: u8, port: u16) -> Guest {
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    let socket = rustix::net::socket(family, kind, None).expect("a socket");
    let address = |host, port| SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, host), port);
    rustix::net::bind(&socket, &address(host, 0)).expect("an address of this machine");
    rustix::net::connect(&socket, &address(1, port)).expect("a connection");
    let socket = TcpStream::from(socket);
    socket.set_nonblocking(true).expect("a socket");
    Guest::new(Box::new(StreamGuest::new(Box::new(Plain::new(socket)))))
}

/// Whoever may connect to a port of this machine may do so from any of its 16 million addresses,
/// which are one origin: no address brings another quota.
#[test]
fn addresses_of_the_loopback_interface_have_the_processes_of_one_origin() {
    let scratch = Scratch::new("isolate-loopback");
    let file = scratch.path().join("vgpu.toml");
    std::fs::write(&file, "[unnamed]\nprograms = 2\n").expect("a file");
    let any = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = any.local_addr().expect("an address").port();
    drop(any);
    let (path, endpoint) = (file.display().to_string(), format!("tcp:127.0.0.1:{port}"));
    let more = ["--isolate", "--guest-memory", "10M", "--config", &path];
    let serve = Serve::start(
        &scratch.socket(),
        &[&more[..], &["--listen", &endpoint]].concat(),
    );
    let mut guests = [1, 2].map(|host| {
        let mut guest = guest_from(host, port);
        guest.hello();
        guest
    });
    guests.iter_mut().for_each(compute);
    for host in [1, 3, 200] {
        let mut further = guest_from(host, port);
        // Nobody reads HELLO of a program that gets no process of a guest.
        further.send(&Request::Fence {});
        let reason = further.ended();
        let says = "tcp:loopback has 2 processes of unnamed guests here, its limit is 2";
        assert!(reason.contains(says), "{reason}");
    }
    // Others are served.
    let (mut local, _) = guest(&serve, &scratch);
    compute(&mut local);
    guests.iter_mut().for_each(compute);
    drop((guests, local));
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

/// Anonymous and shared memory of all processes of guests, in bytes.
fn memory_of_workers(serve: &Serve) -> u64 {
    let children = children(serve.child.id());
    let statuses = children.iter().filter_map(|pid| status_of(*pid));
    let of = |status: &str, key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
    };
    statuses
        .map(|status| of(&status, "RssAnon:") + of(&status, "RssShmem:"))
        .sum()
}

/// The text of `/proc/PID/status`, unless the process has ended.
fn status_of(pid: i32) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/status")).ok()
}

/// A program that fills its quota, ends and connects again: a process has its part of the memory
/// until it has ended, so there is one quota at any time.
#[test]
fn an_unnamed_guest_has_one_quota_however_often_it_connects_again() {
    const QUOTA: u64 = 24 << 20;
    const BUFFER: u64 = 20 << 20;
    let scratch = Scratch::new("isolate-again");
    let file = scratch.path().join("vgpu.toml");
    std::fs::write(&file, "[unnamed]\nprograms = 1\n").expect("a file");
    let path = file.display().to_string();
    // 64M in all: room for two quotas.
    let more = ["--isolate", "--guest-memory", "24M", "--config", &path];
    let serve = Serve::start(&scratch.socket(), &more);
    let mut most = 0;
    for _ in 0..6 {
        let start = Instant::now();
        let mut guest = loop {
            let mut guest = serve.connect(&scratch.socket());
            guest.send(&Request::Hello {
                offer: Offer::SERVED,
                name: "again".into(),
                device: DeviceIndex(0),
            });
            match guest.receive().0 {
                Reply::Welcome { .. } => break guest,
                // The process of the program before is there.
                Reply::Ended { reason } => {
                    assert!(start.elapsed() < TIMEOUT, "{reason}");
                    assert!(reason.contains("its limit is 1"), "{reason}");
                }
                other => panic!("{other:?}"),
            }
            most = most.max(memory_of_workers(&serve));
            thread::sleep(Duration::from_millis(100));
        };
        let buffer = guest.alloc(BUFFER);
        guest.send(&Request::Fill {
            buffer,
            offset: 0,
            len: BUFFER,
            value: 7,
        });
        guest.fence();
        // Nor has it another one beside it.
        let reason = serve.connect(&scratch.socket()).ended();
        assert!(reason.contains("its limit is 1"), "{reason}");
        most = most.max(memory_of_workers(&serve));
    }
    println!("{} MiB at most", most >> 20);
    assert!(most >= BUFFER, "the buffers are not seen");
    // The quota, and processes that tell why a program is rejected.
    assert!(most < QUOTA + (16 << 20), "{} MiB", most >> 20);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

/// The threads of a worker are those of its engine, some of its own, and one for each program. The
/// supervisor has none for a program that a worker has.
#[test]
fn threads_follow_the_programs_of_a_guest() {
    const PROGRAMS: usize = 6;
    let scratch = Scratch::new("isolate-threads");
    let file = scratch.path().join("vgpu.toml");
    let uid = rustix::process::getuid().as_raw();
    let text = format!("[[guest]]\nname = \"a\"\nuids = [{uid}]\nmemory = \"20M\"\n");
    std::fs::write(&file, text).expect("a file");
    let path = file.display().to_string();
    let more = ["--isolate", "--guest-memory", "10M", "--config", &path];
    let serve = Serve::start(&scratch.socket(), &more);
    let supervisor = serve.child.id() as i32;
    let threads = |pid: i32| {
        let status = status_of(pid).expect("it runs");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("Threads:"));
        let count = line.and_then(|line| line.trim().parse::<usize>().ok());
        count.expect("a number")
    };
    let eventually = |what: &str, pid: i32, wanted: usize| {
        let start = Instant::now();
        while threads(pid) > wanted {
            let now = threads(pid);
            assert!(start.elapsed() < TIMEOUT, "{what}: {now}, not {wanted}");
            thread::sleep(Duration::from_millis(10));
        }
    };
    let (mut first, session) = guest(&serve, &scratch);
    compute(&mut first);
    let worker = workers(&serve, 1)[&session].as_raw_pid();
    // The thread of the connection ends soon.
    thread::sleep(Duration::from_millis(200));
    let (of_worker, of_supervisor) = (threads(worker), threads(supervisor));
    println!("{of_worker} threads of a worker, {of_supervisor} of the supervisor");
    assert!(of_worker <= 20 && of_supervisor <= 20);
    let mut programs: Vec<Guest> = (1..PROGRAMS).map(|_| guest(&serve, &scratch).0).collect();
    programs.iter_mut().for_each(compute);
    workers(&serve, 1);
    eventually("the worker", worker, of_worker + PROGRAMS - 1);
    assert!(threads(worker) > of_worker, "programs are not seen");
    eventually("the supervisor", supervisor, of_supervisor);
    drop(programs);
    eventually("the worker afterwards", worker, of_worker);
    drop(first);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

/// ggml's CPU backend computes with OpenMP, whose library keeps a team of threads for each thread
/// that has computed: one for each program. Such a guest is not killed for its threads.
#[test]
fn programs_on_a_backend_of_ggml_have_the_threads_that_they_need() {
    const PROGRAMS: usize = 24;
    const THREADS: usize = 16;
    let scratch = Scratch::new("isolate-teams");
    let file = scratch.path().join("vgpu.toml");
    let uid = rustix::process::getuid().as_raw();
    let text = format!("[[guest]]\nname = \"a\"\nuids = [{uid}]\nmemory = \"20M\"\n");
    std::fs::write(&file, text).expect("a file");
    let library = ggml::cached("build-llama-0.3.36/bin/libggml-cpu.so");
    let engine = format!("--engine=ggml:{}", library.display());
    let endpoint = format!("unix:{}", scratch.socket().display());
    let mut command = vgpu(&["serve", &engine, "--isolate", "--guest-memory", "10M"]);
    command
        .args(["--listen", &endpoint, "--memory", "64M"])
        .arg(format!("--threads={THREADS}"))
        .arg("--config")
        .arg(&file);
    let serve = Serve::of(command);
    let (first, session) = guest(&serve, &scratch);
    let others = (1..PROGRAMS).map(|_| guest(&serve, &scratch).0);
    let mut programs: Vec<Guest> = std::iter::once(first).chain(others).collect();
    programs.iter_mut().for_each(compute);
    let worker = workers(&serve, 1)[&session];
    let tasks = std::fs::read_dir(format!("/proc/{worker}/task")).expect("it runs");
    let tasks = tasks.count();
    println!("{tasks} threads of {PROGRAMS} programs, {THREADS} in a team");
    // More than a worker with a driver has without teams.
    assert!(tasks > THREADS + 256 + 2 * PROGRAMS, "{tasks}");
    // The supervisor looks once a second.
    thread::sleep(Duration::from_millis(2500));
    programs.iter_mut().for_each(compute);
    assert_eq!(workers(&serve, 1)[&session], worker);
    serve.signal(Signal::TERM);
    drop(programs);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(!log.contains("threads, its limit is"), "{log}");
}

/// The most descriptors that a process may have.
fn most_descriptors(pid: i32) -> u64 {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
    let line = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let mut words = line.expect("a line").split_whitespace();
    let most = words.nth(4).expect("a hard limit");
    most.parse().expect("a number")
}

/// A process of a guest may have fewer descriptors than a `vgpu fd-store`, and that fewer than the
/// supervisor: so a guest that has taken over its process cannot keep them from passing files.
#[test]
fn processes_of_guests_have_fewer_descriptors_than_those_that_pass_files() {
    let scratch = Scratch::new("isolate-descriptors");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let isolate = ["--isolate", "--guest-memory", "20M", "--vm", &vm];
    let serve = Serve::start(&scratch.socket(), &isolate);
    let (mut program, session) = guest(&serve, &scratch);
    compute(&mut program);
    let supervisor = serve.child.id().cast_signed();
    let worker = workers(&serve, 1)[&session].as_raw_pid();
    let is_other = |pid: &i32| *pid != worker;
    let store = children(serve.child.id()).into_iter().find(is_other);
    let store = store.expect("a store");
    let executor = children(store.cast_unsigned())[0];
    let all = most_descriptors(supervisor);
    let of = [store, executor, worker].map(most_descriptors);
    println!("{all} descriptors of the supervisor, {of:?}");
    let is_about = |count: u64, eighths| count.abs_diff(all * eighths / 8) <= 16;
    assert!(
        is_about(of[0], 7) && is_about(of[1], 6) && is_about(of[2], 6),
        "{of:?}"
    );
    serve.signal(Signal::TERM);
    drop(program);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

/// Set in the process of the test below.
const INSIDE: &str = "VGPU_TEST_FILES_UNDER_WAY";

/// What the limits of descriptors are for: the kernel refuses to send more files to a process when
/// more of its user's files wait in sockets than the process may have open, and only then.
#[test]
fn files_that_wait_in_sockets_keep_only_processes_with_fewer_descriptors_from_sending() {
    if std::env::var_os(INSIDE).is_none() {
        let test = "limits::files_that_wait_in_sockets_keep_only_processes_with_fewer_\
                    descriptors_from_sending";
        let mut again = Command::new(std::env::current_exe().expect("this program"));
        again
            .args(["--exact", test, "--nocapture"])
            .env(INSIDE, "1");
        let output = again.output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
        return;
    }
    // Of another user than root, whom the kernel refuses nothing.
    as_another_user(|| {
        let pair = || {
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None).expect("a pair")
        };
        let limit = |descriptors| {
            let own = getrlimit(Resource::Nofile);
            let current = Some(descriptors);
            setrlimit(Resource::Nofile, Rlimit { current, ..own }).expect("a lower limit");
        };
        let file = std::fs::File::open("/dev/null").expect("a file");
        let files = [file.as_fd(); MAX_FILES];
        let send = |to: &OwnedFd| scm_rights::send(to, b"x", &files, SendFlags::DONTWAIT);
        limit(64);
        let (full, _unread) = pair();
        let mut sent = 0;
        let refused = loop {
            match send(&full) {
                Ok(_) => sent += MAX_FILES,
                Err(error) => break error,
            }
        };
        assert_eq!(refused, Errno::TOOMANYREFS, "after {sent}");
        assert!((64..128).contains(&sent), "{sent}");
        let (other, _unread) = pair();
        assert_eq!(send(&other), Err(Errno::TOOMANYREFS));
        limit(128);
        assert_eq!(send(&other), Ok(1));
    });
}

/// Each process has its part of the host memory, and a process that starts after a reload has the
/// part of the new number of places. Started with SIGCHLD ignored, neither the supervisor nor a
/// worker ignores it.
#[test]
fn each_process_has_its_part_of_the_host_memory() {
    let scratch = Scratch::new("isolate-host-memory");
    let control = scratch.path().join("control.sock").display().to_string();
    let file = scratch.path().join("vgpu.toml");
    let path = file.display().to_string();
    let configure = |max_guests| {
        let text = format!("[server]\nmax-guests = {max_guests}\n");
        std::fs::write(&file, text).expect("a file");
    };
    configure(10);
    let more = [
        "--isolate",
        "--guest-memory",
        "10M",
        "--host-memory",
        "640M",
    ];
    let more = [&more[..], &["--config", &path, "--control", &control]].concat();
    let program = Path::new(env!("CARGO_BIN_EXE_vgpu"));
    let command = Serve::command_of(program, &scratch.socket(), &more);
    let mut ignoring = Command::new("env");
    ignoring
        .args(["--ignore-signal=CHLD", env!("CARGO_BIN_EXE_vgpu")])
        .args(command.get_args());
    let serve = Serve::of(ignoring);
    let host_memory = |pid: Pid| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).expect("a worker");
        let mut words = line.split('\0');
        let part = words.find_map(|word| word.strip_prefix("--host-memory="));
        part.expect("an argument").parse::<u64>().expect("a number")
    };
    let (one, first) = guest(&serve, &scratch);
    let worker = workers(&serve, 1)[&first];
    assert_eq!(host_memory(worker), 64 << 20);
    for pid in [Pid::from_child(&serve.child), worker] {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
        let mut lines = status.lines();
        let ignored = lines
            .find_map(|line| line.strip_prefix("SigIgn:"))
            .expect("a line");
        let ignored = u64::from_str_radix(ignored.trim(), 16).expect("a number");
        assert_eq!(ignored >> (Signal::CHILD.as_raw() - 1) & 1, 0, "{status}");
    }

    configure(5);
    let reload = vgpu(&["reload", "--control", &control]).output();
    let reload = reload.expect("it starts");
    assert!(reload.status.success(), "{reload:?}");
    let (two, second) = guest(&serve, &scratch);
    let both = workers(&serve, 2);
    assert_eq!(host_memory(both[&second]), 128 << 20);
    assert_eq!(host_memory(both[&first]), 64 << 20, "it keeps its part");
    serve.signal(Signal::TERM);
    drop((one, two));
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn missing_requirements_are_reported() {
    for (more, wanted) in [
        (&["--isolate"][..], "--guest-memory"),
        (&["--guest-memory", "1G"], "--isolate"),
        (
            &["--isolate", "--guest-memory", "10M", "--pin"],
            "--isolate and --pin exclude each other",
        ),
        (
            &["--isolate", "--memory", "1G", "--guest-memory", "2G"],
            "not enough for one guest",
        ),
        (
            &[
                "--isolate",
                "--guest-memory",
                "1G",
                "--share-weights",
                "all",
            ],
            "the weights of each guest are in its own process",
        ),
        (
            &[
                "--isolate",
                "--guest-memory",
                "1G",
                "--weights-cache",
                "/tmp/weights,size=1G",
            ],
            "several processes would write to one folder",
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
