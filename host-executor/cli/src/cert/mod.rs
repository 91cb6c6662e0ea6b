//! `vgpu cert`: a private certificate authority, and certificates for hosts and guests.

mod authority;
mod issue;
mod renew;
mod revoke;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use clap::{Parser, Subcommand};

/// Days of validity of a certificate.
const DAYS: u32 = 365;

/// Makes certificates for TCP links: a private authority, and a certificate for each host and
/// guest.
///
/// FOLDER holds the authority, which the first call creates, and which is valid for ten years. Each
/// call creates one more folder in it, NAME, with the files that one side needs: ca.pem, cert.pem,
/// key.pem. A host uses its folder with `vgpu serve --certs`, a guest with the environment variable
/// VGPU_CERTS. FOLDER/issued keeps a copy of each certificate, for `vgpu cert revoke`.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    new: Option<issue::NewCertificate>,
}

#[derive(Subcommand)]
enum Command {
    Renew(renew::Args),
    Revoke(revoke::Args),
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match (&args.command, &args.new) {
        (Some(Command::Renew(args)), _) => renew::run(args),
        (Some(Command::Revoke(args)), _) => revoke::run(args),
        (None, Some(args)) => issue::run(args),
        (None, None) => bail!("FOLDER, SIDE and NAME are required; see vgpu cert --help"),
    }
}

/// Refuses a name that is no name of a folder, or no word of a command line.
fn check_name(name: &str) -> anyhow::Result<()> {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if name.is_empty() || name.starts_with(['.', '-']) || !name.bytes().all(is_plain) {
        bail!("the name {name:?}: letters, digits, `.`, `_` and `-`, beginning with none of `.-`");
    }
    // The names of files of the authority's folder.
    if [authority::ISSUED, "renew", "revoke"].contains(&name) {
        bail!("the name {name:?} has a meaning of its own: choose another one");
    }
    Ok(())
}

/// Writes a new file. Fails if the file exists.
fn write_new(path: &Path, content: &[u8], mode: u32) -> anyhow::Result<()> {
    let file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path);
    file.and_then(|mut file| file.write_all(content))
        .with_context(|| format!("writing {}", path.display()))
}

/// Writes a file, or replaces it at once: a reader sees the old content or the new one.
fn replace(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = Path::new(&name);
    // What an interrupted call has left behind.
    let _ = fs::remove_file(new);
    write_new(new, content, 0o644)?;
    fs::rename(new, path).with_context(|| format!("writing {}", path.display()))
}
