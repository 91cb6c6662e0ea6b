//! What crossed the link, in total and for each graph.
//!
//! When a backend is freed, the statistics of its session are written as JSON to the file that the
//! environment variable `VGPU_STATS` names.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vgpu_transport::link::Counters;

/// The number of steps that are kept. Older steps count in the totals only.
const MAX_STEPS: usize = 1024;

/// Statistics of one session.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stats {
    graphs: u64,
    nodes: u64,
    full_graphs: u64,
    /// Graphs that were sent as a patch of an earlier one.
    pub(crate) patches: u64,
    encoding: Duration,
    now: Traffic,
    /// The first submission.
    began: Option<Instant>,
    steps: VecDeque<GraphInterval>,
    /// The step that has begun, and the traffic before it.
    current: Option<(Traffic, GraphInterval)>,
}

/// What happened from the submission of one graph to the submission of the next.
#[derive(Debug, Clone, Copy, Default)]
struct GraphInterval {
    graph: SubmittedGraph,
    traffic: Traffic,
    /// From the first submission of the session to this one.
    submitted: Duration,
}

/// A graph at its submission.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SubmittedGraph {
    /// Nodes that the executor computes.
    pub(crate) nodes: usize,
    /// Nodes of the `ggml_cgraph`, views included.
    pub(crate) ggml_nodes: usize,
    /// What was sent of the graph.
    pub(crate) sent: Sent,
    /// Time to find the graph among the known ones, or to translate it.
    pub(crate) encoding: Duration,
}

/// What was sent of a graph before its submission.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Nothing: the executor has the graph.
    #[default]
    Nothing,
    /// The difference from an earlier graph.
    Patch,
    /// The whole graph.
    Full,
}

impl Stats {
    /// Ends the current step and begins the step of a graph that is about to be submitted.
    pub(crate) fn begin_step(&mut self, now: Traffic, graph: SubmittedGraph) {
        self.finish_step(now);
        self.graphs += 1;
        self.nodes += graph.nodes as u64;
        self.full_graphs += u64::from(graph.sent == Sent::Full);
        self.patches += u64::from(graph.sent == Sent::Patch);
        self.encoding += graph.encoding;
        let time = Instant::now();
        let interval = GraphInterval {
            graph,
            traffic: Traffic::default(),
            submitted: time - *self.began.get_or_insert(time),
        };
        self.current = Some((now, interval));
    }

    /// Ends the current step. `now` is the traffic of the session so far.
    pub(crate) fn finish_step(&mut self, now: Traffic) {
        self.now = now;
        if let Some((before, step)) = self.current.take() {
            if self.steps.len() == MAX_STEPS {
                self.steps.pop_front();
            }
            self.steps.push_back(GraphInterval {
                traffic: now.since(before),
                ..step
            });
        }
    }

    /// Writes the statistics to `path`, as JSON.
    ///
    /// # Errors
    ///
    /// The error of writing the file.
    pub(crate) fn write(&self, path: &Path, device: &str, endpoint: &str) -> std::io::Result<()> {
        let steps: Vec<Value> = self
            .steps
            .iter()
            .map(|step| {
                let mut row = traffic(&step.traffic);
                row["nodes"] = json!(step.graph.nodes);
                row["ggml_nodes"] = json!(step.graph.ggml_nodes);
                row["full_graph"] = json!(step.graph.sent == Sent::Full);
                row["patch"] = json!(step.graph.sent == Sent::Patch);
                row["encode_ns"] = json!(step.graph.encoding.as_nanos() as u64);
                row["submitted_ns"] = json!(step.submitted.as_nanos() as u64);
                row
            })
            .collect();
        let mut totals = traffic(&self.now);
        totals["graphs"] = json!(self.graphs);
        totals["nodes"] = json!(self.nodes);
        totals["full_graphs"] = json!(self.full_graphs);
        totals["patches"] = json!(self.patches);
        totals["encode_ns"] = json!(self.encoding.as_nanos() as u64);
        let all =
            json!({ "device": device, "endpoint": endpoint, "totals": totals, "steps": steps });
        std::fs::write(path, format!("{all:#}\n"))
    }
}

/// What the two sides have exchanged.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Traffic {
    /// In messages.
    pub(crate) link: Counters,
    /// Without messages.
    pub(crate) copied: Copied,
}

/// Bytes that needed no message.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Copied {
    /// Written into memory that both sides have mapped.
    pub(crate) to_host: u64,
    /// Read from memory that both sides have mapped.
    pub(crate) from_host: u64,
    /// Weights that the executor already had.
    pub(crate) not_sent: u64,
}

impl Traffic {
    fn since(&self, before: Traffic) -> Traffic {
        let (now, old) = (&self.link, &before.link);
        Traffic {
            link: Counters {
                messages_out: now.messages_out - old.messages_out,
                messages_in: now.messages_in - old.messages_in,
                bytes_out: now.bytes_out - old.bytes_out,
                bytes_in: now.bytes_in - old.bytes_in,
                round_trips: now.round_trips - old.round_trips,
                spins: now.spins - old.spins,
                sleeps: now.sleeps - old.sleeps,
                kicks: now.kicks - old.kicks,
            },
            copied: Copied {
                to_host: self.copied.to_host - before.copied.to_host,
                from_host: self.copied.from_host - before.copied.from_host,
                not_sent: self.copied.not_sent - before.copied.not_sent,
            },
        }
    }
}

fn traffic(Traffic { link, copied }: &Traffic) -> Value {
    json!({
        "copied_to_host": copied.to_host,
        "copied_from_host": copied.from_host,
        "weights_not_sent": copied.not_sent,
        "messages": link.messages_out + link.messages_in,
        "bytes_to_host": link.bytes_out,
        "bytes_from_host": link.bytes_in,
        "round_trips": link.round_trips,
        "spins": link.spins,
        "sleeps": link.sleeps,
        "kicks": link.kicks,
    })
}
