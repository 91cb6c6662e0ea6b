//! What the workers of a supervisor do, added up by guest.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Pid;
use tracing::debug;

use super::{Shared, Worker};
use crate::control;
use crate::histogram::Distribution;
use crate::roster::Roster;
use crate::status::{
    EngineStatus, GuestStatus, Look, Report, SessionStatus, Status, Waits, WeightsStatus, Work,
};

/// How long a virtual machine's process may take to say what it does.
const PATIENCE: Duration = Duration::from_secs(2);

/// Most characters of a program's name that are passed on.
const NAME_CHARS: usize = 200;

/// What workers have done that are gone.
#[derive(Debug, Default)]
pub(super) struct Books {
    guests: BTreeMap<String, Account>,
    weights: WeightsStatus,
}

/// What a guest has done.
#[derive(Debug, Clone, Default)]
struct Account {
    work: Work,
    queued: Distribution,
    ran: Distribution,
}

impl Account {
    fn add(&mut self, report: &Report) {
        // A worker has one guest, whatever it calls it.
        for guest in &report.status.guests {
            self.work.add(&guest.work);
        }
        for waits in &report.waits {
            self.queued.add(&waits.queued);
            self.ran.add(&waits.ran);
        }
    }
}

/// The process of a virtual machine.
#[derive(Debug)]
pub(super) struct Machine {
    name: String,
    pub(super) pid: Pid,
    /// Where it says what it does.
    control: PathBuf,
}

impl Machine {
    pub(super) fn new(name: &str, pid: Pid, control: &Path) -> Machine {
        Machine {
            name: name.into(),
            pid,
            control: control.into(),
        }
    }
}

/// The account that a worker's guest has: its name, as long as the configuration has it.
fn account_of(guest: Option<&str>, roster: &Roster) -> String {
    let (named, unnamed) = roster.tenants();
    let found = named.iter().find(|tenant| Some(tenant.name()) == guest);
    found.unwrap_or(&unnamed).name().to_owned()
}

impl Books {
    /// Writes down what a worker has done that is gone.
    pub(super) fn close(&mut self, worker: &Worker, roster: &Roster) {
        let Some(news) = &worker.news else {
            return;
        };
        let account = account_of(worker.guest.as_deref(), roster);
        let account = self.guests.entry(account).or_default();
        account.add(&news.report);
        // It has nothing any more.
        account.work.memory = 0;
        account.work.weights_shared = 0;
        let weights = &news.report.status.engine.weights;
        self.weights.add(&WeightsStatus {
            bytes: 0,
            disk_bytes: 0,
            ..*weights
        });
    }
}

/// A moment of everybody.
struct Moment {
    accounts: BTreeMap<String, Account>,
    programs: BTreeMap<String, usize>,
    sessions: Vec<SessionStatus>,
    weights: WeightsStatus,
    /// Bytes of device memory that somebody has.
    memory: u64,
    /// Memory of the largest engine that a worker has: with a GPU, of all of them.
    largest: u64,
}

impl Shared {
    fn moment(&self) -> Moment {
        let house = self.house();
        let mut moment = Moment {
            accounts: house.books.guests.clone(),
            programs: BTreeMap::new(),
            sessions: Vec::new(),
            weights: house.books.weights,
            memory: 0,
            largest: 0,
        };
        for worker in house.workers.values() {
            let account = account_of(worker.guest.as_deref(), &self.roster);
            if !worker.is_dismissal {
                *moment.programs.entry(account.clone()).or_default() += worker.sessions.len();
            }
            let Some(news) = &worker.news else {
                continue;
            };
            moment.add(&account, &news.report);
            // Who it is we know ourselves; what it does, and calls itself, its worker says.
            for session in &news.report.status.sessions {
                if let Some((_, peer)) = worker.sessions.get(&session.id) {
                    let process = peer.process.as_ref();
                    moment.sessions.push(SessionStatus {
                        guest: account.clone(),
                        endpoint: peer.endpoint.clone(),
                        pid: process.map(|process| process.pid),
                        uid: process.map(|process| process.uid),
                        program: session.program.as_deref().map(printable),
                        ..session.clone()
                    });
                }
            }
        }
        let machines: Vec<(String, PathBuf)> = house
            .machines
            .values()
            .map(|machine| (machine.name.clone(), machine.control.clone()))
            .collect();
        drop(house);
        // Numbers of sessions are each process's own there.
        for ((name, control), base) in machines.iter().zip((1u64..).map(|n| n << 32)) {
            match control::report(control, PATIENCE) {
                Ok(report) => {
                    let account = account_of(Some(name), &self.roster);
                    let sessions = &report.status.sessions;
                    *moment.programs.entry(account.clone()).or_default() += sessions.len();
                    moment
                        .sessions
                        .extend(sessions.iter().map(|session| SessionStatus {
                            id: session.id | base,
                            guest: account.clone(),
                            program: session.program.as_deref().map(printable),
                            endpoint: printable(&session.endpoint),
                            ..session.clone()
                        }));
                    moment.add(&account, &report);
                }
                Err(error) => debug!(vm = name, "it does not say what it does: {error}"),
            }
        }
        moment
    }
}

impl Moment {
    fn add(&mut self, account: &str, report: &Report) {
        self.accounts.entry(account.into()).or_default().add(report);
        self.weights.add(&report.status.engine.weights);
        self.largest = self.largest.max(report.status.engine.memory_total);
        for GuestStatus { work, .. } in &report.status.guests {
            let held = work.memory.saturating_sub(work.weights_shared);
            self.memory = self.memory.saturating_add(held);
        }
    }
}

impl Look for Shared {
    fn status(&self) -> Status {
        let moment = self.moment();
        let (named, unnamed) = self.roster.tenants();
        let guests = named.iter().chain([&unnamed]).map(|tenant| {
            let policy = match tenant.is_named() {
                true => tenant.policy(),
                false => self.roster.unnamed_policy(),
            };
            let name = tenant.name().to_owned();
            GuestStatus {
                quota: policy.memory,
                weight: policy.weight,
                sessions: moment.programs.get(&name).copied().unwrap_or_default(),
                work: moment
                    .accounts
                    .get(&name)
                    .map_or_else(Work::default, |a| a.work),
                name,
            }
        });
        let total = self.means.memory.unwrap_or(moment.largest);
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            uptime: self.since.elapsed().as_secs_f64(),
            engine: EngineStatus {
                name: self.means.engine.clone(),
                description: "a process for each guest".into(),
                memory_total: total,
                memory_free: total.saturating_sub(moment.memory),
                weights: moment.weights,
            },
            guests: guests.collect(),
            sessions: moment.sessions,
        }
    }

    fn waits(&self) -> Vec<Waits> {
        let mut accounts = self.moment().accounts;
        let (named, unnamed) = self.roster.tenants();
        let tenants = named.iter().chain([&unnamed]);
        tenants
            .map(|tenant| {
                let account = accounts.remove(tenant.name()).unwrap_or_default();
                Waits {
                    guest: tenant.name().to_owned(),
                    queued: account.queued,
                    ran: account.ran,
                }
            })
            .collect()
    }
}

/// What a worker passes on from its guest, for terminals.
fn printable(text: &str) -> String {
    let printable = text.chars().filter(|c| !c.is_control());
    printable.take(NAME_CHARS).collect()
}
