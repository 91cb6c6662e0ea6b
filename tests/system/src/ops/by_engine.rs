//! Which nodes of `test-backend-ops` the engine over ggml's CPU backend leaves to the CPU engine.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};

/// How `vgpu dump` begins the list, after the name of the engine.
const LINE: &str = " leaves these nodes of compiled graphs to the engine cpu: ";

/// The nodes of an operator in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Nodes {
    /// Those that the CPU engine computes.
    on_cpu: u64,
    all: u64,
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
    let nodes =
        { left.iter() }.map(|(op, Nodes { on_cpu, all })| format!("{op} {on_cpu} of {all}"));
    let nodes: Vec<String> = nodes.collect();
    format!("nodes on the CPU engine: {}", nodes.join(", "))
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
}
