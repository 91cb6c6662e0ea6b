//! Which file of a crate uses which: read from the sources, to find cycles.
//!
//! # The rule
//!
//! The files of a crate form a directed acyclic graph.
//!
//! - A **node** is a source file. An inline `mod name { … }` belongs to its file.
//! - An **edge** `a -> b` means that `a` uses an item that is *defined* in `b`: a type, trait,
//!   function, constant, static or macro. A path is followed through imports and re-exports to the
//!   file that defines the item, so `crate::Error` is an edge to `error.rs` if `lib.rs` only
//!   re-exports it.
//! - `mod child;` and re-exports (`pub use child::Item;`) are no edges of the file that contains
//!   them. A `mod.rs` that declares and re-exports its children may therefore be used by anyone,
//!   its children included. A `mod.rs` that defines items *and* calls its children forms a cycle
//!   with each child that uses one of these items: the items belong into a file of their own,
//!   below the children.
//! - In libraries and programs, code under `#[cfg(test)]` is not read: a unit test may use
//!   everything. The crates of integration tests, benchmarks, examples and build scripts are read
//!   whole, functions with `#[test]` included.
//!
//! # Limits
//!
//! The sources are parsed, not type-checked. A method call is an edge only if the file also names
//! the type or the trait. The bodies of macro calls are read as a list of paths.

mod external;
mod graph;
mod resolve;
mod tree;
mod uses;
mod workspace;

pub use external::external_paths;
pub use graph::{Cycle, Graph};
pub use tree::{Disk, Memory, Sources, Tree};
pub use uses::graph;
pub use workspace::{Package, packages, root};
