//! A virtual machine without a hypervisor: a client that does what QEMU and the guest's kernel do.
#![allow(dead_code)] // each test binary uses a part of this module

use std::collections::BTreeMap;
use std::fs;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use vgpu_executor::vm::{IvshmemListener, VmOptions};
use vgpu_executor::{Limits, Server};
use vgpu_transport::link::pci::discover::{Address, all};
use vgpu_transport::link::pci::{DOORBELL, PciError, connect, directory};
use vgpu_transport::link::window::WindowGuest;
use vgpu_transport::shm::memory::{Registers, SharedWords as _, Window, sealed_file};

use crate::common::{Guest, TIMEOUT, cpu};

const PAGE: usize = 4096;

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

/// QEMU and the guest's kernel. The machine holds the shared memory and the doorbell, and presents
/// both as files like those of sysfs.
pub(crate) struct Machine {
    pub(crate) sysfs: Dir,
    pub(crate) memory: OwnedFd,
    pub(crate) bell: OwnedFd,
    pub(crate) line: UnixStream,
    stop: Arc<AtomicBool>,
    ringer: Option<JoinHandle<()>>,
}

impl Machine {
    pub(crate) fn plug(socket: &Path) -> Machine {
        let line = UnixStream::connect(socket).unwrap();
        assert_eq!(next(&line).0, 0, "version of the protocol");
        let id = next(&line).0;
        let (minus_one, memory) = next(&line);
        assert_eq!(minus_one, -1);
        let (host, bell) = next(&line);
        assert_eq!(host, 0, "so that a doorbell is the number of its vector");
        let (own, own_bell) = next(&line);
        assert_eq!(own, id);
        assert!(own_bell.is_some());
        // A real machine takes longer to start than the host takes to initialise the window.
        let memory = memory.unwrap();
        let page = Window::map_part(memory.as_fd(), 0, PAGE).unwrap();
        wait_for("the first page of the window", || {
            page.load(directory::word::MAGIC) == directory::MAGIC
        });
        Machine::new(memory, bell.unwrap(), line)
    }

    /// A device at 0000:00:05.0 with the window and with registers that a thread watches, as QEMU
    /// does.
    pub(crate) fn new(memory: OwnedFd, bell: OwnedFd, line: UnixStream) -> Machine {
        let sysfs = Dir::new();
        let device = sysfs.0.join("0000:00:05.0");
        fs::create_dir(&device).unwrap();
        let size = rustix::fs::fstat(&memory).unwrap().st_size as u64;
        let base = 0xe000_0000u64;
        for (name, text) in [
            ("vendor", "0x1af4".to_owned()),
            ("device", "0x1110".to_owned()),
            ("class", "0x050000".to_owned()),
            ("enable", "0".to_owned()),
            (
                "resource",
                format!(
                    "0xfe000000 0xfe0000ff 0x40200\n0x0 0x0 0x0\n{base:#x} {:#x} 0x14220c\n",
                    base + size - 1
                ),
            ),
        ] {
            fs::write(device.join(name), text).unwrap();
        }
        let registers = sealed_file(4096).unwrap();
        for (file, name) in [(&memory, "resource2_wc"), (&registers, "resource0")] {
            let fd = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
            std::os::unix::fs::symlink(fd, device.join(name)).unwrap();
        }
        let stop = Arc::new(AtomicBool::new(false));
        let ringer = thread::spawn({
            let (stop, bell) = (Arc::clone(&stop), bell.try_clone().unwrap());
            move || {
                const SILENT: u32 = 0xffff_ffff;
                // SAFETY: the file has 4096 bytes and is sealed against shrinking.
                let map = unsafe { Registers::map(registers.as_fd()) }.unwrap();
                map.write(DOORBELL, SILENT);
                while !stop.load(Ordering::Relaxed) {
                    if map.read(DOORBELL) != SILENT {
                        map.write(DOORBELL, SILENT);
                        rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
                    }
                    thread::sleep(Duration::from_micros(100));
                }
            }
        });
        // The thread holds the registers; the link to them must stay.
        while !device.join("resource0").exists() {
            thread::yield_now();
        }
        Machine {
            sysfs,
            memory,
            bell,
            line,
            stop,
            ringer: Some(ringer),
        }
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

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(ringer) = self.ringer.take() {
            ringer.join().unwrap();
        }
    }
}

/// Receives one message of the server, as QEMU does.
fn next(line: &UnixStream) -> (i64, Option<OwnedFd>) {
    let mut bytes = [0; 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space[..]);
    let got = rustix::net::recvmsg(
        line,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    );
    assert_eq!(got.unwrap().bytes, 8);
    let mut fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fd = fds.next().and_then(|mut fds| fds.next());
    (i64::from_le_bytes(bytes), fd)
}

pub(crate) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}
