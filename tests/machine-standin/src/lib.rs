//! A virtual machine without a hypervisor: a client that does what QEMU's `ivshmem-doorbell` and
//! the guest's kernel do. Programs of this machine use its device as those of a real one do.

use std::fs;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use vgpu_transport::link::pci::{DOORBELL, directory};
use vgpu_transport::shm::memory::{Registers, SharedWords as _, Window, sealed_file};

const PAGE: usize = 4096;

/// The address of the device in the machine.
pub const ADDRESS: &str = "0000:00:05.0";

/// The limit of a wait for the host.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The value of the doorbell's register while nobody has rung.
const SILENT: u32 = 0xffff_ffff;

/// QEMU and the guest's kernel. The machine holds the shared memory and the doorbell, and presents
/// both as files like those of sysfs.
#[derive(Debug)]
pub struct Machine {
    /// The memory that host and guest share.
    pub memory: OwnedFd,
    /// The host's doorbell.
    pub bell: OwnedFd,
    /// The connection to the host. Its end is the end of the machine.
    pub line: UnixStream,
    stop: Arc<AtomicBool>,
    ringer: Option<JoinHandle<()>>,
}

impl Machine {
    /// Starts a machine, whose device comes from the host at `socket`. `sysfs` is the empty folder
    /// of the machine's PCI devices.
    ///
    /// # Errors
    /// If the host refuses the machine or says something else than an ivshmem server, or the
    /// system refuses a thread or a file.
    pub fn plug(socket: &Path, sysfs: &Path) -> io::Result<Machine> {
        let line = UnixStream::connect(socket)?;
        line.set_read_timeout(Some(TIMEOUT))?;
        let version = next(&line)?.0;
        expect("the version of the protocol", version, 0)?;
        let id = next(&line)?.0;
        let (minus_one, memory) = next(&line)?;
        expect("the number beside the memory", minus_one, -1)?;
        // So that a doorbell is the number of its vector.
        let (host, bell) = next(&line)?;
        expect("the number of the host", host, 0)?;
        let (own, own_bell) = next(&line)?;
        expect("the number of the machine", own, id)?;
        let missing = |what: &str| io::Error::other(format!("the host sends no {what}"));
        own_bell.ok_or_else(|| missing("doorbell of the machine"))?;
        let memory = memory.ok_or_else(|| missing("memory"))?;
        let bell = bell.ok_or_else(|| missing("doorbell"))?;
        // A real machine takes longer to start than the host takes to initialise the window.
        let page = Window::map_part(memory.as_fd(), 0, PAGE).map_err(io::Error::other)?;
        let began = Instant::now();
        while page.load(directory::word::MAGIC) != directory::MAGIC {
            if began.elapsed() > TIMEOUT {
                let ms = TIMEOUT.as_millis();
                return Err(io::Error::other(format!("no directory after {ms} ms")));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Machine::new(memory, bell, line, sysfs)
    }

    /// A device at [`ADDRESS`] with the window and with registers that a thread watches, as QEMU
    /// does.
    ///
    /// # Errors
    /// If the system refuses a thread or a file.
    pub fn new(
        memory: OwnedFd,
        bell: OwnedFd,
        line: UnixStream,
        sysfs: &Path,
    ) -> io::Result<Machine> {
        let device = sysfs.join(ADDRESS);
        fs::create_dir(&device)?;
        let size = rustix::fs::fstat(&memory)?.st_size as u64;
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
            fs::write(device.join(name), text)?;
        }
        let registers = sealed_file(PAGE).map_err(io::Error::other)?;
        // SAFETY: the file has 4096 bytes and is sealed against shrinking.
        let map = unsafe { Registers::map(registers.as_fd()) }.map_err(io::Error::other)?;
        map.write(DOORBELL, SILENT);
        for (file, name) in [(&memory, "resource2_wc"), (&registers, "resource0")] {
            let fd = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
            std::os::unix::fs::symlink(fd, device.join(name))?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let ringer = thread::Builder::new().spawn({
            let (stop, bell) = (Arc::clone(&stop), bell.try_clone()?);
            move || {
                // The link to the registers leads to this file.
                let _registers = registers;
                while !stop.load(Ordering::Relaxed) {
                    if map.read(DOORBELL) != SILENT {
                        map.write(DOORBELL, SILENT);
                        // Fails where the host has closed a doorbell that is a pipe: QEMU goes on.
                        let _ = rustix::io::write(&bell, &1u64.to_ne_bytes());
                    }
                    thread::sleep(Duration::from_micros(100));
                }
            }
        })?;
        Ok(Machine {
            memory,
            bell,
            line,
            stop,
            ringer: Some(ringer),
        })
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(ringer) = self.ringer.take() {
            // A thread that has panicked has said so.
            let _ = ringer.join();
        }
    }
}

fn expect(what: &str, found: i64, expected: i64) -> io::Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "{what} is {found}, not {expected}"
        ))),
    }
}

/// Receives one message of the server, as QEMU does.
fn next(line: &UnixStream) -> io::Result<(i64, Option<OwnedFd>)> {
    let mut bytes = [0; 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space[..]);
    let got = rustix::net::recvmsg(
        line,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if got.bytes != bytes.len() {
        return Err(io::Error::other(format!(
            "the host sends {} bytes of a message, not {}",
            got.bytes,
            bytes.len()
        )));
    }
    let mut fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fd = fds.next().and_then(|mut fds| fds.next());
    Ok((i64::from_le_bytes(bytes), fd))
}
