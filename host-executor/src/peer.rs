//! What the host knows about the guest at the other end of a link.
#![forbid(unsafe_code)]

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::identity::Identity;
use crate::policy::LinkKind;

/// A guest as the host's kernel and the TLS handshake describe it. Nothing here comes from the
/// guest's own messages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// The listener's address and the position of the guest there, for logs.
    pub endpoint: String,
    /// The kind of link.
    pub link: LinkKind,
    /// The guest's vsock context id, where the link has one.
    pub machine: Option<u32>,
    /// The guest's process, where the link tells.
    pub process: Option<Process>,
    /// The certificate that the guest has presented, once the TLS handshake is complete.
    pub certificate: Option<Identity>,
}

/// A process of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its process id; 0 if the process is in a pid namespace that the host cannot see.
    pub pid: i32,
    /// Its user id.
    pub uid: u32,
    /// The name of its program, if `/proc` has one.
    pub program: Option<String>,
}

impl Peer {
    /// A guest about which only the endpoint is known.
    pub(crate) fn new(endpoint: String, link: LinkKind) -> Peer {
        Peer {
            endpoint,
            link,
            machine: None,
            process: None,
            certificate: None,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.endpoint)?;
        if let Some(Process { pid, uid, program }) = &self.process {
            let program = program.as_deref().unwrap_or("?");
            write!(f, " {program} pid {pid} uid {uid}")?;
        }
        Ok(())
    }
}
