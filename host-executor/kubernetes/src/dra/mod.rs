//! A driver for Dynamic Resource Allocation. The API server of the cluster knows the devices of the
//! executor with their memory and time ([`ResourceSlice`](resource_slice)), the scheduler gives
//! parts of them to claims, and the kubelet asks for a claim before the containers of its pods
//! start. Each claim is a guest of the executor.
//!
//! - `quantity`: numbers of Kubernetes.
//! - `api_server`: questions to the API server.
//! - `resource_slice`: what the API server knows of the devices.
//! - `allocation`: which guest a claim is, by what the API server says.
//! - `cdi`: what the container runtime gives a container with a claim.
//! - `claims`: makes the guests of the executor those of the claims.
//! - `services`: what the kubelet calls.
//! - `run`: the loop.
//!
//! A file for each claim is beside the sockets, so that a restart of this process or of the
//! executor loses nothing. The kubelet asks for a claim when it makes the sandbox of a pod, and so
//! again after the node has started, but not for pods that run when the kubelet starts.

mod allocation;
mod api_server;
mod cdi;
mod claims;
mod quantity;
mod resource_slice;
mod run;
mod services;

pub(crate) use run::run;

/// The name of the driver, and that of its device class.
pub const DRIVER: &str = "vgpu.dev";
