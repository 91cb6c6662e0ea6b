//! Runs of launches as one cooperative launch.

mod deps;
pub(crate) mod lowering;
pub(crate) mod report;
pub(crate) mod stages;
