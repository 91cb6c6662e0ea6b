//! A directed graph of files or packages, and its cycles.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

/// Which file uses which, and by what names.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    edges: BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>>,
}

/// Files of which each reaches each other along edges: a strongly connected component of more than
/// one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cycle {
    /// The files, sorted.
    pub files: Vec<PathBuf>,
    /// Edges within the component: the file that uses, the one that defines, the names of what is
    /// used.
    pub edges: Vec<(PathBuf, PathBuf, Vec<String>)>,
}

impl Graph {
    /// Adds the edge `from -> to` because of `name`. A file's use of itself is no edge.
    pub fn add(&mut self, from: &Path, to: &Path, name: String) {
        if from != to {
            let targets = self.edges.entry(from.to_owned()).or_default();
            targets.entry(to.to_owned()).or_default().insert(name);
        }
    }

    /// Whether `from` uses `to`.
    pub fn has(&self, from: &Path, to: &Path) -> bool {
        self.edges
            .get(from)
            .is_some_and(|targets| targets.contains_key(to))
    }

    /// All edges: the file that uses, the file that defines, the names of what is used.
    pub fn edges(&self) -> impl Iterator<Item = (&Path, &Path, &BTreeSet<String>)> {
        { self.edges.iter() }.flat_map(|(from, targets)| {
            let targets = targets.iter();
            targets.map(move |(to, names)| (from.as_path(), to.as_path(), names))
        })
    }

    /// All cycles; a graph without any is acyclic.
    pub fn cycles(&self) -> Vec<Cycle> {
        let files: BTreeSet<&Path> = { self.edges.iter() }
            .flat_map(|(from, targets)| std::iter::once(from).chain(targets.keys()))
            .map(PathBuf::as_path)
            .collect();
        let reached: BTreeMap<&Path, BTreeSet<&Path>> = files
            .iter()
            .map(|&file| (file, self.reachable(file)))
            .collect();
        let mut seen = BTreeSet::new();
        let mut cycles = Vec::new();
        for &file in &files {
            if !reached[file].contains(file) || seen.contains(file) {
                continue;
            }
            let component: BTreeSet<&Path> = { reached[file].iter().copied() }
                .filter(|other| reached[other].contains(file))
                .collect();
            seen.extend(component.iter().copied());
            cycles.push(self.cycle(&component));
        }
        cycles
    }

    /// The files that `from` reaches by one edge or more.
    fn reachable(&self, from: &Path) -> BTreeSet<&Path> {
        let mut reached = BTreeSet::new();
        let mut open: Vec<&Path> = vec![from];
        while let Some(file) = open.pop() {
            for target in { self.edges.get(file) }.into_iter().flatten() {
                if reached.insert(target.0.as_path()) {
                    open.push(target.0);
                }
            }
        }
        reached
    }

    fn cycle(&self, component: &BTreeSet<&Path>) -> Cycle {
        let mut edges = Vec::new();
        for &from in component {
            for (to, names) in { self.edges.get(from) }.into_iter().flatten() {
                if component.contains(to.as_path()) {
                    edges.push((from.to_owned(), to.clone(), names.iter().cloned().collect()));
                }
            }
        }
        Cycle {
            files: component.iter().map(|&file| file.to_owned()).collect(),
            edges,
        }
    }
}

impl fmt::Display for Cycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "a cycle of {} nodes", self.files.len())?;
        for (from, to, names) in &self.edges {
            let names = names.join(", ");
            writeln!(f, "  {} -> {}: {names}", from.display(), to.display())?;
        }
        Ok(())
    }
}
