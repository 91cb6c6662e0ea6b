//! The rule of the crate's documentation, on small trees and on this workspace.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use vgpu_layers::{Disk, Graph, Memory, Tree, graph, packages, root};

/// Packages whose modules still form cycles, with at most so many files in them: a list that may
/// only become shorter.
const KNOWN: &[(&str, usize)] = &[];

/// The graph of a crate whose root is `lib.rs`.
fn of(files: &[(&str, &str)]) -> Graph {
    let files = files
        .iter()
        .map(|(path, text)| (PathBuf::from(path), (*text).to_owned()));
    let mut tree = Tree::parse(&Memory(files.collect()), Path::new("lib.rs")).unwrap();
    graph(&mut tree)
}

fn uses(graph: &Graph, from: &str, to: &str) -> bool {
    graph.has(Path::new(from), Path::new(to))
}

#[test]
fn artificial_cycle_is_detected() {
    let mut files = vec![
        ("lib.rs", "mod device; mod session; mod error;"),
        (
            "device.rs",
            "use crate::session::Session; pub struct Device(Session);",
        ),
        (
            "session.rs",
            "use crate::error::Error; pub struct Session(Error);",
        ),
        ("error.rs", "pub struct Error;"),
    ];
    assert_eq!(of(&files).cycles(), []);

    files[3].1 = "pub struct Error(crate::device::Device);";
    let cycles = of(&files).cycles();
    assert_eq!(cycles.len(), 1);
    assert_eq!(
        cycles[0].files,
        ["device.rs", "error.rs", "session.rs"].map(PathBuf::from)
    );
    let text = cycles[0].to_string();
    assert!(
        text.contains("error.rs -> device.rs: device::Device"),
        "{text}"
    );
}

#[test]
fn two_cycles_are_reported_separately() {
    let graph = of(&[
        ("lib.rs", "mod a; mod b; mod c; mod d;"),
        ("a.rs", "pub struct A; fn f(_: crate::b::B) {}"),
        (
            "b.rs",
            "pub struct B; fn f(_: crate::a::A, _: crate::c::C) {}",
        ),
        ("c.rs", "pub struct C; fn f(_: crate::d::D) {}"),
        ("d.rs", "pub struct D; fn f(_: crate::c::C) {}"),
    ]);
    let files: Vec<_> = graph
        .cycles()
        .into_iter()
        .map(|cycle| cycle.files)
        .collect();
    assert_eq!(
        files,
        [
            ["a.rs", "b.rs"].map(PathBuf::from),
            ["c.rs", "d.rs"].map(PathBuf::from)
        ]
    );
}

#[test]
fn a_parent_may_declare_and_reexport_its_children() {
    let graph = of(&[
        ("lib.rs", "mod gpu; pub use gpu::Gpu;"),
        (
            "gpu/mod.rs",
            "mod graph; mod memory; pub use graph::Gpu; pub(crate) use memory::*;",
        ),
        ("gpu/graph.rs", "use super::Memory; pub struct Gpu(Memory);"),
        ("gpu/memory.rs", "pub struct Memory;"),
    ]);
    assert!(uses(&graph, "gpu/graph.rs", "gpu/memory.rs"));
    assert!(!uses(&graph, "gpu/graph.rs", "gpu/mod.rs"));
    assert_eq!(graph.cycles(), []);
}

#[test]
fn a_parent_whose_children_use_what_it_defines_must_not_use_them() {
    let parent = "mod child; pub struct Basic;";
    let child = ("child.rs", "use super::Basic; pub fn run(_: Basic) {}");
    assert_eq!(of(&[("lib.rs", parent), child]).cycles(), []);
    let parent = "mod child; pub struct Basic; pub fn run() { child::run(Basic) }";
    assert_eq!(of(&[("lib.rs", parent), child]).cycles().len(), 1);
}

#[test]
fn every_form_of_path_counts_as_use() {
    let ways = [
        "use crate::b::B; fn f(_: B) {}",
        "use crate::b::{self as other}; fn f(_: other::B) {}",
        "use crate::{b::B as C}; fn f(_: C) {}",
        "use crate::b::*; fn f(_: B) {}",
        "fn f(_: crate::b::B) {}",
        "fn f(_: super::b::B) {}",
        "fn f() { crate::b::free() }",
        "fn f() { use crate::b; b::free() }",
        "fn f() -> usize { crate::b::B::LEN }",
        "fn f() { vec![1, crate::b::free()]; }",
        "fn f() { println!(\"{}\", crate::b::free()); }",
        "fn f() { help!() }",
        "impl crate::b::T for u8 {}",
        "struct A<X: crate::b::T>(X);",
        "mod inner { fn f(_: crate::b::B) {} }",
        "mod inner { use super::super::b; fn f(_: b::B) {} }",
        "fn f(x: u8) { match x { crate::b::CONST => {} _ => {} } }",
        "use crate::re::B; fn f(_: B) {}",
    ];
    for way in ways {
        let graph = of(&[
            ("lib.rs", "#[macro_use] mod b; mod a; mod re;"),
            ("a.rs", way),
            (
                "b.rs",
                "pub struct B; pub trait T {} pub const CONST: u8 = 1; pub fn free() {} \
                 macro_rules! help { () => {} }",
            ),
            ("re.rs", "pub use crate::b::B;"),
        ]);
        assert!(uses(&graph, "a.rs", "b.rs"), "{way}");
        assert!(
            !uses(&graph, "a.rs", "re.rs") && !uses(&graph, "a.rs", "lib.rs"),
            "{way}"
        );
    }
}

#[test]
fn comments_and_strings_do_not_count_as_use() {
    let ways = [
        "#[cfg(test)] mod tests { use crate::b::B; }",
        "#[cfg(all(test, unix))] use crate::b::B;",
        "pub use crate::b::B;",
        "pub(crate) use crate::b::*;",
        "fn f(x: Pair) { assert!(x.free); println!(\"{}\", x.b.free) }",
        "use std::b::B;",
        "struct B; fn f(_: B) {}",
        "/// Like [`crate::b::B`].\nstruct A;",
    ];
    for way in ways {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", way),
            ("b.rs", "pub struct B; pub fn free() {}"),
        ];
        assert!(!uses(&of(&files), "a.rs", "b.rs"), "{way}");
    }
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "#[cfg(not(test))] use crate::b::B;"),
        ("b.rs", "pub struct B;"),
    ];
    assert!(uses(&of(&files), "a.rs", "b.rs"), "not for tests only");
}

#[test]
fn module_files_are_found_by_the_rules_of_rust() {
    let graph = of(&[
        (
            "lib.rs",
            "mod a; #[path = \"../elsewhere/c.rs\"] mod c; mod inline { mod d; }",
        ),
        ("a.rs", "mod b; fn f() { b::f(); crate::c::f(); }"),
        ("a/b.rs", "pub fn f() {}"),
        ("../elsewhere/c.rs", "pub fn f() {}"),
        ("elsewhere/c.rs", "pub fn f() {}"),
        ("inline/d.rs", "pub fn f() { crate::a::g() }"),
    ]);
    assert!(uses(&graph, "a.rs", "a/b.rs"));
    assert!(uses(&graph, "a.rs", "elsewhere/c.rs"));
    let missing = Memory(BTreeMap::from([("lib.rs".into(), "mod gone;".to_owned())]));
    let error = Tree::parse(&missing, Path::new("lib.rs"))
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("gone"), "{error}");
}

#[test]
fn artificial_cycle_in_the_crate_of_a_test_is_detected() {
    let files = [
        (
            "tests/engine/main.rs",
            "#[path = \"../common/spy.rs\"] mod spy; mod fused; pub struct Sample; \
             #[test] fn runs() { fused::run(Sample) }",
        ),
        (
            "tests/engine/fused.rs",
            "use crate::{Sample, spy::Spy}; pub fn run(_: Sample) { Spy; }",
        ),
        ("tests/common/spy.rs", "pub struct Spy;"),
    ];
    let files = files.map(|(path, text)| (PathBuf::from(path), text.to_owned()));
    let mut sources = Memory(files.into());
    let path = Path::new("tests/engine/main.rs");
    let found = |sources: &Memory| -> Vec<Vec<PathBuf>> {
        let cycles = graph(&mut Tree::parse_test(sources, path).unwrap()).cycles();
        cycles.into_iter().map(|cycle| cycle.files).collect()
    };
    let pair = ["tests/engine/fused.rs", "tests/engine/main.rs"].map(PathBuf::from);
    assert_eq!(found(&sources), [pair.to_vec()]);

    // In a library, a function with `#[test]` is a unit test and may use everything.
    let library = graph(&mut Tree::parse(&sources, path).unwrap()).cycles();
    assert_eq!(library, []);

    // What two modules need lies below both.
    let main = "#[path = \"../common/spy.rs\"] mod spy; mod fused; \
                #[test] fn runs() { fused::run(spy::Sample) }";
    let fused = "use crate::spy::{Sample, Spy}; pub fn run(_: Sample) { Spy; }";
    let spy = "pub struct Spy; pub struct Sample;";
    for (path, text) in [
        ("tests/engine/main.rs", main),
        ("tests/engine/fused.rs", fused),
        ("tests/common/spy.rs", spy),
    ] {
        sources.0.insert(path.into(), text.to_owned());
    }
    assert_eq!(found(&sources), Vec::<Vec<PathBuf>>::new());
    let spy = "pub struct Spy; pub struct Sample; fn run() { crate::fused::run(Sample) }";
    sources
        .0
        .insert("tests/common/spy.rs".into(), spy.to_owned());
    let pair = ["tests/common/spy.rs", "tests/engine/fused.rs"].map(PathBuf::from);
    assert_eq!(found(&sources), [pair.to_vec()]);
}

#[test]
fn modules_of_every_crate_form_no_cycle() {
    let sources = Disk {
        root: root().to_owned(),
    };
    let packages = packages().unwrap();
    assert!(packages.len() >= 8, "only {} packages", packages.len());
    let (mut wrong, mut edges_of_tests) = (String::new(), 0);
    for package in &packages {
        let known = KNOWN
            .iter()
            .find(|(name, _)| *name == package.name)
            .map_or(0, |(_, count)| *count);
        let (mut count, mut text) = (0, String::new());
        let mut add = |graph: &Graph| {
            for cycle in graph.cycles() {
                count += cycle.files.len();
                text += &cycle.to_string();
            }
        };
        for path in &package.roots {
            add(&graph(&mut Tree::parse(&sources, path).unwrap()));
        }
        for path in &package.test_roots {
            let graph = graph(&mut Tree::parse_test(&sources, path).unwrap());
            edges_of_tests += graph.edges().count();
            add(&graph);
        }
        if count > known {
            wrong += &format!(
                "{}: {count} files in cycles, {known} known\n{text}",
                package.name
            );
        } else if count == 0 && known > 0 {
            wrong += &format!("{}: no cycle is left that KNOWN names\n", package.name);
        }
    }
    // Read wrongly, the crates of tests would have no edges, and so no cycles.
    assert!(edges_of_tests > 200, "{edges_of_tests} uses between files");
    for (name, _) in KNOWN {
        if !packages.iter().any(|package| package.name == *name) {
            wrong += &format!("KNOWN names {name}, which is no package\n");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
