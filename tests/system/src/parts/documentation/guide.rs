//! The commands of some sections of a page.

use std::fs;

use anyhow::{Context as _, Result, ensure};

use xtask_common::markdown::{self, Block};
use xtask_common::workspace;

/// The blocks of shell and of TOML in some sections of a page. Each is taken once, and none may be
/// left: a command that is added to a page is either followed or left out with a reason.
#[derive(Debug)]
pub(super) struct Guide {
    page: &'static str,
    blocks: Vec<Block>,
}

impl Guide {
    /// Reads the sections with these headings of `docs/PAGE`.
    ///
    /// # Errors
    /// If the page has no such section.
    pub(super) fn open(page: &'static str, sections: &[&str]) -> Result<Guide> {
        let path = workspace::root().join("docs").join(page);
        let text = fs::read_to_string(&path).with_context(|| format!("reading {page}"))?;
        Guide::parse(page, &text, sections)
    }

    fn parse(page: &'static str, text: &str, sections: &[&str]) -> Result<Guide> {
        let mut blocks = markdown::blocks(text);
        for section in sections {
            let is_there = blocks.iter().any(|block| block.heading == *section);
            ensure!(is_there, "{page} has no section {section:?} with commands");
        }
        blocks.retain(|block| {
            sections.contains(&block.heading.as_str())
                && ["sh", "toml"].contains(&block.language.as_str())
        });
        Ok(Guide { page, blocks })
    }

    /// Takes the first block that has the words `mark`.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn take(&mut self, mark: &str) -> Result<String> {
        let at = self
            .blocks
            .iter()
            .position(|block| block.text.contains(mark));
        let at = at.with_context(|| format!("{} has no command {mark:?}", self.page))?;
        Ok(self.blocks.remove(at).text)
    }

    /// Takes the first block that has the words `mark`, with other names: each name must be there.
    ///
    /// # Errors
    /// If there is no such block, or a name is not in it.
    pub(super) fn take_with(&mut self, mark: &str, names: &[(&str, &str)]) -> Result<String> {
        let mut text = self.take(mark)?;
        for (name, other) in names {
            ensure!(
                text.contains(name),
                "{}: {name:?} is not in\n{text}",
                self.page
            );
            text = text.replace(name, other);
        }
        Ok(text)
    }

    /// Leaves out the block that has the words `mark`, which cannot run here: `reason` says why.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn leave_out(&mut self, mark: &str, reason: &str) -> Result<()> {
        self.take(mark)
            .map(drop)
            .with_context(|| format!("left out, since {reason}"))
    }

    /// # Errors
    /// If a block has not been taken.
    pub(super) fn finish(self) -> Result<()> {
        let left = self.blocks.first();
        let left = left.map(|block| format!("{}: {}", block.heading, block.text));
        ensure!(
            left.is_none(),
            "{} has a command that no test follows: {}",
            self.page,
            left.unwrap_or_default()
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "## First\n```sh\nstart one\n```\n```\nsaid\n```\n## Second\n```sh\nstop A\n\
                        ```\n## Third\n```sh\nother\n```\n";

    #[test]
    fn each_command_of_the_sections_is_taken_once() {
        let open = || Guide::parse("page.md", PAGE, &["First", "Second"]).unwrap();
        let mut guide = open();
        assert_eq!(
            guide.take_with("stop", &[("A", "vm1")]).unwrap(),
            "stop vm1\n"
        );
        guide.take("stop").unwrap_err();
        guide.take("other").unwrap_err();
        let left = open().finish().unwrap_err().to_string();
        assert!(left.contains("start one"), "{left}");
        assert!(guide.take_with("start", &[("two", "three")]).is_err());
        guide.finish().unwrap();
        assert!(Guide::parse("page.md", PAGE, &["Fourth"]).is_err());
    }
}
