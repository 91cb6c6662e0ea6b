//! Repacked weights: blocks of quants and scales as structures of arrays.

pub(crate) mod format;
pub(crate) mod pass;
pub(crate) mod state;
