//! What operators build the launches of a plan with.

pub(crate) mod builder;
pub(crate) mod grid;
pub(crate) mod kernel_table;
pub(crate) mod place;
pub(crate) mod planned;
pub(crate) mod policy;
pub(crate) mod q8;
