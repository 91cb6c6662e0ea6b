//! The fuzz targets, one module each. A target turns bytes into a test case and panics if a check
//! fails.
//!
//! `session` runs all code behind the link. Each other target runs one reader of hostile input, a
//! hundred times as often in the same time.

#[path = "../session/mod.rs"]
pub(crate) mod session;

pub(crate) mod batch;
pub(crate) mod codec;
pub(crate) mod config;
pub(crate) mod device;
pub(crate) mod frames;
pub(crate) mod gguf;
pub(crate) mod graph;
pub(crate) mod memory;
pub(crate) mod monitor;
pub(crate) mod pages;
pub(crate) mod ring;
pub(crate) mod text;

/// Turns bytes into a case.
pub(crate) type Target = fn(&[u8]);

/// The targets by name.
#[allow(dead_code)] // the fuzzers name theirs
pub(crate) const TARGETS: [(&str, Target); 12] = [
    ("batch", batch::run),
    ("codec", codec::run),
    ("config", config::run),
    ("device", device::run),
    ("frames", frames::run),
    ("gguf", gguf::run),
    ("graph", graph::run),
    ("monitor", monitor::run),
    ("pages", pages::run),
    ("ring", ring::run),
    ("session", session::run),
    ("text", text::run),
];
