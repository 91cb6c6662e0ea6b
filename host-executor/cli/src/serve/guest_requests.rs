//! Guests that clients of the control socket add, list and remove.

use tracing::{error, info};
use vgpu_executor::added_guests::{AddedGuests, GuestAnswer, GuestList, GuestRequest};
use vgpu_executor::config::Settings;
use vgpu_executor::status::{Progress, StatusHandle};

/// Carries out `request`. `apply` makes settings effective, or fails and changes nothing.
/// `running`: the settings that are effective, with the guests of `added`.
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
            error!("the guests are unchanged: {error:#}");
            GuestAnswer::Refused(format!("{error:#}"))
        }
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
            memory = guest.memory,
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
    // An added guest has a quota on each device.
    let left = snapshot.engines().enumerate().map(|(device, engine)| {
        let guests = configured.guests.iter();
        let quotas = guests.map(|guest| guest.rule.policy.quota_on(device));
        let reserved = quotas.fold(0, u64::saturating_add);
        engine.memory_total.saturating_sub(reserved)
    });
    GuestList {
        guests: added.list(),
        memory: left.min().unwrap_or_default(),
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
