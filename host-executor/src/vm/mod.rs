//! Virtual machines: each has a socket of its own, through which its device reaches us.

mod ivshmem;
mod stream;
#[cfg(feature = "vfio-user")]
mod vfio_user;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use vgpu_transport::link::pci::PciArrival;
use vgpu_transport::link::pci::directory::{DEFAULT_SIZE, MAX_SIZE, MIN_SIZE};

pub use ivshmem::IvshmemDoor;
pub use stream::{SocketFile, VmListenError, listen_stream};
#[cfg(feature = "vfio-user")]
pub use vfio_user::VfioUserDoor;
#[cfg(feature = "vfio-user")]
#[doc(hidden)]
pub use vfio_user::fuzzing;

use crate::server::{Guest, Peer};
use crate::tenant::LinkKind;

/// How long a guest process may be silent before it counts as dead.
const SILENCE: Duration = Duration::from_secs(60);

/// A virtual machine that is to be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmOptions {
    /// What it is called in logs, and by who keeps its files.
    pub name: String,
    /// The socket that its device connects to.
    pub socket: PathBuf,
    /// Bytes of its memory region.
    pub window: usize,
    /// How long a program in it may be silent before its session ends. (A host cannot see it die.) `None`: for ever.
    pub silence: Option<Duration>,
}

impl VmOptions {
    /// The guest that a program in this virtual machine is.
    fn guest(&self, arrival: PciArrival) -> Guest {
        Guest {
            peer: Peer {
                endpoint: format!("vm {} slot {}", self.name, arrival.slot()),
                link: LinkKind::Pci,
                machine: None,
                process: None,
                certificate: None,
            },
            open: Box::new(move || Ok(Box::new(arrival.handshake()?) as _)),
        }
    }
}

impl FromStr for VmOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<VmOptions, String> {
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default();
        let is_name = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        if name.is_empty() || name.len() > 64 || !name.bytes().all(is_name) {
            return Err(format!(
                "the name {name:?}: 1 to 64 letters, digits, `.`, `_` and `-`, as in vm1,socket=/run/vgpu/vm1.sock"
            ));
        }
        let mut options = VmOptions {
            name: name.into(),
            socket: PathBuf::new(),
            window: DEFAULT_SIZE,
            silence: Some(SILENCE),
        };
        for part in parts {
            match part.split_once('=') {
                Some(("socket", path)) => options.socket = path.into(),
                Some(("window", size)) => {
                    let size = crate::size::parse(size)?;
                    options.window = usize::try_from(size)
                        .ok()
                        .filter(|size| {
                            size.is_power_of_two() && (MIN_SIZE..=MAX_SIZE).contains(size)
                        })
                        .ok_or_else(|| {
                            format!(
                                "window={size}: a power of two from {} MiB to {} MiB",
                                MIN_SIZE >> 20,
                                MAX_SIZE >> 20
                            )
                        })?;
                }
                Some(("silence", seconds)) => {
                    let seconds: u64 = seconds.parse().map_err(|_| {
                        format!("silence={seconds}: a number of seconds, 0 for no limit")
                    })?;
                    // Guests beat once a second; less than a few beats would take a busy guest for a dead one.
                    options.silence = (seconds > 0).then(|| Duration::from_secs(seconds.max(5)));
                }
                _ => {
                    return Err(format!(
                        "{part:?}: it is socket=PATH, window=SIZE or silence=SECONDS"
                    ));
                }
            }
        }
        if !options.socket.is_absolute() {
            return Err(format!(
                "{text:?} needs socket=PATH with an absolute path, as in vm1,socket=/run/vgpu/vm1.sock"
            ));
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read() {
        let options: VmOptions = "vm1,socket=/run/v.sock".parse().unwrap();
        assert_eq!(options.window, 256 << 20);
        assert_eq!(options.silence, Some(SILENCE));
        let options: VmOptions = "a-b.c,window=64M,silence=0,socket=/s".parse().unwrap();
        assert_eq!(
            options,
            VmOptions {
                name: "a-b.c".into(),
                socket: "/s".into(),
                window: 64 << 20,
                silence: None,
            }
        );
        let options: VmOptions = "a,socket=/s,silence=1".parse().unwrap();
        assert_eq!(options.silence, Some(Duration::from_secs(5)));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, wanted) in [
            ("", "the name"),
            ("a b,socket=/s", "the name"),
            ("a", "socket=PATH"),
            ("a,socket=s", "absolute"),
            ("a,socket=/s,window=100M", "power of two"),
            ("a,socket=/s,window=1M", "power of two"),
            ("a,socket=/s,window=x", "unit"),
            ("a,socket=/s,silence=x", "seconds"),
            ("a,socket=/s,colour=red", "colour"),
        ] {
            let error = text.parse::<VmOptions>().unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
