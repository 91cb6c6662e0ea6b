//! Operators without a case in `test-backend-ops`, built by the public constructors of a release
//! (`tests/programs/constructors.c`) and compared with its CPU backend.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use xtask_common::cache::Cache;
use xtask_common::node_llama::{self, Backend};
use xtask_common::{ggml_releases, packages, process, workspace};

/// The operators that the program builds.
const OPERATORS: [&str; 8] = [
    "ADD1",
    "DIAG_MASK_ZERO",
    "IM2COL_BACK",
    "POOL_2D_BACK",
    "WIN_PART",
    "WIN_UNPART",
    "GET_REL_POS",
    "ADD_REL_POS",
];

/// Runs the program with the ggml `release`, whose libraries are in `bin`: once as it is, and once
/// for each operator with a wrong result, which the program must detect. Returns the number of
/// cases and a line.
///
/// # Errors
/// If the program cannot be compiled, a result differs, or a wrong result is not detected.
pub(crate) fn compare(
    cache: &Cache,
    (release, bin): (&str, &Path),
    backend: &Backend<'_>,
    seed: u64,
) -> Result<(u64, String)> {
    let program = compile(cache, release, bin)?;
    let run = |wrong: Option<&str>| {
        let mut command = Command::new(&program);
        command.arg(bin).arg(seed.to_string()).args(wrong);
        let stats = program.with_extension("stats.json");
        node_llama::set_backend(&mut command, backend, &stats);
        command.env("VGPU_LOG", "error");
        let output = command.output().context("starting the program")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        anyhow::Ok((output.status, text, errors))
    };
    let (status, text, errors) = run(None)?;
    let failed: Vec<&str> = text.lines().filter(|line| line.contains("FAIL")).collect();
    ensure!(
        status.success() && failed.is_empty(),
        "{status}, {} cases failed; seed {seed}\n{}\n{errors}",
        failed.len(),
        failed.join("\n")
    );
    let ok = |operator: &str| {
        let case = format!("  {operator}(");
        let mut lines = text.lines().filter(|line| line.starts_with(&case));
        lines.any(|line| line.contains("): OK"))
    };
    for operator in OPERATORS {
        ensure!(ok(operator), "no case of {operator}\n{text}");
        let (status, text, _) = run(Some(operator))?;
        let case = format!("  {operator}(");
        let (own, others): (Vec<&str>, Vec<&str>) = { text.lines() }
            .filter(|line| line.contains("): "))
            .partition(|line| line.starts_with(&case));
        ensure!(
            status.code() == Some(1)
                && own.iter().all(|line| line.contains("): FAIL"))
                && others.iter().all(|line| line.contains("): OK")),
            "a wrong result of {operator} is not detected; seed {seed}\n{text}"
        );
    }
    let cases = text.lines().filter(|line| line.contains("): OK")).count();
    let line = format!(
        "{cases} cases of {} operators, each wrong result detected; --seed {seed}",
        OPERATORS.len()
    );
    Ok((cases as u64, line))
}

/// Compiles the program against the headers and libraries of the release.
fn compile(cache: &Cache, release: &str, bin: &Path) -> Result<PathBuf> {
    packages::compiler(cache)?;
    // The build is the last word of a name.
    let name = release.rsplit(' ').next().unwrap_or(release);
    let ggml = ggml_releases::source_of(cache, name)?;
    let ggml = ggml.with_context(|| format!("no sources of {release}"))?;
    let folder = workspace::root().join("target/constructors").join(name);
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let program = folder.join("constructors");
    let mut command = Command::new("cc");
    command
        .args(["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror"])
        .arg("-Wno-deprecated-declarations") // of ADD1
        .arg("-o")
        .arg(&program)
        .arg(workspace::root().join("tests/programs/constructors.c"))
        .arg("-I")
        .arg(ggml.join("include"))
        .arg("-L")
        .arg(bin)
        .args(["-lggml", "-lggml-base", "-lm"])
        .arg(format!("-Wl,-rpath,{}", bin.display()));
    process::output(&mut command)?;
    Ok(program)
}
