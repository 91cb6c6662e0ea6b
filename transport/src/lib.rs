//! The boundary between guest and host: what is said ([`ir`]), and how it crosses.

pub mod bytes;
pub mod ir;
