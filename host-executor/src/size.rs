//! Sizes as people write and read them.
#![forbid(unsafe_code)]

pub use vgpu_transport::size::shown;

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ParseSizeError {
    #[error("{0:?} is not a size, such as 512M or 8G")]
    Number(String),
    #[error("unknown unit {0:?}: use K, M, G or T")]
    Unit(String),
    #[error("{0} is more than 2^64 bytes")]
    TooLarge(String),
}

/// Reads a number of bytes, with an optional unit: `1073741824`, `512M`, `1.5GiB`, `8 G`. Units are
/// powers of 1024, whether written `G`, `GB` or `GiB`.
///
/// # Errors
/// [`ParseSizeError`] if the number or the unit is not one, or the size does not fit 64 bits.
pub fn parse(text: &str) -> Result<u64, ParseSizeError> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        unit => return Err(ParseSizeError::Unit(unit.into())),
    };
    let too_large = || ParseSizeError::TooLarge(text.into());
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(1 << shift).ok_or_else(too_large);
    }
    let fraction: f64 = number
        .parse()
        .map_err(|_| ParseSizeError::Number(text.into()))?;
    let bytes = fraction * (1u64 << shift) as f64;
    if bytes < u64::MAX as f64 {
        Ok(bytes as u64)
    } else {
        Err(too_large())
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn sizes_with_units_are_parsed() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096 B", 4096),
            ("512M", 512 << 20),
            ("512 mib", 512 << 20),
            ("1.5GB", 3 << 29),
            ("2t", 2 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_refused_with_a_reason() {
        for text in [
            "",
            "G",
            "1.2.3G",
            "-1",
            "8X",
            "1e9",
            "16777216T",
            "99999999999999999999",
        ] {
            let reason = parse(text).unwrap_err().to_string();
            assert!(!reason.is_empty(), "{text}");
        }
        assert!(
            parse("8X")
                .unwrap_err()
                .to_string()
                .contains("use K, M, G or T")
        );
    }
}
