//! What each file of a crate imports from another crate.

use std::collections::BTreeSet;
use std::path::PathBuf;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use crate::tree::{Tree, attributes, imports};

/// The paths in the crate `name` that each file names: the file, and the path without the crate.
/// The path of `use name::a::B` is `a::B`, that of `use name as other` is empty. Unit tests are not
/// read if the tree is of [`Tree::parse`].
pub fn external_paths(tree: &Tree, name: &str) -> BTreeSet<(PathBuf, String)> {
    let mut found = BTreeSet::new();
    for module in &tree.modules {
        let mut paths = External {
            tree,
            name,
            found: Vec::new(),
        };
        for item in &module.items {
            paths.visit_item(item);
        }
        let paths = paths.found.into_iter();
        found.extend(paths.map(|path| (module.file.clone(), path)));
    }
    found
}

struct External<'a> {
    tree: &'a Tree,
    name: &'a str,
    found: Vec<String>,
}

impl External<'_> {
    fn path(&mut self, path: &[String]) {
        if path.first().is_some_and(|first| first == self.name) {
            self.found.push(path[1..].join("::"));
        }
    }

    /// Reads the paths in the arguments of a macro.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.path(&path);
                        path.clear();
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Punct(_) | TokenTree::Literal(_) => colons = 0,
            }
        }
        self.path(&path);
    }
}

impl<'ast> Visit<'ast> for External<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !self.tree.skips(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !self.tree.skips(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        for (_, path) in imports(&item.tree, &mut Vec::new()) {
            self.path(&path);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = { path.segments.iter() }
            .map(|part| part.ident.to_string())
            .collect();
        self.path(&names);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.tokens(call.tokens.clone());
    }

    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
}
