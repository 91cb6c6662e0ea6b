//! Chooses an engine where the operator leaves the choice: `auto`, and `ggml` without a path.
#![forbid(unsafe_code)]

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tracing::{info, warn};
use vgpu_transport::link::pci::discover as pci;
use vgpu_transport::wire::MAX_DEVICES;

use super::discover::{self, BACKEND_PATH, Search};
use super::error::{ProbeError, StartError};
use super::kind::{EngineKind, GgmlBackend};
use super::list::EngineList;

/// A device of an engine that was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbedDevice {
    /// The engine's name of the device, such as `Vulkan0`.
    pub name: String,
    /// The model, for people.
    pub description: String,
    /// What the device is.
    pub kind: ProbedKind,
}

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProbedKind {
    /// A GPU with memory of its own.
    Gpu,
    /// A GPU that uses the memory of the host.
    IntegratedGpu,
    /// No GPU.
    Other,
}

/// Tries an engine: its devices, or why it cannot be used.
pub type Probe<'a> = dyn Fn(&EngineKind) -> Result<Vec<ProbedDevice>, ProbeError> + 'a;

/// The chosen engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// The engines, in the order of their devices: at least one, none twice, and none that stands
    /// for others (`auto`, `ggml` without a path, `all`).
    pub engines: Vec<EngineKind>,
    /// The GPU of this machine that the choice leaves unused, and why, for people.
    pub unused_gpu: Option<String>,
}

impl Selection {
    /// Whether an engine has a driver: all do but the CPU engine.
    pub fn has_driver(&self) -> bool {
        self.engines.iter().any(|kind| *kind != EngineKind::Cpu)
    }

    /// The names of the engines, for people.
    pub fn names(&self) -> String {
        let names: Vec<String> = self.engines.iter().map(EngineKind::to_string).collect();
        names.join(", ")
    }
}

/// Chooses the engines for `wanted`. `guests_may_end_it`: whether an engine may be one that a guest
/// can end ([`EngineKind::needs_trust`]). The log says what was found, refused and taken.
///
/// # Errors
/// [`StartError::NoBackend`] if `ggml` is wanted and no backend of a GPU can be used,
/// [`StartError::All`] if all devices are wanted and there is none, [`StartError::Twice`] and
/// [`StartError::TooMany`]. `auto` does not fail: it chooses the CPU engine if there is no other.
pub fn select(
    wanted: &EngineList,
    guests_may_end_it: bool,
    probe: &Probe<'_>,
) -> Result<Selection, StartError> {
    let mut engines = Vec::new();
    let mut unused_gpu = None;
    for kind in wanted.kinds() {
        match kind {
            EngineKind::AnyGgml => engines.extend(any_ggml(&discover::search(), probe)?),
            EngineKind::Auto => {
                let gpus = gpus(Path::new(pci::SYSFS));
                let chosen = auto(&discover::search(), &gpus, guests_may_end_it, probe);
                engines.extend(chosen.engines);
                unused_gpu = unused_gpu.or(chosen.unused_gpu);
            }
            EngineKind::AllCuda => engines.extend(cuda_engines(&listed(kind, probe)?)),
            EngineKind::AllGgml(path) => {
                let devices = listed(kind, probe)?;
                let gpus = gpus_of_ggml(&devices);
                if gpus.is_empty() {
                    let reason = ProbeError::Refused("it has no GPU".to_owned());
                    let engine = kind.clone();
                    return Err(StartError::All { engine, reason });
                }
                engines.extend(gpus.into_iter().map(|gpu| ggml_engine(path, gpu)));
            }
            named => engines.push(named.clone()),
        }
    }
    for (at, engine) in engines.iter().enumerate() {
        if engines[..at].contains(engine) {
            let engine = engine.clone();
            return Err(StartError::Twice { engine });
        }
    }
    match u32::try_from(engines.len()) {
        Ok(1..=MAX_DEVICES) => Ok(Selection {
            engines,
            unused_gpu,
        }),
        _ => Err(StartError::TooMany {
            count: engines.len(),
        }),
    }
}

/// What an engine that stands for several lists.
fn listed(kind: &EngineKind, probe: &Probe<'_>) -> Result<Vec<ProbedDevice>, StartError> {
    probe(kind).map_err(|reason| StartError::All {
        engine: kind.clone(),
        reason,
    })
}

/// The engines of the GPUs that the driver names.
fn cuda_engines(listed: &[ProbedDevice]) -> impl Iterator<Item = EngineKind> {
    (0..)
        .zip(listed)
        .map(|(ordinal, _)| EngineKind::Cuda(ordinal))
}

/// The GPUs of a backend: those with memory of their own, or else the first one that
/// uses the memory of the host.
fn gpus_of_ggml(devices: &[ProbedDevice]) -> Vec<&ProbedDevice> {
    let of_kind = |kind| devices.iter().filter(move |device| device.kind == kind);
    let mut gpus: Vec<&ProbedDevice> = of_kind(ProbedKind::Gpu).collect();
    if gpus.is_empty() {
        gpus.extend(of_kind(ProbedKind::IntegratedGpu).next());
    }
    gpus
}

/// The engine over a device of a backend.
fn ggml_engine(path: &Path, device: &ProbedDevice) -> EngineKind {
    EngineKind::Ggml(GgmlBackend {
        path: path.to_owned(),
        device: Some(device.name.clone()),
    })
}

/// Whether the text about an unused GPU ([`Selection::unused_gpu`]) is about one of NVIDIA: on
/// every other, the CUDA engine never runs.
pub fn is_of_nvidia(unused_gpu: &str) -> bool {
    let (gpu, _) = unused_gpu.split_once(UNUSED).unwrap_or((unused_gpu, ""));
    gpu.starts_with("cuda:") || gpu.contains("(NVIDIA, ")
}

/// What follows the name of an unused GPU. The reason is behind it.
const UNUSED: &str = " is not used: ";

/// Why the CUDA engine is not chosen.
struct NoCuda {
    /// The first GPU that the driver names, for people. Where no PCI device is to be seen, as in
    /// WSL and some containers, nothing else names it.
    gpu: Option<String>,
    reason: ProbeError,
}

/// The CUDA engine on each GPU where it starts, with a text about the first one where it does not.
///
/// # Errors
/// Why it starts on none.
fn auto_cuda(probe: &Probe<'_>) -> Result<Selection, NoCuda> {
    let listed = probe(&EngineKind::AllCuda).map_err(|reason| NoCuda { gpu: None, reason })?;
    let mut engines = Vec::new();
    let mut refused = None;
    for (cuda, device) in cuda_engines(&listed).zip(&listed) {
        // All that refuses the CUDA engine (a kernel that is not trusted, a GPU that is too old) is
        // an error here, and leads on to the next engine.
        info!("auto: trying the engine {cuda}");
        match probe(&cuda) {
            Ok(devices) => {
                let device = devices.first().map_or("", |device| &device.description);
                info!("auto: the engine {cuda} ({device})");
                engines.push(cuda);
            }
            Err(reason) => {
                info!("auto: the engine {cuda} is refused: {reason}");
                let gpu = format!("{cuda} ({})", device.description);
                refused.get_or_insert((gpu, reason));
            }
        }
    }
    match (engines.is_empty(), refused) {
        (true, Some((gpu, reason))) => Err(NoCuda {
            gpu: Some(gpu),
            reason,
        }),
        (true, None) => Err(NoCuda {
            gpu: None,
            reason: ProbeError::Refused("the driver names no GPU".to_owned()),
        }),
        (false, refused) => {
            let unused_gpu = refused.map(|(gpu, reason)| {
                let text = format!("{gpu}{UNUSED}{reason}");
                warn!("auto: the GPU {text}");
                text
            });
            Ok(Selection {
                engines,
                unused_gpu,
            })
        }
    }
}

/// The CUDA engine, else a backend of ggml, else the CPU engine.
fn auto(
    search: &Search,
    gpus: &[HostGpu],
    guests_may_end_it: bool,
    probe: &Probe<'_>,
) -> Selection {
    let NoCuda {
        gpu: named,
        reason: no_cuda,
    } = match auto_cuda(probe) {
        Ok(selection) => return selection,
        Err(no_cuda) => no_cuda,
    };
    let no_ggml = match guests_may_end_it {
        true => match any_ggml(search, probe) {
            Ok(engines) => {
                let selection = Selection {
                    engines,
                    unused_gpu: None,
                };
                let names = selection.names();
                info!("auto: the engine {names}, because {no_cuda}");
                return selection;
            }
            Err(reason) => reason.to_string(),
        },
        false => match search.backends.first() {
            Some(found) => format!(
                "{} is not tried: a guest could end the process of all guests, which --isolate or \
                 --trust-guests allows",
                found.display()
            ),
            None => "there is no backend library of ggml for a GPU".to_owned(),
        },
    };
    // Of an integrated GPU beside an NVIDIA one nobody expects much.
    let of_nvidia = { gpus.iter() }
        .find(|gpu| gpu.vendor == Vendor::Nvidia)
        .map(HostGpu::to_string)
        .or(named);
    let unused_gpu = match (of_nvidia, gpus.first()) {
        (Some(gpu), _) => Some(format!("{gpu}{UNUSED}{no_cuda}; {no_ggml}")),
        (None, Some(gpu)) => Some(format!("{gpu}{UNUSED}{no_ggml}")),
        (None, None) => None,
    };
    let is_of_nvidia = unused_gpu.as_deref().is_some_and(is_of_nvidia);
    let is_expected = is_of_nvidia || !search.backends.is_empty();
    match &unused_gpu {
        Some(text) if is_expected => warn!("auto: the engine cpu; the GPU {text}"),
        Some(text) => info!("auto: the engine cpu; the GPU {text}"),
        None => info!("auto: the engine cpu, because {no_cuda}; {no_ggml}"),
    }
    Selection {
        engines: vec![EngineKind::Cpu],
        unused_gpu,
    }
}

/// The GPUs of the first backend of ggml that has one. At least one.
fn any_ggml(search: &Search, probe: &Probe<'_>) -> Result<Vec<EngineKind>, StartError> {
    let mut refused = Vec::new();
    let mut refuse = |path: &Path, reason: &str| {
        let path = path.display().to_string();
        let text = match reason.contains(&path) {
            true => reason.to_owned(),
            false => format!("{path}: {reason}"),
        };
        info!("a backend of ggml is refused: {text}");
        refused.push(text);
    };
    if let Some(path) = &search.refused {
        refuse(path, &format!("{BACKEND_PATH} names no backend of a GPU"));
    }
    for (at, path) in search.backends.iter().enumerate() {
        let backend = GgmlBackend {
            path: path.clone(),
            device: None,
        };
        let devices = match probe(&EngineKind::Ggml(backend)) {
            Ok(devices) => devices,
            Err(reason) => {
                refuse(path, &reason.to_string());
                continue;
            }
        };
        let gpus = gpus_of_ggml(&devices);
        if gpus.is_empty() {
            refuse(path, &format!("no GPU among its {} devices", devices.len()));
            continue;
        }
        for gpu in &gpus {
            info!(
                "the backend of ggml {} is taken: device {} ({})",
                path.display(),
                gpu.name,
                gpu.description
            );
        }
        for path in &search.backends[at + 1..] {
            info!(
                "the backend of ggml {} is found and not tried",
                path.display()
            );
        }
        return Ok(gpus.into_iter().map(|gpu| ggml_engine(path, gpu)).collect());
    }
    Err(StartError::NoBackend {
        places: search.places.clone(),
        refused,
    })
}

/// Who makes a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Vendor {
    Nvidia,
    Amd,
    Intel,
}

/// A GPU of this machine, by its PCI description.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HostGpu {
    vendor: Vendor,
    id: (u16, u16),
    address: pci::Address,
}

impl fmt::Display for HostGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (vendor, device) = self.id;
        let maker = match self.vendor {
            Vendor::Nvidia => "NVIDIA",
            Vendor::Amd => "AMD",
            Vendor::Intel => "Intel",
        };
        write!(f, "{} ({maker}, {vendor:04x}:{device:04x})", self.address)
    }
}

/// The GPUs that programs of this machine can use, as the kernel lists them.
fn gpus(sysfs: &Path) -> Vec<HostGpu> {
    const DISPLAY: u32 = 0x03;
    const ACCELERATOR: u32 = 0x12;
    let devices = pci::all(sysfs).into_iter();
    let usable = devices.filter(|device| {
        // Our own function is a guest's view of a GPU elsewhere. VFIO gives a device to a virtual
        // machine.
        matches!(device.class >> 16, DISPLAY | ACCELERATOR)
            && device.kind != pci::PciDeviceKind::Vgpu
            && !{ device.driver.as_deref() }.is_some_and(|driver| driver.contains("vfio"))
    });
    usable
        .filter_map(|device| {
            let vendor = match device.id.0 {
                0x10de => Vendor::Nvidia,
                0x1002 => Vendor::Amd,
                0x8086 => Vendor::Intel,
                // Others, such as the display of a management controller, compute nothing.
                _ => return None,
            };
            Some(HostGpu {
                vendor,
                id: device.id,
                address: device.address,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::path::PathBuf;

    use super::*;

    fn device(name: &str, kind: ProbedKind) -> ProbedDevice {
        ProbedDevice {
            name: name.into(),
            description: format!("model of {name}"),
            kind,
        }
    }

    fn refused(reason: &str) -> ProbeError {
        ProbeError::Refused(reason.to_owned())
    }

    fn found(backends: &[&str]) -> Search {
        Search {
            places: vec!["/usr/lib/ollama".into(), "/app".into()],
            backends: backends.iter().map(PathBuf::from).collect(),
            refused: None,
        }
    }

    fn ggml(path: &str, device: &str) -> EngineKind {
        EngineKind::Ggml(GgmlBackend {
            path: path.into(),
            device: Some(device.into()),
        })
    }

    const NVIDIA: HostGpu = HostGpu {
        vendor: Vendor::Nvidia,
        id: (0x10de, 0x2335),
        address: pci::Address {
            domain: 0,
            bus: 1,
            device: 0,
            function: 0,
        },
    };

    #[test]
    fn the_first_backend_with_a_gpu_is_taken_and_a_gpu_of_its_own_memory_first() {
        let tried = RefCell::new(Vec::new());
        let probe = |kind: &EngineKind| {
            tried.borrow_mut().push(kind.to_string());
            match kind.to_string().as_str() {
                "ggml:/a/libggml-cuda.so" => Err(refused("/a/libggml-cuda.so: no driver")),
                "ggml:/b/libggml-hip.so" => Ok(vec![device("CPU", ProbedKind::Other)]),
                _ => Ok(vec![
                    device("Vulkan0", ProbedKind::IntegratedGpu),
                    device("Vulkan1", ProbedKind::Gpu),
                ]),
            }
        };
        let (a, b, c) = (
            "/a/libggml-cuda.so",
            "/b/libggml-hip.so",
            "/c/libggml-vulkan.so",
        );
        let search = found(&[a, b, c, "/d/libggml-vulkan.so"]);
        assert_eq!(any_ggml(&search, &probe).unwrap(), [ggml(c, "Vulkan1")]);
        assert_eq!(tried.borrow().len(), 3, "the fourth is not needed");

        let error = any_ggml(&found(&[a, b]), &probe).unwrap_err().to_string();
        for part in [
            "/usr/lib/ollama",
            "/app",
            "/a/libggml-cuda.so: no driver",
            "/b/libggml-hip.so: no GPU among its 1 devices",
        ] {
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
    }

    #[test]
    fn auto_takes_cuda_then_ggml_then_the_cpu() {
        let vulkan = "/a/libggml-vulkan.so";
        let search = found(&[vulkan]);
        let cuda = |ordinal| EngineKind::Cuda(ordinal);
        let has_cuda = |kind: &EngineKind| match kind {
            EngineKind::AllCuda => Ok(["cuda:0", "cuda:1"]
                .map(|name| device(name, ProbedKind::Gpu))
                .into()),
            EngineKind::Cuda(_) => Ok(vec![device("cuda", ProbedKind::Gpu)]),
            other => panic!("{other} is not needed"),
        };
        let chosen = auto(&search, &[NVIDIA], true, &has_cuda);
        assert_eq!(chosen.engines, [cuda(0), cuda(1)]);
        assert_eq!(chosen.unused_gpu, None);

        // A GPU that the engine cannot use is left out, and named.
        let one_is_old = |kind: &EngineKind| match kind {
            EngineKind::Cuda(0) => Err(refused("compute capability 7.5")),
            other => has_cuda(other),
        };
        let chosen = auto(&search, &[NVIDIA], true, &one_is_old);
        assert_eq!(chosen.engines, [cuda(1)]);
        let text = chosen.unused_gpu.expect("one is not used");
        let words = "cuda:0 (model of cuda:0) is not used: compute capability 7.5";
        assert_eq!(text, words);
        assert!(is_of_nvidia(&text));

        let has_vulkan = |kind: &EngineKind| match kind {
            EngineKind::AllCuda => Ok(vec![device("cuda:0", ProbedKind::Gpu)]),
            EngineKind::Cuda(_) => Err(refused("a kernel is wrong")),
            _ => Ok(["Vulkan0", "Vulkan1"]
                .map(|name| device(name, ProbedKind::Gpu))
                .into()),
        };
        let chosen = auto(&search, &[NVIDIA], true, &has_vulkan);
        assert_eq!(
            chosen.engines,
            [ggml(vulkan, "Vulkan0"), ggml(vulkan, "Vulkan1")]
        );
        assert_eq!(chosen.unused_gpu, None);

        // A backend that a guest can end is not even loaded without leave.
        let only_cuda = |kind: &EngineKind| match kind {
            EngineKind::AllCuda => Ok(vec![device("cuda:0", ProbedKind::Gpu)]),
            EngineKind::Cuda(_) => Err(refused("a kernel is wrong")),
            other => panic!("{other} must not be tried"),
        };
        let chosen = auto(&search, &[NVIDIA], false, &only_cuda);
        assert_eq!(chosen.engines, [EngineKind::Cpu]);
        let text = chosen.unused_gpu.expect("a GPU is there");
        for part in [
            "0000:01:00.0 (NVIDIA, 10de:2335) is not used",
            "a kernel is wrong",
            vulkan,
            "--trust-guests",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
        assert!(is_of_nvidia(&text));
        // The driver names a GPU that is no PCI device of this machine, as in WSL.
        let chosen = auto(&found(&[]), &[], true, &only_cuda);
        let text = chosen.unused_gpu.expect("the driver names a GPU");
        let words = "cuda:0 (model of cuda:0) is not used: a kernel is wrong; ";
        assert!(text.starts_with(words) && is_of_nvidia(&text), "{text}");
        // Of another maker.
        let amd = HostGpu {
            vendor: Vendor::Amd,
            id: (0x1002, 0x744c),
            ..NVIDIA
        };
        let none = |_: &EngineKind| Err(refused("no driver"));
        let chosen = auto(&found(&[]), &[amd], true, &none);
        let text = chosen.unused_gpu.expect("a GPU is there");
        let words = "0000:01:00.0 (AMD, 1002:744c) is not used: the engine ggml does not start: no";
        assert!(text.starts_with(words) && !is_of_nvidia(&text), "{text}");
        // Without a GPU there is nothing to warn of.
        let chosen = auto(&found(&[]), &[], true, &none);
        assert_eq!(chosen.engines, [EngineKind::Cpu]);
        assert_eq!(chosen.unused_gpu, None);
    }

    #[test]
    fn all_devices_become_engines_and_none_is_taken_twice() {
        let probe = |kind: &EngineKind| match kind {
            EngineKind::AllCuda => Ok(["cuda:0", "cuda:1"]
                .map(|name| device(name, ProbedKind::Gpu))
                .into()),
            EngineKind::AllGgml(_) => Ok(vec![
                device("CPU", ProbedKind::Other),
                device("Vulkan0", ProbedKind::Gpu),
                device("Vulkan1", ProbedKind::Gpu),
            ]),
            other => panic!("{other} is not to be tried"),
        };
        let chosen = |text: &str| {
            let selection = select(&text.parse().expect(text), true, &probe);
            selection.map(|selection| selection.names())
        };
        assert_eq!(chosen("cuda:all,cpu").unwrap(), "cuda:0, cuda:1, cpu");
        let vulkan = "ggml:/a.so:Vulkan0, ggml:/a.so:Vulkan1";
        assert_eq!(chosen("ggml:/a.so:all").unwrap(), vulkan);
        let error = chosen("cuda:1,cuda:all").unwrap_err().to_string();
        assert_eq!(
            error,
            "the engine cuda:1 is named twice: each engine is a device of its own"
        );
        let many: Vec<String> = (0..17).map(|ordinal| ordinal.to_string()).collect();
        let error = chosen(&format!("cuda:{}", many.join(",")))
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "17 engines are named, and an executor has at most 16"
        );

        let none = |_: &EngineKind| Ok(vec![device("CPU", ProbedKind::Other)]);
        let error = select(&"ggml:/a.so:all".parse().unwrap(), true, &none).unwrap_err();
        let words = "the engines ggml:/a.so:all do not start: it has no GPU";
        assert_eq!(error.to_string(), words);
    }

    #[test]
    fn gpus_of_this_machine_are_those_that_compute_for_it() {
        let sysfs = tempfile::tempdir().expect("a new folder");
        let add = |address: &str, id: [&str; 4], class: &str, driver: Option<&str>| {
            let folder = sysfs.path().join(address);
            std::fs::create_dir(&folder).expect("a folder");
            let names = ["vendor", "device", "subsystem_vendor", "subsystem_device"];
            for (name, text) in names.into_iter().zip(id).chain([("class", class)]) {
                std::fs::write(folder.join(name), text).expect("a file");
            }
            if let Some(driver) = driver {
                let to = Path::new("/sys/bus/pci/drivers").join(driver);
                std::os::unix::fs::symlink(to, folder.join("driver")).expect("a link");
            }
        };
        let of = |vendor, device| [vendor, device, "0x1000", "0x2000"];
        add(
            "0000:00:02.0",
            of("0x8086", "0x56a0"),
            "0x030000",
            Some("i915"),
        );
        add(
            "0000:00:03.0",
            of("0x1a03", "0x2000"),
            "0x030000",
            Some("ast"),
        );
        add(
            "0000:00:04.0",
            of("0x8086", "0x1533"),
            "0x020000",
            Some("igb"),
        );
        add("0000:01:00.0", of("0x10de", "0x2331"), "0x030200", None);
        add(
            "0000:02:00.0",
            of("0x10de", "0x2335"),
            "0x030200",
            Some("vfio-pci"),
        );
        add(
            "0000:03:00.0",
            of("0x1002", "0x74a1"),
            "0x120000",
            Some("amdgpu"),
        );
        let own = ["0x10de", "0x2331", "0x1af4", "0x5647"];
        add("0000:04:00.0", own, "0x030200", None);
        let found: Vec<String> = gpus(sysfs.path()).iter().map(HostGpu::to_string).collect();
        assert_eq!(
            found,
            [
                "0000:00:02.0 (Intel, 8086:56a0)",
                "0000:01:00.0 (NVIDIA, 10de:2331)",
                "0000:03:00.0 (AMD, 1002:74a1)",
            ]
        );
    }
}
