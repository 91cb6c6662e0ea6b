//! Drivers for Dynamic Resource Allocation, version v1. Field numbers and names are those of the
//! kubelet.

use std::collections::HashMap;

/// The version of this service, as a driver tells it when it is registered.
pub const SERVICE: &str = "v1.DRAPlugin";

/// A claim, an object `ResourceClaim`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Claim {
    /// The namespace of the claim.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// The id of the claim.
    #[prost(string, tag = "2")]
    pub uid: String,
    /// The name of the claim.
    #[prost(string, tag = "3")]
    pub name: String,
}

/// Claims whose pods start.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct NodePrepareResourcesRequest {
    /// The claims.
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

/// What the pods of claims get.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct NodePrepareResourcesResponse {
    /// An entry for each claim of the request, by its id.
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, NodePrepareResourceResponse>,
}

/// What the pods of a claim get.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct NodePrepareResourceResponse {
    /// The devices of the claim.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
    /// Why the pods must not start, or empty.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A device of a claim.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Device {
    /// The requests of the claim that the device is for.
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    /// The pool that has the device.
    #[prost(string, tag = "2")]
    pub pool_name: String,
    /// The name of the device in its pool.
    #[prost(string, tag = "3")]
    pub device_name: String,
    /// The names of what the container runtime gives a container.
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
}

/// Claims whose pods have ended.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct NodeUnprepareResourcesRequest {
    /// The claims.
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

/// Which claims have ended.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct NodeUnprepareResourcesResponse {
    /// An entry for each claim of the request, by its id.
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, NodeUnprepareResourceResponse>,
}

/// Whether a claim has ended.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct NodeUnprepareResourceResponse {
    /// Why it has not, or empty.
    #[prost(string, tag = "1")]
    pub error: String,
}

pub use services::d_r_a_plugin_client::DRAPluginClient as DraPluginClient;
pub use services::d_r_a_plugin_server::{
    DRAPlugin as DraPlugin, DRAPluginServer as DraPluginServer,
};

/// What the build script writes.
#[allow(
    missing_docs,
    unreachable_pub,
    rust_2018_idioms,
    clippy::all,
    clippy::missing_errors_doc
)]
mod services {
    include!(concat!(
        env!("OUT_DIR"),
        "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin.rs"
    ));
}
