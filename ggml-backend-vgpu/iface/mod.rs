//! The objects that ggml sees, one module each: the callbacks of the object, and how it is made and
//! freed.
//!
//! A callback enters the panic boundary, turns ggml's pointers into references, and calls safe Rust
//! in the module of the same name above this one ([`ffi`](crate::ffi) has the mechanism). The doc
//! comment of a callback says what C needs to know: who owns what, which thread may call, and what
//! a failure looks like to ggml. Unless it says otherwise:
//!
//! - any thread may call, also several at a time for one object;
//! - a null pointer where ggml must pass an object is a failure, and nothing happens;
//! - pointers that ggml passes are used during the call only.

mod backend;
mod buffer;
mod buffer_type;
mod device;
mod event;
mod host_buffer;
pub(crate) mod registry;
