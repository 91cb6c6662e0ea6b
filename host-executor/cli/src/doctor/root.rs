//! The files of the machine that is checked. A test names a folder that stands for `/`.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::process::{getegid, geteuid, getgroups};
use vgpu_transport::link::Endpoint;

/// The root of a file system.
#[derive(Debug, Clone)]
pub(super) struct Root(PathBuf);

impl Root {
    pub(super) fn new(folder: &Path) -> Root {
        Root(folder.to_owned())
    }

    /// Whether this is the file system that programs of this process see.
    pub(super) fn is_own(&self) -> bool {
        self.0 == Path::new("/")
    }

    pub(super) fn folder(&self) -> &Path {
        &self.0
    }

    /// The file at an absolute path of the machine.
    pub(super) fn path(&self, absolute: impl AsRef<Path>) -> PathBuf {
        let absolute = absolute.as_ref();
        self.0.join(absolute.strip_prefix("/").unwrap_or(absolute))
    }

    /// The path of the machine at which `path` of this process is.
    pub(super) fn absolute(&self, path: &Path) -> PathBuf {
        Path::new("/").join(path.strip_prefix(&self.0).unwrap_or(path))
    }

    pub(super) fn read(&self, absolute: &str) -> Option<String> {
        fs::read_to_string(self.path(absolute)).ok()
    }

    pub(super) fn has(&self, absolute: &str) -> bool {
        self.path(absolute).exists()
    }

    /// An endpoint of the machine, for this process.
    pub(super) fn endpoint(&self, endpoint: &Endpoint) -> Endpoint {
        match endpoint {
            Endpoint::Unix(path) if !self.is_own() => Endpoint::Unix(self.path(path)),
            other => other.clone(),
        }
    }

    /// Whether systemd runs the services of the machine.
    pub(super) fn has_systemd(&self) -> bool {
        self.has("/run/systemd/system")
    }

    pub(super) fn is_container(&self) -> bool {
        self.has("/.dockerenv") || self.has("/run/.containerenv")
    }

    /// The distribution, such as `debian`, and its version: `ID` and `VERSION_ID` of os-release.
    pub(super) fn distribution(&self) -> (String, f64) {
        let text = self.read("/etc/os-release").unwrap_or_default();
        let value = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap_or_default().trim_matches('"').to_owned()
        };
        let version = value("VERSION_ID=").parse();
        (value("ID="), version.unwrap_or(0.0))
    }

    /// The name of a user or group with this number in `/etc/passwd` or `/etc/group`.
    fn name_in(&self, file: &str, number: u32) -> Option<String> {
        let text = self.read(file)?;
        let line = text.lines().find(|line| {
            let field = line.split(':').nth(2);
            field.and_then(|field| field.parse().ok()) == Some(number)
        })?;
        Some(line.split(':').next()?.to_owned())
    }

    /// Why this user may not open `socket`, and what to do.
    pub(super) fn no_permission(&self, socket: &Path) -> (String, String) {
        // The folder of the socket may be closed, too.
        let seen =
            { socket.ancestors() }.find_map(|place| Some((place, fs::metadata(place).ok()?)));
        let Some((place, file)) = seen else {
            let next = format!("sudo ls -l {}", socket.display());
            return (format!("no permission for {}", socket.display()), next);
        };
        let (user, group) = (geteuid().as_raw(), file.gid());
        let user_name = self.name_in("/etc/passwd", user);
        let user_name = user_name.unwrap_or_else(|| user.to_string());
        let group_name = self.name_in("/etc/group", group);
        let shown = group_name.clone().unwrap_or_else(|| group.to_string());
        let (place, mode) = (place.display(), file.mode() & 0o7777);
        let has_group = getegid().as_raw() == group
            || getgroups().is_ok_and(|all| all.iter().any(|own| own.as_raw() == group));
        if has_group {
            let what = format!(
                "{place} has mode {mode:03o}, which keeps its group {shown} out, and this process \
                 is in that group"
            );
            return (what, format!("sudo chmod g+rw {place}"));
        }
        let what = format!(
            "{place} is for the group {shown} (mode {mode:03o}), and this process, of the user \
             {user_name}, is not in it"
        );
        let next = match group_name {
            _ if self.is_container() => {
                format!("start the container with --group-add {group}")
            }
            Some(name) if self.has_member(&name, &user_name) => {
                format!("newgrp {name}")
            }
            Some(name) => format!("sudo usermod --append --groups {name} {user_name}"),
            None => format!("sudo chgrp vgpu {place}"),
        };
        (what, next)
    }

    /// Whether `/etc/group` has a user in a group: from the user's next login on.
    fn has_member(&self, group: &str, user: &str) -> bool {
        let text = self.read("/etc/group").unwrap_or_default();
        let members = text.lines().find_map(|line| {
            let rest = line.strip_prefix(group)?.strip_prefix(':')?;
            rest.rsplit(':').next()
        });
        members.is_some_and(|members| members.split(',').any(|member| member == user))
    }
}
