//! From nothing to a working host: minimal Debian systems that get the packages, and nothing else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use xtask_common::cache::Cache;
use xtask_common::llama;
use xtask_common::model::{self, FileType};
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use crate::debian::{BOOKWORM, Packages, TRIXIE};
use crate::faults::Program;
use crate::files::copy_tree;
use crate::previous::{Previous, previous};
use crate::test_run::TestRun;

const SCRIPT: &str = include_str!("clean_debian.sh");

/// Mounts what a running system has, in a mount namespace of its own, and runs the script in it.
const ENTER: &str = "mount --make-rprivate / && mount --rbind /dev \"$0/dev\" && \
                     mount --rbind /sys \"$0/sys\" && mount -t proc proc \"$0/proc\" && \
                     mount -t tmpfs tmpfs \"$0/run\" && exec chroot \"$0\" sh /packages/test.sh";

/// The steps that the script prints.
const STEPS: usize = 5;

pub(super) fn run(tests: &mut TestRun<'_>, packages: &Packages) {
    let made = tests.prepare("the previous release", |tests| previous(tests.cache));
    let Some(made) = made else { return };
    let content = tests.prepare("a program for minimal systems", |tests| {
        Content::make(tests.cache)
    });
    let Some(content) = content else { return };
    for release in [BOOKWORM, TRIXIE] {
        let check = format!(
            "Debian {}, minimal: installed, used, upgraded under a guest, purged",
            release.number
        );
        tests.check(&check, |tests, _| {
            let tree = release.minimal(tests.cache)?;
            in_a_copy(&tree, packages, &made, &content)
        });
    }
}

/// A program that generates text, with its libraries and its model.
struct Content {
    program: PathBuf,
    bin: PathBuf,
    model: PathBuf,
    _scratch: Scratch,
}

impl Content {
    fn make(cache: &Cache) -> Result<Content> {
        let bin = llama::build(cache, llama::Stage::Tools)?;
        let model = model::ensure(cache, &model::TINY, FileType::F16)?;
        let scratch = Scratch::new()?;
        let program = Program::build(cache, &bin, &model, scratch.path())?.path;
        Ok(Content {
            program,
            bin,
            model,
            _scratch: scratch,
        })
    }

    fn copy_to(&self, folder: &Path) -> Result<()> {
        fs::create_dir(folder).context("creating a folder")?;
        copy(&self.program, &folder.join("retrying_guest"))?;
        copy(&self.model, &folder.join("model.gguf"))?;
        for entry in fs::read_dir(&self.bin).context("listing libraries")? {
            let path = entry.context("listing libraries")?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let is_needed = ["libggml", "libllama."]
                .iter()
                .any(|start| name.starts_with(start));
            if is_needed && name.contains(".so") {
                copy(&path, &folder.join(&*name))?;
            }
        }
        Ok(())
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = fs::copy(from, to);
    copied
        .map(drop)
        .with_context(|| format!("copying {}", from.display()))
}

/// Runs the script in a copy of a system, which is removed with the scratch folder.
fn in_a_copy(
    tree: &Path,
    packages: &Packages,
    previous: &Previous,
    content: &Content,
) -> Result<String> {
    let scratch = Scratch::new()?;
    let root = scratch.path().join("root");
    copy_tree(tree, &root)?;
    content.copy_to(&root.join("guest"))?;
    let new = [packages.host.clone(), packages.guest.clone()];
    for (name, files) in [("previous", &previous.packages[..]), ("new", &new)] {
        let folder = root.join("packages").join(name);
        fs::create_dir_all(&folder).context("creating a folder")?;
        for file in files {
            copy(file, &folder.join(file.file_name().context("a file")?))?;
        }
    }
    fs::write(root.join("packages/test.sh"), SCRIPT).context("writing the script")?;
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--pid", "--fork", "--kill-child"]);
    unshare.args(["sh", "-c", ENTER]).arg(&root);
    let said = process::output(&mut unshare)?;
    let log = workspace::reports().join("clean-debian.log");
    fs::write(log, &said).context("writing the log")?;
    ensure!(said.lines().count() == STEPS, "{said}");
    Ok(String::new())
}
