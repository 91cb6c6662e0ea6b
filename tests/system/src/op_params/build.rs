//! What is read of the sources of one ggml.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::constructors::{Written, constants, precisions, written};
use xtask_common::ggml_releases;

/// A build of ggml.
#[derive(Clone, Debug)]
pub(crate) struct Build {
    /// The minor number of its release.
    pub(crate) minor: u32,
    /// What its constructors and setters write.
    pub(crate) written: Written,
    /// The values of `enum ggml_prec`.
    pub(crate) precisions: BTreeMap<String, i64>,
    /// The values of `super::constructors::ENUMS` and of the macros of `constructors::MACROS`.
    pub(crate) constants: BTreeMap<String, String>,
}

impl Build {
    /// Reads the sources of ggml in the folder `ggml`.
    ///
    /// # Errors
    /// If a file cannot be read or understood.
    pub(crate) fn read(ggml: &Path) -> Result<Build> {
        let read = |file: &str| {
            let path = ggml.join(file);
            std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
        };
        let version = ggml_releases::version_of(ggml)?;
        let minor = { version.split('.').nth(1) }.and_then(|minor| minor.parse().ok());
        let of = || format!("ggml {version} in {}", ggml.display());
        let header = read("include/ggml.h")?;
        Ok(Build {
            minor: minor.with_context(|| format!("{version} is no release"))?,
            written: written(&read("src/ggml.c")?).with_context(of)?,
            precisions: precisions(&header).with_context(of)?,
            constants: constants(&header).with_context(of)?,
        })
    }

    /// Whether `enum ggml_prec` has more values than default and F32.
    pub(crate) fn has_all_precisions(&self) -> bool {
        self.precisions.keys().any(|name| !is_old(name))
    }
}

/// Whether every release has the precision.
pub(super) fn is_old(name: &str) -> bool {
    matches!(name, "DEFAULT" | "UNDEFINED" | "F32")
}
