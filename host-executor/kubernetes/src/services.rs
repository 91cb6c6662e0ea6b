//! What the kubelet calls.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{Mutex, watch};
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};
use tracing::error;

use crate::api::device_plugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, DevicePlugin, DevicePluginOptions, Empty,
    ListAndWatchResponse, Mount, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse,
};
use crate::container;
use crate::devices::{Capacity, Resource, preferred};
use crate::kubelet::plugin_options;
use crate::options::Options;
use crate::reconciler::{ReconcileError, Reconciler};

/// The plugin for one resource.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) resource: Resource,
    pub(crate) options: Arc<Options>,
    pub(crate) capacity: watch::Receiver<Capacity>,
    pub(crate) reconciler: Arc<Mutex<Reconciler>>,
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(plugin_options(self.resource)))
    }

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let resource = self.resource;
        let changes = WatchStream::new(self.capacity.clone());
        let lists = changes.map(move |capacity| {
            Ok(ListAndWatchResponse {
                devices: capacity.devices(resource),
            })
        });
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        if !self.resource.has_preferences() {
            return Err(Status::unimplemented("all devices are alike"));
        }
        let containers = request.into_inner().container_requests.into_iter();
        let responses = containers.map(|container| {
            let count = usize::try_from(container.allocation_size).unwrap_or(0);
            let (available, required) = (
                &container.available_device_ids,
                &container.must_include_device_ids,
            );
            ContainerPreferredAllocationResponse {
                device_ids: preferred(available, required, count),
            }
        });
        Ok(Response::new(PreferredAllocationResponse {
            container_responses: responses.collect(),
        }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let capacity = self.capacity.borrow().clone();
        let mut container_responses = Vec::new();
        for container in request.into_inner().container_requests {
            let ids = container.devices_ids;
            if let Some(id) = capacity.unknown(self.resource, &ids) {
                let name = self.resource.name();
                return Err(Status::not_found(format!("{name} has no device {id:?}")));
            }
            container_responses.push(match self.resource {
                // The container's seat has all.
                Resource::Memory | Resource::Weight => ContainerAllocateResponse::default(),
                Resource::Seat => self.seat(&ids).await?,
            });
        }
        Ok(Response::new(AllocateResponse {
            container_responses,
        }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let ids = request.into_inner().devices_ids;
        let mut reconciler = self.reconciler.lock().await;
        let outcome = match self.resource {
            Resource::Memory | Resource::Weight => reconciler.check_seat(self.resource, &ids).await,
            Resource::Seat => reconciler.prepare(one_seat(&ids)?).await,
        };
        outcome.map_err(|error| failed(&error))?;
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

impl Service {
    /// What a container with these seats gets.
    async fn seat(&self, ids: &[String]) -> Result<ContainerAllocateResponse, Status> {
        let seat = one_seat(ids)?;
        let made = self.reconciler.lock().await.renew(seat).await;
        made.map_err(|error| failed(&error))?;
        let mounts = container::mounts(&self.options, seat).map(|mount| Mount {
            container_path: mount.container.into(),
            host_path: mount.host,
            read_only: true,
        });
        let envs = container::variables().map(|(name, value)| (name.to_owned(), value));
        Ok(ContainerAllocateResponse {
            envs: envs.into(),
            mounts: mounts.into(),
        })
    }
}

/// A container is one guest, and has one seat.
fn one_seat(ids: &[String]) -> Result<&str, Status> {
    match ids {
        [seat] => Ok(seat),
        _ => Err(Status::invalid_argument(format!(
            "a container with {} seats: ask for 1",
            ids.len()
        ))),
    }
}

/// The kubelet shows this text in the events of the pod.
fn failed(why: &ReconcileError) -> Status {
    error!("a container cannot start: {why}");
    Status::failed_precondition(why.to_string())
}
