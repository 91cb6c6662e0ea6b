//! A machine with the packages and an Ollama: host and guest in one.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use xtask_common::llama;
use xtask_common::model::FileType;
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use super::guide::Guide;
use crate::container::{Container, System, USER};
use crate::debian::Packages;
use crate::ollama;
use crate::ollama::stage::TOKENS;
use crate::test_run::{PROMPT, TestRun};

/// The home folder of [`USER`].
pub(super) const HOME: &str = "/home/alice";

pub(super) const INSTALL: &str = "install.md";
pub(super) const OLLAMA: &str = "ollama.md";

/// Ollama's service, as its installer writes it.
const UNIT: &str = "[Unit]\nAfter=network-online.target\n\n[Service]\n\
                    ExecStart=/usr/local/bin/ollama serve\nUser=ollama\nGroup=ollama\n\
                    Restart=always\nRestartSec=3\n\n[Install]\nWantedBy=default.target\n";

/// A shell condition: Ollama's service answers.
pub(super) const ANSWERS: &str =
    "curl --silent --fail --max-time 5 http://127.0.0.1:11434/api/version";

/// What `vgpu install` writes.
const DROP_IN: &str = "/etc/systemd/system/ollama.service.d/vgpu.conf";
pub(super) const INSTALLED: &str = "/usr/local/lib/ollama/vgpu";

/// The name of all guests that the configuration does not name.
pub(super) const UNNAMED: &str = "-";

/// Kind, mode, owner and path of each file, and the size of those of Ollama: not of files that a
/// running system changes, of dpkg's own list, of the user's home, and of Ollama's models.
const FILES: &str = "find / -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path /run \
    -o -path /tmp -o -path /home -o -path /root -o -path /var/log -o -path /var/lib/dpkg \
    -o -path /var/lib/systemd -o -path /usr/share/ollama \\) -prune -o \
    \\( -path '/usr/local/*' -printf '%y %m %u %s %p\\n' \\) -o -printf '%y %m %u %p\\n'";

/// The last line of `vgpu doctor` where nothing is wrong.
const NO_PROBLEM: &str = "This machine can use a vGPU.";

/// How the packages are installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    Dpkg,
    /// `install.sh`, from a signed release.
    Script,
}

pub(super) fn follow(
    tests: &TestRun<'_>,
    packages: &Packages,
    system: &System,
    by: By,
) -> Result<String> {
    let number = system.release.number;
    let log = |name: &str| tests.log(&format!("documentation-debian-{number}-{name}"));
    let section = match by {
        By::Dpkg => "Install on Debian and Ubuntu",
        By::Script => "Install with install.sh",
    };
    let mut install = Guide::open(INSTALL, &[section, "Start the executor", "Remove"])?;
    let sections = ["Install", "When the executor stops", "Updates and removal"];
    let mut of_ollama = Guide::open(OLLAMA, &sections)?;

    let container = Container::boot(tests.cache, system, &log("system"))?;
    let on_cpu = with_ollama(tests, &container)?;
    let before = container.root(FILES)?;

    // The host.
    let mut upgrade = None;
    match by {
        By::Dpkg => {
            copy_release(&container, packages, HOME)?;
            container.run(USER, &install.take("dpkg --install")?)?;
            let reason = "it is for a running executor";
            upgrade = Some(install.take_early("vgpu check-config", reason)?);
        }
        By::Script => by_script(&container, packages, &mut install)?,
    }
    container.run(USER, &install.take("systemctl enable --now vgpu")?)?;
    let by_hand = install.take_with("--threads 8", &[("--threads 8", "--threads 2")])?;
    let mut by_hand = container.open(USER, &by_hand, &log("by-hand"))?;
    by_hand.wait_for("ready unix:/tmp/vgpu.sock")?;
    by_hand.close()?;
    container.run(USER, &install.take("usermod --append --groups vgpu alice")?)?;
    if let Some(upgrade) = upgrade {
        container.run(USER, &upgrade)?;
    }
    container.await_that("systemctl is-active vgpu")?;

    // The guest.
    container.run(USER, &of_ollama.take("vgpu install --dry-run")?)?;
    container.await_that(ANSWERS)?;
    let on_device = generate_on_device(&container, (&container, UNNAMED))?;
    ensure!(
        on_device == on_cpu,
        "{on_device:?}, but {on_cpu:?} from the CPU"
    );
    let said = container.root("journalctl --no-pager --unit ollama")?;
    let names = ["inference compute", "name=VGPU0"];
    let is_listed = said
        .lines()
        .any(|line| names.iter().all(|name| line.contains(name)));
    ensure!(is_listed, "Ollama's log lists no VGPU0:\n{said}");
    let said = container.run(USER, "sudo vgpu doctor")?;
    let last = said.lines().last().unwrap_or_default();
    ensure!(
        last == NO_PROBLEM,
        "vgpu doctor ends with {last:?}:\n{said}"
    );

    // An Ollama that is started by hand.
    container.root("systemctl stop ollama")?;
    let mut by_hand = container.open(
        USER,
        &of_ollama.take("OLLAMA_LLM_LIBRARY=vgpu")?,
        &log("ollama"),
    )?;
    by_hand.wait_for("name=VGPU0")?;
    by_hand.close()?;

    // Without an executor the service waits, and with the page's file it computes on the CPU.
    container.root("systemctl stop vgpu && systemctl start --no-block ollama")?;
    let waits = "[ \"$(systemctl show -P SubState ollama)\" = start-pre ]";
    container.await_that(&format!("{waits} && sleep 2 && {waits} && ! {ANSWERS}"))?;
    container.run(USER, &of_ollama.take("zz-no-wait.conf")?)?;
    container.root("systemctl restart ollama")?;
    container.await_that(ANSWERS)?;
    let text = generate(&container)?;
    ensure!(text == on_cpu, "{text:?} without an executor");
    expect_processor(&container, "100% CPU")?;
    container.root("systemctl start vgpu && systemctl restart ollama")?;
    container.await_that(ANSWERS)?;
    generate_on_device(&container, (&container, UNNAMED))?;

    container.run(USER, &of_ollama.take("vgpu uninstall")?)?;
    container.root(&format!("[ ! -e {DROP_IN} ] && [ ! -e {INSTALLED} ]"))?;
    container.await_that(ANSWERS)?;
    let again = generate(&container)?;
    ensure!(again == on_cpu, "{again:?}, but {on_cpu:?} before");
    expect_processor(&container, "100% CPU")?;
    container.root(
        "rm /etc/systemd/system/ollama.service.d/zz-no-wait.conf && systemctl daemon-reload \
         && rmdir --ignore-fail-on-non-empty /etc/systemd/system/ollama.service.d",
    )?;
    container.run(USER, &install.take("dpkg --purge")?)?;
    let after = container.root(FILES)?;
    let [before, after] = [&before, &after].map(|files| files.lines().collect::<BTreeSet<_>>());
    let changed: Vec<&&str> = { before.symmetric_difference(&after) }
        .filter(|file| !is_of_users(file))
        .collect();
    ensure!(changed.is_empty(), "changed by the removal: {changed:?}");
    container.root(
        "[ ! -e /run/vgpu ] && [ -z \"$(find /proc -maxdepth 1 -user vgpu)\" ] && \
         [ -z \"$(systemctl list-units --all --no-legend 'vgpu*')\" ]",
    )?;
    install.finish()?;
    of_ollama.finish()?;
    Ok(format!("{TOKENS} tokens of Ollama {}", ollama::VERSIONS[1]))
}

/// Copies the packages and their checksums into a folder of the system.
pub(super) fn copy_release(container: &Container, packages: &Packages, folder: &str) -> Result<()> {
    let files = packages.all().into_iter().chain([&*packages.checksums]);
    container.copy_into(folder, &files.collect::<Vec<_>>())
}

/// Signs a release as its releaser does, and installs the packages from the folder of the release.
fn by_script(container: &Container, packages: &Packages, guide: &mut Guide) -> Result<()> {
    let release = format!("{HOME}/release");
    copy_release(container, packages, &release)?;
    let script = workspace::root().join("deploy/install.sh");
    container.copy(&script, &format!("{HOME}/install.sh"))?;
    // The key is not in the system of the user.
    let releaser = Scratch::new()?;
    let key = releaser.path().join("key");
    let mut keygen = Command::new("ssh-keygen");
    keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", "releaser", "-f"]);
    process::output(keygen.arg(&key))?;
    let sums = releaser.path().join("SHA256SUMS");
    fs::copy(&packages.checksums, &sums).context("copying the checksums")?;
    let mut sign = Command::new("ssh-keygen");
    sign.args(["-q", "-Y", "sign", "-n", "ggml-vgpu", "-f"]);
    process::output(sign.arg(&key).arg(&sums))?;
    let signature = releaser.path().join("SHA256SUMS.sig");
    container.copy(&signature, &format!("{release}/SHA256SUMS.sig"))?;
    let public = fs::read_to_string(key.with_extension("pub")).context("reading a key")?;
    let releasers = container.files().join(format!("{}/releasers", &HOME[1..]));
    fs::write(releasers, format!("releaser@example.org {public}")).context("writing a key")?;

    let url = "https://example.org/vgpu/0.1.0";
    container.run(
        USER,
        &guide.take_with("sh install.sh --host", &[(url, &release)])?,
    )?;
    let verify = guide.take_with(
        "ssh-keygen -Y verify",
        &[("-f releasers", "-f ../releasers")],
    )?;
    container
        .run(USER, &format!("cd release\n{verify}"))
        .map(drop)
}

/// Whether a line of [`FILES`] is the backup of a list of users, or the lock of the lists.
fn is_of_users(file: &str) -> bool {
    let name = file.rsplit_once(" /etc/").unwrap_or_default().1;
    let lists = [
        "group-",
        "gshadow-",
        "passwd-",
        "shadow-",
        "subuid-",
        "subgid-",
        ".pwd.lock",
    ];
    lists.contains(&name)
}

/// Installs Ollama with a model, as its installer does. Returns text that it generates on the CPU.
pub(super) fn with_ollama(tests: &TestRun<'_>, container: &Container) -> Result<String> {
    let [_, version] = ollama::VERSIONS;
    let program = ollama::binary(tests.cache, version)?;
    let llama = llama::build(tests.cache, llama::Stage::Tools)?;
    // Links and hard links of this machine's files become files of the system.
    let scratch = Scratch::new()?;
    ollama::lay_out(scratch.path(), &program, &llama)?;
    let mut cp = Command::new("cp");
    cp.args(["--recursive", "--no-preserve=ownership"]);
    cp.arg(scratch.path().join("usr"));
    cp.arg(container.files());
    process::output(&mut cp)?;
    let unit = container.files().join("etc/systemd/system/ollama.service");
    fs::write(unit, UNIT).context("writing a unit")?;
    container.copy(&tests.model(FileType::F16)?, "/usr/share/ollama/model.gguf")?;
    container.root(
        "useradd --system --user-group --shell /bin/false --home-dir /usr/share/ollama ollama\n\
         chown -R ollama: /usr/share/ollama\n\
         systemctl enable --now ollama",
    )?;
    container.await_that(ANSWERS)?;
    container.run(
        USER,
        "echo FROM /usr/share/ollama/model.gguf > Modelfile && ollama create model -f Modelfile",
    )?;
    generate(container)
}

/// Asks Ollama's service for text.
pub(super) fn generate(container: &Container) -> Result<String> {
    generate_at("http://127.0.0.1:11434", |line| container.run(USER, line))
}

/// Asks the Ollama at `url` for text. `run` runs a line of shell.
pub(super) fn generate_at(url: &str, run: impl FnOnce(&str) -> Result<String>) -> Result<String> {
    let request = json!({
        "model": "model", "prompt": PROMPT, "raw": true, "stream": false,
        "options": {"temperature": 0, "num_predict": TOKENS},
    });
    let said = run(&format!(
        "curl --silent --show-error {url}/api/generate --data '{request}'"
    ))?;
    let answer: Value = serde_json::from_str(&said)
        .with_context(|| format!("Ollama does not answer with JSON: {said}"))?;
    ensure!(answer["eval_count"] == TOKENS, "{answer}");
    let text = answer["response"].as_str();
    text.map(str::to_owned)
        .with_context(|| format!("no text in {answer}"))
}

/// Asks Ollama's service for text, which it must compute on the device, as a guest of the executor
/// of `host` with this name.
pub(super) fn generate_on_device(
    container: &Container,
    (host, guest): (&Container, &str),
) -> Result<String> {
    let before = graphs_of(host, guest)?;
    let text = generate(container)?;
    expect_processor(container, "100% GPU")?;
    let graphs = graphs_of(host, guest)? - before;
    ensure!(
        graphs >= TOKENS,
        "the executor has run {graphs} graphs of {guest:?} for {TOKENS} tokens"
    );
    Ok(text)
}

/// `ollama ps` has these words.
fn expect_processor(container: &Container, words: &str) -> Result<()> {
    let said = container.run(USER, "ollama ps")?;
    ensure!(said.contains(words), "no {words:?} in `ollama ps`: {said}");
    Ok(())
}

/// What `vgpu ps` says of an executor.
pub(super) fn status(host: &Container) -> Result<Value> {
    let said = host.root("vgpu ps --json")?;
    serde_json::from_str(&said).with_context(|| format!("vgpu ps: {said}"))
}

/// How many graphs an executor has run for a guest.
pub(super) fn graphs_of(host: &Container, guest: &str) -> Result<u64> {
    graphs_in(&status(host)?, guest)
}

/// How many graphs an executor has run for a guest, by what `vgpu ps` says.
pub(super) fn graphs_in(status: &Value, guest: &str) -> Result<u64> {
    let guests = status["guests"].as_array().context("no guests")?;
    let graphs = guests.iter().find(|one| one["name"] == guest);
    // An unnamed guest is listed from its first program on.
    let graphs = graphs.map_or(Some(0), |one| one["graphs"].as_u64());
    graphs.context("no number of graphs")
}
