//! Endpoints: the addresses of executors.
#![forbid(unsafe_code)]

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::pci::discover::Address;
use super::stream::vsock;

/// The default path of an executor's unix socket.
pub const DEFAULT_UNIX_PATH: &str = "/run/vgpu/vgpu.sock";

/// The address of an executor, as users write it: `inproc`, `pci`, `unix:/path`, or a path alone.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// The executor inside this process.
    Inproc,
    /// A PCI device of this virtual machine. Without an address: every vGPU of the machine.
    Pci(Option<Address>),
    /// A unix socket on this machine.
    Unix(PathBuf),
    /// A vsock port.
    Vsock {
        /// The context id of the machine. The host has 2.
        cid: u32,
        /// The port.
        port: u32,
    },
    /// For a listening executor: the guests of a hypervisor that maps vsock ports to
    /// unix sockets.
    VsockUnix {
        /// The path in the hypervisor's configuration.
        path: PathBuf,
        /// The port.
        port: u32,
    },
    /// A TCP port.
    Tcp {
        /// The name or address of the machine.
        host: String,
        /// The port.
        port: u16,
    },
}

impl Endpoint {
    /// The endpoints to try without configuration, in this order.
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

/// Why a text is not an endpoint. The user is at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// The text is empty.
    #[error("the endpoint is empty; it is `pci`, `inproc`, `unix:/path/to/socket` or a path")]
    Empty,
    /// The text names an unknown kind of link.
    #[error(
        "endpoint `{text}`: unknown kind `{kind}`; valid are `pci`, `vsock`, `tcp:host:port`, \
         `inproc` and `unix:/path/to/socket`"
    )]
    Kind {
        /// The text.
        text: String,
        /// The part before the colon.
        kind: String,
    },
    /// The text is not a PCI address.
    #[error(
        "endpoint `{text}`: expected `pci`, or `pci:` with an address as `lspci` shows it, such as \
         `pci:0000:00:05.0`"
    )]
    Address {
        /// The text.
        text: String,
    },
    /// The text is not a vsock address.
    #[error(
        "endpoint `{text}`: expected `vsock`, `vsock:PORT`, `vsock:CID:PORT`, or for an executor \
         `vsock:/path:PORT`"
    )]
    Vsock {
        /// The text.
        text: String,
    },
    /// The text is not a TCP address.
    #[error(
        "endpoint `{text}`: expected `tcp:HOST:PORT`, such as `tcp:gpu1.example.org:4780` or \
         `tcp:[::1]:4780`"
    )]
    Tcp {
        /// The text.
        text: String,
    },
    /// The path of the unix socket is relative, so it depends on the working directory.
    #[error("endpoint `{text}`: the path of a socket must be absolute")]
    Relative {
        /// The text.
        text: String,
    },
    /// The path exceeds the kernel's limit.
    #[error("endpoint `{text}`: the path has {len} bytes, the kernel permits {max}")]
    TooLong {
        /// The text.
        text: String,
        /// The length of the path, in bytes.
        len: usize,
        /// The kernel's limit, in bytes.
        max: usize,
    },
}

/// The maximum length of a socket's path (`sockaddr_un`) without the terminating zero, in bytes.
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
                    .map_err(|_| EndpointError::Address { text: text.into() })?;
                return Ok(Endpoint::Pci(Some(address)));
            }
            None if text == "pci" => return Ok(Endpoint::Pci(None)),
            Some(("vsock", address)) => {
                return parse_vsock(address)
                    .ok_or_else(|| EndpointError::Vsock { text: text.into() });
            }
            None if text == "vsock" => {
                return Ok(Endpoint::Vsock {
                    cid: vsock::HOST,
                    port: vsock::DEFAULT_PORT,
                });
            }
            Some(("tcp", address)) => {
                return parse_tcp(address).ok_or_else(|| EndpointError::Tcp { text: text.into() });
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
fn parse_vsock(text: &str) -> Option<Endpoint> {
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
fn parse_tcp(text: &str) -> Option<Endpoint> {
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
    fn endpoints_are_parsed() {
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
    fn the_displayed_form_can_be_parsed() {
        for endpoint in [Endpoint::Inproc].into_iter().chain(Endpoint::defaults()) {
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
        }
    }
}
