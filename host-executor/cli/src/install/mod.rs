//! `vgpu install` and `vgpu uninstall`: the plugin in an Ollama installation.
//!
//! Ollama loads backends from subfolders of its library folder, and uses a backend alone when the
//! environment names its folder. An installation therefore consists of two files: the plugin, and a
//! drop-in with the environment for Ollama's systemd service. No file of Ollama is changed.

mod before_start;
mod files;
mod ollama;
mod stamp;
mod state;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::Parser;
use vgpu_elf::Library;
use vgpu_transport::link::Endpoint;
use vgpu_transport::link::connect::CERTIFICATES;
use vgpu_transport::link::stream::tls::{CertificateFiles, Certificates, TlsError};
use vgpu_transport::link::stream::x509::utc;

use before_start::BeforeStart;
use files::{Change, Lock};
use ollama::Ollama;
use stamp::{PLUGIN, Stamp};

pub(crate) use before_start::INSTALLED;
pub(crate) use state::{OllamaState, check_installed, ollama_state};

/// The drop-in's file name, and its first line, which identifies it.
const DROP_IN: &str = "vgpu.conf";
const HEADER: &str = "# Written by `vgpu install`; `vgpu uninstall` removes it.";
/// The group whose members may use the executor's socket, and the vGPU's window in a virtual
/// machine.
const GROUP: &str = "vgpu";
/// The releases of Ollama that `cargo xtask test --only ollama --full` runs.
const TESTED: [&str; 2] = ["0.33.0", "0.34.4"];

/// Installs the vGPU plugin for Ollama.
///
/// Checks Ollama's ggml (version, interface, functions), copies libggml-vgpu.so into a subfolder of
/// Ollama's library folder, and writes a systemd drop-in with the environment that makes Ollama use
/// the plugin. If a step fails, nothing is changed.
#[derive(Parser)]
pub(crate) struct InstallArgs {
    #[command(flatten)]
    place: OllamaTarget,

    /// The plugin to install. [default: libggml-vgpu.so beside this program, or in ../lib/vgpu]
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,

    /// The address of the executor for Ollama, such as unix:/run/vgpu/vgpu.sock. [default: the
    /// environment variable VGPU_ENDPOINT; if it is unset, the plugin searches for a vGPU]
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<String>,

    /// The folder of the certificates with which Ollama connects over tcp: what `vgpu cert` has
    /// made for this guest. An absolute path below --root. Ollama's user must be able to read its
    /// files
    #[arg(long, value_name = "FOLDER")]
    certs: Option<PathBuf>,

    /// Install the plugin, and leave the drop-in as it is. The drop-in runs this command before
    /// each start of Ollama, whose updates remove the plugin
    #[arg(long, conflicts_with_all = ["endpoint", "certs"])]
    plugin_only: bool,
}

/// Removes the vGPU plugin from Ollama, and the drop-in.
#[derive(Parser)]
pub(crate) struct UninstallArgs {
    #[command(flatten)]
    place: OllamaTarget,
}

#[derive(Parser)]
struct OllamaTarget {
    /// Ollama's folder: the one with llama-server, the prefix above it, or the root of a container.
    /// [default: /usr/local/lib/ollama, /usr/lib/ollama, /opt/ollama/lib/ollama, the folder of the
    /// `ollama` on the search path, or ~/.local/lib/ollama]
    #[arg(long, value_name = "DIR")]
    ollama: Option<PathBuf>,

    /// The root of the file system to change, such as that of a container or an image
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,

    /// Print what would be done, and change nothing
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn install(args: InstallArgs) -> Result<()> {
    let endpoint = endpoint(args.endpoint)?;
    let file = plugin(args.plugin)?;
    let plugin = Library::read(&file)?;
    let stamp = Stamp::of(&plugin)?;
    let OllamaTarget {
        ollama,
        root,
        dry_run,
    } = args.place;
    let certs = certificates(&root, args.certs, endpoint.as_deref())?;
    let ollama = Ollama::find(&root, ollama.as_deref())?;
    let ggml = ollama.check_ggml(&plugin, &stamp)?;
    if let [library, ..] = ollama.foreign_libraries()?.as_slice() {
        bail!(
            "{} does not belong to vgpu, and Ollama would load the first library in that folder. \
             Remove it",
            library.display()
        );
    }

    println!("plugin   {} ({stamp})", file.display());
    println!(
        "ollama   {} (tested with Ollama {})",
        ollama.lib.display(),
        TESTED.join(" and ")
    );
    println!(
        "ggml     {} (API {}), {}",
        ggml.version,
        ggml.api,
        ggml.file.display()
    );

    let mut environment = environment(endpoint.as_deref(), certs.as_deref());
    let service = match args.plugin_only {
        true => None,
        false => ollama.drop_ins(&root),
    };
    let before_start = match service {
        Some(_) => BeforeStart::find(&root, &file, &ollama.found)?,
        None => BeforeStart::default(),
    };
    for note in &before_start.notes {
        println!("note     {note}");
    }
    environment.extend(before_start.environment.clone());
    let drop_in = drop_in(&root, &environment, &before_start);
    let mut changes = vec![Change {
        target: ollama.backend_folder().join(PLUGIN),
        contents: plugin.data(),
    }];
    if let Some(folder) = &service {
        let target = folder.join(DROP_IN);
        ensure_ours(&target)?;
        changes.push(Change {
            target,
            contents: drop_in.as_bytes(),
        });
    }
    changes.retain(|change| {
        let done = change.is_done();
        println!(
            "{}  {}",
            if done { "keep   " } else { "write  " },
            change.target.display()
        );
        !done
    });
    if service.is_some() {
        drop_in
            .lines()
            .for_each(|line| println!("             {line}"));
    }
    if !changes.is_empty() {
        let writable = changes
            .iter()
            .try_for_each(|change| files::may_write(&change.target));
        if dry_run {
            if let Err(error) = writable {
                println!("note     {error}");
            }
            println!("nothing is changed: this was a dry run");
            return Ok(());
        }
        writable?;
        let _lock = Lock::take(&ollama.lib)?;
        files::write(&changes).context("nothing is installed")?;
    }
    if !args.plugin_only {
        println!(
            "{}",
            next_step(service.is_some(), &environment, changes.is_empty())
        );
    }
    Ok(())
}

pub(crate) fn uninstall(args: UninstallArgs) -> Result<()> {
    let OllamaTarget {
        ollama,
        root,
        dry_run,
    } = args.place;
    let ollama = Ollama::find(&root, ollama.as_deref())?;
    let mut targets = Vec::new();
    // The drop-in first: if only the plugin were removed, Ollama would look for a missing library.
    let service = ollama.drop_ins(&root).map(|folder| folder.join(DROP_IN));
    let drop_in = service.filter(|file| file.exists());
    if let Some(file) = &drop_in {
        ensure_ours(file)?;
        targets.push(file.clone());
    }
    let plugin = ollama.backend_folder().join(PLUGIN);
    if plugin.exists() {
        Stamp::of(&Library::read(&plugin)?).context("the file is not removed")?;
        targets.push(plugin);
    }
    println!("ollama   {}", ollama.lib.display());
    for target in &targets {
        println!("remove   {}", target.display());
    }
    if targets.is_empty() {
        println!("no vGPU plugin is installed");
        return Ok(());
    }
    let writable = targets
        .iter()
        .try_for_each(|target| files::may_write(target));
    if dry_run {
        if let Err(error) = writable {
            println!("note     {error}");
        }
        println!("nothing is changed: this was a dry run");
        return Ok(());
    }
    writable?;
    let _lock = Lock::take(&ollama.lib)?;
    files::remove(&targets).context("nothing is removed")?;
    match drop_in {
        Some(_) => println!("next:    systemctl daemon-reload && systemctl restart ollama"),
        None => println!("next:    restart Ollama, without OLLAMA_LLM_LIBRARY=vgpu"),
    }
    Ok(())
}

/// The endpoint for the drop-in. Checked here, where the user can correct it.
fn endpoint(named: Option<String>) -> Result<Option<String>> {
    let (source, text) = match named {
        Some(text) => ("--endpoint", text),
        None => match std::env::var("VGPU_ENDPOINT") {
            Ok(text) if !text.is_empty() => ("VGPU_ENDPOINT", text),
            _ => return Ok(None),
        },
    };
    for one in text.split(',') {
        one.trim()
            .parse::<Endpoint>()
            .map_err(|error| anyhow!("{source}: {error}"))?;
    }
    check_for_unit(source, &text)?;
    Ok(Some(text))
}

/// The folder of certificates for the drop-in, after a check of its files.
fn certificates(
    root: &Path,
    named: Option<PathBuf>,
    endpoint: Option<&str>,
) -> Result<Option<String>> {
    let Some(folder) = named else {
        return Ok(None);
    };
    let is_tcp = |one: &str| matches!(one.trim().parse::<Endpoint>(), Ok(Endpoint::Tcp { .. }));
    ensure!(
        endpoint.is_some_and(|endpoint| endpoint.split(',').any(is_tcp)),
        "--certs is for an executor over TCP: name it with --endpoint tcp:HOST:PORT"
    );
    let text = folder.to_str().filter(|_| folder.is_absolute());
    let text = text.with_context(|| {
        let folder = folder.display();
        format!("--certs: {folder} is not an absolute path, which Ollama's service needs")
    })?;
    check_for_unit("--certs", text)?;
    let place = root.join(folder.strip_prefix("/")?);
    let files = CertificateFiles::read(&place, None);
    let certificates = files.map_err(TlsError::from).and_then(Certificates::check);
    let certificates = certificates.context("--certs")?;
    let own = certificates.own();
    let ends = own.not_after.map_or_else(|| "no known day".into(), utc);
    println!("certs    {text}: of {}, until {ends}", own.name());
    for (file, ending) in certificates.ending() {
        println!("note     {}: {ending}", file.display());
    }
    Ok(Some(text.to_owned()))
}

/// Refuses text that means something else in a systemd unit.
fn check_for_unit(source: &str, text: &str) -> Result<()> {
    ensure!(
        !text.contains(['"', '\\', '\n', '%']),
        "{source}: {text:?} has characters that are special in a systemd unit"
    );
    Ok(())
}

/// Describes a plugin file: its version, and the ggml releases it works with.
pub(crate) fn describe(plugin: &Path) -> Result<String> {
    let stamp = Stamp::of(&Library::read(plugin)?)?;
    Ok(format!("{stamp}, for ggml {}", stamp.ggml))
}

/// The plugin file: the named one, or the one that was installed or built with this program.
pub(crate) fn plugin(named: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(file) = named {
        return Ok(file);
    }
    let program = std::env::current_exe()
        .and_then(|program| program.canonicalize())
        .context("finding this program")?;
    let dir = program.parent().unwrap_or(Path::new("/"));
    let places = [dir.join(PLUGIN), dir.join("../lib/vgpu").join(PLUGIN)];
    let found = places.iter().find(|file| file.exists()).with_context(|| {
        let [beside, lib] = &places;
        format!(
            "no {PLUGIN} at {} or {}: name it with --plugin FILE",
            beside.display(),
            lib.display()
        )
    })?;
    found
        .canonicalize()
        .with_context(|| format!("resolving {}", found.display()))
}

/// The environment that Ollama needs.
fn environment(endpoint: Option<&str>, certs: Option<&str>) -> Vec<String> {
    let mut environment = vec![
        // Ollama searches only the folder of this name for a backend.
        "OLLAMA_LLM_LIBRARY=vgpu".to_owned(),
        // Ollama does not ask an unknown backend whether it supports flash attention.
        "OLLAMA_FLASH_ATTENTION=1".to_owned(),
        // A model whose executor is gone fails with an error, and the next request loads it again.
        // Otherwise the model would stay in memory without weights, or run on the CPU.
        "VGPU_REQUIRED=1".to_owned(),
    ];
    environment.extend(endpoint.map(|endpoint| format!("VGPU_ENDPOINT={endpoint}")));
    environment.extend(certs.map(|folder| format!("{CERTIFICATES}={folder}")));
    environment
}

/// The drop-in for Ollama's service.
fn drop_in(root: &Path, environment: &[String], before_start: &BeforeStart) -> String {
    // Ollama searches for devices once, at its start: the executor of the same machine has to be
    // started before. In a virtual machine the executor is another machine's service. An Ollama
    // that started without an executor or without the plugin would stay on the CPU, so the start
    // fails and is repeated until there are both.
    let mut text = format!("{HEADER}\n[Unit]\nAfter=vgpu.service\n");
    let commands = before_start.commands();
    if !commands.is_empty() {
        text += "StartLimitIntervalSec=0\n";
    }
    text += "\n[Service]\n";
    for variable in environment {
        text += &format!("Environment=\"{variable}\"\n");
    }
    for command in &commands {
        text += &format!("ExecStartPre={command}\n");
    }
    if !commands.is_empty() {
        text += "Restart=always\nRestartSec=3\n";
    }
    let groups = fs::read_to_string(root.join("etc/group")).unwrap_or_default();
    if groups
        .lines()
        .any(|line| line.split(':').next() == Some(GROUP))
    {
        text += &format!("SupplementaryGroups={GROUP}\n");
    }
    text
}

/// Fails if the drop-in exists and another program has written it.
fn ensure_ours(drop_in: &Path) -> Result<()> {
    match fs::read_to_string(drop_in) {
        Ok(text) => {
            ensure!(
                text.starts_with(HEADER),
                "{} was not written by vgpu: its first line is not {HEADER:?}. Move the file",
                drop_in.display()
            );
            Ok(())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("reading {}", drop_in.display())),
    }
}

fn next_step(service: bool, environment: &[String], nothing_changed: bool) -> String {
    match (service, nothing_changed) {
        (_, true) => "the plugin is installed already".to_owned(),
        (true, _) => "next:    systemctl daemon-reload && systemctl restart ollama".to_owned(),
        (false, _) => format!(
            "next:    no service runs this Ollama: start it with {} ollama serve",
            environment.join(" ")
        ),
    }
}
