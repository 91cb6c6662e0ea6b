//! C files in ggml's style, as text.

use std::collections::BTreeMap;

/// A line without its comment and without spaces around it.
pub(crate) fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default().trim()
}

/// The functions of a file, in which a definition begins and ends in the first column: their lines
/// by name, the declaration included, without comments and blank lines.
pub(crate) fn functions(source: &str) -> BTreeMap<&str, Vec<&str>> {
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
                all.push(code);
            }
            next = lines.next();
        }
        if is_open {
            functions.insert(name, all);
        }
    }
    functions
}

/// The constant arrays of a file whose definition begins and ends in the first column: their lines
/// by name, without comments and blank lines.
pub(crate) fn arrays(source: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut arrays = BTreeMap::new();
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        let begins = line.starts_with(|c: char| c.is_ascii_alphabetic());
        let declared = code(line)
            .strip_suffix("= {")
            .and_then(|declared| declared.split_once('['))
            .filter(|_| begins);
        let Some((before, _)) = declared else {
            continue;
        };
        let name = before.rsplit([' ', '*']).next().unwrap_or_default();
        let elements = { lines.by_ref() }.take_while(|line| *line != "};");
        let elements = elements.map(code).filter(|line| !line.is_empty());
        arrays.insert(name, elements.collect());
    }
    arrays
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_have_their_elements_and_functions_their_lines() {
        let source = "\
static const char * NAMES[COUNT] = {
    \"NONE\",

    \"DUP\", // a copy
};

static_assert(COUNT == 2, \"COUNT != 2\");
static const struct traits TRAITS[COUNT] = {
    [A] = {
        .size = 1,
    },
};

const char * name(int i) {
    int local[2] = {
        1, 2
    };
    return NAMES[i];
}
";
        let arrays = arrays(source);
        assert_eq!(arrays.keys().collect::<Vec<_>>(), [&"NAMES", &"TRAITS"]);
        assert_eq!(arrays["NAMES"], ["\"NONE\",", "\"DUP\","]);
        assert_eq!(arrays["TRAITS"], ["[A] = {", ".size = 1,", "},"]);
        assert_eq!(functions(source).keys().collect::<Vec<_>>(), [&"name"]);
    }
}
