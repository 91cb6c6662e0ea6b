//! The stamp in a plugin's file: the plugin's version, and the ggml releases it works with.

use std::fmt;

use anyhow::{Context as _, Result, ensure};
use vgpu_elf::Library;

/// The plugin's file name.
pub(super) const PLUGIN: &str = "libggml-vgpu.so";
/// The SONAME of the plugin.
const SONAME: &str = "libggml-vgpu.so";
/// The prefixes of the stamp's two lines. The plugin's `abi/stamp.rs` writes the lines.
const STAMP: &str = "ggml-vgpu-stamp: ";
const NEEDS: &str = "ggml-vgpu-needs: ";
/// The function that every ggml with API version 3 exports, and no other. `ggml_version()` names
/// the last release before a build, so that a build can have another interface than its number
/// says.
pub(crate) const V3_SYMBOL: &str = "ggml_backend_buft_alloc_buffer_n";

/// A plugin's stamp.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Version and commit.
    pub(crate) plugin: String,
    /// The supported ggml releases, as text.
    pub(crate) ggml: String,
    series: Vec<Series>,
    /// Functions that ggml must export.
    needs: Vec<String>,
}

/// Releases of ggml with the same interface.
#[derive(Debug, PartialEq, Eq)]
struct Series {
    first: Version,
    last: Version,
    api: u32,
}

/// Major and minor number.
type Version = (u32, u32);

/// Why a plugin does not work with a build of ggml.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unsupported {
    /// `ggml_version()` is no version number.
    Unreadable,
    TooOld,
    TooNew,
    /// The number is supported, and the interface of the build is newer.
    TooNewBuild,
}

impl Unsupported {
    /// What helps. The line of a plugin that refuses a ggml ends with the same words
    /// (`vendor/src/versions.rs`).
    pub(crate) fn remedy(self) -> Option<&'static str> {
        match self {
            Unsupported::Unreadable => None,
            Unsupported::TooOld => Some("update the program"),
            Unsupported::TooNew | Unsupported::TooNewBuild => Some(
                "install a newer ggml-vgpu, or, if there is none, add this release as \
                 CONTRIBUTING.md says under Extend",
            ),
        }
    }
}

impl Stamp {
    /// Reads the stamp of the plugin `library`.
    pub(crate) fn of(library: &Library) -> Result<Stamp> {
        let path = library.path().display();
        ensure!(
            library.soname() == Some(SONAME),
            "{path} is not the vGPU plugin: its SONAME is {:?}, not {SONAME}",
            library.soname().unwrap_or("missing")
        );
        for symbol in ["ggml_backend_score", "ggml_backend_init"] {
            ensure!(
                library.exports(symbol),
                "{path} is damaged: it exports no {symbol}"
            );
        }
        let line = |words| {
            library
                .line(words)
                .with_context(|| format!("{path} is a plugin without the stamp {words:?}"))
        };
        Stamp::parse(line(STAMP)?, line(NEEDS)?)
            .with_context(|| format!("{path} has a stamp that this version of vgpu cannot read"))
    }

    /// Reads `plugin 0.1.0-dev.20261126134501+1a2b3c4d, ggml 0.20-0.25 (API 2), 0.26 (API 3)`.
    fn parse(stamp: &str, needs: &str) -> Result<Stamp> {
        let (plugin, ggml) = stamp
            .strip_prefix("plugin ")
            .and_then(|rest| rest.split_once(", ggml "))
            .context("the line does not name a plugin and its ggml")?;
        let series = ggml
            .split(", ")
            .map(Series::parse)
            .collect::<Option<Vec<_>>>();
        let series = series.with_context(|| format!("{ggml:?} are not releases of ggml"))?;
        let needs: Vec<String> = needs.split_whitespace().map(str::to_owned).collect();
        ensure!(!needs.is_empty(), "the stamp lists no function of ggml");
        Ok(Stamp {
            plugin: plugin.to_owned(),
            ggml: ggml.to_owned(),
            series,
            needs,
        })
    }

    /// The API version of a build of ggml whose `ggml_version()` is `version`. `has_v3_symbol`:
    /// whether the build exports [`V3_SYMBOL`]. The plugin decides the same way.
    ///
    /// # Errors
    /// If the plugin does not support the build.
    pub(crate) fn api_of(&self, version: &str, has_v3_symbol: bool) -> Result<u32, Unsupported> {
        let version = parse_version(version).ok_or(Unsupported::Unreadable)?;
        let is_old = self.series.iter().all(|series| version < series.first);
        let series = { self.series.iter() }
            .find(|series| series.first <= version && version <= series.last)
            .ok_or(match is_old {
                true => Unsupported::TooOld,
                false => Unsupported::TooNew,
            })?;
        match (series.api, has_v3_symbol) {
            (2, true) => Ok(3),
            (3, false) => Err(Unsupported::TooNewBuild),
            (api, _) => Ok(api),
        }
    }

    /// The functions that the plugin needs and `ggml` does not export.
    pub(crate) fn missing_from<'a>(&'a self, ggml: &Library) -> Vec<&'a str> {
        let missing = self.needs.iter().filter(|name| !ggml.exports(name));
        missing.map(String::as_str).collect()
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ggml-vgpu {}", self.plugin)
    }
}

impl Series {
    /// Reads `0.20-0.25 (API 2)` or `0.26 (API 3)`.
    fn parse(text: &str) -> Option<Series> {
        let (range, api) = text.strip_suffix(')')?.split_once(" (API ")?;
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(Series {
            first: parse_version(first)?,
            last: parse_version(last)?,
            api: api.parse().ok()?,
        })
    }
}

/// Reads `0.25.3` or `0.25.3-dirty`. Patch releases have the same interface.
fn parse_version(text: &str) -> Option<Version> {
    let mut numbers = text.split('.').map_while(|part| {
        let digits = part
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(part.len());
        part[..digits].parse().ok()
    });
    Some((numbers.next()?, numbers.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "plugin 0.1.0-dev.1+abc, ggml 0.20-0.25 (API 2), 0.26 (API 3)";

    #[test]
    fn stamp_lists_the_supported_ggml_versions() {
        let stamp = Stamp::parse(LINE, "ggml_version ggml_op_name").expect("a stamp");
        assert_eq!(stamp.to_string(), "ggml-vgpu 0.1.0-dev.1+abc");
        for (version, has_v3_symbol, api) in [
            ("0.19.9", false, Err(Unsupported::TooOld)),
            ("0.20.2", false, Ok(2)),
            ("0.25.3-dirty", false, Ok(2)),
            ("0.25.3", true, Ok(3)),
            ("0.26.0", true, Ok(3)),
            ("0.26.0", false, Err(Unsupported::TooNewBuild)),
            ("0.27.0", true, Err(Unsupported::TooNew)),
            ("0.27.0", false, Err(Unsupported::TooNew)),
            ("1.0.0", false, Err(Unsupported::TooNew)),
            ("unknown", false, Err(Unsupported::Unreadable)),
        ] {
            let found = stamp.api_of(version, has_v3_symbol);
            assert_eq!(found, api, "{version} {has_v3_symbol}");
        }
    }

    #[test]
    fn remedies_are_those_of_the_plugin() {
        let plugin = include_str!("../../../../vendor/src/versions.rs");
        let words: Vec<&str> = plugin.split_whitespace().filter(|w| *w != "\\").collect();
        let plugin = words.join(" ");
        for reason in [
            Unsupported::TooOld,
            Unsupported::TooNew,
            Unsupported::TooNewBuild,
        ] {
            let remedy = reason.remedy().expect("a remedy");
            assert!(plugin.contains(&format!(": {remedy}\"")), "{remedy}");
        }
    }

    #[test]
    fn malformed_stamp_lines_are_refused() {
        for (line, needs) in [
            ("", "a"),
            ("plugin 0.1.0", "a"),
            ("plugin 0.1.0, ggml", "a"),
            ("plugin 0.1.0, ggml 0.20-0.25", "a"),
            ("plugin 0.1.0, ggml new (API 2)", "a"),
            (LINE, ""),
        ] {
            assert!(Stamp::parse(line, needs).is_err(), "{line:?}");
        }
    }
}
