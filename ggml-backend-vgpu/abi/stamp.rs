//! The version stamp: two lines of text that can be read from the library file without loading it.
//!
//! ```text
//! ggml-vgpu-stamp: plugin 0.1.0 (965ceec), ggml 0.21-0.25 (API 2), 0.26 (API 3)
//! ggml-vgpu-needs: ggml_version ggml_backend_buffer_init ...
//! ```
//!
//! A tool searches the file for the words before the colon and reads up to the zero byte. `vgpu install`
//! compares both with the ggml that it finds.

use crate::host::{needed, supported};

/// What the first line begins with. Used at compile time only: in the file it stands once.
const STAMP_WORDS: &str = "ggml-vgpu-stamp: ";

/// `#[used]` keeps the text in the file although no code refers to it.
#[used]
static STAMP: &str = concat!(
    "ggml-vgpu-stamp: plugin ",
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("VGPU_GIT"),
    "), ggml ",
    supported!(),
    "\0"
);

/// The functions that a ggml has to export.
#[used]
static NEEDS: &str = concat!("ggml-vgpu-needs: ", needed!(), "\0");

/// Which plugin this is and which ggml it works with, for a log line.
pub fn stamp() -> &'static str {
    &STAMP[const { STAMP_WORDS.len() }..STAMP.len() - 1]
}

/// The functions that a ggml has to export, separated by spaces.
pub fn needs() -> &'static str {
    needed!()
}
