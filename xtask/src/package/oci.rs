//! Container images, as archives in the layout of the OCI: the executor, and llama-server with the
//! plugin. They are made without a daemon and without a registry: podman, skopeo, buildah and
//! containerd read them. `docker load` does, too: Docker before 25 reads `manifest.json` instead of
//! the OCI's documents.
//!
//! By hand: tar writes the layers, and what is left are four JSON documents.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::contents::Generated;
use super::debian_base::{self, DebianPackage};
use super::layout::{Entry, entry, lay_out, reproducible_tar};
use super::sbom::{self, ImageContents, Tree, sha256};
use xtask_common::dist::Dist;
use xtask_common::image;
use xtask_common::llama::PortableServer;
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::version;
use xtask_common::workspace;

/// Debian's packages that `vgpu` needs to run: the C library, and what unwinds a panic.
const BASE: [&str; 2] = ["libc6", "libgcc-s1"];

/// What llama-server needs besides: C++ and OpenMP, with which ggml computes on the CPU.
const BASE_OF_LLAMA: [&str; 4] = ["libc6", "libgcc-s1", "libstdc++6", "libgomp1"];

/// A blob of the layout.
struct Blob {
    media_type: &'static str,
    digest: String,
    size: u64,
}

impl Blob {
    fn descriptor(&self) -> Value {
        json!({"mediaType": self.media_type, "digest": self.digest, "size": self.size})
    }

    /// The path in the archive.
    fn path(&self) -> String {
        format!("blobs/{}", self.digest.replace(':', "/"))
    }
}

/// What all images of a release have in common.
#[derive(Clone, Copy)]
pub(super) struct Sources<'a> {
    pub(super) dist: &'a Dist,
    pub(super) generated: &'a Generated,
    /// The crates in the files.
    pub(super) tree: &'a Tree,
    /// Whether `vgpu` has machine code for GPUs in it.
    pub(super) has_machine_code: bool,
    pub(super) version: &'a str,
    /// Where the archives and their bills of materials are written.
    pub(super) folder: &'a Path,
}

/// An image: a layer with Debian's packages, one with our files, and what a container starts.
struct Image<'a> {
    /// The name, without a tag.
    name: &'a str,
    /// The beginning of the archive's name.
    archive: &'a str,
    title: &'a str,
    /// Debian's packages.
    base: &'a [&'a str],
    /// The empty folders.
    folders: &'a [&'a str],
    /// The command, its environment and its ports, as `config` of the OCI's image configuration.
    config: Value,
    /// The Cargo packages whose files are in it.
    shipped: &'a [&'a str],
    /// What is in it besides, for the bill of materials.
    others: Vec<Value>,
}

/// Writes the executor's image. Returns the names of the Debian packages in it.
pub(super) fn executor(sources: Sources<'_>) -> Result<String> {
    let Sources {
        dist, generated, ..
    } = sources;
    let mut entries = vec![
        entry(place_of(image::PROGRAM), &dist.vgpu, 0o755),
        // For `vgpu kubernetes` and Compose, which give it to containers.
        entry(place_of(image::PLUGIN), &dist.plugin, 0o644),
    ];
    entries.extend(documents(generated));
    let config = json!({
        "Cmd": ["vgpu", "serve", "--listen", format!("unix:{}", image::SOCKET)],
        "Env": [
            "PATH=/usr/bin",
            format!("VGPU_CACHE={}", image::CACHE),
            // NVIDIA's container runtime brings the driver's libraries for these.
            "NVIDIA_VISIBLE_DEVICES=all",
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ],
    });
    let image = Image {
        name: image::NAME,
        archive: "vgpu",
        title: "ggml-vgpu executor",
        base: &BASE,
        folders: &image::FOLDERS,
        config,
        shipped: &[sbom::HOST, sbom::PLUGIN],
        others: Vec::new(),
    };
    image.write(&entries, sources)
}

/// Writes the image of llama-server with the plugin. Returns the names of the Debian packages in
/// it.
pub(super) fn llama_server(sources: Sources<'_>, server: &PortableServer) -> Result<String> {
    let Sources {
        dist, generated, ..
    } = sources;
    let mut entries = vec![entry(place_of(image::PLUGIN), &dist.plugin, 0o644)];
    for license in &server.licenses {
        let place = format!("usr/share/doc/llama.cpp/{}", license.display());
        entries.push(entry(place, server.source.join(license), 0o644));
    }
    let app = place_of(image::LLAMA_FOLDER);
    let listing = "listing llama-server and its libraries";
    for file in fs::read_dir(&server.programs).context(listing)? {
        let file = file.context(listing)?.path();
        let name = file.file_name().context("a name")?.display();
        entries.push(entry(format!("{app}/{name}"), &file, 0o755));
    }
    entries.extend(documents(generated));
    let config = json!({
        "Entrypoint": [image::LLAMA_SERVER],
        "Env": [
            format!("PATH=/usr/bin:{}", image::LLAMA_FOLDER),
            // As in the images of llama.cpp.
            "LLAMA_ARG_HOST=0.0.0.0",
            "LLAMA_ARG_N_GPU_LAYERS=99",
            format!("GGML_BACKEND_PATH={}", image::PLUGIN),
            format!("VGPU_ENDPOINT=unix:{}", image::SOCKET),
            "VGPU_REQUIRED=1",
        ],
        "ExposedPorts": {"8080/tcp": {}},
    });
    let image = Image {
        name: image::LLAMA_NAME,
        archive: "vgpu-llama-server",
        title: "llama-server with ggml-vgpu's plugin",
        base: &BASE_OF_LLAMA,
        folders: &["/tmp", "/run/vgpu", "/models"],
        config,
        shipped: &[sbom::PLUGIN],
        others: vec![sbom::llama_cpp(server)],
    };
    image.write(&entries, sources)
}

/// Our license, and those of what is compiled in.
fn documents(generated: &Generated) -> [Entry; 2] {
    let folder = "usr/share/doc/vgpu";
    [
        entry(
            format!("{folder}/copyright"),
            workspace::root().join("LICENSE"),
            0o644,
        ),
        entry(
            format!("{folder}/third-party-licenses.txt"),
            &generated.licenses,
            0o644,
        ),
    ]
}

impl Image<'_> {
    /// Writes the image with our files, and its bill of materials. Returns the names and versions
    /// of the Debian packages in it.
    fn write(mut self, files: &[Entry], sources: Sources<'_>) -> Result<String> {
        let version = sources.version;
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => bail!("the OCI has no name for {other} that we know"),
        };
        let scratch = Scratch::new()?;
        let base = scratch.path().join("base");
        let packages = debian_base::unpack(&base, self.base, self.folders)?;
        let names: Vec<String> = packages.iter().map(DebianPackage::to_string).collect();
        let names = names.join(", ");
        let program = scratch.path().join("program");
        lay_out(&program, files)?;
        // The names of the OCI's own labels.
        self.config["Labels"] = json!({
            "org.opencontainers.image.title": self.title,
            "org.opencontainers.image.version": version,
            "ggml-vgpu.debian-packages": names,
        });
        let name = format!("{}-{version}-{architecture}.oci", self.archive);
        let archive = sources.folder.join(format!("{name}.tar"));
        let tag = self.tag(version);
        pack(
            [&base, &program],
            &self.config,
            architecture,
            &tag,
            &archive,
        )?;
        let contents = ImageContents {
            name: self.name,
            version,
            archive: &archive,
            shipped: self.shipped,
            has_machine_code: sources.has_machine_code,
            files,
            debian: &packages,
            others: self.others,
        };
        let bill = sources.tree.bill_of_image(contents)?;
        fs::write(sources.folder.join(format!("{name}.cdx.json")), bill)
            .context("writing the bill of materials")?;
        Ok(names)
    }

    /// The image's name with a tag. A tag has no plus sign.
    fn tag(&self, version: &str) -> String {
        format!("{}:{}", self.name, version.replace('+', "-"))
    }
}

/// Writes `archive`: an image of two layers, with `config` of the OCI's image configuration.
fn pack(
    layers: [&Path; 2],
    config: &Value,
    architecture: &str,
    tag: &str,
    archive: &Path,
) -> Result<()> {
    let scratch = Scratch::new()?;
    let layout = scratch.path();
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).context("creating a folder for blobs")?;
    let mut diffs = Vec::new();
    let mut blobs_of_layers = Vec::new();
    for tree in layers {
        let (diff, blob) = layer(tree, &blobs)?;
        diffs.push(diff);
        blobs_of_layers.push(blob);
    }
    let created = [
        "log",
        "-1",
        "--date=format-local:%Y-%m-%dT%H:%M:%SZ",
        "--format=%cd",
    ];
    let created = version::git(workspace::root(), &created);
    let config = json!({
        "architecture": architecture,
        "os": "linux",
        "created": created,
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": diffs},
    });
    let config = json_blob(&config, "application/vnd.oci.image.config.v1+json", &blobs)?;
    let layers: Vec<Value> = blobs_of_layers.iter().map(Blob::descriptor).collect();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config.descriptor(),
        "layers": layers,
    });
    let manifest = json_blob(
        &manifest,
        "application/vnd.oci.image.manifest.v1+json",
        &blobs,
    )?;
    let mut descriptor = manifest.descriptor();
    descriptor["platform"] = json!({"architecture": architecture, "os": "linux"});
    descriptor["annotations"] = json!({
        "org.opencontainers.image.ref.name": tag,
        // containerd, and so Docker with containerd's store, takes the whole name as it stands
        // here. Docker and the kubelet look for an image without a registry under this name.
        "io.containerd.image.name": format!("docker.io/library/{tag}"),
    });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [descriptor],
    });
    // Docker's own format, of the same blobs. Docker unpacks layers of gzip there, too.
    let paths: Vec<String> = blobs_of_layers.iter().map(Blob::path).collect();
    let of_docker = json!([{"Config": config.path(), "RepoTags": [tag], "Layers": paths}]);
    for (name, text) in [
        ("index.json", index.to_string()),
        ("manifest.json", of_docker.to_string()),
        ("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#.to_owned()),
    ] {
        fs::write(layout.join(name), text).with_context(|| format!("writing {name}"))?;
    }
    let mut tar = reproducible_tar()?;
    tar.arg("-cf").arg(archive).arg("-C").arg(layout);
    process::output(tar.args(["oci-layout", "index.json", "manifest.json", "blobs"]))?;
    Ok(())
}

/// A path of the image, below its root.
fn place_of(path: &str) -> &str {
    path.trim_start_matches('/')
}

/// Makes a layer of a tree. Returns the digest of the uncompressed layer, and the blob.
fn layer(tree: &Path, blobs: &Path) -> Result<(String, Blob)> {
    let part = blobs.join("layer");
    let mut tar = reproducible_tar()?;
    // Whatever the umask was when the tree was made.
    tar.args(["--mode=u+rwX,go+rX,go-w", "-cf"]);
    process::output(tar.arg(&part).arg("-C").arg(tree).arg("."))?;
    let diff = format!("sha256:{}", sha256(&part)?);
    process::output(Command::new("gzip").arg("-9n").arg(&part))?;
    let part = blobs.join("layer.gz");
    let blob = place(&part, "application/vnd.oci.image.layer.v1.tar+gzip", blobs)?;
    Ok((diff, blob))
}

fn json_blob(document: &Value, media_type: &'static str, blobs: &Path) -> Result<Blob> {
    let part = blobs.join("document");
    fs::write(&part, document.to_string()).context("writing a document")?;
    place(&part, media_type, blobs)
}

/// Gives a file in the folder `blobs` the name of its content.
fn place(file: &Path, media_type: &'static str, blobs: &Path) -> Result<Blob> {
    let hash = sha256(file)?;
    let size = file.metadata().context("a blob")?.len();
    let target: PathBuf = blobs.join(&hash);
    fs::rename(file, target).context("placing a blob")?;
    Ok(Blob {
        media_type,
        digest: format!("sha256:{hash}"),
        size,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small image in `folder`, of two layers with a file each.
    fn sample(folder: &Path) -> PathBuf {
        let trees = ["base", "program"].map(|name| folder.join(name));
        for tree in &trees {
            fs::create_dir_all(tree).unwrap();
            fs::write(
                tree.join("file"),
                tree.file_name().unwrap().as_encoded_bytes(),
            )
            .unwrap();
        }
        let archive = folder.join("image.oci.tar");
        let config = json!({"Cmd": ["vgpu"]});
        let trees = [trees[0].as_path(), &trees[1]];
        pack(trees, &config, "amd64", "ggml-vgpu:0.1.0", &archive).unwrap();
        archive
    }

    /// Docker's document names the configuration and the layers of the OCI's documents, in their
    /// order, and the layers unpacked have the hashes that Docker compares.
    #[test]
    fn manifest_of_docker_names_the_blobs_of_the_oci() {
        let scratch = Scratch::new().unwrap();
        let folder = scratch.path();
        let mut unpack = Command::new("tar");
        unpack.arg("-xf").arg(sample(folder)).arg("-C").arg(folder);
        process::output(&mut unpack).unwrap();
        let read = |path: &str| -> Value {
            let text = fs::read_to_string(folder.join(path)).unwrap();
            serde_json::from_str(&text).unwrap()
        };
        let path = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap();
            format!("blobs/{}", digest.replace(':', "/"))
        };
        let index = read("index.json");
        let manifest = read(&path(&index["manifests"][0]));
        let layers = manifest["layers"].as_array().unwrap();
        let layers: Vec<String> = layers.iter().map(path).collect();
        let config = path(&manifest["config"]);
        let of_docker = json!([{
            "Config": config, "RepoTags": ["ggml-vgpu:0.1.0"], "Layers": layers,
        }]);
        assert_eq!(read("manifest.json"), of_docker);
        let diffs = read(&config)["rootfs"]["diff_ids"].take();
        assert_eq!(diffs.as_array().unwrap().len(), 2);
        for (layer, diff) in layers.iter().zip(diffs.as_array().unwrap()) {
            let part = folder.join("part.gz");
            fs::copy(folder.join(layer), &part).unwrap();
            process::output(Command::new("gzip").arg("-df").arg(&part)).unwrap();
            let sum = sha256(&folder.join("part")).unwrap();
            assert_eq!(diff, &json!(format!("sha256:{sum}")));
        }
    }

    #[test]
    fn image_of_the_same_files_has_the_same_bytes() {
        let [first, second] = [Scratch::new().unwrap(), Scratch::new().unwrap()];
        let bytes = |scratch: &Scratch| fs::read(sample(scratch.path())).unwrap();
        let first = bytes(&first);
        assert!(first.len() > 1024, "{} bytes", first.len());
        assert!(first == bytes(&second), "the archives differ");
    }
}
