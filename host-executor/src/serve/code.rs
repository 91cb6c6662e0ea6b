//! The pages of the program's own file that are in memory: code and constants.
//!
//! Starting touches code all over the program (arguments, configuration, checks, sockets) that never runs again, and
//! the kernel maps the 15 pages around each page that is touched. So two thirds of what an executor has in memory when
//! its first guest comes is code that it is done with. The pages stay in the system's cache of files; those that run
//! again are mapped again, without a read from the disk.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};
use rustix::param::page_size;
use tracing::debug;

/// Lets go of the program's code and constants as far as they are in memory. What is needed comes back by itself.
pub(super) fn let_go() {
    for (start, len) in constant_parts() {
        // SAFETY: the range is part of a segment of this program that is mapped from its file for as long as the
        // process lives, and that nobody writes to, neither the program nor the dynamic linker (it is not writable and
        // its relocations, if any, are in segments that are). So each of its pages is what the file has, and touching
        // it again brings the same bytes back, for all threads, whatever they are doing now.
        if let Err(error) = unsafe { madvise(start.as_ptr(), len, Advice::LinuxDontNeed) } {
            debug!("{len} bytes of the program stay in memory: {error}");
        }
    }
}

/// The whole pages of the program's segments that are not writable: where each starts, and its bytes.
fn constant_parts() -> Vec<(NonNull<c_void>, usize)> {
    let mut parts = Vec::new();
    // SAFETY: the callback takes what it is given here: a vector that outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut parts).cast()) };
    parts
}

/// `dl_iterate_phdr` callback: adds the parts of the first object, which is the program, to the vector behind `parts`.
///
/// # Safety
/// `info` is valid during the call, and `parts` a `Vec<(NonNull<c_void>, usize)>` that nobody else uses.
unsafe extern "C" fn collect(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    parts: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise; the linker's table has `dlpi_phnum` entries.
    let (info, headers, parts) = unsafe {
        let info = &*info;
        (
            info,
            std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()),
            &mut *parts.cast::<Vec<(NonNull<c_void>, usize)>>(),
        )
    };
    let page = page_size();
    let constant = |header: &&libc::Elf64_Phdr| {
        header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0
    };
    for header in headers.iter().filter(constant) {
        let start = (info.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
        let end = (start + header.p_filesz as usize) / page * page;
        let start = start.next_multiple_of(page);
        if let Some(first) = NonNull::new(start as *mut c_void)
            && start < end
        {
            parts.push((first, end - start));
        }
    }
    1 // the others are libraries, which are not ours to judge
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kilobytes of files' pages that this process has mapped.
    fn mapped() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = { status.lines() }.find_map(|line| line.strip_prefix("RssFile:"));
        let kilobytes = line.unwrap().trim().strip_suffix(" kB").unwrap();
        kilobytes.parse().unwrap()
    }

    #[test]
    fn code_that_is_let_go_of_still_runs_and_is_out_of_memory() {
        let parts = constant_parts();
        let here = mapped as *const () as usize;
        let holds = |&(start, len): &(NonNull<c_void>, usize)| {
            (start.as_ptr() as usize..start.as_ptr() as usize + len).contains(&here)
        };
        assert_eq!(parts.iter().filter(|part| holds(part)).count(), 1);
        // All of it, so that there is something to let go of.
        let mut sum = 0u64;
        for &(start, len) in &parts {
            for at in (0..len).step_by(page_size()) {
                // SAFETY: a byte of a readable segment of this program.
                sum += u64::from(unsafe { start.cast::<u8>().add(at).read_volatile() });
            }
        }
        assert!(sum > 0);
        let all: usize = parts.iter().map(|(_, len)| len).sum();
        let before = mapped();
        assert!(before > all as u64 / 1024);
        let_go();
        let after = mapped();
        assert!(
            after < before - all as u64 / 1024 / 2,
            "{before} kB, then {after} kB"
        );
    }
}
