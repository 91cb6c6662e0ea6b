//! What commands print.
//!
//! `println!` and `eprintln!` of the standard library panic when the reader has closed the pipe, as
//! in `vgpu gpu-check models | head -n 1`. The macros here have their names and do not.
//!
//! SIGPIPE stays ignored in every command: with its default action, a connection or a child process
//! that ends would end the command without an error.

use std::fmt;
use std::io::{self, ErrorKind, Write as _, stderr, stdout};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit status of a command that nobody reads: what a shell shows for SIGPIPE.
const NO_READER: i32 = 141;

/// Whether the command only prints.
static ONLY_PRINTS: AtomicBool = AtomicBool::new(false);

/// From now on the command ends when nobody reads what it prints. Others go on to their ends: they
/// serve, or change files.
pub(crate) fn end_without_reader() {
    ONLY_PRINTS.store(true, Ordering::Relaxed);
}

/// Prints to standard output.
pub(crate) fn print(text: fmt::Arguments<'_>) {
    check(stdout().lock().write_fmt(text));
}

/// Prints to standard error. If it fails, there is nobody to tell.
pub(crate) fn print_error(text: fmt::Arguments<'_>) {
    let _ = stderr().lock().write_fmt(text);
}

/// Ends a command that only prints, if it cannot.
pub(crate) fn check(printed: io::Result<()>) {
    let Err(error) = printed else { return };
    if !ONLY_PRINTS.load(Ordering::Relaxed) {
        return;
    }
    if error.kind() == ErrorKind::BrokenPipe {
        process::exit(NO_READER);
    }
    print_error(format_args!("vgpu: standard output: {error}\n"));
    process::exit(1);
}

/// As `std::print!`, without a panic.
macro_rules! print {
    ($($text:tt)*) => { crate::output::print(format_args!($($text)*)) };
}

/// As `std::println!`, without a panic.
macro_rules! println {
    () => { crate::output::print(format_args!("\n")) };
    ($($text:tt)*) => { crate::output::print(format_args!("{}\n", format_args!($($text)*))) };
}

/// As `std::eprintln!`, without a panic.
macro_rules! eprintln {
    ($($text:tt)*) => { crate::output::print_error(format_args!("{}\n", format_args!($($text)*))) };
}
