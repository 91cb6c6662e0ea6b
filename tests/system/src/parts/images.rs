//! The container images of a release: unpacked, and run by runc, which Debian has.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use xtask_common::cache::Cache;
use xtask_common::compare;
use xtask_common::image;
use xtask_common::model::{self, FileType};
use xtask_common::packages;
use xtask_common::process::{self, Daemon, free_port};

use crate::files::sha256;
use crate::llama_server::Server;
use crate::test_run::{PROMPT, TestRun};

/// The time for an executor to start in a container.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Tokens of a generation.
const TOKENS: usize = 16;

/// An image in a folder.
pub(super) struct Image {
    /// The file system.
    pub(super) root: PathBuf,
    /// `config` of the image configuration: the command, its environment.
    pub(super) config: Value,
    /// The number of layers.
    pub(super) layers: usize,
}

impl Image {
    /// Unpacks an archive into the new folder `folder`. Every document must name the next one by
    /// the hash of its content, and Docker's document must name the same files. The bill of
    /// materials beside the archive must have what was unpacked.
    pub(super) fn unpack(archive: &Path, folder: &Path) -> Result<Image> {
        let (layout, root) = (folder.join("layout"), folder.join("root"));
        for folder in [&layout, &root] {
            fs::create_dir_all(folder).context("creating a folder")?;
        }
        let unpack = |file: &Path, to: &Path| {
            process::output(Command::new("tar").arg("-xf").arg(file).arg("-C").arg(to))
        };
        unpack(archive, &layout)?;
        let blob = |descriptor: &Value| -> Result<PathBuf> {
            let digest = descriptor["digest"].as_str().unwrap_or_default();
            let hash = digest.strip_prefix("sha256:").context("no digest")?;
            let path = layout.join("blobs/sha256").join(hash);
            let sum = sha256(&path)?;
            ensure!(sum == hash, "{hash} has another content: {sum}");
            let size = path.metadata().context("a blob")?.len();
            ensure!(descriptor["size"] == size, "{descriptor} has {size} bytes");
            Ok(path)
        };
        let read = |path: &Path| -> Result<Value> {
            let text = fs::read_to_string(path).context("reading a document")?;
            serde_json::from_str(&text).context("parsing a document")
        };
        let index = read(&layout.join("index.json"))?;
        let manifest = read(&blob(&index["manifests"][0])?)?;
        let mut config = read(&blob(&manifest["config"])?)?;
        let layers = manifest["layers"].as_array().context("no layers")?;
        for layer in layers {
            unpack(&blob(layer)?, &root)?;
        }
        let of_docker = read(&layout.join("manifest.json"))?;
        expect_manifest_of_docker(&of_docker, &index, &manifest)?;
        expect_bill(&read(&archive.with_extension("cdx.json"))?, archive, &root)?;
        Ok(Image {
            root,
            config: config["config"].take(),
            layers: layers.len(),
        })
    }

    /// The words of one of the lists in the configuration; none if there is no such list.
    fn words(&self, list: &str) -> Vec<String> {
        let words = self.config[list].as_array().into_iter().flatten();
        words.filter_map(Value::as_str).map(str::to_owned).collect()
    }
}

/// `docker load` of Docker before 25 reads `manifest.json` and nothing else: it must name the
/// configuration and the layers of the OCI's `manifest`, and a tag without a plus sign.
fn expect_manifest_of_docker(of_docker: &Value, index: &Value, manifest: &Value) -> Result<()> {
    let path = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap_or_default();
        json!(format!("blobs/{}", digest.replace(':', "/")))
    };
    let tag = &index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"];
    let is_tag = tag
        .as_str()
        .is_some_and(|tag| tag.contains(':') && !tag.contains('+'));
    ensure!(is_tag, "{tag} is no tag");
    let layers = manifest["layers"].as_array().into_iter().flatten();
    let expected = json!([{
        "Config": path(&manifest["config"]),
        "RepoTags": [tag],
        "Layers": layers.map(path).collect::<Vec<_>>(),
    }]);
    ensure!(
        *of_docker == expected,
        "manifest.json is {of_docker}, not {expected}"
    );
    Ok(())
}

/// The bill of materials of an image is of this `archive`, and names what is in `root`: Debian's
/// packages, which all have a folder of documents, llama.cpp, our files and the crates in them.
fn expect_bill(bill: &Value, archive: &Path, root: &Path) -> Result<()> {
    let image = &bill["metadata"]["component"];
    let sum = sha256(archive)?;
    let of_bill = &image["hashes"][0]["content"];
    ensure!(*of_bill == sum, "the bill is of {of_bill}, not of {sum}");
    let files = image["components"].as_array().context("no files")?;
    let mut names = BTreeSet::new();
    for file in files {
        let name = file["name"].as_str().context("a file without a name")?;
        let sum = sha256(&root.join(name.trim_start_matches('/')))?;
        ensure!(file["hashes"][0]["content"] == sum, "{file} has {sum}");
        names.insert(name);
    }
    ensure!(names.contains(image::PLUGIN), "no plugin in {names:?}");

    let components = bill["components"].as_array().context("no components")?;
    let with_url = |start: &str| -> BTreeSet<String> {
        let of_kind = components.iter().filter(|one| {
            let url = one["bom-ref"].as_str().unwrap_or_default();
            url.starts_with(start)
        });
        let names = of_kind.filter_map(|one| one["name"].as_str());
        names.map(str::to_owned).collect()
    };
    let mut documents = BTreeSet::new();
    for entry in fs::read_dir(root.join("usr/share/doc")).context("listing documents")? {
        let name = entry.context("listing documents")?.file_name();
        documents.insert(name.to_string_lossy().into_owned());
    }
    let ours = documents.remove("vgpu");
    ensure!(ours, "no documents of vgpu in {documents:?}");
    let has_llama = documents.remove("llama.cpp");
    let debian = with_url("pkg:deb/");
    ensure!(
        debian == documents,
        "the bill has {debian:?}, the image {documents:?}"
    );
    let llama = with_url("pkg:github/ggml-org/llama.cpp@").len();
    ensure!(
        llama == usize::from(has_llama),
        "{llama} entries of llama.cpp"
    );
    let crates = with_url("pkg:cargo/");
    ensure!(crates.contains("ggml-vgpu"), "no plugin in {crates:?}");
    let has_program = names.contains(image::PROGRAM);
    ensure!(
        crates.contains("vgpu") == has_program,
        "vgpu is among the crates of {names:?}: {}",
        !has_program
    );
    Ok(())
}

/// A container of an image: which folders of the host it has, and what follows its entry point.
struct Container<'a> {
    image: &'a Image,
    mounts: &'a [(&'a Path, &'a str)],
    arguments: &'a [String],
    /// Variables in addition to those of the image. An empty value removes one.
    environment: &'a [(&'a str, &'a str)],
}

impl Container<'_> {
    /// The command that runs the container in the foreground, and what ends the container if it is
    /// still there: runc does not, if it is killed. `folder` does not exist yet.
    fn command(&self, folder: &Path) -> Result<(Command, Removal)> {
        let mut mounts = vec![
            json!({"destination": "/proc", "type": "proc", "source": "proc"}),
            json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}),
        ];
        for (host, place) in self.mounts {
            mounts.push(json!({
                "destination": place, "type": "bind", "source": host, "options": ["rbind", "rw"],
            }));
        }
        // What Docker starts: the entry point with the arguments, or with the command.
        let mut arguments = self.image.words("Entrypoint");
        match self.arguments {
            [] => arguments.extend(self.image.words("Cmd")),
            given => arguments.extend(given.iter().cloned()),
        }
        let mut environment = self.image.words("Env");
        for (name, value) in self.environment {
            let own = format!("{name}=");
            environment.retain(|variable| !variable.starts_with(&own));
            if !value.is_empty() {
                environment.push(format!("{own}{value}"));
            }
        }
        // The network is that of the host, where the test asks llama-server.
        let namespaces = ["pid", "ipc", "uts", "mount"].map(|kind| json!({"type": kind}));
        let mut linux = json!({"namespaces": namespaces});
        let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
        if !user.is_root() {
            // A user who is not root is root in a user namespace, and nobody else there.
            let namespaces = linux["namespaces"].as_array_mut();
            namespaces.context("a list")?.push(json!({"type": "user"}));
            let map = |id: u32| json!([{"containerID": 0, "hostID": id, "size": 1}]);
            linux["uidMappings"] = map(user.as_raw());
            linux["gidMappings"] = map(group.as_raw());
        }
        let config = json!({
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": arguments,
                "env": environment,
                "cwd": "/",
                "noNewPrivileges": true,
            },
            "root": {"path": self.image.root, "readonly": true},
            "mounts": mounts,
            "linux": linux,
        });
        fs::create_dir_all(folder).context("creating a folder")?;
        fs::write(folder.join("config.json"), config.to_string()).context("writing a file")?;
        // Unique on the machine: runc names a control group after it.
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let removal = Removal {
            state: folder.join("state"),
            id: format!("vgpu-test-{}-{name}", std::process::id()),
        };
        let mut run = removal.runc();
        run.args(["run", "--bundle"]).arg(folder).arg(&removal.id);
        Ok((run, removal))
    }
}

/// Ends and removes a container, if there is one.
struct Removal {
    /// Where runc has its containers.
    state: PathBuf,
    id: String,
}

impl Removal {
    fn runc(&self) -> Command {
        let mut runc = Command::new("runc");
        runc.arg("--root").arg(&self.state);
        runc
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        // It fails if the container has ended.
        let _ = process::output(self.runc().args(["delete", "--force"]).arg(&self.id));
    }
}

/// Installs runc, unless it is there.
fn runc(cache: &Cache) -> Result<()> {
    match packages::runs("runc", &["--version"]) {
        true => Ok(()),
        false => packages::apt(cache, &["runc"], "runc"),
    }
}

/// Every document of an image is there: no link to one of a package that the image lacks.
fn expect_complete_documents(root: &Path) -> Result<()> {
    for entry in fs::read_dir(root.join("usr/share/doc")).context("listing documents")? {
        let path = entry.context("listing documents")?.path();
        ensure!(path.exists(), "{} leads nowhere", path.display());
        let license = path.join("copyright");
        let license = [license, path.join("LICENSE")]
            .into_iter()
            .find(|file| file.is_file());
        ensure!(license.is_some(), "no license in {}", path.display());
    }
    Ok(())
}

/// No program of an image has this path of the machine that has built it.
fn expect_no_path_of(cache: &str, root: &Path) -> Result<()> {
    for entry in fs::read_dir(root.join("app")).context("listing programs")? {
        let path = entry.context("listing programs")?.path();
        let bytes = fs::read(&path).context("reading a program")?;
        let has_path = bytes
            .windows(cache.len())
            .any(|part| part == cache.as_bytes());
        ensure!(!has_path, "{} has the path {cache}", path.display());
    }
    Ok(())
}

/// A container of `executor` serves, and one of `server` generates through its socket what the same
/// llama-server generates on its CPU. They share the folder of the socket and nothing else. A user
/// who is not root needs user namespaces.
pub(super) fn generate(
    tests: &TestRun<'_>,
    executor: &Image,
    server: &Image,
    folder: &Path,
) -> Result<String> {
    runc(tests.cache)?;
    for Image { root, .. } in [executor, server] {
        expect_complete_documents(root)?;
    }
    expect_no_path_of(&tests.cache.root().display().to_string(), &server.root)?;
    let model = model::ensure(tests.cache, &model::TINY, FileType::F16)?;
    let (sockets, models) = (folder.join("sockets"), folder.join("models"));
    let cache = folder.join("cache");
    for folder in [&sockets, &models, &cache] {
        fs::create_dir(folder).context("creating a folder")?;
    }
    fs::copy(&model, models.join("model.gguf")).context("copying the model")?;
    let serving = Container {
        image: executor,
        mounts: &[(&sockets, "/run/vgpu"), (&cache, "/var/cache/vgpu")],
        arguments: &[],
        environment: &[],
    };
    let log = tests.log("images-executor");
    let (mut run, _removal) = serving.command(&folder.join("executor"))?;
    let mut daemon = Daemon::start(&mut run, &log)?;
    daemon.wait_until(TIMEOUT, |daemon| daemon.log().contains("ready "))?;
    let complete = |name: &str, environment: &[(&str, &str)]| {
        let port = free_port()?;
        let arguments = ["-m", "/models/model.gguf", "--parallel", "1", "--port"]
            .map(str::to_owned)
            .into_iter()
            .chain([port.to_string()])
            .collect::<Vec<_>>();
        let generating = Container {
            image: server,
            mounts: &[(&sockets, "/run/vgpu"), (&models, "/models")],
            arguments: &arguments,
            environment,
        };
        let log = tests.log(&format!("images-{name}"));
        let (mut run, _removal) = generating.command(&folder.join(name))?;
        let daemon = Daemon::start(&mut run, &log)?;
        let server = Server::of(daemon, port)?;
        let choices = server.complete(PROMPT, TOKENS)?;
        server.stop()?;
        anyhow::Ok(choices)
    };
    let choices = complete("llama-server", &[])?;
    let end = "session closed: the guest disconnected guest=\"llama-server[";
    daemon.wait_until(TIMEOUT, |daemon| daemon.log().contains(end))?;
    let log = daemon.log();
    let graphs = { log.split_once(end) }
        .and_then(|(_, rest)| rest.split_once(" graphs=")?.1.split_once(' '))
        .and_then(|(graphs, _)| graphs.parse::<usize>().ok());
    ensure!(
        graphs >= Some(TOKENS),
        "the executor has run {graphs:?} graphs:\n{log}"
    );
    let reference = complete(
        "llama-server-on-cpu",
        &[("GGML_BACKEND_PATH", ""), ("LLAMA_ARG_N_GPU_LAYERS", "0")],
    )?;
    let sessions = daemon
        .log()
        .matches("session opened guest=llama-server[")
        .count();
    ensure!(sessions == 1, "{sessions} sessions:\n{}", daemon.log());
    daemon.stop(TIMEOUT)?;
    let compared = compare::compare(&reference, &choices);
    ensure!(
        compared.tokens == TOKENS && compared.divergence.is_none(),
        "the tokens differ from those of the CPU: {compared:?}"
    );
    ensure!(
        compared.largest_difference <= compare::tolerance(FileType::F16),
        "the logits differ from those of the CPU: {compared:?}"
    );
    Ok(format!(
        "{} and {} layers; {TOKENS} equal tokens",
        executor.layers, server.layers
    ))
}
