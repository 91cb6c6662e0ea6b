//! The registration of plugins in the kubelet's folder `plugins_registry`. Field numbers and names
//! are those of the kubelet.

/// The type of a driver for Dynamic Resource Allocation.
pub const DRA_PLUGIN: &str = "DRAPlugin";

/// Asks a plugin who it is.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct InfoRequest {}

/// Who a plugin is.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PluginInfo {
    /// The type, such as [`DRA_PLUGIN`].
    #[prost(string, tag = "1")]
    pub plugin_type: String,
    /// The name of the plugin among those of its type.
    #[prost(string, tag = "2")]
    pub name: String,
    /// The path of the socket of the plugin.
    #[prost(string, tag = "3")]
    pub endpoint: String,
    /// The versions of its services that the plugin serves.
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

/// Tells a plugin whether the kubelet uses it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct RegistrationStatus {
    /// Whether the kubelet uses the plugin.
    #[prost(bool, tag = "1")]
    pub plugin_registered: bool,
    /// Why it does not.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// The plugin knows.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct RegistrationStatusResponse {}

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
    include!(concat!(
        env!("OUT_DIR"),
        "/pluginregistration.Registration.rs"
    ));
}
