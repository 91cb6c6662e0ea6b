//! A session of the executor under libFuzzer: `cargo +nightly fuzz run --fuzz-dir tests/fuzz session`.
#![no_main]

#[path = "../session/mod.rs"]
mod session;

libfuzzer_sys::fuzz_target!(|data: &[u8]| session::run(data));
