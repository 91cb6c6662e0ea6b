//! The self-check of a device: each kernel that has another one behind it, against that one.
//!
//! A case that uses the kernel runs twice on the device: with the kernel, and with the kernel
//! disabled. Where the results differ, the CPU engine decides whose are wrong. The check runs in
//! child processes ([`supervise`]): a kernel that ends its process or never ends costs one process,
//! which has named the kernel before.

mod child;
mod order;
mod supervisor;

pub use child::{Behind, Message, Step, behind, kernels_to_check, run};
pub use supervisor::{Request, SuperviseError, Supervised, supervise};
