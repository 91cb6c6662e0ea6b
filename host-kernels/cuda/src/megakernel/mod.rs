//! Megakernels: runs of launches as one cooperative launch.

mod access;
mod deps;
pub(crate) mod lowering;
mod no_stage;
pub(crate) mod report;
pub(crate) mod stages;
