//! The version that says the commit, for the build scripts of the plugin and of `vgpu`, and for
//! `cargo xtask`: `0.1.0-dev.20261126134501+1a2b3c4d`, with the commit's time in UTC.
//!
//! Semantic Versioning orders it before the release `0.1.0` that it leads to, and by time. So do
//! Debian and RPM, whose packages have a tilde in place of the hyphen
//! (`xtask_common::workspace::package_version`). The commit with the tag `v0.1.0`, and sources
//! without git, have the version `0.1.0`. Commits after that tag lead to the next release, `0.1.1`,
//! until `Cargo.toml` names another one.

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
        "--format=%cd+%h",
    ];
    let Some(commit) = git(root, &commit) else {
        return base.to_owned();
    };
    let is_released = git(
        root,
        &["describe", "--tags", "--match", &format!("v{base}")],
    )
    .is_some();
    let release = match is_released {
        true => next_release(base),
        false => base.to_owned(),
    };
    format!("{release}-dev.{commit}")
}

/// The version after `base`: its last number and one.
fn next_release(base: &str) -> String {
    let next = base.rsplit_once('.').and_then(|(start, last)| {
        let last: u64 = last.parse().ok()?;
        Some(format!("{start}.{}", last + 1))
    });
    next.unwrap_or_else(|| base.to_owned())
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
    use std::process::Command;

    use super::{git, version};
    use crate::scratch::Scratch;
    use crate::workspace::package_version;

    #[test]
    fn versions_say_the_commit_and_are_ordered_by_its_time() {
        let scratch = Scratch::new().expect("a folder");
        let root = scratch.path();
        assert_eq!(version(root, "0.1.0"), "0.1.0", "without git");
        let run = |arguments: &[&str]| git(root, arguments).expect("git runs");
        run(&["init", "-q"]);
        let commit = |time: &str| {
            let mut git = Command::new("git");
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
            let hash = version.strip_prefix(&format!("0.1.0-dev.{time}+"));
            assert!(hash.is_some_and(|hash| hash.len() == 8), "{version}");
        }
        assert!(run(&["rev-parse", "HEAD"]).starts_with(&second[second.len() - 8..]));
        let dirty = format!("{second}.dirty");
        for (new, old) in [
            (&second[..], &first[..]),
            (&dirty, &second),
            // The releases before and after.
            (&first, "0.0.9"),
            ("0.1.0", &dirty),
        ] {
            check_order(new, old);
        }
        run(&["tag", "v0.1.1"]);
        assert_eq!(version(root, "0.1.0"), second);
        run(&["tag", "v0.1.0"]);
        assert_eq!(version(root, "0.1.0"), "0.1.0");
        // Behind the release, whatever `Cargo.toml` says.
        run(&["tag", "-d", "v0.1.1"]);
        let third = commit("2026-11-27T12:00:00+0000");
        assert!(third.starts_with("0.1.1-dev.20261127120000+"), "{third}");
        assert!(version(root, "0.2.0").starts_with("0.2.0-dev."));
        check_order(&third, "0.1.0");
        check_order("0.1.1", &third);
    }

    /// Checks that dpkg, RPM and Semantic Versioning take a version for newer.
    fn check_order(new: &str, old: &str) {
        // Semantic Versioning has no order by what is behind the plus sign.
        let without_build = |version: &str| {
            let version = version.split('+').next().unwrap_or_default();
            semver::Version::parse(version).expect("a version")
        };
        let (ours, others) = (without_build(new), without_build(old));
        assert!(ours > others || new.starts_with(old), "{new} {old}");
        let [new, old] = [new, old].map(package_version);
        let output = |command: &mut Command| command.output().ok();
        // Elsewhere there is no dpkg, or no RPM.
        let dpkg = ["--compare-versions", &new, "gt", &old];
        if let Some(compared) = output(Command::new("dpkg").args(dpkg)) {
            assert!(compared.status.success(), "dpkg: {new} {old}");
        }
        let script = format!("%{{lua:print(rpm.vercmp('{new}', '{old}'))}}");
        if let Some(compared) = output(Command::new("rpm").args(["--eval", &script])) {
            let said = String::from_utf8_lossy(&compared.stdout);
            assert_eq!(said.trim(), "1", "rpm: {new} {old}");
        }
    }
}
