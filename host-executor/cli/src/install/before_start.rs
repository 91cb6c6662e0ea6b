//! The commands that Ollama's service runs before each start of Ollama.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::ollama::FOLDER;
use super::stamp::PLUGIN;

/// Where the packages place this program.
const PROGRAM: &str = "/usr/bin/vgpu";

/// What is special in a command of a unit.
const SPECIAL: [char; 5] = ['"', '\'', '\\', '%', '$'];

/// The variable by which `vgpu wait` knows the plugin that Ollama is to have.
pub(crate) const INSTALLED: &str = "VGPU_INSTALLED";

/// What is to happen before a start of Ollama.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct BeforeStart {
    /// Installs the plugin again, as root: updates of Ollama remove the folder that it is in. A
    /// failure does not end the start, since another version of the program may not know the
    /// command.
    install: Option<String>,
    /// Waits for the executor, as the user of the service, if the plugin is there.
    wait: Option<String>,
    /// The variable for a service that waits: [`INSTALLED`], with the place of the plugin.
    pub(super) environment: Option<String>,
    /// Why one of them is left out.
    pub(super) notes: Vec<String>,
}

impl BeforeStart {
    /// For a service in the file system `root` with the Ollama in `lib`, into which the file
    /// `plugin` is installed.
    ///
    /// # Errors
    /// If a path cannot be resolved.
    pub(super) fn find(root: &Path, plugin: &Path, lib: &Path) -> Result<BeforeStart> {
        let root = resolve(root)?;
        let program = program(&root)?;
        // Into an image: the system that runs the service has another program, or none.
        let Some(wait) = inside(&root, &program) else {
            return Ok(BeforeStart::default());
        };
        let reason = not_for_unit(&wait).or_else(|| closed(&root, &program));
        if let (true, Some(reason)) = (wait != PROGRAM, reason) {
            let note = format!(
                "Ollama's service does not wait for the executor: {reason}. Place this program \
                 where all users may execute it, such as below /opt, and run the command again"
            );
            return Ok(BeforeStart {
                notes: vec![note],
                ..BeforeStart::default()
            });
        }
        let lib =
            { std::path::absolute(lib) }.with_context(|| format!("finding {}", lib.display()))?;
        let install = install_command(&root, &program, &resolve(plugin)?, &lib);
        let note = |reason| {
            format!(
                "the service does not install the plugin again after an update of Ollama: \
                 {reason}. Run `vgpu install` after each update"
            )
        };
        let notes = install.as_ref().err().map(note).into_iter().collect();
        let installed = inside(&root, &lib.join(FOLDER).join(PLUGIN));
        let installed = installed.filter(|path| not_for_unit(path).is_none());
        Ok(BeforeStart {
            install: install.ok(),
            wait: Some(format!("{wait} wait")),
            environment: installed.map(|plugin| format!("{INSTALLED}={plugin}")),
            notes,
        })
    }

    /// The commands, in order, as a unit has them.
    pub(super) fn commands(&self) -> Vec<&str> {
        let all = [&self.install, &self.wait];
        all.into_iter().flatten().map(String::as_str).collect()
    }
}

/// The program for the service: that of the package, unless it is another one than this.
fn program(root: &Path) -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding this program")?;
    let own = resolve(&own)?;
    let of_package = root.join(&PROGRAM[1..]);
    let is_ours = match root == Path::new("/") {
        true => resolve(&of_package).is_ok_and(|path| path == own),
        // Another system: nothing tells its version.
        false => of_package.exists(),
    };
    Ok(if is_ours { of_package } else { own })
}

fn resolve(path: &Path) -> Result<PathBuf> {
    { path.canonicalize() }.with_context(|| format!("finding {}", path.display()))
}

/// The command that installs the plugin, with all privileges of the service manager. So nobody but
/// root may be able to change the program, the plugin, or the place of the plugin.
///
/// # Errors
/// Why there is none.
fn install_command(
    root: &Path,
    program: &Path,
    plugin: &Path,
    lib: &Path,
) -> Result<String, String> {
    let path = |path: &Path| {
        let text = inside(root, path).ok_or_else(|| {
            let (path, root) = (path.display(), root.display());
            format!("{path} is not below {root}")
        })?;
        // Where the links lead, and where they are.
        let target = path.canonicalize().map_err(|error| {
            let path = path.display();
            format!("{path}: {error}")
        })?;
        let reason = not_for_unit(&text)
            .or_else(|| changeable(root, path))
            .or_else(|| changeable(Path::new("/"), &target).filter(|_| target != path));
        reason.map_or(Ok(text), Err)
    };
    let (program, plugin, lib) = (path(program)?, path(plugin)?, path(lib)?);
    Ok(format!(
        "-+{program} install --plugin-only --ollama {lib} --plugin {plugin}"
    ))
}

/// The path as a process in the file system `root` names it.
fn inside(root: &Path, path: &Path) -> Option<String> {
    let inside = path.strip_prefix(root).ok()?;
    Some(format!("/{}", inside.display()))
}

/// Why a path cannot be a word of a command in a unit.
fn not_for_unit(path: &str) -> Option<String> {
    let is_special = path.contains(char::is_whitespace) || path.contains(SPECIAL);
    is_special.then(|| format!("{path:?} has characters that are special in a systemd unit"))
}

/// The file and its folders below `root`, and `root`.
fn parts<'a>(root: &'a Path, path: &'a Path) -> impl Iterator<Item = &'a Path> {
    path.ancestors()
        .take_while(move |part| part.starts_with(root))
}

/// Why not every user may execute a program.
fn closed(root: &Path, program: &Path) -> Option<String> {
    let is_closed =
        |part: &&Path| fs::metadata(part).is_ok_and(|file| file.permissions().mode() & 0o001 == 0);
    let closed: PathBuf = parts(root, program).find(is_closed)?.into();
    let closed = closed.display();
    Some(format!("its user may not enter or execute {closed}"))
}

/// Why another user than root may change what is at `path`.
fn changeable(root: &Path, path: &Path) -> Option<String> {
    parts(root, path).find_map(|part| {
        let file = match fs::metadata(part) {
            Ok(file) => file,
            Err(error) => return Some(format!("{}: {error}", part.display())),
        };
        let (part, mode) = (part.display(), file.mode() & 0o7777);
        match file.uid() {
            0 if mode & 0o022 == 0 => None,
            0 => Some(format!(
                "others than root may change {part} (mode {mode:o})"
            )),
            owner => Some(format!("{part} is the user {owner}'s")),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_for_root_have_paths_that_only_root_may_change() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let own = fs::metadata(&root).unwrap().uid();
        let file = |name: &str, mode| {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let (program, plugin) = (file("bin/vgpu", 0o755), file("lib/plugin.so", 0o644));
        let lib = root.join("lib");
        let made = install_command(&root, &program, &plugin, &lib);
        match own {
            0 => assert_eq!(
                made.as_deref(),
                Ok("-+/bin/vgpu install --plugin-only --ollama /lib --plugin /lib/plugin.so")
            ),
            // A test that does not run as root sees that its files are refused.
            _ => assert!(made.unwrap_err().contains(&format!("user {own}'s"))),
        }
        let open = file("open/vgpu", 0o755);
        let mode = fs::Permissions::from_mode(0o777);
        fs::set_permissions(root.join("open"), mode).unwrap();
        let spaced = file("two words/vgpu", 0o755);
        let missing = root.join("missing");
        let elsewhere = Path::new("/proc/self/exe");
        for (program, reason) in [
            (open.as_path(), "others than root may change"),
            (&spaced, "special in a systemd unit"),
            (&missing, "No such file"),
            (elsewhere, "is not below"),
        ] {
            let error = install_command(&root, program, &plugin, &lib).unwrap_err();
            assert!(error.contains(reason) || own != 0, "{error}");
        }
    }
}
