//! The configurations of the documentation, as a user copies them.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::path::{Path, PathBuf};

use served::{Scratch, vgpu};

/// The blocks of a page that are marked as `toml`, without their indentation, with their lines.
fn toml_blocks(page: &str) -> Vec<(usize, String)> {
    let mut blocks: Vec<(usize, String)> = Vec::new();
    let mut indentation = None;
    for (number, line) in (1..).zip(page.lines()) {
        let text = line.trim_start();
        let width = line.len() - text.len();
        match indentation {
            None if text == "```toml" => {
                indentation = Some(width);
                blocks.push((number + 1, String::new()));
            }
            Some(_) if text.starts_with("```") => indentation = None,
            Some(indent) => {
                if let Some((_, block)) = blocks.last_mut() {
                    block.push_str(&line[indent.min(width)..]);
                    block.push('\n');
                }
            }
            None => {}
        }
    }
    blocks
}

/// Checks a configuration, with the certificates of a test instead of those of a host, on an engine
/// with much memory, or on the GPUs that the configuration names. Returns what is wrong.
fn mistake(block: &str, scratch: &Scratch, certificates: &Path) -> Option<String> {
    let certificates = certificates.to_str().expect("text");
    let block = block.replace("/etc/vgpu/certs", certificates);
    let engine = match block.contains("[engine]") {
        true => "",
        false => "engine = { kind = \"cpu\", memory = \"1T\" }\n",
    };
    let file = scratch.path().join("vgpu.toml");
    fs::write(&file, format!("{engine}{block}")).expect("a file");
    let mut check = vgpu(&["check-config"]);
    if block.contains("cuda:") {
        // Two GPUs of the stand-in for NVIDIA's driver. Without a folder for verdicts, no kernel is
        // checked.
        let library = vgpu_driver_standin::folder().expect("the library");
        check
            .env("LD_LIBRARY_PATH", library)
            .env("VGPU_STANDIN_DEVICES", "H100,H100")
            .env("VGPU_CACHE", "/dev/null");
    }
    let output = check.arg(&file).output().expect("the command starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success()).then_some(said)
}

#[test]
fn configurations_of_the_documentation_are_valid() {
    let scratch = Scratch::new("documented");
    let authority = scratch.path().join("ca");
    let mut cert = vgpu(&["cert"]);
    cert.arg(&authority)
        .args(["host", "gpu1", "--address", "127.0.0.1"]);
    let output = cert.output().expect("the command starts");
    assert!(output.status.success(), "{output:?}");
    let certificates = authority.join("gpu1");

    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let entries = fs::read_dir(&docs).expect("the documentation");
    let mut pages: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    pages.push(docs.join("../README.md"));
    let (mut checked, mut wrong) = (0, Vec::new());
    for page in &pages {
        let text = fs::read_to_string(page).expect("a page");
        for (line, block) in toml_blocks(&text) {
            checked += 1;
            let found = mistake(&block, &scratch, &certificates);
            wrong.extend(found.map(|why| format!("{}:{line}: {why}", page.display())));
        }
    }
    assert!(checked > 4, "only {checked} configurations were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));

    // The check sees an unknown key, a quota that does not fit, and an indented block.
    for bad in [
        "[server]\nlistne = []\n",
        "[[guest]]\nname = \"a\"\nuids = [1]\nmemory = \"2T\"\n",
    ] {
        let page = format!("1. Text\n\n   ```toml\n   {bad}   ```\n");
        let blocks = toml_blocks(&page);
        let found = mistake(&blocks[0].1, &scratch, &certificates);
        assert!(found.is_some(), "{bad}");
    }
}
