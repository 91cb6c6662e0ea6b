//! What crossed the boundary, in all and for each graph: written as JSON to the file that the
//! environment variable `VGPU_STATS` names, when a stream is freed.

use std::collections::VecDeque;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use vgpu_transport::link::Counters;

/// Steps kept; older ones only count in the totals.
const STEPS: usize = 1024;

/// Statistics of one session.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stats {
    graphs: u64,
    nodes: u64,
    full_graphs: u64,
    patches: u64,
    encoding: Duration,
    now: Crossed,
    steps: VecDeque<Step>,
    open: Option<(Crossed, Step)>,
}

/// From one graph submission to the next: the graph, and everything before the next one.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    graph: SubmittedGraph,
    crossed: Crossed,
}

/// A graph at its submission.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SubmittedGraph {
    /// Nodes it computes.
    pub(crate) nodes: usize,
    /// Nodes that ggml handed over, views included.
    pub(crate) host_nodes: usize,
    /// How the host gets to know it.
    pub(crate) sent: Sent,
    /// Time to find out which graph it is, or to translate it.
    pub(crate) encoding: Duration,
}

/// How a graph came to the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It had it.
    #[default]
    Before,
    /// As what differs from an earlier one.
    Patch,
    /// All of it.
    Whole,
}

impl Stats {
    /// A graph is about to be submitted.
    pub(crate) fn begin_step(&mut self, now: Crossed, graph: SubmittedGraph) {
        self.finish_step(now);
        self.graphs += 1;
        self.nodes += graph.nodes as u64;
        self.full_graphs += u64::from(graph.sent == Sent::Whole);
        self.patches += u64::from(graph.sent == Sent::Patch);
        self.encoding += graph.encoding;
        let crossed = Crossed::default();
        self.open = Some((now, Step { graph, crossed }));
    }

    /// Closes the step that is open.
    pub(crate) fn finish_step(&mut self, now: Crossed) {
        self.now = now;
        if let Some((then, step)) = self.open.take() {
            if self.steps.len() == STEPS {
                self.steps.pop_front();
            }
            self.steps.push_back(Step {
                crossed: now.since(then),
                ..step
            });
        }
    }

    /// Writes the statistics to `path`.
    pub(crate) fn write(&self, path: &Path, device: &str, endpoint: &str) -> std::io::Result<()> {
        let steps: Vec<Value> = self
            .steps
            .iter()
            .map(|step| {
                let mut row = crossed(&step.crossed);
                row["nodes"] = json!(step.graph.nodes);
                row["host_nodes"] = json!(step.graph.host_nodes);
                row["full_graph"] = json!(step.graph.sent == Sent::Whole);
                row["patch"] = json!(step.graph.sent == Sent::Patch);
                row["encode_ns"] = json!(step.graph.encoding.as_nanos() as u64);
                row
            })
            .collect();
        let mut totals = crossed(&self.now);
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

/// What has gone from one side to the other.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Crossed {
    /// In messages.
    pub(crate) link: Counters,
    /// Without.
    pub(crate) copied: Copied,
}

/// Bytes that went without messages: into, or out of, memory that both sides have mapped, or not at all.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Copied {
    pub(crate) to_host: u64,
    pub(crate) from_host: u64,
    /// Bytes of weights that the host had.
    pub(crate) not_sent: u64,
}

impl Crossed {
    fn since(&self, then: Crossed) -> Crossed {
        let (now, old) = (&self.link, &then.link);
        Crossed {
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
                to_host: self.copied.to_host - then.copied.to_host,
                from_host: self.copied.from_host - then.copied.from_host,
                not_sent: self.copied.not_sent - then.copied.not_sent,
            },
        }
    }
}

fn crossed(Crossed { link, copied }: &Crossed) -> Value {
    let counters = link;
    json!({
        "copied_to_host": copied.to_host,
        "copied_from_host": copied.from_host,
        "weights_not_sent": copied.not_sent,
        "messages": counters.messages_out + counters.messages_in,
        "bytes_to_host": counters.bytes_out,
        "bytes_from_host": counters.bytes_in,
        "round_trips": counters.round_trips,
        "spins": counters.spins,
        "sleeps": counters.sleeps,
        "kicks": counters.kicks,
    })
}
