//! A program that has connected, until its guest's worker has the socket.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::RecvFlags;
use tracing::{error, warn};

use super::ipc::Rejection;
use super::state::{Processes, SupervisorState, UnassignedProgram};
use super::worker_process;
use crate::listener::HANDSHAKE_TIMEOUT;
use crate::lock::RankedGuard;
use crate::peer::Peer;
use crate::policy::LinkKind;
use crate::tenant_registry::AdmissionError;

/// Rejected guests that are told why by a worker. Further guests are disconnected without a
/// message.
const MAX_REJECTIONS: usize = 16;

/// How long a program waits for a worker.
const WORKER_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts the thread of a connection, which ends when a worker has been given the connection.
pub(super) fn start(
    shared: &Arc<SupervisorState>,
    owner: Option<&str>,
    socket: OwnedFd,
    peer: Peer,
) {
    let id = shared.new_id();
    let duplicate = socket.try_clone().ok();
    let Some(pending) = shared.handshakes.begin(id, &peer.origin(), duplicate) else {
        return;
    };
    let (handle, owner) = (Arc::clone(shared), owner.map(str::to_owned));
    let mut program = UnassignedProgram {
        socket,
        peer,
        pending,
    };
    let spawned = thread::Builder::new()
        .name(format!("vgpu-guest-{id}"))
        .spawn(move || {
            let may_go_on = program.pending.wait_on_own_thread(|| handle.stop.is_set());
            if may_go_on && has_sent(&program.socket, HANDSHAKE_TIMEOUT) {
                admit(&handle, id, owner.as_deref(), program);
            }
        });
    if let Err(error) = spawned
        && let Some(others) = shared.refusal_log.allow(Instant::now())
    {
        error!(
            session = id,
            "no thread for a guest, which is disconnected: {error}; {others} such lines were left \
             out"
        );
    }
}

/// How often a program that waits looks whether time has paid for others of its origin.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Waits until few enough programs of an origin are in their handshakes, and time has paid for
/// those that have ended without a session meanwhile. `None` if that takes too long, and if the
/// program need not be served any more.
fn wait_for_turn<'a>(
    shared: &'a SupervisorState,
    guest: Option<&str>,
    program: &UnassignedProgram,
) -> Option<RankedGuard<'a, Processes>> {
    let origin = program.peer.origin();
    let is_tcp = program.peer.link == LinkKind::Tcp;
    let is_over = || shared.stop.is_set() || program.pending.is_cancelled();
    let end = Instant::now() + WORKER_TIMEOUT;
    let mut processes = shared.processes();
    loop {
        let paused = processes.pause_after_kills(guest, &program.peer);
        let owed = program.pending.owed()?.max(paused);
        let has_to_wait = processes.has_to_wait(guest, &origin, is_tcp);
        if is_over() || !has_to_wait && owed.is_zero() {
            break;
        }
        let left = end.saturating_duration_since(Instant::now());
        // A program that would wait longer learns that at once, and not at the end.
        if left.is_zero() || paused > left {
            if !paused.is_zero() {
                log_pause(shared, &program.peer, paused);
            }
            return None;
        }
        let pause = match has_to_wait {
            true => left,
            false => left.min(POLL_INTERVAL),
        };
        processes = processes.wait_timeout(&shared.changed, pause);
    }
    (!is_over() && !has_hung_up(&program.socket)).then_some(processes)
}

fn log_pause(shared: &SupervisorState, peer: &Peer, pause: Duration) {
    if let Some(others) = shared.refusal_log.allow(Instant::now()) {
        warn!(
            %peer,
            "disconnected: workers of the guest were killed, and it gets the next one in \
             {pause:.0?}; {others} such lines were left out"
        );
    }
}

/// Gives a program to the worker of its guest.
fn admit(shared: &Arc<SupervisorState>, id: u64, owner: Option<&str>, program: UnassignedProgram) {
    let peer = &program.peer.clone();
    // Nothing is scheduled here.
    let (guest, rejected) = match shared.registry.admit(owner, peer, |_| None) {
        Ok(tenants) => {
            let named = tenants.first().filter(|tenant| tenant.is_named());
            (named.map(|tenant| tenant.name().to_owned()), None)
        }
        Err(error) => {
            let reason = error.to_string();
            (None, Some(Rejection::Rejected { reason }))
        }
    };
    // Locked until the worker has the socket, so that no worker is told to end meanwhile, and a
    // shutdown misses none.
    let Some(mut processes) = wait_for_turn(shared, guest.as_deref(), &program) else {
        return;
    };
    // The guest may have been removed while its program waited.
    let is_removed = |name: &String| processes.partition.policy(Some(name)).is_none();
    let removed = guest.clone().filter(is_removed).map(|name| {
        let reason = AdmissionError::Removed { name }.to_string();
        Rejection::Rejected { reason }
    });
    let rejection = rejected
        .or(removed)
        .or_else(|| shared.drain.is_on().then_some(Rejection::Draining))
        .or_else(|| processes.full(guest.as_deref(), peer));
    let rejections = processes.workers.values().filter(|w| w.is_rejection);
    let count = rejections.count();
    if rejection.is_some() && count >= MAX_REJECTIONS {
        if let Some(others) = shared.refusal_log.allow(Instant::now()) {
            warn!(
                %peer,
                "disconnected without a message: {count} other guests are being rejected; \
                 {others} such lines were left out"
            );
        }
        return;
    }
    let worker = match (&guest, &rejection) {
        (Some(name), None) => processes.worker_of(name),
        _ => None,
    };
    let outcome = match worker {
        Some((worker, certificates)) => worker.give(id, program, None, certificates),
        None => worker_process::start(shared, &mut processes, id, guest, rejection, program),
    };
    if let Err(error) = outcome {
        error!(session = id, %peer, "no worker for this guest, which is disconnected: {error}");
    }
}

/// Waits up to `timeout` for the first bytes of a guest, which stay unread. Returns whether the
/// guest has sent any.
fn has_sent(socket: impl AsFd, timeout: Duration) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::IN)];
    let Ok(timeout) = Timespec::try_from(timeout) else {
        return false;
    };
    if !matches!(rustix::event::poll(&mut fds, Some(&timeout)), Ok(1)) {
        return false;
    }
    let peeked = rustix::net::recv(socket, &mut [0], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    peeked.is_ok_and(|(bytes, _)| bytes > 0)
}

/// Whether a guest has closed its socket. No process is worth starting then, whatever is unread.
fn has_hung_up(socket: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    let now = Timespec::default();
    // The kernel reports hang-ups and errors in any case.
    !matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(0))
}
