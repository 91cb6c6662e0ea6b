//! The parts of `cargo xtask test`.

mod clean_debian;
pub(crate) mod demo;
pub(crate) mod dependencies;
pub(crate) mod deploy;
pub(crate) mod documentation;
pub(crate) mod failures;
pub(crate) mod faults;
pub(crate) mod generation;
mod ggml_cuda;
mod images;
pub(crate) mod kernels;
pub(crate) mod lints;
pub(crate) mod models;
pub(crate) mod ollama;
mod ollama_events;
pub(crate) mod ops;
mod ops_vulkan;
pub(crate) mod packages;
pub(crate) mod programs;
pub(crate) mod unit;
pub(crate) mod vm;
