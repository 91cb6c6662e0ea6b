//! The sizes that both sides of every link have agreed on.

/// The maximum size of one message, in bytes.
pub const MAX_MESSAGE: usize = 1 << 16;

/// The maximum size of the payload of one message, in bytes.
pub const MAX_PAYLOAD: usize = 1 << 20;

/// The maximum size of the first message of a session, HELLO, over a stream, in bytes.
pub const MAX_FIRST_MESSAGE: usize = 4 << 10;
