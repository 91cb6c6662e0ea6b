//! The gRPC services between the kubelet, device plugins and drivers: both sides of each, for this
//! crate and for tests that stand in for the kubelet.

pub mod device_plugin;
pub mod dra;
pub mod plugin_registration;
pub mod pod_resources;
