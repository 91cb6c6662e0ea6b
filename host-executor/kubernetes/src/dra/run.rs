//! The loop of the driver.

use std::fs;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::{Mutex, Notify};
use tokio::time::MissedTickBehavior;
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
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// How long after a kubelet has registered the driver the slice is looked at each time.
const AFTER_REGISTRATION: Duration = Duration::from_secs(30);

/// How often the API server is asked for the claims that pods of this node use.
const CLAIMS_INTERVAL: Duration = Duration::from_secs(60);

/// What the API server is asked once is waited for so long, if it fails.
const PAUSE: Duration = Duration::from_secs(5);

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
    let mut driver = Driver {
        options,
        claim_options: claims,
        claims: Arc::new(Mutex::new(known)),
        api,
        registered: Arc::new(Notify::new()),
        sockets: None,
        published: None,
        next_check: Instant::now(),
        check_until: Instant::now(),
        next_claims: Instant::now(),
        problems: Problems::default(),
    };
    let mut ticks = tokio::time::interval(driver.options.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tokio::pin!(stop);
    loop {
        let step = async {
            let registered = driver.registered.clone();
            tokio::select! {
                _ = ticks.tick() => {}
                () = registered.notified() => driver.is_registered(),
            }
            driver.step().await;
        };
        tokio::select! {
            () = &mut stop => return Ok(()),
            () = step => {}
        }
    }
}

/// What the API server has of this node.
struct Published {
    devices: Vec<Value>,
    /// The version of the object that this driver has written.
    version: String,
}

struct Driver {
    options: Arc<Options>,
    claim_options: Arc<ClaimOptions>,
    claims: Arc<Mutex<Claims>>,
    api: Arc<ApiServer>,
    registered: Arc<Notify>,
    /// The sockets of the driver and of its registration.
    sockets: Option<[Socket; 2]>,
    published: Option<Published>,
    next_check: Instant,
    check_until: Instant,
    next_claims: Instant,
    problems: Problems,
}

/// What is wrong now.
#[derive(Default)]
struct Problems {
    guests: Problem,
    executor: Problem,
    sockets: Problem,
    slice: Problem,
    claims: Problem,
}

impl Driver {
    /// A kubelet that has registered the driver may have started, and removes the slice then.
    fn is_registered(&mut self) {
        self.check_until = Instant::now() + AFTER_REGISTRATION;
        self.next_check = Instant::now();
    }

    /// Looks at the executor, the kubelet and the API server once.
    async fn step(&mut self) {
        let outcome = self.claims.lock().await.reconcile().await;
        let (devices, problem, unavailable) = match outcome {
            Ok(found) => (
                resource_slice::devices(&found.executor, &self.options),
                found.problem,
                found.executor.unavailable,
            ),
            Err(error) => (Vec::new(), Some(error), None),
        };
        let problem = problem.map(|error| error.to_string());
        self.problems.guests.set(problem);
        self.problems.executor.set(unavailable);
        self.serve();

        let now = Instant::now();
        let is_new = { self.published.as_ref() }.is_none_or(|known| known.devices != devices);
        let is_due = now >= self.next_check || now < self.check_until;
        if is_due || (is_new && self.problems.slice.is_none()) {
            let outcome = self.publish(devices).await;
            self.next_check = Instant::now()
                + match outcome {
                    Ok(()) => CHECK_INTERVAL,
                    Err(_) => PAUSE,
                };
            let problem = outcome.err().map(|error| error.to_string());
            self.problems.slice.set(problem);
        }
        if now >= self.next_claims {
            let outcome = self.claims.lock().await.end_forgotten().await;
            self.next_claims = Instant::now() + CLAIMS_INTERVAL;
            let problem = outcome.err().map(|error| error.to_string());
            self.problems.claims.set(problem);
        }
    }

    /// Makes the API server's slice of this node the one with `devices`.
    async fn publish(&mut self, devices: Vec<Value>) -> Result<(), ApiError> {
        let name = &self.claim_options.node;
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
        let uid = uid.unwrap_or_default();
        let made = match there {
            None => {
                let object = slice(name, uid, 1, &devices);
                self.api.create(resource_slice::PATH, object).await?
            }
            Some(there) => {
                let generation = there["spec"]["pool"]["generation"].as_i64().unwrap_or(0);
                let mut object = slice(name, uid, generation + 1, &devices);
                // What others have written meanwhile is not lost: the API server refuses then.
                object["metadata"]["resourceVersion"] = version(&there);
                self.api.replace(&path, object).await?
            }
        };
        info!(devices = devices.len(), "the API server knows the devices");
        if !is_shareable(&made) {
            warn!(
                "the API server has no feature DRAConsumableCapacity: each claim gets a whole \
                 device"
            );
        }
        self.published = Some(Published {
            devices,
            version: version(&made).as_str().unwrap_or_default().into(),
        });
        Ok(())
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
        // Last: the kubelet, which watches this folder, connects to the other socket.
        let path = kubelet.join(format!("plugins_registry/{DRIVER}-reg.sock"));
        let service = RegistrationServer::new(RegistrationService {
            endpoint: endpoint.display().to_string(),
            registered: Arc::clone(&self.registered),
        });
        let registration = Socket::serve(&path, service).map_err(at(&path))?;
        Ok([driver, registration])
    }
}
