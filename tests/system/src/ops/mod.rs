//! ggml's own `test-backend-ops` on VGPU0: its list of cases and its results.

pub(crate) mod by_engine;
pub(crate) mod by_version;
pub(crate) mod constructors;
pub(crate) mod op_params;
mod report;
mod suite;
pub(crate) mod table;

pub(crate) use report::{DEVICE, Report};
pub(crate) use suite::{
    Cases, Claim, Suite, compare_with_cpu, compare_with_reference, draw, draw_types, of_types, run,
    sample, sample_each,
};
