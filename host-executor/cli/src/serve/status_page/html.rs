//! Text, numbers and bars in HTML.

use vgpu_executor::size::shown;

/// A text as the content of an element or of a quoted attribute.
pub(super) fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // Not allowed in HTML, or invisible.
            control if control.is_control() => safe.push('\u{fffd}'),
            other => safe.push(other),
        }
    }
    safe
}

/// A number with at most three digits or no fraction.
pub(super) fn number(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// A part of a whole in percent.
pub(super) fn percent(part: f64) -> String {
    format!("{} %", number(100.0 * part))
}

/// Seconds with the unit that gives few digits.
pub(super) fn seconds(value: f64) -> String {
    match value {
        v if v < 0.001 => format!("{} µs", number(1e6 * v)),
        v if v < 1.0 => format!("{} ms", number(1e3 * v)),
        v => format!("{} s", number(v)),
    }
}

/// Bytes a second.
pub(super) fn byte_rate(value: f64) -> String {
    format!("{}/s", shown(value as u64))
}

/// A figure that may be unknown.
pub(super) fn or_dash(value: Option<f64>, text: fn(f64) -> String) -> String {
    value.map_or_else(|| "–".into(), text)
}

/// A part of a bar: the number of its colour, its size, and its name.
pub(super) struct Part<'a> {
    pub(super) series: usize,
    pub(super) size: u64,
    pub(super) name: &'a str,
}

/// A bar of `whole` with parts of it. `label` says what the bar shows.
pub(super) fn bar(label: &str, parts: &[Part<'_>], whole: u64) -> String {
    let mut text = format!(
        "<svg class=\"bar\" role=\"img\" aria-label=\"{}\" viewBox=\"0 0 1000 10\" \
         preserveAspectRatio=\"none\">\
         <rect class=\"whole\" width=\"1000\" height=\"10\"></rect>",
        escaped(label)
    );
    let mut begin = 0.0;
    for part in parts.iter().filter(|part| part.size > 0) {
        let width = 1000.0 * part.size as f64 / whole.max(1) as f64;
        let width = width.min(1000.0 - begin);
        text.push_str(&format!(
            "<rect class=\"s{}\" x=\"{begin:.1}\" width=\"{width:.1}\" height=\"10\">\
             <title>{}: {}</title></rect>",
            part.series,
            escaped(part.name),
            shown(part.size)
        ));
        begin += width;
    }
    text.push_str("</svg>");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_guest_is_no_markup() {
        let text = escaped("<b a='1'>\"&\u{1b}\n");
        assert_eq!(text, "&lt;b a=&#39;1&#39;&gt;&quot;&amp;\u{fffd}\u{fffd}");
    }

    #[test]
    fn numbers_have_few_digits_and_a_unit() {
        assert_eq!(
            [0.0, 1.234, 12.34, 1234.5].map(number),
            ["0", "1.23", "12.3", "1234"]
        );
        assert_eq!(
            [2e-6, 0.0123, 2.5].map(seconds),
            ["2.00 µs", "12.3 ms", "2.50 s"]
        );
        assert_eq!(percent(0.5), "50.0 %");
        assert_eq!(or_dash(None, percent), "–");
    }

    #[test]
    fn bar_is_no_longer_than_its_whole() {
        let part = |size| Part {
            series: 1,
            size,
            name: "a",
        };
        let text = bar("all", &[part(60), part(0), part(90)], 100);
        assert_eq!(text.matches("class=\"s1\"").count(), 2);
        assert!(text.contains("x=\"600.0\" width=\"400.0\""), "{text}");
    }
}
