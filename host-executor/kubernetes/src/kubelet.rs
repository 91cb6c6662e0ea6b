//! Questions to the kubelet.

use std::path::Path;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};

use crate::api::device_plugin::{
    DevicePluginOptions, RegisterRequest, RegistrationClient, VERSION,
};
use crate::api::pod_resources::{
    ListPodResourcesRequest, ListPodResourcesResponse, PodResourcesListerClient,
};
use crate::devices::Resource;
use crate::options::Options;

/// How long the kubelet may take to answer. The kubelet connects to the plugin before it answers a
/// registration, and gives up after 10 s.
const TIMEOUT: Duration = Duration::from_secs(12);

/// The most bytes of an answer.
const MAX_ANSWER: usize = 16 << 20;

/// Why the kubelet does not answer as expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KubeletError {
    #[error("{path}: no connection to the kubelet: {error}")]
    Connect { path: String, error: String },
    #[error("{path}: the kubelet refuses: {error}")]
    Call { path: String, error: String },
}

async fn connect(path: &Path) -> Result<Channel, KubeletError> {
    let path = path.display().to_string();
    let failed = |error: tonic::transport::Error| KubeletError::Connect {
        path: path.clone(),
        error: with_sources(&error),
    };
    let endpoint = Endpoint::from_shared(format!("unix:{path}")).map_err(failed)?;
    let endpoint = endpoint.connect_timeout(TIMEOUT).timeout(TIMEOUT);
    endpoint.connect().await.map_err(failed)
}

/// An error with those that have caused it: the library's own text says little.
fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

fn refused(path: &Path, status: &tonic::Status) -> KubeletError {
    KubeletError::Call {
        path: path.display().to_string(),
        error: format!("{}: {}", status.code(), status.message()),
    }
}

/// Registers the plugin for a resource. The kubelet connects to the plugin meanwhile.
pub(crate) async fn register(options: &Options, resource: Resource) -> Result<(), KubeletError> {
    let path = options.registration();
    let mut client = RegistrationClient::new(connect(&path).await?);
    let request = RegisterRequest {
        version: VERSION.into(),
        endpoint: resource.endpoint().into(),
        resource_name: resource.name().into(),
        options: Some(plugin_options(resource)),
    };
    let answer = client.register(request).await;
    answer.map(drop).map_err(|status| refused(&path, &status))
}

/// What the plugin wants of the kubelet: before a container starts, the plugin gives the
/// container's guest the quota, which a call for the seat alone does not tell.
pub(crate) fn plugin_options(resource: Resource) -> DevicePluginOptions {
    DevicePluginOptions {
        pre_start_required: true,
        get_preferred_allocation_available: resource.has_preferences(),
    }
}

/// The pods of the node, with their devices.
pub(crate) async fn pods(options: &Options) -> Result<ListPodResourcesResponse, KubeletError> {
    let path = options.pod_resources();
    let client = PodResourcesListerClient::new(connect(&path).await?);
    let mut client = client.max_decoding_message_size(MAX_ANSWER);
    let answer = client.list(ListPodResourcesRequest {}).await;
    let answer = answer.map_err(|status| refused(&path, &status))?;
    Ok(answer.into_inner())
}
