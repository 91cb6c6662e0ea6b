//! A socket at which the kubelet reaches this process.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tonic::transport::Server;
use tracing::error;

/// What distinguishes a file from the one that was there before. An inode is used again, but not
/// with its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl FileId {
    /// # Errors
    /// There is no such file, or it cannot be reached.
    pub(crate) fn of(path: &Path) -> io::Result<FileId> {
        let file = fs::symlink_metadata(path)?;
        Ok(FileId {
            device: file.dev(),
            inode: file.ino(),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }

    /// Whether this file is the one at `path`.
    pub(crate) fn is_at(self, path: &Path) -> bool {
        FileId::of(path).is_ok_and(|file| file == self)
    }
}

/// A socket with a gRPC service. Removed on drop.
pub(crate) struct Socket {
    path: PathBuf,
    file: FileId,
    server: JoinHandle<()>,
}

impl Socket {
    /// Serves `service` at `path`, in place of what is there.
    ///
    /// # Errors
    /// What is at the path cannot be removed, or the socket cannot be made.
    pub(crate) fn serve<S>(path: &Path, service: S) -> io::Result<Socket>
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
        S: NamedService + Clone + Send + Sync + 'static,
        S::Future: Send + 'static,
    {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        let file = FileId::of(path)?;
        let server = Server::builder()
            .add_service(service)
            .serve_with_incoming(UnixListenerStream::new(listener));
        let name = path.display().to_string();
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

    /// Whether the socket is at its path and is served.
    pub(crate) fn is_current(&self) -> bool {
        self.file.is_at(&self.path) && !self.server.is_finished()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.server.abort();
        if self.file.is_at(&self.path) {
            // The next process replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
}
