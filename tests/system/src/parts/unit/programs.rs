//! The programs of tests that cargo compiles.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use xtask_common::process;
use xtask_common::progress::Progress;
use xtask_common::workspace;

use crate::test_run::TestRun;

/// The last lines of a failed compilation that are shown.
const SAID_LINES: usize = 40;

/// A program of tests: of a library, of a command, or a file of `tests/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TestProgram {
    /// The package and the target: `vgpu-cpu lib`, `vgpu bin`, `vgpu-check ops`.
    pub(super) name: String,
    executable: PathBuf,
    /// The folder of the package, in which cargo runs its tests.
    folder: PathBuf,
}

impl TestProgram {
    /// The program of a line of cargo's output in JSON, if the line is about one. The format is
    /// that of cargo's `--message-format=json`.
    fn parse(line: &str) -> Option<TestProgram> {
        let message: Value = serde_json::from_str(line).ok()?;
        let is_tests = message["reason"] == "compiler-artifact"
            && message["profile"]["test"].as_bool() == Some(true);
        let executable = message["executable"].as_str().filter(|_| is_tests)?;
        let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
        Some(TestProgram {
            name: name(&package(folder)?, &message["target"])?,
            executable: executable.into(),
            folder: folder.to_owned(),
        })
    }

    /// Runs the tests, as cargo does.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }
}

/// The name of the package in a folder.
fn package(folder: &Path) -> Option<String> {
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).ok()?;
    let manifest: toml::Table = toml::from_str(&manifest).ok()?;
    Some(manifest.get("package")?.get("name")?.as_str()?.to_owned())
}

/// The name of the program of a target.
fn name(package: &str, target: &Value) -> Option<String> {
    let kind = target["kind"][0].as_str()?;
    let target = match kind {
        "test" => target["name"].as_str()?,
        "bin" => "bin",
        _ => "lib",
    };
    Some(format!("{package} {target}"))
}

/// The names of all programs that cargo compiles tests of.
///
/// # Errors
/// If cargo fails.
pub(super) fn names() -> Result<Vec<String>> {
    let mut cargo = workspace::cargo();
    cargo.args(["metadata", "--no-deps", "--offline", "--format-version=1"]);
    let metadata: Value = serde_json::from_str(&process::output(&mut cargo)?)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    Ok(packages
        .flat_map(|package| {
            let targets = package["targets"].as_array().into_iter().flatten();
            let tested = targets.filter(|target| target["test"].as_bool() == Some(true));
            tested.filter_map(|target| name(package["name"].as_str()?, target))
        })
        .collect())
}

/// Compiles all programs of the workspace.
///
/// # Errors
/// If cargo fails. The error has its messages.
pub(super) fn compile(tests: &TestRun<'_>, progress: &Progress) -> Result<Vec<TestProgram>> {
    let mut programs = Vec::new();
    let mut said = Vec::new();
    let mut cargo = tests.cargo();
    cargo.args(["test", "--workspace", "--no-run"]);
    cargo.arg("--message-format=json-render-diagnostics");
    let status = process::run_lines(&mut cargo, &tests.log("cargo-test"), |line| {
        if line.starts_with('{') {
            programs.extend(TestProgram::parse(line));
        } else {
            progress.note(line);
            said.push(line.to_owned());
        }
    })?;
    let from = said.len().saturating_sub(SAID_LINES);
    ensure!(
        status.success(),
        "cargo ended with {status}\n{}",
        said[from..].join("\n")
    );
    let logs = logs();
    // What an earlier run has left.
    if logs.exists() {
        std::fs::remove_dir_all(&logs).with_context(|| format!("removing {}", logs.display()))?;
    }
    std::fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
    Ok(programs)
}

/// The folder with the output of the programs.
pub(super) fn logs() -> PathBuf {
    workspace::reports().join("unit")
}

/// The file with the output of a program.
pub(super) fn log(name: &str) -> PathBuf {
    logs().join(format!("{}.log", name.replace(' ', "-")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_artifacts_of_tests_are_programs() {
        let folder = env!("CARGO_MANIFEST_DIR");
        let artifact = |kind: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"{folder}/Cargo.toml",
                "target":{{"kind":["{kind}"],"name":"docs"}},"profile":{{"test":{test}}},
                "executable":{executable}}}"#
            )
        };
        let path = r#""/target/debug/deps/docs-1""#;
        let program = TestProgram::parse(&artifact("test", true, path)).expect("a program");
        assert_eq!(program.name, "vgpu-system-tests docs");
        assert_eq!(program.executable, Path::new("/target/debug/deps/docs-1"));
        assert_eq!(program.folder, Path::new(folder));
        let name_of = |kind| TestProgram::parse(&artifact(kind, true, path)).map(|it| it.name);
        assert_eq!(name_of("bin").as_deref(), Some("vgpu-system-tests bin"));
        assert_eq!(name_of("lib").as_deref(), Some("vgpu-system-tests lib"));
        assert_eq!(TestProgram::parse(&artifact("bin", false, path)), None);
        assert_eq!(TestProgram::parse(&artifact("lib", true, "null")), None);
        assert_eq!(TestProgram::parse(r#"{"reason":"build-finished"}"#), None);
        assert_eq!(TestProgram::parse("warning: unused"), None);
    }
}
