//! Which nodes of `test-backend-ops` the engine over ggml's CPU backend leaves to the CPU engine,
//! kept in a file that a run is compared with.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Context as _, Result, ensure};

use xtask_common::llama;

/// The file, one row per operator of which a run leaves nodes to the CPU engine. The first line of
/// the file names the columns.
const FILE: &str = "tests/system/ops-by-engine.csv";
const ROWS: &str = include_str!("../../ops-by-engine.csv");

/// How `vgpu dump` begins the list, after the name of the engine.
const LINE: &str = " leaves these nodes of compiled graphs to the engine cpu: ";

/// The runs of the file, by the versions of ggml of the guest and of the host.
const RUNS: [Versions<'static>; 2] = [
    (llama::RELEASE, llama::NEWEST_RELEASE),
    (llama::NEWEST_RELEASE, llama::RELEASE),
];

/// The versions of ggml of a guest and of the host.
pub(crate) type Versions<'a> = (&'a str, &'a str);

/// The nodes of an operator in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Nodes {
    /// Those that the CPU engine computes.
    on_cpu: u64,
    all: u64,
}

impl Nodes {
    /// Whether the parts of the CPU engine differ by at most a hundredth of all nodes.
    fn is_near(self, other: Nodes) -> bool {
        let [own, others] = [self.on_cpu * other.all, other.on_cpu * self.all];
        100 * own.abs_diff(others) <= self.all * other.all
    }

    /// The part of the CPU engine in percent, with one digit behind the point.
    fn percent(self) -> String {
        let tenths = (1000 * self.on_cpu + self.all / 2) / self.all.max(1);
        format!("{}.{} %", tenths / 10, tenths % 10)
    }
}

/// The nodes of each operator of which some are left to the CPU engine.
pub(crate) type Left = BTreeMap<String, Nodes>;

/// What a dump of an executor says of its nodes.
///
/// # Errors
/// If the dump has an entry that is no such list.
pub(crate) fn parse_dump(dump: &str) -> Result<Left> {
    let list = dump.lines().find_map(|line| line.split_once(LINE));
    let Some((_, list)) = list else {
        return Ok(Left::new());
    };
    let entries = list.split(", ").map(|entry| {
        let mut words = entry.split(' ');
        let mut word = || words.next().with_context(|| format!("{entry:?} in a dump"));
        let (op, on_cpu, _, all) = (word()?, word()?, word()?, word()?);
        let nodes = Nodes {
            on_cpu: on_cpu.parse().with_context(|| entry.to_owned())?,
            all: all.parse().with_context(|| entry.to_owned())?,
        };
        Ok((op.to_owned(), nodes))
    });
    entries.collect()
}

/// The list in words.
pub(crate) fn summary(left: &Left) -> String {
    let nodes: u64 = left.values().map(|nodes| nodes.on_cpu).sum();
    format!(
        "the CPU engine computed {nodes} nodes of {} operators",
        left.len()
    )
}

/// Compares a whole run with the file. A case that is repeated has more nodes, so the part of the
/// CPU engine may differ by a hundredth.
///
/// # Errors
/// If the file has other operators, or other parts.
pub(crate) fn check(versions: Versions<'_>, left: &Left) -> Result<()> {
    let kept = parse(ROWS)?.remove(&owned(versions)).unwrap_or_default();
    let ops: BTreeSet<&String> = kept.keys().chain(left.keys()).collect();
    let differs = |op: &&String| match (kept.get(*op), left.get(*op)) {
        (Some(kept), Some(found)) => !kept.is_near(*found),
        _ => true,
    };
    let other: Vec<&str> = { ops.into_iter() }
        .filter(differs)
        .map(String::as_str)
        .collect();
    let (guest, host) = versions;
    let mut rows = String::new();
    for (op, Nodes { on_cpu, all }) in left {
        writeln!(rows, "{guest},{host},{op},{on_cpu},{all}").context("formatting")?;
    }
    ensure!(
        other.is_empty(),
        "{FILE} has other parts of a guest with ggml {guest} over ggml {host}, for {other:?}. \
         Correct the file, then run `cargo xtask ops-table --by-version`. The run gives:\n{rows}"
    );
    Ok(())
}

fn owned((guest, host): Versions<'_>) -> (String, String) {
    (guest.to_owned(), host.to_owned())
}

/// The rows of the file, by the versions of guest and host.
fn parse(text: &str) -> Result<BTreeMap<(String, String), Left>> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let mut all: BTreeMap<(String, String), Left> = BTreeMap::new();
    for record in reader.records() {
        let record = record.with_context(|| format!("reading {FILE}"))?;
        let field = |column: usize| record.get(column).context("a row is short");
        let number = |column: usize| -> Result<u64> {
            let field = field(column)?;
            { field.parse() }.with_context(|| format!("{FILE}: {field:?} is no number"))
        };
        let nodes = Nodes {
            on_cpu: number(3)?,
            all: number(4)?,
        };
        let left = all.entry(owned((field(0)?, field(1)?))).or_default();
        left.insert(field(2)?.to_owned(), nodes);
    }
    Ok(all)
}

/// The section of `docs/OPS.md`.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn section() -> Result<String> {
    let runs = RUNS;
    let (release, newest) = runs[0];
    let kept = parse(ROWS)?;
    let none = Left::new();
    let of = |versions| kept.get(&owned(versions)).unwrap_or(&none);
    let mut text = format!(
        "\n## On ggml's CPU backend\n\n\
         `vgpu serve --engine ggml:libggml-cpu.so` computes what this backend supports on it, and\n\
         other nodes on the CPU engine ([ggml-engine.md](ggml-engine.md#what-runs-where)). With the\n\
         cases above, of a guest with another version of ggml than the host, no case was\n\
         unsupported and none failed, as above. The CPU engine computed these parts of the nodes\n\
         of an operator; it computed none of the other operators.\n\n\
         `cargo xtask test --only ops --full` repeats the runs and fails if a part differs by more\n\
         than a hundredth.\n\n\
         | op | guest {release}, host {newest} | guest {newest}, host {release} |\n|---|--:|--:|\n"
    );
    let ops: BTreeSet<&String> = { runs.into_iter() }
        .flat_map(|run| of(run).keys())
        .collect();
    for op in ops {
        let cell = |run| match of(run).get(op) {
            Some(nodes) => nodes.percent(),
            None => "0 %".to_owned(),
        };
        let cells = runs.map(cell).join(" | ");
        writeln!(text, "| {op} | {cells} |").context("formatting")?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dump_lists_the_nodes_of_the_cpu_engine() {
        let dump =
            format!("engine ggml:CPU: a CPU; answers calls\nggml:CPU{LINE}ABS 3 of 20, X 1 of 1\n");
        let left = parse_dump(&dump).unwrap();
        let nodes = |on_cpu, all| Nodes { on_cpu, all };
        let expected = [("ABS", nodes(3, 20)), ("X", nodes(1, 1))];
        assert_eq!(left, Left::from(expected.map(|(op, n)| (op.to_owned(), n))));
        assert!(parse_dump("engine cpu: a CPU\n").unwrap().is_empty());
        assert!(parse_dump(&format!("a{LINE}ABS 3 of")).is_err());
        assert!(parse_dump(&format!("a{LINE}ABS 3 of x")).is_err());
    }

    /// What `vgpu dump` prints (`host-executor/src/server/status.rs: left_to_the_cpu`).
    #[test]
    fn line_is_that_of_the_executor() {
        let own = include_str!("../../../../host-executor/src/server/status.rs");
        assert!(own.contains(&format!("{{name}}{LINE}{{left}}")));
    }

    #[test]
    fn runs_with_other_parts_are_an_error() {
        let kept = parse(ROWS).unwrap();
        for ((guest, host), left) in &kept {
            check((guest, host), left).unwrap();
            let mut other = left.clone();
            let (op, nodes) = other.pop_first().expect("a row");
            check((guest, host), &other).unwrap_err();
            let on_cpu = match nodes.on_cpu > nodes.all / 2 {
                true => nodes.on_cpu - nodes.all / 20 - 1,
                false => nodes.on_cpu + nodes.all / 20 + 1,
            };
            other.insert(op, Nodes { on_cpu, ..nodes });
            let error = check((guest, host), &other).unwrap_err().to_string();
            assert!(
                error.contains(&format!(",{on_cpu},{}\n", nodes.all)),
                "{error}"
            );
        }
        assert!(kept.keys().eq(BTreeSet::from(RUNS.map(owned)).iter()));
    }
}
