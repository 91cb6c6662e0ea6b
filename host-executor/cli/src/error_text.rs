//! Errors as one line for people.

/// The text of an error and of its causes, from the outermost on. Some errors end with the text of
/// their cause: it is not repeated.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if line.ends_with(&cause) {
            continue;
        }
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&cause);
    }
    line
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    /// An error with the text of its cause in its own, as `#[error("...: {0}")]` with `#[from]`
    /// makes it.
    #[derive(Debug, thiserror::Error)]
    #[error("the engine does not start: {0}")]
    struct Outer(#[from] std::io::Error);

    #[test]
    fn causes_are_said_once() {
        let io = || std::io::Error::other("no driver");
        let repeated = anyhow!(Outer(io()));
        assert_eq!(one_line(&repeated), "the engine does not start: no driver");
        let context = Err::<(), _>(Outer(io())).context("device 1");
        assert_eq!(
            one_line(&context.expect_err("an error")),
            "device 1: the engine does not start: no driver"
        );
        let plain = Err::<(), _>(io()).context("no driver is in the file");
        let plain = plain.expect_err("an error");
        assert_eq!(one_line(&plain), "no driver is in the file: no driver");
    }
}
