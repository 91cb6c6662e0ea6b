//! What fuzzed sessions use of the process. A test program of its own, so that nothing else happens
//! meanwhile. The test that the fuzz targets bring begins at the same time, and has no session.

#[path = "../../tests/fuzz/targets/mod.rs"]
#[allow(dead_code, unreachable_pub)] // the fuzzers need more of the targets
mod targets;

#[path = "common/faulty_engine.rs"]
#[allow(dead_code)] // each program plants some of the faults
mod faulty_engine;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use faulty_engine::{Faulty, Planted};
use targets::session::usage::{Process, REQUEST_TIME};
use targets::session::{self, Setup};
use vgpu_engine::Engine;
use vgpu_gguf::Rng;

/// Inputs of sessions: those of the corpus, and random ones.
fn inputs() -> Vec<Vec<u8>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/session");
    let files = fs::read_dir(&corpus).expect("the corpus is in the repository");
    let files = files.map(|file| fs::read(file.expect("a file").path()).expect("a file"));
    let mut random = Rng::new(3, 0);
    let random = (0..500).map(|_| (0..600).map(|_| random.next_u64() as u8).collect());
    files.chain(random).collect()
}

/// Runs sessions on engines with this fault until a check fails. Returns whether one has failed,
/// and the time of the longest request.
fn run(
    inputs: &[Vec<u8>],
    fault: Option<Planted>,
    setup: &'static Setup,
    first: Option<Process>,
) -> (bool, Duration) {
    let mut longest = Duration::ZERO;
    for input in inputs {
        let engine: Arc<dyn Engine> = match fault {
            Some(fault) => Arc::new(Faulty::new(fault, setup)),
            None => Arc::new(session::cpu_engine(setup)),
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            session::run_alone(&engine, setup, input, first)
        }));
        match outcome {
            Ok(took) => longest = longest.max(took),
            Err(_) => return (true, longest),
        }
    }
    (false, longest)
}

#[test]
fn sessions_use_limited_resources() {
    let inputs = inputs();
    for setup in [&session::SMALL, &session::DEFAULT, &session::LARGE] {
        // The first sessions start threads and fill the caches of the allocator.
        assert!(!run(&inputs[..50], None, setup, None).0);
        let first = Process::now();
        let (is_noticed, longest) = run(&inputs, None, setup, Some(first));
        assert!(!is_noticed, "a session without a fault fails");
        println!("the longest request took {longest:?} of {REQUEST_TIME:?}");
        for fault in [
            Planted::LongRequest,
            Planted::LostMapping,
            Planted::LostThread,
            Planted::LostDescriptor,
            Planted::LostHeap,
            Planted::TransientHeap,
            Planted::TransientHeapOfARun,
        ] {
            // What an earlier fault has left behind is no fault of this one.
            let first = Process::now();
            let (is_noticed, _) = run(&inputs, Some(fault), setup, Some(first));
            assert!(is_noticed, "{fault:?} is not noticed");
        }
    }
}
