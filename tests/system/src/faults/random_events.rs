//! Random events, one after the other, against six programs of one executor: two over a unix
//! socket, one over TCP through a [`Proxy`], one with a quota of its own, and two of a virtual
//! [`Machine`] over PCI. In each round some of the programs load a model and generate while one
//! event happens.
//!
//! After each event every program has either failed because of the event, or has the tokens of a
//! program that is alone. Between rounds, executor and programs hold no more memory, descriptors,
//! mappings and threads than before, and the executor has as many sessions and as much free device
//! memory. The heap is counted to the byte.
//!
//! The executor runs below `vgpu fd-store`, so that the machine keeps its device when the executor
//! ends.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::preload;
use anyhow::{Context as _, Result, ensure};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType};
use rustix::process::Signal;
use serde_json::Value;
use vgpu_gguf::Rng;
use xtask_common::process::{self, Daemon};
use xtask_common::progress::Progress;

use super::event::{Event, Possible};
use super::freezer::Freezer;
use super::guest::{self, Guest, HANG, Outcome, Said};
use super::kept_executor::KeptExecutor;
use super::leaks::{HeapCounts, ResourceUsage, TCP_QUEUES, expect_no_more};
use super::machine::{Machine, Namespace};
use super::proxy::{Direction, Proxy};
use super::setup::{Row, Setup, TOKENS, moment};
use super::waits::Waits;

const NAME: &str = "events";

/// The programs, by the endpoint that they use.
const PROGRAMS: [(&str, Link); 6] = [
    ("events-one", Link::Unix),
    ("events-two", Link::Unix),
    ("events-remote", Link::Tcp),
    ("events-named", Link::Named),
    ("events-vm-one", Link::Machine),
    ("events-vm-two", Link::Machine),
];

/// The program over TCP.
const REMOTE: usize = 2;

/// The programs of the virtual machine.
const OF_MACHINE: [usize; 2] = [4, 5];

/// Bytes of the quota of the named program: its model fits.
const QUOTA: u64 = 64 << 20;

/// The name of the virtual machine.
const MACHINE: &str = "events-machine";

/// Bytes of the quota of the virtual machine: the models of its programs fit, and of all that have
/// died in it within [`SILENCE`].
const MACHINE_QUOTA: u64 = 512 << 20;

/// How long a program of the machine may send no heartbeat: longer than [`LONG`], and as short as a
/// busy machine permits, since a killed program keeps its session for so long.
const SILENCE: Duration = Duration::from_secs(20);

/// How long a slot is that of a program which sends no heartbeat (docs/virtual-machines.md).
const SLOT: Duration = Duration::from_secs(3);

/// The limit of what happens at once: shorter than [`SILENCE`].
const AT_ONCE: Duration = Duration::from_secs(10);

/// Memory of the executor's engine: the models of seven programs, and forked ones, fit.
const MEMORY: &str = "1536M";

/// Bytes of the quota of a program whose model does not fit.
const SMALL: u64 = 16 << 20;

/// Longer than a guest waits for a host, and shorter than a host waits for a guest: 60 s
/// (docs/life-events.md).
const LONG: Duration = Duration::from_secs(13);

/// The longest of the short pauses, which nobody notices.
const SHORT: Duration = Duration::from_millis(1500);

/// What a busy machine may add to a stated time.
const SLOW_MACHINE: Duration = Duration::from_secs(30);

/// How often to ask the executor by a command.
const ASK_PERIOD: Duration = Duration::from_millis(20);

/// How often to look at what programs have said.
const LOOK_PERIOD: Duration = Duration::from_millis(2);

/// What a program is told when `vgpu kill` has ended its session.
const KILLED: &str = "an operator of the host has ended this session";

/// What a program is told that wants a session of an executor which drains.
const DRAINS: &str = "the host drains: it accepts no new sessions";

/// The ids of buffers, and of graphs, that a session has in the event that uses them up: a program
/// takes some for each model.
const IDS: u64 = 24;

/// What the log of a program says whose session has no ids left.
const USED_UP: &str = " ids left";

/// What the log of no program may say: that somebody is to blame for the end of a session, by whom
/// the events do nothing.
const BLAME: [&str; 6] = [
    "broke the protocol",
    "failed while it executed",
    "the engine failed",
    "an operator of the host",
    "the host drains",
    "does not serve this guest",
];

/// The plugin keeps the file of a model open, and remembers hashes of it, if the file has not
/// changed for 60 s. One more, because times of files have fractions of a second.
const SETTLING_TIME: Duration = Duration::from_secs(61);

/// Rounds between two comparisons of resources.
const ROUNDS: usize = 8;

/// One of so many comparisons waits until the executor itself ends the sessions of the machine's
/// programs that have died. Before the others `vgpu kill` does, which takes less time than
/// [`SILENCE`].
const WAITING: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Unix,
    Tcp,
    Named,
    Machine,
}

/// The programs that an event may make fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fails {
    None,
    One(usize),
    /// One of the programs of the virtual machine.
    OfMachine,
    All,
}

impl Fails {
    fn has(self, program: usize) -> bool {
        match self {
            Fails::None => false,
            Fails::One(one) => one == program,
            Fails::OfMachine => OF_MACHINE.contains(&program),
            Fails::All => true,
        }
    }
}

struct Program {
    name: &'static str,
    link: Link,
    guest: Guest,
    /// What its process held after its first model.
    before: ResourceUsage,
    /// The bytes of its heap after the first comparison.
    heap: Option<i64>,
}

struct Soak<'a> {
    setup: &'a Setup<'a>,
    heaps: HeapCounts,
    /// The guest's program, with a count of its heap.
    program: guest::Program,
    rng: Rng,
    port: u16,
    proxy: Proxy,
    config: PathBuf,
    control: PathBuf,
    executor: KeptExecutor,
    // After the executor, so that the group is empty when it is removed.
    freezer: Option<Freezer>,
    /// `None` where this user can make none: the machine has no programs then.
    namespace: Option<Namespace>,
    /// `None` while it is replaced.
    machine: Option<Machine>,
    /// How many there have been.
    machines: usize,
    possible: Possible,
    /// What the executor held after each program has had a model.
    before: ResourceUsage,
    /// The bytes of its heap then.
    heap: i64,
    /// What it said of itself then.
    status: ExecutorStatus,
    /// The events since then.
    since: usize,
    /// How often resources have been compared.
    compared: usize,
    /// The bytes by which the heaps of the executor and of a program were larger than before, at
    /// most.
    most_heap: (i64, i64),
    /// The bytes by which the heap of the executor was larger than before, at each comparison.
    growths: Vec<i64>,
    programs: Vec<Program>,
    /// The time from the start of a program that is alone to the last token of its first model.
    life: Duration,
    reloads: u64,
    counts: BTreeMap<Event, usize>,
    /// How many programs have been started, and how many models they have loaded, used and freed.
    started: usize,
    loads: usize,
    /// How long programs waited after each event.
    waits: Waits,
}

/// Injects `setup.counts.events` events, or as many as fit into `setup.counts.time`.
pub(super) fn run(setup: &Setup<'_>, progress: &Progress) -> Result<Row> {
    let times = setup.counts.events;
    wait_until_settled(&setup.program.model, progress)?;
    let began = Instant::now();
    let mut soak = Soak::new(setup)?;
    let mut done = 0;
    while done < times && setup.counts.time.is_none_or(|time| began.elapsed() < time) {
        let event = soak.possible.next(&mut soak.rng);
        progress.note(&format!("{} of {times}: {event}", done + 1));
        let what = format!("event {} ({event})", done + 1);
        soak.round(event)
            .with_context(|| format!("{}{what}", soak.logs()))?;
        *soak.counts.entry(event).or_default() += 1;
        soak.since += usize::from(!event.ends_executor());
        done += 1;
        if done % ROUNDS == 0 {
            soak.compare_resources().with_context(|| what)?;
        }
    }
    let grown = soak.compare_resources()?;
    let waits = soak.waits.to_string();
    { soak.waits.check(soak.life) }.with_context(|| format!("all times: {waits}"))?;
    let counts: Vec<String> = { soak.counts.iter() }
        .map(|(event, count)| format!("{event} {count}"))
        .collect();
    let (of_executor, of_programs) = soak.most_heap;
    let (before, after) = (soak.before, ResourceUsage::of(soak.executor.pid())?);
    let mut skipped = String::new();
    if soak.freezer.is_none() {
        skipped += "; nothing was frozen: this user may make no control group";
    }
    if soak.namespace.is_none() {
        skipped += "; no program used a virtual machine: this user may make no mount namespace";
    }
    let (since, loads, started) = (soak.since, soak.loads, soak.started);
    // An executor that has just been started has no rate.
    let rate = match i64::try_from(since) {
        Ok(since @ 1..) => format!(", {} for 1,000 events", 1000 * grown / since),
        _ => String::new(),
    };
    // Whether the heap still grows: the medians of the parts of a run with one executor.
    let quarters = match setup.counts.keeps_executor {
        true => format!(", by quarters of the run {:?}", medians(&soak.growths, 4)),
        false => String::new(),
    };
    soak.end()?;
    Ok(Row {
        fault: "random events",
        times: done,
        found: format!(
            "{}; {loads} models loaded by {started} programs; 0 hangs, 0 wrong tokens; after the event a program went on or failed within (median, \
             99 %, maximum) {waits}; executor since its last start, {since} events before \
             the end: {before}, after: {after}, heap {grown:+} bytes{rate}{quarters}; heaps grew by \
             {of_executor} and {of_programs} bytes at most{skipped}",
            counts.join(", ")
        ),
    })
}

/// The medians of that many parts of a list, in order.
fn medians(all: &[i64], parts: usize) -> Vec<i64> {
    let part = |i: usize| i * all.len() / parts;
    let median = |i: usize| {
        let mut part = all[part(i)..part(i + 1)].to_vec();
        part.sort_unstable();
        part.get(part.len() / 2).copied()
    };
    (0..parts).filter_map(median).collect()
}

impl<'a> Soak<'a> {
    fn new(setup: &'a Setup<'a>) -> Result<Soak<'a>> {
        let port = process::free_port()?;
        let at = |name: &str| setup.scratch.path().join(format!("{NAME}-{name}"));
        let (config, control) = (at("vgpu.toml"), at("control.sock"));
        let proxy = Proxy::start(port)?;
        write_config(setup, &config, &control, 1)?;
        let freezer = Freezer::new();
        let heaps = HeapCounts::build(setup.scratch.path())?;
        let executor = serve(setup, &heaps, &config, port)?;
        executor.add_to(freezer.as_ref())?;
        let folder = at("no-devices");
        std::fs::create_dir_all(&folder).context("creating a folder")?;
        let namespace = Namespace::find(&folder);
        let counts = &setup.counts;
        let possible = Possible::new(counts.chosen, counts.keeps_executor, namespace.is_some())?;
        let before = ResourceUsage::of(executor.pid())?;
        let heap = heaps.of(executor.pid())?;
        let program = guest::Program {
            preload: Some(heaps.library().into()),
            ..setup.program.clone()
        };
        let mut soak = Soak {
            setup,
            heaps,
            program,
            rng: setup.rng(9),
            port,
            proxy,
            freezer,
            config,
            control,
            executor,
            namespace,
            machine: None,
            machines: 0,
            possible,
            before,
            heap,
            status: ExecutorStatus::default(),
            since: 0,
            compared: 0,
            most_heap: (0, 0),
            growths: Vec::new(),
            programs: Vec::new(),
            life: Duration::ZERO,
            reloads: 0,
            counts: BTreeMap::new(),
            started: 0,
            loads: 0,
            waits: Waits::default(),
        };
        // Before the executor ends for the first time: `vgpu fd-store` starts the next one because
        // it keeps files of a machine.
        soak.plug()?;
        for (name, link) in PROGRAMS {
            if link == Link::Machine && soak.namespace.is_none() {
                continue;
            }
            let program = soak.start(name, link)?;
            soak.programs.push(program);
        }
        soak.settle()?;
        Ok(soak)
    }

    /// Starts a virtual machine in place of the last one.
    fn plug(&mut self) -> Result<()> {
        self.machine = None;
        self.machines += 1;
        let sysfs = format!("{MACHINE}-{}", self.machines);
        let sysfs = self.setup.scratch.path().join(sysfs);
        let socket = self.setup.socket(MACHINE);
        self.machine = Some(Machine::start(self.setup, self.namespace, &socket, sysfs)?);
        Ok(())
    }

    fn machine(&self) -> Result<&Machine> {
        self.machine.as_ref().context("no machine runs")
    }

    /// Starts a program, which loads its first model.
    fn start(&mut self, name: &'static str, link: Link) -> Result<Program> {
        self.start_with_ids(name, link, None)
    }

    /// The same. A session of the program has so many ids.
    fn start_with_ids(
        &mut self,
        name: &'static str,
        link: Link,
        ids_left: Option<u64>,
    ) -> Result<Program> {
        let endpoint = match link {
            Link::Unix => format!("unix:{}", self.setup.socket(NAME).display()),
            Link::Named => format!("unix:{}", self.setup.socket("events-named").display()),
            Link::Tcp => format!("tcp:127.0.0.1:{}", self.proxy.port()),
            Link::Machine => format!("pci:{}", vgpu_machine_standin::ADDRESS),
        };
        let enter = match link {
            Link::Machine => self.machine()?.enter()?,
            _ => Vec::new(),
        };
        let program = guest::Program {
            enter,
            ids_left,
            ..self.program.clone()
        };
        let plugin = Some((self.setup.dist, endpoint.as_str()));
        let mut guest = Guest::start(&program, plugin, &self.setup.log(name))?;
        let began = Instant::now();
        self.setup.expect_run(&mut guest, name)?;
        // The first program is alone.
        if self.life.is_zero() {
            self.life = began.elapsed();
        }
        self.started += 1;
        self.loads += 1;
        Ok(Program {
            name,
            link,
            before: ResourceUsage::of(guest.pid())?,
            heap: None,
            guest,
        })
    }

    /// Replaces a program that has ended.
    fn restart(&mut self, program: usize) -> Result<()> {
        self.programs[program] = self.start_again(program)?;
        Ok(())
    }

    /// Starts another process of a program.
    fn start_again(&mut self, program: usize) -> Result<Program> {
        let Program { name, link, .. } = self.programs[program];
        self.start(name, link)
    }

    /// Every program loads a model, after which the resources of the executor count as its ordinary
    /// ones.
    fn settle(&mut self) -> Result<()> {
        // At once, since each thread of the executor keeps some freed memory.
        for _ in 0..3 {
            for program in &mut self.programs {
                program.guest.begin(TOKENS)?;
            }
            for Program { name, guest, .. } in &mut self.programs {
                self.setup.expect_tokens(guest, name)?;
                self.loads += 1;
            }
        }
        // Tables that grow once.
        for event in [
            Event::ModelsLoadedAgain,
            Event::IdsUsedUp,
            Event::QuotaExceeded,
            Event::Reloaded,
            Event::Observed,
            Event::PeerTalksNonsense,
            Event::Drained,
            Event::LimitsSet,
        ] {
            self.inject(event, 0)?;
        }
        let pid = self.executor.pid();
        self.before = at_rest(pid)?;
        self.heap = self.heaps.of(pid)?;
        self.status = self.executor_status()?;
        self.since = 0;
        Ok(())
    }

    /// One event, while some programs work.
    fn round(&mut self, event: Event) -> Result<()> {
        let subject = match event {
            Event::ConnectionCut
            | Event::NetworkStops
            | Event::GuestDoesNotRead
            | Event::Blackhole => REMOTE,
            _ if event.is_of_machine() => OF_MACHINE[self.rng.below(2) as usize],
            _ => self.rng.below(self.programs.len() as u64) as usize,
        };
        let working: Vec<usize> = (0..self.programs.len())
            .filter(|&program| program == subject || self.rng.below(2) == 0)
            .collect();
        for &program in &working {
            let forks = event == Event::GuestForks && program == subject;
            match forks {
                true => self.programs[program].guest.begin_fork(TOKENS)?,
                false => self.programs[program].guest.begin(TOKENS)?,
            }
        }
        thread::sleep(moment(&mut self.rng, self.life));
        let logged: Vec<usize> = { self.programs.iter() }
            .map(|program| program.guest.log().len())
            .collect();
        let fails = self.inject(event, subject)?;
        let happened = Instant::now();
        let is_replaced = |program: &usize| match event {
            Event::GuestKilled | Event::GuestEnds | Event::MachineProgramKilled => {
                *program == subject
            }
            Event::MachineKilled => OF_MACHINE.contains(program),
            _ => false,
        };
        let working = working.into_iter().filter(|program| !is_replaced(program));
        let mut failed: Vec<usize> = Vec::new();
        for (program, outcome, took) in self.outcomes(event, working.collect(), happened)? {
            let Program { name, guest, .. } = &mut self.programs[program];
            let why = match outcome {
                Outcome::Tokens(tokens) => {
                    ensure!(
                        tokens == self.setup.reference,
                        "{name} has the tokens {tokens:?} instead of {:?}",
                        self.setup.reference
                    );
                    self.loads += 1;
                    continue;
                }
                Outcome::Failed(why) => why,
            };
            ensure!(fails.has(program), "{name} failed: {why}");
            let most = event.stated() + SLOW_MACHINE;
            ensure!(
                took < most,
                "{name} failed after {took:?} only, not within {most:?}"
            );
            let log = guest.log();
            let log = log.get(logged[program]..).unwrap_or_default();
            let is_expected = match event {
                Event::SessionKilled => expect_killed(log),
                Event::Drained => expect_refused_by_drain(log),
                _ => expect_loss_without_blame(log),
            };
            is_expected.with_context(|| format!("{name} failed: {why}"))?;
            failed.push(program);
        }
        ensure!(
            event != Event::SessionKilled || failed.len() <= 1,
            "the programs {failed:?} failed, and one session was ended"
        );
        if fails != Fails::None {
            // The next load works.
            for program in 0..self.programs.len() {
                if fails.has(program) {
                    let Program { name, guest, .. } = &mut self.programs[program];
                    let what = format!("the next load of {name}");
                    self.setup.expect_run(guest, &what)?;
                    self.loads += 1;
                }
            }
        }
        if event.ends_executor() {
            self.settle()?;
        }
        Ok(())
    }

    /// Waits for the ends of programs that worked during an event, and takes down how long each of
    /// them waited for its next token or its error. Returns the outcomes, with the times since the
    /// end of the event.
    fn outcomes(
        &mut self,
        event: Event,
        mut working: Vec<usize>,
        happened: Instant,
    ) -> Result<Vec<(usize, Outcome, Duration)>> {
        let mut outcomes = Vec::new();
        // Tokens that came before the end of the event. A program that had ended waits for nothing.
        let mut left = Vec::new();
        for program in working.drain(..) {
            let Program { name, guest, .. } = &mut self.programs[program];
            match guest.ended()? {
                Some(outcome @ Outcome::Tokens(_)) => {
                    outcomes.push((program, outcome, Duration::ZERO));
                }
                Some(outcome) => {
                    self.waits.add(event, name, Duration::ZERO);
                    outcomes.push((program, outcome, Duration::ZERO));
                }
                None => left.push((program, false)),
            }
        }
        // The programs work at the same time, a fork for two.
        let work = self.life * (PROGRAMS.len() as u32 + 1);
        let most = event.stated() + SLOW_MACHINE;
        while let Some((program, has_gone_on)) = left.pop() {
            let Program { name, guest, .. } = &mut self.programs[program];
            let said = guest
                .said()
                .with_context(|| format!("{name} has crashed"))?;
            let took = happened.elapsed();
            if said.is_some() && !has_gone_on {
                self.waits.add(event, name, took);
            }
            match said {
                Some(Said::End(outcome)) => outcomes.push((program, outcome, took)),
                Some(Said::Token) => left.push((program, true)),
                None => {
                    ensure!(took < most + work, "{name} hangs for {most:?} and {work:?}");
                    left.insert(0, (program, has_gone_on));
                    thread::sleep(LOOK_PERIOD);
                }
            }
        }
        Ok(outcomes)
    }

    /// Makes an event happen. Returns the programs that may fail.
    fn inject(&mut self, event: Event, subject: usize) -> Result<Fails> {
        let short = |rng: &mut Rng| moment(rng, SHORT);
        match event {
            Event::Nothing | Event::GuestForks => Ok(Fails::None),
            Event::GuestKilled => {
                self.programs[subject].guest.signal(Signal::KILL)?;
                self.restart(subject)?;
                Ok(Fails::None)
            }
            Event::GuestStopped | Event::GuestStoppedForLong => {
                let pause = match event {
                    Event::GuestStopped => short(&mut self.rng),
                    _ => LONG,
                };
                let guest = &self.programs[subject].guest;
                guest.signal(Signal::STOP)?;
                thread::sleep(pause);
                guest.signal(Signal::CONT)?;
                Ok(Fails::None)
            }
            Event::GuestEnds => {
                // The program reads the end of its input when it has generated.
                let outcome = self.programs[subject].guest.end()?;
                ensure!(
                    outcome == Outcome::Tokens(self.setup.reference.clone()),
                    "{outcome:?}"
                );
                self.loads += 1;
                let next = self.start_again(subject)?;
                let last = std::mem::replace(&mut self.programs[subject], next);
                last.guest.finish()?;
                Ok(Fails::None)
            }
            Event::ExecutorKilled => self.replace_executor(Signal::KILL),
            Event::ExecutorRestarted => self.replace_executor(Signal::TERM),
            Event::ExecutorStopped => {
                let pause = short(&mut self.rng);
                self.executor.signal(Signal::STOP)?;
                thread::sleep(pause);
                self.executor.signal(Signal::CONT)?;
                Ok(Fails::None)
            }
            Event::ExecutorStoppedForLong => {
                self.executor.signal(Signal::STOP)?;
                thread::sleep(LONG);
                self.executor.signal(Signal::CONT)?;
                Ok(Fails::All)
            }
            Event::ExecutorFrozen => {
                if let Some(freezer) = &self.freezer {
                    freezer.set(true)?;
                    thread::sleep(short(&mut self.rng));
                    freezer.set(false)?;
                }
                Ok(Fails::None)
            }
            Event::ModelsLoadedAgain => {
                // A further program, which comes and goes.
                let mut other = self.start("events-other", link_of_other(subject))?;
                for _ in 0..3 {
                    self.setup.expect_run(&mut other.guest, other.name)?;
                    self.loads += 1;
                }
                other.guest.finish()?;
                Ok(Fails::None)
            }
            Event::IdsUsedUp => {
                self.use_up_ids(subject)?;
                Ok(Fails::None)
            }
            Event::QuotaExceeded => {
                let mut small = self.setup.guest("events-small", "events-small")?;
                small.begin(TOKENS)?;
                let outcome = small.end()?;
                ensure!(
                    matches!(outcome, Outcome::Failed(_)),
                    "a model fits into {SMALL} bytes: {outcome:?}"
                );
                small.finish()?;
                Ok(Fails::None)
            }
            Event::Reloaded => {
                self.reloads += 1;
                write_config(
                    self.setup,
                    &self.config,
                    &self.control,
                    1 + self.reloads % 5,
                )?;
                match self.reloads % 2 {
                    0 => self.executor.signal(Signal::HUP)?,
                    _ => drop(self.vgpu(&["reload"])?),
                }
                Ok(Fails::None)
            }
            Event::Observed => {
                for command in ["ps", "dump"] {
                    self.vgpu(&[command])?;
                }
                self.executor.signal(Signal::USR1)?;
                Ok(Fails::None)
            }
            Event::PeerTalksNonsense => {
                let mut bytes = vec![0; self.rng.below(5000) as usize];
                self.rng.fill(&mut bytes);
                for socket in [NAME, "events-named"] {
                    let peer = packet_socket(&self.setup.socket(socket))
                        .context("connecting to the executor")?;
                    // The executor may have hung up.
                    let _ = rustix::net::send(&peer, &bytes, SendFlags::NOSIGNAL);
                }
                // There is a machine already, so it hangs up.
                let peer = UnixStream::connect(self.setup.socket(MACHINE));
                let _ = { peer }
                    .context("connecting to the executor as a machine")?
                    .write_all(&bytes);
                let peer = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
                let _ = { peer }
                    .context("connecting to the executor")?
                    .write_all(&bytes);
                Ok(Fails::None)
            }
            Event::ConnectionCut => {
                self.proxy.cut();
                Ok(Fails::One(REMOTE))
            }
            Event::NetworkStops => {
                let both = [Direction::ToHost, Direction::ToGuest];
                self.proxy.stop(&both, short(&mut self.rng));
                Ok(Fails::None)
            }
            Event::GuestDoesNotRead => {
                self.proxy.stop(&[Direction::ToGuest], short(&mut self.rng));
                Ok(Fails::None)
            }
            Event::Blackhole => {
                let both = [Direction::ToHost, Direction::ToGuest];
                self.proxy.stop(&both, LONG);
                Ok(Fails::One(REMOTE))
            }
            Event::SessionKilled => self.kill_session(),
            Event::Drained => {
                let mut drain = Command::new(&self.setup.dist.vgpu);
                drain.arg("drain").arg("--control").arg(&self.control);
                let log = self.setup.log("events-drain");
                let mut drain = Daemon::start(&mut drain, &log)?;
                drain.wait_until(HANG, |drain| !drain.log().is_empty())?;
                let pause = short(&mut self.rng);
                thread::sleep(pause);
                self.vgpu(&["drain", "--undo"])?;
                // It waits for the end of all programs, or for the end of the drain.
                let began = Instant::now();
                let status = loop {
                    if let Some(status) = drain.exited()? {
                        break status;
                    }
                    ensure!(began.elapsed() < HANG, "vgpu drain does not end");
                    thread::sleep(Duration::from_millis(10));
                };
                ensure!(
                    status.success() || process::tail(&log).contains("the drain was undone"),
                    "vgpu drain ended with {status}: {}",
                    process::tail(&log)
                );
                // A program that connects meanwhile is refused.
                Ok(Fails::All)
            }
            Event::MachinePaused | Event::MachinePausedForLong => {
                let pause = match event {
                    Event::MachinePaused => short(&mut self.rng),
                    _ => LONG,
                };
                self.signal_machine(Signal::STOP)?;
                thread::sleep(pause);
                self.signal_machine(Signal::CONT)?;
                Ok(Fails::None)
            }
            Event::MachineKilled => self.kill_machine(),
            Event::MachineProgramKilled => self.kill_program_of_machine(subject),
            Event::LimitsSet => {
                let weight = format!("weight={}", 1 + self.rng.below(5));
                for memory in [2 * QUOTA, QUOTA] {
                    let memory = format!("memory={memory}");
                    self.vgpu(&["set", "events-named", &memory, &weight])?;
                }
                Ok(Fails::None)
            }
        }
    }

    /// A further program loads models until its session has used up its ids. The next session
    /// works.
    fn use_up_ids(&mut self, subject: usize) -> Result<()> {
        let link = link_of_other(subject);
        let mut other = self.start_with_ids("events-ids", link, Some(IDS))?;
        let mut models = 1;
        let why = loop {
            other.guest.begin(TOKENS)?;
            match other.guest.end()? {
                Outcome::Failed(why) => break why,
                Outcome::Tokens(tokens) => ensure!(
                    tokens == self.setup.reference && models < IDS,
                    "model {models} of a session with {IDS} ids has the tokens {tokens:?}"
                ),
            }
            models += 1;
            self.loads += 1;
        };
        let log = other.guest.log();
        ensure!(
            log.contains(USED_UP),
            "the session failed after {models} models for another reason: {why}: {log}"
        );
        self.setup.expect_run(&mut other.guest, other.name)?;
        self.loads += 1;
        other.guest.finish()
    }

    /// Ends the executor with a signal, after which `vgpu fd-store` starts the next one.
    fn replace_executor(&mut self, signal: Signal) -> Result<Fails> {
        self.executor.replace(signal)?;
        self.executor.add_to(self.freezer.as_ref())?;
        Ok(Fails::All)
    }

    /// Sends a signal to the processes of the machine: itself, and its programs.
    fn signal_machine(&self, signal: Signal) -> Result<()> {
        self.machine()?.signal(signal)?;
        OF_MACHINE
            .iter()
            .try_for_each(|&program| self.programs[program].guest.signal(signal))
    }

    /// Ends the machine with its programs, and starts another one with such programs, at once or
    /// when the executor has ended the sessions.
    fn kill_machine(&mut self) -> Result<Fails> {
        let open = self.reported_sessions()?;
        let open: Vec<u64> = { open.iter() }
            .filter(|session| session.slot.is_some())
            .map(|session| session.id)
            .collect();
        let is_at_once = self.rng.below(2) == 0;
        self.signal_machine(Signal::KILL)?;
        if is_at_once {
            self.plug()?;
        }
        self.expect_ends("their machine", |session| open.contains(&session.id))?;
        if !is_at_once {
            self.plug()?;
        }
        for program in OF_MACHINE {
            self.restart(program)?;
        }
        Ok(Fails::None)
    }

    /// Ends a program of the machine, which closes nothing on the device. Its slot is free for the
    /// next program after [`SLOT`]. [`Soak::compare_resources`] waits for the end of its session.
    fn kill_program_of_machine(&mut self, program: usize) -> Result<Fails> {
        let of = |soak: &Soak<'_>| -> Result<Option<SessionOfProgram>> {
            let pid = u64::from(soak.programs[program].guest.pid());
            let sessions = soak.reported_sessions()?;
            Ok(sessions
                .into_iter()
                .find(|session| session.pid == Some(pid)))
        };
        let dead = of(self)?;
        self.programs[program].guest.signal(Signal::KILL)?;
        thread::sleep(SLOT + Duration::from_secs(1));
        self.restart(program)?;
        self.programs[program].guest.begin(TOKENS)?;
        let began = Instant::now();
        let next = loop {
            if let Some(next) = of(self)? {
                break next;
            }
            ensure!(began.elapsed() < HANG, "no session after {HANG:?}");
            thread::sleep(Duration::from_millis(5));
        };
        let Program { name, guest, .. } = &mut self.programs[program];
        self.setup.expect_tokens(guest, name)?;
        // A program takes the first slot that is free.
        if let Some(dead) = dead {
            ensure!(
                next.slot <= dead.slot && next.id != dead.id,
                "{next:?} does not have the slot of {dead:?}, whose program has sent no heartbeat \
                 for {SLOT:?}"
            );
        }
        Ok(Fails::None)
    }

    /// Ends one of the open sessions of the programs, if there is one, and looks that the executor
    /// has no such session then. Returns the program whose session it was.
    fn kill_session(&mut self) -> Result<Fails> {
        let sessions = self.sessions()?;
        if sessions.is_empty() {
            return Ok(Fails::None);
        }
        let (id, fails) = sessions[self.rng.below(sessions.len() as u64) as usize];
        self.end_session(id)?;
        ensure!(
            !self.sessions()?.iter().any(|(left, _)| *left == id),
            "session {id} is still there after `vgpu kill`"
        );
        Ok(fails)
    }

    /// Ends the sessions of the machine's programs that have died.
    fn end_dead_sessions(&self) -> Result<()> {
        for session in self.reported_sessions()? {
            let lives = |pid| { self.programs.iter() }.any(|one| u64::from(one.guest.pid()) == pid);
            if session.slot.is_some() && session.pid.is_some_and(|pid| !lives(pid)) {
                self.end_session(session.id)?;
            }
        }
        Ok(())
    }

    /// Waits until the executor has none of these sessions any more: at once, since `what` has
    /// ended.
    fn expect_ends(&self, what: &str, of: impl Fn(&SessionOfProgram) -> bool) -> Result<()> {
        let began = Instant::now();
        loop {
            let mut left = self.reported_sessions()?;
            left.retain(&of);
            if left.is_empty() {
                return Ok(());
            }
            ensure!(
                began.elapsed() < AT_ONCE,
                "{left:?} are there {AT_ONCE:?} after the end of {what}"
            );
            thread::sleep(ASK_PERIOD);
        }
    }

    /// Ends a session, which may end by itself at the same time.
    fn end_session(&self, id: u64) -> Result<()> {
        match self.vgpu(&["kill", &id.to_string()]) {
            Ok(_) => Ok(()),
            Err(error) if error.to_string().contains("there is no session") => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The open sessions, as the executor reports them.
    fn reported_sessions(&self) -> Result<Vec<SessionOfProgram>> {
        let status = self.vgpu(&["ps", "--json"])?;
        let status: Value = serde_json::from_str(&status).context("parsing `vgpu ps --json`")?;
        let sessions = { status["sessions"].as_array() }.context("a list of sessions")?;
        sessions.iter().map(SessionOfProgram::parse).collect()
    }

    /// The numbers of the open sessions, each with the program that fails without it. The session
    /// of a process that has just ended is left out: a forked one, or one that was replaced.
    fn sessions(&self) -> Result<Vec<(u64, Fails)>> {
        let mut of_programs = Vec::new();
        for session in self.reported_sessions()? {
            let of = |pid: u64| {
                { self.programs.iter() }.position(|program| u64::from(program.guest.pid()) == pid)
            };
            let fails = match (session.pid, session.slot) {
                (Some(pid), _) => of(pid).map(Fails::One),
                // It has not yet said who it is.
                (None, Some(_)) => Some(Fails::OfMachine),
                (None, None) => Some(Fails::One(REMOTE)),
            };
            of_programs.extend(fails.map(|fails| (session.id, fails)));
        }
        Ok(of_programs)
    }

    /// Runs a command of `vgpu` that talks to the executor.
    fn vgpu(&self, command: &[&str]) -> Result<String> {
        let mut vgpu = Command::new(&self.setup.dist.vgpu);
        process::output(vgpu.args(command).arg("--control").arg(&self.control))
    }

    /// What the executor says of itself.
    fn executor_status(&self) -> Result<ExecutorStatus> {
        ExecutorStatus::parse(&self.vgpu(&["ps", "--json"])?)
    }

    /// Waits until the executor has as many sessions and as much free memory as before. Returns
    /// what it says of itself.
    fn expect_status(&self) -> Result<ExecutorStatus> {
        let began = Instant::now();
        loop {
            let now = self.executor_status()?;
            if (now.sessions, now.free) == (self.status.sessions, self.status.free) {
                return Ok(now);
            }
            ensure!(
                began.elapsed() < SILENCE + SLOW_MACHINE,
                "the executor has {now}; before: {}",
                self.status
            );
            thread::sleep(Duration::from_millis(40));
        }
    }

    /// Executor and programs hold no more than before. No program works now. Returns the bytes by
    /// which the heap of the executor has grown, but for the engine's working memory.
    fn compare_resources(&mut self) -> Result<i64> {
        self.compared += 1;
        if !self.compared.is_multiple_of(WAITING) {
            self.end_dead_sessions()?;
        }
        let status = self.expect_status()?;
        let (pid, heaps) = (self.executor.pid(), &self.heaps);
        // The heap first: what the C library keeps of freed memory is no leak of ours. The engine's
        // working memory is part of the heap: the model needs less than what the engine maps.
        let scratch = status.kept_scratch - self.status.kept_scratch;
        let grown = heaps.expect_no_more(pid, (self.heap, scratch), "the executor", HANG)?;
        let grown = grown - scratch;
        expect_no_more(pid, &self.before, "the executor", HANG)
            .with_context(|| format!("its heap has grown by {grown} bytes"))?;
        self.most_heap.0 = self.most_heap.0.max(grown);
        self.growths.push(grown);
        for Program {
            name,
            guest,
            before,
            heap,
            ..
        } in &mut self.programs
        {
            let queues = match *name == PROGRAMS[REMOTE].0 {
                true => TCP_QUEUES,
                false => 0,
            };
            let heap_before = *heap.get_or_insert(heaps.of(guest.pid())?);
            let more = heaps.expect_no_more(guest.pid(), (heap_before, queues), name, HANG)?;
            let before = ResourceUsage {
                anonymous: before.anonymous + queues.unsigned_abs(),
                ..*before
            };
            expect_no_more(guest.pid(), &before, name, HANG)
                .with_context(|| format!("its heap has grown by {more} bytes"))?;
            self.most_heap.1 = self.most_heap.1.max(more - queues);
        }
        Ok(grown)
    }

    /// The ends of the logs of the executor and of the programs.
    fn logs(&self) -> String {
        let executor = format!("{NAME}-vgpu-serve");
        let names = { PROGRAMS.iter().map(|(name, _)| *name) }.chain([MACHINE]);
        let logs = std::iter::once(executor.as_str()).chain(names);
        logs.map(|name| process::tail(&self.setup.log(name)))
            .collect()
    }

    /// Ends all. The sessions of programs that end by themselves end at once, also where nothing
    /// shows the executor that a process has ended: in the machine, which still runs.
    fn end(mut self) -> Result<()> {
        for program in std::mem::take(&mut self.programs) {
            program.guest.finish()?;
        }
        self.expect_ends("their programs", |_| true)?;
        drop(self.machine);
        self.executor.stop()
    }
}

/// A session, as the executor reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SessionOfProgram {
    id: u64,
    /// The process of the program. Over TCP the executor does not know it.
    pid: Option<u64>,
    /// The slot of the virtual machine's device; `None` on another link.
    slot: Option<u64>,
}

impl SessionOfProgram {
    fn parse(session: &Value) -> Result<SessionOfProgram> {
        let endpoint = session["endpoint"]
            .as_str()
            .context("a session has an endpoint")?;
        let slot = { endpoint.strip_prefix("vm ") }
            .and_then(|machine| machine.split_once(" slot ")?.1.parse().ok());
        // What a program of a machine says of itself: `name[17], ...`.
        let said = || {
            let (_, pid) = session["program"].as_str()?.split_once('[')?;
            pid.split_once(']')?.0.parse().ok()
        };
        Ok(SessionOfProgram {
            id: session["id"].as_u64().context("a session has a number")?,
            pid: session["pid"]
                .as_u64()
                .or_else(|| slot.and_then(|_| said())),
            slot,
        })
    }
}

/// Why a program has lost sessions, by its log.
fn lost(log: &str) -> Vec<&str> {
    let reasons = log.lines().filter_map(|line| {
        let (_, told) = line.split_once(" is lost: ")?;
        Some(told.split_once(". Its buffers")?.0)
    });
    reasons.collect()
}

/// The log of a program that failed during a drain says that it got no session. A session that it
/// had goes on.
fn expect_refused_by_drain(log: &str) -> Result<()> {
    let reasons = lost(log);
    ensure!(
        reasons.is_empty(),
        "the program has lost a session, although the host drains only: {reasons:?}"
    );
    ensure!(
        log.contains(DRAINS),
        "the program is not told {DRAINS:?}: {log}"
    );
    Ok(())
}

/// The log of a program that failed because its executor or its connection was gone says why it
/// failed, and blames nobody who has done nothing.
fn expect_loss_without_blame(log: &str) -> Result<()> {
    ensure!(log.contains("ggml-vgpu: "), "the log has no reason: {log}");
    let blamed = BLAME.iter().find(|blame| log.contains(**blame));
    ensure!(blamed.is_none(), "the log says {blamed:?}: {log}");
    Ok(())
}

/// The log of a program whose session was killed says so, and names no other loss of a session.
fn expect_killed(log: &str) -> Result<()> {
    let reasons = lost(log);
    ensure!(
        reasons == [KILLED],
        "the program is told {reasons:?} instead of {KILLED:?}"
    );
    Ok(())
}

/// Waits until the plugin trusts the file of a model: from then on each program keeps the file
/// open, which would count as a leak of a program that was started before.
fn wait_until_settled(model: &Path, progress: &Progress) -> Result<()> {
    let file = std::fs::metadata(model).context("reading the times of the model")?;
    let changed = u64::try_from(file.ctime()).unwrap_or(0);
    let settled = SystemTime::UNIX_EPOCH + Duration::from_secs(changed) + SETTLING_TIME;
    if let Ok(left) = settled.duration_since(SystemTime::now()) {
        progress.note("waiting until the model has not changed for a minute");
        thread::sleep(left);
    }
    Ok(())
}

/// Where a further program finds the executor, if it is like this one.
fn link_of_other(program: usize) -> Link {
    match OF_MACHINE.contains(&program) {
        true => Link::Machine,
        false => Link::Unix,
    }
}

/// What an executor says of itself in `vgpu ps`.
#[derive(Clone, Copy, Debug, Default)]
struct ExecutorStatus {
    sessions: usize,
    /// Bytes of the engine's memory that an allocation could get.
    free: u64,
    /// Bytes of working memory that the engine keeps for the next graph.
    kept_scratch: i64,
}

impl ExecutorStatus {
    /// Reads what `vgpu ps --json` prints.
    fn parse(text: &str) -> Result<ExecutorStatus> {
        let status: Value = serde_json::from_str(text).context("parsing `vgpu ps --json`")?;
        let free = status["engine"]["memory_free"].as_u64();
        let kept_scratch = status["engine"]["kept_scratch"].as_i64();
        let sessions = status["sessions"].as_array().map(Vec::len);
        Ok(ExecutorStatus {
            sessions: sessions.context("no sessions in `vgpu ps --json`")?,
            free: free.context("no memory in `vgpu ps --json`")?,
            kept_scratch: kept_scratch.context("no working memory in `vgpu ps --json`")?,
        })
    }
}

impl fmt::Display for ExecutorStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExecutorStatus { sessions, free, .. } = self;
        write!(f, "{sessions} sessions and {free} bytes free")
    }
}

/// What a process holds when it holds the same for a while. A session frees the memory of a model
/// some time after its program has asked for it.
fn at_rest(pid: u32) -> Result<ResourceUsage> {
    let began = Instant::now();
    let (mut last, mut equal) = (ResourceUsage::of(pid)?, 0);
    while equal < 5 && began.elapsed() < HANG {
        thread::sleep(Duration::from_millis(40));
        let now = ResourceUsage::of(pid)?;
        equal = if now == last { equal + 1 } else { 0 };
        last = now;
    }
    Ok(last)
}

/// Starts the executor.
fn serve(setup: &Setup<'_>, heaps: &HeapCounts, config: &Path, port: u16) -> Result<KeptExecutor> {
    let tcp = format!("tcp:127.0.0.1:{port}");
    let config = config.display().to_string();
    let sharing = match setup.counts.shares_weights {
        true => "tenant",
        false => "off",
    };
    let arguments = [
        "--listen",
        &tcp,
        "--config",
        &config,
        "--share-weights",
        sharing,
        // Otherwise the free memory is also that of the machine, which others use.
        "--memory",
        MEMORY,
    ];
    let count_heap = |command: &mut Command| preload::set(command, heaps.library());
    KeptExecutor::start(setup, NAME, count_heap, &arguments)
}

/// Connects to the executor as the guest of a unix socket does.
fn packet_socket(path: &Path) -> rustix::io::Result<OwnedFd> {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Writes the configuration. `weight` is what a reload changes.
fn write_config(setup: &Setup<'_>, file: &Path, control: &Path, weight: u64) -> Result<()> {
    let mut text = format!("control.socket = {control:?}\n");
    for (name, memory) in [("events-named", QUOTA), ("events-small", SMALL)] {
        let listener = format!("unix:{}", setup.socket(name).display());
        text += &format!(
            "[[guest]]\nname = {name:?}\nmemory = {memory}\nweight = {weight}\nlisten = \
             [{listener:?}]\n"
        );
    }
    let (socket, silence) = (setup.socket(MACHINE), SILENCE.as_secs());
    text += &format!(
        "[[guest]]\nname = {MACHINE:?}\nmemory = {MACHINE_QUOTA}\nweight = {weight}\n\
         vm = {{ socket = {socket:?}, window = \"64M\", silence = {silence} }}\n"
    );
    std::fs::write(file, text).context("writing a configuration")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_of_a_machine_have_the_process_that_their_program_names() {
        let session = |endpoint: &str, pid: Value| {
            let session = serde_json::json!({
                "id": 3, "endpoint": endpoint, "pid": pid, "program": "guest[17], ggml 0.25.3",
            });
            let SessionOfProgram { id, pid, slot } = SessionOfProgram::parse(&session).unwrap();
            assert_eq!(id, 3);
            (pid, slot)
        };
        assert_eq!(
            session("vm events-machine slot 6", Value::Null),
            (Some(17), Some(6))
        );
        assert_eq!(session("unix:/run/a.sock", 5.into()), (Some(5), None));
        assert_eq!(session("tcp from 127.0.0.1", Value::Null), (None, None));
    }

    #[test]
    fn program_refused_during_a_drain_has_lost_no_session() {
        let refused = format!(
            "ggml-vgpu: ERROR VGPU0: no buffer of 3 MiB: the executor refuses: {DRAINS}, and \
             serves those that it has\n"
        );
        expect_refused_by_drain(&refused).unwrap();
        let lost = "ggml-vgpu: ERROR session 3 at unix:/run/vgpu.sock is lost: the host drains, \
                    and ends the sessions that are open after 60s. Its buffers are gone\n";
        for wrong in [lost.to_owned(), refused + lost, String::new()] {
            expect_refused_by_drain(&wrong).unwrap_err();
        }
    }

    #[test]
    fn program_that_loses_its_executor_blames_nobody() {
        let line = |reason: &str| format!("ggml-vgpu: ERROR session 3 is lost: {reason}\n");
        expect_loss_without_blame(&line("the peer has closed the link")).unwrap();
        for wrong in ["", &line("the guest broke the protocol: x"), &line(KILLED)] {
            expect_loss_without_blame(wrong).unwrap_err();
        }
    }

    #[test]
    fn program_of_a_killed_session_is_told_so_once() {
        let line = |reason: &str| {
            format!(
                "ggml-vgpu: ERROR session 3 at unix:/run/vgpu.sock is lost: {reason}. Its buffers \
                 are gone and its work fails from now on.\nggml-vgpu: ERROR VGPU0: graph not \
                 computed: the executor is lost: {reason}\n"
            )
        };
        expect_killed(&line(KILLED)).unwrap();
        for wrong in [
            "",
            &line("the peer has closed the link"),
            &line(KILLED).repeat(2),
        ] {
            let error = expect_killed(wrong).unwrap_err().to_string();
            assert!(
                error.ends_with(&format!("instead of {KILLED:?}")),
                "{error}"
            );
        }
    }
}
