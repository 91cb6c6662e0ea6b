//! `cargo xtask vm`: a real guest under QEMU, with everything in it that a user would have.

mod cpio;
mod guest;
mod image;
mod qemu;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::cache::Cache;
use crate::demo;
use crate::dist::Dist;
use crate::llama;
use crate::model::{self, Weights};
use crate::process::Daemon;
use crate::progress::Step;
use crate::scratch::Scratch;
use crate::workspace;

use guest::{Guest, Machine};
use qemu::Qemu;

/// Not a measure of speed: how long to wait before something must be wrong.
const PATIENCE: Duration = Duration::from_secs(60);
/// The same for a command in an emulated guest.
const GUEST_PATIENCE: Duration = Duration::from_secs(900);

/// The sample of test-backend-ops: operators of language models whose cases do not take an emulated processor minutes.
const OPS: &str =
    "RMS_NORM,NORM,SOFT_MAX,SWIGLU,GEGLU,SCALE,SUM_ROWS,ARGMAX,CLAMP,SQR,SILU,GELU,REPEAT";
/// And of matrix products, the small ones of the common types.
const PRODUCTS: &str = "type_a=(f32|f16|bf16|q4_0|q8_0|q4_K|q5_K|q6_K|iq4_xs),type_b=f32,m=16,n=[1-9],k=256,bs=.[12],1.";
/// Fewer cases than this, and something was not tested.
const LEAST_CASES: usize = 500;

const TOKENS: usize = 24;
const PROMPT: &str =
    "A virtual machine has no graphics processor of its own. It asks its host for one";

/// Executors killed in the middle of a generation.
const KILLS: usize = 20;

/// What the tests need, made once.
pub(crate) struct Prepared {
    qemu: Qemu,
    kernel: image::Kernel,
    initramfs: PathBuf,
    dist: Dist,
    scratch: Scratch,
}

/// Fetches and builds it.
pub(crate) fn prepare(cache: &Cache, dist: &Dist) -> Result<Prepared> {
    let qemu = Qemu::stock(cache)?;
    let kernel = image::kernel(cache)?;
    let bin = llama::build(cache, llama::Stage::Tools)?;
    let cpu = llama::cpu_for_guests(cache)?;
    let vocabulary = llama::source(cache)?.join(demo::VOCABULARY);
    let model = model::ensure(cache, &model::TINY, Weights::F16, &vocabulary, demo::SEED)?;
    let scratch = Scratch::new()?;
    let initramfs = scratch.path().join("initramfs");
    let step = Step::new("assembling an initramfs");
    let content = image::Content {
        dist,
        bin: &bin,
        cpu: &cpu,
        model: &model,
        more: &[],
    };
    image::initramfs(cache, &kernel, &content, &initramfs)?;
    let mib = initramfs.metadata().map_or(0, |m| m.len() >> 20);
    step.done(&format!("{mib} MiB"));
    Ok(Prepared {
        qemu,
        kernel,
        initramfs,
        dist: dist.clone(),
        scratch,
    })
}

/// An executor that serves one virtual machine, and is started again when it is killed.
struct Served {
    hold: Daemon,
    socket: PathBuf,
}

impl Served {
    fn start(prepared: &Prepared, device: Device, log: &Path) -> Result<Served> {
        let socket = prepared.scratch.path().join("vm.sock");
        let mut hold = Command::new(&prepared.dist.vgpu);
        hold.args(["hold", "--"])
            .arg(&prepared.dist.vgpu)
            .args(["serve", "--engine", "cpu", "--vm"])
            .arg(format!("test,socket={},window=64M", socket.display()))
            .args(["--threads", &workspace::cores().to_string()])
            .args(["--device", device.name()]);
        let mut served = Served {
            hold: Daemon::start(&mut hold, log)?,
            socket,
        };
        served.wait_for(1)?;
        Ok(served)
    }

    /// Waits until the executor has said so many times that it is ready.
    fn wait_for(&mut self, count: usize) -> Result<()> {
        self.hold.wait_until(PATIENCE, |hold| {
            let log = hold.log();
            log.lines().filter(|l| l.starts_with("ready ")).count() >= count
        })
    }

    /// The process that serves now.
    fn pid(&self) -> Result<i32> {
        let log = self.hold.log();
        let line = log
            .lines()
            .rev()
            .find(|line| line.starts_with("vgpu hold: pid ") && line.contains(" runs "))
            .context("vgpu hold does not say what it runs")?;
        line.split_whitespace()
            .nth(3)
            .and_then(|pid| pid.parse().ok())
            .context("vgpu hold does not say which process it runs")
    }

    /// Kills the executor, and returns when the next one serves.
    fn kill(&mut self, count: usize) -> Result<()> {
        let pid = rustix::process::Pid::from_raw(self.pid()?).context("a process id")?;
        // It is a child of `vgpu hold`, which has not said that it ended: the id is its own.
        rustix::process::kill_process(pid, rustix::process::Signal::KILL)
            .context("killing the executor")?;
        self.wait_for(count + 1)
    }

    fn stop(self) -> Result<()> {
        self.hold.stop(PATIENCE)
    }
}

/// How a virtual machine gets its vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Device {
    /// The device of stock QEMU.
    Ivshmem,
    /// Our own function, on a newer QEMU.
    VfioUser,
}

impl Device {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Device::Ivshmem => "ivshmem",
            Device::VfioUser => "vfio-user",
        }
    }

    /// What QEMU is told.
    fn arguments(self, socket: &Path) -> Vec<String> {
        let socket = socket.display();
        match self {
            Device::Ivshmem => vec![
                "-chardev".into(),
                format!("socket,id=vgpu0,path={socket}"),
                "-device".into(),
                "ivshmem-doorbell,chardev=vgpu0,vectors=1".into(),
            ],
            Device::VfioUser => vec![
                "-object".into(),
                format!("memory-backend-memfd,id=mem,size={MEMORY},share=on"),
                "-machine".into(),
                "q35,memory-backend=mem".into(),
                "-device".into(),
                format!(
                    r#"{{"driver":"vfio-user-pci","id":"vgpu0","socket":{{"type":"unix","path":"{socket}"}}}}"#
                ),
            ],
        }
    }
}

/// Memory of the guest.
const MEMORY: &str = "2G";

/// The environment in which programs of the guest find the plugin.
const WITH_VGPU: &str =
    "GGML_BACKEND_PATH=/vgpu/libggml-vgpu.so VGPU_ENDPOINT=pci VGPU_STATS=/tmp/stats";

/// A booted guest with a vGPU.
pub(crate) struct Booted {
    guest: Guest,
    served: Served,
}

/// Starts an executor and boots a guest with this device.
pub(crate) fn boot(
    cache: &Cache,
    prepared: &Prepared,
    device: Device,
    logs: &dyn Fn(&str) -> PathBuf,
) -> Result<Booted> {
    let newer = match device {
        Device::Ivshmem => None,
        Device::VfioUser => Some(Qemu::with_vfio_user(cache)?),
    };
    let qemu = newer.as_ref().unwrap_or(&prepared.qemu);
    let log = |name: &str| logs(&format!("vm-{}-{name}", device.name()));
    let served = Served::start(prepared, device, &log("vgpu-serve"))?;
    let machine = Machine {
        qemu,
        accelerator: qemu.accelerator(),
        kernel: &prepared.kernel.image,
        initramfs: &prepared.initramfs,
        devices: &device.arguments(&served.socket),
        memory: MEMORY,
    };
    let mut guest = Guest::boot(&machine, &log("qemu"))?;
    guest.patience(GUEST_PATIENCE);
    Ok(Booted { guest, served })
}

impl Booted {
    /// The guest's kernel sees our function where a program would look for a GPU.
    pub(crate) fn lists(&mut self, wanted: &str) -> Result<String> {
        // What `lspci -n` reads, too.
        let list = self.guest.run(
            "cd /sys/bus/pci/devices; for d in *; do echo $d $(cat $d/class) $(cat $d/vendor):$(cat $d/device); done",
        )?;
        let list = list.good("listing devices")?;
        ensure!(
            list.contains(wanted),
            "no {wanted:?} among the devices of the guest:\n{list}"
        );
        Ok(wanted.to_owned())
    }

    /// `vgpu doctor` finds nothing wrong.
    pub(crate) fn doctor(&mut self) -> Result<String> {
        let output = self
            .guest
            .run("vgpu doctor --plugin /vgpu/libggml-vgpu.so --ggml /llama/libggml-base.so.0")?
            .good("vgpu doctor")?;
        let lines = output
            .lines()
            .filter(|line| line.starts_with("ok "))
            .count();
        ensure!(lines > 0, "it said nothing:\n{output}");
        Ok(format!("{lines} checks"))
    }

    /// A sample of test-backend-ops on VGPU0.
    pub(crate) fn ops(&mut self) -> Result<String> {
        let output = self
            .guest
            .run(&format!(
                "export {WITH_VGPU}; (test-backend-ops test -b VGPU0 -o {OPS} && \
                 test-backend-ops test -b VGPU0 -o MUL_MAT -p '{PRODUCTS}') > /tmp/ops 2>&1; \
                 echo status $?; grep -c '): .*OK' /tmp/ops; grep -c FAIL /tmp/ops; \
                 grep -m5 FAIL /tmp/ops; tail -n 3 /tmp/ops"
            ))?
            .output;
        let lines: Vec<&str> = output.lines().map(str::trim).collect();
        let number = |i: usize| -> Result<usize> {
            let line = lines.get(i).copied().unwrap_or_default();
            line.parse()
                .with_context(|| format!("the guest said:\n{output}"))
        };
        ensure!(
            lines.first() == Some(&"status 0"),
            "test-backend-ops failed:\n{output}"
        );
        let (ran, failed) = (number(1)?, number(2)?);
        ensure!(failed == 0, "{failed} cases failed:\n{output}");
        ensure!(ran >= LEAST_CASES, "only {ran} cases ran:\n{output}");
        Ok(format!("{ran} cases, 0 failed"))
    }

    fn generation(&mut self, environment: &str, layers: usize, tokens: usize) -> Result<String> {
        let ran = self.guest.run(&format!(
            "{environment} llama-completion -m /vgpu/model.gguf -ngl {layers} -n {tokens} --temp 0 --seed 1 -c 512 \
             -t 2 -no-cnv --no-warmup --ignore-eos --no-display-prompt -p '{PROMPT}' 2>/tmp/log; s=$?; \
             grep -i 'vgpu\\|error' /tmp/log | tail -n 5 >&2; exit $s"
        ))?;
        ran.good("llama-completion")
    }

    /// A generation through the plugin says what the CPU's says.
    pub(crate) fn generations(&mut self) -> Result<String> {
        let reference = self.generation("", 0, TOKENS)?;
        let ours = self.generation(WITH_VGPU, 99, TOKENS)?;
        let (reference, ours) = (text(&reference), text(&ours));
        ensure!(!reference.is_empty(), "the CPU generated nothing");
        ensure!(
            reference == ours,
            "the text parts from the CPU's:\n  CPU:   {reference:?}\n  VGPU0: {ours:?}"
        );
        // The plugin's own account: where its device was, and that graphs went there.
        let stats = self.guest.run("cat /tmp/stats")?.good("the statistics")?;
        ensure!(
            stats.contains("pci:0000:") && stats.contains("VGPU0"),
            "the generation did not use VGPU0:\n{stats}"
        );
        Ok(format!("{TOKENS} tokens equal, {} characters", ours.len()))
    }

    /// Executors that are killed in the middle of a generation.
    pub(crate) fn kills(&mut self, step: &Step) -> Result<String> {
        let reference = text(&self.generation("", 0, TOKENS)?);
        let mut in_time = 0;
        for count in 1..=KILLS {
            step.note(&format!("{count} of {KILLS}"));
            self.guest.start(&format!(
                "{WITH_VGPU} llama-completion -m /vgpu/model.gguf -ngl 99 -n 400 --temp 0 -c 512 -t 2 -no-cnv \
                 --no-warmup --ignore-eos -p '{PROMPT}' > /tmp/out 2>/tmp/err; echo $? > /tmp/status"
            ))?;
            // In the middle: it has begun to write.
            let wait = "i=0; while [ $(wc -c < /tmp/out) -lt 100 ] && [ ! -e /tmp/status ] && [ $i -lt 3000 ]; do \
                        usleep 100000; i=$((i+1)); done; wc -c < /tmp/out";
            self.guest.run(wait)?.good("waiting for a generation")?;
            self.served.kill(count)?;
            let end = self
                .guest
                .run(
                    "i=0; while [ ! -e /tmp/status ] && [ $i -lt 3000 ]; do usleep 100000; i=$((i+1)); done; \
                     cat /tmp/status; rm -f /tmp/status /tmp/out; grep -c lost /tmp/err",
                )?
                .output;
            let mut lines = end.lines().map(str::trim);
            let status: i32 = lines
                .next()
                .and_then(|line| line.parse().ok())
                .with_context(|| format!("kill {count}: the program hangs: {end}"))?;
            // 128 and more is a signal: a crash. 0 is a generation that was over before the kill.
            ensure!(
                status < 128,
                "kill {count}: the program ended with {status}: {}",
                self.guest.run("tail -n 20 /tmp/err")?.output
            );
            in_time += usize::from(status != 0);
        }
        ensure!(
            in_time * 2 > KILLS,
            "only {in_time} of {KILLS} kills came in the middle of a generation"
        );
        let after = text(&self.generation(WITH_VGPU, 99, TOKENS)?);
        ensure!(
            after == reference,
            "after {KILLS} kills the text parts from the CPU's:\n  CPU:   {reference:?}\n  VGPU0: {after:?}"
        );
        Ok(format!(
            "{in_time} errors in the guest, no crash, no hang; then {TOKENS} tokens equal"
        ))
    }

    /// Ends the guest and the executor.
    pub(crate) fn stop(self) -> Result<()> {
        drop(self.guest);
        self.served.stop()
    }
}

/// What a generation said: the output without the serial port's line ends.
fn text(output: &str) -> String {
    output.replace('\r', "").trim().to_owned()
}
