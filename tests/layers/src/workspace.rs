//! The packages of this workspace, as cargo lists them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

/// A package of the workspace.
#[derive(Clone, Debug)]
pub struct Package {
    /// The name of the package.
    pub name: String,
    /// The root files of its libraries and programs, relative to the workspace.
    pub roots: Vec<PathBuf>,
    /// The root files of its tests, benchmarks, examples and build script, relative to the
    /// workspace.
    pub test_roots: Vec<PathBuf>,
    /// The packages of this workspace that it is built with, tests aside.
    pub dependencies: Vec<String>,
    /// The packages of this workspace that only its tests, benchmarks and examples use.
    pub test_dependencies: Vec<String>,
}

/// The folder of the workspace.
pub fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors()
        .nth(2)
        .expect("tests/layers lies in the workspace")
}

/// All packages.
///
/// # Errors
/// If cargo cannot be started, or does not understand the workspace.
pub fn packages() -> Result<Vec<Package>> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root());
    let output = cargo.output().context("starting cargo metadata")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "cargo metadata ended with {}\n{said}",
        output.status
    );
    let metadata: Value =
        serde_json::from_slice(&output.stdout).context("reading cargo's metadata")?;
    let listed = metadata["packages"]
        .as_array()
        .context("cargo lists no packages")?;
    listed.iter().map(package).collect()
}

fn package(value: &Value) -> Result<Package> {
    let name = value["name"].as_str().context("a package without a name")?;
    let (mut roots, mut test_roots) = (Vec::new(), Vec::new());
    for target in value["targets"].as_array().into_iter().flatten() {
        let path = target["src_path"].as_str();
        let path = Path::new(path.context("a target without a file")?);
        let kinds = target["kind"].as_array().into_iter().flatten();
        for kind in kinds.filter_map(Value::as_str) {
            let list = match kind {
                "lib" | "rlib" | "cdylib" | "bin" => &mut roots,
                "test" | "bench" | "example" | "custom-build" => &mut test_roots,
                _ => bail!("{name} has a target of the unknown kind {kind}"),
            };
            list.push(path.strip_prefix(root()).unwrap_or(path).to_owned());
        }
    }
    // A library can have two kinds.
    roots.dedup();
    let dependencies = |is_test: bool| {
        let all = value["dependencies"].as_array().into_iter().flatten();
        let mut names: Vec<String> = all
            .filter(|dependency| dependency["source"].is_null())
            .filter(|dependency| (dependency["kind"] == "dev") == is_test)
            .filter_map(|dependency| Some(dependency["name"].as_str()?.to_owned()))
            .collect();
        names.sort();
        names
    };
    Ok(Package {
        name: name.to_owned(),
        roots,
        test_roots,
        dependencies: dependencies(false),
        test_dependencies: dependencies(true),
    })
}
