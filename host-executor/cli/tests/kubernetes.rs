//! `vgpu kubernetes` between a stand-in for the kubelet and an executor.

#[path = "../../tests/common/mod.rs"]
mod common;
mod kubelet;
mod served;

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::slice;
use std::thread;
use std::time::{Duration, Instant};

use common::{Guest, TIMEOUT, compute, wait_for};
use kubelet::{CONTAINER, Container, Kubelet, OWN_POD};
use rustix::process::{Pid, Signal, kill_process};
use served::{Scratch, Serve, vgpu};
use vgpu_executor::added_guests::{AddedGuest, GuestList, GuestRequest};
use vgpu_executor::status::{GuestStatus, Status};
use vgpu_executor::{GuestChange, OperatorRequest, Quota, control};
use vgpu_kubernetes::api::device_plugin::{DevicePluginOptions, RegisterRequest, VERSION};
use vgpu_kubernetes::{MEMORY, SEAT, WEIGHT};
use vgpu_transport::link::unix::connect;
use vgpu_transport::wire::{DeviceCount, DeviceIndex, Offer, Reply, Request};

/// Bytes of the executor's memory, and of a slice.
const MEMORY_BYTES: u64 = 64 << 20;
const SLICE: u64 = 1 << 20;

/// The slices of the node.
const SLICES: usize = (MEMORY_BYTES / SLICE) as usize;

/// The seats of the node.
const SEATS: usize = 8;

/// The weights of the node.
const WEIGHTS: usize = 1000;

/// What a program is told whose guest is gone.
const REMOVED: &str = "the host has removed this guest, and ends its sessions";

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
            .arg("--sysfs")
            .arg(at("sysfs"))
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
        self.kubelet.wait_for_devices(WEIGHT, WEIGHTS, 0);
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

/// A program in a container, which finds the executor by the container's environment.
fn program(container: &Container) -> Guest {
    let socket = container.socket();
    let mut guest = Guest::new(Box::new(connect(&socket, TIMEOUT).expect("a connection")));
    guest.hello();
    guest
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
    // An Ollama takes the library in the folder that it is told, below that of its own libraries.
    let folder = &container.environment["OLLAMA_LLM_LIBRARY"];
    let library = format!("/usr/lib/ollama/{folder}/libggml-vgpu.so");
    let library = fs::read(container.on_host(Path::new(&library))).expect("the plugin");
    assert_eq!(library, plugin);
    assert_eq!(container.environment["OLLAMA_FLASH_ATTENTION"], "1");

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

    for pod in ["a", "b", "c"] {
        node.kubelet.remove(pod);
    }
    node.wait_until_empty();
    // Programs that outlive their pods have no executor any more, and no memory there.
    wait_for("no session is left", || node.status().sessions.is_empty());
    for guest in [guest, other] {
        assert_eq!(guest.ended(), REMOVED);
    }
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
fn a_container_that_outlives_its_pod_reaches_nothing_of_the_next_one() {
    let node = Node::new("k8s-outlives");
    let mut old = node.kubelet.run("a", 1, 8).expect("it starts");
    let mut before = "a";
    // Also the next pod of a StatefulSet, which has the same name.
    for next in ["b", "b"] {
        let mut guest = program(&old);
        compute(&mut guest);
        guest.alloc(6 << 20);
        // What the old container has mounted is this folder, whatever is at its path later.
        let socket = old.socket();
        let folder = File::open(socket.parent().expect("a folder")).expect("it is there");
        let mounted = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()));
        let connect = || connect(&mounted.join("vgpu.sock"), TIMEOUT);
        drop(connect().expect("the executor, until the pod is deleted"));

        // Deleted by force: the kubelet gives its devices to the next pod while it still runs.
        node.kubelet.remove(before);
        let container = node.kubelet.run(next, 1, 16).expect("it starts");
        assert_eq!(container.socket(), socket, "it has the seat of the old one");
        assert!(
            connect().is_err(),
            "the old container is the guest of the new pod"
        );
        assert_eq!(fs::read_dir(&mounted).expect("a folder").count(), 0);
        wait_for("the session of the old container ends", || {
            node.status().sessions.is_empty()
        });
        assert_eq!(guest.ended(), REMOVED);
        let mut guest = program(&container);
        compute(&mut guest);
        wait_for("the memory of the old container is free", || {
            node.guest_of(next).expect("a guest").usage.memory < 1 << 20
        });
        guest.alloc(14 << 20);
        let known = node.guest_of(next).expect("a guest");
        assert_eq!((known.sessions, known.quota), (1, Some(16 * SLICE)));
        drop(guest);
        wait_for("its memory is free for the next program", || {
            node.status().sessions.is_empty()
        });
        (old, before) = (container, next);
    }
    assert_eq!(node.list().guests.len(), 1);
    assert_eq!(node.kubelet.faults(), Vec::<String>::new());
}

#[test]
fn a_seat_is_given_while_no_executor_runs_and_not_while_one_is_silent() {
    let mut node = Node::new("k8s-allocate");
    let seat = ["seat-0".to_owned()];
    let stopped = node.serve.as_ref().expect("it runs");
    stopped.signal(Signal::STOP);
    // The executor may have a guest with this seat, which cannot be removed.
    let error = node.kubelet.allocate(SEAT, &seat).unwrap_err();
    assert!(error.contains("control.sock"), "{error}");
    stopped.signal(Signal::CONT);
    node.wait_until_healthy();
    let mut killed = node.serve.take().expect("it runs");
    killed.child.kill().expect("it runs");
    killed.wait();
    // Without an executor there is no guest. The container starts when there is one.
    node.kubelet.allocate(SEAT, &seat).expect("it is given");
}

#[test]
fn memory_that_an_operator_gives_a_container_is_no_slice_of_the_node() {
    let node = Node::new("k8s-set");
    node.kubelet.run("a", 1, 8).expect("it starts");
    let set = |megabytes: u64| {
        let change = GuestChange {
            guest: "default.a.llama".into(),
            memory: Some(Quota::Bytes(megabytes << 20)),
            weight: None,
        };
        let request = OperatorRequest::Set(change);
        control::perform(&node.control(), &request).expect("the executor answers")
    };
    assert!(set(20).ok);
    node.kubelet.wait_for_devices(MEMORY, SLICES - 12, 12);
    // The slices of the container itself are among the healthy ones.
    let own = node.kubelet.devices_of("a", MEMORY);
    assert!(own.iter().all(|(_, health)| health == "Healthy"), "{own:?}");
    let error = node.kubelet.admit("b", 1, 45).unwrap_err();
    assert!(error.contains("44 of 45"), "{error}");
    let container = node.kubelet.run("b", 1, 44).expect("it starts");
    program(&container).alloc(40 << 20);
    // All memory is given away.
    let outcome = set(21);
    assert!(!outcome.ok);
    let numbers = "add up to 65.0 MiB, the engine has 64.0 MiB";
    assert!(outcome.message.contains(numbers), "{}", outcome.message);
    // Less than its slices gives none back: they are the container's.
    assert!(set(4).ok);
    node.wait_until_healthy();
    let error = node.kubelet.admit("c", 1, 13).unwrap_err();
    assert!(error.contains("12 of 13"), "{error}");
    node.kubelet.run("c", 1, 12).expect("it starts");
    assert_eq!(node.kubelet.faults(), Vec::<String>::new());
}

#[test]
fn weights_of_a_container_are_its_share_of_the_time() {
    let node = Node::new("k8s-weight");
    let kubelet = &node.kubelet;
    let asked = [(MEMORY, 4), (WEIGHT, 5), (SEAT, 1)];
    kubelet.admit_with("a", &asked).expect("it is admitted");
    let container = kubelet.start_container("a").expect("it starts");
    compute(&mut program(&container));
    kubelet.run("b", 1, 4).expect("it starts");
    let weight = |pod| node.guest_of(pod).expect("a guest").weight;
    assert_eq!((weight("a"), weight("b")), (5, 1));
    // A weight is one of a seat.
    kubelet
        .admit_with("c", &[(WEIGHT, 2)])
        .expect("it is admitted");
    let error = kubelet.start_container("c").unwrap_err();
    let expected = "container llama asks for vgpu.dev/weight without vgpu.dev/gpu";
    assert!(error.contains(expected), "{error}");
    assert_eq!(kubelet.faults(), Vec::<String>::new());
}

/// The bytes of both GPUs of the stand-in for the driver: an L4 and an H100, divided by 64.
const GPUS: [u64; 2] = [(24 << 30) / 64, (80 << 30) / 64];

#[test]
fn each_gpu_has_slices_and_a_numa_node() {
    let mut node = Node::new("k8s-gpus");
    for (address, number) in [("0000:01:00.0", "0\n"), ("0000:02:00.0", "1\n")] {
        let folder = node
            .scratch
            .path()
            .join("sysfs/bus/pci/devices")
            .join(address);
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join("numa_node"), number).expect("a file");
    }
    node.serve = None;
    node.kubelet.wait_for_devices(SEAT, 0, SEATS);
    let listen = format!("--listen=unix:{}", node.scratch.socket().display());
    let control = format!("--control={}", node.control().display());
    let mut serve = vgpu(&["serve", "--engine=cuda:0,1", &listen, &control]);
    let library = vgpu_driver_standin::folder().expect("the library");
    serve
        .env("LD_LIBRARY_PATH", library)
        .env("VGPU_STANDIN_SMS", "3")
        .env("VGPU_STANDIN_DEVICES", "L4,H100")
        // No folder, so that the kernels are not checked at the start.
        .env("VGPU_CACHE", "/dev/null");
    node.serve = Some(Serve::of(serve));
    let slices = GPUS.map(|bytes| usize::try_from(bytes / SLICE).expect("a number"));
    let kubelet = &node.kubelet;
    kubelet.wait_for_devices(MEMORY, slices[0] + slices[1], 0);
    kubelet.wait_for_devices(SEAT, SEATS, 0);
    // The driver says where the GPUs are after a moment.
    wait_for("a NUMA node for each slice", || {
        kubelet.nodes(MEMORY).len() == slices[0] + slices[1]
    });
    // The list of each resource is sent on its own.
    wait_for("the NUMA nodes of both GPUs for each seat", || {
        let nodes = kubelet.nodes(SEAT);
        nodes.len() == SEATS && nodes.values().all(|nodes| nodes[..] == [0, 1])
    });
    let near = kubelet.nodes(MEMORY);
    assert_eq!(
        (&near["gpu0-1Mi-0"][..], &near["gpu1-1Mi-0"][..]),
        (&[0][..], &[1][..])
    );

    // A container has its slices on one GPU, if one has enough, and sees that GPU only.
    let engine_of = |pod: &str, count: usize| {
        let container = kubelet.run(pod, 1, count).expect("it starts");
        let mut guest = Guest::new(Box::new(connect(&container.socket(), TIMEOUT).expect("it")));
        let Reply::Welcome {
            engine,
            memory_total,
            devices,
            ..
        } = guest.hello()
        else {
            unreachable!("hello() has checked it")
        };
        (engine, memory_total / SLICE, devices)
    };
    let one = DeviceCount(1);
    assert_eq!(engine_of("small", 200), ("cuda:0".into(), 200, one));
    assert_eq!(engine_of("large", 600), ("cuda:1".into(), 600, one));
    let error = kubelet.admit("huge", 1, slices[0] + slices[1]).unwrap_err();
    assert!(error.contains("are free"), "{error}");
    // More than one has left: the rest is on the other one, each with its quota.
    let left = slices[1] - 600;
    let (engine, quota, devices) = engine_of("both", left + 100);
    assert_eq!(
        (engine, quota, devices),
        ("cuda:0".into(), 100, DeviceCount(2))
    );
    let added = node.list().guests.into_iter();
    let both = added
        .into_iter()
        .find(|guest| guest.name == "default.both.llama");
    let both = both.expect("a guest");
    let quotas: Vec<_> = { both.devices.iter() }
        .map(|quota| (quota.device, quota.memory / SLICE))
        .collect();
    assert_eq!(quotas, [(0, 100), (1, left as u64)]);
    assert_eq!(kubelet.faults(), Vec::<String>::new());
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
        before + 3,
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
    wait_for("the end of the last program's session", || {
        node.guest_of("a").expect("a guest").sessions == 1
    });
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

/// A guest some of whose processes may still end: it tries until it is served.
fn guest_after_others(serve: &Serve, socket: &Path) -> Guest {
    let start = Instant::now();
    loop {
        let mut guest = serve.connect(socket);
        let hello = Request::Hello {
            offer: Offer::SERVED,
            name: "test".into(),
            device: DeviceIndex(0),
        };
        match guest.ask(&hello) {
            Reply::Welcome { protocol, .. } => {
                guest.protocol = protocol;
                return guest;
            }
            Reply::Ended { reason } if start.elapsed() < TIMEOUT => {
                assert!(
                    reason.contains("processes of this guest are ending"),
                    "{reason}"
                );
            }
            other => panic!("{other:?}"),
        }
        thread::sleep(Duration::from_millis(50));
    }
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
            devices: Vec::new(),
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
        guest_after_others(&serve, &larger.socket);
        let clash = named.replace("\"named\"", "\"pod\"");
        fs::write(&config, clash).expect("a file");
        let outcome = control::reload(&control).expect("an answer");
        assert!(!outcome.ok, "{}", outcome.message);
        fs::write(&config, &named).expect("a file");

        // Its programs end with it, and those of other guests do not.
        let mut program = guest_after_others(&serve, &larger.socket);
        program.alloc(20 << 20);
        let mut other = serve.guest(&scratch.path().join("named.sock"));
        // This one has not sent its first message.
        let mut late = serve.connect(&larger.socket);
        let remove = GuestRequest::Remove { name: "pod".into() };
        let list = ask(&remove).expect("it is removed");
        assert!(list.guests.is_empty());
        wait_for("the session has ended", || {
            let status = control::status(&control).expect("a status");
            status.sessions.len() == 1
        });
        assert_eq!(program.ended(), REMOVED);
        late.send(&Request::Hello {
            offer: Offer::SERVED,
            name: "late".into(),
            device: DeviceIndex(0),
        });
        let reason = late.ended();
        // The process of an isolated guest may end before it has read the message.
        let expected = "the host has no guest pod any more";
        let is_isolated = !isolation.is_empty();
        assert!(reason.contains(expected) || is_isolated, "{reason}");
        other.alloc(8 << 20);
        // The same guest comes again.
        ask(&GuestRequest::Add(larger.clone())).expect("it is added");
        guest_after_others(&serve, &larger.socket).alloc(20 << 20);
        ask(&remove).expect("it is removed");
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
            devices: Vec::new(),
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

/// Each container of the manifests drops all capabilities and adds none.
#[test]
fn the_device_plugin_and_the_driver_of_the_manifests_have_no_capabilities() {
    for manifest in [
        include_str!("../../../deploy/kubernetes/device-plugin.yaml"),
        include_str!("../../../deploy/kubernetes/dra-driver.yaml"),
    ] {
        let lines = |text| manifest.lines().filter(move |line| line.trim() == text);
        let images = { manifest.lines() }.filter(|line| line.trim().starts_with("image:"));
        let containers = images.count();
        assert_ne!(containers, 0, "{manifest}");
        for line in [r#"drop: ["ALL"]"#, "allowPrivilegeEscalation: false"] {
            assert_eq!(lines(line).count(), containers, "{line}");
        }
        for word in ["add:", "privileged:"] {
            assert!(!manifest.contains(word), "{word}");
        }
    }
}
