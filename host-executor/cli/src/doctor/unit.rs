//! The service of the executor, where systemd runs.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::child::{self, NoAnswer};
use super::report::Report;
use super::root::Root;
use crate::config_error::EX_CONFIG;

const PART: &str = "service";
const UNIT: &str = "vgpu.service";

/// The command that starts the service now and at each boot.
const ENABLE: &str = "sudo systemctl enable --now vgpu";

/// Shows what the service does while it starts.
const FOLLOW: &str = "journalctl --unit vgpu --follow";

/// How long `systemctl` may take. Its own limit for an answer of systemd is 25 s.
const LIMIT: Duration = Duration::from_secs(10);

/// What systemd says of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnitState {
    /// systemd does not run, or has no such unit.
    Unknown,
    /// The unit is there, and nobody has asked for it.
    Unused,
    /// The unit is to run at boot, or has run.
    Used,
    /// It starts, or ends: the executor may not answer yet.
    Changing,
}

/// What to type when no executor is there.
pub(super) fn start(state: UnitState) -> Option<&'static str> {
    match state {
        UnitState::Unknown => None,
        UnitState::Unused | UnitState::Used => Some(ENABLE),
        UnitState::Changing => Some(FOLLOW),
    }
}

pub(super) fn check(root: &Root, report: &mut Report) -> UnitState {
    if !root.has_systemd() {
        return UnitState::Unknown;
    }
    let values = match show() {
        Ok(values) => values,
        Err(error) => {
            report.note(PART, format!("systemctl does not say: {error}"));
            return UnitState::Unknown;
        }
    };
    let value = |key: &str| values.get(key).map_or("", String::as_str);
    if value("LoadState") != "loaded" {
        return UnitState::Unknown;
    }
    let log = "journalctl --unit vgpu --lines 20 --no-pager";
    let is_enabled = value("UnitFileState").starts_with("enabled");
    let restarts: u64 = value("NRestarts").parse().unwrap_or(0);
    match value("ActiveState") {
        "active" if restarts == 0 => report.ok(PART, format!("{UNIT} runs")),
        "active" => report.ok(PART, format!("{UNIT} runs, after {restarts} restarts")),
        "inactive" if !is_enabled => {
            report.note(
                PART,
                format!("{UNIT} is not started: if this is the host, {ENABLE}"),
            );
            return UnitState::Unused;
        }
        "inactive" => report.fail(
            PART,
            format!("{UNIT} is not running"),
            "sudo systemctl start vgpu",
        ),
        state @ ("activating" | "reloading" | "deactivating")
            if value("SubState") != "auto-restart" =>
        {
            report.note(PART, format!("{UNIT} is {state}: its log is {FOLLOW}"));
            return UnitState::Changing;
        }
        _ if value("ExecMainStatus") == EX_CONFIG.to_string() => report.fail(
            PART,
            format!("{UNIT} ends with status {EX_CONFIG}: a mistake in the configuration"),
            "vgpu check-config",
        ),
        state => report.fail(
            PART,
            format!(
                "{UNIT} is {state} ({}), and ended with status {} ({}) last time",
                value("SubState"),
                value("ExecMainStatus"),
                value("Result")
            ),
            log,
        ),
    }
    UnitState::Used
}

/// The properties of the unit by name.
fn show() -> Result<BTreeMap<String, String>, NoAnswer> {
    let mut command = Command::new("systemctl");
    command
        .args(["show", UNIT, "--property"])
        .arg("LoadState,ActiveState,SubState,Result,ExecMainStatus,NRestarts,UnitFileState")
        .stderr(Stdio::null());
    let (text, status) = child::output(&mut command, LIMIT)?;
    if !status.success() {
        return Err(NoAnswer::Ended(status));
    }
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    let values = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Ok(values.collect())
}
