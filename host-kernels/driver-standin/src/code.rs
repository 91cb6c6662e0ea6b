//! Code for GPUs: a text that names kernels. The kernels themselves are those of the shim.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::LazyLock;

use crate::codes::{Answer, Code};

/// The first line of code.
pub(crate) const MAGIC: &str = "# code of the stand-in for NVIDIA's driver";

/// Registers and static shared memory of each kernel, as ptxas reports them (`report.json` of the
/// program `kernels` of `vgpu-cuda`): a line for each kernel, with `registers/bytes` for each
/// architecture of the first line. A kernel without an entry for an architecture has that of
/// sm_90a.
const RESOURCES: &str = include_str!("../resources.tsv");

/// What a kernel needs of an SM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resources {
    /// Registers of a thread.
    pub(crate) registers: u32,
    /// Bytes of static shared memory of a block.
    pub(crate) shared: u32,
}

/// A kernel that has no line in the table: one of the shim's own tests.
const UNKNOWN: Resources = Resources {
    registers: 32,
    shared: 0,
};

/// The resources of a kernel, compiled for an architecture.
pub(crate) fn resources(kernel: &str, architecture: &str) -> Resources {
    static TABLE: LazyLock<HashMap<(&str, &str), Resources>> = LazyLock::new(table);
    let own = TABLE.get(&(kernel, architecture));
    let found = own.or_else(|| TABLE.get(&(kernel, "sm_90a")));
    found.copied().unwrap_or(UNKNOWN)
}

fn table() -> HashMap<(&'static str, &'static str), Resources> {
    let mut lines = RESOURCES.lines().map(|line| line.split('\t'));
    let architectures: Vec<_> = lines
        .next()
        .map(|line| line.skip(1).collect())
        .unwrap_or_default();
    let mut table = HashMap::new();
    for mut line in lines {
        let kernel = line.next().unwrap_or_default();
        for (architecture, used) in architectures.iter().zip(line) {
            let numbers = used.split_once('/');
            let numbers = numbers.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
            if let Some((registers, shared)) = numbers {
                table.insert((kernel, *architecture), Resources { registers, shared });
            }
        }
    }
    table
}

/// A module: kernels for one architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Module {
    pub(crate) architecture: String,
    pub(crate) kernels: Vec<String>,
}

impl Module {
    /// The kernels of a source file, for an architecture.
    pub(crate) fn of_source(source: &str, architecture: &str) -> Module {
        let name = |line: &str| {
            let rest = line.strip_prefix("KERNEL(");
            let rest = rest.or_else(|| line.strip_prefix("KERNEL_AHEAD("))?;
            rest.split(',').next().map(str::to_owned)
        };
        Module {
            architecture: architecture.into(),
            kernels: source.lines().filter_map(name).collect(),
        }
    }

    /// The code.
    pub(crate) fn to_text(&self) -> String {
        let mut text = format!("{MAGIC}\narchitecture {}\n", self.architecture);
        for kernel in &self.kernels {
            let _ = writeln!(text, "kernel {kernel}"); // a String takes all
        }
        text
    }

    /// Reads code.
    ///
    /// # Errors
    /// `INVALID_IMAGE`.
    pub(crate) fn parse(text: &str) -> Answer<Module> {
        let parse = || -> Option<Module> {
            let mut lines = text.strip_prefix(MAGIC)?.trim().lines();
            let architecture = lines.next()?.strip_prefix("architecture ")?.to_owned();
            let kernels = lines.map(|line| line.strip_prefix("kernel ").map(str::to_owned));
            Some(Module {
                architecture,
                kernels: kernels.collect::<Option<_>>()?,
            })
        };
        parse().ok_or(Code::CUDA_ERROR_INVALID_IMAGE)
    }

    /// Checks that the code runs on a GPU: one of the same major and at least this minor compute
    /// capability, or the same one, if the code is for that alone (`sm_90a`). Source: CUDA C++
    /// programming guide, "Binary Compatibility".
    ///
    /// # Errors
    /// `NO_BINARY_FOR_GPU` if not.
    pub(crate) fn check_runs_on(&self, (major, minor): (u32, u32)) -> Answer {
        let number = self.architecture.strip_prefix("sm_").unwrap_or_default();
        let (number, is_alone) = match number.strip_suffix('a') {
            Some(number) => (number, true),
            None => (number, false),
        };
        let number: u32 = number.parse().map_err(|_| Code::CUDA_ERROR_INVALID_IMAGE)?;
        let code = (number / 10, number % 10);
        match code == (major, minor) || !is_alone && code.0 == major && code.1 <= minor {
            true => Ok(()),
            false => Err(Code::CUDA_ERROR_NO_BINARY_FOR_GPU),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_read_as_it_was_written() {
        let source = "KERNEL(vg_norm, VgNormParams, 256) {\nKERNEL_AHEAD(vg_rope, P, 128) {\n";
        let module = Module::of_source(source, "sm_90a");
        assert_eq!(module.kernels, ["vg_norm", "vg_rope"]);
        assert_eq!(Module::parse(&module.to_text()), Ok(module.clone()));
        let wrong = module.to_text().replace("kernel vg", "vg");
        assert_eq!(Module::parse(&wrong), Err(Code::CUDA_ERROR_INVALID_IMAGE));
    }

    #[test]
    fn code_runs_where_the_programming_guide_says() {
        let runs = |architecture: &str, on| Module::of_source("", architecture).check_runs_on(on);
        let no_binary = Err(Code::CUDA_ERROR_NO_BINARY_FOR_GPU);
        assert_eq!(runs("sm_80", (8, 9)), Ok(()));
        assert_eq!(runs("sm_89", (8, 0)), no_binary);
        assert_eq!(runs("sm_80", (9, 0)), no_binary);
        assert_eq!(runs("sm_90a", (9, 0)), Ok(()));
        assert_eq!(runs("sm_100a", (10, 3)), no_binary);
    }

    #[test]
    fn every_kernel_has_resources() {
        let table = table();
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../cuda/kernels");
        let mut count = 0;
        for entry in std::fs::read_dir(folder).expect("the kernels") {
            let source = std::fs::read_to_string(entry.expect("a file").path());
            for kernel in Module::of_source(&source.expect("text"), "sm_90a").kernels {
                let found = table.get(&(&*kernel, "sm_90a"));
                let found = found.unwrap_or_else(|| panic!("resources.tsv has no {kernel}"));
                assert!(found.registers >= 8, "{kernel}: {found:?}");
                count += 1;
            }
        }
        assert!(count > 200, "{count} kernels");
        assert_eq!(
            table.keys().filter(|(_, of)| *of == "sm_90a").count(),
            count
        );
    }
}
