//! `vgpu install` and `vgpu uninstall`, in file systems made for the test.

#[path = "served/program.rs"]
mod program;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const NEEDED: &str = "ggml_version ggml_backend_buffer_init ggml_op_name ggml_unary_op_name \
                      ggml_glu_op_name ggml_type_name ggml_nbytes";
const SERIES: &str = "0.20-0.25 (API 2), 0.26 (API 3)";

/// A file system with an Ollama and its service, and a plugin beside it.
struct Machine {
    _folder: tempfile::TempDir,
    root: PathBuf,
    plugin: PathBuf,
}

impl Machine {
    fn new(test: &str) -> Machine {
        Machine::with_ggml(test, &["-DVERSION=\"0.21.0\""])
    }

    fn with_ggml(test: &str, defines: &[&str]) -> Machine {
        let folder = tempfile::Builder::new().prefix(test).tempdir();
        let folder = folder.expect("a new folder");
        let root = folder.path().to_owned();
        let lib = root.join("usr/local/lib/ollama");
        fs::create_dir_all(&lib).expect("a new folder");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/abi/fake_ggml.c");
        let base = lib.join("libggml-base.so.0.21.0");
        compile(&source, &base, "libggml-base.so.0", defines);
        symlink("libggml-base.so.0.21.0", lib.join("libggml-base.so.0")).expect("a link");
        symlink("libggml-base.so.0", lib.join("libggml-base.so")).expect("a link");
        fs::write(lib.join("llama-server"), "").expect("a file");
        fs::create_dir_all(root.join("usr/local/bin")).expect("a folder");
        fs::write(root.join("usr/local/bin/ollama"), "").expect("a file");
        let units = root.join("etc/systemd/system");
        fs::create_dir_all(&units).expect("a folder");
        let unit = "[Service]\nExecStart=/usr/local/bin/ollama serve\n";
        fs::write(units.join("ollama.service"), unit).expect("a file");
        let plugin = root.join("libggml-vgpu.so");
        compile_plugin(&plugin, "1");
        Machine {
            _folder: folder,
            root,
            plugin,
        }
    }

    fn vgpu(&self, command: &str, more: &[&str]) -> Output {
        let mut vgpu = Command::new(env!("CARGO_BIN_EXE_vgpu"));
        vgpu.arg(command)
            .arg("--root")
            .arg(&self.root)
            .env_remove("VGPU_ENDPOINT");
        if command == "install" {
            vgpu.arg("--plugin").arg(&self.plugin);
        }
        vgpu.args(more).output().expect("the command starts")
    }

    fn install(&self, more: &[&str]) -> String {
        succeeded(self.vgpu("install", more))
    }

    /// Runs a command that must change nothing. Returns its error.
    fn refused(&self, command: &str, more: &[&str]) -> String {
        let before = self.files();
        let output = self.vgpu(command, more);
        let text = String::from_utf8(output.stderr).expect("text");
        assert!(!output.status.success(), "{text}");
        assert_eq!(self.files(), before, "{text}");
        text
    }

    fn lib(&self, name: &str) -> PathBuf {
        self.root.join("usr/local/lib/ollama").join(name)
    }

    fn drop_in(&self) -> PathBuf {
        self.root
            .join("etc/systemd/system/ollama.service.d/vgpu.conf")
    }

    /// All files, with permissions and contents.
    fn files(&self) -> Vec<(PathBuf, u32, Vec<u8>)> {
        let mut files = Vec::new();
        let mut folders = vec![self.root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                let mode = fs::symlink_metadata(&path)
                    .expect("it is there")
                    .permissions()
                    .mode();
                files.push((path.clone(), mode, fs::read(&path).unwrap_or_default()));
                if path.is_dir() {
                    folders.push(path);
                }
            }
        }
        files.sort();
        files
    }
}

fn compile(source: &Path, library: &Path, soname: &str, defines: &[&str]) {
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-w"])
        .arg(format!("-Wl,-soname,{soname}"))
        .args(defines)
        .arg("-o")
        .arg(library)
        .arg(source)
        .status()
        .expect("a C compiler");
    assert!(status.success());
}

fn compile_plugin(library: &Path, version: &str) {
    let source = library.with_extension("c");
    let text = format!(
        "const char stamp[] = \"ggml-vgpu-stamp: plugin {version} (test), ggml {SERIES}\";\n\
         const char needs[] = \"ggml-vgpu-needs: {NEEDED}\";\n\
         int ggml_backend_score(void) {{ return 1; }}\n\
         void * ggml_backend_init(void) {{ return 0; }}\n"
    );
    fs::write(&source, text).expect("a file");
    compile(&source, library, "libggml-vgpu.so", &[]);
}

fn succeeded(output: Output) -> String {
    let (out, err) = (
        output.stdout,
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    assert!(output.status.success(), "{err}");
    String::from_utf8(out).expect("text")
}

/// What `vgpu doctor` says of Ollama, and its last line.
fn doctor(machine: &Machine) -> (String, String) {
    let output = machine.vgpu("doctor", &[]);
    let text = String::from_utf8(output.stdout).expect("text");
    let line = text.lines().find(|line| line.contains(" ollama "));
    let last = text.lines().next_back();
    (
        line.expect("a check").to_owned(),
        last.expect("a line").to_owned(),
    )
}

#[test]
fn doctor_looks_at_ollama() {
    let machine = Machine::new("doctor");
    // An executor, so that Ollama is the first failure.
    let socket = machine.root.join("run/vgpu/vgpu.sock");
    fs::create_dir_all(socket.parent().expect("a folder")).expect("a folder");
    let mut serve = Command::new(env!("CARGO_BIN_EXE_vgpu"));
    let mut serve = serve
        .args(["serve", "--engine", "cpu", "--threads", "1"])
        .args(["--memory", "64M", "--listen"])
        .arg(format!("unix:{}", socket.display()))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut ready = String::new();
    let stdout = serve.stdout.as_mut().expect("piped");
    BufReader::new(stdout)
        .read_line(&mut ready)
        .expect("a line");

    let (line, _) = doctor(&machine);
    assert!(line.contains("does not have the plugin"), "{line}");
    machine.install(&[]);
    let (line, last) = doctor(&machine);
    assert!(
        line.starts_with("ok") && line.contains("vgpu.conf"),
        "{line}"
    );
    assert_eq!(last, "This machine can use a vGPU.");
    let drop_in = "etc/systemd/system/ollama.service.d/vgpu.conf";
    fs::remove_file(machine.root.join(drop_in)).expect("it is there");
    let (line, last) = doctor(&machine);
    assert!(line.starts_with("FAIL") && line.contains(drop_in), "{line}");
    assert_eq!(last, "next: sudo vgpu install");
    // Another Ollama took the place of the one that the plugin works with.
    let newer = Machine::with_ggml("doctor-newer", &["-DVERSION=\"0.99.0\""]);
    let base = "libggml-base.so.0.21.0";
    fs::copy(newer.lib(base), machine.lib(base)).expect("a copy");
    let (line, last) = doctor(&machine);
    assert!(
        line.starts_with("FAIL") && line.contains("is ggml 0.99.0"),
        "{line}"
    );
    assert_eq!(last, "next: sudo vgpu install --dry-run");
    serve.kill().expect("it runs");
    serve.wait().expect("it ends");
}

#[test]
fn both_files_are_installed_and_removed_and_nothing_else_changes() {
    let machine = Machine::new("comes");
    let before = machine.files();
    let dry = machine.install(&["--dry-run"]);
    assert_eq!(machine.files(), before, "a dry run changes nothing");
    assert!(
        dry.contains("write    ") && dry.contains("dry run"),
        "{dry}"
    );
    assert!(dry.contains("OLLAMA_LLM_LIBRARY=vgpu"), "{dry}");

    let said = machine.install(&["--endpoint", "unix:/run/vgpu/vgpu.sock"]);
    for words in [
        "ggml-vgpu 1 (test)",
        "0.21.0 (API 2)",
        "libggml-base.so.0.21.0",
        "systemctl daemon-reload && systemctl restart ollama",
    ] {
        assert!(said.contains(words), "{words:?} is not in\n{said}");
    }
    let plugin = machine.lib("vgpu/libggml-vgpu.so");
    assert_eq!(fs::read(&plugin).ok(), fs::read(&machine.plugin).ok());
    assert_eq!(
        fs::metadata(&plugin).expect("a file").permissions().mode() & 0o777,
        0o644
    );
    let names: Vec<_> = fs::read_dir(machine.lib("vgpu"))
        .expect("a folder")
        .collect();
    assert_eq!(names.len(), 1, "exactly one file: {names:?}");
    let drop_in = fs::read_to_string(machine.drop_in()).expect("a drop-in");
    assert_eq!(
        drop_in,
        "# Written by `vgpu install`; `vgpu uninstall` removes it.\n[Unit]\nAfter=vgpu.service\n\n\
         [Service]\n\
         Environment=\"OLLAMA_LLM_LIBRARY=vgpu\"\nEnvironment=\"OLLAMA_FLASH_ATTENTION=1\"\n\
         Environment=\"VGPU_REQUIRED=1\"\n\
         Environment=\"VGPU_ENDPOINT=unix:/run/vgpu/vgpu.sock\"\n"
    );

    let installed = machine.files();
    let again = machine.install(&["--endpoint", "unix:/run/vgpu/vgpu.sock"]);
    assert!(again.contains("installed already"), "{again}");
    assert_eq!(machine.files(), installed);

    let dry = succeeded(machine.vgpu("uninstall", &["--dry-run"]));
    assert!(dry.contains("remove   "), "{dry}");
    assert_eq!(machine.files(), installed);
    succeeded(machine.vgpu("uninstall", &[]));
    assert_eq!(machine.files(), before, "as if nothing had been");
    let none = succeeded(machine.vgpu("uninstall", &[]));
    assert!(none.contains("no vGPU plugin"), "{none}");
}

#[test]
fn both_files_are_installed_when_nobody_reads_what_is_printed() {
    let machine = Machine::new("unread");
    let (_, unread) = std::io::pipe().expect("a pipe");
    let mut vgpu = Command::new(env!("CARGO_BIN_EXE_vgpu"));
    vgpu.args(["install", "--root"]).arg(&machine.root);
    vgpu.arg("--plugin").arg(&machine.plugin).stdout(unread);
    succeeded(vgpu.output().expect("the command starts"));
    assert!(machine.drop_in().exists());
}

#[test]
fn an_update_replaces_the_plugin_and_a_group_gives_access() {
    let machine = Machine::new("update");
    machine.install(&[]);
    compile_plugin(&machine.plugin, "2");
    fs::write(machine.root.join("etc/group"), "root:x:0:\nvgpu:x:990:\n").expect("a file");
    // The package with this program.
    fs::create_dir_all(machine.root.join("usr/bin")).expect("a folder");
    fs::write(machine.root.join("usr/bin/vgpu"), "").expect("a file");
    let said = machine.install(&[]);
    assert!(said.contains("ggml-vgpu 2"), "{said}");
    let plugin = machine.lib("vgpu/libggml-vgpu.so");
    assert_eq!(fs::read(plugin).ok(), fs::read(&machine.plugin).ok());
    let drop_in = fs::read_to_string(machine.drop_in()).expect("a drop-in");
    let waits = "ExecStartPre=/usr/bin/vgpu wait\nRestart=always\nRestartSec=3\n\
                 SupplementaryGroups=vgpu\n";
    assert!(drop_in.ends_with(waits), "{drop_in}");
    assert_eq!(drop_in.contains(INSTALLS_AGAIN), is_root(), "{drop_in}");
    let installed = "\nEnvironment=\"VGPU_INSTALLED=/usr/local/lib/ollama/vgpu/libggml-vgpu.so\"\n";
    assert!(drop_in.contains(installed), "{drop_in}");
    let unit = "[Unit]\nAfter=vgpu.service\nStartLimitIntervalSec=0\n\n[Service]\n";
    assert!(drop_in.contains(unit), "{drop_in}");
    assert!(!drop_in.contains("VGPU_ENDPOINT"), "{drop_in}");
}

/// The line that installs the plugin again, in a [`Machine`] with the package.
const INSTALLS_AGAIN: &str = "\nExecStartPre=-+/usr/bin/vgpu install --plugin-only \
                              --ollama /usr/local/lib/ollama --plugin /libggml-vgpu.so\n";

fn copy_folder(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(copied.expect("cp").success());
}

/// Whether the files of a [`Machine`] are root's.
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// An update of Ollama removes its folder of libraries, with the plugin.
#[test]
fn plugin_is_installed_again_before_a_start_after_an_update_of_ollama() {
    let machine = Machine::new("again");
    machine.install(&["--endpoint", "unix:/run/vgpu/vgpu.sock"]);
    let installed = machine.files();
    let lib = machine.lib("");
    let again = || {
        let mut vgpu = Command::new(env!("CARGO_BIN_EXE_vgpu"));
        vgpu.args(["install", "--plugin-only", "--ollama"])
            .arg(&lib);
        vgpu.arg("--plugin").arg(&machine.plugin);
        // As the drop-in sets it.
        vgpu.env("VGPU_ENDPOINT", "unix:/run/vgpu/vgpu.sock");
        vgpu.output().expect("the command starts")
    };
    let said = succeeded(again());
    assert!(said.contains("keep     "), "{said}");
    assert_eq!(machine.files(), installed);
    let waits = |words: &str| {
        let mut wait = Command::new(env!("CARGO_BIN_EXE_vgpu"));
        wait.args([
            "wait",
            "--timeout",
            "0",
            "--endpoint",
            "unix:/nobody/listens",
        ]);
        wait.env("VGPU_INSTALLED", machine.lib("vgpu/libggml-vgpu.so"));
        let output = wait.output().expect("the command starts");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(words), "{text}");
    };
    waits("no executor within 0 s");
    fs::remove_dir_all(machine.lib("vgpu")).expect("a folder");
    waits("Ollama would compute on the CPU");
    let said = succeeded(again());
    assert!(said.contains("write    "), "{said}");
    assert!(!said.contains("next:"), "{said}");
    assert_eq!(machine.files(), installed);

    // A release in a folder of its own, to which a link leads.
    let release = |name: &str| machine.root.join("usr/local/lib").join(name);
    let (first, second) = (release("ollama-1"), release("ollama-2"));
    fs::rename(&lib, &first).expect("a folder");
    copy_folder(&first, &second);
    fs::remove_dir_all(second.join("vgpu")).expect("a folder");
    symlink("ollama-2", release("ollama")).expect("a link");
    succeeded(again());
    assert!(second.join("vgpu/libggml-vgpu.so").exists());

    // The new release has a ggml that the plugin does not know: the start fails, and says why.
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/abi/fake_ggml.c");
    let base = machine.lib("libggml-base.so.0.21.0");
    compile(
        &source,
        &base,
        "libggml-base.so.0",
        &["-DVERSION=\"0.27.0\""],
    );
    fs::remove_dir_all(machine.lib("vgpu")).expect("a folder");
    let output = again();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("is ggml 0.27.0; ggml-vgpu 1"), "{text}");
    assert!(!machine.lib("vgpu").exists());
}

/// Runs `vgpu cert`.
fn cert(arguments: &[&str]) {
    let mut vgpu = Command::new(env!("CARGO_BIN_EXE_vgpu"));
    let output = vgpu.arg("cert").args(arguments).output();
    succeeded(output.expect("the command starts"));
}

#[test]
fn certificates_are_checked_and_given_to_ollama() {
    let machine = Machine::new("certs");
    let authority = machine.root.join("ca");
    let authority = authority.to_str().expect("a plain path");
    cert(&[authority, "guest", "alice", "--days", "20"]);
    let folder = machine.root.join("etc/vgpu");
    fs::create_dir_all(&folder).expect("a folder");
    fs::rename(machine.root.join("ca/alice"), folder.join("alice")).expect("a folder");
    let tcp = ["--endpoint", "tcp:gpu1.example.org:4780"];
    let with =
        |endpoint: &[&'static str], folder: &'static str| [endpoint, &["--certs", folder]].concat();
    for (arguments, words) in [
        (with(&[], "/etc/vgpu/alice"), "--endpoint tcp:HOST:PORT"),
        (
            with(
                &["--endpoint", "unix:/run/vgpu/vgpu.sock"],
                "/etc/vgpu/alice",
            ),
            "--endpoint tcp:HOST:PORT",
        ),
        (with(&tcp, "etc/vgpu/alice"), "not an absolute path"),
        (with(&tcp, "/etc/vgpu/bob"), "etc/vgpu/bob"),
        (with(&tcp, "/etc/vgpu/a\"b"), "special in a systemd unit"),
    ] {
        let text = machine.refused("install", &arguments);
        assert!(text.contains(words), "{arguments:?}: {text}");
    }
    // The key of another certificate.
    let key = folder.join("alice/key.pem");
    let good = fs::read(&key).expect("a key");
    cert(&[authority, "guest", "other"]);
    fs::copy(machine.root.join("ca/other/key.pem"), &key).expect("a copy");
    let text = machine.refused("install", &with(&tcp, "/etc/vgpu/alice"));
    assert!(text.contains("--certs"), "{text}");
    fs::write(&key, good).expect("ours");

    let said = machine.install(&with(&tcp, "/etc/vgpu/alice"));
    assert!(
        said.contains("certs    /etc/vgpu/alice: of alice, until "),
        "{said}"
    );
    assert!(
        said.contains("note     ") && said.contains("alice/cert.pem: "),
        "{said}"
    );
    let drop_in = fs::read_to_string(machine.drop_in()).expect("a drop-in");
    let environment = "Environment=\"VGPU_ENDPOINT=tcp:gpu1.example.org:4780\"\n\
                       Environment=\"VGPU_CERTS=/etc/vgpu/alice\"\n";
    assert!(drop_in.contains(environment), "{drop_in}");
}

/// An Ollama that has started without an executor would stay on the CPU. From an archive, the
/// service waits with the program that was unpacked.
#[test]
fn service_waits_with_the_program_of_the_archive() {
    let machine = Machine::new("archive");
    let folder = machine.root.join("opt/ggml-vgpu/bin");
    fs::create_dir_all(&folder).expect("a folder");
    let program = folder.join("vgpu");
    program::copy_program(&program);
    for part in program.ancestors().take(4).chain([machine.root.as_path()]) {
        fs::set_permissions(part, fs::Permissions::from_mode(0o755)).expect("ours");
    }
    let install = || {
        let mut vgpu = Command::new(&program);
        vgpu.arg("install").arg("--root").arg(&machine.root);
        vgpu.arg("--plugin").arg(&machine.plugin);
        vgpu.env_remove("VGPU_ENDPOINT");
        vgpu.output().expect("the command starts")
    };
    succeeded(install());
    let drop_in = fs::read_to_string(machine.drop_in()).expect("a drop-in");
    let waits = "\nExecStartPre=/opt/ggml-vgpu/bin/vgpu wait\nRestart=always\nRestartSec=3\n";
    assert!(drop_in.contains(waits), "{drop_in}");
    let installs = "\nExecStartPre=-+/opt/ggml-vgpu/bin/vgpu install --plugin-only ";
    assert_eq!(drop_in.contains(installs), is_root(), "{drop_in}");
    verify_with_systemd(&drop_in, &program);

    // As an earlier version wrote it. The plugin is where the archive has it.
    fs::create_dir_all(folder.join("../lib/vgpu")).expect("a folder");
    fs::copy(&machine.plugin, folder.join("../lib/vgpu/libggml-vgpu.so")).expect("a copy");
    let doctor = || {
        let mut doctor = Command::new(&program);
        doctor.arg("doctor").arg("--root").arg(&machine.root);
        let output = doctor.output().expect("the command starts");
        String::from_utf8(output.stdout).expect("text")
    };
    succeeded({
        let mut again = Command::new(&program);
        again.arg("install").arg("--root").arg(&machine.root);
        again
            .env_remove("VGPU_ENDPOINT")
            .output()
            .expect("the command starts")
    });
    let said = doctor();
    assert!(!said.contains("is of another version"), "{said}");
    let drop_in = fs::read_to_string(machine.drop_in()).expect("a drop-in");
    let older = drop_in.replace("ExecStartPre=/opt/ggml-vgpu/bin/vgpu wait\n", "");
    fs::write(machine.drop_in(), older).expect("ours");
    let said = doctor();
    assert!(said.contains("is of another version"), "{said}");

    // A start that would fail for ever is left out, and the command says so.
    let closed = fs::Permissions::from_mode(0o750);
    fs::set_permissions(machine.root.join("opt/ggml-vgpu"), closed).expect("ours");
    let said = succeeded(install());
    assert!(
        said.contains("note     Ollama's service does not wait"),
        "{said}"
    );
    assert!(said.contains("may not enter or execute"), "{said}");
    let drop_in = fs::read_to_string(machine.drop_in()).expect("a drop-in");
    assert!(
        !drop_in.contains("ExecStartPre") && !drop_in.contains("Restart"),
        "{drop_in}"
    );
}

/// Checks the drop-in with `systemd-analyze verify`, where this machine has it: a key in the wrong
/// section is ignored by systemd.
fn verify_with_systemd(drop_in: &str, program: &Path) {
    if Command::new("systemd-analyze")
        .arg("--version")
        .output()
        .is_err()
    {
        return;
    }
    let folder = tempfile::tempdir().expect("a new folder");
    let unit = folder.path().join("ollama.service");
    let own = folder.path().join("ollama.service.d");
    fs::create_dir(&own).expect("a folder");
    fs::write(&unit, "[Service]\nExecStart=/bin/true\n").expect("a file");
    let verify = |drop_in: &str| {
        let path = program.to_str().expect("a plain path");
        let drop_in = drop_in.replace("/opt/ggml-vgpu/bin/vgpu", path);
        fs::write(own.join("vgpu.conf"), drop_in).expect("a file");
        let mut verify = Command::new("systemd-analyze");
        verify.args(["verify", "--man=no", "--recursive-errors=no"]);
        let output = verify.arg(&unit).output().expect("systemd-analyze runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let lines = said.lines().filter(|line| line.contains("vgpu.conf"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(verify(drop_in), [""; 0]);
    // The check sees a key in the wrong section.
    let wrong = drop_in.replace("[Service]\n", "[Service]\nStartLimitIntervalSec=0\n");
    assert_eq!(verify(&wrong).len(), 1);
}

#[test]
fn environment_variables_are_printed_without_a_service() {
    let machine = Machine::new("service");
    fs::remove_file(machine.root.join("etc/systemd/system/ollama.service")).expect("a file");
    // A folder named by hand: the prefix above the libraries.
    let prefix = machine.root.join("usr/local");
    let said = machine.install(&["--ollama", prefix.to_str().expect("a plain path")]);
    let environment =
        "OLLAMA_LLM_LIBRARY=vgpu OLLAMA_FLASH_ATTENTION=1 VGPU_REQUIRED=1 ollama serve";
    assert!(said.contains(environment), "{said}");
    assert!(!machine.drop_in().exists());

    // The service of another Ollama is not changed.
    let unit = "[Service]\nExecStart=/opt/other/bin/ollama serve\n";
    fs::write(machine.root.join("etc/systemd/system/ollama.service"), unit).expect("a file");
    compile_plugin(&machine.plugin, "2");
    machine.install(&[]);
    assert!(!machine.drop_in().exists());
    succeeded(machine.vgpu("uninstall", &[]));
    assert!(!machine.lib("vgpu").exists());
}

#[test]
fn unsupported_ggml_is_refused() {
    const NEWER: &str = ": install a newer ggml-vgpu, or, if there is none, add this release as \
                         CONTRIBUTING.md says under Extend\n";
    for (name, defines, words, end) in [
        (
            "old",
            &["-DVERSION=\"0.19.1\""][..],
            "is ggml 0.19.1; ggml-vgpu 1 (test) works with 0.20-0.25",
            ": update the program\n",
        ),
        (
            "new",
            &["-DVERSION=\"0.27.0\""],
            "is ggml 0.27.0; ggml",
            NEWER,
        ),
        (
            "build",
            &["-DVERSION=\"0.26.0\""],
            "is ggml 0.26.0 of a later build, without `ggml_backend_buft_alloc_buffer_n`; \
             ggml-vgpu",
            NEWER,
        ),
        (
            "odd",
            &["-DVERSION=\"unknown\""],
            "is ggml unknown; ggml",
            "0.26 (API 3)\n",
        ),
        (
            "part",
            &["-DVERSION=\"0.21.0\"", "-DINCOMPLETE"],
            "lacks ggml_glu_op_name",
            ", which the plugin calls\n",
        ),
    ] {
        let machine = Machine::with_ggml(name, defines);
        let text = machine.refused("install", &[]);
        assert!(text.contains(words), "{text}");
        assert!(text.ends_with(end), "{text}");
    }
}

#[test]
fn invalid_preconditions_are_reported_and_nothing_is_installed() {
    let mut machine = Machine::new("refused");
    let nowhere = machine.root.join("nowhere");
    let nowhere = nowhere.to_str().expect("a plain path");
    let text = machine.refused("install", &["--ollama", nowhere]);
    assert!(
        text.contains("no Ollama found") && text.contains("--ollama DIR"),
        "{text}"
    );
    let text = machine.refused("install", &["--endpoint", "carrier-pigeon:1"]);
    assert!(
        text.contains("--endpoint") && text.contains("carrier-pigeon"),
        "{text}"
    );
    let plugin = std::mem::replace(&mut machine.plugin, "/proc/self/cmdline".into());
    let text = machine.refused("install", &[]);
    assert!(text.contains("/proc/self/cmdline"), "{text}");
    machine.plugin = plugin;

    fs::create_dir(machine.lib("vgpu")).expect("a folder");
    fs::write(machine.lib("vgpu/libggml-vgpu.so.0"), "").expect("a file");
    let text = machine.refused("install", &[]);
    assert!(
        text.contains("libggml-vgpu.so.0 does not belong to vgpu"),
        "{text}"
    );
    fs::remove_file(machine.lib("vgpu/libggml-vgpu.so.0")).expect("a file");

    // A drop-in of that name by another author, and another library, stay.
    fs::create_dir_all(machine.drop_in().parent().expect("a folder")).expect("a folder");
    fs::write(machine.drop_in(), "[Service]\n").expect("a file");
    for command in ["install", "uninstall"] {
        let text = machine.refused(command, &[]);
        assert!(text.contains("vgpu.conf was not written by vgpu"), "{text}");
    }
    fs::remove_file(machine.drop_in()).expect("a file");
    fs::copy(
        machine.lib("libggml-base.so"),
        machine.lib("vgpu/libggml-vgpu.so"),
    )
    .expect("a copy");
    let text = machine.refused("uninstall", &[]);
    assert!(text.contains("is not the vGPU plugin"), "{text}");

    fs::remove_file(machine.lib("llama-server")).expect("a file");
    let text = machine.refused("install", &[]);
    assert!(text.contains("older than 0.30"), "{text}");
}

#[test]
fn failure_at_the_second_file_removes_the_first_one() {
    let machine = Machine::new("second");
    machine.install(&[]);
    // A folder in the place of the drop-in: detected when the plugin's update is prepared.
    fs::remove_file(machine.drop_in()).expect("a file");
    fs::create_dir(machine.drop_in()).expect("a folder");
    compile_plugin(&machine.plugin, "2");
    let text = machine.refused("install", &[]);
    assert!(text.contains("vgpu.conf"), "{text}");
}

#[test]
fn nothing_is_installed_without_permission() {
    let machine = Machine::new("permission");
    // The superuser may write anywhere, so the command runs as another user, who may not be able to
    // reach the build folder.
    let copy = machine.root.join("vgpu");
    program::copy_program(&copy);
    let before = machine.files();
    let run = |more: &[&str]| {
        let mut vgpu = Command::new(&copy);
        vgpu.arg("install").arg("--root").arg(&machine.root);
        vgpu.arg("--plugin")
            .arg(&machine.plugin)
            .args(more)
            .env_remove("VGPU_ENDPOINT");
        if rustix::process::geteuid().is_root() {
            std::os::unix::process::CommandExt::uid(&mut vgpu, 65534);
        } else {
            let folder = fs::Permissions::from_mode(0o555);
            fs::set_permissions(machine.lib(""), folder).expect("ours");
        }
        let output = vgpu.output().expect("the command starts");
        fs::set_permissions(machine.lib(""), fs::Permissions::from_mode(0o755)).expect("ours");
        output
    };
    let output = run(&[]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(
        text.contains("may not write to") && text.contains("sudo"),
        "{text}"
    );
    let dry = succeeded(run(&["--dry-run"]));
    assert!(
        dry.contains("may not write to") && dry.contains("dry run"),
        "{dry}"
    );
    assert_eq!(machine.files(), before);
}
