//! The configuration of `vgpu serve`: one [`Settings`], from a file and from flags.
//!
//! The flags of `vgpu serve` take precedence over the file. Every mistake in a file is reported
//! with its line and column.

mod file;
mod settings;

pub use file::{LoadError, Problem};
pub(crate) use settings::is_guest_name;
pub use settings::{
    DEFAULT_CONTROL_PATH, DEFAULT_PATH, DeviceNumberError, GuestEngineError, GuestSettings,
    LogFormat, MetricsAddress, ParseLogFormatError, ParseMetricsAddressError, Settings, VmDevice,
};
