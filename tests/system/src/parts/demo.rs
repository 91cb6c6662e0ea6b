//! `cargo xtask demo` over both links, as a new user runs it, and on ggml's Vulkan backend.

use anyhow::Context as _;

use xtask_common::packages::{self, SoftwareVulkan};
use xtask_common::process;
use xtask_common::progress::heading;
use xtask_common::workspace;

use crate::test_run::TestRun;

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("the demo");
    let Some(dist) = tests.dist() else { return };
    let variants: [(&str, &[&str]); 2] = [
        ("demo, f16", &["--type", "f16"]),
        ("demo, q4_k_m, inproc", &["--type", "q4_k_m", "--inproc"]),
    ];
    for (name, arguments) in variants {
        tests.check(name, |tests, step| {
            let mut cargo = workspace::cargo();
            cargo.args(["xtask", "demo"]).args(arguments);
            // The first run builds everything, as for a new user. The second does so only with
            // `--full`.
            if arguments.contains(&"--inproc") && !tests.options.full {
                let built = dist.plugin.parent().context("a build lies in a folder")?;
                cargo.arg("--dist").arg(built);
            }
            process::run(&mut cargo, step, &tests.log(&name.replace(", ", "-")))?;
            Ok(String::new())
        });
    }
    if !tests.options.full {
        return;
    }
    tests.check("demo, the engine ggml over Vulkan", |tests, step| {
        let backend = packages::ggml_vulkan(tests.cache)?.join("libggml-vulkan.so");
        let built = dist.plugin.parent().context("a build lies in a folder")?;
        let mut cargo = workspace::cargo();
        SoftwareVulkan::ensure(tests.cache)?.set(&mut cargo, &[]);
        // The driver takes minutes for more.
        cargo.args(["xtask", "demo", "--tiny", "--tokens", "8", "--engine"]);
        cargo.arg(format!("ggml:{}", backend.display()));
        cargo.arg("--dist").arg(built);
        process::run(&mut cargo, step, &tests.log("demo-ggml-vulkan"))?;
        Ok(String::new())
    });
}
