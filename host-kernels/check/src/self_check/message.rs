//! What the supervisor asks of its children, and what they answer.

use std::fmt;

use vgpu_cuda::kernel_set::names;
use vgpu_cuda::verdict::{Finding, Verdict, parse_line};

/// What a child process is to do.
#[derive(Debug, Clone, Copy)]
pub enum Request<'a> {
    /// To say the fingerprint of the device and the kernels that are to be checked.
    List,
    /// To check kernels.
    Check(CheckWork<'a>),
}

/// The kernels that a child process checks.
#[derive(Debug, Clone, Copy)]
pub struct CheckWork<'a> {
    /// The kernels, in order.
    pub kernels: &'a [&'static str],
    /// The kernels that were found right.
    pub right: &'a [&'static str],
    /// The kernels that must not run.
    pub faulty: &'a [&'static str],
    /// The kernels that have failed once.
    pub suspects: &'a [&'static str],
}

/// An event in the check of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub enum CheckEvent {
    /// A case begins to run with the kernel.
    Begins(&'static str),
    /// A case begins to run without the kernel, with these kernels instead.
    Instead(Vec<&'static str>),
    /// These kernels gave wrong results instead, and the kernel gave right ones.
    WrongFallback(Vec<&'static str>),
    /// What came out.
    Ends(&'static str, CheckOutcome),
}

/// What came out of the check of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckOutcome {
    /// Something was found about the kernel.
    Found(Finding),
    /// Nothing: memory was short, or the fallback of the kernel has failed.
    Unchecked,
}

impl CheckOutcome {
    /// Whether the kernel has failed.
    pub(super) fn is_faulty(&self) -> bool {
        matches!(self, CheckOutcome::Found(Finding::Faulty(_)))
    }
}

/// A line from a child to its parent.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// The fingerprint of the device, its driver and the code.
    Device(String),
    /// A kernel that is to be checked.
    Kernel(&'static str),
    /// The check of a kernel begins.
    Begins(&'static str),
    /// The kernels of the fallback begin to run.
    Instead(Vec<String>),
    /// The kernels of the fallback gave wrong results.
    WrongFallback(Vec<String>),
    /// What came out of the check of a kernel.
    Ends(&'static str, CheckOutcome),
    /// The child has done all that it was asked for.
    Done,
}

impl From<CheckEvent> for Message {
    fn from(event: CheckEvent) -> Message {
        let owned = |kernels: Vec<&str>| kernels.into_iter().map(String::from).collect();
        match event {
            CheckEvent::Begins(kernel) => Message::Begins(kernel),
            CheckEvent::Instead(kernels) => Message::Instead(owned(kernels)),
            CheckEvent::WrongFallback(kernels) => Message::WrongFallback(owned(kernels)),
            CheckEvent::Ends(kernel, outcome) => Message::Ends(kernel, outcome),
        }
    }
}

/// What the lines begin with: other libraries write to standard output, too.
const MARK: &str = "self-check ";

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MARK)?;
        match self {
            Message::Device(fingerprint) => write!(f, "device {fingerprint}"),
            Message::Kernel(name) => write!(f, "kernel {name}"),
            Message::Begins(name) => write!(f, "begins {name}"),
            Message::Instead(names) => write!(f, "instead {}", names.join(" ")),
            Message::WrongFallback(names) => write!(f, "wrong-fallback {}", names.join(" ")),
            Message::Ends(name, CheckOutcome::Unchecked) => write!(f, "unchecked {name}"),
            Message::Ends(name, CheckOutcome::Found(finding)) => {
                let mut verdict = Verdict::default();
                verdict.record(name, finding.clone());
                let text = verdict.to_text("");
                write!(f, "ends {}", text.lines().nth(1).unwrap_or_default())
            }
            Message::Done => f.write_str("done"),
        }
    }
}

/// The kernel with this name.
fn known(name: &str) -> Option<&'static str> {
    let at = names().binary_search(&name).ok()?;
    Some(names()[at])
}

impl Message {
    /// The message of a line, if it is one. Anything may stand before it in the line.
    pub fn parse(line: &str) -> Option<Message> {
        let line = &line[line.find(MARK)? + MARK.len()..];
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        let words = || rest.split_whitespace().map(String::from).collect();
        match kind {
            "device" => Some(Message::Device(rest.into())),
            "kernel" => known(rest).map(Message::Kernel),
            "begins" => known(rest).map(Message::Begins),
            "instead" => Some(Message::Instead(words())),
            "wrong-fallback" => Some(Message::WrongFallback(words())),
            "unchecked" => known(rest).map(|name| Message::Ends(name, CheckOutcome::Unchecked)),
            "ends" => parse_line(rest)
                .map(|(name, finding)| Message::Ends(name, CheckOutcome::Found(finding))),
            "done" => Some(Message::Done),
            _ => None,
        }
    }
}
