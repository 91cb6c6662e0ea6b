//! Where an executor is.
#![forbid(unsafe_code)]

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where an executor listens unless told otherwise.
pub const DEFAULT_UNIX_PATH: &str = "/run/vgpu/vgpu.sock";

/// Where an executor is, as users write it: `inproc`, `unix:/path`, or just a path.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// In this process.
    Inproc,
    /// Behind a unix socket on this machine.
    Unix(PathBuf),
}

impl Endpoint {
    /// Where to look when nobody has said where, in this order.
    pub fn defaults() -> Vec<Endpoint> {
        vec![Endpoint::Unix(DEFAULT_UNIX_PATH.into())]
    }
}

/// Why a text is not an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// There is nothing in it.
    #[error("the endpoint is empty; it is `inproc`, `unix:/path/to/socket` or a path")]
    Empty,
    /// It names a kind of link that this version does not have.
    #[error(
        "endpoint `{text}`: no link of the kind `{kind}`; this version has `inproc` and `unix:/path/to/socket`"
    )]
    Kind {
        /// The text.
        text: String,
        /// What stands before its colon.
        kind: String,
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

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Inproc => f.write_str("inproc"),
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
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
            ("pci", "pci"),
            ("tcp:host:1", "tcp"),
            ("vsock:2:1", "vsock"),
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
