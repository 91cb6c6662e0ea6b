//! The corpora of the fuzzers, as tests.

#[path = "../../tests/fuzz/targets/mod.rs"]
#[allow(dead_code, unreachable_pub)] // the fuzzers need more of the targets
mod targets;

use std::fs;
use std::path::Path;

use targets::session;
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
