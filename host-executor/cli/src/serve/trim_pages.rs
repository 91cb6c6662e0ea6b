//! Unmaps the code pages that only the start of the program has used.
//!
//! The start of the program (arguments, configuration, checks, sockets) touches code in many
//! places, and the kernel maps the 15 pages around each touched page. Most file-backed memory of an
//! executor is therefore code that does not run again. The pages stay in the page cache; a page
//! that is used again is mapped again without a disk read.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};
use rustix::param::page_size;
use tracing::debug;

/// Whose code is unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// The code of the program.
    Program,
    /// The code of the program and of all libraries. Not for processes with drivers, which may
    /// treat their own code specially.
    AllObjects,
}

/// Unmaps the resident pages of code and constants. Pages that are used again are mapped again by
/// the kernel.
pub(super) fn trim(scope: Scope) {
    for (start, len) in constant_parts(scope) {
        // SAFETY: the range is in a segment that is mapped from its file while the process lives,
        // since no library is unloaded. The segment is not writable and has no relocations applied,
        // so each page equals the file, and the next access of any thread maps the same bytes
        // again.
        if let Err(error) = unsafe { madvise(start.as_ptr(), len, Advice::LinuxDontNeed) } {
            debug!("{len} bytes of code cannot be unmapped: {error}");
        }
    }
}

/// The whole pages of segments that are not writable: start and length in bytes.
fn constant_parts(scope: Scope) -> Vec<(NonNull<c_void>, usize)> {
    let mut found = Found {
        scope,
        parts: Vec::new(),
    };
    // SAFETY: the callback gets a pointer to `found`, which outlives the call, and nothing else
    // uses `found` meanwhile.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut found).cast()) };
    found.parts
}

struct Found {
    scope: Scope,
    parts: Vec<(NonNull<c_void>, usize)>,
}

/// `dl_iterate_phdr` callback: adds the parts of an object, of which the program is the first, to
/// the [`Found`] behind `found`.
///
/// # Safety
/// `info` is valid during the call. `found` points to a [`Found`] that nothing else uses during the
/// call.
unsafe extern "C" fn collect(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: by this function's contract `found` is exclusive and `info` is valid. The dynamic
    // linker sets `dlpi_name` to null or to a C string that lives as long as the object.
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
        // SAFETY: the dynamic linker keeps `dlpi_phnum` program headers at `dlpi_phdr` while the
        // object is loaded, and holds its lock during this call, so the object stays loaded.
        count => unsafe { std::slice::from_raw_parts(info.dlpi_phdr, count.into()) },
    };
    // An object with a name that is no path belongs to the kernel (the vDSO), and to no file.
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
    c_int::from(found.scope == Scope::Program) // nonzero ends the iteration
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kilobytes of file-backed memory of this process.
    fn mapped() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = { status.lines() }.find_map(|line| line.strip_prefix("RssFile:"));
        let kilobytes = line.unwrap().trim().strip_suffix(" kB").unwrap();
        kilobytes.parse().unwrap()
    }

    #[test]
    fn trimmed_code_pages_are_not_resident_and_still_execute() {
        let parts = constant_parts(Scope::Program);
        let here = mapped as *const () as usize;
        let holds = |&(start, len): &(NonNull<c_void>, usize)| {
            (start.as_ptr() as usize..start.as_ptr() as usize + len).contains(&here)
        };
        assert_eq!(parts.iter().filter(|part| holds(part)).count(), 1);
        // Touches every page, so that there is something to trim.
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
        trim(Scope::Program);
        let after = mapped();
        assert!(
            after < before - all as u64 / 1024 / 2,
            "{before} kB, then {after} kB"
        );
        // In the same test, since all tests share the pages. The C library still works.
        trim(Scope::AllObjects);
        assert!(mapped() > 0);
    }

    #[test]
    fn libraries_are_in_the_scope_of_all_objects() {
        let program = constant_parts(Scope::Program);
        let all = constant_parts(Scope::AllObjects);
        assert_eq!(all[..program.len()], program);
        assert!(all.len() >= program.len() + 2, "{all:?}");
    }
}
