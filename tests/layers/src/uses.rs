//! What each file uses.

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use crate::graph::Graph;
use crate::tree::{Id, Import, Tree, attributes, imports, is_reexport};

/// The graph of a crate: see the rule in the crate's documentation.
pub fn graph(tree: &mut Tree) -> Graph {
    // Imports within functions count as imports of their module: a name is rarely two things in
    // one file.
    for id in 0..tree.modules.len() {
        let mut local = LocalImports::default();
        for item in &tree.modules[id].items {
            if !matches!(item, syn::Item::Use(_)) {
                local.visit_item(item);
            }
        }
        tree.import(id, local.found);
    }
    let mut graph = Graph::default();
    for id in 0..tree.modules.len() {
        let mut uses = Uses {
            tree,
            module: id,
            graph: &mut graph,
        };
        for item in &tree.modules[id].items {
            uses.visit_item(item);
        }
    }
    graph
}

/// Collects the imports within functions.
#[derive(Default)]
struct LocalImports {
    found: Vec<Import>,
}

impl<'ast> Visit<'ast> for LocalImports {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.found.extend(imports(&item.tree, &mut Vec::new()));
    }
}

/// Adds an edge for each path.
struct Uses<'a> {
    tree: &'a Tree,
    module: Id,
    graph: &'a mut Graph,
}

impl Uses<'_> {
    fn path(&mut self, path: &[String]) {
        if let Some(file) = self.tree.definition(self.module, path) {
            let from = &self.tree.modules[self.module].file;
            let skipped = path
                .iter()
                .take_while(|part| matches!(part.as_str(), "crate" | "super" | "self"))
                .count();
            self.graph.add(from, file, path[skipped..].join("::"));
        }
    }

    fn macro_call(&mut self, name: &str) {
        if let Some(file) = self.tree.macro_definition(self.module, name) {
            let from = &self.tree.modules[self.module].file;
            self.graph.add(from, file, format!("{name}!"));
        }
    }

    /// Reads all paths in the arguments of a macro.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        // How many colons stand behind the last name, and whether a dot stands before the path:
        // then it is a field.
        let (mut colons, mut is_field) = (0, false);
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.end(&mut path, is_field);
                        is_field &= colons == 0;
                    }
                    path.push(name.to_string());
                    colons = 0;
                    continue;
                }
                TokenTree::Punct(mark)
                    if mark.as_char() == ':' && !path.is_empty() && colons < 2 =>
                {
                    colons += 1;
                    continue;
                }
                TokenTree::Punct(mark) => {
                    if mark.as_char() == '!' && path.len() == 1 && colons == 0 {
                        let name = path[0].clone();
                        self.macro_call(&name);
                    }
                    self.end(&mut path, is_field);
                    is_field = mark.as_char() == '.';
                }
                TokenTree::Group(group) => {
                    self.end(&mut path, is_field);
                    is_field = false;
                    self.tokens(group.stream());
                }
                TokenTree::Literal(_) => {
                    self.end(&mut path, is_field);
                    is_field = false;
                }
            }
            colons = 0;
        }
        self.end(&mut path, is_field);
    }

    fn end(&mut self, path: &mut Vec<String>, is_field: bool) {
        if !path.is_empty() && !is_field {
            self.path(path);
        }
        path.clear();
    }
}

impl<'ast> Visit<'ast> for Uses<'_> {
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
        if is_reexport(item) {
            return;
        }
        for (_, path) in imports(&item.tree, &mut Vec::new()) {
            self.path(&path);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = { path.segments.iter() }
            .map(|part| part.ident.to_string())
            .collect();
        if path.leading_colon.is_none() {
            self.path(&names);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        if let Some(name) = call.path.get_ident() {
            self.macro_call(&name.to_string());
        } else {
            self.visit_path(&call.path);
        }
        self.tokens(call.tokens.clone());
    }

    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
}
