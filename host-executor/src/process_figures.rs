//! Figures of this process, from `/proc` and the kernel, by the names of Prometheus' clients.
#![forbid(unsafe_code)]

use std::fs;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

/// A figure of a process: its name, its help text, and its value, which only a counter increases.
pub(crate) struct ProcessFigure {
    pub(crate) name: &'static str,
    pub(crate) help: &'static str,
    pub(crate) is_counter: bool,
    pub(crate) value: f64,
}

/// The figures that the kernel tells.
pub(crate) fn figures() -> Vec<ProcessFigure> {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The third field of proc_pid_stat(5) is the first behind the name of the program.
    let fields: Vec<&str> = { stat.rsplit_once(") ") }
        .map(|(_, rest)| rest.split_whitespace().collect())
        .unwrap_or_default();
    let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
    let ticks = clock_ticks_per_second() as f64;
    let cpu = Option::zip(field(14), field(15)).map(|(user, system)| (user + system) / ticks);
    let start = Option::zip(field(22), boot_time()).map(|(since, boot)| boot + since / ticks);
    let files = fs::read_dir("/proc/self/fd").ok();
    // Without the folder that is read.
    let open = files.map(|files| files.count().saturating_sub(1) as f64);
    let most = getrlimit(Resource::Nofile).current.map(|most| most as f64);
    let all = [
        (
            "process_cpu_seconds",
            "Processor time of this process",
            true,
            cpu,
        ),
        ("process_open_fds", "Open file descriptors", false, open),
        (
            "process_max_fds",
            "Most file descriptors that may be open",
            false,
            most,
        ),
        (
            "process_virtual_memory_bytes",
            "Size of the address space",
            false,
            field(23),
        ),
        (
            "process_resident_memory_bytes",
            "Memory of this process in RAM",
            false,
            field(24).map(|pages| pages * page_size() as f64),
        ),
        (
            "process_start_time_seconds",
            "When this process started, in seconds since 1970",
            false,
            start,
        ),
    ];
    let known = all
        .into_iter()
        .filter_map(|(name, help, is_counter, value)| {
            Some(ProcessFigure {
                name,
                help,
                is_counter,
                value: value?,
            })
        });
    known.collect()
}

/// When the machine started, in seconds since 1970.
fn boot_time() -> Option<f64> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("btime "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn figures_are_of_this_process() {
        let of = |name: &str| {
            let found = figures().into_iter().find(|figure| figure.name == name);
            found.unwrap_or_else(|| panic!("no {name}")).value
        };
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs_f64();
        let start = of("process_start_time_seconds");
        // The time of the boot has whole seconds.
        assert!(
            start > now - 24.0 * 3600.0 && start < now + 2.0,
            "{start} {now}"
        );
        let (resident, all) = (
            of("process_resident_memory_bytes"),
            of("process_virtual_memory_bytes"),
        );
        assert!(resident > 100_000.0 && resident < all, "{resident} {all}");
        let held: Vec<_> = (0..20)
            .map(|_| fs::File::open("/proc/stat").unwrap())
            .collect();
        assert!(of("process_open_fds") > held.len() as f64);
        assert!(of("process_open_fds") <= of("process_max_fds"));
        assert!(of("process_cpu_seconds") >= 0.0);
    }
}
