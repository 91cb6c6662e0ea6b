//! `vgpu fd-store`, and the files of virtual machines that a service manager keeps.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};

use crate::common::{Guest, TIMEOUT, wait_for};
use crate::machine::Machine;
use crate::served::program::copy_program;
use crate::served::workers::children;
use crate::served::{Scratch, Serve, vgpu};

/// An upgrade replaces the program while `vgpu fd-store` runs.
#[test]
fn fd_store_survives_the_replacement_of_its_program() {
    let scratch = Scratch::new("fd-store-upgrade");
    let program = scratch.path().join("vgpu");
    copy_program(&program);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("permissions");
    let runs = scratch.path().join("runs");
    // An executor that ends at once, and says so in a file.
    let script = format!("echo run >> {}; exit 1", runs.display());
    let mut store = Command::new(&program)
        .args(["fd-store", "--", "/bin/sh", "-c", &script])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let count = || fs::read_to_string(&runs).map_or(0, |text| text.lines().count());
    let start = Instant::now();
    let mut wait_for = |wanted: usize| {
        while count() < wanted {
            let ended = store.try_wait().expect("a child");
            assert!(ended.is_none(), "fd-store has ended with {ended:?}");
            assert!(start.elapsed() < TIMEOUT, "{} runs", count());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait_for(1);
    fs::remove_file(&program).expect("the program is there");
    let before = count();
    wait_for(before + 2);
    kill_process(Pid::from_child(&store), Signal::TERM).expect("a process");
    store.wait().expect("a child");
}

/// `vgpu fd-store`, started by a program that ignores SIGCHLD, with a script as its executor.
fn store_with_ignored_sigchld(script: &str) -> Child {
    Command::new("env")
        .args(["--ignore-signal=CHLD", env!("CARGO_BIN_EXE_vgpu")])
        .args(["fd-store", "--", "/bin/sh", "-c", script])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts")
}

/// A program that ignores SIGCHLD starts `vgpu fd-store`, which inherits that. The status of an
/// executor decides what follows all the same.
#[test]
fn fd_store_knows_the_status_of_an_executor_with_sigchld_ignored_before() {
    let scratch = Scratch::new("fd-store-sigchld");
    let runs = scratch.path().join("runs");
    let runs_shown = runs.display();
    let count = || fs::read_to_string(&runs).map_or(0, |text| text.lines().count());
    let end = |mut store: Child| {
        wait_for("the end", || store.try_wait().expect("a child").is_some());
        let output = store.wait_with_output().expect("a child");
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), log)
    };

    // The executor does not inherit it either.
    let script = format!("grep SigIgn /proc/self/status >> {runs_shown}; exit 0");
    let (status, log) = end(store_with_ignored_sigchld(&script));
    assert_eq!((status, count()), (Some(0), 1), "{log}");
    let line = fs::read_to_string(&runs).expect("a file");
    let ignored = line.trim().rsplit_once('\t').expect("a value").1;
    let ignored = u64::from_str_radix(ignored, 16).expect("a number");
    assert_eq!(ignored >> (Signal::CHILD.as_raw() - 1) & 1, 0, "{line}");
    fs::remove_file(&runs).expect("a file");

    let script =
        format!("trap 'exit 0' TERM; echo run >> {runs_shown}; while :; do sleep 0.05; done");
    let store = store_with_ignored_sigchld(&script);
    wait_for("an executor", || count() == 1);
    kill_process(Pid::from_child(&store), Signal::TERM).expect("a process");
    let (status, log) = end(store);
    assert_eq!((status, count()), (Some(0), 1), "{log}");
    fs::remove_file(&runs).expect("a file");

    let store = store_with_ignored_sigchld(&format!("echo run >> {runs_shown}; exit 3"));
    wait_for("three executors", || count() >= 3);
    kill_process(Pid::from_child(&store), Signal::TERM).expect("a process");
    let (_, log) = end(store);
    assert!(log.contains("ended with exit status: 3"), "{log}");
}

/// Sets the number of descriptors that another process may have open.
fn limit_descriptors(process: &Child, most: u64) {
    let limits = Rlimit {
        current: Some(most),
        maximum: getrlimit(Resource::Nofile).maximum,
    };
    let process = Some(Pid::from_child(process));
    prlimit(process, Resource::Nofile, limits).expect("a process of this user");
}

/// No executor can be started for a moment. A store that keeps files waits and tries again; one
/// without files ends with the reason.
#[test]
fn fd_store_with_files_tries_again_when_no_executor_can_be_started() {
    let scratch = Scratch::new("fd-store-start");
    let at = |name: &str| scratch.path().join(name);
    let (control, socket) = (at("control.sock"), at("vm1.sock"));
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let endpoint = format!("unix:{}", scratch.socket().display());
    for has_machine in [false, true] {
        let mut command = vgpu(&["fd-store", "--", env!("CARGO_BIN_EXE_vgpu"), "serve"]);
        command
            .args(["--threads", "1", "--memory", "64M", "--config", "/dev/null"])
            .args(["--vm", &vm, "--listen", &endpoint])
            .args([Path::new("--control"), &control]);
        let mut serve = Serve::of(command);
        let dump = || {
            let mut dump = vgpu(&["dump", "--control"]);
            let output = dump.arg(&control).output().expect("a program");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let executor = |serve: &Serve| children(serve.child.id()).first().copied();
        let machine = has_machine.then(|| Machine::plug(&socket));
        if let Some(machine) = &machine {
            machine.guest().alloc(64);
            wait_for("the files to be kept", || dump().contains(KEPT));
        }
        let first = executor(&serve).expect("an executor");
        // A new process needs a descriptor.
        limit_descriptors(&serve.child, 3);
        kill_process(Pid::from_raw(first).expect("a pid"), Signal::KILL).expect("it runs");
        let Some(machine) = machine else {
            let (status, log) = serve.wait();
            assert_eq!(status.code(), Some(1), "{log}");
            continue;
        };
        wait_for("the end of the executor", || executor(&serve).is_none());
        // The next attempt comes before that, and fails.
        thread::sleep(Duration::from_millis(1500));
        let ended = serve.child.try_wait().expect("a child");
        assert!(ended.is_none(), "fd-store has ended with {ended:?}");
        assert_eq!(executor(&serve), None);
        limit_descriptors(&serve.child, 1024);
        wait_for("the next executor", || dump().contains(KEPT));
        machine.guest().alloc(64);
        drop(machine);
        serve.signal(Signal::TERM);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
        assert!(log.contains("no executor can be started"), "{log}");
        assert!(log.contains("3 file descriptors are kept"), "{log}");
    }
}

/// `vgpu fd-store` ends when it is told to end, and by no other signal. The executor receives the
/// signals that are for it, each of them.
#[test]
fn fd_store_passes_signals_on() {
    let scratch = Scratch::new("fd-store-signals");
    let seen = scratch.path().join("seen");
    let script = format!(
        "for s in HUP TERM; do trap \"echo $s >> {0}\" $s; done; ulimit -Sn >> {0}; \
         while :; do sleep 0.05; done",
        seen.display()
    );
    let mut store = Command::new("/bin/sh");
    store
        .args([
            "-c",
            "ulimit -Sn 64; exec \"$0\" fd-store -- /bin/sh -c \"$1\"",
        ])
        .arg(env!("CARGO_BIN_EXE_vgpu"))
        .arg(&script)
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let mut store = store.spawn().expect("it starts");
    let pid = Pid::from_child(&store);
    let seen = || fs::read_to_string(&seen).unwrap_or_default();
    let mut wait_until = |what: &str, is_there: &dyn Fn(&str) -> bool| {
        let start = Instant::now();
        while !is_there(&seen()) {
            let ended = store.try_wait().expect("a child");
            assert!(ended.is_none(), "{what}: fd-store has ended with {ended:?}");
            assert!(start.elapsed() < TIMEOUT, "{what}: {}", seen());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let count = |text: &str, signal: &str| text.lines().filter(|line| *line == signal).count();
    wait_until("a limit", &|text| text.ends_with('\n'));
    let limit = seen();
    let limit = limit.trim();
    let hard = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let is_raised = limit == "unlimited" || limit.parse().is_ok_and(|limit: u64| limit > 64);
    assert!(is_raised || hard.is_some_and(|hard| hard <= 64), "{limit}");
    let send = |signal| kill_process(pid, signal).expect("a process");
    send(Signal::QUIT);
    send(Signal::USR1);
    send(Signal::HUP);
    wait_until("SIGHUP", &|text| count(text, "HUP") == 1);
    send(Signal::HUP);
    wait_until("a second SIGHUP", &|text| count(text, "HUP") == 2);
    send(Signal::TERM);
    wait_until("SIGTERM", &|text| count(text, "TERM") == 1);
    // Later than signals that count as one.
    std::thread::sleep(Duration::from_millis(600));
    send(Signal::TERM);
    wait_until("a second SIGTERM", &|text| count(text, "TERM") == 2);
    // This executor never ends by itself.
    let start = Instant::now();
    while store.try_wait().expect("a child").is_none() {
        assert!(start.elapsed() < TIMEOUT, "the executor is not killed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The files of `vm1` in the output of `vgpu dump`.
const KEPT: &str =
    "files kept by the service manager: vgpu-vm1-bell, vgpu-vm1-line, vgpu-vm1-memory";

/// A mistake in the configuration, or a virtual machine that is taken out of it for a moment, does
/// not cost the machine its device.
#[test]
fn machine_that_is_missing_in_the_configuration_keeps_its_device() {
    let scratch = Scratch::new("missing-machine");
    let at = |name: &str| scratch.path().join(name);
    let (config, control, socket) = (at("vgpu.toml"), at("control.sock"), at("vm1.sock"));
    let other_socket = at("other.sock");
    // The socket, and the rest of the table.
    let configure = |machine: Option<(&Path, &str)>| {
        let machine = machine.map_or(String::new(), |(socket, more)| {
            format!("[[guest]]\nname = \"vm1\"\nvm = {{ socket = {socket:?}, {more} }}\n")
        });
        fs::write(&config, machine).expect("a configuration");
    };
    let served = Some((&*socket, r#"window = "64M", silence = 0"#));
    configure(served);
    let mut command = vgpu(&["fd-store", "--", env!("CARGO_BIN_EXE_vgpu"), "serve"]);
    command
        .args(["--threads", "1", "--memory", "64M"])
        .arg("--listen")
        .arg(format!("unix:{}", scratch.socket().display()))
        .args([Path::new("--config"), &config])
        .args([Path::new("--control"), &control]);
    let serve = Serve::of(command);
    let ask = |what: &str| {
        let mut command = vgpu(&[what, "--control"]);
        let output = command.arg(&control).output().expect("it starts");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let reload = |machine| {
        configure(machine);
        let said = ask("reload");
        assert!(said.contains("the configuration was reloaded"), "{said}");
    };
    let computes = |machine: &Machine| {
        let mut guest: Guest = machine.guest();
        let buffer = guest.alloc_with(&[7; 64]);
        assert_eq!(guest.read(buffer, 0, 64), [7; 64]);
    };
    let machine = Machine::plug(&socket);
    computes(&machine);
    wait_for("the files to be kept", || ask("dump").contains(KEPT));
    let executor = || children(serve.child.id()).first().copied();
    let first = executor().expect("an executor");

    configure(None);
    kill_process(Pid::from_raw(first).expect("a pid"), Signal::TERM).expect("it runs");
    wait_for("the next executor", || {
        executor().is_some_and(|pid| pid != first) && ask("dump").contains(KEPT)
    });
    assert!(!socket.exists(), "the machine is served");
    reload(served);
    computes(&machine);
    // A reload without the machine, and those that open its listener again.
    reload(None);
    assert!(!socket.exists(), "the machine is served");
    reload(served);
    computes(&machine);
    // The machine has the window of its start.
    for other in [
        (&*socket, r#"window = "64M", silence = 60"#),
        (&*socket, r#"window = "128M", silence = 60"#),
        (&*other_socket, r#"window = "128M", silence = 60"#),
    ] {
        reload(Some(other));
        assert!(other.0.exists(), "{other:?} is not served");
        computes(&machine);
    }
    assert!(!socket.exists(), "the last socket is there");

    // Nobody waits for a QEMU that has ended.
    reload(None);
    drop(machine);
    wait_for("the files to be released", || {
        let dump = ask("dump");
        !dump.is_empty() && !dump.contains("files kept")
    });
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    for said in [
        "the configuration does not have this virtual machine, whose QEMU is running",
        "vgpu-vm1-memory, vgpu-vm1-bell, vgpu-vm1-line",
        "QEMU has ended; the configuration does not have this virtual machine",
    ] {
        assert!(log.contains(said), "{said:?} is not in {log}");
    }
    // The first executor was passed no file, which is no mistake.
    assert!(!log.contains("cannot be used"), "{log}");
}

/// The end of the store ends its executor, also where a virtual machine depends on the files. The
/// machine loses its device, which the next executor gives to the next QEMU.
#[test]
fn killed_fd_store_ends_its_executor_and_the_next_one_serves() {
    let scratch = Scratch::new("fd-store-killed");
    let at = |name: &str| scratch.path().join(name);
    let (control, socket) = (at("control.sock"), at("vm1.sock"));
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let endpoint = format!("unix:{}", scratch.socket().display());
    for has_machine in [false, true] {
        let start = || {
            let mut command = vgpu(&["fd-store", "--", env!("CARGO_BIN_EXE_vgpu"), "serve"]);
            command
                .args(["--threads", "1", "--memory", "64M", "--config", "/dev/null"])
                .args(["--vm", &vm, "--listen", &endpoint])
                .args([Path::new("--control"), &control]);
            Serve::of(command)
        };
        let is_served = || {
            let asked = vgpu(&["dump", "--control"]).arg(&control).output();
            asked.expect("a program").status.success()
        };
        let serve = start();
        let machine = has_machine.then(|| Machine::plug(&socket));
        if let Some(machine) = &machine {
            machine.guest().alloc(64);
        }
        serve.signal(Signal::KILL);
        wait_for("the end of the executor", || !is_served());
        if let Some(machine) = &machine {
            // QEMU sees the end of its device's server.
            let ended = std::io::Read::read(&mut &machine.line, &mut [0; 8]);
            assert!(matches!(ended, Ok(0)), "{ended:?}");
        }
        drop((serve, machine));
        let serve = start();
        Machine::plug(&socket).guest().alloc(64);
        serve.signal(Signal::TERM);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
    }
}

/// An executor that is stopped keeps nobody from its successor, which gets the machine's files. A
/// dump and SIGUSR1 say what the store keeps.
#[test]
fn fd_store_kills_an_executor_that_falls_silent() {
    kill_silent_executor(&[], Stdio::null());
}

/// Below a supervisor, signs of life and questions come over a pair of sockets that is the standard
/// input of the executor. The next executor has a new pair.
#[test]
fn supervised_fd_store_kills_an_executor_that_falls_silent() {
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("a pair");
    // There are no files of an earlier store.
    rustix::net::send(&ours, b"\"Complete\"", SendFlags::empty()).expect("room");
    // The supervisor is of the same version.
    let supervised = concat!("--supervised=", env!("VGPU_VERSION"));
    kill_silent_executor(&[supervised], theirs.into());
    // What the store has told its supervisor.
    let mut told = Vec::new();
    let mut message = [0; 4096];
    loop {
        match rustix::net::recv(&ours, &mut message, RecvFlags::DONTWAIT) {
            Ok((len, _)) if len > 0 => {
                told.push(String::from_utf8_lossy(&message[..len]).into_owned());
            }
            _ => break,
        }
    }
    for said in ["Alive", "\"Store\":{\"name\":\"vgpu-vm1-memory\"}"] {
        assert!(told.iter().any(|text| text.contains(said)), "{told:?}");
    }
}

/// Starts a store with these arguments, stops its executor, and looks at what follows.
fn kill_silent_executor(arguments: &[&str], stdin: Stdio) {
    let scratch = Scratch::new("fd-store-watchdog");
    let at = |name: &str| scratch.path().join(name);
    let (control, socket) = (at("control.sock"), at("vm1.sock"));
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let mut command = vgpu(&["fd-store", "--watchdog", "4"]);
    command
        .args(arguments)
        .args(["--", env!("CARGO_BIN_EXE_vgpu"), "serve", "--engine", "cpu"])
        .args(["--threads", "1"])
        .args(["--memory", "64M", "--config", "/dev/null", "--vm", &vm])
        .arg("--listen")
        .arg(format!("unix:{}", scratch.socket().display()))
        .args([Path::new("--control"), &control]);
    let serve = Serve::with_stdin(command, stdin);
    let dump = || {
        let asked = vgpu(&["dump", "--control"]).arg(&control).output();
        String::from_utf8(asked.expect("a program").stdout).expect("text")
    };
    let machine = Machine::plug(&socket);
    machine.guest().alloc(64);
    let executor = || children(serve.child.id()).first().copied();
    let first = executor().expect("an executor");
    let store = serve.child.id();
    let says = |start: u64, pid: i32| {
        format!(
            "vgpu fd-store, process {}: executor {pid}, start {start}, ",
            store
        )
    };
    let keeps = "; keeps 3 files: vgpu-vm1-";
    wait_for("the store's state", || {
        let text = dump();
        text.contains(&says(1, first)) && text.contains(keeps)
    });
    wait_for("the machine's slots", || {
        dump().contains("virtual machine vm1: epoch 0x")
    });
    kill_process(Pid::from_raw(first).expect("a pid"), Signal::STOP).expect("it runs");
    wait_for("the next executor", || {
        executor().is_some_and(|pid| pid != first) && dump().contains("vgpu fd-store")
    });
    let next = executor().expect("an executor");
    wait_for("the store's state", || dump().contains(&says(2, next)));
    machine.guest().alloc(64);
    serve.signal(Signal::USR1);
    std::thread::sleep(Duration::from_millis(1500));
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let killed = log
        .lines()
        .find(|line| line.contains("and is killed: the next executor gets"));
    let silent = format!("pid {first} has not run for ");
    assert!(killed.is_some_and(|line| line.contains(&silent)), "{log}");
    let own = format!("dump: {}", says(2, next));
    assert!(log.contains(&own) && log.contains(keeps), "{log}");
}

/// An executor that a guest has taken over can start threads. The store, to which a supervisor says
/// how many are usual, kills it, and no executor that has as many as it may have.
#[test]
fn fd_store_kills_an_executor_with_too_many_threads() {
    const ENGINE: usize = 48;
    for (limit, is_killed) in [(ENGINE - 8, true), (ENGINE + 32, false)] {
        let scratch = Scratch::new("fd-store-threads");
        let socket = scratch.socket();
        let limit_argument = format!("--max-threads={limit}");
        let endpoint = format!("unix:{}", socket.display());
        let program = env!("CARGO_BIN_EXE_vgpu");
        let mut command = vgpu(&["fd-store", &limit_argument, "--", program, "serve"]);
        command
            .args(["--memory", "64M", "--config", "/dev/null"])
            .args(["--listen", &endpoint])
            .arg(format!("--threads={ENGINE}"));
        let serve = match is_killed {
            false => Serve::of(command),
            // The executor may never be ready.
            true => Serve {
                child: { command.stdin(Stdio::null()) }
                    .stdout(Stdio::null())
                    .stderr(Stdio::piped())
                    .spawn()
                    .expect("it starts"),
                ready: String::new(),
            },
        };
        let executor = || children(serve.child.id()).first().copied();
        wait_for("an executor", || executor().is_some());
        let first = executor();
        match is_killed {
            true => wait_for("another executor", || {
                let next = executor();
                next.is_some() && next != first
            }),
            // The store looks once a second.
            false => {
                thread::sleep(Duration::from_millis(2500));
                assert_eq!(executor(), first);
            }
        }
        serve.signal(Signal::TERM);
        let (_, log) = serve.wait();
        let says = format!("threads, its limit is {limit}, and is killed: the next executor gets");
        assert_eq!(log.contains(&says), is_killed, "{log}");
    }
}

/// What a service manager does not keep is said with numbers and the consequence.
#[test]
fn fd_store_that_keeps_too_little_is_reported() {
    let scratch = Scratch::new("fd-store-small");
    let notify = scratch.path().join("notify");
    let _manager = std::os::unix::net::UnixDatagram::bind(&notify).expect("a socket");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let run = |variables: &[(&str, &str)]| {
        let mut command = vgpu(&["serve", "--threads", "1", "--memory", "64M", "--vm", &vm]);
        command.env_remove("NOTIFY_SOCKET").env_remove("FDSTORE");
        command.args(["--config", "/dev/null"]);
        command.envs(variables.iter().copied());
        let serve = Serve::of(command);
        let machine = Machine::plug(&socket);
        machine.guest();
        serve.signal(Signal::TERM);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
        log
    };
    let lost = "the virtual machine has no vGPU until its QEMU is started again";
    let says = |log: &str, wanted: &str| {
        let line = log.lines().find(|line| line.contains(wanted));
        line.is_some_and(|line| line.contains("WARN") && line.contains(lost))
    };
    let log = run(&[]);
    let none = "1 virtual machines have 3 files, and no service manager keeps them";
    assert!(says(&log, none), "{log}");
    let path = notify.to_str().expect("text");
    let log = run(&[("NOTIFY_SOCKET", path), ("FDSTORE", "2")]);
    let small = "have 3 files, and the service manager keeps at most 2 (FileDescriptorStoreMax=)";
    assert!(says(&log, small), "{log}");
    let refused = "vgpu-vm1-line may not be kept: it is file 3 of this process";
    assert!(says(&log, refused), "{log}");
    let log = run(&[("NOTIFY_SOCKET", path), ("FDSTORE", "3")]);
    assert!(!log.contains(lost), "{log}");
    // Nobody receives.
    let gone = scratch.path().join("gone").display().to_string();
    let log = run(&[("NOTIFY_SOCKET", &gone)]);
    let failed = "vgpu-vm1-memory may not be kept: file 1 cannot be passed to the service manager";
    assert!(says(&log, failed), "{log}");
}
