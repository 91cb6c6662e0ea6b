//! `cargo run -q -p vgpu-layers -- [PACKAGE…]`: the module cycles of packages of this workspace,
//! with what makes them.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use vgpu_layers::{Disk, Tree, graph, packages, root};

fn main() -> ExitCode {
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the cycles and returns their number.
fn run(wanted: &[String]) -> Result<usize> {
    let packages = packages()?;
    for name in wanted {
        ensure!(
            packages.iter().any(|p| p.name == *name),
            "there is no package {name}"
        );
    }
    let sources = Disk {
        root: root().to_owned(),
    };
    let mut found = 0;
    for package in packages
        .iter()
        .filter(|p| wanted.is_empty() || wanted.contains(&p.name))
    {
        let code = { package.roots.iter() }.map(|path| (path, Tree::parse(&sources, path)));
        let tests =
            { package.test_roots.iter() }.map(|path| (path, Tree::parse_test(&sources, path)));
        for (path, tree) in code.chain(tests) {
            let mut tree = tree?;
            let cycles = graph(&mut tree).cycles();
            println!(
                "{} ({}): {} files, {} cycles",
                package.name,
                path.display(),
                tree.files().count(),
                cycles.len()
            );
            cycles.iter().for_each(|cycle| print!("{cycle}"));
            found += cycles.len();
        }
    }
    Ok(found)
}
