//! Writes the clients and servers of the kubelet's gRPC services, from the descriptions below:
//! neither a `.proto` file nor `protoc` is needed.

use tonic_build::manual::{Builder, Method, Service};

/// A method that takes and returns one message each.
fn unary(name: &str, route: &str, types: &str, input: &str, output: &str) -> Method {
    method(name, route, types, input, output, false)
}

fn method(
    name: &str,
    route: &str,
    types: &str,
    input: &str,
    output: &str,
    is_stream: bool,
) -> Method {
    let method = Method::builder()
        .name(name)
        .route_name(route)
        .input_type(format!("crate::api::{types}::{input}"))
        .output_type(format!("crate::api::{types}::{output}"))
        .codec_path("tonic_prost::ProstCodec");
    match is_stream {
        true => method.server_streaming().build(),
        false => method.build(),
    }
}

fn main() {
    let types = "device_plugin";
    let registration = Service::builder()
        .name("Registration")
        .package("v1beta1")
        .method(unary(
            "register",
            "Register",
            types,
            "RegisterRequest",
            "Empty",
        ))
        .build();
    let device_plugin = Service::builder()
        .name("DevicePlugin")
        .package("v1beta1")
        .method(unary(
            "get_device_plugin_options",
            "GetDevicePluginOptions",
            types,
            "Empty",
            "DevicePluginOptions",
        ))
        .method(method(
            "list_and_watch",
            "ListAndWatch",
            types,
            "Empty",
            "ListAndWatchResponse",
            true,
        ))
        .method(unary(
            "get_preferred_allocation",
            "GetPreferredAllocation",
            types,
            "PreferredAllocationRequest",
            "PreferredAllocationResponse",
        ))
        .method(unary(
            "allocate",
            "Allocate",
            types,
            "AllocateRequest",
            "AllocateResponse",
        ))
        .method(unary(
            "pre_start_container",
            "PreStartContainer",
            types,
            "PreStartContainerRequest",
            "PreStartContainerResponse",
        ))
        .build();
    let pod_resources = Service::builder()
        .name("PodResourcesLister")
        .package("v1")
        .method(unary(
            "list",
            "List",
            "pod_resources",
            "ListPodResourcesRequest",
            "ListPodResourcesResponse",
        ))
        .build();
    let plugin_registration = Service::builder()
        .name("Registration")
        .package("pluginregistration")
        .method(unary(
            "get_info",
            "GetInfo",
            "plugin_registration",
            "InfoRequest",
            "PluginInfo",
        ))
        .method(unary(
            "notify_registration_status",
            "NotifyRegistrationStatus",
            "plugin_registration",
            "RegistrationStatus",
            "RegistrationStatusResponse",
        ))
        .build();
    let dra_method = |name: &str, route: &str| {
        let (input, output) = (format!("{route}Request"), format!("{route}Response"));
        unary(name, route, "dra", &input, &output)
    };
    let dra = Service::builder()
        .name("DRAPlugin")
        .package("k8s.io.kubelet.pkg.apis.dra.v1")
        .method(dra_method("node_prepare_resources", "NodePrepareResources"))
        .method(dra_method(
            "node_unprepare_resources",
            "NodeUnprepareResources",
        ))
        .build();
    Builder::new().build_transport(false).compile(&[
        registration,
        device_plugin,
        pod_resources,
        plugin_registration,
        dra,
    ]);
    println!("cargo::rerun-if-changed=build.rs");
}
