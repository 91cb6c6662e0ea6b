//! What is in the two files and in the images: bills of materials (CycloneDX 1.5), and the texts of
//! the licences.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::debian_base::DebianPackage;
use super::layout::Entry;
use xtask_common::dist::Dist;
use xtask_common::llama::{self, PortableServer};
use xtask_common::packages;
use xtask_common::process;
use xtask_common::version;
use xtask_common::workspace;

/// The Cargo package of the command.
pub(super) const HOST: &str = "vgpu";
/// The Cargo package of the plugin.
pub(super) const PLUGIN: &str = "ggml-vgpu";
/// The packages whose files are shipped.
const SHIPPED: [&str; 2] = [HOST, PLUGIN];

/// How the bill of the two files refers to them.
const RELEASE: &str = "ggml-vgpu-release";

/// The first letters of the files that a crate has its licence in.
const LICENSE_FILES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

/// Name and version.
type Id = (String, String);

/// The crates that are linked into the file of each shipped package.
type Linked = BTreeMap<&'static str, BTreeSet<Id>>;

/// The crates that are linked into the two files.
#[derive(Debug)]
pub(super) struct Tree {
    linked: Linked,
    /// Cargo's metadata of each crate.
    crates: BTreeMap<Id, Value>,
    /// What each crate uses of the others.
    uses: BTreeMap<Id, BTreeSet<Id>>,
}

impl Tree {
    /// Asks cargo.
    pub(super) fn read() -> Result<Tree> {
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let mut linked = Linked::new();
        for package in SHIPPED {
            let mut tree = workspace::cargo();
            // Neither build scripts nor macros are in the files.
            tree.args(["tree", "--locked", "--edges", "normal,no-proc-macro"])
                .args(["--prefix", "none", "--target", &target])
                .args(["--package", package]);
            let crates = process::output(&mut tree)?;
            linked.insert(package, crates.lines().filter_map(id_of).collect());
        }
        let mut metadata = workspace::cargo();
        metadata.args(["metadata", "--locked", "--format-version", "1"]);
        metadata.args(["--filter-platform", &target]);
        let metadata: Value = serde_json::from_str(&process::output(&mut metadata)?)
            .context("parsing cargo metadata")?;
        Tree::of(linked, &metadata)
    }

    /// The crates `linked`, with what cargo's metadata says of them.
    fn of(linked: Linked, metadata: &Value) -> Result<Tree> {
        let all: BTreeSet<&Id> = linked.values().flatten().collect();
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let mut crates = BTreeMap::new();
        let mut by_key = BTreeMap::new();
        for package in list(&metadata["packages"]) {
            let id = (text(&package["name"]), text(&package["version"]));
            if all.contains(&id) {
                by_key.insert(text(&package["id"]), id.clone());
                crates.insert(id, package);
            }
        }
        for id in all {
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
        Ok(Tree {
            linked,
            crates,
            uses,
        })
    }

    /// The bill of materials of `dist`, as JSON. `has_machine_code`: whether `vgpu` has code of
    /// NVRTC in it.
    pub(super) fn sbom(
        &self,
        dist: &Dist,
        version: &str,
        has_machine_code: bool,
    ) -> Result<String> {
        let files = [&dist.vgpu, &dist.plugin].map(|path| {
            file(
                &path.file_name().unwrap_or_default().to_string_lossy(),
                path,
            )
        });
        let files: Vec<Value> = files.into_iter().collect::<Result<_>>()?;
        let component = json!({
            "type": "application",
            "bom-ref": RELEASE,
            "name": "ggml-vgpu",
            "version": version,
            "licenses": [{"expression": "MIT"}],
            "components": files,
        });
        bill(
            component,
            &tools(version, has_machine_code)?,
            &self.components(&SHIPPED)?,
            &self.dependencies(RELEASE, &SHIPPED, Vec::new()),
        )
    }

    /// The bill of materials of an image, as JSON: the files of ours with the crates in them,
    /// Debian's packages, and what else is in it.
    pub(super) fn bill_of_image(&self, image: ImageContents<'_>) -> Result<String> {
        let reference = format!("{}:{}", image.name, image.version);
        let mut files = Vec::new();
        for Entry {
            place, file: path, ..
        } in image.files
        {
            // Documents are no part of a program.
            if !place.starts_with("usr/share/doc/") {
                files.push(file(&format!("/{place}"), path)?);
            }
        }
        let component = json!({
            "type": "container",
            "bom-ref": reference,
            "name": image.name,
            "version": image.version,
            "hashes": [{"alg": "SHA-256", "content": sha256(image.archive)?}],
            "components": files,
        });
        let distribution = Distribution::of_this_machine()?;
        let debian = image.debian.iter().map(|one| distribution.component(one));
        let others: Vec<Value> = debian.chain(image.others).collect();
        let references = others.iter().map(|other| text(&other["bom-ref"])).collect();
        let has_machine_code = image.has_machine_code && image.shipped.contains(&HOST);
        let mut components = self.components(image.shipped)?;
        components.extend(others);
        bill(
            component,
            &tools(image.version, has_machine_code)?,
            &components,
            &self.dependencies(&reference, image.shipped, references),
        )
    }

    /// The crates in the files of the packages `shipped`.
    fn crates_of(&self, shipped: &[&str]) -> BTreeSet<&Id> {
        let files = shipped.iter().filter_map(|name| self.linked.get(*name));
        files.flatten().collect()
    }

    /// The components in the files of the packages `shipped`.
    fn components(&self, shipped: &[&str]) -> Result<Vec<Value>> {
        let crates = self.crates_of(shipped);
        let crates = crates.into_iter().map(|id| component(id, &self.crates[id]));
        Ok(crates
            .chain([json!({
                "type": "library",
                "bom-ref": "rust-std",
                "name": "rust-std",
                "version": rustc_version()?,
                "licenses": [{"expression": "MIT OR Apache-2.0"}],
            })])
            .collect())
    }

    /// What uses what in the files of the packages `shipped`. `whole` has these files and `others`.
    fn dependencies(&self, whole: &str, shipped: &[&str], others: Vec<String>) -> Vec<Value> {
        let crates = self.crates_of(shipped);
        let used_by = |id: &Id| {
            let used = self.uses.get(id).into_iter().flatten();
            let used = used.filter(|id| crates.contains(id)).map(reference);
            used.collect::<Vec<_>>()
        };
        let of_crates =
            { crates.iter() }.map(|&id| json!({"ref": reference(id), "dependsOn": used_by(id)}));
        let roots = shipped.iter().map(|&name| {
            let id = crates.iter().find(|(known, _)| known == name);
            id.map(|&id| reference(id)).unwrap_or_default()
        });
        let roots: Vec<String> = roots.chain(others).collect();
        of_crates
            .chain([json!({"ref": whole, "dependsOn": roots})])
            .collect()
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

/// What an image has in it.
pub(super) struct ImageContents<'a> {
    /// The name, without a tag.
    pub(super) name: &'a str,
    pub(super) version: &'a str,
    /// The archive of the image.
    pub(super) archive: &'a Path,
    /// The Cargo packages whose files are in it.
    pub(super) shipped: &'a [&'a str],
    /// Whether `vgpu` has code of NVRTC in it.
    pub(super) has_machine_code: bool,
    /// The files that are not Debian's.
    pub(super) files: &'a [Entry],
    pub(super) debian: &'a [DebianPackage],
    /// Further components, each with a `bom-ref`.
    pub(super) others: Vec<Value>,
}

/// The release of Debian or Ubuntu that packages are of.
struct Distribution {
    /// `ID` of os-release: `debian`.
    id: String,
    /// `VERSION_ID` of os-release: `12`. Empty in a release that is still in development.
    version: String,
}

impl Distribution {
    fn of_this_machine() -> Result<Distribution> {
        let text = fs::read_to_string("/etc/os-release").context("reading /etc/os-release")?;
        Distribution::of(&text).context("/etc/os-release has no ID")
    }

    /// Reads os-release.
    fn of(text: &str) -> Option<Distribution> {
        let value = |name: &str| {
            let lines = text.lines().filter_map(|line| line.split_once('='));
            let mut values = lines.filter(|(known, _)| *known == name);
            values.next().map(|(_, value)| value.trim_matches('"'))
        };
        Some(Distribution {
            id: value("ID")?.to_owned(),
            version: value("VERSION_ID").unwrap_or_default().to_owned(),
        })
    }

    fn component(&self, package: &DebianPackage) -> Value {
        let DebianPackage {
            name,
            version,
            architecture,
            licenses,
        } = package;
        let mut purl = format!(
            "pkg:deb/{}/{}@{}?arch={architecture}",
            self.id,
            encoded(name),
            encoded(version),
        );
        if !self.version.is_empty() {
            purl.push_str(&format!("&distro={}-{}", self.id, self.version));
        }
        let mut component = json!({
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
        });
        if !licenses.is_empty() {
            // Debian's short names are not all SPDX's.
            let licenses = licenses
                .iter()
                .map(|name| json!({"license": {"name": name}}));
            component["licenses"] = licenses.collect();
        }
        component
    }
}

/// A part of a package URL.
fn encoded(text: &str) -> String {
    let mut all = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' | b'~' => {
                all.push(char::from(byte));
            }
            // Writing to a string cannot fail.
            _ => drop(write!(all, "%{byte:02X}")),
        }
    }
    all
}

/// llama.cpp in an image, with ggml and with the libraries of others that it carries.
pub(super) fn llama_cpp(server: &PortableServer) -> Value {
    let purl = format!("pkg:github/ggml-org/llama.cpp@{}", server.commit);
    let carried = server.carried.iter().map(|name| {
        json!({
            "type": "library",
            "name": name,
            "description": "in the folder vendor of llama.cpp, without a version",
        })
    });
    let ggml = json!({
        "type": "library",
        "name": "ggml",
        "version": llama::RELEASE,
        "licenses": [{"expression": "MIT"}],
    });
    let parts: Vec<Value> = [ggml].into_iter().chain(carried).collect();
    json!({
        "type": "application",
        "bom-ref": purl,
        "name": "llama.cpp",
        "version": server.version,
        "licenses": [{"expression": "MIT"}],
        "purl": purl,
        "components": parts,
    })
}

/// A file with its hash.
fn file(name: &str, path: &Path) -> Result<Value> {
    Ok(json!({
        "type": "file",
        "name": name,
        "hashes": [{"alg": "SHA-256", "content": sha256(path)?}],
    }))
}

/// What has made the release of `version`.
fn tools(version: &str, has_machine_code: bool) -> Result<Vec<Value>> {
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
    Ok(tools)
}

/// A bill of materials of `component`, as JSON.
fn bill(
    component: Value,
    tools: &[Value],
    components: &[Value],
    dependencies: &[Value],
) -> Result<String> {
    let mut metadata = json!({"tools": {"components": tools}, "component": component});
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

/// The package URL of a crate.
fn reference((name, version): &Id) -> String {
    format!("pkg:cargo/{name}@{}", encoded(version))
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
        let linked = [
            (HOST, "vgpu v1.0.0 (/x)\na v1.0.0 (*)\n"),
            (PLUGIN, "ggml-vgpu v1.0.0 (/y)\n"),
        ];
        let linked = linked.map(|(name, tree)| (name, tree.lines().filter_map(id_of).collect()));
        Tree::of(linked.into(), &metadata).expect("a tree")
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

    fn debian_package(name: &str, licenses: &[&str]) -> DebianPackage {
        DebianPackage {
            name: name.to_owned(),
            version: "1:2.36-9+deb12u1".to_owned(),
            architecture: "amd64".to_owned(),
            licenses: licenses.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    /// An image with the plugin alone has only the crates of the plugin, and what else is in it.
    #[test]
    fn bill_of_an_image_lists_debian_and_only_the_crates_in_it() {
        let license = workspace::root().join("LICENSE");
        let files = [
            ("app/program", 0o755),
            ("usr/share/doc/vgpu/copyright", 0o644),
        ];
        let files = files.map(|(place, mode)| super::super::layout::entry(place, &license, mode));
        let debian = [
            debian_package("libc6", &["LGPL-2.1+"]),
            debian_package("libstdc++6", &[]),
        ];
        let server = PortableServer {
            programs: "bin".into(),
            source: "source".into(),
            licenses: Vec::new(),
            version: "0.5.0".to_owned(),
            commit: "0123abcd".to_owned(),
            carried: vec!["stb".to_owned()],
        };
        let bill = |shipped: &[&str]| -> Value {
            let contents = ImageContents {
                name: "image",
                version: "0.1.0",
                archive: &license,
                shipped,
                has_machine_code: true,
                files: &files,
                debian: &debian,
                others: vec![llama_cpp(&server)],
            };
            let bill = sample().bill_of_image(contents).expect("a bill");
            serde_json::from_str(&bill).expect("JSON")
        };
        let names = |bill: &Value| {
            let components = bill["components"].as_array().expect("components").clone();
            let names = components.iter().map(|one| text(&one["name"]));
            names.collect::<Vec<_>>()
        };
        let of_both = bill(&SHIPPED);
        let rest = ["rust-std", "libc6", "libstdc++6", "llama.cpp"];
        let crates = ["a", "ggml-vgpu", "vgpu"];
        assert_eq!(names(&of_both), [&crates[..], &rest].concat());
        let bill = bill(&[PLUGIN]);
        assert_eq!(names(&bill), [&["ggml-vgpu"][..], &rest].concat());
        // The compiler of the code in vgpu, which this image does not have.
        let tools = |bill: &Value| {
            bill["metadata"]["tools"]["components"]
                .as_array()
                .map(Vec::len)
        };
        assert_eq!((tools(&of_both), tools(&bill)), (Some(2), Some(1)));

        let distribution = Distribution::of_this_machine().expect("Debian or Ubuntu");
        let libc = &bill["components"][2];
        assert_eq!(
            libc["licenses"],
            json!([{"license": {"name": "LGPL-2.1+"}}])
        );
        assert_eq!(*libc, distribution.component(&debian[0]));
        assert_eq!(bill["components"][3].get("licenses"), None);
        let llama = &bill["components"][4];
        assert_eq!(llama["version"], "0.5.0");
        assert_eq!(llama["components"][0]["version"], llama::RELEASE);
        assert_eq!(llama["components"][1]["name"], "stb");

        let image = &bill["metadata"]["component"];
        assert_eq!(image["components"].as_array().map(Vec::len), Some(1));
        assert_eq!(image["components"][0]["name"], "/app/program");
        let sum = sha256(&license).expect("a hash");
        assert_eq!(image["hashes"][0]["content"], sum.as_str());
        // Every reference is that of a component.
        let all = bill["components"].as_array().expect("components");
        let known: BTreeSet<String> = { all.iter().chain([image]) }
            .map(|one| text(&one["bom-ref"]))
            .collect();
        let dependencies = bill["dependencies"].as_array().expect("dependencies");
        for dependency in dependencies {
            let used = dependency["dependsOn"].as_array().expect("a list");
            for reference in used.iter().chain([&dependency["ref"]]) {
                assert!(known.contains(&text(reference)), "{reference} is unknown");
            }
        }
        let of_image = { dependencies.iter() }.find(|one| one["ref"] == image["bom-ref"]);
        let used = of_image.and_then(|one| one["dependsOn"].as_array());
        assert_eq!(used.map(Vec::len), Some(4), "the plugin and three others");
    }

    #[test]
    fn package_urls_have_no_plus_and_no_colon() {
        let id = ("toml".to_owned(), "1.2.1+spec-1.1.0".to_owned());
        assert_eq!(reference(&id), "pkg:cargo/toml@1.2.1%2Bspec-1.1.0");
        let distribution = |text| Distribution::of(text).expect("a distribution");
        let stable = distribution("NAME=\"Debian GNU/Linux\"\nVERSION_ID=\"12\"\nID=debian\n");
        let component = stable.component(&debian_package("libstdc++6", &[]));
        assert_eq!(
            component["purl"],
            "pkg:deb/debian/libstdc%2B%2B6@1%3A2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12"
        );
        let testing = distribution("ID=debian\n");
        let component = testing.component(&debian_package("libc6", &[]));
        let purl = "pkg:deb/debian/libc6@1%3A2.36-9%2Bdeb12u1?arch=amd64";
        assert_eq!(component["purl"], purl);
        assert!(Distribution::of("NAME=x\n").is_none());
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
