//! The machine: its kind, its processors, and what keeps programs from using a PCI device.

use std::fs;

use super::report::Report;

pub(super) fn check(report: &mut Report) {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let memory = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        })
        .map_or("unknown".into(), |kib| format!("{} MiB", kib >> 10));
    let is_guest = fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| {
        text.lines()
            .any(|l| l.starts_with("flags") && l.contains(" hypervisor"))
    });
    let kind = if is_guest {
        "a virtual machine"
    } else {
        "not a virtual machine"
    };
    report.ok("machine", format!("{kind}, {cores} processors, {memory}"));
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        let level = if has!("avx512f") && has!("avx512bw") && has!("avx512vl") {
            "AVX-512"
        } else if has!("avx2") && has!("fma") {
            "AVX2"
        } else {
            "neither AVX2 nor AVX-512: slow as a host"
        };
        report.ok("machine", format!("the processors have {level}"));
    }
    // The file reads "[none] integrity confidentiality", with the active level in brackets.
    if let Ok(text) = fs::read_to_string("/sys/kernel/security/lockdown")
        && !text.contains("[none]")
    {
        report.note(
            "machine",
            format!(
                "kernel lockdown is on ({}): programs may not map PCI memory; use a vsock link, \
                 or disable lockdown",
                text.trim()
            ),
        );
    }
}
