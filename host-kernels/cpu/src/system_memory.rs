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
struct Version {
    /// The type of its file systems.
    file_system: &'static str,
    /// The controller that its line in `/proc/self/cgroup` names, and the options of its mount.
    /// Version 2 has one hierarchy, whose line names none.
    controller: &'static str,
    limits: &'static [&'static str],
    current: &'static str,
    /// The key in `memory.stat` of the pages that the kernel drops first, with those of the groups
    /// below.
    droppable: &'static str,
    /// The key in `memory.stat` of the smallest limit of the group and of those around it, which a
    /// container does not see.
    inherited_limit: Option<&'static str>,
}

const VERSIONS: [Version; 2] = [
    Version {
        file_system: "cgroup2",
        controller: "",
        limits: &["memory.high", "memory.max"],
        current: "memory.current",
        droppable: "inactive_file ",
        inherited_limit: None,
    },
    Version {
        file_system: "cgroup",
        controller: "memory",
        limits: &["memory.limit_in_bytes"],
        current: "memory.usage_in_bytes",
        droppable: "total_inactive_file ",
        inherited_limit: Some("hierarchical_memory_limit "),
    },
];

/// The smallest limit of a group of version 1 that is none: the largest multiple of a page of
/// 64 KiB in 63 bits.
const NO_LIMIT: u64 = (i64::MAX as u64) & !0xffff;

impl Version {
    /// The group of this process and those around it, as far as the process sees them.
    /// `membership` is `/proc/self/cgroup`, and `mounts` is `/proc/self/mountinfo` (proc(5)).
    fn groups(&'static self, root: &Path, membership: &str, mounts: &str) -> Vec<Group> {
        let own = membership.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            controllers
                .split(',')
                .any(|one| one == self.controller)
                .then_some(path)
        });
        let mount = mounts.lines().find_map(|line| self.mount(line));
        let (Some(own), Some((of_mount, mount))) = (own, mount) else {
            return Vec::new();
        };
        let mount = root.join(mount.trim_start_matches('/'));
        // The mount may begin at a group: that of a container, whose process has the path of the
        // host. A path with `..` is outside of what this process sees.
        let below = own.strip_prefix(of_mount.trim_end_matches('/'));
        let below = below.filter(|path| path.is_empty() || path.starts_with('/'));
        let below = below.map_or("", |path| path.trim_start_matches('/'));
        let is_below = below.split('/').all(|name| name != "..");
        let own = mount.join(if is_below { below } else { "" });
        own.ancestors()
            .take_while(|group| group.starts_with(&mount))
            .map(|folder| Group::open(self, folder))
            .collect()
    }

    /// The group at which a mount of this version begins, and where it is mounted.
    fn mount<'a>(&self, line: &'a str) -> Option<(&'a str, &'a str)> {
        let (place, source) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (of_mount, mount) = (place.next()?, place.next()?);
        let mut source = source.split(' ');
        let (kind, options) = (source.next()?, source.nth(1)?);
        let is_own = self.controller.is_empty()
            || options.split(',').any(|option| option == self.controller);
        (kind == self.file_system && is_own).then_some((of_mount, mount))
    }
}

/// A control group with a limit that can change.
struct Group {
    version: &'static Version,
    /// The limits of its memory. Version 2: above the first the kernel slows it down, above the
    /// second it ends processes. Version 1: it ends processes.
    limits: Vec<File>,
    current: Option<File>,
    stat: Option<File>,
}

impl SystemMemory {
    /// The files of this machine.
    pub(super) fn of_this_machine() -> SystemMemory {
        SystemMemory::below(Path::new("/"))
    }

    /// The files below another root than `/`.
    pub(super) fn below(root: &Path) -> SystemMemory {
        let membership = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
        let groups = VERSIONS
            .iter()
            .flat_map(|version| version.groups(root, &membership, &mounts));
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
    fn open(version: &'static Version, folder: &Path) -> Group {
        let open = |name: &str| File::open(folder.join(name)).ok();
        Group {
            version,
            limits: { version.limits.iter() }
                .filter_map(|name| open(name))
                .collect(),
            current: open(version.current),
            stat: open("memory.stat"),
        }
    }

    /// A line of `memory.stat`.
    fn statistic(&self, key: &str) -> Option<u64> {
        let stat = contents(self.stat.as_ref()?);
        let value = stat.lines().find_map(|line| line.strip_prefix(key));
        value.and_then(number)
    }

    /// The smallest limit in bytes; `u64::MAX` if there is none.
    fn limit(&self) -> u64 {
        let own = { self.limits.iter() }.filter_map(|file| number(&contents(file)));
        let inherited = self.version.inherited_limit;
        let inherited = inherited.and_then(|key| self.statistic(key));
        { own.chain(inherited) }
            .filter(|limit| *limit < NO_LIMIT)
            .min()
            .unwrap_or(u64::MAX)
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
        let droppable = self.statistic(self.version.droppable);
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

    /// Mounts of a machine with version 2, of one with both, where the controllers of version 1
    /// have mounts, and of a container there.
    const MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
    const BOTH: &str = "\
        31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs rw,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
        33 31 0:30 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n\
        34 31 0:31 / /sys/fs/cgroup/cpu,memory rw - cgroup cgroup rw,cpu,memory\n";
    const CONTAINER: &str =
        "40 39 0:31 /kubepods/pod1/c /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";

    /// A folder with the files of a machine of 1000 MiB, 600 of them available, and of a process
    /// with 5 MiB of anonymous memory, in the control group `a/b`.
    pub(crate) struct Machine(pub(crate) tempfile::TempDir);

    impl Machine {
        pub(crate) fn new() -> Machine {
            let machine = Machine(tempfile::tempdir().expect("a folder"));
            machine.write("proc/self/cgroup", "0::/a/b\n");
            machine.write("proc/self/mountinfo", MOUNT);
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
        machine.write("proc/self/mountinfo", BOTH);
        machine.write(
            "proc/self/cgroup",
            "5:devices:/x\n4:cpu,memory:/a/b\n0::/a/b\n",
        );
        let group = |path: &str, files: &[(&str, u64)]| {
            machine.group(&format!("cpu,memory/{path}"), files);
        };
        // The root of the hierarchy has no limit, whatever is used in it.
        machine.write(
            "sys/fs/cgroup/cpu,memory/memory.limit_in_bytes",
            "9223372036854771712\n",
        );
        group("", &[("memory.usage_in_bytes", 1 << 43)]);
        assert_eq!(figures(&machine), (1000, 600));
        group("a/b", &[("memory.limit_in_bytes", 500)]);
        group("a/b", &[("memory.usage_in_bytes", 120)]);
        assert_eq!(figures(&machine), (500, 380));
        // Pages of files that the kernel can drop, in the group and below.
        let stat = format!(
            "inactive_file {}\nhierarchical_memory_limit 9223372036854771712\n\
             total_inactive_file {}\n",
            7 * MIB,
            20 * MIB
        );
        machine.write("sys/fs/cgroup/cpu,memory/a/b/memory.stat", &stat);
        assert_eq!(figures(&machine), (500, 400));
        group("a", &[("memory.limit_in_bytes", 400)]);
        group("a", &[("memory.usage_in_bytes", 390)]);
        assert_eq!(figures(&machine), (400, 10));
        // The hierarchy of version 2 without the controller, and a group of another one.
        machine.group("unified/a/b", &[("memory.max", 1), ("memory.current", 1)]);
        machine.group("devices/x", &[("memory.limit_in_bytes", 1)]);
        assert_eq!(figures(&machine), (1, 0));
        fs::remove_file(
            machine
                .0
                .path()
                .join("sys/fs/cgroup/unified/a/b/memory.max"),
        )
        .unwrap();
        assert_eq!(figures(&machine), (400, 10));
    }

    /// Docker and the kubelet mount the group of a container, whose process has the path of the
    /// host, perhaps of a group below.
    #[test]
    fn the_mounted_group_of_a_container_of_version_1_holds() {
        let machine = Machine::new();
        machine.write("proc/self/mountinfo", CONTAINER);
        machine.write("proc/self/cgroup", "4:memory:/kubepods/pod1/c\n0::/\n");
        machine.group("memory", &[("memory.limit_in_bytes", 300)]);
        machine.group("memory", &[("memory.usage_in_bytes", 100)]);
        assert_eq!(figures(&machine), (300, 200));
        // A group around the container has a smaller limit.
        let stat = format!("hierarchical_memory_limit {}\n", 250 * MIB);
        machine.write("sys/fs/cgroup/memory/memory.stat", &stat);
        assert_eq!(figures(&machine), (250, 150));
        machine.write("proc/self/cgroup", "4:memory:/kubepods/pod1/c/sub\n");
        machine.group("memory/sub", &[("memory.limit_in_bytes", 120)]);
        machine.group("memory/sub", &[("memory.usage_in_bytes", 100)]);
        assert_eq!(figures(&machine), (120, 20));
        // A group beside the mounted one.
        machine.write("proc/self/cgroup", "4:memory:/kubepods/pod1/c2/sub\n");
        assert_eq!(figures(&machine), (250, 150));
        // With a namespace of its own the process sees its group as the root.
        machine.write("proc/self/cgroup", "4:memory:/\n");
        assert_eq!(figures(&machine), (250, 150));
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
        machine.write("proc/self/cgroup", "0::/../a\n");
        machine.group("", &[("memory.max", 300), ("memory.current", 100)]);
        assert_eq!(figures(&machine), (300, 200));
    }
}
