//! The host's side: the memory of one virtual machine's device, and the sessions in its slots.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::directory::{
    Directory, DirectoryError, PAGE, VERDICT_ACCEPTED, VERDICT_BUSY, VERDICT_FAILED, word,
};
use super::slots::{SlotUse, SlotWatch};
use crate::error::LinkError;
use crate::link::epoch::new_epoch;
use crate::link::window::WindowHost;
use crate::link::window_end::unmapped;
use crate::shm::doorbell::{Doorbell, Wake, new_eventfd};
use crate::shm::layout::{self, Layout};
use crate::shm::liveness::{self, ALIVE, Liveness, PERIOD};
use crate::shm::memory::{MapError, SharedWords as _, Window};

/// How long a request for the slot of a session without a heartbeat waits for the next heartbeat:
/// after a pause of the machine all of its programs are silent until then. With the time to end the
/// session less than the 2 s that a guest waits for its answers.
const HEARTBEAT_WAIT: Duration = PERIOD.saturating_add(Duration::from_millis(250));

/// The time that a session has to end after that. Then the host answers [`VERDICT_BUSY`].
const EVICTION: Duration = Duration::from_millis(500);

/// The doorbell of a virtual machine, and the detection of the machine's end.
///
/// One eventfd serves all slots. Each session has an edge-triggered epoll instance on the eventfd,
/// and no session reads the eventfd. A ring therefore wakes all sessions, no session consumes the
/// ring of another, and the 64-bit counter does not saturate.
#[derive(Debug)]
pub struct VmDoorbell {
    event: OwnedFd,
    /// A socket that the kernel closes when the virtual machine ends.
    hangup_socket: Option<OwnedFd>,
}

/// Epoll data: the virtual machine has rung its doorbell.
const RUNG: u64 = 0;
/// Epoll data: the virtual machine has ended.
const GONE: u64 = 1;
/// Epoll data: another guest has requested the slot.
const EVICTED: u64 = 2;

impl VmDoorbell {
    /// The doorbell of the eventfd that the virtual machine rings, and of a socket that the kernel
    /// closes when the machine ends.
    pub fn new(event: OwnedFd, hangup_socket: Option<OwnedFd>) -> VmDoorbell {
        VmDoorbell {
            event,
            hangup_socket,
        }
    }

    /// A new epoll instance on the doorbell.
    fn subscribe(&self) -> Result<OwnedFd, LinkError> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(LinkError::system("creating an epoll instance"))?;
        let add = |fd: BorrowedFd<'_>, data, flags| {
            epoll::add(&set, fd, epoll::EventData::new_u64(data), flags)
                .map_err(LinkError::system("adding to an epoll instance"))
        };
        add(
            self.event.as_fd(),
            RUNG,
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        if let Some(hangup_socket) = &self.hangup_socket {
            add(hangup_socket.as_fd(), GONE, epoll::EventFlags::RDHUP)?;
        }
        Ok(set)
    }
}

/// Waits up to `timeout` for events and returns their epoll data.
fn wait_events(set: &OwnedFd, timeout: Duration) -> Result<Vec<u64>, LinkError> {
    let timeout = Timespec::try_from(timeout)
        .map_err(|_| LinkError::system("waiting for a guest")(Errno::INVAL))?;
    let mut events = [epoll::Event {
        flags: epoll::EventFlags::empty(),
        data: epoll::EventData::new_u64(0),
    }; 4];
    match epoll::wait(set, &mut events, Some(&timeout)) {
        Ok(count) => Ok(events[..count].iter().map(|e| e.data.u64()).collect()),
        Err(Errno::INTR) => Ok(Vec::new()),
        Err(error) => Err(LinkError::system("waiting for a guest")(error)),
    }
}

/// The memory of one virtual machine's device.
#[derive(Debug)]
pub struct VmWindow {
    file: Arc<OwnedFd>,
    page: Arc<Window>,
    directory: Directory,
    bell: Arc<VmDoorbell>,
    events: OwnedFd,
    slots: Vec<Slot>,
    watch: Arc<SlotWatch>,
    silence: Option<Duration>,
}

#[derive(Debug, Default)]
struct Slot {
    /// The number of the last request that the host has accepted or answered.
    seen: u64,
    running: Option<Running>,
    /// The latest request of guests that wait for the end of the previous session, and the time of
    /// the first one.
    waiting: Option<(u64, Instant)>,
}

/// A session in a slot.
#[derive(Debug)]
struct Running {
    /// Dropped when the session has unmapped the slot's memory.
    token: Weak<Eviction>,
    heartbeat: GuestHeartbeat,
}

/// The heartbeat of the guest in a slot.
#[derive(Debug)]
struct GuestHeartbeat {
    /// The first page of the slot's window.
    page: Window,
    beat: u64,
    /// When the beat was seen to change, or when the session began.
    changed: Instant,
}

impl GuestHeartbeat {
    /// The heartbeat of a guest that begins a session now.
    fn new(page: Window) -> GuestHeartbeat {
        GuestHeartbeat {
            beat: page.load(layout::word::GUEST_HEARTBEAT),
            page,
            changed: Instant::now(),
        }
    }

    /// Looks whether the heartbeat has changed. Called often, so that a program that has ended is
    /// known to be dead when another one asks for its slot.
    fn sample(&mut self) {
        let beat = self.page.load(layout::word::GUEST_HEARTBEAT);
        if beat != self.beat {
            self.beat = beat;
            self.changed = Instant::now();
        }
    }

    /// Whether the guest's program lives.
    fn is_alive(&mut self) -> bool {
        self.sample();
        self.changed.elapsed() < ALIVE
    }
}

/// The request to a session to release its slot.
#[derive(Debug)]
struct Eviction {
    is_asked: AtomicBool,
    event: OwnedFd,
    /// What other threads see of the session.
    _seen: Option<SlotUse>,
}

/// An event of the device.
#[derive(Debug)]
pub enum VmEvent {
    /// The timeout has passed.
    Nothing,
    /// A guest has requested a session.
    Arrival(PciArrival),
    /// The virtual machine has ended.
    Gone,
}

impl VmWindow {
    /// Serves the sealed memory `file` of `size` bytes. The memory is new, or an earlier executor
    /// has served it; the guests of that executor then see a new epoch. A guest without a heartbeat
    /// for `silence` has died.
    ///
    /// # Errors
    ///
    /// [`VmError::Directory`] for a wrong size, [`VmError::Map`] for a file that is unsealed or
    /// smaller than `size`, [`VmError::Heartbeat`] and [`VmError::Link`] when a system call fails.
    pub fn new(
        file: OwnedFd,
        size: usize,
        bell: VmDoorbell,
        silence: Option<Duration>,
    ) -> Result<VmWindow, VmError> {
        let directory = Directory::new(size, new_epoch())?;
        let page = Arc::new(Window::map_part(file.as_fd(), 0, PAGE)?);
        let slots = (0..directory.slots).map(|k| Slot {
            // The earlier executor has answered the requests up to this number.
            seen: page.load(word::answered(k)),
            ..Slot::default()
        });
        let slots = slots.collect();
        directory.write(&*page);
        liveness::start_at(&page, word::HEARTBEAT).map_err(VmError::Heartbeat)?;
        let events = bell.subscribe()?;
        Ok(VmWindow {
            file: Arc::new(file),
            watch: SlotWatch::new(Arc::clone(&page), directory.epoch, directory.slots),
            page,
            directory,
            bell: Arc::new(bell),
            events,
            slots,
            silence,
        })
    }

    /// The directory of the device.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// What the slots do, for other threads.
    pub fn watch(&self) -> &Arc<SlotWatch> {
        &self.watch
    }

    /// Waits up to `timeout` for an event.
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] when a system call fails.
    pub fn next(&mut self, timeout: Duration) -> Result<VmEvent, LinkError> {
        if let Some(arrival) = self.next_request()? {
            return Ok(VmEvent::Arrival(arrival));
        }
        let is_slot_awaited = self.slots.iter().any(|slot| slot.waiting.is_some());
        let wait = if is_slot_awaited {
            timeout.min(Duration::from_millis(1))
        } else {
            timeout
        };
        if wait_events(&self.events, wait)?.contains(&GONE) {
            return Ok(VmEvent::Gone);
        }
        Ok(self
            .next_request()?
            .map_or(VmEvent::Nothing, VmEvent::Arrival))
    }

    /// The next request whose slot is free.
    fn next_request(&mut self) -> Result<Option<PciArrival>, LinkError> {
        self.watch.look();
        for k in 0..self.slots.len() {
            let number = self.page.load(word::request(k));
            let slot = &mut self.slots[k];
            if let Some(Running { heartbeat, .. }) = &mut slot.running {
                heartbeat.sample();
                self.watch.heartbeat(k, heartbeat.beat, heartbeat.changed);
            }
            if number != slot.seen {
                slot.seen = number;
                // Requests that follow each other do not put the end of a dead session off.
                let since = slot.waiting.map_or_else(Instant::now, |(_, since)| since);
                slot.waiting = Some((number, since));
            }
            self.watch.waiting(k, slot.waiting.map(|(_, since)| since));
            let Some((number, since)) = slot.waiting else {
                continue;
            };
            let running = slot.running.as_mut();
            let session = running.and_then(|running| Some((running.token.upgrade()?, running)));
            if let Some((eviction, running)) = session {
                // Programs with mounts of sysfs of their own, such as containers, do not see each
                // other's locks: a request is no sign that the slot's program has ended.
                if running.heartbeat.is_alive() {
                    slot.waiting = None;
                    answer(&self.page, k, number, VERDICT_BUSY);
                    continue;
                }
                if since.elapsed() < HEARTBEAT_WAIT {
                    continue;
                }
                eviction.is_asked.store(true, Ordering::Relaxed);
                self.watch.evict(k);
                let _ = rustix::io::write(&eviction.event, &1u64.to_ne_bytes());
                if since.elapsed() > HEARTBEAT_WAIT + EVICTION {
                    slot.waiting = None;
                    answer(&self.page, k, number, VERDICT_BUSY);
                }
                continue;
            }
            slot.waiting = None;
            let token = Arc::new(Eviction {
                is_asked: AtomicBool::new(false),
                event: new_eventfd()?,
                _seen: Some(self.watch.begin(k, number)),
            });
            let begin = self.directory.slot(k).start as u64;
            let page = Window::map_part(self.file.as_fd(), begin, layout::PAGE);
            slot.running = Some(Running {
                token: Arc::downgrade(&token),
                heartbeat: GuestHeartbeat::new(page.map_err(unmapped)?),
            });
            self.page.store(word::owner(k), number);
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
        // The next executor may serve the machine already: then the state is that executor's.
        if self.page.load(word::EPOCH) == self.directory.epoch {
            self.page.store(word::HOST_STATE, 0);
        }
    }
}

fn answer(page: &Window, k: usize, number: u64, verdict: u64) {
    page.store(word::verdict(k), verdict);
    page.drain_writes();
    page.store(word::answered(k), number);
}

/// Why the host cannot serve a virtual machine.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum VmError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("starting the heartbeat thread: {0}")]
    Heartbeat(std::io::Error),
}

/// A guest's request for a session.
#[derive(Debug)]
pub struct PciArrival {
    slot: usize,
    number: u64,
    range: std::ops::Range<usize>,
    file: Arc<OwnedFd>,
    page: Arc<Window>,
    bell: Arc<VmDoorbell>,
    token: Option<Arc<Eviction>>,
    silence: Option<Duration>,
}

impl PciArrival {
    /// The number of the slot.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Resets the slot's window and begins the session.
    ///
    /// # Errors
    ///
    /// As [`VmWindow::new`].
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
        // Without a limit the heartbeat still says who may lose its memory to others.
        let limit = self.silence.unwrap_or(Duration::MAX);
        let liveness = Liveness::at(&window, layout::word::GUEST_HEARTBEAT, limit);
        let events = self.bell.subscribe()?;
        let Some(token) = self.token.take() else {
            return Err(LinkError::Closed.into()); // unreachable: `handshake` consumes the arrival
        };
        let listened = epoll::add(
            &events,
            &token.event,
            epoll::EventData::new_u64(EVICTED),
            epoll::EventFlags::IN,
        );
        listened.map_err(LinkError::system("adding to an epoll instance"))?;
        let doorbell = SlotDoorbell {
            events,
            token,
            _bell: Arc::clone(&self.bell),
        };
        answer(&self.page, self.slot, self.number, VERDICT_ACCEPTED);
        Ok(WindowHost::new(
            window,
            &layout,
            Box::new(doorbell),
            Some(liveness),
        ))
    }
}

impl Drop for PciArrival {
    fn drop(&mut self) {
        // The caller has rejected the guest, or the handshake has failed.
        if self.page.load(word::answered(self.slot)) != self.number {
            answer(&self.page, self.slot, self.number, VERDICT_FAILED);
        }
    }
}

/// The doorbell of one session.
struct SlotDoorbell {
    events: OwnedFd,
    token: Arc<Eviction>,
    _bell: Arc<VmDoorbell>,
}

impl Doorbell for SlotDoorbell {
    /// The guest receives no interrupts and polls instead.
    fn ring(&self) -> Result<(), LinkError> {
        Ok(())
    }

    fn clear(&self) -> Result<(), LinkError> {
        wait_events(&self.events, Duration::ZERO).map(drop)
    }

    fn wait(&self, timeout: Duration) -> Result<Wake, LinkError> {
        let events = wait_events(&self.events, timeout)?;
        Ok(if events.contains(&GONE) {
            Wake::PeerGone
        } else if self.token.is_asked.load(Ordering::Relaxed) {
            Wake::Evicted
        } else {
            Wake::Look
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::pci::directory;
    use crate::shm::memory::sealed_file;

    /// An executor that ends after the next one has begun.
    #[test]
    fn end_of_an_executor_leaves_the_state_of_the_next_one() {
        let size = directory::MIN_SIZE;
        let memory = sealed_file(size).unwrap();
        let serve = || {
            let bell = VmDoorbell::new(new_eventfd().unwrap(), None);
            VmWindow::new(memory.try_clone().unwrap(), size, bell, None).unwrap()
        };
        let page = Window::map_part(memory.as_fd(), 0, PAGE).unwrap();
        let (first, second) = (serve(), serve());
        drop(first);
        assert_eq!(page.load(word::HOST_STATE), 1);
        drop(second);
        assert_eq!(page.load(word::HOST_STATE), 0);
    }

    /// A machine with a session in its first slot, whose program was silent for as long as
    /// [`ALIVE`], and has been asked for by another program since.
    struct Contended {
        machine: VmWindow,
        directory: Window,
        slot: Window,
        eviction: Arc<Eviction>,
        /// When the slot was asked for.
        since: Instant,
    }

    impl Contended {
        fn new() -> Contended {
            let size = directory::MIN_SIZE;
            let memory = sealed_file(size).unwrap();
            let bell = VmDoorbell::new(new_eventfd().unwrap(), None);
            let mut machine = VmWindow::new(memory.try_clone().unwrap(), size, bell, None).unwrap();
            let begin = machine.directory().slot(0).start as u64;
            let map = |begin| Window::map_part(memory.as_fd(), begin, PAGE).unwrap();
            let (directory, slot) = (map(0), map(begin));
            let eviction = Arc::new(Eviction {
                is_asked: AtomicBool::new(false),
                event: new_eventfd().unwrap(),
                _seen: None,
            });
            let mut heartbeat = GuestHeartbeat::new(map(begin));
            heartbeat.changed = Instant::now().checked_sub(ALIVE).unwrap();
            machine.slots[0].running = Some(Running {
                token: Arc::downgrade(&eviction),
                heartbeat,
            });
            directory.store(word::request(0), 99);
            let mut contended = Contended {
                machine,
                directory,
                slot,
                eviction,
                since: Instant::now(),
            };
            contended.next();
            contended
        }

        fn next(&mut self) {
            let event = self.machine.next(Duration::from_millis(1)).unwrap();
            assert!(matches!(event, VmEvent::Nothing), "{event:?}");
        }

        fn is_asked(&self) -> bool {
            self.eviction.is_asked.load(Ordering::Relaxed)
        }

        /// The answer to the program that asks for the slot.
        fn verdict(&self) -> Option<u64> {
            let is_answered = self.directory.load(word::answered(0)) == 99;
            is_answered.then(|| self.directory.load(word::verdict(0)))
        }
    }

    /// A program that had a heartbeat and ended long ago loses its slot to the first request.
    #[test]
    fn slot_of_a_program_that_is_dead_is_free_at_the_first_request() {
        let mut contended = Contended::new();
        while !contended.is_asked() {
            assert_eq!(contended.verdict(), None);
            contended.next();
        }
        assert!(contended.since.elapsed() >= HEARTBEAT_WAIT);
        // The session ends, and the program gets the slot.
        contended.eviction = Arc::new(Eviction {
            is_asked: AtomicBool::new(false),
            event: new_eventfd().unwrap(),
            _seen: None,
        });
        let event = contended.machine.next(Duration::from_millis(1)).unwrap();
        assert!(matches!(event, VmEvent::Arrival(_)), "{event:?}");
        assert_eq!(contended.verdict(), None);
    }

    /// What `vgpu dump` says of a slot whose owner is dead, and that another program waits for.
    #[test]
    fn slots_are_described_for_other_threads() {
        let mut contended = Contended::new();
        let watch = Arc::clone(contended.machine.watch());
        let lines = || watch.to_string();
        assert!(lines().starts_with("epoch 0x"), "{}", lines());
        let waits = "last request 0x63 without an answer; another program waits for it, for ";
        assert!(lines().contains(waits), "{}", lines());
        assert_eq!(lines().lines().count(), 2, "one slot is used: {}", lines());
        while !contended.is_asked() {
            contended.next();
        }
        // The session of the test is none of the machine's. The next one is.
        contended.eviction = Arc::new(Eviction {
            is_asked: AtomicBool::new(false),
            event: new_eventfd().unwrap(),
            _seen: None,
        });
        let VmEvent::Arrival(arrival) = contended.machine.next(Duration::ZERO).unwrap() else {
            panic!("{}", lines());
        };
        contended.slot.store(layout::word::GUEST_HEARTBEAT, 7);
        contended.next();
        let session = "slot 0: session of request 0x63, owner 0x63, last request 0x63 without an \
                       answer; heartbeat 7, unchanged for ";
        assert!(lines().contains(session), "{}", lines());
        assert!(!lines().contains("waits for it"), "{}", lines());
        drop(arrival);
        let failed = "slot 0: free, owner 0x63, last request 0x63 failed";
        assert!(lines().contains(failed), "{}", lines());
        contended.directory.store(word::EPOCH, 1);
        assert!(
            lines().starts_with("epoch 0x1 (of another executor"),
            "{}",
            lines()
        );
    }

    /// Two programs that ask in turns get the slot as soon as one does.
    #[test]
    fn requests_do_not_put_the_end_of_a_dead_session_off() {
        let mut contended = Contended::new();
        let mut number = 99;
        while !contended.is_asked() {
            let took = contended.since.elapsed();
            assert!(took < 2 * HEARTBEAT_WAIT, "{took:?} and {number}");
            number += 1;
            contended.directory.store(word::request(0), number);
            contended.next();
        }
        assert!(contended.since.elapsed() >= HEARTBEAT_WAIT);
    }

    /// After a pause of the machine, a request may come before the next heartbeat.
    #[test]
    fn program_of_a_machine_that_was_paused_keeps_its_slot() {
        let mut contended = Contended::new();
        while contended.since.elapsed() < PERIOD {
            contended.next();
            assert_eq!(contended.verdict(), None);
        }
        contended.slot.store(layout::word::GUEST_HEARTBEAT, 7);
        contended.next();
        assert_eq!(contended.verdict(), Some(VERDICT_BUSY));
        assert!(!contended.is_asked());
    }
}
