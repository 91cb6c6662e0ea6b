//! The topology of the machine: hardware threads of one core, and memory nodes (NUMA).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity};

/// Where Linux describes the topology.
const SYSTEM: &str = "/sys/devices/system";

/// The hardware threads that this process may use, by core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Topology {
    /// The hardware threads of each core, ordered by the first.
    cores: Vec<Vec<usize>>,
}

impl Topology {
    /// The topology that Linux reports. A hardware thread without an entry counts as a core.
    pub(super) fn of_this_process() -> Topology {
        // The call fails for threads that are gone.
        let allowed = sched_getaffinity(None);
        let allowed = allowed.map_or(vec![0], |set| {
            (0..CpuSet::MAX_CPU)
                .filter(|&cpu| set.is_set(cpu))
                .collect()
        });
        Topology::read(Path::new(SYSTEM), &allowed)
    }

    /// The topology of the hardware threads `allowed`, from the files below `system`.
    fn read(system: &Path, allowed: &[usize]) -> Topology {
        let mut cores: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &cpu in allowed {
            let folder = system.join(format!("cpu/cpu{cpu}/topology"));
            // The second is the older name.
            let siblings = ["core_cpus_list", "thread_siblings_list"]
                .iter()
                .find_map(|file| list(&fs::read_to_string(folder.join(file)).ok()?));
            // A core is known by its first processor, which need not be one of ours.
            let first = siblings.and_then(|siblings| {
                (siblings.contains(&cpu)).then(|| siblings.into_iter().min())?
            });
            cores.entry(first.unwrap_or(cpu)).or_default().push(cpu);
        }
        Topology {
            cores: cores.into_values().collect(),
        }
    }

    /// The number of cores.
    pub(super) fn cores(&self) -> usize {
        self.cores.len().max(1)
    }

    /// CPU sets for pinning, in order: first one thread per core, then the second threads.
    pub(super) fn places(&self) -> Vec<CpuSet> {
        let most = self.cores.iter().map(Vec::len).max().unwrap_or(0);
        let in_order =
            (0..most).flat_map(|i| self.cores.iter().filter_map(move |core| core.get(i)));
        in_order
            .map(|&cpu| {
                let mut set = CpuSet::new();
                set.set(cpu);
                set
            })
            .collect()
    }
}

/// The NUMA nodes of this machine; one node if Linux reports none.
pub(super) fn memory_nodes() -> Vec<usize> {
    nodes_below(Path::new(SYSTEM))
}

fn nodes_below(system: &Path) -> Vec<usize> {
    let text = fs::read_to_string(system.join("node/has_memory"));
    let nodes = text.ok().and_then(|text| list(&text));
    nodes.filter(|nodes| !nodes.is_empty()).unwrap_or(vec![0])
}

/// The numbers of a list such as `0-3,8`; `None` if the text is no list.
fn list(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse::<usize>().ok()?);
        // More than any Linux has: not a list of processors.
        if last >= 1 << 16 {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A temporary tree of files.
    struct Tree(PathBuf, #[allow(dead_code)] tempfile::TempDir);

    impl Tree {
        fn new(files: &[(&str, &str)]) -> Tree {
            let folder = tempfile::tempdir().unwrap();
            let root = folder.path().to_owned();
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Tree(root, folder)
        }
    }

    fn places(topology: &Topology) -> Vec<usize> {
        let first = |set: &CpuSet| (0..CpuSet::MAX_CPU).find(|&cpu| set.is_set(cpu));
        topology.places().iter().filter_map(first).collect()
    }

    #[test]
    fn threads_of_a_core_count_once() {
        // Four cores of two threads, numbered as many servers do; a file of an older kernel among
        // them.
        let tree = Tree::new(&[
            ("cpu/cpu0/topology/core_cpus_list", "0,4\n"),
            ("cpu/cpu1/topology/core_cpus_list", "1,5\n"),
            ("cpu/cpu2/topology/thread_siblings_list", "2,6\n"),
            ("cpu/cpu3/topology/core_cpus_list", "3,7\n"),
            ("cpu/cpu4/topology/core_cpus_list", "0,4\n"),
            ("cpu/cpu5/topology/core_cpus_list", "1,5\n"),
            ("cpu/cpu6/topology/core_cpus_list", "2,6\n"),
            ("cpu/cpu7/topology/core_cpus_list", "3,7\n"),
        ]);
        let all = Topology::read(&tree.0, &[0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(all.cores(), 4);
        assert_eq!(places(&all), [0, 1, 2, 3, 4, 5, 6, 7]);
        // A process that may use some: a core of which it has one thread is a core.
        let some = Topology::read(&tree.0, &[1, 4, 5, 6]);
        assert_eq!(some.cores(), 3);
        assert_eq!(places(&some), [4, 1, 6, 5]);
    }

    #[test]
    fn adjacent_hardware_threads_of_a_core_are_recognised() {
        let tree = Tree::new(&[
            ("cpu/cpu0/topology/core_cpus_list", "0-1"),
            ("cpu/cpu1/topology/core_cpus_list", "0-1"),
            ("cpu/cpu2/topology/core_cpus_list", "2-3"),
            ("cpu/cpu3/topology/core_cpus_list", "2-3"),
        ]);
        let all = Topology::read(&tree.0, &[0, 1, 2, 3]);
        assert_eq!((all.cores(), places(&all)), (2, vec![0, 2, 1, 3]));
    }

    #[test]
    fn cpus_with_unreadable_topology_count_as_cores() {
        let tree = Tree::new(&[
            ("cpu/cpu0/topology/core_cpus_list", "nonsense"),
            ("cpu/cpu1/topology/core_cpus_list", "2-3"), // not itself
            ("cpu/cpu2/topology/core_cpus_list", ""),
            ("cpu/cpu3/topology/core_cpus_list", "0-99999999999"),
        ]);
        assert_eq!(Topology::read(&tree.0, &[0, 1, 2, 3, 4]).cores(), 5);
        assert_eq!(Topology::read(Path::new("/nowhere"), &[]).cores(), 1);
        let here = Topology::of_this_process();
        assert!(
            (1..=here.places().len()).contains(&here.cores()),
            "{here:?}"
        );
    }

    #[test]
    fn nodes_with_memory_are_listed() {
        let tree = Tree::new(&[("node/has_memory", "0-1,3\n")]);
        assert_eq!(nodes_below(&tree.0), [0, 1, 3]);
        assert_eq!(nodes_below(Path::new("/nowhere")), [0]);
        let tree = Tree::new(&[("node/has_memory", "\n")]);
        assert_eq!(nodes_below(&tree.0), [0]);
    }
}
