//! What the constructors of a ggml write into nodes, read from its `ggml.c`, and the plugin's table
//! of what differs between releases (`ggml-backend-vgpu/translate/releases.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};

use crate::c_source;
use xtask_common::ggml_releases;
use xtask_common::workspace;

/// The table, below the root of the workspace.
pub(crate) const TABLE: &str = "ggml-backend-vgpu/translate/releases.rs";
/// The numbers that the table refers to.
const NUMBERS: &str = "vendor/src/versions.rs";
/// The values of `enum ggml_prec` that the plugin knows.
const PRECISIONS: &str = "ggml-backend-vgpu/translate/params.rs";

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

/// A build of ggml.
#[derive(Clone, Debug)]
pub(crate) struct Build {
    /// The minor number of its release.
    pub(crate) minor: u32,
    /// What its constructors and setters write.
    pub(crate) written: Written,
    /// The values of `enum ggml_prec`.
    pub(crate) precisions: BTreeMap<String, i64>,
    /// The values of [`ENUMS`] and of the macros of [`MACROS`].
    pub(crate) constants: BTreeMap<String, String>,
}

/// The other enums of `ggml.h` whose values are in words, and which the plugin reads by value. No
/// release has changed one.
const ENUMS: [&str; 6] = [
    "ggml_op_hint",
    "ggml_op_pool",
    "ggml_scale_flag",
    "ggml_scale_mode",
    "ggml_sort_order",
    "ggml_tri_type",
];

/// The beginnings of the names of macros whose values are in words.
const MACROS: [&str; 2] = ["GGML_ROPE_TYPE_", "GGML_MROPE_SECTIONS"];

impl Build {
    /// Reads the sources of ggml in the folder `ggml`.
    ///
    /// # Errors
    /// If a file cannot be read or understood.
    pub(crate) fn read(ggml: &Path) -> Result<Build> {
        let read = |file: &str| {
            let path = ggml.join(file);
            std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
        };
        let version = ggml_releases::version_of(ggml)?;
        let minor = { version.split('.').nth(1) }.and_then(|minor| minor.parse().ok());
        let of = || format!("ggml {version} in {}", ggml.display());
        let header = read("include/ggml.h")?;
        Ok(Build {
            minor: minor.with_context(|| format!("{version} is no release"))?,
            written: written(&read("src/ggml.c")?).with_context(of)?,
            precisions: precisions(&header).with_context(of)?,
            constants: constants(&header).with_context(of)?,
        })
    }

    /// Whether `enum ggml_prec` has more values than default and F32.
    pub(crate) fn has_all_precisions(&self) -> bool {
        self.precisions.keys().any(|name| !is_old(name))
    }
}

/// Whether every release has the precision.
fn is_old(name: &str) -> bool {
    matches!(name, "DEFAULT" | "UNDEFINED" | "F32")
}

/// Minor numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Since {
    /// The lowest of a build with the feature.
    pub(crate) some: u32,
    /// The lowest under which every build has it.
    pub(crate) every: u32,
}

/// The plugin's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    /// Words that some releases do not write.
    pub(crate) added: BTreeMap<(String, usize), Since>,
    /// Sources that became optional.
    pub(crate) optional: BTreeMap<(String, usize), Since>,
    /// All values of `enum ggml_prec`.
    pub(crate) precisions: Since,
    /// The values that the plugin knows.
    pub(crate) precision_values: BTreeMap<String, i64>,
    /// The lowest number under which every build writes the words of DSV4_HC_PRE.
    pub(crate) hc_pre_has_parameters: u32,
}

impl Table {
    /// Reads the table of this checkout.
    ///
    /// # Errors
    /// If a file cannot be read or understood.
    pub(crate) fn of_workspace() -> Result<Table> {
        let read = |file: &str| {
            let path = workspace::root().join(file);
            std::fs::read_to_string(path).with_context(|| format!("reading {file}"))
        };
        Table::parse(&read(TABLE)?, &read(NUMBERS)?, &read(PRECISIONS)?)
    }

    /// Reads the constant `TABLE` of `table`, the numbers that it refers to, and the values of
    /// precisions.
    fn parse(table: &str, numbers: &str, precisions: &str) -> Result<Table> {
        // `pub const NAME: Self = Self::release_after(23);`
        let numbers: BTreeMap<&str, Since> = { numbers.lines() }
            .filter_map(|line| {
                let (name, value) = line
                    .trim()
                    .strip_prefix("pub const ")?
                    .split_once(": Self")?;
                let (_, number) = value.split_once("release_after(")?;
                let some: u32 = number.split(')').next()?.parse().ok()?;
                Some((
                    name,
                    Since {
                        some,
                        every: some + 1,
                    },
                ))
            })
            .collect();
        let start = table.find("pub(super) const TABLE").context("no table")?;
        let text = { table[start..].split_once("\n};") }
            .context("the table has no end")?
            .0;
        // `Since::NAME.field`
        let since = |text: &str, field: &str| -> Option<Since> {
            let (_, rest) = text.split_once("Since::")?;
            let (name, rest) = rest.split_once('.')?;
            rest.strip_prefix(field)?;
            numbers.get(name).copied()
        };
        let of_field = |name: &str, part: &str| {
            let (_, rest) = text.split_once(&format!("\n    {name}: "))?;
            since(rest.lines().next()?, part)
        };
        // `10 => Precision::F32,`
        let values = precisions.lines().filter_map(|line| {
            let (value, name) = line.trim().split_once(" => Precision::")?;
            let name = name.trim_end_matches(',').to_ascii_uppercase();
            Some((name, value.parse().ok()?))
        });
        let every = of_field("hc_pre_has_parameters", "every_build");
        let mut table = Table {
            added: BTreeMap::new(),
            optional: BTreeMap::new(),
            precisions: of_field("precisions", "some_builds").context("no precisions")?,
            precision_values: values.collect(),
            hc_pre_has_parameters: every.context("no parameters of DSV4_HC_PRE")?.every,
        };
        let field = |entry: &str, name: &str| -> Option<usize> {
            let (_, rest) = entry.split_once(name)?;
            rest.split_once(',')?.0.trim().parse().ok()
        };
        let ops = |text: &str| -> Vec<String> {
            let names = text.split("OpKind::").skip(1);
            names
                .filter_map(|name| name.split([',', ']', ' ']).next())
                .map(of_ggml)
                .collect()
        };
        for entry in text.split("Added {").skip(1) {
            let from = entry
                .split_once("from: ")
                .and_then(|(_, rest)| since(rest, "some_builds"));
            let (Some(word), Some(from)) = (field(entry, "word: "), from) else {
                bail!("an entry without a word or a number: {entry}");
            };
            let of = entry.split_once(']').map_or(entry, |(ops, _)| ops);
            table
                .added
                .extend(ops(of).into_iter().map(|op| ((op, word), from)));
        }
        for entry in text.split("Optional {").skip(1) {
            let from = entry
                .split_once("from: ")
                .and_then(|(_, rest)| since(rest, "some_builds"));
            let op = { entry.lines() }.find(|line| line.trim().starts_with("op: "));
            let op = op.and_then(|line| ops(line).pop());
            let (Some(op), Some(source), Some(from)) = (op, field(entry, "source: "), from) else {
                bail!("an entry without an operator, a source or a number: {entry}");
            };
            table.optional.insert((op, source), from);
        }
        ensure!(
            !table.added.is_empty() && !table.optional.is_empty(),
            "the table has no words, or no sources"
        );
        // The plugin needs no entry for it, the engine over a backend of ggml the number.
        let offset = numbers
            .get("ROPE_OFFSET")
            .context("no number of ROPE's offset")?;
        for op in ["ROPE", "ROPE_BACK"] {
            table.added.insert((op.to_owned(), 15), *offset);
        }
        Ok(table)
    }

    /// How a build contradicts the table. `newest`: a build whose nodes the plugin reads as they
    /// are.
    pub(crate) fn contradictions(&self, newest: &Build, build: &Build) -> Vec<String> {
        let mut found = Vec::new();
        let none = BTreeMap::new();
        let (minor, here, all) = (build.minor, &build.written, &newest.written);
        for (what, verb, here, all, entries) in [
            ("word", "written", &here.words, &all.words, &self.added),
            ("source", "written", &here.sources, &all.sources, &none),
            (
                "source",
                "optional",
                &here.nullable,
                &all.nullable,
                &self.optional,
            ),
        ] {
            for key @ (op, index) in here.union(all) {
                let since = entries
                    .get(key)
                    .copied()
                    .unwrap_or(Since { some: 0, every: 0 });
                let named = format!("{what} {index} of {op}");
                match (here.contains(key), all.contains(key)) {
                    (true, false) if verb == "optional" => {
                        found.push(format!(
                            "{named} may be null: it is in no entry of the table"
                        ));
                    }
                    (true, false) => {
                        found.push(format!("{named} is new: it is in no entry of the table"));
                    }
                    (true, true) if minor < since.some => found.push(format!(
                        "{named} is {verb} under 0.{minor}, in the table from 0.{} on",
                        since.some
                    )),
                    (false, true) if minor >= since.every => {
                        found.push(format!("{named} is not {verb} under 0.{minor}"));
                    }
                    _ => {}
                }
            }
        }
        for (name, value) in &build.precisions {
            let known = if name == "UNDEFINED" { "DEFAULT" } else { name };
            match self.precision_values.get(known) {
                None => found.push(format!("GGML_PREC_{name} is new, with the value {value}")),
                Some(known) if known != value => found.push(format!(
                    "GGML_PREC_{name} is {value}, and {known} in the plugin"
                )),
                Some(_) if minor < self.precisions.some && !is_old(name) => found.push(format!(
                    "GGML_PREC_{name} is there under 0.{minor}, in the table from 0.{} on",
                    self.precisions.some
                )),
                Some(_) => {}
            }
        }
        let names = { newest.constants.keys() }.chain(build.constants.keys());
        for name in names.collect::<BTreeSet<_>>() {
            let (here, there) = (build.constants.get(name), newest.constants.get(name));
            if here != there {
                let value =
                    |value: Option<&String>| value.map_or("nothing", String::as_str).to_owned();
                found.push(format!(
                    "{name} is {} under 0.{minor}, and {} in the newest build",
                    value(here),
                    value(there)
                ));
            }
        }
        for name in self.precision_values.keys() {
            let is_due = is_old(name) || minor >= self.precisions.every;
            if is_due && name != "DEFAULT" && !build.precisions.contains_key(name) {
                found.push(format!("GGML_PREC_{name} is not there under 0.{minor}"));
            }
        }
        found
    }

    /// What `builds`, the newest last, contradict: each build by itself, and numbers for which no
    /// build speaks.
    pub(crate) fn differences(&self, builds: &[Build]) -> Vec<String> {
        let Some(newest) = builds.last() else {
            return vec!["there is no build".to_owned()];
        };
        let mut found: Vec<String> = { builds.iter() }
            .flat_map(|build| self.contradictions(newest, build))
            .collect();
        let mut check = |what: String, since: Since, has: &dyn Fn(&Build) -> bool| {
            let some = builds
                .iter()
                .any(|build| build.minor == since.some && has(build));
            if !some {
                found.push(format!("{what}: no build of 0.{} has it", since.some));
            }
            let some = { builds.iter() }.any(|build| build.minor + 1 == since.every && !has(build));
            if !some {
                found.push(format!(
                    "{what}: every build below 0.{} has it",
                    since.every
                ));
            }
        };
        for (key @ (op, word), &since) in &self.added {
            let has = |build: &Build| build.written.words.contains(key);
            check(format!("word {word} of {op}"), since, &has);
        }
        for (key @ (op, source), &since) in &self.optional {
            let has = |build: &Build| build.written.nullable.contains(key);
            check(format!("source {source} of {op}"), since, &has);
        }
        check(
            "precisions".to_owned(),
            self.precisions,
            &Build::has_all_precisions,
        );
        let every = { self.added.get(&("DSV4_HC_PRE".to_owned(), 0)) }.map(|since| since.every);
        if every != Some(self.hc_pre_has_parameters) {
            found.push(format!(
                "every build writes DSV4_HC_PRE from 0.{every:?} on, from 0.{} in the table",
                self.hc_pre_has_parameters
            ));
        }
        found
    }

    /// The tables that differ from this one in one place.
    pub(crate) fn changed(&self) -> Vec<Table> {
        let mut all = Vec::new();
        let mut change = |change: &dyn Fn(&mut Table)| {
            let mut table = self.clone();
            change(&mut table);
            all.push(table);
        };
        type Entries = fn(&mut Table) -> &mut BTreeMap<(String, usize), Since>;
        let kinds: [(Entries, _); 2] = [
            (|table| &mut table.added, self.added.clone()),
            (|table| &mut table.optional, self.optional.clone()),
        ];
        for (entries, now) in kinds {
            for (key, since) in &now {
                change(&|table| {
                    entries(table).remove(key);
                });
                for index in (0..16).filter(|&index| index != key.1) {
                    let other = (key.0.clone(), index);
                    if !now.contains_key(&other) {
                        change(&|table| {
                            entries(table).remove(key);
                            entries(table).insert(other.clone(), *since);
                        });
                    }
                }
                for since in since.moved() {
                    change(&|table| {
                        entries(table).insert(key.clone(), since);
                    });
                }
            }
        }
        for since in self.precisions.moved() {
            change(&|table| table.precisions = since);
        }
        for name in self.precision_values.keys() {
            change(&|table| {
                table.precision_values.remove(name);
            });
            change(&|table| *table.precision_values.entry(name.clone()).or_default() += 1);
        }
        for step in [-1, 1] {
            change(&|table| {
                let number = &mut table.hc_pre_has_parameters;
                *number = number.saturating_add_signed(step);
            });
        }
        all
    }
}

impl Since {
    /// The same with one number changed by one.
    fn moved(self) -> [Since; 4] {
        let Since { some, every } = self;
        [
            Since {
                some: some - 1,
                every,
            },
            Since {
                some: some + 1,
                every,
            },
            Since {
                some,
                every: every - 1,
            },
            Since {
                some,
                every: every + 1,
            },
        ]
    }
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

/// What the functions of `ggml.c` write, by operator. Operators that call a function of the program
/// are left out: the plugin refuses them.
fn written(source: &str) -> Result<Written> {
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
fn precisions(header: &str) -> Result<BTreeMap<String, i64>> {
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
fn constants(header: &str) -> Result<BTreeMap<String, String>> {
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

    /// The least number of words and sources is that of a whole file.
    fn many() -> String {
        let functions = (0..101).map(|i| {
            format!(
                "void f{i}(struct t * a) {{\n    ggml_set_op_params_i32(a, {i}, 0);\n    \
                 a->src[{i}] = x;\n    a->op = GGML_OP_TEST;\n}}\n"
            )
        });
        functions.collect()
    }

    #[test]
    fn every_way_to_write_a_word_is_read() {
        let mut words = written(&format!("{SETTERS}{}", many())).unwrap().words;
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
        assert_eq!(words, Indices::from(expected));
        let unknown = SETTERS.replace("2 + idx", "2 + other");
        assert!(written(&format!("{unknown}{}", many())).is_err());
    }

    const SOURCES: &str = "\
struct ggml_tensor * ggml_post(struct ggml_tensor * x, struct ggml_tensor * comb) {
    if (comb) {
        GGML_ASSERT(comb->ne[3] == 1);
    }
    result->op     = GGML_OP_POST;
    result->src[0] = x;
    result->src[3] = comb; // or null
}

void ggml_add_sinks(struct ggml_tensor * a, struct ggml_tensor * sinks) {
    GGML_ASSERT(a->op == GGML_OP_ATTN);
    GGML_ASSERT(a->src[4] == NULL);
    if (!sinks) {
        a->src[4] = NULL;
        return;
    }
    a->src[4] = sinks;
}

void ggml_copy(struct ggml_tensor * from, struct ggml_tensor * to) {
    to->src[i] = from->src[i];
}
";

    #[test]
    fn sources_are_read_and_whether_they_may_be_null() {
        let read = |text: &str| {
            let mut written = written(&format!("{text}{}", many())).unwrap();
            written.sources.retain(|(op, _)| op != "TEST");
            written
        };
        let indices = |all: &[(&str, usize)]| -> Indices {
            all.iter()
                .map(|&(op, index)| (op.to_owned(), index))
                .collect()
        };
        let found = read(SOURCES);
        assert_eq!(
            found.sources,
            indices(&[("ATTN", 4), ("POST", 0), ("POST", 3)])
        );
        assert_eq!(found.nullable, indices(&[("ATTN", 4), ("POST", 3)]));
        let found = read(&SOURCES.replace("if (comb) {", "{"));
        assert_eq!(found.nullable, indices(&[("ATTN", 4)]));
    }

    #[test]
    fn values_of_the_enum_are_read() {
        let header = "\
    enum ggml_prec {
        GGML_PREC_DEFAULT =  0, // note
        GGML_PREC_F32     = 10,
    };
";
        let expected = [("DEFAULT".to_owned(), 0), ("F32".to_owned(), 10)];
        assert_eq!(precisions(header).unwrap(), BTreeMap::from(expected));
        assert!(precisions(&header.replace("10", "NEW")).is_err());
        assert!(precisions("").is_err());
    }

    #[test]
    fn constants_are_read_and_compared() {
        let mut header = "#define GGML_ROPE_TYPE_NEOX   2 // note\n".to_owned();
        for name in ENUMS {
            header += &format!(
                "    enum {name} {{\n        {name}_A,\n        {name}_B = (1 << 8),\n    }};\n"
            );
        }
        let read = constants(&header).unwrap();
        assert_eq!(read.len(), 2 * ENUMS.len() + 1);
        let value = |name: &str| read.get(name).map(String::as_str);
        assert_eq!(value("ggml_op_pool_A"), Some("0"));
        assert_eq!(value("ggml_op_pool_B"), Some("(1 << 8)"));
        assert_eq!(value("GGML_ROPE_TYPE_NEOX"), Some("2"));
        assert!(constants(&header.replace("enum ggml_tri_type", "enum tri")).is_err());
        assert!(constants(&header.replace("TYPE_NEOX", "NEOX")).is_err());

        let mut newest = build(26, &[]);
        newest.constants = read;
        let mut older = newest.clone();
        older.constants.insert("ggml_op_pool_B".into(), "2".into());
        older.constants.remove("ggml_op_pool_A");
        let since = Since {
            some: 23,
            every: 24,
        };
        let table = Table {
            added: BTreeMap::new(),
            optional: BTreeMap::new(),
            precisions: since,
            precision_values: BTreeMap::from([("F32".to_owned(), 10)]),
            hc_pre_has_parameters: 25,
        };
        assert_eq!(table.contradictions(&newest, &newest), [""; 0]);
        assert_eq!(
            table.contradictions(&newest, &older),
            [
                "ggml_op_pool_A is nothing under 0.26, and 0 in the newest build",
                "ggml_op_pool_B is 2 under 0.26, and (1 << 8) in the newest build",
            ]
        );
    }

    /// A build under the number 0.`minor`.
    fn build(minor: u32, words: &[usize]) -> Build {
        Build {
            minor,
            written: Written {
                words: words.iter().map(|&word| ("OP".to_owned(), word)).collect(),
                ..Written::default()
            },
            precisions: BTreeMap::from([("F32".to_owned(), 10)]),
            constants: BTreeMap::new(),
        }
    }

    #[test]
    fn contradictions_of_a_build_are_named() {
        let since = Since {
            some: 23,
            every: 24,
        };
        let table = Table {
            added: BTreeMap::from([(("OP".to_owned(), 3), since)]),
            optional: BTreeMap::new(),
            precisions: since,
            precision_values: BTreeMap::from([("F32".to_owned(), 10), ("Q8".to_owned(), 30)]),
            hc_pre_has_parameters: 25,
        };
        let newest = build(26, &[0, 3]);
        let found = |minor, words: &[usize]| {
            let mut found = table.contradictions(&newest, &build(minor, words));
            found.retain(|line| !line.contains("GGML_PREC_Q8"));
            found
        };
        for (minor, words) in [(22, &[0][..]), (23, &[0]), (23, &[0, 3]), (24, &[0, 3])] {
            assert_eq!(found(minor, words), [""; 0], "0.{minor} {words:?}");
        }
        assert_eq!(
            found(22, &[0, 3]),
            ["word 3 of OP is written under 0.22, in the table from 0.23 on"]
        );
        assert_eq!(found(24, &[0]), ["word 3 of OP is not written under 0.24"]);
        assert_eq!(found(22, &[]), ["word 0 of OP is not written under 0.22"]);
        assert_eq!(
            found(27, &[0, 3, 5]),
            ["word 5 of OP is new: it is in no entry of the table"]
        );
        let mut other = build(24, &[0, 3]);
        other.precisions.insert("F32".into(), 11);
        other.precisions.insert("Q2".into(), 50);
        assert_eq!(
            table.contradictions(&newest, &other),
            [
                "GGML_PREC_F32 is 11, and 10 in the plugin",
                "GGML_PREC_Q2 is new, with the value 50",
                "GGML_PREC_Q8 is not there under 0.24",
            ]
        );
    }

    #[test]
    fn table_of_the_plugin_is_read() {
        let table = Table::of_workspace().unwrap();
        let added = |op: &str, word| table.added.get(&(op.to_owned(), word)).copied();
        let since = |some| {
            Some(Since {
                some,
                every: some + 1,
            })
        };
        assert_eq!(added("MUL_MAT_ID", 3), since(23));
        assert_eq!(added("DSV4_HC_PRE", 1), since(24));
        assert_eq!(added("ROPE", 15), since(20));
        assert_eq!(
            table.optional.get(&("DSV4_HC_POST".into(), 3)).copied(),
            since(24)
        );
        assert_eq!(
            (Some(table.precisions), table.hc_pre_has_parameters),
            (since(23), 25)
        );
        assert_eq!(table.precision_values.get("Q4"), Some(&40));
        assert!(Table::parse("", "", "").is_err());
    }
}
