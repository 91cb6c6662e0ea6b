//! ggml's own `test-backend-ops` on VGPU0: lists and runs of its cases.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use anyhow::{Context as _, Result, ensure};

use crate::preload;
use vgpu_gguf::Rng;
use xtask_common::node_llama::{self, Backend};
use xtask_common::process;
use xtask_common::progress::Progress;
use xtask_common::workspace;

use super::report::{DEVICE, Report};

/// How often a case that may be a near tie is repeated with new random values, and how many of the
/// repeats may fail. A case of TOPK_MOE has a near tie in less than one of 1000 runs.
pub(super) const NEAR_TIE_REPEATS: u64 = 50;
pub(super) const NEAR_TIE_FAILURES: u64 = 1;
/// How many near ties one run may have. Of the 416 cases in a whole run, 0.4 have one at most.
const MAX_NEAR_TIES: usize = 2;
/// The status of `test-backend-ops` if a case has failed.
const SOME_CASE_FAILED: i32 = 1;

/// The start of each log line of the plugin.
const LOG_PREFIX: &str = "ggml-vgpu:";

/// The parameters of three cases whose random weights take five minutes each to quantise.
const GIANTS: &str = "n_mats=128,n_used=4,b=0,m=4096";

/// Cases of a suite: what the option `-p` of `test-backend-ops` selects by their parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cases {
    /// All but the giants.
    Usual,
    /// The three cases that take minutes each.
    Giants,
    /// The cases whose parameters this regular expression matches.
    Matching(String),
}

impl Cases {
    /// The regular expression, in the ECMAScript syntax of C++.
    pub(crate) fn pattern(&self) -> String {
        match self {
            Cases::Usual => format!("^(?!.*{GIANTS})"),
            Cases::Giants => format!("^.*{GIANTS}"),
            Cases::Matching(pattern) => pattern.clone(),
        }
    }
}

/// Families of cases that differ in little but a type and take most of a run's time: what the
/// parameters before the type and after it contain.
const FAMILIES: [(&str, &str); 3] = [
    // FLASH_ATTN_EXT: the type of the keys.
    ("hsk=.*type_K=", ","),
    // MUL_MAT_ID and MUL_MAT_ID_FUSION: the type of the weights.
    ("type_a=", ",.*n_mats="),
    // MUL_MAT_VEC_FUSION: the type of the weights.
    ("type=", ",glu_op="),
];

/// The usual cases, of each family only those with the types of `keep`.
pub(crate) fn of_types(keep: &[String]) -> Cases {
    let keep = keep.join("|");
    let others = FAMILIES.map(|(before, after)| format!("(?!{before}(?!(?:{keep}),)[^,]*{after})"));
    Cases::Matching(format!("^(?!.*{GIANTS}){}", others.concat()))
}

/// A `test-backend-ops` and how to run it.
#[derive(Debug)]
pub(crate) struct Suite<'a> {
    /// The folder of the program.
    pub(crate) bin: &'a Path,
    pub(crate) backend: Backend<'a>,
    /// Only these ops, separated by commas.
    pub(crate) ops: Option<&'a str>,
    pub(crate) cases: Cases,
    /// A library to preload: [`preload::Library`].
    pub(crate) preload: Option<PathBuf>,
    /// For the names of logs and statistics.
    pub(crate) name: &'a str,
}

/// One line of the list: a case, and whether the device claims to support it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) op: String,
    /// `OP(parameters)`.
    pub(crate) case: String,
    pub(crate) supported: bool,
}

impl<'a> Suite<'a> {
    /// The usual cases of the program in the folder `bin`, of all operators or of `ops`, on ggml's
    /// CPU backend. `name` is for the names of logs and reports.
    pub(crate) fn new(bin: &'a Path, ops: Option<&'a str>, name: &'a str) -> Suite<'a> {
        Suite {
            bin,
            backend: Backend::Cpu,
            ops,
            cases: Cases::Usual,
            preload: None,
            name,
        }
    }
}

impl Suite<'_> {
    fn command(&self, mode: &str) -> Command {
        let mut program = Command::new(self.bin.join("test-backend-ops"));
        program.args([mode, "-b", DEVICE, "-p", &self.cases.pattern()]);
        if let Some(ops) = self.ops {
            program.args(["-o", ops]);
        }
        let stats = workspace::reports().join(format!("test-backend-ops-{}.stats.json", self.name));
        node_llama::set_backend(&mut program, &self.backend, &stats);
        // The plugin's messages (a session, a case of more than 10 s) would split lines of the
        // program. `log_lines` counts them.
        program.env("VGPU_LOG", "error");
        if let Some(library) = &self.preload {
            preload::set(&mut program, library);
        }
        program
    }

    /// Every case without fusion, and whether the device claims it.
    pub(crate) fn claims(&self) -> Result<Vec<Claim>> {
        let mut program = self.command("support");
        let listing = process::output(program.args(["--output", "csv"]))?;
        std::fs::write(log(self.name, "support"), &listing).context("keeping the list")?;
        let claims = parse_claims(&listing)?;
        ensure!(
            !claims.is_empty(),
            "test-backend-ops lists no case for {DEVICE}"
        );
        Ok(claims)
    }

    /// Runs every case, and accepts failures.
    pub(crate) fn run(&self, progress: &Progress) -> Result<(Report, ExitStatus)> {
        let mut program = self.command("test");
        program.args(["-j", &workspace::cores().to_string()]);
        let (report, status) = run(&mut program, self.name, progress)?;
        ensure!(
            status.success() || status.code() == Some(SOME_CASE_FAILED),
            "it ended with {status}\n{}",
            process::tail(&log(self.name, "test"))
        );
        Ok((report, status))
    }

    /// Runs every case.
    pub(crate) fn test(&self, progress: &Progress) -> Result<Report> {
        let (mut report, status) = self.run(progress)?;
        let log = log(self.name, "test");
        let possible = report.possible_near_ties();
        let few = possible.len() <= MAX_NEAR_TIES;
        for case in possible.into_iter().filter(|_| few) {
            let failed = self.repeat(&case, progress)?;
            if failed <= NEAR_TIE_FAILURES {
                let repeats = format!("{failed} of {NEAR_TIE_REPEATS} repeats failed");
                report.accept_near_tie(&case, &repeats);
            }
        }
        let path = workspace::reports().join(report_name(self.name));
        let text = serde_json::to_string_pretty(&report.to_json()).context("writing a report")?;
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        report.check()?;
        ensure!(
            match report.near_ties() {
                [] => status.success(),
                _ => status.code() == Some(SOME_CASE_FAILED),
            },
            "it ended with {status}\n{}",
            process::tail(&log)
        );
        Ok(report)
    }

    /// Runs every case with the plugin's log at `level`. Returns the number of cases, and the lines
    /// of the plugin.
    pub(crate) fn log_lines(&self, level: &str) -> Result<(u64, Vec<String>)> {
        let (mut report, mut lines) = (Report::default(), Vec::new());
        let mut program = self.command("test");
        let status = process::run_lines(
            program.env("VGPU_LOG", level),
            &log(self.name, "test"),
            |line| match line.find(LOG_PREFIX) {
                Some(at) => lines.push(line[at..].to_owned()),
                None => drop(report.line(line)),
            },
        )?;
        ensure!(status.success(), "it ended with {status}");
        Ok((report.totals().all(), lines))
    }

    /// Runs one case [`NEAR_TIE_REPEATS`] times, each with new random values. Returns the number of
    /// runs that did not pass.
    fn repeat(&self, case: &str, progress: &Progress) -> Result<u64> {
        let (op, parameters) = { case.strip_suffix(')') }
            .and_then(|case| case.split_once('('))
            .with_context(|| format!("{case} has no parameters"))?;
        let name = format!("{}-repeat", self.name);
        let suite = Suite {
            bin: self.bin,
            backend: self.backend.clone(),
            ops: Some(op),
            cases: Cases::Matching(format!("^{}$", escape(parameters))),
            preload: self.preload.clone(),
            name: &name,
        };
        let mut failed = 0;
        for repeat in 0..NEAR_TIE_REPEATS {
            progress.note(&format!("repeat {repeat} of {case}: {failed} failed"));
            let mut report = Report::default();
            let mut program = suite.command("test");
            let status = process::run_lines(&mut program, &log(&name, "test"), |line| {
                report.line(line);
            })?;
            ensure!(
                status.success() || status.code() == Some(SOME_CASE_FAILED),
                "a repeat of {case} ended with {status}"
            );
            failed += u64::from(report.passed(case) == 0 || report.totals().failed > 0);
        }
        Ok(failed)
    }
}

/// Runs the cases that `program`, a `test-backend-ops`, is told to, however it ends. `name` is for
/// the log.
pub(crate) fn run(
    program: &mut Command,
    name: &str,
    progress: &Progress,
) -> Result<(Report, ExitStatus)> {
    let mut report = Report::default();
    let status = process::run_lines(program, &log(name, "test"), |line| {
        if let Some(case) = report.line(line) {
            progress.note(&format!("{}; {case}", report.summary()));
        }
    })?;
    Ok((report, status))
}

/// Draws `count` of the types that the listed cases of [`FAMILIES`] have.
pub(crate) fn draw_types(claims: &[Claim], count: usize, rng: &mut Rng) -> Vec<String> {
    let mut types: Vec<String> = { claims.iter() }
        .filter_map(|claim| match claim.op.as_str() {
            "FLASH_ATTN_EXT" => parameter(&claim.case, "type_K="),
            "MUL_MAT_ID" => parameter(&claim.case, "type_a="),
            _ => None,
        })
        .map(str::to_owned)
        .collect();
    types.sort_unstable();
    types.dedup();
    draw(&mut types, count, rng);
    types
}

/// Leaves `count` elements, each as likely as any other.
pub(crate) fn draw<T>(from: &mut Vec<T>, count: usize, rng: &mut Rng) {
    let count = count.min(from.len());
    for drawn in 0..count {
        // The remainder's bias is one in 2^64 / length.
        let left = (from.len() - drawn) as u64;
        from.swap(drawn, drawn + (rng.next_u64() % left) as usize);
    }
    from.truncate(count);
}

/// The value of the parameter whose name and equals sign are `name`.
fn parameter<'a>(case: &'a str, name: &str) -> Option<&'a str> {
    let value = case.split_once(name)?.1;
    value.split([',', ')']).next()
}

/// Operators whose nodes differ between releases of ggml and that have few cases: DeepSeek-V4.
/// Every sample has all of their cases.
const ALWAYS: [&str; 3] = ["DSV4_HC_COMB", "DSV4_HC_PRE", "DSV4_HC_POST"];

/// Draws `count` of the listed cases, and adds those of [`ALWAYS`]. The sample also has the cases
/// of other ops with the same parameters.
pub(crate) fn sample(claims: &[Claim], count: usize, rng: &mut Rng) -> Cases {
    let parameters = |of: &dyn Fn(&Claim) -> bool| {
        let mut parameters: Vec<&str> = { claims.iter() }
            .filter(|claim| of(claim))
            .filter_map(|claim| claim.case.split_once('(')?.1.strip_suffix(')'))
            .collect();
        parameters.sort_unstable();
        parameters.dedup();
        parameters
    };
    let always = parameters(&|claim| ALWAYS.contains(&claim.op.as_str()));
    let mut drawn = parameters(&|_| true);
    draw(&mut drawn, count, rng);
    let more = always.iter().filter(|one| !drawn.contains(one));
    let escaped: Vec<String> = drawn.iter().chain(more).map(|text| escape(text)).collect();
    Cases::Matching(format!("^(?:{})$", escaped.join("|")))
}

/// Draws `count` of the listed cases of each operator, or all if there are fewer. A case whose
/// parameters are drawn for another operator counts.
pub(crate) fn sample_each(claims: &[Claim], count: usize, rng: &mut Rng) -> Cases {
    let mut of_ops: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for claim in claims {
        let parameters =
            { claim.case.split_once('(') }.and_then(|(_, rest)| rest.strip_suffix(')'));
        of_ops.entry(&claim.op).or_default().extend(parameters);
    }
    let mut drawn: Vec<&str> = Vec::new();
    for mut parameters in of_ops.into_values() {
        parameters.sort_unstable();
        parameters.dedup();
        let (there, mut others): (Vec<&str>, Vec<&str>) =
            parameters.into_iter().partition(|one| drawn.contains(one));
        draw(&mut others, count.saturating_sub(there.len()), rng);
        drawn.extend(others);
    }
    let escaped: Vec<String> = drawn.into_iter().map(escape).collect();
    Cases::Matching(format!("^(?:{})$", escaped.join("|")))
}

/// A regular expression that matches exactly this text.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        if !(letter.is_ascii_alphanumeric() || matches!(letter, '_' | ',' | '=' | ' ')) {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

/// The file for the program's output.
fn log(run: &str, mode: &str) -> PathBuf {
    workspace::reports().join(log_name(run, mode))
}

/// The name of the file for the program's output.
pub(super) fn log_name(run: &str, mode: &str) -> String {
    format!("test-backend-ops-{run}-{mode}.log")
}

/// The name of the file for the report of a run.
pub(super) fn report_name(run: &str) -> String {
    format!("test-backend-ops-{run}.json")
}

/// Reads the output of `test-backend-ops support --output csv`, or a file of the same format that
/// ggml publishes.
pub(super) fn parse_claims(csv: &str) -> Result<Vec<Claim>> {
    let mut reader = csv::Reader::from_reader(csv.as_bytes());
    let header = reader.headers().context("reading a list's header")?.clone();
    let column = |name: &str| {
        header
            .iter()
            .position(|h| h == name)
            .with_context(|| format!("the list has no column {name}"))
    };
    let (op, params) = (column("op_name")?, column("op_params")?);
    let (mode, answer) = (column("test_mode")?, column("error_message")?);
    let mut claims = Vec::new();
    for record in reader.records() {
        let record = record.context("reading a list")?;
        if &record[mode] == "support" {
            claims.push(Claim {
                op: record[op].to_owned(),
                case: format!("{}({})", &record[op], &record[params]),
                supported: &record[answer] == "yes",
            });
        }
    }
    Ok(claims)
}

/// The cases that differ between the list and the run. Fused ops are only in the run.
pub(crate) fn disagreements(claims: &[Claim], report: &Report) -> Vec<String> {
    // Some cases occur more than once.
    let mut listed: BTreeMap<&str, [u64; 2]> = BTreeMap::new();
    for claim in claims {
        listed.entry(&claim.case).or_default()[usize::from(claim.supported)] += 1;
    }
    let run = report.by_case();
    let mut found = Vec::new();
    for (case, [denied, claimed]) in listed {
        let (ran_denied, ran) = run.get(case).copied().unwrap_or_default();
        if ran_denied != denied || ran < claimed {
            found.push(format!(
                "{case}: listed {claimed} times as supported and {denied} times as not, run {ran} times \
                 and denied {ran_denied} times"
            ));
        }
    }
    found
}

/// Lists and runs all cases. Each must be supported, and agree with ggml's CPU backend if that
/// supports it.
pub(crate) fn compare_with_cpu(
    suite: &Suite<'_>,
    progress: &Progress,
) -> Result<(Vec<Claim>, Report)> {
    let claims = suite.claims()?;
    let denied = claims.iter().filter(|claim| !claim.supported);
    none(
        "are listed as not supported",
        &denied.map(|claim| claim.case.as_str()).collect::<Vec<_>>(),
    )?;
    let report = suite.test(progress)?;
    none(&format!("are not supported [{DEVICE}"), &report.denied())?;
    none(
        "are listed one way and run another",
        &disagreements(&claims, &report),
    )?;
    Ok((claims, report))
}

/// Compares the cases that ggml's CPU backend does not support with the reference in double
/// precision. `suite` preloads the reference. `with_cpu` is the report of the same cases without
/// it.
pub(crate) fn compare_with_reference(
    suite: &Suite<'_>,
    with_cpu: &Report,
    progress: &Progress,
) -> Result<Report> {
    let report = suite.test(progress)?;
    none(&format!("are not supported [{DEVICE}"), &report.denied())?;
    proves_the_rest(&report, with_cpu)?;
    Ok(report)
}

/// Returns an error if the reference has not computed a case that ggml's CPU backend cannot.
pub(super) fn proves_the_rest(with_reference: &Report, with_cpu: &Report) -> Result<()> {
    let unproven: Vec<&str> = with_cpu
        .incomparable()
        .filter(|&(case, times)| with_reference.passed(case) < times && !writes_codebook(case))
        .map(|(case, _)| case)
        .collect();
    none("have nothing to be compared with", &unproven)
}

/// Whether the case writes floats to a codebook format. Many results are correct, and the kernels'
/// own tests check the errors.
fn writes_codebook(case: &str) -> bool {
    let (from, to) = (parameter(case, "type_src="), parameter(case, "type_dst="));
    let codebook = |ty: &str| {
        ["iq1_", "iq2_", "iq3_"]
            .iter()
            .any(|prefix| ty.starts_with(prefix))
    };
    from != to && to.is_some_and(codebook)
}

pub(super) fn none(what: &str, cases: &[impl AsRef<str>]) -> Result<()> {
    let shown: Vec<&str> = cases.iter().take(10).map(AsRef::as_ref).collect();
    ensure!(
        cases.is_empty(),
        "{} cases {what}; the first:\n    {}",
        cases.len(),
        shown.join("\n    ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_depends_on_the_seed_and_contains_whole_cases() {
        let claims: Vec<Claim> = (0..100)
            .map(|n| Claim {
                op: "ADD".into(),
                case: format!("ADD(type=f32,ne=[{n},1.5])"),
                supported: true,
            })
            .collect();
        let draw = |seed| sample(&claims, 7, &mut Rng::new(seed, 0)).pattern();
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        let drawn = draw(1);
        let cases = drawn.strip_prefix("^(?:").unwrap();
        let cases: Vec<String> = { cases.strip_suffix(")$").unwrap().split('|') }
            .map(|case| format!("ADD({})", case.replace('\\', "")))
            .collect();
        let different: std::collections::BTreeSet<_> = cases.iter().collect();
        assert_eq!(different.len(), 7);
        assert!(
            different
                .iter()
                .all(|case| claims.iter().any(|claim| claim.case == **case))
        );
        assert!(draw(1).contains("ne=\\["), "{}", draw(1));
        let mut with_deepseek = claims.clone();
        with_deepseek.push(Claim {
            op: "DSV4_HC_PRE".into(),
            case: "DSV4_HC_PRE(n_embd=31,n_tokens=17)".into(),
            supported: true,
        });
        for seed in 0..20 {
            let pattern = sample(&with_deepseek, 7, &mut Rng::new(seed, 0)).pattern();
            assert!(pattern.contains("n_embd=31,n_tokens=17"), "{pattern}");
        }
        assert_eq!(
            sample(&claims, 1000, &mut Rng::new(1, 0))
                .pattern()
                .split('|')
                .count(),
            100
        );
    }

    #[test]
    fn types_are_drawn_from_the_families_that_have_them() {
        let claim = |op: &str, case: &str| Claim {
            op: op.into(),
            case: format!("{op}({case})"),
            supported: true,
        };
        let claims = [
            claim("MUL_MAT_ID", "type_a=q4_K,type_b=f32,n_mats=4"),
            claim("MUL_MAT_ID", "type_a=q4_K,type_b=f32,n_mats=8"),
            claim("FLASH_ATTN_EXT", "hsk=64,type_K=q5_1,type_V=f16"),
            claim("ADD", "type=f16,ne=[1,1,1,1]"),
        ];
        let draw = |count| draw_types(&claims, count, &mut Rng::new(3, 1));
        let mut all = draw(9);
        all.sort();
        assert_eq!(all, ["q4_K", "q5_1"]);
        assert_eq!(draw(1).len(), 1);
        assert_eq!(draw(1), draw(1));
        let cases = of_types(&["f16".to_owned(), "q4_K".to_owned()]);
        let excludes = "(?!type_a=(?!(?:f16|q4_K),)[^,]*,.*n_mats=)";
        assert!(cases.pattern().contains(excludes), "{cases:?}");
        assert!(cases.pattern().starts_with("^(?!"), "{cases:?}");
    }

    /// A `test-backend-ops` with `cases` cases of `op` that fail with `status` if the number of
    /// earlier runs is one of `fails`, a list of patterns of the shell.
    fn program(folder: &Path, op: &str, cases: u64, (fails, status): (&str, i32)) {
        let each = |text: &str, end: &str| -> String {
            let lines = (0..cases).map(|case| format!("echo '{text}  {op}(ne=[{case}]): {end}'\n"));
            lines.collect()
        };
        let script = format!(
            "#!/bin/sh\n\
             runs=$(cat \"$0.runs\" 2>/dev/null || echo 0)\n\
             echo $((runs + 1)) > \"$0.runs\"\n\
             case $runs in\n\
             {fails}) {}echo '  0/{cases} tests passed'; exit {status};;\n\
             *) {}echo '  {cases}/{cases} tests passed';;\n\
             esac\n",
            each("[VIEW] ERR = 0.0004 > 0.0000001 ", "FAIL"),
            each("", "OK"),
        );
        // Another process writes the program: a child that another test forks meanwhile would keep
        // a descriptor for writing, with which the program cannot be started.
        let source = folder.join("source");
        std::fs::write(&source, script).unwrap();
        let mut install = Command::new("install");
        install.args(["-m", "755"]).arg(&source);
        let installed = install.arg(folder.join("test-backend-ops")).status();
        assert!(installed.unwrap().success());
    }

    fn run(op: &str, fails: &str) -> Result<Report> {
        run_cases(op, 1, (fails, 1))
    }

    fn run_cases(op: &str, cases: u64, fails: (&str, i32)) -> Result<Report> {
        let folder = tempfile::tempdir().unwrap();
        program(folder.path(), op, cases, fails);
        std::fs::create_dir_all(workspace::reports()).unwrap();
        let name = format!("near-tie-{op}-{cases}-{}-{}", fails.0.len(), fails.1);
        let suite = Suite {
            bin: folder.path(),
            backend: Backend::Cpu,
            ops: None,
            cases: Cases::Usual,
            preload: None,
            name: &name,
        };
        suite.test(&Progress::new("near ties"))
    }

    #[test]
    fn near_tie_is_accepted_if_its_case_passes_with_other_values() {
        let report = run("TOPK_MOE", "0|17").unwrap();
        assert_eq!((report.totals().ok, report.totals().failed), (1, 0));
        let [tie] = report.near_ties() else {
            panic!("{report:?}")
        };
        assert!(tie.contains("ERR = 0.0004"), "{tie}");
        assert!(tie.ends_with("1 of 50 repeats failed"), "{tie}");
        assert!(run("TOPK_MOE", "none").unwrap().near_ties().is_empty());
    }

    #[test]
    fn failure_that_is_no_near_tie_is_an_error() {
        for (op, fails) in [("TOPK_MOE", "0|5|49"), ("TOPK_MOE", "*"), ("ARGSORT", "0")] {
            let error = run(op, fails).unwrap_err().to_string();
            assert!(error.contains("0 ok, 1 failed"), "{error}");
        }
        // More of them than near ties explain, and a program that crashes.
        let error = run_cases("TOPK_MOE", 3, ("0", 1)).unwrap_err().to_string();
        assert!(error.contains("0 ok, 3 failed"), "{error}");
        let error = run_cases("TOPK_MOE", 1, ("0", 139))
            .unwrap_err()
            .to_string();
        assert!(error.contains("ended with"), "{error}");
    }

    const LIST: &str = "\
\"backend_name\",\"op_name\",\"op_params\",\"test_mode\",\"supported\",\"error_message\",\"backend_reg_name\"
\"VGPU0\",\"ABS\",\"type=f16,ne_a=[128,2,2,2],v=0\",\"support\",\"1\",\"yes\",\"VGPU\"
\"VGPU0\",\"SUM\",\"type=f32\",\"support\",\"0\",\"no\",\"VGPU\"
\"VGPU0\",\"SUM\",\"type=f32\",\"support\",\"1\",\"yes\",\"VGPU\"
";

    #[test]
    fn writes_to_codebook_types_are_detected() {
        assert!(writes_codebook(
            "CPY(type_src=f16,type_dst=iq2_xxs,ne_src=[256,4,4,4])"
        ));
        assert!(writes_codebook("SET_ROWS(type_src=f32,type_dst=iq1_m)"));
        assert!(!writes_codebook(
            "CPY(type_src=iq2_s,type_dst=iq2_s,ne_src=[256,4,4,4])"
        ));
        assert!(!writes_codebook(
            "CPY(type_src=f32,type_dst=iq4_nl,ne_src=[256,4,4,4])"
        ));
        assert!(!writes_codebook("OUT_PROD(type_a=iq2_xxs,type_b=f16)"));
    }

    #[test]
    fn a_sample_has_cases_of_each_operator() {
        let claim = |op: &str, parameters: &str| Claim {
            op: op.to_owned(),
            case: format!("{op}({parameters})"),
            supported: true,
        };
        let mut claims = vec![
            claim("ABS", "v=0"),
            claim("NEG", "v=0"),
            claim("SUM", "n=7"),
        ];
        claims.extend((0..50).map(|m| claim("MUL_MAT", &format!("m={m}"))));
        let Cases::Matching(pattern) = sample_each(&claims, 2, &mut Rng::new(1, 1)) else {
            panic!("a sample is a pattern");
        };
        let inner = pattern
            .strip_prefix("^(?:")
            .and_then(|rest| rest.strip_suffix(")$"));
        let drawn: Vec<&str> = inner.expect("alternatives").split('|').collect();
        assert_eq!(drawn.len(), 4, "{pattern}");
        assert!(
            drawn.contains(&"v=0") && drawn.contains(&"n=7"),
            "{pattern}"
        );
        // The same seed, the same sample.
        let again = sample_each(&claims, 2, &mut Rng::new(1, 1));
        assert_eq!(again, Cases::Matching(pattern));
    }

    #[test]
    fn case_list_is_parsed() {
        let claims = parse_claims(LIST).unwrap();
        assert_eq!(claims.len(), 3);
        assert_eq!(claims[0].case, "ABS(type=f16,ne_a=[128,2,2,2],v=0)");
        assert!(claims[0].supported && !claims[1].supported);
        assert!(parse_claims("a,b\n1,2\n").is_err());
    }

    #[test]
    fn case_list_and_run_are_compared() {
        let claims = parse_claims(LIST).unwrap();
        let mut report = Report::default();
        for line in [
            "  ABS(type=f16,ne_a=[128,2,2,2],v=0): OK",
            "  SUM(type=f32): not supported [CPU] ",
            "  SUM(type=f32): not supported [VGPU0] ",
            "  FUSED(type=f32): OK",
        ] {
            assert!(report.line(line).is_some());
        }
        assert_eq!(disagreements(&claims, &report), [""; 0]);
        report.line("  SUM(type=f32): not supported [VGPU0, CPU] ");
        let found = disagreements(&claims, &report);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("SUM(type=f32): listed 1"), "{found:?}");
        assert_eq!(disagreements(&claims, &Report::default()).len(), 2);
    }
}
