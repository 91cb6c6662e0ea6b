//! Build script of `vgpu`: the version, which says the commit.

#[path = "../../xtask/common/src/version.rs"]
mod version;

use std::path::Path;

fn main() {
    version::stamp(Path::new("../.."));
}
