//! The vfio-user device, tested with the client of the protocol's crate.

mod common;
mod machine;

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vfio_user::Client;
use vgpu_executor::listener::GuestListener as _;
use vgpu_executor::vm::{VfioUserConnections, VfioUserListener};
use vgpu_executor::{Limits, Server};
use vgpu_gguf::Rng;
use vgpu_transport::link::pci::{DOORBELL, directory};
use vgpu_transport::shm::memory::{SharedWords as _, Window};

use common::{OtherGuest, cpu};
use machine::{Dir, Machine, wait_for};

const CONFIG: u32 = 7;

fn executor(socket: &Path) -> Server {
    let mut server = Server::new(cpu(), Limits::default(), 64).expect("a thread");
    let options = format!("a,socket={},window=64M,silence=0", socket.display());
    let listener = VfioUserListener::open(options.parse().unwrap()).unwrap();
    server.listen(listener).unwrap();
    server
}

fn config(client: &mut Client, offset: u64) -> u16 {
    let mut bytes = [0; 2];
    client.region_read(CONFIG, offset, &mut bytes).unwrap();
    u16::from_le_bytes(bytes)
}

#[test]
fn monitor_finds_the_pci_function_and_guest_finds_its_window() {
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    let server = executor(&socket);
    let mut client = Client::new(&socket).unwrap();

    let ids = [0x00, 0x02, 0x2c, 0x2e].map(|at| config(&mut client, at));
    assert_eq!(ids, [0x10de, 0x2331, 0x1af4, 0x5647]);
    assert_eq!(config(&mut client, 0x0a), 0x0302);
    assert_eq!(config(&mut client, 0x14), 0x000c, "64 bits, prefetchable");
    // A guest can enable memory space, and change nothing else.
    client.region_write(CONFIG, 0x04, &[0xff, 0xff]).unwrap();
    client.region_write(CONFIG, 0x00, &[0, 0, 0, 0]).unwrap();
    assert_eq!(config(&mut client, 0x04), 0x0006);
    assert_eq!(config(&mut client, 0x00), 0x10de);

    let mut id = [0; 4];
    client.region_read(0, 0, &mut id).unwrap();
    assert_eq!(&id, b"VGPU");
    assert_eq!(client.region(0).unwrap().size, 64 << 10);
    assert!(client.region(0).unwrap().file_offset.is_none(), "trapped");

    // The hypervisor can map the window.
    let region = client.region(1).unwrap();
    assert_eq!(region.size, 64 << 20);
    assert_eq!(region.sparse_areas.len(), 1);
    let file = region.file_offset.as_ref().expect("a file to map").file();
    let page = Window::map_part(file.as_fd(), 0, 4096).unwrap();
    let found = directory::Directory::read(&page, 64 << 20).unwrap();
    assert_eq!(found.slots, directory::SLOTS);
    // Messages can also access the window, within the bounds of the window.
    let mut magic = [0; 8];
    client.region_read(1, 0, &mut magic).unwrap();
    assert_eq!(u64::from_le_bytes(magic), directory::MAGIC);

    // A guest asks for a slot, and rings the doorbell.
    page.store(directory::word::request(2), 77);
    client.region_write(0, DOORBELL as u64, &[0; 4]).unwrap();
    wait_for("an answer", || {
        page.load(directory::word::answered(2)) == 77
    });
    assert_eq!(
        page.load(directory::word::verdict(2)),
        directory::VERDICT_ACCEPTED
    );
    // The program has sent no message.
    assert!(server.sessions().is_empty());

    // The hypervisor disconnects.
    client.shutdown().unwrap();
    drop(client);
    // Another hypervisor can connect.
    wait_for("the next", || Client::new(&socket).is_ok());
}

/// Connects as a hypervisor, and sends the request of the version negotiation.
fn connect(socket: &Path) -> UnixStream {
    /// Id, command, size, flags, error, versions, text.
    const CAPABILITIES: &[u8] = b"{\"capabilities\":{}}\0";
    let mut request = [0u16.to_le_bytes(), 1u16.to_le_bytes()].concat();
    request.extend((20 + CAPABILITIES.len() as u32).to_le_bytes());
    request.extend([0; 12]);
    request.extend(CAPABILITIES);
    let mut hypervisor = UnixStream::connect(socket).unwrap();
    hypervisor.write_all(&request).unwrap();
    hypervisor
}

/// The command of the answer to [`connect`]. An error: the hypervisor is disconnected, or there is
/// no answer in time.
fn answer(mut hypervisor: &UnixStream) -> std::io::Result<u8> {
    let mut head = [0; 16];
    hypervisor.read_exact(&mut head).map(|()| head[2])
}

#[test]
fn process_without_sockets_serves_the_hypervisors_that_it_has_prepared_for() {
    static ENDS: AtomicU32 = AtomicU32::new(0);
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    let options = format!("a,socket={},window=64M,silence=0", socket.display());
    let mut listener = VfioUserListener::open_isolated(
        options.parse().unwrap(),
        VfioUserConnections::in_advance(2).unwrap(),
        || {
            ENDS.fetch_add(1, Ordering::Relaxed);
        },
    )
    .unwrap();
    for _ in 0..2 {
        let hypervisor = connect(&socket);
        assert!(listener.accept(Duration::ZERO).unwrap().is_none());
        assert_eq!(answer(&hypervisor).expect("the device"), 1);
        assert_eq!(ENDS.load(Ordering::Relaxed), 0, "a machine runs");
    }
    // The next one waits until the process ends, and connects again to the next process.
    let third = connect(&socket);
    third
        .set_read_timeout(Some(Duration::from_millis(50)))
        .unwrap();
    for _ in 0..3 {
        assert!(listener.accept(Duration::ZERO).unwrap().is_none());
    }
    assert_eq!(ENDS.load(Ordering::Relaxed), 1);
    let error = answer(&third).expect_err("no connection is left");
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "it waits");
}

#[test]
fn hypervisor_that_is_started_again_gets_the_device_at_once() {
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    let options = format!("a,socket={},window=64M,silence=0", socket.display());
    let mut listener = VfioUserListener::open(options.parse().unwrap()).unwrap();
    let connect = || connect(&socket);
    // The answer is there before the connection ends, or the connection has been refused.
    let first = connect();
    assert!(listener.accept(Duration::ZERO).unwrap().is_none());
    assert_eq!(answer(&first).unwrap(), 1);
    // The listener looks only after both: the hypervisor was killed, and another one has connected.
    drop(first);
    let second = connect();
    assert!(listener.accept(Duration::ZERO).unwrap().is_none());
    assert_eq!(answer(&second).expect("the device"), 1);
    // A second one beside it gets none.
    let third = connect();
    assert!(listener.accept(Duration::ZERO).unwrap().is_none());
    answer(&third).expect_err("two devices");
}

/// A hypervisor, and the machine that it runs.
struct Hypervisor {
    client: Arc<Mutex<Client>>,
    machine: Machine,
    /// Traps the doorbell of the machine.
    trap: JoinHandle<()>,
}

impl Hypervisor {
    fn start(socket: &Path) -> Hypervisor {
        let client = Client::new(socket).unwrap();
        let region = client.region(1).unwrap();
        let window = region.file_offset.as_ref().expect("a file to map").file();
        let window = window.try_clone().unwrap();
        // The machine rings through this pipe, and the hypervisor traps it.
        let (mut rings, bell) = std::io::pipe().unwrap();
        let client = Arc::new(Mutex::new(client));
        let trap = thread::spawn({
            let client = Arc::clone(&client);
            move || {
                while rings.read_exact(&mut [0; 8]).is_ok() {
                    let mut client = client.lock().unwrap();
                    // It may have disconnected.
                    let _ = client.region_write(0, DOORBELL as u64, &[0; 4]);
                }
            }
        });
        let (line, _other_end) = UnixStream::pair().unwrap();
        let machine = Machine::new(window.into(), bell.into(), line);
        Hypervisor {
            client,
            machine,
            trap,
        }
    }

    fn client(&self) -> MutexGuard<'_, Client> {
        self.client.lock().unwrap()
    }

    /// Ends the connection, and then the machine.
    fn end(self) {
        self.client().shutdown().unwrap();
        drop(self.machine);
        self.trap.join().unwrap();
    }
}

/// Waits until the executor has this number of sessions and, without one, all memory.
fn wait_for_sessions(server: &Server, count: usize) {
    wait_for(&format!("{count} sessions"), || {
        let engine = server.status_handle().status().engine;
        server.sessions().len() == count && (count > 0 || engine.memory_free == engine.memory_total)
    });
}

/// A session goes on after a reset of the device, and ends with the hypervisor, although its
/// program lives.
#[test]
fn end_of_a_hypervisor_ends_its_sessions_and_a_reset_of_the_device_does_not() {
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    let server = executor(&socket);
    let hypervisor = Hypervisor::start(&socket);
    let mut guest = hypervisor.machine.guest();
    let buffer = guest.alloc_with(&[7; 64]);
    hypervisor.client().reset().unwrap();
    assert_eq!(guest.read(buffer, 0, 64), [7; 64]);
    assert_eq!(server.sessions().len(), 1);
    hypervisor.client().shutdown().unwrap();
    wait_for_sessions(&server, 0);
    drop(guest);
    hypervisor.end();
}

/// After each event every program of the machine computes, and the executor has a session for each
/// program and no other one.
#[test]
fn programs_compute_after_random_events_of_hypervisors() {
    const EVENTS: u64 = 150;
    const PROGRAMS: usize = 3;
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    let server = executor(&socket);
    let mut rng = Rng::new(1, 0);
    let mut hypervisor = Hypervisor::start(&socket);
    let mut programs: Vec<OtherGuest> = Vec::new();
    for _ in 0..EVENTS {
        match rng.below(10) {
            0..3 if programs.len() < PROGRAMS => {
                programs.push(OtherGuest::new(hypervisor.machine.guest()));
            }
            0..3 => drop(programs.swap_remove(rng.below(PROGRAMS as u64) as usize)),
            3 => hypervisor.client().reset().unwrap(),
            // The hypervisor ends, and is started again.
            4 => {
                let ended = hypervisor;
                ended.client().shutdown().unwrap();
                wait_for_sessions(&server, 0);
                programs.clear();
                ended.end();
                hypervisor = Hypervisor::start(&socket);
            }
            5 => assert!(Client::new(&socket).is_err(), "a second hypervisor"),
            6 => {
                let mut bytes = vec![0; rng.below(5000) as usize];
                rng.fill(&mut bytes);
                let mut peer = UnixStream::connect(&socket).unwrap();
                // The executor may have hung up.
                let _ = peer.write_all(&bytes);
            }
            7 => {
                for _ in 0..rng.below(100) {
                    let mut client = hypervisor.client();
                    client.region_write(0, DOORBELL as u64, &[0; 4]).unwrap();
                }
            }
            8 => {
                let mut bytes = vec![0; 1 + rng.below(64) as usize];
                let mut client = hypervisor.client();
                client.region_read(CONFIG, 0, &mut bytes).unwrap();
                rng.fill(&mut bytes);
                // A guest can change nothing but the command register.
                client.region_write(CONFIG, 0, &bytes).unwrap();
                assert_eq!(config(&mut client, 0), 0x10de);
            }
            _ => {
                let mut bytes = [0; 8];
                let mut client = hypervisor.client();
                client.region_read(1, 0, &mut bytes).unwrap();
                assert_eq!(u64::from_le_bytes(bytes), directory::MAGIC);
            }
        }
        for program in &mut programs {
            program.compute();
        }
        wait_for_sessions(&server, programs.len());
    }
    programs.clear();
    hypervisor.end();
    wait_for_sessions(&server, 0);
}

#[test]
fn a_monitor_that_breaks_the_protocol_loses_only_its_own_device() {
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    let _server = executor(&socket);
    // A size smaller than the message, an access without bounds, a string without an end, random
    // bytes.
    let head = |command: u16, size: u32| {
        let mut head = vec![0; 16];
        head[2..4].copy_from_slice(&command.to_le_bytes());
        head[4..8].copy_from_slice(&size.to_le_bytes());
        head
    };
    for bytes in [head(1, 3), head(9, u32::MAX), head(1, 16), vec![0xff; 4096]] {
        let mut hypervisor = UnixStream::connect(&socket).unwrap();
        let _ = hypervisor.write_all(&bytes);
        // The device disconnects the hypervisor.
        wait_for("its end", || {
            let _ = hypervisor.set_read_timeout(Some(Duration::from_millis(100)));
            matches!(hypervisor.read(&mut [0; 64]), Ok(0)) || hypervisor.write(&[0; 16]).is_err()
        });
    }
    wait_for("a good one", || {
        let Ok(mut client) = Client::new(&socket) else {
            return false;
        };
        config(&mut client, 0) == 0x10de
    });
}
