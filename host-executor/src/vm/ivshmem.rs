//! A virtual machine on stock QEMU: this executor is its ivshmem server.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tracing::info;
use vgpu_transport::link::pci::{VmDoorbell, VmEvent, VmWindow, ivshmem};
use vgpu_transport::link::socket_file::{SocketFile, SocketFileError, bind_stream_for_group};

use super::accept::accept_first;
use super::machine_log::MachineLog;
use super::options::VmOptions;
use super::stored_files::{names, take_stored};
use crate::listener::{GuestListener, IncomingGuest, ListeningSocket, SocketOwner, wait_readable};
use crate::machine_watch::MachineWatch;
use crate::service;

/// Listens for one QEMU, and accepts the programs of its virtual machine.
pub struct IvshmemListener {
    options: VmOptions,
    /// Dropped before the socket is closed: the next executor, which waits for the socket, must not
    /// serve the machine while this one does.
    machine: Option<VmWindow>,
    /// What a dump says of the machine.
    watch: Arc<MachineWatch>,
    log: Arc<MachineLog>,
    /// The files of a running machine that is not served yet: its programs wait for an answer as
    /// soon as it is.
    stored: Option<ivshmem::Parts>,
    listener: UnixListener,
    file: SocketFile,
}

impl IvshmemListener {
    /// Listens for a virtual machine's QEMU. If `stored` has the files of a machine that an earlier
    /// executor has served, takes them, and serves that machine from the first `accept` on.
    ///
    /// # Errors
    /// [`SocketFileError`] if the socket of `options` cannot be bound.
    pub fn open(
        options: VmOptions,
        stored: &mut BTreeMap<String, OwnedFd>,
    ) -> Result<IvshmemListener, SocketFileError> {
        let (path, group) = (&options.socket, options.group.as_deref());
        let (listener, file) = bind_stream_for_group(path, options.mode, group)?;
        let mut files = take_stored(stored, &options.name);
        let [memory, bell, line] = names(&options.name).map(|name| files.remove(&name));
        let stored = match (memory, bell, line) {
            (Some(memory), Some(bell), Some(line)) => Some(ivshmem::Parts {
                memory,
                bell,
                hangup_socket: line,
            }),
            _ => None,
        };
        Ok(IvshmemListener {
            watch: MachineWatch::new(&options.name),
            log: MachineLog::new(&options.name),
            options,
            machine: None,
            stored,
            listener,
            file,
        })
    }

    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.options.socket
    }

    fn serve(&mut self, parts: ivshmem::Parts, size: usize) {
        let ivshmem::Parts {
            memory,
            bell,
            hangup_socket: line,
        } = parts;
        let bell = VmDoorbell::new(bell, Some(line));
        match VmWindow::new(memory, size, bell, self.options.silence) {
            Ok(machine) => {
                self.watch.set(Some(machine.watch()));
                self.machine = Some(machine);
            }
            Err(error) => {
                self.log
                    .warn(format_args!("no vGPU for this machine: {error}"));
                let names = names(&self.options.name);
                names.iter().for_each(|name| service::remove(name));
            }
        }
    }

    /// Gives a QEMU that has connected its device, unless the virtual machine has one.
    fn accept_qemu(&mut self) -> io::Result<()> {
        let has_device = self.machine.is_some();
        let accepted = accept_first(&self.listener, &self.options, &self.log, has_device)?;
        let Some(socket) = accepted else {
            return Ok(());
        };
        socket.set_nonblocking(true)?;
        let parts = match ivshmem::welcome(socket.into(), self.options.window) {
            Ok(parts) => parts,
            Err(error) => {
                self.log.warn(format_args!(
                    "no vGPU for a QEMU that has connected: {error}"
                ));
                return Ok(());
            }
        };
        let window = self.options.window;
        self.log
            .info(format_args!("QEMU has connected, window {window}"));
        let files = [&parts.memory, &parts.bell, &parts.hangup_socket];
        for (name, file) in names(&self.options.name).iter().zip(files) {
            service::store(name, file.as_fd());
        }
        self.serve(parts, window);
        Ok(())
    }
}

impl IvshmemListener {
    /// The next program of the virtual machine, if there is a machine. Forgets a machine whose QEMU
    /// has ended.
    fn next(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>> {
        let Some(machine) = &mut self.machine else {
            return Ok(None);
        };
        match machine.next(timeout).map_err(io::Error::other)? {
            VmEvent::Nothing => Ok(None),
            VmEvent::Gone => {
                self.log.info("QEMU has ended");
                self.machine = None;
                self.watch.set(None);
                let names = names(&self.options.name);
                names.iter().for_each(|name| service::remove(name));
                Ok(None)
            }
            VmEvent::Arrival(arrival) => Ok(Some(self.options.incoming(arrival))),
        }
    }
}

impl SocketOwner for IvshmemListener {
    fn socket_file(&mut self) -> Option<&mut SocketFile> {
        Some(&mut self.file)
    }

    fn use_socket(&mut self, socket: OwnedFd) {
        self.listener = socket.into();
    }
}

// It waits for the programs of the machine, too.
impl ListeningSocket for IvshmemListener {}

impl GuestListener for IvshmemListener {
    fn machine(&self) -> Option<&Arc<MachineWatch>> {
        Some(&self.watch)
    }

    fn accept(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>> {
        if let Some(parts) = self.stored.take() {
            let size = rustix::fs::fstat(&parts.memory).map_or(0, |stat| stat.st_size as usize);
            info!(
                vm = self.options.name,
                "serving the running virtual machine, window {size}"
            );
            self.serve(parts, size);
        }
        // The QEMU that has the device may have been killed and started again: its end comes before
        // the connection of the new one.
        if let Some(guest) = self.next(Duration::ZERO)? {
            return Ok(Some(guest));
        }
        self.accept_qemu()?;
        if self.machine.is_none() {
            wait_readable(&self.listener, timeout)?;
            return Ok(None);
        }
        self.next(timeout)
    }
}
