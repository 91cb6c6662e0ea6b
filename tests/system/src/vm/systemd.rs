//! A virtual machine with systemd and vgpu's Debian packages.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};

use super::debian::Wanted;
use super::guest::Guest;
use super::image;
use super::inside::{As, PLUGIN, Way};
use super::prepared::{GUEST_TIMEOUT, MEMORY, Prepared};
use super::program;
use crate::debian::Packages;
use xtask_common::cache::Cache;
use xtask_common::progress::Progress;

/// A minimal Debian, the libraries of llama.cpp's programs, and a program that opens sockets.
const SYSTEM: Wanted<'_> = Wanted {
    name: "systemd",
    backports: false,
    packages: &[
        "systemd",
        "udev",
        "base-files",
        "dash",
        "coreutils",
        "util-linux",
        "busybox-static",
        "libstdc++6",
        "libgomp1",
        "socat",
    ],
};

/// The exposure in tenths that `systemd-analyze security` rates as OK.
const EXPOSURE: u32 = 25;

/// The log line of an executor about a virtual machine of an earlier executor.
const KEPT: &str = "serving the running virtual machine";

/// The line of systemd about a service that does not report in time.
const WATCHDOG: &str = "Watchdog timeout";

/// The watchdog of the test. The executor reports once a second, in an emulated machine later.
const WATCHDOG_SECONDS: u32 = 15;

/// By default systemd gives up after 5 starts in 10 s. The pause of the unit grows for 8 restarts.
const FAILED_STARTS: u32 = 9;

/// The longest pause between two failed starts, in seconds (`RestartMaxDelaySec` of the unit), and
/// how exact systemd's timers are.
const LONGEST_PAUSE: f64 = 2.0;
const PAUSE_ACCURACY: f64 = 0.2;

/// Properties of a service.
const STORED: &str = "NFileDescriptorStore";
const RESTARTS: &str = "NRestarts";

/// A condition of the shell.
const IS_ACTIVE: &str = "systemctl is-active -q vgpu@vm1";

/// The folder of a drop-in of a virtual machine's service.
const DROP_IN: &str = "/run/systemd/system/vgpu@vm1.service.d";

/// The folder of a drop-in of the service.
const LIMITED: &str = "/run/systemd/system/vgpu.service.d";

/// The limit of the service's memory in a test, which is less than the guests may have in all.
const MEMORY_MAX: &str = "700M";

/// The same in a test of a worker that the kernel ends: first what the worker may have, then less
/// than it has been given.
const MEMORY_BEFORE: &str = "900M";
const MEMORY_AFTER: u64 = 192 << 20;

/// The buffers of the program whose worker the kernel ends, more than [`MEMORY_AFTER`], and the
/// bytes of each in MiB. A buffer of at most 64 MiB would be mapped by the program, and its pages
/// would be those of the program.
const ATTACKER: (u32, u32) = (5, 72);

/// What the supervisor says of a worker that the kernel has ended.
const KILLED: &str = "was ended by SIGKILL";

/// The control group of the service.
const GROUP: &str = "/sys/fs/cgroup/system.slice/vgpu.service";

/// Installs a program that stands for Ollama, with the ggml of the guest's programs and a service.
const OLLAMA: &str = "lib=/usr/local/lib/ollama && mkdir -p $lib \
     && cp /llama/libggml-base.so.0 $lib/libggml-base.so && : > $lib/llama-server \
     && printf '#!/bin/sh\\nexec sleep 100000\\n' > /usr/local/bin/ollama \
     && chmod 755 /usr/local/bin/ollama \
     && printf '[Service]\\nExecStart=/usr/local/bin/ollama serve\\n' \
        > /etc/systemd/system/ollama.service";

/// What `vgpu wait` says when it gives up.
const WAITED: &str = "no executor within 60 s";

/// The shell line that removes the drop-in.
const UNSET: &str = "rm -r /run/systemd/system/vgpu@vm1.service.d && systemctl daemon-reload";

/// A shell loop that waits until a condition holds.
fn until(condition: &str) -> String {
    format!("i=0; until {condition}; do i=$((i+1)); [ $i -lt 600 ] || exit 9; sleep 0.1; done")
}

/// A condition of the shell on a property of a virtual machine's service.
fn has(property: &str, wanted: &str) -> String {
    unit_has("vgpu@vm1", property, wanted)
}

/// A condition of the shell on a property of a unit.
fn unit_has(unit: &str, property: &str, wanted: &str) -> String {
    format!("[ \"$(systemctl show -p {property} --value {unit})\" {wanted} ]")
}

/// A booted machine with systemd.
pub(crate) struct Systemd {
    guest: Guest,
}

/// A running `tests/programs/held_memory.c`.
struct Holder {
    name: &'static str,
}

impl Holder {
    /// Starts the program with so many buffers of so many MiB, and waits until it has them. `name`
    /// is unique in the guest.
    fn start(
        guest: &mut Guest,
        name: &'static str,
        who: As,
        (count, mib): (u32, u32),
    ) -> Result<Holder> {
        let command = format!("{PLUGIN} held_memory /llama {count} {mib}");
        let command = match who {
            As::Root => command,
            As::User => format!("su -s /bin/sh user -c '{command}'"),
        };
        // The open pipe keeps the program running between two lines.
        guest
            .run(&format!(
                "cd /tmp; rm -f {name}.*; mkfifo {name}.in; : > {name}.out; \
                 sleep 100000 > {name}.in & echo $! > /tmp/{name}.sleep; \
                 cd /tmp; (({command}) < {name}.in >> {name}.out 2> {name}.err; \
                 echo ended >> {name}.out) & {}; \
                 grep -q held /tmp/{name}.out || {{ cat /tmp/{name}.err; exit 1; }}",
                until(&format!("[ -s /tmp/{name}.out ]"))
            ))?
            .good("starting a program that holds memory")?;
        Ok(Holder { name })
    }

    /// Sends a line, and does not wait for the answer.
    fn begin(&self, guest: &mut Guest, line: &str) -> Result<()> {
        let name = self.name;
        guest
            .run(&format!(
                ": > /tmp/{name}.out; echo {line} > /tmp/{name}.in"
            ))?
            .good("writing to a program that holds memory")
            .map(drop)
    }

    /// Sends a line. The answer must be `wanted`.
    fn tell(&self, guest: &mut Guest, line: &str, wanted: &str) -> Result<()> {
        self.begin(guest, line)?;
        let said = self.answer(guest)?;
        ensure!(
            said == wanted,
            "{} said {said:?} to {line:?}, not {wanted:?}:\n{}",
            self.name,
            guest
                .run(&format!("tail -n 20 /tmp/{}.err", self.name))?
                .output
        );
        Ok(())
    }

    fn answer(&self, guest: &mut Guest) -> Result<String> {
        let name = self.name;
        let said = guest
            .run(&format!(
                "{}; cat /tmp/{name}.out",
                until(&format!("[ -s /tmp/{name}.out ]"))
            ))?
            .good("waiting for a program that holds memory")?;
        Ok(said.trim().to_owned())
    }

    /// The program says that its device is lost, or has ended.
    fn expect_loss(&self, guest: &mut Guest) -> Result<()> {
        let said = self.answer(guest)?;
        ensure!(!said.contains("right"), "{} said {said:?}", self.name);
        self.end(guest)
    }

    fn end(&self, guest: &mut Guest) -> Result<()> {
        let name = self.name;
        guest
            .run(&format!(
                "kill $(cat /tmp/{name}.sleep); {}",
                until(&format!("grep -q ended /tmp/{name}.out"))
            ))?
            .good("ending a program that holds memory")
            .map(drop)
    }
}

/// Boots the machine.
pub(crate) fn boot_systemd(
    cache: &Cache,
    prepared: &Prepared,
    logs: &dyn Fn(&str) -> PathBuf,
) -> Result<Systemd> {
    let root = cache.folder("debian-systemd-1", |dir| SYSTEM.unpack(cache, dir))?;
    let progress = Progress::new("assembling a system with systemd");
    let folder = prepared.scratch.path();
    let made = Packages::make(&prepared.dist, &folder.join("packages"))?;
    let packages = [made.host, made.guest];
    let initramfs = folder.join("initramfs-systemd");
    let holder = program::build_holder(cache, &prepared.programs.bin, folder)?;
    let more = [(program::HOLDER, holder.as_path())];
    let content = prepared.programs.content(&prepared.dist, &more);
    image::with_systemd(&root, &packages, &content, folder, &initramfs)?;
    progress.done("");
    let machine = prepared.with_systemd(&initramfs, &[], MEMORY);
    let mut guest = Guest::boot(&machine, &logs("vm-systemd-qemu"))?;
    guest.set_timeout(GUEST_TIMEOUT);
    Ok(Systemd { guest })
}

impl Systemd {
    /// The checks of systemd for the units and of udev for the rule.
    pub(crate) fn verify(&mut self) -> Result<String> {
        let said = self
            .guest
            .run("systemd-analyze verify vgpu.service vgpu@vm1.service 2>&1")?
            .good("systemd-analyze verify")?;
        let warnings = warnings(&said);
        ensure!(
            warnings.is_empty(),
            "systemd-analyze verify: {}",
            warnings.join("\n")
        );
        self.guest
            .run("udevadm verify /usr/lib/udev/rules.d/60-vgpu.rules 2>&1")?
            .good("udevadm verify")?;
        self.guest
            .run(&format!(
                "systemd-analyze security --no-pager --threshold={EXPOSURE} vgpu.service 2>&1 \
                 | tail -n 2; \
                 systemd-analyze security --threshold={EXPOSURE} vgpu.service >/dev/null 2>&1"
            ))?
            .good("systemd-analyze security")
            .map(|text| text.trim().trim_start_matches(['→', ' ']).to_owned())
    }

    /// The service starts, and a user of its group generates text, before and after a kill of the
    /// executor, and after a stop and a start, which leave the folder that containers mount.
    pub(crate) fn service(&mut self) -> Result<String> {
        self.guest
            .run(
                "systemctl start vgpu && systemctl is-active vgpu \
                 && stat -c %U:%G:%a /run/vgpu/vgpu.sock",
            )?
            .good("starting vgpu.service")
            .and_then(|said| {
                ensure!(
                    said.contains("vgpu:vgpu:660"),
                    "not the group's socket:\n{said}"
                );
                Ok(())
            })?;
        let way = Way {
            environment: "",
            link: "unix:/run/vgpu/vgpu.sock",
            who: As::User,
        };
        let reference = self.guest.reference()?;
        self.guest.generation(&way, &reference)?;
        self.guest
            .run("systemctl reload vgpu && systemctl is-active vgpu")?
            .good("reloading vgpu.service")?;
        let restarted = until(
            "[ \"$(systemctl show -p NRestarts --value vgpu)\" = 1 ] \
             && systemctl is-active -q vgpu",
        );
        self.guest
            .run(&format!("systemctl kill -s KILL vgpu; {restarted}"))?
            .good("waiting for a restart of vgpu.service")?;
        self.guest.generation(&way, &reference)?;
        self.guest
            .run(
                "folder=$(stat -c %d:%i /run/vgpu) && systemctl stop vgpu && test -d /run/vgpu \
                 && test ! -e /run/vgpu/vgpu.sock && systemctl start vgpu \
                 && [ \"$(stat -c %d:%i /run/vgpu)\" = \"$folder\" ]",
            )?
            .good("keeping /run/vgpu across a stop and a start of vgpu.service")?;
        self.guest.generation(&way, &reference)
    }

    /// With `--isolate` and `MemoryMax=`, a guest that asks for more memory than the service may
    /// have is refused, again and again, and another guest generates its text meanwhile. The
    /// supervisor can read what its workers use although `ProtectProc=` hides them.
    pub(crate) fn limited_memory(&mut self) -> Result<String> {
        self.limit_memory(MEMORY_MAX)?;
        let way = Way {
            environment: "",
            link: "unix:/run/vgpu/vgpu.sock",
            who: As::User,
        };
        let reference = self.guest.reference()?;
        self.guest
            .run(&format!(
                "(while [ ! -e /tmp/over ]; do {PLUGIN} llama-completion -m /vgpu/model.gguf \
                 -ngl 99 -c 8000000 -b 32 -ub 32 -t 1 -no-cnv --no-warmup -n 1 -p x \
                 >/tmp/attack 2>&1; echo $? >> /tmp/attacks; done; echo end >> /tmp/attacks) \
                 >/dev/null 2>&1 & {}",
                until("[ -s /tmp/attacks ]")
            ))?
            .good("a guest that asks for too much memory")?;
        let outcome = self.guest.generation(&way, &reference);
        let attacks = self
            .guest
            .run(&format!(
                "touch /tmp/over; {}; cat /tmp/attacks; rm /tmp/attacks /tmp/over",
                until("grep -q end /tmp/attacks")
            ))?
            .good("the end of the guest that asks for too much")?;
        let outcome = outcome?;
        let attacks: Vec<&str> = attacks.lines().map(str::trim).collect();
        let (&last, attacks) = attacks.split_last().unwrap_or((&"", &[]));
        ensure!(
            last == "end" && attacks.len() > 1 && !attacks.contains(&"0"),
            "not refused each time: {attacks:?}"
        );
        let said = self.guest.run("cat /tmp/attack")?.output;
        let journal = self
            .guest
            .run("journalctl --no-pager -o cat -u vgpu --since -10min")?
            .good("reading the journal")?;
        ensure!(
            said.contains("out of memory") || journal.contains("out of memory"),
            "no refusal with numbers:\n{said}\n{journal}"
        );
        for fault in [
            "cannot read what the worker uses",
            "keeps the part",
            "was ended by",
        ] {
            ensure!(
                !journal.contains(fault),
                "{fault:?} in the journal:\n{journal}"
            );
        }
        self.unlimit_memory()?;
        Ok(format!(
            "{outcome}; {} loads of another guest refused, MemoryMax={MEMORY_MAX}",
            attacks.len()
        ))
    }

    /// With `--isolate` and `MemoryMax=`, the kernel ends the worker of a guest that writes to
    /// memory that it was given while there was some. Another guest's session goes on with its
    /// memory, and so does the service.
    pub(crate) fn killed_worker(&mut self) -> Result<String> {
        self.limit_memory(MEMORY_BEFORE)?;
        let main = self.property("MainPID")?;
        let killed = self.killed_workers()?;
        let other = Holder::start(&mut self.guest, "other", As::Root, (1, 8))?;
        other.tell(&mut self.guest, "fill 3", "right")?;
        let attacker = Holder::start(&mut self.guest, "attacker", As::User, ATTACKER)?;
        self.expect_worker_scores(&main)?;
        self.wait_for_less_than(MEMORY_AFTER / 4 * 3)?;
        self.guest
            .run(&format!(
                "systemctl set-property --runtime vgpu MemoryMax={MEMORY_AFTER} \
                 && [ \"$(cat {GROUP}/memory.max)\" = {MEMORY_AFTER} ]"
            ))?
            .good("setting a smaller limit of the service's memory")?;
        attacker.begin(&mut self.guest, "fill 7")?;
        let ended = until(&format!(
            "[ $(journalctl --no-pager -o cat -u vgpu | grep -c '{KILLED}') -gt {killed} ]"
        ));
        let waited = self.guest.run(&ended)?;
        let events = self.guest.run(&format!("cat {GROUP}/memory.events"))?;
        ensure!(
            waited.status == 0,
            "no worker was ended by the kernel:\n{}\n{}",
            events.output,
            self.guest
                .run("journalctl --no-pager -n 30 -u vgpu")?
                .output
        );
        ensure!(
            events
                .output
                .lines()
                .any(|line| line.trim() == "oom_kill 1"),
            "not one process was ended:\n{}",
            events.output
        );
        // The kernel reports the end of a process before it has freed the memory.
        self.wait_for_less_than(MEMORY_AFTER / 4 * 3)?;
        other.tell(&mut self.guest, "check 3", "right")?;
        other.tell(&mut self.guest, "fill 4", "right")?;
        attacker.expect_loss(&mut self.guest)?;
        self.guest
            .run(&format!(
                "systemctl set-property --runtime vgpu MemoryMax={MEMORY_BEFORE} \
                 && systemctl is-active vgpu"
            ))?
            .good("the service goes on")?;
        let way = Way {
            environment: "",
            link: "unix:/run/vgpu/vgpu.sock",
            who: As::User,
        };
        let reference = self.guest.reference()?;
        let outcome = self.guest.generation(&way, &reference)?;
        other.tell(&mut self.guest, "check 4", "right")?;
        let now = (self.property("MainPID")?, self.killed_workers()?);
        ensure!(
            now == (main.clone(), killed + 1),
            "(main process, ended workers) were ({main}, {killed}), and are {now:?}"
        );
        other.end(&mut self.guest)?;
        self.guest
            .run("rm -r /run/systemd/system.control/vgpu.service.d")?
            .good("removing the limit of the running service")?;
        self.unlimit_memory()?;
        Ok(format!(
            "{outcome}; a worker that wrote {} MiB with MemoryMax={MEMORY_AFTER} ended alone",
            ATTACKER.0 * ATTACKER.1
        ))
    }

    /// Restarts the service with `--isolate` and a limit of its memory.
    fn limit_memory(&mut self, limit: &str) -> Result<()> {
        let serve = "/usr/bin/vgpu serve --isolate --guest-memory 512M --memory 1G";
        self.guest
            .run(&format!(
                "mkdir -p {LIMITED} && printf '[Service]\\nExecStart=\\nExecStart={serve}\\n\
                 MemoryMax={limit}\\n' > {LIMITED}/tests.conf && systemctl daemon-reload \
                 && systemctl restart vgpu && systemctl is-active vgpu"
            ))?
            .good("starting vgpu.service with a limit of its memory")
            .map(drop)
    }

    /// Restarts the service as it is shipped. It has not been restarted meanwhile.
    fn unlimit_memory(&mut self) -> Result<()> {
        self.guest
            .run(&format!(
                "[ \"$(systemctl show -p {RESTARTS} --value vgpu)\" = 0 ] \
                 && rm -r {LIMITED} && systemctl daemon-reload && systemctl restart vgpu"
            ))?
            .good("the service has not been restarted")
            .map(drop)
    }

    /// A property of the service.
    fn property(&mut self, name: &str) -> Result<String> {
        let said = self
            .guest
            .run(&format!("systemctl show -p {name} --value vgpu"))?
            .good("systemctl show")?;
        Ok(said.trim().to_owned())
    }

    /// How many workers the kernel has ended, by the log.
    fn killed_workers(&mut self) -> Result<usize> {
        let journal = self
            .guest
            .run("journalctl --no-pager -o cat -u vgpu")?
            .good("reading the journal")?;
        Ok(journal.matches(KILLED).count())
    }

    /// The kernel prefers each worker to the process `main`, the supervisor.
    fn expect_worker_scores(&mut self, main: &str) -> Result<()> {
        let said = self
            .guest
            .run(&format!(
                "for p in $(cat {GROUP}/cgroup.procs); do echo $p $(cat /proc/$p/oom_score_adj); \
                 done"
            ))?
            .good("reading what the kernel prefers")?;
        let scores: Vec<(&str, &str)> = { said.lines() }
            .filter_map(|line| line.trim().split_once(' '))
            .collect();
        let of_main = scores.iter().filter(|(pid, _)| *pid == main);
        let is_right = of_main.clone().count() == 1
            && of_main.clone().all(|(_, score)| *score == "0")
            && { scores.iter() }.all(|(pid, score)| *pid == main || *score == "500")
            && scores.len() >= 3;
        ensure!(
            is_right,
            "the supervisor {main} and two workers are to have 0 and 500:\n{said}"
        );
        Ok(())
    }

    /// Waits until the service uses less than `bytes`.
    fn wait_for_less_than(&mut self, bytes: u64) -> Result<()> {
        self.guest
            .run(&until(&format!(
                "[ $(cat {GROUP}/memory.current) -lt {bytes} ]"
            )))?
            .good(&format!("the service does not get below {bytes} bytes"))
            .map(drop)
    }

    /// systemd keeps the connection of a virtual machine while the executor is restarted.
    pub(crate) fn fd_store(&mut self) -> Result<String> {
        // systemd forgets a stopped unit, with its files, that no unit refers to: the unit is
        // enabled.
        // The executor treats any client of this socket as QEMU and keeps the connection open.
        self.guest
            .run(&format!(
                "systemctl enable --now vgpu@vm1 && (tail -f /dev/null \
                 | socat - UNIX-CONNECT:/run/vgpu-vm1/vm.sock >/dev/null 2>&1 &) ; {}",
                until(&has(STORED, "= 3"))
            ))?
            .good("storing the connection of a virtual machine")?;
        let restarted = until(&format!("{} && {IS_ACTIVE}", has(RESTARTS, "= 1")));
        self.taken_again("a kill of the executor", |guest| {
            guest
                .run(&format!("systemctl kill -s KILL vgpu@vm1; {restarted}"))?
                .good("waiting for a restart of vgpu@vm1.service")
        })?;
        Ok(String::new())
    }

    /// Ollama's service, with the drop-in of `vgpu install`, is started before the executor. It
    /// does not run without one: it waits for a minute, and again after that, and runs as soon as
    /// there is an executor.
    pub(crate) fn ollama_before_the_executor(&mut self) -> Result<String> {
        self.guest
            .run(&format!(
                "{OLLAMA} && systemctl stop vgpu && vgpu install --endpoint unix:/run/vgpu/vgpu.sock \
                 && systemctl daemon-reload"
            ))?
            .good("installing the plugin for Ollama")?;
        let ollama = |property: &str, wanted: &str| unit_has("ollama", property, wanted);
        let again = until(&ollama(RESTARTS, "-ge 1"));
        let [waiting, no_program] = [ollama("SubState", "= start-pre"), ollama("MainPID", "= 0")];
        let waits = until(&format!("{waiting} && {no_program}"));
        self.guest
            .run(&format!(
                "systemctl start --no-block ollama && {waits} && {again} && {waits}"
            ))?
            .good("waiting for the second start of Ollama's service")?;
        self.guest
            .run(&format!(
                "systemctl start vgpu && {} && {}",
                until("systemctl is-active -q ollama"),
                ollama("MainPID", "-gt 0")
            ))?
            .good("waiting for Ollama's service")?;
        let journal = self
            .guest
            .run("journalctl --no-pager -o cat -u ollama")?
            .good("reading the journal")?;
        ensure!(
            journal.matches(WAITED).count() == 1,
            "{WAITED:?} is not in the journal once:\n{journal}"
        );
        self.guest
            .run("systemctl stop ollama && vgpu uninstall && systemctl daemon-reload")?
            .good("removing the plugin from Ollama")?;
        Ok("at the second start".into())
    }

    /// systemd keeps the connection of a virtual machine while the executor is stopped.
    pub(crate) fn stopped_and_started(&mut self) -> Result<String> {
        self.taken_again("a stop and a start", |guest| {
            let is_kept = has(STORED, "= 3");
            guest
                .run(&format!(
                    "systemctl stop vgpu@vm1 && ! {IS_ACTIVE} && {is_kept} \
                     && systemctl start vgpu@vm1 && {IS_ACTIVE}"
                ))?
                .good("stopping and starting vgpu@vm1.service")
        })?;
        Ok(String::new())
    }

    /// An executor whose starts fail is started again without an end, and systemd keeps the
    /// connection of the virtual machine until a start succeeds.
    pub(crate) fn failing_starts(&mut self) -> Result<String> {
        self.set("ExecStart=\\nExecStart=/bin/false")?;
        let restarts = format!("-gt {FAILED_STARTS}");
        let failed = until(&has(RESTARTS, &restarts));
        let is_kept = has(STORED, "= 3");
        self.guest
            .run(&format!(
                "systemctl kill -s KILL vgpu@vm1; {failed} && ! {IS_ACTIVE} && {is_kept}"
            ))?
            .good("keeping the connection while the executor does not start")?;
        let pause = self.last_pause()?;
        ensure!(
            (LONGEST_PAUSE - PAUSE_ACCURACY..10.0 * LONGEST_PAUSE).contains(&pause),
            "the last pause between two failed starts was {pause:.1} s, not {LONGEST_PAUSE} s"
        );
        self.taken_again("failed starts", |guest| {
            guest
                .run(&format!(
                    "{UNSET} && systemctl start vgpu@vm1 && {IS_ACTIVE}"
                ))?
                .good("starting vgpu@vm1.service after failed starts")
        })?;
        Ok(format!(
            "more than {FAILED_STARTS} restarts, the last one after {pause:.1} s"
        ))
    }

    /// The seconds between the last two restarts of the executor of the virtual machine.
    fn last_pause(&mut self) -> Result<f64> {
        let said = self
            .guest
            .run(
                "journalctl --no-pager -o short-monotonic -u vgpu@vm1 \
                 | grep 'Scheduled restart job' | tail -n 2",
            )?
            .good("reading the times of restarts")?;
        // Such as `[   71.402105] host systemd[1]: vgpu@vm1.service: Scheduled restart job, ...`.
        let times: Vec<f64> = { said.lines() }
            .filter_map(|line| {
                line.strip_prefix('[')?
                    .split(']')
                    .next()?
                    .trim()
                    .parse()
                    .ok()
            })
            .collect();
        let [.., before, last] = times[..] else {
            bail!("no two restarts in the journal:\n{said}");
        };
        Ok(last - before)
    }

    /// systemd ends an executor whose main thread does not run, and starts it again.
    pub(crate) fn watchdog(&mut self) -> Result<String> {
        self.set(&format!("WatchdogSec={WATCHDOG_SECONDS}"))?;
        self.taken_again("a restart", |guest| {
            guest
                .run(&format!("systemctl restart vgpu@vm1 && {IS_ACTIVE}"))?
                .good("restarting vgpu@vm1.service")
        })?;
        let restarted = until(&format!("{} && {IS_ACTIVE}", has(RESTARTS, "= 1")));
        let journal = self.taken_again("the watchdog", |guest| {
            let none = has(RESTARTS, "= 0");
            guest
                .run(&format!(
                    "{none} && systemctl kill -s STOP --kill-whom=main vgpu@vm1 && {restarted}"
                ))?
                .good("waiting for the watchdog of vgpu@vm1.service")
        })?;
        ensure!(
            journal.contains(WATCHDOG),
            "systemd does not say {WATCHDOG:?}:\n{journal}"
        );
        self.guest.run(UNSET)?.good("removing a drop-in")?;
        Ok(format!("WatchdogSec={WATCHDOG_SECONDS}"))
    }

    /// Sets options of the service in a drop-in, which [`UNSET`] removes. `options` has no
    /// quotation mark; a line break is `\n`.
    fn set(&mut self, options: &str) -> Result<()> {
        self.guest
            .run(&format!(
                "mkdir -p {DROP_IN} && printf '[Service]\\n{options}\\n' > {DROP_IN}/tests.conf \
                 && systemctl daemon-reload"
            ))?
            .good("writing a drop-in")
            .map(drop)
    }

    /// After `event` another executor has taken the three files of the virtual machine, and systemd
    /// still has them. Returns the journal of the service.
    fn taken_again(
        &mut self,
        what: &str,
        event: impl FnOnce(&mut Guest) -> Result<String>,
    ) -> Result<String> {
        let before = self.journal()?.matches(KEPT).count();
        event(&mut self.guest)?;
        let is_logged = until(&format!(
            "[ $(journalctl --no-pager -o cat -u vgpu@vm1 | grep -c '{KEPT}') -gt {before} ] \
             && {}",
            has(STORED, "= 3")
        ));
        let waited = self.guest.run(&is_logged)?;
        let journal = self.journal()?;
        let now = journal.matches(KEPT).count();
        ensure!(
            waited.status == 0 && now == before + 1,
            "after {what} the connection has been taken again {} times:\n{journal}",
            now.saturating_sub(before)
        );
        Ok(journal)
    }

    /// The log of the virtual machine's executors, and what systemd says of them.
    fn journal(&mut self) -> Result<String> {
        self.guest
            .run("journalctl --no-pager -o cat -u vgpu@vm1")?
            .good("reading the journal")
    }

    /// A stopped service ends and leaves no files.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.guest
            .run(
                "systemctl stop vgpu vgpu@vm1; test ! -e /run/vgpu/vgpu.sock \
                 && [ \"$(systemctl show -p Result --value vgpu)\" = success ] \
                 && [ \"$(systemctl show -p Result --value vgpu@vm1)\" = success ]",
            )?
            .good("stopping the services")
            .map(drop)
    }
}

/// Keys of the units that systemd of Debian 12 does not know yet.
const NEWER_KEYS: [&str; 3] = [
    "RestartSteps",
    "RestartMaxDelaySec",
    "FileDescriptorStorePreserve",
];

/// What `systemd-analyze verify` says of the units, but for [`NEWER_KEYS`]. Its exit status is 0
/// with warnings.
fn warnings(said: &str) -> Vec<&str> {
    let is_newer = |line: &&str| {
        { NEWER_KEYS.iter() }.any(|key| line.contains(&format!("Unknown key '{key}' in section")))
    };
    { said.lines() }
        .filter(|line| line.contains("vgpu") && !is_newer(line))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_key_of_a_unit_is_a_warning() {
        let said =
            "/etc/vgpu.service:29: Unknown key 'RestartSteps' in section [Service], ignoring.
/etc/vgpu.service:30: Unknown key 'WatchdogSecc' in section [Service], ignoring.
other.service: Command /usr/bin/other is not executable: No such file or directory";
        assert_eq!(
            warnings(said),
            ["/etc/vgpu.service:30: Unknown key 'WatchdogSecc' in section [Service], ignoring."]
        );
    }
}
