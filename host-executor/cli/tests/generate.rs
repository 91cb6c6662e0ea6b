//! The man pages and completions that `vgpu generate` writes.

use std::fs;
use std::path::Path;
use std::process::Command;

fn generated() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let mut vgpu = Command::new(env!("CARGO_BIN_EXE_vgpu"));
    let status = vgpu.arg("generate").arg(folder.path()).status();
    assert!(status.expect("it starts").success());
    folder
}

fn read(folder: &Path, file: &str) -> String {
    fs::read_to_string(folder.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

#[test]
fn every_command_has_a_man_page() {
    let folder = generated();
    for (page, words) in [
        ("vgpu", vec![".TH vgpu 1", "vgpu\\-serve(1)"]),
        (
            "vgpu-serve",
            vec![".TH vgpu\\-serve 1", "\\-\\-metrics", "ready ENDPOINT"],
        ),
        ("vgpu-cert-renew", vec![".TH vgpu\\-cert\\-renew 1"]),
        ("vgpu-doctor", vec!["\\-\\-endpoint"]),
    ] {
        let text = read(folder.path(), &format!("man/man1/{page}.1"));
        for words in words {
            // Hyphens may be escaped.
            let (text, words) = (text.replace('\\', ""), words.replace('\\', ""));
            assert!(text.contains(&words), "{words} is not in {page}:\n{text}");
        }
    }
    // What only programs call has none.
    for entry in fs::read_dir(folder.path().join("man/man1")).expect("pages") {
        let name = entry.expect("a page").file_name();
        let name = name.to_string_lossy();
        for hidden in ["serve-guest", "exec", "plugin", "generate"] {
            assert!(!name.contains(hidden), "{name}");
        }
    }
}

#[test]
fn bash_completes_commands_and_flags() {
    let folder = generated();
    let file = folder.path().join("bash-completion/completions/vgpu");
    let complete = |words: &str| {
        let script = format!(
            "source '{}'; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _vgpu vgpu \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD - 1]}}\"; \
             echo \"${{COMPREPLY[@]}}\"",
            file.display()
        );
        let output = Command::new("bash").args(["-c", &script]).output();
        let output = output.expect("bash");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout)
            .expect("text")
            .trim()
            .to_owned()
    };
    assert_eq!(complete("vgpu ser"), "serve");
    assert_eq!(complete("vgpu serve --metrics-a"), "--metrics-allow-remote");
    assert_eq!(complete("vgpu doctor --end"), "--endpoint");
    for (file, words) in [
        ("fish/vendor_completions.d/vgpu.fish", "-a \"doctor\""),
        ("zsh/vendor-completions/_vgpu", "#compdef vgpu"),
    ] {
        assert!(read(folder.path(), file).contains(words), "{file}");
    }
}
