//! What the constructors of ggml's releases write into nodes, against the plugin's table of what
//! differs ([`TABLE`]).
//!
//! The unit tests of the table have examples by the author of the table. Here the constructors
//! themselves are the source.

use anyhow::{Context as _, Result, ensure};

use crate::op_params::{Build, TABLE, Table};
use xtask_common::cache::Cache;
use xtask_common::ggml_releases::{self, READ, RELEASES};
use xtask_common::llama;

/// Compares the table with the constructors of every build, and every changed table as well, which
/// must differ.
///
/// # Errors
/// If sources cannot be fetched or read, the table differs, or a change is not detected.
pub(crate) fn check(cache: &Cache) -> Result<String> {
    ggml_releases::fetch_sources(cache)?;
    let mut builds = Vec::new();
    for release in RELEASES.iter().chain(READ) {
        builds.push(Build::read(&release.source(cache)?.join("ggml"))?);
    }
    for version in [llama::RELEASE, llama::NEWEST_RELEASE] {
        let ggml = ggml_releases::source_of(cache, version)?;
        builds.push(Build::read(&ggml.context("no sources")?)?);
    }
    let table = Table::of_workspace()?;
    let found = table.differences(&builds);
    ensure!(found.is_empty(), "{TABLE}: {}", found.join("; "));

    let changed = table.changed();
    for changed in &changed {
        ensure!(
            !changed.differences(&builds).is_empty(),
            "a changed table is not detected: {changed:?}"
        );
    }
    let newest = &builds.last().context("no build")?.written;
    Ok(format!(
        "{} builds, {} words and {} sources in the newest; each of {} changed tables is detected",
        builds.len(),
        newest.words.len(),
        newest.sources.len(),
        changed.len()
    ))
}
