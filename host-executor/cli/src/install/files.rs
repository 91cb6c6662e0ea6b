//! Several files put in place, or taken away, together: all of them or none.
//!
//! Everything that can fail for want of room or permission happens beside the target, under a name
//! that nobody looks for. Then each file appears, or vanishes, by one rename. Should one of these
//! fail, those before it are undone. A program that has the old file open keeps it.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, ensure};
use rustix::fs::{Access, AtFlags, CWD, FlockOperation, accessat, flock};

/// Names for what is unfinished. Ollama takes any file with `ggml-` in its name for a backend.
const NEW: &str = ".vgpu-install.new";
const OLD: &str = ".vgpu-install.old";

/// A file as it shall be. Only one in a folder.
#[derive(Debug)]
pub(crate) struct Change<'a> {
    pub(crate) target: PathBuf,
    pub(crate) contents: &'a [u8],
}

impl Change<'_> {
    /// Whether the file is as it shall be already.
    pub(crate) fn is_done(&self) -> bool {
        fs::read(&self.target).is_ok_and(|contents| contents == self.contents)
            && fs::symlink_metadata(&self.target)
                .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o7777 == MODE)
    }
}

/// Everybody may read, only the owner may change.
const MODE: u32 = 0o644;
const FOLDER_MODE: u32 = 0o755;

/// Held while files are changed. Gone with the process, however it ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _folder: File,
}

impl Lock {
    /// Waits for nobody: two at once are a mistake.
    pub(crate) fn take(folder: &Path) -> Result<Lock> {
        let file = File::open(folder).with_context(|| format!("opening {}", folder.display()))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            anyhow!(
                "another `vgpu install` or `vgpu uninstall` is at work in {}",
                folder.display()
            )
        })?;
        Ok(Lock { _folder: file })
    }
}

/// Whether this user may create and remove files where `path` is or would be.
pub(crate) fn may_write(path: &Path) -> Result<()> {
    let folder = path.ancestors().skip(1).find(|folder| folder.exists());
    let folder = folder.with_context(|| format!("{} has no folder", path.display()))?;
    accessat(
        CWD,
        folder,
        Access::WRITE_OK | Access::EXEC_OK,
        AtFlags::EACCESS,
    )
    .map_err(|error| {
        anyhow!(
            "this user may not write to {} ({error}): run it with sudo",
            folder.display()
        )
    })
}

/// Puts all files in place.
pub(crate) fn write(changes: &[Change<'_>]) -> Result<()> {
    let mut made = Vec::new();
    let outcome = stage(changes, &mut made).and_then(|()| {
        let mut done = 0;
        let outcome = changes.iter().try_for_each(|change| {
            fs::rename(beside(&change.target, NEW), &change.target)
                .with_context(|| format!("placing {}", change.target.display()))?;
            done += 1;
            sync(&change.target)
        });
        if outcome.is_err() {
            changes[..done]
                .iter()
                .rev()
                .for_each(|change| restore(&change.target));
        }
        outcome
    });
    for change in changes {
        // Gone already where all went well.
        let _ = fs::remove_file(beside(&change.target, NEW));
        let _ = fs::remove_file(beside(&change.target, OLD));
    }
    if outcome.is_err() {
        made.iter().rev().for_each(|folder| {
            let _ = fs::remove_dir(folder); // only if it is empty
        });
    }
    outcome
}

/// Writes the new files beside their targets, and copies of the old ones.
fn stage(changes: &[Change<'_>], made: &mut Vec<PathBuf>) -> Result<()> {
    for Change { target, contents } in changes {
        let writing = || format!("writing {}", target.display());
        let folder = target.parent().with_context(writing)?;
        make_folders(folder, made)?;
        let (new, old) = (beside(target, NEW), beside(target, OLD));
        for stale in [&new, &old] {
            remove_if_there(stale)?; // of one that was killed: we hold the lock
        }
        match fs::symlink_metadata(target) {
            Ok(file) => {
                ensure!(
                    file.is_file(),
                    "{} is in the way: it is no plain file",
                    target.display()
                );
                fs::copy(target, &old).with_context(writing)?;
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(writing),
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(MODE)
            .open(&new)
            .with_context(writing)?;
        file.write_all(contents).with_context(writing)?;
        // Whatever the umask took away.
        file.set_permissions(fs::Permissions::from_mode(MODE))
            .with_context(writing)?;
        file.sync_all().with_context(writing)?;
    }
    Ok(())
}

/// Removes all files, and their folders where nothing else is in them.
pub(crate) fn remove(targets: &[PathBuf]) -> Result<()> {
    let mut done = 0;
    let outcome = targets.iter().try_for_each(|target| {
        fs::rename(target, beside(target, OLD))
            .with_context(|| format!("removing {}", target.display()))?;
        done += 1;
        Ok(())
    });
    if outcome.is_err() {
        targets[..done]
            .iter()
            .rev()
            .for_each(|target| restore(target));
        return outcome;
    }
    for target in targets {
        let old = beside(target, OLD);
        fs::remove_file(&old).with_context(|| format!("removing {}", old.display()))?;
        let _ = remove_if_there(&beside(target, NEW));
        if let Some(folder) = target.parent() {
            let _ = fs::remove_dir(folder); // only if it is empty
        }
    }
    Ok(())
}

/// Puts back what was there before; best effort, behind an error that is reported anyway.
fn restore(target: &Path) {
    let old = beside(target, OLD);
    let _ = if old.exists() {
        fs::rename(old, target)
    } else {
        fs::remove_file(target)
    };
}

fn make_folders(folder: &Path, made: &mut Vec<PathBuf>) -> Result<()> {
    let missing: Vec<_> = folder
        .ancestors()
        .take_while(|folder| !folder.exists())
        .collect();
    for folder in missing.into_iter().rev() {
        let creating = || format!("creating {}", folder.display());
        fs::create_dir(folder).with_context(creating)?;
        made.push(folder.to_owned());
        fs::set_permissions(folder, fs::Permissions::from_mode(FOLDER_MODE))
            .with_context(creating)?;
    }
    Ok(())
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Makes a rename outlast a power cut.
fn sync(target: &Path) -> Result<()> {
    let folder = target.parent().unwrap_or(target);
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .with_context(|| format!("writing {}", folder.display()))
}

fn beside(target: &Path, name: &str) -> PathBuf {
    target.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of one test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(test: &str) -> Scratch {
            let path =
                std::env::temp_dir().join(format!("vgpu-files-{test}-{}", std::process::id()));
            fs::create_dir(&path).expect("a new folder");
            Scratch(path)
        }

        fn all(&self) -> Vec<String> {
            fn walk(dir: &Path, root: &Path, into: &mut Vec<String>) {
                for entry in fs::read_dir(dir).expect("a folder") {
                    let path = entry.expect("an entry").path();
                    into.push(
                        path.strip_prefix(root)
                            .expect("below")
                            .display()
                            .to_string(),
                    );
                    if path.is_dir() {
                        walk(&path, root, into);
                    }
                }
            }
            let mut all = Vec::new();
            walk(&self.0, &self.0, &mut all);
            all.sort();
            all
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn change<'a>(scratch: &Scratch, target: &str, contents: &'a str) -> Change<'a> {
        Change {
            target: scratch.0.join(target),
            contents: contents.as_bytes(),
        }
    }

    #[test]
    fn files_come_and_go_together() {
        let scratch = Scratch::new("together");
        let changes = [
            change(&scratch, "a/b/one", "1"),
            change(&scratch, "c/two", "2"),
        ];
        write(&changes).expect("room for two files");
        assert_eq!(scratch.all(), ["a", "a/b", "a/b/one", "c", "c/two"]);
        assert!(changes.iter().all(Change::is_done));
        let again = [change(&scratch, "a/b/one", "3")];
        assert!(!again[0].is_done());
        write(&again).expect("it is ours");
        assert_eq!(
            fs::read_to_string(scratch.0.join("a/b/one")).expect("a file"),
            "3"
        );

        fs::write(scratch.0.join("c/other"), "").expect("a file");
        remove(&["a/b/one", "c/two"].map(|name| scratch.0.join(name))).expect("they are there");
        assert_eq!(scratch.all(), ["a", "c", "c/other"]);
    }

    #[test]
    fn what_fails_half_way_leaves_everything_as_it_was() {
        let scratch = Scratch::new("half");
        write(&[change(&scratch, "a/one", "old")]).expect("room for a file");
        fs::create_dir_all(scratch.0.join("d/two")).expect("a folder in the way");
        let before = scratch.all();

        // Noticed before anything is changed.
        let changes = [
            change(&scratch, "a/one", "new"),
            change(&scratch, "d/two", "2"),
        ];
        let error = write(&changes).expect_err("a folder is in the way");
        assert!(
            format!("{error:#}").contains("d/two is in the way"),
            "{error:#}"
        );
        assert_eq!(scratch.all(), before);
        assert_eq!(
            fs::read_to_string(scratch.0.join("a/one")).expect("a file"),
            "old"
        );

        // Noticed when the first file is in place: the same target twice has no staged file left.
        let changes = [
            change(&scratch, "a/one", "new"),
            change(&scratch, "e/three", "3"),
            change(&scratch, "e/three", "4"),
        ];
        write(&changes).expect_err("the second rename of one file");
        assert_eq!(scratch.all(), before, "the new folder is gone too");
        assert_eq!(
            fs::read_to_string(scratch.0.join("a/one")).expect("a file"),
            "old"
        );

        let error = remove(&["a/one", "a/none"].map(|name| scratch.0.join(name)));
        error.expect_err("one is not there");
        assert_eq!(scratch.all(), before);
    }

    #[test]
    fn leftovers_of_a_killed_one_are_no_obstacle_and_two_at_once_are_refused() {
        let scratch = Scratch::new("killed");
        for name in [NEW, OLD] {
            fs::write(scratch.0.join(name), "half").expect("a file");
        }
        write(&[change(&scratch, "one", "1")]).expect("room for a file");
        assert_eq!(scratch.all(), ["one"]);

        let lock = Lock::take(&scratch.0).expect("nobody has it");
        let error = Lock::take(&scratch.0).expect_err("it is taken");
        assert!(error.to_string().contains("at work"), "{error}");
        drop(lock);
        Lock::take(&scratch.0).expect("it was given back");
    }
}
