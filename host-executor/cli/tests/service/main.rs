//! `vgpu` under a service manager: exit statuses, the units, and `vgpu fd-store`.

#[path = "../../../tests/common/mod.rs"]
mod common;
mod fd_store;
#[path = "../../../tests/machine/mod.rs"]
mod machine;
mod package;
#[path = "../served/mod.rs"]
mod served;
mod start;
mod units;

use std::path::{Path, PathBuf};

fn unit(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy/host")
        .join(name)
}
