//! Sockets of families that `rustix` does not know.

pub(super) mod vsock;
