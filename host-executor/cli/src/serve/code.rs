//! The pages of programs' files that are in memory: code and constants.
//!
//! Starting touches code all over the program (arguments, configuration, checks, sockets) that never runs again, and
//! the kernel maps the 15 pages around each page that is touched. So most of what an executor has in memory when its
//! first guest comes is code that it is done with. The pages stay in the system's cache of files; those that run again
//! are mapped again, without a read from the disk.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};
use rustix::param::page_size;
use tracing::debug;

/// Whose code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    /// The program's.
    Program,
    /// The program's and that of all libraries. Only where those are the system's: what a driver does with its own code
    /// is not ours to judge.
    Everybody,
}

/// Lets go of code and constants as far as they are in memory. What is needed comes back by itself.
pub(super) fn let_go(whose: Whose) {
    for (start, len) in constant_parts(whose) {
        // SAFETY: the range is part of a segment that is mapped from its file for as long as the process lives (no
        // library is unloaded), and that nobody writes to, neither its code nor the dynamic linker: it is not writable,
        // and its relocations, if any, are in segments that are. So each of its pages is what the file has, and touching
        // it again brings the same bytes back, for all threads, whatever they are doing now.
        if let Err(error) = unsafe { madvise(start.as_ptr(), len, Advice::LinuxDontNeed) } {
            debug!("{len} bytes of code stay in memory: {error}");
        }
    }
}

/// Whole pages of segments that are not writable: where they start, and their bytes.
fn constant_parts(whose: Whose) -> Vec<(NonNull<c_void>, usize)> {
    let mut found = Found {
        whose,
        parts: Vec::new(),
    };
    // SAFETY: the callback takes what it is given here, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut found).cast()) };
    found.parts
}

struct Found {
    whose: Whose,
    parts: Vec<(NonNull<c_void>, usize)>,
}

/// `dl_iterate_phdr` callback: adds the parts of an object, of which the program is the first, to the [`Found`] behind
/// `found`.
///
/// # Safety
/// `info` is valid during the call, and nobody else uses `found`.
unsafe extern "C" fn collect(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise: `constant_parts` passes its `Found`, which nothing else touches during the call, and the
    // linker a description that is valid meanwhile, with a C string (or null) for the name.
    let (found, info, name) = unsafe {
        let info = &*info;
        let name =
            NonNull::new(info.dlpi_name.cast_mut()).map(|name| CStr::from_ptr(name.as_ptr()));
        (
            &mut *found.cast::<Found>(),
            info,
            name.unwrap_or_default().to_bytes(),
        )
    };
    let headers = match info.dlpi_phnum {
        0 => &[],
        // SAFETY: the linker keeps `dlpi_phnum` program headers at `dlpi_phdr` while the object is loaded, and holds its
        // lock during this call.
        count => unsafe { std::slice::from_raw_parts(info.dlpi_phdr, count.into()) },
    };
    // What has a name and no path is of the kernel and of no file.
    if !name.is_empty() && !name.contains(&b'/') {
        return 0;
    }
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
            found.parts.push((first, end - start));
        }
    }
    c_int::from(found.whose == Whose::Program) // the end, or go on
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
        let parts = constant_parts(Whose::Program);
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
        let_go(Whose::Program);
        let after = mapped();
        assert!(
            after < before - all as u64 / 1024 / 2,
            "{before} kB, then {after} kB"
        );
        // In the same test, as all tests share the pages. The C library works on.
        let_go(Whose::Everybody);
        assert!(mapped() > 0);
    }

    #[test]
    fn libraries_count_where_they_are_asked_for() {
        let program = constant_parts(Whose::Program);
        let all = constant_parts(Whose::Everybody);
        assert_eq!(all[..program.len()], program);
        assert!(all.len() >= program.len() + 2, "{all:?}");
    }
}
