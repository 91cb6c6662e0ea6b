//! Finding the executors: each one is a device.

use std::sync::Arc;

use vgpu_transport::link::connect::expand;
use vgpu_transport::link::{Endpoint, EndpointError};

use crate::connect::{LONG, connect};
use crate::ggml::Ggml;
use crate::session::Session;

/// The executors that were found.
pub(crate) struct Discovery {
    /// Where they are, with an open session to each.
    pub(crate) found: Vec<(Endpoint, Arc<Session>)>,
    /// Why the others were not found, one line each.
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
    /// Whether one executor is enough: for the default places. Every endpoint that the user names
    /// is a device.
    is_one_enough: bool,
}

/// Connects to the executors that `VGPU_ENDPOINT` names; without the variable, to the first one at
/// the default places.
///
/// # Errors
///
/// [`DiscoveryError`] if the variable is not a list of endpoints.
pub(crate) fn discover(ggml: &Ggml) -> Result<Discovery, DiscoveryError> {
    let candidates = candidates()?;
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for candidate in candidates.endpoints {
        let endpoints = match expand(&candidate) {
            Ok(endpoints) => endpoints,
            Err(reason) => {
                missing.push(reason.to_string());
                continue;
            }
        };
        for endpoint in endpoints {
            match connect(&endpoint, ggml, LONG) {
                Ok(session) => found.push((endpoint, session)),
                Err(error) => missing.push(error.to_string()),
            }
        }
        if candidates.is_one_enough && !found.is_empty() {
            missing.clear(); // nobody has named the other places
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
