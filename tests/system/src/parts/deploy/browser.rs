//! The status page in Chromium, beside eight guests.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use xtask_common::dist::Dist;
use xtask_common::executor::{self, Executor};
use xtask_common::llama;
use xtask_common::model::{self, FileType};
use xtask_common::packages;
use xtask_common::process::{Daemon, Dialogue, free_port};
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use crate::test_run::TestRun;

/// As many as the curves have colours.
const GUESTS: usize = 8;

/// The timeout of the guests' first graphs, and of the browser.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The roles of a browser that are read out by name. Its other roles group, or are text; each table
/// is in a region with its name.
const NAMED: [&str; 9] = [
    "image",
    "graphics-symbol",
    "meter",
    "figure",
    "region",
    "heading",
    "rowheader",
    "list",
    "button",
];

pub(super) fn check(tests: &TestRun<'_>, dist: &Dist) -> Result<String> {
    let chromium = packages::chromium(tests.cache)?;
    let script = workspace::root().join("tests/programs/status_page.mjs");
    let mut look = packages::puppeteer(tests.cache, &script)?;
    let scratch = Scratch::new()?;
    let at = |name: &str| scratch.path().join(name).display().to_string();
    let names: BTreeSet<String> = (0..GUESTS).map(|i| format!("guest{i}")).collect();
    let mut config = format!("control.socket = {:?}\n", at("control.sock"));
    for name in &names {
        let listener = format!("unix:{}", at(&format!("{name}.sock")));
        config += &format!("[[guest]]\nname = {name:?}\nlisten = [{listener:?}]\n");
    }
    fs::write(at("vgpu.toml"), config).context("writing a configuration")?;
    let address = format!("127.0.0.1:{}", free_port()?);
    let executor = Executor::start_with(
        dist,
        &scratch.path().join("all.sock"),
        workspace::cores(),
        &tests.log("status-page-executor"),
        &[
            &["--config", &at("vgpu.toml"), "--metrics", &address],
            executor::inspected(),
        ]
        .concat(),
    )?;

    let bin = llama::build(tests.cache, llama::Stage::Tools)?;
    let model = model::ensure(tests.cache, &model::TINY, FileType::F16)?;
    let mut guests = Vec::new();
    for name in &names {
        let mut bench = Command::new(bin.join("llama-bench"));
        bench.args(["-p", "32", "-n", "64", "-r", "100000", "-m"]);
        bench
            .arg(&model)
            .env("GGML_BACKEND_PATH", &dist.plugin)
            .env(
                "VGPU_ENDPOINT",
                format!("unix:{}", at(&format!("{name}.sock"))),
            );
        let log = tests.log(&format!("status-page-{name}"));
        guests.push(Daemon::start(&mut bench, &log)?);
    }
    guests[0].wait_until(TIMEOUT, |_| all_compute(dist, &at("control.sock")))?;

    let shots = workspace::reports().join("status-page");
    fs::create_dir_all(&shots).context("creating a folder")?;
    look.arg(chromium)
        .arg(format!("http://{address}/"))
        .arg(&shots);
    let mut look = Dialogue::start(&mut look, &tests.log("status-page-browser"))?;
    let seen = parse(&look.read_line(TIMEOUT)?)?;
    expect_live(&seen)?;
    expect_names(&seen["tree"])?;
    for view in ["first", "later", "dark", "phone", "plain"] {
        expect_layout(&seen[view], &names).with_context(|| view.to_owned())?;
    }
    let [light, dark] = ["later", "dark"].map(|view| &seen[view]["background"]);
    ensure!(light != dark, "the page is {dark} in the dark, too");

    drop(guests);
    executor.stop()?;
    look.write_line("the executor has ended")?;
    let notice = parse(&look.read_line(TIMEOUT)?)?["notice"].take();
    ensure!(
        notice == "The executor does not answer. The figures are old.",
        "without an executor the page says {notice}"
    );
    look.finish(TIMEOUT)?;
    Ok(format!("{GUESTS} guests; pictures in {}", shots.display()))
}

fn parse(line: &str) -> Result<Value> {
    serde_json::from_str(line).with_context(|| format!("what the browser has seen: {line}"))
}

/// Whether the executor has computed graphs of all guests.
fn all_compute(dist: &Dist, control: &str) -> bool {
    let ps = Command::new(&dist.vgpu)
        .args(["ps", "--json", "--control", control])
        .output();
    let status = ps
        .ok()
        .and_then(|ps| serde_json::from_slice::<Value>(&ps.stdout).ok());
    let guests = status
        .as_ref()
        .and_then(|status| status["guests"].as_array());
    let graphs = { guests.into_iter().flatten() }.filter_map(|guest| guest["graphs"].as_u64());
    graphs.filter(|graphs| *graphs > 0).count() == GUESTS
}

/// The page has changed its figures without being loaded again, has asked for nothing elsewhere,
/// and the browser complains about nothing.
fn expect_live(seen: &Value) -> Result<()> {
    ensure!(seen["notLoadedAgain"] == true, "the page was loaded again");
    let [first, later] = ["first", "later"].map(|view| &seen[view]["tables"][0]["rows"]);
    ensure!(first != later, "the figures have not changed: {later}");
    let requests = seen["seen"]["requests"].as_array().context("no requests")?;
    let page = requests
        .first()
        .and_then(Value::as_str)
        .context("no page")?;
    let is_ours = |url: &Value| url.as_str().is_some_and(|url| url.starts_with(page));
    ensure!(requests.iter().all(is_ours), "{requests:?}");
    let asked = requests.iter().filter(|url| *url == page).count();
    ensure!(asked >= 2, "the page has asked {asked} times for itself");
    for complaints in [&seen["seen"]["complaints"], &seen["dark"]["complaints"]] {
        let complaints = complaints.as_array().context("no list")?;
        ensure!(complaints.is_empty(), "{complaints:?}");
    }
    Ok(())
}

/// What a screen reader reads out has a name.
fn expect_names(tree: &Value) -> Result<()> {
    let nodes = tree.as_array().context("no tree")?;
    for role in NAMED {
        let unnamed = { nodes.iter() }.filter(|node| node["role"] == role && node["name"] == "");
        let unnamed = unnamed.count();
        ensure!(unnamed == 0, "{unnamed} nodes {role:?} have no name");
    }
    // A browser that names its roles otherwise would pass without them.
    for role in ["image", "figure", "table", "heading", "rowheader"] {
        let is_there = nodes.iter().any(|node| node["role"] == role);
        ensure!(is_there, "no node {role:?}");
    }
    Ok(())
}

/// Every guest has a row and curves, nothing is without a size or beyond the edge of the window.
fn expect_layout(view: &Value, names: &BTreeSet<String>) -> Result<()> {
    ensure!(view["wide"] == false, "wider than the window");
    let rows = view["tables"][0]["rows"].as_array().context("no rows")?;
    let found: BTreeSet<String> = { rows.iter() }
        .filter_map(|row| row[0].as_str().map(str::to_owned))
        .collect();
    ensure!(names.is_subset(&found), "guests {found:?}");
    let charts = view["charts"].as_array().context("no charts")?;
    ensure!(charts.len() >= 6, "{} charts", charts.len());
    for chart in charts {
        let size = ["width", "height"].map(|side| chart[side].as_f64().unwrap_or_default());
        ensure!(size.iter().all(|side| *side >= 100.0), "{chart}");
    }
    Ok(())
}
