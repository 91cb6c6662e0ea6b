//! Pages of Markdown, and whether their links resolve.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result};

/// Every file below `root` with one of these extensions, with its text; paths are relative to
/// `root`. Leaves out hidden files, builds, and a folder `shared`.
///
/// # Errors
/// If a folder or a file cannot be read.
pub fn files_below(root: &Path, extensions: &[&str]) -> Result<BTreeMap<PathBuf, String>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let reading = || format!("reading {}", folder.display());
        for entry in fs::read_dir(&folder).with_context(reading)? {
            let path = entry.with_context(reading)?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let name = name.unwrap_or_default();
            let is_ours = !name.starts_with('.') && name != "target" && name != "shared";
            let extension = path.extension().and_then(|extension| extension.to_str());
            if path.is_dir() && !path.is_symlink() && is_ours {
                folders.push(path);
            } else if extension.is_some_and(|extension| extensions.contains(&extension)) {
                let text = fs::read_to_string(&path);
                let text = text.with_context(|| format!("reading {}", path.display()))?;
                found.insert(path.strip_prefix(root)?.to_owned(), text);
            }
        }
    }
    Ok(found)
}

/// The lines of a page outside of code blocks, with their numbers.
pub fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut in_code = false;
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code {
            lines.push((index + 1, line));
        }
    }
    lines
}

/// A block of code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The heading of its section, without `#`; empty before the first.
    pub heading: String,
    /// The language that the block names; may be empty.
    pub language: String,
    /// The lines, without the indentation that the block has in a list.
    pub text: String,
}

/// The blocks of code of a page, in their order.
pub fn blocks(text: &str) -> Vec<Block> {
    let mut heading = "";
    let mut blocks = Vec::new();
    let mut open: Option<(usize, Block)> = None;
    for line in text.lines() {
        let trimmed = line.trim_start();
        match (trimmed.strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => blocks.extend(open.take().map(|(_, block)| block)),
            (Some(language), None) => {
                let block = Block {
                    heading: heading.to_owned(),
                    language: language.to_owned(),
                    text: String::new(),
                };
                open = Some((line.len() - trimmed.len(), block));
            }
            (None, Some((indentation, block))) => {
                let blank = line.len() - trimmed.len();
                block.text.push_str(&line[blank.min(*indentation)..]);
                block.text.push('\n');
            }
            (None, None) if line.starts_with('#') => heading = line.trim_matches(['#', ' ']),
            (None, None) => {}
        }
    }
    blocks
}

/// The anchor that GitHub gives a heading.
pub fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|c| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text)
        .into_iter()
        .filter(|(_, line)| line.starts_with('#'));
    headings
        .map(|(_, line)| anchor(line.trim_start_matches('#')))
        .collect()
}

/// A path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}

/// The relative links of pages.
#[derive(Debug, Default)]
pub struct Links {
    /// How many there are.
    pub count: usize,
    /// Those that lead nowhere: page, line and link.
    pub broken: Vec<String>,
}

/// Looks for what the relative links of `pages` name, in the folder `root`, to which the paths of
/// the pages are relative.
pub fn check_links(root: &Path, pages: &BTreeMap<PathBuf, String>) -> Links {
    let mut links = Links::default();
    for (file, text) in pages {
        for (number, line) in prose(text) {
            for link in line.split("](").skip(1) {
                let target = link.split(')').next().unwrap_or_default();
                if target.contains("://") {
                    continue;
                }
                links.count += 1;
                let (path, fragment) = target.split_once('#').unwrap_or((target, ""));
                let place = match path {
                    "" => file.clone(),
                    path => normal(&file.parent().unwrap_or(Path::new("")).join(path)),
                };
                let is_broken = match pages.get(&place) {
                    Some(page) => !fragment.is_empty() && !anchors(page).contains(fragment),
                    None => !root.join(&place).exists(),
                };
                if is_broken {
                    let file = file.display();
                    links.broken.push(format!("{file}:{number}: {target}"));
                }
            }
        }
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_their_headings_and_no_indentation() {
        let page = "# Page\n```\nfirst\n```\n## Part\n1. Step:\n\n   ```sh\n   # a comment\n   \
                    a \\\n       b\n\n   c\n   ```\n";
        let block = |heading: &str, language: &str, text: &str| Block {
            heading: heading.into(),
            language: language.into(),
            text: text.into(),
        };
        assert_eq!(
            blocks(page),
            [
                block("Page", "", "first\n"),
                block("Part", "sh", "# a comment\na \\\n    b\n\nc\n"),
            ]
        );
    }

    #[test]
    fn broken_links_and_anchors_are_found() {
        let page = "# A heading\n[a](#a-heading) [b](#no-heading)\n[c](sub/b.md) [d](../c.md)\n\
                    [e](https://example.org)\n```\n[f](nowhere.md)\n```\n";
        let pages = BTreeMap::from([
            (PathBuf::from("a.md"), page.to_owned()),
            (PathBuf::from("sub/b.md"), "[a](../a.md#a-heading)".into()),
        ]);
        let links = check_links(Path::new("/nowhere"), &pages);
        assert_eq!(links.count, 5);
        assert_eq!(links.broken, ["a.md:2: #no-heading", "a.md:3: ../c.md"]);
    }
}
