//! The host's side: one virtual machine, its device's memory, and the guests that come through it.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::directory::{
    Directory, DirectoryError, PAGE, VERDICT_BUSY, VERDICT_COME_IN, VERDICT_FAILED, word,
};
use crate::link::LinkError;
use crate::link::unix::new_epoch;
use crate::link::window::WindowHost;
use crate::shm::doorbell::{Doorbell, Wake, new_eventfd, system};
use crate::shm::layout::{self, Layout};
use crate::shm::liveness::{self, Liveness};
use crate::shm::memory::{MapError, Memory as _, Window};

/// How long a session whose slot is wanted again may take to end before the guest is told to look elsewhere.
const EVICTION: Duration = Duration::from_millis(500);

/// What a virtual machine rings, and how its end is noticed.
///
/// The eventfd is one for all slots. Everybody who listens has an epoll of his own on it, edge-triggered, and nobody reads
/// it: each ring wakes all, none can take another's ring away, and the count (a 64-bit number) never gets full.
#[derive(Debug)]
pub struct Bell {
    event: OwnedFd,
    /// Hangs up when the virtual machine ends.
    lifeline: Option<OwnedFd>,
}

const RUNG: u64 = 0;
const GONE: u64 = 1;
const EVICTED: u64 = 2;

impl Bell {
    /// A bell of the eventfd that the virtual machine rings, and of a socket that hangs up when it ends.
    pub fn new(event: OwnedFd, lifeline: Option<OwnedFd>) -> Bell {
        Bell { event, lifeline }
    }

    /// Somebody who listens.
    fn listener(&self) -> Result<OwnedFd, LinkError> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(system("making an epoll instance"))?;
        let add = |fd: BorrowedFd<'_>, data, flags| {
            epoll::add(&set, fd, epoll::EventData::new_u64(data), flags)
                .map_err(system("adding to an epoll instance"))
        };
        add(
            self.event.as_fd(),
            RUNG,
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        if let Some(lifeline) = &self.lifeline {
            add(lifeline.as_fd(), GONE, epoll::EventFlags::RDHUP)?;
        }
        Ok(set)
    }
}

/// Waits for events and returns what they were about.
fn listen(set: &OwnedFd, timeout: Duration) -> Result<Vec<u64>, LinkError> {
    let timeout =
        Timespec::try_from(timeout).map_err(|_| system("waiting for a guest")(Errno::INVAL))?;
    let mut events = [epoll::Event {
        flags: epoll::EventFlags::empty(),
        data: epoll::EventData::new_u64(0),
    }; 4];
    match epoll::wait(set, &mut events, Some(&timeout)) {
        Ok(count) => Ok(events[..count].iter().map(|e| e.data.u64()).collect()),
        Err(Errno::INTR) => Ok(Vec::new()),
        Err(error) => Err(system("waiting for a guest")(error)),
    }
}

/// The device's memory of one virtual machine.
#[derive(Debug)]
pub struct VmWindow {
    file: Arc<OwnedFd>,
    page: Arc<Window>,
    directory: Directory,
    bell: Arc<Bell>,
    ear: OwnedFd,
    slots: Vec<Slot>,
    silence: Option<Duration>,
}

#[derive(Debug, Default)]
struct Slot {
    /// The number answered last, or taken up.
    seen: u64,
    running: Option<Running>,
    /// A guest that waits for the session before it to end.
    waiting: Option<(u64, Instant)>,
}

/// A session that may still run in a slot.
#[derive(Debug)]
struct Running {
    /// Gone when the session has let go of the slot's memory.
    token: Weak<Eviction>,
}

/// How a session is told to leave.
#[derive(Debug)]
struct Eviction {
    is_asked: AtomicBool,
    event: OwnedFd,
}

/// What happened at the device.
#[derive(Debug)]
pub enum VmEvent {
    /// Nothing, for as long as was to be waited.
    Nothing,
    /// A guest asks for a session.
    Arrival(PciArrival),
    /// The virtual machine has ended.
    Gone,
}

impl VmWindow {
    /// The memory in `file`, of `size` bytes, sealed; new, or with what an executor before this one has left: its guests see
    /// that it is gone. A guest that has been still for `silence` has died.
    pub fn new(
        file: OwnedFd,
        size: usize,
        bell: Bell,
        silence: Option<Duration>,
    ) -> Result<VmWindow, VmError> {
        let directory = Directory::new(size, new_epoch())?;
        let page = Arc::new(Window::map_part(file.as_fd(), 0, PAGE)?);
        let slots = (0..directory.slots).map(|k| Slot {
            // What has been answered needs no answer again; what has not still does.
            seen: page.load(word::answered(k)),
            ..Slot::default()
        });
        let slots = slots.collect();
        directory.write(&*page);
        liveness::start_at(&page, word::HEARTBEAT).map_err(VmError::Heartbeat)?;
        let ear = bell.listener()?;
        Ok(VmWindow {
            file: Arc::new(file),
            page,
            directory,
            bell: Arc::new(bell),
            ear,
            slots,
            silence,
        })
    }

    /// Its directory.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Waits up to `timeout` for something to happen.
    pub fn next(&mut self, timeout: Duration) -> Result<VmEvent, LinkError> {
        if let Some(arrival) = self.look()? {
            return Ok(VmEvent::Arrival(arrival));
        }
        let is_waited_for = self.slots.iter().any(|slot| slot.waiting.is_some());
        let nap = if is_waited_for {
            timeout.min(Duration::from_millis(1))
        } else {
            timeout
        };
        if listen(&self.ear, nap)?.contains(&GONE) {
            return Ok(VmEvent::Gone);
        }
        Ok(self.look()?.map_or(VmEvent::Nothing, VmEvent::Arrival))
    }

    /// A guest that can have its slot now.
    fn look(&mut self) -> Result<Option<PciArrival>, LinkError> {
        for k in 0..self.slots.len() {
            let number = self.page.load(word::request(k));
            let slot = &mut self.slots[k];
            if number != slot.seen {
                slot.seen = number;
                slot.waiting = Some((number, Instant::now()));
            }
            let Some((number, since)) = slot.waiting else {
                continue;
            };
            let running = slot.running.as_ref();
            if let Some(eviction) = running.and_then(|running| running.token.upgrade()) {
                eviction.is_asked.store(true, Ordering::Relaxed);
                let _ = rustix::io::write(&eviction.event, &1u64.to_ne_bytes());
                if since.elapsed() > EVICTION {
                    slot.waiting = None;
                    answer(&self.page, k, number, VERDICT_BUSY);
                }
                continue;
            }
            slot.waiting = None;
            let token = Arc::new(Eviction {
                is_asked: AtomicBool::new(false),
                event: new_eventfd()?,
            });
            slot.running = Some(Running {
                token: Arc::downgrade(&token),
            });
            return Ok(Some(PciArrival {
                slot: k,
                number,
                range: self.directory.slot(k),
                file: Arc::clone(&self.file),
                page: Arc::clone(&self.page),
                bell: Arc::clone(&self.bell),
                token: Some(token),
                silence: self.silence,
            }));
        }
        Ok(None)
    }
}

impl Drop for VmWindow {
    fn drop(&mut self) {
        self.page.store(word::HOST_STATE, 0);
    }
}

fn answer(page: &Window, k: usize, number: u64, verdict: u64) {
    page.store(word::verdict(k), verdict);
    page.drain_writes();
    page.store(word::answered(k), number);
}

/// Why there is no device for a virtual machine.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum VmError {
    #[error("{0}")]
    Directory(#[from] DirectoryError),
    #[error("{0}")]
    Map(#[from] MapError),
    #[error("{0}")]
    Link(#[from] LinkError),
    #[error("no thread for the heartbeat: {0}")]
    Heartbeat(std::io::Error),
}

/// A guest that has asked for a session.
#[derive(Debug)]
pub struct PciArrival {
    slot: usize,
    number: u64,
    range: std::ops::Range<usize>,
    file: Arc<OwnedFd>,
    page: Arc<Window>,
    bell: Arc<Bell>,
    token: Option<Arc<Eviction>>,
    silence: Option<Duration>,
}

impl PciArrival {
    /// Number of the slot.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Writes the slot's window anew and lets the guest in.
    pub fn handshake(mut self) -> Result<WindowHost, VmError> {
        let epoch = new_epoch();
        let layout = Layout::new(self.range.len(), epoch).map_err(DirectoryError::from)?;
        let window = Arc::new(Window::map_part(
            self.file.as_fd(),
            self.range.start as u64,
            self.range.len(),
        )?);
        for offset in (0..layout::PAGE).step_by(8) {
            window.store(offset, 0);
        }
        layout.write(&*window);
        liveness::start(&window).map_err(VmError::Heartbeat)?;
        let liveness = self
            .silence
            .map(|silence| Liveness::at(&window, layout::word::GUEST_HEARTBEAT, silence));
        let ear = self.bell.listener()?;
        let Some(token) = self.token.take() else {
            return Err(LinkError::Closed.into()); // only `drop` and this take it
        };
        let listened = epoll::add(
            &ear,
            &token.event,
            epoll::EventData::new_u64(EVICTED),
            epoll::EventFlags::IN,
        );
        listened.map_err(system("adding to an epoll instance"))?;
        let doorbell = SlotDoorbell {
            ear,
            token,
            _bell: Arc::clone(&self.bell),
        };
        answer(&self.page, self.slot, self.number, VERDICT_COME_IN);
        Ok(WindowHost::with_pulse(
            window,
            &layout,
            Box::new(doorbell),
            liveness,
        ))
    }
}

impl Drop for PciArrival {
    fn drop(&mut self) {
        // Nobody has answered: it was turned away, or something failed.
        if self.page.load(word::answered(self.slot)) != self.number {
            answer(&self.page, self.slot, self.number, VERDICT_FAILED);
        }
    }
}

/// The bell as one session hears it.
struct SlotDoorbell {
    ear: OwnedFd,
    token: Arc<Eviction>,
    _bell: Arc<Bell>,
}

impl Doorbell for SlotDoorbell {
    /// There is nobody to hear it: the guest looks by itself.
    fn ring(&self) -> Result<(), LinkError> {
        Ok(())
    }

    fn clear(&self) -> Result<(), LinkError> {
        listen(&self.ear, Duration::ZERO).map(drop)
    }

    fn wait(&self, timeout: Duration) -> Result<Wake, LinkError> {
        let heard = listen(&self.ear, timeout)?;
        let is_gone = heard.contains(&GONE) || self.token.is_asked.load(Ordering::Relaxed);
        Ok(if is_gone { Wake::PeerGone } else { Wake::Look })
    }
}
