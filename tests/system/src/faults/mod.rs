//! Faults on purpose: executors and guests that are killed at random points, stopped, limited of
//! memory, disk and descriptors, with windows cut short and clocks that jump. The guest is a real
//! llama.cpp program.
//!
//! After each fault: no process hangs, no guest crashes, no resource leaks, guests beside
//! the fault generate the same tokens as ever, and the next load works.

mod all;
mod exhaustion;
mod guest;
mod kills;
mod leaks;
mod long_run;
mod multi_guest;
mod setup;
mod suspend;

pub(crate) use all::FAULTS;
pub(crate) use long_run::{Options, run};
pub(crate) use setup::{Counts, Setup};
