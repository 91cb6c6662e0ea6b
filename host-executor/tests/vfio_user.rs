//! The vfio-user device, tested with the client of the protocol's crate.

mod common;
mod machine;

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use vfio_user::Client;
use vgpu_executor::listener::GuestListener as _;
use vgpu_executor::vm::{VfioUserConnections, VfioUserListener};
use vgpu_executor::{Limits, Server};
use vgpu_gguf::Rng;
use vgpu_transport::link::pci::discover::all;
use vgpu_transport::link::pci::{DOORBELL, connect as connect_program, directory};
use vgpu_transport::shm::memory::{SharedWords as _, Window};
use vgpu_transport::wire::{Reply, Request};

use common::{Guest, MEMORY, OtherGuest, TIMEOUT, cpu, log, wait_for};
use machine::{Dir, Machine};

const CONFIG: u32 = 7;

fn executor(socket: &Path) -> Server {
    executor_with(socket, 0)
}

/// An executor that ends sessions after so many seconds without a heartbeat. 0: never.
fn executor_with(socket: &Path, silence: u64) -> Server {
    let mut server = Server::new(cpu(), Limits::default(), 64).expect("a thread");
    let options = format!("a,socket={},window=64M,silence={silence}", socket.display());
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
    try_connect(socket).unwrap()
}

/// As [`connect`]. An error: the executor may have hung up.
fn try_connect(socket: &Path) -> std::io::Result<UnixStream> {
    /// Id, command, size, flags, error, versions, text.
    const CAPABILITIES: &[u8] = b"{\"capabilities\":{}}\0";
    let mut request = [0u16.to_le_bytes(), 1u16.to_le_bytes()].concat();
    request.extend((20 + CAPABILITIES.len() as u32).to_le_bytes());
    request.extend([0; 12]);
    request.extend(CAPABILITIES);
    let mut hypervisor = UnixStream::connect(socket)?;
    hypervisor.write_all(&request)?;
    Ok(hypervisor)
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

/// The folder of the devices of a machine, for a second process of this test program.
const DEVICES: &str = "VGPU_TEST_DEVICES";

/// Bytes that a program of a machine takes; the engine has them for one program only.
const MUCH: u64 = MEMORY / 4 * 3;

/// Takes memory, and reads it for each line on the standard input. Opens a new session when it has
/// lost the last one.
#[test]
#[ignore = "a second process of other tests"]
fn program_of_a_machine() {
    let Some(devices) = std::env::var_os(DEVICES) else {
        return;
    };
    let devices = Path::new(&devices);
    let open = || {
        let end = connect_program(devices, all(devices)[0].address, TIMEOUT).expect("a slot");
        let mut guest = Guest::new(Box::new(end));
        guest.hello();
        let buffer = guest.alloc(MUCH);
        (guest, buffer)
    };
    let (mut guest, mut buffer) = open();
    println!("\nready");
    for _ in std::io::stdin().lines() {
        let (mut message, mut bytes) = (Vec::new(), [1; 4]);
        let (offset, len) = (0, 4);
        let request = Request::Read {
            buffer,
            offset,
            len,
        };
        request.encode(guest.protocol, &mut message);
        let sent = guest.end.send(&message, (&[][..]).into());
        message.clear();
        let end = &mut guest.end;
        match sent.and_then(|_| end.receive(&mut message, bytes.as_mut_slice().into())) {
            Ok(_) => println!("has read {bytes:?}"),
            Err(error) => {
                println!("has lost its session: {error}");
                (guest, buffer) = open();
            }
        }
    }
}

/// A program of a machine in a process of its own.
struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    fn start(machine: &Machine) -> Program {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "program_of_a_machine"])
            .args(["--ignored", "--nocapture"])
            .env(DEVICES, &machine.sysfs.0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut program = Program {
            child,
            input,
            output,
        };
        while program.line() != "ready" {}
        program
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let len = self.output.read_line(&mut line).expect("text");
        assert!(len > 0, "the program has ended");
        line.trim_end().to_owned()
    }

    /// What the program says after a read.
    fn reads(&mut self) -> String {
        self.input.write_all(b"\n").expect("a program");
        self.line()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a program");
    }
}

/// Kills the program, also a stopped one.
impl Drop for Program {
    fn drop(&mut self) {
        // Nobody has waited for it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The guest reboots: its programs end without a word, and the hypervisor resets the device. The
/// first program afterwards that needs the memory gets it.
#[test]
fn reboot_of_a_machine_leaves_sessions_whose_memory_the_next_program_gets() {
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    // Silence never ends a session.
    let server = executor(&socket);
    let hypervisor = Hypervisor::start(&socket);
    hypervisor
        .client()
        .region_write(CONFIG, 0x04, &[2])
        .unwrap();
    drop(Program::start(&hypervisor.machine));
    hypervisor.client().reset().unwrap();
    assert_eq!(config(&mut hypervisor.client(), 0x04), 0, "memory is off");
    assert_eq!(server.sessions().len(), 1, "a reset ends no session");
    let mut next = hypervisor.machine.guest();
    let buffer = next.new_buffer();
    let size = MUCH;
    wait_for("the memory of the program before the reboot", || {
        let reply = next.ask(&Request::Alloc { buffer, size });
        matches!(reply, Reply::Done { .. })
    });
    wait_for_sessions(&server, 1);
    drop(next);
    hypervisor.end();
    wait_for_sessions(&server, 0);
}

/// A process that is stopped, as all programs of a paused machine are. The hypervisor stays
/// connected meanwhile.
#[test]
fn paused_machine_keeps_its_sessions_for_the_silence_and_loses_them_after() {
    const SILENCE: u64 = 5;
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    let server = executor_with(&socket, SILENCE);
    let hypervisor = Hypervisor::start(&socket);
    let mut program = Program::start(&hypervisor.machine);
    assert_eq!(program.reads(), "has read [0, 0, 0, 0]");

    program.signal(Signal::STOP);
    thread::sleep(Duration::from_secs(SILENCE / 2));
    program.signal(Signal::CONT);
    assert_eq!(program.reads(), "has read [0, 0, 0, 0]");
    assert_eq!(server.sessions().len(), 1);

    program.signal(Signal::STOP);
    wait_for_sessions(&server, 0);
    program.signal(Signal::CONT);
    let lost = program.reads();
    assert!(lost.starts_with("has lost its session"), "{lost}");
    assert_eq!(program.reads(), "has read [0, 0, 0, 0]", "in a new one");
    drop(program);
    hypervisor.end();
}

/// The device says in no way that its state can be saved, and a hypervisor that asks for it all the
/// same is disconnected, with its sessions: it would save a machine without the window's contents.
#[test]
fn hypervisor_finds_no_migration_and_is_disconnected_if_it_asks_for_it() {
    /// `VFIO_USER_DEVICE_FEATURE` of the protocol, by which a device is migrated.
    const FEATURE: u16 = 16;
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    let server = executor(&socket);
    let mut hypervisor = connect(&socket);
    let mut head = [0; 20];
    hypervisor.read_exact(&mut head).unwrap();
    let size = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
    let mut text = vec![0; size as usize - head.len()];
    hypervisor.read_exact(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.contains("capabilities") && !text.contains("migration"),
        "{text}"
    );
    // Asks whether the device can be stopped and copied (VFIO_DEVICE_FEATURE_MIGRATION, get).
    let request = [
        2u16.to_le_bytes().to_vec(),
        FEATURE.to_le_bytes().to_vec(),
        32u32.to_le_bytes().to_vec(),
        vec![0; 8],
        16u32.to_le_bytes().to_vec(),
        0x0001_0001u32.to_le_bytes().to_vec(),
        vec![0; 8],
    ];
    hypervisor.write_all(&request.concat()).unwrap();
    assert_eq!(hypervisor.read(&mut [0; 64]).unwrap(), 0, "disconnected");
    // The next one gets a device.
    wait_for("a device", || Client::new(&socket).is_ok());
    assert!(server.sessions().is_empty());
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

/// Starts the second process of the test below.
const HOSTILE: &str = "VGPU_TEST_HOSTILE_HYPERVISORS";

/// What hypervisors cost this process: threads, descriptors, and mappings of windows.
#[derive(Debug)]
struct Costs([usize; 3]);

impl Costs {
    /// The costs without `own` descriptors.
    fn now(own: usize) -> Costs {
        let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let windows = maps
            .lines()
            .filter(|line| line.contains("memfd:vgpu-window"));
        Costs([
            count("/proc/self/task"),
            count("/proc/self/fd") - own,
            windows.count(),
        ])
    }
}

/// A hypervisor that has the device, once the executor has seen the end of the one before.
fn next_hypervisor(socket: &Path) -> UnixStream {
    let mut next = None;
    wait_for("a device", || {
        let Ok(hypervisor) = try_connect(socket) else {
            return false;
        };
        hypervisor.set_read_timeout(Some(TIMEOUT)).unwrap();
        let is_served = answer(&hypervisor).is_ok();
        next = is_served.then_some(hypervisor);
        is_served
    });
    next.expect("it has connected")
}

/// Writes to the window, and then reads the window without taking an answer, until the executor
/// takes no further message.
fn take_no_answers(mut hypervisor: &UnixStream) {
    const PART: u32 = 4096;
    const READ: u16 = 9;
    const WRITE: u16 = 10;
    const NO_REPLY: u32 = 1 << 4;
    /// Longer than a thread of the executor waits for a processor.
    const PAUSE: Duration = Duration::from_millis(200);
    let access = |command: u16, flags: u32, offset: u64, data: u32| {
        let mut message = vec![0; 2];
        message.extend(command.to_le_bytes());
        message.extend((32 + data).to_le_bytes());
        message.extend(flags.to_le_bytes());
        message.extend([0; 4]);
        message.extend(offset.to_le_bytes());
        message.extend(1u32.to_le_bytes());
        message.extend(PART.to_le_bytes());
        message.resize(message.len() + data as usize, 7);
        message
    };
    // The first part is the directory, by which programs ask for sessions.
    for part in 1..64 {
        let message = access(WRITE, NO_REPLY, part * u64::from(PART), PART);
        hypervisor.write_all(&message).unwrap();
    }
    hypervisor.set_write_timeout(Some(PAUSE)).unwrap();
    let read = access(READ, 0, u64::from(PART), 0);
    let refused = loop {
        if let Err(error) = hypervisor.write_all(&read) {
            break error;
        }
    };
    assert_eq!(refused.kind(), ErrorKind::WouldBlock, "{refused}");
}

/// The first one has cost what the last one does.
#[test]
#[ignore = "a second process of another test"]
fn process_with_hostile_hypervisors() {
    const ROUNDS: usize = 20;
    /// Threads and descriptors that come and go, as those of the heartbeats.
    const SLACK: usize = 4;
    if std::env::var_os(HOSTILE).is_none() {
        return;
    }
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    let server = executor(&socket);
    let mut hypervisors: Vec<UnixStream> = Vec::new();
    let mut first: Option<Costs> = None;
    let mut check = |own: usize| {
        let costs = Costs::now(own);
        let first = first.get_or_insert_with(|| Costs::now(own));
        let pairs = costs.0.iter().zip(&first.0);
        let is_bounded = { pairs }.all(|(now, first)| *now <= first + SLACK);
        assert!(is_bounded, "{costs:?} for {own} hypervisors, and {first:?}");
    };
    for _ in 0..ROUNDS {
        let hypervisor = next_hypervisor(&socket);
        hypervisors.push(hypervisor);
        check(hypervisors.len());
        let hypervisor = &hypervisors[hypervisors.len() - 1];
        take_no_answers(hypervisor);
        // Nothing comes from it any more, and its end of the socket stays open.
        hypervisor.shutdown(Shutdown::Write).unwrap();
    }
    let mut client = None;
    wait_for("a device", || {
        client = Client::new(&socket).ok();
        client.is_some()
    });
    let mut client = client.expect("it has connected");
    check(hypervisors.len() + 1);
    assert_eq!(config(&mut client, 0), 0x10de);
    let mut magic = [0; 8];
    client.region_read(1, 0, &mut magic).unwrap();
    assert_eq!(u64::from_le_bytes(magic), directory::MAGIC);
    assert!(server.sessions().is_empty());
    // All others are disconnected: after the answers that they have not taken, nothing comes.
    for mut hypervisor in &hypervisors {
        if let Err(error) = hypervisor.read_to_end(&mut Vec::new()) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
        }
    }
}

/// A hypervisor whose answers fill its socket ends one direction of the connection, and keeps the
/// other one open. In a process of its own: other tests have threads and descriptors, too.
#[test]
fn hypervisors_that_take_no_answers_leave_no_threads_descriptors_and_windows() {
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "process_with_hostile_hypervisors"])
        .args(["--ignored", "--nocapture"])
        .env(HOSTILE, "1")
        .output()
        .expect("this program");
    let [said, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{errors}"
    );
}

/// Whoever can open the socket of a machine fills no log: with connections beside the machine's
/// hypervisor, and with hypervisors that break the protocol.
#[test]
fn log_lines_about_the_connections_of_a_machine_are_limited() {
    const CONNECTIONS: usize = 200;
    /// More than the limit, 20 in 10 s, also on a slow host.
    const MOST: usize = 100;
    log::keep();
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    let options = format!("crowded,socket={},window=64M,silence=0", socket.display());
    let mut listener = VfioUserListener::open(options.parse().unwrap()).unwrap();
    let mut accept = || assert!(listener.accept(Duration::ZERO).unwrap().is_none());
    for _ in 0..CONNECTIONS {
        let mut hypervisor = UnixStream::connect(&socket).unwrap();
        hypervisor.write_all(&[0xff; 64]).unwrap();
        accept();
    }
    let first = connect(&socket);
    accept();
    assert_eq!(answer(&first).expect("the device"), 1);
    for _ in 0..CONNECTIONS {
        let _second = connect(&socket);
        accept();
    }
    let lines = log::lines_with("crowded");
    assert!(!lines.is_empty() && lines.len() < MOST, "{lines:#?}");
}
