//! What commands print.
//!
//! `println!` and `eprintln!` of the standard library panic when the reader has closed the pipe, as
//! in `cargo xtask test | head`. The macros here have the names of those for standard output. They
//! leave out what nobody reads, and the command goes on: it ends the programs that it has started.

use std::fmt;
use std::io::{Write as _, stderr, stdout};

/// Prints to standard output. If it fails, nobody reads.
pub fn print(text: fmt::Arguments<'_>) {
    let _ = stdout().lock().write_fmt(text);
}

/// Prints a line to standard error. If it fails, nobody reads.
pub(crate) fn print_error_line(line: &str) {
    let _ = writeln!(stderr().lock(), "{line}");
}

/// As `std::print!`, without a panic.
#[macro_export]
macro_rules! print {
    ($($text:tt)*) => { $crate::output::print(format_args!($($text)*)) };
}

/// As `std::println!`, without a panic.
#[macro_export]
macro_rules! println {
    () => { $crate::output::print(format_args!("\n")) };
    ($($text:tt)*) => { $crate::output::print(format_args!("{}\n", format_args!($($text)*))) };
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    /// In the environment: the process prints into closed pipes.
    const PRINTS: &str = "XTASK_TEST_PRINTS";

    /// The process of the test below.
    #[test]
    fn prints() {
        if std::env::var_os(PRINTS).is_none() {
            return;
        }
        let (_, closed) = std::io::pipe().unwrap();
        rustix::stdio::dup2_stdout(&closed).unwrap();
        rustix::stdio::dup2_stderr(&closed).unwrap();
        crate::println!("a line");
        crate::println!();
        crate::print!("text\n");
        crate::progress::say("a line");
        std::process::exit(7);
    }

    #[test]
    fn command_goes_on_when_nobody_reads() {
        let own = std::env::current_exe().unwrap();
        let name = format!("{}::prints", module_path!().split_once("::").unwrap().1);
        let mut command = Command::new(own);
        let status = { command.args(["--exact", &name, "--nocapture"]) }
            .env(PRINTS, "1")
            .status();
        assert_eq!(status.unwrap().code(), Some(7));
    }
}
