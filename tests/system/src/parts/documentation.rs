//! The ways from nothing to a model on the device, as a new user follows them: in minimal systems,
//! with the commands that the pages of the documentation have.

mod archive;
mod containers;
mod guide;
mod kubernetes;
mod ollama_on_debian;
mod one_machine;
mod proxmox;
mod two_machines;
mod upgrade;

use xtask_common::progress::heading;
use xtask_common::workspace;

use self::containers::Images;
use self::ollama_on_debian::By;
use crate::container::{BOOKWORM, TRIXIE};
use crate::debian::Packages;
use crate::previous::previous;
use crate::test_run::TestRun;

pub(crate) fn run(tests: &mut TestRun<'_>) {
    if !tests.options.full {
        return;
    }
    heading("the documented ways");
    let Some(dist) = tests.dist() else { return };
    tests.check("quickstart.md: one machine, your own model", |tests, _| {
        one_machine::follow(tests, &dist)
    });
    let folder = workspace::root().join("target/package-documentation");
    let built = tests.prepare("packages", |_| Packages::make(&dist, &folder));
    let Some(packages) = built else { return };
    for (system, by) in [(BOOKWORM, By::Dpkg), (TRIXIE, By::Script)] {
        let number = system.release.number;
        let name = format!("install.md and ollama.md: Debian {number} with systemd and Ollama");
        tests.check(&name, |tests, _| {
            ollama_on_debian::follow(tests, &packages, &system, by)
        });
    }
    let made = tests.prepare("the previous release", |tests| previous(tests.cache));
    if let Some(made) = made {
        for system in [BOOKWORM, TRIXIE] {
            let number = system.release.number;
            let name = format!("install.md: Debian {number}, upgraded from the previous release");
            tests.check(&name, |tests, _| {
                upgrade::follow(tests, &packages, &made, &system)
            });
        }
    }
    tests.check("install.md: the archive with its units", |tests, _| {
        archive::follow(tests, &packages)
    });
    tests.check(
        "tcp-tls.md: a host, and another machine with Ollama",
        |tests, _| two_machines::follow(tests, &packages),
    );
    tests.check(
        "proxmox.md: a host, and a virtual machine under QEMU",
        |tests, _| proxmox::follow(tests, &dist, &packages),
    );
    let images = tests.prepare("the images of a release", |_| Images::make(&dist));
    let Some(images) = images else { return };
    tests.check(
        "containers-kubernetes.md: the images with podman",
        |tests, _| containers::follow(tests, &images, &packages),
    );
    tests.check(
        "containers-kubernetes.md: a cluster of Kubernetes with one node",
        |tests, _| kubernetes::follow(tests, &images),
    );
}
