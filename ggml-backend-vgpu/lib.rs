//! The plugin.

pub mod abi;
pub mod host;
