//! The guest's side: from a PCI address to a link.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::directory::{
    self, Directory, DirectoryError, VERDICT_BUSY, VERDICT_COME_IN, VERDICT_FAILED,
};
use super::discover::{Address, Found, Kind};
use super::lock::lock_byte;
use crate::link::LinkError;
use crate::link::unix::new_epoch;
use crate::link::window::WindowGuest;
use crate::shm::doorbell::{Doorbell, Wake};
use crate::shm::layout::{Layout, word};
use crate::shm::liveness::{self, Liveness, STALL};
use crate::shm::memory::{MapError, Memory as _, Registers, Window};

/// The doorbell's register: `ivshmem-doorbell`'s, and our own function does as it does.
pub const DOORBELL: usize = 12;

/// What is written there: vector 0 of peer 0, the host.
const RING: u32 = 0;

/// Why there is no link to the executor behind a PCI device.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum PciError {
    #[error("there is no PCI device at {address}")]
    NoDevice { address: Address },
    #[error("{device}: not a vGPU ({why})")]
    NotVgpu { device: String, why: String },
    #[error("{device}: a real GPU (subsystem {vendor:04x}:{id:04x}), left alone")]
    RealGpu {
        device: String,
        vendor: u16,
        id: u16,
    },
    #[error("{device}: the driver {driver} has it; unbind it to use the vGPU")]
    Driver { device: String, driver: String },
    #[error(
        "{device}: no permission for {file}; add a udev rule for the group vgpu (deploy/guest has one), or be root",
        file = file.display()
    )]
    Permission { device: String, file: PathBuf },
    #[error(
        "{device}: the kernel does not let programs map PCI memory (lockdown, as with Secure Boot); turn lockdown off, \
         or use a vsock link"
    )]
    Lockdown { device: String },
    #[error("{device}: {what}: {error}")]
    Io {
        device: String,
        what: &'static str,
        error: io::Error,
    },
    #[error("{device}: all {slots} sessions of this device are in use")]
    Full { device: String, slots: usize },
    #[error("{device}: the executor has ended; start it again on the host")]
    Ended { device: String },
    #[error(
        "{device}: no answer from the executor within {ms} ms; does `vgpu serve` run on the host?"
    )]
    Timeout { device: String, ms: u128 },
    #[error("{device}: the executor could not make a session; its log says why")]
    Refused { device: String },
    #[error("{device}: {error}")]
    Link { device: String, error: LinkError },
}

/// A device that has been opened and found to be a vGPU: everything but a session.
pub struct Device {
    name: String,
    window_file: PathBuf,
    file: File,
    registers: Arc<Registers>,
    page: Arc<Window>,
    directory: Directory,
}

impl Device {
    /// Opens the device, enables it and checks what it is.
    pub fn open(found: &Found) -> Result<Device, PciError> {
        let device = found.to_string();
        match found.kind {
            Kind::Ivshmem | Kind::Vgpu => {}
            Kind::RealGpu => {
                return Err(PciError::RealGpu {
                    device,
                    vendor: found.subsystem.0,
                    id: found.subsystem.1,
                });
            }
            Kind::Other => {
                return Err(PciError::NotVgpu {
                    device,
                    why: "not one of the ids 1af4:1110 and 10de:2331".into(),
                });
            }
        }
        if let Some(driver) = &found.driver {
            return Err(PciError::Driver {
                device,
                driver: driver.clone(),
            });
        }
        if !found.is_enabled() {
            let enable = found.path.join("enable");
            std::fs::write(&enable, "1")
                .map_err(|error| denied(&device, &enable, "enabling it", error))?;
        }
        let open = |path: &Path, what| {
            let file = File::options().read(true).write(true).open(path);
            file.map_err(|error| denied(&device, path, what, error))
        };
        let window_file = found.window_file();
        let file = open(&window_file, "opening its window")?;
        let register_file = open(&found.register_file(), "opening its registers")?;
        let size = found
            .window_size()
            .and_then(|size| usize::try_from(size).ok())
            .ok_or_else(|| PciError::NotVgpu {
                device: device.clone(),
                why: "it has no memory where the window should be".into(),
            })?;
        let page = Window::map_device(file.as_fd(), 0, directory::PAGE)
            .map_err(|error| unmapped(&device, error))?;
        let facts = Directory::read(&page, size).map_err(|error| not_vgpu(&device, &error))?;
        let registers =
            Registers::map(register_file.as_fd()).map_err(|error| unmapped(&device, error))?;
        Ok(Device {
            name: device,
            window_file,
            file,
            registers: Arc::new(registers),
            page: Arc::new(page),
            directory: facts,
        })
    }

    /// What its memory says of it.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Whether the executor behind it lives: its heart beats once a second.
    pub fn is_alive(&self, patience: Duration) -> bool {
        let began = Instant::now();
        let before = self.page.load(directory::word::HEARTBEAT);
        while began.elapsed() < patience {
            if self.page.load(directory::word::HEARTBEAT) != before {
                return self.page.load(directory::word::HOST_STATE) == 1;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    /// Asks for a session in a slot that nobody in this machine uses.
    pub fn connect(self, timeout: Duration) -> Result<WindowGuest, PciError> {
        let deadline = Instant::now() + timeout;
        if self.page.load(directory::word::HOST_STATE) != 1 {
            return Err(PciError::Ended { device: self.name });
        }
        let mut file = self.open_again()?;
        for k in 0..self.directory.slots {
            let locked = lock_byte(&file, k).map_err(|error| PciError::Io {
                device: self.name.clone(),
                what: "locking a slot",
                error,
            })?;
            if !locked {
                continue;
            }
            if self.ask(k, deadline, timeout)? {
                return self.enter(k, file);
            }
            // What ran there has not ended yet. The lock goes with its file.
            file = self.open_again()?;
        }
        Err(PciError::Full {
            device: self.name,
            slots: self.directory.slots,
        })
    }

    fn open_again(&self) -> Result<File, PciError> {
        let file = File::options()
            .read(true)
            .write(true)
            .open(&self.window_file);
        file.map_err(|error| denied(&self.name, &self.window_file, "opening its window", error))
    }

    /// Whether the host has begun a session for us in slot `k`.
    fn ask(&self, k: usize, deadline: Instant, timeout: Duration) -> Result<bool, PciError> {
        use directory::word::{answered, request, verdict};
        let number = new_epoch();
        self.page.store(request(k), number);
        self.page.full_fence();
        self.registers.write(DOORBELL, RING);
        let mut nap = Duration::from_micros(20);
        while self.page.load(answered(k)) != number {
            if Instant::now() > deadline {
                return Err(PciError::Timeout {
                    device: self.name.clone(),
                    ms: timeout.as_millis(),
                });
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(5));
        }
        match self.page.load(verdict(k)) {
            VERDICT_COME_IN => Ok(true),
            VERDICT_BUSY => Ok(false),
            VERDICT_FAILED => Err(PciError::Refused {
                device: self.name.clone(),
            }),
            other => Err(PciError::NotVgpu {
                device: self.name.clone(),
                why: format!("it answered with {other}"),
            }),
        }
    }

    fn enter(self, k: usize, lock: File) -> Result<WindowGuest, PciError> {
        let slot = self.directory.slot(k);
        let window = Window::map_device(self.file.as_fd(), slot.start as u64, slot.len())
            .map_err(|error| unmapped(&self.name, error))?;
        let window = Arc::new(window);
        let layout = Layout::read(&*window, window.size())
            .map_err(|error| not_vgpu(&self.name, &error.into()))?;
        liveness::start_at(&window, word::GUEST_HEARTBEAT).map_err(|error| PciError::Io {
            device: self.name.clone(),
            what: "starting the heartbeat's thread",
            error,
        })?;
        let liveness = Liveness::new(&window, STALL);
        let doorbell = PciDoorbell {
            registers: self.registers,
            page: self.page,
            epoch: self.directory.epoch,
            naps: Mutex::new(Naps::new()),
            _lock: lock,
        };
        Ok(WindowGuest::new(
            window,
            &layout,
            Box::new(doorbell),
            Some(liveness),
        ))
    }
}

/// Connects to the executor behind the device at `address`, waiting no longer than `timeout` for it.
pub fn connect(sysfs: &Path, address: Address, timeout: Duration) -> Result<WindowGuest, PciError> {
    let found = Found::read(sysfs, address).map_err(|_| PciError::NoDevice { address })?;
    Device::open(&found)?.connect(timeout)
}

/// A register to write to, and a clock instead of an ear.
struct PciDoorbell {
    registers: Arc<Registers>,
    page: Arc<Window>,
    /// The executor that the session is with.
    epoch: u64,
    naps: Mutex<Naps>,
    /// Keeps the slot ours.
    _lock: File,
}

impl Doorbell for PciDoorbell {
    fn ring(&self) -> Result<(), LinkError> {
        // A store to a register does not overtake what the full fence before it has let go.
        self.registers.write(DOORBELL, RING);
        Ok(())
    }

    fn clear(&self) -> Result<(), LinkError> {
        Ok(())
    }

    fn wait(&self, timeout: Duration) -> Result<Wake, LinkError> {
        if !timeout.is_zero() {
            let nap = self
                .naps
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .next(Instant::now());
            std::thread::sleep(nap.min(timeout));
            self.naps
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .woke(Instant::now());
        }
        // An executor that ends says so in the slot, after its last word. One that was killed is replaced by another; should
        // the device itself be gone, all words read as ones.
        let is_there = self.page.load(directory::word::EPOCH) == self.epoch;
        Ok(if is_there { Wake::Look } else { Wake::PeerGone })
    }
}

/// How long to sleep: an eighth of what has been waited so far, so that a wait takes at most an eighth longer than it has
/// to, and a long one costs next to nothing.
#[derive(Debug)]
struct Naps {
    began: Instant,
    woke: Instant,
}

impl Naps {
    const LEAST: Duration = Duration::from_micros(20);
    const MOST: Duration = Duration::from_millis(5);
    /// Naps further apart than this belong to two waits.
    const APART: Duration = Duration::from_micros(500);

    fn new() -> Naps {
        let now = Instant::now();
        Naps {
            began: now,
            woke: now,
        }
    }

    fn next(&mut self, now: Instant) -> Duration {
        if now.saturating_duration_since(self.woke) > Naps::APART {
            self.began = now;
        }
        (now.saturating_duration_since(self.began) / 8).clamp(Naps::LEAST, Naps::MOST)
    }

    fn woke(&mut self, now: Instant) {
        self.woke = now;
    }
}

fn denied(device: &str, path: &Path, what: &'static str, error: io::Error) -> PciError {
    let device = device.to_owned();
    match error.kind() {
        io::ErrorKind::PermissionDenied => PciError::Permission {
            device,
            file: path.to_owned(),
        },
        _ => PciError::Io {
            device,
            what,
            error,
        },
    }
}

fn unmapped(device: &str, error: MapError) -> PciError {
    let device = device.to_owned();
    match error {
        // Whoever may open the file may map it, but for lockdown.
        MapError::System {
            error: Errno::PERM, ..
        } => PciError::Lockdown { device },
        MapError::System { what, error } => PciError::Io {
            device,
            what,
            error: error.into(),
        },
        other => PciError::NotVgpu {
            device,
            why: other.to_string(),
        },
    }
}

fn not_vgpu(device: &str, error: &DirectoryError) -> PciError {
    PciError::NotVgpu {
        device: device.to_owned(),
        why: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn naps_grow_with_the_wait() {
        let mut naps = Naps::new();
        let start = Instant::now() + Duration::from_secs(1);
        assert_eq!(naps.next(start), Naps::LEAST);
        // Woken as asked, and asleep again at once.
        naps.woke(start + Duration::from_millis(8));
        let nap = naps.next(start + Duration::from_millis(8));
        assert_eq!(nap, Duration::from_millis(1));
        naps.woke(start + Duration::from_secs(9));
        assert_eq!(naps.next(start + Duration::from_secs(9)), Naps::MOST);
        // Another wait.
        assert_eq!(naps.next(start + Duration::from_secs(10)), Naps::LEAST);
    }
}
