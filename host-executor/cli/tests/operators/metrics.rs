//! What Prometheus reads.

use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use prometheus_parse::{Scrape, Value};
use rustix::process::Signal;
use vgpu_transport::wire::{Reply, Request};

use crate::served::site::{ALICE, Site, http, work};
use crate::served::{Scratch, Serve, vgpu};

#[test]
fn metrics_are_in_the_prometheus_format() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a free port")
        .port();
    for address in [format!("127.0.0.1:{port}"), "unix:DIR/metrics.sock".into()] {
        let config = format!("metrics.listen = \"{address}\"\n{ALICE}");
        let site = Site::start("metrics", &config);
        let mut alice = site.guest("alice.sock");
        for _ in 0..3 {
            work(&mut site.guest("alice.sock"));
        }
        work(&mut alice);
        alice.fence();
        let get = |path: &str, method: &str| match address.strip_prefix("unix:DIR/") {
            Some(name) => http(
                UnixStream::connect(site.folder.join(name)).expect("it listens"),
                method,
                path,
            ),
            None => http(
                TcpStream::connect(&address).expect("it listens"),
                method,
                path,
            ),
        };
        let (head, body) = get("/metrics", "GET");
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(
            head.contains("application/openmetrics-text; version=1.0.0"),
            "{head}"
        );
        assert!(body.ends_with("# EOF\n"), "{body}");
        let lines = body.lines().map(|line| Ok(line.to_owned()));
        let scrape = Scrape::parse(lines).expect("the text format");
        let sample = |name: &str, guest: Option<&str>| {
            let found = scrape.samples.iter().find(|sample| {
                sample.metric == name
                    && guest.is_none_or(|guest| sample.labels.get("guest") == Some(guest))
            });
            found
                .unwrap_or_else(|| panic!("{name} of {guest:?} is not in\n{body}"))
                .value
                .clone()
        };
        let number = |name: &str, guest| match sample(name, guest) {
            Value::Gauge(value) | Value::Counter(value) | Value::Untyped(value) => value,
            other => panic!("{name}: {other:?}"),
        };
        let alice_has = |name: &str| number(name, Some("alice"));
        assert_eq!(
            number("vgpu_engine_memory_bytes", None),
            (64u64 << 20) as f64
        );
        assert_eq!(
            alice_has("vgpu_guest_memory_quota_bytes"),
            (1u64 << 20) as f64
        );
        assert_eq!(alice_has("vgpu_guest_graphs_total"), 4.0);
        assert_eq!(alice_has("vgpu_guest_weight"), 3.0);
        assert_eq!(alice_has("vgpu_guest_weights_not_sent_bytes_total"), 0.0);
        assert_eq!(number("vgpu_weights_bytes", None), 0.0);
        assert!(alice_has("vgpu_guest_received_bytes_total") > 0.0);
        assert!(alice_has("vgpu_graph_run_seconds_sum") > 0.0);
        let refused = alice.new_buffer();
        let size = 2 << 20;
        alice.send(&Request::Alloc {
            buffer: refused,
            size,
        });
        assert!(matches!(alice.receive().0, Reply::Refused { .. }));
        let (_, later) = get("/metrics", "GET");
        for (reason, count) in [("memory", 1), ("limit", 0), ("device", 0)] {
            let line = format!(
                "vgpu_guest_failures_total{{guest=\"alice\",reason=\"{reason}\"}} {count}\n"
            );
            assert!(later.contains(&line), "{later}");
        }
        let info = sample("vgpu_build_info", None);
        assert_eq!(info, Value::Untyped(1.0));
        let build = { scrape.samples.iter() }.find(|s| s.metric == "vgpu_build_info");
        let version = build.and_then(|sample| sample.labels.get("version"));
        assert_eq!(version, Some(env!("VGPU_VERSION")));
        for name in [
            "process_start_time_seconds",
            "process_resident_memory_bytes",
            "process_virtual_memory_bytes",
            "process_open_fds",
            "process_max_fds",
        ] {
            assert!(number(name, None) > 0.0, "{name}");
        }
        // In clock ticks of 10 ms, of which a fast processor may not have needed one.
        assert!((0.0..1000.0).contains(&number("process_cpu_seconds_total", None)));
        for duplicate in ["vgpu_guest_run_seconds", "vgpu_guest_queue_seconds"] {
            assert!(!body.contains(duplicate), "{duplicate}");
        }
        assert_eq!(number("vgpu_guest_graphs_total", Some("-")), 0.0);
        assert_eq!(alice_has("vgpu_graph_run_seconds_count"), 4.0);
        let Value::Histogram(buckets) = sample("vgpu_graph_run_seconds", Some("alice")) else {
            panic!("no histogram");
        };
        let counts: Vec<f64> = buckets.iter().map(|bucket| bucket.count).collect();
        assert!(
            counts.is_sorted() && counts.last() == Some(&4.0),
            "{counts:?}"
        );
        assert!(buckets.last().expect("buckets").less_than.is_infinite());
        // The parser tolerates unknown parts; these are rules of the format.
        for line in body.lines() {
            assert!(line.is_ascii() && !line.is_empty(), "{line:?}");
        }
        let (head, body) = get("/metrics", "HEAD");
        assert!(
            head.starts_with("HTTP/1.1 200") && head.contains("openmetrics") && body.is_empty(),
            "{head}\n{body}"
        );
        let (head, body) = get("/healthz", "GET");
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert_eq!(body, "ok: the engine cpu answers\n");
        for (path, method, status) in [("/no", "GET", 404), ("/metrics", "POST", 405)] {
            let (head, _) = get(path, method);
            assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{head}");
        }
        site.end();
    }
}

#[test]
fn a_taken_port_for_metrics_keeps_no_guest_away() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address");
    let site = Site::start("taken", &format!("metrics.listen = \"{address}\"\n{ALICE}"));
    work(&mut site.guest("alice.sock"));
    let log = site.end();
    let said = format!("no metrics: another program listens on {address}");
    assert!(log.contains(&said), "{log}");
}

#[test]
fn metrics_for_other_machines_have_to_be_allowed() {
    let scratch = Scratch::new("remote-metrics");
    let socket = scratch.socket();
    let endpoint = format!("unix:{}", socket.display());
    let remote = ["--metrics", "0.0.0.0:0"];
    let mut refused = vgpu(&["serve", "--listen", &endpoint]);
    refused.args(remote);
    let refused = Serve::of(refused);
    assert_eq!(refused.ready, "");
    let (status, text) = refused.wait();
    assert_eq!(status.code(), Some(78), "{text}");
    assert!(text.contains("--metrics-allow-remote"), "{text}");
    let allowed = [&remote[..], &["--metrics-allow-remote"]].concat();
    let serve = Serve::start(&socket, &allowed);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert!(
        status.success() && log.contains("metrics at 0.0.0.0:0"),
        "{log}"
    );
}
