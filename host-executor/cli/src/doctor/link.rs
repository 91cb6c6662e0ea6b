//! The links to executors: opens a session like a program, and measures the round-trip time.

use std::time::{Duration, Instant};

use vgpu_executor::config::Settings;
use vgpu_median::median;
use vgpu_transport::link::Endpoint;
use vgpu_transport::link::connect::{ConnectError, expand};
use vgpu_transport::link::unix::UnixConnectError;
use vgpu_transport::wire::{Reply, Request, VersionRange};

use super::report::Report;
use super::root::Root;
use super::unit::{self, UnitState};
use crate::session_client::{self, Client, ClientError};

const PART: &str = "link";

/// How long one executor may take in all.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Round trips that are measured.
const ROUNDS: usize = 32;

/// The flag of a listening socket in `/proc/net/unix`.
const LISTENING: u32 = 1 << 16;

/// What is wrong with a socket that a process listens on and nobody can connect to.
const FILE_GONE: &str = "the file of that socket was removed; the log of vgpu serve says why it \
                         does not listen there again";
const RESTART: &str = "sudo systemctl restart vgpu";

/// What to do about a version that another program does not speak.
const UPDATE_EXECUTOR: &str = "on the executor's machine: sudo sh RELEASE/install.sh --host \
                               RELEASE && sudo systemctl restart vgpu";
/// Installs the plugin and the command of a release, which is in the folder RELEASE.
pub(super) const INSTALL_GUEST: &str = "sudo sh RELEASE/install.sh --guest RELEASE";
/// What an executor says of the end of a session.
const LOG: &str = "on the executor's machine: journalctl --unit vgpu --lines 20 --no-pager";

/// Whom the check has reached.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// Executors that accept programs of this machine, if not where a plugin looks by itself.
    pub(super) endpoints: Vec<Endpoint>,
    /// Whether the executors here serve virtual machines or other machines only.
    pub(super) only_others: bool,
}

/// A candidate without a session.
struct Miss {
    what: String,
    /// Whether somebody is there. Then it is worth a failure if nobody else serves programs.
    is_there: bool,
    /// Whether an executor is there, and answers not or with a refusal: a failure in any case.
    is_broken: bool,
    next: Option<String>,
}

/// `host`: the settings of the executor of this machine.
pub(super) fn check(
    root: &Root,
    given: &[Endpoint],
    host: Option<&Settings>,
    service: UnitState,
    report: &mut Report,
) -> Links {
    let (endpoints, are_named) = match session_client::endpoints(given) {
        Ok(endpoints) => endpoints,
        Err(error) => {
            // Without it the usual addresses are tried.
            report.fail(
                PART,
                format!("VGPU_ENDPOINT: {error}"),
                "unset VGPU_ENDPOINT",
            );
            return Links::default();
        }
    };
    let mut links = Links::default();
    let mut reached = Vec::new();
    let mut misses = Vec::new();
    let own = host.filter(|_| !are_named);
    for candidate in candidates(root, &endpoints, are_named, own) {
        if candidate == Endpoint::Inproc {
            report.ok(PART, "inproc: the executor is inside the plugin");
            reached.push(candidate);
            continue;
        }
        let here = match expand(&candidate) {
            Ok(here) => here,
            Err(error) => {
                misses.push(miss_of(root, error.to_string(), &error));
                continue;
            }
        };
        for endpoint in here {
            let measured = endpoint.clone();
            match session_client::within(TIMEOUT, move || measure(&measured)) {
                Ok(lines) => {
                    for line in lines {
                        report.ok(PART, format!("{endpoint}: {line}"));
                    }
                    reached.push(endpoint);
                }
                Err(error) => misses.push(miss(root, &endpoint, &error)),
            }
        }
    }
    let others = own.map_or(0, |settings| {
        check_machines(root, settings, report) + check_tcp(root, settings, report)
    });
    let is_reached = !reached.is_empty() || others > 0;
    for miss in &misses {
        let next = miss.next.clone().or_else(|| start(service));
        let is_broken = miss.is_broken && service != UnitState::Changing;
        match are_named || is_broken || (miss.is_there && !is_reached) {
            true => report.fail(PART, miss.what.clone(), next.unwrap_or_else(by_hand)),
            false => report.note(PART, miss.what.clone()),
        }
    }
    if !is_reached && !are_named && !misses.iter().any(|miss| miss.is_there) {
        report.fail(
            PART,
            "no executor was reached; start `vgpu serve` on the host, or set VGPU_ENDPOINT to its \
             address",
            start(service).unwrap_or_else(by_hand),
        );
    }
    links.only_others = reached.is_empty() && others > 0;
    let is_found = |endpoint: &Endpoint| root.is_own() && Endpoint::defaults().contains(endpoint);
    let is_found = |endpoint: &Endpoint| matches!(endpoint, Endpoint::Pci(_)) || is_found(endpoint);
    if are_named {
        links.endpoints = endpoints;
    } else if !reached.iter().any(is_found) {
        links.endpoints = reached;
    }
    links
}

fn start(service: UnitState) -> Option<String> {
    unit::start(service).map(str::to_owned)
}

fn by_hand() -> String {
    "on the host: vgpu serve".into()
}

/// The endpoints to try: those that are named, or the ones that a plugin tries and those where the
/// configuration of this machine lets its executor listen.
fn candidates(
    root: &Root,
    endpoints: &[Endpoint],
    are_named: bool,
    host: Option<&Settings>,
) -> Vec<Endpoint> {
    if are_named {
        return endpoints.to_vec();
    }
    let is_file = |endpoint: &&Endpoint| matches!(endpoint, Endpoint::Unix(_));
    // Another file system has no devices of its own.
    let usual = endpoints.iter().filter(|one| root.is_own() || is_file(one));
    let own = host.into_iter().flat_map(|settings| {
        let of_guests = settings.guests.iter().flat_map(|guest| &guest.listen);
        settings.listen.iter().chain(of_guests).filter(is_file)
    });
    let mut all = Vec::new();
    for endpoint in usual.chain(own) {
        let endpoint = root.endpoint(endpoint);
        if !all.contains(&endpoint) {
            all.push(endpoint);
        }
    }
    all
}

/// Looks for the sockets of virtual machines without connecting: the executor takes every client
/// there for a QEMU, and would refuse one that comes meanwhile. Whether the executor answers is the
/// part of its control socket. Returns how many an executor listens on.
fn check_machines(root: &Root, settings: &Settings, report: &mut Report) -> usize {
    let mut count = 0;
    for guest in &settings.guests {
        let Some(vm) = &guest.vm else { continue };
        let socket = vm.socket.display().to_string();
        let listens = listens_at(root, &socket);
        if listens && matches!(root.path(&socket).try_exists(), Ok(false)) {
            report.fail(
                PART,
                format!(
                    "{}: an executor listens for its QEMU on {socket}, and {FILE_GONE}",
                    vm.name
                ),
                RESTART,
            );
            count += 1;
        } else if listens {
            report.ok(
                PART,
                format!("{}: an executor listens for its QEMU on {socket}", vm.name),
            );
            count += 1;
        } else {
            report.note(
                PART,
                format!("{}: no executor listens on {socket}", vm.name),
            );
        }
    }
    count
}

/// Looks for the TCP listeners without connecting: guests show certificates there, and this machine
/// may have none for a guest. Returns how many a process listens on.
fn check_tcp(root: &Root, settings: &Settings, report: &mut Report) -> usize {
    let of_guests = settings.guests.iter().flat_map(|guest| &guest.listen);
    let mut count = 0;
    for endpoint in settings.listen.iter().chain(of_guests) {
        let Endpoint::Tcp { port, .. } = endpoint else {
            continue;
        };
        if listens_on(root, *port) {
            report.ok(
                PART,
                format!("{endpoint}: a process listens on TCP port {port}, for other machines"),
            );
            count += 1;
        } else {
            report.note(
                PART,
                format!("{endpoint}: no process listens on TCP port {port}"),
            );
        }
    }
    count
}

/// The state of a listening socket in `/proc/net/tcp`, TCP_LISTEN of linux/net/tcp_states.h.
const TCP_LISTEN: &str = "0A";

/// Whether a process listens on a TCP port of any address (`/proc/net/tcp`, proc_net_tcp.rst of the
/// kernel's documentation).
fn listens_on(root: &Root, port: u16) -> bool {
    let end = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let table = root.read(table).unwrap_or_default();
        table.lines().any(|line| {
            let mut words = line.split_whitespace();
            let is_own = words.nth(1).is_some_and(|local| local.ends_with(&end));
            is_own && words.nth(1) == Some(TCP_LISTEN)
        })
    })
}

/// Whether a process listens on the unix socket `path`, also if its file was removed: the kernel
/// has the path of the time at which the socket was bound.
fn listens_at(root: &Root, path: &str) -> bool {
    let table = root.read("/proc/net/unix").unwrap_or_default();
    table.lines().any(|line| {
        let mut words = line.split_whitespace();
        let flags = words
            .nth(3)
            .and_then(|flags| u32::from_str_radix(flags, 16).ok());
        flags.is_some_and(|flags| flags & LISTENING != 0) && words.nth(3) == Some(path)
    })
}

fn miss(root: &Root, endpoint: &Endpoint, error: &ClientError) -> Miss {
    let what = format!("{endpoint}: {error}");
    match error {
        ClientError::Connect(error) => miss_of(root, what, error),
        ClientError::Refused { reason } => Miss {
            next: Some(of_refusal(reason)),
            what,
            is_there: true,
            is_broken: true,
        },
        ClientError::Silent { .. } => Miss {
            what,
            is_there: true,
            is_broken: true,
            next: Some("on the executor's machine: sudo vgpu dump".into()),
        },
        _ => Miss {
            what,
            is_there: true,
            is_broken: true,
            next: Some(LOG.into()),
        },
    }
}

fn miss_of(root: &Root, what: String, error: &ConnectError) -> Miss {
    let nobody = |what| Miss {
        what,
        is_there: false,
        is_broken: false,
        next: None,
    };
    match error {
        ConnectError::Unix(UnixConnectError::Permission { path }) => {
            let (why, next) = root.no_permission(path);
            Miss {
                what: format!("{what}: {why}"),
                is_there: true,
                is_broken: false,
                next: Some(next),
            }
        }
        ConnectError::Unix(UnixConnectError::NoSuchFile { path })
            if listens_at(root, &root.absolute(path).display().to_string()) =>
        {
            Miss {
                what: format!("{what}: an executor listens there, and {FILE_GONE}"),
                is_there: true,
                is_broken: true,
                next: Some(RESTART.into()),
            }
        }
        ConnectError::Unix(UnixConnectError::OtherLayout { ours, theirs, .. }) => Miss {
            what,
            is_there: true,
            is_broken: true,
            next: Some(match theirs < ours {
                true => UPDATE_EXECUTOR.into(),
                false => INSTALL_GUEST.into(),
            }),
        },
        ConnectError::Unix(UnixConnectError::NotVgpu { path, .. }) => Miss {
            next: Some(format!("sudo fuser --verbose {}", path.display())),
            what,
            is_there: true,
            is_broken: true,
        },
        ConnectError::Unix(UnixConnectError::Closed { .. }) => Miss {
            what,
            is_there: true,
            is_broken: true,
            next: Some(LOG.into()),
        },
        ConnectError::Unix(UnixConnectError::Timeout { .. } | UnixConnectError::Link { .. }) => {
            Miss {
                what,
                is_there: true,
                is_broken: true,
                next: Some("on the executor's machine: sudo vgpu dump".into()),
            }
        }
        ConnectError::Certificates(_) => Miss {
            what,
            is_there: true,
            is_broken: false,
            // The folder that `vgpu cert` has made for this guest.
            next: Some("export VGPU_CERTS=FOLDER".into()),
        },
        _ => nobody(what),
    }
}

/// What to do about a refusal. An executor of any version names its own ones.
fn of_refusal(reason: &str) -> String {
    match VersionRange::of_host(reason) {
        None => LOG.into(),
        Some(host) if host.newest() < VersionRange::SERVED.oldest() => UPDATE_EXECUTOR.into(),
        Some(_) => INSTALL_GUEST.into(),
    }
}

/// Opens a session, and sends the requests of a starting program.
fn measure(endpoint: &Endpoint) -> Result<Vec<String>, ClientError> {
    let mut client = Client::connect(endpoint, "vgpu doctor")?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let began = Instant::now();
        match client.request(&Request::Memory {})? {
            Reply::Memory { .. } => times.push(began.elapsed()),
            other => {
                return Err(ClientError::Unexpected {
                    request: "MEMORY",
                    reply: Box::new(other),
                });
            }
        }
    }
    Ok(vec![
        format!(
            "session {}, protocol {}, graphs {}; the executor speaks {}",
            client.session,
            client.protocol,
            client.protocol.ir(),
            client.served
        ),
        format!(
            "engine {}, {}, {} of {} MiB free{}",
            client.engine,
            client.description,
            client.memory_free >> 20,
            client.memory_total >> 20,
            match client.devices {
                1 => String::new(),
                devices => format!("; the first of {devices} devices"),
            }
        ),
        format!(
            "a round trip takes {:?}, the fastest {:?}",
            median(times.iter().copied()),
            times.iter().min().copied().unwrap_or_default()
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_side_of_a_refusal_is_named() {
        let of = |host: VersionRange| {
            of_refusal(&format!(
                "the guest broke the protocol: the guest speaks protocol versions {}, this host \
                 speaks {host}: update ggml-vgpu",
                VersionRange::SERVED
            ))
        };
        let (oldest, newest) = (VersionRange::SERVED.oldest(), VersionRange::SERVED.newest());
        let range = |oldest, newest| VersionRange::new(oldest, newest).unwrap();
        assert_eq!(of(range(1, oldest - 1)), UPDATE_EXECUTOR);
        assert_eq!(of(range(newest + 1, newest + 1)), INSTALL_GUEST);
        assert_eq!(of(range(newest + 1, newest + 2)), INSTALL_GUEST);
        let other = of_refusal("the host already serves 64 guests, its limit is 64");
        assert!(other.contains("journalctl"), "{other}");
    }
}
