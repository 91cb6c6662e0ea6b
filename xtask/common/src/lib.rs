//! What `cargo xtask`, the system tests and the benchmarks share: the cache folder, builds of ggml
//! and llama.cpp, models with random weights, the programs under test.

pub mod cache;
pub mod compare;
pub mod compiler_cache;
pub mod disk;
pub mod dist;
pub mod elf;
pub mod executor;
pub mod ggml_releases;
pub mod image;
pub mod llama;
pub mod machine_code;
pub mod markdown;
pub mod model;
pub mod node;
pub mod node_llama;
pub mod output;
pub mod packages;
pub mod process;
pub mod progress;
pub mod sched;
pub mod scratch;
pub mod stats;
pub mod version;
pub mod workspace;

pub use vgpu_median::median;
