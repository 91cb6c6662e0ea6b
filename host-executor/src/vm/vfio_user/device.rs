//! The PCI function: configuration space, registers, the window.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use vfio_user::{DmaMapFlags, DmaUnmapFlags, ServerBackend};
use vgpu_transport::bytes::Bytes;
use vgpu_transport::link::pci::DOORBELL;
use vgpu_transport::link::pci::discover::{VGPU, VGPU_CLASS, VGPU_SUBSYSTEM};
use vgpu_transport::shm::memory::{MapError, Window};

/// Bytes of the region with the registers (BAR 0).
pub(super) const BAR0_SIZE: usize = 64 << 10;

/// Bytes of the configuration space.
pub(super) const CONFIG_SIZE: usize = 256;

/// The value of the register at 0: `VGPU` in memory order.
const ID: u32 = u32::from_le_bytes(*b"VGPU");
/// The value of the register at 4: the version of the registers.
const VERSION: u32 = 1;

/// Offsets in the configuration space (PCI Local Bus Specification 3.0, 6.1).
const COMMAND: usize = 0x04;
const BAR0: usize = 0x10;
const BAR1: usize = 0x14;
const INTERRUPT_LINE: usize = 0x3c;

/// Type bits of a BAR: 64 bits wide, prefetchable memory.
const BAR_64_PREFETCH: u32 = 0xc;

/// The bits of the command register that a guest can set: memory space, bus master.
const COMMAND_MASK: u8 = 0x06;

/// The PCI function of a virtual machine.
pub(super) struct Function {
    config: [u8; CONFIG_SIZE],
    window: Window,
    size: usize,
    bell: OwnedFd,
}

impl Function {
    pub(super) fn new(memory: OwnedFd, size: usize, bell: OwnedFd) -> Result<Function, MapError> {
        let mut config = [0; CONFIG_SIZE];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x00, &VGPU.0.to_le_bytes());
        put(0x02, &VGPU.1.to_le_bytes());
        put(0x09, &VGPU_CLASS.to_le_bytes()[..3]);
        put(BAR0, &0u32.to_le_bytes());
        // A 64-bit BAR takes the slots of BARs 1 and 2.
        put(BAR1, &BAR_64_PREFETCH.to_le_bytes());
        put(0x2c, &VGPU_SUBSYSTEM.0.to_le_bytes());
        put(0x2e, &VGPU_SUBSYSTEM.1.to_le_bytes());
        Ok(Function {
            config,
            window: Window::map(memory.as_fd(), size)?,
            size,
            bell,
        })
    }

    fn register(&self, offset: u64) -> u32 {
        match offset {
            0 => ID,
            4 => VERSION,
            8 => (self.size >> 20) as u32,
            _ => 0,
        }
    }

    /// The range of the window that an access is to. Monitors map the window, so such accesses are
    /// rare.
    fn part(&self, offset: u64, len: usize) -> io::Result<std::ops::Range<usize>> {
        let start = usize::try_from(offset).ok();
        start
            .and_then(|start| Some(start..start.checked_add(len)?))
            .filter(|part| part.end <= self.size)
            .ok_or_else(|| io::Error::other(OutsideWindow { offset, len }))
    }
}

/// A hypervisor accesses bytes that the window does not have.
#[derive(Debug, thiserror::Error)]
#[error("no {len} bytes at {offset:#x} in the window")]
struct OutsideWindow {
    offset: u64,
    len: usize,
}

impl ServerBackend for Function {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        match region {
            0 => {
                let at = |i: usize| {
                    let offset = offset.wrapping_add(i as u64);
                    self.register(offset & !3).to_le_bytes()[offset as usize & 3]
                };
                for (i, byte) in data.iter_mut().enumerate() {
                    *byte = at(i);
                }
            }
            1 => {
                let part = self.part(offset, data.len())?;
                self.window.bytes(part).copy_to(data);
            }
            7 => {
                for (i, byte) in data.iter_mut().enumerate() {
                    let at = usize::try_from(offset).ok().and_then(|o| o.checked_add(i));
                    *byte = at.and_then(|at| self.config.get(at)).copied().unwrap_or(0);
                }
            }
            _ => data.fill(0xff),
        }
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        match region {
            0 if offset == DOORBELL as u64 => {
                match rustix::io::write(&self.bell, &1u64.to_ne_bytes()) {
                    // A counter at its maximum is signalled already.
                    Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            1 => {
                let part = self.part(offset, data.len())?;
                self.window.bytes_mut(part).copy_from(Bytes::from(data));
            }
            7 => {
                for (i, byte) in data.iter().enumerate() {
                    match usize::try_from(offset).ok().and_then(|o| o.checked_add(i)) {
                        Some(COMMAND) => self.config[COMMAND] = byte & COMMAND_MASK,
                        Some(INTERRUPT_LINE) => self.config[INTERRUPT_LINE] = *byte,
                        // The hypervisor emulates the BARs. All other registers are read-only.
                        _ => {}
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The device does not read the guest's memory. The filter has closed the file.
    fn dma_map(
        &mut self,
        _: DmaMapFlags,
        _: u64,
        _: u64,
        _: u64,
        _: Option<File>,
    ) -> io::Result<()> {
        Ok(())
    }

    fn dma_unmap(&mut self, _: DmaUnmapFlags, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    /// A reset machine discovers the device again. Nothing else has state to reset.
    fn reset(&mut self) -> io::Result<()> {
        self.config[COMMAND] = 0;
        Ok(())
    }

    /// The function has no interrupts.
    fn set_irqs(&mut self, _: u32, _: u32, _: u32, _: u32, _: Vec<File>) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::shm::doorbell::new_eventfd;
    use vgpu_transport::shm::memory::sealed_file;

    #[test]
    fn nothing_beyond_the_window_is_touched() {
        let size = 1 << 20;
        let memory = sealed_file(size).unwrap();
        let mut function = Function::new(memory, size, new_eventfd().unwrap()).unwrap();
        for offset in [size as u64 - 4, size as u64, u64::MAX - 3, u64::MAX] {
            function.region_read(1, offset, &mut [0; 8]).unwrap_err();
            function.region_write(1, offset, &[1; 8]).unwrap_err();
            // Registers and configuration space read as zero there, and ignore writes.
            for region in [0, 2, CONFIG_REGION, 8, u32::MAX] {
                function.region_read(region, offset, &mut [0; 8]).unwrap();
                function.region_write(region, offset, &[1; 8]).unwrap();
            }
        }
        function.region_write(1, size as u64 - 8, &[7; 8]).unwrap();
        let mut out = [0; 8];
        function.region_read(1, size as u64 - 8, &mut out).unwrap();
        assert_eq!(out, [7; 8]);
    }

    /// Index of the configuration space region.
    const CONFIG_REGION: u32 = 7;
}
