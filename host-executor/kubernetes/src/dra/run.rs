//! The loop of the driver.

use std::fs;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{info, warn};

use super::DRIVER;
use super::api_server::{ApiError, ApiServer};
use super::claims::Claims;
use super::resource_slice::{self, is_shareable, slice, slice_name};
use super::services::{DriverService, RegistrationService};
use crate::api::dra::DraPluginServer;
use crate::api::plugin_registration::RegistrationServer;
use crate::guests::GuestsError;
use crate::options::{ClaimOptions, Options};
use crate::problem::Problem;
use crate::socket::Socket;

/// How often the API server is asked for the slice of this node: a kubelet removes it when it
/// starts, and when the driver was gone for long.
const SLICE_INTERVAL: Duration = Duration::from_secs(30);

/// How long after a kubelet has registered the driver the slice is looked at each time.
const AFTER_REGISTRATION: Duration = Duration::from_secs(30);

/// How often the API server is asked for the claims that pods of this node use.
const CLAIMS_INTERVAL: Duration = Duration::from_secs(60);

/// How long nothing is written after the API server has not answered or has refused.
const PAUSE: Duration = Duration::from_secs(5);

/// The looks at a silent executor until its devices are withdrawn: the scheduler would take each
/// slow answer for the end of the devices.
const MAX_SILENT_LOOKS: u32 = 3;

/// Serves the kubelet until `stop` is complete. Containers keep their guests.
///
/// # Errors
/// The folder of the sockets cannot be made.
pub(crate) async fn run(
    options: Arc<Options>,
    claims: Arc<ClaimOptions>,
    stop: impl Future<Output = ()>,
) -> Result<(), GuestsError> {
    let api = Arc::new(ApiServer::new(Arc::clone(&claims)));
    let known = Claims::new(Arc::clone(&options), Arc::clone(&claims), Arc::clone(&api))?;
    let known = Arc::new(known);
    let devices = watch::Sender::new(None);
    let registered = Arc::new(Notify::new());
    let publisher = Publisher {
        node: claims.node.clone(),
        interval: options.interval,
        claims: Arc::clone(&known),
        api,
        published: None,
        slice: Problem::default(),
        ended: Problem::default(),
    };
    // Each waits for others: the one for the executor, the other for the API server.
    let publishes = publisher.run(devices.subscribe(), Arc::clone(&registered));
    let driver = Driver {
        options,
        claim_options: claims,
        claims: known,
        devices,
        registered,
        sockets: None,
        silent_looks: 0,
        problems: Problems::default(),
    };
    tokio::select! {
        () = stop => {}
        () = driver.run() => {}
        () = publishes => {}
    }
    Ok(())
}

/// Looks at the executor and at the sockets.
struct Driver {
    options: Arc<Options>,
    claim_options: Arc<ClaimOptions>,
    claims: Arc<Claims>,
    /// The devices for new claims, once the executor has answered or has not.
    devices: watch::Sender<Option<Vec<Value>>>,
    registered: Arc<Notify>,
    /// The sockets of the driver and of its registration.
    sockets: Option<[Socket; 2]>,
    /// How often the executor has not answered since it has.
    silent_looks: u32,
    problems: Problems,
}

/// What is wrong now.
#[derive(Default)]
struct Problems {
    guests: Problem,
    executor: Problem,
    sockets: Problem,
}

impl Driver {
    async fn run(mut self) {
        let mut ticks = tokio::time::interval(self.options.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.step().await;
        }
    }

    /// Looks at the executor and the sockets once.
    async fn step(&mut self) {
        let outcome = self.claims.reconcile().await;
        let (devices, problem, unavailable) = match outcome {
            Ok(found) => {
                self.silent_looks = 0;
                let devices = resource_slice::devices(&found.executor, &self.options);
                (Some(devices), found.problem, found.executor.unavailable)
            }
            Err(error) => {
                self.silent_looks += 1;
                let is_gone = error.has_no_executor() || self.silent_looks >= MAX_SILENT_LOOKS;
                (is_gone.then(Vec::new), Some(error), None)
            }
        };
        let problem = problem.map(|error| error.to_string());
        self.problems.guests.set(problem);
        self.problems.executor.set(unavailable);
        if devices.is_some() {
            self.devices.send_if_modified(|known| {
                let is_new = *known != devices;
                *known = devices;
                is_new
            });
        }
        self.serve();
    }

    /// Serves the kubelet at the sockets of the driver.
    fn serve(&mut self) {
        let is_current = |sockets: &[Socket; 2]| sockets.iter().all(Socket::is_current);
        if self.sockets.as_ref().is_some_and(is_current) {
            return;
        }
        // First the old sockets go, whose paths the new ones have.
        self.sockets = None;
        let problem = match self.sockets() {
            Ok(sockets) => {
                self.sockets = Some(sockets);
                None
            }
            Err((path, error)) => Some(format!("{}: {error}", path.display())),
        };
        self.problems.sockets.set(problem);
    }

    fn sockets(&self) -> Result<[Socket; 2], (PathBuf, io::Error)> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |error| (path, error)
        };
        let kubelet = &self.options.kubelet;
        let folder = kubelet.join("plugins").join(DRIVER);
        fs::create_dir_all(&folder).map_err(at(&folder))?;
        let endpoint = folder.join("dra.sock");
        let service = DraPluginServer::new(DriverService {
            options: Arc::clone(&self.claim_options),
            claims: Arc::clone(&self.claims),
        });
        let driver = Socket::serve(&endpoint, service).map_err(at(&endpoint))?;
        // Last: the kubelet, which watches this folder, connects to the other socket. The kubelet
        // sends the path of this socket as the authority of its calls, with escapes for `/`. The
        // HTTP library takes escapes before an `@` only.
        let path = kubelet.join(format!("plugins_registry/driver@{DRIVER}-reg.sock"));
        let service = RegistrationServer::new(RegistrationService {
            endpoint: endpoint.display().to_string(),
            registered: Arc::clone(&self.registered),
        });
        let registration = Socket::serve(&path, service).map_err(at(&path))?;
        Ok([driver, registration])
    }
}

/// What the API server has of this node.
struct Published {
    devices: Vec<Value>,
    /// The version of the object that this driver has written.
    version: String,
}

/// Tells the API server of the devices, and asks it for the claims.
struct Publisher {
    node: String,
    /// How often the slice is looked at after a registration.
    interval: Duration,
    claims: Arc<Claims>,
    api: Arc<ApiServer>,
    published: Option<Published>,
    slice: Problem,
    ended: Problem,
}

impl Publisher {
    async fn run(mut self, mut devices: watch::Receiver<Option<Vec<Value>>>, known: Arc<Notify>) {
        let mut next_slice = Instant::now();
        let mut next_claims = Instant::now();
        let mut often_until = Instant::now();
        loop {
            let at = next_slice.min(next_claims);
            tokio::select! {
                changed = devices.changed() => match changed {
                    Ok(()) => next_slice = Instant::now(),
                    Err(_) => return, // the driver has ended
                },
                // A kubelet that has registered the driver may have started, and removes the slice.
                () = known.notified() => {
                    next_slice = Instant::now();
                    often_until = next_slice + AFTER_REGISTRATION;
                }
                () = tokio::time::sleep_until(at) => {}
            }
            let now = Instant::now();
            let wanted = devices.borrow_and_update().clone();
            if let (Some(wanted), true) = (wanted, now >= next_slice) {
                let outcome = self.publish(wanted).await;
                let pause = match &outcome {
                    Err(_) => PAUSE,
                    Ok(()) if now < often_until => self.interval,
                    Ok(()) => SLICE_INTERVAL,
                };
                next_slice = Instant::now() + pause;
                self.slice.set(outcome.err().map(|error| error.to_string()));
            } else if now >= next_slice {
                // The executor has not been asked yet.
                next_slice = now + self.interval;
            }
            if now >= next_claims {
                let outcome = self.claims.end_forgotten().await;
                next_claims = Instant::now() + CLAIMS_INTERVAL;
                self.ended.set(outcome.err().map(|error| error.to_string()));
            }
        }
    }

    /// Makes the API server's slice of this node the one with `devices`.
    async fn publish(&mut self, devices: Vec<Value>) -> Result<(), PublishError> {
        let name = &self.node;
        let path = format!("{}/{}", resource_slice::PATH, slice_name(name));
        let there = self.api.get(&path).await?;
        let version = |object: &Value| object["metadata"]["resourceVersion"].clone();
        if let (Some(there), Some(known)) = (&there, &self.published)
            && known.devices == devices
            && version(there) == known.version.as_str()
        {
            return Ok(());
        }
        let node = self.api.get(&format!("/api/v1/nodes/{name}")).await?;
        let uid = node
            .as_ref()
            .and_then(|node| node["metadata"]["uid"].as_str());
        let uid = uid.ok_or_else(|| PublishError::NoNode(name.clone()))?;
        let made = match there {
            None => {
                let object = slice(name, uid, 1, &devices);
                self.api.create(resource_slice::PATH, object).await?
            }
            Some(there) => {
                let generation = there["spec"]["pool"]["generation"].as_i64().unwrap_or(0);
                let next = generation.checked_add(1).ok_or(PublishError::Generation)?;
                let mut object = slice(name, uid, next, &devices);
                // What others have written meanwhile is not lost: the API server refuses then.
                object["metadata"]["resourceVersion"] = version(&there);
                self.api.replace(&path, object).await?
            }
        };
        info!(devices = devices.len(), "the API server knows the devices");
        if !is_shareable(&made) {
            warn!(
                "the API server has no feature DRAConsumableCapacity: each claim gets a whole \
                 device. Once the API server has the feature, start the driver again"
            );
        }
        self.published = Some(Published {
            devices,
            version: version(&made).as_str().unwrap_or_default().into(),
        });
        Ok(())
    }
}

/// Why the API server does not know the devices.
#[derive(Debug, thiserror::Error)]
enum PublishError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("the cluster has no node {0:?}: check --node")]
    NoNode(String),
    #[error("the generation of the node's ResourceSlice is the largest number: delete the object")]
    Generation,
}
