//! The figures of a GPU in `vgpu ps` and metrics, on the stand-in for NVIDIA's driver, whose NVML
//! refuses some or all of them.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use common::{Guest, TIMEOUT, add, bytes};
use serde_json::Value;
use served::{Scratch, Serve, vgpu};
use vgpu_transport::wire::{DeviceCount, GraphId, Offer, Reply};

/// An executor with the CUDA engine on the stand-in.
struct Site {
    serve: Serve,
    scratch: Scratch,
}

/// What the stand-in is asked for.
#[derive(Clone, Copy)]
struct StandinOptions<'a> {
    engine: &'a str,
    faults: &'a str,
    more: &'a [&'a str],
}

const PLAIN: StandinOptions<'_> = StandinOptions {
    engine: "cuda",
    faults: "",
    more: &[],
};

impl Site {
    fn start(name: &str, asked: StandinOptions<'_>) -> Site {
        let library = vgpu_driver_standin::folder().expect("the library");
        Site::with_libraries(name, asked, &library)
    }

    fn with_libraries(name: &str, asked: StandinOptions<'_>, libraries: &Path) -> Site {
        let scratch = Scratch::new(name);
        let in_scratch = |name: &str| scratch.path().join(name).display().to_string();
        let listen = format!("--listen=unix:{}", scratch.socket().display());
        let metrics = format!("--metrics=unix:{}", in_scratch("metrics.sock"));
        let engine = format!("--engine={}", asked.engine);
        let control = format!("--control={}", in_scratch("control.sock"));
        let mut arguments = vec!["serve", &engine, &listen, &control, &metrics];
        arguments.extend(asked.more);
        let mut command = vgpu(&arguments);
        command
            .env("LD_LIBRARY_PATH", libraries)
            .env("VGPU_STANDIN_SMS", "3")
            .env("VGPU_STANDIN_DEVICES", "L4,H100")
            .env("VGPU_STANDIN_FAULTS", asked.faults)
            // No folder, so that the kernels are not checked at the start.
            .env("VGPU_CACHE", "/dev/null");
        let serve = Serve::of(command);
        Site { serve, scratch }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn ps(&self, more: &[&str]) -> String {
        let control = self.path("control.sock").display().to_string();
        let mut command = vgpu(&["ps", "--control", &control]);
        let output = command.args(more).output().expect("the command starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// The GPU in the status, once the thread that asks for it has an answer.
    fn gpu(&self) -> Value {
        let start = Instant::now();
        loop {
            let status: Value = serde_json::from_str(&self.ps(&["--json"])).expect("JSON");
            let gpu = &status["engine"]["gpu"];
            if !gpu.is_null() {
                return gpu.clone();
            }
            assert!(start.elapsed() < TIMEOUT, "no figures: {status:#}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn metrics(&self) -> String {
        self.get("/metrics")
    }

    /// The answer at the address of the metrics.
    fn get(&self, path: &str) -> String {
        let mut socket = UnixStream::connect(self.path("metrics.sock")).expect("it listens");
        let request = format!("GET {path} HTTP/1.0\r\n\r\n");
        socket.write_all(request.as_bytes()).expect("it listens");
        let mut text = String::new();
        socket.read_to_string(&mut text).expect("an answer");
        text
    }
}

/// Each GPU is a device with a row, figures and a quota of its own.
#[test]
fn all_gpus_are_devices_with_figures() {
    let asked = StandinOptions {
        engine: "cuda:all",
        ..PLAIN
    };
    let site = Site::start("gpu-figures-all", asked);
    // One process computes on both.
    let _guests = [0, 1].map(|device| computed(&site, device));
    site.gpu();
    let start = Instant::now();
    let status = loop {
        let status: Value = serde_json::from_str(&site.ps(&["--json"])).expect("JSON");
        if !status["further_engines"][0]["gpu"].is_null() {
            break status;
        }
        assert!(start.elapsed() < TIMEOUT, "no figures: {status:#}");
        thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(status["engine"]["name"], "cuda:0");
    let further = status["further_engines"].as_array().expect("a list");
    assert_eq!(further.len(), 1);
    assert_eq!(further[0]["name"], "cuda:1");
    assert_eq!(further[0]["gpu"]["address"], "0000:02:00.0");
    let text = site.ps(&[]);
    for line in [
        "cuda:0: NVIDIA L4",
        "cuda:1: NVIDIA H100",
        "GPU 0000:01:00.0: busy 37 %",
        "GPU 0000:02:00.0: busy 37 %",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let metrics = site.metrics();
    for sample in [
        "vgpu_engine_memory_bytes{engine=\"cuda:0\"}",
        "vgpu_engine_memory_bytes{engine=\"cuda:1\"}",
        "vgpu_gpu_busy_ratio{gpu=\"0000:01:00.0\"}",
        "vgpu_gpu_busy_ratio{gpu=\"0000:02:00.0\"}",
        "vgpu_guest_memory_used_bytes{guest=\"-\",engine=\"cuda:1\"}",
        "vgpu_build_info{version=",
    ] {
        assert!(metrics.contains(sample), "no {sample} in {metrics}");
    }
    assert_eq!(
        metrics.matches("\nvgpu_build_info{").count(),
        2,
        "{metrics}"
    );
    let page = site.get("/");
    for label in ["Memory of cuda:0: ", "Memory of cuda:1: "] {
        assert!(page.contains(label), "{page}");
    }
}

#[test]
fn processes_of_guests_have_all_gpus() {
    let asked = StandinOptions {
        engine: "cuda:0,1",
        more: &["--isolate"],
        ..PLAIN
    };
    let site = Site::start("gpu-isolate-all", asked);
    let _guests = [0, 1].map(|device| computed(&site, device));
    let start = Instant::now();
    loop {
        let status: Value = serde_json::from_str(&site.ps(&["--json"])).expect("JSON");
        let sessions = status["sessions"].as_array().expect("a list");
        let mut devices: Vec<u64> = { sessions.iter() }
            .filter_map(|session| session["device"].as_u64())
            .collect();
        devices.sort();
        let graphs = |device: usize| &status["guests"][0]["by_device"][device]["graphs"];
        if devices == [0, 1] && *graphs(0) == 1 && *graphs(1) == 1 {
            let totals = [&status["engine"], &status["further_engines"][0]];
            let totals = totals.map(|engine| engine["memory_total"].as_u64());
            assert_eq!(totals, TOTALS.map(Some));
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "{status:#}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The stand-in divides the 24 GiB of an L4 by 64, and a quarter of them is in use.
const TOTAL: u64 = (24 << 30) / 64;

/// The memory of both GPUs.
const TOTALS: [u64; 2] = [TOTAL, (80 << 30) / 64];

/// A guest that has computed on a device, of which there are two.
fn computed(site: &Site, device: u32) -> Guest {
    let mut guest = site.serve.connect(&site.scratch.socket());
    let Reply::Welcome {
        engine,
        memory_total,
        devices,
        ..
    } = guest.hello_for(Offer::SERVED, device)
    else {
        unreachable!("hello_for() has checked it")
    };
    assert_eq!(engine, format!("cuda:{device}"));
    assert_eq!(memory_total, TOTALS[device as usize]);
    assert_eq!(devices, DeviceCount(2));
    let numbers = guest.alloc_with(&bytes(&[1.0; 64]));
    guest.graph(GraphId(1), &add(64, numbers, numbers, numbers));
    guest.submit(GraphId(1));
    assert_eq!(guest.read_f32(numbers, 64), [2.0; 64]);
    guest
}

/// `auto` on a machine whose GPU the CUDA engine cannot use.
#[test]
fn gpu_that_is_not_used_is_a_warning_everywhere() {
    let small = ["--threads=1", "--memory=64M"];
    let sites: [(&str, &[&str]); 2] = [
        ("gpu-unused", &[]),
        ("gpu-unused-isolate", &["--isolate", "--guest-memory=16M"]),
    ];
    for (name, more) in sites {
        let asked = StandinOptions {
            engine: "auto",
            faults: "cuCtxCreate:*:OUT_OF_MEMORY",
            more: &[&small, more].concat(),
        };
        let site = Site::start(name, asked);
        let status: Value = serde_json::from_str(&site.ps(&["--json"])).expect("JSON");
        assert_eq!(status["engine"]["name"], "cpu", "{name}: {status:#}");
        let gpu = status["engine"]["unused_gpu"].as_str();
        let gpu = gpu.unwrap_or_else(|| panic!("{name}: {status:#}"));
        let start = "cuda:0 (NVIDIA L4) is not used: ";
        assert!(
            gpu.starts_with(start) && gpu.contains("cuCtxCreate"),
            "{gpu}"
        );
        let text = site.ps(&[]);
        let line = format!("\nwarning: the GPU {gpu}\n");
        assert!(text.contains(&line), "{name}: {text}");
        let page = site.get("/");
        let line = format!("<p class=\"warning\">The GPU {start}");
        assert!(page.contains(&line), "{name}: {page}");
        let mut guest = site.serve.connect(&site.scratch.socket());
        let Reply::Welcome { description, .. } = guest.hello() else {
            unreachable!("hello() has checked it")
        };
        let end = "; a GPU of the host is not used";
        assert!(description.ends_with(end), "{name}: {description}");
        drop(guest);
        site.serve.signal(rustix::process::Signal::TERM);
        let (_, log) = site.serve.wait();
        let line = format!("auto: the engine cpu; the GPU {start}");
        let warned = log
            .lines()
            .any(|it| it.contains("WARN") && it.contains(&line));
        assert!(warned, "{name}: {log}");
    }
}

#[test]
fn figures_of_the_gpu_are_shown() {
    let site = Site::start("gpu-figures", PLAIN);
    let gpu = site.gpu();
    assert_eq!(gpu["address"], "0000:01:00.0");
    assert_eq!(gpu["busy"], 0.37);
    assert_eq!(gpu["memory_used"], TOTAL / 4);
    assert_eq!(gpu["memory_total"], TOTAL);
    assert_eq!(gpu["temperature"], 51);
    assert_eq!(gpu["power"], 123.456);
    assert_eq!(gpu["missing"], Value::Array(Vec::new()));
    let text = site.ps(&[]);
    let line = "GPU 0000:01:00.0: busy 37 %, memory 96.0 MiB of 384.0 MiB, 51 °C, 123 W\n";
    assert!(text.contains(line), "{text}");
    let page = site.get("/");
    assert!(
        page.contains(&format!("<p>{}</p>", line.trim_end())),
        "{page}"
    );
    let metrics = site.metrics();
    for line in [
        "vgpu_gpu_busy_ratio{gpu=\"0000:01:00.0\"} 0.37\n",
        "vgpu_gpu_power_watts{gpu=\"0000:01:00.0\"} 123.456\n",
        "vgpu_gpu_temperature_celsius{gpu=\"0000:01:00.0\"} 51.0\n",
        "vgpu_gpu_memory_used_bytes{gpu=\"0000:01:00.0\"} 100663296.0\n",
        "vgpu_gpu_memory_bytes{gpu=\"0000:01:00.0\"} 402653184.0\n",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
}

/// The numbers of CUDA and of NVML differ, so the address decides.
#[test]
fn figures_are_those_of_the_engines_gpu_also_of_a_supervisor() {
    let sites: [(&str, &[&str]); 2] = [("gpu-second", &[]), ("gpu-isolate", &["--isolate"])];
    for (name, more) in sites {
        let engine = "cuda:1";
        let asked = StandinOptions {
            engine,
            more,
            ..PLAIN
        };
        let site = Site::start(name, asked);
        let gpu = site.gpu();
        assert_eq!(gpu["address"], "0000:02:00.0", "{name}: {gpu:#}");
        assert_eq!(gpu["memory_total"], (80u64 << 30) / 64, "{name}: {gpu:#}");
    }
}

#[test]
fn figures_that_are_refused_are_missing_with_the_reason() {
    let faults = "nvmlDeviceGetPowerUsage:*:NOT_SUPPORTED,\
                  nvmlDeviceGetUtilizationRates:*:NO_PERMISSION";
    let site = Site::start("gpu-refused", StandinOptions { faults, ..PLAIN });
    let gpu = site.gpu();
    assert_eq!((&gpu["power"], &gpu["busy"]), (&Value::Null, &Value::Null));
    assert_eq!(
        (&gpu["temperature"], &gpu["memory_total"]),
        (&51.into(), &TOTAL.into())
    );
    let reasons = [
        "nvmlDeviceGetUtilizationRates failed: the user of the executor may not read it (NVML \
         error 4)",
        "nvmlDeviceGetPowerUsage failed: this GPU, or its present mode, does not have the figure \
         (NVML error 3)",
    ];
    assert_eq!(gpu["missing"], Value::from(reasons.to_vec()));
    let text = site.ps(&[]);
    assert!(
        text.contains(": busy -, memory 96.0 MiB of 384.0 MiB, 51 °C, -\n"),
        "{text}"
    );
    for reason in reasons {
        let line = format!("warning: a figure of the GPU is missing: {reason}\n");
        assert!(text.contains(&line), "{text}");
    }
    let page = site.get("/");
    let warnings = page.matches("A figure of the GPU is missing: ").count();
    assert_eq!(warnings, 2, "{page}");
    let metrics = site.metrics();
    assert!(!metrics.contains("vgpu_gpu_power_watts{"), "{metrics}");
    assert!(
        metrics.contains("vgpu_gpu_temperature_celsius{"),
        "{metrics}"
    );
    site.serve.signal(rustix::process::Signal::TERM);
    let (_, log) = site.serve.wait();
    for reason in reasons {
        assert_eq!(log.matches(reason).count(), 1, "{log}");
    }
}

#[test]
fn an_executor_serves_without_nvml() {
    let none = Scratch::new("gpu-no-nvml-libraries");
    let standin = vgpu_driver_standin::folder().expect("the library");
    for name in ["libcuda.so.1", "libnvrtc.so.13"] {
        symlink(standin.join(name), none.path().join(name)).expect("a link");
    }
    // What the name of the library leads to if the system has one, too.
    fs::write(none.path().join("libnvidia-ml.so.1"), "no library").expect("a file");
    for (name, faults, libraries, reason) in [
        (
            "gpu-mismatch",
            "nvmlInit:*:LIB_RM_VERSION_MISMATCH",
            standin.as_path(),
            "of different versions, as after an upgrade of the driver: restart the host (NVML \
             error 18)",
        ),
        (
            "gpu-lost",
            "nvmlDeviceGetHandleByPciBusId:*:GPU_IS_LOST",
            &standin,
            "nvmlDeviceGetHandleByPciBusId failed: GPU is lost (NVML error 15)",
        ),
        (
            "gpu-no-nvml",
            "",
            none.path(),
            "libnvidia-ml.so.1 cannot be loaded: ",
        ),
    ] {
        let site = Site::with_libraries(name, StandinOptions { faults, ..PLAIN }, libraries);
        let gpu = site.gpu();
        let missing = gpu["missing"][0].as_str().unwrap_or_default();
        assert!(missing.contains(reason), "{gpu:#}");
        assert_eq!(gpu["memory_total"], Value::Null, "{gpu:#}");
        site.serve.guest(&site.scratch.socket()).alloc(64);
    }
}

#[test]
fn guests_do_not_wait_for_an_nvml_that_hangs() {
    let faults = "nvmlInit:*:hang";
    let site = Site::start("gpu-hang", StandinOptions { faults, ..PLAIN });
    site.serve.guest(&site.scratch.socket()).alloc(64);
    assert!(site.ps(&[]).starts_with("cuda:0: "));
    site.serve.signal(rustix::process::Signal::TERM);
    let (status, log) = site.serve.wait();
    assert!(status.success(), "{log}");
}
