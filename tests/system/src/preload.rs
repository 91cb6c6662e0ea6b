//! Small libraries of our own that change what a ggml program loads: compiled when a test needs
//! them, and preloaded into the program.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use xtask_common::cache::Cache;
use xtask_common::llama;
use xtask_common::packages;
use xtask_common::process;
use xtask_common::workspace;

/// A library in `tests/programs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    /// Loads all backends there are before the program begins.
    LoadBackends,
    /// The same, and prints all debug messages of ggml and llama.cpp on standard output.
    LogNodes,
    /// A device of the CPU kind that computes what ggml's CPU backend cannot, in double precision.
    Reference,
}

impl Library {
    fn source(self) -> &'static str {
        match self {
            Library::LoadBackends => "load_backends.c",
            Library::LogNodes => "log_nodes.c",
            Library::Reference => "reference.cpp",
        }
    }

    /// Compiles it against ggml 0.25.3, whose libraries are in `bin`.
    ///
    /// # Errors
    /// If there is no C compiler, or the compilation fails.
    pub(crate) fn build(self, cache: &Cache, bin: &Path) -> Result<PathBuf> {
        packages::compiler(cache)?;
        let source = workspace::root().join("tests/programs").join(self.source());
        let folder = workspace::root().join("target/preload");
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("creating {}", folder.display()))?;
        let library = folder.join(self.source()).with_extension("so");
        let ggml = llama::source(cache)?.join("ggml");
        let (compiler, language) = match self {
            Library::LoadBackends | Library::LogNodes => ("cc", "-std=c11"),
            Library::Reference => ("c++", "-std=c++17"),
        };
        let mut command = Command::new(compiler);
        command
            .args([language, "-O2", "-Wall", "-Wextra", "-Werror"])
            .args(["-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(&source)
            .arg("-I")
            .arg(ggml.join("include"))
            .arg("-I")
            .arg(ggml.join("src"))
            .arg("-L")
            .arg(bin)
            .args(["-lggml", "-lggml-base"])
            .arg(format!("-Wl,-rpath,{}", bin.display()));
        process::output(&mut command)?;
        Ok(library)
    }
}

/// Has a program load the library before anything else.
pub(crate) fn set(command: &mut Command, library: &Path) {
    command.env("LD_PRELOAD", library);
}
