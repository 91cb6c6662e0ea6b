//! Virtual machines, whose processes are replaced.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use vgpu_transport::link::pci::directory;
use vgpu_transport::shm::memory::{SharedWords as _, Window};
use vgpu_transport::wire::{DeviceCount, Offer, Reply};

use crate::common::{TIMEOUT, compute, wait_for};
use crate::machine::Machine;
use crate::served::program::copy_program;
use crate::served::workers::{children, guest};
use crate::served::{Scratch, Serve, vgpu};
use crate::{of_guest, status_when};

/// The executor of a virtual machine dies, and the next one continues to serve the machine, with
/// the stored files.
#[test]
fn virtual_machine_keeps_running_after_its_worker_ends() {
    let scratch = Scratch::new("isolate-vm");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let serve = Serve::start(
        &scratch.socket(),
        &[
            "--isolate",
            "--guest-memory",
            "20M",
            "--vm",
            &vm,
            "--control",
            &scratch.path().join("control.sock").display().to_string(),
        ],
    );
    assert!(serve.ready.contains("vm:"), "{}", serve.ready);
    let (mut other_guest, _) = guest(&serve, &scratch);
    compute(&mut other_guest);
    let machine = Machine::plug(&socket);
    let mut inside = machine.guest();
    compute(&mut inside);
    // The operator sees the machine beside the other guests.
    let status = status_when(&scratch, |status| {
        of_guest(status, "vm1")["graphs"] == 1 && of_guest(status, "-")["graphs"] == 1
    });
    let vm1 = of_guest(&status, "vm1");
    assert_eq!(
        (&vm1["sessions"], &vm1["memory"], &vm1["quota"]),
        (&1.into(), &8.into(), &(20 << 20).into())
    );
    let sessions = status["sessions"].as_array().expect("a list");
    let endpoints: Vec<_> = sessions.iter().map(|s| &s["endpoint"]).collect();
    assert!(
        endpoints.iter().any(|at| **at == "vm vm1 slot 0"),
        "{status:#}"
    );

    // The fd store is the child of the supervisor, and the executor the child of the fd store.
    let worker = || {
        let keeper = children(serve.child.id()).into_iter().find(|pid| {
            fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.contains("fd-store"))
        })?;
        children(keeper.cast_unsigned()).first().copied()
    };
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).expect("a mapping");
    let run = page.load(directory::word::EPOCH);
    let first = worker().expect("a worker");
    // If memory runs out, the kernel ends it before those that keep the machine.
    let score = |pid: u32| {
        let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj"));
        let score = score.expect("the process is there");
        score.trim().parse::<i32>().expect("a number")
    };
    assert_eq!(score(first.cast_unsigned()), 500);
    // The store of the machine kills an executor with more threads than it may have.
    let store = fd_store(&serve).expect("it runs");
    let line = fs::read_to_string(format!("/proc/{store}/cmdline")).expect("it runs");
    let mut words = line.split('\0');
    let limit = words.find_map(|word| word.strip_prefix("--max-threads="));
    let limit: usize = limit.expect("an argument").parse().expect("a number");
    let threads = fs::read_dir(format!("/proc/{first}/task")).expect("it runs");
    let threads = threads.count();
    println!("{threads} threads of an executor, at most {limit}");
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    assert!(
        threads < limit && limit < 400 + processors,
        "{threads}, {limit}"
    );
    assert!(score(serve.child.id()) < 500);
    let start = Instant::now();
    while kill_process(Pid::from_raw(first).expect("a process"), Signal::SEGV).is_ok() {
        assert!(start.elapsed() < TIMEOUT, "it does not end");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    compute(&mut other_guest);
    while worker().is_none_or(|next| next == first) || page.load(directory::word::EPOCH) == run {
        assert!(start.elapsed() < TIMEOUT, "no new worker");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // The program in the machine connects again, as the plugin does. The machine itself is not
    // affected.
    drop(inside);
    let mut again = machine.guest();
    compute(&mut again);
    drop(again);
    compute(&mut other_guest);
    drop(machine);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("the next executor starts"), "{log}");
    // The worker of the other guest, and both executors of the machine, have no files.
    assert_eq!(log.matches("sandboxing: files: ").count(), 3, "{log}");
    assert!(!log.contains("a fault of vgpu"), "{log}");
    assert!(
        !scratch.path().join("vm1.sock").exists(),
        "a socket is left behind"
    );
}

/// The process of a machine has the engines of the supervisor, and its guest sees those of the
/// configuration. The driver is the stand-in.
#[test]
fn virtual_machine_has_the_devices_of_its_guest() {
    let scratch = Scratch::new("isolate-vm-devices");
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let config = format!(
        "[server]\nlisten = [\"unix:{}\"]\n[control]\n\
         socket = \"{}\"\n[[guest]]\nname = \"vm1\"\ndevices = [1]\n\
         vm = {{ socket = \"{}\", window = \"64M\", silence = 0 }}\n",
        scratch.socket().display(),
        path("control.sock"),
        path("vm1.sock")
    );
    fs::write(path("vgpu.toml"), config).expect("a new file");
    let mut command = vgpu(&[
        "serve",
        "--engine=cuda:0,1",
        "--isolate",
        "--config",
        &path("vgpu.toml"),
    ]);
    command
        .env(
            "LD_LIBRARY_PATH",
            vgpu_driver_standin::folder().expect("the library"),
        )
        .env("VGPU_STANDIN_SMS", "3")
        .env("VGPU_STANDIN_DEVICES", "L4,H100")
        // No folder, so that the kernels are not checked at the start.
        .env("VGPU_CACHE", "/dev/null");
    let serve = Serve::of(command);
    assert!(serve.ready.contains("vm:"), "{}", serve.ready);
    let machine = Machine::plug(&scratch.path().join("vm1.sock"));
    let mut guest = machine.connect().expect("a slot");
    let Reply::Welcome {
        engine, devices, ..
    } = guest.hello_for(Offer::SERVED, 0)
    else {
        unreachable!("hello_for() has checked it")
    };
    assert_eq!((&engine[..], devices), ("cuda:1", DeviceCount(1)));
    compute(&mut guest);
    let status = status_when(&scratch, |status| of_guest(status, "vm1")["graphs"] == 1);
    let vm1 = of_guest(&status, "vm1");
    assert_eq!(vm1["by_device"][0]["graphs"], 0, "{vm1:#}");
    assert_eq!(vm1["by_device"][1]["graphs"], 1, "{vm1:#}");
    // Another guest sees both.
    let mut other = serve.connect(&scratch.socket());
    let Reply::Welcome { devices, .. } = other.hello() else {
        unreachable!("hello() has checked it")
    };
    assert_eq!(devices, DeviceCount(2));
    compute(&mut other);
}

/// The process that keeps the file descriptors of a machine dies. The supervisor has copies for the
/// next one.
#[test]
fn virtual_machine_keeps_running_after_its_fd_store_ends() {
    let scratch = Scratch::new("isolate-fd-store");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let serve = Serve::start(
        &scratch.socket(),
        &["--isolate", "--guest-memory", "20M", "--vm", &vm],
    );
    let machine = Machine::plug(&socket);
    compute(&mut machine.guest());
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).expect("a mapping");
    for _ in 0..2 {
        let run = page.load(directory::word::EPOCH);
        let store = fd_store(&serve).expect("it runs");
        let executor = executor_of(store).expect("an executor");
        kill_process(store, Signal::KILL).expect("it runs");
        // The executor ends with its store, and the next one serves the machine.
        wait_for("the end of the executor", || {
            rustix::process::test_kill_process(executor).is_err()
        });
        wait_for("the next executor", || {
            page.load(directory::word::EPOCH) != run
        });
        compute(&mut machine.guest());
    }
    // Another QEMU gets a device of its own.
    drop(machine);
    let machine = Machine::plug(&socket);
    compute(&mut machine.guest());
    drop(machine);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let said = "the machine's process is started again, with 3 of its files";
    assert_eq!(log.matches(said).count(), 2, "{log}");
}

/// A process that a hypervisor's guest has taken over reaches no file and no control socket. Each
/// QEMU that is started gets the device all the same, also when the process has no connection left
/// for another one and a new process takes over.
#[test]
fn process_of_a_machine_with_vfio_user_gives_up_files_and_sockets() {
    const CAPABILITIES: &[u8] = b"{\"capabilities\":{}}\0";
    // The version negotiation: id, command, size, flags, error, versions, text.
    let mut request = [0u16.to_le_bytes(), 1u16.to_le_bytes()].concat();
    request.extend((20 + CAPABILITIES.len() as u32).to_le_bytes());
    request.extend([0; 12]);
    request.extend(CAPABILITIES);
    let scratch = Scratch::new("isolate-vfio");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let isolate = ["--isolate", "--guest-memory", "20M"];
    let device = ["--device", "vfio-user", "--vm", &vm];
    let serve = Serve::start(&scratch.socket(), &[&isolate[..], &device].concat());
    for _ in 0..34 {
        let has_device = || {
            let mut hypervisor = UnixStream::connect(&socket)?;
            hypervisor.set_read_timeout(Some(TIMEOUT))?;
            hypervisor.write_all(&request)?;
            let mut head = [0; 16];
            hypervisor.read_exact(&mut head)?;
            Ok::<_, io::Error>(head[2] == 1)
        };
        // The end of the hypervisor before is noticed within moments.
        wait_for("the device", || has_device().unwrap_or_default());
    }
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let files = log.lines().filter(|line| line.contains("files: no files"));
    assert_eq!(files.count(), 2, "{log}");
    assert_eq!(log.matches("no connection is left").count(), 1, "{log}");
    assert_eq!(log.matches("is started again").count(), 1, "{log}");
}

/// An upgrade replaces the program while a supervisor runs: the next executor of a virtual machine
/// is of the supervisor's version.
#[test]
fn virtual_machine_is_served_by_the_version_of_its_supervisor_after_an_upgrade() {
    let scratch = Scratch::new("isolate-upgrade");
    let program = scratch.path().join("vgpu");
    copy_program(&program);
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let isolate = ["--isolate", "--guest-memory", "20M", "--vm", &vm];
    let serve = Serve::of(Serve::command_of(&program, &scratch.socket(), &isolate));
    let machine = Machine::plug(&socket);
    compute(&mut machine.guest());
    // In place of the upgrade, a program that serves nobody.
    fs::remove_file(&program).expect("the program is there");
    std::os::unix::fs::symlink("/bin/false", &program).expect("a link");
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).expect("a mapping");
    let run = page.load(directory::word::EPOCH);
    let executor = executor_of(fd_store(&serve).expect("it runs")).expect("an executor");
    kill_process(executor, Signal::KILL).expect("it runs");
    wait_for("the next executor", || {
        page.load(directory::word::EPOCH) != run
    });
    compute(&mut machine.guest());
    drop(machine);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

/// The `vgpu fd-store` of the only virtual machine of a supervisor.
fn fd_store(serve: &Serve) -> Option<Pid> {
    let is_fd_store = |pid: &i32| {
        fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.contains("fd-store"))
    };
    let mut children = children(serve.child.id()).into_iter();
    Pid::from_raw(children.find(is_fd_store)?)
}

/// The process that a `vgpu fd-store` has started.
fn executor_of(store: Pid) -> Option<Pid> {
    let children = children(store.as_raw_nonzero().get().cast_unsigned());
    Pid::from_raw(*children.first()?)
}

/// The supervisor is killed where no service manager keeps files: nobody can take them over. The
/// fd store of the virtual machine ends, although it keeps files, and so does the executor.
#[test]
fn processes_of_a_virtual_machine_end_with_their_killed_supervisor() {
    let scratch = Scratch::new("isolate-killed");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let isolate = ["--isolate", "--guest-memory", "20M", "--vm", &vm];
    let mut serve = Serve::start(&scratch.socket(), &isolate);
    let machine = Machine::plug(&socket);
    compute(&mut machine.guest());
    let store = fd_store(&serve).expect("it runs");
    let executor = executor_of(store).expect("an executor");
    serve.child.kill().expect("it is there");
    serve.child.wait().expect("it can be waited for");
    for (process, what) in [(store, "fd store"), (executor, "executor")] {
        wait_for(&format!("the end of the {what}"), || {
            test_kill_process(process).is_err()
        });
    }
    // The next supervisor has a device for the next QEMU.
    drop(machine);
    let serve = Serve::start(&scratch.socket(), &isolate);
    compute(&mut Machine::plug(&socket).guest());
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

/// The dump of the supervisor.
fn dump(control: &Path) -> String {
    let output = vgpu(&["dump", "--control"])
        .arg(control)
        .output()
        .expect("it starts");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A restart, an upgrade or a crash of the supervisor below a service manager with an fd store: the
/// virtual machine keeps its device.
#[test]
fn virtual_machine_keeps_its_device_when_the_supervisor_is_replaced() {
    let scratch = Scratch::new("isolate-supervisor");
    let (socket, control) = (
        scratch.path().join("vm1.sock"),
        scratch.path().join("control.sock"),
    );
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let endpoint = format!("unix:{}", scratch.socket().display());
    let mut command = vgpu(&["fd-store", "--", env!("CARGO_BIN_EXE_vgpu"), "serve"]);
    command
        .args(["--listen", &endpoint, "--threads", "1", "--memory", "64M"])
        .args(["--isolate", "--guest-memory", "20M", "--vm", &vm])
        .arg("--control")
        .arg(&control);
    let serve = Serve::of(command);
    let machine = Machine::plug(&socket);
    compute(&mut machine.guest());
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).expect("a mapping");
    const KEPT: &str =
        "files kept by the service manager: vgpu-vm1-bell, vgpu-vm1-line, vgpu-vm1-memory";
    let is_kept = || {
        let dump = dump(&control);
        // The supervisor's own line, and that of the machine's executor.
        dump.lines().any(|line| line == KEPT)
            && dump.lines().any(|line| line == format!("  {KEPT}"))
    };
    wait_for("the files to be kept", is_kept);
    for signal in [Signal::KILL, Signal::TERM] {
        let run = page.load(directory::word::EPOCH);
        let supervisor = executor_of(Pid::from_child(&serve.child)).expect("a supervisor");
        kill_process(supervisor, signal).expect("it runs");
        wait_for("the next executor", || {
            page.load(directory::word::EPOCH) != run
        });
        compute(&mut machine.guest());
        // The next supervisor knows what it has taken over.
        wait_for("the files to be kept", is_kept);
    }
    // QEMU ends: its files are released everywhere.
    drop(machine);
    wait_for("the files to be released", || {
        let dump = dump(&control);
        dump.contains("supervisor") && !dump.contains("files kept")
    });
    compute(&mut Machine::plug(&socket).guest());
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert_eq!(
        log.matches("serving the running virtual machine").count(),
        2,
        "{log}"
    );
}
