//! Guests in processes of their own.
//!
//! A supervisor listens. For each guest that connects it starts a worker, which is this same
//! program, and passes the sockets of the guest's programs to the worker. The supervisor itself
//! never exchanges a byte with a guest. A worker has an engine of its own, enters the sandbox,
//! serves its one guest, and ends with the guest's last program. A fault in a worker, even a crash
//! of its process, ends the sessions of one guest: the guest learns it from its link, the operator
//! from the log, and the guest's next program gets a new worker.
//!
//! A guest that the configuration names has one worker for all its programs, which share the
//! guest's quota and weights. An unnamed guest has one worker per program. Workers report to
//! their supervisor (`ipc`), which adds up their figures for metrics and `vgpu ps` (`aggregate`).
//!
//! A virtual machine has a process from the start. Its `vgpu fd-store` and the supervisor keep the
//! machine's files (`vm_files`).
//!
//! Processes cannot share a device turn by turn. Each guest therefore has a part of the memory, and
//! the kernel's scheduler divides processor time: weights become nice levels (`partition`,
//! `weights`). Where the machine has less memory than the parts, the guests whose workers start
//! first get theirs (`machine_memory`).

mod admission;
mod aggregate;
mod certificates;
mod drain;
mod dump;
mod ipc;
mod kill;
mod log_pipe;
mod machine_memory;
mod partition;
mod printable;
mod process;
mod query;
mod report_rate_limit;
mod restart_limit;
mod state;
mod supervisor;
mod thread_limit;
mod totals;
mod vm_files;
mod vm_process;
mod weights;
mod worker;
mod worker_process;

#[cfg(test)]
mod hostile_tests;

pub use kill::KillError;
pub use partition::{Partition, Resources};
pub use process::limit_executor_descriptors;
pub use restart_limit::RestartPause;
pub use state::{MakeCommand, MakeMachine};
pub use supervisor::{Supervisor, SupervisorHealth};
pub use thread_limit::{EngineThreads, ThreadWatch};
pub use vm_files::{ALIVE_PERIOD, FileSupervisor};
pub use vm_process::StartVmError;
pub use worker::{serve, take_socket};
