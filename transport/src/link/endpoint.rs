//! Where an executor is.
#![forbid(unsafe_code)]

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::pci::discover::Address;
use super::stream::vsock;

/// Where an executor listens unless told otherwise.
pub const DEFAULT_UNIX_PATH: &str = "/run/vgpu/vgpu.sock";

/// Where an executor is, as users write it: `inproc`, `pci`, `unix:/path`, or just a path.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// In this process.
    Inproc,
    /// Behind a PCI device of this virtual machine; without an address, behind every vGPU there is.
    Pci(Option<Address>),
    /// Behind a unix socket on this machine.
    Unix(PathBuf),
    /// Outside of this virtual machine, through vsock.
    Vsock {
        /// The machine: 2 is the host.
        cid: u32,
        /// The port.
        port: u32,
    },
    /// For an executor: the guests of a monitor that connects vsock to unix sockets.
    VsockUnix {
        /// The path that the monitor was given.
        path: PathBuf,
        /// The port.
        port: u32,
    },
    /// On another machine.
    Tcp {
        /// Its name or address.
        host: String,
        /// The port.
        port: u16,
    },
}

impl Endpoint {
    /// Where to look when nobody has said where, in this order.
    pub fn defaults() -> Vec<Endpoint> {
        vec![
            Endpoint::Pci(None),
            Endpoint::Vsock {
                cid: vsock::HOST,
                port: vsock::DEFAULT_PORT,
            },
            Endpoint::Unix(DEFAULT_UNIX_PATH.into()),
        ]
    }
}

/// Why a text is not an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// There is nothing in it.
    #[error("the endpoint is empty; it is `pci`, `inproc`, `unix:/path/to/socket` or a path")]
    Empty,
    /// It names a kind of link that this version does not have.
    #[error(
        "endpoint `{text}`: no link of the kind `{kind}`; there are `pci`, `vsock`, `tcp:host:port`, `inproc` and `unix:/path/to/socket`"
    )]
    Kind {
        /// The text.
        text: String,
        /// What stands before its colon.
        kind: String,
    },
    /// It names no PCI device.
    #[error(
        "endpoint `{text}`: `pci` alone, or with an address as `lspci` shows it, such as `pci:0000:00:05.0`"
    )]
    Address {
        /// The text.
        text: String,
    },
    /// It names no place that vsock reaches.
    #[error(
        "endpoint `{text}`: `vsock`, `vsock:PORT`, `vsock:CID:PORT`, or for an executor `vsock:/path:PORT`"
    )]
    Vsock {
        /// The text.
        text: String,
    },
    /// It names no port of a machine.
    #[error(
        "endpoint `{text}`: `tcp:HOST:PORT`, such as `tcp:gpu1.example.org:4780` or `tcp:[::1]:4780`"
    )]
    Tcp {
        /// The text.
        text: String,
    },
    /// It names a unix socket by a path that depends on where the program was started.
    #[error("endpoint `{text}`: the path of a socket must be absolute (it begins with `/`)")]
    Relative {
        /// The text.
        text: String,
    },
    /// The kernel has no room for such a path.
    #[error("endpoint `{text}`: the path of a socket has at most {max} bytes; this has {len}")]
    TooLong {
        /// The text.
        text: String,
        /// Its bytes.
        len: usize,
        /// The kernel's limit.
        max: usize,
    },
}

/// Bytes of a socket's path that the kernel takes, without the closing zero.
const MAX_PATH: usize = 107;

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        let text = text.trim();
        let path = match text.split_once(':') {
            _ if text.is_empty() => return Err(EndpointError::Empty),
            _ if text.starts_with('/') => text,
            Some(("unix", path)) => path,
            Some(("pci", address)) => {
                let address = address
                    .parse()
                    .map_err(|()| EndpointError::Address { text: text.into() })?;
                return Ok(Endpoint::Pci(Some(address)));
            }
            None if text == "pci" => return Ok(Endpoint::Pci(None)),
            Some(("vsock", place)) => {
                return vsock_place(place)
                    .ok_or_else(|| EndpointError::Vsock { text: text.into() });
            }
            None if text == "vsock" => {
                return Ok(Endpoint::Vsock {
                    cid: vsock::HOST,
                    port: vsock::DEFAULT_PORT,
                });
            }
            Some(("tcp", place)) => {
                return tcp_place(place).ok_or_else(|| EndpointError::Tcp { text: text.into() });
            }
            Some((kind, _)) => {
                return Err(EndpointError::Kind {
                    text: text.into(),
                    kind: kind.into(),
                });
            }
            None if text == "inproc" => return Ok(Endpoint::Inproc),
            None if text.contains('/') => text,
            None => {
                return Err(EndpointError::Kind {
                    text: text.into(),
                    kind: text.into(),
                });
            }
        };
        if !Path::new(path).is_absolute() {
            return Err(EndpointError::Relative { text: text.into() });
        }
        if path.len() > MAX_PATH {
            return Err(EndpointError::TooLong {
                text: text.into(),
                len: path.len(),
                max: MAX_PATH,
            });
        }
        Ok(Endpoint::Unix(path.into()))
    }
}

/// `PORT`, `CID:PORT` or `/path:PORT`.
fn vsock_place(text: &str) -> Option<Endpoint> {
    let Some((machine, port)) = text.rsplit_once(':') else {
        let port = text.parse().ok()?;
        return Some(Endpoint::Vsock {
            cid: vsock::HOST,
            port,
        });
    };
    let port = port.parse().ok()?;
    if machine.starts_with('/') && machine.len() + 11 <= MAX_PATH {
        return Some(Endpoint::VsockUnix {
            path: machine.into(),
            port,
        });
    }
    let cid = machine.parse().ok()?;
    Some(Endpoint::Vsock { cid, port })
}

/// `HOST:PORT`, with brackets around an IPv6 address.
fn tcp_place(text: &str) -> Option<Endpoint> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    if host.is_empty() {
        return None;
    }
    Some(Endpoint::Tcp {
        host: host.into(),
        port: port.parse().ok()?,
    })
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Inproc => f.write_str("inproc"),
            Endpoint::Pci(None) => f.write_str("pci"),
            Endpoint::Pci(Some(address)) => write!(f, "pci:{address}"),
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
            Endpoint::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
            Endpoint::VsockUnix { path, port } => write!(f, "vsock:{}:{port}", path.display()),
            Endpoint::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Endpoint::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_users_write() {
        let parse = |text: &str| text.parse::<Endpoint>();
        assert_eq!(parse("inproc"), Ok(Endpoint::Inproc));
        for text in ["unix:/a/b:c", "/a/b:c", " /a/b:c\n"] {
            assert_eq!(parse(text), Ok(Endpoint::Unix("/a/b:c".into())), "{text}");
        }
        assert_eq!(parse(" "), Err(EndpointError::Empty));
        for text in ["unix:run/x", "./x", "unix:"] {
            assert!(
                matches!(parse(text), Err(EndpointError::Relative { .. })),
                "{text}"
            );
        }
        for (text, kind) in [
            ("pcie", "pcie"),
            ("udp:host:1", "udp"),
            ("rdma:2:1", "rdma"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.to_string().contains("`unix:/path/to/socket`"));
            assert_eq!(
                error,
                EndpointError::Kind {
                    text: text.into(),
                    kind: kind.into()
                }
            );
        }
        assert_eq!(parse("pci"), Ok(Endpoint::Pci(None)));
        let address = "0000:00:05.0".parse().unwrap();
        for text in ["pci:0000:00:05.0", "pci:00:05.0"] {
            assert_eq!(parse(text), Ok(Endpoint::Pci(Some(address))), "{text}");
            assert_eq!(
                parse(text).unwrap().to_string(),
                "pci:0000:00:05.0",
                "{text}"
            );
        }
        let vsock = |cid, port| Ok(Endpoint::Vsock { cid, port });
        assert_eq!(parse("vsock"), vsock(2, 4780));
        assert_eq!(parse("vsock:1234"), vsock(2, 1234));
        assert_eq!(parse("vsock:3:1234"), vsock(3, 1234));
        let unix = Endpoint::VsockUnix {
            path: "/run/v.sock".into(),
            port: 7,
        };
        assert_eq!(parse("vsock:/run/v.sock:7"), Ok(unix.clone()));
        let tcp = |host: &str, port| {
            Ok(Endpoint::Tcp {
                host: host.into(),
                port,
            })
        };
        assert_eq!(parse("tcp:gpu1:4780"), tcp("gpu1", 4780));
        assert_eq!(parse("tcp:[::1]:4780"), tcp("::1", 4780));
        for endpoint in [
            unix,
            parse("tcp:[::1]:1").unwrap(),
            parse("tcp:a:1").unwrap(),
        ] {
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
        }
        for text in ["vsock:x", "vsock:2:", "vsock:a:1"] {
            assert!(
                matches!(parse(text), Err(EndpointError::Vsock { .. })),
                "{text}"
            );
        }
        for text in ["tcp:1", "tcp::1", "tcp:a:99999", "tcp:::1:2", "tcp:[::1:2"] {
            assert!(
                matches!(parse(text), Err(EndpointError::Tcp { .. })),
                "{text}"
            );
        }
        assert!(matches!(parse("pci:5"), Err(EndpointError::Address { .. })));
        let long = format!("/{}", "x".repeat(MAX_PATH));
        assert!(matches!(
            parse(&long),
            Err(EndpointError::TooLong { len: 108, .. })
        ));
        assert!(parse(&long[..MAX_PATH]).is_ok());
    }

    #[test]
    fn what_is_shown_can_be_written() {
        for endpoint in [Endpoint::Inproc].into_iter().chain(Endpoint::defaults()) {
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
        }
    }
}
