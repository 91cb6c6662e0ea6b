//! A stand-in for the kubelet: the services that device plugins use, as strict as the kubelet.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};
use vgpu_kubernetes::api::device_plugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, Device, DevicePluginClient, DevicePluginOptions, Empty,
    HEALTHY, ListAndWatchResponse, PreStartContainerRequest, PreferredAllocationRequest,
    RegisterRequest, Registration, RegistrationServer, UNHEALTHY, VERSION,
};
use vgpu_kubernetes::api::pod_resources::{
    ContainerDevices, ContainerResources, ListPodResourcesRequest, ListPodResourcesResponse,
    PodResources, PodResourcesLister, PodResourcesListerServer,
};
use vgpu_kubernetes::{MEMORY, SEAT};

use crate::common::TIMEOUT;

/// The longest id of a device.
const MAX_ID: usize = 63;

/// How long the kubelet waits for a device plugin.
const PLUGIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The pod of the device plugin itself, which has no devices.
pub(crate) const OWN_POD: &str = "vgpu-plugin";

/// The only namespace.
const NAMESPACE: &str = "default";

/// The only container of each pod.
pub(crate) const CONTAINER: &str = "llama";

/// A registered device plugin.
struct Plugin {
    client: DevicePluginClient<Channel>,
    options: DevicePluginOptions,
    /// The health of each device.
    devices: BTreeMap<String, String>,
    /// The NUMA nodes of each device, if the plugin names any.
    nodes: BTreeMap<String, Vec<i64>>,
    /// Which registration it is of.
    generation: u64,
    /// The lists that it has sent.
    lists: u64,
}

/// A pod with its container.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pod {
    /// The devices by resource.
    devices: BTreeMap<String, Vec<String>>,
    /// What the plugins want for the container.
    responses: Vec<ContainerAllocateResponse>,
}

#[derive(Default)]
struct KubeletState {
    plugins: HashMap<String, Plugin>,
    pods: BTreeMap<String, Pod>,
    /// Whether the kubelet has heard of its pods since its start.
    knows_pods: bool,
    registrations: u64,
    /// What plugins have done wrong.
    faults: Vec<String>,
}

type SharedKubeletState = Arc<Mutex<KubeletState>>;

fn lock(state: &SharedKubeletState) -> MutexGuard<'_, KubeletState> {
    state.lock().expect("no test has panicked")
}

pub(crate) struct Kubelet {
    folder: PathBuf,
    state: SharedKubeletState,
    runtime: Runtime,
    servers: Vec<JoinHandle<()>>,
}

impl Kubelet {
    pub(crate) fn start(folder: &Path) -> Kubelet {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build();
        let mut kubelet = Kubelet {
            folder: folder.into(),
            state: SharedKubeletState::default(),
            runtime: runtime.expect("threads"),
            servers: Vec::new(),
        };
        for name in ["device-plugins", "pod-resources"] {
            fs::create_dir_all(folder.join(name)).expect("a folder");
        }
        kubelet.serve();
        kubelet.learn_pods();
        kubelet
    }

    fn plugins_folder(&self) -> PathBuf {
        self.folder.join("device-plugins")
    }

    /// Removes all sockets, as the kubelet does, and listens.
    fn serve(&mut self) {
        let folder = self.plugins_folder();
        for entry in fs::read_dir(&folder).expect("the folder") {
            fs::remove_file(entry.expect("an entry").path()).expect("a socket");
        }
        let pods = self.folder.join("pod-resources/kubelet.sock");
        let _ = fs::remove_file(&pods);
        let _in_runtime = self.runtime.enter();
        let bind =
            |path: PathBuf| UnixListenerStream::new(UnixListener::bind(path).expect("bound"));
        let registration = RegistrationServer::new(RegistrationService {
            folder: folder.clone(),
            state: Arc::clone(&self.state),
        });
        let registration = Server::builder()
            .add_service(registration)
            .serve_with_incoming(bind(folder.join("kubelet.sock")));
        let lister = PodResourcesListerServer::new(Lister(Arc::clone(&self.state)));
        let lister = Server::builder()
            .add_service(lister)
            .serve_with_incoming(bind(pods));
        self.servers = vec![
            self.runtime
                .spawn(async { registration.await.expect("it serves") }),
            self.runtime
                .spawn(async { lister.await.expect("it serves") }),
        ];
    }

    /// Starts again, and knows no pod until [`Kubelet::learn_pods`]. The pods run meanwhile.
    pub(crate) fn restart(&mut self) {
        for server in self.servers.drain(..) {
            server.abort();
            let _ = self.runtime.block_on(server);
        }
        let mut state = lock(&self.state);
        state.plugins.clear();
        state.knows_pods = false;
        drop(state);
        self.serve();
    }

    /// The kubelet hears of its pods.
    pub(crate) fn learn_pods(&self) {
        lock(&self.state).knows_pods = true;
    }

    /// Waits until the devices of a resource are as expected.
    pub(crate) fn wait_for_devices(&self, resource: &str, healthy: usize, unhealthy: usize) {
        let start = Instant::now();
        loop {
            let state = lock(&self.state);
            let counts = state.plugins.get(resource).map(|plugin| {
                let count = |health: &str| {
                    let devices = plugin.devices.values();
                    devices.filter(|known| *known == health).count()
                };
                (count(HEALTHY), count(UNHEALTHY))
            });
            drop(state);
            if counts == Some((healthy, unhealthy)) {
                return;
            }
            assert!(
                start.elapsed() < TIMEOUT,
                "{resource}: {counts:?} instead of ({healthy}, {unhealthy})"
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// How often a plugin has registered.
    pub(crate) fn registrations(&self) -> u64 {
        lock(&self.state).registrations
    }

    /// What plugins have done wrong.
    pub(crate) fn faults(&self) -> Vec<String> {
        lock(&self.state).faults.clone()
    }

    /// Calls `Allocate` with these devices, whatever they are.
    pub(crate) fn allocate(
        &self,
        resource: &str,
        ids: &[String],
    ) -> Result<ContainerAllocateResponse, String> {
        let mut client = self.client(resource)?;
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                devices_ids: ids.to_vec(),
            }],
        };
        let answer = self.runtime.block_on(client.allocate(request));
        let answer = answer.map_err(|status| status.message().to_owned())?;
        let mut responses = answer.into_inner().container_responses;
        assert_eq!(responses.len(), 1, "a response for each container");
        Ok(responses.remove(0))
    }

    fn client(&self, resource: &str) -> Result<DevicePluginClient<Channel>, String> {
        let state = lock(&self.state);
        let plugin = state.plugins.get(resource);
        plugin
            .map(|plugin| plugin.client.clone())
            .ok_or_else(|| format!("no plugin for {resource}"))
    }

    /// Admits a pod with seats and slices of memory.
    pub(crate) fn admit(&self, name: &str, seats: usize, slices: usize) -> Result<Pod, String> {
        self.admit_with(name, &[(MEMORY, slices), (SEAT, seats)])
    }

    /// Admits a pod: its container gets devices of each resource that are healthy and free.
    pub(crate) fn admit_with(
        &self,
        name: &str,
        resources: &[(&str, usize)],
    ) -> Result<Pod, String> {
        let mut pod = Pod::default();
        for &(resource, count) in resources {
            if count == 0 {
                continue;
            }
            let free = self.free(resource);
            if free.len() < count {
                return Err(format!("{} of {count} {resource} are free", free.len()));
            }
            let ids = self.choose(resource, &free, count)?;
            pod.responses.push(self.allocate(resource, &ids)?);
            pod.devices.insert(resource.into(), ids);
        }
        lock(&self.state).pods.insert(name.into(), pod.clone());
        Ok(pod)
    }

    /// Chooses devices among those that are free: the ones that the plugin prefers, if the plugin
    /// has registered as one that does, and then others.
    fn choose(&self, resource: &str, free: &[String], count: usize) -> Result<Vec<String>, String> {
        let options = lock(&self.state)
            .plugins
            .get(resource)
            .map(|plugin| plugin.options);
        let mut chosen = Vec::new();
        if options.is_some_and(|options| options.get_preferred_allocation_available) {
            let request = PreferredAllocationRequest {
                container_requests: vec![ContainerPreferredAllocationRequest {
                    available_device_ids: free.to_vec(),
                    must_include_device_ids: Vec::new(),
                    allocation_size: i32::try_from(count).expect("a small number"),
                }],
            };
            let mut client = self.client(resource)?;
            let answer = client.get_preferred_allocation(request);
            let answer = self.runtime.block_on(answer);
            let answer = answer.map_err(|status| status.message().to_owned())?;
            let responses = answer.into_inner().container_responses;
            assert_eq!(responses.len(), 1, "a response for each container");
            chosen = responses[0].device_ids.clone();
            chosen.retain(|id| free.contains(id));
            chosen.truncate(count);
        }
        let others = free.iter().filter(|id| !chosen.contains(id)).cloned();
        let others: Vec<_> = others.take(count - chosen.len()).collect();
        chosen.extend(others);
        Ok(chosen)
    }

    /// The devices of a resource that a pod has, each with its health.
    pub(crate) fn devices_of(&self, pod: &str, resource: &str) -> Vec<(String, String)> {
        let state = lock(&self.state);
        let known = &state.plugins[resource].devices;
        let ids = state.pods[pod].devices[resource].iter();
        ids.map(|id| (id.clone(), known.get(id).cloned().unwrap_or_default()))
            .collect()
    }

    /// The NUMA nodes of the devices of a resource.
    pub(crate) fn nodes(&self, resource: &str) -> BTreeMap<String, Vec<i64>> {
        let state = lock(&self.state);
        let plugin = state.plugins.get(resource);
        plugin
            .map(|plugin| plugin.nodes.clone())
            .unwrap_or_default()
    }

    /// The healthy devices that no pod has.
    pub(crate) fn free(&self, resource: &str) -> Vec<String> {
        let state = lock(&self.state);
        let devices = state
            .pods
            .values()
            .filter_map(|pod| pod.devices.get(resource));
        let taken: BTreeSet<&String> = devices.flatten().collect();
        let Some(plugin) = state.plugins.get(resource) else {
            return Vec::new();
        };
        let devices = plugin.devices.iter();
        devices
            .filter(|(id, health)| *health == HEALTHY && !taken.contains(id))
            .map(|(id, _)| id.clone())
            .collect()
    }

    /// Starts the container of an admitted pod.
    pub(crate) fn start_container(&self, name: &str) -> Result<Container, String> {
        let pod = lock(&self.state).pods.get(name).cloned();
        let pod = pod.expect("it is admitted");
        for (resource, ids) in &pod.devices {
            let mut client = self.client(resource)?;
            let request = PreStartContainerRequest {
                devices_ids: ids.clone(),
            };
            let answer = self.runtime.block_on(client.pre_start_container(request));
            answer.map_err(|status| status.message().to_owned())?;
        }
        Ok(Container::new(&pod.responses))
    }

    /// Admits a pod and starts its container.
    pub(crate) fn run(&self, name: &str, seats: usize, slices: usize) -> Result<Container, String> {
        self.admit(name, seats, slices)?;
        self.start_container(name)
    }

    /// A pod has ended. Its devices are free.
    pub(crate) fn remove(&self, name: &str) {
        let removed = lock(&self.state).pods.remove(name);
        assert!(removed.is_some(), "there is no pod {name}");
    }

    /// Registers something as a device plugin.
    pub(crate) fn register(&self, request: RegisterRequest) -> Result<(), String> {
        let service = RegistrationService {
            folder: self.plugins_folder(),
            state: Arc::clone(&self.state),
        };
        let answer = self
            .runtime
            .block_on(service.register(Request::new(request)));
        answer
            .map(drop)
            .map_err(|status| status.message().to_owned())
    }
}

/// A container that runs, as its runtime makes it.
#[derive(Debug)]
pub(crate) struct Container {
    pub(crate) environment: BTreeMap<String, String>,
    /// Paths in the container, and what is there on the host.
    mounts: BTreeMap<PathBuf, PathBuf>,
}

impl Container {
    fn new(responses: &[ContainerAllocateResponse]) -> Container {
        let mut environment = BTreeMap::new();
        let mut mounts = BTreeMap::new();
        for response in responses {
            for (name, value) in &response.envs {
                let before = environment.insert(name.clone(), value.clone());
                assert_eq!(before, None, "two values of {name}");
            }
            for mount in &response.mounts {
                let (inside, host) = (&mount.container_path, &mount.host_path);
                assert!(Path::new(inside).is_absolute(), "{mount:?}");
                assert!(Path::new(host).exists(), "{mount:?}: not on the host");
                assert!(mount.read_only, "{mount:?}: a container could write there");
                let before = mounts.insert(PathBuf::from(inside), PathBuf::from(host));
                assert_eq!(before, None, "two mounts at {inside}");
            }
        }
        Container {
            environment,
            mounts,
        }
    }

    /// A path of the container on the host.
    pub(crate) fn on_host(&self, path: &Path) -> PathBuf {
        let mut mounts = self.mounts.iter();
        let found = mounts.find_map(|(inside, host)| {
            let rest = path.strip_prefix(inside).ok()?;
            match rest.as_os_str().is_empty() {
                true => Some(host.clone()),
                false => Some(host.join(rest)),
            }
        });
        found.unwrap_or_else(|| panic!("{} is no mount", path.display()))
    }

    /// The socket of the executor, on the host.
    pub(crate) fn socket(&self) -> PathBuf {
        let endpoint = &self.environment["VGPU_ENDPOINT"];
        let path = endpoint.strip_prefix("unix:").expect("a unix socket");
        self.on_host(Path::new(path))
    }
}

struct RegistrationService {
    folder: PathBuf,
    state: SharedKubeletState,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        if request.version != VERSION {
            let text = format!("unsupported version {:?}", request.version);
            return Err(Status::unknown(text));
        }
        if !is_extended_resource(&request.resource_name) {
            let text = format!("invalid resource name {:?}", request.resource_name);
            return Err(Status::unknown(text));
        }
        let failed = |error: String| {
            let endpoint = &request.endpoint;
            Status::unknown(format!("failed to dial {endpoint:?}: {error}"))
        };
        let path = self.folder.join(&request.endpoint);
        let endpoint = Endpoint::from_shared(format!("unix:{}", path.display()));
        let endpoint = endpoint.map_err(|error| failed(error.to_string()))?;
        let connected = endpoint.connect_timeout(PLUGIN_TIMEOUT).connect().await;
        let channel = connected.map_err(|error| failed(error.to_string()))?;
        let mut client = DevicePluginClient::new(channel);
        let options = client.get_device_plugin_options(Empty {}).await?;
        let options = options.into_inner();
        if Some(options) != request.options {
            return Err(Status::unknown("the options are others than registered"));
        }
        let resource = request.resource_name.clone();
        let mut state = lock(&self.state);
        state.registrations += 1;
        let generation = state.registrations;
        let plugin = Plugin {
            client: client.clone(),
            options,
            devices: BTreeMap::new(),
            nodes: BTreeMap::new(),
            generation,
            lists: 0,
        };
        state.plugins.insert(resource.clone(), plugin);
        drop(state);
        let state = Arc::clone(&self.state);
        tokio::spawn(async move {
            watch(client, &state, &resource, generation).await;
            // The plugin is gone: its devices are of no use.
            if let Some(plugin) = lock(&state).plugins.get_mut(&resource)
                && plugin.generation == generation
            {
                let devices = plugin.devices.values_mut();
                devices.for_each(|health| *health = UNHEALTHY.into());
            }
        });
        Ok(Response::new(Empty {}))
    }
}

/// Takes the lists of a plugin's devices, until the plugin ends.
async fn watch(
    mut client: DevicePluginClient<Channel>,
    state: &SharedKubeletState,
    resource: &str,
    generation: u64,
) {
    let Ok(stream) = client.list_and_watch(Empty {}).await else {
        return;
    };
    let mut stream = stream.into_inner();
    while let Ok(Some(ListAndWatchResponse { devices })) = stream.message().await {
        let mut state = lock(state);
        let faults = faults(resource, &devices);
        state.faults.extend(faults);
        let Some(plugin) = state.plugins.get_mut(resource) else {
            return;
        };
        if plugin.generation != generation {
            return;
        }
        plugin.lists += 1;
        let nodes = devices.iter().filter_map(|device| {
            let nodes = device.topology.as_ref()?.nodes.iter();
            Some((device.id.clone(), nodes.map(|node| node.id).collect()))
        });
        plugin.nodes = nodes.collect();
        plugin.devices = { devices.into_iter() }
            .map(|device| (device.id, device.health))
            .collect();
    }
}

/// What is wrong with a list of devices.
fn faults(resource: &str, devices: &[Device]) -> Vec<String> {
    let mut ids = BTreeSet::new();
    let mut faults = Vec::new();
    for Device {
        id,
        health,
        topology,
    } in devices
    {
        let nodes = topology.iter().flat_map(|topology| &topology.nodes);
        if topology.is_some() && nodes.clone().next().is_none() {
            faults.push(format!("{resource}: {id} has a topology without nodes"));
        }
        if let Some(node) = nodes.clone().find(|node| node.id < 0) {
            faults.push(format!("{resource}: {id} is near node {}", node.id));
        }
        if id.is_empty() || id.len() > MAX_ID || !ids.insert(id) {
            faults.push(format!("{resource}: the id {id:?}"));
        }
        if health != HEALTHY && health != UNHEALTHY {
            faults.push(format!("{resource}: {id} is {health:?}"));
        }
    }
    faults
}

/// Whether a name is one of a resource that a device plugin may have: a domain that is not of
/// Kubernetes, and a name of up to 63 letters, digits, `-`, `_` and `.`.
fn is_extended_resource(name: &str) -> bool {
    let Some((domain, resource)) = name.split_once('/') else {
        return false;
    };
    let is_edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        bytes.len() <= 63
            && is_edge(bytes.first())
            && is_edge(bytes.last())
            && bytes
                .iter()
                .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'))
    };
    let bytes = resource.as_bytes();
    let is_inside = |b: &u8| b.is_ascii_alphanumeric() || b"-_.".contains(b);
    domain.len() <= 253
        && domain.split('.').all(is_label)
        && !domain.ends_with("kubernetes.io")
        && !name.starts_with("requests.")
        && bytes.len() <= 63
        && is_edge(bytes.first())
        && is_edge(bytes.last())
        && bytes.iter().all(is_inside)
}

struct Lister(SharedKubeletState);

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let state = lock(&self.0);
        let mut pod_resources = Vec::new();
        if state.knows_pods {
            pod_resources.push(PodResources {
                name: OWN_POD.into(),
                namespace: "kube-system".into(),
                containers: Vec::new(),
            });
            for (name, pod) in &state.pods {
                let devices = pod.devices.iter().map(|(resource, ids)| ContainerDevices {
                    resource_name: resource.clone(),
                    device_ids: ids.clone(),
                });
                pod_resources.push(PodResources {
                    name: name.clone(),
                    namespace: NAMESPACE.into(),
                    containers: vec![ContainerResources {
                        name: CONTAINER.into(),
                        devices: devices.collect(),
                    }],
                });
            }
        }
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }
}
