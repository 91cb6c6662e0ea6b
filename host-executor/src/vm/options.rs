//! What describes a virtual machine to serve.
#![forbid(unsafe_code)]

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use vgpu_transport::link::pci::PciArrival;
use vgpu_transport::link::pci::directory::{DEFAULT_SIZE, MAX_SIZE, MIN_SIZE};
use vgpu_transport::link::socket_file::{DEFAULT_MODE, parse_mode};
use vgpu_transport::shm::liveness::SILENCE;

use crate::listener::IncomingGuest;
use crate::peer::Peer;
use crate::policy::LinkKind;
use crate::size::{self, ParseSizeError};

/// Longest name of a virtual machine.
const MAX_NAME: usize = 64;

/// Shortest accepted [`VmOptions::silence`]. A guest sends a heartbeat once a second; a
/// shorter limit would end the sessions of busy guests.
const MIN_SILENCE: Duration = Duration::from_secs(5);

/// A virtual machine to serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmOptions {
    /// The name in logs, and in the fd store.
    pub name: String,
    /// The socket to which the machine's hypervisor connects.
    pub socket: PathBuf,
    /// Permissions of the socket.
    pub mode: u32,
    /// The group of the socket, by name or number. `None`: that of this process.
    pub group: Option<String>,
    /// Bytes of the device's memory region: a power of two.
    pub window: usize,
    /// How long a program in the machine may send no heartbeat before its session ends, since
    /// the host cannot see the program die. `None`: no limit.
    pub silence: Option<Duration>,
}

impl VmOptions {
    /// The guest behind a program of this virtual machine that has connected.
    pub(super) fn incoming(&self, arrival: PciArrival) -> IncomingGuest {
        let endpoint = format!("vm {} slot {}", self.name, arrival.slot());
        IncomingGuest {
            peer: Peer {
                vm: Some(self.name.clone()),
                ..Peer::new(endpoint, LinkKind::Pci)
            },
            open: Box::new(move || Ok(Box::new(arrival.handshake()?) as _)),
            socket: None,
        }
    }
}

/// Why a text describes no virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ParseVmError {
    #[error(
        "the name {0:?}: expected 1 to {MAX_NAME} letters, digits, `.`, `_` and `-`, as in \
         vm1,socket=/run/vgpu/vm1.sock"
    )]
    Name(String),
    #[error(transparent)]
    Size(#[from] ParseSizeError),
    #[error(
        "window={0}: expected a power of two from {min} MiB to {max} MiB",
        min = MIN_SIZE >> 20,
        max = MAX_SIZE >> 20
    )]
    Window(u64),
    #[error("silence={0}: expected a number of seconds, 0 for no limit")]
    Silence(String),
    #[error("mode={0}: expected the mode of a socket, such as 660")]
    Mode(String),
    #[error("group={0}: expected a name or a number of a group, such as libvirt-qemu")]
    Group(String),
    #[error("{0:?}: expected socket=PATH, window=SIZE, silence=SECONDS, mode=MODE or group=GROUP")]
    Option(String),
    #[error("{0:?} needs socket=PATH with an absolute path, as in vm1,socket=/run/vgpu/vm1.sock")]
    Socket(String),
}

/// What `--vm` takes.
impl fmt::Display for VmOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let silence = self.silence.map_or(0, |silence| silence.as_secs());
        let (name, window, mode) = (&self.name, self.window, self.mode);
        write!(f, "{name},window={window},silence={silence},mode={mode:o}")?;
        let mut group = self.group.iter();
        group.try_for_each(|group| write!(f, ",group={group}"))?;
        write!(f, ",socket={}", self.socket.display())
    }
}

impl FromStr for VmOptions {
    type Err = ParseVmError;

    fn from_str(text: &str) -> Result<VmOptions, ParseVmError> {
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default();
        let is_name = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_name) {
            return Err(ParseVmError::Name(name.into()));
        }
        let mut options = VmOptions {
            name: name.into(),
            socket: PathBuf::new(),
            mode: DEFAULT_MODE,
            group: None,
            window: DEFAULT_SIZE,
            silence: Some(SILENCE),
        };
        for part in parts {
            match part.split_once('=') {
                Some(("socket", path)) => options.socket = path.into(),
                Some(("mode", text)) => {
                    let mode = parse_mode(text);
                    options.mode = mode.ok_or_else(|| ParseVmError::Mode(text.into()))?;
                }
                Some(("group", group)) => {
                    if group.is_empty() || !group.bytes().all(is_name) {
                        return Err(ParseVmError::Group(group.into()));
                    }
                    options.group = Some(group.into());
                }
                Some(("window", text)) => options.window = window_size(size::parse(text)?)?,
                Some(("silence", seconds)) => {
                    let number = seconds.parse();
                    let number: u64 = number.map_err(|_| ParseVmError::Silence(seconds.into()))?;
                    options.silence =
                        (number > 0).then(|| Duration::from_secs(number).max(MIN_SILENCE));
                }
                _ => return Err(ParseVmError::Option(part.into())),
            }
        }
        if !options.socket.is_absolute() {
            return Err(ParseVmError::Socket(text.into()));
        }
        Ok(options)
    }
}

fn window_size(size: u64) -> Result<usize, ParseVmError> {
    usize::try_from(size)
        .ok()
        .filter(|size| size.is_power_of_two() && (MIN_SIZE..=MAX_SIZE).contains(size))
        .ok_or(ParseVmError::Window(size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read() {
        let options: VmOptions = "vm1,socket=/run/v.sock".parse().unwrap();
        assert_eq!(options.window, 256 << 20);
        assert_eq!(options.silence, Some(SILENCE));
        assert_eq!((options.mode, options.group), (0o660, None));
        let text = "a-b.c,window=64M,silence=0,mode=0600,group=libvirt-qemu,socket=/s";
        let options: VmOptions = text.parse().unwrap();
        let expected = VmOptions {
            name: "a-b.c".into(),
            socket: "/s".into(),
            mode: 0o600,
            group: Some("libvirt-qemu".into()),
            window: 64 << 20,
            silence: None,
        };
        assert_eq!(options, expected);
        // As a supervisor passes them on.
        assert_eq!(expected.to_string().parse(), Ok(expected));
        let options: VmOptions = "a,socket=/s,silence=1".parse().unwrap();
        assert_eq!(options.silence, Some(Duration::from_secs(5)));
    }

    #[test]
    fn invalid_options_are_reported() {
        for (text, wanted) in [
            ("", "the name"),
            ("a b,socket=/s", "the name"),
            ("a", "socket=PATH"),
            ("a,socket=s", "absolute"),
            ("a,socket=/s,window=100M", "power of two"),
            ("a,socket=/s,window=1M", "power of two"),
            ("a,socket=/s,window=x", "unit"),
            ("a,socket=/s,silence=x", "seconds"),
            ("a,socket=/s,mode=999", "mode"),
            ("a,socket=/s,mode=1777", "mode"),
            ("a,socket=/s,group=", "group"),
            ("a,socket=/s,group=a b", "group"),
            ("a,socket=/s,colour=red", "colour"),
        ] {
            let error = text.parse::<VmOptions>().unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
