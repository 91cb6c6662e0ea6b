//! The self-check of a device: each kernel that has a fallback, against the fallback.
//!
//! A few cases that use the kernel run twice on the device: with the kernel, and with the kernel
//! disabled. Where the results differ, the CPU engine decides whose are wrong. The check runs in
//! child processes ([`supervise`]): a kernel that ends its process or never ends costs one process,
//! which has named the kernel before. A kernel is faulty if it fails in two processes.

mod child;
mod message;
mod order;
mod supervisor;

pub use child::{Fallback, fallbacks, kernels_to_check, run};
pub use message::{CheckEvent, CheckOutcome, CheckWork, Message, Request};
pub use supervisor::{SuperviseError, Supervised, supervise};
