//! The host of a virtual machine whose driver writes arbitrary values to its device, and whose
//! hypervisor accepts its files, refuses them, or disconnects.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use vgpu_transport::link::HostEnd as _;
use vgpu_transport::link::pci::directory::{MIN_SIZE, PAGE, SLOTS, word};
use vgpu_transport::link::pci::{VmDoorbell, VmEvent, VmWindow, ivshmem};
use vgpu_transport::shm::doorbell::new_eventfd;
use vgpu_transport::shm::memory::{SharedWords as _, Window, sealed_file};

use super::session::input::Input;

/// The maximum number of steps. Each may open a session, which takes a few system calls.
const STEPS: usize = 16;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    if input.chance(8) {
        handshake(&mut input);
    }
    let file = sealed_file(MIN_SIZE).expect("memory");
    let guest = Window::map(std::os::fd::AsFd::as_fd(&file), MIN_SIZE).expect("a mapping");
    let bell = VmDoorbell::new(new_eventfd().expect("an eventfd"), None);
    let mut machine =
        VmWindow::new(file, MIN_SIZE, bell, Some(Duration::from_secs(60))).expect("a device");
    let directory = machine.directory().clone();
    let mut sessions = Vec::new();
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        match input.below(6) {
            0 => guest.store(word::request(input.below(SLOTS)), input.u64()),
            1 => guest.store(8 * input.below(PAGE / 8), input.odd_number()),
            // Any position in the first pages of a slot's window: words, cursors, record headers.
            2 | 3 => {
                let slot = directory.slot(input.below(SLOTS));
                let at = slot.start + 8 * (input.u64() as usize % (PAGE / 4));
                guest.store(at, input.odd_number());
            }
            4 if !sessions.is_empty() => {
                let which = input.below(sessions.len());
                let mut message = Vec::new();
                let session: &mut vgpu_transport::link::window::WindowHost = &mut sessions[which];
                match session.receive(&mut message, Duration::ZERO) {
                    Ok(Some(incoming)) => {
                        let mut payload = vec![0; incoming.payload_len];
                        session.payload().copy_to(&mut payload);
                        session.retire();
                    }
                    Ok(None) => {}
                    Err(_) => drop(sessions.swap_remove(which)),
                }
            }
            _ => match machine.next(Duration::ZERO) {
                Ok(VmEvent::Arrival(arrival)) => {
                    assert!(arrival.slot() < SLOTS);
                    if input.chance(4) {
                        drop(arrival);
                    } else {
                        sessions.push(arrival.handshake().expect("a session"));
                    }
                }
                Ok(VmEvent::Nothing | VmEvent::Gone) => {}
                Err(error) => panic!("{error}"),
            },
        }
    }
}

/// A hypervisor that accepts no files, has disconnected, or is connected.
fn handshake(input: &mut Input<'_>) {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    ours.set_nonblocking(true).expect("a socket");
    let is_there = match input.below(3) {
        0 => {
            drop(theirs);
            None
        }
        1 => {
            theirs.shutdown(std::net::Shutdown::Both).expect("a socket");
            None
        }
        // Until the files are sent.
        _ => Some(theirs),
    };
    let welcomed = ivshmem::welcome(ours.into(), MIN_SIZE);
    assert_eq!(welcomed.is_ok(), is_there.is_some());
}
