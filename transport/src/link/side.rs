//! The two sides of a link.
#![forbid(unsafe_code)]

/// The side of a link that an end belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Guest,
    Host,
}
