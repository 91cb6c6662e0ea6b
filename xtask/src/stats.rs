//! What the plugin counted at the boundary: the file it writes where `VGPU_STATS` says.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Traffic of a number of graph submissions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Nodes computed, without views.
    pub(crate) nodes: u64,
    /// Messages in both directions.
    pub(crate) messages: u64,
    pub(crate) bytes_to_host: u64,
    pub(crate) bytes_from_host: u64,
    /// Times the guest stood still until the host had answered.
    pub(crate) round_trips: u64,
}

impl Traffic {
    fn parse(value: &Value) -> Result<Traffic> {
        Ok(Traffic {
            nodes: number(value, "nodes")?,
            messages: number(value, "messages")?,
            bytes_to_host: number(value, "bytes_to_host")?,
            bytes_from_host: number(value, "bytes_from_host")?,
            round_trips: number(value, "round_trips")?,
        })
    }
}

/// The whole file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stats {
    pub(crate) device: String,
    /// Graphs submitted since the plugin was loaded.
    pub(crate) graphs: u64,
    /// Graphs sent as a whole, not as a patch to the one before.
    pub(crate) full_graphs: u64,
    /// The latest submissions, one entry each.
    pub(crate) steps: Vec<Traffic>,
}

impl Stats {
    pub(crate) fn read(path: &Path) -> Result<Stats> {
        let text = std::fs::read_to_string(path).with_context(|| {
            format!(
                "the plugin left no statistics at {}: was it used?",
                path.display()
            )
        })?;
        let value = serde_json::from_str(&text)
            .with_context(|| format!("{} is not JSON", path.display()))?;
        Stats::parse(&value).with_context(|| format!("{} is incomplete", path.display()))
    }

    fn parse(value: &Value) -> Result<Stats> {
        let totals = value.get("totals").context("no totals")?;
        let steps = value
            .get("steps")
            .and_then(Value::as_array)
            .context("no steps")?;
        Ok(Stats {
            device: value
                .get("device")
                .and_then(Value::as_str)
                .context("no device")?
                .to_owned(),
            graphs: number(totals, "graphs")?,
            full_graphs: number(totals, "full_graphs")?,
            steps: steps.iter().map(Traffic::parse).collect::<Result<_>>()?,
        })
    }

    /// The last `tokens` submissions. At the end of a generation these are its decode steps, if every
    /// token took one submission.
    pub(crate) fn last(&self, tokens: usize) -> &[Traffic] {
        &self.steps[self.steps.len().saturating_sub(tokens)..]
    }
}

/// The median of one figure over several submissions.
pub(crate) fn median(steps: &[Traffic], figure: impl Fn(&Traffic) -> u64) -> u64 {
    let mut figures: Vec<_> = steps.iter().map(figure).collect();
    figures.sort_unstable();
    figures.get(figures.len() / 2).copied().unwrap_or(0)
}

fn number(value: &Value, name: &str) -> Result<u64> {
    value
        .get(name)
        .and_then(Value::as_u64)
        .with_context(|| format!("no number {name:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_file_is_read_and_an_incomplete_one_refused() {
        let step = |n: u64| {
            json!({
                "nodes": 200, "host_nodes": 300, "messages": n, "bytes_to_host": 10 * n,
                "bytes_from_host": 128_000, "round_trips": 1, "full_graph": false,
            })
        };
        let value = json!({
            "device": "VGPU0",
            "endpoint": "inproc",
            "totals": {"graphs": 9, "nodes": 1800, "messages": 36, "bytes_to_host": 1,
                       "bytes_from_host": 1, "round_trips": 9, "full_graphs": 2},
            "steps": [step(40), step(4), step(6), step(2)],
        });
        let stats = Stats::parse(&value).unwrap();
        assert_eq!((stats.graphs, stats.full_graphs), (9, 2));
        assert_eq!(stats.last(3).len(), 3);
        assert_eq!(median(stats.last(3), |t| t.messages), 4);
        assert_eq!(median(stats.last(3), |t| t.bytes_to_host), 40);
        assert_eq!(stats.last(100).len(), 4);

        let mut broken = value;
        broken["steps"][2]
            .as_object_mut()
            .unwrap()
            .remove("round_trips");
        let error = Stats::parse(&broken).unwrap_err().to_string();
        assert!(error.contains("round_trips"), "{error}");
    }
}
