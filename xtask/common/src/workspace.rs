//! Paths of the checkout, and cargo as a command.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the checkout this command was built from.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("xtask/common lies in the workspace")
}

/// Where [`crate::dist`] puts the files a user needs.
pub fn dist() -> PathBuf {
    root().join("target/dist")
}

/// Where the tests leave what they found and what the programs under test wrote.
pub fn reports() -> PathBuf {
    root().join("target/test-reports")
}

/// Cargo, the one that runs this program, in the root of the workspace.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// Cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
