//! Connections that never complete their handshakes: a real `vgpu serve` serves the guests of other
//! origins meanwhile.

mod certified;
#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::collections::VecDeque;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use certified::{cert_ok, certify, port};
use common::{Guest, TIMEOUT, compute};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Signal;
use served::{Scratch, Serve, as_another_user};
use vgpu_transport::link::stream::tcp;
use vgpu_transport::link::stream::tls::Certificates;

/// More than the places of the executors of these tests, and than the connections that one origin
/// may leave half open.
const FLOOD: usize = 150;

/// Half open connections that one origin may have: the default of `HandshakeLimits`.
const OF_ONE_ORIGIN: usize = 64;

/// The isolated executors of these tests have six places, the others eight.
const SINGLE: &[&str] = &["--max-guests", "8"];
const ISOLATED: &[&str] = &["--isolate", "--guest-memory", "10M"];

/// A connection to a unix socket that sends the first packet of the handshake, if it is to.
fn connection(address: &SocketAddrUnix, sends: bool) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let kind = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None);
    let socket = socket.expect("a socket");
    rustix::net::connect(&socket, address).expect("the executor listens");
    if sends {
        let hello = [u64::from_le_bytes(*b"VGPULINK"), 1, u64::MAX, 0];
        let hello: Vec<u8> = hello.iter().flat_map(|word| word.to_le_bytes()).collect();
        // The executor may have closed the connection.
        let _ = rustix::net::send(&socket, &hello, SendFlags::NOSIGNAL);
    }
    socket
}

/// Connections of this user to a unix socket: every second one sends the first packet of the
/// handshake, and no other.
fn flood_unix(socket: &Path) -> Vec<OwnedFd> {
    let address = SocketAddrUnix::new(socket).expect("a path");
    let connections = (0..FLOOD).map(|i| connection(&address, i % 2 == 1));
    connections.collect()
}

/// Connections from 127.0.0.2: every second one sends the beginning of a TLS record, and no more.
fn flood_tcp(port: u16) -> Vec<OwnedFd> {
    flood_tcp_from(2, port, FLOOD, |i| i % 2 == 1)
}

/// So many connections from 127.0.0.`host`. Those that `sends` chooses send the beginning of a TLS
/// record, and no more.
fn flood_tcp_from(
    host: u8,
    port: u16,
    count: usize,
    sends: impl Fn(usize) -> bool,
) -> Vec<OwnedFd> {
    (0..count)
        .map(|i| {
            let kind = SocketType::STREAM;
            let flags = SocketFlags::CLOEXEC;
            let socket = rustix::net::socket_with(AddressFamily::INET, kind, flags, None);
            let socket = socket.expect("a socket");
            let local = std::net::SocketAddr::from(([127, 0, 0, host], 0));
            rustix::net::bind(&socket, &local).expect("an address of the loopback interface");
            let remote = std::net::SocketAddr::from(([127, 0, 0, 1], port));
            rustix::net::connect(&socket, &remote).expect("the executor listens");
            let mut stream = TcpStream::from(socket);
            if sends(i) {
                // The executor may have closed the connection.
                let _ = stream.write_all(&[0x16, 3, 1, 2, 0, 1]);
            }
            stream.into()
        })
        .collect()
}

/// Connections that the executor has not closed.
fn open(flood: &[OwnedFd]) -> usize {
    let is_open = |socket: &&OwnedFd| {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        rustix::net::recv(socket.as_fd(), &mut [0], flags) == Err(rustix::io::Errno::AGAIN)
    };
    flood.iter().filter(is_open).count()
}

/// Waits until the executor has closed the connections beyond the limit of one origin.
fn wait_for_limit(flood: &[OwnedFd]) {
    let start = Instant::now();
    while open(flood) > OF_ONE_ORIGIN {
        assert!(start.elapsed() < TIMEOUT, "{} are open", open(flood));
        thread::yield_now();
    }
}

fn end(serve: Serve) -> String {
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    log
}

/// Another user is served, and the log stays short.
fn other_users_are_served(name: &str, more: &[&str]) {
    let scratch = Scratch::new(name);
    let serve = Serve::start(&scratch.socket(), more);
    let all = fs::Permissions::from_mode(0o666);
    fs::set_permissions(scratch.socket(), all).expect("it is ours");
    let flood = flood_unix(&scratch.socket());
    as_another_user(|| {
        let mut guest = serve.guest(&scratch.socket());
        compute(&mut guest);
    });
    wait_for_limit(&flood);
    // The flood's own user has not locked itself out.
    drop(flood);
    compute(&mut serve.guest(&scratch.socket()));
    let log = end(serve);
    let lines = log.matches("before its handshake was complete").count();
    assert!((1..=3).contains(&lines), "{log}");
    // A process logs some lines when it starts, and a program of the flood that is not served one.
    assert!(log.lines().count() < 2 * FLOOD, "{log}");
}

/// A guest from another address is served over TLS, while the flood is there.
fn other_addresses_are_served(name: &str, more: &[&str]) {
    let scratch = Scratch::new(name);
    let keys = scratch.path().join("keys");
    certify(&keys, "host", "host", &["--address", "127.0.0.1"]);
    let certificates = certify(&keys, "guest", "laptop", &[]);
    let port = port();
    let (endpoint, certs) = (format!("tcp:127.0.0.1:{port}"), keys.join("host"));
    let certs = certs.display().to_string();
    let mut arguments = vec!["--listen", &endpoint, "--certs", &certs];
    arguments.extend(more);
    let serve = Serve::start(&scratch.socket(), &arguments);
    let flood = flood_tcp(port);
    let end_of_guest = tcp::connect("127.0.0.1", port, Some(&certificates), TIMEOUT);
    let mut guest = Guest::new(Box::new(end_of_guest.expect("TLS")));
    guest.hello();
    compute(&mut guest);
    // A local user, too.
    compute(&mut serve.guest(&scratch.socket()));
    wait_for_limit(&flood);
    compute(&mut guest);
    drop(guest);
    let log = end(serve);
    assert!(log.contains("the limit is 64"), "{log}");
}

#[test]
fn half_open_connections_of_a_user_keep_out_no_other_user() {
    other_users_are_served("half-open-unix", SINGLE);
}

#[test]
fn half_open_connections_of_a_user_keep_out_no_other_user_of_isolation() {
    other_users_are_served("half-open-unix-isolate", ISOLATED);
}

#[test]
fn half_open_connections_of_an_address_keep_out_no_other_address() {
    other_addresses_are_served("half-open-tcp", SINGLE);
}

#[test]
fn half_open_connections_of_an_address_keep_out_no_other_address_of_isolation() {
    other_addresses_are_served("half-open-tcp-isolate", ISOLATED);
}

/// A user whose connections end without a session gets few processes for them, however many there
/// are, and is served when time has paid for them. Another user is served meanwhile.
#[test]
fn processes_for_connections_without_a_session_are_paid_by_their_user() {
    /// Nearly as many as one origin may have: they come at once, and wait for each other.
    const HELD: usize = 60;
    let scratch = Scratch::new("failed-isolate");
    // Many places, so that nothing else limits the processes.
    let places = ["--isolate", "--guest-memory", "2M", "--max-guests", "32"];
    let serve = Serve::start(&scratch.socket(), &places);
    let all = fs::Permissions::from_mode(0o666);
    fs::set_permissions(scratch.socket(), all).expect("it is ours");
    let address = SocketAddrUnix::new(scratch.socket()).expect("a path");
    let start = Instant::now();
    let mut held = VecDeque::new();
    // One that hangs up too soon gets no process.
    while start.elapsed() < Duration::from_secs(4) {
        held.push_back(connection(&address, true));
        if held.len() > HELD {
            held.pop_front();
        }
        thread::sleep(Duration::from_millis(10));
    }
    as_another_user(|| compute(&mut serve.guest(&scratch.socket())));
    // Those that still wait get no process.
    drop(held);
    let elapsed = start.elapsed();
    compute(&mut serve.guest_in_time(&scratch.socket()));
    let log = end(serve);
    let processes = log.matches("sandboxed: not dumpable").count();
    println!("{processes} processes in {elapsed:?}");
    // 50 ms for each, 500 ms at once and 100 ms for each second, and at most four that have not
    // been paid. Two are for sessions, and the supervisor is another process.
    let most = 10 + 2 * elapsed.as_secs() as usize + 4 + 2 + 1;
    assert!(processes <= most, "{processes} instead of {most}: {log}");
}

/// Connections whose TLS handshakes are complete, and that get no session: with a revoked
/// certificate, of which the other side learns after its own handshake, and with a good one,
/// without a further message. They get few processes, and keep out neither a local user nor, when
/// time has paid for them, a guest at their own address.
#[test]
fn complete_tls_handshakes_without_a_session_keep_out_no_other_guest_of_isolation() {
    const THREADS: usize = 4;
    let scratch = Scratch::new("complete-tls-isolate");
    let keys = scratch.path().join("keys");
    certify(&keys, "host", "host", &["--address", "127.0.0.1"]);
    let certificates = certify(&keys, "guest", "laptop", &[]);
    let revoked = certify(&keys, "guest", "stolen", &[]);
    cert_ok(&["revoke", &keys.display().to_string(), "stolen"]);
    let crl = keys.join("crl.pem").display().to_string();

    let port = port();
    let (endpoint, certs) = (format!("tcp:127.0.0.1:{port}"), keys.join("host"));
    let certs = certs.display().to_string();
    let mut arguments = vec!["--listen", &endpoint, "--certs", &certs, "--crl", &crl];
    arguments.extend(["--isolate", "--guest-memory", "2M", "--max-guests", "32"]);
    let serve = Serve::start(&scratch.socket(), &arguments);
    let start = Instant::now();
    let connect = |shown: &Certificates| tcp::connect("127.0.0.1", port, Some(shown), TIMEOUT);
    let (mut tries, mut complete) = (0, 0);
    thread::scope(|scope| {
        let (certificates, revoked) = (&certificates, &revoked);
        let flood = std::array::from_fn::<_, THREADS, _>(|i| {
            scope.spawn(move || {
                let (mut tries, mut complete) = (0, 0);
                while start.elapsed() < Duration::from_secs(4) {
                    let is_revoked = i % 2 == 0;
                    let shown = if is_revoked { revoked } else { certificates };
                    if let Ok(end) = connect(shown) {
                        complete += 1;
                        let mut guest = Guest::new(Box::new(end));
                        if is_revoked {
                            let mut message = Vec::new();
                            let reply = guest.end.receive(&mut message, (&mut [][..]).into());
                            assert!(reply.is_err(), "a stolen certificate is served");
                        }
                    }
                    tries += 1;
                }
                (tries, complete)
            })
        });
        thread::sleep(Duration::from_secs(1));
        compute(&mut serve.guest(&scratch.socket()));
        for thread in flood {
            let (more, more_complete) = thread.join().expect("no panic");
            (tries, complete) = (tries + more, complete + more_complete);
        }
    });
    let elapsed = start.elapsed();
    let mut guest = loop {
        match connect(&certificates) {
            Ok(end) => {
                let mut guest = Guest::new(Box::new(end));
                guest.hello();
                break guest;
            }
            Err(error) => assert!(start.elapsed() < TIMEOUT, "{error}"),
        }
        thread::sleep(Duration::from_millis(100));
    };
    compute(&mut guest);
    drop(guest);
    let log = end(serve);
    let processes = log.matches("sandboxed: not dumpable").count();
    println!("{tries} tries, {complete} handshakes, {processes} processes in {elapsed:?}");
    assert!(complete >= 4, "{complete} handshakes are no flood");
    // As in the test above, and one more session.
    let most = 10 + 2 * elapsed.as_secs() as usize + 4 + 3 + 1;
    assert!(processes <= most, "{processes} instead of {most}: {log}");
}

/// The processes of guests whose parent is `pid`, each with its anonymous memory in KiB.
fn workers_of(pid: u32) -> Vec<(u32, u64)> {
    let all = fs::read_dir("/proc").expect("a folder").flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|child| {
        // A process may end meanwhile.
        let status = fs::read_to_string(format!("/proc/{child}/status")).ok()?;
        let number = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let is_child = number("PPid:") == Some(pid.into());
        // Between `fork` and `exec`, a child is a copy of its parent.
        let is_worker = || {
            let line = fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
            let mut arguments = line.split(|byte| *byte == 0);
            arguments.any(|argument| argument.starts_with(b"--worker="))
        };
        // One that has ended has no memory.
        let kib = number("RssAnon:")?;
        (is_child && is_worker()).then_some((child, kib))
    })
    .collect()
}

/// With `--isolate`, connections get processes before anyone knows who they are: few of each
/// address, half of all, and each of little memory. Connections that have sent nothing get none.
/// A local user is served.
fn processes_without_a_session_are_few_and_small(name: &str, is_tls: bool) {
    /// Processes of one address, and of all together: half of those that can be served.
    const OF_ONE: usize = 4;
    const OF_ALL: usize = 16;
    /// KiB of a process that has no session.
    const SMALL: u64 = 8 << 10;
    let scratch = Scratch::new(name);
    let keys = scratch.path().join("keys");
    certify(&keys, "host", "host", &["--address", "127.0.0.1"]);
    let port = port();
    let (endpoint, certs) = (format!("tcp:127.0.0.1:{port}"), keys.join("host"));
    let certs = certs.display().to_string();
    let places = ["--isolate", "--guest-memory", "2M", "--max-guests", "32"];
    // All addresses of this machine are one origin, whose processes have another limit, too.
    let file = scratch.path().join("vgpu.toml");
    fs::write(&file, "[unnamed]\nprograms = 32\n").expect("a file");
    let file = file.display().to_string();
    let mut arguments = vec!["--listen", &endpoint, "--config", &file];
    if is_tls {
        arguments.extend(["--certs", &certs]);
    }
    arguments.extend(places);
    let serve = Serve::start(&scratch.socket(), &arguments);
    let pid = serve.child.id();
    // Waits until there are so many, while `connect` is called, and a second more: there are never
    // more. After five seconds of silence a process ends, and another connection gets one before it
    // is gone.
    let expect = |wanted: usize, connect: &mut dyn FnMut()| {
        let mut connected = Instant::now();
        let (start, mut most) = (Instant::now(), 0);
        while most < wanted || start.elapsed() < Duration::from_secs(1) {
            assert!(
                start.elapsed() < TIMEOUT,
                "{most} processes, {wanted} wanted"
            );
            // Connections that wait for a process are closed after 10 s.
            if connected.elapsed() > Duration::from_secs(8) {
                connect();
                connected = Instant::now();
            }
            thread::sleep(Duration::from_millis(5));
            let processes = workers_of(pid);
            most = most.max(processes.len());
            assert!(most <= wanted, "{most} processes instead of {wanted}");
            for (process, kib) in processes {
                assert!(kib <= SMALL, "process {process} has {kib} KiB");
            }
        }
    };
    let silent = flood_tcp_from(5, port, 40, |_| false);
    expect(0, &mut || ());
    drop(silent);
    // A further flood replaces the one before.
    let mut one = flood_tcp_from(2, port, 40, |_| true);
    expect(OF_ONE, &mut || one = flood_tcp_from(2, port, 40, |_| true));
    let flood = || [3, 4, 6, 7, 8].map(|host| flood_tcp_from(host, port, 30, |_| true));
    let mut others = flood();
    expect(OF_ALL, &mut || others = flood());
    compute(&mut serve.guest(&scratch.socket()));
    drop((one, others));
    end(serve);
}

#[test]
fn processes_before_tls_has_identified_anyone_are_few_and_small() {
    processes_without_a_session_are_few_and_small("unknown-tls-isolate", true);
}

#[test]
fn processes_for_tcp_without_certificates_are_few_and_small() {
    processes_without_a_session_are_few_and_small("unknown-tcp-isolate", false);
}

/// Of three or four processes, an address has one. Another address and a local user have others.
#[test]
fn half_open_connections_of_an_address_keep_out_no_other_address_of_few_processes() {
    for places in ["3", "4"] {
        let name = format!("half-open-tcp-isolate-{places}");
        let more = ["--isolate", "--guest-memory", "10M", "--max-guests", places];
        other_addresses_are_served(&name, &more);
    }
}

/// Of two processes, an address has one, and other addresses wait for that one. A local user has
/// the other.
#[test]
fn half_open_connections_of_an_address_leave_one_of_two_processes_to_a_local_user() {
    let scratch = Scratch::new("half-open-tcp-isolate-2");
    let port = port();
    let endpoint = format!("tcp:127.0.0.1:{port}");
    let more = ["--isolate", "--guest-memory", "10M", "--max-guests", "2"];
    let mut arguments = vec!["--listen", &endpoint];
    arguments.extend(more);
    let serve = Serve::start(&scratch.socket(), &arguments);
    let floods = [2, 3].map(|host| flood_tcp_from(host, port, 40, |_| true));
    let start = Instant::now();
    while workers_of(serve.child.id()).is_empty() {
        assert!(start.elapsed() < TIMEOUT, "no process");
        thread::sleep(Duration::from_millis(5));
    }
    compute(&mut serve.guest(&scratch.socket()));
    drop(floods);
    end(serve);
}

/// Programs that complete the link's handshake and never send HELLO have no places.
#[test]
fn connections_without_hello_have_no_session() {
    let scratch = Scratch::new("no-hello");
    let serve = Serve::start(&scratch.socket(), SINGLE);
    let silent: Vec<Guest> = (0..20).map(|_| serve.connect(&scratch.socket())).collect();
    let mut guests: Vec<Guest> = (0..6).map(|_| serve.guest(&scratch.socket())).collect();
    guests.iter_mut().for_each(compute);
    drop(silent);
    drop(guests);
    end(serve);
}

/// A connection that sends nothing is closed after the time for its handshake.
#[test]
fn silent_connection_is_closed_in_time() {
    let scratch = Scratch::new("silent");
    for more in [SINGLE, ISOLATED] {
        let serve = Serve::start(&scratch.socket(), more);
        let socket = flood_unix(&scratch.socket()).swap_remove(FLOOD - 2);
        // Returns when the executor closes it. A signal of the test's own limit would come first.
        let mut stream = std::os::unix::net::UnixStream::from(socket);
        stream.set_read_timeout(Some(TIMEOUT)).expect("a socket");
        assert_eq!(stream.read(&mut [0; 8]).expect("the end"), 0);
        end(serve);
    }
}

/// One thread. All unix sockets, and all streams, have one for their heartbeats.
#[test]
fn session_has_a_fixed_number_of_threads() {
    const GUESTS: usize = 4;
    let scratch = Scratch::new("threads");
    let port = port();
    let endpoint = format!("tcp:127.0.0.1:{port}");
    let serve = Serve::start(&scratch.socket(), &["--listen", &endpoint]);
    let tasks = format!("/proc/{}/task", serve.child.id());
    let threads = || fs::read_dir(&tasks).expect("the process runs").count();
    let before = threads();
    let mut local: Vec<Guest> = (0..GUESTS)
        .map(|_| serve.guest(&scratch.socket()))
        .collect();
    local.iter_mut().for_each(compute);
    assert_eq!(threads(), before + GUESTS + 1);
    let mut remote: Vec<Guest> = (0..GUESTS)
        .map(|_| {
            let end = tcp::connect("127.0.0.1", port, None, TIMEOUT).expect("a connection");
            let mut guest = Guest::new(Box::new(end));
            guest.hello();
            guest
        })
        .collect();
    remote.iter_mut().for_each(compute);
    assert_eq!(threads(), before + GUESTS + 1 + GUESTS + 1);
    drop((local, remote));
    let start = Instant::now();
    while threads() > before {
        assert!(start.elapsed() < TIMEOUT, "{} threads", threads());
        thread::yield_now();
    }
    end(serve);
}
