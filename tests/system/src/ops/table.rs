//! `docs/OPS.md`: the support of each op, beside ggml's published lists of other backends.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use super::report::Report;
use super::suite::{
    Cases, Claim, Suite, compare_with_cpu, compare_with_reference, disagreements, log_name, none,
    parse_claims, proves_the_rest, report_name,
};
use super::{by_engine, by_version};
use crate::preload::Library;
use xtask_common::cache::Cache;
use xtask_common::dist;
use xtask_common::executor::Executor;
use xtask_common::llama;
use xtask_common::node_llama::Backend;
use xtask_common::println;
use xtask_common::progress::{Progress, heading};
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

/// The names of the two runs of a test: against ggml's CPU backend, and against the reference. A
/// run with every case has names of its own: [`of_last_test`] reads its files, which a sample or a
/// run of some operators must not replace.
pub(crate) const fn run_names(is_whole: bool) -> [&'static str; 2] {
    match is_whole {
        true => ["whole", "whole-reference"],
        false => ["unix", "reference"],
    }
}

/// The number of columns of other backends: those that support most cases.
const OTHERS: usize = 7;

/// The number of cases of an op, and of those that the backend supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Share {
    listed: u64,
    supported: u64,
}

impl Share {
    fn add(&mut self, claim: &Claim) {
        self.listed += 1;
        self.supported += u64::from(claim.supported);
    }

    /// In percent. 100 only if all cases are supported, and 0 only if none is.
    fn percent(&self) -> String {
        match (self.supported, self.listed) {
            (_, 0) => "–".to_owned(),
            (0, _) => "0".to_owned(),
            (some, all) if some == all => "100".to_owned(),
            (some, all) => (some * 100 / all).clamp(1, 99).to_string(),
        }
    }
}

/// A backend of ggml with its published list.
#[derive(Debug)]
struct Other {
    name: String,
    total: Share,
    ops: BTreeMap<String, Share>,
}

impl Other {
    fn new(name: &str, claims: &[Claim]) -> Other {
        let mut other = Other {
            name: name.to_owned(),
            total: Share::default(),
            ops: BTreeMap::new(),
        };
        for claim in claims {
            other.total.add(claim);
            other.ops.entry(claim.op.clone()).or_default().add(claim);
        }
        other
    }
}

/// The results of the runs of a release.
#[derive(Debug)]
pub(crate) struct Findings {
    /// The release of ggml.
    pub(crate) release: String,
    /// Every case without fusion.
    pub(crate) claims: Vec<Claim>,
    /// Compared with ggml's CPU backend.
    pub(crate) with_cpu: Report,
    /// Compared with the reference in double precision.
    pub(crate) with_reference: Report,
}

/// Options of `cargo xtask ops-table`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Run nothing: use the results of the last test with every case on the release of the table
    /// (`cargo xtask test --only ops` with `--full`, or with `--ggml` and that release)
    #[arg(long)]
    last_test: bool,
    /// Run nothing: write only the section "By version", from tests/system/ops-by-version.csv
    #[arg(long, conflicts_with = "last_test")]
    by_version: bool,
}

/// `cargo xtask ops-table`: writes the table.
pub(crate) fn write(cache: &Cache, options: &Options) -> Result<()> {
    heading("docs/OPS.md");
    let text = if options.by_version {
        by_version::with_section(&page()?)?
    } else {
        let findings = match options.last_test {
            true => of_last_test(&workspace::reports())?,
            false => run(cache)?,
        };
        render(&findings, &published(cache)?)?
    };
    std::fs::write(path(), text).with_context(|| format!("writing {}", path().display()))?;
    println!("{}", path().display());
    Ok(())
}

/// The results of the last test with every case, read from its files in the folder `reports`.
fn of_last_test(reports: &Path) -> Result<Findings> {
    let read = |file: String| {
        let path = reports.join(file);
        std::fs::read_to_string(&path).with_context(|| {
            format!(
                "reading {}, which a test with every case leaves (`cargo xtask test --only ops \
                 --ggml {}`)",
                path.display(),
                llama::RELEASE
            )
        })
    };
    let report = |run: &str| -> Result<Report> {
        let mut report = Report::default();
        read(log_name(run, "test"))?.lines().for_each(|line| {
            report.line(line);
        });
        let kept = serde_json::from_str(&read(report_name(run))?);
        report.accept_kept_near_ties(&kept.context("reading the report of a run")?);
        report.check()?;
        Ok(report)
    };
    let [whole, reference] = run_names(true);
    let claims = parse_claims(&read(log_name(whole, "support"))?)?;
    let (with_cpu, with_reference) = (report(whole)?, report(reference)?);
    let different = disagreements(&claims, &with_cpu);
    none("were listed one way and run another", &different)?;
    proves_the_rest(&with_reference, &with_cpu)?;
    Ok(Findings {
        release: llama::RELEASE.to_owned(),
        claims,
        with_cpu,
        with_reference,
    })
}

/// Lists and runs all cases.
fn run(cache: &Cache) -> Result<Findings> {
    let dist = dist::build(cache)?;
    let bin = llama::build(cache, llama::Stage::Ops)?;
    let reports = workspace::reports();
    std::fs::create_dir_all(&reports).with_context(|| format!("creating {}", reports.display()))?;
    let scratch = Scratch::new()?;
    let socket = scratch.path().join("vgpu.sock");
    let log = reports.join("ops-table-vgpu-serve.log");
    let executor = Executor::start(&dist, &socket, workspace::cores(), &log)?;
    let endpoint = executor.endpoint();
    let suite = || Suite {
        bin: &bin,
        backend: Backend::Plugin {
            dist: &dist,
            endpoint: &endpoint,
        },
        cases: Cases::Usual,
        ops: None,
        preload: None,
        name: "table",
    };

    let progress = Progress::new("comparing with ggml's CPU backend");
    let (claims, with_cpu) = compare_with_cpu(&suite(), &progress)?;
    progress.done(&with_cpu.summary());
    let progress = Progress::new("comparing with double precision");
    let of = with_cpu.incomparable_ops();
    let of: Vec<&str> = of.into_iter().collect();
    let of = of.join(",");
    let against = Suite {
        ops: Some(&of),
        preload: Some(Library::Reference.build(cache, &bin)?),
        ..suite()
    };
    let with_reference = compare_with_reference(&against, &with_cpu, &progress)?;
    progress.done(&with_reference.summary());
    executor.stop()?;

    Ok(Findings {
        release: llama::RELEASE.to_owned(),
        claims,
        with_cpu,
        with_reference,
    })
}

/// Returns an error if the table differs from the results of a test with every case.
pub(crate) fn check(cache: &Cache, findings: &Findings) -> Result<String> {
    let text = render(findings, &published(cache)?)?;
    let kept = page()?;
    let differs = kept.lines().zip(text.lines()).find(|(a, b)| a != b);
    if let Some((kept, found)) = differs {
        bail!("it says {kept:?}, found was {found:?}: run `cargo xtask ops-table --last-test`");
    }
    ensure!(
        kept == text,
        "its length is not that of what was found: run `cargo xtask ops-table --last-test`"
    );
    Ok(format!("{} lines", kept.lines().count()))
}

/// The path of the table.
fn path() -> PathBuf {
    workspace::root().join("docs/OPS.md")
}

/// The table as it is.
fn page() -> Result<String> {
    std::fs::read_to_string(path()).with_context(|| format!("reading {}", path().display()))
}

/// ggml's lists of what other backends support.
fn published(cache: &Cache) -> Result<PathBuf> {
    Ok(llama::source(cache)?.join("docs/ops"))
}

/// The whole document. `published` is ggml's folder of lists.
fn render(findings: &Findings, published: &Path) -> Result<String> {
    let others = read_published(published)?;
    let mut ops: BTreeMap<&str, Share> = BTreeMap::new();
    let mut total = Share::default();
    for claim in &findings.claims {
        ops.entry(&claim.op).or_default().add(claim);
        total.add(claim);
    }
    let (cpu, reference) = (findings.with_cpu.by_op(), findings.with_reference.by_op());
    let reference_ok = |op: &str| reference.get(op).map_or(0, |counts| counts.ok);

    let mut text = format!(
        "# Operators\n\n\
         The operators in `test-backend-ops` of ggml {release}, and their support by VGPU0 on the CPU engine.\n\
         `cargo xtask ops-table` generates this page from runs over a Unix socket. `cargo xtask test` fails\n\
         if the page differs from its results.\n\n\
         - **cases**: listed by `test-backend-ops support`. Three cases of MUL_MAT_ID whose weights take\n\
         \x20\x20minutes to quantise are left out; `cargo xtask test --full` runs them.\n\
         - **VGPU0**: percentage of these cases that is supported.\n\
         - **CPU**: cases whose result agrees with ggml's CPU backend.\n\
         - **f64**: cases that ggml's CPU backend cannot compute, and whose result agrees with our reference\n\
         \x20\x20in double precision (`tests/programs/reference.cpp`).\n\
         - `test` runs more cases than `support` lists, so CPU plus f64 can exceed cases. `test` runs\n\
         \x20\x20{run} cases in all, fused operators included.\n\
         - The other columns: percentages that ggml {release} publishes about other backends (`docs/ops/*.csv`\n\
         \x20\x20in llama.cpp; the lists differ in age). The {shown} backends with the most cases are shown.\n\n\
         Several results are correct for floats written to the codebook formats (IQ1, IQ2, IQ3), so these\n\
         have no reference. Tests compare the error of our quantisers with a search through every codebook\n\
         entry, and with ggml's quantising tool.\n\n\
         Not supported by design: `MAP_CUSTOM1` to `MAP_CUSTOM3` and `CUSTOM`, which call functions of the\n\
         guest program by their address.\n\n",
        release = findings.release,
        run = findings.with_cpu.totals().all(),
        shown = others.len(),
    );
    let mut header = String::from("| op | cases | VGPU0 | CPU | f64 |");
    let mut rule = String::from("|---|--:|--:|--:|--:|");
    for other in &others {
        write!(header, " {} |", other.name).context("formatting")?;
        rule.push_str("--:|");
    }
    writeln!(text, "{header}\n{rule}").context("formatting")?;

    let mut row =
        |op: &str, share: &Share, ok: u64, with_f64: u64, of: &dyn Fn(&Other) -> Share| {
            write!(
                text,
                "| {op} | {} | {} | {ok} | {with_f64} |",
                share.listed,
                share.percent()
            )?;
            for other in &others {
                write!(text, " {} |", of(other).percent())?;
            }
            writeln!(text)
        };
    let sum = |report: &BTreeMap<&str, super::report::Counts>| -> u64 {
        let plain = report.iter().filter(|(op, _)| ops.contains_key(*op));
        plain.map(|(_, counts)| counts.ok).sum()
    };
    row("**all**", &total, sum(&cpu), sum(&reference), &|other| {
        other.total
    })
    .context("formatting")?;
    for (&op, share) in &ops {
        let ok = cpu.get(op).map_or(0, |counts| counts.ok);
        let published = |other: &Other| other.ops.get(op).copied().unwrap_or_default();
        row(op, share, ok, reference_ok(op), &published).context("formatting")?;
    }

    text.push_str(
        "\n## Fused operators\n\n\
         Operators that a backend may compute as one. `test-backend-ops test` runs them, and\n\
         `test-backend-ops support` does not list them.\n\n\
         | ops | cases | CPU |\n|---|--:|--:|\n",
    );
    for (op, counts) in cpu.iter().filter(|(op, _)| !ops.contains_key(*op)) {
        writeln!(text, "| {op} | {} | {} |", counts.all(), counts.ok).context("formatting")?;
    }
    text.push_str(&by_version::section()?);
    text.push_str(&by_engine::section()?);
    Ok(text)
}

/// The backends in ggml's folder of lists, ordered by the number of supported cases.
fn read_published(folder: &Path) -> Result<Vec<Other>> {
    let mut others = Vec::new();
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))?;
    for entry in entries {
        let path = entry.context("listing ggml's lists")?.path();
        if path.extension().is_none_or(|e| e != "csv") {
            continue;
        }
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("reading {}", path.display()))?;
        let claims = parse_claims(&text).with_context(|| format!("reading {}", path.display()))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        others.push(Other::new(&name, &claims));
    }
    ensure!(!others.is_empty(), "{} has no lists", folder.display());
    let share = |other: &Other| other.total.supported * 10_000 / other.total.listed.max(1);
    others.sort_by(|a, b| share(b).cmp(&share(a)).then_with(|| a.name.cmp(&b.name)));
    others.truncate(OTHERS);
    Ok(others)
}

#[cfg(test)]
mod tests {
    use super::*;
    use xtask_common::scratch::Scratch;

    fn claim(op: &str, params: &str, supported: bool) -> Claim {
        Claim {
            op: op.to_owned(),
            case: format!("{op}({params})"),
            supported,
        }
    }

    fn report(lines: &[&str]) -> Report {
        let mut report = Report::default();
        for line in lines {
            assert!(report.line(line).is_some(), "{line}");
        }
        report
    }

    #[test]
    fn percentages_round_to_0_or_100_only_if_exact() {
        let percent = |supported, listed| Share { listed, supported }.percent();
        assert_eq!(percent(0, 0), "–");
        assert_eq!(percent(999, 1000), "99");
        assert_eq!(percent(1, 1000), "1");
        assert_eq!((percent(0, 7), percent(7, 7)), ("0".into(), "100".into()));
    }

    /// Writes the files of a test, with one case of TOPK_MOE that fails.
    fn test_files(reports: &Path, is_whole: bool, near_ties: &[&str]) {
        let [with_cpu, with_reference] = run_names(is_whole);
        let write = |name: String, text: &str| std::fs::write(reports.join(name), text).unwrap();
        let list = "op_name,op_params,test_mode,error_message\n\
                    ABS,a,support,yes\nSUM,b,support,yes\n";
        write(log_name(with_cpu, "support"), list);
        let output = "  ABS(a): OK\n  SUM(b): not supported [CPU]\n\
                      ERR = 0.0004 > 0.0000001   TOPK_MOE(c): FAIL\n  1/2 tests passed\n";
        write(log_name(with_cpu, "test"), output);
        let kept = serde_json::json!({ "near_ties": near_ties });
        write(report_name(with_cpu), &kept.to_string());
        let output = "  SUM(b): OK\n  1/1 tests passed\n";
        write(log_name(with_reference, "test"), output);
        write(report_name(with_reference), "{}");
    }

    #[test]
    fn last_test_is_one_with_every_case() {
        const TIE: &str = "ERR = 0.0004 > 0.0000001   TOPK_MOE(c): FAIL; 1 of 50 repeats failed";
        let scratch = Scratch::new().unwrap();
        let reports = scratch.path();
        // A sample, which is the last test of all.
        test_files(reports, false, &[TIE]);
        let error = format!("{:#}", of_last_test(reports).unwrap_err());
        assert!(
            error.contains("which a test with every case leaves"),
            "{error}"
        );
        test_files(reports, true, &[TIE]);
        let findings = of_last_test(reports).unwrap();
        assert_eq!(findings.claims.len(), 2);
        assert_eq!(findings.with_cpu.totals().ok, 2);
        assert_eq!(findings.with_cpu.near_ties(), [TIE]);
        test_files(reports, true, &[]);
        let error = format!("{:#}", of_last_test(reports).unwrap_err());
        assert!(error.contains("1 failed"), "{error}");
        // A reference of an earlier test, which did not compute a case of this one.
        test_files(reports, true, &[TIE]);
        let [_, reference] = run_names(true);
        let log = reports.join(log_name(reference, "test"));
        std::fs::write(log, "  SUM(d): OK\n  1/1 tests passed\n").unwrap();
        let error = format!("{:#}", of_last_test(reports).unwrap_err());
        assert!(error.contains("nothing to be compared with"), "{error}");
    }

    #[test]
    fn ops_and_fused_ops_are_distinguished() {
        let scratch = Scratch::new().unwrap();
        let list =
            "op_name,op_params,test_mode,error_message\nABS,a,support,yes\nABS,b,support,no\n";
        std::fs::write(scratch.path().join("CUDA.csv"), list).unwrap();
        let findings = Findings {
            release: "1.2".to_owned(),
            claims: vec![claim("ABS", "a", true), claim("SUM", "", true)],
            with_cpu: report(&[
                "  ABS(a): OK",
                "  SUM(): not supported [CPU]",
                "  ABS_SUM(): OK",
            ]),
            with_reference: report(&["  SUM(): OK"]),
        };
        let text = render(&findings, scratch.path()).unwrap();
        for line in [
            "| op | cases | VGPU0 | CPU | f64 | CUDA |",
            "| **all** | 2 | 100 | 1 | 1 | 50 |",
            "| ABS | 1 | 100 | 1 | 0 | 50 |",
            "| SUM | 1 | 100 | 0 | 1 | – |",
            "| ABS_SUM | 1 | 1 |",
            "  3 cases in all, fused operators included.",
        ] {
            assert!(text.contains(&format!("\n{line}\n")), "{line} in\n{text}");
        }
    }
}
