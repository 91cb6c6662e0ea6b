//! The Kubernetes device plugin of an executor. The kubelet gives containers three resources:
//! `vgpu.dev/gpu`, a seat, `vgpu.dev/memory`, slices of device memory, and `vgpu.dev/weight`, a
//! share of the device's time. A container with a seat gets the guest plugin, and the socket of a
//! listener of its own. The executor knows the container as a guest, whose quota is the container's
//! memory.
//!
//! - [`api`]: the gRPC services between the kubelet and a device plugin.
//! - `options`: what an operator chooses.
//! - `devices`: the ids of seats, slices and weights.
//! - `numa`: the NUMA nodes of GPUs.
//! - `assignments`: which guest each container with a seat is, by what the kubelet says.
//! - `reconciler`: makes the guests of the executor those of the kubelet.
//! - `kubelet`: questions to the kubelet.
//! - `services`: what the kubelet calls.
//! - `registration`: the plugin's sockets, and the kubelet that knows them.
//! - `run`: the loop.
//!
//! The plugin keeps no state of its own. The kubelet says which container has which devices, and
//! the executor says which guests it has: a restart of any of the three loses nothing.
#![forbid(unsafe_code)]

pub mod api;
mod assignments;
mod devices;
mod kubelet;
mod numa;
mod options;
mod reconciler;
mod registration;
mod run;
mod services;

pub use devices::{MEMORY, SEAT, WEIGHT};
pub use options::{Options, OptionsError};
pub use run::{PluginError, run};
