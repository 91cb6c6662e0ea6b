//! The version stamp: two lines of text in the library file, which can be read without loading the
//! library.
//!
//! ```text
//! ggml-vgpu-stamp: plugin 0.1.0-dev.20261126134501+1a2b3c4d, ggml 0.20-0.25 (API 2), 0.26 (API 3)
//! ggml-vgpu-needs: ggml_version ggml_backend_buffer_init ...
//! ```
//!
//! A tool searches the file for the word before the colon and reads up to the zero byte. `vgpu
//! install` compares both lines with the ggml that it finds.

use crate::ggml::{needed, supported};

/// The beginning of the first line. Used at compile time only, so that the library file contains it
/// once.
const STAMP_WORDS: &str = "ggml-vgpu-stamp: ";

/// The first line. `#[used]` keeps the text in the file although no code refers to it.
#[used]
static STAMP: &str = concat!(
    "ggml-vgpu-stamp: plugin ",
    env!("VGPU_VERSION"),
    ", ggml ",
    supported!(),
    "\0"
);

/// The second line: the functions that a ggml must export.
#[used]
static NEEDS: &str = concat!("ggml-vgpu-needs: ", needed!(), "\0");

/// The version of the plugin and of the ggml that it works with, for a log line.
pub fn stamp() -> &'static str {
    &STAMP[const { STAMP_WORDS.len() }..STAMP.len() - 1]
}

/// The functions that a ggml must export, separated by spaces.
pub fn needs() -> &'static str {
    needed!()
}
