//! Megakernels: runs of launches as one cooperative launch.

mod access;
mod deps;
pub(crate) mod lowering;
pub(crate) mod report;
pub(crate) mod stages;
