//! A real guest under QEMU: `cargo xtask vm`.

use crate::progress::heading;
use crate::vm::{self, Booted, Device, Prepared};

use super::Bench;

pub(super) fn run(bench: &mut Bench<'_>) {
    heading("a virtual machine on stock QEMU");
    let Some(dist) = bench.dist() else { return };
    let Some(prepared) = bench.prepare("a guest to boot", |b| vm::prepare(b.cache, &dist)) else {
        return;
    };
    let only = bench.options.device;
    if only != Some(Device::VfioUser)
        && let Some(mut booted) = boot(bench, &prepared, Device::Ivshmem)
    {
        bench.check("vgpu doctor in the guest", |_, _| booted.doctor());
        bench.check("test-backend-ops in the guest", |_, _| booted.ops());
        bench.check("a generation in the guest", |_, _| booted.generations());
        bench.check("executors killed in mid-generation", |_, step| {
            booted.kills(step)
        });
        bench.check("a user of the group vgpu", |_, _| booted.unprivileged());
        stop(bench, booted);
    }
    if only.is_none() {
        links(bench, &prepared);
    }
    if only == Some(Device::Ivshmem) {
        return;
    }
    heading("a virtual machine on a QEMU with vfio-user");
    if let Some(mut booted) = boot(bench, &prepared, Device::VfioUser) {
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
