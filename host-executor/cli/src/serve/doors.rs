//! The doors that guests come in through, as the settings have them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use rustix::io::Errno;
use tracing::{error, info};
use vgpu_executor::config::{GuestSettings, Settings, VmDevice};
use vgpu_executor::isolate::Supervisor;
use vgpu_executor::vm::{IvshmemDoor, VfioUserDoor, VmListenError, VmOptions, listen_stream};
use vgpu_executor::{DoorId, Server};
use vgpu_transport::link::Endpoint;
use vgpu_transport::link::stream::tls::Certificates;
use vgpu_transport::link::stream::{tcp, vsock};
use vgpu_transport::link::unix::{ListenError, ListenOptions, Listener};

/// A door as the settings have it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Plan {
    /// Whose own it is.
    guest: Option<String>,
    place: Place,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Endpoint { endpoint: Endpoint, mode: u32 },
    Vm(VmOptions),
}

impl Plan {
    /// What can be listened on only once.
    fn address(&self) -> String {
        match &self.place {
            Place::Endpoint { endpoint, .. } => endpoint.to_string(),
            Place::Vm(options) => format!("vm:{}", options.socket.display()),
        }
    }
}

fn plans(settings: &Settings) -> Vec<Plan> {
    let mode = settings.mode;
    let common = settings.listen.iter().map(|endpoint| Plan {
        guest: None,
        place: Place::Endpoint {
            endpoint: endpoint.clone(),
            mode,
        },
    });
    let own = settings.guests.iter().flat_map(|guest| {
        let mode = guest.mode;
        let endpoints = guest.listen.iter().map(move |endpoint| Place::Endpoint {
            endpoint: endpoint.clone(),
            mode,
        });
        let places = endpoints.chain(guest.vm.clone().map(Place::Vm));
        places.map(|place| Plan {
            guest: Some(guest.rule.name.clone()),
            place,
        })
    });
    common.chain(own).collect()
}

/// What lies behind the doors: who serves those that come in.
pub(super) trait House {
    /// Lets guests in from now on; with a name, whoever comes in is that guest.
    fn let_in(&mut self, guest: Option<String>, door: Listening) -> io::Result<DoorId>;
    /// Lets nobody in through this door any more.
    fn close(&mut self, door: DoorId);
}

impl House for Server {
    fn let_in(&mut self, guest: Option<String>, door: Listening) -> io::Result<DoorId> {
        match door {
            Listening::Unix(door) => self.open_for(guest, door),
            Listening::Tcp(door) => self.open_for(guest, door),
            Listening::Vsock(door) => self.open_for(guest, door),
            Listening::Ivshmem(door) => self.open_for(guest, door),
            Listening::VfioUser(door) => self.open_for(guest, door),
        }
    }

    fn close(&mut self, door: DoorId) {
        Server::close(self, door);
    }
}

impl House for Supervisor {
    fn let_in(&mut self, guest: Option<String>, door: Listening) -> io::Result<DoorId> {
        match door {
            Listening::Unix(door) => self.open_for(guest, door),
            Listening::Tcp(door) => self.open_for(guest, door),
            Listening::Vsock(door) => self.open_for(guest, door),
            Listening::Ivshmem(_) | Listening::VfioUser(_) => Err(io::Error::other(
                "a virtual machine's own process listens for it",
            )),
        }
    }

    fn close(&mut self, door: DoorId) {
        Supervisor::close(self, door);
    }
}

/// The doors that are open.
pub(super) struct Doors {
    certificates: Option<Certificates>,
    device: VmDevice,
    /// Whether virtual machines come in through them.
    has_machines: bool,
    open: Vec<(Plan, DoorId)>,
}

/// A door that somebody listens at, and nobody comes in through yet.
pub(super) struct Ready(Plan, Listening);

impl Doors {
    pub(super) fn new(settings: &Settings) -> anyhow::Result<Doors> {
        let folder = settings.certs.as_deref();
        Ok(Doors {
            certificates: folder
                .map(|folder| Certificates::load(folder).context("certificates"))
                .transpose()?,
            device: settings.device,
            has_machines: true,
            open: Vec::new(),
        })
    }

    /// The doors of a supervisor: virtual machines have processes that listen for themselves.
    pub(super) fn without_machines(settings: &Settings) -> anyhow::Result<Doors> {
        Ok(Doors {
            has_machines: false,
            ..Doors::new(settings)?
        })
    }

    fn plans(&self, settings: &Settings) -> Vec<Plan> {
        let mut plans = plans(settings);
        plans.retain(|plan| self.has_machines || !matches!(plan.place, Place::Vm(_)));
        plans
    }

    /// Listens wherever the settings say and nobody listens yet. On failure nothing has changed.
    pub(super) fn prepare(
        &self,
        settings: &Settings,
        kept: &mut BTreeMap<String, OwnedFd>,
    ) -> anyhow::Result<Vec<Ready>> {
        let is_taken = |plan: &Plan| {
            let address = plan.address();
            self.open.iter().any(|(open, _)| open.address() == address)
        };
        let known = |guest: &&GuestSettings| !guest.rule.certificates.is_empty();
        if let (None, Some(guest)) = (&self.certificates, settings.guests.iter().find(known)) {
            bail!(
                "guest {:?} is known by its certificate, and there are none: make some with `vgpu cert`, and name their \
                 folder with certs in [server], or --certs",
                guest.rule.name
            );
        }
        let new = self
            .plans(settings)
            .into_iter()
            .filter(|plan| !is_taken(plan));
        new.map(|plan| self.listen(plan, kept)).collect()
    }

    /// Opens what was prepared and closes what the settings have no longer. Doors that became somebody else's are
    /// closed and opened again.
    pub(super) fn switch(
        &mut self,
        house: &mut impl House,
        settings: &Settings,
        prepared: Vec<Ready>,
    ) -> anyhow::Result<()> {
        let plans = self.plans(settings);
        let (stay, go): (Vec<_>, Vec<_>) = std::mem::take(&mut self.open)
            .into_iter()
            .partition(|(plan, _)| plans.contains(plan));
        self.open = stay;
        for (plan, door) in go {
            info!("listening on {} no longer", plan.address());
            house.close(door);
        }
        for ready in prepared {
            self.open(house, ready)?;
        }
        for plan in plans {
            if self.open.iter().any(|(open, _)| *open == plan) {
                continue;
            }
            match self.listen(plan, &mut BTreeMap::new()) {
                Ok(ready) => self.open(house, ready)?,
                Err(error) => error!("a door stays closed: {error:#}"),
            }
        }
        Ok(())
    }

    /// Where guests can come, as `vgpu serve` says it.
    pub(super) fn addresses(&self) -> Vec<String> {
        self.open.iter().map(|(plan, _)| plan.address()).collect()
    }

    fn open(&mut self, house: &mut impl House, ready: Ready) -> anyhow::Result<()> {
        let Ready(plan, listening) = ready;
        let address = plan.address();
        let guest = plan.guest.clone();
        match &guest {
            Some(guest) => info!(guest, "listening on {address}"),
            None => info!("listening on {address}"),
        }
        let door = house
            .let_in(guest, listening)
            .context("no thread for a listener")?;
        self.open.push((plan, door));
        Ok(())
    }

    fn listen(&self, plan: Plan, kept: &mut BTreeMap<String, OwnedFd>) -> anyhow::Result<Ready> {
        let listening = match &plan.place {
            Place::Endpoint { endpoint, mode } => {
                listen(endpoint, *mode, self.certificates.as_ref())?
            }
            Place::Vm(options) => machine(options.clone(), self.device, kept)?,
        };
        Ok(Ready(plan, listening))
    }
}

/// A listener of some kind.
pub(super) enum Listening {
    Unix(Listener),
    Tcp(tcp::Listener),
    Vsock(vsock::Listener),
    Ivshmem(IvshmemDoor),
    VfioUser(VfioUserDoor),
}

fn listen(
    endpoint: &Endpoint,
    mode: u32,
    certificates: Option<&Certificates>,
) -> anyhow::Result<Listening> {
    let failed = |error: &dyn std::fmt::Display| anyhow!("cannot listen on {endpoint}: {error}");
    match endpoint {
        Endpoint::Unix(path) => Listener::bind(
            path,
            ListenOptions {
                mode,
                ..ListenOptions::default()
            },
        )
        .map(Listening::Unix)
        .map_err(|error| {
            let hint = hint(path, &error);
            anyhow!("cannot listen on {endpoint}: {error}{hint}")
        }),
        Endpoint::Tcp { host, port } => {
            let listener = tcp::Listener::bind(host, *port, certificates.cloned());
            listener.map(Listening::Tcp).map_err(|e| failed(&e))
        }
        Endpoint::Vsock { port, .. } => {
            let listener = vsock::Listener::kernel(*port);
            listener.map(Listening::Vsock).map_err(|e| failed(&e))
        }
        Endpoint::VsockUnix { path, port } => {
            let mut name = path.clone().into_os_string();
            name.push(format!("_{port}"));
            let path = PathBuf::from(name);
            let listener = listen_stream(&path).map_err(|e| failed(&e))?;
            Ok(Listening::Vsock(vsock::Listener::unix(listener, &path)))
        }
        Endpoint::Inproc | Endpoint::Pci(_) => bail!(
            "--listen {endpoint}: an executor cannot listen there; use unix:/path/to/socket, tcp:HOST:PORT or \
             vsock:PORT, and --vm for virtual machines"
        ),
    }
}

/// The door of a virtual machine.
fn machine(
    options: VmOptions,
    device: VmDevice,
    kept: &mut BTreeMap<String, OwnedFd>,
) -> anyhow::Result<Listening> {
    let path = options.socket.clone();
    let opened = match device {
        VmDevice::Ivshmem => IvshmemDoor::open(options, kept).map(Listening::Ivshmem),
        VmDevice::VfioUser => VfioUserDoor::open(options).map(Listening::VfioUser),
    };
    opened.map_err(|error| {
        let directory = path.parent().unwrap_or(&path).display();
        let hint = match &error {
            VmListenError::InUse { .. } => "; stop it, or give this virtual machine another socket",
            VmListenError::System { error, .. } if error.kind() == io::ErrorKind::NotFound => {
                return anyhow!("--vm: {error}; create it (mkdir -p {directory})");
            }
            _ => "",
        };
        anyhow!("--vm: {error}{hint}")
    })
}

/// What the user can do about it.
fn hint(path: &Path, error: &ListenError) -> String {
    let directory = path.parent().unwrap_or(path).display();
    match error {
        ListenError::InUse { .. } => {
            "; stop it, or listen elsewhere with --listen unix:/path/to/socket".into()
        }
        ListenError::NotASocket { .. } => "; remove it, or listen elsewhere with --listen".into(),
        ListenError::NoDirectory { .. } => {
            format!("; create it (mkdir -p {directory}), or listen elsewhere with --listen")
        }
        ListenError::System {
            error: Errno::ACCESS | Errno::PERM | Errno::ROFS,
            ..
        } => format!(
            "; this user may not write to {directory}: start vgpu as its owner, or listen in a directory of \
             your own, such as --listen unix:$XDG_RUNTIME_DIR/vgpu.sock, and set VGPU_ENDPOINT to the same \
             for guests"
        ),
        _ => String::new(),
    }
}
