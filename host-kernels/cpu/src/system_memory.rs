//! The memory of the machine that this process may use: what `/proc/meminfo` and the control groups
//! report.
//!
//! A process is in a control group, which is in others up to the root. Each of them can have a
//! limit that counts all processes below it. The controller of memory is in version 2 or in
//! version 1 of the control groups (Linux, `Documentation/admin-guide/cgroup-v2.rst` and
//! `cgroup-v1/memory.rst`).

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// The largest file that is read, in bytes.
const MAX_FILE: usize = 16 << 10;

/// The files in which the kernel reports memory. The files are opened once: the process stays in
/// its control group, a sandbox may close the file system, and to open a file takes most of the
/// time.
pub(super) struct SystemMemory {
    /// `/proc/meminfo`.
    meminfo: Option<File>,
    /// `/proc/self/status`.
    status: Option<File>,
    /// The group of this process and those around it.
    groups: Vec<Group>,
}

/// Where a version of the control groups has what.
struct Hierarchy {
    /// Whether a line of `/proc/self/cgroup`, by its number and its controllers, is the one of this
    /// hierarchy.
    is_line: fn(&str, &str) -> bool,
    mount: &'static str,
    limits: &'static [&'static str],
    current: &'static str,
    /// The key in `memory.stat` of the pages that the kernel drops first, with those of the groups
    /// below.
    droppable: &'static str,
}

const HIERARCHIES: [Hierarchy; 2] = [
    Hierarchy {
        is_line: |number, _| number == "0",
        mount: "sys/fs/cgroup",
        limits: &["memory.high", "memory.max"],
        current: "memory.current",
        droppable: "inactive_file ",
    },
    Hierarchy {
        is_line: |_, controllers| controllers.split(',').any(|one| one == "memory"),
        mount: "sys/fs/cgroup/memory",
        limits: &["memory.limit_in_bytes"],
        current: "memory.usage_in_bytes",
        droppable: "total_inactive_file ",
    },
];

impl Hierarchy {
    /// The group of this process in the hierarchy, and those around it. `membership` is
    /// `/proc/self/cgroup`.
    fn groups(&self, root: &Path, membership: &str) -> Vec<Group> {
        let own = membership.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (number, controllers) = (parts.next()?, parts.next()?);
            let path = parts.next()?.strip_prefix('/')?;
            (self.is_line)(number, controllers).then_some(path)
        });
        let own = own.unwrap_or("");
        let mount = root.join(self.mount);
        // A path with `..` is outside of what this process sees of the hierarchy. In a container of
        // version 1 the path is often that of the host, and the mount is the container's own group:
        // the folders between have no files.
        let is_below = own.split('/').all(|name| name != "..");
        let own = mount.join(if is_below { own } else { "" });
        own.ancestors()
            .take_while(|group| group.starts_with(&mount))
            .map(|folder| Group::open(self, folder))
            .collect()
    }
}

/// A control group with a limit that can change.
struct Group {
    /// The limits of its memory: above the first the kernel slows it down, above the second it ends
    /// processes.
    limits: Vec<File>,
    current: Option<File>,
    stat: Option<File>,
    droppable: &'static str,
}

impl SystemMemory {
    /// The files of this machine.
    pub(super) fn of_this_machine() -> SystemMemory {
        SystemMemory::below(Path::new("/"))
    }

    /// The files below another root than `/`.
    pub(super) fn below(root: &Path) -> SystemMemory {
        let membership = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        let groups = HIERARCHIES
            .iter()
            .flat_map(|hierarchy| hierarchy.groups(root, &membership));
        let open = |path: &str| File::open(root.join(path)).ok();
        SystemMemory {
            meminfo: open("proc/meminfo"),
            status: open("proc/self/status"),
            groups: groups.collect(),
        }
    }

    /// The memory of the machine, or the smallest limit of a control group, in bytes.
    pub(super) fn total(&self) -> u64 {
        let limits = self.groups.iter().map(Group::limit);
        let physical = self.meminfo("MemTotal").unwrap_or(0);
        limits.fold(physical, u64::min)
    }

    /// The bytes that this process can still use before the machine or a control group is full.
    pub(super) fn available(&self) -> u64 {
        let free = self.groups.iter().map(Group::free);
        let available = self.meminfo("MemAvailable").unwrap_or(u64::MAX);
        free.fold(available, u64::min)
    }

    /// The bytes of anonymous memory of this process: what it has written to private mappings and
    /// to its heap, and is not swapped out.
    pub(super) fn anonymous(&self) -> u64 {
        let status = self.status.as_ref().map(contents).unwrap_or_default();
        kib(&status, "RssAnon").unwrap_or(0)
    }

    fn meminfo(&self, key: &str) -> Option<u64> {
        kib(&contents(self.meminfo.as_ref()?), key)
    }
}

/// The bytes of a line of `/proc/meminfo` or `/proc/self/status`, which count KiB.
fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let kib = line.trim().strip_suffix(" kB")?.trim();
    kib.parse::<u64>().ok()?.checked_mul(1024)
}

impl Group {
    fn open(hierarchy: &Hierarchy, folder: &Path) -> Group {
        let open = |name: &str| File::open(folder.join(name)).ok();
        Group {
            limits: { hierarchy.limits.iter() }
                .filter_map(|name| open(name))
                .collect(),
            current: open(hierarchy.current),
            stat: open("memory.stat"),
            droppable: hierarchy.droppable,
        }
    }

    /// The smallest limit in bytes; `u64::MAX` if there is none.
    fn limit(&self) -> u64 {
        let limits = self
            .limits
            .iter()
            .filter_map(|file| number(&contents(file)));
        limits.min().unwrap_or(u64::MAX)
    }

    /// The bytes below the limit. Pages of files that nobody has used for a while do not count as
    /// used, because the kernel drops them first.
    fn free(&self) -> u64 {
        let limit = self.limit();
        let current = self
            .current
            .as_ref()
            .and_then(|file| number(&contents(file)));
        let Some(current) = current.filter(|_| limit != u64::MAX) else {
            return u64::MAX;
        };
        let stat = self.stat.as_ref().map(contents).unwrap_or_default();
        let droppable = stat
            .lines()
            .find_map(|line| line.strip_prefix(self.droppable))
            .and_then(number);
        limit.saturating_sub(current.saturating_sub(droppable.unwrap_or(0)))
    }
}

/// The beginning of a file, as it is now.
fn contents(file: &File) -> String {
    let mut bytes = vec![0; MAX_FILE];
    let len = file.read_at(&mut bytes, 0).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

/// A number, or `None` for the word `max`.
fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A folder with the files of a machine of 1000 MiB, 600 of them available, and of a process
    /// with 5 MiB of anonymous memory, in the control group `a/b`.
    pub(crate) struct Machine(pub(crate) tempfile::TempDir);

    impl Machine {
        pub(crate) fn new() -> Machine {
            let machine = Machine(tempfile::tempdir().expect("a folder"));
            machine.write("proc/self/cgroup", "0::/a/b\n");
            machine.write(
                "proc/self/status",
                "Name:\tvgpu\nRssAnon:\t    5120 kB\nRssFile:\t 99999 kB\nRssShmem:\t 2048 kB\n",
            );
            machine.available(600);
            machine
        }

        pub(crate) fn available(&self, mib: u64) {
            let text = format!(
                "MemTotal:  {} kB\nMemAvailable:  {} kB\n",
                1000 << 10,
                mib << 10
            );
            self.write("proc/meminfo", &text);
        }

        pub(crate) fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }

        pub(crate) fn group(&self, path: &str, files: &[(&str, u64)]) {
            for (name, mib) in files {
                let path = format!("sys/fs/cgroup/{path}/{name}");
                self.write(&path, &format!("{}\n", mib << 20));
            }
        }
    }

    fn figures(machine: &Machine) -> (u64, u64) {
        let memory = SystemMemory::below(machine.0.path());
        (memory.total() / MIB, memory.available() / MIB)
    }

    #[test]
    fn without_limits_the_machine_decides() {
        let machine = Machine::new();
        assert_eq!(figures(&machine), (1000, 600));
        machine.write("sys/fs/cgroup/a/b/memory.max", "max\n");
        machine.group("a/b", &[("memory.current", 50)]);
        assert_eq!(figures(&machine), (1000, 600));
        assert_eq!(SystemMemory::below(machine.0.path()).anonymous(), 5 * MIB);
    }

    #[test]
    fn limits_of_the_group_and_of_its_parents_hold() {
        let machine = Machine::new();
        machine.group("a/b", &[("memory.max", 500), ("memory.current", 50)]);
        assert_eq!(figures(&machine), (500, 450));
        // Other processes in the parent have used most of what the parent has.
        machine.group("a", &[("memory.max", 400), ("memory.current", 390)]);
        assert_eq!(figures(&machine), (400, 10));
        // Pages of files that the kernel can drop.
        machine.write(
            "sys/fs/cgroup/a/memory.stat",
            &format!("anon 7\ninactive_file {}\n", 90 * MIB),
        );
        assert_eq!(figures(&machine), (400, 100));
        machine.group("a/b", &[("memory.high", 60)]);
        assert_eq!(figures(&machine), (60, 10));
        // A group beside them.
        machine.group("c", &[("memory.max", 1), ("memory.current", 1)]);
        assert_eq!(figures(&machine), (60, 10));
    }

    #[test]
    fn limits_of_version_1_hold() {
        let machine = Machine::new();
        let v1 = |path: &str, files: &[(&str, u64)]| {
            machine.group(&format!("memory/{path}"), files);
        };
        machine.write(
            "proc/self/cgroup",
            "5:devices:/a/b\n4:cpu,memory:/a/b\n0::/\n",
        );
        // The root of the hierarchy has no limit: a number of pages that no machine has.
        v1("", &[("memory.limit_in_bytes", u64::MAX >> 21)]);
        v1("", &[("memory.usage_in_bytes", 900)]);
        assert_eq!(figures(&machine), (1000, 600));
        v1("a/b", &[("memory.limit_in_bytes", 500)]);
        v1("a/b", &[("memory.usage_in_bytes", 120)]);
        assert_eq!(figures(&machine), (500, 380));
        machine.write(
            "sys/fs/cgroup/memory/a/b/memory.stat",
            &format!(
                "inactive_file {}\ntotal_inactive_file {}\n",
                7 * MIB,
                20 * MIB
            ),
        );
        assert_eq!(figures(&machine), (500, 400));
        v1("a", &[("memory.limit_in_bytes", 400)]);
        v1("a", &[("memory.usage_in_bytes", 390)]);
        assert_eq!(figures(&machine), (400, 10));
    }

    /// Docker and the kubelet mount the group of a container, whose process has the path of the
    /// host.
    #[test]
    fn the_mounted_group_of_a_container_of_version_1_holds() {
        let machine = Machine::new();
        machine.write("proc/self/cgroup", "4:memory:/kubepods/pod1/c\n0::/\n");
        machine.group("memory", &[("memory.limit_in_bytes", 300)]);
        machine.group("memory", &[("memory.usage_in_bytes", 100)]);
        assert_eq!(figures(&machine), (300, 200));
    }

    #[test]
    fn changes_of_a_limit_are_seen() {
        let machine = Machine::new();
        machine.group("a", &[("memory.max", 400), ("memory.current", 100)]);
        let memory = SystemMemory::below(machine.0.path());
        assert_eq!(memory.available(), 300 * MIB);
        machine.group("a", &[("memory.current", 350)]);
        assert_eq!(memory.available(), 50 * MIB);
    }

    #[test]
    fn a_path_outside_of_the_hierarchy_counts_as_its_root() {
        let machine = Machine::new();
        machine.write("proc/self/cgroup", "1:devices:/x\n0::/../a\n");
        machine.group("", &[("memory.max", 300), ("memory.current", 100)]);
        assert_eq!(figures(&machine), (300, 200));
    }
}
