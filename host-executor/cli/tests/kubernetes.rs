//! `vgpu kubernetes` between a stand-in for the kubelet and an executor.

#[path = "../../tests/common/mod.rs"]
mod common;
mod kubelet;
mod served;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::slice;
use std::thread;
use std::time::{Duration, Instant};

use common::{Guest, TIMEOUT, add, bytes};
use kubelet::{CONTAINER, Container, Kubelet, OWN_POD};
use rustix::process::{Pid, Signal, kill_process};
use served::{Scratch, Serve, vgpu};
use vgpu_executor::added_guests::{AddedGuest, GuestList, GuestRequest};
use vgpu_executor::status::{GuestStatus, Status};
use vgpu_executor::{GuestChange, OperatorRequest, Quota, control};
use vgpu_kubernetes::api::device_plugin::{DevicePluginOptions, RegisterRequest, VERSION};
use vgpu_kubernetes::{MEMORY, SEAT};
use vgpu_transport::link::unix::connect;
use vgpu_transport::wire::GraphId;

/// Bytes of the executor's memory, and of a slice.
const MEMORY_BYTES: u64 = 64 << 20;
const SLICE: u64 = 1 << 20;

/// The slices of the node.
const SLICES: usize = (MEMORY_BYTES / SLICE) as usize;

/// The seats of the node.
const SEATS: usize = 8;

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended
        let _ = self.0.wait();
    }
}

/// A node: a kubelet, an executor and a device plugin.
struct Node {
    plugin: Option<Process>,
    serve: Option<Serve>,
    kubelet: Kubelet,
    scratch: Scratch,
}

impl Node {
    fn new(test: &str) -> Node {
        let scratch = Scratch::new(test);
        fs::write(scratch.path().join("libggml-vgpu.so"), "the guest plugin").expect("a file");
        let mut node = Node {
            kubelet: Kubelet::start(&scratch.path().join("kubelet")),
            plugin: None,
            serve: None,
            scratch,
        };
        node.start_executor();
        node.start_plugin();
        node.wait_until_healthy();
        node
    }

    fn control(&self) -> PathBuf {
        self.scratch.path().join("control.sock")
    }

    fn sockets(&self) -> PathBuf {
        self.scratch.path().join("pods")
    }

    fn start_executor(&mut self) {
        let control = self.control();
        let control = control.to_str().expect("text");
        let more = ["--control", control, "--log", "error"];
        self.serve = Some(Serve::start(&self.scratch.socket(), &more));
    }

    fn plugin_command(&self) -> Command {
        let at = |name: &str| self.scratch.path().join(name);
        let mut command = vgpu(&["kubernetes", "--interval", "0.05", "--grace", "0.2"]);
        command
            .arg("--control")
            .arg(self.control())
            .arg("--kubelet")
            .arg(at("kubelet"))
            .arg("--sockets")
            .arg(self.sockets())
            .arg("--plugin")
            .arg(at("libggml-vgpu.so"))
            .args(["--seats", &SEATS.to_string(), "--slice", "1M"])
            .args(["--pod", OWN_POD])
            .stdout(Stdio::null())
            .stderr(Stdio::inherit());
        command
    }

    fn start_plugin(&mut self) {
        let child = self.plugin_command().spawn().expect("the command starts");
        self.plugin = Some(Process(child));
    }

    fn wait_until_healthy(&self) {
        self.kubelet.wait_for_devices(SEAT, SEATS, 0);
        self.kubelet.wait_for_devices(MEMORY, SLICES, 0);
    }

    fn status(&self) -> Status {
        control::status(&self.control()).expect("the executor answers")
    }

    /// The guest of a pod, if the executor has it.
    fn guest_of(&self, pod: &str) -> Option<GuestStatus> {
        let name = format!("default.{pod}.{CONTAINER}");
        let mut guests = self.status().guests.into_iter();
        guests.find(|guest| guest.name == name)
    }

    fn list(&self) -> GuestList {
        let list = control::guests(&self.control(), &GuestRequest::List, TIMEOUT);
        list.expect("the executor answers")
    }

    /// Waits until the executor has no guest of a container, and no folder is left.
    fn wait_until_empty(&self) {
        wait_for("no guest and no folder", || {
            let folders = fs::read_dir(self.sockets()).expect("the folder").count();
            self.list().guests.is_empty() && folders == 0
        });
    }
}

/// Makes the executor carry out what it must not refuse.
fn perform(control: &Path, request: &OperatorRequest) {
    let outcome = control::perform(control, request).expect("the executor answers");
    assert!(outcome.ok, "{}", outcome.message);
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A program in a container, which finds the executor by the container's environment.
fn program(container: &Container) -> Guest {
    let socket = container.socket();
    let mut guest = Guest::new(Box::new(connect(&socket, TIMEOUT).expect("a connection")));
    guest.hello();
    guest
}

fn compute(guest: &mut Guest) {
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GraphId(1), &add(2, a, a, a));
    guest.submit(GraphId(1));
    assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
}

#[test]
fn a_container_is_a_guest_with_a_quota() {
    let node = Node::new("k8s-pod");
    let before = node.status().engine.memory_free;
    let container = node.kubelet.run("a", 1, 8).expect("it starts");
    let plugin = Path::new(&container.environment["GGML_BACKEND_PATH"]);
    let plugin = fs::read(container.on_host(plugin)).expect("the plugin");
    assert_eq!(plugin, b"the guest plugin");
    assert_eq!(container.environment["VGPU_REQUIRED"], "1");

    let mut guest = program(&container);
    compute(&mut guest);
    guest.alloc(4 << 20);
    let refusal = guest.refusal(5 << 20);
    assert!(refusal.contains("guest default.a.llama"), "{refusal}");
    let known = node.guest_of("a").expect("a guest");
    assert_eq!(known.quota, Some(8 * SLICE));
    assert_eq!(known.sessions, 1);

    // Another container has a socket and a quota of its own.
    let other = node.kubelet.run("b", 1, 16).expect("it starts");
    assert_ne!(other.socket(), container.socket());
    let mut other = program(&other);
    other.alloc(12 << 20);
    // Without a number of slices a container shares what no quota reserves.
    let shared = node.kubelet.run("c", 1, 0).expect("it starts");
    program(&shared).alloc(20 << 20);
    assert_eq!(node.guest_of("c").expect("a guest").quota, None);

    // A socket is of its container only: on the host, others do not reach it.
    let mode = |path: &Path| {
        fs::metadata(path)
            .expect("it is there")
            .permissions()
            .mode()
            & 0o777
    };
    assert_eq!(mode(&node.sockets()), 0o700);
    assert_eq!(mode(&container.socket()), 0o666);

    drop((guest, other));
    for pod in ["a", "b", "c"] {
        node.kubelet.remove(pod);
    }
    node.wait_until_empty();
    let names: Vec<_> = node
        .status()
        .guests
        .into_iter()
        .map(|guest| guest.name)
        .collect();
    assert_eq!(names, ["-"]);
    wait_for("all memory is free", || {
        node.status().engine.memory_free == before
    });
    assert_eq!(node.kubelet.faults(), Vec::<String>::new());
}

#[test]
fn what_a_container_cannot_have_is_refused() {
    let node = Node::new("k8s-refused");
    let kubelet = &node.kubelet;
    for (resource, id) in [
        (SEAT, format!("seat-{SEATS}")),
        (SEAT, "../seat-0".into()),
        (SEAT, "1Mi-0".into()),
        (MEMORY, format!("1Mi-{SLICES}")),
        (MEMORY, "2Mi-0".into()),
        (MEMORY, "seat-0".into()),
    ] {
        let error = kubelet
            .allocate(resource, slice::from_ref(&id))
            .unwrap_err();
        assert!(error.contains(&format!("{id:?}")), "{error}");
    }
    let error = kubelet.admit("two", 2, 0).unwrap_err();
    assert!(error.contains("2 seats"), "{error}");

    // Memory is of a seat. The pod waits, and says why.
    kubelet.admit("memory", 0, 4).expect("it is admitted");
    let error = kubelet.start_container("memory").unwrap_err();
    assert!(
        error.contains("container llama asks for vgpu.dev/memory"),
        "{error}"
    );
    kubelet.remove("memory");

    // More than there is.
    let error = kubelet.admit("large", 1, SLICES + 1).unwrap_err();
    assert!(error.contains("64 of 65"), "{error}");
    for n in 0..SEATS {
        kubelet.run(&format!("p{n}"), 1, 1).expect("a seat");
    }
    assert!(kubelet.admit("late", 1, 1).is_err());
    kubelet.remove("p3");
    // The seat is free at once, with its name for another container.
    let next = kubelet.run("next", 1, 2).expect("a seat");
    compute(&mut program(&next));
    assert_eq!(
        node.guest_of("next").expect("a guest").quota,
        Some(2 * SLICE)
    );
    assert!(node.guest_of("p3").is_none());
}

#[test]
fn the_stand_in_refuses_what_the_kubelet_refuses() {
    let node = Node::new("k8s-standin");
    let valid = RegisterRequest {
        version: VERSION.into(),
        endpoint: "vgpu-gpu.sock".into(),
        resource_name: SEAT.into(),
        options: Some(DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: false,
        }),
    };
    node.kubelet
        .register(valid.clone())
        .expect("the plugin itself");
    let refused = |change: &dyn Fn(&mut RegisterRequest)| {
        let mut request = valid.clone();
        change(&mut request);
        node.kubelet.register(request).unwrap_err()
    };
    for version in ["", "v1", "v1beta2"] {
        let error = refused(&|request| request.version = version.into());
        assert!(error.contains("unsupported version"), "{error}");
    }
    let long = format!("vgpu.dev/{}", "x".repeat(64));
    for name in [
        "gpu",
        "vgpu.dev/",
        "/gpu",
        "Vgpu.dev/gpu",
        "vgpu.dev/g pu",
        "vgpu.dev/-gpu",
        "vgpu.dev/a/b",
        "kubernetes.io/gpu",
        "node.kubernetes.io/gpu",
        "requests.vgpu.dev/gpu",
        &long,
    ] {
        let error = refused(&|request| request.resource_name = name.into());
        assert!(error.contains("invalid resource name"), "{name}: {error}");
    }
    let error = refused(&|request| request.endpoint = "missing.sock".into());
    assert!(error.contains("failed to dial"), "{error}");
    let error = refused(&|request| request.options = None);
    assert!(error.contains("options"), "{error}");
}

#[test]
fn devices_are_healthy_while_the_executor_answers() {
    let mut node = Node::new("k8s-health");
    let container = node.kubelet.run("a", 1, 8).expect("it starts");
    compute(&mut program(&container));

    // An executor that does not answer, although its sockets take connections.
    let stopped = node.serve.as_ref().expect("it runs");
    stopped.signal(Signal::STOP);
    node.kubelet.wait_for_devices(SEAT, 0, SEATS);
    node.kubelet.wait_for_devices(MEMORY, 0, SLICES);
    assert!(node.kubelet.admit("b", 1, 1).is_err());
    stopped.signal(Signal::CONT);
    node.wait_until_healthy();

    // One that is killed, and starts again without any guest: a container has its socket again, in
    // the folder that it has mounted.
    let mut killed = node.serve.take().expect("it runs");
    killed.child.kill().expect("it runs");
    killed.wait();
    node.kubelet.wait_for_devices(SEAT, 0, SEATS);
    let error = node.kubelet.start_container("a").unwrap_err();
    assert!(error.contains("control.sock"), "{error}");
    node.start_executor();
    node.wait_until_healthy();
    wait_for("the guest is back", || node.guest_of("a").is_some());
    let mut guest = program(&container);
    compute(&mut guest);
    assert!(guest.refusal(9 << 20).contains("default.a.llama"));

    // One that ends in order removes its sockets.
    let ended = node.serve.take().expect("it runs");
    ended.signal(Signal::TERM);
    ended.wait();
    node.kubelet.wait_for_devices(MEMORY, 0, SLICES);
    node.start_executor();
    node.wait_until_healthy();
    wait_for("the guest is back", || node.guest_of("a").is_some());
    compute(&mut program(&container));
}

#[test]
fn devices_are_unhealthy_while_the_executor_drains() {
    let node = Node::new("k8s-drain");
    let container = node.kubelet.run("a", 1, 8).expect("it starts");
    let mut guest = program(&container);
    compute(&mut guest);
    assert_eq!(node.list().unavailable, None);

    perform(&node.control(), &OperatorRequest::drain(None));
    let unavailable = node.list().unavailable;
    assert_eq!(
        unavailable.as_deref(),
        Some("the executor drains: it accepts no new sessions")
    );
    node.kubelet.wait_for_devices(SEAT, 0, SEATS);
    node.kubelet.wait_for_devices(MEMORY, 0, SLICES);
    assert!(node.kubelet.admit("b", 1, 1).is_err());
    // A container that runs keeps its guest, and its program goes on.
    compute(&mut guest);
    assert_eq!(node.guest_of("a").expect("a guest").sessions, 1);

    perform(&node.control(), &OperatorRequest::Undrain);
    node.wait_until_healthy();
    let container = node.kubelet.run("b", 1, 8).expect("it starts");
    compute(&mut program(&container));
    assert_eq!(node.kubelet.faults(), Vec::<String>::new());
}

#[test]
fn restarts_of_plugin_and_kubelet_lose_nothing() {
    let mut node = Node::new("k8s-restart");
    let container = node.kubelet.run("a", 1, 8).expect("it starts");
    let mut guest = program(&container);
    compute(&mut guest);

    // A kubelet that starts removes the plugin's sockets. The kubelet does not know its pods for
    // longer than the grace of their guests.
    let before = node.kubelet.registrations();
    node.kubelet.restart();
    node.wait_until_healthy();
    assert_eq!(
        node.kubelet.registrations(),
        before + 2,
        "once for each resource"
    );
    thread::sleep(Duration::from_secs(1));
    compute(&mut program(&container));
    node.kubelet.learn_pods();
    let container_b = node.kubelet.run("b", 1, 8).expect("it starts");
    assert_ne!(container_b.socket(), container.socket());

    // The plugin is killed. A pod ends meanwhile.
    node.plugin = None;
    node.kubelet.wait_for_devices(SEAT, 0, SEATS);
    compute(&mut program(&container));
    node.kubelet.remove("b");
    node.start_plugin();
    node.wait_until_healthy();
    wait_for("the guest of the pod that has ended is gone", || {
        node.guest_of("b").is_none()
    });
    compute(&mut program(&container));

    // The plugin ends in order: its sockets are gone, and the guests stay.
    let mut plugin = node.plugin.take().expect("it runs");
    let pid = Pid::from_child(&plugin.0);
    kill_process(pid, Signal::TERM).expect("it runs");
    assert!(plugin.0.wait().expect("it ends").success());
    assert!(
        !node
            .scratch
            .path()
            .join("kubelet/device-plugins/vgpu-gpu.sock")
            .exists()
    );
    compute(&mut program(&container));

    // The session has lasted all the time, and is still the guest's.
    compute(&mut guest);
    assert_eq!(node.guest_of("a").expect("a guest").sessions, 1);
}

/// The threads of a process.
fn threads(process: u32) -> usize {
    let tasks = fs::read_dir(format!("/proc/{process}/task"));
    tasks.expect("the process runs").count()
}

/// The open files of a process.
fn files(process: u32) -> usize {
    let files = fs::read_dir(format!("/proc/{process}/fd"));
    files.map_or(0, Iterator::count)
}

#[test]
fn a_hundred_pods_come_and_go() {
    let mut node = Node::new("k8s-hundred");
    let executor = node.serve.as_ref().expect("it runs").child.id();
    // The first pod starts what stays.
    let first = node.kubelet.run("first", 1, 4).expect("it starts");
    compute(&mut program(&first));
    node.kubelet.remove("first");
    node.wait_until_empty();
    let figures = |node: &Node| {
        let engine = node.status().engine;
        (engine.memory_free, threads(executor), files(executor))
    };
    let before = figures(&node);

    let mut running: Vec<(String, Guest)> = Vec::new();
    for n in 0..100 {
        if running.len() == SEATS {
            let (name, guest) = running.remove(n % SEATS);
            drop(guest);
            node.kubelet.remove(&name);
        }
        let name = format!("p{n}");
        let container = node.kubelet.run(&name, 1, 4).expect("it starts");
        let mut guest = program(&container);
        compute(&mut guest);
        assert!(guest.refusal(5 * SLICE).contains(&name));
        assert_eq!(
            node.guest_of(&name).expect("a guest").quota,
            Some(4 * SLICE)
        );
        running.push((name, guest));
        if n % 25 == 24 {
            node.kubelet.restart();
            node.wait_until_healthy();
            node.kubelet.learn_pods();
            for (_, guest) in &mut running {
                compute(guest);
            }
        }
    }
    assert_eq!(node.list().guests.len(), SEATS);
    for (name, guest) in running {
        drop(guest);
        node.kubelet.remove(&name);
    }
    node.wait_until_empty();
    wait_for("the executor is as before", || figures(&node) == before);
    let status = node.status();
    assert!(status.sessions.is_empty(), "{:?}", status.sessions);
    assert_eq!(status.guests.len(), 1, "{:?}", status.guests);
    assert_eq!(node.kubelet.free(SEAT).len(), SEATS);
    assert_eq!(node.kubelet.free(MEMORY).len(), SLICES);
    assert_eq!(node.kubelet.faults(), Vec::<String>::new());
}

#[test]
fn guests_are_added_and_removed_through_the_control_socket() {
    let scratch = Scratch::new("added");
    let (control, config) = (
        scratch.path().join("control.sock"),
        scratch.path().join("c.toml"),
    );
    let named = format!(
        "[[guest]]\nname = \"named\"\nmemory = \"16M\"\nlisten = [\"unix:{}\"]\n",
        scratch.path().join("named.sock").display()
    );
    fs::write(&config, &named).expect("a file");
    let (control_text, config_text) = (control.to_str(), config.to_str());
    let more = [
        "--control",
        control_text.expect("text"),
        "--config",
        config_text.expect("text"),
    ];
    for isolation in [&[][..], &["--isolate", "--guest-memory", "8M"]] {
        let arguments = [&more[..], isolation].concat();
        let serve = Serve::start(&scratch.socket(), &arguments);
        let ask = |request: &GuestRequest| control::guests(&control, request, TIMEOUT);
        let guest = |name: &str, memory| AddedGuest {
            name: name.into(),
            socket: scratch.path().join(format!("{name}.sock")),
            mode: 0o600,
            memory: Some(memory),
            weight: 2,
        };
        let refused = |request: AddedGuest| {
            let error = ask(&GuestRequest::Add(request)).unwrap_err();
            error.to_string()
        };
        let list = ask(&GuestRequest::List).expect("a list");
        // The engine has 64 MiB, and a guest of the configuration 16.
        assert_eq!((list.guests.len(), list.memory), (0, 48 << 20));
        assert_eq!(list.unavailable, None);

        let added = guest("pod", 16 << 20);
        let list = ask(&GuestRequest::Add(added.clone())).expect("it is added");
        assert_eq!(list.guests, slice::from_ref(&added));
        let mut program = serve.guest(&added.socket);
        program.alloc(12 << 20);
        assert!(program.refusal(5 << 20).contains("out of memory"));
        // A larger quota, also for programs that are connected.
        let larger = guest("pod", 24 << 20);
        ask(&GuestRequest::Add(larger.clone())).expect("it is changed");
        let status = control::status(&control).expect("a status");
        let known = status.guests.iter().find(|guest| guest.name == "pod");
        let known = known.expect("the guest");
        assert_eq!((known.quota, known.weight), (Some(24 << 20), 2));

        let error = refused(guest("huge", 41 << 20));
        assert!(
            error.contains("add up to") || error.contains("in all"),
            "{error}"
        );
        let error = refused(guest("named", 1 << 20));
        assert!(
            error.contains("the configuration names guest named"),
            "{error}"
        );
        let moved = AddedGuest {
            socket: scratch.path().join("moved.sock"),
            ..guest("pod", 1 << 20)
        };
        assert!(refused(moved).contains("was added with the socket"));
        let nowhere = AddedGuest {
            socket: scratch.path().join("missing/pod.sock"),
            ..guest("other", 1 << 20)
        };
        assert!(refused(nowhere).contains("directory"));
        let list = ask(&GuestRequest::List).expect("a list");
        let expected = slice::from_ref(&larger);
        assert_eq!(list.guests, expected, "refusals change nothing");

        // A reload keeps the guest, and its listener.
        let outcome = control::reload(&control).expect("an answer");
        assert!(outcome.ok, "{}", outcome.message);
        drop(program);
        serve.guest(&larger.socket);
        let clash = named.replace("\"named\"", "\"pod\"");
        fs::write(&config, clash).expect("a file");
        let outcome = control::reload(&control).expect("an answer");
        assert!(!outcome.ok, "{}", outcome.message);
        fs::write(&config, &named).expect("a file");

        let remove = GuestRequest::Remove { name: "pod".into() };
        let list = ask(&remove).expect("it is removed");
        assert!(list.guests.is_empty());
        assert!(!larger.socket.exists());
        ask(&remove).expect("nothing to remove");
        // A guest of the configuration is no added one.
        let named = GuestRequest::Remove {
            name: "named".into(),
        };
        ask(&named).expect("nothing to remove");
        assert!(scratch.path().join("named.sock").exists());
        drop(serve);
    }
}

#[test]
fn changes_of_the_operator_and_added_guests_keep_each_other() {
    let scratch = Scratch::new("set-added");
    let at = |name: &str| scratch.path().join(name);
    let (control, config) = (at("control.sock"), at("c.toml"));
    let named = at("named.sock");
    let text = format!(
        "control.socket = \"{}\"\n[[guest]]\nname = \"named\"\nmemory = \"16M\"\n\
         listen = [\"unix:{}\"]\n",
        control.display(),
        named.display()
    );
    fs::write(&config, text).expect("a file");
    let config = config.to_str().expect("text");
    for isolation in [&[][..], &["--isolate", "--guest-memory", "8M"]] {
        let arguments = [&["--config", config][..], isolation].concat();
        let serve = Serve::start(&scratch.socket(), &arguments);
        let ask = |request| {
            let list = control::guests(&control, &request, TIMEOUT);
            list.expect("the executor answers")
        };
        let set = |guest: &str, megabytes: u64, weight| {
            let change = GuestChange {
                guest: guest.into(),
                memory: Some(Quota::Bytes(megabytes << 20)),
                weight: Some(weight),
            };
            perform(&control, &OperatorRequest::Set(change));
        };
        let guest = |name: &str| AddedGuest {
            name: name.into(),
            socket: at(&format!("{name}.sock")),
            mode: 0o600,
            memory: Some(4 << 20),
            weight: 2,
        };
        let limits = || {
            let status = control::status(&control).expect("a status");
            let guests = status.guests.into_iter().filter(|guest| guest.name != "-");
            let limits = guests.map(|guest| {
                let quota = guest.quota.expect("a quota");
                format!("{} {} {}", guest.name, quota >> 20, guest.weight)
            });
            let mut limits: Vec<_> = limits.collect();
            limits.sort();
            limits
        };

        set("named", 20, 5);
        // The engine has 64 MiB.
        assert_eq!(ask(GuestRequest::List).memory, 44 << 20);
        ask(GuestRequest::Add(guest("a")));
        assert_eq!(limits(), ["a 4 2", "named 20 5"]);
        set("a", 6, 7);
        set("named", 12, 3);
        assert_eq!(limits(), ["a 6 7", "named 12 3"]);
        ask(GuestRequest::Add(guest("b")));
        // What the client has said before changes nothing.
        ask(GuestRequest::Add(guest("a")));
        assert_eq!(limits(), ["a 6 7", "b 4 2", "named 12 3"]);
        for (socket, kept) in [(at("a.sock"), 5), (named.clone(), 11), (at("b.sock"), 3)] {
            let mut program = serve.guest(&socket);
            program.alloc(kept << 20);
            let refusal = program.refusal(2 << 20);
            assert!(refusal.contains("out of memory"), "{refusal}");
        }
        ask(GuestRequest::Remove { name: "b".into() });
        assert_eq!(limits(), ["a 6 7", "named 12 3"]);
        // The client and the file have the last word.
        let larger = AddedGuest {
            memory: Some(8 << 20),
            ..guest("a")
        };
        ask(GuestRequest::Add(larger));
        assert_eq!(limits(), ["a 8 2", "named 12 3"]);
        set("a", 6, 7);
        let outcome = control::reload(&control).expect("an answer");
        assert!(outcome.ok, "{}", outcome.message);
        assert_eq!(limits(), ["a 8 2", "named 16 1"]);
        drop(serve);
    }
}
