//! The files of virtual machines that the service manager keeps.

use std::collections::BTreeSet;

use anyhow::Context as _;
use vgpu_executor::config::{Settings, VmDevice};
use vgpu_executor::service;
use vgpu_executor::vm::{FILES_OF_VM, UnservedMachines};

/// Looks after the files of virtual machines that the configuration does not have.
#[derive(Default)]
pub(super) struct KeptMachines(UnservedMachines);

impl KeptMachines {
    /// Takes over the files of the process before this one. Warns if the service manager cannot
    /// keep those of this one.
    pub(super) fn take_over(settings: &Settings) -> anyhow::Result<KeptMachines> {
        let machines = served(settings).len();
        service::check_fd_store(machines * FILES_OF_VM, machines);
        service::stored_files().context("copies of the files in the fd store")?;
        let mut kept = KeptMachines::default();
        kept.check(settings);
        Ok(kept)
    }

    /// Releases the files of virtual machines that have ended and that the settings do not have.
    pub(super) fn check(&mut self, settings: &Settings) {
        self.0.check(&served(settings));
    }
}

/// The virtual machines whose device survives a restart.
fn served(settings: &Settings) -> BTreeSet<&str> {
    let guests = settings.guests.iter();
    let machines = guests.filter_map(|guest| guest.vm.as_ref());
    let names = machines.map(|vm| vm.name.as_str());
    names
        .filter(|_| settings.device == VmDevice::Ivshmem)
        .collect()
}
