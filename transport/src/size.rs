//! Sizes as people read them.
#![forbid(unsafe_code)]

/// A number of bytes with a binary unit, such as `1.5 GiB`.
pub fn shown(bytes: u64) -> String {
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

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn shown_sizes_are_short() {
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(1023), "1023 B");
        assert_eq!(shown(1536), "1.5 KiB");
        assert_eq!(shown((1 << 30) - 1), "1.0 GiB");
        assert_eq!(shown(24 << 30), "24.0 GiB");
        assert_eq!(shown(u64::MAX), "16777216.0 TiB");
    }
}
