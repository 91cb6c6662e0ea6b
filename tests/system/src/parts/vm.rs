//! A real guest under QEMU: `cargo xtask vm`.

use vgpu_gguf::Rng;

use crate::vm::{self, Booted, GuestKind, GuestOps, Prepared, VmDevice};
use xtask_common::progress::heading;

use crate::test_run::TestRun;

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("virtual machines");
    let Some(dist) = tests.dist() else { return };
    let Some(prepared) = tests.prepare("guests to boot", |b| vm::prepare(b.cache, &dist)) else {
        return;
    };
    let kinds = match tests.options.machines.as_slice() {
        [] if tests.options.full => GuestKind::ALL.to_vec(),
        [] => vec![GuestKind::Ivshmem],
        named => named.to_vec(),
    };
    let wanted = |kind: GuestKind| kinds.contains(&kind);
    if wanted(GuestKind::Ivshmem) {
        ivshmem(tests, &prepared);
    }
    if wanted(GuestKind::VfioUser) {
        vfio_user(tests, &prepared);
    }
    if wanted(GuestKind::Links) {
        links(tests, &prepared);
    }
    if wanted(GuestKind::Systemd) {
        systemd(tests, &prepared);
    }
    if wanted(GuestKind::Events) {
        events(tests, &prepared);
    }
}

fn ivshmem(tests: &mut TestRun<'_>, prepared: &Prepared) {
    heading("a virtual machine on stock QEMU");
    let Some(mut booted) = boot(tests, prepared, VmDevice::Ivshmem) else {
        return;
    };
    tests.check("vgpu doctor in the guest", |_, _| booted.doctor());
    let (cases, kills, drawn) = if tests.options.full {
        (GuestOps::all(), 20, String::new())
    } else {
        let seed = tests.options.seed();
        let sample = GuestOps::sample(&mut Rng::new(seed, 3));
        (sample, 3, format!("; --seed {seed}"))
    };
    tests.check("test-backend-ops in the guest", |_, _| {
        Ok(booted.ops(&cases)? + &drawn)
    });
    tests.check("a generation in the guest", |_, _| booted.generations());
    tests.check("executors killed in mid-generation", |_, step| {
        booted.kills(kills, step)
    });
    tests.check("a user of the group vgpu", |_, _| booted.unprivileged());
    stop(tests, booted);
}

fn vfio_user(tests: &mut TestRun<'_>, prepared: &Prepared) {
    heading("a virtual machine on a QEMU with vfio-user");
    let Some(mut booted) = boot(tests, prepared, VmDevice::VfioUser) else {
        return;
    };
    tests.check("the function in the guest", |_, _| {
        booted.lists("0x030200 0x10de:0x2331")
    });
    tests.check("vgpu doctor in the guest, vfio-user", |_, _| {
        booted.doctor()
    });
    tests.check("a generation in the guest, vfio-user", |_, _| {
        booted.generations()
    });
    tests.check("an executor killed, vfio-user", |_, _| {
        booted.executor_killed(prepared)
    });
    tests.check("the device unplugged, vfio-user", |_, _| {
        booted.unplugged(prepared)
    });
    stop(tests, booted);
}

fn systemd(tests: &mut TestRun<'_>, prepared: &Prepared) {
    heading("a machine with systemd and our packages");
    let booted = tests.prepare("a booted machine", |tests| {
        vm::boot_systemd(tests.cache, prepared, &|name| tests.log(name))
    });
    let Some(mut booted) = booted else { return };
    tests.check("the units and the rule", |_, _| booted.verify());
    tests.check("vgpu.service", |_, _| booted.service());
    tests.check("vgpu.service with a limit of its memory", |_, _| {
        booted.limited_memory()
    });
    tests.check("a worker of vgpu.service ended by the kernel", |_, _| {
        booted.killed_worker()
    });
    tests.check("Ollama started before its executor", |_, _| {
        booted.ollama_before_the_executor()
    });
    tests.check("a virtual machine's connection is kept", |_, _| {
        booted.fd_store()
    });
    tests.check("the same across a stop and a start", |_, _| {
        booted.stopped_and_started()
    });
    tests.check("the same while starts fail", |_, _| booted.failing_starts());
    tests.check("the watchdog of systemd", |_, _| booted.watchdog());
    tests.check("the services end successfully", |_, _| {
        booted.stop().map(|()| String::new())
    });
}

fn links(tests: &mut TestRun<'_>, prepared: &Prepared) {
    heading("a virtual machine without the device");
    let linked = tests.prepare("a booted guest", |tests| {
        vm::boot_without_device(tests.cache, prepared, &|name| tests.log(name))
    });
    let Some(mut linked) = linked else { return };
    tests.check("vsock from the guest", |_, _| linked.vsock());
    tests.check("TCP with TLS from the guest", |_, _| linked.tcp());
    tests.check("guests without a valid certificate", |_, _| {
        linked.refused_guests()
    });
    tests.check("a paused machine, over TCP", |_, _| linked.paused());
    tests.check("the executor ends well", |_, _| {
        linked.stop().map(|()| String::new())
    });
}

fn events(tests: &mut TestRun<'_>, prepared: &Prepared) {
    heading("events in the life of a virtual machine");
    let booted = tests.prepare("a booted guest, for events", |tests| {
        vm::boot_events(prepared, &|name| tests.log(name))
    });
    let Some(mut booted) = booted else { return };
    tests.check("a paused machine", |_, _| booted.paused());
    tests.check("a program that ends", |_, _| booted.program_ends());
    tests.check("a machine paused for long", |_, _| booted.paused_for_long());
    tests.check("migration and snapshot", |_, _| booted.migrated());
    tests.check("a processor offline", |_, _| booted.processor_offline());
    tests.check("no overcommitment", |_, _| {
        booted.overcommitment_forbidden()
    });
    tests.check("an executor frozen", |_, _| booted.executor_frozen());
    tests.check("the device unplugged", |_, _| booted.unplugged());
    tests.check("a machine that sleeps (S3)", |_, _| booted.suspended());
    tests.check("a reset", |_, _| booted.reset());
    tests.check("QEMU killed and started again", |_, _| booted.qemu_killed());
    tests.check("a host that suspends", |_, _| booted.host_suspended());
    tests.check("the executor ends well", |_, _| {
        booted.stop().map(|()| String::new())
    });
}

fn boot(tests: &mut TestRun<'_>, prepared: &Prepared, device: VmDevice) -> Option<Booted> {
    let name = format!("a booted guest, {}", device.name());
    let booted = tests.prepare(&name, |tests| {
        vm::boot(tests.cache, prepared, device, &|name| tests.log(name))
    });
    tests.passed += u64::from(booted.is_some());
    booted
}

fn stop(tests: &mut TestRun<'_>, booted: Booted) {
    tests.check("the executor ends well", |_, _| {
        booted.stop().map(|()| String::new())
    });
}
