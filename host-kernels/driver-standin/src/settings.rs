//! What the environment asks for.

use std::env;
use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::sync::OnceLock;

use crate::cards::Card;
use crate::faults::{FaultError, Faults};

/// The GPUs, by the names of their models, separated by commas.
const DEVICES: &str = "VGPU_STANDIN_DEVICES";

/// The version of CUDA, as `cuDriverGetVersion` gives it.
const VERSION: &str = "VGPU_STANDIN_DRIVER";

/// The memory of each GPU is divided by this number.
const DIVISOR: &str = "VGPU_STANDIN_MEMORY_DIVISOR";

/// The number of SMs of each GPU, in place of its own.
const SMS: &str = "VGPU_STANDIN_SMS";

/// The architecture of the code that NVRTC's stand-in makes, in place of what it is asked for.
const CODE: &str = "VGPU_STANDIN_CODE";

/// See [`Faults::parse`].
const FAULTS: &str = "VGPU_STANDIN_FAULTS";

/// A file to which the first call of each entry point, and the first launch of each kernel, adds a
/// line.
const TRACE: &str = "VGPU_STANDIN_TRACE";

/// What the environment asks for.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) cards: Vec<Card>,
    pub(crate) version: c_int,
    pub(crate) code: Option<String>,
    pub(crate) faults: Faults,
}

/// What is wrong in the environment.
#[derive(Debug, thiserror::Error)]
enum SettingsError {
    #[error("{name}={text}: no number")]
    Number { name: String, text: String },
    #[error("{}: no GPU model is called {name}", DEVICES)]
    Model { name: String },
    #[error("{}={path}: {error}", TRACE)]
    Trace { path: String, error: io::Error },
    #[error("{}: {error}", FAULTS)]
    Faults {
        #[from]
        error: FaultError,
    },
}

/// The settings of this process. Wrong ones end it: a test must not run with others than it asks
/// for.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        read(|name| env::var(name).ok()).unwrap_or_else(|wrong| {
            eprintln!("the stand-in for NVIDIA's driver: {wrong}");
            std::process::abort();
        })
    })
}

/// The settings that the variables ask for.
///
/// # Errors
/// The first variable that is wrong.
fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Settings, SettingsError> {
    let number = |name: &str, otherwise: u64| match variable(name) {
        None => Ok(otherwise),
        Some(text) => text.parse().map_err(|_| SettingsError::Number {
            name: name.into(),
            text,
        }),
    };
    let names = variable(DEVICES).unwrap_or_else(|| "L4".into());
    let (divisor, sms) = (number(DIVISOR, 64)?.max(1), number(SMS, 0)?);
    let mut cards = Vec::new();
    for name in names.split(',').filter(|name| !name.is_empty()) {
        let card = Card::named(name);
        let mut card = card.ok_or_else(|| SettingsError::Model { name: name.into() })?;
        card.memory /= divisor;
        if sms > 0 {
            card.model.sm_count = sms as u32;
        }
        cards.push(card);
    }
    let trace = variable(TRACE).map(|path| {
        let file = File::options().append(true).create(true).open(&path);
        file.map_err(|error| SettingsError::Trace { path, error })
    });
    let faults = Faults::parse(&variable(FAULTS).unwrap_or_default(), trace.transpose()?);
    Ok(Settings {
        cards,
        version: number(VERSION, 12_090)? as c_int,
        code: variable(CODE),
        faults: faults?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environments_are_read() {
        let of = |set: &'static [(&str, &str)]| {
            read(move |name| {
                let found = set.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).into())
            })
        };
        let plain = of(&[]).expect("the defaults");
        assert_eq!((plain.cards[0].name, plain.version), ("NVIDIA L4", 12090));
        let two = of(&[(DEVICES, "H100,A100"), (DIVISOR, "2"), (SMS, "3")]);
        let two = two.expect("two GPUs").cards;
        let found = two.iter().map(|card| (card.memory, card.model.sm_count));
        assert_eq!(found.collect::<Vec<_>>(), [(40 << 30, 3), (40 << 30, 3)]);
        assert_eq!(of(&[(DEVICES, "")]).expect("no GPU").cards.len(), 0);
        let reason = |set| of(set).expect_err("a wrong setting").to_string();
        let model = reason(&[(DEVICES, "V100")]);
        assert_eq!(model, "VGPU_STANDIN_DEVICES: no GPU model is called V100");
        assert_eq!(reason(&[(SMS, "x")]), "VGPU_STANDIN_SMS=x: no number");
    }
}
