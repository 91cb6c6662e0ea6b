//! ggml's C interface for backends: structures, constants and function types, and the
//! [releases](versions) that have it. The plugin implements the interface, and the engine `ggml`
//! calls it.
//!
//! The names are those of C. The headers `vendor/ggml-abi-*.h` declare and describe them.
//! `build.rs` translates the headers and asserts every size and offset at compile time.
//! `tests/abi.rs` compares the headers with those of real ggml releases.
//!
//! One structure depends on the version of the interface: [`BufferType`].

pub mod versions;

pub use bindings::*;

/// The translated headers.
#[allow(missing_docs, non_camel_case_types, unreachable_pub)] // C's names, documented in C
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/ggml_abi.rs"));
}

/// The translated headers as text, for the test that compares them with ggml's.
pub const BINDINGS: &str = include_str!(concat!(env!("OUT_DIR"), "/ggml_abi.rs"));

/// The function type of the C declaration `NAME_fn`, without null, which C allows.
pub type Function<F> = <F as Nullable>::NonNull;

/// A function pointer of the bindings, which may be null.
pub trait Nullable {
    /// The function pointer that is not null.
    type NonNull;
}

impl<F> Nullable for Option<F> {
    type NonNull = F;
}

/// `GGML_BACKEND_API_VERSION` of a ggml that the plugin supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(i32)]
pub enum ApiVersion {
    /// ggml 0.20 to 0.25.
    V2 = GGML_BACKEND_API_VERSION_V2 as i32,
    /// ggml 0.26.
    V3 = GGML_BACKEND_API_VERSION_V3 as i32,
}

impl ApiVersion {
    /// The number for `ggml_backend_reg.api_version`.
    pub const fn number(self) -> i32 {
        self as i32
    }
}

/// A buffer type object in the layout of one API version.
///
/// `device` and `context` follow a table of callbacks whose length depends on the version, so that
/// a callback cannot find its context without knowing the version. The plugin therefore puts this
/// object first in a `repr(C)` structure of its own, behind which it finds its data.
#[derive(Clone, Copy)]
#[repr(C)]
pub union BufferType {
    v2: ggml_backend_buffer_type_v2,
    v3: ggml_backend_buffer_type_v3,
}

impl BufferType {
    /// `newest` in the layout of version `api`. Callbacks that the version lacks are dropped: they
    /// are optional in every version that has them.
    pub fn new(api: ApiVersion, newest: ggml_backend_buffer_type_v3) -> Self {
        match api {
            ApiVersion::V2 => Self { v2: newest.into() },
            ApiVersion::V3 => Self { v3: newest },
        }
    }
}

impl From<ggml_backend_buffer_type_v3> for ggml_backend_buffer_type_v2 {
    fn from(newest: ggml_backend_buffer_type_v3) -> Self {
        let ggml_backend_buffer_type_v3 {
            iface,
            device,
            context,
        } = newest;
        let iface = ggml_backend_buffer_type_i_v2 {
            get_name: iface.get_name,
            alloc_buffer: iface.alloc_buffer,
            get_alignment: iface.get_alignment,
            get_max_size: iface.get_max_size,
            get_alloc_size: iface.get_alloc_size,
            is_host: iface.is_host,
        };
        Self {
            iface,
            device,
            context,
        }
    }
}

// An id of ggml fits the `int` that replaces its enum.
const _: () = assert!(size_of::<std::ffi::c_int>() == size_of::<i32>());
