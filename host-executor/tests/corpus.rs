//! The corpora of the fuzzers, as tests.

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

use faulty_engine::{Faulty, Planted};
use targets::batch;
use targets::session::{self, Setup};
use vgpu_engine::Engine;
use vgpu_gguf::Rng;

/// Runs each file of a corpus through its fuzz target.
fn corpus(name: &str, least: usize) {
    let (_, run) = targets::TARGETS
        .into_iter()
        .find(|(target, _)| *target == name)
        .expect("a target of that name");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fuzz/corpus")
        .join(name);
    let mut files: Vec<_> = fs::read_dir(&corpus)
        .expect("the corpus is in the repository")
        .map(|entry| entry.expect("a file").path())
        .collect();
    files.sort();
    assert!(
        files.len() >= least,
        "{} files in {}",
        files.len(),
        corpus.display()
    );
    for file in files {
        // If the test fails, the last line of the output names the input.
        println!("{}", file.display());
        run(&fs::read(&file).expect("a file"));
    }
}

macro_rules! corpora {
    ($($test:ident: $name:literal, $least:literal;)*) => {
        $(#[test]
        fn $test() {
            corpus($name, $least);
        })*

        #[test]
        fn every_target_has_a_test() {
            let tested = [$($name),*];
            assert_eq!(tested, targets::TARGETS.map(|(name, _)| name));
        }
    };
}

corpora! {
    batches_of_the_corpus: "batch", 10;
    messages_of_the_corpus: "codec", 10;
    configurations_of_the_corpus: "config", 10;
    devices_of_the_corpus: "device", 10;
    frames_of_the_corpus: "frames", 10;
    gguf_files_of_the_corpus: "gguf", 10;
    graphs_of_the_corpus: "graph", 10;
    monitors_of_the_corpus: "monitor", 10;
    pages_of_the_corpus: "pages", 10;
    rings_of_the_corpus: "ring", 10;
    sessions_of_the_corpus: "session", 20;
    texts_of_the_corpus: "text", 10;
}

/// Sessions with random bytes, in addition to the corpus.
#[test]
fn sessions_at_random() {
    let mut random = Rng::new(1, 0);
    for _ in 0..2000 {
        let bytes: Vec<u8> = (0..600).map(|_| random.next_u64() as u8).collect();
        session::run(&bytes);
    }
}

/// Batches with random bytes, in addition to the corpus.
#[test]
fn batches_at_random() {
    let mut random = Rng::new(3, 0);
    for _ in 0..300 {
        let bytes: Vec<u8> = (0..200).map(|_| random.next_u64() as u8).collect();
        batch::run(&bytes);
    }
}

#[test]
fn the_checks_of_a_batch_notice_exchanged_columns() {
    let mut random = Rng::new(4, 0);
    let noticed = (0..100).filter(|_| {
        let bytes: Vec<u8> = (0..200).map(|_| random.next_u64() as u8).collect();
        catch_unwind(|| batch::run_exchanged(&bytes)).is_err()
    });
    let noticed = noticed.count();
    assert!(noticed > 30, "{noticed} of 100 batches are noticed");
}

/// Whether one of a thousand random sessions on an engine with this fault fails a check.
fn is_noticed(fault: Option<Planted>, setup: &'static Setup) -> bool {
    let mut random = Rng::new(2, 0);
    (0..1000).any(|_| {
        let bytes: Vec<u8> = (0..600).map(|_| random.next_u64() as u8).collect();
        let engine: Arc<dyn Engine> = match fault {
            Some(fault) => Arc::new(Faulty::new(fault, setup)),
            None => Arc::new(session::cpu_engine(setup)),
        };
        catch_unwind(AssertUnwindSafe(|| session::run_on(&engine, setup, &bytes))).is_err()
    })
}

#[test]
fn the_checks_of_a_fuzzed_session_notice_planted_faults() {
    for setup in [&session::SMALL, &session::DEFAULT] {
        let unharmed = !is_noticed(None, setup);
        assert!(unharmed, "a session without a fault fails");
        for fault in [
            Planted::OldBytes,
            Planted::WriteBesideDestination,
            Planted::LostAllocation,
            Planted::FailedRun,
            Planted::Panic,
            Planted::LongRequest,
        ] {
            let is_noticed = is_noticed(Some(fault), setup);
            assert!(is_noticed, "{fault:?} is not noticed");
        }
    }
}
