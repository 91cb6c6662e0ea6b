//! The real ggml and llama.cpp: sources from the package registries, built once per machine type.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::cache::Cache;
use crate::packages;
use crate::process;
use crate::progress::Progress;
use crate::workspace;

/// PyPI `llama-cpp-python`, whose source distribution carries llama.cpp with its tests and tools:
/// ggml 0.25.3, backend API 2.
const PYTHON_PACKAGE: &str = "llama-cpp-python";
const PYTHON_VERSION: &str = "0.3.36";
const PYTHON_SHA256: &str = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e";
/// crates.io `llama-cpp-sys-2`: ggml 0.26.0, backend API 3. Sources without tests.
const CRATE: &str = "llama-cpp-sys-2";
const CRATE_VERSION: &str = "0.1.161";

/// The release of ggml in the first.
pub const RELEASE: &str = "0.25.3";
/// The release of ggml in the second.
pub const NEWEST_RELEASE: &str = "0.26.0";

/// What CMake is told about the targets of llama.cpp.
const SETTINGS: &str = include_str!("llama.cmake");

/// A part of the build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// ggml with its CPU and RPC backends, and `test-backend-ops`.
    Ops,
    /// libllama and the programs on top of it.
    Tools,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Stage::Ops => "ops",
            Stage::Tools => "tools",
        }
    }

    fn targets(self) -> &'static [&'static str] {
        match self {
            Stage::Ops => &["ggml", "ggml-cpu", "ggml-rpc", "test-backend-ops"],
            Stage::Tools => &[
                "llama-server",
                "llama-completion",
                "llama-bench",
                "llama-batched-bench",
                "llama-perplexity",
                "llama-quantize",
                "ggml-rpc-server",
                "test-llama-archs",
                "test-export-graph-ops",
                "test-save-load-state",
                "test-thread-safety",
            ],
        }
    }
}

/// The folder of llama.cpp's sources (ggml 0.25.3).
///
/// # Errors
/// If the sources cannot be fetched or unpacked.
pub fn source(cache: &Cache) -> Result<PathBuf> {
    let name = format!("{PYTHON_PACKAGE}-{PYTHON_VERSION}");
    let root = cache.folder(&name, |dir| {
        packages::SourceDistribution {
            project: PYTHON_PACKAGE,
            version: PYTHON_VERSION.to_owned(),
            sha256: Some(PYTHON_SHA256),
        }
        .unpack(cache, dir, &[])
    })?;
    let source = root.join("vendor/llama.cpp");
    ensure!(
        source.join("CMakeLists.txt").exists(),
        "{} holds no llama.cpp",
        root.display()
    );
    Ok(source)
}

/// The folder of the crate whose `llama.cpp` folder has ggml 0.26.0.
///
/// # Errors
/// If the sources cannot be fetched.
pub fn newest_source(cache: &Cache) -> Result<PathBuf> {
    let name = format!("{CRATE}-{CRATE_VERSION}");
    cache.folder(&name, |dir| {
        let progress = Progress::new(&format!("fetching the sources of {name}"));
        // Cargo fetches for a package only: one that needs nothing but this crate.
        let manifest = format!(
            "[package]\nname = \"fetch\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
             [lib]\npath = \"lib.rs\"\n[workspace]\n\
             [dependencies]\n{CRATE} = {{ version = \"={CRATE_VERSION}\", default-features = false }}\n"
        );
        let fetch = dir.join("fetch");
        std::fs::create_dir(&fetch).context("creating a folder")?;
        std::fs::write(fetch.join("Cargo.toml"), manifest).context("writing a manifest")?;
        std::fs::write(fetch.join("lib.rs"), "").context("writing a source file")?;
        let mut cargo = workspace::cargo();
        cargo.args(["vendor", "--versioned-dirs", "vendored"]).current_dir(&fetch);
        process::run(&mut cargo, &progress, &cache.log(&name))?;
        let vendored = fetch.join("vendored").join(&name);
        for entry in std::fs::read_dir(&vendored).context("listing the fetched crate")? {
            let entry = entry.context("listing the fetched crate")?;
            std::fs::rename(entry.path(), dir.join(entry.file_name()))
                .context("moving the fetched crate")?;
        }
        std::fs::remove_dir_all(&fetch).context("removing what else was fetched")?;
        progress.done("");
        Ok(())
    })
}

/// The folder of the built programs and libraries, with `stage` built.
///
/// # Errors
/// If the sources cannot be fetched, a tool is missing, or the build fails.
pub fn build(cache: &Cache, stage: Stage) -> Result<PathBuf> {
    let source = source(cache)?;
    let instructions = Instructions::of_this_machine();
    let builds = format!("build-llama-{PYTHON_VERSION}");
    let name = format!("{builds}/{}", instructions.name);
    if stage == Stage::Tools {
        build(cache, Stage::Ops)?;
    }
    let root = cache.staged(&name, stage.name(), |dir| {
        let tools = packages::build_tools(cache)?;
        let log = cache.log(&format!("{builds}-{}", stage.name()));
        if stage == Stage::Ops {
            let progress = Progress::new("configuring ggml and llama.cpp");
            configure(&tools, &source, dir, &instructions, &progress, &log)?;
            progress.done(&instructions.name);
        }
        let progress = Progress::new(match stage {
            Stage::Ops => "building ggml and test-backend-ops (about a minute on two cores)",
            Stage::Tools => "building libllama and its tools (about a minute on two cores)",
        });
        process::run(&mut ninja(&tools, dir, stage.targets()), &progress, &log)?;
        progress.done("");
        Ok(())
    })?;
    // The build for this machine, for programs that know nothing of instruction sets.
    cache.link(
        &format!("{builds}/bin"),
        &Path::new(&instructions.name).join("bin"),
    )?;
    Ok(root.join("bin"))
}

/// llama-server for other machines.
#[derive(Clone, Debug)]
pub struct PortableServer {
    /// The folder of the program and of all that it loads, without links.
    pub programs: PathBuf,
    /// The sources.
    pub source: PathBuf,
    /// The licenses of what is compiled in, by their paths in `source`.
    pub licenses: Vec<PathBuf>,
    /// What the sources call themselves, such as `0.5.0`.
    pub version: String,
    /// The commit of llama.cpp.
    pub commit: String,
    /// The names of the libraries in its folder `vendor`, which have no versions there.
    pub carried: Vec<String>,
}

/// Builds llama-server for other machines with the C library of this one: with a CPU backend of
/// ggml for each kind of processor, and without a path of this machine. Another compiler or C
/// library builds it again.
///
/// # Errors
/// As [`build`].
pub fn portable_server(cache: &Cache) -> Result<PortableServer> {
    const PROGRAM: &str = "llama-server";
    let source = source(cache)?;
    let licenses = licenses(&source)?;
    let mut key = DefaultHasher::new();
    for program in ["cc", "c++", "ldd"] {
        let version = process::output(Command::new(program).arg("--version"))?;
        version.lines().next().hash(&mut key);
    }
    (WITHOUT, PORTABLE).hash(&mut key);
    let name = format!("portable-llama-{PYTHON_VERSION}-{:016x}", key.finish());
    let root = cache.staged(&name, PROGRAM, |dir| {
        let tools = packages::build_tools(cache)?;
        let log = cache.log(&name);
        let progress = Progress::new(
            "building llama-server for every processor (about a quarter of an hour on two cores)",
        );
        let mut cmake = loading_cmake(&tools, &source, dir)?;
        cmake.args(WITHOUT).args(PORTABLE);
        // Assertions of ggml name their file.
        let map = |folder: &Path| format!("-ffile-prefix-map={}=llama.cpp", folder.display());
        let flags = format!("{} {}", map(&source), map(dir));
        cmake.args(["C", "CXX"].map(|language| format!("-DCMAKE_{language}_FLAGS={flags}")));
        process::run(&mut cmake, &progress, &log)?;
        process::run(&mut ninja(&tools, dir, &[PROGRAM]), &progress, &log)?;
        progress.done("");
        Ok(())
    })?;
    Ok(PortableServer {
        programs: root.join("bin"),
        version: version_of(&source)?,
        commit: commit_of(&source)?,
        carried: carried(&source)?,
        source,
        licenses,
    })
}

/// The version in llama.cpp's CMakeLists.txt.
fn version_of(source: &Path) -> Result<String> {
    let file = source.join("CMakeLists.txt");
    let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let part = |name: &str| {
        let start = format!("set(LLAMA_VERSION_{name} ");
        let part = text.split(&start).nth(1)?.split(')').next()?;
        part.parse::<u32>().ok()
    };
    let parts = ["MAJOR", "MINOR", "PATCH"].map(part);
    let [Some(major), Some(minor), Some(patch)] = parts else {
        bail!("{} has no version: {parts:?}", file.display());
    };
    Ok(format!("{major}.{minor}.{patch}"))
}

/// The commit of llama.cpp that the Python package has taken: the first that its list of changes
/// names below its version.
fn commit_of(source: &Path) -> Result<String> {
    let file = source.join("../../CHANGELOG.md");
    let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let heading = format!("\n## [{PYTHON_VERSION}]\n");
    let section = text.split(&heading).nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let commit = section.split("ggml-org/llama.cpp@").nth(1);
    let commit = commit.and_then(|rest| rest.split_whitespace().next());
    let commit = commit.filter(|commit| commit.bytes().all(|byte| byte.is_ascii_hexdigit()));
    commit
        .map(str::to_owned)
        .with_context(|| format!("{} names no commit for {PYTHON_VERSION}", file.display()))
}

/// The names of the folders in llama.cpp's folder `vendor`, sorted.
fn carried(source: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(source.join("vendor")).context("listing vendor")? {
        let entry = entry.context("listing vendor")?;
        if entry.file_type().context("listing vendor")?.is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// What llama.cpp is built without, everywhere.
const WITHOUT: [&str; 4] = [
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
];

/// The options of [`portable_server`].
const PORTABLE: [&str; 5] = [
    "-DGGML_CPU_ALL_VARIANTS=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    // Libraries are found beside the program, and have one name each.
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON",
];

/// The licenses in llama.cpp's sources that apply to llama-server, by their paths there: its own,
/// and those of the libraries that it carries.
fn licenses(source: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![PathBuf::from("LICENSE")];
    let mut folders = vec![PathBuf::from("licenses"), PathBuf::from("vendor")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(source.join(&folder)).context("listing licenses")? {
            let entry = entry.context("listing licenses")?;
            let path = folder.join(entry.file_name());
            let is_license = entry.file_name().as_encoded_bytes().starts_with(b"LICENSE");
            if entry.file_type().context("listing licenses")?.is_dir() {
                folders.push(path);
            } else if is_license {
                found.push(path);
            }
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// The folder of two builds of the newest ggml: `shared/bin` has ggml with its CPU backend and
/// libllama, and `static` an archive of ggml-base that can become a part of anything.
///
/// # Errors
/// As [`build`].
pub fn build_newest(cache: &Cache) -> Result<PathBuf> {
    let source = newest_source(cache)?.join("llama.cpp");
    let instructions = Instructions::of_this_machine();
    cache.staged(&newest_builds(&instructions), "all", |dir| {
        let tools = packages::build_tools(cache)?;
        let log = cache.log(&format!("build-{CRATE}-{CRATE_VERSION}"));
        let progress = Progress::new(&format!(
            "building libllama on ggml {NEWEST_RELEASE} (about two minutes on two cores)"
        ));
        build_bare(
            (&tools, &source),
            &dir.join("shared"),
            &[],
            LIBLLAMA,
            (&progress, &log),
        )?;
        let folder = dir.join("static");
        let archive = [
            "-DBUILD_SHARED_LIBS=OFF".to_owned(),
            "-DGGML_BACKEND_DL=OFF".to_owned(),
            "-DCMAKE_POSITION_INDEPENDENT_CODE=ON".to_owned(),
            "-DGGML_CPU=OFF".to_owned(),
            format!("-DCMAKE_ARCHIVE_OUTPUT_DIRECTORY={}", folder.display()),
        ];
        build_bare(
            (&tools, &source),
            &folder,
            &archive,
            &["ggml-base"],
            (&progress, &log),
        )?;
        progress.done("");
        Ok(())
    })
}

/// libllama and the libraries of ggml that it needs.
pub(crate) const LIBLLAMA: &[&str] = &["ggml", "ggml-cpu", "llama"];

/// Builds libraries of llama.cpp's `source` for this machine, of sources that have no programs:
/// what they leave out cannot be configured either. `tools` has CMake and ninja.
pub(crate) fn build_bare(
    (tools, source): (&Path, &Path),
    dir: &Path,
    options: &[String],
    targets: &[&str],
    (progress, log): (&Progress, &Path),
) -> Result<()> {
    let parts = ["COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP"];
    let mut cmake = cmake(tools, source, dir, &Instructions::of_this_machine())?;
    cmake.args(parts.map(|part| format!("-DLLAMA_BUILD_{part}=OFF")));
    process::run(cmake.args(options), progress, log)?;
    process::run(&mut ninja(tools, dir, targets), progress, log)
}

/// The folder of `test-backend-ops` and the libraries of the newest ggml, which comes without
/// tests: the program is that of 0.25.3, whose ops and types are the same.
///
/// # Errors
/// As [`build`].
pub fn newest_ops(cache: &Cache) -> Result<PathBuf> {
    let bin = build_newest(cache)?.join("shared/bin");
    let include = newest_source(cache)?.join("llama.cpp/ggml/include");
    let program = source(cache)?.join("tests/test-backend-ops.cpp");
    let builds = newest_builds(&Instructions::of_this_machine());
    cache.staged(&builds, "ops", |_| {
        let progress = Progress::new(&format!(
            "building test-backend-ops for ggml {NEWEST_RELEASE} (about a minute)"
        ));
        let log = cache.log(&format!("build-{CRATE}-{CRATE_VERSION}-ops"));
        compile_ops(&program, &include, &bin, &progress, &log)?;
        progress.done("");
        Ok(())
    })?;
    Ok(bin)
}

/// The folder of `test-llama-archs` and the libraries of the newest ggml: the program of 0.25.3,
/// with the newest libllama.
///
/// # Errors
/// As [`build`].
pub fn newest_archs(cache: &Cache) -> Result<PathBuf> {
    let bin = build_newest(cache)?.join("shared/bin");
    let newest = newest_source(cache)?.join("llama.cpp");
    let program = source(cache)?.join("tests/test-llama-archs.cpp");
    let builds = newest_builds(&Instructions::of_this_machine());
    cache.staged(&builds, "archs", |dir| {
        let progress = Progress::new(&format!(
            "building test-llama-archs for ggml {NEWEST_RELEASE} (about a minute)"
        ));
        let log = cache.log(&format!("build-{CRATE}-{CRATE_VERSION}-archs"));
        compile_archs(
            (&program, &newest),
            &dir.join("archs"),
            &bin,
            (&progress, &log),
        )?;
        progress.done("");
        Ok(())
    })?;
    Ok(bin)
}

/// Compiles `test-llama-archs` (the file `program`) for the libllama in `bin`, which is built from
/// llama.cpp's `source`, and puts it there. `archs` is a folder for what the compiler reads.
pub(crate) fn compile_archs(
    (program, source): (&Path, &Path),
    archs: &Path,
    bin: &Path,
    (progress, log): (&Progress, &Path),
) -> Result<()> {
    // The program includes headers of libllama by their place beside its own folder.
    let tests = archs.join("tests");
    let headers = archs.join("src");
    if archs.exists() {
        std::fs::remove_dir_all(archs).context("removing an incomplete build")?;
    }
    std::fs::create_dir_all(&tests).context("creating a folder")?;
    std::os::unix::fs::symlink(source.join("src"), &headers).context("linking the headers")?;
    let copy = tests.join("test-llama-archs.cpp");
    std::fs::copy(program, &copy).context("copying the program")?;
    // CMake would fill in what the log says about the build.
    let common = source.join("common");
    let template = std::fs::read_to_string(common.join("build-info.cpp.in"))
        .context("reading the template of the build's description")?;
    let description = template
        .replace("@LLAMA_BUILD_NUMBER@", "0")
        .replace('@', "");
    let about = archs.join("build-info.cpp");
    std::fs::write(&about, description).context("writing a source file")?;

    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O1", "-pthread"]);
    // Most functions of these files are not used, and need libraries that are not built.
    compiler.args([
        "-ffunction-sections",
        "-fdata-sections",
        "-Wl,--gc-sections",
    ]);
    compiler.args([copy, about]);
    for file in ["log.cpp", "common.cpp", "json.cpp"] {
        compiler.arg(common.join(file));
    }
    for include in ["common", "vendor", "include", "ggml/include", "src"] {
        compiler.arg("-I").arg(source.join(include));
    }
    compiler
        .arg("-L")
        .arg(bin)
        .args(["-lllama", "-lggml", "-lggml-base", "-Wl,-rpath,$ORIGIN"])
        .arg("-o")
        .arg(bin.join("test-llama-archs"));
    process::run(&mut compiler, progress, log)
}

/// Compiles `test-backend-ops` for the ggml in `bin`, and puts the program there.
pub(crate) fn compile_ops(
    program: &Path,
    include: &Path,
    bin: &Path,
    progress: &Progress,
    log: &Path,
) -> Result<()> {
    let mut compiler = Command::new("c++");
    compiler
        .args(["-std=c++17", "-O1", "-pthread"])
        .arg(program)
        .arg("-I")
        .arg(include)
        .arg("-L")
        .arg(bin)
        .args(["-lggml", "-lggml-base", "-Wl,-rpath,$ORIGIN"])
        .arg("-o")
        .arg(bin.join("test-backend-ops"));
    process::run(&mut compiler, progress, log)
}

/// Where the newest ggml is built.
fn newest_builds(instructions: &Instructions) -> String {
    format!("build-{CRATE}-{CRATE_VERSION}/{}", instructions.name)
}

/// ggml's CPU backend for the processor that an emulated guest sees (AVX2, no AVX-512). Everything
/// else of a build runs on any processor.
///
/// # Errors
/// As [`build`].
pub fn cpu_for_guests(cache: &Cache) -> Result<PathBuf> {
    cpu_built_for(cache, &Instructions::avx2())
}

/// ggml's CPU backend for processors with AVX2 and AVX-VNNI.
///
/// # Errors
/// As [`build`].
pub fn cpu_with_avx_vnni(cache: &Cache) -> Result<PathBuf> {
    cpu_built_for(cache, &Instructions::of(&[AVX2, AVX_VNNI]))
}

/// ggml's CPU backend without any instructions beyond those that every x86-64 has.
///
/// # Errors
/// As [`build`].
pub fn cpu_without_simd(cache: &Cache) -> Result<PathBuf> {
    cpu_built_for(cache, &Instructions::of(&[]))
}

fn cpu_built_for(cache: &Cache, instructions: &Instructions) -> Result<PathBuf> {
    let source = source(cache)?;
    let name = format!("build-llama-{PYTHON_VERSION}/{}", instructions.name);
    let root = cache.staged(&name, "cpu", |dir| {
        let tools = packages::build_tools(cache)?;
        let log = cache.log(&format!("build-llama-{PYTHON_VERSION}-cpu"));
        let progress = Progress::new(&format!(
            "building ggml's CPU backend for {} (about a minute on two cores)",
            instructions.name
        ));
        configure(&tools, &source, dir, instructions, &progress, &log)?;
        let mut ninja = Command::new(tools.join("ninja"));
        ninja
            .arg("-C")
            .arg(dir)
            .arg(format!("-j{}", workspace::cores()))
            .arg("ggml-cpu");
        process::run(&mut ninja, &progress, &log)?;
        progress.done(&instructions.name);
        Ok(())
    })?;
    Ok(root.join("bin/libggml-cpu.so"))
}

/// Configures llama.cpp.
fn configure(
    tools: &Path,
    source: &Path,
    dir: &Path,
    instructions: &Instructions,
    progress: &Progress,
    log: &Path,
) -> Result<()> {
    let mut cmake = cmake(tools, source, dir, instructions)?;
    cmake.args(["-DGGML_RPC=ON", "-DLLAMA_BUILD_TESTS=ON"]);
    cmake.args(WITHOUT);
    process::run(&mut cmake, progress, log)
}

/// A configuration of a shared release build with backends that are loaded, in which the C++ takes
/// less time to compile.
pub(crate) fn cmake(
    tools: &Path,
    source: &Path,
    dir: &Path,
    instructions: &Instructions,
) -> Result<Command> {
    let mut cmake = loading_cmake(tools, source, dir)?;
    let settings = dir.join("llama.cmake");
    std::fs::write(&settings, SETTINGS)
        .with_context(|| format!("writing {}", settings.display()))?;
    cmake.args(&instructions.flags);
    cmake.arg(format!(
        "-DCMAKE_PROJECT_llama.cpp_INCLUDE={}",
        settings.display()
    ));
    Ok(cmake)
}

/// A configuration of a shared release build with backends that are loaded, with the optimisation
/// that llama.cpp's authors have chosen.
fn loading_cmake(tools: &Path, source: &Path, dir: &Path) -> Result<Command> {
    std::fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    let mut cmake = Command::new(tools.join("cmake"));
    cmake
        .arg("-S")
        .arg(source)
        .arg("-B")
        .arg(dir)
        .args(["-G", "Ninja"]);
    cmake.arg(format!(
        "-DCMAKE_MAKE_PROGRAM={}",
        tools.join("ninja").display()
    ));
    // GGML_BACKEND_DL is what makes a program load other backends at all; it excludes GGML_NATIVE,
    // so the instruction sets are named.
    cmake.args([
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=ON",
        "-DGGML_BACKEND_DL=ON",
        "-DGGML_NATIVE=OFF",
    ]);
    Ok(cmake)
}

/// A build of `targets`.
pub(crate) fn ninja(tools: &Path, dir: &Path, targets: &[&str]) -> Command {
    let mut ninja = Command::new(tools.join("ninja"));
    // Ninja's own choice is more jobs than cores, and the largest files need 2 GB each.
    ninja
        .arg("-C")
        .arg(dir)
        .arg(format!("-j{}", workspace::cores()))
        .args(targets);
    ninja
}

/// The instruction sets ggml's CPU backend is built for: part of the build's key, because a cache
/// may be shared by machines of several kinds.
#[derive(Debug)]
pub(crate) struct Instructions {
    pub(crate) name: String,
    flags: Vec<String>,
}

/// Instructions that are switched on together: a name, and ggml's names.
type Group = (&'static str, &'static [&'static str]);

const AVX2: Group = ("avx2", &["SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"]);
const AVX_VNNI: Group = ("avxvnni", &["AVX_VNNI"]);

impl Instructions {
    pub(crate) fn of_this_machine() -> Instructions {
        let mut groups: Vec<Group> = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") && has!("bmi2") {
                groups.push(AVX2);
            }
            let avx512 = has!("avx512f") && has!("avx512cd") && has!("avx512vl");
            if avx512 && has!("avx512dq") && has!("avx512bw") {
                groups.push(("avx512", &["AVX512"]));
                if has!("avx512vbmi") {
                    groups.push(("vbmi", &["AVX512_VBMI"]));
                }
                if has!("avx512vnni") {
                    groups.push(("vnni", &["AVX512_VNNI"]));
                }
                if has!("avx512bf16") {
                    groups.push(("bf16", &["AVX512_BF16"]));
                }
            } else if has!("avxvnni") {
                groups.push(AVX_VNNI);
            }
        }
        Instructions::of(&groups)
    }

    /// AVX2 and no more: the processor that QEMU emulates.
    fn avx2() -> Instructions {
        Instructions::of(&[AVX2])
    }

    fn of(groups: &[Group]) -> Instructions {
        let names = std::iter::once(std::env::consts::ARCH).chain(groups.iter().map(|g| g.0));
        Instructions {
            name: names.collect::<Vec<_>>().join("-"),
            flags: groups
                .iter()
                .flat_map(|g| g.1)
                .map(|f| format!("-DGGML_{f}=ON"))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn version_and_commit_are_those_of_the_sources() {
        let scratch = Scratch::new().expect("a folder");
        let source = scratch.path().join("vendor/llama.cpp");
        for library in ["vendor/stb", "vendor/hash/sha256"] {
            std::fs::create_dir_all(source.join(library)).expect("a folder");
        }
        let cmake = "set(LLAMA_VERSION_MAJOR 0)\nset(LLAMA_VERSION_MINOR 5)\n\
                     set(LLAMA_VERSION_PATCH 12)\n\
                     set(LLAMA_VERSION_BASE \"${LLAMA_VERSION_MAJOR}\")\n";
        std::fs::write(source.join("CMakeLists.txt"), cmake).expect("a file");
        std::fs::write(source.join("vendor/CMakeLists.txt"), "").expect("a file");
        assert_eq!(version_of(&source).expect("a version"), "0.5.12");
        assert_eq!(carried(&source).expect("names"), ["hash", "stb"]);

        let changes = |version: &str| {
            let text = format!(
                "# Changelog\n\n## [Unreleased]\n\n- ggml-org/llama.cpp@aaaa\n\n## [{version}]\n\n\
                 - feat: update llama.cpp to ggml-org/llama.cpp@0c1e57098\n- other\n\n\
                 ## [0.0.1]\n\n- ggml-org/llama.cpp@bbbb\n"
            );
            std::fs::write(scratch.path().join("CHANGELOG.md"), text).expect("a file");
            commit_of(&source)
        };
        assert_eq!(changes(PYTHON_VERSION).expect("a commit"), "0c1e57098");
        let error = changes("9.9.9").expect_err("no such version").to_string();
        assert!(error.contains("names no commit for"), "{error}");
        std::fs::write(source.join("CMakeLists.txt"), "project(x)\n").expect("a file");
        let error = version_of(&source).expect_err("no version").to_string();
        assert!(error.contains("has no version"), "{error}");
    }
}
