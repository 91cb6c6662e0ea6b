//! An upgrade of the executor below `vgpu fd-store`: the machine has its device from an executor of
//! the previous release, and keeps it.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use xtask_common::dist::Dist;
use xtask_common::progress::Progress;

use super::guest::{self, Guest, Outcome};
use super::kept_executor::KeptExecutor;
use super::machine::{Machine, Namespace};
use super::setup::{Setup, TOKENS};

const NAME: &str = "upgrade";

/// The name of the check.
pub(crate) const UPGRADE: &str = "upgrade below vgpu fd-store";

/// Replaces the file of the executor, and ends the executor, as an upgrade of the package with a
/// restart does. `vgpu fd-store` goes on in the previous release. A program with the plugin of the
/// previous release and one with that of this one lose their sessions, and load their models again
/// on the same device.
pub(crate) fn from_the_previous_release(
    setup: &Setup<'_>,
    previous: &Dist,
    progress: &Progress,
) -> Result<String> {
    let at = |name: &str| setup.scratch.path().join(format!("{NAME}-{name}"));
    let folder = at("no-devices");
    std::fs::create_dir_all(&folder).context("creating a folder")?;
    let Some(namespace) = Namespace::find(&folder) else {
        return Ok("not run: this user may make no mount namespace".into());
    };
    let program = at("vgpu");
    install(&previous.vgpu, &program)?;
    let socket = setup.socket("upgrade-machine");
    let vm = format!("upgrade,socket={},window=64M", socket.display());
    let programs = [previous.vgpu.as_path(), &program];
    let mut executor = KeptExecutor::start_programs(setup, NAME, programs, |_| (), &["--vm", &vm])?;
    expect_program(&executor, &previous.vgpu)?;

    let machine = Machine::start(setup, Some(namespace), &socket, at("machine"))?;
    let endpoint = format!("pci:{}", vgpu_machine_standin::ADDRESS);
    let start = |name: &str, plugin: &Dist| {
        let program = guest::Program {
            enter: machine.enter()?,
            ..setup.program.clone()
        };
        Guest::start(&program, Some((plugin, &endpoint)), &setup.log(name))
    };
    let mut guests = [
        (
            "upgrade-previous-plugin",
            start("upgrade-previous-plugin", previous)?,
        ),
        ("upgrade-plugin", start("upgrade-plugin", setup.dist)?),
    ];
    for (name, guest) in &mut guests {
        setup.expect_run(guest, name)?;
    }

    for (dist, signal) in [(setup.dist, Signal::TERM), (setup.dist, Signal::KILL)] {
        progress.note(&format!("{signal:?}"));
        for (_, guest) in &mut guests {
            guest.begin(TOKENS)?;
        }
        install(&dist.vgpu, &program)?;
        executor.replace(signal)?;
        expect_program(&executor, &dist.vgpu)?;
        for (name, guest) in &mut guests {
            // A program that was fast enough has its tokens.
            let outcome = guest.end().with_context(|| (*name).to_owned())?;
            ensure!(
                matches!(&outcome, Outcome::Failed(_))
                    || outcome == Outcome::Tokens(setup.reference.clone()),
                "{name} has {outcome:?} instead of {:?}",
                setup.reference
            );
            setup.expect_run(guest, &format!("the next load of {name}"))?;
        }
    }
    for (_, guest) in guests {
        guest.finish()?;
    }
    drop(machine);
    executor.stop()?;
    Ok("programs with the previous plugin and with this one load again on the same device".into())
}

/// Replaces the file `path` by a copy of `program`, as an upgrade of the package does.
fn install(program: &Path, path: &Path) -> Result<()> {
    let new = path.with_extension("new");
    std::fs::copy(program, &new).with_context(|| format!("copying {}", program.display()))?;
    std::fs::rename(&new, path).with_context(|| format!("replacing {}", path.display()))
}

/// Checks which program the executor is.
fn expect_program(executor: &KeptExecutor, program: &Path) -> Result<()> {
    let read =
        |path: &Path| std::fs::read(path).with_context(|| format!("reading {}", path.display()));
    // Also of a file that has been replaced.
    let runs = read(Path::new(&format!("/proc/{}/exe", executor.pid())))?;
    ensure!(
        runs == read(program)?,
        "the executor is not {}",
        program.display()
    );
    Ok(())
}
