//! Virtual machines without a hypervisor, and executors for them.
#![allow(dead_code)] // each test binary uses a part of this module

use std::collections::BTreeMap;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vgpu_executor::vm::{IvshmemListener, VmOptions};
use vgpu_executor::{Limits, Server};
use vgpu_transport::link::pci::discover::{Address, all};
use vgpu_transport::link::pci::{PciError, connect};
use vgpu_transport::link::window::WindowGuest;

use crate::common::{Guest, TIMEOUT, cpu, wait_for};

/// A private folder, removed when dropped.
pub(crate) struct Dir(pub(crate) PathBuf, #[allow(dead_code)] tempfile::TempDir);

impl Dir {
    pub(crate) fn new() -> Dir {
        let folder = tempfile::tempdir().unwrap();
        Dir(folder.path().to_owned(), folder)
    }
}

/// An executor with a listener for each named virtual machine.
pub(crate) fn executor(dir: &Path, names: &[&str], silence: u64) -> Server {
    executor_with(dir, names, silence, &mut BTreeMap::new())
}

pub(crate) fn executor_with(
    dir: &Path,
    names: &[&str],
    silence: u64,
    kept: &mut BTreeMap<String, OwnedFd>,
) -> Server {
    let mut server = Server::new(cpu(), Limits::default(), 64).expect("a thread");
    listen(&mut server, dir, names, silence, kept);
    server
}

/// The same with two devices.
pub(crate) fn executor_of_two_devices(dir: &Path, names: &[&str], silence: u64) -> Server {
    let devices = [cpu(), cpu()].map(|engine| (engine, Limits::default()));
    let mut server = Server::with_devices(devices.into(), 64).expect("a thread");
    listen(&mut server, dir, names, silence, &mut BTreeMap::new());
    server
}

fn listen(
    server: &mut Server,
    dir: &Path,
    names: &[&str],
    silence: u64,
    kept: &mut BTreeMap<String, OwnedFd>,
) {
    for name in names {
        let socket = dir.join(format!("{name}.sock"));
        let text = format!(
            "{name},socket={},window=64M,silence={silence}",
            socket.display()
        );
        let options: VmOptions = text.parse().unwrap();
        server
            .listen(IvshmemListener::open(options, kept).unwrap())
            .unwrap();
    }
}

/// A machine, and a private folder with what its kernel shows of the device.
pub(crate) struct Machine {
    // Before the folder, to which its device has links.
    device: vgpu_machine_standin::Machine,
    pub(crate) sysfs: Dir,
}

impl Machine {
    pub(crate) fn plug(socket: &Path) -> Machine {
        let sysfs = Dir::new();
        let device = vgpu_machine_standin::Machine::plug(socket, &sysfs.0).unwrap();
        Machine { device, sysfs }
    }

    /// A machine with this memory and doorbell, however it got these.
    pub(crate) fn new(memory: OwnedFd, bell: OwnedFd, line: UnixStream) -> Machine {
        let sysfs = Dir::new();
        let device = vgpu_machine_standin::Machine::new(memory, bell, line, &sysfs.0).unwrap();
        Machine { device, sysfs }
    }

    pub(crate) fn address(&self) -> Address {
        all(&self.sysfs.0)[0].address
    }

    pub(crate) fn connect(&self) -> Result<Guest, PciError> {
        connect(&self.sysfs.0, self.address(), TIMEOUT).map(|end| Guest::new(Box::new(end)))
    }

    pub(crate) fn try_connect(&self, timeout: Duration) -> Result<WindowGuest, PciError> {
        connect(&self.sysfs.0, self.address(), timeout)
    }

    /// A guest. The slots of programs that have died are free after some seconds, and an executor
    /// that starts takes a moment.
    pub(crate) fn guest(&self) -> Guest {
        let mut guest = None;
        wait_for("a free slot", || match self.connect() {
            Err(PciError::Full { .. } | PciError::Ended { .. }) => false,
            connected => {
                guest = Some(connected.unwrap());
                true
            }
        });
        let mut guest = guest.expect("it has connected");
        guest.hello();
        guest
    }
}

impl Deref for Machine {
    type Target = vgpu_machine_standin::Machine;

    fn deref(&self) -> &vgpu_machine_standin::Machine {
        &self.device
    }
}
