//! What the host knows about the guest at the other end of a link.
#![forbid(unsafe_code)]

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::identity::{CertificateRule, Identity};
use crate::policy::LinkKind;

/// A guest as the host's kernel and the TLS handshake describe it. Nothing here comes from the
/// guest's own messages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// The listener's address and the position of the guest there, for logs.
    pub endpoint: String,
    /// The kind of link.
    pub link: LinkKind,
    /// The guest's address, over TCP.
    pub address: Option<IpAddr>,
    /// The name of the virtual machine in the configuration, over PCI.
    pub vm: Option<String>,
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
    /// The process id; 0 if the process is in a pid namespace that the host cannot see.
    pub pid: i32,
    /// The user id of the process.
    pub uid: u32,
    /// The name of its program, if `/proc` has one.
    pub program: Option<String>,
}

/// The origin of whoever connects from an address of the loopback interface.
const LOOPBACK: &str = "tcp:loopback";

impl Peer {
    /// A guest about which only the endpoint is known.
    pub(crate) fn new(endpoint: String, link: LinkKind) -> Peer {
        Peer {
            endpoint,
            link,
            address: None,
            vm: None,
            machine: None,
            process: None,
            certificate: None,
        }
    }

    /// Who an unnamed guest is: its certificate, else its [origin](Peer::origin). `None` if
    /// nothing tells. Without a certificate, all addresses of the loopback interface are one guest:
    /// every program of this machine may connect from any of them.
    pub(crate) fn source(&self) -> Option<String> {
        if let Some(certificate) = &self.certificate {
            let fingerprint = CertificateRule::Fingerprint(certificate.fingerprint);
            return Some(format!("certificate {fingerprint}"));
        }
        match self.is_on_loopback() {
            true => Some(LOOPBACK.into()),
            false => self.known_origin(),
        }
    }

    /// Where a guest connects from, whatever certificate it has: its user on this machine, its
    /// virtual machine, or its address. The endpoint if nothing tells. An IPv6 network of 64 bits
    /// is one address: its users choose the other bits.
    pub(crate) fn origin(&self) -> String {
        self.known_origin().unwrap_or_else(|| self.endpoint.clone())
    }

    /// As [`origin`](Peer::origin), for the processes, quotas, sessions and wrong proofs of unnamed
    /// guests, which are limited for each origin. All addresses of the loopback interface are one.
    /// Connections before their first message are counted by [`origin`](Peer::origin): those of one
    /// such address close none of another.
    pub(crate) fn quota_origin(&self) -> String {
        match self.is_on_loopback() {
            true => LOOPBACK.into(),
            false => self.origin(),
        }
    }

    fn is_on_loopback(&self) -> bool {
        let address = self.address.map(|address| address.to_canonical());
        address.is_some_and(|address| address.is_loopback())
    }

    /// The virtual machine that the guest is a program of, on a link on which the host sees no
    /// program end.
    pub(crate) fn virtual_machine(&self) -> Option<String> {
        match self.link {
            LinkKind::Pci => self.vm.as_ref().map(|name| format!("vm {name}")),
            LinkKind::Vsock => self.known_origin(),
            LinkKind::Unix | LinkKind::Tcp => None,
        }
    }

    fn known_origin(&self) -> Option<String> {
        if let Some(process) = &self.process {
            return Some(format!("uid:{}", process.uid));
        }
        if let Some(cid) = self.machine {
            return Some(format!("cid:{cid}"));
        }
        if self.link == LinkKind::Vsock {
            // A monitor that connects to a unix socket. Each monitor has a socket of its own.
            return Some(self.endpoint.clone());
        }
        self.address.map(|address| match address.to_canonical() {
            IpAddr::V4(address) => format!("tcp:{address}"),
            IpAddr::V6(address) => {
                let network = Ipv6Addr::from_bits(address.to_bits() >> 64 << 64);
                format!("tcp:{network}/64")
            }
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_of_a_guest_is_what_it_cannot_choose() {
        let from = |address: &str| Peer {
            address: Some(address.parse().unwrap()),
            ..Peer::new("test".into(), LinkKind::Tcp)
        };
        assert_eq!(from("10.0.0.1").source().unwrap(), "tcp:10.0.0.1");
        for address in ["127.0.0.1", "127.9.8.7", "::ffff:127.0.0.2", "::1"] {
            assert_eq!(from(address).source().unwrap(), "tcp:loopback");
            assert_eq!(from(address).quota_origin(), "tcp:loopback");
        }
        assert_eq!(from("10.0.0.1").quota_origin(), "tcp:10.0.0.1");
        assert_eq!(from("::ffff:10.0.0.1").source(), from("10.0.0.1").source());
        assert_eq!(from("fd00::1").source().unwrap(), "tcp:fd00::/64");
        assert_eq!(from("fd00::1").source(), from("fd00::ffff:0:2").source());
        assert_ne!(from("fd00::1").source(), from("fd00:0:0:1::1").source());
        assert_eq!(Peer::new("test".into(), LinkKind::Pci).source(), None);
        // A monitor's socket for vsock, behind which the kernel knows no context id.
        let monitor = Peer::new("vsock at /run/vm1".into(), LinkKind::Vsock);
        assert_eq!(monitor.source().unwrap(), "vsock at /run/vm1");
        // Another certificate is another guest, of the same origin.
        let certified = Peer {
            certificate: Some(Identity::of(&[1])),
            ..from("10.0.0.1")
        };
        assert_ne!(certified.source(), from("10.0.0.1").source());
        // Two machines, although the listener's text for logs is one.
        let vm = |name: &str| Peer {
            vm: Some(name.into()),
            ..Peer::new("vm a slot 0".into(), LinkKind::Pci)
        };
        assert_eq!(vm("a").virtual_machine().unwrap(), "vm a");
        assert_eq!(vm("b").virtual_machine().unwrap(), "vm b");
        let unknown = Peer::new("vm a slot 0".into(), LinkKind::Pci);
        assert_eq!(unknown.virtual_machine(), None);
        assert_eq!(certified.origin(), from("10.0.0.1").origin());
    }
}
