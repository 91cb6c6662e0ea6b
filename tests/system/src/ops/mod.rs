//! ggml's own `test-backend-ops` on VGPU0: its list of cases and its results.

pub(crate) mod by_version;
pub(crate) mod constructors;
mod report;
mod suite;
pub(crate) mod table;
pub(crate) mod words;

pub(crate) use report::{DEVICE, Report};
pub(crate) use suite::{
    Cases, Claim, Suite, compare_with_cpu, compare_with_reference, draw, draw_types, of_types,
    sample,
};
