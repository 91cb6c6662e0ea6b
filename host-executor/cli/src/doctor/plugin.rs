//! The plugin's file, and the ggml that loads it.

use std::ffi::{CStr, CString, NulError, c_char, c_int, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::report::Report;
use crate::session_client;

/// The symbols of the plugin that ggml calls.
const SYMBOLS: [&CStr; 2] = [c"ggml_backend_init", c"ggml_backend_score"];

/// File names of ggml libraries beside a plugin.
const GGML: [&str; 2] = ["libggml-base.so", "libggml-base.so.0"];

pub(super) fn check(plugin: Option<&Path>, ggml: Option<&Path>, report: &mut Report) {
    let named = plugin
        .map(Path::to_path_buf)
        .or_else(|| std::env::var_os("GGML_BACKEND_PATH").map(PathBuf::from));
    // The folder of the packages.
    let Some(file) = named.or_else(|| crate::install::plugin(None).ok()) else {
        report.note(
            "plugin",
            "not checked: name the plugin with --plugin (the host needs no plugin)",
        );
        return;
    };
    // Before the plugin, as in a program: the plugin resolves symbols of a ggml that is already
    // loaded.
    let folder = file.parent().unwrap_or(Path::new("."));
    let ggml = ggml.map(Path::to_path_buf).or_else(|| {
        let beside = GGML.iter().map(|name| folder.join(name));
        beside.into_iter().find(|file| file.exists())
    });
    let has_ggml = ggml.is_some_and(|file| check_ggml(&file, report));

    let object = match Object::load(&file) {
        Ok(object) => object,
        Err(error) => {
            report.fail("plugin", format!("{}: {error}", file.display()));
            return;
        }
    };
    let missing: Vec<_> = SYMBOLS
        .iter()
        .filter(|name| object.symbol(name).is_none())
        .map(|name| name.to_string_lossy())
        .collect();
    if !missing.is_empty() {
        report.fail(
            "plugin",
            format!(
                "{}: not a ggml plugin: the symbol {} is missing",
                file.display(),
                missing.join(" and ")
            ),
        );
        return;
    }
    report.ok(
        "plugin",
        format!(
            "{}: loads, and exports the symbols that ggml needs",
            file.display()
        ),
    );
    if let Ok(stamp) = crate::install::describe(&file) {
        report.ok("plugin", stamp);
    }
    if !has_ggml {
        report.note(
            "plugin",
            "not asked for a device: no ggml beside the plugin; name one with --ggml",
        );
        return;
    }
    let Some(score) = object.symbol(c"ggml_backend_score") else {
        return;
    };
    // SAFETY: by ggml's plugin interface a symbol of this name is a function without arguments that
    // returns an int. The object is never unloaded, so the function stays valid.
    let score = unsafe { std::mem::transmute::<*mut c_void, Score>(score) };
    check_score(move || score(), SCORE_LIMIT, report);
}

/// `ggml_backend_score`.
type Score = extern "C" fn() -> c_int;

/// How long the plugin may look for executors: longer than it takes for an executor that opens a
/// link and does not answer, whom the plugin then names.
const SCORE_LIMIT: Duration = Duration::from_secs(30);

fn check_score(
    score: impl FnOnce() -> c_int + Send + 'static,
    limit: Duration,
    report: &mut Report,
) {
    match session_client::result_within(limit, score) {
        Ok(score) if score > 0 => report.ok(
            "plugin",
            format!("compatible with this ggml, and an executor answers: score {score}"),
        ),
        Ok(_) => report.fail(
            "plugin",
            "the plugin's score is 0; the line that the plugin has logged above says why",
        ),
        Err(error) => report.fail("plugin", format!("ggml_backend_score: {error}")),
    }
}

/// Loads a ggml library for the plugin. Returns whether a ggml is loaded now.
fn check_ggml(file: &Path, report: &mut Report) -> bool {
    let object = match Object::load(file) {
        Ok(object) => object,
        Err(error) => {
            report.fail("ggml", format!("{}: {error}", file.display()));
            return false;
        }
    };
    let Some(version) = object.symbol(c"ggml_version") else {
        report.fail(
            "ggml",
            format!(
                "{}: this ggml is older than 0.9: the function ggml_version is missing",
                file.display()
            ),
        );
        return false;
    };
    // SAFETY: in ggml a symbol of this name is a function without arguments that returns a string
    // constant. The object is never unloaded, so function and string stay valid.
    let version = unsafe {
        let version =
            std::mem::transmute::<*mut c_void, extern "C" fn() -> *const c_char>(version)();
        (!version.is_null()).then(|| CStr::from_ptr(version).to_string_lossy().into_owned())
    };
    report.ok(
        "ggml",
        format!(
            "{}: ggml {}",
            file.display(),
            version.as_deref().unwrap_or("of unknown version")
        ),
    );
    true
}

/// Why a file cannot be loaded into this process.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    /// The file is missing, or this process may not read it.
    #[error(transparent)]
    File(#[from] io::Error),
    #[error(transparent)]
    Name(#[from] NulError),
    /// The file is not a shared object for this machine, or a library that it needs is missing. The
    /// text is from the dynamic linker.
    #[error("{0}")]
    Linker(String),
    /// The dynamic linker has failed without a text.
    #[error("the file cannot be loaded")]
    LinkerSilent,
}

/// A shared object in this process. Never unloaded.
struct Object(*mut c_void);

impl Object {
    fn load(file: &Path) -> Result<Object, LoadError> {
        // The error of the file system says more than the dynamic linker's.
        std::fs::File::open(file)?;
        // A name without a slash would be searched for in the system's library folders.
        let file = file.canonicalize()?;
        let name = CString::new(file.as_os_str().as_bytes())?;
        // SAFETY: `name` is a terminated string. dlopen runs the initialisers of the file, which
        // the user has named for that purpose.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            // SAFETY: dlerror returns null or a terminated string, which stays valid until the next
            // call of this thread.
            let error = unsafe {
                let error = libc::dlerror();
                (!error.is_null()).then(|| CStr::from_ptr(error).to_string_lossy().into_owned())
            };
            return Err(error.map_or(LoadError::LinkerSilent, LoadError::Linker));
        }
        Ok(Object(handle))
    }

    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is from dlopen and never closed; the name is a terminated string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_plugin_that_does_not_answer_is_a_failure() {
        let (open, never) = mpsc::channel::<()>();
        let mut report = Report::default();
        let hangs = move || {
            let _ = never.recv();
            100
        };
        check_score(hangs, Duration::from_millis(20), &mut report);
        drop(open);
        assert!(!report.is_well());
    }
}
