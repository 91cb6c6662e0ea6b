//! `vgpu serve --isolate`: a fault in the process of one guest affects no other guest.

#[path = "../../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;
mod faults;
#[path = "../../../../tests/common/mod.rs"]
mod ggml;
mod limits;
#[path = "../../../tests/machine/mod.rs"]
mod machine;
mod named_guests;
mod other_processes;
#[path = "../served/mod.rs"]
mod served;
mod virtual_machines;

use std::time::Instant;

use common::TIMEOUT;
use served::{Scratch, vgpu};

/// The output of `vgpu ps --json`, once `is_so` holds.
fn status_when(scratch: &Scratch, is_so: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
    let control = scratch.path().join("control.sock").display().to_string();
    let start = Instant::now();
    loop {
        let output = vgpu(&["ps", "--json", "--control", &control])
            .output()
            .expect("it starts");
        let said = String::from_utf8(output.stdout).expect("text");
        let status: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        if is_so(&status) {
            return status;
        }
        assert!(start.elapsed() < TIMEOUT, "{status:#}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

fn of_guest<'a>(status: &'a serde_json::Value, name: &str) -> &'a serde_json::Value {
    let guests = status["guests"].as_array().expect("a list");
    guests
        .iter()
        .find(|guest| guest["name"] == name)
        .unwrap_or(&serde_json::Value::Null)
}
