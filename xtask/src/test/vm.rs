//! A real guest under QEMU: `cargo xtask vm`.

use crate::progress::heading;
use crate::vm;

use super::Bench;

pub(super) fn run(bench: &mut Bench<'_>) {
    heading("a virtual machine on stock QEMU");
    let Some(dist) = bench.dist() else { return };
    let Some(prepared) = bench.prepare("a guest to boot", |b| vm::prepare(b.cache, &dist)) else {
        return;
    };
    let booted = bench.prepare("a booted guest", |bench| {
        vm::boot(&prepared, &|name| bench.log(name))
    });
    let Some(mut booted) = booted else { return };
    bench.passed += 1;
    bench.check("vgpu doctor in the guest", |_, _| booted.doctor());
    bench.check("test-backend-ops in the guest", |_, _| booted.ops());
    bench.check("a generation in the guest", |_, _| booted.generations());
    bench.check("executors killed in mid-generation", |_, step| {
        booted.kills(step)
    });
    bench.check("the executor ends well", |_, _| {
        booted.stop().map(|()| String::new())
    });
}
