//! Which crate may depend on which, and how much the plugin brings into somebody else's process.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use vgpu_layers::{Cycle, Graph, Package, packages, root};

/// The packages, lowest first, and the packages of this workspace that each may be built with.
/// Tests may use more, without a cycle.
const ALLOWED: &[(&str, &[&str])] = &[
    ("vgpu-transport", &[]),
    ("vgpu-ggml-abi", &[]),
    ("vgpu-gguf", &[]),
    ("vgpu-elf", &[]),
    ("vgpu-median", &[]),
    ("vgpu-engine", &["vgpu-transport"]),
    ("vgpu-cpu", &["vgpu-engine", "vgpu-transport"]),
    ("vgpu-cuda-shim", &[]),
    ("vgpu-driver-standin", &["vgpu-cuda-shim"]),
    // What a GPU does not compute, its engine computes on the CPU.
    ("vgpu-cuda", &["vgpu-cpu", "vgpu-engine", "vgpu-transport"]),
    (
        "vgpu-ggml",
        &["vgpu-engine", "vgpu-ggml-abi", "vgpu-transport"],
    ),
    (
        "vgpu-check",
        &[
            "vgpu-cpu",
            "vgpu-cuda",
            "vgpu-engine",
            "vgpu-gguf",
            "vgpu-median",
            "vgpu-transport",
        ],
    ),
    (
        "vgpu-executor",
        &[
            "vgpu-cpu",
            "vgpu-cuda",
            "vgpu-engine",
            "vgpu-ggml",
            "vgpu-transport",
        ],
    ),
    ("vgpu-machine-standin", &["vgpu-transport"]),
    ("vgpu-kubernetes", &["vgpu-executor"]),
    (
        "vgpu",
        &[
            "vgpu-check",
            "vgpu-cpu",
            "vgpu-cuda",
            "vgpu-elf",
            "vgpu-engine",
            "vgpu-executor",
            "vgpu-kubernetes",
            "vgpu-median",
            "vgpu-transport",
        ],
    ),
    (
        "ggml-vgpu",
        &[
            "vgpu-cpu",
            "vgpu-engine",
            "vgpu-executor",
            "vgpu-ggml-abi",
            "vgpu-transport",
        ],
    ),
    ("xtask-common", &["vgpu-elf", "vgpu-gguf", "vgpu-median"]),
    ("xtask", &["xtask-common"]),
    ("vgpu-layers", &[]),
    (
        "vgpu-system-tests",
        &["vgpu-gguf", "vgpu-machine-standin", "xtask-common"],
    ),
    ("vgpu-benches", &["xtask-common"]),
];

/// The plugin is loaded into programs of others: with all that it depends on, at most so many
/// crates.
const MAX_PLUGIN_CRATES: usize = 70;

/// Crates for a command, a terminal or a device, which have no place in the plugin. (rustls has
/// one: the TCP link.)
const BANNED: [&str; 8] = [
    "clap",
    "crossterm",
    "ratatui",
    "rcgen",
    "hyper",
    "tokio",
    "tonic",
    "vfio_user",
];

#[test]
fn crates_depend_on_lower_layers_only() {
    let packages = packages().unwrap();
    let mut below: BTreeSet<&str> = BTreeSet::new();
    for (name, allowed) in ALLOWED {
        for lower in *allowed {
            assert!(
                below.contains(lower),
                "{name} may depend on {lower}, which is not below it"
            );
        }
        below.insert(name);
        let package = packages.iter().find(|package| package.name == *name);
        let package =
            package.unwrap_or_else(|| panic!("ALLOWED names {name}, which is no package"));
        for dependency in &package.dependencies {
            assert!(
                allowed.contains(&dependency.as_str()),
                "{name} must not depend on {dependency}"
            );
        }
    }
    for package in &packages {
        assert!(
            below.contains(package.name.as_str()),
            "ALLOWED does not name {}",
            package.name
        );
    }
}

/// The cycles of packages, with those that only tests use.
fn cycles(packages: &[Package]) -> Vec<Cycle> {
    let mut graph = Graph::default();
    for package in packages {
        let (name, used) = (Path::new(&package.name), &package.dependencies);
        used.iter()
            .for_each(|used| graph.add(name, Path::new(used), "dependency".to_owned()));
        { package.test_dependencies.iter() }
            .for_each(|used| graph.add(name, Path::new(used), "test dependency".to_owned()));
    }
    graph.cycles()
}

/// A crate whose tests use a crate above is compiled again for these tests, with all that is
/// between the two.
#[test]
fn crates_have_no_cycles_with_their_tests() {
    let packages = packages().unwrap();
    let cycles = cycles(&packages);
    let texts: Vec<_> = cycles.iter().map(ToString::to_string).collect();
    assert!(texts.is_empty(), "{}", texts.concat());
    // Read wrongly, the list would have no cycle either.
    let check = packages.iter().find(|package| package.name == "vgpu-check");
    let used = &check.expect("the self-test").test_dependencies;
    assert!(used.contains(&"vgpu-cuda-shim".to_owned()), "{used:?}");
}

#[test]
fn a_test_that_uses_a_crate_above_makes_a_cycle() {
    let mut packages = packages().unwrap();
    let engine = { packages.iter_mut() }.find(|package| package.name == "vgpu-engine");
    let engine = engine.expect("the contract of engines");
    engine.test_dependencies.push("vgpu-cpu".to_owned());
    let cycles = cycles(&packages);
    let files: Vec<_> = cycles.iter().map(|cycle| cycle.files.clone()).collect();
    assert_eq!(files, [["vgpu-cpu", "vgpu-engine"].map(PathBuf::from)]);
}

/// The crates that a package is built with, itself included: lines such as `libc v0.2.191`.
fn tree(package: &str) -> BTreeSet<String> {
    tree_with(&["--package", package, "--edges", "normal"])
}

/// What `cargo tree` lists.
fn tree_with(args: &[&str]) -> BTreeSet<String> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["tree", "--prefix", "none"]).args(args);
    let output = cargo.current_dir(root()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "cargo tree ended with {}\n{said}",
        output.status
    );
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .map(|line| line.trim_end_matches(" (*)").to_owned())
        .collect()
}

/// The crates that a build compiles, each with its features: lines such as `half v2.7.1 [std]`. A
/// crate of build scripts and macros that has other features there is listed twice.
fn units(args: &[&str]) -> BTreeSet<String> {
    let mut all = vec!["--edges", "normal,build", "--format", "{p} [{f}]"];
    all.extend(args);
    tree_with(&all)
}

/// The crates of the first list that the second list has with other features only. Cargo compiles
/// such a crate, and all that depends on it, for both builds.
fn compiled_twice(first: &BTreeSet<String>, second: &BTreeSet<String>) -> Vec<String> {
    let name = |line: &str| line.split(" [").next().unwrap_or_default().to_owned();
    let known: BTreeSet<String> = second.iter().map(|line| name(line)).collect();
    let differ = first.difference(second);
    let twice: Vec<String> = differ
        .filter(|line| known.contains(&name(line)))
        .cloned()
        .collect();
    // Read wrongly, the lists would have nothing in common either.
    for shared in ["libc v", "rustix v", "zerocopy v"] {
        let in_both = first
            .intersection(second)
            .any(|line| line.starts_with(shared));
        assert!(
            in_both || twice.iter().any(|line| line.starts_with(shared)),
            "{shared}: in {first:#?} and {second:#?}"
        );
    }
    twice
}

#[test]
fn crates_with_other_features_are_compiled_twice() {
    let list = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect();
    let both = ["rustix v1 [fs]", "zerocopy v0.8.63 [derive]"];
    let first: BTreeSet<String> = list(&[&both[..], &["libc v1 [std]", "syn v2 []"]].concat());
    let second: BTreeSet<String> = list(&[&both[..], &["libc v1 []"]].concat());
    assert_eq!(compiled_twice(&first, &second), ["libc v1 [std]"]);
}

/// The CPU engine is the largest part of the plugin and of `vgpu`. Both are built in one target
/// folder, and cargo compiles the engine once only if all crates below the engine have the same
/// features in both builds.
#[test]
fn cpu_engine_is_compiled_once_for_plugin_and_command() {
    let engine = tree_with(&["--package", "vgpu-cpu", "--edges", "normal,build"]);
    let below: BTreeSet<String> = units(&["--package", "ggml-vgpu"])
        .into_iter()
        .filter(|line| engine.contains(line.split(" [").next().unwrap_or_default()))
        .collect();
    let command = units(&["--package", "vgpu"]);
    let twice = compiled_twice(&below, &command);
    assert!(
        twice.is_empty(),
        "vgpu has these crates with other features, see \"Not used\" in Cargo.toml: {twice:#?}"
    );
}

/// A newcomer waits for both.
#[test]
fn demo_shares_crates_with_xtask() {
    // As `xtask_common::dist::build_for_demo` builds them.
    let demo = [
        "--package",
        "ggml-vgpu",
        "--package",
        "vgpu",
        "--no-default-features",
        "--features",
        "vgpu/avx2",
    ];
    let twice = compiled_twice(&units(&["--package", "xtask"]), &units(&demo));
    assert!(
        twice.is_empty(),
        "the demo has these crates with other features, see \"Not used\" in \
         xtask/common/Cargo.toml: {twice:#?}"
    );
}

#[test]
fn plugin_has_few_dependencies_and_no_binary() {
    let crates = tree("ggml-vgpu");
    assert!(
        crates.len() <= MAX_PLUGIN_CRATES,
        "{} crates: {crates:#?}",
        crates.len()
    );
    for banned in BANNED {
        let found = crates
            .iter()
            .find(|line| line.starts_with(&format!("{banned} ")));
        assert_eq!(found, None, "the plugin must do without {banned}");
    }
    // Read wrongly, the list would hold nothing that is banned either.
    assert!(
        crates
            .iter()
            .any(|line| line.starts_with("vgpu-transport ")),
        "{crates:?}"
    );
    assert!(
        tree("vgpu").iter().any(|line| line.starts_with("clap ")),
        "the command has clap"
    );
}
