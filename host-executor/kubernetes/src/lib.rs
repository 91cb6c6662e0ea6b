//! The Kubernetes device plugin of an executor, and its driver for Dynamic Resource Allocation.
//!
//! The kubelet gives containers three resources:
//! `vgpu.dev/gpu`, a seat, `vgpu.dev/memory`, slices of device memory, and `vgpu.dev/weight`, a
//! share of the device's time. A container with a seat gets the guest plugin, and the socket of a
//! listener of its own. The executor knows the container as a guest, whose quota is the container's
//! memory.
//!
//! With [claims](ClaimOptions), it is a driver for Dynamic Resource Allocation instead: claims have
//! parts of the devices in place of containers with seats.
//!
//! - [`api`]: the gRPC services between the kubelet, a device plugin and a driver.
//! - `options`: what an operator chooses.
//! - `container`: what a container gets.
//! - `guests`: the guests of the executor, and the folders of their sockets.
//! - `socket`: a socket at which the kubelet reaches this process.
//! - `problem`: what is wrong now, for the log.
//! - `dra`: the driver.
//!
//! The device plugin:
//!
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
mod container;
mod devices;
mod dra;
mod guests;
mod kubelet;
mod numa;
mod options;
mod problem;
mod reconciler;
mod registration;
mod run;
mod services;
mod socket;

pub use devices::{MEMORY, SEAT, WEIGHT};
pub use dra::DRIVER;
pub use options::{ClaimOptions, Options, OptionsError};
pub use run::{PluginError, run};
