//! A control group whose processes can be frozen.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};

/// A control group of this test. The kernel has one of two interfaces.
#[derive(Debug)]
pub(super) struct Freezer {
    folder: PathBuf,
    file: &'static str,
    frozen: &'static str,
    thawed: &'static str,
}

impl Freezer {
    /// A new group. `None` if this user may not make one.
    pub(super) fn new() -> Option<Freezer> {
        let name = format!("vgpu-test-{}", std::process::id());
        let kinds = [
            ("/sys/fs/cgroup", "cgroup.freeze", "1", "0"),
            (
                "/sys/fs/cgroup/freezer",
                "freezer.state",
                "FROZEN",
                "THAWED",
            ),
        ];
        kinds.into_iter().find_map(|(root, file, frozen, thawed)| {
            let folder = PathBuf::from(root).join(&name);
            fs::create_dir(&folder).ok()?;
            let group = Freezer {
                folder,
                file,
                frozen,
                thawed,
            };
            // An ordinary folder has no such file, and is removed again.
            group.folder.join(file).exists().then_some(group)
        })
    }

    /// Moves a process into the group.
    pub(super) fn add(&self, pid: u32) -> Result<()> {
        let file = self.folder.join("cgroup.procs");
        fs::write(&file, pid.to_string()).with_context(|| format!("writing {}", file.display()))
    }

    /// Freezes or thaws the processes of the group.
    pub(super) fn set(&self, is_frozen: bool) -> Result<()> {
        let file = self.folder.join(self.file);
        let word = if is_frozen { self.frozen } else { self.thawed };
        fs::write(&file, word).with_context(|| format!("writing {}", file.display()))
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = self.set(false);
        // Fails while a process is in the group; it is empty then, and harmless.
        let _ = fs::remove_dir(&self.folder);
    }
}
