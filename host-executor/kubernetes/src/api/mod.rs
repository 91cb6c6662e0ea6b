//! The gRPC services between the kubelet and device plugins: both sides of each, for the device
//! plugin and for tests that stand in for the kubelet.

pub mod device_plugin;
pub mod pod_resources;
