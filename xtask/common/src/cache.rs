//! The user's cache folder: sources, programs and builds that outlive a checkout.
//!
//! Everything is keyed by version in its name and made under a lock file, so that two commands at
//! once do not build the same thing twice. What is unfinished is never taken for finished: entries
//! appear by a rename, or, where their path is compiled into them, with a stamp written last.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::progress;

/// The cache folder.
#[derive(Debug)]
pub struct Cache {
    root: PathBuf,
}

/// Held while an entry is made or logs are written; the lock goes with the open file, so a crash
/// releases it.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Cache {
    /// `$VGPU_CACHE`, or `ggml-vgpu` in the user's cache folder.
    ///
    /// # Errors
    /// If neither `VGPU_CACHE` nor `XDG_CACHE_HOME` nor `HOME` is set, or the folder cannot be
    /// created.
    pub fn open() -> Result<Cache> {
        let variable = |name| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        let root = variable("VGPU_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|dir| dir.join("ggml-vgpu")))
            .or_else(|| variable("HOME").map(|dir| dir.join(".cache/ggml-vgpu")))
            .context("no place for a cache: set VGPU_CACHE or HOME")?;
        Cache::at(root)
    }

    fn at(root: PathBuf) -> Result<Cache> {
        for folder in ["logs", "locks"] {
            fs::create_dir_all(root.join(folder))
                .with_context(|| format!("creating the cache {}", root.display()))?;
        }
        // Build systems and libraries below are given absolute paths.
        let root = root
            .canonicalize()
            .with_context(|| format!("resolving {}", root.display()))?;
        Ok(Cache { root })
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where the output of the command that makes `name` is kept.
    pub fn log(&self, name: &str) -> PathBuf {
        self.root.join("logs").join(format!("{name}.log"))
    }

    /// The folder where others keep files of their own, by content.
    pub fn machine_code(&self) -> PathBuf {
        self.root.join("machine-code")
    }

    /// The folder where sccache keeps what rustc has compiled.
    pub fn compiled(&self) -> PathBuf {
        self.root.join("compiled")
    }

    /// The folder where the build of `vgpu-cuda-shim` keeps object files, by content.
    pub fn shim_objects(&self) -> PathBuf {
        self.root.join("shim-objects")
    }

    /// The folder `name` of the cache. If the folder is missing, `fill` makes it at another path,
    /// and this function moves it into place.
    ///
    /// # Errors
    /// If `fill` fails, or the file system refuses.
    pub fn folder(&self, name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        self.moved_into_place(name, |path| {
            fs::create_dir(path).with_context(|| format!("creating {}", path.display()))?;
            fill(path)
        })
    }

    /// The file `name` of the cache. If the file is missing, `fill` writes it at another path, and
    /// this function moves it into place.
    ///
    /// # Errors
    /// If `fill` fails, or the file system refuses.
    pub fn file(&self, name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        self.moved_into_place(name, fill)
    }

    fn moved_into_place(
        &self,
        name: &str,
        fill: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let entry = self.root.join(name);
        if entry.exists() {
            return Ok(entry);
        }
        let _lock = self.lock(name)?;
        if entry.exists() {
            return Ok(entry); // made by the one we waited for
        }
        let unfinished = self.root.join(format!("{name}.unfinished"));
        remove(&unfinished)?; // left behind by one that died: we hold the lock
        fill(&unfinished)?;
        fs::rename(&unfinished, &entry)
            .with_context(|| format!("moving {} into place", entry.display()))?;
        Ok(entry)
    }

    /// The folder `name`, in which `build` has completed `stage`.
    ///
    /// For what cannot be moved: virtual environments and build trees contain their own path. An
    /// interrupted build is run again in the same folder, where ninja and pip continue with what is
    /// there.
    ///
    /// # Errors
    /// If `build` fails, or the file system refuses.
    pub fn staged(
        &self,
        name: &str,
        stage: &str,
        build: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let entry = self.root.join(name);
        let stamp = entry.join(format!(".{stage}.complete"));
        if stamp.exists() {
            return Ok(entry);
        }
        let _lock = self.lock(name)?;
        if stamp.exists() {
            return Ok(entry);
        }
        fs::create_dir_all(&entry).with_context(|| format!("creating {}", entry.display()))?;
        build(&entry)?;
        File::create(&stamp).with_context(|| format!("stamping {}", stamp.display()))?;
        Ok(entry)
    }

    /// Makes the entry `name` a link to `target`, whatever it led to before.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn link(&self, name: &str, target: &Path) -> Result<()> {
        let entry = self.root.join(name);
        if fs::read_link(&entry).is_ok_and(|old| old == target) {
            return Ok(());
        }
        let _lock = self.lock(name)?;
        let unfinished = entry.with_extension("unfinished");
        remove(&unfinished)?;
        std::os::unix::fs::symlink(target, &unfinished)
            .and_then(|()| fs::rename(&unfinished, &entry))
            .with_context(|| format!("linking {}", entry.display()))
    }

    /// The logs whose names begin with `name`, for as long as the result lives.
    ///
    /// # Errors
    /// If another command has them, or the file system refuses.
    pub fn reserve_logs(&self, name: &str) -> Result<Lock> {
        let (path, file) = self.lock_file(&format!("logs-{name}"))?;
        match file.try_lock() {
            Ok(()) => Ok(Lock { _file: file }),
            Err(TryLockError::WouldBlock) => bail!(
                "another command writes the logs {}: wait for its end, or set VGPU_CACHE to \
                 another folder",
                self.log(&format!("{name}*")).display()
            ),
            Err(TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("locking {}", path.display()))
            }
        }
    }

    fn lock_file(&self, name: &str) -> Result<(PathBuf, File)> {
        let path = self.root.join("locks").join(name.replace('/', "-"));
        let file = File::create(&path).with_context(|| format!("opening {}", path.display()))?;
        Ok((path, file))
    }

    fn lock(&self, name: &str) -> Result<Lock> {
        let (path, file) = self.lock_file(name)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress::say(&format!("  .. waiting: another command is making {name}"));
                file.lock()
                    .with_context(|| format!("locking {}", path.display()))?;
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("locking {}", path.display()));
            }
        }
        Ok(Lock { _file: file })
    }
}

fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn a_failed_fill_leaves_no_entry_and_the_next_one_starts_clean() {
        let scratch = Scratch::new().unwrap();
        let cache = Cache::at(scratch.path().join("cache")).unwrap();
        let failed = cache.folder("thing-1", |path| {
            fs::write(path.join("half"), "")?;
            anyhow::bail!("cut off")
        });
        assert_eq!(failed.unwrap_err().to_string(), "cut off");
        assert!(!cache.root.join("thing-1").exists());

        let made = cache
            .folder("thing-1", |path| Ok(fs::write(path.join("whole"), "")?))
            .unwrap();
        assert!(made.join("whole").exists() && !made.join("half").exists());
        cache.folder("thing-1", |_| panic!("made twice")).unwrap();
    }

    #[test]
    fn a_stage_is_complete_only_after_its_build_succeeded() {
        let scratch = Scratch::new().unwrap();
        let cache = Cache::at(scratch.path().join("cache")).unwrap();
        cache
            .staged("build-1", "first", |_| anyhow::bail!("cut off"))
            .unwrap_err();
        cache
            .staged("build-1", "first", |path| {
                Ok(fs::write(path.join("object"), "")?)
            })
            .unwrap();
        cache
            .staged("build-1", "first", |_| panic!("built twice"))
            .unwrap();
        let mut second = false;
        let entry = cache
            .staged("build-1", "second", |_| {
                second = true;
                Ok(())
            })
            .unwrap();
        assert!(second && entry.join("object").exists());
    }

    #[test]
    fn a_link_is_replaced() {
        let scratch = Scratch::new().unwrap();
        let cache = Cache::at(scratch.path().join("cache")).unwrap();
        for target in ["one", "two", "two"] {
            cache.link("current", Path::new(target)).unwrap();
            let led_to = fs::read_link(cache.root.join("current")).unwrap();
            assert_eq!(led_to, Path::new(target));
        }
    }

    #[test]
    fn concurrent_fills_create_an_entry_once() {
        let scratch = Scratch::new().unwrap();
        let cache = Cache::at(scratch.path().join("cache")).unwrap();
        let made = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    cache
                        .folder("thing-1", |_| {
                            made.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                            std::thread::sleep(std::time::Duration::from_millis(30));
                            Ok(())
                        })
                        .unwrap()
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }
}
