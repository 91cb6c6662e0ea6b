//! All faults, by name.

use anyhow::Result;

use xtask_common::progress::Progress;

use super::setup::{Row, Setup};
use super::{exhaustion, kills, multi_guest, random_events, suspend};

/// A kind of fault.
type Fault = fn(&Setup<'_>, &Progress) -> Result<Row>;

/// The name of the fault that is many.
pub(super) const RANDOM_EVENTS: &str = "random events against six guests";

/// All of them.
pub(crate) const FAULTS: [(&str, Fault); 13] = [
    ("executor killed at random points", kills::executors),
    ("guest killed at random points", kills::guests),
    ("executor and guest stopped for a while", suspend::both),
    ("slow guest", suspend::slow),
    ("several guests at once", multi_guest::concurrent_guests),
    (
        "guest at its quota beside another guest",
        multi_guest::quota,
    ),
    (
        "windows of guest and executor truncated",
        suspend::truncated,
    ),
    ("clock jumps", suspend::clock),
    (
        "guest's memory refused: the host has none left",
        exhaustion::memory,
    ),
    ("executor out of address space", exhaustion::address_space),
    ("executor out of descriptors", exhaustion::descriptors),
    (
        "disk full: sockets' folder, logs, statistics",
        exhaustion::disk,
    ),
    (RANDOM_EVENTS, random_events::run),
];

/// The results as text.
pub(crate) fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.fault.len()).max().unwrap_or(0);
    rows.iter()
        .map(|row| format!("{:width$}  {:>4}  {}\n", row.fault, row.times, row.found))
        .collect()
}
