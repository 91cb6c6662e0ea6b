//! What the kernel has for the sandbox of `vgpu serve`.

use vgpu_executor::sandbox;

use super::report::Report;

/// The version of Landlock that restricts all that the sandbox asks for.
const COMPLETE: u32 = 6;

pub(super) fn check(report: &mut Report) {
    match sandbox::seccomp_available() {
        Ok(()) => report.ok("sandbox", "the kernel filters system calls (seccomp)"),
        Err(error) => report.note(
            "sandbox",
            format!(
                "no filters of system calls (seccomp: {error}): vgpu serve starts with \
                 --no-sandbox only"
            ),
        ),
    }
    match sandbox::landlock_version() {
        Ok(version) if version >= COMPLETE => report.ok(
            "sandbox",
            format!(
                "Landlock version {version}: a process of vgpu serve --isolate is kept from \
                 other processes, and with the CPU engine from files and ports"
            ),
        ),
        Ok(version) => report.note(
            "sandbox",
            format!(
                "Landlock version {version}, complete is {COMPLETE} (Linux 6.12): vgpu serve \
                 --isolate keeps its processes with the CPU engine from files, and leaves some of \
                 TCP ports, signals and abstract sockets"
            ),
        ),
        Err(error) => report.note(
            "sandbox",
            format!(
                "no Landlock ({error}): the processes of vgpu serve --isolate can open all files \
                 of the user; it needs Linux 5.13, landlock in lsm= of the kernel, and a container \
                 that allows it"
            ),
        ),
    }
}
