//! The life of a certificate: made, renewed, expired, revoked. A real `vgpu serve`, real TLS, and
//! openssl as a peer that does not care about its own certificate.

mod certified;
#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use certified::{cert, cert_ok, certify, forge, forge_until, info, openssl, port};
use common::{Guest, TIMEOUT};
use rustix::process::Signal;
use served::{Scratch, Serve, vgpu};
use vgpu_transport::link::stream::tcp;
use vgpu_transport::link::stream::tls::{CertificateFiles, Certificates};
use vgpu_transport::wire::{Reply, Request};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// What a process has said.
fn said(output: &std::process::Output) -> String {
    let all = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&all).into_owned()
}

/// A guest over TCP that has not sent HELLO.
fn connect(port: u16, certificates: &Path) -> Guest {
    let certificates = Certificates::load(certificates).expect("certificates");
    let end = tcp::connect("127.0.0.1", port, Some(&certificates), TIMEOUT);
    Guest::new(Box::new(end.expect("TLS")))
}

/// Starts an executor at a port, with the certificates of a folder.
fn serve(scratch: &Scratch, port: u16, certificates: &Path, more: &[&str]) -> Serve {
    let certificates = certificates.display().to_string();
    let endpoint = format!("tcp:127.0.0.1:{port}");
    let mut arguments = vec!["--listen", &endpoint, "--certs", &certificates];
    arguments.extend(more);
    Serve::start(&scratch.socket(), &arguments)
}

fn end(serve: Serve) -> String {
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    log
}

#[test]
fn certificates_are_valid_for_the_days_asked_for() {
    let scratch = Scratch::new("cert-days");
    let keys = scratch.path().join("keys");
    let folder = keys.display().to_string();
    let left = |name: &str| {
        let end = info(&keys, name).not_after.expect("an end");
        let left = end.duration_since(SystemTime::now()).expect("a valid one");
        left.as_secs().div_ceil(DAY.as_secs())
    };
    certify(&keys, "host", "gpu1", &[]);
    certify(&keys, "guest", "short", &["--days", "2"]);
    assert_eq!((left("gpu1"), left("short")), (365, 2));
    let authority = fs::read(keys.join("ca.pem")).expect("an authority");
    fs::create_dir(keys.join("ca")).expect("a folder");
    fs::write(keys.join("ca/cert.pem"), authority).expect("a copy");
    assert_eq!(left("ca"), 3650);
    // A certificate does not outlive its authority.
    let refused = said(&cert(&[&folder, "guest", "long", "--days", "4000"]));
    assert!(refused.contains("use --days 3649 or less"), "{refused}");
    assert!(!keys.join("long").exists(), "a folder is left behind");
    let refused = said(&cert(&[&folder, "guest", "none", "--days", "0"]));
    assert!(refused.contains("--days"), "{refused}");
}

#[test]
fn addresses_are_a_list_and_anything_else_is_refused() {
    let scratch = Scratch::new("cert-addresses");
    let keys = scratch.path().join("keys");
    let folder = keys.display().to_string();
    let list = [
        "--address",
        "gpu1.example.org,192.0.2.7",
        "--address",
        "2001:db8::7",
    ];
    certify(&keys, "host", "gpu1", &list);
    let made = info(&keys, "gpu1");
    assert_eq!(made.dns_names, ["gpu1.example.org"]);
    let addresses: Vec<String> = made.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["192.0.2.7", "2001:db8::7"]);
    for wrong in [
        "",
        "a,,b",
        "gpu 1",
        "gpu1:4780",
        "[2001:db8::7]",
        "tcp:gpu1",
        "gpu..1",
        "-gpu",
        "192.0.2.7/24",
        "*.example.org",
    ] {
        let refused = said(&cert(&[
            &folder,
            "host",
            "wrong",
            &format!("--address={wrong}"),
        ]));
        assert!(
            refused.contains("is neither a host name nor an address"),
            "{wrong}: {refused}"
        );
        assert!(!keys.join("wrong").exists(), "{wrong}");
    }
    // Without addresses, the name is the host's.
    let refused = said(&cert(&[&folder, "host", "gpu..1"]));
    assert!(refused.contains("\"gpu..1\" is no host name"), "{refused}");
    // Names that stand for something else.
    for name in ["issued", "renew", "-x", ".x", "a/b"] {
        let output = cert(&["--", &folder, "guest", name]);
        assert!(!output.status.success(), "{name}");
    }
}

#[test]
fn renewed_certificate_has_the_same_names_and_key() {
    let scratch = Scratch::new("cert-renew");
    let keys = scratch.path().join("keys");
    let folder = keys.display().to_string();
    let names = ["--days", "3", "--address", "127.0.0.1,gpu1.example.org"];
    certify(&keys, "host", "gpu1", &names);
    certify(&keys, "guest", "alice", &["--days", "3"]);
    let (port, old) = (port(), info(&keys, "gpu1"));
    let control = scratch.path().join("control.sock").display().to_string();
    let serve = serve(&scratch, port, &keys.join("gpu1"), &["--control", &control]);
    connect(port, &keys.join("alice")).hello();

    cert_ok(&["renew", &folder, "gpu1"]);
    // Also without the key, which need not be where the authority is.
    let key = keys.join("alice/key.pem");
    let kept = fs::read(&key).expect("a key");
    fs::remove_file(&key).expect("it is there");
    cert_ok(&["renew", &folder, "alice", "--days", "40"]);
    fs::write(&key, kept).expect("room");

    let new = info(&keys, "gpu1");
    assert_eq!(new.names(), old.names());
    assert_eq!(new.addresses, old.addresses);
    assert_eq!(new.public_key, old.public_key);
    assert!(new.is_for_servers && !info(&keys, "alice").is_for_servers);
    assert_ne!(new.serial, old.serial);
    assert!(new.not_after > old.not_after);

    // The executor shows the new certificate after a reload, and the sessions go on.
    let mut open = connect(port, &keys.join("alice"));
    open.hello();
    let shown = || {
        let client = ["s_client", "-connect", &format!("127.0.0.1:{port}")];
        let output = openssl(&client, &keys.join("alice"))
            .output()
            .expect("openssl");
        said(&output)
    };
    let new_pem = fs::read_to_string(keys.join("gpu1/cert.pem")).expect("a certificate");
    assert!(!shown().contains(new_pem.trim()), "before the reload");
    let reloaded = vgpu(&["reload", "--control", &control])
        .output()
        .expect("it starts");
    assert!(reloaded.status.success(), "{}", said(&reloaded));
    assert!(shown().contains(new_pem.trim()), "after the reload");
    assert!(matches!(
        open.ask(&Request::Memory {}),
        Reply::Memory { .. }
    ));
    drop(open);
    end(serve);

    // What cannot be renewed.
    let refused = said(&cert(&["renew", &folder, "bob"]));
    assert!(refused.contains("bob/cert.pem: `vgpu cert"), "{refused}");
    fs::copy(keys.join("alice/key.pem"), keys.join("gpu1/key.pem")).expect("room");
    let refused = said(&cert(&["renew", &folder, "gpu1"]));
    assert!(
        refused.contains("is not the key of the certificate beside it"),
        "{refused}"
    );
    let refused = said(&cert(&[&folder, "guest", "alice"]));
    assert!(
        refused.contains(&format!("`vgpu cert renew {folder} alice`")),
        "{refused}"
    );
}

#[test]
fn certificate_outside_its_validity_is_refused_on_both_sides() {
    let scratch = Scratch::new("cert-expired");
    let keys = scratch.path().join("keys");
    certify(&keys, "host", "gpu1", &["--address", "127.0.0.1"]);
    certify(&keys, "guest", "alice", &[]);
    forge(&keys, "guest", "late", 2019, 2020);
    forge(&keys, "guest", "early", 2100, 2101);
    // Unverified text never becomes a part of a command.
    forge(&keys, "guest", "odd; reboot", 2019, 2020);
    forge(&keys, "host", "oldhost", 2019, 2020);

    // Each side refuses its own certificate, and says which one it is.
    let (late, early) = (keys.join("late"), keys.join("early"));
    let error = Certificates::load(&late).expect_err("expired").to_string();
    let file = late.join("cert.pem").display().to_string();
    assert!(error.starts_with(&file), "{error}");
    assert!(
        error.contains("the certificate of late expired on 2020-01-01T00:00:00Z")
            && error.contains("`vgpu cert renew FOLDER late`"),
        "{error}"
    );
    let error = Certificates::load(&early).expect_err("not yet").to_string();
    assert!(
        error.contains("the certificate of early is valid from 2100-01-01T00:00:00Z on")
            && error.contains("timedatectl"),
        "{error}"
    );
    let expired_host = vgpu(&["serve", "--listen", "tcp:127.0.0.1:0", "--certs"])
        .arg(keys.join("oldhost"))
        .output()
        .expect("it starts");
    assert!(!expired_host.status.success());
    let text = said(&expired_host);
    assert!(
        text.contains("oldhost/cert.pem: the certificate of oldhost expired on 2020-01-01"),
        "{text}"
    );

    // The host refuses guests that do not check themselves.
    let port_of_host = port();
    let serve = serve(&scratch, port_of_host, &keys.join("gpu1"), &[]);
    let address = format!("127.0.0.1:{port_of_host}");
    for guest in ["late", "early", "odd; reboot"] {
        let client = openssl(&["s_client", "-connect", &address], &keys.join(guest));
        // Waits for the alert, which follows the handshake of TLS 1.3.
        let text = alert_of(client);
        assert!(text.contains("certificate expired"), "{guest}: {text}");
    }
    connect(port_of_host, &keys.join("alice")).hello();
    let log = end(serve);
    for part in [
        "this side rejects the peer's certificate: the certificate of late expired on \
         2020-01-01T00:00:00Z",
        "`vgpu cert renew FOLDER late`",
        "the certificate of early is valid from 2100-01-01T00:00:00Z on",
        "the certificate of odd; reboot expired",
        "`vgpu cert renew FOLDER NAME`",
    ] {
        assert!(log.contains(part), "no {part:?} in {log}");
    }

    // A guest refuses a host that does not check itself.
    let port_of_host = port();
    let accept = format!("127.0.0.1:{port_of_host}");
    let mut host = openssl(
        &["s_server", "-accept", &accept, "-Verify", "1"],
        &keys.join("oldhost"),
    )
    .stdin(std::process::Stdio::piped()) // it ends with its input
    .spawn()
    .expect("openssl");
    let mut lines = BufReader::new(host.stdout.take().expect("piped")).lines();
    assert!(
        lines.any(|line| line.expect("text").contains("ACCEPT")),
        "it does not listen"
    );
    let alice = Certificates::load(&keys.join("alice")).expect("certificates");
    let connected = tcp::connect("127.0.0.1", port_of_host, Some(&alice), TIMEOUT);
    let error = connected.err().expect("it is expired").to_string();
    host.kill().and_then(|()| host.wait()).expect("it runs");
    assert!(
        error.contains("this side rejects the peer's certificate: the certificate of oldhost")
            && error.contains("`vgpu cert renew FOLDER oldhost`"),
        "{error}"
    );
}

/// What openssl says when the peer has ended its connection.
fn alert_of(mut client: std::process::Command) -> String {
    let mut child = client
        .stdin(std::process::Stdio::piped())
        .spawn()
        .expect("openssl");
    let keep_open = child.stdin.take();
    let mut text = String::new();
    let stderr = child.stderr.as_mut().expect("piped");
    stderr.read_to_string(&mut text).expect("text");
    drop(keep_open);
    child.wait().expect("it ends");
    text
}

#[test]
fn revoked_certificate_is_refused_and_its_sessions_end_at_a_reload() {
    for isolate in [&[][..], &["--isolate", "--guest-memory", "10M"]] {
        revoke_at_a_reload(isolate);
    }
}

fn revoke_at_a_reload(isolate: &[&str]) {
    let scratch = Scratch::new(&format!("cert-revoked{}", isolate.len()));
    let keys = scratch.path().join("keys");
    let folder = keys.display().to_string();
    certify(&keys, "host", "gpu1", &["--address", "127.0.0.1"]);
    for guest in ["alice", "bob", "carol"] {
        certify(&keys, "guest", guest, &[]);
    }
    // An empty list, so that the file exists.
    cert_ok(&["revoke", &folder]);
    let (crl, control) = (keys.join("crl.pem"), scratch.path().join("control.sock"));
    let (crl, control) = (crl.display().to_string(), control.display().to_string());
    let more = [&["--crl", &crl, "--control", &control], isolate].concat();
    let port = port();
    let serving = serve(&scratch, port, &keys.join("gpu1"), &more);
    let reload = || {
        let output = vgpu(&["reload", "--control", &control]).output();
        output.expect("it starts")
    };
    // With --isolate, a program waits while an earlier one of its address has no session.
    let mut alice = connect(port, &keys.join("alice"));
    alice.hello();
    let mut bob = connect(port, &keys.join("bob"));
    bob.hello();
    // A file that cannot be read changes nothing.
    let good = fs::read(&crl).expect("a list");
    fs::write(
        &crl,
        "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n",
    )
    .expect("room");
    let refused = reload();
    assert!(!refused.status.success());
    assert!(said(&refused).contains("crl.pem"), "{}", said(&refused));
    fs::write(&crl, good).expect("room");

    // A renewed certificate goes with the name's others.
    cert_ok(&["renew", &folder, "alice"]);
    cert_ok(&["revoke", &folder, "alice"]);
    assert!(
        matches!(alice.ask(&Request::Memory {}), Reply::Memory { .. }),
        "before the reload"
    );
    let reloaded = reload();
    assert!(reloaded.status.success(), "{}", said(&reloaded));
    if isolate.is_empty() {
        let text = said(&reloaded);
        assert!(text.contains("1 sessions are ended"), "{text}");
    }
    let reason = alice.ended();
    assert!(
        reason.contains("no longer serves this guest: the certificate of alice is revoked by")
            && reason.contains("crl.pem"),
        "{reason}"
    );
    assert!(
        matches!(bob.ask(&Request::Memory {}), Reply::Memory { .. }),
        "bob is not revoked"
    );
    let again = openssl(
        &["s_client", "-connect", &format!("127.0.0.1:{port}")],
        &keys.join("alice"),
    );
    let text = alert_of(again);
    assert!(text.contains("certificate revoked"), "{text}");

    // By a signal, and by a file: certificates that have left the folder.
    cert_ok(&[
        "revoke",
        &folder,
        &keys.join("bob/cert.pem").display().to_string(),
    ]);
    serving.signal(Signal::HUP);
    let reason = bob.ended();
    assert!(
        reason.contains("the certificate of bob is revoked"),
        "{reason}"
    );
    connect(port, &keys.join("carol")).hello();
    let log = end(serving);
    assert!(
        log.contains("the session is ended: the certificate of alice is revoked"),
        "{log}"
    );
    assert!(
        log.contains(
            "this side rejects the peer's certificate: the certificate of alice is revoked"
        ),
        "{log}"
    );

    // From the start, with the list in the folder of the certificates; and never renewed.
    fs::copy(&crl, keys.join("gpu1/crl.pem")).expect("room");
    let serving = serve(&scratch, port, &keys.join("gpu1"), isolate);
    let again = openssl(
        &["s_client", "-connect", &format!("127.0.0.1:{port}")],
        &keys.join("bob"),
    );
    let text = alert_of(again);
    assert!(text.contains("certificate revoked"), "{text}");
    connect(port, &keys.join("carol")).hello();
    end(serving);
    let refused = said(&cert(&["renew", &folder, "bob"]));
    assert!(refused.contains("is revoked"), "{refused}");
}

/// An open session goes on beyond the end of its certificate, until a reload.
#[test]
fn certificate_that_expires_while_its_session_runs_counts_at_a_reload() {
    let scratch = Scratch::new("cert-expires");
    let keys = scratch.path().join("keys");
    certify(&keys, "host", "gpu1", &["--address", "127.0.0.1"]);
    certify(&keys, "guest", "bob", &[]);
    let control = scratch.path().join("control.sock").display().to_string();
    let port = port();
    let serving = serve(&scratch, port, &keys.join("gpu1"), &["--control", &control]);
    let mut bob = connect(port, &keys.join("bob"));
    bob.hello();
    // Time enough to connect on a busy machine.
    let valid_until = SystemTime::now() + Duration::from_secs(12);
    let alice_keys = forge_until(&keys, "guest", "alice", 2020, valid_until);
    let mut alice = connect(port, &alice_keys);
    alice.hello();
    while SystemTime::now() < valid_until + Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let memory = |guest: &mut Guest| guest.ask(&Request::Memory {});
    assert!(matches!(memory(&mut alice), Reply::Memory { .. }), "open");
    let address = format!("127.0.0.1:{port}");
    let again = openssl(&["s_client", "-connect", &address], &alice_keys);
    let text = alert_of(again);
    assert!(text.contains("certificate expired"), "{text}");
    let reload = vgpu(&["reload", "--control", &control]).output();
    let reload = reload.expect("it starts");
    assert!(reload.status.success(), "{}", said(&reload));
    let reason = alice.ended();
    assert!(
        reason.contains("no longer serves this guest: the certificate of alice expired on "),
        "{reason}"
    );
    assert!(matches!(memory(&mut bob), Reply::Memory { .. }));
    let log = end(serving);
    let ended = "the session is ended: the certificate of alice expired on ";
    assert!(log.contains(ended), "{log}");
}

#[test]
fn unusable_lists_of_revoked_certificates_are_refused_with_the_reason() {
    let scratch = Scratch::new("cert-lists");
    let (keys, others) = (scratch.path().join("keys"), scratch.path().join("others"));
    let folder = keys.display().to_string();
    certify(&keys, "host", "gpu1", &["--address", "127.0.0.1"]);
    certify(&others, "host", "gpu1", &["--address", "127.0.0.1"]);
    cert_ok(&["revoke", &others.display().to_string(), "gpu1"]);
    let start = |crl: &Path| {
        let files = CertificateFiles::read(&keys.join("gpu1"), Some(crl));
        let files = files.map_err(|error| error.to_string())?;
        Certificates::check(files)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    // The list of another authority is not one of this authority.
    let error = start(&others.join("crl.pem")).expect_err("of another authority");
    assert!(error.contains("has no list of the authority"), "{error}");
    let error = start(&keys.join("crl.pem")).expect_err("there is none");
    assert!(error.contains("crl.pem: No such file"), "{error}");
    let error = start(&keys.join("ca.pem")).expect_err("no list");
    assert!(
        error.contains("holds no list of revoked certificates"),
        "{error}"
    );
    // A list with one byte changed.
    cert_ok(&["revoke", &folder, "gpu1"]);
    let good = fs::read_to_string(keys.join("crl.pem")).expect("a list");
    let changed: Vec<&str> = good.lines().collect();
    let broken = scratch.path().join("broken.pem");
    for line in 1..changed.len() - 1 {
        let mut lines: Vec<String> = changed.iter().map(|line| (*line).to_string()).collect();
        let first = if lines[line].starts_with('A') {
            "B"
        } else {
            "A"
        };
        lines[line].replace_range(..1, first);
        fs::write(&broken, lines.join("\n")).expect("room");
        assert!(start(&broken).is_err(), "line {line} of {good}");
    }
    // The list of its own authority, in which the host itself is.
    let error = start(&keys.join("crl.pem")).expect_err("it is revoked");
    assert!(
        error.contains("gpu1/cert.pem: the certificate of gpu1 is revoked"),
        "{error}"
    );
    let output = vgpu(&["serve", "--listen", "tcp:127.0.0.1:0", "--crl", "x.pem"])
        .output()
        .expect("it starts");
    let text = said(&output);
    assert!(text.contains("x.pem needs certificates"), "{text}");
    // A name without certificates is a mistake, not an empty list.
    let text = said(&cert(&["revoke", &folder, "nobody"]));
    assert!(text.contains("no certificate of \"nobody\""), "{text}");
}

#[test]
fn certificates_that_end_soon_cause_warnings() {
    let scratch = Scratch::new("cert-ending");
    let keys = scratch.path().join("keys");
    certify(
        &keys,
        "host",
        "gpu1",
        &["--address", "127.0.0.1", "--days", "20"],
    );
    certify(&keys, "guest", "alice", &["--days", "10"]);
    certify(&keys, "guest", "bob", &["--days", "40"]);
    let port = port();
    let serve = serve(&scratch, port, &keys.join("gpu1"), &[]);
    for guest in ["alice", "bob"] {
        connect(port, &keys.join(guest)).hello();
    }
    let log = end(serve);
    assert!(
        log.contains("gpu1/cert.pem: the certificate of gpu1 ends on")
            && log.contains("in 19 days: make a new one with `vgpu cert renew FOLDER gpu1`"),
        "{log}"
    );
    assert!(log.contains("the certificate of alice ends on"), "{log}");
    assert!(!log.contains("the certificate of bob ends on"), "{log}");

    let doctor = |guest: &str| {
        let output = vgpu(&["doctor", "--certs"]).arg(keys.join(guest)).output();
        let text = said(&output.expect("it starts"));
        let lines = text
            .lines()
            .filter(|line| line.contains(" certs "))
            .map(str::to_owned);
        lines.collect::<Vec<_>>()
    };
    let lines = doctor("alice");
    assert!(
        lines[0].starts_with("ok") && lines[0].contains("of alice, until "),
        "{lines:?}"
    );
    assert!(
        lines[1].starts_with("note") && lines[1].contains("in 9 days: make a new one"),
        "{lines:?}"
    );
    assert_eq!(doctor("bob").len(), 1);
    forge(&keys, "guest", "late", 2019, 2020);
    let lines = doctor("late");
    assert!(
        lines[0].starts_with("FAIL") && lines[0].contains("expired on"),
        "{lines:?}"
    );
}
