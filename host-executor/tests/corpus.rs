//! The inputs that fuzzing has found interesting, as a test.

#[path = "../../tests/fuzz/session/mod.rs"]
mod session;

use std::fs;
use std::path::Path;

/// Each file of the corpus is a session that must be as the fuzzed one: see `session`.
#[test]
fn sessions_of_the_corpus() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/session");
    let mut files: Vec<_> = fs::read_dir(&corpus)
        .expect("the corpus is in the repository")
        .map(|entry| entry.expect("a file").path())
        .collect();
    files.sort();
    assert!(
        files.len() >= 20,
        "{} files in {}",
        files.len(),
        corpus.display()
    );
    for file in files {
        // Shown when the test fails: the last line names the culprit.
        println!("{}", file.display());
        session::run(&fs::read(&file).expect("a file"));
    }
}

/// Sessions without a corpus, so that a change is met by more than the same old inputs.
#[test]
fn sessions_at_random() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..2000 {
        let bytes: Vec<u8> = (0..600)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 24) as u8
            })
            .collect();
        session::run(&bytes);
    }
}
