//! The path of a hypervisor's message without sockets and threads, for the fuzzer.

use vfio_user::ServerBackend as _;
use vgpu_transport::shm::doorbell::new_eventfd;
use vgpu_transport::shm::memory::sealed_file;

use super::device::Function;
use super::filter;

/// Bytes of the window.
const SIZE: usize = 1 << 20;

/// A PCI function, and the messages of a hypervisor.
pub struct Machine(Function);

impl Default for Machine {
    fn default() -> Machine {
        Machine::new()
    }
}

impl Machine {
    /// A function with a small window.
    ///
    /// # Panics
    ///
    /// The window's memory cannot be allocated.
    pub fn new() -> Machine {
        let memory = sealed_file(SIZE).expect("memory for a window");
        let bell = new_eventfd().expect("an eventfd");
        Machine(Function::new(memory, SIZE, bell).expect("a mapping"))
    }

    /// Processes a stream of messages up to the first one that the filter rejects.
    pub fn receive(&mut self, mut stream: &[u8]) {
        let mut is_negotiated = false;
        while let Some(head) = stream.get(..filter::HEAD) {
            let Some(message) = filter::size(head).ok().and_then(|size| stream.get(..size)) else {
                return;
            };
            if filter::check(message, is_negotiated).is_err() {
                return;
            }
            is_negotiated = true;
            self.act(message);
            stream = &stream[message.len()..];
        }
    }

    /// Makes the access that the crate makes for a message that has passed.
    fn act(&mut self, message: &[u8]) {
        let command = u16::from_le_bytes([message[2], message[3]]);
        if !matches!(command, 9 | 10) {
            return;
        }
        let word = |at| filter::word(message, at);
        let offset = u64::from(word(16)) | u64::from(word(20)) << 32;
        let (region, count) = (word(24), word(28) as usize);
        // An access outside the regions is an error, which the crate returns.
        let _ = match command {
            9 => self.0.region_read(region, offset, &mut vec![0; count]),
            _ => self.0.region_write(region, offset, &message[32..]),
        };
    }
}
