//! Events in the life of a virtual machine, caused over QEMU's monitor or in the guest, while a
//! program of the guest generates text: pauses, sleep, resets, unplugging, the end of QEMU.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use super::device::{PCI, Served, VmDevice};
use super::guest::{Guest, Machine};
use super::inside::PLUGIN;
use super::prepared::{GUEST_TIMEOUT, MEMORY, Prepared};
use super::program::{LONG, Outcome, Program, SHORT, SILENCE, ensure_begins, until};
use super::qmp::{self, Qmp};
use xtask_common::executor;
use xtask_common::process::Daemon;
use xtask_common::workspace;

/// The limit of a wait for something that happens at once.
const SOON: Duration = Duration::from_secs(10);

/// Memory of the engine. The model and its context fit once, and not twice.
const ENGINE_MEMORY: &str = "48M";

/// Tokens that the guest's CPU generates for comparison. An emulated CPU is slow.
const SOME: usize = 12;

/// A control group in the guest.
const GROUP: &str = "/sys/fs/cgroup/vgpu";

/// How long the control group is frozen at least.
const FROZEN: Duration = Duration::from_secs(13);

/// The error of a program whose executor does not run.
const STALLED: &str = "the peer has made no progress for 10 s";

/// QEMU's message about a migration and a snapshot.
const NO_MIGRATION: &str =
    "Migration is disabled when using feature 'peer mode' in device 'ivshmem'";

/// QEMU's message about a device that may be migrated.
const NO_MASTER: &str = "master must connect to the server before any peers";

/// The shell line that keeps, before the first sleep, the I/O address of ICH9's power management,
/// and restores it before another one: SeaBIOS 1.16 does not when it wakes the machine, and a write
/// to `/sys/power/state` then succeeds without a sleep.
const KEEP_POWER_MANAGEMENT: &str = "f=/sys/bus/pci/devices/0000:00:1f.0/config; \
    if [ -e /tmp/ich9 ]; then dd if=/tmp/ich9 of=$f bs=1 seek=64 conv=notrunc; \
    else dd if=$f of=/tmp/ich9 bs=1 skip=64 count=8; fi 2>/dev/null";

/// A booted guest whose device can be unplugged, and what drives it.
pub(crate) struct Events<'a> {
    prepared: &'a Prepared,
    qemu_log: PathBuf,
    served: Served,
    control: PathBuf,
    guest: Guest,
    qmp: Qmp,
    /// The program in which something happens.
    program: Program,
    /// What the guest's CPU generates.
    reference: String,
    /// What the program generates if nothing happens.
    expected: String,
}

/// A session, as the executor reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Session {
    id: u64,
    endpoint: String,
    memory: u64,
}

/// Starts an executor and boots a guest.
pub(crate) fn boot_events<'a>(
    prepared: &'a Prepared,
    logs: &dyn Fn(&str) -> PathBuf,
) -> Result<Events<'a>> {
    let control = prepared.scratch.path().join("control.sock");
    let more = [
        "--memory",
        ENGINE_MEMORY,
        "--control",
        control.to_str().context("a path that is no text")?,
        // A program after a reboot would find the weights of the one before it.
        "--share-weights",
        "off",
    ];
    let log = logs("vm-events-vgpu-serve");
    let served = Served::start(prepared, VmDevice::Ivshmem, &log, &more)?;
    let qemu_log = logs("vm-events-qemu");
    let (mut guest, qmp) = boot(prepared, served.socket(), &qemu_log)?;
    let cpu = Program::start(&mut guest, "cpu", "", 0)?;
    let reference = cpu.tokens(&mut guest, SOME)?;
    let program = start_programs(&mut guest)?;
    let expected = program.tokens(&mut guest, LONG)?;
    ensure_begins(&expected, &reference)?;
    Ok(Events {
        prepared,
        qemu_log,
        served,
        control,
        guest,
        qmp,
        program,
        reference,
        expected,
    })
}

/// Boots the guest, with its device in a port that allows unplugging.
fn boot(prepared: &Prepared, socket: &Path, log: &Path) -> Result<(Guest, Qmp)> {
    let monitor = prepared.scratch.path().join("qmp.sock");
    let devices = [
        // In place of `-no-reboot`.
        "-action".into(),
        "reboot=reset".into(),
        "-qmp".into(),
        qmp::argument(&monitor),
        "-device".into(),
        "pcie-root-port,id=port0,chassis=1".into(),
        "-chardev".into(),
        format!("socket,id=vgpu0,path={}", socket.display()),
        "-device".into(),
        "ivshmem-doorbell,id=vgpu,chardev=vgpu0,vectors=1,bus=port0".into(),
    ];
    let machine = Machine {
        qemu: &prepared.qemu,
        accelerator: prepared.qemu.accelerator(),
        kernel: &prepared.kernel.image,
        initramfs: &prepared.initramfs,
        init: "/init",
        devices: &devices,
        memory: MEMORY,
    };
    let mut guest = Guest::boot(&machine, log)?;
    guest.set_timeout(GUEST_TIMEOUT);
    let qmp = Qmp::connect(&monitor)?;
    Ok((guest, qmp))
}

/// Starts a program that does nothing, in the first slot of the device, and the one in which
/// something will happen, in the second.
fn start_programs(guest: &mut Guest) -> Result<Program> {
    start(guest, "idle")?;
    start(guest, "program")
}

/// Starts a program that uses the device.
fn start(guest: &mut Guest, name: &'static str) -> Result<Program> {
    let environment = format!("{PLUGIN} {}", PCI.environment);
    Program::start(guest, name, &environment, 99)
}

impl Events<'_> {
    fn status(&self) -> Result<Value> {
        executor::status(&self.prepared.dist.vgpu, &self.control)
    }

    /// The sessions, by the number of their slot.
    fn sessions(&self) -> Result<Vec<Session>> {
        let status = self.status()?;
        let sessions = { status["sessions"].as_array() }.context("no sessions in the status")?;
        let mut sessions: Vec<Session> = { sessions.iter() }
            .map(|one| Session {
                id: one["id"].as_u64().unwrap_or_default(),
                endpoint: one["endpoint"].as_str().unwrap_or_default().to_owned(),
                memory: one["memory"].as_u64().unwrap_or_default(),
            })
            .collect();
        sessions.sort_by(|one, other| one.endpoint.cmp(&other.endpoint));
        Ok(sessions)
    }

    /// Waits until no session is left, and all memory is free. Returns how long it took.
    fn wait_for_no_session(&self, limit: Duration) -> Result<Duration> {
        let began = Instant::now();
        loop {
            let status = self.status()?;
            let (left, engine) = (&status["sessions"], &status["engine"]);
            let took = began.elapsed();
            if left.as_array().is_some_and(Vec::is_empty)
                && engine["memory_free"] == engine["memory_total"]
            {
                return Ok(took);
            }
            ensure!(
                took < limit,
                "after {took:?} the executor has: {left}, {engine}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Begins a generation. Returns in the middle of it, with the sessions.
    fn begin(&mut self) -> Result<Vec<Session>> {
        self.program.begin(&mut self.guest, LONG)?;
        self.program.wait_for_tokens(&mut self.guest, 5)?;
        self.sessions()
    }

    /// Waits until the generation has `count` tokens. The generation must not have ended: it still
    /// ran after the event before.
    fn goes_on(&mut self, count: usize) -> Result<()> {
        self.program.wait_for_tokens(&mut self.guest, count)
    }

    /// Waits for the end of the generation, whose tokens must be right.
    fn expect(&mut self) -> Result<()> {
        match self.program.end(&mut self.guest)? {
            Outcome::Tokens(tokens) => self.compare(&tokens),
            other => bail!(
                "the generation ended with {other:?}:\n{}",
                self.program.errors(&mut self.guest)?
            ),
        }
    }

    fn compare(&self, tokens: &str) -> Result<()> {
        ensure!(
            tokens == self.expected,
            "other tokens:\n  expected: {}\n  found:    {tokens}",
            self.expected
        );
        Ok(())
    }

    /// A generation without an event has the right tokens.
    fn generate(&mut self) -> Result<()> {
        let tokens = self.program.tokens(&mut self.guest, LONG)?;
        self.compare(&tokens)
    }

    /// The machine is paused for longer than a guest waits for its host. The generation goes on in
    /// the same session.
    pub(crate) fn paused(&mut self) -> Result<String> {
        let before = self.begin()?;
        self.qmp.pause(SHORT)?;
        self.goes_on(LONG / 4)?;
        self.expect()?;
        self.ensure_same_sessions(&before)?;
        Ok(format!("{SHORT:?}: {LONG} tokens equal, the same session"))
    }

    fn ensure_same_sessions(&self, before: &[Session]) -> Result<()> {
        let ids = |sessions: &[Session]| -> Vec<u64> { sessions.iter().map(|s| s.id).collect() };
        let now = self.sessions()?;
        ensure!(
            ids(&now) == ids(before),
            "the sessions were {before:?} and are {now:?}"
        );
        Ok(())
    }

    /// A further program ends by itself. Its session ends at once, and the others go on.
    pub(crate) fn program_ends(&mut self) -> Result<String> {
        let before = self.begin()?;
        let other = start(&mut self.guest, "other")?;
        let with_other = self.sessions()?;
        ensure!(
            with_other.len() == before.len() + 1,
            "the sessions were {before:?} and are {with_other:?}"
        );
        other.return_from_main(&mut self.guest)?;
        let began = Instant::now();
        while self.sessions()?.len() > before.len() {
            ensure!(
                began.elapsed() < SOON,
                "the session is there after {SOON:?}: {:?}",
                self.sessions()?
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        let took = began.elapsed();
        self.expect()?;
        self.ensure_same_sessions(&before)?;
        Ok(format!("its session ended after {} ms", took.as_millis()))
    }

    /// The machine is paused until the host gives its programs up. The generation fails, and the
    /// next load of the same program works.
    pub(crate) fn paused_for_long(&mut self) -> Result<String> {
        self.begin()?;
        self.qmp.run("stop", json!({}))?;
        let took = self.wait_for_no_session(SILENCE + 2 * SOON)?;
        ensure!(
            took > SILENCE - SOON,
            "the sessions ended after {took:?} already"
        );
        self.qmp.run("cont", json!({}))?;
        let lost = self.program.loss(&mut self.guest)?;
        self.generate()?;
        Ok(format!(
            "sessions ended after {} s; an error ({lost}), then {LONG} tokens equal",
            took.as_secs()
        ))
    }

    /// QEMU refuses to migrate and to save the machine, which goes on.
    pub(crate) fn migrated(&mut self) -> Result<String> {
        let before = self.begin()?;
        let to = json!({ "uri": "exec:cat >/dev/null" });
        let migration = self.qmp.refusal("migrate", to)?;
        let line = json!({ "command-line": "savevm events" });
        let snapshot = self.qmp.run("human-monitor-command", line)?;
        let snapshot = snapshot.as_str().unwrap_or_default();
        for (what, said) in [("migrate", migration.as_str()), ("savevm", snapshot)] {
            ensure!(said.contains(NO_MIGRATION), "{what}: QEMU said {said:?}");
        }
        self.goes_on(LONG / 4)?;
        let page = workspace::root().join("docs/virtual-machines.md");
        let page = std::fs::read_to_string(page).context("reading the documentation")?;
        for message in [NO_MIGRATION, NO_MASTER] {
            ensure!(
                page.contains(message),
                "docs/virtual-machines.md does not quote {message:?}"
            );
        }
        self.expect()?;
        self.ensure_same_sessions(&before)?;
        Ok("migrate and savevm refused".into())
    }

    /// The machine sleeps (S3), twice in one generation, for longer than a guest waits for its
    /// host.
    pub(crate) fn suspended(&mut self) -> Result<String> {
        let said = self
            .guest
            .run("cat /sys/power/state /sys/power/mem_sleep")?;
        ensure!(
            said.output.contains("[deep]"),
            "the guest's kernel has no S3: {said:?}"
        );
        let before = self.begin()?;
        self.sleep()?;
        self.goes_on(LONG / 4)?;
        self.sleep()?;
        self.goes_on(LONG / 2)?;
        self.expect()?;
        self.ensure_same_sessions(&before)?;
        Ok(format!(
            "twice {SHORT:?}: {LONG} tokens equal, the same session"
        ))
    }

    /// Puts the machine to sleep (S3) and wakes it. After that a machine of QEMU 7.2 gives no
    /// device up.
    fn sleep(&mut self) -> Result<()> {
        self.guest
            .run(KEEP_POWER_MANAGEMENT)?
            .good("keeping the registers for power management")?;
        self.guest
            .begin("echo mem > /sys/power/state || { s=$?; dmesg | tail -n 20; exit $s; }")?;
        if let Err(error) = self.qmp.event("SUSPEND") {
            let said = self.guest.finish()?;
            return Err(error.context(format!("the guest does not sleep: {said:?}")));
        }
        std::thread::sleep(SHORT);
        self.qmp.run("system_wakeup", json!({}))?;
        self.qmp.event("WAKEUP")?;
        self.guest
            .finish()?
            .good("putting the machine to sleep")
            .map(drop)
    }

    /// The control group of an executor in the guest is frozen. The program gets an error after
    /// some seconds without a heartbeat, and its next load works.
    pub(crate) fn executor_frozen(&mut self) -> Result<String> {
        self.start_executor_inside("--threads 2")?;
        self.guest
            .run(&format!(
                "mount -t cgroup2 none /sys/fs/cgroup && mkdir {GROUP} \
                 && cat /tmp/serve.pid > {GROUP}/cgroup.procs"
            ))?
            .good("making a control group")?;
        let inside = self.start_inside()?;
        inside.begin(&mut self.guest, LONG)?;
        inside.wait_for_tokens(&mut self.guest, 2)?;
        let frozen = until(&format!("grep -q 'frozen 1' {GROUP}/cgroup.events"));
        self.guest
            .run(&format!(
                "echo 1 > {GROUP}/cgroup.freeze && {frozen}; sleep {}",
                FROZEN.as_secs()
            ))?
            .good("freezing the executor in the guest")?;
        // The executor stays frozen until the program has its error.
        let lost = inside.loss(&mut self.guest)?;
        self.guest
            .run(&format!("echo 0 > {GROUP}/cgroup.freeze"))?
            .good("thawing the executor in the guest")?;
        ensure!(lost == STALLED, "the program got another error: {lost}");
        let tokens = inside.tokens(&mut self.guest, SOME)?;
        ensure_begins(&tokens, &self.reference)?;
        // A second session, and no thread that seemed to hang meanwhile.
        self.ensure_logged_inside(2)?;
        self.stop_inside()?;
        self.guest
            .run(&format!("rmdir {GROUP} && umount /sys/fs/cgroup"))?
            .good("removing a control group")?;
        Ok(format!("an error ({lost}), then {SOME} tokens equal"))
    }

    /// The executor in the guest has logged this number of sessions, and nothing that lasts too
    /// long.
    fn ensure_logged_inside(&mut self, sessions: usize) -> Result<()> {
        let log = self.guest.run("cat /tmp/serve.log")?.output;
        let opened = log.matches("session opened").count();
        ensure!(
            opened == sessions && !log.contains("without a pause"),
            "{opened} sessions instead of {sessions}, or one that lasts too long:\n{log}"
        );
        Ok(())
    }

    /// A processor of the guest goes offline and comes back, while a program and an executor in the
    /// guest, whose threads are bound to processors, compute.
    pub(crate) fn processor_offline(&mut self) -> Result<String> {
        self.start_executor_inside("--threads 2 --pin")?;
        let inside = self.start_inside()?;
        let set = |guest: &mut Guest, online: u8| {
            let file = "/sys/devices/system/cpu/cpu1/online";
            guest
                .run(&format!(
                    "echo {online} > {file} && grep -c ^processor /proc/cpuinfo"
                ))?
                .good("setting a processor offline or online")
        };
        for online in [0, 1] {
            self.begin()?;
            inside.begin(&mut self.guest, SOME)?;
            inside.wait_for_tokens(&mut self.guest, 2)?;
            let count = set(&mut self.guest, online)?;
            ensure!(
                count.trim() == (online + 1).to_string(),
                "{count} processors"
            );
            match inside.end(&mut self.guest)? {
                Outcome::Tokens(tokens) => ensure_begins(&tokens, &self.reference)?,
                other => bail!(
                    "{other:?} inside the guest: {}",
                    inside.errors(&mut self.guest)?
                ),
            }
            self.expect()?;
        }
        self.stop_inside()?;
        Ok(format!(
            "{LONG} tokens equal, and {SOME} of an executor in the guest with bound threads"
        ))
    }

    /// Overcommitment is forbidden in the guest, where an executor runs. Without memory left, the
    /// executor refuses a model, and nothing ends by a signal.
    pub(crate) fn overcommitment_forbidden(&mut self) -> Result<String> {
        self.guest
            .run(
                "echo 2 > /proc/sys/vm/overcommit_memory; \
                 echo 80 > /proc/sys/vm/overcommit_ratio",
            )?
            .good("forbidding overcommitment")?;
        self.start_executor_inside("--threads 2")?;
        let inside = self.start_inside()?;
        let tokens = inside.tokens(&mut self.guest, SOME)?;
        ensure_begins(&tokens, &self.reference)?;
        // 16 MiB more than are promised now: the model does not fit.
        self.guest
            .run(
                "echo $(( $(grep Committed_AS /proc/meminfo | tr -dc 0-9) + 16384 )) \
                 > /proc/sys/vm/overcommit_kbytes",
            )?
            .good("limiting the memory of the guest")?;
        inside.begin(&mut self.guest, SOME)?;
        let end = inside.end(&mut self.guest)?;
        ensure!(
            matches!(end, Outcome::Failed(_)),
            "{end:?} without memory for the model"
        );
        self.guest
            .run("echo 80 > /proc/sys/vm/overcommit_ratio && kill -0 $(cat /tmp/serve.pid)")?
            .good("the executor in the guest")?;
        let tokens = inside.tokens(&mut self.guest, SOME)?;
        ensure_begins(&tokens, &self.reference)?;
        self.guest
            .run("echo 0 > /proc/sys/vm/overcommit_memory")?
            .good("allowing overcommitment")?;
        self.stop_inside()?;
        Ok(format!("a model refused, then {SOME} tokens equal"))
    }

    /// Starts an executor in the guest.
    fn start_executor_inside(&mut self, options: &str) -> Result<()> {
        // The log of an executor before this one has a line `ready`, too.
        self.guest
            .run("rm -f /tmp/serve.log")?
            .good("removing a log")?;
        self.guest.start(&format!(
            "vgpu serve --engine cpu {options} --listen unix:/tmp/serve.sock > /tmp/serve.log 2>&1 \
             & echo $! > /tmp/serve.pid; wait"
        ))?;
        let ready = until("grep -qs '^ready' /tmp/serve.log");
        self.guest
            .run(&format!("{ready}; tail -n 5 /tmp/serve.log"))?
            .good("starting an executor in the guest")
            .map(drop)
    }

    /// Starts a program that uses the executor in the guest.
    fn start_inside(&mut self) -> Result<Program> {
        let environment = format!("{PLUGIN} VGPU_ENDPOINT=unix:/tmp/serve.sock");
        Program::start(&mut self.guest, "inside", &environment, 99)
    }

    /// Ends the executor in the guest. The executor's program stays, without an executor.
    fn stop_inside(&mut self) -> Result<()> {
        let gone = until("! kill -0 $(cat /tmp/serve.pid) 2>/dev/null");
        self.guest
            .run(&format!("kill $(cat /tmp/serve.pid); {gone}"))?
            .good("ending the executor in the guest")
            .map(drop)
    }

    /// The device is unplugged during a generation, and plugged in again. The generation fails, and
    /// the same program works again with the new device.
    pub(crate) fn unplugged(&mut self) -> Result<String> {
        self.begin()?;
        self.qmp.run("device_del", json!({ "id": "vgpu" }))?;
        self.qmp.event("DEVICE_DELETED")?;
        let lost = self.program.loss_of_device(&mut self.guest)?;
        // QEMU keeps the connection to the executor until the other half of the device is removed.
        let left = self.sessions()?;
        ensure!(!left.is_empty(), "the sessions ended by themselves");
        self.qmp.run("chardev-remove", json!({ "id": "vgpu0" }))?;
        let took = self.wait_for_no_session(SOON)?;

        self.plug_in()?;
        let there = until("grep -qs 0x1110 /sys/bus/pci/devices/*/device");
        self.guest.run(&there)?.good("waiting for the new device")?;
        self.generate()?;
        Ok(format!(
            "an error ({lost}); sessions ended {} ms after chardev-remove; with a new device \
             {LONG} tokens equal",
            took.as_millis()
        ))
    }

    /// Plugs in a device.
    fn plug_in(&mut self) -> Result<()> {
        let address = json!({ "type": "unix", "data": { "path": self.served.socket() } });
        let data = json!({ "addr": address, "server": false });
        let backend = json!({ "type": "socket", "data": data });
        let chardev = json!({ "id": "vgpu0", "backend": backend });
        self.qmp.run("chardev-add", chardev)?;
        let device = json!({
            "driver": "ivshmem-doorbell",
            "id": "vgpu",
            "chardev": "vgpu0",
            "vectors": 1,
            "bus": "port0",
        });
        self.qmp.run("device_add", device).map(drop)
    }

    /// The machine is reset. The first load after the boot gets the memory of the programs before.
    pub(crate) fn reset(&mut self) -> Result<String> {
        // The slots of programs that were killed are free after some seconds without a heartbeat.
        { self.guest.run("killall retrying_guest; sleep 5")? }.good("ending the programs")?;
        self.program = start_programs(&mut self.guest)?;
        let before = self.begin()?;
        let holder = before.last().context("no session")?;
        let is_first = |session: &Session| session.endpoint.ends_with("slot 0");
        ensure!(
            holder.memory > 24 << 20 && !is_first(holder),
            "no program has half of the memory, in another slot than the first: {before:?}"
        );
        self.qmp.run("system_reset", json!({}))?;
        self.guest.wait_for_boot()?;
        let after = self.sessions()?;
        ensure!(
            after.contains(holder),
            "the sessions ended by themselves: {after:?}"
        );
        // It takes the first slot, and so ends the session without memory.
        self.program = start(&mut self.guest, "program")?;
        self.generate()?;
        let now = self.sessions()?;
        ensure!(
            now.len() == 1 && now.iter().all(is_first),
            "sessions: {now:?}"
        );
        let said = "has no memory left, so the sessions";
        ensure!(
            self.served.log().contains(said),
            "the log does not contain {said:?}"
        );
        Ok(format!(
            "{LONG} tokens equal at once; the memory of {} sessions was given to it",
            before.len()
        ))
    }

    /// QEMU is killed and started again with the same socket.
    pub(crate) fn qemu_killed(&mut self) -> Result<String> {
        self.begin()?;
        self.guest.kill()?;
        let took = self.wait_for_no_session(SOON)?;
        self.ensure_no_master()?;
        (self.guest, self.qmp) = boot(self.prepared, self.served.socket(), &self.qemu_log)?;
        self.program = start_programs(&mut self.guest)?;
        self.generate()?;
        Ok(format!(
            "sessions ended after {} ms; the next machine: {LONG} tokens equal",
            took.as_millis()
        ))
    }

    /// A machine with an executor and a program of its own sleeps (S3) twice, as a host that
    /// suspends. The generation goes on in the same session.
    pub(crate) fn host_suspended(&mut self) -> Result<String> {
        self.start_executor_inside("--threads 2")?;
        let inside = self.start_inside()?;
        let expected = inside.tokens(&mut self.guest, 4 * SOME)?;
        ensure_begins(&expected, &self.reference)?;
        inside.begin(&mut self.guest, 4 * SOME)?;
        for count in [2, 2 * SOME] {
            inside.wait_for_tokens(&mut self.guest, count)?;
            self.sleep()?;
        }
        // The program has not ended before the second sleep.
        inside.wait_for_tokens(&mut self.guest, 3 * SOME)?;
        match inside.end(&mut self.guest)? {
            Outcome::Tokens(tokens) => ensure!(
                tokens == expected,
                "other tokens:\n  expected: {expected}\n  found:    {tokens}"
            ),
            other => bail!(
                "{other:?} inside the guest: {}",
                inside.errors(&mut self.guest)?
            ),
        }
        self.ensure_logged_inside(1)?;
        self.stop_inside()?;
        Ok(format!(
            "twice {SHORT:?}: {} tokens equal, the same session",
            4 * SOME
        ))
    }

    /// QEMU does not start with a device that it would migrate.
    fn ensure_no_master(&self) -> Result<()> {
        let mut qemu = self.prepared.qemu.command();
        let socket = self.served.socket().display();
        qemu.args(["-nodefaults", "-display", "none", "-S", "-machine", "q35"])
            .args(["-chardev", &format!("socket,id=vgpu0,path={socket}")])
            .args([
                "-device",
                "ivshmem-doorbell,chardev=vgpu0,vectors=1,master=on",
            ]);
        let mut qemu = Daemon::start(&mut qemu, &self.qemu_log)?;
        qemu.wait_until(SOON, |qemu| qemu.log().contains(NO_MASTER))
    }

    /// Ends the guest and the executor.
    pub(crate) fn stop(self) -> Result<()> {
        drop(self.guest);
        self.served.stop()
    }
}
