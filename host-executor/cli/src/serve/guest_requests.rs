//! Guests that clients of the control socket add, list and remove.

use tracing::{error, info};
use vgpu_executor::added_guests::{
    AddedGuests, DeviceCapacity, GuestAnswer, GuestList, GuestRequest,
};
use vgpu_executor::config::Settings;
use vgpu_executor::size::shown;
use vgpu_executor::status::{Progress, StatusHandle};

use crate::error_text;

/// Carries out `request`. `apply` makes settings effective, or fails and changes nothing.
/// `running`: the settings that are effective, with the guests of `added`. After the removal of a
/// guest, the caller ends the sessions of the guest ([`log_ended`] says so).
pub(super) fn answer(
    request: &GuestRequest,
    added: &mut AddedGuests,
    running: &mut Settings,
    status: &StatusHandle,
    apply: impl FnOnce(&Settings) -> anyhow::Result<()>,
) -> GuestAnswer {
    match change(request, added, running, apply) {
        Ok(()) => GuestAnswer::Done(list(added, running, status)),
        Err(error) => {
            let reason = error_text::one_line(&error);
            error!("the guests are unchanged: {reason}");
            GuestAnswer::Refused(reason)
        }
    }
}

/// Logs that the sessions of a guest that was removed are ended.
pub(super) fn log_ended(guest: &str, sessions: usize) {
    if sessions > 0 {
        info!(guest, "{sessions} sessions of the guest are ended");
    }
}

fn change(
    request: &GuestRequest,
    added: &mut AddedGuests,
    running: &mut Settings,
    apply: impl FnOnce(&Settings) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut changed = added.clone();
    if !changed.change(request)? {
        return Ok(());
    }
    let mut wanted = running.clone();
    changed.replace(added, &mut wanted)?;
    apply(&wanted)?;
    *running = wanted;
    *added = changed;
    match request {
        GuestRequest::Add(guest) => info!(
            guest = guest.name,
            memory = guest.memory.map(shown),
            weight = guest.weight,
            "a client of the control socket has added or changed the guest"
        ),
        GuestRequest::Remove { name } => {
            info!(
                guest = name,
                "a client of the control socket has removed the guest"
            );
        }
        GuestRequest::List => {}
    }
    Ok(())
}

fn list(added: &AddedGuests, running: &Settings, status: &StatusHandle) -> GuestList {
    let mut configured = running.clone();
    added.remove_from(&mut configured);
    let snapshot = status.status();
    let devices = snapshot.engines().enumerate().map(|(device, engine)| {
        let guests = configured.guests.iter();
        let quotas = guests.map(|guest| guest.rule.policy.quota_on(device));
        let reserved = quotas.fold(0, u64::saturating_add);
        DeviceCapacity {
            memory: engine.memory_total.saturating_sub(reserved),
            raised: added.raised(running, device),
            address: engine.gpu.as_ref().map(|gpu| gpu.address.clone()),
        }
    });
    let devices: Vec<_> = devices.collect();
    let least = devices.iter().map(|device| device.memory).min();
    GuestList {
        guests: added.list(),
        memory: least.unwrap_or_default(),
        devices,
        unavailable: unavailable(status),
    }
}

/// Why the executor serves no further programs.
fn unavailable(status: &StatusHandle) -> Option<String> {
    match status.progress() {
        Progress::Stalled(why) | Progress::Late(why) => Some(why),
        Progress::Runs(_) => status
            .draining()
            .map(|_| "the executor drains: it accepts no new sessions".into()),
    }
}
