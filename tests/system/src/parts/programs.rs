//! One plugin file in four releases of ggml, loaded into the process in every possible way.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use xtask_common::dist::Dist;
use xtask_common::llama;
use xtask_common::model::FileType;
use xtask_common::node::Node;
use xtask_common::node_llama::{self, Backend};
use xtask_common::process;
use xtask_common::progress::heading;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use crate::test_run::{PROMPT, Served, TestRun};

/// The number of tokens that must be equal.
const TOKENS: usize = 32;

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("programs with every ggml");
    let Some(dist) = tests.dist() else { return };
    let ready = tests.prepare("several ggml releases", Releases::gather);
    let Some(releases) = ready else { return };
    let served = tests.prepare("an executor", |tests| {
        Served::start(&dist, &tests.log("programs-vgpu-serve"))
    });
    let Some(served) = served else { return };
    let endpoint = served.executor.endpoint();

    for (release, api, scope, library) in &releases.known {
        let name = format!("ggml {release}, {scope}");
        tests.check(&name, |_, _| {
            let (status, out, err) = releases.any_ggml(&dist, &endpoint, scope, library)?;
            let expected = format!("{release} api {api} VGPU0 ok");
            ensure!(
                out == expected,
                "{out:?} instead of {expected:?} ({status:?}): {err}"
            );
            Ok(String::new())
        });
    }
    let (release, library) = &releases.too_old;
    tests.check(&format!("ggml {release}, older than any known"), |_, _| {
        let (status, _, err) = releases.any_ggml(&dist, &endpoint, "local", library)?;
        ensure!(status == Some(3), "exit status {status:?}: {err}");
        let line = err.lines().find(|line| line.contains("ggml-vgpu: no vGPU"));
        let line = line.with_context(|| format!("no log line: {err}"))?;
        let words = format!("ggml {release} is too old for this plugin, which works with 0.20");
        ensure!(line.contains(&words), "{line}");
        Ok(line.to_owned())
    });
    let name = format!("tokens on ggml {}, as from its CPU", llama::NEWEST_RELEASE);
    tests.check(&name, |tests, _| {
        let model = tests.model(FileType::F16)?;
        let stats = workspace::reports().join("programs.stats.json");
        let complete = |backend: &Backend<'_>| {
            let layers = if matches!(backend, Backend::Cpu) {
                "0"
            } else {
                "99"
            };
            let mut complete = Command::new(&releases.complete);
            complete.arg(&releases.backends).arg(&model).args([
                layers,
                &TOKENS.to_string(),
                PROMPT,
            ]);
            node_llama::set_backend(&mut complete, backend, &stats);
            process::output(&mut complete)
        };
        let cpu = complete(&Backend::Cpu)?;
        let vgpu = complete(&Backend::Plugin {
            dist: &dist,
            endpoint: &endpoint,
        })?;
        let count = vgpu.split_whitespace().count();
        ensure!(count == TOKENS, "{count} tokens: {vgpu}");
        ensure!(vgpu == cpu, "{vgpu}, but {cpu} from the CPU");
        let graphs = xtask_common::stats::Stats::read(&stats)?.graphs;
        ensure!(graphs >= TOKENS as u64, "{graphs} graphs on VGPU0");
        Ok(format!("{count} tokens, {graphs} graphs on VGPU0"))
    });
    tests.check("the executor ends cleanly", |_, _| {
        served.executor.stop().map(|()| String::new())
    });
}

/// The prerequisites of the checks.
struct Releases {
    /// The release, the API version, the kind of loading, and the file.
    known: Vec<(&'static str, u32, &'static str, PathBuf)>,
    too_old: (&'static str, PathBuf),
    /// The program without a ggml, and the one with the newest ggml inside.
    any_ggml: PathBuf,
    any_ggml_inside: PathBuf,
    /// A program that uses the libllama of the newest ggml.
    complete: PathBuf,
    backends: PathBuf,
    _scratch: Scratch,
}

impl Releases {
    fn gather(tests: &TestRun<'_>) -> Result<Releases> {
        let scratch = Scratch::new()?;
        let newest = llama::build_newest(tests.cache)?;
        let programs = workspace::root().join("tests/programs");
        let cc = |arguments: &[&str], output: &str, link: &dyn Fn(&mut Command)| {
            let output = scratch.path().join(output);
            let mut cc = Command::new("c++");
            cc.args(arguments).arg("-o").arg(&output);
            link(&mut cc);
            process::output(&mut cc).map(|_| output)
        };
        let archive = newest.join("static/libggml-base.a");
        let whole = |cc: &mut Command| {
            cc.arg("-Wl,--whole-archive")
                .arg(&archive)
                .arg("-Wl,--no-whole-archive");
            cc.args(["-fopenmp", "-ldl", "-lpthread", "-lm"]);
        };
        let source = programs.join("any_ggml.c");
        let any_ggml = |cc: &mut Command| {
            cc.args(["-Wall", "-x", "c"])
                .arg(&source)
                .args(["-x", "none", "-ldl"]);
        };
        // The same objects in a library with another name, as the author of a program may choose.
        let renamed = cc(
            &["-shared", "-Wl,-soname,libtensors.so.7"],
            "libtensors.so.7",
            &whole,
        )?;
        let complete = cc(&["-std=c++17", "-Wall", "-O1"], "complete", &|cc| {
            let source = llama::newest_source(tests.cache).map(|dir| dir.join("llama.cpp"));
            for include in ["include", "ggml/include"] {
                // The compiler reports a missing folder.
                cc.arg("-I")
                    .arg(source.as_deref().unwrap_or(Path::new("")).join(include));
            }
            let libraries = newest.join("shared/bin");
            cc.arg(programs.join("complete.cpp"))
                .arg("-L")
                .arg(&libraries);
            cc.arg(format!("-Wl,-rpath,{}", libraries.display()));
            cc.args(["-lllama", "-lggml", "-lggml-base"]);
        })?;
        let prebuilt = |version| -> Result<PathBuf> {
            Node::prebuilt(tests.cache, version).map(|bin| bin.join("libggml-base.so"))
        };
        let (first, second) = (prebuilt("3.21.1")?, prebuilt("3.22.1")?);
        let built = llama::build(tests.cache, llama::Stage::Ops)?.join("libggml-base.so.0");
        let shared = newest.join("shared/bin/libggml-base.so.0");
        let mut known = Vec::new();
        for (release, api, library) in [
            ("0.23.0", 2, first),
            ("0.25.1", 2, second),
            (llama::RELEASE, 2, built),
            (llama::NEWEST_RELEASE, 3, shared),
        ] {
            known.push((release, api, "global", library.clone()));
            known.push((release, api, "local", library));
        }
        for (scope, library) in [
            ("renamed, global", renamed.clone()),
            ("renamed, local", renamed),
            ("inside the executable", archive.clone()),
        ] {
            known.push((llama::NEWEST_RELEASE, 3, scope, library));
        }
        Ok(Releases {
            known,
            too_old: ("0.19.0", prebuilt("3.20.0")?),
            any_ggml: cc(&[], "any-ggml", &any_ggml)?,
            any_ggml_inside: cc(&["-rdynamic"], "any-ggml-inside", &|cc| {
                any_ggml(cc);
                whole(cc);
            })?,
            complete,
            backends: newest.join("shared/bin"),
            _scratch: scratch,
        })
    }

    /// Runs the program. Returns its exit status and its output.
    fn any_ggml(
        &self,
        dist: &Dist,
        endpoint: &str,
        scope: &str,
        library: &Path,
    ) -> Result<(Option<i32>, String, String)> {
        let (program, scope) = match scope {
            "inside the executable" => (&self.any_ggml_inside, "self"),
            other => (&self.any_ggml, other.trim_start_matches("renamed, ")),
        };
        let mut run = Command::new(program);
        run.arg(scope).arg(library).arg(&dist.plugin);
        let none = workspace::reports().join("unused.stats.json");
        node_llama::set_backend(&mut run, &Backend::Plugin { dist, endpoint }, &none);
        let output = run.output().context("starting a program")?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        Ok((
            output.status.code(),
            text(&output.stdout),
            text(&output.stderr),
        ))
    }
}
