//! Pod resources, version v1: which container has which devices. Fields that are not used here
//! (processors, memory, claims) are left out.

/// Asks for all pods of the node.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct ListPodResourcesRequest {}

/// The pods of the node that run or start.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListPodResourcesResponse {
    /// The pods.
    #[prost(message, repeated, tag = "1")]
    pub pod_resources: Vec<PodResources>,
}

/// A pod.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PodResources {
    /// The name of the pod.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The namespace of the pod.
    #[prost(string, tag = "2")]
    pub namespace: String,
    /// The containers of the pod, without those that end before the others start.
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
}

/// A container.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ContainerResources {
    /// The name of the container.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The devices of the container. A resource may have several entries.
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<ContainerDevices>,
}

/// Devices of a container.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ContainerDevices {
    /// The resource of the devices.
    #[prost(string, tag = "1")]
    pub resource_name: String,
    /// The devices.
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
}

pub use services::pod_resources_lister_client::PodResourcesListerClient;
pub use services::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};

/// What the build script writes.
#[allow(
    missing_docs,
    unreachable_pub,
    rust_2018_idioms,
    clippy::all,
    clippy::missing_errors_doc
)]
mod services {
    include!(concat!(env!("OUT_DIR"), "/v1.PodResourcesLister.rs"));
}
