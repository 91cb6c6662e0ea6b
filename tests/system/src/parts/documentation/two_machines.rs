//! A host and another machine with Ollama, over TCP with certificates.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::guide::Guide;
use super::ollama_on_debian;
use super::one_machine::{self, STATS};
use crate::container::{Container, System, TRIXIE, USER};
use crate::debian::Packages;
use crate::ollama::stage::TOKENS;
use crate::test_run::TestRun;

/// A Debian that is reached with SSH.
const WITH_SSH: System = System {
    packages: &["openssh-server"],
    name: "ssh",
    ..TRIXIE
};

/// The names of the page, with addresses of a network for documentation (RFC 5737).
const NAMES: &str = "192.0.2.7 gpu1.example.org\n192.0.2.8 alice.example.org\n";
const HOST: &str = "192.0.2.7";
const GUEST: &str = "192.0.2.8";

/// How long a session may go on after a reload that ends it.
const ENDED_WITHIN: Duration = Duration::from_secs(30);

pub(super) fn follow(tests: &TestRun<'_>, packages: &Packages) -> Result<String> {
    let sections = [
        "Certificates",
        "Host",
        "Guest",
        "Renew a certificate",
        "Revoke a certificate",
    ];
    let mut guide = Guide::open("tcp-tls.md", &sections)?;
    let log = |name: &str| tests.log(&format!("documentation-two-machines-{name}"));
    let host = Container::boot(tests.cache, &WITH_SSH, &log("host"))?;
    let guest = Container::boot(tests.cache, &WITH_SSH, &log("guest"))?;
    connect(&host, &guest)?;
    let on_cpu = ollama_on_debian::with_ollama(tests, &guest)?;
    for machine in [&host, &guest] {
        machine.copy_into("/root", &[&packages.host, &packages.guest])?;
        machine.root("dpkg --install vgpu_*.deb vgpu-guest_*.deb")?;
    }

    host.root(&guide.take("vgpu cert /root/vgpu-ca host gpu1")?)?;
    host.root(&guide.take("install -d -o vgpu")?)?;
    guide.leave_out("scp /root/vgpu-ca/gpu1", "the authority is on the host")?;
    let block = guide.take("listen = [\"tcp:")?;
    let file = host.files().join("etc/vgpu/vgpu.toml");
    let config = fs::read_to_string(&file).context("reading the configuration")?;
    fs::write(&file, with_settings(&config, &block)?).context("writing the configuration")?;
    host.root(&guide.take("vgpu check-config")?)?;

    let copy = guide.take("ssh root@alice.example.org")?;
    host.root(&copy)?;
    guest.root(&guide.take("vgpu install --endpoint tcp:")?)?;
    guest.await_that(ollama_on_debian::ANSWERS)?;
    let alice = (&host, "alice");
    let over_tcp = ollama_on_debian::generate_on_device(&guest, alice)?;
    ensure!(
        over_tcp == on_cpu,
        "{over_tcp:?}, but {on_cpu:?} from the CPU"
    );

    // Another program, of another user of that machine.
    let of_user = guide.with(
        copy,
        &[
            ("ollama", USER),
            ("/etc/vgpu/alice", "/etc/vgpu/certs-alice"),
        ],
    )?;
    host.root(&of_user)?;
    one_machine::install_llama_server(tests, &guest)?;
    guest.root(&format!("cp /usr/share/ollama/model.gguf ~{USER}/"))?;
    let program = guide.take_with(
        "VGPU_ENDPOINT=tcp:",
        &[("/etc/vgpu/alice", "/etc/vgpu/certs-alice")],
    )?;
    let program = format!("export VGPU_STATS={STATS}\n{program}");
    let mut server = guest.open(USER, &program, &log("llama-server"))?;
    server.wait_for("listening on http")?;
    one_machine::complete(&guest)?;
    server.close()?;
    one_machine::expect_device(&guest, "tcp:gpu1.example.org:4780")?;

    // The copies and the reload are described in words.
    let renew = guide.take("vgpu cert renew")?;
    let old = "cp /root/vgpu-ca/alice/cert.pem /root/old.pem";
    let is_new = "! cmp -s /root/vgpu-ca/alice/cert.pem /root/old.pem";
    host.root(&format!("{old}\n{renew}\n{is_new}"))?;
    host.root("scp /root/vgpu-ca/alice/cert.pem root@alice.example.org:/etc/vgpu/alice")?;
    guest.root("systemctl restart ollama")?;
    guest.await_that(ollama_on_debian::ANSWERS)?;
    let renewed = ollama_on_debian::generate_on_device(&guest, alice)?;
    ensure!(renewed == on_cpu, "{renewed:?} with a new certificate");
    ensure!(sessions(&host)? > 0, "Ollama has no session");
    host.root(&guide.take("vgpu cert revoke")?)?;
    host.root("cp /root/vgpu-ca/crl.pem /etc/vgpu/certs && vgpu reload")?;
    let started = Instant::now();
    while sessions(&host)? > 0 {
        let waited = started.elapsed();
        ensure!(
            waited < ENDED_WITHIN,
            "a session of a revoked certificate goes on"
        );
    }
    let refused = guest.try_run(
        "root",
        "VGPU_CERTS=/etc/vgpu/alice vgpu wait --timeout 2 --endpoint tcp:gpu1.example.org:4780",
    )?;
    ensure!(
        refused.status != Some(0) && refused.output.contains("revoked"),
        "a revoked certificate: {refused:?}"
    );
    guide.finish()?;
    Ok(format!("{TOKENS} tokens of Ollama each time"))
}

/// The programs of all guests of an executor.
fn sessions(host: &Container) -> Result<usize> {
    let status = ollama_on_debian::status(host)?;
    Ok(status["sessions"].as_array().context("no sessions")?.len())
}

/// `config`, a configuration with each key of its tables as it is shipped, with the keys and the
/// guests of `block`: what an administrator makes of the two.
fn with_settings(config: &str, block: &str) -> Result<String> {
    let mut lines: Vec<String> = config.lines().map(str::to_owned).collect();
    let mut table = "";
    for line in block.lines() {
        if line.starts_with("[[") || (line.is_empty() && table.starts_with("[[")) {
            table = line;
            lines.push(line.to_owned());
        } else if table.starts_with("[[") && !line.starts_with('[') {
            lines.push(line.to_owned());
        } else if line.starts_with('[') {
            table = line;
        } else if let Some((key, _)) = line.split_once(" = ") {
            let start = { lines.iter() }.position(|one| one == table);
            let start = start.with_context(|| format!("no table {table}"))?;
            let names = [format!("{key} = "), format!("#{key} = ")];
            let at = { lines[start + 1..].iter() }
                .take_while(|one| !one.starts_with('['))
                .position(|one| names.iter().any(|name| one.starts_with(name)));
            let at = at.with_context(|| format!("{table} has no key {key}"))?;
            line.clone_into(&mut lines[start + 1 + at]);
        }
    }
    Ok(lines.join("\n") + "\n")
}

/// A network of the two machines (veth), their names, and SSH from one to the other.
fn connect(host: &Container, guest: &Container) -> Result<()> {
    host.plug_into(guest)?;
    for (machine, address) in [(host, HOST), (guest, GUEST)] {
        machine.root(&format!(
            "ip address add {address}/24 dev eth0 && ip link set eth0 up && \
             printf '{NAMES}' >> /etc/hosts"
        ))?;
    }
    host.root("mkdir -p .ssh && ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519")?;
    let key = fs::read(host.files().join("root/.ssh/id_ed25519.pub")).context("reading a key")?;
    let folder = guest.files().join("root/.ssh");
    fs::create_dir_all(&folder).context("creating a folder")?;
    fs::write(folder.join("authorized_keys"), key).context("writing a key")?;
    host.await_that(&format!(
        "ssh -o StrictHostKeyChecking=accept-new root@alice.example.org id -u {USER}"
    ))
}
