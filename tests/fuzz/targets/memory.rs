//! A window in the memory of one thread, which the fuzzer writes to.

use std::cell::RefCell;

use vgpu_transport::shm::memory::SharedWords;

pub(crate) struct Bytes(pub(crate) RefCell<Vec<u8>>);

impl Bytes {
    pub(crate) fn new(len: usize) -> Bytes {
        Bytes(RefCell::new(vec![0; len]))
    }

    /// A write by a hostile peer, at any offset.
    pub(crate) fn scribble(&self, at: usize, data: &[u8]) {
        let mut bytes = self.0.borrow_mut();
        let at = at % bytes.len();
        let end = bytes.len().min(at + data.len());
        bytes[at..end].copy_from_slice(&data[..end - at]);
    }
}

impl SharedWords for Bytes {
    fn load(&self, offset: usize) -> u64 {
        let mut word = [0; 8];
        self.read(offset, &mut word);
        u64::from_le_bytes(word)
    }

    fn store(&self, offset: usize, value: u64) {
        self.write(offset, &value.to_le_bytes());
    }

    fn read(&self, offset: usize, out: &mut [u8]) {
        assert!(offset.is_multiple_of(8), "a read at {offset}");
        out.copy_from_slice(&self.0.borrow()[offset..offset + out.len()]);
    }

    fn write(&self, offset: usize, data: &[u8]) {
        assert!(offset.is_multiple_of(8), "a write at {offset}");
        let padded = data.len().next_multiple_of(8);
        let mut bytes = self.0.borrow_mut();
        let place = &mut bytes[offset..offset + padded];
        place.fill(0);
        place[..data.len()].copy_from_slice(data);
    }

    fn drain_writes(&self) {}

    fn full_fence(&self) {}
}
