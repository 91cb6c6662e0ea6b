//! What the kubelet calls.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use tokio::sync::Notify;
use tonic::{Request, Response, Status};
use tracing::{error, info};

use super::DRIVER;
use super::allocation::{Allocation, ClaimId};
use super::cdi;
use super::claims::{ClaimError, Claims};
use crate::api::dra::{
    Claim, Device, DraPlugin, NodePrepareResourceResponse, NodePrepareResourcesRequest,
    NodePrepareResourcesResponse, NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse, SERVICE,
};
use crate::api::plugin_registration::{
    DRA_PLUGIN, InfoRequest, PluginInfo, Registration, RegistrationStatus,
    RegistrationStatusResponse,
};
use crate::options::ClaimOptions;

/// Tells the kubelet which driver this is.
#[derive(Clone)]
pub(crate) struct RegistrationService {
    /// The path of the driver's socket.
    pub(crate) endpoint: String,
    /// Told when a kubelet has registered the driver.
    pub(crate) registered: Arc<Notify>,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            plugin_type: DRA_PLUGIN.into(),
            name: DRIVER.into(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec![SERVICE.into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        match status.plugin_registered {
            true => {
                info!("registered with the kubelet");
                self.registered.notify_one();
            }
            false => error!("the kubelet refuses the driver: {}", status.error),
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// Prepares claims for the kubelet.
#[derive(Clone)]
pub(crate) struct DriverService {
    pub(crate) options: Arc<ClaimOptions>,
    pub(crate) claims: Arc<Claims>,
}

#[tonic::async_trait]
impl DraPlugin for DriverService {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let pool = self.options.node.as_str();
        let claims = each(request.into_inner().claims, async |claim| {
            let prepared = self.claims.prepare(&claim).await;
            match prepared {
                Ok(allocation) => NodePrepareResourceResponse {
                    devices: devices(&allocation, pool),
                    error: String::new(),
                },
                Err(why) => NodePrepareResourceResponse {
                    devices: Vec::new(),
                    error: said(&claim, &why),
                },
            }
        });
        Ok(Response::new(NodePrepareResourcesResponse {
            claims: claims.await,
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let claims = each(request.into_inner().claims, async |claim| {
            let ended = self.claims.end(&claim.uid).await;
            NodeUnprepareResourceResponse {
                error: ended.map_or_else(|why| said(&claim, &why), |()| String::new()),
            }
        });
        Ok(Response::new(NodeUnprepareResourcesResponse {
            claims: claims.await,
        }))
    }
}

/// An answer for each claim, one after the other.
async fn each<T, F: Future<Output = T>>(
    claims: Vec<Claim>,
    answer: impl Fn(ClaimId) -> F,
) -> HashMap<String, T> {
    let mut answers = HashMap::new();
    for claim in claims {
        let uid = claim.uid.clone();
        let claim = ClaimId {
            namespace: claim.namespace,
            name: claim.name,
            uid: claim.uid,
        };
        answers.insert(uid, answer(claim).await);
    }
    answers
}

/// The devices of a claim as the kubelet gets them.
fn devices(allocation: &Allocation, pool: &str) -> Vec<Device> {
    let devices = allocation.devices.iter().map(|device| Device {
        request_names: vec![device.request.clone()],
        pool_name: pool.into(),
        device_name: device.device.clone(),
        cdi_device_ids: vec![cdi::device(&allocation.claim.uid)],
    });
    devices.collect()
}

/// The kubelet shows this text in the events of the pod.
fn said(claim: &ClaimId, why: &ClaimError) -> String {
    error!(%claim, "{why}");
    why.to_string()
}
