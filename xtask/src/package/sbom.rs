//! What is in the two files: a bill of materials (CycloneDX 1.5), and the texts of the licences.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use xtask_common::dist::Dist;
use xtask_common::packages;
use xtask_common::process;
use xtask_common::version;
use xtask_common::workspace;

/// The packages whose files are shipped.
const SHIPPED: [&str; 2] = ["vgpu", "ggml-vgpu"];

/// The first letters of the files that a crate has its licence in.
const LICENSE_FILES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

/// Name and version.
type Id = (String, String);

/// The crates that are linked into the two files.
#[derive(Debug)]
pub(super) struct Tree {
    /// Cargo's metadata of each crate.
    crates: BTreeMap<Id, Value>,
    /// What each crate uses of the others.
    uses: BTreeMap<Id, BTreeSet<Id>>,
}

impl Tree {
    /// Asks cargo.
    pub(super) fn read() -> Result<Tree> {
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let mut linked = BTreeSet::new();
        for package in SHIPPED {
            let mut tree = workspace::cargo();
            // Neither build scripts nor macros are in the files.
            tree.args(["tree", "--locked", "--edges", "normal,no-proc-macro"])
                .args(["--prefix", "none", "--target", &target])
                .args(["--package", package]);
            linked.extend(process::output(&mut tree)?.lines().filter_map(id_of));
        }
        let mut metadata = workspace::cargo();
        metadata.args(["metadata", "--locked", "--format-version", "1"]);
        metadata.args(["--filter-platform", &target]);
        let metadata: Value = serde_json::from_str(&process::output(&mut metadata)?)
            .context("parsing cargo metadata")?;
        Tree::of(&linked, &metadata)
    }

    /// The crates `linked`, with what cargo's metadata says of them.
    fn of(linked: &BTreeSet<Id>, metadata: &Value) -> Result<Tree> {
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let mut crates = BTreeMap::new();
        let mut by_key = BTreeMap::new();
        for package in list(&metadata["packages"]) {
            let id = (text(&package["name"]), text(&package["version"]));
            if linked.contains(&id) {
                by_key.insert(text(&package["id"]), id.clone());
                crates.insert(id, package);
            }
        }
        for id in linked {
            ensure!(crates.contains_key(id), "cargo's metadata has no {id:?}");
        }
        let mut uses: BTreeMap<Id, BTreeSet<Id>> = BTreeMap::new();
        for node in list(&metadata["resolve"]["nodes"]) {
            let Some(id) = by_key.get(&text(&node["id"])) else {
                continue;
            };
            let normal = list(&node["deps"]).into_iter().filter(|dependency| {
                let kinds = list(&dependency["dep_kinds"]);
                kinds.iter().any(|kind| kind["kind"].is_null())
            });
            let used = normal.filter_map(|one| by_key.get(&text(&one["pkg"])).cloned());
            uses.insert(id.clone(), used.collect());
        }
        Ok(Tree { crates, uses })
    }

    /// The bill of materials of `dist`, as JSON. `has_machine_code`: whether `vgpu` has code of
    /// NVRTC in it.
    pub(super) fn sbom(
        &self,
        dist: &Dist,
        version: &str,
        has_machine_code: bool,
    ) -> Result<String> {
        let components: Vec<Value> = { self.crates.iter() }
            .map(|(id, package)| component(id, package))
            .chain([json!({
                "type": "library",
                "bom-ref": "rust-std",
                "name": "rust-std",
                "version": rustc_version()?,
                "licenses": [{"expression": "MIT OR Apache-2.0"}],
            })])
            .collect();
        let dependencies: Vec<Value> = { self.uses.iter() }
            .map(|(id, used)| {
                let used: Vec<String> = used.iter().map(reference).collect();
                json!({"ref": reference(id), "dependsOn": used})
            })
            .chain([
                json!({"ref": "ggml-vgpu-release", "dependsOn": SHIPPED.map(|name| {
                    let id = { self.crates.keys() }.find(|(known, _)| known == name);
                    id.map(reference).unwrap_or_default()
                })}),
            ])
            .collect();
        let mut tools = vec![json!({
            "type": "application", "name": "cargo xtask", "version": version,
        })];
        if has_machine_code {
            let (name, nvrtc) = packages::NVRTC.split_once("==").context("a version")?;
            tools.push(json!({
                "type": "library", "name": name, "version": nvrtc,
                "purl": format!("pkg:pypi/{name}@{nvrtc}"),
                "description": "the compiler of the machine code for GPUs in vgpu",
            }));
        }
        let files: Vec<Value> = [&dist.vgpu, &dist.plugin]
            .map(|file| -> Result<Value> {
                Ok(json!({
                    "type": "file",
                    "name": file.file_name().unwrap_or_default().to_string_lossy(),
                    "hashes": [{"alg": "SHA-256", "content": sha256(file)?}],
                }))
            })
            .into_iter()
            .collect::<Result<_>>()?;
        let mut metadata = json!({
            "tools": {"components": tools},
            "component": {
                "type": "application",
                "bom-ref": "ggml-vgpu-release",
                "name": "ggml-vgpu",
                "version": version,
                "licenses": [{"expression": "MIT"}],
                "components": files,
            },
        });
        let date = [
            "log",
            "-1",
            "--date=format-local:%Y-%m-%dT%H:%M:%SZ",
            "--format=%cd",
        ];
        if let Some(date) = version::git(workspace::root(), &date) {
            metadata["timestamp"] = date.into();
        }
        let all = json!({
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "version": 1,
            "metadata": metadata,
            "components": components,
            "dependencies": dependencies,
        });
        Ok(serde_json::to_string_pretty(&all)? + "\n")
    }

    /// The licences of other people's crates, each text once.
    pub(super) fn licenses(&self) -> Result<String> {
        let mut by_text: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut all = String::from(
            "vgpu and libggml-vgpu.so contain Rust's standard library (MIT OR Apache-2.0) and \
             these crates:\n\n",
        );
        // Writing to a string cannot fail.
        for ((name, version), package) in &self.crates {
            if package["source"].is_null() {
                continue; // ours
            }
            let _ = writeln!(all, "{name} {version}: {}", license(package));
            for text in license_texts(package)? {
                let of = by_text.entry(text).or_default();
                of.push(format!("{name} {version}"));
            }
        }
        for (text, of) in by_text {
            let line = "-".repeat(80);
            let _ = write!(all, "\n{line}\n{}:\n\n{}\n", of.join(", "), text.trim_end());
        }
        Ok(all)
    }
}

/// The texts in the licence files of a crate, sorted by the files' names.
fn license_texts(package: &Value) -> Result<Vec<String>> {
    let manifest = text(&package["manifest_path"]);
    let folder = Path::new(&manifest).parent().context("a folder")?;
    let reading = || format!("reading {}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(reading)? {
        let path = entry.with_context(reading)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.to_uppercase();
        if path.is_file() && LICENSE_FILES.iter().any(|start| name.starts_with(start)) {
            files.push(path);
        }
    }
    files.sort_unstable();
    let texts = files.into_iter().map(fs::read_to_string);
    texts.collect::<Result<_, _>>().with_context(reading)
}

/// Reads `name v1.2.3 (path) (*)`.
fn id_of(line: &str) -> Option<Id> {
    let (name, rest) = line.split_once(" v")?;
    Some((name.to_owned(), rest.split(' ').next()?.to_owned()))
}

fn component((name, version): &Id, package: &Value) -> Value {
    let id = (name.clone(), version.clone());
    let mut component = json!({
        "type": "library",
        "bom-ref": reference(&id),
        "name": name,
        "version": version,
        "licenses": [{"expression": license(package)}],
    });
    if !package["source"].is_null() {
        component["purl"] = reference(&id).into();
    }
    component
}

/// The licence of a crate as an SPDX expression. Some older crates have a slash for OR.
fn license(package: &Value) -> String {
    text(&package["license"]).replace('/', " OR ")
}

fn reference((name, version): &Id) -> String {
    format!("pkg:cargo/{name}@{version}")
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn rustc_version() -> Result<String> {
    let said = process::output(Command::new("rustc").arg("--version"))?;
    let version = said.split(' ').nth(1);
    version
        .map(str::to_owned)
        .with_context(|| format!("rustc says {said:?}"))
}

/// The SHA-256 of a file in hexadecimal.
pub(super) fn sha256(file: &Path) -> Result<String> {
    let said = process::output(Command::new("sha256sum").arg("--binary").arg(file))?;
    let sum = said.split(' ').next().filter(|sum| sum.len() == 64);
    sum.map(str::to_owned)
        .with_context(|| format!("sha256sum says {said:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Tree {
        let package = |name: &str, license: &str| {
            json!({"id": format!("reg#{name}"), "name": name, "version": "1.0.0",
                   "license": license, "source": "registry"})
        };
        let metadata = json!({
            "packages": [package("vgpu", "MIT"), package("ggml-vgpu", "MIT"),
                         package("a", "MIT/Apache-2.0"), package("cc", "MIT")],
            "resolve": {"nodes": [
                {"id": "reg#vgpu", "deps": [
                    {"pkg": "reg#a", "dep_kinds": [{"kind": null}]},
                    {"pkg": "reg#cc", "dep_kinds": [{"kind": "build"}]},
                ]},
                {"id": "reg#ggml-vgpu", "deps": [
                    {"pkg": "reg#a", "dep_kinds": [{"kind": "dev"}]},
                ]},
                {"id": "reg#a", "deps": []},
                {"id": "reg#cc", "deps": []},
            ]},
        });
        let linked = "vgpu v1.0.0 (/x)\nggml-vgpu v1.0.0 (/y)\na v1.0.0 (*)\n";
        let linked = linked.lines().filter_map(id_of).collect();
        Tree::of(&linked, &metadata).expect("a tree")
    }

    #[test]
    fn bill_lists_what_is_linked_and_who_uses_it() {
        let license = workspace::root().join("LICENSE");
        let dist = Dist {
            plugin: license.clone(),
            vgpu: license.clone(),
        };
        let bill = sample().sbom(&dist, "0.1.0", false).expect("a bill");
        assert_eq!(bill, sample().sbom(&dist, "0.1.0", false).expect("a bill"));
        let bill: Value = serde_json::from_str(&bill).expect("JSON");
        let components = bill["components"].as_array().expect("components");
        let names: Vec<_> = components.iter().map(|one| text(&one["name"])).collect();
        assert_eq!(names, ["a", "ggml-vgpu", "vgpu", "rust-std"]);
        let of_a = &components[0]["licenses"][0]["expression"];
        assert_eq!(of_a, "MIT OR Apache-2.0");
        let uses = |name: &str| {
            let all = bill["dependencies"].as_array().expect("dependencies");
            let reference = format!("pkg:cargo/{name}@1.0.0");
            let found = all.iter().find(|one| one["ref"] == reference.as_str());
            found.expect("an entry")["dependsOn"].clone()
        };
        assert_eq!(uses("vgpu"), json!(["pkg:cargo/a@1.0.0"]));
        assert_eq!(uses("ggml-vgpu"), json!([]));
        let file = &bill["metadata"]["component"]["components"][0];
        assert_eq!(
            text(&file["hashes"][0]["content"]),
            sha256(&license).expect("a hash")
        );
    }

    /// The real tree: what is in the files, and nothing that only builds them. Every licence is
    /// there.
    #[test]
    fn tree_of_the_shipped_files_has_licences_and_no_build_tools() {
        let tree = Tree::read().expect("a tree");
        let has = |name: &str| tree.crates.keys().any(|(known, _)| known == name);
        for name in ["vgpu", "ggml-vgpu", "vgpu-cuda", "blake3", "ring", "clap"] {
            assert!(has(name), "no {name}");
        }
        for name in ["bindgen", "cc", "serde_derive", "proptest", "xtask"] {
            assert!(!has(name), "{name}");
        }
        for (id, package) in &tree.crates {
            assert!(!license(package).is_empty(), "{id:?}");
        }
        let licenses = tree.licenses().expect("licences");
        assert!(licenses.contains("\nring 0.17"), "{licenses}");
        assert!(licenses.contains("Permission is hereby granted"));
    }
}
