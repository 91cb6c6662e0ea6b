//! The running program as a command.

/// Starts a process of the running program, of the same version: the kernel knows the file even if
/// an upgrade has replaced or removed it since.
pub(crate) const OWN_PROGRAM: &str = "/proc/self/exe";
