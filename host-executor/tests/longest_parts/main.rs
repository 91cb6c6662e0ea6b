//! How long a part of a node runs that no kernel divides: for every operator of the CPU engine,
//! with the longest rows, windows and tiles that the limits of `vgpu_engine::work` admit, in the
//! types and layouts in which they take longest.
//!
//! `VGPU_PARTS=0.5 cargo test --release -p vgpu-executor --test longest_parts -- --nocapture`
//! measures each shape for that many seconds, as `cargo xtask bench parts` does. The ordinary test
//! measures nothing: it runs one launch of each, and counts them, so that the shapes stay valid.
//! With `VGPU_PARTS_COLD=1`, nobody has written to the pages of any operand before a launch.

mod bench;
#[path = "../../../transport/tests/common/ops.rs"]
#[allow(dead_code)]
mod ops;
mod rows;
#[path = "../../../transport/tests/common/samples.rs"]
mod samples;
mod shapes;
mod windows;

use std::time::Duration;

use serde_json::json;
use vgpu_median::median;

use bench::Bench;
use rows::{of_types, rows};
use shapes::others;
use windows::windows;

/// The shapes that the engine computes. The lists also have operators with types that these do not
/// take.
const COMPUTED: usize = 991;

/// Bytes of the buffer of each operand.
const BUFFER: u64 = 256 << 20;

#[test]
fn the_longest_parts_of_every_operator() {
    let seconds = std::env::var("VGPU_PARTS").ok();
    let seconds = seconds.map(|s| s.parse::<f64>().expect("seconds"));
    let only = std::env::var("VGPU_PARTS_OF").unwrap_or_default();
    let size = BUFFER;
    let is_cold = std::env::var_os("VGPU_PARTS_COLD").is_some();
    let bench = Bench::new(size, is_cold);
    let mut computed = 0;
    for shapes in [rows(), of_types(), windows(), others()]
        .into_iter()
        .flatten()
    {
        if !shapes.name.contains(&only) {
            continue;
        }
        let Some((n, graph, work)) = bench.longest(&shapes, size) else {
            println!("{}: not supported", shapes.name);
            continue;
        };
        let time = Duration::from_secs_f64(seconds.unwrap_or(0.0));
        let launches = bench.launches(&graph, time);
        let mut launches = launches.unwrap_or_else(|error| panic!("{}: {error}", shapes.name));
        launches.sort();
        computed += 1;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        println!(
            "{}",
            json!({
                "name": shapes.name,
                "length": n,
                "part": work.part,
                "part_kind": format!("{:?}", work.part_kind),
                "products": work.products,
                "steps": work.steps,
                "launches": launches.len(),
                "median_ms": ms(median(launches.iter().copied())),
                "second_ms": ms(launches[launches.len().saturating_sub(2)]),
                "longest_ms": ms(launches[launches.len() - 1]),
            })
        );
    }
    if only.is_empty() {
        assert_eq!(computed, COMPUTED, "shapes of the lists");
    }
}
