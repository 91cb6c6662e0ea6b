//! The files of virtual machines that a service manager keeps while an executor is replaced.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use tracing::{info, warn};

use crate::service;

/// The files of a virtual machine that outlive an executor: its memory, its doorbell, and the
/// socket to its QEMU.
const PARTS: [&str; 3] = ["memory", "bell", "line"];

/// How many files of a virtual machine outlive an executor.
pub const FILES_OF_VM: usize = PARTS.len();

/// The names of a virtual machine's files in the fd store, in the order of [`PARTS`].
pub(crate) fn names(vm: &str) -> [String; FILES_OF_VM] {
    PARTS.map(|part| format!("vgpu-{vm}-{part}"))
}

/// The virtual machine and the part that a name in the fd store stands for.
fn parse(name: &str) -> Option<(&str, &str)> {
    let (vm, part) = name.strip_prefix("vgpu-")?.rsplit_once('-')?;
    PARTS.contains(&part).then_some((vm, part))
}

/// Takes the files of a virtual machine out of `stored`, by name: all three or none. A part of them
/// is of no use: the service manager is told to release it.
pub(crate) fn take_stored(
    stored: &mut BTreeMap<String, OwnedFd>,
    vm: &str,
) -> BTreeMap<String, OwnedFd> {
    let names = names(vm);
    let files: BTreeMap<_, _> = { names.iter() }
        .filter_map(|name| stored.remove_entry(name))
        .collect();
    if files.len() == names.len() || files.is_empty() {
        return files;
    }
    let missing: Vec<_> = { names.iter() }
        .filter(|name| !files.contains_key(*name))
        .map(String::as_str)
        .collect();
    warn!(
        vm,
        "the service manager has kept {} of the {} files of this virtual machine, and not {}: the \
         machine has no vGPU until its QEMU is started again",
        files.len(),
        names.len(),
        missing.join(", ")
    );
    files.keys().for_each(|name| service::remove(name));
    BTreeMap::new()
}

/// Virtual machines in the fd store that the configuration does not have.
///
/// A mistake in the configuration must not cost a running machine its device. Its files are kept
/// until its QEMU has ended, and the next configuration may have the machine again.
#[derive(Debug, Default)]
pub struct UnservedMachines {
    /// The machines that the log has named.
    reported: BTreeSet<String>,
}

impl UnservedMachines {
    /// Releases the files of machines whose QEMU has ended, and logs once which others are kept.
    /// `served`: the machines of the configuration, which are left alone.
    pub fn check(&mut self, served: &BTreeSet<&str>) {
        let (mut kept, mut ended) = (BTreeSet::new(), Vec::new());
        let mut connected = BTreeSet::new();
        service::for_each_stored(|name, file| match parse(name) {
            Some((vm, _)) if served.contains(vm) => {}
            Some((vm, part)) => {
                kept.insert(vm.to_owned());
                if part == "line" && !has_hung_up(file) {
                    connected.insert(vm.to_owned());
                }
            }
            None => ended.push(name.to_owned()),
        });
        if !ended.is_empty() {
            warn!(
                "the service manager has kept files that this version does not know; they are \
                 released: {}",
                ended.join(", ")
            );
        }
        self.reported.retain(|vm| connected.contains(vm));
        for vm in kept {
            if !connected.contains(&vm) {
                info!(
                    vm,
                    "QEMU has ended; the configuration does not have this virtual machine, and \
                     its files are released"
                );
                ended.extend(names(&vm));
            } else if self.reported.insert(vm.clone()) {
                warn!(
                    vm,
                    "the configuration does not have this virtual machine, whose QEMU is running, \
                     now without a vGPU; its files are kept until QEMU ends: {}. If the machine \
                     is missing by mistake, add it, and reload (with --isolate: restart)",
                    names(&vm).join(", ")
                );
            }
        }
        ended.iter().for_each(|name| service::remove(name));
    }
}

/// Whether the other end of a socket is closed.
fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    match rustix::event::poll(&mut fds, Some(&at_once)) {
        Ok(count) => count > 0 && fds[0].revents().intersects(ended),
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn stored(vm: &str) -> Vec<String> {
        let files = service::stored_files().unwrap();
        let own = files.into_keys().filter(|name| {
            let known = parse(name);
            known.is_some_and(|(known, _)| known == vm)
        });
        own.collect()
    }

    fn store(vm: &str) -> UnixStream {
        let (line, qemu) = UnixStream::pair().unwrap();
        for name in names(vm) {
            service::store(&name, line.as_fd());
        }
        qemu
    }

    #[test]
    fn names_in_the_fd_store_are_those_of_one_machine() {
        for vm in ["a", "a-line", "a-memory-line", "vgpu-a"] {
            for (name, part) in names(vm).iter().zip(PARTS) {
                assert_eq!(parse(name), Some((vm, part)));
            }
        }
        for name in ["", "vgpu", "vgpu-a", "vgpu-a-window", "a-memory", "stored"] {
            assert_eq!(parse(name), None, "{name}");
        }
    }

    /// A configuration without a machine keeps its files while its QEMU runs.
    #[test]
    fn files_of_a_machine_that_is_not_served_are_kept_until_its_qemu_ends() {
        let (qemu, served_qemu) = (store("unserved-1"), store("served-1"));
        let mut machines = UnservedMachines::default();
        let all = service::stored_files().unwrap();
        let others = { all.keys() }.filter_map(|name| Some(parse(name)?.0));
        // Other tests of this process have machines, too.
        let served = others.filter(|vm| *vm != "unserved-1").collect();
        for _ in 0..2 {
            machines.check(&served);
            assert_eq!(stored("unserved-1").len(), FILES_OF_VM);
        }
        assert!(machines.reported.contains("unserved-1"));
        drop((qemu, served_qemu));
        machines.check(&served);
        assert!(stored("unserved-1").is_empty());
        assert!(machines.reported.is_empty());
        // Its listener sees the end.
        assert_eq!(stored("served-1").len(), FILES_OF_VM);
    }

    #[test]
    fn parts_of_the_files_of_a_machine_are_released() {
        let _qemu = store("part-1");
        service::remove("vgpu-part-1-bell");
        let mut files = service::stored_files().unwrap();
        assert!(take_stored(&mut files, "part-1").is_empty());
        assert!(stored("part-1").is_empty());
        let _qemu = store("part-1");
        let mut files = service::stored_files().unwrap();
        assert_eq!(take_stored(&mut files, "part-1").len(), FILES_OF_VM);
        assert!(!files.contains_key("vgpu-part-1-line"));
        assert_eq!(stored("part-1").len(), FILES_OF_VM);
    }
}
