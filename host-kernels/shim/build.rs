//! Compiles the CUDA kernels for the CPU, one translation unit per file. Kernels register
//! themselves.
//!
//! With `VGPU_SHIM_CACHE`, which `cargo xtask test` sets, that folder keeps the object files: they
//! are most of the work of the first build in a new checkout. An object file's name has a hash of
//! all that it is made from.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{env, fs, io};

/// The kernels, and the headers that they include.
const KERNELS: &str = "../cuda/kernels";

/// Sources of the shim.
const SOURCES: [&str; 3] = ["shim.cpp", "sm90.cpp", "checks.cpp"];

/// Headers of the shim.
const HEADERS: [&str; 2] = ["shim.h", "fibers.h"];

/// The folder's variable. The objects are the same without it, so a change of it is no reason to
/// run the script again.
const CACHE: &str = "VGPU_SHIM_CACHE";

/// An object file that was not used for so long is removed from the cache.
const UNUSED: Duration = Duration::from_secs(30 * 24 * 60 * 60);

fn main() {
    for watched in [KERNELS].iter().chain(&HEADERS).chain(&SOURCES) {
        println!("cargo::rerun-if-changed={watched}");
    }
    let folder = fs::read_dir(KERNELS).expect("the folder of the kernels");
    let mut kernels: Vec<_> = folder
        .map(|entry| entry.expect("an entry of the folder").path())
        .collect();
    kernels.sort();
    let is_source = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "cu");
    let (kernels, mut headers): (Vec<_>, Vec<_>) = kernels.into_iter().partition(is_source);
    headers.extend(HEADERS.map(PathBuf::from));
    let sources: Vec<PathBuf> = { SOURCES.iter().map(PathBuf::from) }
        .chain(kernels)
        .collect();

    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .define("VGPU_SHIM", None)
        .include(KERNELS)
        .include(".")
        .flag("-xc++") // whatever its file is called
        .flag("-fno-strict-aliasing")
        .flag("-ffp-contract=off")
        // Kernels jump between stacks, which the checks of a hardened compiler take for an attack.
        .flag("-U_FORTIFY_SOURCE")
        .flag_if_supported("-fcf-protection=none")
        .opt_level(2);
    let objects = match env::var_os(CACHE) {
        Some(cache) => cached(&build, &sources, &headers, Path::new(&cache)),
        None => compile(&build, &sources),
    };
    cc::Build::new()
        .cpp(true)
        .objects(objects)
        .link_lib_modifier("+whole-archive") // kernels register themselves
        .compile("vgpu_cuda_shim");
}

/// The object files of `sources`, in their order.
fn compile(build: &cc::Build, sources: &[PathBuf]) -> Vec<PathBuf> {
    build.clone().files(sources).compile_intermediates()
}

/// As [`compile`], but takes what the folder `cache` has, and adds what it lacks.
fn cached(
    build: &cc::Build,
    sources: &[PathBuf],
    headers: &[PathBuf],
    cache: &Path,
) -> Vec<PathBuf> {
    fs::create_dir_all(cache).expect("the folder of the cache");
    let common = common_hash(build, headers);
    let objects: Vec<PathBuf> = { sources.iter() }
        .map(|source| cache.join(object_name(source, &common)))
        .collect();
    let missing = { sources.iter().zip(&objects) }.filter(|(_, object)| !object.exists());
    let (missing, to): (Vec<PathBuf>, Vec<&PathBuf>) = missing
        .map(|(source, object)| (source.clone(), object))
        .unzip();
    let made = match missing.is_empty() {
        true => Vec::new(),
        false => compile(build, &missing),
    };
    for (from, to) in made.iter().zip(to) {
        // Another build of the same file may be there by then, with the same content.
        let unfinished = to.with_extension(format!("{}.unfinished", std::process::id()));
        fs::copy(from, &unfinished).expect("a copy of an object file");
        fs::rename(&unfinished, to).expect("an object file in its place");
    }
    let _ = remove_unused(cache, &objects); // the next build tries again
    objects
}

/// A hash of what all object files are made from: compiler, flags and headers.
fn common_hash(build: &cc::Build, headers: &[PathBuf]) -> DefaultHasher {
    let compiler = build.get_compiler();
    let mut hash = DefaultHasher::new();
    let version = compiler.to_command().arg("--version").output();
    version
        .expect("the compiler's version")
        .stdout
        .hash(&mut hash);
    compiler.path().hash(&mut hash);
    compiler.args().hash(&mut hash);
    for header in headers {
        header.file_name().hash(&mut hash);
        fs::read(header).expect("a header").hash(&mut hash);
    }
    hash
}

/// The name of a source's object file: that of the source, and a hash.
fn object_name(source: &Path, common: &DefaultHasher) -> String {
    let mut hash = common.clone();
    fs::read(source).expect("a source").hash(&mut hash);
    let name = source
        .file_stem()
        .expect("a file has a name")
        .to_string_lossy();
    format!("{name}-{:016x}.o", hash.finish())
}

/// Removes object files that no build has used for [`UNUSED`]. `used` are those of this build.
fn remove_unused(cache: &Path, used: &[PathBuf]) -> io::Result<()> {
    let now = SystemTime::now();
    for object in used {
        fs::File::options()
            .append(true)
            .open(object)?
            .set_modified(now)?;
    }
    for entry in fs::read_dir(cache)? {
        let entry = entry?;
        let age = now.duration_since(entry.metadata()?.modified()?);
        if age.is_ok_and(|age| age > UNUSED) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
