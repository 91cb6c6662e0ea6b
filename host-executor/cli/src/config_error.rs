//! Mistakes in the configuration, which have an exit status of their own.

use vgpu_executor::{QuotaError, RulesError};

use crate::error_text;

/// The exit status for a mistake in the configuration (`EX_CONFIG` of `sysexits.h`): a restart with
/// the same configuration fails again.
pub(crate) const EX_CONFIG: u8 = 78;

/// A mistake in the configuration: in the file, or in the flags that replace parts of it.
#[derive(Debug, thiserror::Error)]
#[error("{}", error_text::one_line(.0))]
pub(crate) struct ConfigError(pub(crate) anyhow::Error);

/// Whether a command has failed because of a mistake in the configuration.
pub(crate) fn is_in(error: &anyhow::Error) -> bool {
    let is_mistake = |cause: &(dyn std::error::Error + 'static)| {
        cause.is::<ConfigError>() || cause.is::<QuotaError>() || cause.is::<RulesError>()
    };
    error.chain().any(is_mistake)
}
