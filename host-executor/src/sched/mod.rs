//! Fair sharing of one device among the graphs of several tenants.
//!
//! [`queue`] is the scheduling rule, without threads and without a clock. [`scheduler`] applies it:
//! the thread of a session that wants to run a graph either finds the device idle, which costs one
//! lock, or sleeps until the device is handed to it. [`batch`] lets graphs with the same weights
//! share a turn.

mod batch;
mod offers;
mod queue;
mod scheduler;
mod times;

pub(crate) use batch::Batchable;
pub(crate) use queue::{Entitlement, TenantId};
pub(crate) use scheduler::{InFlight, RunState, Scheduler, TurnEvent};
pub(crate) use times::Times;
