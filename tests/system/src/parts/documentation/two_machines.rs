//! A host and another machine with Ollama, over TCP with certificates.

use std::fs;

use anyhow::{Context as _, Result, ensure};

use super::guide::Guide;
use super::one_machine::{self, STATS};
use super::{TRIXIE, ollama_on_debian};
use crate::container::{Container, System, USER};
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
    let listener = guide.take("listen = [\"tcp:")?;
    let file = host.files().join("etc/vgpu/vgpu.toml");
    fs::write(&file, listener).context("writing the configuration")?;
    host.root("systemctl enable vgpu")?;
    host.root(&guide.take("vgpu check-config")?)?;

    host.root(&guide.take("ssh root@alice.example.org")?)?;
    guest.root(&guide.take("vgpu install --endpoint tcp:")?)?;
    guest.await_that(ollama_on_debian::ANSWERS)?;
    let over_tcp = ollama_on_debian::generate(&guest)?;
    ensure!(
        over_tcp == on_cpu,
        "{over_tcp:?}, but {on_cpu:?} from the CPU"
    );
    let said = host.root("vgpu ps")?;
    ensure!(said.contains("alice"), "vgpu ps lists no alice:\n{said}");

    // Another program, with its environment.
    one_machine::install_llama_server(tests, &guest)?;
    guest.root("cp /usr/share/ollama/model.gguf .")?;
    let program = guide.take("export VGPU_ENDPOINT=tcp:")?;
    let more = format!("VGPU_STATS={STATS} GGML_BACKEND_PATH=/usr/lib/vgpu/libggml-vgpu.so");
    let mut server = guest.open(
        "root",
        &format!("export {more}\n{program}"),
        &log("llama-server"),
    )?;
    server.wait_for("listening on http")?;
    one_machine::complete(&guest, 8080)?;
    server.close()?;
    one_machine::expect_device(&guest)?;

    // The copies and the reload are described in words.
    host.root(&guide.take("vgpu cert renew")?)?;
    host.root("scp /root/vgpu-ca/alice/cert.pem root@alice.example.org:/etc/vgpu/alice")?;
    guest.root("systemctl restart ollama")?;
    guest.await_that(ollama_on_debian::ANSWERS)?;
    let renewed = ollama_on_debian::generate(&guest)?;
    ensure!(renewed == on_cpu, "{renewed:?} with a new certificate");
    host.root(&guide.take("vgpu cert revoke")?)?;
    host.root("cp /root/vgpu-ca/crl.pem /etc/vgpu/certs && vgpu reload")?;
    let refused = guest.try_run(
        "root",
        "VGPU_CERTS=/etc/vgpu/alice vgpu wait --timeout 2 --endpoint tcp:gpu1.example.org:4780",
    )?;
    ensure!(
        refused.status != Some(0) && refused.output.contains("revoked"),
        "a revoked certificate: {refused:?}"
    );
    guide.finish()?;
    Ok(format!("{TOKENS} tokens of Ollama, twice"))
}

/// A cable between two machines, their names, and SSH from one to the other.
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
