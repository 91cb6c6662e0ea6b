//! The order of the modules inside a crate, and which modules of the transport an engine imports.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use vgpu_layers::{Disk, Graph, Memory, Tree, external_paths, graph, packages, root};

/// The modules of `vgpu-transport` and the modules that each may import.
const TRANSPORT: &[(&str, &[&str])] = &[
    ("bytes", &[]),
    ("error", &[]),
    ("fork", &["lock"]),
    ("limits", &[]),
    ("lock", &[]),
    ("memfd", &[]),
    ("poll", &[]),
    ("random", &[]),
    ("size", &[]),
    ("ir", BASE),
    ("shm", BASE),
    (
        "wire",
        &[
            "bytes", "error", "fork", "ir", "limits", "lock", "memfd", "poll", "random", "shm",
            "size",
        ],
    ),
    // Not `ir` and not `wire`: a link carries bytes and does not know their meaning.
    (
        "link",
        &[
            "bytes", "error", "fork", "limits", "lock", "memfd", "poll", "random", "shm", "size",
        ],
    ),
];

/// The lowest layer.
const BASE: &[&str] = &[
    "bytes", "error", "fork", "limits", "lock", "memfd", "poll", "random", "size",
];

/// What an engine and the crates beside it import from `vgpu-transport`: the paths begin with one
/// of these.
const OF_ENGINES: &[&str] = &["bytes", "ir", "lock", "memfd", "size"];

/// The packages to which [`OF_ENGINES`] applies.
const ENGINES: &[&str] = &[
    "vgpu-engine",
    "vgpu-cpu",
    "vgpu-cuda",
    "vgpu-ggml",
    "vgpu-check",
];

/// The module below the root that a file is of: `link` for `src/link/pci/host.rs`. `None` for the
/// root itself.
fn top(source: &Path, file: &Path) -> Option<String> {
    let inside = file.strip_prefix(source).ok()?;
    let first = inside.components().next()?.as_os_str().to_str()?;
    let name = first.strip_suffix(".rs").unwrap_or(first);
    (name != "lib").then(|| name.to_owned())
}

/// Imports between modules that `allowed` does not permit.
fn forbidden(graph: &Graph, source: &Path, allowed: &[(&str, &[&str])]) -> Vec<String> {
    let mut wrong = Vec::new();
    for (from, to, names) in graph.edges() {
        let (Some(user), Some(used)) = (top(source, from), top(source, to)) else {
            continue;
        };
        let rule = { allowed.iter() }.find(|(name, _)| *name == user);
        match rule {
            None => wrong.push(format!("{user} is in no layer ({})", from.display())),
            Some((_, below)) if user != used && !below.contains(&used.as_str()) => {
                let names = { names.iter() }.map(String::as_str);
                let names: Vec<_> = names.collect();
                let (from, names) = (from.display(), names.join(", "));
                wrong.push(format!("{user} must not import {used} ({from}: {names})"));
            }
            Some(_) => {}
        }
    }
    wrong
}

/// Whether a path is one of `allowed` or below it.
fn is_below(path: &str, allowed: &[&str]) -> bool {
    allowed.iter().any(|prefix| {
        let rest = path.strip_prefix(prefix);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    })
}

fn roots_of(package: &str) -> Vec<PathBuf> {
    let packages = packages().unwrap();
    let found = packages.into_iter().find(|known| known.name == package);
    found
        .unwrap_or_else(|| panic!("no package {package}"))
        .roots
}

fn tree_of(path: &Path) -> Tree {
    let sources = Disk {
        root: root().to_owned(),
    };
    Tree::parse(&sources, path).unwrap()
}

#[test]
fn modules_of_the_transport_import_lower_layers_only() {
    let path = roots_of("vgpu-transport").remove(0);
    let graph = graph(&mut tree_of(&path));
    let source = path.parent().unwrap();
    assert!(graph.edges().count() > 100, "few files import others");
    let wrong = forbidden(&graph, source, TRANSPORT);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // Read wrongly, the graph would have none of these.
    for (user, used) in [("link", "shm"), ("shm", "bytes"), ("wire", "ir")] {
        let mut edges = graph.edges();
        let is_edge = |from: &Path, to: &Path| {
            (top(source, from).as_deref(), top(source, to).as_deref()) == (Some(user), Some(used))
        };
        assert!(edges.any(|(from, to, _)| is_edge(from, to)), "{user}");
    }
}

#[test]
fn engines_import_five_modules_of_the_transport() {
    for package in ENGINES {
        let mut paths = 0;
        for path in roots_of(package) {
            for (file, path) in external_paths(&tree_of(&path), "vgpu_transport") {
                paths += 1;
                let file = file.display();
                assert!(
                    is_below(&path, OF_ENGINES),
                    "{file} imports vgpu_transport::{path}"
                );
            }
        }
        assert!(paths > 5, "{package} names {paths} paths of the transport");
    }
}

/// The files of a crate that do not lie in the folder of its root file: `#[path]` can name them.
fn outside(tree: &Tree, root_file: &Path) -> Vec<PathBuf> {
    let folder = root_file.parent().unwrap();
    let outside = tree.files().filter(|file| !file.starts_with(folder));
    outside.map(Path::to_owned).collect()
}

#[test]
fn files_of_a_crate_lie_in_its_folder() {
    let packages = packages().unwrap();
    // Tests share files with `#[path]`: this is the rule of libraries and programs.
    let roots: Vec<&PathBuf> = { packages.iter() }
        .flat_map(|package| &package.roots)
        .collect();
    assert!(roots.len() > 15, "{} crates", roots.len());
    for root_file in roots {
        let found = outside(&tree_of(root_file), root_file);
        assert!(found.is_empty(), "{}: {found:?}", root_file.display());
    }
    let planted = artificial(&[
        (
            "src/lib.rs",
            "#[path = \"../../other/src/queue.rs\"] mod queue;",
        ),
        ("../other/src/queue.rs", ""),
        ("other/src/queue.rs", ""),
    ]);
    assert_eq!(outside(&planted, Path::new("src/lib.rs")).len(), 1);
}

/// The tree of files whose root is `src/lib.rs`.
fn artificial(files: &[(&str, &str)]) -> Tree {
    let files = { files.iter() }.map(|(path, text)| (PathBuf::from(path), (*text).to_owned()));
    let sources = Memory(files.collect::<BTreeMap<_, _>>());
    Tree::parse(&sources, Path::new("src/lib.rs")).unwrap()
}

#[test]
fn artificial_import_of_a_higher_layer_is_detected() {
    let mut files = [
        ("src/lib.rs", "mod shm; mod link; mod extra;"),
        ("src/shm.rs", "mod ring; pub struct Window;"),
        ("src/shm/ring.rs", "pub struct Ring;"),
        (
            "src/link.rs",
            "use crate::shm::Window; pub struct End(Window);",
        ),
        ("src/extra.rs", ""),
    ];
    let source = Path::new("src");
    let wrong =
        |files: &[(&str, &str)]| forbidden(&graph(&mut artificial(files)), source, TRANSPORT);
    assert_eq!(wrong(&files), Vec::<String>::new());
    files[2].1 = "use crate::link::End; pub struct Ring(End);";
    let found = wrong(&files);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].contains("shm must not import link"),
        "{}",
        found[0]
    );
    files[2].1 = "";
    files[4].1 = "use crate::shm::Window; pub struct E(Window);";
    assert!(wrong(&files)[0].contains("extra is in no layer"));
}

#[test]
fn artificial_import_of_an_engine_is_detected() {
    let paths = |text: &str| -> Vec<String> {
        let tree = artificial(&[("src/lib.rs", text)]);
        let found = external_paths(&tree, "vgpu_transport").into_iter();
        found.map(|(_, path)| path).collect()
    };
    let is_right = |text: &str| paths(text).iter().all(|path| is_below(path, OF_ENGINES));
    for right in [
        "use vgpu_transport::ir::{Graph, Op}; use vgpu_transport::memfd::sealed;",
        "fn f(_: vgpu_transport::bytes::Bytes) {}",
        "#[cfg(test)] mod tests { use vgpu_transport::wire::Request; }",
    ] {
        assert!(is_right(right), "{right}");
    }
    for wrong in [
        "use vgpu_transport::wire::Request;",
        "use vgpu_transport::{ir::Graph, link::HostEnd};",
        "use vgpu_transport as t;",
        "use vgpu_transport::*;",
        "use vgpu_transport::shm::memory::Window;",
        "use vgpu_transport::shm::ring::Ring;",
        "use vgpu_transport::ir_other::Graph;",
        "fn f() { vgpu_transport::link::connect(); }",
        "fn f() { assert!(vgpu_transport::wire::is_new(1)); }",
    ] {
        assert!(!is_right(wrong), "{wrong}: {:?}", paths(wrong));
    }
}
