//! The version in status, metrics and dumps: that of the program, which says the commit. This crate
//! itself is not compiled again for each commit.

use std::sync::OnceLock;

static VERSION: OnceLock<&'static str> = OnceLock::new();

/// Sets the version of the program. A second call changes nothing.
#[cfg(feature = "server")]
pub fn set_version(version: &'static str) {
    let _ = VERSION.set(version); // the first caller is the program
}

/// The version of the program, or of this crate if the program has set none.
pub(crate) fn version() -> &'static str {
    VERSION.get().copied().unwrap_or(env!("CARGO_PKG_VERSION"))
}
