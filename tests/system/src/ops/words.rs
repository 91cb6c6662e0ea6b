//! Which words of `op_params` the constructors of ggml's releases write, read from their `ggml.c`,
//! against the plugin's table of what differs (`ggml-backend-vgpu/translate/releases.rs`).
//!
//! The unit tests of the table have examples by the author of the table. Here the constructors
//! themselves are the source.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};

use xtask_common::c_source;
use xtask_common::cache::Cache;
use xtask_common::ggml_releases::{self, READ, RELEASES};
use xtask_common::{llama, workspace};

/// The table, below the root of the workspace.
const TABLE: &str = "ggml-backend-vgpu/translate/releases.rs";

/// Operators by the name of ggml without its prefix, with the index of a word.
type Words = BTreeSet<(String, usize)>;

/// What one build of ggml writes.
#[derive(Debug)]
struct Build {
    /// The minor number of its release.
    minor: u32,
    /// What its constructors and setters write.
    words: Words,
    /// Whether `enum ggml_prec` has more values than default and F32.
    has_all_precisions: bool,
}

/// The plugin's table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Table {
    /// The lowest minor number of a build with the word.
    added: BTreeMap<(String, usize), u32>,
    /// The lowest minor number of a build with all precisions.
    precisions: u32,
    /// The lowest minor number under which every build writes the words of DSV4_HC_PRE.
    hc_pre_has_parameters: u32,
}

/// Compares the table with the constructors of every build, and every changed table as well, which
/// must differ.
///
/// # Errors
/// If sources cannot be fetched or read, the table differs, or a change is not detected.
pub(crate) fn check(cache: &Cache) -> Result<String> {
    let mut builds = Vec::new();
    for release in RELEASES.iter().chain(READ) {
        let ggml = release.source(cache)?.join("ggml");
        builds.push(Build::read(release.version, &ggml)?);
    }
    for version in [llama::RELEASE, llama::NEWEST_RELEASE] {
        let ggml = ggml_releases::source_of(cache, version)?;
        builds.push(Build::read(version, &ggml.context("no sources")?)?);
    }
    let path = workspace::root().join(TABLE);
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {TABLE}"))?;
    let table = Table::parse(&text)?;
    let found = table.differences(&builds);
    ensure!(found.is_empty(), "{TABLE}: {}", found.join("; "));

    let changed = table.changed();
    for changed in &changed {
        ensure!(
            !changed.differences(&builds).is_empty(),
            "a changed table is not detected: {changed:?}"
        );
    }
    let words = builds.last().map_or(0, |newest| newest.words.len());
    Ok(format!(
        "{} builds, {words} words in the newest; each of {} changed tables is detected",
        builds.len(),
        changed.len()
    ))
}

impl Build {
    fn read(version: &str, ggml: &Path) -> Result<Build> {
        let read = |file: &str| {
            let path = ggml.join(file);
            std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
        };
        let minor = version
            .split('.')
            .nth(1)
            .and_then(|minor| minor.parse().ok());
        Ok(Build {
            minor: minor.with_context(|| format!("{version} is no release"))?,
            words: written(&read("src/ggml.c")?).with_context(|| format!("ggml {version}"))?,
            has_all_precisions: read("include/ggml.h")?.contains("GGML_PREC_BF16"),
        })
    }
}

impl Table {
    /// Reads the constant `TABLE` of the file.
    fn parse(text: &str) -> Result<Table> {
        let start = text.find("pub(super) const TABLE").context("no table")?;
        let text = text[start..]
            .split_once("\n};")
            .context("the table has no end")?
            .0;
        let version = |text: &str| -> Option<u32> {
            let (_, minor) = text.split_once("Version::new(0, ")?;
            minor.split_once(')')?.0.parse().ok()
        };
        let field = |name: &str| {
            let (_, rest) = text.split_once(&format!("\n    {name}: "))?;
            version(rest.lines().next()?)
        };
        let mut table = Table {
            added: BTreeMap::new(),
            precisions: field("precisions").context("no precisions")?,
            hc_pre_has_parameters: field("hc_pre_has_parameters").context("no parameters")?,
        };
        for entry in text.split("Added {").skip(1) {
            let word = entry
                .split_once("word: ")
                .and_then(|(_, rest)| rest.split_once(',')?.0.trim().parse().ok());
            let from = entry
                .split_once("from: ")
                .and_then(|(_, rest)| version(rest));
            let (Some(word), Some(from)) = (word, from) else {
                bail!("an entry without a word or a number: {entry}");
            };
            let ops = entry.split_once(']').map_or(entry, |(ops, _)| ops);
            for op in ops.split("OpKind::").skip(1) {
                let op = op.split([',', ']', ' ']).next().unwrap_or_default();
                table.added.insert((of_ggml(op), word), from);
            }
        }
        ensure!(!table.added.is_empty(), "the table has no words");
        Ok(table)
    }

    /// What the builds contradict.
    fn differences(&self, builds: &[Build]) -> Vec<String> {
        let oldest = builds.iter().map(|build| build.minor).min();
        let lowest = |has: &dyn Fn(&Build) -> bool| {
            let having = builds.iter().filter(|build| has(build));
            having.map(|build| build.minor).min()
        };
        let mut found = Vec::new();
        let all: BTreeSet<&(String, usize)> = { builds.iter() }
            .flat_map(|build| &build.words)
            .chain(self.added.keys())
            .collect();
        for key in all {
            let written = lowest(&|build| build.words.contains(key));
            let table = self.added.get(key).copied().or(oldest);
            if written != table {
                let (op, word) = key;
                let (written, table) = (number(written), number(table));
                found.push(format!(
                    "word {word} of {op} is written from {written} on, from {table} in the table"
                ));
            }
        }
        let precisions = lowest(&|build| build.has_all_precisions);
        if precisions != Some(self.precisions) {
            found.push(format!(
                "all precisions are there from {} on",
                number(precisions)
            ));
        }
        // The number after the last one with a build that does not write the word.
        let pre = ("DSV4_HC_PRE".to_owned(), 0);
        let without = builds.iter().filter(|build| !build.words.contains(&pre));
        let every = without.map(|build| build.minor + 1).max();
        if every != Some(self.hc_pre_has_parameters) {
            found.push(format!(
                "every build writes DSV4_HC_PRE from 0.{every:?} on"
            ));
        }
        found
    }

    /// The tables that differ from this one in one place.
    fn changed(&self) -> Vec<Table> {
        let mut all = Vec::new();
        for (key, &from) in &self.added {
            let with = |entry: Option<((String, usize), u32)>| {
                let mut table = self.clone();
                table.added.remove(key);
                table.added.extend(entry);
                table
            };
            all.push(with(None));
            for word in (0..16).filter(|&word| word != key.1) {
                let other = (key.0.clone(), word);
                if !self.added.contains_key(&other) {
                    all.push(with(Some((other, from))));
                }
            }
            for other in [from - 1, from + 1] {
                all.push(with(Some((key.clone(), other))));
            }
        }
        for step in [-1, 1] {
            let mut table = self.clone();
            table.precisions = table.precisions.saturating_add_signed(step);
            all.push(table);
            let mut table = self.clone();
            let number = &mut table.hc_pre_has_parameters;
            *number = number.saturating_add_signed(step);
            all.push(table);
        }
        all
    }
}

/// The series of a minor number.
fn number(minor: Option<u32>) -> String {
    minor.map_or("no release".into(), |minor| format!("0.{minor}"))
}

/// `FLASH_ATTN_EXT` for `FlashAttnExt`.
fn of_ggml(name: &str) -> String {
    let mut of_ggml = String::new();
    for (i, letter) in name.chars().enumerate() {
        if i > 0 && letter.is_ascii_uppercase() {
            of_ggml.push('_');
        }
        of_ggml.push(letter.to_ascii_uppercase());
    }
    of_ggml
}

/// A function of a C file.
#[derive(Debug, Default)]
struct Function<'a> {
    /// Its lines without comments, the declaration included.
    lines: Vec<&'a str>,
    /// The operators that it names.
    ops: BTreeSet<&'a str>,
}

/// The words that the functions of `ggml.c` write, by operator. Operators that call a function of
/// the program are left out: the plugin refuses them.
fn written(source: &str) -> Result<Words> {
    let mut functions = functions(source);
    // A wrapper that names no operator has those of the functions that it calls.
    for _ in 0..4 {
        let named: Vec<(&str, BTreeSet<&str>)> = { functions.iter() }
            .filter(|(_, function)| !function.ops.is_empty())
            .map(|(name, function)| (*name, function.ops.clone()))
            .collect();
        for function in functions
            .values_mut()
            .filter(|function| function.ops.is_empty())
        {
            for (name, ops) in &named {
                let call = format!("{name}(");
                if function.lines.iter().skip(1).any(|line| calls(line, &call)) {
                    function.ops.extend(ops);
                }
            }
        }
    }
    let mut words = Words::new();
    for (name, function) in &functions {
        if name.starts_with("ggml_set_op_params")
            || function.ops.iter().any(|op| op.contains("CUSTOM"))
        {
            continue;
        }
        let mut cases: Vec<&str> = Vec::new();
        let mut follows_case = false;
        for (at, line) in function.lines.iter().enumerate() {
            if let Some(rest) = line.strip_prefix("case GGML_OP_") {
                if !follows_case {
                    cases.clear();
                }
                cases.push(rest.split(':').next().unwrap_or_default());
                follows_case = true;
                continue;
            }
            follows_case = false;
            let indices =
                indices(&function.lines, at).with_context(|| format!("{name}: {line}"))?;
            let ops: Vec<&str> = match cases.is_empty() {
                true => function.ops.iter().copied().collect(),
                false => cases.clone(),
            };
            ensure!(
                indices.is_empty() || !ops.is_empty(),
                "{name} writes words of no operator"
            );
            for op in ops {
                words.extend(indices.iter().map(|&index| (op.to_owned(), index)));
            }
        }
    }
    ensure!(words.len() > 100, "only {} words were found", words.len());
    Ok(words)
}

/// Whether the line calls a function: `call` is its name with the parenthesis.
fn calls(line: &str, call: &str) -> bool {
    line.match_indices(call).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|letter| letter.is_ascii_alphanumeric() || letter == '_')
    })
}

/// The functions of a C file by name.
fn functions(source: &str) -> BTreeMap<&str, Function<'_>> {
    let functions = c_source::functions(source).into_iter();
    functions
        .map(|(name, lines)| {
            let ops = lines.iter().flat_map(|line| ops(line)).collect();
            (name, Function { lines, ops })
        })
        .collect()
}

/// The operators that a line names.
fn ops(line: &str) -> impl Iterator<Item = &str> {
    const PREFIX: &str = "GGML_OP_";
    let names = line.match_indices(PREFIX).map(|(at, _)| {
        let name = &line[at + PREFIX.len()..];
        let end = name.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        &name[..end.unwrap_or(name.len())]
    });
    names.filter(|name| {
        !matches!(
            *name,
            "POOL_MAX" | "POOL_AVG" | "POOL_COUNT" | "COUNT" | "NONE"
        )
    })
}

/// The indices of the words that line `at` of a function writes.
fn indices(lines: &[&str], at: usize) -> Result<Vec<usize>> {
    let line = lines[at];
    for setter in ["ggml_set_op_params_i32(", "ggml_set_op_params_f32("] {
        if let Some((_, arguments)) = line.split_once(setter) {
            let index = arguments.split(',').nth(1).context("no index")?;
            return Ok(vec![index_of(lines, index)?]);
        }
    }
    if let Some((_, arguments)) = line.split_once("ggml_set_op_params(") {
        let from = arguments.split(',').nth(1).context("no words")?.trim();
        let count = match from.strip_prefix('&') {
            Some(variable) => size_of(lines, variable)?,
            None => elements(lines, from)?,
        };
        return Ok((0..count).collect());
    }
    // A copy into the words, not out of them.
    if let Some((_, arguments)) = line.split_once("memcpy(") {
        let to = arguments.split(',').next().unwrap_or_default();
        if let Some((_, index)) = to.split_once("op_params") {
            let index = index.trim().trim_start_matches('+').trim();
            return Ok(vec![if index.is_empty() {
                0
            } else {
                index_of(lines, index)?
            }]);
        }
    }
    let assigned = line
        .split_once("op_params")
        .and_then(|(_, rest)| rest.split_once("] ="));
    ensure!(
        assigned.is_none_or(|(_, value)| value.starts_with('=')),
        "a write that this test cannot read"
    );
    Ok(Vec::new())
}

/// The value of an index: a number, or a sum with a variable that the function compares with one.
fn index_of(lines: &[&str], index: &str) -> Result<usize> {
    index.split('+').map(str::trim).try_fold(0, |sum, term| {
        let value = match term.parse() {
            Ok(number) => Some(number),
            Err(_) => { lines.iter() }.find_map(|line| {
                let (_, value) = line.split_once(&format!("{term} != "))?;
                value.split(')').next()?.trim().parse().ok()
            }),
        };
        let value: usize = value.with_context(|| format!("the index {term} is unknown"))?;
        Ok(sum + value)
    })
}

/// The words of a variable.
fn size_of(lines: &[&str], variable: &str) -> Result<usize> {
    for (ty, words) in [
        ("size_t", 2),
        ("int64_t", 2),
        ("float", 1),
        ("int32_t", 1),
        ("int", 1),
    ] {
        let is_declared = lines.iter().any(|line| {
            let mut words = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let mut before = "";
            words.any(|word| {
                let found = word == variable && before == ty;
                if !word.is_empty() {
                    before = word;
                }
                found
            })
        });
        if is_declared {
            return Ok(words);
        }
    }
    bail!("{variable} has no type")
}

/// The elements of an array of words of 32 bits.
fn elements(lines: &[&str], array: &str) -> Result<usize> {
    let declaration = lines.iter().position(|line| {
        ["int32_t", "float"]
            .iter()
            .any(|ty| line.starts_with(&format!("{ty} {array}[")))
    });
    let at = declaration.with_context(|| format!("{array} has no declaration"))?;
    let (_, rest) = lines[at].split_once('[').context("no size")?;
    let (size, _) = rest.split_once(']').context("no size")?;
    if let Ok(size) = size.parse() {
        return Ok(size);
    }
    let text = lines[at..].join(" ");
    let (_, values) = text.split_once('{').context("no values")?;
    let (values, _) = values.split_once('}').context("no end of the values")?;
    Ok(values
        .split(',')
        .filter(|value| !value.trim().is_empty())
        .count())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTERS: &str = "\
static struct ggml_tensor * ggml_glu_impl(struct ggml_tensor * a, enum ggml_glu_op op) {
    ggml_set_op_params_i32(result, 0, (int32_t) op);
    result->op = GGML_OP_GLU;
}

struct ggml_tensor * ggml_swiglu_oai(
        struct ggml_tensor * a, float limit) {
    struct ggml_tensor * result = ggml_glu_impl(a, GGML_GLU_OP_SWIGLU_OAI);
    ggml_set_op_params_f32(result, 3, limit); // the limit
}

bool ggml_prec_set_src(struct ggml_tensor * a, int idx) {
    switch (a->op) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
            {
                if (idx != 1) {
                    return false;
                }
                ggml_set_op_params_i32(a, 2 + idx, prec);
            }
            break;
        case GGML_OP_FLASH_ATTN_EXT:
            ggml_set_op_params_i32(a, 5, prec);
    }
}

static struct ggml_tensor * ggml_view_impl(struct ggml_tensor * a, size_t offset) {
    ggml_set_op_params(result, &offset, sizeof(offset));
    result->op = GGML_OP_VIEW;
}

struct ggml_tensor * ggml_win(struct ggml_tensor * a, int w) {
    int32_t params[] = { npx, npy,
        w };
    ggml_set_op_params(result, params, sizeof(params));
    result->op = GGML_OP_WIN_PART;
}

void ggml_compute_backward(void) {
    case GGML_OP_SCALE:
        memcpy(&s, tensor->op_params, sizeof(float));
}
";

    #[test]
    fn every_way_to_write_a_word_is_read() {
        // The least number of words is that of a whole file.
        let many: String = { 0..100 }
            .map(|i| {
                format!(
                    "void f{i}(struct t * a) {{\n    ggml_set_op_params_i32(a, {i}, 0);\n    \
                     a->op = GGML_OP_TEST;\n}}\n"
                )
            })
            .collect();
        let mut words = written(&format!("{SETTERS}{many}")).unwrap();
        words.retain(|(op, _)| op != "TEST");
        let expected = [
            ("FLASH_ATTN_EXT", 5),
            ("GLU", 0),
            ("GLU", 3),
            ("MUL_MAT", 3),
            ("MUL_MAT_ID", 3),
            ("VIEW", 0),
            ("VIEW", 1),
            ("WIN_PART", 0),
            ("WIN_PART", 1),
            ("WIN_PART", 2),
        ];
        let expected = expected.map(|(op, word)| (op.to_owned(), word));
        assert_eq!(words, Words::from(expected));
        let unknown = SETTERS.replace("2 + idx", "2 + other");
        assert!(written(&format!("{unknown}{many}")).is_err());
    }

    #[test]
    fn table_of_the_plugin_is_read() {
        let text = std::fs::read_to_string(workspace::root().join(TABLE)).unwrap();
        let table = Table::parse(&text).unwrap();
        assert_eq!(table.added.get(&("MUL_MAT_ID".into(), 3)), Some(&23));
        assert_eq!(table.added.get(&("DSV4_HC_PRE".into(), 1)), Some(&24));
        assert_eq!((table.precisions, table.hc_pre_has_parameters), (23, 25));
        assert!(Table::parse("").is_err());
    }
}
