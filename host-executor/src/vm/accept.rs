//! The socket of a virtual machine, to which one hypervisor connects.
#![forbid(unsafe_code)]

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};

use super::machine_log::MachineLog;
use super::options::VmOptions;

/// Accepts the hypervisor that has connected to the socket of a virtual machine. `None` if none has
/// connected, or if the virtual machine has a device: then the second hypervisor is disconnected.
///
/// # Errors
/// As for `accept(2)`.
pub(super) fn accept_first(
    listener: &UnixListener,
    options: &VmOptions,
    log: &MachineLog,
    has_device: bool,
) -> io::Result<Option<UnixStream>> {
    let socket = match listener.accept() {
        Ok((socket, _)) => socket,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        Err(error) => return Err(error),
    };
    if has_device {
        log.warn(format_args!(
            "a second hypervisor at {} is disconnected: each virtual machine needs its own --vm",
            options.socket.display()
        ));
        return Ok(None);
    }
    Ok(Some(socket))
}
