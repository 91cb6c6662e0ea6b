//! A running executor, as an operator configures, observes and changes it.

#[path = "../../../tests/common/mod.rs"]
mod common;
mod configuration;
mod logs;
mod metrics;
#[path = "../served/mod.rs"]
mod served;
mod status;
mod top;

/// A name of the greatest length, which begins with `start`.
fn long_name(start: &str) -> String {
    format!("{start:x<64}")
}
