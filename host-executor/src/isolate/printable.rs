//! Text of less trusted processes, for logs and terminals.
#![forbid(unsafe_code)]

/// The longest name or reason that is passed on, in characters.
const MAX_CHARS: usize = 200;

/// The text with a question mark in place of each control character that is not a tab, so that the
/// text is one line and cannot control a terminal.
pub(super) fn printable(text: &str) -> String {
    let is_bad = |c: char| c.is_control() && c != '\t';
    text.replace(is_bad, "?")
}

/// A name or a reason that a worker reports, made safe for terminals and cut.
pub(super) fn shown(text: &str) -> String {
    printable(text).chars().take(MAX_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_one_line_that_cannot_control_a_terminal() {
        assert_eq!(printable("a\x1b[2Jb\rc\td\n\u{9b}e\0"), "a?[2Jb?c\td??e?");
        assert_eq!(printable("ä ☃"), "ä ☃");
    }
}
