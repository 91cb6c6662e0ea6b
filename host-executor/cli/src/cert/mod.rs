//! `vgpu cert`: a private certificate authority, and certificates for hosts and guests.

mod authority;
mod files;
mod issue;
mod renew;
mod revoke;

use anyhow::bail;
use clap::{Parser, Subcommand};

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
