//! What the container runtime gives a container with a claim: a file of the Container Device
//! Interface (CDI), version 0.5.0, for each claim.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::container;
use crate::guests::if_there;
use crate::options::Options;

/// The kind of the devices of all claims.
const KIND: &str = "vgpu.dev/claim";

/// What the names of the files begin with.
const PREFIX: &str = "vgpu.dev-claim_";

/// The version that containerd 1.7 and CRI-O 1.27 know.
const VERSION: &str = "0.5.0";

/// The name of the device of a claim for the container runtime.
pub(crate) fn device(uid: &str) -> String {
    format!("{KIND}={uid}")
}

fn path(folder: &Path, uid: &str) -> PathBuf {
    folder.join(format!("{PREFIX}{uid}.json"))
}

/// The text of the file of a claim. The mounts are those of the whole file: a container that has
/// several devices of a claim gets them once.
fn text(options: &Options, uid: &str) -> Value {
    let mounts = container::mounts(options, uid).map(|mount| {
        json!({
            "hostPath": mount.host,
            "containerPath": mount.container,
            "options": ["ro", "nosuid", "nodev", "bind"],
        })
    });
    let variables = container::variables().map(|(name, value)| format!("{name}={value}"));
    json!({
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": [{"name": uid, "containerEdits": {"env": variables}}],
        "containerEdits": {"mounts": mounts},
    })
}

/// Writes the file of a claim, unless it is there.
///
/// # Errors
/// The folder cannot be made, or the file not be written.
pub(crate) fn write(folder: &Path, options: &Options, uid: &str) -> io::Result<()> {
    let (path, text) = (path(folder, uid), text(options, uid).to_string());
    if fs::read(&path).is_ok_and(|there| there == text.as_bytes()) {
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    replace(&path, text.as_bytes())
}

/// Removes the file of a claim, if there is one.
///
/// # Errors
/// The file cannot be removed.
pub(crate) fn remove(folder: &Path, uid: &str) -> io::Result<()> {
    if_there(fs::remove_file(path(folder, uid)))
}

/// The ids of the claims that have a file.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn uids(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let uid = |name: String| Some(name.strip_prefix(PREFIX)?.strip_suffix(".json")?.to_owned());
    Ok(names.filter_map(uid).collect())
}

/// Replaces a file as a whole: no reader sees a part of it.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    // A name that ends otherwise than those that readers look for.
    let mut file = tempfile::Builder::new()
        .prefix(".vgpu-")
        .tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_has_a_file_until_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let cdi = folder.path().join("cdi");
        let options = Options::for_tests();
        assert!(uids(&cdi).unwrap().is_empty());
        remove(&cdi, "a-1").unwrap();
        write(&cdi, &options, "a-1").unwrap();
        write(&cdi, &options, "a-1").unwrap();
        write(&cdi, &options, "b").unwrap();
        fs::write(cdi.join("other.json"), "").unwrap();
        let mut known = uids(&cdi).unwrap();
        known.sort();
        assert_eq!(known, ["a-1", "b"]);
        assert_eq!(device("a-1"), "vgpu.dev/claim=a-1");

        let text = fs::read_to_string(path(&cdi, "a-1")).unwrap();
        let text: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(text["kind"], "vgpu.dev/claim");
        assert_eq!(text["devices"][0]["name"], "a-1");
        let env = text["devices"][0]["containerEdits"]["env"].to_string();
        assert!(
            env.contains("VGPU_ENDPOINT=unix:/run/vgpu/vgpu.sock"),
            "{env}"
        );
        let mounts = text["containerEdits"]["mounts"].as_array().unwrap();
        let folder = mounts
            .iter()
            .find(|mount| mount["containerPath"] == "/run/vgpu");
        assert_eq!(folder.unwrap()["hostPath"], "/run/vgpu/pods/a-1");

        remove(&cdi, "a-1").unwrap();
        assert_eq!(uids(&cdi).unwrap(), ["b"]);
    }
}
