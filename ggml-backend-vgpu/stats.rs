//! What crossed the boundary, in all and for each graph: written as JSON to the file that the
//! environment variable `VGPU_STATS` names, when a stream is freed.

use std::collections::VecDeque;
use std::path::Path;

use serde_json::{Value, json};
use vgpu_transport::link::Counters;

use crate::session::since;

/// Steps kept; older ones only count in the totals.
const STEPS: usize = 1024;

/// Statistics of one session.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stats {
    graphs: u64,
    nodes: u64,
    full_graphs: u64,
    now: Counters,
    steps: VecDeque<Step>,
    open: Option<(Counters, Step)>,
}

/// From one graph submission to the next: the graph, and everything before the next one.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    nodes: usize,
    host_nodes: usize,
    full_graph: bool,
    crossed: Counters,
}

impl Stats {
    /// A graph is about to be submitted.
    pub(crate) fn begin_step(
        &mut self,
        now: Counters,
        nodes: usize,
        host_nodes: usize,
        full_graph: bool,
    ) {
        self.finish_step(now);
        self.graphs += 1;
        self.nodes += nodes as u64;
        self.full_graphs += u64::from(full_graph);
        self.open = Some((
            now,
            Step {
                nodes,
                host_nodes,
                full_graph,
                crossed: Counters::default(),
            },
        ));
    }

    /// Closes the step that is open.
    pub(crate) fn finish_step(&mut self, now: Counters) {
        self.now = now;
        if let Some((then, step)) = self.open.take() {
            if self.steps.len() == STEPS {
                self.steps.pop_front();
            }
            self.steps.push_back(Step {
                crossed: since(now, then),
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
                row["nodes"] = json!(step.nodes);
                row["host_nodes"] = json!(step.host_nodes);
                row["full_graph"] = json!(step.full_graph);
                row
            })
            .collect();
        let mut totals = crossed(&self.now);
        totals["graphs"] = json!(self.graphs);
        totals["nodes"] = json!(self.nodes);
        totals["full_graphs"] = json!(self.full_graphs);
        let all =
            json!({ "device": device, "endpoint": endpoint, "totals": totals, "steps": steps });
        std::fs::write(path, format!("{all:#}\n"))
    }
}

fn crossed(counters: &Counters) -> Value {
    json!({
        "messages": counters.messages_out + counters.messages_in,
        "bytes_to_host": counters.bytes_out,
        "bytes_from_host": counters.bytes_in,
        "round_trips": counters.round_trips,
        "spins": counters.spins,
        "sleeps": counters.sleeps,
        "kicks": counters.kicks,
    })
}
