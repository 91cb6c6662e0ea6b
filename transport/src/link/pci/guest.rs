//! The guest's side: from a PCI address to a link.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::directory::{
    self, Directory, DirectoryError, VERDICT_ACCEPTED, VERDICT_BUSY, VERDICT_FAILED,
};
use super::discover::{Address, Found, PciDeviceKind};
use super::lock::lock_byte;
use crate::error::LinkError;
use crate::fork::OwnFd;
use crate::link::epoch::new_epoch;
use crate::link::window::WindowGuest;
use crate::lock::lock;
use crate::shm::doorbell::{Doorbell, Wake};
use crate::shm::layout::Layout;
use crate::shm::liveness::{self, Liveness, STALL};
use crate::shm::memory::{MapError, Registers, SharedWords as _, Window};

/// The offset of the doorbell's register, in bytes. Both devices have it at the same place.
pub const DOORBELL: usize = 12;

/// The value of the doorbell: vector 0 of peer 0, the host.
const RING: u32 = 0;

/// Why a PCI device gives no link to an executor.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum PciError {
    #[error("there is no PCI device at {address}")]
    NoDevice { address: Address },
    #[error("{device}: not a vGPU ({cause})")]
    NotVgpu {
        device: String,
        cause: DeviceMismatch,
    },
    #[error("{device}: a physical GPU (subsystem {vendor:04x}:{id:04x}), not touched")]
    RealGpu {
        device: String,
        vendor: u16,
        id: u16,
    },
    #[error(
        "{device}: the driver {driver} is bound to the device; unbind the driver to use the vGPU"
    )]
    Driver { device: String, driver: String },
    #[error(
        "{device}: no permission for {file}; add a udev rule for the group vgpu (deploy/guest has \
         one), or run as root",
        file = file.display()
    )]
    Permission { device: String, file: PathBuf },
    #[error(
        "{device}: the kernel's lockdown mode (Secure Boot) forbids mapping PCI memory; turn \
         lockdown off, or use a vsock link"
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
        "{device}: the executor did not answer within {ms} ms; does `vgpu serve` run on the host?"
    )]
    Timeout { device: String, ms: u128 },
    #[error("{device}: the executor could not create a session; its log says why")]
    Refused { device: String },
    #[error("{device}: {error}")]
    Link { device: String, error: LinkError },
}

/// What shows that a PCI device is not a vGPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum DeviceMismatch {
    #[error("the id is neither 1af4:1110 nor 10de:2331")]
    Id,
    #[error("the device has no region for a window")]
    NoWindow,
    /// A region of the device cannot be mapped. Never [`MapError::System`].
    #[error(transparent)]
    Map(#[from] MapError),
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error("the executor answered with the verdict {verdict}")]
    Verdict { verdict: u64 },
}

/// An open vGPU device without a session.
pub struct PciDevice {
    name: String,
    window_file: PathBuf,
    file: File,
    registers: Arc<Registers>,
    page: Arc<Window>,
    directory: Directory,
}

impl PciDevice {
    /// Opens the device, enables it and checks its directory.
    ///
    /// # Errors
    ///
    /// [`PciError::RealGpu`], [`PciError::NotVgpu`] and [`PciError::Driver`] when the device is not
    /// a free vGPU; [`PciError::Permission`], [`PciError::Lockdown`] and [`PciError::Io`] when this
    /// process cannot access the device.
    pub fn open(found: &Found) -> Result<PciDevice, PciError> {
        let device = found.to_string();
        match found.kind {
            PciDeviceKind::Ivshmem | PciDeviceKind::Vgpu => {}
            PciDeviceKind::RealGpu => {
                return Err(PciError::RealGpu {
                    device,
                    vendor: found.subsystem.0,
                    id: found.subsystem.1,
                });
            }
            PciDeviceKind::Other => {
                return Err(PciError::NotVgpu {
                    device,
                    cause: DeviceMismatch::Id,
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
                .map_err(|error| denied(&device, &enable, "enabling the device", error))?;
        }
        let open = |path: &Path, what| {
            let file = File::options().read(true).write(true).open(path);
            file.map_err(|error| denied(&device, path, what, error))
        };
        let window_file = found.window_file();
        let file = open(&window_file, "opening the window's region")?;
        let register_file = open(&found.register_file(), "opening the registers' region")?;
        let size = found
            .window_size()
            .and_then(|size| usize::try_from(size).ok())
            .ok_or_else(|| PciError::NotVgpu {
                device: device.clone(),
                cause: DeviceMismatch::NoWindow,
            })?;
        // SAFETY: `file` is the device's region in sysfs, and the kernel refuses to map more than
        // the region has. The region exists while the device does. The mapping of a removed device
        // either reads as zeros or ones, or its next access ends the program (SIGBUS).
        let page = unsafe { Window::map_device(file.as_fd(), 0, directory::PAGE) }
            .map_err(|error| unmapped(&device, error))?;
        let directory = Directory::read(&page, size).map_err(|error| not_vgpu(&device, error))?;
        // SAFETY: `register_file` is the device's region of registers in sysfs, which the kernel
        // maps only to its size, and which exists while the device does.
        let registers = unsafe { Registers::map(register_file.as_fd()) }
            .map_err(|error| unmapped(&device, error))?;
        Ok(PciDevice {
            name: device,
            window_file,
            file,
            registers: Arc::new(registers),
            page: Arc::new(page),
            directory,
        })
    }

    /// The directory of the device.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Whether the executor behind the device runs. Waits up to `timeout` for a heartbeat, which
    /// comes once a second.
    pub fn is_alive(&self, timeout: Duration) -> bool {
        let began = Instant::now();
        let before = self.page.load(directory::word::HEARTBEAT);
        while began.elapsed() < timeout {
            if self.page.load(directory::word::HEARTBEAT) != before {
                return self.page.load(directory::word::HOST_STATE) == 1;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    /// Requests a session in a free slot. `timeout` limits the call.
    ///
    /// # Errors
    ///
    /// [`PciError::Full`] when all slots are in use, [`PciError::Ended`], [`PciError::Timeout`] and
    /// [`PciError::Refused`] when the executor does not serve, and [`PciError::Io`] when a system
    /// call fails.
    pub fn connect(mut self, timeout: Duration) -> Result<WindowGuest, PciError> {
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
            if self.request(k, deadline, timeout)? {
                // An executor that was killed leaves its directory. The next one has answered then.
                self.directory = Directory::read(&*self.page, self.directory.size)
                    .map_err(|error| not_vgpu(&self.name, error))?;
                return self.open_slot(k, file);
            }
            // The previous session in the slot has not ended. Closing the file releases the lock.
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
        file.map_err(|error| {
            denied(
                &self.name,
                &self.window_file,
                "opening the window's region",
                error,
            )
        })
    }

    /// Requests a session in slot `k`. `false` when the slot is busy.
    fn request(&self, k: usize, deadline: Instant, timeout: Duration) -> Result<bool, PciError> {
        use directory::word::{answered, owner, request, verdict};
        let number = new_epoch();
        self.page.store(request(k), number);
        self.page.full_fence();
        self.registers.write(DOORBELL, RING);
        let mut sleep = Duration::from_micros(20);
        while self.page.load(answered(k)) != number {
            if self.page.load(request(k)) != number {
                // Another program has requested the slot, which did not see this one's lock.
                return Ok(false);
            }
            if Instant::now() > deadline {
                return Err(PciError::Timeout {
                    device: self.name.clone(),
                    ms: timeout.as_millis(),
                });
            }
            std::thread::sleep(sleep);
            sleep = (sleep * 2).min(Duration::from_millis(5));
        }
        match self.page.load(verdict(k)) {
            // The verdict may be that on a later request. An executor without this word leaves 0.
            VERDICT_ACCEPTED => Ok([0, number].contains(&self.page.load(owner(k)))),
            VERDICT_BUSY => Ok(false),
            VERDICT_FAILED => Err(PciError::Refused {
                device: self.name.clone(),
            }),
            other => Err(PciError::NotVgpu {
                device: self.name.clone(),
                cause: DeviceMismatch::Verdict { verdict: other },
            }),
        }
    }

    /// Maps slot `k` and opens the link. `lock` is the file that holds the slot's lock.
    fn open_slot(self, k: usize, lock: File) -> Result<WindowGuest, PciError> {
        let slot = self.directory.slot(k);
        // SAFETY: `self.file` is the device's region, which keeps its size while the device exists.
        // The slot lies inside the region: `Directory::read` has checked the sizes.
        let window =
            unsafe { Window::map_device(self.file.as_fd(), slot.start as u64, slot.len()) }
                .map_err(|error| unmapped(&self.name, error))?;
        let window = Arc::new(window);
        let layout = Layout::read(&*window, window.size())
            .map_err(|error| not_vgpu(&self.name, error.into()))?;
        let liveness = Liveness::new(&window, STALL);
        let doorbell = PciDoorbell {
            registers: self.registers,
            page: self.page,
            epoch: self.directory.epoch,
            sleeps: Mutex::new(SleepTimes::new()),
            _lock: OwnFd::new(lock),
        };
        let guest = WindowGuest::new(
            Arc::clone(&window),
            &layout,
            Box::new(doorbell),
            Some(liveness),
        );
        // After the guest has opened the link: from here on the end of the process closes it.
        liveness::start_guest(&window, layout.epoch()).map_err(|error| PciError::Io {
            device: self.name,
            what: "starting the heartbeat thread",
            error,
        })?;
        Ok(guest)
    }
}

/// Connects to the executor behind the device at `address`. `timeout` limits the wait for the
/// executor.
///
/// # Errors
///
/// [`PciError::NoDevice`], and the errors of [`PciDevice::open`] and [`PciDevice::connect`].
pub fn connect(sysfs: &Path, address: Address, timeout: Duration) -> Result<WindowGuest, PciError> {
    let found = Found::read(sysfs, address).map_err(|_| PciError::NoDevice { address })?;
    PciDevice::open(&found)?.connect(timeout)
}

/// The doorbell of a guest: a register that wakes the host. The guest itself polls.
struct PciDoorbell {
    registers: Arc<Registers>,
    page: Arc<Window>,
    /// The epoch of the executor's run.
    epoch: u64,
    sleeps: Mutex<SleepTimes>,
    /// The open file that holds the lock of the slot.
    _lock: OwnFd,
}

impl Doorbell for PciDoorbell {
    fn ring(&self) -> Result<(), LinkError> {
        // The full fence of `Waker::must_ring` precedes this store, so the host sees the
        // publication when it sees the ring.
        self.registers.write(DOORBELL, RING);
        Ok(())
    }

    fn clear(&self) -> Result<(), LinkError> {
        Ok(())
    }

    fn wait(&self, timeout: Duration) -> Result<Wake, LinkError> {
        if !timeout.is_zero() {
            let sleeps = || lock(&self.sleeps);
            let sleep = sleeps().next(Instant::now());
            std::thread::sleep(sleep.min(timeout));
            sleeps().woke(Instant::now());
        }
        // An executor that ends closes the slot's window after its last reply. An executor that was
        // killed is replaced by another, with another epoch. So has a removed device.
        let is_there = self.page.load(directory::word::EPOCH) == self.epoch;
        Ok(if is_there { Wake::Look } else { Wake::PeerGone })
    }
}

/// The length of the sleeps of one wait: an eighth of the time waited so far. A wait then takes at
/// most an eighth longer than necessary, and a long wait costs almost no processor time.
#[derive(Debug)]
struct SleepTimes {
    began: Instant,
    woke: Instant,
}

impl SleepTimes {
    const MIN: Duration = Duration::from_micros(20);
    const MAX: Duration = Duration::from_millis(5);
    /// Sleeps further apart than this belong to two waits.
    const NEW_WAIT: Duration = Duration::from_micros(500);

    fn new() -> SleepTimes {
        let now = Instant::now();
        SleepTimes {
            began: now,
            woke: now,
        }
    }

    fn next(&mut self, now: Instant) -> Duration {
        if now.saturating_duration_since(self.woke) > SleepTimes::NEW_WAIT {
            self.began = now;
        }
        (now.saturating_duration_since(self.began) / 8).clamp(SleepTimes::MIN, SleepTimes::MAX)
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
        // The process has opened the file, so only lockdown mode forbids the mapping.
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
            cause: other.into(),
        },
    }
}

fn not_vgpu(device: &str, error: DirectoryError) -> PciError {
    PciError::NotVgpu {
        device: device.to_owned(),
        cause: error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::pci::host::{VmDoorbell, VmEvent, VmWindow};
    use crate::link::{GuestEnd as _, HostEnd as _};
    use crate::shm::doorbell::new_eventfd;
    use crate::shm::layout::word;
    use crate::shm::memory::sealed_file;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn sleeps_grow_with_the_wait() {
        let mut sleeps = SleepTimes::new();
        let start = Instant::now() + Duration::from_secs(1);
        assert_eq!(sleeps.next(start), SleepTimes::MIN);
        // Awake on time, and asleep again at once.
        sleeps.woke(start + Duration::from_millis(8));
        let sleep = sleeps.next(start + Duration::from_millis(8));
        assert_eq!(sleep, Duration::from_millis(1));
        sleeps.woke(start + Duration::from_secs(9));
        assert_eq!(sleeps.next(start + Duration::from_secs(9)), SleepTimes::MAX);
        // Another wait.
        assert_eq!(
            sleeps.next(start + Duration::from_secs(10)),
            SleepTimes::MIN
        );
    }

    /// Ends the threads of a test, even if the test fails.
    struct EndOnDrop<'a>(&'a AtomicBool);

    impl Drop for EndOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// The device with this memory, with a file of its own for the locks.
    fn device(memory: &rustix::fd::OwnedFd, locks: &Path) -> PciDevice {
        File::create(locks).unwrap();
        let registers = sealed_file(4096).unwrap();
        let page = Window::map_part(memory.as_fd(), 0, directory::PAGE).unwrap();
        PciDevice {
            name: locks.display().to_string(),
            window_file: locks.to_owned(),
            file: memory.try_clone().unwrap().into(),
            // SAFETY: a sealed file of 4096 bytes.
            registers: Arc::new(unsafe { Registers::map(registers.as_fd()) }.unwrap()),
            directory: Directory::read(&page, directory::MIN_SIZE).unwrap(),
            page: Arc::new(page),
        }
    }

    /// Sends a request, and waits until the host has it.
    fn works(guest: &mut WindowGuest) -> Result<(), LinkError> {
        let sent = guest.send(b"request", crate::bytes::Bytes::from(&[][..]));
        sent.and_then(|request| guest.wait_retired(request))
    }

    /// A program waits for an executor that was killed. The next one answers it.
    #[test]
    fn program_that_waits_while_the_next_executor_starts_has_a_session() {
        let memory = sealed_file(directory::MIN_SIZE).unwrap();
        let serve = || {
            let bell = VmDoorbell::new(new_eventfd().unwrap(), None);
            let region = memory.try_clone().unwrap();
            VmWindow::new(region, directory::MIN_SIZE, bell, None).unwrap()
        };
        let killed = serve();
        let folder = tempfile::tempdir().unwrap();
        let waiting = device(&memory, &folder.path().join("device"));
        let mut next = serve();
        drop(killed);
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut host = loop {
                    match next.next(Duration::from_millis(1)).unwrap() {
                        VmEvent::Arrival(arrival) => break arrival.handshake().unwrap(),
                        _ if ends.load(Ordering::Relaxed) => return,
                        _ => {}
                    }
                };
                while !ends.load(Ordering::Relaxed) {
                    // The guest sleeps meanwhile, and then looks whether the executor is there.
                    std::thread::sleep(Duration::from_millis(5));
                    let _ = host.receive(&mut Vec::new(), Duration::from_millis(1));
                }
            });
            let _end = EndOnDrop(&ends);
            let mut guest = waiting.connect(Duration::from_secs(20)).unwrap();
            for _ in 0..3 {
                assert_eq!(works(&mut guest), Ok(()));
            }
        });
    }

    /// Both programs have locks of their own, as in two containers with mounts of sysfs of their
    /// own: each device has the region's memory, and another file for the locks.
    #[test]
    fn programs_that_do_not_see_each_others_locks_get_slots_of_their_own() {
        let size = directory::MIN_SIZE;
        let memory = sealed_file(size).unwrap();
        let bell = VmDoorbell::new(new_eventfd().unwrap(), None);
        let region = memory.try_clone().unwrap();
        let mut machine = VmWindow::new(region, size, bell, None).unwrap();
        let ends = AtomicBool::new(false);
        let folder = tempfile::tempdir().unwrap();
        let device = |name: &str| device(&memory, &folder.path().join(name));
        let connect = |name: &str| device(name).connect(Duration::from_secs(20)).unwrap();
        let start = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let ends = &ends;
                while !ends.load(Ordering::Relaxed) {
                    let event = machine.next(Duration::from_millis(1)).unwrap();
                    let VmEvent::Arrival(arrival) = event else {
                        continue;
                    };
                    let mut host = arrival.handshake().unwrap();
                    scope.spawn(move || {
                        let timeout = Duration::from_millis(10);
                        while !ends.load(Ordering::Relaxed)
                            && host.receive(&mut Vec::new(), timeout).is_ok()
                        {
                        }
                    });
                }
            });
            let _end = EndOnDrop(&ends);
            let mut one = connect("one");
            assert_eq!(works(&mut one), Ok(()));
            let mut two = connect("two");
            for _ in 0..100 {
                assert_eq!((works(&mut one), works(&mut two)), (Ok(()), Ok(())));
            }
            // Two at the same moment.
            let both = ["three", "four"].map(|name| {
                let (start, connect) = (&start, &connect);
                scope.spawn(move || {
                    start.wait();
                    connect(name)
                })
            });
            let [mut three, mut four] = both.map(|program| program.join().unwrap());
            for guest in [&mut one, &mut two, &mut three, &mut four] {
                assert_eq!(works(guest), Ok(()));
            }
            // A session begins in the slot of a program that was stopped: it publishes nothing
            // more.
            let epoch = Layout::read(&**one.window(), one.window().size())
                .unwrap()
                .epoch();
            let tail = one.window().load(word::SUBMISSION_TAIL);
            one.window().store(word::EPOCH, epoch ^ 1);
            let window = Arc::clone(one.window());
            let layout = Layout::read(&*window, window.size()).unwrap();
            let content = || {
                let mut bytes = vec![0; window.size()];
                window.bytes(0..bytes.len()).copy_to(&mut bytes);
                let rings = layout.submission().start;
                let words = [
                    word::GUEST_STATE,
                    word::SUBMISSION_TAIL,
                    word::COMPLETION_HEAD,
                ];
                (bytes.split_off(rings), words.map(|at| window.load(at)))
            };
            // A reply of the successor, and its progress.
            let completed = window.load(word::COMPLETION_TAIL);
            window.store(word::COMPLETION_TAIL, completed + 64);
            window.store(word::RETIRED, u64::MAX);
            let before = content();
            assert_eq!(works(&mut one), Err(LinkError::Closed));
            let large = vec![7; 1 << 16];
            let sent = one.send(b"large", crate::bytes::Bytes::from(&large[..]));
            assert_eq!(sent, Err(LinkError::Closed));
            assert_eq!(one.wait_retired(1), Err(LinkError::Closed));
            let mut message = Vec::new();
            let mut payload = [0; 64];
            let received = one.receive(&mut message, (&mut payload[..]).into());
            assert_eq!((received, message.len()), (Err(LinkError::Closed), 0));
            assert_eq!(window.load(word::SUBMISSION_TAIL), tail);
            drop(one);
            assert!(
                before == content(),
                "the stopped program changed the session of another"
            );
        });
    }
}
