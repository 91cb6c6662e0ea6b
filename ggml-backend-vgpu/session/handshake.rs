//! The first exchange of a session.

use std::time::{Duration, Instant};

use vgpu_transport::ir::Capabilities;
use vgpu_transport::link::GuestEnd;
use vgpu_transport::wire::{DeviceCount, DeviceIndex, Offer, ProtocolVersion, Reply, Request};

use super::error::SessionError;

/// What the executor says about itself and its device in the handshake.
#[derive(Debug, Clone)]
pub(crate) struct Welcome {
    /// The version of the messages.
    pub(crate) protocol: ProtocolVersion,
    /// The number of the session, in the logs of both sides.
    pub(crate) session: u64,
    /// The engine: `cpu`, `cuda:0`.
    pub(crate) engine: String,
    /// The model name of the device.
    pub(crate) description: String,
    /// Total memory of the device in bytes.
    pub(crate) memory_total: u64,
    /// Free memory of the device in bytes, when the session began.
    pub(crate) memory_free: u64,
    /// What the engine computes.
    pub(crate) capabilities: Capabilities,
    /// The devices that the executor has for this guest.
    pub(crate) devices: DeviceCount,
}

/// What the guest says first.
pub(crate) struct Hello {
    /// The versions of the messages that the executor may choose from.
    pub(crate) offer: Offer,
    /// Who the guest is, for the executor's log.
    pub(crate) name: String,
    /// The device among those that the executor has for this guest.
    pub(crate) device: DeviceIndex,
}

/// Opens a session over a new link. `limit`: how long the executor may take to answer `hello`.
///
/// # Errors
///
/// [`SessionError::Refused`] if the executor does not want this guest, [`SessionError::NoWelcome`]
/// if it does not answer in time, [`SessionError::Lost`] if the link is broken, or the answer makes
/// no sense or names a version that `hello` does not offer.
pub(super) fn handshake(
    end: &mut dyn GuestEnd,
    hello: Hello,
    limit: Duration,
) -> Result<Welcome, SessionError> {
    let Hello {
        offer,
        name,
        device,
    } = hello;
    let began = Instant::now();
    let mut message = Vec::new();
    let hello = Request::Hello {
        offer,
        name,
        device,
    };
    // The same bytes in every version. WELCOME says its version itself.
    hello.encode(ProtocolVersion::CURRENT, &mut message);
    let sent = end.send(&message, (&[][..]).into());
    message.clear();
    let is_answered = match sent {
        Ok(_) => end.receive_within(&mut message, limit)?,
        // The executor may refuse a guest that has sent nothing yet, and close the link.
        Err(error) => match end.try_receive(&mut message) {
            Ok(true) => true,
            Ok(false) | Err(_) => return Err(error.into()),
        },
    };
    if !is_answered {
        let waited = began.elapsed();
        return Err(SessionError::NoWelcome { waited });
    }
    match Reply::decode(ProtocolVersion::CURRENT, &message)? {
        Reply::Welcome {
            protocol,
            session,
            engine,
            description,
            memory_total,
            memory_free,
            capabilities,
            devices,
            served: _,
        } => {
            offer.check(protocol)?;
            Ok(Welcome {
                protocol,
                session,
                engine,
                description,
                memory_total,
                memory_free,
                capabilities,
                devices,
            })
        }
        Reply::Ended { reason } | Reply::Refused { reason, .. } => {
            Err(SessionError::Refused(reason))
        }
        other => Err(SessionError::unexpected(other)),
    }
}
