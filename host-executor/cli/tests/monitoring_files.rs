//! The files in `deploy/monitoring` beside what an executor reports.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::TIMEOUT;
use serde_json::Value as Json;
use served::site::{ALICE, BOB, Site, http, work};
use vgpu_transport::wire::GraphId;

fn file(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/monitoring");
    fs::read_to_string(folder.join(name)).expect("a file of deploy/monitoring")
}

/// A port that is free now.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0");
    let address = listener.and_then(|listener| listener.local_addr());
    address.expect("a free port").port()
}

/// An executor with metrics at the given port, which has served two guests.
fn site(port: u16) -> Site {
    let config = format!("metrics.listen = \"127.0.0.1:{port}\"\n{ALICE}{BOB}");
    let site = Site::start("monitoring", &config);
    for socket in ["alice.sock", "bob.sock", "flag.sock"] {
        work(&mut site.guest(socket));
    }
    site
}

fn get(port: u16, path: &str) -> String {
    let socket = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    let (head, body) = http(socket, "GET", path);
    assert!(head.starts_with("HTTP/1.1 200"), "{path}: {head}\n{body}");
    body
}

/// The names of metrics in a text.
fn names(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words
        .filter(|word| word.starts_with("vgpu_") || word.starts_with("process_"))
        .collect()
}

/// The queries of the panels of the dashboard, each with the title of its panel.
fn queries(dashboard: &Json) -> Vec<(String, String)> {
    let panels = dashboard["panels"].as_array().expect("panels");
    let mut queries = Vec::new();
    for panel in panels {
        let title = panel["title"].as_str().expect("a title");
        for target in panel["targets"].as_array().expect("queries") {
            let query = target["expr"].as_str().expect("a query");
            queries.push((title.to_owned(), query.to_owned()));
        }
    }
    queries
}

fn dashboard() -> Json {
    serde_json::from_str(&file("grafana-dashboard.json")).expect("JSON")
}

#[test]
fn dashboard_and_rules_name_metrics_that_exist() {
    let port = free_port();
    let site = site(port);
    let metrics = get(port, "/metrics");
    let known: BTreeSet<&str> = { metrics.lines() }
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    let dashboard = dashboard();
    let mut asked: Vec<(String, String)> = queries(&dashboard);
    assert!(asked.len() > 30, "{}", asked.len());
    for variable in dashboard["templating"]["list"]
        .as_array()
        .expect("variables")
    {
        if let Some(query) = variable["query"]["query"].as_str() {
            asked.push(("a variable".into(), query.to_owned()));
        }
    }
    asked.push(("alerts.yml".into(), file("alerts.yml")));
    asked.push(("alerts_test.yml".into(), file("alerts_test.yml")));
    for (whose, text) in &asked {
        let names = names(text);
        assert!(!names.is_empty(), "{whose}: {text}");
        for name in names {
            assert!(known.contains(name), "{whose}: no metric is called {name}");
        }
    }
    // What guests do is on the dashboard, whatever is added to it.
    let all: String = asked.iter().map(|(_, text)| text.as_str()).collect();
    let shown = names(&all);
    for name in known.iter().filter(|name| name.starts_with("vgpu_guest_")) {
        // The nodes of graphs are for people who look at one program.
        assert!(
            shown.contains(name) || *name == "vgpu_guest_nodes_total",
            "{name}"
        );
    }
    site.end();
}

#[test]
fn every_alert_has_a_test_that_it_comes_and_one_that_it_does_not() {
    let (rules, tests) = (file("alerts.yml"), file("alerts_test.yml"));
    let alerts = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    let alerts: Vec<&str> = alerts.collect();
    assert!(alerts.len() > 10, "{alerts:?}");
    let (failing, serving) = tests
        .split_once("an executor that serves")
        .expect("two parts");
    for alert in alerts {
        let fires = failing
            .split("- alertname: ")
            .filter(|test| test.starts_with(&format!("{alert}\n")) && test.contains("exp_labels"));
        assert_eq!(fires.count(), 1, "{alert}");
        let silent = format!("alertname: {alert}, eval_time: 70m, exp_alerts: []");
        assert!(serving.contains(&silent), "{alert}");
    }
}

/// A process that is killed at the end of a test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended
        let _ = self.0.wait();
    }
}

/// Starts Prometheus, which scrapes the executor at a port ten times a second.
fn prometheus(folder: &Path, port: u16, executor: u16) -> Killed {
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/monitoring/alerts.yml");
    let config: PathBuf = folder.join("prometheus.yml");
    let text = format!(
        "global: {{scrape_interval: 100ms, evaluation_interval: 1s}}\n\
         rule_files: [{}]\n\
         scrape_configs:\n\
         - job_name: vgpu\n  \
           static_configs:\n  \
           - targets: ['127.0.0.1:{executor}']\n",
        rules.canonicalize().expect("the rules").display()
    );
    fs::write(&config, text).expect("a configuration");
    let log = fs::File::create(folder.join("prometheus.log")).expect("a log");
    let child = Command::new("prometheus")
        .arg(format!("--config.file={}", config.display()))
        .arg(format!(
            "--storage.tsdb.path={}",
            folder.join("data").display()
        ))
        .arg(format!("--web.listen-address=127.0.0.1:{port}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn();
    Killed(child.expect("prometheus (the Debian package prometheus) starts"))
}

/// The results of a query. `None`: Prometheus does not listen yet.
fn ask(port: u16, query: &str) -> Option<Vec<Json>> {
    let mut encoded = String::new();
    for byte in query.bytes() {
        // Writing to a string cannot fail.
        let _ = write!(encoded, "%{byte:02x}");
    }
    let socket = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let (head, body) = http(socket, "GET", &format!("/api/v1/query?query={encoded}"));
    if head.starts_with("HTTP/1.1 503") {
        return None;
    }
    assert!(head.starts_with("HTTP/1.1 200"), "{query}: {head}\n{body}");
    let answer: Json = serde_json::from_str(&body).expect("JSON");
    Some(
        answer["data"]["result"]
            .as_array()
            .expect("results")
            .clone(),
    )
}

#[test]
#[ignore = "needs Prometheus: `cargo xtask test --full` installs it and runs this"]
fn every_query_of_the_dashboard_returns_data_from_a_real_prometheus() {
    let port = free_port();
    let site = site(port);
    let scratch = served::Scratch::new("prometheus");
    let web = free_port();
    let _prometheus = prometheus(scratch.path(), web, port);
    let dashboard = dashboard();
    let mut left = queries(&dashboard);
    for (_, query) in &mut left {
        *query = query
            .replace("$__rate_interval", "10s")
            .replace("$guest", ".*")
            .replace("$instance", ".*");
    }
    let start = Instant::now();
    let mut guests = ["alice.sock", "bob.sock", "flag.sock"].map(|socket| site.guest(socket));
    guests.iter_mut().for_each(work);
    while !left.is_empty() {
        // Guests that compute all the time.
        for guest in &mut guests {
            guest.submit(GraphId(1));
            guest.fence();
        }
        left.retain(|(_, query)| {
            let results = ask(web, query).unwrap_or_default();
            let values = results.iter().filter_map(|one| one["value"][1].as_str());
            // A ratio of nothing is not a number.
            !values.into_iter().any(|value| value != "NaN")
        });
        assert!(start.elapsed() < TIMEOUT, "no data: {left:#?}");
        thread::sleep(Duration::from_millis(50));
    }
    // The rules are those of the file, and nothing is wrong with this executor.
    let body = get(web, "/api/v1/rules");
    let rules: Json = serde_json::from_str(&body).expect("JSON");
    let rules = rules["data"]["groups"][0]["rules"]
        .as_array()
        .expect("rules");
    assert!(rules.len() > 10, "{body}");
    for rule in rules {
        assert_eq!(rule["state"], "inactive", "{rule:#}");
    }
    site.end();
}
