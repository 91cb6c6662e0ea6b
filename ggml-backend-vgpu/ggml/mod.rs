//! The ggml that has loaded us: found among the loaded objects, its functions resolved by name.
//!
//! The plugin is not linked with ggml. Which ggml runs it is known only when it is loaded: under
//! any file name, in the global scope or private to a library, as a shared object or inside the
//! executable. Programs with two of them exist. [`Ggml::find`] looks where the dynamic linker would
//! have looked:
//!
//! 1. in the global scope,
//! 2. in the object that is calling us, and in what that one depends on,
//! 3. in every loaded object, in load order.
//!
//! All functions come from the one object found; a mixture of two ggml is refused.

mod ids;
mod objects;
mod versions;

use std::ffi::{CStr, CString, c_char, c_void};

use thiserror::Error;

use crate::abi::{self, ApiVersion};
use objects::{Handle, Object, Symbol};

pub use ids::Ids;
pub(crate) use versions::supported;
pub use versions::{UnsupportedVersion, Version};

/// The functions that every ggml has and that we call, in words. A macro so that it can be part of
/// the stamp, which has to be a literal. [`GgmlObject::needed`] takes no others.
macro_rules! needed {
    () => {
        "ggml_version ggml_backend_buffer_init ggml_op_name ggml_unary_op_name ggml_glu_op_name \
         ggml_type_name"
    };
}
pub(crate) use needed;

/// What makes an object a ggml-base: it makes buffers.
const LANDMARK: &CStr = c"ggml_backend_buffer_init";

/// Came with API version 3. A development build carries the number of the release before it, so
/// this is better evidence than the number.
const LANDMARK_V3: &CStr = c"ggml_backend_buft_alloc_buffer_n";

/// The running ggml.
#[derive(Debug)]
pub struct Ggml {
    object: String,
    version: Version,
    release: String,
    api: ApiVersion,
    functions: Functions,
}

/// Why there is no ggml to work with.
#[derive(Debug, Error)]
pub enum GgmlError {
    /// No loaded object is a ggml.
    #[error(
        "no ggml in this process: none of its {} objects exports `{}`. A program that links ggml \
         statically must export its symbols (-rdynamic). Searched: {}",
        .searched.len(), LANDMARK.to_string_lossy(), .searched.join(", ")
    )]
    NoGgml {
        /// The names of all objects, in load order.
        searched: Vec<String>,
    },
    /// An object with the landmark, but without a function that every ggml has.
    #[error("{object} is not a complete ggml: it does not define `{symbol}`")]
    MissingSymbol {
        /// The incomplete object.
        object: String,
        /// The function it lacks.
        symbol: String,
    },
    /// A ggml that this plugin was not written for.
    #[error("{object}: {reason}")]
    Unsupported {
        /// The object it is in.
        object: String,
        /// What is wrong with its version.
        reason: UnsupportedVersion,
    },
}

/// The function that a C declaration `NAME_fn` stands for, without the null that C allows.
type Function<F> = <F as Nullable>::NonNull;

/// Implemented for the translated function pointers.
trait Nullable {
    type NonNull;
}

impl<F> Nullable for Option<F> {
    type NonNull = F;
}

/// What we call in ggml.
#[derive(Debug)]
struct Functions {
    buffer_init: Function<abi::ggml_backend_buffer_init_fn>,
    op_name: Function<abi::ggml_op_name_fn>,
    unary_op_name: Function<abi::ggml_unary_op_name_fn>,
    glu_op_name: Function<abi::ggml_glu_op_name_fn>,
    type_name: Function<abi::ggml_type_name_fn>,
    log_internal: Option<Function<abi::ggml_log_internal_fn>>,
    commit: Option<Function<abi::ggml_commit_fn>>,
}

impl Ggml {
    /// Finds the ggml of this process and keeps it loaded until the process ends.
    ///
    /// # Errors
    /// When there is none, or one that this plugin does not know.
    pub fn find() -> Result<Self, GgmlError> {
        let objects = Object::loaded();
        let (ggml, rivals) = locate(&objects)?;
        let version: Function<abi::ggml_version_fn>;
        let functions;
        // SAFETY: every symbol is paired with the type that vendor/ declares for it, which
        // tests/abi.rs compares with ggml's own declaration.
        unsafe {
            version = ggml.needed(c"ggml_version")?;
            functions = Functions {
                buffer_init: ggml.needed(LANDMARK)?,
                op_name: ggml.needed(c"ggml_op_name")?,
                unary_op_name: ggml.needed(c"ggml_unary_op_name")?,
                glu_op_name: ggml.needed(c"ggml_glu_op_name")?,
                type_name: ggml.needed(c"ggml_type_name")?,
                log_internal: ggml.function(c"ggml_log_internal").ok(),
                commit: ggml.function(c"ggml_commit").ok(),
            };
        }
        // SAFETY: ggml_version takes nothing and returns a string literal of the loaded object.
        let release = unsafe { text(version()) };
        let object = ggml.object.to_string();
        let (version, api) =
            versions::api_of(&release).map_err(|reason| GgmlError::Unsupported {
                object: object.clone(),
                reason,
            })?;
        let api = match ggml.symbol(LANDMARK_V3) {
            Some(_) => api.max(ApiVersion::V3),
            None => api,
        };
        ggml.handle.keep();
        let host = Self {
            object,
            version,
            release,
            api,
            functions,
        };
        if !rivals.is_empty() {
            host.log(
                abi::GGML_LOG_LEVEL_WARN,
                &format!(
                    "ggml-vgpu: several ggml in this process; using {}, not {}\n",
                    host.object,
                    rivals.join(", ")
                ),
            );
        }
        Ok(host)
    }

    /// The file it was loaded from, or `the executable`.
    pub fn object(&self) -> &str {
        &self.object
    }

    /// The release series.
    pub fn version(&self) -> Version {
        self.version
    }

    /// What `ggml_version()` says, for example `0.25.3-dirty`.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The commit it was built from, if it says so.
    pub fn commit(&self) -> Option<String> {
        // SAFETY: ggml_commit takes nothing and returns a string literal of an object that stays
        // loaded.
        self.functions
            .commit
            .map(|commit| unsafe { text(commit()) })
    }

    /// The plugin interface it speaks.
    pub fn api(&self) -> ApiVersion {
        self.api
    }

    /// Translates `ggml_tensor.op`.
    pub fn ops<T: Copy>(&self, parse: fn(&str) -> Option<T>) -> Ids<T> {
        // SAFETY: indexes an array of string literals, one for each id, of an object that stays
        // loaded.
        unsafe { Ids::new(self.functions.op_name, parse) }
    }

    /// Translates `ggml_tensor.op_params[0]` of a UNARY operator.
    pub fn unary_ops<T: Copy>(&self, parse: fn(&str) -> Option<T>) -> Ids<T> {
        // SAFETY: as for `ops`.
        unsafe { Ids::new(self.functions.unary_op_name, parse) }
    }

    /// Translates `ggml_tensor.op_params[0]` of a GLU operator.
    pub fn glu_ops<T: Copy>(&self, parse: fn(&str) -> Option<T>) -> Ids<T> {
        // SAFETY: as for `ops`.
        unsafe { Ids::new(self.functions.glu_op_name, parse) }
    }

    /// Translates `ggml_tensor.type_`.
    pub fn types<T: Copy>(&self, parse: fn(&str) -> Option<T>) -> Ids<T> {
        // SAFETY: as for `ops`, with null for types that have been retired.
        unsafe { Ids::new(self.functions.type_name, parse) }
    }

    /// Makes the buffer object that `alloc_buffer` returns. ggml owns it and deletes it after
    /// calling `free_buffer`.
    ///
    /// # Safety
    /// `buft` and all that the callbacks in `iface` reach through `context` must live until
    /// `free_buffer` is called.
    pub unsafe fn buffer(
        &self,
        buft: abi::ggml_backend_buffer_type_t,
        iface: abi::ggml_backend_buffer_i,
        context: *mut c_void,
        size: usize,
    ) -> abi::ggml_backend_buffer_t {
        // SAFETY: the function copies its arguments into a new object; the rest is our caller's
        // promise.
        unsafe { (self.functions.buffer_init)(buft, iface, context, size) }
    }

    /// Writes to ggml's log, where the program expects messages of its backends. ggml adds nothing:
    /// a line ends in a line feed.
    pub fn log(&self, level: abi::ggml_log_level, message: &str) {
        let Some(log) = self.functions.log_internal else {
            eprint!("{message}");
            return;
        };
        // A C string ends at its first zero byte, so does the message.
        let end = message.find('\0').unwrap_or(message.len());
        let message = CString::new(&message[..end]).unwrap_or_default();
        // SAFETY: the format asks for one C string, which outlives the call, and nothing in the
        // message is taken for a format. ggml copies what it keeps.
        unsafe { log(level, c"%s".as_ptr(), message.as_ptr()) };
    }
}

/// A loaded object that is a ggml.
struct GgmlObject<'a> {
    object: &'a Object,
    handle: Handle,
}

impl GgmlObject<'_> {
    /// The symbol `name`, if this very object defines it.
    fn symbol(&self, name: &CStr) -> Option<Symbol> {
        self.handle
            .find(name)
            .filter(|symbol| self.object.contains(*symbol))
    }

    /// The function `name`, which is one of those that the stamp says we need.
    ///
    /// # Safety
    /// As for [`GgmlObject::function`].
    unsafe fn needed<F: Copy>(&self, name: &CStr) -> Result<F, GgmlError> {
        debug_assert!(
            needed!()
                .split(' ')
                .any(|one| one.as_bytes() == name.to_bytes()),
            "{name:?} is missing from the list of needed functions"
        );
        // SAFETY: our caller's promise.
        unsafe { self.function(name) }
    }

    /// The function `name` of this very object.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to that function.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, GgmlError> {
        const { assert!(size_of::<F>() == size_of::<Symbol>()) };
        let symbol = self.symbol(name).ok_or_else(|| GgmlError::MissingSymbol {
            object: self.object.to_string(),
            symbol: name.to_string_lossy().into_owned(),
        })?;
        // SAFETY: the address of the function whose type the caller vouches for, and not null.
        Ok(unsafe { std::mem::transmute_copy(&symbol) })
    }
}

/// Finds ggml by its landmark. Also returns the names of other candidates, if nothing but the load
/// order spoke against them.
fn locate(objects: &[Object]) -> Result<(GgmlObject<'_>, Vec<String>), GgmlError> {
    let open = |object| {
        Some(GgmlObject {
            object,
            handle: Object::open(object)?,
        })
    };
    let global = || Object::containing(objects::find_global(LANDMARK)?, objects);
    let called_from = || {
        let caller = objects::caller(objects)?.open()?;
        Object::containing(caller.find(LANDMARK)?, objects)
    };
    if let Some(ggml) = global().or_else(called_from).and_then(open) {
        return Ok((ggml, Vec::new()));
    }
    let mut candidates = objects
        .iter()
        .filter(|object| object.defines(LANDMARK).is_some());
    let ggml = candidates
        .next()
        .and_then(open)
        .ok_or_else(|| GgmlError::NoGgml {
            searched: objects.iter().map(Object::to_string).collect(),
        })?;
    Ok((ggml, candidates.map(Object::to_string).collect()))
}

/// Copies a string of ggml's.
///
/// # Safety
/// `string` must be a C string or null.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: not null, so our caller promises a C string.
    unsafe { CStr::from_ptr(string) }
        .to_string_lossy()
        .into_owned()
}
