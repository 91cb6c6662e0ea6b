//! The listeners that the settings describe.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use rustix::io::Errno;
use signal_hook::consts::SIGTERM;
use tracing::{error, info};
use vgpu_executor::config::{GuestSettings, Settings, VmDevice};
use vgpu_executor::isolate::Supervisor;
use vgpu_executor::listener::{ListenerId, Watched};
use vgpu_executor::vm::{IvshmemListener, VfioUserConnections, VfioUserListener, VmOptions};
use vgpu_executor::{Server, service};
use vgpu_transport::link::Endpoint;
use vgpu_transport::link::socket_file::{DEFAULT_MODE, SocketFileError};
use vgpu_transport::link::stream::tls::Certificates;
use vgpu_transport::link::stream::{tcp, vsock};
use vgpu_transport::link::unix::{self, ListenError, ListenOptions};

use super::certificates;
use super::sandboxing::Confined;
use crate::error_text;

/// A listener that the settings ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ListenerSpec {
    /// The guest to which the listener belongs. `None`: all guests.
    guest: Option<String>,
    address: ListenAddress,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum ListenAddress {
    Endpoint { endpoint: Endpoint, mode: u32 },
    Vm(VmOptions),
}

impl ListenerSpec {
    /// The address in text. Only one listener can have it.
    fn address(&self) -> String {
        match &self.address {
            ListenAddress::Endpoint { endpoint, .. } => endpoint.to_string(),
            ListenAddress::Vm(options) => format!("vm:{}", options.socket.display()),
        }
    }
}

fn specs(settings: &Settings) -> Vec<ListenerSpec> {
    let endpoint = |endpoint: &Endpoint, mode| ListenAddress::Endpoint {
        endpoint: endpoint.clone(),
        mode,
    };
    let common = settings.listen.iter().map(|listen| ListenerSpec {
        guest: None,
        address: endpoint(listen, settings.mode),
    });
    let own = settings.guests.iter().flat_map(|guest| {
        let endpoints = { guest.listen.iter() }.map(move |listen| endpoint(listen, guest.mode));
        let addresses = endpoints.chain(guest.vm.clone().map(ListenAddress::Vm));
        addresses.map(|address| ListenerSpec {
            guest: Some(guest.rule.name.clone()),
            address,
        })
    });
    common.chain(own).collect()
}

/// Accepts guests on listeners: a server, or a supervisor.
pub(super) trait Acceptor {
    /// Accepts guests on `listener` from now on. With a name, everyone who connects to it is that
    /// guest.
    fn accept_on(&mut self, guest: Option<String>, listener: AnyListener)
    -> io::Result<ListenerId>;
    /// Closes a listener. Connected guests stay.
    fn close(&mut self, listener: ListenerId);
}

impl Acceptor for Server {
    fn accept_on(
        &mut self,
        guest: Option<String>,
        listener: AnyListener,
    ) -> io::Result<ListenerId> {
        match listener {
            AnyListener::Unix(listener) => self.listen_for(guest, Watched::new(listener)),
            AnyListener::Tcp(listener) => self.listen_for(guest, listener),
            AnyListener::Vsock(listener) => self.listen_for(guest, Watched::new(listener)),
            AnyListener::Ivshmem(listener) => self.listen_for(guest, Watched::new(listener)),
            AnyListener::VfioUser(listener) => self.listen_for(guest, Watched::new(listener)),
        }
    }

    fn close(&mut self, listener: ListenerId) {
        Server::close(self, listener);
    }
}

impl Acceptor for Supervisor {
    fn accept_on(
        &mut self,
        guest: Option<String>,
        listener: AnyListener,
    ) -> io::Result<ListenerId> {
        match listener {
            AnyListener::Unix(listener) => self.listen_for(guest, Watched::new(listener)),
            AnyListener::Tcp(listener) => self.listen_for(guest, listener),
            AnyListener::Vsock(listener) => self.listen_for(guest, Watched::new(listener)),
            AnyListener::Ivshmem(_) | AnyListener::VfioUser(_) => Err(io::Error::other(
                "a supervisor does not listen for virtual machines: each has a process that does",
            )),
        }
    }

    fn close(&mut self, listener: ListenerId) {
        Supervisor::close(self, listener);
    }
}

/// The open listeners.
pub(super) struct Listeners {
    certificates: Option<Certificates>,
    device: VmDevice,
    /// Whether virtual machines are among them.
    has_machines: bool,
    /// Whether the process gives up making sockets.
    is_isolated: bool,
    open: Vec<(ListenerSpec, ListenerId)>,
}

/// A listener that is bound and does not accept yet.
pub(super) struct BoundListener(ListenerSpec, AnyListener);

impl Listeners {
    pub(super) fn new(settings: &Settings) -> anyhow::Result<Listeners> {
        Ok(Listeners {
            certificates: certificates::load(settings)?,
            device: settings.device,
            has_machines: true,
            is_isolated: false,
            open: Vec::new(),
        })
    }

    /// The listeners of the process of a virtual machine, which gives up making sockets.
    pub(super) fn of_isolated_machine(settings: &Settings) -> anyhow::Result<Listeners> {
        Ok(Listeners {
            is_isolated: true,
            ..Listeners::new(settings)?
        })
    }

    /// The listeners of a supervisor, without those of virtual machines.
    pub(super) fn without_machines(settings: &Settings) -> anyhow::Result<Listeners> {
        Ok(Listeners {
            has_machines: false,
            ..Listeners::new(settings)?
        })
    }

    /// The certificates of TCP links. Clones see when they are replaced.
    pub(super) fn certificates(&self) -> Option<&Certificates> {
        self.certificates.as_ref()
    }

    fn specs(&self, settings: &Settings) -> Vec<ListenerSpec> {
        let mut specs = specs(settings);
        specs.retain(|spec| self.has_machines || !matches!(spec.address, ListenAddress::Vm(_)));
        specs
    }

    /// Refuses guests that certificates identify if this executor has none.
    pub(super) fn check_identities(&self, settings: &Settings) -> anyhow::Result<()> {
        let has_certificates = |guest: &&GuestSettings| !guest.rule.certificates.is_empty();
        let identified = settings.guests.iter().find(has_certificates);
        if let (None, Some(guest)) = (&self.certificates, identified) {
            bail!(
                "a certificate identifies guest {:?}, and this executor has none: make \
                 certificates with `vgpu cert`, and name their folder with certs in [server], or \
                 --certs",
                guest.rule.name
            );
        }
        Ok(())
    }

    /// Binds the listeners whose addresses are not in use here. If one cannot be bound, nothing has
    /// changed.
    pub(super) fn prepare(&self, settings: &Settings) -> anyhow::Result<Vec<BoundListener>> {
        let is_open = |spec: &ListenerSpec| {
            let address = spec.address();
            self.open.iter().any(|(open, _)| open.address() == address)
        };
        self.check_identities(settings)?;
        let specs = self.specs(settings);
        let new = specs.into_iter().filter(|spec| !is_open(spec));
        new.map(|spec| self.bind(spec)).collect()
    }

    /// Opens the prepared listeners, and closes those that the settings no longer have. A listener
    /// that belongs to another guest now is closed and opened again.
    pub(super) fn switch(
        &mut self,
        acceptor: &mut impl Acceptor,
        settings: &Settings,
        prepared: Vec<BoundListener>,
        _: &Confined,
    ) -> anyhow::Result<()> {
        let specs = self.specs(settings);
        let (kept, removed): (Vec<_>, Vec<_>) = std::mem::take(&mut self.open)
            .into_iter()
            .partition(|(spec, _)| specs.contains(spec));
        self.open = kept;
        for (spec, id) in removed {
            info!("listening on {} no longer", spec.address());
            acceptor.close(id);
        }
        for bound in prepared {
            self.open(acceptor, bound)?;
        }
        for spec in specs {
            if self.open.iter().any(|(open, _)| *open == spec) {
                continue;
            }
            match self.bind(spec) {
                Ok(bound) => self.open(acceptor, bound)?,
                Err(error) => {
                    error!("a listener stays closed: {}", error_text::one_line(&error));
                }
            }
        }
        Ok(())
    }

    /// The addresses of the open listeners.
    pub(super) fn addresses(&self) -> Vec<String> {
        self.open.iter().map(|(spec, _)| spec.address()).collect()
    }

    fn open(&mut self, acceptor: &mut impl Acceptor, bound: BoundListener) -> anyhow::Result<()> {
        let BoundListener(spec, listener) = bound;
        let address = spec.address();
        match &spec.guest {
            Some(guest) => info!(guest, "listening on {address}"),
            None => info!("listening on {address}"),
        }
        let id = acceptor
            .accept_on(spec.guest.clone(), listener)
            .context("no thread for a listener")?;
        self.open.push((spec, id));
        Ok(())
    }

    fn bind(&self, spec: ListenerSpec) -> anyhow::Result<BoundListener> {
        let listener = match &spec.address {
            ListenAddress::Endpoint { endpoint, mode } => {
                bind_endpoint(endpoint, *mode, self.certificates.as_ref())?
            }
            ListenAddress::Vm(options) => bind_vm(options.clone(), self.device, self.is_isolated)?,
        };
        Ok(BoundListener(spec, listener))
    }
}

/// A listener of any kind.
pub(super) enum AnyListener {
    Unix(unix::Listener),
    Tcp(tcp::Listener),
    Vsock(vsock::Listener),
    Ivshmem(IvshmemListener),
    VfioUser(VfioUserListener),
}

fn bind_endpoint(
    endpoint: &Endpoint,
    mode: u32,
    certificates: Option<&Certificates>,
) -> anyhow::Result<AnyListener> {
    let failed = |error: &dyn std::fmt::Display| anyhow!("cannot listen on {endpoint}: {error}");
    match endpoint {
        Endpoint::Unix(path) => {
            let options = ListenOptions {
                mode,
                ..ListenOptions::default()
            };
            let listener = unix::Listener::bind(path, options);
            listener.map(AnyListener::Unix).map_err(|error| {
                let hint = hint(path, &error);
                anyhow!("cannot listen on {endpoint}: {error}{hint}")
            })
        }
        Endpoint::Tcp { host, port } => {
            let listener = tcp::Listener::bind(host, *port, certificates.cloned());
            listener.map(AnyListener::Tcp).map_err(|e| failed(&e))
        }
        Endpoint::Vsock { port, .. } => {
            let listener = vsock::Listener::kernel(*port);
            listener.map(AnyListener::Vsock).map_err(|e| failed(&e))
        }
        Endpoint::VsockUnix { path, port } => {
            let mut name = path.clone().into_os_string();
            name.push(format!("_{port}"));
            let path = PathBuf::from(name);
            let listener = vsock::Listener::unix(&path, DEFAULT_MODE);
            listener.map(AnyListener::Vsock).map_err(|e| failed(&e))
        }
        Endpoint::Inproc | Endpoint::Pci(_) => bail!(
            "--listen {endpoint}: an executor cannot listen there; use unix:/path/to/socket, \
             tcp:HOST:PORT or vsock:PORT, and --vm for virtual machines"
        ),
    }
}

/// Hypervisors of a virtual machine, one after the other, that an isolated process serves.
const MAX_HYPERVISORS: usize = 32;

/// Ends this process as its supervisor would, which starts another one.
fn end_process() {
    // To this thread: the sandbox of the CPU engine has no call for a signal to a process.
    if let Err(error) = signal_hook::low_level::raise(SIGTERM) {
        error!("this process cannot end itself: {error}");
    }
}

/// Listens for a virtual machine's hypervisor. Takes the machine's files in the fd store, also
/// those of an earlier listener of this process.
fn bind_vm(options: VmOptions, device: VmDevice, is_isolated: bool) -> anyhow::Result<AnyListener> {
    let (path, group) = (options.socket.clone(), options.group.clone());
    let opened = match device {
        VmDevice::Ivshmem => {
            let files = service::stored_files();
            let mut files = files.context("copies of the files in the fd store")?;
            IvshmemListener::open(options, &mut files).map(AnyListener::Ivshmem)
        }
        VmDevice::VfioUser if is_isolated => {
            let connections = VfioUserConnections::in_advance(MAX_HYPERVISORS);
            let connections = connections.context("connections for hypervisors")?;
            VfioUserListener::open_isolated(options, connections, end_process)
                .map(AnyListener::VfioUser)
        }
        VmDevice::VfioUser => VfioUserListener::open(options).map(AnyListener::VfioUser),
    };
    opened.map_err(|error| {
        let directory = path.parent().unwrap_or(&path).display();
        let hint = match &error {
            SocketFileError::InUse { .. } => {
                "; stop that process, or give this virtual machine another socket".into()
            }
            SocketFileError::NoDirectory { .. } => {
                format!("; create the directory (mkdir -p {directory})")
            }
            SocketFileError::System {
                error: Errno::PERM, ..
            } if group.is_some() => {
                "; this user must be a member of the group: usermod --append --groups GROUP vgpu, \
                 and restart the service"
                    .into()
            }
            _ => String::new(),
        };
        anyhow!("--vm: {error}{hint}")
    })
}

/// What the user can do about a socket that cannot be bound.
fn hint(path: &Path, error: &ListenError) -> String {
    let directory = path.parent().unwrap_or(path).display();
    let ListenError::Socket(error) = error else {
        return String::new();
    };
    match error {
        SocketFileError::InUse { .. } => {
            "; stop that process, or listen elsewhere with --listen unix:/path/to/socket".into()
        }
        SocketFileError::NotASocket { .. } => {
            "; remove the file, or listen elsewhere with --listen".into()
        }
        SocketFileError::NoDirectory { .. } => {
            format!(
                "; create the directory (mkdir -p {directory}), or listen elsewhere with --listen"
            )
        }
        SocketFileError::System {
            error: Errno::ACCESS | Errno::PERM | Errno::ROFS,
            ..
        } => format!(
            "; this user may not write to {directory}: start vgpu as the owner of the directory, \
             or listen in a directory of your own, such as \
             --listen unix:$XDG_RUNTIME_DIR/vgpu.sock, and set VGPU_ENDPOINT to the same address \
             for guests"
        ),
        _ => String::new(),
    }
}
