//! Compiles all CUDA kernels to machine code, for all architectures or for those named, and reports
//! the resources of each kernel. Needs NVRTC, but no GPU.
//!
//!     cargo run -p vgpu-cuda --bin kernels -- <folder of libnvrtc> <output> [sm_90a ...]
//!
//! `sm_80:norm` names one source file for one architecture. `kernels --list` prints all pairs.
//!
//! NVRTC compiles one program at a time in a process: each is compiled by a process of its own, as
//! many at once as there are cores.
//!
//! Writes `<source>.<architecture>.cubin`, which `VGPU_CUBINS=<output>` builds into a program,
//! and `report.json`. The folder `VGPU_KERNEL_CACHE` keeps machine code and compiler logs
//! by a hash of all inputs, so that only changed kernels are compiled. Fails if a kernel does not
//! compile or a hot kernel spills registers.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, io, slice, thread};

use vgpu_cuda::nvrtc::{CompileError, Nvrtc};
use vgpu_cuda::source::{ARCHITECTURES, SOURCES, Source};

/// Kernels that must not spill registers, because they run in every decode step. Kernels for
/// operands with unusual strides are not listed: they take any type and call a function for each
/// element.
const HOT: &[&str] = &[
    "vg_convert_f16",
    "vg_convert_f16_sm90",
    "vg_elementwise",
    "vg_moe_sort",
    "vg_norm",
    "vg_norm_fused",
    "vg_quantize_q8",
    "vg_rope",
    "vg_rope_rows",
    "vg_topk_moe",
    "vg_set_rows",
    "vg_soft_max",
    "vg_weighted_sum",
];

/// More of these kernels, by prefix.
const HOT_FAMILIES: &[&str] = &["vg_fattn_", "vg_gemm_", "vg_mmv_"];

/// The fallback for any type and layout, which calls a function for each element, and may spill.
const FALLBACK: &str = "vg_fattn_simt";

fn is_hot(kernel: &str) -> bool {
    HOT.contains(&kernel)
        || kernel != FALLBACK && HOT_FAMILIES.iter().any(|family| kernel.starts_with(family))
}

/// The most bytes that a hot kernel may spill: 0 on architectures that it was tuned for. For newer
/// ones ptxas spills a few words although registers are left.
fn most_spilled(arch: &str) -> u32 {
    match arch {
        "sm_80" | "sm_89" | "sm_90a" => 0,
        _ => 16,
    }
}

/// The resources of a kernel, as ptxas reports them.
#[derive(Debug, Default, Clone)]
struct Use {
    registers: u32,
    shared: u32,
    stack: u32,
    /// Bytes of registers that are stored. The bytes that ptxas says are loaded count a register
    /// once for each instruction that loads it.
    spilled: u32,
}

/// Why this program fails.
#[derive(Debug, thiserror::Error)]
enum KernelsError {
    #[error(
        "usage: kernels --list | <folder of libnvrtc> <output folder> [sm_90a | sm_80:norm ...]"
    )]
    Usage,
    #[error("no source is compiled for {0}; --list names all")]
    NoSuchPair(String),
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The standard error of the process that has compiled one pair.
    #[error("{0}")]
    Process(String),
    /// A line of a compiler's log that says that a kernel is slow.
    #[error("{0}")]
    SlowCode(String),
    #[error("{reported} kernels reported, not {expected}")]
    Count { reported: usize, expected: usize },
    #[error("hot kernels spill registers: {0}")]
    Spills(String),
}

/// Adds the path to the error of an operation on a file or folder.
fn at(path: &Path) -> impl Fn(io::Error) -> KernelsError {
    let path = path.to_owned();
    move |error| KernelsError::Io {
        path: path.clone(),
        error,
    }
}

/// Compiles one pair: the argument that this program gives itself.
const COMPILE: &str = "--compile";

/// A source file, and an architecture that it is compiled for.
type Pair = (&'static Source, &'static str);

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let outcome = match arguments.as_slice() {
        [option] if option == "--list" => {
            pairs().for_each(|(source, arch)| println!("{arch}:{}", source.name));
            Ok(())
        }
        [option, nvrtc, cache, pair] if option == COMPILE => selection(slice::from_ref(pair))
            .and_then(|work| compile_into(Path::new(nvrtc), Path::new(cache), &work)),
        [nvrtc, out, named @ ..] => {
            selection(named).and_then(|work| run(Path::new(nvrtc), Path::new(out), &work))
        }
        _ => Err(KernelsError::Usage),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Every source file with every architecture that it is for.
fn pairs() -> impl Iterator<Item = Pair> {
    SOURCES.iter().flat_map(|source| {
        let archs = ARCHITECTURES.iter().copied();
        archs
            .filter(|arch| source.is_for(arch))
            .map(move |arch| (source, arch))
    })
}

/// The pairs that are named, as an architecture or as `architecture:source`. No name: all.
///
/// # Errors
/// [`KernelsError::NoSuchPair`] if a name is that of no pair.
fn selection(named: &[String]) -> Result<Vec<Pair>, KernelsError> {
    let is = |name: &String, (source, arch): &Pair| match name.split_once(':') {
        None => name == arch,
        Some((of, file)) => of == *arch && file == source.name,
    };
    for name in named {
        if !pairs().any(|pair| is(name, &pair)) {
            return Err(KernelsError::NoSuchPair(name.clone()));
        }
    }
    Ok(pairs()
        .filter(|pair| named.is_empty() || named.iter().any(|name| is(name, pair)))
        .collect())
}

fn run(nvrtc: &Path, out: &Path, work: &[Pair]) -> Result<(), KernelsError> {
    let version = Nvrtc::load(Some(nvrtc))?.version();
    fs::create_dir_all(out).map_err(at(out))?;
    let names: BTreeSet<String> = { work.iter() }
        .map(|(source, arch)| cubin_name(source, arch))
        .collect();
    // Code of an earlier run, for sources that are gone, would be built into programs.
    for entry in fs::read_dir(out).map_err(at(out))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".cubin") && !names.contains(&name) {
            fs::remove_file(entry.path()).map_err(at(&entry.path()))?;
        }
    }
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some((source, arch)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let compiled = compile(nvrtc, version, (*source, *arch), out);
                    println!("{}.cu for {arch}", source.name);
                    let mut results = results.lock().expect("nobody panics with it");
                    results.push((*arch, compiled));
                }
            });
        }
    });

    let mut rows = Vec::new();
    let results = results.into_inner().expect("nobody panics with it");
    for (arch, compiled) in results {
        let log = compiled?;
        // ptxas serialises `wgmma` instructions if it cannot analyse their registers, and ignores
        // `setmaxnreg` if it does not know the register count. Both make kernels slow.
        let complaint =
            { log.lines() }.find(|line| line.contains("serializ") || line.contains("setmaxnreg"));
        if let Some(line) = complaint {
            return Err(KernelsError::SlowCode(line.to_owned()));
        }
        for (kernel, used) in uses(&log) {
            rows.push((kernel, arch, used));
        }
    }
    rows.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
    let (reported, expected) = (rows.len(), {
        let sources = work.iter().map(|(source, _)| source);
        sources.map(|source| source.kernels().count()).sum()
    });
    if reported != expected {
        return Err(KernelsError::Count { reported, expected });
    }
    let report = out.join("report.json");
    fs::write(&report, json(&rows)).map_err(at(&report))?;
    println!("kernel                    architecture  registers  shared  stack  spilled");
    for (kernel, arch, used) in &rows {
        let Use {
            registers,
            shared,
            stack,
            spilled,
        } = used;
        println!("{kernel:25} {arch:12} {registers:10} {shared:7} {stack:6} {spilled:8}");
    }
    let spilling = rows
        .iter()
        .filter(|(kernel, arch, used)| is_hot(kernel) && used.spilled > most_spilled(arch))
        .map(|(kernel, arch, used)| format!("{kernel} ({arch}: {} bytes)", used.spilled))
        .collect::<Vec<_>>();
    if spilling.is_empty() {
        let archs: BTreeSet<&str> = work.iter().map(|(_, arch)| *arch).collect();
        println!("{expected} kernels for {} architectures", archs.len());
        Ok(())
    } else {
        Err(KernelsError::Spills(spilling.join(", ")))
    }
}

/// Writes the machine code of a file to the output folder, from the cache or compiled. Returns the
/// compiler's log.
fn compile(
    nvrtc: &Path,
    version: (i32, i32),
    (source, arch): Pair,
    out: &Path,
) -> Result<String, KernelsError> {
    let cache = env::var_os("VGPU_KERNEL_CACHE").map_or_else(|| out.join("cache"), PathBuf::from);
    let name = source.code_name(arch, version);
    let kept = |kind: &str| cache.join(format!("{name}.{kind}"));
    let cubin = out.join(cubin_name(source, arch));
    let failed = at(out);
    // The log is written last, so a log implies the code.
    if !kept("log").exists() {
        let mut compiler = Command::new(env::current_exe().map_err(&failed)?);
        compiler.arg(COMPILE).arg(nvrtc).arg(&cache);
        let ended =
            { compiler.arg(format!("{arch}:{}", source.name)).output() }.map_err(&failed)?;
        if !ended.status.success() {
            let message = String::from_utf8_lossy(&ended.stderr);
            return Err(KernelsError::Process(message.into_owned()));
        }
    }
    let code = fs::read(kept("cubin")).map_err(&failed)?;
    // Cargo compiles the engine again for a file that is newer.
    if fs::read(&cubin).ok().as_ref() != Some(&code) {
        fs::write(&cubin, code).map_err(&failed)?;
    }
    fs::read_to_string(kept("log")).map_err(&failed)
}

/// The name of the file with the code of a pair.
fn cubin_name(source: &Source, arch: &str) -> String {
    format!("{}.{arch}.cubin", source.name)
}

/// Compiles pairs in this process, and keeps their machine code and logs in the cache.
fn compile_into(nvrtc: &Path, cache: &Path, work: &[Pair]) -> Result<(), KernelsError> {
    let nvrtc = Nvrtc::load(Some(nvrtc))?;
    fs::create_dir_all(cache).map_err(at(cache))?;
    for (source, arch) in work {
        let compiled = nvrtc.compile(source, arch)?;
        let name = source.code_name(arch, nvrtc.version());
        let kept = |kind: &str| cache.join(format!("{name}.{kind}"));
        for (kind, bytes) in [
            ("cubin", &compiled.cubin[..]),
            ("log", compiled.log.as_bytes()),
        ] {
            // Other processes may write the same file, so it appears complete or not at all.
            let part = kept(&format!("{kind}.{}", std::process::id()));
            fs::write(&part, bytes).map_err(at(&part))?;
            fs::rename(&part, kept(kind)).map_err(at(&part))?;
        }
    }
    Ok(())
}

/// The resources of each kernel, from a log of ptxas.
fn uses(log: &str) -> HashMap<String, Use> {
    let mut all = HashMap::new();
    let mut kernel = String::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            continue;
        }
        let used: &mut Use = match line {
            _ if kernel.is_empty() => continue,
            _ if line.contains("stack frame") || line.contains("Used ") => {
                all.entry(kernel.clone()).or_default()
            }
            _ => continue,
        };
        // A number precedes its unit: "16 bytes stack frame, 24 bytes spill stores".
        let number = |what: &str| -> u32 {
            let before = line
                .split(what)
                .next()
                .filter(|before| before.len() < line.len());
            let last = before.and_then(|before| before.rsplit([' ', ',']).find(|w| !w.is_empty()));
            last.and_then(|word| word.parse().ok()).unwrap_or(0)
        };
        if line.contains("stack frame") {
            // The lines are about the kernel, then about functions that it calls.
            used.stack = used.stack.max(number(" bytes stack frame"));
            used.spilled = used.spilled.max(number(" bytes spill stores"));
        } else {
            used.registers = number(" registers");
            used.shared = number(" bytes smem");
        }
    }
    all
}

fn json(rows: &[(String, &str, Use)]) -> String {
    let objects: Vec<String> = rows
        .iter()
        .map(|(kernel, arch, used)| {
            format!(
                "  {{\"kernel\": \"{kernel}\", \"arch\": \"{arch}\", \"registers\": {}, \
                 \"shared\": {}, \"stack\": {}, \"spilled\": {}}}",
                used.registers, used.shared, used.stack, used.spilled
            )
        })
        .collect();
    format!("[\n{}\n]\n", objects.join(",\n"))
}
