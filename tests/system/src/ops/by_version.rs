//! The counts of whole runs by version of ggml, kept in a file that a run is compared with.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail, ensure};

use super::by_engine;
use super::report::{Report, SELECTING};
use super::suite::{Claim, NEAR_TIE_FAILURES, NEAR_TIE_REPEATS};
use xtask_common::llama;

/// The file, one row per version. The first line of the file names the columns.
const FILE: &str = "tests/system/ops-by-version.csv";
const ROWS: &str = include_str!("../../ops-by-version.csv");

/// The counts of a run without a failed case.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Counts {
    /// What `ggml_version()` says, and the build that one number of two is of: `0.24.0 b11076`.
    ggml: String,
    /// Cases that `test-backend-ops support` lists.
    listed: u64,
    /// Cases that `test-backend-ops test` runs, fused operators included.
    run: u64,
    /// Cases whose result agrees with ggml's CPU backend.
    ok: u64,
    /// Cases that ggml's CPU backend cannot compute.
    incomparable: u64,
    /// Cases of ours, of operators without a case in `test-backend-ops`.
    ours: u64,
}

impl Counts {
    fn of(ggml: &str, claims: &[Claim], report: &Report) -> Counts {
        let counts = report.totals();
        Counts {
            ggml: ggml.to_owned(),
            listed: claims.len() as u64,
            run: counts.all(),
            ok: counts.ok,
            incomparable: counts.incomparable,
            ours: 0, // of another run: `check_ours`
        }
    }

    fn row(&self) -> String {
        let Counts {
            ggml,
            listed,
            run,
            ok,
            incomparable,
            ours,
        } = self;
        format!("{ggml},{listed},{run},{ok},{incomparable},{ours}")
    }
}

/// Compares a whole run of a version with the file.
///
/// # Errors
/// If the file has other counts for the version, or none.
pub(crate) fn check(ggml: &str, claims: &[Claim], report: &Report) -> Result<String> {
    let mut found = Counts::of(ggml, claims, report);
    let kept = row_of(ggml)?;
    found.ours = kept.as_ref().map_or(0, |kept| kept.ours);
    if kept.as_ref() == Some(&found) {
        return Ok(format!("{} cases run", found.run));
    }
    let kept = kept.map_or("no row".to_owned(), |kept| {
        format!("the row {}", kept.row())
    });
    bail!(
        "{FILE} has {kept} of ggml {ggml}. The run gives {}; the last number is that of our own \
         cases, which the next check prints. Correct the file, then run `cargo xtask ops-table {}`",
        found.row(),
        // The rest of the page is of one release only.
        match ggml == llama::RELEASE {
            true => "--last-test",
            false => "--by-version",
        }
    );
}

/// Compares the number of our own cases of a version with the file. Of a version without a row, not
/// every case was run.
///
/// # Errors
/// If the file has another number for the version.
pub(crate) fn check_ours(ggml: &str, cases: u64) -> Result<()> {
    let Some(kept) = row_of(ggml)? else {
        return Ok(());
    };
    let found = Counts {
        ours: cases,
        ..kept.clone()
    };
    ensure!(
        kept == found,
        "{FILE} has the row {}, the run gives {}",
        kept.row(),
        found.row()
    );
    Ok(())
}

/// The row of a version.
fn row_of(ggml: &str) -> Result<Option<Counts>> {
    Ok(parse(ROWS)?.into_iter().find(|kept| kept.ggml == ggml))
}

fn parse(text: &str) -> Result<Vec<Counts>> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let mut all = Vec::new();
    for record in reader.records() {
        let record = record.with_context(|| format!("reading {FILE}"))?;
        let number = |column: usize| -> Result<u64> {
            let field = record.get(column).context("a row is short")?;
            field
                .parse()
                .with_context(|| format!("{FILE}: {field:?} is no number"))
        };
        all.push(Counts {
            ggml: record.get(0).context("an empty row")?.to_owned(),
            listed: number(1)?,
            run: number(2)?,
            ok: number(3)?,
            incomparable: number(4)?,
            ours: number(5)?,
        });
    }
    Ok(all)
}

/// The heading of the section.
const HEADING: &str = "\n## By version of ggml\n";

/// `page`, which ends with this section and the one behind it, with both as their files say.
///
/// # Errors
/// If the page has no such section, or the file cannot be read.
pub(crate) fn with_section(page: &str) -> Result<String> {
    let (before, _) = page
        .split_once(HEADING)
        .with_context(|| format!("docs/OPS.md has no {:?}", HEADING.trim()))?;
    Ok(before.to_owned() + &section()? + &by_engine::section()?)
}

/// The section of `docs/OPS.md`.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn section() -> Result<String> {
    let mut text = format!(
        "{HEADING}\n\
         Each build ran every case of its own `test-backend-ops` against its own CPU backend, without\n\
         three cases of MUL_MAT_ID, as above. No case was unsupported, and none failed but near ties: of\n\
         two values that differ by less than a rounding error, {selecting} may select either. Such a case\n\
         counts as agreeing if at most {NEAR_TIE_FAILURES} of {NEAR_TIE_REPEATS} repeats with other values fails.\n\n\
         `cargo xtask test --only ops --ggml VERSION` repeats a run and fails if a count differs.\n\
         {newest} is a package without `test-backend-ops`; it has the operators of {release}, so the\n\
         program of {release} tests it. The sources of each version are in\n\
         [ggml-versions.md](ggml-versions.md#tests).\n\n\
         - **listed**: cases that `test-backend-ops support` lists.\n\
         - **run**: cases that `test-backend-ops test` runs, fused operators included.\n\
         - **CPU**: cases whose result agrees with that version's CPU backend.\n\
         - **no CPU**: cases that this CPU backend cannot compute.\n\
         - **ours**: cases of ours, of operators that `test-backend-ops` has no case of, whose result\n\
         \x20\x20agrees with that CPU backend.\n\n\
         | ggml | listed | run | CPU | no CPU | ours |\n|---|--:|--:|--:|--:|--:|\n",
        selecting = SELECTING.join(" or "),
        newest = llama::NEWEST_RELEASE,
        release = llama::RELEASE,
    );
    for counts in parse(ROWS)? {
        let cells = counts.row().replace(',', " | ");
        writeln!(text, "| {cells} |").context("formatting")?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use xtask_common::ggml_releases::{RELEASES, Release};
    use xtask_common::workspace;

    #[test]
    fn section_is_written_without_the_rest_of_the_page() {
        let old = format!("# Operators\n\n| a | 1 |\n{HEADING}\nOld.\n");
        let new = with_section(&old).unwrap();
        assert_eq!(
            new,
            format!(
                "# Operators\n\n| a | 1 |\n{}{}",
                section().unwrap(),
                by_engine::section().unwrap()
            )
        );
        assert_eq!(with_section(&new).unwrap(), new);
        assert!(with_section("# Operators\n").is_err());
    }

    /// With the next release, no name of a test and no sentence of the page is that of this one.
    #[test]
    fn names_of_tests_have_the_releases_from_their_constants() {
        let own = include_str!("by_version.rs");
        let (_, of_section) = own.split_once("fn section()").unwrap();
        let (of_section, _) = of_section.split_once("mod tests").unwrap();
        for (file, text) in [
            ("by_version.rs: section", of_section),
            ("parts/ops.rs", include_str!("../parts/ops.rs")),
            ("parts/programs.rs", include_str!("../parts/programs.rs")),
        ] {
            for release in [llama::RELEASE, llama::NEWEST_RELEASE] {
                assert!(!text.contains(release), "{file} has {release} as text");
            }
        }
    }

    #[test]
    fn section_names_the_releases_of_the_tests() {
        let section = section().unwrap();
        for words in [
            format!("{} is a package without", llama::NEWEST_RELEASE),
            format!("program of {} tests it", llama::RELEASE),
            "if at most 1 of 50 repeats".to_owned(),
        ] {
            assert!(section.contains(&words), "{words} is not in {section}");
        }
    }

    #[test]
    fn page_has_the_counts_of_every_tested_version() {
        let page = std::fs::read_to_string(workspace::root().join("docs/OPS.md")).unwrap();
        assert_eq!(
            with_section(&page).unwrap(),
            page,
            "docs/OPS.md: run `cargo xtask ops-table --by-version`"
        );
        let rows = parse(ROWS).unwrap();
        let kept: Vec<&str> = rows.iter().map(|row| row.ggml.as_str()).collect();
        let mut builds: Vec<String> = { RELEASES.iter().map(Release::name) }
            .chain([llama::RELEASE.to_owned(), llama::NEWEST_RELEASE.to_owned()])
            .collect();
        builds.sort_unstable();
        assert_eq!(kept, builds);
        for row in &rows {
            assert_eq!(row.run, row.ok + row.incomparable, "{row:?}");
        }
    }

    #[test]
    fn other_counts_than_those_of_the_file_are_an_error() {
        let mut report = Report::default();
        for line in ["  ABS(a): OK", "  SUM(): not supported [CPU]"] {
            assert!(report.line(line).is_some(), "{line}");
        }
        let error = check("0.25.3", &[], &report).unwrap_err().to_string();
        assert!(
            error.contains("The run gives 0.25.3,0,2,1,1,192;"),
            "{error}"
        );
        assert!(error.ends_with("ops-table --last-test`"), "{error}");
        let error = check("0.1", &[], &report).unwrap_err().to_string();
        assert!(error.contains("no row of ggml 0.1"), "{error}");
        assert!(error.ends_with("ops-table --by-version`"), "{error}");
        check_ours("0.25.3", 192).unwrap();
        check_ours("0.1", 7).unwrap();
        let error = check_ours("0.25.3", 191).unwrap_err().to_string();
        assert!(
            error.ends_with(",191") && error.contains(",192,"),
            "{error}"
        );
    }
}
