//! What the constructors of a ggml write into nodes, read from its `ggml.c`, and the plugin's table
//! of what differs between releases (`ggml-backend-vgpu/translate/releases.rs`).

mod build;
mod constructors;
mod table;
#[cfg(test)]
mod tests;

pub(crate) use build::Build;
#[cfg(test)]
pub(crate) use constructors::Written;
pub(crate) use table::{TABLE, Table};
