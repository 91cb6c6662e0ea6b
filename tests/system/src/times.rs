//! The time of each part.

use std::fmt;
use std::time::{Duration, Instant};

use xtask_common::compiler_cache;

use crate::test_run::Part;

/// Clock ticks of proc(5) in a second, on every architecture that Linux has today.
const TICKS: u64 = 100;

/// The table of parts and minutes.
#[derive(Debug)]
pub(crate) struct Times {
    rows: Vec<Row>,
    begun: Instant,
}

impl Default for Times {
    fn default() -> Times {
        Times {
            rows: Vec::new(),
            begun: Instant::now(),
        }
    }
}

#[derive(Debug)]
struct Row {
    part: String,
    passed: u64,
    failed: usize,
    took: Duration,
    /// The CPU time of all processes that were started. `None`: another part ran beside it.
    cpu: Option<Duration>,
}

/// The state when a part began.
#[derive(Debug)]
pub(crate) struct PartStart {
    at: Instant,
    cpu: Duration,
    passed: u64,
    failed: usize,
}

impl Times {
    /// Records the time and the results before a part.
    pub(crate) fn begin(&self, passed: u64, failed: usize) -> PartStart {
        PartStart {
            at: Instant::now(),
            cpu: processor_time(),
            passed,
            failed,
        }
    }

    /// Adds the row of a part that has ended.
    pub(crate) fn end(&mut self, part: Part, begun: &PartStart, passed: u64, failed: usize) {
        self.rows.push(Row {
            part: part.name(),
            passed: passed - begun.passed,
            failed: failed - begun.failed,
            took: begun.at.elapsed(),
            cpu: Some(processor_time().saturating_sub(begun.cpu)),
        });
    }

    /// Adds the rows of parts that have run beside others.
    pub(crate) fn beside_others(&mut self, others: Times) {
        let rows = others.rows.into_iter();
        self.rows.extend(rows.map(|row| Row { cpu: None, ..row }));
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let minutes = |time: Duration| time.as_secs_f64() / 60.0;
        let heads = ["passed", "failed", "minutes", "CPU minutes"];
        writeln!(
            f,
            "{:<14} {:>7} {:>7} {:>8} {:>12}",
            "part", heads[0], heads[1], heads[2], heads[3]
        )?;
        let mut line = |name: &str, passed: u64, failed: usize, took, cpu: Option<Duration>| {
            let took = minutes(took);
            let cpu = cpu.map_or_else(|| "*".to_owned(), |cpu| format!("{:.1}", minutes(cpu)));
            writeln!(
                f,
                "{name:<14} {passed:>7} {failed:>7} {took:>8.1} {cpu:>12}"
            )
        };
        let rows = &self.rows;
        for row in rows {
            line(&row.part, row.passed, row.failed, row.took, row.cpu)?;
        }
        line(
            "all",
            rows.iter().map(|row| row.passed).sum(),
            rows.iter().map(|row| row.failed).sum(),
            self.begun.elapsed(),
            Some(processor_time()),
        )?;
        match rows.iter().any(|row| row.cpu.is_none()) {
            true => writeln!(f, "* ran at the same time as other parts"),
            false => Ok(()),
        }
    }
}

/// The CPU time of this process, of the children that it has waited for, and of the compilers that
/// the compiler cache has started. What is unknown counts as zero.
fn processor_time() -> Duration {
    let of = |process: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        ticks(&stat).unwrap_or(0)
    };
    let server = compiler_cache::server().map_or(0, |server| of(&server.to_string()));
    Duration::from_millis((of("self") + server) * 1000 / TICKS)
}

/// The sum of the fields 14 to 17 of proc(5)'s `stat`.
fn ticks(stat: &str) -> Option<u64> {
    // The second field is a name in parentheses, which can hold anything.
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields = rest.split(' ').skip(11).take(4);
    fields.map(|field| field.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_children_count() {
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 100 20 3000 400 20 0 1";
        assert_eq!(ticks(stat), Some(3520));
        assert_eq!(ticks("nothing"), None);
    }

    #[test]
    fn table_has_one_row_per_part_and_a_total() {
        let mut times = Times::default();
        for part in [Part::Unit, Part::Ops] {
            let begun = times.begin(1, 0);
            times.end(part, &begun, 4, 1);
        }
        let table = times.to_string();
        let all = table.lines().find(|line| line.starts_with("all")).unwrap();
        let figures: Vec<&str> = all.split_whitespace().skip(1).take(2).collect();
        assert_eq!(figures, ["6", "2"], "{table}");
        assert!(
            table.starts_with("part ") && table.contains("\nops "),
            "{table}"
        );
    }
}
