//! An upgrade from the previous release, on a machine whose services run: executor and Ollama.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::guide::Guide;
use super::ollama_on_debian::{
    self, ANSWERS, HOME, INSTALL, INSTALLED, OLLAMA, UNNAMED, copy_release, generate_on_device,
    with_ollama,
};
use crate::container::{Container, System, USER};
use crate::debian::Packages;
use crate::ollama::stage::TOKENS;
use crate::previous::Previous;
use crate::test_run::TestRun;

/// What `vgpu doctor` says of a drop-in that a release before this one has written.
const OUTDATED: &str = "is of another version";

/// The newest version of the protocol of the previous release, and that of this one.
const PROTOCOLS: [u64; 2] = [3, 4];

pub(super) fn follow(
    tests: &TestRun<'_>,
    packages: &Packages,
    previous: &Previous,
    system: &System,
) -> Result<String> {
    let number = system.release.number;
    let mut install = Guide::open(INSTALL, &["Install on Debian and Ubuntu"])?;
    let mut of_ollama = Guide::open(OLLAMA, &["Install"])?;
    let log = tests.log(&format!("documentation-upgrade-{number}-system"));
    let container = Container::boot(tests.cache, system, &log)?;
    let on_cpu = with_ollama(tests, &container)?;
    let expect_text = |when: &str| -> Result<()> {
        let text = generate_on_device(&container, (&container, UNNAMED))?;
        ensure!(
            text == on_cpu,
            "{text:?} {when}, but {on_cpu:?} from the CPU"
        );
        Ok(())
    };

    // The previous release, as its own documentation has it.
    container.copy_into("/root/previous", &previous.packages)?;
    container.root(
        "dpkg --install previous/*.deb && systemctl enable --now vgpu && vgpu wait \
         && vgpu install && systemctl daemon-reload && systemctl restart ollama",
    )?;
    container.await_that(ANSWERS)?;
    expect_text("with the previous release")?;
    let old = package(&container)?;
    let executor = executor(&container)?;
    let runner = runner(&container)?;

    // The packages leave the executor and the loaded model alone.
    copy_release(&container, packages, HOME)?;
    let said = container.run(USER, &install.take("dpkg --install")?)?;
    let advice = "vgpu: running guests keep their version; when they may stop: vgpu check-config \
                  && systemctl restart vgpu";
    ensure!(
        said.lines().any(|line| line == advice),
        "no {advice:?} in\n{said}"
    );
    let new = package(&container)?;
    ensure!(new != old, "the packages have the version {old}, too");
    expect_unchanged("executor", &executor, &self::executor(&container)?)?;
    expect_text("upgraded, with the executor of the previous release")?;
    expect_unchanged("process of the model", &runner, &self::runner(&container)?)?;
    container.root("cmp /etc/vgpu/vgpu.toml /usr/share/doc/vgpu/examples/vgpu.toml")?;

    // The new executor, and Ollama with the plugin of the previous release.
    container.run(USER, &install.take("vgpu check-config")?)?;
    container.await_that("systemctl is-active vgpu && vgpu wait")?;
    let restarted = self::executor(&container)?;
    ensure!(restarted != executor, "the executor was not restarted");
    container.await_that(&format!("! kill -0 {runner}"))?;
    expect_text("with the plugin of the previous release")?;
    expect_protocol(&container, PROTOCOLS[0])?;
    // The drop-in of the previous release installs no plugin.
    container.root("systemctl restart ollama")?;
    container.await_that(ANSWERS)?;
    expect_text("with Ollama started again")?;
    expect_protocol(&container, PROTOCOLS[0])?;
    let said = container.root("vgpu doctor || :")?;
    ensure!(said.contains(OUTDATED), "no {OUTDATED:?} in\n{said}");

    // Ollama gets the new plugin by the command of the page.
    container.run(USER, &of_ollama.take("vgpu install --dry-run")?)?;
    expect_new_plugin(&container)?;
    expect_text("with the plugin of this release")?;
    expect_protocol(&container, PROTOCOLS[1])?;
    let said = container.root("vgpu doctor")?;
    ensure!(!said.contains(OUTDATED), "{OUTDATED:?} is still in\n{said}");

    // From now on by the start of its service.
    let installed = format!("{INSTALLED}/libggml-vgpu.so");
    container.copy(&previous.dist.plugin, &installed)?;
    container.root("systemctl restart ollama")?;
    expect_new_plugin(&container)?;
    expect_text("with the plugin that the service has installed")?;
    expect_protocol(&container, PROTOCOLS[1])?;

    container.root("dpkg --purge vgpu-guest vgpu && systemctl restart ollama")?;
    container.await_that(ANSWERS)?;
    let text = ollama_on_debian::generate(&container)?;
    ensure!(text == on_cpu, "{text:?} after the removal");
    Ok(format!(
        "{old} to {new}, {TOKENS} tokens of Ollama each time"
    ))
}

/// The version of the installed package.
fn package(container: &Container) -> Result<String> {
    container.root("dpkg-query --show --showformat='${Version}' vgpu")
}

/// The process of the executor that runs, and when it started.
fn executor(container: &Container) -> Result<String> {
    container.root(
        "systemctl is-active vgpu && systemctl show -P MainPID vgpu \
         && systemctl show -P ExecMainStartTimestampMonotonic vgpu",
    )
}

/// The process that has the model.
fn runner(container: &Container) -> Result<String> {
    let files = "/proc/[0-9]*/comm";
    let find = format!("grep --files-with-matches --line-regexp llama-server {files}");
    let pids = container.root(&format!("{find} 2> /dev/null | cut -d / -f 3"))?;
    let pid: u32 = { pids.trim().parse() }
        .with_context(|| format!("not one process with a model: {pids:?}"))?;
    Ok(pid.to_string())
}

fn expect_unchanged(what: &str, before: &str, now: &str) -> Result<()> {
    ensure!(
        before == now,
        "the upgrade changed the {what}: {before} {now}"
    );
    Ok(())
}

/// Ollama has the plugin of the package.
fn expect_new_plugin(container: &Container) -> Result<()> {
    container.await_that(ANSWERS)?;
    container
        .root(&format!(
            "cmp /usr/lib/vgpu/libggml-vgpu.so {INSTALLED}/libggml-vgpu.so"
        ))
        .map(drop)
}

/// The sessions of the executor use this version of the protocol.
fn expect_protocol(container: &Container, protocol: u64) -> Result<()> {
    let status = ollama_on_debian::status(container)?;
    let sessions = status["sessions"].as_array().context("no sessions")?;
    let versions: Vec<&Value> = sessions.iter().map(|one| &one["protocol"]).collect();
    ensure!(
        !versions.is_empty() && versions.iter().all(|version| **version == protocol),
        "sessions of the protocol {versions:?}, not {protocol}"
    );
    Ok(())
}
