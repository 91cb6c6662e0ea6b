//! Archives of container images, as `docker save` writes them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::json;

use xtask_common::process;

use crate::files::sha256;

/// What tells images with the same files apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Image {
    /// The name with a tag.
    pub(crate) name: &'static str,
    /// The program.
    pub(crate) entrypoint: &'static [&'static str],
    /// Its arguments, where a pod names no others.
    pub(crate) command: &'static [&'static str],
    /// The environment, `NAME=VALUE`.
    pub(crate) variables: &'static [&'static str],
}

/// Packs images with the files below `root` into a new archive in `folder`: one layer, one
/// configuration for each image
/// (<https://github.com/moby/docker-image-spec/blob/main/spec.md>).
///
/// # Errors
/// If a file cannot be read or written.
pub(crate) fn archive(root: &Path, images: &[Image], folder: &Path) -> Result<PathBuf> {
    let layout = folder.join("layout");
    fs::create_dir(&layout).context("creating a folder")?;
    let tar = |of: &Path, to: &Path| {
        let mut tar = Command::new("tar");
        tar.args(["--numeric-owner", "--create", "--file"]).arg(to);
        process::output(tar.arg("--directory").arg(of).arg("."))
    };
    let layer = layout.join("layer.tar");
    tar(root, &layer)?;
    let id = format!("sha256:{}", sha256(&layer)?);
    let mut manifests = Vec::new();
    for (number, image) in images.iter().enumerate() {
        let config = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "Entrypoint": image.entrypoint, "Cmd": image.command, "Env": image.variables,
            },
            "rootfs": {"type": "layers", "diff_ids": [id]},
        });
        let file = format!("{number}.json");
        fs::write(layout.join(&file), config.to_string()).context("writing a configuration")?;
        manifests.push(json!({
            "Config": file, "RepoTags": [image.name], "Layers": ["layer.tar"],
        }));
    }
    let manifests = json!(manifests).to_string();
    fs::write(layout.join("manifest.json"), manifests).context("writing a manifest")?;
    let archive = folder.join("images.tar");
    tar(&layout, &archive)?;
    fs::remove_dir_all(&layout).context("removing a folder")?;
    Ok(archive)
}
