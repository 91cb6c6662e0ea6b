//! Changes several files together: all of them or none.
//!
//! All steps that can fail for lack of space or permission are done first, under temporary names
//! beside the targets. Then each file is created, replaced or removed by one rename. If a rename
//! fails, the earlier ones are undone. A program that has an old file open keeps it.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, ensure};
use rustix::fs::{Access, AtFlags, CWD, FlockOperation, accessat, flock};

/// Prefix of temporary names. Ollama takes every file with `ggml-` in its name for a backend, so it
/// must not contain that.
const NEW: &str = ".vgpu-install.new";
const OLD: &str = ".vgpu-install.old";

/// A file to write. A folder has at most one of them.
#[derive(Debug)]
pub(crate) struct Change<'a> {
    pub(crate) target: PathBuf,
    pub(crate) contents: &'a [u8],
}

impl Change<'_> {
    /// Whether the file has these contents already.
    pub(crate) fn is_done(&self) -> bool {
        fs::read(&self.target).is_ok_and(|contents| contents == self.contents)
            && fs::symlink_metadata(&self.target)
                .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o7777 == MODE)
    }
}

/// Everyone may read, only the owner may write.
const MODE: u32 = 0o644;
const FOLDER_MODE: u32 = 0o755;

/// A lock that is held while files are changed. The kernel releases it when the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _folder: File,
}

impl Lock {
    /// Takes the lock. Fails at once if another process has it.
    pub(crate) fn take(folder: &Path) -> Result<Lock> {
        let file = File::open(folder).with_context(|| format!("opening {}", folder.display()))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            anyhow!(
                "another `vgpu install` or `vgpu uninstall` is running in {}",
                folder.display()
            )
        })?;
        Ok(Lock { _folder: file })
    }
}

/// Checks that this user may create and remove files in the folder of `path`, or in its nearest
/// existing parent.
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

/// Writes all files.
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
        // Nothing is left if all renames have succeeded.
        let _ = fs::remove_file(beside(&change.target, NEW));
        let _ = fs::remove_file(beside(&change.target, OLD));
    }
    if outcome.is_err() {
        made.iter().rev().for_each(|folder| {
            let _ = fs::remove_dir(folder); // fails unless the folder is empty
        });
    }
    outcome
}

/// Writes the new files beside their targets, and copies of the old files.
fn stage(changes: &[Change<'_>], made: &mut Vec<PathBuf>) -> Result<()> {
    for Change { target, contents } in changes {
        let writing = || format!("writing {}", target.display());
        let folder = target.parent().with_context(writing)?;
        make_folders(folder, made)?;
        let (new, old) = (beside(target, NEW), beside(target, OLD));
        for stale in [&new, &old] {
            remove_if_there(stale)?; // left by a process that was killed: this process has the lock
        }
        match fs::symlink_metadata(target) {
            Ok(file) => {
                ensure!(
                    file.is_file(),
                    "{} is in the way: it is not a regular file",
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
        // Independent of the umask.
        file.set_permissions(fs::Permissions::from_mode(MODE))
            .with_context(writing)?;
        file.sync_all().with_context(writing)?;
    }
    Ok(())
}

/// Removes all files, and their folders if they are empty then.
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
            let _ = fs::remove_dir(folder); // fails unless the folder is empty
        }
    }
    Ok(())
}

/// Restores the old files as far as possible, after an error that is reported.
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

/// Makes a rename durable.
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
    struct Scratch(tempfile::TempDir);

    impl Scratch {
        fn new() -> Scratch {
            Scratch(tempfile::tempdir().expect("a new folder"))
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
            walk(self.0.path(), self.0.path(), &mut all);
            all.sort();
            all
        }
    }

    fn change<'a>(scratch: &Scratch, target: &str, contents: &'a str) -> Change<'a> {
        Change {
            target: scratch.0.path().join(target),
            contents: contents.as_bytes(),
        }
    }

    #[test]
    fn files_are_installed_and_removed_together() {
        let scratch = Scratch::new();
        let changes = [
            change(&scratch, "a/b/one", "1"),
            change(&scratch, "c/two", "2"),
        ];
        write(&changes).expect("room for two files");
        assert_eq!(scratch.all(), ["a", "a/b", "a/b/one", "c", "c/two"]);
        assert!(changes.iter().all(Change::is_done));
        let again = [change(&scratch, "a/b/one", "3")];
        assert!(!again[0].is_done());
        write(&again).expect("the file is replaced");
        assert_eq!(
            fs::read_to_string(scratch.0.path().join("a/b/one")).expect("a file"),
            "3"
        );

        fs::write(scratch.0.path().join("c/other"), "").expect("a file");
        remove(&["a/b/one", "c/two"].map(|name| scratch.0.path().join(name)))
            .expect("they are there");
        assert_eq!(scratch.all(), ["a", "c", "c/other"]);
    }

    #[test]
    fn failed_installation_restores_all_files() {
        let scratch = Scratch::new();
        write(&[change(&scratch, "a/one", "old")]).expect("room for a file");
        fs::create_dir_all(scratch.0.path().join("d/two")).expect("a folder in the way");
        let before = scratch.all();

        // Detected before anything is changed.
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
            fs::read_to_string(scratch.0.path().join("a/one")).expect("a file"),
            "old"
        );

        // Detected after the first rename: the same target twice has no temporary file left.
        let changes = [
            change(&scratch, "a/one", "new"),
            change(&scratch, "e/three", "3"),
            change(&scratch, "e/three", "4"),
        ];
        write(&changes).expect_err("the second rename of one file");
        assert_eq!(scratch.all(), before, "the new folder is gone too");
        assert_eq!(
            fs::read_to_string(scratch.0.path().join("a/one")).expect("a file"),
            "old"
        );

        let error = remove(&["a/one", "a/none"].map(|name| scratch.0.path().join(name)));
        error.expect_err("one is not there");
        assert_eq!(scratch.all(), before);
    }

    #[test]
    fn leftover_temporary_files_are_accepted_and_concurrent_installations_are_refused() {
        let scratch = Scratch::new();
        for name in [NEW, OLD] {
            fs::write(scratch.0.path().join(name), "half").expect("a file");
        }
        write(&[change(&scratch, "one", "1")]).expect("room for a file");
        assert_eq!(scratch.all(), ["one"]);

        let lock = Lock::take(scratch.0.path()).expect("nobody has it");
        let error = Lock::take(scratch.0.path()).expect_err("it is taken");
        assert!(error.to_string().contains("is running"), "{error}");
        drop(lock);
        Lock::take(scratch.0.path()).expect("it was given back");
    }
}
