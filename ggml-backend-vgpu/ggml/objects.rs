//! The objects that the dynamic linker has loaded into this process, and the symbols that they
//! define.
//!
//! Nothing here loads an object: a handle is taken with `RTLD_NOLOAD`, which finds loaded objects
//! only.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::{fmt, slice};

/// The address of a symbol.
pub(super) type Symbol = NonNull<c_void>;

/// A loaded object: the executable or a shared library.
#[derive(Debug)]
pub(super) struct Object {
    /// The name that the object was loaded by; empty for the executable.
    name: CString,
    /// The addresses of its segments.
    segments: Vec<Range<usize>>,
}

/// A reference that keeps an object loaded.
#[derive(Debug)]
pub(super) struct Handle(Symbol);

impl Object {
    /// All objects in load order, the executable first.
    pub(super) fn loaded() -> Vec<Self> {
        let mut objects: Vec<Self> = Vec::new();
        // SAFETY: `collect` gets a pointer to `objects`, which lives until the call returns and is
        // not used otherwise during the call. `collect` does not unwind: it allocates and pushes.
        unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut objects).cast()) };
        objects
    }

    /// The object that has `address` in one of its segments.
    pub(super) fn containing(address: Symbol, objects: &[Self]) -> Option<&Self> {
        objects.iter().find(|object| object.contains(address))
    }

    pub(super) fn contains(&self, address: Symbol) -> bool {
        let address = address.as_ptr().addr();
        self.segments
            .iter()
            .any(|segment| segment.contains(&address))
    }

    /// A handle to the object. `None` if the object is not one of the dynamic linker (the kernel's
    /// vDSO), or was unloaded meanwhile.
    pub(super) fn open(&self) -> Option<Handle> {
        let name = if self.name.is_empty() {
            ptr::null()
        } else {
            self.name.as_ptr()
        };
        // SAFETY: `name` is null, which means the executable, or a C string that lives until the
        // call returns. With RTLD_NOLOAD no initialiser of another object runs.
        let handle = unsafe { libc::dlopen(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        NonNull::new(handle).map(Handle)
    }

    /// The symbol `name`, if the object itself defines and exports it.
    pub(super) fn defines(&self, name: &CStr) -> Option<Symbol> {
        self.open()?
            .find(name)
            .filter(|symbol| self.contains(*symbol))
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.to_string_lossy().as_ref() {
            "" => f.write_str("the executable"),
            name => f.write_str(name),
        }
    }
}

impl Handle {
    /// The symbol `name` of the object or, if the object does not define it, of an object that it
    /// depends on.
    pub(super) fn find(&self, name: &CStr) -> Option<Symbol> {
        // SAFETY: the handle is open as long as `self` lives, and `name` is a C string.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }

    /// Keeps the object loaded until the process ends.
    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle comes from `dlopen` and is closed once. The handle is not the last
        // reference to the object, which was loaded before the handle was taken, so that no
        // finaliser runs.
        unsafe { libc::dlclose(self.0.as_ptr()) };
    }
}

/// The symbol `name` in the global scope: that of the executable, the objects that it was linked
/// with, and those that were loaded with `RTLD_GLOBAL`.
pub(super) fn find_global(name: &CStr) -> Option<Symbol> {
    // SAFETY: `name` is a C string.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}

/// The object that has called the plugin, according to the return addresses on the stack.
pub(super) fn caller(objects: &[Object]) -> Option<&Object> {
    let own = NonNull::new(collect as *mut c_void)?;
    let own = Object::containing(own, objects)?;
    let mut walk = Walk { own, caller: None };
    // SAFETY: `step` gets a pointer to `walk`, which lives until the call returns and is not used
    // otherwise during the call.
    unsafe { _Unwind_Backtrace(step, (&raw mut walk).cast()) };
    Object::containing(walk.caller?, objects)
}

/// `dl_iterate_phdr` callback: appends one object to the vector behind `objects`.
unsafe extern "C" fn collect(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    objects: *mut c_void,
) -> c_int {
    // SAFETY: `objects` is the vector of `loaded`, which nobody else uses during the call. The
    // linker passes a description that is valid during the call, whose name is null or a C string.
    let (objects, info, name) = unsafe {
        let info = &*info;
        let name =
            NonNull::new(info.dlpi_name.cast_mut()).map(|name| CStr::from_ptr(name.as_ptr()));
        (
            &mut *objects.cast::<Vec<Object>>(),
            info,
            name.unwrap_or_default(),
        )
    };
    let headers = match info.dlpi_phnum {
        0 => &[],
        // SAFETY: an object has `dlpi_phnum` program headers at `dlpi_phdr` while it is loaded, and
        // the linker unloads none during the call, because it holds its lock.
        count => unsafe { slice::from_raw_parts(info.dlpi_phdr, count.into()) },
    };
    let segments = headers
        .iter()
        .filter(|header| header.p_type == libc::PT_LOAD)
        .map(|header| {
            let start = (info.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
            start..start.wrapping_add(header.p_memsz as usize)
        })
        .collect();
    objects.push(Object {
        name: name.to_owned(),
        segments,
    });
    0
}

/// The state of a walk up the stack.
struct Walk<'a> {
    own: &'a Object,
    caller: Option<Symbol>,
}

/// `_Unwind_Backtrace` callback: stops at the first frame outside the plugin's own object.
unsafe extern "C" fn step(frame: *mut UnwindContext, walk: *mut c_void) -> c_int {
    // SAFETY: `walk` is the `Walk` of `caller`, which nobody else uses during the call. The
    // unwinder passes a frame that is valid during the call.
    let (walk, address) = unsafe { (&mut *walk.cast::<Walk<'_>>(), _Unwind_GetIP(frame)) };
    match NonNull::new(ptr::without_provenance_mut(address)) {
        Some(address) if !walk.own.contains(address) => {
            walk.caller = Some(address);
            URC_NORMAL_STOP
        }
        _ => URC_NO_REASON,
    }
}

/// A stack frame, as the unwinder sees it.
#[repr(C)]
struct UnwindContext {
    opaque: [u8; 0],
}

/// `_URC_NO_REASON`: go on.
const URC_NO_REASON: c_int = 0;
/// `_URC_NORMAL_STOP`: stop.
const URC_NORMAL_STOP: c_int = 4;

// The unwinder of the Itanium C++ ABI. Rust's standard library uses it for panics and links it.
unsafe extern "C" {
    fn _Unwind_Backtrace(
        step: unsafe extern "C" fn(*mut UnwindContext, *mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(frame: *mut UnwindContext) -> usize;
}

const _: () = assert!(size_of::<c_char>() == 1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_executable_is_the_first_object_and_holds_this_test() {
        let objects = Object::loaded();
        let here = NonNull::new(collect as *mut c_void).expect("a function has an address");
        let own = Object::containing(here, &objects).expect("this code is loaded");
        assert!(ptr::eq(own, &raw const objects[0]));
        assert_eq!(own.to_string(), "the executable");
        assert!(own.open().is_some());
    }

    #[test]
    fn a_symbol_belongs_to_the_object_that_defines_it() {
        let objects = Object::loaded();
        let definers: Vec<String> = objects
            .iter()
            .filter(|object| object.defines(c"dl_iterate_phdr").is_some())
            .map(Object::to_string)
            .collect();
        // The executable uses the function and finds it through its handle, but does not define it.
        assert_eq!(definers.len(), 1, "{definers:?}");
        assert!(definers[0].contains("libc"), "{definers:?}");

        let symbol = find_global(c"dl_iterate_phdr").expect("libc is in the global scope");
        let owner = Object::containing(symbol, &objects).expect("libc is loaded");
        assert_eq!(owner.to_string(), definers[0]);
        assert!(find_global(c"a symbol that nobody has").is_none());
    }

    #[test]
    fn the_first_frame_outside_the_executable_is_the_thread_start() {
        let objects = Object::loaded();
        let caller = caller(&objects).expect("a thread is started by libc");
        assert!(caller.to_string().contains("libc"), "{caller}");
    }
}
