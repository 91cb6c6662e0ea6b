//! A virtual machine on a hypervisor that speaks vfio-user (QEMU 10.1 or newer, Cloud Hypervisor):
//! this executor is its PCI device.
//!
//! The function is 10de:2331, class 0302, with a subsystem id that no real GPU has. The `vfio_user`
//! crate implements the protocol. The crate trusts the sizes in the messages that it reads, so a
//! [filter] checks every message of the hypervisor first. A hypervisor that gets past the filter
//! can end only the threads of its own virtual machine.
//!
//! A virtual machine has the threads of one hypervisor at a time: those of the hypervisor before
//! have ended, and have unmapped its window, when the next one is accepted. Sessions of the machine
//! before that have not ended yet still have their slots of that window.

mod connections;
mod device;
mod filter;
pub mod fuzzing;
mod regions;
mod threads;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tracing::info;
use vgpu_transport::link::pci::{VmDoorbell, VmEvent, VmWindow};
use vgpu_transport::link::socket_file::{SocketFile, SocketFileError, bind_stream_for_group};
use vgpu_transport::shm::doorbell::new_eventfd;
use vgpu_transport::shm::memory::sealed_file;

use super::accept::accept_first;
use super::machine_log::MachineLog;
use super::options::VmOptions;
use crate::listener::{GuestListener, IncomingGuest, ListeningSocket, SocketOwner, wait_readable};
use crate::machine_watch::MachineWatch;
pub use connections::Connections;
use device::Function;
use threads::{Device, HypervisorThreads};

/// The longest wait for the threads of a hypervisor that is disconnected, when the next one has
/// connected. They end at once, unless the host is overloaded.
const END_WAIT: Duration = Duration::from_secs(1);

/// A virtual machine with a hypervisor.
struct Machine {
    window: VmWindow,
    threads: HypervisorThreads,
}

/// Listens for one hypervisor, and accepts the programs of its virtual machine.
pub struct VfioUserListener {
    options: VmOptions,
    machine: Option<Machine>,
    /// The threads of the hypervisor before, which is disconnected. While there are any, there is
    /// no machine.
    ending: Option<HypervisorThreads>,
    /// What a dump says of the machine.
    watch: Arc<MachineWatch>,
    log: Arc<MachineLog>,
    listener: UnixListener,
    file: SocketFile,
    connections: Connections,
    /// Called once, when no further hypervisor can be served.
    end: Option<fn()>,
}

impl VfioUserListener {
    /// Listens for a virtual machine's hypervisor.
    ///
    /// # Errors
    /// [`SocketFileError`] if the socket of `options` cannot be bound.
    pub fn open(options: VmOptions) -> Result<VfioUserListener, SocketFileError> {
        VfioUserListener::with(options, Connections::on_demand(), None)
    }

    /// As [`open`](VfioUserListener::open), for a process that gives up making sockets: it has
    /// `connections` for so many hypervisors, one after the other. Calls `end` when the last of
    /// them has ended, so that another process takes over.
    ///
    /// # Errors
    /// [`SocketFileError`] if the socket of `options` cannot be bound.
    pub fn open_isolated(
        options: VmOptions,
        connections: Connections,
        end: fn(),
    ) -> Result<VfioUserListener, SocketFileError> {
        VfioUserListener::with(options, connections, Some(end))
    }

    fn with(
        options: VmOptions,
        connections: Connections,
        end: Option<fn()>,
    ) -> Result<VfioUserListener, SocketFileError> {
        let (path, group) = (&options.socket, options.group.as_deref());
        let (listener, file) = bind_stream_for_group(path, options.mode, group)?;
        Ok(VfioUserListener {
            watch: MachineWatch::new(&options.name),
            log: MachineLog::new(&options.name),
            options,
            machine: None,
            ending: None,
            listener,
            file,
            connections,
            end,
        })
    }

    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.options.socket
    }

    /// Waits up to `timeout` for a hypervisor, and gives it a device, unless the virtual machine
    /// has one.
    fn accept_hypervisor(&mut self, timeout: Duration) -> io::Result<()> {
        if self.machine.is_none() && self.connections.are_used_up() {
            // The next process serves a hypervisor that connects.
            if let Some(end) = self.end.take() {
                let vm = &self.options.name;
                info!(
                    vm,
                    "no connection is left for another hypervisor: another process takes over"
                );
                end();
            }
            thread::sleep(timeout);
            return Ok(());
        }
        let has_connected = wait_readable(&self.listener, timeout)?;
        let wait = if has_connected {
            END_WAIT
        } else {
            Duration::ZERO
        };
        if !self.has_ended(wait) {
            if has_connected {
                self.log.warn(
                    "a hypervisor waits for its device: the threads of the one before have not \
                     ended yet",
                );
            }
            return Ok(());
        }
        let has_device = self.machine.is_some();
        let accepted = accept_first(&self.listener, &self.options, &self.log, has_device)?;
        let Some(socket) = accepted else {
            return Ok(());
        };
        match self.serve(socket) {
            Ok(machine) => {
                let window = self.options.window;
                self.log.info(format_args!(
                    "the hypervisor has connected, window {window}"
                ));
                self.watch.set(Some(machine.window.watch()));
                self.machine = Some(machine);
            }
            Err(error) => self
                .log
                .warn(format_args!("no vGPU for this machine: {error}")),
        }
        Ok(())
    }

    /// Waits up to `timeout` for the end of the threads of the hypervisor before. Returns whether
    /// they have ended.
    fn has_ended(&mut self, timeout: Duration) -> bool {
        let ending = self.ending.take();
        self.ending = ending.and_then(|threads| threads.join(timeout));
        self.ending.is_none()
    }

    /// Starts the device's threads.
    fn serve(&mut self, hypervisor: UnixStream) -> io::Result<Machine> {
        let size = self.options.window;
        let memory = sealed_file(size).map_err(io::Error::other)?;
        let bell = new_eventfd().map_err(io::Error::other)?;
        let ringer = bell.try_clone()?;
        // A copy of the hypervisor's socket: its end is seen at once, and not only when the filter
        // thread has run.
        let hangup_socket = hypervisor.try_clone()?;
        let device = Device {
            function: Function::new(memory.try_clone()?, size, ringer).map_err(io::Error::other)?,
            file: memory.try_clone()?,
            window: size,
        };
        let bell = VmDoorbell::new(bell, Some(hangup_socket.into()));
        let window = VmWindow::new(memory, size, bell, self.options.silence);
        let window = window.map_err(io::Error::other)?;
        // Last: nothing is left to fail that would leave the threads of a hypervisor without a
        // machine.
        let connection = self.connections.take()?;
        let threads = HypervisorThreads::start(hypervisor, connection, device, &self.log)?;
        Ok(Machine { window, threads })
    }
}

impl VfioUserListener {
    /// The next program of the virtual machine, if there is a machine. Forgets a machine whose
    /// hypervisor has ended, and disconnects the hypervisor: it may have ended one direction of the
    /// connection only.
    fn next(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>> {
        let Some(machine) = &mut self.machine else {
            return Ok(None);
        };
        match machine.window.next(timeout).map_err(io::Error::other)? {
            VmEvent::Nothing => Ok(None),
            VmEvent::Gone => {
                self.log.info("the hypervisor has ended");
                self.watch.set(None);
                if let Some(machine) = self.machine.take() {
                    machine.threads.disconnect();
                    self.ending = Some(machine.threads);
                }
                Ok(None)
            }
            VmEvent::Arrival(arrival) => Ok(Some(self.options.incoming(arrival))),
        }
    }
}

impl SocketOwner for VfioUserListener {
    fn socket_file(&mut self) -> Option<&mut SocketFile> {
        Some(&mut self.file)
    }

    fn use_socket(&mut self, socket: OwnedFd) {
        self.listener = socket.into();
    }
}

// It waits for the programs of the machine, too.
impl ListeningSocket for VfioUserListener {}

impl GuestListener for VfioUserListener {
    fn machine(&self) -> Option<&Arc<MachineWatch>> {
        Some(&self.watch)
    }

    fn accept(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>> {
        // The hypervisor that has the device may have been killed and started again: its end comes
        // before the connection of the new one.
        if let Some(guest) = self.next(Duration::ZERO)? {
            return Ok(Some(guest));
        }
        let idle = match self.machine {
            Some(_) => Duration::ZERO,
            None => timeout,
        };
        self.accept_hypervisor(idle)?;
        self.next(timeout)
    }
}
