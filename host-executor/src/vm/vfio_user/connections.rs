//! The connections between the filter and the `vfio_user` crate, whose server accepts one itself.
#![forbid(unsafe_code)]

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};

/// The end of the filter, and a listener at which the other end waits to be accepted.
pub(super) type Connection = (UnixStream, UnixListener);

/// The connections for the hypervisors of a virtual machine, each of which needs one.
pub struct Connections {
    prepared: Vec<Connection>,
    may_connect: bool,
}

impl Connections {
    /// Each connection is made when a hypervisor needs it.
    pub(super) fn on_demand() -> Connections {
        Connections {
            prepared: Vec::new(),
            may_connect: true,
        }
    }

    /// All connections are made now, for a process that can make no socket later.
    ///
    /// # Errors
    /// There is no folder for the sockets, or there are too few descriptors: two for each.
    pub fn in_advance(count: usize) -> io::Result<Connections> {
        Ok(Connections {
            prepared: (0..count).map(|_| connect()).collect::<io::Result<_>>()?,
            may_connect: false,
        })
    }

    /// Whether there is no connection for a further hypervisor.
    pub(super) fn are_used_up(&self) -> bool {
        self.prepared.is_empty() && !self.may_connect
    }

    /// The connection for the next hypervisor.
    ///
    /// # Errors
    /// All connections are used up, or one cannot be made.
    pub(super) fn take(&mut self) -> io::Result<Connection> {
        match self.prepared.pop() {
            Some(connection) => Ok(connection),
            None if self.may_connect => connect(),
            None => Err(io::Error::other(
                "the process has no connection left for a further hypervisor",
            )),
        }
    }
}

/// A listener on an address that no other process knows, and a connection to it.
fn connect() -> io::Result<Connection> {
    // Only the owner can use the folder, which is removed with its content.
    let folder = tempfile::Builder::new().prefix("vgpu-vfio-").tempdir()?;
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path)?;
    Ok((UnixStream::connect(&path)?, listener))
}
