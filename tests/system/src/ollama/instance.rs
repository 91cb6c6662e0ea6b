//! An installation of Ollama in a separate folder, and its server.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::client::Client;
use super::install::{PREFIX, VERSIONS, lay_out};
use xtask_common::dist::Dist;
use xtask_common::process::free_port;
use xtask_common::process::{self, Daemon};
use xtask_common::scratch::Scratch;

/// The timeout for every wait.
const TIMEOUT: Duration = Duration::from_secs(60);
const DROP_IN: &str = "etc/systemd/system/ollama.service.d/vgpu.conf";

/// The settings of a server.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// Variables that override those of the drop-in.
    pub(crate) environment: Vec<(&'static str, String)>,
}

/// Has the Ollama at `ollama`, without the plugin, import a model from the folder `from`, and
/// copies the GGUF file that it makes of the model to `to`.
pub(crate) fn to_gguf(
    ollama: &Path,
    llama: &Path,
    from: &Path,
    to: &Path,
    log: &Path,
) -> Result<()> {
    const MODEL: &str = "imported";
    let scratch = Scratch::new()?;
    lay_out(scratch.path(), ollama, llama)?;
    let mut instance = Instance {
        root: scratch.path().to_owned(),
        vgpu: PathBuf::new(),
        port: free_port()?,
        server: None,
    };
    instance.serve(Vec::new(), &Settings::default(), log)?;
    instance.create(MODEL, from)?;
    let blob = instance.blob(MODEL)?;
    fs::copy(&blob, to).with_context(|| format!("copying {}", blob.display()))?;
    instance.stop()
}

/// An Ollama with the plugin installed. The server is killed on drop.
#[derive(Debug)]
pub(crate) struct Instance {
    root: PathBuf,
    vgpu: PathBuf,
    /// The same for every start of this server, since clients use it.
    port: u16,
    server: Option<Daemon>,
}

impl Instance {
    /// Creates an installation in `root` and installs the plugin with `vgpu install`.
    pub(crate) fn install(
        root: &Path,
        ollama: &Path,
        llama: &Path,
        dist: &Dist,
        endpoint: &str,
    ) -> Result<Instance> {
        lay_out(root, ollama, llama)?;
        let instance = Instance {
            root: root.to_owned(),
            vgpu: dist.vgpu.clone(),
            port: free_port()?,
            server: None,
        };
        let said = instance.install_plugin(dist, endpoint)?;
        let tested = format!("(tested with Ollama {})", VERSIONS.join(" and "));
        ensure!(said.contains(&tested), "{tested} is not in\n{said}");
        Ok(instance)
    }

    /// Installs the plugin with `vgpu install`. Returns what the command says.
    pub(crate) fn install_plugin(&self, dist: &Dist, endpoint: &str) -> Result<String> {
        let mut install = Command::new(&self.vgpu);
        install
            .args(["install", "--endpoint", endpoint, "--root"])
            .arg(&self.root)
            .arg("--plugin")
            .arg(&dist.plugin);
        process::output(&mut install)
    }

    /// Places command and plugin as the packages do, and installs the plugin from there: the
    /// drop-in then installs the plugin before each start.
    pub(crate) fn install_from_packages(&self, dist: &Dist, endpoint: &str) -> Result<()> {
        let (program, plugin) = (
            self.root.join("usr/bin/vgpu"),
            self.root.join("usr/lib/vgpu/libggml-vgpu.so"),
        );
        for (from, to) in [(&dist.vgpu, &program), (&dist.plugin, &plugin)] {
            let folder = to.parent().context("a folder")?;
            fs::create_dir_all(folder).context("creating a folder")?;
            fs::copy(from, to).with_context(|| format!("copying {}", from.display()))?;
        }
        let plugin = plugin.display().to_string();
        let mut install = Command::new(&program);
        install.args(["install", "--endpoint", endpoint, "--plugin", &plugin]);
        install.arg("--root").arg(&self.root);
        process::output(&mut install).map(drop)
    }

    /// Runs the command of the drop-in that installs the plugin, with the paths of this
    /// installation. Returns what the command says, or `None` if the drop-in has no such command.
    ///
    /// # Errors
    /// If the command fails.
    pub(crate) fn install_before_start(&self) -> Result<Option<String>> {
        let text = fs::read_to_string(self.root.join(DROP_IN)).context("reading the drop-in")?;
        let mut commands = { text.lines() }.filter_map(|line| line.strip_prefix("ExecStartPre=-+"));
        let Some(command) = commands.next() else {
            return Ok(None);
        };
        let words = command.split(' ').map(|word| match word.strip_prefix('/') {
            Some(path) => self.root.join(path).into_os_string(),
            None => word.into(),
        });
        let words: Vec<_> = words.collect();
        let (program, arguments) = words.split_first().context("an empty command")?;
        process::output(Command::new(program).args(arguments)).map(Some)
    }

    /// Replaces the installation by another release, as Ollama's installer does: its folder of
    /// libraries is removed first. The server must have been stopped.
    pub(crate) fn upgrade(&self, ollama: &Path, llama: &Path) -> Result<()> {
        let prefix = self.root.join(PREFIX);
        fs::remove_dir_all(prefix.join("lib/ollama")).context("removing the libraries")?;
        fs::remove_file(prefix.join("bin/ollama")).context("removing the program")?;
        lay_out(&self.root, ollama, llama)
    }

    /// Another server of the same installation and models, on a port of its own.
    pub(crate) fn another(&self) -> Result<Instance> {
        Ok(Instance {
            root: self.root.clone(),
            vgpu: self.vgpu.clone(),
            port: free_port()?,
            server: None,
        })
    }

    /// Removes the plugin with `vgpu uninstall`.
    pub(crate) fn uninstall(&self) -> Result<String> {
        let mut uninstall = Command::new(&self.vgpu);
        uninstall.arg("uninstall").arg("--root").arg(&self.root);
        process::output(&mut uninstall)
    }

    /// `llama-server` as Ollama starts it to list devices.
    pub(crate) fn probe(&self, endpoint: &str) -> Command {
        let lib = self.root.join(PREFIX).join("lib/ollama");
        let mut probe = Command::new(lib.join("llama-server"));
        probe
            .env("LD_LIBRARY_PATH", &lib)
            .env("GGML_BACKEND_PATH", lib.join("vgpu/libggml-vgpu.so"))
            .env("VGPU_ENDPOINT", endpoint)
            .env("VGPU_REQUIRED", "1");
        probe
    }

    /// Starts the server with the environment of the systemd unit.
    pub(crate) fn start(&mut self, settings: &Settings, log: &Path) -> Result<()> {
        self.serve(self.drop_in()?, settings, log)
    }

    /// Starts the server with `variables`.
    fn serve(
        &mut self,
        variables: Vec<(String, String)>,
        settings: &Settings,
        log: &Path,
    ) -> Result<()> {
        let home = self.root.join("home");
        fs::create_dir_all(&home).context("creating a home")?;
        let mut serve = self.ollama();
        serve.arg("serve");
        for (name, value) in variables {
            serve.env(name, value);
        }
        // The result must not depend on Ollama's cloud service.
        serve.env("OLLAMA_NO_CLOUD", "1").env("OLLAMA_DEBUG", "1");
        serve.env_remove("GGML_BACKEND_PATH");
        for (name, value) in &settings.environment {
            serve.env(name, value);
        }
        let mut server = Daemon::start(&mut serve, log)?;
        server.wait_until(TIMEOUT, |server| {
            server.log().contains("inference compute") && self.client().version().is_ok()
        })?;
        self.server = Some(server);
        Ok(())
    }

    /// Ends the server with SIGTERM. Returns an error unless it succeeds.
    pub(crate) fn stop(&mut self) -> Result<()> {
        self.server
            .take()
            .map_or(Ok(()), |server| server.stop(TIMEOUT))
    }

    /// The server's log so far.
    pub(crate) fn log(&self) -> String {
        self.server.as_ref().map(Daemon::log).unwrap_or_default()
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.port)
    }

    /// Runs `ollama create`. The error contains its output.
    pub(crate) fn create(&self, name: &str, from: &Path) -> Result<()> {
        let file = self.root.join("Modelfile");
        fs::write(&file, format!("FROM {}\n", from.display())).context("writing a Modelfile")?;
        let mut create = self.ollama();
        create.args(["create", name, "-f"]).arg(&file);
        process::output(&mut create).map(drop)
    }

    /// Runs `work` with a `llama-server` that ends with the line `error` the first time that it is
    /// to load a model, and is the real one otherwise.
    pub(crate) fn with_failing_load<T>(
        &self,
        error: &str,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let program = self.root.join(PREFIX).join("lib/ollama/llama-server");
        let (real, mark) = (program.with_extension("real"), self.root.join("fail-once"));
        // A link to the file of a build: it must not be written to.
        fs::rename(&program, &real).context("moving llama-server")?;
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in *--model*) if rm {mark} 2>/dev/null; then\n\
             echo '{error}' >&2; exit 1; fi;; esac\nexec {real} \"$@\"\n",
            mark = mark.display(),
            real = real.display()
        );
        fs::write(&program, script).context("writing a script")?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))
            .context("making a script executable")?;
        fs::write(&mark, "").context("writing a mark")?;
        let done = work();
        fs::rename(&real, &program).context("moving llama-server back")?;
        ensure!(!mark.exists(), "no load of a model began");
        done
    }

    /// The file of Ollama with the weights of a model.
    pub(crate) fn blob(&self, model: &str) -> Result<PathBuf> {
        let mut show = self.ollama();
        show.args(["show", "--modelfile", model]);
        let text = process::output(&mut show)?;
        let line = text.lines().find_map(|line| line.strip_prefix("FROM /"));
        let blob = PathBuf::from(format!("/{}", line.context("the model has no file")?));
        ensure!(
            blob.starts_with(&self.root),
            "{} is not in the folder of this test",
            blob.display()
        );
        Ok(blob)
    }

    fn ollama(&self) -> Command {
        let mut ollama = Command::new(self.root.join(PREFIX).join("bin/ollama"));
        ollama
            .env("HOME", self.root.join("home"))
            .env("OLLAMA_HOST", format!("127.0.0.1:{}", self.port))
            .env("OLLAMA_MODELS", self.root.join("models"));
        ollama
    }

    /// The variables of the drop-in that `vgpu install` wrote.
    fn drop_in(&self) -> Result<Vec<(String, String)>> {
        let file = self.root.join(DROP_IN);
        let text = fs::read_to_string(&file)
            .with_context(|| format!("vgpu install wrote no {}", file.display()))?;
        let variables = text.lines().filter_map(|line| {
            let (name, value) = line
                .strip_prefix("Environment=\"")?
                .strip_suffix('"')?
                .split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        });
        Ok(variables.collect())
    }
}
