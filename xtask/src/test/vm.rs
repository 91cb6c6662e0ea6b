//! A real guest under QEMU: `cargo xtask vm`.

use crate::progress::heading;
use crate::vm::{self, Booted, Device, Kind, Prepared};

use super::Bench;

pub(super) fn run(bench: &mut Bench<'_>) {
    heading("virtual machines");
    let Some(dist) = bench.dist() else { return };
    let Some(prepared) = bench.prepare("guests to boot", |b| vm::prepare(b.cache, &dist)) else {
        return;
    };
    let only = bench.options.machine;
    let wanted = |kind: Kind| only.is_none_or(|only| only == kind);
    if wanted(Kind::Ivshmem) {
        ivshmem(bench, &prepared);
    }
    if wanted(Kind::VfioUser) {
        vfio_user(bench, &prepared);
    }
    if wanted(Kind::Links) {
        links(bench, &prepared);
    }
    if wanted(Kind::Systemd) {
        systemd(bench, &prepared);
    }
}

fn ivshmem(bench: &mut Bench<'_>, prepared: &Prepared) {
    heading("a virtual machine on stock QEMU");
    let Some(mut booted) = boot(bench, prepared, Device::Ivshmem) else {
        return;
    };
    bench.check("vgpu doctor in the guest", |_, _| booted.doctor());
    bench.check("test-backend-ops in the guest", |_, _| booted.ops());
    bench.check("a generation in the guest", |_, _| booted.generations());
    bench.check("executors killed in mid-generation", |_, step| {
        booted.kills(step)
    });
    bench.check("a user of the group vgpu", |_, _| booted.unprivileged());
    stop(bench, booted);
}

fn vfio_user(bench: &mut Bench<'_>, prepared: &Prepared) {
    heading("a virtual machine on a QEMU with vfio-user");
    let Some(mut booted) = boot(bench, prepared, Device::VfioUser) else {
        return;
    };
    bench.check("the function in the guest", |_, _| {
        booted.lists("0x030200 0x10de:0x2331")
    });
    bench.check("vgpu doctor in the guest, vfio-user", |_, _| {
        booted.doctor()
    });
    bench.check("a generation in the guest, vfio-user", |_, _| {
        booted.generations()
    });
    stop(bench, booted);
}

fn systemd(bench: &mut Bench<'_>, prepared: &Prepared) {
    heading("a machine with systemd and our packages");
    let booted = bench.prepare("a booted machine", |bench| {
        vm::boot_systemd(bench.cache, prepared, &|name| bench.log(name))
    });
    let Some(mut booted) = booted else { return };
    bench.check("the units and the rule", |_, _| booted.verify());
    bench.check("vgpu.service", |_, _| booted.service());
    bench.check("a virtual machine's connection is kept", |_, _| {
        booted.kept()
    });
    bench.check("the services end well", |_, _| {
        booted.stop().map(|()| String::new())
    });
}

fn links(bench: &mut Bench<'_>, prepared: &Prepared) {
    heading("a virtual machine without the device");
    let linked = bench.prepare("a booted guest", |bench| {
        vm::boot_without_device(bench.cache, prepared, &|name| bench.log(name))
    });
    let Some(mut linked) = linked else { return };
    bench.check("vsock from the guest", |_, _| linked.vsock());
    bench.check("TCP with TLS from the guest", |_, _| linked.tcp());
    bench.check("guests that may not", |_, _| linked.strangers());
    bench.check("the executor ends well", |_, _| {
        linked.stop().map(|()| String::new())
    });
}

fn boot(bench: &mut Bench<'_>, prepared: &Prepared, device: Device) -> Option<Booted> {
    let name = format!("a booted guest, {}", device.name());
    let booted = bench.prepare(&name, |bench| {
        vm::boot(bench.cache, prepared, device, &|name| bench.log(name))
    });
    bench.passed += u64::from(booted.is_some());
    booted
}

fn stop(bench: &mut Bench<'_>, booted: Booted) {
    bench.check("the executor ends well", |_, _| {
        booted.stop().map(|()| String::new())
    });
}
