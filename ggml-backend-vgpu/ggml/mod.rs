//! The ggml of this process: found among the loaded objects, with its functions resolved by name.
//!
//! The plugin is not linked with ggml. A program may load ggml under any file name, in the global
//! scope or private to a library, as a shared object or inside the executable, and more than once.
//! [`Ggml::find`] looks where the dynamic linker would have looked:
//!
//! 1. in the global scope,
//! 2. in the object that calls the plugin, and in what that object depends on,
//! 3. in every loaded object, in load order.
//!
//! All functions come from the one object that is found.

mod ids;
mod objects;

use std::ffi::{CStr, CString, c_char, c_void};

use thiserror::Error;

use crate::abi::{self, ApiVersion, Function};
use objects::{Handle, Object, Symbol};

pub(crate) use abi::supported;
pub use abi::versions::{UnsupportedVersion, Version};
pub use ids::Ids;

/// The functions that the plugin calls and that every ggml has, separated by spaces. A macro,
/// because the version stamp is a literal. [`GgmlObject::needed`] accepts no other names.
macro_rules! needed {
    () => {
        "ggml_version ggml_backend_buffer_init ggml_op_name ggml_unary_op_name ggml_glu_op_name \
         ggml_type_name ggml_nbytes"
    };
}
pub(crate) use needed;

/// An object that exports this function is a ggml.
const MARKER_SYMBOL: &CStr = c"ggml_backend_buffer_init";

/// The ggml of this process.
#[derive(Debug)]
pub struct Ggml {
    object: String,
    version: Version,
    release: String,
    api: ApiVersion,
    functions: Functions,
}

/// Why there is no usable ggml.
#[derive(Debug, Error)]
pub enum GgmlError {
    /// No loaded object is a ggml.
    #[error(
        "no ggml in this process: none of its {} objects exports `{}`. A program that links ggml \
         statically must export its symbols (-rdynamic). Searched: {}",
        .searched.len(), MARKER_SYMBOL.to_string_lossy(), .searched.join(", ")
    )]
    NoGgml {
        /// The names of all objects, in load order.
        searched: Vec<String>,
    },
    /// The object is a ggml, but lacks a function that every ggml has.
    #[error("{object} is not a complete ggml: it does not define `{symbol}`")]
    MissingSymbol {
        /// The object.
        object: String,
        /// The function.
        symbol: String,
    },
    /// The plugin does not support this release of ggml.
    #[error("{object}: {reason}")]
    Unsupported {
        /// The object.
        object: String,
        /// Why the release is not supported.
        reason: UnsupportedVersion,
    },
}

/// The functions of ggml that the plugin calls.
#[derive(Debug)]
struct Functions {
    buffer_init: Function<abi::ggml_backend_buffer_init_fn>,
    op_name: Function<abi::ggml_op_name_fn>,
    unary_op_name: Function<abi::ggml_unary_op_name_fn>,
    glu_op_name: Function<abi::ggml_glu_op_name_fn>,
    type_name: Function<abi::ggml_type_name_fn>,
    nbytes: Function<abi::ggml_nbytes_fn>,
    log_internal: Option<Function<abi::ggml_log_internal_fn>>,
    commit: Option<Function<abi::ggml_commit_fn>>,
}

impl Ggml {
    /// Finds the ggml of this process and keeps it loaded until the process ends.
    ///
    /// # Errors
    ///
    /// [`GgmlError`] if there is no ggml, or if the plugin does not support it.
    pub fn find() -> Result<Self, GgmlError> {
        let objects = Object::loaded();
        let (ggml, rivals) = locate(&objects)?;
        let version: Function<abi::ggml_version_fn>;
        let functions;
        // SAFETY: the type of each symbol is that of its declaration in vendor/, which tests/abi.rs
        // compares with the declaration in ggml's headers.
        unsafe {
            version = ggml.needed(c"ggml_version")?;
            functions = Functions {
                buffer_init: ggml.needed(MARKER_SYMBOL)?,
                op_name: ggml.needed(c"ggml_op_name")?,
                unary_op_name: ggml.needed(c"ggml_unary_op_name")?,
                glu_op_name: ggml.needed(c"ggml_glu_op_name")?,
                type_name: ggml.needed(c"ggml_type_name")?,
                nbytes: ggml.needed(c"ggml_nbytes")?,
                log_internal: ggml.function(c"ggml_log_internal").ok(),
                commit: ggml.function(c"ggml_commit").ok(),
            };
        }
        // SAFETY: `ggml_version` takes no argument and returns a string literal of the object,
        // which is loaded as long as `ggml` holds its handle.
        let release = unsafe { text(version()) };
        let object = ggml.object.to_string();
        let v3_symbol = CString::new(abi::versions::V3_SYMBOL).expect("a name without a zero");
        let has_v3_symbol = ggml.symbol(&v3_symbol).is_some();
        let (version, api) =
            abi::versions::api_of_build(&release, has_v3_symbol).map_err(|reason| {
                GgmlError::Unsupported {
                    object: object.clone(),
                    reason,
                }
            })?;
        ggml.handle.keep();
        let found = Self {
            object,
            version,
            release,
            api,
            functions,
        };
        if !rivals.is_empty() {
            found.log(
                abi::GGML_LOG_LEVEL_WARN,
                &format!(
                    "ggml-vgpu: several ggml in this process; using {}, not {}\n",
                    found.object,
                    rivals.join(", ")
                ),
            );
        }
        Ok(found)
    }

    /// The file that ggml was loaded from, or `the executable`.
    pub fn object(&self) -> &str {
        &self.object
    }

    /// The release series.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The answer of `ggml_version()`, for example `0.25.3-dirty`.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The commit that ggml was built from, if ggml says so.
    pub fn commit(&self) -> Option<String> {
        // SAFETY: `ggml_commit` takes no argument and returns a string literal of an object that is
        // never unloaded.
        self.functions
            .commit
            .map(|commit| unsafe { text(commit()) })
    }

    /// The version of the plugin interface.
    pub fn api(&self) -> ApiVersion {
        self.api
    }

    /// Translates `ggml_tensor.op`. `parse` translates a name.
    pub fn ops<T: Copy>(&self, parse: fn(&str) -> Option<T>) -> Ids<T> {
        // SAFETY: `ggml_op_name` indexes an array with one string literal for each id, in an object
        // that is never unloaded.
        unsafe { Ids::new(self.functions.op_name, parse) }
    }

    /// Translates `ggml_tensor.op_params[0]` of a UNARY operator. `parse` translates a name.
    pub fn unary_ops<T: Copy>(&self, parse: fn(&str) -> Option<T>) -> Ids<T> {
        // SAFETY: `ggml_unary_op_name` indexes an array with one string literal for each id, in an
        // object that is never unloaded.
        unsafe { Ids::new(self.functions.unary_op_name, parse) }
    }

    /// Translates `ggml_tensor.op_params[0]` of a GLU operator. `parse` translates a name.
    pub fn glu_ops<T: Copy>(&self, parse: fn(&str) -> Option<T>) -> Ids<T> {
        // SAFETY: `ggml_glu_op_name` indexes an array with one string literal for each id, in an
        // object that is never unloaded.
        unsafe { Ids::new(self.functions.glu_op_name, parse) }
    }

    /// Translates `ggml_tensor.type_`. `parse` translates a name.
    pub fn types<T: Copy>(&self, parse: fn(&str) -> Option<T>) -> Ids<T> {
        // SAFETY: `ggml_type_name` indexes an array with one string literal for each id, or null
        // for a type that ggml has removed, in an object that is never unloaded.
        unsafe { Ids::new(self.functions.type_name, parse) }
    }

    /// The bytes from the first to the last element of a tensor.
    ///
    /// # Safety
    ///
    /// `tensor` must be a valid tensor of this ggml.
    pub unsafe fn nbytes(&self, tensor: &abi::ggml_tensor) -> usize {
        // SAFETY: the tensor is valid (this function's contract), and `ggml_nbytes` reads its type,
        // dimensions and strides only.
        unsafe { (self.functions.nbytes)(tensor) }
    }

    /// Makes the buffer object that `alloc_buffer` returns. ggml owns the object and frees it after
    /// it has called `free_buffer`. Null if ggml has no memory.
    ///
    /// # Safety
    ///
    /// `buft`, and everything that the callbacks in `iface` use through `context`, must live until
    /// ggml calls `free_buffer`.
    pub unsafe fn buffer(
        &self,
        buft: abi::ggml_backend_buffer_type_t,
        iface: abi::ggml_backend_buffer_i,
        context: *mut c_void,
        size: usize,
    ) -> abi::ggml_backend_buffer_t {
        // SAFETY: `ggml_backend_buffer_init` copies its arguments into a new object. What the
        // object uses later lives long enough: this function's contract.
        unsafe { (self.functions.buffer_init)(buft, iface, context, size) }
    }

    /// Writes `message` to ggml's log, which is where a program expects the messages of its
    /// backends. The message must end with a line feed: ggml adds none.
    pub fn log(&self, level: abi::ggml_log_level, message: &str) {
        let Some(log) = self.functions.log_internal else {
            eprint!("{message}");
            return;
        };
        // A C string ends at its first zero byte, and so does the message.
        let end = message.find('\0').unwrap_or(message.len());
        let message = CString::new(&message[..end]).unwrap_or_default();
        // SAFETY: the format takes one C string, which lives until the call returns. ggml copies
        // what it keeps.
        unsafe { log(level, c"%s".as_ptr(), message.as_ptr()) };
    }
}

/// A loaded object that is a ggml, with a handle that keeps it loaded.
struct GgmlObject<'a> {
    object: &'a Object,
    handle: Handle,
}

impl GgmlObject<'_> {
    /// The symbol `name`, if the object itself defines it.
    fn symbol(&self, name: &CStr) -> Option<Symbol> {
        self.handle
            .find(name)
            .filter(|symbol| self.object.contains(*symbol))
    }

    /// The function `name`, one of those in the list `needed!`.
    ///
    /// # Errors
    ///
    /// [`GgmlError::MissingSymbol`] if the object does not define the function.
    ///
    /// # Safety
    ///
    /// `F` must be the type of a pointer to the function.
    unsafe fn needed<F: Copy>(&self, name: &CStr) -> Result<F, GgmlError> {
        debug_assert!(
            needed!()
                .split(' ')
                .any(|one| one.as_bytes() == name.to_bytes()),
            "{name:?} is missing from the list of needed functions"
        );
        // SAFETY: `F` is the type of the function: this function's contract.
        unsafe { self.function(name) }
    }

    /// The function `name`, if the object itself defines it.
    ///
    /// # Errors
    ///
    /// [`GgmlError::MissingSymbol`] if the object does not define the function.
    ///
    /// # Safety
    ///
    /// `F` must be the type of a pointer to the function.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, GgmlError> {
        const { assert!(size_of::<F>() == size_of::<Symbol>()) };
        let symbol = self.symbol(name).ok_or_else(|| GgmlError::MissingSymbol {
            object: self.object.to_string(),
            symbol: name.to_string_lossy().into_owned(),
        })?;
        // SAFETY: `symbol` is the address of the function and not null, `F` is the type of a
        // pointer to the function (this function's contract), and the sizes are equal (asserted
        // above).
        Ok(unsafe { std::mem::transmute_copy(&symbol) })
    }
}

/// Finds the object that is ggml. Also returns the names of the other candidates, if only the load
/// order spoke for the first.
fn locate(objects: &[Object]) -> Result<(GgmlObject<'_>, Vec<String>), GgmlError> {
    let open = |object| {
        Some(GgmlObject {
            object,
            handle: Object::open(object)?,
        })
    };
    let global = || Object::containing(objects::find_global(MARKER_SYMBOL)?, objects);
    let called_from = || {
        let caller = objects::caller(objects)?.open()?;
        Object::containing(caller.find(MARKER_SYMBOL)?, objects)
    };
    if let Some(ggml) = global().or_else(called_from).and_then(open) {
        return Ok((ggml, Vec::new()));
    }
    let mut candidates = objects
        .iter()
        .filter(|object| object.defines(MARKER_SYMBOL).is_some());
    let ggml = candidates
        .next()
        .and_then(open)
        .ok_or_else(|| GgmlError::NoGgml {
            searched: objects.iter().map(Object::to_string).collect(),
        })?;
    Ok((ggml, candidates.map(Object::to_string).collect()))
}

/// A copy of a string of ggml; empty if the pointer is null.
///
/// # Safety
///
/// `string` must be null or a C string.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: a C string, because it is not null: this function's contract.
    unsafe { CStr::from_ptr(string) }
        .to_string_lossy()
        .into_owned()
}
