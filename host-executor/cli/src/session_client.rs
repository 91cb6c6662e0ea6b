//! A client of the executor: a session as a program opens one.

use std::io;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use vgpu_transport::error::LinkError;
use vgpu_transport::link::connect::{ConnectError, connect};
use vgpu_transport::link::{Endpoint, EndpointError, GuestEnd};
use vgpu_transport::wire::{
    DeviceCount, DeviceIndex, HostVersions, Offer, ProtocolVersion, Reply, Request,
    VersionNotOffered, VersionRange, WireError,
};

/// How long a link may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a session cannot be opened or used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The executor has sent a message that is not a reply.
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Version(#[from] VersionNotOffered),
    #[error("the executor refuses: {reason}")]
    Refused { reason: String },
    #[error("unexpected reply to {request}: {reply:?}")]
    Unexpected {
        request: &'static str,
        reply: Box<Reply>,
    },
    #[error("the executor has not answered for {} s", limit.as_secs())]
    Silent { limit: Duration },
    #[error("starting a thread: {0}")]
    Thread(io::Error),
}

/// Why work has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoResult {
    #[error("no end after {} s", limit.as_secs())]
    Late { limit: Duration },
    #[error("starting a thread: {0}")]
    Thread(#[from] io::Error),
}

/// An open session, and what the executor has answered to HELLO.
pub(crate) struct Client {
    end: Box<dyn GuestEnd>,
    /// The version of the messages.
    pub(crate) protocol: ProtocolVersion,
    /// The versions that the executor serves.
    pub(crate) served: VersionRange,
    /// The number of the session.
    pub(crate) session: u64,
    /// The engine's name.
    pub(crate) engine: String,
    /// The model of the engine's device.
    pub(crate) description: String,
    /// The memory of the guest's device, in bytes.
    pub(crate) memory_total: u64,
    /// What is free of it, in bytes.
    pub(crate) memory_free: u64,
    /// The devices that the executor has for this guest. The session has the first one.
    pub(crate) devices: u32,
}

impl Client {
    /// Opens a session as the program `name`. An executor of version 3 of the messages, which does
    /// not choose from several versions, is asked a second time, for that version.
    pub(crate) fn connect(endpoint: &Endpoint, name: &str) -> Result<Client, ClientError> {
        let opened = Client::connect_with(Offer::SERVED, endpoint, name);
        let next = match &opened {
            Err(ClientError::Refused { reason }) => ProtocolVersion::after_refusal(reason),
            _ => None,
        };
        match next {
            None => opened,
            Some(version) => Client::connect_with(Offer::only(version), endpoint, name),
        }
    }

    fn connect_with(offer: Offer, endpoint: &Endpoint, name: &str) -> Result<Client, ClientError> {
        let mut end = connect(endpoint, CONNECT_TIMEOUT)?;
        let hello = Request::Hello {
            offer,
            name: format!("{name}[{}]", std::process::id()),
            device: DeviceIndex(0),
        };
        // HELLO is the same in every version, and WELCOME says its version itself.
        match exchange(end.as_mut(), ProtocolVersion::CURRENT, &hello)? {
            Reply::Welcome {
                protocol,
                served: HostVersions(served),
                session,
                engine,
                description,
                memory_total,
                memory_free,
                capabilities: _,
                devices: DeviceCount(devices),
            } => {
                offer.check(protocol)?;
                Ok(Client {
                    end,
                    protocol,
                    served,
                    session,
                    engine,
                    description,
                    memory_total,
                    memory_free,
                    devices,
                })
            }
            Reply::Ended { reason } | Reply::Refused { reason, .. } => {
                Err(ClientError::Refused { reason })
            }
            other => Err(ClientError::Unexpected {
                request: "HELLO",
                reply: Box::new(other),
            }),
        }
    }

    /// The reply to a request.
    pub(crate) fn request(&mut self, request: &Request) -> Result<Reply, ClientError> {
        exchange(self.end.as_mut(), self.protocol, request)
    }
}

fn exchange(
    end: &mut dyn GuestEnd,
    protocol: ProtocolVersion,
    request: &Request,
) -> Result<Reply, ClientError> {
    let mut message = Vec::new();
    request.encode(protocol, &mut message);
    let sent = end.send(&message, (&[][..]).into());
    message.clear();
    match sent {
        Ok(_) => {
            end.receive(&mut message, (&mut [][..]).into())?;
        }
        // The executor may say why it ends the session, and close the link, at any time.
        Err(error) => match end.try_receive(&mut message) {
            Ok(true) => {}
            Ok(false) | Err(_) => return Err(error.into()),
        },
    }
    Ok(Reply::decode(protocol, &message)?)
}

/// The result of `work` with an executor, for which a thread has `limit`. An executor that is alive
/// may not answer for as long as it likes: its heartbeat comes from a thread of its own.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> Result<T, ClientError> + Send + 'static,
) -> Result<T, ClientError> {
    match result_within(limit, work) {
        Ok(result) => result,
        Err(NoResult::Late { limit }) => Err(ClientError::Silent { limit }),
        Err(NoResult::Thread(error)) => Err(ClientError::Thread(error)),
    }
}

/// The result of `work`, for which a thread has `limit`. The thread ends with the process if it
/// does not end before.
pub(crate) fn result_within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NoResult> {
    let (sender, outcome) = mpsc::channel();
    thread::Builder::new().spawn(move || {
        // Nobody waits any more after the limit.
        let _ = sender.send(work());
    })?;
    let outcome = outcome.recv_timeout(limit);
    outcome.map_err(|_| NoResult::Late { limit })
}

/// The endpoints to try: `given`, or those of VGPU_ENDPOINT, or the defaults. The second value
/// says whether the user has named them.
///
/// # Errors
/// VGPU_ENDPOINT is malformed.
pub(crate) fn endpoints(given: &[Endpoint]) -> Result<(Vec<Endpoint>, bool), EndpointError> {
    if !given.is_empty() {
        return Ok((given.to_vec(), true));
    }
    let variable = std::env::var("VGPU_ENDPOINT").unwrap_or_default();
    if variable.is_empty() {
        return Ok((Endpoint::defaults(), false));
    }
    let parsed = variable.split(',').map(|one| one.trim().parse());
    Ok((parsed.collect::<Result<_, _>>()?, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_without_an_answer_ends_at_its_limit() {
        let limit = Duration::from_millis(20);
        let (open, never) = mpsc::channel::<()>();
        let silent = within(limit, move || {
            let _ = never.recv();
            Ok(())
        });
        assert!(matches!(silent, Err(ClientError::Silent { .. })));
        drop(open);
        assert_eq!(within(Duration::from_secs(60), || Ok(7)).ok(), Some(7));
    }

    #[test]
    fn reason_that_comes_before_the_request_is_known() {
        use vgpu_transport::link::HostEnd as _;
        use vgpu_transport::link::window::inproc_pair;
        let (mut guest, mut host) = inproc_pair().unwrap();
        let reason = "the host drains".to_owned();
        let mut message = Vec::new();
        Reply::Ended { reason }.encode(ProtocolVersion::CURRENT, &mut message);
        host.send(&message, 0, &mut |_| {}).unwrap();
        drop(host);
        let mut ask = || exchange(&mut guest, ProtocolVersion::CURRENT, &Request::Memory {});
        let told = ask().unwrap();
        assert!(
            matches!(&told, Reply::Ended { reason } if reason == "the host drains"),
            "{told:?}"
        );
        assert!(matches!(ask(), Err(ClientError::Link(LinkError::Closed))));
    }
}
