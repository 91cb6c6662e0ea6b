//! The documentation against the sources: links, names of functions and tests, quoted messages,
//! flags and environment variables.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use xtask_common::markdown::{self, anchor, check_links, prose};
use xtask_common::workspace;

/// Prose has lines of at most this many characters.
const MAX_COLUMNS: usize = 100;

/// Every file of the repository with one of these extensions, with its text; paths are relative to
/// the root.
fn files(extensions: &[&str]) -> BTreeMap<PathBuf, String> {
    markdown::files_below(workspace::root(), extensions).expect("texts of the repository")
}

fn page(name: &str) -> String {
    let path = workspace::root().join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The code spans of a page: what stands between two backticks of a line.
fn spans(text: &str) -> Vec<&str> {
    let lines = prose(text).into_iter();
    lines
        .flat_map(|(_, line)| line.split('`').skip(1).step_by(2))
        .collect()
}

/// `path.rs: function` and `path.rs: Type::function` among the code spans.
fn named_functions(text: &str) -> Vec<(String, &str)> {
    let named = spans(text).into_iter().filter_map(|span| {
        let (file, function) = span.split_once(".rs: ")?;
        Some((format!("{file}.rs"), function))
    });
    named.collect()
}

/// Why a function that a page names is not in its file.
fn missing_function(file: &str, function: &str) -> Option<String> {
    let Ok(text) = fs::read_to_string(workspace::root().join(file)) else {
        return Some(format!("{file} does not exist"));
    };
    let (owner, name) = match function.rsplit_once("::") {
        Some((owner, name)) => (Some(owner), name),
        None => (None, function),
    };
    let is_defined = |after: char| text.contains(&format!("fn {name}{after}"));
    if !is_defined('(') && !is_defined('<') {
        return Some(format!("{file} has no function {name}"));
    }
    let owner = owner.filter(|owner| !implements(&text, owner));
    owner.map(|owner| format!("{file} does not implement {owner}"))
}

/// Whether `text` has an `impl` block for the type `owner`, or declares the trait `owner`.
fn implements(text: &str, owner: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text.lines().any(|line| {
        let line = line.trim_start();
        let line = line.strip_prefix("unsafe ").unwrap_or(line);
        let declares = line.starts_with("impl") || line.contains("trait ");
        declares && line.split(|c| !is_word(c)).any(|word| word == owner)
    })
}

/// Why what a page names as a test is none. Below `tests/system/src/parts` a test is a check of the
/// suite, or `run`, which makes the checks of its file.
fn missing_test(file: &str, name: &str) -> Option<String> {
    if let Some(reason) = missing_function(file, name) {
        return Some(reason);
    }
    let text = page(file);
    let definition = format!("fn {name}(");
    if let Some(module) = file.strip_prefix("tests/system/src/faults/") {
        let module = module.trim_end_matches(".rs");
        let is_in = |file: &str, call: String| page(file).contains(&call);
        let is_fault = is_in(
            "tests/system/src/faults/all.rs",
            format!("{module}::{name}"),
        ) || is_in(
            "tests/system/src/parts/faults.rs",
            format!("faults::{name}("),
        );
        return (!is_fault).then(|| format!("{file}: {name} is not a fault"));
    }
    // The checks of a virtual machine, which the part calls.
    if file.starts_with("tests/system/src/vm/") {
        let is_called = page("tests/system/src/parts/vm.rs").contains(&format!(".{name}("));
        return (!is_called).then(|| format!("{file}: {name} is not called"));
    }
    // A test program with a `main` of its own, which calls the tests.
    if text.contains("\nfn main(") {
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        let is_called = words.filter(|word| *word == name).count() > 1;
        return (!is_called).then(|| format!("{file}: {name} is not called"));
    }
    let is_test = match file.starts_with("tests/system/src/parts/") {
        true => text.split(&definition).skip(1).any(|rest| {
            let signature = rest.split('{').next().unwrap_or_default();
            name == "run" || signature.trim_end().ends_with("-> Result<String>")
        }),
        false => text.match_indices(&definition).any(|(at, _)| {
            let before = text[..at].lines().rev().map(str::trim);
            let mut attributes = before
                .skip_while(|line| line.is_empty())
                .take_while(|line| line.starts_with("#["));
            attributes.any(|attribute| attribute == "#[test]")
        }),
    };
    (!is_test).then(|| format!("{file}: {name} is not a test"))
}

#[test]
fn every_relative_link_resolves() {
    let links = check_links(workspace::root(), &files(&["md"]));
    assert!(links.count > 50, "only {} links were found", links.count);
    let broken = links.broken.join("\n");
    assert!(broken.is_empty(), "broken links:\n{broken}");
}

/// The names that a page places in a file: "`name` in `path`" and "`name` of `path`" on one line.
fn names_in_files(text: &str) -> Vec<(&str, &str)> {
    let mut named = Vec::new();
    for (_, line) in prose(text) {
        let parts: Vec<&str> = line.split('`').collect();
        for parts in parts.windows(4).skip(1).step_by(2) {
            let [name, between, path, _] = parts else {
                continue;
            };
            let is_file = path.contains('/') && Path::new(path).extension().is_some();
            if matches!(*between, " in " | " of ") && is_file && !path.contains('*') {
                named.push((*name, *path));
            }
        }
    }
    named
}

/// The methods that a page names with the type: `Type::method` alone in a code span.
fn methods(text: &str) -> Vec<(&str, &str)> {
    let named = spans(text).into_iter().filter_map(|span| {
        let (owner, method) = span.split_once("::")?;
        let is_name = |name: &str| name.chars().all(|c| c.is_alphanumeric() || c == '_');
        let is_type = owner.starts_with(|c: char| c.is_ascii_uppercase()) && is_name(owner);
        let is_method = method.starts_with(|c: char| c.is_ascii_lowercase()) && is_name(method);
        (is_type && is_method).then_some((owner, method))
    });
    named.collect()
}

/// Whether a text has a word, not as a part of a longer word.
fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        !before.ends_with(is_part) && !after.starts_with(is_part)
    })
}

/// Whether one of the sources declares the type and has a function of the method's name.
fn is_method(sources: &BTreeMap<PathBuf, String>, owner: &str, method: &str) -> bool {
    sources.values().any(|text| {
        let kinds = ["struct", "enum", "trait", "type"];
        let mut kinds = kinds.iter();
        let declares = kinds.any(|kind| has_word(text, &format!("{kind} {owner}")));
        declares && has_word(text, &format!("fn {method}"))
    })
}

#[test]
fn functions_named_in_the_documentation_exist() {
    let sources = files(&["rs"]);
    let (mut of_architecture, mut placed, mut of_types) = (0, 0, 0);
    let mut missing = Vec::new();
    for (file, text) in files(&["md"]) {
        // The changelog names what was, too.
        if file == Path::new("CHANGELOG.md") {
            continue;
        }
        let mut note = |what: String| missing.push(format!("{}: {what}", file.display()));
        let named = named_functions(&text);
        if file == Path::new("docs/ARCHITECTURE.md") {
            of_architecture = named.len();
        }
        for (path, function) in named {
            if let Some(reason) = missing_function(&path, function) {
                note(reason);
            }
        }
        for (name, path) in names_in_files(&text) {
            placed += 1;
            let found = fs::read_to_string(workspace::root().join(path));
            if !found.is_ok_and(|text| has_word(&text, name)) {
                note(format!("{path} has no {name}"));
            }
        }
        for (owner, method) in methods(&text) {
            of_types += 1;
            if !is_method(&sources, owner, method) {
                note(format!("no {owner} has a function {method}"));
            }
        }
    }
    assert!(of_architecture >= 20, "{of_architecture} functions");
    assert!(placed > 0 && of_types > 0, "{placed}, {of_types}");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn files_named_in_the_documentation_exist() {
    const FOLDERS: [&str; 10] = [
        "benches/",
        "deploy/",
        "docs/",
        "ggml-backend-vgpu/",
        "host-executor/",
        "host-kernels/",
        "tests/",
        "transport/",
        "vendor/",
        "xtask/",
    ];
    let (mut named, mut missing) = (0, Vec::new());
    for (file, text) in files(&["md"]) {
        // The changelog names what was, too; ggml's own files have such paths as well.
        if file == Path::new("CHANGELOG.md") || file == Path::new("docs/OPS.md") {
            continue;
        }
        for span in spans(&text) {
            let path = span.split(": ").next().unwrap_or_default();
            let is_path = FOLDERS.iter().any(|folder| path.starts_with(folder));
            if is_path && !path.contains(['*', ' ']) {
                named += 1;
                if !workspace::root().join(path).exists() {
                    missing.push(format!("{}: {path}", file.display()));
                }
            }
        }
    }
    assert!(named > 30, "only {named} files are named");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn tests_named_in_the_guarantees_exist() {
    for (file, least) in [
        ("docs/guarantees.md", 25),
        ("docs/SECURITY.md", 25),
        ("docs/life-events.md", 40),
    ] {
        let text = page(file);
        let named = named_functions(&text);
        assert!(named.len() > least, "{file} names {} tests", named.len());
        let missing: Vec<_> = { named.iter() }
            .filter_map(|(file, function)| missing_test(file, function))
            .collect();
        assert!(missing.is_empty(), "{file}:\n{}", missing.join("\n"));
    }
}

#[test]
fn every_promise_of_the_security_page_names_a_test() {
    let text = page("docs/SECURITY.md");
    let (mut promises, mut bare, mut is_of_promises) = (0, Vec::new(), false);
    for (number, line) in prose(&text) {
        let Some(row) = line.strip_prefix("| ") else {
            is_of_promises &= line.starts_with("|-");
            continue;
        };
        let last = row.trim_end_matches('|').rsplit(" | ").next();
        let last = last.unwrap_or_default().trim();
        if last == "shown by" {
            is_of_promises = true;
            continue;
        }
        if !is_of_promises {
            continue;
        }
        promises += 1;
        if named_functions(last).is_empty() {
            bare.push(format!("line {number}: {line}"));
        }
    }
    assert!(promises > 100, "only {promises} promises");
    assert!(bare.is_empty(), "{}", bare.join("\n"));
}

/// A section that promises something in prose has a table that says by which tests it is shown.
#[test]
fn every_section_of_the_security_page_has_a_table_of_tests() {
    const WITHOUT_PROMISES: [&str; 3] = [
        "What was tested",
        "What the tests found",
        "Report a vulnerability",
    ];
    let text = page("docs/SECURITY.md");
    let mut sections: Vec<(&str, bool)> = Vec::new();
    for (_, line) in prose(&text) {
        if let Some(title) = line.strip_prefix("## ") {
            sections.push((title, false));
        } else if line.starts_with("| ") && line.ends_with("| shown by |") {
            sections.last_mut().expect("a section").1 = true;
        }
    }
    let bare: Vec<_> = { sections.iter() }
        .filter(|(title, has_table)| !has_table && !WITHOUT_PROMISES.contains(title))
        .collect();
    assert!(sections.len() > 8 && bare.is_empty(), "{bare:?}");
}

#[test]
fn every_life_event_names_a_test_or_says_why_there_is_none() {
    let text = page("docs/life-events.md");
    let (mut events, mut bare) = (0, Vec::new());
    for (number, line) in prose(&text) {
        let Some(row) = line
            .strip_prefix("| ")
            .filter(|row| !row.starts_with("event |"))
        else {
            continue;
        };
        events += 1;
        let test = row.trim_end_matches('|').rsplit('|').next();
        let test = test.unwrap_or_default().trim();
        // "no test" is followed by a reason.
        let has_reason = test
            .split_once("no test")
            .is_some_and(|(_, why)| why.len() > 10);
        if named_functions(test).is_empty() && !has_reason {
            bare.push(format!("line {number}: {line}"));
        }
    }
    assert!(events > 40, "only {events} events");
    assert!(bare.is_empty(), "{}", bare.join("\n"));
}

#[test]
fn messages_quoted_in_troubleshooting_exist() {
    // A string that goes on in the next line has a backslash and the next line's indentation in it.
    let mut sources = String::new();
    for (file, text) in files(&["rs"]) {
        if file.components().any(|part| part.as_os_str() == "tests") {
            continue;
        }
        let mut pieces = text.split("\\\n");
        sources.push_str(pieces.next().unwrap_or_default());
        pieces.for_each(|piece| sources.push_str(piece.trim_start()));
    }
    let text = page("docs/troubleshooting.md");
    let symptoms = prose(&text).into_iter().filter_map(|(_, line)| {
        let symptom = line.strip_prefix("| ")?.split(" | ").next()?;
        Some(symptom)
    });
    let (mut quoted, mut missing) = (0, Vec::new());
    for symptom in symptoms {
        for message in symptom.split('`').skip(1).step_by(2) {
            // What a program fills in is written as dots or in capitals.
            let fixed = message
                .split("...")
                .flat_map(|piece| piece.split([':', '(', ')']));
            for piece in fixed
                .map(str::trim)
                .filter(|piece| piece.split(' ').count() > 2)
            {
                quoted += 1;
                if !sources.contains(piece) {
                    missing.push(piece);
                }
            }
        }
    }
    assert!(quoted > 8, "only {quoted} messages are quoted");
    assert!(missing.is_empty(), "no program says: {missing:#?}");
}

/// The names that begin with `VGPU_` in a text.
fn variables(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let names = text
        .split(|c| !is_part(c))
        .filter(|name| name.starts_with("VGPU_"));
    names.map(str::to_owned).collect()
}

#[test]
fn every_environment_variable_is_documented() {
    let documented = variables(&page("docs/environment.md"));
    let sources = files(&["rs"]);
    let mut used = BTreeSet::new();
    for (file, text) in &sources {
        let is_shipped = [
            "ggml-backend-vgpu",
            "transport/src",
            "host-executor",
            "host-kernels",
        ]
        .iter()
        .any(|folder| file.starts_with(folder));
        let is_test = { file.components() }.any(|part| {
            matches!(
                part.as_os_str().to_str(),
                Some("tests" | "shim" | "examples" | "benches")
            )
        });
        if is_shipped && !is_test {
            // Only names that are strings by themselves: others are static items and macros.
            let strings = text.split('"').skip(1);
            used.extend(strings.flat_map(variables_alone));
        }
    }
    let undocumented: Vec<_> = { used.iter() }
        .filter(|name| !name.starts_with("VGPU_TEST_"))
        .filter(|name| !documented.contains(*name))
        .collect();
    assert!(
        undocumented.is_empty(),
        "not in docs/environment.md: {undocumented:?}"
    );
    let all: String = sources.into_values().collect();
    let scripts: String = files(&["sh"]).into_values().collect();
    let unused: Vec<_> = { documented.iter() }
        .filter(|name| !all.contains(&format!("\"{name}\"")))
        .filter(|name| !scripts.contains(&format!("${{{name}:")))
        .collect();
    assert!(unused.is_empty(), "no program reads {unused:?}");
    assert!(used.len() > 10, "only {} variables are read", used.len());
}

/// The text itself, if it is a name of a variable.
fn variables_alone(text: &str) -> Option<String> {
    variables(text).pop_first().filter(|name| name == text)
}

#[test]
fn every_flag_of_serve_is_documented() {
    let arguments = page("host-executor/cli/src/serve/args.rs");
    let documented = page("docs/configuration.md");
    let mut flags = 0;
    let mut lines = arguments.lines();
    while let Some(line) = lines.next() {
        if !line.trim_start().starts_with("#[arg(long") {
            continue;
        }
        let field = lines.by_ref().find(|line| line.contains(": "));
        let field = field.expect("a field behind its attribute").trim_start();
        let name = field.split(':').next().unwrap_or_default();
        let name = name.rsplit(' ').next().unwrap_or_default();
        let flag = format!("`--{}", name.replace('_', "-"));
        flags += 1;
        if flag != "`--config" {
            assert!(
                documented.contains(&flag),
                "{flag}` is not in docs/configuration.md"
            );
        }
    }
    assert!(flags > 15, "only {flags} flags were found");
}

#[test]
fn xtask_commands_named_in_the_documentation_exist() {
    let commands = |file: &str| {
        let text = page(file);
        let start = text.find("enum Arguments {").expect("the commands");
        let variants = text[start..]
            .lines()
            .skip(1)
            .take_while(|line| *line != "}");
        let names = variants.filter_map(|line| {
            let name = line.trim().split(['(', ',']).next()?;
            let is_variant = name.starts_with(|c: char| c.is_ascii_uppercase());
            is_variant.then(|| kebab(name))
        });
        names.collect::<BTreeSet<_>>()
    };
    let (known, benches) = (
        commands("xtask/src/main.rs"),
        commands("benches/src/main.rs"),
    );
    assert!(
        known.len() > 8 && benches.len() > 3,
        "{known:?}, {benches:?}"
    );
    let mut named = 0;
    for (file, text) in files(&["md"]) {
        if file == Path::new("CHANGELOG.md") {
            continue;
        }
        for rest in text.split("cargo xtask ").skip(1) {
            let mut words = rest.split(|c: char| !c.is_ascii_lowercase() && c != '-');
            let command = words.next().unwrap_or_default();
            named += 1;
            assert!(
                known.contains(command),
                "{}: cargo xtask {command}",
                file.display()
            );
            let bench = words
                .next()
                .filter(|bench| command == "bench" && !bench.is_empty());
            let is_known = bench.is_none_or(|bench| benches.contains(bench));
            assert!(is_known, "{}: cargo xtask bench {bench:?}", file.display());
        }
    }
    assert!(named > 30, "only {named} commands are named");
}

/// `ops-table` for `OpsTable`.
fn kebab(name: &str) -> String {
    let mut kebab = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !kebab.is_empty() {
            kebab.push('-');
        }
        kebab.push(c.to_ascii_lowercase());
    }
    kebab
}

#[test]
fn prose_is_within_its_columns() {
    let mut long = Vec::new();
    for (file, text) in files(&["md"]) {
        for (number, line) in prose(&text) {
            let is_prose = !line.trim_start().starts_with('|') && line.trim().contains(' ');
            if is_prose && line.chars().count() > MAX_COLUMNS {
                long.push(format!("{}:{number}", file.display()));
            }
            // The other tests look for code spans line by line.
            let is_whole = line.matches('`').count() % 2 == 0;
            assert!(
                is_whole,
                "{}:{number}: a code span goes on in the next line",
                file.display()
            );
        }
    }
    assert!(
        long.is_empty(),
        "lines of more than {MAX_COLUMNS} columns:\n{}",
        long.join("\n")
    );
}

/// The comment of a line, without the marks that begin it: a comment after code, too, if it is
/// between `/*` and `*/`, or in TOML.
fn comment<'a>(line: &'a str, extension: &str) -> Option<&'a str> {
    let whole = line.trim_start();
    if extension == "toml" {
        let after_code = || Some(line.split_once(" # ")?.1);
        return whole.strip_prefix('#').or_else(after_code);
    }
    if let Some(words) = whole.strip_prefix("//") {
        return Some(words.trim_start_matches(['/', '!']));
    }
    let goes_on = || whole.strip_prefix("* ").filter(|_| extension != "rs");
    let after_code = || Some(line.split_once(" /* ")?.1);
    let begins = whole.strip_prefix("/*");
    begins.or_else(goes_on).or_else(after_code)
}

/// The lines of a source with comments that end beyond [`MAX_COLUMNS`], by number. Rows of tables
/// and drawings may be wider.
fn long_comments(text: &str, extension: &str) -> Vec<usize> {
    let lines = (1..).zip(text.lines());
    let long = lines.filter(|(_, line)| {
        let Some(words) = comment(line, extension).map(str::trim) else {
            return false;
        };
        let is_table = words.starts_with('|') || words.contains("─");
        line.chars().count() > MAX_COLUMNS && !is_table && words.contains(' ')
    });
    long.map(|(number, _)| number).collect()
}

#[test]
fn comments_are_within_their_columns() {
    let mut long = Vec::new();
    for extension in ["rs", "cu", "cuh", "h", "cpp", "toml"] {
        let sources = files(&[extension]);
        assert!(!sources.is_empty(), "no file ends in .{extension}");
        for (file, text) in sources {
            let numbers = long_comments(&text, extension).into_iter();
            long.extend(numbers.map(|number| format!("{}:{number}", file.display())));
        }
    }
    assert!(
        long.is_empty(),
        "comments of more than {MAX_COLUMNS} columns:\n{}",
        long.join("\n")
    );
}

#[test]
fn artificial_error_is_detected() {
    let (words, cells) = ("word ".repeat(20), "| ".repeat(60));
    let rust = format!("let x = 1;\n// {words}\n//! {cells}\n//! `a | b` {words}\n");
    assert_eq!(long_comments(&rust, "rs"), [2, 4]);
    let c = format!("/* {words}\n * {words}*/\nint x; /* {words}*/\nint y; {words}\n");
    assert_eq!(long_comments(&c, "h"), [1, 2, 3]);
    let toml = format!("# {words}\nx = 1 # {words}\n# {cells}\ny = \"{words}\"\n");
    assert_eq!(long_comments(&toml, "toml"), [1, 2]);
    assert_eq!(
        anchor(" A process for each guest"),
        "a-process-for-each-guest"
    );
    assert_eq!(anchor("`vgpu ps`"), "vgpu-ps");
    let text = "see `transport/src/lib.rs: no_such_function`\n```\n`a.rs: b`\n```\n";
    let named = named_functions(text);
    assert_eq!(
        named,
        [("transport/src/lib.rs".to_owned(), "no_such_function")]
    );
    assert!(missing_function(&named[0].0, named[0].1).is_some());
    assert!(missing_function("transport/src/no_such_file.rs", "f").is_some());
    let file = "transport/src/link/endpoint.rs";
    assert!(missing_function(file, "Endpoint::defaults").is_none());
    assert!(missing_function(file, "NoSuchType::defaults").is_some());
    assert!(missing_test(file, "defaults").is_some());
    let text = "`gone` in `transport/src/lib.rs`, `ring` of `b.rs`; `Plan::gone` and `a::b`";
    assert_eq!(names_in_files(text), [("gone", "transport/src/lib.rs")]);
    assert_eq!(methods(text), [("Plan", "gone")]);
    assert!(has_word("fn gone(", "gone") && !has_word("fn gone_by(", "gone"));
    let sources = BTreeMap::from([(
        PathBuf::from("a.rs"),
        "pub trait Plan { fn profile(&self); }".to_owned(),
    )]);
    assert!(is_method(&sources, "Plan", "profile") && !is_method(&sources, "Plan", "timeline"));
    let programs = "tests/system/src/parts/programs.rs";
    assert!(missing_test(programs, "run").is_none());
    assert!(missing_test(programs, "gather").is_some());
}
