//! `vgpu generate`: man pages, and completions for shells.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Command, Parser};
use clap_complete::Shell;

/// Where shells look for the completions of a command, below `/usr/share`.
const COMPLETIONS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions/vgpu"),
    (Shell::Fish, "fish/vendor_completions.d/vgpu.fish"),
    (Shell::Zsh, "zsh/vendor-completions/_vgpu"),
];
const MAN: &str = "man/man1";

/// Writes man pages and completions for bash, fish and zsh.
#[derive(Parser)]
pub(crate) struct Args {
    /// The folder that stands for /usr/share
    folder: PathBuf,
}

/// `command`: all of `vgpu`.
pub(crate) fn run(args: &Args, command: &Command) -> anyhow::Result<()> {
    let mut command = visible(command);
    for (shell, file) in COMPLETIONS {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut command, "vgpu", &mut text);
        write(&args.folder.join(file), &text)?;
    }
    command.build();
    pages(&command, "vgpu", &args.folder.join(MAN))
}

/// The command without what only programs call.
fn visible(command: &Command) -> Command {
    let shown = command.get_subcommands().filter(|one| !one.is_hide_set());
    let mut visible = Command::new("vgpu").subcommands(shown.cloned());
    visible = visible.version(crate::own_program::VERSION);
    match command.get_about() {
        Some(about) => visible.about(about.clone()),
        None => visible,
    }
}

/// Writes the page of a command and those of its subcommands: `vgpu-cert-renew.1`.
fn pages(command: &Command, name: &str, folder: &Path) -> anyhow::Result<()> {
    for part in command.get_subcommands() {
        if part.get_name() != "help" {
            pages(part, &format!("{name}-{}", part.get_name()), folder)?;
        }
    }
    let mut text = Vec::new();
    let page = clap_mangen::Man::new(command.clone()).title(name);
    page.render(&mut text).context("a man page")?;
    write(&folder.join(format!("{name}.1")), &text)
}

fn write(file: &Path, text: &[u8]) -> anyhow::Result<()> {
    let written = fs::create_dir_all(file.parent().unwrap_or(Path::new("/")))
        .and_then(|()| fs::write(file, text));
    written.with_context(|| format!("writing {}", file.display()))
}
