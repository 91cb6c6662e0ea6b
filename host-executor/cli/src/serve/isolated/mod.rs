//! `vgpu serve --isolate`: a process for each guest.

mod partition;
mod supervisor;
mod worker;

pub(super) use supervisor::run;
pub(super) use worker::end_before_supervisor;
pub(crate) use worker::{WorkerArgs, run_worker};
