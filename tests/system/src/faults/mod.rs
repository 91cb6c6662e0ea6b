//! Injected faults: executors and guests that are killed at random points, stopped, or run out of
//! memory, disk space or descriptors; truncated windows; clock jumps. The guest is a real llama.cpp
//! program.
//!
//! After each fault: no process hangs, no guest crashes, no resource leaks, other guests generate
//! the same tokens as before, and the next load works.

mod all;
mod event;
mod exhaustion;
mod freezer;
mod guest;
mod kept_executor;
mod kills;
mod leaks;
mod long_run;
mod machine;
mod multi_guest;
mod proxy;
mod random_events;
mod setup;
mod suspend;
mod upgrade;
mod waits;

pub(crate) use all::FAULTS;
pub(crate) use event::Chosen;
pub(crate) use guest::Program;
pub(crate) use long_run::{Options, SoakOptions, run, soak};
pub(crate) use machine::{MachineOptions, be_machine};
pub(crate) use setup::{Counts, Setup};
pub(crate) use upgrade::{UPGRADE, from_the_previous_release};
