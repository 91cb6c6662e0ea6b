//! Several guests of one executor: at the same time, and with one of them at its quota.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use xtask_common::executor;
use xtask_common::progress::Progress;

use super::guest::{Guest, HANG, Outcome};
use super::leaks::{ResourceUsage, expect_no_more};
use super::setup::{Row, Setup, TOKENS};

/// Programs that generate at the same time.
const MANY: usize = 3;

/// Several programs share one executor. Each generates the same tokens as alone.
pub(super) fn concurrent_guests(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    const NAME: &str = "together";
    let times = setup.counts.others;
    let executor = setup.serve(NAME, &[])?;
    let mut guests = (1..=MANY)
        .map(|number| setup.guest(NAME, &format!("{NAME}-{number}")))
        .collect::<Result<Vec<Guest>>>()?;
    for round in 0..times {
        for guest in &mut guests {
            guest.begin(TOKENS)?;
        }
        for (number, guest) in (1..).zip(&mut guests) {
            setup.expect_tokens(guest, &format!("guest {number} of {MANY} at once"))?;
        }
        progress.note(&format!("{} of {times}", round + 1));
    }
    for guest in guests {
        guest.finish()?;
    }
    executor.stop()?;
    Ok(Row {
        fault: "guests at once",
        times,
        found: format!("{MANY} programs generate the same tokens as one does alone"),
    })
}

/// The model of one guest does not fit its quota; the model of the other does. The refusal of the
/// first contains numbers, and the figures of the second do not change.
pub(super) fn quota(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    const NAME: &str = "quota";
    const SMALL: u64 = 16 << 20;
    const LARGE: u64 = 64 << 20;
    let times = setup.counts.others;
    let at = |name: &str| setup.scratch.path().join(format!("{NAME}-{name}"));
    let control = at("control.sock");
    let mut config = format!("control.socket = {control:?}\n");
    for (name, memory) in [("small", SMALL), ("large", LARGE)] {
        let listener = format!("unix:{}", setup.socket(name).display());
        config +=
            &format!("[[guest]]\nname = {name:?}\nmemory = {memory}\nlisten = [{listener:?}]\n");
    }
    let file = at("vgpu.toml");
    std::fs::write(&file, config).context("writing a configuration")?;
    let executor = setup.serve(NAME, &["--config", &file.display().to_string()])?;
    let status = || executor::status(&setup.dist.vgpu, &control);

    let mut large = setup.guest("large", "quota-large")?;
    let mut small = setup.guest("small", "quota-small")?;
    let before = ResourceUsage::of(executor.pid())?;
    for round in 0..times {
        large.begin(400)?;
        large.token()?;
        let held = status()?;
        ensure!(
            figure(&held, "large", "memory")? > SMALL && figure(&held, "large", "quota")? == LARGE,
            "the figures of the guest within its quota are wrong: {held}"
        );
        small.begin(TOKENS)?;
        let outcome = small.end()?;
        ensure!(
            matches!(outcome, Outcome::Failed(_)),
            "a model fits into {SMALL} bytes: {outcome:?}"
        );
        let now = status()?;
        for name in ["memory", "quota", "failures"] {
            let (then, now) = (figure(&held, "large", name)?, figure(&now, "large", name)?);
            ensure!(
                then == now,
                "{name} of the other guest changed from {then} to {now}"
            );
        }
        ensure!(
            figure(&now, "small", "failures")? > round as u64,
            "no refusal is counted"
        );
        let tokens = large.end()?.tokens().context("the other guest")?;
        ensure!(
            tokens[..TOKENS] == setup.reference,
            "the other guest generated {tokens:?}"
        );
        progress.note(&format!("{} of {times}", round + 1));
    }
    large.finish()?;
    small.finish()?;
    expect_no_more(executor.pid(), &before, "the executor", HANG)?;
    executor.stop()?;
    let log = std::fs::read_to_string(setup.log("quota-vgpu-serve"))?;
    let wanted = format!("of {}.0 MiB free", SMALL >> 20);
    let line = log
        .lines()
        .find(|line| line.contains("out of memory") && line.contains(&wanted))
        .with_context(|| format!("the log has no refusal with {wanted:?}"))?;
    let numbers = line.split("out of memory: ").nth(1).unwrap_or(line);
    Ok(Row {
        fault: "quota reached",
        times,
        found: format!(
            "refused ({numbers}); memory, quota and tokens of the other guest do not change"
        ),
    })
}

/// A figure of a guest.
fn figure(status: &Value, guest: &str, name: &str) -> Result<u64> {
    let guests = status["guests"].as_array();
    let found = guests.and_then(|guests| guests.iter().find(|g| g["name"] == guest));
    let figure = found.and_then(|guest| guest[name].as_u64());
    figure.with_context(|| format!("no {name} of guest {guest} in {status}"))
}
