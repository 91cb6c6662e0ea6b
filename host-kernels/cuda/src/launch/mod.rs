//! Launches of a plan: what operators build them with.

pub(crate) mod builder;
pub(crate) mod grid;
pub(crate) mod kernel_table;
pub(crate) mod planned;
pub(crate) mod policy;
pub(crate) mod q8;
