//! `vgpu kubernetes --dra` between stand-ins for the kubelet and the API server, and an executor.

mod api_server;
#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use api_server::{Answers, ApiServer, TOKEN};
use common::{Guest, TIMEOUT, compute, wait_for};
use rustix::process::Signal;
use serde_json::{Value, json};
use served::{Scratch, Serve, vgpu};
use tokio::runtime::Runtime;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};
use vgpu_executor::added_guests::{AddedGuest, GuestList, GuestRequest};
use vgpu_executor::status::{GuestStatus, Status};
use vgpu_executor::{GuestChange, OperatorRequest, Quota, control};
use vgpu_kubernetes::DRIVER;
use vgpu_kubernetes::api::dra::{
    Claim, Device, DraPluginClient, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
    SERVICE,
};
use vgpu_kubernetes::api::plugin_registration::{
    DRA_PLUGIN, InfoRequest, RegistrationClient, RegistrationStatus,
};
use vgpu_transport::link::unix::connect;

const MIB: u64 = 1 << 20;

/// The node, and its slice at the API server.
const NODE: &str = "node-1";
const SLICE: &str = "/apis/resource.k8s.io/v1/resourceslices/node-1-vgpu.dev";

/// What a program is told whose guest is gone.
const REMOVED: &str = "the host has removed this guest, and ends its sessions";

struct Node {
    driver: Option<Child>,
    serve: Option<Serve>,
    api: ApiServer,
    runtime: Runtime,
    scratch: Scratch,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop_driver();
    }
}

impl Node {
    /// A node whose driver has published its devices. `is_consumable`: claims can share a device.
    fn new(test: &str, is_consumable: bool) -> Node {
        let scratch = Scratch::new(test);
        let at = |name: &str| scratch.path().join(name);
        fs::write(at("libggml-vgpu.so"), "the guest plugin").expect("a file");
        fs::create_dir_all(at("kubelet/plugins_registry")).expect("a folder");
        fs::create_dir(at("account")).expect("a folder");
        fs::write(at("account/token"), format!("{TOKEN}\n")).expect("a file");
        let api = ApiServer::start(is_consumable);
        let object = json!({"metadata": {"name": NODE, "uid": "uid-of-the-node"}});
        api.set(&format!("/api/v1/nodes/{NODE}"), Some(object));
        let mut node = Node {
            driver: None,
            serve: None,
            api,
            runtime: runtime(),
            scratch,
        };
        node.start_executor();
        node.start_driver();
        node.wait_for_devices(1);
        node
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn start_executor(&mut self) {
        let control = self.at("control.sock").display().to_string();
        let more = ["--control", &control, "--log", "error"];
        self.serve = Some(Serve::start(&self.scratch.socket(), &more));
    }

    fn start_driver(&mut self) {
        let mut command = vgpu(&["kubernetes", "--dra", "--interval", "0.05", "--node", NODE]);
        for (flag, path) in [
            ("--control", "control.sock"),
            ("--kubelet", "kubelet"),
            ("--sockets", "pods"),
            ("--plugin", "libggml-vgpu.so"),
            ("--cdi", "cdi"),
            ("--account", "account"),
        ] {
            command.arg(flag).arg(self.at(path));
        }
        let server = format!("http://{}", self.api.address);
        command.args(["--api-server", &server, "--slice", "4M", "--seats", "8"]);
        command.stdout(Stdio::null()).stderr(Stdio::inherit());
        self.driver = Some(command.spawn().expect("the command starts"));
    }

    fn stop_driver(&mut self) {
        if let Some(mut driver) = self.driver.take() {
            let _ = driver.kill(); // it may have ended
            let _ = driver.wait();
        }
    }

    /// The devices at the API server.
    fn devices(&self) -> Vec<Value> {
        let slice = self.api.get(SLICE).unwrap_or_default();
        slice["spec"]["devices"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    }

    fn wait_for_devices(&self, count: usize) {
        wait_for("the devices at the API server", || {
            self.api.get(SLICE).is_some() && self.devices().len() == count
        });
    }

    fn status(&self) -> Status {
        control::status(&self.at("control.sock")).expect("the executor answers")
    }

    fn list(&self) -> GuestList {
        let list = control::guests(&self.at("control.sock"), &GuestRequest::List, TIMEOUT);
        list.expect("the executor answers")
    }

    fn guest(&self, claim: &str) -> Option<GuestStatus> {
        let name = format!("default.{claim}");
        { self.status().guests.into_iter() }.find(|guest| guest.name == name)
    }

    /// The driver as the kubelet knows it, which looks into its folder of plugins.
    fn kubelet(&self) -> DraPluginClient<Channel> {
        self.kubelet_on(&self.runtime)
    }

    /// As [`kubelet`](Node::kubelet), for another thread.
    fn kubelet_on(&self, runtime: &Runtime) -> DraPluginClient<Channel> {
        let folder = self.at("kubelet/plugins_registry");
        let registry = || fs::read_dir(&folder).expect("the folder").flatten();
        wait_for("a socket of the driver", || registry().count() == 1);
        let socket = registry().next().expect("a socket").path();
        // As gRPC for Go has it, with which the kubelet connects there.
        let authority = socket.display().to_string().replace('/', "%2F");
        let origin = format!("http://{authority}").parse().expect("an authority");
        let mut registration = RegistrationClient::new(channel(runtime, &socket, origin));
        let info = runtime.block_on(registration.get_info(InfoRequest {}));
        let info = info.expect("an answer").into_inner();
        assert_eq!(
            (info.plugin_type.as_str(), info.name.as_str()),
            (DRA_PLUGIN, DRIVER)
        );
        assert_eq!(info.supported_versions, [SERVICE]);
        let status = RegistrationStatus {
            plugin_registered: true,
            error: String::new(),
        };
        let told = registration.notify_registration_status(status);
        runtime.block_on(told).expect("an answer");
        let origin = Uri::from_static("http://localhost");
        DraPluginClient::new(channel(runtime, Path::new(&info.endpoint), origin))
    }

    /// A claim that the scheduler has given a part of the device.
    fn allocate(&self, name: &str, uid: &str, consumed: &Value) -> Claim {
        let object = json!({
            "metadata": {"name": name, "namespace": "default", "uid": uid},
            "status": {"allocation": {"devices": {"results": [{
                "driver": DRIVER, "pool": NODE, "device": "vgpu-0", "request": "gpu",
                "consumedCapacity": consumed,
            }]}}},
        });
        self.api.set(&path_of(name), Some(object));
        Claim {
            namespace: "default".into(),
            name: name.into(),
            uid: uid.into(),
        }
    }

    fn prepare(&self, claim: &Claim) -> Result<Vec<Device>, String> {
        let request = NodePrepareResourcesRequest {
            claims: vec![claim.clone()],
        };
        let mut kubelet = self.kubelet();
        let answer = self
            .runtime
            .block_on(kubelet.node_prepare_resources(request));
        let mut claims = answer.expect("an answer").into_inner().claims;
        let answer = claims.remove(&claim.uid).expect("an entry for the claim");
        match answer.error.is_empty() {
            true => Ok(answer.devices),
            false => Err(answer.error),
        }
    }

    fn end(&self, claim: &Claim) -> String {
        let request = NodeUnprepareResourcesRequest {
            claims: vec![claim.clone()],
        };
        let mut kubelet = self.kubelet();
        let answer = self
            .runtime
            .block_on(kubelet.node_unprepare_resources(request));
        let mut claims = answer.expect("an answer").into_inner().claims;
        claims
            .remove(&claim.uid)
            .expect("an entry for the claim")
            .error
    }

    /// What a container with these devices gets, by the files of the container runtime: its
    /// environment, and the socket on the host.
    fn container(&self, devices: &[Device]) -> (Vec<String>, PathBuf) {
        let [id] = &devices[0].cdi_device_ids[..] else {
            panic!("{devices:?}")
        };
        let (kind, name) = id.split_once('=').expect("kind and name");
        let files = fs::read_dir(self.at("cdi")).expect("a folder").flatten();
        let specs = files.filter_map(|file| {
            let text = fs::read_to_string(file.path()).expect("a file");
            let spec: Value = serde_json::from_str(&text).expect("JSON");
            let device = &spec["devices"][0];
            (spec["kind"] == kind && device["name"] == name).then_some(spec)
        });
        let specs: Vec<Value> = specs.collect();
        assert_eq!(specs.len(), 1, "one file has the device");
        let mount = |path: &str| {
            let mounts = specs[0]["containerEdits"]["mounts"].as_array();
            let mut mounts = mounts.expect("mounts").iter();
            let mount = mounts.find(|mount| mount["containerPath"] == path);
            let host = mount.and_then(|mount| mount["hostPath"].as_str());
            PathBuf::from(host.expect("a mount"))
        };
        let plugin = fs::read(mount("/usr/lib/vgpu/libggml-vgpu.so")).expect("the plugin");
        assert_eq!(plugin, b"the guest plugin");
        let env = specs[0]["devices"][0]["containerEdits"]["env"].as_array();
        let env = env.expect("variables").iter();
        let env = env.map(|one| one.as_str().expect("text").to_owned());
        (env.collect(), mount("/run/vgpu").join("vgpu.sock"))
    }

    /// A program in a container of the claim.
    fn program(&self, devices: &[Device]) -> Guest {
        let (_, socket) = self.container(devices);
        let mut guest = Guest::new(Box::new(connect(&socket, TIMEOUT).expect("a connection")));
        guest.hello();
        guest
    }

    /// No guest, folder or file of a claim is left.
    fn wait_until_empty(&self) {
        wait_for("no guest and no file", || {
            let files = |name: &str| fs::read_dir(self.at(name)).map_or(0, Iterator::count);
            self.list().guests.is_empty() && files("pods") == 0 && files("cdi") == 0
        });
    }
}

fn runtime() -> Runtime {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime")
}

fn channel(runtime: &Runtime, path: &Path, origin: Uri) -> Channel {
    let endpoint = Endpoint::from_shared(format!("unix:{}", path.display()));
    let endpoint = endpoint.expect("a path").origin(origin);
    let start = Instant::now();
    loop {
        match runtime.block_on(endpoint.connect()) {
            Ok(channel) => return channel,
            Err(error) => assert!(start.elapsed() < TIMEOUT, "{error:?}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn path_of(claim: &str) -> String {
    format!("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{claim}")
}

#[test]
fn a_claim_is_a_guest_with_its_part_of_the_device() {
    let node = Node::new("dra-claim", true);
    let devices = node.devices();
    assert_eq!(devices[0]["capacity"]["memory"]["value"], "64Mi");
    assert_eq!(devices[0]["allowMultipleAllocations"], true);
    let consumed = json!({"memory": "8Mi", "compute": "300", "claims": "1"});
    let claim = node.allocate("llama", "a-1", &consumed);
    let prepared = node.prepare(&claim).expect("it is prepared");
    assert_eq!(prepared.len(), 1);
    assert_eq!(prepared[0].request_names, ["gpu"]);
    assert_eq!(
        (
            prepared[0].pool_name.as_str(),
            prepared[0].device_name.as_str()
        ),
        (NODE, "vgpu-0")
    );
    let (variables, _) = node.container(&prepared);
    for variable in [
        "GGML_BACKEND_PATH=/usr/lib/vgpu/libggml-vgpu.so",
        "VGPU_ENDPOINT=unix:/run/vgpu/vgpu.sock",
        "VGPU_REQUIRED=1",
        "OLLAMA_LLM_LIBRARY=vgpu",
    ] {
        assert!(variables.iter().any(|one| one == variable), "{variables:?}");
    }

    let mut guest = node.program(&prepared);
    compute(&mut guest);
    guest.alloc(4 * MIB);
    let refusal = guest.refusal(5 * MIB);
    assert!(refusal.contains("guest default.llama"), "{refusal}");
    let known = node.guest("llama").expect("a guest");
    assert_eq!((known.quota, known.weight), (Some(8 * MIB), 300));

    // The kubelet asks again, as for a second pod with the claim. Nothing changes for the program.
    assert_eq!(node.prepare(&claim).expect("it is prepared"), prepared);
    compute(&mut guest);
    // Another claim has a socket and a quota of its own.
    let other = node.allocate("other", "b-1", &json!({"memory": "16Mi", "compute": "10"}));
    let other_devices = node.prepare(&other).expect("it is prepared");
    assert_ne!(
        node.container(&other_devices).1,
        node.container(&prepared).1
    );
    node.program(&other_devices).alloc(12 * MIB);

    assert_eq!(node.end(&claim), "");
    assert_eq!(guest.ended(), REMOVED);
    assert!(node.guest("llama").is_none() && node.guest("other").is_some());
    // What is gone has ended.
    assert_eq!(node.end(&claim), "");
    assert_eq!(node.end(&other), "");
    node.wait_until_empty();
    assert_eq!(node.api.refused(), Vec::<String>::new());
}

#[test]
fn without_consumable_capacity_a_claim_has_the_device_to_itself() {
    let node = Node::new("dra-whole", false);
    let device = &node.devices()[0];
    assert!(device.get("allowMultipleAllocations").is_none(), "{device}");
    let mut claim = node.allocate("llama", "a-1", &json!({}));
    let prepared = node.prepare(&claim).expect("it is prepared");
    compute(&mut node.program(&prepared));
    assert_eq!(node.guest("llama").expect("a guest").quota, Some(64 * MIB));
    // What the API server has dropped is not written again and again.
    let writes = node.api.writes();
    node.kubelet();
    thread::sleep(Duration::from_millis(300));
    assert_eq!(node.api.writes(), writes);
    // The next claim of the name, which the kubelet asks for before it has ended the last one.
    claim = node.allocate("llama", "a-2", &json!({}));
    let next = node.prepare(&claim).expect("it is prepared");
    assert_ne!(node.container(&next).1, node.at("pods/a-1/vgpu.sock"));
    compute(&mut node.program(&next));
    assert_eq!(node.list().guests.len(), 1);
    assert_eq!(node.end(&claim), "");
    node.wait_until_empty();
}

#[test]
fn a_claim_that_cannot_have_its_part_is_refused() {
    let node = Node::new("dra-refused", true);
    let unknown = Claim {
        namespace: "default".into(),
        name: "nobody".into(),
        uid: "n-1".into(),
    };
    let error = node.prepare(&unknown).expect_err("there is none");
    assert_eq!(error, "there is no claim default/nobody");
    let path = Claim {
        uid: "../account".into(),
        ..unknown.clone()
    };
    let error = node.prepare(&path).expect_err("the id is a path");
    assert!(error.contains("the id \"../account\""), "{error}");
    assert!(node.end(&path).contains("the id \"../account\""));
    assert!(node.at("account/token").exists());

    let large = node.allocate("large", "l-1", &json!({"memory": "100Mi"}));
    let error = node.prepare(&large).expect_err("the device has less");
    assert!(error.contains("add up to 100.0 MiB"), "{error}");
    let nothing = node.allocate("nothing", "l-2", &json!({"memory": "0"}));
    let error = node.prepare(&nothing).expect_err("no memory");
    assert!(error.contains("memory is \"0\""), "{error}");
    let huge = node.allocate("huge", "l-3", &json!({"memory": "9223372036854775807"}));
    assert!(node.prepare(&huge).is_err());
    node.wait_until_empty();
}

#[test]
fn restarts_lose_no_claim() {
    let mut node = Node::new("dra-restarts", true);
    let consumed = json!({"memory": "8Mi", "compute": "20"});
    let claim = node.allocate("llama", "a-1", &consumed);
    let prepared = node.prepare(&claim).expect("it is prepared");
    let mut guest = node.program(&prepared);
    compute(&mut guest);

    // The driver: the program goes on meanwhile.
    node.stop_driver();
    compute(&mut guest);
    node.start_driver();
    compute(&mut guest);
    assert_eq!(node.prepare(&claim).expect("it is prepared"), prepared);
    compute(&mut guest);

    // The executor: its guest is there again, with its quota.
    let serve = node.serve.take().expect("it runs");
    serve.signal(Signal::TERM);
    serve.wait();
    node.wait_for_devices(0);
    assert!(node.prepare(&claim).is_err());
    node.start_executor();
    node.wait_for_devices(1);
    wait_for("the guest of the claim", || node.guest("llama").is_some());
    let known = node.guest("llama").expect("a guest");
    assert_eq!((known.quota, known.weight), (Some(8 * MIB), 20));
    compute(&mut node.program(&prepared));

    // The kubelet, which removes the slice when it starts. The driver looks at once.
    let removed = Instant::now();
    node.api.set(SLICE, None);
    node.kubelet();
    node.wait_for_devices(1);
    assert!(removed.elapsed() < Duration::from_secs(10));
    // What somebody else has made of the slice.
    let mut slice = node.api.get(SLICE).expect("a slice");
    slice["spec"]["devices"] = json!([]);
    slice["spec"]["pool"]["generation"] = json!(70);
    node.api.set(SLICE, Some(slice));
    node.kubelet();
    node.wait_for_devices(1);

    // A claim that ends while no driver runs, and that no kubelet ends any more.
    node.stop_driver();
    node.api.set(&path_of("llama"), None);
    node.start_driver();
    node.wait_until_empty();
    assert_eq!(node.api.refused(), Vec::<String>::new());
}

#[test]
fn an_executor_that_drains_has_no_devices_and_keeps_its_claims() {
    let node = Node::new("dra-drain", true);
    let claim = node.allocate("llama", "a-1", &json!({"memory": "8Mi"}));
    let prepared = node.prepare(&claim).expect("it is prepared");
    let mut guest = node.program(&prepared);
    let perform = |request: &OperatorRequest| {
        let outcome = control::perform(&node.at("control.sock"), request);
        assert!(outcome.expect("an answer").ok);
    };
    perform(&OperatorRequest::drain(None));
    node.wait_for_devices(0);
    compute(&mut guest);
    perform(&OperatorRequest::Undrain);
    node.wait_for_devices(1);
    assert!(node.guest("llama").is_some());
}

/// While the API server does not answer, or knows nothing of claims, those that are prepared go on,
/// and the kubelet can end them.
#[test]
fn an_api_server_that_does_not_answer_ends_no_claim() {
    let mut node = Node::new("dra-silent", true);
    let part = json!({"memory": "4Mi"});
    let [first, second] = [("first", "a-1"), ("second", "b-1")].map(|(name, uid)| {
        let claim = node.allocate(name, uid, &part);
        (node.prepare(&claim).expect("it is prepared"), claim)
    });
    let mut guest = node.program(&first.0);
    compute(&mut guest);

    // The driver asks for all claims when it starts.
    for answers in [Answers::UnknownPath, Answers::Never] {
        node.stop_driver();
        node.api.set_answers(answers);
        node.start_driver();
        let again = node.prepare(&first.1).expect("it was prepared before");
        assert_eq!(again, first.0);
    }
    let late = node.allocate("late", "l-1", &part);
    let begin = Instant::now();
    let error = node.prepare(&late).expect_err("nothing answers");
    assert!(error.contains("no answer within 10s"), "{error}");
    assert!(
        begin.elapsed() < Duration::from_secs(30),
        "the kubelet has given up"
    );
    // The kubelet ends a claim while the driver waits for the API server for another one.
    let (asked, ended) = thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let begin = Instant::now();
            let runtime = runtime();
            let mut kubelet = node.kubelet_on(&runtime);
            let request = NodePrepareResourcesRequest {
                claims: vec![late.clone()],
            };
            let answer = runtime.block_on(kubelet.node_prepare_resources(request));
            answer.expect("an answer");
            begin.elapsed()
        });
        thread::sleep(Duration::from_secs(1));
        let begin = Instant::now();
        assert_eq!(node.end(&second.1), "");
        let ended = begin.elapsed();
        (asked.join().expect("no panic"), ended)
    });
    assert!(
        ended * 2 < asked,
        "{ended:?}, and {asked:?} for the other one"
    );
    assert!(node.guest("second").is_none());
    compute(&mut guest);

    node.api.set_answers(Answers::Right);
    node.prepare(&late).expect("it is prepared");
    assert_eq!(node.end(&late), "");
    assert_eq!(node.end(&first.1), "");
    node.wait_until_empty();
}

/// A claim without a template keeps its id when the scheduler gives it other parts of devices.
#[test]
fn a_claim_that_is_allocated_anew_is_another_guest() {
    let mut node = Node::new("dra-anew", true);
    let claim = node.allocate("llama", "a-1", &json!({"memory": "4Mi"}));
    let prepared = node.prepare(&claim).expect("it is prepared");
    let guest = node.program(&prepared);
    node.allocate("llama", "a-1", &json!({"memory": "8Mi"}));
    let anew = node.prepare(&claim).expect("it is prepared");
    assert_eq!(guest.ended(), REMOVED);
    assert_eq!(node.guest("llama").expect("a guest").quota, Some(8 * MIB));
    let guest = node.program(&anew);

    // Without the kubelet, the driver finds out by itself.
    node.allocate("llama", "a-1", &json!({"memory": "2Mi"}));
    node.stop_driver();
    node.start_driver();
    node.wait_until_empty();
    assert_eq!(guest.ended(), REMOVED);
}

/// One file that cannot be read stops nothing else, and the guest of its claim stays.
#[test]
fn a_file_that_cannot_be_read_stops_no_other_claim() {
    let node = Node::new("dra-unreadable", true);
    let claim = node.allocate("llama", "a-1", &json!({"memory": "4Mi"}));
    let prepared = node.prepare(&claim).expect("it is prepared");
    let mut guest = node.program(&prepared);
    fs::write(node.at("pods/a-1.json"), "no claim").expect("a file");
    let other = node.allocate("other", "b-1", &json!({"memory": "4Mi"}));
    let devices = node.prepare(&other).expect("it is prepared");
    compute(&mut node.program(&devices));
    compute(&mut guest);
    // Asked again, the driver writes the file again.
    assert_eq!(node.prepare(&claim).expect("it is prepared"), prepared);
    compute(&mut guest);
    let text = fs::read_to_string(node.at("pods/a-1.json")).expect("a file");
    assert!(text.contains("a-1"), "{text}");
    for claim in [claim, other] {
        assert_eq!(node.end(&claim), "");
    }
    node.wait_until_empty();
}

/// The guests of a device plugin that runs beside the driver stay, as in the time between them.
#[test]
fn guests_of_a_device_plugin_stay() {
    let node = Node::new("dra-beside", true);
    fs::create_dir(node.at("pods/seat-3")).expect("a folder");
    let guest = AddedGuest {
        name: "default.pod.llama".into(),
        socket: node.at("pods/seat-3/vgpu.sock"),
        mode: 0o666,
        memory: None,
        weight: 1,
        devices: Vec::new(),
    };
    let request = GuestRequest::Add(guest.clone());
    let added = control::guests(&node.at("control.sock"), &request, TIMEOUT);
    added.expect("an answer");
    let claim = node.allocate("llama", "a-1", &json!({"memory": "4Mi"}));
    node.prepare(&claim).expect("it is prepared");
    thread::sleep(Duration::from_millis(300));
    assert!(node.list().guests.contains(&guest));
    assert_eq!(node.end(&claim), "");
}

/// Memory that an operator gives a guest is none for further claims.
#[test]
fn memory_that_an_operator_gives_a_claim_is_none_of_the_device() {
    let node = Node::new("dra-raised", true);
    let claim = node.allocate("llama", "a-1", &json!({"memory": "4Mi"}));
    node.prepare(&claim).expect("it is prepared");
    let change = GuestChange {
        guest: "default.llama".into(),
        memory: Some(Quota::Bytes(20 * MIB)),
        weight: None,
    };
    let outcome = control::perform(&node.at("control.sock"), &OperatorRequest::Set(change));
    assert!(outcome.expect("an answer").ok);
    wait_for("a smaller device", || {
        node.devices()[0]["capacity"]["memory"]["value"] == "48Mi"
    });
}
