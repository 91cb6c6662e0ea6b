//! A request to stop.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use vgpu_transport::link::stream::tls::CertificateFault;

/// A flag that asks sessions to stop. Clones share the flag.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<StopState>);

#[derive(Debug, Default)]
struct StopState {
    is_set: AtomicBool,
    /// Whether another guest needs what the guest has.
    is_evicted: AtomicBool,
    /// Whether an operator has ended the session.
    is_killed: AtomicBool,
    /// Why the host no longer serves the guest, if that is the cause.
    refusal: OnceLock<CertificateFault>,
    /// The time that sessions had to end by themselves, if its end is the cause.
    drained: OnceLock<Duration>,
    /// The flag for all sessions, if this flag is for one of them.
    all: Option<StopFlag>,
}

impl StopFlag {
    /// A flag that is not set.
    pub fn new() -> StopFlag {
        StopFlag::default()
    }

    /// A flag for one session, which is set if this flag is set.
    pub(crate) fn for_one(&self) -> StopFlag {
        StopFlag(Arc::new(StopState {
            all: Some(self.clone()),
            ..StopState::default()
        }))
    }

    /// Sets the flag. Each session completes the request that it executes, or cancels it at the end
    /// of its turn if it is a graph, tells its guest, and ends.
    pub fn set(&self) {
        self.0.is_set.store(true, Ordering::Release);
    }

    /// Sets the flag, because the host no longer serves the guest.
    pub(crate) fn refuse(&self, fault: CertificateFault) {
        // An earlier fault stays.
        let _ = self.0.refusal.set(fault);
        self.set();
    }

    /// Sets the flag, because another program of the guest's machine needs what the guest has.
    pub(crate) fn evict(&self) {
        self.0.is_evicted.store(true, Ordering::Relaxed);
        self.set();
    }

    /// Sets the flag, because an operator ends the session.
    pub(crate) fn kill(&self) {
        self.0.is_killed.store(true, Ordering::Relaxed);
        self.set();
    }

    /// Whether the flag is set because an operator ends the session.
    pub(crate) fn is_killed(&self) -> bool {
        self.0.is_killed.load(Ordering::Relaxed)
    }

    /// Sets the flag, because the host drains and the time `limit` for open sessions has passed.
    pub(crate) fn drain(&self, limit: Duration) {
        // An earlier limit stays.
        let _ = self.0.drained.set(limit);
        self.set();
    }

    /// The time that sessions had, if the flag is set because it has passed.
    pub(crate) fn drained(&self) -> Option<Duration> {
        self.0.drained.get().copied()
    }

    /// Whether the flag is set because another program needs what the guest has.
    pub(crate) fn is_evicted(&self) -> bool {
        self.0.is_evicted.load(Ordering::Relaxed)
    }

    /// Whether the flag is set.
    pub fn is_set(&self) -> bool {
        let all = self.0.all.as_ref();
        self.0.is_set.load(Ordering::Acquire) || all.is_some_and(StopFlag::is_set)
    }

    /// Why the host no longer serves the guest, if that is why the flag is set.
    pub(crate) fn refusal(&self) -> Option<&CertificateFault> {
        self.0.refusal.get()
    }
}
