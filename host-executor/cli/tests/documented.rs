//! The configurations and the commands of the documentation, as a user copies them.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use served::{Scratch, Serve, vgpu};

/// The pages.
fn pages() -> Vec<PathBuf> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let entries = fs::read_dir(&docs).expect("the documentation");
    let mut pages: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    pages.push(docs.join("../README.md"));
    pages.sort();
    pages
}

/// The blocks of a page in this language, without their indentation, with their lines.
fn blocks(page: &str, language: &str) -> Vec<(usize, String)> {
    let fence = format!("```{language}");
    let mut blocks: Vec<(usize, String)> = Vec::new();
    let mut indentation = None;
    for (number, line) in (1..).zip(page.lines()) {
        let text = line.trim_start();
        let width = line.len() - text.len();
        match indentation {
            None if text == fence => {
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

    let (mut checked, mut wrong) = (0, Vec::new());
    for page in &pages() {
        let text = fs::read_to_string(page).expect("a page");
        for (line, block) in blocks(&text, "toml") {
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
        let blocks = blocks(&page, "toml");
        let found = mistake(&blocks[0].1, &scratch, &certificates);
        assert!(found.is_some(), "{bad}");
    }
}

/// The arguments of each `vgpu` in a block of shell commands: here, over SSH, in a container.
fn commands(block: &str) -> Vec<Vec<String>> {
    let mut commands = Vec::new();
    for line in block.replace("\\\n", " ").lines() {
        let line = line.split(" #").next().unwrap_or_default();
        if line.starts_with('#') {
            continue;
        }
        for command in line
            .split("&&")
            .flat_map(|part| part.split([';', '|', '>']))
        {
            // A synopsis has brackets around what is optional.
            let mut words: Vec<&str> = { command.split_whitespace() }
                .map(|word| word.trim_matches(['[', ']', '"']))
                .collect();
            loop {
                let before = match words[..] {
                    ["sudo", ..] => 1,
                    ["ssh", ..] => 2,
                    ["pct", "exec", _, "--", ..] => 4,
                    ["docker", "compose", ..] => {
                        let inside = words.iter().position(|word| *word == "executor");
                        inside.map_or(words.len(), |at| at + 1)
                    }
                    [first, ..] if first.contains('=') => 1,
                    _ => break,
                };
                words.drain(..before.min(words.len()));
            }
            let is_ours = |word: &&str| *word == "vgpu" || word.ends_with("bin/vgpu");
            let is_built = |word: &&str| *word == "target/dist/vgpu";
            if words
                .first()
                .is_some_and(|word| is_ours(word) || is_built(word))
            {
                commands.push(words[1..].iter().map(|word| (*word).to_owned()).collect());
            }
        }
    }
    commands
}

/// Why the program does not accept these arguments. Nothing is done: the last one asks for help.
fn refusal(arguments: &[String]) -> Option<String> {
    let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let end = arguments.iter().position(|word| *word == "--");
    arguments.insert(end.unwrap_or(arguments.len()), "--help");
    let output = vgpu(&arguments).output().expect("the command starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success()).then_some(said)
}

#[test]
fn commands_of_the_documentation_are_accepted() {
    let (mut checked, mut wrong) = (0, Vec::new());
    for page in &pages() {
        let text = fs::read_to_string(page).expect("a page");
        for (line, block) in blocks(&text, "sh") {
            for command in commands(&block) {
                checked += 1;
                let why = refusal(&command);
                let shown = command.join(" ");
                wrong.extend(why.map(|why| format!("{}:{line}: {shown}: {why}", page.display())));
            }
        }
    }
    assert!(checked > 40, "only {checked} commands were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));

    // The check reads what a shell would, and sees an unknown flag, command and value.
    let block = "export A=$(b)\nsudo vgpu ps # x\nA=b bin/vgpu serve \\\n    --listne x && vgpu p\n\
                 ssh root@a vgpu doctor\npct exec 7 -- vgpu serve --memory 9x\n\
                 install -o vgpu -g vgpu x\n";
    let found = commands(block);
    let joined: Vec<String> = found.iter().map(|command| command.join(" ")).collect();
    assert_eq!(
        joined,
        ["ps", "serve --listne x", "p", "doctor", "serve --memory 9x"]
    );
    let refused: Vec<bool> = found
        .iter()
        .map(|command| refusal(command).is_some())
        .collect();
    assert_eq!(refused, [false, true, true, false, true]);
}

/// Somebody with a laptop: the server of the quickstart, a program beside it, and what says more.
#[test]
fn quickstart_is_followed() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let page = fs::read_to_string(docs.join("quickstart.md")).expect("a page");
    let section = page
        .split("\n## One machine, your own model\n")
        .nth(1)
        .expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let scratch = Scratch::new("quickstart");
    let socket = scratch.path().join("vgpu.sock");
    // The one difference from what a user types: tests do not share /tmp/vgpu.sock.
    let here = |text: &str| text.replace("/tmp/vgpu.sock", socket.to_str().expect("text"));
    let blocks = blocks(section, "sh");
    let all: Vec<_> = blocks
        .iter()
        .flat_map(|(_, block)| commands(block))
        .collect();
    let [serve] = &all[..] else {
        panic!("not one command: {all:?}");
    };
    let arguments: Vec<String> = serve.iter().map(|argument| here(argument)).collect();
    let mut command = Command::new(env!("CARGO_BIN_EXE_vgpu"));
    command.args(&arguments).env_remove("VGPU_LOG");
    let running = Serve::of(command);
    let ready = section.split('`').find(|text| text.starts_with("ready "));
    let ready = here(ready.expect("the page says what is printed"));
    assert_eq!(running.ready.trim_end(), ready);
    // The endpoint that the page gives to a program.
    let endpoint = section.split_whitespace().find_map(|word| {
        let endpoint = word.strip_prefix("VGPU_ENDPOINT=")?;
        endpoint.starts_with("unix:").then(|| here(endpoint))
    });
    let mut wait = vgpu(&["wait", "--timeout", "30"]);
    wait.env("VGPU_ENDPOINT", endpoint.expect("an endpoint"));
    let output = wait.output().expect("the command starts");
    assert!(output.status.success(), "{output:?}");
}
