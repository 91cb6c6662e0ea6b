//! The plugin's file, and the ggml that is to load it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::Report;

/// The symbols that ggml looks for.
const SYMBOLS: [&CStr; 2] = [c"ggml_backend_init", c"ggml_backend_score"];

/// Names that a ggml has, beside a plugin.
const GGML: [&str; 2] = ["libggml-base.so", "libggml-base.so.0"];

pub(super) fn check(plugin: Option<&Path>, ggml: Option<&Path>, report: &mut Report) {
    let named = plugin
        .map(Path::to_path_buf)
        .or_else(|| std::env::var_os("GGML_BACKEND_PATH").map(PathBuf::from));
    // Where the packages put it.
    let Some(file) = named.or_else(|| crate::install::plugin(None).ok()) else {
        report.note(
            "plugin",
            "not looked at: name it with --plugin (the host itself needs none)",
        );
        return;
    };
    // First, as in a program: the plugin looks for a ggml that is already there.
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
                "{}: no plugin of ggml's: {} is missing",
                file.display(),
                missing.join(" and ")
            ),
        );
        return;
    }
    report.ok(
        "plugin",
        format!("{}: loads, and exports what ggml looks for", file.display()),
    );
    if let Ok(stamp) = crate::install::describe(&file) {
        report.ok("plugin", stamp);
    }
    if !has_ggml {
        report.note(
            "plugin",
            "not asked for a device: no ggml beside it; name one with --ggml",
        );
        return;
    }
    let Some(score) = object.symbol(c"ggml_backend_score") else {
        return;
    };
    // SAFETY: the symbol of this name is, by ggml's plugin interface, a function without arguments
    // that returns an int; the object is never closed.
    let score = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(score)() };
    if score > 0 {
        report.ok(
            "plugin",
            format!("it fits this ggml and finds an executor: score {score}"),
        );
    } else {
        report.fail(
            "plugin",
            "it gives itself a score of 0; its own line above says why",
        );
    }
}

/// Loads a ggml for the plugin to find. Whether there is one now.
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
                "{}: no ggml of a release since 0.9: it has no ggml_version",
                file.display()
            ),
        );
        return false;
    };
    // SAFETY: the symbol of this name is, in ggml, a function without arguments that returns a
    // string constant; the object is never closed.
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

/// A shared object in this process. Stays for good.
struct Object(*mut c_void);

impl Object {
    fn load(file: &Path) -> Result<Object, String> {
        if let Err(error) = std::fs::File::open(file) {
            return Err(error.to_string());
        }
        // A name without a slash would be looked for in the system's folders.
        let file = file.canonicalize().map_err(|e| e.to_string())?;
        let name = CString::new(file.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
        // SAFETY: a terminated string. The file's initialisers run; that is what loading a plugin
        // means, and the user has named this one.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            // SAFETY: after a failure dlerror returns a terminated string that stays until the next
            // call, or null.
            let error = unsafe {
                let error = libc::dlerror();
                (!error.is_null()).then(|| CStr::from_ptr(error).to_string_lossy().into_owned())
            };
            return Err(error.unwrap_or_else(|| "it does not load".into()));
        }
        Ok(Object(handle))
    }

    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a live handle and a terminated string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }
}
