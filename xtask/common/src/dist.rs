//! Builds of the two files that a user needs, the plugin and the command `vgpu`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::cache::Cache;
use crate::elf::ElfLibrary;
use crate::packages;
use crate::process;
use crate::progress::Progress;
use crate::workspace;

/// The plugin's file: the name programs look for, in the folder they look in.
const PLUGIN: &str = "libggml-vgpu.so";
/// The host's command.
const COMMAND: &str = "vgpu";

/// What [`build`] made.
#[derive(Clone, Debug)]
pub struct Dist {
    /// `libggml-vgpu.so`.
    pub plugin: PathBuf,
    /// The command `vgpu`.
    pub vgpu: PathBuf,
}

/// What is already in a folder.
pub fn at(folder: &Path) -> Dist {
    // Programs are run from other folders.
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    Dist {
        plugin: folder.join(PLUGIN),
        vgpu: folder.join(COMMAND),
    }
}

/// Builds the plugin and `vgpu` into `target/dist`, as they are shipped.
///
/// # Errors
/// If the build fails, or the plugin is not as a program expects it.
pub fn build(cache: &Cache) -> Result<Dist> {
    build_with(cache, &Release::default())
}

/// What else is compiled into a release build.
#[derive(Clone, Copy, Debug, Default)]
pub struct Release<'a> {
    /// Machine code for GPUs from this folder, for `vgpu`.
    pub machine_code: Option<&'a Path>,
    /// The CUDA engine in the plugin, with the same code: a measurement on a GPU can be repeated in
    /// one process, which shows what the boundary between processes costs.
    pub is_engine_in_plugin: bool,
}

/// [`build`] with more compiled in.
///
/// # Errors
/// As [`build`].
pub fn build_with(cache: &Cache, options: &Release<'_>) -> Result<Dist> {
    packages::libclang(cache)?;
    let dist = workspace::dist();
    std::fs::create_dir_all(&dist).with_context(|| format!("creating {}", dist.display()))?;

    let progress = Progress::new("building libggml-vgpu.so and vgpu");
    // One cargo run each: in one run cargo would build what both depend on with the features of
    // both.
    let mut plugin = release("ggml-vgpu");
    let mut vgpu = release("vgpu");
    if let Some(code) = options.machine_code {
        vgpu.env("VGPU_CUBINS", code);
        if options.is_engine_in_plugin {
            plugin.env("VGPU_CUBINS", code);
        }
    }
    if options.is_engine_in_plugin {
        plugin.args(["--features", "inproc-cuda"]);
    }
    // The larger first: beside the CPU engine, one unit of which is compiled for a minute, there is
    // enough for the other cores.
    let command = artifact_of(&mut vgpu, cache, &progress, "bin", COMMAND)?;
    let library = artifact_of(&mut plugin, cache, &progress, "cdylib", "ggml_vgpu")?;

    let plugin = place(&library, &dist.join(PLUGIN))?;
    let vgpu = place(&command, &dist.join(COMMAND))?;
    ElfLibrary::read(&plugin)?
        .check_plugin()
        .with_context(|| format!("{} is not as a program needs it", plugin.display()))?;
    progress.done(&format!("{} KiB and {} KiB", kib(&plugin), kib(&vgpu)));
    Ok(Dist { plugin, vgpu })
}

/// What `cargo test --workspace` builds: another selection would have other features, and cargo
/// would compile most crates again.
pub const AS_TESTS: [&str; 5] = ["--workspace", "--lib", "--bins", "--tests", "--examples"];

/// Builds the plugin and `vgpu` into `folder` as `cargo test --workspace` compiles them, from the
/// same crates: optimised less than what is shipped, and with assertions.
///
/// # Errors
/// As [`build`].
pub fn build_for_tests(cache: &Cache, folder: &Path) -> Result<Dist> {
    packages::libclang(cache)?;
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let progress = Progress::new("building libggml-vgpu.so and vgpu with assertions");
    let mut cargo = workspace::cargo();
    cargo.arg("build").args(AS_TESTS);
    cargo.arg("--message-format=json-render-diagnostics");
    let dist = both(
        &mut cargo,
        &cache.log("cargo-build-tests"),
        &progress,
        Plugin::Remote,
        folder,
    )?;
    ElfLibrary::read(&dist.plugin)?
        .check_plugin()
        .with_context(|| format!("{} is not as a program needs it", dist.plugin.display()))?;
    progress.done("");
    Ok(dist)
}

/// A release build of one package.
fn release(package: &str) -> Command {
    let mut cargo = workspace::cargo();
    cargo.args(["build", "--release", "--package", package]);
    cargo.arg("--message-format=json-render-diagnostics");
    cargo.env("VGPU_VERSION", workspace::version());
    cargo
}

/// What a build makes of the plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plugin {
    /// Reaches an executor in another process, for which `vgpu` is built.
    Remote,
    /// Has an executor in it. `vgpu` is not built.
    Inproc,
}

/// Builds what the demo needs into `folder`, without optimisation except for kernels: it takes a
/// third of the release build's time. Third-party crates are those of `cargo xtask` itself where
/// the features are equal.
///
/// # Errors
/// If the build fails.
pub fn build_for_demo(cache: &Cache, plugin: Plugin, folder: &Path) -> Result<Dist> {
    packages::libclang(cache)?;
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let progress =
        Progress::new("building libggml-vgpu.so and vgpu (one to two minutes on two cores)");
    let mut cargo = workspace::cargo();
    cargo.args(["build", "--package", "ggml-vgpu"]);
    if plugin == Plugin::Remote {
        cargo.args(["--no-default-features", "--package", "vgpu"]);
        if let Some(level) = instruction_set() {
            cargo.args(["--features", &format!("vgpu/{level}")]);
        }
    }
    // A token is a few messages: only the kernels, which have a profile of their own, need to be
    // fast.
    cargo.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0");
    cargo.env("CARGO_PROFILE_DEV_DEBUG", "false");
    // The kernels are compiled last, with nothing beside them to keep the other cores busy.
    cargo.args(["--config", "profile.dev.package.vgpu-cpu.codegen-units=4"]);
    cargo.arg("--message-format=json-render-diagnostics");
    let dist = both(
        &mut cargo,
        &cache.log("cargo-build-demo"),
        &progress,
        plugin,
        folder,
    )?;
    progress.done("");
    Ok(dist)
}

/// Runs `cargo`, which builds the plugin and, for one that is [`Plugin::Remote`], `vgpu`. Places
/// what it built in `folder`.
fn both(
    cargo: &mut Command,
    log: &Path,
    progress: &Progress,
    plugin: Plugin,
    folder: &Path,
) -> Result<Dist> {
    let wanted = [("cdylib", "ggml_vgpu"), ("bin", COMMAND)];
    let mut built = artifacts_of(cargo, log, progress, &wanted)?;
    let dist = at(folder);
    place(
        &built.remove(0).context("cargo built no plugin")?,
        &dist.plugin,
    )?;
    if plugin == Plugin::Remote {
        place(&built.remove(0).context("cargo built no vgpu")?, &dist.vgpu)?;
    }
    Ok(dist)
}

/// The feature of `vgpu` with the kernels that the CPU engine chooses on this processor. Kernels of
/// other instruction sets would be most of the demo's compile time. What a feature needs of the
/// processor is in `host-kernels/cpu/src/isa.rs`; with a wrong one, the engine warns of slow
/// kernels.
fn instruction_set() -> Option<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        if avx2 && avx512 {
            return Some("avx512");
        }
        if avx2 && is_x86_feature_detected!("avxvnni") {
            return Some("avx-vnni");
        }
        if avx2 {
            return Some("avx2");
        }
    }
    None
}

/// Runs `cargo`. Returns the file that it built for the target `name` of kind `kind`.
fn artifact_of(
    cargo: &mut Command,
    cache: &Cache,
    progress: &Progress,
    kind: &str,
    name: &str,
) -> Result<PathBuf> {
    let log = cache.log(&format!("cargo-build-{name}"));
    let mut built = artifacts_of(cargo, &log, progress, &[(kind, name)])?;
    built
        .remove(0)
        .with_context(|| format!("cargo built no {name}"))
}

/// Runs `cargo`. Returns the files that it built for each wanted kind and name of a target.
fn artifacts_of(
    cargo: &mut Command,
    log: &Path,
    progress: &Progress,
    wanted: &[(&str, &str)],
) -> Result<Vec<Option<PathBuf>>> {
    let mut built = vec![None; wanted.len()];
    let status = process::run_lines(cargo, log, |line| {
        // Cargo writes one JSON object per line to stdout, and its progress to stderr.
        if !line.starts_with('{') {
            progress.note(line);
        } else if let Ok(message) = serde_json::from_str::<Value>(line) {
            for ((kind, name), built) in wanted.iter().zip(&mut built) {
                *built = artifact(&message, kind, name).or(built.take());
            }
        }
    })?;
    anyhow::ensure!(
        status.success(),
        "cargo ended with {status}\n{}",
        readable_tail(log)
    );
    Ok(built)
}

/// The file of an artifact message for the target `name` of kind `kind`. A target's tests are
/// another artifact with the same name.
fn artifact(message: &Value, kind: &str, name: &str) -> Option<PathBuf> {
    let target = message.get("target")?;
    let kinds = target.get("kind")?.as_array()?;
    if message.get("reason")? != "compiler-artifact"
        || target.get("name")? != name
        || !kinds.iter().any(|k| k == kind)
        || message.pointer("/profile/test")? != false
    {
        return None;
    }
    let files = message
        .get("filenames")?
        .as_array()?
        .iter()
        .filter_map(Value::as_str);
    files
        .map(PathBuf::from)
        .find(|file| kind == "bin" || file.extension() == Some("so".as_ref()))
}

/// Copies a built file, without what only a debugger reads. A program that runs the old one keeps
/// it.
fn place(built: &Path, target: &Path) -> Result<PathBuf> {
    let fresh = target.with_extension("fresh");
    let mut strip = Command::new("strip");
    process::output(strip.arg("--strip-all").arg("-o").arg(&fresh).arg(built))?;
    std::fs::rename(&fresh, target).with_context(|| format!("placing {}", target.display()))?;
    Ok(target.to_owned())
}

fn kib(path: &Path) -> u64 {
    path.metadata().map_or(0, |m| m.len() / 1024)
}

/// The end of a cargo log without its JSON.
fn readable_tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('{')).collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn artifact_of_the_requested_kind_is_selected() {
        let message = |reason: &str, name: &str, kind: &str| {
            json!({
                "reason": reason,
                "target": {"name": name, "kind": [kind, "rlib"]},
                "filenames": ["/t/libggml_vgpu.rlib", "/t/libggml_vgpu.so"],
                "profile": {"test": false},
            })
        };
        let found = |m: &Value| artifact(m, "cdylib", "ggml_vgpu");
        let plugin = message("compiler-artifact", "ggml_vgpu", "cdylib");
        assert_eq!(found(&plugin), Some("/t/libggml_vgpu.so".into()));
        assert_eq!(
            found(&message("compiler-artifact", "ggml_vgpu", "bin")),
            None
        );
        assert_eq!(
            found(&message("compiler-artifact", "other", "cdylib")),
            None
        );
        assert_eq!(
            found(&message("build-script-executed", "ggml_vgpu", "cdylib")),
            None
        );
        let mut tests = plugin;
        tests["profile"]["test"] = true.into();
        assert_eq!(found(&tests), None);
        assert_eq!(found(&json!({"reason": "build-finished"})), None);
    }
}
