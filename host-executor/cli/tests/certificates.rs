//! Guests over TCP that certificates identify: a real `vgpu serve`, real TLS, certificates of `vgpu
//! cert`.

mod certified;
#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::time::Duration;

use certified::{certify, fingerprint, port};
use common::{Guest, TIMEOUT};
use rustix::process::Signal;
use served::{Scratch, Serve, vgpu};
use vgpu_transport::link::stream::tcp;
use vgpu_transport::link::stream::tls::Certificates;
use vgpu_transport::wire::{Reply, Request};

struct TlsExecutor {
    serve: Serve,
    scratch: Scratch,
    common: u16,
    own: u16,
}

impl TlsExecutor {
    fn start(name: &str, accept: bool) -> TlsExecutor {
        let scratch = Scratch::new(name);
        let keys = scratch.path().join("keys");
        certify(&keys, "host", "host", &["--address", "127.0.0.1"]);
        for guest in ["Laptop", "desk", "unnamed"] {
            certify(&keys, "guest", guest, &[]);
        }
        let (common, own) = (port(), port());
        let config = scratch.path().join("vgpu.toml");
        let text = format!(
            r#"
            [server]
            certs = {certs:?}
            [unnamed]
            accept = {accept}
            memory = "5MiB"
            [[guest]]
            name = "laptop"
            memory = "20MiB"
            certificates = ["laptop"]
            [[guest]]
            name = "desk"
            memory = "10MiB"
            certificates = ["sha256:{desk}"]
            listen = ["tcp:127.0.0.1:{own}"]
            "#,
            certs = keys.join("host"),
            desk = fingerprint(&keys, "desk"),
        );
        fs::write(&config, text).expect("a configuration");
        let common_endpoint = format!("tcp:127.0.0.1:{common}");
        let config = config.display().to_string();
        let serve = Serve::start(
            &scratch.socket(),
            &["--config", &config, "--listen", &common_endpoint],
        );
        TlsExecutor {
            serve,
            scratch,
            common,
            own,
        }
    }

    fn connect(&self, port: u16, who: &str) -> Guest {
        let certificates = Certificates::load(&self.scratch.path().join("keys").join(who));
        let certificates = certificates.expect("certificates");
        let end = tcp::connect("127.0.0.1", port, Some(&certificates), TIMEOUT);
        Guest::new(Box::new(end.expect("TLS")))
    }

    /// The memory that a guest is told.
    fn memory(&self, port: u16, who: &str) -> u64 {
        let mut guest = self.connect(port, who);
        guest.hello();
        match guest.ask(&Request::Memory {}) {
            Reply::Memory { total, .. } => total,
            other => panic!("{other:?}"),
        }
    }

    fn end(self) -> String {
        self.serve.signal(Signal::TERM);
        let (status, log) = self.serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
        log
    }
}

#[test]
fn certificate_selects_the_quota_of_a_guest() {
    let executor = TlsExecutor::start("certs", true);
    assert_eq!(executor.memory(executor.common, "Laptop"), 20 << 20);
    assert_eq!(executor.memory(executor.common, "desk"), 10 << 20);
    assert_eq!(executor.memory(executor.own, "desk"), 10 << 20);
    // A guest that the configuration does not name gets the limits of such guests, on the listener
    // for all guests.
    assert_eq!(executor.memory(executor.common, "unnamed"), 5 << 20);

    // Two programs of one guest share its quota.
    let mut one = executor.connect(executor.common, "Laptop");
    let mut two = executor.connect(executor.common, "Laptop");
    one.hello();
    two.hello();
    one.alloc(15 << 20);
    let buffer = two.new_buffer();
    let refused = two.ask(&Request::Alloc {
        buffer,
        size: 6 << 20,
    });
    let Reply::Refused { reason, .. } = refused else {
        panic!("{refused:?}");
    };
    assert!(
        reason.contains("6.0 MiB wanted, 5.0 MiB of 20.0 MiB free"),
        "{reason}"
    );
    // A listener of one guest accepts only certificates of that guest.
    for other in ["Laptop", "unnamed"] {
        let reason = executor.connect(executor.own, other).ended();
        assert!(
            reason.contains(&format!(
                "guest desk is identified by other certificates than of {other}"
            )),
            "{reason}"
        );
    }
    drop((one, two));
    let log = executor.end();
    assert!(
        log.contains("the guest presented the certificate of Laptop (sha256:")
            && log.contains("the certificate identifies guest laptop"),
        "{log}"
    );
}

#[test]
fn unknown_certificate_is_refused_when_only_listed_guests_are_admitted() {
    let executor = TlsExecutor::start("certs-known", false);
    assert_eq!(executor.memory(executor.common, "Laptop"), 20 << 20);
    let reason = executor.connect(executor.common, "unnamed").ended();
    assert!(
        reason.contains("does not name this guest, and rejects unnamed guests"),
        "{reason}"
    );
    // A certificate of another authority fails in the TLS handshake.
    let forged = certify(
        &executor.scratch.path().join("forged"),
        "guest",
        "Laptop",
        &[],
    );
    let end = tcp::connect(
        "127.0.0.1",
        executor.common,
        Some(&forged),
        Duration::from_secs(5),
    );
    assert!(end.is_err(), "the authority is not asked");
    assert_eq!(executor.memory(executor.common, "desk"), 10 << 20);
    executor.end();
}

#[test]
fn unusable_certificate_settings_are_refused_with_the_reason() {
    let scratch = Scratch::new("certs-wrong");
    let config = scratch.path().join("vgpu.toml");
    let guest = "[[guest]]\nname = \"a\"\nmemory = \"1MiB\"\n";
    for (text, more, reason) in [
        (
            format!("{guest}certificates = [\"a\"]"),
            &[][..],
            "a certificate identifies guest \"a\", and this executor has none",
        ),
        (
            format!("{guest}certificates = [\"a\"]"),
            &["--isolate", "--guest-memory", "1M"],
            "--isolate and guests with certificates exclude each other",
        ),
        (
            format!("{guest}certificates = [\"sha256:00\"]"),
            &[],
            ":4:16: \"sha256:00\": expected sha256: and 64 hexadecimal digits",
        ),
        (
            format!(
                "{guest}certificates = [\"x\"]\n[[guest]]\nname = \"b\"\ncertificates = [\"X\"]"
            ),
            &[],
            ":7:17: the certificate x already identifies guest a",
        ),
    ] {
        fs::write(&config, text).expect("a configuration");
        let config = config.display().to_string();
        let listen = format!("unix:{}", scratch.socket().display());
        let output = vgpu(&["serve", "--listen", &listen, "--config", &config])
            .args(more)
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(reason), "{said}");
    }
}
