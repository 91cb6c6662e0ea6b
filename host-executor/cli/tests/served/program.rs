//! Copies of the command.

use std::path::Path;
use std::process::Command;

/// Copies the command under test to the file `to`, in another process. If this process wrote the
/// file, a process that another test starts at the same time would inherit the descriptor, and the
/// kernel executes no file that is open for writing (ETXTBSY).
pub(crate) fn copy_program(to: &Path) {
    let mut copy = Command::new("cp");
    let copied = copy.arg(env!("CARGO_BIN_EXE_vgpu")).arg(to).status();
    assert!(copied.expect("cp runs").success(), "no room for a copy");
}
