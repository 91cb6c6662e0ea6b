//! Starts the CUDA engine, and keeps its tuning tables and the verdicts of the self-check.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use tracing::{info, warn};
use vgpu_cuda::autotune::{self, GemmVariant, TuningTable};
use vgpu_cuda::device::Device as _;
use vgpu_cuda::gpu::{Gpu, GpuError};
use vgpu_cuda::kernel_set::{KernelSet, UnknownKernel, names, parse_names};
use vgpu_cuda::verdict::Verdict;
use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_engine::{Engine, EngineError};
use vgpu_transport::lock::lock;

use super::error::StartError;
use super::kind::EngineKind;
use super::select::{ProbedDevice, ProbedKind};

/// Why a file cannot be written to the cache folder.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum KeepError {
    #[error("none of VGPU_CACHE, XDG_CACHE_HOME and HOME is set, so there is no cache folder")]
    NoFolder,
    #[error("writing {path}: {error}", path = path.display())]
    Write { path: PathBuf, error: io::Error },
}

/// The policy that the environment asks for.
pub fn launch_policy() -> LaunchPolicy {
    let is_set = |name, value| std::env::var_os(name).is_some_and(|set| set == value);
    LaunchPolicy {
        megakernel: is_set("VGPU_MEGAKERNEL", "on"),
        batch: is_set("VGPU_CUDA_BATCH", "on"),
        repack: !is_set("VGPU_REPACK", "off"),
        ..LaunchPolicy::default()
    }
}

/// The kernels that the environment disables (`VGPU_DISABLE`).
///
/// # Errors
/// [`UnknownKernel`] if a name is that of no kernel.
pub fn disabled_kernels() -> Result<Vec<&'static str>, UnknownKernel> {
    let list = std::env::var_os("VGPU_DISABLE").unwrap_or_default();
    parse_names(&list.to_string_lossy())
}

/// The kernels to use on a GPU: those that the self-check allows and that the environment does not
/// disable.
fn kernels_for(
    ordinal: u32,
    gpu: &Gpu,
    policy: LaunchPolicy,
) -> Result<Arc<KernelSet>, StartError> {
    let disabled = disabled_kernels().map_err(|error| StartError::Disable { ordinal, error })?;
    if !disabled.is_empty() {
        info!(
            "VGPU_DISABLE: these kernels are not used: {}",
            disabled.join(", ")
        );
    }
    let verdict = load_verdict(&fingerprint(gpu, policy));
    for (kernel, reason) in verdict.faulty() {
        warn!("the kernel {kernel} is not used: the self-check says that {reason}");
    }
    let unchecked = names().iter().filter(|name| {
        gpu.kernel(name).is_ok() && verdict.finding(name).is_none() && !verdict.allows(name)
    });
    let unchecked = unchecked.count();
    if unchecked > 0 {
        info!("{unchecked} kernels are not used, since the self-check has not found them right");
    }
    let is_left_out = |name: &str| disabled.contains(&name) || !verdict.allows(name);
    Ok(Arc::new(KernelSet::without(is_left_out)))
}

/// The GPUs that the driver names, which are not opened. At least one.
pub(super) fn list() -> Result<Vec<ProbedDevice>, StartError> {
    let ordinal = 0;
    let models = vgpu_cuda::gpu::models();
    let models = models.map_err(|error| StartError::Gpu { ordinal, error })?;
    let devices = (0..).zip(models).map(|(ordinal, model)| ProbedDevice {
        name: EngineKind::Cuda(ordinal).to_string(),
        description: model,
        kind: ProbedKind::Gpu,
    });
    Ok(devices.collect())
}

pub(super) fn start(ordinal: u32) -> Result<Arc<dyn Engine>, StartError> {
    start_with(ordinal, launch_policy())
}

/// The same engine as for [`EngineKind::Cuda`], with a CUDA graph for each
/// plan that runs a second time, however small it is.
///
/// # Errors
/// As [`start`](super::start).
pub fn cuda_for_single_nodes(ordinal: u32) -> Result<Arc<dyn Engine>, StartError> {
    start_with(ordinal, launch_policy().for_single_nodes())
}

fn start_with(ordinal: u32, policy: LaunchPolicy) -> Result<Arc<dyn Engine>, StartError> {
    let device = open_gpu(ordinal)?;
    let kernels = kernels_for(ordinal, &device, launch_policy())?;
    let engine = CudaEngine::with_kernels(device, policy, kernels)
        .map_err(|error| StartError::Cuda { ordinal, error })?;
    let table = kernel_cache().map(|cache| load_tuning(&cache, engine.description()));
    let engine = engine
        .with_tuning(table.unwrap_or_default())
        .with_reopen(move || {
            let failed = |error: GpuError| EngineError::Device {
                message: error.to_string(),
            };
            Ok(Arc::new(gpu(ordinal).map_err(failed)?))
        });
    Ok(Arc::new(engine))
}

/// A CUDA engine that uses one kind of matrix product, `variant`, wherever that kind applies.
///
/// # Errors
/// As [`start`](super::start).
pub fn cuda_forced(ordinal: u32, variant: GemmVariant) -> Result<CudaEngine, StartError> {
    let device = open_gpu(ordinal)?;
    let kernels = kernels_for(ordinal, &device, launch_policy())?;
    let engine = CudaEngine::with_kernels(device, LaunchPolicy::default(), kernels)
        .map_err(|error| StartError::Cuda { ordinal, error })?;
    Ok(engine.with_tuning(TuningTable::forced(variant)))
}

/// Opens a GPU. With `VGPU_KERNELS=general`, without the kernels for its own architecture.
///
/// # Errors
/// [`StartError::Gpu`] says what is missing or too old.
pub fn open_gpu(ordinal: u32) -> Result<Arc<Gpu>, StartError> {
    match gpu(ordinal) {
        Ok(gpu) => Ok(Arc::new(gpu)),
        Err(error) => Err(StartError::Gpu { ordinal, error }),
    }
}

/// The PCI address of a GPU, such as `0000:01:00.0`. Loads the driver, and opens nothing on the
/// GPU.
///
/// # Errors
/// [`StartError::Gpu`] says what is missing or too old.
pub fn gpu_address(ordinal: u32) -> Result<String, StartError> {
    let address = vgpu_cuda::gpu::address(ordinal);
    address.map_err(|error| StartError::Gpu { ordinal, error })
}

/// The tuning table of the device and kernels with this fingerprint ([`autotune::fingerprint`]).
fn tuning_file(cache: &Path, fingerprint: &str) -> PathBuf {
    cache.join(format!("tuning-{fingerprint}.txt"))
}

/// Reads the tuning table that `vgpu gpu-check tune` has written for a device, if there is one.
fn load_tuning(cache: &Path, device: &str) -> TuningTable {
    let fingerprint = autotune::fingerprint(device);
    let path = tuning_file(cache, &fingerprint);
    let Some(text) = kept(&path) else {
        return TuningTable::default();
    };
    match TuningTable::parse(&text, &fingerprint) {
        Ok(table) => {
            let count = table.len();
            info!("{count} tuning entries from {}", path.display());
            table
        }
        Err(reason) => {
            warn!("{} is not used: {reason}", path.display());
            TuningTable::default()
        }
    }
}

/// Writes the tuning table of a device to the cache folder. Returns the path of the file.
///
/// # Errors
/// [`KeepError`] if there is no cache folder or the file cannot be written.
pub fn save_tuning(device: &str, table: &TuningTable) -> Result<PathBuf, KeepError> {
    let fingerprint = autotune::fingerprint(device);
    keep(
        |cache| tuning_file(cache, &fingerprint),
        &table.to_text(&fingerprint),
    )
}

/// The text of a file of the cache folder, if it is there. The log says why it cannot be read.
fn kept(path: &Path) -> Option<String> {
    match std::fs::read_to_string(path) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => {
            warn!("{} is not used: {error}", path.display());
            None
        }
    }
}

/// Writes a file of the cache folder.
///
/// # Errors
/// As for [`save_tuning`].
fn keep(path_in: impl Fn(&Path) -> PathBuf, text: &str) -> Result<PathBuf, KeepError> {
    let cache = kernel_cache().ok_or(KeepError::NoFolder)?;
    let path = path_in(&cache);
    let part = path.with_extension(format!("{}.part", std::process::id()));
    // Written to a temporary file and renamed: another process may read the file at any time.
    let written = std::fs::create_dir_all(&cache)
        .and_then(|()| std::fs::write(&part, text))
        .and_then(|()| std::fs::rename(&part, &path));
    match written {
        Ok(()) => Ok(path),
        Err(error) => Err(KeepError::Write { path, error }),
    }
}

/// A hash of all that the results of kernels depend on: the GPU, its driver and the kernels
/// ([`Gpu::fingerprint`]), the number of SMs, the policy, and this program, which chooses kernels
/// and launches them.
pub fn fingerprint(gpu: &Gpu, policy: LaunchPolicy) -> String {
    static PROGRAM: OnceLock<String> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let hash = || -> io::Result<String> {
            let mut hasher = blake3::Hasher::new();
            hasher.update_reader(File::open("/proc/self/exe")?)?;
            Ok(hasher.finalize().to_string())
        };
        match hash() {
            Ok(hash) => hash,
            // Nothing but an update of the program is missed.
            Err(error) => format!("{}, {error}", env!("CARGO_PKG_VERSION")),
        }
    });
    let text = format!(
        "{}, {}, {}, {}, {}, {program}",
        gpu.fingerprint(),
        gpu.sm_count(),
        policy.megakernel,
        policy.repack,
        policy.batch,
    );
    blake3::hash(text.as_bytes()).to_hex()[..32].to_owned()
}

/// The verdicts that this process has saved, also if no file could be written.
static SAVED: Mutex<BTreeMap<String, Verdict>> = Mutex::new(BTreeMap::new());

/// The verdict about the device, driver and code with this [`fingerprint`].
fn verdict_file(cache: &Path, fingerprint: &str) -> PathBuf {
    cache.join(format!("verdict-{fingerprint}.txt"))
}

/// The verdict that the self-check has kept about the device, driver and code with this
/// [`fingerprint`], or an empty one.
pub fn load_verdict(fingerprint: &str) -> Verdict {
    let saved = lock(&SAVED).get(fingerprint).cloned();
    if let Some(verdict) = saved {
        return verdict;
    }
    kernel_cache().map_or_else(Verdict::default, |cache| verdict_in(&cache, fingerprint))
}

fn verdict_in(cache: &Path, fingerprint: &str) -> Verdict {
    let path = verdict_file(cache, fingerprint);
    let Some(text) = kept(&path) else {
        return Verdict::default();
    };
    Verdict::parse(&text, fingerprint).unwrap_or_else(|reason| {
        warn!("{} is not used: {reason}", path.display());
        Verdict::default()
    })
}

/// Keeps the verdict about a device for this process, and writes it to the cache folder. Returns
/// the path of the file.
///
/// # Errors
/// [`KeepError`] if there is no cache folder or the file cannot be written.
pub fn save_verdict(fingerprint: &str, verdict: &Verdict) -> Result<PathBuf, KeepError> {
    let mut saved = lock(&SAVED);
    saved.insert(fingerprint.to_owned(), verdict.clone());
    drop(saved);
    let path_in = |cache: &Path| verdict_file(cache, fingerprint);
    keep(path_in, &verdict.to_text(fingerprint))
}

/// The lock of the self-checks on this machine: of several executors, one checks at a time. `None`:
/// another one holds it.
///
/// # Errors
/// [`KeepError`] if there is no cache folder or the file of the lock cannot be written.
pub fn lock_verdicts() -> Result<Option<File>, KeepError> {
    let cache = kernel_cache().ok_or(KeepError::NoFolder)?;
    let path = cache.join("verdict.lock");
    let lock = || -> io::Result<Option<File>> {
        let file = File::create(&path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    };
    lock().map_err(|error| KeepError::Write { path, error })
}

/// Whether a verdict could be kept.
///
/// # Errors
/// [`KeepError`] if there is no cache folder or no file can be written there.
pub fn check_cache() -> Result<(), KeepError> {
    // About as long as a verdict is: a full disk has room for an empty file.
    let text = "-".repeat(16 << 10);
    let name = format!(".writable-{}", std::process::id());
    let path = keep(|cache| cache.join(&name), &text)?;
    std::fs::remove_file(&path).map_err(|error| KeepError::Write { path, error })
}

/// As [`open_gpu`].
fn gpu(ordinal: u32) -> Result<Gpu, GpuError> {
    let gpu = Gpu::new(ordinal, kernel_cache())?;
    Ok(match std::env::var_os("VGPU_KERNELS") {
        Some(which) if which == "general" => {
            info!("VGPU_KERNELS=general: no kernels for this GPU's architecture alone");
            gpu.with_general_kernels()
        }
        _ => gpu,
    })
}

/// The folder for compiled kernels, if the environment names one.
fn kernel_cache() -> Option<PathBuf> {
    let folder = |name| {
        std::env::var_os(name)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
    };
    let cache = folder("VGPU_CACHE")
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("ggml-vgpu")))
        .or_else(|| folder("HOME").map(|home| home.join(".cache/ggml-vgpu")));
    cache.map(|cache| cache.join("kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_cuda::verdict::Finding;
    use vgpu_transport::ir::Type;

    #[test]
    fn a_tuning_table_is_used_for_the_device_it_was_measured_on() {
        let folder = tempfile::tempdir().expect("a new folder");
        let cache = folder.path();
        assert!(load_tuning(cache, "a GPU").is_empty());
        let mut table = TuningTable::default();
        table.record(Type::Q4K, 4096, 512, GemmVariant::Wide);
        let file_of = |device| tuning_file(cache, &autotune::fingerprint(device));
        let text = table.to_text(&autotune::fingerprint("a GPU"));
        std::fs::write(file_of("a GPU"), &text).expect("a file");
        assert_eq!(load_tuning(cache, "a GPU"), table);
        assert!(load_tuning(cache, "another").is_empty());
        std::fs::write(file_of("another"), text).expect("a file");
        assert!(load_tuning(cache, "another").is_empty());
    }

    #[test]
    fn a_verdict_is_used_for_the_device_it_is_about() {
        let folder = tempfile::tempdir().expect("a new folder");
        let cache = folder.path();
        assert!(verdict_in(cache, "here").is_empty());
        let mut verdict = Verdict::default();
        verdict.record("vg_rope_rows", Finding::Faulty("it is off by 1".into()));
        let text = verdict.to_text("here");
        std::fs::write(verdict_file(cache, "here"), &text).expect("a file");
        assert_eq!(verdict_in(cache, "here"), verdict);
        assert!(verdict_in(cache, "there").is_empty());
        std::fs::write(verdict_file(cache, "there"), text).expect("a file");
        assert!(verdict_in(cache, "there").is_empty());
    }
}
