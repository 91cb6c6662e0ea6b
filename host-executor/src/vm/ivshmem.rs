//! A virtual machine on stock QEMU: we are its ivshmem server.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use tracing::{info, warn};
use vgpu_transport::link::pci::{Bell, VmEvent, VmWindow, ivshmem};

use super::{VmListenError, VmOptions, listen_stream};
use crate::server::{Door, Guest};
use crate::service;

/// Where a virtual machine's guests come in.
pub struct IvshmemDoor {
    options: VmOptions,
    listener: UnixListener,
    machine: Option<VmWindow>,
}

impl IvshmemDoor {
    /// Listens for the virtual machine's QEMU. If `kept` has the files of one that an executor before us has served, it is
    /// served on.
    pub fn open(
        options: VmOptions,
        kept: &mut BTreeMap<String, OwnedFd>,
    ) -> Result<IvshmemDoor, VmListenError> {
        let listener = listen_stream(&options.socket)?;
        let mut door = IvshmemDoor {
            options,
            listener,
            machine: None,
        };
        let mut take = |part| kept.remove(&door.file_name(part));
        if let (Some(memory), Some(bell), Some(line)) = (take("memory"), take("bell"), take("line"))
        {
            let size = rustix::fs::fstat(&memory).map_or(0, |stat| stat.st_size as usize);
            info!(vm = door.options.name, "serving it on, {size} bytes");
            door.serve(ivshmem::Parts { memory, bell, line }, size);
        }
        Ok(door)
    }

    /// The socket.
    pub fn path(&self) -> &PathBuf {
        &self.options.socket
    }

    fn file_name(&self, part: &str) -> String {
        format!("vgpu-{}-{part}", self.options.name)
    }

    fn serve(&mut self, parts: ivshmem::Parts, size: usize) {
        let ivshmem::Parts { memory, bell, line } = parts;
        let bell = Bell::new(bell, Some(line));
        match VmWindow::new(memory, size, bell, self.options.silence) {
            Ok(machine) => self.machine = Some(machine),
            Err(error) => warn!(vm = self.options.name, "it gets no vGPU: {error}"),
        }
    }

    /// A QEMU that has connected gets its device, unless the virtual machine has one.
    fn accept(&mut self) -> io::Result<()> {
        let socket = match self.listener.accept() {
            Ok((socket, _)) => socket,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        };
        let vm = &self.options.name;
        if self.machine.is_some() {
            warn!(
                vm,
                "a second QEMU at {}, turned away: each virtual machine needs a --vm of its own",
                self.options.socket.display()
            );
            return Ok(());
        }
        socket.set_nonblocking(true)?;
        let parts = match ivshmem::welcome(socket.into(), self.options.window) {
            Ok(parts) => parts,
            Err(error) => {
                warn!(vm, "a QEMU got no vGPU: {error}");
                return Ok(());
            }
        };
        info!(vm, "its QEMU has connected, window {}", self.options.window);
        if service::is_watched() {
            for (part, file) in [
                ("memory", &parts.memory),
                ("bell", &parts.bell),
                ("line", &parts.line),
            ] {
                service::keep(&self.file_name(part), file.as_fd());
            }
        }
        self.serve(parts, self.options.window);
        Ok(())
    }
}

impl Door for IvshmemDoor {
    fn knock(&mut self, timeout: Duration) -> io::Result<Option<Guest>> {
        self.accept()?;
        let Some(machine) = &mut self.machine else {
            let mut fds = [rustix::event::PollFd::new(
                &self.listener,
                rustix::event::PollFlags::IN,
            )];
            let timeout = rustix::event::Timespec::try_from(timeout).map_err(io::Error::other)?;
            match rustix::event::poll(&mut fds, Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        };
        match machine.next(timeout).map_err(io::Error::other)? {
            VmEvent::Nothing => Ok(None),
            VmEvent::Gone => {
                info!(vm = self.options.name, "its QEMU has ended");
                self.machine = None;
                if service::is_watched() {
                    for part in ["memory", "bell", "line"] {
                        service::forget(&self.file_name(part));
                    }
                }
                Ok(None)
            }
            VmEvent::Arrival(arrival) => Ok(Some(self.options.guest(arrival))),
        }
    }
}

impl Drop for IvshmemDoor {
    fn drop(&mut self) {
        // Nobody can connect to it any more; whoever comes after us makes it anew.
        let _ = std::fs::remove_file(&self.options.socket);
    }
}
