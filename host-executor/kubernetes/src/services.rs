//! What the kubelet calls.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{Mutex, watch};
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};
use tracing::error;

use crate::api::device_plugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, DevicePlugin,
    DevicePluginOptions, Empty, ListAndWatchResponse, Mount, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse,
};
use crate::devices::{Capacity, Resource};
use crate::kubelet::plugin_options;
use crate::options::Options;
use crate::reconciler::{ReconcileError, Reconciler};

/// Where a container has the guest plugin.
const PLUGIN_IN_CONTAINER: &str = "/usr/lib/vgpu/libggml-vgpu.so";

/// Where a container has the folder with its socket.
const FOLDER_IN_CONTAINER: &str = "/run/vgpu";

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
        Ok(Response::new(plugin_options()))
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
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("all devices are alike"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let capacity = *self.capacity.borrow();
        let mut container_responses = Vec::new();
        for container in request.into_inner().container_requests {
            let ids = container.devices_ids;
            if let Some(id) = capacity.unknown(self.resource, &ids) {
                let name = self.resource.name();
                return Err(Status::not_found(format!("{name} has no device {id:?}")));
            }
            container_responses.push(match self.resource {
                // The container's seat has all.
                Resource::Memory => ContainerAllocateResponse::default(),
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
            Resource::Memory => reconciler.check_memory(&ids).await,
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
        let made = self.reconciler.lock().await.make_folder(seat);
        made.map_err(|error| failed(&error))?;
        let mount = |container: &str, host: String| Mount {
            container_path: container.into(),
            host_path: host,
            read_only: true,
        };
        let folder = self.options.folder(seat).display().to_string();
        let plugin = self.options.plugin.display().to_string();
        Ok(ContainerAllocateResponse {
            envs: HashMap::from([
                ("GGML_BACKEND_PATH".into(), PLUGIN_IN_CONTAINER.into()),
                (
                    "VGPU_ENDPOINT".into(),
                    format!("unix:{FOLDER_IN_CONTAINER}/vgpu.sock"),
                ),
                // A container that asks for a device does not want its own CPU. The variables of
                // the pod come after these, and may say otherwise.
                ("VGPU_REQUIRED".into(), "1".into()),
            ]),
            mounts: vec![
                mount(PLUGIN_IN_CONTAINER, plugin),
                mount(FOLDER_IN_CONTAINER, folder),
            ],
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
