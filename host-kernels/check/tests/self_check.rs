//! The self-check: kernels of the CUDA engine against the kernels behind them, over the shim.

#[path = "common/sample.rs"]
mod sample;
#[path = "../../shim/device.rs"]
mod shim;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sample::Sample;
use shim::{Fault, Shim};
use vgpu_check::child_process::Silence;
use vgpu_check::self_check::{self, Message, Request, Step};
use vgpu_check::{Selection, planned_cases};
use vgpu_cpu::CpuEngine;
use vgpu_cuda::device::Device;
use vgpu_cuda::kernel_set::{KernelSet, is_simple, names, parse_names};
use vgpu_cuda::verdict::{Finding, Verdict};
use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_cuda_shim::DeviceModel;

/// With the megakernel, so that it is checked, too.
const POLICY: LaunchPolicy = LaunchPolicy {
    time_slice: Duration::from_micros(1500),
    graph_threshold: Duration::from_micros(40),
    fusion: true,
    megakernel: true,
    repack: true,
    min_graph_launches: 4,
    min_stages: 4,
};

fn device(model: DeviceModel) -> Arc<dyn Device> {
    Arc::new(Shim::of(model))
}

#[test]
fn every_kernel_is_simple_or_has_another_one_behind_it() {
    let mut planned = BTreeSet::new();
    for model in [DeviceModel::L4, DeviceModel::H100] {
        let device = device(model);
        let kernels = self_check::kernels_to_check(&*device, POLICY, |_| false);
        let behind = self_check::behind(&device, POLICY, &kernels).expect("all cases compile");
        for (kernel, behind) in behind {
            let Some(behind) = behind else {
                continue;
            };
            assert!(
                !behind.contains(&kernel),
                "{kernel} runs although it is disabled"
            );
            planned.insert(kernel);
        }
    }
    let forgotten: Vec<_> = { names().iter() }
        .filter(|name| !is_simple(name) && !planned.contains(*name))
        .collect();
    assert!(
        forgotten.is_empty(),
        "neither simple nor in a case: {forgotten:?}"
    );
}

#[test]
fn kernels_give_the_results_of_the_kernels_behind_them() {
    let sample = Sample::asked();
    // The general kernels are the same on both. Some need more shared memory than an L4 has: they
    // are checked on an H100.
    let mut too_large: Vec<&str> = Vec::new();
    for model in [DeviceModel::L4, DeviceModel::H100] {
        let is_last = model == DeviceModel::H100;
        let device = device(model);
        let mut kernels = self_check::kernels_to_check(&*device, POLICY, |_| false);
        kernels.retain(|kernel| is_last == kernel.contains("_sm90"));
        let mut at = 0;
        kernels.retain(|_| {
            at += 1;
            sample.is_none_or(|sample| sample.has(at))
        });
        kernels.append(&mut too_large);
        let mut ended = 0;
        let is_complete = self_check::run(&device, POLICY, &kernels, &[], |step| {
            let Step::Ends(kernel, finding) = step else {
                return;
            };
            ended += 1;
            match finding {
                Finding::Unchecked if !is_last => too_large.push(kernel),
                finding => assert_eq!(finding, Finding::Right, "{kernel}"),
            }
        });
        assert!(matches!(is_complete, Ok(true)), "{is_complete:?}");
        assert_eq!(ended, kernels.len());
    }
}

/// The variables with the work of a child process of these tests: what it is asked for, and which
/// kernels are faulty.
const ASKED: &str = "VGPU_TEST_SELF_CHECK";
const FAULTS: &str = "VGPU_TEST_FAULTS";

/// The kernels that are checked in child processes: the others take too long.
const CHECKED: &str = "vg_upload,vg_quantize_q8,vg_gemm_any,vg_mmv_q5_1,vg_mmv_q4_k,\
                       vg_gemm_q4_k,vg_fattn_f16_64_decode,vg_mmv_f16_cols8,vg_topk_moe";

/// The faulty kernels.
const FAULTY: [(&str, Fault); 4] = [
    ("vg_gemm_q4_k", Fault::IllegalAddress),
    ("vg_fattn_f16_64_decode", Fault::Hang),
    ("vg_mmv_f16_cols8", Fault::Abort),
    ("vg_mmv_q5_1", Fault::NoResults),
];

fn faulty_device(is_faulty: impl Fn(&str) -> bool) -> Arc<dyn Device> {
    let mut device = Shim::default();
    device.faults = { FAULTY.into_iter() }
        .filter(|(kernel, _)| is_faulty(kernel))
        .collect();
    Arc::new(device)
}

/// What a child process of the other tests does.
#[test]
#[ignore = "run by the other tests, in processes of its own"]
fn child() {
    let asked = std::env::var(ASKED).expect("only other tests run this one");
    let faults = std::env::var(FAULTS).expect("only other tests run this one");
    let device = faulty_device(|kernel| faults.contains(kernel));
    let policy = LaunchPolicy::default();
    let Some((kernels, faulty)) = asked.split_once(';') else {
        println!("{}", Message::Device("a shim".into()));
        let checked = parse_names(CHECKED).expect("kernels");
        let is_left_out = |name: &str| !checked.contains(&name);
        for kernel in self_check::kernels_to_check(&*device, policy, is_left_out) {
            println!("{}", Message::Kernel(kernel.into()));
        }
        return;
    };
    let [kernels, faulty] = [kernels, faulty].map(|list| parse_names(list).expect("kernels"));
    let is_complete = self_check::run(&device, policy, &kernels, &faulty, |step| {
        println!("{}", Message::from(step));
    });
    if is_complete.expect("an engine starts") {
        println!("{}", Message::Done);
    }
}

/// The program of a child.
fn command(request: Request<'_>, faults: &str) -> Command {
    let asked = match request {
        Request::List => "list".into(),
        Request::Check { kernels, faulty } => {
            format!("{};{}", kernels.join(","), faulty.join(","))
        }
    };
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env(ASKED, asked)
        .env(FAULTS, faults);
    command
}

/// A kernel is silent for longer than it ever needs here.
const SILENCE: Silence = Silence {
    at_start: Duration::from_secs(300),
    between: Duration::from_secs(60),
};

/// The verdict in a file, as `vgpu serve` keeps it.
fn kept(path: &Path) -> Verdict {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    Verdict::parse(&text, "a shim").unwrap_or_default()
}

/// Checks the kernels of a device with these faults, and keeps the verdict in a file.
fn check(path: &Path, faults: &str, budget: Duration) -> self_check::Supervised {
    let started = Mutex::new(0);
    let command = |request: Request<'_>| {
        *started.lock().unwrap() += 1;
        command(request, faults)
    };
    let keep = |fingerprint: &str, verdict: &Verdict| {
        std::fs::write(path, verdict.to_text(fingerprint)).expect("a file");
    };
    let found = self_check::supervise(command, SILENCE, budget, |_| kept(path), keep);
    found.expect("the children start")
}

#[test]
fn faulty_kernels_are_named_and_not_used() {
    let folder = tempfile::tempdir().expect("a new folder");
    let path = folder.path().join("verdict.txt");
    let all = FAULTY.map(|(kernel, _)| kernel).join(",");
    let found = check(&path, &all, Duration::MAX);
    let verdict = kept(&path);
    assert_eq!(found.verdict, verdict);
    let faulty: Vec<_> = verdict.faulty().map(|(kernel, _)| kernel).collect();
    let mut expected = FAULTY.map(|(kernel, _)| kernel);
    expected.sort_unstable();
    assert_eq!(faulty, expected);
    for (kernel, words) in [
        ("vg_gemm_q4_k", "an illegal memory access"),
        ("vg_fattn_f16_64_decode", "it was silent for"),
        ("vg_mmv_f16_cols8", "its process ended with signal: 6"),
        ("vg_mmv_q5_1", "it is off by"),
    ] {
        let reason = { verdict.faulty() }.find(|(faulty, _)| *faulty == kernel);
        let (_, reason) = reason.expect("it is faulty");
        assert!(reason.contains(words), "{kernel}: {reason}");
    }
    // Each other kernel was checked all the same.
    for kernel in parse_names(CHECKED).expect("kernels") {
        let is_faulty = expected.contains(&kernel);
        let is_right = verdict.finding(kernel) == Some(&Finding::Right);
        assert_eq!(
            is_right,
            !is_faulty,
            "{kernel}: {:?}",
            verdict.finding(kernel)
        );
    }
    assert_eq!((found.checked, found.left), (verdict.len(), 0));
    // Once more, with nothing left to check: the device could hang.
    let again = check(&path, &all, Duration::MAX);
    assert_eq!((again.checked, again.verdict), (0, verdict.clone()));

    // An engine with the verdict answers right on the faulty device.
    let is_faulty = |name: &str| verdict.faulty().any(|(faulty, _)| faulty == name);
    let cpu = CpuEngine::new(2, None).expect("an engine");
    let sound = CudaEngine::new(faulty_device(|_| false)).expect("an engine");
    let cases = planned_cases(&sound).expect("all cases compile");
    let affected: BTreeSet<_> = { cases.iter() }
        .filter(|(_, kernels)| kernels.iter().any(|kernel| is_faulty(kernel)))
        .map(|(name, _)| name.as_str())
        .collect();
    let takes = |name: &str| affected.contains(name);
    let selection = Selection {
        first: 0,
        takes: &takes,
    };
    let kernels = Arc::new(KernelSet::without(is_faulty));
    let engine =
        CudaEngine::with_kernels(faulty_device(|_| true), LaunchPolicy::default(), kernels);
    let engine = engine.expect("an engine");
    let results = vgpu_check::compare(&engine, &cpu, &selection, |_| ());
    assert!(results.len() >= FAULTY.len(), "{affected:?}");
    for case in &results {
        assert!(case.is_right(), "{}: {:?}", case.name, case.outcome);
        assert!(
            !case.kernels.iter().any(|kernel| is_faulty(kernel)),
            "{:?}",
            case.kernels
        );
    }
    // And an engine without it does not.
    let engine = CudaEngine::new(faulty_device(|kernel| kernel == "vg_mmv_q5_1"));
    let results = vgpu_check::compare(&engine.expect("an engine"), &cpu, &selection, |_| ());
    assert!(results.iter().any(|case| !case.is_right()));
}

#[test]
fn a_check_that_was_cut_short_goes_on_where_it_was() {
    let folder = tempfile::tempdir().expect("a new folder");
    let path = folder.path().join("verdict.txt");
    let first = check(&path, "", Duration::from_nanos(1));
    assert_eq!((first.checked, kept(&path).len()), (0, 0));
    let mut rest = first.left;
    assert_eq!(rest, parse_names(CHECKED).expect("kernels").len());
    let mut verdict = Verdict::default();
    for kernel in parse_names("vg_upload,vg_gemm_q4_k").expect("kernels") {
        verdict.record(kernel, Finding::Right);
        rest -= 1;
    }
    std::fs::write(&path, verdict.to_text("a shim")).expect("a file");
    let second = check(&path, "", Duration::MAX);
    assert_eq!((second.checked, second.left), (rest, 0));
    assert_eq!(kept(&path).len(), first.left);
    assert_eq!(kept(&path).faulty().count(), 0);
}

#[test]
fn a_check_without_a_device_is_an_error() {
    let command = |_: Request<'_>| Command::new("false");
    let found = self_check::supervise(
        command,
        SILENCE,
        Duration::MAX,
        |_| Verdict::default(),
        |_, _| (),
    );
    let error = found.expect_err("there is no device").to_string();
    assert!(error.contains("no device: its process ended"), "{error}");
}

#[test]
fn messages_round_trip() {
    for message in [
        Message::Device("0123".into()),
        Message::Kernel("vg_rope".into()),
        Message::Begins("vg_rope".into()),
        Message::Instead(vec!["vg_rope".into(), "vg_move".into()]),
        Message::Ends("vg_rope", Finding::Right),
        Message::Ends("vg_rope", Finding::Faulty("off by 1\nor 2".into())),
        Message::Done,
    ] {
        let line = format!("test child ... {message}");
        let read = Message::parse(&line).expect("a message");
        assert_eq!(read.to_string(), message.to_string());
    }
    assert_eq!(Message::parse("test child ... ok"), None);
}
