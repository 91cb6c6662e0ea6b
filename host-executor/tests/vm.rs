//! Virtual machines: their programs, and restarts of the executor.

mod common;
mod machine;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use vgpu_executor::listener::GuestListener as _;
use vgpu_executor::vm::IvshmemListener;
use vgpu_transport::error::LinkError;
use vgpu_transport::ir::BufferId;
use vgpu_transport::link::pci::discover::all;
use vgpu_transport::link::pci::{PciDevice, PciError, connect, directory};
use vgpu_transport::shm::liveness;
use vgpu_transport::shm::memory::{SharedWords, Window};
use vgpu_transport::wire::{Offer, ProtocolVersion, Reply, Request};

use common::{Guest, MEMORY, TIMEOUT, log, wait_for};
use machine::{Dir, Machine, executor, executor_of_two_devices, executor_with};

/// The log says of one of the sessions with this peer that it was evicted.
fn expect_one_evicted(peer: &str) {
    let words = "session closed: the link failed: the guest was evicted: its heartbeat had \
                 stopped, and another program needed its slot or its memory";
    let lines = || -> Vec<String> {
        let lines = log::lines_with(peer).into_iter();
        lines.filter(|line| line.contains(words)).collect()
    };
    wait_for("a line about the session", || !lines().is_empty());
    assert_eq!(lines().len(), 1, "{:#?}", lines());
}

#[test]
fn each_program_of_a_machine_has_its_own_session() {
    let dir = Dir::new();
    let server = executor(&dir.0, &["a"], 0);
    let machine = Machine::plug(&dir.0.join("a.sock"));
    let mut guests: Vec<Guest> = (0..directory::SLOTS).map(|_| machine.guest()).collect();
    for (i, guest) in guests.iter_mut().enumerate() {
        let buffer = guest.alloc(4096);
        guest.write(buffer, 0, &[i as u8; 4096]);
    }
    for (i, guest) in guests.iter_mut().enumerate() {
        assert_eq!(guest.read(BufferId(1), 0, 4096), [i as u8; 4096]);
    }
    assert!(
        matches!(machine.connect(), Err(PciError::Full { slots, .. }) if slots == directory::SLOTS)
    );
    // The end of a session frees its slot.
    guests.remove(3);
    let mut late = machine.guest();
    late.alloc(64);
    assert_eq!(server.sessions().len(), directory::SLOTS);
    let peer = server.sessions()[0].peer.to_string();
    assert!(peer.starts_with("vm a slot"), "{peer}");
}

#[test]
fn programs_of_every_served_protocol_version_share_a_machine() {
    let dir = Dir::new();
    let _server = executor(&dir.0, &["a"], 0);
    let machine = Machine::plug(&dir.0.join("a.sock"));
    let mut guests = ProtocolVersion::ALL.map(|version| {
        let mut guest = machine.connect().expect("a slot");
        guest.hello_with(Offer::only(version));
        assert_eq!(guest.protocol, version);
        guest
    });
    for (i, guest) in guests.iter_mut().enumerate() {
        let buffer = guest.alloc(4096);
        guest.write(buffer, 0, &[i as u8; 4096]);
        assert_eq!(guest.read(buffer, 0, 4096), [i as u8; 4096]);
    }
}

#[test]
fn end_of_a_machine_ends_its_sessions_and_frees_its_place() {
    let dir = Dir::new();
    let server = executor(&dir.0, &["a"], 0);
    let socket = dir.0.join("a.sock");
    let machine = Machine::plug(&socket);
    let mut guest = machine.guest();
    guest.alloc(4096);
    // A second QEMU on the same socket gets no device.
    let second = UnixStream::connect(&socket).unwrap();
    assert_eq!(std::io::Read::read(&mut &second, &mut [0; 8]).unwrap(), 0);
    machine.line.shutdown(std::net::Shutdown::Both).unwrap();
    wait_for("its session ends", || server.sessions().is_empty());
    drop((guest, machine));
    let machine = Machine::plug(&socket);
    machine.guest().alloc(4096);
}

#[test]
fn qemu_that_is_started_again_gets_the_device_at_once() {
    let dir = Dir::new();
    let socket = dir.0.join("a.sock");
    let text = format!("a,socket={},window=64M,silence=0", socket.display());
    let options = text.parse().unwrap();
    let mut listener = IvshmemListener::open(options, &mut BTreeMap::new()).unwrap();
    let first = UnixStream::connect(&socket).unwrap();
    assert!(listener.accept(Duration::ZERO).unwrap().is_none());
    let mut version = [1; 8];
    (&first).read_exact(&mut version).unwrap();
    // The listener looks only after both: QEMU was killed, and another one has connected.
    drop(first);
    let second = UnixStream::connect(&socket).unwrap();
    assert!(listener.accept(Duration::ZERO).unwrap().is_none());
    // Nothing is left to wait for if the second one was disconnected.
    (&second).read_exact(&mut version).expect("the device");
    assert_eq!(version, [0; 8]);
}

#[test]
fn a_silent_program_loses_its_session() {
    let dir = Dir::new();
    let server = executor(&dir.0, &["a"], 5);
    let machine = Machine::plug(&dir.0.join("a.sock"));
    let lively = machine.guest();
    // When a program dies, the kernel releases the lock on the slot, and the window stays. Here a
    // program requests a slot and never opens the slot.
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).unwrap();
    page.store(directory::word::request(5), 12345);
    rustix::io::write(&machine.bell, &1u64.to_ne_bytes()).unwrap();
    wait_for("an answer to the silent one", || {
        page.load(directory::word::answered(5)) == 12345
    });
    wait_for("the end of the silent one", || server.pending().is_empty());
    assert_eq!(server.sessions().len(), 1);
    drop(lively);
    wait_for("the end of the other", || server.sessions().is_empty());
}

/// The folder of the devices of a machine, for a second process of this test program.
const DEVICES: &str = "VGPU_TEST_DEVICES";

/// Bytes that a program of a machine takes; the engine has them for one program only.
const MUCH: u64 = MEMORY / 4 * 3;

#[test]
#[ignore = "a second process of other tests"]
fn program_that_takes_memory_and_waits() {
    let Some(devices) = std::env::var_os(DEVICES) else {
        return;
    };
    let devices = Path::new(&devices);
    let end = connect(devices, all(devices)[0].address, TIMEOUT).expect("a slot");
    let mut guest = Guest::new(Box::new(end));
    let number = |name| std::env::var(name).expect(name).parse().expect("a number");
    let device = u32::try_from(number("VGPU_TEST_DEVICE")).expect("a device");
    guest.hello_for(Offer::SERVED, device);
    guest.alloc(number("VGPU_TEST_SIZE"));
    println!("ready");
    // The parent kills this process.
    std::thread::sleep(10 * TIMEOUT);
}

/// A program of a machine in a process of its own.
fn start_program(machine: &Machine, size: u64) -> Child {
    start_program_on(0, machine, size)
}

/// The same on another device.
fn start_program_on(device: u32, machine: &Machine, size: u64) -> Child {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "program_that_takes_memory_and_waits"])
        .args(["--ignored", "--nocapture"])
        .env(DEVICES, &machine.sysfs.0)
        .env("VGPU_TEST_SIZE", size.to_string())
        .env("VGPU_TEST_DEVICE", device.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program");
    let output = BufReader::new(child.stdout.take().expect("a pipe"));
    let is_ready = { output.lines() }.any(|line| line.is_ok_and(|line| line.ends_with("ready")));
    assert!(is_ready, "{:?}", child.wait());
    child
}

/// A program that reads a buffer for each line on its standard input, and opens a new session when
/// it has lost the last one.
#[test]
#[ignore = "a second process of other tests"]
fn program_that_reads_for_each_line() {
    const BYTES: [u8; 64] = [7; 64];
    let Some(devices) = std::env::var_os(DEVICES) else {
        return;
    };
    let open = || {
        let devices = Path::new(&devices);
        let end = connect(devices, all(devices)[0].address, TIMEOUT).expect("a slot");
        let mut guest = Guest::new(Box::new(end));
        guest.hello();
        let buffer = guest.alloc_with(&BYTES);
        (guest, buffer)
    };
    let read = |guest: &mut Guest, buffer| -> Result<(), LinkError> {
        let (mut message, mut bytes) = (Vec::new(), [0; BYTES.len()]);
        let request = Request::Read {
            buffer,
            offset: 0,
            len: BYTES.len() as u64,
        };
        request.encode(guest.protocol, &mut message);
        guest.end.send(&message, (&[][..]).into())?;
        message.clear();
        let len = guest
            .end
            .receive(&mut message, bytes.as_mut_slice().into())?;
        assert_eq!((len, bytes), (BYTES.len(), BYTES));
        Ok(())
    };
    let (mut guest, mut buffer) = open();
    println!("\nready");
    for _ in std::io::stdin().lines() {
        match read(&mut guest, buffer) {
            Ok(()) => println!("has read"),
            Err(error) => {
                println!("has lost its session: {error}");
                (guest, buffer) = open();
            }
        }
    }
}

/// A process that is stopped, as all programs of a paused machine are.
#[test]
fn paused_machine_keeps_its_sessions_for_the_silence_and_loses_them_after() {
    const SILENCE: u64 = 5;
    let dir = Dir::new();
    let server = executor(&dir.0, &["a", "b"], SILENCE);
    let machine = Machine::plug(&dir.0.join("a.sock"));
    let other = Machine::plug(&dir.0.join("b.sock"));
    let mut witness = other.guest();
    let witness_has = witness.alloc_with(&[1; 64]);
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "program_that_reads_for_each_line"])
        .args(["--ignored", "--nocapture"])
        .env(DEVICES, &machine.sysfs.0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program");
    let mut input = child.stdin.take().expect("a pipe");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut line = || lines.next().expect("a line").expect("text");
    while line() != "ready" {}
    let mut answer = || {
        input.write_all(b"\n").expect("a program");
        line()
    };
    assert_eq!(answer(), "has read");

    let process = Pid::from_child(&child);
    let signal = |signal| kill_process(process, signal).expect("a program");
    signal(Signal::STOP);
    std::thread::sleep(Duration::from_secs(SILENCE / 2));
    signal(Signal::CONT);
    assert_eq!(answer(), "has read");
    assert_eq!(server.sessions().len(), 2);

    signal(Signal::STOP);
    wait_for("the end of the paused program's session", || {
        server.sessions().len() == 1
    });
    assert_eq!(witness.read(witness_has, 0, 64), [1; 64]);
    signal(Signal::CONT);
    let lost = answer();
    assert!(lost.starts_with("has lost its session"), "{lost}");
    // It has opened another one.
    assert_eq!(answer(), "has read");
    drop(input);
    assert!(child.wait().expect("a child").success());
}

#[test]
fn killed_program_gives_its_memory_to_another_one_of_its_machine() {
    log::keep();
    let dir = Dir::new();
    // Silence never ends a session.
    let server = executor(&dir.0, &["memory", "b"], 0);
    let machine = Machine::plug(&dir.0.join("memory.sock"));
    let other = Machine::plug(&dir.0.join("b.sock"));
    let mut killed_elsewhere = start_program(&other, 4096);
    let mut program = start_program(&machine, MUCH);
    for _ in 0..3 {
        // One that lives keeps what it has.
        let refused = machine.guest().refusal(MUCH);
        assert!(refused.contains("out of memory"), "{refused}");
        std::thread::sleep(Duration::from_secs(1));
    }
    let mut guest = machine.guest();
    for child in [&mut killed_elsewhere, &mut program] {
        child.kill().expect("a child");
        child.wait().expect("a child");
    }
    let free = |guest: &mut Guest| match guest.ask(&Request::Memory {}) {
        Reply::Memory { free, .. } => free,
        other => panic!("{other:?}"),
    };
    assert!(free(&mut guest) < MUCH);
    wait_for("the memory of the killed program to count as free", || {
        free(&mut guest) >= MUCH
    });
    let buffer = guest.alloc(MUCH);
    assert_eq!(guest.read(buffer, MUCH - 4, 4), [0; 4]);
    // Nobody of the other machine needs memory: it may be paused.
    let sessions = server.sessions().into_iter();
    let peers: Vec<String> = sessions.map(|session| session.peer.endpoint).collect();
    assert!(
        peers.iter().any(|peer| peer.starts_with("vm b ")),
        "{peers:?}"
    );
    assert_eq!(peers.len(), 2, "{peers:?}");
    // The log and the metrics say that the link ended, not that the guest closed it.
    let ended = server.status_handle().status().ended;
    let ended: Vec<_> = ended.by_kind().filter(|(_, count)| *count > 0).collect();
    // Three programs were refused memory and left.
    assert_eq!(ended, [("closed", 3), ("evicted", 1)]);
    expect_one_evicted(" peer=vm memory slot ");
}

#[test]
fn killed_program_on_another_device_keeps_its_session() {
    let dir = Dir::new();
    // Silence never ends a session.
    let server = executor_of_two_devices(&dir.0, &["a"], 0);
    let machine = Machine::plug(&dir.0.join("a.sock"));
    let mut programs = [0, 1].map(|device| start_program_on(device, &machine, MUCH));
    for program in &mut programs {
        program.kill().expect("a child");
        program.wait().expect("a child");
    }
    let mut guest = machine.guest();
    wait_for("the memory of the killed program", || {
        let buffer = guest.new_buffer();
        let size = MUCH;
        matches!(
            guest.ask(&Request::Alloc { buffer, size }),
            Reply::Done { .. }
        )
    });
    // The memory of the first device was needed, and no other.
    let status = server.status_handle().status();
    let devices: Vec<usize> = status.sessions.iter().map(|one| one.device).collect();
    assert_eq!(devices, [1, 0], "{status:?}");
    let held: Vec<u64> = { status.guests[0].by_device.iter() }
        .map(|usage| usage.memory)
        .collect();
    assert_eq!(held, [MUCH, MUCH]);
}

/// All programs of a paused machine are silent, also for a moment after the pause. One that needs
/// memory then does not take it from the others.
#[test]
fn paused_program_keeps_its_memory_when_another_one_needs_some() {
    let dir = Dir::new();
    let server = executor(&dir.0, &["a"], 0);
    let machine = Machine::plug(&dir.0.join("a.sock"));
    let mut program = start_program(&machine, MUCH);
    let mut guest = machine.guest();
    let process = Pid::from_child(&program);
    kill_process(process, Signal::STOP).expect("a program");
    std::thread::sleep(liveness::ALIVE + Duration::from_secs(2));
    let goes_on = std::thread::spawn(move || {
        // The request has come by now, and the executor waits for the next heartbeat.
        std::thread::sleep(Duration::from_millis(500));
        kill_process(process, Signal::CONT).expect("a program");
    });
    let refused = guest.refusal(MUCH);
    assert!(refused.contains("out of memory"), "{refused}");
    assert_eq!(server.sessions().len(), 2);
    goes_on.join().expect("it does not panic");
    program.kill().expect("a child");
    program.wait().expect("a child");
}

#[test]
fn slot_of_a_terminated_program_is_reused() {
    let dir = Dir::new();
    let server = executor(&dir.0, &["a"], 0);
    let machine = Machine::plug(&dir.0.join("a.sock"));
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).unwrap();
    for k in 0..directory::SLOTS {
        page.store(directory::word::request(k), 99);
    }
    wait_for("answers to all", || {
        (0..directory::SLOTS).all(|k| page.load(directory::word::answered(k)) == 99)
    });
    // No lock is held, so a living program may take the first slot.
    let mut guest = machine.guest();
    guest.alloc(4096);
    assert!(
        server
            .sessions()
            .iter()
            .any(|session| session.guest.is_some())
    );
}

/// A program that was killed closes nothing: its session is in the way when another one wants its
/// slot.
#[test]
fn end_of_a_session_whose_slot_is_needed_has_its_reason() {
    log::keep();
    let dir = Dir::new();
    // Silence never ends a session.
    let server = executor(&dir.0, &["needed"], 0);
    let machine = Machine::plug(&dir.0.join("needed.sock"));
    let mut program = start_program(&machine, 4096);
    program.kill().expect("a child");
    program.wait().expect("a child");
    // The slot is its own for so long.
    std::thread::sleep(liveness::ALIVE + Duration::from_secs(1));
    let guest = machine.guest();
    let ended = || -> Vec<(&'static str, u64)> {
        let ended = server.status_handle().status().ended;
        ended.by_kind().filter(|(_, count)| *count > 0).collect()
    };
    wait_for("the end of the session", || ended() == [("evicted", 1)]);
    expect_one_evicted(" peer=vm needed slot 0 ");
    let sessions = server.sessions().into_iter();
    let peers: Vec<String> = sessions.map(|session| session.peer.endpoint).collect();
    assert_eq!(peers, ["vm needed slot 0"]);
    drop(guest);
}

#[test]
fn restarted_executor_serves_the_same_machine() {
    let dir = Dir::new();
    let first = executor(&dir.0, &["a"], 0);
    let machine = Machine::plug(&dir.0.join("a.sock"));
    let mut guest = machine.guest();
    guest.alloc(4096);
    // The files that a service manager stores and passes to the next executor. The socket is a copy
    // of this end, since the first executor has closed its own.
    let (line, _qemu) = UnixStream::pair().unwrap();
    let mut kept: BTreeMap<String, OwnedFd> = [
        ("vgpu-a-memory", machine.memory.try_clone().unwrap()),
        ("vgpu-a-bell", machine.bell.try_clone().unwrap()),
        ("vgpu-a-line", line.into()),
    ]
    .map(|(name, fd)| (name.to_owned(), fd))
    .into();
    drop(first);
    assert!(matches!(machine.connect(), Err(PciError::Ended { .. })));
    let _second = executor_with(&dir.0, &["a"], 0, &mut kept);
    assert!(kept.is_empty(), "taken");
    // The second executor initialises the window in a thread of its own.
    wait_for("the end of the session with the executor before", || {
        guest.end.is_closed()
    });
    let mut again = machine.guest();
    let buffer = again.alloc(4096);
    again.write(buffer, 0, &[7; 64]);
    assert_eq!(again.read(buffer, 0, 64), [7; 64]);
}

#[test]
fn other_pci_devices_are_left_unchanged() {
    let dir = Dir::new();
    let _server = executor(&dir.0, &["a"], 0);
    let machine = Machine::plug(&dir.0.join("a.sock"));
    let device = machine.sysfs.0.join("0000:00:05.0");
    let open = || {
        PciDevice::open(&all(&machine.sysfs.0)[0])
            .err()
            .map(|e| e.to_string())
    };
    assert_eq!(open(), None);
    assert_eq!(fs::read_to_string(device.join("enable")).unwrap(), "1");
    // Shared memory of another program.
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).unwrap();
    page.store(0, 0x1234);
    assert!(open().unwrap().contains("0x0000000000001234"));
    // A real GPU with the same device id.
    fs::write(device.join("vendor"), "0x10de").unwrap();
    fs::write(device.join("device"), "0x2331").unwrap();
    fs::write(device.join("subsystem_vendor"), "0x10de").unwrap();
    fs::write(device.join("subsystem_device"), "0x1626").unwrap();
    assert!(open().unwrap().contains("not touched"));
}
