//! Device plugins, version v1beta1. Field numbers and names are those of the kubelet.

use std::collections::HashMap;

/// The version of these services.
pub const VERSION: &str = "v1beta1";

/// The health of a device that a container may get.
pub const HEALTHY: &str = "Healthy";

/// The health of a device that no new container gets.
pub const UNHEALTHY: &str = "Unhealthy";

/// What a device plugin wants of the kubelet.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct DevicePluginOptions {
    /// Whether the kubelet calls `PreStartContainer` before each start of a container.
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    /// Whether the kubelet may call `GetPreferredAllocation`.
    #[prost(bool, tag = "2")]
    pub get_preferred_allocation_available: bool,
}

/// A device plugin makes itself known.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct RegisterRequest {
    /// [`VERSION`].
    #[prost(string, tag = "1")]
    pub version: String,
    /// The name of the plugin's socket in the folder of the kubelet's socket.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// The resource of the devices, such as `vgpu.dev/gpu`.
    #[prost(string, tag = "3")]
    pub resource_name: String,
    /// What the plugin wants.
    #[prost(message, optional, tag = "4")]
    pub options: Option<DevicePluginOptions>,
}

/// Nothing.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Empty {}

/// All devices of a plugin.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListAndWatchResponse {
    /// The devices.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// A device.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Device {
    /// A name of at most 63 bytes.
    #[prost(string, tag = "1")]
    pub id: String,
    /// [`HEALTHY`] or [`UNHEALTHY`].
    #[prost(string, tag = "2")]
    pub health: String,
    /// Where the device is. `None`: not known.
    #[prost(message, optional, tag = "3")]
    pub topology: Option<TopologyInfo>,
}

/// Where a device is.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct TopologyInfo {
    /// The NUMA nodes that are near: one of them is enough.
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NumaNode>,
}

/// A NUMA node.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct NumaNode {
    /// Its number, from 0.
    #[prost(int64, tag = "1")]
    pub id: i64,
}

/// A container with these devices starts.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PreStartContainerRequest {
    /// The devices of the container.
    #[prost(string, repeated, tag = "1")]
    pub devices_ids: Vec<String>,
}

/// The container may start.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct PreStartContainerResponse {}

/// Which devices a plugin prefers.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PreferredAllocationRequest {
    /// The containers.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerPreferredAllocationRequest>,
}

/// Which devices a plugin prefers for one container.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ContainerPreferredAllocationRequest {
    /// The devices that the container may get.
    #[prost(string, repeated, tag = "1")]
    pub available_device_ids: Vec<String>,
    /// The devices among them that the container gets in any case.
    #[prost(string, repeated, tag = "2")]
    pub must_include_device_ids: Vec<String>,
    /// How many devices the container gets.
    #[prost(int32, tag = "3")]
    pub allocation_size: i32,
}

/// The devices that a plugin prefers.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PreferredAllocationResponse {
    /// An entry for each container of the request, in the same order.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerPreferredAllocationResponse>,
}

/// The devices that a plugin prefers for one container.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ContainerPreferredAllocationResponse {
    /// The devices.
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

/// The kubelet gives devices to containers.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AllocateRequest {
    /// The containers.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerAllocateRequest>,
}

/// The devices of one container.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ContainerAllocateRequest {
    /// The devices.
    #[prost(string, repeated, tag = "1")]
    pub devices_ids: Vec<String>,
}

/// What containers need for their devices.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AllocateResponse {
    /// An entry for each container of the request, in the same order.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocateResponse>,
}

/// What one container needs. (Device files, annotations and CDI devices, fields 3 to 5, are not
/// used here.)
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ContainerAllocateResponse {
    /// Variables of the environment.
    #[prost(map = "string, string", tag = "1")]
    pub envs: HashMap<String, String>,
    /// Files and folders of the host.
    #[prost(message, repeated, tag = "2")]
    pub mounts: Vec<Mount>,
}

/// A file or folder of the host in a container.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Mount {
    /// Its path in the container.
    #[prost(string, tag = "1")]
    pub container_path: String,
    /// Its path on the host.
    #[prost(string, tag = "2")]
    pub host_path: String,
    /// Whether the container cannot change it.
    #[prost(bool, tag = "3")]
    pub read_only: bool,
}

pub use services::device_plugin_client::DevicePluginClient;
pub use services::device_plugin_server::{DevicePlugin, DevicePluginServer};
pub use services::registration_client::RegistrationClient;
pub use services::registration_server::{Registration, RegistrationServer};

/// What the build script writes.
#[allow(
    missing_docs,
    unreachable_pub,
    rust_2018_idioms,
    clippy::all,
    clippy::missing_errors_doc
)]
mod services {
    include!(concat!(env!("OUT_DIR"), "/v1beta1.Registration.rs"));
    include!(concat!(env!("OUT_DIR"), "/v1beta1.DevicePlugin.rs"));
}
