//! The plugin's sockets, and the kubelet that knows them.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tracing::error;

use crate::api::device_plugin::DevicePluginServer;
use crate::devices::Resource;
use crate::kubelet::{self, KubeletError};
use crate::options::Options;
use crate::services::Service;

/// Why the plugin is not registered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistrationError {
    #[error("{}: {error}", path.display())]
    Socket { path: PathBuf, error: io::Error },
    #[error(transparent)]
    Kubelet(#[from] KubeletError),
}

/// What distinguishes a file from the one that was there before. An inode is used again, but not
/// with its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl FileId {
    fn of(path: &Path) -> io::Result<FileId> {
        let file = fs::symlink_metadata(path)?;
        Ok(FileId {
            device: file.dev(),
            inode: file.ino(),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }
}

/// A socket at which the kubelet reaches the plugin for one resource.
struct Socket {
    path: PathBuf,
    file: FileId,
    server: JoinHandle<()>,
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.server.abort();
        if FileId::of(&self.path).is_ok_and(|file| file == self.file) {
            // The next plugin replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
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
            serve(&path, service(resource)).map_err(|error| RegistrationError::Socket {
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
        let is_same = |path: &Path, known| FileId::of(path).is_ok_and(|file| file == known);
        is_same(&options.registration(), self.kubelet)
            && self
                .sockets
                .iter()
                .all(|socket| is_same(&socket.path, socket.file) && !socket.server.is_finished())
    }
}

/// Serves the kubelet at `path`.
fn serve(path: &Path, service: Service) -> io::Result<Socket> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    let file = FileId::of(path)?;
    let name = service.resource.name();
    let server = Server::builder()
        .add_service(DevicePluginServer::new(service))
        .serve_with_incoming(UnixListenerStream::new(listener));
    Ok(Socket {
        path: path.into(),
        file,
        server: tokio::spawn(async move {
            if let Err(error) = server.await {
                error!("{name}: the kubelet is served no longer: {error}");
            }
        }),
    })
}
