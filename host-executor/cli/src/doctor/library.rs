//! Shared libraries in this process.

use std::ffi::{CStr, c_int, c_void};

/// Why the dynamic linker does not load a library.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkerError {
    /// The text of the dynamic linker.
    #[error("{0}")]
    Text(String),
    #[error("the dynamic linker does not say why")]
    Silent,
}

/// A shared library in this process. Never unloaded.
pub(super) struct Library(*mut c_void);

impl Library {
    /// Loads a library, and the libraries that it needs, with all of their symbols. `more`: further
    /// flags of `dlopen`.
    pub(super) fn load(name: &CStr, more: c_int) -> Result<Library, LinkerError> {
        // SAFETY: `name` is a terminated string. dlopen runs the initialisers of the library, which
        // the user or NVIDIA's driver has installed for that purpose.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | more) };
        if handle.is_null() {
            // SAFETY: dlerror returns null or a terminated string, which stays valid until the next
            // call of this thread.
            let error = unsafe {
                let error = libc::dlerror();
                (!error.is_null()).then(|| CStr::from_ptr(error).to_string_lossy().into_owned())
            };
            return Err(error.map_or(LinkerError::Silent, LinkerError::Text));
        }
        Ok(Library(handle))
    }

    /// The address of a symbol, if the library or one that it needs has the symbol.
    pub(super) fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is from dlopen and never closed; the name is a terminated string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }
}
