//! Numbers of Kubernetes (`resource.Quantity`), such as `8Gi`, `1500M` or `2e3`.

/// The whole number that a quantity is, rounded up. `None`: the text is no quantity, or the number
/// is negative or 2^64 and more.
pub(crate) fn parse(text: &str) -> Option<u64> {
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let end = text.find(|c| !is_number(c)).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{whole}{fraction}");
    // As many as fit with every suffix below.
    if digits.is_empty() || digits.len() > 20 || fraction.contains('.') {
        return None;
    }
    let digits: u128 = digits.parse().ok()?;
    let power = |base: u128, exponent: u32| base.checked_pow(exponent);
    let (factor, divisor) = match suffix {
        "" => (1, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        "n" => (1, power(10, 9)?),
        "u" => (1, power(10, 6)?),
        "m" => (1, power(10, 3)?),
        "k" => (power(10, 3)?, 1),
        "M" => (power(10, 6)?, 1),
        "G" => (power(10, 9)?, 1),
        "T" => (power(10, 12)?, 1),
        "P" => (power(10, 15)?, 1),
        "E" => (power(10, 18)?, 1),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?.parse::<i32>().ok()?;
            let size = power(10, exponent.unsigned_abs().min(38))?;
            match exponent < 0 {
                true => (1, size),
                false => (size, 1),
            }
        }
    };
    let divisor = power(10, u32::try_from(fraction.len()).ok()?)?.checked_mul(divisor)?;
    u64::try_from(digits.checked_mul(factor)?.div_ceil(divisor)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_whole_numbers_rounded_up() {
        for (text, number) in [
            ("0", 0),
            ("8Gi", 8 << 30),
            ("1536Mi", 1536 << 20),
            ("1.5Gi", 1536 << 20),
            ("1500M", 1_500_000_000),
            ("1k", 1000),
            ("2e3", 2000),
            ("2E3", 2000),
            ("2500e-3", 3),
            ("100m", 1),
            ("1000m", 1),
            ("1001m", 2),
            ("1n", 1),
            (".5", 1),
            ("5.", 5),
            ("15Ei", 15 << 60),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Some(number), "{text}");
        }
        for text in [
            "",
            ".",
            "-1",
            "+1",
            "Gi",
            "1 Gi",
            "1gi",
            "1..5",
            "1.5.0",
            "16Ei",
            "1e39",
            "e3",
            "1e",
            "18446744073709551616",
            "999999999999999999999",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
