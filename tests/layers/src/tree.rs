//! The modules of a crate, parsed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use syn::{Item, UseTree, Visibility};

/// Where source files come from.
pub trait Sources {
    /// The text of a file, or `None` if there is none at this path.
    ///
    /// # Errors
    /// If there is a file that cannot be read.
    fn read(&self, path: &Path) -> Result<Option<String>>;
}

/// Files below a folder.
#[derive(Clone, Debug)]
pub struct Disk {
    /// The folder that paths are relative to.
    pub root: PathBuf,
}

impl Sources for Disk {
    fn read(&self, path: &Path) -> Result<Option<String>> {
        let path = self.root.join(path);
        if !path.is_file() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(&path);
        text.map(Some)
            .with_context(|| format!("reading {}", path.display()))
    }
}

/// Files in memory, for tests.
#[derive(Clone, Debug, Default)]
pub struct Memory(pub BTreeMap<PathBuf, String>);

impl Sources for Memory {
    fn read(&self, path: &Path) -> Result<Option<String>> {
        Ok(self.0.get(path).cloned())
    }
}

/// A module by its index in a [`Tree`].
pub(crate) type Id = usize;

/// What a name in a module stands for.
#[derive(Clone, Debug)]
pub(crate) enum Named {
    Module(Id),
    /// Defined here.
    Item,
    /// Imported: the path that the import names.
    Import(Vec<String>),
}

pub(crate) struct Module {
    pub(crate) file: PathBuf,
    pub(crate) parent: Option<Id>,
    pub(crate) names: BTreeMap<String, Vec<Named>>,
    /// Imports of everything in a path.
    pub(crate) globs: Vec<Vec<String>>,
    /// Macros by example, which are visible below without an import.
    pub(crate) macros: Vec<String>,
    pub(crate) items: Vec<Item>,
}

/// The modules of one crate, its root first.
pub struct Tree {
    pub(crate) modules: Vec<Module>,
    /// Whether code that is compiled for tests only is read.
    reads_tests: bool,
}

/// Attributes of an item.
pub(crate) fn attributes(item: &Item) -> &[syn::Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Whether something is compiled for tests only.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else {
            return attribute.path().is_ident("test");
        };
        list.path.is_ident("cfg") && asks_for_test(list.tokens.clone())
    })
}

/// Whether a condition holds in tests only, as far as `not`, `all` and `any` are looked through.
fn asks_for_test(tokens: proc_macro2::TokenStream) -> bool {
    use proc_macro2::TokenTree;
    let mut previous = None;
    for token in tokens {
        match &token {
            TokenTree::Ident(name) if name == "test" => return true,
            TokenTree::Group(group) => {
                let negated = matches!(&previous, Some(TokenTree::Ident(name)) if name == "not");
                if !negated && asks_for_test(group.stream()) {
                    return true;
                }
            }
            _ => {}
        }
        previous = Some(token);
    }
    false
}

impl Tree {
    /// Parses the library or the program with this root file, without its unit tests.
    ///
    /// # Errors
    /// If a file is missing, cannot be read or is not Rust.
    pub fn parse(sources: &dyn Sources, root: &Path) -> Result<Tree> {
        Tree::parse_as(sources, root, false)
    }

    /// Parses the test, benchmark, example or build script with this root file. Functions with
    /// `#[test]` are read.
    ///
    /// # Errors
    /// As [`Tree::parse`].
    pub fn parse_test(sources: &dyn Sources, root: &Path) -> Result<Tree> {
        Tree::parse_as(sources, root, true)
    }

    fn parse_as(sources: &dyn Sources, root: &Path, reads_tests: bool) -> Result<Tree> {
        let mut tree = Tree {
            modules: Vec::new(),
            reads_tests,
        };
        let folder = root.parent().unwrap_or(Path::new("")).to_owned();
        tree.file(sources, root, None, &folder)?;
        Ok(tree)
    }

    /// Whether code with these attributes is not read.
    pub(crate) fn skips(&self, attributes: &[syn::Attribute]) -> bool {
        !self.reads_tests && is_test(attributes)
    }

    /// All files.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let mut files: Vec<&Path> = self.modules.iter().map(|m| m.file.as_path()).collect();
        files.sort_unstable();
        files.dedup();
        files.into_iter()
    }

    /// Reads a file as a module whose children lie in `folder`.
    fn file(
        &mut self,
        sources: &dyn Sources,
        file: &Path,
        parent: Option<Id>,
        folder: &Path,
    ) -> Result<Id> {
        let text = sources.read(file)?;
        let text = text.with_context(|| format!("{} is missing", file.display()))?;
        let parsed =
            syn::parse_file(&text).with_context(|| format!("parsing {}", file.display()))?;
        self.module(sources, file, parent, folder, parsed.items)
    }

    fn module(
        &mut self,
        sources: &dyn Sources,
        file: &Path,
        parent: Option<Id>,
        folder: &Path,
        items: Vec<Item>,
    ) -> Result<Id> {
        let id = self.modules.len();
        self.modules.push(Module {
            file: file.to_owned(),
            parent,
            names: BTreeMap::new(),
            globs: Vec::new(),
            macros: Vec::new(),
            items: Vec::new(),
        });
        for item in items {
            if self.skips(attributes(&item)) {
                continue;
            }
            if let Item::Mod(module) = item {
                let name = module.ident.to_string();
                let child = match module.content {
                    Some((_, items)) => {
                        self.module(sources, file, Some(id), &folder.join(&name), items)?
                    }
                    None => self.child(sources, file, id, folder, &name, &module.attrs)?,
                };
                self.name(id, name, Named::Module(child));
            } else {
                self.define(id, &item);
                self.modules[id].items.push(item);
            }
        }
        Ok(id)
    }

    /// Reads the file of `mod name;`.
    fn child(
        &mut self,
        sources: &dyn Sources,
        file: &Path,
        parent: Id,
        folder: &Path,
        name: &str,
        attributes: &[syn::Attribute],
    ) -> Result<Id> {
        if let Some(path) = attributes.iter().find_map(path_attribute) {
            let child = normal(&file.parent().unwrap_or(Path::new("")).join(path));
            let below = child.parent().unwrap_or(Path::new("")).to_owned();
            return self.file(sources, &child, Some(parent), &below);
        }
        for child in [
            folder.join(format!("{name}.rs")),
            folder.join(name).join("mod.rs"),
        ] {
            if sources.read(&child)?.is_some() {
                return self.file(sources, &child, Some(parent), &folder.join(name));
            }
        }
        bail!("{}: no file for module {name}", file.display())
    }

    fn name(&mut self, module: Id, name: String, named: Named) {
        self.modules[module]
            .names
            .entry(name)
            .or_default()
            .push(named);
    }

    fn define(&mut self, module: Id, item: &Item) {
        let ident = match item {
            Item::Const(item) => &item.ident,
            Item::Enum(item) => &item.ident,
            Item::Fn(item) => &item.sig.ident,
            Item::Static(item) => &item.ident,
            Item::Struct(item) => &item.ident,
            Item::Trait(item) => &item.ident,
            Item::TraitAlias(item) => &item.ident,
            Item::Type(item) => &item.ident,
            Item::Union(item) => &item.ident,
            Item::Macro(item) => match &item.ident {
                Some(ident) => {
                    self.modules[module].macros.push(ident.to_string());
                    ident
                }
                None => return,
            },
            Item::Use(item) => {
                self.import(module, imports(&item.tree, &mut Vec::new()));
                return;
            }
            _ => return,
        };
        self.name(module, ident.to_string(), Named::Item);
    }

    /// Enters imports into a module's names.
    pub(crate) fn import(&mut self, module: Id, imports: Vec<Import>) {
        for (name, path) in imports {
            match name {
                Some(name) => self.name(module, name, Named::Import(path)),
                None => self.modules[module].globs.push(path),
            }
        }
    }
}

/// The name that an import gets, or none if it is of everything, and its path.
pub(crate) type Import = (Option<String>, Vec<String>);

/// The imports of a `use` whose path so far is `path`.
pub(crate) fn imports(tree: &UseTree, path: &mut Vec<String>) -> Vec<Import> {
    match tree {
        UseTree::Path(node) => {
            path.push(node.ident.to_string());
            let found = imports(&node.tree, path);
            path.pop();
            found
        }
        UseTree::Group(group) => { group.items.iter() }
            .flat_map(|tree| imports(tree, path))
            .collect(),
        UseTree::Glob(_) => vec![(None, path.clone())],
        UseTree::Name(leaf) if leaf.ident == "self" => vec![(path.last().cloned(), path.clone())],
        UseTree::Name(leaf) => {
            let name = leaf.ident.to_string();
            let full = path.iter().cloned().chain([name.clone()]).collect();
            vec![(Some(name), full)]
        }
        UseTree::Rename(leaf) => {
            let mut full = path.clone();
            if leaf.ident != "self" {
                full.push(leaf.ident.to_string());
            }
            vec![(Some(leaf.rename.to_string()), full)]
        }
    }
}

/// Whether a `use` passes names on to other modules.
pub(crate) fn is_reexport(item: &syn::ItemUse) -> bool {
    !matches!(item.vis, Visibility::Inherited)
}

/// The file that `#[path = "…"]` names.
fn path_attribute(attribute: &syn::Attribute) -> Option<String> {
    let syn::Meta::NameValue(pair) = &attribute.meta else {
        return None;
    };
    let syn::Expr::Lit(literal) = &pair.value else {
        return None;
    };
    match &literal.lit {
        syn::Lit::Str(text) if pair.path.is_ident("path") => Some(text.value()),
        _ => None,
    }
}

/// A path without `..` in it.
fn normal(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
}
