//! An executor with a configuration, and what an operator does with it.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value as Json;
use vgpu_transport::wire::{GraphId, Reply, Request};

use super::{Scratch, Serve, vgpu};
use crate::common::{Guest, add, bytes};

/// An executor with a configuration.
pub(crate) struct Site {
    pub(crate) serve: Serve,
    pub(crate) folder: PathBuf,
    pub(crate) config: PathBuf,
    _scratch: Scratch,
}

impl Site {
    /// `config` may contain `DIR`, which is replaced by a private folder. The control socket is in
    /// it.
    pub(crate) fn start(test: &str, config: &str) -> Site {
        Site::start_with(test, config, &[])
    }

    /// As [`start`](Site::start), with more arguments.
    pub(crate) fn start_with(test: &str, config: &str, more: &[&str]) -> Site {
        let scratch = Scratch::new(test);
        let folder = scratch.path().to_owned();
        let path = folder.join("vgpu.toml");
        let site_config = Site::text(&folder, config);
        fs::write(&path, site_config).expect("a file");
        let file = path.to_str().expect("text");
        let arguments = [&["--config", file], more].concat();
        Site {
            serve: Serve::start(&folder.join("flag.sock"), &arguments),
            config: path,
            folder,
            _scratch: scratch,
        }
    }

    pub(crate) fn text(folder: &Path, config: &str) -> String {
        let text =
            format!("control.socket = \"DIR/control.sock\"\nserver.log = \"info\"\n{config}");
        text.replace("DIR", folder.to_str().expect("text"))
    }

    pub(crate) fn write(&self, config: &str) {
        fs::write(&self.config, Site::text(&self.folder, config)).expect("a file");
    }

    /// Runs a command with the executor's control socket.
    pub(crate) fn run(&self, command: &str, more: &[&str]) -> Command {
        let control = self.folder.join("control.sock");
        let mut arguments = vec![command, "--control", control.to_str().expect("text")];
        arguments.extend(more);
        vgpu(&arguments)
    }

    pub(crate) fn reload(&self) -> String {
        let output = self
            .run("reload", &[])
            .output()
            .expect("the command starts");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    pub(crate) fn status(&self) -> Json {
        let output = self
            .run("ps", &["--json"])
            .output()
            .expect("the command starts");
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    pub(crate) fn guest(&self, socket: &str) -> Guest {
        self.serve.guest(&self.folder.join(socket))
    }

    pub(crate) fn end(self) -> String {
        let Site {
            serve,
            folder,
            _scratch,
            ..
        } = self;
        serve.signal(Signal::TERM);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
        for entry in fs::read_dir(&folder).expect("a folder") {
            let name = entry.expect("a file").file_name();
            assert_eq!(name, "vgpu.toml", "something is left behind");
        }
        log
    }
}

/// Runs a command that must fail. Returns its error.
pub(crate) fn fails(command: &mut Command) -> String {
    let output = command.output().expect("the command starts");
    let text = String::from_utf8(output.stderr).expect("text");
    assert!(!output.status.success(), "{text}");
    text
}

pub(crate) fn figures(guest: &mut Guest) -> (u64, u64) {
    match guest.ask(&Request::Memory {}) {
        Reply::Memory { total, free, .. } => (total, free),
        other => panic!("{other:?}"),
    }
}

/// Runs one graph.
pub(crate) fn work(guest: &mut Guest) {
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GraphId(1), &add(2, a, a, a));
    guest.submit(GraphId(1));
    assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
}

pub(crate) const ALICE: &str = "[[guest]]\nname = \"alice\"\nlisten = [\"unix:DIR/alice.sock\"]\n\
    mode = \"0600\"\nmemory = \"1MiB\"\nweight = 3\n";
pub(crate) const BOB: &str =
    "[[guest]]\nname = \"bob\"\nlisten = [\"unix:DIR/bob.sock\"]\nmemory = \"2M\"\n";

/// Header and body of an HTTP response.
pub(crate) fn http(mut socket: impl Read + Write, method: &str, path: &str) -> (String, String) {
    let request =
        format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).expect("it listens");
    let mut text = String::new();
    socket.read_to_string(&mut text).expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    if !head.to_lowercase().contains("transfer-encoding: chunked") {
        return (head.into(), body.into());
    }
    let (mut rest, mut whole) = (body, String::new());
    while let Some((size, more)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).expect("a size");
        whole.push_str(&more[..size]);
        rest = more[size..].trim_start_matches("\r\n");
    }
    (head.into(), whole)
}
