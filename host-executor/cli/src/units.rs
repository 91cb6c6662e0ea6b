//! Sizes, durations and shares for tables.

/// A number of bytes with a binary unit.
pub(crate) fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.1} {}", units[unit]),
    }
}

/// The mean size of a batch: the graphs of all turns, by turn. "-" before the first turn.
pub(crate) fn mean_batch(members: f64, turns: f64) -> String {
    match turns > 0.0 {
        true => format!("{:.1}", members / turns),
        false => "-".into(),
    }
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
    fn sizes_and_durations_are_short() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1536), "1.5 KiB");
        assert_eq!(size((1 << 30) - 1), "1.0 GiB");
        assert_eq!(size(24 << 30), "24.0 GiB");
        assert_eq!(size(u64::MAX), "16777216.0 TiB");
        assert_eq!(mean_batch(6.0, 4.0), "1.5");
        assert_eq!(mean_batch(0.0, 0.0), "-");
        assert_eq!(duration(0.0123), "12ms");
        assert_eq!(duration(99.0), "99.0s");
        assert_eq!(duration(3600.0), "60m");
        assert_eq!(duration(90_000.0), "25h");
        assert_eq!(duration(1e6), "12d");
    }
}
