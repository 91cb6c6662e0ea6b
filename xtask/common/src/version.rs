//! The version that says the commit, for the build scripts of the plugin and of `vgpu`, and for
//! `cargo xtask`: `0.1.0+git20261126134501.1a2b3c4d`, with the commit's time in UTC.
//!
//! Debian, RPM and Semantic Versioning order it behind `0.1.0`, and by time. The commit with the
//! tag `v0.1.0`, and sources without git, have the version `0.1.0`.

#![allow(unreachable_pub)] // private in a build script, public in `xtask-common`

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// In a build script of a package of these sources, whose root is `root`: passes the version to the
/// package as `VGPU_VERSION`. The variable in the environment of the build comes first.
pub fn stamp(root: &Path) {
    println!("cargo::rerun-if-env-changed=VGPU_VERSION");
    let root = root
        .canonicalize()
        .expect("cargo runs the script in its package");
    let base = env::var("CARGO_PKG_VERSION").expect("cargo sets it");
    let given = env::var("VGPU_VERSION")
        .ok()
        .filter(|given| !given.is_empty());
    let version = given.unwrap_or_else(|| version(&root, &base));
    println!("cargo::rustc-env=VGPU_VERSION={version}");
    // A path that does not exist would make cargo run the script every time.
    if let Some(reflog) = reflog(&root) {
        println!("cargo::rerun-if-changed={}", reflog.display());
    }
}

/// The version of the sources in `root`. `base` is the one in `Cargo.toml`.
pub fn version(root: &Path, base: &str) -> String {
    if git(
        root,
        &[
            "describe",
            "--exact-match",
            "--tags",
            "--match",
            &format!("v{base}"),
        ],
    )
    .is_some()
    {
        return base.to_owned();
    }
    let commit = [
        "log",
        "-1",
        "--abbrev=8",
        "--date=format-local:%Y%m%d%H%M%S",
        "--format=%cd.%h",
    ];
    match git(root, &commit) {
        Some(commit) => format!("{base}+git{commit}"),
        None => base.to_owned(),
    }
}

/// The file that changes with every commit and checkout: the reflog of HEAD.
fn reflog(root: &Path) -> Option<PathBuf> {
    let path = git(root, &["rev-parse", "--git-path", "logs/HEAD"])?;
    Some(root.join(path)).filter(|path| path.exists())
}

/// The output of a git command in `root`. `None` without git, and outside the repository of these
/// sources.
pub fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .args(arguments)
        .current_dir(root)
        .env("TZ", "UTC")
        // The sources may be a copy inside another repository, whose version is another one.
        .env("GIT_CEILING_DIRECTORIES", root.parent().unwrap_or(root))
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::{git, version};
    use crate::scratch::Scratch;

    #[test]
    fn versions_say_the_commit_and_are_ordered_by_its_time() {
        let scratch = Scratch::new().expect("a folder");
        let root = scratch.path();
        assert_eq!(version(root, "0.1.0"), "0.1.0", "without git");
        let run = |arguments: &[&str]| git(root, arguments).expect("git runs");
        run(&["init", "-q"]);
        let commit = |time: &str| {
            let mut git = std::process::Command::new("git");
            git.args(["-c", "user.name=a", "-c", "user.email=a@b.invalid"])
                .args(["commit", "-q", "--allow-empty", "-m", time])
                .env("GIT_COMMITTER_DATE", time)
                .current_dir(root);
            assert!(git.status().expect("git runs").success());
            version(root, "0.1.0")
        };
        // The first is the later one by its clock, and not in UTC.
        let first = commit("2026-11-26T14:00:00+0200");
        let second = commit("2026-11-26T12:00:01+0000");
        for (version, time) in [(&first, "20261126120000"), (&second, "20261126120001")] {
            let hash = version.strip_prefix(&format!("0.1.0+git{time}."));
            assert!(hash.is_some_and(|hash| hash.len() == 8), "{version}");
        }
        assert!(run(&["rev-parse", "HEAD"]).starts_with(&second[second.len() - 8..]));
        let is_newer = |new: &str, old: &str| {
            let mut dpkg = std::process::Command::new("dpkg");
            let compared = dpkg.args(["--compare-versions", new, "gt", old]).status();
            // Elsewhere there is no dpkg.
            compared.map_or(true, |status| status.success())
        };
        assert!(is_newer(&first, "0.1.0"), "{first}");
        assert!(is_newer(&second, &first), "{first} {second}");
        assert!(is_newer(&format!("{second}.dirty"), &second), "{second}");
        assert!(is_newer("0.1.1", &second), "{second}");
        run(&["tag", "v0.1.1"]);
        assert_eq!(version(root, "0.1.0"), second);
        run(&["tag", "v0.1.0"]);
        assert_eq!(version(root, "0.1.0"), "0.1.0");
    }
}
