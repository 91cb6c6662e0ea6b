//! Finding the executors and their devices.

use std::sync::Arc;

use vgpu_transport::link::connect::expand;
use vgpu_transport::link::{Endpoint, EndpointError};
use vgpu_transport::wire::DeviceIndex;

use crate::connect::{DeviceAddress, LONG, connect};
use crate::ggml::Ggml;
use crate::session::Session;

/// The devices that were found.
pub(crate) struct Discovery {
    /// Where they are, with an open session to each.
    pub(crate) found: Vec<(DeviceAddress, Arc<Session>)>,
    /// Why others were not found, one line each.
    pub(crate) missing: Vec<String>,
}

/// What `VGPU_ENDPOINT` names is not a list of endpoints. The user's fault.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DiscoveryError {
    /// The value is not UTF-8.
    #[error("VGPU_ENDPOINT: not UTF-8")]
    NotText,
    /// An entry of the list is not an endpoint.
    #[error("VGPU_ENDPOINT: {0}")]
    Endpoint(#[from] EndpointError),
}

/// Where to look for executors.
struct Candidates {
    endpoints: Vec<Endpoint>,
    /// Whether one executor is enough: for the default places. Of every endpoint that the user
    /// names, the devices are wanted.
    is_one_enough: bool,
}

/// Connects to the devices of the executors that `VGPU_ENDPOINT` names; without the variable, to
/// those of the first executor at the default places.
///
/// # Errors
///
/// [`DiscoveryError`] if the variable is not a list of endpoints.
pub(crate) fn discover(ggml: &Ggml) -> Result<Discovery, DiscoveryError> {
    let candidates = candidates()?;
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for candidate in candidates.endpoints {
        let elsewhere = missing.len();
        let endpoints = match expand(&candidate) {
            Ok(endpoints) => endpoints,
            Err(reason) => {
                missing.push(reason.to_string());
                continue;
            }
        };
        for endpoint in endpoints {
            let mut device = 0;
            let mut devices = 1;
            while device < devices {
                let address = DeviceAddress {
                    endpoint: endpoint.clone(),
                    device: DeviceIndex(device),
                };
                match connect(&address, ggml, LONG) {
                    Ok(session) => {
                        // The first session says how many there are.
                        if device == 0 {
                            devices = session.welcome().devices.0;
                        }
                        found.push((address, session));
                    }
                    Err(error) => {
                        missing.push(error.to_string());
                        // Each further attempt might wait as long as this one.
                        break;
                    }
                }
                device += 1;
            }
        }
        if candidates.is_one_enough && !found.is_empty() {
            missing.drain(..elsewhere); // nobody has named the other places
            break;
        }
    }
    Ok(Discovery { found, missing })
}

fn candidates() -> Result<Candidates, DiscoveryError> {
    let Some(named) = std::env::var_os("VGPU_ENDPOINT").filter(|value| !value.is_empty()) else {
        return Ok(Candidates {
            endpoints: Endpoint::defaults(),
            is_one_enough: true,
        });
    };
    let named = named.into_string().map_err(|_| DiscoveryError::NotText)?;
    let endpoints = named
        .split(',')
        .map(|one| one.trim().parse::<Endpoint>())
        .collect::<Result<Vec<Endpoint>, EndpointError>>()?;
    Ok(Candidates {
        endpoints,
        is_one_enough: false,
    })
}
