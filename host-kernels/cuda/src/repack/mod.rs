//! Repacked weights: the quants and scales of blocks as structures of arrays.

pub(crate) mod format;
pub(crate) mod pass;
pub(crate) mod state;
