//! The pages that describe a window or a device, as written by a hostile host.

use vgpu_transport::link::pci::directory::{self, Directory};
use vgpu_transport::shm::layout::{self, Layout};
use vgpu_transport::shm::memory::SharedWords as _;

use super::memory::Bytes;
use super::session::input::Input;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let memory = Bytes::new(4096);
    let is_window = input.chance(2);
    let size = match is_window {
        true => layout::MIN_SIZE << input.below(4),
        false => directory::MIN_SIZE << input.below(4),
    };
    // Mostly valid, so that the reader does not stop early.
    match is_window {
        true => Layout::new(size, 5).expect("a good size").write(&memory),
        false => Directory::new(size, 5).expect("a good size").write(&memory),
    }
    while !input.is_empty() {
        let at = 8 * input.below(32);
        let value = match input.below(3) {
            0 => input.odd_number(),
            1 => u64::from(input.byte()) << 12,
            _ => memory.load(8 * input.below(32)),
        };
        memory.store(at, value);
    }
    if let Ok(layout) = Layout::read(&memory, size) {
        let parts = [layout.submission(), layout.completion(), layout.bulk()];
        let mut free_from = layout::PAGE;
        for part in parts {
            assert!(
                part.start >= free_from && part.end <= size,
                "{part:?} of {size}"
            );
            free_from = part.end;
        }
        assert!(layout.submission().len().is_power_of_two());
        assert!(layout.completion().len().is_power_of_two());
    }
    if let Ok(directory) = Directory::read(&memory, size) {
        assert!(directory.slots <= directory::SLOTS);
        for k in 0..directory.slots {
            let slot = directory.slot(k);
            assert!(
                slot.start >= directory::PAGE && slot.end <= size,
                "{slot:?} of {size}"
            );
        }
    }
}
