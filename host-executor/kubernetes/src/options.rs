//! What an operator chooses.

use std::path::PathBuf;
use std::time::Duration;

/// The most seats: an executor takes as many guests over its control socket.
const MAX_SEATS: u32 = 1024;

/// A slice is a multiple of this many bytes.
pub(crate) const SLICE_UNIT: u64 = 1 << 20;

/// How a device plugin or a driver works.
#[derive(Debug, Clone)]
pub struct Options {
    /// The control socket of the executor.
    pub control: PathBuf,
    /// The folder of the kubelet, such as `/var/lib/kubelet`.
    pub kubelet: PathBuf,
    /// The folder on the host in which each seat, or each claim, has a folder with its socket. The
    /// executor sees it at the same path.
    pub sockets: PathBuf,
    /// The guest plugin, `libggml-vgpu.so`, on the host. This process sees it at the same path.
    pub plugin: PathBuf,
    /// Where the kernel says which NUMA node a GPU is near, such as `/sys`.
    pub sysfs: PathBuf,
    /// How many containers may use the executor at once, or how many claims each of its devices.
    pub seats: u32,
    /// Bytes of a slice of memory, or of what a claim has that asks for no memory.
    pub slice: u64,
    /// How often executor and kubelet are asked.
    pub interval: Duration,
    /// How long a guest stays whose container is gone.
    pub grace: Duration,
    /// The name of the pod of this plugin. A kubelet that does not list it has just started, and
    /// does not know its pods yet.
    pub pod: Option<String>,
    /// Serves claims of Dynamic Resource Allocation, and not the resources of a device plugin.
    pub claims: Option<ClaimOptions>,
}

/// How claims of Dynamic Resource Allocation are served.
#[derive(Debug, Clone)]
pub struct ClaimOptions {
    /// The name of this node in the cluster.
    pub node: String,
    /// The folder in which the container runtime finds devices (CDI), on the host and here.
    pub cdi: PathBuf,
    /// The address of the API server, such as `https://10.96.0.1:443`.
    pub server: String,
    /// The folder of the account at the API server, with the files `token` and `ca.crt`.
    pub account: PathBuf,
}

/// Why a device plugin cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum OptionsError {
    #[error("{0} seats: expected 1 to {MAX_SEATS}")]
    Seats(u32),
    #[error("a slice of {0} bytes: expected a multiple of 1 MiB")]
    Slice(u64),
    #[error("{}: the path has to be absolute", .0.display())]
    RelativePath(PathBuf),
    #[error("{0}: expected https://HOST:PORT, or http://127.0.0.1:PORT: the token is secret")]
    ApiServer(String),
    #[error("the name {0:?} of the node: expected letters, digits, `.` and `-`")]
    Node(String),
}

impl Options {
    /// Checks the numbers and paths.
    ///
    /// # Errors
    /// [`OptionsError`] names the first mistake.
    pub fn check(&self) -> Result<(), OptionsError> {
        if !(1..=MAX_SEATS).contains(&self.seats) {
            return Err(OptionsError::Seats(self.seats));
        }
        if self.slice == 0 || !self.slice.is_multiple_of(SLICE_UNIT) {
            return Err(OptionsError::Slice(self.slice));
        }
        for path in [&self.sockets, &self.plugin] {
            if !path.is_absolute() {
                return Err(OptionsError::RelativePath(path.clone()));
            }
        }
        if let Some(claims) = &self.claims {
            let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b"-.".contains(&b);
            if claims.node.is_empty() || !claims.node.bytes().all(is_allowed) {
                return Err(OptionsError::Node(claims.node.clone()));
            }
            let plain = claims.server.strip_prefix("http://");
            let is_loopback = plain.is_some_and(|host| host.starts_with("127.0.0.1:"));
            if !is_loopback && !claims.server.starts_with("https://") {
                return Err(OptionsError::ApiServer(claims.server.clone()));
            }
            if !claims.cdi.is_absolute() {
                return Err(OptionsError::RelativePath(claims.cdi.clone()));
            }
        }
        Ok(())
    }

    /// The folder with the sockets of the kubelet and of device plugins.
    pub(crate) fn device_plugins(&self) -> PathBuf {
        self.kubelet.join("device-plugins")
    }

    /// The socket at which the kubelet takes registrations.
    pub(crate) fn registration(&self) -> PathBuf {
        self.device_plugins().join("kubelet.sock")
    }

    /// The socket at which the kubelet says which container has which devices.
    pub(crate) fn pod_resources(&self) -> PathBuf {
        self.kubelet.join("pod-resources/kubelet.sock")
    }

    /// The folder with the socket of a seat or claim.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        self.sockets.join(name)
    }

    /// The socket of a seat or claim.
    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.folder(name).join("vgpu.sock")
    }
}

#[cfg(test)]
impl Options {
    /// Options that are valid.
    pub(crate) fn for_tests() -> Options {
        Options {
            control: "/run/vgpu/control.sock".into(),
            kubelet: "/var/lib/kubelet".into(),
            sockets: "/run/vgpu/pods".into(),
            plugin: "/usr/lib/vgpu/libggml-vgpu.so".into(),
            sysfs: "/sys".into(),
            seats: 16,
            slice: 1 << 30,
            interval: Duration::from_secs(2),
            grace: Duration::from_secs(10),
            pod: None,
            claims: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_named() {
        let valid = Options::for_tests();
        assert_eq!(valid.check(), Ok(()));
        let with = |change: &dyn Fn(&mut Options)| {
            let mut options = valid.clone();
            change(&mut options);
            options.check()
        };
        assert_eq!(with(&|o| o.seats = 0), Err(OptionsError::Seats(0)));
        assert_eq!(with(&|o| o.seats = 1025), Err(OptionsError::Seats(1025)));
        assert_eq!(with(&|o| o.slice = 0), Err(OptionsError::Slice(0)));
        assert_eq!(with(&|o| o.slice = 1000), Err(OptionsError::Slice(1000)));
        let relative = |path: &str| Err(OptionsError::RelativePath(path.into()));
        assert_eq!(with(&|o| o.sockets = "pods".into()), relative("pods"));
        assert_eq!(with(&|o| o.plugin = "lib.so".into()), relative("lib.so"));
        let claims = |node: &str, cdi: &str| {
            with(&|o| {
                o.claims = Some(ClaimOptions {
                    node: node.into(),
                    cdi: cdi.into(),
                    server: "https://10.96.0.1:443".into(),
                    account: "account".into(),
                });
            })
        };
        assert_eq!(claims("node-1.example", "/run/cdi"), Ok(()));
        assert_eq!(claims("node", "cdi"), relative("cdi"));
        for server in [
            "http://10.96.0.1",
            "http://127.0.0.1.example.org",
            "10.96.0.1",
        ] {
            let refused = with(&|o| {
                o.claims = Some(ClaimOptions {
                    node: "node".into(),
                    cdi: "/run/cdi".into(),
                    server: server.into(),
                    account: "account".into(),
                });
            });
            assert_eq!(refused, Err(OptionsError::ApiServer(server.into())));
        }
        for node in ["", "a/b", "a?"] {
            assert_eq!(
                claims(node, "/run/cdi"),
                Err(OptionsError::Node(node.into()))
            );
        }
    }
}
