//! The unix link between processes: death of a peer, malformed packets, leaks, error messages.
//!
//! This program is both sides. Without a role the program runs the tests in sequence. For a test
//! with a second process the program starts itself with a role.

use std::env;
use std::io::{BufRead as _, BufReader, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::link::unix::{
    HandshakeError, ListenError, ListenOptions, Listener, SocketFileError, SocketMismatch,
    UnixConnectError, connect,
};
use vgpu_transport::link::window::WindowGuest;
use vgpu_transport::link::{GuestEnd, HostEnd, LinkError};
use vgpu_transport::shm::layout::{DEFAULT_SIZE, MIN_SIZE};

const WAIT: Duration = Duration::from_secs(20);

/// The time limit for the detection of a dead peer. Detection is immediate. The limit turns a hang
/// into a failure.
const NOTICED: Duration = Duration::from_secs(2);

/// What a second process does, and on which socket.
const ROLE: &str = "VGPU_TEST_ROLE";
const SOCKET: &str = "VGPU_TEST_SOCKET";

fn main() {
    if let Ok(role) = env::var(ROLE) {
        let path = PathBuf::from(env::var_os(SOCKET).unwrap());
        return match role.as_str() {
            "host" => play_host(&path),
            "guest" => play_guest(&path),
            "forking guest" => play_forking_guest(&path),
            other => panic!("no role {other}"),
        };
    }
    macro_rules! checks {
        ($($name:ident)*) => { [$((stringify!($name), $name as fn(&Dir))),*] };
    }
    let checks = checks! {
        killed_host_is_detected
        killed_guest_is_detected
        killed_guest_with_a_living_child_is_detected
        killed_guest_is_detected_by_a_host_waiting_for_ring_space
        socket_of_a_killed_host_is_replaced
        no_descriptor_or_mapping_is_leaked
        invalid_handshake_gets_no_session
        silent_guest_does_not_block_others
        connect_errors_name_the_cause
        bind_errors_name_the_cause
    };
    let filter = env::args().skip(1).find(|arg| !arg.starts_with('-'));
    for (name, check) in checks {
        if filter.as_ref().is_none_or(|filter| name.contains(filter)) {
            check(&Dir::new(name));
            println!("test {name} ... ok");
        }
    }
}

/// A temporary directory for sockets.
struct Dir(PathBuf, #[allow(dead_code)] tempfile::TempDir);

impl Dir {
    fn new(name: &str) -> Dir {
        let folder = tempfile::Builder::new().prefix(name).tempdir().unwrap();
        Dir(folder.path().to_owned(), folder)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("s")
    }
}

/// A second process of this program with a role. Dropping the value kills the process.
struct Process(Child);

impl Process {
    fn start(role: &str, socket: &Path) -> Process {
        let child = Command::new(env::current_exe().unwrap())
            .env(ROLE, role)
            .env(SOCKET, socket)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Process(child)
    }

    /// Waits for a line of the process's output.
    fn wait_ready(&mut self) {
        let mut byte = [0];
        self.0
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut byte)
            .unwrap();
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn say_ready() {
    println!("ready");
}

/// Answers each request with the payload of the request. At the request "hold" the function prints
/// a line, and then does nothing.
fn play_host(path: &Path) {
    let listener = Listener::bind(path, ListenOptions::default()).unwrap();
    say_ready();
    loop {
        let Some(arrival) = listener.accept(WAIT).unwrap() else {
            return;
        };
        let Ok(mut host) = arrival.handshake() else {
            continue; // The peer only tests whether a process listens.
        };
        let mut message = Vec::new();
        loop {
            message.clear();
            match host.receive(&mut message, WAIT) {
                Ok(Some(_)) if message == b"hold" => {
                    say_ready();
                    thread::sleep(WAIT);
                }
                Ok(Some(incoming)) => {
                    let mut payload = vec![0; incoming.payload_len];
                    host.payload().copy_to(&mut payload);
                    host.send(&message, payload.len(), &mut |mut room: BytesMut<'_>| {
                        room.copy_from(Bytes::from(&payload[..]));
                    })
                    .unwrap();
                }
                Ok(None) => return,
                Err(error) => {
                    assert_eq!(error, LinkError::Closed);
                    break;
                }
            }
            host.retire();
        }
    }
}

/// Sends a request and then sleeps.
fn play_guest(path: &Path) {
    let mut guest = connect(path, WAIT).unwrap();
    guest.send(b"hello", Bytes::from(&[][..])).unwrap();
    say_ready();
    thread::sleep(WAIT);
}

/// A guest with a child that keeps every descriptor: a bare `clone` runs no handler.
fn play_forking_guest(path: &Path) {
    let mut guest = connect(path, WAIT).unwrap();
    guest.send(b"hello", Bytes::from(&[][..])).unwrap();
    // SAFETY: without flags `clone` is `fork`. The child only sleeps and ends.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
    if child == 0 {
        thread::sleep(WAIT);
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    println!("{child}");
    thread::sleep(WAIT);
}

fn echo(guest: &mut WindowGuest, len: usize) {
    let payload = vec![len as u8; len];
    let mut room = vec![0; len];
    let mut reply = Vec::new();
    guest.send(b"echo", Bytes::from(&payload[..])).unwrap();
    let got = guest.receive(&mut reply, BytesMut::from(&mut room[..]));
    assert_eq!((got, &reply[..]), (Ok(len), &b"echo"[..]));
    assert!(room == payload);
}

fn killed_host_is_detected(dir: &Dir) {
    type Wait = fn(&mut WindowGuest) -> LinkError;
    let waits: [Wait; 3] = [
        |guest| {
            let room = BytesMut::from(&mut [][..]);
            guest.receive(&mut Vec::new(), room).unwrap_err()
        },
        |guest| guest.wait_retired(u64::MAX).unwrap_err(),
        |guest| loop {
            // More requests than the link has room for.
            if let Err(error) = guest.send(b"hold", Bytes::from(&[0; 100_000][..])) {
                return error;
            }
        },
    ];
    for wait in waits {
        let mut host = Process::start("host", &dir.socket());
        host.wait_ready();
        let mut guest = connect(&dir.socket(), WAIT).unwrap();
        echo(&mut guest, 1_000_000);
        guest.send(b"hold", Bytes::from(&[][..])).unwrap();
        host.wait_ready();
        let waiter = thread::spawn(move || {
            let error = wait(&mut guest);
            (guest, error, Instant::now())
        });
        // Wait until the peer sleeps.
        thread::sleep(Duration::from_millis(100));
        let killed = Instant::now();
        host.kill();
        let (mut guest, error, noticed) = waiter.join().unwrap();
        assert_eq!(error, LinkError::Closed);
        assert!(noticed.saturating_duration_since(killed) < NOTICED);
        assert!(guest.is_closed());
        assert_eq!(
            guest.send(b"more", Bytes::from(&[][..])),
            Err(LinkError::Closed)
        );
    }

    // The guest does not wait for a reply.
    let mut host = Process::start("host", &dir.socket());
    host.wait_ready();
    let mut guest = connect(&dir.socket(), WAIT).unwrap();
    assert!(!guest.is_closed());
    host.kill();
    let killed = Instant::now();
    while !guest.is_closed() {
        assert!(killed.elapsed() < NOTICED);
        thread::sleep(Duration::from_millis(1));
    }
}

fn killed_guest_is_detected(dir: &Dir) {
    let listener = Listener::bind(&dir.socket(), ListenOptions::default()).unwrap();
    let mut guest = Process::start("guest", &dir.socket());
    let arrival = listener.accept(WAIT).unwrap().unwrap();
    assert_eq!(arrival.peer().pid, guest.0.id() as i32);
    assert_eq!(arrival.peer().uid, rustix::process::getuid().as_raw());
    let mut host = arrival.handshake().unwrap();
    guest.wait_ready();
    let mut message = Vec::new();
    assert!(host.receive(&mut message, WAIT).unwrap().is_some());
    host.retire();
    assert_eq!(
        host.receive(&mut message, Duration::from_millis(100)),
        Ok(None)
    );
    let waiter = thread::spawn(move || {
        let received = host.receive(&mut message, WAIT);
        (received, Instant::now())
    });
    thread::sleep(Duration::from_millis(100));
    let killed = Instant::now();
    guest.kill();
    let (received, noticed) = waiter.join().unwrap();
    assert_eq!(received, Err(LinkError::Closed));
    assert!(noticed.saturating_duration_since(killed) < NOTICED);
}

fn killed_guest_with_a_living_child_is_detected(dir: &Dir) {
    let listener = Listener::bind(&dir.socket(), ListenOptions::default()).unwrap();
    let mut guest = Process::start("forking guest", &dir.socket());
    let mut host = listener.accept(WAIT).unwrap().unwrap().handshake().unwrap();
    let mut child = String::new();
    let mut output = BufReader::new(guest.0.stdout.take().unwrap());
    output.read_line(&mut child).unwrap();
    let child: i32 = child.trim().parse().unwrap();
    let mut message = Vec::new();
    assert!(host.receive(&mut message, WAIT).unwrap().is_some());
    host.retire();
    let quiet = Duration::from_millis(100);
    assert_eq!(host.receive(&mut message, quiet), Ok(None));
    guest.kill();
    let received = host.receive(&mut message, NOTICED);
    // The child has held the socket meanwhile.
    let child = rustix::process::Pid::from_raw(child).unwrap();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
    assert_eq!(received, Err(LinkError::Closed));
}

fn killed_guest_is_detected_by_a_host_waiting_for_ring_space(dir: &Dir) {
    let listener = Listener::bind(&dir.socket(), ListenOptions::default()).unwrap();
    let mut guest = Process::start("guest", &dir.socket());
    let mut host = listener.accept(WAIT).unwrap().unwrap().handshake().unwrap();
    guest.wait_ready();
    let sender = thread::spawn(move || {
        // The guest receives no replies.
        loop {
            if let Err(error) = host.send(b"reply", 100_000, &mut |_| {}) {
                return (error, Instant::now());
            }
        }
    });
    thread::sleep(Duration::from_millis(100));
    let killed = Instant::now();
    guest.kill();
    let (error, noticed) = sender.join().unwrap();
    assert_eq!(error, LinkError::Closed);
    assert!(noticed.saturating_duration_since(killed) < NOTICED);
}

fn socket_of_a_killed_host_is_replaced(dir: &Dir) {
    let path = dir.socket();
    let mut host = Process::start("host", &path);
    host.wait_ready();
    let in_use = Listener::bind(&path, ListenOptions::default()).map(|_| ());
    let expected = SocketFileError::InUse { path: path.clone() };
    assert_eq!(in_use, Err(expected.into()));
    host.kill();
    assert!(path.exists(), "SIGKILL leaves the file");
    let refused = connect(&path, WAIT).map(|_| ());
    assert_eq!(
        refused,
        Err(UnixConnectError::Refused { path: path.clone() })
    );
    let mut host = Process::start("host", &path);
    host.wait_ready();
    let mut guest = connect(&path, WAIT).unwrap();
    echo(&mut guest, 10);
}

fn no_descriptor_or_mapping_is_leaked(dir: &Dir) {
    let mut host = Process::start("host", &dir.socket());
    host.wait_ready();
    let before = open_files();
    assert_eq!(mapped_windows(), 0);
    for round in 0..50 {
        let mut guest = connect(&dir.socket(), WAIT).unwrap();
        echo(&mut guest, 100 << (round % 13));
        assert_eq!(mapped_windows(), 1);
    }
    assert_eq!(open_files(), before);
    assert_eq!(mapped_windows(), 0);

    // The host's side runs in this process.
    let listener = Listener::bind(&dir.0.join("own"), ListenOptions::default()).unwrap();
    let before = open_files();
    for _ in 0..20 {
        let path = listener.path().to_path_buf();
        let guest = thread::spawn(move || connect(&path, WAIT).unwrap());
        let host = listener.accept(WAIT).unwrap().unwrap().handshake().unwrap();
        drop((guest.join().unwrap(), host));
    }
    assert_eq!(open_files(), before);
    // The heartbeat thread may hold the window for a moment.
    let began = Instant::now();
    while mapped_windows() > 0 {
        assert!(began.elapsed() < WAIT);
        thread::sleep(Duration::from_millis(1));
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mapped_windows() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("vgpu-window"))
        .count()
}

/// A client that sends arbitrary packets to the socket.
fn raw_client(path: &Path) -> OwnedFd {
    let kind = SocketType::SEQPACKET;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

fn raw_send(socket: &OwnedFd, words: &[u64], fds: &[BorrowedFd<'_>]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(10))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let parts = [IoSlice::new(&bytes)];
    rustix::net::sendmsg(socket, &parts, &mut control, SendFlags::empty()).unwrap();
}

const MAGIC: u64 = u64::from_le_bytes(*b"VGPULINK");

fn invalid_handshake_gets_no_session(dir: &Dir) {
    let options = ListenOptions {
        window_size: MIN_SIZE,
        handshake_timeout: Duration::from_millis(500),
        ..ListenOptions::default()
    };
    let listener = Listener::bind(&dir.socket(), options).unwrap();
    let before = open_files();
    let try_with = |talk: &dyn Fn(&OwnedFd)| {
        let client = raw_client(listener.path());
        talk(&client);
        let arrival = listener.accept(WAIT).unwrap().unwrap();
        arrival.handshake().map(|_| ()).unwrap_err()
    };
    let null = std::fs::File::open("/dev/null").unwrap();
    let is_garbage = |error: HandshakeError| match error {
        HandshakeError::Garbage(why) => why.to_string(),
        other => panic!("{other}"),
    };

    assert!(
        is_garbage(try_with(&|socket| raw_send(socket, &[7, 1, 1, 0], &[])))
            .contains("0x0000000000000007")
    );
    assert!(is_garbage(try_with(&|socket| raw_send(socket, &[MAGIC], &[]))).contains("8 bytes"));
    let long = [MAGIC; 100];
    assert!(is_garbage(try_with(&|socket| raw_send(socket, &long, &[]))).contains("33 bytes"));
    for count in [1, 10] {
        let fds = vec![null.as_fd(); count];
        let why = is_garbage(try_with(&|socket| {
            raw_send(socket, &[MAGIC, 1, 1, 0], &fds)
        }));
        assert!(why.contains("files"), "{why}");
    }
    assert_eq!(
        try_with(&|socket| raw_send(socket, &[MAGIC, 2, 9, 0], &[])),
        HandshakeError::OtherLayout { from: 2, to: 9 }
    );
    assert_eq!(
        try_with(&|socket| raw_send(socket, &[MAGIC, 9, 0, 0], &[])),
        HandshakeError::OtherLayout { from: 9, to: 0 }
    );
    assert_eq!(try_with(&|_| {}), HandshakeError::Timeout { ms: 500 });
    // A valid hello, then no packet or a wrong opened packet.
    let hello = [MAGIC, 1, 1, u64::MAX];
    assert_eq!(
        try_with(&|socket| raw_send(socket, &hello, &[])),
        HandshakeError::Timeout { ms: 500 }
    );
    let why = is_garbage(try_with(&|socket| {
        raw_send(socket, &hello, &[]);
        raw_send(socket, &[MAGIC, 0], &[]);
    }));
    assert!(why.contains("session 0x0"), "{why}");
    // The guest closes its socket before the handshake.
    drop(raw_client(listener.path()));
    let gone = listener
        .accept(WAIT)
        .unwrap()
        .unwrap()
        .handshake()
        .map(|_| ());
    assert_eq!(gone, Err(HandshakeError::Link(LinkError::Closed)));
    drop(null);

    // No descriptor is left over, and a valid guest is served.
    assert_eq!(open_files(), before);
    let path = dir.socket();
    let guest = thread::spawn(move || connect(&path, WAIT).unwrap());
    let mut host = listener.accept(WAIT).unwrap().unwrap().handshake().unwrap();
    let mut guest = guest.join().unwrap();
    assert_eq!(guest.window().size(), MIN_SIZE);
    guest.send(b"hello", Bytes::from(&[][..])).unwrap();
    assert!(host.receive(&mut Vec::new(), WAIT).unwrap().is_some());
}

fn silent_guest_does_not_block_others(dir: &Dir) {
    let listener = Listener::bind(&dir.socket(), ListenOptions::default()).unwrap();
    let silent: Vec<OwnedFd> = (0..5).map(|_| raw_client(&dir.socket())).collect();
    let path = dir.socket();
    let guest = thread::spawn(move || connect(&path, WAIT).unwrap());
    let mut waiting = Vec::new();
    let mut host = loop {
        let arrival = listener.accept(WAIT).unwrap().unwrap();
        // Each handshake runs on a thread of its own, as in the executor.
        let handshake = thread::spawn(move || arrival.handshake());
        if waiting.len() == silent.len() {
            break handshake.join().unwrap().unwrap();
        }
        waiting.push(handshake);
    };
    let mut guest = guest.join().unwrap();
    assert_eq!(guest.window().size(), DEFAULT_SIZE);
    guest.send(b"hello", Bytes::from(&[][..])).unwrap();
    assert!(host.receive(&mut Vec::new(), WAIT).unwrap().is_some());
    drop(silent);
    for handshake in waiting {
        let ended = handshake.join().unwrap().map(|_| ());
        assert_eq!(ended, Err(HandshakeError::Link(LinkError::Closed)));
    }
}

fn connect_errors_name_the_cause(dir: &Dir) {
    let path = dir.socket();
    let short = Duration::from_millis(60);
    let try_connect = || connect(&path, short).map(|_| ()).unwrap_err();
    let not_vgpu = |cause| UnixConnectError::NotVgpu {
        path: path.clone(),
        cause,
    };

    assert_eq!(
        try_connect(),
        UnixConnectError::NoSuchFile { path: path.clone() }
    );
    std::fs::write(&path, "text").unwrap();
    assert_eq!(try_connect(), not_vgpu(SocketMismatch::NotSocket));
    std::fs::remove_file(&path).unwrap();
    let other = UnixListener::bind(&path).unwrap();
    assert_eq!(try_connect(), not_vgpu(SocketMismatch::SocketType));
    drop(other);
    std::fs::remove_file(&path).unwrap();

    // The host listens and does not answer.
    let silent = Listener::bind(&path, ListenOptions::default()).unwrap();
    assert_eq!(
        try_connect(),
        UnixConnectError::Timeout {
            path: path.clone(),
            ms: 60
        }
    );
    // The host does not accept, and its backlog is full.
    let queue: Vec<OwnedFd> = (0..).map_while(|_| raw_client_if_room(&path)).collect();
    assert!(queue.len() >= 10);
    assert!(matches!(try_connect(), UnixConnectError::Timeout { .. }));
    drop((queue, silent));

    // The host sends something other than a welcome.
    let words: [&[u64]; 5] = [
        &[1, 2],
        &[1, 2, 3, 4],
        &[MAGIC, 0, 1, 4096],
        &[MAGIC, 9, 1, 4096],
        &[MAGIC, 0, 7, 4096],
    ];
    for words in words {
        let error = with_false_host(&path, |client| raw_send(client, words, &[]));
        assert!(matches!(error, UnixConnectError::NotVgpu { .. }), "{error}");
    }
    assert_eq!(
        with_false_host(&path, |client| raw_send(client, &[MAGIC, 1, 3, 0], &[])),
        UnixConnectError::OtherLayout {
            path: path.clone(),
            ours: 1,
            theirs: 3
        }
    );
    assert_eq!(
        with_false_host(&path, |_| {}),
        UnixConnectError::Closed { path: path.clone() }
    );
    // The host sends wrong files.
    let null = std::fs::File::open("/dev/null").unwrap();
    let welcome = [MAGIC, 0, 1, MIN_SIZE as u64];
    for count in [1, 3, 4] {
        let error = with_false_host(&path, |client| {
            raw_send(client, &welcome, &vec![null.as_fd(); count]);
        });
        assert!(matches!(error, UnixConnectError::NotVgpu { .. }), "{error}");
    }
    let flags = rustix::event::EventfdFlags::NONBLOCK;
    let bell = rustix::event::eventfd(0, flags).unwrap();
    let empty = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&empty, MIN_SIZE as u64).unwrap();
    for (seals, said) in [
        (rustix::fs::SealFlags::empty(), "not sealed"),
        (rustix::fs::SealFlags::SHRINK, "not a window"),
    ] {
        rustix::fs::fcntl_add_seals(&empty, seals).unwrap();
        let fds = [empty.as_fd(), bell.as_fd(), bell.as_fd()];
        let error = with_false_host(&path, |client| raw_send(client, &welcome, &fds));
        assert!(error.to_string().contains(said), "{error}");
    }

    // No permission. Root may open every socket, so the test drops its privileges.
    let private = ListenOptions {
        mode: 0o000,
        ..ListenOptions::default()
    };
    let _listener = Listener::bind(&path, private).unwrap();
    let refused = {
        let path = path.clone();
        thread::spawn(move || {
            if rustix::process::getuid().is_root() {
                let nobody = rustix::fs::Uid::from_raw(65534);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            }
            connect(&path, WAIT).map(|_| ()).unwrap_err()
        })
    };
    assert_eq!(
        refused.join().unwrap(),
        UnixConnectError::Permission { path }
    );
}

/// Another client of a listener, unless its backlog is full.
fn raw_client_if_room(path: &Path) -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let kind = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).ok()?;
    Some(socket)
}

/// The error of a guest whose hello the host answers with `answer`.
fn with_false_host(path: &Path, answer: impl Fn(&OwnedFd)) -> UnixConnectError {
    let kind = SocketType::SEQPACKET;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 1).unwrap();
    let guest = {
        let path = path.to_path_buf();
        thread::spawn(move || connect(&path, WAIT).map(|_| ()).unwrap_err())
    };
    let client = rustix::net::accept(&socket).unwrap();
    let mut hello = [0; 32];
    rustix::net::recv(&client, &mut hello[..], RecvFlags::empty()).unwrap();
    answer(&client);
    drop(client);
    std::fs::remove_file(path).unwrap();
    guest.join().unwrap()
}

fn bind_errors_name_the_cause(dir: &Dir) {
    let bind = |path: &Path| Listener::bind(path, ListenOptions::default()).map(|_| ());
    let refused = |error: SocketFileError| Err(ListenError::from(error));
    let path = dir.0.join("file");
    std::fs::write(&path, "text").unwrap();
    let error = SocketFileError::NotASocket { path: path.clone() };
    assert_eq!(bind(&path), refused(error));
    assert_eq!(std::fs::read(&path).unwrap(), b"text");
    let path = dir.0.join("missing/s");
    let error = SocketFileError::NoDirectory { path: path.clone() };
    assert_eq!(bind(&path), refused(error));
    let path = dir.socket();
    let other = UnixListener::bind(&path).unwrap();
    let error = SocketFileError::InUse { path: path.clone() };
    assert_eq!(bind(&path), refused(error));
    // A stale socket of another type has no listener.
    drop(other);
    assert_eq!(bind(&path), Ok(()));
    let options = ListenOptions {
        window_size: MIN_SIZE + 1,
        ..ListenOptions::default()
    };
    let odd = Listener::bind(&path, options).map(|_| ());
    assert!(matches!(odd, Err(ListenError::Window(_))), "{odd:?}");
    // A listener removes its own socket file and no other.
    let first = Listener::bind(&path, ListenOptions::default()).unwrap();
    std::fs::remove_file(&path).unwrap();
    let second = Listener::bind(&path, ListenOptions::default()).unwrap();
    drop(first);
    assert!(path.exists());
    drop(second);
    assert!(!path.exists());
}
