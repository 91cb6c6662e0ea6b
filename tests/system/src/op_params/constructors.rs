//! Reads `ggml.c` and `ggml.h`: what constructors write, and the values of enums.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail, ensure};

use crate::c_source;

/// Operators by the name of ggml without its prefix, each with the index of a word or a source.
pub(crate) type Indices = BTreeSet<(String, usize)>;

/// What constructors and setters write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Written {
    /// Words of `op_params`.
    pub(crate) words: Indices,
    /// Sources.
    pub(crate) sources: Indices,
    /// Sources that a constructor compares with null.
    pub(crate) nullable: Indices,
}

/// The other enums of `ggml.h` whose values are in words, and which the plugin reads by value. No
/// release has changed one.
pub(super) const ENUMS: [&str; 6] = [
    "ggml_op_hint",
    "ggml_op_pool",
    "ggml_scale_flag",
    "ggml_scale_mode",
    "ggml_sort_order",
    "ggml_tri_type",
];

/// The beginnings of the names of macros whose values are in words.
const MACROS: [&str; 2] = ["GGML_ROPE_TYPE_", "GGML_MROPE_SECTIONS"];

/// A function of a C file.
#[derive(Debug, Default)]
struct Function<'a> {
    /// Its lines without comments, the declaration included.
    lines: Vec<&'a str>,
    /// The operators that it names.
    ops: BTreeSet<&'a str>,
}

/// What the functions of `ggml.c` write, by operator. Operators that call a function of the program
/// are left out: the plugin refuses them.
pub(super) fn written(source: &str) -> Result<Written> {
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
    let mut written = Written::default();
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
            // What is not a constructor copies nodes of any operator.
            let source = assigned_source(line).filter(|_| !ops.is_empty());
            let source = source
                .map(|(index, value)| {
                    let index: usize = index.parse().context("the source's index is unknown")?;
                    anyhow::Ok((index, is_compared_with_null(&function.lines, value)))
                })
                .transpose()
                .with_context(|| format!("{name}: {line}"))?;
            for op in ops {
                let of = |index| (op.to_owned(), index);
                written.words.extend(indices.iter().copied().map(of));
                if let Some((index, may_be_null)) = source {
                    written.sources.insert(of(index));
                    written.nullable.extend(may_be_null.then(|| of(index)));
                }
            }
        }
    }
    let (words, sources) = (written.words.len(), written.sources.len());
    ensure!(
        words > 100 && sources > 100,
        "only {words} words and {sources} sources were found"
    );
    Ok(written)
}

/// The index and the value of the source that a line assigns.
fn assigned_source(line: &str) -> Option<(&str, &str)> {
    let (_, rest) = line.split_once("->src[")?;
    let (index, rest) = rest.split_once(']')?;
    let value = rest.trim_start().strip_prefix("= ")?;
    Some((index.trim(), value.split(';').next()?.trim()))
}

/// Whether a function looks whether `value` is null, or the value is null.
fn is_compared_with_null(lines: &[&str], value: &str) -> bool {
    let comparisons = [
        format!("if ({value})"),
        format!("if ({value} &&"),
        format!("if (!{value})"),
        format!("{value} ? "),
        format!("{value} == NULL"),
        format!("{value} != NULL"),
    ];
    value == "NULL"
        || lines
            .iter()
            .any(|line| comparisons.iter().any(|comparison| calls(line, comparison)))
}

/// The values of `enum ggml_prec` in `ggml.h`, by their names without the prefix.
pub(super) fn precisions(header: &str) -> Result<BTreeMap<String, i64>> {
    let mut lines = header.lines().map(c_source::code);
    lines
        .find(|line| *line == "enum ggml_prec {")
        .context("no enum of precisions")?;
    let entries = lines.take_while(|line| !line.starts_with('}'));
    let entries = entries.filter(|line| !line.is_empty()).map(|line| {
        let (name, value) = line.trim_end_matches(',').split_once('=')?;
        let name = name.trim().strip_prefix("GGML_PREC_")?;
        Some((name.to_owned(), value.trim().parse().ok()?))
    });
    let values: Option<BTreeMap<String, i64>> = entries.collect();
    values
        .filter(|values| values.len() >= 2)
        .context("a precision without a value")
}

/// The values of [`ENUMS`] and [`MACROS`] in `ggml.h`, as text, by their names. A name without a
/// value has its position in the enum.
pub(super) fn constants(header: &str) -> Result<BTreeMap<String, String>> {
    let mut constants = BTreeMap::new();
    for name in ENUMS {
        let mut lines = header.lines().map(c_source::code);
        let begin = format!("enum {name} {{");
        lines
            .find(|line| *line == begin)
            .with_context(|| format!("no enum {name}"))?;
        let entries = lines.take_while(|line| !line.starts_with('}'));
        let entries = entries.filter(|line| !line.is_empty());
        for (position, line) in entries.enumerate() {
            let line = line.trim_end_matches(',');
            let (entry, value) = match line.split_once('=') {
                Some((entry, value)) => (entry.trim(), value.trim().to_owned()),
                None => (line, position.to_string()),
            };
            constants.insert(entry.to_owned(), value);
        }
    }
    let macros = header.lines().map(c_source::code);
    let macros = macros.filter_map(|line| line.strip_prefix("#define "));
    for (name, value) in macros.filter_map(|line| line.split_once(' ')) {
        if MACROS.iter().any(|start| name.starts_with(start)) {
            constants.insert(name.to_owned(), value.trim().to_owned());
        }
    }
    ensure!(
        constants.contains_key("GGML_ROPE_TYPE_NEOX"),
        "no kinds of ROPE"
    );
    Ok(constants)
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
