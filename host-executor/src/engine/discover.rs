//! Where hosts have backend libraries of ggml.
//!
//! The module reads names of folders and files, and loads nothing.
#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The variable in which ggml's programs name a backend library.
pub(super) const BACKEND_PATH: &str = "GGML_BACKEND_PATH";

/// Folders of the system in which packages have libraries of ggml, some of them in a folder `ggml`.
const SYSTEM: [&str; 4] = [
    "/usr/local/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
];

/// Where Ollama has its libraries: a folder for each kind of GPU.
const OLLAMA: [&str; 2] = ["/usr/lib/ollama", "/usr/local/lib/ollama"];

/// Where the container images of llama.cpp have theirs.
const LLAMA_IMAGE: &str = "/app";

/// The GPU backends of ggml that a search takes, best first: the interface of the maker before one
/// of several makers. Not `opencl`, which the engine cannot use, nor names that nobody has tried.
const PREFERRED: [&str; 6] = ["cuda", "hip", "musa", "cann", "sycl", "vulkan"];

/// Libraries of ggml that are no backend of a GPU of this machine, also if the operator names one:
/// the base, the processor, other machines, and the plugin of this project. Libraries of the
/// processor may have further parts in their names.
const NOT_GPU: [&str; 7] = ["base", "cpu", "blas", "zendnn", "zdnn", "rpc", "vgpu"];

/// What a search has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Search {
    /// Where the search has looked, whether the place exists or not.
    pub(super) places: Vec<PathBuf>,
    /// Backend libraries that are for a GPU by their names, best first.
    pub(super) backends: Vec<PathBuf>,
    /// The file that [`BACKEND_PATH`] names, if by its name it is for no GPU.
    pub(super) refused: Option<PathBuf>,
}

/// Looks for the backend libraries of this machine.
pub(super) fn search() -> Search {
    search_in(Path::new("/"), |name| std::env::var_os(name))
}

/// [`search`] with the folders of the system below `root`, and these environment variables.
fn search_in(root: &Path, variable: impl Fn(&str) -> Option<OsString>) -> Search {
    let mut search = Search::default();
    let named = variable(BACKEND_PATH).filter(|path| !path.is_empty());
    let named = named.map(PathBuf::from);
    let mut found = Vec::new();
    if let Some(file) = &named {
        search.places.push(file.clone());
        match backend_name(file).is_some_and(|name| !is_for_gpu(name)) {
            true => search.refused = Some(file.clone()),
            // Whatever else the name is, the operator has chosen it.
            false => found.push(file.clone()),
        }
    }
    let mut others = Vec::new();
    for place in places(root, &variable) {
        others.extend(libraries(&place.folder, place.depth));
        if !search.places.contains(&place.folder) {
            search.places.push(place.folder);
        }
    }
    // A stable sort: of two libraries of one kind, the one that was found first.
    others.sort_by_key(|path| rank(path));
    found.extend(others);
    let mut seen = BTreeSet::new();
    let is_new = |path: &PathBuf| seen.insert(path.canonicalize().unwrap_or_else(|_| path.clone()));
    search.backends = found.into_iter().filter(is_new).collect();
    search
}

/// A folder to look into, with the folders below it down to this depth.
struct Place {
    folder: PathBuf,
    depth: usize,
}

/// The folders in which a search looks, in order.
fn places(root: &Path, variable: &impl Fn(&str) -> Option<OsString>) -> Vec<Place> {
    let mut places = Vec::new();
    let mut add = |folder: PathBuf, depth| places.push(Place { folder, depth });
    // A relative folder is another one in each working directory.
    let paths = |name: &str| -> Vec<PathBuf> {
        let value = variable(name).unwrap_or_default();
        let paths = std::env::split_paths(&value);
        paths.filter(|path| path.is_absolute()).collect()
    };
    for folder in paths("LD_LIBRARY_PATH") {
        add(folder, 0);
    }
    // Releases of llama.cpp have libraries beside programs; packages, in a folder of their own.
    for (program, folders) in [
        ("llama-server", &[".", "../lib", "../libexec"][..]),
        ("llama-cli", &[".", "../lib", "../libexec"][..]),
        ("ollama", &["../lib/ollama"][..]),
    ] {
        let mut files = { paths("PATH").into_iter() }.map(|folder| folder.join(program));
        // The file itself, if a link leads to it.
        let Some(file) = files.find_map(|file| file.canonicalize().ok()) else {
            continue;
        };
        for folder in folders {
            let folder = file.parent().unwrap_or(&file).join(folder);
            if let Ok(folder) = folder.canonicalize() {
                add(folder, usize::from(program == "ollama"));
            }
        }
    }
    let system = |path: &str| root.join(path.trim_start_matches('/'));
    add(system(LLAMA_IMAGE), 0);
    for folder in OLLAMA {
        add(system(folder), 1);
    }
    for folder in SYSTEM {
        add(system(folder).join("ggml"), 1);
        add(system(folder), 0);
    }
    places
}

/// The libraries in a folder that are for a GPU by their names.
fn libraries(folder: &Path, depth: usize) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let (mut files, mut folders) = (Vec::new(), Vec::new());
    for entry in entries {
        let path = entry.path();
        match backend_name(&path) {
            Some(name) if PREFERRED.contains(&name) => files.push(path),
            None if depth > 0 && path.is_dir() => folders.push(path),
            _ => {}
        }
    }
    files.sort();
    // Of `cuda_v13` and `cuda_v12`, the newer one first.
    folders.sort_by_key(|folder| Reverse((number_at_end(folder), folder.clone())));
    files.extend({ folders.iter() }.flat_map(|folder| libraries(folder, depth - 1)));
    files
}

/// The number at the end of a name: 13 for `cuda_v13`, or 0.
fn number_at_end(path: &Path) -> u32 {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
    digits.parse().unwrap_or(0)
}

/// `vulkan` for `libggml-vulkan.so`.
fn backend_name(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix("libggml-")?.strip_suffix(".so")
}

fn is_for_gpu(name: &str) -> bool {
    !NOT_GPU.contains(&name) && !name.starts_with("cpu-")
}

/// The place of a library among those that are preferred.
fn rank(path: &Path) -> usize {
    let name = backend_name(path);
    let place = PREFERRED.iter().position(|one| Some(*one) == name);
    place.unwrap_or(PREFERRED.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with these files.
    fn machine(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a new folder");
        for file in files {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, "").expect("a file");
        }
        root
    }

    /// What a search finds, relative to the root.
    fn found(root: &Path, variables: &[(&str, String)]) -> (Vec<String>, Search) {
        let search = search_in(root, |name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| value.into())
        });
        let relative = |path: &PathBuf| {
            let path = path.strip_prefix(root).expect("below the root");
            path.display().to_string()
        };
        (search.backends.iter().map(relative).collect(), search)
    }

    #[test]
    fn backends_of_ollama_are_found_and_the_makers_come_before_vulkan() {
        let root = machine(&[
            "usr/lib/ollama/libggml-base.so",
            "usr/lib/ollama/libggml-cpu-haswell.so",
            "usr/lib/ollama/libggml-cpu.so",
            "usr/lib/ollama/vgpu/libggml-vgpu.so",
            "usr/lib/ollama/vulkan/libggml-vulkan.so",
            "usr/lib/ollama/cuda_v12/libggml-cuda.so",
            "usr/lib/ollama/cuda_v13/libggml-cuda.so",
            "usr/lib/ollama/rocm/libggml-hip.so",
            "usr/lib/ollama/rocm/libggml-hip.so.0",
            "usr/lib/ollama/opencl/libggml-opencl.so",
            "usr/lib/ollama/libggml-new.so",
        ]);
        let (backends, search) = found(root.path(), &[]);
        assert_eq!(
            backends,
            [
                "usr/lib/ollama/cuda_v13/libggml-cuda.so",
                "usr/lib/ollama/cuda_v12/libggml-cuda.so",
                "usr/lib/ollama/rocm/libggml-hip.so",
                "usr/lib/ollama/vulkan/libggml-vulkan.so",
            ]
        );
        assert_eq!(search.refused, None);
        // Also the places that do not exist, for the message.
        let elsewhere = root.path().join("usr/local/lib/ollama");
        assert!(search.places.contains(&elsewhere), "{:?}", search.places);
    }

    #[test]
    fn folders_of_the_environment_come_first() {
        let root = machine(&[
            "usr/lib/x86_64-linux-gnu/ggml/backends0/libggml-vulkan.so",
            "app/libggml-sycl.so",
            "llama-b11081/llama-server",
            "llama-b11081/libggml-vulkan.so",
            "opt/ollama/bin/ollama",
            "opt/ollama/lib/ollama/rocm/libggml-hip.so",
            "mine/libggml-vulkan.so",
            "mine/libggml-rpc.so",
            "named/my-backend.so",
        ]);
        let path = |path: &str| root.path().join(path).display().to_string();
        let bin = root.path().join("bin");
        std::fs::create_dir(&bin).expect("a folder");
        let link = bin.join("llama-server");
        std::os::unix::fs::symlink(path("llama-b11081/llama-server"), link).expect("a link");
        let variables = [
            ("LD_LIBRARY_PATH", format!("mine:{}:", path("mine"))),
            (
                "PATH",
                format!("{}:{}", path("bin"), path("opt/ollama/bin")),
            ),
            (BACKEND_PATH, path("named/my-backend.so")),
        ];
        let (backends, search) = found(root.path(), &variables);
        assert_eq!(
            backends,
            [
                "named/my-backend.so",
                "opt/ollama/lib/ollama/rocm/libggml-hip.so",
                "app/libggml-sycl.so",
                "mine/libggml-vulkan.so",
                "llama-b11081/libggml-vulkan.so",
                "usr/lib/x86_64-linux-gnu/ggml/backends0/libggml-vulkan.so",
            ]
        );
        assert!(search.places.iter().all(|place| place.is_absolute()));
    }

    #[test]
    fn a_library_that_is_for_no_gpu_is_refused_by_its_name() {
        let root = machine(&["libggml-cpu-zen4.so", "libggml-vulkan.so"]);
        let path = |path: &str| root.path().join(path);
        let variables = |file: &str| [(BACKEND_PATH, path(file).display().to_string())];
        let (backends, search) = found(root.path(), &variables("libggml-cpu-zen4.so"));
        assert!(backends.is_empty(), "{backends:?}");
        assert_eq!(search.refused, Some(path("libggml-cpu-zen4.so")));
        // One library by two names is one library.
        let folder = [
            variables("libggml-vulkan.so").to_vec(),
            vec![("LD_LIBRARY_PATH", root.path().display().to_string())],
        ];
        let (backends, search) = found(root.path(), &folder.concat());
        assert_eq!(backends, ["libggml-vulkan.so"]);
        assert_eq!(search.refused, None);
    }
}
