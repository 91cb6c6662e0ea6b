//! Ollama, the real program: built from its Go module, in the layout of a release.

mod client;
mod install;
mod instance;
pub(crate) mod stage;

pub(crate) use install::{VERSIONS, binary, lay_out, llama_cpp};
pub(crate) use instance::{Instance, Settings, to_gguf};
