//! The supported releases of ggml, and the API version of each.
//!
//! To support a new release, add its series here, after the layout test (`tests/abi.rs`) has
//! compared the declarations in `vendor/` with its headers, and the differences of its operators
//! have their place in `translate/releases.rs`. CONTRIBUTING.md has the steps.

use std::fmt;

use thiserror::Error;

use crate::ApiVersion;

/// The supported releases, as text. A macro, because the version stamp is a literal.
#[macro_export]
macro_rules! supported {
    () => {
        "0.20-0.25 (API 2), 0.26 (API 3)"
    };
}

/// The supported releases: the first of each series, oldest series first.
const SERIES: &[(Version, ApiVersion)] = &[
    (Version::new(0, 20), ApiVersion::V2),
    (Version::new(0, 26), ApiVersion::V3),
];

/// The first release that is not supported.
const END: Version = Version::new(0, 27);

/// Since when builds of ggml have something, as numbers of `ggml_version()`.
///
/// The number is that of the last release before a build, so that builds with a change and without
/// it can have one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Since {
    /// The lowest number of a build that has it.
    pub some_builds: Version,
    /// The lowest number under which every build has it.
    pub every_build: Version,
}

impl Since {
    /// In builds of the series 0.`before`, and in every build from the next series on.
    const fn release_after(before: u32) -> Self {
        Self {
            some_builds: Version::new(0, before),
            every_build: Version::new(0, before + 1),
        }
    }

    /// The offset of ROPE, word 15.
    pub const ROPE_OFFSET: Self = Self::release_after(20);
    /// `n_kv_max` of FLASH_ATTN_EXT, word 4.
    pub const N_KV_MAX: Self = Self::release_after(22);
    /// The precisions of the sum of MUL_MAT_ID (word 0) and of the second source of MUL_MAT and
    /// MUL_MAT_ID (word 3), and the values of `enum ggml_prec` other than default and F32.
    pub const PRECISIONS: Self = Self::release_after(23);
    /// The words of DSV4_HC_PRE.
    pub const HC_PRE_PARAMETERS: Self = Self::release_after(24);
    /// DSV4_HC_POST with null for the source `comb`.
    pub const HC_POST_WITHOUT_COMB: Self = Self::release_after(24);
    /// Sums of F16 products in F32 on every processor, in the CPU backend: first in
    /// llama-cpp-python 0.3.36.
    pub const SUMS_IN_F32: Self = Self::release_after(25);
    /// A demand for 8 bits is read where weights have FP4, in the CUDA backend: first in b11236.
    pub const EIGHT_BITS_FOR_FP4: Self = Self::release_after(25);
}

/// The major and minor number of a ggml release. Patch releases do not change the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    major: u32,
    minor: u32,
}

/// Why a ggml release is not supported.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UnsupportedVersion {
    /// The text is not a version number.
    #[error("`{0}` is not a ggml version (this plugin works with {known})", known = supported!())]
    Unreadable(String),
    /// The release is older than the first supported one.
    #[error(
        "ggml {0} is too old for this plugin, which works with {known}: update the program",
        known = supported!()
    )]
    TooOld(String),
    /// The release is newer than the last supported one.
    #[error(
        "ggml {0} is newer than this plugin, which works with {known}: install a newer \
         ggml-vgpu, or, if there is none, add this release as CONTRIBUTING.md says under Extend",
        known = supported!()
    )]
    TooNew(String),
    /// The build has the number of the last supported release, and a later interface.
    #[error(
        "ggml {release} here is a build after that release: it has no `{symbol}`, so that its \
         interface is newer than this plugin, which works with {known}: install a newer \
         ggml-vgpu, or, if there is none, add this release as CONTRIBUTING.md says under Extend",
        symbol = V3_SYMBOL,
        known = supported!()
    )]
    TooNewBuild {
        /// What `ggml_version()` says.
        release: String,
    },
}

/// The function that every ggml with API version 3 has, and no other: API version 4 removes it.
///
/// `ggml_version()` names the last release before a build, so that the function is better evidence
/// of the interface than the number.
pub const V3_SYMBOL: &str = "ggml_backend_buft_alloc_buffer_n";

impl Version {
    /// The series `major.minor`.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// Reads the answer of `ggml_version()`, for example `0.25.3` or `0.25.3-dirty`.
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split('.').map_while(|part| {
            let digits = part
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(part.len());
            part[..digits].parse().ok()
        });
        Some(Self::new(numbers.next()?, numbers.next()?))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The release that `ggml_version()` names, and its API version.
///
/// # Errors
///
/// [`UnsupportedVersion`] if the release is not supported: its structures may have other layouts.
pub fn api_of(text: &str) -> Result<(Version, ApiVersion), UnsupportedVersion> {
    let version =
        Version::parse(text).ok_or_else(|| UnsupportedVersion::Unreadable(text.to_owned()))?;
    if version >= END {
        return Err(UnsupportedVersion::TooNew(text.to_owned()));
    }
    let (_, api) = SERIES
        .iter()
        .rfind(|(first, _)| *first <= version)
        .ok_or_else(|| UnsupportedVersion::TooOld(text.to_owned()))?;
    Ok((version, *api))
}

/// The API version of a build whose `ggml_version()` is `text`. `has_v3_symbol`: whether the build
/// exports [`V3_SYMBOL`].
///
/// # Errors
///
/// [`UnsupportedVersion`] as for [`api_of`], and if the interface of the build is newer than that
/// of the release which the number names.
pub fn api_of_build(
    text: &str,
    has_v3_symbol: bool,
) -> Result<(Version, ApiVersion), UnsupportedVersion> {
    match (api_of(text)?, has_v3_symbol) {
        ((version, _), true) => Ok((version, ApiVersion::V3)),
        ((version, ApiVersion::V2), false) => Ok((version, ApiVersion::V2)),
        ((_, ApiVersion::V3), false) => Err(UnsupportedVersion::TooNewBuild {
            release: text.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn api(text: &str) -> Result<ApiVersion, UnsupportedVersion> {
        api_of(text).map(|(_, api)| api)
    }

    #[test]
    fn releases_map_to_their_api_version() {
        for text in [
            "0.20.2", "0.21.0", "0.22.1", "0.23", "0.24.0", "0.25.1", "0.25.3", "0.25.99",
        ] {
            assert_eq!(api(text), Ok(ApiVersion::V2), "{text}");
        }
        for text in ["0.26.0", "0.26.7"] {
            assert_eq!(api(text), Ok(ApiVersion::V3), "{text}");
        }
    }

    #[test]
    fn function_of_api_3_decides_between_builds_of_one_number() {
        let api = |text, has| api_of_build(text, has).map(|(_, api)| api);
        assert_eq!(api("0.25.3", false), Ok(ApiVersion::V2));
        assert_eq!(api("0.25.3", true), Ok(ApiVersion::V3));
        assert_eq!(api("0.26.0", true), Ok(ApiVersion::V3));
        let error = api("0.26.0", false).unwrap_err();
        assert_eq!(
            error,
            UnsupportedVersion::TooNewBuild {
                release: "0.26.0".into()
            }
        );
        let text = error.to_string();
        for words in [
            "is a build after that release",
            V3_SYMBOL,
            "add this release",
        ] {
            assert!(text.contains(words), "{words} is not in {text}");
        }
        assert_eq!(
            api("0.27.0", true),
            Err(UnsupportedVersion::TooNew("0.27.0".into()))
        );
    }

    #[test]
    fn changes_arrive_under_the_number_of_the_release_before() {
        let Since {
            some_builds,
            every_build,
        } = Since::PRECISIONS;
        assert_eq!(some_builds.to_string(), "0.23");
        assert_eq!(every_build.to_string(), "0.24");
    }

    #[test]
    fn version_suffixes_are_ignored() {
        for text in [
            "0.25.3-dirty",
            "0.25.3+abc.1",
            "0.25-rc1",
            "0.25.",
            "0.25.x",
        ] {
            assert_eq!(api(text), Ok(ApiVersion::V2), "{text}");
        }
    }

    #[test]
    fn unsupported_releases_are_refused_with_their_version() {
        assert_eq!(
            api("0.19.9"),
            Err(UnsupportedVersion::TooOld("0.19.9".into()))
        );
        assert_eq!(
            api("0.27.0"),
            Err(UnsupportedVersion::TooNew("0.27.0".into()))
        );
        assert_eq!(
            api("1.0.0"),
            Err(UnsupportedVersion::TooNew("1.0.0".into()))
        );
        for text in ["", "0", "unknown", "v", ".25", "0.x", "99999999999.1"] {
            assert_eq!(
                api(text),
                Err(UnsupportedVersion::Unreadable(text.into())),
                "{text}"
            );
        }
    }

    #[test]
    fn refusals_end_with_the_next_step() {
        let text = |release| api(release).unwrap_err().to_string();
        let newer = text("0.27.0");
        assert!(
            newer.starts_with("ggml 0.27.0 is newer than this plugin, which works with 0.20-"),
            "{newer}"
        );
        assert!(
            newer.ends_with("as CONTRIBUTING.md says under Extend"),
            "{newer}"
        );
        let older = text("0.19.0");
        assert!(older.ends_with(": update the program"), "{older}");
    }

    #[test]
    fn supported_versions_text_matches_the_table() {
        let mut firsts = SERIES.iter().map(|(first, _)| *first).skip(1).chain([END]);
        let words: Vec<String> = SERIES
            .iter()
            .map(|(first, api)| {
                let next = firsts.next().expect("one end for each series");
                let last = Version::new(next.major, next.minor - 1);
                let range = if last == *first {
                    first.to_string()
                } else {
                    format!("{first}-{last}")
                };
                format!("{range} (API {})", api.number())
            })
            .collect();
        assert_eq!(words.join(", "), supported!());
        // The page on programs has a table of its own, with a row for each.
        let page = include_str!("../../docs/programs.md");
        for words in words {
            let (range, api) = words.split_once(" (").expect("a range and its API");
            let row = format!(
                "| {} | {} |",
                range.replace('-', " to "),
                api.trim_end_matches(')')
            );
            assert!(page.contains(&row), "{row} is not in docs/programs.md");
        }
    }

    /// The pages that name the range of supported releases in a sentence.
    const PAGES: [(&str, &str); 5] = [
        ("README.md", include_str!("../../README.md")),
        ("docs/install.md", include_str!("../../docs/install.md")),
        (
            "docs/ggml-engine.md",
            include_str!("../../docs/ggml-engine.md"),
        ),
        (
            "docs/ggml-versions.md",
            include_str!("../../docs/ggml-versions.md"),
        ),
        ("docs/programs.md", include_str!("../../docs/programs.md")),
    ];

    /// The pages that do not say that the releases from `first` up to and without `end` are
    /// supported, or say so of others.
    fn pages_without(first: Version, end: Version) -> Vec<&'static str> {
        let (before, last) = (
            format!("ggml {first} to "),
            Version::new(end.major, end.minor - 1),
        );
        let is_wrong = |text: &str| {
            let named: Vec<Option<Version>> = { text.split(&before).skip(1) }
                .map(Version::parse)
                .collect();
            named.is_empty() || named.iter().any(|named| *named != Some(last))
        };
        let pages = PAGES.iter().filter(|(_, text)| is_wrong(text));
        pages.map(|(name, _)| *name).collect()
    }

    #[test]
    fn pages_name_the_range_of_the_table() {
        let (first, _) = SERIES[0];
        assert_eq!(pages_without(first, END), [""; 0]);
        let later = Version::new(END.major, END.minor + 1);
        assert_eq!(pages_without(first, later), PAGES.map(|(name, _)| name));
    }

    /// The first column of the table of whole runs, as series.
    fn tested(table: &str) -> Vec<Version> {
        let rows = table.lines().skip(1);
        let mut series: Vec<Version> = { rows.filter_map(|row| row.split([',', ' ']).next()) }
            .map(|number| Version::parse(number).expect("a number of ggml"))
            .collect();
        series.dedup();
        series
    }

    /// What is wrong with the table of whole runs.
    fn differences(table: &str) -> Vec<String> {
        let (first, _) = SERIES[0];
        let supported = { first.minor..END.minor }.map(|minor| Version::new(first.major, minor));
        let supported: Vec<Version> = supported.collect();
        let tested = tested(table);
        let missing = { supported.iter() }
            .filter(|series| !tested.contains(series))
            .map(|series| format!("{series} is supported, and has no whole run"));
        let extra = { tested.iter() }
            .filter(|series| !supported.contains(series))
            .map(|series| format!("{series} has a whole run, and is not supported"));
        missing.chain(extra).collect()
    }

    #[test]
    fn every_supported_series_has_a_whole_run_of_its_operators() {
        const TABLE: &str = include_str!("../../tests/system/ops-by-version.csv");
        assert_eq!(
            SERIES[0].0.major, END.major,
            "the series count within a major number"
        );
        assert_eq!(differences(TABLE), [""; 0]);
        // A row less, and a row too many.
        let without: Vec<&str> = TABLE
            .lines()
            .filter(|row| !row.starts_with("0.23."))
            .collect();
        assert_eq!(
            differences(&without.join("\n")),
            ["0.23 is supported, and has no whole run"]
        );
        assert_eq!(
            differences(&format!("{TABLE}0.27.0 b12000,1,1,1,0\n")),
            ["0.27 has a whole run, and is not supported"]
        );
    }
}
