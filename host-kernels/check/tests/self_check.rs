//! The self-check: kernels of the CUDA engine against their fallbacks, over the shim.

#[path = "common/sample.rs"]
mod sample;
#[path = "../../shim/device.rs"]
mod shim;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sample::Sample;
use shim::{Fault, Shim};
use vgpu_check::child_process::Silence;
use vgpu_check::self_check::{
    self, CheckEvent, CheckOutcome, CheckWork, Message, Request, SuperviseError,
};
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
    batch: false,
    longest_launch: Duration::MAX,
    longest_whole: Duration::MAX,
    min_graph_launches: 4,
    min_stages: 4,
};

fn device(model: DeviceModel) -> Arc<dyn Device> {
    Arc::new(Shim::of(model))
}

#[test]
fn every_kernel_is_simple_or_has_a_fallback() {
    let mut planned = BTreeSet::new();
    for model in [DeviceModel::L4, DeviceModel::H100] {
        let device = device(model);
        let kernels = self_check::kernels_to_check(&*device, POLICY, |_| false);
        let fallbacks =
            self_check::fallbacks(&device, POLICY, &kernels).expect("all cases compile");
        for (kernel, fallback) in fallbacks {
            let Some(fallback) = fallback else {
                continue;
            };
            assert!(
                !fallback.contains(&kernel),
                "{kernel} runs although it is disabled"
            );
            planned.insert(kernel);
        }
    }
    // Those for several plans have no case, and are off.
    assert!(!LaunchPolicy::default().batch);
    let forgotten: Vec<_> = { names().iter() }
        .filter(|name| !is_simple(name) && !planned.contains(*name))
        .filter(|name| !name.ends_with("_joint"))
        .collect();
    assert!(
        forgotten.is_empty(),
        "neither simple nor in a case: {forgotten:?}"
    );
}

#[test]
fn kernels_give_the_results_of_their_fallbacks() {
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
        // What is not in the sample counts as right.
        let all = self_check::kernels_to_check(&*device, POLICY, |_| false);
        let right: Vec<_> = { all.into_iter() }
            .filter(|kernel| !kernels.contains(kernel))
            .collect();
        let work = CheckWork {
            kernels: &kernels,
            right: &right,
            faulty: &[],
            suspects: &[],
        };
        let is_complete = self_check::run(&device, POLICY, work, |step| {
            let (kernel, outcome) = match step {
                CheckEvent::Ends(kernel, outcome) => (kernel, outcome),
                CheckEvent::WrongFallback(kernels) => panic!("wrong: {kernels:?}"),
                _ => return,
            };
            ended += 1;
            match outcome {
                CheckOutcome::Found(Finding::Unused) if !is_last => too_large.push(kernel),
                outcome => assert_eq!(outcome, CheckOutcome::Found(Finding::Right), "{kernel}"),
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
                       vg_gemm_q4_k,vg_fattn_f16_64_decode,vg_mmv_f16_cols8,vg_topk_moe,\
                       vg_repack,vg_mmv_q4_0_repacked";

/// The faulty kernels.
const FAULTY: [(&str, Fault); 5] = [
    ("vg_upload", Fault::IllegalAddress),
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
    let [kernels, right, faulty, suspects] = asked.split(';').collect::<Vec<_>>()[..] else {
        println!("{}", Message::Device("a shim".into()));
        let checked = parse_names(CHECKED).expect("kernels");
        let is_left_out = |name: &str| !checked.contains(&name);
        for kernel in self_check::kernels_to_check(&*device, policy, is_left_out) {
            println!("{}", Message::Kernel(kernel));
        }
        return;
    };
    let lists = [kernels, right, faulty, suspects];
    let [kernels, right, faulty, suspects] = lists.map(|list| parse_names(list).expect("kernels"));
    let work = CheckWork {
        kernels: &kernels,
        right: &right,
        faulty: &faulty,
        suspects: &suspects,
    };
    let is_complete = self_check::run(&device, policy, work, |step| {
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
        Request::Check(work) => [work.kernels, work.right, work.faulty, work.suspects]
            .map(|kernels| kernels.join(","))
            .join(";"),
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
    between: Duration::from_secs(30),
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
    let silences = (SILENCE, SILENCE);
    let found = self_check::supervise(command, silences, budget, |_| kept(path), keep);
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
        ("vg_upload", "an illegal memory access"),
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
    assert_eq!((found.checked, found.left), (verdict.len(), vec![]));
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
    let mut rest = first.left.len();
    assert_eq!(rest, parse_names(CHECKED).expect("kernels").len());
    let mut verdict = Verdict::default();
    for kernel in parse_names("vg_upload,vg_gemm_q4_k").expect("kernels") {
        verdict.record(kernel, Finding::Right);
        rest -= 1;
    }
    std::fs::write(&path, verdict.to_text("a shim")).expect("a file");
    let second = check(&path, "", Duration::MAX);
    assert_eq!((second.checked, second.left), (rest, vec![]));
    assert_eq!(kept(&path).len(), first.left.len());
    assert_eq!(kept(&path).faulty().count(), 0);
}

#[test]
fn a_check_without_a_device_is_an_error() {
    let command = |_: Request<'_>| Command::new("false");
    let found = self_check::supervise(
        command,
        (SILENCE, SILENCE),
        Duration::MAX,
        |_| Verdict::default(),
        |_, _| (),
    );
    let error = found.expect_err("there is no device").to_string();
    assert!(error.contains("no device: its process ended"), "{error}");
}

/// What the supervisor finds with children that run these lines of a shell, after the list of two
/// kernels. `$N` is the number of the child.
fn with_children(script: &str) -> Result<self_check::Supervised, SuperviseError> {
    let started = AtomicU32::new(0);
    let command = |request: Request<'_>| {
        let mut command = Command::new("sh");
        command.arg("-c");
        match request {
            Request::List => command.arg(
                "echo self-check device a shim
                 echo self-check kernel vg_upload
                 echo self-check kernel vg_rope_rows",
            ),
            Request::Check(work) => { command.arg(script) }
                .env(
                    "N",
                    (started.fetch_add(1, Ordering::Relaxed) + 1).to_string(),
                )
                .env("KERNEL", work.kernels[0])
                .env("SUSPECTS", work.suspects.join(",")),
        };
        command
    };
    let keep = |_: &str, _: &Verdict| ();
    let before = |_: &str| Verdict::default();
    self_check::supervise(command, (SILENCE, SILENCE), Duration::MAX, before, keep)
}

#[test]
fn a_signal_from_outside_says_nothing_about_a_kernel() {
    let found = with_children("echo self-check begins $KERNEL; kill -TERM $$");
    let error = found.expect_err("interrupted");
    assert!(matches!(error, SuperviseError::Interrupted(_)), "{error}");
    // The kernel of the operating system had no memory, or the child has panicked.
    for end in ["kill -KILL $$", "exit 101"] {
        let found = with_children(&format!("echo self-check begins $KERNEL; {end}"));
        let found = found.expect("the children start");
        assert!(found.verdict.is_empty(), "{end}: {:?}", found.verdict);
        assert_eq!(found.left, ["vg_upload", "vg_rope_rows"], "{end}");
    }
}

#[test]
fn a_kernel_that_fails_in_a_later_case_is_faulty() {
    let script = "echo self-check begins $KERNEL
        echo self-check instead vg_copy
        echo self-check begins $KERNEL
        kill -SEGV $$";
    let found = with_children(script).expect("the children start");
    let faulty: Vec<_> = found.verdict.faulty().map(|(kernel, _)| kernel).collect();
    assert_eq!(faulty, ["vg_rope_rows", "vg_upload"]);
    // But not if the fallback of the kernel fails.
    let found = with_children(&script.replace("begins $KERNEL\n        kill", "instead x; kill"));
    let found = found.expect("the children start");
    assert!(found.verdict.is_empty(), "{:?}", found.verdict);
}

#[test]
fn a_kernel_is_faulty_if_it_fails_twice() {
    let script = "echo self-check begins $KERNEL
        if [ $N = 1 ]; then kill -SEGV $$; fi
        if [ $N = 2 ] && [ \"$SUSPECTS\" != vg_upload ]; then exit 1; fi
        echo self-check ends vg_upload right
        echo self-check begins vg_rope_rows; kill -SEGV $$";
    let found = with_children(script).expect("the children start");
    assert_eq!(found.verdict.finding("vg_upload"), Some(&Finding::Right));
    let faulty: Vec<_> = found.verdict.faulty().collect();
    let reason = "its process ended with signal: 11 (SIGSEGV)";
    assert_eq!(faulty, [("vg_rope_rows", reason)]);
}

#[test]
fn a_kernel_is_not_faulty_because_of_one_that_it_works_for() {
    // No product of columns in Q4_K is right: the kernel that converts their activations is.
    let mut device = Shim::default();
    device.faults = vec![("vg_mmv_q4_0", Fault::NoResults)];
    let device: Arc<dyn Device> = Arc::new(device);
    let kernels = parse_names("vg_quantize_q8,vg_mmv_q4_0,vg_mmv_q4_1").expect("kernels");
    let mut found = Verdict::default();
    let mut failed = Vec::new();
    while let Some(&next) = { kernels.iter() }.find(|kernel| found.finding(kernel).is_none()) {
        let right = { kernels.iter().copied() }
            .filter(|kernel| found.finding(kernel) == Some(&Finding::Right));
        let suspects = failed.clone();
        let work = CheckWork {
            kernels: &[next],
            right: &right.collect::<Vec<_>>(),
            faulty: &found.faulty().map(|(kernel, _)| kernel).collect::<Vec<_>>(),
            suspects: &suspects,
        };
        let ran = self_check::run(&device, LaunchPolicy::default(), work, |step| match step {
            CheckEvent::Ends(kernel, CheckOutcome::Found(Finding::Faulty(_)))
                if !failed.contains(&kernel) =>
            {
                failed.push(kernel);
            }
            CheckEvent::Ends(kernel, CheckOutcome::Found(finding)) => found.record(kernel, finding),
            _ => {}
        });
        ran.expect("an engine starts");
    }
    let faulty: Vec<_> = found.faulty().map(|(kernel, _)| kernel).collect();
    assert_eq!(faulty, ["vg_mmv_q4_0"], "{failed:?}");
}

#[test]
fn messages_round_trip() {
    for message in [
        Message::Device("0123".into()),
        Message::Kernel("vg_rope"),
        Message::Begins("vg_rope"),
        Message::WrongFallback(vec!["vg_rope".into()]),
        Message::Instead(vec!["vg_rope".into(), "vg_move".into()]),
        Message::Ends("vg_rope", CheckOutcome::Unchecked),
        Message::Ends("vg_rope", CheckOutcome::Found(Finding::Right)),
        Message::Ends(
            "vg_rope",
            CheckOutcome::Found(Finding::Faulty("off by 1\nor 2".into())),
        ),
        Message::Done,
    ] {
        let line = format!("test child ... {message}");
        let read = Message::parse(&line).expect("a message");
        assert_eq!(read.to_string(), message.to_string());
    }
    assert_eq!(Message::parse("test child ... ok"), None);
}
