//! The version stamp: one line of text that can be read from the library file without loading it.
//!
//! ```text
//! ggml-vgpu-stamp: plugin 0.1.0 (965ceec), ggml 0.21-0.25 (API 2), 0.26 (API 3)
//! ```
//!
//! A tool searches the file for the words before the colon and reads up to the zero byte.

use crate::host::supported;

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

/// Which plugin this is and which ggml it works with, for a log line.
pub fn stamp() -> &'static str {
    STAMP
        .trim_start_matches("ggml-vgpu-stamp: ")
        .trim_end_matches('\0')
}
