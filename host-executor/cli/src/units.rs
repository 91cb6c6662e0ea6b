//! Sizes, durations and shares for tables.

pub(crate) use vgpu_executor::size::shown as size;
use vgpu_executor::status::{DrainStatus, FallbackStatus, GpuStatus};

/// The name of a GPU: its address, once the driver has said it.
pub(crate) fn gpu_name(gpu: &GpuStatus) -> String {
    format!("GPU {}", gpu.address).trim_end().to_owned()
}

/// The figures of a GPU in one line. "-" for those that are missing.
pub(crate) fn gpu_figures(gpu: &GpuStatus) -> String {
    let known = |figure: Option<String>| figure.unwrap_or_else(|| "-".into());
    format!(
        "busy {}, memory {} of {}, {}, {}",
        known(gpu.busy.map(|busy| format!("{:.0} %", 100.0 * busy))),
        known(gpu.memory_used.map(size)),
        known(gpu.memory_total.map(size)),
        known(gpu.temperature.map(|degrees| format!("{degrees} °C"))),
        known(gpu.power.map(|watts| format!("{watts:.0} W"))),
    )
}

/// How much of the nodes and of the time the CPU engine had. `None`: nothing has run.
pub(crate) fn on_cpu(fallback: &FallbackStatus) -> Option<String> {
    let nodes = fallback.cpu_nodes_ratio()?;
    let time = fallback.cpu_time_ratio()?;
    let [nodes, time] = [nodes, time].map(|ratio| format!("{:.1} %", 100.0 * ratio));
    Some(format!("{nodes} of nodes, {time} of time"))
}

/// The mean size of a batch: the graphs of all turns, by turn. "-" before the first turn.
pub(crate) fn mean_batch(members: f64, turns: f64) -> String {
    match turns > 0.0 {
        true => format!("{:.1}", members / turns),
        false => "-".into(),
    }
}

/// What an executor that drains does.
pub(crate) fn drain(draining: &DrainStatus) -> String {
    let mut text = format!("no new sessions for {}", duration(draining.age));
    if draining.ended > 0 {
        text += &format!(", {} sessions were ended at the deadline", draining.ended);
    }
    // None is left when the deadline has ended some.
    if let Some(left) = draining
        .left
        .filter(|left| draining.ended == 0 || *left > 0.0)
    {
        text += &format!(", open sessions are ended in {}", duration(left));
    }
    if !draining.untold.is_empty() {
        let untold = draining.untold.join("; ");
        text += &format!(", not told to the processes of virtual machines: {untold}");
    }
    text
}

/// A number of seconds with the largest fitting unit.
pub(crate) fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0}ms", 1e3 * s),
        s if s < 100.0 => format!("{s:.1}s"),
        s if s < 6000.0 => format!("{:.0}m", s / 60.0),
        s if s < 360_000.0 => format!("{:.0}h", s / 3600.0),
        s => format!("{:.0}d", s / 86400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_gpu_have_one_line_also_where_some_are_missing() {
        let gpu = GpuStatus {
            busy: Some(0.37),
            memory_used: Some(6 << 30),
            memory_total: Some(24 << 30),
            temperature: Some(51),
            power: Some(123.456),
            ..GpuStatus::default()
        };
        let line = "busy 37 %, memory 6.0 GiB of 24.0 GiB, 51 °C, 123 W";
        assert_eq!(gpu_figures(&gpu), line);
        let none = gpu_figures(&GpuStatus::default());
        assert_eq!(none, "busy -, memory - of -, -, -");
    }

    #[test]
    fn parts_of_the_cpu_engine_are_those_of_nodes_and_of_time() {
        assert_eq!(on_cpu(&FallbackStatus::default()), None);
        let fallback = FallbackStatus {
            device_nodes: 969,
            cpu_nodes: 31,
            device_seconds: 6.0,
            cpu_seconds: 2.0,
        };
        let said = on_cpu(&fallback);
        assert_eq!(said.as_deref(), Some("3.1 % of nodes, 25.0 % of time"));
    }

    #[test]
    fn durations_and_means_are_short() {
        assert_eq!(mean_batch(6.0, 4.0), "1.5");
        assert_eq!(mean_batch(0.0, 0.0), "-");
        assert_eq!(duration(0.0123), "12ms");
        assert_eq!(duration(99.0), "99.0s");
        assert_eq!(duration(3600.0), "60m");
        assert_eq!(duration(90_000.0), "25h");
        assert_eq!(duration(1e6), "12d");
    }

    #[test]
    fn a_drain_says_what_becomes_of_open_sessions() {
        let said = |left, ended| {
            let age = 2.0;
            drain(&DrainStatus {
                age,
                left,
                ended,
                untold: Vec::new(),
            })
        };
        assert_eq!(said(None, 0), "no new sessions for 2.0s");
        assert_eq!(
            said(Some(58.0), 0),
            "no new sessions for 2.0s, open sessions are ended in 58.0s"
        );
        assert_eq!(
            said(Some(0.0), 2),
            "no new sessions for 2.0s, 2 sessions were ended at the deadline"
        );
        assert_eq!(
            said(None, 2),
            said(Some(0.0), 2),
            "a drain without a deadline follows"
        );
        assert_eq!(
            said(Some(5.0), 2),
            "no new sessions for 2.0s, 2 sessions were ended at the deadline, open sessions are \
             ended in 5.0s"
        );
        let untold = vec!["a: it has just started".into()];
        let (age, left, ended) = (2.0, None, 0);
        assert_eq!(
            drain(&DrainStatus {
                age,
                left,
                ended,
                untold
            }),
            "no new sessions for 2.0s, not told to the processes of virtual machines: a: it has \
             just started"
        );
    }
}
