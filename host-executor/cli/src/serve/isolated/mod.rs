//! `vgpu serve --isolate`: a process for each guest.

mod partition;
mod supervisor;
mod worker;

pub(super) use supervisor::run;
pub(crate) use worker::{WorkerArgs, run_worker};
