//! The plugin's sockets, and the kubelet that knows them.

use std::io;
use std::path::PathBuf;

use crate::api::device_plugin::DevicePluginServer;
use crate::devices::Resource;
use crate::kubelet::{self, KubeletError};
use crate::options::Options;
use crate::services::Service;
use crate::socket::{FileId, Socket};

/// Why the plugin is not registered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistrationError {
    #[error("{}: {error}", path.display())]
    Socket { path: PathBuf, error: io::Error },
    #[error(transparent)]
    Kubelet(#[from] KubeletError),
}

/// The plugin as one kubelet knows it.
pub(crate) struct Registration {
    /// The socket of this kubelet.
    kubelet: FileId,
    sockets: Vec<Socket>,
}

impl Registration {
    /// Serves the plugin for each resource, and registers it with the kubelet.
    ///
    /// # Errors
    /// There is no kubelet, or it refuses the plugin.
    pub(crate) async fn new(
        options: &Options,
        service: impl Fn(Resource) -> Service,
    ) -> Result<Registration, RegistrationError> {
        let path = options.registration();
        let kubelet = FileId::of(&path).map_err(|error| RegistrationError::Socket {
            path: path.clone(),
            error,
        })?;
        let folder = options.device_plugins();
        // The kubelet connects before it answers.
        let sockets = Resource::ALL.map(|resource| {
            let path = folder.join(resource.endpoint());
            let service = DevicePluginServer::new(service(resource));
            Socket::serve(&path, service).map_err(|error| RegistrationError::Socket {
                path: path.clone(),
                error,
            })
        });
        let sockets = sockets.into_iter().collect::<Result<Vec<_>, _>>()?;
        for resource in Resource::ALL {
            kubelet::register(options, resource).await?;
        }
        Ok(Registration { kubelet, sockets })
    }

    /// Whether the kubelet still knows the plugin. A kubelet that starts removes all sockets, and
    /// makes its own.
    pub(crate) fn is_current(&self, options: &Options) -> bool {
        self.kubelet.is_at(&options.registration()) && self.sockets.iter().all(Socket::is_current)
    }
}
