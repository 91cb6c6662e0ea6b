//! From an endpoint to a link: the guest's side, for every kind of link that leaves the process.
#![forbid(unsafe_code)]

use std::path::Path;
use std::time::Duration;

use super::pci::discover::{self, Kind};
use super::stream::tls::Certificates;
use super::stream::{tcp, vsock};
use super::{Endpoint, GuestEnd, pci, unix};

/// The environment variable with the folder of certificates for `tcp`.
pub const CERTIFICATES: &str = "VGPU_CERTS";

/// Connects to the executor at `endpoint`, waiting no longer than `timeout`. An error says what to do about it.
pub fn connect(endpoint: &Endpoint, timeout: Duration) -> Result<Box<dyn GuestEnd>, String> {
    match endpoint {
        Endpoint::Unix(path) => {
            let end = unix::connect(path, timeout).map_err(|e| e.to_string())?;
            Ok(Box::new(end))
        }
        Endpoint::Pci(Some(address)) => {
            let found = discover::Found::read(Path::new(discover::SYSFS), *address)
                .map_err(|_| "there is no such PCI device".to_owned())?;
            let device = pci::Device::open(&found).map_err(|e| e.to_string())?;
            tracing::info!(
                "{found}: a vGPU, window of {} bytes",
                device.directory().size
            );
            Ok(Box::new(
                device.connect(timeout).map_err(|e| e.to_string())?,
            ))
        }
        Endpoint::Vsock { cid, port } => {
            let end = vsock::connect(*cid, *port, timeout).map_err(|e| match e.raw_os_error() {
                Some(libc::EAFNOSUPPORT | libc::ENODEV) => {
                    "this machine has no vsock device".to_owned()
                }
                _ => e.to_string(),
            })?;
            Ok(Box::new(end))
        }
        Endpoint::Tcp { host, port } => {
            let folder = std::env::var_os(CERTIFICATES).filter(|folder| !folder.is_empty());
            let certificates = folder
                .map(|folder| Certificates::load(Path::new(&folder)))
                .transpose()
                .map_err(|e| format!("{CERTIFICATES}: {e}"))?;
            let end = tcp::connect(host, *port, certificates.as_ref(), timeout)
                .map_err(|e| e.to_string())?;
            Ok(Box::new(end))
        }
        Endpoint::Inproc | Endpoint::Pci(None) | Endpoint::VsockUnix { .. } => {
            Err("this is not a place that a guest can connect to".into())
        }
    }
}

/// The endpoints that a user's one stands for: `pci` is every vGPU of this machine. Says why, if that is none.
pub fn expand(endpoint: &Endpoint) -> Result<Vec<Endpoint>, String> {
    let Endpoint::Pci(None) = endpoint else {
        return Ok(vec![endpoint.clone()]);
    };
    let devices = discover::all(Path::new(discover::SYSFS));
    for device in &devices {
        match (&device.kind, &device.driver) {
            (Kind::Other, _) => {}
            (Kind::RealGpu, _) => tracing::info!("{device}: a real GPU, left alone"),
            (_, Some(driver)) => tracing::info!("{device}: has the driver {driver}, left alone"),
            _ => tracing::debug!("{device}: looked at"),
        }
    }
    let found: Vec<Endpoint> = devices
        .iter()
        .filter(|device| device.is_candidate())
        .map(|device| Endpoint::Pci(Some(device.address)))
        .collect();
    if found.is_empty() {
        return Err(format!(
            "pci: no vGPU among the {} PCI devices of this machine",
            devices.len()
        ));
    }
    Ok(found)
}
