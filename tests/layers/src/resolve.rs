//! Paths, followed to the file that defines what they name.

use std::path::Path;

use crate::tree::{Id, Named, Tree};

/// Imports that lead to imports are followed this far; a longer chain is a cycle of imports.
const MAX_STEPS: usize = 32;

/// What a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Module(Id),
    /// An item that this module defines.
    Item(Id),
}

impl Tree {
    /// The file that defines what a path in `module` names; `None` for modules and for what other
    /// crates define.
    pub(crate) fn definition(&self, module: Id, path: &[String]) -> Option<&Path> {
        match self.resolve(module, path, MAX_STEPS)? {
            Target::Item(id) => Some(&self.modules[id].file),
            Target::Module(_) => None,
        }
    }

    /// The file that defines the macro that is called by a single name.
    pub(crate) fn macro_definition(&self, module: Id, name: &str) -> Option<&Path> {
        if let Some(file) = self.definition(module, &[name.to_owned()]) {
            return Some(file);
        }
        let defines = |id: &Id| self.modules[*id].macros.iter().any(|known| known == name);
        let above = std::iter::successors(Some(module), |&id| self.modules[id].parent);
        // Below the module that defines a macro the macro needs no import, nor, with
        // `#[macro_use]`, anywhere.
        { above }
            .find(defines)
            .or_else(|| (0..self.modules.len()).find(defines))
            .map(|id| self.modules[id].file.as_path())
    }

    fn resolve(&self, module: Id, path: &[String], steps: usize) -> Option<Target> {
        let (first, mut rest) = path.split_first()?;
        let mut at = match first.as_str() {
            "crate" | "$crate" => Target::Module(0),
            "self" => Target::Module(module),
            "super" => Target::Module(self.modules[module].parent?),
            name => self.lookup(module, name, steps)?,
        };
        while let (Target::Module(id), Some((next, after))) = (at, rest.split_first()) {
            at = match next.as_str() {
                "super" => Target::Module(self.modules[id].parent?),
                name => self.lookup(id, name, steps)?,
            };
            rest = after;
        }
        Some(at)
    }

    /// What `name` stands for in a module.
    fn lookup(&self, module: Id, name: &str, steps: usize) -> Option<Target> {
        let steps = steps.checked_sub(1)?;
        let here = &self.modules[module];
        // A name can be a module, a type and a function at once: an item tells most.
        let mut found = None;
        for named in here.names.get(name).into_iter().flatten() {
            let target = match named {
                Named::Item => Some(Target::Item(module)),
                Named::Module(id) => Some(Target::Module(*id)),
                // `use name::…` with the import's own name is about another crate, or a module
                // beside it.
                Named::Import(path)
                    if path.first().is_some_and(|first| first == name) && path.len() > 1 =>
                {
                    None
                }
                Named::Import(path) => self.resolve(module, path, steps),
            };
            match target {
                Some(Target::Item(_)) => return target,
                Some(Target::Module(_)) => found = target,
                None => {}
            }
        }
        if found.is_some() {
            return found;
        }
        { here.globs.iter() }.find_map(|path| match self.resolve(module, path, steps)? {
            Target::Module(id) if id != module => self.lookup(id, name, steps),
            _ => None,
        })
    }
}
