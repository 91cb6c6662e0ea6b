//! A supervisor whose workers have been taken over: each test is one thing that such a worker does.

mod deeds;
mod virtual_machines;
mod workers;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType};
use vgpu_transport::link::GuestEnd;
use vgpu_transport::link::unix::{self, ListenOptions, Listener};
use vgpu_transport::wire::{DeviceIndex, Offer, ProtocolVersion, Reply, Request};

use super::Supervisor;
use super::partition::{Partition, Resources};
use super::state::{SupervisorState, Timeouts};
use crate::limits::Limits;
use crate::policy::Policy;
use crate::status::{Progress, Status};
use crate::tenant_registry::{GuestRule, Rules};

/// What the worker of a test does, in its environment.
const DEED: &str = "VGPU_TEST_WORKER";

/// How long a test waits for an event.
const TIMEOUT: Duration = Duration::from_secs(60);

const SOON: Duration = Duration::from_millis(200);

const MEMORY: u64 = 16 << 20;

/// Lines of a worker about its sessions: fewer than a guest may have in ten seconds.
const CHATTY: usize = 150;

/// Threads of a worker that starts too many.
const MANY_THREADS: usize = 400;

/// From this time on a process without reports counts as one that hangs. A question to the process
/// of a virtual machine takes longer if it is not answered.
const SILENCE: Duration = Duration::from_secs(1);

/// A supervisor whose workers do given deeds, one after the other.
struct Supervised {
    supervisor: Option<Supervisor>,
    folder: tempfile::TempDir,
    /// Workers that have been started.
    started: Arc<AtomicUsize>,
}

impl Supervised {
    /// `timeout`: for the end of a process.
    fn new(timeout: Duration, deeds: &[&'static str]) -> Supervised {
        let folder = tempfile::tempdir().expect("a new folder");
        let deeds = Mutex::new(VecDeque::from(deeds.to_vec()));
        let own = std::env::current_exe().expect("this program");
        let started = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&started);
        let worker = Box::new(move |_: Option<u64>| {
            count.fetch_add(1, Ordering::Relaxed);
            let deed = deeds
                .lock()
                .expect("no panic")
                .pop_front()
                .unwrap_or("silent");
            // The shell drops the arguments that the supervisor adds.
            let mut command = Command::new("/bin/sh");
            command
                .args([
                    "-c",
                    "exec \"$0\" --exact isolate::hostile_tests::deeds::worker_process",
                ])
                .arg(&own)
                .env(DEED, deed);
            command
        });
        let named = |name: &str| GuestRule {
            name: name.into(),
            uids: Vec::new(),
            cids: Vec::new(),
            certificates: Vec::new(),
            policy: Policy {
                memory: Some(MEMORY),
                ..Policy::default()
            },
        };
        let partition = Partition {
            rules: Rules {
                guests: vec![named("a"), named("b")],
                unnamed: Some(Policy::default()),
                overcommit: true,
            },
            max_unnamed: 16,
            unnamed_programs: 16,
            max_sessions: 16,
        };
        let resources = Resources {
            engines: vec!["cpu".into()],
            unused_gpu: None,
            memory: Some(MEMORY),
        };
        let timeouts = Timeouts {
            end: timeout,
            ready: timeout,
            machine_end: timeout,
            machine_kill: timeout,
            silence: SILENCE,
            ..Timeouts::default()
        };
        let limits = Limits::default().handshakes;
        let supervisor = Supervisor::with_timeouts(worker, resources, partition, limits, timeouts);
        let mut supervisor = supervisor.expect("room for the quotas");
        for guest in ["a", "b"] {
            let listener = Listener::bind(&folder.path().join(guest), ListenOptions::default());
            let listener = listener.expect("a socket");
            { supervisor.listen_for(Some(guest.into()), listener) }.expect("a thread");
        }
        Supervised {
            supervisor: Some(supervisor),
            folder,
            started,
        }
    }

    fn path(&self, guest: &str) -> PathBuf {
        self.folder.path().join(guest)
    }

    /// A program that sends one byte, for a new worker that does not serve.
    fn program(&self, guest: &str) -> OwnedFd {
        let started = self.started.load(Ordering::Relaxed);
        let socket = self.connect(guest);
        // The supervisor is locked until the worker is in its list.
        eventually("it has a worker", || {
            self.started.load(Ordering::Relaxed) > started
        });
        socket
    }

    /// A program that sends one byte.
    fn connect(&self, guest: &str) -> OwnedFd {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = rustix::net::socket(family, kind, None).expect("a socket");
        let address = SocketAddrUnix::new(self.path(guest)).expect("an address");
        rustix::net::connect(&socket, &address).expect("a connection");
        rustix::net::send(&socket, &[0], SendFlags::empty()).expect("a byte");
        socket
    }

    fn shared(&self) -> &SupervisorState {
        self.supervisor.as_ref().expect("it runs").shared()
    }

    fn status(&self) -> Status {
        let handle = self.supervisor.as_ref().expect("it runs").status_handle();
        handle.status()
    }

    fn progress(&self) -> Progress {
        let handle = self.supervisor.as_ref().expect("it runs").status_handle();
        handle.progress()
    }

    /// The processes of a guest.
    fn processes(&self, guest: &str) -> usize {
        let processes = self.shared().processes();
        let workers = processes.workers.values();
        workers
            .filter(|w| w.guest.as_deref() == Some(guest) && !w.is_rejection)
            .count()
    }

    /// Ends the supervisor, which has to come to an end.
    fn shutdown(&mut self) {
        let supervisor = self.supervisor.take().expect("it runs");
        let (sender, done) = mpsc::channel();
        thread::spawn(move || {
            supervisor.shutdown();
            let _ = sender.send(());
        });
        done.recv_timeout(TIMEOUT).expect("it ends");
    }
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Connects to an honest worker, and asks for the size of its memory.
fn served(path: &Path) -> Box<dyn GuestEnd> {
    let mut end = unix::connect(path, TIMEOUT).expect("a link");
    let reply = hello(&mut end);
    assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
    Box::new(end)
}

/// The next message of a worker.
fn receive(end: &mut dyn GuestEnd) -> Reply {
    let mut message = Vec::new();
    end.receive(&mut message, (&mut [][..]).into())
        .expect("a reply");
    Reply::decode(ProtocolVersion::CURRENT, &message).expect("a reply")
}

/// Sends HELLO over a link, and returns the answer.
fn hello(end: &mut dyn GuestEnd) -> Reply {
    let mut message = Vec::new();
    let hello = Request::Hello {
        offer: Offer::SERVED,
        name: "test".into(),
        device: DeviceIndex(0),
    };
    hello.encode(ProtocolVersion::CURRENT, &mut message);
    end.send(&message, (&[][..]).into()).expect("a worker");
    receive(end)
}
