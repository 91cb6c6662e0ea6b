//! The loop of the device plugin.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::{Mutex, watch};
use tokio::time::MissedTickBehavior;
use tracing::info;
use vgpu_executor::added_guests::GuestList;

use crate::devices::{Capacity, Gpu, Resource};
use crate::dra;
use crate::numa;
use crate::options::{Options, OptionsError};
use crate::problem::Problem;
use crate::reconciler::{Outcome, Reconciler};
use crate::registration::Registration;
use crate::services::Service;

/// Why a device plugin or a driver does not start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum PluginError {
    #[error(transparent)]
    Options(#[from] OptionsError),
    #[error("{}: there is no guest plugin", .0.display())]
    NoPlugin(PathBuf),
    #[error("the folder of the sockets: {0}")]
    Folder(String),
}

/// Serves the kubelet until `stop` is complete. Containers keep their guests.
///
/// # Errors
/// The options have a mistake, the guest plugin does not exist, or there is no folder for sockets.
pub async fn run(options: Options, stop: impl Future<Output = ()>) -> Result<(), PluginError> {
    options.check()?;
    if !options.plugin.is_file() {
        return Err(PluginError::NoPlugin(options.plugin));
    }
    let options = Arc::new(options);
    if let Some(claims) = &options.claims {
        let claims = Arc::new(claims.clone());
        let ended = dra::run(options, claims, stop).await;
        return ended.map_err(|error| PluginError::Folder(error.to_string()));
    }
    let reconciler = Reconciler::new(Arc::clone(&options));
    let reconciler = reconciler.map_err(|error| PluginError::Folder(error.to_string()))?;
    let mut plugin = Plugin {
        reconciler: Arc::new(Mutex::new(reconciler)),
        capacity: watch::Sender::new(Capacity {
            is_healthy: false,
            seats: options.seats,
            slice: options.slice,
            gpus: Vec::new(),
            withheld: BTreeSet::new(),
        }),
        options,
        registration: None,
        problems: Problems::default(),
    };
    let mut ticks = tokio::time::interval(plugin.options.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tokio::pin!(stop);
    loop {
        let step = async {
            ticks.tick().await;
            plugin.step().await;
        };
        tokio::select! {
            () = &mut stop => return Ok(()),
            () = step => {}
        }
    }
}

struct Plugin {
    options: Arc<Options>,
    reconciler: Arc<Mutex<Reconciler>>,
    capacity: watch::Sender<Capacity>,
    registration: Option<Registration>,
    problems: Problems,
}

impl Plugin {
    /// Looks at the executor and at the kubelet once.
    async fn step(&mut self) {
        let outcome = self.reconciler.lock().await.reconcile().await;
        let (found, taken, problem) = match outcome {
            Ok(Outcome {
                executor,
                taken,
                problem,
            }) => (Some(executor), taken, problem),
            Err(error) => (None, None, Some(error)),
        };
        self.problems
            .guests
            .set(problem.map(|error| error.to_string()));
        let executor = found.as_ref();
        let unavailable = executor.and_then(|executor| executor.unavailable.clone());
        self.problems.executor.set(unavailable);
        let options = &self.options;
        let is_changed = self.capacity.send_if_modified(|capacity| {
            let before = capacity.clone();
            capacity.is_healthy = false;
            if let Some(executor) = &found {
                capacity.is_healthy = executor.unavailable.is_none();
                capacity.gpus = gpus(executor, options);
            }
            if let Some(taken) = &taken {
                capacity.withhold(taken);
            }
            *capacity != before
        });
        if is_changed {
            let capacity = self.capacity.borrow();
            info!(
                healthy = capacity.is_healthy,
                seats = capacity.seats,
                gpus = capacity.gpus.len(),
                slices = capacity.gpus.iter().map(|gpu| gpu.slices).sum::<u64>(),
                withheld = capacity.withheld.len(),
                "the devices of the node"
            );
        }
        self.register().await;
    }

    /// Registers the plugin with a kubelet that does not know it.
    async fn register(&mut self) {
        let registration = self.registration.as_ref();
        if registration.is_some_and(|known| known.is_current(&self.options)) {
            return;
        }
        // First the old sockets go, whose paths the new ones have.
        self.registration = None;
        let service = |resource: Resource| Service {
            resource,
            options: Arc::clone(&self.options),
            capacity: self.capacity.subscribe(),
            reconciler: Arc::clone(&self.reconciler),
        };
        let problem = match Registration::new(&self.options, service).await {
            Ok(registration) => {
                self.registration = Some(registration);
                info!("registered with the kubelet");
                None
            }
            Err(error) => Some(error.to_string()),
        };
        self.problems.registration.set(problem);
    }
}

/// The devices of an executor.
fn gpus(executor: &GuestList, options: &Options) -> Vec<Gpu> {
    if executor.devices.is_empty() {
        // An older executor.
        return vec![Gpu::new(executor.memory, 0, options.slice, 1)];
    }
    let count = executor.devices.len();
    let gpus = executor.devices.iter().map(|device| {
        let address = device.address.as_ref();
        Gpu {
            node: address.and_then(|address| numa::node_of(&options.sysfs, address)),
            ..Gpu::new(device.memory, device.raised, options.slice, count)
        }
    });
    gpus.collect()
}

/// What is wrong now.
#[derive(Default)]
struct Problems {
    guests: Problem,
    executor: Problem,
    registration: Problem,
}
