//! The commands of some sections of a page.

use std::fs;

use anyhow::{Context as _, Result, ensure};

use xtask_common::markdown::{self, Block};
use xtask_common::workspace;

/// The pages that tests follow, with those of their sections that no test follows, and why.
#[cfg(test)]
const PAGES: [(&str, &[(&str, &str)]); 6] = [
    (
        "quickstart.md",
        &[("A demo from a clone", "the part `demo` runs it")],
    ),
    (
        "install.md",
        &[("Install on Fedora and RHEL", "there is no such system here")],
    ),
    ("ollama.md", &[("Verify", "the block is a line of a log")]),
    ("proxmox.md", &[("LXC", "there is no `pct` here")]),
    ("tcp-tls.md", &[]),
    ("containers-kubernetes.md", &[]),
];

/// The sections that the tests follow, of each page.
const FOLLOWED: [(&str, &[&str]); 6] = [
    ("quickstart.md", &["One machine, your own model"]),
    (
        "install.md",
        &[
            "Install with install.sh",
            "Install on Debian and Ubuntu",
            "Install from the archive",
            "Start the executor",
            "Remove",
        ],
    ),
    (
        "ollama.md",
        &["Install", "When the executor stops", "Updates and removal"],
    ),
    (
        "proxmox.md",
        &[
            "Host",
            "Guest",
            "Boot, restarts, and an executor that is down",
        ],
    ),
    (
        "tcp-tls.md",
        &[
            "Certificates",
            "Host",
            "Guest",
            "Renew a certificate",
            "Revoke a certificate",
        ],
    ),
    (
        "containers-kubernetes.md",
        &[
            "Docker and Podman",
            "The image of the executor",
            "The image of llama-server",
            "The device plugin",
            "With kustomize",
            "With Helm",
            "Dynamic Resource Allocation",
        ],
    ),
];

/// The languages of blocks with commands or a configuration.
const LANGUAGES: [&str; 2] = ["sh", "toml"];

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
        let known = FOLLOWED.iter().find(|(known, _)| *known == page);
        for section in sections {
            let is_listed = known.is_none_or(|(_, listed)| listed.contains(section));
            ensure!(
                is_listed,
                "{page}: {section:?} is not in the list of sections"
            );
            let is_there = blocks.iter().any(|block| block.heading == *section);
            ensure!(is_there, "{page} has no section {section:?} with commands");
        }
        blocks.retain(|block| {
            sections.contains(&block.heading.as_str())
                && LANGUAGES.contains(&block.language.as_str())
        });
        Ok(Guide { page, blocks })
    }

    /// Takes the next block, which has the words `mark`.
    ///
    /// # Errors
    /// If the next block does not have these words.
    pub(super) fn take(&mut self, mark: &str) -> Result<String> {
        let next = self.blocks.first();
        let next = next.with_context(|| format!("{} has no command {mark:?}", self.page))?;
        ensure!(
            next.text.contains(mark),
            "{}: {mark:?} is not in the next commands:\n{}",
            self.page,
            next.text
        );
        Ok(self.blocks.remove(0).text)
    }

    /// Takes the first block that has the words `mark`, before its turn: `reason` says why.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn take_early(&mut self, mark: &str, reason: &str) -> Result<String> {
        let at = { self.blocks.iter() }.position(|block| block.text.contains(mark));
        let at = at.with_context(|| {
            let page = self.page;
            format!("{page} has no command {mark:?}, which is taken early, since {reason}")
        })?;
        Ok(self.blocks.remove(at).text)
    }

    /// Takes the next block, which has the words `mark`, with other names: each name must be there.
    ///
    /// # Errors
    /// If the next block does not have these words, or a name is not in it.
    pub(super) fn take_with(&mut self, mark: &str, names: &[(&str, &str)]) -> Result<String> {
        let text = self.take(mark)?;
        self.with(text, names)
    }

    /// Commands of the page with other names.
    ///
    /// # Errors
    /// If a name is not in them.
    pub(super) fn with(&self, mut text: String, names: &[(&str, &str)]) -> Result<String> {
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

    /// Leaves out the next block, which has the words `mark` and cannot run here: `reason` says
    /// why.
    ///
    /// # Errors
    /// If the next block does not have these words.
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
    fn each_command_of_the_sections_is_taken_once_and_in_its_turn() {
        let open = || Guide::parse("page.md", PAGE, &["First", "Second"]).unwrap();
        let mut guide = open();
        guide.take("stop").unwrap_err();
        guide.take_with("start", &[("two", "three")]).unwrap_err();
        assert_eq!(
            guide.take_with("stop", &[("A", "vm1")]).unwrap(),
            "stop vm1\n"
        );
        guide.take("stop").unwrap_err();
        guide.finish().unwrap();
        let mut guide = open();
        guide.take_early("other", "it is elsewhere").unwrap_err();
        guide.take_early("stop", "it is short").unwrap();
        let left = guide.finish().unwrap_err().to_string();
        assert!(left.contains("start one"), "{left}");
        assert!(Guide::parse("page.md", PAGE, &["Fourth"]).is_err());
    }

    /// A section with commands that is added to a page is followed, or has a reason.
    #[test]
    fn every_section_with_commands_is_listed() {
        let others = ["", "ini", "xml", "yaml"];
        for ((page, left_out), (same, followed)) in PAGES.iter().zip(&FOLLOWED) {
            assert_eq!(page, same);
            let text = fs::read_to_string(workspace::root().join("docs").join(page)).unwrap();
            let blocks = markdown::blocks(&text);
            for Block {
                heading, language, ..
            } in &blocks
            {
                let is_command = LANGUAGES.contains(&language.as_str());
                assert!(
                    is_command || others.contains(&language.as_str()),
                    "{page}: a block in {language:?}"
                );
                let heading = heading.as_str();
                let listed = usize::from(followed.contains(&heading))
                    + left_out.iter().filter(|(one, _)| *one == heading).count();
                assert!(listed == 1 || !is_command, "{page}: {heading}: {listed}");
            }
            let sections = followed.iter().chain(left_out.iter().map(|(one, _)| one));
            for section in sections {
                assert!(
                    blocks.iter().any(|block| block.heading == *section),
                    "{section}"
                );
            }
        }
    }
}
