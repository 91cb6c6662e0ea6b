//! Guests in processes of their own.
//!
//! A supervisor listens. For each guest that arrives it starts a worker, this same program, and hands it the socket: the
//! supervisor has not said a word to the guest, and never will. A worker has an engine of its own, goes into the sandbox,
//! serves its one guest and ends with it. Whatever goes wrong in it, and be it a fault of the processor, ends one guest's
//! session; the guest is told by its link, the operator by the log, and the next session gets a new worker.
//!
//! What processes do not share, they cannot share out: each worker has a fixed part of the memory, given to no other
//! ([`Supervisor::new`]), and processor time is divided by the kernel's scheduler, evenly among the workers.

mod worker;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tracing::{error, info, warn};
use vgpu_transport::link::stream::{tcp, vsock};
use vgpu_transport::link::unix::Listener;

use crate::server::Peer;
use crate::session::Stop;
use crate::tenant::LinkKind;

pub use worker::{Arrived, serve, take_socket};

/// How often a door with nobody at it looks whether to stop.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long to leave a door alone after it failed.
const BACK_OFF: Duration = Duration::from_secs(1);

/// How long the process of a virtual machine may take to listen before the others are served.
const READY: Duration = Duration::from_secs(10);

/// Guests beyond the limit that are told so by a worker. More are turned away without a word.
const DISMISSALS: usize = 16;

/// Where guests come in, whose sockets can be handed on.
pub trait Entrance: Send + 'static {
    /// Waits up to `timeout` for a guest: its socket, and who it is.
    fn next(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>>;
}

impl Entrance for Listener {
    fn next(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>> {
        let arrival = self.accept(timeout).map_err(io::Error::other)?;
        Ok(arrival.map(|arrival| {
            let peer = crate::unix::peer(self, &arrival);
            (arrival.into_socket(), peer)
        }))
    }
}

impl Entrance for tcp::Listener {
    fn next(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>> {
        let arrival = self.accept(timeout)?;
        Ok(arrival.map(|arrival| {
            let peer = crate::net::tcp_peer(&arrival);
            (arrival.into_socket(), peer)
        }))
    }
}

impl Entrance for vsock::Listener {
    fn next(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>> {
        let arrived = self.accept(timeout)?;
        Ok(arrived.map(|(socket, cid)| {
            let peer = crate::net::vsock_peer(self, cid);
            (socket.into(), peer)
        }))
    }
}

/// Makes the command of a worker, without what the supervisor adds.
pub type MakeCommand = Box<dyn Fn() -> Command + Send + Sync>;

/// Starts a worker for each guest.
pub struct Supervisor {
    shared: Arc<Shared>,
    doors: Vec<JoinHandle<()>>,
}

struct Shared {
    command: MakeCommand,
    /// Guests served at once.
    places: usize,
    stop: Stop,
    last_id: AtomicU64,
    workers: Mutex<BTreeMap<u64, Pid>>,
    ended: Condvar,
}

impl Supervisor {
    /// A supervisor with no door yet, for at most `places` guests at once. `command` is what a worker is; it has to read
    /// [`Arrived`] from its arguments and call [`serve`].
    pub fn new(command: MakeCommand, places: usize) -> Supervisor {
        Supervisor {
            shared: Arc::new(Shared {
                command,
                places,
                stop: Stop::new(),
                last_id: AtomicU64::new(0),
                workers: Mutex::default(),
                ended: Condvar::new(),
            }),
            doors: Vec::new(),
        }
    }

    /// Lets guests in through `entrance` from now on.
    pub fn open(&mut self, mut entrance: impl Entrance) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new()
            .name(format!("vgpu-door-{}", self.doors.len()))
            .spawn(move || {
                while !shared.stop.is_asked() {
                    match entrance.next(PATIENCE) {
                        Ok(Some((socket, peer))) => shared.admit(socket, peer),
                        Ok(None) => {}
                        Err(error) => {
                            error!("no guest can come in for {BACK_OFF:?}: {error}");
                            thread::sleep(BACK_OFF);
                        }
                    }
                }
            })?;
        self.doors.push(thread);
        Ok(())
    }

    /// Keeps `command`, which serves the virtual machine `name`, running until the shutdown; returns once it listens at
    /// `socket`. It takes care of its own restarts, so that its end is an error.
    pub fn keep(&mut self, name: &str, mut command: Command, socket: &Path) -> io::Result<()> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let id = self.shared.new_id();
        let mut worker = self.shared.spawn(id, &mut command)?;
        let start = Instant::now();
        while !socket.exists() {
            if let Some(status) = worker.try_wait()? {
                self.shared.forget(id);
                return Err(io::Error::other(format!("its process {}", Death(status))));
            }
            if start.elapsed() > READY {
                break; // it says itself what keeps it
            }
            thread::sleep(Duration::from_millis(10));
        }
        let peer = Peer {
            endpoint: format!("vm {name}"),
            link: LinkKind::Pci,
            machine: None,
            process: None,
        };
        let shared = Arc::clone(&self.shared);
        thread::Builder::new()
            .name(format!("vgpu-vm-{name}"))
            .spawn(move || shared.wait(id, worker, &peer))?;
        Ok(())
    }

    /// Closes the doors, has each worker finish what it runs and tell its guest, and returns when all have ended.
    pub fn shutdown(mut self) {
        self.shared.stop.ask();
        for door in self.doors.drain(..) {
            if door.join().is_err() {
                error!("a listener has panicked, a bug of the host");
            }
        }
        let mut workers = self.shared.workers();
        for pid in workers.values() {
            // Its thread has not waited for it yet, or it would not be in the list.
            let _ = rustix::process::kill_process(*pid, Signal::TERM);
        }
        while !workers.is_empty() {
            workers = self
                .shared
                .ended
                .wait(workers)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Shared {
    fn workers(&self) -> MutexGuard<'_, BTreeMap<u64, Pid>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn forget(&self, id: u64) {
        self.workers().remove(&id);
        self.ended.notify_all();
    }

    /// Gives a guest its worker, and the worker a thread that waits for its end.
    fn admit(self: &Arc<Shared>, socket: OwnedFd, peer: Peer) {
        let id = self.new_id();
        let count = self.workers().len();
        if count >= self.places + DISMISSALS {
            warn!(%peer, "turned away: {count} guests are here already");
            return;
        }
        let arrived = Arrived {
            session: id,
            kind: peer.link,
            peer: peer.to_string(),
            full: (count >= self.places).then_some(self.places),
        };
        let shared = Arc::clone(self);
        let spawned = thread::Builder::new()
            .name(format!("vgpu-worker-{id}"))
            .spawn(move || match shared.start(socket, &arrived) {
                Ok(worker) => shared.wait(id, worker, &peer),
                Err(error) => error!(session = id, %peer, "no worker can be started, its guest is turned away: {error}"),
            });
        if let Err(error) = spawned {
            error!("no thread for session {id}, its guest is turned away: {error}");
        }
    }

    fn start(&self, socket: OwnedFd, arrived: &Arrived) -> io::Result<Child> {
        let mut command = (self.command)();
        command
            .args(arrived.arguments())
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null());
        self.spawn(arrived.session, &mut command)
    }

    fn spawn(&self, id: u64, command: &mut Command) -> io::Result<Child> {
        // SAFETY: between fork and exec only calls are allowed that a signal handler may make; this is one system call.
        unsafe {
            command.pre_exec(|| {
                // Workers end with their supervisor. (In truth with the thread that starts them: it waits for them, or is the
                // first of the process.)
                rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
                Ok(())
            });
        }
        // Started under the lock, so that a shutdown misses none.
        let mut workers = self.workers();
        if self.stop.is_asked() {
            return Err(io::Error::other("the host is shutting down"));
        }
        let worker = command.spawn()?;
        workers.insert(id, Pid::from_child(&worker));
        Ok(worker)
    }

    fn wait(&self, id: u64, mut worker: Child, peer: &Peer) {
        let pid = worker.id();
        // It is taken off the list before its number can be another's, except by the kernel's own reuse between these lines,
        // which takes all other numbers first.
        let status = worker.wait();
        self.forget(id);
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => error!(
                session = id,
                %peer,
                pid,
                "the worker of this guest {}: its session is over, no other is touched; its next session gets a new worker",
                Death(status)
            ),
            Err(error) => {
                error!(session = id, %peer, pid, "nobody knows how the worker ended: {error}")
            }
        }
        if !self.stop.is_asked() {
            info!(session = id, %peer, "worker gone");
        }
    }
}

/// How a process ended, in words.
struct Death(ExitStatus);

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.signal() {
            Some(signal) => {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                write!(f, "was ended by {name} (signal {signal})")
            }
            None => write!(f, "ended with {}", self.0),
        }
    }
}
