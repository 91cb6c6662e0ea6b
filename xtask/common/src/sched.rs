//! Which device computes which node: read from ggml's scheduler, which prints its decisions when
//! `GGML_SCHED_DEBUG=2`.

use std::collections::BTreeMap;

/// One computed node of a graph (views are not printed: they compute nothing).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledNode {
    /// The op, cut to ten characters.
    pub op: String,
    /// The node's name, cut to twenty characters.
    pub name: String,
    /// The device that computes it, cut to five characters.
    pub device: String,
    /// What it reads, as far as it is printed on the same line.
    reads: String,
}

/// The nodes of the graph the scheduler printed last.
pub fn last_graph(log: &str) -> Vec<ScheduledNode> {
    let mut graph = Vec::new();
    let mut previous = None;
    for (index, node) in log
        .match_indices("node #")
        .filter_map(|(at, _)| parse(&log[at..]))
    {
        // Indices grow within a graph: one that does not begins the next.
        if previous.is_some_and(|previous| index <= previous) {
            graph.clear();
        }
        previous = Some(index);
        graph.push(node);
    }
    graph
}

/// Reads `node #  3 (   MUL_MAT):   Qcur-0 (   3K) [VGPU0         ] use=1,c=1:`: the index and the
/// node. The op is cut to ten characters, names to twenty, the device to five.
pub fn parse(text: &str) -> Option<(u32, ScheduledNode)> {
    let line = text.lines().next()?.strip_prefix("node #")?;
    let (index, rest) = line.split_once(" (")?;
    let (op, rest) = rest.split_once("):")?;
    let (device_at, name_end) = (rest.find(") [")?, rest.find(" use=")?);
    let name = rest[..device_at].rsplit_once(" (")?.0;
    // Behind the device stands why it was chosen, which may be empty.
    let device = rest
        .get(device_at + 3..name_end)?
        .split_whitespace()
        .next()?;
    let node = ScheduledNode {
        op: op.trim().to_owned(),
        name: name.trim().to_owned(),
        device: device.trim_end_matches(']').to_owned(),
        reads: rest[name_end..].to_owned(),
    };
    Some((index.trim().parse().ok()?, node))
}

/// How many nodes each device has.
pub fn count_by_device(nodes: &[ScheduledNode]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for node in nodes {
        *counts.entry(node.device.as_str()).or_insert(0) += 1;
    }
    counts
}

/// Nodes that ggml's CPU backend computes and VGPU0 should compute. Nodes that read a table of
/// embeddings are not among these: llama.cpp keeps such tables in the host's memory, whatever the
/// device can do.
pub fn misplaced(nodes: &[ScheduledNode]) -> Vec<&ScheduledNode> {
    let lookup = |node: &ScheduledNode| node.op == "GET_ROWS" && node.name.contains("embd");
    let table = [
        "token_embd.weight",
        "position_embd.weight",
        "per_layer_token_embd",
    ];
    let reads_table = |node: &ScheduledNode| table.iter().any(|table| node.reads.contains(table));
    nodes
        .iter()
        .filter(|node| node.device == "CPU" && !lookup(node) && !reads_table(node))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
## SPLIT #0: CPU # 0 inputs
node #  0 (  GET_ROWS):                 embd (   3K) [  CPU         ] use=2,c=1:
node #  1 (  RMS_NORM):               norm-0 (   3K) [  CPU         ] use=1,c=1:
## SPLIT #0: CPU # 0 inputs
[debug] node #  0 (  GET_ROWS):                 embd (   3K) [  CPU         ] use=2,c=1:\
 token_embd.weight (  46M) [  CPU         ]            leaf_2 (   0K) [  CPU         ]

## SPLIT #1: VGPU0 # 5 inputs: [embd (   3K)] 
node # 12 (  SET_ROWS):    cache_k_l0 (view) ( 256K) [VGPU0    2.wgt] use=0,c=1:
node # 21 (FLASH_ATTN):              node_21 (   3K) [VGPU0         ] use=1,c=1:
[debug] node #100 (   MUL_MAT):        result_output ( 125K) [  CPU         ] use=0,c=1:
";

    #[test]
    fn the_last_graph_is_read() {
        let nodes = last_graph(LOG);
        let names: Vec<_> = nodes
            .iter()
            .map(|n| (n.name.as_str(), n.device.as_str()))
            .collect();
        assert_eq!(
            names,
            [
                ("embd", "CPU"),
                ("cache_k_l0 (view)", "VGPU0"),
                ("node_21", "VGPU0"),
                ("result_output", "CPU"),
            ]
        );
        assert_eq!(nodes[2].op, "FLASH_ATTN");
        assert_eq!(
            count_by_device(&nodes),
            BTreeMap::from([("CPU", 2), ("VGPU0", 2)])
        );
    }

    #[test]
    fn embedding_lookup_may_stay_on_the_cpu() {
        let node = |reads: &str| {
            let line = format!(
                "node # 89 (   MUL_MAT): result_output (   0K) [  CPU    ] use=0,c=1:{reads}"
            );
            vec![parse(&line).unwrap().1]
        };
        assert!(misplaced(&node("  token_embd.weight ( 128K) [  CPU ]")).is_empty());
        assert_eq!(
            misplaced(&node("           inp_embd ( 128K) [  CPU ]")).len(),
            1
        );
    }

    #[test]
    fn only_the_embedding_may_stay_on_the_cpu() {
        let nodes = last_graph(LOG);
        let misplaced = misplaced(&nodes);
        assert_eq!(misplaced.len(), 1);
        assert_eq!(misplaced[0].name, "result_output");
    }
}
