//! A virtual machine on a hypervisor that speaks vfio-user (QEMU 10.1 or newer, Cloud Hypervisor):
//! this executor is its PCI device.
//!
//! The function is 10de:2331, class 0302, with a subsystem id that no real GPU has. The `vfio_user`
//! crate implements the protocol. The crate trusts the sizes in the messages that it reads, so a
//! [filter] checks every message of the hypervisor first. A hypervisor that gets past the filter
//! can end only the threads of its own virtual machine.

mod connections;
mod device;
mod filter;
pub mod fuzzing;

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tracing::{info, warn};
use vfio_user::{IrqInfo, Server, ServerRegion, SparseArea};
use vgpu_transport::link::pci::{VmDoorbell, VmEvent, VmWindow};
use vgpu_transport::link::socket_file::{SocketFile, SocketFileError, bind_stream_for_group};
use vgpu_transport::shm::doorbell::new_eventfd;
use vgpu_transport::shm::memory::sealed_file;

use super::accept::accept_first;
use super::options::VmOptions;
use crate::listener::{GuestListener, IncomingGuest, ListeningSocket, SocketOwner, wait_readable};
use crate::machine_watch::MachineWatch;
pub use connections::Connections;
use device::{BAR0_SIZE, CONFIG_SIZE, Function};

/// Regions of a VFIO PCI device: six BARs, ROM, configuration space, VGA (`linux/vfio.h`).
const REGIONS: u32 = 9;
const CONFIG: u32 = 7;

/// Kinds of interrupt of a VFIO PCI device. The function has no interrupts.
const INTERRUPTS: u32 = 5;

/// Listens for one hypervisor, and accepts the programs of its virtual machine.
pub struct VfioUserListener {
    options: VmOptions,
    machine: Option<VmWindow>,
    /// What a dump says of the machine.
    watch: Arc<MachineWatch>,
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
            options,
            machine: None,
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
        wait_readable(&self.listener, timeout)?;
        let has_device = self.machine.is_some();
        let Some(socket) = accept_first(&self.listener, &self.options, has_device)? else {
            return Ok(());
        };
        let served = self.serve(socket);
        let vm = &self.options.name;
        match served {
            Ok(machine) => {
                info!(
                    vm,
                    "the hypervisor has connected, window {}", self.options.window
                );
                self.watch.set(Some(machine.watch()));
                self.machine = Some(machine);
            }
            Err(error) => warn!(vm, "no vGPU for this machine: {error}"),
        }
        Ok(())
    }

    /// Starts the device's threads.
    fn serve(&mut self, hypervisor: UnixStream) -> io::Result<VmWindow> {
        let size = self.options.window;
        let memory = sealed_file(size).map_err(io::Error::other)?;
        let bell = new_eventfd().map_err(io::Error::other)?;
        let ringer = bell.try_clone()?;
        // A copy of the hypervisor's socket: its end is seen at once, and not only when the filter
        // thread has run.
        let hangup_socket = hypervisor.try_clone()?;
        let (near, listener) = self.connections.take()?;
        let function =
            Function::new(memory.try_clone()?, size, ringer).map_err(io::Error::other)?;
        let file = memory.try_clone()?;
        let name = self.options.name.clone();
        thread::Builder::new()
            .name("vgpu-vfio-user".into())
            .spawn(move || {
                let mut function = function;
                let regions = regions(size, file.as_raw_fd());
                let server = Server::from_owned_fd(listener.into(), true, interrupts(), regions);
                let served = catch_unwind(AssertUnwindSafe(|| server.run(&mut function)));
                match served {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => info!(vm = name, "the device has ended: {error}"),
                    Err(_) => warn!(
                        vm = name,
                        "the device panicked: the hypervisor broke the protocol"
                    ),
                }
                drop(file); // `regions` refers to the file by its number until here
            })?;
        let name = self.options.name.clone();
        thread::Builder::new()
            .name("vgpu-vfio-filter".into())
            .spawn(move || {
                let hypervisor = Disconnected(hypervisor);
                if let Err(error) = filter::run(&hypervisor.0, &near) {
                    warn!(vm = name, "the hypervisor is disconnected: {error}");
                }
            })?;
        VmWindow::new(
            memory,
            size,
            VmDoorbell::new(bell, Some(hangup_socket.into())),
            self.options.silence,
        )
        .map_err(io::Error::other)
    }
}

/// A hypervisor's socket, which is shut down for all its copies when this is dropped, for whatever
/// reason.
struct Disconnected(UnixStream);

impl Drop for Disconnected {
    fn drop(&mut self) {
        // Fails if the hypervisor has disconnected.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl VfioUserListener {
    /// The next program of the virtual machine, if there is a machine. Forgets a machine whose
    /// hypervisor has ended.
    fn next(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>> {
        let Some(machine) = &mut self.machine else {
            return Ok(None);
        };
        match machine.next(timeout).map_err(io::Error::other)? {
            VmEvent::Nothing => Ok(None),
            VmEvent::Gone => {
                info!(vm = self.options.name, "the hypervisor has ended");
                self.machine = None;
                self.watch.set(None);
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

/// The regions of the device. The window is one area, so the hypervisor maps all of it.
fn regions(window: usize, memory: i32) -> Vec<ServerRegion> {
    use vfio_bindings::bindings::vfio::{
        VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE,
        vfio_region_info, vfio_region_sparse_mmap_area,
    };
    let both = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
    let region = |index| {
        let (size, flags) = match index {
            0 => (BAR0_SIZE as u64, both),
            1 => (window as u64, both | VFIO_REGION_INFO_FLAG_MMAP),
            CONFIG => (CONFIG_SIZE as u64, both),
            _ => (0, 0),
        };
        let area = SparseArea {
            area: vfio_region_sparse_mmap_area { offset: 0, size },
        };
        let is_window = index == 1;
        ServerRegion {
            region_info: vfio_region_info {
                argsz: size_of::<vfio_region_info>() as u32,
                flags,
                index,
                size,
                ..Default::default()
            },
            sparse_areas: if is_window { vec![area] } else { Vec::new() },
            mmap_fd: is_window.then_some(memory),
        }
    };
    (0..REGIONS).map(region).collect()
}

fn interrupts() -> Vec<IrqInfo> {
    let none = |index| IrqInfo {
        index,
        flags: 0,
        count: 0,
    };
    (0..INTERRUPTS).map(none).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_window_is_mapped() {
        let regions = regions(64 << 20, 9);
        assert_eq!(regions.len(), REGIONS as usize);
        let mapped: Vec<_> = regions
            .iter()
            .filter(|r| r.mmap_fd.is_some() || !r.sparse_areas.is_empty())
            .map(|r| (r.region_info.index, r.region_info.size))
            .collect();
        assert_eq!(mapped, [(1, 64 << 20)]);
        assert!(interrupts().iter().all(|i| i.count == 0));
    }
}
