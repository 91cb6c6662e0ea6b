//! Opening the guest's end of the link to an endpoint, for every link that leaves the process.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;
use std::time::Duration;

use super::end::GuestEnd;
use super::endpoint::Endpoint;
use super::pci::discover::{self, PciDeviceKind};
use super::pci::{self, PciError};
use super::stream::tcp::{self, TcpError};
use super::stream::tls::{Certificates, TlsError};
use super::stream::vsock;
use super::unix;
use crate::size::shown;

/// The environment variable with the folder of certificates for `tcp`.
pub const CERTIFICATES: &str = "VGPU_CERTS";

/// Why the guest has no link to an endpoint. The message says what the user can do.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The link over a unix socket has failed.
    #[error(transparent)]
    Unix(#[from] unix::UnixConnectError),
    /// The link over a PCI device has failed.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// The endpoint `pci` stands for all vGPUs, and this machine has none.
    #[error("pci: no vGPU among the {devices} PCI devices of this machine")]
    NoVgpu {
        /// The number of PCI devices.
        devices: usize,
    },
    /// The machine has no vsock device.
    #[error("this machine has no vsock device")]
    NoVsock,
    /// The link over vsock has failed.
    #[error("vsock {cid}:{port}: {error}")]
    Vsock {
        /// The context id of the executor's machine.
        cid: u32,
        /// The port of the executor.
        port: u32,
        /// The failed step.
        error: io::Error,
    },
    /// The folder of certificates is unusable.
    #[error("{CERTIFICATES}: {0}")]
    Certificates(TlsError),
    /// The link over TCP has failed.
    #[error(transparent)]
    Tcp(#[from] TcpError),
    /// The caller has passed an endpoint for another function: `inproc`, `pci` without an address,
    /// or an endpoint of the host's side.
    #[error("{0}: a guest cannot connect to this endpoint")]
    NotRemote(Endpoint),
}

/// Connects to the executor at `endpoint`. `timeout` limits the wait for the executor.
///
/// # Errors
///
/// A [`ConnectError`] of the kind of the endpoint.
pub fn connect(endpoint: &Endpoint, timeout: Duration) -> Result<Box<dyn GuestEnd>, ConnectError> {
    match endpoint {
        Endpoint::Unix(path) => Ok(Box::new(unix::connect(path, timeout)?)),
        Endpoint::Pci(Some(address)) => {
            let found = discover::Found::read(Path::new(discover::SYSFS), *address)
                .map_err(|_| PciError::NoDevice { address: *address })?;
            let device = pci::PciDevice::open(&found)?;
            tracing::info!(
                "{found}: a vGPU with a window of {}",
                shown(device.directory().size as u64)
            );
            Ok(Box::new(device.connect(timeout)?))
        }
        &Endpoint::Vsock { cid, port } => {
            let end =
                vsock::connect(cid, port, timeout).map_err(|error| match error.raw_os_error() {
                    Some(libc::EAFNOSUPPORT | libc::ENODEV) => ConnectError::NoVsock,
                    _ => ConnectError::Vsock { cid, port, error },
                })?;
            Ok(Box::new(end))
        }
        Endpoint::Tcp { host, port } => {
            let folder = std::env::var_os(CERTIFICATES).filter(|folder| !folder.is_empty());
            let certificates = folder
                .map(|folder| Certificates::load(Path::new(&folder)))
                .transpose()
                .map_err(ConnectError::Certificates)?;
            for (file, ending) in certificates.iter().flat_map(Certificates::ending) {
                tracing::warn!("{}: {ending}", file.display());
            }
            let end = tcp::connect(host, *port, certificates.as_ref(), timeout)?;
            Ok(Box::new(end))
        }
        Endpoint::Inproc | Endpoint::Pci(None) | Endpoint::VsockUnix { .. } => {
            Err(ConnectError::NotRemote(endpoint.clone()))
        }
    }
}

/// The endpoints that `endpoint` stands for: `pci` stands for every vGPU of this machine, and any
/// other endpoint for itself.
///
/// # Errors
///
/// [`ConnectError::NoVgpu`] when `endpoint` is `pci` and this machine has no vGPU.
pub fn expand(endpoint: &Endpoint) -> Result<Vec<Endpoint>, ConnectError> {
    let Endpoint::Pci(None) = endpoint else {
        return Ok(vec![endpoint.clone()]);
    };
    let devices = discover::all(Path::new(discover::SYSFS));
    for device in &devices {
        match (&device.kind, &device.driver) {
            (PciDeviceKind::Other, _) => {}
            (PciDeviceKind::RealGpu, _) => tracing::info!("{device}: a physical GPU, not touched"),
            (_, Some(driver)) => {
                tracing::info!("{device}: the driver {driver} is bound, not touched");
            }
            _ => tracing::debug!("{device}: a candidate for a vGPU"),
        }
    }
    let found: Vec<Endpoint> = devices
        .iter()
        .filter(|device| device.is_candidate())
        .map(|device| Endpoint::Pci(Some(device.address)))
        .collect();
    if found.is_empty() {
        return Err(ConnectError::NoVgpu {
            devices: devices.len(),
        });
    }
    Ok(found)
}
