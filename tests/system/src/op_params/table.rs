//! The plugin's table of what differs between releases.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail, ensure};

use super::build::{Build, is_old};
use xtask_common::workspace;

/// The table, below the root of the workspace.
pub(crate) const TABLE: &str = "ggml-backend-vgpu/translate/releases.rs";
/// The numbers that the table refers to.
const NUMBERS: &str = "vendor/src/versions.rs";
/// The values of `enum ggml_prec` that the plugin knows.
const PRECISIONS: &str = "ggml-backend-vgpu/translate/params.rs";

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
    pub(super) fn parse(table: &str, numbers: &str, precisions: &str) -> Result<Table> {
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
