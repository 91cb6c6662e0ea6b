//! The NVIDIA cards of a host: their driver with its library, and the compiler for their kernels.

use std::fs;

use vgpu_executor::config::Settings;
use vgpu_transport::link::pci::discover::{Found, PciDeviceKind, SYSFS, all};

use super::driver;
use super::gpu_use::wants_cuda;
use super::report::Report;
use super::root::Root;

const PART: &str = "gpu";

/// Folders of libraries, for a file system that the dynamic linker does not search.
const FOLDERS: [&str; 4] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/cuda/lib64",
];

/// NVIDIA's vendor id, and the base class of display controllers.
const NVIDIA: u16 = 0x10de;
const DISPLAY: u32 = 0x03;

/// `host`: the settings of the executor, if this machine is its host. Returns a card with its
/// driver, for people.
pub(super) fn check(root: &Root, host: Option<&Settings>, report: &mut Report) -> Option<String> {
    let devices = all(&root.path(SYSFS));
    let is_card = |device: &&Found| {
        let is_display = device.class >> 16 == DISPLAY;
        device.id.0 == NVIDIA && is_display && device.kind != PciDeviceKind::Vgpu
    };
    let cards: Vec<&Found> = devices.iter().filter(is_card).collect();
    if cards.is_empty() {
        return None;
    }
    // A guest, a container or a host that computes on its processors needs neither.
    let is_wanted = host.is_some_and(|settings| wants_cuda(&settings.engines));
    let mut usable = None;
    for card in cards {
        match card.driver.as_deref() {
            Some("nvidia") => {
                let version = driver_version(root);
                let version = version.map_or_else(String::new, |text| format!(" {text}"));
                report.ok(PART, format!("{card}: NVIDIA's driver{version}"));
                usable.get_or_insert_with(|| format!("{card}, an NVIDIA card with its driver,"));
            }
            Some(driver) if driver.contains("vfio") => report.note(
                PART,
                format!("{card}: given to a virtual machine (driver {driver}), not used here"),
            ),
            driver => {
                let driver = driver.map_or_else(
                    || "has no driver".to_owned(),
                    |name| format!("has the driver {name}, not NVIDIA's"),
                );
                let what = format!("{card}: this NVIDIA card {driver}: vgpu serve cannot use it");
                match is_wanted {
                    true => report.fail(PART, what, driver::install(root)),
                    false => report.note(PART, what),
                }
            }
        }
    }
    if usable.is_some() && is_wanted {
        driver::check(PART, root, &FOLDERS, report);
        check_compiler(root, report);
    }
    usable
}

/// What the kernel's part of the driver says of itself.
fn driver_version(root: &Root) -> Option<String> {
    let text = fs::read_to_string(root.path("/proc/driver/nvidia/version")).ok()?;
    let version = text
        .split_whitespace()
        .find(|word| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.'))?;
    Some(version.to_owned())
}

#[cfg(feature = "cuda")]
fn check_compiler(root: &Root, report: &mut Report) {
    use vgpu_cuda::nvrtc::{CompileError, Nvrtc};

    if vgpu_cuda::has_machine_code() {
        report.ok(
            PART,
            "this program has machine code of the kernels built in",
        );
        return;
    }
    let loaded = match root.is_own() {
        true => Nvrtc::load(None),
        false => {
            let mut tried = FOLDERS
                .iter()
                .map(|folder| Nvrtc::load(Some(&root.path(folder))));
            let found = tried.find(|loaded| loaded.is_ok());
            found.unwrap_or_else(|| {
                let reason = "none of the usual folders has it".into();
                Err(CompileError::NoCompiler { reason })
            })
        }
    };
    match loaded {
        Ok(compiler) => {
            let (major, minor) = compiler.version();
            report.ok(PART, format!("NVRTC {major}.{minor} compiles the kernels"));
        }
        Err(error) => report.fail(
            PART,
            format!("{error}; the first start on a GPU compiles the kernels with it"),
            install_compiler(root),
        ),
    }
}

#[cfg(not(feature = "cuda"))]
fn check_compiler(_: &Root, report: &mut Report) {
    report.note(PART, "this program is built without the CUDA engine");
}

#[cfg(feature = "cuda")]
fn install_compiler(root: &Root) -> String {
    // Releases that package NVRTC 12.
    match root.distribution() {
        (name, version)
            if (name == "debian" && version >= 13.0) || (name == "ubuntu" && version >= 24.0) =>
        {
            "sudo apt install libnvrtc12".into()
        }
        // Any version of CUDA 12 will do, and these are the wheel's folders.
        _ => "sudo pip3 install --target /opt/nvrtc nvidia-cuda-nvrtc-cu12 && echo \
              /opt/nvrtc/nvidia/cuda_nvrtc/lib | sudo tee /etc/ld.so.conf.d/nvrtc.conf && sudo \
              ldconfig"
            .into(),
    }
}
