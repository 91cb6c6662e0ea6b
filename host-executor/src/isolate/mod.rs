//! Guests in processes of their own.
//!
//! A supervisor listens. For each guest that arrives it starts a worker, this same program, and hands it the sockets of the
//! guest's programs: the supervisor has not said a word to the guest, and never will. A worker has an engine of its own,
//! goes into the sandbox, serves its one guest and ends with the guest's last program. Whatever goes wrong in it, and be it
//! a fault of the processor, ends one guest's sessions; the guest is told by its link, the operator by the log, and the next
//! program gets a new worker.
//!
//! A guest that the configuration names has one worker for all its programs, which share its quota and its weights there.
//! Who has no name gets a worker for each program. Workers tell their supervisor what they do (`post.rs`), which adds it up
//! for metrics and `vgpu ps` (`books.rs`).
//!
//! What processes do not share, they cannot share out turn by turn: each guest has its part of the memory, and processor
//! time is divided by the kernel's scheduler, for which weights become nice levels.

mod books;
mod entrance;
mod post;
mod shares;
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
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tracing::{error, info, warn};

use crate::doors::{DoorId, Doors};
use crate::roster::{Roster, TooMuchPromised};
use crate::server::Peer;
use crate::session::Stop;
use crate::status::Watch;

use books::{Books, Machine};
use post::{Away, Heard, MOST_SESSIONS, News, Order, Post};

pub use entrance::Entrance;
pub use shares::{Means, Shares};
pub use worker::{serve, take_socket};

/// How long the process of a virtual machine may take to listen before the others are served.
const READY: Duration = Duration::from_secs(10);

/// Guests beyond the limit that are told so by a worker. More are turned away without a word.
const DISMISSALS: usize = 16;

/// Makes the command of a worker whose engine has so much memory, without what the supervisor adds.
pub type MakeCommand = Box<dyn Fn(Option<u64>) -> Command + Send + Sync>;

/// Starts a worker for each guest.
pub struct Supervisor {
    shared: Arc<Shared>,
    doors: Doors,
}

struct Shared {
    command: MakeCommand,
    means: Means,
    since: Instant,
    roster: Roster,
    stop: Stop,
    last_id: AtomicU64,
    house: Mutex<House>,
    ended: Condvar,
}

/// Who is here.
struct House {
    shares: Shares,
    workers: BTreeMap<u64, Worker>,
    machines: BTreeMap<u64, Machine>,
    books: Books,
}

/// A worker, until its process is gone.
struct Worker {
    post: Arc<Post>,
    /// The guest, if it has a name.
    guest: Option<String>,
    /// Whether it is there to turn somebody away.
    is_dismissal: bool,
    /// Programs it has been given and has not been heard to be done with, each with how many it had been given by then.
    sessions: BTreeMap<u64, (u64, Peer)>,
    given: u64,
    /// It is about to end, and takes nobody any more.
    is_closing: bool,
    /// What it has said last.
    news: Option<News>,
}

impl Worker {
    fn send(&self, order: &Order, socket: Option<&OwnedFd>) -> io::Result<()> {
        self.post.send(order, socket)
    }

    /// Gives it a program of its guest.
    fn give(
        &mut self,
        session: u64,
        peer: &Peer,
        away: Option<Away>,
        socket: &OwnedFd,
    ) -> io::Result<()> {
        let order = Order::Serve {
            session,
            guest: self.guest.clone(),
            peer: peer.clone(),
            away,
        };
        self.send(&order, Some(socket))?;
        self.given += 1;
        self.sessions.insert(session, (self.given, peer.clone()));
        Ok(())
    }
}

impl Supervisor {
    /// A supervisor with no door yet. `command` is what a worker is; it has to call [`serve`] with [`take_socket`].
    pub fn new(
        command: MakeCommand,
        means: Means,
        shares: Shares,
    ) -> Result<Supervisor, TooMuchPromised> {
        let roster = Roster::new(means.memory.unwrap_or(u64::MAX));
        roster.apply(shares.rules.clone())?;
        let house = House {
            shares,
            workers: BTreeMap::new(),
            machines: BTreeMap::new(),
            books: Books::default(),
        };
        Ok(Supervisor {
            shared: Arc::new(Shared {
                command,
                means,
                since: Instant::now(),
                roster,
                stop: Stop::new(),
                last_id: AtomicU64::new(0),
                house: Mutex::new(house),
                ended: Condvar::new(),
            }),
            doors: Doors::default(),
        })
    }

    /// Has these shares hold from now on, and tells the workers. On failure nothing has changed.
    pub fn apply(&self, shares: Shares) -> Result<(), TooMuchPromised> {
        let mut house = self.shared.house();
        self.shared.roster.apply(shares.rules.clone())?;
        house.shares = shares;
        for worker in house.workers.values().filter(|worker| !worker.is_closing) {
            let Some(rules) = house.shares.rules_of(worker.guest.as_deref()) else {
                continue; // it has no name any more: who is here stays
            };
            if let Err(error) = worker.send(&Order::Rules(rules), None) {
                warn!(
                    guest = worker.guest,
                    "its worker is not told what it may use: {error}"
                );
            }
        }
        Ok(())
    }

    /// What the workers are doing, for somebody on another thread.
    pub fn watch(&self) -> Watch {
        Watch::new(Arc::clone(&self.shared) as _)
    }

    /// Lets guests in through `entrance` from now on; with a name, whoever comes in is that guest.
    pub fn open_for(
        &mut self,
        guest: Option<String>,
        mut entrance: impl Entrance,
    ) -> io::Result<DoorId> {
        let shared = Arc::clone(&self.shared);
        self.doors.open(self.shared.stop.clone(), move |patience| {
            if let Some((socket, peer)) = entrance.next(patience)? {
                shared.admit(guest.as_deref(), socket, &peer);
            }
            Ok(())
        })
    }

    /// Lets nobody in through this door any more. Who is in stays.
    pub fn close(&mut self, door: DoorId) {
        self.doors.close(door);
    }

    /// Keeps `command`, which serves the virtual machine `name`, running until the shutdown; returns once it listens at
    /// `socket`. It takes care of its own restarts, so that its end is an error. It says what it does at `control`.
    pub fn keep(
        &mut self,
        name: &str,
        mut command: Command,
        socket: &Path,
        control: &Path,
    ) -> io::Result<()> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let id = self.shared.new_id();
        let level = self.shared.house().shares.nice(Some(name));
        let mut worker = spawn(&mut command, level)?;
        let machine = Machine::new(name, Pid::from_child(&worker), control);
        self.shared.house().machines.insert(id, machine);
        let start = Instant::now();
        while !socket.exists() {
            if let Some(status) = worker.try_wait()? {
                self.shared.house().machines.remove(&id);
                return Err(io::Error::other(format!("its process {}", Death(status))));
            }
            if start.elapsed() > READY {
                break; // it says itself what keeps it
            }
            thread::sleep(Duration::from_millis(10));
        }
        let (shared, name) = (Arc::clone(&self.shared), name.to_owned());
        thread::Builder::new()
            .name(format!("vgpu-vm-{name}"))
            .spawn(move || shared.wait_for_machine(id, worker, &name))?;
        Ok(())
    }

    /// Closes the doors, has each worker finish what it runs and tell its guest, and returns when all have ended.
    pub fn shutdown(mut self) {
        self.shared.stop.ask();
        self.doors.close_all();
        let mut house = self.shared.house();
        house
            .workers
            .values()
            .for_each(|worker| worker.post.close());
        for machine in house.machines.values() {
            // Its thread has not waited for it yet, or it would not be in the list.
            let _ = rustix::process::kill_process(machine.pid, Signal::TERM);
        }
        while !house.workers.is_empty() || !house.machines.is_empty() {
            house = self
                .shared
                .ended
                .wait(house)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn spawn(command: &mut Command, nice: i32) -> io::Result<Child> {
    // SAFETY: between fork and exec only calls are allowed that a signal handler may make; these are two system calls.
    unsafe {
        command.pre_exec(move || {
            // Workers end with their supervisor. (In truth with the thread that starts them: it waits for them, or is the
            // first of the process.)
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            if nice > 0 {
                rustix::process::setpriority_process(None, nice)?;
            }
            Ok(())
        });
    }
    command.spawn()
}

impl Shared {
    fn house(&self) -> MutexGuard<'_, House> {
        self.house.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Gives a program to its guest's worker.
    fn admit(self: &Arc<Shared>, door: Option<&str>, socket: OwnedFd, peer: &Peer) {
        let id = self.new_id();
        let (guest, refused) = match self.roster.admit(door, peer) {
            Ok(tenant) => (tenant.is_named().then(|| tenant.name().to_owned()), None),
            Err(why) => (None, Some(Away::Refused { why })),
        };
        // Held while it is given away, so that no worker ends meanwhile, and a shutdown misses nobody.
        let mut house = self.house();
        if self.stop.is_asked() {
            return;
        }
        let away = refused.or_else(|| house.full(guest.as_deref()));
        let dismissals = house.workers.values().filter(|worker| worker.is_dismissal);
        let count = dismissals.count();
        if away.is_some() && count >= DISMISSALS {
            warn!(%peer, "turned away without a word: {count} others are being told why");
            return;
        }
        let worker = match (&guest, &away) {
            (Some(name), None) => house.worker_of(name),
            _ => None,
        };
        let outcome = match worker {
            Some(worker) => worker.give(id, peer, None, &socket),
            None => self.hire(&mut house, id, guest, away, &socket, peer),
        };
        if let Err(error) = outcome {
            error!(session = id, %peer, "it cannot be given to a worker, and is turned away: {error}");
        }
    }

    /// Starts a worker, whose first program is `session`.
    fn hire(
        self: &Arc<Shared>,
        house: &mut House,
        session: u64,
        guest: Option<String>,
        away: Option<Away>,
        socket: &OwnedFd,
        peer: &Peer,
    ) -> io::Result<()> {
        let (post, theirs) = Post::pair()?;
        let mut worker = Worker {
            post: Arc::new(post),
            guest,
            is_dismissal: away.is_some(),
            sessions: BTreeMap::new(),
            given: 0,
            is_closing: false,
            news: None,
        };
        let guest = worker.guest.as_deref();
        // The quota of a guest with a name can change while it is here; its engine cannot.
        let memory = match (guest, &house.shares.rules.unnamed) {
            (None, Some(policy)) => policy.memory,
            _ => None,
        };
        let (memory, level) = (memory.or(self.means.memory), house.shares.nice(guest));
        if let Some(rules) = house.shares.rules_of(guest) {
            worker.send(&Order::Rules(rules), None)?;
        }
        worker.give(session, peer, away, socket)?;
        let (shared, post) = (Arc::clone(self), Arc::clone(&worker.post));
        thread::Builder::new()
            .name(format!("vgpu-worker-{session}"))
            .spawn(move || {
                let mut command = (shared.command)(memory);
                command
                    .arg(format!("--worker={session}"))
                    .stdin(Stdio::from(theirs))
                    .stdout(Stdio::null());
                let started = spawn(&mut command, level);
                // It has the other end of the socket open.
                drop(command);
                shared.attend(session, &post, started);
            })?;
        house.workers.insert(session, worker);
        Ok(())
    }

    /// Listens to a worker until its end.
    fn attend(&self, id: u64, post: &Post, started: io::Result<Child>) {
        let mut process = match started {
            Ok(process) => process,
            Err(error) => {
                self.dismiss(id, |session, peer| {
                    error!(session, %peer, "no worker can be started, its guest is turned away: {error}");
                });
                return;
            }
        };
        let mut has_complained = false;
        loop {
            match post.receive(None) {
                Ok(Heard::Message(news, _)) => self.hear(id, news),
                Ok(Heard::Nothing) => {}
                Ok(Heard::Garbage(why)) if has_complained => drop(why),
                Ok(Heard::Garbage(why)) => {
                    has_complained = true;
                    error!(worker = id, "it says what no worker says: {why}");
                }
                Ok(Heard::End) => break,
                Err(error) => {
                    error!(worker = id, "it is not heard any more: {error}");
                    post.close();
                    break;
                }
            }
        }
        let pid = process.id();
        let status = process.wait();
        let is_good = matches!(&status, Ok(status) if status.success());
        self.dismiss(id, |session, peer| match &status {
            Ok(_) if is_good => {}
            Ok(status) => error!(
                session,
                %peer,
                pid,
                "the worker of this guest {}: its session is over, no other guest is touched; its next session gets a new worker",
                Death(*status)
            ),
            Err(error) => error!(session, %peer, pid, "nobody knows how the worker ended: {error}"),
        });
        if !self.stop.is_asked() {
            info!(worker = id, pid, "worker gone");
        }
    }

    /// Takes a worker off the list, and says what becomes of who was with it.
    fn dismiss(&self, id: u64, say: impl Fn(u64, &Peer)) {
        let mut house = self.house();
        if let Some(worker) = house.workers.remove(&id) {
            for (session, (_, peer)) in &worker.sessions {
                say(*session, peer);
            }
            house.books.close(&worker, &self.roster);
        }
        drop(house);
        self.ended.notify_all();
    }

    /// Notes what a worker has said.
    fn hear(&self, id: u64, news: News) {
        let mut house = self.house();
        let Some(worker) = house.workers.get_mut(&id) else {
            return;
        };
        let is_open = |session| news.report.status.sessions.iter().any(|s| s.id == session);
        worker
            .sessions
            .retain(|&session, (number, _)| *number > news.served || is_open(session));
        worker.news = Some(news);
        if worker.sessions.is_empty() && !worker.is_closing {
            worker.is_closing = true;
            worker.post.close();
        }
    }

    fn wait_for_machine(&self, id: u64, mut process: Child, name: &str) {
        let pid = process.id();
        // It is taken off the list before its number can be another's, except by the kernel's own reuse between these lines,
        // which takes all other numbers first.
        let status = process.wait();
        self.house().machines.remove(&id);
        self.ended.notify_all();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => error!(vm = name, pid, "its process {}", Death(status)),
            Err(error) => error!(
                vm = name,
                pid, "nobody knows how its process ended: {error}"
            ),
        }
    }
}

impl House {
    /// The worker that serves this guest and has room for another program.
    fn worker_of(&mut self, guest: &str) -> Option<&mut Worker> {
        self.workers.values_mut().find(|worker| {
            worker.guest.as_deref() == Some(guest)
                && !worker.is_closing
                && worker.sessions.len() < MOST_SESSIONS
        })
    }

    /// Why there is no place for one more program of this guest, if there is none.
    fn full(&self, guest: Option<&str>) -> Option<Away> {
        let served = self.workers.values().filter(|worker| !worker.is_dismissal);
        let sessions = served.clone().map(|worker| worker.sessions.len()).sum();
        // A process counts until it is gone, and its part of the memory with it.
        let unnamed = served.filter(|worker| worker.guest.is_none()).count();
        if guest.is_none() && unnamed >= self.shares.places {
            return Some(Away::Full {
                sessions: unnamed,
                limit: self.shares.places,
            });
        }
        let limit = self.shares.sessions;
        // The report of one worker has to fit into a packet.
        let own = self
            .workers
            .values()
            .filter(|worker| guest.is_some() && worker.guest.as_deref() == guest)
            .map(|worker| worker.sessions.len())
            .max();
        if let Some(own) = own.filter(|own| *own >= MOST_SESSIONS) {
            return Some(Away::Full {
                sessions: own,
                limit: MOST_SESSIONS,
            });
        }
        (sessions >= limit).then_some(Away::Full { sessions, limit })
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
