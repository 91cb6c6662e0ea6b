//! Tests in a guest, for each link to the executor.

use anyhow::{Context as _, Result, ensure};

use vgpu_gguf::Rng;

use super::guest::Guest;
use crate::ops::draw;

/// Operators of language models whose cases are fast on an emulated CPU.
const OPS: [&str; 13] = [
    "RMS_NORM", "NORM", "SOFT_MAX", "SWIGLU", "GEGLU", "SCALE", "SUM_ROWS", "ARGMAX", "CLAMP",
    "SQR", "SILU", "GELU", "REPEAT",
];
/// The common types of weights, whose small products run.
const TYPES: [&str; 9] = [
    "f32", "f16", "bf16", "q4_0", "q8_0", "q4_K", "q5_K", "q6_K", "iq4_xs",
];

/// The minimum number of cases of all operators and types. Fewer means that some were not run.
const MIN_CASES: usize = 500;

/// Cases of test-backend-ops for a guest.
#[derive(Clone, Debug)]
pub(crate) struct GuestOps {
    ops: Vec<&'static str>,
    types: Vec<&'static str>,
}

impl GuestOps {
    /// Every operator and type that an emulated CPU is fast enough for.
    pub(crate) fn all() -> GuestOps {
        GuestOps {
            ops: OPS.to_vec(),
            types: TYPES.to_vec(),
        }
    }

    /// Two of the operators and two of the types.
    pub(crate) fn sample(rng: &mut Rng) -> GuestOps {
        let mut sample = GuestOps::all();
        draw(&mut sample.ops, 2, rng);
        draw(&mut sample.types, 2, rng);
        sample
    }

    /// The parameters of the small products, as a regular expression.
    fn products(&self) -> String {
        let types = self.types.join("|");
        format!("type_a=({types}),type_b=f32,m=16,n=[1-9],k=256,bs=.[12],1.")
    }
}

/// Tokens of a compared generation.
pub(super) const TOKENS: usize = 24;
/// Contains no quotation marks, since the shell would interpret them.
pub(super) const PROMPT: &str =
    "A virtual machine has no graphics processor of its own. It asks its host for one";

/// The user of a program in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum As {
    Root,
    /// A user in the group vgpu only.
    User,
}

/// How a program of the guest finds its executor, and its user.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way<'a> {
    /// `VGPU_ENDPOINT` and the other variables of the link.
    pub(super) environment: &'a str,
    /// The start of the link's name.
    pub(super) link: &'a str,
    pub(super) who: As,
}

impl Way<'_> {
    /// The shell line for a command, which contains no single quotes.
    fn command(&self, command: &str) -> String {
        let environment = self.environment;
        match self.who {
            As::Root => format!("{environment} {command}"),
            As::User => format!("{environment} su -s /bin/sh user -c '{command}'"),
        }
    }

    /// The file for the statistics of the programs.
    fn stats(&self) -> &'static str {
        match self.who {
            As::Root => "/tmp/stats",
            As::User => "/tmp/stats-of-user",
        }
    }
}

impl Guest {
    /// `vgpu doctor` reports no failure.
    pub(super) fn doctor(&mut self, way: &Way<'_>) -> Result<String> {
        let output = self.ask_doctor(way)?.good("vgpu doctor")?;
        let lines = output
            .lines()
            .filter(|line| line.starts_with("ok "))
            .count();
        ensure!(lines > 0, "vgpu doctor printed nothing:\n{output}");
        Ok(format!("{lines} checks"))
    }

    /// `vgpu doctor` reports the failure `wanted`.
    pub(super) fn doctor_finds(&mut self, way: &Way<'_>, wanted: &str) -> Result<()> {
        let ran = self.ask_doctor(way)?;
        ensure!(
            ran.status != 0 && ran.output.contains(wanted),
            "`vgpu doctor` ended with {} and did not report {wanted:?}:\n{}",
            ran.status,
            ran.output
        );
        Ok(())
    }

    fn ask_doctor(&mut self, way: &Way<'_>) -> Result<super::guest::Ran> {
        self.run(
            &way.command(
                "vgpu doctor --plugin /vgpu/libggml-vgpu.so --ggml /llama/libggml-base.so.0",
            ),
        )
    }

    /// Cases of test-backend-ops on VGPU0. Each operator and each type has at least one.
    pub(super) fn ops(&mut self, way: &Way<'_>, cases: &GuestOps) -> Result<String> {
        let environment = way.environment;
        let (ops, products) = (cases.ops.join(","), cases.products());
        let kinds: Vec<String> = { cases.ops.iter() }
            .map(|op| format!("{op}("))
            .chain({ cases.types.iter() }.map(|ty| format!("MUL_MAT(type_a={ty},")))
            .collect();
        let each: String = { kinds.iter() }
            .map(|start| format!("grep -c '^ *{start}.*): .*OK' /tmp/ops; "))
            .collect();
        let output = self
            .run(&format!(
                "export {PLUGIN} {environment}; (test-backend-ops test -b VGPU0 -o {ops} && \
                 test-backend-ops test -b VGPU0 -o MUL_MAT -p '{products}') > /tmp/ops 2>&1; \
                 echo status $?; {each}grep -c FAIL /tmp/ops; \
                 grep -m5 FAIL /tmp/ops; tail -n 3 /tmp/ops"
            ))?
            .output;
        let lines: Vec<&str> = output.lines().map(str::trim).collect();
        ensure!(
            lines.first() == Some(&"status 0"),
            "test-backend-ops failed:\n{output}"
        );
        let counts = (1..kinds.len() + 2)
            .map(|i| lines.get(i).copied().unwrap_or_default().parse::<usize>())
            .collect::<Result<Vec<_>, _>>()
            .with_context(|| format!("the guest's output:\n{output}"))?;
        let (ran, failed) = (&counts[..kinds.len()], counts[kinds.len()]);
        ensure!(failed == 0, "{failed} cases failed:\n{output}");
        for (kind, &ran) in kinds.iter().zip(ran) {
            ensure!(ran > 0, "no case of {kind}...) ran:\n{output}");
        }
        let is_complete = cases.ops.len() == OPS.len() && cases.types.len() == TYPES.len();
        let all: usize = ran.iter().sum();
        ensure!(
            !is_complete || all >= MIN_CASES,
            "only {all} cases ran:\n{output}"
        );
        Ok(format!(
            "{all} cases, 0 failed; {} and products with {}",
            cases.ops.join(", "),
            cases.types.join(", ")
        ))
    }

    /// The text of the model on the guest's CPU.
    pub(super) fn reference(&mut self) -> Result<String> {
        let text = self.complete(&format!("{} -ngl 0 -n {TOKENS}", completion()))?;
        ensure!(!text.is_empty(), "the CPU generated nothing");
        Ok(text)
    }

    /// A generation through the plugin has the same text as one on the CPU.
    pub(super) fn generation(&mut self, way: &Way<'_>, reference: &str) -> Result<String> {
        let stats = way.stats();
        let ours = way.command(&format!(
            "{PLUGIN} VGPU_STATS={stats} {} -ngl 99 -n {TOKENS}",
            completion()
        ));
        let ours = self.complete(&ours)?;
        ensure!(
            reference == ours,
            "the text differs from the CPU's:\n  CPU:   {reference:?}\n  VGPU0: {ours:?}"
        );
        // The plugin's statistics show the link of its device, and that graphs ran on it.
        let stats = self
            .run(&format!("cat {stats}; rm {stats}"))?
            .good("the statistics")?;
        ensure!(
            stats.contains(way.link) && stats.contains("VGPU0"),
            "the generation did not use VGPU0:\n{stats}"
        );
        Ok(format!("{TOKENS} tokens equal, {} characters", ours.len()))
    }

    fn complete(&mut self, command: &str) -> Result<String> {
        let ran = self.run(&format!(
            "{command} 2>/tmp/log && exit; s=$?; grep -i 'vgpu\\|error' /tmp/log | tail -n 5 >&2; \
             exit $s"
        ))?;
        // Without the carriage returns of the serial port.
        Ok(ran
            .good("llama-completion")?
            .replace('\r', "")
            .trim()
            .to_owned())
    }
}

/// The environment in which programs of the guest load the plugin.
pub(super) const PLUGIN: &str = "GGML_BACKEND_PATH=/vgpu/libggml-vgpu.so";

/// A program that generates text, up to the options for the device and the number of tokens.
fn completion() -> String {
    format!(
        "llama-completion -m /vgpu/model.gguf --temp 0 --seed 1 -c 512 -t 2 -no-cnv --no-warmup \
         --ignore-eos --no-display-prompt -p \"{PROMPT}\""
    )
}
