//! What the self-check has found about the kernels on a GPU with a driver.
//!
//! `vgpu serve` runs the self-check of `vgpu-check` and keeps its findings in a file, one line for
//! each kernel. An engine that has findings uses only those kernels, besides the simple ones, that
//! were found right, or that no case of the check can use.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::kernel_set::{is_simple, names};

/// Why a text is no verdict about the kernels of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum VerdictError {
    #[error("the file is not a verdict about kernels")]
    NotAVerdict,
    #[error(
        "the verdict is about another GPU, driver or code: its fingerprint is {found}, {expected} \
         is expected"
    )]
    OtherDevice { expected: String, found: String },
}

/// What was found about a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// Its results are those of its fallback.
    Right,
    /// No case of the self-check uses it on this device.
    Unused,
    /// It must not be used, for this reason.
    Faulty(String),
}

/// The findings about the kernels of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict(BTreeMap<&'static str, Finding>);

impl Verdict {
    /// Adds what was found about a kernel.
    pub fn record(&mut self, kernel: &'static str, finding: Finding) {
        self.0.insert(kernel, finding);
    }

    /// What was found about a kernel, if anything.
    pub fn finding(&self, kernel: &str) -> Option<&Finding> {
        self.0.get(kernel)
    }

    /// The kernels that must not be used, and why.
    pub fn faulty(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().filter_map(|(kernel, finding)| match finding {
            Finding::Faulty(reason) => Some((*kernel, reason.as_str())),
            _ => None,
        })
    }

    /// Whether an engine may use the kernel. Everything may be used if nothing was found, because
    /// then no check could run.
    pub fn allows(&self, kernel: &str) -> bool {
        let finding = self.0.get(kernel);
        self.0.is_empty()
            || is_simple(kernel)
            || matches!(finding, Some(Finding::Right | Finding::Unused))
    }

    /// The number of kernels with a finding.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The verdict as text, valid for the device, driver and code with this fingerprint.
    pub fn to_text(&self, fingerprint: &str) -> String {
        let mut text = format!("{HEADER}{fingerprint}\n");
        for (kernel, finding) in &self.0 {
            let words = match finding {
                Finding::Right => RIGHT.into(),
                Finding::Unused => UNUSED.into(),
                Finding::Faulty(reason) => format!("{FAULTY} {}", reason.replace('\n', " ")),
            };
            writeln!(text, "{kernel} {words}").expect("writing to a string cannot fail");
        }
        text
    }

    /// Parses a text of [`Verdict::to_text`]. A line that is not a finding counts as none: its
    /// kernel is checked again.
    ///
    /// # Errors
    /// [`VerdictError`] if the text is not a verdict, or one with another fingerprint.
    pub fn parse(text: &str, fingerprint: &str) -> Result<Verdict, VerdictError> {
        let mut lines = text.lines();
        let first = lines.next().unwrap_or_default();
        let of = first
            .strip_prefix(HEADER)
            .ok_or(VerdictError::NotAVerdict)?;
        if of != fingerprint {
            return Err(VerdictError::OtherDevice {
                expected: fingerprint.to_owned(),
                found: of.to_owned(),
            });
        }
        Ok(Verdict(lines.filter_map(parse_line).collect()))
    }
}

/// A line of a verdict: a kernel and what was found about it.
pub fn parse_line(line: &str) -> Option<(&'static str, Finding)> {
    let (kernel, words) = line.split_once(' ')?;
    let at = names().binary_search(&kernel).ok()?;
    let finding = match words.split_once(' ') {
        None if words == RIGHT => Finding::Right,
        None if words == UNUSED => Finding::Unused,
        Some((FAULTY, reason)) => Finding::Faulty(reason.into()),
        _ => return None,
    };
    Some((names()[at], finding))
}

/// The start of the first line.
const HEADER: &str = "vgpu kernel verdict, ";

/// The words of the findings.
const RIGHT: &str = "right";
const UNUSED: &str = "unused";
const FAULTY: &str = "faulty";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_round_trip_and_apply_to_the_same_device_only() {
        let mut verdict = Verdict::default();
        verdict.record("vg_mmv_q4_k", Finding::Right);
        verdict.record("vg_gemm_any", Finding::Unused);
        verdict.record(
            "vg_rope_rows",
            Finding::Faulty("off by 1,\nsays a test".into()),
        );
        let text = verdict.to_text("here");
        let read = Verdict::parse(&text, "here").expect("a verdict");
        assert_eq!(read.len(), 3);
        let faulty: Vec<_> = read.faulty().collect();
        assert_eq!(faulty, [("vg_rope_rows", "off by 1, says a test")]);
        let allowed = [
            "vg_mmv_q4_k",
            "vg_gemm_any",
            "vg_rope_rows",
            "vg_upload",
            "vg_rope",
        ];
        let allowed = allowed.map(|kernel| read.allows(kernel));
        assert_eq!(allowed, [true, true, false, false, true]);
        assert!(Verdict::default().allows("vg_upload"));
        let refused = Verdict::parse(&text, "there").unwrap_err().to_string();
        assert!(refused.contains("another GPU"), "{refused}");
        let refused = Verdict::parse("", "here").unwrap_err().to_string();
        assert!(refused.contains("not a verdict"), "{refused}");
    }

    #[test]
    fn a_line_that_was_cut_off_counts_as_no_finding() {
        let mut verdict = Verdict::default();
        verdict.record("vg_mmv_q4_k", Finding::Right);
        verdict.record("vg_rope_rows", Finding::Right);
        let text = verdict.to_text("here");
        for lost in 2..14 {
            let read = Verdict::parse(&text[..text.len() - lost], "here").expect("a verdict");
            assert_eq!(read.finding("vg_mmv_q4_k"), Some(&Finding::Right));
            assert_eq!(read.finding("vg_rope_rows"), None, "{lost}");
        }
        assert_eq!(parse_line("vg_no_such_kernel right"), None);
    }
}
