//! The counts of whole runs by version of ggml, kept in a file that a run is compared with.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail, ensure};

use super::report::Report;
use super::suite::Claim;

/// The file, one row per version. Its first line names the columns.
const FILE: &str = "tests/system/ops-by-version.csv";
/// Builds of which not every case was run.
#[cfg(test)]
const NOT_WHOLE: &[&str] = &["0.22.0 b10644"];
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
        "{FILE} has {kept} of ggml {ggml}. The run gives {}. Correct the file, then run \
         `cargo xtask ops-table --last-test`",
        found.row()
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

/// The section of `docs/OPS.md`.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn section() -> Result<String> {
    let mut text = String::from(
        "\n## By version of ggml\n\n\
         Each build ran every case of its own `test-backend-ops` against its own CPU backend, without\n\
         three cases of MUL_MAT_ID, as above. No case failed and none was unsupported.\n\
         `cargo xtask test --only ops --ggml VERSION` repeats a run and fails if a count differs. 0.26.0\n\
         is a package without `test-backend-ops`; it has the operators of 0.25.3, so the program of\n\
         0.25.3 tests it. The sources of each version are in [ggml-versions.md](ggml-versions.md#tests).\n\n\
         - **listed**: cases that `test-backend-ops support` lists.\n\
         - **run**: cases that `test-backend-ops test` runs, fused operators included.\n\
         - **CPU**: cases whose result agrees with that version's CPU backend.\n\
         - **no CPU**: cases that this CPU backend cannot compute.\n\
         - **ours**: cases of ours, of operators that `test-backend-ops` has no case of, whose result\n\
         \x20\x20agrees with that CPU backend.\n\n\
         | ggml | listed | run | CPU | no CPU | ours |\n|---|--:|--:|--:|--:|--:|\n",
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
    use xtask_common::{llama, workspace};

    #[test]
    fn page_has_the_counts_of_every_tested_version() {
        let page = std::fs::read_to_string(workspace::root().join("docs/OPS.md")).unwrap();
        assert!(
            page.ends_with(&section().unwrap()),
            "docs/OPS.md: run `cargo xtask ops-table`, or put this at its end:\n{}",
            section().unwrap()
        );
        let rows = parse(ROWS).unwrap();
        let kept: Vec<&str> = rows.iter().map(|row| row.ggml.as_str()).collect();
        let mut builds: Vec<String> = { RELEASES.iter().map(Release::name) }
            .chain([llama::RELEASE.to_owned(), llama::NEWEST_RELEASE.to_owned()])
            .filter(|name| !NOT_WHOLE.contains(&name.as_str()))
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
            error.contains("The run gives 0.25.3,0,2,1,1,192."),
            "{error}"
        );
        let error = check("0.1", &[], &report).unwrap_err().to_string();
        assert!(error.contains("no row of ggml 0.1"), "{error}");
        check_ours("0.25.3", 192).unwrap();
        check_ours("0.1", 7).unwrap();
        let error = check_ours("0.25.3", 191).unwrap_err().to_string();
        assert!(
            error.ends_with(",191") && error.contains(",192,"),
            "{error}"
        );
    }
}
