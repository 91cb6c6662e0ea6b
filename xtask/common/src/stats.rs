//! What the plugin counted at the boundary: the file it writes where `VGPU_STATS` says.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use vgpu_median::median;

/// Traffic of a number of graph submissions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Nodes computed, without views.
    pub nodes: u64,
    /// Messages in both directions.
    pub messages: u64,
    /// Bytes of the messages to the executor.
    pub bytes_to_host: u64,
    /// Bytes of the messages from the executor.
    pub bytes_from_host: u64,
    /// Bytes copied into memory that both sides have mapped, without a message.
    pub copied_to_host: u64,
    /// Bytes copied out of it.
    pub copied_from_host: u64,
    /// Times the guest stood still until the host had answered.
    pub round_trips: u64,
    /// Time to find out which graph it is, or to translate it.
    pub encode_ns: u64,
    /// The time of the submission, from the first one of the session.
    pub submitted_ns: u64,
    /// Whether the graph was sent whole, or as a patch of another.
    pub full_graph: bool,
    /// Whether the graph was sent as a patch of another.
    pub patch: bool,
}

impl Traffic {
    fn parse(value: &Value) -> Result<Traffic> {
        Ok(Traffic {
            nodes: number(value, "nodes")?,
            messages: number(value, "messages")?,
            bytes_to_host: number(value, "bytes_to_host")?,
            bytes_from_host: number(value, "bytes_from_host")?,
            copied_to_host: number(value, "copied_to_host")?,
            copied_from_host: number(value, "copied_from_host")?,
            round_trips: number(value, "round_trips")?,
            encode_ns: number(value, "encode_ns")?,
            submitted_ns: number(value, "submitted_ns")?,
            full_graph: flag(value, "full_graph")?,
            patch: flag(value, "patch")?,
        })
    }
}

/// The whole file.
#[derive(Debug, PartialEq, Eq)]
pub struct Stats {
    /// The name of the device.
    pub device: String,
    /// Graphs submitted since the plugin was loaded.
    pub graphs: u64,
    /// Graphs sent as a whole, not as a patch to the one before.
    pub full_graphs: u64,
    /// The latest submissions, one entry each.
    pub steps: Vec<Traffic>,
}

impl Stats {
    /// Bytes that have left the guest by the end of the session, in messages and in shared memory.
    ///
    /// # Errors
    /// If the file is missing or incomplete.
    pub fn moved(path: &Path) -> Result<u64> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let value: Value = serde_json::from_str(&text).context("parsing the plugin's figures")?;
        let totals = &value["totals"];
        Ok(number(totals, "bytes_to_host")? + number(totals, "copied_to_host")?)
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    /// If the file is missing or incomplete.
    pub fn read(path: &Path) -> Result<Stats> {
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

    /// The decode steps of a generation of `tokens` tokens. The generation must be the last thing
    /// that the plugin has done.
    ///
    /// The first token came with the prompt. The last entry also counts what the program asks for
    /// while it ends, and is left out.
    ///
    /// # Errors
    /// If a token took more than one submission, or more than one blocking round trip.
    pub fn decode_steps(&self, tokens: usize) -> Result<&[Traffic]> {
        let len = self.steps.len();
        ensure!(
            len >= tokens,
            "{len} graphs reached the plugin for {tokens} tokens"
        );
        let steps = &self.steps[len + 1 - tokens..len - 1];
        let nodes = median(steps.iter().map(|step| step.nodes));
        // Were a token split up, its parts would be of different sizes.
        let odd = steps.iter().find(|step| step.nodes != nodes);
        ensure!(
            odd.is_none(),
            "a token takes several submissions: one of {nodes} nodes, one as {odd:?}"
        );
        let most = steps.iter().map(|step| step.round_trips).max().unwrap_or(0);
        ensure!(
            most <= 1,
            "a decoded token took {most} blocking round trips"
        );
        Ok(steps)
    }
}

fn flag(value: &Value, name: &str) -> Result<bool> {
    value
        .get(name)
        .and_then(Value::as_bool)
        .with_context(|| format!("no flag {name:?}"))
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
        let value = file(&[
            (200, 40, 3),
            (200, 6, 1),
            (200, 4, 1),
            (200, 2, 1),
            (200, 9, 2),
        ]);
        let stats = Stats::parse(&value).unwrap();
        assert_eq!((stats.graphs, stats.full_graphs), (9, 2));
        let decode = stats.decode_steps(5).unwrap();
        assert_eq!(decode.len(), 3);
        assert_eq!(median(decode.iter().map(|t| t.messages)), 4);
        assert_eq!(median(decode.iter().map(|t| t.bytes_to_host)), 40);
        assert!(stats.decode_steps(6).is_err(), "there are not that many");

        let mut broken = value;
        broken["steps"][2]
            .as_object_mut()
            .unwrap()
            .remove("round_trips");
        let error = Stats::parse(&broken).unwrap_err().to_string();
        assert!(error.contains("round_trips"), "{error}");
    }

    #[test]
    fn more_than_one_round_trip_or_submission_per_token_is_an_error() {
        let decode = |steps| {
            Stats::parse(&file(steps))
                .unwrap()
                .decode_steps(4)
                .map(<[_]>::len)
        };
        assert_eq!(
            decode(&[(9, 1, 9), (9, 1, 1), (9, 1, 0), (9, 1, 9)]).unwrap(),
            2
        );
        let error = decode(&[(9, 1, 1), (9, 1, 2), (9, 1, 1), (9, 1, 1)]).unwrap_err();
        assert!(error.to_string().contains("2 blocking"), "{error}");
        let error = decode(&[(9, 1, 1), (9, 1, 1), (3, 1, 1), (9, 1, 1)]).unwrap_err();
        assert!(error.to_string().contains("several submissions"), "{error}");
    }

    /// A file with steps of these nodes, messages and round trips.
    fn file(steps: &[(u64, u64, u64)]) -> Value {
        let step = |&(nodes, messages, round_trips): &(u64, u64, u64)| {
            json!({
                "nodes": nodes, "ggml_nodes": 300, "messages": messages,
                "bytes_to_host": 10 * messages, "bytes_from_host": 128_000,
                "copied_to_host": 40, "copied_from_host": 128_000, "encode_ns": 700,
                "submitted_ns": 9000,
                "round_trips": round_trips, "full_graph": false, "patch": false,
            })
        };
        json!({
            "device": "VGPU0",
            "endpoint": "inproc",
            "totals": {"graphs": 9, "nodes": 1800, "messages": 36, "bytes_to_host": 1,
                       "bytes_from_host": 1, "round_trips": 9, "full_graphs": 2},
            "steps": steps.iter().map(step).collect::<Vec<_>>(),
        })
    }
}
